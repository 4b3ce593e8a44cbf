"""Stops a training properly after a signal, and locks its output folder against other jobs.

A rank that got a signal sends it in the exchange of token counts that begins every step, so all ranks receive it in the same
step. They finish that step, save once, do not evaluate, and `train()` returns.

The lock is the operating system's (fcntl): it ends with its process in any case, and works across machines if the file system
supports that (NFS with lockd, Lustre with flock). The file names the holder of the folder, for a refused job.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_longctx.hf.ranks.agreement import beating, explain_lost_ranks, raise_together
from hf_longctx.hf.ranks.heartbeats import main_thread_calls
from hf_longctx.hf.ranks.stop_signals import SIGNALS, StopSignals

logger = logging.getLogger(__name__)

LOCK_NAME = ".longctx.lock"


class FolderLock:
    """Lock of one folder; a process can take it once at a time."""

    def __init__(self, folder: str | Path) -> None:
        self._path = Path(folder) / LOCK_NAME
        self._file = -1

    def take(self) -> list[str]:
        """Locks the folder, which is created if missing; returns the problem if another process holds the lock."""
        while True:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                return [f"output_dir {self._path.parent} cannot be written ({error.strerror}); choose another output_dir"]
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                holder = os.pread(file, 200, 0).decode(errors="replace").strip() or "another process"
                os.close(file)
                return [
                    f"output_dir {self._path.parent} is in use by {holder}; wait until that training has ended, end it, or "
                    f"choose another output_dir"
                ]
            except OSError as error:
                os.close(file)
                logger.warning(
                    "output_dir %s cannot be locked (%s); make sure that no second job uses it", self._path.parent, error.strerror
                )
                return []
            if self._is_current(file):
                break
            # the earlier holder removed the file between open and lock
            os.close(file)
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._file = file
        return []

    def release(self) -> None:
        """Unlocks the folder and removes the file. Idempotent."""
        if self._file >= 0:
            # remove before unlocking, or another process could lock a file that is about to vanish
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1

    def _is_current(self, file: int) -> bool:
        """Whether the open file is still the folder's lock file."""
        try:
            return os.path.samestat(os.fstat(file), self._path.stat())
        except FileNotFoundError:
            return False


# methods of the trainer that run inside a step, when the number of finished steps is one less than the current step's
_INSIDE_A_STEP = ("get_batch_samples", "training_step", "_clip_grad_norm", "_get_grad_norm")


class OrderlyStop(TrainerCallback):
    """Stops the training after the step in which the ranks agreed. stopped_by: the signal's name; "" if none came.

    timeout_s: time-out of a step's collectives. control: the control group of all ranks.
    """

    def __init__(self, timeout_s: float, control: dist.ProcessGroup | None) -> None:
        self.stopped_by = ""
        self._timeout_s, self._control = timeout_s, control
        self._rank, num_ranks = (0, 1) if control is None else (dist.get_rank(), dist.get_world_size())
        self._signals = StopSignals(self._rank, num_ranks)
        self._saved_step = -1
        self._finished_steps: Callable[[], int] = int

    @property
    def present_step(self) -> int:
        """The number of the running step, if one runs."""
        return self._finished_steps() + 1

    @contextmanager
    def during_training(self, args: TrainingArguments, finished_steps: Callable[[], int]) -> Iterator[None]:
        """Context for one training: locks the output folder, listens for signals, and watches the other ranks.

        Collective over all ranks. Raises ValueError on every rank if another job uses the folder.
        """
        self.stopped_by, self._saved_step = "", -1
        at_end = args.load_best_model_at_end, args.save_total_limit
        lock = FolderLock(str(args.output_dir))
        with ExitStack() as undo:
            undo.callback(lock.release)
            raise_together(lock.take() if args.process_index == 0 else [], self._control)
            undo.enter_context(self._signals)
            # outside steps, a broken collective belongs to the log, checkpoint or evaluation after the last finished step
            undo.enter_context(explain_lost_ranks(finished_steps, self._rank, self._timeout_s))
            undo.enter_context(beating(lambda: finished_steps() + _is_inside_a_step(), self._timeout_s))
            self._finished_steps = finished_steps
            try:
                yield
            finally:
                args.load_best_model_at_end, args.save_total_limit = at_end

    def asked(self) -> list[int]:
        """Returns 1 for every signal that this rank got; the trainer sums it over ranks with other numbers, once per step."""
        return self._signals.counts()

    def agree(self, num_asked: Sequence[float]) -> None:
        """Takes the sums of `asked` over all ranks; if one is not 0, makes the current step the last."""
        if any(num_asked) and not self.stopped_by:
            self.stopped_by = next(each.name for each, heard in zip(SIGNALS, num_asked, strict=True) if heard)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.stopped_by:
            self._save_and_stop(args, state, control)

    def end_with(self, num_asked: Sequence[float], args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Takes the sums of `asked` over all ranks after the callbacks of the last step."""
        if not self.stopped_by and self._saved_step < state.global_step:
            self.agree(num_asked)
            self.on_step_end(args, state, control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not self.stopped_by:
            return
        if self._saved_step < 0 < state.global_step:
            # the data ended in the step that was agreed
            self._save_and_stop(args, state, control)
        else:
            control.should_save = control.should_evaluate = control.should_log = False
        # keep the checkpoint for the next job; the best model is for the end of all jobs
        args.load_best_model_at_end, args.save_total_limit = False, None

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not self.stopped_by or not state.is_world_process_zero:
            return
        remedy = "Go on with train(resume_from_checkpoint=True)"
        if args.save_only_model:
            remedy = (
                "It holds weights only (save_only_model=True), so train(resume_from_checkpoint=True) refuses it unless "
                "LongContextConfig(resume_partial=True) is set, and then goes on with a new optimizer and schedule"
            )
        logger.warning(
            "the training stopped after step %d of %d, since it got %s; its checkpoint is in %s. %s",
            *(state.global_step, state.max_steps, self.stopped_by, args.output_dir, remedy),
        )

    def _save_and_stop(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        control.should_training_stop = control.should_save = True
        control.should_evaluate = False
        self._saved_step = state.global_step


@contextmanager
def without_jit_checkpoint(args: TrainingArguments | None) -> Iterator[None]:
    """Context for building a `Trainer` without its own saving at SIGTERM (enable_jit_checkpoint).

    That would save on the ranks that got the signal, in different steps, while the others wait; `OrderlyStop` implements the
    setting instead.
    """
    if args is None or not getattr(args, "enable_jit_checkpoint", False):
        yield
        return
    args.enable_jit_checkpoint = False
    try:
        yield
    finally:
        args.enable_jit_checkpoint = True


def _is_inside_a_step() -> bool:
    """Whether the main thread is inside a step, so that the number of finished steps is one less than the current step's."""
    return any(code.co_name in _INSIDE_A_STEP for code in main_thread_calls())
