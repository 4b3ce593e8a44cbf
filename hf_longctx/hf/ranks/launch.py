"""Environment variables that a launcher sets."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    Degrees = list[int] | Literal["all"]
    Stages = int | Literal["auto"]
else:
    # the words of a command line: `HfArgumentParser` takes one type per setting
    Degrees = list[str]
    Stages = str


@dataclass(frozen=True, slots=True)
class LaunchEnvironment:
    """What the launcher told this process; accelerate hands its YAML over in variables that it acts on by itself."""

    num_ranks: int
    ranks_per_node: int
    mixed_precision: str
    compile_backend: str
    uses_fsdp: bool
    uses_deepspeed: bool
    fsdp_reshard: str
    fsdp_offload: bool

    @classmethod
    def read(cls) -> LaunchEnvironment:
        """From the variables that torchrun and accelerate set; one plain rank where they are missing."""

        def text(name: str, default: str) -> str:
            return os.environ.get(name, default).lower()

        num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        return cls(
            num_ranks=num_ranks,
            ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", str(num_ranks))),
            mixed_precision=text("ACCELERATE_MIXED_PRECISION", "no"),
            compile_backend=text("ACCELERATE_DYNAMO_BACKEND", "no"),
            uses_fsdp=text("ACCELERATE_USE_FSDP", "false") == "true",
            uses_deepspeed=text("ACCELERATE_USE_DEEPSPEED", "false") == "true",
            # version 2 says true or false, version 1 a strategy
            fsdp_reshard=text("FSDP_RESHARD_AFTER_FORWARD", text("FSDP_SHARDING_STRATEGY", "true")),
            fsdp_offload=text("FSDP_OFFLOAD_PARAMS", "false") == "true",
        )
