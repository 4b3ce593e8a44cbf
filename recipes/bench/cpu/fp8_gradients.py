"""Distances of adapters' gradients over frozen weights in fp8, in a small Llama that was trained on text.

    python recipes/bench/cpu/fp8_gradients.py [--steps 300] [--adapter-steps 40] [--batches 4]

A Llama of 4 layers of 128 learns the bytes of Python's standard library in fp32; then LoRA of rank 8 on all matrices of its
layers learns torch's C++ headers. At that state, the gradients of all adapters on some batches are compared, as one vector, with
those in fp32: of the model's own weights, and of the weights as they were rounded to fp8. The CPU rounds as Hopper does, but for
the order and width of sums inside a product. The model is small: the numbers show an order of magnitude, no proof for others.
"""

from __future__ import annotations

import argparse
import copy
import random
import sysconfig
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_longctx.hf.models.low_rank import bind_adapters
from hf_longctx.hf.models.quantised import fp8_layers, in_full, put_in_place, round_frozen

TOKENS, ROWS, HIDDEN, HELD_BYTES = 256, 4, 128, 20_000


def text(paths: list[Path], limit: int) -> Tensor:
    """Bytes of some of these files, in a fixed random order."""
    paths = sorted(paths)
    random.Random(0).shuffle(paths)
    found = b""
    for path in paths:
        found += path.read_bytes()[:HELD_BYTES]
        if len(found) > limit:
            break
    return torch.tensor(list(found[:limit]))


def batch(data: Tensor, generator: torch.Generator) -> Tensor:
    """Random rows, [ROWS, TOKENS]."""
    starts = torch.randint(0, len(data) - TOKENS, (ROWS,), generator=generator)
    return torch.stack([data[start : start + TOKENS] for start in starts])


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte."""
    logits = model(input_ids=ids, use_cache=False).logits.float()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(model: Any, data: Tensor, num_steps: int, seed: int) -> None:
    """AdamW with a warm-up over a tenth of the steps, and decay to zero."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer, generator = torch.optim.AdamW(weights, 2e-3, weight_decay=0.0), torch.Generator().manual_seed(seed)
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, 10 * (step + 1) / num_steps) * (1 - step / num_steps)
        optimizer.zero_grad()
        loss_of(model, batch(data, generator)).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()


def trained(num_steps: int, num_adapter_steps: int, code: Tensor, headers: Tensor) -> Any:
    """A model in fp32 that has learnt `code`, with adapters that have learnt `headers`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TOKENS,
    )
    model = LlamaForCausalLM(config)
    train(model, code, num_steps, 1)
    lora = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, lora)
    train(adapted, headers, num_adapter_steps, 2)
    return adapted


def rounded(model: Any, kept: tuple[str, ...] = ()) -> Any:
    """The model with weights in bf16, and those of its layers in fp8 but for the names `kept`; adapters in bf16."""
    model = copy.deepcopy(model).bfloat16()
    before = {name: copy.deepcopy(module) for name, module in model.named_modules() if type(module) is nn.Linear}
    round_frozen(model)
    for name in fp8_layers(model):
        if name.removesuffix(".base_layer").rpartition(".")[2] in kept:
            put_in_place(model, name, before[name])
    return model


def unpacked(model: Any) -> Any:
    """A copy with the same weights in plain modules in fp32."""
    model = copy.deepcopy(model)
    for name, layer in fp8_layers(model).items():
        put_in_place(model, name, in_full(layer))
    return model.float()


def gradients(model: Any, ids: Tensor, as_in_runs: bool = False) -> Tensor:
    """Gradients of all adapters as one vector. as_in_runs: adapters that read one input are computed together."""
    undo = bind_adapters(model) if as_in_runs else []
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    found = torch.autograd.grad(loss_of(model, ids), weights)
    for each in undo:
        each()
    return torch.cat([each.double().flatten() for each in found])


def main() -> None:
    """Print a table of distances, batch by batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--adapter-steps", type=int, default=40)
    parser.add_argument("--batches", type=int, default=4)
    options = parser.parse_args()
    code = text(list(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")), 1_500_000)
    headers = text(list((Path(torch.__file__).parent / "include").rglob("*.h")), 600_000)
    model = trained(options.steps, options.adapter_steps, code, headers)
    generator = torch.Generator().manual_seed(5)
    batches = [batch(headers, generator) for _ in range(options.batches)]
    # adapters that are compared are those that bf16 can hold
    own = copy.deepcopy(model).bfloat16().float()
    in_fp8 = rounded(model)
    exact = unpacked(in_fp8)
    attention = ("q_proj", "k_proj", "v_proj")
    references = {"own": [gradients(own, ids) for ids in batches], "rounded": [gradients(exact, ids) for ids in batches]}
    rows = {
        "bf16": (own.bfloat16(), "own"),
        "fp8 weights, products in bf16": (unpacked(in_fp8).bfloat16(), "rounded"),
        "fp8 both ways (`frozen_weights`)": (in_fp8, "rounded"),
        "the same, q, k, v in bf16": ((kept := rounded(model, attention)), ""),
        "rounded weights, all else in fp32": (exact, "own"),
    }
    references[""] = [gradients(unpacked(kept), ids) for ids in batches]
    print(
        f"| relative distance, {options.batches} batches | from the model's own weights, fp32 | from the rounded weights, fp32 |"
    )
    print("|---|---|---|")
    for name, (each, reference) in rows.items():
        found = [gradients(each, ids, as_in_runs=name != "bf16") for ids in batches]
        cells = []
        for of in ("own", reference):
            distances = [float((one - other).norm() / other.norm()) for one, other in zip(found, references[of], strict=True)]
            cells.append(f"{min(distances):.3f} to {max(distances):.3f}" if of != "own" or not cells else "")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
