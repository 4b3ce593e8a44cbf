"""Settings of torchrun and accelerate, read from the environment."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import datasets
import pytest
from helpers.models.chats import byte_tokenizer

from hf_longctx import tokenise_text
from hf_longctx.hf.ranks.launch import LaunchEnvironment


@pytest.mark.parametrize(
    "variables,expected",
    [
        ({}, (1, 1)),
        ({"WORLD_SIZE": "8"}, (8, 8)),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, (8, 4)),
    ],
)
def test_launch_environment_is_what_the_launcher_set(monkeypatch, variables: dict[str, str], expected: tuple[int, int]) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    launch = LaunchEnvironment.read()
    assert (launch.num_ranks, launch.ranks_per_node) == expected


NAMES = (
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_DYNAMO_BACKEND",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
    "FSDP_RESHARD_AFTER_FORWARD",
    "FSDP_SHARDING_STRATEGY",
    "FSDP_OFFLOAD_PARAMS",
)
PLAIN = LaunchEnvironment(1, 1, "no", "no", uses_fsdp=False, uses_deepspeed=False, fsdp_reshard="true", fsdp_offload=False)


@pytest.mark.parametrize(
    ("variables", "changes"),
    [
        ({}, {}),
        ({"ACCELERATE_MIXED_PRECISION": "BF16"}, {"mixed_precision": "bf16"}),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, {"compile_backend": "inductor"}),
        ({"ACCELERATE_USE_FSDP": "true"}, {"uses_fsdp": True}),
        ({"ACCELERATE_USE_FSDP": "false"}, {}),
        ({"ACCELERATE_USE_DEEPSPEED": "True"}, {"uses_deepspeed": True}),
        ({"FSDP_OFFLOAD_PARAMS": "TRUE"}, {"fsdp_offload": True}),
        ({"FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}, {"fsdp_reshard": "shard_grad_op"}),
        # version 2 of FSDP decides where both are set
        ({"FSDP_RESHARD_AFTER_FORWARD": "False", "FSDP_SHARDING_STRATEGY": "FULL_SHARD"}, {"fsdp_reshard": "false"}),
    ],
)
def test_settings_of_accelerate_are_read_in_any_case(monkeypatch, variables: dict[str, str], changes: dict[str, Any]) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert LaunchEnvironment.read() == replace(PLAIN, **changes)


def test_warnings_that_all_ranks_have_come_from_the_first_one(monkeypatch, caplog) -> None:
    rows = datasets.Dataset.from_dict({"text": ["one two", ""]})
    for rank, told in (("1", 0), ("0", 1)):
        monkeypatch.setenv("RANK", rank)
        caplog.clear()
        tokenise_text(rows, byte_tokenizer())
        assert caplog.text.count("1 of 2 rows are left out") == told
    monkeypatch.setenv("RANK", "1")
    logging.getLogger("hf_longctx.hf.data.tokenise").error("an error of this rank")
    assert "an error of this rank" in caplog.text
