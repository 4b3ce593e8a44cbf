"""A rank's part of a step: labels are shifted before any cut, shards add up to the chunk, and no unneeded row is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from helpers.models.reference import random_rows
from helpers.plans.layouts import plan_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.hf.data.collator import LongContextCollator, PlannedDataset, PlannedStep, TokenSequence, chunk_inputs, shift
from hf_longctx.hf.data.sampler import SequenceIndex
from hf_longctx.hf.data.scan import token_rows
from hf_longctx.plan.core.types import Chunk, SequenceGroup, Span, StepPlan
from hf_longctx.plan.groups.exact import rank_layouts

pytestmark = pytest.mark.quick

NO_LABEL = -100
Row = dict[str, list[int]]
Token = tuple[int, int, int]

# name -> (ranks, micro-batches of (degree, sequences), lengths)
LAYOUTS: dict[str, tuple[int, list, list[int]]] = {
    "one rank": (1, [[(1, (0, 1, 2))]], [5, 1, 9]),
    "<2>,<1,1>": (2, [[(2, (0, 3))], [(1, (1,)), (1, (2, 4))]], [23, 7, 4, 2, 1]),
    "<4>": (4, [[(4, (0, 1, 2))]], [13, 5, 3]),
    "<2,1,1> with an idle rank": (4, [[(2, (0,)), (1, (1, 2))]], [11, 6, 5]),
    "fewer tokens than ranks": (4, [[(4, (0, 1))]], [2, 1]),
    "an empty micro-batch on all but one": (2, [[(1, (0,))], [(2, (1,))]], [4, 9]),
}


def tokens_of(row: Row) -> list[Token]:
    """(id, position, label) of every token of a document, token by token; the label comes from the next token."""
    ids, labels = row["input_ids"], row.get("labels", row["input_ids"])
    tokens = []
    for position in range(len(ids)):
        label = labels[position + 1] if position + 1 < len(ids) else NO_LABEL
        tokens.append((ids[position], position, label))
    return tokens


def batches_of(plan: StepPlan, rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Batches that the collator of every rank makes for the plan; sequence i of the plan is row i."""
    lengths = np.array([len(row["input_ids"]) for row in rows])
    dataset = PlannedDataset(rows, SequenceIndex.build(lengths, int(lengths.max()), "error"))
    return [LongContextCollator()([dataset[PlannedStep(plan, tuple(range(len(rows))), rank)]]) for rank in range(plan.num_ranks)]


def tokens_in(inputs: Any) -> list[Token]:
    columns = (inputs.input_ids, inputs.position_ids, inputs.shift_labels)
    assert all(column.dtype == torch.int64 and column.shape == (1, column.shape[1]) for column in columns)
    return list(zip(*(column[0].tolist() for column in columns), strict=True))


def check_plan(plan: StepPlan, rows: Sequence[Row]) -> None:
    """Asserts, chunk by chunk, that the shards of all ranks in order are the chunk's tokens and then the dummies."""
    batches = batches_of(plan, rows)
    next_round = [0] * plan.num_ranks
    for micro_batch in plan.micro_batches:
        for group in micro_batch.groups:
            for chunk in group.chunks:
                shards = [tokens_in(batches[p]["chunks"][next_round[p]][chunk.index]) for p in group.positions]
                expected = [token for span in chunk.spans for token in tokens_of(rows[span.sequence])[span.start : span.stop]]
                expected += [(0, 0, NO_LABEL)] * max(0, group.degree - len(expected))
                assert [token for shard in shards for token in shard] == expected
                assert all(shards), "a rank got an empty tensor"
                assert max(map(len, shards)) - min(map(len, shards)) <= 1
            for position in group.positions:
                next_round[position] += 1
    label_tokens = sum(label != NO_LABEL for row in rows for _, _, label in tokens_of(row))
    assert sum(batch["num_label_tokens"] for batch in batches) == label_tokens


@pytest.mark.parametrize("name", LAYOUTS)
def test_shards_of_all_ranks_are_the_chunk_with_labels_shifted_before_the_cut(name: str) -> None:
    num_ranks, layout, lengths = LAYOUTS[name]
    check_plan(plan_of(layout, lengths, num_ranks), random_rows(lengths))


@given(st.data(), st.integers(1, 4), st.lists(st.integers(1, 14), min_size=1, max_size=6))
@settings(deadline=None)
def test_random_layouts_add_up(data: st.DataObject, num_ranks: int, lengths: list[int]) -> None:
    degrees = data.draw(st.sampled_from(rank_layouts(num_ranks, (1, 2, 3, 4))))
    homes = [data.draw(st.integers(0, len(degrees) - 1)) for _ in lengths]
    groups = [(degree, tuple(i for i, h in enumerate(homes) if h == home)) for home, degree in enumerate(degrees)]
    check_plan(plan_of([groups], lengths, num_ranks), random_rows(lengths))


def test_rows_without_labels_are_their_own() -> None:
    rows = [{"input_ids": row["input_ids"]} for row in random_rows([9, 4])]
    check_plan(plan_of([[(2, (0, 1))]], [9, 4], 2), rows)


def test_labels_are_used_where_they_differ_from_the_ids() -> None:
    rows = [{"input_ids": [1, 2, 3, 4, 5], "labels": [-100, -100, 30, 40, 50]}]
    first, second = batches_of(plan_of([[(2, (0,))]], [5], 2), rows)
    assert first["chunks"][0][0].shift_labels.tolist() == [[-100, 30, 40]]
    assert second["chunks"][0][0].shift_labels.tolist() == [[50, -100]]
    assert (first["num_label_tokens"], second["num_label_tokens"]) == (2, 1)


def test_no_label_crosses_from_one_document_to_the_next() -> None:
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
    (batch,) = batches_of(plan_of([[(1, (0, 1))]], [3, 2], 1), rows)
    inputs = batch["chunks"][0][0]
    assert inputs.shift_labels.tolist() == [[2, 3, -100, 5, -100]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 0, 1]]


def test_a_rank_without_sequences_runs_one_dummy_token() -> None:
    plan = plan_of([[(1, (0,))]], [6], 2)
    _, idle = batches_of(plan, random_rows([6]))
    assert tokens_in(idle["chunks"][0][0]) == [(0, 0, NO_LABEL)]
    assert idle["num_label_tokens"] == 0 and idle["input_ids"].tolist() == [[0]]


def test_a_chunk_of_one_token_on_four_ranks_is_filled_with_dummies() -> None:
    batches = batches_of(plan_of([[(4, (0,))]], [1], 4), [{"input_ids": [7]}])
    shards = [tokens_in(batch["chunks"][0][0]) for batch in batches]
    assert shards == [[(7, 0, NO_LABEL)]] + [[(0, 0, NO_LABEL)]] * 3


def test_positions_count_from_the_start_of_the_document_in_every_shard() -> None:
    batches = batches_of(plan_of([[(4, (0,))]], [10], 4), random_rows([10]))
    assert [batch["chunks"][0][0].position_ids[0].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]


def test_a_slice_keeps_the_positions_and_labels_of_its_document() -> None:
    # a token's id, position and label must not depend on how its sequence is sliced
    tokens = TokenSequence(torch.arange(10), shift(torch.arange(10)))
    group = SequenceGroup((0, 1), "ulysses", (chunk := Chunk(0, (Span(0, 4, 9),)),), ())
    shards = [tokens_in(chunk_inputs(chunk, group, position, {0: tokens})) for position in (0, 1)]
    assert shards == [[(4, 4, 5), (5, 5, 6), (6, 6, 7)], [(7, 7, 8), (8, 8, 9)]]


def test_position_inside_the_group_is_not_the_rank() -> None:
    tokens = TokenSequence(torch.arange(4), shift(torch.arange(4)))
    group = SequenceGroup((2, 3), "ulysses", (chunk := Chunk(0, (Span(0, 0, 4),)),), ())
    assert tokens_in(chunk_inputs(chunk, group, 3, {0: tokens})) == [(2, 2, 3), (3, 3, NO_LABEL)]


def test_shift_gives_every_token_its_successor() -> None:
    assert shift(torch.tensor([5, 6, 7])).tolist() == [6, 7, NO_LABEL]
    assert shift(torch.tensor([5])).tolist() == [NO_LABEL]


def test_pieces_of_a_split_row_are_documents_of_their_own() -> None:
    rows = [{"input_ids": [10, 11, 12, 13, 14], "labels": [0, 1, 2, 3, 4]}]
    index = SequenceIndex.build(np.array([5]), 3, "split")
    dataset = PlannedDataset(rows, index)
    plan = plan_of([[(1, (0, 1))]], [3, 2], 1)
    batch = LongContextCollator()([dataset[PlannedStep(plan, (0, 1), 0)]])
    assert tokens_in(batch["chunks"][0][0]) == [(10, 0, 1), (11, 1, 2), (12, 2, -100), (13, 0, 4), (14, 1, -100)]


class Recorder(Sequence[Row]):
    """A list of rows that records which of them were read."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows, self.asked = rows, []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        assert type(number) is int, "datasets with plain __getitem__ want a plain integer"
        self.asked.append(number)
        return self.rows[number]


def test_only_rows_of_this_rank_are_fetched_and_each_once() -> None:
    lengths = [20, 3, 4, 5, 6]
    plan = plan_of([[(2, (0,)), (1, (1, 3)), (1, (2,))], [(1, (4,))]], lengths, 4)
    expected = {0: [0, 4], 1: [0], 2: [1, 3], 3: [2]}
    index = SequenceIndex.build(np.array(lengths), 20, "error")
    for rank, rows in expected.items():
        recorder = Recorder(random_rows(lengths))
        PlannedDataset(recorder, index)[PlannedStep(plan, tuple(range(5)), rank)]
        assert recorder.asked == rows


def test_plan_sequences_are_numbers_inside_the_step_not_of_the_set() -> None:
    rows = random_rows([4] * 9)
    index = SequenceIndex.build(np.array([4] * 9), 4, "error")
    plan = plan_of([[(1, (0, 1))]], [4, 4], 1)
    batch = LongContextCollator()([PlannedDataset(rows, index)[PlannedStep(plan, (7, 2), 0)]])
    assert batch["chunks"][0][0].input_ids[0].tolist() == rows[7]["input_ids"] + rows[2]["input_ids"]


def test_batch_tells_the_tokens_of_this_rank_and_its_step() -> None:
    lengths = [9, 3, 5]
    plan = plan_of([[(2, (0,))], [(1, (1,)), (1, (2,))]], lengths, 2)
    for rank, batch in enumerate(batches_of(plan, random_rows(lengths))):
        flat = [inputs.input_ids for round_chunks in batch["chunks"] for inputs in round_chunks]
        assert torch.equal(batch["input_ids"], torch.cat(flat, dim=1))
        assert batch["step"].plan is plan and batch["step"].rank == rank


def test_length_of_the_planned_set_is_its_number_of_sequences() -> None:
    index = SequenceIndex.build(np.array([5, 2]), 3, "split")
    assert len(PlannedDataset(random_rows([5, 2]), index)) == 3


@pytest.mark.parametrize("kind", ["numpy", "torch", "arrow"])
def test_rows_of_any_array_type_give_the_same_batch(kind: str) -> None:
    rows = random_rows([6, 3])
    other = datasets.Dataset.from_list(rows)
    if kind != "arrow":
        other.set_format(kind)
    plan = plan_of([[(2, (0, 1))]], [6, 3], 2)
    for plain, found in zip(batches_of(plan, rows), batches_of(plan, other), strict=True):
        assert tokens_in(found["chunks"][0][0]) == tokens_in(plain["chunks"][0][0])


class Reading(list):  # type: ignore[type-arg]
    """A row's tokens that record how many of them were read."""

    taken = 0

    def __getitem__(self, cut: Any) -> Any:
        found = super().__getitem__(cut)
        self.taken = max(self.taken, len(found))
        return found


@pytest.mark.parametrize("arrow", [False, True])
@pytest.mark.parametrize("ulysses", [0, 1, 2], ids=["ulysses", "ring", "hybrid"])
def test_a_rank_takes_from_a_row_only_what_it_holds(ulysses: int, arrow: bool) -> None:
    (row,) = random_rows([64])
    plan = plan_of([[(4, (0,))]], [64], 4, ulysses)
    index = SequenceIndex.build(np.array([64]), 64, "error")
    whole = tokens_of(row)
    for rank in range(4):
        reading = Reading(row["input_ids"])
        rows: Any = [{**row, "input_ids": reading}]
        if arrow:
            rows = token_rows(datasets.Dataset.from_list([row]))
        sequence = PlannedDataset(rows, index)[PlannedStep(plan, (0,), rank)][1][0]
        first, stop = sequence.first, sequence.first + len(sequence.input_ids)
        cut = sequence.between(first, stop)
        ids, labels = cut.input_ids, cut.shift_labels
        assert list(zip(ids.tolist(), range(first, stop), labels.tolist(), strict=True)) == whole[first:stop]
        if ulysses == 0:
            assert stop - first == 16
        if not arrow:
            assert reading.taken == stop - first
