"""Problems with the settings of runs whose model classifies documents or tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from transformers import TrainingArguments

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.data.labels.task import HeadTask, Problem
from hf_longctx.hf.data.streaming import is_stream
from hf_longctx.runtime.core.value_losses import OwnLogit


def classifier_problems(
    task: HeadTask, config: LongContextConfig, args: TrainingArguments, datasets: Mapping[str, Any], token_loss: Any
) -> list[str]:
    """Problems with settings that a classifier does not obey; empty for a language model. token_loss: the user's, or None."""
    if task.kind == "next_token":
        return []
    if task.problem not in get_args(Problem):
        return [f"problem_type of the model's config is {task.problem!r}; set it to one of {', '.join(get_args(Problem))}"]
    problems = [
        f"{name} is an iterable dataset, which is not supported for a model that classifies {task.kind}s; pass a map-style one"
        for name, dataset in datasets.items()
        if dataset is not None and is_stream(dataset)
    ]
    if task.kind == "document" and config.long_sequences == "split":
        problems.append(
            "long_sequences='split' makes several documents of one row, but a row has one label; use 'truncate' or 'error'"
        )
    if task.has_values and args.label_smoothing_factor:
        problems.append(
            f"label_smoothing_factor={args.label_smoothing_factor!r} smooths classes, but labels of problem_type "
            f"{task.problem!r} are numbers; leave it out"
        )
    if task.has_values and not (token_loss is None or isinstance(token_loss, OwnLogit)):
        problems.append(
            f"token_loss gets classes, but labels of problem_type {task.problem!r} are numbers; leave it out, or set "
            f"problem_type of the config to 'single_label_classification'"
        )
    return problems
