"""The model of one pipeline stage for the executor: layer ranges that take token ids or hidden states.

A stage holds one layer range, or several (interleaving): the model in order is range 0 of every stage, then range 1 of every
stage, and so on. The first range takes token ids, the last returns logits, all others pass on hidden states.

If output heads are spread, stages before the last have the output head too, which runs alone, after all layer ranges: as range
`num_ranges`, which takes hidden states behind the final norm and returns logits. The last range then passes on such hidden states
for chunks whose head another stage runs.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.core.chunk_inputs import ChunkInputs
from hf_longctx.runtime.core.dropout import DropoutKeys, keys_of

# keyword with the layer range that a model of several stages is to run; a whole model never gets it
LAYER_RANGE_KEYWORD = "longctx_layer_range"
# keyword of the last layer range for a chunk whose head another stage runs
NO_HEAD_KEYWORD = "longctx_no_head"


def whole_model(model: nn.Module, num_attention_layers: int) -> StageModel:
    """Wraps a model without a pipeline as its only stage, which sends no hidden states."""
    return StageModel(model, 0, 1, (num_attention_layers,), 0, torch.float32, dropout=keys_of(model))


@dataclass(frozen=True, slots=True)
class StageModel:
    """One stage of `num_stages`, or the whole model if `num_stages` is 1."""

    # holds the stage's parameters, plain, sharded or with adapters; obeys `LAYER_RANGE_KEYWORD` unless it is the whole model
    model: nn.Module
    stage: int
    num_stages: int
    # number of layers in every layer range
    attention_layers: tuple[int, ...]
    # layer ranges pass on hidden states [1, T, hidden_size] of `hidden_dtype`
    hidden_size: int
    hidden_dtype: torch.dtype
    # name of the parameter that other stages hold too, and all stages that hold it, over which its gradients are summed: a tied
    # weight of embedding and head, or the weight of a head that is spread; empty on stages without one
    tied: str = ""
    tied_stages: tuple[int, ...] = ()
    # number of the stage's first layer range within `model`; not 0 only if `model` holds the layers of all stages
    first_range: int = 0
    # keywords passed as False to every forward, whatever the model's config has
    off: tuple[str, ...] = ()
    # keys of the model's dropout modules; None if it has none
    dropout: DropoutKeys | None = None
    # number of calls of attention and of mixers with a state in every layer range; empty if each layer has one
    calls: tuple[int, ...] = ()
    # stages before the last that have the output head
    head_stages: tuple[int, ...] = ()

    @property
    def copied(self) -> str:
        """Name of the tied parameter if an earlier stage holds it too, and saves it and counts its gradient; else empty."""
        return self.tied if self.stage > min(self.tied_stages, default=0) else ""

    @property
    def num_ranges(self) -> int:
        return len(self.attention_layers)

    def is_first(self, layer_range: int) -> bool:
        """Whether `layer_range` takes token ids."""
        return not self.stage and not layer_range

    def is_last(self, layer_range: int) -> bool:
        """Whether `layer_range` is the last one of the model, before the head."""
        return (self.stage, layer_range) == (self.num_stages - 1, self.num_ranges - 1)

    def forward(
        self,
        layer_range: int,
        inputs: ChunkInputs,
        hidden_1TC: Tensor | None,
        mask: Tensor | None,
        context: GroupContext | None,
        has_head: bool = True,
    ) -> Tensor:
        """Returns logits [1, T, V] of the last layer range or of the head alone, else hidden states [1, T, hidden_size].

        inputs, hidden_1TC: on the model's device; hidden states for every range but the first. context: None for the model's own
        attention. has_head: false for a chunk whose head another stage runs. Raises RuntimeError if an attention layer of the
        range did not get the context.
        """
        is_head = layer_range == self.num_ranges
        has_logits = is_head or (has_head and self.is_last(layer_range))
        starts = {"input_ids": inputs.input_ids} if self.is_first(layer_range) else {"inputs_embeds": hidden_1TC}
        keywords: dict[str, Any] = {LAYER_RANGE_KEYWORD: self.first_range + layer_range} if self.num_stages > 1 else {}
        if not has_head:
            keywords[NO_HEAD_KEYWORD] = True
        keywords.update(dict.fromkeys(self.off, False))
        if context is not None:
            keywords["longctx"] = context = context.placed(inputs.position_ids, self.dropout, inputs.media)
        with nullcontext() if context is None else context.running():
            output = self.model(
                **starts, position_ids=inputs.position_ids, attention_mask=mask, use_cache=False, return_dict=True, **keywords
            )
        if context is not None:
            context.check_calls(0 if is_head else (self.calls or self.attention_layers)[layer_range])
        if has_logits:
            logits: Tensor = output.logits
            return logits
        # autocast may have widened the hidden states that leave the model
        leaving: Tensor = output.last_hidden_state.to(self.hidden_dtype)
        return leaving
