"""Starts a trainer: translates settings of other systems, makes models of `model_init`, prepares trainers of TRL."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
import transformers
from accelerate import DistributedType
from accelerate.utils.memory import clear_device_cache
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerControl,
    TrainingArguments,
    enable_full_determinism,
    set_seed,
)
from transformers.integrations.integration_utils import TensorBoardCallback
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import default_compute_objective

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.data.streams.sources import is_stream
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.planning.console import Console
from hf_longctx.hf.ranks.agreement import gather_objects, raise_together
from hf_longctx.hf.ranks.launch import LaunchEnvironment
from hf_longctx.hf.ranks.stopping import OrderlyStop
from hf_longctx.hf.rules.arguments import (
    KIND_OF_MODEL,
    STOPPING,
    TOGETHER,
    argument_problems,
    late_problems,
    run_problems,
    setup_problems,
)
from hf_longctx.hf.rules.collators import Collation, forward_columns
from hf_longctx.hf.rules.rule import Facts, refusals
from hf_longctx.hf.rules.training_arguments import hidden_from_trainer, idle_settings, log_settings, translate
from hf_longctx.hf.rules.trl import (
    PREPARED,
    image_problems,
    is_scored,
    read_columns,
    scored_loss,
    scored_trainer_problems,
)
from hf_longctx.hf.run.run import Run, RunRequest
from hf_longctx.hf.run.saver import Saver
from hf_longctx.hf.run.sets import named_sets
from hf_longctx.hf.run.steps import StepRunner
from hf_longctx.hf.trainer.open_stages import one_stage_reasons, open_stages
from hf_longctx.runtime.core.loss import TokenLoss

logger = logging.getLogger(__name__)

# ends of names of metrics that evaluations have beside the loss
_ADDED_METRICS = ("_perplexity", "_mean_token_accuracy", "_entropy")

# users put the mixin in front of a Trainer subclass, so type checkers treat it as one
if TYPE_CHECKING:
    _TrainerBase = Trainer
else:
    _TrainerBase = object


class StartMixin(_TrainerBase):
    """The part of `LongContextMixin` about its start, and about starting anew on a fresh model."""

    longctx_config: LongContextConfig
    longctx_run: Run
    plans_evaluation: bool
    _stop: OrderlyStop
    _steps: StepRunner
    _saver: Saver
    # the console of the run before, which has taken over from the trainer's own callback
    _console: Console
    # request from which the run was started, without facts of the model, and the arguments that are read once
    _request: RunRequest
    _at_start: dict[str, Any]
    # lines about settings of other systems that became ours
    _lines: tuple[str, ...] = ()
    # arguments of the trainer that a check of a fresh model needs again
    _given: dict[str, Any]

    def _translated(self, config: LongContextConfig, args: TrainingArguments | None) -> tuple[LongContextConfig, list[str]]:
        """Translates settings of accelerate and `Trainer` into the config; returns problems with those without a field, too."""
        args = args if args is not None else TrainingArguments(output_dir="tmp_trainer")
        words = translate(config, args, LaunchEnvironment.read())
        self._lines = words.lines
        state = args.distributed_state
        if not words.problems and state is not None and state.distributed_type == DistributedType.DEEPSPEED:
            # accelerate would look for DeepSpeed's plugin, which is hidden; the ranks and their groups are ordinary ones
            on_cuda = args.device.type == "cuda"
            state.distributed_type = DistributedType.MULTI_GPU if on_cuda else DistributedType.MULTI_CPU
        return words.config, list(words.problems)

    def _open_stages(
        self,
        config: LongContextConfig,
        facts: ModelFacts,
        args: TrainingArguments,
        given: dict[str, Any],
        control: dist.ProcessGroup | None,
    ) -> LongContextConfig:
        """The config of a run on one node or several; notes a line about stages that the user left open. Collective."""

        def problems_of(other: LongContextConfig) -> list[str]:
            together = Facts(config=other, args=args)
            found = run_problems(type(self), other, facts, args, given) + refusals(TOGETHER, together)
            return found + setup_problems(facts, given.get("processing_class"), other, args.world_size, (1,))

        reasons = one_stage_reasons(config, type(self), facts, args, given, problems_of)
        config, line = open_stages(config, reasons, args.output_dir, control)
        self._lines += (line,) if line else ()
        return config

    def _log_settings(self) -> None:
        """Logs what became of settings of other systems, and which settings have no effect."""
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            self.longctx_run.close()
            name = "FSDP" if self.is_fsdp_enabled else "DeepSpeed"
            raise ValueError(
                f"accelerate was started with {name} before the trainer was made (by an Accelerator of your own), so it would "
                f"shard parameters, too; make the trainer first, or leave {name} out and set "
                f"LongContextConfig(parameters='sharded')"
            )
        draws = not is_scored(type(self))
        # a trainer that draws its own batches evaluates them itself, too
        idle = idle_settings(self.args, draws, draws and self.plans_evaluation, self.compute_metrics is not None)
        if draws and is_stream(self.train_dataset) and (count := self.args.dataloader_num_workers):
            idle.append(f"dataloader_num_workers={count} (threads read a stream ahead, see lookahead_batches and stream_readers)")
        log_settings(self.args, self._lines, idle)

    def _first_model(self, model: Any, model_init: Any, args: TrainingArguments, problems: list[str]) -> Any:
        """The model that the trainer was given, also by its name, or the first one that `model_init` makes.

        Adds to `problems` what is wrong with them; the result is then no model.
        """
        if model_init is not None and model is not None:
            problems.append("the trainer arguments model and model_init were given; pass one of them")
            return None
        if model_init is not None:
            self.model_init = model_init
            _seed(args)
            model = self.call_model_init()
        elif isinstance(model, str | os.PathLike):
            _seed(args)
            try:
                return load_by_name(model, args)
            except Exception as error:
                problems.append(
                    f"model is {str(model)!r}, which cannot be loaded ({type(error).__name__}: {error}); pass a folder with "
                    f"config.json and weights, a name on the Hub, or a loaded model"
                )
                return None
        problems += refusals(KIND_OF_MODEL, Facts(model=model))
        return model

    def hyperparameter_search(self, hp_space: Any = None, compute_objective: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Searches as `Trainer` does. The objective is the loss, or the sum of the user's metrics, without those that we add."""
        return super().hyperparameter_search(hp_space, compute_objective or _objective, *args, **kwargs)

    def _begin_anew(self, trial: Any) -> None:
        """Starts the run anew on a fresh model, as `Trainer` makes one before each training if it has `model_init`. Collective.

        trial: the settings of a hyperparameter search, which the new run has from its start.
        """
        if self.model_init is None:
            return
        self._end_old_run()
        with hidden_from_trainer(self.args):
            self._hp_search_setup(trial)
            # changed settings hold for a run that begins anew, as for a new trainer
            self._train_batch_size = self.args.train_batch_size
            _seed(self.args)
            model: Any = self.call_model_init(trial)
            raise_together(refusals(KIND_OF_MODEL, Facts(model=model)), None)
            factor = self.args.label_smoothing_factor
            # a trial may have changed it
            self.label_smoother = LabelSmoother(epsilon=factor) if factor else None
            facts = ModelFacts.of(model)
            problems = run_problems(type(self), self.longctx_config, facts, self.args, self._given)
            self._start(replace(self._request, facts=facts, problems=problems, control=None))
        self.model = self.model_wrapped = model
        if self.place_model_on_device:
            self._move_model_to_device(model, self.args.device)
        self._report()
        self.longctx_run.report.console = self._console

    def _check_settings(self) -> None:
        """Raises ValueError on every rank for arguments that were changed since the start and would not be obeyed."""
        args, run, config = self.args, self.longctx_run, self.longctx_config
        problems = late_problems(args, run.args, self._at_start, self._train_batch_size)
        facts = Facts(config=config, args=args, draws_batches=not is_scored(type(self)))
        found = translate(config, args, LaunchEnvironment.read())
        problems += found.problems
        if found.config != config:
            problems.append(
                "fsdp or deepspeed was changed after the trainer was made, which has placed parameters already; make the trainer "
                "with them, or set them back"
            )
        with hidden_from_trainer(args):
            problems += argument_problems(facts)
        problems += refusals(STOPPING, replace(facts, given={"callbacks": self.callback_handler.callbacks}))
        raise_together(problems + refusals(TOGETHER, facts), run.control)

    def _check_code(self) -> None:
        """Compares hooks and forwards that were put on the model since the start, by the self-test. Collective.

        Raises ValueError on every rank if plans are not exact with them. Where it cannot, the first step refuses them.
        """
        run, model = self.longctx_run, cast(nn.Module, self.model)
        if run.retest is None or not any(gather_objects(bool(run.code.problem(model)), run.control)):
            return
        run.release_model()
        if found := run.retest():
            run.report.say(f"with the hooks and forwards added since the start: {found}")
            run.code.accept(model)

    def _end_old_run(self) -> None:
        """Ends the run and forgets its model, which must not stay beside the new one. Collective."""
        # none is left where the last model could not be made
        if (old := vars(self).pop("longctx_run", None)) is None:
            return
        self._console = old.report.console
        for callback in (old.report, self._stop, self._saver.replicas):
            self.remove_callback(callback)
        # other ranks may still read from the groups that are closed next
        self.accelerator.wait_for_everyone()
        old.close()
        nothing: Any = None
        self.model = self.model_wrapped = self.optimizer = self.lr_scheduler = nothing
        self._steps = self._stop = self._saver = nothing
        handler = self.callback_handler
        handler.model = handler.optimizer = handler.lr_scheduler = handler.train_dataloader = handler.eval_dataloader = nothing
        self.accelerator.free_memory()
        del old, callback
        clear_device_cache(garbage_collection=True)

    @contextmanager
    def _telling_trackers(self) -> Iterator[None]:
        """Context of a training: when it begins, callbacks see the user's arguments, which trackers write down."""
        begin, handler = self.callback_handler.on_train_begin, vars(self.callback_handler)

        def begin_with_users(*args: Any, **kwargs: Any) -> TrainerControl:
            self._take_loader(self.callback_handler.train_dataloader)
            with self._users_arguments():
                return begin(*args, **kwargs)

        handler["on_train_begin"] = begin_with_users
        try:
            yield
        finally:
            del handler["on_train_begin"]

    if TYPE_CHECKING:

        def _start(self, request: RunRequest) -> None: ...

        def _report(self) -> None: ...

        def _take_loader(self, loader: Any) -> None: ...

        def _users_arguments(self) -> AbstractContextManager[Any]: ...

    def _log_to_output_dir(self) -> None:
        """Names TensorBoard's folder now: an evaluation before training would start the log in ./runs, where it would stay."""
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback) and getattr(callback, "logging_dir", "") is None:
                name = f"{datetime.now():%b%d_%H-%M-%S}_{socket.gethostname()}"
                callback.logging_dir = str(Path(self.args.output_dir or ".") / "runs" / name)

    def _request_of_prepared(
        self, given: dict[str, Any], control: dist.ProcessGroup | None, token_loss: TokenLoss | None
    ) -> RunRequest:
        """The request of a trainer of TRL, with the model, the arguments and the sets that the trainer has made ready."""
        facts = ModelFacts.of(self.model)
        was_open = self.longctx_config.stages is None
        sets = {"train_dataset": self.train_dataset, "eval_dataset": self.eval_dataset}
        self.longctx_config = self._open_stages(self.longctx_config, facts, self.args, {**given, **sets}, control)
        collation = Collation(given.get("data_collator"), facts.head_kind, forward_columns(facts.base, self.args))
        self.train_dataset = read_columns(type(self), self.train_dataset, collation.reads_all)
        self.eval_dataset = read_columns(type(self), self.eval_dataset, collation.reads_all)
        problems = run_problems(type(self), self.longctx_config, facts, self.args, given)
        problems += refusals(PREPARED, Facts(config=self.longctx_config, model=facts.model, known=facts))
        datasets = named_sets(self.train_dataset, self.eval_dataset)
        reference = None
        if is_scored(type(self)):
            problems += scored_trainer_problems(self, facts)
            if token_loss is not None:
                problems.append(f"token_loss has no effect beside the loss of {type(self).__name__}; leave it out")
            # the trainer's own loader reads its rows
            datasets, reference, token_loss = {}, getattr(self, "ref_model", None), scored_loss(self)
        else:
            problems += image_problems(self)
        request = RunRequest(self.longctx_config, facts, self.args, self.processing_class, problems, datasets, control)
        if datasets:
            request = replace(request, collation=collation)
        request = replace(request, has_open_stages=was_open and self.longctx_config.may_have_stages)
        return replace(request, token_loss=token_loss, reference=reference)


def load_by_name(name: str | os.PathLike[str], args: TrainingArguments) -> Any:
    """Loads a model as TRL's trainers do: the class that its config names, in float32 unless `args.model_init_kwargs` differ."""
    settings = {"dtype": "float32", **(getattr(args, "model_init_kwargs", None) or {})}
    code = {each: settings[each] for each in ("trust_remote_code", "revision") if each in settings}
    config = AutoConfig.from_pretrained(name, **code)
    named = getattr(transformers, (config.architectures or [""])[0], None)
    if args.process_index == 0:
        logger.warning("model %s is loaded in %s; pass a loaded model for another dtype", name, settings["dtype"])
    return (named or AutoModelForCausalLM).from_pretrained(name, **settings)


def _seed(args: TrainingArguments) -> None:
    """Seeds as `Trainer` does before it makes a model."""
    (enable_full_determinism if args.full_determinism else set_seed)(args.seed)


def _objective(metrics: dict[str, float]) -> float:
    """Computes the objective of `Trainer`, which adds up all metrics but the loss, from the user's metrics alone."""
    own = {name: value for name, value in metrics.items() if not name.endswith(_ADDED_METRICS)}
    return float(default_compute_objective(own))
