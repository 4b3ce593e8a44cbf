"""Triton kernels without a GPU: Triton's interpreter runs them in a process of its own, or they are only compiled for Hopper."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
_NAMES |= {torch.int64: "i64", torch.uint8: "u8", torch.float8_e4m3fn: "fp8e4nv"}


def run_interpreted(*files: Path) -> None:
    """Runs test files with interpreted kernels, in a new process, because Triton reads the variable when it is first imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *map(str, files)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "passed" in ran.stdout and "skipped" not in ran.stdout, ran.stdout


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Context in which torch.empty returns NaN, so that a value that a kernel fails to write is noticed."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class CompiledOnly:
    """Takes the place of a kernel: a launch compiles it for sm_90 as Triton would for these arguments, and keeps the PTX."""

    def __init__(self, kernel: Any, ptx: list[str]) -> None:
        self.kernel, self.ptx = kernel, ptx

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._compile

    def _compile(self, *args: Any, **constants: Any) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        signature: dict[str, Any] = dict.fromkeys(constants, "constexpr")
        known: dict[Any, Any] = dict(constants)
        attributes: dict[tuple[int, ...], list[list[Any]]] = {}
        for i, (name, argument) in enumerate(zip(self.kernel.arg_names, args, strict=False)):
            values = argument if isinstance(argument, tuple) else (argument,)
            is_fixed = self.kernel.params[i].do_not_specialize
            types = []
            for j, value in enumerate(values):
                place = (i, j) if isinstance(argument, tuple) else (i,)
                is_one = isinstance(value, int) and value == 1 and not is_fixed
                types.append("constexpr" if is_one else _type_name(value))
                if is_one:
                    known[place] = value
                elif not is_fixed and (value.data_ptr() if isinstance(value, Tensor) else value) % 16 == 0:
                    attributes[place] = [["tt.divisibility", 16]]
            signature[name] = tuple(types) if isinstance(argument, tuple) else types[0]
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=known, attrs=attributes)
        self.ptx.append(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])


def compile_only(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces every kernel of a module; returns the list that every launch appends its PTX to."""
    ptx: list[str] = []
    for name in [name for name in vars(module) if name.endswith("_kernel")]:
        monkeypatch.setattr(module, name, CompiledOnly(getattr(module, name), ptx))
    return ptx


def memory_instructions(ptx: str) -> set[str]:
    """The kinds of loads from and stores to global memory."""
    return set(re.findall(r"(?:ld|st)\.global\S*", ptx))


def _type_name(value: Tensor | int) -> str:
    if isinstance(value, Tensor):
        return f"*{_NAMES[value.dtype]}"
    return "i32" if abs(value) < 2**31 else "i64"
