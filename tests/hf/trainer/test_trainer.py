"""The trainer: the same trajectory under every layout, the checkpoint, resuming, evaluation, and what it refuses."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import datasets
import pytest
import torch
import torch.distributed as dist
from helpers.models.reference import random_rows, reference_step, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.versions import resuming
from helpers.trainers.trainer_runs import (
    SKEWED,
    LossRecorder,
    make_trainer,
    plain_training,
    start,
    start_under,
    train_on_rank,
    training_arguments,
)
from transformers import AutoModelForCausalLM, Trainer
from transformers.integrations import TensorBoardCallback

from hf_longctx import LongContextConfig, LongContextMixin, LongContextTrainer
from hf_longctx.hf.run.sets import _weights_digest

# name -> (ranks, settings)
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"tokens_per_rank": 96}),
    "data parallel": (2, {"solver": "static", "static_degree": 1, "tokens_per_rank": 64}),
    "all ranks together": (2, {"solver": "static", "static_degree": 2, "tokens_per_rank": 48}),
    "heterogeneous": (4, {"tokens_per_rank": 32}),
    "rings of three": (4, {"tokens_per_rank": 32, "method": "ring", "degrees": [1, 3]}),
}


@pytest.mark.wide
@pytest.mark.parametrize(
    "name,promoted,tolerance",
    [*((name, True, 1e-10) for name in RUNS), ("all ranks together", False, 1e-6), ("heterogeneous", False, 1e-6)],
)
def test_twenty_steps_follow_one_plain_process(ranks, rows, name: str, promoted: bool, tolerance: float) -> None:
    case = ModelCase("llama", promoted=promoted)
    expected_losses, expected = plain_training(case, rows)
    num_ranks, settings = RUNS[name]
    for losses, layouts, weights in ranks(num_ranks).run(train_on_rank, case, rows, settings, {}):
        assert losses == pytest.approx(expected_losses, rel=tolerance)
        error = max(float((weights[n] - expected[n]).abs().max() / expected[n].abs().max()) for n in expected)
        assert error <= tolerance
        if name == "rings of three":
            assert any("3" in layout for layout in layouts)
        if name == "heterogeneous":
            degrees = {degree for layout in layouts for degree in layout if degree.isdigit()}
            assert degrees >= {"1", "2"}, layouts


@pytest.mark.wide("1-2", "2-4")
@pytest.mark.quick("2-2")
@pytest.mark.parametrize("num_ranks,steps", [(1, 2), (2, 2), (2, 4)])
def test_accumulated_plans_follow_one_plain_process(ranks, rows, num_ranks: int, steps: int) -> None:
    case = ModelCase("llama", promoted=True)
    expected_losses, expected = plain_training(case, rows)
    arguments = {"gradient_accumulation_steps": steps, "per_device_train_batch_size": 8 // num_ranks // steps}
    for losses, _, weights in ranks(num_ranks).run(train_on_rank, case, rows, {"tokens_per_rank": 64}, arguments):
        parts = [sum(losses[i : i + steps]) for i in range(0, len(losses), steps)]
        assert parts == pytest.approx(expected_losses, rel=1e-10)
        assert max(relative_error(weights[name], expected[name]) for name in expected) <= 1e-10


@pytest.mark.wide
def test_training_lowers_the_loss(ranks, rows) -> None:
    case = ModelCase("qwen3", dtype=torch.float32)
    ((losses, _, _), *_) = ranks(2).run(train_on_rank, case, rows, {"tokens_per_rank": 64}, {"max_steps": 30})
    assert sum(losses[-3:]) < sum(losses[:3])


@pytest.fixture(scope="module")
def fp32(ranks, rows) -> list[float]:
    """Losses of a training in fp32."""
    return ranks(2).run(train_on_rank, ModelCase(dtype=torch.float32), rows, {"tokens_per_rank": 64}, {})[0][0]


HALVES = {"autocast": torch.float32, "bf16 weights": torch.bfloat16, "fp16 weights": torch.float16}


@pytest.mark.wide
@pytest.mark.parametrize("dtype", HALVES.values(), ids=list(HALVES))
def test_training_in_half_precision_follows_fp32(ranks, rows, fp32, dtype: torch.dtype) -> None:
    config, arguments = {"tokens_per_rank": 64}, {"bf16": dtype == torch.float32}
    half, _, _ = ranks(2).run(train_on_rank, ModelCase(dtype=dtype), rows, config, arguments)[0]
    assert half != fp32
    assert half == pytest.approx(fp32, rel=0.004 if dtype == torch.float16 else 0.03)


def test_token_budget_makes_the_steps(ranks, rows) -> None:
    config = {"tokens_per_rank": 96, "tokens_per_step": 120}
    ((losses, _, _),) = ranks(1).run(train_on_rank, ModelCase(), rows, config, {"max_steps": -1, "num_train_epochs": 2})
    assert len(losses) == 2 * round(sum(SKEWED) / 120)


def save_and_evaluate(rows: list[dict[str, list[int]]], folder: str) -> tuple[float, float]:
    trainer = make_trainer(
        ModelCase(dtype=torch.float32),
        rows,
        folder,
        {"tokens_per_rank": 64},
        {"max_steps": 3},
        eval_dataset=datasets.Dataset.from_list(rows[:9]),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    return before, after


@pytest.mark.wide
def test_checkpoint_loads_in_plain_transformers_with_the_same_loss(ranks, rows, tmp_path: Path) -> None:
    results = ranks(2).run(save_and_evaluate, rows, str(tmp_path))
    assert results[0] == results[1]
    before, after = results[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config._attn_implementation == "sdpa"
    expected, _ = reference_step(model, rows[:9])
    assert after == pytest.approx(expected, abs=1e-5)
    assert before == pytest.approx(reference_step(build_model(ModelCase(dtype=torch.float32)), rows[:9])[0], abs=1e-5)


def train_and_resume(rows: list[dict[str, list[int]]], folder: str, workers: int) -> tuple[list[float], list[float]]:
    """Losses of 12 steps in one go, and of the steps after the checkpoint in the middle of an epoch."""
    arguments = {
        "max_steps": 12,
        "save_strategy": "steps",
        "save_steps": 7,
        "per_device_train_batch_size": 4,
        "dataloader_num_workers": workers,
        # by default a rank would start workers by a server of its own: seconds of imports
        "dataloader_multiprocessing_context": "fork" if workers else None,
    }
    config = {"tokens_per_rank": 64, "timeline_steps": 2}
    straight, resumed = LossRecorder(), LossRecorder()
    trainer = make_trainer(ModelCase(promoted=True), rows, folder, config, arguments)
    straight.attach(trainer)
    trainer.train()
    again = make_trainer(ModelCase(promoted=True), rows, folder, config, arguments)
    resumed.attach(again)
    again.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-7"))
    return straight.losses, resumed.losses


@pytest.mark.wide
@resuming
@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_inside_an_epoch_continues_with_the_same_samples(ranks, rows, tmp_path: Path, workers: int) -> None:
    for straight, resumed in ranks(2).run(train_and_resume, rows, str(tmp_path), workers):
        assert len(straight) == 12
        assert resumed == pytest.approx(straight[7:], rel=1e-9)
    assert (tmp_path / "timeline.json").exists()


@pytest.mark.quick
def test_mixin_serves_other_trainers(rows) -> None:
    class Mine(LongContextMixin, Trainer):
        pass

    assert issubclass(LongContextTrainer, LongContextMixin)
    assert Mine.training_step is LongContextMixin.training_step


BAD_STARTS = {
    "tokens of a rank alone": ({}, {"average_tokens_across_devices": False}, "average_tokens_across_devices=False"),
    "accumulation of a budget": (
        {"tokens_per_step": 100},
        {"gradient_accumulation_steps": 2},
        "gradient_accumulation_steps=2 contradicts tokens_per_step=100",
    ),
    "fp16": ({}, {"fp16": True}, "fp16=True"),
    "compile": ({}, {"torch_compile": True}, "torch_compile=True"),
    "positions": ({"max_length": 4096}, {}, "max_length 4096 is above the model's max_position_embeddings 512"),
    "degree of the world": ({"degrees": [1, 4]}, {}, "degree 4 needs 4 ranks, but the run has 2"),
    "too long": ({"max_length": 40}, {}, "row 0 has 61 tokens, above max_length 40"),
    "too long for memory": ({"tokens_per_rank": 30}, {}, "above the memory limit: 60 on the largest group (tokens_per_rank 30"),
}


@pytest.mark.daily("too long for memory-None")
@pytest.mark.parametrize("only_rank", [None, 1])
@pytest.mark.parametrize("name", BAD_STARTS)
def test_bad_settings_are_refused_on_every_rank(ranks, rows, name: str, only_rank: int | None) -> None:
    config, arguments, message = BAD_STARTS[name]
    for found in ranks(2).run(start, rows, config, arguments, only_rank):
        # a rank whose own setting changes what data it takes is told that the ranks differ
        assert message in found or (only_rank == 1 and "differs between ranks" in found)
    # both ranks are still in step
    assert ranks(2).run(start, rows, {}, {}, None) == ["", ""]


def changed_setting() -> str:
    """The message of a start with a setting that rank 1 changed after its config was made."""
    config = LongContextConfig()
    if dist.get_rank() == 1:
        config.tokens_per_rank = math.nan
    with tempfile.TemporaryDirectory() as folder, pytest.raises(ValueError) as refused:
        LongContextTrainer(
            model=build_model(ModelCase()),
            args=training_arguments(folder),
            train_dataset=datasets.Dataset.from_list(random_rows([9] * 8)),
            longctx_config=config,
        )
    return str(refused.value)


def test_a_setting_changed_after_construction_stops_all_ranks(ranks) -> None:
    for message in ranks(2).run(changed_setting):
        assert "- tokens_per_rank is nan (float); give a whole number, or leave it out (on rank 1)" in message


def test_ranks_with_different_settings_are_refused_with_both_values(ranks, rows) -> None:
    for found in ranks(2).run(start, rows, {"tokens_per_rank": 100}, {"learning_rate": 0.5}, 1):
        assert "tokens_per_rank differs between ranks (rank 0: None, rank 1: 100)" in found
        assert "learning_rate differs between ranks (rank 0: '0.01', rank 1: '0.5')" in found


@pytest.mark.parametrize("long_sequences,expected", [("truncate", 40), ("split", 61)])
def test_long_sequences_are_cut_as_asked(ranks, rows, long_sequences: str, expected: int) -> None:
    config = {"max_length": 40, "long_sequences": long_sequences, "tokens_per_rank": 64}
    assert ranks(1).run(tokens_of_first_row, rows, config) == [expected]


def tokens_of_first_row(rows: list[dict[str, list[int]]], config: dict[str, Any]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(ModelCase(), rows, folder, config)
        index = trainer.get_train_dataloader().dataset.index
    return int(index.lengths[index.rows == 0].sum())


def test_evaluation_takes_any_set_and_refuses_a_bad_one(rows) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(ModelCase(dtype=torch.float32), rows, folder)
        model = build_model(ModelCase(dtype=torch.float32))
        # sets made on the spot may follow each other at one address
        for count in (3, 7, 5):
            loss = trainer.evaluate(datasets.Dataset.from_list(rows[:count]))["eval_loss"]
            assert loss == pytest.approx(reference_step(model, rows[:count])[0], abs=1e-5)
        bad = datasets.Dataset.from_list([rows[0], {"input_ids": [], "labels": []}])
        for _ in range(2):
            with pytest.raises(ValueError, match="eval_dataset row 1 has no tokens"):
                trainer.evaluate(bad)
        with pytest.raises(ValueError, match="eval_dataset row 1 has no tokens"):
            trainer.evaluate(bad.to_iterable_dataset())


def test_default_config_needs_nothing(rows) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(ModelCase(), rows, folder, {"report_steps": True, "timeline_steps": 3}, {"max_steps": 2})
        assert isinstance(trainer.longctx_config, LongContextConfig)
        metrics = trainer.train().metrics
        # the last log, with what it adds
        assert metrics | {"step": 2} == trainer.state.log_history[-1] and metrics["epoch"] == trainer.state.epoch


def differ_on_rank_one(rows: list[dict[str, list[int]]], what: str) -> str:
    """Rank 1 starts with something else; the message that this rank refuses with."""
    import torch.distributed as dist

    other = dist.get_rank() == 1
    case = ModelCase(dtype=torch.float32, seed=1 if other and what == "weights" else 0)
    arguments = {"adam_beta2": 0.5} if other and what == "settings" else {}
    if other and what == "rows":
        # these rows in another order, all of one length
        rows = rows[::-1]
    with tempfile.TemporaryDirectory() as folder:
        try:
            make_trainer(case, rows, folder, {}, arguments)
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8], ids=str)
def test_a_digest_of_weights_depends_on_every_value_and_on_nothing_else(dtype: torch.dtype) -> None:
    values = torch.randn(300, 7, generator=torch.Generator().manual_seed(0)).mul(50)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(values.to(dtype), requires_grad=False)
    before, threads = _weights_digest(module), torch.get_num_threads()
    # sums of floating-point numbers would depend on their order
    torch.set_num_threads(3)
    try:
        module.weight.data = module.weight.data.flip(0)
        assert _weights_digest(module) == before
    finally:
        torch.set_num_threads(threads)
    module.weight.data[100, 3] += 1
    assert _weights_digest(module) != before


@pytest.mark.daily("settings-adam_beta2 differs")
@pytest.mark.parametrize(
    "what,message",
    [("weights", "initial weights differs"), ("rows", "tokens of train_dataset differs"), ("settings", "adam_beta2 differs")],
)
def test_ranks_that_would_drift_apart_are_refused(ranks, what: str, message: str) -> None:
    for found in ranks(2).run(differ_on_rank_one, random_rows([16] * 8), what):
        assert message in found


@pytest.mark.daily(
    "ACCELERATE_DYNAMO_BACKEND-EAGER-dynamo_backend 'eager'",
    "WORLD_SIZE-4-the launcher started 4 processes, but the world size is 2, so that each would train alone",
)
@pytest.mark.parametrize(
    "variable,value,message",
    [
        ("ACCELERATE_MIXED_PRECISION", "bf16", "mixed_precision 'bf16' of the accelerate configuration differs"),
        ("ACCELERATE_DYNAMO_BACKEND", "EAGER", "dynamo_backend 'eager'"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "the accelerate configuration has a parallelism_config"),
        ("WORLD_SIZE", "4", "the launcher started 4 processes, but the world size is 2, so that each would train alone"),
    ],
)
def test_what_only_the_launcher_knows_is_refused(ranks, rows, variable: str, value: str, message: str) -> None:
    for found in ranks(2).run(start_under, rows, variable, value):
        assert message in found


def test_methods_that_would_never_be_called_are_refused(rows) -> None:
    class OwnLoss(LongContextTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 0

    class OwnStep(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            return 0

    class Behind(LongContextMixin, OwnStep):
        pass

    for cls, message in (
        (OwnLoss, "OwnLoss.compute_loss would never be called"),
        (Behind, "inherits training_step from a class after"),
    ):
        with tempfile.TemporaryDirectory() as folder, pytest.raises(ValueError, match=message):
            cls(model=build_model(ModelCase()), args=training_arguments(folder), train_dataset=datasets.Dataset.from_list(rows))


def plans_of_resumed_run(rows: list[dict[str, list[int]]], folder: str, accumulation: int) -> tuple[int, int]:
    """How many plans a run makes that resumes at step 4 of an epoch of 5 steps, and how many it runs."""
    arguments = {"max_steps": 5, "save_strategy": "steps", "save_steps": 4, "gradient_accumulation_steps": accumulation}
    arguments["per_device_train_batch_size"] = 8 // accumulation
    make_trainer(ModelCase(), rows, folder, {}, arguments).train()
    resumed = make_trainer(ModelCase(), rows, folder, {}, arguments)
    recorder = LossRecorder()
    recorder.attach(resumed)
    solved: list[int] = []
    original = resumed.longctx_run.source.solve
    resumed.longctx_run.source.solve = lambda step, *rest: solved.append(step) or original(step, *rest)
    resumed.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-4"))
    return len(solved), len(recorder.losses)


@pytest.mark.wide
@pytest.mark.parametrize("accumulation", [1, 2])
def test_resuming_plans_no_step_that_is_over(rows, tmp_path: Path, accumulation: int) -> None:
    assert plans_of_resumed_run(rows, str(tmp_path), accumulation) == (accumulation, accumulation)


class Writer:
    """Keeps what would be written for TensorBoard, by folder."""

    written: ClassVar[dict[str | None, list[str]]] = {}

    def __init__(self, log_dir: str | None = None) -> None:
        self._names = self.written.setdefault(log_dir, [])

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self._names.append(name)

    def add_text(self, name: str, text: str, step: int = 0) -> None:
        self._names.append(name)

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Curves(TensorBoardCallback):
    """TensorBoard's callback of transformers, which needs no package here."""

    def __init__(self) -> None:
        self._SummaryWriter, self.tb_writer, self.logging_dir = Writer, None, None


def test_curves_and_every_evaluation_go_into_one_folder_of_the_run(tmp_path: Path, rows) -> None:
    Writer.written.clear()
    trainer = make_trainer(
        ModelCase(), rows, str(tmp_path), {}, {"max_steps": 2, "logging_steps": 1}, eval_dataset=rows[:4], callbacks=[Curves()]
    )
    # evaluate first, like the recipe
    trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    ((folder, names),) = Writer.written.items()
    assert folder is not None and folder.startswith(str(tmp_path / "runs"))
    assert names.count("eval/loss") == 2 and names.count("train/loss") == 2
