"""Trainings whose checkpoints are kept beside the tests, as releases before 0.2.0 wrote them.

`save` made the checkpoints, and `resume` on that release the values that tests compare with.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from helpers.models.reference import random_rows
from helpers.models.tiny_models import cast
from helpers.ranks.rank_steps import whole
from helpers.trainers.trainer_runs import LossRecorder, make_trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from hf_longctx.runtime.parameters.low_bit import is_low_bit

NUM_SAVED, NUM_STEPS = 2, 4
# kind -> settings of the run, arguments, dtype of the weights, vocabulary, hidden size
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], torch.dtype, int, int]] = {
    "replicated": ({}, {}, torch.float32, 64, 16),
    "sharded": ({"parameters": "sharded"}, {}, torch.bfloat16, 64, 16),
    "staged": ({"stages": 2}, {}, torch.float32, 64, 16),
    "whole": ({"parameters": "sharded"}, {"optim": "adafactor"}, torch.bfloat16, 64, 16),
    # shards of the embedding alone have moments of few bits
    "low-bit": (
        {"parameters": "sharded", "fp32_master_weights": False},
        {"optim": "adamw_torch_8bit"},
        torch.bfloat16,
        256,
        32,
    ),
}


def model_of(dtype: torch.dtype, vocab_size: int, hidden_size: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size,
        num_hidden_layers=2 if hidden_size == 16 else 1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    return cast(LlamaForCausalLM(config), dtype)


class LoadedStates(TrainerCallback):
    """Digests of the optimizer's states and settings when the training begins."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        self.groups: list[str] = []
        self.trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        optimizer = self.trainer._plain_optimizer
        names = {weight: name for name, weight in self.trainer.model.named_parameters()}
        for weight, states in optimizer.state.items():
            for key, value in states.items():
                self.states[f"{names[weight]} {key}"] = digest(value)
        for group in optimizer.param_groups:
            self.groups.append(repr(sorted((name, value) for name, value in group.items() if name != "params")))


def digest(value: Any) -> str:
    """A digest of a number or of a tensor, which is put together from its shards and made plain."""
    if not isinstance(value, Tensor):
        return repr(value)
    if isinstance(value, DTensor) and (is_low_bit(value) or value.dtype != torch.float32):
        own: Any = value.to_local()
        plain = own.dequantize() if is_low_bit(own) else own.float()
        value = DTensor.from_local(
            plain, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
    found = whole(value)
    plain = found.dequantize() if is_low_bit(found) else found
    return f"{tuple(plain.shape)} {hashlib.sha256(plain.detach().float().contiguous().numpy().tobytes()).hexdigest()[:16]}"


def train(kind: str, placed: str, folder: str, resume: str) -> dict[str, Any]:
    """Trains a checkpoint's kind of model and optimizer, placed as that of another kind; what this rank saw."""
    _, arguments, dtype, vocab_size, hidden_size = KINDS[kind]
    config = {**KINDS[placed][0], **{name: value for name, value in KINDS[kind][0].items() if name.startswith("fp32")}}
    saving = {"max_steps": NUM_STEPS if resume else NUM_SAVED, "learning_rate": 1e-2, **arguments}
    saving |= {"save_strategy": "no" if resume else "steps", "save_steps": NUM_SAVED, "warmup_steps": 0}
    saving |= {"per_device_train_batch_size": 12 // torch.distributed.get_world_size(), "lr_scheduler_type": "constant"}
    recorder, loaded = LossRecorder(), LoadedStates()
    trainer = make_trainer(
        None,  # type: ignore[arg-type]
        random_rows([20, 9, 12, 5, 7, 8, 11, 10, 14, 6, 13, 15]),
        folder,
        {"tokens_per_rank": 64, **config},
        saving,
        model=model_of(dtype, vocab_size, hidden_size),
        callbacks=[loaded],
    )
    loaded.trainer = trainer
    recorder.attach(trainer)
    with torch.compiler.set_stance("force_eager"):
        trainer.train(resume_from_checkpoint=resume or None)
    weights = {name: digest(weight.detach()) for name, weight in trainer.model.named_parameters()}
    trainer.longctx_run.close()
    return {"losses": recorder.losses, "weights": weights, "states": loaded.states, "groups": loaded.groups}


def merged(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Joins the findings of all ranks."""
    return {
        "losses": found[0]["losses"],
        "groups": found[0]["groups"],
        **{key: {name: each for rank in found for name, each in sorted(rank[key].items())} for key in ("weights", "states")},
    }


def kept_files(checkpoint: Path) -> list[Path]:
    """Files of a checkpoint that a resumed run reads."""
    return [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name != "training_args.bin"]
