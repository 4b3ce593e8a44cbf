"""Host memory is that of the container where it has a limit."""

from __future__ import annotations

from pathlib import Path

import psutil

from hf_longctx.hf.ranks.launch import host_bytes


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    total_bytes = psutil.virtual_memory().total
    assert host_bytes(tmp_path)[1] == total_bytes
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("600\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 100\n")
    assert host_bytes(tmp_path)[1] == total_bytes
    (tmp_path / "memory.max").write_text("1000\n")
    assert host_bytes(tmp_path) == (500, 1000)
    (tmp_path / "memory.max").write_text("400\n")
    assert host_bytes(tmp_path) == (0, 400)
