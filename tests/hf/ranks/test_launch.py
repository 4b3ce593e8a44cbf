"""Settings of torchrun and accelerate, read from the environment."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from helpers.models.chats import byte_tokenizer
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.trainers.trainer_runs import training_arguments
from transformers import DataCollatorWithFlattening, Trainer

from hf_longctx import LongContextCallback, LongContextTrainer, tokenise_text
from hf_longctx.hf.ranks.launch import LaunchEnvironment, separate_runs


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


TASKS = {
    # variables of a process -> the number of processes that train alone, 1 if it is legal
    "srun": ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, 2),
    "the second of srun": ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, 2),
    "srun of one task in a job of two": ({"SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "2"}, 1),
    "a batch script": ({"SLURM_NTASKS": "8", "SLURM_NPROCS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}, 1),
    "a batch script's step": ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"}, 1),
    "a shell of salloc": ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"}, 1),
    "torchrun in srun": ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "WORLD_SIZE": "16"}, 1),
    "srun of two torchruns that do not meet": (
        {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"},
        2,
    ),
    "separate on purpose": ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "WORLD_SIZE": "1"}, 1),
    "Open MPI": ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}, 4),
    "Open MPI, alone": ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}, 1),
    "MPICH and Intel MPI": ({"PMI_SIZE": "3", "PMI_RANK": "2"}, 3),
    "MVAPICH": ({"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0"}, 2),
    "jsrun": ({"JSM_NAMESPACE_SIZE": "6", "JSM_NAMESPACE_RANK": "0"}, 6),
    "flux": ({"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "0"}, 2),
    "PMIx": ({"PMIX_RANK": "1"}, 2),
    "nothing that is a number": ({"PMI_SIZE": "", "OMPI_COMM_WORLD_SIZE": "x"}, 1),
}


def with_variables(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMI", "MV2_", "FLUX_", "JSM_"))]:
        monkeypatch.delenv(name)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("name", TASKS)
def test_processes_that_were_started_together_and_would_train_alone_are_named(monkeypatch, name: str) -> None:
    variables, count = TASKS[name]
    with_variables(monkeypatch, variables)
    assert LaunchEnvironment.read().num_tasks == count
    problems = separate_runs(1)
    assert (len(problems) == (count > 1) and separate_runs(count) == []) or count == 1
    for problem in problems:
        assert f"started {count} processes together" in problem and "torchrun" in problem and "WORLD_SIZE=1" in problem


@pytest.mark.parametrize("door", ["trainer", "attached", "alone"])
@pytest.mark.parametrize("variables", [{"PMI_SIZE": "2"}, {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}])
def test_every_door_refuses_separate_runs_before_any_work(
    tmp_path: Path, monkeypatch, door: str, variables: dict[str, str]
) -> None:
    # made before, since accelerate itself would meet the processes of an MPI on CPUs
    args = training_arguments(str(tmp_path), max_steps=1)
    assert args.world_size == 1
    with_variables(monkeypatch, variables)
    rows = datasets.Dataset.from_list(random_rows([5] * 8))
    given: dict[str, Any] = {"model": build_model(ModelCase()), "args": args, "train_dataset": rows}
    collator = DataCollatorWithFlattening()
    with pytest.raises(ValueError, match="started 2 processes together, but nothing tells them where to meet"):
        if door == "trainer":
            LongContextTrainer(**given)
        elif door == "attached":
            LongContextCallback().attach(Trainer(**given, data_collator=collator))
        else:
            Trainer(**given, data_collator=collator, callbacks=[LongContextCallback()])
    assert not list(tmp_path.glob("checkpoint-*"))
