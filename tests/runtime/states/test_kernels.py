"""Kernels of packages for scans: a right one runs whole rows, a wrong one is left out by name, and none changes the numbers.

No package is installed here: stand-ins have the signatures of flash-linear-attention 0.6 and compute by transformers' torch code.
`test_interpreted_scans` runs the package itself where it is installed.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.models.any_model import wide_floats
from helpers.models.reference import random_rows, reference_step, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.versions import newest
from helpers.plans.layouts import plan_of
from helpers.plans.sliced_plans import sliced_plan
from helpers.ranks.lone_steps import fp32_step, patched_model
from helpers.ranks.rank_steps import step_on_rank
from predicted.test_saved_bytes import saved_bytes
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from hf_longctx.hf.models.spec import model_spec
from hf_longctx.hf.models.states import mixer_of, mixers_of, scan_line
from hf_longctx.plan.core.serialize import plan_to_json
from hf_longctx.plan.core.types import Chunk, LayerPolicy, SequenceGroup, Span
from hf_longctx.plan.memory.layer import Load, StateLayerBytes
from hf_longctx.plan.model import mixers as state_spec
from hf_longctx.plan.model.mixers import ScanSize
from hf_longctx.runtime.attention.chunk import Document
from hf_longctx.runtime.attention.kv_book import Slice
from hf_longctx.runtime.process_groups import GroupPool
from hf_longctx.runtime.states import kernels as by_token
from hf_longctx.runtime.states.kernels import (
    GATED_DELTA_RULE,
    KIMI_DELTA_ATTENTION,
    QWEN_DELTA_RULE,
    HeadSizes,
    KernelScan,
    Row,
    ScanKernel,
)
from hf_longctx.runtime.states.passing import DeltaRule
from hf_longctx.runtime.states.recurrence import MixerScan, row_blocks, rows_of

pytestmark = newest

CPU = torch.device("cpu")
TORCH_RULES = {
    GATED_DELTA_RULE.name: inspect.unwrap(torch_chunk_gated_delta_rule),
    KIMI_DELTA_ATTENTION.name: inspect.unwrap(chunk_kimi_delta_attention),
}
KERNELS = pytest.mark.parametrize("kernel", [GATED_DELTA_RULE, KIMI_DELTA_ATTENTION], ids=lambda kernel: kernel.name)
NORMALIZED = (True,)
SMALL = HeadSizes(8, 12, 1, tile=8)


def sizes_for(kernel: ScanKernel) -> HeadSizes:
    """Small heads; transformers' torch code of Kimi delta attention has no heads that share queries."""
    return replace(SMALL, readers=1 if kernel is KIMI_DELTA_ATTENTION else 3)


def stand_in(
    rule: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Scans each document by `rule`, as flash-linear-attention's functions do in one launch."""
    assert scale is None and not kwargs and cu_seqlens is not None and q.shape[0] == 1
    num_documents = len(cu_seqlens) - 1
    assert initial_state is None or initial_state.shape[0] == num_documents
    outputs, states = [], []
    for place, (start, stop) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        output, state = rule(
            *(x[:, start:stop] for x in (q, k, v)),
            g=g[:, start:stop],
            beta=beta[:, start:stop],
            chunk_size=16,
            initial_state=None if initial_state is None else initial_state[place : place + 1],
            output_final_state=True,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )
        outputs.append(output.to(q.dtype))
        states.append(state)
    return torch.cat(outputs, 1), torch.cat(states) if output_final_state else None


def leaking(rule: Any, *qkv: Tensor, cu_seqlens: Tensor, initial_state: Tensor | None, **others: Any) -> Any:
    one = None if initial_state is None else initial_state[:1]
    output, state = stand_in(rule, *qkv, cu_seqlens=cu_seqlens[[0, -1]], initial_state=one, **others)
    return output, None if state is None else state.expand(len(cu_seqlens) - 1, -1, -1, -1)


def leaking_into_one_token(rule: Any, *qkv: Tensor, cu_seqlens: Tensor, initial_state: Tensor | None, **others: Any) -> Any:
    # the second document, of one token, goes on from the first
    first = None if initial_state is None else initial_state[[0, *range(2, len(cu_seqlens) - 1)]]
    fewer = torch.cat([cu_seqlens[:1], cu_seqlens[2:]])
    output, state = stand_in(rule, *qkv, cu_seqlens=fewer, initial_state=first, **others)
    return output, None if state is None else torch.cat([state[:1], state])


def without_first_state(rule: Any, *qkv: Tensor, initial_state: Tensor | None, **others: Any) -> Any:
    kept = None if initial_state is None else initial_state * 0
    return stand_in(rule, *qkv, initial_state=kept, **others)


def without_gradient_of_first_state(rule: Any, *qkv: Tensor, initial_state: Tensor | None, **others: Any) -> Any:
    kept = None if initial_state is None else initial_state.detach() + 0 * initial_state
    return stand_in(rule, *qkv, initial_state=kept, **others)


def without_gradient_of_last_state(rule: Any, *qkv: Tensor, **others: Any) -> Any:
    output, state = stand_in(rule, *qkv, **others)
    return output, None if state is None else state.detach() + 0 * state


def without_gradient_of_decays(rule: Any, *qkv: Tensor, g: Tensor, **others: Any) -> Any:
    return stand_in(rule, *qkv, g=g.detach() + 0 * g, **others)


def with_other_scale(rule: Any, *qkv: Tensor, **others: Any) -> Any:
    # queries are scaled behind their norm, so this is what another scale does
    output, state = stand_in(rule, *qkv, **others)
    return output * qkv[0].shape[-1] ** 0.5, state


def without_norm(rule: Any, *qkv: Tensor, use_qk_l2norm_in_kernel: bool, **others: Any) -> Any:
    return stand_in(rule, *qkv, **others)


def with_decays_in_base_2(rule: Any, *qkv: Tensor, g: Tensor, **others: Any) -> Any:
    return stand_in(rule, *qkv, g=g * 0.6931, **others)


def forgetting_after_two_tiles(
    rule: Any, *qkv: Tensor, cu_seqlens: Tensor, initial_state: Tensor | None = None, **others: Any
) -> Any:
    """Begins anew inside a document where its third tile of 8 tokens does."""
    ends = cu_seqlens.tolist()
    cut = [place for start, stop in itertools.pairwise(ends) for place in range(start, stop, 16)]
    states = initial_state
    if initial_state is not None:
        zeros = initial_state.new_zeros(len(cut), *initial_state.shape[1:])
        states = zeros.index_copy(0, torch.tensor([cut.index(start) for start in ends[:-1]]), initial_state)
    bounds = torch.tensor([*cut, ends[-1]])
    return stand_in(rule, *qkv, cu_seqlens=bounds, initial_state=states, **others)


def with_last_states_reversed(rule: Any, *qkv: Tensor, **others: Any) -> Any:
    output, state = stand_in(rule, *qkv, **others)
    return output, None if state is None else state.flip(0)


def with_states_transposed(rule: Any, *qkv: Tensor, **others: Any) -> Any:
    output, state = stand_in(rule, *qkv, **others)
    return output, None if state is None else state.transpose(-1, -2)


def without_last_state(rule: Any, *qkv: Tensor, **others: Any) -> Any:
    return stand_in(rule, *qkv, **others)[0], None


def not_a_number(rule: Any, *qkv: Tensor, **others: Any) -> Any:
    output, state = stand_in(rule, *qkv, **others)
    return output.index_fill(1, torch.tensor([4]), float("nan")), state


def of_another_signature(
    rule: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Any = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, offsets: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    raise AssertionError("must not be called: it would take cu_seqlens and ignore it")


WRONG: dict[str, tuple[Any, str]] = {
    "documents leak": (leaking, "differs from a scan token by token by"),
    "the first document leaks into one token": (leaking_into_one_token, "differs from a scan token by token by"),
    "first state ignored": (without_first_state, "differs from a scan token by token by"),
    "gradient of the first state dropped": (
        without_gradient_of_first_state,
        "state differs from a scan token by token by 1.0e+00",
    ),
    "gradient of the last state dropped": (without_gradient_of_last_state, "differs from a scan token by token by"),
    "gradient of decays dropped": (
        without_gradient_of_decays,
        "its gradient of decays of a row with",
    ),
    "a state lost behind two tiles": (forgetting_after_two_tiles, "differs from a scan token by token by"),
    "another scale": (with_other_scale, "differs from a scan token by token by"),
    "norm left out": (without_norm, "differs from a scan token by token by"),
    "decays in base 2": (with_decays_in_base_2, "differs from a scan token by token by"),
    "last states in another order": (with_last_states_reversed, "differs from a scan token by token by"),
    "states transposed": (with_states_transposed, "its last state has shape"),
    "no last state": (without_last_state, "its check failed with TypeError"),
    "not a number": (not_a_number, "differs from a scan token by token by nan"),
    "another signature": (of_another_signature, "TypeError: it has no argument cu_seqlens"),
}


@contextmanager
def installed(kernel: ScanKernel, run: Any = stand_in, device_type: str = "cpu") -> Iterator[ScanKernel]:
    """Context with a package whose function is `run`, for a kernel that is new and runs on the CPU."""
    module, rule = ModuleType(kernel.module), TORCH_RULES[kernel.name]

    def function(*args: Any, **given: Any) -> Any:
        return run(rule, *args, **given)

    parameters = list(inspect.signature(run if run is of_another_signature else stand_in).parameters.values())[1:]
    further = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in kernel.fixed]
    vars(function)["__signature__"] = inspect.Signature([*parameters[:-1], *further, *parameters[-1:]])
    vars(module)[kernel.name] = function
    root = kernel.module.partition(".")[0]
    with patch.dict("sys.modules", {root: ModuleType(root), kernel.module: module}):
        fresh = {"verdicts": {}, "device_type": device_type, "_boundaries": OrderedDict()}
        with patch.multiple(kernel, **fresh), patch.dict(vars(kernel)):
            vars(kernel).pop("function", None)
            yield kernel


@KERNELS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_right_kernel_passes(kernel: ScanKernel, dtype: torch.dtype, caplog: Any) -> None:
    with installed(kernel):
        assert kernel.problem(CPU, dtype, sizes_for(kernel), NORMALIZED) == ""
    assert not caplog.records


@pytest.mark.wide("not a number-dtype0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_left_out_and_named(name: str, dtype: torch.dtype, caplog: Any) -> None:
    run, message = WRONG[name]
    with installed(GATED_DELTA_RULE, run) as kernel, caplog.at_level(logging.WARNING):
        assert message in kernel.problem(CPU, dtype, sizes_for(kernel), NORMALIZED)
        # it is not checked again
        kernel.problem(CPU, dtype, sizes_for(kernel), NORMALIZED)
    (record,) = caplog.records
    assert "chunk_gated_delta_rule of flash-linear-attention (version unknown) is not used" in record.getMessage()
    assert message in record.getMessage()


def test_products_of_less_than_fp32_are_refused_in_fp32() -> None:
    def rounded(rule: Any, q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Any:
        # ten bits, as products of TF32 have
        q, k, v = (x + (x.half().to(x) - x).detach() for x in (q * 1.0001, k, v))
        return stand_in(rule, q, k, v, **others)

    with installed(GATED_DELTA_RULE, rounded) as kernel:
        assert "differs" in kernel.problem(CPU, torch.float32, SMALL, NORMALIZED)


@pytest.mark.wide
def test_a_kernel_is_checked_once_for_all_that_it_depends_on() -> None:
    calls: list[int] = []

    def counted(rule: Any, *args: Any, **given: Any) -> Any:
        calls.append(1)
        return stand_in(rule, *args, **given)

    with installed(GATED_DELTA_RULE, counted) as kernel:
        tensors = [x for name, x in kernel.drawn(SMALL, 9, NORMALIZED).items() if name != "first state"]
        # the first scan may be part of a forward that is compared, replayed or evaluated
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert kernel.takes(tensors, NORMALIZED)
        num_checks = len(calls)
        assert num_checks == 4 and kernel.takes(tensors, NORMALIZED) and len(calls) == num_checks
        assert kernel.takes([x[..., :4] if x.dim() == 4 else x for x in tensors], NORMALIZED) and len(calls) == 2 * num_checks
        # dtypes that no check covers
        assert not kernel.takes([x.double() for x in tensors], NORMALIZED)
        assert not kernel.takes([tensors[0], tensors[1].float(), *tensors[2:]], NORMALIZED)
        assert not kernel.takes([tensors[0].double(), *tensors[1:]], NORMALIZED)
        assert len(calls) == 2 * num_checks
    with installed(GATED_DELTA_RULE, counted, device_type="cuda") as kernel:
        assert not kernel.takes(tensors, NORMALIZED) and len(calls) == 2 * num_checks


def whole(rule: Any, *qkv: Tensor, auto_cp: bool = True, **others: Any) -> Any:
    # split, it leaves out corrections
    return stand_in(rule, *qkv, **others) if not auto_cp else leaking(rule, *qkv, **others)


def test_the_first_kernel_that_is_right_runs(caplog: Any) -> None:
    scan = KernelScan((QWEN_DELTA_RULE, GATED_DELTA_RULE), NORMALIZED)
    drawn = QWEN_DELTA_RULE.drawn(SMALL, 9, NORMALIZED)
    tensors, row = [x for name, x in drawn.items() if name != "first state"], Row((0, 4, 9), False)
    in_fp32 = [x.float() for x in tensors]
    ran: list[str] = []

    def noted(name: str, run: Any, *args: Any, **given: Any) -> Any:
        ran.append(name)
        return run(*args, **given)

    for first, expected in ((whole, "flash-qla"), (leaking, "flash-linear-attention")):
        with (
            installed(QWEN_DELTA_RULE, partial(noted, "flash-qla", first)),
            installed(GATED_DELTA_RULE, partial(noted, "flash-linear-attention", stand_in)),
        ):
            assert scan.takes(tensors)
            ran.clear()
            scan(tensors, None, row)
            assert ran == [expected]
            # it takes no fp32, which is no reason for a warning
            assert scan.takes(in_fp32) and QWEN_DELTA_RULE.problem(CPU, torch.float32, SMALL, NORMALIZED) == "it takes no float32"
            ran.clear()
            scan(in_fp32, None, row)
            assert ran == ["flash-linear-attention"]
    (warning,) = caplog.records
    assert "chunk_gated_delta_rule of flash-qla" in warning.getMessage()


def test_a_package_that_is_missing_is_not_a_warning(caplog: Any) -> None:
    with patch.multiple(GATED_DELTA_RULE, verdicts={}, device_type="cpu"), patch("importlib.util.find_spec", lambda name: None):
        assert GATED_DELTA_RULE.problem(CPU, torch.float32, SMALL, NORMALIZED) == "flash-linear-attention is not installed"
    assert not caplog.records


@KERNELS
def test_scans_token_by_token_are_transformers_own(kernel: ScanKernel) -> None:
    drawn = kernel.drawn(sizes_for(kernel), 37, NORMALIZED)
    inputs = {name: x.double() for name, x in drawn.items()}

    def results(run: Any) -> list[Tensor]:
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        *tensors, state = leaves.values()
        output, after = run(tensors, state)
        weights = torch.linspace(-1, 1, output.numel()).view_as(output), torch.linspace(1, 2, after.numel()).view_as(after)
        return [output, after, *torch.autograd.grad([output, after], list(leaves.values()), weights)]

    def of_transformers(tensors: Any, state: Any) -> Any:
        q, k, v, g, beta = tensors
        keywords = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return TORCH_RULES[kernel.name](q, k, v, g=g, beta=beta, **keywords)

    with wide_floats():
        found, expected = results(partial(by_token.delta_rule, normalize=True)), results(of_transformers)
    for mine, other in zip(found, expected, strict=True):
        assert relative_error(mine, other) <= 1e-11


def test_rows_end_where_states_come_and_go() -> None:
    def slice_(start: int, stop: int) -> Slice:
        return Slice(document=0, sequence=0, start=start, stop=stop, end=100)

    def row(*slices: Slice | None) -> list[list[int]]:
        documents = [Document(place, place + 1, each) for place, each in enumerate(slices)]
        return [[document.start for document in row] for row in rows_of(documents)]

    first, middle, last = slice_(0, 10), slice_(10, 20), slice_(20, 100)
    assert row(None, None, None) == [[0, 1, 2]]
    assert row(last, None, None, first) == [[0, 1, 2, 3]]
    assert row(None, last, None) == [[0], [1, 2]]
    assert row(middle, None) == [[0], [1]]
    assert row(first, middle, last) == [[0], [1], [2]]


def test_blocks_of_a_row_are_whole_documents_or_parts_of_one() -> None:
    def blocks(*boundaries: int, goes_on: bool = False) -> list[tuple[tuple[int, ...], bool]]:
        return [(each.boundaries, each.goes_on) for each in row_blocks(Row(boundaries, goes_on), 16, 8)]

    assert blocks(0, 16) == [((0, 16), False)] and blocks(0, 9, goes_on=True) == [((0, 9), True)]
    assert blocks(0, 40, goes_on=True) == [((0, 16), True), ((0, 16), True), ((0, 8), True)]
    # every document counts as whole tiles, and what is left of a long one shares a block with the next
    assert blocks(0, 1, 2, 3) == [((0, 1, 2), False), ((0, 1), False)]
    assert blocks(0, 5, 40, 43, 44) == [((0, 5), False), ((0, 16), True), ((0, 16), True), ((0, 3, 6), False), ((0, 1), False)]


MODELS = pytest.mark.parametrize(
    "case,kernel",
    [(ModelCase("qwen3_5", num_layers=4), GATED_DELTA_RULE), (ModelCase("kimi_linear"), KIMI_DELTA_ATTENTION)],
    ids=["qwen3_5", "kimi_linear"],
)


def is_close(found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> bool:
    """Whether loss and gradients are equal up to rounding in fp32.

    Those of the logarithms of decays are sums of large terms that cancel.
    """
    assert found[1].keys() == expected[1].keys()
    limits = {name: 1e-3 if name.endswith("A_log") else 1e-4 for name in found[1]}
    errors = {name: relative_error(gradient, expected[1][name]) for name, gradient in found[1].items()}
    return abs(found[0] - expected[0]) <= 1e-4 * abs(expected[0]) and all(errors[name] <= limits[name] for name in limits)


@pytest.mark.wide
@MODELS
def test_a_model_runs_rows_by_the_kernel_with_the_same_gradients(case: ModelCase, kernel: ScanKernel) -> None:
    documents: list[int] = []

    def counted(rule: Any, *args: Any, cu_seqlens: Tensor, **given: Any) -> Any:
        documents.append(len(cu_seqlens) - 1)
        return stand_in(rule, *args, cu_seqlens=cu_seqlens, **given)

    plan = sliced_plan([30, 7, 1, 5], [[(0, 0, 12)], [(0, 12, 13), (3, 0, 5)], [(0, 13, 30), (1, 0, 7), (2, 0, 1)]])
    expected = fp32_step(case, plan)
    assert not documents
    with installed(kernel, counted):
        found = fp32_step(case, plan)
    assert is_close(found, expected)
    # four rows of seven documents are those of the check
    rows_of_layer, num_layers = [1, 1, 1, 3], len(mixers_of(build_model(case)))
    assert sorted(documents) == sorted([7] * 4 + rows_of_layer * num_layers)


@pytest.mark.wide
@MODELS
def test_rows_in_blocks_give_the_same_gradients(case: ModelCase, kernel: ScanKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens: list[list[int]] = []

    def counted(rule: Any, *args: Any, cu_seqlens: Tensor, **given: Any) -> Any:
        tokens.append(cu_seqlens.tolist())
        return stand_in(rule, *args, cu_seqlens=cu_seqlens, **given)

    # a slice that goes on, one that ends in the middle of a tile, and documents behind it
    plan = sliced_plan([170, 7, 90], [[(0, 0, 70)], [(0, 70, 170), (1, 0, 7), (2, 0, 90)]])
    expected = fp32_step(case, plan)
    # blocks of a tile
    monkeypatch.setattr(state_spec, "BLOCK_BYTES", 1)
    with installed(kernel, counted):
        found = fp32_step(case, plan)
    assert is_close(found, expected)
    # one more forward of every block in backward
    blocks = [[0, 64], [0, 6], [0, 64], [0, 36], [0, 7], [0, 64], [0, 26]]
    assert sorted(tokens[4:]) == sorted(blocks * 2 * len(mixers_of(build_model(case))))


RULES = {kernel.name: kernel for kernel in (GATED_DELTA_RULE, KIMI_DELTA_ATTENTION)}


def step_by_kernel(name: str, run: Any, *step: Any) -> tuple[float, dict[str, Tensor], list[int]]:
    """Runs a step on this rank with the package of a rule; returns loss, gradients and columns of values in each call."""
    columns: list[int] = []

    def counted(rule: Any, *qkv: Tensor, **given: Any) -> Any:
        columns.append(qkv[2].shape[-1])
        assert len(given["cu_seqlens"]) != 2 or given["output_final_state"]
        return run(rule, *qkv, **given)

    with installed(RULES[name], counted):
        return *step_on_rank(*step), columns


# rings of zigzag pieces, a ring of blocks, a block of more ranks than heads; one of them with slices
@pytest.mark.wide
@pytest.mark.parametrize("num_ranks,ulysses,is_sliced", [(2, 1, False), (3, 1, True), (4, 2, False), (4, 4, False)], ids=str)
@MODELS
def test_ranks_that_pass_states_on_scan_by_the_kernel(
    ranks: Any, case: ModelCase, kernel: ScanKernel, num_ranks: int, ulysses: int, is_sliced: bool
) -> None:
    case, lengths = replace(case, dtype=torch.float32), [90, 1, 37]
    if ulysses == num_ranks and kernel is GATED_DELTA_RULE:
        case = replace(case, family="qwen3_5_few", num_layers=2)
    plan = plan_of([[(num_ranks, (0, 1, 2))]], lengths, num_ranks, ulysses)
    if is_sliced:
        plan = sliced_plan(lengths, [[(0, 0, 50)], [(0, 50, 90), (1, 0, 1), (2, 0, 37)]], num_ranks=num_ranks, ulysses=ulysses)
    rows = random_rows(lengths)
    expected = reference_step(build_model(replace(case, dtype=torch.float64)), rows)
    states = model_spec(build_model(case)).states
    passes = ulysses < num_ranks or states.heads < num_ranks
    key, value = states.read_size // 2, states.head_elements // (states.read_size // 2)
    pool, step = ranks(num_ranks), (case, plan_to_json(plan), rows)

    def worst(found: Any) -> float:
        return max(relative_error(gradient, expected[1][name].float()) for name, gradient in found[1].items())

    # errors of the torch code, by rounding in fp32
    most = max(worst(found) for found in pool.run(step_on_rank, *step))
    assert most < 3e-3
    every = set()
    for *found, columns in pool.run(step_by_kernel, kernel.name, stand_in, *step):
        assert columns
        every |= set(columns)
        assert found[0] == pytest.approx(expected[0], rel=1e-5) and worst(found) <= 4 * most
    assert every == ({value, value + key} if passes else {value})


@pytest.mark.wide
@KERNELS
def test_what_an_earlier_state_changes_is_found_by_the_kernel_in_half_precision(kernel: ScanKernel) -> None:
    sizes, cut = sizes_for(kernel), 29
    drawn = kernel.drawn(sizes, 70, NORMALIZED)
    tensors = [x.requires_grad_() for name, x in drawn.items() if name != "first state"]
    expected, _ = kernel.by_token([x.float() for x in tensors], None, NORMALIZED)
    torch_code: list[Any] = []
    scan = MixerScan(lambda *given: torch_code.append(given), ScanSize(8, 4), DeltaRule(), KernelScan((kernel,), NORMALIZED))
    first, rest = ([x[:, part] for x in tensors] for part in (slice(0, cut), slice(cut, None)))
    with installed(kernel):
        run = scan.in_blocks(len(tensors), 70, tensors[2].shape[2])
        start, state = run(first, None)
        wide, one = scan.state_map.widened(rest)
        effect = scan.state_map.effect(rest, [], *run(wide, one))
        found = torch.cat([start, effect.output(state)], 1)
    assert found.dtype == torch.bfloat16 and not torch_code
    given = torch.randn(found.shape).to(found)
    wanted = torch.autograd.grad(expected, tensors, given.float())
    for mine, other in zip([found, *torch.autograd.grad(found, tensors, given)], [expected, *wanted], strict=True):
        assert (mine.float() - other.float()).norm() <= 0.02 * other.float().norm()


@pytest.mark.daily("qwen3_5-whole-torch.float32-one")
@pytest.mark.parametrize("documents", [(512,), (300, 10, 20, 182)], ids=["one", "pack"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("block_bytes", [state_spec.BLOCK_BYTES, 2**20], ids=["whole", "blocks"])
@MODELS
def test_rows_save_the_bytes_that_are_counted(
    case: ModelCase, kernel: ScanKernel, block_bytes: int, dtype: torch.dtype, documents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_cut = block_bytes < state_spec.BLOCK_BYTES
    monkeypatch.setattr(state_spec, "BLOCK_BYTES", block_bytes)
    model = patched_model(case).to(dtype)
    mixer, spec = next(iter(mixers_of(model).values())), model_spec(model)
    hidden_1TC = torch.randn(1, sum(documents), model.config.hidden_size, dtype=dtype, requires_grad=True)
    chunk = Chunk(0, tuple(Span(place, 0, length) for place, length in enumerate(documents)))
    context = GroupPool((1,), 1.0).context(SequenceGroup((0,), "local", (), ()), chunk)
    with installed(kernel):
        found, output = saved_bytes(mixer, lambda: mixer(hidden_1TC, longctx=context))
        output = output[0] if isinstance(output, tuple) else output
        output.float().square().sum().backward()
    load = Load(sum(documents), documents, len(spec.states.layers))
    expected = StateLayerBytes(spec, load, LayerPolicy(), 0).mixer
    saved = found - hidden_1TC.nbytes
    # in one piece, kernels save less than the torch code that is counted
    assert 0.97 * saved <= expected
    if is_cut:
        assert expected <= 1.25 * saved


def test_the_opening_lines_say_what_runs_the_scans() -> None:
    qwen, bamba = (build_model(ModelCase(family, num_layers=4)) for family in ("qwen3_5", "bamba"))
    beside = build_model(ModelCase("falcon_h1", num_layers=4))

    def line(model: Any) -> str:
        return scan_line(mixer_of(model), model, model_spec(model).states, CPU, torch.float32)

    label = "chunk_gated_delta_rule of flash-linear-attention (version unknown)"
    assert line(qwen) == line(bamba) == line(beside) == "scans: torch code, for each document"
    assert not line(build_model(ModelCase("lfm3", num_layers=4))) and not line(build_model(ModelCase("llama")))
    with installed(GATED_DELTA_RULE) as kernel:
        assert line(qwen) == f"scans: {label}, for whole rows"
        with installed(QWEN_DELTA_RULE, whole):
            # for heads in fp32 there is one kernel, for those in bf16 the faster one
            assert line(qwen) == f"scans: {label}, for whole rows"
            faster = scan_line(mixer_of(qwen), qwen, model_spec(qwen).states, CPU, torch.bfloat16)
            assert faster == "scans: chunk_gated_delta_rule of flash-qla (version unknown), for whole rows"
        # it checked heads of the model's sizes
        ((dtype, sizes, *_),) = kernel.verdicts
        mixer = next(iter(mixers_of(qwen).values()))
        per_key = mixer.num_v_heads // mixer.num_k_heads
        assert (dtype, sizes) == (torch.float32, HeadSizes(mixer.head_k_dim, mixer.head_v_dim, per_key))
    with installed(GATED_DELTA_RULE, leaking):
        assert line(qwen).startswith(f"scans: torch code, for each document; not {label}, because its ")

    def for_equal_sizes(rule: Any, *qkv: Tensor, **others: Any) -> Any:
        if qkv[1].shape[-1] != qkv[2].shape[-1]:
            raise NotImplementedError("keys and values of two sizes")
        return stand_in(rule, *qkv, **others)

    def passing(model: Any) -> str:
        return scan_line(mixer_of(model), model, model_spec(model).states, CPU, torch.float32, passes_states=True)

    assert mixer.head_k_dim == mixer.head_v_dim
    with installed(GATED_DELTA_RULE) as kernel:
        assert passing(qwen) == f"scans: {label}, for whole rows; where ranks pass states on: the same"
    with installed(GATED_DELTA_RULE, for_equal_sizes):
        assert passing(qwen) == (
            f"scans: {label}, for whole rows; where ranks pass states on: torch code; not {label}, because its check failed with "
            f"NotImplementedError: keys and values of two sizes"
        )
