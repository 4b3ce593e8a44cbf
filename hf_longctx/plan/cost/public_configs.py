"""Sizes of public models in the fields of their config.json, from which `catalog.py` makes shapes by name.

A family is a function of the differences of its members; fields that no plan needs are omitted. For multimodal models this is the
decoder's config. `test_catalog.py` compares the parameters of each with the published count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Config = dict[str, Any]

_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _dense(
    model_type: str, widths: tuple[int, int, int], heads: tuple[int, int, int], vocab: int, positions: int, **own: Any
) -> Config:
    """Makes a decoder of equal layers. widths: layers, hidden size, MLP. heads: query heads, KV heads, elements per head."""
    (layers, hidden, mlp), (num_heads, num_kv_heads, head_dim) = widths, heads
    return {
        **{"model_type": model_type, "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": mlp},
        **{"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim},
        **{"vocab_size": vocab, "max_position_embeddings": positions, **own},
    }


def _llama(layers: int, hidden: int, mlp: int, heads: tuple[int, int, int], vocab: int = 128256, positions: int = 8192) -> Config:
    return _dense("llama", (layers, hidden, mlp), heads, vocab, positions)


def _llama4(num_experts: int, moe_layers: Sequence[int], positions: int) -> Config:
    """Makes a Llama 4: three of four layers see chunks of 8,192 tokens; MLPs are dense, or one expert and a shared one."""
    kinds = ["full_attention" if layer % 4 == 3 else "chunked_attention" for layer in range(48)]
    own: Config = {"intermediate_size_mlp": 16384, "num_local_experts": num_experts, "num_experts_per_tok": 1}
    own |= {"moe_layers": list(moe_layers), "attention_chunk_size": 8192, "layer_types": kinds}
    return _dense("llama4_text", (48, 5120, 8192), (40, 8, 128), 202048, positions, **own)


def _qwen25(layers: int, hidden: int, mlp: int, heads: tuple[int, int], *, is_tied: bool, positions: int = 131072) -> Config:
    vocab = 151936 if is_tied or hidden < 3584 else 152064
    sizes = (*heads, hidden // heads[0])
    return _dense("qwen2", (layers, hidden, mlp), sizes, vocab, positions, tie_word_embeddings=is_tied)


def _qwen3_moe(
    layers: int, hidden: int, heads: tuple[int, int], experts: tuple[int, int], mlp: int, positions: int = 40960
) -> Config:
    """Makes a Qwen3 with mixtures in all layers. experts: their number in a layer, and the inner size of each."""
    own = {"num_experts": experts[0], "num_experts_per_tok": 8, "moe_intermediate_size": experts[1], "decoder_sparse_step": 1}
    return _dense("qwen3_moe", (layers, hidden, mlp), (*heads, 128), 151936, positions, **own)


def _with_delta_nets(
    model_type: str, widths: tuple[int, int, int], heads: tuple[int, int], value_heads: int, vocab: int, **own: Any
) -> Config:
    """Makes a Qwen3-Next or Qwen 3.5: every fourth layer has attention, the others a gated delta net with 16 key heads."""
    states = {"linear_num_key_heads": 16, "linear_num_value_heads": value_heads, "linear_conv_kernel_dim": 4}
    states |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    return _dense(model_type, widths, (*heads, 256), vocab, 262144, **states, **own)


def _qwen35(layers: int, hidden: int, mlp: int, heads: tuple[int, int], value_heads: int, *, is_tied: bool = False) -> Config:
    return _with_delta_nets("qwen3_5_text", (layers, hidden, mlp), heads, value_heads, 248320, tie_word_embeddings=is_tied)


def _qwen35_moe(
    layers: int, hidden: int, heads: tuple[int, int], value_heads: int, experts: tuple[int, int, int], model_type: str = ""
) -> Config:
    """Makes a mixture with an additional expert for all tokens. experts: number in a layer, number per token, inner size."""
    own = {"num_experts": experts[0], "num_experts_per_tok": experts[1], "moe_intermediate_size": experts[2]}
    own["shared_expert_intermediate_size"] = experts[2]
    vocab = 151936 if model_type else 248320
    return _with_delta_nets(model_type or "qwen3_5_moe_text", (layers, hidden, experts[2]), heads, value_heads, vocab, **own)


def _glm4_moe(widths: tuple[int, int, int], experts: tuple[int, int], num_dense: int, positions: int, **own: Any) -> Config:
    own |= {"n_routed_experts": experts[0], "num_experts_per_tok": 8, "moe_intermediate_size": experts[1]}
    own |= {"n_shared_experts": 1, "first_k_dense_replace": num_dense}
    return _dense("glm4_moe", widths, (96, 8, 128), 151552, positions, **own)


def _latent(
    model_type: str, widths: tuple[int, int, int], heads: int, ranks: tuple[int | None, int], sizes: tuple[int, int, int]
) -> Config:
    """Makes latent attention. ranks: of queries (None: without a latent) and KV. sizes: unrotated, rotated, value elements."""
    own: Config = {"q_lora_rank": ranks[0], "kv_lora_rank": ranks[1]}
    own |= {"qk_nope_head_dim": sizes[0], "qk_rope_head_dim": sizes[1], "v_head_dim": sizes[2]}
    return {**_dense(model_type, widths, (heads, heads, sizes[0] + sizes[1]), 0, 0), **own}


def _routed(num: int, chosen: int, size: int, shared: int, num_dense: int) -> Config:
    """Makes DeepSeek's experts: their number, number per token, inner size, shared ones, first layers without experts."""
    return {
        **{"n_routed_experts": num, "num_experts_per_tok": chosen, "moe_intermediate_size": size},
        **{"n_shared_experts": shared, "first_k_dense_replace": num_dense},
    }


def _nemotron_h(pattern: str, hidden: int, mlp: int, heads: tuple[int, int], mamba: tuple[int, int]) -> Config:
    """Makes a Nemotron-H by its pattern of layers. mamba: heads of a mixer and the elements of each."""
    own: Config = {"mamba_num_heads": mamba[0], "mamba_head_dim": mamba[1], "ssm_state_size": 128, "n_groups": 8}
    own |= {"layers_block_type": [_LETTERS[letter] for letter in pattern], "chunk_size": 128, "expand": 2, "conv_kernel": 4}
    return _dense("nemotron_h", (len(pattern), hidden, mlp), (*heads, 128), 131072, 131072, **own)


def _gemma2(layers: int, hidden: int, mlp: int, heads: tuple[int, int, int]) -> Config:
    own = {"sliding_window": 4096, "tie_word_embeddings": True, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return _dense("gemma2", (layers, hidden, mlp), heads, 256000, 8192, **own)


def _mixtral(layers: int, hidden: int, mlp: int, heads: tuple[int, int], vocab: int, positions: int) -> Config:
    own = {"num_local_experts": 8, "num_experts_per_tok": 2}
    return _dense("mixtral", (layers, hidden, mlp), (*heads, 128), vocab, positions, **own)


def _olmo3(layers: int, hidden: int, mlp: int, heads: tuple[int, int]) -> Config:
    return _dense("olmo3", (layers, hidden, mlp), (*heads, 128), 100278, 65536, sliding_window=4096)


_KIMI_ATTENDING = (4, 8, 12, 16, 20, 24, 27)
_KIMI_STATES = {
    **{"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4, "full_attn_layers": list(_KIMI_ATTENDING)},
    "kda_layers": [layer for layer in range(1, 28) if layer not in _KIMI_ATTENDING],
}
_DEEPSEEK_V3 = _latent("deepseek_v3", (61, 7168, 18432), 128, (1536, 512), (128, 64, 128))
_DEEPSEEK_V3 |= {**_routed(256, 8, 2048, 1, 3), "vocab_size": 129280, "max_position_embeddings": 163840}
_NANO_9B = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
_NANO_12B = "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-"
_NANO_30B = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_NANO_EXPERTS = {"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "n_shared_experts": 1}

CONFIGS: Mapping[str, Config] = {
    "llama-2-7b": _llama(32, 4096, 11008, (32, 32, 128), 32000, 4096),
    "llama-2-13b": _llama(40, 5120, 13824, (40, 40, 128), 32000, 4096),
    "llama-2-70b": _llama(80, 8192, 28672, (64, 8, 128), 32000, 4096),
    "llama-3.1-405b": _llama(126, 16384, 53248, (128, 8, 128), positions=131072),
    "llama-4-scout": _llama4(16, range(48), 10485760),
    "llama-4-maverick": _llama4(128, range(1, 48, 2), 1048576),
    "qwen2.5-0.5b": _qwen25(24, 896, 4864, (14, 2), is_tied=True, positions=32768),
    "qwen2.5-1.5b": _qwen25(28, 1536, 8960, (12, 2), is_tied=True),
    "qwen2.5-3b": _qwen25(36, 2048, 11008, (16, 2), is_tied=True, positions=32768),
    "qwen2.5-14b": _qwen25(48, 5120, 13824, (40, 8), is_tied=False),
    "qwen2.5-32b": _qwen25(64, 5120, 27648, (40, 8), is_tied=False),
    "qwen2.5-72b": _qwen25(80, 8192, 29568, (64, 8), is_tied=False),
    "deepseek-r1-distill-qwen-1.5b": _qwen25(28, 1536, 8960, (12, 2), is_tied=False),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, (32, 4), (128, 768), 6144),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, (64, 4), (128, 1536), 12288),
    "qwen3-coder-480b-a35b": _qwen3_moe(62, 6144, (96, 8), (160, 2560), 8192, 262144),
    "qwen3-next-80b-a3b": _qwen35_moe(48, 2048, (16, 2), 32, (512, 10, 512), "qwen3_next"),
    "qwen3.5-0.8b": _qwen35(24, 1024, 3584, (8, 2), 16, is_tied=True),
    "qwen3.5-2b": _qwen35(24, 2048, 6144, (8, 2), 16, is_tied=True),
    "qwen3.5-4b": _qwen35(32, 2560, 9216, (16, 4), 32, is_tied=True),
    "qwen3.5-27b": _qwen35(64, 5120, 17408, (24, 4), 48),
    "qwen3.5-35b-a3b": _qwen35_moe(40, 2048, (16, 2), 32, (256, 8, 512)),
    "qwen3.5-122b-a10b": _qwen35_moe(48, 3072, (32, 2), 64, (256, 8, 1024)),
    "qwen3.5-397b-a17b": _qwen35_moe(60, 4096, (32, 2), 64, (512, 10, 1024)),
    "glm-4-9b": _dense("glm4", (40, 4096, 13696), (32, 2, 128), 151552, 32768),
    "glm-4-32b": _dense("glm4", (61, 6144, 23040), (48, 2, 128), 151552, 32768),
    "glm-4.5-air": _glm4_moe((46, 4096, 10944), (128, 1408), 1, 131072),
    "glm-4.5": _glm4_moe((92, 5120, 12288), (160, 1536), 3, 131072, use_qk_norm=True),
    "glm-4.7-flash": {
        **_latent("glm4_moe_lite", (47, 2048, 10240), 20, (768, 512), (192, 64, 256)),
        **_routed(64, 4, 1536, 1, 1),
        **{"vocab_size": 154880, "max_position_embeddings": 202752},
    },
    "deepseek-v2-lite": {
        **_latent("deepseek_v2", (27, 2048, 10944), 16, (None, 512), (128, 64, 128)),
        **_routed(64, 6, 1408, 2, 1),
        **{"vocab_size": 102400, "max_position_embeddings": 163840},
    },
    "deepseek-v3": _DEEPSEEK_V3,
    "kimi-k2": {
        **_latent("deepseek_v3", (61, 7168, 18432), 64, (1536, 512), (128, 64, 128)),
        **_routed(384, 8, 2048, 1, 1),
        **{"vocab_size": 163840, "max_position_embeddings": 131072},
    },
    "kimi-linear-48b-a3b": {
        **_latent("kimi_linear", (27, 2304, 9216), 32, (None, 512), (128, 64, 128)),
        **_routed(256, 8, 1024, 1, 1),
        **{"linear_attn_config": _KIMI_STATES, "vocab_size": 163840, "max_position_embeddings": 1048576},
    },
    "minimax-m2": _dense(
        *("minimax_m2", (62, 3072, 1536), (48, 8, 128), 200064, 196608),
        num_local_experts=256,
        num_experts_per_tok=8,
        use_qk_norm=True,
    ),
    "nemotron-nano-9b-v2": _nemotron_h(_NANO_9B, 4480, 15680, (40, 8), (128, 80)),
    "nemotron-nano-12b-v2": _nemotron_h(_NANO_12B, 5120, 20480, (40, 8), (128, 80)),
    "nemotron-3-nano-30b-a3b": {
        **_nemotron_h(_NANO_30B, 2688, 1856, (32, 2), (64, 64)),
        **_NANO_EXPERTS,
        **{"moe_shared_expert_intermediate_size": 3712, "max_position_embeddings": 262144},
    },
    "phi-3-mini": _dense("phi3", (32, 3072, 8192), (32, 32, 96), 32064, 131072),
    "phi-3-medium": _dense("phi3", (40, 5120, 17920), (40, 10, 128), 32064, 131072),
    "phi-4": _dense("phi3", (40, 5120, 17920), (40, 10, 128), 100352, 16384),
    "phi-4-mini": _dense("phi3", (32, 3072, 8192), (24, 8, 128), 200064, 131072, tie_word_embeddings=True),
    "gemma-2b": _dense("gemma", (18, 2048, 16384), (8, 1, 256), 256000, 8192, tie_word_embeddings=True),
    "gemma-2-2b": _gemma2(26, 2304, 9216, (8, 4, 256)),
    "gemma-2-9b": _gemma2(42, 3584, 14336, (16, 8, 256)),
    "gemma-2-27b": _gemma2(46, 4608, 36864, (32, 16, 128)),
    "mistral-nemo-12b": _dense("mistral", (40, 5120, 14336), (32, 8, 128), 131072, 131072),
    "mistral-small-24b": _dense("mistral", (40, 5120, 32768), (32, 8, 128), 131072, 131072),
    "mistral-large-123b": _dense("mistral", (88, 12288, 28672), (96, 8, 128), 32768, 131072),
    "codestral-22b": _dense("mistral", (56, 6144, 16384), (48, 8, 128), 32768, 32768),
    "ministral-8b": _dense("mistral", (36, 4096, 12288), (32, 8, 128), 131072, 32768),
    "ministral-3-3b": _dense("ministral3", (26, 3072, 9216), (32, 8, 128), 131072, 262144, tie_word_embeddings=True),
    "ministral-3-8b": _dense("ministral3", (34, 4096, 14336), (32, 8, 128), 131072, 262144),
    "ministral-3-14b": _dense("ministral3", (40, 5120, 16384), (32, 8, 128), 131072, 262144),
    "mixtral-8x7b": _mixtral(32, 4096, 14336, (32, 8), 32000, 32768),
    "mixtral-8x22b": _mixtral(56, 6144, 16384, (48, 8), 32768, 65536),
    "smollm3-3b": _dense("smollm3", (36, 2048, 11008), (16, 4, 128), 128256, 65536, tie_word_embeddings=True),
    "olmo-3-7b": _olmo3(32, 4096, 11008, (32, 32)),
    "olmo-3-32b": _olmo3(64, 5120, 27648, (40, 8)),
    "seed-oss-36b": _dense("seed_oss", (64, 5120, 27648), (80, 8, 128), 155136, 524288),
}
# further names of the same shapes, with their positions
ALIASES: Mapping[str, tuple[str, int]] = {
    "llama-3-8b": ("llama-3.1-8b", 8192),
    "llama-3-70b": ("llama-3.1-70b", 8192),
    "llama-3.3-70b": ("llama-3.1-70b", 131072),
    "deepseek-r1-distill-llama-8b": ("llama-3.1-8b", 131072),
    "deepseek-r1-distill-llama-70b": ("llama-3.1-70b", 131072),
    "deepseek-r1-distill-qwen-7b": ("qwen2.5-7b", 131072),
    "deepseek-r1-distill-qwen-14b": ("qwen2.5-14b", 131072),
    "deepseek-r1-distill-qwen-32b": ("qwen2.5-32b", 131072),
    "qwen2.5-coder-1.5b": ("qwen2.5-1.5b", 32768),
    "qwen2.5-coder-7b": ("qwen2.5-7b", 32768),
    "qwen2.5-coder-14b": ("qwen2.5-14b", 32768),
    "qwen2.5-coder-32b": ("qwen2.5-32b", 32768),
    "qwq-32b": ("qwen2.5-32b", 40960),
    "qwen3-4b-2507": ("qwen3-4b", 262144),
    "qwen3-30b-a3b-2507": ("qwen3-30b-a3b", 262144),
    "qwen3-235b-a22b-2507": ("qwen3-235b-a22b", 262144),
    "qwen3-coder-30b-a3b": ("qwen3-30b-a3b", 262144),
    "qwen3-coder-next": ("qwen3-next-80b-a3b", 262144),
    "glm-4.6": ("glm-4.5", 202752),
    "glm-4.7": ("glm-4.5", 202752),
    "deepseek-r1": ("deepseek-v3", 163840),
    "deepseek-v3.1": ("deepseek-v3", 163840),
    "deepseek-v3-0324": ("deepseek-v3", 163840),
    "deepseek-r1-0528": ("deepseek-v3", 163840),
    "kimi-k2-0905": ("kimi-k2", 262144),
    "phi-3-mini-4k": ("phi-3-mini", 4096),
    "phi-3-mini-128k": ("phi-3-mini", 131072),
    "phi-3-medium-4k": ("phi-3-medium", 4096),
    "phi-3-medium-128k": ("phi-3-medium", 131072),
    "phi-3.5-mini": ("phi-3-mini", 131072),
    "phi-4-reasoning": ("phi-4", 32768),
    "mistral-7b-v0.3": ("mistral-7b", 32768),
    "mixtral-8x7b-v0.1": ("mixtral-8x7b", 32768),
    "mixtral-8x22b-v0.1": ("mixtral-8x22b", 65536),
    "mistral-nemo-2407": ("mistral-nemo-12b", 131072),
    "mistral-large-2411": ("mistral-large-123b", 131072),
    "ministral-8b-2410": ("ministral-8b", 32768),
    "ministral-3-3b-2512": ("ministral-3-3b", 262144),
    "ministral-3-8b-2512": ("ministral-3-8b", 262144),
    "ministral-3-14b-2512": ("ministral-3-14b", 262144),
    "mistral-small-24b-2501": ("mistral-small-24b", 32768),
    "magistral-small-2506": ("mistral-small-24b", 131072),
    "magistral-small-2509": ("mistral-small-24b", 131072),
    "devstral-small-2507": ("mistral-small-24b", 131072),
    "mistral-small-3.1-24b-2503": ("mistral-small-24b", 131072),
    "mistral-small-3.2-24b-2506": ("mistral-small-24b", 131072),
    "glm-4-9b-0414": ("glm-4-9b", 32768),
    "glm-4-32b-0414": ("glm-4-32b", 32768),
    "mistral-small-3.1-24b": ("mistral-small-24b", 131072),
    "mistral-small-3.2-24b": ("mistral-small-24b", 131072),
    "magistral-small": ("mistral-small-24b", 131072),
    "devstral-small": ("mistral-small-24b", 131072),
    "llama-4-scout-17b-16e": ("llama-4-scout", 10485760),
    "llama-4-maverick-17b-128e": ("llama-4-maverick", 1048576),
}
