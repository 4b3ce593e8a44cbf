"""Draws the longest sequence for each setting of the activation engine: `python docs/scripts/longest_picture.py`.

The numbers are those of `hf-longctx plan --model llama-3.2-1b --gpus 1 --hardware h100 --details`.
Needs matplotlib (the extra `plot`).
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hf_longctx.plan.core.messages import duration
from hf_longctx.sim.forecast import make_forecast
from hf_longctx.sim.longest import LongestRow
from hf_longctx.sim.scenario import Request, build_scenario

FILE = Path(__file__).parents[1] / "img" / "longest.png"


def rows() -> list[LongestRow]:
    """The longest sequence by settings, as far as each lengthens it."""
    scenario = build_scenario(Request(model="llama-3.2-1b", hardware="h100", num_ranks=1, host_bytes=-1))
    found: list[LongestRow] = []
    for row in make_forecast(scenario, None, 1, 1, 0).longest:
        if not found or row.tokens > found[-1].tokens:
            found.append(row)
    return found


def main() -> None:
    found = rows()
    figure = Figure(figsize=(9, 0.45 * len(found) + 0.9), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.barh(range(len(found)), [row.tokens for row in found], color="#4c78a8", height=0.7)
    axes.set_yticks(range(len(found)), [row.switches.strip() for row in found])
    axes.invert_yaxis()
    for place, row in enumerate(found):
        axes.text(row.tokens, place, f" {row.tokens:,} tokens, a step of {duration(row.step_s)}", va="center", fontsize=9)
    axes.set_xlim(0, max(row.tokens for row in found) * 1.9)
    title = "Longest sequence on one H100, Llama 3.2 1B, all weights trained (predicted)"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    figure.savefig(FILE)
    print(FILE)


if __name__ == "__main__":
    main()
