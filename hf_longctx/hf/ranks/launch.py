"""Reads the environment of this process: variables of torchrun and accelerate, and host memory within its container's limit.

Used by `hf.config`, start-up checks, budgets of offloading, and the self-test.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

if TYPE_CHECKING:
    Degrees = list[int] | Literal["all"]
    Stages = int | Literal["auto"]

_USES_FSDP, _USES_DEEPSPEED = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"

# launcher of plain processes -> variables with the number of processes started together, and the number of this one
_TASKS = {
    "srun": (("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"), "SLURM_PROCID"),
    "mpirun (Open MPI)": (("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_RANK"),
    "jsrun": (("JSM_NAMESPACE_SIZE",), "JSM_NAMESPACE_RANK"),
    "mpirun (MVAPICH)": (("MV2_COMM_WORLD_SIZE",), "MV2_COMM_WORLD_RANK"),
    "mpiexec (PMI)": (("PMI_SIZE",), "PMI_RANK"),
    "flux": (("FLUX_JOB_SIZE",), "FLUX_TASK_RANK"),
    "mpiexec (PALS)": (("PALS_SIZE",), "PALS_RANKID"),
    "aprun": (("ALPS_APP_SIZE",), "ALPS_APP_PE"),
    "horovodrun": (("HOROVOD_SIZE",), "HOROVOD_RANK"),
    "a launcher with PMIx": ((), "PMIX_RANK"),
}
# steps of Slurm from this number on are batch scripts and shells, each a single process
_FIRST_OWN_STEP = 0xFFFFFFF0


@dataclass(frozen=True, slots=True)
class LaunchEnvironment:
    """The launcher's settings for this process; accelerate passes on its YAML in variables."""

    num_ranks: int
    ranks_per_node: int
    mixed_precision: str
    compile_backend: str
    uses_fsdp: bool
    uses_deepspeed: bool
    fsdp_reshard: str
    fsdp_offload: bool
    fsdp_recomputes: bool = False
    # whether the first rank of each node reads weights and FSDP sends them to the others
    loads_on_first: bool = False
    uses_parallelism: bool = False
    # processes that a launcher started together without torchrun's variables, and the launcher with the variable that shows it
    num_tasks: int = 1
    task_launcher: str = ""

    @classmethod
    def read(cls) -> LaunchEnvironment:
        """Reads the variables of torchrun and accelerate; defaults to one plain rank if they are missing."""

        def text(name: str, default: str) -> str:
            return os.environ.get(name, default).lower()

        num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        num_tasks, task_launcher = _tasks()
        return cls(
            num_ranks=num_ranks,
            ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", str(num_ranks))),
            mixed_precision=text("ACCELERATE_MIXED_PRECISION", "no"),
            compile_backend=text("ACCELERATE_DYNAMO_BACKEND", "no"),
            uses_fsdp=text(_USES_FSDP, "false") == "true",
            uses_deepspeed=text(_USES_DEEPSPEED, "false") == "true",
            # FSDP version 2 sets true or false, version 1 the name of a strategy
            fsdp_reshard=text("FSDP_RESHARD_AFTER_FORWARD", text("FSDP_SHARDING_STRATEGY", "true")),
            fsdp_offload=text("FSDP_OFFLOAD_PARAMS", "false") == "true",
            fsdp_recomputes=text("FSDP_ACTIVATION_CHECKPOINTING", "false") == "true",
            loads_on_first=text("FSDP_CPU_RAM_EFFICIENT_LOADING", "false") in ("true", "1", "yes")
            and text(_USES_FSDP, "false") == "true",
            uses_parallelism=text("ACCELERATE_USE_PARALLELISM_CONFIG", "false") == "true",
            num_tasks=num_tasks,
            task_launcher=task_launcher,
        )


def _tasks() -> tuple[int, str]:
    """Returns the number of separate processes that were started together with this one, and the launcher; 1 if none were.

    A WORLD_SIZE that is set without torchrun is the number of processes that train together.
    """
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if "WORLD_SIZE" in os.environ and not (by_torchrun and os.environ["WORLD_SIZE"] == "1"):
        return 1, ""
    for launcher, (sizes, rank_name) in _TASKS.items():
        rank = _number(rank_name)
        size_name = next((name for name in sizes if _number(name) is not None), rank_name)
        count = max((_number(size_name) or 0) if size_name != rank_name else 0, 1 + (rank or 0))
        if count > 1 and (launcher != "srun" or _is_in_step(rank)):
            return count, f"{launcher} ({size_name}={os.environ[size_name]})"
    return 1, ""


def _is_in_step(rank: int | None) -> bool:
    """Whether `srun` started this process; a batch script, a single process, also has the variables of the whole job."""
    step = _number("SLURM_STEP_ID")
    return bool(rank) or (step is not None and step < _FIRST_OWN_STEP)


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else None


def separate_runs(num_ranks: int) -> list[str]:
    """Describes the problem of processes that were started together but would train separately. num_ranks: of this run."""
    launch = LaunchEnvironment.read()
    if num_ranks > 1 or launch.num_tasks < 2:
        return []
    once = "one torchrun per node with --nnodes" if "TORCHELASTIC_RUN_ID" in os.environ else "torchrun by it, once per node"
    return [
        f"{launch.task_launcher} started {launch.num_tasks} processes together, but nothing tells them where to meet, so each "
        f"would train alone on all data; start {once} (docs/guides/launching.md), or set RANK, WORLD_SIZE, LOCAL_RANK, "
        f"MASTER_ADDR and MASTER_PORT in each of them; for separate runs on purpose set WORLD_SIZE=1"
    ]


@contextmanager
def without_plugins() -> Iterator[None]:
    """Context in which the environment enables neither FSDP nor DeepSpeed, so that accelerate makes no plugin for them."""
    names = (_USES_FSDP, _USES_DEEPSPEED)
    asked = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(asked)


def on_first_rank(record: logging.LogRecord) -> bool:
    """Logging filter that passes warnings on the first rank only, since they are the same on all ranks."""
    return os.environ.get("RANK", "0") == "0" or record.levelno >= logging.ERROR


_CGROUP = Path("/sys/fs/cgroup")


def host_bytes(cgroup: Path = _CGROUP) -> tuple[int, int]:
    """Returns (available, total) bytes of host memory, within the limit of the control group (version 2) in `cgroup`."""
    machine = psutil.virtual_memory()
    available_bytes, total_bytes = int(machine.available), int(machine.total)
    try:
        limit_bytes = int((cgroup / "memory.max").read_text())
        used_bytes = int((cgroup / "memory.current").read_text())
        pages = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        # without such a group, or with "max", there is no limit
        return available_bytes, total_bytes
    # the page cache of recently read files counts as used, but is freed if memory is needed
    used_bytes -= int(pages.get("inactive_file", 0))
    return min(available_bytes, max(0, limit_bytes - used_bytes)), min(total_bytes, limit_bytes)
