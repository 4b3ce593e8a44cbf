"""Loss by position and needle grid equal those of plain transformers' logits, document by document, with and without plans."""

from __future__ import annotations

import functools
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import pytest
import torch
import torch.nn.functional as F
from helpers.models.chats import byte_tokenizer
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.versions import resuming
from helpers.trainers.trainer_runs import make_trainer, training_arguments
from transformers import DataCollatorWithFlattening, Trainer

from hf_longctx import LongContextCallback, LongContextConfig, LongContextEvaluation, NeedleTask, passkeys
from hf_longctx.hf.evaluation import long_evaluation
from hf_longctx.plan.core.types import ActivationPolicy, SequenceGroup, StepPlan

Rows = list[dict[str, list[int]]]

CASE = ModelCase("llama", promoted=True)
TRAINED = random_rows([13, 21, 8, 34, 16, 5, 30, 9])
# lengths just below and above powers of two, and a row without labels
HELD_OUT = random_rows([63, 2, 33, 17, 16, 5, 48, 40, 1], seed=7, masked=(5,))
LENGTHS, DEPTHS = (24, 60), (0.0, 0.5, 1.0)
FIRST_BUCKET = 4


def guessable(length: int, depth: float, chance: random.Random) -> tuple[list[int], int]:
    """Random tokens; the second of two answer tokens is the model's own choice, more often the deeper the needle is."""
    ids = [chance.randrange(64) for _ in range(length)]
    if chance.random() < 0.2 + 0.6 * depth:
        with torch.no_grad():
            ids[-1] = int(_model()(input_ids=torch.tensor([ids[:-1]])).logits[0, -1].argmax())
    return ids, 2


@functools.cache
def _model() -> Any:
    return build_model(CASE).eval()


def task(num_documents: int = 5) -> NeedleTask:
    return NeedleTask(LENGTHS, DEPTHS, guessable, num_documents)


def expected_metrics() -> dict[str, float]:
    """Expected metrics from the whole logits of each document, token by token in plain Python."""
    model = _model()
    buckets: dict[str, list[float]] = {}
    for row in HELD_OUT:
        for position, (loss, _) in token_scores(model, row).items():
            name = next(f"{low}_{high}" for low, high in BUCKETS if low <= position <= high)
            buckets.setdefault(f"eval_loss_at_{name}", []).append(loss)
    metrics = {name: sum(losses) / len(losses) for name, losses in buckets.items()}
    rows, cells = task().rows(), [(length, depth) for length in LENGTHS for depth in DEPTHS]
    found = [list(token_scores(model, row).values()) for row in rows]
    for number, (length, depth) in enumerate(cells):
        answers = [score for scores in found[5 * number : 5 * number + 5] for score in scores]
        assert len(answers) == 10
        metrics[f"eval_needle_{length}_{depth * 100:g}"] = sum(right for _, right in answers) / 10
    metrics["eval_needle"] = sum(right for scores in found for _, right in scores) / 60
    metrics["eval_needle_loss"] = sum(loss for scores in found for loss, _ in scores) / 60
    return metrics


BUCKETS = [(1, 3), (4, 7), (8, 15), (16, 31), (32, 63)]


@torch.no_grad()
def token_scores(model: Any, row: dict[str, list[int]]) -> dict[int, tuple[float, bool]]:
    """Position and loss of every label token, and whether it is the likeliest token."""
    logits = model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0]
    found = {}
    for position, label in enumerate(row["labels"]):
        if position and label != -100:
            loss = F.cross_entropy(logits[position - 1], torch.tensor(label))
            found[position] = (float(loss), int(logits[position - 1].argmax()) == label)
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, float]:
    metrics = expected_metrics()
    # if all cells were equal, documents in the wrong cell would not show
    assert len({metrics[f"eval_needle_{length}_{depth * 100:g}"] for length in LENGTHS for depth in DEPTHS}) >= 3
    assert len(metrics) == len(BUCKETS) + 8
    return metrics


def evaluate_under(
    config: dict[str, Any] | None, folder: str, num_ranks: int, case: ModelCase = CASE
) -> tuple[dict[str, float], list[str], int]:
    """Metrics of one evaluation, the layouts of its plans, and the largest number of chunks in a group."""
    held_out = datasets.Dataset.from_list(HELD_OUT)
    if config is None:
        trainer: Any = Trainer(model=build_model(case), args=training_arguments(folder))
        return LongContextEvaluation(trainer, held_out, task(), first_bucket=FIRST_BUCKET).run(), [], 0
    arguments = {"per_device_eval_batch_size": 16 // num_ranks}
    trainer = make_trainer(case, TRAINED, folder, config, arguments)
    layouts, num_chunks, solve = [], [0], trainer.longctx_run.source.solve

    def recorded(*args: Any) -> Any:
        plan = solve(*args)
        layouts.append(plan.layout)
        num_chunks.append(max(len(group.chunks) for each in plan.micro_batches for group in each.groups))
        return plan

    trainer.longctx_run.source.solve = recorded
    metrics = LongContextEvaluation(trainer, held_out, task(), first_bucket=FIRST_BUCKET).run()
    return metrics, layouts, max(num_chunks)


# name -> (ranks, settings; None for a stock trainer)
RUNS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "one rank": (1, {"tokens_per_rank": 64}),
    "groups of one and two": (2, {"tokens_per_rank": 48}),
    "rings of two, weights in shards": (
        2,
        {"tokens_per_rank": 48, "method": "ring", "solver": "static", "static_degree": 2, "parameters": "sharded"},
    ),
    "two stages, in slices": (2, {"tokens_per_rank": 64, "stages": 2}),
    "stock": (1, None),
    "stock on two ranks": (2, None),
}


@pytest.mark.daily("stock")
@pytest.mark.parametrize("name", RUNS)
def test_buckets_and_grid_are_those_of_plain_logits(ranks, expected, tmp_path: Path, name: str) -> None:
    num_ranks, config = RUNS[name]
    results = ranks(num_ranks).run(evaluate_under, config, str(tmp_path), num_ranks)
    for metrics, _, _ in results:
        assert metrics.keys() == expected.keys()
        assert metrics == pytest.approx(expected, rel=1e-10)
        assert metrics == results[0][0]
    _, layouts, num_chunks = results[0]
    if name == "groups of one and two":
        assert any("2" in layout for layout in layouts) and any("<1,1>" in layout for layout in layouts), layouts
    if name == "two stages, in slices":
        assert num_chunks > 1
    run = json.loads((tmp_path / "long_evaluation.json").read_text())["runs"][0]
    assert run["step"] == 0 and len(run["cells"]) == 6
    # all labels except those of first tokens
    assert sum(bucket["num_tokens"] for bucket in run["buckets"]) == sum(x != -100 for row in HELD_OUT for x in row["labels"][1:])


@pytest.mark.wide
@pytest.mark.parametrize("name", ["groups of one and two", "stock"])
def test_documents_have_their_own_dynamic_frequencies(ranks, tmp_path: Path, name: str) -> None:
    # 24 tokens are the longest that are not scaled; the longest document comes first, and the needles' lengths are on both sides
    case = replace(CASE, rope_type="dynamic")
    num_ranks, config = RUNS[name]
    config = config and {**config, "max_length": 63}
    found = ranks(num_ranks).run(evaluate_under, config, str(tmp_path), num_ranks, case)[0][0]
    buckets: dict[str, list[float]] = {}
    for row in HELD_OUT:
        # a new model, because rotary frequencies may depend on what a model ran before
        for position, (loss, _) in token_scores(build_model(case), row).items():
            bucket = next(f"{low}_{high}" for low, high in BUCKETS if low <= position <= high)
            buckets.setdefault(f"eval_loss_at_{bucket}", []).append(loss)
    needles = [token_scores(build_model(case), row) for row in task().rows()]
    answers = [loss for scores in needles for loss, _ in scores.values()]
    expected = {bucket: sum(losses) / len(losses) for bucket, losses in buckets.items()}
    expected["eval_needle_loss"] = sum(answers) / len(answers)
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-10)


@pytest.mark.wide
def test_tiled_head_gives_the_same_scores(expected, tmp_path: Path) -> None:
    trainer = make_trainer(CASE, TRAINED, str(tmp_path), {"tokens_per_rank": 64})
    solve = trainer.longctx_run.source.solve
    trainer.longctx_run.source.solve = lambda *args: with_tiles(solve(*args))
    metrics = LongContextEvaluation(trainer, datasets.Dataset.from_list(HELD_OUT), task(), first_bucket=FIRST_BUCKET).run()
    assert metrics == pytest.approx(expected, rel=1e-10)


def test_training_is_measured_as_asked_and_not_changed(expected, tmp_path: Path) -> None:
    weights = []
    for is_measured in (False, True):
        trainer = make_trainer(CASE, TRAINED, str(tmp_path), {"tokens_per_rank": 64}, {"max_steps": 3})
        evaluation = LongContextEvaluation(trainer, HELD_OUT, task(), every_steps=2, first_bucket=FIRST_BUCKET)
        if is_measured:
            trainer.add_callback(evaluation)
        trainer.train()
        weights.append(list(trainer.model.parameters()))
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))
    assert [run.step for run in evaluation.runs] == [0, 2, 3]
    assert evaluation.runs[0].metrics() == pytest.approx(expected, rel=1e-10)
    logged = [logs for logs in trainer.state.log_history if "eval_needle" in logs]
    assert [logs["step"] for logs in logged] == [0, 2, 3]
    assert logged[2]["eval_loss_at_32_63"] == evaluation.runs[2].buckets[-1].loss != evaluation.runs[0].buckets[-1].loss
    # another model next to the trained one
    assert evaluation.measure(_model(), "as it was") == pytest.approx(expected, rel=1e-10)
    runs = json.loads((tmp_path / "long_evaluation.json").read_text())["runs"]
    assert [run["name"] for run in runs] == ["", "", "", "as it was"]
    # after the last step, evaluated again
    assert evaluation.run() == pytest.approx(evaluation.runs[2].metrics(), rel=1e-10)
    for name in ("needles.png", "loss_by_position.png"):
        assert (tmp_path / name).stat().st_size > 5000


def evaluated_training(folder: str, max_steps: int, start: str | None) -> list[tuple[int, dict[str, float]]]:
    """Trains to `max_steps` from a checkpoint, evaluating every second step; returns its record as (step, metrics)."""
    arguments = {"max_steps": max_steps, "save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(CASE, TRAINED, folder, {"tokens_per_rank": 64}, arguments)
    evaluation = LongContextEvaluation(trainer, HELD_OUT, task(1), every_steps=2, first_bucket=FIRST_BUCKET)
    trainer.add_callback(evaluation)
    with patch.object(long_evaluation, "find_spec", lambda name: None):
        trainer.train(resume_from_checkpoint=start and f"{folder}/{start}")
    return [(run.step, run.metrics()) for run in evaluation.runs]


def recorded(path: Path) -> list[int]:
    return [run["step"] for run in json.loads(path.read_text())["runs"]]


@resuming
def test_a_resumed_training_goes_on_with_its_record(ranks, tmp_path: Path, caplog) -> None:
    path = tmp_path / "long_evaluation.json"
    first = evaluated_training(str(tmp_path), 3, None)
    assert [step for step, _ in first] == [0, 2, 3]
    # step 3 runs again
    for found in ranks(2).run(evaluated_training, str(tmp_path), 4, "checkpoint-2"):
        assert [step for step, _ in found] == [0, 2, 4] and found[:2] == first[:2]
    assert recorded(path) == [0, 2, 4] and recorded(tmp_path / "long_evaluation.1.json") == [0, 2, 3]
    # another training, then other cells, then an unreadable file: records are not mixed, and none is lost
    whole = path.read_text()
    assert [step for step, _ in evaluated_training(str(tmp_path), 2, None)] == [0, 2]
    assert (tmp_path / "long_evaluation.2.json").read_text() == whole and recorded(path) == [0, 2]
    trainer = make_trainer(CASE, TRAINED, str(tmp_path), {"tokens_per_rank": 64})
    assert [run.step for run in LongContextEvaluation(trainer, HELD_OUT, task(), first_bucket=FIRST_BUCKET).runs] == [0, 2]
    assert LongContextEvaluation(trainer, HELD_OUT, replace(task(), depths=(0.0, 1.0)), first_bucket=FIRST_BUCKET).runs == []
    assert recorded(tmp_path / "long_evaluation.3.json") == [0, 2] and not path.exists()
    path.write_text(whole[:99])
    assert LongContextEvaluation(trainer, HELD_OUT, first_bucket=FIRST_BUCKET).runs == []
    assert (tmp_path / "long_evaluation.4.json").read_text() == whole[:99]
    assert "kept as long_evaluation.3.json: its evaluations have other needle lengths, depths or buckets" in caplog.text


@pytest.mark.wide
def test_stock_trainer_under_the_callback_is_measured_on_its_own_attention(expected, tmp_path: Path) -> None:
    trainer = Trainer(
        model=build_model(CASE),
        args=training_arguments(str(tmp_path), max_steps=2, per_device_train_batch_size=4),
        train_dataset=datasets.Dataset.from_list(TRAINED),
        data_collator=DataCollatorWithFlattening(),
        callbacks=[LongContextCallback(LongContextConfig(tokens_per_rank=128, report_steps=False))],
    )
    evaluation = LongContextEvaluation(trainer, HELD_OUT, task(), first_bucket=FIRST_BUCKET)
    trainer.add_callback(evaluation)
    trainer.train()
    assert [run.step for run in evaluation.runs] == [0, 2]
    assert evaluation.runs[0].metrics() == pytest.approx(expected, rel=1e-10)
    assert trainer.model.training and "forward" not in vars(trainer.model.lm_head)


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(CASE, TRAINED, str(tmp_path), {"tokens_per_rank": 40, "max_length": 50, "long_sequences": "split"})
    # held-out rows may be cut, but a cut needle document would lose its needle
    with pytest.raises(ValueError, match="a needle document has 60 tokens, but this run fits 40 at most"):
        LongContextEvaluation(trainer, needles=task())
    with pytest.raises(ValueError, match="nothing to do"):
        LongContextEvaluation(trainer)
    with pytest.raises(ValueError, match="first_bucket is 6"):
        LongContextEvaluation(trainer, HELD_OUT, first_bucket=6)
    with pytest.raises(ValueError, match=r"depth 1\.5 is not a share of the length"):
        NeedleTask(LENGTHS, (0.5, 1.5), guessable)
    with pytest.raises(ValueError, match="asked for 24 tokens and returned 23"):
        NeedleTask((24,), (0.5,), lambda length, depth, chance: ([1] * (length - 1), 1)).rows()
    stock = Trainer(model=build_model(CASE), args=training_arguments(str(tmp_path)))
    stock.is_fsdp_enabled = True
    with pytest.raises(ValueError, match=r"spread over ranks .* only under LongContextTrainer"):
        LongContextEvaluation(stock, HELD_OUT)


def test_passkeys_stand_at_their_depth_and_are_asked_for_at_the_end() -> None:
    tokenizer = byte_tokenizer()
    rows = NeedleTask((256, 400), (0.0, 0.5, 1.0), passkeys(tokenizer), num_documents=2).rows()
    assert [len(row["input_ids"]) for row in rows] == [256] * 6 + [400] * 6
    assert len({tuple(row["input_ids"]) for row in rows}) == 12
    places = []
    for row in rows:
        text = tokenizer.decode(row["input_ids"])
        (key,) = {match.group(1) for match in re.finditer(r"pass key is ?(\d{5})", text)}
        assert text.endswith(f"What is the pass key? The pass key is {key}") and text.count(key) == 3
        labelled = [token for token in row["labels"] if token != -100]
        assert tokenizer.decode(labelled).strip() == key and row["labels"][-len(labelled) :] == labelled
        places.append(text.index("The pass key is") / text.index("What is"))
    assert places[0] < 0.02 and 0.3 < places[2] < 0.5 and places[4] > 0.6
    with pytest.raises(ValueError, match="the needle length is 60; raise it"):
        NeedleTask((60,), (0.5,), passkeys(tokenizer)).rows()


def with_tiles(plan: StepPlan) -> StepPlan:
    """A plan of one stage, and an output head that takes seven tokens at a time."""

    def tiled(group: SequenceGroup) -> SequenceGroup:
        (stage,) = group.stages
        policies = tuple(ActivationPolicy(chunk=chunk, tile_tokens=7) for chunk in range(len(group.chunks)))
        return replace(group, stages=(replace(stage, activations=policies),))

    rounds = tuple(replace(each, groups=tuple(map(tiled, each.groups))) for each in plan.micro_batches)
    return replace(plan, micro_batches=rounds)
