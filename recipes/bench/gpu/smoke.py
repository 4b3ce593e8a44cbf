"""Checks every runtime path on one CUDA GPU, in bf16 against fp32 references; prints one table in at most four minutes.

    python recipes/bench/gpu/smoke.py [--tokens 2048] [--only WORD ...] [--budget-s 230] [--json FILE] [--toy]

The rows are attention (packed documents, one by one and in one call, every tile backend, tiles of a ring, slices), kernels,
copies on side streams, the pinned host memory, a planned step against the plain model, activation policies on whole documents
and on slices, one policy under torch's CUDA sanitizer, tiles at the limits of kernels, the loss in tiles, and two tiny training
runs. Rows come as they are done, to `--json` as one JSON object per line. Exits with status 1 if a row fails or the time is up
before all have run; without CUDA everything is skipped, with the reason, unless `--toy` runs what a CPU can at small sizes.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import datasets
import torch
from torch import Tensor
from torch.utils.checkpoint import set_checkpoint_early_stop
from transformers import TrainingArguments

from hf_longctx import LongContextConfig, LongContextTrainer
from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.kernels.merge_attention import accumulate_attention_
from hf_longctx.plan.core.settings import GENERIC_GPU, ClusterSpec
from hf_longctx.plan.core.sharding import HeadShare, block_pieces
from hf_longctx.plan.core.types import Chunk, GroupShape, Span
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.groups.placement import place_layout
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.planner import build_plan
from hf_longctx.recipes.bench.gpu.packed_reference import packed_causal_attention
from hf_longctx.recipes.bench.gpu.rows import append_row, end_with_children, is_wanted
from hf_longctx.recipes.bench.gpu.smoke_kernels import kernel_checks, random_heads
from hf_longctx.recipes.bench.gpu.smoke_memory import (
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    POLICIES,
    POLICY_TOLERANCE,
    Check,
    check_policy,
    document_model,
    memory_checks,
)
from hf_longctx.recipes.bench.one_document import largest_error
from hf_longctx.runtime.attention.chunk import ChunkAttention, Document, documents_of
from hf_longctx.runtime.attention.context import visible_tiles
from hf_longctx.runtime.attention.heads import KVReaders
from hf_longctx.runtime.attention.kv_book import KVBook, Slice
from hf_longctx.runtime.attention.rows import AttentionRule
from hf_longctx.runtime.attention.sequence_parallel import packed_attention
from hf_longctx.runtime.core.chunk_inputs import ChunkInputs
from hf_longctx.runtime.core.loss import summed_cross_entropy
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.process_groups import GroupPool
from hf_longctx.runtime.tiles.packs import PackBounds, takes_packs
from hf_longctx.runtime.tiles.patterns import CAUSAL, AttentionPattern
from hf_longctx.runtime.tiles.plain import Scores, TileInputs
from hf_longctx.runtime.tiles.stacks import StackChecks
from hf_longctx.runtime.tiles.tile import attention_backend, tile_backward, tile_forward

# error allowed: bf16 keeps 8 bits, so every rounding adds up to 2^-9, and gradients pass through several roundings
TOLERANCE = 2e-2
SCALE = HEAD_DIM**-0.5
WINDOW = AttentionPattern(window=100)
# words in names of rows that no CPU can run
ON_CUDA = ("in one call", "side stream")


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    error: float
    tolerance: float
    seconds: float
    note: str = ""

    @property
    def is_good(self) -> bool:
        return self.error <= self.tolerance

    def __str__(self) -> str:
        state = "ok" if self.is_good else "FAILED"
        error = f"error {self.error:8.1e} (at most {self.tolerance:.0e})"
        return f"{self.name:44s} {state:7s} {error}  {self.seconds:6.2f} s  {self.note}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    options = parse(arguments)
    if options.sanitised:
        print(sanitised_error())
        return 0
    if not (options.toy or torch.cuda.is_available()):
        print("skipped: torch sees no CUDA device, and all rows need one")
        return 0
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, toy sizes"
    print(f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {key: check for key, check in checks(options.tokens, device).items() if is_wanted(key, options.only)}
    if device.type == "cpu":
        found = {key: check for key, check in found.items() if not any(word in key for word in ON_CUDA)}
    deadline_s, rows = time.monotonic() + options.budget_s, []
    for key, check in found.items():
        if time.monotonic() > deadline_s:
            break
        rows.append(timed(key, *check))
        if options.json is not None:
            append_row(options.json, {**asdict(rows[-1]), "is_good": rows[-1].is_good})
    failed, left = sum(not row.is_good for row in rows), len(found) - len(rows)
    print(f"{len(rows) - failed} of {len(found)} rows are ok{f', {left} were not run: the time is up' if left else ''}")
    return 1 if failed or left else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=2048, help="tokens in the attention rows (default: 2048)")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="rows whose names have one of these words")
    parser.add_argument("--budget-s", type=float, default=230.0, help="start no row after so many seconds (default: 230)")
    parser.add_argument("--json", type=Path, default=None, help="also append each row to this file, as soon as it is done")
    parser.add_argument("--toy", action="store_true", help="without CUDA, run the rows that a CPU can")
    parser.add_argument("--sanitised", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def checks(tokens: int, device: torch.device) -> dict[str, Check]:
    """All rows: name -> (function that returns the error and a note, largest error allowed)."""
    return {
        "packed attention of torch, fp32": (partial(check_packed, tokens, device), TOLERANCE),
        "short documents in one call": (partial(check_runs, tokens, device, CAUSAL), TOLERANCE),
        "short documents in one call, with a window": (partial(check_runs, tokens, device, WINDOW), TOLERANCE),
        "ring of 2, its tiles in one process": (partial(check_tiles, tokens, device, 2), TOLERANCE),
        "ring of 4, its tiles in one process": (partial(check_tiles, tokens, device, 4), TOLERANCE),
        "slices, keys and values in the K/V book": (partial(check_slices, tokens, device), TOLERANCE),
        "inputs copied on a side stream": (partial(check_copies, tokens), 0.0),
        "planned step, bf16 weights, fp32 gradients": (partial(check_step, device), 0.1),
        "training, 20 steps, bf16 autocast": (partial(check_training, device), 0.9),
        "policy under torch's CUDA sanitizer": (partial(check_sanitised, device), POLICY_TOLERANCE),
        **memory_checks(tokens, device, TOLERANCE),
        # last, since packages for scans try many configurations before the first
        **kernel_checks(tokens, device, TOLERANCE),
    }


def timed(name: str, check: Callable[[], tuple[float, str]], tolerance: float) -> Row:
    """Runs one check and prints its row; an exception makes the row fail."""
    start = time.perf_counter()
    try:
        error, note = check()
    # a failure in one row must not stop the others
    except Exception as failure:
        error, note = float("inf"), f"{type(failure).__name__}: {failure}".split("\n")[0]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    row = Row(name, error, tolerance, time.perf_counter() - start, note)
    print(row, flush=True)
    return row


def documents(tokens: int) -> tuple[int, ...]:
    """Boundaries of three documents of unequal length."""
    return (0, tokens // 7, tokens // 2, tokens)


def reference_attention(tokens: int, device: torch.device) -> list[Tensor]:
    """Output and gradients of q, k and v in fp32, computed with plain matrices."""
    gradient, *inputs = random_heads(tokens, device, torch.float32)
    leaves = [x.requires_grad_() for x in inputs]
    out = packed_causal_attention(*leaves, torch.tensor(documents(tokens)), SCALE)
    out.backward(gradient)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def check_packed(tokens: int, device: torch.device) -> tuple[float, str]:
    """Checks packed documents in fp32, which torch's scaled_dot_product_attention computes one by one."""
    gradient, *inputs = random_heads(tokens, device, torch.float32)
    leaves = [x.requires_grad_() for x in inputs]
    readers = KVReaders.of(HeadShare(0, NUM_HEADS, 0, NUM_KV_HEADS), NUM_HEADS // NUM_KV_HEADS, device)
    out = packed_attention(*(x.unsqueeze(0) for x in leaves), readers, SCALE, documents(tokens))
    out.backward(gradient.transpose(0, 1).unsqueeze(0))
    found = [out.detach()[0].transpose(0, 1), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    return largest_error(found, reference_attention(tokens, device)), ""


def check_runs(tokens: int, device: torch.device, pattern: AttentionPattern) -> tuple[float, str]:
    """Checks documents that share a call, one of them of a single token, against tiles of each document in fp32."""
    readers = KVReaders.of(HeadShare(0, NUM_HEADS, 0, NUM_KV_HEADS), NUM_HEADS // NUM_KV_HEADS, device)
    bounds = (0, 1, *documents(tokens)[1:])
    results = []
    for dtype, known in ((torch.float32, None), (torch.bfloat16, PackBounds())):
        gradient, *inputs = random_heads(tokens, device, dtype)
        leaves = [x.requires_grad_() for x in inputs]
        rule = AttentionRule(readers, Scores(SCALE), pattern, bounds=known, stacks=StackChecks())
        attend = ChunkAttention(rule, documents_of(bounds, ()), None, KVBook(), "layer")
        out = attend(*leaves)
        out.backward(gradient.transpose(0, 1))
        results.append([out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    expected, found = results
    note = "" if takes_packs(device, torch.bfloat16, HEAD_DIM, is_capped=False) else "plans do not use it on this device"
    return largest_error(found, expected), note


def check_tiles(tokens: int, device: torch.device, num_blocks: int) -> tuple[float, str]:
    """Checks all blocks of a ring one after the other: their tiles, the merge, and the backward from merged results."""
    gradient, q, k, v = random_heads(tokens, device)
    bounds = documents(tokens)
    chunk = Chunk(0, tuple(Span(i, 0, stop - start) for i, (start, stop) in enumerate(pairwise(bounds))))
    blocks = block_pieces(chunk, GroupShape(num_blocks))
    # index in the chunk of every token of a block, in the order of the block's pieces
    places = [
        torch.cat([torch.arange(bounds[p.document] + p.start, bounds[p.document] + p.stop) for p in block]).to(device)
        for block in blocks
    ]
    readers = KVReaders.of(HeadShare(0, NUM_HEADS, 0, NUM_KV_HEADS), NUM_HEADS // NUM_KV_HEADS, device)
    out, dq = torch.zeros_like(q), torch.zeros_like(q, dtype=torch.float32)
    dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
    for mine, own in enumerate(places):
        merged = torch.empty(NUM_HEADS, len(own), HEAD_DIM, device=device)
        lse = torch.full((NUM_HEADS, len(own)), float("-inf"), device=device)
        tiles = [
            (s, query.tokens, key.tokens, query.start == key.start)
            for s in range(num_blocks)
            for query, key in visible_tiles(blocks[mine], blocks[s])
        ]
        operands = [
            (readers.gather(k[:, places[s]][:, keys]).contiguous(), readers.gather(v[:, places[s]][:, keys]).contiguous())
            for s, _, keys, _ in tiles
        ]
        for (_, queries, _, causal), (key, value) in zip(tiles, operands, strict=True):
            tile = TileInputs(q[:, own][:, queries].contiguous(), key, value, Scores(SCALE), causal)
            accumulate_attention_(merged[:, queries], lse[:, queries], *tile_forward(tile))
        out[:, own] = merged.to(out.dtype)
        for (s, queries, keys, causal), (key, value) in zip(tiles, operands, strict=True):
            rows = own[queries]
            tile = TileInputs(q[:, rows], key, value, Scores(SCALE), causal)
            gradients = tile_backward(gradient[:, rows], tile, out[:, rows], lse[:, queries])
            dq[:, rows] += gradients[0]
            for total, part in ((dk, gradients[1]), (dv, gradients[2])):
                total.index_add_(1, places[s][keys], part.float())
    return largest_error([out, dq, dk, dv], reference_attention(tokens, device)), attention_backend(device, q.dtype, HEAD_DIM)


def check_slices(tokens: int, device: torch.device) -> tuple[float, str]:
    """Checks each document in three slices: forward of all, then backward of all, last slice first."""
    gradient, *inputs = random_heads(tokens, device)
    leaves = [x.requires_grad_() for x in inputs]
    readers = KVReaders.of(HeadShare(0, NUM_HEADS, 0, NUM_KV_HEADS), NUM_HEADS // NUM_KV_HEADS, device)
    kv_book, outputs = KVBook(), []
    for sequence, (first, end) in enumerate(pairwise(documents(tokens))):
        length = end - first
        for start, stop in pairwise((0, length // 2, length // 2 + 1, length)):
            q, k, v = (x[:, first + start : first + stop] for x in leaves)
            document = Document(0, stop - start, Slice(0, sequence, start, stop, length))
            attend = ChunkAttention(AttentionRule(readers, Scores(SCALE)), (document,), None, kv_book, "layer")
            outputs.append(attend(q, k, v))
    gradients = gradient.transpose(0, 1).split([out.shape[0] for out in outputs])
    for out, out_gradient in reversed(list(zip(outputs, gradients, strict=True))):
        out.backward(out_gradient)
    found = [torch.cat(outputs).detach().transpose(0, 1), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    note = f"{kv_book.take_peak()} bytes in the K/V book, {kv_book.num_bytes} left"
    return largest_error(found, reference_attention(tokens, device)), note


def check_copies(tokens: int) -> tuple[float, str]:
    """Checks pinned inputs that are copied while matrix products keep the default stream busy."""
    busy = torch.randn(2 * tokens, 2 * tokens, device="cuda")
    shards = [ChunkInputs(*(torch.randint(0, 1000, (1, 2 * tokens)) for _ in range(3))) for _ in range(8)]
    pinned = [shard.pin_memory() for shard in shards]
    side = torch.cuda.Stream()
    for _ in range(20):
        busy = busy @ busy * 1e-3
    with torch.cuda.stream(side):
        copied = [shard.to(torch.device("cuda")) for shard in pinned]
    torch.cuda.current_stream().wait_stream(side)
    wrong = sum(float((c.input_ids.cpu() != s.input_ids).sum()) for c, s in zip(copied, shards, strict=True))
    return wrong, "values that differ"


def check_step(device: torch.device) -> tuple[float, str]:
    """Checks the gradients of a planned step of three micro-batches against the plain model in fp32."""
    lengths = [300, 150, 40, 500]
    rows = [torch.randint(0, 512, (1, n), generator=torch.Generator().manual_seed(n)) for n in lengths]
    labels = [torch.cat([row[:, 1:], torch.full((1, 1), -100)], dim=1) for row in rows]
    count = sum(n - 1 for n in lengths)
    plain = document_model(device, torch.float32)
    for row, label in zip(rows, labels, strict=True):
        (summed_cross_entropy(plain(input_ids=row.to(device), use_cache=False).logits, label.to(device)) / count).backward()
    model = document_model(device, torch.bfloat16)
    patch_model(model)
    spec, cluster = ModelSpec.from_config(model.config.to_dict(), 2), ClusterSpec(1, 1, GENERIC_GPU)
    costs = CostModel(spec, cluster, default_coefficients(spec, cluster))
    layout = [[(1, (3,))], [(1, (0, 1))], [(1, (2,))]]
    plan = build_plan(0, lengths, place_layout(layout, 1, 1, node_aligned=True), {1: GroupShape(1)}, costs).for_rank(0)
    inputs = [
        [
            ChunkInputs(
                torch.cat([rows[span.sequence] for span in chunk.spans], dim=1),
                torch.cat([torch.arange(span.num_tokens)[None] for span in chunk.spans], dim=1),
                torch.cat([labels[span.sequence] for span in chunk.spans], dim=1),
            )
            for chunk in group.chunks
        ]
        for group, _ in plan.rounds
    ]
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), GroupPool((1,), timeout_s=60.0), device)
    executor.run(plan, inputs, count)
    found = [p.grad for p in model.parameters() if p.grad is not None]
    expected = [p.grad for p in plain.parameters() if p.grad is not None]
    return largest_error(found, expected), f"{len(found)} gradients"


def check_sanitised(device: torch.device) -> tuple[float, str]:
    """Checks a policy in a process with torch's CUDA sanitizer, which fails if two streams use a tensor without an order."""
    if device.type != "cuda":
        return 0.0, "needs CUDA"
    command = [sys.executable, str(Path(__file__).resolve()), "--sanitised"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return float(done.stdout.split()[-1]), "in a process of its own"


def sanitised_error() -> float:
    """Error of one policy under the sanitizer, whose hooks stay in the process once it is imported."""
    sanitizer = importlib.import_module("torch.cuda._sanitizer")
    # its hooks fail while the exception that ends a checkpoint early is in flight
    with sanitizer.CUDASanitizerDispatchMode(), set_checkpoint_early_stop(False):
        error, _ = check_policy(512, torch.device("cuda"), *POLICIES["four slices, attention kept on the host"])
    return error


def check_training(device: torch.device) -> tuple[float, str]:
    """Trains on one document; the error is the last loss over the first."""
    row = torch.randint(0, 512, (240,), generator=torch.Generator().manual_seed(1)).tolist()
    data = datasets.Dataset.from_dict({"input_ids": [row[: 40 * (i + 1)] for i in range(6)] * 20})
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=20, per_device_train_batch_size=6, bf16=True, learning_rate=1e-3, logging_steps=1, report_to="none",
            save_strategy="no", disable_tqdm=True, use_cpu=device.type == "cpu",
        )  # fmt: skip
        config = LongContextConfig(report_steps=False, timeline_steps=0, host_gib=0.1)
        model = document_model(torch.device("cpu"), torch.float32)
        trainer = LongContextTrainer(model=model, args=args, train_dataset=data, longctx_config=config)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses[-1] / losses[0], f"loss {losses[0]:.2f} to {losses[-1]:.2f}, the error is their ratio"


if __name__ == "__main__":
    end_with_children()
    sys.exit(main())
