"""Operations of a training, counted by hand and as torch counts them for a plain forward and backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.models.tiny_models import ModelCase, build_model
from torch.utils.flop_counter import FlopCounterMode

from hf_longctx.hf.models.spec import model_spec
from hf_longctx.plan.cost.cost_model import training_operations
from hf_longctx.plan.setup import lora_adapters

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("length", [16, 48])
def test_products_are_those_that_torch_counts(length: int) -> None:
    model = build_model(ModelCase("llama")).float()
    model.set_attn_implementation("eager")
    spec = model_spec(model)
    ids = torch.arange(length)[None] % model.config.vocab_size
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    # eager attention computes all pairs, also those that are masked
    masked = 3 * spec.num_layers * spec.pair_operations * (length * length - length * length / 2)
    assert training_operations([length], spec) + masked == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_frozen_weights_have_no_gradients_and_documents_do_not_see_each_other() -> None:
    spec = model_spec(build_model(ModelCase("llama")))
    products, pairs = 2 * spec.token_products, spec.num_layers * spec.pair_operations
    assert training_operations([10, 6], spec) == 3 * (16 * products + pairs * (50 + 18))
    frozen = replace(spec, adapters=lora_adapters(spec, 4))
    added = 2 * spec.num_layers * frozen.adapters.layer_parameters
    assert training_operations([10, 6], frozen) == 16 * (2 * products + 3 * added) + 3 * pairs * (50 + 18)
