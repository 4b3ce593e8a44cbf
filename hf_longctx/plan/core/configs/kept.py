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
    """One cause. model_types: of the decoder. field: of its config, which is the cause unless it is null; empty: any config."""

    reason: str
    model_types: tuple[str, ...]
    field: str = ""


_LOGITS = "the class changes its logits after the head"
_NO_MLP = "its layers have no module `mlp` or `feed_forward` that could be divided into tiles"
_MORE_INPUTS = "its MLP takes more than hidden states, so that it cannot be divided into tiles"

KEPT = (
    Kept(_LOGITS, ("cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "mpt"), "logit_scale"),
    Kept(_LOGITS, ("beam", "gemma2", "nanochat", "vaultgemma"), "final_logit_softcapping"),
    Kept(_LOGITS, ("gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text"), "final_logit_softcapping"),
    Kept(_LOGITS, ("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid"), "logits_scaling"),
    Kept(_LOGITS, ("granitemoeshared", "hyperclovax"), "logits_scaling"),
    Kept(_LOGITS, ("falcon_h1",), "lm_head_multiplier"),
    Kept(_LOGITS, ("recurrent_gemma",), "logits_soft_cap"),
    Kept(_LOGITS, ("xlstm",), "output_logit_soft_cap"),
    Kept(_NO_MLP, ("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared")),
    Kept(_NO_MLP, ("nemotron_h",)),
    Kept(_NO_MLP, ("biogpt", "dbrx", "mpt", "opt")),
    Kept(_NO_MLP, ("camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert", "roberta")),
    Kept(_NO_MLP, ("roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod")),
    Kept(_MORE_INPUTS, ("bloom", "zaya")),
    Kept("it has no layer of class GradientCheckpointingLayer", ("gpt_neox_japanese",)),
    Kept("its layers call attention twice", ("longcat_flash",)),
    Kept("it has layers of other parts beside those of its decoder", ("phi4_multimodal",)),
)


def kept_reason(config: Mapping[str, Any]) -> str:
    """Why a run of a model with this config keeps everything; empty if plans may recompute its layers and tile its loss."""
    text = decoder_config(config)
    kind = text.get("model_type")
    found = (row for row in KEPT if kind in row.model_types and (not row.field or text.get(row.field) is not None))
    row = next(found, None)
    if row is None:
        return ""
    return f"{row.reason} ({row.field}={text[row.field]})" if row.field else row.reason
