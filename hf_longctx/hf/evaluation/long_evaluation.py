"""Measures the loss by position and a needle grid during training, by the callback `LongContextEvaluation`.

Both come from one forward per document that returns the loss of every token. With `LongContextTrainer` this forward runs under
plans, with the run's sequence groups, slices and stages; with a stock `Trainer` it runs the plain model. Nothing is generated: an
answer token counts as right if the model found it likeliest, given the true tokens before it.
"""

from __future__ import annotations

import itertools
import json
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from accelerate.utils import gather_object
from numpy.typing import NDArray
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_longctx.hf.evaluation.findings import (
    EvaluationRun,
    LossBucket,
    NeedleCell,
    bucket_sums,
    cell_sums,
    loss_buckets,
    needle_cells,
    save_png_loss,
    save_png_needles,
)
from hf_longctx.hf.evaluation.needles import NeedleTask
from hf_longctx.hf.models.adapters import base_of
from hf_longctx.hf.models.heads import head_kind
from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.hf.trainer.row_scores import RowScores, plain_scores
from hf_longctx.hf.trainer.trainer import LongContextMixin

logger = logging.getLogger(__name__)

_RECORD, _NEEDLES, _LOSS = "long_evaluation.json", "needles.png", "loss_by_position.png"


class LongContextEvaluation(TrainerCallback):
    """Logs the loss of held-out rows by position and the needle grid; writes both, with pictures, into `output_dir`.

    It evaluates when training begins and ends, and after every `every_steps`th step; `run()` evaluates at any time. Positions
    count from 1 in every document and are grouped into buckets: one below `first_bucket`, then one per power of two. held_out:
    rows like those of an evaluation dataset. Raises ValueError for a trainer or for lengths that it cannot measure.

    A resumed run continues the record of evaluations in `output_dir`. A record of another training, or with other cells, is
    renamed. Collective over all ranks.

    Example:

        needles = NeedleTask(lengths=(4096, 32768), depths=(0, 0.5, 1), make=passkeys(tokenizer))
        trainer.add_callback(LongContextEvaluation(trainer, held_out=dataset, needles=needles, every_steps=100))
        trainer.train()
    """

    def __init__(
        self,
        trainer: Trainer,
        held_out: Any = None,
        needles: NeedleTask | None = None,
        *,
        every_steps: int | None = None,
        at_begin: bool = True,
        at_end: bool = True,
        first_bucket: int = 64,
    ) -> None:
        if held_out is None and needles is None:
            raise ValueError("a long-context evaluation has nothing to do; give it held_out rows, needles, or both")
        if first_bucket < 2 or first_bucket & (first_bucket - 1):
            raise ValueError(f"first_bucket is {first_bucket}; give a power of two, 2 or more")
        if every_steps is not None and every_steps < 1:
            raise ValueError(f"every_steps is {every_steps}; give 1 or more, or leave it out")
        self.trainer, self.held_out, self.needles, self.first_bucket = trainer, held_out, needles, first_bucket
        self.every_steps, self.at_begin, self.at_end = every_steps, at_begin, at_end
        self._check()
        self.runs = self._read()
        self._num_read = len(self.runs)
        self._needle_rows = datasets.Dataset.from_list(needles.rows()) if needles is not None else None
        if trainer.args.process_index == 0 and find_spec("matplotlib") is None:
            logger.warning("%s is written without pictures; for pictures, pip install matplotlib", _RECORD)

    def run(self) -> dict[str, float]:
        """Evaluates now, logs the metrics, writes the files, and returns the metrics. Collective over all ranks."""
        self.runs.append(self._evaluated())
        metrics = self.runs[-1].metrics()
        self.trainer.log(dict(metrics))
        self._write()
        return metrics

    def measure(self, model: PreTrainedModel, name: str) -> dict[str, float]:
        """Evaluates another model, whole on every rank, for comparison; results go to files and pictures, not to logs."""
        self.runs.append(self._evaluated(model, name))
        self._write()
        return self.runs[-1].metrics()

    def _evaluated(self, model: PreTrainedModel | None = None, name: str = "") -> EvaluationRun:
        """Evaluates the trained model, or another one. Collective over all ranks."""
        buckets: tuple[LossBucket, ...] = ()
        cells: tuple[NeedleCell, ...] = ()
        if self.held_out is not None:
            scores = self._scores(self.held_out, "held_out", model)
            buckets = loss_buckets(self._over_ranks(bucket_sums(scores, self.first_bucket)), self.first_bucket)
        if self.needles is not None:
            scores = self._scores(self._needle_rows, "needles", model)
            sums = self._over_ranks(cell_sums(scores, self.needles.num_documents, len(self.needles.cells)))
            cells = needle_cells(sums, self.needles.cells)
        return EvaluationRun(self.trainer.state.global_step, buckets, cells, name)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._check()
        self._leave_other_trainings(state.global_step)
        if self.at_begin:
            self._run_once(state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.every_steps is not None and state.global_step % self.every_steps == 0:
            self._run_once(state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.at_end:
            self._run_once(state)

    def _run_once(self, state: TrainerState) -> None:
        """Evaluates, unless the last evaluation was of this step."""
        if not self.runs or self.runs[-1].name or self.runs[-1].step != state.global_step:
            self.run()

    def _check(self) -> None:
        trainer = self.trainer
        if trainer.model is not None and (kind := head_kind(trainer.model)) != "next_token":
            raise ValueError(
                f"{type(base_of(trainer.model)).__name__} classifies {kind}s, but a long-context evaluation scores next tokens; "
                f"use evaluate() and compute_metrics"
            )
        if (planned := self._planned) is not None:
            limit = planned.longest_sequence
            if self.needles is not None and (longest := max(self.needles.lengths)) > limit:
                raise ValueError(
                    f"a needle document has {longest} tokens, but this run fits {limit} at most and would cut it; lower the "
                    f"needle lengths, or raise max_length or tokens_per_rank"
                )
            return
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or getattr(trainer.model, "tp_size", None) is not None:
            raise ValueError(
                "the model's weights are spread over ranks (FSDP, DeepSpeed or tensor parallelism); a long-context evaluation "
                "supports this only under LongContextTrainer: use that, with parameters='sharded'"
            )

    @property
    def _planned(self) -> LongContextMixin | None:
        """Returns the trainer if it evaluates under plans, else None."""
        trainer: Any = self.trainer
        return trainer if isinstance(trainer, LongContextMixin) and trainer.plans_evaluation else None

    def _scores(self, dataset: Any, name: str, other: PreTrainedModel | None) -> RowScores:
        if other is None and (planned := self._planned) is not None:
            return planned.score_tokens(dataset, name)
        args, model = self.trainer.args, self.trainer.model if other is None else other
        assert model is not None
        model.to(args.device)
        return plain_scores(model, dataset, args.process_index, args.world_size, args.device)

    def _over_ranks(self, sums: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sums over ranks, in rank order, so that all ranks get exactly the same result."""
        return np.sum(self._of_ranks(sums), axis=0)

    def _of_ranks(self, value: Any) -> list[Any]:
        """Gathers a value from every rank."""
        if (planned := self._planned) is not None:
            return gather_objects(value, planned.longctx_run.control)
        everyone: list[Any] = gather_object([value])
        return everyone

    @property
    def _folder(self) -> Path:
        return Path(str(self.trainer.args.output_dir))

    @property
    def _kind(self) -> dict[str, Any]:
        """Returns settings that must be equal for all evaluations of one record, as JSON values."""
        cells = [] if self.needles is None else [list(cell) for cell in self.needles.cells]
        return {"first_bucket": None if self.held_out is None else self.first_bucket, "cells": cells}

    def _read(self) -> list[EvaluationRun]:
        """Reads earlier evaluations from the folder on rank 0, for all ranks; renames a record with other settings."""
        path = self._folder / _RECORD
        text = self._of_ranks(path.read_text() if self.trainer.args.process_index == 0 and path.exists() else "")[0]
        if not text:
            return []
        try:
            record = json.loads(text)
            if {name: record[name] for name in self._kind} == self._kind:
                return [EvaluationRun.of(run) for run in record["runs"]]
            why = "its evaluations have other needle lengths, depths or buckets"
        except (ValueError, TypeError, KeyError):
            why = "this version cannot read it"
        self._set_aside(why)
        return []

    def _leave_other_trainings(self, step: int) -> None:
        """Drops evaluations of other trainings from the file: those after `step`, or all if `step` is 0.

        step: optimizer step at which this training continues.
        """
        read, own = self.runs[: self._num_read], self.runs[self._num_read :]
        kept = [run for run in read if run.step <= step] if step else []
        self._num_read = 0
        if len(kept) == len(read):
            return
        self.runs = kept + own
        why = f"training resumes at step {step}, and it has later evaluations" if step else "a new training begins"
        self._set_aside(why)
        self._write_record()

    def _set_aside(self, why: str) -> None:
        """Renames the record in the folder to a free name, on the rank that saves."""
        path = self._folder / _RECORD
        if self.trainer.args.should_save and path.exists():
            names = (path.with_suffix(f".{number}.json") for number in itertools.count(1))
            free = next(name for name in names if not name.exists())
            path.rename(free)
            logger.warning("%s is kept as %s: %s", path, free.name, why)

    def _write(self) -> None:
        """Writes the record and, if matplotlib is installed, the pictures, on the rank that saves."""
        if not self.trainer.args.should_save:
            return
        self._write_record()
        if find_spec("matplotlib") is None:
            return
        if self.needles is not None:
            save_png_needles(self.runs, self._folder / _NEEDLES)
        if self.held_out is not None:
            save_png_loss(self.runs, self._folder / _LOSS)

    def _write_record(self) -> None:
        """Writes the record atomically, since a training that stops here will read it after a resume."""
        if not self.trainer.args.should_save:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        record = {**self._kind, "runs": [run.record() for run in self.runs]}
        part = self._folder / f"{_RECORD}.part"
        part.write_text(json.dumps(record, indent=2) + "\n")
        part.replace(self._folder / _RECORD)
