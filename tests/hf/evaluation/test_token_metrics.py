"""Token accuracy and entropy in the log of a training are those of plain transformers' whole logits, under any plan."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.models.classifiers import HEADS, classifier_rows
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.token_losses import focal, with_weights
from helpers.trainers.trainer_runs import PLAIN_DESCENT, make_trainer

CASE = ModelCase(promoted=True)
LORA = (("r", 2), ("target_modules", ["q_proj", "v_proj", "down_proj"]))
# a row without labels, and one of a single token
ROWS = random_rows([61, 13, 40, 5, 1, 34], seed=5, masked=(3,))
NUM_STEPS, RATE = 3, 0.5
NAMES = ("mean_token_accuracy", "entropy")
# settings of plans, number of ranks, and the adapters of the model
SETTINGS: dict[str, tuple[dict[str, Any], int, Any]] = {
    "packs": ({"tokens_per_rank": 64}, 1, ()),
    "slices in tiles": ({"tokens_per_rank": 64, "tile_tokens": 8, "device_gib": 1e-3}, 1, ()),
    "groups": ({"tokens_per_rank": 32, "solver": "static", "static_degree": 2}, 2, ()),
    "rings": ({"tokens_per_rank": 32, "solver": "static", "static_degree": 2, "method": "ring"}, 2, ()),
    "stages": ({"tokens_per_rank": 96, "stages": 2}, 2, ()),
    "stages that lend": ({"tokens_per_rank": 96, "stages": 2, "lend_stages": True}, 2, LORA),
    "shards": ({"tokens_per_rank": 64, "parameters": "sharded"}, 2, ()),
}


def train(case: ModelCase, rows: Any, config: dict[str, Any], loss: Any = None) -> list[dict[str, float]]:
    """Log entries of a training with all rows in every step."""
    num_ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    arguments = {**PLAIN_DESCENT, "max_steps": NUM_STEPS, "learning_rate": RATE, "logging_steps": 1}
    arguments["per_device_train_batch_size"] = len(rows) // num_ranks
    more = {"token_loss": focal} if loss else {}
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(case, rows, folder, {"token_metrics": "on", **config}, arguments, **more)
        trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def plain(case: ModelCase, rows: Any, loss: Any = F.cross_entropy) -> list[tuple[float, float]]:
    """Accuracy and entropy of every step, by whole logits of each document alone."""
    model, found = build_model(case), []
    for _ in range(NUM_STEPS):
        total, weight, counts = torch.zeros((), dtype=torch.float64), 0.0, []
        for row in rows:
            logits_TV = model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0]
            weights = row.get("loss_weights", [1.0] * len(row["labels"]))
            for place, label in enumerate(row["labels"][1:]):
                if label != -100 and weights[place + 1]:
                    p_V = F.softmax(logits_TV[place].detach(), dim=-1)
                    counts.append((float(int(p_V.argmax()) == label), -sum(float(p) * float(p.log()) for p in p_V)))
                    total = total + weights[place + 1] * loss(logits_TV[place : place + 1], torch.tensor([label])).sum()
                    weight += weights[place + 1]
        (total / weight).backward()
        with torch.no_grad():
            for parameter in (each for each in model.parameters() if each.grad is not None):
                parameter -= RATE * parameter.grad
                parameter.grad = None
        accuracy, entropy = (sum(column) / len(counts) for column in zip(*counts, strict=True))
        found.append((accuracy, entropy))
    return found


def check(log: list[dict[str, float]], expected: list[tuple[float, float]], rows: Any = ROWS) -> None:
    assert [tuple(entry[name] for name in NAMES) for entry in log] == [pytest.approx(each, rel=1e-10) for each in expected]
    num_tokens = sum(len(row["input_ids"]) for row in rows)
    assert [entry["num_tokens"] for entry in log] == [num_tokens * (step + 1) for step in range(NUM_STEPS)]


@pytest.mark.daily("packs")
@pytest.mark.parametrize("name", SETTINGS)
def test_every_step_logs_what_its_whole_logits_give(ranks, name: str) -> None:
    config, num_ranks, lora = SETTINGS[name]
    case = ModelCase(promoted=True, lora=lora)
    expected = plain(case, ROWS)
    # training changes both, and not every token is right
    assert len(set(expected)) == NUM_STEPS and 0 < expected[-1][0] < 1
    for log in ranks(num_ranks).run(train, case, ROWS, config):
        check(log, expected)


# models that scale or cap their logits after the head
@pytest.mark.wide
@pytest.mark.parametrize("family,name", [("granite", "slices in tiles"), ("gemma2", "slices in tiles"), ("gemma2", "shards")])
def test_changed_logits_are_counted(ranks, family: str, name: str) -> None:
    (config, num_ranks, _), case = SETTINGS[name], ModelCase(family, promoted=True)
    # capped scores of attention need more room
    tiles = {"tile_tokens": 8, "device_gib": 1e-3 if family == "granite" else 1.3e-3}
    for log in ranks(num_ranks).run(train, case, ROWS, config | tiles):
        check(log, plain(case, ROWS))


@pytest.mark.wide
@pytest.mark.parametrize("tile_tokens", [0, 8])
def test_tokens_of_weight_zero_do_not_count_and_other_losses_change_nothing(tile_tokens: int) -> None:
    rows = with_weights(ROWS)
    config = {"tokens_per_rank": 64, "tile_tokens": tile_tokens, "device_gib": 1e-3 if tile_tokens else 1.0}
    check(train(CASE, rows, config, "focal"), plain(CASE, rows, focal), rows)


@pytest.mark.wide
def test_a_step_of_several_plans_logs_the_mean_of_its_plans_and_off_logs_nothing(tmp_path) -> None:
    arguments = {**PLAIN_DESCENT, "max_steps": 1, "learning_rate": RATE, "logging_steps": 1, "gradient_accumulation_steps": 3}
    arguments |= {"per_device_train_batch_size": 2, "train_sampling_strategy": "sequential"}
    logs = []
    for setting in ("on", "off"):
        trainer = make_trainer(CASE, ROWS, str(tmp_path), {"token_metrics": setting}, arguments)
        trainer.train()
        logs.append(trainer.state.log_history[0])
    # the second batch has labels in one of its rows only
    batches = [plain(CASE, ROWS[first : first + 2])[0] for first in (0, 2, 4)]
    expected = [sum(column) / 3 for column in zip(*batches, strict=True)]
    assert [logs[0][name] for name in NAMES] == pytest.approx(expected, rel=1e-10)
    assert not {*NAMES, "num_tokens"} & logs[1].keys()
    assert logs[0]["loss"] == logs[1]["loss"] and logs[0]["grad_norm"] == logs[1]["grad_norm"]


def test_a_model_that_classifies_is_refused(tmp_path) -> None:
    case = ModelCase(promoted=True, head=tuple(HEADS["classes"].items()))
    with pytest.raises(ValueError, match="token_metrics='on' counts next tokens, which a model that classifies documents"):
        make_trainer(case, classifier_rows("classes", [5, 6]), str(tmp_path), {"token_metrics": "on"})
