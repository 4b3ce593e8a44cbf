"""Refuses settings that cannot run: arguments of trainers, the launcher's configuration, and `LongContextConfig`.

Most arguments are read where they are used: learning rate, schedule, clipping, accumulation, saving. Those in `_AT_START` are
read once, when the trainer is made. A change afterwards is refused by name; a stock trainer goes on as it was made.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EarlyStoppingCallback, PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.models.adapters import is_adapted, shard_problems
from hf_longctx.hf.models.compressed import compressing_attention
from hf_longctx.hf.models.cutting import stage_problems
from hf_longctx.hf.models.experts import has_balance, spread_problems
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.heads import num_tokens
from hf_longctx.hf.models.index import indexed_attention
from hf_longctx.hf.models.positions import first_position, has_limit, max_positions
from hf_longctx.hf.models.quantised import rounding_problems
from hf_longctx.hf.models.rope import grows
from hf_longctx.hf.models.states import mixers_of
from hf_longctx.hf.ranks.launch import LaunchEnvironment, separate_runs
from hf_longctx.hf.rules.hooks import read_problems
from hf_longctx.hf.rules.models import lacking_problems, model_problems
from hf_longctx.hf.rules.rule import Facts, Rule, refusals
from hf_longctx.hf.rules.training_arguments import VALUES
from hf_longctx.hf.rules.trl import (
    VERSIONS,
    is_planned,
    is_replaced,
    is_scored,
    takes_metrics,
    trainer_problems,
    trl_class,
)
from hf_longctx.hf.rules.user_code import may_call_super, user_code_problems
from hf_longctx.plan.core.messages import shown
from hf_longctx.plan.core.settings import check_degrees
from hf_longctx.plan.core.types import frees_every_round
from hf_longctx.runtime.core import kernels as liger
from hf_longctx.runtime.parameters.low_bit import BLOCK_ELEMENTS, why_no_torchao
from hf_longctx.runtime.parameters.sharded import is_sharded

# optimizers that cannot run on shards, nor on whole weights that ranks own: they keep more than states of weights, or read
# several weights at once
_NEVER_SHARDED = ("galore", "apollo", "lomo", "grokadamw", "adamw_torch_xla", "adamw_torch_npu_fused")
# optimizers that update element by element, and so their shards alone
_ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "adamw_torch_8bit", "adamw_torch_4bit", "sgd", "adagrad", "rmsprop")
_LISTED = ", ".join(_ELEMENTWISE)

# torchao's optimizers, which keep moments in so many bits
_LOW_BITS = {"adamw_torch_8bit": 8, "adamw_torch_4bit": 4}

# the reason against FSDP where the trainer's own loop, or a trainer that is already built, would shard
_BY_OTHERS = "shards parameters without the planner knowing"
_ONLY_OURS = "leave it out, or use LongContextTrainer, which translates it into LongContextConfig(parameters=...)"
# remedy for DeepSpeed there
_FROM_DEEPSPEED = (
    "leave it out, and set what hf_longctx.from_deepspeed(file) returns, or use LongContextTrainer, which translates it"
)

# arguments that need the logits of all rows, which only classifiers and TRL's own loops have
OF_LOGITS = ("compute_metrics", "preprocess_logits_for_metrics")


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2


def _is_model(value: Any) -> bool:
    return isinstance(value, PreTrainedModel) or (isinstance(value, nn.Module) and hasattr(value, "peft_config"))


# argument of a constructor -> the check of its value, and the kind of value that passes
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "args": (lambda each: isinstance(each, TrainingArguments), "TrainingArguments"),
    "longctx_config": (lambda each: isinstance(each, LongContextConfig), "a LongContextConfig"),
    **dict.fromkeys(
        ("data_collator", "compute_metrics", "compute_loss_func", "model_init", "preprocess_logits_for_metrics"),
        (callable, "a function, or leave it out"),
    ),
    "teacher": (_is_model, "a loaded transformers model"),
    # `Trainer` adds it to a list of its own
    "callbacks": (lambda each: isinstance(each, list), "a list of TrainerCallbacks"),
    "optimizers": (
        lambda each: _is_pair(each) and (each[0] is None or hasattr(each[0], "param_groups")),
        "an optimizer and a scheduler, (optimizer, None), or leave it out",
    ),
    "optimizer_cls_and_kwargs": (
        lambda each: _is_pair(each) and callable(each[0]) and isinstance(each[1], dict),
        "a class and a dictionary of its settings",
    ),
}


def _wrong(name: str, is_right: Callable[[Any], bool], run: Facts) -> Iterator[dict[str, str]]:
    if (value := run.given.get(name)) is not None and not is_right(value):
        yield {"found": _kind(value)}


def _kind(value: Any) -> str:
    return f"{shown(value)} ({'a class' if isinstance(value, type) else type(value).__name__})"


def _is_callback(each: Any) -> bool:
    return isinstance(each, TrainerCallback) or (isinstance(each, type) and issubclass(each, TrainerCallback))


# arguments of a constructor whose values have the wrong kind, checked before anything reads them
KINDS = {
    f"kind-of-{name.replace('_', '-')}": Rule(
        f"{name} is {{found}}",
        f"pass {what}",
        partial(_wrong, name, is_right),
        f"given['{name}'] = 3",
    )
    for name, (is_right, what) in _KINDS.items()
} | {
    "kind-of-a-callback": Rule(
        "callbacks has {found}",
        "pass TrainerCallbacks alone, or their classes",
        lambda run: (
            {"found": _kind(each)}
            for callbacks in [run.given.get("callbacks")]
            for each in (callbacks if isinstance(callbacks, list) else ())
            if not _is_callback(each)
        ),
        "given['callbacks'] = ['wandb']",
    ),
}


def _stops_early(run: Facts) -> bool:
    """Whether transformers' early stopping is a callback; subclasses with their own `on_train_begin` may compare other values."""
    stock = EarlyStoppingCallback.on_train_begin
    return any(getattr(each.on_train_begin, "__func__", None) is stock for each in run.given.get("callbacks", ()))


# arguments with which transformers' early stopping has nothing to compare
STOPPING = {
    "early-stopping-without-metric": Rule(
        "EarlyStoppingCallback has no metric to compare",
        "set metric_for_best_model='loss' or another metric",
        lambda run: _stops_early(run) and run.args.metric_for_best_model is None,
        "given['callbacks'] = [EarlyStoppingCallback()]",
    ),
    "early-stopping-without-evaluation": Rule(
        "EarlyStoppingCallback never sees an evaluation (eval_strategy='no')",
        "set it to 'steps' or 'epoch'",
        lambda run: _stops_early(run) and run.args.eval_strategy == "no",
        "given['callbacks'] = [EarlyStoppingCallback()]",
    ),
}


def _is_unused(name: str, run: Facts) -> bool:
    return run.given.get(name) is not None and not (name == "compute_metrics" and run.draws_batches)


# arguments that do not work under plans, or would mean something else there
_ARGUMENTS = {
    **VALUES,
    "fsdp": Rule(f"fsdp={{args.fsdp!r}} {_BY_OTHERS}", _ONLY_OURS, lambda run: bool(run.args.fsdp), "args.fsdp = 'full_shard'"),
    "deepspeed": Rule(
        f"deepspeed={{args.deepspeed!r}} {_BY_OTHERS}",
        _FROM_DEEPSPEED,
        lambda run: bool(run.args.deepspeed),
        "args.deepspeed = 'zero3.json'",
    ),
    "gradient-accumulation-kwargs": Rule(
        "accelerator_config gradient_accumulation_kwargs={found!r} is not supported",
        "set gradient_accumulation_steps",
        lambda run: (
            {"found": found} for found in [getattr(run.args.accelerator_config, "gradient_accumulation_kwargs", None)] if found
        ),
        "args = TrainingArguments(accelerator_config={'gradient_accumulation_kwargs': {'num_steps': 2}})",
    ),
    "optim-in-backward": Rule(
        "optim={optim!r} steps inside backward, before gradients are summed over ranks",
        "choose another optimizer",
        lambda run: run.optim in ("lomo", "adalomo") or "layerwise" in run.optim,
        "args = TrainingArguments(optim='lomo')",
    ),
    "data-parallel": Rule(
        "one process sees {args.n_gpu} GPUs and would use DataParallel",
        "start one process per GPU with `accelerate launch --multi_gpu --num_processes {args.n_gpu}`",
        lambda run: run.args.n_gpu > 1,
        "args._n_gpu = 4",
    ),
    **{
        name.replace("_", "-"): Rule(
            f"the trainer argument {name} is not supported",
            remedy,
            partial(_is_unused, name),
            f"given['{name}'] = print{'; draws_batches = False' if name == 'compute_metrics' else ''}",
        )
        for name, remedy in {
            "compute_metrics": "its own loop would need whole logits; leave it out, since it logs metrics of its own",
            "compute_loss_func": "pass the loss of a token as token_loss=..., of which a step takes the mean over label tokens",
            "model_init": "pass a model; LongContextTrainer takes it, and searches hyperparameters with it",
            "preprocess_logits_for_metrics": "return logits.argmax(dim=-1) there, or leave it out, since logits never exist as a "
            "whole: compute_metrics gets the likeliest token, the log-probability of the label and the entropy of every label "
            "token",
        }.items()
    },
}


# pieces of Liger that `liger_kernel_config` may name, with those that are refused and why
_PIECES = ("rms_norm", "swiglu", "geglu")
_REFUSED = {
    "rope": "its rotary embedding writes over queries and keys that plans keep",
    "cross_entropy": "plans compute the loss in tiles inside the output head",
    "fused_linear_cross_entropy": "plans compute the loss in tiles inside the output head",
}


def _runs_liger(run: Facts) -> bool:
    """Whether plans are asked for Liger's kernels, and not the loop of another trainer."""
    return run.args.use_liger_kernel and run.draws_batches and not type(run.args).__module__.startswith("trl.")


def _refused_pieces(run: Facts) -> Iterator[dict[str, Any]]:
    for name, value in (run.args.liger_kernel_config or {}).items():
        if _runs_liger(run) and value and name not in _PIECES:
            yield {"name": name, "value": value, "why": _REFUSED.get(name, f"only {', '.join(_PIECES)} are exact under plans")}


def _missed_pieces(run: Facts) -> Iterator[dict[str, Any]]:
    for name, value in (run.args.liger_kernel_config or {}).items():
        if _runs_liger(run) and not value and name in _PIECES:
            yield {"name": name, "value": value}


# use_liger_kernel, and its liger_kernel_config
_LIGER = {
    "liger-without-plans": Rule(
        "use_liger_kernel=True is not supported here, since the trainer would use Liger's losses and rotary embedding",
        "leave it out, and use LongContextTrainer with it, or LongContextConfig(compile_layers=True) with a trainer under plans",
        lambda run: run.args.use_liger_kernel and not _runs_liger(run),
        "args.use_liger_kernel = True; draws_batches = False",
    ),
    "liger-not-installed": Rule(
        "use_liger_kernel=True needs the package liger-kernel",
        "pip install liger-kernel, or leave it out",
        lambda run: _runs_liger(run) and not liger.is_installed(),
        "sys.modules['liger_kernel'] = None; args.use_liger_kernel = True",
    ),
    "liger-and-compiled-layers": Rule(
        "use_liger_kernel=True and compile_layers=True would make the same kernels",
        "leave one of them out",
        lambda run: _runs_liger(run) and bool(run.config.compile_layers),
        "args.use_liger_kernel = True; config = LongContextConfig(compile_layers=True)",
    ),
    "pieces-of-liger": Rule(
        "liger_kernel_config sets {name}={value!r}, but {why}",
        "set it to False or leave it out",
        _refused_pieces,
        "args.use_liger_kernel, args.liger_kernel_config = True, {'rope': True}",
    ),
    "missing-pieces-of-liger": Rule(
        "liger_kernel_config sets {name}={value!r}, which cannot be left out alone",
        "leave use_liger_kernel out",
        _missed_pieces,
        "args.use_liger_kernel, args.liger_kernel_config = True, {'rms_norm': False}",
    ),
}


def argument_problems(facts: Facts) -> list[str]:
    """Problems with the settings of a trainer that do not work under plans, or would mean something else there."""
    return refusals(VERSIONS, facts) + read_problems() + refusals(_LIGER, facts) + refusals(_ARGUMENTS, facts)


def run_problems(
    trainer: type, config: LongContextConfig, known: ModelFacts, args: TrainingArguments, trainer_arguments: dict[str, Any]
) -> list[str]:
    """Problems with the arguments of a trainer of the class `trainer` that runs full plans."""
    if keeps_loader := is_scored(trainer):
        # its collator makes the batches
        trainer_arguments = {name: value for name, value in trainer_arguments.items() if name != "data_collator"}
    given = dict(trainer_arguments)
    has_logits = takes_metrics(trainer) or known.head_kind != "next_token"
    if has_logits:
        for name in OF_LOGITS:
            given.pop(name, None)
    elif likeliest_form(given.get("preprocess_logits_for_metrics")):
        given["preprocess_logits_for_metrics"] = None
    facts = Facts(
        config=config,
        args=args,
        model=known.model,
        known=known,
        given=given,
        draws_batches=not keeps_loader,
        num_ranks=args.world_size,
    )
    found = argument_problems(facts) + trainer_problems(trainer, args, config)
    found += placement_problems(facts)
    has_metrics = trainer_arguments.get("compute_metrics") is not None
    return found if keeps_loader or not has_metrics else found + refusals(METRICS, replace(facts, has_tokens=not has_logits))


def likeliest_form(function: Any) -> str:
    """Classifies what a `preprocess_logits_for_metrics` returns, by trying it on small logits.

    "tokens": the likeliest tokens; "pair": these and the labels. Empty for anything else, and if there is no function.
    """
    if function is None:
        return ""
    generator, forms = torch.Generator().manual_seed(0), set[str]()
    for shape in ((2, 5, 7), (3, 4, 9)):
        logits = torch.randn(shape, generator=generator)
        labels = torch.randint(0, shape[2], shape[:2], generator=generator)
        labels[:, :2] = -100
        try:
            found = function(logits.clone(), labels.clone())
        except Exception:
            return ""
        is_pair = isinstance(found, tuple | list) and len(found) == 2
        tokens, same = found if is_pair else (found, labels)
        expected = (logits.argmax(-1), labels)
        if not all(isinstance(each, Tensor) and each.dtype == torch.int64 for each in (tokens, same)):
            return ""
        if not all(map(torch.equal, (tokens, same), expected)):
            return ""
        forms.add("pair" if is_pair else "tokens")
    return forms.pop()


def _unknown_arrays(run: Facts) -> Iterator[dict[str, str]]:
    for name in run.args.include_for_metrics or []:
        if not (name == "inputs" and run.has_tokens):
            is_loss = name == "loss" and run.has_tokens
            yield {"name": name, "how": "predictions['log_prob'] has the loss of every token" if is_loss else "leave it out"}


def _differs(name: str, value: Any, run: Facts) -> bool:
    return bool(getattr(run.args, name, value) != value)


# settings beside compute_metrics that need predictions which an evaluation under plans does not make
METRICS = {
    **{
        name.replace("_", "-"): Rule(
            f"{name}={not value} is not supported with compute_metrics, which gets the arrays of the whole set at once",
            f"leave {name} out",
            partial(_differs, name, value),
            f"args.{name} = {not value}",
        )
        for name, value in (("batch_eval_metrics", False), ("eval_do_concat_batches", True))
    },
    "include-for-metrics": Rule(
        "include_for_metrics names {name!r}, which an evaluation under plans does not have",
        "{how}",
        _unknown_arrays,
        "args.include_for_metrics = ['loss']; has_tokens = True",
    ),
}


def _declared(args: TrainingArguments) -> str:
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "no"


# configurations of launchers that would change the run without the trainer's knowledge
_LAUNCH = {
    "lone-processes": Rule(
        "the launcher started {launch.num_ranks} processes, but the world size is {num_ranks}, so that each would train alone",
        "without a GPU set use_cpu=True in TrainingArguments",
        lambda run: run.launch.num_ranks != run.num_ranks,
        "launch = replace(launch, num_ranks=2)",
    ),
    "mixed-precision-of-accelerate": Rule(
        "mixed_precision {launch.mixed_precision!r} of the accelerate configuration differs from the training arguments "
        "({declared!r})",
        "set it to 'no' there and bf16=True in TrainingArguments if bf16 is wanted",
        lambda run: (
            {"declared": declared} for declared in [_declared(run.args)] if run.launch.mixed_precision not in ("no", "", declared)
        ),
        "launch = replace(launch, mixed_precision='fp16')",
    ),
    "dynamo-of-accelerate": Rule(
        "the accelerate configuration compiles the model (dynamo_backend {launch.compile_backend!r}), which is not supported yet",
        "leave dynamo out of it, and set LongContextConfig(compile_layers=True)",
        lambda run: run.launch.compile_backend not in ("no", ""),
        "launch = replace(launch, compile_backend='inductor')",
    ),
    "deepspeed-of-accelerate": Rule(
        f"the accelerate configuration's DeepSpeed {_BY_OTHERS}",
        _FROM_DEEPSPEED,
        lambda run: run.launch.uses_deepspeed,
        "launch = replace(launch, uses_deepspeed=True)",
    ),
    "fsdp-of-accelerate": Rule(
        f"the accelerate configuration's FSDP {_BY_OTHERS}",
        _ONLY_OURS,
        # the fsdp argument sets the same variable and is a problem of its own
        lambda run: run.launch.uses_fsdp and not run.args.fsdp,
        "launch = replace(launch, uses_fsdp=True)",
    ),
    "parallelism-of-accelerate": Rule(
        "the accelerate configuration has a parallelism_config, which divides models or sequences without the planner knowing",
        "leave it out: group sizes are chosen per step (LongContextConfig.degrees)",
        lambda run: run.launch.uses_parallelism,
        "launch = replace(launch, uses_parallelism=True)",
    ),
}


def launch_problems(launch: LaunchEnvironment, args: TrainingArguments) -> list[str]:
    """Problems with the launcher's own configuration, which would change the run without the trainer's knowledge."""
    return separate_runs(args.world_size) + refusals(_LAUNCH, Facts(args=args, launch=launch, num_ranks=args.world_size))


_OWN_ORDER = (
    "plans draw rows themselves",
    "remove it, and order the rows of the set (train_sampling_strategy='sequential' keeps that)",
)
_OWN_BATCHES = "plans make batches from rows", "remove it, and do its work on the rows, with dataset.map or in a data_collator"
# methods that plans never call -> why, and what to do
_NEVER_CALLED_IN_TRAINING = {
    "compute_loss": (
        "a plan's loss is the token mean of cross-entropy",
        "remove it, and pass the loss of a token as token_loss=...",
    ),
    "compute_loss_context_manager": ("plans enter autocast themselves", "remove it, and set bf16=True if that is wanted"),
    "_get_train_sampler": _OWN_ORDER,
    "_get_dataloader": _OWN_BATCHES,
    "_get_num_items_in_batch": (
        "a plan counts its label tokens itself",
        "remove it, and weigh tokens by a column 'loss_weights'",
    ),
    "_prepare_inputs": _OWN_BATCHES,
    "_prepare_input": _OWN_BATCHES,
    "_remove_unused_columns": _OWN_BATCHES,
    "_set_signature_columns_if_needed": _OWN_BATCHES,
}
_NEVER_CALLED_IN_EVALUATION = {
    "prediction_step": (
        "an evaluation under plans has no batches of logits",
        "remove it, and use compute_metrics or predict()",
    ),
    "_get_eval_sampler": ("an evaluation reads a set in its order", "remove it, and order the rows of the set"),
}
# methods that plans replace; an override must call theirs
_REPLACED_IN_TRAINING = ("training_step", "get_train_dataloader", "get_batch_samples")
_REPLACED_IN_EVALUATION = ("evaluation_loop", "get_eval_dataloader", "get_test_dataloader", "predict")


def _classes(run: Facts) -> list[type]:
    """Classes of a trainer whose methods count; none for one of TRL that `trainer_problems` refuses, or whose own loop runs."""
    if trl_class(run.trainer) is not None and not is_planned(run.trainer):
        return []
    return [cls for cls in run.trainer.__mro__ if not is_replaced(cls)]


def _never_called(name: str, run: Facts) -> Iterator[dict[str, Any]]:
    owner = next((cls for cls in _classes(run) if name in vars(cls)), None)
    counts = run.plans_evaluation or name in _NEVER_CALLED_IN_TRAINING
    if counts and owner is not None and not owner.__module__.startswith("transformers."):
        yield {"owner": owner}


def _overrides(run: Facts) -> Iterator[tuple[str, type | None, type | None]]:
    """Yields methods that plans replace, with the class before the mixin that overrides each without `super()`, or one behind."""
    mro = _classes(run)
    place = mro.index(run.mixin) if mro else 0
    before = [cls for cls in mro[:place] if not cls.__module__.startswith("hf_longctx.")]
    behind = [cls for cls in mro[place + 1 :] if not any(issubclass(base, cls) for base in (Trainer, run.mixin))]
    for name in _REPLACED_IN_TRAINING + (_REPLACED_IN_EVALUATION if run.plans_evaluation else ()):
        first = next((cls for cls in before if name in vars(cls)), None)
        owner = next((cls for cls in behind if name in vars(cls)), None)
        if first is not None and not may_call_super(vars(first)[name], name):
            yield name, first, None
        elif owner is not None:
            yield name, None, owner


# the loss that plans train if a user gives one
WAY_OUT = "pass the loss of a token as LongContextTrainer(..., token_loss=...) or attach(trainer, token_loss=...)"
# losses that were set on a built trainer; `given` has its attributes
SET_LOSSES = {
    "loss-set-on-a-trainer": Rule(
        "compute_loss_func was set on the trainer, but plans would never call it",
        WAY_OUT,
        lambda run: run.given.get("compute_loss_func") is not None,
        "given['compute_loss_func'] = print",
    ),
    "loss-replaced-on-a-trainer": Rule(
        "compute_loss was replaced on the trainer instance and would not run under plans",
        WAY_OUT,
        lambda run: "compute_loss" in run.given,
        "given['compute_loss'] = print",
    ),
}


def set_loss_problems(trainer: Trainer) -> list[str]:
    """Problems with losses set on a built trainer. A property of its class may give `compute_loss_func`, too."""
    return refusals(SET_LOSSES, Facts(given={**vars(trainer), "compute_loss_func": trainer.compute_loss_func}))


# methods of a Trainer's subclass that would never be called, although plans may not do the same work
OVERRIDES = {
    **{
        f"override-of-{name.strip('_').replace('_', '-')}": Rule(
            f"{{owner.__name__}}.{name} would never be called: {why}",
            remedy,
            partial(_never_called, name),
            f"trainer = type('Mine', (LongContextTrainer,), {{'{name}': print}})",
        )
        for name, (why, remedy) in (_NEVER_CALLED_IN_TRAINING | _NEVER_CALLED_IN_EVALUATION).items()
    },
    "override-without-super": Rule(
        "{first.__name__}.{name} never calls super().{name}(), which makes the batches that plans run",
        "return super().{name}(...), and change rows, order and batch size by train_dataset, eval_dataset, data_collator and "
        "TrainingArguments",
        lambda run: ({"name": name, "first": first} for name, first, _ in _overrides(run) if first),
        "trainer = type('Mine', (LongContextTrainer,), {'get_train_dataloader': lambda self: None})",
    ),
    "override-under-attached-plans": Rule(
        "{owner.__name__}.{name} would never be called under attached plans",
        "use the callback in callbacks=[...] alone, or put LongContextMixin in front of the class and override {name} there",
        lambda run: ({"name": name, "owner": owner} for name, _, owner in _overrides(run) if owner and not run.plans_evaluation),
        "trainer = type('Mine', (LongContextMixin, type('Theirs', (Trainer,), {'training_step': print})), {}); "
        "plans_evaluation = False",
    ),
    "override-behind-the-mixin": Rule(
        "{trainer.__name__} inherits {name} from a class after {mixin.__name__}, where it would never be called",
        "override it in {trainer.__name__} itself and call super().{name}()",
        lambda run: ({"name": name} for name, _, owner in _overrides(run) if owner and run.plans_evaluation),
        "trainer = type('Mine', (LongContextMixin, type('Theirs', (Trainer,), {'training_step': print})), {})",
    ),
}


def low_bits(args: TrainingArguments) -> int:
    """Bits of a moment if `optim` names an optimizer with moments of few bits; else 0."""
    return _LOW_BITS.get(Facts(args=args).optim, 0)


def rounds_by_chance(args: TrainingArguments) -> bool:
    """Whether the arguments ask torchao's optimizer to round bf16 weights up or down by chance."""
    value = (args.optim_args or "") if low_bits(args) else ""
    settings = dict(part.strip().split("=", 1) for part in value.split(",") if "=" in part)
    return settings.get("bf16_stochastic_round", "").strip().lower() in ("1", "true", "yes", "y", "on", "t")


# settings that exclude each other, so that one of them would have no effect
TOGETHER = {
    "torchao-missing": Rule(
        "optim={optim!r} needs torchao, which cannot be imported ({missing})",
        "pip install torchao, or use adamw_torch",
        lambda run: [{"missing": missing}] if low_bits(run.args) and (missing := why_no_torchao()) else (),
        "sys.modules['torchao.optim'] = None; args = TrainingArguments(optim='adamw_torch_8bit')",
    ),
    "low-bit-compiler": Rule(
        "optim={optim!r} compiles its step, which needs a C++ compiler on CPU",
        "install g++, or use optim='adamw_torch'",
        lambda run: (
            low_bits(run.args) > 0
            and run.args.device.type == "cpu"
            and not any(map(shutil.which, (os.environ.get("CXX") or "g++", "clang++")))
        ),
        "os.environ['PATH'] = os.environ['CXX'] = ''; args = TrainingArguments(optim='adamw_torch_8bit')",
    ),
    "low-bit-block-size": Rule(
        "optim_args={args.optim_args!r} sets block_size, which transformers hands to {optim} as text",
        f"leave it out, blocks have {BLOCK_ELEMENTS} elements",
        lambda run: low_bits(run.args) > 0 and "block_size" in (run.args.optim_args or ""),
        "args = TrainingArguments(optim='adamw_torch_8bit', optim_args='block_size=64')",
    ),
    "low-bit-on-host": Rule(
        "optim={optim!r} keeps its moments on the device, so optimizer_states={config.optimizer_states!r} has no effect on it",
        "leave it out, or use optim='adamw_torch'",
        lambda run: low_bits(run.args) > 0 and run.config.optimizer_states != "device",
        "args = TrainingArguments(optim='adamw_torch_8bit'); config = LongContextConfig(optimizer_states='host')",
    ),
    "rounding-of-copies": Rule(
        "bf16_stochastic_round=True in optim_args has no effect on the fp32 copies that are updated",
        "set fp32_master_weights=False, or leave it out",
        lambda run: rounds_by_chance(run.args) and run.config.fp32_master_weights,
        "args = TrainingArguments(optim='adamw_torch_8bit', optim_args='bf16_stochastic_round=True')",
    ),
    "rounding-in-stages": Rule(
        "bf16_stochastic_round=True in optim_args would round the copies of a tied weight apart on stages={config.stages!r}",
        "leave it out, and keep fp32_master_weights=True",
        lambda run: rounds_by_chance(run.args) and run.config.may_have_stages,
        "args = TrainingArguments(optim='adamw_torch_8bit', optim_args='bf16_stochastic_round=True'); "
        "config = LongContextConfig(stages=2)",
    ),
    "determinism-and-clocks": Rule(
        "full_determinism=True needs plans that no clock decides, but solver={config.solver!r} takes what programs find in "
        "{config.solver_time_limit_s:g} s",
        "use 'auto', 'greedy' or 'static'",
        lambda run: run.args.full_determinism and run.config.solver in ("lp", "milp"),
        "args.full_determinism = True; config = LongContextConfig(solver='lp', solver_time_limit_s=3)",
    ),
    "drop-last-and-tokens-per-step": Rule(
        "dataloader_drop_last=True has no effect with tokens_per_step={config.tokens_per_step}, which cuts an epoch into equal "
        "steps",
        "leave one of them out",
        lambda run: run.config.tokens_per_step is not None and run.args.dataloader_drop_last,
        "args.dataloader_drop_last = True; config = LongContextConfig(tokens_per_step=4096)",
    ),
    "accumulation-and-tokens-per-step": Rule(
        "gradient_accumulation_steps={args.gradient_accumulation_steps} contradicts tokens_per_step={config.tokens_per_step}, "
        "which already says what an optimizer step holds",
        "leave one of them out",
        lambda run: run.config.tokens_per_step is not None and run.args.gradient_accumulation_steps > 1,
        "args.gradient_accumulation_steps = 2; config = LongContextConfig(tokens_per_step=4096)",
    ),
    "save-on-each-node": Rule(
        "save_on_each_node=True would need every stage on every node",
        "leave it out, and write checkpoints to a folder that all nodes share",
        lambda run: run.config.may_have_stages and run.args.save_on_each_node,
        "args.save_on_each_node = True; config = LongContextConfig(stages=2)",
    ),
}


def _own_save(run: Facts) -> Iterator[dict[str, Any]]:
    owner = next(cls for cls in run.trainer.__mro__ if "_save_checkpoint" in vars(cls))
    if not owner.__module__.startswith("hf_longctx."):
        yield {"owner": owner}


def _hub_strategy(run: Facts) -> Iterator[dict[str, str]]:
    strategy = str(getattr(run.args.hub_strategy, "value", run.args.hub_strategy))
    if run.args.push_to_hub and strategy != "end":
        yield {"strategy": strategy}


# settings of trainers that cannot work with checkpoints that become visible some steps after their save
ASYNC_SAVE = {
    "async-save-to-the-hub": Rule(
        "async_save=True and hub_strategy={strategy!r}: a checkpoint would be uploaded as that of a later step",
        "set hub_strategy='end', or leave async_save out",
        _hub_strategy,
        "args.push_to_hub = True",
    ),
    "async-save-override": Rule(
        "{owner.__name__}._save_checkpoint would end before the checkpoint is in its folder (async_save=True)",
        "override _save to add files, or leave async_save out",
        _own_save,
        "trainer = type('Mine', (LongContextTrainer,), {'_save_checkpoint': print})",
    ),
}
# callbacks that would get such a checkpoint after the model has changed; those of transformers read only the folder
ASYNC_CALLBACKS = {
    "async-save-callback": Rule(
        "{kind.__name__}.on_save would be called with the model of a later step, since async_save=True writes behind training",
        "add files by overriding the trainer's _save, use another event, or leave async_save out",
        lambda run: (
            {"kind": type(callback)}
            for callback in run.given.get("callbacks", ())
            if getattr(callback.on_save, "__func__", None) is not TrainerCallback.on_save
            and not type(callback).__module__.startswith(("transformers.", "hf_longctx."))
        ),
        "given['callbacks'] = [type('Mine', (TrainerCallback,), {'on_save': lambda self, *args, **keywords: None})()]",
    ),
}


def _is_named(run: Facts) -> bool:
    """Whether `optim` names the optimizer of shards; a class that the user passes takes its place."""
    return run.config.parameters != "replicated" and run.given.get("optimizer_cls_and_kwargs") is None


def _whole_optimizer(run: Facts) -> Iterator[dict[str, str]]:
    config = run.config
    if _is_named(run) and run.optim not in _ELEMENTWISE and not any(each in run.optim for each in _NEVER_SHARDED):
        if config.may_have_stages:
            yield {"other": f"stages={config.stages!r}"}
        elif config.optimizer_states == "host":
            yield {"other": f"optimizer_states={config.optimizer_states!r}"}


def _undivided(run: Facts, shared: int | None) -> Iterator[dict[str, str]]:
    """Yields the ranks of a stage that `shared` ranks with one copy of the weights do not divide."""
    count = stage_ranks(run.config, run.num_ranks)
    if shared is not None and count % shared:
        yield {"ranks": f"{count} ranks" + " of a stage" * (run.config.asked_stages not in (1, "auto"))}


_NEEDS, _OUT = "layer_weights={config.layer_weights!r}", "leave layer_weights out"
# sharded parameters, optimizers that hold weights of other ranks, and shards of layers on the host while a step computes
_PLACEMENT = {
    "sharded-already": Rule(
        "the model is sharded already (fully_shard)",
        "pass a plain one and set LongContextConfig(parameters='sharded')",
        lambda run: is_sharded(run.model),
        "model = sharded(model)",
    ),
    "optimizers-of-all-stages": Rule(
        "the trainer argument optimizers holds weights of all stages, but stages={config.stages!r} leaves each rank with one "
        "stage",
        "pass optimizer_cls_and_kwargs=(class, settings) instead, or set optim",
        lambda run: (
            run.config.parameters == "replicated"
            and run.config.may_have_stages
            and run.known.loaded_ranges is None
            and any(run.given.get("optimizers") or ())
        ),
        "given['optimizers'] = (torch.optim.SGD(model.parameters()), None); config = LongContextConfig(stages=2)",
    ),
    "optimizers-of-whole-parameters": Rule(
        "the trainer argument optimizers holds whole parameters, which parameters={config.parameters!r} replaces by shards",
        "pass optimizer_cls_and_kwargs=(class, settings) instead, or set optim",
        lambda run: run.config.parameters != "replicated" and any(run.given.get("optimizers") or ()),
        "given['optimizers'] = (torch.optim.SGD(model.parameters()), None); config = LongContextConfig(parameters='sharded')",
    ),
    "shard-ranks": Rule(
        "shard_ranks {config.shard_ranks} does not divide the {ranks}",
        "choose a divisor",
        lambda run: _undivided(run, run.config.shard_ranks),
        "config = LongContextConfig(parameters='sharded', shard_ranks=3)",
    ),
    "expert-ranks": Rule(
        "expert_ranks {config.expert_ranks} does not divide the {ranks}",
        "choose a divisor",
        lambda run: _undivided(run, run.config.expert_ranks),
        "config = LongContextConfig(parameters='sharded', expert_ranks=3)",
    ),
    "optim-never-sharded": Rule(
        "optim={optim!r} is not supported with parameters={config.parameters!r}",
        f"use one of {_LISTED}, adafactor, or parameters='replicated'",
        lambda run: _is_named(run) and any(each in run.optim for each in _NEVER_SHARDED),
        "args = TrainingArguments(optim='grokadamw'); config = LongContextConfig(parameters='sharded')",
    ),
    "optim-of-whole-weights": Rule(
        "optim={optim!r} updates whole weights, which parameters={config.parameters!r} with {other} do not give it",
        f"leave one of them out, or use one of {_LISTED}",
        _whole_optimizer,
        "args = TrainingArguments(optim='adafactor'); config = LongContextConfig(parameters='sharded', optimizer_states='host')",
    ),
    "layer-weights-without-shards": Rule(
        f"{_NEEDS} needs parameters='sharded' over two or more ranks, and there are parameters={{config.parameters!r}} over "
        f"{{shared}}",
        f"change them, or {_OUT}",
        lambda run: (
            {"shared": shared}
            for shared in [run.config.shard_ranks or stage_ranks(run.config, run.num_ranks)]
            if run.config.layer_weights != "device" and (run.config.parameters != "sharded" or shared == 1)
        ),
        "config = LongContextConfig(layer_weights='host')",
    ),
    "layer-weights-and-experts": Rule(
        f"{_NEEDS} would leave experts on the device with expert_ranks={{config.expert_ranks}}",
        _OUT,
        lambda run: run.config.layer_weights != "device" and run.config.expert_ranks is not None,
        "config = LongContextConfig(layer_weights='host', parameters='sharded', expert_ranks=2)",
    ),
    "layer-weights-in-fp8": Rule(
        f"{_NEEDS} is not tested with weights in fp8",
        _OUT,
        lambda run: run.config.layer_weights != "device" and _has_fp8(run),
        "model = lora(model); config = LongContextConfig(layer_weights='host', parameters='sharded', frozen_weights='fp8')",
    ),
    "layer-weights-in-four-bits": Rule(
        f"{_NEEDS} cannot move weights in four bits, which have scales beside them",
        _OUT,
        lambda run: run.config.layer_weights != "device" and run.known.packs_weights,
        "model = in_four_bits(model); config = LongContextConfig(layer_weights='host', parameters='sharded')",
    ),
}


def _has_fp8(run: Facts) -> bool:
    return run.config.frozen_weights == "fp8" or bool(run.known.has_fp8)


def placement_problems(facts: Facts) -> list[str]:
    """Problems with the places of parameters, optimizer states and layers."""
    found, config = refusals(_PLACEMENT, facts), facts.config
    if config.frozen_weights == "fp8" and isinstance(facts.known.base, PreTrainedModel):
        found += rounding_problems(facts.model, facts.args.device, facts.args.bf16)
    if config.parameters != "replicated":
        found += shard_problems(facts.model)
        found += spread_problems(facts.model, config.expert_ranks) if config.expert_ranks is not None else []
    return found


def stage_ranks(config: LongContextConfig, num_ranks: int) -> int:
    """The most ranks that a stage may have."""
    return num_ranks if config.asked_stages == "auto" else max(1, num_ranks // config.asked_stages)


def least_heads(facts: ModelFacts) -> int:
    """Attention heads, or heads with a state, of the layer with the fewest: no larger group of ranks can share them."""
    text = facts.base.config.get_text_config()
    # heads may differ by layer
    heads: list[int] = list(getattr(text, "num_attention_heads_per_layer", None) or [])
    return min(heads or [getattr(text, "num_attention_heads", None) or _state_heads(facts)])


def _state_heads(facts: ModelFacts) -> int:
    """Heads with a state of their own in a model without attention; in some, every channel is one."""
    known, text = facts.mixer, facts.base.config.get_text_config()
    mixers: Iterable[Any] = mixers_of(facts.base).values()
    return int(getattr(text, known.heads) if known and known.heads else min(mixer.intermediate_size for mixer in mixers))


def _num_layers(run: Facts) -> int:
    return int(getattr(run.model.config.get_text_config(), "num_hidden_layers", 0))


def _lends(run: Facts) -> bool:
    return run.config.lend_stages and run.config.may_have_stages


# settings of pipeline stages
STAGES = {
    "interleave-without-stages": Rule(
        "interleave={config.interleave} divides pipeline stages into layer ranges, but stages is 1",
        "set stages=2 or more, or leave interleave out",
        lambda run: not run.config.may_have_stages and run.config.interleave > 1,
        "config = LongContextConfig(interleave=2)",
    ),
    "lending-without-stages": Rule(
        "lend_stages=True lends ranks of idle pipeline stages, but stages is 1",
        "set stages=2 or more, or leave it out",
        lambda run: not run.config.may_have_stages and run.config.lend_stages,
        "config = LongContextConfig(lend_stages=True)",
    ),
    "lending-without-adapters": Rule(
        "lend_stages=True needs adapters (LoRA): every rank holds the weights of all stages and sums their gradients over all "
        "ranks, which is cheap for adapters only",
        "train adapters, or leave lend_stages out",
        lambda run: _lends(run) and not is_adapted(run.model),
        "config = LongContextConfig(stages=2, lend_stages=True)",
    ),
    "lending-of-shards": Rule(
        "lend_stages=True needs parameters='replicated', not {config.parameters!r}, since every rank runs layers of all stages",
        "leave one of them out",
        lambda run: _lends(run) and run.config.parameters != "replicated",
        "model = lora(model); config = LongContextConfig(stages=2, lend_stages=True, parameters='gathered_per_round')",
    ),
    "lending-of-loaded-stages": Rule(
        "lend_stages=True needs the whole model on every rank, but the model was loaded as one stage",
        "load it with from_pretrained, or leave lend_stages out",
        lambda run: _lends(run) and run.known.loaded_ranges is not None,
        "model.longctx_ranges = (((0, 1),), ((1, 2),)); config = LongContextConfig(stages=2, lend_stages=True)",
    ),
    "lending-in-rings": Rule(
        "lend_stages=True lends ranks to slices of groups of one block, which method={config.method!r} does not plan",
        "use 'auto' or 'ulysses', or leave lend_stages out",
        lambda run: _lends(run) and run.config.method in ("ring", "hybrid"),
        "model = lora(model); config = LongContextConfig(stages=2, lend_stages=True, method='ring')",
    ),
    "lending-in-four-bits": Rule(
        "lend_stages=True is not tested with four-bit weights",
        "load them in bfloat16, or leave lend_stages out",
        lambda run: _lends(run) and run.known.packs_weights,
        "model = in_four_bits(model); config = LongContextConfig(stages=2, lend_stages=True)",
    ),
    "lending-in-fp8": Rule(
        "lend_stages=True is not tested with weights in fp8",
        "leave it out, or frozen_weights",
        lambda run: _lends(run) and _has_fp8(run),
        "model = lora(model); config = LongContextConfig(stages=2, lend_stages=True, frozen_weights='fp8')",
    ),
    "lending-and-balance": Rule(
        "lend_stages=True does not support the load-balancing loss of experts that the model's config asks for "
        "(output_router_logits=True)",
        "set that to False, or leave lend_stages out",
        lambda run: _lends(run) and has_balance(run.model),
        "model = lora(model); model.base_model.model.config.output_router_logits = True; "
        "config = LongContextConfig(stages=2, lend_stages=True)",
    ),
    "without-effect-on-stages": Rule(
        "{name}={value!r} has no effect on pipeline stages",
        "leave it out",
        lambda run: (
            {"name": name, "value": getattr(run.config, name)}
            for name, default in (("solver", "auto"), ("node_aligned", True))
            if run.config.may_have_stages and getattr(run.config, name) != default
        ),
        "config = LongContextConfig(stages=2, solver='lp')",
    ),
    "stages-and-ranks": Rule(
        "stages={config.stages} does not divide the {num_ranks} ranks of the run",
        "choose a divisor",
        lambda run: run.config.asked_stages != "auto" and run.num_ranks % run.config.asked_stages != 0,
        "num_ranks = 3; config = LongContextConfig(stages=2)",
    ),
    "interleave-of-gathered-weights": Rule(
        "interleave={config.interleave} does not go with parameters={config.parameters!r}, whose weights are freed with the last "
        "backward of a whole stage",
        "use 'sharded', 'gathered_per_step' or 'replicated', or leave interleave out",
        lambda run: (
            run.config.may_have_stages
            and run.config.interleave > 1
            and run.config.parameters != "auto"
            and frees_every_round(run.config.parameters)
        ),
        "config = LongContextConfig(stages=2, interleave=2, parameters='gathered_per_round'); "
        "model = tiny_llama(num_hidden_layers=4)",
    ),
    "more-ranges-than-layers": Rule(
        "stages={config.stages} of interleave={config.interleave} layer ranges each are more than the model's {num_layers} "
        "layers",
        "use interleave={most} or less",
        lambda run: (
            [{"num_layers": layers, "most": layers // run.config.asked_stages}]
            if run.config.asked_stages != "auto"
            and run.config.asked_stages <= (layers := _num_layers(run)) < run.config.asked_stages * run.config.interleave
            else ()
        ),
        "config = LongContextConfig(stages=2, interleave=2)",
    ),
    "loaded-in-other-ranges": Rule(
        "the model was loaded in {found} layer range(s) per stage, but interleave is {config.interleave}",
        "load it with the same number",
        lambda run: (
            {"found": len(loaded[0])}
            for loaded in [run.known.loaded_ranges]
            if run.config.may_have_stages and loaded is not None and len(loaded[0]) != run.config.interleave
        ),
        "model.longctx_ranges = (((0, 1),), ((1, 2),)); config = LongContextConfig(stages=2, interleave=2)",
    ),
    "more-stages-than-layers": Rule(
        "stages={config.stages} are more than the model's {num_layers} layers",
        "use at most {num_layers}",
        lambda run: (
            {"num_layers": most} for most in [_num_layers(run)] if run.config.asked_stages not in ("auto", *range(most + 1))
        ),
        "config = LongContextConfig(stages=4)",
    ),
    "loaded-as-other-stages": Rule(
        "the model was loaded as one of {num_loaded} stages, but stages is {config.asked_stages!r}",
        "load it with the same number",
        lambda run: (
            {"num_loaded": len(loaded)}
            for loaded in [run.known.loaded_ranges or ()]
            if len(loaded) not in (0, run.config.asked_stages)
        ),
        "model.longctx_ranges = (((0, 1),), ((1, 2),))",
    ),
}


def stage_setting_problems(known: ModelFacts, config: LongContextConfig, num_ranks: int) -> list[str]:
    """Problems with the settings of pipeline stages; without stages, problems with settings that need them."""
    facts = Facts(model=known.model, known=known, config=config, num_ranks=num_ranks)
    is_cut = config.may_have_stages and (config.asked_stages == "auto" or config.asked_stages <= _num_layers(facts))
    return refusals(STAGES, facts) + (stage_problems(known.model) if is_cut and known.loaded_ranges is None else [])


def _beyond(run: Facts) -> Iterator[dict[str, Any]]:
    """Yields the positions of a model that `max_length` exceeds."""
    text, longest, positions = run.model_config.get_text_config(), run.config.max_length, max_positions(run.model_config)
    if longest is not None and longest > positions and has_limit(text) and not grows(text):
        first = first_position(run.model_config)
        yield {"positions": positions, "padding": f" (those after the one of its padding token, {first - 1})" if first else ""}


def _more_tokens(run: Facts) -> Iterator[dict[str, int]]:
    size = num_tokens(run.model_config)
    found = len(run.processing_class) if hasattr(run.processing_class, "__len__") else 0
    if found > size:
        yield {"found": found, "size": size}


# `max_length` and the tokenizer for a model of this config, which need not be loaded yet
_FIT = {
    "max-length-beyond-positions": Rule(
        "max_length {config.max_length} is above the model's max_position_embeddings {positions}{padding}",
        "lower max_length, or load the model with a config that extend_positions(config, {config.max_length}) made",
        _beyond,
        "config = LongContextConfig(max_length=4096)",
    ),
    "vocabulary": Rule(
        "the tokenizer has {found} tokens, the model's vocabulary {size}",
        "use the model's own tokenizer or call model.resize_token_embeddings({found})",
        _more_tokens,
        "processing_class = range(1000)",
    ),
}


def fit_problems(model_config: PretrainedConfig, processing_class: Any, config: LongContextConfig) -> list[str]:
    """Problems with `max_length` and the tokenizer for a model of this config, which need not be loaded yet."""
    return refusals(_FIT, Facts(model_config=model_config, processing_class=processing_class, config=config))


def _is_no_model(run: Facts) -> bool:
    return run.model is not None and not _is_model(run.model)


# objects that are neither a model of transformers nor one with adapters
KIND_OF_MODEL = {
    "no-model": Rule(
        "the trainer has no model and no model_init",
        "pass one of them, as model=... a loaded model or its name",
        lambda run: run.model is None,
        "model = None",
    ),
    "kind-of-model": Rule(
        "model is {model.__class__.__name__}",
        "pass a loaded transformers model (PreTrainedModel), or its folder or name as text",
        _is_no_model,
        "model = torch.nn.Linear(2, 2)",
    ),
}


def _unsharded(run: Facts) -> Iterator[dict[str, str]]:
    """Yields the first weight that cannot be divided among ranks."""
    for name, parameter in run.model.named_parameters() if run.config.parameters != "replicated" and run.num_ranks > 1 else ():
        kind = "a single number" if not parameter.dim() else "complex" if parameter.is_complex() else ""
        kind = kind or ("empty" if not parameter.numel() else "")
        if kind:
            yield {"name": name, "kind": kind}
            return


_LENDS = "lend_stages=True lets ranks of several stages share a slice, but"
# how a model and its weights fit the config and the world
_SETUP = {
    "undivided-weight": Rule(
        "the weight {name} is {kind}, which cannot be divided among ranks",
        "use parameters='replicated', or make it a real tensor with one dimension or more and at least one element",
        _unsharded,
        "config = LongContextConfig(parameters='sharded'); model.scale = torch.nn.Parameter(torch.tensor(1.0))",
    ),
    "lending-of-states": Rule(
        f"{_LENDS} the {{mixer.layer_type}} layers of {{name}} do not pass their states on between them",
        "leave it out",
        lambda run: (
            [{"mixer": run.known.mixer, "name": run.known.name}] if run.config.lend_stages and run.known.mixer is not None else ()
        ),
        "model = tiny('qwen3_5', num_layers=4); config = LongContextConfig(stages=2, lend_stages=True)",
    ),
    "lending-of-indexes": Rule(
        f"{_LENDS} the indexes of {{name}} do not get the keys of all of them",
        "leave it out",
        lambda run: (
            [{"name": run.known.name}]
            if run.config.lend_stages
            and run.known.mixer is None
            and (indexed_attention(run.known.base) or compressing_attention(run.known.base))
            else ()
        ),
        "model = tiny('deepseek_v32'); config = LongContextConfig(stages=2, lend_stages=True)",
    ),
    "static-degree": Rule(
        "static_degree {config.static_degree} is not among the degrees {listed}",
        "choose one of these, or set degrees",
        lambda run: (
            [{"listed": list(run.degrees)}]
            if run.config.solver == "static" and run.config.static_degree and run.config.static_degree not in run.degrees
            else ()
        ),
        "config = LongContextConfig(solver='static', static_degree=3)",
    ),
}


def setup_problems(
    known: ModelFacts,
    processing_class: Any,
    config: LongContextConfig,
    num_ranks: int,
    degrees: tuple[int, ...],
    is_trained: bool = True,
) -> list[str]:
    """Problems with the model, and with how model, tokenizer, config and world size fit together.

    is_trained: false for a model that only runs forward.
    """
    facts = Facts(model=known.model, known=known, config=config, num_ranks=num_ranks, degrees=degrees)
    if found := refusals(KIND_OF_MODEL, facts):
        return found
    found = model_problems(known, is_trained)
    # a calibration also measures a model without layers
    if not found and (lacking := lacking_problems(known)):
        return lacking
    if found and found[0].startswith(("model class", "adapters")):
        return found
    found += user_code_problems(known, config)
    found += fit_problems(known.base.config, processing_class, config)
    try:
        check_degrees(degrees, stage_ranks(config, num_ranks), least_heads(known), config.method)
    except ValueError as error:
        found.append(str(error))
    return found + stage_setting_problems(known, config, num_ranks) + refusals(_SETUP, facts)


# field -> what was made with its first value
_AT_START = {
    "seed": "random states and the order of steps",
    "data_seed": "the order of steps",
    "full_determinism": "whether plans follow measured seconds",
    "bf16": "the precision of the run, its plans and its self-test",
    "use_liger_kernel": "the kernels of the model's layers",
    "liger_kernel_config": "the kernels of the model's layers",
}


def values_at_start(args: TrainingArguments) -> dict[str, Any]:
    """The fields that are read once, with their values."""
    return {name: getattr(args, name) for name in _AT_START if hasattr(args, name)}


def _changed(run: Facts) -> Iterator[dict[str, Any]]:
    made = {name: (value, getattr(run.args, name), _AT_START[name]) for name, value in run.given["values"].items()}
    made["per_device_train_batch_size"] = run.given["batch_size"], run.args.train_batch_size, "the batches"
    for name, (value, now, what) in made.items():
        if value != now:
            yield {"name": name, "value": value, "now": now, "what": what}


_LATE = {
    "replaced-arguments": Rule(
        "trainer.args was replaced by another object after the trainer was made, and plans read the first one",
        "change its fields (trainer.args.learning_rate = ...), or make the trainer with the new one",
        lambda run: run.args is not run.given["args"],
        "args = TrainingArguments()",
    ),
    "changed-argument": Rule(
        "{name} is {now!r} now, but was {value!r} when the trainer was made, which chose {what}",
        "set it in the TrainingArguments before the trainer is made",
        lambda run: _changed(run) if run.args is run.given["args"] else (),
        "args.seed = 7",
    ),
}


def late_problems(args: TrainingArguments, first: TrainingArguments, values: dict[str, Any], batch_size: int) -> list[str]:
    """Problems with settings that were changed since a trainer was made.

    first: the object that it was made with. values: its `values_at_start`. batch_size: the sequences of a batch that the trainer
    was made with.
    """
    return refusals(_LATE, Facts(args=args, given={"args": first, "values": values, "batch_size": batch_size}))
