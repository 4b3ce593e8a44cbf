"""Problems with the settings of runs whose model classifies documents or tokens, and its padding token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments
from transformers.trainer_utils import align_special_tokens

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.data.labels import HeadTask, Problem
from hf_longctx.hf.data.streams.sources import is_stream
from hf_longctx.hf.models.heads.kinds import inner_model
from hf_longctx.runtime.core.loss import OwnLogit


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
    if config.token_metrics == "on":
        problems.append(
            f"token_metrics='on' counts next tokens, which a model that classifies {task.kind}s does not predict; leave it out, "
            f"and give the trainer compute_metrics"
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


def align_padding(task: HeadTask, model: Any, processing_class: Any) -> None:
    """Gives the config of a model that classifies documents the special tokens of its tokenizer, as `Trainer.train` does.

    Labels stand on the last token that is no padding, so this comes before `task_of` reads the padding token. task: its kind
    tells whether the model classifies documents.
    """
    if task.kind == "document" and isinstance(processing_class, PreTrainedTokenizerBase | ProcessorMixin):
        align_special_tokens(inner_model(model), processing_class)


def padding_problems(task: HeadTask, model: Any, processing_class: Any) -> list[str]:
    """The problem with a padding token that has changed since the run's labels were placed by it."""
    if task.kind != "document":
        return []
    align_padding(task, model, processing_class)
    current = inner_model(model).config.get_text_config().pad_token_id
    if current == task.pad_token_id:
        return []
    return [
        f"the padding token of the model or its tokenizer was changed from {task.pad_token_id} to {current} after the start, and "
        f"labels of documents stand on the last token that is no padding; change it back, or make a new trainer"
    ]
