"""Placement of a run's parameters: whole on every rank, in shards, or as pipeline stages.

Neither DDP nor accelerate's FSDP is used, on CPU or CUDA: the executor sums gradients, and sharding is our own. So a placement
prepares the model, clips gradients, and saves and loads weights and optimizer states. A method returns None or False if `Trainer`
itself does that work correctly.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from hf_longctx.hf.checkpoints.deferred import read_deferred, source_of, without_placeholders
from hf_longctx.hf.checkpoints.manifest import OPTIMIZER_FILE
from hf_longctx.hf.checkpoints.old_shards import has_old_states, old_states
from hf_longctx.hf.checkpoints.optimizer_states import (
    SavedStates,
    has_states,
    load_states,
    load_whole_optimizer,
    save_states,
    saved_states,
)
from hf_longctx.hf.checkpoints.weights import (
    gather_weights,
    join_stages,
    load_adapters,
    load_stage_weights,
    load_weights,
    planned_files,
    renamed_weights,
    save_files,
    save_stages,
    stage_names,
)
from hf_longctx.hf.models.adapters import hidden_dtype, is_adapted, saved_parameters
from hf_longctx.hf.models.experts import spread_experts_of
from hf_longctx.hf.models.quantised import move_scales
from hf_longctx.hf.models.refusing import refuse_saving
from hf_longctx.hf.models.towers import unit_classes
from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.hf.start.stages import load_stage
from hf_longctx.plan.core.types import Ranges
from hf_longctx.runtime.execution.experts import spread_experts
from hf_longctx.runtime.execution.stage_model import StageModel
from hf_longctx.runtime.parameters.gradients import clip_stage_gradients
from hf_longctx.runtime.parameters.sharded import block_mesh, free_gathered, is_sharded, shard_model
from hf_longctx.runtime.process_groups import GroupPool


class Placement(Protocol):
    """One way in which parameters live on the ranks of a run; every method but `prepare` may leave its work to `Trainer`.

    num_stages: number of pipeline stages. writes_weights: whether `save` writes all weights itself. All methods are collective:
    every rank that shares the model calls them, in the same order.
    """

    @property
    def num_stages(self) -> int: ...

    @property
    def writes_weights(self) -> bool: ...

    def prepare(self, model: Any) -> None:
        """Makes `model` ready for the next step: shards it if settings ask for that, and frees gathered weights. Idempotent."""

    def clip(self, max_norm: float) -> Tensor | None:
        """Clips the gradients of the whole model and returns their norm before clipping; None: `Trainer` clips."""

    def save(self, model: Any, folder: str, is_writer: bool, is_joined: bool = True) -> dict[str, Any] | None:
        """Returns the whole weights, on the writing rank, for `Trainer` to write; None: there are none to pass on.

        After None, `Trainer` writes the model's own weights, unless `writes_weights`. is_joined: false if every rank has a folder
        of its own, and `join` will be called where the files of all ranks are together.
        """

    def join(self, folder: Path) -> None:
        """Completes in `folder` what all ranks wrote with `is_joined=False`; rank 0 calls it alone."""

    def load(self, model: Any, folder: str) -> bool:
        """Reads the weights of a checkpoint; False: `Trainer` reads them."""

    def save_optimizer(self, model: Any, optimizer: Optimizer, folder: str) -> bool:
        """Writes the states of the optimizer; False: `Trainer` writes them."""

    def load_optimizer(self, model: Any, optimizer: Optimizer, folder: str) -> bool:
        """Reads the states of the optimizer; False: `Trainer` reads them, or there are none."""


class ReplicatedPlacement:
    """The whole model on every rank, even if the ranks form `num_stages` pipeline stages, which then lend each other ranks."""

    writes_weights = False

    def __init__(self, control: dist.ProcessGroup | None, num_stages: int = 1) -> None:
        self.control, self.num_stages = control, num_stages

    def prepare(self, model: Any) -> None:
        """Reads weights that are still to be read, and that are packed meanwhile. The first call is then collective."""
        _read_whole(model)

    def clip(self, max_norm: float) -> Tensor | None:
        return None

    def save(self, model: Any, folder: str, is_writer: bool, is_joined: bool = True) -> dict[str, Any] | None:
        self.prepare(model)
        return None

    def join(self, folder: Path) -> None: ...

    def load(self, model: Any, folder: str) -> bool:
        # otherwise placeholders would get the weights, and later the model's own would replace them
        self.prepare(model)
        if not needs_own_reader(model):
            return False
        read_weights(model, folder)
        return True

    def save_optimizer(self, model: Any, optimizer: Optimizer, folder: str) -> bool:
        return False

    def load_optimizer(self, model: Any, optimizer: Optimizer, folder: str) -> bool:
        """Reads the states of a run with sharded parameters, at any number of ranks."""
        if (saved := _states_in(folder)) is None:
            return False
        load_states(model, optimizer, saved, self.control)
        return True


@dataclass(frozen=True)
class Shards:
    """The ranks of `mesh`, among which every parameter is divided, and how to divide a model among them."""

    mesh: DeviceMesh
    device: torch.device
    fp32_gradients: bool
    # each rank of a block gets whole experts, to which tokens travel, in place of a shard of all experts
    spreads_experts: bool = False
    # shards of layers lie on the host while a step computes
    layers_on_host: bool = False
    # see `unit_classes`
    gathers_towers: bool = False
    # consecutive ranks on one node; 0 for all
    node_ranks: int = 0

    def divide(self, model: Any) -> None:
        """Shards a whole `model` layer by layer, and reads weights that are still to be read.

        Then, or if it is sharded already, frees gathered weights. The first call is collective.
        """
        if not is_sharded(model):
            move_scales(model, self.device)
            if self.spreads_experts:
                spread_experts(spread_experts_of(model), block_mesh(self.mesh), self.device)
            without_placeholders(model)
            units = unit_classes(model, self.gathers_towers)
            shard_model(model, units, self.mesh, self.fp32_gradients, self.layers_on_host, self.node_ranks)
            refuse_saving(model, "every rank holds a shard of them", takes_weights=True)
        free_gathered(model)
        read_deferred(model, self.device)


class ShardedPlacement:
    """One shard of the model on every rank. control: the process group for messages between all ranks."""

    num_stages = 1

    def __init__(self, shards: Shards, control: dist.ProcessGroup | None) -> None:
        self.shards, self.control = shards, control
        # whether the last `save` wrote a large model file by file
        self.writes_weights = False

    def prepare(self, model: Any) -> None:
        self.shards.divide(model)

    def clip(self, max_norm: float) -> Tensor | None:
        return None

    def save(self, model: Any, folder: str, is_writer: bool, is_joined: bool = True) -> dict[str, Any] | None:
        self.writes_weights = False
        if not is_sharded(model) and source_of(model) is None:
            return None
        self.prepare(model)
        # writers of several nodes may see one folder, where they write the same files, but cannot both move them
        is_alone = sum(gather_objects(is_writer, self.control)) == 1
        if is_alone and not is_adapted(model) and (files := planned_files(model)):
            save_files(model, files, Path(folder), is_writer, self.control)
            self.writes_weights = True
            return None
        return gather_weights(model, is_writer, saved_parameters(model) if is_adapted(model) else None)

    def join(self, folder: Path) -> None: ...

    def load(self, model: Any, folder: str) -> bool:
        # `Trainer` loads a model that is still whole, if it reads its weights right
        if not is_sharded(model) and not needs_own_reader(model) and source_of(model) is None:
            return False
        self.prepare(model)
        read_weights(model, folder)
        return True

    def save_optimizer(self, model: Any, optimizer: Optimizer, folder: str) -> bool:
        self.prepare(model)
        save_states(model, optimizer, folder, self.control)
        return True

    def load_optimizer(self, model: Any, optimizer: Optimizer, folder: str) -> bool:
        """Reads the states of a run with sharded or with replicated parameters, at any number of ranks."""
        self.prepare(model)
        if (saved := _states_in(folder)) is not None:
            load_states(model, optimizer, saved, self.control)
        elif (Path(folder) / OPTIMIZER_FILE).exists():
            load_whole_optimizer(optimizer, str(Path(folder) / OPTIMIZER_FILE))
        else:
            return False
        return True


class StagedPlacement:
    """One pipeline stage of the model on every rank, whole or in shards; `Trainer` believes that every rank has all of it."""

    writes_weights = True

    def __init__(self, stage: StageModel, shards: Shards | None, pool: GroupPool, ranges: Ranges) -> None:
        self.stage, self.shards, self.pool, self.ranges = stage, shards, pool, ranges

    @property
    def num_stages(self) -> int:
        return self.stage.num_stages

    def prepare(self, model: Any) -> None:
        if self.shards is not None:
            self.shards.divide(model)
        else:
            _read_whole(model)

    def clip(self, max_norm: float) -> Tensor | None:
        """Clips gradients by their norm over all stages; a tied weight counts once."""
        assert self.pool.links is not None
        twin = self.stage.model.get_parameter(self.stage.copied) if self.stage.copied else None
        return clip_stage_gradients(list(self.stage.model.parameters()), max_norm, self.pool.links.pipe, twin)

    def save(self, model: Any, folder: str, is_writer: bool, is_joined: bool = True) -> dict[str, Any] | None:
        """Writes the weights of all stages to `folder`, which all ranks must see if the files are joined there."""
        self.prepare(model)
        save_stages(self.stage, folder, self.pool.ranks_per_stage, self.pool.control, is_joined=is_joined)
        return None

    def join(self, folder: Path) -> None:
        join_stages(folder, self.num_stages)

    def load(self, model: Any, folder: str) -> bool:
        self.prepare(model)

        def load_alone() -> dict[str, Tensor]:
            ways = self.ranges, self.stage.stage, hidden_dtype(model)
            found: dict[str, Tensor] = load_stage(folder, *ways, head_stages=self.stage.head_stages).state_dict()
            return found

        load_stage_weights(self.stage, folder, load_alone, self.pool.stage_group)
        return True

    def save_optimizer(self, model: Any, optimizer: Optimizer, folder: str) -> bool:
        self.prepare(model)
        save_states(model, optimizer, folder, self.pool.control, stage_names(self.stage, is_saved=True))
        return True

    def load_optimizer(self, model: Any, optimizer: Optimizer, folder: str) -> bool:
        """Reads the states of a run with any number of stages, or with sharded parameters; raises ValueError for others."""
        if problem := unstaged_states(folder):
            raise ValueError(f"{folder} holds {problem}; resume with stages=1, or start from its weights with a fresh optimizer")
        if (saved := _states_in(folder)) is None:
            return False
        self.prepare(model)
        load_states(model, optimizer, saved, self.pool.control, stage_names(self.stage, is_saved=False))
        return True


def unstaged_states(folder: str) -> str:
    """Describes the optimizer states in a checkpoint that stages cannot read; empty if they can, or if there are none."""
    if (saved := _states_in(folder)) is not None:
        of_whole = "the states of an optimizer that updates whole weights of a run without stages"
        return of_whole if saved.kind == "whole" else ""
    has_file = (Path(folder) / OPTIMIZER_FILE).exists()
    return "the optimizer of a run without stages and with replicated parameters, whose states have no names" if has_file else ""


def _states_in(folder: str) -> SavedStates | None:
    """The states of sharded or staged weights in a checkpoint; None if it has none."""
    if has_states(folder):
        return saved_states(folder)
    return old_states(folder) if has_old_states(folder) else None


def needs_own_reader(model: Any) -> bool:
    """Whether `Trainer` would read the weights of a checkpoint wrong.

    `Trainer` would make new adapters, in fp32 and for inference. And it would skip weights that have other names in files, such
    as those of experts, with only a warning.
    """
    return is_adapted(model) or bool(renamed_weights(model))


def read_weights(model: Any, folder: str) -> None:
    """Copies the weights of a checkpoint into `model`; for a model with adapters, the weights of the adapters."""
    (load_adapters if is_adapted(model) else load_weights)(model, folder)


def _read_whole(model: Any) -> None:
    """Reads weights of a model without shards that are still to be read, to the device of its adapters."""
    if source_of(model) is not None:
        device = next(weight.device for weight in model.parameters() if weight.requires_grad)
        without_placeholders(model)
        read_deferred(model, device)


def check_trained(stage: StageModel, control: dist.ProcessGroup | None) -> None:
    """Raises ValueError on every rank unless every stage trains some weight, and the stages of a tied weight agree on it.

    They agree if all train the tied weight, or none does. Collective over the ranks of `control`.
    """
    is_trained = any(parameter.requires_grad for parameter in stage.model.parameters())
    is_tied_trained = stage.model.get_parameter(stage.tied).requires_grad if stage.tied else None
    found = gather_objects((stage.stage, is_trained, is_tied_trained), control)
    if idle := sorted({number for number, trains, _ in found if not trains}):
        raise ValueError(f"stage {idle[0]} has no weight that is trained; unfreeze some of its layers, or use fewer stages")
    if len({tied for _, _, tied in found if tied is not None}) > 1:
        raise ValueError(
            "embedding and head are one weight (tie_word_embeddings), but only one of them is frozen; freeze both or neither (or "
            "stages share the head's work, and it is frozen on some of them only; freeze it on all or on none)"
        )
