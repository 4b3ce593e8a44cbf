"""Reads the environment variables that torchrun and accelerate set; `hf.config` and the start-up checks use them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    Degrees = list[int] | Literal["all"]
    Stages = int | Literal["auto"]
else:
    # on a command line these settings are words: `HfArgumentParser` takes one type per setting
    Degrees = list[str]
    Stages = str

_USES_FSDP = "ACCELERATE_USE_FSDP"


@dataclass(frozen=True, slots=True)
class LaunchEnvironment:
    """The launcher's settings for this process; accelerate passes its YAML on in variables."""

    num_ranks: int
    ranks_per_node: int
    mixed_precision: str
    compile_backend: str
    uses_fsdp: bool
    uses_deepspeed: bool
    fsdp_reshard: str
    fsdp_offload: bool
    fsdp_recomputes: bool = False
    # the first rank of each node reads weights, and the others wait for FSDP to send them
    loads_on_first: bool = False
    uses_parallelism: bool = False

    @classmethod
    def read(cls) -> LaunchEnvironment:
        """Reads the variables of torchrun and accelerate; defaults to one plain rank where they are missing."""

        def text(name: str, default: str) -> str:
            return os.environ.get(name, default).lower()

        num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        return cls(
            num_ranks=num_ranks,
            ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", str(num_ranks))),
            mixed_precision=text("ACCELERATE_MIXED_PRECISION", "no"),
            compile_backend=text("ACCELERATE_DYNAMO_BACKEND", "no"),
            uses_fsdp=text(_USES_FSDP, "false") == "true",
            uses_deepspeed=text("ACCELERATE_USE_DEEPSPEED", "false") == "true",
            # FSDP version 2 sets true or false, version 1 the name of a strategy
            fsdp_reshard=text("FSDP_RESHARD_AFTER_FORWARD", text("FSDP_SHARDING_STRATEGY", "true")),
            fsdp_offload=text("FSDP_OFFLOAD_PARAMS", "false") == "true",
            fsdp_recomputes=text("FSDP_ACTIVATION_CHECKPOINTING", "false") == "true",
            loads_on_first=text("FSDP_CPU_RAM_EFFICIENT_LOADING", "false") in ("true", "1", "yes")
            and text(_USES_FSDP, "false") == "true",
            uses_parallelism=text("ACCELERATE_USE_PARALLELISM_CONFIG", "false") == "true",
        )


@contextmanager
def without_fsdp() -> Iterator[None]:
    """Context in which the environment does not ask for FSDP, so that accelerate makes no plugin for it."""
    asked = os.environ.pop(_USES_FSDP, None)
    try:
        yield
    finally:
        os.environ.pop(_USES_FSDP, None)
        if asked is not None:
            os.environ[_USES_FSDP] = asked


def on_first_rank(record: logging.LogRecord) -> bool:
    """Filter of loggers whose warnings all ranks have alike, so that the first one alone gives them."""
    return os.environ.get("RANK", "0") == "0" or record.levelno >= logging.ERROR
