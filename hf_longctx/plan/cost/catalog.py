"""Shapes of well-known models by name, for plans without a checkpoint (`hf-longctx plan --model NAME`).

They are read from the configs in `public_configs.py` as from a config.json. GPT-7B, 13B and 30B are the models of FlexSP's
experiments (arXiv 2412.01523): 64 heads, an MLP four times as wide as the hidden size without a gate, GPT-2's vocabulary with
untied embeddings, and learned positions up to the context limit, here 192,000.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from hf_longctx.plan.cost.profiles import normal_name
from hf_longctx.plan.cost.public_configs import ALIASES, CONFIGS, Config
from hf_longctx.plan.model.config import kernel_fields
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.model.towers import NO_TOWER

# field of `ModelSpec` -> name of the functions that then run as kernels
_KERNELS = {
    **{"fuses_norms": "norms", "fuses_gated_norms": "gated norms", "fuses_gates": "gates"},
    **{"fuses_rotary": "rotary embeddings", "fuses_convolutions": "short convolutions"},
    "fuses_scans": "scans",
}
# layers and hidden sizes
_GPTS = {"gpt-7b": (32, 4096), "gpt-13b": (40, 5120), "gpt-30b": (60, 6656)}
# words of a name on the Hub that do not concern the shape
_NEUTRAL = {
    *("4bit", "awq", "base", "bf16", "bnb", "chat", "fp8", "gptq", "hf", "instruct", "it", "meta", "nvidia", "nvfp4", "pt"),
    *("reasoning", "think", "thinking", "unsloth"),
}
# parts of a name: numbers of experts with their size, sizes of all and of active or effective weights, words, and versions
_PARTS = re.compile(r"\d+x\d+b|[ae]?\d+(?:\.\d+)?[bm](?![a-z])|[a-z]+|\d+(?:\.\d+)*")
_NEAREST = 3
# least likeness of the first words of two names of one family, so that a letter may be wrong
_LIKE = 0.75


def _gpt(num_layers: int, hidden_size: int) -> ModelSpec:
    mlp, head_dim = 4 * hidden_size, hidden_size // 64
    spec = ModelSpec(num_layers, hidden_size, mlp, 64, 64, head_dim, vocab_size=50257, max_positions=192_000)
    return replace(spec, gated_mlp=False, learned_positions=True)


@cache
def _known_names() -> dict[str, str]:
    """Returns all names of the catalogue by their normal spelling."""
    return {normal_name(name): name for name in (*_GPTS, *CONFIGS, *ALIASES)}


def model_names() -> tuple[str, ...]:
    """Returns all names for `named_model`."""
    return tuple(_known_names().values())


def _known_name(name: str) -> str:
    """Returns the name in the catalogue, "qwen3-8b" for "Qwen3-8B-Base"; empty for an unknown one."""
    plain = "-".join(word for word in re.split(r"[\s_-]+", name) if word.lower() not in _NEUTRAL)
    return next((_known_names()[one] for one in map(normal_name, (name, plain)) if one in _known_names()), "")


def named_config(name: str) -> Config | None:
    """Returns the fields of the config.json of a model in the catalogue; None for GPTs and unknown names."""
    known = _known_name(name)
    shape, positions = ALIASES.get(known, (known, 0))
    config = CONFIGS.get(shape)
    return config if config is None or not positions else {**config, "max_position_embeddings": positions}


def named_model(name: str, bytes_per_element: int = 2) -> ModelSpec:
    """Returns the spec of the model with this name; case and separators do not matter. Weights are bf16 by default.

    Raises ValueError with the nearest names, and with what to give in place of a name, for an unknown one.
    """
    if (config := named_config(name)) is not None:
        return ModelSpec.from_config(config, bytes_per_element)
    if known := _known_name(name):
        return replace(_gpt(*_GPTS[known]), bytes_per_element=bytes_per_element)
    near = nearest_names(name)
    nearest = (
        f"the nearest known names are {', '.join(near)}" if near else "`hf-longctx plan --list models` prints the known names"
    )
    raise ValueError(f"model {name!r} is not known; {nearest}; for any other model give the path of its config.json")


def nearest_names(name: str) -> tuple[str, ...]:
    """Returns the names of the catalogue that are nearest by meaning: of the same family first, then by version and size."""
    asked = _parts(name)
    found = {known: _likeness(asked, _parts(known)) for known in model_names()}
    same = {known: asked[:1] == _parts(known)[:1] for known in found}
    return tuple(sorted((known for known in found if found[known]), key=lambda known: (-same[known], -found[known]))[:_NEAREST])


def _parts(name: str) -> list[str]:
    return [part for part in _PARTS.findall(name.lower()) if part not in _NEUTRAL]


def _likeness(asked: list[str], known: list[str]) -> float:
    """Returns how near two names are, given their parts; 0 if their first words differ.

    A version counts half if only its first number is equal, and a size by its ratio to the other one. Words that one name lacks
    count against it, so that "qwen3-coder" stands behind "qwen3" unless asked for.
    """
    brand = difflib.SequenceMatcher(None, asked[0], known[0]).ratio() if asked and known else 0.0
    if brand < _LIKE:
        return 0.0
    sizes = [_sizes(asked), _sizes(known)]
    versions = [[part for part in each if part[0].isdigit() and part[-1].isdigit()][:1] for each in (asked, known)]
    words = [{part for part in each[1:] if part.isalpha()} for each in (asked, known)]
    alike = sum(min(sizes[0][kind], sizes[1][kind]) / max(sizes[0][kind], sizes[1][kind]) for kind in sizes[0].keys() & sizes[1])
    version = 0.0
    if versions[0] and versions[1]:
        version = 2.0 * (versions[0] == versions[1]) or float(versions[0][0].split(".")[0] == versions[1][0].split(".")[0])
    other = len(words[0] & words[1]) - 0.5 * len(words[0] ^ words[1]) - 0.1 * len(sizes[0].keys() ^ sizes[1].keys())
    return max(0.01, 4 * brand + version + 3 * alike + other)


def _sizes(parts: list[str]) -> dict[str, float]:
    """Returns billions of all weights by "", of active ones by "a" and of effective ones by "e"; "8x7b" counts as 56."""
    found: dict[str, float] = {}
    for part in parts:
        if part[-1] in "bm" and any(letter.isdigit() for letter in part):
            numbers = [float(number) for number in part.strip("aebm").split("x")]
            # a later one may be a context of a million tokens
            found.setdefault(part[0] if part[0] in "ae" else "", math.prod(numbers) / (1000 if part.endswith("m") else 1))
    return found


def named_type(name: str) -> str:
    """Returns the decoder's model type, as in its config, of a model in the catalogue; empty for GPTs and unknown names."""
    return str((named_config(name) or {}).get("model_type", ""))


@cache
def _shapes() -> dict[str, ModelSpec]:
    """Returns the shapes by which `spec_name` finds names, without what does not change the seconds of a chunk."""
    return {name: _plain(named_model(name)) for name in (*_GPTS, *CONFIGS)}


def _plain(spec: ModelSpec) -> ModelSpec:
    spec = replace(spec, has_master_weights=False, updates_on_host=False, moment_bytes=0.0, layers_on_host=False, tower=NO_TOWER)
    return replace(spec, saves_kv_once=False, cuts_heads=False, capped_bytes=0, tower_parameters=0, frozen_parameters=0)


def is_named(name: str) -> bool:
    """Whether the name is in the catalogue."""
    return bool(_known_name(name))


def spec_name(spec: ModelSpec) -> str:
    """Returns a name for these shapes: the catalogue's (in bf16), or a list of shapes and bytes, with the kernels.

    Models with equal names cost the same.
    """
    if has_kernels(spec):
        kernels: dict[str, Any] = {field: getattr(spec, field) for field in _KERNELS}
        return with_kernels(spec_name(without_kernels(spec)), kernels)
    # updates of weights, and savings of memory, do not change the seconds of a chunk
    spec = _plain(spec)
    for known, shapes in _shapes().items():
        if replace(shapes, max_positions=spec.max_positions) == spec:
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
