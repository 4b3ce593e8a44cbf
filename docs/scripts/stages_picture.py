"""Draws one step on four pipeline stages, with whole sequences and with slices: `python docs/scripts/stages_picture.py`.

Both are predicted by the same cost model, from the data sheet of an H100. Needs matplotlib (the extra `plot`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hf_longctx.plan.chunks import elastic_chunks
from hf_longctx.plan.core.orders import pipelined
from hf_longctx.plan.core.types import Chunk, GroupShape, MicroBatch, SequenceGroup, Span, StepPlan
from hf_longctx.plan.model.attention_pairs import SpanRates
from hf_longctx.plan.pipeline.stages import balanced_ranges
from hf_longctx.sim.execution import Execution, execute_plan
from hf_longctx.sim.scenario import Request, build_scenario
from hf_longctx.timeline import save_png_timeline

FILE = Path(__file__).parents[1] / "img" / "stages.png"
_STAGES, _LENGTHS, _SLICES = 4, (65536, 49152), 12


def runs() -> tuple[Execution, Execution]:
    """The predicted runs of a step with whole sequences, and with slices that take equal time."""
    costs = build_scenario(Request(model="llama-3.2-3b", hardware="h100", num_ranks=_STAGES)).costs
    costs = replace(costs, method="ulysses", parameters="replicated", shard_ranks=1)
    whole = tuple(Chunk(index, (Span(index, 0, length),)) for index, length in enumerate(_LENGTHS))
    passes = costs.coefficients.forward, costs.coefficients.backward
    rates = SpanRates(sum(p.pair_s for p in passes), sum(p.token_s for p in passes), costs.model.attention_pairs())
    slices = elastic_chunks(dict(enumerate(_LENGTHS)), _SLICES, rates, max(_LENGTHS))

    def run(chunks: tuple[Chunk, ...]) -> Execution:
        group = pipelined(SequenceGroup.of(GroupShape(1, 1), (0,), chunks), balanced_ranges(costs, _STAGES, _LENGTHS), "1f1b")
        return execute_plan(StepPlan(0, _LENGTHS, _STAGES, 1, "replicated", (MicroBatch((group,)),)), costs)

    return run(whole), run(slices)


def main() -> None:
    whole, slices = runs()
    panels = {"whole sequences, predicted": whole.events, "slices, predicted": slices.events}
    title = f"{' and '.join(f'{length:,}' for length in _LENGTHS)} tokens on {_STAGES} stages"
    save_png_timeline(panels, title, FILE, wide_inches=9.0)
    print(f"{FILE}: whole {whole.step_s:.2f} s, slices {slices.step_s:.2f} s")


if __name__ == "__main__":
    main()
