"""The ablation runs each system alone by its own rules; one plan with all of them is never slower than any."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_longctx.cli.main import main
from hf_longctx.plan.core.settings import ActivationBudget
from hf_longctx.plan.model.model_spec import AdapterSpec
from hf_longctx.sim.ablation import Machine, ablation, lent_row
from hf_longctx.sim.scenario import Request, build_scenario

SKEWED = [30_000, 9_000, 6_000, 4_000, *[1_500] * 6, *[400] * 14]


def machine(num_ranks: int = 4, device_gib: float = 70.0, host_gib: float = 0.0) -> Machine:
    scenario = build_scenario(Request(model="llama-3.2-1b", hardware="h100", num_ranks=num_ranks, longest_tokens=30_000))
    return Machine(scenario.costs, scenario.planner_config, int(device_gib * 2**30), int(host_gib * 2**30))


@pytest.mark.wide("8-70.0")
@pytest.mark.parametrize("num_ranks,device_gib", [(4, 70.0), (8, 70.0), (4, 30.0)])
def test_all_together_is_no_slower_than_any_alone(num_ranks: int, device_gib: float) -> None:
    rows = ablation(SKEWED, machine(num_ranks, device_gib))
    *alone, together = rows
    assert [row.name for row in rows] == [
        "FlexSP alone",
        "Seq1F1B alone",
        "InfiniPipe alone",
        "SPPO alone",
        "all together",
    ]
    assert together.is_possible
    slower = [row for row in alone if row.is_possible]
    assert slower
    # the planner does not try every candidate, so allow 1 %
    assert all(together.step_s <= 1.01 * row.step_s for row in slower), rows


@pytest.mark.wide
def test_a_system_without_policies_of_its_own_checkpoints_where_everything_does_not_fit() -> None:
    roomy, small = ({row.name: row for row in ablation(SKEWED, machine(4, gib))} for gib in (70.0, 24.0))
    for name in ("FlexSP alone", "Seq1F1B alone"):
        assert roomy[name].is_possible and roomy[name].detail.endswith("everything kept")
    assert small["Seq1F1B alone"].detail.endswith("selective checkpointing")
    assert small["Seq1F1B alone"].step_s > 1.05 * roomy["Seq1F1B alone"].step_s
    assert "recomputed" in small["InfiniPipe alone"].detail
    assert small["all together"].is_possible


def test_what_full_checkpointing_cannot_hold_says_so() -> None:
    # states of a stage take 10.6 GiB, and on one stage 200 MiB are left for tokens
    own = machine(4, 10.7)
    budget = ActivationBudget(0, 200 * 2**20, 0, 2048)
    tight = replace(own, config=replace(own.config, activations=budget))
    rows = {row.name: row for row in ablation(SKEWED, tight)}
    assert not rows["FlexSP alone"].is_possible and "full checkpointing" in rows["FlexSP alone"].detail
    assert not rows["Seq1F1B alone"].is_possible and "does not fit with " in rows["Seq1F1B alone"].detail


def test_one_rank_has_no_pipelines() -> None:
    scenario = build_scenario(Request(model="llama-3.2-1b", hardware="h100", num_ranks=1, longest_tokens=2_000))
    rows = ablation([2_000, 400], Machine(scenario.costs, scenario.planner_config, 70 * 2**30, 0))
    assert [row.name for row in rows if row.is_possible] == ["FlexSP alone", "all together"]
    assert lent_row([2_000], Machine(scenario.costs, scenario.planner_config, 70 * 2**30, 0)) is None


def test_stages_lend_ranks_under_adapters_and_only_where_messages_are_quick() -> None:
    # every rank would sum gradients of all weights, which a run refuses
    assert lent_row([30_000], machine()) is None
    quick = machine()
    model = replace(quick.costs.model, adapters=AdapterSpec(400_000, 1_600_000, 64))
    quick = replace(quick, costs=replace(quick.costs, model=model))
    row = lent_row([30_000], quick)
    assert row is not None and row.is_possible and "ranks lent to 1 group(s)" in row.detail
    assert "lent stages" in [each.name for each in ablation([30_000], quick)]
    coefficients = quick.costs.coefficients
    slow_s = replace(coefficients.forward, link_byte_s=1e-6, network_byte_s=1e-6)
    slow = replace(quick, costs=replace(quick.costs, coefficients=replace(coefficients, forward=slow_s)))
    slow_row = lent_row([30_000], slow)
    assert slow_row is not None and slow_row.is_possible and "lent" not in slow_row.detail


def test_the_command_prints_it(capsys, tmp_path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(map(str, SKEWED)))
    options = ["plan", "--model", "llama-3.2-1b", "--gpus", "4", "--hardware", "h100", "--steps", "1", "--ablation"]
    assert main([*options, "--lengths", str(lengths)]) == 0
    text = capsys.readouterr().out
    assert "ABLATION" in text and "InfiniPipe alone" in text and "all together" in text
    assert main(options) == 1
    assert "--ablation compares plans for sequences; give --lengths too" in capsys.readouterr().err
