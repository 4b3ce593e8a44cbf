"""Load a checkpoint in a plain process, with transformers alone, and compare its held-out loss with the training run's.

    python recipes/evaluate.py outputs/demo

Reads held_out.json, which recipes/sft.py writes into the checkpoint folder. Exits with status 1 if the losses differ by more
than 1e-5.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-5


def main() -> int:
    """Prints both losses; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="folder with the checkpoint and held_out.json")
    checkpoint = parser.parse_args().checkpoint
    held_out = json.loads((checkpoint / "held_out.json").read_text())
    loss = plain_loss(checkpoint, held_out["input_ids"], held_out.get("labels", held_out["input_ids"]))
    difference = abs(loss - held_out["loss"])
    print(f"held-out loss: {loss:.7f} in a plain process, {held_out['loss']:.7f} in training, difference {difference:.1e}")
    return 0 if difference <= TOLERANCE else 1


@torch.no_grad()
def plain_loss(checkpoint: Path, sequences: list[list[int]], labels: list[list[int]]) -> float:
    """Mean cross-entropy over all next tokens whose label is not -100, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    total, count = 0.0, 0
    for tokens, wanted in zip(sequences, labels, strict=True):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        targets = torch.tensor(wanted[1:], dtype=torch.int64)
        total += float(F.cross_entropy(logits[0, :-1].double(), targets, ignore_index=-100, reduction="sum"))
        count += int((targets != -100).sum())
    return total / max(count, 1)


if __name__ == "__main__":
    sys.exit(main())
