"""The scan of a dataset before training: every unusable row is found, and the message says which, why and what to do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BatchEncoding

from hf_longctx.hf.data import scan as scan_module
from hf_longctx.hf.data.scan import scan_dataset, token_rows, too_long


def dataset_problems(dataset: Any, name: str, vocab_size: int) -> tuple[Any, list[str]]:
    """Lengths and problems that a scan finds."""
    scan = scan_dataset(dataset, name, vocab_size)
    return scan.lengths, scan.problems


VOCAB_SIZE = 64
Rows = list[dict[str, Any]]

GOOD: Rows = [
    {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 1]},
    {"input_ids": [63], "labels": [63], "attention_mask": [1]},
    {"input_ids": [0, 0], "labels": [-100, -100], "attention_mask": [1, 1]},
]


class PlainList(Sequence[dict[str, Any]]):
    """A user's own map-style dataset, which has only a length and rows."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        return self.rows[number]


KINDS = {"arrow": datasets.Dataset.from_list, "plain": PlainList}


@pytest.fixture(params=KINDS)
def make(request):
    """Makes a dataset of either kind from rows."""
    return KINDS[request.param]


def with_row(**row: Any) -> Rows:
    """Good rows with another one as row 3; columns that are not given for it are filled with good values."""
    num_tokens = len(row.get("input_ids", [5, 5]))
    full = {"input_ids": [5] * num_tokens, "labels": [5] * num_tokens, "attention_mask": [1] * num_tokens}
    return [*GOOD, {**full, **row}]


def test_good_rows_have_lengths_and_no_problems(make) -> None:
    lengths, problems = dataset_problems(make(GOOD), "train_dataset", VOCAB_SIZE)
    assert lengths.tolist() == [3, 1, 2] and lengths.dtype == np.int64
    assert problems == []


def test_labels_and_mask_need_not_be_there(make) -> None:
    lengths, problems = dataset_problems(make([{"input_ids": [1, 2]}, {"input_ids": [3]}]), "train_dataset", VOCAB_SIZE)
    assert (lengths.tolist(), problems) == ([2, 1], [])


def test_other_columns_are_left_alone(make) -> None:
    rows = [{"input_ids": [1, 2], "text": "a b", "token_type_ids": [0, 0]}]
    assert dataset_problems(make(rows), "train_dataset", VOCAB_SIZE)[1] == []


# name -> (columns of the bad row, the message about it)
BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": (
        {"input_ids": []},
        "train_dataset row 3 has no tokens; remove empty rows, for example with dataset.filter",
    ),
    "id at the vocabulary's size": (
        {"input_ids": [5, 64]},
        "train_dataset holds token id 64, but the model's vocabulary has 64 entries; tokenise with the model's own tokenizer",
    ),
    "negative id": (
        {"input_ids": [5, -1]},
        "train_dataset holds token id -1, but the model's vocabulary has 64 entries; tokenise with the model's own tokenizer",
    ),
    "fewer labels than tokens": (
        {"labels": [5]},
        "train_dataset row 3 has 2 tokens but 1 labels; give one label per token (-100 for none), not shifted",
    ),
    "more labels than tokens": (
        {"labels": [5, 5, 5]},
        "train_dataset row 3 has 2 tokens but 3 labels; give one label per token (-100 for none), not shifted",
    ),
    "label at the vocabulary's size": (
        {"labels": [5, 64]},
        "train_dataset holds label 64, but the model's vocabulary has 64 entries (-100 means no label); "
        "tokenise with the model's own tokenizer",
    ),
    "zeros between ones": (
        {"input_ids": [5, 5, 5], "attention_mask": [1, 0, 1]},
        "train_dataset row 3 has zeros between the ones of its attention_mask, but only padding at the ends of a row can be left "
        "out; give such tokens the label -100 instead, or take them out of the row",
    ),
    "padding alone": (
        {"attention_mask": [0, 0]},
        "train_dataset row 3 has no tokens; remove empty rows, for example with dataset.filter",
    ),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_found_and_named(make, name: str) -> None:
    row, message = BAD_ROWS[name]
    assert dataset_problems(make(with_row(**row)), "train_dataset", VOCAB_SIZE)[1] == [message]


@pytest.mark.parametrize("label", [-1, -101])
def test_a_negative_label_other_than_the_mask_is_found(make, label: int) -> None:
    # cross-entropy would stop in the middle of training with "Target -1 is out of bounds"
    _, problems = dataset_problems(make(with_row(labels=[5, label])), "train_dataset", VOCAB_SIZE)
    assert len(problems) == 1 and str(label) in problems[0]


@pytest.mark.parametrize("column", ["input_ids", "labels"])
def test_a_missing_list_is_found(make, column: str) -> None:
    row = {"input_ids": [5, 5], "labels": [5, 5], "attention_mask": [1, 1], column: None}
    _, problems = dataset_problems(make([*GOOD, row]), "train_dataset", VOCAB_SIZE)
    assert problems and problems[0].startswith("train_dataset row 3 has ")


def test_a_missing_token_inside_a_row_is_found() -> None:
    # a null inside a list would stop a loader worker in the middle of training
    table = pa.table({"input_ids": pa.array([[1, 2], [3, None]], pa.list_(pa.int64()))})
    assert dataset_problems(datasets.Dataset(table), "train_dataset", VOCAB_SIZE)[1]


WRONG_COLUMNS: dict[str, list[Any]] = {
    "text": ["one two", "three"],
    "integers": [1, 2],
    "lists of text": [["one", "two"], ["three"]],
    "lists of lists": [[[1, 2]], [[3]]],
    "lists of fractions": [[1.5, 2.0], [3.0]],
}


@pytest.mark.parametrize("name", WRONG_COLUMNS)
def test_a_column_that_holds_no_token_ids_is_found(make, name: str) -> None:
    rows = [{"input_ids": value} for value in WRONG_COLUMNS[name]]
    _, problems = dataset_problems(make(rows), "train_dataset", VOCAB_SIZE)
    assert problems and "input_ids" in problems[0] and "list of integers" in problems[0]


@pytest.mark.parametrize("labels", [[1, 0], ["good", "bad"]], ids=["classes", "words"])
def test_labels_of_a_whole_row_are_found(make, labels: list[Any]) -> None:
    # a classification dataset has one label per row
    rows = [{"input_ids": [1, 2], "labels": label} for label in labels]
    _, problems = dataset_problems(make(rows), "train_dataset", VOCAB_SIZE)
    assert problems and "labels" in problems[0]


def test_a_text_column_is_named_with_its_type() -> None:
    _, problems = dataset_problems(datasets.Dataset.from_dict({"input_ids": ["one"]}), "train_dataset", VOCAB_SIZE)
    assert problems == ["train_dataset column 'input_ids' holds string, expected a list of integers per row"]


def test_a_plain_dataset_whose_later_row_lacks_a_column_is_found() -> None:
    rows = [{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [3]}]
    _, problems = dataset_problems(PlainList(rows), "train_dataset", VOCAB_SIZE)
    assert problems and "row 1" in problems[0] and "labels" in problems[0]


def test_no_rows(make) -> None:
    lengths, problems = dataset_problems(make([]), "eval_dataset", VOCAB_SIZE)
    assert len(lengths) == 0
    assert problems == ["eval_dataset has no rows; check its path, split and filters"]


def test_no_input_ids_names_the_columns_there_are(make) -> None:
    _, (problem,) = dataset_problems(make([{"text": "a", "id": 1}]), "train_dataset", VOCAB_SIZE)
    assert problem.startswith("train_dataset has no column 'input_ids' (it has id, text); tokenise it first")


def test_rows_that_are_no_mappings_are_found() -> None:
    _, (problem,) = dataset_problems([[1, 2, 3]], "train_dataset", VOCAB_SIZE)
    assert problem.startswith("train_dataset row 0 is [1, 2, 3] and has no column 'input_ids' (it has list)")


def test_a_dict_of_datasets_is_refused() -> None:
    for several in (datasets.DatasetDict(train=datasets.Dataset.from_list(GOOD)), {"a": GOOD}):
        (problem,) = dataset_problems(several, "eval_dataset", VOCAB_SIZE)[1]
        assert problem.startswith(f"eval_dataset is a dict ({next(iter(several))}), and only eval_dataset may be a dict")


@pytest.mark.parametrize("batch_rows", [1, 2, 3, 4, 7, 8])
def test_rows_are_numbered_over_batches(make, monkeypatch, batch_rows: int) -> None:
    monkeypatch.setattr(scan_module, "_BATCH_ROWS", batch_rows)
    rows = [{"input_ids": [1] * (number % 3 + 1)} for number in range(7)]
    rows[5] = {"input_ids": []}
    lengths, problems = dataset_problems(make(rows), "train_dataset", VOCAB_SIZE)
    assert lengths.tolist() == [1, 2, 3, 1, 2, 0, 1]
    assert problems == ["train_dataset row 5 has no tokens; remove empty rows, for example with dataset.filter"]


@pytest.mark.parametrize("batch_rows", [2, 100])
def test_at_most_three_problems_are_shown_and_the_rest_counted(make, monkeypatch, batch_rows: int) -> None:
    monkeypatch.setattr(scan_module, "_BATCH_ROWS", batch_rows)
    rows = [{"input_ids": [1]}] + [{"input_ids": []} for _ in range(5)]
    _, problems = dataset_problems(make(rows), "train_dataset", VOCAB_SIZE)
    assert [problem.split(" has ")[0] for problem in problems[:3]] == [f"train_dataset row {row}" for row in (1, 2, 3)]
    assert problems[3:] == ["... and 2 more problems"]


def test_exactly_three_problems_are_all_shown(make) -> None:
    rows = [{"input_ids": [1]}] + [{"input_ids": []} for _ in range(3)]
    _, problems = dataset_problems(make(rows), "train_dataset", VOCAB_SIZE)
    assert len(problems) == 3 and all("has no tokens" in problem for problem in problems)


def test_padding_in_many_batches_is_said_once(make, monkeypatch) -> None:
    monkeypatch.setattr(scan_module, "_BATCH_ROWS", 1)
    rows = [{"input_ids": [1, 0], "attention_mask": [1, 0]} for _ in range(4)]
    assert len(dataset_problems(make(rows), "train_dataset", VOCAB_SIZE)[1]) == 1


def test_selected_rows_are_read_in_their_new_order() -> None:
    dataset = datasets.Dataset.from_list([{"input_ids": [1] * n} for n in (1, 2, 3, 4)]).select([3, 1])
    assert dataset_problems(dataset, "train_dataset", VOCAB_SIZE)[0].tolist() == [4, 2]


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_set_format_changes_nothing(kind: str) -> None:
    dataset = datasets.Dataset.from_list(GOOD).with_format(kind)
    lengths, problems = dataset_problems(dataset, "train_dataset", VOCAB_SIZE)
    assert (lengths.tolist(), problems) == ([3, 1, 2], [])


def test_large_lists_and_small_integers_are_fine() -> None:
    column = pa.array([[1, 2, 3], [4]], pa.large_list(pa.int32()))
    mask = pa.array([[True, True, True], [True]], pa.list_(pa.bool_()))
    dataset = datasets.Dataset(pa.table({"input_ids": column, "attention_mask": mask}))
    lengths, problems = dataset_problems(dataset, "train_dataset", VOCAB_SIZE)
    assert (lengths.tolist(), problems) == ([3, 1], [])


def test_plain_rows_may_hold_tensors() -> None:
    rows = [{"input_ids": torch.tensor([1, 2]), "labels": np.array([1, 2])}]
    lengths, problems = dataset_problems(PlainList(rows), "train_dataset", VOCAB_SIZE)
    assert (lengths.tolist(), problems) == ([2], [])


def test_plain_rows_may_be_what_a_tokenizer_returns() -> None:
    rows = [BatchEncoding({"input_ids": [1, 2], "attention_mask": [1, 1]})]
    lengths, problems = dataset_problems(PlainList(rows), "train_dataset", VOCAB_SIZE)
    assert (lengths.tolist(), problems) == ([2], [])


@pytest.mark.parametrize("kept", [["input_ids"], ["input_ids", "labels"]])
def test_only_columns_that_training_reads_are_decoded(kept: list[str]) -> None:
    rows = [{"text": "a b", **{name: row[name] for name in kept}} for row in GOOD]
    dataset = datasets.Dataset.from_list(rows).with_format("torch")
    read = token_rows(dataset)
    assert len(read) == len(GOOD)
    for number, row in enumerate(GOOD):
        found = read[number]
        assert sorted(found.column_names) == kept
        assert all(found[name].to_pylist() == [row[name]] for name in kept)
    # the user's own object keeps its columns and format afterwards
    assert "text" in dataset.column_names and isinstance(dataset[0]["input_ids"], torch.Tensor)


def test_plain_datasets_are_read_as_they_are() -> None:
    dataset = PlainList(GOOD)
    assert token_rows(dataset) is dataset


def test_rows_up_to_both_limits_fit() -> None:
    assert too_long(np.array([5, 9, 10]), max_length=10, memory_limit=10, tokens_per_rank=5, name="d") == []


def test_the_longest_row_above_max_length_is_named_with_all_remedies() -> None:
    (problem,) = too_long(np.array([5, 11, 30, 12]), 10, 100, 50, "train_dataset")
    assert problem.startswith("train_dataset row 2 has 30 tokens, above max_length 10 (2 more rows are above it);")
    for remedy in ("long_sequences='truncate'", "long_sequences='split'", "raise the limit"):
        assert remedy in problem


def test_a_row_above_memory_names_the_setting_behind_the_limit() -> None:
    (problem,) = too_long(np.array([5, 21]), 100, 20, 10, "train_dataset")
    assert "row 1 has 21 tokens, above the memory limit: 20 on the largest group (tokens_per_rank 10 beside others);" in problem


def test_a_row_above_both_limits_names_max_length() -> None:
    (problem,) = too_long(np.array([50]), 30, 20, 10, "train_dataset")
    assert "above max_length 30" in problem


@pytest.mark.parametrize("number", [0, 1])
def test_a_column_without_a_name_is_refused(number: int) -> None:
    rows: list[dict[Any, Any]] = [{"input_ids": [1, 2]}, {"input_ids": [1, 2]}]
    rows[number][0] = [0, 1]
    (problem,) = dataset_problems(rows, "train_dataset", VOCAB_SIZE)[1]
    assert f"row {number} has a column 0 (int); name columns by texts" in problem


@pytest.mark.parametrize("column", ["seq_idx", "completion_mask", "shift_labels"])
def test_a_column_that_would_change_what_is_trained_is_refused(make, column: str) -> None:
    rows = [{"input_ids": [1, 2], column: [0, 1]}]
    (problem,) = dataset_problems(make(rows), "train_dataset", VOCAB_SIZE)[1]
    assert f"has a column {column!r}, which is not supported, and to ignore it would change what is trained" in problem


def test_a_set_without_any_label_is_refused(make) -> None:
    (problem,) = dataset_problems(make([{"input_ids": [1, 2], "labels": [-100, -100]}]), "train_dataset", VOCAB_SIZE)[1]
    assert "has no token with a label" in problem
    # the first token of a row is not the next token of any other
    (problem,) = dataset_problems(make([{"input_ids": [1, 2], "labels": [1, -100]}]), "train_dataset", VOCAB_SIZE)[1]
    assert "has no token with a label" in problem


def test_a_transform_is_refused() -> None:
    dataset = datasets.Dataset.from_list(GOOD).with_transform(lambda rows: rows)
    (problem,) = dataset_problems(dataset, "train_dataset", VOCAB_SIZE)[1]
    assert "has a transform" in problem


def test_lists_of_one_length_are_fine() -> None:
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int64"), length=2)})
    dataset = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3, 4]]}, features=features)
    lengths, problems = dataset_problems(dataset, "train_dataset", VOCAB_SIZE)
    assert (lengths.tolist(), problems) == ([2, 2], [])


def test_the_digest_tells_the_order_and_the_cuts(make) -> None:
    def digest(*rows: list[int]) -> str:
        return scan_dataset(make([{"input_ids": row} for row in rows]), "d", VOCAB_SIZE).digest

    assert digest([1, 2], [3, 4]) == digest([1, 2], [3, 4])
    assert len({digest([1, 2], [3, 4]), digest([3, 4], [1, 2]), digest([1, 2, 3], [4])}) == 3


@pytest.mark.daily("arrow")
def test_the_digest_does_not_depend_on_the_batches(make, monkeypatch) -> None:
    rows = [{"input_ids": [n % 60] * (n % 5 + 1), "labels": [-100] * (n % 5) + [n % 60]} for n in range(150)]
    expected = scan_dataset(make(rows), "d", VOCAB_SIZE)
    assert expected.problems == []
    for batch_rows, batch_tokens in ((1, 100), (7, 1000), (1000, 20), (1000, 1)):
        monkeypatch.setattr(scan_module, "_BATCH_ROWS", batch_rows)
        monkeypatch.setattr(scan_module, "_BATCH_TOKENS", batch_tokens)
        found = scan_dataset(make(rows), "d", VOCAB_SIZE)
        assert found.digest == expected.digest and np.array_equal(found.lengths, expected.lengths)


def test_the_digest_tells_every_token_and_label(make) -> None:
    def digest(**changes: list[int]) -> str:
        row = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], **changes}
        return scan_dataset(make([row]), "d", VOCAB_SIZE).digest

    changed = [digest(), digest(input_ids=[1, 2, 4]), digest(labels=[1, 2, 3]), digest(labels=[-100, 2, 4])]
    assert len(set(changed)) == len(changed)


ITEMS = st.lists(st.sampled_from([0, 1, 63, 64, -1, -100, -101]), max_size=4)


@pytest.mark.wide
@given(st.lists(st.tuples(ITEMS, ITEMS), min_size=1, max_size=6), st.sampled_from(sorted(KINDS)))
def test_a_set_is_clean_exactly_when_a_plain_loop_says_so(pairs: list[tuple[list[int], list[int]]], kind: str) -> None:
    rows = [{"input_ids": ids, "labels": labels} for ids, labels in pairs]
    good = all(
        len(ids) == len(labels) > 0
        and all(0 <= token < VOCAB_SIZE for token in ids)
        and all(label == -100 or 0 <= label < VOCAB_SIZE for label in labels)
        for ids, labels in pairs
    )
    good = good and any(label != -100 for _, labels in pairs for label in labels[1:])
    features = datasets.Features({name: datasets.List(datasets.Value("int64")) for name in ("input_ids", "labels")})
    dataset = datasets.Dataset.from_list(rows, features=features) if kind == "arrow" else PlainList(rows)
    scan = scan_dataset(dataset, "d", VOCAB_SIZE)
    assert (not scan.problems) == good
    assert not good or scan.lengths.tolist() == [len(ids) for ids, _ in pairs]


def test_a_missing_label_inside_a_row_is_found() -> None:
    kind = pa.list_(pa.int64())
    table = pa.table({"input_ids": pa.array([[1, 2], [3, 4]], kind), "labels": pa.array([[1, 2], [3, None]], kind)})
    (problem,) = dataset_problems(datasets.Dataset(table), "train_dataset", VOCAB_SIZE)[1]
    assert "has a row with a missing label" in problem


class Slow(PlainList):
    def __getitem__(self, number: Any) -> Any:
        time.sleep(0.3)
        return self.rows[number]


def test_a_bar_shows_when_reading_takes_longer_than_a_second(monkeypatch, capsys) -> None:
    monkeypatch.setattr(scan_module, "_BATCH_ROWS", 1)
    for rows, shown in (([{"input_ids": [1, 2]}] * 4, True), ([{"input_ids": [1, 2]}], False)):
        scan_dataset(Slow(rows), "train_dataset", VOCAB_SIZE, show_progress=True)
        assert ("reading train_dataset" in capsys.readouterr().err) == shown
    scan_dataset(Slow([{"input_ids": [1, 2]}] * 4), "train_dataset", VOCAB_SIZE)
    assert "reading" not in capsys.readouterr().err


def weighted(*weights: Any) -> Rows:
    return [{"input_ids": [1, 2, 3], "loss_weights": list(each)} for each in weights]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, 0.5], "row 1 has 3 tokens but 2 loss_weights; give one weight per token"),
        ([1.0, -0.5, 1.0], "holds the weight -0.5 in loss_weights; give finite numbers of 0 or more"),
        ([1.0, float("nan"), 1.0], "holds the weight nan in loss_weights"),
        ([1.0, float("inf"), 1.0], "holds the weight inf in loss_weights"),
    ],
)
def test_weights_that_cannot_be_used_are_named(make, weights: list[float], message: str) -> None:
    _, problems = dataset_problems(make(weighted([1.0, 1.0, 0.0], weights)), "train", VOCAB_SIZE)
    assert any(message in problem for problem in problems), problems


def test_good_weights_have_no_problem_and_count_in_the_digest(make) -> None:
    first, other = (
        scan_dataset(make(weighted([1.0, 0.5, 0.0], last)), "train", VOCAB_SIZE) for last in ([1.0, 1.0, 1.0], [1.0, 1.0, 0.5])
    )
    assert first.problems == other.problems == []
    assert first.digest != other.digest
    # numbers of another kind are the same weights
    assert scan_dataset(make(weighted([1.0, 0.5, 0.0], [1, 1, 1])), "train", VOCAB_SIZE).digest == first.digest


@pytest.mark.parametrize("column", ["weights", "loss_weight", "token_weights", "weight", "loss_scale", "sample_weight"])
def test_other_weights_are_refused_with_the_column_that_is_read(make, column: str) -> None:
    _, (problem,) = dataset_problems(make([{"input_ids": [1, 2], column: [1.0, 2.0]}]), "train", VOCAB_SIZE)
    assert f"has a column '{column}'" in problem and "in a column 'loss_weights'" in problem


def test_plain_rows_with_one_number_per_token_are_refused() -> None:
    rows = [{"input_ids": [1, 2], "importance": [0.5, 1.0]}, {"input_ids": [1, 2, 3], "importance": [1, 0, 1], "scores": [1.0]}]
    (problem,) = scan_dataset(rows, "train_dataset", VOCAB_SIZE).problems
    assert problem.startswith("train_dataset has a column 'importance' with one number per token, which is not read")
    rows[1]["importance"] = [0.5]
    assert scan_dataset(rows, "train_dataset", VOCAB_SIZE).problems == []


@pytest.mark.parametrize("mask", [[1, 0, 1], [1, 1, 2], [0, 1, 1]])
def test_a_mask_that_the_first_row_has_not_is_refused(mask: list[int]) -> None:
    rows = [{"input_ids": [1, 2]}, {"input_ids": [1, 2, 3], "attention_mask": mask}]
    (problem,) = scan_dataset(rows, "train_dataset", VOCAB_SIZE).problems
    assert "row 1 has 'attention_mask' with padding, but the first row has none" in problem
