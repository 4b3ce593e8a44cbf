"""Losses of users, smoothed labels and weights of tokens train as in stock transformers through every door, or are refused."""

from __future__ import annotations

import tempfile
from typing import Any

import datasets
import pytest
import torch
import torch.nn.functional as F
from helpers.models.reference import random_rows, reference_step, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.token_losses import focal, with_weights
from helpers.ranks.rank_steps import whole
from helpers.trainers import trainer_runs
from helpers.trainers.stock_runs import make_stock_trainer
from helpers.trainers.trainer_runs import PLAIN_DESCENT, make_trainer
from torch import nn
from transformers import Trainer
from transformers.trainer_pt_utils import LabelSmoother

from hf_longctx import LongContextCallback, LongContextConfig, TokenLoss
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.hf.self_test import reduced_copy
from hf_longctx.hf.start.losses import token_loss_problems
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.plan.memory.byte_model import ByteModel

CASE = ModelCase(promoted=True)
LENGTHS = [61, 13, 50, 5, 44, 8, 21, 34]
ARGUMENTS = {**PLAIN_DESCENT, "max_steps": 3, "logging_steps": 1, "train_sampling_strategy": "sequential"}
QUIET = {"report_steps": False, "timeline_steps": 0}
_SPEC = model_spec(build_model(CASE))
# a device that holds everything of 33 tokens, so that longer chunks are recomputed in tiles
_SMALL_GIB = (ByteModel(_SPEC).states("replicated", 1) + ByteModel(_SPEC).kept_bytes(33)) / 2**30
SETTINGS = {"packs": {"tokens_per_rank": 64}, "tiles": {"tokens_per_rank": 64, "tile_tokens": 8, "device_gib": _SMALL_GIB}}


def focal_of_logits(
    logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any, shift_labels: Any = None, **_: Any
) -> Any:
    """Focal loss as users write it for `model.loss_function`."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=-100)[..., 1:]
    return focal(logits.view(-1, vocab_size), shift_labels.reshape(-1)).sum() / num_items_in_batch


def own_shift(logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any, **_: Any) -> Any:
    """Focal loss that shifts labels itself, so that it would shift those of a plan a second time."""
    return focal_of_logits(logits, labels, vocab_size, num_items_in_batch)


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: whole(p.detach()).clone() for name, p in trainer.model.named_parameters()}


def train(door: str, rows: Any, config: dict[str, Any], arguments: dict[str, Any], loss: str = "") -> dict[str, torch.Tensor]:
    """Weights after a training through a door, with focal loss if `loss` says so."""
    token_loss: TokenLoss | None = focal if loss else None
    with tempfile.TemporaryDirectory() as folder:
        if door == "trainer":
            settings = {**QUIET, "self_test": True, **config}
            trainer: Any = make_trainer(CASE, rows, folder, settings, {**ARGUMENTS, **arguments}, token_loss=token_loss)
        else:
            callback = LongContextCallback(LongContextConfig(**{**QUIET, **config}))
            callbacks = [callback] if door == "alone" else []
            trainer = make_stock_trainer(CASE, rows, folder, {**ARGUMENTS, **arguments}, callbacks=callbacks)
            if loss:
                trainer.model.loss_function = focal_of_logits
            if door == "attached":
                callback.attach(trainer, token_loss=token_loss)
        num_tiled = []
        if "device_gib" in config:
            original = trainer.longctx_run.report.step_done
            trainer.longctx_run.report.step_done = lambda plan, result: (num_tiled.append(tiled(plan)), original(plan, result))
        trainer.train()
    assert all(num_tiled), num_tiled
    return weights_of(trainer)


def tiled(plan: StepPlan) -> int:
    """Number of chunks whose loss is computed in tiles."""
    stages = [stage for each in plan.micro_batches for group in each.groups for stage in group.stages]
    return sum(policy.tile_tokens > 0 for stage in stages for policy in stage.activations)


def check(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-12) -> None:
    errors = {name: relative_error(found[name], weight) for name, weight in expected.items()}
    assert max(errors.values()) <= tolerance, errors


@pytest.fixture(scope="module")
def rows() -> list[dict[str, list[int]]]:
    return random_rows(LENGTHS)


@pytest.fixture(scope="module")
def stock_focal(ranks, rows) -> dict[str, torch.Tensor]:
    return ranks(2).run(train, "stock", rows, {}, {}, "focal")[0]


@pytest.mark.wide
@pytest.mark.parametrize("door,settings", [("trainer", "packs"), ("trainer", "tiles"), ("attached", "packs")])
def test_a_focal_loss_trains_as_in_stock_transformers(ranks, rows, stock_focal, door: str, settings: str) -> None:
    for found in ranks(2).run(train, door, rows, SETTINGS[settings], {}, "focal"):
        check(found, stock_focal)


@pytest.mark.wide
def test_the_callback_alone_obeys_a_loss_of_whole_logits(ranks, rows, stock_focal) -> None:
    for found in ranks(2).run(train, "alone", rows, {"tokens_per_rank": 300, "tile_tokens": 0}, {}, "focal"):
        check(found, stock_focal)


@pytest.mark.wide
def test_focal_loss_is_not_cross_entropy(ranks, rows, stock_focal) -> None:
    (found, _) = ranks(2).run(train, "trainer", rows, SETTINGS["packs"], {})
    with pytest.raises(AssertionError):
        check(found, stock_focal, 1e-5)


@pytest.mark.wide("trainer-tiles")
@pytest.mark.parametrize("door,settings", [("trainer", "tiles"), ("attached", "packs")])
def test_smoothed_labels_train_as_in_stock_transformers(ranks, rows, door: str, settings: str) -> None:
    smoothing = {"label_smoothing_factor": 0.1}
    expected = ranks(2).run(train, "stock", rows, {}, smoothing)[0]
    # transformers adds the log-probabilities of the vocabulary in fp32
    for found in ranks(2).run(train, door, rows, SETTINGS[settings], smoothing):
        check(found, expected, 1e-6)


def weighted_training(rows: Any, config: dict[str, Any], is_stream: bool) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Final weights, and the metrics of an evaluation before the training."""
    dataset = datasets.Dataset.from_list(rows)
    train_dataset = dataset.to_iterable_dataset() if is_stream else dataset
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(CASE, train_dataset, folder, {**QUIET, **config}, ARGUMENTS, eval_dataset=dataset)
        metrics = trainer.evaluate()
        trainer.train()
    return weights_of(trainer), metrics


def cut(rows: Any, limit: int) -> Any:
    """The rows as documents of at most `limit` tokens."""
    return [
        {name: values[start : start + limit] for name, values in row.items()}
        for row in rows
        for start in range(0, len(row["input_ids"]), limit)
    ]


KINDS = {
    "map-style": (SETTINGS["packs"], False, LENGTHS, 100),
    "tiles": (SETTINGS["tiles"], False, LENGTHS, 100),
    "stream": ({**SETTINGS["packs"], "lookahead_batches": 2}, True, LENGTHS, 100),
    # a step takes all eight documents
    "split": ({**SETTINGS["packs"], "max_length": 20, "long_sequences": "split"}, False, [50, 31, 20, 15, 3], 20),
}


@pytest.mark.daily("stream")
@pytest.mark.parametrize("name", KINDS)
def test_weights_of_tokens_train_as_a_plain_loop(ranks, name: str) -> None:
    config, is_stream, lengths, limit = KINDS[name]
    given = with_weights(random_rows(lengths))
    rows = cut(given, limit)
    assert len(rows) == 8
    model, losses = build_model(CASE), []
    for _ in range(3):
        loss, gradients = reference_step(model, rows)
        losses.append(loss)
        with torch.no_grad():
            for weight, gradient in gradients.items():
                model.get_parameter(weight).sub_(1e-2 * gradient)
    for found, metrics in ranks(2).run(weighted_training, given, config, is_stream):
        check(found, {weight: p.detach() for weight, p in model.named_parameters()})
        assert metrics["eval_loss"] == pytest.approx(losses[0], rel=1e-12)
        assert "eval_perplexity" not in metrics


def of_many(logits: Any, labels: Any) -> Any:
    """A loss that depends on the number of tokens beside a token, which the probe's few tokens do not show."""
    losses = F.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    return losses * max(1.0, len(losses) / 8)


def test_the_self_test_trains_the_loss_of_the_run(rows, tmp_path) -> None:
    assert token_loss_problems(of_many, 64, torch.device("cpu")) == []
    with pytest.raises(ValueError, match="parity self-test failed before step 1"):
        make_trainer(CASE, rows, str(tmp_path), {**QUIET, "self_test": True}, ARGUMENTS, token_loss=of_many)


@pytest.mark.wide
def test_a_loss_that_needs_all_token_ids_is_tested_as_cross_entropy(rows, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(reduced_copy, "NUM_TOKEN_IDS", 16)
    weights = torch.linspace(1, 2, build_model(CASE).config.vocab_size, dtype=torch.float64)

    def by_class(logits: Any, labels: Any) -> Any:
        return F.cross_entropy(logits, labels, weights.to(logits.dtype), ignore_index=-100, reduction="none")

    run = make_trainer(CASE, rows, str(tmp_path), {**QUIET, "self_test": True}, ARGUMENTS, token_loss=by_class).longctx_run
    assert "loss of a token: cross-entropy, since token_loss needs all token ids" in run.report.opening
    run.close()


@pytest.mark.daily("True")
@pytest.mark.parametrize("has_own", [False, True])
def test_a_forward_with_a_loss_of_its_own_is_refused(rows, tmp_path, caplog, monkeypatch, has_own: bool) -> None:
    model = build_model(CASE)
    original = model.forward

    def with_penalty(*args: Any, **keywords: Any) -> Any:
        output = original(*args, **keywords)
        if output.loss is not None and has_own:
            output.loss = output.loss + 1e-3 * output.logits.float().logsumexp(-1).square().mean()
        return output

    model.forward = with_penalty
    monkeypatch.setattr(trainer_runs, "build_model", lambda case: model)
    with caplog.at_level("WARNING"):
        try:
            make_trainer(CASE, rows, str(tmp_path), {**QUIET, "self_test": True}, ARGUMENTS).longctx_run.close()
            message = ""
        except ValueError as error:
            message = str(error)
    assert ("with_penalty and returns a loss of" in message and "token_loss=" in message) == has_own
    # equal losses need no warning
    assert bool(message) == has_own and "never read" not in caplog.text


@pytest.mark.parametrize("kind", ["forward", "hook", "neither", "token_loss"])
def test_a_forward_that_may_return_another_loss_is_told(rows, tmp_path, caplog, monkeypatch, kind: str) -> None:
    model = build_model(CASE)
    original = model.forward

    def with_focal(*args: Any, **keywords: Any) -> Any:
        return original(*args, **keywords)

    if kind in ("forward", "token_loss"):
        model.forward = with_focal
    elif kind == "hook":
        model.register_forward_hook(lambda module, args, output: None)
    monkeypatch.setattr(trainer_runs, "build_model", lambda case: model)
    with caplog.at_level("WARNING"):
        make_trainer(CASE, rows, str(tmp_path), QUIET, ARGUMENTS, token_loss=focal if kind == "token_loss" else None)
    assert ("never read a loss that it returns" in caplog.text) == (kind in ("forward", "hook"))


def mean_of_tokens(logits: Any, labels: Any) -> Any:
    losses = F.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    return losses / losses.mean()


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, logits: Any, labels: Any) -> Any:
        return focal(self.scale * logits, labels)


LOSSES: dict[str, tuple[Any, str]] = {
    "no function": (0.5, "token_loss is 0.5; pass a function"),
    "one value": (lambda logits, labels: focal(logits, labels).sum(), "return one loss per token"),
    "detached": (lambda logits, labels: focal(logits.detach(), labels), "has no gradient"),
    "mean": (mean_of_tokens, "so it would depend on the plan"),
    "nan": (lambda logits, labels: focal(logits, labels) + (labels < 0) / (labels >= 0), "is not finite"),
    "no label": (lambda logits, labels: -logits.log_softmax(1).gather(1, labels[:, None])[:, 0], "failed on a probe"),
    "own weights": (Tempered(), "has weights of its own"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_plans_cannot_train_is_refused_by_a_probe(name: str) -> None:
    token_loss, message = LOSSES[name]
    (problem,) = token_loss_problems(token_loss, 64, torch.device("cpu"))
    assert message in problem


def test_losses_of_single_tokens_pass_the_probe() -> None:
    for loss in (focal, Tempered().requires_grad_(False)):
        assert token_loss_problems(loss, 64, torch.device("cpu")) == []


def refusal(rows: Any, door: str, what: str) -> str:
    """The message with which this rank refuses a loss at a door."""
    config = LongContextConfig(**QUIET, tokens_per_rank=300)
    arguments = {**ARGUMENTS, "label_smoothing_factor": 0.1 if what == "smoothing too" else 0.0}
    is_other_rank = torch.distributed.get_rank() == 1
    given = {"smoothing too": focal, "one rank": focal if is_other_rank else None}.get(what)
    with tempfile.TemporaryDirectory() as folder:
        callback = LongContextCallback(config)
        try:
            if door == "trainer":
                trainer: Any = make_trainer(CASE, rows, folder, QUIET, arguments, token_loss=given)
            else:
                callbacks = [callback] if door == "alone" else []
                trainer = make_stock_trainer(CASE, rows, folder, arguments, callbacks=callbacks)
                if what in ("focal", "own shift"):
                    trainer.model.loss_function = {"focal": focal_of_logits, "own shift": own_shift}[what]
                if door == "attached":
                    callback.attach(trainer, token_loss=given)
            # set after the start
            if what == "function":
                trainer.compute_loss_func = focal_of_logits
            elif what == "function of a class":
                trainer.__class__ = type("Mine", (type(trainer),), {"compute_loss_func": property(lambda self: focal_of_logits)})
            elif what == "smoother":
                trainer.label_smoother = LabelSmoother(0.1)
            elif what == "collator":
                trainer.data_collator = lambda rows: rows
            elif what == "method":
                trainer.compute_loss = lambda *_, **__: None
            elif what == "model" and is_other_rank:
                trainer.model.loss_function = focal_of_logits
            trainer.train()
        except ValueError as error:
            return str(error)
        finally:
            callback.detach()
    return ""


REFUSED = {
    ("trainer", "function"): "compute_loss_func was set on the trainer, but plans would never call it; pass the loss of a token",
    ("trainer", "function of a class"): "compute_loss_func was set on the trainer, but plans would never call it",
    ("trainer", "method"): "compute_loss was replaced on the trainer instance",
    ("trainer", "smoother"): "label_smoother was set on the trainer (epsilon 0.1), but plans train cross-entropy",
    ("trainer", "collator"): "data_collator was set on the trainer, but plans make batches themselves",
    ("trainer", "model"): "the model's loss_function computes test_losses.focal_of_logits, but plans train the token mean",
    ("trainer", "smoothing too"): "label_smoothing_factor=0.1 has no effect beside token_loss",
    ("trainer", "one rank"): "token_loss differs between ranks",
    ("attached", "focal"): "the model's loss_function computes test_losses.focal_of_logits",
    ("alone", "focal"): "but a loss in tiles would never call it; set tile_tokens=0",
    ("alone", "own shift"): "do not add up to that on the whole row",
}


@pytest.mark.wide("trainer-function", "trainer-function of a class", "trainer-method", "trainer-model", "trainer-one rank")
@pytest.mark.parametrize("door,what", REFUSED)
def test_a_loss_that_plans_would_not_train_is_refused_on_every_rank(ranks, rows, door: str, what: str) -> None:
    for message in ranks(2).run(refusal, rows, door, what):
        assert REFUSED[door, what] in message
