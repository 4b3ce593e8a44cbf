"""Imports and tables that the server of forked processes makes once, instead of every process that it forks.

Everything here stays for good: a garbage collection in a fork, which every training begins with, would go through all of it and
copy its pages (0.5 to 1.5 s each).
"""

from __future__ import annotations

import gc
from contextlib import suppress

import helpers.trainers.trainer_runs
import torch.distributed.checkpoint
import torch.distributed.fsdp
import transformers.models.llama.modeling_llama

import hf_longctx.recipes.sft

__all__ = ["helpers", "hf_longctx", "torch", "transformers"]

with suppress(ImportError):
    # half a second of regular expressions, which every process would compile for its first checkpoint
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")

gc.collect()
gc.freeze()
