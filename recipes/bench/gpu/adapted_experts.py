"""One step of some layers of Qwen3-30B-A3B with adapters on experts: multiplied apart, and PEFT's merged way.

    python recipes/bench/gpu/adapted_experts.py [--layers 8] [--tokens 4096] [--json FILE]

Both run the same random weights in bf16 and the same tokens, with the classes' own attention, keep everything, and differ in
nothing but the experts. Printed are the seconds of a second step (forward and backward), the most bytes beyond weights and
gradients, and the largest distance of an adapter's gradient from the other way's, relative to its norm. Each way that runs out
of memory says so. `--tiny` makes the layers small enough for a CPU.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor

from hf_longctx.hf.models.kernels import FusedLayers
from hf_longctx.recipes.bench.gpu.rows import append_row
from hf_longctx.recipes.bench.gpu.timing import wall_s

# shape of Qwen3-30B-A3B in its config.json, and one for a CPU
SHAPE = {
    **{"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936},
    **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
}
TINY = {
    **{"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128},
    **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
}
WAYS = ("apart", "merged by PEFT")
# a gradient that differs by more is wrong, not rounded
TOLERANCE = 0.1


def build(num_layers: int, shape: dict[str, Any], device: torch.device) -> Any:
    """Makes the model with adapters of rank 16 on all experts, whose second matrices are not zero."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(num_hidden_layers=num_layers, **shape)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = transformers.Qwen3MoeForCausalLM(config).train()
    finally:
        torch.set_default_dtype(before)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules=[], target_parameters=names))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.02)
    return model


def measure(model: Any, ids_1T: Tensor) -> tuple[float, int, dict[str, Tensor]]:
    """Seconds of a second step, most bytes beyond weights and gradients (0 without CUDA), and its gradients."""

    def step() -> None:
        model.zero_grad()
        model(input_ids=ids_1T, labels=ids_1T, use_cache=False).loss.backward()

    step()
    is_cuda = ids_1T.device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    seconds = wall_s(step)
    peak = torch.cuda.max_memory_allocated() - held if is_cuda else 0
    return seconds, peak, {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures both ways; returns 1 if their gradients differ or ours does not run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=8, help="decoder layers (default: 8)")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the document (default: 4096)")
    parser.add_argument("--tiny", action="store_true", help="a small model, for a CPU")
    parser.add_argument("--json", type=Path, help="file to which rows are appended")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = TINY if options.tiny else SHAPE
    model = build(options.layers, shape, device)
    ids_1T = torch.randint(0, shape["vocab_size"], (1, options.tokens), device=device)
    found: dict[str, dict[str, Tensor]] = {}
    for way in WAYS:
        fused = FusedLayers("")
        if way == "apart":
            fused.bind(model)
        try:
            seconds, peak, found[way] = measure(model, ids_1T)
        except torch.OutOfMemoryError as error:
            row: dict[str, Any] = {"way": way, "problem": str(error).splitlines()[0]}
        else:
            row = {"way": way, "layers": options.layers, "tokens": options.tokens, "seconds": seconds, "peak_bytes": peak}
        fused.close()
        model.zero_grad()
        gc.collect()
        print(row, flush=True)
        if options.json is not None:
            append_row(options.json, row)
    if len(found) < len(WAYS):
        return int("apart" not in found)
    ours, merged = (found[way] for way in WAYS)
    error = max(float((ours[name] - merged[name]).norm() / merged[name].norm()) for name in merged)
    print(f"gradients of adapters differ by at most {error:.1e} of their norm")
    return int(ours.keys() != merged.keys() or not error <= TOLERANCE)


if __name__ == "__main__":
    raise SystemExit(main())
