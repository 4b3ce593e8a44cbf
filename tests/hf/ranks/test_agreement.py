"""Ranks start together or not at all, and the message says which rank had what."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.ranks.forked import free_port, start_ranks
from helpers.ranks.rank_steps import group_pool
from helpers.trainers.trainer_runs import training_arguments

from hf_longctx import LongContextConfig
from hf_longctx.hf.ranks import agreement
from hf_longctx.hf.ranks.agreement import control_group, explain_lost_ranks, gather_objects, raise_together
from hf_longctx.hf.run.run import meet


def gathered_on_rank(values: list[object]) -> list[object]:
    pool = group_pool()
    return gather_objects(values[pool.rank], pool.control)


@pytest.mark.quick
def test_values_are_gathered_in_rank_order_on_every_rank(ranks) -> None:
    values = [["a", 1], None]
    assert ranks(2).run(gathered_on_rank, values) == [values, values]


def test_one_rank_gathers_its_own_value() -> None:
    assert gather_objects("only", None) == ["only"]


def message_on_rank(problems: list[list[str]]) -> str:
    """The message of `raise_together` on this rank, "" if it does not raise; proves that ranks are in step afterwards."""
    pool = group_pool()
    message = ""
    try:
        raise_together(problems[pool.rank], pool.control)
    except ValueError as error:
        message = str(error)
    assert gather_objects(pool.rank, pool.control) == list(range(pool.num_ranks))
    return message


@pytest.mark.quick
def test_a_problem_of_one_rank_is_raised_on_every_rank_with_its_number(ranks) -> None:
    expected = "this run cannot start:\n- the disk is full (on rank 1)"
    assert ranks(2).run(message_on_rank, [[], ["the disk is full"]]) == [expected, expected]


def test_a_problem_of_all_ranks_is_said_once_without_numbers(ranks) -> None:
    expected = "this run cannot start:\n- bf16=True"
    assert ranks(2).run(message_on_rank, [["bf16=True"], ["bf16=True"]]) == [expected, expected]


def test_every_problem_of_every_rank_is_listed(ranks) -> None:
    problems = [["a", "b"], ["b"], [], ["c", "b"]]
    expected = "this run cannot start:\n- a (on rank 0)\n- b (on rank 0, 1, 3)\n- c (on rank 3)"
    assert ranks(4).run(message_on_rank, problems) == [expected] * 4


def test_without_problems_nothing_is_raised(ranks) -> None:
    assert ranks(2).run(message_on_rank, [[], []]) == ["", ""]


def test_one_rank_raises_its_problems_without_numbers() -> None:
    with pytest.raises(ValueError) as raised:
        raise_together(["no rows", "no model"], None)
    assert str(raised.value) == "this run cannot start:\n- no rows\n- no model"
    raise_together([], None)


def differing_on_rank(settings: list[dict[str, object]]) -> list[str]:
    pool = group_pool()
    try:
        raise_together([], pool.control, alike=settings[pool.rank])
    except ValueError as error:
        return [line.removeprefix("- ") for line in str(error).splitlines()[1:]]
    return []


def test_a_setting_that_differs_is_named_with_both_values_on_every_rank(ranks) -> None:
    settings = [{"seed": 1, "solver": "auto", "same": None}, {"seed": 2, "solver": "greedy", "same": None}]
    expected = [
        "seed differs between ranks (rank 0: 1, rank 1: 2); start every rank with the same settings and data",
        "solver differs between ranks (rank 0: 'auto', rank 1: 'greedy'); start every rank with the same settings and data",
    ]
    assert ranks(2).run(differing_on_rank, settings) == [expected, expected]


def test_a_setting_that_one_rank_lacks_differs(ranks) -> None:
    for problems in ranks(2).run(differing_on_rank, [{"seed": 1}, {}]):
        assert problems[0].startswith("seed differs between ranks (rank 0: 1, rank 1: missing)") and len(problems) == 1


def test_values_of_another_type_differ(ranks) -> None:
    for problems in ranks(2).run(differing_on_rank, [{"seed": 1}, {"seed": "1"}]):
        assert problems and "(rank 0: 1, rank 1: '1')" in problems[0]


def test_equal_settings_are_no_problem(ranks) -> None:
    assert ranks(2).run(differing_on_rank, [{"seed": 1, "degrees": [1, 2]}] * 2) == [[], []]


def test_one_rank_always_agrees_with_itself() -> None:
    raise_together([], None, alike={"seed": 1})


def control_on_rank() -> tuple[str, int, bool]:
    group = control_group(30.0)
    return dist.get_backend(group), dist.get_world_size(group), group is not dist.group.WORLD


def test_control_group_is_a_cpu_group_of_all_ranks_and_no_other(ranks) -> None:
    assert ranks(2).run(control_on_rank) == [("gloo", 2, True)] * 2


def attempt_on_rank() -> str | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "_roll_call", None)
        # ranks of a node that was restarted more often have a higher number
        patch.setenv("TORCHELASTIC_RESTART_COUNT", str(dist.get_rank()))
        agreement.control_group(30.0)
        assert agreement._roll_call is not None
        return agreement._roll_call.attempt


def test_ranks_of_one_start_agree_on_its_name_though_their_nodes_were_restarted_differently_often(ranks) -> None:
    first, second = (ranks(2).run(attempt_on_rank) for _ in range(2))
    assert first[0] == first[1] != second[0] == second[1]


def test_one_process_needs_no_control_group() -> None:
    assert control_group(30.0) is None


BACKEND_MESSAGES = [
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 60000ms for recv operation",
    "Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
    "NCCL error in: ProcessGroupNCCL.cpp:2075, unhandled system error",
    "NCCL communicator was aborted on rank 1.",
]


@pytest.mark.quick
@pytest.mark.parametrize("message", BACKEND_MESSAGES)
def test_a_lost_rank_is_explained_with_step_rank_and_time_out(message: str) -> None:
    with pytest.raises(RuntimeError) as raised, explain_lost_ranks(step=7, rank=3, timeout_s=60.0):
        raise RuntimeError(message)
    assert str(raised.value).startswith("step 7 could not finish on rank 3: another rank died or did not answer within 60 s")
    assert "raise collective_timeout_s" in str(raised.value)
    assert str(raised.value.__cause__) == message


def test_errors_of_torch_distributed_are_explained() -> None:
    with pytest.raises(RuntimeError, match="step 1 could not finish on rank 0"), explain_lost_ranks(1, 0, 5.0):
        raise dist.DistBackendError("watchdog caught a time-out")


OTHER_ERRORS = [
    RuntimeError("0 of 2 attention layers received the plan"),
    RuntimeError("database connection failed"),
    RuntimeError("my store lost its connection: NCCL error"),
    RuntimeError("Caught RuntimeError in DataLoader worker process 0: [gloo.txt:3] Connection refused"),
    ConnectionResetError("Connection reset by peer"),
    ValueError("gloo"),
]


@pytest.mark.parametrize("error", OTHER_ERRORS)
def test_other_errors_pass_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, explain_lost_ranks(1, 0, 5.0):
        raise error
    assert raised.value is error


def test_without_an_error_nothing_happens() -> None:
    with explain_lost_ranks(1, 0, 5.0):
        pass


def meet_on_rank() -> list[int]:
    """Imitate a trainer that tokenises after the meeting, on rank 1 for longer than a collective may wait."""
    # makes accelerate's state, as a trainer's arguments do
    args = training_arguments("unused")
    assert args.world_size == 2
    config = LongContextConfig(collective_timeout_s=1.0)
    control = meet(config, args)
    if dist.get_rank() == 1:
        time.sleep(2.5)
    return gather_objects(dist.get_rank(), control)


def test_ranks_that_come_minutes_apart_to_what_follows_the_meeting_are_waited_for(ranks) -> None:
    assert ranks(2).run(meet_on_rank) == [[0, 1], [0, 1]]


TIMEOUT_S = 2.0

PROGRAM = """
import os, sys, time
from contextlib import suppress
import torch.distributed as dist
from hf_longctx.hf.ranks.agreement import control_group, joint_call, raise_together

place, timeout_s = sys.argv[1], float(sys.argv[2])
dist.init_process_group("gloo")
control = control_group(timeout_s)
if place == "refused":
    with suppress(ValueError), joint_call("the start", timeout_s):
        raise_together(["planted"], control)
else:
    # all have heard each other, and begin anew elsewhere; the store ends with the last of its groups
    time.sleep(timeout_s)
    del control
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = sys.argv[3]
    dist.init_process_group("gloo")
    if place == "next run":
        control_group(timeout_s)
if dist.get_rank() == 0:
    time.sleep(3 * timeout_s)
dist.barrier()
"""


# "refused": every rank catches the error of a call; then, or without any run in a new process group, the user's code waits
def test_a_rank_waits_for_one_that_works_after_a_refusal_and_in_another_process_group(tmp_path: Path) -> None:
    """All cases run side by side, since most of their time is a wait."""
    program, pairs = tmp_path / "program.py", {}
    program.write_text(PROGRAM)
    try:
        for place in ("refused", "new group", "next run"):
            (tmp_path / place).mkdir()
            pairs[place] = start_ranks(program, [place, str(TIMEOUT_S), str(free_port())], 2, tmp_path / place)
        for place, pair in pairs.items():
            assert [rank.wait(100) for rank in pair] == [0, 0], (place, (tmp_path / place / "stderr.txt").read_text())
    finally:
        for rank in (each for pair in pairs.values() for each in pair):
            rank.kill()
