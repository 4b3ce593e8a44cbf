"""Model types whose runs keep everything: no layer is recomputed or offloaded, and no loss is computed in tiles.

A run finds this out from the model itself (`hf/models/activations.py`); a forecast has only its config, and reads this table.
`tests/plan/core/configs/test_kept.py` compares both for every class that runs, so a row without a cause is a failure there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_longctx.plan.core.configs.fields import decoder_config


@dataclass(frozen=True, slots=True)
class Kept:
    """One cause. model_types: of the decoder."""

    reason: str
    model_types: tuple[str, ...]


KEPT = (
    Kept("it has no layer of class GradientCheckpointingLayer", ("gpt_neox_japanese",)),
    Kept("its layers call attention twice", ("longcat_flash",)),
    Kept("it has layers of other parts beside those of its decoder", ("phi4_multimodal",)),
)


def kept_reason(config: Mapping[str, Any]) -> str:
    """Why a run of a model with this config keeps everything; empty if plans may recompute its layers and tile its loss."""
    kind = decoder_config(config).get("model_type")
    return next((row.reason for row in KEPT if kind in row.model_types), "")
