"""Kernels on machines without Triton, and integers that never cause another compilation."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hf_longctx.kernels.jit import next_power_of_2, pack


@pytest.mark.wide
def test_operations_work_without_triton_and_a_launched_kernel_names_it() -> None:
    program = """
import sys
sys.modules["triton"] = None
import torch
from hf_longctx.kernels import merge_attention, sequence_layout
own, other = (torch.zeros(1, 2, 4), torch.full((1, 2), -torch.inf)), (torch.ones(1, 2, 4), torch.zeros(1, 2))
merge_attention.accumulate_attention_(*own, *other)
assert torch.equal(own[0], other[0])
assert torch.equal(sequence_layout.join_heads(torch.ones(8), [1, 1], 1, 4), torch.ones(1, 2, 4))
try:
    merge_attention.launch_accumulate(*own, *other)
except ImportError as error:
    assert "needs triton" in str(error), error
else:
    raise SystemExit("no error")
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_packed_integers_are_neither_one_nor_even() -> None:
    # Triton compiles another variant for an argument that is 1 or a multiple of 16
    assert all(value != 1 and value % 2 for value in pack(range(100)))
    assert [(value - 3) >> 1 for value in pack([0, 1, 16, 2**29])] == [0, 1, 16, 2**29]


def test_powers_of_two() -> None:
    assert [next_power_of_2(number) for number in (0, 1, 2, 3, 8, 9, 80)] == [1, 1, 2, 4, 8, 16, 128]
