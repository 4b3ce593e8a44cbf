"""Files that unpack to too much, lines that are too long and nesting that is too deep are refused within bounds, in one line."""

from __future__ import annotations

import gzip
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from hf_longctx.sim.workloads import read_workload, text_lines


def test_lines_keep_their_ends_also_from_a_gzipped_file(tmp_path: Path) -> None:
    text = "1\n\n22\r\nthree \u2028 four"
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("a.txt", "a.txt.gz"):
        assert list(text_lines(tmp_path / name)) == ["1\n", "\n", "22\n", "three \u2028 four"]


def test_a_line_may_have_so_many_characters_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1234\n12345")
    assert list(text_lines(tmp_path / "a.txt", 5)) == ["1234\n", "12345"]
    with pytest.raises(ValueError, match=r"a.txt, line 2 has more than 4 characters"):
        # the end of the first line does not count
        list(text_lines(tmp_path / "a.txt", 4))


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.daily("ones.gz")
@pytest.mark.parametrize("name", ["zeros.jsonl.gz:t", "ones.gz"])
def test_a_gzip_bomb_is_refused_within_a_gibibyte_and_seconds(tmp_path: Path, name: str) -> None:
    file = tmp_path / name.removesuffix(":t")
    with gzip.open(file, "wb", compresslevel=1) as packed:
        for _ in range(2**28 // 2**24):
            packed.write((b"1\n" if "ones" in name else b"00") * 2**23)
    before_s = _children_s()
    words = ["--model", "gpt-7b", "--gpus", "1", "--hardware", "h100", "--lengths", str(tmp_path / name)]
    done = subprocess.run(
        [sys.executable, "-m", "hf_longctx.cli.main", "plan", *words],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30)),
    )
    assert done.returncode == 1 and done.stdout == "" and _children_s() - before_s < 5
    assert "unpacks to more than 50 times its size" in done.stderr
    assert done.stderr.count("\n") == 1 and str(file) in done.stderr


@pytest.mark.wide
def test_a_well_packed_file_of_equal_lengths_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"4096\n" * 10**6))
    assert read_workload(str(tmp_path / "a.gz")).num_tokens == 4096 * 10**6


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl:t", '{"t": ' + "[" * 10**5 + "]" * 10**5 + "}\n", "line 1 is nested too deeply"),
        ("a.json:t", "[" * 10**6, "is nested too deeply"),
        ("a.jsonl:t", '{"t": ' + "9" * 5000 + "}\n", "line 1 is not JSON: Exceeds the limit"),
        ("a.txt", "1\n" * 70_000 + "2" * 5000, "line 70001 has more than 1,024 characters"),
        ("a.txt", "1\n" * 70_000 + "x\n", "line 70001: 'x' is not an integer"),
        ("a.txt", "1\n" + "9" * 500, "line 2: 99999"),
        ("a.txt", "length count\n5 " + "9" * 30, "line 2: the count is 99999"),
        ("a.txt", "".join(f"{length} {2**40}\n" for length in range(2**31 - 3000, 2**31)), "check its counts"),
        ("a.csv:t", "t\n\x00\n", "line 2"),
    ],
)
def test_numbers_lines_and_nesting_out_of_bounds_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    file = tmp_path / name.partition(":")[0]
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        read_workload(str(tmp_path / name))
    assert message in str(error.value) and len(str(error.value)) < 1000 and "\n" not in str(error.value)


def test_a_long_text_in_a_table_is_counted(tmp_path: Path) -> None:
    # the csv module refuses fields above 131,072 characters by default
    (tmp_path / "a.csv").write_text('n,t\n1,"' + "a" * 200_000 + '\nb"\n')
    counted = read_workload(f"{tmp_path / 'a.csv'}:t", count_tokens=lambda rows: [len(row.value) for row in rows])
    assert counted.longest == 200_002
