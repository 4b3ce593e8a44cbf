"""Bytes of layers whose MLP has another name, several parts or no module of its own, against torch's record of allocations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers
from helpers.models.any_model import build_any
from helpers.models.versions import newest
from helpers.plans.policies import offloading
from predicted.test_memory_model import Shape, measured

from hf_longctx.families.registry import TESTED_MODELS
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.hf.models.spec import config_spec, model_spec
from hf_longctx.plan.core.types import ActivationPolicy
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.capacity import most_tokens
from hf_longctx.plan.memory.layer import Load
from hf_longctx.plan.model.model_spec import ModelSpec

pytestmark = newest

NUM_TOKENS, NUM_LAYERS, TILE_TOKENS = 1024, 6, 128
_SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
_SCAN = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 64, "mamba_d_head": 16}
_NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 64, "head_dim": 16}
_TYPES = {"layer_types": ["linear_attention", "full_attention"] * 3}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# name -> model class, settings
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("GraniteMoe", {**_SIZES, **_EXPERTS, "intermediate_size": 128}),
    "granite, shared": ("GraniteMoeShared", {**_SIZES, **_EXPERTS, "intermediate_size": 64, "shared_intermediate_size": 128}),
    "granite 4": ("GraniteMoeHybrid", {**_SIZES, **_SCAN, **_TYPES, "num_local_experts": 0, "shared_intermediate_size": 256}),
    "granite 4, experts": (
        "GraniteMoeHybrid",
        {**_SIZES, **_SCAN, **_TYPES, **_EXPERTS, "intermediate_size": 64, "shared_intermediate_size": 128},
    ),
    "nemotron": (
        "NemotronH",
        {**_SIZES, **_NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"] + ["mlp"] * 2},
    ),
    "mpt": ("Mpt", {"d_model": 512, "n_heads": 4, "n_layers": NUM_LAYERS, "max_seq_len": 2048}),
    "opt": ("OPT", {**_SIZES, "ffn_dim": 256, "word_embed_proj_dim": 64, "dropout": 0.0}),
    "roberta": ("Roberta", {**_SIZES, **_NO_DROPOUT, "is_decoder": True}),
    "biogpt": ("BioGpt", {**_SIZES, **_NO_DROPOUT, "activation_dropout": 0.0}),
}
# models whose MLPs run whole, and those in which something else needs more than the MLP
WHOLE, MIXED = ("mpt", "opt", "roberta", "biogpt"), ("granite 4", "granite 4, experts", "nemotron", "roberta")


@dataclass(frozen=True)
class OtherShape(Shape):
    """A tiny model of one of `MODELS`."""

    name: str = ""
    layers: int = NUM_LAYERS

    def make(self, dtype: torch.dtype) -> Any:
        name, settings = MODELS[self.name]
        common = {"vocab_size": self.vocabulary, "num_hidden_layers": self.layers, "max_position_embeddings": 2050}
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        model_class = getattr(transformers, f"{name}ForCausalLM")
        if self.name == "mpt":
            common = {"vocab_size": self.vocabulary}
        return model_class(model_class.config_class(**{**common, **special, **settings})).to(dtype)

    def spec(self, dtype: torch.dtype) -> ModelSpec:
        return model_spec(self.make(dtype))

    def build(self, dtype: torch.dtype) -> Any:
        model = self.make(dtype).train()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        patch_model(model)
        return model


CASES = [*((name, torch.float32) for name in MODELS), ("granite 4", torch.bfloat16), ("opt", torch.bfloat16)]


@pytest.mark.daily("device-opt-torch.float32")
@pytest.mark.parametrize("name,dtype", CASES, ids=str)
@pytest.mark.parametrize("host", [0.0, 1.0], ids=["device", "host"])
def test_replays_take_what_is_predicted_in_tiles_or_whole(name: str, dtype: torch.dtype, host: float) -> None:
    shape = OtherShape(name=name)
    assert shape.spec(dtype).tiles_mlps == (name not in WHOLE)
    policy = ActivationPolicy(0, 0, (offloading(host=host),) * NUM_LAYERS, TILE_TOKENS)
    held, on_host, forward_peak, backward_peak = measured(shape, dtype, (NUM_TOKENS,), policy)
    load = Load(NUM_TOKENS, (NUM_TOKENS,), NUM_LAYERS, tiles_loss=False)
    found, before = ByteModel(shape.spec(dtype)).chunk(load, policy), 16 * NUM_TOKENS
    device = found.device - before
    assert found.host == on_host
    # rotary embeddings count in all classes, and RoBERTa's head has layers of its own: a few of hidden states' size in all
    few = 4 * NUM_TOKENS * shape.spec(dtype).hidden_size * dtype.itemsize
    assert held - few <= device <= held + few
    assert 0.75 * forward_peak <= device + found.forward_workspace <= 1.5 * forward_peak
    assert 0.8 * backward_peak <= device + found.backward_workspace <= 1.25 * backward_peak
    if name not in MIXED:
        # a prediction that takes the MLP for the other kind would be wrong
        other = replace(shape.spec(dtype), tiles_mlps=not shape.spec(dtype).tiles_mlps)
        workspace = ByteModel(other).chunk(load, policy).backward_workspace
        assert (
            device + workspace > 1.25 * backward_peak if other.tiles_mlps is False else workspace < 0.8 * (backward_peak - held)
        )


def test_the_longest_document_is_as_long_as_whole_mlps_allow() -> None:
    spec = OtherShape(name="opt").spec(torch.float32)
    whole, tiled = (
        most_tokens(each, 2**26, 2**30, TILE_TOKENS) for each in (spec, replace(spec, tiles_mlps=True, tiles_norms=True))
    )
    assert 1.2 * whole < tiled


# old layers, layers with a residual inside the MLP, shared and spread ones, norms of other names, and plain ones
FAST = (
    *("OPTForCausalLM", "BloomForCausalLM", "RobertaForCausalLM", "ZayaForCausalLM", "DbrxForCausalLM", "ZambaForCausalLM"),
    *("GraniteMoeHybridForCausalLM", "NemotronHForCausalLM", "GPTJForCausalLM", "LlamaForCausalLM", "MambaForCausalLM"),
)


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.sweep) for name in TESTED_MODELS]
)
def test_a_config_tells_what_the_model_does(name: str) -> None:
    model = build_any(name, is_random=False)
    found, read = model_spec(model), config_spec(model.config)
    assert (found.tiles_mlps, found.tiles_norms) == (read.tiles_mlps, read.tiles_norms)
    if "Granite" in name:
        # the MLP that all tokens share is counted
        assert found.idle_parameters == read.idle_parameters
