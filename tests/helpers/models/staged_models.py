"""Tiny models of several families cut into stages, and the whole pipeline run in one process, one part after the other."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import transformers
from torch import Tensor

from hf_longctx.hf.models.cutting import cut_model, stage_model
from hf_longctx.plan.core.types import LayerRange
from hf_longctx.runtime.execution.executor import ChunkInputs
from hf_longctx.runtime.execution.stage_model import StageModel

NUM_LAYERS, VOCAB_SIZE = 7, 96
_FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 8}),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": 6, "head_dim": 8}),
    # a scaled embedding, layers of two kinds in turn, norms with other names inside layers, softcapped logits
    "gemma2": (
        transformers.Gemma2Config,
        transformers.Gemma2ForCausalLM,
        {"sliding_window": 6, "head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": 2.0},
    ),
}


def family_model(family: str, tied: bool = False, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A model of seven layers with random weights, in training mode."""
    config_class, model_class, extra = _FAMILIES[family]
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        **extra,
        **changes,
    }
    torch.manual_seed(0)
    model = model_class(config_class(**settings)).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    model.tie_weights()
    return model.train()


def even_ranges(num_stages: int, num_ranges: int = 1, num_layers: int = NUM_LAYERS) -> tuple[tuple[LayerRange, ...], ...]:
    """Divides the layers into ranges as equal as possible, one for each part of each stage, part 0 of every stage first."""
    count = num_stages * num_ranges
    cuts = [number * num_layers // count for number in range(count + 1)]
    ranges = [LayerRange(start, stop - start) for start, stop in itertools.pairwise(cuts)]
    return tuple(tuple(ranges[place * num_stages + stage] for place in range(num_ranges)) for stage in range(num_stages))


def cut_into_stages(model: Any, num_stages: int, num_ranges: int = 1) -> list[StageModel]:
    """One stage after the other, each cut from its own copy of `model`."""
    ranges = even_ranges(num_stages, num_ranges, model.config.num_hidden_layers)
    stages = []
    for stage in range(num_stages):
        own = copy.deepcopy(model)
        cut_model(own, ranges, stage)
        stages.append(stage_model(own, ranges, stage))
    return stages


def random_inputs(num_tokens: int = 11) -> ChunkInputs:
    """One row of tokens; every token has a label."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCAB_SIZE, (2, 1, num_tokens), generator=generator)
    return ChunkInputs(ids[0], torch.arange(num_tokens).unsqueeze(0), ids[1])


def run_pipeline(stages: list[StageModel], inputs: ChunkInputs) -> tuple[Tensor, list[Tensor]]:
    """Runs all parts one after the other, with one graph through all; returns the logits and the hidden states in between."""
    hidden: Tensor | None = None
    between = []
    for place in range(stages[0].num_ranges):
        for stage in stages:
            hidden = stage.forward(place, inputs, hidden, None, None)
            between.append(hidden)
    assert hidden is not None
    return hidden, between[:-1]
