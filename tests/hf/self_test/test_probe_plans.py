"""Probe plans: valid on every run, with what its plans may use in them, documents of their own on the first and last rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_longctx.hf.self_test.probe_plans import LONE, LONG, PACKED, least_lent_tokens, probe_lengths, probe_plans
from hf_longctx.plan.core.lending import is_lent, running_stages
from hf_longctx.plan.core.settings import GENERIC_CPU, ClusterSpec, PlannerConfig, default_degrees
from hf_longctx.plan.core.types import LayerRange, Span
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.model.model_spec import ModelSpec

pytestmark = pytest.mark.quick

MODEL = ModelSpec(8, 32, 48, 4, 2, 8, 64, 512)
LENGTHS = probe_lengths(61)


def probes(
    num_ranks: int,
    num_layers: tuple[tuple[int, ...], ...] = ((2,),),
    has_policies: bool = True,
    degrees=(),
    lends: bool = False,
    **costs,
):
    cluster = ClusterSpec(num_ranks, num_ranks, GENERIC_CPU)
    priced = CostModel(MODEL, cluster, default_coefficients(MODEL, cluster))
    ranks_per_stage = num_ranks // len(num_layers)
    stages = tuple((LayerRange(stage, 1),) for stage in range(len(num_layers))) if lends else ()
    config = PlannerConfig(64, degrees or default_degrees(ranks_per_stage, 4), stages=stages, lend_stages=lends)
    return {probe.name: probe.plan for probe in probe_plans(LENGTHS, replace(priced, **costs), config, num_layers, has_policies)}


@pytest.mark.parametrize(
    "num_ranks,settings,names",
    [
        (1, {}, ["one rank", "slices, one rank, recomputed"]),
        (1, {"has_policies": False}, ["one rank"]),
        (
            2,
            {},
            [
                *("ulysses of 2", "ring of 2", "slices, ulysses of 2, heads in parts"),
                *("slices, ulysses of 2, recomputed", "slices, ring of 2, recomputed"),
            ],
        ),
        (2, {"has_policies": False, "method": "ulysses"}, ["ulysses of 2", "ulysses of 2, heads in parts"]),
        (
            *(2, {"method": "ulysses", "model": replace(MODEL, exchange_parts=1)}),
            ["ulysses of 2", "slices, ulysses of 2, recomputed"],
        ),
        (2, {"method": "ring"}, ["ring of 2", "slices, one rank, recomputed", "slices, ring of 2, recomputed"]),
        (2, {"degrees": (1,)}, ["one rank", "slices, one rank, recomputed"]),
        (4, {"has_policies": False}, ["ulysses of 4", "hybrid of 4 in blocks of 2", "ring of 4"]),
        (4, {"degrees": (1, 3)}, ["ring of 3", "slices, one rank, recomputed", "slices, ring of 3, recomputed"]),
        (
            4,
            {"num_layers": ((1,), (3,)), "method": "ulysses"},
            ["ulysses of 2", "slices, ulysses of 2, heads in parts", "slices, ulysses of 2, recomputed"],
        ),
        (2, {"num_layers": ((1,), (1,)), "method": "ulysses", "has_policies": False}, ["one rank", "slices, one rank"]),
        (2, {"num_layers": ((1, 1), (1, 1)), "method": "ulysses"}, ["one rank", "slices, one rank, interleaved, recomputed"]),
        (
            8,
            {"parameters": "sharded", "shard_ranks": 4},
            [
                *("hybrid of 8 in blocks of 2", "ring of 8", "slices, one rank, recomputed"),
                "slices, hybrid of 8 in blocks of 2, recomputed",
            ],
        ),
    ],
)
def test_probes_use_what_plans_of_the_run_may(num_ranks: int, settings, names: list[str]) -> None:
    # they were validated where they were made
    found = probes(num_ranks, **settings)
    assert list(found) == names
    for name, plan in found.items():
        packed, lone = plan.micro_batches
        spans = [span for group in packed.groups for chunk in group.chunks for span in chunk.spans]
        assert {span.sequence for span in spans} == set(PACKED)
        assert ("slices" in name) == any(span.start for span in spans)
        assert ("recomputed" in name) == any(stage.activations for stage in packed.groups[0].stages)
        ranks = {span.sequence: group.positions for group in lone.groups for chunk in group.chunks for span in chunk.spans}
        assert ranks == {LONE[0]: (0,), LONE[1]: (plan.ranks_per_stage - 1,)}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_that_may_cut_heads_probes_it(num_ranks: int) -> None:
    found = probes(num_ranks, model=replace(MODEL, cuts_heads=True))
    ((name, plan),) = [(name, plan) for name, plan in found.items() if "pieces" in name]
    pieces = replace(MODEL, cuts_heads=True).head_pieces(num_ranks)
    assert pieces > 1 and f"in {pieces} pieces" in name
    stages = [group.stages[0] for micro_batch in plan.micro_batches for group in micro_batch.groups]
    assert {layer.head_pieces for stage in stages for policy in stage.activations for layer in policy.layers} == {pieces}
    assert not any("pieces" in name for name in probes(num_ranks, has_policies=False, model=replace(MODEL, cuts_heads=True)))


@pytest.mark.parametrize(("num_ranks", "num_stages"), [(2, 2), (4, 2), (5, 5), (6, 2)])
def test_lent_stages_run_the_first_and_the_last_slices_of_the_long_document(num_ranks: int, num_stages: int) -> None:
    found = probes(num_ranks, ((1,),) * num_stages, lends=True, method="ulysses", parameters="replicated", shard_ranks=1)
    (name,) = [name for name in found if "lent" in name]
    assert name.endswith("lent stages") and ("ulysses" in name) == (num_ranks > num_stages)
    lent, *others = found[name].micro_batches
    group, *idle = lent.groups
    assert is_lent(group) and not any(is_lent(each) for each in (*idle, *(one for batch in others for one in batch.groups)))
    assert [span for chunk in group.chunks for span in chunk.spans] == [chunk.spans[0] for chunk in group.chunks]
    assert sum(chunk.num_tokens for chunk in group.chunks) == LENGTHS[LONG]
    # the first stage lends its ranks to the last slice of the last stage, and the last stage to the first slice of the first one
    first, last = ((stage.actions[0], stage.actions) for stage in (group.stages[0], group.stages[-1]))
    assert num_stages - 1 in running_stages(first[0])
    assert 0 in running_stages(next(action for action in last[1] if (action.kind, action.chunk) == ("F", len(group.chunks) - 1)))


def test_stages_are_not_lent_to_slices_with_too_few_tokens_for_their_ranks() -> None:
    lent = {"lends": True, "method": "ulysses", "parameters": "replicated", "shard_ranks": 1}
    assert least_lent_tokens(8, 1) == 64 > LENGTHS[LONG]
    assert not any("lent" in name for name in probes(8, ((1,),) * 8, **lent))


def test_the_long_document_is_the_last_of_its_pack_so_that_it_would_see_the_others() -> None:
    (chunk,) = probes(2)["ulysses of 2"].micro_batches[0].groups[0].chunks
    assert chunk.spans[-1] == Span(LONG, 0, 61)
    assert LENGTHS[LONG] == max(LENGTHS)
