"""Two jobs never share an output folder: the second one is refused, unless the first has ended, however it did."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_longctx.hf.ranks.stopping import LOCK_NAME, FolderLock

HOLDER = """
import sys, time
from hf_longctx.hf.ranks.stopping import FolderLock
lock = FolderLock(sys.argv[1])
print(lock.take(), flush=True)
time.sleep(600)
"""


@pytest.mark.wide
def test_a_second_process_is_refused_by_name_until_the_first_was_killed(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "[]\n"
        (problem,) = FolderLock(folder).take()
        assert f"output_dir {folder} is in use by process {holder.pid} on " in problem and "choose another output_dir" in problem
    finally:
        holder.kill()
        holder.wait()
    lock = FolderLock(folder)
    assert lock.take() == []
    assert f"process {os.getpid()} on " in (folder / LOCK_NAME).read_text()
    lock.release()
    assert not list(folder.iterdir())
    lock.release()


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (problem,) = FolderLock(tmp_path / "file" / "folder").take()
    assert "cannot be written" in problem
