"""Rows of `smoke.py` about memory: tile backends, offloading to the host, activation policies, loss in tiles, the callback.

Every check returns its error and a note. All of them also run on the CPU, at small sizes, in the tests.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import datasets
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_longctx import LongContextCallback, LongContextConfig
from hf_longctx.plan.core.types import LayerPolicy, TensorShare
from hf_longctx.recipes.bench.one_document import PlannedDocument, document_plan, largest_error, plain_step, replayed
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.tiles.plain import Scores, TileInputs
from hf_longctx.runtime.tiles.tile import BACKENDS, MOST_HEADS, tile_backward, tile_forward

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 2, 64
# name -> (policy of the layers, tile tokens, slices); the last of several policies is that of the upper layer
POLICIES: dict[str, tuple[LayerPolicy | tuple[LayerPolicy, LayerPolicy], int, int]] = {
    "attention kept on the device": (replayed(), 0, 1),
    "attention and inputs on the host": (replayed(attention_host=1.0, input_host=1.0), 64, 1),
    "shares recomputed, on host, on device": (replayed(attention_host=0.4, attention_recompute=0.3, input_host=0.5), 64, 1),
    "part of the MLP kept": (
        LayerPolicy((TensorShare("qkv", recompute=1.0), TensorShare("mlp", recompute=0.5, host=0.25, device=0.25))),
        64,
        1,
    ),
    "part of queries, keys and values kept": (
        LayerPolicy((TensorShare("qkv", recompute=0.5, host=0.25, device=0.25), TensorShare("mlp", recompute=1.0))),
        64,
        1,
    ),
    "kept layer above one on the host": ((replayed(attention_host=1.0, input_host=1.0), LayerPolicy()), 64, 1),
    "loss in tiles, everything kept": (LayerPolicy(), 64, 1),
    "four slices, everything kept": (LayerPolicy(), 0, 4),
    "four slices, attention kept on the host": (replayed(attention_host=1.0), 64, 4),
}
# a policy adds in another order than the plain model, so that the largest error of its gradients is somewhat larger or smaller
POLICY_TOLERANCE = 1.5
Check = tuple[Callable[[], tuple[float, str]], float]


def memory_checks(tokens: int, device: torch.device, tolerance: float) -> dict[str, Check]:
    """Rows about memory: name -> (function that returns the error and a note, largest error allowed)."""
    return {
        **{f"tile {row.name}": (partial(check_backend, tokens, device, row.name), tolerance) for row in BACKENDS},
        **{
            f"tile {row.name}, {odd} tokens": (partial(check_backend, odd, device, row.name), tolerance)
            for row in BACKENDS
            if row.name in ("cudnn", "flash_attention_2")
            for odd in (127, 129)
        },
        "tile of more than 65,535 heads": (partial(check_heads, device, MOST_HEADS + 65), tolerance),
        "tile of more than 2^31 elements": (partial(check_long_tile, device, 2**31 // (32 * 128) + 65), tolerance),
        "host tier: values back, blocks used again": (partial(check_tier, tokens, device), 0.0),
        "host slab is page-locked on CUDA": (partial(check_slab, device), 0.0),
        **{f"policy: {name}": (partial(check_policy, tokens, device, *how), POLICY_TOLERANCE) for name, how in POLICIES.items()},
        "callback attached to a stock trainer": (partial(check_callback, device), 0.9),
    }


def check_backend(tokens: int, device: torch.device, name: str) -> tuple[float, str]:
    """Checks a tile backend against plain matrices in fp32, on a causal tile and one without a mask, forward and backward."""
    row = next(row for row in BACKENDS if row.name == name)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if not row.takes(device.type, capability, torch.bfloat16, HEAD_DIM):
        return 0.0, f"not taken on {device.type} {capability[0]}.{capability[1]}"
    generator, scores = torch.Generator().manual_seed(0), Scores(HEAD_DIM**-0.5)
    error = 0.0
    for causal, num_keys in ((True, tokens), (False, 2 * tokens)):
        shapes = ((NUM_HEADS, tokens), (NUM_HEADS, tokens), (NUM_KV_HEADS, num_keys), (NUM_KV_HEADS, num_keys))
        exact = [torch.randn(*shape, HEAD_DIM, generator=generator).bfloat16().to(device).float() for shape in shapes]
        found, expected = (
            _through_tile(*(x.to(dtype) for x in exact), scores, causal, backend)
            for dtype, backend in ((torch.bfloat16, name), (torch.float32, "plain"))
        )
        error = max(error, largest_error(found, expected))
    return error, ""


def check_heads(device: torch.device, num_heads: int) -> tuple[float, str]:
    """Checks a causal tile of more heads than the grid of a kernel has, against plain matrices in fp32."""
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(num_heads, 8, 8, generator=generator).bfloat16().to(device).float() for _ in range(4)]
    found, expected = (
        _through_tile(*(x.to(dtype) for x in exact), Scores(0.3), True, backend)
        for dtype, backend in ((torch.bfloat16, ""), (torch.float32, "plain"))
    )
    return largest_error(found, expected), ""


def check_long_tile(device: torch.device, num_queries: int, num_heads: int = 32, head_dim: int = 128) -> tuple[float, str]:
    """Checks the last rows of a tile of many queries and few keys, so of tensors of many elements, against plain matrices.

    Skipped where the device has too little free memory for ten such tensors. The gradient of all other rows is zero.
    """
    needed, free = 10 * 2 * num_heads * num_queries * head_dim, torch.cuda.mem_get_info()[0] if device.type == "cuda" else 2**30
    if needed > free:
        return 0.0, f"skipped: needs {needed / 2**30:.0f} GiB of the device, {free / 2**30:.0f} are free"
    last, num_keys = slice(num_queries - 100, num_queries), 256
    generator = torch.Generator(device).manual_seed(0)
    q = torch.randn(num_heads, num_queries, head_dim, device=device, dtype=torch.bfloat16, generator=generator)
    k, v = (torch.randn(2, num_keys, head_dim, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(2))
    gradient = torch.zeros_like(q)
    gradient[:, last].normal_(generator=generator)
    scores = Scores(head_dim**-0.5)
    error = 0.0
    names = [row.name for row in BACKENDS if row.name in ("cudnn", "flash_attention_2")] if device.type == "cuda" else [""]
    for name in names:
        out, lse, dq, dk, dv = _through_tile(gradient, q, k, v, scores, False, name)
        plain = _through_tile(*(x.float() for x in (gradient[:, last], q[:, last], k, v)), scores, False, "plain")
        error = max(error, largest_error([out[:, last], lse[:, last], dq[:, last], dk, dv], plain))
        del out, lse, dq, dk, dv
    return error, f"{num_heads * num_queries * head_dim:,} elements"


def _through_tile(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, scores: Scores, causal: bool, backend: str
) -> tuple[Tensor, ...]:
    tile = TileInputs(q, k, v, scores, causal)
    out, lse = tile_forward(tile, backend)
    return out, lse, *tile_backward(gradient, tile, out, lse, backend)


def check_tier(tokens: int, device: torch.device) -> tuple[float, str]:
    """Checks that offloaded tensors come back unchanged, with room for three of eight tensors on the host.

    Each tensor is dropped and its memory overwritten right after its copy to the host starts. A product keeps the compute
    stream busy, so that a copy that does not wait for it would read or write too early.
    """
    generator = torch.Generator(device).manual_seed(0)
    shape = (2 * tokens, 1024)
    busy = torch.randn(shape[0], shape[0], device=device, generator=generator)
    num_bytes = shape[0] * shape[1] * 4
    tier = HostTier.on(device, 3 * num_bytes)
    wrong = torch.zeros((), device=device)
    for first in range(0, 8, 2):
        sources = [torch.full(shape, float(first + i + 1), device=device) for i in range(2)]
        for source in sources:
            # the source is computed after a long kernel, so the copy has to wait for that kernel
            source += (busy @ busy)[0, 0] * 0
        homes = [tier.store(source) for source in sources]
        del sources, source
        # reuses the memory that was just freed
        garbage = [torch.full(shape, -1.0, device=device) for _ in range(2)]
        homes[1].prefetch()
        for i, home in enumerate(homes):
            wrong += (home.fetch() != first + i + 1).sum()
        del homes, home, garbage
    return float(wrong), f"values that differ; {tier.stored_bytes} bytes left in a slab of {tier.slab.capacity_bytes}"


def check_slab(device: torch.device) -> tuple[float, str]:
    """Checks that the host memory is page-locked on CUDA, because copies would block otherwise; the error is 0 or 1."""
    tier = HostTier.on(device, 2**20)
    if device.type != "cuda":
        return float(tier.slab.is_pinned), "not pinned without CUDA"
    return float(not tier.slab.is_pinned or not tier.slab.memory.is_pinned()), f"{tier.slab.capacity_bytes} bytes pinned"


def document_model(device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
    """Builds a Llama of two layers, with the same weights at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=NUM_HEADS * HEAD_DIM,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        max_position_embeddings=1 << 17,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).to(device, dtype).train()


def check_policy(
    tokens: int,
    device: torch.device,
    layers: LayerPolicy | tuple[LayerPolicy, LayerPolicy],
    tile_tokens: int,
    slices: int,
) -> tuple[float, str]:
    """Checks loss and gradients of a document under one policy in bf16; the error is relative to that of the plain model in bf16.

    Both are compared with the plain model in fp32. The policy runs twice, so that blocks of host memory are used again.
    """
    ids = torch.randint(0, 512, (1, tokens), generator=torch.Generator().manual_seed(2)).to(device)
    plain, half, model = (document_model(device, dtype) for dtype in (torch.float32, torch.bfloat16, torch.bfloat16))
    expected_loss = float(plain_step(plain, ids))
    half_loss = float(plain_step(half, ids))
    allowed = max(abs(half_loss / expected_loss - 1), largest_error(gradients(half), gradients(plain)))
    tier = HostTier.on(device, 2**20 + tokens * 2**15)
    both = layers if isinstance(layers, tuple) else (layers,) * 2
    document = PlannedDocument.of(model, ids, document_plan(tokens, both, tile_tokens, slices), tier)
    error = 0.0
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        loss = float(document.step())
        error = max(error, abs(loss / expected_loss - 1), largest_error(gradients(model), gradients(plain)))
    document.close()
    note = f"{error:.1e} and {allowed:.1e}; {tier.peak_bytes} bytes on the host at most, {tier.stored_bytes} left"
    return error / allowed, note


def gradients(model: Any) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def check_callback(device: torch.device) -> tuple[float, str]:
    """Trains on one document with a stock trainer and the attached callback; the error is the last loss over the first."""
    row = torch.randint(0, 512, (240,), generator=torch.Generator().manual_seed(1)).tolist()
    data = datasets.Dataset.from_dict({"input_ids": [row[: 40 * (i + 1)] for i in range(6)] * 12})
    model = document_model(torch.device("cpu"), torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=12, per_device_train_batch_size=6, bf16=True, learning_rate=1e-3, logging_steps=1,
            report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=device.type == "cpu",
        )  # fmt: skip
        trainer = Trainer(model=model, args=args, train_dataset=data, data_collator=DataCollatorWithFlattening())
        LongContextCallback(LongContextConfig(report_steps=False, timeline_steps=0, host_gib=0.1)).attach(trainer)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses[-1] / losses[0], f"loss {losses[0]:.2f} to {losses[-1]:.2f}, the error is their ratio"
