"""Tiny random models of many families, in fp64 unless a case says otherwise."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers
from helpers.models.versions import class_or_skip, skipping_unbuildable
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hf_longctx.hf.models.packed_experts import pack_experts
from hf_longctx.hf.models.quantised import round_frozen

FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 8}),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": None, "head_dim": 8}),
}
# settings that give a window of six tokens to all layers, to one of two, or to all from layer 1 on
_WINDOW = {"sliding_window": 6}
_ONE_OF_TWO = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_FROM_LAYER_1 = {**_WINDOW, "use_sliding_window": True, "max_window_layers": 1}
# latent attention: queries and keys have ten dimensions, values four
_LATENT = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
_LATENT |= {"num_key_value_heads": None}
_INDEX = {"num_key_value_heads": 4, "index_topk": 6, "index_head_dim": 8, "index_n_heads": 2}
# norms in other places, parallel blocks, scaled logits, layers without RoPE, with windows or with a RoPE of their own
OTHER_FAMILIES: dict[str, Any] = {
    "mistral_window": (transformers.MistralConfig, transformers.MistralForCausalLM, {**_WINDOW, "head_dim": 8}),
    "qwen2_window": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, _FROM_LAYER_1),
    "qwen3_window": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {**_FROM_LAYER_1, "head_dim": 8}),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM, {}),
    "olmo3": (transformers.Olmo3Config, transformers.Olmo3ForCausalLM, _ONE_OF_TWO),
    "phi": (transformers.PhiConfig, transformers.PhiForCausalLM, {}),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM, {**_WINDOW, "pad_token_id": 0}),
    "granite": (
        transformers.GraniteConfig,
        transformers.GraniteForCausalLM,
        {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "embedding_multiplier": 2.0, "logits_scaling": 2.0},
    ),
    "glm4": (transformers.Glm4Config, transformers.Glm4ForCausalLM, {"head_dim": 8, "pad_token_id": 0}),
    "smollm3": (
        transformers.SmolLM3Config,
        transformers.SmolLM3ForCausalLM,
        {**_ONE_OF_TWO, "use_sliding_window": True, "no_rope_layers": [1, 0], "pad_token_id": 0},
    ),
    "starcoder2": (
        transformers.Starcoder2Config,
        transformers.Starcoder2ForCausalLM,
        {**_WINDOW, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    ),
    "deepseek_v2": (
        transformers.DeepseekV2Config,
        transformers.DeepseekV2ForCausalLM,
        {**_LATENT, "v_head_dim": 12, "q_lora_rank": None, "first_k_dense_replace": 2},
    ),
    "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM, {**_LATENT, "first_k_dense_replace": 2}),
    # keys chosen by an index, which the next layer takes in the second model
    "deepseek_v32": (
        transformers.DeepseekV32Config,
        transformers.DeepseekV32ForCausalLM,
        {**_LATENT, **_INDEX, "first_k_dense_replace": 2},
    ),
    "glm_moe_dsa": (
        transformers.GlmMoeDsaConfig,
        transformers.GlmMoeDsaForCausalLM,
        {**_LATENT, **_INDEX, "first_k_dense_replace": 2, "index_topk_freq": 2, "index_skip_topk_offset": 1},
    ),
    "minicpm3": (
        transformers.MiniCPM3Config,
        transformers.MiniCPM3ForCausalLM,
        {**_LATENT, "dim_model_base": 16, "scale_emb": 2},
    ),
    "youtu": (
        transformers.YoutuConfig,
        transformers.YoutuForCausalLM,
        {**_LATENT, "num_key_value_heads": 4, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "glm4_moe_lite": (
        transformers.Glm4MoeLiteConfig,
        transformers.Glm4MoeLiteForCausalLM,
        {**_LATENT, "num_key_value_heads": 4, "mlp_layer_types": ["dense", "dense"]},
    ),
    "gemma": (transformers.GemmaConfig, transformers.GemmaForCausalLM, {"head_dim": 8}),
    # the softcap is about as large as the scores, so it changes many of them
    "gemma2": (
        transformers.Gemma2Config,
        transformers.Gemma2ForCausalLM,
        {
            **_ONE_OF_TWO,
            "head_dim": 8,
            "query_pre_attn_scalar": 11,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 3.0,
            "attn_implementation": "eager",
        },
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        transformers.Gemma3ForCausalLM,
        {
            **_ONE_OF_TWO,
            "head_dim": 8,
            "query_pre_attn_scalar": 11,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
            },
        },
    ),
    "cohere": (transformers.CohereConfig, transformers.CohereForCausalLM, {"logit_scale": 0.5}),
    "cohere2": (transformers.Cohere2Config, transformers.Cohere2ForCausalLM, {**_ONE_OF_TWO, "logit_scale": 0.5}),
}
_EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
# mixtures of experts; they run their eager implementation, since grouped products do not support fp64
MOE_FAMILIES: dict[str, Any] = {
    "mixtral": (
        transformers.MixtralConfig,
        transformers.MixtralForCausalLM,
        {**_EXPERTS, **_WINDOW, "num_local_experts": 4, "head_dim": 8},
    ),
    # one shared expert sees every token
    "qwen2_moe": (
        transformers.Qwen2MoeConfig,
        transformers.Qwen2MoeForCausalLM,
        {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True, "head_dim": 8},
    ),
    # the first layer has no experts
    "qwen3_moe_dense": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 24, "mlp_only_layers": [0], "head_dim": 8},
    ),
    "olmoe": (
        transformers.OlmoeConfig,
        transformers.OlmoeForCausalLM,
        {**_EXPERTS, "num_experts": 4, "eos_token_id": 1},
    ),
    # eager attention
    "gpt_oss": (
        transformers.GptOssConfig,
        transformers.GptOssForCausalLM,
        {**_EXPERTS, **_ONE_OF_TWO, "num_local_experts": 4, "head_dim": 8},
    ),
}
# two layers with chunks: the first has a rotary embedding, computed in fp32; the second scales queries by position instead
CHUNKED_FAMILIES: dict[str, Any] = {
    "llama4": (
        transformers.Llama4TextConfig,
        transformers.Llama4ForCausalLM,
        {
            **{"num_experts_per_tok": 1, "num_local_experts": 4, "moe_layers": [0], "intermediate_size_mlp": 40, "head_dim": 8},
            **{"layer_types": ["chunked_attention"] * 2, "no_rope_layers": [1, 0], "attention_chunk_size": 8, "floor_scale": 4},
        },
    ),
}
# layers with a state along the sequence and with attention; two key heads serve four value heads in the first family
_LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_value_heads": 4, "head_dim": 8}
_SCAN = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 16}
STATE_FAMILIES: dict[str, Any] = {
    "qwen3_5": (
        transformers.Qwen3_5TextConfig,
        transformers.Qwen3_5ForCausalLM,
        {**_LINEAR, "linear_num_key_heads": 2, "layer_types": [*["linear_attention"] * 3, "full_attention"]},
    ),
    # fewer heads with a state than attention has
    "qwen3_5_few": (
        transformers.Qwen3_5TextConfig,
        transformers.Qwen3_5ForCausalLM,
        {
            **{**_LINEAR, "linear_num_value_heads": 2, "linear_num_key_heads": 1},
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "olmo_hybrid": (
        transformers.OlmoHybridConfig,
        transformers.OlmoHybridForCausalLM,
        {**_LINEAR, "pad_token_id": 0, "linear_num_key_heads": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"]},
    ),
    # two groups serve four heads in the families of Mamba 2
    "bamba": (transformers.BambaConfig, transformers.BambaForCausalLM, {**_SCAN, "attn_layer_indices": [3]}),
    # experts and an MLP that all tokens share, under names of their own
    "granite_hybrid": (
        transformers.GraniteMoeHybridConfig,
        transformers.GraniteMoeHybridForCausalLM,
        {
            **{**_SCAN, **_EXPERTS, "num_local_experts": 4, "shared_intermediate_size": 40, "pad_token_id": 0},
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    # both attention and a state in every layer
    "falcon_h1": (transformers.FalconH1Config, transformers.FalconH1ForCausalLM, {**_SCAN, "mamba_d_ssm": 64}),
    "kimi_linear": (
        transformers.KimiLinearConfig,
        transformers.KimiLinearForCausalLM,
        {
            **{**_LATENT, "q_lora_rank": None, "num_key_value_heads": 4, "linear_head_dim": 8, "linear_num_heads": 4},
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "pad_token_id": 0},
            **{"layer_types": ["linear_attention", "full_attention"], "experts_implementation": "eager"},
        },
    ),
    # no attention; every channel has a state of its own, and nothing below the model's forward gets keywords
    "mamba": (transformers.MambaConfig, transformers.MambaForCausalLM, {"state_size": 4, "time_step_rank": 4}),
    # convolutions read six earlier tokens
    "lfm3": (
        class_or_skip("Lfm3Config"),
        class_or_skip("Lfm3ForCausalLM"),
        {
            **{**_WINDOW, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "rope_parameters": None},
            "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
        },
    ),
    "minimax": (
        transformers.MiniMaxConfig,
        transformers.MiniMaxForCausalLM,
        {
            **{"layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 8, "num_local_experts": 4},
            **{"num_experts_per_tok": 2, "experts_implementation": "eager"},
        },
    ),
    # no attention; means of values for each channel, and MLPs that read earlier tokens
    "rwkv": (transformers.RwkvConfig, transformers.RwkvForCausalLM, {"attention_hidden_size": 24}),
    # no attention; blocks of eight tokens, and documents that end between them
    "xlstm": (transformers.xLSTMConfig, transformers.xLSTMForCausalLM, {"num_heads": 4, "chunk_size": 8}),
    "recurrent_gemma": (
        transformers.RecurrentGemmaConfig,
        transformers.RecurrentGemmaForCausalLM,
        {"lru_width": 24, "attention_window_size": 6},
    ),
}
# defaults of a ModelCase: layers, KV heads, head size
NUM_LAYERS, NUM_KV, HEAD_DIM = 2, 2, 8
VOCAB_SIZE = 64
# padding token of models that classify
PAD = 7
# the longest document that dynamic and longrope do not scale
SHORT = 24
_SCALED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
ROPE: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", **_SCALED},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "longrope": {
        **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": SHORT},
        **{"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 8.0]},
    },
    # the limit is longer than the documents of the tests
    "longrope_far": {
        **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4 * SHORT},
        **{"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 8.0]},
    },
    # for heads with four rotated dimensions
    "longrope_narrow": {
        **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": SHORT},
        **{"short_factor": [1.0, 1.1], "long_factor": [2.0, 8.0], "attention_factor": 1.3},
    },
    "llama3": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_SCALED},
}


@dataclass(frozen=True)
class ModelCase:
    """A tiny model with heads of size 8.

    promoted: norms compute in the dtype of their input instead of fp32. lora: settings of a `LoraConfig`; without any, all
    weights are trained. four_bit: type of the frozen linear weights under the adapters. fp8: frozen matrices are rounded to
    fp8. balance: coefficient of the experts'
    balancing loss; None leaves it out. window: replaces the family's window in layers that have one; 0 keeps the family's.
    loss: the loss of a token by its name in `token_losses`; empty for cross-entropy. spread: experts are spread over the ranks
    that share one copy of sharded parameters. head: settings of a config with which the family's class for documents,
    or with `classifier_dropout` for tokens, is built; empty for its causal language model. dropout: rate of dropout of attention
    weights.
    """

    family: str = "llama"
    num_heads: int = 4
    num_kv_heads: int = 2
    promoted: bool = False
    seed: int = 0
    dtype: torch.dtype = torch.float64
    attention: str = "sdpa"
    tied: bool = False
    autocast: bool = False
    fp32_gradients: bool = True
    rope_type: str = "default"
    num_layers: int = 2
    lora: tuple[tuple[str, Any], ...] = ()
    four_bit: str = ""
    fp8: bool = False
    balance: float | None = None
    window: int = 0
    loss: str = ""
    spread: bool = False
    head: tuple[tuple[str, Any], ...] = ()
    dropout: float = 0.0
    # type of the frozen weights of experts
    packed: Any = ""
    # family of the teacher, for a loss beside one
    teacher: str = ""


def cast(model: transformers.PreTrainedModel, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """The model with weights of `dtype`, as `from_pretrained` loads it: rotary frequencies keep their own dtype."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model


def cast_as_kept(
    model: transformers.PreTrainedModel, dtype: torch.dtype, wide: torch.dtype = torch.float32
) -> transformers.PreTrainedModel:
    """The model with weights of `dtype`, but `wide` for those that its class keeps in fp32 beside bf16; buffers as `cast`."""
    kept = re.compile("|".join(model._get_dtype_plan(torch.bfloat16)))
    for name, parameter in cast(model, dtype).named_parameters():
        if kept.search(name):
            parameter.data = parameter.data.to(wide)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.float()
    return model


def in_four_bits(model: Any, kind: str) -> Any:
    """The model as transformers loads it with linear weights in four bits (nf4: with scales in eight bits).

    Products are in the model's dtype if that is a half precision, otherwise in fp32.
    """
    compute = model.dtype if model.dtype.itemsize == 2 else torch.float32
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=kind == "nf4",
        bnb_4bit_compute_dtype=compute,
    )
    weights = {name: weight.clone() for name, weight in cast(model, compute).state_dict().items()}
    return type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=weights,
        dtype=compute,
        quantization_config=settings,
        device_map={"": "cpu"},
        attn_implementation=model.config._attn_implementation,
    )


def _defaults(case: ModelCase) -> dict[str, Any]:
    """Settings of attention in a config, which a family may override; none in a family without attention."""
    if case.family in ("mamba", "rwkv", "xlstm"):
        return {}
    # Phi 3 has this field in the config itself too
    trained = ROPE[case.rope_type].get("original_max_position_embeddings")
    return {
        **({"original_max_position_embeddings": trained} if case.rope_type.startswith("longrope") else {}),
        "num_attention_heads": case.num_heads,
        "max_position_embeddings": SHORT if case.rope_type == "dynamic" else 512,
        "num_key_value_heads": case.num_kv_heads,
        "rope_parameters": ROPE[case.rope_type],
        "attn_implementation": case.attention,
        **({"attention_dropout": case.dropout} if case.dropout else {}),
    }


def build_model(case: ModelCase) -> transformers.PreTrainedModel:
    """The model of a case, in training mode, with weights so large that gradients are not tiny."""
    families = FAMILIES | OTHER_FAMILIES | MOE_FAMILIES | CHUNKED_FAMILIES | STATE_FAMILIES
    config_class, model_class, extra = families[case.family]
    if case.head:
        ending = "ForTokenClassification" if "classifier_dropout" in dict(case.head) else "ForSequenceClassification"
        model_class = getattr(transformers, model_class.__name__.replace("ForCausalLM", ending))
        extra = {**extra, **dict(case.head), "pad_token_id": PAD}
    if case.balance is not None:
        extra = {**extra, "output_router_logits": True, "router_aux_loss_coef": case.balance}
    if case.window:
        extra = {**extra, "sliding_window": case.window}
    with skipping_unbuildable():
        config = config_class(
            vocab_size=VOCAB_SIZE,
            hidden_size=8 * case.num_heads,
            intermediate_size=48,
            num_hidden_layers=case.num_layers,
            tie_word_embeddings=case.tied,
            # copied, because configs write into the dictionaries that they get
            **copy.deepcopy(_defaults(case) | extra),
        )
        torch.manual_seed(case.seed)
        model = model_class(config).double()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    widen_decays(model)
    model.tie_weights()
    # weights are drawn in fp64 and then rounded, so that models of all dtypes have the same weights up to rounding
    model = cast(model, case.dtype)
    if case.four_bit:
        model = cast(in_four_bits(model, case.four_bit), case.dtype)
    if case.autocast:
        model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    if case.promoted:
        promote_norms(model)
        promote_attention(model)
    model = adapted(model, **dict(case.lora)) if case.lora else model
    if case.packed:
        pack_experts(model, case.packed)
    if case.fp8:
        round_frozen(model)
    return model.train()


def widen_decays(model: Any) -> None:
    """Computes the decays of lightning attention in the model's dtype: rounded to fp32, they would depend on cuts."""
    for module in model.modules():
        if hasattr(module, "decay_factors"):
            module.query_decay, module.key_decay, module.diagonal_decay = module.decay_factors(module.slope_rate)


def adapted(
    model: Any, seed: int = 3, autocast: bool = False, names: tuple[str, ...] = ("default",), num_active: int = 1, **settings: Any
) -> Any:
    """The model with LoRA adapters that change its output, in its own dtype or (`autocast`) in fp32; the rest is frozen.

    names: of the adapters, of which the first ones are active.
    """
    # PEFT writes into lists that it gets
    config = peft.LoraConfig(**{"init_lora_weights": False, "task_type": "CAUSAL_LM", **copy.deepcopy(settings)})
    model = peft.get_peft_model(model, config, adapter_name=names[0], autocast_adapter_dtype=autocast)
    for name in names[1:]:
        model.add_adapter(name, copy.deepcopy(config), autocast_adapter_dtype=autocast)
    if num_active > 1:
        model.base_model.set_adapter(list(names[:num_active]))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            dtype = parameter.dtype if autocast else model.dtype
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2
            # DoRA's magnitudes lie about one and must stay there
            parameter.data = (parameter.data.double() * ("magnitude" in name) + noise).to(dtype)
    return model


def promote_norms(model: torch.nn.Module) -> None:
    """Replaces the norms of this model alone by norms without the cast to fp32 that those of transformers do."""

    def root_mean_square(norm: Any, x: Tensor) -> Tensor:
        return norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon))

    def of_gemma(norm: Any, x: Tensor) -> Tensor:
        return (1 + norm.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps))

    def of_cohere(norm: Any, x: Tensor) -> Tensor:
        return norm.weight * F.layer_norm(x, x.shape[-1:], eps=norm.variance_epsilon)

    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            module.forward = (of_gemma if name.startswith(("Gemma", "Qwen3_5")) else root_mean_square).__get__(module)
        elif name.startswith("Cohere") and name.endswith("LayerNorm"):
            module.forward = of_cohere.__get__(module)


class _Wide(TorchFunctionMode):
    """Context in which `Tensor.float` and softmax leave fp64 tensors in fp64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in (F.softmax, Tensor.float) and args[0].dtype == torch.float64:
            if function is Tensor.float:
                return args[0]
            kwargs["dtype"] = None
        return function(*args, **kwargs)


def promote_attention(model: torch.nn.Module) -> None:
    """Removes, for this model alone, the casts to fp32 of eager attention's scores and of DeepSeek V2's rotated queries."""

    def widened(run: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            with _Wide():
                return run(*args, **kwargs)

        return forward

    for module in model.modules():
        name = type(module).__name__
        if name == "DeepseekV2Attention" or (name.endswith("Attention") and model.config._attn_implementation == "eager"):
            module.forward = widened(module.forward)


def with_lora(model: Any, names: tuple[str, ...] = ("default",)) -> Any:
    """The model with adapters of rank two in attention and MLP, all of them active."""
    targets = ["q_proj", "k_proj", "v_proj", "down_proj"]
    return adapted(model, names=names, num_active=len(names), r=2, lora_alpha=8, target_modules=targets)


LLAMA_SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def tiny_llama(**settings: Any) -> PreTrainedModel:
    """A Llama in fp32 with these settings in its config, initialised by transformers."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA_SHAPE, **settings}))
