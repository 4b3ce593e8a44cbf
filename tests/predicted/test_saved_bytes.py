"""Autograd saves as many bytes, counted by torch's own hooks, as the byte model predicts, within one percent."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import peft
import pytest
import torch
import transformers
from helpers.measures.flash_packs import flash_on_the_cpu
from helpers.measures.late_copies import SlowlyLeaving
from helpers.models.tiny_models import in_four_bits
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hf_longctx.hf.models.dropout import DropoutPatch
from hf_longctx.hf.models.kernels import FusedLayers
from hf_longctx.hf.models.layers import adapter_spec, layer_modules
from hf_longctx.hf.models.packed_experts import pack_experts
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.sharding import HeadShare
from hf_longctx.plan.core.types import ActivationPolicy, Chunk, LayerPolicy, SequenceGroup, Span, TensorShare
from hf_longctx.plan.memory.layer import LayerBytes, Load
from hf_longctx.plan.memory.saved_tensors import (
    class_bytes,
    held_bytes,
    plain_layer_bytes,
    saved_token_bytes,
)
from hf_longctx.plan.model.model_spec import AdapterSpec, ModelSpec
from hf_longctx.plan.setup import lora_adapters
from hf_longctx.recipes.bench.one_document import checkpointed_layer_bytes
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.activations.records import AttentionRecord
from hf_longctx.runtime.attention.chunk import ChunkAttention, documents_of
from hf_longctx.runtime.attention.heads import KVReaders
from hf_longctx.runtime.attention.kv_book import KVBook, Slice
from hf_longctx.runtime.attention.rows import AttentionRule
from hf_longctx.runtime.core.dropout import keys_of
from hf_longctx.runtime.core.kernels import CompiledFunction
from hf_longctx.runtime.execution.executor import no_mask
from hf_longctx.runtime.process_groups import GroupPool
from hf_longctx.runtime.tiles.plain import Scores

NUM_TOKENS = 512
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN = 8, 2, 16, 96, 176
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def build(family: str, dtype: torch.dtype, num_layers: int) -> Any:
    config_class, model_class = FAMILIES[family]
    config = config_class(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=num_layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        attn_implementation="sdpa",
        max_position_embeddings=1024,
    )
    return model_class(config).to(dtype).train()


def spec(dtype: torch.dtype, family: str = "llama") -> ModelSpec:
    sizes = (1, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, 64, 1024)
    return ModelSpec(*sizes, bytes_per_element=dtype.itemsize, qk_norms=family == "qwen3")


def saved_bytes(model: Any, forward: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes of all storages that a forward saves and that are no parameters or buffers, and what it returned."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    seen: dict[int, int] = {}
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
            # keeps the tensor alive, so that no address is used twice
            held.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return sum(seen.values()), result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "GptOss"])
def test_experts_save_what_the_model_says(name: str, dtype: torch.dtype) -> None:
    config_class, model_class = getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForCausalLM")
    experts = {"num_experts": 8, "num_experts_per_tok": 2, **({"moe_intermediate_size": 96} if name == "Qwen3Moe" else {})}
    sizes = {"hidden_size": 256, "intermediate_size": 352, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = model_class(config_class(vocab_size=64, num_hidden_layers=1, **sizes, **experts)).to(dtype)
    shapes = ModelSpec.from_config(model.config.to_dict(), bytes_per_element=dtype.itemsize)
    hidden_1TC = torch.randn(1, NUM_TOKENS, 256, dtype=dtype, requires_grad=True)
    found, _ = saved_bytes(model, lambda: model.model.layers[0].mlp(hidden_1TC))
    # beside probabilities and indices of experts, some 120 bytes a token
    expected = NUM_TOKENS * (class_bytes(shapes, "mlp") + 120)
    assert found == pytest.approx(expected, rel=0.03)


def layer_bytes(family: str, dtype: torch.dtype, prepare: Callable[[Any], None]) -> float:
    """Bytes per token that one more layer saves, measured on models of two and of five layers."""
    totals = []
    for num_layers in (2, 5):
        model = build(family, dtype, num_layers)
        prepare(model)
        ids = torch.zeros(1, NUM_TOKENS, dtype=torch.int64)
        totals.append(saved_bytes(model, lambda model=model, ids=ids: model.model(input_ids=ids, use_cache=False))[0])
    return (totals[1] - totals[0]) / 3 / NUM_TOKENS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_layers_save_what_is_predicted(family: str, dtype: torch.dtype) -> None:
    measured, one = layer_bytes(family, dtype, lambda model: None), spec(dtype, family)
    assert measured == pytest.approx(plain_layer_bytes(one), rel=0.01)
    # the number of tokens that are kept is derived from these bytes of a layer
    longer = replace(one, num_layers=one.num_layers + 3)
    assert (saved_token_bytes(longer) - saved_token_bytes(one)) / 3 == pytest.approx(measured, rel=0.01)


def pack_bytes(dtype: torch.dtype, bounds: tuple[int, ...]) -> float:
    """Bytes per token that one more layer saves of a pack of short documents."""
    totals = []
    for num_layers in (2, 5):
        model = build("llama", dtype, num_layers)
        patch_model(model)
        chunk = Chunk(0, tuple(Span(index, 0, stop - start) for index, (start, stop) in enumerate(pairwise(bounds))))
        context = GroupPool((1,), timeout_s=1.0).context(SequenceGroup((0,), "local", (chunk,), ()), chunk, KVBook())
        ids, mask = torch.zeros(1, bounds[-1], dtype=torch.int64), no_mask(torch.device("cpu"))
        keywords = {"use_cache": False, "longctx": context}
        totals.append(saved_bytes(model, lambda m=model, i=ids, a=mask, k=keywords: m.model(i, a, **k))[0])
    return (totals[1] - totals[0]) / 3 / bounds[-1]


@pytest.mark.daily("dtype1")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packs_save_keys_and_values_once_where_documents_share_calls(dtype: torch.dtype) -> None:
    bounds = (0, 1, 300, 1000)
    load = Load(1000, (1, 299, 700), 1)
    once, repeated = (LayerBytes(replace(spec(dtype), saves_kv_once=each), load, LayerPolicy(), 0).held for each in (True, False))
    # keys and values of two of eight heads, each read by four
    assert repeated - once == 1000 * 2 * (HEADS - KV_HEADS) * HEAD_DIM * dtype.itemsize
    with flash_on_the_cpu():
        found = pack_bytes(dtype, bounds)
    # one output is counted in advance for layouts in which it is copied
    output = HEADS * HEAD_DIM * dtype.itemsize
    assert found == pytest.approx(once / 1000 - output, rel=0.02)
    assert pack_bytes(dtype, bounds) == pytest.approx(repeated / 1000, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_checkpointed_layers_save_what_is_predicted(dtype: torch.dtype) -> None:
    def prepare(model: Any) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    assert layer_bytes("llama", dtype, prepare) == pytest.approx(checkpointed_layer_bytes(spec(dtype)), rel=0.01)


def policy(host: float, recompute: float, mlp: float) -> LayerPolicy:
    on_host, on_device = host * (1 - recompute), (1 - host) * (1 - recompute)
    return LayerPolicy(
        (
            TensorShare("layer_input", host=host, device=1 - host),
            TensorShare("attention_output", recompute=recompute, host=on_host, device=on_device),
            TensorShare("qkv", recompute=recompute, host=on_host, device=on_device),
            TensorShare("mlp", recompute=mlp, device=1 - mlp),
        )
    )


POLICIES = [(0.0, 0.0, 1.0), (0.0, 1.0, 1.0), (0.5, 0.25, 1.0), (1.0, 0.0, 0.5), (0.0, 0.3, 0.0)]


@pytest.mark.wide("dtype3-False-1.0-0.0-0.5")
@pytest.mark.parametrize(
    "dtype,is_autocast,host,recompute,mlp",
    [(dtype, False, *shares) for dtype in (torch.bfloat16, torch.float32, torch.float64) for shares in POLICIES]
    # a kept MLP also holds copies of its weights under autocast
    + [(torch.float32, True, *shares) for shares in POLICIES if shares[2] == 1.0],
)
def test_policies_hold_exactly_what_is_predicted(
    dtype: torch.dtype, is_autocast: bool, host: float, recompute: float, mlp: float
) -> None:
    model = build("qwen3", dtype, 3)
    patch_model(model)
    engine = ActivationEngine(layer_modules(model), HostTier(2**24, SlowlyLeaving()))
    chosen = ActivationPolicy(0, 0, (policy(host, recompute, mlp),) * 3, 64)
    activations = engine.begin(chosen)
    group = SequenceGroup((0,), "local", (), ())
    context = GroupPool((1,), timeout_s=1.0).context(group, Chunk(0, (Span(0, 0, 300), Span(1, 0, NUM_TOKENS - 300))))
    context = replace(context, activations=activations)
    ids = torch.zeros(1, NUM_TOKENS, dtype=torch.int64)
    mask = no_mask(torch.device("cpu"))

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast), activations.running():
            return model.model(input_ids=ids, attention_mask=mask, use_cache=False, longctx=context).last_hidden_state

    outside, output = saved_bytes(model, forward)
    shapes = replace(spec(dtype), bytes_sent_per_element=2 if is_autocast else 0)
    on_device, on_host = held_bytes(shapes, chosen, 3, NUM_TOKENS)
    assert activations.held_bytes() == (on_device, on_host)
    # hooks also see layer inputs that stay whole, and the final norm
    final = layer_bytes_of_norm(dtype)
    inputs = 0 if host else 3 * HIDDEN * dtype.itemsize * NUM_TOKENS
    assert outside == pytest.approx(inputs + final, rel=0.01)
    assert output.requires_grad


@pytest.mark.daily("0.0-0.0-1.0-dtype1")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("host,recompute,mlp", [(0.0, 0.0, 1.0), (0.0, 1.0, 1.0), (0.5, 0.25, 1.0), (0.0, 0.3, 0.0)])
def test_slices_under_policies_hold_what_whole_sequences_do_and_the_book_keys_and_values_once(
    dtype: torch.dtype, host: float, recompute: float, mlp: float
) -> None:
    model = build("qwen3", dtype, 3)
    patch_model(model)
    engine = ActivationEngine(layer_modules(model), HostTier(2**24, SlowlyLeaving()))
    # a slice alone, then the tail of its sequence with a whole one
    tail = 300
    chunks = (
        Chunk(0, (Span(0, 0, NUM_TOKENS),)),
        Chunk(1, (Span(0, NUM_TOKENS, NUM_TOKENS + tail), Span(1, 0, NUM_TOKENS - tail))),
    )
    pool, book = GroupPool((1,), timeout_s=1.0), KVBook()
    ids = torch.zeros(1, NUM_TOKENS, dtype=torch.int64)
    mask, outputs = no_mask(torch.device("cpu")), []
    for chunk in chunks:
        chosen = ActivationPolicy(chunk.index, 0, (policy(host, recompute, mlp),) * 3, 64)
        activations = engine.begin(chosen)
        context = pool.context(SequenceGroup((0,), "local", chunks, ()), chunk, book)
        keywords = {"use_cache": False, "longctx": replace(context, activations=activations)}
        with activations.running():
            outside, output = saved_bytes(model, lambda k=keywords: model.model(ids, mask, **k).last_hidden_state)
        assert activations.held_bytes() == held_bytes(spec(dtype), chosen, 3, NUM_TOKENS)
        inputs = 0 if host else 3 * HIDDEN * dtype.itemsize * NUM_TOKENS
        assert outside == pytest.approx(inputs + layer_bytes_of_norm(dtype), rel=0.01)
        outputs.append(output)
    assert book.num_bytes == 3 * 2 * KV_HEADS * HEAD_DIM * (NUM_TOKENS + tail) * dtype.itemsize
    for output in reversed(outputs):
        output.sum().backward()
    assert (book.num_bytes, engine.tier and engine.tier.stored_bytes) == (0, 0)


# places of slices in a row of two documents, and the tokens of whole ones
@pytest.mark.parametrize("slices,num_whole", [((0,), 5), ((1,), 7), ((), 12), ((0, 1), 0)])
@pytest.mark.parametrize("recompute", [0.0, 0.4, 1.0])
def test_attention_saves_the_same_recording_and_replaying(slices: tuple[int, ...], num_whole: int, recompute: float) -> None:
    bounds = (0, 7, 12)
    parts = tuple(Slice(index, index, 0, bounds[index + 1] - bounds[index], 20) for index in slices)
    record = AttentionRecord(TensorShare("attention_output", recompute=recompute, device=1 - recompute))
    readers = KVReaders.of(HeadShare(0, 4, 0, 2), 2, torch.device("cpu"))
    q, k, v = (torch.randn(heads, 12, 8, requires_grad=True) for heads in (4, 2, 2))
    rule = AttentionRule(readers, Scores(0.3))
    attend = ChunkAttention(rule, documents_of(bounds, parts), record, KVBook(), "layer")
    saved: list[list[tuple[torch.Size, torch.dtype]]] = []
    for is_replay in (False, True):
        record.is_replay = is_replay
        tensors: dict[int, Tensor] = {}
        with saved_tensors_hooks(lambda x, seen=tensors: seen.setdefault(len(seen), x), lambda x: x):
            attend(q, k, v)
        saved.append([(x.shape, x.dtype) for x in tensors.values()])
        # nothing that is saved holds more than itself
        assert sum(x.untyped_storage().nbytes() for x in tensors.values()) == sum(x.nbytes for x in tensors.values())
    # queries, output, LSE; keys and values of whole documents
    shapes = [(4, 12, 8), (12, 4, 8), (4, 12), *[(2, num_whole, 8)] * (2 if num_whole else 0)]
    assert saved[0] == saved[1] == [(torch.Size(shape), torch.float32) for shape in shapes]


def layer_bytes_of_norm(dtype: torch.dtype) -> int:
    """The final norm: fp32 input, product before the weight, root mean square; and the token ids."""
    return NUM_TOKENS * (HIDDEN * (4 + dtype.itemsize) + 4 + 8)


def test_the_engine_lets_go_of_everything_when_backward_is_done() -> None:
    model = build("llama", torch.float32, 3)
    patch_model(model)
    tier = HostTier(2**24, SlowlyLeaving())
    engine = ActivationEngine(layer_modules(model), tier)
    activations = engine.begin(ActivationPolicy(0, 0, (policy(0.5, 0.25, 0.5),) * 3, 64))
    context = GroupPool((1,), timeout_s=1.0).context(SequenceGroup((0,), "local", (), ()), Chunk(0, (Span(0, 0, NUM_TOKENS),)))
    ids, mask = torch.zeros(1, NUM_TOKENS, dtype=torch.int64), no_mask(torch.device("cpu"))
    context = replace(context, activations=activations)
    with activations.running():
        output = model.model(input_ids=ids, attention_mask=mask, use_cache=False, longctx=context)
    output.last_hidden_state.sum().backward()
    del output
    assert activations.held_bytes() == (sum(slot.whole_input_bytes for slot in activations.slots.values()), 0)
    assert tier.stored_bytes == 0


@pytest.mark.parametrize("host,num_alive", [(0.0, 2), (0.5, 0), (1.0, 0)])
def test_layer_inputs_on_the_host_are_gone_from_the_device(host: float, num_alive: int) -> None:
    model = build("llama", torch.float32, 3)
    patch_model(model)
    engine = ActivationEngine(layer_modules(model), HostTier(2**24, SlowlyLeaving()))
    activations = engine.begin(ActivationPolicy(0, 0, (policy(host, 0.0, 1.0),) * 3, 64))
    context = GroupPool((1,), timeout_s=1.0).context(SequenceGroup((0,), "local", (), ()), Chunk(0, (Span(0, 0, NUM_TOKENS),)))
    outputs: list[weakref.ref[Tensor]] = []
    # outputs of the first two layers are the inputs of the next ones
    handles = [
        layer.register_forward_hook(lambda module, inputs, output: outputs.append(weakref.ref(output)))
        for layer in model.model.layers[:2]
    ]
    ids, mask = torch.zeros(1, NUM_TOKENS, dtype=torch.int64), no_mask(torch.device("cpu"))
    context = replace(context, activations=activations)
    with activations.running():
        output = model.model(input_ids=ids, attention_mask=mask, use_cache=False, longctx=context)
    for handle in handles:
        handle.remove()
    # a tensor that autograd holds keeps its Python object
    assert sum(reference() is not None for reference in outputs) == num_alive
    output.last_hidden_state.sum().backward()


def test_layers_of_four_bits_under_adapters_in_fp32_save_no_more_than_is_predicted() -> None:
    pytest.importorskip("bitsandbytes")
    found = AdapterSpec()

    def prepare(model: Any) -> None:
        nonlocal found
        model.model = in_four_bits(model, "nf4").model.train()
        config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        found = adapter_spec(peft.get_peft_model(model, config))

    measured = layer_bytes("llama", torch.bfloat16, prepare)
    predicted = plain_layer_bytes(replace(spec(torch.bfloat16), adapters=found))
    assert measured <= predicted <= 1.2 * measured


ADAPTERS: dict[str, dict[str, Any]] = {
    "queries and values": {"target_modules": ["q_proj", "v_proj"]},
    "outputs": {"target_modules": ["o_proj", "down_proj"]},
    "all": {"target_modules": "all-linear"},
    # copies of all inputs, whatever their dtype
    "dropout": {"target_modules": "all-linear", "lora_dropout": 0.1},
    "narrow": {"target_modules": ["q_proj", "gate_proj"]},
}


@pytest.mark.wide("llama-False-dropout-dtype0", "llama-False-queries and values-dtype1", "llama-False-all-dtype0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize(("family", "is_autocast"), [("llama", False), ("qwen3", True)])
def test_frozen_layers_save_what_is_predicted(family: str, dtype: torch.dtype, is_autocast: bool, adapters: str) -> None:
    found, weights = AdapterSpec(), 0

    def prepare(model: Any) -> None:
        nonlocal found, weights
        layer = model.model.layers[0]
        weights = sum(weight.numel() for weight in layer.parameters() if weight.dim() > 1) if dtype == torch.float32 else 0
        config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", **ADAPTERS[adapters])
        # narrow adapters have the dtype of the model
        adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=adapters != "narrow")
        adapted.enable_input_require_grads()
        found = adapter_spec(adapted, is_autocast)
        FusedLayers("").bind(adapted)
        DropoutPatch().apply(model)
        if (keys := keys_of(model)) is not None:
            keys.tokens = keys.of_pieces([(NUM_TOKENS, 0)], torch.arange(NUM_TOKENS))

    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        measured = layer_bytes(family, dtype, prepare)
    if is_autocast:
        # rounded copies of weights, whose number does not depend on tokens
        is_rounded = not (adapters == "narrow" and dtype == torch.bfloat16)
        measured -= 2 * (weights + found.layer_parameters * is_rounded) / NUM_TOKENS
    shapes = replace(spec(dtype, family), adapters=found, bytes_sent_per_element=2 if is_autocast else 0)
    assert 0.999 * measured <= plain_layer_bytes(shapes) <= 1.001 * measured


@pytest.mark.daily("llama-False--dtype0", "llama-False--dtype1", "llama-False-queries and values-dtype0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("family", "is_autocast", "adapters"),
    # trained weights have rounded copies under autocast, which no formula counts
    [
        ("llama", False, ""),
        *((*case, name) for case in (("llama", False), ("qwen3", True)) for name in ("queries and values", "all")),
    ],
)
def test_layers_with_kernels_save_their_inputs_alone(
    family: str, dtype: torch.dtype, is_autocast: bool, adapters: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the compiler changes nothing that is saved
    monkeypatch.setattr(CompiledFunction, "_kernel", lambda self, function, tensors, needs: function)
    kernels: dict[str, bool] = {}
    found, weights = AdapterSpec(), 0

    def prepare(model: Any) -> None:
        nonlocal found, weights
        layer = model.model.layers[0]
        weights = sum(weight.numel() for weight in layer.parameters() if weight.dim() > 1) if dtype == torch.float32 else 0
        if adapters:
            model = peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **ADAPTERS[adapters]))
            model.enable_input_require_grads()
            found = adapter_spec(model, is_autocast)
        fused = FusedLayers("compile")
        kernels.update(fused.covered(model))
        fused.bind(model)

    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        measured = layer_bytes(family, dtype, prepare)
    if is_autocast:
        measured -= 2 * (weights + found.layer_parameters) / NUM_TOKENS
    assert kernels == {
        "fuses_norms": True,
        "fuses_gated_norms": False,
        "fuses_gates": True,
        "fuses_rotary": True,
        "fuses_convolutions": False,
    }
    shapes = replace(spec(dtype, family), adapters=found, bytes_sent_per_element=2 if is_autocast else 0, **kernels)
    assert 0.999 * measured <= plain_layer_bytes(shapes) <= 1.001 * measured


def test_adapters_of_a_config_are_those_of_peft() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(build("qwen3", dtype, 2), config)
        assert lora_adapters(spec(dtype), 4) == adapter_spec(model, is_autocast=dtype == torch.bfloat16)


MOE = {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64}
MIXTURES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 80},
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        transformers.GptOssForCausalLM,
        {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 80, "attn_implementation": "eager"},
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weights", [("gate_up_proj", "down_proj"), ("down_proj",), ()], ids="+".join)
@pytest.mark.parametrize("packed", ["", "nf4"])
@pytest.mark.parametrize("name", MIXTURES)
def test_adapted_experts_save_what_is_predicted(name: str, packed: Any, weights: tuple[str, ...], dtype: torch.dtype) -> None:
    if not weights and not packed:
        pytest.skip("frozen experts that are not packed run the forward of their class")
    config_class, model_class, sizes = MIXTURES[name]
    model = model_class(config_class(num_hidden_layers=1, **MOE, **sizes)).to(dtype).train()
    config = peft.LoraConfig(
        r=6,
        task_type="CAUSAL_LM",
        target_modules=[] if weights else ["q_proj"],
        target_parameters=[f"experts.{each}" for each in weights],
    )
    adapted = peft.get_peft_model(model, config)
    if packed:
        pack_experts(adapted, packed)
    shapes = replace(ModelSpec.from_config(model.config.to_dict(), dtype.itemsize), adapters=adapter_spec(adapted))
    layer = model.model.layers[0].mlp
    # bytes that the router saves: its logits and probabilities, its choice, and weights of the chosen
    hidden_1TC = torch.randn(1, NUM_TOKENS, MOE["hidden_size"], dtype=dtype, requires_grad=True)
    router = getattr(layer, "gate", None) or layer.router
    routing, _ = saved_bytes(adapted, lambda: router(hidden_1TC.view(-1, MOE["hidden_size"])))
    FusedLayers("").bind(adapted)
    found, _ = saved_bytes(adapted, lambda: layer(hidden_1TC))
    # places of rows are no saved tensors
    expected = class_bytes(shapes, "mlp") - 4 * 3
    # if no other node of the router saves the weights of the chosen, this one does
    assert expected <= (found - routing) / NUM_TOKENS <= expected + 3 * dtype.itemsize
