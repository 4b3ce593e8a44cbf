"""The kernel for Mamba 2 scans: a right one runs whole rows, a wrong one is left out by name.

The stand-in has the signature of mamba_ssm 2.3 and computes by transformers' torch code. It takes one first state, that of the
first document, and returns the state after the last one.
"""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.models.any_model import wide_floats
from helpers.models.reference import random_rows, reference_step, relative_error, worst_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.versions import newest
from helpers.plans.layouts import plan_of
from helpers.plans.sliced_plans import sliced_plan
from helpers.ranks.lone_steps import fp32_step
from helpers.ranks.rank_steps import step_on_rank
from torch import Tensor
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan

from hf_longctx.hf.models.states import mixers_of
from hf_longctx.plan.core.serialize import plan_to_json
from hf_longctx.plan.model import mixers as state_spec
from hf_longctx.runtime.states import kernels as by_token
from hf_longctx.runtime.states.kernels import MAMBA2_SCAN, HeadSizes

pytestmark = newest

CPU = torch.device("cpu")
TORCH_SCAN = inspect.unwrap(mamba2_chunk_scan)
SIZES, LIMITS = HeadSizes(6, 4, 3, tile=8), (0.05, 0.3)
SETTINGS = (8, True, LIMITS)
WITHIN = "differs from a scan token by token by"


def stand_in(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None, z: Tensor | None = None,
    dt_bias: Tensor | None = None, initial_states: Tensor | None = None, seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False, return_varlen_states: bool = False,
) -> Any:  # fmt: skip
    """Scans each document of `seq_idx`."""
    assert z is None and cu_seqlens is None and seq_idx is not None and seq_idx.dtype == torch.int32
    outputs, state = [], initial_states
    for length in torch.unique_consecutive(seq_idx[0], return_counts=True)[1].tolist():
        start = sum(each.shape[1] for each in outputs)
        parts = [each[:, start : start + length] for each in (x, dt, B, C)]
        output, after = TORCH_SCAN(
            *(parts[0], parts[1], A, parts[2], parts[3], chunk_size),
            D=D,
            dt_bias=dt_bias,
            initial_states=state,
            dt_softplus=dt_softplus,
            dt_limit=dt_limit,
            return_final_states=True,
        )
        outputs.append(output.to(x.dtype))
        state = None
    found = torch.cat(outputs, 1)
    return (found, after) if return_final_states else found


def leaking(*args: Any, seq_idx: Tensor, **others: Any) -> Any:
    return stand_in(*args, seq_idx=torch.zeros_like(seq_idx), **others)


def without_first_state(*args: Any, initial_states: Tensor | None, **others: Any) -> Any:
    return stand_in(*args, initial_states=None if initial_states is None else initial_states * 0, **others)


def without_gradient_of_last_state(*args: Any, return_final_states: bool, **others: Any) -> Any:
    if not return_final_states:
        return stand_in(*args, return_final_states=False, **others)
    output, after = stand_in(*args, return_final_states=True, **others)
    return output, after.detach() + 0 * after


def without_limits(*args: Any, dt_limit: Any, **others: Any) -> Any:
    return stand_in(*args, **others)


def without_skip(*args: Any, D: Tensor, **others: Any) -> Any:
    return stand_in(*args, D=D * 0, **others)


def without_bias(*args: Any, dt_bias: Tensor, **others: Any) -> Any:
    return stand_in(*args, dt_bias=dt_bias * 0, **others)


def groups_in_turn(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *args: Any, **others: Any) -> Any:
    per_group = x.shape[2] // B.shape[2]
    return stand_in(x, dt, A, B.repeat(1, 1, per_group, 1), C.repeat(1, 1, per_group, 1), *args, **others)


def of_another_signature(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Any = None) -> Any:
    raise AssertionError("must not be called")


WRONG: dict[str, tuple[Any, str]] = {
    "documents leak": (leaking, WITHIN),
    "first state ignored": (without_first_state, WITHIN),
    "gradient of the last state dropped": (without_gradient_of_last_state, WITHIN),
    "limits ignored": (without_limits, WITHIN),
    "skip ignored": (without_skip, WITHIN),
    "bias ignored": (without_bias, WITHIN),
    "heads of a group not neighbours": (groups_in_turn, WITHIN),
    "another signature": (of_another_signature, "it has no argument dt_bias and initial_states"),
}


@contextmanager
def installed(run: Any = stand_in) -> Iterator[None]:
    """Context with a package whose function is `run`, for a kernel that is new and runs on the CPU."""
    module = ModuleType(MAMBA2_SCAN.module)

    def function(*args: Any, **given: Any) -> Any:
        return run(*args, **given)

    vars(function)["__signature__"] = inspect.signature(run if run is of_another_signature else stand_in)
    vars(module)[MAMBA2_SCAN.name] = function
    root = MAMBA2_SCAN.module.partition(".")[0]
    fresh = {"verdicts": {}, "device_type": "cpu", "_boundaries": OrderedDict()}
    with (
        patch.dict("sys.modules", {root: ModuleType(root), MAMBA2_SCAN.module: module}),
        patch.multiple(MAMBA2_SCAN, **fresh),
        patch.dict(vars(MAMBA2_SCAN)),
    ):
        vars(MAMBA2_SCAN).pop("function", None)
        yield


@pytest.mark.daily("dtype0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_right_kernel_passes(dtype: torch.dtype, caplog: Any) -> None:
    with installed():
        assert MAMBA2_SCAN.problem(CPU, dtype, SIZES, SETTINGS) == ""
        assert MAMBA2_SCAN.problem(CPU, dtype, SIZES, (8, False, (0.0, float("inf")))) == ""
    assert not caplog.records


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_left_out_and_named(name: str, dtype: torch.dtype, caplog: Any) -> None:
    run, message = WRONG[name]
    with installed(run), caplog.at_level(logging.WARNING):
        assert message in MAMBA2_SCAN.problem(CPU, dtype, SIZES, SETTINGS)
    (record,) = caplog.records
    assert "mamba_chunk_scan_combined of mamba-ssm (version unknown) is not used" in record.getMessage()


def test_scans_token_by_token_are_transformers_own() -> None:
    inputs = {name: x.double() for name, x in MAMBA2_SCAN.drawn(SIZES, 37, SETTINGS).items()}

    def results(run: Any) -> list[Tensor]:
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        *tensors, state = leaves.values()
        output, after = run(tensors, state)
        weights = torch.linspace(-1, 1, output.numel()).view_as(output), torch.linspace(1, 2, after.numel()).view_as(after)
        made = [output, after, *torch.autograd.grad([output, after], list(leaves.values()), weights)]
        return [each.detach() for each in made]

    def of_transformers(tensors: Any, state: Any) -> Any:
        into, out, x, step, decay, bias, past = tensors
        keywords = {"D": past, "dt_bias": bias, "initial_states": state, "dt_softplus": True, "dt_limit": LIMITS}
        return TORCH_SCAN(x, step, decay, into, out, 8, **keywords, return_final_states=True)

    with wide_floats():
        found = results(lambda tensors, state: by_token.mamba2(tensors, state, True, LIMITS))
        expected = results(of_transformers)
    for mine, other in zip(found, expected, strict=True):
        assert relative_error(mine, other) <= 1e-11


def test_a_model_runs_rows_by_the_kernel_with_the_same_gradients() -> None:
    documents: list[int] = []

    def counted(*args: Any, seq_idx: Tensor, **given: Any) -> Any:
        documents.append(int(seq_idx[0, -1]) + 1)
        return stand_in(*args, seq_idx=seq_idx, **given)

    case = ModelCase("bamba", num_layers=4)
    plan = sliced_plan([30, 7, 1, 5], [[(0, 0, 12)], [(0, 12, 13), (3, 0, 5)], [(0, 13, 30), (1, 0, 7), (2, 0, 1)]])
    expected = fp32_step(case, plan)
    assert not documents
    with installed(counted):
        found = fp32_step(case, plan)
    assert worst_error(found, expected) <= 1e-4
    # four rows of seven documents are those of the check
    assert sorted(documents) == sorted([7] * 4 + [1, 1, 1, 3] * len(mixers_of(build_model(case))))


def test_rows_in_blocks_give_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens: list[int] = []

    def counted(*args: Any, seq_idx: Tensor, **given: Any) -> Any:
        tokens.append(seq_idx.shape[1])
        return stand_in(*args, seq_idx=seq_idx, **given)

    case = ModelCase("bamba", num_layers=4)
    tile = build_model(case).config.mamba_chunk_size
    lengths = [3 * tile + 1, 5, tile + 2]
    plan = sliced_plan(lengths, [[(0, 0, tile + 3)], [(0, tile + 3, lengths[0]), (1, 0, 5), (2, 0, lengths[2])]])
    expected = fp32_step(case, plan)
    monkeypatch.setattr(state_spec, "BLOCK_BYTES", 1)
    with installed(counted):
        found = fp32_step(case, plan)
    assert worst_error(found, expected) <= 1e-4
    # one more forward of every block in backward
    blocks = [tile, 3, tile, tile - 2, 5, tile, 2]
    assert sorted(tokens[4:]) == sorted(blocks * 2 * len(mixers_of(build_model(case))))


def step_by_kernel(*step: Any) -> tuple[float, dict[str, Tensor], int]:
    """Runs a step on this rank with the package; returns loss, gradients and the number of calls that leave a state."""
    states: list[bool] = []

    def counted(*args: Any, return_final_states: bool, **given: Any) -> Any:
        states.append(return_final_states)
        return stand_in(*args, return_final_states=return_final_states, **given)

    with installed(counted):
        return *step_on_rank(*step), sum(states)


def test_ranks_that_pass_states_on_scan_by_the_kernel(ranks: Any) -> None:
    case, lengths, num_ranks = ModelCase("bamba", num_layers=4, dtype=torch.float32), [90, 37], 2
    plan, rows = plan_of([[(num_ranks, (0, 1))]], lengths, num_ranks, ulysses=1), random_rows(lengths)
    expected = reference_step(build_model(replace(case, dtype=torch.float64)), rows)
    for *found, num_states in ranks(num_ranks).run(step_by_kernel, case, plan_to_json(plan), rows):
        assert worst_error(found, (expected[0], {name: each.float() for name, each in expected[1].items()})) <= 1e-3
        # at least a run of each document in every layer, besides two rows of the check
        assert num_states >= 2 + 2 * len(mixers_of(build_model(case)))
