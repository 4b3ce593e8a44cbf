"""Draws what the seconds of a sequence in a chunk of its own consist of, by its length: `python docs/scripts/costs_picture.py`.

Costs are those that FlexSP published for GPT-7B on A100-40GB, as in the README's command. Needs matplotlib (the extra `plot`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.sim.scenario import Request, Scenario, build_scenario

FILE = Path(__file__).parents[1] / "img" / "costs.png"
_LENGTHS = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 128_000, 256_000)
# what the picture says -> the coefficients whose seconds it shows
_PARTS = {
    "query-key pairs": ("pair_s",),
    "tokens": ("token_s",),
    "the chunk itself": ("chunk_s",),
    "messages of the group": ("message_s", "link_byte_s", "network_byte_s"),
}
_COLOURS = ("#4c78a8", "#72b7b2", "#bab0ac", "#d1495b")


def shares(scenario: Scenario, length: int) -> tuple[int, list[float]]:
    """The smallest group that holds a sequence, and the share that each of `_PARTS` has in its seconds."""
    costs = scenario.costs
    degree = next(each for each in scenario.placement.degrees if each * scenario.tokens_per_rank >= length)
    shape = costs.best_shape(degree, length)
    seconds = []
    for kept in _PARTS.values():
        only = _only(costs, kept)
        seconds.append(float(only.sequences_s([length], shape)[0]) + only.group_s(shape))
    return degree, [each / sum(seconds) for each in seconds]


def _only(costs: CostModel, kept: tuple[str, ...]) -> CostModel:
    """The cost model in which nothing else takes time."""
    free = {name: 0.0 for names in _PARTS.values() for name in names if name not in kept}
    passes = {name: replace(getattr(costs.coefficients, name), **free) for name in ("forward", "backward")}
    return replace(costs, coefficients=replace(costs.coefficients, **passes))


def main() -> None:
    scenario = build_scenario(Request(model="gpt-7b", hardware="a100-40g", num_ranks=64, method="ulysses"))
    figure = Figure(figsize=(9, 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    found = [shares(scenario, length) for length in _LENGTHS]
    below = [0.0] * len(found)
    for part, (name, colour) in enumerate(zip(_PARTS, _COLOURS, strict=True)):
        heights = [100 * each[part] for _, each in found]
        axes.bar(range(len(found)), heights, bottom=below, color=colour, label=name, width=0.75)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set_xticks(
        range(len(found)), [f"{length // 1000}K\n<{degree}>" for length, (degree, _) in zip(_LENGTHS, found, strict=True)]
    )
    axes.set_xlabel("tokens of a sequence, and the smallest group of ranks that holds it (8 ranks in a node)")
    axes.set_ylabel("% of its seconds")
    axes.set_title("Seconds of a sequence in a chunk of its own (GPT-7B, A100-40GB, predicted)", loc="left", fontsize=11)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=4, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FILE)
    print(FILE)


if __name__ == "__main__":
    main()
