"""The scan file of a dataset is used if it is intact and of the same rows; otherwise the scan runs again and the log says why."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import numpy as np
import pytest
from helpers.trainers.trainer_runs import training_arguments

from hf_longctx.hf.data import scan as scan_cache
from hf_longctx.hf.data.scan import DatasetScan, cache_path, cached_scan, scan_dataset, scan_on_every_rank

VOCAB_SIZE = 64
ROWS = [{"input_ids": [number % 50] * (number % 7 + 1)} for number in range(30)]


def on_disk(folder: Path, rows: list[dict[str, Any]]) -> datasets.Dataset:
    datasets.Dataset.from_list(rows).save_to_disk(str(folder))
    return datasets.load_from_disk(str(folder))


def refuse(*args: Any, **kwargs: Any) -> DatasetScan:
    raise AssertionError("the rows were read again")


def same(left: DatasetScan, right: DatasetScan) -> bool:
    return np.array_equal(left.lengths, right.lengths) and (left.digest, left.problems) == (right.digest, right.problems)


def test_rows_are_read_once_and_the_result_lies_beside_them(tmp_path: Path) -> None:
    first = cached_scan(on_disk(tmp_path, ROWS), "train_dataset", VOCAB_SIZE)
    assert same(first, scan_dataset(datasets.Dataset.from_list(ROWS), "train_dataset", VOCAB_SIZE))
    with patch.object(scan_cache, "scan_dataset", refuse):
        again = cached_scan(datasets.load_from_disk(str(tmp_path)), "train_dataset", VOCAB_SIZE)
    assert same(first, again) and again.lengths.dtype == np.int64
    assert len(list(tmp_path.glob("*.index"))) == 1
    assert not list(tmp_path.glob("*tmp*"))


def test_the_file_is_readable_as_the_umask_says(tmp_path: Path) -> None:
    dataset = on_disk(tmp_path, ROWS)
    before = os.umask(0o027)
    try:
        cached_scan(dataset, "train_dataset", VOCAB_SIZE)
    finally:
        os.umask(before)
    (file,) = tmp_path.glob("*.index")
    assert oct(file.stat().st_mode & 0o777) == "0o640"


def test_problems_are_kept_too(tmp_path: Path) -> None:
    dataset = on_disk(tmp_path, [*ROWS, {"input_ids": [64]}])
    first = cached_scan(dataset, "train_dataset", VOCAB_SIZE)
    assert len(first.problems) == 1
    with patch.object(scan_cache, "scan_dataset", refuse):
        assert same(cached_scan(dataset, "train_dataset", VOCAB_SIZE), first)


def test_everything_that_a_scan_depends_on_gets_a_file_of_its_own(tmp_path: Path) -> None:
    dataset = on_disk(tmp_path, ROWS)
    assert not cached_scan(dataset, "train_dataset", VOCAB_SIZE).problems
    # token id 49 is outside this vocabulary, and the message names the dataset
    assert "vocabulary has 10" in cached_scan(dataset, "train_dataset", 10).problems[0]
    assert cached_scan(dataset, "eval_dataset", 10).problems[0].startswith("eval_dataset")
    assert cached_scan(dataset.select(range(3)), "train_dataset", VOCAB_SIZE).lengths.tolist() == [1, 2, 3]
    assert cached_scan(dataset.select([2, 0]), "train_dataset", VOCAB_SIZE).lengths.tolist() == [3, 1]
    renamed = dataset.rename_column("input_ids", "labels").add_column("input_ids", [[1, 2]] * len(ROWS))
    assert "but 1 labels" in cached_scan(renamed, "train_dataset", VOCAB_SIZE).problems[0]


@pytest.mark.parametrize("damage", ["a length", "the header", "cut off", "empty", "no line"])
def test_a_damaged_file_is_built_again_with_one_line(tmp_path: Path, caplog: Any, damage: str) -> None:
    dataset = on_disk(tmp_path, ROWS)
    first = cached_scan(dataset, "train_dataset", VOCAB_SIZE)
    path = cache_path(dataset, "train_dataset", VOCAB_SIZE)
    content = bytearray(path.read_bytes())
    if damage == "a length":
        content[-8] ^= 1
    elif damage == "the header":
        content[content.index(b"digest") + 12] ^= 1
    shortened = {"cut off": content[:-3], "empty": b"", "no line": b"abc"}.get(damage, content)
    path.write_bytes(shortened)
    for _ in range(2):
        assert same(cached_scan(dataset, "train_dataset", VOCAB_SIZE), first)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "is damaged, so it is built again" in caplog.text


def test_other_rows_under_the_old_fingerprint_are_noticed(tmp_path: Path, caplog: Any) -> None:
    dataset = on_disk(tmp_path / "here", ROWS)
    cached_scan(dataset, "train_dataset", VOCAB_SIZE)
    # other rows are written into the same files, but the fingerprint stays
    other = on_disk(tmp_path / "there", [{"input_ids": [1, 2]} for _ in ROWS])
    for file in dataset.cache_files:
        Path(file["filename"]).write_bytes(Path(other.cache_files[0]["filename"]).read_bytes())
    found = cached_scan(datasets.load_from_disk(str(tmp_path / "here")), "train_dataset", VOCAB_SIZE)
    assert found.lengths.tolist() == [2] * len(ROWS)
    assert len(caplog.records) == 1 and "was made from other files, so it is built again" in caplog.text


def test_a_set_in_memory_leaves_no_file(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for dataset in (datasets.Dataset.from_list(ROWS), ROWS):
        assert len(cached_scan(dataset, "train_dataset", VOCAB_SIZE).lengths) == len(ROWS)
    assert not list(tmp_path.rglob("*"))


def test_beside_a_folder_that_nobody_may_write_to_the_datasets_cache_is_used(tmp_path: Path, monkeypatch: Any) -> None:
    dataset = on_disk(tmp_path / "data", ROWS)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    cached_scan(dataset, "train_dataset", VOCAB_SIZE)
    assert len(list((tmp_path / "cache" / "hf_longctx").glob("*.index"))) == 1
    assert not list((tmp_path / "data").glob("*.index"))


def test_without_room_for_the_file_the_run_goes_on(tmp_path: Path, caplog: Any) -> None:
    dataset = on_disk(tmp_path, ROWS)
    with patch.object(Path, "replace", side_effect=OSError("no space left")):
        assert len(cached_scan(dataset, "train_dataset", VOCAB_SIZE).lengths) == len(ROWS)
    assert "could not be written" in caplog.text and "no space left" in caplog.text
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("tmp")]


def scans_on_rank(folder: str, in_memory: bool) -> tuple[int, list[int]]:
    """How often this rank read the rows, and the result it has."""
    # tells accelerate about the ranks
    training_arguments(folder)
    dataset = datasets.load_from_disk(folder)
    if in_memory:
        dataset = datasets.Dataset.from_list(dataset.to_list())
    calls: list[str] = []

    def counted(*args: Any) -> DatasetScan:
        calls.append(args[1])
        return scan_dataset(*args)

    with patch.object(scan_cache, "scan_dataset", counted):
        scans = scan_on_every_rank({"train_dataset": dataset, "eval_dataset": dataset}, VOCAB_SIZE, show_progress=False)
    assert list(scans) == ["train_dataset", "eval_dataset"]
    return len(calls), scans["train_dataset"].lengths.tolist()


@pytest.mark.daily("True")
@pytest.mark.parametrize("in_memory", [False, True])
def test_one_process_of_a_machine_reads_the_rows(ranks, tmp_path: Path, in_memory: bool) -> None:
    on_disk(tmp_path, ROWS)
    results = ranks(2).run(scans_on_rank, str(tmp_path), in_memory)
    assert [num_scans for num_scans, _ in results] == ([2, 2] if in_memory else [2, 0])
    assert all(lengths == [len(row["input_ids"]) for row in ROWS] for _, lengths in results)
