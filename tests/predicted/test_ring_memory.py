"""Groups take no more memory than predicted, and not much less: what travels while attention is computed is counted."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers
from helpers.measures.allocations import measure
from helpers.measures.late_copies import SlowlyLeaving
from helpers.plans.policies import offloading
from helpers.ranks.rank_steps import group_pool
from torch import Tensor

from hf_longctx.hf.models.layers import layer_modules
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.settings import GroupMethod
from hf_longctx.plan.core.types import ActivationPolicy, Chunk, SequenceGroup, Span
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.layer import Load
from hf_longctx.plan.memory.stage import chunk_load
from hf_longctx.plan.model import model_spec
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.attention.kv_book import KVBook
from hf_longctx.runtime.core.loss import summed_cross_entropy
from hf_longctx.runtime.execution.executor import no_mask

# keys and values are wide, so that they are most of what a rank holds
HIDDEN, INNER, HEADS, HEAD_DIM, VOCABULARY, LAYERS = 32, 32, 8, 32, 8, 2
TOKENS_PER_RANK = 512


def sharing(degree: int, num_slices: int = 1, method: GroupMethod = "ring") -> SequenceGroup:
    """A group with one document, in slices of equal size."""
    size = degree * TOKENS_PER_RANK
    chunks = tuple(Chunk(index, (Span(0, index * size, (index + 1) * size),)) for index in range(num_slices))
    return SequenceGroup(tuple(range(degree)), method, chunks, ())


def policy_of(is_recomputed: bool) -> ActivationPolicy | None:
    return ActivationPolicy(0, 0, (offloading(),) * LAYERS, 0) if is_recomputed else None


def measured_peaks(group: SequenceGroup, is_recomputed: bool, num_kv: int = HEADS) -> tuple[int, int]:
    """Most bytes in the forward and in the backward of the last slice, in a second step on this rank."""
    degree, num_slices = group.degree, len(group.chunks)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=num_kv,
        head_dim=HEAD_DIM,
        attn_implementation="sdpa",
        max_position_embeddings=num_slices * degree * TOKENS_PER_RANK,
    )
    model = transformers.LlamaForCausalLM(config).train()
    patch_model(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    policy, books, pool = policy_of(is_recomputed), [KVBook(), KVBook()], group_pool()
    engine = None if policy is None else ActivationEngine(layer_modules(model), HostTier(2**20, SlowlyLeaving()))
    ids, labels = (torch.randint(0, VOCABULARY, (1, TOKENS_PER_RANK)) for _ in range(2))

    def forward(index: int, book: KVBook) -> Tensor:
        # heads that are divided are exchanged in parts
        with pool.small_parts():
            context = pool.context(group, group.chunks[index], book)
        first = group.chunks[index].spans[0].start if group.shape.num_blocks == 1 else 0
        own = context.layout.own if group.shape.num_blocks == 1 else context.ring.pieces
        positions = torch.cat([torch.arange(first + piece.start, first + piece.stop) for piece in own])[None]
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": no_mask(ids.device), "use_cache": False}
        activations = engine.begin(policy) if engine is not None and policy is not None else None
        with nullcontext() if activations is None else activations.running():
            logits = model(**inputs, return_dict=True, longctx=replace(context, activations=activations)).logits
        return summed_cross_entropy(logits, labels) / TOKENS_PER_RANK

    for loss in reversed([forward(index, books[0]) for index in range(num_slices)]):
        loss.backward()
    earlier = [forward(index, books[1]) for index in range(num_slices - 1)]
    forward_peak, held, loss = measure(partial(forward, num_slices - 1, books[1]))
    backward_peak, _, _ = measure(loss.backward)
    for each in reversed(earlier):
        each.backward()
    return forward_peak, held + backward_peak


@pytest.mark.daily("2-1-recomputed")
@pytest.mark.parametrize("is_recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("degree,num_slices", [(2, 1), (3, 1), (4, 1), (2, 3), (3, 3)])
def test_rings_take_the_bytes_that_are_predicted(ranks, degree: int, num_slices: int, is_recomputed: bool) -> None:
    spec = ModelSpec(LAYERS, HIDDEN, INNER, HEADS, HEADS, HEAD_DIM, VOCABULARY, 2**13, bytes_per_element=4)
    group = sharing(degree, num_slices)
    load = chunk_load(group, group.chunks[-1], 0, Load(0, (), LAYERS, tiles_loss=False))
    found = ByteModel(spec).chunk(load, policy_of(is_recomputed))
    # token ids and labels exist before the step, the keys and values of the book before the forward; its gradients come after it
    held = found.device - 16 * TOKENS_PER_RANK
    book = 4 * spec.kv_size * (num_slices - 1) * TOKENS_PER_RANK
    predicted = held + found.forward_workspace, held + found.backward_workspace + book
    for peaks in ranks(degree).run(measured_peaks, group, is_recomputed):
        for expected, peak in zip(predicted, peaks, strict=True):
            assert 0.95 * peak <= expected <= (1.6 if num_slices == 1 else 1.7) * peak


@pytest.mark.daily("2-1-8-recomputed", "2-3-2-kept")
@pytest.mark.parametrize("is_recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("num_kv", [8, 2])
@pytest.mark.parametrize("degree,num_slices", [(2, 1), (4, 1), (2, 3)])
def test_heads_in_parts_take_the_bytes_that_are_predicted(
    ranks, monkeypatch: pytest.MonkeyPatch, degree: int, num_slices: int, num_kv: int, is_recomputed: bool
) -> None:
    monkeypatch.setattr(model_spec, "HEAD_PART_BYTES", 1)
    spec = ModelSpec(LAYERS, HIDDEN, INNER, HEADS, num_kv, HEAD_DIM, VOCABULARY, 2**13, bytes_per_element=4)
    group = sharing(degree, num_slices, "ulysses")
    load = chunk_load(group, group.chunks[-1], 0, Load(0, (), LAYERS, tiles_loss=False))
    found = ByteModel(spec).chunk(load, policy_of(is_recomputed))
    held = found.device - 16 * TOKENS_PER_RANK
    book = 4 * spec.kv_size * (num_slices - 1) * TOKENS_PER_RANK
    predicted = held + found.forward_workspace, held + found.backward_workspace + book
    # gloo frees buffers late on some ranks, which a device does not
    for expected, *peaks in zip(predicted, *ranks(degree).run(measured_peaks, group, is_recomputed, num_kv), strict=True):
        assert 0.9 * min(peaks) <= expected <= 1.7 * min(peaks)
