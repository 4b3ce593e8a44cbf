"""Pretrain the tiny base model of `recipes/configs/extend_demo.yaml`, which looks up values in documents of up to 128 tokens.

    python recipes/pretrain_copy.py recipes/copy_base

The model has two layers and a quarter of a million weights; training takes some minutes on one CPU core.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM, set_seed

from hf_longctx.recipes.key_values import BASE_TOKENS, copy_document, key_value_document

_TOKENS_PER_STEP, _WARMUP_STEPS, _HIGHEST_RATE = 2048, 50, 3e-3


def main() -> None:
    """Trains and saves; prints the loss every 100 steps."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="folder to write the checkpoint into")
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps")
    arguments = parser.parse_args()
    set_seed(0)
    model, chance = Qwen2ForCausalLM(base_config()), random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_HIGHEST_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(arguments.steps):
        done = step / arguments.steps
        for group in optimizer.param_groups:
            group["lr"] = _HIGHEST_RATE * min(1, (step + 1) / _WARMUP_STEPS) * (1 - done) ** 0.5
        loss = batch_loss(model, done, chance)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step:4d} | loss {float(loss.detach()):.3f}", flush=True)
    model.save_pretrained(arguments.folder)


def base_config() -> Qwen2Config:
    """Config of the base model: a Qwen2, whose query and key biases make it easy to learn a head that looks one token back."""
    return Qwen2Config(
        vocab_size=259,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=BASE_TOKENS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


def batch_loss(model: Qwen2ForCausalLM, done: float, chance: random.Random) -> torch.Tensor:
    """Mean loss of a batch of new documents; these change from short copies to keys and values at full length as `done` grows.

    `done` is the share of the training that is over.
    """
    length = BASE_TOKENS if done > 0.5 else BASE_TOKENS // 2 if done > 0.2 else BASE_TOKENS // 4
    is_copy = [chance.random() < 1 - 1.5 * done for _ in range(_TOKENS_PER_STEP // length)]
    rows = [(copy_document if copies else key_value_document)(length, chance) for copies in is_copy]
    logits = model(input_ids=torch.tensor([row["input_ids"] for row in rows]), use_cache=False).logits[:, :-1]
    labels = torch.tensor([row["labels"] for row in rows])[:, 1:]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=-100)


if __name__ == "__main__":
    main()
