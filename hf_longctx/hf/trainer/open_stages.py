"""Decides what a run on several nodes does whose user left `stages` open: it plans stages unless something would break.

Stages across nodes are often faster, but each rank then holds a part of the model: code of the user's own would meet a part, and
files of all ranks must be in one folder. With one stage all of that works, so one reason is enough to keep it.
"""

from __future__ import annotations

import inspect
import os
import types
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainingArguments
from transformers.integrations.integration_utils import DVCLiveCallback, WandbCallback

from hf_longctx.hf.checkpoints.deferred import source_of
from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.data.streams.sources import is_stream
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.spec import decoder_layers
from hf_longctx.hf.ranks.agreement import gather_objects, raise_together
from hf_longctx.hf.ranks.launch import LaunchEnvironment
from hf_longctx.hf.rules.trl import is_scored
from hf_longctx.hf.run.placement import unstaged_states

# packages whose trainers and callbacks read nothing of the model but what its stages give them
_KNOWN_CALLBACKS = ("hf_longctx.", "transformers.")
_KNOWN_TRAINERS = (*_KNOWN_CALLBACKS, "trl.", "builtins.")
# the only callbacks of TRL for users that read nothing of the model
_KNOWN_OF_TRL = ("RichProgressCallback",)
# trackers that save the whole model when the training ends: name in `report_to` -> class, and variable with the values that ask
# for it; other trackers copy files of checkpoints
_SAVING_TRACKERS = {
    "wandb": (WandbCallback, "WANDB_LOG_MODEL", ("checkpoint", "end")),
    "dvclive": (DVCLiveCallback, "HF_DVCLIVE_LOG_MODEL", ("1", "on", "yes", "true")),
}
# entries of a class that only reserve a place in its instances
_PLACES = (types.GetSetDescriptorType, types.MemberDescriptorType)
# strategies after which the last weights are in a checkpoint, whatever the script does with the model
_SAVING = ("steps", "epoch")

Problems = Callable[[LongContextConfig], list[str]]


def open_stages(
    config: LongContextConfig, reasons: Iterator[str], output_dir: str | None, control: dist.ProcessGroup | None
) -> tuple[LongContextConfig, str]:
    """The config with stages "auto" if the user left them open on several nodes, and a line that says so.

    reasons: those of this rank to keep one stage, looked for only if the choice is open. With one on any rank, the config is
    unchanged, which means one stage, and the line has the reason. The line is empty on one node. Raises ValueError on every rank
    if `stages` differs between ranks. Collective over the ranks of `control`.
    """
    if not _has_nodes() or control is None:
        return config, ""
    # later, a rank that left them open would look like one that asked for what was chosen
    raise_together([], control, alike={"stages": config.stages})
    if config.stages is not None:
        return config, ""
    found = gather_objects(next(reasons, ""), control)
    reason = next(filter(None, found), "")
    if not reason and not _share_folder(Path(output_dir or "."), control):
        reason = f"its ranks do not see one folder {output_dir}, where stages join their files"
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


def one_stage_reasons(
    config: LongContextConfig,
    trainer: type,
    facts: ModelFacts,
    args: TrainingArguments,
    given: Mapping[str, Any],
    problems_of: Problems,
) -> Iterator[str]:
    """Yields reasons to keep one stage if the user did not ask for more.

    given: the trainer's other arguments. problems_of: problems of the run under another config.
    """
    if is_scored(trainer):
        yield f"{trainer.__name__} draws its own batches, whose lengths are unknown"
    elif given.get("train_dataset") is None or is_stream(given["train_dataset"]):
        yield "the lengths of the training set are unknown"
    if facts.loaded_ranges is not None or source_of(facts.base) is not None:
        yield "the model was not loaded whole"
    if code := _own_code(trainer, given):
        yield f"{code} may use trainer.model, of which each rank would hold a part"
    if tracker := _saving_tracker(args.report_to, given.get("callbacks") or ()):
        yield f"{tracker} saves trainer.model, of which each rank would hold a part"
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    if strategy not in _SAVING:
        yield f"save_strategy={strategy!r} leaves the trained weights in trainer.model alone"
    yield from _unstaged_checkpoints(args)
    with_one = set(problems_of(replace(config, stages=1)))
    yield from (problem for problem in problems_of(replace(config, stages="auto")) if problem not in with_one)
    _, layers = decoder_layers(facts.model)
    idle = [number for number, layer in enumerate(layers) if not any(each.requires_grad for each in layer.parameters())]
    if idle:
        yield f"layer {idle[0]} has no weight that is trained, and a stage needs one"


def _own_code(trainer: type, given: Mapping[str, Any]) -> str:
    """Names a class of the user's own with code that runs during the training; empty if there is none."""
    for cls in trainer.__mro__:
        if not _is_of(cls, _KNOWN_TRAINERS) and any(map(_is_code, vars(cls).values())):
            return cls.__name__
    kinds = [_class_of(each) for each in given.get("callbacks") or ()]
    of_trl = [kind for kind in kinds if _is_of(kind, ("trl.",)) and kind.__name__ in _KNOWN_OF_TRL]
    return next((kind.__name__ for kind in kinds if kind not in of_trl and not _is_of(kind, _KNOWN_CALLBACKS)), "")


def _is_of(cls: type, packages: tuple[str, ...]) -> bool:
    return f"{cls.__module__}.".startswith(packages)


def _is_code(value: object) -> bool:
    """Whether an entry of a class runs: functions, properties and other descriptors, but no class that it names."""
    runs = callable(value) or hasattr(type(value), "__get__")
    return runs and not inspect.isclass(value) and not isinstance(value, _PLACES)


def _class_of(callback: object) -> type:
    """The class of a callback; a trainer also takes the class itself."""
    return callback if isinstance(callback, type) else type(callback)


def _saving_tracker(report_to: Sequence[str] | str | None, callbacks: Sequence[object]) -> str:
    """Names a tracker that was asked to save the model itself; empty if there is none."""
    for name, (cls, variable, values) in _SAVING_TRACKERS.items():
        own = [each for each in callbacks if issubclass(_class_of(each), cls)]
        is_asked = os.environ.get(variable, "").lower() in values and (own or name in (report_to or ()))
        if is_asked or any(getattr(each, "_log_model", None) is True for each in own):
            return f"{cls.__name__} (with {variable}, or log_model)"
    return ""


def _unstaged_checkpoints(args: TrainingArguments) -> Iterator[str]:
    """Yields checkpoints from which a training may go on and whose optimizer stages cannot read."""
    named = args.resume_from_checkpoint
    folders = [Path(named)] if isinstance(named, str) else []
    for folder in [*folders, *sorted(Path(args.output_dir or ".").glob("checkpoint-*"))]:
        # a damaged checkpoint, or one that this rank may not read, is found when it is chosen
        with suppress(OSError, ValueError):
            if problem := unstaged_states(str(folder)):
                yield f"{folder} holds {problem}"


def _is_seen(path: Path) -> bool:
    """Whether this rank sees a file; a folder that it may not read has none."""
    with suppress(OSError):
        return path.exists()
    return False


def _share_folder(folder: Path, control: dist.ProcessGroup) -> bool:
    """Whether all ranks see what the first one writes to `folder`. Collective."""
    name = gather_objects(f".longctx-{uuid.uuid4().hex}", control)[0]
    is_first = dist.get_rank() == 0
    # whoever writes there later says why it cannot
    with suppress(OSError):
        if is_first:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
    # after this exchange the file is there
    gather_objects(None, control)
    found = all(gather_objects(_is_seen(folder / name), control))
    if is_first:
        with suppress(OSError):
            (folder / name).unlink()
    return found
