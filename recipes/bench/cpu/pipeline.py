"""Idle share and seconds of pipeline schedules on two gloo stages and one skewed batch, predicted and measured.

    python recipes/bench/cpu/pipeline.py [--rounds 6] [--require RATIO] [--json FILE]

The batch has one document of 3072 tokens and 20 short ones (log-normal). The model is a Llama of seven layers in fp32 with random
weights, on two processes of one thread each; all plans run forward and backward on the same executor.

First, whole sequences and slices run with two cuts of the model into stages. The cost coefficients, including that of the output
head, are fitted to the times that every stage measured. With them the planner chooses the cut (the last stage gets fewer layers,
because of the head), the number of slices and the packs of the batch-level baseline, and predicts every plan. Then each plan runs
once per round, and the order alternates between rounds. If other programs run on the machine, a stage gets a smaller share of its
core. So of each plan's rounds only the half with the largest shares counts, and their medians are compared.

"batch-level" is plain 1F1B on whole sequences and packs of short ones, with the number of packs and the order that are
predicted to be fastest; the other plans run the same slices and packs as each other. Columns, by stage: `idle` is 1 - (seconds
in forwards and backwards) / (seconds from the first action of any stage to the last); `in flight` is the largest number of
chunks between their forward and their backward, as executed and as predicted ("judge").
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
import transformers

from hf_longctx.hf.planning.refit import without_waiting
from hf_longctx.hf.planning.step_record import StepRecord
from hf_longctx.plan.chunks import elastic_chunks
from hf_longctx.plan.core.orders import Schedule, pipelined
from hf_longctx.plan.core.settings import GENERIC_CPU, ClusterSpec
from hf_longctx.plan.core.types import Chunk, LayerRange, MicroBatch, SequenceGroup, Span, StepPlan
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.cost.fitting import Fit, fit_coefficients
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.model.attention_pairs import SpanRates
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.pipeline.stages import balanced_ranges, layer_ranges
from hf_longctx.plan.predict.evaluate import Evaluation, evaluate_plan
from hf_longctx.recipes.bench.cpu.stage_processes import Rows, StageProcesses, StageStep

NUM_STAGES = 2
CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
LONG_TOKENS, NUM_SHORT = 3072, 20
MOST_SLICES, MOST_PACKS = 12, 8
BASELINE, JUDGED = "batch-level 1F1B", "slices, elastic"
_FIT_ROUNDS = 3
# number of layers that the head counts as in the second cut, so that this cut differs from the first
_HEAD_LAYERS = 2.0
IDLE_TOLERANCE, LOSS_TOLERANCE = 0.05, 1e-5

Parts = tuple[tuple[LayerRange, ...], ...]


@dataclass(frozen=True)
class Row:
    """One plan, predicted and measured; lists have an entry per stage, except `rounds_s`, which has one per round.

    rounds_s, core_share: seconds and shares of the rounds that count. kv_book: bytes of keys, values and their gradients.
    """

    plan: str
    chunks: int
    predicted_s: float
    measured_s: float
    rounds_s: list[float]
    core_share: float
    predicted_idle: list[float]
    measured_idle: list[float]
    planned_in_flight: list[int]
    executed_in_flight: list[int]
    planned_kv_book: list[int]
    executed_kv_book: list[int]
    loss: float

    @property
    def idle_error(self) -> float:
        """Largest difference between measured and predicted idle share, over all stages."""
        return max(abs(found - said) for found, said in zip(self.measured_idle, self.predicted_idle, strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table; fails if losses differ or a requirement is not met."""
    options = parse(arguments)
    rows = skewed_rows()
    lengths = [len(row["input_ids"]) for row in rows]
    print(
        f"{len(rows)} documents, {sum(lengths)} tokens, longest {max(lengths)}; {CONFIG['num_hidden_layers']} layers, fp32, "
        f"{NUM_STAGES} stages of one thread, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    processes = StageProcesses(CONFIG, rows, NUM_STAGES)
    try:
        costs = measured_costs(processes, lengths)
        ranges = tuple(map(tuple, balanced_ranges(costs, NUM_STAGES, lengths)))
        print("layers by stage: " + ", ".join(str(layer_range.num_layers) for (layer_range,) in ranges))
        plans = plans_of(lengths, ranges, costs)
        rounds = processes.run(ranges, list(plans.values()), options.rounds)
    finally:
        processes.close()
    found = [row_of(name, plan, costs, [each[place] for each in rounds]) for place, (name, plan) in enumerate(plans.items())]
    print_table(found)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in found], indent=1))
    failures = missed(found, options.require)
    if failures:
        raise SystemExit("\n".join(failures))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=6, help="rounds of every plan, after one that does not count (default: 6)")
    parser.add_argument("--json", type=Path, default=None, help="also write the rows to this file")
    parser.add_argument("--require", type=float, default=None, metavar="RATIO",
                        help=f"fail unless elastic slices are this many times as fast as the batch level, and every idle share "
                        f"of both is within {IDLE_TOLERANCE} of its prediction")  # fmt: skip
    return parser.parse_args(arguments)


def skewed_rows(seed: int = 1) -> Rows:
    """Draws one long document and short ones of 32 to 512 tokens; every token is a label."""
    generator = np.random.default_rng(seed)
    lengths = [LONG_TOKENS, *np.clip(generator.lognormal(4.8, 0.7, NUM_SHORT).astype(int), 32, 512).tolist()]
    ids = [generator.integers(5, CONFIG["vocab_size"], length).tolist() for length in lengths]
    return [{"input_ids": row, "labels": row} for row in ids]


def plan_of(lengths: Sequence[int], chunks: tuple[Chunk, ...], ranges: Parts, schedule: Schedule) -> StepPlan:
    """Plans these chunks as one pipeline with one rank per stage."""
    group = pipelined(SequenceGroup((0,), "local", chunks, ()), ranges, schedule)
    return validate_plan(StepPlan(0, tuple(lengths), len(ranges), 1, "replicated", (MicroBatch((group,)),)))


def sliced(lengths: Sequence[int], num_slices: int, costs: CostModel) -> tuple[Chunk, ...]:
    """Cuts the longest sequence into slices of equal time, and all others into slices and packs that take as long."""
    passes = (costs.coefficients.forward, costs.coefficients.backward)
    pair_s, token_s = (sum(getattr(one, name) for one in passes) for name in ("pair_s", "token_s"))
    return elastic_chunks(dict(enumerate(lengths)), num_slices, SpanRates(pair_s, token_s), sum(lengths))


def whole(lengths: Sequence[int], num_packs: int, long_first: bool) -> tuple[Chunk, ...]:
    """Keeps the longest sequence whole, and packs the others into packs of about equally many tokens."""
    ordered = sorted(range(len(lengths)), key=lambda sequence: -lengths[sequence])
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    for sequence in ordered[1:]:
        min(packs, key=lambda pack: sum(lengths[other] for other in pack)).append(sequence)
    chosen = [[ordered[0]], *packs] if long_first else [*packs, [ordered[0]]]
    return tuple(
        Chunk(index, tuple(Span(sequence, 0, lengths[sequence]) for sequence in pack)) for index, pack in enumerate(chosen)
    )


def measured_costs(processes: StageProcesses, lengths: Sequence[int]) -> CostModel:
    """Fits the cost model to what the stages of two cuts measure, and prints how well it fits."""
    spec, cluster = ModelSpec.from_config(CONFIG), ClusterSpec(NUM_STAGES, NUM_STAGES, GENERIC_CPU)
    costs = CostModel(spec, cluster, default_coefficients(spec, cluster))
    chunkings = [whole(lengths, 3, True), sliced(lengths, 3, costs), sliced(lengths, 8, costs)]
    samples, rounds = [], []
    # two cuts, because one alone cannot tell the cost of the head from that of the layers
    for ranges in (layer_ranges(spec.num_layers, NUM_STAGES), layer_ranges(spec.num_layers, NUM_STAGES, 1, _HEAD_LAYERS)):
        plans = [plan_of(lengths, chunks, ranges, "1f1b") for chunks in chunkings]
        found = processes.run(ranges, plans, _FIT_ROUNDS)
        # for each pass take the fastest of all rounds of a plan, as a refit takes the fastest of a stage's ranks
        of_plans = [[step.record.samples(costs) for each in found for step in each[place]] for place in range(len(plans))]
        samples += [one for each in of_plans for one in without_waiting(each)]
        rounds += found
    # the stage that came last did not wait, so its reduction time is the cost of a step besides its chunks
    once_s = median(min(step.record.reduce_s for step in stages) for each in rounds for stages in each)
    fit = fit_coefficients(samples, once_s, "measured", costs.coefficients)
    print(fit_line(fit, spec))
    return replace(costs, coefficients=fit.coefficients)


def fit_line(fit: Fit, spec: ModelSpec) -> str:
    one, residuals = fit.coefficients, fit.residuals
    factors = " and ".join(f"{costs.head_factor:.2f}" for costs in (one.forward, one.backward))
    return (
        f"fitted on {residuals.num_passes} passes, median error {residuals.median:.1%}; the head takes {factors} times (forward, "
        f"backward) its {spec.head_share:.1%} of the matrix products"
    )


def plans_of(lengths: Sequence[int], ranges: Parts, costs: CostModel) -> dict[str, StepPlan]:
    """All plans by name; the number of packs and of slices are those that are predicted to be fastest."""

    def fastest(chunkings: Iterable[tuple[Chunk, ...]], schedule: Schedule) -> StepPlan:
        plans = [plan_of(lengths, chunks, ranges, schedule) for chunks in chunkings]
        return min(plans, key=lambda plan: evaluate_plan(plan, costs, with_events=False).step_s)

    batches = (whole(lengths, count, first) for count in range(1, MOST_PACKS + 1) for first in (True, False))
    slices = fastest((sliced(lengths, count, costs) for count in range(2, MOST_SLICES + 1)), "elastic")
    chunks = slices.micro_batches[0].groups[0].chunks
    return {
        BASELINE: fastest(batches, "1f1b"),
        JUDGED: slices,
        "slices, 1f1b": plan_of(lengths, chunks, ranges, "1f1b"),
        "slices, gpipe": plan_of(lengths, chunks, ranges, "gpipe"),
    }


def row_of(name: str, plan: StepPlan, costs: CostModel, rounds: Sequence[Sequence[StageStep]]) -> Row:
    """Makes a plan's row; `rounds[round][stage]` is what that stage measured."""
    (group,) = plan.micro_batches[0].groups
    said: Evaluation = evaluate_plan(plan, costs)
    check_order(plan, rounds[0])
    counted = least_disturbed(rounds)
    shares = [[1 - step.busy_s / makespan(stages) for step in stages] for stages in counted]
    seconds = [max(step.record.measured_s for step in stages) for stages in counted]
    return Row(
        plan=name,
        chunks=len(group.chunks),
        predicted_s=said.step_s,
        measured_s=median(seconds),
        rounds_s=seconds,
        core_share=median(min(step.core_share for step in stages) for stages in counted),
        predicted_idle=[1 - busy_s / (said.step_s - said.once_s) for busy_s in said.busy_s],
        measured_idle=[median(stage_shares) for stage_shares in zip(*shares, strict=True)],
        planned_in_flight=list(said.in_flight),
        executed_in_flight=[executed_in_flight(step.record) for step in rounds[0]],
        planned_kv_book=[ByteModel(costs.model).moments(group, stage).most.book for stage in group.stages],
        executed_kv_book=[step.record.memory.kv_book for step in rounds[0]],
        loss=rounds[0][0].record.loss,
    )


def least_disturbed(rounds: Sequence[Sequence[StageStep]]) -> list[Sequence[StageStep]]:
    """Selects the half of the rounds in which the stages got the largest share of their cores."""
    ordered = sorted(rounds, key=lambda stages: -min(step.core_share for step in stages))
    return ordered[: -(-len(rounds) // 2)]


def makespan(stages: Sequence[StageStep]) -> float:
    """Seconds from the common start of all stages to the end of the last action."""
    return max(interval.stop_s for step in stages for interval in step.record.intervals if interval.round >= 0)


def executed_in_flight(record: StepRecord) -> int:
    """Largest number of forwards of a stage that were waiting for their backward, in the order that ran."""
    steps = ({"F": 1, "B": -1}.get(interval.kind, 0) for interval in record.intervals)
    return max(itertools.accumulate(steps, initial=0))


def check_order(plan: StepPlan, stages: Sequence[StageStep]) -> None:
    """Exits unless every stage ran exactly its planned actions, in their order."""
    for record in (step.record for step in stages):
        planned = [str(action) for _, stage in plan.for_rank(record.rank).rounds for action in stage.actions]
        executed = [interval.name for interval in record.intervals if interval.round >= 0]
        if planned != executed:
            raise SystemExit(f"stage {record.rank} was planned to run {' '.join(planned)}, but ran {' '.join(executed)}")


def print_table(rows: Sequence[Row]) -> None:
    baseline = next(row for row in rows if row.plan == BASELINE)
    print(
        f"{'plan':18s} {'chunks':>6s} {'predicted s':>11s} {'measured s':>10s} {'(rounds)':>14s} {'of cores':>8s} "
        f"{'faster by':>9s} {'idle predicted':>15s} {'idle measured':>15s} {'in flight':>11s} {'judge':>7s} "
        f"{'K/V MiB':>11s} {'judge':>11s}"
    )
    for row in rows:
        rounds = f"({min(row.rounds_s):.2f}..{max(row.rounds_s):.2f})"
        idle = [" ".join(f"{share:7.1%}" for share in shares) for shares in (row.predicted_idle, row.measured_idle)]
        flights = [" ".join(map(str, counts)) for counts in (row.executed_in_flight, row.planned_in_flight)]
        books = [" ".join(f"{size / 2**20:.1f}" for size in sizes) for sizes in (row.executed_kv_book, row.planned_kv_book)]
        print(
            f"{row.plan:18s} {row.chunks:6d} {row.predicted_s:11.3f} {row.measured_s:10.3f} {rounds:>14s} {row.core_share:8.0%} "
            f"{baseline.measured_s / row.measured_s:8.3f}x {idle[0]:>15s} {idle[1]:>15s} {flights[0]:>11s} {flights[1]:>7s} "
            f"{books[0]:>11s} {books[1]:>11s}"
        )


def missed(rows: Sequence[Row], ratio: float | None) -> list[str]:
    """Lists what does not hold: losses, chunks in flight and K/V bytes always; idle shares and the ratio only if required."""
    baseline, judged = (next(row for row in rows if row.plan == name) for name in (BASELINE, JUDGED))
    failures = []
    for row in rows:
        if abs(row.loss - baseline.loss) > LOSS_TOLERANCE * abs(baseline.loss):
            failures.append(f"{row.plan}: loss {row.loss:.7f}, but {BASELINE} has {baseline.loss:.7f}")
        if row.executed_in_flight != row.planned_in_flight:
            failures.append(f"{row.plan}: {row.executed_in_flight} chunks in flight, predicted {row.planned_in_flight}")
        if row.executed_kv_book != row.planned_kv_book:
            failures.append(f"{row.plan}: {row.executed_kv_book} bytes of keys and values, predicted {row.planned_kv_book}")
        if ratio is not None and row.plan in (BASELINE, JUDGED) and row.idle_error > IDLE_TOLERANCE:
            failures.append(f"{row.plan}: an idle share is {row.idle_error:.3f} off its prediction, allowed {IDLE_TOLERANCE}")
    if ratio is not None and baseline.measured_s < ratio * judged.measured_s:
        speedup = baseline.measured_s / judged.measured_s
        failures.append(f"{JUDGED}: {speedup:.3f} times as fast as {BASELINE}, required {ratio}")
    return failures


if __name__ == "__main__":
    main()
