"""Rings take no more memory than predicted, and not much less: what travels while a hop is computed is counted."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import transformers
from helpers.measures.allocations import measure
from helpers.plans.policies import offloading
from helpers.ranks.rank_steps import group_pool
from torch import Tensor

from hf_longctx.hf.models.attention import patch_model
from hf_longctx.hf.models.layers import layer_modules
from hf_longctx.plan.core.model_spec import ModelSpec
from hf_longctx.plan.core.types import ActivationPolicy, Chunk, SequenceGroup, Span
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.layer import Load
from hf_longctx.plan.memory.round_bytes import chunk_load
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.core.host_copies import PlainCopies
from hf_longctx.runtime.core.loss import summed_cross_entropy
from hf_longctx.runtime.execution.executor import no_mask

# keys and values are wide, so that they are most of what a rank holds
HIDDEN, INNER, HEADS, HEAD_DIM, VOCABULARY, LAYERS = 32, 32, 8, 32, 8, 2
TOKENS_PER_RANK = 512


def ring(degree: int) -> SequenceGroup:
    chunk = Chunk(0, (Span(0, 0, degree * TOKENS_PER_RANK),))
    return SequenceGroup(tuple(range(degree)), "ring", (chunk,), ())


def policy_of(is_recomputed: bool) -> ActivationPolicy | None:
    return ActivationPolicy(0, 0, (offloading(),) * LAYERS, 0) if is_recomputed else None


def measured_peaks(degree: int, is_recomputed: bool) -> tuple[int, int]:
    """Most bytes in the forward and in the backward of a second step on this rank."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        attn_implementation="sdpa",
        max_position_embeddings=degree * TOKENS_PER_RANK,
    )
    model = transformers.LlamaForCausalLM(config).train()
    patch_model(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    group, policy = ring(degree), policy_of(is_recomputed)
    context = group_pool().context(group, group.chunks[0])
    engine = None if policy is None else ActivationEngine(layer_modules(model), HostTier(2**20, PlainCopies()))
    ids, labels = (torch.randint(0, VOCABULARY, (1, TOKENS_PER_RANK)) for _ in range(2))
    positions = torch.cat([torch.arange(piece.start, piece.stop) for piece in context.ring.pieces])[None]
    inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": no_mask(ids.device), "use_cache": False}

    def forward() -> Tensor:
        activations = engine.begin(policy) if engine is not None and policy is not None else None
        with nullcontext() if activations is None else activations.running():
            logits = model(**inputs, return_dict=True, longctx=replace(context, activations=activations)).logits
        return summed_cross_entropy(logits, labels) / TOKENS_PER_RANK

    forward().backward()
    forward_peak, held, loss = measure(forward)
    backward_peak, _, _ = measure(loss.backward)
    return forward_peak, held + backward_peak


@pytest.mark.parametrize("is_recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("degree", [2, 3, 4])
def test_rings_take_the_bytes_that_are_predicted(ranks, degree: int, is_recomputed: bool) -> None:
    spec = ModelSpec(LAYERS, HIDDEN, INNER, HEADS, HEADS, HEAD_DIM, VOCABULARY, degree * TOKENS_PER_RANK, bytes_per_element=4)
    group = ring(degree)
    load = chunk_load(group, group.chunks[0], 0, Load(0, (), LAYERS, tiles_loss=False))
    found = ByteModel(spec).chunk(load, policy_of(is_recomputed))
    # token ids and labels exist before the step
    held = found.device - 16 * TOKENS_PER_RANK
    predicted = held + found.forward_workspace, held + found.backward_workspace
    for peaks in ranks(degree).run(measured_peaks, degree, is_recomputed):
        for expected, peak in zip(predicted, peaks, strict=True):
            assert 0.95 * peak <= expected <= 1.6 * peak
