"""Stock trainers of transformers on tiny models, with and without our callback, and records of their runs."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import datasets
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.models.tiny_models import ModelCase, build_model
from helpers.trainers.trainer_runs import training_arguments
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback

from hf_longctx import LongContextCallback, LongContextConfig

# trainings that are compared with others start without the self-test
OFF = {"self_test": False}


def fp64_loss(
    logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, shift_labels: Any = None, **_: Any
) -> Any:
    """Transformers' causal loss without its cast of the logits to fp32, which would hide errors below 1e-7."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=-100)[..., 1:]
    total = F.cross_entropy(logits.view(-1, vocab_size), shift_labels.reshape(-1), ignore_index=-100, reduction="sum")
    return total / num_items_in_batch


class EventRecorder(TrainerCallback):
    """Records the names of all events in the order in which they arrive."""

    def __init__(self) -> None:
        self.events: list[str] = []


def _recording(event: str) -> Any:
    def record(self: EventRecorder, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(f"{event} {state.global_step}")

    return record


for _event in [name for name in dir(TrainerCallback) if name.startswith("on_")]:
    setattr(EventRecorder, _event, _recording(_event))


class PaddingCollator:
    """Pads rows and labels at the end to the longest row, as padding collators do; needs no tokenizer."""

    def __call__(self, rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)

        def padded(name: str, filler: int) -> torch.Tensor:
            return torch.tensor([list(row[name]) + [filler] * (longest - len(row[name])) for row in rows])

        mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows])
        return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": mask}


def make_stock_trainer(
    case: ModelCase,
    rows: list[dict[str, list[int]]],
    folder: str,
    arguments: dict[str, Any] | None = None,
    trainer_class: type[Trainer] = Trainer,
    exact_loss: bool = True,
    **kwargs: Any,
) -> Trainer:
    """A stock trainer with 8 sequences per optimizer step over all ranks, unless `arguments` differ."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    args = training_arguments(folder, **{"per_device_train_batch_size": 8 // num_ranks, "logging_steps": 1, **(arguments or {})})
    model = build_model(case)
    if exact_loss:
        model.loss_function = fp64_loss
    kwargs.setdefault("data_collator", DataCollatorWithFlattening())
    return trainer_class(model=model, args=args, train_dataset=datasets.Dataset.from_list(rows), **kwargs)


def quiet_config(**settings: Any) -> LongContextConfig:
    """Settings without reports and, unless they ask for it, without the self-test."""
    return LongContextConfig(**{"report_steps": False, "timeline_steps": 0, **OFF, **settings})


@dataclass
class StockRun:
    """Record of a run: this rank's loss in every `training_step` (with the trainer's factors), layouts, and weights."""

    losses: list[float]
    layouts: list[str]
    weights: dict[str, torch.Tensor]
    history: list[dict[str, Any]]


class LossTrainer(Trainer):
    """A trainer that keeps every loss in the model's precision, because the stock log adds losses up in fp32."""

    losses: list[float]
    layouts: list[str]
    callback: LongContextCallback | None = None

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), float(loss)]
        if self.callback is not None and self.callback.exchange is not None:
            assert self.callback.exchange.last_plan is not None
            self.layouts = [*getattr(self, "layouts", []), self.callback.exchange.last_plan.layout]
        return loss


def run_alone(
    case: ModelCase,
    rows: list[dict[str, list[int]]],
    config: dict[str, Any] | None,
    arguments: dict[str, Any],
    exact_loss: bool = True,
    padded: bool = False,
) -> StockRun:
    """Runs a stock trainer on this rank, with our callback alone, or without it if `config` is None."""
    callback = None if config is None else LongContextCallback(LongContextConfig(**{**OFF, **config}))
    callbacks = [] if callback is None else [callback]
    collator = {"data_collator": PaddingCollator()} if padded else {}
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_stock_trainer(case, rows, folder, arguments, LossTrainer, exact_loss, callbacks=callbacks, **collator)
        trainer.callback = callback
        trainer.train()
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return StockRun(trainer.losses, getattr(trainer, "layouts", []), weights, trainer.state.log_history)
