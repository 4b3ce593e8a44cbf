"""Forecasts with pipeline stages: chosen as a run chooses them, compared with one stage, refused with a remedy."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.plans.grouping_problems import lognormal_lengths

from hf_longctx.cli.main import main
from hf_longctx.hf.config import LongContextConfig
from hf_longctx.plan.core.serialize import plan_digest
from hf_longctx.plan.core.types import Chunk, MicroBatch, SequenceGroup, Span, StepPlan
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.plan.pipeline.search import NotFaster
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.predict.planning import counted_step_s
from hf_longctx.plan.setup import _Choices
from hf_longctx.plan.stage_count import StageOptions
from hf_longctx.sim.forecast import Forecast, make_forecast
from hf_longctx.sim.output.summary import run_settings, stage_lines
from hf_longctx.sim.scenario import Request, Scenario, build_scenario
from hf_longctx.sim.stages import stage_rows, turns_reason
from hf_longctx.sim.workloads import read_workload

LENGTHS = (9000, 4000, 3000, 2500, 1200, 900, 800, 700)


def scenario(stages: Any = 0, lengths: Sequence[int] = LENGTHS, **options: Any) -> Scenario:
    """A model of 16 layers on two nodes of two ranks."""
    sizes = {"longest_tokens": max(lengths), "step_lengths": tuple(lengths), "stages": stages, "ranks_per_node": 2}
    names = {"model": "llama-3.2-1b", "hardware": "h100", "num_ranks": 4}
    return build_scenario(Request(**{**names, **sizes, **options}))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "lengths.txt"
    found.write_text("\n".join(map(str, LENGTHS)))
    return found


def forecast(path: Path, stages: Any, **options: Any) -> Forecast:
    return make_forecast(scenario(stages, **options), read_workload(str(path)), 1, len(LENGTHS), 0)


@pytest.mark.wide
def test_several_nodes_choose_the_number_of_stages_that_counts_the_fewest_seconds() -> None:
    found = scenario()
    fitting = found.setup.stage_options.fitting
    assert {option.num_stages for option in fitting} >= {1, 2}
    assert found.setup.num_stages == min(fitting, key=lambda option: option.counted_s).num_stages
    # without lengths there is nothing to choose by, and stages pay across nodes
    for other in (scenario(step_lengths=()), scenario(ranks_per_node=4), scenario(solver="greedy")):
        assert other.setup.num_stages == 1 and other.setup.stage_options == StageOptions()


def test_stages_that_do_not_hold_the_longest_sequence_are_not_chosen() -> None:
    given: dict[str, Any] = {"model": "llama-3.1-8b", "network_gbit": 5.0, "parameters": "gathered_per_step"}
    fastest = scenario(**given)
    room = fastest.longest_tokens
    assert fastest.setup.num_stages > 1
    found = scenario(**given, longest_tokens=room + room // 50)
    assert found.setup.num_stages != fastest.setup.num_stages and found.longest_tokens > room
    assert f"holds {room:,} tokens" in dict(found.setup.stage_options.unfit)[fastest.setup.num_stages]
    # if none holds it, the roomiest says how much would fit
    assert scenario(**given, longest_tokens=10**8).longest_tokens >= found.longest_tokens


def test_stages_share_parameters_in_a_way_that_holds_the_longest_sequence() -> None:
    given: dict[str, Any] = {"model": "llama-3.1-8b", "network_gbit": 5.0}
    fastest = scenario(**given)
    room = fastest.longest_tokens
    found = scenario(**given, longest_tokens=room + room // 50)
    assert found.longest_tokens > room and found.placement.sharing != fastest.placement.sharing


@pytest.mark.parametrize("stages", [2, "auto"])
def test_the_first_step_is_planned_once_by_the_setup(stages: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = read_workload(str(path))
    [lengths] = workload.draw_steps(1, len(LENGTHS), 0)
    found = scenario(stages, step_lengths=tuple(lengths), model="llama-3.1-8b")
    planned: list[tuple[int, ...]] = []

    def plan(step: int, lengths: Sequence[int], *settings: Any, **media: Any) -> StepPlan:
        planned.append(tuple(lengths))
        return plan_step(step, lengths, *settings, **media)

    monkeypatch.setattr("hf_longctx.sim.forecast.plan_step", plan)
    [step] = make_forecast(found, workload, 1, len(LENGTHS), 0).steps
    # the plan at the limit is another one
    assert planned == [(found.longest_tokens,)]
    assert plan_digest(step.plan) == plan_digest(plan_step(0, lengths, found.costs, found.planner_config))


def test_a_model_that_fits_nowhere_says_how_many_bytes_it_takes() -> None:
    with pytest.raises(ValueError, match=r"llama-3.1-405b does not fit: .* GiB on each rank.*Possible changes:"):
        scenario(num_ranks=16, ranks_per_node=8, model="llama-3.1-405b")


def test_shards_divide_the_stages_that_are_chosen() -> None:
    for shard_ranks, counts in ((2, {1, 2}), (4, {1})):
        options = scenario("auto", parameters="sharded", shard_ranks=shard_ranks).setup.stage_options
        assert {
            *(option.num_stages for option in options.fitting),
            *(number for number, _ in (*options.unfit, *options.slower)),
        } == counts


@pytest.mark.wide
def test_layers_come_back_from_the_host_to_their_own_stage() -> None:
    """Between steps, the fuller of two stages has more than half of the model's bytes, and less than all of them."""
    found = scenario(2, parameters="sharded", layer_weights="host").setup
    resting = found.memory.resting_bytes(*found.placement.sharing)
    whole = found.memory.resting_bytes("sharded", 2)
    assert whole / 2 < resting < whole


def test_the_number_that_a_user_chooses_is_compared_with_one_stage(path: Path) -> None:
    found = forecast(path, 2, parameters="sharded", network_gbit=100.0)
    seconds = {option.num_stages: option.counted_s for option in found.stages.fitting}
    [(name, line)] = stage_lines(found)
    assert name == "stages" and line.startswith("2 stages of 2 ranks: ") and line.endswith("x as fast as one")
    assert float(line.split()[-5].rstrip("x")) == pytest.approx(seconds[1] / seconds[2], abs=0.005)
    rows = stage_rows(found.stages, 4)
    assert [(row.num_stages, row.ranks_per_stage) for row in rows] == [(1, 4), (2, 2)]
    assert all(0 < row.step_s <= row.counted_s <= row.most_s and row.lower_bound_s <= row.counted_s for row in rows)
    assert rows[1].parameters == "sharded" and rows[1].shard_ranks == 2 and rows[1].idle_share > rows[0].idle_share
    # other systems have one stage, on all ranks
    assert any(choice.is_possible for choice in found.baselines)
    assert run_settings(found.scenario)["stages"] == "2" and "shard_ranks" not in run_settings(found.scenario)
    LongContextConfig(stages=2, parameters=run_settings(found.scenario)["parameters"])


def test_the_output_head_stays_on_the_last_stage_if_the_user_wants_that() -> None:
    # without lengths nothing is compared
    given: dict[str, Any] = {"parameters": "sharded", "step_lengths": ()}
    spread, kept = (scenario(2, spread_head=way, **given) for way in (True, False))
    assert kept.placement.output_shares == () != spread.placement.output_shares
    assert run_settings(kept)["spread_head"] == "false" and "spread_head" not in run_settings(spread)
    assert "spread_head" not in run_settings(scenario(1, spread_head=False))


@pytest.mark.wide
def test_stages_share_the_output_head_only_if_a_step_takes_less() -> None:
    """On four stages of a 70B the head's memory on other stages costs more than its work on the last one; not so on eight."""
    lengths = lognormal_lengths(0, 256, 168_000, 36_316, 0.6)
    is_shared = []
    for stages in (4, 8):
        given: dict[str, Any] = {"model": "llama-3.1-70b", "num_ranks": 64, "ranks_per_node": 8, "parameters": "auto"}
        ways = [scenario(stages, lengths, spread_head=way, **given).setup for way in (True, False)]
        seconds = [counted_step_s(plan_step(0, lengths, way.costs, way.planner), way.costs) for way in ways]
        is_shared.append(bool(ways[0].placement.output_shares))
        assert seconds[0] <= seconds[1] and is_shared[-1] == (seconds[0] < seconds[1])
        # settings that are printed give the same setup
        settings = run_settings(scenario(stages, lengths, **given))
        assert settings["parameters"] == "sharded" and ("spread_head" in settings) == (not is_shared[-1])
    assert is_shared == [False, True]


@pytest.mark.parametrize("alone", [2.0, 5.0, ValueError("no room")])
def test_the_head_on_the_last_stage_is_tried_if_sharing_it_is_not_faster(alone: float | ValueError) -> None:
    """A limit that a shared head does not beat; on the last stage it does, or neither does, or has no room."""
    setup = scenario(2).setup

    class Choices(_Choices):
        def _on_stages(self, ranges: Any, output_shares: Any, step: Any, most_s: float = math.inf) -> Any:
            seconds = 4.0 if output_shares else alone
            if isinstance(seconds, ValueError):
                raise seconds
            if seconds >= most_s:
                raise NotFaster(seconds)
            return setup, None

    choices = Choices.__new__(Choices)
    if alone == 2.0:
        found, _ = choices._with_best_head((), (1.0, 1.0), (), (1,), 3.0)
        assert found.keeps_head and not setup.keeps_head
        return
    with pytest.raises(NotFaster) as caught:
        choices._with_best_head((), (1.0, 1.0), (), (1,), 3.0)
    assert caught.value.least_s == 4.0


def test_one_stage_says_what_stages_would_do_and_one_node_does_not_mention_them(path: Path) -> None:
    chosen = forecast(path, "auto")
    lines = dict(stage_lines(chosen))
    assert "stages" in lines
    if chosen.scenario.setup.num_stages == 1:
        assert lines["stages"].startswith("one; ") and "would be" in lines["stages"]
    assert list(stage_lines(forecast(path, 1))) == []
    assert list(stage_lines(forecast(path, 0, ranks_per_node=4))) == []
    unfit = replace(chosen, stages=StageOptions(chosen.stages.fitting, ((4, "4 stages do not fit"),)))
    assert [row.detail for row in stage_rows(unfit.stages, 4) if not row.is_possible] == ["4 stages do not fit"]


@pytest.mark.parametrize(
    "stages, options, message",
    [
        (3, {}, "--stages 3 does not divide the 4 ranks of --gpus; choose one of 1, 2, 4, or auto"),
        (200, {}, "--stages 200 does not divide the 4 ranks"),
        (32, {"num_ranks": 32}, "--stages 32 is more than the 16 layers of llama-3.2-1b"),
        (2, {"shard_ranks": 4}, "--shard-ranks 4 does not divide the 2 ranks of a stage of 2; choose a divisor"),
        (2, {"solver": "lp"}, "--stages is 2, and --solver lp has no effect on stages; leave one of them out"),
        (
            16,
            {"num_ranks": 64, "model": "mixtral-8x7b", "expert_ranks": 8},
            "--expert-ranks 8 does not divide the 4 ranks of a stage of 16",
        ),
        ("auto", {"step_lengths": ()}, "--stages auto chooses by the lengths of a step; give --lengths too"),
    ],
)
def test_stages_that_no_run_has_are_refused(stages: Any, options: dict[str, Any], message: str) -> None:
    ranks = options.get("num_ranks", 4)
    request = Request("llama-3.2-1b", "h100", ranks, stages=stages, longest_tokens=9000, step_lengths=LENGTHS)
    with pytest.raises(ValueError, match="^" + message):
        build_scenario(replace(request, **options))


def test_states_that_do_not_fit_on_a_stage_name_what_would_fit() -> None:
    request = Request("llama-3.1-70b", "h100", 64, stages=8, parameters="replicated", longest_tokens=9000, step_lengths=LENGTHS)
    with pytest.raises(ValueError, match=r"\(replicated\) take .* GiB on each rank of 8 stages, (.|\n)*--parameters sharded"):
        build_scenario(request)


def test_a_saved_plan_with_stages_is_simulated_and_drawn_by_stage_and_rank(path: Path, tmp_path: Path, capsys) -> None:
    machine = ["--model", "llama-3.2-1b", "--gpus", "4", "--ranks-per-node", "2", "--hardware", "h100", "--steps", "1"]
    out = tmp_path / "out"
    assert main(["plan", *machine, "--lengths", str(path), "--stages", "2", "--details", "--output", str(out)]) == 0
    assert "STAGES  of the first step" in capsys.readouterr().out
    data = json.loads((out / "plan.json").read_text())
    assert data["num_stages"] == data["plan"]["num_stages"] == 2 and [row["num_stages"] for row in data["stages"]] == [1, 2]
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    assert {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"} == {0: "stage 0", 1: "stage 1"}
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"} == {(0, 0), (0, 1), (1, 2), (1, 3)}
    assert (out / "timeline.png").stat().st_size > 0
    assert main(["simulate", str(out / "plan.json"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["step_s"] == pytest.approx(data["steps"][0]["step_s"]) and len(record["ranks"]) == 4
    assert main(["simulate", str(out / "plan.json"), "--hardware", "h200"]) == 0


def test_stages_that_take_turns_say_why() -> None:
    # a model of few words, whose stages do not share the output head
    found = scenario(2, parameters="gathered_per_round", model="gpt-7b").setup
    option = make_forecast(scenario(2, parameters="gathered_per_round", model="gpt-7b"), None, 1, 1, 0).at_limit.plan
    # one sequence as long as fits runs whole
    assert found.num_stages == 2 and "whole gradients" in turns_reason(option)
    group = option.micro_batches[0].groups[0]
    alone = MicroBatch((replace(group, chunks=(Chunk(0, (Span(0, 0, 10),)),)),))
    turns = replace(option, micro_batches=(alone, alone))
    assert turns_reason(turns) == "stages run one after the other: whole gradients of a stage leave no room for several chunks"
    assert "one chunk of these sequences at a time" in turns_reason(replace(turns, parameters="sharded"))
    assert "slices, which hold keys" in turns_reason(replace(turns, parameters="sharded", micro_batches=(alone,)))
    assert isinstance(turns, StepPlan) and isinstance(group, SequenceGroup) and validate_plan(option) is option
