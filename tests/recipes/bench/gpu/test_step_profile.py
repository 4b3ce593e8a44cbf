"""Sums of the profile of a step: kinds of work, pauses and shares of time, on made-up kernels."""

from __future__ import annotations

import pytest

from hf_longctx.recipes.bench.gpu.step_profile import Work, busy, main, pauses, report

MS = 1_000_000
WORKS = [
    Work(0, 10 * MS, "nvjet_sm90_tst_256x160"),
    Work(2 * MS, 22 * MS, "Memcpy DtoH (Device -> Pinned)"),
    Work(30 * MS, 35 * MS, "cudnn_generated_sdpa_flash_bprop_wgmma"),
    Work(33 * MS, 40 * MS, "void vectorized_elementwise_kernel"),
]


def test_pauses_lie_between_overlapping_intervals() -> None:
    assert pauses([(0, 5), (3, 4), (4, 8), (10, 11), (15, 20)]) == [2, 4]
    assert pauses([]) == []


def test_shares_of_a_part_add_up_to_the_work() -> None:
    shares = busy([(0, 100), (50, 150), (390, 400)], 0, 400)
    assert shares[5] == 2.0 and shares[2] == 1.0 and shares[20] == 0.0
    assert sum(shares) * 400 / 40 == pytest.approx(210)


def test_work_is_named_by_what_it_does() -> None:
    lines = report(WORKS)
    assert lines[0] == "0.040 s, in which something computes for 0.020 s"
    kinds = [line.split("calls  ")[1] for line in lines[1:5]]
    assert kinds == ["copies to the host", "products", "other kernels", "attention backward, cuDNN"]
    assert "0.020 s longer than 10,000 us" in lines[5]


def test_the_longest_pause_names_the_calls_of_the_host_in_it() -> None:
    calls = [
        Work(5 * MS, 12 * MS, "cudaMalloc"),
        Work(13 * MS, 29 * MS, "garbage of generation 2"),
        Work(31 * MS, 39 * MS, "late"),
    ]
    assert report(WORKS, calls)[-1] == (
        "  pause of 20.0 ms after 0.010 s, nvjet_sm90_tst_256x160 to cudnn_generated_sdpa_flash_bprop_wgmma: "
        "garbage of generation 2 16.0 ms, cudaMalloc 2.0 ms"
    )


def test_a_step_of_copies_alone_has_no_pauses_of_computing() -> None:
    assert report(WORKS[1:2])[0] == "0.020 s, in which something computes for 0.000 s"


def test_a_toy_trains(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--toy"]) == 0
    assert "hf_longctx" in capsys.readouterr().out
