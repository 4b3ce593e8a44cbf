"""Prints what a training says on rank 0, one line per step: a step that is logged gets the log's numbers in its own line.

The bar of the trainer stays on a terminal, without its own lines. In a file it would be printed anew around every line, so there
it is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerControl, TrainerState, TrainingArguments

from hf_longctx.plan.core.messages import duration

# numbers of a log that its step's line has, or that only a program needs
_TOLD = (
    *("loss", "epoch", "total_flos", "tokens_per_s", "measured_step_s", "predicted_step_s", "padding_share", "micro_batches"),
    *("planning_s", "idle_share", "predicted_idle_share", "plan_gap", "prediction_error", "learning_rate", "grad_norm"),
    *("late_plans", "failed_plans", "num_tokens", "router_loss", "router_load"),
)
# most other numbers in a step's line; more come in a line of their own
_MOST_OTHERS = 6
_SPEEDS = ("_runtime", "_samples_per_second", "_steps_per_second")


class Console:
    """Lines of a training. With `tells_logs` it also prints what the trainer logs, in place of the trainer's own callbacks."""

    def __init__(self, is_on: bool = True) -> None:
        self.is_on, self.tells_logs = is_on, False
        # a step's line that waits for its log, and the line after it
        self._held = self._behind = ""
        # losses of the steps since the last log
        self._num_steps = 0

    def step(self, line: str, is_logged: bool, behind: str = "") -> None:
        """Prints the line of a plan and one behind it, or keeps them until the log of the same step comes."""
        self.flush()
        self._held, self._behind = line, behind
        if not (is_logged and self.tells_logs):
            self.flush()

    def step_ends(self) -> None:
        """Counts a step, whose plans all have lines."""
        self._num_steps += 1

    def logs(self, step: int, logs: Mapping[str, Any]) -> None:
        """Prints a log: that of a step in the step's line, that of an evaluation or of the end in a sentence."""
        if not self.tells_logs:
            return
        if "loss" in logs:
            more = _more(logs, self._held, self._num_steps)
            others = _numbers({name: value for name, value in logs.items() if name not in _TOLD})
            if len(others) > _MOST_OTHERS:
                self._behind = "\n".join(filter(None, (f"  {', '.join(others)}", self._behind)))
                others = []
            self._held, self._num_steps = " | ".join([self._held or f"step {step:4d}", *more, *others]), 0
            self.flush()
            return
        self.flush()
        if "train_runtime" in logs:
            tqdm.write(f"trained up to step {step} in {duration(logs['train_runtime'])}, mean loss {logs['train_loss']:.4f}")
        elif any(name.endswith("_loss") for name in logs):
            tqdm.write(f"evaluation after step {step}: {_evaluated(logs)}")
        elif other := _numbers(logs):
            tqdm.write(", ".join(other))

    def flush(self) -> None:
        """Prints the line that waits for a log which did not come."""
        lines, self._held, self._behind = [self._held, self._behind], "", ""
        for line in filter(None, lines):
            tqdm.write(line)


class Bar(ProgressCallback):
    """The trainer's progress bar without its lines, which `Console` prints."""

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        """Prints nothing."""


def take_over(trainer: Trainer, console: Console) -> None:
    """Replaces the trainer's own callbacks that print, on every rank; leaves those of the user, and the table of a notebook."""
    # a subclass is the user's own
    printing = [each for each in trainer.callback_handler.callbacks if type(each) in (ProgressCallback, PrinterCallback)]
    printing = printing if console.is_on else []
    for callback in printing:
        trainer.remove_callback(callback)
        if isinstance(callback, ProgressCallback) and sys.stderr.isatty():
            trainer.add_callback(Bar)
    console.tells_logs = bool(printing)


def _more(logs: Mapping[str, Any], held: str, num_steps: int) -> list[str]:
    """Parts of a step's line that only its log knows."""
    # the loss of several steps is a mean, and without a line it is not said yet
    more = [f"mean loss of {num_steps} steps {logs['loss']:.4f}"] if held and num_steps > 1 else []
    more += [] if held else [f"loss {logs['loss']:.4f}"]
    more += [f"{word} {logs[name]:.3g}" for name, word in (("learning_rate", "lr"), ("grad_norm", "norm")) if name in logs]
    return more


def _evaluated(logs: Mapping[str, Any]) -> str:
    """Numbers of an evaluation without its prefix, and its seconds."""
    seconds = next((value for name, value in logs.items() if name.endswith("_runtime")), None)
    kept = {name: value for name, value in logs.items() if not name.endswith(_SPEEDS) and name != "epoch"}
    is_stock = all(name.startswith("eval_") for name in kept)
    found = _numbers({name.removeprefix("eval_") if is_stock else name: value for name, value in kept.items()})
    return ", ".join(found) + ("" if seconds is None else f" (in {duration(seconds)})")


def _numbers(logs: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in logs.items()
        if name not in ("epoch", "total_flos")
    ]
