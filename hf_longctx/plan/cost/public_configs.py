"""Configs of public models by name: the fields of each config.json that plans read. `catalog.py` makes shapes from them.

A family is a model type, the fields that its members share, and a row for each member: layers, hidden size, MLP, query heads, KV
heads, and fields in which it differs. For multimodal models this is the decoder's config. `test_catalog.py` loads every config
with transformers' own class, and compares fields, spec, and the parameters of the model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

Config = dict[str, Any]
# layers, hidden size, MLP, query heads, KV heads, and other fields
_Row = tuple[int, int, int, int, int] | tuple[int, int, int, int, int, Config]

_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def _family(model_type: str, rows: Mapping[str, _Row], positions: int = 0, vocab: int = 0, **shared: Any) -> dict[str, Config]:
    """Returns configs by name. positions, vocab: of all members whose row has no others. A size of 0 is no field of the class."""
    shared = {"model_type": model_type, "max_position_embeddings": positions, "vocab_size": vocab, **shared}
    return {
        name: {**shared, **{field: size for field, size in zip(_SIZES, row[:5], strict=True) if size}, **dict(*row[5:])}
        for name, row in rows.items()
    }


def _positions(number: int, **others: Any) -> Config:
    return {"max_position_embeddings": number, **others}


def _kinds(num_layers: int, attending: Collection[int], other: str, attention: str = "attention") -> list[str]:
    """Returns types of layers, of which those in `attending` have attention."""
    return [attention if layer in attending else other for layer in range(num_layers)]


def _experts(number: int, chosen: int, size: int, shared: int = 0) -> Config:
    """Returns experts of a layer. chosen: experts of a token. size: width of each. shared: width of one for all tokens."""
    own = {"num_experts": number, "num_experts_per_tok": chosen, "moe_intermediate_size": size}
    return own | ({"shared_expert_intermediate_size": shared} if shared else {})


def _routed(number: int, chosen: int, size: int, num_dense: int, num_shared: int = 1) -> Config:
    """Returns DeepSeek's experts. num_dense: first layers without them. num_shared: experts for all tokens."""
    own = {"n_routed_experts": number, "num_experts_per_tok": chosen, "moe_intermediate_size": size}
    return own | {"n_shared_experts": num_shared, "first_k_dense_replace": num_dense}


def _wide_experts(number: int, chosen: int, size: int, latent: int | None = None) -> Config:
    """Returns Nemotron's experts, with one twice as wide for all tokens. latent: size of what experts read and write."""
    own = {"n_routed_experts": number, "num_experts_per_tok": chosen, "moe_intermediate_size": size, "n_shared_experts": 1}
    return own | {"moe_shared_expert_intermediate_size": 2 * size, "moe_latent_size": latent}


def _llama4_experts(number: int, every: int, positions: int, *, has_norms: bool) -> Config:
    """Returns experts in each `every`-th layer of a Llama 4, its positions, and whether queries and keys are normalized."""
    own = {"num_local_experts": number, "interleave_moe_layer_step": every, "use_qk_norm": has_norms}
    return own | _positions(positions)


def _latent(q_rank: int | None, kv_rank: int, sizes: tuple[int, int, int], **others: Any) -> Config:
    """Returns latent attention. q_rank: None if queries have none. sizes: unrotated, rotated and value elements of a head."""
    own = {"q_lora_rank": q_rank, "kv_lora_rank": kv_rank}
    return own | dict(zip(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), sizes, strict=True)) | others


def _index(num_heads: int, chosen: int = 2048) -> Config:
    """Returns an index with heads of 128. chosen: keys, or compressed keys, of a token."""
    return {"index_n_heads": num_heads, "index_head_dim": 128, "index_topk": chosen}


def _delta(value_heads: int, **others: Any) -> Config:
    """Returns gated delta nets with 16 key heads in three of four layers, beside attention with heads of 256."""
    own = {"head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": value_heads, "linear_conv_kernel_dim": 4}
    return own | {"linear_key_head_dim": 128, "linear_value_head_dim": 128} | others


def _gemma4(every: int, num_layers: int, window: int, positions: int, **others: Any) -> Config:
    """Returns a Gemma 4 in which each `every`-th layer has full attention, with heads of their own size."""
    kinds = _kinds(num_layers, range(every - 1, num_layers, every), "sliding_attention", _FULL)
    own = {"head_dim": 256, "global_head_dim": 512, "sliding_window": window, "layer_types": kinds}
    return own | {"final_logit_softcapping": 30.0, **_TIED, **_positions(positions), **others}


def _own_inputs(num_shared: int) -> Config:
    """Returns inputs of layers from a table. num_shared: layers that read keys and values of earlier ones."""
    own = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144}
    return own | {"num_kv_shared_layers": num_shared}


def _keys_as_values(num_heads: int) -> Config:
    """Returns keys of layers with full attention that are values, too."""
    return {"attention_k_eq_v": True, "num_global_key_value_heads": num_heads}


def _mamba(heads: int, head_dim: int, pattern: str, positions: int = 262144, **experts: Any) -> Config:
    """Returns mixers of a Nemotron-H and the pattern of its layers: M has a state, * attention, - an MLP, E experts."""
    letters = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    own = {"mamba_num_heads": heads, "mamba_head_dim": head_dim, "layers_block_type": [letters[each] for each in pattern]}
    return own | _positions(positions) | experts


def _granite(
    kinds: list[str], shared: int, mixers: tuple[int, int] = (0, 0), experts: tuple[int, int] = (0, 0), **others: Any
) -> Config:
    """Returns a Granite 4. shared: width of the MLP for all tokens. mixers: heads, size of each. experts: number, of a token."""
    own: Config = {"layer_types": kinds, "shared_intermediate_size": shared}
    own |= {"num_local_experts": experts[0], "num_experts_per_tok": experts[1]}
    if mixers[0]:
        own |= {"mamba_n_heads": mixers[0], "mamba_d_head": mixers[1], "mamba_d_state": 128, "mamba_d_conv": 4}
        own |= {"mamba_expand": 2, "mamba_n_groups": 1, "mamba_chunk_size": 256}
    return own | others


_128K, _256K = 131072, 262144
_FULL = "full_attention"
_TIED: Config = {"tie_word_embeddings": True}
_LLAMA_2 = _positions(4096, vocab_size=32000)
_SMOLLM_2 = _positions(8192, vocab_size=49152, **_TIED)
_GEMMA: Config = {"head_dim": 256, **_TIED}
_SMALL_GEMMA_3 = _positions(32768, vocab_size=262144, sliding_window=512)
_GEMMA_4_EXPERTS = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
_GRANITE_32, _GRANITE_40 = _kinds(32, (10, 13, 17, 27), "mamba"), _kinds(40, (5, 15, 25, 35), "mamba")
_GLM_5_INDEXES = ["full" if layer < 2 or layer % 4 == 2 else "shared" for layer in range(78)]
_V4_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
_V4_TYPES = ["sliding_attention"] * 2 + [list(_V4_RATES)[layer % 2] for layer in range(41)]
_LFM_KINDS = ("conv", _FULL)
_LFM_2 = {"layer_types": _kinds(16, (2, 5, 8, 10, 12, 14), *_LFM_KINDS), "block_auto_adjust_ff_dim": True}
_LFM_2 |= {"block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0}
_LFM_25 = {"layer_types": _kinds(30, (2, 5, 9, 13, 17, 21, 24, 27), *_LFM_KINDS), "block_auto_adjust_ff_dim": False}
_LFM_25 |= _positions(131072, vocab_size=128000)
# a checkpoint of Kimi Linear numbers its layers from 1
_KIMI = (4, 8, 12, 16, 20, 24, 27)
_KIMI_STATES = {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4, "full_attn_layers": list(_KIMI)}
_KIMI_STATES |= {"kda_layers": [layer for layer in range(1, 28) if layer not in _KIMI]}
_NANO_4B = "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-"
_NANO_9B = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
_NANO_12B = "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-"
_NANO_30B = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
_ULTRA = "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"

CONFIGS: Mapping[str, Config] = {
    **_family(
        "llama",
        {
            "llama-2-7b": (32, 4096, 11008, 32, 32, _LLAMA_2),
            "llama-2-13b": (40, 5120, 13824, 40, 40, _LLAMA_2),
            "llama-2-70b": (80, 8192, 28672, 64, 8, _LLAMA_2),
            "llama-3.1-8b": (32, 4096, 14336, 32, 8),
            "llama-3.1-70b": (80, 8192, 28672, 64, 8),
            "llama-3.1-405b": (126, 16384, 53248, 128, 8),
            "llama-3.2-1b": (16, 2048, 8192, 32, 8, _TIED),
            "llama-3.2-3b": (28, 3072, 8192, 24, 8, _TIED),
            "smollm2-135m": (30, 576, 1536, 9, 3, _SMOLLM_2),
            "smollm2-360m": (32, 960, 2560, 15, 5, _SMOLLM_2),
            "smollm2-1.7b": (24, 2048, 8192, 32, 32, _SMOLLM_2),
        },
        positions=_128K,
        vocab=128256,
    ),
    **_family(
        "llama4_text",
        {
            "llama-4-scout": (48, 5120, 8192, 40, 8, _llama4_experts(16, 1, 10485760, has_norms=True)),
            "llama-4-maverick": (48, 5120, 8192, 40, 8, _llama4_experts(128, 2, 1048576, has_norms=False)),
        },
        vocab=202048,
        **{"head_dim": 128, "intermediate_size_mlp": 16384, "num_experts_per_tok": 1, "attention_chunk_size": 8192},
    ),
    **_family(
        "qwen2",
        {
            "qwen2.5-0.5b": (24, 896, 4864, 14, 2, _positions(32768, vocab_size=151936, **_TIED)),
            "qwen2.5-1.5b": (28, 1536, 8960, 12, 2, {"vocab_size": 151936, **_TIED}),
            "qwen2.5-3b": (36, 2048, 11008, 16, 2, _positions(32768, vocab_size=151936, **_TIED)),
            "qwen2.5-7b": (28, 3584, 18944, 28, 4),
            "qwen2.5-14b": (48, 5120, 13824, 40, 8),
            "qwen2.5-32b": (64, 5120, 27648, 40, 8),
            "qwen2.5-72b": (80, 8192, 29568, 64, 8),
            "deepseek-r1-distill-qwen-1.5b": (28, 1536, 8960, 12, 2, {"vocab_size": 151936}),
        },
        positions=_128K,
        vocab=152064,
    ),
    **_family(
        "qwen3",
        {
            "qwen3-0.6b": (28, 1024, 3072, 16, 8, _TIED),
            "qwen3-1.7b": (28, 2048, 6144, 16, 8, _TIED),
            "qwen3-4b": (36, 2560, 9728, 32, 8, _TIED),
            "qwen3-8b": (36, 4096, 12288, 32, 8),
            "qwen3-14b": (40, 5120, 17408, 40, 8),
            "qwen3-32b": (64, 5120, 25600, 64, 8),
        },
        positions=40960,
        vocab=151936,
        head_dim=128,
    ),
    **_family(
        "qwen3_moe",
        {
            "qwen3-30b-a3b": (48, 2048, 6144, 32, 4, _experts(128, 8, 768)),
            "qwen3-235b-a22b": (94, 4096, 12288, 64, 4, _experts(128, 8, 1536)),
            "qwen3-coder-480b-a35b": (62, 6144, 8192, 96, 8, _positions(_256K, **_experts(160, 8, 2560))),
        },
        positions=40960,
        vocab=151936,
        **{"head_dim": 128, "decoder_sparse_step": 1},
    ),
    **_family(
        "qwen3_next",
        {"qwen3-next-80b-a3b": (48, 2048, 5120, 16, 2, _delta(32, **_experts(512, 10, 512, 512)))},
        positions=_256K,
        vocab=151936,
    ),
    **_family(
        "qwen3_5_text",
        {
            "qwen3.5-0.8b": (24, 1024, 3584, 8, 2, _delta(16, **_TIED)),
            "qwen3.5-2b": (24, 2048, 6144, 8, 2, _delta(16, **_TIED)),
            "qwen3.5-4b": (32, 2560, 9216, 16, 4, _delta(32, **_TIED)),
            "qwen3.5-9b": (32, 4096, 12288, 16, 4, _delta(32)),
            "qwen3.5-27b": (64, 5120, 17408, 24, 4, _delta(48)),
        },
        positions=_256K,
        vocab=248320,
    ),
    **_family(
        "qwen3_5_moe_text",
        {
            "qwen3.5-35b-a3b": (40, 2048, 0, 16, 2, _delta(32, **_experts(256, 8, 512, 512))),
            "qwen3.5-122b-a10b": (48, 3072, 0, 32, 2, _delta(64, **_experts(256, 8, 1024, 1024))),
            "qwen3.5-397b-a17b": (60, 4096, 0, 32, 2, _delta(64, **_experts(512, 10, 1024, 1024))),
        },
        positions=_256K,
        vocab=248320,
    ),
    **_family("gemma", {"gemma-2b": (18, 2048, 16384, 8, 1), "gemma-7b": (28, 3072, 24576, 16, 16)}, 8192, 256000, **_GEMMA),
    **_family(
        "gemma2",
        {
            "gemma-2-2b": (26, 2304, 9216, 8, 4),
            "gemma-2-9b": (42, 3584, 14336, 16, 8),
            "gemma-2-27b": (46, 4608, 36864, 32, 16, {"head_dim": 128}),
        },
        positions=8192,
        vocab=256000,
        **{**_GEMMA, "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    **_family(
        "gemma3_text",
        {
            "gemma-3-270m": (18, 640, 2048, 4, 1, _SMALL_GEMMA_3),
            "gemma-3-1b": (26, 1152, 6912, 4, 1, _SMALL_GEMMA_3),
            "gemma-3-4b": (34, 2560, 10240, 8, 4),
            "gemma-3-12b": (48, 3840, 15360, 16, 8),
            "gemma-3-27b": (62, 5376, 21504, 32, 16, {"head_dim": 128}),
        },
        positions=_128K,
        vocab=262208,
        **{**_GEMMA, "sliding_window": 1024},
    ),
    **_family(
        "gemma4_text",
        {
            "gemma-4-e2b": (35, 1536, 6144, 8, 1, _gemma4(5, 35, 512, _128K, **_own_inputs(20), use_double_wide_mlp=True)),
            "gemma-4-e4b": (42, 2560, 10240, 8, 2, _gemma4(6, 42, 512, _128K, **_own_inputs(18))),
            "gemma-4-26b-a4b": (30, 2816, 2112, 16, 8, _gemma4(6, 30, 1024, _256K, **_keys_as_values(2), **_GEMMA_4_EXPERTS)),
            "gemma-4-31b": (60, 5376, 21504, 32, 16, _gemma4(6, 60, 1024, _256K, **_keys_as_values(4))),
        },
        vocab=262144,
        hidden_size_per_layer_input=0,
    ),
    **_family(
        "gemma4_unified_text",
        {"gemma-4-12b": (48, 3840, 15360, 16, 8, _gemma4(6, 48, 1024, _256K, **_keys_as_values(1)))},
        vocab=262144,
    ),
    **_family(
        "gpt_oss",
        {
            "gpt-oss-20b": (24, 2880, 2880, 64, 8, {"num_local_experts": 32}),
            "gpt-oss-120b": (36, 2880, 2880, 64, 8, {"num_local_experts": 128}),
        },
        positions=_128K,
        vocab=201088,
        **{"head_dim": 64, "sliding_window": 128, "num_experts_per_tok": 4},
    ),
    **_family(
        "glm4",
        {"glm-4-9b": (40, 4096, 13696, 32, 2), "glm-4-32b": (61, 6144, 23040, 48, 2)},
        positions=32768,
        vocab=151552,
        head_dim=128,
    ),
    **_family(
        "glm4_moe",
        {
            "glm-4.5-air": (46, 4096, 10944, 96, 8, _routed(128, 8, 1408, 1)),
            "glm-4.5": (92, 5120, 12288, 96, 8, {**_routed(160, 8, 1536, 3), "use_qk_norm": True}),
        },
        positions=_128K,
        vocab=151552,
        head_dim=128,
    ),
    **_family(
        "glm4_moe_lite",
        {"glm-4.7-flash": (47, 2048, 10240, 20, 20, _latent(768, 512, (192, 64, 256), **_routed(64, 4, 1536, 1)))},
        positions=202752,
        vocab=154880,
    ),
    **_family(
        "glm_moe_dsa",
        {
            "glm-5": (78, 6144, 12288, 64, 64),
            "glm-5.2": (78, 6144, 12288, 64, 64, _positions(1048576, indexer_types=_GLM_5_INDEXES)),
        },
        positions=202752,
        vocab=154880,
        **_latent(2048, 512, (192, 64, 256), **_routed(256, 8, 2048, 3), **_index(32)),
    ),
    **_family(
        "deepseek_v2",
        {"deepseek-v2-lite": (27, 2048, 10944, 16, 16, _latent(None, 512, (128, 64, 128), **_routed(64, 6, 1408, 1, 2)))},
        positions=163840,
        vocab=102400,
    ),
    **_family(
        "deepseek_v3",
        {
            "deepseek-v3": (61, 7168, 18432, 128, 128, _routed(256, 8, 2048, 3)),
            "kimi-k2": (61, 7168, 18432, 64, 64, _positions(_128K, vocab_size=163840, **_routed(384, 8, 2048, 1))),
        },
        positions=163840,
        vocab=129280,
        **_latent(1536, 512, (128, 64, 128)),
    ),
    **_family(
        "deepseek_v32",
        {"deepseek-v3.2": (61, 7168, 18432, 128, 128, _routed(256, 8, 2048, 3))},
        positions=163840,
        vocab=129280,
        **_latent(1536, 512, (128, 64, 128), **_index(64)),
    ),
    **_family(
        "deepseek_v4",
        {"deepseek-v4-flash": (43, 4096, 0, 64, 1, {"layer_types": _V4_TYPES})},
        positions=1048576,
        vocab=129280,
        head_dim=512,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=6,
        moe_intermediate_size=2048,
        q_lora_rank=1024,
        o_groups=8,
        o_lora_rank=1024,
        sliding_window=128,
        compress_rates=_V4_RATES,
        hc_mult=4,
        **_index(64, chosen=512),
    ),
    **_family(
        "kimi_linear",
        {"kimi-linear-48b-a3b": (27, 2304, 9216, 32, 32, _latent(None, 512, (128, 64, 128), **_routed(256, 8, 1024, 1)))},
        positions=1048576,
        vocab=163840,
        linear_attn_config=_KIMI_STATES,
    ),
    **_family(
        "minimax_m2",
        {"minimax-m2": (62, 3072, 1536, 48, 8)},
        positions=196608,
        vocab=200064,
        **{"head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8, "use_qk_norm": True},
    ),
    **_family(
        "nemotron_h",
        {
            "nemotron-nano-9b-v2": (56, 4480, 15680, 40, 8, _mamba(128, 80, _NANO_9B, _128K)),
            "nemotron-nano-12b-v2": (62, 5120, 20480, 40, 8, _mamba(128, 80, _NANO_12B, _128K)),
            "nemotron-3-nano-4b": (42, 3136, 12544, 40, 8, _mamba(96, 80, _NANO_4B)),
            "nemotron-3-nano-30b-a3b": (52, 2688, 1856, 32, 2, _mamba(64, 64, _NANO_30B, **_wide_experts(128, 6, 1856))),
            "nemotron-3-super-120b-a12b": (88, 4096, 2688, 32, 2, _mamba(128, 64, _SUPER, **_wide_experts(512, 22, 2688, 1024))),
            "nemotron-3-ultra-550b-a55b": (108, 8192, 5120, 64, 2, _mamba(256, 64, _ULTRA, **_wide_experts(512, 22, 5120, 2048))),
        },
        vocab=131072,
        **{"head_dim": 128, "ssm_state_size": 128, "n_groups": 8, "chunk_size": 128, "expand": 2, "conv_kernel": 4},
    ),
    **_family(
        "granite",
        {
            "granite-3.3-2b": (40, 2048, 8192, 32, 8, {"vocab_size": 49159}),
            "granite-3.3-8b": (40, 4096, 12800, 32, 8, {"vocab_size": 49159}),
            "granite-4.1-3b": (40, 2560, 8192, 40, 8),
            "granite-4.1-8b": (40, 4096, 12800, 32, 8),
            "granite-4.1-30b": (64, 4096, 32768, 32, 8),
        },
        positions=_128K,
        vocab=100352,
        **_TIED,
    ),
    **_family(
        "granitemoehybrid",
        {
            "granite-4.0-350m": (28, 1024, 2048, 16, 4, _granite(["attention"] * 28, 2048, max_position_embeddings=32768)),
            "granite-4.0-1b": (40, 2048, 4096, 16, 4, _granite(["attention"] * 40, 4096)),
            "granite-4.0-micro": (40, 2560, 8192, 40, 8, _granite(["attention"] * 40, 8192)),
            "granite-4.0-h-350m": (32, 768, 2048, 12, 4, _granite(_GRANITE_32, 2048, (48, 32), max_position_embeddings=32768)),
            "granite-4.0-h-1b": (40, 1536, 4096, 12, 4, _granite(_GRANITE_40, 4096, (48, 64))),
            "granite-4.0-h-micro": (40, 2048, 8192, 32, 8, _granite(_GRANITE_40, 8192, (64, 64))),
            "granite-4.0-h-tiny": (40, 1536, 512, 12, 4, _granite(_GRANITE_40, 1024, (48, 64), (64, 6))),
            "granite-4.0-h-small": (40, 4096, 768, 32, 8, _granite(_GRANITE_40, 1536, (128, 64), (72, 10))),
        },
        positions=_128K,
        vocab=100352,
        **_TIED,
    ),
    **_family(
        "lfm2",
        {
            "lfm2-350m": (16, 1024, 6656, 16, 8, _LFM_2),
            "lfm2-1.2b": (16, 2048, 12288, 32, 8, _LFM_2),
            "lfm2.5-2.6b": (30, 2048, 10752, 32, 8, _LFM_25),
        },
        positions=128000,
        vocab=65536,
        conv_L_cache=3,
        **_TIED,
    ),
    **_family(
        "lfm2_moe",
        {"lfm2-8b-a1b": (24, 2048, 7168, 32, 8), "lfm2.5-8b-a1b": (24, 2048, 7168, 32, 8, {"vocab_size": 128000})},
        positions=128000,
        vocab=65536,
        **{"conv_L_cache": 3, "num_dense_layers": 2, "layer_types": _kinds(24, (2, 6, 10, 14, 18, 21), *_LFM_KINDS)},
        **_experts(32, 4, 1792),
        **_TIED,
    ),
    **_family(
        "phi3",
        {
            "phi-3-mini": (32, 3072, 8192, 32, 32, _positions(_128K)),
            "phi-3-mini-4k": (32, 3072, 8192, 32, 32, _positions(4096, sliding_window=2047)),
            "phi-3-medium": (40, 5120, 17920, 40, 10, _positions(_128K)),
            "phi-3-medium-4k": (40, 5120, 17920, 40, 10, _positions(4096, sliding_window=2047)),
            "phi-4": (40, 5120, 17920, 40, 10, _positions(16384, vocab_size=100352)),
            "phi-4-mini": (32, 3072, 8192, 24, 8, _positions(_128K, vocab_size=200064, **_TIED)),
        },
        vocab=32064,
        sliding_window=None,
    ),
    **_family(
        "mistral",
        {
            "mistral-7b-v0.1": (32, 4096, 14336, 32, 8, {"vocab_size": 32000, "sliding_window": 4096}),
            "mistral-7b-v0.2": (32, 4096, 14336, 32, 8, {"vocab_size": 32000}),
            "mistral-7b": (32, 4096, 14336, 32, 8),
            "ministral-8b": (36, 4096, 12288, 32, 8, {"vocab_size": 131072}),
            "mistral-nemo-12b": (40, 5120, 14336, 32, 8, _positions(_128K, vocab_size=131072)),
            "codestral-22b": (56, 6144, 16384, 48, 8),
            "mistral-small-24b": (40, 5120, 32768, 32, 8, _positions(_128K, vocab_size=131072)),
            "mistral-large-123b": (88, 12288, 28672, 96, 8, _positions(_128K)),
        },
        positions=32768,
        vocab=32768,
        **{"head_dim": 128, "sliding_window": None},
    ),
    **_family(
        "ministral3",
        {
            "ministral-3-3b": (26, 3072, 9216, 32, 8, _TIED),
            "ministral-3-8b": (34, 4096, 14336, 32, 8),
            "ministral-3-14b": (40, 5120, 16384, 32, 8),
        },
        positions=_256K,
        vocab=131072,
        head_dim=128,
    ),
    **_family(
        "mistral4",
        {"mistral-small-4-119b": (36, 4096, 12288, 32, 32, _latent(1024, 256, (64, 64, 128), **_routed(128, 4, 2048, 0)))},
        positions=1048576,
        vocab=131072,
    ),
    **_family(
        "mixtral",
        {
            "mixtral-8x7b": (32, 4096, 14336, 32, 8),
            "mixtral-8x22b": (56, 6144, 16384, 48, 8, _positions(65536, vocab_size=32768)),
        },
        positions=32768,
        vocab=32000,
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    **_family(
        "olmo2",
        {"olmo-2-7b": (32, 4096, 11008, 32, 32), "olmo-2-13b": (40, 5120, 13824, 40, 40)},
        positions=4096,
        vocab=100352,
    ),
    **_family(
        "olmo3",
        {"olmo-3-7b": (32, 4096, 11008, 32, 32), "olmo-3-32b": (64, 5120, 27648, 40, 8)},
        positions=65536,
        vocab=100278,
        sliding_window=4096,
    ),
    **_family(
        "olmo_hybrid",
        {"olmo-hybrid-7b": (32, 3840, 11008, 30, 30, {"layer_types": _kinds(32, range(3, 32, 4), "linear_attention", _FULL)})},
        positions=65536,
        vocab=100352,
        linear_num_key_heads=30,
        linear_num_value_heads=30,
        linear_key_head_dim=96,
        linear_value_head_dim=192,
        linear_conv_kernel_dim=4,
    ),
    **_family("smollm3", {"smollm3-3b": (36, 2048, 11008, 16, 4)}, 65536, 128256, **_TIED),
    **_family("seed_oss", {"seed-oss-36b": (64, 5120, 27648, 80, 8)}, 524288, 155136, head_dim=128, attention_dropout=0.1),
}
# further names of the same shapes, with their positions; words such as "Instruct" need no entry
ALIASES: Mapping[str, tuple[str, int]] = {
    "llama-3-8b": ("llama-3.1-8b", 8192),
    "llama-3-70b": ("llama-3.1-70b", 8192),
    "llama-3.3-70b": ("llama-3.1-70b", _128K),
    "llama-4-scout-17b-16e": ("llama-4-scout", 10485760),
    "llama-4-maverick-17b-128e": ("llama-4-maverick", 1048576),
    "deepseek-r1-distill-llama-8b": ("llama-3.1-8b", _128K),
    "deepseek-r1-distill-llama-70b": ("llama-3.1-70b", _128K),
    "deepseek-r1-distill-qwen-7b": ("qwen2.5-7b", _128K),
    "deepseek-r1-distill-qwen-14b": ("qwen2.5-14b", _128K),
    "deepseek-r1-distill-qwen-32b": ("qwen2.5-32b", _128K),
    "qwen2.5-coder-0.5b": ("qwen2.5-0.5b", 32768),
    "qwen2.5-coder-1.5b": ("qwen2.5-1.5b", 32768),
    "qwen2.5-coder-3b": ("qwen2.5-3b", 32768),
    "qwen2.5-coder-7b": ("qwen2.5-7b", 32768),
    "qwen2.5-coder-14b": ("qwen2.5-14b", 32768),
    "qwen2.5-coder-32b": ("qwen2.5-32b", 32768),
    "qwq-32b": ("qwen2.5-32b", 40960),
    "qwen3-4b-2507": ("qwen3-4b", _256K),
    "qwen3-30b-a3b-2507": ("qwen3-30b-a3b", _256K),
    "qwen3-235b-a22b-2507": ("qwen3-235b-a22b", _256K),
    "qwen3-coder-30b-a3b": ("qwen3-30b-a3b", _256K),
    "qwen3-coder-next": ("qwen3-next-80b-a3b", _256K),
    "qwen3.6-27b": ("qwen3.5-27b", _256K),
    "qwen3.6-35b-a3b": ("qwen3.5-35b-a3b", _256K),
    "gpt-oss-safeguard-20b": ("gpt-oss-20b", _128K),
    "gpt-oss-safeguard-120b": ("gpt-oss-120b", _128K),
    "glm-4-9b-0414": ("glm-4-9b", 32768),
    "glm-4-32b-0414": ("glm-4-32b", 32768),
    "glm-4.6": ("glm-4.5", 202752),
    "glm-4.7": ("glm-4.5", 202752),
    "glm-5.1": ("glm-5", 202752),
    "deepseek-r1": ("deepseek-v3", 163840),
    "deepseek-r1-0528": ("deepseek-v3", 163840),
    "deepseek-v3-0324": ("deepseek-v3", 163840),
    "deepseek-v3.1": ("deepseek-v3", 163840),
    "deepseek-v3.1-terminus": ("deepseek-v3", 163840),
    "deepseek-v3.2-exp": ("deepseek-v3.2", 163840),
    "kimi-k2-0905": ("kimi-k2", _256K),
    "kimi-k2-thinking": ("kimi-k2", _256K),
    "kimi-k2.5": ("kimi-k2", _256K),
    "kimi-k2.6": ("kimi-k2", _256K),
    "minimax-m2.5": ("minimax-m2", 196608),
    "minimax-m2.7": ("minimax-m2", 204800),
    "nemotron-3.5-lightning-30b-a3b": ("nemotron-3-nano-30b-a3b", 1048576),
    "lfm2.5-350m": ("lfm2-350m", 128000),
    "lfm2.5-1.2b": ("lfm2-1.2b", 128000),
    "phi-3-mini-128k": ("phi-3-mini", _128K),
    "phi-3-medium-128k": ("phi-3-medium", _128K),
    "phi-3.5-mini": ("phi-3-mini", _128K),
    "phi-4-reasoning": ("phi-4", 32768),
    "phi-4-reasoning-plus": ("phi-4", 32768),
    "phi-4-mini-reasoning": ("phi-4-mini", _128K),
    "mistral-7b-v0.3": ("mistral-7b", 32768),
    "mixtral-8x7b-v0.1": ("mixtral-8x7b", 32768),
    "mixtral-8x22b-v0.1": ("mixtral-8x22b", 65536),
    "mistral-nemo-2407": ("mistral-nemo-12b", _128K),
    "codestral-22b-v0.1": ("codestral-22b", 32768),
    "mistral-large-2407": ("mistral-large-123b", _128K),
    "mistral-large-2411": ("mistral-large-123b", _128K),
    "ministral-8b-2410": ("ministral-8b", 32768),
    "ministral-3-3b-2512": ("ministral-3-3b", _256K),
    "ministral-3-8b-2512": ("ministral-3-8b", _256K),
    "ministral-3-14b-2512": ("ministral-3-14b", _256K),
    "mistral-small-24b-2501": ("mistral-small-24b", 32768),
    "mistral-small-3.1-24b": ("mistral-small-24b", _128K),
    "mistral-small-3.1-24b-2503": ("mistral-small-24b", _128K),
    "mistral-small-3.2-24b": ("mistral-small-24b", _128K),
    "mistral-small-3.2-24b-2506": ("mistral-small-24b", _128K),
    "mistral-small-4-119b-2603": ("mistral-small-4-119b", 1048576),
    "magistral-small": ("mistral-small-24b", _128K),
    "magistral-small-2506": ("mistral-small-24b", _128K),
    "magistral-small-2509": ("mistral-small-24b", _128K),
    "devstral-small": ("mistral-small-24b", _128K),
    "devstral-small-2505": ("mistral-small-24b", _128K),
    "devstral-small-2507": ("mistral-small-24b", _128K),
    "olmo-2-1124-7b": ("olmo-2-7b", 4096),
    "olmo-2-1124-13b": ("olmo-2-13b", 4096),
    "olmo-3-1025-7b": ("olmo-3-7b", 65536),
    "olmo-3-1125-32b": ("olmo-3-32b", 65536),
    "olmo-3.1-32b": ("olmo-3-32b", 65536),
}
