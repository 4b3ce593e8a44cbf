"""Runs `sanitised.py`: no copy of the host tier races with computation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# not imported: that alone switches the sanitizer's hooks on
SANITISED = Path(__file__).with_name("sanitised.py")


def test_nothing_races_under_the_sanitizer() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(SANITISED)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-3000:]
