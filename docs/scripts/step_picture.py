"""Draws one step under the best static degree and under a plan, on one axis of seconds: `python docs/scripts/step_picture.py`.

Both are predicted by the same cost model, for the command that the README shows (FlexSP's published costs of GPT-7B on 64
A100-40GB). Needs matplotlib (the extra `plot`).
"""

from __future__ import annotations

from pathlib import Path

from hf_longctx.plan.groups.placement import place_layout
from hf_longctx.plan.groups.problem import GroupingProblem
from hf_longctx.plan.planner import build_plan, plan_step
from hf_longctx.sim.baselines import all_baselines
from hf_longctx.sim.execution import Execution, execute_plan
from hf_longctx.sim.scenario import Request, build_scenario
from hf_longctx.sim.workloads import read_workload
from hf_longctx.timeline import save_png_timeline

FILE = Path(__file__).parents[1] / "img" / "step.png"
_LENGTHS, _SEQUENCES = "lognormal:6.963,1.6", 512


def runs() -> tuple[list[int], Execution, Execution]:
    """The lengths of a step, and its predicted run under the best static degree and under a plan."""
    workload = read_workload(_LENGTHS, None, _SEQUENCES, 0, None)
    request = Request(
        model="gpt-7b", hardware="a100-40g", num_ranks=64, method="ulysses", longest_tokens=workload.longest, host_bytes=-1
    )
    scenario = build_scenario(request)
    costs, config = scenario.costs, scenario.planner_config
    lengths = workload.draw_steps(1, _SEQUENCES, 0)[0]
    problem = GroupingProblem.build(lengths, costs, config)
    (static,) = all_baselines(problem, workload.limit, ("static",))
    layout = [list(groups) for groups in static.layout]
    placed = place_layout(layout, problem.num_ranks, costs.cluster.ranks_per_node, node_aligned=True)
    fixed = build_plan(0, lengths, placed, problem.shapes, costs)
    return list(lengths), execute_plan(fixed, costs), execute_plan(plan_step(0, lengths, costs, config), costs)


def main() -> None:
    lengths, static, planned = runs()
    FILE.parent.mkdir(exist_ok=True)
    panels = {"best static degree, predicted": static.events, "planned, predicted": planned.events}
    title = f"{len(lengths)} sequences of {min(lengths):,} to {max(lengths):,} tokens"
    # a code host shows a README some 830 pixels wide
    save_png_timeline(panels, title, FILE, most_inches=2.4, wide_inches=9.0)
    print(f"{FILE}: static {static.step_s:.2f} s, planned {planned.step_s:.2f} s")


if __name__ == "__main__":
    main()
