"""Loads one pipeline stage of a checkpoint: builds the model on the meta device, cuts it, and reads this stage's tensors only.

The package's `load_pipeline_stage` calls this. The loader of transformers builds a model from its class, so it is given a class
whose constructor cuts the model. Tensors of other stages are then unknown to the loader, which never reads them. It handles
renamed and fused weights, dtypes and buffers as usual.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel

from hf_longctx.hf.checkpoints.sharded import checkpoint_files
from hf_longctx.hf.models.cutting import Ranges, check_ties, cut_model, drop_embedding, find_pieces
from hf_longctx.hf.models.quantised import can_load


def checkpoint_config(folder: str) -> PretrainedConfig:
    """Config of a checkpoint in a local folder; raises ValueError if its weights are missing or not in safetensors."""
    if not Path(folder).is_dir():
        raise ValueError(f"{folder} is not a folder; download the checkpoint first: stages are read from local files")
    checkpoint_files(folder)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    quantised = getattr(config, "quantization_config", None) or {}
    if not can_load(quantised):
        raise ValueError(
            f"the checkpoint in {folder} is quantised by {quantised.get('quant_method')}; only four bits by bitsandbytes are "
            f"tested: use such a checkpoint, or one in bfloat16 or float32"
        )
    return config


def load_stage(folder: str, parts: Ranges, stage: int, dtype: torch.dtype | str = "auto", **settings: Any) -> PreTrainedModel:
    """Loads stage `stage` of the checkpoint in `folder`, cut as `cut_model` does it, in evaluation mode on the CPU.

    This rank never reads or holds weights of another stage, except the embedding to which the head of the last stage is tied.
    `settings` go to `from_pretrained`. Four-bit weights are read from the checkpoint, or made if a `quantization_config` asks for
    them, for this stage only. Not collective. Raises ValueError for a folder without safetensors, for a model that cannot be
    cut, and if the checkpoint lacks weights of the stage.
    """
    config = checkpoint_config(folder)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{folder} holds a {config.model_type}, which is not a causal language model; use one of these")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model, report = _cutting(model_class, parts, stage).from_pretrained(
        folder, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True, **settings
    )
    model.__class__ = model_class
    if len(parts) > 1 and stage == len(parts) - 1:
        check_ties(find_pieces(model))
        drop_embedding(find_pieces(model))
    if absent := sorted(set(report["missing_keys"]) & set(model.state_dict())):
        raise ValueError(
            f"the checkpoint in {folder} lacks {len(absent)} weights of stage {stage} (the first is {absent[0]}); give a "
            f"complete checkpoint"
        )
    loaded: PreTrainedModel = model
    return loaded


def _cutting(model_class: type[PreTrainedModel], parts: Ranges, stage: int) -> Any:
    """A subclass of `model_class` whose instances are cut as soon as they are built."""

    def build(self: Any, *args: Any, **keywords: Any) -> None:
        model_class.__init__(self, *args, **keywords)
        whole = set(self.state_dict())
        # the last stage keeps the embedding for now, since the loader ties the head to it
        cut_model(self, parts, stage, keeps_tie=stage == len(parts) - 1)
        # tell the loader to expect weights of other stages; in checkpoints of a base model these have no prefix
        prefix = f"{self.base_model_prefix}."
        dropped = {re.escape(name.removeprefix(prefix)) for name in whole - set(self.state_dict())}
        # the pattern also covers the scales next to a four-bit weight
        self._keys_to_ignore_on_load_unexpected |= {f"^({re.escape(prefix)})?{name}(\\..*)?$" for name in dropped}

    # named like the original, because transformers finds weight conversions by class name
    return type(model_class.__name__, (model_class,), {"__init__": build, "__module__": model_class.__module__})
