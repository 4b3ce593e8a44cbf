"""Makes all ranks take the same decisions in a training: flags of callbacks, settings of its state, metrics, pruned trials.

A callback may act on one rank only, by a clock, a file or a local metric. `Trainer` then saves, evaluates or stops on that rank,
while the others wait in another collective. Here one rank's decision applies to all, at the same point as on one process: the
ranks exchange a small message after the callbacks of a step, and after each log, evaluation and save.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from hf_longctx.hf.ranks.agreement import count_over_ranks, gather_objects, sums_over_ranks
from hf_longctx.hf.ranks.stopping import OrderlyStop
from hf_longctx.plan.core.messages import listed

logger = logging.getLogger(__name__)

FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
# values of the state on which the loop's next action depends
_SETTINGS = (
    "max_steps", "logging_steps", "eval_steps", "save_steps", "best_metric", "best_global_step", "best_model_checkpoint",
)  # fmt: skip
# events that all ranks reach, after which the loop reads flags
_EVENTS = ("on_step_end", "on_substep_end", "on_epoch_end")


class AgreedFlow:
    """Messages by which the ranks of a training agree; every method is collective over all ranks.

    control_group: the process group of all ranks; None for a single rank. stop: gets signals that came in the last step.
    """

    def __init__(self, control_group: dist.ProcessGroup | None, stop: OrderlyStop) -> None:
        self._group, self._stop = control_group, stop
        self._known: tuple[Any, ...] | None = None
        self._has_warned = False

    @contextmanager
    def events(self, trainer: Trainer) -> Iterator[None]:
        """Context of a training in which ranks agree after the events of the loop, also with callbacks that are added later."""
        handler = trainer.callback_handler
        own = vars(handler)

        def begin(args: TrainingArguments, state: TrainerState, control: TrainerControl, *rest: Any) -> TrainerControl:
            self._known = _settings(state)
            return begin_event(args, state, control, *rest)

        def agreeing(name: str, event: Callable[..., TrainerControl]) -> Callable[..., TrainerControl]:
            def run(args: TrainingArguments, state: TrainerState, control: TrainerControl, *rest: Any) -> TrainerControl:
                control = event(args, state, control, *rest)
                self.agree(args, state, control, is_step_end=name == "on_step_end")
                return control

            return run

        begin_event = handler.on_train_begin
        own["on_train_begin"] = begin
        for name in _EVENTS:
            own[name] = agreeing(name, getattr(handler, name))
        try:
            yield
        finally:
            for name in ("on_train_begin", *_EVENTS):
                own.pop(name, None)

    def agree(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, is_step_end: bool = False) -> None:
        """Applies, on all ranks, flags that any rank has set and settings of the state that any rank has changed."""
        flags = [int(bool(getattr(control, name))) for name in FLAGS]
        found = _settings(state)
        known = found if self._known is None else self._known
        *wished, num_changed, num_asked = _split(
            sums_over_ranks([*flags, float(found != known), *self._stop.asked()], self._group), len(FLAGS)
        )
        if self._group is not None:
            for name, own, num_ranks in zip(FLAGS, flags, wished, strict=True):
                if num_ranks and not own:
                    setattr(control, name, True)
            if num_changed:
                self._take_changes(state, known, found)
        self._known = _settings(state)
        if is_step_end and state.global_step >= state.max_steps:
            # no later step could carry a signal that arrived in this one
            self._stop.end_with(num_asked, args, state, control)

    def first(self, values: dict[str, Any] | None) -> dict[str, Any]:
        """Returns metrics of the first rank that has them; warns once about those that differ between ranks."""
        if self._group is None:
            return values or {}
        everyone = gather_objects(values or {}, self._group)
        first = {name: value for each in reversed(everyone) for name, value in each.items()}
        names = [name for name in first if len({repr(each.get(name)) for each in everyone}) > 1]
        if names and not self._has_warned and dist.get_rank() == 0:
            self._has_warned = True
            logger.warning("ranks computed different values of %s; those of rank 0 count on all ranks", listed(names))
        return first

    def has_any(self, is_so: bool) -> bool:
        """Returns whether `is_so` is true on any rank."""
        return bool(count_over_ranks(int(is_so), self._group))

    def _take_changes(self, state: TrainerState, known: tuple[Any, ...], found: tuple[Any, ...]) -> None:
        own = {name: new for name, old, new in zip(_SETTINGS, known, found, strict=True) if new != old}
        for changes in reversed(gather_objects(own, self._group)):
            for name, value in changes.items():
                setattr(state, name, value)


def _settings(state: TrainerState) -> tuple[Any, ...]:
    return tuple(getattr(state, name) for name in _SETTINGS)


def _split(sums: list[float], num_flags: int) -> tuple[Any, ...]:
    """Splits sums into those of flags, the sum of changes, and a list of those of signals."""
    return (*sums[:num_flags], sums[num_flags], sums[num_flags + 1 :])
