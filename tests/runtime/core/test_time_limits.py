"""Time limits of groups: short on gloo, long on NCCL, whose watchdog ends processes that only run ahead of their device."""

from __future__ import annotations

import pytest

from hf_longctx.runtime.core.clock import group_limit


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_a_device_gets_ten_minutes_or_more(backend: str) -> None:
    assert group_limit(60.0, backend).total_seconds() == 600.0
    assert group_limit(1200.0, backend).total_seconds() == 1200.0


def test_gloo_gets_the_limit_of_the_run() -> None:
    assert group_limit(8.0, "gloo").total_seconds() == group_limit(8.0).total_seconds() == 8.0
