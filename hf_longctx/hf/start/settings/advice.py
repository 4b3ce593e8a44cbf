"""Says what the machine, the environment or the model's config would have to be for a run to be faster or to fit."""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from hf_longctx.plan.core.settings import USABLE_SHARE
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.runtime.tiles.cuda import device_capability
from hf_longctx.runtime.tiles.tile import attention_backend
from hf_longctx.sim.capacity import DeviceMemory, Placement, fitting_remedies

# options of `hf-longctx plan` -> settings of a run; the first that matches
_SETTINGS = {
    "--lora-rank ([0-9]+) --quantize nf4": r"weights loaded in four bits below adapters of rank \1 (QLoRA)",
    "--lora-rank ([0-9]+)": r"adapters of rank \1 (LoRA)",
    "--optimizer-states host": "optimizer_states='host'",
    "--layer-weights host": "layer_weights='host'",
    "--parameters sharded": "parameters='sharded'",
    "--shard-ranks ([0-9]+)": r"shard_ranks=\1",
    "--activations auto": "activations='auto'",
    "--dtype bfloat16": "weights loaded in bfloat16",
    "--bf16-updates": "fp32_master_weights=False, which loses small updates",
    "--method auto": "method='auto'",
    "--degrees": "no degrees",
    "--tokens-per-rank": "no tokens_per_rank",
    "--gpus ([0-9]+)": r"parameters='sharded' on \1 ranks",
}


def fitting_settings(memory: DeviceMemory, placement: Placement, num_tokens: int, may_recompute: bool = False) -> str:
    """Settings with which a rank of `memory` holds a sequence of `num_tokens`, each tried by formula; empty if there are none."""
    found = []
    for one in fitting_remedies(memory, placement, num_tokens, may_recompute):
        # a run knows the memory of its hosts, and cannot buy larger devices; adapters of other sizes are the user's own
        is_known = "--host-gib" not in one.change and "--" in one.change
        if is_known and not (memory.lora_rank and "--lora-rank" in one.change):
            # two settings of a pair are told apart by their sentences
            texts = [_as_setting(part) for part in one.change.split(" and ") if "--" in part]
            found.append(f"{' and '.join(texts)} ({one.longest_tokens:,} tokens)")
    return "; ".join(found)


def _as_setting(change: str) -> str:
    """A change of a forecast as a setting of a run."""
    for option, setting in _SETTINGS.items():
        if match := re.search(option, change):
            return match.expand(setting)
    return change


def run_memory(costs: CostModel, device_gib: float, host_bytes: int, most_offloaded: int, keeps_everything: bool) -> DeviceMemory:
    """Memory of a rank of a run for `fitting_settings`. host_bytes: what its host has beside what lies there already."""
    own = costs.cluster.hardware.device_bytes
    usable_bytes = int(device_gib * 2**30) if device_gib else int(own * USABLE_SHARE)
    trains_adapters = not costs.model.adapters.is_empty
    memory = DeviceMemory.by_formula(costs.model, own)
    return replace(
        memory,
        usable_bytes=usable_bytes,
        lora_rank=int(trains_adapters),
        host_bytes=host_bytes,
        keeps_everything=keeps_everything,
        most_offloaded=most_offloaded,
    )


def slow_tiles(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str:
    """Says that tiles of attention run without a fast operator, and what to change; empty if they do not, or on a CPU."""
    head_dim = spec.largest_head_dim
    if device.type == "cuda" and spec.drops_weights:
        return (
            "attention: dropout of its weights makes all tiles plain matrices, many times slower than FlashAttention; set "
            "attention dropout to 0 in the model's config to go without, or measure what it costs with hf-longctx calibrate"
            f"{tf32_offer(device_capability(device), dtype, torch.backends.cuda.matmul.fp32_precision)}"
        )
    if device.type != "cuda" or attention_backend(device, dtype, head_dim, spec.caps_scores) != "plain":
        return ""
    wanted = ["bf16=True", "head sizes of at most 256 that 8 divides"]
    wanted += ["the package flash-attn or flash-attn-4"] if spec.caps_scores else []
    return (
        f"attention: its tiles are plain matrices, many times slower than FlashAttention, which needs {', '.join(wanted)}; here "
        f"heads have {head_dim} elements in {str(dtype).removeprefix('torch.')}"
        f"{tf32_offer(device_capability(device), dtype, torch.backends.cuda.matmul.fp32_precision)}"
    )


def tf32_offer(capability: tuple[int, int], dtype: torch.dtype, precision: str) -> str:
    """Says what TF32 gives to products of fp32 matrices and what it costs; empty where no product would change.

    precision: of such products now, as `torch.backends` names it.
    """
    if dtype != torch.float32 or capability < (8, 0) or precision == "tf32":
        return ""
    return (
        "; to keep weights and activations in fp32, TrainingArguments(tf32=True) lets tensor cores multiply, at up to eight "
        "times the rate, but rounds the factors of every product to 11 bits: results are right to about 1e-3 instead of 1e-6"
    )


def allocator_advice(device_type: str, environment: dict[str, str]) -> str:
    """A setting of torch's allocator that is missing; empty if none is, or on a CPU."""
    settings = [environment.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")]
    if device_type != "cuda" or any("expandable_segments" in each for each in settings):
        return ""
    return (
        "memory: sizes of tensors change in every step, which leaves gaps between them; set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"
    )


def threads_advice(costs: CostModel, device_type: str, num_threads: int, num_cores: int) -> str:
    """More threads for updates on the host, if cores would be idle; empty on a CPU, whose threads do everything."""
    own_cores = num_cores // costs.cluster.ranks_per_node
    if device_type != "cuda" or not costs.model.updates_on_host or 2 * num_threads > own_cores:
        return ""
    return (
        f"optimizer states: the CPU updates weights with {num_threads} thread(s) a rank (torchrun sets one); set "
        f"OMP_NUM_THREADS={own_cores} in the environment for all of the {num_cores} cores"
    )
