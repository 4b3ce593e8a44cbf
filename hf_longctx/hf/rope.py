"""Rotary position embeddings for longer sequences than a checkpoint was trained on, and whether a model really has them.

A config that is changed after its model was built changes nothing, and a cast of the whole model rounds its frequencies; both
are silent, and wrong the more the longer a sequence is. So a config is extended before the model is built, and the frequencies
of every model that is trained are compared with what its config says.

Source of "yarn": YaRN (arXiv 2309.00071); of "linear": position interpolation (arXiv 2306.15595).
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

logger = logging.getLogger(__name__)

RopeScaling = Literal["yarn", "linear", "none"]

# relative; half precision rounds to 4e-3 or 5e-4
_TOLERANCE = 1e-5
# of models whose layers have different rotary embeddings, the layers that see the whole sequence
_FULL = "full_attention"


def extend_positions(config: PretrainedConfig, max_length: int, rope_scaling: RopeScaling = "yarn") -> PretrainedConfig:
    """A copy of `config` for sequences of up to `max_length` tokens; build or load the model with it.

    The scaling factor is `max_length` over the length that the checkpoint was trained for; of layers with windows nothing is
    scaled. "none" only allows more positions, with a warning. A config that has room already is returned as it is. Raises
    ValueError for a model without rotary embeddings, and for one that has another kind of scaling already.

    Example:

        config = extend_positions(AutoConfig.from_pretrained(path), 131072)
        model = AutoModelForCausalLM.from_pretrained(path, config=config)
    """
    if rope_scaling not in get_args(RopeScaling):
        raise ValueError(
            f"rope_scaling is {rope_scaling!r}; choose one of {', '.join(get_args(RopeScaling))} ('dynamic' and 'longrope' "
            f"depend on the longest sequence of a forward, which is not supported yet)"
        )
    text = config.get_text_config()
    if max_length <= text.max_position_embeddings:
        return config
    if not (parameters := getattr(text, "rope_parameters", None)):
        raise ValueError(f"{type(config).__name__} has no rotary position embeddings to scale; use a model that has")
    extended = copy.deepcopy(config)
    text = extended.get_text_config()
    if rope_scaling == "none":
        logger.warning(
            "positions up to %d are used without rope_scaling, where the checkpoint knows %d: expect it to learn slowly what "
            "lies beyond; rope_scaling='yarn' starts closer",
            max_length,
            text.max_position_embeddings,
        )
    else:
        old = parameters.get(_FULL, parameters)
        kind = old.get("rope_type", "default")
        if kind not in ("default", rope_scaling):
            raise ValueError(
                f"the config scales its positions by rope_type {kind!r} already; use rope_scaling='none' to train beyond its "
                f"{text.max_position_embeddings} positions as it is"
            )
        trained = old.get("original_max_position_embeddings") or text.max_position_embeddings
        new = {**old, "rope_type": rope_scaling, "factor": max_length / trained, "original_max_position_embeddings": trained}
        if rope_scaling == "linear":
            # its checkpoints do not say what they were trained for; the factor they have tells
            trained = text.max_position_embeddings / old.get("factor", 1.0)
            new = {**old, "rope_type": rope_scaling, "factor": max_length / trained}
        text.rope_parameters = {**parameters, _FULL: new} if _FULL in parameters else new
    text.max_position_embeddings = max_length
    return extended


def rope_problems(model: nn.Module) -> list[str]:
    """Where the frequencies of the model's rotary embeddings are not those of its config; empty without rotary embeddings."""
    problems = []
    for name, module in model.named_modules():
        for layer_type, kind in _kinds(module):
            prefix = f"{layer_type}_" if layer_type else ""
            found = getattr(module, f"{prefix}inv_freq", None)
            if not isinstance(found, Tensor) or found.is_meta:
                continue
            config: Any = model.config
            expected, planned = _frequencies(module, config.get_text_config(), layer_type)
            off = _difference(found, expected)
            if kind != planned or off > _TOLERANCE:
                problems.append(
                    f"{name} has rotary frequencies of rope_type {kind!r} that differ by {off:.1e} from those of the model's "
                    f"config (rope_type {planned!r}): the config was changed after the model was built, or the whole model was "
                    f"cast; change the config first (extend_positions) and load with dtype=..."
                )
    return problems


def _kinds(module: nn.Module) -> Iterator[tuple[str, str]]:
    """(layer type, rope type) of a rotary embedding, the former empty where all layers have the same."""
    kinds = getattr(module, "rope_type", None)
    if not hasattr(module, "compute_default_rope_parameters"):
        return
    if isinstance(kinds, dict):
        yield from kinds.items()
    elif isinstance(kinds, str):
        yield "", kinds


def _frequencies(module: Any, config: PretrainedConfig, layer_type: str) -> tuple[Tensor, str]:
    """What a new rotary embedding of this config would have, and its rope type."""
    parameters: Any = config.rope_parameters
    kind = (parameters[layer_type] if layer_type else parameters).get("rope_type", "default")
    make: Callable[..., tuple[Tensor, float]]
    make = module.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
    # heads may be of another size in layers of one type
    if layer_type and (layers := getattr(config, "per_layer_config", None)):
        config = layers[layer_type]
    frequencies, _ = make(config, device="cpu", **({"layer_type": layer_type} if layer_type else {}))
    return frequencies, kind


def _difference(found: Tensor, expected: Tensor) -> float:
    """The largest relative difference; infinite for other shapes."""
    if found.shape != expected.shape:
        return float("inf")
    found, expected = found.detach().double().cpu(), expected.double()
    return float(((found - expected).abs() / expected.abs().clamp_min(torch.finfo(torch.float64).tiny)).max())
