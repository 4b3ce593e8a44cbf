"""Bytes that operations without products move, counted operation by operation as torch runs them."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5RMSNormGated,
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
)

from hf_longctx.hf.models.kernel_places import FusableModule
from hf_longctx.hf.models.kernels import FusedLayers
from hf_longctx.hf.models.layers import layer_modules
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.settings import ClusterSpec
from hf_longctx.plan.core.types import ActivationPolicy, Chunk, LayerPolicy, SequenceGroup, Span, TensorShare
from hf_longctx.plan.cost.catalog import named_config, named_model
from hf_longctx.plan.cost.cost_model import (
    _CONVOLUTION,
    CostModel,
    default_coefficients,
    elementwise_bytes,
    mixer_bytes,
    replayed_bytes,
    scan_bytes,
)
from hf_longctx.plan.cost.profiles import read_profile
from hf_longctx.plan.model.config import kernels_of_config
from hf_longctx.plan.model.mixers import (
    delta_kernel_moves,
    delta_moves,
    kimi_kernel_moves,
    kimi_moves,
    mamba2,
    mamba_moves,
)
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.setup import lora_adapters
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.core.host_copies import PlainCopies
from hf_longctx.runtime.core.kernels import CompiledFunction
from hf_longctx.runtime.execution.executor import no_mask
from hf_longctx.runtime.process_groups import GroupPool
from hf_longctx.runtime.states.convolution import compiled_convolution

TOKENS = 256
PRODUCTS = ("mm", "attention", "embedding", "linear")
NOTHING_MOVES = ("detach", "empty", "_unsafe_view", "lift_fresh", "new_empty")


class MovedBytes(TorchDispatchMode):
    """Adds up the bytes of inputs and outputs of every operation but products and views."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if not func.is_view and not any(word in name for word in PRODUCTS) and not name.startswith(NOTHING_MOVES):
            # operations that overwrite a tensor do not read it
            inputs = args[1:] if name == "copy_" else () if name in ("zeros", "new_zeros", "zero_", "fill_") else args
            found = [x for x in tree_leaves((inputs, kwargs, out)) if isinstance(x, torch.Tensor)]
            self.total += sum(x.numel() * x.element_size() for x in found)
        return out


class Kernels(FusedLayers):
    """Kernels of norms, gates or rotary embeddings, whose inputs and outputs alone are counted."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__("compile" if kinds else "")
        self.kinds = kinds

    def _takes(self, found: FusableModule) -> bool:
        return found.kind in self.kinds


def counts_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `MovedBytes` count what compiled functions read and write, and nothing that they do inside, uncompiled."""
    monkeypatch.setattr(CompiledFunction, "_kernel", lambda self, function, tensors, needs: function)
    for name in ("forward", "backward"):
        run = getattr(CompiledFunction, name)

        def ends_alone(self: CompiledFunction, *inputs: Any, run: Any = run) -> Any:
            mode = _get_current_dispatch_mode()
            assert isinstance(mode, MovedBytes)
            with _disable_current_modes():
                out = run(self, *inputs)
            mode.total += sum(x.nbytes for x in tree_leaves((inputs, out)) if isinstance(x, torch.Tensor))
            return out

        monkeypatch.setattr(CompiledFunction, name, ends_alone)


def counted(
    num_layers: int,
    dtype: torch.dtype,
    adapted: bool,
    kinds: tuple[str, ...] = (),
    policy: LayerPolicy | None = None,
    inner: int = 224,
) -> tuple[int, int]:
    """Bytes of a forward and of a backward of a model with these layers.

    kinds: of functions that are kernels. policy: that of all layers; None without plans.
    """
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=inner,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=1,
        vocab_size=64,
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if adapted:
        model = peft.get_peft_model(model, peft.LoraConfig(r=1, target_modules="all-linear", task_type="CAUSAL_LM"))
        model.enable_input_require_grads()
    Kernels(kinds).bind(model)
    ids, given = torch.zeros(1, TOKENS, dtype=torch.int64), {}
    running: Any = nullcontext()
    if policy is not None:
        model.train()
        patch_model(model)
        engine = ActivationEngine(layer_modules(model), HostTier(2**24, PlainCopies()))
        activations = engine.begin(ActivationPolicy(0, 0, (policy,) * num_layers, TOKENS // 4))
        chunk, group = Chunk(0, (Span(0, 0, TOKENS),)), SequenceGroup((0,), "local", (), ())
        context = replace(GroupPool((1,), timeout_s=1.0).context(group, chunk), activations=activations)
        given, running = {"longctx": context, "attention_mask": no_mask(ids.device)}, activations.running()
    with torch.autocast("cpu", torch.bfloat16, enabled=adapted and dtype == torch.bfloat16), MovedBytes() as forward, running:
        logits = model(input_ids=ids, use_cache=False, **given).logits
    with MovedBytes() as backward:
        logits.float().sum().backward()
    return forward.total, backward.total


def of_a_layer(*settings: Any, **more: Any) -> list[float]:
    """Bytes of a token in one layer, forward and backward."""
    return [(many - few) / 3 / TOKENS for few, many in zip(*(counted(count, *settings, **more) for count in (2, 5)), strict=True)]


def spec_of(dtype: torch.dtype, adapted: bool, inner: int = 224, kinds: tuple[str, ...] = ()) -> ModelSpec:
    model = replace(named_model("llama-3.1-8b", dtype.itemsize), hidden_size=64, intermediate_size=inner)
    fuses = {"fuses_norms": "norm" in kinds, "fuses_gates": "gated" in kinds, "fuses_rotary": "rotary" in kinds}
    return replace(model, adapters=lora_adapters(model, 1) if adapted else model.adapters, **fuses)


@pytest.mark.daily("dtype1-False")
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_of_a_layer_are_those_that_torch_moves(dtype: torch.dtype, adapted: bool) -> None:
    assert of_a_layer(dtype, adapted) == pytest.approx(elementwise_bytes(spec_of(dtype, adapted)), rel=0.02)


@pytest.mark.daily("dtype1-kinds0")
@pytest.mark.parametrize("kinds", [("norm",), ("rotary",), ("norm", "gated", "rotary")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_move_their_inputs_and_outputs_alone(
    dtype: torch.dtype, kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts_ends_alone(monkeypatch)
    expected = elementwise_bytes(spec_of(dtype, True, kinds=kinds))
    assert of_a_layer(dtype, True, kinds) == pytest.approx(expected, rel=0.05)


@pytest.mark.wide
@pytest.mark.parametrize("kinds", [(), ("norm", "gated", "rotary")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_replays_move_what_is_predicted(dtype: torch.dtype, kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    counts_ends_alone(monkeypatch)
    kept = LayerPolicy((TensorShare("layer_input", host=1 / TOKENS, device=1 - 1 / TOKENS),))
    again = LayerPolicy((TensorShare("attention_output", device=1.0), TensorShare("mlp", recompute=1.0)))
    # with little in the MLP, what is copied of its tiles does not count
    plain, replayed = (sum(of_a_layer(dtype, True, kinds, policy)) for policy in (LayerPolicy(), kept))
    whole, inner = replayed_bytes(spec_of(dtype, True, kinds=kinds))
    assert replayed - plain == pytest.approx(whole, rel=0.1)
    # by the difference of two widths
    more = [
        sum(of_a_layer(dtype, True, kinds, again, inner=size)) - sum(of_a_layer(dtype, True, kinds, kept, inner=size))
        for size in (224, 448)
    ]
    assert (more[1] - more[0]) / 224 == pytest.approx(inner / 224, rel=0.1)


def test_a_gated_norm_as_a_kernel_moves_its_inputs_and_outputs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    counts_ends_alone(monkeypatch)
    moved = []
    for kinds in ((), ("gated_norm",)):
        holder = torch.nn.Module()
        holder.norm = Qwen3_5RMSNormGated(128).bfloat16().requires_grad_(False)
        Kernels(kinds).bind(holder)
        x, gate = (torch.ones(TOKENS, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        with MovedBytes() as forward:
            y = holder.norm(x, gate)
        gradient = torch.ones_like(y)
        with MovedBytes() as backward:
            torch.autograd.grad(y, (x, gate), gradient)
        moved.append(tuple(mode.total / x.numel() for mode in (forward, backward)))
    # per value: read input and gate, write the result; read them and its gradient, write theirs
    assert moved[0] == pytest.approx((66, 140), rel=0.05)
    assert moved[1] == pytest.approx((6, 10), rel=0.02)


def moved_by(run: Any, leaves: list[torch.Tensor], values: int) -> tuple[float, float]:
    """Bytes that `run` and its backward move, divided by a number of values."""
    with MovedBytes() as forward:
        outputs = run(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    given = [torch.ones_like(each) for each in outputs]
    with MovedBytes() as backward:
        torch.autograd.grad(outputs, leaves, given)
    return forward.total / values, backward.total / values


@pytest.mark.parametrize("dtype,plain", [(torch.bfloat16, (8, 16)), (torch.float32, (16, 32))], ids=str)
def test_a_convolution_as_a_kernel_moves_its_input_and_output_alone(
    dtype: torch.dtype, plain: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts_ends_alone(monkeypatch)
    x, weight, own = torch.randn(1, TOKENS, 64, dtype=dtype), torch.randn(64, 4, dtype=dtype), inspect.unwrap(causal_conv1d_fn)
    kernel = compiled_convolution("silu")
    kernel.places((TOKENS,), x.device)
    runs = {
        plain: lambda x: own(x.transpose(1, 2), weight, None, activation="silu").transpose(1, 2),
        (2 * dtype.itemsize, 3 * dtype.itemsize): lambda x: kernel(x.transpose(1, 2), weight, None, (TOKENS,)).transpose(1, 2),
    }
    for expected, run in runs.items():
        assert moved_by(run, [x.clone().requires_grad_()], x.numel()) == pytest.approx(expected, rel=0.05)
    counted = [_CONVOLUTION[dtype.itemsize][is_kernel] for is_kernel in (False, True)]
    assert counted == list(runs)


def moved_by_tiles(make: Any, tokens: int, heads: int) -> tuple[float, float]:
    """Bytes of a token and head in forward and backward of a scan, without what grows with the number of tokens in backward."""
    once, twice = (moved_by(*make(n), n * heads) for n in (tokens, 2 * tokens))
    return twice[0], 2 * once[1] - twice[1]


@pytest.mark.wide("32-32-kimi")
@pytest.mark.parametrize("by_channel", [False, True], ids=["gated", "kimi"])
@pytest.mark.parametrize("key,value", [(32, 32), (64, 64), (128, 128), (64, 128)], ids=str)
def test_the_torch_code_of_a_delta_rule_moves_what_is_counted(key: int, value: int, by_channel: bool) -> None:
    rule, heads = inspect.unwrap(chunk_kimi_delta_attention if by_channel else torch_chunk_gated_delta_rule), 2

    def make(num_tokens: int) -> tuple[Any, list[torch.Tensor]]:
        q, k, v = (torch.randn(1, num_tokens, heads, size).bfloat16() for size in (key, key, value))
        decay = -torch.rand(1, num_tokens, heads, *((key,) if by_channel else ()))
        strength = torch.rand(1, num_tokens, heads).bfloat16()

        def run(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
            return rule(q, k, v, g=g, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=True)

        return run, [x.requires_grad_() for x in (q, k, v, decay, strength)]

    expected = kimi_moves(key, value) if by_channel else delta_moves(key, value)
    assert moved_by_tiles(make, TOKENS, heads) == pytest.approx(expected, rel=0.02)


@pytest.mark.wide("64-128-64-4")
@pytest.mark.parametrize("head,state,tile,readers", [(64, 128, 64, 4), (32, 64, 128, 2), (128, 16, 64, 8)], ids=str)
def test_the_torch_code_of_a_mamba2_scan_moves_what_is_counted(head: int, state: int, tile: int, readers: int) -> None:
    scan, heads = inspect.unwrap(mamba2_chunk_scan), 2 * readers

    def make(num_tokens: int) -> tuple[Any, list[torch.Tensor]]:
        x, step = torch.randn(1, num_tokens, heads, head).bfloat16(), torch.rand(1, num_tokens, heads).bfloat16()
        into, out = (torch.randn(1, num_tokens, 2, state).bfloat16() for _ in range(2))
        decay, past, bias = -torch.rand(heads), torch.rand(heads), torch.rand(heads)

        def run(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, bias: Any) -> Any:
            return scan(x, dt, A, B, C, tile, D=D, dt_bias=bias, dt_softplus=True, return_final_states=True)

        return run, [each.requires_grad_() for each in (x, step, decay, into, out, past, bias)]

    found = moved_by_tiles(make, 2 * tile, heads)
    assert found == pytest.approx(mamba_moves(head, state, tile, readers), rel=0.02)


def test_kernels_of_kimi_and_mamba2_take_about_what_was_published() -> None:
    # flash-linear-attention's forward on an H200, by cuLA's benchmark: 64 heads of 128, 16,384 tokens
    forward, backward = kimi_kernel_moves(128, 128)
    assert 64 * 16384 * forward / 2.6e12 == pytest.approx(3.60e-3, rel=0.15)
    # a Blackwell takes three times as long for backward
    assert backward == pytest.approx(2 * forward, rel=0.02)
    # mamba-ssm's forward on an H100, by vLLM: nanoseconds of a token with products, at 0.7 of the rates of memory
    states = mamba2({"hidden_size": 4096, "mamba_n_heads": 128, "mamba_d_state": 128, "mamba_n_groups": 1})
    moved_s, products_s = 128 * states.kernel_moves[0] / (0.7 * 2.6e12), 2 * states.scan_products / 0.7e15
    assert moved_s + products_s == pytest.approx(93e-9, rel=0.15)


def test_kernels_of_scans_take_what_was_published() -> None:
    # flash-linear-attention on an H200: 32 heads of 128 in pairs, 32,768 tokens
    forward, backward = (32 * 32768 * each / 2.6e12 for each in delta_kernel_moves(128, 128, 2))
    assert forward + backward == pytest.approx(1.89e-3 + 5.70e-3, rel=0.02)
    assert forward == pytest.approx(1.89e-3, rel=0.25) and backward == pytest.approx(5.70e-3, rel=0.1)


@pytest.mark.parametrize("name", ["qwen3.5-9b", "kimi-linear-48b-a3b", "nemotron-nano-9b-v2"])
def test_kernels_of_all_scans_are_priced(name: str) -> None:
    hardware = read_profile("h200").spec
    model = replace(named_model(name), **kernels_of_config(named_config(name) or {}))
    assert model.fuses_scans and all(model.states.kernel_moves) and all(model.states.torch_moves)
    torch_s, kernel_s = (
        default_coefficients(replace(model, fuses_scans=is_kernel), ClusterSpec(1, 1, hardware)) for is_kernel in (False, True)
    )
    for place, each in enumerate(("forward", "backward")):
        saved = getattr(torch_s, each).token_s - getattr(kernel_s, each).token_s
        spared = model.states.heads * (model.states.torch_moves[place] - model.states.kernel_moves[place])
        assert saved == pytest.approx(sum(model.states.layers) * spared / hardware.elementwise_bytes_per_s)
        assert saved > 0


def test_seconds_of_hybrids_count_what_their_mixers_move() -> None:
    hardware = read_profile("h200").spec
    cluster, other = ClusterSpec(1, 1, hardware), ClusterSpec(1, 1, replace(hardware, elementwise_bytes_per_s=0.0))
    model = replace(named_model("qwen3.5-9b"), fuses_gated_norms=False, fuses_convolutions=False, fuses_scans=False)
    kernels = replace(model, fuses_gated_norms=True, fuses_convolutions=True, fuses_scans=True)
    num_states, seconds = sum(model.states.layers), []
    for each in (model, kernels):
        found, without = default_coefficients(each, cluster), default_coefficients(each, other)
        for place, (ours, plain) in enumerate(((found.forward, without.forward), (found.backward, without.backward))):
            added = each.num_layers * elementwise_bytes(each)[place] + num_states * mixer_bytes(each)[place]
            assert ours.token_s == pytest.approx(plain.token_s + added / hardware.elementwise_bytes_per_s)
        # a scan in blocks moves its bytes once more
        long = each.states.block_tokens + 1
        seconds.append(float(CostModel(each, cluster, found).rescan_s(long)))
        assert seconds[-1] > num_states * long * scan_bytes(each)[0] / hardware.elementwise_bytes_per_s
    assert seconds[1] < 0.4 * seconds[0]
    # 32 heads of 128: values and channels as kernels read and write them once, and scans
    assert mixer_bytes(kernels) == (4096 * 6 + 8192 * 4 + 32 * 5632, 4096 * 10 + 8192 * 6 + 32 * 13056)


def test_seconds_of_a_measured_device_count_them() -> None:
    model = named_model("llama-3.1-8b", 2)
    hardware = read_profile("h200").spec
    assert hardware.elementwise_bytes_per_s
    cluster, other = ClusterSpec(1, 1, hardware), ClusterSpec(1, 1, replace(hardware, elementwise_bytes_per_s=0.0))
    for each in (model, replace(model, adapters=lora_adapters(model, 16))):
        found, without = default_coefficients(each, cluster), default_coefficients(each, other)
        for ours, plain, num_bytes in zip(
            (found.forward, found.backward), (without.forward, without.backward), elementwise_bytes(each), strict=True
        ):
            added_s = each.num_layers * num_bytes / hardware.elementwise_bytes_per_s
            assert ours.token_s == pytest.approx(plain.token_s + added_s)
            # the head has no such operations: its seconds stay
            assert ours.head_factor * ours.token_s == pytest.approx(plain.head_factor * plain.token_s)
