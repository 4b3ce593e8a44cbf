"""The phases of a run's start: one that fails leaves model and process groups as they were."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import pytest
import torch.distributed as dist
from helpers.models.chats import tokenizer_of
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.trainers.trainer_runs import training_arguments
from torch import nn
from torch.distributed import distributed_c10d as c10d

from hf_longctx import LongContextConfig
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.run import run as run_module
from hf_longctx.hf.run.run import BORROWED, RunRequest, start_run
from hf_longctx.hf.run.sets import SequenceSets
from hf_longctx.hf.self_test.check import SelfTest

ROWS = random_rows([9, 5, 14, 7, 12, 6, 4, 10])
# the phase that fails -> the object, and its last function that the phase calls
LAST_CALLS: dict[str, tuple[Any, str]] = {
    "meet": (run_module, "raise_together"),
    "read": (run_module, "task_of"),
    "check": (run_module, "user_forward"),
    "set up": (SequenceSets, "check"),
    "take": (run_module, "RunReport"),
    "try": (SelfTest, "run"),
}
CASES = {
    "causal": ModelCase(dropout=0.1, lora=(("r", 2), ("lora_dropout", 0.1))),
    "classifier": ModelCase(head=(("num_labels", 3), ("problem_type", "single_label_classification"))),
}


class PlantedError(Exception):
    """An error that a test raises inside a phase."""


def fails(*args: Any, **keywords: Any) -> None:
    raise PlantedError


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything that is set on a model and its modules: plain values, and which objects hang there."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        return value if isinstance(value, str | int | float | bool | tuple | frozenset | type(None)) else id(value)

    found: dict[str, Any] = {name: (type(each), plain(vars(each))) for name, each in model.named_modules()}
    configs = {id(each.config): each.config for each in model.modules() if hasattr(each, "config")}
    of_configs = [config.to_dict() | {"attention": config._attn_implementation} for config in configs.values()]
    return found | {"configs": of_configs, "weights": {name: id(weight) for name, weight in model.named_parameters()}}


def request_of(case: ModelCase, folder: str, model: nn.Module, **settings: Any) -> RunRequest:
    rows = [{**row, "label": index % 3} if case.head else row for index, row in enumerate(ROWS)]
    for row in rows if case.head else ():
        row.pop("labels", None)
    config = LongContextConfig(**{"report_steps": False, "timeline_steps": 0, "tokens_per_rank": 64, **settings})
    args = training_arguments(folder, per_device_train_batch_size=4, neftune_noise_alpha=None if case.head else 5.0)
    tokenizer = tokenizer_of(64) if case.head else None
    if tokenizer is not None:
        # the model takes it over
        tokenizer.pad_token = "w3"
    return RunRequest(config, ModelFacts.of(model), args, tokenizer, [], {"train_dataset": datasets.Dataset.from_list(rows)})


@pytest.mark.daily("meet-causal")
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("phase", LAST_CALLS)
def test_a_phase_that_fails_leaves_the_model_as_it_was(tmp_path: Path, phase: str, kind: str) -> None:
    model = build_model(CASES[kind])
    request, before = request_of(CASES[kind], str(tmp_path), model), state_of(model)
    with patch.object(*LAST_CALLS[phase], fails), pytest.raises(PlantedError):
        start_run(request)
    assert state_of(model) == before
    # nothing is left that a second start would stumble over
    run = start_run(request)
    assert state_of(model) != before
    run.close()


def groups_and_states(phase: str, settings: dict[str, Any]) -> tuple[bool, int]:
    """Whether a start that failed on this rank left the model as it was, and how many process groups more there are."""
    model = build_model(ModelCase(num_layers=4))
    before, num_groups = state_of(model), len(c10d._world.pg_map)
    with tempfile.TemporaryDirectory() as folder:
        request = request_of(ModelCase(), folder, model, **settings)
        with patch.object(*LAST_CALLS[phase], fails), pytest.raises(PlantedError):
            start_run(RunRequest(**{**vars(request), "gives_back": True}))
    # every rank fails in the same place
    dist.barrier()
    return state_of(model) == before, len(c10d._world.pg_map) - num_groups


@pytest.mark.wide
@pytest.mark.parametrize("settings", [{}, {"stages": 2}], ids=["replicated", "staged"])
def test_a_start_that_fails_on_several_ranks_leaves_their_groups_as_they_were(ranks, settings: dict[str, Any]) -> None:
    for phase in LAST_CALLS:
        # problems are told by the control group, from which slower ranks may still read
        told = int(phase in ("read", "check", "set up", "meet"))
        assert ranks(2).run(groups_and_states, phase, settings) == [(True, told)] * 2


@pytest.mark.quick
def test_a_run_beside_the_loop_of_a_stock_trainer_decides_less(tmp_path: Path) -> None:
    model = build_model(ModelCase())
    own = request_of(ModelCase(), str(tmp_path), model)
    borrowed = RunRequest(**{**vars(own), "datasets": {}, "mode": BORROWED})
    found = []
    for request in (own, borrowed):
        run = start_run(request)
        found.append((run.setup.planner.one_micro_batch, run.noise_alpha, run.config.optimizer_states))
        run.close()
    assert found == [(False, 5.0, own.config.optimizer_states), (True, None, "device")]
