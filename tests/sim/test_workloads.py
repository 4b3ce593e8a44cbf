"""Lengths are read from every form that the command line accepts; other values are refused with file and line."""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from hf_longctx.sim.workloads import Workload, read_workload


def as_counts(workload: Workload) -> dict[int, int]:
    return dict(zip(workload.lengths.tolist(), workload.counts.tolist(), strict=True))


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


# name of the file -> (its text, column); all hold the lengths 7, 7, 300 and 12
GOOD = {
    "lines.txt": ("7\n7\n\n300\n12\n", ""),
    "no_newline.txt": ("7\r\n300\r\n12\r\n7", ""),
    "histogram.csv": ("length,count\n7,2\n300,1\n12,1\n5,0\n", ""),
    "histogram.txt": ("12 1\n7 1\n7 1\n300 1\n", ""),
    "histogram.tsv": ("tokens\tsequences\n7\t2\n300\t1\n12\t1\n", ""),
    "numbers.jsonl": ('{"n": 7}\n{"n": 300}\n\n{"n": 12}\n{"n": 7}\n', "n"),
    "tokens.jsonl": ("\n".join(json.dumps({"text": "a", "ids": [1] * n}) for n in (7, 300, 12, 7)), "ids"),
    "table.csv": ('name,n\n"a, b",7\nc,300\nd,12\ne,7\n', "n"),
    "table.tsv": ("n\tname\n7\ta\n300\tb\n12\tc\n7\td\n", "n"),
    "rows.json": (json.dumps([{"n": n} for n in (7, 300, 12, 7)]), "n"),
    "columns.json": (json.dumps({"n": [7, 300, 12, 7], "other": []}), "n"),
}


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("is_zipped", [False, True], ids=["plain", "gz"])
def test_every_form_gives_the_same_lengths(name: str, is_zipped: bool, tmp_path: Path) -> None:
    text, column = GOOD[name]
    path = tmp_path / (name + ".gz" if is_zipped else name)
    path.write_bytes(gzip.compress(text.encode()) if is_zipped else text.encode())
    workload = read_workload(f"{path}:{column}" if column else str(path))
    assert as_counts(workload) == {7: 2, 12: 1, 300: 1}
    assert (workload.num_sequences, workload.num_tokens, workload.longest) == (4, 326, 300)
    assert (workload.limit, workload.num_dropped) == (300, 0)


@pytest.mark.parametrize("column", ["n", "ids", "large"])
def test_a_parquet_column_of_numbers_or_lists_is_read(column: str, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    lengths = [7, 300, 12, 7]
    lists = [[0] * n for n in lengths]
    table = pyarrow.table({"n": lengths, "ids": lists, "large": pyarrow.array(lists, pyarrow.large_list(pyarrow.int32()))})
    parquet.write_table(table, tmp_path / "data.parquet")
    assert as_counts(read_workload(f"{tmp_path / 'data.parquet'}:{column}")) == {7: 2, 12: 1, 300: 1}


def test_longer_sequences_are_dropped_and_counted(tmp_path: Path) -> None:
    file = write(tmp_path / "lengths.txt", "5\n10\n11\n12\n10\n")
    workload = read_workload(file, limit=10)
    assert as_counts(workload) == {5: 1, 10: 2}
    assert (workload.limit, workload.num_dropped) == (10, 2)


# name -> (file, its text, column, text of the error)
BAD = {
    "zero": ("a.txt", "5\n0\n", "", "line 2: 0 tokens; every sequence needs at least one"),
    "negative": ("a.txt", "5\n\n-3\n", "", "line 3: -3 tokens"),
    "absurd": ("a.txt", "5\n3000000000\n", "", "line 2: 3000000000 tokens, but at most 2147483648"),
    "beyond 64 bits": ("a.txt", "5\n99999999999999999999999\n", "", "line 2: 99999999999999999999999 tokens, but at most"),
    "fraction": ("a.txt", "5\n6\n7.5\n", "", "line 3: '7.5' is not an integer"),
    "word": ("a.txt", "5\nmany\n", "", "line 2: 'many' is not an integer"),
    "empty": ("a.txt", "\n\n", "", "holds no lengths"),
    "only a header": ("a.csv", "length,count\n", "", "holds no lengths"),
    "counts of zero": ("a.csv", "5,0\n", "", "holds no lengths"),
    "negative count": ("a.csv", "length,count\n5,2\n6,-1\n", "", "line 3: the count is -1"),
    "third field": ("a.csv", "5,2\n6,1,1\n", "", "line 2: '6 1 1' is not 'length count'"),
    "histogram of zero": ("a.csv", "5,2\n0,1\n", "", "line 2: 0 tokens"),
    "text": (
        "a.jsonl",
        '{"t": "hello"}\n',
        "t",
        "line 1: column 't' holds text, whose tokens cannot be counted without a tokenizer",
    ),
    "messages": (
        "a.jsonl",
        '{"t": [1, 2]}\n{"t": [{"role": "user", "content": "hello"}]}\n',
        "t",
        "line 2: column 't' holds conversations, whose tokens cannot be counted without a tokenizer; add --tokenizer",
    ),
    "list of words": ("a.jsonl", '{"t": [1, "b"]}\n', "t", "line 1: column 't' holds a list with 'b' in it; a list of token ids"),
    "list of lists": ("a.jsonl", '{"t": [[1], [2]]}\n', "t", "holds a list with [1] in it"),
    "list of floats": ("a.json", '[{"t": [0.5, 0.5]}]', "t", "holds a list with 0.5 in it"),
    "float column": ("a.jsonl", '{"t": 1}\n{"t": 1.5}\n', "t", "line 2: column 't' holds 1.5"),
    "true": ("a.jsonl", '{"t": true}\n', "t", "holds True"),
    "empty list": ("a.jsonl", '{"t": [1]}\n{"t": []}\n', "t", "line 2: 0 tokens"),
    "no such column": ("a.jsonl", '{"t": 1, "u": 2}\n', "x", "line 1: no column 'x'; found t, u"),
    "no such table column": ("a.csv", "n,m\n1,2\n", "x", "no column 'x'; found n, m"),
    "text in a table": ("a.csv", "n,m\n1,2\nb,3\n", "n", "line 3: 'b' is not an integer"),
    "a gap in a table": ("a.csv", "m,n\n1,2\n3\n", "n", "line 3: '' is not an integer"),
    "broken line": ("a.jsonl", '{"t": 1}\n{"t": \n', "t", "line 2 is not JSON"),
    "no rows": ("a.json", "3", "t", "holds int; a list of rows"),
    "column not named": ("a.jsonl", '{"t": 1}\n', "", "a.jsonl:input_ids"),
    "no parquet": ("a.parquet", "hello", "t", "is not a Parquet file"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_length_is_refused_with_its_place(name: str, tmp_path: Path) -> None:
    file, text, column, message = BAD[name]
    path = write(tmp_path / file, text)
    with pytest.raises(ValueError) as error:
        read_workload(f"{path}:{column}" if column else path)
    assert str(path) in str(error.value) and message in str(error.value)


def test_a_parquet_column_that_is_no_length_is_refused(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    columns = {"text": ["a", "b"], "half": [0.5, 1.5], "some": [[1], None], "none": [[1], []]}
    columns |= {"floats": [[0.5], [1.5]], "chats": [[{"role": "user", "content": "a"}]] * 2}
    parquet.write_table(pyarrow.table(columns), path)
    for column, message in {
        "text": "holds text",
        "half": "holds double",
        "some": "1 empty rows",
        "none": "row 1: 0 tokens",
        "floats": "row 0: column 'floats' holds a list with 0.5 in it",
        "chats": "row 0: column 'chats' holds conversations, whose tokens cannot be counted without a tokenizer",
        "other": "found text, half, some, none",
    }.items():
        with pytest.raises(ValueError, match=message):
            read_workload(f"{path}:{column}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere.txt", "'nowhere.txt', which does not exist"),
        (".", "'.', which is a folder"),
        ("lognormal:7", "write lognormal:MU,SIGMA"),
        ("lognormal:7,x", "write lognormal:MU,SIGMA"),
        ("lognormal:30,1", "mu is not in 0..20"),
        ("lognormal:7,nan", "sigma not in 0..5"),
    ],
)
def test_a_source_that_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        read_workload(text, num_sampled=10)
    assert message in str(error.value)


def test_limits_that_leave_nothing_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "50\n60\n")
    with pytest.raises(ValueError, match=r"longer than the limit of 10 tokens \(the shortest has 50\)"):
        read_workload(file, limit=10)
    with pytest.raises(ValueError, match="the limit is 0 tokens"):
        read_workload(file, limit=0)
    with pytest.raises(ValueError, match="within the limit of 2 tokens; raise --limit"):
        read_workload("lognormal:15,0.1", limit=2, num_sampled=4)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "b.gz").write_bytes(b"no gzip")
    for name in ("a.txt", "b.gz"):
        with pytest.raises(ValueError, match=f"{name} is not a text file"):
            read_workload(str(tmp_path / name))


def test_a_lognormal_has_its_median_and_spread() -> None:
    workload = read_workload("lognormal:6.963,1.6", num_sampled=20_000, seed=3)
    logs = np.log(np.repeat(workload.lengths, workload.counts))
    assert workload.num_sequences == 20_000
    assert workload.quantile(0.5) == pytest.approx(math.exp(6.963), rel=0.05)
    assert float(logs.std()) == pytest.approx(1.6, rel=0.03)


def test_a_lognormal_depends_on_its_seed_alone_and_is_full_below_a_limit() -> None:
    first, again = (read_workload("lognormal:6,1", 1000, 500, seed=1) for _ in range(2))
    assert as_counts(first) == as_counts(again) != as_counts(read_workload("lognormal:6,1", 1000, 500, seed=2))
    assert first.num_sequences == 500 and first.longest <= 1000
    assert first.num_dropped > 0


def workload(counts: dict[int, int]) -> Workload:
    return Workload("test", np.array(sorted(counts)), np.array([counts[n] for n in sorted(counts)]), max(counts))


def test_steps_take_no_sequence_twice() -> None:
    steps = workload({3: 4, 5: 1, 9: 2}).draw_steps(10, 3, seed=0)
    assert [len(step) for step in steps] == [3, 3]
    left = Counter({3: 4, 5: 1, 9: 2}) - Counter(length for step in steps for length in step)
    assert sum(left.values()) == 1
    assert steps == workload({3: 4, 5: 1, 9: 2}).draw_steps(10, 3, seed=0)
    assert len({workload({3: 4, 5: 1, 9: 2}).draw_steps(10, 3, seed=seed) for seed in range(5)}) > 1


def test_all_sequences_in_one_step_are_all_sequences() -> None:
    [step] = workload({3: 4, 5: 1, 9: 2}).draw_steps(3, 7, seed=0)
    assert sorted(step) == [3, 3, 3, 3, 5, 9, 9]


def test_a_histogram_of_billions_is_drawn_by_its_shares() -> None:
    [step] = workload({3: 3_000_000_000, 9: 1_000_000_000}).draw_steps(1, 10_000, seed=0)
    assert step.count(9) / 10_000 == pytest.approx(0.25, abs=0.02)


def test_a_step_larger_than_the_workload_is_refused() -> None:
    with pytest.raises(ValueError, match="a step of 8 sequences was asked for, but test holds 7; lower --global-batch"):
        workload({3: 4, 5: 1, 9: 2}).draw_steps(1, 8, seed=0)
    with pytest.raises(ValueError, match="0 steps"):
        workload({3: 4}).draw_steps(0, 1, seed=0)


def test_quantiles_count_sequences() -> None:
    counted = workload({10: 50, 20: 49, 30: 1})
    assert [counted.quantile(share) for share in (0.0, 0.5, 0.51, 0.99, 1.0)] == [10, 10, 20, 20, 30]
