"""The table of predicted steps trains what the benchmark of whole trainings does."""

from __future__ import annotations

import pytest

from hf_longctx.recipes.bench.gpu.trainings import Job
from hf_longctx.recipes.bench.predicted_steps import line, step_lengths


def test_a_step_has_the_documents_of_the_trainings() -> None:
    assert step_lengths(1) == Job(tokens=131072).lengths()
    assert sum(step_lengths(1)) == 132362 and sum(step_lengths(8)) >= 8 * 131072


@pytest.mark.wide
def test_a_line_has_the_seconds_and_bytes_of_the_plan() -> None:
    fifth, less = (line("llama-3.1-8b", "h200", 1, each).split() for each in (False, True))
    assert fifth[:4] == ["llama-3.1-8b", "1", "h200", "replicated"]
    seconds, rate, device, host, longest = (float(each.replace(",", "")) for each in fifth[4:])
    assert abs(rate * seconds / 132362 - 1) < 0.01 and 0 < host < device < 0.8 * 139.8
    # more memory holds longer sequences and is never slower
    assert float(less[8].replace(",", "")) > longest and float(less[4]) <= seconds and float(less[6]) > device
