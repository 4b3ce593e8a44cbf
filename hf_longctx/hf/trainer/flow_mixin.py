"""Overrides of `Trainer` by which ranks agree on the next action of a training.

They are `_maybe_log_save_evaluate`, `_evaluate` and `_report_to_hp_search`, and `train` for a trial that another rank ended.
`callback/guarded.py` also puts this mixin on stock trainers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from transformers import Trainer
from transformers.trainer_utils import TrainOutput

from hf_longctx.hf.ranks.agreed_flow import AgreedFlow
from hf_longctx.hf.ranks.stopping import OrderlyStop

# users put the mixin in front of a Trainer subclass, so type checkers treat it as one
if TYPE_CHECKING:
    _TrainerBase = Trainer
else:
    _TrainerBase = object


class _PrunedElsewhereError(Exception):
    """The end of a trial on a rank that does not lead the search; never leaves `train`."""


class FlowMixin(_TrainerBase):
    """The part of `CheckpointMixin` about decisions that all ranks take alike."""

    # messages of the present training; None outside of one
    _flow: AgreedFlow | None = None

    @contextmanager
    def _agreeing(self, stop: OrderlyStop, control_group: dist.ProcessGroup | None) -> Iterator[None]:
        """Context of a training whose ranks agree on flags of callbacks, and on metrics that decide."""
        self._flow = AgreedFlow(control_group, stop)
        try:
            with self._flow.events(self):
                yield
        finally:
            self._flow = None

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        try:
            return super().train(*args, **kwargs)
        except _PrunedElsewhereError:
            return TrainOutput(self.state.global_step, float("nan"), {})

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Ends a trial on all ranks if the search on the first one prunes it."""
        flow = self._flow
        if flow is None or trial is None:
            return super()._report_to_hp_search(trial, step, metrics)
        own, error = vars(self.callback_handler), None
        # callbacks may wait for all ranks there, so it comes once these know
        own["on_train_end"] = lambda args, state, control: control
        try:
            super()._report_to_hp_search(trial, step, metrics)
        except Exception as found:
            # the class is optuna's, which need not be installed
            if type(found).__name__ != "TrialPruned":
                raise
            error = found
        finally:
            del own["on_train_end"]
        if flow.has_any(error is not None):
            self.callback_handler.on_train_end(self.args, self.state, self.control)
            raise error or _PrunedElsewhereError

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Does what the flags ask for; ranks agree after the log, the evaluation and the save, whose callbacks may set flags."""
        flow, control = self._flow, self.control
        if flow is None or not (control.should_log or control.should_evaluate or control.should_save):
            return super()._maybe_log_save_evaluate(*args, **kwargs)
        own = vars(self)
        users = own.get("log")

        def log_once(*values: Any, **named: Any) -> None:
            # logs of callbacks, perhaps of one rank alone, are no part of the flow
            restore()
            self.log(*values, **named)
            flow.agree(self.args, self.state, self.control)

        def restore() -> None:
            own.pop("log", None)
            if users is not None:
                own["log"] = users

        own["log"] = log_once
        if not control.should_log or self.state.global_step <= self._globalstep_last_logged:
            restore()
        try:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        finally:
            restore()
        flow.agree(self.args, self.state, self.control)

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluates with the metrics of rank 0 on all ranks, since they choose the best checkpoint and stop trainings."""
        flow = self._flow
        if flow is None:
            return super()._evaluate(*args, **kwargs)
        loop, own = self.evaluation_loop, vars(self)
        users = own.get("evaluation_loop")

        def agreed_loop(*values: Any, **named: Any) -> Any:
            output = loop(*values, **named)
            return output._replace(metrics=flow.first(output.metrics))

        own["evaluation_loop"] = agreed_loop
        try:
            metrics = super()._evaluate(*args, **kwargs)
        finally:
            own.pop("evaluation_loop", None)
            if users is not None:
                own["evaluation_loop"] = users
        flow.agree(self.args, self.state, self.control)
        return metrics
