"""Plans of slices by hand and at random, and the leaf oracle: the same plans with earlier keys and values as leaves of autograd.

The oracle is the obvious way and none of the package's: every later slice attends to detached copies, autograd fills the
gradients of these, and the backward of the slice that made them starts from them too. It concatenates every prefix and
cannot be checkpointed reentrantly, so it stays here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from helpers.models.models import ModelCase, build_model
from helpers.plans.steps import plan_of, rank_inputs
from hypothesis import strategies as st
from torch import Tensor
from transformers import AttentionInterface

from hf_longctx.plan.core.types import Action, Chunk, MicroBatch, Span, StepPlan
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.runtime.execution.executor import no_mask

Rows = list[dict[str, list[int]]]
# chunks of (sequence, start, stop)
Chunks = Sequence[Sequence[tuple[int, int, int]]]


def cut(sequence: int, sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Slices of these sizes that make up a sequence."""
    return [(sequence, start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


def forward_then_back(num_chunks: int) -> str:
    """All chunks forward, then all backward in reverse."""
    return " ".join([f"0F{i}" for i in range(num_chunks)] + [f"0B{i}" for i in reversed(range(num_chunks))])


def sliced_plan(
    lengths: list[int], chunks: Chunks, words: str = "", num_ranks: int = 1, validated: bool = True, **settings: Any
) -> StepPlan:
    """One micro-batch of one group of all ranks with these chunks, run in the order of `words` (forward, then back)."""
    plan = plan_of([[(num_ranks, tuple(range(len(lengths))))]], lengths, num_ranks, **settings)
    (group,) = plan.micro_batches[0].groups
    actions = tuple(map(Action.parse, (words or forward_then_back(len(chunks))).split()))
    group = replace(
        group,
        chunks=tuple(Chunk(index, tuple(Span(*span) for span in spans)) for index, spans in enumerate(chunks)),
        stages=(replace(group.stages[0], actions=actions),),
    )
    plan = replace(plan, micro_batches=(MicroBatch((group,)),))
    return validate_plan(plan) if validated else plan


@st.composite
def random_slicings(draw: st.DrawFn) -> tuple[list[int], list[list[tuple[int, int, int]]], str]:
    """Random lengths, cuts, chunks (slices alone or in front of whole sequences) and a random order that slices allow."""
    # one token sees only itself, so that queries and keys have no gradient but noise: one sequence is longer
    lengths = [draw(st.integers(8, 24)), *draw(st.lists(st.integers(1, 24), max_size=3))]
    waiting = []
    for sequence, length in enumerate(lengths):
        bounds = sorted({0, length, *draw(st.lists(st.integers(1, length), max_size=4))})
        waiting.append([(sequence, start, stop) for start, stop in pairwise(bounds)])
    chunks: list[list[tuple[int, int, int]]] = []
    while any(waiting):
        span = draw(st.sampled_from([spans for spans in waiting if spans])).pop(0)
        is_whole = (span[1], span[2]) == (0, lengths[span[0]])
        if is_whole and chunks and draw(st.booleans()):
            chunks[-1].append(span)
        else:
            chunks.append([span])
    return lengths, chunks, _random_order(draw, chunks)


def _random_order(draw: st.DrawFn, chunks: list[list[tuple[int, int, int]]]) -> str:
    """Any order in which slices run forward in order and backward in reverse."""
    sequences = [{span[0] for span in spans} for spans in chunks]
    num_chunks = len(chunks)
    words: list[str] = []
    while len(words) < 2 * num_chunks:
        ready = [
            (kind, chunk)
            for kind in "FB"
            for chunk in range(num_chunks)
            if f"0{kind}{chunk}" not in words
            and (kind == "F" or f"0F{chunk}" in words)
            and all(
                f"0{kind}{other}" in words
                for other in (range(chunk) if kind == "F" else range(chunk + 1, num_chunks))
                if sequences[other] & sequences[chunk]
            )
        ]
        kind, chunk = draw(st.sampled_from(ready))
        words.append(f"0{kind}{chunk}")
    return " ".join(words)


@dataclass
class _LeafChunk:
    """What the oracle's attention must know of a chunk; `book` belongs to all chunks: (layer, sequence) to its leaves."""

    spans: tuple[Span, ...]
    book: dict[tuple[int, int], dict[int, tuple[Tensor, Tensor]]]
    roots: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def _leaf_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    chunk: _LeafChunk = kwargs["leaf_chunk"]
    sizes = [span.num_tokens for span in chunk.spans]
    outputs = []
    for span, q, k, v in zip(chunk.spans, *(x.split(sizes, dim=2) for x in (query, key, value)), strict=True):
        leaves = chunk.book.setdefault((module.layer_idx, span.sequence), {})
        front = [leaves[start] for start in sorted(leaves) if start < span.start]
        keys, values = (torch.cat([*(pair[i] for pair in front), own], dim=2) for i, own in enumerate((k, v)))
        per_kv = query.shape[1] // key.shape[1]
        visible = torch.ones(span.num_tokens, span.stop, dtype=torch.bool).tril(span.start)
        expanded = (x.repeat_interleave(per_kv, dim=1) for x in (keys, values))
        outputs.append(F.scaled_dot_product_attention(q, *expanded, attn_mask=visible, scale=kwargs["scaling"]))
        # checkpointing runs this again: the leaves that later slices saw must stay
        if span.start not in leaves:
            leaves[span.start] = (k.detach().requires_grad_(), v.detach().requires_grad_())
            chunk.roots += zip((k, v), leaves[span.start], strict=True)
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def leaf_step(case: ModelCase, plan: StepPlan, rows: Rows, checkpointed: bool = False) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a one-rank plan by the leaf mechanism."""
    AttentionInterface.register("leaf_slices", _leaf_attention)
    model = build_model(case)
    model.set_attn_implementation("leaf_slices")
    if checkpointed:
        model.activation_checkpointing_enable({"use_reentrant": False})
    inputs = rank_inputs(plan, rows, 0)["chunks"]
    num_labels = max(sum(label != -100 for row in rows for label in row["labels"][1:]), 1)
    total = 0.0
    for number, (group, stage) in enumerate(plan.for_rank(0).rounds):
        book: dict[tuple[int, int], dict[int, tuple[Tensor, Tensor]]] = {}
        chunks = [_LeafChunk(chunk.spans, book) for chunk in group.chunks]
        losses: dict[int, Tensor] = {}
        for action in stage.actions:
            chunk, data = chunks[action.chunk], inputs[number][action.chunk]
            if action.kind == "F":
                fields = {"input_ids": data.input_ids, "position_ids": data.position_ids}
                logits = model(**fields, attention_mask=no_mask(torch.device("cpu")), use_cache=False, leaf_chunk=chunk).logits
                losses[action.chunk] = F.cross_entropy(logits[0], data.shift_labels[0], reduction="sum") / num_labels
                total += float(losses[action.chunk].detach())
            else:
                roots = [(made, leaf.grad) for made, leaf in chunk.roots if leaf.grad is not None]
                torch.autograd.backward(
                    [losses.pop(action.chunk), *(made for made, _ in roots)], [None, *(gradient for _, gradient in roots)]
                )
    return total, {name: p.grad.clone() for name, p in model.named_parameters()}
