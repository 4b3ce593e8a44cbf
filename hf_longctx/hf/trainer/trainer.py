"""`LongContextTrainer`: a `transformers.Trainer` that runs one plan per step. Read after `runtime/execution/executor.py`.

`start_run` checks everything on every rank and builds the run: process groups, plan source, reports (`run/run.py`). Loaders
yield planned steps (`loaders.py`), `training_step` passes each to `StepExecutor`, and `RunReport` logs the results. A
`Placement` says how parameters live on the ranks (`run/placement.py`). This module overrides public methods of `Trainer` and
those about data; `ParameterMixin` overrides private ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.data.collator import PlannedDataset
from hf_longctx.hf.data.resume import sequences_per_step
from hf_longctx.hf.data.streams.planned_stream import PlannedStream
from hf_longctx.hf.data.streams.sources import is_stream, whole
from hf_longctx.hf.log_probs.trl_methods import LogProbMixin
from hf_longctx.hf.log_probs.two_passes import LoaderCheck, TwoPasses
from hf_longctx.hf.models.dropout import noise_problems
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.heads import inner_model
from hf_longctx.hf.models.kernel_places import without_liger
from hf_longctx.hf.models.towers import freeze_towers
from hf_longctx.hf.ranks.agreement import START, joint_call, raise_together
from hf_longctx.hf.ranks.exit_message import RefusedRun, naming_errors
from hf_longctx.hf.ranks.launch import separate_runs
from hf_longctx.hf.ranks.stopping import OrderlyStop, without_jit_checkpoint
from hf_longctx.hf.rules.arguments import (
    ASYNC_SAVE,
    KIND_OF_MODEL,
    KINDS,
    OF_LOGITS,
    OVERRIDES,
    TOGETHER,
    argument_problems,
    likeliest_form,
    run_problems,
    set_loss_problems,
    values_at_start,
)
from hf_longctx.hf.rules.collators import Collation, forward_columns
from hf_longctx.hf.rules.hooks import hook_problems
from hf_longctx.hf.rules.models import PADDING, align_padding
from hf_longctx.hf.rules.rule import Facts, refusals
from hf_longctx.hf.rules.training_arguments import hidden_from_trainer
from hf_longctx.hf.rules.trl import (
    OF_TRL,
    counts_tokens,
    generates,
    is_planned,
    is_scored,
    read_columns,
    scored_temperature,
    takes_metrics,
    trainer_problems,
    trl_class,
    unprepared_problems,
)
from hf_longctx.hf.rules.user_code import reads_between_forwards
from hf_longctx.hf.run.run import Run, RunRequest, meet, start_run
from hf_longctx.hf.run.saver import Saver
from hf_longctx.hf.run.sets import TEST_SET, chosen_evaluation_set, evaluation_set_problems, named_sets
from hf_longctx.hf.run.steps import OWN_LOADER, Forwards, Refusal, StepRunner, check_planned, start_two_passes, train_loss
from hf_longctx.hf.start.losses import collator_of_own_problems, model_loss_problems, smoother_problems
from hf_longctx.hf.trainer.loaders import eval_loader, train_loader
from hf_longctx.hf.trainer.parameters import ParameterMixin, of_all_ranks
from hf_longctx.hf.trainer.predictions import TokenMetrics, classified, evaluated
from hf_longctx.hf.trainer.row_scores import RowScores, step_scores
from hf_longctx.hf.trainer.start import StartMixin
from hf_longctx.runtime.core.loss import LabelSmoothing, LossOfLogProbs, TokenLoss, ValueLoss
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.parameters.sharded import layer_shards


class LongContextMixin(StartMixin, LogProbMixin, ParameterMixin):
    """Turns a `Trainer` subclass into one that runs plans; name it first: `class Mine(LongContextMixin, Trainer)`."""

    # true: evaluation runs under plans too; false: it runs as in `Trainer`
    plans_evaluation = True
    # runs the plans of the present training
    _steps: StepRunner
    # the collator that `Trainer` made, or that was checked; plans do not call it
    _first_collator: Any = None
    # the stream that the present training reads, and the iteration of it that is at its end
    _stream: PlannedStream | None = None
    _used_up: Any = None
    # the run of the reference model, for a loss of log-probabilities that has one
    _reference: Run | None = None
    # losses of the plans of the present step, for a loss of log-probabilities
    _counted: list[Tensor]

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
        token_loss: TokenLoss | None = None,
        teacher: Any = None,
        **kwargs: Any,
    ) -> None:
        """Builds a `Trainer` under plans; `longctx_config` says how sequences are cut and spread.

        token_loss: the loss of a token, in place of cross-entropy; see `TokenLoss`. teacher: a frozen model with the same tokens,
        whose distribution the model learns, as `distillation_beta` and other settings of `longctx_config` say.
        Raises ValueError on every rank, before any work, listing all settings, models and data that cannot be run.
        """
        named = {"args": args, "longctx_config": longctx_config, "data_collator": data_collator, "teacher": teacher, **kwargs}
        if found := refusals(KINDS, Facts(given=named)):
            raise RefusedRun.of(found)
        config = longctx_config if longctx_config is not None else LongContextConfig()
        taught_by = None if teacher is None else ModelFacts.of(teacher)
        sets = named_sets(train_dataset, eval_dataset)
        given = {
            "processing_class": processing_class,
            "train_dataset": train_dataset,
            "eval_dataset": eval_dataset,
            **kwargs,
        }
        if data_collator is not None:
            # some trainers of TRL take none
            given["data_collator"] = data_collator
        if trl_class(type(self)) is None and args is None:
            args = TrainingArguments(output_dir="tmp_trainer")
        config, problems = self._translated(config, args)
        problems += evaluation_set_problems(eval_dataset)
        with joint_call(START, config.collective_timeout_s), hidden_from_trainer(args), without_jit_checkpoint(args):
            if trl_class(type(self)) is None:
                assert args is not None
                model_init = given.pop("model_init", None)
                unusable: list[str] = []
                model = self._first_model(model, model_init, args, unusable)
                control = meet(config, args, unusable)
                self._given = {"data_collator": data_collator, **given}
                facts, was_open = ModelFacts.of(model), config.stages is None
                config = self._open_stages(config, facts, args, self._given, control)
                problems += run_problems(type(self), config, facts, args, self._given)
                collation = Collation(data_collator, facts.head_kind, forward_columns(facts.base, args))
                request = RunRequest(config, facts, args, processing_class, problems, sets, control, token_loss)
                has_open_stages = was_open and config.may_have_stages
                request = replace(request, collation=collation, has_open_stages=has_open_stages)
                self._start(replace(request, teacher=taught_by, model_init=model_init))
                try:
                    with naming_errors(type(self).__name__):
                        super().__init__(model=model, args=args, **given)
                except BaseException:
                    self.longctx_run.close()
                    raise
                self.model_init = model_init
            else:
                self.longctx_config = config
                problems += unprepared_problems(type(self), args, sets, kwargs)
                if not isinstance(model, str):
                    # TRL loads a model by its name
                    problems += refusals(KIND_OF_MODEL, Facts(model=model))
                control = self._check_early(args, {"data_collator": data_collator, **kwargs}, problems)
                # a trainer of TRL makes the model and the sets ready itself
                with naming_errors(type(self).__name__):
                    super().__init__(model=model, args=args, **given)
                request = self._request_of_prepared({"data_collator": data_collator, **kwargs}, control, token_loss)
                self._start(replace(request, teacher=taught_by))
                if config.parameters == "auto" and self.place_model_on_device:
                    self._move_model_to_device(cast(nn.Module, self.model), self.args.device)
                if is_scored(type(self)):
                    self._start_two_passes()
        self._first_collator = self.data_collator
        self._report()
        self.longctx_run.report.console.take_over(self)
        self._log_to_output_dir()
        self._log_settings()

    @of_all_ranks("training")
    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Trains as `Trainer.train` does, from the newest complete checkpoint for `resume_from_checkpoint=True`.

        Refuses a checkpoint that is not whole, one after which samples would be repeated or skipped, and arguments or a loss that
        were changed since the start and would not be obeyed.

        At SIGTERM, SIGUSR1, SIGHUP or Ctrl-C, on any rank, it finishes the step, saves once and returns; then `stopped_by` names
        the signal. A second signal ends the process at once. Raises ValueError if another job uses `output_dir`.
        """
        self._begin_anew(kwargs.get("trial", next(iter(args), None)))
        self._check_settings()
        self._check_loss()
        self._check_code()
        # a training that stopped inside a step has left gradients in the executor's buffers
        self._steps = self._new_steps()
        # without images in rows, no tower runs
        thaw = (lambda: None) if self.longctx_run.sets.has_media("train_dataset") else freeze_towers(cast(nn.Module, self.model))
        # the model's embedding adds noise by token instead
        alpha, self.neftune_noise_alpha = self.neftune_noise_alpha, None
        # the fresh model is there already
        model_init: Any = self.model_init
        vars(self)["model_init"] = None
        try:
            with (
                self._stop.during_training(self.args, lambda: self.state.global_step),
                self._agreeing(self._stop, self.longctx_run.control),
                self._saver.ending(),
                self.longctx_run.report.console.above_bars(),
                without_liger(self.args),
                hidden_from_trainer(self.args) as self._users_values,
                self._telling_trackers(),
            ):
                self._saver.open(self.callback_handler.callbacks)
                run = self.longctx_run
                chosen = self._choose_checkpoint(resume_from_checkpoint)
                if chosen is not None and not self.args.ignore_data_skip:
                    run.recorder.resume(Path(chosen), self._saver.starts_anew("data"))
                self._steps.count_on_from(chosen)
                return super().train(chosen, *args, **kwargs)
        finally:
            self.neftune_noise_alpha, self.model_init = alpha, model_init
            self._used_up = None
            if self._stream is not None:
                self._stream.stop()
            self.longctx_run.recorder.resume(None)
            self._release_models()
            thaw()

    @property
    def stopped_by(self) -> str:
        """The signal that stopped the last training before its end, such as "SIGTERM"; "" if it ran to its end."""
        return self._stop.stopped_by

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Makes the loader of planned steps; accelerate must not shard it again, since every rank draws the same steps.

        A trainer of TRL that keeps its own batches keeps its own loader.
        """
        if is_scored(type(self)):
            return super().get_train_dataloader()
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset; pass one to the trainer")
        loader = train_loader(self.longctx_run, self.train_dataset, self._steps_done)
        self._stream, self._used_up = loader.dataset if isinstance(loader.dataset, PlannedStream) else None, None
        return loader

    def _init_training_state(self, max_steps: Any, num_update_steps_per_epoch: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Begins in the epoch of the resumed stream; `Trainer` cannot know where the epochs of a stream ended."""
        begin = super()._init_training_state(max_steps, num_update_steps_per_epoch, *args, **kwargs)
        if self._stream is None:
            return begin
        stream, num_skipped = self._stream, self._stream.num_skipped
        if num_skipped // self.args.gradient_accumulation_steps >= num_update_steps_per_epoch:
            # no step of this epoch is left, as only a stream with a length can tell
            stream.leave_epoch()
            return stream.epochs_ended + 1, 0
        return stream.epochs_ended, num_skipped

    def _steps_done(self) -> int:
        """Counts the optimizer steps whose batches the loader of a resumed training leaves out.

        None outside of a training, and none while the state is still that of the training before.
        """
        is_resumed = self._saver.is_resumed or is_stream(self.train_dataset)
        return self.state.global_step if self.is_in_train and is_resumed else 0

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Makes the loader of an evaluation set, in its order; a set given here is checked like those given at the start.

        eval_dataset: a set, or the name of one if the trainer has a dict of them.
        """
        if is_scored(type(self)):
            return super().get_eval_dataloader(eval_dataset)
        given, known = self._columns_read(eval_dataset), self._columns_read(self.eval_dataset)
        name, dataset = chosen_evaluation_set(given, known)
        # metrics of a classifier need the logits of all rows, also of those without a label
        marks = self.longctx_run.task.kind != "next_token" and self.compute_metrics is not None
        return eval_loader(self.longctx_run, name, dataset, marks)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Makes the loader of a set to predict, in its order; its rows need no labels if the model classifies."""
        if is_scored(type(self)):
            return super().get_test_dataloader(test_dataset)
        marks = self.longctx_run.task.kind != "next_token"
        return eval_loader(self.longctx_run, TEST_SET, whole(self._columns_read(test_dataset)), marks)

    def _columns_read(self, dataset: Any) -> Any:
        """Reduces a dataset, or a dict of several, to the columns that the run's collator reads."""
        return read_columns(type(self), dataset, self.longctx_run.sets.collation.reads_all)

    def _take_loader(self, loader: Any) -> None:
        """Notes how a training's loader reads a step, when the training begins, since steps may be planned again.

        Raises ValueError for a loader of the user's own, whose batches have no plans.
        """
        if is_scored(type(self)) or not isinstance(loader, DataLoader) or isinstance(loader.dataset, PlannedStream):
            return
        if isinstance(rows := loader.dataset, PlannedDataset):
            self._steps.read = lambda step: loader.collate_fn([rows[step]])
            return
        raise ValueError(
            f"get_train_dataloader of {type(self).__name__} returned a loader of its own ({type(loader).__name__} over "
            f"{type(loader.dataset).__name__}), for whose batches there are no plans; {OWN_LOADER}"
        )

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Counts the sequences of one optimizer step over all ranks; with tokens_per_step, returns their mean number.

        The lengths of a stream are unknown, so for a stream it is the number without a token budget.
        """
        if is_scored(type(self)):
            return super().get_total_train_batch_size(args)
        if self.longctx_config.tokens_per_step is None or is_stream(self.train_dataset):
            return sequences_per_step(args)
        lengths = self.longctx_run.sets.index("train_dataset", self.train_dataset).lengths
        return max(1, round(self.longctx_config.tokens_per_step / float(lengths.mean())))

    @property
    def longest_sequence(self) -> int:
        """The most tokens that a sequence may have; longer rows are errors, or are cut."""
        return self.longctx_run.sets.longest_sequence

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """The plans of one optimizer step, and the number of their label tokens over all ranks, or the sum of their weights."""
        if epoch_iterator is self._used_up:
            # `Trainer` asks once for every step of the training, since it does not know how long an epoch of a stream is
            return [], None
        self._steps.forget_step()
        with self._explained():
            batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
            if not batches:
                self._used_up = epoch_iterator
                return batches, num_items
            if self._two_passes is not None:
                self._two_passes.forget()
                # ranks agree whether to stop
                self._begin_step([])
                return batches, num_items
            total_weight, self.longctx_run.report.num_labels = self._begin_step(batches)
            # a stream may end inside a step, whose optimizer then takes the batches that are there, as at the end of a sized set
            nothing = {"input_ids": torch.zeros(1, 0, dtype=torch.int64)}
            return [nothing] * (num_batches - len(batches)) + batches, total_weight

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Runs one plan of an optimizer step; returns its part of the step's mean loss, the same on every rank.

        Parts add up to the mean over the label tokens of all ranks and plans; the last plan reduces the gradients of all. Raises
        FloatingPointError, on every rank, before an optimizer could use a loss or gradients that are not finite.

        A loss of log-probabilities, of a trainer of TRL, is that of the batches which all ranks loaded, as a mean over ranks.
        """
        if self._two_passes is not None:
            return self._step_in_two_passes(self._two_passes, model, inputs, num_items_in_batch)
        if num_items_in_batch is not None and _is_nothing(inputs):
            return torch.zeros((), device=self.args.device)
        if num_items_in_batch is None or not isinstance(inputs, Mapping) or "step" not in inputs:
            # by hand: a batch that no training has counted
            check_planned([inputs or None])
            self._steps.forget_step()
            num_items_in_batch, _ = self._begin_step([inputs])
        model.train()
        self._switch_optimizer("train")
        loss = self._run_plan(inputs, float(num_items_in_batch), self.accelerator.sync_gradients)
        if not self.is_in_train:
            self._release_models()
        return loss

    def _begin_step(self, batches: list[dict[str, Any]]) -> tuple[float, int]:
        """Begins an optimizer step; returns the sum of its label tokens' weights and their number over all ranks. Collective."""
        model, step = cast(nn.Module, self.model), self.state.global_step
        self._steps.begin_step(model, batches, step, self.args.seed)
        return self._steps.label_sums(model, batches, step + 1, self._stop, self._finish_saving)

    def _step_in_two_passes(self, passes: TwoPasses, model: nn.Module, inputs: Any, num_items: Any) -> Tensor:
        """Runs the trainer's own step up to log-probabilities, which plans then train; returns the mean loss."""
        # made here, since inside a forward FSDP2 keeps weights gathered
        executor = self._steps.executor(self._placed_model())
        self._counted = []

        def compute() -> Tensor:
            own_loss: Tensor = super(LongContextMixin, self).training_step(model, inputs, num_items)
            self._free_reference()
            return own_loss

        def train(batch: dict[str, Any], is_last: bool, part: Tensor) -> None:
            self._counted.append(self._run_plan(batch, 1.0, is_last and self.accelerator.sync_gradients, part))

        with self._explained():
            own_loss = train_loss(self.longctx_run, passes, executor, compute, train)
        return self._counted[-1].to(own_loss.dtype)

    def _free_reference(self) -> None:
        """Frees weights that a forward of the reference model has gathered."""
        if self._reference is not None:
            self._reference.placement.prepare(self._reference.stage.model)

    def _train_by_token(self, batch: dict[str, Any], loss: LossOfLogProbs) -> None:
        """Trains one batch of a step by a loss of its own, whose mean over ranks is the mean loss."""
        self._free_reference()
        executor = self._steps.executor(self._placed_model())
        before, executor.token_loss = executor.token_loss, loss
        try:
            self._counted.append(self._run_plan(batch, self.longctx_run.pool.num_ranks, self.accelerator.sync_gradients))
        finally:
            executor.token_loss = before

    def _run_plan(self, inputs: dict[str, Any], total_weight: float, reduce: bool, loss: Tensor | None = None) -> Tensor:
        """Runs a plan forward and backward; returns the loss as `Trainer` adds it up.

        reduce: the plan is the last of its optimizer step. loss: the loss to report in place of that of the tokens.
        """
        model, early = self._placed_model(), self._early_updates() if reduce else None
        dataset = self.train_dataset if self._two_passes is None else None
        # internal: nothing of it is uploaded
        refusal = Refusal(self.state.global_step + 1, dataset, partial(self.save_model, _internal_call=True))
        with self._explained():
            counted = self._steps.run_plan(model, inputs, total_weight, reduce, refusal, early, loss)
        empty_steps = self.args.torch_empty_cache_steps
        if empty_steps is not None and self.state.global_step % empty_steps == 0:
            clear_device_cache()
        return counted

    @of_all_ranks("evaluation")
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        return super().evaluate(*args, **kwargs)

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Computes, under plans, the mean loss over all label tokens of the set (`eval_loss`), as training does.

        Weights of tokens and `token_loss` count as in training. `eval_perplexity`, its exponential, is there only if the loss is
        the mean cross-entropy. `eval_mean_token_accuracy` and `eval_entropy` are means over tokens that are learnt.
        `compute_metrics` gets the likeliest token, the log-probability and the entropy of every label token; see
        `token_predictions`.

        A trainer of TRL with a loss of log-probabilities keeps its own loop and metrics; its forwards run under plans. A model
        that classifies has its loss, and the metrics of `compute_metrics`, which gets the logits of all rows.
        """
        if self._two_passes is not None:
            with self._evaluating():
                self._placed_model()
                return super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        _check_planned_set(dataloader, "get_eval_dataloader")
        if self.longctx_run.task.kind != "next_token":
            return self._classified(dataloader, metric_key_prefix)
        only_loss = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        metrics, num_samples, _ = self._evaluated(dataloader, metric_key_prefix, only_loss)
        no_predictions: Any = None
        return EvalLoopOutput(predictions=no_predictions, label_ids=None, metrics=metrics, num_samples=num_samples)

    @of_all_ranks("scoring")
    def score_tokens(self, dataset: Any, name: str) -> RowScores:
        """Scores the label tokens of a set under plans; returns those that this rank holds. Collective over all ranks.

        `name`: the name of the set in messages. Long rows are cut like those of an evaluation set. Losses are cross-entropy,
        without weights, whatever loss is trained.
        """
        dataloader = eval_loader(self.longctx_run, name, self._columns_read(dataset))
        index = dataloader.dataset.index  # type: ignore[attr-defined]
        parts = []
        with self._evaluating():
            for executor, forwards, batch in self._planned_forwards(dataloader):
                parts.append(step_scores(batch["step"], batch["chunks"], executor.score(*forwards), index))
        return RowScores.joined(parts)

    @of_all_ranks("prediction")
    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Scores every row of a set under plans, without logits. Collective over all ranks.

        `predictions` is a structured array with one entry per row, equal on all ranks: `log_prob` (the sum of the
        log-probabilities of the row's label tokens, by cross-entropy), `num_tokens` (how many these are), `num_right` (those that
        were the likeliest), and `entropy` (the sum over them). Metrics are those of an evaluation.

        `predictions` of a model that classifies are its logits, as from a stock trainer.
        """
        if self._two_passes is not None:
            if self.longctx_run.task.kind != "document":
                raise ValueError(
                    f"predict() of {type(self).__name__} would return whole logits, which plans never make; use evaluate()"
                )
            # the trainer's own loop, whose forwards run under plans, returns the rewards
            return super().predict(test_dataset, ignore_keys, metric_key_prefix)
        dataloader = self.get_test_dataloader(test_dataset)
        _check_planned_set(dataloader, "get_test_dataloader")
        if self.longctx_run.task.kind != "next_token":
            output = self._classified(dataloader, metric_key_prefix)
            self.control = self.callback_handler.on_predict(self.args, self.state, self.control, output.metrics)
            return PredictionOutput(output.predictions, output.label_ids, output.metrics)
        only_loss = self.args.prediction_loss_only
        metrics, _, scores = self._evaluated(dataloader, metric_key_prefix, only_loss, wants_scores=True)
        rows: Any = dataloader.dataset
        predictions = scores.of_rows(len(rows.dataset), self.longctx_run.control)
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, metrics)
        return PredictionOutput(predictions=predictions, label_ids=None, metrics=metrics)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs as `Trainer` does, and adds means over the steps since the last log: seconds, tokens per second, padding."""
        # in place, as `Trainer` adds the epoch: the metrics of a training are what it logs last
        if "loss" in logs:
            logs |= {**self.longctx_run.report.take_metrics(), **self._steps.metrics()}
        if "train_loss" in logs:
            # TRL's last entry has what no earlier one had
            rest = self.longctx_run.report.take_metrics() if is_planned(type(self)) else {}
            logs |= {name: rest[name] for name in OF_TRL if name in rest} | self._steps.total_metrics()
        super().log(logs, start_time)

    def _check_loss(self) -> None:
        """Raises ValueError on every rank if a loss was set that plans would never call, or noise that they would not add.

        Also if another token has become padding since documents' labels were placed.
        """
        run = self.longctx_run
        problems = set_loss_problems(self) + noise_problems(self.neftune_noise_alpha, run.noise_alpha)
        model: Any = self.model
        align_padding(run.task.kind, inner_model(model), self.processing_class)
        problems += refusals(PADDING, Facts(task=run.task, model=model))
        if self._two_passes is None:
            problems += smoother_problems(self, run.token_loss)
            problems += collator_of_own_problems(self, self._first_collator) if self.plans_evaluation else []
        if run.token_loss is None or isinstance(run.token_loss, LabelSmoothing | ValueLoss):
            problems += model_loss_problems(ModelFacts.of(self.model), self.args.device)
        raise_together(problems, run.control)

    def _start(self, request: RunRequest) -> None:
        """Starts the run and sets every attribute of the mixin. Collective over all ranks."""
        self.longctx_config, self._request = request.config, replace(request, facts=ModelFacts.of(None))
        self._at_start = values_at_start(request.args)
        facts = Facts(
            config=request.config,
            args=request.args,
            trainer=type(self),
            mixin=LongContextMixin,
            plans_evaluation=self.plans_evaluation,
        )
        problems = request.problems + refusals(TOGETHER, facts) + refusals(OVERRIDES, facts)
        if request.config.async_save:
            problems += refusals(ASYNC_SAVE, facts)
        self.longctx_run = start_run(replace(request, problems=problems, trainer=type(self)))
        self._whole_weights = None
        self._saver = Saver(self.longctx_config, request.args, self.longctx_run.control, self.longctx_run)
        self._steps = self._new_steps()
        self._users_values = None
        self._stop = OrderlyStop(request.config.collective_timeout_s, self.longctx_run.control)

    def _new_steps(self) -> StepRunner:
        """Makes the runner of a training, without gradients in buffers that a training which stopped inside a step has left."""
        return StepRunner(self.longctx_run, self._saver, counts_tokens(type(self), self.longctx_config))

    def _start_two_passes(self) -> None:
        """Puts the forwards of model and reference model, for which the trainer's own loss asks, under plans."""
        run, reference = self.longctx_run, getattr(self, "ref_model", None)
        run.routers.is_asked = bool(getattr(self, "aux_loss_enabled", False))

        def own_executor() -> StepExecutor:
            model = self._placed_model()
            return self._steps.executor(model) if self.is_in_train else run.executor(model)

        temperature, remembers = scored_temperature(self), generates(type(self))
        passes = start_two_passes(run, self.model, reference, temperature, own_executor, remembers)
        self._two_passes, self._reference = passes
        self.add_callback(LoaderCheck())
        self._placed_model()
        self._use_vllm(run.control)
        self._precompute_references()
        self._release_models()

    def _release_models(self) -> None:
        """Gives model and reference model their own layers back, until the next plan."""
        for run in (self.longctx_run, self._reference):
            if run is not None:
                run.release_model()

    def _report(self) -> None:
        """Adds the callbacks of the run, once `Trainer` is built."""
        self.add_callback(self.longctx_run.report)
        self.add_callback(self._stop)
        self.add_callback(self._saver.replicas)

    def _check_early(
        self, args: TrainingArguments | None, given: dict[str, Any], problems: list[str]
    ) -> dist.ProcessGroup | None:
        """Checks the arguments of a trainer of TRL, before it makes its model and sets ready; returns the control group.

        problems: those that were found before. Raises ValueError on every rank if there are any.
        """
        control = meet(self.longctx_config, args)
        args = args if args is not None else TrainingArguments(output_dir="tmp_trainer")
        if takes_metrics(type(self)):
            given = {name: value for name, value in given.items() if name not in OF_LOGITS}
        facts = Facts(
            config=self.longctx_config,
            args=args,
            given=given,
            draws_batches=not is_scored(type(self)),
            trainer=type(self),
            mixin=LongContextMixin,
            plans_evaluation=self.plans_evaluation,
        )
        problems += argument_problems(facts)
        problems += trainer_problems(type(self), args, self.longctx_config)
        problems += separate_runs(args.world_size)
        problems += hook_problems(type(self)) + refusals(OVERRIDES, facts)
        raise_together(problems, control)
        return control

    def _planned_forwards(self, dataloader: DataLoader[Any]) -> Iterator[tuple[StepExecutor, Forwards, dict[str, Any]]]:
        """Places the model for an evaluation, and returns the forwards of its planned steps; see `StepRunner.forwards`."""
        model = self._placed_model()
        model.eval()
        self._switch_optimizer("eval")
        return self._steps.forwards(model, dataloader, leaves_shards_away=not reads_between_forwards(self))

    def _forwards_with_events(self, dataloader: DataLoader[Any]) -> Iterator[tuple[StepExecutor, Forwards, dict[str, Any]]]:
        """Yields like `_planned_forwards`, and calls the callbacks' event after each step."""
        self.callback_handler.eval_dataloader = dataloader
        for each in self._planned_forwards(dataloader):
            yield each
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)

    def _classified(self, dataloader: DataLoader[Any], prefix: str) -> EvalLoopOutput:
        """Evaluates a set with a model that classifies."""
        user = self.compute_metrics, self.preprocess_logits_for_metrics
        with self._evaluating():
            return classified(self.longctx_run, dataloader, self._forwards_with_events(dataloader), prefix, *user)

    def _evaluated(
        self, dataloader: DataLoader[Any], prefix: str, only_loss: bool, wants_scores: bool = False
    ) -> tuple[dict[str, Any], int, RowScores]:
        """Evaluates a set with a language model."""
        compute = None if only_loss else self.compute_metrics
        form = likeliest_form(self.preprocess_logits_for_metrics)
        if compute is not None and self.preprocess_logits_for_metrics is not None and not form:
            raise ValueError(
                "preprocess_logits_for_metrics was set on the trainer, but logits never exist as a whole; return "
                "logits.argmax(dim=-1) there, or leave it out: compute_metrics gets likeliest tokens, log-probabilities and "
                "entropies"
            )
        metrics = None if compute is None else TokenMetrics(compute, form)
        with self._evaluating():
            return evaluated(self.longctx_run, dataloader, self._forwards_with_events(dataloader), prefix, metrics, wants_scores)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Context for forwards without a training step; gives the model its own layers back, unless a training goes on."""
        try:
            yield
        finally:
            if (shards := layer_shards(self.model)) is not None:
                shards.come_back()
            if not self.is_in_train:
                self._release_models()


def _is_nothing(inputs: Any) -> bool:
    """Whether a batch stands for one that a stream, which ended inside a step, did not give."""
    return isinstance(inputs, Mapping) and list(inputs) == ["input_ids"] and not len(inputs["input_ids"][0])


def _check_planned_set(loader: Any, name: str) -> None:
    """Raises ValueError for a loader of the user's own, whose batches have no plans. name: the method that makes loaders."""
    if not isinstance(getattr(loader, "dataset", None), PlannedDataset):
        raise ValueError(
            f"{name} returned a loader of its own ({type(loader).__name__}), for whose batches there are no plans; return "
            f"super().{name}(dataset), and change rows and order in the set that you pass"
        )


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
