"""One stage of a checkpoint: built on the meta device, cut, and filled by transformers' own loader with its own tensors alone.

The loader builds the model of a class, so it is given one whose constructor cuts: every tensor of other stages is unknown to
it and is never read, while renamed and fused weights, dtypes and buffers go their usual way.
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
    """The config of a checkpoint in a local folder; ValueError if its weights are not there, or not in safetensors."""
    if not Path(folder).is_dir():
        raise ValueError(f"{folder} is not a folder; download the checkpoint first, stages are read from local files")
    checkpoint_files(folder)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    quantised = getattr(config, "quantization_config", None) or {}
    if not can_load(quantised):
        raise ValueError(
            f"the checkpoint in {folder} is quantised by {quantised.get('quant_method')}, and not in four bits by bitsandbytes, "
            f"which alone is tested; use one of those, or in bfloat16 or float32"
        )
    return config


def load_stage(folder: str, parts: Ranges, stage: int, dtype: torch.dtype | str = "auto", **settings: Any) -> PreTrainedModel:
    """The model of the checkpoint in `folder` as `cut_model` leaves it for stage `stage`, in evaluation mode on the CPU.

    Neither this rank's memory nor its reads ever hold another stage's weights, but for the embedding that the head of the
    last stage is tied to. `settings` go to `from_pretrained`. Not collective. Raises ValueError for a folder without
    safetensors, a model that cannot be cut, and weights of the stage that the checkpoint does not have. Weights of four bits, by
    the checkpoint or a `quantization_config`, are read or made of this stage's tensors alone.
    """
    config = checkpoint_config(folder)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{folder} is a {config.model_type}, which is not a causal language model")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model, report = _cutting(model_class, parts, stage).from_pretrained(
        folder, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True, **settings
    )
    model.__class__ = model_class
    if len(parts) > 1 and stage == len(parts) - 1:
        check_ties(find_pieces(model))
        drop_embedding(find_pieces(model))
    if absent := sorted(set(report["missing_keys"]) & set(model.state_dict())):
        raise ValueError(f"the checkpoint in {folder} lacks {len(absent)} weights of stage {stage}, {absent[0]} first")
    loaded: PreTrainedModel = model
    return loaded


def _cutting(model_class: type[PreTrainedModel], parts: Ranges, stage: int) -> Any:
    """A class like `model_class`, whose instances are cut as soon as they are built."""

    def build(self: Any, *args: Any, **keywords: Any) -> None:
        model_class.__init__(self, *args, **keywords)
        whole = set(self.state_dict())
        # the embedding stays for the loader to tie the head of the last stage to
        cut_model(self, parts, stage, keeps_tie=stage == len(parts) - 1)
        # what other stages have is no surprise in the checkpoint; one of a base model has no prefix
        prefix = f"{self.base_model_prefix}."
        dropped = {re.escape(name.removeprefix(prefix)) for name in whole - set(self.state_dict())}
        # and beside a weight of four bits its scales
        self._keys_to_ignore_on_load_unexpected |= {f"^({re.escape(prefix)})?{name}(\\..*)?$" for name in dropped}

    # named like the original, by which transformers finds conversions of weights
    return type(model_class.__name__, (model_class,), {"__init__": build, "__module__": model_class.__module__})
