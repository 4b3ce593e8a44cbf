"""Overrides of `Trainer` that keep its checkpoints whole; all they do is to call `Saver`.

These private methods of `Trainer` are overridden only here: `_save_checkpoint`, which works in a hidden folder;
`_get_output_dir`, which names that folder meanwhile; `_push_from_checkpoint`, which waits for the rename;
`_maybe_log_save_evaluate`, so that callbacks are called when a checkpoint is in view; `_finalize_training`, which needs all
checkpoints in view; `_save_rng_state` and `_load_rng_state`; `_run_epoch`, which a finished training skips. `ParameterMixin`
overrides those about weights and optimizers; `_save`, `_save_optimizer_and_scheduler` and `_load_optimizer_and_scheduler` are
overridden here, too. `callback/guarded.py` also puts this mixin on stock trainers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import TrainerControl

from hf_longctx.hf.checkpoints.trained_weights import explained
from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.rules.training_arguments import with_values
from hf_longctx.hf.run.run import Run
from hf_longctx.hf.run.saver import Saver
from hf_longctx.hf.trainer.flow_mixin import FlowMixin


class CheckpointMixin(FlowMixin):
    """The part of `LongContextMixin` about whole checkpoints; the run is started before anything is saved."""

    longctx_config: LongContextConfig
    longctx_run: Run
    _saver: Saver
    # values of the user's arguments that are hidden from the trainer during a training
    _users_values: dict[str, Any] | None = None

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Saves by `Saver.save`. Collective; also raises RuntimeError if the checkpoint before could not be written."""
        self._finish_saving()
        self._switch_optimizer("eval")
        run_dir, own = Path(super()._get_output_dir(trial)), cast(nn.Module, self.model)

        def write_parts() -> None:
            super(CheckpointMixin, self)._save_checkpoint(model, trial)

        ends_epoch = self.control.should_epoch_stop
        final = self._saver.save(self.state, run_dir, own, self.optimizer, write_parts, ends_epoch)
        if final is not None and self.args.push_to_hub:
            self._push_from_checkpoint(str(final))

    def _switch_optimizer(self, mode: str) -> None:
        """Switches schedule-free optimizers to "train" or "eval", since they hold two sets of weights; ignores all others.

        The set of "eval" is the one to evaluate and to save. The next training step switches back.
        """
        switch = getattr(self.optimizer, mode, None)
        if callable(switch):
            switch()

    def _finish_saving(self) -> None:
        """Waits until the checkpoint that is written behind training is in view, and calls callbacks' `on_save`. Collective.

        Raises RuntimeError on every rank if it could not be written.
        """
        state = self._saver.finish()
        if state is None:
            return
        should_save, handler = self.control.should_save, self.callback_handler
        self.control = type(handler).on_save(handler, self.args, state, self.control)
        # the event resets it, but that of the present step may be still to come
        self.control.should_save = should_save

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
        return super()._get_output_dir(trial) if self._saver.root is None else str(self._saver.root)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # an upload reads in the background, from the folder's last name
        if self._saver.root is None:
            with self._users_arguments():
                super()._push_from_checkpoint(checkpoint_folder)

    def _users_arguments(self) -> AbstractContextManager[Any]:
        """Context in which the arguments are those of the user, which checkpoints have, too."""
        return with_values(self.args, self._users_values or {})

    def _save(self, *args: Any, **kwargs: Any) -> None:
        with self._saver.holding(), self._users_arguments():
            super()._save(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with self._saver.holding():
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._saver.starts_anew("optimizer"):
            return
        if checkpoint is not None:
            self._check_trained(checkpoint)
        with explained(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _save_rng_state(self, output_dir: str) -> None:
        with self._saver.holding():
            super()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if not self._saver.starts_anew("rng"):
            super()._load_rng_state(checkpoint)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        begin = super()._init_training_state(*args, **kwargs)
        self._saver.begun_at_step = self.state.global_step
        return begin

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # `Trainer` counts steps only after one, so a training killed after its last save would do one too many when restarted
        if self.state.max_steps <= self.state.global_step == self._saver.begun_at_step:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _choose_checkpoint(self, asked: str | bool | None) -> str | None:
        """The folder from which the next training resumes; None: it starts at its first step. Collective.

        Raises ValueError on every rank for a checkpoint that is not whole, unless `resume_partial` is set. If only the weights
        can be used, reads them here.
        """
        folder = self._saver.choose(asked)
        if folder is None:
            return None
        if self._saver.starts_anew("state"):
            self._load_from_checkpoint(str(folder))
            self._saver.forget_choice()
            return None
        if not self._saver.starts_anew("optimizer"):
            # before weights are read; an optimizer that the trainer is still to make is compared later
            self._check_trained(str(folder))
        return str(folder)

    def _check_trained(self, folder: str) -> None:
        self._saver.check_trained(Path(folder), cast(nn.Module, self.model), self.optimizer)
