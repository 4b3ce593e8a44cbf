"""Lists the effect of every field of `TrainingArguments` under plans; translates FSDP, DeepSpeed and checkpointing settings.

The checks at start read the table, docs/reference/training-arguments.md repeats it, and a test compares it with the installed
version.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints

from transformers import TrainingArguments
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.ranks.launch import LaunchEnvironment, without_plugins
from hf_longctx.hf.rules.deepspeed import DECIDED, DeepSpeedSettings, asked_deepspeed, decided, differing, translated
from hf_longctx.hf.rules.rule import Facts, Rule, refusals
from hf_longctx.plan.core.messages import shown
from hf_longctx.plan.core.types import Parameters, frees_every_round

State = Literal["supported", "Trainer's own", "some values", "translated", "no effect"]
# the runs in which plans replace the code that reads a setting: all, those whose training batches they draw, or those whose
# evaluation they run
Scope = Literal["everywhere", "batches", "evaluation"]


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of `TrainingArguments`."""

    state: State
    # its meaning here, the remedy for refused values, or the reason why it has no effect
    note: str = ""
    # values that are not refused, if the table alone decides
    values: tuple[Any, ...] = ()
    # the runs in which the setting has no effect; in others `Trainer` reads it
    scope: Scope = "everywhere"


def _supported(note: str = "") -> Setting:
    return Setting("supported", note)


def _own(note: str = "") -> Setting:
    """A setting that is read by code of `Trainer` which plans do not replace."""
    return Setting("Trainer's own", note)


def _only(values: tuple[Any, ...], remedy: str) -> Setting:
    return Setting("some values", remedy, values)


def _checked(note: str) -> Setting:
    """A setting with its own check, which refuses some values."""
    return Setting("some values", note)


def _translated(note: str) -> Setting:
    return Setting("translated", note)


def _idle(why: str, scope: Scope = "everywhere") -> Setting:
    return Setting("no effect", why, (), scope)


_EVAL_AUTOCAST = "leave it out; bf16=True evaluates under autocast"
_NO_DDP = "DDP is not used: a plan's executor sums gradients"
_NO_LOGITS = "an evaluation under plans gathers no logits"
_CHECKPOINTING = "`activations`: plans recompute where memory is short; a line says so"
_HUB = "uploads read whole checkpoints"

# field -> its effect; fields of later and earlier versions than the installed one may be here, too
SETTINGS: dict[str, Setting] = {
    "output_dir": _supported(),
    "per_device_train_batch_size": _supported("mean number of sequences of a rank; plans decide which rank runs what"),
    "num_train_epochs": _supported(),
    "max_steps": _supported("needed with a stream"),
    "learning_rate": _supported(),
    "lr_scheduler_type": _supported(),
    "lr_scheduler_kwargs": _own(),
    "warmup_steps": _supported(),
    "optim": _checked(
        "all but LOMO and layer-wise ones, which step inside backward; under shards, those of "
        "[the guide](../guides/sharded-parameters.md#optimizers)",
    ),
    "optim_args": _checked("refused where it would not be obeyed"),
    "weight_decay": _supported(),
    "adam_beta1": _own(),
    "adam_beta2": _own(),
    "adam_epsilon": _own(),
    "optim_target_modules": _own("for GaLore and APOLLO"),
    "gradient_accumulation_steps": _checked("each batch has a plan of its own; not with `tokens_per_step`"),
    "average_tokens_across_devices": _only(
        (True,), "leave it True: a step's loss is the mean over the label tokens of all ranks"
    ),
    "max_grad_norm": _supported("the norm is that of the whole model on all ranks"),
    "label_smoothing_factor": _checked("not beside `token_loss`, with the callback alone, or under TRL"),
    "bf16": _supported(),
    "fp16": _only((False,), "its loss scaling is not supported; use bf16=True or float32"),
    "bf16_full_eval": _only((False,), _EVAL_AUTOCAST),
    "fp16_full_eval": _only((False,), _EVAL_AUTOCAST),
    "tf32": _own("a switch of torch, which `TrainingArguments` sets"),
    "activation_checkpointing": _translated(_CHECKPOINTING),
    "activation_checkpointing_kwargs": _translated(_CHECKPOINTING),
    "gradient_checkpointing": _translated(_CHECKPOINTING),
    "gradient_checkpointing_kwargs": _translated(_CHECKPOINTING),
    "torch_compile": _only(
        (False,), "leave it out, and set LongContextConfig(compile_layers=True), which compiles parts of layers"
    ),
    "torch_compile_backend": _checked("refused, since it sets `torch_compile`"),
    "torch_compile_mode": _checked("refused, since it sets `torch_compile`"),
    "use_liger_kernel": _checked("its norms and gated MLPs; not under TRL"),
    "liger_kernel_config": _checked("its norms and gated MLPs alone"),
    "use_cache": _own("of the model's config; forwards of plans never keep a cache"),
    "neftune_noise_alpha": _checked(
        "noise by token, equal under any plan; not with the callback alone, or losses of log-probabilities",
    ),
    "torch_empty_cache_steps": _supported(),
    "auto_find_batch_size": _only((False,), "leave it out; tokens_per_rank bounds memory"),
    "logging_strategy": _own(),
    "logging_steps": _own("beside the loss, means over the steps since the last log"),
    "logging_first_step": _own(),
    "log_on_each_node": _own(),
    "logging_nan_inf_filter": _idle(
        "a loss that is not finite stops the run, or the step is left out (`on_nonfinite`)", "batches"
    ),
    "include_num_input_tokens_seen": _supported(),
    "log_level": _own(),
    "log_level_replica": _own(),
    "disable_tqdm": _own(),
    "report_to": _own(),
    "run_name": _own(),
    "project": _own(),
    "trackio_space_id": _own(),
    "trackio_bucket_id": _own(),
    "trackio_static_space_id": _own(),
    "eval_strategy": _supported(),
    "eval_steps": _supported(),
    "eval_delay": _own(),
    "per_device_eval_batch_size": _supported("mean number of sequences of a rank"),
    "prediction_loss_only": _supported(),
    "eval_on_start": _own(),
    "eval_do_concat_batches": _idle(f"{_NO_LOGITS}; with `compute_metrics`, False is refused", "evaluation"),
    "eval_use_gather_object": _idle(_NO_LOGITS, "evaluation"),
    "eval_accumulation_steps": _idle(_NO_LOGITS, "evaluation"),
    "include_for_metrics": _checked("`inputs`, with `compute_metrics`; without it, no effect"),
    "batch_eval_metrics": _idle(
        "an evaluation under plans has no batches of logits; with `compute_metrics`, True is refused", "evaluation"
    ),
    "save_only_model": _supported(),
    "save_strategy": _supported(),
    "save_steps": _supported(),
    "save_on_each_node": _checked("not with pipeline stages"),
    "save_total_limit": _supported(),
    "enable_jit_checkpoint": _checked("all ranks save after one step; refused by callbacks"),
    "push_to_hub": _supported(_HUB),
    "hub_token": _own(_HUB),
    "hub_private_repo": _own(_HUB),
    "hub_model_id": _supported(_HUB),
    "hub_strategy": _checked("with `async_save`, only `end`"),
    "hub_always_push": _own(_HUB),
    "hub_revision": _own(_HUB),
    "load_best_model_at_end": _supported(),
    "metric_for_best_model": _supported(),
    "greater_is_better": _supported(),
    "ignore_data_skip": _supported(),
    "restore_callback_states_from_checkpoint": _own(),
    "full_determinism": _supported("plans then follow no measured seconds; a line says so, and `lp` and `milp` are refused"),
    "seed": _supported(),
    "data_seed": _supported(),
    "use_cpu": _own(),
    "accelerator_config": _checked(
        "loaders of planned steps do not read it; `gradient_accumulation_kwargs` is refused",
    ),
    "parallelism_config": _only((None,), "leave it out; group sizes are chosen per step (LongContextConfig.degrees)"),
    "dataloader_drop_last": _supported(),
    "dataloader_num_workers": _supported("no effect with a stream, which threads of its readers read"),
    "dataloader_pin_memory": _supported(),
    "dataloader_persistent_workers": _supported(),
    "dataloader_prefetch_factor": _supported(),
    "dataloader_multiprocessing_context": _supported(),
    "dataloader_in_order": _only((True,), "leave it True: plans must be used in order on every rank"),
    "remove_unused_columns": _idle("plans read the columns that they know, and refuse those that would change a loss", "batches"),
    "label_names": _idle("plans read the column `labels`", "evaluation"),
    "train_sampling_strategy": _checked(
        "`random`, `sequential`; `group_by_length` has no effect: plans balance lengths, and steps are random",
    ),
    "length_column_name": _idle("plans read the lengths of rows themselves", "batches"),
    "ddp_find_unused_parameters": _idle(_NO_DDP, "batches"),
    "ddp_bucket_cap_mb": _idle(_NO_DDP, "batches"),
    "ddp_broadcast_buffers": _idle(_NO_DDP, "batches"),
    "ddp_static_graph": _idle(_NO_DDP, "batches"),
    "ddp_backend": _own(),
    "ddp_timeout": _own("for a rank that works, in any collective; `collective_timeout_s` names one that died or hangs"),
    "fsdp": _translated("`parameters` and `shard_ranks`; a line says which"),
    "fsdp_config": _translated(
        "`parameters` and `shard_ranks`; a line says which; `cpu_offload`, `xla` and unknown strategies are refused, and "
        "`cpu_ram_efficient_loading` on several ranks"
    ),
    "deepspeed": _translated(
        "[settings of both kinds](#deepspeeds-configuration); a line says which; fields without a counterpart, and values that "
        "differ from those of the arguments, are refused",
    ),
    "debug": _only(("", []), "leave it out: a step whose numbers are not finite is stopped, and names the module (on_nonfinite)"),
    "skip_memory_metrics": _own(),
    "do_train": _own("read by scripts"),
    "do_eval": _own("read by scripts"),
    "do_predict": _own("read by scripts"),
    "resume_from_checkpoint": _own("read by scripts, which pass it to `train()`"),
    "local_rank": _own("set by launchers"),
}

# settings of accelerate's loaders, which planned steps do not use
_LOADERS = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking")


# the largest seed that numpy takes
_LARGEST_SEED = 2**32 - 1
# stock code counts up to whole numbers, which fit 64 bits
_LARGEST_WHOLE = 2**63


def _mistyped(run: Facts) -> Iterator[dict[str, str]]:
    for name, hint in get_type_hints(TrainingArguments).items():
        kinds, value = set(get_args(hint) or (hint,)), getattr(run.args, name, None)
        if not (value is None and NoneType in kinds) and (wanted := _wanted(kinds - {NoneType}, value)):
            yield {"name": name, "found": _kind(value), "wanted": wanted}


def _wanted(kinds: set[Any], value: Any) -> str:
    """Describes the values that a field of these types may have; "" if it may have `value`, or if the types are unknown."""
    if kinds == {bool}:
        # stock code takes None for False
        return "" if value is None or (isinstance(value, bool | int) and value in (0, 1)) else "True or False"
    if not kinds or not kinds <= {int, float}:
        return ""
    is_whole = kinds == {int}
    is_number = isinstance(value, Real) and value == value
    if not is_number or (is_whole and (value % 1 or not -_LARGEST_WHOLE < value < _LARGEST_WHOLE)):
        return "a whole number" if is_whole else "a number"
    return ""


def _kind(value: Any) -> str:
    return f"{shown(value)} ({type(value).__name__})"


def has_other(name: str, values: tuple[Any, ...], run: Facts) -> bool:
    """Whether an argument has a value besides `values`; false without such an argument."""
    return getattr(run.args, name, values[0]) not in values


# values that stock code would refuse in the middle of a training or misread, and those that the table alone decides
VALUES = {
    "kind-of-argument": Rule("{name} is {found}", "give {wanted}", _mistyped, "args.max_grad_norm = None"),
    "use-cache": Rule(
        "use_cache is None, which no config of a model takes",
        "give True or False",
        lambda run: run.args.use_cache is None,
        "args.use_cache = None",
    ),
    "label-names": Rule(
        "label_names is {found}",
        "give a list of names of columns",
        lambda run: (
            {"found": _kind(names)}
            for names in [run.args.label_names]
            if not (names is None or (isinstance(names, list | tuple) and all(isinstance(each, str) for each in names)))
        ),
        "args.label_names = 'labels'",
    ),
    "seed": Rule(
        "{name} is {seed}",
        f"give a whole number from 0 to {_LARGEST_SEED}",
        lambda run: (
            {"name": name, "seed": seed}
            for name in ("seed", "data_seed")
            if isinstance(seed := getattr(run.args, name), int) and not 0 <= seed <= _LARGEST_SEED
        ),
        "args.seed = 2**32",
    ),
    "persistent-workers": Rule(
        "dataloader_persistent_workers=True needs workers",
        "set dataloader_num_workers, or leave it out",
        lambda run: run.args.dataloader_persistent_workers and not run.args.dataloader_num_workers,
        "args.dataloader_persistent_workers = True",
    ),
    **{
        name.replace("_", "-"): Rule(
            f"{name}={{args.{name}!r}} is not supported yet",
            setting.note,
            partial(has_other, name, setting.values),
            f"args.{name} = {not setting.values[0]}",
        )
        for name, setting in SETTINGS.items()
        if setting.values
    },
}


def idle_settings(args: TrainingArguments, draws_batches: bool, evaluates: bool, has_metrics: bool) -> list[str]:
    """Changed settings that have no effect in this run, each with its value and the reason.

    draws_batches: whether plans draw the batches of the training. evaluates: whether they run the evaluation. has_metrics:
    whether the trainer was given `compute_metrics`.
    """
    scopes = {"everywhere", *(["batches"] if draws_batches else []), *(["evaluation"] if evaluates else [])}
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    found = [
        f"{name}={getattr(args, name)!r} ({setting.note.partition(';')[0]})"
        for name, setting in SETTINGS.items()
        if setting.state == "no effect" and setting.scope in scopes and _is_changed(args, name, defaults)
    ]
    if draws_batches and not _orders_steps(args):
        found.append(
            f"train_sampling_strategy={str(args.train_sampling_strategy)!r} (plans balance lengths, and steps are random)"
        )
    if draws_batches and (names := _changed_loader_settings(args)):
        found.append(f"accelerator_config {', '.join(names)} (planned steps have a loader of their own)")
    if evaluates and args.include_for_metrics and not has_metrics:
        found.append(f"include_for_metrics={args.include_for_metrics!r} (no metrics are computed without compute_metrics)")
    return found


def _is_changed(args: TrainingArguments, name: str, defaults: dict[str, Any]) -> bool:
    # a field of another version of transformers
    return name in defaults and getattr(args, name) != defaults[name]


def _orders_steps(args: TrainingArguments) -> bool:
    """Whether plans obey the setting of the order of steps."""
    order = str(getattr(args, "train_sampling_strategy", "random")).rsplit(".", 1)[-1]
    return order in ("random", "sequential")


def _changed_loader_settings(args: TrainingArguments) -> list[str]:
    config = args.accelerator_config
    own: dict[str, Any] = {}
    if dataclasses.is_dataclass(config):
        own = {field.name: field.default for field in dataclasses.fields(config)}
    return [f"{name}={getattr(config, name)!r}" for name in _LOADERS if name in own and getattr(config, name) != own[name]]


logger = logging.getLogger(__name__)

# names and numbers of FSDP's strategies -> how parameters live on the ranks of one stage, and whether each node has a copy
_STRATEGIES: dict[str, tuple[Parameters, bool]] = {
    "true": ("sharded", False),
    "full_shard": ("sharded", False),
    "1": ("sharded", False),
    "false": ("gathered_per_round", False),
    "shard_grad_op": ("gathered_per_round", False),
    "2": ("gathered_per_round", False),
    "no_shard": ("replicated", False),
    "3": ("replicated", False),
    "hybrid_shard": ("sharded", True),
    "4": ("sharded", True),
    "hybrid_shard_zero2": ("gathered_per_round", True),
    "_hybrid_shard_zero2": ("gathered_per_round", True),
    "5": ("gathered_per_round", True),
}
# fields that make `Trainer` do what plans do, with the values that turn it off
_NO_CHECKPOINTING: dict[str, Any] = {
    "gradient_checkpointing": False,
    "activation_checkpointing": False,
    "gradient_checkpointing_kwargs": None,
    "activation_checkpointing_kwargs": None,
}
_FSDP: dict[str, Any] = {"fsdp": None, "fsdp_plugin_args": None}
_DEEPSPEED: dict[str, Any] = {"deepspeed": None, "deepspeed_plugin": None, "hf_deepspeed_config": None}


@dataclass(frozen=True)
class Translation:
    """A config with translated settings of other systems, lines that say so, and problems with what has no translation."""

    config: LongContextConfig
    lines: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Fsdp:
    """An FSDP configuration. origin: where it was found."""

    origin: str
    strategy: str
    offloads: bool
    recomputes: bool
    is_xla: bool = False
    loads_on_first: bool = False


def translate(config: LongContextConfig, args: TrainingArguments, launch: LaunchEnvironment) -> Translation:
    """Translates settings of `args`, of accelerate's FSDP and of DeepSpeed into fields of `config` that the user left open."""
    lines: list[str] = []
    problems: list[str] = []
    asked = _asked_fsdp(args, launch)
    if asked is not None:
        problems = refusals(_FSDP_RULES, Facts(config=config, args=args, launch=launch, num_ranks=args.world_size))
        if asked.strategy in _STRATEGIES and config.parameters != "auto":
            config, line = _with_shards(config, asked, launch)
            lines.append(line)
    if args.deepspeed or launch.uses_deepspeed:
        config, line, found = _with_deepspeed(config, args)
        lines += [line] if line else []
        problems += found
    if wish := _checkpointing(args, asked):
        lines.append(_checkpointing_line(wish, config))
    return Translation(config, tuple(lines), tuple(problems))


@contextmanager
def hidden_from_trainer(args: TrainingArguments | None) -> Iterator[dict[str, Any]]:
    """Context that hides translated settings from `Trainer` and accelerate; gives the user's values."""
    values = {**_NO_CHECKPOINTING, **_FSDP, **_DEEPSPEED, **({} if args is None else decided(args))}
    with without_plugins(), without_partitions(args), with_values(args, values) as users:
        yield users


@contextmanager
def without_partitions(args: TrainingArguments | None) -> Iterator[None]:
    """Context in which `from_pretrained` does not partition weights, as it does while arguments with ZeRO stage 3 exist."""
    kept = getattr(args, "hf_deepspeed_config", None) or getattr(getattr(args, "deepspeed_plugin", None), "dschf", None)
    if kept is None:
        yield
        return
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        set_hf_deepspeed_config(kept)


@contextmanager
def without_checkpointing(args: TrainingArguments, config: LongContextConfig) -> Iterator[dict[str, Any]]:
    """Context for the training of a stock trainer, where plans recompute and the trainer does not; gives the user's values.

    A line says so on rank 0.
    """
    if wish := _checkpointing(args, None):
        log_settings(args, (_checkpointing_line(wish, config),), [])
    with with_values(args, _NO_CHECKPOINTING) as users:
        yield users


@contextmanager
def with_values(args: TrainingArguments | None, values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Context in which these fields have these values; fields of other versions of transformers are left out.

    Gives the values that they have outside, and empties that dict at its end.
    """
    before = {name: getattr(args, name) for name in values if hasattr(args, name)}
    try:
        for name in before:
            setattr(args, name, values[name])
        yield before
    finally:
        for name, value in before.items():
            setattr(args, name, value)
        before.clear()


def log_settings(args: TrainingArguments, lines: tuple[str, ...], idle: list[str]) -> None:
    """Logs, on rank 0, each line of a translation, and one warning with all settings that have no effect."""
    if args.process_index:
        return
    for line in lines:
        logger.warning("%s", line)
    if idle:
        logger.warning("settings without effect under plans: %s", "; ".join(idle))


def _asked_fsdp(args: TrainingArguments, launch: LaunchEnvironment) -> _Fsdp | None:
    if args.fsdp:
        settings: Any = args.fsdp_config if isinstance(args.fsdp_config, dict) else {}

        def is_set(name: str) -> bool:
            return str(settings.get(name, False)).lower() == "true"

        # before the argument is normalised, it names the strategy itself, beside "offload" and "auto_wrap"
        named = [word for word in str(args.fsdp).lower().split() if word in _STRATEGIES]
        strategy = str(settings.get("reshard_after_forward", named[0] if named else True)).lower()
        offloads, recomputes = is_set("cpu_offload"), is_set("activation_checkpointing")
        return _Fsdp("fsdp", strategy, offloads, recomputes, is_set("xla"), launch.loads_on_first)
    if launch.uses_fsdp:
        offloads, recomputes, first = launch.fsdp_offload, launch.fsdp_recomputes, launch.loads_on_first
        return _Fsdp("the accelerate configuration's FSDP", launch.fsdp_reshard, offloads, recomputes, loads_on_first=first)
    return None


def _asked(run: Facts) -> list[_Fsdp]:
    asked = _asked_fsdp(run.args, run.launch)
    return [] if asked is None else [asked]


# FSDP configurations that have no translation
_FSDP_RULES = {
    "fsdp-offload": Rule(
        "{origin} offloads parameters to the CPU (cpu_offload, FSDP_OFFLOAD_PARAMS), which is not supported",
        "leave it out, and set LongContextConfig(parameters='sharded', layer_weights='host', optimizer_states='host'), which "
        "keeps them there between their uses",
        lambda run: ({"origin": each.origin} for each in _asked(run) if each.offloads),
        "launch = replace(launch, uses_fsdp=True, fsdp_offload=True)",
    ),
    "fsdp-on-xla": Rule(
        "{origin} asks for XLA, which is not supported",
        "leave xla out of fsdp_config",
        lambda run: ({"origin": each.origin} for each in _asked(run) if each.is_xla),
        "args.fsdp = True; args.fsdp_config = {'xla': True}",
    ),
    "fsdp-strategy": Rule(
        "{origin} has the sharding strategy {strategy!r}, which is none of "
        f"{', '.join(sorted(name for name in _STRATEGIES if not name.isdigit()))}",
        "use one of these",
        lambda run: (
            {"origin": each.origin, "strategy": each.strategy} for each in _asked(run) if each.strategy not in _STRATEGIES
        ),
        "launch = replace(launch, uses_fsdp=True, fsdp_reshard='zero')",
    ),
    "fsdp-and-auto": Rule(
        "{origin} names a sharding strategy ({strategy}), and parameters='auto' chooses one",
        "leave one of them out",
        lambda run: (
            {"origin": each.origin, "strategy": each.strategy} for each in _asked(run) if run.config.parameters == "auto"
        ),
        "launch = replace(launch, uses_fsdp=True); config = LongContextConfig(parameters='auto')",
    ),
    "fsdp-loads-on-first": Rule(
        "{origin} lets the first rank of each node alone read weights (cpu_ram_efficient_loading), so those of the others are "
        "empty",
        "set fsdp_cpu_ram_efficient_loading: false, and load with load_sharded(), which spares memory, too",
        lambda run: ({"origin": each.origin} for each in _asked(run) if each.loads_on_first and run.num_ranks > 1),
        "launch = replace(launch, uses_fsdp=True, loads_on_first=True)",
    ),
}


def _with_shards(config: LongContextConfig, asked: _Fsdp, launch: LaunchEnvironment) -> tuple[LongContextConfig, str]:
    parameters, by_node = _STRATEGIES[asked.strategy]
    if config.parameters != "replicated":
        return config, f"{asked.origin} is replaced by LongContextConfig(parameters={config.parameters!r}), which shards instead"
    if frees_every_round(parameters) and config.may_have_stages:
        # stages fix an order of chunks anyway, so gradients need not wait whole
        parameters = "gathered_per_step"
    changes: dict[str, Any] = {"parameters": parameters}
    if by_node and launch.ranks_per_node < launch.num_ranks and not config.may_have_stages and config.expert_ranks is None:
        changes["shard_ranks"] = launch.ranks_per_node
    said = ", ".join(f"{name}={value!r}" for name, value in changes.items())
    return replace(config, **changes), (
        f"{asked.origin} ({asked.strategy}) becomes LongContextConfig({said}); layers are wrapped and prefetched as plans need, "
        f"and checkpoints are ordinary ones"
    )


def _with_deepspeed(config: LongContextConfig, args: TrainingArguments) -> tuple[LongContextConfig, str, list[str]]:
    """The config with DeepSpeed's settings where the user left its fields open, the line, and problems."""
    source = asked_deepspeed(args)
    if source is None:
        return (
            config,
            "",
            ["accelerate's launcher asks for DeepSpeed, but the training arguments were made before; make them after"],
        )
    found = translated(source, args.world_size, config.may_have_stages, vars(args))
    changes, line = opened(config, found)
    asked = {name: value for name, value in found.arguments.items() if name not in DECIDED}
    problems = [*found.problems, *differing(asked, vars(args))]
    return (config if problems else replace(config, **changes)), line, problems


def opened(config: LongContextConfig, found: DeepSpeedSettings) -> tuple[dict[str, Any], str]:
    """The settings of DeepSpeed's configuration that the user left open here, and the line that says what became of it."""
    defaults = LongContextConfig()
    own = {name: getattr(config, name) for name in found.config}
    changes = {name: value for name, value in found.config.items() if own[name] == getattr(defaults, name)}
    kept = [f"{name}={value!r}" for name, value in own.items() if name not in changes and value != found.config[name]]
    return changes, found.line + (f"; {', '.join(kept)} of LongContextConfig stays" if kept else "")


def _checkpointing(args: TrainingArguments, asked: _Fsdp | None) -> str:
    """The setting that asks for activation checkpointing; empty if none does."""
    # the new name and the old one
    if getattr(args, "activation_checkpointing", False) or getattr(args, "gradient_checkpointing", False):
        return "gradient_checkpointing=True"
    return f"activation checkpointing of {asked.origin}" if asked is not None and asked.recomputes else ""


def _checkpointing_line(wish: str, config: LongContextConfig) -> str:
    if config.activations == "keep":
        return f"{wish} has no effect beside LongContextConfig(activations='keep'), which never recomputes"
    return (
        f"{wish} becomes LongContextConfig(activations='auto'): plans recompute what memory has no room for, and nothing where "
        f"all fits"
    )
