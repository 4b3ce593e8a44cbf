"""A config tells the same facts of attention as the modules of its model, for every class that runs."""

from __future__ import annotations

import pytest
import torch
from helpers.models.any_model import build_any
from helpers.models.versions import newest

from hf_longctx.families.registry import TESTED_MODELS, WRAPPED_MODELS
from hf_longctx.hf.models.spec import config_spec, model_spec

# fields of `ModelSpec` that `Traits` tells a forecast and modules tell a run
FACTS = ("cuts_heads", "qk_norms")


@pytest.mark.wide("Gemma3nForConditionalGeneration")
@newest
@pytest.mark.parametrize("name", [*TESTED_MODELS, *WRAPPED_MODELS])
def test_config_and_model_agree_on_attention(name: str) -> None:
    with torch.device("meta"):
        model = build_any(name, is_random=False)
    run, forecast = model_spec(model), config_spec(model.config)
    assert {fact: getattr(forecast, fact) for fact in FACTS} == {fact: getattr(run, fact) for fact in FACTS}


@newest
def test_a_config_with_latent_attention_keeps_no_queries_keys_and_values() -> None:
    with torch.device("meta"):
        model = build_any("DeepseekV3ForCausalLM", is_random=False)
    assert not model_spec(model).can_keep_qkv
    assert not config_spec(model.config).can_keep_qkv
