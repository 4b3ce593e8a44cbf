"""Saves checkpoints: compares copies of weights, writes a hidden checkpoint, seals it, and brings it into view.

`Saver` also chooses the checkpoint from which a training resumes. The hooks in `trainer/checkpoint_mixin.py` only call it.

With `async_save`, `save` returns when all files are in host memory; a thread writes them and brings the checkpoint into view
(`checkpoints/background.py`). The first step that begins after the threads of all ranks have ended raises their error, if there
is one.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from hf_longctx.hf.checkpoints.background import BackgroundSave, remove_left_copies
from hf_longctx.hf.checkpoints.choice import Choice, Chosen, choose
from hf_longctx.hf.checkpoints.manifest import DATA_FILE, OPTIMIZER_FILE, STATE_FILE, Contents, write_json
from hf_longctx.hf.checkpoints.staging import SavingRanks, StagedCheckpoint, checkpoint_name, rotate
from hf_longctx.hf.checkpoints.trained_weights import TrainedWeights
from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.ranks.agreement import gather_objects, raise_together
from hf_longctx.hf.rules.arguments import ASYNC_CALLBACKS
from hf_longctx.hf.rules.rule import Facts, refusals
from hf_longctx.hf.run.run import Run
from hf_longctx.plan.core.messages import listed
from hf_longctx.runtime.parameters.gradients import local_shard, nonfinite_names

logger = logging.getLogger(__name__)


class Saver:
    """Saves and chooses the checkpoints of one trainer's trainings.

    args: the trainer's. control: the group of all ranks for messages. run: the run whose model is saved; a stock trainer begins
    it after a checkpoint was chosen.
    """

    run: Run
    replicas: ReplicaCheck

    def __init__(
        self, config: LongContextConfig, args: TrainingArguments, control: dist.ProcessGroup | None, run: Run | None = None
    ) -> None:
        self.config, self.args, self.control = config, args, control
        # the checkpoint that is written at present
        self._staged: StagedCheckpoint | None = None
        # errors of this rank while something else than a checkpoint is written
        self._noted: list[str] | None = None
        # the checkpoint that is written behind training, and the group of the threads that do
        self._saving: BackgroundSave | None = None
        self._writers: dist.ProcessGroup | None = None
        # the step at which the present training began, of which transformers 5.17 keeps no record
        self.begun_at_step = 0
        # the checkpoint that the present training resumed from
        self._chosen: Chosen | None = None
        if run is not None:
            self.begin(run)

    def begin(self, run: Run) -> None:
        """Takes the run whose model is saved."""
        self.run, self.replicas = run, ReplicaCheck(self.config, run)

    def open(self, callbacks: list[TrainerCallback]) -> None:
        """Makes what saving behind training needs, if that is asked for. Collective."""
        if not self.config.async_save:
            return
        raise_together(refusals(ASYNC_CALLBACKS, Facts(given={"callbacks": callbacks})), self.control)
        if self.args.local_process_index == 0:
            remove_left_copies()
        if self.control is not None and self._writers is None:
            # a rank that has written its part waits for the slowest one
            self._writers = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.args.ddp_timeout))
            self.run.undo.callback(dist.destroy_process_group, self._writers)

    def save(
        self,
        state: TrainerState,
        run_dir: Path,
        model: nn.Module,
        optimizer: Any,
        write_parts: Callable[[], None],
        ends_epoch: bool,
    ) -> Path | None:
        """Lets `write_parts` write into a hidden folder, adds data record and manifest, and brings the checkpoint into view.

        With `async_save` the files go to host memory here, and a thread does the rest; call `finish` before. Returns the folder,
        or None if a thread writes it. write_parts: writes into `root`. ends_epoch: whether the step is the last one of an epoch.
        Collective; raises RuntimeError on every rank if one cannot write; nothing is left then.
        """
        self.replicas.before_save(model, state.global_step)
        staged = StagedCheckpoint(run_dir, state.global_step, self.control, self.config.async_save)
        staged.open()
        try:
            contents = self._fill(staged, state, model, optimizer, write_parts, ends_epoch)
            rest = self._rest_of_save(staged, contents, state)
            if staged.in_memory:
                staged.hold()
                self._saving = BackgroundSave(rest, copy.copy(state))
                return None
        except BaseException:
            staged.drop()
            raise
        rest()
        return staged.final

    def _fill(
        self,
        staged: StagedCheckpoint,
        state: TrainerState,
        model: nn.Module,
        optimizer: Any,
        write_parts: Callable[[], None],
        ends_epoch: bool,
    ) -> Contents:
        """Writes everything but the manifest, and returns what that is to say. Errors of single ranks are held. Collective."""
        run, args = self.run, self.args
        self._staged = staged
        try:
            with staged.holding():
                write_parts()
                self._name_best(state, staged.final.parent)
                if args.should_save:
                    state.save_to_json(str(staged.folder / STATE_FILE))
        finally:
            self._staged = None
        record = gather_objects(run.recorder.record(state.global_step, ends_epoch), self.control)[0]
        trained = self._trained_weights(model, optimizer)
        with staged.holding():
            if args.should_save and record is not None:
                write_json(staged.folder / DATA_FILE, record)
            if args.should_save and not args.save_only_model:
                trained.write(staged.folder)
        return Contents(
            step=state.global_step,
            num_ranks=args.world_size,
            num_stages=run.stage.num_stages,
            parameters=run.setup.costs.parameters,
            weights_only=args.save_only_model,
            data=record,
        )

    def _rest_of_save(self, staged: StagedCheckpoint, contents: Contents, state: TrainerState) -> Callable[[], None]:
        """Returns what brings a filled checkpoint into view; a thread may do it, since it reads nothing that training changes."""
        ranks, join = SavingRanks(self._writers), self.run.placement.join
        is_deleting, limit, best = self.args.should_save, self.args.save_total_limit, state.best_model_checkpoint

        def bring_into_view() -> None:
            if staged.in_memory:
                staged.write(ranks, join)
            staged.finish(contents)
            if is_deleting:
                rotate(staged.final, limit, best)

        return bring_into_view

    def _name_best(self, state: TrainerState, run_dir: Path) -> None:
        """Sets the best checkpoint's folder as `Trainer` does, to the name that it has once it is in view."""
        strategies = [SaveStrategy.STEPS, SaveStrategy.EPOCH, SaveStrategy.BEST]
        if self.args.save_strategy not in strategies or not state.best_global_step:
            return
        best = run_dir / checkpoint_name(state.best_global_step)
        if state.best_global_step == state.global_step or best.exists():
            state.best_model_checkpoint = str(best)

    @property
    def is_over(self) -> bool:
        """Whether a checkpoint was written behind training, and this rank's thread has ended."""
        return self._saving is not None and self._saving.is_over

    def finish(self) -> TrainerState | None:
        """Waits until the checkpoint in flight is in view; returns the state of its step, None if there is none. Collective.

        Raises RuntimeError on every rank if it could not be written.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return None
        error = saving.wait_for_writer()
        if errors := [found for found in gather_objects(error, self.control) if found]:
            raise RuntimeError(f"the checkpoint of step {saving.state.global_step}, written behind training: {errors[0]}")
        return saving.state

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Context for a training; if that fails, waits for the checkpoint that is in flight, which other ranks may need."""
        try:
            yield
        finally:
            self._chosen = None
            saving, self._saving = self._saving, None
            if saving is not None and (error := saving.wait_for_writer()):
                logger.error("the checkpoint of step %d, written behind training: %s", saving.state.global_step, error)

    @property
    def root(self) -> Path | None:
        """The folder that takes the place of the output folder while a checkpoint is written; None at other times."""
        return None if self._staged is None else self._staged.root

    @property
    def is_joined(self) -> bool:
        """Whether all ranks write into one folder at present."""
        return self._staged is None or not self._staged.in_memory

    def holding(self) -> AbstractContextManager[None]:
        """Context in which single ranks write; errors wait until all ranks have finished, and are then raised on all."""
        if self._staged is not None:
            return self._staged.holding()
        return nullcontext() if self._noted is None else _noting(self._noted)

    @property
    def is_noting(self) -> bool:
        """Whether `noting` is in use."""
        return self._noted is not None

    @contextmanager
    def noting(self, errors: list[str]) -> Iterator[None]:
        """Context in which `holding` adds errors to a list, for something else than a checkpoint."""
        self._noted = errors
        try:
            yield
        finally:
            self._noted = None

    def choose(self, asked: str | bool | None) -> Path | None:
        """The folder from which the next training resumes; None: it starts at its first step. Collective.

        Raises ValueError on every rank for a checkpoint that is not whole, unless `resume_partial` is set.
        """
        choice = Choice(self.config.resume_partial, self.args.ignore_data_skip, self.control)
        self._chosen = choose(asked, Path(str(self.args.output_dir)), self.args.local_process_index == 0, choice)
        return None if self._chosen is None else self._chosen.folder

    @property
    def is_resumed(self) -> bool:
        """Whether the present training resumed from a checkpoint."""
        return self._chosen is not None

    def starts_anew(self, part: str) -> bool:
        """Whether this part of the resumed checkpoint is left out, as the log said."""
        return self._chosen is not None and part in self._chosen.anew

    def forget_choice(self) -> None:
        """Lets the training start at its first step after all."""
        self._chosen = None

    def check_trained(self, folder: Path, model: nn.Module, optimizer: Any) -> None:
        """Raises ValueError on every rank if a checkpoint has the states of other weights than those of this run. Collective."""
        is_by_number = (folder / OPTIMIZER_FILE).exists()
        problem = self._trained_weights(model, optimizer).problem_with(folder, is_by_number)
        raise_together([problem] if problem else [], self.control, "this run cannot resume")

    def _trained_weights(self, model: nn.Module, optimizer: Any) -> TrainedWeights:
        """The weights that this run trains. Collective with pipeline stages."""
        run: Run | None = vars(self).get("run")
        copied = run.stage.copied if run is not None else ""
        own = TrainedWeights.of(model, getattr(optimizer, "optimizer", optimizer), copied)
        return own if run is None or run.stage.num_stages == 1 else TrainedWeights.joined(gather_objects(own, self.control))


@contextmanager
def _noting(errors: list[str]) -> Iterator[None]:
    """Context that adds an error to a list, so that ranks go through the same collectives."""
    try:
        yield
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")


# integer types with the sizes of weights, in bytes
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaCheck(TrainerCallback):
    """Compares a checksum of every weight between ranks with copies of it, every few steps; `before_save` at every checkpoint.

    Copies get equal gradients and so stay equal bit for bit, unless a machine errs or a user's code changes one of them.
    """

    def __init__(self, config: LongContextConfig, run: Run) -> None:
        self.every, self.run = config.replica_check_steps, run

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Raises RuntimeError on every rank, naming ranks and weights, if copies differ. Collective over all ranks."""
        if self.every and state.global_step % self.every == 0:
            self.check(model, state.global_step)

    def before_save(self, model: nn.Module, step: int) -> None:
        """Refuses weights that must not replace those of an earlier checkpoint: copies that differ, and NaN or infinite ones.

        Raises RuntimeError, or FloatingPointError, on every rank. Collective over all ranks.
        """
        names = dict.fromkeys(name for found in gather_objects(nonfinite_names(model), self.run.control) for name in found)
        if names:
            raise FloatingPointError(
                f"after step {step}, weights are not finite: {listed(list(names))}. Nothing was saved from them, and earlier "
                f"checkpoints are unchanged; resume from the last one with a lower learning rate"
            )
        if self.every != 0:
            self.check(model, step)

    def check(self, model: nn.Module, step: int) -> None:
        """Compares now; raises as `on_step_end`."""
        if self.run.args.world_size == 1:
            return
        own, sums = _owned(self.run, model), checksums(model)
        found = gather_objects({key: [sums[place] for place in own[key]] for key in own}, self.run.control)
        names, problems = [name for name, _ in model.named_parameters()], []
        for key in dict.fromkeys(key for each in found for key in each):
            copies = {rank: each[key] for rank, each in enumerate(found) if key in each}
            counted = Counter(map(tuple, copies.values()))
            if len(counted) > 1:
                problems.append(_difference(copies, counted.most_common(1)[0][0], [names[place] for place in own.get(key, ())]))
        if problems:
            raise RuntimeError(
                f"after step {step}, copies of the same weights differ: {'; '.join(problems)}. Nothing was saved from them; "
                f"resume from the last checkpoint, and look for code that changes weights on single ranks or for a faulty device"
            )


@torch.no_grad()
def checksums(model: nn.Module) -> list[int]:
    """A sum over the bits of each parameter, or of this rank's shard of it; equal for equal weights. Waits for the device."""
    sums = []
    for parameter in model.parameters():
        weight = local_shard(parameter).detach().contiguous()
        bits = weight.reshape(-1).view(_BITS[weight.element_size()])
        # odd factors, so that no bit is lost
        places = torch.arange(1, 1 + 2 * min(len(bits), _PERIOD), 2, device=bits.device)
        sums.append(_weighted_sum(bits, places))
    return torch.stack(sums).tolist() if sums else []


# weights at places that differ by a multiple of it count alike
_PERIOD = 4093


def _weighted_sum(bits: Tensor, places: Tensor) -> Tensor:
    """Sum of the integers, each times the factor of its place, modulo 2**64; sees weights that changed places too."""
    whole = len(bits) // _PERIOD * _PERIOD
    total = (bits[:whole].view(-1, _PERIOD).sum(dim=0, dtype=torch.int64) * places).sum() if whole else places.new_zeros(())
    rest = bits[whole:].to(torch.int64)
    return total + (rest * places[: len(rest)]).sum()


def _owned(run: Run, model: nn.Module) -> dict[tuple[str, int], Sequence[int]]:
    """Places of parameters by owner and shard, equal on ranks with copies of the same weights.

    An owner is a stage, or a weight that several stages hold, such as that of a spread head.
    """
    stage, parameters = run.stage, list(model.parameters())
    sharded = next((parameter for parameter in parameters if isinstance(parameter, DTensor)), None)
    # the mesh on which FSDP2 shards has one dimension: the ranks of a block
    shard = 0 if sharded is None else sharded.device_mesh.get_local_rank()
    found: dict[tuple[str, int], Sequence[int]]
    found = {(f"stage {0 if run.all_stages else run.pool.stage}", shard): range(len(parameters))}
    if stage.tied and not run.all_stages:
        tied = stage.model.get_parameter(stage.tied)
        found["tied", shard] = [place for place, parameter in enumerate(parameters) if parameter is tied]
        assert found["tied", shard], f"{stage.tied} is no parameter of the model to save"
    return found


def _difference(copies: dict[int, list[int]], common: tuple[int, ...], names: Sequence[str]) -> str:
    """Describes the ranks whose checksums are not the most common ones, and the first weight that differs.

    names: of the weights on this rank; () if it has no copy.
    """
    if len(copies) == 2:
        first, second = copies
        ranks = f"ranks {first} and {second} differ"
    else:
        odd = [rank for rank, sums in copies.items() if tuple(sums) != common]
        ranks = f"rank {', '.join(map(str, odd))} differs from rank {', '.join(map(str, sorted(set(copies) - set(odd))))}"
    differing = [place for place in range(len(common)) if len({sums[place] for sums in copies.values()}) > 1]
    first_name = f", first in {names[differing[0]]}" if names else ""
    return f"{ranks} in {len(differing)} weights{first_name}"
