"""Models that classify documents or tokens train and predict under any plan as plain transformers does on single documents."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.models.chats import tokenizer_of
from helpers.models.classifiers import HEADS, NUM_LABELS, classifier_rows, plain_step
from helpers.models.reference import TOLERANCE, relative_error
from helpers.models.tiny_models import VOCAB_SIZE, ModelCase, build_model
from helpers.ranks.rank_steps import whole
from helpers.trainers.trainer_runs import PLAIN_DESCENT, make_trainer, training_arguments
from transformers import Trainer, default_data_collator

from hf_longctx import LongContextCallback, LongContextConfig
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.plan.memory.byte_model import ByteModel

LENGTHS = [61, 13, 40, 5, 1, 34]
# settings of plans, number of ranks
PLANS: dict[str, tuple[dict[str, Any], int]] = {
    "packs": ({"tokens_per_rank": 64}, 1),
    "slices in tiles": ({"tokens_per_rank": 64, "tile_tokens": 8, "device_gib": 1e-3}, 1),
    "groups": ({"tokens_per_rank": 32, "solver": "static", "static_degree": 2}, 2),
    "rings": ({"tokens_per_rank": 32, "solver": "static", "static_degree": 2, "method": "ring"}, 2),
    "stages": ({"tokens_per_rank": 96, "stages": 2}, 2),
    "shards": ({"tokens_per_rank": 64, "parameters": "sharded"}, 2),
}
# PEFT trains the head beside such adapters by itself
LORA = (("r", 2), ("target_modules", ("q_proj", "down_proj")), ("task_type", "SEQ_CLS"))


def case_of(head: str, **changes: Any) -> ModelCase:
    return ModelCase(promoted=True, head=tuple(HEADS[head].items()), **changes)


def mean_of_logits(found: Any) -> dict[str, float]:
    """A metric that reads predictions and labels."""
    return {"mean": float(np.abs(found.predictions).mean()), "labels": float(np.abs(found.label_ids).sum())}


def train_and_predict(case: ModelCase, rows: Any, config: dict[str, Any]) -> tuple[Any, ...]:
    """Metrics and predictions of all rows, then loss and gradients of a step on them, and all logged values."""
    seen: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        arguments = {**PLAIN_DESCENT, "max_steps": 1, "per_device_train_batch_size": len(rows) // num_ranks}
        arguments["per_device_eval_batch_size"] = 2
        trainer = make_trainer(case, rows, folder, config, arguments, compute_metrics=mean_of_logits)
        dataset = datasets.Dataset.from_list(rows)
        metrics, predicted = trainer.evaluate(dataset), trainer.predict(dataset)
        trainer.compute_metrics = None
        lone = trainer.evaluate(dataset)
        original = trainer.longctx_run.report.step_done

        def step_done(plan: Any, result: Any) -> None:
            gradients = {name: whole(p.grad).clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
            seen.append((float(result.loss), gradients))
            original(plan, result)

        trainer.longctx_run.report.step_done = step_done
        trainer.train()
    return metrics, lone, predicted, *seen[0]


def check(ranks: Any, head: str, case: ModelCase, plan: str) -> None:
    config, num_ranks = PLANS[plan]
    rows = classifier_rows(head, LENGTHS)
    loss, gradients, logits = plain_step(build_model(case), head, rows)
    found = (
        ranks(num_ranks).run(train_and_predict, case, rows, config) if num_ranks > 1 else [train_and_predict(case, rows, config)]
    )
    trained: dict[str, Any] = {}
    for metrics, lone, predicted, own_loss, own in found:
        trained |= own
        assert own_loss == pytest.approx(loss, rel=TOLERANCE)
        assert lone["eval_loss"] == pytest.approx(loss, rel=TOLERANCE) and "eval_mean" not in lone
        assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-7)
        assert metrics["eval_mean"] == pytest.approx(float(np.abs(predicted.predictions).mean()))
        for number, expected in enumerate(logits):
            row = predicted.predictions[number]
            if head == "tokens":
                assert (row[len(expected) :] == -100).all() and (predicted.label_ids[number][len(expected) :] == -100).all()
                row = row[: len(expected)]
                assert predicted.label_ids[number][: len(expected)].tolist() == rows[number]["labels"]
            else:
                assert predicted.label_ids[number] == pytest.approx(rows[number]["label"], rel=1e-7)
            assert relative_error(torch.from_numpy(row), expected) <= TOLERANCE
    assert trained.keys() == gradients.keys()
    errors = {name: relative_error(trained[name], gradients[name]) for name in gradients}
    assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.daily("regression-slices in tiles")
@pytest.mark.parametrize(
    "head,plan",
    [
        ("classes", "packs"),
        ("tokens", "slices in tiles"),
        ("regression", "slices in tiles"),
        ("classes", "groups"),
        ("several", "rings"),
        ("regression", "stages"),
        ("tokens", "stages"),
        ("several", "shards"),
    ],
)
def test_any_plan_matches_one_plain_process(ranks, head: str, plan: str) -> None:
    check(ranks, head, case_of(head), plan)


@pytest.mark.wide
def test_an_adapter_with_a_trained_head_matches(ranks) -> None:
    check(ranks, "classes", case_of("classes", lora=LORA), "groups")


def test_an_attached_trainer_matches_and_is_stock_again() -> None:
    case, rows = case_of("classes"), classifier_rows("classes", [13, 13, 13, 13])
    loss, gradients, _ = plain_step(build_model(case), "classes", rows)
    model = build_model(case)
    before = copy.deepcopy(model.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        args = training_arguments(folder, **PLAIN_DESCENT, max_steps=1, per_device_train_batch_size=4, learning_rate=1.0)
        trainer = Trainer(model, args, train_dataset=rows, data_collator=default_data_collator)
        LongContextCallback(LongContextConfig(report_steps=False, timeline_steps=0)).attach(trainer)
        assert trainer.train().training_loss == pytest.approx(loss, rel=1e-6)
        found = trainer.evaluate(rows)["eval_loss"]
    errors = [relative_error(before[name] - own, gradients[name]) for name, own in model.state_dict().items()]
    assert max(errors) <= 1e-10
    with torch.no_grad():
        outputs = [model.eval()(input_ids=torch.tensor([r["input_ids"]]), labels=torch.tensor([r["label"]])).loss for r in rows]
    assert found == pytest.approx(float(torch.stack(outputs).nanmean()), rel=1e-6)


@pytest.mark.parametrize(
    "head,config,arguments,more,why",
    [
        ("classes", {"long_sequences": "split", "max_length": 8}, {}, {}, "a row has one label"),
        ("several", {}, {"label_smoothing_factor": 0.1}, {}, "smooths classes"),
        ("regression", {}, {}, {"token_loss": torch.nn.functional.cross_entropy}, "token_loss gets classes"),
    ],
)
def test_settings_without_meaning_are_refused(head: str, config: Any, arguments: Any, more: Any, why: str) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.raises(ValueError, match=why):
        make_trainer(case_of(head), classifier_rows(head, [5, 6]), folder, config, arguments, **more)


def test_the_padding_token_of_the_tokenizer_places_labels() -> None:
    padding, other = 5, 6
    rows = [{**row, "input_ids": [*row["input_ids"], padding, padding]} for row in classifier_rows("classes", [13, 13, 13, 13])]
    models = [build_model(case_of("classes")) for _ in range(2)]
    for model, pad_token_id in zip(models, (padding, None), strict=True):
        model.config.pad_token_id = pad_token_id
    loss, _, _ = plain_step(models[0], "classes", rows)
    tokenizer = tokenizer_of(VOCAB_SIZE)
    tokenizer.pad_token = f"w{padding}"
    arguments = {**PLAIN_DESCENT, "max_steps": 1, "per_device_train_batch_size": 4}
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(case_of("classes"), rows, folder, None, arguments, model=models[1], processing_class=tokenizer)
        assert trainer.train().training_loss == pytest.approx(loss, rel=1e-6)
        tokenizer.pad_token = f"w{other}"
        with pytest.raises(
            ValueError, match=f"padding token of the model or its tokenizer was changed from {padding} to {other}"
        ):
            trainer.train()


def test_a_set_without_labels_is_predicted() -> None:
    rows = [{"input_ids": row["input_ids"]} for row in classifier_rows("classes", [5, 9, 3])]
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(case_of("classes"), classifier_rows("classes", [5, 6]), folder)
        found = trainer.predict(datasets.Dataset.from_list(rows))
    assert found.predictions.shape == (3, NUM_LABELS) and found.label_ids is None and found.metrics == {}


def test_metrics_leave_the_loss_weighted_as_in_training() -> None:
    rows = classifier_rows("tokens", [5, 9, 13])
    rows = [{**row, "loss_weights": [0.5 * (place % 4) for place in range(len(row["labels"]))]} for row in rows]
    config = {"max_length": 8, "long_sequences": "truncate"}
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(case_of("tokens"), rows, folder, config, {"per_device_eval_batch_size": 2})
        expected = trainer.evaluate(trainer.train_dataset)["eval_loss"]
        trainer.compute_metrics = mean_of_logits
        found = trainer.evaluate(trainer.train_dataset)["eval_loss"]
    assert found == pytest.approx(expected, rel=1e-7)


@pytest.mark.daily("several-binary cross-entropy")
@pytest.mark.parametrize("head,name", [("regression", "squared error"), ("several", "binary cross-entropy")])
def test_a_forward_with_another_loss_of_numbers_is_refused(tmp_path, head: str, name: str) -> None:
    for factor in (1, 7):
        model = build_model(case_of(head))

        def scaled(module: Any, args: Any, output: Any, factor: int = factor) -> None:
            output.loss = None if output.loss is None else factor * output.loss

        model.register_forward_hook(scaled)
        try:
            make_trainer(case_of(head), classifier_rows(head, [5, 6]), str(tmp_path), {"self_test": True}, model=model)
            message = ""
        except ValueError as error:
            message = str(error)
        assert (f"whose mean {name} is" in message) == (factor == 7), message


def test_a_head_of_few_labels_is_priced_as_such() -> None:
    words, labels = model_spec(build_model(ModelCase())), model_spec(build_model(case_of("classes")))
    assert (words.head_outputs, labels.head_outputs) == (64, NUM_LABELS)
    for model, spec in ((build_model(ModelCase()), words), (build_model(case_of("classes")), labels)):
        # norms are vectors
        assert spec.num_parameters == sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert labels.head_share < words.head_share / 10
    assert ByteModel(labels).kept_tokens(10**6) > ByteModel(words).kept_tokens(10**6)
