"""Shapes of well-known models by name, for plans without a checkpoint (`hf-longctx plan --model NAME`).

Most are made from the fields in `public_configs.py`; the others are here.
GPT-7B, 13B and 30B are the models of FlexSP's experiments (arXiv 2412.01523): 64 heads, an MLP four times as wide as the hidden
size without a gate, GPT-2's vocabulary with untied embeddings, and learned positions up to the context limit, here 192,000.
Qwen3.5-9B has the defaults of transformers' `Qwen3_5TextConfig`, which its documentation calls "Qwen3.5-9B style". GPT-OSS-120B
has those of `GptOssConfig`; the smaller one has fewer layers and experts. Models of Gemma 4 are the decoders of their public
configs.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hf_longctx.families.registry import family_of_type
from hf_longctx.plan.cost.profiles import normal_name
from hf_longctx.plan.cost.public_configs import ALIASES, CONFIGS
from hf_longctx.plan.model.config import kernel_fields
from hf_longctx.plan.model.model_spec import ModelSpec

_TIED = True
# beginning of a name -> model type of the decoder in its config
_TYPES = {
    **{"llama": "llama", "mistral": "mistral", "qwen2.5": "qwen2", "qwen3-": "qwen3", "qwen3.5": "qwen3_5_text"},
    **{"gemma-7b": "gemma", "gemma-3": "gemma3_text", "gemma-4": "gemma4_text", "gpt-oss": "gpt_oss"},
}
# field of `ModelSpec` -> name of the functions that then run as kernels
_KERNELS = {"fuses_norms": "norms", "fuses_gates": "gates", "fuses_rotary": "rotary embeddings"}


def _gpt(num_layers: int, hidden_size: int) -> ModelSpec:
    mlp, head_dim = 4 * hidden_size, hidden_size // 64
    spec = ModelSpec(num_layers, hidden_size, mlp, 64, 64, head_dim, vocab_size=50257, max_positions=192_000)
    return replace(spec, gated_mlp=False, learned_positions=True)


def _gemma3(num_layers: int, hidden_size: int, mlp: int, heads: tuple[int, int, int], positions: int, window: int) -> ModelSpec:
    """Makes the decoder of a Gemma 3: five layers with a sliding window, then one with full attention, and so on."""
    windows = tuple(window if (layer + 1) % 6 else None for layer in range(num_layers))
    spec = ModelSpec(num_layers, hidden_size, mlp, *heads, vocab_size=262144, max_positions=positions)
    return replace(spec, tied_embeddings=True, qk_norms=True, windows=windows)


def _gemma4(sizes: Mapping[str, int], full_every: int, **own: Any) -> ModelSpec:
    """Makes the decoder of a Gemma 4: each `full_every`-th layer has full attention, with heads of another size."""
    common = {"model_type": "gemma4_text", "vocab_size": 262144, "head_dim": 256, "global_head_dim": 512}
    common |= {"tie_word_embeddings": True, "final_logit_softcapping": 30.0}
    layers = range(sizes["num_hidden_layers"])
    kinds = ["sliding_attention" if (layer + 1) % full_every else "full_attention" for layer in layers]
    return ModelSpec.from_config({**common, **sizes, "layer_types": kinds, **own})


def _gemma4_sizes(layers: int, hidden: int, mlp: int, heads: tuple[int, int], positions: int, window: int) -> dict[str, int]:
    return {
        **{"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": mlp},
        **{"num_attention_heads": heads[0], "num_key_value_heads": heads[1]},
        **{"max_position_embeddings": positions, "sliding_window": window},
    }


# the small models have separate inputs of layers, the large ones keys that are also values
_OWN_INPUTS = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144}
_FEW_KV = {"attention_k_eq_v": True}


def _qwen35(num_layers: int, hidden_size: int, mlp: int, heads: tuple[int, int, int], states: tuple[int, int]) -> ModelSpec:
    """Makes the decoder of a Qwen 3.5 in sizes of transformers' config: every fourth layer has attention, others a state."""
    return ModelSpec.from_config(
        {
            "model_type": "qwen3_5_text",
            **{"num_hidden_layers": num_layers, "hidden_size": hidden_size, "intermediate_size": mlp},
            **dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim"), heads, strict=True)),
            **dict(zip(("linear_num_key_heads", "linear_num_value_heads"), states, strict=True)),
            **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4},
            **{"vocab_size": 248320, "max_position_embeddings": 32768},
        }
    )


def _gpt_oss(num_layers: int, num_experts: int) -> ModelSpec:
    """Makes a GPT-OSS: every other layer has a sliding window, and every MLP is a mixture with four experts per token."""
    layer_types = ("sliding_attention", "full_attention")
    return ModelSpec.from_config(
        {
            "model_type": "gpt_oss",
            **{"num_hidden_layers": num_layers, "hidden_size": 2880, "intermediate_size": 2880, "sliding_window": 128},
            **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64},
            **{"num_local_experts": num_experts, "num_experts_per_tok": 4},
            **{"vocab_size": 201088, "max_position_embeddings": 131072},
            "layer_types": [layer_types[layer % 2] for layer in range(num_layers)],
        }
    )


# from each config.json: layers, hidden, intermediate, query heads, KV heads, head size, vocabulary, positions, tied embeddings
_MODELS: dict[str, ModelSpec] = {
    "gpt-7b": _gpt(32, 4096),
    "gpt-13b": _gpt(40, 5120),
    "gpt-30b": _gpt(60, 6656),
    "llama-3.1-8b": ModelSpec(32, 4096, 14336, 32, 8, 128, 128256, 131072),
    "llama-3.1-70b": ModelSpec(80, 8192, 28672, 64, 8, 128, 128256, 131072),
    "llama-3.2-1b": ModelSpec(16, 2048, 8192, 32, 8, 64, 128256, 131072, _TIED),
    "llama-3.2-3b": ModelSpec(28, 3072, 8192, 24, 8, 128, 128256, 131072, _TIED),
    "qwen3-0.6b": ModelSpec(28, 1024, 3072, 16, 8, 128, 151936, 40960, _TIED, qk_norms=True),
    "qwen3-1.7b": ModelSpec(28, 2048, 6144, 16, 8, 128, 151936, 40960, _TIED, qk_norms=True),
    "qwen3-4b": ModelSpec(36, 2560, 9728, 32, 8, 128, 151936, 40960, _TIED, qk_norms=True),
    "qwen3-8b": ModelSpec(36, 4096, 12288, 32, 8, 128, 151936, 40960, qk_norms=True),
    "qwen3-14b": ModelSpec(40, 5120, 17408, 40, 8, 128, 151936, 40960, qk_norms=True),
    "qwen3-32b": ModelSpec(64, 5120, 25600, 64, 8, 128, 151936, 40960, qk_norms=True),
    "qwen3.5-9b": _qwen35(32, 4096, 12288, (16, 4, 256), (16, 32)),
    "qwen2.5-7b": ModelSpec(28, 3584, 18944, 28, 4, 128, 152064, 131072),
    "mistral-7b": ModelSpec(32, 4096, 14336, 32, 8, 128, 32768, 32768),
    "gemma-7b": ModelSpec(28, 3072, 24576, 16, 16, 256, 256000, 8192, _TIED),
    "gemma-3-1b": _gemma3(26, 1152, 6912, (4, 1, 256), 32768, 512),
    "gemma-3-12b": _gemma3(48, 3840, 15360, (16, 8, 256), 131072, 1024),
    "gemma-3-27b": _gemma3(62, 5376, 21504, (32, 16, 128), 131072, 1024),
    "gemma-4-e2b": _gemma4(
        _gemma4_sizes(35, 1536, 6144, (8, 1), 131072, 512), 5, num_kv_shared_layers=20, use_double_wide_mlp=True, **_OWN_INPUTS
    ),
    "gemma-4-e4b": _gemma4(_gemma4_sizes(42, 2560, 10240, (8, 2), 131072, 512), 6, num_kv_shared_layers=18, **_OWN_INPUTS),
    "gemma-4-26b-a4b": _gemma4(
        _gemma4_sizes(30, 2816, 2112, (16, 8), 262144, 1024),
        6,
        num_global_key_value_heads=2,
        **_FEW_KV,
        **{"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
    ),
    "gemma-4-31b": _gemma4(_gemma4_sizes(60, 5376, 21504, (32, 16), 262144, 1024), 6, num_global_key_value_heads=4, **_FEW_KV),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    **{name: replace(ModelSpec.from_config(config), cuts_heads=False) for name, config in CONFIGS.items()},
}
_MODELS |= {name: replace(_MODELS[other], max_positions=positions) for name, (other, positions) in ALIASES.items()}
# words of a name on the Hub that do not concern the shape
_NEUTRAL = {"base", "bf16", "chat", "hf", "instruct", "it", "meta", "nvidia", "pt", "thinking"}


def model_names() -> tuple[str, ...]:
    """Returns all names for `named_model`."""
    return tuple(_MODELS)


def _known_name(name: str) -> str:
    """Returns the name in the catalogue, "qwen3-8b" for "Qwen3-8B-Base"; empty for an unknown one."""
    plain = "-".join(word for word in re.split(r"[\s_-]+", name) if word.lower() not in _NEUTRAL)
    spellings = {normal_name(known): known for known in _MODELS}
    return next((spellings[one] for one in map(normal_name, (name, plain)) if one in spellings), "")


def named_model(name: str, bytes_per_element: int = 2) -> ModelSpec:
    """Returns the spec of the model with this name; case and separators do not matter. Weights are bf16 by default.

    Raises ValueError with close matches for an unknown name.
    """
    if known := _known_name(name):
        spec = _MODELS[known]
        capped_bytes = bytes_per_element if spec.capped_bytes else 0
        cuts_heads = family_of_type(named_type(known)).traits.cuts_heads
        return replace(spec, bytes_per_element=bytes_per_element, capped_bytes=capped_bytes, cuts_heads=cuts_heads)
    close = difflib.get_close_matches(name.lower(), _MODELS, n=3, cutoff=0.5)
    near = " or ".join(close) if close else "a name that `hf-longctx plan --list models` prints"
    raise ValueError(f"model {name!r} is not known; give {near}, or the path of a config.json")


def named_type(name: str) -> str:
    """Returns the decoder's model type, as in its config, of a model in the catalogue; empty for GPTs."""
    known_name = _known_name(name)
    shape, _ = ALIASES.get(known_name, (known_name, 0))
    if shape in CONFIGS:
        return str(CONFIGS[shape]["model_type"])
    name = shape or name
    known = {normal_name(start): model_type for start, model_type in _TYPES.items()}
    matching = [start for start in known if normal_name(name).startswith(start)]
    # the longer of two matches, such as qwen3 and qwen3.5
    return known[max(matching, key=len)] if matching else ""


def is_named(name: str) -> bool:
    """Whether the name is in the catalogue."""
    try:
        named_model(name)
    except ValueError:
        return False
    return True


def spec_name(spec: ModelSpec) -> str:
    """Returns a name for these shapes: the catalogue's (in bf16), or a list of shapes and bytes, with the kernels.

    Models with equal names cost the same.
    """
    if has_kernels(spec):
        kernels: dict[str, Any] = {field: getattr(spec, field) for field in _KERNELS}
        return with_kernels(spec_name(without_kernels(spec)), kernels)
    # updates of weights, and savings of memory, do not change the seconds of a chunk
    spec = replace(spec, has_master_weights=False, updates_on_host=False, moment_bytes=0.0)
    spec = replace(spec, saves_kv_once=False, cuts_heads=False, capped_bytes=0, tower_parameters=0, frozen_parameters=0)
    spec = replace(spec, layers_on_host=False)
    for known, shapes in _MODELS.items():
        if replace(shapes, bytes_per_element=2, max_positions=spec.max_positions, capped_bytes=0) == spec:
            return known
    values = f" and {spec.value_head_dim}" if spec.value_head_dim else ""
    ranks = f", made of {spec.query_rank} and {spec.kv_rank} + {spec.rope_head_dim}" if spec.kv_rank else ""
    capped = ", scores capped" if spec.caps_scores else ""
    capped += ", attention weights dropped" if spec.drops_weights else ""
    normed = ", queries and keys normed" if spec.qk_norms else ""
    sent = f", {spec.bytes_sent_per_element} sent" if spec.bytes_sent_per_element not in (0, spec.bytes_per_element) else ""
    trained, _ = spec.adapters.sizes(spec.num_layers, True, True)
    adapters = f", {trained} trained beside them" if trained else ""
    packed = "" if spec.packed.is_empty else f", layers packed to {spec.packed.layer_bytes + spec.packed.layer_scale_bytes}"
    idle = f", {spec.idle_parameters} idle in a layer" if spec.idle_parameters else ""
    others = Counter(own for own in spec.heads if own[:2] != (spec.num_kv_heads, spec.head_dim))
    other_heads = "".join(f" and {own.num_kv} of {own.head_dim} in {count} layers" for own, count in sorted(others.items()))
    sizes = Counter(window for window in spec.windows if window)
    windows = "".join(f", windows of {window} in {count} layers" for window, count in sorted(sizes.items()))
    states = spec.states
    carried = f", states of {states.heads} x {states.head_elements} in {sum(states.layers)} layers" if not states.is_empty else ""
    index = spec.index
    chosen = f", {index.most_keys} keys chosen by {index.num_heads} x {index.head_dim} in {index.num_chosen} layers"
    carried += "" if index.is_empty else chosen
    vocabulary = f"{spec.vocab_size}{' tied' if spec.tied_embeddings else ''}"
    vocabulary += f" to {spec.num_labels} labels" if spec.num_labels else ""
    return (
        f"{spec.num_layers} layers of {spec.hidden_size} and {spec.intermediate_size}{'' if spec.gated_mlp else ' ungated'}, "
        f"{spec.num_heads}/{spec.num_kv_heads} heads of {spec.head_dim}{other_heads}{values}{ranks}{capped}{windows}{carried}, "
        f"vocabulary {vocabulary}, {spec.bytes_per_element} bytes{sent}{normed}{idle}{packed}{adapters}"
    )


def has_kernels(spec: ModelSpec) -> bool:
    """Whether any function of the model's layers runs as a kernel."""
    return any(getattr(spec, field) for field in _KERNELS)


def without_kernels(spec: ModelSpec) -> ModelSpec:
    """Returns the model without kernels in its layers."""
    return replace(spec, **kernel_fields(""))


def with_kernels(name: str, kernels: Mapping[str, bool]) -> str:
    """Returns the name of a model with these kernels. kernels: fields of `ModelSpec`."""
    named = [word for field, word in _KERNELS.items() if kernels.get(field)]
    return f"{name}, {' and '.join(named)} as kernels" if named else name


def no_model(name: str) -> str:
    """Returns the message about the name of an unknown model."""
    return (
        f"model {name!r} is neither a config.json, nor a folder with one, nor a name that `hf-longctx plan --list models` "
        f"prints; give one of these"
    )
