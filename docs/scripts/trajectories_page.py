"""Draws the picture and prints the table of the page on agent trajectories: `python docs/scripts/trajectories_page.py`.

The picture has a step of agents' sessions under one static degree and under a plan, in the same seconds. The table has what an
epoch costs either way. All is predicted by the same cost model in the same memory, as the commands on the page do; the static
degree is the best one, with its best checkpointing. Needs matplotlib (the extra `plot`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hf_longctx.plan.groups.placement import place_layout
from hf_longctx.plan.groups.problem import GroupingProblem
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.planner import build_plan, plan_step
from hf_longctx.sim.baselines import group_bytes, static_of_degree
from hf_longctx.sim.execution import Execution, execute_plan, price_of
from hf_longctx.sim.rivals import Choice, Rivals, settings_of
from hf_longctx.sim.scenario import Request, Scenario, build_scenario
from hf_longctx.sim.workloads import read_workload
from hf_longctx.timeline import save_png_timeline

FILE = Path(__file__).parents[1] / "img" / "trajectories.png"
_MODEL, _HARDWARE, _GPUS = "qwen3-8b", "h100", (8, 128)
# published sessions of coding agents: one epoch
_SESSIONS = 155_144
_LENGTHS, _SEQUENCES, _LIMIT = "lognormal:10.5,0.6", 64, 184_000
# share of the tokens of a rank that is left where a layout needs too many bytes
_SHRINK = 0.98


@dataclass(frozen=True)
class Step:
    """One step on so many GPUs, as the best static degree and as a plan."""

    scenario: Scenario
    lengths: list[int]
    static: Choice
    planned: Execution

    @property
    def num_gpus(self) -> int:
        return self.scenario.costs.cluster.num_ranks

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of both, with gathers of weights and the optimizer, none of them hidden."""
        return {self.static.label: self.static.most_s, "planned": self.planned.step_bounds_s[1]}


def step_on(num_gpus: int) -> Step:
    """Plans the step on so many GPUs, and finds the best static degree."""
    workload = read_workload(_LENGTHS, None, _SEQUENCES, 0, _LIMIT)
    request = Request(model=_MODEL, hardware=_HARDWARE, num_ranks=num_gpus, longest_tokens=workload.longest)
    scenario = build_scenario(request)
    lengths = list(workload.draw_steps(1, _SEQUENCES, 0)[0])
    choices = Rivals(scenario, [lengths], workload.limit).baselines()[0]
    static = next(choice for choice in choices if choice.name == "static")
    planned = execute_plan(plan_step(0, lengths, scenario.costs, scenario.planner_config), scenario.costs)
    return Step(scenario, lengths, static, planned)


def run_of(static: Choice, scenario: Scenario, lengths: list[int]) -> Execution:
    """The predicted run of a static degree with as many tokens on a rank as memory holds."""
    setting = next(setting for setting in settings_of(scenario) if setting.label == static.checkpointing)
    byte_model, capacity = ByteModel(scenario.memory.model), float(setting.tokens_per_rank)
    while True:
        config = replace(scenario.planner_config, tokens_per_rank=int(capacity), activations=None)
        problem, order = GroupingProblem.build(lengths, setting.costs, config).longest_first()
        layout = [
            [(degree, tuple(order[i] for i in some)) for degree, some in groups]
            for groups in static_of_degree(problem, static.degree)
        ]
        placed = place_layout(layout, problem.num_ranks, setting.costs.cluster.ranks_per_node, node_aligned=True)
        plan = build_plan(0, lengths, placed, problem.shapes, setting.costs)
        groups = [group for micro_batch in plan.micro_batches for group in micro_batch.groups]
        fullest = max(groups, key=lambda group: group.num_tokens / group.degree)
        if not setting.left_bytes or group_bytes(byte_model, fullest, setting.checkpointing) <= setting.left_bytes:
            return execute_plan(plan, setting.costs)
        capacity *= _SHRINK


def table(steps: Sequence[Step]) -> str:
    """What one epoch of the published sessions costs, in Markdown."""
    price = price_of(_HARDWARE, None)
    assert price is not None
    lines = [f"| GPUs | | a step | an epoch | GPU hours | at ${price.usd_per_hour:.2f} |", "|---|---|---|---|---|---|"]
    for step in steps:
        for name, step_s in step.seconds.items():
            hours = step_s * _SESSIONS / _SEQUENCES / 3600
            money = f"${hours * step.num_gpus * price.usd_per_hour:,.0f}"
            lines.append(
                f"| {step.num_gpus} | {name} | {step_s:.3g} s | {hours:.1f} h | {hours * step.num_gpus:,.0f} | {money} |"
            )
    return "\n".join(lines)


def draw(step: Step) -> str:
    """Writes the picture; returns a line about it."""
    lengths, static = step.lengths, run_of(step.static, step.scenario, step.lengths)
    FILE.parent.mkdir(exist_ok=True)
    title = (
        f"One step: {len(lengths)} sessions of {min(lengths):,} to {max(lengths):,} tokens "
        f"({_MODEL}, {step.num_gpus} {_HARDWARE.upper()}, predicted)"
    )
    save_png_timeline({step.static.label: static.events, "planned": step.planned.events}, title, FILE, most_inches=3.4)
    return f"{FILE}: {step.static.label} {static.step_s:.2f} s, planned {step.planned.step_s:.2f} s"


def main() -> None:
    steps = [step_on(num_gpus) for num_gpus in _GPUS]
    print(draw(steps[-1]))
    print(table(steps))


if __name__ == "__main__":
    main()
