"""Slices whose earlier keys and values are leaves of autograd: the oracle that plans of slices are compared with.

This is the obvious way, and it shares no code with the package. A later slice attends to detached copies of earlier keys and
values, autograd computes the gradients of the copies, and the backward of the slice that made them starts from these gradients
too. The package does otherwise, because this way concatenates every prefix and cannot be checkpointed reentrantly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.sliced_plans import Rows
from helpers.ranks.rank_steps import rank_inputs
from torch import Tensor
from transformers import AttentionInterface

from hf_longctx.plan.core.types import Span, StepPlan
from hf_longctx.runtime.execution.executor import no_mask


@dataclass
class _LeafChunk:
    """A chunk as the oracle's attention sees it; all chunks share `book`, which holds the leaves by (layer, sequence)."""

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
        # checkpointing runs this again, but the leaves that later slices saw must stay
        if span.start not in leaves:
            leaves[span.start] = (k.detach().requires_grad_(), v.detach().requires_grad_())
            chunk.roots += zip((k, v), leaves[span.start], strict=True)
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def leaf_step(case: ModelCase, plan: StepPlan, rows: Rows, checkpointed: bool = False) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a one-rank plan, computed with leaves."""
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
