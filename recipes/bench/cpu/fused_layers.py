"""Seconds of a layer's norm, its MLP and the whole layer, eager and with the kernels of `compile_layers`, on the CPU.

    python recipes/bench/cpu/fused_layers.py [--tokens 1024] [--hidden 1024] [--repeats 7]

Forward and backward of one Llama layer in fp32, one thread. Prints medians of alternating repeats, so that a busy machine
disturbs both alike, and their ratio. It says nothing about a GPU, where memory traffic is a larger part of a layer's seconds.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_longctx.hf.models.kernels import FusedLayers


def main() -> None:
    """Prints one line per part of the layer."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a tile (default: 1024)")
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size; an MLP has 3.5 times as many (default: 1024)")
    parser.add_argument("--repeats", type=int, default=7, help="timed repeats; one more runs first (default: 7)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hidden, heads = arguments.hidden, max(1, arguments.hidden // 128)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=128,
    )
    eager: Any = LlamaForCausalLM(config)
    compiled = copy.deepcopy(eager)
    layers = FusedLayers("compile")
    layers.bind(compiled)
    x_1TC = torch.randn(1, arguments.tokens, hidden, requires_grad=True)
    parts: dict[str, Callable[[Any], Tensor]] = {
        "RMSNorm": lambda model: model.model.layers[0].input_layernorm(x_1TC),
        "MLP": lambda model: model.model.layers[0].mlp(x_1TC),
        "layer and last norm": lambda model: model.model(inputs_embeds=x_1TC, use_cache=False).last_hidden_state,
    }
    print(f"forward and backward of {arguments.tokens} tokens, hidden size {hidden}, fp32, CPU, one thread:")
    for name, part in parts.items():
        eager_s, compiled_s = times(part, (eager, compiled), arguments.repeats)
        ratio = f"eager takes {eager_s / compiled_s:.2f} times as long"
        print(f"  {name:20} eager {eager_s * 1e3:8.1f} ms   compiled {compiled_s * 1e3:8.1f} ms   {ratio}")
    layers.close()


def times(part: Callable[[Any], Tensor], models: tuple[Any, Any], repeats: int) -> tuple[float, float]:
    """Median seconds of forward and backward of a part of both models; the first calls, which compile, are not timed."""
    measured: tuple[list[float], list[float]] = ([], [])
    for number in range(repeats + 1):
        for model, seconds in zip(models, measured, strict=True):
            start_s = time.perf_counter()
            part(model).sum().backward()
            if number:
                seconds.append(time.perf_counter() - start_s)
    return median(measured[0]), median(measured[1])


if __name__ == "__main__":
    main()
