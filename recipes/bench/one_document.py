"""Runs one long document on one rank, forward and backward: with plain Hugging Face, or under a hand-written plan.

Shared by `cpu/memory.py` and the GPU benchmarks. The plan goes through the package's own rank plan, executor, activation
engine and group pool.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.layers import layer_modules, output_head
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.types import (
    Action,
    ActivationPolicy,
    Chunk,
    LayerPolicy,
    LayerRange,
    RankPlan,
    SequenceGroup,
    Span,
    StagePlan,
    TensorShare,
)
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.saved_tensors import class_bytes, held_bytes
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.activations.output_head import OutputHead
from hf_longctx.runtime.core.chunk_inputs import ChunkInputs
from hf_longctx.runtime.core.loss import IGNORE_INDEX
from hf_longctx.runtime.execution.executor import StepExecutor, no_mask
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.process_groups import GroupPool

# words by which to recognise attention kernels in a profile
_ATTENTION = ("attention", "fmha", "flash", "sdpa")


def replayed(attention_host: float = 0.0, attention_recompute: float = 0.0, input_host: float = 0.0) -> LayerPolicy:
    """Policy of a layer that recomputes queries, keys, values and MLP.

    The arguments are shares of tokens: attention output on the host or recomputed, layer input on the host. The rest of attention
    output and layer input stays on the device.
    """
    return LayerPolicy(
        (
            TensorShare("layer_input", host=input_host, device=1 - input_host),
            TensorShare(
                "attention_output",
                recompute=attention_recompute,
                host=attention_host,
                device=max(0.0, 1 - attention_host - attention_recompute),
            ),
            TensorShare("qkv", recompute=1.0),
            TensorShare("mlp", recompute=1.0),
        )
    )


def document_plan(num_tokens: int, layers: tuple[LayerPolicy, ...], tile_tokens: int = 0, num_slices: int = 1) -> RankPlan:
    """Plan of one document on one rank, in equal slices: forward of all slices, then backward of all, last slice first.

    layers: the policy of each layer of the model.
    """
    bounds = [num_tokens * index // num_slices for index in range(num_slices + 1)]
    chunks = tuple(Chunk(index, (Span(0, start, stop),)) for index, (start, stop) in enumerate(pairwise(bounds)))
    order = [*(("F", chunk.index) for chunk in chunks), *(("B", chunk.index) for chunk in reversed(chunks))]
    activations = tuple(ActivationPolicy(chunk.index, 0, layers, tile_tokens) for chunk in chunks if layers or tile_tokens)
    actions = tuple(Action(kind, 0, chunk) for kind, chunk in order)  # type: ignore[arg-type]
    stage = StagePlan(0, (LayerRange(0, len(layers)),), actions, activations)
    return RankPlan(0, 0, "replicated", ((SequenceGroup((0,), "local", chunks, (stage,)), stage),))


def predicted_bytes(plan: RankPlan, spec: ModelSpec) -> tuple[int, int]:
    """Predicted bytes (on device, on host) that the decoder layers hold for backward when all forwards are done."""
    group, stage = plan.rounds[0]
    policies = {policy.chunk: policy for policy in stage.activations}
    found = [
        held_bytes(spec, policies.get(chunk.index, ActivationPolicy(chunk.index)), spec.num_layers, chunk.num_tokens)
        for chunk in group.chunks
    ]
    return sum(device for device, _ in found), sum(host for _, host in found)


def predicted_peak_bytes(plan: RankPlan, spec: ModelSpec) -> int:
    """Predicted peak bytes of the plan's chunks on the device, without weights, gradients and optimizer states."""
    group, stage = plan.rounds[0]
    return ByteModel(spec).moments(group, stage).most.peak


@dataclass(frozen=True)
class PlannedDocument:
    """A document under its plan.

    `model` runs `longctx` attention and is bound to the activation engine until `close`. If the plan has `tile_tokens`, the
    loss is computed in tiles too.
    """

    model: Any
    executor: StepExecutor
    engine: ActivationEngine
    plan: RankPlan
    ids_1T: Tensor

    @classmethod
    def of(cls, model: Any, ids_1T: Tensor, plan: RankPlan, tier: HostTier | None = None) -> PlannedDocument:
        patch_model(model)
        engine = ActivationEngine(layer_modules(model), tier, OutputHead(output_head(model)))
        pool = GroupPool((1,), timeout_s=60.0)
        executor = StepExecutor(whole_model(model, num_attention_layers(model)), pool, ids_1T.device, fp32_gradients=False)
        return cls(model, executor, engine, plan, ids_1T)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return self.plan.rounds[0][0].chunks

    def step(self) -> Tensor:
        """Runs forward and backward; returns the mean loss over the document's labels."""
        return self.executor.run(self.plan, [self.inputs()], self.ids_1T.shape[1] - 1, engine=self.engine).loss

    def inputs(self) -> list[ChunkInputs]:
        labels = next_tokens(self.ids_1T)
        positions = torch.arange(self.ids_1T.shape[1], device=self.ids_1T.device)[None]
        spans = [chunk.spans[0] for chunk in self.chunks]
        return [ChunkInputs(*(x[:, span.start : span.stop] for x in (self.ids_1T, positions, labels))) for span in spans]

    def saved_bytes(self) -> int:
        """Measured bytes that the decoder holds for backward of a whole document: torch's hooks plus the engine's count."""
        group, stage = self.plan.rounds[0]
        (inputs,) = self.inputs()
        context = self.executor.pool.context(group, group.chunks[0])
        activations = self.engine.begin(stage.activations[0])
        context = replace(context, activations=activations)
        mask = no_mask(self.ids_1T.device)
        with activations.running():
            hooked, _kept = saved_bytes(
                self.model,
                lambda: self.model.model(
                    input_ids=inputs.input_ids,
                    position_ids=inputs.position_ids,
                    attention_mask=mask,
                    use_cache=False,
                    longctx=context,
                ),
            )
        # both the hooks and the engine count whole layer inputs
        whole_inputs = sum(slot.whole_input_bytes for slot in activations.slots.values())
        return hooked - final_norm_bytes(self.model, self.ids_1T.shape[1]) + sum(activations.held_bytes()) - whole_inputs

    def close(self) -> None:
        """Restores the layers. Attention keeps the registered function, which without a plan does what the old one did."""
        self.engine.unbind()


def next_tokens(ids_1T: Tensor) -> Tensor:
    """Labels: every token's next token, and IGNORE_INDEX for the last."""
    return torch.cat([ids_1T[:, 1:], torch.full_like(ids_1T[:, :1], IGNORE_INDEX)], dim=1)


def plain_step(model: Any, ids_1T: Tensor) -> Tensor:
    """Runs forward and backward of a plain Hugging Face model with its own loss; returns the loss."""
    loss: Tensor = model(input_ids=ids_1T, labels=ids_1T, use_cache=False).loss
    loss.backward()
    return loss.detach()


def checkpointed_layer_bytes(model: ModelSpec) -> int:
    """Bytes per token that one layer saves when it is replayed from its input, as Hugging Face does."""
    return class_bytes(model, "layer_input")


def keep_attention(model: Any) -> None:
    """Turns on torch's selective checkpointing: what attention returns is kept, and all else recomputed."""
    kept = partial(create_selective_checkpoint_contexts, _keeps_attention)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": kept})


def _keeps_attention(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    is_attention = "_scaled_dot_product" in str(operator)
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


def keep_attention_by_trl(model: Any) -> None:
    """Turns on TRL's selective checkpointing, as `SFTTrainer` does for `gradient_checkpointing_kwargs={"selective": True}`."""
    importlib.import_module("trl.models").enable_selective_activation_checkpointing(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"selective": True})


def selective_layer_bytes(model: ModelSpec, element_bytes: int) -> int:
    """Bytes per token that one layer saves if attention is kept: its output in the model's dtype, its log-sum-exp in fp32."""
    return checkpointed_layer_bytes(model) + model.num_heads * (model.head_dim * element_bytes + 4)


def plain_saved_bytes(model: Any, ids_1T: Tensor) -> int:
    """Bytes that the decoder layers of a plain or checkpointed Hugging Face model hold for backward."""
    hooked, _kept = saved_bytes(model, lambda: model.model(input_ids=ids_1T, use_cache=False))
    return hooked - final_norm_bytes(model, ids_1T.shape[1])


def saved_bytes(model: Any, forward: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes of all storages that a forward saves (except parameters and buffers), and what the forward returned."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return sum(seen.values()), result


def final_norm_bytes(model: Any, num_tokens: int) -> int:
    """Bytes that a decoder saves outside its layers.

    These are the last norm's fp32 input, its product and root mean square, and the token ids.
    """
    return num_tokens * (model.config.hidden_size * (4 + model.dtype.itemsize) + 4 + 8)


def largest_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest difference over all tensors, relative to each tensor's largest value."""
    pairs = zip(found, expected, strict=True)
    return max(float((f.float() - e.float()).abs().max() / e.float().abs().max()) for f, e in pairs)


def attention_kernel(function: Callable[[], Any], device: torch.device) -> str:
    """Name of the attention kernel (on CPU: operator) that took longest in a call; '-' if there was none."""
    is_cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]) as found:
        function()
        if is_cuda:
            torch.cuda.synchronize(device)
    events = [event for event in found.key_averages() if any(word in event.key.lower() for word in _ATTENTION)]
    # leave out autograd nodes and operators that only choose among others; those that compute begin with an underscore
    kind = torch.autograd.DeviceType.CUDA if is_cuda else torch.autograd.DeviceType.CPU
    events = [e for e in events if e.device_type == kind and (is_cuda or e.key.startswith("aten::_"))]
    longest = max(events, key=lambda e: e.self_device_time_total if is_cuda else e.self_cpu_time_total, default=None)
    return "-" if longest is None else longest.key.removeprefix("aten::")[:60]
