"""Where a run's parameters live: the overrides of `Trainer` that shard, step, save and load them.

DDP and accelerate's FSDP stay out, on CPU and CUDA alike: the executor sums gradients, and sharding is our own. For that
these private methods of `Trainer` are overridden: `_wrap_model`, `_move_model_to_device`, `_get_grad_norm`, `_save`,
`_load_from_checkpoint`, `_load_best_model`, `_save_optimizer_and_scheduler` and `_load_optimizer_and_scheduler`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import Trainer

from hf_longctx.hf.checkpoints.adapters import load_adapters
from hf_longctx.hf.checkpoints.sharded import (
    gather_weights,
    has_optimizer_shards,
    load_optimizer,
    load_weights,
    load_whole_optimizer,
    renamed_weights,
    save_optimizer,
)
from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.models.adapters import adapter_parameters, is_adapted
from hf_longctx.hf.models.quantised import move_scales
from hf_longctx.hf.start.setup import shared_parameters
from hf_longctx.plan.core.types import Parameters
from hf_longctx.runtime.execution.stage_model import StageModel
from hf_longctx.runtime.parameters.sharded import free_gathered, is_sharded, shard_mesh, shard_model

logger = logging.getLogger(__name__)

# as in trainer.py: the mixin stands in front of any Trainer subclass
if TYPE_CHECKING:
    _TrainerBase = Trainer
else:
    _TrainerBase = object

SCHEDULER_FILE, OPTIMIZER_FILE = "scheduler.pt", "optimizer.pt"


class PlacedModel(nn.Module):
    """A model that accelerate shall not wrap: `Trainer` leaves alone what is not its own model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward."""
        return self.module(*args, **kwargs)


class PlacementMixin(_TrainerBase):
    """The part of `LongContextMixin` that knows how parameters live; `longctx_config` is set before it is used."""

    longctx_config: LongContextConfig
    _stage: StageModel | None
    _mesh: DeviceMesh | None
    _is_placed: bool
    _whole_weights: dict[str, Any] | None

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """As `Trainer`, after sharding, so that optimizer states are made for shards."""
        self._placed_model()
        return super().create_optimizer(model)

    def _prepare_mesh(self) -> None:
        """Makes the groups of shards, collectively and before the sequence groups."""
        self._mesh, self._is_placed, self._whole_weights = None, False, None
        num_stages = 1 if self._stage is None else self._stage.num_stages
        parameters, shard_ranks = self._shared_parameters()
        if parameters != "replicated":
            timeout_s = self.longctx_config.collective_timeout_s
            self._mesh = shard_mesh(self.args.device.type, shard_ranks, timeout_s, num_stages)
        elif self.longctx_config.parameters != "replicated":
            logger.warning("parameters=%r has no effect on one rank", self.longctx_config.parameters)

    def _placed_model(self) -> Any:
        """The model as it is trained and evaluated: sharded if asked, under autocast if asked, no weight left gathered.

        Collective over all ranks the first time.
        """
        model: Any = self.model
        if not self._is_placed:
            if self._mesh is not None:
                move_scales(model, self.args.device)
                shard_model(model, tuple(model._no_split_modules or ()), self._mesh, self.longctx_config.fp32_gradients)
            self._is_placed = True
        # evaluation_mode: autocast, once, but no wrapping; every training makes the accelerator forget its models
        self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        free_gathered(model)
        return model

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return model if isinstance(model, PlacedModel) else PlacedModel(self._placed_model())

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """As `Trainer`, but a model to be sharded goes to the device in shards, so that it need not fit there as a whole."""
        if self._shared_parameters()[0] == "replicated":
            super()._move_model_to_device(model, device)

    def _shared_parameters(self) -> tuple[Parameters, int]:
        """How parameters live inside a stage, and how many ranks share one copy."""
        num_stages = 1 if self._stage is None else self._stage.num_stages
        return shared_parameters(self.longctx_config, self.args.world_size // num_stages)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """As `Trainer`; over all shards, as one plain number that is the same on every rank."""
        norm = super()._get_grad_norm(model, grad_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As `Trainer`; collective over all ranks if the parameters are sharded."""
        if self._stage is not None or not is_sharded(self.model):
            return super().save_model(output_dir, _internal_call)
        # on all ranks, since some versions of `Trainer` call `_save` on the writing one alone
        model = self._placed_model()
        only = adapter_parameters(model).values() if is_adapted(model) else None
        self._whole_weights = gather_weights(model, self.args.should_save, only)
        super().save_model(output_dir, _internal_call)
        self._whole_weights = None
        # writing may take longer than the others' next collective would wait
        PartialState().wait_for_everyone()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict if self._whole_weights is None else self._whole_weights)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._reads_weights:
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._read_weights(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        if not self._reads_weights or self.state.best_model_checkpoint is None:
            return super()._load_best_model()
        self._read_weights(self.state.best_model_checkpoint)

    @property
    def _reads_weights(self) -> bool:
        """Whether `Trainer` would not do.

        It loads no shards, makes adapters anew, in fp32, as inference does, and passes over weights, as those of experts, that
        have other names in files, with no more than a warning.
        """
        return is_sharded(self.model) or is_adapted(self.model) or bool(renamed_weights(self.model))

    def _read_weights(self, folder: str) -> None:
        model = self._placed_model()
        (load_adapters if is_adapted(model) else load_weights)(model, folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not is_sharded(self.model):
            return super()._save_optimizer_and_scheduler(output_dir)
        assert self.lr_scheduler is not None
        save_optimizer(self._placed_model(), self._plain_optimizer(), output_dir)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As `Trainer`; states of a sharded and of a replicated run may be loaded by either, at any number of ranks."""
        if checkpoint is not None and has_optimizer_shards(checkpoint):
            load_optimizer(self._placed_model(), self._plain_optimizer(), checkpoint)
        elif checkpoint is not None and is_sharded(self.model) and (Path(checkpoint) / OPTIMIZER_FILE).exists():
            load_whole_optimizer(self._plain_optimizer(), str(Path(checkpoint) / OPTIMIZER_FILE))
        else:
            return super()._load_optimizer_and_scheduler(checkpoint)
        assert self.lr_scheduler is not None
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_FILE, weights_only=True))

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer without accelerate's wrapper."""
        assert self.optimizer is not None
        plain: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return plain
