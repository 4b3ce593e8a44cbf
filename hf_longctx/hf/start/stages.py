"""Decides the layers of every pipeline stage, once, before the first step; also loads one stage alone."""

from __future__ import annotations

from collections.abc import Mapping, Sized
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
from hf_longctx.hf.models.parts.refusing import refuse_all
from hf_longctx.hf.models.spec import cluster_spec, config_spec
from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.hf.ranks.launch import LaunchEnvironment
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.pipeline.stages import Ranges, balanced_ranges

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
    # a stock trainer would train, evaluate or save this part as if it were a model
    refuse_all(model, own_stage(config.stages), config.stages)
    return model


def own_stage(num_stages: int) -> int:
    """The pipeline stage of this rank."""
    state = PartialState()
    return int(state.process_index * num_stages // state.num_processes)


def loaded_ranges(model: nn.Module) -> Ranges | None:
    """The layer ranges of all stages if `model` was loaded as one stage alone; None for a whole model."""
    ranges: Ranges | None = getattr(model, RANGES, None)
    return ranges
