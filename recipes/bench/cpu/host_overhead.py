"""Host seconds that a plan adds to every chunk: the executor against the bare model on chunks of a few tokens.

    python recipes/bench/cpu/host_overhead.py [--chunks 50] [--repeats 5]

Runs a tiny Llama on chunks so short that nearly all time is host work: forward and backward through `StepExecutor` (context,
clock, gradient sums) against the same calls of the plain model. Also times the layout of a pack of many documents on a large
group. Prints medians of alternating repeats, so that a busy machine disturbs both alike.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.settings import GENERIC_CPU, ClusterSpec
from hf_longctx.plan.core.sharding import block_pieces, rank_pieces
from hf_longctx.plan.core.types import Chunk, GroupShape, Span
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.groups.placement import place_layout
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.planner import build_plan
from hf_longctx.runtime.core.chunk_inputs import ChunkInputs
from hf_longctx.runtime.core.loss import summed_cross_entropy
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.process_groups import GroupPool

TOKENS = 8
LAYERS = 4


def main() -> None:
    """Prints one line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--chunks", type=int, default=50, help="chunks in a step (default: 50)")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of the executor and of the plain model (default: 5)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    planned, bare = steps(arguments.chunks)
    # not timed: the first calls include start-up
    planned(), bare()
    planned_s, bare_s = [], []
    for _ in range(arguments.repeats):
        planned_s.append(seconds(planned) / arguments.chunks)
        bare_s.append(seconds(bare) / arguments.chunks)
    overhead_us = (median(planned_s) - median(bare_s)) * 1e6
    print(f"forward and backward of a chunk of {TOKENS} tokens, {LAYERS} layers, CPU, one thread:")
    print(
        f"  plain model {median(bare_s) * 1e6:8.0f} us   executor {median(planned_s) * 1e6:8.0f} us   added {overhead_us:6.0f} us"
    )
    for documents in (1, 64, 1024):
        chunk = Chunk(0, tuple(Span(i, 0, 500) for i in range(documents)))
        for shape in (GroupShape(8, 8), GroupShape(8, 2), GroupShape(8)):
            layout_us = seconds(lambda chunk=chunk, shape=shape: (block_pieces(chunk, shape), rank_pieces(chunk, shape))) * 1e6
            print(f"  layout of {documents:5d} documents on 8 ranks, {shape.method:8s}{layout_us:8.0f} us")


def steps(num_chunks: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Returns two functions: a step of one-chunk micro-batches under the executor, and the same work on the plain model."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4, use_cache=False
    )
    model = LlamaForCausalLM(config)
    inputs = torch.randint(0, 64, (1, TOKENS))
    chunk = ChunkInputs(inputs, torch.arange(TOKENS)[None], inputs)

    def bare() -> None:
        for _ in range(num_chunks):
            logits = model(input_ids=chunk.input_ids, position_ids=chunk.position_ids, use_cache=False).logits
            summed_cross_entropy(logits, chunk.shift_labels).backward()

    planned_model = LlamaForCausalLM(config)
    patch_model(planned_model)
    spec = ModelSpec.from_config(config.to_dict())
    cluster = ClusterSpec(1, 1, GENERIC_CPU)
    costs = CostModel(spec, cluster, default_coefficients(spec, cluster))
    placed = place_layout([[(1, (i,))] for i in range(num_chunks)], 1, 1, node_aligned=True)
    plan = build_plan(0, [TOKENS] * num_chunks, placed, {1: GroupShape(1)}, costs).for_rank(0)
    pool = GroupPool((1,), timeout_s=60.0)
    executor = StepExecutor(whole_model(planned_model, num_attention_layers(planned_model)), pool, torch.device("cpu"))
    return (lambda: executor.run(plan, [[chunk]] * num_chunks, TOKENS * num_chunks)), bare


def seconds(function: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
