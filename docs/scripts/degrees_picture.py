"""Draws what a token costs on groups of every size, for sequences of several lengths: `python docs/scripts/degrees_picture.py`.

Costs are those that FlexSP published for GPT-7B on A100-40GB, as in the README's command. Needs matplotlib (the extra `plot`).
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hf_longctx.sim.scenario import Request, Scenario, build_scenario

FILE = Path(__file__).parents[1] / "img" / "degrees.png"
_LENGTHS = (1_000, 4_000, 16_000, 64_000)


def rank_seconds(scenario: Scenario, length: int) -> list[tuple[int, float]]:
    """Sizes of group that hold packs of such sequences, with the rank-seconds that 1,000 of their tokens take in a full pack."""
    costs, found = scenario.costs, []
    for degree in scenario.placement.degrees:
        num = degree * scenario.tokens_per_rank // length
        if num:
            shape = costs.best_shape(degree, num * length, num)
            seconds = float(costs.sequences_s([length], shape)[0]) + costs.group_s(shape) / num
            found.append((degree, degree * seconds / length * 1000))
    return found


def main() -> None:
    scenario = build_scenario(Request(model="gpt-7b", hardware="a100-40g", num_ranks=64, method="ulysses"))
    figure = Figure(figsize=(9, 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, (length, colour) in enumerate(zip(_LENGTHS, ("#4c78a8", "#72b7b2", "#f58518", "#d1495b"), strict=True)):
        degrees, seconds = zip(*rank_seconds(scenario, length), strict=True)
        axes.plot(degrees, seconds, marker="o", color=colour)
        # the shortest sequences have the lowest line
        label = {
            "xytext": (-6, -18 if place == 0 else 9),
            "textcoords": "offset points",
            "ha": "left" if degrees[0] == 1 else "right",
        }
        axes.annotate(f"{length:,} tokens", (degrees[0], seconds[0]), color=colour, **label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(scenario.placement.degrees, [str(degree) for degree in scenario.placement.degrees])
    axes.set_xlabel("ranks in a sequence group (8 in a node)")
    axes.set_ylabel("rank-seconds for 1,000 tokens")
    axes.set_ylim(0)
    axes.set_title("What tokens cost in groups of each size (GPT-7B, A100-40GB, predicted)", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FILE)
    print(FILE)


if __name__ == "__main__":
    main()
