"""Translates DeepSpeed's configuration into fields of `LongContextConfig` and `TrainingArguments`; DeepSpeed is not needed.

`FIELDS` says what becomes of every field; docs/reference/training-arguments.md repeats it, and a test compares it with the names
that an installed DeepSpeed reads. Source: DeepSpeed 0.19.8, `config.py`, `zero/config.py`, `zero/offload_config.py`,
`precision_config.py`, `lr_schedules.py` and `engine.py` of its folder `runtime`; for the fields of accelerate's YAML, accelerate
1.15, `utils/dataclasses.py`.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import TrainingArguments

from hf_longctx.hf.config import Flag, Kind, Number, Whole, Word
from hf_longctx.hf.ranks.exit_message import RefusedRun
from hf_longctx.hf.ranks.launch import LaunchEnvironment, on_first_rank
from hf_longctx.plan.core.messages import listed, shortened, shown
from hf_longctx.plan.core.serialize import unique_keys

logger = logging.getLogger(__name__)
logger.addFilter(on_first_rank)

State = Literal["translated", "no effect", "refused"]


@dataclass(frozen=True, slots=True)
class Field:
    """One field of DeepSpeed's configuration, or a block that is decided as a whole."""

    state: State
    # its meaning here, the reason why it has no effect, or what to do instead
    note: str
    # type and range of a translated value
    kind: Kind | None = None
    # field inside a refused block that turns it on; without one, any value but nothing does
    switch: str = ""


def _to(note: str, kind: Kind) -> Field:
    return Field("translated", note, kind)


def _idle(why: str) -> Field:
    return Field("no effect", why)


def _refused(remedy: str, switch: str = "") -> Field:
    return Field("refused", remedy, None, switch)


_COUNT = Whole(1, "give 1 or more")
_FLAG = Flag()
_FROM_ZERO = Number("it cannot be negative", may_be_zero=True)
_DEVICE = Word(("none", "cpu", "nvme"))
_DTYPE = Word(("fp32", "bf16", "fp16"))

_BUFFERS = "buffers and order of DeepSpeed's own communication; plans have theirs"
_CHECKPOINTS = "checkpoints are ordinary folders of `transformers`, with whole weights"
_REPORTS = "`report_to`, `logging_steps` and the run's own reports decide"
_REMOVED = "removed from DeepSpeed; leave it out"
_ONLY_NVME = "for NVMe alone"
_OWN_PLANS = "plans choose it by memory and time"

# dotted name -> what becomes of it. Blocks whose fields stand here are read field by field.
FIELDS: dict[str, Field] = {
    "train_batch_size": _to(
        "with the number of ranks, `per_device_train_batch_size` or `gradient_accumulation_steps`; it must be their product",
        _COUNT,
    ),
    "train_micro_batch_size_per_gpu": _to("`per_device_train_batch_size`", _COUNT),
    "gradient_accumulation_steps": _to("`gradient_accumulation_steps`", _COUNT),
    "gradient_clipping": _to("`max_grad_norm`; left out, that of the arguments", _FROM_ZERO),
    "zero_optimization.stage": _to(
        '`parameters`: 0 `"replicated"`, 1 and 2 `"gathered_per_round"` (`"gathered_per_step"` in stages), 3 `"sharded"`',
        Whole(0, "give 0, 1, 2 or 3", most=3),
    ),
    "zero_optimization.offload_optimizer.device": _to('`optimizer_states`: `cpu` `"host"`; `nvme` is refused', _DEVICE),
    "zero_optimization.offload_param.device": _to('`layer_weights`: `cpu` `"host"`, with stage 3; `nvme` is refused', _DEVICE),
    "zero_optimization.offload_optimizer.ratio": _to(
        "only 1: all states are on the host", Number("give 1", may_be_zero=True, most=1)
    ),
    "zero_optimization.cpu_offload": _to('`optimizer_states="host"`, the old name of `offload_optimizer`', _FLAG),
    "zero_optimization.cpu_offload_param": _to('`layer_weights="host"`, the old name of `offload_param`', _FLAG),
    "zero_optimization.mics_shard_size": _to("`shard_ranks`, with stage 3; -1 for all ranks", Whole(-1, "give -1 or more")),
    "zero_optimization.zero_hpz_partition_size": _to(
        '`parameters="gathered_per_node"`, with stage 3, if more than 1; nodes keep copies, so give the ranks of one',
        Whole(0, "it cannot be negative"),
    ),
    "bf16.enabled": _to(
        "`bf16`; for DeepSpeed's bf16 weights with fp32 copies, load the model in bfloat16 (`fp32_master_weights`)", _FLAG
    ),
    "bf16.check_grad_overflow": _to("`on_nonfinite`: `true` `skip`, `false` `stop`", _FLAG),
    "bf16.bf16_master_weights_and_grads": _to(
        "`fp32_master_weights=False`, `fp32_gradients=False`, with `bf16_optimizer_states`", _FLAG
    ),
    "bf16.bf16_optimizer_states": _to("see `bf16_master_weights_and_grads`, without which it is refused", _FLAG),
    "torch_autocast.enabled": _to("`bf16`", _FLAG),
    "torch_autocast.dtype": _to("only `bfloat16`", Word(("bfloat16", "float16"))),
    "data_types.grad_accum_dtype": _to("`fp32_gradients`; `fp16` is refused", _DTYPE),
    "checkpoint.use_node_local_storage": _to("`save_on_each_node`", _FLAG),
    "optimizer.type": _to(
        "`optim`: `Adam` and `AdamW` `adamw_torch_fused`; for others leave the block out and set `optim`", Word(("Adam", "AdamW"))
    ),
    "optimizer.params.lr": _to("`learning_rate`; left out, DeepSpeed's 0.001", _FROM_ZERO),
    "optimizer.params.betas": _to("`adam_beta1`, `adam_beta2`; left out, 0.9 and 0.999", _FROM_ZERO),
    "optimizer.params.eps": _to("`adam_epsilon`; left out, 1e-8", _FROM_ZERO),
    "optimizer.params.weight_decay": _to(
        "`weight_decay`, which spares biases and norms as in `Trainer`; left out, 0, or 0.01 with `torch_adam`", _FROM_ZERO
    ),
    "optimizer.params.torch_adam": _to("for the weight decay that is left out", _FLAG),
    "optimizer.params.adam_w_mode": _to("`false` of `Adam` only with a weight decay of 0, where both are the same", _FLAG),
    "scheduler.type": _to(
        "`lr_scheduler_type`: `WarmupLR` `constant_with_warmup`, `WarmupDecayLR` `linear`, `WarmupCosineLR` `cosine_with_min_lr`",
        Word(("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")),
    ),
    "scheduler.params.warmup_max_lr": _to("`learning_rate`; must be the optimizer's `lr`", _FROM_ZERO),
    "scheduler.params.warmup_num_steps": _to("`warmup_steps`, at least 2; left out, 1000", Whole(0, "it cannot be negative")),
    "scheduler.params.total_num_steps": _to("`max_steps`", _COUNT),
    "scheduler.params.warmup_type": _to("a line says that the warm-up is linear", Word(("log", "linear"))),
    "scheduler.params.warmup_min_lr": _to("only 0, at which `Trainer` begins", _FROM_ZERO),
    "scheduler.params.warmup_min_ratio": _to("only 0, at which `Trainer` begins", _FROM_ZERO),
    "scheduler.params.cos_min_ratio": _to(
        "`lr_scheduler_kwargs`; left out, 0.0001", Number("give 0 to 1", may_be_zero=True, most=1)
    ),
    # refused
    "fp16": _refused("set bf16.enabled; loss scaling is not supported", "enabled"),
    "amp": _refused("set bf16.enabled", "enabled"),
    "torch_autocast.lower_precision_safe_modules": _refused("leave it out; autocast decides by its own lists"),
    "gradient_allreduce_op": _refused(
        'leave it out or give "mean"; a step\'s loss is the mean over the label tokens of all ranks'
    ),
    "sequence_parallel_size": _refused(
        "leave it out; group sizes are chosen per step (LongContextConfig.degrees), and all ranks count for the batch"
    ),
    "data_parallel_size": _refused("leave it out; group sizes are chosen per step (LongContextConfig.degrees)"),
    "zero_optimization.zero_quantized_weights": _refused("leave it out; weights travel as they are"),
    "zero_optimization.zero_quantized_nontrainable_weights": _refused(
        "leave it out, and load frozen weights in four bits (QLoRA)"
    ),
    "zero_optimization.zero_quantized_gradients": _refused("leave it out; gradients are summed as they are"),
    "zero_optimization.zeropp_loco_param": _refused(_REMOVED),
    "zero_optimization.zenflow": _refused("leave it out; every step updates all weights"),
    "tensor_parallel": _refused("leave it out; sequences are divided, and weights sharded (parameters='sharded')", "autotp_size"),
    "expert_parallel": _refused("leave it out, and set LongContextConfig(expert_ranks=...)", "enabled"),
    "pipeline": _refused("leave it out, and set LongContextConfig(stages=...)"),
    "hybrid_engine": _refused("leave it out; generation is not part of a plan", "enabled"),
    "compile": _refused("leave it out, and set LongContextConfig(compile_layers=True)", "deepcompile"),
    "weight_quantization": _refused("leave it out, and load weights in four bits with adapters (QLoRA)"),
    "data_efficiency": _refused("leave it out; order and lengths are those of the set", "enabled"),
    "autotuning": _refused("leave it out; " + _OWN_PLANS, "enabled"),
    "checkpoint.load_universal": _refused(
        "leave it out; convert weights with zero_to_fp32.py and load them with from_pretrained"
    ),
    "datastates_ckpt": _refused("leave it out, and set LongContextConfig(async_save=True)"),
    "nebula": _refused("leave it out, and set LongContextConfig(async_save=True)", "enabled"),
    "elasticity": _refused("leave it out; a run resumes on any number of ranks", "enabled"),
    "compression_training": _refused(_REMOVED),
    "quantize_training": _refused(_REMOVED),
    "sparse_attention": _refused(_REMOVED),
    "eigenvalue": _refused(_REMOVED, "enabled"),
    "curriculum_learning": _refused(_REMOVED, "enabled"),
    "progressive_layer_drop": _refused(_REMOVED, "enabled"),
    "optimizer.params.amsgrad": _refused("leave it out"),
    "optimizer.params.max_grad_norm": _refused("give gradient_clipping"),
    "optimizer.params.bias_correction": _refused("leave it out; AdamW corrects its moments"),
    "optimizer.params.fp32_optimizer_states": _refused("leave it out, and set LongContextConfig(fp32_master_weights=False)"),
    "optimizer.params.maximize": _refused("leave it out"),
    "scheduler.params.last_batch_iteration": _refused("leave it out, and resume from a checkpoint"),
    # without effect
    **{
        f"zero_optimization.{name}": _idle(_BUFFERS)
        for name in (
            *("allgather_bucket_size", "allgather_partitions", "contiguous_gradients", "overlap_comm", "parameter_alignment"),
            *(
                "reduce_bucket_size",
                "reduce_scatter",
                "round_robin_gradients",
                "sub_group_size",
                "use_multi_rank_bucket_allreduce",
            ),
            *("mics_hierarchical_params_gather", "stage3_allgather_sequential", "stage3_use_all_reduce_for_fetch_params"),
            *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_model_persistence_threshold"),
            *("stage3_module_granularity_threshold", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size"),
        )
    },
    **{
        f"zero_optimization.{name}": _idle("a switch inside DeepSpeed's engine")
        for name in (
            *("compute_grad_norm", "enable_sanity_checks", "ignore_unused_parameters", "leaf_module", "legacy_stage1"),
            *("log_trace_cache_warnings", "memory_efficient_linear", "override_module_apply"),
            "save_muon_momentum_buffer_in_memory",
        )
    },
    **{
        f"zero_optimization.{name}": _idle(_CHECKPOINTS)
        for name in (
            *("elastic_checkpoint", "load_from_fp32_weights", "pipeline_loading_checkpoint"),
            *("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
        )
    },
    "zero_optimization.cpu_offload_use_pin_memory": _idle("host memory is pinned on CUDA"),
    **{
        f"zero_optimization.{block}.{name}": _idle(why)
        for block, names in {
            "offload_optimizer": {
                **{"pin_memory": "host memory is pinned on CUDA", "super_offload": _BUFFERS, "cpuadam_cores_perc": _BUFFERS},
                **dict.fromkeys(("buffer_count", "fast_init", "nvme_path", "pipeline_read", "pipeline_write"), _ONLY_NVME),
            },
            "offload_param": {
                "pin_memory": "host memory is pinned on CUDA",
                **dict.fromkeys(("buffer_count", "buffer_size", "max_in_cpu", "nvme_path"), _ONLY_NVME),
            },
        }.items()
        for name, why in names.items()
    },
    "bf16.immediate_grad_update": _idle(_BUFFERS),
    "data_types.param_dtype": _idle("weights have the dtype in which the model is loaded"),
    "data_types.buffer_dtype": _idle("buffers have the dtype in which the model is loaded"),
    "data_types.keep_in_fp32_modules": _idle("`transformers` keeps those of a class when it loads the model"),
    **dict.fromkeys(("checkpoint.tag_validation", "checkpoint.parallel_write", "checkpoint.writer"), _idle(_CHECKPOINTS)),
    "checkpoint.checkpoint_serialization": _idle(_CHECKPOINTS),
    **dict.fromkeys(
        ("optimizer.params.foreach", "optimizer.params.fused", "optimizer.params.set_grad_none", "optimizer.legacy_fusion"),
        _idle("the same update by another kernel"),
    ),
    "activation_checkpointing": _idle("`activations`: plans recompute or offload where memory is short"),
    **dict.fromkeys(
        (
            *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level", "flops_profiler"),
            *("tensorboard", "wandb", "comet", "csv_monitor", "comms_logger", "timers"),
        ),
        _idle(_REPORTS),
    ),
    **dict.fromkeys(
        (
            *("communication_data_type", "seq_parallel_communication_data_type", "prescale_gradients"),
            *("gradient_predivide_factor", "disable_allgather", "sparse_gradients"),
        ),
        _idle("gradients travel in the dtype in which they are summed (`fp32_gradients`)"),
    ),
    **dict.fromkeys(
        ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "managed_gradient_accumulation", "disable_python_gc"),
        _idle("a switch inside DeepSpeed's engine"),
    ),
    "use_data_before_expert_parallelism": _idle("for DeepSpeed's own experts"),
    "dataloader_drop_last": _idle("the argument of the same name decides, as under DeepSpeed in `transformers`"),
    "vocabulary_size": _idle("for a warning of DeepSpeed"),
    "aio": _idle(_ONLY_NVME),
    "graph_harvesting": _idle(_REMOVED),
}
# values of refused fields that ask for nothing, beside false and null
_OFF: dict[str, tuple[Any, ...]] = {
    "gradient_allreduce_op": ("mean",),
    "sequence_parallel_size": (1,),
    "data_parallel_size": (1,),
    "tensor_parallel": (0, 1),
    "scheduler.params.last_batch_iteration": (-1,),
    "pipeline": ({},),
    "compression_training": ({},),
    "torch_autocast.lower_precision_safe_modules": ([],),
}
# refused fields that are on unless they are given
_ON_BY_DEFAULT = ("optimizer.params.bias_correction", "optimizer.params.fp32_optimizer_states")
_BLOCKS = {name.rsplit(".", depth)[0] for name in FIELDS for depth in range(1, name.count(".") + 1)}

# field of accelerate's YAML -> DeepSpeed's
_OF_ACCELERATE = {
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
}
# fields of accelerate's YAML about DeepSpeed's launcher, its files, and the loading of models
_IDLE_OF_ACCELERATE = (
    *("zero3_init_flag", "zero3_save_16bit_model", "offload_optimizer_nvme_path", "offload_param_nvme_path"),
    *("deepspeed_hostfile", "deepspeed_multinode_launcher", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter"),
    "deepspeed_moe_layer_cls_names",
)
_FILE_OF_ACCELERATE = "deepspeed_config_file"

# arguments that DeepSpeed's configuration decides in `transformers`, whatever the user's are; others must be equal
DECIDED = ("optim", "lr_scheduler_type", "lr_scheduler_kwargs")


@dataclass(frozen=True)
class DeepSpeedSettings:
    """A DeepSpeed configuration as keyword arguments."""

    # fields of `LongContextConfig`
    config: dict[str, Any]
    # fields of `TrainingArguments`
    arguments: dict[str, Any]
    # the line that says what became of the configuration
    line: str = ""
    # fields that have no counterpart, each with its value and a remedy
    problems: tuple[str, ...] = ()


def from_deepspeed(
    source: str | os.PathLike[str] | Mapping[str, Any], *, num_ranks: int | None = None, has_stages: bool = False
) -> DeepSpeedSettings:
    """Returns the fields of `LongContextConfig` and `TrainingArguments` that a DeepSpeed configuration asks for; logs one line.

        found = from_deepspeed("ds_config.json")
        config = LongContextConfig(max_length=32768, **found.config)
        args = TrainingArguments("outputs", **found.arguments)

    source: a JSON file, its text, a dictionary, or accelerate's YAML with a block `deepspeed_config`. num_ranks: ranks of the
    run, for `train_batch_size` (default: those of the launcher). has_stages: whether the run has pipeline stages. Fields with the
    value "auto" are left to the arguments. DeepSpeed need not be installed.

    Raises ValueError for a file that cannot be read, or naming every field that has no counterpart, with its value and a remedy.
    """
    found = translated(source, LaunchEnvironment.read().num_ranks if num_ranks is None else num_ranks, has_stages)
    if found.problems:
        raise RefusedRun.of(found.problems, "this DeepSpeed configuration cannot be translated")
    logger.warning("%s", found.line)
    return found


# no argument names a stage, so "auto" would mean none
_NEVER_OPEN = "zero_optimization.stage"


def translated(
    source: str | os.PathLike[str] | Mapping[str, Any],
    num_ranks: int,
    has_stages: bool,
    known: Mapping[str, Any] | None = None,
) -> DeepSpeedSettings:
    """Returns the translation with its problems, and logs nothing; see `from_deepspeed`.

    known: values of `TrainingArguments` that "auto" stands for.
    """
    try:
        origin, names, block = _read(source)
    except ValueError as error:
        return DeepSpeedSettings({}, {}, "", (str(error),))
    given: dict[str, Any] = {}
    problems: list[str] = []
    mistyped: list[str] = []
    idle = []
    rows = list(_flat(block, "", problems))
    for name, value in rows:
        row = FIELDS[name]
        spelled = names.get(name, name)
        if row.state == "no effect":
            idle.append(spelled.rsplit(".", 1)[-1])
        elif row.state == "refused":
            problems += [f"{spelled} is {shown(value)}; {row.note}"] if _asks(name, row, value) else []
        elif value is not None and (value != "auto" or name == _NEVER_OPEN):
            try:
                given[name] = _checked(name, spelled, value)
            except ValueError as error:
                mistyped.append(str(error))
    part = _Part()
    if not mistyped:
        part.add(_batch(given, num_ranks, known or {}))
        part.add(_sharding(given, num_ranks, has_stages))
        part.add(_precision(given))
        part.add(_optimization(given, {name for name, _ in rows}))
    problems += [*mistyped, *(_respelled(problem, names) for problem in part.problems)]
    both = {"LongContextConfig": part.config, "TrainingArguments": part.arguments}
    said = [f"{cls}({_fields(found)})" for cls, found in both.items() if found]
    notes = part.notes + ([f"without effect here: {listed(list(dict.fromkeys(idle)))}"] if idle else [])
    line = "; ".join([f"{origin} becomes {' and '.join(said)}", *notes])
    return DeepSpeedSettings(part.config, part.arguments, line, tuple(f"{origin}: {each}" for each in problems))


def differing(asked: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Problems with settings whose values are not those that the configuration asks for."""
    return [
        f"DeepSpeed's configuration asks for {name}={shown(wanted)}, but {name} is {shown(values[name])}; give both the same, or "
        f'leave one of them out ("auto")'
        for name, wanted in asked.items()
        if _plain(values[name]) != _plain(wanted)
    ]


def _plain(value: Any) -> Any:
    """The value of an enum, and any other value itself; the same for two forms of one optimizer, and for no keywords."""
    value = getattr(value, "value", value)
    return value.removesuffix("_fused") if isinstance(value, str) else value or None


def decided(args: TrainingArguments) -> dict[str, Any]:
    """Values of arguments that the DeepSpeed configuration of these arguments decides, whatever they say."""
    if (source := asked_deepspeed(args)) is None:
        return {}
    found = translated(source, args.world_size, False, vars(args))
    return {
        name: found.arguments[name]
        for name in DECIDED
        if name in found.arguments and _plain(getattr(args, name)) != _plain(found.arguments[name])
    }


def asked_deepspeed(args: TrainingArguments) -> str | Mapping[str, Any] | None:
    """The DeepSpeed configuration of the arguments, or the one that accelerate's launcher has given them; None without one."""
    if args.deepspeed:
        source: str | Mapping[str, Any] = args.deepspeed
        return source
    plugin = getattr(args, "deepspeed_plugin", None)
    return None if plugin is None else {**plugin.deepspeed_config}


@dataclass
class _Part:
    """Settings that some fields become, notes for the line, and problems."""

    config: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, other: _Part) -> None:
        self.config |= other.config
        self.arguments |= other.arguments
        self.notes += other.notes
        self.problems += other.problems


def _batch(given: Mapping[str, Any], num_ranks: int, known: Mapping[str, Any]) -> _Part:
    """Sequences of a step: their number, that of a rank, and batches accumulated; two of them give the third."""
    part = _Part()
    total, micro = given.get("train_batch_size"), given.get("train_micro_batch_size_per_gpu")
    steps = given.get("gradient_accumulation_steps")
    if total is not None:
        here_micro, here_steps = known.get("per_device_train_batch_size"), known.get("gradient_accumulation_steps")
        if micro is None and steps is None and here_micro and here_steps:
            micro, steps = here_micro, here_steps
        elif micro is None:
            micro = total // (num_ranks * (steps or 1))
            steps = steps or 1
        elif steps is None:
            steps = total // (num_ranks * micro)
        if (product := micro * steps * num_ranks) != total:
            part.problems.append(
                f"train_batch_size is {total}, but {micro} sequences of a rank x {steps} accumulated batches x {num_ranks} ranks "
                f"are {product}; give numbers that agree, or leave train_batch_size out"
            )
    if micro is not None:
        part.arguments["per_device_train_batch_size"] = micro
    if steps is not None:
        part.arguments["gradient_accumulation_steps"] = steps
    if "gradient_clipping" in given:
        part.arguments["max_grad_norm"] = given["gradient_clipping"]
    return part


def _sharding(given: Mapping[str, Any], num_ranks: int, has_stages: bool) -> _Part:
    part = _Part()
    zero = "zero_optimization."
    stage = given.get(f"{zero}stage", 0)
    in_rounds = "gathered_per_step" if has_stages else "gathered_per_round"
    part.config["parameters"] = ("replicated", in_rounds, in_rounds, "sharded")[stage]
    for block, old, name in (
        ("offload_optimizer", "cpu_offload", "optimizer_states"),
        ("offload_param", "cpu_offload_param", "layer_weights"),
    ):
        device = given.get(f"{zero}{block}.device", "cpu" if given.get(f"{zero}{old}") else "none")
        if device == "nvme":
            part.problems.append(f"{zero}{block}.device is 'nvme', which is not supported; give 'cpu' ({name}='host') or 'none'")
        elif device == "cpu" and name == "layer_weights" and stage != 3:
            part.problems.append(f"{zero}{block}.device is 'cpu' with {zero}stage {stage}; give stage 3, or leave {block} out")
        elif device == "cpu":
            part.config[name] = "host"
    ratio = given.get(f"{zero}offload_optimizer.ratio", 1)
    if ratio != 1:
        part.problems.append(f"{zero}offload_optimizer.ratio is {ratio}; give 1, all states on the host, or leave the block out")
    ranks = given.get(f"{zero}mics_shard_size", -1)
    if ranks in (0, 1) or ranks > num_ranks:
        part.problems.append(f"{zero}mics_shard_size is {ranks} on {num_ranks} ranks; give 2 to {num_ranks}, or -1 for all")
    elif ranks > 1 and stage != 3:
        part.problems.append(f"{zero}mics_shard_size is {ranks} with {zero}stage {stage}; give stage 3, or leave it out")
    elif 1 < ranks < num_ranks:
        part.config["shard_ranks"] = ranks
    hpz = f"{zero}zero_hpz_partition_size"
    per_node = given.get(hpz, 1)
    if per_node > 1 and stage != 3:
        part.problems.append(f"{hpz} is {per_node} with {zero}stage {stage}; give stage 3, or leave it out")
    elif per_node > 1 and (per_node >= num_ranks or num_ranks % per_node):
        part.problems.append(
            f"{hpz} is {per_node}, and the {num_ranks} ranks are not several times as many; give the ranks of a node, or leave "
            f"it out"
        )
    elif per_node > 1 and part.config.get("shard_ranks"):
        part.problems.append(f"{hpz} is {per_node} with {zero}mics_shard_size {ranks}; leave one of them out")
    elif per_node > 1:
        part.config["parameters"] = "gathered_per_node"
        part.notes.append(f"each node keeps a copy of the weights, whatever its ranks ({hpz} is {per_node})")
    return part


def _precision(given: Mapping[str, Any]) -> _Part:
    part = _Part()
    switches = {name: given[name] for name in ("bf16.enabled", "torch_autocast.enabled") if name in given}
    if switches:
        part.arguments["bf16"] = any(switches.values())
    if given.get("torch_autocast.enabled") and given.get("torch_autocast.dtype", "bfloat16") != "bfloat16":
        part.problems.append("torch_autocast.dtype is 'float16', whose loss scaling is not supported; give 'bfloat16'")
    if "bf16.check_grad_overflow" in given:
        part.config["on_nonfinite"] = "skip" if given["bf16.check_grad_overflow"] else "stop"
    in_bf16 = {name: given.get(f"bf16.{name}", False) for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states")}
    if len(set(in_bf16.values())) > 1:
        said = ", ".join(f"bf16.{name} is {value}" for name, value in in_bf16.items())
        part.problems.append(f"{said}; give both the same: weights, gradients and moments in fp32 copies, or all in bf16")
    elif in_bf16["bf16_optimizer_states"]:
        part.config |= {"fp32_master_weights": False, "fp32_gradients": False}
    if (dtype := given.get("data_types.grad_accum_dtype")) == "fp16":
        part.problems.append("data_types.grad_accum_dtype is 'fp16', which is not supported; give 'fp32' or 'bf16'")
    elif dtype is not None:
        part.config["fp32_gradients"] = dtype == "fp32"
    if "checkpoint.use_node_local_storage" in given:
        part.arguments["save_on_each_node"] = given["checkpoint.use_node_local_storage"]
    return part


def _optimization(given: Mapping[str, Any], names: set[str]) -> _Part:
    """Optimizer and schedule. names: all names of the configuration, also those whose value is "auto"."""
    part = _Part()
    if "optimizer.type" in given:
        part.arguments["optim"] = "adamw_torch_fused"
        decay = 0.01 if given.get("optimizer.params.torch_adam") else 0.0
        for name, argument, default in (
            ("lr", "learning_rate", 1e-3),
            ("eps", "adam_epsilon", 1e-8),
            ("weight_decay",) * 2 + (decay,),
        ):
            full = f"optimizer.params.{name}"
            if full in given or full not in names:
                part.arguments[argument] = given.get(full, default)
        if "optimizer.params.betas" in given or "optimizer.params.betas" not in names:
            betas = given.get("optimizer.params.betas", (0.9, 0.999))
            part.arguments |= dict(zip(("adam_beta1", "adam_beta2"), betas, strict=True))
        decay = part.arguments.get("weight_decay", 1.0)
        if decay and given["optimizer.type"] == "Adam" and not given.get("optimizer.params.adam_w_mode", True):
            part.problems.append(
                "optimizer.params.adam_w_mode is False, so that the weight decay would be part of the gradient; leave it out "
                "(AdamW), or give a weight_decay of 0"
            )
        elif decay:
            part.notes.append(
                "weight_decay spares biases and norms, as in Trainer, where DeepSpeed's optimizer decays all weights"
            )
    kind = given.get("scheduler.type")
    return part if kind is None else _with_schedule(part, kind, given, names)


def _with_schedule(part: _Part, kind: str, given: Mapping[str, Any], names: set[str]) -> _Part:
    params = {
        name.removeprefix("scheduler.params."): value for name, value in given.items() if name.startswith("scheduler.params.")
    }
    autos = {name.removeprefix("scheduler.params.") for name in names} - set(params)
    part.arguments["lr_scheduler_type"] = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear"}.get(
        kind, "cosine_with_min_lr"
    )
    if kind == "WarmupCosineLR":
        part.arguments["lr_scheduler_kwargs"] = {"min_lr_rate": params.get("cos_min_ratio", 1e-4)}
    if "warmup_num_steps" not in autos:
        # DeepSpeed warms up over two steps at least
        part.arguments["warmup_steps"] = max(2, params.get("warmup_num_steps", 1000))
    if "total_num_steps" in params:
        part.arguments["max_steps"] = params["total_num_steps"]
    elif kind != "WarmupLR" and "total_num_steps" not in autos:
        part.problems.append(f'scheduler.params.total_num_steps is missing, which {kind} needs; give a number or "auto"')
    most = params.get("warmup_max_lr", 1e-3 if kind == "WarmupDecayLR" and "warmup_max_lr" not in autos else None)
    if most is not None and kind != "WarmupCosineLR" and part.arguments.setdefault("learning_rate", most) != most:
        part.problems.append(
            f"scheduler.params.warmup_max_lr is {most}{'' if 'warmup_max_lr' in params else ' by default'}, but "
            f"optimizer.params.lr is {part.arguments['learning_rate']}; give both "
            f'the same, or "auto"'
        )
    for name in ("warmup_min_lr", "warmup_min_ratio"):
        if params.get(name):
            part.problems.append(f"scheduler.params.{name} is {params[name]}; give 0, at which Trainer's warm-up begins")
    part.notes.append(
        f"the warm-up is linear and begins one step earlier than {kind}'s, which is {params.get('warmup_type', 'log')}"
        + (" by default" if "warmup_type" not in params else "")
    )
    return part


def _fields(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in found.items())


def _respelled(problem: str, names: Mapping[str, str]) -> str:
    """A problem with the names of accelerate's YAML in place of DeepSpeed's."""
    for name in names:
        problem = problem.replace(f"{name} ", f"{names[name]} ")
    return problem


def _asks(name: str, row: Field, value: Any) -> bool:
    """Whether a refused field asks for something."""
    if row.switch and isinstance(value, Mapping):
        value = value.get(row.switch)
    if name in _ON_BY_DEFAULT:
        return value not in (True, None)
    return value not in (False, None, "auto", *_OFF.get(name, ()))


def _checked(name: str, spelled: str, value: Any) -> Any:
    kind = FIELDS[name].kind
    assert kind is not None
    if name == "optimizer.params.betas":
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise ValueError(f"{spelled} is {shown(value)}; give two numbers, for example [0.9, 0.999]")
        return tuple(kind.checked(spelled, each) for each in value)
    if isinstance(kind, Word) and isinstance(value, str):
        # DeepSpeed reads names of optimizers, and accelerate those of devices, in any case
        value = next((each for each in kind.choices if each.lower() == value.lower()), value)
    try:
        return kind.checked(spelled, value)
    except ValueError as error:
        more = "; leave the block out and set optim or lr_scheduler_type of TrainingArguments" if name.endswith(".type") else ""
        raise ValueError(f"{error}{more}") from None


def _flat(block: Mapping[str, Any], prefix: str, problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Yields all known fields with their values; adds unknown names to `problems`."""
    for key, value in block.items():
        # the old name
        name = prefix + ("bf16" if prefix + str(key) == "bfloat16" else str(key))
        if name in FIELDS:
            yield name, value
        elif name not in _BLOCKS:
            problems.append(f"{prefix}{key} is unknown; {_nearest(name)}")
        elif name == "zero_optimization" and isinstance(value, bool):
            # the old form of stage 1
            yield "zero_optimization.stage", int(value)
        elif isinstance(value, Mapping):
            if name in ("optimizer", "scheduler") and "type" not in value:
                problems.append(f"{name}.type is missing; name one, or leave the block out")
            yield from _flat(value, f"{name}.", problems)
        elif value is not None:
            problems.append(f"{name} is {shown(value)} ({type(value).__name__}); give a block of fields, or leave it out")


def _nearest(name: str) -> str:
    last = {known.rsplit(".", 1)[-1]: known for known in reversed(FIELDS)}
    near = difflib.get_close_matches(name.rsplit(".", 1)[-1], last, n=1)
    return f"did you mean {last[near[0]]}? Else leave it out" if near else "leave it out"


def _read(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[str, dict[str, str], Mapping[str, Any]]:
    """Returns words for the configuration, names that it spells otherwise, and DeepSpeed's block."""
    origin = "DeepSpeed's configuration"
    if isinstance(source, str) and source.lstrip().startswith("{"):
        source = _parsed(source, f"{origin}, a text,", is_yaml=False)
    elif isinstance(source, str | os.PathLike):
        path = Path(source)
        origin = f"DeepSpeed's configuration {path}"
        source = _parsed(_text_of(path, origin), origin, is_yaml=path.suffix in (".yaml", ".yml"))
    if not isinstance(source, Mapping):
        raise ValueError(
            f'{origin} is a {type(source).__name__}; give a file, a dictionary, or a text like {{"zero_optimization": ...}}'
        )
    if "distributed_type" not in source and "deepspeed_config" not in source:
        return origin, {}, source
    return _of_accelerate(source, origin.replace("DeepSpeed's", "accelerate's"))


def _text_of(path: Path, origin: str) -> str:
    if not path.is_file():
        raise ValueError(f"{origin} does not exist; give the path of a JSON file, or of accelerate's YAML")
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{origin} has {path.stat().st_size:,} bytes; give a file of at most {_MOST_BYTES:,}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{origin} cannot be read ({error}); give a JSON file") from None


# bytes of the largest configuration
_MOST_BYTES = 2**20


def _parsed(text: str, origin: str, is_yaml: bool) -> Any:
    import yaml

    try:
        return yaml.safe_load(text) if is_yaml else json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, TypeError, OverflowError, RecursionError, yaml.YAMLError) as error:
        found = " ".join(shortened(str(error)).split())
        raise ValueError(f"{origin} is not {'YAML' if is_yaml else 'JSON'} that can be read: {found}") from None


def _of_accelerate(source: Mapping[str, Any], origin: str) -> tuple[str, dict[str, str], Mapping[str, Any]]:
    block = source.get("deepspeed_config")
    if not isinstance(block, Mapping):
        raise ValueError(f"{origin} has no block deepspeed_config; give DeepSpeed's configuration, or one of accelerate with it")
    if (path := block.get(_FILE_OF_ACCELERATE)) is not None:
        file_origin, names, inner = _read(str(path))
        if others := [name for name in _OF_ACCELERATE if name in block]:
            raise ValueError(f"{origin} gives {listed(others)} beside {_FILE_OF_ACCELERATE}; leave them out, as accelerate asks")
        return file_origin, names, inner
    known = (*_OF_ACCELERATE, *_IDLE_OF_ACCELERATE, _FILE_OF_ACCELERATE)
    if unknown := [str(name) for name in block if name not in known]:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        raise ValueError(f"{origin}: {listed(unknown)} unknown; " + (f"did you mean {near[0]}?" if near else "leave it out"))
    flat = {_OF_ACCELERATE[name]: value for name, value in block.items() if name in _OF_ACCELERATE}
    # accelerate takes stage 2 if none is named
    flat.setdefault("zero_optimization.stage", 2)
    precision = str(source.get("mixed_precision", "no")).lower()
    if precision in ("bf16", "fp16"):
        flat["bf16.enabled" if precision == "bf16" else "fp16"] = True if precision == "bf16" else precision
    names = {ours: name for name, ours in _OF_ACCELERATE.items() if ours != name}
    return origin, {**names, "fp16": "mixed_precision"}, _nested(flat)


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A block of blocks from dotted names."""
    found: dict[str, Any] = {}
    for name, value in flat.items():
        *blocks, last = name.split(".")
        block = found
        for each in blocks:
            block = block.setdefault(each, {})
        block[last] = value
    return found
