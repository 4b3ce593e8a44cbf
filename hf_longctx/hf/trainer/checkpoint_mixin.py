"""Overrides of `Trainer` that keep its checkpoints whole: written aside, listed in a manifest, then renamed.

These private methods of `Trainer` are overridden here and nowhere else: `_save_checkpoint`, which does its work in a hidden
folder; `_get_output_dir`, which names that folder while it does; `_push_from_checkpoint`, which waits for the rename;
`_maybe_log_save_evaluate`, so that callbacks hear of a checkpoint when it is in view; `_finalize_training`, which needs all
checkpoints in view; `_save_rng_state` and `_load_rng_state`; `_run_epoch`, which a finished training leaves out.
`ParameterMixin` overrides those about weights and optimizers, of which `_save`, `_save_optimizer_and_scheduler` and
`_load_optimizer_and_scheduler` are overridden here, too. Everything here also serves a stock trainer, to which
`stock/guarded.py` lends it.

With `async_save`, `_save_checkpoint` returns when all files are in host memory; a thread writes them and brings the checkpoint
into view (`checkpoints/background.py`). The first step that begins after the threads of all ranks have ended raises their error,
if there is one.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from transformers import TrainerControl
from transformers.trainer_utils import SaveStrategy

from hf_longctx.hf.checkpoints.background import BackgroundSave, remove_left_copies
from hf_longctx.hf.checkpoints.choice import Choice, Chosen, choose
from hf_longctx.hf.checkpoints.manifest import DATA_FILE, OPTIMIZER_FILE, STATE_FILE, Contents, write_json
from hf_longctx.hf.checkpoints.staging import SavingRanks, StagedCheckpoint, checkpoint_name, rotate
from hf_longctx.hf.checkpoints.trained_weights import TrainedWeights, explained
from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.ranks.agreement import gather_objects, raise_together
from hf_longctx.hf.rules.arguments import ASYNC_CALLBACKS
from hf_longctx.hf.rules.rule import Facts, refusals
from hf_longctx.hf.rules.training_arguments import with_values
from hf_longctx.hf.run.run import Run
from hf_longctx.hf.trainer.flow_mixin import FlowMixin
from hf_longctx.hf.trainer.replicas import ReplicaCheck

logger = logging.getLogger(__name__)


class CheckpointMixin(FlowMixin):
    """The part of `LongContextMixin` about whole checkpoints; the run is started before anything is saved."""

    longctx_config: LongContextConfig
    longctx_run: Run
    _replicas: ReplicaCheck
    # the checkpoint into which the trainer saves at present
    _staged: StagedCheckpoint | None = None
    # errors of this rank while the model of a refused step is written
    _held: list[str] | None = None
    # the checkpoint that is written behind training, and the group of the threads that do; None without `async_save`
    _saving: BackgroundSave | None = None
    _writers: dist.ProcessGroup | None = None
    # the checkpoint that the present training resumed from
    _chosen: Chosen | None = None
    # the group of all ranks for messages, from the choice of a checkpoint on
    _control: dist.ProcessGroup | None = None
    # values of the user's arguments that are hidden from the trainer during a training
    _users_values: dict[str, Any] | None = None

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Lets `Trainer` save into a hidden folder, adds data record and manifest, and brings the checkpoint into view.

        With `async_save` the files go to host memory here, and a thread does the rest. Collective; raises RuntimeError on every
        rank if one of them cannot write this checkpoint, or could not write the one before; of that, nothing is left.
        """
        self._finish_saving()
        self._switch_optimizer("eval")
        run_dir, run, state = Path(super()._get_output_dir(trial)), self.longctx_run, self.state
        self._replicas.before_save(cast(nn.Module, self.model), state.global_step)
        staged = StagedCheckpoint(run_dir, state.global_step, run.control, self.longctx_config.async_save)
        staged.open()
        try:
            contents = self._fill(staged, model, trial)
            if staged.in_memory:
                staged.hold()
                self._saving = BackgroundSave(self._rest_of_save(staged, contents), copy.copy(state))
                return
        except BaseException:
            staged.drop()
            raise
        staged.finish(contents)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(staged.final))
        if self.args.should_save:
            rotate(staged.final, self.args.save_total_limit, state.best_model_checkpoint)

    def _switch_optimizer(self, mode: str) -> None:
        """Switches schedule-free optimizers to "train" or "eval", since they hold two sets of weights; ignores all others.

        The set of "eval" is the one to evaluate and to save. The next training step switches back.
        """
        switch = getattr(self.optimizer, mode, None)
        if callable(switch):
            switch()

    def _fill(self, staged: StagedCheckpoint, model: nn.Module, trial: Any) -> Contents:
        """Lets `Trainer` save into the folder of `staged`, and adds the data record; returns what the manifest is to say.

        Errors of single ranks are held. Collective.
        """
        run, state = self.longctx_run, self.state
        self._staged = staged
        try:
            with staged.holding():
                super()._save_checkpoint(model, trial)
                self._name_best(staged.final.parent)
                if self.args.should_save:
                    state.save_to_json(str(staged.folder / STATE_FILE))
        finally:
            self._staged = None
        record = gather_objects(run.recorder.record(state.global_step, self.control.should_epoch_stop), run.control)[0]
        trained = self._trained_weights(run.control)
        with staged.holding():
            if self.args.should_save and record is not None:
                write_json(staged.folder / DATA_FILE, record)
            if self.args.should_save and not self.args.save_only_model:
                trained.write(staged.folder)
        return Contents(
            step=state.global_step,
            num_ranks=self.args.world_size,
            num_stages=run.setup.num_stages,
            parameters=run.setup.costs.parameters,
            weights_only=self.args.save_only_model,
            data=record,
        )

    def _rest_of_save(self, staged: StagedCheckpoint, contents: Contents) -> Callable[[], None]:
        """Returns the work of the thread for a checkpoint in memory; it reads nothing that training changes."""
        ranks, join = SavingRanks(self._writers), self.longctx_run.placement.join
        is_deleting, limit, best = self.args.should_save, self.args.save_total_limit, self.state.best_model_checkpoint

        def write() -> None:
            staged.write(ranks, join)
            staged.finish(contents)
            if is_deleting:
                rotate(staged.final, limit, best)

        return write

    def _finish_saving(self) -> None:
        """Waits until the checkpoint that is written behind training is in view, and tells callbacks of it. Collective.

        Raises RuntimeError on every rank if it could not be written.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        error = saving.wait_for_writer()
        if errors := [found for found in gather_objects(error, self.longctx_run.control) if found]:
            raise RuntimeError(f"the checkpoint of step {saving.state.global_step}, written behind training: {errors[0]}")
        should_save, handler = self.control.should_save, self.callback_handler
        self.control = type(handler).on_save(handler, self.args, saving.state, self.control)
        # the event resets it, but that of the present step may be still to come
        self.control.should_save = should_save

    def _open_saving(self) -> None:
        """Makes what saving behind training needs, if that is asked for. Collective."""
        if not self.longctx_config.async_save:
            return
        control = self.longctx_run.control
        facts = Facts(given={"callbacks": self.callback_handler.callbacks})
        raise_together(refusals(ASYNC_CALLBACKS, facts), control)
        if self.args.local_process_index == 0:
            remove_left_copies()
        if control is not None and self._writers is None:
            # a rank that has written its part waits for the slowest one
            self._writers = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.args.ddp_timeout))
            self.longctx_run.undo.callback(dist.destroy_process_group, self._writers)

    @contextmanager
    def _ending_saving(self) -> Iterator[None]:
        """Context for a training; if that fails, waits for the checkpoint that is in flight, which other ranks may need."""
        try:
            yield
        finally:
            saving, self._saving = self._saving, None
            if saving is not None and (error := saving.wait_for_writer()):
                logger.error("the checkpoint of step %d, written behind training: %s", saving.state.global_step, error)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if not self.longctx_config.async_save:
            return super()._maybe_log_save_evaluate(*args, **kwargs)

        def put_off(_args: Any, _state: Any, control: TrainerControl) -> TrainerControl:
            control.should_save = False
            return control

        # `_finish_saving` calls the event
        handler = vars(self.callback_handler)
        handler["on_save"] = put_off
        try:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        finally:
            del handler["on_save"]

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        # it reads the best checkpoint and deletes others
        self._finish_saving()
        return super()._finalize_training(*args, **kwargs)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staged.root) if self._staged is not None else super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # an upload reads in the background, from the folder's last name
        if self._staged is None:
            with self._users_arguments():
                super()._push_from_checkpoint(checkpoint_folder)

    def _users_arguments(self) -> AbstractContextManager[Any]:
        """Context in which the arguments are those of the user, which checkpoints have, too."""
        return with_values(self.args, self._users_values or {})

    def _save(self, *args: Any, **kwargs: Any) -> None:
        with self._holding_errors(), self._users_arguments():
            super()._save(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with self._holding_errors():
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._starts_anew("optimizer"):
            return
        if checkpoint is not None:
            self._check_trained(checkpoint)
        with explained(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _save_rng_state(self, output_dir: str) -> None:
        with self._holding_errors():
            super()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if not self._starts_anew("rng"):
            super()._load_rng_state(checkpoint)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # `Trainer` counts steps only after one, so a training killed after its last save would do one too many when restarted
        if self.state.max_steps <= self.state.global_step == self._initial_global_step:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _name_best(self, run_dir: Path) -> None:
        """Sets the best checkpoint's folder as `Trainer` does, to the name that it has once it is in view."""
        strategies = [SaveStrategy.STEPS, SaveStrategy.EPOCH, SaveStrategy.BEST]
        if self.args.save_strategy not in strategies or not self.state.best_global_step:
            return
        best = run_dir / checkpoint_name(self.state.best_global_step)
        if self.state.best_global_step == self.state.global_step or best.exists():
            self.state.best_model_checkpoint = str(best)

    def _choose_checkpoint(
        self, asked: str | bool | None, config: LongContextConfig, control: dist.ProcessGroup | None
    ) -> str | None:
        """The folder from which the next training resumes; None: it starts at its first step. Collective.

        Raises ValueError on every rank for a checkpoint that is not whole, unless `resume_partial` is set. If only the weights
        can be used, reads them here.
        """
        args = self.args
        choice = Choice(config.resume_partial, args.ignore_data_skip, control)
        self._control = control
        self._chosen = choose(asked, Path(str(args.output_dir)), args.local_process_index == 0, choice)
        if self._chosen is None:
            return None
        folder = str(self._chosen.folder)
        if "state" in self._chosen.anew:
            self._load_from_checkpoint(folder)
            self._chosen = None
            return None
        if not self._starts_anew("optimizer"):
            # before weights are read; an optimizer that the trainer is still to make is compared later
            self._check_trained(folder)
        return folder

    def _trained_weights(self, control: dist.ProcessGroup | None) -> TrainedWeights:
        """The weights that this run trains. Collective with pipeline stages."""
        run: Run | None = vars(self).get("longctx_run")
        tied = run.stage.tied if run is not None and run.stage.stage else ""
        own = TrainedWeights.of(cast(nn.Module, self.model), getattr(self.optimizer, "optimizer", self.optimizer), tied)
        return own if run is None or run.setup.num_stages == 1 else TrainedWeights.joined(gather_objects(own, control))

    def _check_trained(self, folder: str) -> None:
        """Raises ValueError on every rank if a checkpoint has the states of other weights than those of this run. Collective."""
        is_by_number = (Path(folder) / OPTIMIZER_FILE).exists()
        problem = self._trained_weights(self._control).problem_with(Path(folder), is_by_number)
        raise_together([problem] if problem else [], self._control, "this run cannot resume")

    def _starts_anew(self, part: str) -> bool:
        """Whether this part of the resumed checkpoint is left out, as the log said."""
        return self._chosen is not None and part in self._chosen.anew

    def _holding_errors(self) -> AbstractContextManager[None]:
        """Context for what single ranks write; errors wait until all ranks have finished, where these then learn of them."""
        if self._staged is not None:
            return self._staged.holding()
        return nullcontext() if self._held is None else _noting(self._held)


@contextmanager
def _noting(errors: list[str]) -> Iterator[None]:
    """Context that adds an error to a list, so that ranks go through the same collectives."""
    try:
        yield
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
