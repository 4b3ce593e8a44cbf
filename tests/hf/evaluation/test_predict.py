"""Accuracy, entropy and log-probabilities of every row under plans are those of plain transformers' whole logits."""

from __future__ import annotations

import tempfile
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.token_losses import focal, with_weights
from helpers.trainers.trainer_runs import make_trainer

CASE = ModelCase(promoted=True)
# a row without labels, and one of a single token
ROWS = random_rows([61, 13, 40, 5, 1, 34], seed=5, masked=(3,))
NAMES = ("log_prob", "num_tokens", "num_right", "entropy")
# settings of plans, number of ranks
SETTINGS: dict[str, tuple[dict[str, Any], int]] = {
    "packs": ({"tokens_per_rank": 64}, 1),
    "tiles": ({"tokens_per_rank": 64, "tile_tokens": 8, "device_gib": 1e-3}, 1),
    "groups": ({"tokens_per_rank": 32, "solver": "static", "static_degree": 2}, 2),
    "stages": ({"tokens_per_rank": 96, "stages": 2}, 2),
    "shards": ({"tokens_per_rank": 64, "parameters": "sharded"}, 2),
}


def predict(
    rows: Any, config: dict[str, Any], limits: dict[str, Any], loss: str = "", case: ModelCase = CASE
) -> tuple[Any, dict[str, float], Any]:
    """Predictions and metrics of `predict` for rows, and the metrics of `evaluate`."""
    more = {"token_loss": focal} if loss else {}
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(case, ROWS, folder, {**config, **limits}, {"per_device_eval_batch_size": 2}, **more)
        found = trainer.predict(datasets.Dataset.from_list(rows))
        return found.predictions, found.metrics, trainer.evaluate(datasets.Dataset.from_list(rows))


@torch.no_grad()
def expected(rows: Any, limit: int | None = None, case: ModelCase = CASE) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Sums of each row, and means over all tokens that are learnt, from the whole logits of each document."""
    model, by_row, tokens = build_model(case).eval(), [], []
    for row in rows:
        own = []
        ids, labels = row["input_ids"][:limit], row["labels"][:limit]
        probabilities = F.softmax(model(input_ids=torch.tensor([ids])).logits[0], dim=-1)
        for place, label in enumerate(labels[1:]):
            if label != -100:
                p = probabilities[place]
                entropy = -sum(float(each) * float(each.log()) for each in p)
                own.append([float(p[label].log()), 1, int(p.argmax()) == label, entropy])
                tokens.append([*own[-1], row.get("loss_weights", [1.0] * len(labels))[place + 1]])
        by_row.append(dict(zip(NAMES, map(sum, zip(*own, strict=True)) if own else [0] * 4, strict=True)))
    learnt = [token for token in tokens if token[4]]
    weight = sum(token[4] for token in learnt)
    metrics = {
        "loss": -sum(token[0] * token[4] for token in learnt) / weight,
        "mean_token_accuracy": sum(token[2] for token in learnt) / len(learnt),
        "entropy": sum(token[3] for token in learnt) / len(learnt),
    }
    return by_row, metrics


def check(
    found: tuple[Any, dict[str, float], dict[str, float]],
    rows: Any,
    limit: int | None = None,
    loss: str = "",
    case: ModelCase = CASE,
) -> None:
    predictions, metrics, evaluated = found
    by_row, means = expected(rows, limit, case)
    assert predictions.dtype.names == NAMES and len(predictions) == len(rows)
    for name in NAMES:
        np.testing.assert_allclose(predictions[name], [row[name] for row in by_row], rtol=1e-11, atol=1e-11, err_msg=name)
    assert predictions["num_right"].sum() > 0
    for name in ("mean_token_accuracy", "entropy", *([] if loss else ["loss"])):
        assert metrics[f"test_{name}"] == pytest.approx(means[name], rel=1e-11)
        if not loss:
            assert evaluated[f"eval_{name}"] == pytest.approx(means[name], rel=1e-11)
    assert metrics["test_loss"] == pytest.approx(evaluated["eval_loss"], rel=1e-12)
    has_weights = "loss_weights" in rows[0]
    assert ("test_perplexity" in metrics) == (not loss and not has_weights)


@pytest.mark.daily("packs")
@pytest.mark.parametrize("name", SETTINGS)
def test_every_row_is_scored_as_by_its_whole_logits(ranks, name: str) -> None:
    config, num_ranks = SETTINGS[name]
    for found in ranks(num_ranks).run(predict, ROWS, config, {}):
        check(found, ROWS)


@pytest.mark.quick
@pytest.mark.parametrize("family", ["granite", "gemma2"])
def test_changed_logits_score_every_row(family: str) -> None:
    case = ModelCase(family, promoted=True)
    # capped scores of attention need more room
    room = {"device_gib": 1e-3 if family == "granite" else 1.3e-3}
    check(predict(ROWS, SETTINGS["tiles"][0], room, case=case), ROWS, case=case)


def test_weights_count_in_the_loss_and_a_row_that_is_cut_is_scored_up_to_there() -> None:
    rows = with_weights(ROWS)
    check(predict(rows, SETTINGS["packs"][0], {}), rows)
    check(predict(ROWS, SETTINGS["packs"][0], {"max_length": 20, "long_sequences": "truncate"}), ROWS, limit=20)


def test_a_loss_of_the_users_own_is_the_loss_beside_scores_by_cross_entropy() -> None:
    found = predict(ROWS, SETTINGS["packs"][0], {}, "focal")
    check(found, ROWS, loss="focal")
    assert found[1]["test_loss"] != pytest.approx(expected(ROWS)[1]["loss"], rel=1e-3)
    for name in ("mean_token_accuracy", "entropy"):
        # counted while the loss is computed, without a second forward
        assert found[2][f"eval_{name}"] == pytest.approx(expected(ROWS)[1][name], rel=1e-11)
