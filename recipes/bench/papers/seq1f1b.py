"""Seq1F1B's published throughput and memory (arXiv 2406.03488, A100-80GB), next to predictions for our same schedules.

    python recipes/bench/papers/seq1f1b.py --model gpt-7b --seq-len 32768 --micro-batches 8 --stages 4 --slices 4
        [--parts 2] [--tensor-parallel 8] [--partition paper|time|even] [--fit] [--ours] [--json [FILE]]

The schedules are our own (`hf_longctx/plan/core/orders.py`). The event loop (`hf_longctx/plan/predict/event_loop.py`) runs
them on seconds of a `CostModel` with four constants: the shares of 312 TFLOPS that matrix products and attention reach
(including all costs of tensor parallelism), seconds per layer of every chunk's pass, and seconds per token of every hop between
stages. During a hop a stage does nothing else, because Megatron's sends and receives block. A backward takes 2 times as long as
a forward for products, 2.5 times for attention, and 2 times for the fixed part.

The constants are fitted (`--fit`) to six rows of GPT-7B on 32 GPUs with tensor parallelism 8 and 4 stages: all four rows of 1F1B,
and the two of Seq1F1B with 8 micro-batches. Everything else is predicted. The fitted rows cannot tell the cost of a hop from
that of a product, because both grow with tokens and stages. So the fit pulls the hop weakly towards 0.1 microseconds per token;
1F1B-I, which has twice as many hops, shows that this is about right. Two kinds of rows cannot be matched: the published row of
Seq1F1B at 64K with 16 micro-batches contradicts itself (its TFLOPS mean 42.7 thousand tokens per second), and Seq1F1B-I is slower
than any bubble explains.

Slices: "paper" is Seq1F1B's own partition into equal operations of the whole model's forward, with embedding and head; "time" is
ours, equal seconds of forward and backward of the layers; "even" is equal tokens.

Memory is that of the first stage, which has the most chunks in flight. It is the sum of 18 bytes per parameter; the tensors that
plain layers save for every token in flight, including keys and values (`hf_longctx/plan/memory/saved_tensors.py`); and two more
buffers that Seq1F1B holds for slices: one with a sequence's keys and values up to its latest forward, kept until its first slice
has run backward, and one with their gradients up to its latest backward. Slices get 10 % more, for memory fragmentation by
tensors of unequal shapes. Published bytes were read off a figure. Without tensor parallelism they are a fifth below the
prediction; for these only the growth with tokens is compared.

`--ours` adds our planner's plans of these sequences on as many GPUs, on one stage and on `--stages`, with everything kept and
parameters sharded over the ranks of a stage. Their seconds follow from the rates of the profile `a100-80g`, with the gathers that
count, so they do not compare with the rows that have fitted constants; their bytes do.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from hf_longctx.plan.chunks import slice_bounds
from hf_longctx.plan.core.orders import Schedule, compute_actions
from hf_longctx.plan.core.settings import ClusterSpec, HardwareSpec
from hf_longctx.plan.core.types import Action, Chunk, GroupShape, SequenceGroup, Span, StagePlan
from hf_longctx.plan.cost.cost_model import CostCoefficients, CostModel, PassCoefficients
from hf_longctx.plan.cost.profiles import read_profile
from hf_longctx.plan.memory.saved_tensors import plain_layer_bytes
from hf_longctx.plan.model.attention_pairs import SpanRates
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.pipeline.stages import layer_ranges
from hf_longctx.plan.predict.evaluate import evaluate_plan
from hf_longctx.recipes.bench.papers.action_times import run_actions
from hf_longctx.recipes.bench.papers.command_line import run_reproduction
from hf_longctx.recipes.bench.papers.our_plans import counted_s, on_gpus, our_plan

Partition = Literal["paper", "time", "even"]
PARTITIONS: tuple[str, ...] = ("paper", "time", "even")

PEAK_FLOPS = 312e12
STATE_BYTES = 18
MARGIN = 1.1

# method -> its schedule, and whether sequences are sliced
METHODS: dict[str, tuple[Schedule, bool]] = {
    "1F1B": ("1f1b", False),
    "1F1B-I": ("interleaved", False),
    "Seq1F1B": ("1f1b", True),
    "Seq1F1B-I": ("interleaved", True),
}

# layers, hidden size, heads, tensor parallel ranks, stages of the paper's runs
MODELS = {
    "gpt-2.7b": (32, 2560, 32, 1, 8),
    "gpt-7b": (32, 4096, 32, 8, 4),
    "gpt-13b": (40, 5120, 40, 8, 4),
    "gpt-30b": (64, 6144, 64, 8, 8),
}
VOCAB = 50304

# tokens per second of GPT-7B by (tokens of a sequence, micro-batches), in the order of METHODS
PUBLISHED_TOKENS_PER_S = {
    (32768, 8): (48189, 52964, 53485, 47232),
    (32768, 16): (55333, 56304, 55765, 46195),
    (65536, 8): (37343, 41677, 43297, 40908),
    (65536, 16): (43063, 44712, 33367, 40990),
}
# the published number that contradicts itself
INCONSISTENT = (65536, 16, "Seq1F1B")
FIT_ROWS = (
    *((tokens, count, "1F1B") for tokens, count in PUBLISHED_TOKENS_PER_S),
    (32768, 8, "Seq1F1B"),
    (65536, 8, "Seq1F1B"),
)
# GB on the fullest GPU, in the order of METHODS; 0: out of memory
PUBLISHED_GB = {
    ("gpt-2.7b", 16384): (51.40, 70.95, 29.85, 29.70),
    ("gpt-2.7b", 24576): (74.30, 0.0, 41.45, 41.90),
    ("gpt-2.7b", 32768): (0.0, 0.0, 53.10, 54.45),
    ("gpt-7b", 32768): (28.00, 34.20, 18.90, 16.35),
    ("gpt-7b", 65536): (51.40, 62.90, 34.30, 28.45),
    ("gpt-7b", 131072): (0.0, 0.0, 69.80, 57.55),
    ("gpt-13b", 32768): (44.20, 53.25, 29.70, 25.80),
    ("gpt-13b", 49152): (64.30, 76.45, 42.35, 35.90),
    ("gpt-13b", 65536): (66.85, 0.0, 51.60, 42.95),
    ("gpt-30b", 32768): (71.40, 0.0, 37.60, 38.65),
    ("gpt-30b", 49152): (0.0, 0.0, 54.70, 55.55),
    ("gpt-30b", 65536): (0.0, 0.0, 67.50, 66.90),
}


@dataclass(frozen=True, slots=True)
class Constants:
    """Result of the fit.

    gemm, attention: shares of peak FLOPS. layer_s: seconds per layer and pass. hop_token_s: seconds per token and hop.
    residual: root mean square of the fitted rows' relative errors.
    """

    gemm: float
    attention: float
    layer_s: float
    hop_token_s: float
    residual: float = math.nan


# starting point of the fit
START = Constants(0.43, 0.65, 7e-4, 1e-7)
# weight of the pull on the hop: a hop that is a factor of e away from START counts like this relative error
PULL = 0.01
FITTED = Constants(0.44191, 0.63753, 8.2462e-4, 1.0333e-7, residual=0.00705)


@dataclass(frozen=True, slots=True)
class Setup:
    """One training job: the model, how it is distributed, and how sequences are cut."""

    model: ModelSpec
    constants: Constants
    seq_len: int
    micro_batches: int
    stages: int
    slices: int
    parts: int
    tensor_parallel: int
    partition: Partition

    @property
    def costs(self) -> CostModel:
        """Cost model in which the tensor-parallel ranks of a stage are one device."""
        return cost_model(self.model, self.constants, self.stages, self.tensor_parallel)

    def group(self, method: str) -> SequenceGroup:
        """All micro-batches as one pipeline without messages; raises ValueError if the schedule cannot run this job."""
        schedule, is_sliced = METHODS[method]
        parts = self.parts if schedule == "interleaved" else 1
        bounds = list(pairwise(self.bounds())) if is_sliced else [(0, self.seq_len)]
        spans = [Span(number, start, stop) for number in range(self.micro_batches) for start, stop in bounds]
        chunks = tuple(Chunk(index, (span,)) for index, span in enumerate(spans))
        ranges = layer_ranges(self.model.num_layers, self.stages, parts)
        actions = compute_actions(chunks, self.stages, schedule, parts)
        stages = tuple(StagePlan(stage, ranges[stage], actions[stage]) for stage in range(self.stages))
        return SequenceGroup((0,), "local", chunks, stages)

    def bounds(self) -> tuple[int, ...]:
        """Token indices at which the slices of a sequence begin and end."""
        model = self.model
        if self.partition == "even":
            return slice_bounds(self.seq_len, self.slices, SpanRates(0.0, 1.0))
        if self.partition == "time":
            forward, backward = self.costs.coefficients.forward, self.costs.coefficients.backward
            inside = 1 - model.head_share
            return slice_bounds(
                self.seq_len,
                self.slices,
                SpanRates(forward.pair_s + backward.pair_s, (forward.token_s + backward.token_s) * inside),
            )
        # operations as the released solver counts them: three more per pair and head than the matrix products have
        pairs = model.num_layers * model.num_heads * (4 * model.head_dim + 3)
        tokens = model.num_layers * 2 * model.layer_parameters + 4 * model.hidden_size * model.vocab_size
        bounds = slice_bounds(self.seq_len, self.slices, SpanRates(pairs, tokens))
        # all slices but the first are divisible by the number of tensor-parallel ranks
        sizes = [(stop - start) // self.tensor_parallel * self.tensor_parallel for start, stop in pairwise(bounds)]
        return (0, *(self.seq_len - sum(sizes[place:]) for place in range(1, len(sizes))), self.seq_len)


def gpt_spec(name: str, seq_len: int) -> ModelSpec:
    """Shapes of the paper's model of this name, with positions for `seq_len` tokens."""
    if name not in MODELS:
        raise ValueError(f"--model {name!r} is not one of {', '.join(MODELS)}")
    num_layers, hidden, heads, _, _ = MODELS[name]
    head_dim = hidden // heads
    spec = ModelSpec(num_layers, hidden, 4 * hidden, heads, heads, head_dim, VOCAB, seq_len, bytes_per_element=2)
    return replace(spec, gated_mlp=False, learned_positions=True)


def cost_model(model: ModelSpec, constants: Constants, num_stages: int, tensor_parallel: int) -> CostModel:
    """Makes a cost model from the four constants; hops are bytes at the rate at which a token takes `hop_token_s`."""
    flops = PEAK_FLOPS * tensor_parallel
    matrix = model.num_layers * model.layer_parameters + model.vocab_size * model.hidden_size
    byte_s = constants.hop_token_s / (model.hidden_size * model.bytes_per_element)
    forward = PassCoefficients(
        pair_s=4 * model.num_layers * model.hidden_size / (flops * constants.attention),
        token_s=2 * matrix / (flops * constants.gemm),
        chunk_s=model.num_layers * constants.layer_s,
        link_byte_s=byte_s,
        network_byte_s=byte_s,
    )
    backward = replace(forward, pair_s=2.5 * forward.pair_s, token_s=2 * forward.token_s, chunk_s=2 * forward.chunk_s)
    hardware = HardwareSpec("a100-80g", flops, flops, 80 * 2**30, 1 / max(byte_s, 1e-30), 1 / max(byte_s, 1e-30), 0.0)
    return CostModel(model, ClusterSpec(num_stages, num_stages, hardware), CostCoefficients(forward, backward, 0.0, "fit"))


def step_seconds(setup: Setup, group: SequenceGroup) -> tuple[float, float]:
    """Seconds of all micro-batches, and the share of that time in which stages are idle, on average."""
    costs, shape = setup.costs, GroupShape(1)
    num_ranges = len(group.stages[0].layer_ranges)
    known: dict[tuple[int, int, str, bool], float] = {}

    def seconds(action: Action) -> float:
        chunk = group.chunks[action.chunk]
        (span,) = chunk.spans
        num_layers = group.stages[action.stage].layer_ranges[action.layer_range].num_layers
        has_head = (action.stage, action.layer_range) == (setup.stages - 1, num_ranges - 1)
        key = (span.start, num_layers, action.kind, has_head)
        if key not in known:
            # Megatron's sends and receives block the stage, so a hop counts as part of the pass
            hop_s = costs.hop_s(chunk.num_tokens, False)
            known[key] = costs.part_s(chunk, shape, action.kind == "B", num_layers, has_head) + hop_s
        return known[key]

    times = run_actions([stage.actions for stage in group.stages], seconds, lambda action: 0.0, num_ranges)
    total_s = max(stage_times[-1][1] for stage_times in times)
    busy_s = sum(stop_s - start_s for stage_times in times for start_s, stop_s in stage_times)
    return total_s, 1 - busy_s / (setup.stages * total_s)


def stage_bytes(setup: Setup, group: SequenceGroup) -> tuple[float, float]:
    """Bytes on a GPU of the first stage: in all, and of its states alone."""
    stage, model = group.stages[0], setup.model
    num_parameters = model.part_parameters(stage.num_layers, stage.stage == 0, stage.stage == setup.stages - 1)
    states = STATE_BYTES * num_parameters / setup.tensor_parallel
    token_bytes = plain_layer_bytes(model)
    if any(chunk.prefix_tokens for chunk in group.chunks):
        saved = MARGIN * _most_layer_bytes(group, token_bytes, 2 * model.bytes_per_element * model.hidden_size)
    else:
        saved = _most_layer_bytes(group, token_bytes, 0)
    return states + saved / setup.tensor_parallel, states


def _most_layer_bytes(group: SequenceGroup, token_bytes: int, kv_bytes: int) -> float:
    """Largest number of bytes that the first stage holds: activations of tokens in flight, keys, values and their gradients."""
    stage, held, most = group.stages[0], 0, 0
    # by sequence and layer range: bytes of keys and values up to the latest forward, and of their gradients up to the latest
    # backward, which makes gradients for all tokens before it
    keys: dict[tuple[int, int], int] = {}
    gradients: dict[tuple[int, int], int] = {}
    for action in stage.actions:
        (span,) = group.chunks[action.chunk].spans
        place, num_layers = (span.sequence, action.layer_range), stage.layer_ranges[action.layer_range].num_layers
        if action.kind == "F":
            held += span.num_tokens * num_layers * token_bytes
        (keys if action.kind == "F" else gradients)[place] = span.stop * num_layers * kv_bytes
        most = max(most, held + sum(keys.values()) + sum(gradients.values()))
        if action.kind == "B":
            held -= span.num_tokens * num_layers * token_bytes
            if span.start == 0:
                del keys[place], gradients[place]
    return most


def fit(start: Constants = START) -> Constants:
    """Fits the constants to FIT_ROWS by least squares of relative errors, with Gauss-Newton steps in their logarithms."""

    def errors(logs: np.ndarray) -> np.ndarray:
        constants = Constants(*np.exp(logs).tolist())
        return np.array([_published_error(constants, *row) for row in FIT_ROWS])

    first = np.log([start.gemm, start.attention, start.layer_s, start.hop_token_s])
    logs, step = first.copy(), 1e-4
    for _ in range(8):
        found = errors(logs)
        slopes = np.stack([(errors(logs + step * unit) - found) / step for unit in np.eye(4)], axis=1)
        # one more equation, which pulls the hop towards its start
        matrix = np.concatenate([slopes, PULL * np.eye(4)[3:]])
        wanted = np.concatenate([-found, PULL * (first - logs)[3:]])
        change = np.linalg.lstsq(matrix, wanted)[0]
        logs = logs + change * min(1.0, 0.5 / float(np.abs(change).max()))
    residual = float(np.sqrt(np.mean(errors(logs) ** 2)))
    return Constants(*np.exp(logs).tolist(), residual=residual)


def _published_error(constants: Constants, seq_len: int, micro_batches: int, method: str) -> float:
    model, published = gpt_spec("gpt-7b", seq_len), PUBLISHED_TOKENS_PER_S[seq_len, micro_batches]
    setup = Setup(model, constants, seq_len, micro_batches, 4, 4, 2, 8, "paper")
    tokens_per_s = seq_len * micro_batches / step_seconds(setup, setup.group(method))[0]
    return tokens_per_s / published[list(METHODS).index(method)] - 1


def table(setup: Setup, name: str) -> list[dict[str, Any]]:
    """One row per method: tokens per second, idle share, bytes, and published numbers with errors where there are any."""
    _, _, _, tensor_parallel, stages = MODELS[name]
    is_paper = (setup.stages, setup.slices, setup.parts, setup.tensor_parallel) == (stages, 4, 2, tensor_parallel)
    is_paper = is_paper and setup.partition == "paper"
    none = (0.0,) * len(METHODS)
    speeds = PUBLISHED_TOKENS_PER_S.get((setup.seq_len, setup.micro_batches), none) if name == "gpt-7b" and is_paper else none
    sizes = PUBLISHED_GB.get((name, setup.seq_len), none) if is_paper else none
    rows = []
    for method, tokens_per_s, gigabytes in zip(METHODS, speeds, sizes, strict=True):
        try:
            group = setup.group(method)
        except ValueError as error:
            rows.append({"method": method, "detail": f"{method}: {error}"})
            continue
        total_s, idle = step_seconds(setup, group)
        row: dict[str, Any] = {"method": method, "tokens_per_s": setup.seq_len * setup.micro_batches / total_s, "idle": idle}
        row["peak_bytes"], row["state_bytes"] = stage_bytes(setup, group)
        if tokens_per_s:
            row |= {"published_tokens_per_s": tokens_per_s, "error": row["tokens_per_s"] / tokens_per_s - 1}
            row["is_inconsistent"] = (setup.seq_len, setup.micro_batches, method) == INCONSISTENT
        if gigabytes:
            row |= {"published_bytes": gigabytes * 1e9, "bytes_error": row["peak_bytes"] / (gigabytes * 1e9) - 1}
        rows.append(row)
    return rows


def our_rows(setup: Setup) -> list[dict[str, Any]]:
    """Rows of our planner, with everything kept: on one stage, and on the stages of `setup`."""
    rows: list[dict[str, Any]] = []
    cluster = ClusterSpec(setup.stages * setup.tensor_parallel, 8, read_profile("a100-80g").spec)
    for num_stages in dict.fromkeys((1, setup.stages)):
        name = f"ours, {num_stages} stage(s)"
        lengths = [setup.seq_len] * setup.micro_batches
        try:
            plan, own = our_plan(on_gpus(setup.model), cluster, lengths, num_stages, keeps_everything=True)
        except ValueError as error:
            rows.append({"method": name, "detail": f"{name}: {error}"})
            continue
        run, step_s = evaluate_plan(plan, own.costs, with_events=False), counted_s(plan, own.costs)
        idle = sum(rank.idle_s for rank in run.ranks) / len(run.ranks) / run.step_s
        row: dict[str, Any] = {"method": name, "tokens_per_s": sum(lengths) / step_s, "idle": idle}
        rows.append(row | {"peak_bytes": max(run.peak_bytes)})
    return rows


def text_of(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"{'method':16s} {'tokens/s':>9s} {'idle':>6s} {'published':>9s} {'error':>7s} {'GB':>7s} {'published':>9s} {'error':>7s}"
    ]
    for row in rows:
        if "tokens_per_s" not in row:
            lines.append(row["detail"])
            continue
        line = f"{row['method']:16s} {row['tokens_per_s']:9.0f} {row['idle']:6.3f}"
        published = row.get("published_tokens_per_s")
        line += f" {published:9.0f} {row['error']:+7.1%}" if published else " " * 18
        line += f" {row['peak_bytes'] / 1e9:7.2f}"
        line += f" {row['published_bytes'] / 1e9:9.2f} {row['bytes_error']:+7.1%}" if "published_bytes" in row else ""
        lines.append(line + (" (published cell contradicts itself)" if row.get("is_inconsistent") else ""))
    return "\n".join(lines)


def reproduce(options: argparse.Namespace) -> dict[str, Any]:
    """Makes the comparison that the options ask for, as plain data; raises ValueError for options that do not fit together."""
    model = gpt_spec(options.model, options.seq_len)
    for name in ("seq_len", "micro_batches", "stages", "slices", "parts"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(options, name)}; give at least 1")
    if options.slices > options.seq_len:
        raise ValueError(f"--slices is {options.slices}, but a sequence has {options.seq_len} tokens; give fewer slices")
    if options.stages > model.num_layers:
        raise ValueError(f"--stages is {options.stages}, but {options.model} has {model.num_layers} layers; give fewer stages")
    tensor_parallel = options.tensor_parallel or MODELS[options.model][3]
    if tensor_parallel < 1 or model.num_heads % tensor_parallel:
        raise ValueError(f"--tensor-parallel is {tensor_parallel}; give a divisor of the model's {model.num_heads} heads")
    constants = fit() if options.fit else FITTED
    sizes = (options.seq_len, options.micro_batches, options.stages, options.slices, options.parts, tensor_parallel)
    setup = Setup(model, constants, *sizes, options.partition)
    bounds = setup.bounds()
    return {
        "model": options.model,
        "seq_len": options.seq_len,
        "micro_batches": options.micro_batches,
        "stages": options.stages,
        "parts": options.parts,
        "tensor_parallel": tensor_parallel,
        "partition": options.partition,
        "slice_tokens": [stop - start for start, stop in pairwise(bounds)],
        "constants": {name: getattr(constants, name) for name in Constants.__slots__},
        "rows": table(setup, options.model) + (our_rows(setup) if options.ours else []),
    }


def report(options: argparse.Namespace, result: Mapping[str, Any]) -> str:
    found = result["constants"]
    return (
        f"{options.model}, {options.micro_batches} sequences of {options.seq_len} tokens, {options.stages} stages of "
        f"{result['tensor_parallel']} GPUs; slices by {options.partition}: {result['slice_tokens']}\n"
        f"products {found['gemm']:.4f}, attention {found['attention']:.4f} of the peak, {found['layer_s'] * 1e3:.3f} ms a layer "
        f"and unit, {found['hop_token_s'] * 1e6:.3f} us a token and hop, residual {found['residual']:.2%}\n"
        f"{text_of(result['rows'])}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table or JSON; returns 2 if the options do not allow a comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="gpt-7b", help=f"one of {', '.join(MODELS)} (default: gpt-7b)")
    parser.add_argument("--seq-len", type=int, default=32768, help="tokens of every sequence (default: 32768)")
    parser.add_argument("--micro-batches", type=int, default=8, help="sequences of a step (default: 8)")
    parser.add_argument("--stages", type=int, default=4, help="pipeline stages (default: 4)")
    parser.add_argument("--slices", type=int, default=4, help="slices of a sequence (default: 4)")
    parser.add_argument("--parts", type=int, default=2, help="layer ranges per stage in interleaved schedules (default: 2)")
    parser.add_argument("--tensor-parallel", type=int, default=0, help="GPUs of a stage (default: the paper's)")
    parser.add_argument("--partition", choices=PARTITIONS, default="paper", help="how slices are cut (default: paper)")
    parser.add_argument("--fit", action="store_true", help="fit the constants again instead of using the stored ones")
    parser.add_argument("--ours", action="store_true", help="also plan these sequences with our planner")
    return run_reproduction(parser, reproduce, report, arguments)


if __name__ == "__main__":
    sys.exit(main())
