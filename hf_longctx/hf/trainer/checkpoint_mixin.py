"""Overrides of `Trainer` that keep its checkpoints whole: written aside, listed in a manifest, then renamed.

These private methods of `Trainer` are overridden here and nowhere else: `_save_checkpoint`, which does its work in a hidden
folder; `_get_output_dir`, which names that folder while it does; `_push_from_checkpoint`, which waits for the rename;
`_save_rng_state` and `_load_rng_state`; `_run_epoch`, which a finished training leaves out. `ParameterMixin` overrides those
about weights and optimizers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from accelerate import PartialState
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import SaveStrategy

from hf_longctx.hf.checkpoints.choice import Choice, Chosen, choose
from hf_longctx.hf.checkpoints.manifest import DATA_FILE, STATE_FILE, Contents, write_json
from hf_longctx.hf.checkpoints.staging import StagedCheckpoint, checkpoint_name, rotate
from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.hf.trainer.replicas import ReplicaCheck
from hf_longctx.hf.trainer.run import Run

# users put the mixin in front of a Trainer subclass, so type checkers treat it as one
if TYPE_CHECKING:
    _TrainerBase = Trainer
else:
    _TrainerBase = object


class CheckpointMixin(_TrainerBase):
    """The part of `LongContextMixin` about whole checkpoints; the run is started before any of it is used."""

    longctx_config: LongContextConfig
    longctx_run: Run
    _replicas: ReplicaCheck
    # the checkpoint that is being written
    _staged: StagedCheckpoint | None = None
    # the checkpoint that the present training resumed from
    _chosen: Chosen | None = None

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Lets `Trainer` save into a hidden folder, adds data record and manifest, and brings the checkpoint into view.

        Collective; raises RuntimeError on every rank if one of them cannot write, and then leaves nothing behind.
        """
        run_dir, run, state = Path(super()._get_output_dir(trial)), self.longctx_run, self.state
        self._replicas.before_save(cast(nn.Module, self.model), state.global_step)
        staged = StagedCheckpoint(run_dir, state.global_step, run.control)
        staged.open()
        self._staged = staged
        try:
            with staged.holding():
                super()._save_checkpoint(model, trial)
                self._name_best(run_dir)
                if self.args.should_save:
                    state.save_to_json(str(staged.folder / STATE_FILE))
        finally:
            self._staged = None
        # one rank may have written for longer than the control group's time-out, so wait on the default group first
        PartialState().wait_for_everyone()
        # rank 0 alone reads a stream and knows its place
        record = gather_objects(run.recorder.record(state.global_step) if run.pool.rank == 0 else {}, run.control)[0]
        with staged.holding():
            if self.args.should_save:
                write_json(staged.folder / DATA_FILE, record)
        contents = Contents(
            step=state.global_step,
            num_ranks=self.args.world_size,
            num_stages=run.setup.num_stages,
            parameters=run.setup.costs.parameters,
            weights_only=self.args.save_only_model,
            data=record,
        )
        staged.finish(contents)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(staged.final))
        if self.args.should_save:
            rotate(staged.final, self.args.save_total_limit, state.best_model_checkpoint)
        # one rank alone deletes and uploads, which may take longer than the others' next exchange would wait
        PartialState().wait_for_everyone()

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staged.root) if self._staged is not None else super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # an upload reads in the background, from the folder's last name
        if self._staged is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_rng_state(self, output_dir: str) -> None:
        with self._holding_errors():
            super()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if not self._starts_anew("rng"):
            super()._load_rng_state(checkpoint)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # `Trainer` counts steps only after one, so a training killed after its last save would do one too many when restarted
        if self.state.global_step >= self.state.max_steps:
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

    def _choose_checkpoint(self, asked: str | bool | None) -> str | None:
        """The folder from which the next training resumes; None: it starts at its first step. Collective.

        Raises ValueError on every rank for a checkpoint that is not whole, unless `resume_partial` is set. If only the weights
        can be used, reads them here.
        """
        run, args = self.longctx_run, self.args
        choice = Choice(self.longctx_config.resume_partial, args.ignore_data_skip, run.control)
        self._chosen = choose(asked, Path(str(args.output_dir)), args.local_process_index == 0, choice)
        run.recorder.resume(None)
        if self._chosen is None:
            return None
        folder = str(self._chosen.folder)
        if "state" in self._chosen.anew:
            self._load_from_checkpoint(folder)
            self._chosen = None
            return None
        if not args.ignore_data_skip:
            run.recorder.resume(self._chosen.folder, "data" in self._chosen.anew)
        return folder

    def _starts_anew(self, part: str) -> bool:
        """Whether this part of the resumed checkpoint is left out, as the log said."""
        return self._chosen is not None and part in self._chosen.anew

    def _holding_errors(self) -> AbstractContextManager[None]:
        """Context for what single ranks write; errors wait until all ranks have finished, if a checkpoint is being written."""
        return nullcontext() if self._staged is None else self._staged.holding()
