"""Overrides of `Trainer` about parameters and optimizer states, which ask the run's `Placement` how these live.

These private methods of `Trainer` are overridden, each here and nowhere else: `_wrap_model`, `_move_model_to_device`,
`_clip_grad_norm`, `_get_grad_norm`, `_track_num_input_tokens`, `_save`, `_load_from_checkpoint`, `_load_best_model`,
`_save_optimizer_and_scheduler` and `_load_optimizer_and_scheduler`; `CheckpointMixin` overrides those about folders. `Trainer`
sums two more numbers over ranks that need no override: the loss, since every rank returns the loss of the whole step, and the
count of floating point operations, since every rank counts those of its own parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from accelerate import PartialState
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.trainer import TRAINING_ARGS_NAME

from hf_longctx.hf.checkpoints.manifest import OPTIMIZER_FILE
from hf_longctx.hf.checkpoints.optimizer_states import load_whole_optimizer
from hf_longctx.hf.checkpoints.trained_weights import explained
from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.log_probs.two_passes import TwoPasses
from hf_longctx.hf.ranks.agreement import joint_call
from hf_longctx.hf.rules.arguments import rounds_by_chance
from hf_longctx.hf.rules.user_code import changes_before_updates
from hf_longctx.hf.run.optimizers import fit_optimizer
from hf_longctx.hf.run.placement import Placement
from hf_longctx.hf.run.run import Run
from hf_longctx.hf.run.steps import StepRunner
from hf_longctx.hf.trainer.checkpoint_mixin import CheckpointMixin
from hf_longctx.runtime.parameters.host_steps import HostSteps
from hf_longctx.runtime.parameters.low_bit import has_low_bit_moments, seed_steps, settle_moments, widen_shards
from hf_longctx.runtime.parameters.master_weights import drop_master_weights, has_host_states, host_steps_of

SCHEDULER_FILE = "scheduler.pt"

P = ParamSpec("P")
T = TypeVar("T")


class PlacedModel(nn.Module):
    """A wrapper that keeps accelerate from wrapping the model: `Trainer` prepares only its own model object, not this one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the model, such as `generate`, which trainers of TRL look up here."""
        if name == "module" or name in vars(self)["_modules"]:
            return super().__getattr__(name)
        return getattr(self.module, name)


def of_all_ranks(what: str) -> Callable[[Callable[Concatenate[Any, P], T]], Callable[Concatenate[Any, P], T]]:
    """Decorator for a method that all ranks call together; its errors name lost ranks, and say that `what` could not finish."""

    def decorate(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
        @wraps(method)
        def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
            with self._explained(what):
                return method(self, *args, **kwargs)

        return call

    return decorate


class ParameterMixin(CheckpointMixin):
    """The part of `LongContextMixin` about parameters; the run is started before any of it is used."""

    longctx_config: LongContextConfig
    longctx_run: Run
    _steps: StepRunner
    # forwards of a trainer with a loss of log-probabilities; None for others
    _two_passes: TwoPasses | None
    _whole_weights: dict[str, Any] | None

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Makes the optimizer after sharding, so that its states are made for shards; it updates bf16 weights in fp32 copies."""
        self._placed_model()
        try:
            optimizer = super().create_optimizer(model)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"the optimizer cannot be made: {error}; change optim, optim_args, optimizer_cls_and_kwargs, or the learning "
                f"rate and betas that it gets"
            ) from error
        plain = self._plain_optimizer
        if has_low_bit_moments(plain):
            widen_shards(plain)
            if rounds_by_chance(self.args):
                seed_steps(plain, self.args.seed)
        fit_optimizer(self.longctx_run, cast(nn.Module, self.model), plain)
        return optimizer

    @of_all_ranks("saving")
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves as `Trainer` does; collective over all ranks if parameters are sharded or in stages.

        With stages all ranks must see the same folder.
        """
        if not self._saver.is_noting:
            self._switch_optimizer("eval")
        # done here, on all ranks, since some versions of `Trainer` call `_save` on the writing rank alone
        folder, is_writer = self._folder(output_dir), self.args.should_save
        self._whole_weights = self._placement.save(self.model, folder, is_writer, self._saver.is_joined)
        super().save_model(output_dir, _internal_call)
        if self._whole_weights is not None:
            self._whole_weights = None
            # the files are there when any rank goes on
            PartialState().wait_for_everyone()

    @property
    def _placement(self) -> Placement:
        return self.longctx_run.placement

    def _placed_model(self) -> Any:
        """The model as it is trained and evaluated: sharded and under autocast if the settings say so, with no weight gathered.

        The first call is collective over all ranks.
        """
        model: Any = self.model
        self._placement.prepare(model)
        # evaluation_mode: binds autocast, once, and wraps nothing; called each time, since every training makes the accelerator
        # forget its models
        self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        return model

    def _explained(self, what: str = "") -> AbstractContextManager[None]:
        """Context for the collectives of the present step, or of `what` after the last one; its errors name lost ranks."""
        timeout_s, step = self.longctx_config.collective_timeout_s, self.state.global_step
        if not what:
            return joint_call("", timeout_s, step + 1)
        return joint_call(f"{what} after step {step}" if step else what, timeout_s, step)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return model if isinstance(model, PlacedModel) else PlacedModel(self._placed_model())

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leaves a model that will be sharded where it is, since it goes to the device in shards and may not fit there whole."""
        run = vars(self).get("longctx_run")
        # a trainer of TRL moves its model before the run is started, and again after it where parameters were chosen
        is_alone, parameters = self.args.world_size == 1, self.longctx_config.parameters
        if is_alone or (parameters if run is None else run.setup.costs.parameters) == "replicated":
            super()._move_model_to_device(model, device)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clips gradients by their norm over all ranks that share the model."""
        with self._explained():
            return self._clipped(lambda: super(ParameterMixin, self)._clip_grad_norm(model), float(self.args.max_grad_norm))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Returns the gradient norm over all ranks that share the model, as one number that is equal on all of them."""
        if self._steps.was_skipped:
            if self._host_steps is not None:
                self._host_steps.forget_early()
            # its gradients were dropped, and a norm of 0 would be a lie
            return math.nan
        with self._explained():
            norm = grad_norm
            if norm is None:
                norm = self._clipped(lambda: super(ParameterMixin, self)._get_grad_norm(model), math.inf)
            norm = super()._get_grad_norm(model, norm)
            return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _clipped(self, trainers_own: Callable[[], Any], max_norm: float) -> Any:
        """Clips gradients to `max_norm` as the placement does, or as `Trainer` does, and returns their norm before that."""

        def clip() -> Any:
            norm = self._placement.clip(max_norm)
            return trainers_own() if norm is None else norm

        host = self._host_steps
        return clip() if host is None else host.clipped(clip, max_norm)

    def _early_updates(self) -> HostSteps | None:
        """Returns what moves gradients to the host during the backward; None if the user's code may still change them."""
        host = self._host_steps
        return None if host is None or changes_before_updates(self, self._plain_optimizer) else host

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Counts every token once, although a pipeline passes it through several stages.

        Plans have no padding, so a token that is also the tokenizer's padding token counts like any other.
        """
        before = self.state.num_input_tokens_seen
        # a trainer of TRL may load lists of rows
        if isinstance(inputs, Mapping) and (num_dummies := inputs.get("num_dummies")) is not None:
            ones = torch.ones(inputs["input_ids"].numel() - num_dummies, dtype=torch.int64)
            inputs = {"input_ids": ones, "attention_mask": ones}
        super()._track_num_input_tokens(inputs)
        if self._two_passes is not None:
            # every rank loads rows of its own
            return
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self._placement.num_stages

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Writes the weights of all ranks, the tokenizer and the arguments; no weights if the placement wrote them already."""
        if not self._placement.writes_weights:
            return super()._save(output_dir, state_dict if self._whole_weights is None else self._whole_weights)
        with self._saver.holding():
            # newer versions of `Trainer` call this on every rank
            if not self.args.should_save:
                return
            folder = Path(self._folder(output_dir))
            own = self.processing_class
            if (tokenizer := getattr(self.data_collator, "tokenizer", None) if own is None else own) is not None:
                tokenizer.save_pretrained(str(folder))
            with self._users_arguments():
                torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._placement.load(self.model, resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is None or not self._placement.load(self.model, best):
            super()._load_best_model()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with self._saver.holding():
            if not self._placement.save_optimizer(self.model, self._plain_optimizer, output_dir):
                return super()._save_optimizer_and_scheduler(output_dir)
            assert self.lr_scheduler is not None
            if self.args.should_save:
                torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads states, even those of a run with another number of ranks or stages, or with sharded parameters."""
        placement, optimizer, is_anew = self._placement, self._plain_optimizer, self._saver.starts_anew("optimizer")
        settings = [set(group) - {"params", "initial_lr"} for group in optimizer.param_groups]
        with explained(checkpoint):
            is_loaded = not is_anew and checkpoint is not None and self._loads_states(placement, checkpoint)
        if not is_loaded:
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            assert checkpoint is not None
            assert self.lr_scheduler is not None
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_FILE, weights_only=True))
        _check_kind(optimizer, settings, checkpoint)
        drop_master_weights(optimizer)
        settle_moments(optimizer)

    def _loads_states(self, placement: Placement, checkpoint: str) -> bool:
        """Loads the optimizer's states, if they are those of its weights; False: `Trainer` loads them."""
        self._check_trained(checkpoint)
        optimizer, file = self._plain_optimizer, Path(checkpoint) / OPTIMIZER_FILE
        if placement.load_optimizer(self.model, optimizer, checkpoint):
            return True
        if not has_host_states(optimizer) or not file.exists():
            return False
        # `Trainer` would load them to the device, which has no room
        load_whole_optimizer(optimizer, str(file))
        return True

    def _folder(self, output_dir: str | None) -> str:
        return str(self.args.output_dir if output_dir is None else output_dir)

    @property
    def _host_steps(self) -> HostSteps | None:
        """Mover of the optimizer's steps to the host, if the run lets it step there; None before the optimizer is made."""
        is_asked = self.longctx_run.setup.costs.model.updates_on_host and self.optimizer is not None
        return host_steps_of(self._plain_optimizer) if is_asked else None

    @property
    def _plain_optimizer(self) -> Any:
        """The optimizer without accelerate's wrapper; None before it is made."""
        return getattr(self.optimizer, "optimizer", self.optimizer)


def _check_kind(optimizer: Any, settings: Sequence[set[str]], checkpoint: str | None) -> None:
    """Raises ValueError if the settings that an optimizer has read from a checkpoint are those of another optimizer.

    settings: names of those that its groups had before.
    """
    for group, known in zip(optimizer.param_groups, settings, strict=True):
        read = set(group) - {"params", "initial_lr"}
        if (missing := sorted(known - read)) and (foreign := sorted(read - known)):
            raise ValueError(
                f"{checkpoint} has the states of another optimizer: they have {', '.join(foreign)} and lack "
                f"{', '.join(missing)} of {type(optimizer).__name__}; set the optimizer back, or load the model from that folder "
                f"and train it anew"
            )
