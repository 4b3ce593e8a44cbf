"""SPPO's published numbers (arXiv 2503.10377) that follow from shapes and rates, next to the results of our planner's passes.

    python recipes/bench/papers/sppo.py [--tokens 524288] [--slices 32] [--degree 8] [--stages 8] [--copy-gb-per-s 13]
        [--longest 1 2 4] [--json [FILE]]

bubbles: one sequence in N slices of equal time on p stages takes (p - 1 + N) / N of a pass. Compared with our 1F1B in the event
loop.

speedups: 7B on 32 GPUs, in groups of 8 ranks on 4 stages without recomputation, against one group of 32 ranks that recomputes
all layers. The closed form is the cost of recomputation times that of the bubble, for equal slices; the simulation has slices of
equal forward time, whose backwards are not quite equal. The paper reports 1.13 to 1.29 over tuned Megatron.

splits: LLaMA-65B, 128K tokens in 8 and 16 slices of equal cost. The ratio is tokens of the first slice over tokens of the last,
from published bytes. If slices are balanced by causal operations, the ratio is too small. It comes close if they are balanced by
all pairs of a square, as if nothing were masked, or by seconds with attention at 0.6 of the products' efficiency; so the paper
must balance one of these. Its copies then run at 11 to 14 GB/s per GPU.

offload: GPT-13B, 512K tokens, groups of 8 ranks, 8 stages, 32 slices. A share of each slice goes to the host. SPPO's share is
alpha = min(1, BW T / A), where T are the seconds of the next slice and A the bytes of this one (`hidden_shares`). Device bytes of
the first stage are counted in two ways. In SPPO's way, a token takes in each layer 4 h bytes of keys and values, which stay, and
30 h bytes of everything else; whole slices move at a time, and a slice is fetched when the backward before its own begins. In our
way, they are the bytes that our runtime would hold (`evaluate_plan`), layer by layer, with working memory, and with keys, values
and their fp32 gradients in the K/V book. The paper has no such table. One of its results is not reproduced: there, full offload
is slower than none (0.91 times Megatron); here, a link that hides its copies costs no time.

`--longest` plans one sequence of 1M, 2M or 4M tokens of 7B with our planner on the paper's 32, 64 or 128 GPUs, on 1, 2 and 4
stages, at the rates of the profile `a100-80g`, with the gathers that count. The paper's seconds are its hours for 1B tokens, read
off a figure whose text has no order.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from hf_longctx.plan.chunks import slice_bounds, slice_counts
from hf_longctx.plan.core.orders import compute_actions, pipelined
from hf_longctx.plan.core.settings import ClusterSpec, HardwareSpec
from hf_longctx.plan.core.sharding import shard_tokens
from hf_longctx.plan.core.types import (
    Action,
    ActivationPolicy,
    Chunk,
    GroupShape,
    LayerPolicy,
    MicroBatch,
    SequenceGroup,
    Span,
    StepPlan,
    TensorClass,
    TensorShare,
)
from hf_longctx.plan.cost.cost_model import CostCoefficients, CostModel, PassCoefficients
from hf_longctx.plan.cost.profiles import read_profile
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.capacity import least_memory_policy
from hf_longctx.plan.model.attention_pairs import SpanRates
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.pipeline.stages import layer_ranges
from hf_longctx.plan.policies.slots import SavedClass, Slot
from hf_longctx.plan.predict.evaluate import evaluate_plan
from hf_longctx.plan.predict.event_loop import CopyStep
from hf_longctx.recipes.bench.papers.action_times import run_actions, run_copying
from hf_longctx.recipes.bench.papers.command_line import run_reproduction
from hf_longctx.recipes.bench.papers.our_plans import counted_s, on_gpus, our_plan
from hf_longctx.sim.ablation import describe

K = 1024
PEAK_FLOPS = 312e12
# shares of peak FLOPS in products and attention, and fixed seconds per layer of a slice
GEMM, ATTENTION, LAYER_S = 0.5, 0.65, 4e-4
# bytes per token, layer and hidden element: for keys and values, and for everything else that is saved
KV_BYTES, SAVED_BYTES = 4, 30

GPT_7B = ModelSpec(32, 4096, 16384, 32, 32, 128, 50304, 1 << 20, bytes_per_element=2, gated_mlp=False)
GPT_13B = ModelSpec(40, 5120, 20480, 40, 40, 128, 50304, 1 << 20, bytes_per_element=2, gated_mlp=False)
LLAMA_65B = ModelSpec(80, 8192, 22016, 64, 64, 128, 32000, 1 << 20, bytes_per_element=2)

# thousands of tokens -> number of slices in the paper's runs of 7B on 8 x 4 GPUs
SLICES_7B = {512: 32, 640: 64, 768: 80, 896: 128, 1024: 160}
# millions of tokens -> GPUs of 7B, and hours for 1B tokens
LONGEST_7B = {1: (32, 55.2), 2: (64, 55.4), 4: (128, 56.2)}
# figure 5: number of slices; GB of the first and of the last slice; milliseconds of their copies
FIGURE_5 = ((8, 10.59, 2.87, 821, 254), (16, 6.04, 1.30, 435, 90))
# assumption -> how much more a pair of tokens costs, relative to products, than causal operations say
BALANCES = {"causal operations": 1.0, "operations of all pairs": 2.0, "seconds, attention at 0.6 of products": 1 / 0.6}
OFFLOADED: tuple[TensorClass, ...] = ("layer_input", "attention_output", "mlp")

Share = Callable[[int], float]


def cost_model(model: ModelSpec, num_ranks: int, layer_s: float, copy_bytes_per_s: float) -> CostModel:
    """Makes a cost model from shares of the peak, which include all communication of groups and stages."""
    matrix = model.num_layers * model.layer_parameters + model.vocab_size * model.hidden_size
    forward = PassCoefficients(
        pair_s=4 * model.num_layers * model.hidden_size / (PEAK_FLOPS * ATTENTION),
        token_s=2 * matrix / (PEAK_FLOPS * GEMM),
        chunk_s=model.num_layers * layer_s,
    )
    backward = replace(forward, pair_s=2.5 * forward.pair_s, token_s=2 * forward.token_s, chunk_s=2 * forward.chunk_s)
    hardware = HardwareSpec("a100-80g", 1.0, 1.0, 80 * 2**30, 1.0, 1.0, 0.0, copy_bytes_per_s=copy_bytes_per_s)
    # the paper exchanges all heads at once
    model = replace(model, exchange_parts=1)
    return CostModel(model, ClusterSpec(num_ranks, 8, hardware), CostCoefficients(forward, backward, 0.0, "rates"), "ulysses")


def slices_of(num_tokens: int, count: int, costs: CostModel) -> tuple[Chunk, ...]:
    """Cuts one sequence into slices whose layers take equal forward seconds."""
    forward, inside = costs.coefficients.forward, 1 - costs.model.head_share
    bounds = slice_bounds(num_tokens, count, SpanRates(forward.pair_s, forward.token_s * inside))
    return tuple(Chunk(index, (Span(0, start, stop),)) for index, (start, stop) in enumerate(pairwise(bounds)))


def bubbles(cases: Sequence[tuple[int, int]] = ((4, 32), (4, 160), (8, 32), (8, 64))) -> list[dict[str, Any]]:
    """Compares the formula (p - 1 + N) / N with the event loop, over both passes."""
    rows = []
    for num_stages, count in cases:
        chunks = [Chunk(index, (Span(0, index, index + 1),)) for index in range(count)]
        actions = compute_actions(chunks, num_stages, "1f1b")
        times = run_actions(actions, lambda action: 1.0 if action.kind == "F" else 2.0, lambda action: 0.0)
        found = times[0][-1][1] / (3 * count)
        rows.append({"stages": num_stages, "slices": count, "formula": (num_stages - 1 + count) / count, "simulated": found})
    return rows


def speedups(num_stages: int = 4) -> list[dict[str, Any]]:
    """Speedups of 7B over recomputing all layers on one stage, in closed form and simulated."""
    rows = []
    for thousands, count in SLICES_7B.items():
        costs, shape, layers = cost_model(GPT_7B, 32, 0.0, 1.0), GroupShape(8, 8), GPT_7B.num_layers
        whole = Chunk(0, (Span(0, 0, thousands * K),))
        forward_s, backward_s = (costs.part_s(whole, shape, way, layers, False) for way in (False, True))
        again = (2 * forward_s + backward_s) / (forward_s + backward_s)
        chunks = slices_of(thousands * K, count, costs)
        actions = compute_actions(chunks, num_stages, "1f1b")
        seconds = partial(_slice_s, costs, chunks, shape, layers // num_stages)
        times = run_actions(actions, seconds, lambda action: 0.0)
        # a single stage has num_stages times as many ranks, so its passes are faster by that factor
        step_s = times[0][-1][1] * num_stages
        rows.append(
            {
                "tokens": thousands * K,
                "slices": count,
                "is_in_bounds": count in slice_counts(thousands * K, shape.degree),
                "recompute": again,
                "bubble": count / (count + num_stages - 1),
                "speedup": again * count / (count + num_stages - 1),
                "simulated": (2 * forward_s + backward_s) / step_s,
            }
        )
    return rows


def _slice_s(costs: CostModel, chunks: Sequence[Chunk], shape: GroupShape, num_layers: int, action: Action) -> float:
    return costs.part_s(chunks[action.chunk], shape, action.kind == "B", num_layers, False)


def splits(num_tokens: int = 128 * K) -> list[dict[str, Any]]:
    """Ratios of the first slice's tokens to the last one's in figure 5: published, and under each assumption of BALANCES."""
    model, rows = LLAMA_65B, []
    for count, first_gb, last_gb, first_ms, last_ms in FIGURE_5:
        row: dict[str, Any] = {"slices": count, "published": first_gb / last_gb}
        row["copy_gb_per_s"] = [first_gb / first_ms * 1e3, last_gb / last_ms * 1e3]
        for name, factor in BALANCES.items():
            bounds = slice_bounds(num_tokens, count, SpanRates(factor * 4 * model.hidden_size, 2.0 * model.layer_parameters))
            row[name] = bounds[1] / (bounds[-1] - bounds[-2])
        rows.append(row)
    return rows


def hidden_shares(slots: Sequence[Slot], bytes_per_s: float) -> tuple[float, ...]:
    """Largest share of every slot whose copies are hidden out and back: SPPO's alpha. The last slot has 0: nothing follows it."""
    shares = []
    for slot, following in itertools.zip_longest(slots, slots[1:]):
        window_s = 0.0 if following is None else min(following.forward_s, following.backward_s)
        num_bytes = sum(saved.num_bytes for saved in slot.saved)
        shares.append(min(1.0, bytes_per_s * window_s / num_bytes) if num_bytes else 0.0)
    return tuple(shares)


class Offload:
    """One sequence on stages of equally many layers, which offload a share of what they save for backward."""

    def __init__(self, num_tokens: int, count: int, degree: int, num_stages: int, copy_bytes_per_s: float) -> None:
        self.costs = cost_model(GPT_13B, degree * num_stages, LAYER_S, copy_bytes_per_s)
        self.num_tokens, self.rate = num_tokens, copy_bytes_per_s
        chunks = slices_of(num_tokens, count, self.costs)
        ranges = layer_ranges(GPT_13B.num_layers, num_stages)
        group = SequenceGroup(tuple(range(degree)), "ulysses" if degree > 1 else "local", chunks, ())
        self.group = pipelined(group, ranges, "1f1b")
        self.actions = compute_actions(chunks, num_stages, "1f1b")
        # layers of the first stage, and tokens per slice of its fullest rank
        self.layers = ranges[0][0].num_layers
        self.tokens = [max(shard_tokens(chunk, group.shape)) for chunk in chunks]

    def saved(self, chunk: int, per_element: int = SAVED_BYTES) -> float:
        """Bytes that a slice saves on the first stage."""
        return per_element * GPT_13B.hidden_size * self.tokens[chunk] * self.layers

    def pass_s(self, action: Action, again: bool = False) -> float:
        """Seconds of a pass on its stage, without the output head, whose logits are not offloaded."""
        chunk, shape = self.group.chunks[action.chunk], self.group.shape
        num_layers = self.group.stages[action.stage].num_layers
        seconds = self.costs.part_s(chunk, shape, action.kind == "B", num_layers, False)
        return seconds + (self.costs.part_s(chunk, shape, False, num_layers, False) if again and action.kind == "B" else 0.0)

    def alphas(self) -> tuple[float, ...]:
        """SPPO's shares. After the last slice, the first stage waits for the others at least as long as a slice takes."""
        slots = [
            Slot(
                self.pass_s(Action("F", 0, chunk)),
                self.pass_s(Action("B", 0, chunk)),
                (SavedClass("mlp", self.saved(chunk), 0.0),),
            )
            for chunk in range(len(self.tokens))
        ]
        return hidden_shares([*slots, slots[-1]], self.rate)[:-1]

    def as_sppo(self, share: Share, again: bool = False) -> tuple[float, float, float]:
        """Seconds, and peak bytes of the first stage on device and host, as SPPO counts them. again: recompute from inputs."""

        def copies(action: Action) -> tuple[CopyStep, ...]:
            copied = share(action.chunk) * self.saved(action.chunk)
            return (CopyStep(self.pass_s(action, again), copied / self.rate),) if copied else ()

        seconds = partial(self.pass_s, again=again)
        times, copied = run_copying(self.actions, seconds, lambda action: 0.0, copies, runs_ahead=True)
        out_s = iter(one.stops_s[-1] for one in copied if one.stage == 0)
        began_s, before_s = {}, 0.0
        device: list[tuple[float, float]] = []
        host: list[tuple[float, float]] = []
        for action, (start_s, stop_s) in zip(self.actions[0], times[0], strict=True):
            kept = self.saved(action.chunk, KV_BYTES) + self.saved(action.chunk, 2 if again else SAVED_BYTES)
            moved = share(action.chunk) * self.saved(action.chunk)
            if action.kind == "F":
                began_s[action.chunk] = stop_s
                gone_s = next(out_s) if moved else stop_s
                device += [(start_s, kept), (gone_s, -moved)]
                host += [(stop_s, moved)]
            else:
                # fetched when the backward before it begins, but not before its own forward is done
                device += [(max(before_s, began_s[action.chunk]), moved), (stop_s, -kept)]
                host += [(start_s, -moved)]
                before_s = start_s
        return max(stage_times[-1][1] for stage_times in times), _most(device), _most(host)

    def as_ours(self, policies: tuple[ActivationPolicy, ...]) -> tuple[float, int, int]:
        """Seconds, and peak bytes of the first stage on device (without states) and host, under our runtime."""
        stages = tuple(replace(stage, activations=policies) for stage in self.group.stages)
        rounds = (MicroBatch((replace(self.group, stages=stages),)),)
        plan = StepPlan(0, (self.num_tokens,), len(stages), self.group.degree, "replicated", rounds)
        run = evaluate_plan(plan, self.costs, with_events=False)
        return run.step_s, run.peak_bytes[0] - ByteModel(GPT_13B).stage_states(stages[0], plan), run.host_bytes[0]

    def policies(self, share: Share) -> tuple[ActivationPolicy, ...]:
        """Policies that keep queries, keys and values on the device and offload a share of everything else."""
        return tuple(ActivationPolicy(chunk, 0, (_offloaded(share(chunk)),) * self.layers) for chunk in range(len(self.tokens)))

    def rows(self) -> list[dict[str, Any]]:
        """Compares no offload, full offload, SPPO's alpha, a fixed half, and recomputation."""
        alphas = self.alphas()
        shares: dict[str, Share] = {
            "none": lambda chunk: 0.0,
            "full": lambda chunk: 1.0,
            "alpha": lambda chunk: alphas[chunk],
            "fixed 0.5": lambda chunk: 0.5,
            "run again": lambda chunk: 0.0,
        }
        rows = []
        for name, share in shares.items():
            again = name == "run again"
            step_s, device, host = self.as_sppo(share, again)
            lean = (replace(least_memory_policy(GPT_13B, n, 0, 0, self.layers), chunk=i) for i, n in enumerate(self.tokens))
            policies = tuple(lean) if again else self.policies(share) if name != "none" else ()
            ours_s, ours_device, ours_host = self.as_ours(policies)
            row: dict[str, Any] = {"offload": name, "step_s": step_s, "device_bytes": device, "host_bytes": host}
            row |= {"our_step_s": ours_s, "our_device_bytes": ours_device, "our_host_bytes": ours_host}
            rows.append(row | ({"first_share": alphas[0], "last_share": alphas[-1]} if name == "alpha" else {}))
        return rows


def longest(millions: Sequence[int], counts: Sequence[int] = (1, 2, 4)) -> list[dict[str, Any]]:
    """Seconds and bytes of our plans of one sequence on each number of stages, with the seconds of the paper's hours."""
    rows: list[dict[str, Any]] = []
    for million in millions:
        num_gpus, hours = LONGEST_7B[million]
        num_tokens = million * K * K
        model, spec = on_gpus(replace(GPT_7B, max_positions=num_tokens)), read_profile("a100-80g").spec
        for count in counts:
            row = {"tokens": num_tokens, "gpus": num_gpus, "stages": count, "published_s": hours * 3600 * num_tokens / 1e9}
            try:
                plan, setup = our_plan(model, ClusterSpec(num_gpus, 8, spec), [num_tokens], count)
            except ValueError as error:
                rows.append(row | {"detail": str(error)})
                continue
            row |= {"step_s": counted_s(plan, setup.costs), "device_bytes": plan.estimate.peak_bytes}
            rows.append(row | {"host_bytes": plan.estimate.host_bytes, "detail": describe(plan)})
    return rows


def _offloaded(share: float) -> LayerPolicy:
    return LayerPolicy(tuple(TensorShare(name, host=share, device=1 - share) for name in OFFLOADED))


def _most(changes: Sequence[tuple[float, float]]) -> float:
    """Largest running sum of (time, change) pairs; at equal times, decreases come first."""
    total = most = 0.0
    for _, change in sorted(changes):
        total += change
        most = max(most, total)
    return most


def text_of(result: dict[str, Any]) -> str:
    lines = ["stages slices  (p-1+N)/N  simulated"]
    lines += [f"{r['stages']:6d} {r['slices']:6d} {r['formula']:10.4f} {r['simulated']:10.4f}" for r in result["bubbles"]]
    lines += ["", "7B, 8 x 4      slices  run again  bubble  speedup  simulated"]
    for row in result["speedups"]:
        note = "" if row["is_in_bounds"] else "  (slices shorter than the paper's own bound)"
        lines.append(
            f"{row['tokens']:12d} {row['slices']:8d} {row['recompute']:10.3f} {row['bubble']:7.3f} {row['speedup']:8.3f} "
            f"{row['simulated']:10.3f}{note}"
        )
    lines += ["", "65B, 128K: tokens of the first slice over those of the last"]
    for row in result["splits"]:
        found = ", ".join(f"{name} {row[name]:.2f}" for name in BALANCES)
        low, high = sorted(row["copy_gb_per_s"])
        lines.append(
            f"{row['slices']:4d} slices: published {row['published']:.2f}; {found}; copies at {low:.1f} to {high:.1f} GB/s"
        )
    lines += ["", "offload        SPPO: s  device GB  host GB   ours: s  device GB  host GB"]
    for row in result["offload"]:
        sizes = [row[name] / 1e9 for name in ("device_bytes", "host_bytes", "our_device_bytes", "our_host_bytes")]
        shares = f"  shares {row['first_share']:.2f} to {row['last_share']:.2f}" if "first_share" in row else ""
        lines.append(
            f"{row['offload']:12s} {row['step_s']:9.2f} {sizes[0]:10.1f} {sizes[1]:8.1f} {row['our_step_s']:9.2f} "
            f"{sizes[2]:10.1f} {sizes[3]:8.1f}{shares}"
        )
    lines += ["", "7B: one sequence on all GPUs"] if result["longest"] else []
    for row in result["longest"]:
        line = f"{row['tokens']:9d} tokens, {row['gpus']:3d} GPUs, {row['stages']} stage(s): "
        if "step_s" in row:
            line += (
                f"{row['step_s']:6.0f} s (published {row['published_s']:.0f}, {row['step_s'] / row['published_s'] - 1:+.0%}), "
            )
            line += f"{row['device_bytes'] / 1e9:.1f} GB, on the host {row['host_bytes'] / 1e9:.1f}; "
        lines.append(line + row["detail"])
    return "\n".join(lines)


def reproduce(options: argparse.Namespace) -> dict[str, Any]:
    """Makes all comparisons as plain data; raises ValueError for options that do not fit together."""
    for name in ("tokens", "slices", "degree", "stages", "copy_gb_per_s"):
        if not getattr(options, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(options, name)}; give more than 0")
    if GPT_13B.num_layers % options.stages:
        raise ValueError(f"--stages is {options.stages}; give a divisor of the model's {GPT_13B.num_layers} layers")
    if GPT_13B.num_heads % options.degree:
        raise ValueError(f"--degree is {options.degree}; give a divisor of the model's {GPT_13B.num_heads} heads")
    if options.tokens < options.slices * options.degree:
        raise ValueError(
            f"--tokens is {options.tokens}, but {options.slices} slices on {options.degree} ranks need one per slice and rank; "
            f"give at least {options.slices * options.degree}"
        )
    offload = Offload(options.tokens, options.slices, options.degree, options.stages, options.copy_gb_per_s * 1e9)
    found = {"bubbles": bubbles(), "speedups": speedups(), "splits": splits(), "offload": offload.rows()}
    return found | {"longest": longest(options.longest)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables or JSON; returns 2 if the options do not allow a comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=512 * K, help="length of the offloaded sequence (default: 524288)")
    parser.add_argument("--slices", type=int, default=32, help="slices of the offloaded sequence (default: 32)")
    parser.add_argument("--degree", type=int, default=8, help="ranks of its group (default: 8)")
    parser.add_argument("--stages", type=int, default=8, help="its pipeline stages (default: 8)")
    parser.add_argument("--copy-gb-per-s", type=float, default=13.0, help="copy rate of one GPU, each way (default: 13)")
    parser.add_argument(
        "--longest",
        type=int,
        nargs="*",
        default=[],
        choices=list(LONGEST_7B),
        help="also plan sequences of so many million tokens",
    )
    return run_reproduction(parser, reproduce, lambda _, result: text_of(result), arguments)


if __name__ == "__main__":
    sys.exit(main())
