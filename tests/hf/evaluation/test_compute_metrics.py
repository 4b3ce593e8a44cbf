"""`compute_metrics` of a language model: a user's metrics under any plan are those of a stock trainer that reads whole logits."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase
from helpers.models.token_losses import focal
from helpers.trainers.stock_runs import PaddingCollator, make_stock_trainer
from helpers.trainers.trainer_runs import PLAIN_DESCENT, make_trainer
from transformers import EvalPrediction

from hf_longctx.hf.rules.arguments import likeliest_form
from hf_longctx.hf.trainer import predictions

CASE = ModelCase(promoted=True)
# a row without labels, and one of a single token
ROWS = random_rows([61, 13, 40, 5, 1, 34], seed=5, masked=(3,))
# settings of plans, number of ranks
PLANS: dict[str, tuple[dict[str, Any], int]] = {
    "packs": ({"tokens_per_rank": 64}, 1),
    "slices in tiles": ({"tokens_per_rank": 64, "tile_tokens": 8, "device_gib": 1e-3}, 1),
    "groups": ({"tokens_per_rank": 32, "solver": "static", "static_degree": 2}, 2),
    "different rows on each rank": ({"tokens_per_rank": 64}, 2),
    "stages": ({"tokens_per_rank": 96, "stages": 2}, 2),
    "shards": ({"tokens_per_rank": 64, "parameters": "sharded"}, 2),
}
INCLUDED = {"include_for_metrics": ["inputs"], "per_device_eval_batch_size": 2}


def metrics(found: EvalPrediction) -> dict[str, Any]:
    """Metrics that depend on every label token, its place, and the order of the rows."""
    arrays = found.predictions
    if isinstance(arrays, dict):
        arrays = tuple(arrays[name] for name in ("likeliest", "log_prob", "entropy"))
    likeliest, log_prob, entropy = (each[:, :-1] for each in arrays)
    labels, inputs = found.label_ids[:, 1:], found.inputs
    is_label = labels != -100
    places = np.outer(np.arange(1, len(labels) + 1), np.arange(1, labels.shape[1] + 1)) * is_label
    # stock collators pad ids within a batch
    return {
        "accuracy": np.float64(((likeliest == labels) & is_label).sum() / is_label.sum()),
        "log_prob": (log_prob * places).sum(),
        "eval_entropy": float((entropy * places).sum()),
        "ids": float((inputs[:, 1:] * places).sum()),
        "shape": float(labels.shape[0] * 1000 + labels.shape[1]),
    }


def of_logits(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Likeliest tokens, log-probabilities and entropies, made of whole logits."""
    log_p = logits.double().log_softmax(-1)
    next_labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
    at_label = log_p.gather(-1, next_labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return logits.argmax(-1), at_label, -(log_p.exp() * log_p).sum(-1)


def stock() -> dict[str, float]:
    """Metrics of a stock trainer on one process."""
    with tempfile.TemporaryDirectory() as folder:
        more = {"compute_metrics": metrics, "preprocess_logits_for_metrics": of_logits, "data_collator": PaddingCollator()}
        trainer = make_stock_trainer(CASE, ROWS, folder, {**INCLUDED, "per_device_eval_batch_size": 6}, **more)
        return trainer.evaluate(trainer.train_dataset)


def evaluate(config: dict[str, Any], loss: Any = None, **arguments: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Metrics of an evaluation, and of a prediction."""
    more = {"token_loss": focal} if loss else {}
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(CASE, ROWS, folder, config, {**INCLUDED, **arguments}, compute_metrics=metrics, **more)
        dataset = datasets.Dataset.from_list(ROWS)
        found = trainer.predict(dataset)
        assert len(found.predictions) == len(ROWS)
        return trainer.evaluate(dataset), found.metrics


@pytest.mark.daily("packs")
@pytest.mark.parametrize("plan", PLANS)
def test_a_users_metrics_are_those_of_a_stock_trainer(ranks, plan: str) -> None:
    config, num_ranks = PLANS[plan]
    expected = stock()
    for evaluated, predicted in ranks(num_ranks).run(evaluate, config):
        for name in ("accuracy", "log_prob", "entropy", "ids", "shape"):
            assert evaluated[f"eval_{name}"] == pytest.approx(expected[f"eval_{name}"], rel=1e-10), name
            assert type(evaluated[f"eval_{name}"]) is float
        assert predicted["test_accuracy"] == evaluated["eval_accuracy"]
        assert evaluated["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
        assert 0 < evaluated["eval_accuracy"] == pytest.approx(evaluated["eval_mean_token_accuracy"])


@pytest.mark.wide
def test_another_loss_leaves_the_metrics_and_no_predictions_leave_the_loss_alone() -> None:
    evaluated, _ = evaluate({"tokens_per_rank": 64}, "focal")
    assert evaluated["eval_log_prob"] == pytest.approx(stock()["eval_log_prob"], rel=1e-10)
    evaluated, _ = evaluate({"tokens_per_rank": 64}, prediction_loss_only=True)
    assert "eval_accuracy" not in evaluated and evaluated["eval_entropy"] < 10


def test_rows_that_are_cut_are_put_together_again(tmp_path: Path) -> None:
    seen: list[EvalPrediction] = []

    def keep(found: EvalPrediction) -> dict[str, float]:
        seen.append(found)
        return {}

    for long_sequences in ("truncate", "split"):
        config = {"max_length": 20, "long_sequences": long_sequences}
        make_trainer(CASE, ROWS, str(tmp_path), config, INCLUDED, compute_metrics=keep).evaluate(datasets.Dataset.from_list(ROWS))
    short, split = seen
    assert short.label_ids.shape == (6, 20) and split.label_ids.shape == (6, 61)
    for number, row in enumerate(ROWS):
        labels = np.array(row["labels"])
        assert short.label_ids[number][: len(labels)].tolist() == labels[:20].tolist()
        assert split.inputs[number][: len(labels)].tolist() == row["input_ids"]
        # the first token of a part is predicted from nothing
        is_scored = np.append((labels[1:] != -100) & (np.arange(1, len(labels)) % 20 > 0), False)
        assert ((split.predictions["log_prob"][number] != 0) == np.pad(is_scored, (0, 61 - len(labels)))).all()
        assert ((split.predictions["likeliest"][number] != -100) >= np.pad(is_scored, (0, 61 - len(labels)))).all()
    np.testing.assert_array_equal(split.predictions["log_prob"][:, :19], short.predictions["log_prob"][:, :19])


@pytest.mark.wide
def test_the_best_checkpoint_is_chosen_by_a_users_metric(tmp_path: Path) -> None:
    values = iter([0.3, 0.9, 0.5])
    arguments = {**PLAIN_DESCENT, "max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"}
    arguments |= {"save_steps": 1, "load_best_model_at_end": True, "metric_for_best_model": "mine", "greater_is_better": True}
    trainer = make_trainer(
        CASE, ROWS, str(tmp_path), None, arguments, eval_dataset=ROWS, compute_metrics=lambda found: {"mine": next(values)}
    )
    trainer.train()
    assert trainer.state.best_metric == 0.9 and trainer.state.best_model_checkpoint.endswith("checkpoint-2")


@pytest.mark.parametrize(
    "arguments,more,why",
    [
        (
            {"include_for_metrics": ["loss"]},
            {"compute_metrics": metrics},
            r"predictions\['log_prob'\] has the loss",
        ),
        (
            {"batch_eval_metrics": True},
            {"compute_metrics": metrics},
            "batch_eval_metrics=True is not supported with compute_metrics",
        ),
        (
            {"eval_do_concat_batches": False},
            {"compute_metrics": metrics},
            "eval_do_concat_batches=False is not supported with compute_metrics",
        ),
        ({}, {"preprocess_logits_for_metrics": of_logits}, "compute_metrics gets the likeliest token"),
    ],
)
def test_what_needs_logits_or_batches_is_refused(tmp_path: Path, arguments: Any, more: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make_trainer(CASE, ROWS, str(tmp_path), None, arguments, **more)


def _likeliest(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    # scripts for models that return more than logits have this
    logits = logits[0] if isinstance(logits, tuple) else logits
    return logits.argmax(dim=-1)


def _with_labels(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.argmax(logits, dim=-1), labels


def _accuracies(found: EvalPrediction) -> dict[str, float]:
    tokens = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
    is_right, is_label = tokens[:, :-1] == found.label_ids[:, 1:], found.label_ids[:, 1:] != -100
    # scripts often forget that some tokens have no label
    return {"mean": float(is_right.mean()), "of_labels": float(is_right[is_label].mean())}


@pytest.mark.daily("packs-_with_labels")
@pytest.mark.parametrize("reduce", [_likeliest, _with_labels])
@pytest.mark.parametrize("plan", ["packs", "different rows on each rank"])
def test_likeliest_tokens_of_a_users_function_are_those_of_a_stock_trainer(ranks, tmp_path: Path, reduce: Any, plan: str) -> None:
    more = {"compute_metrics": _accuracies, "preprocess_logits_for_metrics": reduce}
    trainer = make_stock_trainer(
        CASE, ROWS, str(tmp_path), {"per_device_eval_batch_size": 6}, data_collator=PaddingCollator(), **more
    )
    expected = trainer.evaluate(trainer.train_dataset)
    config, num_ranks = PLANS[plan]
    for found in ranks(num_ranks).run(_reduced, config, reduce):
        for name in ("eval_mean", "eval_of_labels"):
            assert found[name] == pytest.approx(expected[name], rel=1e-12)


def _reduced(config: dict[str, Any], reduce: Any) -> dict[str, float]:
    more = {"compute_metrics": _accuracies, "preprocess_logits_for_metrics": reduce}
    with tempfile.TemporaryDirectory() as folder:
        return make_trainer(CASE, ROWS, folder, config, **more).evaluate(datasets.Dataset.from_list(ROWS))


@pytest.mark.parametrize(
    "function",
    [
        lambda logits, labels: logits.argmin(-1),
        lambda logits, labels: logits[..., :-1, :].argmax(-1),
        lambda logits, labels: logits.argmax(-1).float(),
        lambda logits, labels: (logits.argmax(-1), labels * 2),
        lambda logits, labels: torch.where(labels == -100, labels, logits.argmax(-1)),
        lambda logits, labels: logits,
        lambda logits: logits.argmax(-1),
        None,
    ],
)
def test_other_functions_of_logits_are_not_taken_for_the_likeliest_tokens(function: Any) -> None:
    assert likeliest_form(function) == ""


@pytest.mark.daily("<lambda>1")
@pytest.mark.parametrize(
    "compute", [lambda found: {"x": found.predictions.argmax(-1)}, lambda found: {"x": np.argmax(found.predictions, axis=-1)}]
)
def test_metrics_that_expect_logits_are_told_what_there_is(tmp_path: Path, compute: Any) -> None:
    trainer = make_trainer(CASE, ROWS, str(tmp_path), None, None, compute_metrics=compute, eval_dataset=ROWS)
    with pytest.raises(
        ValueError, match=r"compute_metrics raised \w+: .*; logits never exist .* dict of arrays .*argmax\(dim=-1\)"
    ):
        trainer.evaluate()


def test_a_function_of_logits_that_is_set_on_a_trainer_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(CASE, ROWS, str(tmp_path), None, None, compute_metrics=metrics, eval_dataset=ROWS)
    trainer.preprocess_logits_for_metrics = of_logits
    with pytest.raises(ValueError, match="preprocess_logits_for_metrics was set on the trainer"):
        trainer.evaluate()


def test_arrays_that_would_not_fit_are_refused_before_the_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(CASE, ROWS, str(tmp_path), None, None, compute_metrics=metrics)
    monkeypatch.setattr(predictions, "host_bytes", lambda: (6 * 61 * 40 - 1, 2**30))
    with pytest.raises(ValueError, match=r"arrays of 6 rows by 61 tokens, padded as a stock trainer pads them"):
        trainer.evaluate(datasets.Dataset.from_list(ROWS))
