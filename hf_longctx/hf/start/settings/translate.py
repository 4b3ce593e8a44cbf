"""Translates settings of other systems that mean the same as ours: accelerate's FSDP, and activation checkpointing."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from transformers import TrainingArguments

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.ranks.launch import LaunchEnvironment, without_fsdp

logger = logging.getLogger(__name__)

# names and numbers of FSDP's strategies -> how parameters live on the ranks, and whether each node has a copy
_STRATEGIES = {
    "true": ("sharded", False),
    "full_shard": ("sharded", False),
    "1": ("sharded", False),
    "false": ("gathered_per_round", False),
    "shard_grad_op": ("gathered_per_round", False),
    "2": ("gathered_per_round", False),
    "no_shard": ("replicated", False),
    "3": ("replicated", False),
    "hybrid_shard": ("sharded", True),
    "4": ("sharded", True),
    "hybrid_shard_zero2": ("gathered_per_round", True),
    "_hybrid_shard_zero2": ("gathered_per_round", True),
    "5": ("gathered_per_round", True),
}
# fields that make `Trainer` do what plans do, and the values with which it does not
_NO_CHECKPOINTING: dict[str, Any] = {
    "gradient_checkpointing": False,
    "activation_checkpointing": False,
    "gradient_checkpointing_kwargs": None,
    "activation_checkpointing_kwargs": None,
}
_FSDP: dict[str, Any] = {"fsdp": None, "fsdp_plugin_args": None}


@dataclass(frozen=True)
class Translation:
    """A config with the settings of other systems in our words, lines that say so, and problems with what has no such words."""

    config: LongContextConfig
    lines: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Fsdp:
    """An FSDP configuration. origin: where it was found."""

    origin: str
    strategy: str
    offloads: bool
    recomputes: bool
    is_xla: bool = False
    loads_on_first: bool = False


def translate(config: LongContextConfig, args: TrainingArguments, launch: LaunchEnvironment) -> Translation:
    """The settings of `args` and of the launcher's FSDP configuration in the words of `config`, which keeps what it sets."""
    lines: list[str] = []
    problems: list[str] = []
    asked = _asked_fsdp(args, launch)
    if asked is not None:
        problems = _fsdp_problems(asked, args)
        if asked.strategy in _STRATEGIES:
            config, line = _with_shards(config, asked, launch)
            lines.append(line)
    if wish := _checkpointing(args, asked):
        lines.append(_checkpointing_line(wish, config))
    return Translation(config, tuple(lines), tuple(problems))


@contextmanager
def hidden_from_trainer(args: TrainingArguments | None) -> Iterator[dict[str, Any]]:
    """Context in which `Trainer` and accelerate find nothing of what `translate` has translated; gives the user's values."""
    with without_fsdp(), with_values(args, {**_NO_CHECKPOINTING, **_FSDP}) as users:
        yield users


@contextmanager
def without_checkpointing(args: TrainingArguments, config: LongContextConfig) -> Iterator[dict[str, Any]]:
    """Context of a stock trainer's training, in which plans recompute and the trainer does not; gives the user's values.

    A line says so on rank 0.
    """
    if wish := _checkpointing(args, None):
        tell_settings(args, (_checkpointing_line(wish, config),), [])
    with with_values(args, _NO_CHECKPOINTING) as users:
        yield users


@contextmanager
def with_values(args: TrainingArguments | None, values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Context in which these fields have these values; fields of other versions of transformers are left out.

    Gives the values that they have outside, and empties that when it ends.
    """
    before = {name: getattr(args, name) for name in values if hasattr(args, name)}
    try:
        for name in before:
            setattr(args, name, values[name])
        yield before
    finally:
        for name, value in before.items():
            setattr(args, name, value)
        before.clear()


def tell_settings(args: TrainingArguments, lines: tuple[str, ...], idle: list[str]) -> None:
    """Logs, on rank 0, each line of a translation, and one warning with all settings that have no effect."""
    if args.process_index:
        return
    for line in lines:
        logger.warning("%s", line)
    if idle:
        logger.warning("settings without effect under plans: %s", "; ".join(idle))


def _asked_fsdp(args: TrainingArguments, launch: LaunchEnvironment) -> _Fsdp | None:
    if args.fsdp:
        settings: Any = args.fsdp_config if isinstance(args.fsdp_config, dict) else {}

        def is_set(name: str) -> bool:
            return str(settings.get(name, False)).lower() == "true"

        # before it is normalised, the strategy is part of the argument itself, with "offload" and "auto_wrap" beside it
        named = [word for word in str(args.fsdp).lower().split() if word in _STRATEGIES]
        strategy = str(settings.get("reshard_after_forward", named[0] if named else True)).lower()
        offloads, recomputes = is_set("cpu_offload"), is_set("activation_checkpointing")
        return _Fsdp("fsdp", strategy, offloads, recomputes, is_set("xla"), launch.loads_on_first)
    if launch.uses_fsdp:
        offloads, recomputes, first = launch.fsdp_offload, launch.fsdp_recomputes, launch.loads_on_first
        return _Fsdp("the accelerate configuration's FSDP", launch.fsdp_reshard, offloads, recomputes, loads_on_first=first)
    return None


def _fsdp_problems(asked: _Fsdp, args: TrainingArguments) -> list[str]:
    problems = []
    if asked.offloads:
        problems.append(
            f"{asked.origin} offloads parameters to the CPU (cpu_offload, FSDP_OFFLOAD_PARAMS), which is not supported; leave it "
            f"out, and set LongContextConfig(parameters='sharded', layer_weights='host', optimizer_states='host'), which keeps "
            f"them there between their uses"
        )
    if asked.is_xla:
        problems.append(f"{asked.origin} asks for XLA, which is not supported; leave xla out of fsdp_config")
    if asked.strategy not in _STRATEGIES:
        known = ", ".join(sorted(name for name in _STRATEGIES if not name.isdigit()))
        problems.append(
            f"{asked.origin} has the sharding strategy {asked.strategy!r}, which is none of {known}; use one of these"
        )
    if asked.loads_on_first and args.world_size > 1:
        problems.append(
            f"{asked.origin} lets the first rank of each node alone read weights (cpu_ram_efficient_loading), so those of the "
            f"others are empty; set fsdp_cpu_ram_efficient_loading: false, and load with load_sharded(), which spares memory, too"
        )
    return problems


def _with_shards(config: LongContextConfig, asked: _Fsdp, launch: LaunchEnvironment) -> tuple[LongContextConfig, str]:
    parameters, by_node = _STRATEGIES[asked.strategy]
    if config.parameters != "replicated":
        return config, f"{asked.origin} is replaced by LongContextConfig(parameters={config.parameters!r}), which shards instead"
    if config.stages != 1 and parameters == "sharded":
        # the other kind gathers every layer for every slice
        parameters = "gathered_per_round"
    changes: dict[str, Any] = {"parameters": parameters}
    if by_node and launch.ranks_per_node < launch.num_ranks and config.stages == 1 and config.expert_ranks is None:
        changes["shard_ranks"] = launch.ranks_per_node
    said = ", ".join(f"{name}={value!r}" for name, value in changes.items())
    return replace(config, **changes), (
        f"{asked.origin} ({asked.strategy}) becomes LongContextConfig({said}); layers are wrapped and prefetched as plans need, "
        f"and checkpoints are ordinary ones"
    )


def _checkpointing(args: TrainingArguments, asked: _Fsdp | None) -> str:
    """The setting that asks for activation checkpointing; empty if none does."""
    # the new name and the old one
    if getattr(args, "activation_checkpointing", False) or getattr(args, "gradient_checkpointing", False):
        return "gradient_checkpointing=True"
    return f"activation checkpointing of {asked.origin}" if asked is not None and asked.recomputes else ""


def _checkpointing_line(wish: str, config: LongContextConfig) -> str:
    if config.activations == "keep":
        return f"{wish} has no effect beside LongContextConfig(activations='keep'), which never recomputes"
    return (
        f"{wish} becomes LongContextConfig(activations='auto'): plans recompute what memory has no room for, and nothing where "
        f"all fits"
    )
