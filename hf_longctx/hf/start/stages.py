"""Decides the layers of every pipeline stage, once, before the first step; also loads one stage alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_longctx.hf.checkpoints.stage_loading import checkpoint_config, load_stage
from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.data.streams.sources import is_stream
from hf_longctx.hf.models.cutting import RANGES
from hf_longctx.hf.models.heads.kinds import CLASSIFIERS
from hf_longctx.hf.models.spec import cluster_spec, config_spec
from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.hf.ranks.launch import LaunchEnvironment
from hf_longctx.plan.core.types import Chunk, GroupShape, LayerRange, Span
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.pipeline.orders import layer_ranges

# layer ranges of every stage
Ranges = tuple[tuple[LayerRange, ...], ...]

_SAMPLED_ROWS = 256


def sampled_lengths(dataset: Any, max_length: int, control: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Lengths of up to 256 rows spread over the set, cut to `max_length`, as rank 0 reads them; collective.

    For a stream, or without a set: one sequence of `max_length` tokens.
    """
    lengths = [max_length]
    is_reader = control is None or dist.get_rank() == 0
    if is_reader and dataset is not None and not is_stream(dataset) and len(dataset):
        stride = max(1, len(dataset) // _SAMPLED_ROWS)
        rows = [dataset[place] for place in range(0, len(dataset), stride)[:_SAMPLED_ROWS]]
        # skip rows without tokens: the later check of the sets refuses them on all ranks, with their numbers
        found_ids = [row.get("input_ids") for row in rows if isinstance(row, Mapping)]
        sizes = [len(ids) for ids in found_ids if isinstance(ids, Sized)]
        lengths = [min(size, max_length) for size in sizes if size] or lengths
    found: list[int] = gather_objects(lengths, control)[0]
    return tuple(found)


def balanced_ranges(costs: CostModel, num_stages: int, lengths: Sequence[int], num_parts: int = 1) -> Ranges:
    """Layers of every stage, in `num_parts` ranges each, balanced for sequences of these lengths.

    The head with the loss counts as the number of layers that takes as many seconds. Raises ValueError for too few layers.
    """
    if num_stages == 1:
        return ((LayerRange(0, costs.model.num_layers),),)
    chunk, shape = Chunk(0, tuple(Span(i, 0, length) for i, length in enumerate(lengths))), GroupShape(1)
    # leave the constant cost of a chunk out of the cost of a layer, since a run has fewer chunks than sequences
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
    if layer_s <= 0:
        # a fit to very small chunks may find constant costs only
        return layer_ranges(costs.model.num_layers, num_stages, num_parts)
    return layer_ranges(costs.model.num_layers, num_stages, num_parts, head_layers=head_s / layer_s)


def load_pipeline_stage(
    folder: str, config: LongContextConfig, /, dtype: torch.dtype | str = "auto", **settings: Any
) -> PreTrainedModel:
    """Loads this rank's stage of the checkpoint in a local `folder`, for a trainer with `config`; with stages=1, the whole model.

    No rank reads or holds the weights of another stage, except an embedding that is tied to the head. Layers are split by
    operation counts for sequences of `max_length`, into `interleave` ranges per stage. `settings` go to `from_pretrained`. Not
    collective, but every rank must call this. Raises ValueError for stages="auto", since a trainer chooses that number by its
    data, and where `load_stage` does.

    Example:

        config = LongContextConfig(stages=4)
        model = load_pipeline_stage("checkpoints/llama-70b", config, dtype=torch.bfloat16)
        trainer = LongContextTrainer(model=model, args=args, train_dataset=dataset, longctx_config=config)
    """
    if config.stages == 1:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, **settings)
    if config.stages == "auto":
        raise ValueError("stages is 'auto', which is chosen after the model is loaded; give the number of stages")
    state, checkpoint, launch = PartialState(), checkpoint_config(folder), LaunchEnvironment.read()
    if wrong := [name for name in checkpoint.architectures or () if name.endswith(tuple(CLASSIFIERS))]:
        raise ValueError(
            f"the checkpoint holds a {wrong[0]}, of which single stages cannot be loaded; load it whole with its own class, "
            f"and the trainer cuts it"
        )
    if state.num_processes != launch.num_ranks:
        raise ValueError(
            f"the launcher started {launch.num_ranks} processes, but only {state.num_processes} of them joined; make the "
            f"TrainingArguments before the model is loaded (without a GPU, set use_cpu=True in them)"
        )
    if state.num_processes % config.stages:
        raise ValueError(f"stages is {config.stages}, which does not divide the {state.num_processes} ranks; choose a divisor")
    spec = config_spec(checkpoint)
    if config.stages * config.interleave > spec.num_layers:
        raise ValueError(
            f"stages={config.stages} of interleave={config.interleave} layer range(s) each are more than the checkpoint's "
            f"{spec.num_layers} layers; use fewer"
        )
    cluster = cluster_spec(state.device, state.num_processes, min(launch.ranks_per_node, state.num_processes))
    costs = CostModel(spec, cluster, default_coefficients(spec, cluster))
    ranges = balanced_ranges(costs, config.stages, [config.max_length or spec.max_positions], config.interleave)
    model = load_stage(folder, ranges, own_stage(config.stages), dtype, **settings)
    setattr(model, RANGES, ranges)
    return model


def own_stage(num_stages: int) -> int:
    """The pipeline stage of this rank."""
    state = PartialState()
    return int(state.process_index * num_stages // state.num_processes)


def loaded_ranges(model: nn.Module) -> Ranges | None:
    """The layer ranges of all stages if `model` was loaded as one stage alone; None for a whole model."""
    ranges: Ranges | None = getattr(model, RANGES, None)
    return ranges
