"""Loads one pipeline stage of a checkpoint: builds the model on the meta device, cuts it, and reads only this stage's tensors.

The loader of transformers builds a model from its class, so it gets a class whose constructor cuts the model. Tensors of other
stages are then unknown to the loader, which never reads them. It handles renamed and fused weights, dtypes and buffers as usual.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from hf_longctx.hf.checkpoints.deferred import (
    config_of,
    defer_experts,
    defer_weights,
    of_place,
    take_experts_out,
    unquantised,
)
from hf_longctx.hf.checkpoints.weights import checkpoint_files, listed_files
from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.data.streams.sources import is_stream
from hf_longctx.hf.models.cutting import (
    OUTPUT_SHARES,
    RANGES,
    check_ties,
    cut_model,
    drop_embedding,
    find_pieces,
    spread_head_problem,
    stages_of_heads,
)
from hf_longctx.hf.models.heads import CLASSIFIERS
from hf_longctx.hf.models.quantised import can_load, is_mxfp4
from hf_longctx.hf.models.refusing import refuse_all
from hf_longctx.hf.models.spec import cluster_spec, config_spec
from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.hf.ranks.launch import LaunchEnvironment
from hf_longctx.plan.core.types import Ranges
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.pipeline.stages import stage_layers
from hf_longctx.runtime.process_groups import with_head


def checkpoint_config(folder: str) -> PretrainedConfig:
    """Config of a checkpoint in a local folder; raises ValueError if its weights are missing or not in safetensors."""
    if not Path(folder).is_dir():
        raise ValueError(f"{folder} is not a folder; stages are read from local files")
    checkpoint_files(folder)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    quantised = getattr(config, "quantization_config", None) or {}
    if not can_load(quantised) and not is_mxfp4(config):
        raise ValueError(
            f"the checkpoint in {folder} is quantised by {quantised.get('quant_method')}; only four bits by bitsandbytes, "
            f"experts in MXFP4 and fp8 with scales of blocks are tested; use such a checkpoint, or one in bfloat16 or float32"
        )
    return config


def local_folder(name_or_path: str, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The local folder of a checkpoint, for one on the hub after its safetensors files were downloaded; and other `settings`.

    Ranks of a machine share the files, which the hub's cache locks. Raises ValueError if it is neither on this machine nor there.
    """
    place, others = of_place(settings)
    if Path(name_or_path).is_dir():
        return name_or_path, others
    inner = place.pop("subfolder", "")
    within = f"{inner}/" if inner else ""
    try:
        folder = Path(snapshot_download(name_or_path, allow_patterns=[f"{within}*.json", f"{within}*.py"], **place), inner)
        names = [file.relative_to(folder).as_posix() for file in listed_files(folder)]
        snapshot_download(name_or_path, allow_patterns=[f"{within}{name}" for name in names], **place)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name_or_path} is not a folder, nor a checkpoint on the hub that could be downloaded ({type(error).__name__}: "
            f"{error}); give the folder of a checkpoint, or a name on the hub that this machine reaches"
        ) from error
    return str(folder), others


def load_stage(
    folder: str,
    ranges: Ranges,
    stage: int,
    dtype: torch.dtype | str = "auto",
    defers_experts: bool = False,
    *,
    head_stages: Sequence[int] = (),
    **settings: Any,
) -> PreTrainedModel:
    """Loads stage `stage` of the checkpoint in `folder`, cut as `cut_model` does it, in evaluation mode on the CPU.

    This rank never reads or holds weights of another stage, except the embedding to which a head is tied. head_stages: as for
    `cut_model`. defers_experts: leave the weights of experts, which are NaN, to `read_deferred`.
    `settings` go to `from_pretrained`. Four-bit weights are read from the checkpoint, or made if a `quantization_config` asks for
    them, for this stage only. Not collective. Raises ValueError for a folder without safetensors, for a model that cannot be
    cut, and if the checkpoint lacks weights of the stage.
    """
    config = checkpoint_config(folder)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{folder} holds a {config.model_type}, which is not a causal language model; use one of these")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    later: dict[str, Tensor] | None = None
    if defers_experts:
        stored = None if is_mxfp4(config) else getattr(config, "quantization_config", None)
        if settings.get("quantization_config") is not None or stored:
            raise ValueError(
                f"other weights of {folder} are quantised (quantization_config), which is not tested beside experts that are "
                f"packed while they are read; leave packs_experts out, or take a checkpoint in bfloat16 or with experts in MXFP4"
            )
        later = {}
        # transformers would unpack MXFP4
        settings = {**settings, "config": unquantised(settings.get("config", config))}
    model, report = _cutting(model_class, ranges, stage, later, head_stages).from_pretrained(
        folder, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True, **settings
    )
    model.__class__ = model_class
    if later is not None:
        defer_experts(model, folder, later)
    if len(ranges) > 1 and stage in with_head(len(ranges), head_stages):
        check_ties(find_pieces(model))
        if stage:
            drop_embedding(find_pieces(model))
    if absent := sorted(set(report["missing_keys"]) & set(model.state_dict())):
        raise ValueError(
            f"the checkpoint in {folder} lacks {len(absent)} weights of stage {stage} (the first is {absent[0]}); give a "
            f"complete checkpoint"
        )
    loaded: PreTrainedModel = model
    return loaded


def _cutting(
    model_class: type[PreTrainedModel],
    ranges: Ranges,
    stage: int,
    later: dict[str, Tensor] | None,
    head_stages: Sequence[int],
) -> Any:
    """A subclass of `model_class` whose instances are cut as soon as they are built.

    later: gets the weights of experts, without values, which the instance then lacks; None: it keeps them.
    """

    def build(self: Any, *args: Any, **keywords: Any) -> None:
        model_class.__init__(self, *args, **keywords)
        whole = set(self.state_dict())
        # stages with the head keep the embedding for now, since the loader ties the head to it
        cut_model(self, ranges, stage, stage in with_head(len(ranges), head_stages), head_stages)
        if later is not None:
            later.update(take_experts_out(self))
        # tell the loader to expect weights of other stages; in checkpoints of a base model these have no prefix
        prefix = f"{self.base_model_prefix}."
        dropped = {re.escape(name.removeprefix(prefix)) for name in whole - set(self.state_dict())}
        # the pattern also covers the scales next to a weight in four bits or fp8, and blocks and scales of experts
        parts = r"(\..*|_scale_inv|_blocks|_scales)?"
        self._keys_to_ignore_on_load_unexpected |= {f"^({re.escape(prefix)})?{name}{parts}$" for name in dropped}

    # named like the original, because transformers finds weight conversions by class name
    return type(model_class.__name__, (model_class,), {"__init__": build, "__module__": model_class.__module__})


_SAMPLED_ROWS = 256


def sampled_lengths(dataset: Any, max_length: int, control: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Lengths of up to 256 rows spread over the set, cut to `max_length`, as rank 0 reads them; collective.

    A stream, or no set, gives one sequence of `max_length` tokens.
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
    name_or_path: str,
    config: LongContextConfig,
    /,
    dtype: torch.dtype | str = "auto",
    packs_experts: bool = False,
    **settings: Any,
) -> PreTrainedModel:
    """Loads this rank's stage of a checkpoint for a trainer with `config`; with stages=1, the whole model.

    name_or_path: a local folder, or a name on the hub, whose files are downloaded once on each machine. No rank reads or holds
    weights of another stage, except an embedding that is tied to a head. Layers are split by operation counts for sequences
    of `max_length`, into `interleave` ranges per stage, and so is the work of the output head (`spread_head`). Experts in MXFP4
    are NaN until a trainer starts, which reads them, and with packs_experts, which says that `pack_experts` will be called,
    others are too. `settings` go to `from_pretrained`. Not collective, but every rank must call this. Raises ValueError for
    stages="auto", since a trainer chooses that number by its data, for a name that cannot be downloaded, and where `load_stage`
    does.

    Example:

        config = LongContextConfig(stages=4)
        model = load_pipeline_stage("meta-llama/Llama-3.1-70B", config, dtype=torch.bfloat16)
        trainer = LongContextTrainer(model=model, args=args, train_dataset=dataset, longctx_config=config)
    """
    folder, settings = local_folder(name_or_path, settings)
    if not config.may_have_stages:
        settings = {**settings, "local_files_only": True}
        if packs_experts or is_mxfp4(config_of(folder, settings)):
            return defer_weights(folder, dtype=dtype, **settings)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **settings)
    if config.asked_stages == "auto":
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
    if state.num_processes % config.asked_stages:
        raise ValueError(f"stages is {config.stages}, which does not divide the {state.num_processes} ranks; choose a divisor")
    spec = config_spec(checkpoint)
    if config.asked_stages * config.interleave > spec.num_layers:
        raise ValueError(
            f"stages={config.stages} of interleave={config.interleave} layer range(s) each are more than the checkpoint's "
            f"{spec.num_layers} layers; use fewer"
        )
    cluster = cluster_spec(state.device, state.num_processes, min(launch.ranks_per_node, state.num_processes))
    costs = CostModel(spec, cluster, default_coefficients(spec, cluster))
    spreads_head = config.spread_head and not config.lend_stages and _can_spread_head(checkpoint)
    lengths = [config.max_length or spec.max_positions]
    ranges, shares = stage_layers(costs, config.asked_stages, config.interleave, lengths, spreads_head)
    stage, is_packed, heads = own_stage(config.asked_stages), packs_experts or is_mxfp4(checkpoint), stages_of_heads(shares)
    model = load_stage(folder, ranges, stage, dtype, is_packed, head_stages=heads, **settings)
    setattr(model, RANGES, ranges)
    setattr(model, OUTPUT_SHARES, shares)
    # a stock trainer would train, evaluate or save this part as if it were a whole model
    refuse_all(model, own_stage(config.asked_stages), config.asked_stages)
    return model


def _can_spread_head(checkpoint: PretrainedConfig) -> bool:
    """Whether stages before the last can run the output head of a model of this config."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(checkpoint)
    return not spread_head_problem(model)


def own_stage(num_stages: int) -> int:
    """The pipeline stage of this rank."""
    state = PartialState()
    return int(state.process_index * num_stages // state.num_processes)
