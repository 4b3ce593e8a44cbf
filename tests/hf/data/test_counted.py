"""Sequences and steps in which no label counts, found from the scan and by reading pieces, against a count token by token."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import datasets
import numpy as np
import pytest

from hf_longctx.hf.data import later_pieces as pieces
from hf_longctx.hf.data.labels import NEXT_TOKEN, HeadTask, have_labels, step_without_labels
from hf_longctx.hf.data.later_pieces import tables_of
from hf_longctx.hf.data.sampler import LengthAwareSampler, SequenceIndex
from hf_longctx.hf.data.scan import ScannedRows, cached_scan, scan_dataset

TOKENS = HeadTask("token", 4)
KINDS = ("text", "labels", "weights", "labels weights", "labels packed", "weights packed", "tokens labels")


def rows_of(kind: str, generator: random.Random) -> list[dict[str, Any]]:
    """Rows of which few tokens count: by labels, by weights, or by both; with `packed`, rows of several documents."""
    rows = []
    for length in (1, 2, 3, 7, 8, 9, 20, 31, 12):
        row: dict[str, Any] = {"input_ids": [generator.randrange(4) for _ in range(length)]}
        if "labels" in kind:
            row["labels"] = [token if generator.random() < 0.15 else -100 for token in row["input_ids"]]
        if "weights" in kind:
            row["loss_weights"] = [float(generator.random() < 0.3) for _ in range(length)]
        if "packed" in kind:
            row["seq_lengths"] = [length] if length < 4 else [2, length - 3, 1]
        rows.append(row)
    # so that no set is without any label
    return [*rows, {name: {"seq_lengths": [2], "loss_weights": [1.0, 1.0]}.get(name, [1, 1]) for name in rows[0]}]


def counted(row: dict[str, Any], begin: int, stop: int, is_shifted: bool) -> bool:
    """Whether a label counts in tokens [begin, stop) of a row, where they are a document of their own."""
    length = len(row["input_ids"])
    labels, weights = row.get("labels", row["input_ids"]), row.get("loss_weights", [1.0] * length)
    return any(labels[i] != -100 and weights[i] > 0 for i in range(begin + is_shifted, stop))


class Counting:
    """Rows that are noted when they are read."""

    def __init__(self, rows: Any, read: list[int]) -> None:
        self.rows, self.read = rows, read

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        self.read.append(number)
        return self.rows[number]


@pytest.mark.parametrize("is_arrow", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_without_a_label_are_found_for_any_limit_and_way_to_cut(
    kind: str, is_arrow: bool, tmp_path, monkeypatch
) -> None:
    # several tables, some of several rows
    monkeypatch.setattr(pieces, "_TABLE_TOKENS", 16)
    task = TOKENS if "tokens" in kind else NEXT_TOKEN
    rows = rows_of(kind, random.Random(kind))
    dataset: Any = datasets.Dataset.from_list(rows) if is_arrow else rows
    scan = scan_dataset(dataset, "d", 4, task=task)
    if is_arrow:
        # on disk, so that the scan is written and read again
        dataset.save_to_disk(tmp_path / "d")
        dataset = datasets.load_from_disk(tmp_path / "d")
        cached_scan(dataset, "d", 4, task=task)
        scan = cached_scan(dataset, "d", 4, task=task)
    assert not scan.problems
    for limit in (1, 2, 3, 5, 8, 40):
        for way in ("truncate", "split"):
            index = SequenceIndex.build(scan.lengths, limit, way, scan.documents)
            read: list[int] = []
            seen = Counting(dataset, read)

            def tables(rows: Any, seen: Any = seen, read: list[int] = read) -> Any:
                read += rows.tolist() if is_arrow else []
                return tables_of(dataset if is_arrow else seen, rows, ScannedRows("d", scan), task)

            found = have_labels(index, scan.sequence_lengths, scan.first_labels, task, tables)
            spans = zip(index.rows, index.starts, index.stops, strict=True)
            expected = [counted(rows[row], int(start), int(stop), task == NEXT_TOKEN) for row, start, stop in spans]
            assert found.tolist() == expected, (limit, way)
            # once per row, however many pieces it has
            assert len(set(read)) == len(read) and (way == "split" or not read)


@pytest.mark.parametrize("num_batches", [1, 2, 3])
def test_the_first_step_without_a_label_is_found_in_any_epoch(num_batches: int) -> None:
    lengths = np.full(11, 4)
    for seed in range(20):
        labelled = np.random.default_rng(seed).random(11) < 0.5
        sampler = LengthAwareSampler(lengths, 2, seed=seed)
        sampler.set_epoch(7)
        steps = []
        for epoch in range(4):
            order = LengthAwareSampler(lengths, 2, seed=seed)
            order.set_epoch(epoch)
            batches = list(order)
            steps += [[*chain(*batches[i : i + num_batches])] for i in range(0, len(batches), num_batches)]
        empty = [number for number, step in enumerate(steps, start=1) if not any(labelled[i] for i in step)]
        for most in (3, len(steps)):
            found = step_without_labels(sampler, labelled, 4, most, num_batches)
            assert sampler.epoch == 7
            if empty and empty[0] <= most:
                assert found == (empty[0], steps[empty[0] - 1])
            else:
                assert found is None
