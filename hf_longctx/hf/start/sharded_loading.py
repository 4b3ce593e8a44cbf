"""Loads a model that the trainer will shard, without the whole model on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_longctx.hf.checkpoints.deferred import config_of, defer_weights, deferred_problems, source_of
from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.models.cutting import loaded_ranges
from hf_longctx.hf.models.packed_experts import packed_weights
from hf_longctx.hf.models.quantised import fp8_layers, is_mxfp4
from hf_longctx.hf.ranks.launch import LaunchEnvironment
from hf_longctx.plan.setup import Setup


def load_sharded(
    name_or_path: str,
    config: LongContextConfig,
    /,
    dtype: torch.dtype | str = "auto",
    packs_experts: bool = False,
    **settings: Any,
) -> PreTrainedModel:
    """Loads a causal language model for a trainer with `config`; sharded parameters are read once the trainer has sharded them.

    Each rank then reads only its own shards from the safetensors files, and holds no more than these and one weight. Weights that
    transformers renames or fuses when it reads them, except those of experts, are read on rank 0 alone, which holds the whole
    model on its host and sends one weight at a time. Matrices in fp8 with scales of blocks keep their bytes, or are unpacked
    while they are read, with `quantization_config=FineGrainedFP8Config(dequantize=True)`. Until then every weight is NaN;
    adapters may be put over them. With replicated parameters or on one rank, this is `from_pretrained`, except where weights are
    packed while they are read: with `frozen_weights="fp8"`, from a checkpoint with experts in MXFP4, and with packs_experts.
    With `parameters="auto"`, the trainer chooses among shards.

    packs_experts: `pack_experts` will be called before the trainer is made. Experts in MXFP4 that are not packed are unpacked a
    few at a time while they are read. `settings` go to `from_pretrained`. Not collective, but every rank must call this. Raises
    ValueError if the checkpoint lacks weights or is quantised in another way, and if the ranks have not joined yet.

    Example:

        config = LongContextConfig(parameters="sharded")
        model = load_sharded("meta-llama/Llama-3.1-70B", config, dtype=torch.bfloat16)
        trainer = LongContextTrainer(model=model, args=args, train_dataset=dataset, longctx_config=config)
    """
    # asking accelerate would join the ranks with time-outs other than those of the arguments
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    launched = LaunchEnvironment.read().num_ranks
    if num_ranks != launched:
        raise ValueError(
            f"the launcher started {launched} processes, but only {num_ranks} of them joined; make the TrainingArguments before "
            f"the model is loaded (without a GPU, set use_cpu=True in them)"
        )
    is_packed = packs_experts or config.frozen_weights == "fp8" or is_mxfp4(config_of(name_or_path, settings))
    if (config.parameters == "replicated" or num_ranks == 1) and not is_packed:
        return AutoModelForCausalLM.from_pretrained(name_or_path, dtype=dtype, **settings)
    return defer_weights(name_or_path, dtype=dtype, **settings)


def unread_problems(model: Any, setup: Setup) -> list[str]:
    """Returns why weights of a model from `load_sharded` cannot be read in a run of this setup; empty if they can."""
    if (source := source_of(model)) is None:
        return []
    is_packed = bool(fp8_layers(model)) or any(packed_weights(model)) or any(each.is_mxfp4 for each in source.experts.values())
    is_shared = setup.costs.cluster.num_ranks > 1 and loaded_ranges(model) is None
    if setup.costs.parameters == "replicated" and is_shared and not is_packed:
        return [
            "the model is one of load_sharded, whose weights are read in shards, but this run keeps parameters whole on every "
            "rank; give load_sharded and the trainer the same config, with parameters='sharded'"
        ]
    if setup.num_stages > 1 and loaded_ranges(model) is None:
        return [
            f"the model is one of load_sharded, but this run has {setup.num_stages} pipeline stages; load it with "
            f"load_pipeline_stage, or set stages=1"
        ]
    return deferred_problems(model)
