"""Trainers in tests open as users open them: with the self-test, which is where a user's own code first meets plans."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

TESTS = Path(__file__).parents[1]
# file -> why it switches the self-test off
OFF = {
    "helpers/trainers/trainer_runs.py": "make_trainer starts hundreds of trainers for their numbers; all others start with it",
    "helpers/trainers/stock_runs.py": "compares trainings with stock ones; test_callback.py starts one of each door with it",
    "fake_cuda/test_free_memory.py": "counts the plans that run, of which the self-test has its own",
    "fake_cuda/test_fp8_training.py": "counts what leaves for the host, of which the self-test has its own",
    "soak/constructors.py": "makes thousands of trainers; some draws switch it on",
    "hf/self_test/test_self_test.py": "tests the setting itself",
    "hf/self_test/test_added_later.py": "tests what becomes of a user's code with and without a self-test",
    "hf/trainer/stages/test_open_stages.py": "starts trainers for the line that they log about stages",
    "hf/start/test_unread_weights.py": "looks at weights before and after they are read, not at a training",
    "hf/test_config.py": "tests the setting itself",
}


def test_the_self_test_is_switched_off_in_few_files_and_with_a_reason() -> None:
    pattern = re.compile(r"self_test\W{1,4}False\b")
    found = {str(path.relative_to(TESTS)) for path in TESTS.rglob("*.py") if pattern.search(path.read_text())}
    assert found == OFF.keys()
