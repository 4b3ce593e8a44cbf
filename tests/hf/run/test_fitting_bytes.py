"""The bytes that plans may fill, by what a step was seen to take."""

from __future__ import annotations

from hf_longctx.hf.run.free_memory import fitting_bytes

GIB = 2**30


def test_a_right_prediction_leaves_what_others_do_not_hold() -> None:
    assert fitting_bytes(100 * GIB, 3 * GIB, 90 * GIB, 92 * GIB, False) == 95 * GIB


def test_a_prediction_that_was_too_small_lowers_the_limit_by_its_error() -> None:
    # 90 of 100 predicted bytes were 99, so of the 98 that can be filled 98 / 1.1 may be predicted
    assert abs(fitting_bytes(100 * GIB, 0, 99 * GIB, 90 * GIB, False) - 98 * GIB / 1.1) < 2


def test_a_full_allocator_gives_back_a_little_and_at_most_up_to_the_usual_share() -> None:
    assert fitting_bytes(100 * GIB, 0, 90 * GIB, 92 * GIB, True) == int(0.97 * 92 * GIB)
    assert fitting_bytes(100 * GIB, 0, 70 * GIB, 80 * GIB, True) == 80 * GIB
