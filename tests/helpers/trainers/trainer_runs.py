"""Whole training runs: ours on a pool of ranks, and a plain loop of transformers and torch as the reference."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.models.dropout_truth import dropping
from helpers.models.reference import reference_step
from helpers.models.teachers import build_teacher
from helpers.models.tiny_models import ModelCase, build_model
from helpers.ranks.rank_steps import whole
from torch import Tensor
from transformers import TrainerCallback, TrainingArguments, get_scheduler

from hf_longctx import LongContextConfig, LongContextTrainer
from hf_longctx.hf.data.sampler import LengthAwareSampler
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.rules.arguments import setup_problems

# results of plain trainings that have run, since several runs are compared with the same one
_KNOWN_TRAININGS: dict[str, tuple[list[float], dict[str, Any]]] = {}

Rows = list[dict[str, list[int]]]

# gradients without clipping, weights by plain gradient descent, as in `plain_steps`
PLAIN_DESCENT = {
    "optim": "sgd",
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,
    "warmup_steps": 0,
    "lr_scheduler_type": "constant",
}


@dataclass
class RecordedStep:
    """Loss and gradients of one optimizer step, and its plan's layer ranges of a stage, actions with lenders, and policies."""

    loss: float
    gradients: dict[str, torch.Tensor]
    layer_ranges: set[int]
    num_lent: int
    num_policies: int


class StepRecorder:
    """Records the steps of a training in full precision; each step has one plan."""

    def __init__(self) -> None:
        self.steps: list[RecordedStep] = []

    def attach(self, trainer: LongContextTrainer) -> None:
        original = trainer.longctx_run.report.step_done

        def step_done(plan: Any, result: Any) -> None:
            groups = [group for each in plan.micro_batches for group in each.groups]
            actions = [action for group in groups for stage in group.stages for action in stage.actions]
            gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
            layer_ranges, num_lent = {action.layer_range for action in actions}, sum(bool(action.lenders) for action in actions)
            num_policies = sum(bool(policy.layers) for group in groups for stage in group.stages for policy in stage.activations)
            self.steps.append(RecordedStep(float(result.loss), gradients, layer_ranges, num_lent, num_policies))
            original(plan, result)

        trainer.longctx_run.report.step_done = step_done


def check_equal_steps(found: list[Any], expected: list[Any]) -> None:
    """Compares two or more steps, each a loss and gradients by name, to 1e-12."""
    assert len(found) == len(expected) >= 2
    for (loss, gradients), (expected_loss, expected_gradients) in zip(found, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-12)
        assert gradients.keys() == expected_gradients.keys()
        for name, gradient in gradients.items():
            assert float((gradient - expected_gradients[name]).abs().max()) <= 1e-12, name


def plain_steps(
    case: ModelCase, rows: Rows, num_steps: int, learning_rate: float = 1e-2
) -> tuple[list[tuple[float, dict[str, torch.Tensor]]], dict[str, torch.Tensor]]:
    """Plain gradient descent on all rows, one document at a time: loss and gradients of each step, and the last weights."""
    model = build_model(case)
    steps = []
    for _ in range(num_steps):
        loss, gradients = reference_step(model, rows, case.loss, build_teacher(case))
        steps.append((loss, gradients))
        with torch.no_grad():
            for name, gradient in gradients.items():
                model.get_parameter(name).sub_(learning_rate * gradient)
    return steps, {name: p.detach().clone() for name, p in model.named_parameters()}


class LossRecorder(TrainerCallback):
    """Records layouts and losses of all steps in full precision, and the most chunks that a group had."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.layouts: list[str] = []
        self.num_chunks: list[int] = []

    def attach(self, trainer: LongContextTrainer) -> None:
        original = trainer.longctx_run.report.step_done

        def step_done(plan: Any, result: Any) -> None:
            self.losses.append(float(result.loss))
            self.layouts.append(plan.layout)
            self.num_chunks.append(max(len(group.chunks) for each in plan.micro_batches for group in each.groups))
            original(plan, result)

        trainer.longctx_run.report.step_done = step_done


def trained_beside(
    trainer: LongContextTrainer, frozen: Callable[[Any], dict[str, Tensor]], resume: str | None = None
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Trains; returns losses, what `frozen` finds in the model before and after, and whole trained weights by name."""
    recorder = LossRecorder()
    recorder.attach(trainer)
    trainer._placed_model()
    before = frozen(trainer.model)
    trainer.train(resume_from_checkpoint=resume)
    after = frozen(trainer.model)
    trained = {name: whole(p.detach()).clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return recorder.losses, before, after, trained


def training_arguments(folder: str, **changes: Any) -> TrainingArguments:
    """Arguments for a short and quiet run on CPU."""
    settings: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "max_steps": 20,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 5,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 0.5,
        "optim": "adamw_torch",
        "logging_steps": 5,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 3,
    }
    return TrainingArguments(**{**settings, **changes})


def make_trainer(
    case: ModelCase,
    rows: Any,
    folder: str,
    config: dict[str, Any] | None = None,
    arguments: dict[str, Any] | None = None,
    **kwargs: Any,
) -> LongContextTrainer:
    """A trainer on a list of rows or on a dataset; a step has 8 sequences on any number of ranks unless `arguments` differ."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    args = training_arguments(folder, **{"per_device_train_batch_size": 8 // num_ranks, **(arguments or {})})
    settings = {"report_steps": False, "timeline_steps": 0, "self_test": False, **(config or {})}
    return LongContextTrainer(
        model=kwargs.pop("model", None) or build_model(case),
        args=args,
        train_dataset=datasets.Dataset.from_list(rows) if isinstance(rows, list) else rows,
        longctx_config=LongContextConfig(**settings),
        **kwargs,
    )


def train_on_rank(
    case: ModelCase, rows: list[dict[str, list[int]]], config: dict[str, Any], arguments: dict[str, Any]
) -> tuple[list[float], list[str], dict[str, torch.Tensor]]:
    """Trains on this rank; returns losses, layouts and final weights."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(case, rows, folder, config, arguments)
        recorder = LossRecorder()
        recorder.attach(trainer)
        trainer.train()
    weights = {name: whole(p.detach()).clone() for name, p in trainer.model.named_parameters()}
    return recorder.losses, recorder.layouts, weights


def plain_training(case: ModelCase, rows: list[dict[str, list[int]]], num_steps: int = 20) -> tuple[list[float], dict[str, Any]]:
    """Trains in a plain loop: HF logits of each row, cross-entropy summed in fp64, AdamW, clipping, linear warm-up."""
    # repr, because settings of adapters contain lists, which cannot be keys
    key = repr((case, rows, num_steps))
    if key not in _KNOWN_TRAININGS:
        _KNOWN_TRAININGS[key] = plain_training_with(lambda model, step: None, case, rows, num_steps)
    losses, weights = _KNOWN_TRAININGS[key]
    return list(losses), dict(weights)


def plain_training_with(
    before_step: Callable[[torch.nn.Module, int], torch.optim.Optimizer | None],
    case: ModelCase,
    rows: list[dict[str, list[int]]],
    num_steps: int,
) -> tuple[list[float], dict[str, Any]]:
    """Trains like `plain_training`, and calls `before_step` before each step with the model and the number of steps done.

    If that returns an optimizer, this one trains from then on.
    """
    model = build_model(case)
    # group parameters as the trainer does: no weight decay for norms and biases
    decay = [p for name, p in model.named_parameters() if p.dim() > 1 or "magnitude" in name]
    rest = [p for name, p in model.named_parameters() if p.dim() <= 1 and "magnitude" not in name]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=5, num_training_steps=num_steps)
    lengths = torch.tensor([len(row["input_ids"]) for row in rows]).numpy()
    sampler = LengthAwareSampler(lengths, sequences_per_step=8, seed=3)
    losses: list[float] = []
    epoch = 0
    while len(losses) < num_steps:
        sampler.set_epoch(epoch)
        for batch in sampler:
            optimizer = before_step(model, len(losses)) or optimizer
            losses.append(_plain_step(model, [rows[i] for i in batch], optimizer, len(losses)))
            scheduler.step()
            if len(losses) == num_steps:
                break
        epoch += 1
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def _plain_step(model: torch.nn.Module, rows: Rows, optimizer: torch.optim.Optimizer, step: int) -> float:
    count = sum(label != -100 for row in rows for label in row["labels"][1:])
    total = 0.0
    for number, row in enumerate(rows):
        # the seed is that of `training_arguments`
        with dropping(model, number, step, seed=3):
            logits = model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0, :-1]
        labels = torch.tensor(row["labels"][1:], dtype=torch.int64)
        loss = F.cross_entropy(logits.double(), labels, ignore_index=-100, reduction="sum") / count
        loss.backward()
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    # all gradients, as the trainer does, not those of the optimizer alone
    model.zero_grad()
    return total


SKEWED = [61, *(random.Random(0).choice([3, 5, 8, 13, 21, 34]) for _ in range(39))]


def start(rows: list[dict[str, list[int]]], config: dict[str, Any], arguments: dict[str, Any], only_rank: int | None) -> str:
    """The message with which this rank refuses to start; the settings apply to `only_rank` alone (None: to all ranks)."""
    import torch.distributed as dist

    if only_rank is not None and dist.get_rank() != only_rank:
        config, arguments = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            make_trainer(ModelCase(dtype=torch.float32), rows, folder, config, arguments)
        except ValueError as error:
            return str(error)
    return ""


def start_under(rows: list[dict[str, list[int]]], variable: str, value: str) -> str:
    """The message with which a run is refused if a launcher set this environment variable."""
    import os

    before = os.environ.get(variable)
    os.environ[variable] = value
    try:
        return start(rows, {}, {}, None)
    finally:
        os.environ.pop(variable)
        if before is not None:
            os.environ[variable] = before


NUM_STEPS = 12


ARGUMENTS = {"max_steps": NUM_STEPS, "logging_steps": 1}


def train_with_norms(
    case: ModelCase, rows: list[dict[str, list[int]]], folder: str, config: dict[str, Any], arguments: dict[str, Any]
) -> tuple[list[float], list[Any], dict[str, torch.Tensor]]:
    """Trains on this rank; returns losses, logged gradient norms and whole final weights. `resume` names a checkpoint."""
    resume = arguments.pop("resume", None)
    trainer = make_trainer(case, rows, folder, config, {**ARGUMENTS, **arguments})
    recorder = LossRecorder()
    recorder.attach(trainer)
    trainer.train(resume_from_checkpoint=resume)
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return recorder.losses, norms, {name: whole(p.detach()).clone() for name, p in trainer.model.named_parameters()}


def problems_at_start(
    model: Any, processing_class: Any = None, num_ranks: int = 1, degrees: tuple[int, ...] = (1,), **config: Any
) -> Any:
    """Reasons why a run with this model, tokenizer, number of ranks and configuration cannot start."""
    return setup_problems(ModelFacts.of(model), processing_class, LongContextConfig(**config), num_ranks, degrees)
