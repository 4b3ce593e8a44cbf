"""verl's engines over `LongContextEngine`: strategy `hf_longctx` for policies, reference models and critics.

    python -m verl.trainer.main_ppo "hydra.searchpath=[pkg://hf_longctx.integrations.verl_config]" \\
        model_engine=hf_longctx actor_rollout_ref.model.external_lib=hf_longctx.integrations.verl

verl imports this module on every worker (`external_lib`), which registers the engines. Every rank is a rank of data parallelism
for verl; sequence groups form inside. The loss function is called once with all rows of a rank's mini-batch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from packaging.version import Version
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import AutoModelForTokenClassification
from verl.utils import tensordict_utils as tu
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.utils.model import extract_multi_modal_inputs
from verl.utils.py_functional import append_to_dict, convert_to_regular_types
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from verl.workers.config import ActorConfig, CriticConfig, EngineConfig
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.engine import LongContextEngine, RowValues, TokenRow
from hf_longctx.hf.ranks.agreement import raise_together
from hf_longctx.hf.start.sharded_loading import load_sharded

# name of the strategy, and of the field with its settings
STRATEGY = "hf_longctx"
# versions of verl whose interface this follows
_VERL = "0.9"
if Version(version("verl")).release[:2] != Version(_VERL).release:
    raise ImportError(f"verl {version('verl')} is installed, but this engine follows verl {_VERL}; pip install 'verl=={_VERL}.*'")

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
# contents of every checkpoint; its weights are those of hf_model
_CONTENTS = {"model", "optimizer", "extra"}
# schedule and random states of a rank
_EXTRA = "extra_rank_{}.pt"


@dataclass
class LongContextEngineConfig(EngineConfig):  # type: ignore[misc]
    """Settings of an engine. longctx: fields of `LongContextConfig`. output_dir: for records of the run."""

    strategy: str = STRATEGY
    longctx: dict[str, Any] = field(default_factory=dict)
    output_dir: str = "outputs/verl"

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = []
        if self.strategy != STRATEGY:
            problems.append(f"strategy is {self.strategy!r}; this engine is {STRATEGY!r}")
        if self.dtype not in _DTYPES:
            problems.append(f"dtype is {self.dtype!r}; give one of {', '.join(_DTYPES)}")
        if (mode := self.router_replay.get("mode", "disabled")) != "disabled":
            problems.append(f"router_replay.mode is {mode!r}, but plans route tokens anew; set it to 'disabled'")
        _refuse(problems)


@dataclass
class LongContextActorConfig(ActorConfig):  # type: ignore[misc]
    """Settings of an actor or a reference model. hf_longctx: those of its engine."""

    strategy: str = STRATEGY
    hf_longctx: LongContextEngineConfig = field(default_factory=LongContextEngineConfig)
    use_remove_padding: bool = True
    use_rollout_log_probs: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = []
        if self.entropy_coeff:
            problems.append(
                f"entropy_coeff is {self.entropy_coeff}, but plans train log-probabilities, not entropies; set it to 0"
            )
        if self.calculate_sum_pi_squared:
            problems.append("calculate_sum_pi_squared is True, but plans do not return these sums; leave it out")
        if self.use_prefix_grouper:
            problems.append("use_prefix_grouper is True, but plans compute shared prompts in every row; leave it out")
        if self.qat.get("enable", False):
            problems.append("qat.enable is True, but plans train weights as they are; leave it out")
        _refuse(problems)
        self.engine = self.hf_longctx


@dataclass
class LongContextCriticConfig(CriticConfig):  # type: ignore[misc]
    """Settings of a critic. hf_longctx: those of its engine."""

    strategy: str = STRATEGY
    hf_longctx: LongContextEngineConfig = field(default_factory=LongContextEngineConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine = self.hf_longctx


@EngineRegistry.register(model_type="language_model", backend=STRATEGY, device=["cuda", "cpu"])
class LongContextPolicyEngine(BaseEngine):  # type: ignore[misc]
    """A policy or a reference model under plans; see verl's `BaseEngine` for the methods."""

    has_values = False

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        super().__init__()
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.mode: str | None = None
        # the gradients of this step were not finite
        self._is_broken = False
        self._run: LongContextEngine | None = None
        _refuse(_problems(model_config, engine_config, checkpoint_config))

    @property
    def is_param_offload_enabled(self) -> bool:
        return bool(self.engine_config.param_offload)

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return bool(self.engine_config.optimizer_offload)

    def initialize(self) -> None:
        """Loads the model and starts its run; a second call starts anew."""
        if self._run is not None:
            self._run.close()
        settings: Any = OmegaConf.to_container(OmegaConf.create(dict(self.engine_config.longctx)))
        config = LongContextConfig(**settings)
        # weights that no file has are the same on all ranks
        with torch.random.fork_rng():
            torch.manual_seed(self.engine_config.seed)
            self.module = self._loaded(config)
        role = "ref" if self.engine_config.forward_only else self.model_config.model_type
        optimizer = None if self.engine_config.forward_only else self._optimizer
        self._run = LongContextEngine(self.module, config, optimizer, output_dir=f"{self.engine_config.output_dir}/{role}")
        self.optimizer = self._run.optimizer
        self.lr_scheduler = None if self.optimizer is None else _schedule(self.optimizer, self.optimizer_config)
        self._checkpoints = BaseCheckpointManager(
            self.module, self.optimizer, self.lr_scheduler, self.model_config.get_processor(), self.checkpoint_config
        )
        self.to("cpu", self.is_param_offload_enabled, self.is_optimizer_offload_enabled, self.is_param_offload_enabled)

    def train_mode(self, **kwargs: Any) -> AbstractContextManager[None]:
        return _Mode(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> AbstractContextManager[None]:
        return _Mode(self, "eval", **kwargs)

    def optimizer_zero_grad(self) -> None:
        self._engine().zero_grad()
        self._is_broken = False

    def optimizer_step(self) -> float:
        """Updates the weights, unless gradients were not finite; returns their norm before clipping."""
        if self._is_broken:
            self._is_broken = False
            return math.nan
        return self._engine().optimizer_step(self.optimizer_config.clip_grad)

    def lr_scheduler_step(self) -> float:
        assert self.lr_scheduler is not None
        self.lr_scheduler.step()
        return float(self.lr_scheduler.get_last_lr()[0])

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False) -> Any:
        """Scores or trains this rank's rows. Raises ValueError on every rank for a batch that plans cannot run."""
        engine = self._engine()
        data = data.to(engine.device)
        num_tokens = data["loss_mask"].sum().double()
        dist.all_reduce(num_tokens, group=self.get_data_parallel_group())
        tu.assign_non_tensor(data, sp_size=1, batch_num_tokens=int(num_tokens), dp_size=self.get_data_parallel_size())
        problems, temperature = _batch_problems(data), 1.0
        if not self.has_values and "temperature" in data:
            given = torch.as_tensor(data["temperature"], dtype=torch.float64).reshape(-1)
            temperature = float(given[0])
            if bool((given != temperature).any()):
                problems.append("rows have different temperatures; a batch has one temperature")
        raise_together(problems, engine.run.pool.control, f"strategy {STRATEGY!r} cannot run this batch")
        rows = _rows(data, self.has_values)
        kept: dict[str, Any] = {"metrics": {}, "loss": [math.nan], "model_output": {}}

        def evaluated(values: RowValues) -> tuple[Tensor, None]:
            found, entropies = self._output(data, values)
            if loss_function is None:
                loss, metrics = torch.ones((), device=engine.device), {}
            else:
                loss, metrics = loss_function(model_output=found, data=data, dp_group=self.get_data_parallel_group())
            if entropies is not None and loss.requires_grad:
                (slopes,) = torch.autograd.grad(loss, entropies, retain_graph=True, allow_unused=True)
                if slopes is not None and bool(slopes.any()):
                    raise ValueError("the loss trains entropies, but plans train log-probabilities only; set entropy_coeff=0")
            returns = forward_only or tu.get_non_tensor_data(data=data, key="return_model_output", default=False)
            kept["model_output"] = {name: x.detach() for name, x in found.items()} if returns else {}
            kept["loss"] = [float(loss.detach())]
            kept["metrics"] = _detached(metrics)
            return loss, None

        try:
            if forward_only:
                evaluated(engine.log_probs(rows, temperature))
            else:
                engine.forward_backward(rows, evaluated, temperature)
        except FloatingPointError as error:
            # verl leaves out such a step
            print(f"WARN: {error}")
            self._is_broken = True
        metrics: dict[str, Any] = {}
        append_to_dict(metrics, kept["metrics"])
        return {**kept, "metrics": metrics}

    def get_per_tensor_param(self, **kwargs: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Returns whole weights, with adapters added, and no settings of adapters."""
        return iter(self._engine().weights()), None

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_data_parallel_size(self) -> int:
        return dist.get_world_size()

    def get_data_parallel_group(self) -> Any:
        return dist.group.WORLD

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Moves weights with gradients, and optimizer states, to the host ("cpu") or back."""
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        move = self._engine().to_host if device == "cpu" else self._engine().to_device
        move(weights=model, states=optimizer)

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Writes weights as transformers or PEFT does, optimizer states, schedule and random states to a folder of all ranks."""
        if hdfs_path is not None:
            raise ValueError(
                f"hdfs_path is {hdfs_path!r}, but checkpoints are written to local_path alone; leave default_hdfs_dir out"
            )
        if dist.get_rank() == 0:
            self._checkpoints.ensure_checkpoint_capacity(max_ckpt_to_keep)
        self._engine().save(local_path)
        schedule = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        extra = {"schedule": schedule, "random": BaseCheckpointManager.get_rng_state()}
        torch.save(extra, Path(local_path) / _EXTRA.format(dist.get_rank()))
        processor = self.model_config.get_processor()
        if dist.get_rank() == 0 and processor is not None:
            processor.save_pretrained(local_path)
        dist.barrier()
        if dist.get_rank() == 0:
            self._checkpoints.register_checkpoint(local_path, max_ckpt_to_keep)

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = True, **kwargs: Any
    ) -> None:
        """Reads what `save_checkpoint` wrote, at any number of ranks; random states only at the same number."""
        if local_path is None:
            return
        self._engine().load(local_path)
        own = Path(local_path) / _EXTRA.format(dist.get_rank())
        is_alike = own.exists() and not (Path(local_path) / _EXTRA.format(dist.get_world_size())).exists()
        # written by this class
        extra = torch.load(own if is_alike else own.with_name(_EXTRA.format(0)), weights_only=False)
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(extra["schedule"])
        if is_alike:
            BaseCheckpointManager.load_rng_state(extra["random"])
        dist.barrier()

    def disable_adapter(self) -> AbstractContextManager[None]:
        return self.module.disable_adapter()  # type: ignore[no-any-return]

    def _engine(self) -> LongContextEngine:
        assert self._run is not None, "initialize() comes first"
        return self._run

    def _loaded(self, config: LongContextConfig) -> Any:
        model, dtype = self.model_config, _DTYPES[self.engine_config.dtype]
        given = {
            "config": model.hf_config,
            "trust_remote_code": model.trust_remote_code,
            "attn_implementation": model.override_config.get("attn_implementation", "sdpa"),
        }
        return self._with_adapter(self._from_files(config, dtype, given))

    def _from_files(self, config: LongContextConfig, dtype: torch.dtype, given: dict[str, Any]) -> Any:
        return load_sharded(self.model_config.local_path, config, dtype=dtype, **given)

    def _with_adapter(self, module: Any) -> Any:
        """Puts the adapter that verl's settings ask for over a model."""
        model = self.model_config
        if model.lora_adapter_path is not None:
            return PeftModel.from_pretrained(module, model.lora_adapter_path, is_trainable=not self.engine_config.forward_only)
        if model.lora_rank <= 0:
            return module
        names = ("target_modules", "target_parameters", "exclude_modules")
        targets = {name: convert_to_regular_types(getattr(model, name)) for name in names}
        adapter = LoraConfig(
            task_type=TaskType.TOKEN_CLS if self.has_values else TaskType.CAUSAL_LM,
            r=model.lora_rank,
            lora_alpha=model.lora_alpha,
            **targets,
        )
        return get_peft_model(module, adapter)

    def _optimizer(self, weights: list[nn.Parameter]) -> Any:
        return build_optimizer(weights, self.optimizer_config)

    def _output(self, data: Any, values: RowValues) -> tuple[dict[str, Tensor], Tensor | None]:
        """Returns what verl's losses read, each value beside the token before its own; entropies as a leaf, if asked for."""

        def column(parts: list[Tensor]) -> Tensor:
            return torch.cat([nn.functional.pad(part[1:], (0, 1)) for part in parts])

        offsets = data["input_ids"].offsets()
        found, entropies = {"log_probs": torch.nested.nested_tensor_from_jagged(column(values.log_probs), offsets)}, None
        if tu.get_non_tensor_data(data=data, key="calculate_entropy", default=False):
            entropies = column(values.entropies).requires_grad_(torch.is_grad_enabled())
            found["entropy"] = torch.nested.nested_tensor_from_jagged(entropies, offsets)
        return found, entropies


@EngineRegistry.register(model_type="value_model", backend=STRATEGY, device=["cuda", "cpu"])
class LongContextValueEngine(LongContextPolicyEngine):
    """A critic under plans: a token classifier with one label."""

    has_values = True

    def _from_files(self, config: LongContextConfig, dtype: torch.dtype, given: dict[str, Any]) -> Any:
        # a fresh head and no dropout, as verl has it
        changes = {"num_labels": 1, "classifier_dropout": 0.0, "hidden_dropout": 0.0}
        given["config"] = copy.deepcopy(given["config"])
        given["config"].update(changes)
        return AutoModelForTokenClassification.from_pretrained(self.model_config.local_path, dtype=dtype, **given)

    def _output(self, data: Any, values: RowValues) -> tuple[dict[str, Tensor], Tensor | None]:
        offsets = data["input_ids"].offsets()
        return {"values": torch.nested.nested_tensor_from_jagged(torch.cat(values.values), offsets)}, None


class _Mode(BaseEngineCtx):  # type: ignore[misc]
    """Context in which a model trains or is scored."""

    def __enter__(self) -> None:
        super().__enter__()
        self.engine.module.train(self.mode == "train")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.mode == "train" and (self.zero_grad_on_exit or kind is not None):
            self.engine.optimizer_zero_grad()
        super().__exit__(kind, error, trace)


def _refuse(problems: list[str]) -> None:
    """Raises ValueError for settings, which are the same on all ranks."""
    if problems:
        raise ValueError(f"strategy {STRATEGY!r} cannot run these settings:\n" + "\n".join(f"- {each}" for each in problems))


def _problems(model: Any, engine: Any, checkpoint: Any) -> list[str]:
    """Problems with settings of model, engine and checkpoints."""
    problems = [
        f"model.{name} is set, but {why}; leave it out"
        for name, is_set, why in (
            ("use_liger", model.use_liger, "kernels are chosen by longctx.use_liger_kernel or longctx.compile_layers"),
            ("enable_activation_offload", model.enable_activation_offload, "plans decide what is offloaded"),
            ("mtp.enable", model.mtp.get("enable", False), "plans do not run layers that predict further tokens"),
            ("tiled_mlp.enabled", model.tiled_mlp.get("enabled", False), "plans decide on tiles"),
        )
        if is_set
    ]
    has_adapter = model.lora_rank > 0 or model.lora_adapter_path is not None
    if has_adapter and not model.lora.get("merge", False) and not engine.forward_only and model.model_type == "language_model":
        problems.append(
            "model.lora.merge is False, but the rollout engine gets weights with the adapter added; set model.lora.merge=True"
        )
    if engine.full_determinism:
        problems.append("full_determinism is True, but plans differ from step to step; leave it out")
    for name in ("save_contents", "load_contents") if checkpoint is not None and not engine.forward_only else ():
        if missing := _CONTENTS - set(checkpoint.get(name) or _CONTENTS):
            problems.append(f"checkpoint.{name} lacks {', '.join(sorted(missing))}, but checkpoints hold all of it; leave it out")
    if checkpoint is not None and checkpoint.get("async_save", False):
        problems.append("checkpoint.async_save is True, but an engine writes checkpoints at once; leave it out")
    return problems


def _batch_problems(data: Any) -> list[str]:
    """Problems with a batch of this rank."""
    problems = []
    if extract_multi_modal_inputs(data.get("multi_modal_inputs", [])):
        problems.append("a row has images, sound or video, but plans run rows of text alone")
    positions = data.get("position_ids", None)
    if positions is not None:
        counted = torch.cat([torch.arange(n, device=positions.device) for n in data["input_ids"].offsets().diff().tolist()])
        if not bool((positions.values() == counted).all()):
            problems.append("position_ids do not count the tokens of each row from 0")
    asks = ("distillation_use_topk", "calculate_sum_pi_squared", "enable_routing_replay")
    problems += [f"{name} is asked for, which plans do not do" for name in asks if tu.get_non_tensor_data(data, name, False)]
    return problems


def _rows(data: Any, has_values: bool) -> list[TokenRow]:
    """Returns this rank's rows; of a policy, responses are scored, or what the loss counts, or all tokens."""
    ids = data["input_ids"]
    rows, lengths = list(ids.unbind()), ids.offsets().diff().tolist()
    mask = data["loss_mask"]
    if has_values:
        marks: list[Any] = [None] * len(rows)
    elif "responses" in data:
        answers = data["responses"]
        if answers.is_nested:
            counts = answers.offsets().diff().tolist()
        else:
            counts = data["attention_mask"][:, -answers.shape[1] :].sum(1).tolist()
        marks = [torch.arange(n, device=ids.device) >= n - count for n, count in zip(lengths, counts, strict=True)]
    else:
        marks = list(mask.bool().unbind()) if mask.is_nested else [None] * len(rows)
    return [TokenRow(row, each) for row, each in zip(rows, marks, strict=True)]


def _schedule(optimizer: Any, settings: Any) -> LRScheduler:
    """Makes verl's schedule of the learning rate."""
    total, warmup = settings.total_training_steps, settings.lr_warmup_steps
    warmup = int(settings.lr_warmup_steps_ratio * total) if warmup is None or warmup <= 0 else warmup
    if settings.lr_scheduler_type == "constant":
        return get_constant_schedule_with_warmup(optimizer=optimizer, num_warmup_steps=warmup)
    return get_cosine_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=warmup,
        num_training_steps=total,
        min_lr_ratio=settings.min_lr_ratio,
        num_cycles=settings.num_cycles,
        zero_indexed_step=settings.zero_indexed_step,
    )


def _detached(metrics: dict[str, Any]) -> dict[str, Any]:
    """Frees metrics from the graph."""
    return {name: x.detach() if isinstance(x, Tensor) else x for name, x in metrics.items()}
