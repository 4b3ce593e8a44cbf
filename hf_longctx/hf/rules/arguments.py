"""Finds problems with settings before any work starts; each problem names the value, the limit and the remedy.

Settings of a trainer that were changed after it was made: obeyed as a stock trainer obeys them, or refused by name.

Most fields are read where they are used: learning rate, schedule, clipping, accumulation, saving. Those below are read once, when
the trainer is made, and a stock trainer goes on without a word as it was made.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EarlyStoppingCallback, PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.models.adapters import base_of, is_adapted, shard_problems
from hf_longctx.hf.models.cutting import loaded_ranges, stage_problems
from hf_longctx.hf.models.experts import has_balance, spread_problems
from hf_longctx.hf.models.heads import head_kind
from hf_longctx.hf.models.index import indexed_attention
from hf_longctx.hf.models.kernel_places import liger_problems
from hf_longctx.hf.models.positions import first_position, has_limit, max_positions
from hf_longctx.hf.models.quantised import four_bit_layers
from hf_longctx.hf.models.rope import grows
from hf_longctx.hf.models.states import mixer_of, mixers_of
from hf_longctx.hf.ranks.launch import LaunchEnvironment, separate_runs
from hf_longctx.hf.rules.hooks import read_problems
from hf_longctx.hf.rules.models import lacking_problems, model_problems
from hf_longctx.hf.rules.training_arguments import refused_values
from hf_longctx.hf.rules.trl import (
    is_planned,
    is_replaced,
    is_scored,
    takes_metrics,
    trainer_problems,
    trl_class,
    version_problems,
)
from hf_longctx.hf.rules.user_code import may_call_super, user_code_problems
from hf_longctx.plan.core.messages import shown
from hf_longctx.plan.core.settings import check_degrees
from hf_longctx.plan.core.types import Ranges
from hf_longctx.runtime.parameters.low_bit import BLOCK_ELEMENTS, why_no_torchao
from hf_longctx.runtime.parameters.sharded import is_sharded

# optimizers that cannot run on shards, not even on whole weights that ranks own: what they keep is more than states of weights,
# or they look across weights
_NEVER_SHARDED = ("galore", "apollo", "lomo", "grokadamw", "adamw_torch_xla", "adamw_torch_npu_fused")
# optimizers that update element by element, and so their shards alone
_ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "adamw_torch_8bit", "adamw_torch_4bit", "sgd", "adagrad", "rmsprop")

# torchao's optimizers, which keep moments in so many bits
_LOW_BITS = {"adamw_torch_8bit": 8, "adamw_torch_4bit": 4}

# FSDP where the trainer's own loop or a trainer that is built already would shard
_ONLY_OURS = (
    "shards parameters without the planner knowing; leave it out, or use LongContextTrainer, which translates it into "
    "LongContextConfig(parameters=...)"
)

_TRAINER_ARGUMENTS = {
    "compute_metrics": "its own loop would need whole logits; leave it out, since it logs metrics of its own",
    "compute_loss_func": "pass the loss of a token as token_loss=..., of which a step takes the mean over label tokens",
    "model_init": "pass a model; LongContextTrainer takes it, and searches hyperparameters with it",
    "preprocess_logits_for_metrics": "return logits.argmax(dim=-1) there, or leave it out, since logits never exist as a whole: "
    "compute_metrics gets the likeliest token, the log-probability of the label and the entropy of every label token",
}

# arguments about the logits of all rows, which classifiers have, and loops of TRL's own
OF_LOGITS = ("compute_metrics", "preprocess_logits_for_metrics")


# arguments of a constructor that are called
_CALLED = ("data_collator", "compute_metrics", "compute_loss_func", "model_init", "preprocess_logits_for_metrics")


def kind_problems(args: Any, config: Any, given: dict[str, Any]) -> list[str]:
    """Problems with arguments of a constructor that are not what their names say, found before anything reads them.

    given: the other arguments by name, as users wrote them.
    """
    problems = []
    if args is not None and not isinstance(args, TrainingArguments):
        problems.append(f"args is {_kind(args)}; pass TrainingArguments")
    if config is not None and not isinstance(config, LongContextConfig):
        problems.append(f"longctx_config is {_kind(config)}; pass a LongContextConfig")
    for name in _CALLED:
        if (value := given.get(name)) is not None and not callable(value):
            problems.append(f"{name} is {_kind(value)}; pass a function, or leave it out")
    callbacks = given.get("callbacks")
    if callbacks is not None and not isinstance(callbacks, list):
        # `Trainer` adds it to a list of its own
        problems.append(f"callbacks is {_kind(callbacks)}; pass a list of TrainerCallbacks")
    for each in callbacks if isinstance(callbacks, list) else ():
        if not (isinstance(each, TrainerCallback) or (isinstance(each, type) and issubclass(each, TrainerCallback))):
            problems.append(f"callbacks has {_kind(each)}; pass TrainerCallbacks alone, or their classes")
    pair = given.get("optimizers")
    if pair is not None and not (_is_pair(pair) and (pair[0] is None or hasattr(pair[0], "param_groups"))):
        problems.append(f"optimizers is {_kind(pair)}; pass an optimizer and a scheduler, (optimizer, None), or leave it out")
    pair = given.get("optimizer_cls_and_kwargs")
    if pair is not None and not (_is_pair(pair) and callable(pair[0]) and isinstance(pair[1], dict)):
        problems.append(f"optimizer_cls_and_kwargs is {_kind(pair)}; pass a class and a dictionary of its settings")
    return problems


def _kind(value: Any) -> str:
    return f"{shown(value)} ({'a class' if isinstance(value, type) else type(value).__name__})"


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2


def stopping_problems(callbacks: Iterable[Any], args: TrainingArguments) -> list[str]:
    """Problems of transformers' early stopping with arguments under which it has nothing to compare."""
    stock = EarlyStoppingCallback.on_train_begin
    # a subclass with another beginning may look at something else than evaluations
    if not any(getattr(each.on_train_begin, "__func__", None) is stock for each in callbacks):
        return []
    problems = []
    if args.metric_for_best_model is None:
        problems.append("EarlyStoppingCallback has no metric to compare; set metric_for_best_model='loss' or another metric")
    if args.eval_strategy == "no":
        problems.append("EarlyStoppingCallback never sees an evaluation (eval_strategy='no'); set it to 'steps' or 'epoch'")
    return problems


def argument_problems(
    args: TrainingArguments, trainer_arguments: dict[str, Any], draws_batches: bool = True, compile_layers: bool | None = False
) -> list[str]:
    """Problems with trainer settings that do not work under plans yet, or would mean something else there.

    draws_batches: whether plans draw the batches and sum the gradients, instead of the trainer's own loader and DDP.
    compile_layers: the run's setting of this name.
    """
    problems = version_problems() + read_problems() + liger_problems(args, compile_layers, draws_batches)
    problems += refused_values(args)
    if args.fsdp:
        problems.append(f"fsdp={args.fsdp!r} {_ONLY_OURS}")
    if accumulation := getattr(args.accelerator_config, "gradient_accumulation_kwargs", None):
        problems.append(
            f"accelerator_config gradient_accumulation_kwargs={accumulation!r} is not supported; set gradient_accumulation_steps"
        )
    if (name := optimizer_name(args)) in ("lomo", "adalomo") or "layerwise" in name:
        problems.append(f"optim={name!r} steps inside backward, before gradients are summed over ranks; choose another optimizer")
    if args.n_gpu > 1:
        problems.append(
            f"one process sees {args.n_gpu} GPUs and would use DataParallel; start one process per GPU with "
            f"`accelerate launch --multi_gpu --num_processes {args.n_gpu}`"
        )
    for name, remedy in _TRAINER_ARGUMENTS.items():
        if name == "compute_metrics" and draws_batches:
            continue
        if trainer_arguments.get(name) is not None:
            problems.append(f"the trainer argument {name} is not supported; {remedy}")
    return problems


def run_problems(
    trainer: type, config: LongContextConfig, model: Any, args: TrainingArguments, trainer_arguments: dict[str, Any]
) -> list[str]:
    """Problems with the arguments of a trainer of the class `trainer` that runs full plans."""
    if keeps_loader := is_scored(trainer):
        # its collator makes the batches
        trainer_arguments = {name: value for name, value in trainer_arguments.items() if name != "data_collator"}
    given = dict(trainer_arguments)
    has_logits = takes_metrics(trainer) or (isinstance(model, nn.Module) and head_kind(model) != "next_token")
    if has_logits:
        for name in OF_LOGITS:
            given.pop(name, None)
    elif likeliest_form(given.get("preprocess_logits_for_metrics")):
        given["preprocess_logits_for_metrics"] = None
    problems = argument_problems(args, given, not keeps_loader, config.compile_layers) + trainer_problems(trainer, args, config)
    problems += placement_problems(model, config, args, trainer_arguments)
    problems += layer_weights_problems(model, config, args.world_size)
    has_metrics = trainer_arguments.get("compute_metrics") is not None
    has_tokens = has_metrics and not has_logits
    return problems if keeps_loader else problems + evaluation_problems(args, has_metrics, has_tokens)


def likeliest_form(function: Any) -> str:
    """Which of the arrays that plans have a `preprocess_logits_for_metrics` returns, found by trying it on small logits.

    "tokens": the likeliest tokens; "pair": these and the labels. Empty for anything else, and without a function.
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


def evaluation_problems(args: TrainingArguments, has_metrics: bool, has_tokens: bool = False) -> list[str]:
    """Problems with trainer settings about predictions, of which an evaluation under plans makes fewer.

    has_metrics: whether there is a `compute_metrics`, without which none of them matters. has_tokens: whether it gets arrays of
    tokens, with which their ids may be included.
    """
    problems: list[str] = []
    if not has_metrics:
        return problems
    for name, value in (("batch_eval_metrics", False), ("eval_do_concat_batches", True)):
        if getattr(args, name, value) != value:
            problems.append(
                f"{name}={not value} is not supported with compute_metrics, which gets the arrays of the whole set at once; "
                f"leave {name} out"
            )
    for name in args.include_for_metrics or []:
        if name == "inputs" and has_tokens:
            continue
        remedy = "predictions['log_prob'] has the loss of every token" if name == "loss" and has_tokens else "leave it out"
        problems.append(f"include_for_metrics names {name!r}, which an evaluation under plans does not have; {remedy}")
    return problems


def launch_problems(launch: LaunchEnvironment, args: TrainingArguments) -> list[str]:
    """Problems with the launcher's own configuration, which would change the run without the trainer's knowledge."""
    problems = separate_runs(args.world_size)
    if launch.num_ranks != args.world_size:
        problems.append(
            f"the launcher started {launch.num_ranks} processes, but the world size is {args.world_size}, so that each would "
            f"train alone; without a GPU set use_cpu=True in TrainingArguments"
        )
    declared = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    if launch.mixed_precision not in ("no", "", declared):
        problems.append(
            f"mixed_precision {launch.mixed_precision!r} of the accelerate configuration differs from the training arguments "
            f"({declared!r}); set it to 'no' there and bf16=True in TrainingArguments if bf16 is wanted"
        )
    if launch.compile_backend not in ("no", ""):
        problems.append(
            f"the accelerate configuration compiles the model (dynamo_backend {launch.compile_backend!r}), which is not "
            f"supported yet; leave dynamo out of it, and set LongContextConfig(compile_layers=True)"
        )
    if launch.uses_deepspeed:
        problems.append(
            "the accelerate configuration asks for DeepSpeed, which is not supported; use distributed_type MULTI_GPU without it "
            "and set LongContextConfig(parameters='sharded')"
        )
    # the fsdp argument sets the same variable and is a problem of its own
    if launch.uses_fsdp and not args.fsdp:
        problems.append(f"the accelerate configuration's FSDP {_ONLY_OURS}")
    if launch.uses_parallelism:
        problems.append(
            "the accelerate configuration has a parallelism_config, which divides models or sequences without the planner "
            "knowing; leave it out: group sizes are chosen per step (LongContextConfig.degrees)"
        )
    return problems


_OWN_ORDER = (
    "plans draw rows themselves; remove it, and order the rows of the set (train_sampling_strategy='sequential' keeps that)"
)
_OWN_BATCHES = "plans make batches from rows; remove it, and do its work on the rows, with dataset.map or in a data_collator"
# methods that plans never call -> why, and what to do
_NEVER_CALLED_IN_TRAINING = {
    "compute_loss": "a plan's loss is the token mean of cross-entropy; remove it, and pass the loss of a token as token_loss=...",
    "compute_loss_context_manager": "plans enter autocast themselves; remove it, and set bf16=True if that is wanted",
    "_get_train_sampler": _OWN_ORDER,
    "_get_dataloader": _OWN_BATCHES,
    "_get_num_items_in_batch": "a plan counts its label tokens itself; remove it, and weigh tokens by a column 'loss_weights'",
    "_prepare_inputs": _OWN_BATCHES,
    "_prepare_input": _OWN_BATCHES,
    "_remove_unused_columns": _OWN_BATCHES,
    "_set_signature_columns_if_needed": _OWN_BATCHES,
}
_NEVER_CALLED_IN_EVALUATION = {
    "prediction_step": "an evaluation under plans has no batches of logits; remove it, and use compute_metrics or predict()",
    "_get_eval_sampler": "an evaluation reads a set in its order; remove it, and order the rows of the set",
}
# methods that plans replace; an override must call theirs
_REPLACED_IN_TRAINING = ("training_step", "get_train_dataloader", "get_batch_samples")
_REPLACED_IN_EVALUATION = ("evaluation_loop", "get_eval_dataloader", "get_test_dataloader", "predict")


def override_problems(trainer: type, mixin: type, plans_evaluation: bool) -> list[str]:
    """Problems with methods of a Trainer subclass that would never be called, although plans may not do the same work.

    plans_evaluation: whether methods for evaluation count too; false if a callback lends the mixin to a trainer.
    """
    never = {**_NEVER_CALLED_IN_TRAINING, **(_NEVER_CALLED_IN_EVALUATION if plans_evaluation else {})}
    replaced = _REPLACED_IN_TRAINING + (_REPLACED_IN_EVALUATION if plans_evaluation else ())
    mro = [cls for cls in trainer.__mro__ if not is_replaced(cls)]
    known = (Trainer, mixin)
    place = mro.index(mixin)
    before = [cls for cls in mro[:place] if not cls.__module__.startswith("hf_longctx.")]
    behind = [cls for cls in mro[place + 1 :] if not any(issubclass(base, cls) for base in known)]
    problems: list[str] = []
    if trl_class(trainer) is not None and not is_planned(trainer):
        # `trainer_problems` refuses this class as a whole, or its own loop runs
        return problems
    for name, why in never.items():
        owner = next((cls for cls in mro if name in vars(cls)), None)
        if owner is not None and not owner.__module__.startswith("transformers."):
            problems.append(f"{owner.__name__}.{name} would never be called: {why}")
    for name in replaced:
        owner = next((cls for cls in before if name in vars(cls)), None)
        if owner is not None and not may_call_super(vars(owner)[name], name):
            problems.append(
                f"{owner.__name__}.{name} never calls super().{name}(), which makes the batches that plans run; return "
                f"super().{name}(...), and change rows, order and batch size by train_dataset, eval_dataset, data_collator and "
                f"TrainingArguments"
            )
            continue
        owner = next((cls for cls in behind if name in vars(cls)), None)
        if owner is not None and not plans_evaluation:
            problems.append(
                f"{owner.__name__}.{name} would never be called under attached plans; use the callback in callbacks=[...] alone, "
                f"or put LongContextMixin in front of the class and override {name} there"
            )
        elif owner is not None:
            problems.append(
                f"{trainer.__name__} inherits {name} from a class after {mixin.__name__}, where it would never be called; "
                f"override it in {trainer.__name__} itself and call super().{name}()"
            )
    return problems


def config_problems(config: LongContextConfig, args: TrainingArguments) -> list[str]:
    """Problems with settings that exclude each other, so that one of them would have no effect."""
    problems = _low_bit_problems(config, args)
    if args.full_determinism and config.solver in ("lp", "milp"):
        problems.append(
            f"full_determinism=True needs plans that no clock decides, but solver={config.solver!r} takes what programs find in "
            f"{config.solver_time_limit_s:g} s; use 'auto', 'greedy' or 'static'"
        )
    if config.tokens_per_step is not None and args.dataloader_drop_last:
        problems.append(
            f"dataloader_drop_last=True has no effect with tokens_per_step={config.tokens_per_step}, which cuts an epoch into "
            f"equal steps; leave one of them out"
        )
    if config.tokens_per_step is not None and args.gradient_accumulation_steps > 1:
        problems.append(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} contradicts tokens_per_step="
            f"{config.tokens_per_step}, which already says what an optimizer step holds; leave one of them out"
        )
    if config.stages != 1 and args.save_on_each_node:
        problems.append(
            "save_on_each_node=True would need every stage on every node; leave it out, and write checkpoints to a folder that "
            "all nodes share"
        )
    return problems


def async_problems(trainer: type, args: TrainingArguments) -> list[str]:
    """Problems of a trainer of the class `trainer` with checkpoints that come into view some steps after their own."""
    problems = []
    strategy = str(getattr(args.hub_strategy, "value", args.hub_strategy))
    if args.push_to_hub and strategy != "end":
        problems.append(
            f"async_save=True and hub_strategy={strategy!r}: a checkpoint would be uploaded as that of a later step; set "
            f"hub_strategy='end', or leave async_save out"
        )
    owner = next(cls for cls in trainer.__mro__ if "_save_checkpoint" in vars(cls))
    if not owner.__module__.startswith("hf_longctx."):
        problems.append(
            f"{owner.__name__}._save_checkpoint would end before the checkpoint is in its folder (async_save=True); override "
            f"_save to add files, or leave async_save out"
        )
    return problems


def callback_problems(callbacks: Iterable[Any]) -> list[str]:
    """Problems of callbacks with checkpoints that come into view some steps after their own, when the model has changed.

    Callbacks of transformers read the checkpoint's folder alone, so they are right whenever they are called.
    """
    return [
        f"{type(callback).__name__}.on_save would be called with the model of a later step, since async_save=True writes behind "
        f"training; add files by overriding the trainer's _save, use another event, or leave async_save out"
        for callback in callbacks
        if getattr(callback.on_save, "__func__", None) is not TrainerCallback.on_save
        and not type(callback).__module__.startswith(("transformers.", "hf_longctx."))
    ]


def placement_problems(
    model: Any, config: LongContextConfig, args: TrainingArguments, trainer_arguments: dict[str, Any]
) -> list[str]:
    """Problems with sharded parameters, and with optimizers that hold weights of other ranks' stages."""
    if is_sharded(model):
        return ["the model is sharded already (fully_shard); pass a plain one and set LongContextConfig(parameters='sharded')"]
    if config.parameters == "replicated":
        if config.stages == 1 or loaded_ranges(model) is not None or not any(trainer_arguments.get("optimizers") or ()):
            return []
        return [
            f"the trainer argument optimizers holds weights of all stages, but stages={config.stages!r} leaves each rank with "
            f"one stage; pass optimizer_cls_and_kwargs=(class, settings) instead, or set optim"
        ]
    problems = shard_problems(model)
    if any(trainer_arguments.get("optimizers") or ()):
        problems.append(
            f"the trainer argument optimizers holds whole parameters, which parameters={config.parameters!r} replaces by shards; "
            f"pass optimizer_cls_and_kwargs=(class, settings) instead, or set optim"
        )
    if config.shard_ranks is not None and args.world_size % config.shard_ranks:
        problems.append(f"shard_ranks {config.shard_ranks} does not divide the {args.world_size} ranks; choose a divisor")
    if config.expert_ranks is not None:
        if args.world_size % config.expert_ranks:
            problems.append(f"expert_ranks {config.expert_ranks} does not divide the {args.world_size} ranks; choose a divisor")
        problems += spread_problems(model, config.expert_ranks)
    # a class that the user passes takes the place of `optim`
    is_named, name = trainer_arguments.get("optimizer_cls_and_kwargs") is None, optimizer_name(args)
    if is_named and any(each in name for each in _NEVER_SHARDED):
        problems.append(
            f"optim={name!r} is not supported with parameters={config.parameters!r}; use one of {', '.join(_ELEMENTWISE)}, "
            f"adafactor, or parameters='replicated'"
        )
    elif is_named and name not in _ELEMENTWISE and (config.stages != 1 or config.optimizer_states == "host"):
        other = f"stages={config.stages!r}" if config.stages != 1 else f"optimizer_states={config.optimizer_states!r}"
        problems.append(
            f"optim={name!r} updates whole weights, which parameters={config.parameters!r} with {other} do not give it; leave "
            f"one of them out, or use one of {', '.join(_ELEMENTWISE)}"
        )
    return problems


def layer_weights_problems(model: Any, config: LongContextConfig, num_ranks: int) -> list[str]:
    """Reasons why shards of layers cannot lie on the host while a step computes."""
    if config.layer_weights == "device":
        return []
    needs, remedy = f"layer_weights={config.layer_weights!r}", "leave layer_weights out"
    shared, problems = config.shard_ranks or num_ranks, []
    if config.parameters != "sharded" or shared == 1:
        problems.append(
            f"{needs} needs parameters='sharded' over two or more ranks, and there are parameters={config.parameters!r} over "
            f"{shared}; change them, or {remedy}"
        )
    if config.stages != 1:
        problems.append(f"{needs} is not tested with stages={config.stages!r}; set stages=1, or {remedy}")
    if config.expert_ranks is not None:
        problems.append(f"{needs} would leave experts on the device with expert_ranks={config.expert_ranks}; {remedy}")
    if four_bit_layers(model):
        problems.append(f"{needs} cannot move weights in four bits, which have scales beside them; {remedy}")
    return problems


def optimizer_name(args: TrainingArguments) -> str:
    """The setting `optim` as text."""
    return str(getattr(args.optim, "value", args.optim))


def low_bits(args: TrainingArguments) -> int:
    """Bits of a moment if `optim` names an optimizer that keeps moments in few; else 0."""
    return _LOW_BITS.get(optimizer_name(args), 0)


def rounds_by_chance(args: TrainingArguments) -> bool:
    """Whether the arguments ask torchao's optimizer to round bf16 weights up or down by chance."""
    value = (args.optim_args or "") if low_bits(args) else ""
    settings = dict(part.strip().split("=", 1) for part in value.split(",") if "=" in part)
    return settings.get("bf16_stochastic_round", "").strip().lower() in ("1", "true", "yes", "y", "on", "t")


def _low_bit_problems(config: LongContextConfig, args: TrainingArguments) -> list[str]:
    """Problems with an optimizer that keeps moments in few bits."""
    name = optimizer_name(args)
    if not low_bits(args):
        return []
    if missing := why_no_torchao():
        return [f"optim={name!r} needs torchao, which cannot be imported ({missing}); pip install torchao, or use adamw_torch"]
    problems = []
    if args.device.type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX") or "g++", "clang++"))):
        problems.append(
            f"optim={name!r} compiles its step, which needs a C++ compiler on CPU; install g++, or use optim='adamw_torch'"
        )
    if "block_size" in (args.optim_args or ""):
        problems.append(
            f"optim_args={args.optim_args!r} sets block_size, which transformers hands to {name} as text; leave it out, blocks "
            f"have {BLOCK_ELEMENTS} elements"
        )
    if config.optimizer_states != "device":
        problems.append(
            f"optim={name!r} keeps its moments on the device, so optimizer_states={config.optimizer_states!r} has no effect on "
            f"it; leave it out, or use optim='adamw_torch'"
        )
    if rounds_by_chance(args) and config.fp32_master_weights:
        problems.append(
            "bf16_stochastic_round=True in optim_args has no effect on the fp32 copies that are updated; set "
            "fp32_master_weights=False, or leave it out"
        )
    if rounds_by_chance(args) and config.stages != 1:
        problems.append(
            f"bf16_stochastic_round=True in optim_args would round the copies of a tied weight apart on "
            f"stages={config.stages!r}; leave it out, and keep fp32_master_weights=True"
        )
    return problems


def stage_ranks(config: LongContextConfig, num_ranks: int) -> int:
    """The most ranks that a stage may have."""
    return num_ranks if config.stages == "auto" else max(1, num_ranks // config.stages)


def least_heads(model: Any) -> int:
    """Attention heads of the layer with the fewest, or heads with a state: the largest group of ranks that can share them."""
    text = model.config.get_text_config()
    # heads may differ by layer
    heads: list[int] = list(getattr(text, "num_attention_heads_per_layer", None) or [])
    return min(heads or [getattr(text, "num_attention_heads", None) or _state_heads(model)])


def _state_heads(model: Any) -> int:
    """Heads with a state of their own in a model without attention; in some, every channel is one."""
    known, text = mixer_of(base_of(model)), model.config.get_text_config()
    mixers: Iterable[Any] = mixers_of(base_of(model)).values()
    return int(getattr(text, known.heads) if known and known.heads else min(mixer.intermediate_size for mixer in mixers))


def _state_setting_problems(model: Any, config: LongContextConfig) -> list[str]:
    """Problems with settings under which states would not pass from token to token."""
    mixer, name = mixer_of(base_of(model)), type(base_of(model)).__name__
    if not config.lend_stages:
        return []
    shared = "lend_stages=True lets ranks of several stages share a slice, but"
    if mixer is not None:
        return [f"{shared} the {mixer.layer_type} layers of {name} do not pass their states on between them; leave it out"]
    if indexed_attention(base_of(model)):
        return [f"{shared} the indexes of {name} do not get the keys of all of them; leave it out"]
    return []


def stage_setting_problems(model: Any, config: LongContextConfig, num_ranks: int) -> list[str]:
    """Problems with the settings of pipeline stages; without stages, problems with settings that need them."""
    loaded = loaded_ranges(model)
    num_loaded = len(loaded or ())
    differs = f"the model was loaded as one of {num_loaded} stages, but stages is {config.stages!r}; load it with the same number"
    if config.stages == 1:
        problems = [] if loaded is None else [differs]
        if config.interleave > 1:
            problems.append(
                f"interleave={config.interleave} divides pipeline stages into layer ranges, but stages is 1; set stages=2 or "
                f"more, or leave interleave out"
            )
        if config.lend_stages:
            problems.append(
                "lend_stages=True lends ranks of idle pipeline stages, but stages is 1; set stages=2 or more, or leave it out"
            )
        return problems
    problems = [
        f"{name}={getattr(config, name)!r} has no effect on pipeline stages; leave it out"
        for name, default in (("solver", "auto"), ("node_aligned", True))
        if getattr(config, name) != default
    ]
    if config.parameters == "sharded":
        problems.append(
            "parameters='sharded' gathers every layer for every slice of a pipeline; use 'gathered_per_round', or 'replicated'"
        )
    if config.stages != "auto" and num_ranks % config.stages:
        problems.append(f"stages={config.stages} does not divide the {num_ranks} ranks of the run; choose a divisor")
    num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    problems += _interleave_problems(config, num_layers, loaded)
    if config.lend_stages:
        problems += _lending_problems(model, config, loaded)
    if config.stages != "auto" and config.stages > num_layers:
        problems.append(f"stages={config.stages} are more than the model's {num_layers} layers; use at most {num_layers}")
    elif loaded is None:
        problems += stage_problems(model)
    elif config.stages != num_loaded:
        problems.append(differs)
    return problems


def _interleave_problems(config: LongContextConfig, num_layers: int, loaded: Ranges | None) -> list[str]:
    """Problems with several layer ranges per stage, for a run with stages."""
    problems = []
    if config.interleave > 1 and config.parameters == "gathered_per_round":
        problems.append(
            f"interleave={config.interleave} needs parameters='replicated', not {config.parameters!r}, whose shards are freed "
            f"with the last backward of a whole stage; leave one of them out"
        )
    if config.stages != "auto" and config.stages <= num_layers < config.stages * config.interleave:
        problems.append(
            f"stages={config.stages} of interleave={config.interleave} layer ranges each are more than the model's {num_layers} "
            f"layers; use interleave={num_layers // config.stages} or less"
        )
    if loaded is not None and (found := len(loaded[0])) != config.interleave:
        problems.append(
            f"the model was loaded in {found} layer range(s) per stage, but interleave is {config.interleave}; load it with the "
            f"same number"
        )
    return problems


def _lending_problems(model: Any, config: LongContextConfig, loaded: Ranges | None) -> list[str]:
    """Problems with stages that lend their ranks."""
    problems = []
    if not is_adapted(model):
        problems.append(
            "lend_stages=True needs adapters (LoRA): every rank holds the weights of all stages and sums their gradients over "
            "all ranks, which is cheap for adapters only; train adapters, or leave lend_stages out"
        )
    if config.parameters != "replicated":
        problems.append(
            f"lend_stages=True needs parameters='replicated', not {config.parameters!r}, since every rank runs layers of all "
            f"stages; leave one of them out"
        )
    if loaded is not None:
        problems.append(
            "lend_stages=True needs the whole model on every rank, but the model was loaded as one stage; load it with "
            "from_pretrained, or leave lend_stages out"
        )
    if config.method in ("ring", "hybrid"):
        problems.append(
            f"lend_stages=True lends ranks to slices of groups of one block, which method={config.method!r} does not plan; use "
            f"'auto' or 'ulysses', or leave lend_stages out"
        )
    if four_bit_layers(model):
        problems.append("lend_stages=True is not tested with four-bit weights; load them in bfloat16, or leave lend_stages out")
    if has_balance(model):
        problems.append(
            "lend_stages=True does not support the load-balancing loss of experts that the model's config asks for "
            "(output_router_logits=True); set that to False, or leave lend_stages out"
        )
    return problems


def fit_problems(model_config: PretrainedConfig, processing_class: Any, config: LongContextConfig) -> list[str]:
    """Problems with `max_length` and the tokenizer for a model of this config, which need not be loaded yet."""
    problems, text = [], model_config.get_text_config()
    positions = max_positions(model_config)
    if config.max_length is not None and config.max_length > positions and has_limit(text) and not grows(text):
        padding = f" (those after the one of its padding token, {first - 1})" if (first := first_position(model_config)) else ""
        problems.append(
            f"max_length {config.max_length} is above the model's max_position_embeddings {positions}{padding}; lower "
            f"max_length, or load the model with a config that extend_positions(config, {config.max_length}) made"
        )
    vocabulary = len(processing_class) if hasattr(processing_class, "__len__") else 0
    if vocabulary > text.vocab_size:
        problems.append(
            f"the tokenizer has {vocabulary} tokens, the model's vocabulary {text.vocab_size}; use the model's own "
            f"tokenizer or call model.resize_token_embeddings({vocabulary})"
        )
    return problems


def kind_of_model_problems(model: Any) -> list[str]:
    """The problem with something that is no model of transformers, with adapters or without."""
    if model is None:
        return ["the trainer has no model and no model_init; pass one of them, as model=... a loaded model or its name"]
    if isinstance(model, PreTrainedModel) or (isinstance(model, nn.Module) and hasattr(model, "peft_config")):
        return []
    return [f"model is {type(model).__name__}; pass a loaded transformers model (PreTrainedModel), or its folder or name as text"]


def _unsharded_problems(model: Any, config: LongContextConfig, num_ranks: int) -> list[str]:
    """Problem with the first weight that cannot be divided among ranks, if weights are."""
    if config.parameters == "replicated" or num_ranks == 1:
        return []
    for name, parameter in model.named_parameters():
        kind = "a single number" if not parameter.dim() else "complex" if parameter.is_complex() else ""
        kind = kind or ("empty" if not parameter.numel() else "")
        if kind:
            return [
                f"the weight {name} is {kind}, which cannot be divided among ranks; use parameters='replicated', or make it a "
                f"real tensor with one dimension or more and at least one element"
            ]
    return []


def setup_problems(
    model: Any, processing_class: Any, config: LongContextConfig, num_ranks: int, degrees: tuple[int, ...]
) -> list[str]:
    """Problems with the model, and with how model, tokenizer, config and world size fit together."""
    if problems := kind_of_model_problems(model):
        return problems
    problems = model_problems(model)
    # a calibration also measures a model without layers
    if not problems and (lacking := lacking_problems(model)):
        return lacking
    if problems and problems[0].startswith(("model class", "adapters")):
        return problems
    problems += user_code_problems(model, config)
    problems += fit_problems(model.config, processing_class, config)
    try:
        check_degrees(degrees, stage_ranks(config, num_ranks), least_heads(model), config.method)
    except ValueError as error:
        problems.append(str(error))
    problems += stage_setting_problems(model, config, num_ranks)
    problems += _unsharded_problems(model, config, num_ranks)
    problems += _state_setting_problems(model, config)
    if config.solver == "static" and config.static_degree and config.static_degree not in degrees:
        problems.append(
            f"static_degree {config.static_degree} is not among the degrees {list(degrees)}; choose one of these, or set degrees"
        )
    return problems


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


def late_problems(args: TrainingArguments, first: TrainingArguments, values: dict[str, Any], batch_size: int) -> list[str]:
    """Problems with settings that were changed since a trainer was made.

    first: the object that it was made with. values: its `values_at_start`. batch_size: the sequences of a batch that the trainer
    was made with.
    """
    if args is not first:
        return [
            "trainer.args was replaced by another object after the trainer was made, and plans read the first one; change its "
            "fields (trainer.args.learning_rate = ...), or make the trainer with the new one"
        ]
    made = {name: (value, getattr(args, name), _AT_START[name]) for name, value in values.items()}
    made["per_device_train_batch_size"] = batch_size, args.train_batch_size, "the batches"
    return [
        f"{name} is {now!r} now, but was {value!r} when the trainer was made, which chose {what}; set it in the "
        f"TrainingArguments before the trainer is made"
        for name, (value, now, what) in made.items()
        if value != now
    ]
