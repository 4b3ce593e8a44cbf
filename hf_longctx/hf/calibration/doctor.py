"""Examines a machine and an installation: versions, devices, links, pinned memory, and which operators will run.

It starts no training and needs no other ranks. `hf-longctx doctor` prints the findings.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from hf_longctx.hf.models.states import KERNELS
from hf_longctx.hf.ranks.launch import host_bytes
from hf_longctx.hf.start.setup import allocator_advice
from hf_longctx.runtime.tiles.packages import active_attention
from hf_longctx.runtime.tiles.tile import attention_backend

# head size for which backends are named, the usual one
_HEAD_DIM = 128
_PINNED_BYTES = 64 * 2**20
# package -> (extra that installs it, purpose)
_EXTRAS = {
    "matplotlib": ("plot", "pictures of steps, needles and lengths"),
    "trl": ("trl", "trainers of TRL"),
    "bitsandbytes": ("qlora", "weights in four bits"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check. status: "ok", "note" (training works), or "fix" (it does not). remedy: what to do."""

    name: str
    text: str
    status: Literal["ok", "note", "fix"] = "ok"
    remedy: str = ""

    def record(self) -> dict[str, str]:
        """Returns the finding as JSON values."""
        return asdict(self)


def examine() -> list[Finding]:
    """Runs all checks, in the order in which problems should be fixed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return [*_versions(), *_devices(device), *_memory(device), *_links(device), *_operators(device), *_extras()]


def _versions() -> Iterator[Finding]:
    yield Finding("python", platform.python_version())
    try:
        needed = [Requirement(text) for text in requires("hf_longctx") or []]
    except PackageNotFoundError:
        yield Finding("hf_longctx", "not installed, only imported", "note", "pip install -e . in the clone")
        needed = []
    for each in needed:
        if each.marker is not None and not each.marker.evaluate({"extra": ""}):
            continue
        yield requirement_finding(each)


def requirement_finding(needed: Requirement) -> Finding:
    """Checks whether the installed version of a package meets a requirement."""
    remedy = f"pip install '{needed.name}{needed.specifier}'"
    try:
        found = version(needed.name)
    except PackageNotFoundError:
        return Finding(needed.name, "not installed", "fix", remedy)
    if not needed.specifier.contains(found, prereleases=True):
        return Finding(needed.name, f"{found}, but {needed.specifier} is needed", "fix", remedy)
    return Finding(needed.name, found)


def _devices(device: torch.device) -> Iterator[Finding]:
    if device.type == "cpu":
        yield _no_gpu()
        yield Finding("cpu", f"{len(os.sched_getaffinity(0))} cores for this process")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        text = f"{properties.name}, capability {properties.major}.{properties.minor}, {total_bytes / 2**30:.0f} GiB"
        if properties.major < 8:
            yield Finding(
                f"gpu {index}",
                f"{text}; it has no fast bf16",
                "note",
                "train in float32, or on an A100 or newer: fp16 is refused",
            )
        elif free_bytes < 0.9 * total_bytes:
            yield Finding(
                f"gpu {index}",
                f"{text}, {(total_bytes - free_bytes) / 2**30:.0f} GiB of them in use",
                "note",
                "end the processes that nvidia-smi lists, or choose others by CUDA_VISIBLE_DEVICES",
            )
        else:
            yield Finding(f"gpu {index}", text)


def _no_gpu() -> Finding:
    has_driver = any(Path("/dev").glob("nvidia[0-9]*"))
    if not has_driver:
        return Finding("gpu", "none; trainings run on the CPU", "note")
    if torch.version.cuda is None:
        return Finding("gpu", f"there is one, but torch {torch.__version__} is built for CPUs", "fix", "install torch for CUDA")
    return Finding(
        "gpu", f"there is one, but torch for CUDA {torch.version.cuda} cannot use it", "fix", "see nvidia-smi: update its driver"
    )


def _memory(device: torch.device) -> Iterator[Finding]:
    available_bytes, total_bytes = host_bytes()
    yield Finding("host memory", f"{available_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB available")
    yield pinned_finding(device)
    if advice := allocator_advice(device.type, dict(os.environ)):
        yield Finding("allocator", "segments cannot grow", "note", advice.partition("; ")[2])
    shared_bytes = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else 0
    if shared_bytes < 2**30:
        yield Finding(
            "/dev/shm", f"{shared_bytes / 2**20:.0f} MiB, which loader workers and NCCL may fill", "note", "docker run --ipc=host"
        )


def pinned_finding(device: torch.device) -> Finding:
    """Tries to pin host memory, which offloading needs on a GPU."""
    if device.type != "cuda":
        return Finding("pinned memory", "not needed on a CPU")
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        begun_s = time.perf_counter()
        torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
        rate = _PINNED_BYTES / (time.perf_counter() - begun_s) / 2**30
    except RuntimeError as error:
        reason = str(error).split("\n")[0]
        return Finding("pinned memory", f"cannot be had: {reason}", "fix", "raise `ulimit -l`, or docker run --ulimit memlock=-1")
    limited = "" if limit == resource.RLIM_INFINITY else f"; limit of locked memory {limit / 2**20:.0f} MiB"
    return Finding("pinned memory", f"works, {rate:.1f} GiB/s to pin{limited}")


def _links(device: torch.device) -> Iterator[Finding]:
    num = torch.cuda.device_count() if device.type == "cuda" else 0
    if num:
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else ""
        yield Finding("nccl", nccl) if nccl else Finding("nccl", "torch was built without it", "fix", "install torch for CUDA")
    elif not dist.is_gloo_available():
        yield Finding("gloo", "torch was built without it", "fix", "install torch from PyPI")
    else:
        yield Finding("links", "gloo between processes of this machine")
    pairs = [(one, other) for one in range(num) for other in range(num) if one != other]
    if pairs:
        apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
        if apart:
            text = f"{len(apart)} of {len(pairs)} pairs of GPUs, {apart[0]} for one, have no direct link: exchanges pass the host"
            yield Finding("links", text, "note", "hf-longctx calibrate measures what that costs")
        else:
            yield Finding("links", f"all {len(pairs)} pairs of GPUs reach each other directly")


def _operators(device: torch.device) -> Iterator[Finding]:
    """Returns the backends that run here; the first use of each checks it."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    words = str(dtype).removeprefix("torch.")
    name = attention_backend(device, dtype, _HEAD_DIM)
    active = f", {active_attention()} is active" if active_attention() else ""
    text = f"{name} for tiles of {words} with heads of {_HEAD_DIM}, torch's own for whole documents{active}"
    if device.type == "cuda" and name == "plain":
        yield Finding("attention", text, "note", "plain matrices are many times slower; pip install 'hf_longctx[flash]'")
    else:
        yield Finding("attention", text)
    for kernel in (each for kernels, _ in KERNELS.values() for each in kernels):
        if device.type != kernel.device_type:
            yield Finding("scans", f"torch code in place of {kernel.name}, which needs {kernel.device_type}")
        elif not kernel.is_installed:
            yield Finding("scans", f"torch code in place of {kernel.name}", "note", f"pip install {kernel.package}")
        else:
            yield Finding("scans", f"{kernel.label}, if its first use finds it right")


def _extras() -> Iterator[Finding]:
    for name, (extra, purpose) in _EXTRAS.items():
        if find_spec(name) is None:
            yield Finding(name, f"not installed: {purpose}", "note", f"pip install 'hf_longctx[{extra}]'")
        else:
            yield Finding(name, f"{_version(name)}: {purpose}")


def _version(name: str) -> Any:
    try:
        return version(name)
    except PackageNotFoundError:
        return "version unknown"
