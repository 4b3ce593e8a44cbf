"""The JSON of a forecast, and a simulation of its plan from the file alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.plans.forecasts import LENGTHS, MEMORY, TOKEN_BYTES, cost_model, forecast, scenario

from hf_longctx.plan.core.serialize import plan_digest, plan_from_json, plan_to_json
from hf_longctx.sim.execution import execute_plan
from hf_longctx.sim.forecast import make_forecast
from hf_longctx.sim.output.json_records import execution_record, forecast_record, read_plan_file


def record() -> dict[str, Any]:
    """A forecast as a file would hold it."""
    return json.loads(json.dumps(forecast_record(forecast())))


def test_a_reader_finds_seconds_bound_plan_and_baselines() -> None:
    found, data = forecast(), record()
    assert data["estimate"]["step_s"] == found.step_s == data["mean"]["step_s"]
    assert data["estimate"]["lower_bound_s"] == found.lower_bound_s
    assert plan_digest(plan_from_json(json.dumps(data["plan"]))) == plan_digest(found.steps[0].plan)
    assert data["plan"]["estimate"]["step_s"] == found.step_s
    assert {choice["name"]: choice["step_s"] for choice in data["baselines"]} == {
        choice.name: choice.step_s if choice.is_possible else None for choice in found.steps[0].baselines
    }
    assert data["planned_context_tokens"] == 164
    assert data["workload"]["num_tokens"] == sum(LENGTHS) and data["workload"]["global_batch"] == len(LENGTHS)
    assert [step["num_sequences"] for step in data["steps"]] == [len(LENGTHS)]


def test_memory_adds_up_to_what_can_be_used() -> None:
    memory = record()["memory"]
    assert memory["state_bytes"] + memory["activation_peak_bytes"] + memory["free_bytes"] == memory["usable_bytes"] == 80_000
    assert memory["activation_peak_bytes"] == memory["peak_tokens"] * TOKEN_BYTES
    assert memory["free_bytes"] >= 0


def test_without_lengths_every_key_is_there() -> None:
    empty = json.loads(json.dumps(forecast_record(make_forecast(scenario(), None, 3, 512, seed=0))))
    assert set(empty) == set(record())
    assert empty["planned_context_tokens"] == 164
    assert empty["plan"] is empty["estimate"] is empty["workload"] is empty["mean"] is None
    assert empty["baselines"] == empty["steps"] == []


def test_a_forecast_is_simulated_from_its_file_with_the_same_seconds() -> None:
    file = read_plan_file(json.dumps(record()))
    assert file.costs == scenario().costs and file.memory == MEMORY
    assert (file.model_name, file.hardware_name) == ("toy", "test")
    assert execute_plan(file.plan, file.costs).step_s == forecast().step_s


def test_a_plan_of_its_own_comes_without_prices() -> None:
    plan = forecast().steps[0].plan
    file = read_plan_file(plan_to_json(plan))
    assert plan_digest(file.plan) == plan_digest(plan)
    assert file.costs is file.memory is None and file.model_name == ""


def test_an_execution_has_every_rank_with_its_bytes() -> None:
    plan = forecast().steps[0].plan
    run = execute_plan(plan, cost_model(4))
    data = json.loads(json.dumps(execution_record(plan, run, cost_model(4), MEMORY)))
    assert data["step_s"] == run.step_s
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1, 2, 3]
    for rank in data["ranks"]:
        assert rank["busy_s"] + rank["idle_s"] + data["once_s"] == pytest.approx(data["step_s"])
        assert rank["peak_bytes"] == 16_512 + rank["peak_tokens"] * TOKEN_BYTES


BROKEN: dict[str, tuple[tuple[str, ...], Any, str]] = {
    "a missing field": (("cost_model", "model", "num_heads"), None, "cost_model.model.num_heads is missing"),
    "an unknown field": (("cost_model", "model", "colour"), 3, "cost_model.model.colour is unknown"),
    "a word for a number": (("cost_model", "model", "num_heads"), "4", "cost_model.model.num_heads is '4'; a value of type int"),
    "no object": (("cost_model", "cluster"), 3, "cost_model.cluster is 3; an object is needed"),
    "another method": (("cost_model", "method"), "magic", "cost_model.method is 'magic'; it must be one of auto"),
    "no plan": (("plan",), None, "a forecast without a plan"),
    "a broken plan": (("plan", "schema"), 9, "plan schema 9"),
}


@pytest.mark.daily("no object", "another method", "no plan")
@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_was_broken_is_refused_by_name(name: str) -> None:
    path, value, message = BROKEN[name]
    data = record()
    node = data
    for key in path[:-1]:
        node = node[key]
    if value is None:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    with pytest.raises(ValueError) as error:
        read_plan_file(json.dumps(data))
    assert message in str(error.value)
