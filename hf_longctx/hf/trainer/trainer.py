"""`LongContextTrainer`: a `transformers.Trainer` that runs one plan per step. Read after `runtime/executor.py`.

The mixin builds and hands over: at start it checks everything on every rank and makes the group pool, the loaders yield
planned steps, `training_step` gives them to `StepExecutor`, `RunReport` logs. Parameters live as `PlacementMixin` and
`StagedMixin` say, which override a few private methods of `Trainer`; every override here is of a public one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.data.resume import DataRecorder
from hf_longctx.hf.models.activations import ActivationRuntime
from hf_longctx.hf.models.attention import num_attention_layers, patch_model
from hf_longctx.hf.models.cutting import cut_model, stage_model
from hf_longctx.hf.models.quantised import four_bit_layers
from hf_longctx.hf.models.routers import RouterRuntime
from hf_longctx.hf.planning.report import RunReport
from hf_longctx.hf.ranks.agreement import control_group, explain_lost_ranks, raise_together
from hf_longctx.hf.self_test.check import SelfTest
from hf_longctx.hf.start.arguments import (
    argument_problems,
    config_problems,
    evaluation_problems,
    override_problems,
    placement_problems,
)
from hf_longctx.hf.start.setup import PlanningSetup, check_setup, opening_line, plan_source, planning_setup
from hf_longctx.hf.start.stages import loaded_ranges, own_stage
from hf_longctx.hf.start.trl import read_columns, trainer_problems, trl_class
from hf_longctx.hf.trainer.data_mixin import PlannedDataMixin
from hf_longctx.hf.trainer.row_scores import RowScores, step_scores
from hf_longctx.hf.trainer.stage_mixin import StagedMixin, check_trained
from hf_longctx.plan.core.types import RankPlan
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.execution.checks import forward_only
from hf_longctx.runtime.execution.executor import PlanInputs, StepExecutor
from hf_longctx.runtime.execution.stage_model import StageModel, whole_model


class LongContextMixin(PlannedDataMixin, StagedMixin):
    """Turns a `Trainer` subclass into one that runs plans; put it in front: `class Mine(LongContextMixin, Trainer)`."""

    # whether evaluation runs under plans too, or as in `Trainer`
    _plans_evaluation = True
    _executor: StepExecutor | None
    _plans_of_step: list[Any]

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        longctx_config: LongContextConfig | None = None,
        **kwargs: Any,
    ) -> None:
        """As `Trainer`; `longctx_config` says how sequences are cut and spread.

        Raises ValueError on every rank, before any work, listing all settings, models and data that cannot be run.
        """
        config = longctx_config if longctx_config is not None else LongContextConfig()
        prepares_itself = trl_class(type(self)) is not None
        arguments = {"data_collator": data_collator, **kwargs}
        datasets = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        if prepares_itself:
            self._check_early(config, args, arguments)
        else:
            args = args if args is not None else TrainingArguments(output_dir="tmp_trainer")
            problems = self._argument_problems(config, model, args, arguments)
            setup = self._check_run(config, model, args, processing_class, datasets, problems)
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            processing_class=processing_class,
            **datasets,
            **kwargs,
        )
        if prepares_itself:
            setup = self._check_prepared(config, kwargs)
        self._start_planning(setup)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """As `Trainer.train`; refuses a checkpoint after which samples would be repeated or skipped."""
        # a training that stopped inside a step left gradients in the executor's buffers
        self._executor = None
        self._recorder.resume(resume_from_checkpoint, self.args)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._recorder.resume(None, self.args)
            self._activations.close()
            self._routers.close()

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> tuple[list[Any], int]:
        """The plans of one optimizer step and the number of their label tokens over all ranks."""
        with self._explained():
            batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
            self._plans_of_step = batches
            return batches, self._sum_over_ranks(sum(batch["num_label_tokens"] for batch in batches))

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Runs one plan of an optimizer step; returns its part of the step's mean loss, the same on every rank.

        Parts add up to the mean over the label tokens of all ranks and plans; the last plan reduces the gradients of all.
        """
        assert isinstance(num_items_in_batch, int)
        model.train()
        self._switch_optimizer("train")
        plan = inputs["step"].plan
        rank_plan = plan.for_rank(self._pool.rank)
        executor = self._training_executor()
        engine = self._activations.engine(executor.model, rank_plan)
        with self._explained():
            if len(self._plans_of_step) > 1:
                # experts are balanced over all of them, before the first of them runs
                executor.route([(b["step"].plan.for_rank(self._pool.rank), b["chunks"]) for b in self._plans_of_step], engine)
            self._plans_of_step = []
            reduce, predicted_bytes = self.accelerator.sync_gradients, plan.estimate.peak_bytes
            result = executor.run(rank_plan, inputs["chunks"], num_items_in_batch, reduce, predicted_bytes, engine)
        self._report.step_done(plan, result)
        empty_steps = self.args.torch_empty_cache_steps
        if empty_steps is not None and self.state.global_step % empty_steps == 0:
            clear_device_cache()
        return result.loss

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The mean cross-entropy over all label tokens of the set (`eval_loss`) and its exponential, under plans."""
        try:
            return self._evaluate_plans(dataloader, metric_key_prefix)
        finally:
            # within a training its steps go on under the same engine
            if not self.is_in_train:
                self._activations.close()
                self._routers.close()

    def _evaluate_plans(self, dataloader: DataLoader[Any], metric_key_prefix: str) -> EvalLoopOutput:
        self.callback_handler.eval_dataloader = dataloader
        loss_sum, num_label_tokens, num_samples = 0.0, 0, 0
        with self._explained():
            for executor, forwards, batch in self._planned_forwards(dataloader):
                loss_sum += float(executor.evaluate(*forwards))
                num_label_tokens += self._sum_over_ranks(batch["num_label_tokens"])
                num_samples += len(batch["step"].sequences)
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        loss = loss_sum / max(num_label_tokens, 1)
        metrics = {f"{metric_key_prefix}_loss": loss, f"{metric_key_prefix}_perplexity": math.exp(min(loss, 700.0))}
        no_predictions: Any = None
        return EvalLoopOutput(predictions=no_predictions, label_ids=None, metrics=metrics, num_samples=num_samples)

    def score_tokens(self, dataset: Any, name: str) -> RowScores:
        """The loss of every label token of a set, of those that this rank holds under plans; collective over all ranks.

        `name` is how messages call the set. Long rows are cut as those of an evaluation set.
        """
        dataloader = self._eval_loader(name, dataset)
        rows = dataloader.dataset.index.rows  # type: ignore[attr-defined]
        parts = []
        try:
            with self._explained():
                for executor, forwards, batch in self._planned_forwards(dataloader):
                    scores = executor.score(*forwards)
                    parts.append(step_scores(batch["step"], batch["chunks"], scores, rows))
        finally:
            if not self.is_in_train:
                self._activations.close()
                self._routers.close()
        return RowScores.joined(parts)

    def _planned_forwards(
        self, dataloader: DataLoader[Any]
    ) -> Iterator[tuple[StepExecutor, tuple[RankPlan, PlanInputs, ActivationEngine | None], dict[str, Any]]]:
        """For every planned step of a set: the executor, what it takes for the step's forwards, and the batch."""
        model = self._placed_model()
        model.eval()
        self._switch_optimizer("eval")
        executor = StepExecutor(self._executed_stage(model), self._pool, self.args.device, routers=self._routers.balance(model))
        for batch in dataloader:
            # nothing waits for a backward, so nothing is asked of the host
            rank_plan = forward_only(batch["step"].plan.for_rank(self._pool.rank))
            yield executor, (rank_plan, batch["chunks"], self._activations.engine(model, rank_plan)), batch

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: plans return losses, not logits."""
        raise ValueError("predict() is not supported yet; use evaluate(), or load the saved model with transformers")

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As `Trainer`, with the means of the steps since the last log: seconds, tokens per second, padding."""
        if "loss" in logs:
            logs = {**logs, **self._report.take_metrics()}
        super().log(logs, start_time)

    def _argument_problems(
        self, config: LongContextConfig, model: Any, args: TrainingArguments, arguments: dict[str, Any]
    ) -> list[str]:
        problems = argument_problems(args, arguments) + trainer_problems(type(self), args, config)
        return problems + placement_problems(model, config, args, arguments) + evaluation_problems(args)

    def _check_early(self, config: LongContextConfig, args: TrainingArguments | None, arguments: dict[str, Any]) -> None:
        """What is wrong with the arguments of a trainer that makes its model and dataset ready itself, before it does."""
        self._meet(config)
        self._stage = None
        if args is None:
            args = TrainingArguments(output_dir="tmp_trainer")
        problems = argument_problems(args, arguments) + trainer_problems(type(self), args, config)
        problems += override_problems(type(self), LongContextMixin, self._plans_evaluation)
        raise_together(problems, self._control)

    def _check_prepared(self, config: LongContextConfig, arguments: dict[str, Any]) -> PlanningSetup:
        """As `_check_run`, of the model, the arguments and the sets that such a trainer has made."""
        self.train_dataset = read_columns(type(self), self.train_dataset)
        self.eval_dataset = read_columns(type(self), self.eval_dataset)
        model: Any = self.model
        problems = self._argument_problems(config, model, self.args, arguments)
        if loaded_ranges(model) is not None:
            problems.append("a model of load_pipeline_stage is not tested with trainers of TRL; pass the whole model")
        if four_bit_layers(model):
            problems.append("weights of four bits are not tested with trainers of TRL; use LongContextTrainer")
        datasets = {"train_dataset": self.train_dataset, "eval_dataset": self.eval_dataset}
        return self._check_run(config, model, self.args, self.processing_class, datasets, problems)

    def _meet(self, config: LongContextConfig) -> None:
        """Waits for all ranks, every time, and makes the group on which they agree, once."""
        self.longctx_config = config
        # ranks may come late from loading a model or tokenising: wait patiently before the short time-outs begin
        PartialState().wait_for_everyone()
        if "_control" not in vars(self):
            self._control = control_group(config.collective_timeout_s)

    def _check_run(
        self,
        config: LongContextConfig,
        model: Any,
        args: TrainingArguments,
        processing_class: Any,
        datasets: dict[str, Any],
        problems: list[str],
    ) -> PlanningSetup:
        """Checks everything on every rank and switches the model's attention; nothing of `Trainer` is needed yet.

        `problems` are those already found in the arguments. Raises ValueError on every rank, listing all problems.
        """
        self._meet(config)
        problems = problems + config_problems(config, args)
        problems += override_problems(type(self), LongContextMixin, self._plans_evaluation)
        degrees = check_setup(config, model, args, processing_class, problems, self._control)
        setup = planning_setup(config, model, args, degrees, self._control, datasets.get("train_dataset"))
        self._prepare_data(setup, model, args, datasets)
        patch_model(model)
        self._num_attention_layers = num_attention_layers(model)
        # before the model is cut or placed
        self._self_test = SelfTest.of(model, setup, args.device, args.bf16, self._control) if config.self_test else None
        self._stage = self._own_stage(setup, model)
        if self._stage is not None:
            check_trained(self._stage, self._control)
        return setup

    def _own_stage(self, setup: PlanningSetup, model: Any) -> StageModel | None:
        """The pipeline stage of this rank, to which `model` is cut; None for a run without a pipeline."""
        if setup.num_stages == 1:
            return None
        stage = own_stage(setup.num_stages)
        if loaded_ranges(model) is None:
            cut_model(model, setup.ranges, stage)
        return stage_model(model, setup.ranges, stage)

    def _start_planning(self, setup: PlanningSetup) -> None:
        """Makes process groups, source of plans and report, once `Trainer` is built. Collective over all ranks."""
        self._executor = None
        # the groups of shards before the groups of sequences
        self._prepare_mesh()
        self._source = plan_source(self.longctx_config, setup, self._control, self.args.device)
        self._pool = self._source.pool
        budget = setup.planner.activations
        self._activations = ActivationRuntime(
            self.args.device,
            budget.host_bytes if budget is not None else 0,
            self._source.copies_take,
            has_head=self._pool.stage == setup.num_stages - 1,
        )
        self._routers = RouterRuntime(self.args.device)
        # of the present optimizer step, until its first plan runs
        self._plans_of_step = []
        opening = opening_line(setup, self.args, self.model)
        if (test := self._self_test) is not None:
            # its copies go with it
            self._self_test = None
            fp32_gradients = self.longctx_config.fp32_gradients
            passed = test.run(self._pool, self._mesh, self.args.device, fp32_gradients, self._sum_over_ranks)
            opening = f"{opening}\n{passed}"
        self._recorder = DataRecorder()
        # before the report, which lets the other ranks go on after a checkpoint
        self.add_callback(self._recorder)
        self._report = RunReport(self.longctx_config, self._source, opening)
        self.add_callback(self._report)

    def _training_executor(self) -> StepExecutor:
        """The executor of the placed model; kept while that stays the same, since it owns gradient buffers."""
        model = self._placed_model()
        if self._executor is None or self._executor.model is not model:
            fp32_gradients = self.longctx_config.fp32_gradients
            routers = self._routers.balance(model)
            self._executor = StepExecutor(
                self._executed_stage(model), self._pool, self.args.device, fp32_gradients, routers=routers
            )
        return self._executor

    def _executed_stage(self, model: nn.Module) -> StageModel:
        return whole_model(model, self._num_attention_layers) if self._stage is None else self._stage

    def _explained(self) -> AbstractContextManager[None]:
        timeout_s = self.longctx_config.collective_timeout_s
        return explain_lost_ranks(self.state.global_step + 1, self._pool.rank, timeout_s)

    def _switch_optimizer(self, mode: str) -> None:
        """Schedule-free optimizers hold two sets of weights and have the methods `train` and `eval`."""
        switch = getattr(self.optimizer, mode, None)
        if callable(switch):
            switch()

    def _sum_over_ranks(self, count: int) -> int:
        """The sum of a host-side integer over all ranks, on the control group: no device is involved."""
        if self._control is None:
            return count
        total = torch.tensor(count, dtype=torch.int64)
        dist.all_reduce(total, group=self._control)
        return int(total)


class LongContextTrainer(LongContextMixin, Trainer):
    """`transformers.Trainer` under one plan per optimizer step.

    Example:

        trainer = LongContextTrainer(
            model=model,
            args=TrainingArguments(output_dir="out", per_device_train_batch_size=16),
            train_dataset=dataset,  # rows with input_ids, and labels if they differ
            longctx_config=LongContextConfig(max_length=32768, long_sequences="split"),
        )
        trainer.train()
    """
