"""The loop that makes groups fit: its last resort and its cache, whatever a caller proposes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from hf_longctx.plan.core.orders import pipelined
from hf_longctx.plan.core.types import Chunk, LayerPolicy, SequenceGroup, Span
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.pipeline.stages import layer_ranges
from hf_longctx.plan.policies.fit import FittedGroups, Trial, first_fitting, least_memory_group, search_room

pytestmark = pytest.mark.quick

MODEL = named_model("llama-3.1-8b")


def group_of(*sequences: int, position: int = 0) -> SequenceGroup:
    """A group on two stages with one chunk of 100 tokens for each sequence."""
    chunks = tuple(Chunk(index, (Span(sequence, 0, 100),)) for index, sequence in enumerate(sequences))
    return pipelined(SequenceGroup((position,), "local", chunks, ()), layer_ranges(3, 2, 1), "1f1b")


def trial(group: SequenceGroup, seconds: float = 1.0, over_bytes: float = 0.0) -> Trial:
    return Trial(group, seconds, (over_bytes,))


def nothing_fits(group: SequenceGroup) -> str:
    return f"{len(group.chunks)} chunks do not fit"


def test_lean_groups_are_predicted_only_after_all_programs() -> None:
    group, asked = group_of(0), []

    def program(name: str, over_bytes: float) -> list[Trial]:
        asked.append(name)
        return [trial(group, over_bytes=over_bytes), trial(group, over_bytes=1.0)]

    def predict(lean: SequenceGroup) -> Trial:
        asked.append("lean")
        return trial(lean, over_bytes=-1.0 if lean.positions == (1,) else 2.0)

    ways = [[group], [group_of(0, position=1), group], [group]]
    lean = [partial(map, predict, groups) for groups in ways]
    found = first_fitting([lambda: program("first", 1.0), lambda: program("second", 0.0), *lean])
    assert (asked, len(found)) == (["first", "second"], 1)
    asked.clear()
    (found,) = first_fitting([lambda: program("first", 1.0), *lean])
    # the entry that fits is predicted as a whole, the one after it is not
    assert (asked, found.group.positions) == (["first", "lean", "lean", "lean"], (1,))
    assert not first_fitting([lambda: program("first", 1.0), *lean[2:]])


def test_room_is_offered_until_more_of_it_makes_nothing_faster() -> None:
    group = group_of(0)

    def searched(answers: dict[int, Trial | None]) -> tuple[Trial | None, list[int]]:
        """Returns the answer and the rooms offered; answers: the trial for each room, of which the next is 1 larger."""
        offered: list[int] = []

        def propose(room: int) -> Trial | None:
            offered.append(room)
            return answers[room]

        return search_room(propose, lambda room, _: room + 1, 0, 5), offered

    first, faster, slower, over = trial(group, 3.0), trial(group, 2.0), trial(group, 4.0), trial(group, 1.0, over_bytes=1.0)
    assert searched({0: first, 1: faster, 2: faster, 3: trial(group, 1.0)}) == (faster, [0, 1, 2])
    assert searched({0: first, 1: slower, 2: faster}) == (first, [0, 1])
    # a trial that does not fit ends the search only after one that does
    assert searched({0: over, 1: over, 2: first, 3: over, 4: faster}) == (first, [0, 1, 2, 3])
    assert searched({0: over, 1: None}) == (None, [0, 1])
    assert searched({room: over for room in range(5)}) == (None, [0, 1, 2, 3, 4])


def test_equal_groups_are_solved_once_for_their_own_sequences_and_ranks() -> None:
    known, solved = FittedGroups(), []

    def slices(group: SequenceGroup) -> list[Trial]:
        """Cuts every chunk in two; the second answer is faster."""
        solved.append(group)
        halves = [
            replace(span, start=start, stop=start + 50) for chunk in group.chunks for span in chunk.spans for start in (0, 50)
        ]
        cut = replace(group, chunks=tuple(Chunk(index, (half,)) for index, half in enumerate(halves)))
        return [trial(group, 2.0), trial(cut, 1.0)]

    known.fit(group_of(3, 5), slices, nothing_fits)
    found = known.fit(group_of(8, 7, position=1), slices, nothing_fits)
    assert (len(solved), len(known)) == (1, 1)
    assert found.positions == (1,)
    spans = [(span.sequence, span.start, span.stop) for chunk in found.chunks for span in chunk.spans]
    assert spans == [(8, 0, 50), (8, 50, 100), (7, 0, 50), (7, 50, 100)]
    for other in (
        group_of(8),
        replace(group_of(8, 7), positions=(0, 1), method="ring"),
        pipelined(group_of(8, 7), layer_ranges(3, 3, 1), "1f1b"),
    ):
        known.fit(other, slices, nothing_fits)
    known.fit(group_of(8, 7), slices, nothing_fits, variant="sliced")
    assert (len(solved), len(known)) == (5, 5)


def test_a_group_for_which_nothing_fits_is_refused_without_another_search() -> None:
    known, solved = FittedGroups(), []

    def search(group: SequenceGroup) -> list[Trial]:
        solved.append(group)
        return []

    for group in (group_of(0, 1), group_of(4, 2, position=1)):
        with pytest.raises(ValueError, match="2 chunks do not fit"):
            known.fit(group, search, nothing_fits)
    assert (len(solved), len(known)) == (1, 0)
    with pytest.raises(ValueError, match="2 chunks do not fit"):
        known.fit(group_of(0, 1), search, nothing_fits, variant="sliced")
    assert len(solved) == 2


@pytest.mark.parametrize("keeps_attention", [False, True])
def test_lean_policies_recompute_every_layer_and_take_the_host_bytes_of_their_chunk(keeps_attention: bool) -> None:
    group, asked = group_of(0, 1), []

    def host_share(num_tokens: int, num_layers: int) -> int:
        asked.append((num_tokens, num_layers))
        return 0 if len(asked) % 2 else 1 << 40

    stages = least_memory_group(group, MODEL, 64, host_share, keeps_attention).stages
    assert asked == [(100, stage.num_layers) for stage in stages for _ in group.chunks]
    for stage in stages:
        assert [(policy.chunk, policy.tile_tokens, len(policy.layers)) for policy in stage.activations] == [
            (chunk, 64, stage.num_layers) for chunk in (0, 1)
        ]
        for policy, host in zip(stage.activations, (0.0, 1.0), strict=True):
            for layer in policy.layers:
                assert_lean(layer, host, keeps_attention)


def assert_lean(layer: LayerPolicy, host: float, keeps_attention: bool) -> None:
    assert layer.share("layer_input").host == host
    assert layer.share("mlp").recompute == layer.share("qkv").recompute == 1.0
    attention = layer.share("attention_output")
    assert (attention.host, attention.recompute) == ((host, 0.0) if keeps_attention else (0.0, 1.0))
