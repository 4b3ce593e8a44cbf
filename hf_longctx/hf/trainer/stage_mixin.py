"""What `Trainer` must do otherwise where every rank holds one pipeline stage: clip, count tokens, save and load.

`Trainer` takes every rank for a data-parallel copy of the model. So these private methods of it are overridden, and do as before
where there is no pipeline: `_clip_grad_norm`, `_get_grad_norm`, `_track_num_input_tokens`, `_save`, `_load_from_checkpoint`,
`_load_best_model`, `_save_optimizer_and_scheduler` and `_load_optimizer_and_scheduler`. The loss needs nothing: every rank
returns that of the whole step. Nor do floating point operations, of which every rank counts those of its own parameters.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.trainer import TRAINING_ARGS_NAME

from hf_longctx.hf.checkpoints.sharded import has_optimizer_shards
from hf_longctx.hf.checkpoints.staged import load_stage_optimizer, load_stage_weights, save_stage_optimizer, save_stages
from hf_longctx.hf.ranks.agreement import explain_lost_ranks, gather_objects
from hf_longctx.hf.trainer.parameter_mixin import OPTIMIZER_FILE, SCHEDULER_FILE, PlacementMixin
from hf_longctx.runtime.execution.stage_model import StageModel
from hf_longctx.runtime.parameters.clipping import clip_stage_gradients
from hf_longctx.runtime.process_groups.pool import GroupPool


def check_trained(stage: StageModel, control: dist.ProcessGroup | None) -> None:
    """Raises ValueError on every rank unless every stage trains something, and both ends of a tied weight or none.

    Collective over the ranks of `control`.
    """
    is_trained = any(parameter.requires_grad for parameter in stage.model.parameters())
    is_tied_trained = stage.model.get_parameter(stage.tied).requires_grad if stage.tied else None
    found = gather_objects((stage.stage, is_trained, is_tied_trained), control)
    if idle := sorted({number for number, trains, _ in found if not trains}):
        raise ValueError(f"stage {idle[0]} has no weight that is trained; unfreeze some of its layers, or use fewer stages")
    if len({tied for _, _, tied in found if tied is not None}) > 1:
        raise ValueError(
            "embedding and head are one weight (tie_word_embeddings), but only one of them is frozen; freeze both or neither"
        )


class StagedMixin(PlacementMixin):
    """The part of `LongContextMixin` that knows of pipeline stages; `_stage` is None where there is none."""

    _pool: GroupPool
    _control: dist.ProcessGroup | None

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """As `Trainer`, by the norm over all stages."""
        if self._stage is None:
            return super()._clip_grad_norm(model)
        return self._clip_stages(float(self.args.max_grad_norm))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """As `Trainer`, over all stages."""
        if self._stage is None:
            return super()._get_grad_norm(model, grad_norm)
        return self._clip_stages(math.inf) if grad_norm is None else grad_norm

    def _clip_stages(self, max_norm: float) -> Tensor:
        """Collective over all ranks."""
        assert self._stage is not None and self._pool.links is not None
        has_twin = self._stage.tied and self._stage.stage > 0
        twin = self._stage.model.get_parameter(self._stage.tied) if has_twin else None
        with explain_lost_ranks(self.state.global_step + 1, self._pool.rank, self.longctx_config.collective_timeout_s):
            return clip_stage_gradients(list(self._stage.model.parameters()), max_norm, self._pool.links.pipe, twin)

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """As `Trainer`, but tokens that pass several stages count once."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        if self._stage is not None:
            self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self._stage.num_stages

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As `Trainer`; with stages collective over all ranks, which must see the same folder."""
        if self._stage is not None:
            # nothing of it may be gathered
            self._placed_model()
            folder = str(self.args.output_dir if output_dir is None else output_dir)
            save_stages(self._stage, folder, self._pool.ranks_per_stage, self._control)
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As `Trainer`; with stages what belongs beside the weights, which are there."""
        if self._stage is None:
            return super()._save(output_dir, state_dict)
        folder = Path(str(self.args.output_dir if output_dir is None else output_dir))
        if self.processing_class is not None:
            self.processing_class.save_pretrained(str(folder))
        torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self._stage is None:
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._placed_model()
        load_stage_weights(self._stage, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        if self._stage is None or self.state.best_model_checkpoint is None:
            return super()._load_best_model()
        self._placed_model()
        load_stage_weights(self._stage, self.state.best_model_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._stage is None:
            return super()._save_optimizer_and_scheduler(output_dir)
        self._placed_model()
        assert self.lr_scheduler is not None
        save_stage_optimizer(self._stage, self._plain_optimizer(), output_dir)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As `Trainer`; states of any number of stages may be loaded, and those of a run with sharded parameters.

        Raises ValueError for those of a run with replicated parameters, which carry no names.
        """
        if self._stage is None or checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        if has_optimizer_shards(checkpoint):
            self._placed_model()
            assert self.lr_scheduler is not None
            load_stage_optimizer(self._stage, self._plain_optimizer(), checkpoint)
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_FILE, weights_only=True))
        elif (Path(checkpoint) / OPTIMIZER_FILE).exists():
            raise ValueError(
                f"{checkpoint} holds the optimizer of a run without stages and with replicated parameters, whose states have no "
                f"names; resume with stages=1, or start from its weights with a fresh optimizer"
            )
