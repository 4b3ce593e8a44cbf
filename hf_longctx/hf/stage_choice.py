"""How many pipeline stages a run has, and which layers each of them holds: decided once, before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from hf_longctx.hf.agreement import gather_objects
from hf_longctx.hf.streaming import is_stream
from hf_longctx.plan.cost import CostModel
from hf_longctx.plan.pipeline import layer_ranges
from hf_longctx.plan.types import Chunk, GroupShape, LayerRange, Span

# the parts of every stage
Ranges = tuple[tuple[LayerRange, ...], ...]

# the attribute of a model that was loaded stage by stage
RANGES = "longctx_ranges"
_SAMPLED_ROWS = 256


def sampled_lengths(dataset: Any, max_length: int, control: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Tokens of up to 256 rows spread over the set, none above `max_length`, as rank 0 found them; collective.

    Of a stream, or without a set, one sequence of `max_length`.
    """
    lengths = [max_length]
    is_reader = control is None or dist.get_rank() == 0
    if is_reader and dataset is not None and not is_stream(dataset) and len(dataset):
        stride = max(1, len(dataset) // _SAMPLED_ROWS)
        rows = [len(dataset[place]["input_ids"]) for place in range(0, len(dataset), stride)][:_SAMPLED_ROWS]
        lengths = [min(length, max_length) for length in rows if length] or lengths
    found: list[int] = gather_objects(lengths, control)[0]
    return tuple(found)


def balanced_ranges(costs: CostModel, num_stages: int, lengths: Sequence[int]) -> Ranges:
    """The layers of every stage for sequences of such lengths: the head with the loss counts as layers of its seconds."""
    if num_stages == 1:
        return ((LayerRange(0, costs.model.num_layers),),)
    chunk, shape = Chunk(0, tuple(Span(i, 0, length) for i, length in enumerate(lengths))), GroupShape(1)
    # what a chunk costs whatever its tokens is paid per chunk, of which there are fewer
    per_token = replace(
        costs,
        coefficients=replace(
            costs.coefficients,
            forward=replace(costs.coefficients.forward, chunk_s=0.0),
            backward=replace(costs.coefficients.backward, chunk_s=0.0),
        ),
    )
    layer_s = sum(per_token.part_s(chunk, shape, is_backward, 1, has_head=False) for is_backward in (False, True))
    head_s = sum(per_token.part_s(chunk, shape, is_backward, 0, has_head=True) for is_backward in (False, True))
    return layer_ranges(costs.model.num_layers, num_stages, head_layers=head_s / layer_s)


def loaded_ranges(model: nn.Module) -> Ranges | None:
    """The layers of all stages where `model` is one stage that was loaded alone; None for a whole model."""
    ranges: Ranges | None = getattr(model, RANGES, None)
    return ranges
