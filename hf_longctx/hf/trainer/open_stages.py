"""Decides what a run on several nodes does whose user left `stages` open: it plans stages unless something would break.

Stages across nodes are often faster, but each rank then holds a part of the model: code of the user's own would meet a part, and
files of all ranks must be in one folder. With one stage all of that works, so one reason is enough to keep it.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainingArguments

from hf_longctx.hf.checkpoints.deferred import source_of
from hf_longctx.hf.checkpoints.manifest import OPTIMIZER_FILE
from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.data.streams.sources import is_stream
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.spec import decoder_layers
from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.hf.ranks.launch import LaunchEnvironment
from hf_longctx.hf.rules.trl import is_scored

# packages whose trainers and callbacks read nothing of the model but what its stages give them
_KNOWN = ("hf_longctx.", "transformers.", "trl.", "builtins")
# strategies after which the last weights are in a checkpoint, whatever the script does with the model
_SAVING = ("steps", "epoch")

Problems = Callable[[LongContextConfig], list[str]]


def open_stages(
    config: LongContextConfig,
    trainer: type,
    facts: ModelFacts,
    args: TrainingArguments,
    given: Mapping[str, Any],
    *,
    problems_of: Problems,
    control: dist.ProcessGroup | None,
) -> tuple[LongContextConfig, str]:
    """The config with stages "auto" if the user left them open on several nodes, and a line that says so.

    With a reason against them on any rank, the config is unchanged, which means one stage, and the line has the reason. The line
    is empty on one node. given: the trainer's other arguments. problems_of: problems of the run under another config. Collective
    over the ranks of `control`.
    """
    if not _has_nodes() or control is None:
        return config, ""
    # a rank with other settings, which are refused later, must not leave the others alone in the exchange
    is_open, is_shared = config.stages is None, _share_folder(Path(args.output_dir or "."), control)
    reasons = _reasons(config, trainer, facts, args, given, problems_of) if is_open else iter(())
    reason = next(
        reasons, "" if is_shared else f"its ranks do not see one folder {args.output_dir}, where stages join their files"
    )
    reason = next(filter(None, gather_objects(reason, control)), "")
    if not is_open:
        return config, ""
    if reason:
        return config, one_stage_line(config, reason)
    return replace(config, stages="auto"), (
        "ranks are on several nodes, so pipeline stages are as many as are predicted to be fastest for a sample step; with two "
        "or more, trainer.model is a part of the model, and trainer.save_model writes all of it (stages=1 keeps it whole)"
    )


def one_stage_line(config: LongContextConfig, reason: str) -> str:
    """Says why there is one stage although ranks are on several nodes; empty on one node, and if the user asks for a number."""
    if config.stages is not None or not _has_nodes():
        return ""
    return f"one pipeline stage, although ranks are on several nodes: {reason} (set stages for another choice)"


def _has_nodes() -> bool:
    launch = LaunchEnvironment.read()
    return launch.ranks_per_node < launch.num_ranks


def _reasons(
    config: LongContextConfig,
    trainer: type,
    facts: ModelFacts,
    args: TrainingArguments,
    given: Mapping[str, Any],
    problems_of: Problems,
) -> Iterator[str]:
    """Yields reasons to keep one stage if the user did not ask for more."""
    if is_scored(trainer):
        yield f"{trainer.__name__} draws its own batches, whose lengths are unknown"
    elif given.get("train_dataset") is None or is_stream(given["train_dataset"]):
        yield "the lengths of the training set are unknown"
    if facts.loaded_ranges is not None or source_of(facts.base) is not None:
        yield "the model was not loaded whole"
    if code := _own_code(trainer, given):
        yield f"{code} may use trainer.model, of which each rank would hold a part"
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    if strategy not in _SAVING:
        yield f"save_strategy={strategy!r} leaves the trained weights in trainer.model alone"
    if folder := _unnamed_states(args):
        yield f"the optimizer in {folder} is one of a run without stages and shards, whose states have no names"
    with_one = set(problems_of(replace(config, stages=1)))
    yield from (problem for problem in problems_of(replace(config, stages="auto")) if problem not in with_one)
    _, layers = decoder_layers(facts.model)
    idle = [number for number, layer in enumerate(layers) if not any(each.requires_grad for each in layer.parameters())]
    if idle:
        yield f"layer {idle[0]} has no weight that is trained, and a stage needs one"


def _own_code(trainer: type, given: Mapping[str, Any]) -> str:
    """Names a class of the user's own with code that runs during the training; empty if there is none."""
    for cls in trainer.__mro__:
        if not _is_known(cls) and any(inspect.isroutine(value) for value in vars(cls).values()):
            return cls.__name__
    return next((type(each).__name__ for each in given.get("callbacks") or () if not _is_known(type(each))), "")


def _is_known(cls: type) -> bool:
    return f"{cls.__module__}.".startswith(_KNOWN)


def _unnamed_states(args: TrainingArguments) -> str:
    """The checkpoint from which a training may go on and whose optimizer stages cannot read; empty if there is none."""
    named = args.resume_from_checkpoint
    folders = [Path(named)] if isinstance(named, str) else []
    folders += sorted(Path(args.output_dir or ".").glob("checkpoint-*"))
    return next((str(folder) for folder in folders if (folder / OPTIMIZER_FILE).exists()), "")


def _share_folder(folder: Path, control: dist.ProcessGroup) -> bool:
    """Whether all ranks see what the first one writes to `folder`. Collective."""
    name = gather_objects(f".longctx-{uuid.uuid4().hex}", control)[0]
    is_first = dist.get_rank() == 0
    try:
        if is_first:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
    except OSError:
        # whoever writes there says why it cannot
        pass
    # after this exchange the file is there
    gather_objects(None, control)
    found = all(gather_objects((folder / name).exists(), control))
    if is_first:
        (folder / name).unlink(missing_ok=True)
    return found
