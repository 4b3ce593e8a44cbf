"""Deals the layers of a model to pipeline stages, so that the slowest stage takes as few seconds as possible.

Layers differ: one with a window takes seconds that grow with the tokens, one without a window seconds that grow with their
square, and the last stage also has the output head and the loss. At long contexts all stages wait for one that has one full layer
more than another, so layers are dealt by seconds and not by number. Since even then whole layers leave stages uneven, stages may
share the work of the head (`stage_layers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, product

from hf_longctx.plan.core.types import Chunk, GroupShape, LayerRange, Ranges, Span
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.model.attention_pairs import AttentionPairs

# work that differs by less than this share of a layer counts as equal
_EQUAL = 1e-9


# share of the busiest stage's work that a spread head must save
_LEAST_GAIN = 0.01
# least share of the head's work for which a stage holds its weight and states
_LEAST_SHARE = 0.05
# share of the least work of the busiest stage by which fewer stages may exceed it: each holds the head's weight and its states,
# and stages at the end hold the fewest chunks
_NEAR_LEAST = 0.015


def stage_layers(
    costs: CostModel, num_stages: int, num_ranges: int, lengths: Sequence[int], spreads_head: bool
) -> tuple[Ranges, tuple[float, ...]]:
    """Layers of every stage, balanced by seconds, and the share of the output head's work that each stage does.

    The last stages share it, as few as bring the busiest stage near its least work; later ones have no more layers than earlier
    ones. There are no shares if the head stays on the last stage: without `spreads_head`, with several layer ranges, or if the
    busiest stage would work hardly less. Raises ValueError like `balanced_ranges`.
    """
    plain = balanced_ranges(costs, num_stages, lengths, num_ranges)
    head_layers, layer_work = _work(costs, lengths) if spreads_head and num_stages > 1 and num_ranges == 1 else (0.0, [])
    if not layer_work or not head_layers:
        return plain, ()
    found: list[tuple[float, Ranges, list[float]]] = []
    # divided from behind, so that the first stages get what is left over
    counts = [own[0].num_layers for own in layer_ranges(len(layer_work), num_stages, 1, 0.0, layer_work[::-1])][::-1]
    bounds = accumulate(counts, initial=0)
    without_head = tuple((LayerRange(start, stop - start),) for start, stop in pairwise(bounds))
    for first, ranges in product(range(num_stages - 2, -1, -1), (without_head, plain)):
        work = [_layers_work(own, layer_work) for own in ranges]
        shares = [0.0] * first + _even_shares(work[first:], head_layers)
        if min(shares[first:]) >= _LEAST_SHARE * head_layers:
            found.append((max(own + share for own, share in zip(work, shares, strict=True)), ranges, shares))
    least = min((most for most, _, _ in found), default=0.0)
    if not found:
        return plain, ()
    most, ranges, shares = next(each for each in found if each[0] <= (1 + _NEAR_LEAST) * least)
    alone = [_layers_work(own, layer_work) for own in plain]
    alone[-1] += head_layers
    if most > (1 - _LEAST_GAIN) * max(alone):
        return plain, ()
    return ranges, tuple(share / head_layers for share in shares)


def _layers_work(own: Sequence[LayerRange], layer_work: Sequence[float]) -> float:
    return sum(sum(layer_work[each.first_layer : each.first_layer + each.num_layers]) for each in own)


def _even_shares(work: Sequence[float], more: float) -> list[float]:
    """Divides `more` work among stages that have this work, so that the busiest has as little as possible."""
    level, ordered = 0.0, sorted(work)
    for count in range(1, len(ordered) + 1):
        level = (more + sum(ordered[:count])) / count
        if count == len(ordered) or level <= ordered[count]:
            break
    return [max(0.0, level - own) for own in work]


def balanced_ranges(costs: CostModel, num_stages: int, lengths: Sequence[int], num_ranges: int = 1) -> Ranges:
    """Layers of every stage, in `num_ranges` ranges each, balanced by seconds for sequences of these lengths.

    The head with the loss, which the last stage has, counts as the number of layers that takes as many seconds. Raises ValueError
    for too few layers.
    """
    model = costs.model
    if num_stages == 1:
        return ((LayerRange(0, model.num_layers),),)
    return layer_ranges(model.num_layers, num_stages, num_ranges, *_work(costs, lengths))


def _work(costs: CostModel, lengths: Sequence[int]) -> tuple[float, list[float]]:
    """Work of the head with the loss, and of every layer, in units of a mean layer; none if only constant costs are known."""
    model = costs.model
    chunk, shape = Chunk(0, tuple(Span(i, 0, length) for i, length in enumerate(lengths))), GroupShape(1)
    # leave the constant cost of a chunk out of the cost of a layer, since a run has fewer chunks than sequences
    coefficients = replace(
        costs.coefficients,
        forward=replace(costs.coefficients.forward, chunk_s=0.0),
        backward=replace(costs.coefficients.backward, chunk_s=0.0),
    )
    per_token = replace(costs, coefficients=coefficients)

    def seconds(num_layers: int, has_head: bool, pairs: AttentionPairs | None = None) -> float:
        passes = (False, True)
        return sum(per_token.part_s(chunk, shape, is_backward, num_layers, has_head, pairs=pairs) for is_backward in passes)

    mean_s, head_s = seconds(1, has_head=False), seconds(0, has_head=True)
    if mean_s <= 0:
        # a fit to very small chunks may find constant costs only
        return 0.0, []
    kinds = model.layer_kinds(LayerRange(0, model.num_layers))
    seconds_of = {kind: seconds(1, has_head=False, pairs=costs.pairs_of((kind,))) for kind in dict.fromkeys(kinds)}
    return head_s / mean_s, [seconds_of[kind] / mean_s for kind in kinds] or [1.0] * model.num_layers


def layer_ranges(
    num_layers: int, num_stages: int, num_ranges: int = 1, head_layers: float = 0.0, layer_work: Sequence[float] = ()
) -> Ranges:
    """Layer ranges of every stage, divided so that the most loaded stage has as little work as possible.

    layer_work: work of every layer, in units of a layer; () if all are equal. The last stage also has the output head, which
    takes as long as `head_layers` layers. Between equally loaded stages an extra layer goes to the later one, because it holds
    fewer chunks. With unequal layers and several ranges per stage, bounds move as long as a single move helps, so the result may
    be a little above the least. Raises ValueError for fewer layers than ranges.
    """
    if num_stages < 1 or num_ranges < 1 or num_layers < num_stages * num_ranges:
        raise ValueError(
            f"{num_layers} layers cannot be cut into {num_stages} stage(s) of {num_ranges} layer range(s) with a layer in each; "
            f"use at most {num_layers} stages and ranges together, at least one of each"
        )
    is_even = not layer_work or max(layer_work) - min(layer_work) <= _EQUAL
    if is_even:
        bounds = _even_bounds(num_layers, num_stages, num_ranges, head_layers)
    elif num_ranges == 1:
        bounds = _least_bounds(layer_work, num_stages, head_layers)
    else:
        even = _even_bounds(num_layers, num_stages, num_ranges, head_layers)
        bounds = _moved_bounds(layer_work, num_stages, even, head_layers)
    ranges = [LayerRange(start, stop - start) for start, stop in pairwise(bounds)]
    return tuple(tuple(ranges[stage::num_stages]) for stage in range(num_stages))


def _even_bounds(num_layers: int, num_stages: int, num_ranges: int, head_layers: float) -> list[int]:
    """First layers of all ranges in order, then the number of layers, for equal layers."""
    counts = [num_ranges] * num_stages
    work = [float(num_ranges)] * (num_stages - 1) + [num_ranges + head_layers]
    for _ in range(num_layers - num_stages * num_ranges):
        stage = min(range(num_stages), key=lambda stage: (work[stage], -stage))
        counts[stage] += 1
        work[stage] += 1
    # later ranges hold their chunks for a shorter time, so they get the remainder
    return list(accumulate(((count + place) // num_ranges for place in range(num_ranges) for count in counts), initial=0))


def _least_bounds(layer_work: Sequence[float], num_stages: int, head_layers: float) -> list[int]:
    """Bounds of stages of one range each: the least largest work, among these the least sum of squares, then the earliest."""
    before = list(accumulate(layer_work, initial=0.0))
    num_layers = len(layer_work)

    def work(first: int, stop: int) -> float:
        return before[stop] - before[first] + (head_layers if stop == num_layers else 0.0)

    def cut(most: float) -> tuple[float, list[int]]:
        """The least largest work, with the cut of least squares if no stage has more than `most`."""

        def rating(option: tuple[float, float, list[int]]) -> tuple[float, list[int]]:
            largest, squares, bounds = option
            return round(largest if most == float("inf") else squares, 9), bounds

        # for every number of layers: largest work, sum of squares, and bounds of the stages so far
        best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [0])}
        for stage in range(1, num_stages + 1):
            found: dict[int, tuple[float, float, list[int]]] = {}
            stops = [num_layers] if stage == num_stages else range(stage, num_layers - (num_stages - stage) + 1)
            for stop in stops:
                options = [
                    (max(largest, own), squares + own * own, [*bounds, stop])
                    for first, (largest, squares, bounds) in best.items()
                    if first < stop and (own := work(first, stop)) <= most
                ]
                if options:
                    found[stop] = min(options, key=rating)
            best = found
        largest, _, bounds = best[num_layers]
        return largest, bounds

    least, _ = cut(float("inf"))
    return cut(least + _EQUAL)[1]


def _moved_bounds(layer_work: Sequence[float], num_stages: int, bounds: list[int], head_layers: float) -> list[int]:
    """Moves bounds of ranges by one layer as long as that lowers the largest work of a stage, or else the sum of squares."""
    before = list(accumulate(layer_work, initial=0.0))

    def rating(bounds: Sequence[int]) -> tuple[float, float]:
        ranges = [before[stop] - before[start] for start, stop in pairwise(bounds)]
        work = [sum(ranges[stage::num_stages]) + (head_layers if stage == num_stages - 1 else 0) for stage in range(num_stages)]
        return round(max(work), 9), round(sum(own * own for own in work), 9)

    while True:
        moves = [
            [*bounds[:place], bounds[place] + by, *bounds[place + 1 :]]
            for place in range(1, len(bounds) - 1)
            for by in (-1, 1)
            if bounds[place - 1] < bounds[place] + by < bounds[place + 1]
        ]
        best = min(moves, key=rating, default=bounds)
        if rating(best) >= rating(bounds):
            return bounds
        bounds = best
