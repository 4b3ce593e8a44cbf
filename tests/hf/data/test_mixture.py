"""Mixes by weight: counts as worked out by hand, no document twice unless asked for, no held-out document in training."""

from __future__ import annotations

import random
from collections import Counter

import datasets
import pytest

from hf_longctx import DataError, mix_datasets
from hf_longctx.hf.data.mixture import held_out_counts, mixture_counts, without_copies


def numbered(first: int, count: int, labels: bool = False) -> datasets.Dataset:
    rows = [[number, number] for number in range(first, first + count)]
    return datasets.Dataset.from_dict({"input_ids": rows, **({"labels": rows} if labels else {})})


def ids(dataset: datasets.Dataset) -> list[int]:
    return [row["input_ids"][0] for row in dataset]


@pytest.mark.parametrize(
    ("sizes", "weights", "first", "everything"),
    [
        # 100 documents with weight 3 give 33.3 per unit of weight; 10 documents with weight 1 give 10
        ([100, 10], [3, 1], [30, 10], [100, 34]),
        ([100, 10], [0.75, 0.25], [30, 10], [100, 34]),
        ([10, 10, 10], [1, 1, 1], [10, 10, 10], [10, 10, 10]),
        ([10, 40], [0.1, 0.4], [10, 40], [10, 40]),
        ([7, 5], [2, 1], [7, 3], [10, 5]),
        ([5], [0.3], [5], [5]),
    ],
)
def test_counts_by_hand(sizes: list[int], weights: list[float], first: list[int], everything: list[int]) -> None:
    assert mixture_counts(sizes, weights) == first
    assert mixture_counts(sizes, weights, "all_exhausted") == everything
    assert mixture_counts(sizes, None) == sizes


def test_shares_are_the_weights_up_to_one_document() -> None:
    generator = random.Random(0)
    for _ in range(300):
        # with at least 30 documents and weights of at most 5, even a weight of 0.2 gives more than one document
        parts = [(generator.randint(30, 400), generator.uniform(0.2, 5)) for _ in range(generator.randint(1, 5))]
        sizes, weights = [size for size, _ in parts], [weight for _, weight in parts]
        room = [size / weight for size, weight in parts]
        fewest, most = mixture_counts(sizes, weights), mixture_counts(sizes, weights, "all_exhausted")
        for counts, scale in ((fewest, min(room)), (most, max(room))):
            assert all(abs(count - weight * scale) < 1 for count, weight in zip(counts, weights, strict=True))
        assert all(low <= size <= high for low, size, high in zip(fewest, sizes, most, strict=True))
        # the dataset that sets the scale is used up exactly
        assert any(low == size for low, size in zip(fewest, sizes, strict=True))
        assert any(high == size for high, size in zip(most, sizes, strict=True))


def test_a_mix_takes_no_document_twice_and_repeats_with_its_seed() -> None:
    parts = [numbered(0, 100), numbered(1000, 10)]
    mix = ids(mix_datasets(parts, [3, 1], seed=1))
    assert len(mix) == len(set(mix)) == 40 and sum(number >= 1000 for number in mix) == 10
    assert mix == ids(mix_datasets(parts, [3, 1], seed=1))
    other = ids(mix_datasets(parts, [3, 1], seed=2))
    assert mix != other and set(mix) != set(other)
    # the mix is shuffled, not one dataset after the other
    assert any(number >= 1000 for number in mix[:20]) and any(number < 1000 for number in mix[-20:])


def test_all_exhausted_repeats_the_smaller_evenly() -> None:
    counts = Counter(ids(mix_datasets([numbered(0, 10), numbered(1000, 4)], [1, 1], stopping="all_exhausted")))
    assert all(counts[number] == 1 for number in range(10))
    assert sorted(counts[number] for number in range(1000, 1004)) == [2, 2, 3, 3]


def test_without_weights_every_document_is_there_once() -> None:
    assert sorted(ids(mix_datasets([numbered(0, 5), numbered(10, 3)]))) == [0, 1, 2, 3, 4, 10, 11, 12]


def test_text_gets_labels_where_another_set_has_them() -> None:
    mix = mix_datasets([numbered(0, 3), numbered(10, 3, labels=True)])
    assert all(row["labels"] == row["input_ids"] for row in mix)
    assert mix_datasets([numbered(0, 3), numbered(10, 3)]).column_names == ["input_ids"]


def test_bad_weights_are_refused() -> None:
    for weight in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(DataError, match=f"weight {weight}, expected a positive number"):
            mixture_counts([5, 5], [1, weight])
    with pytest.raises(DataError, match=r"weight 0\.001 of dataset 1 is too small to give a document in a mix of 10"):
        mixture_counts([10, 10], [1, 0.001])


def test_held_out_documents_are_shared_like_the_mix() -> None:
    assert held_out_counts(8, [100, 20], [3, 1]) == [6, 2]
    assert held_out_counts(6, [100, 50], None) == [4, 2]
    # three shares of 1/3 leave 2 documents for the largest remainders, which are equal, so the first datasets get them
    assert held_out_counts(5, [10, 10, 10], None) == [2, 2, 1]
    assert held_out_counts(0, [1, 1], [1, 2]) == [0, 0]
    with pytest.raises(DataError, match="a dataset has 2 documents and 3 of them would be held out"):
        held_out_counts(6, [100, 2], [1, 1])


def test_copies_of_held_out_rows_leave_the_training_set() -> None:
    train, held_out = numbered(0, 6), numbered(4, 3)
    assert ids(without_copies(train, held_out)) == [0, 1, 2, 3]
    # a selected dataset is read through its indices
    assert ids(without_copies(train.select([5, 1, 0]), held_out.select([1]))) == [1, 0]
    assert ids(without_copies(train, numbered(50, 2))) == list(range(6))
    with pytest.raises(DataError, match="all 3 training documents are also held out"):
        without_copies(numbered(4, 3), held_out)


@pytest.mark.parametrize("column", ["loss_weights", "weights"])
def test_weights_that_a_mix_would_drop_are_refused(column: str) -> None:
    rows = datasets.Dataset.from_list([{"input_ids": [1, 2], column: [1.0, 2.0]}])
    with pytest.raises(DataError, match=f"has a column '{column}', which mixing would drop"):
        mix_datasets([rows, rows])


@pytest.mark.parametrize(("column", "value"), [("completion_mask", [0, 1]), ("prompt_mask", [0, 1]), ("attention_mask", [1, 2])])
def test_columns_that_say_what_is_trained_are_refused(column: str, value: list[int]) -> None:
    masked = numbered(0, 2).add_column(column, [value, value])
    with pytest.raises(DataError, match=column):
        mix_datasets([masked, numbered(10, 2, labels=True)])


def test_padding_is_left_out_of_a_mix() -> None:
    padded = datasets.Dataset.from_list(
        [
            {"input_ids": [7, 8, 0, 0], "labels": [7, 8, 0, -100], "attention_mask": [1, 1, 0, 0]},
            {"input_ids": [0, 7, 0, 9], "labels": [-100, 7, 0, 9], "attention_mask": [0, 1, 1, 1]},
        ]
    )
    rows = mix_datasets([padded, numbered(10, 1, labels=True)])
    found = sorted((row["input_ids"], row["labels"]) for row in rows)
    assert found == [([7, 0, 9], [7, 0, 9]), ([7, 8], [7, 8]), ([10, 10], [10, 10])]
    hole = datasets.Dataset.from_list([{"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}])
    with pytest.raises(DataError, match="row 0 has zeros between the ones of its attention_mask"):
        mix_datasets([hole, hole])


def test_masks_of_ones_are_no_reason_to_refuse() -> None:
    whole = numbered(0, 2).add_column("attention_mask", [[1, 1], [1, 1]])
    assert len(mix_datasets([whole, numbered(10, 2, labels=True)])) == 4
