"""`LongContextCallback`: runs plans in a stock `Trainer`, which is stock again after the training.

Alone in `callbacks=[...]` it leaves the loop to the trainer: every forward runs one plan over the batches that all ranks loaded
(`exchange.py`), and checkpoints, signals and lost ranks are treated as in `LongContextTrainer` (`guarded.py`). Attached to a
trainer, it puts the training half of `LongContextMixin` in front of that instance's class, so that full plans run
(`attached.py`). Evaluation keeps the trainer's own loop, with the model's own attention, except in pipeline stages.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import PartialState
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_longctx.hf.callback.attached import AttachedMixin, lend_plans
from hf_longctx.hf.callback.exchange import SequenceExchange
from hf_longctx.hf.callback.guarded import calling_trainer, lend, take_back
from hf_longctx.hf.checkpoints.choice import Choice
from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.data.resume import check_resumed
from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.dropout import check_rates
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.towers import freeze_towers, wrapper_of
from hf_longctx.hf.planning.console import Console
from hf_longctx.hf.planning.report import plan_parts, seconds_part, speed_part
from hf_longctx.hf.ranks.agreement import START, begin_beats, joint_call, raise_together
from hf_longctx.hf.ranks.exit_message import RefusedRun
from hf_longctx.hf.ranks.launch import separate_runs
from hf_longctx.hf.ranks.loader_workers import keep_workers
from hf_longctx.hf.ranks.stopping import OrderlyStop
from hf_longctx.hf.rules.arguments import KINDS, argument_problems
from hf_longctx.hf.rules.callbacks import ALONE
from hf_longctx.hf.rules.rule import Facts, refusals
from hf_longctx.hf.rules.trl import alone_problems
from hf_longctx.hf.run.run import BORROWED, RunRequest, meet, start_run
from hf_longctx.hf.run.saver import ReplicaCheck, Saver
from hf_longctx.hf.trainer.checkpoint_mixin import CheckpointMixin
from hf_longctx.hf.trainer.open_stages import one_stage_line
from hf_longctx.hf.trainer.trainer import LongContextMixin
from hf_longctx.plan.core.messages import listed
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.runtime.core.dropout import DropoutKeys
from hf_longctx.runtime.core.loss import TokenLoss
from hf_longctx.runtime.parameters.gradients import has_nonfinite_gradient, nonfinite_names
from hf_longctx.runtime.process_groups import sum_over_ranks

logger = logging.getLogger(__name__)

_OTHER_TRAINER = "the callback is attached to another trainer; make one callback for each trainer"


class LongContextCallback(TrainerCallback):
    """Runs plans in a stock `Trainer`, or in a subclass of it, until `train()` ends.

    Example, full plans (gradients are those of `LongContextTrainer`):

        trainer = Trainer(model=model, args=args, train_dataset=dataset, data_collator=DataCollatorWithFlattening())
        LongContextCallback(LongContextConfig(max_length=32768)).attach(trainer)
        trainer.train()

    Alone, as in `Trainer(..., callbacks=[LongContextCallback(config)])`, the stock loader still draws the batches, and every
    forward of the training runs a plan of one micro-batch over the batches of all ranks. In trainings after the first, and in all
    if it was given by `add_callback`, it cannot choose the checkpoint to resume from, and only checks the one that the trainer
    took; call `detach()` if such a training raised, since the model is then still patched.

    A signal stops the training as it stops that of `LongContextTrainer`; `stopped_by` then names it.
    """

    def __init__(self, config: LongContextConfig | None = None) -> None:
        if found := refusals(KINDS, Facts(given={"longctx_config": config})):
            raise RefusedRun.of(found)
        self.config = config if config is not None else LongContextConfig()
        # the hooks of the present training, if the callback is not attached
        self.exchange: SequenceExchange | None = None
        self.stopped_by = ""
        # set during a training of a trainer to which the callback is not attached
        self._stop: OrderlyStop | None = None
        self._replicas: ReplicaCheck | None = None
        self._control: dist.ProcessGroup | None = None
        self._console = Console(is_on=False)
        # begin of the present step, seconds of the steps since the last log, and their number
        self._begun_s, self._seconds, self._num_steps = 0.0, 0.0, 0
        self._trainer: Trainer | None = None
        self._undo = ExitStack()

    def attach(self, trainer: Trainer, token_loss: TokenLoss | None = None) -> None:
        """Makes the next `trainer.train()` run full plans, until it returns or raises. Every rank must call it.

        Sequences per optimizer step, shuffling and cutting are then those of `LongContextTrainer`; the trainer's collator serves
        evaluation only. token_loss: the loss of a token in training, in place of cross-entropy; see `TokenLoss`. Evaluation keeps
        the trainer's own loss. Raises ValueError on every rank, leaving the trainer as it was, for settings that plans would
        ignore.

        With pipeline stages each rank has one stage until `train()` returns, and evaluation runs under plans with the loss of
        training. Then the model is whole on every rank, and the next training makes a new optimizer. A model that was loaded as
        one stage stays one, with plans, until `detach()`. So does, without plans, a model whose training raised.
        """
        if self._trainer is not None or isinstance(trainer, LongContextMixin):
            raise ValueError(f"{type(trainer).__name__} runs plans already, or this callback is attached; call detach() first")
        self.detach()
        take_back(trainer)
        with ExitStack() as undo, joint_call(START, self.config.collective_timeout_s):
            lend_plans(trainer, self, token_loss, undo)
            self._trainer = trainer
            undo.callback(setattr, self, "_trainer", None)
            self._undo = undo.pop_all()

    def detach(self) -> None:
        """Makes trainer and model stock again. Idempotent; call it only if no `train()` ran to its end.

        With pipeline stages, every rank must call it. A model that was loaded as one stage stays one: afterwards its forward and
        its `save_pretrained` raise RuntimeError.
        """
        try:
            if self._trainer is not None:
                cast(AttachedMixin, self._trainer).give_back()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Detaches without collectives, since another rank may have failed; a model in stages then stays in stages."""
        self._undo.close()

    def guard(self, trainer: Trainer, undo: ExitStack) -> dist.ProcessGroup | None:
        """Locks a stock trainer's output folder, listens for signals and watches the other ranks, until `undo` is closed.

        Returns the control group of all ranks. Collective; raises ValueError on every rank if another job uses the folder.
        """
        if self._trainer is not None:
            raise ValueError(_OTHER_TRAINER)
        # a training that raised may have left its hooks
        self.detach()
        lend(trainer, self)
        undo.callback(take_back, trainer)
        self._control = meet(self.config, trainer.args)
        self._stop, self._undo, self.stopped_by = OrderlyStop(self.config.collective_timeout_s, self._control), undo, ""
        undo.callback(setattr, self, "_stop", None)
        self._console, self._seconds, self._num_steps = Console(self.config.report_steps), 0.0, 0
        undo.callback(self._console.take_over(trainer))
        undo.enter_context(self._console.above_bars())
        undo.enter_context(self._stop.during_training(trainer.args, lambda: trainer.state.global_step))
        guarded = cast(CheckpointMixin, trainer)
        guarded._saver = Saver(self.config, trainer.args, self._control)
        undo.enter_context(guarded._agreeing(self._stop, self._control))
        return self._control

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        raise_together(separate_runs(args.world_size), None)
        lend(calling_trainer()[0], self)
        begin_beats(self.config.collective_timeout_s, args.ddp_timeout)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        processing_class: Any = None,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        if self._trainer is not None:
            if self._trainer.state is not state:
                raise ValueError(_OTHER_TRAINER)
            return
        with ExitStack() as undo:
            resumed_from = None
            # the trainer's class has none of our methods yet if the callback was added after the trainer was built
            if self._stop is None:
                resumed_from = self._join(undo)
            check_resumed(args, state, train_dataloader)
            keep_workers(train_dataloader)
            self._start_exchange(args, model, processing_class, train_dataloader)
            if resumed_from is not None:
                # the trainer has read it already
                Choice(self.config.resume_partial, args.ignore_data_skip, self._control).loaded(Path(resumed_from))
            undo.pop_all()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Alone: raises FloatingPointError on every rank for gradients that are not finite, or drops them with a warning."""
        if self.exchange is None:
            return
        pool = self.exchange.pool
        number = state.global_step + 1
        if not bool(sum_over_ranks(has_nonfinite_gradient(model.parameters(), args.device), pool.everyone)):
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            if args.max_grad_norm and gradients and not bool(torch.nn.utils.get_total_norm(gradients)):
                # callbacks do not get the norm before clipping
                logger.warning(
                    "step %d: all gradients are zero; either no token has a label, or their norm overflowed and clipping divided "
                    "by infinity (attach the callback to its trainer to have such steps stopped or left out)",
                    number,
                )
            return
        if self.config.on_nonfinite == "skip":
            model.zero_grad(set_to_none=True)
            logger.warning("step %d is left out: its gradients are not finite", number)
            return
        # clipping has spread the NaN to all gradients by now, so only weights can be named
        weights = nonfinite_names(model)
        what = f"weights are not finite ({listed(weights)})" if weights else "gradients are not finite"
        raise FloatingPointError(
            f"step {number}: {what}, so no weight was changed; on_nonfinite='skip' leaves such steps out, and a callback that is "
            f"attached to its trainer names sequences and the first module concerned"
        )

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._begun_s = time.perf_counter()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if self.exchange is None or not state.is_world_process_zero:
            return
        logs, parts = logs or {}, list[str]()
        if "loss" in logs:
            plans, seconds, num_steps = list(self.exchange.plans), self._seconds, self._num_steps
            # if there were too many, the first ones are dropped
            if num_steps and 0 < len(plans) < (self.exchange.plans.maxlen or 0):
                parts = [seconds_part(seconds, num_steps), speed_part(plans, seconds), *plan_parts(plans, num_steps)]
            self.exchange.plans.clear()
            self._seconds, self._num_steps = 0.0, 0
        self._console.logs(state.global_step, logs, parts)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        self._seconds += time.perf_counter() - self._begun_s
        self._num_steps += 1
        if self._stop is not None and self._replicas is not None:
            self._replicas.on_step_end(args, state, control, model=model)
            self._stop.on_step_end(args, state, control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._stop is not None:
            self._stop.on_epoch_end(args, state, control)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._stop is None:
            return
        self._stop.on_train_end(args, state, control)
        self.stopped_by = self._stop.stopped_by
        # other ranks may still read from the groups that are closed next
        PartialState().wait_for_everyone()
        self.detach()

    def _join(self, undo: ExitStack) -> str | None:
        """Guards a training that its trainer has begun already; returns the folder from which that has resumed. Collective."""
        trainer, names = calling_trainer()
        if isinstance(trainer, CheckpointMixin):
            raise ValueError("the model runs plans already (LongContextTrainer, or a second callback); use one of them")
        undo.callback(self.detach)
        # `detach` closes it, or the end of the training
        self.guard(trainer, ExitStack())
        resumed_from: str | None = names.get("resume_from_checkpoint")
        return resumed_from

    def _start_exchange(self, args: TrainingArguments, model: Any, processing_class: Any, train_dataloader: Any) -> None:
        """Checks everything on every rank, makes the process groups, and hooks the model."""
        assert self._stop is not None
        config, undo, trainer = self.config, self._undo, cast(CheckpointMixin, calling_trainer()[0])
        known = ModelFacts.of(model)
        facts = Facts(config=config, args=args, model=model, known=known, num_ranks=args.world_size, draws_batches=False)
        problems = argument_problems(facts) + refusals(ALONE, replace(facts, given=vars(trainer))) + alone_problems(args)
        request = RunRequest(config, known, args, processing_class, problems, control=self._control)
        run = start_run(replace(request, mode=BORROWED, trainer=type(trainer)))
        undo.callback(run.close)
        undo.callback(freeze_towers(model))
        _count_label_tokens(trainer, model, undo)
        trainer.longctx_config, trainer.longctx_run = config, run
        trainer._saver.begin(run)
        self._replicas = trainer._saver.replicas
        undo.callback(setattr, self, "_replicas", None)
        num_layers, timeout_s = num_attention_layers(model), config.collective_timeout_s

        def enter_dropout(plan: StepPlan) -> DropoutKeys | None:
            check_rates(model)
            if run.dropout is not None:
                run.dropout.seed = args.seed
                run.dropout.begin_forward(trainer.state.global_step, plan.step, len(plan.lengths))
            return run.dropout

        length = run.setup.max_length
        self.exchange = SequenceExchange(run.source, run.activations, length, num_layers, timeout_s, self._stop, enter_dropout)
        undo.callback(setattr, self, "exchange", None)
        self.exchange.added_code = partial(run.code.problem, model)
        for handle in (
            model.register_forward_pre_hook(self.exchange.before_forward, with_kwargs=True),
            model.register_forward_hook(self.exchange.after_forward, always_call=True),
        ):
            undo.callback(handle.remove)
        run.report.console = self._console
        run.report.open(args, train_dataloader, writes_files=False)
        if args.process_index == 0 and (line := one_stage_line(config, "a callback that is not attached plans no whole steps")):
            logger.warning("%s", line)
        if args.process_index == 0 and (idle := _without_effect(config)):
            logger.warning("settings without effect, since the callback is not attached to the trainer: %s", ", ".join(idle))


def _count_label_tokens(trainer: Any, model: Any, undo: ExitStack) -> None:
    """Makes the trainer pass a multimodal model the number of label tokens, which some of these classes do not accept.

    They do not accept it since images would change it. On rows of text their loss is that of causal language models: with the
    number it is the mean over the label tokens of a step, else the mean of every batch of every rank, which plans mix.
    """
    if wrapper_of(model) is not None and not trainer.model_accepts_loss_kwargs:
        trainer.model_accepts_loss_kwargs = True
        undo.callback(setattr, trainer, "model_accepts_loss_kwargs", False)


def _without_effect(config: LongContextConfig) -> list[str]:
    """Changed settings that have no effect, since nothing measures or reports the forwards of a stock trainer."""
    idle = (
        *("calibration_steps", "fp32_gradients", "fp32_master_weights", "optimizer_states", "timeline_steps"),
        *("lookahead_batches", "stream_readers", "micro_batch_trials", "token_metrics"),
    )
    return [field.name for field in fields(config) if field.name in idle and getattr(config, field.name) != field.default]
