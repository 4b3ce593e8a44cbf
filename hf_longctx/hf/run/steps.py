"""Runs plans on the model of a run: those of a training's optimizer steps, and the forwards of evaluations.

Needs no `Trainer` object; the methods of `LongContextMixin` only call it.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn

from hf_longctx.hf.checkpoints.manifest import read_record
from hf_longctx.hf.data.collator import PlannedStep
from hf_longctx.hf.data.labels import LABELS_THAT_COUNT
from hf_longctx.hf.data.streams.sources import is_stream
from hf_longctx.hf.log_probs.rewards import passes_of
from hf_longctx.hf.log_probs.two_passes import Remembered, ScoredModel, TwoPasses
from hf_longctx.hf.models.dropout import check_rates
from hf_longctx.hf.models.media import tower_graphs
from hf_longctx.hf.ranks.agreement import gather_objects, raise_together, sums_over_ranks
from hf_longctx.hf.ranks.stopping import OrderlyStop
from hf_longctx.hf.run.free_memory import FreeMemory, failed_bytes
from hf_longctx.hf.run.nonfinite import MODEL_FOLDER, PlanWithInputs, RefusedStep
from hf_longctx.hf.run.run import Run, reference_run
from hf_longctx.hf.run.saver import Saver
from hf_longctx.plan.core.types import RankPlan
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.core.loss import TokenTally
from hf_longctx.runtime.execution.checks import forward_only
from hf_longctx.runtime.execution.executor import PlanInputs, StepExecutor
from hf_longctx.runtime.execution.round import OutOfMemoryTogether, StepResult
from hf_longctx.runtime.parameters.gradients import nonfinite_names
from hf_longctx.runtime.parameters.host_steps import HostSteps
from hf_longctx.runtime.parameters.sharded import layer_shards
from hf_longctx.runtime.process_groups import sum_over_ranks

logger = logging.getLogger(__name__)

# remedy for batches that are not planned
OWN_LOADER = (
    "return super().get_train_dataloader(), and change rows, order and batch size by train_dataset, data_collator and "
    "TrainingArguments"
)
# arguments of `StepExecutor.evaluate` and `score`
Forwards = tuple[RankPlan, PlanInputs, ActivationEngine | None]


@dataclass
class _Mean:
    """The mean of numbers that are added one by one; NaN without any."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        """Adds a number."""
        self.total, self.count = self.total + value, self.count + 1

    @property
    def value(self) -> float:
        """The mean."""
        return self.total / self.count if self.count else math.nan


@dataclass(frozen=True)
class Refusal:
    """Inputs for the refusal of a step that cannot be used."""

    # number of the step
    number: int
    # training set, whose rows are named; None if the trainer loads its rows itself
    dataset: Any
    # writes the model to a folder. Collective
    save_model: Callable[[str], None]


class StepRunner:
    """Runs the plans of one training, and forwards of evaluations. All methods that run or agree are collective over all ranks.

    counts_tokens: whether steps count tokens that were predicted right, and sum up entropies. was_skipped: whether the present
    step was left out, because its loss or gradients are not finite. read: makes the batch of a planned step, so that a step can
    be planned again; None for a stream and for batches of a trainer's own.
    """

    def __init__(self, run: Run, saver: Saver, counts_tokens: bool) -> None:
        self.run, self.saver, self.was_skipped = run, saver, False
        self._counts_tokens = counts_tokens
        self.free = FreeMemory(run.setup, run.source, run.args.device, run.control)
        self.read: Callable[[PlannedStep], dict[str, Any]] | None = None
        # gradients that are not of the present step's plans, so that none of them can run again
        self._has_gradients = False
        # kept between steps, since it owns gradient buffers
        self._executor: StepExecutor | None = None
        # batches of the present optimizer step, until the first of them runs
        self._batches: list[Any] = []
        self._num_batches = 0
        # plans of the present step that have run, and their loss
        self._done: list[PlanWithInputs] = []
        self._loss: Tensor | None = None
        # sums and numbers of the losses that were used, since the last log and in all, where steps may be left out
        self._since_log, self._in_all = _Mean(), _Mean()
        self._num_skipped_since_log, self._num_skipped_here = 0, 0
        run.recorder.num_skipped = 0

    def count_on_from(self, folder: str | None) -> None:
        """Continues the count of skipped steps where the training that wrote this checkpoint was."""
        try:
            record = (read_record(Path(folder)) if folder else None) or {}
        except ValueError:
            # named when the checkpoint was chosen
            record = {}
        before = record.get("skipped_steps", 0)
        self.run.recorder.num_skipped = before if isinstance(before, int) else 0

    def executor(self, model: nn.Module) -> StepExecutor:
        """Returns the executor of a training's placed model, kept as long as that is the same object."""
        if self._executor is None or self._executor.model is not model:
            self._executor = self.run.executor(model, self.run.config.fp32_gradients)
        return self._executor

    def forget_executor(self) -> None:
        """Frees the gradient buffers."""
        self._executor = None

    def forget_step(self) -> None:
        """Forgets the plans of a step that did not end."""
        self._done, self._loss, self.was_skipped = [], None, False

    def begin_step(self, model: nn.Module, batches: list[dict[str, Any]], global_step: int, seed: int) -> None:
        """Takes the batches of an optimizer step, and numbers their sequences through all plans, for the masks of dropout.

        Raises ValueError for a dropout whose rate was raised from 0 since the start.
        """
        self._batches, self._num_batches = batches, len(batches)
        self._has_gradients = any(parameter.grad is not None for parameter in model.parameters())
        check_rates(model)
        if (dropout := self.run.dropout) is not None:
            plans = [batch["step"].plan for batch in batches if "step" in batch]
            dropout.seed = seed
            counts = accumulate((len(plan.lengths) for plan in plans), initial=0)
            dropout.begin_step(global_step, dict(zip((plan.step for plan in plans), counts, strict=False)))

    def label_sums(
        self,
        model: nn.Module,
        batches: list[dict[str, Any]],
        number: int = 0,
        stop: OrderlyStop | None = None,
        finish_saving: Callable[[], None] = lambda: None,
    ) -> tuple[float, int]:
        """Sums weights and numbers of label tokens over all ranks; the same exchange settles what else ranks must agree on.

        These are: signals that ask to stop, a checkpoint that threads have finished, rows and code that have changed, and the
        bytes by which full slabs of host memory were too small. number: of the present step. stop: None in an evaluation, which
        has no number. finish_saving: called once all threads have finished. Raises ValueError on every rank if a row has changed
        on any, and for a step without a label that counts.
        """
        run, control = self.run, self.run.control
        check_planned(batches)
        changed = [batch["changed"] for batch in batches if "changed" in batch]
        if stop is None:
            # in training the executor asks, after the callbacks of the step's beginning
            changed += filter(None, [run.code.problem(model)])
        own = [sum(batch[name] for batch in batches) for name in ("total_weight", "num_label_tokens")]
        asked = [] if stop is None else [self.saver.is_over, *stop.asked()]
        beside = run.activations.beside_bytes
        said = [*own, len(changed), beside, beside > 0, self.free.is_short, *asked]
        total_weight, num_labels, num_changed, beside_sum, num_full, num_short, *num_asked = sums_over_ranks(said, control)
        run.activations.agree(int(beside_sum / max(1, num_full)))
        run.report.say(self.free.agree(num_short))
        if stop is not None:
            num_over, *num_asked = num_asked
            stop.agree(num_asked)
            if num_over == run.args.world_size:
                finish_saving()
        if num_changed:
            raise_together(changed, control, "the evaluation cannot go on" if stop is None else f"step {number} cannot run")
        if stop is not None and batches and not total_weight:
            # a stream's, or a late one: the first steps of other sets are looked at before the training
            raise ValueError(
                f"step {number} has no label that counts ({LABELS_THAT_COUNT}), so it has no mean loss; "
                f"give a step more sequences, leave rows without labels out, or raise max_length if labels were cut off"
            )
        if stop is not None:
            self._plan_again(batches, number)
        return total_weight, int(num_labels)

    def _plan_again(self, batches: list[dict[str, Any]], number: int) -> None:
        """Replaces batches whose plans fill more memory than ranks have found since, if others need less. Collective."""
        changed: list[str] = []
        found = False
        for place, batch in enumerate(batches):
            plan = batch["step"].plan if "step" in batch else None
            if self.read is None or plan is None or plan.estimate.peak_bytes <= self.free.limit_bytes:
                continue
            (again,) = self.run.source.plans([(plan.step, plan.sequences)], explore=False)
            if again.estimate.peak_bytes < plan.estimate.peak_bytes:
                found = True
                batches[place] = self.read(replace(batch["step"], plan=again))
                changed += filter(None, [batches[place].get("changed")])
        if found:
            raise_together(changed, self.run.control, f"step {number} cannot run")

    def run_plan(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        total_weight: float,
        ends_step: bool,
        refusal: Refusal,
        early_updates: HostSteps | None = None,
        loss: Tensor | None = None,
    ) -> Tensor:
        """Runs a plan forward and backward; returns the loss as `Trainer` adds it up.

        total_weight: sum of the weights of the step's label tokens over all ranks. ends_step: the plan is the last of its step,
        which then reduces gradients, and is left out or refused if it cannot be used. loss: the loss to report in place of that
        of the tokens. Raises FloatingPointError on every rank for a refused step. If all ranks know that a plan has run out of
        device memory, as a single one does, it is planned again for less, and the step runs again from its first plan.
        """
        executor = self.executor(model)
        executor.early_updates = early_updates
        while True:
            try:
                result = self._compute(executor, batch, total_weight, ends_step)
                break
            except torch.OutOfMemoryError as error:
                # otherwise the other ranks wait inside the plan
                is_known = batch["step"].plan.num_ranks == 1 or isinstance(error, OutOfMemoryTogether)
                most = failed_bytes(batch["step"].plan, self.free.limit_bytes) / 2**30
                # lowers the limit
                found = self._for_less(batch, early_updates) if is_known else ""
                if isinstance(found, str):
                    why = f". The step cannot run again: {found}" if found else ""
                    raise type(error)(f"{error}{why}; train on from the last checkpoint with device_gib={most:.3g}") from error
                batch = found
            # the error is gone, and with it the tensors of its frames
            self._run_again(executor, total_weight)
        result = result if loss is None else replace(result, loss=loss)
        self._loss = result.loss if self._loss is None else self._loss + result.loss
        if ends_step:
            self._end_step(executor, result.is_finite, refusal)
        self.run.report.step_done(batch["step"].plan, result)
        # zero for a step that is left out, since a sum would stay NaN
        return torch.zeros_like(result.loss) if self.was_skipped else torch.nan_to_num(result.loss, posinf=0.0, neginf=0.0)

    def _for_less(self, batch: Mapping[str, Any], early_updates: HostSteps | None) -> dict[str, Any] | str:
        """Returns the batch of a plan that ran out of memory, planned for less, or why it cannot run again. Collective."""
        plan, free = batch["step"].plan, self.free
        if obstacles := [each for each in gather_objects(self._obstacle(early_updates), self.run.control) if each]:
            return obstacles[0]
        free.failed(plan)
        self.run.report.say(free.agree(self.run.pool.num_ranks))
        batches = [dict(batch)]
        self._plan_again(batches, plan.step)
        return batches[0] if batches[0]["step"].plan is not plan else "no plan of it needs less memory"

    def _obstacle(self, early_updates: HostSteps | None) -> str:
        """Describes why no plan of the present step can run again; empty if they can."""
        if not self.free.is_watched:
            return "its plan may not depend on what was measured, or keeps all activations"
        if self.read is None:
            return "its rows come from a stream or from a loader of the trainer's own, and cannot be read again"
        if self._has_gradients or early_updates is not None:
            return "gradients that were there before, or have left for updates on the host, cannot be taken back"
        if self._num_batches > 1 and self._executor is not None and self._executor.routers is not None:
            return "experts were balanced over all of its plans before the first one ran"
        return ""

    def _run_again(self, executor: StepExecutor, total_weight: float) -> None:
        """Frees what a failed plan has left, and repeats the plans of the step before it."""
        gc.collect()
        torch.cuda.empty_cache()
        executor.model.zero_grad(set_to_none=True)
        for done in self._done:
            rank_plan = done.step.plan.for_rank(self.run.pool.rank)
            engine = self.run.activations.engine(executor.model, rank_plan)
            executor.run(rank_plan, done.chunks, total_weight, False, engine=engine)

    def _compute(self, executor: StepExecutor, batch: Mapping[str, Any], total_weight: float, ends_step: bool) -> StepResult:
        """Runs a plan forward and backward once, and remembers it with its inputs."""
        run, step, chunks = self.run, batch["step"], batch["chunks"]
        plan, rank = step.plan, run.pool.rank
        rank_plan = plan.for_rank(rank)
        run.make_room(plan)
        engine = run.activations.engine(executor.model, rank_plan)
        if len(self._batches) > 1:
            # experts are balanced over all plans of the step, so route all of them before the first plan runs
            executor.route([(each["step"].plan.for_rank(rank), each["chunks"]) for each in self._batches], engine)
        self._batches = []
        tally = TokenTally(run.args.device) if self._counts_tokens else None
        if (graphs := tower_graphs(executor.model)) is not None:
            graphs.begin(self.free.limit_bytes - plan.estimate.peak_bytes)
        result = executor.run(rank_plan, chunks, total_weight, ends_step, plan.estimate.peak_bytes, engine, tally)
        self.free.saw(plan)
        self._done.append(PlanWithInputs(step, chunks, engine))
        return result

    def _end_step(self, executor: StepExecutor, is_finite: bool, refusal: Refusal) -> None:
        """Counts the loss of a usable step; leaves out any other, or saves it and raises FloatingPointError. Collective."""
        loss, run = math.nan if self._loss is None else float(self._loss), self.run
        if is_finite and math.isfinite(loss):
            if run.config.on_nonfinite == "skip":
                self._since_log.add(loss)
                self._in_all.add(loss)
            return self.forget_step()
        # with weights that are not finite every later step would be left out, too
        has_good_weights = not any(gather_objects(bool(nonfinite_names(executor.model)), run.control))
        if run.config.on_nonfinite == "skip" and has_good_weights:
            logger.warning("step %d is left out: its loss (%g) or gradients are not finite", refusal.number, loss)
            return self._skip(executor.model)
        is_numbered = refusal.dataset is not None and not is_stream(refusal.dataset)
        rows = run.sets.index("train_dataset", refusal.dataset).rows if is_numbered else None
        refused = RefusedStep(run, refusal.number, self._done, loss)
        message = refused.explain(executor, rows)
        if run.args.should_save:
            # said before anything is written, since the disk may be full
            logger.error("%s", message)
        folder = Path(run.args.output_dir or ".") / f"nonfinite-step-{refusal.number}"
        errors = self._save(refused, folder, refusal)
        kept = (
            f"the step and the model before it could not be written to {folder} ({'; '.join(errors)})"
            if errors
            else f"the step and the model before it are in {folder}; `hf-longctx replay {folder}` runs the step alone"
        )
        raise FloatingPointError(f"{message}\n{kept}; on_nonfinite='skip' leaves such steps out")

    def _skip(self, model: nn.Module) -> None:
        """Leaves the present step out: no parameter keeps a gradient, so no optimizer moves it."""
        model.zero_grad(set_to_none=True)
        self.run.recorder.num_skipped += 1
        self._num_skipped_here += 1
        self._num_skipped_since_log += 1
        self.forget_step()
        self.was_skipped = True

    def _save(self, refused: RefusedStep, folder: Path, refusal: Refusal) -> list[str]:
        """Writes a step and the model to `folder`; returns the errors of all ranks, since the disk may be full. Collective."""
        held: list[str] = []
        with self.saver.noting(held):
            with self.saver.holding():
                refused.save(folder)
            with self.saver.holding():
                refusal.save_model(str(folder / MODEL_FOLDER))
        # a launcher ends all ranks as soon as one of them fails, so none may before the files are written
        PartialState().wait_for_everyone()
        everyone = gather_objects(held, self.run.control)
        return [f"rank {rank}: {error}" for rank, errors in enumerate(everyone) for error in errors]

    @property
    def _num_skipped(self) -> int:
        """Steps that were left out so far, also by trainings that this one goes on with."""
        return self.run.recorder.num_skipped

    def metrics(self) -> dict[str, float]:
        """The mean loss of the steps since the last call that were used, and the count of skipped ones; empty if none was."""
        mean, self._since_log = self._since_log, _Mean()
        num_skipped, self._num_skipped_since_log = self._num_skipped_since_log, 0
        if not self._num_skipped:
            return {}
        return {"skipped_steps": self._num_skipped, **({"loss": mean.value} if num_skipped else {})}

    def total_metrics(self) -> dict[str, float]:
        """The mean loss of all steps that this training used, and the count of skipped ones; empty if none was skipped."""
        if not self._num_skipped:
            return {}
        return {"skipped_steps": self._num_skipped, **({"train_loss": self._in_all.value} if self._num_skipped_here else {})}

    def forwards(
        self, model: nn.Module, batches: Iterable[dict[str, Any]], leaves_shards_away: bool
    ) -> Iterator[tuple[StepExecutor, Forwards, dict[str, Any]]]:
        """Yields, for every planned step of a set, the executor, the arguments of its forwards, and the batch.

        `num_label_tokens` and `total_weight` of the batch are then those of all ranks. leaves_shards_away: nothing reads weights
        between the forwards, so those that lie on the host between steps move once for the whole set.
        """
        executor = self.run.executor(model)
        shards = layer_shards(model)
        if shards is not None and leaves_shards_away:
            shards.wait_away()
        for batch in batches:
            total_weight, num_labels = self.label_sums(model, [batch])
            batch = {**batch, "total_weight": total_weight, "num_label_tokens": num_labels}
            # without a backward nothing is saved: policies only make tiles, and no host memory is needed
            rank_plan = forward_only(batch["step"].plan.for_rank(self.run.pool.rank))
            yield executor, (rank_plan, batch["chunks"], self.run.activations.engine(model, rank_plan)), batch
        if shards is not None:
            shards.come_back()


def train_loss(
    run: Run,
    passes: TwoPasses,
    executor: StepExecutor,
    compute: Callable[[], Tensor],
    train: Callable[[dict[str, Any], bool, Tensor], None],
) -> Tensor:
    """Computes a loss of log-probabilities by `compute`, which ends with its own backward, and trains it in a second pass.

    Returns this rank's own loss. train: runs one batch forward and backward; it gets whether it is the last, and the part that it
    has in the mean of the loss over ranks. Collective. Raises ValueError on every rank if the loss reads no log-probabilities.
    """
    with passes.backward_of_loss(executor.model):
        own_loss = compute()
    loss_1 = sum_over_ranks(own_loss.double().reshape(1).clone(), run.pool.everyone) / run.pool.num_ranks
    if not passes.is_read:
        raise ValueError(
            "the loss reads no log-probabilities of the model, so nothing is trained; compute it from a forward of the model"
        )
    batches = list(passes.second_pass())
    for place, batch in enumerate(batches):
        if "balance" in batch:
            executor.balance(*batch["balance"])
        is_last = place == len(batches) - 1
        train(batch, is_last, loss_1[0] if is_last else torch.zeros_like(loss_1[0]))
    return own_loss


def check_planned(batches: Iterable[Any]) -> None:
    """Raises ValueError for a batch that no loader of plans has made; those of skipped steps are empty."""
    for batch in batches:
        if not isinstance(batch, Mapping) or (batch and "step" not in batch):
            found = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
            raise ValueError(f"a batch of a loader of your own came ({found}), for which there is no plan; {OWN_LOADER}")


def start_two_passes(
    run: Run, model: Any, reference: Any, temperature: float, executor: Callable[[], StepExecutor], remembers: bool
) -> tuple[TwoPasses, Run | None]:
    """Puts the forwards of model and reference model, for which a trainer's own loss asks, under plans. Collective.

    temperature: of the distribution whose log-probabilities are trained. executor: returns that of the placed model. remembers:
    the trainer scores rows more than once with the same weights. Returns also the run of the reference model; None without one.
    """
    passes = passes_of(run.source, run.sets.longest_sequence, run.setup.placeholders, temperature, run.task)
    policy = ScoredModel(executor, run.activations.engine, Remembered() if remembers else None)
    run.undo.callback(passes.bind(model, policy, is_trained=True))
    if reference is None:
        return passes, None
    second = reference_run(run, reference)
    scored = ScoredModel(lambda: second.executor(reference), second.activations.engine)
    run.undo.callback(passes.bind(reference, scored, is_trained=False))
    second.placement.prepare(reference)
    return passes, second
