"""A refusal is said once for all ranks and last, without a traceback of any rank; an error of another kind keeps its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hf_longctx import DataError
from hf_longctx.cli.launching import brief, launch_command
from hf_longctx.hf.ranks import exit_message as refusals
from hf_longctx.hf.ranks.exit_message import RefusedRun, refusals_last

SCRIPT = """
import os, time
from hf_longctx.hf.ranks.exit_message import RefusedRun, refusals_last
with refusals_last():
    # rank 1 finds out first
    time.sleep(0.5 * (os.environ["LOCAL_RANK"] == "0"))
    raise RefusedRun("this run cannot start:\\n- max_length 9 is " + "above " * 40)
"""


@pytest.mark.daily("hf-longctx train")
@pytest.mark.parametrize("is_brief", [True, False], ids=["hf-longctx train", "accelerate launch"])
def test_two_ranks_end_with_one_message(tmp_path: Path, is_brief: bool) -> None:
    (tmp_path / "refused.py").write_text(SCRIPT)
    command = [*launch_command(2, [])[:-1], str(tmp_path / "refused.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    run = subprocess.run(
        brief(command) if is_brief else command, capture_output=True, text=True, timeout=200, check=False, env=environment
    )
    lines = run.stderr.strip().splitlines()
    assert run.returncode == 1 and run.stdout == ""
    assert run.stderr.count("this run cannot start:") == run.stderr.count("- max_length 9 is above") == 1
    # the launcher of accelerate puts its own traceback above, and a frame around
    assert run.stderr.count("Traceback") == (not is_brief)
    place = next(number for number, line in enumerate(lines) if "this run cannot start:" in line)
    assert len(lines) - place == (4 if is_brief else 5) and all(len(line) < 140 for line in lines[place:]), lines


def test_alone_the_message_goes_to_standard_error(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    for error in (RefusedRun("no"), DataError("no"), SystemExit("no")):
        with pytest.raises(SystemExit) as ended, refusals_last():
            raise error
        assert ended.value.code == 1 and capsys.readouterr().err == "no\n"
    with pytest.raises(ValueError, match="a fault"), refusals_last():
        raise ValueError("a fault of the program")
    with pytest.raises(SystemExit) as ended, refusals_last():
        raise SystemExit(3)
    assert ended.value.code == 3


def test_without_an_error_file_a_rank_refused_alone_says_so_after_a_wait(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    waited: list[float] = []
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(refusals.time, "sleep", waited.append)
    with pytest.raises(SystemExit) as ended, refusals_last():
        raise DataError("row 7 of rank 1 alone")
    assert ended.value.code == 1 and capsys.readouterr().err == "row 7 of rank 1 alone\n"
    assert waited == [refusals._ALONE_S]
    with pytest.raises(SystemExit), refusals_last():
        raise RefusedRun("what all ranks know")
    assert not capsys.readouterr().err and len(waited) == 1
