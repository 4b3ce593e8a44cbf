"""Time and peak memory of one long document's forward and backward, against the checkpointing of Hugging Face, torch and TRL.

    python recipes/bench/cpu/memory.py [--lengths 8192 16384 32768] [--rounds 5] [--cpu-seconds] [--json FILE]

The model is a Llama of four layers (hidden size 256, 8 query and 2 KV heads, MLP 704, vocabulary 4096) in fp32 with random
weights, in one process with two threads. Every round runs each method once, alternately from first to last and from last to
first, so that a busy machine disturbs all alike; ratios compare times of the same round. Ours keeps the attention output on
the device and recomputes queries, keys, values and MLP. `--require` judges the first of ours; the other shows what tiles cost
and save. "torch selective" is `create_selective_checkpoint_contexts` with a policy that keeps attention, and "TRL selective" what
`gradient_checkpointing_kwargs={"selective": True}` of TRL's trainer does (if TRL is installed); both keep what ours keeps. "ours,
more kept" has the room of the smaller of their peaks, as they were in the round that does not count: the planner keeps as much
more as fits between our peak and that one. `--require-selective` judges it against the faster of them.

`--cpu-seconds` runs one thread and counts seconds of this process on a CPU, so that other processes take none of them.

Columns: `peak` is the largest resident memory during a step, above that at its start. `saved` is what the decoder layers hold
for backward, in bytes per token, measured by torch's hooks and the activation engine; `predicted` is the same by the plan's
formulas. `gradient` is the largest difference from plain Hugging Face over all tensors, relative to each tensor's largest
value. (Hugging Face's `offload` pins host memory, which needs an accelerator, so `recipes/bench/gpu/matrix.py` measures it.
Bytes that selective checkpointing saves lie in a cache of torch's own, where hooks do not look.)
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_longctx.plan.core.settings import GENERIC_CPU, ClusterSpec
from hf_longctx.plan.core.types import Chunk, GroupShape, LayerPolicy, Span
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.memory.layer import LayerBytes, Load
from hf_longctx.plan.memory.saved_tensors import plain_layer_bytes
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.policies.fill import MemoryLimits, choose_policy
from hf_longctx.plan.policies.slots import layer_slots
from hf_longctx.recipes.bench.one_document import (
    PlannedDocument,
    checkpointed_layer_bytes,
    document_plan,
    keep_attention,
    keep_attention_by_trl,
    largest_error,
    plain_saved_bytes,
    plain_step,
    predicted_bytes,
    replayed,
    selective_layer_bytes,
)

THREADS = 2
CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 1 << 17,
    "tie_word_embeddings": False,
}
BASELINE = "HF checkpointing"
SELECTIVE = "torch selective", "TRL selective"
JUDGED = "ours, tiles"
ROOMY = "ours, more kept"
# halvings of the room in the search for policies that fit it
_BISECTIONS = 12


@dataclass(frozen=True)
class Method:
    """One way to run the document: its step, the bytes it holds for backward, and the predicted bytes."""

    name: str
    model: LlamaForCausalLM
    step: Callable[[], Tensor]
    saved_bytes: Callable[[], int]
    predicted_bytes: int


@dataclass(frozen=True)
class Result:
    """Measurements of one method at one length. ratios: seconds of checkpointing over the method's own, round by round."""

    method: str
    num_tokens: int
    step_s: list[float]
    ratios: list[float]
    peak_bytes: int
    saved_bytes: int
    predicted_bytes: int
    gradient_error: float

    @property
    def median_ratio(self) -> float:
        return median(self.ratios)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table per length; fails if a requirement is not met."""
    options = parse(arguments)
    num_threads = 1 if options.cpu_seconds else THREADS
    torch.set_num_threads(num_threads)
    # transformers warns about a name that is deprecated in its newest version, but the only one that all versions have
    warnings.filterwarnings("ignore", category=FutureWarning)
    print(
        f"{CONFIG['num_hidden_layers']} layers, fp32, {num_threads} thread(s), torch {torch.__version__}, "
        f"transformers {transformers.__version__}, forward + backward, {'CPU' if options.cpu_seconds else 'wall'} seconds"
    )
    now_s = time.process_time if options.cpu_seconds else time.perf_counter
    found = (measure(length, options.rounds, options.tile_tokens, now_s) for length in options.lengths)
    results = [result for each in found for result in each]
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    failures = missed(results, dict(options.require), options.require_round, options.require_peak)
    failures += slower_than_selective(results, options.require_selective)
    if failures:
        raise SystemExit("\n".join(failures))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 16384, 32768], help="tokens of the document")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one that does not (default: 5)")
    parser.add_argument("--tile-tokens", type=int, default=2048, help="tokens of a tile, for methods with tiles (default: 2048)")
    parser.add_argument("--cpu-seconds", action="store_true", help="one thread, and seconds of this process on a CPU")
    parser.add_argument("--json", type=Path, default=None, help="also write the results to this file")
    parser.add_argument("--require", nargs="+", type=length_and_ratio, default=[], metavar="LENGTH:RATIO",
                        help="fail unless ours is this many times as fast as checkpointing at this length (median)")  # fmt: skip
    parser.add_argument("--require-round", type=float, default=0.0, metavar="RATIO",
                        help="fail unless ours is this many times as fast as checkpointing in every round")  # fmt: skip
    parser.add_argument("--require-peak", type=float, default=None, metavar="SHARE",
                        help="fail if ours takes more than this share of checkpointing's peak memory")  # fmt: skip
    parser.add_argument("--require-selective", type=float, default=0.0, metavar="RATIO",
                        help="fail unless ours is this many times as fast as the faster selective checkpointing (median), at no "
                        "more peak memory")  # fmt: skip
    return parser.parse_args(arguments)


def length_and_ratio(text: str) -> tuple[int, float]:
    """Parses a requirement such as `8192:1.15`."""
    length, _, ratio = text.partition(":")
    return int(length), float(ratio)


def build() -> LlamaForCausalLM:
    """Builds the model, with the same weights at every call."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**CONFIG, attn_implementation="sdpa")).train()


def methods(num_tokens: int, tile_tokens: int) -> list[Method]:
    """Builds all methods: plain, checkpointed, selective, then ours, of which `--require` judges the first."""
    ids_1T = token_ids(num_tokens)
    spec = ModelSpec.from_config(build().config.to_dict())
    found = []
    for name, token_bytes in (("plain HF", plain_layer_bytes(spec)), (BASELINE, checkpointed_layer_bytes(spec))):
        model = build()
        if name == BASELINE:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        found.append(Method(name, model, *of_plain(model, ids_1T), token_bytes * spec.num_layers * num_tokens))
    for name, keep in zip(SELECTIVE, (keep_attention, keep_attention_by_trl), strict=True):
        if name.startswith("TRL") and importlib.util.find_spec("trl") is None:
            continue
        model = build()
        keep(model)
        predicted = selective_layer_bytes(spec, model.dtype.itemsize) * spec.num_layers * num_tokens
        found.append(Method(name, model, of_plain(model, ids_1T)[0], lambda: 0, predicted))
    for name, tile in ((JUDGED, tile_tokens), ("ours, no tiles", 0)):
        found.append(of_plan(name, ids_1T, (replayed(),) * spec.num_layers, tile))
    return found


def of_plan(name: str, ids_1T: Tensor, layers: tuple[LayerPolicy, ...], tile_tokens: int) -> Method:
    """Builds ours under these policies."""
    model = build()
    spec, plan = ModelSpec.from_config(model.config.to_dict()), document_plan(ids_1T.shape[1], layers, tile_tokens)
    document = PlannedDocument.of(model, ids_1T, plan)
    return Method(name, model, document.step, document.saved_bytes, sum(predicted_bytes(plan, spec)))


def with_more_room(lean: Method, spare_bytes: int, num_tokens: int, tile_tokens: int) -> Method:
    """Builds ours with the policies that the planner chooses if it may keep `spare_bytes` more than `lean`."""
    spec, cluster = ModelSpec.from_config(lean.model.config.to_dict()), ClusterSpec(1, 1, GENERIC_CPU)
    costs = CostModel(spec, cluster, default_coefficients(spec, cluster))
    slots = layer_slots(costs, Chunk(0, (Span(0, 0, num_tokens),)), GroupShape(1))
    load, room_bytes = Load.document(num_tokens, spec.num_layers), lean.predicted_bytes + max(0, spare_bytes)

    def kept_within(limit_bytes: float) -> tuple[tuple[LayerPolicy, ...], int]:
        """Policies of the program within this limit, and the bytes that layers hold under them."""
        choice = choose_policy(slots, MemoryLimits(limit_bytes, 0.0, 1.0))
        layers = tuple(LayerPolicy(shares) for shares in choice.shares)
        return layers, sum(LayerBytes(spec, load, layer, tile_tokens).held for layer in layers)

    # the program does not know that torch saves expanded keys and values where a layer keeps everything
    fits, over_bytes = lean.predicted_bytes, room_bytes
    if kept_within(room_bytes)[1] <= room_bytes:
        fits = room_bytes
    for _ in range(_BISECTIONS if fits < room_bytes else 0):
        middle = (fits + over_bytes) // 2
        if kept_within(middle)[1] <= room_bytes:
            fits = middle
        else:
            over_bytes = middle
    layers, held_bytes = kept_within(fits)
    return replace(of_plan(ROOMY, token_ids(num_tokens), layers, tile_tokens), predicted_bytes=held_bytes)


def token_ids(num_tokens: int) -> Tensor:
    return torch.randint(0, CONFIG["vocab_size"], (1, num_tokens), generator=torch.Generator().manual_seed(1))


def of_plain(model: LlamaForCausalLM, ids_1T: Tensor) -> tuple[Callable[[], Tensor], Callable[[], int]]:
    return (lambda: plain_step(model, ids_1T)), (lambda: plain_saved_bytes(model, ids_1T))


def measure(num_tokens: int, num_rounds: int, tile_tokens: int, now_s: Callable[[], float]) -> list[Result]:
    """Measures all methods at one length and prints their table."""
    plain, *rest = methods(num_tokens, tile_tokens)
    # one run of plain Hugging Face gives the expected gradients; its time is not compared
    plain_s, plain_peak = timed_step(plain, now_s)
    expected = [parameter.grad for parameter in plain.model.parameters()]
    errors, first_peaks = {plain.name: 0.0}, {}

    def try_out(method: Method) -> None:
        """Runs a method in the round that does not count, which compares gradients."""
        _, first_peaks[method.name] = timed_step(method, now_s)
        errors[method.name] = largest_error([p.grad for p in method.model.parameters()], expected)
        method.model.zero_grad(set_to_none=True)

    for method in rest:
        try_out(method)
    spare_bytes = min(first_peaks[name] for name in SELECTIVE if name in first_peaks) - first_peaks[JUDGED]
    lean = next(method for method in rest if method.name == JUDGED)
    rest.append(with_more_room(lean, spare_bytes, num_tokens, tile_tokens))
    try_out(rest[-1])
    seconds: dict[str, list[float]] = {method.name: [] for method in rest}
    peaks: dict[str, list[int]] = {method.name: [] for method in rest}
    for index in range(num_rounds):
        for method in reversed(rest) if index % 2 else rest:
            step_s, peak_bytes = timed_step(method, now_s)
            seconds[method.name].append(step_s)
            peaks[method.name].append(peak_bytes)
            method.model.zero_grad(set_to_none=True)
    seconds[plain.name], peaks[plain.name] = [plain_s], [plain_peak]
    results = []
    for method in (plain, *rest):
        base = seconds[BASELINE] if method is not plain else [median(seconds[BASELINE])]
        ratios = [theirs / own for theirs, own in zip(base, seconds[method.name], strict=True)]
        counted = (int(median(peaks[method.name])), method.saved_bytes(), method.predicted_bytes, errors[method.name])
        results.append(Result(method.name, num_tokens, seconds[method.name], ratios, *counted))
    print_table(results, num_rounds)
    print_beside_selective(results)
    return results


def timed_step(method: Method, now_s: Callable[[], float]) -> tuple[float, int]:
    """Runs one step; returns (seconds by that clock, peak bytes of resident memory above the start)."""
    gc.collect()
    # return freed memory to the system, or it would count as resident from the start
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    start_bytes = status_bytes("VmRSS")
    start_s = now_s()
    method.step()
    step_s = now_s() - start_s
    return step_s, status_bytes("VmHWM") - start_bytes


def status_bytes(field: str) -> int:
    """A memory size of this process in bytes (the kernel reports KiB)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def print_table(results: list[Result], num_rounds: int) -> None:
    num_tokens = results[0].num_tokens
    baseline = next(result for result in results if result.method == BASELINE)
    print(f"\n{num_tokens} tokens, {num_rounds} rounds")
    print(
        f"{'method':18s} {'median s':>9s} {'min':>7s} {'max':>7s} {'ratio':>7s} {'of rounds':>14s} {'peak MiB':>9s} "
        f"{'of HF':>6s} {'saved B/token':>14s} {'predicted':>10s} {'gradient':>9s}"
    )
    for result in results:
        rounds = f"{min(result.ratios):.3f}..{max(result.ratios):.3f}"
        print(
            f"{result.method:18s} {median(result.step_s):9.3f} {min(result.step_s):7.3f} {max(result.step_s):7.3f} "
            f"{result.median_ratio:6.3f}x {rounds:>14s} {result.peak_bytes / 2**20:9.0f} "
            f"{result.peak_bytes / baseline.peak_bytes:6.0%} {result.saved_bytes / num_tokens:14.1f} "
            f"{result.predicted_bytes / num_tokens:10.1f} {result.gradient_error:9.1e}",
            flush=True,
        )


def print_beside_selective(results: list[Result]) -> None:
    for ours in (result for result in results if result.method in (JUDGED, ROOMY)):
        for other in (result for result in results if result.method in SELECTIVE):
            ratios = [theirs / own for theirs, own in zip(other.step_s, ours.step_s, strict=True)]
            print(
                f"{ours.method}: {median(ratios):.3f} times as fast as {other.method} ({min(ratios):.3f} to {max(ratios):.3f}), "
                f"{ours.peak_bytes / other.peak_bytes:.0%} of its peak",
                flush=True,
            )


def missed(results: list[Result], ratios: dict[int, float], round_ratio: float, peak_share: float | None) -> list[str]:
    """Lists the requirements that the judged method does not meet."""
    failures = []
    for num_tokens in dict.fromkeys(result.num_tokens for result in results):
        baseline, ours = (r for r in results if r.num_tokens == num_tokens and r.method in (BASELINE, JUDGED))
        found = {
            "median ratio": (ours.median_ratio, ratios.get(num_tokens, 0.0)),
            "ratio of the worst round": (min(ours.ratios), round_ratio),
        }
        failures += [
            f"{num_tokens} tokens: {name} {value:.3f}, required {least}"
            for name, (value, least) in found.items()
            if value < least
        ]
        share = ours.peak_bytes / baseline.peak_bytes
        if peak_share is not None and share > peak_share:
            failures.append(f"{num_tokens} tokens: {share:.2f} of checkpointing's peak memory, required at most {peak_share}")
    failures += [
        f"no run of {n} tokens, for which a ratio is required" for n in ratios if n not in {r.num_tokens for r in results}
    ]
    return failures


def slower_than_selective(results: list[Result], required: float) -> list[str]:
    """Lists lengths at which ours is not `required` times as fast as selective checkpointing, or needs more memory."""
    failures = []
    for num_tokens in dict.fromkeys(result.num_tokens for result in results) if required else ():
        here = [result for result in results if result.num_tokens == num_tokens]
        ours = next(result for result in here if result.method == ROOMY)
        for other in (result for result in here if result.method in SELECTIVE):
            ratio = median(theirs / own for theirs, own in zip(other.step_s, ours.step_s, strict=True))
            if ratio < required:
                failures.append(f"{num_tokens} tokens: {ratio:.3f} times as fast as {other.method}, required {required}")
            if ours.peak_bytes > other.peak_bytes:
                more = f"{ours.peak_bytes / 2**20:.0f} MiB at the peak, {other.method} {other.peak_bytes / 2**20:.0f}"
                failures.append(f"{num_tokens} tokens: {more}")
    return failures


if __name__ == "__main__":
    main()
