"""The loader of a map-style set: only a rank's own rows, every sequence once over all ranks, plans ahead of batches."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from helpers.models.reference import random_rows, reference_step, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.ranks.rank_steps import whole
from helpers.trainers.stock_runs import quiet_config
from helpers.trainers.trainer_runs import make_trainer, training_arguments
from torch.utils.data import DataLoader

from hf_longctx import LongContextTrainer
from hf_longctx.hf.data.collator import held_pieces
from hf_longctx.hf.trainer.loaders import LongContextDataLoader

LENGTHS = [61, *(random.Random(0).choice([3, 5, 8, 13, 21, 34]) for _ in range(31))]
CONFIG = {"tokens_per_rank": 64}


class Watched(Sequence[dict[str, Any]]):
    """Rows that write down who reads them, also in a loader's workers, once `diary` is set."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.diary = rows, ""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        if self.diary:
            with Path(self.diary).open("a") as file:
                file.write(f"{number}\n")
        return self.rows[number]


def workers(count: int) -> dict[str, Any]:
    # by default a rank would start workers by a server of its own: seconds of imports
    return {"dataloader_num_workers": count, "dataloader_multiprocessing_context": "fork" if count else None}


def rows_read_on_rank(num_workers: int, folder: str) -> list[tuple[list[int], list[int]]]:
    """For every step of an epoch: the rows of this rank's spans; with them, once, what it read in all."""
    dataset = Watched(random_rows(LENGTHS))
    trainer = make_trainer(ModelCase(), dataset, folder, CONFIG, workers(num_workers))
    # reads the first row again for the columns that a line names
    trainer.longctx_run.sets.index("train_dataset", dataset)
    dataset.diary = str(Path(folder, f"rank{dist.get_rank()}"))
    own, everyone = [], []
    for batch in trainer.get_train_dataloader():
        step = batch["step"]
        own += [step.sequences[i] for i in held_pieces(step.plan, step.rank)]
        everyone += step.sequences
    read = [int(line) for line in Path(dataset.diary).read_text().split()]
    return [(sorted(own), sorted(read)), (sorted(everyone), [])]


@pytest.mark.wide
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_rank_reads_the_rows_of_its_own_spans_and_no_others(ranks, tmp_path: Path, num_workers: int) -> None:
    results = ranks(2).run(rows_read_on_rank, num_workers, str(tmp_path))
    for (own, read), (everyone, _) in results:
        assert read == own and 0 < len(read) < len(LENGTHS)
        assert everyone == list(range(len(LENGTHS)))
    # a row that both read is one that they share
    assert set(results[0][0][1]) | set(results[1][0][1]) == set(range(len(LENGTHS)))


def steps_trained_on_rank(num_workers: int) -> tuple[bool, list[tuple[int, ...]]]:
    """Whether the trainer runs over our loader as it is, and the sequences of its steps."""
    steps: list[tuple[int, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"max_steps": 4, **workers(num_workers)}
        trainer = make_trainer(ModelCase(), random_rows(LENGTHS), folder, CONFIG, arguments)
        original = trainer.training_step

        def training_step(model: Any, inputs: dict[str, Any], *rest: Any) -> Any:
            steps.append(inputs["step"].sequences)
            return original(model, inputs, *rest)

        trainer.training_step = training_step
        trainer.train()
        return type(trainer.callback_handler.train_dataloader) is LongContextDataLoader, steps


@pytest.mark.wide
@pytest.mark.parametrize("num_workers", [0, 2])
def test_accelerate_does_not_share_the_steps_out_again(ranks, num_workers: int) -> None:
    results = ranks(2).run(steps_trained_on_rank, num_workers)
    assert [is_ours for is_ours, _ in results] == [True, True]
    first, second = (steps for _, steps in results)
    assert first == second and len(first) == 4
    # 32 sequences are four steps of eight: one epoch, every sequence once
    assert sorted(i for step in first for i in step) == list(range(len(LENGTHS)))


@pytest.mark.daily("0-None")
@pytest.mark.parametrize("num_workers,prefetch", [(0, None), (1, 2), (2, 2)])
def test_the_next_plans_are_solved_while_a_step_runs(num_workers: int, prefetch: int | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"per_device_train_batch_size": 2, "dataloader_prefetch_factor": prefetch, **workers(num_workers)}
        trainer = make_trainer(ModelCase(), random_rows([5] * 32), folder, CONFIG, arguments)
        solved: list[int] = []
        original = trainer.longctx_run.source.solve

        def solve(step: int, *rest: Any) -> Any:
            plan = original(step, *rest)
            solved.append(step)
            return plan

        trainer.longctx_run.source.solve = solve
        batches = iter(trainer.get_train_dataloader())
        for step in range(5):
            next(batches)
            # plans that the workers were given, and the one that is solved while the step runs
            expected = list(range(step + 2 + num_workers * (prefetch or 0)))
            deadline = time.monotonic() + 5.0
            while solved != expected and time.monotonic() < deadline:
                time.sleep(0.01)
            assert solved == expected
        del batches


def test_workers_of_the_loader_are_other_processes() -> None:
    # the tests above rely on this
    with tempfile.TemporaryDirectory() as folder:
        dataset = Watched(random_rows([5] * 8))
        dataset.rows = [{**row, "pid": 0} for row in dataset.rows]
        trainer = make_trainer(ModelCase(), dataset, folder, CONFIG, workers(1))
        batches = iter(trainer.get_train_dataloader())
        assert batches._workers[0].pid != os.getpid()


class OwnLoader(LongContextTrainer):
    """Builds loaders over the sets by hand, as stock recipes do; calls ours only if asked to."""

    is_stock = True

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=2, collate_fn=list) if self.is_stock else super().get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return DataLoader(self.eval_dataset, batch_size=2) if self.is_stock else super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return iter(test_dataset) if self.is_stock else super().get_test_dataloader(test_dataset.select(range(3)))


class WrappedLoader(LongContextTrainer):
    """Passes on what an iterator of its own makes."""

    wrap: Any = staticmethod(list)

    def get_train_dataloader(self) -> Any:
        return self.wrap(super().get_train_dataloader())


def own_trainer(folder: Path, cls: type = OwnLoader) -> Any:
    rows = datasets.Dataset.from_list(random_rows([9, 5, 14, 7, 12, 6, 4, 10]))
    args, config = training_arguments(str(folder), max_steps=2, per_device_train_batch_size=4), quiet_config()
    model = build_model(ModelCase(dtype=torch.float32))
    return cls(model=model, args=args, train_dataset=rows, eval_dataset=rows, longctx_config=config)


def test_a_loader_of_the_users_own_is_refused_before_the_first_step(tmp_path: Path) -> None:
    trainer = own_trainer(tmp_path)
    with pytest.raises(ValueError, match="get_train_dataloader of OwnLoader returned a loader of its own"):
        trainer.train()
    assert trainer.state.global_step == 0
    with pytest.raises(ValueError, match="get_eval_dataloader returned a loader of its own"):
        trainer.evaluate()
    with pytest.raises(ValueError, match="get_test_dataloader returned a loader of its own"):
        trainer.predict(trainer.eval_dataset)
    trainer.is_stock = False
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    # the override's three rows, not all that were given
    assert len(trainer.predict(trainer.eval_dataset).predictions) == 3


def test_batches_that_no_plan_made_are_refused_by_their_columns(tmp_path: Path) -> None:
    trainer = own_trainer(tmp_path, WrappedLoader)
    trainer.train()
    trainer.wrap = lambda loader: [{"input_ids": [1], "labels": [1]} for _ in loader]
    with pytest.raises(
        ValueError, match=r"a batch of a loader of your own came \(input_ids, labels\), for which there is no plan"
    ):
        trainer.train()


def by_hand_on_rank(folder: str, config: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor], list[str]]:
    """Loss and gradients of a step of one batch that is run by hand, and refusals of other batches."""
    trainer = make_trainer(
        ModelCase(), random_rows([9, 5, 14, 7, 12, 6, 4, 10]), folder, config, {"train_sampling_strategy": "sequential"}
    )
    refusals = []
    for batch in ({"input_ids": torch.ones(1, 3)}, {}, [1], "text"):
        with pytest.raises(ValueError, match="for which there is no plan") as refused:
            trainer.training_step(trainer.model, batch)
        refusals.append(str(refused.value))
    (batch,) = trainer.get_train_dataloader()
    loss = trainer.training_step(trainer.model, batch)
    gradients = {name: whole(weight.grad).clone() for name, weight in trainer.model.named_parameters()}
    return float(loss), gradients, refusals


@pytest.mark.daily("replicated")
@pytest.mark.parametrize("config", [{}, {"parameters": "sharded"}], ids=["replicated", "sharded"])
def test_a_step_by_hand_has_the_loss_and_the_gradients_of_its_batch(ranks, tmp_path: Path, config: dict[str, Any]) -> None:
    expected, gradients = reference_step(build_model(ModelCase()), random_rows([9, 5, 14, 7, 12, 6, 4, 10]))
    for loss, found, refusals in ranks(2).run(by_hand_on_rank, str(tmp_path), config):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert max(relative_error(found[name], gradient) for name, gradient in gradients.items()) < 1e-9
        assert "(input_ids)" in refusals[0] and "(NoneType)" in refusals[1] and "(list)" in refusals[2]
