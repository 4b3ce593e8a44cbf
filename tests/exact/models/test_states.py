"""Layers with a state along the sequence give plain Hugging Face's loss and gradients under any plan that is accepted.

What transformers computes in fp32 is fp64 on both sides. Decays are drawn small, because the gradient of `A_log` loses digits
where a document's decays add up to hundreds: `test_cuts_between_tiles_err_no_more_than_transformers_itself` measures that floor.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.measures.planted import plant, replaced
from helpers.models.any_model import wide_floats
from helpers.models.reference import TOLERANCE, random_rows, reference_step, worst_error
from helpers.models.tiny_models import ModelCase, adapted, build_model, with_lora
from helpers.models.versions import newest
from helpers.plans.layouts import plan_of
from helpers.plans.pipeline_plans import LENGTHS, SLICED, pipeline_plan
from helpers.plans.policies import policies_for, replayed, same_policy
from helpers.plans.sliced_plans import CUTS, PACKINGS, cut, few, random_slicings, sliced_plan
from helpers.ranks.lone_steps import policy_step
from helpers.ranks.pipeline_steps import stage_step_on_rank
from helpers.ranks.rank_pool import RankPool
from helpers.ranks.rank_steps import rank_inputs, step_on_rank
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_longctx.hf.models.adapters import base_of
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.hf.models.states import mixers_of
from hf_longctx.plan.core.serialize import plan_to_json
from hf_longctx.plan.core.types import Chunk, Parameters, SequenceGroup, Span, StepPlan
from hf_longctx.plan.model import mixers as state_spec
from hf_longctx.runtime.execution.executor import StepExecutor, no_mask
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.process_groups import GroupPool
from hf_longctx.runtime.states import recurrence as blocks

pytestmark = newest

Step = tuple[float, dict[str, Tensor]]
QWEN, OLMO = ModelCase("qwen3_5", num_layers=4), ModelCase("olmo_hybrid", num_kv_heads=4, num_layers=4)
# two heads with a state and four of attention
FEW = ModelCase("qwen3_5_few")
BAMBA, KIMI, LFM = ModelCase("bamba", num_layers=4), ModelCase("kimi_linear"), ModelCase("lfm3", num_layers=4)
# no attention in any layer
MAMBA = ModelCase("mamba")
# the second changes its logits after the head, which no tile may leave out
MINIMAX, GRIFFIN = ModelCase("minimax", num_layers=4), ModelCase("recurrent_gemma", num_layers=4)
# states of sums that are divided; the second changes its logits after the head
RWKV, XLSTM = ModelCase("rwkv"), ModelCase("xlstm")
DIVIDED = pytest.mark.parametrize("case", [RWKV, XLSTM], ids=lambda case: case.family)
# attention and a state in every layer
BOTH = ModelCase("falcon_h1", num_layers=4)
FAMILIES = pytest.mark.parametrize("case", [QWEN, OLMO, BAMBA, KIMI, LFM, MINIMAX, GRIFFIN], ids=lambda case: case.family)
GROUPED = pytest.mark.parametrize("case", [QWEN, BAMBA, KIMI, LFM, MINIMAX, GRIFFIN], ids=lambda case: case.family)
# tokens that transformers' torch code of the gated delta rule computes at once
TILE = 64
RULE = "torch_chunk_gated_delta_rule"


def small_decays(model: Any, largest: float = 0.5) -> Any:
    """The model with decays per token below `largest`, or about it if it is large."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            decays = torch.linspace(largest / 2, largest, parameter.numel(), dtype=parameter.dtype)
            parameter.data = decays.log().view_as(parameter)
    return model


def built(case: ModelCase, largest: float = 0.5) -> Any:
    return small_decays(build_model(case), largest)


def lone_error(case: ModelCase, plan: StepPlan, make: Any = built, bug: str = "") -> float:
    """The largest relative error of loss and gradients of a plan on one rank."""
    rows = random_rows(list(plan.lengths))
    with wide_floats():
        expected = reference_step(make(case), rows)
        model = make(case)
        patch_model(base_of(model))
        with plant(bug, 0, 1):
            result, gradients, _ = policy_step(model, plan, rows)
    return worst_error((float(result.loss), gradients), expected)


@pytest.mark.daily("with a slice of one token-lfm3")
@FAMILIES
@pytest.mark.parametrize("name", ["with a slice of one token", "one token first", "ones at both ends", "12 equal slices"])
def test_slices_of_one_document_match(case: ModelCase, name: str) -> None:
    plan = sliced_plan([96], [[span] for span in cut(0, CUTS[name])])
    assert lone_error(case, plan) <= TOLERANCE
    tile_tokens = 0 if case is GRIFFIN else 8
    assert lone_error(case, same_policy(plan, *[replayed(0.5, 0.25)] * 3, replayed(0.0), tile_tokens=tile_tokens)) <= TOLERANCE


def test_slices_of_a_scan_that_takes_no_first_state_match() -> None:
    plan = sliced_plan([11], [[span] for span in cut(0, (1, 5, 2, 2, 1))])
    assert lone_error(MAMBA, same_policy(plan, replayed(1.0), replayed(0.0), tile_tokens=8)) <= TOLERANCE


@pytest.mark.daily("xlstm")
@DIVIDED
def test_slices_whose_states_are_sums_to_divide_match(case: ModelCase) -> None:
    # cuts inside and between blocks, and slices of one token
    plan = sliced_plan([40, 5, 1], [[(0, 0, 1)], [(0, 1, 9), (1, 0, 5)], [(0, 9, 10)], [(0, 10, 26), (2, 0, 1)], [(0, 26, 40)]])
    assert lone_error(case, plan) <= TOLERANCE
    tile_tokens = 8 if case is RWKV else 0
    assert lone_error(case, same_policy(plan, replayed(1.0), replayed(0.5), tile_tokens=tile_tokens)) <= TOLERANCE


@pytest.mark.wide
@DIVIDED
def test_groups_and_rings_whose_states_are_sums_to_divide_match(ranks, case: ModelCase) -> None:
    # three ranks share heads and channels that they cannot share evenly
    lengths = [20, 5, 1]
    chunks = [[(0, 0, 6)], [(0, 6, 7)], [(0, 7, 20), (1, 0, 5), (2, 0, 1)]]
    sliced, in_ring = (sliced_plan(lengths, chunks, num_ranks=3, ulysses=ulysses) for ulysses in (0, 1))
    check_groups(ranks, 3, case, [sliced, in_ring, plan_of([[(3, (0, 1, 2))]], lengths, 3, ulysses=1)])


@DIVIDED
def test_scans_of_sums_to_divide_match_in_blocks(case: ModelCase) -> None:
    with blocks_of_a_tile():
        assert lone_error(case, sliced_plan([40, 5], [[(0, 0, 30)], [(0, 30, 40), (1, 0, 5)]])) <= TOLERANCE


@pytest.mark.daily("qwen3_5-a whole sequence in front")
@pytest.mark.parametrize("name", PACKINGS)
@pytest.mark.parametrize("case", [QWEN, LFM], ids=lambda case: case.family)
def test_slices_among_other_documents_match(case: ModelCase, name: str) -> None:
    lengths, chunks, words, validated = PACKINGS[name]
    assert lone_error(case, sliced_plan(lengths, chunks, words, validated=validated)) <= TOLERANCE


@pytest.mark.wide
@few(6)
@given(random_slicings(), st.data())
def test_random_cuts_chunks_orders_and_policies_match(slicing: Any, data: st.DataObject) -> None:
    lengths, chunks, words = slicing
    assert lone_error(QWEN, data.draw(policies_for(sliced_plan(lengths, chunks, words)))) <= TOLERANCE


SLICES = [[(0, 0, 12)], [(0, 12, 13)], [(0, 13, 30), (1, 0, 7), (2, 0, 1)]]


def test_adapters_and_frozen_layers_below_match() -> None:
    def later_only(case: ModelCase) -> Any:
        # layers below the first adapter hand no gradient to earlier slices
        return small_decays(with_lora(build_model(case)))

    def decays_only(case: ModelCase) -> Any:
        model = built(case)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("A_log"))
        return model

    plan = sliced_plan([30, 7, 1], SLICES)
    assert lone_error(QWEN, plan, later_only) <= TOLERANCE
    assert lone_error(LFM, plan, later_only) <= TOLERANCE
    assert lone_error(QWEN, plan, decays_only) <= TOLERANCE
    # PEFT does not adapt a matrix that a fused kernel of the mixer reads
    settings = {"r": 2, "lora_alpha": 8, "target_modules": ["in_proj", "x_proj"]}
    short = sliced_plan([7, 2], [[(0, 0, 4)], [(0, 4, 7), (1, 0, 2)]])
    assert lone_error(MAMBA, short, lambda case: adapted(built(case), **settings).train()) <= TOLERANCE


def wide_step_on_rank(case: ModelCase, plans_json: list[str], rows: Any, bug: str = "") -> list[Step]:
    """Runs `step_on_rank` for some plans."""
    with wide_floats():
        return [step_on_rank(case, plan_json, rows, bug) for plan_json in plans_json]


def check_groups(ranks: Any, num_ranks: int, case: ModelCase, plans: list[StepPlan], run: Any = wide_step_on_rank) -> None:
    rows = random_rows(list(plans[0].lengths))
    with wide_floats():
        expected = reference_step(build_model(case), rows)
    for steps in ranks(num_ranks).run(run, case, [plan_to_json(plan) for plan in plans], rows):
        assert max(worst_error(step, expected) for step in steps) <= TOLERANCE


@pytest.mark.wide
@GROUPED
def test_groups_with_uneven_heads_and_shards_shorter_than_the_convolution_match(ranks, case: ModelCase) -> None:
    # three ranks share four heads, of which two and two read the same tensors; a slice of one token leaves ranks with dummy
    # tokens, one of five leaves them two tokens
    chunks = [[(0, 0, 5)], [(0, 5, 6)], [(0, 6, 30), (1, 0, 7), (2, 0, 1)], [(3, 0, 3)], [(3, 3, 40), (4, 0, 9)]]
    lengths = [30, 7, 1, 40, 9]
    plan = sliced_plan(lengths, chunks, num_ranks=3)
    whole = sliced_plan(lengths, [[(number, 0, length) for number, length in enumerate(lengths)]], num_ranks=3)
    policy = (replayed(0.5), replayed(1.0), replayed(0.0), replayed(0.5))
    alone = plan_of([[(1, (0, 4)), (1, (3,)), (1, (1, 2))]], lengths, 3)
    sharded = sliced_plan(lengths, chunks, num_ranks=3, parameters="sharded")
    check_groups(ranks, 3, case, [whole, same_policy(plan, *policy, tile_tokens=0 if case is GRIFFIN else 4), alone, sharded])


@pytest.mark.wide
@pytest.mark.parametrize("case", [QWEN, KIMI, LFM, BOTH], ids=lambda case: case.family)
def test_rings_and_hybrids_match(ranks, case: ModelCase) -> None:
    # documents of one token, and shorter than the convolution or the pieces of a ring, and longer than a tile of the scan
    lengths = [37, 5, 90, 1, 60]
    every = [[(4, tuple(range(5)))]]
    plans = [plan_of(every, lengths, 4, ulysses) for ulysses in (1, 2)]
    chunks = [[(0, 0, 5)], [(0, 5, 6)], [(0, 6, 37), (1, 0, 5), (3, 0, 1)], [(2, 0, 64)], [(2, 64, 90)], [(4, 0, 60)]]
    plans.append(sliced_plan(lengths, chunks, num_ranks=4, ulysses=1))
    if case is QWEN:
        plans.append(same_policy(sliced_plan(lengths, chunks, num_ranks=4, ulysses=2), *[replayed(0.0)] * 4, tile_tokens=8))
        # groups of three, in which the fourth rank runs documents alone; recomputed layers; shards
        plans.append(plan_of([[(3, (0, 2, 3)), (1, (1, 4))]], lengths, 4, ulysses=1))
        plans.append(same_policy(plans[0], *[replayed(1.0)] * 4, tile_tokens=8))
        plans.append(plan_of(every, lengths, 4, ulysses=2, parameters="sharded"))
    check_groups(ranks, 4, case, plans)


@pytest.mark.daily("tokens of other ranks dropped")
@pytest.mark.parametrize("bug", ["states of other ranks dropped", "tokens of other ranks dropped"])
def test_planted_bugs_between_ranks_are_noticed(ranks, bug: str) -> None:
    plan, rows = plan_of([[(2, (0, 1))]], [37, 5], 2, ulysses=1), random_rows([37, 5])
    with wide_floats():
        expected = reference_step(build_model(QWEN), rows)
    for (step,) in ranks(2).run(wide_step_on_rank, QWEN, [plan_to_json(plan)], rows, bug):
        assert worst_error(step, expected) > 1e-4


@pytest.mark.wide
def test_more_ranks_than_heads_with_a_state_match(ranks) -> None:
    chunks = [[(0, 0, 5)], [(0, 5, 6)], [(0, 6, 37), (1, 0, 5)], [(2, 0, 64)], [(2, 64, 90), (3, 0, 1)]]
    plan = sliced_plan([37, 5, 90, 1], chunks, num_ranks=4)
    check_groups(ranks, 4, FEW, [plan, same_policy(plan, replayed(0.5), replayed(0.0), tile_tokens=4)])


def test_groups_that_share_channels_match(ranks) -> None:
    # three ranks share 64 channels, which all read the same tensors
    chunks = [[(0, 0, 3)], [(0, 3, 4)], [(0, 4, 9), (1, 0, 3), (2, 0, 1)]]
    plan, in_ring = (sliced_plan([9, 3, 1], chunks, num_ranks=3, ulysses=ulysses) for ulysses in (0, 1))
    check_groups(ranks, 3, MAMBA, [same_policy(plan, replayed(1.0), replayed(0.0), tile_tokens=4), in_ring])


def wide_stage_step_on_rank(case: ModelCase, plans_json: list[str], rows: Any) -> list[Step]:
    """Runs `stage_step_on_rank` for some plans."""
    with wide_floats():
        return [stage_step_on_rank(case, plan_json, rows)[:2] for plan_json in plans_json]


@pytest.mark.daily("lfm3")
@pytest.mark.parametrize("case", [QWEN, LFM, BOTH], ids=lambda case: case.family)
def test_stages_match(ranks, case: ModelCase) -> None:
    plans = [
        pipeline_plan(LENGTHS, [[(1, SLICED)]], 2, num_layers=4),
        pipeline_plan(LENGTHS, [[(1, SLICED)]], 2, "interleaved", num_layers=4, num_ranges=2),
    ]
    check_stages(ranks(2), case, plans)


def check_stages(pool: RankPool, case: ModelCase, plans: list[StepPlan]) -> None:
    """Asserts that pipelines of the same rows give the loss and gradients of one plain process."""
    rows = random_rows(list(plans[0].lengths))
    with wide_floats():
        loss, expected = reference_step(build_model(case), rows)
    results = pool.run(wide_stage_step_on_rank, case, [plan_to_json(plan) for plan in plans], rows)
    for steps in zip(*results, strict=True):
        assert {name for _, gradients in steps for name in gradients} == expected.keys()
        for step in steps:
            own = {name: expected[name] for name in step[1]}
            assert worst_error(step, (loss, own)) <= TOLERANCE


@pytest.mark.wide
@pytest.mark.parametrize("case", [QWEN, BOTH], ids=lambda case: case.family)
def test_sharded_stages_match(ranks, case: ModelCase) -> None:
    half = len(SLICED) // 2
    groups = [[(1, SLICED[:half]), (1, SLICED[half:])], [(2, [[(6, 0, 17)], [(6, 17, 30)]])]]
    modes: list[Parameters] = ["sharded", "gathered_per_step"]
    lengths = [*LENGTHS, 30]
    check_stages(ranks(4), case, [pipeline_plan(lengths, groups, 2, parameters=parameters) for parameters in modes])


def test_evaluation_passes_states_on_too() -> None:
    model, rows = built(QWEN), random_rows([30, 7, 1])
    with wide_floats():
        expected, _ = reference_step(built(QWEN), rows)
        patch_model(model)
        executor = StepExecutor(whole_model(model, 4), GroupPool((1,), 1.0), torch.device("cpu"))
        plan = sliced_plan([30, 7, 1], SLICES)
        total = executor.evaluate(plan.for_rank(0), rank_inputs(plan, rows, 0)["chunks"])
    num_labels = sum(label != -100 for row in rows for label in row["labels"][1:])
    assert float(total) / num_labels == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.daily(
    "lfm3-states leak in the scan",
    "mamba-states leak in the scan",
    "rwkv-states leak in the scan",
    "xlstm-states leak in the scan",
)
@pytest.mark.parametrize(
    "bug",
    ["states leak in the scan", "states leak in the convolution", "states of slices dropped", "gradients of states dropped"],
)
@pytest.mark.parametrize("case", [QWEN, KIMI, LFM, MAMBA, RWKV, XLSTM], ids=lambda case: case.family)
def test_planted_bugs_are_noticed(case: ModelCase, bug: str) -> None:
    if case is LFM and "scan" in bug:
        pytest.skip("its layers have no scan")
    if case is XLSTM and "convolution" in bug:
        pytest.skip("its layers have no convolution")
    if case is RWKV and "convolution" in bug:
        bug = "states leak in the shift"
    chunks = [[(0, 0, 13), (1, 0, 7)]] if "leak" in bug else [[(0, 0, 6)], [(0, 6, 13), (1, 0, 7)]]
    assert lone_error(case, sliced_plan([13, 7], chunks), bug=bug) > 1e-4


@FAMILIES
def test_a_document_does_not_move_another_by_a_bit(case: ModelCase) -> None:
    model = built(case)
    patch_model(model)
    chunk = Chunk(0, (Span(0, 0, 9), Span(1, 0, 1), Span(2, 0, 8)))
    group = SequenceGroup((0,), "local", (chunk,), ())
    positions = torch.cat([torch.arange(span.stop) for span in chunk.spans]).unsqueeze(0)
    outputs = []
    for first in (3, 4):
        ids = torch.arange(18) + 10
        ids[:9] = first
        context = GroupPool((1,), 1.0).context(group, chunk)
        output = model(ids[None], position_ids=positions, attention_mask=no_mask(ids.device), use_cache=False, longctx=context)
        outputs.append(output.logits[0])
    assert torch.equal(outputs[0][9:], outputs[1][9:]) and not torch.equal(outputs[0][:9], outputs[1][:9])


@contextmanager
def blocks_of_a_tile() -> Iterator[None]:
    """Cuts every scan into blocks of one tile."""
    run = blocks._InBlocks.apply
    with patch.object(state_spec, "BLOCK_BYTES", 1), replaced(blocks._InBlocks, "apply", run):
        yield


IN_BLOCKS = sliced_plan([150, 70], [[(0, 0, 100)], [(0, 100, 150), (1, 0, 70)]])


@pytest.mark.daily("qwen3_5")
@pytest.mark.parametrize("case", [QWEN, BAMBA, KIMI], ids=lambda case: case.family)
def test_scans_in_blocks_match(case: ModelCase) -> None:
    with blocks_of_a_tile():
        assert lone_error(case, IN_BLOCKS) <= TOLERANCE
        assert lone_error(case, same_policy(IN_BLOCKS, *[replayed(0.5)] * 3, replayed(0.0), tile_tokens=8)) <= TOLERANCE


def test_scans_in_blocks_match_with_adapters_and_frozen_weights() -> None:
    def trained(*endings: str) -> Any:
        def make(case: ModelCase) -> Any:
            model = built(case)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name.endswith(endings))
            return model

        return make

    with blocks_of_a_tile():
        # weights that only some inputs of the scan depend on, and that only the scan itself takes
        assert lone_error(QWEN, IN_BLOCKS, trained("A_log")) <= TOLERANCE
        assert lone_error(BAMBA, IN_BLOCKS, trained("A_log", ".D")) <= TOLERANCE
        assert lone_error(QWEN, IN_BLOCKS, lambda case: small_decays(with_lora(build_model(case)))) <= TOLERANCE


def blocks_step_on_rank(case: ModelCase, plans_json: list[str], rows: Any) -> list[Step]:
    """Runs `wide_step_on_rank` with every scan in blocks of a tile."""
    with blocks_of_a_tile():
        return wide_step_on_rank(case, plans_json, rows)


def test_scans_in_blocks_match_in_groups_and_rings(ranks) -> None:
    # a rank of the ring has two pieces of 75 tokens
    shared = sliced_plan([300, 70], [[(0, 0, 100)], [(0, 100, 300), (1, 0, 70)]], num_ranks=2)
    ring = plan_of([[(2, (0, 1))]], [300, 70], 2, ulysses=1)
    check_groups(ranks, 2, QWEN, [shared, ring], blocks_step_on_rank)


@pytest.mark.parametrize("bug", ["states between blocks dropped", "gradients of states between blocks dropped"])
def test_planted_bugs_in_blocks_are_noticed(bug: str) -> None:
    with blocks_of_a_tile():
        assert lone_error(QWEN, sliced_plan([150], [[(0, 0, 150)]]), bug=bug) > 1e-4


def with_tiles(case: ModelCase, size: int) -> Any:
    """The model whose rule computes `size` tokens at once, in transformers' own code, with decays of up to 16 per token."""
    model = built(case, 16.0)
    for mixer in mixers_of(model).values():
        own = inspect.unwrap(type(mixer).forward)
        names = {**own.__globals__, RULE: partial(inspect.unwrap(own.__globals__[RULE]), chunk_size=size)}
        # transformers passes its own keywords on, which the unwrapped rule ignores
        function = FunctionType(own.__code__, names, "forward", own.__defaults__, own.__closure__)
        mixer.forward = MethodType(function, mixer)
    return model


def test_cuts_between_tiles_err_no_more_than_transformers_itself() -> None:
    lengths = [2 * TILE + 20]
    rows = random_rows(lengths)
    with wide_floats():
        floor = worst_error(reference_step(with_tiles(QWEN, 16), rows), reference_step(built(QWEN, 16.0), rows))

    def error(*sizes: int) -> float:
        return lone_error(QWEN, sliced_plan(lengths, [[span] for span in cut(0, sizes)]), lambda case: built(case, 16.0))

    on_tiles, between = error(TILE, TILE, 20), error(33, 70, 45)
    assert on_tiles <= TOLERANCE < between <= 10 * floor
