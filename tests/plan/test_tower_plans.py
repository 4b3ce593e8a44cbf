"""Plans count towers: their seconds in the group that holds an image's tokens, and memory for one image at a time."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
from helpers.plans.cost_models import MODEL, cost_model
from helpers.plans.pipeline_plans import stage_ranges
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan import planner
from hf_longctx.plan.core.serialize import plan_digest, plan_from_json, plan_to_json
from hf_longctx.plan.core.settings import ActivationBudget, NoRoom, PlannerConfig
from hf_longctx.plan.core.sharding import rank_media
from hf_longctx.plan.core.types import Chunk, GroupShape, Media, MicroBatch, SequenceGroup, Span, StepPlan, TowerWork
from hf_longctx.plan.core.validate import PlanError, validate_plan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.model.towers import TowerSpec
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.predict.evaluate import evaluate_plan

TOWER = TowerSpec(
    **{"num_layers": 6, "hidden_size": 64, "inner_size": 256, "num_heads": 4, "patch_elements": 588, "merged_patches": 4},
    **{"projector_products": 256 * 64, "kept": 11, "kept_inner": 2, "kept_after": 3},
)
TRAINED = replace(TOWER, graph_layers=6, trained_parameters=TOWER.num_parameters)
CONFIG = PlannerConfig(tokens_per_rank=400, degrees=(1, 2), solver="greedy")


def costs_of(tower: TowerSpec = TRAINED, num_ranks: int = 2) -> CostModel:
    costs = cost_model("attention", num_ranks)
    return replace(costs, model=replace(MODEL, tower=tower))


def image(start: int, stop: int) -> TowerWork:
    return TowerWork(start, stop, 1, 4 * (stop - start), stop - start)


def test_sequences_with_images_share_ranks_with_those_without() -> None:
    costs = costs_of()
    media: tuple[Media, ...] = ((image(0, 80),), (image(10, 90),), (), ())
    plan = plan_step(0, [100] * 4, costs, CONFIG, media=media)
    held = [
        sorted(
            bool(media[span.sequence])
            for micro_batch in plan.micro_batches
            for group in micro_batch.groups
            if position in group.positions
            for chunk in group.chunks
            for span in chunk.spans
        )
        for position in range(2)
    ]
    assert held == [[False, True], [False, True]]
    without = plan_step(0, [100] * 4, costs, CONFIG)
    # everything fits, so none runs again
    towers_s = sum(costs.tower_s(media[0], is_backward) for is_backward in (False, True))
    assert towers_s > 0.01 * without.estimate.step_s
    assert plan.estimate.step_s == pytest.approx(without.estimate.step_s + towers_s)
    # a frozen tower has no backward
    frozen = plan_step(0, [100] * 4, costs_of(TOWER), CONFIG, media=media)
    assert frozen.estimate.step_s == pytest.approx(without.estimate.step_s + towers_s / 3)


def test_an_image_counts_on_every_rank_and_in_every_slice_that_has_a_token_of_it() -> None:
    media: tuple[Media, ...] = ((image(0, 10), image(20, 40), image(50, 60)), ())
    whole = Chunk(0, (Span(1, 0, 10), Span(0, 0, 60)))
    assert rank_media(whole, GroupShape(1), media) == [{(0, 0): 10, (0, 1): 20, (0, 2): 10}]
    assert rank_media(whole, GroupShape(2, 2), media) == [{(0, 0): 10, (0, 1): 5}, {(0, 1): 15, (0, 2): 10}]
    assert rank_media(Chunk(0, (Span(0, 25, 50),)), GroupShape(1), media) == [{(0, 1): 15}]
    # zigzag: the first and last quarter on one rank
    assert rank_media(Chunk(0, (Span(0, 0, 60),)), GroupShape(2, 1), media) == [{(0, 0): 10, (0, 2): 10}, {(0, 1): 20}]
    costs = replace(costs_of(), media=media)
    chunks = [Chunk(index, (Span(0, *ends),)) for index, ends in enumerate(((0, 30), (30, 60)))]
    group = SequenceGroup.of(GroupShape(1), (0,), tuple(chunks))
    slices = [costs.chunk_towers_s(group, chunk, False) for chunk in chunks]
    alone = [costs.tower_s([each], False) for each in media[0]]
    assert slices == pytest.approx([alone[0] + alone[1], alone[1] + alone[2]])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 4]))
def test_any_images_give_a_valid_plan_that_is_read_back_and_is_no_faster_than_its_bound(seed: int, num_ranks: int) -> None:
    drawn = random.Random(seed)
    lengths = [drawn.randint(8, 300) for _ in range(drawn.randint(1, 9))]
    media = []
    for length in lengths:
        ends = sorted(drawn.sample(range(length + 1), 2 * drawn.randint(0, 3)))
        media.append(tuple(image(start, stop) for start, stop in zip(ends[::2], ends[1::2], strict=True)))
    costs = costs_of(num_ranks=num_ranks)
    config = replace(CONFIG, degrees=tuple(d for d in (1, 2, 4) if d <= num_ranks), solver="auto")
    plan = plan_step(0, lengths, costs, config, media=tuple(media))
    again = plan_from_json(plan_to_json(plan))
    assert plan_digest(again) == plan_digest(plan) and again.media == plan.media == tuple(media)
    assert plan.estimate.lower_bound_s <= plan.estimate.step_s * (1 + 1e-9)
    run = evaluate_plan(again, costs)
    assert (run.step_s, max(run.peak_bytes)) == (plan.estimate.step_s, plan.estimate.peak_bytes)


def test_the_first_stage_counts_towers() -> None:
    costs = costs_of(num_ranks=2)
    config = replace(CONFIG, degrees=(1,), stages=stage_ranges(MODEL, 2))
    media: tuple[Media, ...] = ((image(0, 80),), (image(10, 90),), (), ())
    plan = plan_step(0, [100] * 4, costs, config, media=media)
    with_images, without = (evaluate_plan(replace(plan, media=each), costs) for each in (media, ()))
    towers_s = sum(costs.tower_s([*media[0], *media[1]], is_backward) for is_backward in (False, True))
    assert with_images.ranks[0].compute_s - without.ranks[0].compute_s == pytest.approx(towers_s)
    assert with_images.ranks[1].compute_s == pytest.approx(without.ranks[1].compute_s)
    assert with_images.peak_bytes[0] - without.peak_bytes[0] > 0
    assert with_images.peak_bytes[1] == without.peak_bytes[1]
    assert plan.estimate.step_s == with_images.step_s > without.step_s


def test_graphs_wait_where_memory_is_left_and_are_made_again_elsewhere() -> None:
    costs, tower = costs_of(num_ranks=1), TRAINED
    # the second has twice the operations of attention for each byte
    media: tuple[Media, ...] = ((image(0, 10),), (image(0, 20),))
    sizes = [tower.graph_bytes(each[0], MODEL.bytes_per_element) for each in media]
    towers_s = [costs.tower_s(each, False) for each in media]
    config, states = replace(CONFIG, degrees=(1,)), ByteModel(costs.model).states("replicated", 1)
    text = plan_step(0, [200, 200], costs, config).estimate
    for room, kept in ((sum(sizes), (1, 1)), (sizes[1], (0, 1)), (sizes[0], (1, 0)), (sizes[0] - 1, (0, 0))):
        budget = ActivationBudget(400, text.peak_bytes - states + room)
        plan = plan_step(0, [200, 200], costs, replace(config, activations=budget), media=media)
        ((group,),) = (each.groups for each in plan.micro_batches)
        assert {run.sequence: run.keeps for run in group.towers} == dict(enumerate(kept))
        # nothing but images runs again, and what is saved tells what is held
        again_s = sum(seconds for seconds, keeps in zip(towers_s, kept, strict=True) if not keeps)
        assert plan.estimate.step_s == pytest.approx(text.step_s + 3 * sum(towers_s) + again_s)
        held = sum(size for size, keeps in zip(sizes, kept, strict=True) if keeps)
        assert plan.estimate.peak_bytes == text.peak_bytes + held <= budget.device_bytes + states
        assert plan.estimate.lower_bound_s <= plan.estimate.step_s * (1 + 1e-9)
    # without a limit, and for a frozen tower, nothing runs again
    for own in (costs, costs_of(TOWER, num_ranks=1)):
        plan = plan_step(0, [200, 200], own, config, media=media)
        assert all(run.keeps for micro_batch in plan.micro_batches for group in micro_batch.groups for run in group.towers)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.sampled_from([(2, 2), (4, 4), (2, 1), (4, 2)]), st.booleans())
def test_images_are_dealt_over_a_group_where_that_takes_fewer_seconds(
    sizes: list[int], ways: tuple[int, int], is_slow: bool
) -> None:
    bounds = [0, *accumulate(sizes)]
    media: tuple[Media, ...] = (tuple(image(*ends) for ends in pairwise(bounds)),)
    costs = costs_of(num_ranks=4)
    byte_s = 1.0 if is_slow else 0.0
    coefficients = replace(costs.coefficients, **{
        name: replace(getattr(costs.coefficients, name), message_s=0.0, link_byte_s=byte_s, network_byte_s=byte_s)
        for name in ("forward", "backward")
    })  # fmt: skip
    costs = replace(costs, media=media, coefficients=coefficients)
    shape, chunk = GroupShape(*ways), Chunk(0, (Span(0, 0, 2 * bounds[-1]),))
    group = SequenceGroup.of(shape, tuple(range(shape.degree)), (chunk,))
    seconds = {(0, number): costs.tower_s([each], False) for number, each in enumerate(media[0])}
    own_s = max(sum(map(seconds.__getitem__, own)) for own in rank_media(chunk, shape, media))
    dealt = costs.dealt_images(chunk, shape)
    if is_slow:
        assert not dealt
        return
    loads = [sum(seconds[key] for key, rank in dealt.items() if rank == place) for place in range(shape.degree)]
    if dealt:
        # each once, and not further above an even share than the longest
        assert dealt.keys() == seconds.keys()
        assert max(loads) < own_s and max(loads) <= sum(loads) / shape.degree + max(seconds.values())
    else:
        assert own_s <= sum(seconds.values()) / shape.degree + max(seconds.values())
    assert costs.chunk_towers_s(group, chunk, False) == pytest.approx(max(loads) if dealt else own_s)


def test_plans_say_which_rank_runs_an_image_and_count_its_bytes_there() -> None:
    costs = costs_of(num_ranks=2)
    # both in the first half, so on the first rank; as large as the seconds of towers are next to an exchange
    media: tuple[Media, ...] = ((image(0, 100), image(100, 190)),)
    config = replace(CONFIG, degrees=(2,), activations=ActivationBudget(400, 1 << 30))
    plan = plan_step(0, [400], costs, config, media=media)
    ((group,),) = (each.groups for each in plan.micro_batches)
    assert [(run.number, run.rank) for run in group.towers] == [(0, 0), (1, 1)]
    own = replace(plan, micro_batches=(MicroBatch((replace(group, towers=tuple(r._replace(rank=-1) for r in group.towers)),)),))
    dealt, held = evaluate_plan(plan, costs), evaluate_plan(own, costs)
    assert dealt.step_s < held.step_s
    assert max(dealt.peak_bytes) < max(held.peak_bytes)
    with pytest.raises(PlanError, match=re.escape("images are dealt to ranks [0, 2] of a group of 2")):
        wrong = replace(group, towers=(group.towers[0], group.towers[1]._replace(rank=2)))
        validate_plan(replace(plan, micro_batches=(MicroBatch((wrong,)),)))


def test_memory_is_left_for_towers_that_meet_what_other_chunks_hold() -> None:
    costs, media = costs_of(num_ranks=1), ((image(900, 910),),)
    config, states = replace(CONFIG, degrees=(1,), tokens_per_rank=1000), ByteModel(costs.model).states("replicated", 1)
    roomy = plan_step(0, [1000], costs, replace(config, activations=ActivationBudget(1000, 1 << 40)))
    # slices
    tight = replace(config, activations=ActivationBudget(100, (roomy.estimate.peak_bytes - states) // 4))
    plan = plan_step(0, [1000], costs, tight, media=media)
    assert tight.activations is not None and plan.estimate.peak_bytes <= tight.activations.device_bytes + states
    # where no plan leaves room, the prediction says so
    huge = ((TowerWork(0, 100, 1, 10**6, 100),),)
    found = plan_step(0, [1000], costs, tight, media=huge).estimate
    assert math.isfinite(found.step_s) and found.peak_bytes > costs.model.tower.work_bytes(huge[0][0], MODEL.bytes_per_element)


def test_only_a_lack_of_room_leads_to_a_plan_without_room_for_towers(monkeypatch: pytest.MonkeyPatch) -> None:
    costs, media = costs_of(num_ranks=1), ((image(0, 100),), ())
    config = replace(CONFIG, degrees=(1,), activations=ActivationBudget(400, 1 << 30))
    full = plan_step(0, [200, 200], costs, config, media=media)
    full = replace(full, estimate=replace(full.estimate, peak_bytes=1 << 40))
    tried: list[int] = []

    def failing(error: ValueError) -> StepPlan:
        def planned(*given: Any) -> Any:
            tried.append(given[3].activations.device_bytes)
            if len(tried) > 1:
                raise error
            return full

        tried.clear()
        monkeypatch.setattr(planner, "_planned", planned)
        return plan_step(0, [200, 200], costs, config, media=media)

    assert failing(NoRoom("nothing fits")) is full
    assert tried == [1 << 30, (1 << 30) - costs.model.towers_bytes(media)]
    for error in (PlanError("deadlock"), ValueError("not a whole number of ranks")):
        with pytest.raises(ValueError, match=str(error)):
            failing(error)


def test_what_fits_no_memory_is_a_lack_of_room() -> None:
    costs = costs_of(num_ranks=1)
    with pytest.raises(NoRoom):
        plan_step(0, [200, 200], costs, replace(CONFIG, degrees=(1,), activations=ActivationBudget(1, 1)))
    staged = replace(CONFIG, degrees=(1,), stages=stage_ranges(MODEL, 2), activations=ActivationBudget(1, 1))
    with pytest.raises(NoRoom):
        plan_step(0, [200, 200], costs_of(), staged)


def test_towers_of_an_image_that_a_chunk_lacks_are_named() -> None:
    plan = plan_step(0, [100, 100], costs_of(num_ranks=1), replace(CONFIG, degrees=(1,)), media=((image(0, 80),), ()))
    ((group,),) = (each.groups for each in plan.micro_batches)
    (run,) = group.towers
    for towers, message in (
        ((run, run), "the towers run image 0 of sequence 0 2 times, but the chunk has a token of it"),
        ((run._replace(number=1),), "the towers run image 0 of sequence 0 0 times, but the chunk has a token of it"),
        ((run, run._replace(sequence=1)), "the towers run image 0 of sequence 1 1 times, but the chunk has no token of it"),
    ):
        with pytest.raises(PlanError, match=message):
            validate_plan(replace(plan, micro_batches=(MicroBatch((replace(group, towers=towers),)),)))


@pytest.mark.parametrize("media,message", [
    (((image(0, 80),),), "images are given for 1 sequences, but the plan has 2"),
    (((image(0, 80), image(79, 90)), ()), "sequence 0: image (79, 90, 1, 44, 11) is empty, overlaps the one before"),
    (((), (image(50, 101),)), "lies outside its 100 tokens"),
    (((), (TowerWork(0, 9, 1, 0, 9),)), "sequence 1: image (0, 9, 1, 0, 9) is empty"),
])  # fmt: skip
def test_impossible_images_are_named(media: tuple[Media, ...], message: str) -> None:
    plan = plan_step(0, [100, 100], costs_of(), CONFIG)
    with pytest.raises(PlanError, match=re.escape(message)):
        validate_plan(replace(plan, media=media))
    text = plan_to_json(replace(plan, media=((image(0, 80),), ()))).replace("[0, 80, 1, 320, 80]", "[0, 80]")
    with pytest.raises(ValueError, match=re.escape("plan.media[0]: expected [start, stop, num_parts, patches, num_features]")):
        plan_from_json(text)
