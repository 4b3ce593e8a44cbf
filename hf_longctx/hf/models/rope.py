"""Extends rotary position embeddings beyond a checkpoint's trained length, and compares those of a model with its config.

Changing a config after its model was built has no effect, and casting the whole model rounds its frequencies. Both mistakes are
silent, and the error grows with the length of a sequence. So a config is extended before the model is built, and the
frequencies of every model to be trained are compared with its config.

Sources: "yarn" is YaRN (arXiv 2309.00071); "linear" is position interpolation (arXiv 2306.15595); "longrope" is LongRoPE
(arXiv 2402.13753); "dynamic" follows `transformers.modeling_rope_utils`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_longctx.hf.models.document_rope import DOCUMENT_ROPE_TYPES
from hf_longctx.hf.models.positions import max_positions, set_limit
from hf_longctx.hf.ranks.launch import on_first_rank
from hf_longctx.plan.model.config import has_position_table

logger = logging.getLogger(__name__)
logger.addFilter(on_first_rank)

RopeScaling = Literal["yarn", "linear", "dynamic", "longrope", "none"]

# largest relative difference of frequencies; rounding to half precision gives 4e-3 (bf16) or 5e-4 (fp16)
_TOLERANCE = 1e-5
# layer type that sees the whole sequence, in models whose layers have different rotary embeddings
_FULL = "full_attention"
# parameters with the lists of factors that longrope needs; the authors of a checkpoint search for its factors
_LISTS = ("short_factor", "long_factor")


def extend_positions(config: PretrainedConfig, max_length: int, rope_scaling: RopeScaling = "yarn") -> PretrainedConfig:
    """Makes a copy of `config` for sequences of up to `max_length` tokens; build or load the model with that copy.

    The scaling factor is `max_length` over the length that the checkpoint was trained for; layers with windows are not
    scaled. "dynamic" scales a document by its own length, and only if that exceeds the trained length, which stays the config's
    `max_position_embeddings`. "longrope" takes its factors from the checkpoint's config, which must have them. "none" only
    allows more positions, with a warning. A config that already allows `max_length` is returned unchanged. One whose model needs
    no positions, such as Jamba or RWKV, gets the new limit and nothing else. Raises ValueError for a model with a table of
    positions, for one that already has another kind of scaling, and for scaling that would change no frequency.

    Example:

        config = extend_positions(AutoConfig.from_pretrained(path), 131072)
        model = AutoModelForCausalLM.from_pretrained(path, config=config)
    """
    if rope_scaling not in get_args(RopeScaling):
        raise ValueError(f"rope_scaling is {rope_scaling!r}; choose one of {', '.join(get_args(RopeScaling))}")
    text = config.get_text_config()
    if max_length <= _room(config, rope_scaling):
        return config
    parameters = getattr(text, "rope_parameters", None)
    if not parameters and has_position_table(text.to_dict()):
        raise ValueError(
            f"{type(config).__name__} has {max_positions(config)} positions and no rotary position embeddings to scale; set "
            f"max_length to {max_positions(config)} or less, or use a model with rotary embeddings"
        )
    extended = copy.deepcopy(config)
    text = extended.get_text_config()
    if not parameters:
        logger.warning(
            "%s needs no positions, so rope_scaling=%r scales nothing; its limit of %d tokens becomes %d",
            *(type(text).__name__, rope_scaling, max_positions(config), max_length),
        )
        set_limit(text, max_length)
        return extended
    old = parameters.get(_FULL, parameters)
    new = _unscaled(text, old, max_length) if rope_scaling == "none" else _scaled(text, old, max_length, rope_scaling)
    text.rope_parameters = {**parameters, _FULL: new} if _FULL in parameters else new
    # dynamic scaling starts above max_position_embeddings, so this field stays the trained length
    if rope_scaling != "dynamic":
        text.max_position_embeddings = max_length
    try:
        text.validate_rope()
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{type(text).__name__} does not take rope_scaling={rope_scaling!r}: {error}; choose another kind of scaling"
        ) from error
    return extended


def grows(text: Any) -> bool:
    """Whether the rotary embeddings of a text config work beyond its `max_position_embeddings`; "dynamic" ones do."""
    parameters = getattr(text, "rope_parameters", None) or {}
    return bool(parameters.get(_FULL, parameters).get("rope_type") == "dynamic")


def _room(config: PretrainedConfig, rope_scaling: RopeScaling) -> float:
    """The longest sequence that the config supports without being extended."""
    text: Any = config.get_text_config()
    positions = max_positions(config)
    if not grows(text):
        return positions
    parameters = text.rope_parameters
    factors = {"none": float("inf"), "dynamic": parameters.get(_FULL, parameters)["factor"]}
    return positions * factors.get(rope_scaling, 1.0)


def _unscaled(text: Any, old: dict[str, Any], max_length: int) -> dict[str, Any]:
    """`old`, with its present factor stated if transformers would otherwise derive another one."""
    logger.warning(
        "positions up to %d are used without rope_scaling, but the checkpoint was trained on %d only: expect it to learn the "
        "positions beyond slowly; rope_scaling='yarn' starts closer",
        max_length,
        text.max_position_embeddings,
    )
    if old.get("rope_type") not in ("yarn", "longrope") or old.get("factor"):
        return old
    # without a stated factor, transformers would derive it from the new number of positions
    return {**old, "factor": text.max_position_embeddings / old["original_max_position_embeddings"]}


def _scaled(text: Any, old: dict[str, Any], max_length: int, rope_scaling: RopeScaling) -> dict[str, Any]:
    """The rope parameters of layers that see the whole sequence."""
    kind, positions = old.get("rope_type", "default"), text.max_position_embeddings
    if kind not in ("default", rope_scaling):
        same = f"{kind!r}, or " if kind in get_args(RopeScaling) else ""
        raise ValueError(
            f"the config scales its positions by rope_type {kind!r} already; use rope_scaling={same}'none' to train beyond its "
            f"{positions} positions without changing that scaling"
        )
    new = {**old, "rope_type": rope_scaling}
    if rope_scaling == "dynamic":
        return {**new, "factor": max_length / positions}
    if rope_scaling == "linear":
        # such checkpoints do not state their trained length; it follows from their factor
        return {**new, "factor": max_length / (positions / old.get("factor", 1.0))}
    if rope_scaling == "longrope":
        _check_lists(text, old)
    trained = old.get("original_max_position_embeddings") or positions
    return {**new, "factor": max_length / trained, "original_max_position_embeddings": trained}


def _check_lists(text: Any, old: dict[str, Any]) -> None:
    if missing := [name for name in _LISTS if not old.get(name)]:
        raise ValueError(
            f"{type(text).__name__} has no {' and no '.join(missing)} in its rope_parameters, which longrope takes from the "
            f"checkpoint's own config; use a checkpoint that comes with them, or rope_scaling='yarn'"
        )
    if old[_LISTS[0]] == old[_LISTS[1]]:
        raise ValueError(
            f"long_factor of {type(text).__name__} is the same as its short_factor, so that longrope would change no frequency; "
            f"use rope_scaling='none' to train beyond its {text.max_position_embeddings} positions without further scaling"
        )


def rope_problems(model: nn.Module) -> list[str]:
    """Problems with rotary embeddings whose frequencies are not those of the model's config; empty if there are none."""
    problems = []
    for name, module in model.named_modules():
        for layer_type, kind in _kinds(module):
            prefix = f"{layer_type}_" if layer_type else ""
            # compare the original frequencies: the current ones depend on the longest forward so far
            before = "original_" if kind in DOCUMENT_ROPE_TYPES else ""
            found = getattr(module, f"{prefix}{before}inv_freq", None)
            if not isinstance(found, Tensor) or found.is_meta:
                continue
            config: Any = model.config
            expected, planned = _frequencies(module, config.get_text_config(), layer_type)
            off = _difference(found, expected)
            if before and kind == planned:
                off = max(off, _difference_beyond(module, config.get_text_config(), layer_type, kind))
            if kind != planned or off > _TOLERANCE:
                problems.append(
                    f"{name} has rotary frequencies of rope_type {kind!r} that differ by {off:.1e} from those of the model's "
                    f"config (rope_type {planned!r}): the config was changed after the model was built, or the whole model was "
                    f"cast; change the config first (extend_positions) and load with dtype=..."
                )
    return problems


def _kinds(module: nn.Module) -> Iterator[tuple[str, str]]:
    """(layer type, rope type) of a rotary embedding; the layer type is empty if all layers share one rope type."""
    kinds = getattr(module, "rope_type", None)
    if not hasattr(module, "compute_default_rope_parameters"):
        return
    if isinstance(kinds, dict):
        yield from kinds.items()
    elif isinstance(kinds, str):
        yield "", kinds


def _frequencies(module: Any, config: PretrainedConfig, layer_type: str) -> tuple[Tensor, str]:
    """Frequencies of a new rotary embedding for this config, and its rope type."""
    parameters: Any = config.rope_parameters
    kind = (parameters[layer_type] if layer_type else parameters).get("rope_type", "default")
    make: Callable[..., tuple[Tensor, float]]
    make = module.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
    # head size may depend on the layer type; names of some rotary embeddings are not those of layers
    if layer_type in (getattr(config, "layer_types", None) or ()) and (layers := getattr(config, "per_layer_config", None)):
        config = layers[layer_type]
    # transformers 5.17 warns of a device among the arguments
    with torch.device("cpu"):
        frequencies, _ = make(config, **({"layer_type": layer_type} if layer_type else {}))
    return frequencies, kind


def _difference_beyond(module: Any, config: Any, layer_type: str, kind: str) -> float:
    """Largest relative difference between module and config beyond the trained length.

    Compares the frequencies there, the trained length itself, and the factor on cosines and sines.
    """
    parameters = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
    own, length = module.config, 2 * config.max_position_embeddings
    limits = module.original_max_seq_len, config.max_position_embeddings
    if kind == "longrope":
        own_parameters = own.rope_parameters[layer_type] if layer_type else own.rope_parameters
        limits = own_parameters["original_max_position_embeddings"], parameters["original_max_position_embeddings"]
        length = limits[1] + 1
    make = ROPE_INIT_FUNCTIONS[kind]
    expected, scale = make(config, "cpu", seq_len=length, layer_type=layer_type or None)
    prefix = f"{layer_type}_" if layer_type else ""
    # frequencies made for an earlier long document are cached on the module
    found = vars(module).get(f"{prefix}long_inv_freq")
    if found is None:
        found, _ = make(own, "cpu", seq_len=length, layer_type=layer_type or None)
    own_scale = getattr(module, f"{prefix}attention_scaling", scale)
    return max(_difference(found, expected), abs(own_scale / scale - 1), abs(limits[0] / limits[1] - 1))


def _difference(found: Tensor, expected: Tensor) -> float:
    """The largest relative difference; infinite if shapes differ."""
    if found.shape != expected.shape:
        return float("inf")
    found, expected = found.detach().double().cpu(), expected.double()
    if not found.numel():
        # so small a share of the head that nothing is rotated
        return 0.0
    return float(((found - expected).abs() / expected.abs().clamp_min(torch.finfo(torch.float64).tiny)).max())
