"""Bytes and chunks in flight of every pass of a round, counted at once, against a walk from pass to pass."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import fields, replace
from typing import Any
from unittest.mock import patch

import pytest
from helpers.plans.stage_orders import chunks_of, plan_of, random_shapes

from hf_longctx.plan.core.settings import ClusterSpec, HardwareSpec
from hf_longctx.plan.core.sharding import sequence_ends
from hf_longctx.plan.core.types import LayerPolicy, SequenceGroup, StagePlan, TensorShare
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.memory import byte_model as byte_model_file
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.layer import Load
from hf_longctx.plan.memory.stage import RoundBytes, chunk_load
from hf_longctx.plan.policies.fit import with_layers
from hf_longctx.plan.predict.pipeline_run import PredictionCache
from hf_longctx.plan.room.cells import GroupCells, recomputed_layer

MODEL = named_model("llama-3.1-8b")
GPU = HardwareSpec("gpu", 2e14, 1.5e14, 80 << 30, 2e11, 2.5e10, 3e-5)
MOVED = LayerPolicy((TensorShare("layer_input", host=0.5, device=0.5), TensorShare("mlp", recompute=1.0)))


def random_group(seed: int) -> SequenceGroup:
    """Slices, packs and hybrids on one to four stages, some in two parts, under policies of all kinds or none."""
    draw = random.Random(seed)
    num_ranges = draw.choice([1, 1, 2])
    num_stages = draw.choice([2, 4]) if num_ranges > 1 else draw.choice([1, 2, 3, 4])
    shapes = [(2, 0)] * num_stages if num_ranges > 1 else random_shapes(draw)
    plan = plan_of(chunks_of(shapes), num_stages, "interleaved" if num_ranges > 1 else "elastic", num_ranges)
    (group,) = plan.micro_batches[0].groups
    if draw.random() < 0.3:
        return group
    places = [
        (stage.stage, chunk.index, layer_range)
        for stage in group.stages
        for chunk in group.chunks
        for layer_range in range(num_ranges)
    ]
    layers = {place: draw.choice([(), (MOVED,), (recomputed_layer(True),)]) for place in places}
    return with_layers(group, layers, draw.choice([0, 4]))


def walked(group: SequenceGroup, stage: StagePlan) -> list[tuple[int, ...]]:
    """saved, host, book, workspace and peak of every pass, from the definitions."""
    ends, common = sequence_ends(group.chunks), Load(0, (), 0)
    kv_bytes, grad_bytes = (2 * MODEL.num_kv_heads * MODEL.head_dim * size for size in (2, 4))
    passes = [action for action in stage.actions if action.kind in "FB"]
    held: dict[tuple[int, int], Any] = {}
    book: dict[tuple[int, int], int] = {}
    found = []
    for place, action in enumerate(passes):
        key, chunk, num_layers = (
            (action.chunk, action.layer_range),
            group.chunks[action.chunk],
            stage.layer_ranges[action.layer_range].num_layers,
        )
        slices = [span for span in chunk.spans if span.start or span.stop < ends[span.sequence]]
        entries = [(action.layer_range, span.sequence) for span in slices]
        if action.kind == "F":
            policy = next((p for p in stage.activations if (p.chunk, p.layer_range) == key), None)
            load = replace(
                chunk_load(group, chunk, 0, common),
                num_layers=num_layers,
                has_head=(stage.stage, action.layer_range) == (len(group.stages) - 1, len(stage.layer_ranges) - 1),
                keeps_gradients=(passes[place + 1].chunk, passes[place + 1].layer_range, passes[place + 1].kind) == (*key, "B"),
                receives=bool(policy and policy.layers) and (stage.stage, action.layer_range) != (0, 0),
            )
            held[key] = ByteModel(MODEL).chunk(load, policy)
            for entry, span in zip(entries, slices, strict=True):
                book.setdefault(entry, kv_bytes * num_layers * ends[span.sequence])
            first, last = sum(size for (layer_range, _), size in book.items() if layer_range == action.layer_range), 0
            work, others = held[key].forward_workspace, sum(book.values()) - first
        else:
            before = sum(size for (layer_range, _), size in book.items() if layer_range == action.layer_range)
            others = sum(book.values()) - before
            for entry, span in zip(entries, slices, strict=True):
                if span.stop == ends[span.sequence]:
                    book[entry] += grad_bytes * num_layers * span.start
                if not span.start:
                    del book[entry]
            after = sum(size for (layer_range, _), size in book.items() if layer_range == action.layer_range)
            a_layer = (after - before) // num_layers
            first, last = (before + a_layer, after) if after > before else (before, after - a_layer)
            work = held[key].backward_workspace
        saved, host = (sum(getattr(one, name) for one in held.values()) for name in ("device", "host"))
        # a backward of the first layer
        ending = saved - held[key].device + held[key].ending + last if action.kind == "B" else 0
        book_bytes = max(first, last) + others
        found.append((saved, host, book_bytes, work, max(saved + work + first, ending) + others))
        if action.kind == "B":
            del held[key]
    return found


@pytest.mark.parametrize("seed", range(40))
def test_bytes_of_every_pass_are_those_of_a_walk(seed: int) -> None:
    group, names = random_group(seed), [field.name for field in fields(RoundBytes)]
    byte_model = ByteModel(MODEL)
    for stage in group.stages:
        expected = walked(group, stage)
        moments = byte_model.moments(group, stage)
        assert list(zip(*(getattr(moments, name).tolist() for name in names), strict=True)) == expected
        most = byte_model.moments(group, stage).most
        assert [getattr(most, name) for name in names] == [max(each) for each in zip(*expected, strict=True)]


@pytest.mark.wide
def test_a_peak_is_bounded_from_below_and_mostly_found() -> None:
    found = []
    for seed in range(60):
        group, byte_model = random_group(seed), ByteModel(MODEL)
        for stage in group.stages:
            for waiting in (0, 10**9):
                # a fresh model has counted nothing yet
                least = ByteModel(MODEL).least_peak(group, stage, waiting)
                peak = byte_model.moments(group, stage, waiting=waiting).most.peak
                assert 0 < least <= peak
                found.append(least == peak)
    assert sum(found) > 0.9 * len(found)


@pytest.mark.parametrize("seed", range(5))
def test_gradients_wait_after_the_first_backward(seed: int) -> None:
    group, byte_model = random_group(seed), ByteModel(MODEL)
    for stage in group.stages:
        peak, waiting_peak = (byte_model.moments(group, stage, waiting=waiting).peak for waiting in (0, 1000))
        passes = [action.kind for action in stage.actions if action.kind in "FB"]
        # while the first backward runs, they take the place of what it frees
        first = passes.index("B")
        assert (waiting_peak - peak).tolist() == [0] * (first + 1) + [1000] * (len(passes) - first - 1)


@pytest.mark.parametrize("seed", range(20))
def test_chunks_in_flight_are_those_of_a_walk(seed: int) -> None:
    group = random_group(seed)
    group = with_layers(group, {}, 4)
    cluster = ClusterSpec(len(group.stages), 8, GPU)
    costs = CostModel(MODEL, cluster, default_coefficients(MODEL, cluster), "ulysses", parameters="gathered_per_round")
    cells = GroupCells(group, costs, 4, True, PredictionCache())
    moments = cells.moments([0.0] * len(group.stages))
    number = 0
    for stage in group.stages:
        passes = [action for action in stage.actions if action.kind in "FB"]
        begin = stage.stage * len(group.chunks)
        places = [(begin + action.chunk) * len(stage.layer_ranges) + action.layer_range for action in passes]
        waiting: list[int] = []
        for place, action in zip(places, passes, strict=True):
            if action.kind == "F":
                waiting.append(place)
            own = range(len(cells.cells))
            assert [cell for cell in own if moments.first[cell] <= number < moments.stop[cell]] == sorted(waiting)
            if action.kind == "B":
                waiting.remove(place)
            number += 1
    assert number == len(moments.excess_bytes)


@pytest.mark.parametrize("seed", range(10))
def test_equal_stages_are_counted_once_whatever_objects_they_are(seed: int) -> None:
    group, byte_model = random_group(seed), ByteModel(MODEL)
    found = [byte_model.moments(group, stage).most for stage in group.stages]
    same = deepcopy(group)
    assert same == group and same.chunks is not group.chunks and same.stages[0].actions is not group.stages[0].actions
    with patch.object(byte_model_file, "LayerBytes", None):
        assert [byte_model.moments(same, stage).most for stage in same.stages] == found
    wider = replace(MODEL, hidden_size=2 * MODEL.hidden_size)
    assert ByteModel(wider).moments(group, group.stages[0]).most != found[0]
