"""Prints the lines of a training on rank 0, one for every log, above the trainer's progress bar.

The trainer's own callback draws the bar and prints nothing else.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any, cast

from tqdm.auto import tqdm
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils import logging as transformers_logging

from hf_longctx.plan.core.messages import duration, on_screen

# numbers of a log that its line already has, or that only a program needs
_TOLD = (
    *("loss", "epoch", "total_flos", "tokens_per_s", "measured_step_s", "predicted_step_s", "padding_share", "micro_batches"),
    *("planning_s", "idle_share", "predicted_idle_share", "plan_gap", "prediction_error", "learning_rate", "grad_norm"),
    *("num_tokens", "aux_loss", "router_load"),
)
# most other numbers in that line; more get a separate line
_MOST_OTHERS = 6
_SPEEDS = ("_runtime", "_samples_per_second", "_steps_per_second")


class Console:
    """Prints lines of a training on one rank. tells_logs: print logs in place of the trainer's callback."""

    def __init__(self, is_on: bool = True) -> None:
        self.is_on, self.tells_logs = is_on, False
        self._own: TrainerCallback | None = None

    def logs(self, step: int, logs: Mapping[str, Any], parts: Sequence[str] = ()) -> None:
        """Prints a log: one of steps in a line, with `parts` that describe them; others in a sentence."""
        if self.is_on and "loss" in logs:
            self._steps(step, logs, parts)
        elif self.tells_logs and "train_runtime" in logs:
            self.say(f"trained up to step {step} in {duration(logs['train_runtime'])}, mean loss {logs['train_loss']:.4f}")
        elif self.tells_logs and any(name.endswith("_loss") for name in logs):
            self.say(f"evaluation after step {step}: {_evaluated(logs)}")
        elif self.tells_logs and (other := _numbers(logs)):
            self.say(", ".join(other))

    def say(self, text: str) -> None:
        """Prints a text above the bars."""
        tqdm.write(on_screen(text, sys.stdout))

    def take_over(self, trainer: Trainer) -> Callable[[], None]:
        """Makes the trainer's printing callback only draw its bar; returns a function that undoes this.

        Two or more of them stay unchanged, since one is the user's, as do subclasses, such as the table of a notebook. Every
        rank calls it.
        """
        printing = [each for each in trainer.callback_handler.callbacks if type(each) in (ProgressCallback, PrinterCallback)]
        if not self.is_on or len(printing) != 1:
            return lambda: None
        self._own, self.tells_logs = printing[0], True
        # set on the instance, so that the list of callbacks may change and an event may be running
        vars(self._own)["on_log"] = _log_nothing
        if isinstance(self._own, ProgressCallback):
            bars = _Bars(self._own, is_drawn=sys.stderr.isatty())
            vars(self._own).update(on_train_begin=bars.begin, on_prediction_step=bars.predict)
        return self._give_back

    @contextmanager
    def above_bars(self) -> Iterator[None]:
        """Context of a training in which loggers write above its bar, and bars are removed if it raises."""
        if not isinstance(own := self._own, ProgressCallback):
            yield
            return
        with ExitStack() as undo:
            for handler in _terminal_handlers() if sys.stderr.isatty() else ():
                lift = _lifted(handler)
                handler.addFilter(lift)
                undo.callback(handler.removeFilter, lift)
            if transformers_logging.is_progress_bar_enabled():
                # every checkpoint would leave its own bars
                transformers_logging.disable_progress_bar()
                undo.callback(transformers_logging.enable_progress_bar)
            try:
                yield
            except BaseException:
                _close(own)
                raise

    def _give_back(self) -> None:
        own, self._own, self.tells_logs = self._own, None, False
        for name in ("on_log", "on_train_begin", "on_prediction_step"):
            vars(own).pop(name, None)

    def _steps(self, step: int, logs: Mapping[str, Any], parts: Sequence[str]) -> None:
        rates = [f"{word} {logs[name]:.3g}" for name, word in (("learning_rate", "lr"), ("grad_norm", "norm")) if name in logs]
        others = _numbers({name: value for name, value in logs.items() if name not in _TOLD})
        is_long = len(others) > _MOST_OTHERS
        self.say(" | ".join([f"step {step:4d}", f"loss {logs['loss']:7.4f}", *parts, *rates, *([] if is_long else others)]))
        if is_long:
            self.say(f"  {', '.join(others)}")


class _Bars:
    """Events of the trainer's own progress bar, with bars that are named, and removed at their end.

    is_drawn: whether standard error is a terminal; in a file, a bar would be printed again around every line.
    """

    def __init__(self, own: ProgressCallback, is_drawn: bool) -> None:
        self.own, self.is_drawn = own, is_drawn
        if (bar := own.training_bar) is not None:
            # its training has already begun
            _name("training", bar)
            bar.disable = not is_drawn

    def begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Begins a training."""
        if self.is_drawn:
            ProgressCallback.on_train_begin(self.own, args, state, control, **kwargs)
            _name("training", self.own.training_bar)
        elif state.is_world_process_zero:
            # the callback's other events update and close it
            self.own.training_bar, self.own.current_step = cast(Any, tqdm(disable=True)), 0

    def predict(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Counts a step of an evaluation."""
        if self.is_drawn:
            ProgressCallback.on_prediction_step(self.own, args, state, control, **kwargs)
            _name("evaluating", self.own.prediction_bar)


def _name(what: str, bar: Any) -> None:
    """Names a bar by what it counts, and removes it at its end."""
    if bar is not None and not bar.desc:
        bar.leave, bar.unit = False, " steps"
        if callable(shape := bar.dynamic_ncols):
            # Ctrl-C is shown after it, and would break the line
            bar.dynamic_ncols = lambda file: _narrower(shape(file))
        bar.set_description(what)


def _narrower(shape: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    columns, rows = shape
    return columns and columns - len("^C"), rows


def _close(own: ProgressCallback) -> None:
    """Removes bars that an error has left."""
    for bar in (own.prediction_bar, own.training_bar):
        if bar is not None:
            bar.close()
    own.prediction_bar = own.training_bar = None


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces a method that prints logs."""


def _terminal_handlers() -> list[logging.StreamHandler[Any]]:
    """Returns all logging handlers that write to the streams of this process."""
    known = (each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger))
    loggers = [logging.getLogger(), *known]
    # loggers without any handler use the last resort
    handlers = {*(handler for logger in loggers for handler in logger.handlers), logging.lastResort}
    streams = sys.stdout, sys.stderr
    return [each for each in handlers if isinstance(each, logging.StreamHandler) and each.stream in streams]


def _lifted(handler: logging.StreamHandler[Any]) -> Callable[[logging.LogRecord], bool]:
    """Makes a filter that writes a handler's records above drawn bars, and passes them on if there are none."""

    def lift(record: logging.LogRecord) -> bool:
        shown = copy(record)
        if handler.formatter is None:
            shown.msg, shown.args = on_screen(record.getMessage(), handler.stream), ()
        with tqdm.external_write_mode(file=handler.stream), handler.lock or ExitStack():
            handler.emit(shown)
        return False

    return lift


def _evaluated(logs: Mapping[str, Any]) -> str:
    """Returns the numbers of an evaluation without its prefix, and its seconds."""
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
