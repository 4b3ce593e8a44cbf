"""Runs an order of actions that is written by hand, given functions for the seconds of an action, its message and its copies.

The planner knows all seconds as tables and calls `Wiring` itself; scripts and tests that try orders of a paper have functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hf_longctx.plan.core.types import Action
from hf_longctx.plan.predict.event_loop import CopiedOut, CopyStep, Times, Wiring

# copy steps of an F or B, in the order in which they run; () for a pass without saved tensors on the host
Copies = Callable[[Action], tuple[CopyStep, ...]]


def run_actions(
    stages: Sequence[Sequence[Action]],
    seconds: Callable[[Action], float],
    hop_s: Callable[[Action], float],
    num_ranges: int = 1,
    start_s: Sequence[float] = (),
) -> tuple[Times, ...]:
    """Returns (start, stop) of every action of every stage; messages are included, with no length.

    seconds: called once for each F and B. hop_s: seconds from the end of an F or B (or of the SF or SB that sends its result) to
    the arrival at another stage. start_s: when each stage is free. Raises PlanError when no stage can go on, naming the action at
    which each of them is stuck.
    """
    return run_copying(stages, seconds, hop_s, lambda action: (), num_ranges, start_s)[0]


def run_copying(
    stages: Sequence[Sequence[Action]],
    seconds: Callable[[Action], float],
    hop_s: Callable[[Action], float],
    copies: Copies,
    num_ranges: int = 1,
    start_s: Sequence[float] = (),
    runs_ahead: bool = False,
) -> tuple[tuple[Times, ...], tuple[CopiedOut, ...]]:
    """Does the work of `run_actions`, with copies to the host and back: a pass also takes the seconds it waits for them."""
    wiring = Wiring.of_actions(stages, num_ranges)
    actions = [action for stage in stages for action in stage]
    return wiring.run(
        [seconds(action) if action.kind in ("F", "B") else 0.0 for action in actions],
        [
            hop_s(action) if hands_over and len(stages) > 1 else 0.0
            for action, hands_over in zip(actions, wiring.hands_over, strict=True)
        ],
        start_s,
        [copies(action) if action.kind in ("F", "B") else () for action in actions],
        runs_ahead,
    )
