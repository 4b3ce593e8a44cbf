"""Overrides of `Trainer` about data: loaders of planned steps, and the labels of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.data.collator import PlannedDataset
from hf_longctx.hf.data.labels import LABELS_THAT_COUNT
from hf_longctx.hf.data.resume import sequences_per_step
from hf_longctx.hf.data.streams.planned_stream import PlannedStream
from hf_longctx.hf.data.streams.sources import is_stream, whole
from hf_longctx.hf.ranks.agreement import raise_together, sums_over_ranks
from hf_longctx.hf.ranks.stopping import OrderlyStop
from hf_longctx.hf.rules.trl import is_scored, read_columns
from hf_longctx.hf.run.sets import TEST_SET, chosen_evaluation_set
from hf_longctx.hf.trainer.loaders import eval_loader, train_loader
from hf_longctx.hf.trainer.run import Run

# remedy for batches that are not planned
_OWN_LOADER = (
    "return super().get_train_dataloader(), and change rows, order and batch size by train_dataset, data_collator and "
    "TrainingArguments"
)

# users put the mixin in front of a Trainer subclass, so type checkers treat it as one
if TYPE_CHECKING:
    _TrainerBase = Trainer
else:
    _TrainerBase = object


def check_planned(batches: list[Any]) -> None:
    """Raises ValueError for a batch that no loader of plans has made; those of skipped steps are empty."""
    for batch in batches:
        if not isinstance(batch, Mapping) or (batch and "step" not in batch):
            found = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
            raise ValueError(f"a batch of a loader of your own came ({found}), for which there is no plan; {_OWN_LOADER}")


class PlannedDataMixin(_TrainerBase):
    """The part of `LongContextMixin` about data; the run is started before any of it is used."""

    longctx_config: LongContextConfig
    longctx_run: Run
    # the stream that the present training reads, and the iteration of it that is at its end
    _stream: PlannedStream | None = None
    _used_up: Any = None
    # the checkpoint from which the present training goes on
    _chosen: Any
    # a checkpoint that is written behind training
    _saving: Any

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Planned steps of the training set; not sharded again by accelerate, since every rank draws the same steps.

        A trainer of TRL that keeps its own batches keeps its own loader.
        """
        if is_scored(type(self)):
            return super().get_train_dataloader()
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset; pass one to the trainer")
        loader = train_loader(self.longctx_run, self.train_dataset, self._steps_done)
        self._stream, self._used_up = loader.dataset if isinstance(loader.dataset, PlannedStream) else None, None
        return loader

    def _init_training_state(self, max_steps: Any, num_update_steps_per_epoch: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Begins in the epoch of the resumed stream; `Trainer` cannot know where the epochs of a stream ended."""
        begin = super()._init_training_state(max_steps, num_update_steps_per_epoch, *args, **kwargs)
        if self._stream is None:
            return begin
        stream, num_skipped = self._stream, self._stream.num_skipped
        if num_skipped // self.args.gradient_accumulation_steps >= num_update_steps_per_epoch:
            # no step of this epoch is left, as only a stream with a length can tell
            stream.leave_epoch()
            return stream.epochs_ended + 1, 0
        return stream.epochs_ended, num_skipped

    def _steps_done(self) -> int:
        """Optimizer steps whose batches the loader of a resumed training leaves out.

        None outside of a training, and none while the state is still that of the training before.
        """
        is_resumed = self._chosen is not None or is_stream(self.train_dataset)
        return self.state.global_step if self.is_in_train and is_resumed else 0

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Planned steps of an evaluation set, in its order; a set given here is checked like the sets given at the start.

        eval_dataset: a set, or the name of one if the trainer has a dict of them.
        """
        if is_scored(type(self)):
            return super().get_eval_dataloader(eval_dataset)
        given, known = self._columns_read(eval_dataset), self._columns_read(self.eval_dataset)
        name, dataset = chosen_evaluation_set(given, known)
        # metrics of a classifier need the logits of all rows, also of those without a label
        marks = self.longctx_run.task.kind != "next_token" and self.compute_metrics is not None
        return eval_loader(self.longctx_run, name, dataset, marks)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Planned steps of a set to predict, in its order; its rows need no labels if the model classifies."""
        if is_scored(type(self)):
            return super().get_test_dataloader(test_dataset)
        marks = self.longctx_run.task.kind != "next_token"
        return eval_loader(self.longctx_run, TEST_SET, whole(self._columns_read(test_dataset)), marks)

    def _columns_read(self, dataset: Any) -> Any:
        """A dataset, or a dict of several, with the columns that the run's collator reads."""
        return read_columns(type(self), dataset, self.longctx_run.sets.collation.reads_all)

    def _check_loader(self, loader: Any) -> None:
        """Raises ValueError for a loader of the user's own, whose batches have no plans; looked at when a training begins."""
        if (
            is_scored(type(self))
            or not isinstance(loader, DataLoader)
            or isinstance(loader.dataset, PlannedDataset | PlannedStream)
        ):
            return
        raise ValueError(
            f"get_train_dataloader of {type(self).__name__} returned a loader of its own ({type(loader).__name__} over "
            f"{type(loader.dataset).__name__}), for whose batches there are no plans; {_OWN_LOADER}"
        )

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Sequences of one optimizer step over all ranks; with tokens_per_step, their mean number.

        The lengths of a stream are unknown, so for a stream it is the number without a token budget.
        """
        if is_scored(type(self)):
            return super().get_total_train_batch_size(args)
        if self.longctx_config.tokens_per_step is None or is_stream(self.train_dataset):
            return sequences_per_step(args)
        lengths = self.longctx_run.sets.index("train_dataset", self.train_dataset).lengths
        return max(1, round(self.longctx_config.tokens_per_step / float(lengths.mean())))

    def _label_sums(self, batches: list[dict[str, Any]], stop: OrderlyStop | None = None) -> tuple[float, int]:
        """Total weight and number of label tokens over all ranks; tells `stop` which signals asked ranks to stop.

        Tells activations, too, by how much slabs that were full on some ranks were too small.

        stop: None in an evaluation; else also looks after a checkpoint that is written behind training. Raises ValueError on
        every rank if a row of `batches` has changed on any, and for a step without a label that counts.
        """
        control = self.longctx_run.control
        check_planned(batches)
        changed = [batch["changed"] for batch in batches if "changed" in batch]
        if stop is None:
            # in training the executor asks, after the callbacks of the step's beginning
            changed += filter(None, [self.longctx_run.code.problem(cast(nn.Module, self.model))])
        own = [sum(batch[name] for batch in batches) for name in ("total_weight", "num_label_tokens")]
        asked = [] if stop is None else [self._saving is not None and self._saving.is_over, *stop.asked()]
        beside = self.longctx_run.activations.beside_bytes
        said = [*own, len(changed), beside, beside > 0, *asked]
        total_weight, num_labels, num_changed, beside_sum, num_full, *num_asked = sums_over_ranks(said, control)
        self.longctx_run.activations.agree(int(beside_sum / max(1, num_full)))
        if stop is not None:
            num_over, *num_asked = num_asked
            stop.agree(num_asked)
            if num_over == self.args.world_size:
                self._finish_saving()
        if num_changed:
            step = f"step {self.state.global_step + 1} cannot run"
            raise_together(changed, control, "the evaluation cannot go on" if stop is None else step)
        if stop is not None and batches and not total_weight:
            # a stream's, or a late one: the first steps of other sets are looked at before the training
            raise ValueError(
                f"step {self.state.global_step + 1} has no label that counts ({LABELS_THAT_COUNT}), so it has no mean loss; "
                f"give a step more sequences, leave rows without labels out, or raise max_length if labels were cut off"
            )
        return total_weight, int(num_labels)

    @property
    def longest_sequence(self) -> int:
        """The most tokens that a sequence may have; longer rows are errors, or are cut."""
        return self.longctx_run.sets.longest_sequence

    if TYPE_CHECKING:

        def _finish_saving(self) -> None: ...
