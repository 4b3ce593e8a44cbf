"""Says which trainers of TRL run under full plans or under the callback alone, why others are refused, and which versions work.

TRL's trainers prepare model and dataset inside their own constructors, so a mixin in front of them checks both afterwards. The
loss of `SFTTrainer` is the token mean of the cross-entropy, and so is the loss of plans. Plans therefore replace its
`compute_loss`, `training_step` and `prediction_step`, and log entropy and token accuracy themselves (`counts_tokens`). The
losses of `DPOTrainer`, `KTOTrainer`, `GRPOTrainer` and `RLOOTrainer` are functions of log-probabilities of tokens. These
trainers keep their loaders and their losses, and plans compute the log-probabilities and train them
(`log_probs/two_passes.py`). The loss of `RewardTrainer` is a function of rewards of documents and runs in the same way
(`log_probs/rewards.py`). Under the callback alone, an exchange around each forward serves `SFTTrainer` and `DPOTrainer`
(`callback/exchange.py`). TRL is never imported here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from typing import Any

import datasets
from packaging.version import Version
from torch import nn
from transformers import __version__

from hf_longctx.hf.checkpoints.deferred import source_of
from hf_longctx.hf.checkpoints.weight_source import weight_problems
from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.data.fields import MEDIA, MEDIA_FILES, named_column_problem, text_columns
from hf_longctx.hf.data.labels import LOSS_WEIGHTS
from hf_longctx.hf.models.adapters import is_adapted
from hf_longctx.hf.models.dropout import weight_rates
from hf_longctx.hf.models.experts import balance_problems
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.rules.rule import Facts, Rule, refusals
from hf_longctx.hf.rules.training_arguments import has_other
from hf_longctx.plan.core.messages import listed
from hf_longctx.runtime.core.loss import OwnLogit, TemperedCrossEntropy, TokenLoss

# version of TRL whose trainers are tested; in later versions, methods of the same names may do other things
_TRL = "1.16"
# package -> first and last version that is known to work; newer ones may work too if `hooks.py` misses no name in them
_KNOWN = {
    "accelerate": ("1.15", "1.15"),
    "datasets": ("4.0", "5.2"),
    "flash_attn": ("2.8", "2.8"),
    "peft": ("0.21", "0.21"),
    "torch": ("2.11", "2.15"),
    "torchao": ("0.18", "0.18"),
    "transformers": ("5.17", "5.24"),
    "trl": (_TRL, _TRL),
}


# versions that every run needs
VERSIONS = {
    "old-transformers": Rule(
        "transformers {versions[transformers]} is installed, {least} or newer is needed",
        "pip install -U transformers",
        lambda run: (
            {"least": least} for least in [_KNOWN["transformers"][0]] if Version(run.versions["transformers"]) < Version(least)
        ),
        "versions = {'transformers': '5.9.2'}",
    ),
}
# versions for runs that use a trainer of TRL
_TRL_VERSION = {
    "other-trl": Rule(
        "trl {versions[trl]} is installed, but its trainers are tested with {tested}",
        "pip install 'trl=={tested}.*'",
        lambda run: (
            {"tested": tested}
            for tested in [run.given.get("tested_trl", _TRL)]
            if Version(run.versions["trl"]).release[:2] != Version(tested).release
        ),
        "versions = {'trl': '1.15.2'}",
    ),
}


def known_version(package: str) -> str:
    """Says how to install a version of `package` that is known to work, and which one is installed."""
    least, most = _KNOWN[package]
    major, minor = Version(most).release[:2]
    installed = __version__ if package == "transformers" else version(package)
    return f"pip install '{package}>={least},<{major}.{minor + 1}' ({installed} is installed)"


# add a trainer only together with its runs in tests/hf/trainer/test_trl_trainers.py
_PLANNED = "SFTTrainer"
# trainers whose loss is a function of log-probabilities of tokens, or of rewards; those that generate the tokens themselves
_SCORED = ("DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer", "RewardTrainer")
_GENERATING = ("GRPOTrainer", "RLOOTrainer")
_ASYNCHRONOUS = "AsyncGRPOTrainer"
# trainers that compute whole logits for a user's `compute_metrics`
_WITH_LOGITS = ("DPOTrainer", "KTOTrainer")
_ALONE = {"SFTConfig": "SFTTrainer", "DPOConfig": "DPOTrainer"}
# metrics that plans log in place of SFTTrainer
OF_TRL = ("mean_token_accuracy", "entropy", "num_tokens", "aux_loss")
# columns that the collator of SFTTrainer reads; SFTTrainer also writes columns that have no reader
_READ = ("input_ids", "labels", "seq_lengths")
# columns that TRL reads or makes before its collator runs
_PREPARED = ("completion_mask", "assistant_masks", "attention_mask", "chat_template_kwargs")


def trl_class(cls: type) -> type | None:
    """The class of TRL that `cls` is or inherits from; None if there is none."""
    return next((base for base in cls.__mro__ if base.__module__.split(".", 1)[0] == "trl"), None)


def is_planned(cls: type) -> bool:
    """Whether `cls` is TRL's trainer with the loss of plans, or a subclass of it outside TRL."""
    found = trl_class(cls)
    return found is not None and found.__name__ == _PLANNED


def is_replaced(cls: type) -> bool:
    """Whether plans are known to do the same work as the methods of exactly this class."""
    return cls.__name__ == _PLANNED and trl_class(cls) is cls


def is_scored(cls: type) -> bool:
    """Whether `cls` is a trainer of TRL whose loss is a function of log-probabilities of tokens, or a subclass of one."""
    found = trl_class(cls)
    return found is not None and found.__name__ in _SCORED


def takes_metrics(cls: type) -> bool:
    """Whether `cls` is a scored trainer of TRL whose own evaluation calls a user's `compute_metrics`."""
    return is_scored(cls) and getattr(trl_class(cls), "__name__", "") not in _GENERATING


def counts_tokens(trainer: type, config: LongContextConfig) -> bool:
    """Whether the log of a training has token accuracy and entropy: if the user asks for them, or if TRL's own log has them."""
    return config.token_metrics == "on" or (config.token_metrics == "auto" and is_planned(trainer))


def trainer_problems(trainer: type, args: Any, config: LongContextConfig) -> list[str]:
    """Reasons why a trainer of TRL cannot run full plans with these arguments; empty for trainers that are not of TRL."""
    found = trl_class(trainer)
    if found is None:
        return []
    # a trainer with a loss of its own names the version in which it was tested
    facts = Facts(trainer=found, args=args, config=config, given={"tested_trl": getattr(trainer, "longctx_trl", _TRL)})
    own = _SCORED_RULES if is_scored(trainer) else _SFT
    return refusals(_OTHER_TRAINERS, facts) or refusals(_TRL_VERSION | _OFFLOADING | own, facts)


# trainers of TRL that full plans do not run
_OTHER_TRAINERS = {
    "asynchronous-trainer-of-trl": Rule(
        "{trainer.__name__} computes tokens that rollouts share once, in rows of one GPU each, and plans have no such rows",
        "let its rollout worker generate for a loop over LongContextEngine, as recipes/trl_async.py does",
        lambda run: getattr(trl_class(run.trainer), "__name__", "") == _ASYNCHRONOUS,
        f"trainer = of_trl('{_ASYNCHRONOUS}')",
    ),
    "other-trainer-of-trl": Rule(
        "{trainer.__name__} computes its loss from whole sequences, or generates them, but full plans train the token mean of "
        "the cross-entropy",
        f"use SFTTrainer (for distillation with teacher=model), {', '.join(_SCORED)}, the trainers of TRL that run full plans",
        lambda run: getattr(trl_class(run.trainer), "__name__", _PLANNED) not in (_PLANNED, _ASYNCHRONOUS, *_SCORED),
        "trainer = of_trl('PRMTrainer')",
    ),
}
# trainers of TRL to which full plans cannot be attached
NOT_ATTACHED = {
    "attach-and-scored-trainer": Rule(
        "attach does not serve {name}, whose reference model would have to run under plans too",
        "write class Mine(LongContextMixin, {trainer.__name__}), or, for DPOTrainer, use the callback in callbacks=[...] alone",
        lambda run: (
            {"name": found.__name__} for found in [trl_class(run.trainer)] if found is not None and is_scored(run.trainer)
        ),
        "trainer = of_trl('KTOTrainer')",
    ),
}


# class of TRL -> groups of columns; a training set has all columns of one group
_COLUMNS = {
    "SFTTrainer": (("input_ids",), ("messages",), ("conversations",), ("prompt", "completion"), ("text",)),
    "DPOTrainer": (("chosen", "rejected"), ("prompt_ids", "chosen_ids", "rejected_ids")),
    "RewardTrainer": (("chosen", "rejected"), ("chosen_ids", "rejected_ids")),
    "KTOTrainer": (("prompt", "completion", "label"), ("chosen", "rejected"), ("prompt_ids", "completion_ids", "label")),
    "GRPOTrainer": (("prompt",),),
    "RLOOTrainer": (("prompt",),),
}


# arguments that turn rows with any columns into those that a trainer reads
_MAKES_ROWS = ("formatting_func", "environment_factory", "rollout_func")


def unprepared_problems(trainer: type, args: Any, sets: dict[str, Any], given: dict[str, Any]) -> list[str]:
    """Problems with the sets given to a trainer of TRL for which its own constructor would fail with an error of Python.

    given: its other arguments.
    """
    name, problems = getattr(trl_class(trainer), "__name__", ""), []
    is_prepared = (getattr(args, "dataset_kwargs", None) or {}).get("skip_prepare_dataset")
    if is_prepared or any(given.get(each) is not None for each in _MAKES_ROWS):
        return []
    groups = (((args.dataset_text_field,),) if hasattr(args, "dataset_text_field") else ()) + _COLUMNS.get(name, ())
    for which, dataset in sets.items():
        columns = getattr(dataset, "column_names", None)
        if isinstance(columns, list) and groups and not any(set(group) <= set(columns) for group in groups):
            wanted = ", or ".join(" and ".join(group) for group in dict.fromkeys(groups))
            problems.append(f"{which} has the columns {listed(columns) or '(none)'}, and {name} reads {wanted}; rename them")
    return problems


def scored_temperature(trainer: Any) -> float:
    """The temperature of the distribution whose log-probabilities a trainer of TRL trains."""
    return float(getattr(trainer, "temperature", 1.0)) if generates(type(trainer)) else 1.0


def scored_loss(trainer: Any) -> TokenLoss | None:
    """The loss of a token that the second pass weighs; None for cross-entropy."""
    if getattr(trl_class(type(trainer)), "__name__", "") == "RewardTrainer":
        return OwnLogit()
    temperature = scored_temperature(trainer)
    return None if temperature == 1 else TemperedCrossEntropy(temperature)


def generates(trainer: type) -> bool:
    """Whether a trainer is one of TRL that generates the tokens of its loss, or a subclass of one."""
    found = trl_class(trainer)
    return found is not None and found.__name__ in _GENERATING


# settings with which every rank has the whole model
WHOLE = {"parameters": "replicated", "stages": 1}
# how a trainer of TRL leaves out the balance loss of a mixture of experts
NO_BALANCE = "set router_aux_loss_coef=0.0 in its arguments, which trains without that loss"

_NO_PAGES = "its paged attention replaces the model's", "generate without it"
_NO_BONUS = "an entropy bonus trains entropies, and plans train log-probabilities only", "leave it out"
# argument of TRL -> its supported values, why no other is and what to do, and a value that is refused
_SCORED_ARGUMENTS: dict[str, tuple[tuple[Any, ...], tuple[str, str], Any]] = {
    "use_transformers_continuous_batching": ((False,), _NO_PAGES, True),
    "use_transformers_paged": ((False, None), _NO_PAGES, True),
    "cast_lm_head_to_fp32": (
        (False,),
        ("it replaces the output head, whose tiles compute losses in fp32 anyway", "leave it out"),
        True,
    ),
    "entropy_coef": ((0.0,), _NO_BONUS, 0.01),
    "use_adaptive_entropy": ((False,), _NO_BONUS, True),
    "neftune_noise_alpha": ((None,), ("the two passes of a step would draw different noise", "leave it out"), 5.0),
}
_SET_THEIRS = "leave it out, and set per_device_train_batch_size and max_length of its arguments"


def _has_own(setting: str, default: Any, run: Facts) -> bool:
    return bool(getattr(run.config, setting) != default)


def _asked(setting: str, run: Facts) -> Any:
    return run.config.asked_stages if setting == "stages" else getattr(run.config, setting)


def _syncs(setting: str, needed: Any, run: Facts) -> bool:
    return bool(getattr(run.args, "sync_ref_model", False) and _asked(setting, run) != needed)


def _factor(run: Facts) -> Iterator[dict[str, float]]:
    if factor := getattr(run.args, "label_smoothing_factor", 0):
        yield {"factor": factor}


# settings and arguments under which losses of log-probabilities or of rewards cannot run
_SCORED_RULES = {
    **{
        f"scored-{argument.replace('_', '-')}": Rule(
            f"{argument}={{args.{argument}!r}} is not supported with {{trainer.__name__}}: {why}",
            remedy,
            partial(has_other, argument, allowed),
            f"args.{argument} = {refused!r}",
        )
        for argument, (allowed, (why, remedy), refused) in _SCORED_ARGUMENTS.items()
    },
    **{
        f"scored-{setting.replace('_', '-')}": Rule(
            f"{setting}={{config.{setting}!r}} has no effect, since {{trainer.__name__}} draws its batches itself",
            remedy,
            partial(_has_own, setting, default),
            f"config = LongContextConfig({setting}={other!r})",
        )
        for setting, default, other, remedy in (
            ("tokens_per_step", None, 4096, _SET_THEIRS),
            ("long_sequences", "error", "split", _SET_THEIRS),
            ("lookahead_batches", None, 4, "leave it out"),
            ("stream_readers", 1, 2, "leave it out"),
        )
    },
    **{
        f"synced-reference-and-{setting}": Rule(
            f"sync_ref_model=True is not supported with {setting}={{config.{setting}!r}}: TRL adds the policy's weights to those "
            f"of the reference, of which a rank has a part",
            f"set {setting}={needed!r}",
            partial(_syncs, setting, needed),
            f"args.sync_ref_model = True; config = LongContextConfig({setting}={other!r})",
        )
        for (setting, needed), other in zip(WHOLE.items(), ("sharded", 2), strict=True)
    },
    "scored-token-metrics": Rule(
        "token_metrics='on' has no effect, since {trainer.__name__} logs metrics of its own",
        "leave it out",
        lambda run: run.config.token_metrics == "on",
        "config = LongContextConfig(token_metrics='on')",
    ),
    "scored-label-smoothing": Rule(
        "label_smoothing_factor={factor!r} has no effect on the loss of {trainer.__name__}",
        "leave it out",
        _factor,
        "args.label_smoothing_factor = 0.1",
    ),
    "colocated-vllm": Rule(
        "vllm_mode={args.vllm_mode!r} keeps vLLM's weights and cache on the device while {trainer.__name__} trains, in memory "
        "that plans would use",
        "set vllm_enable_sleep_mode=True, or start a server (vllm serve) on other devices and set vllm_mode='server'",
        lambda run: (
            bool(getattr(run.args, "use_vllm", False)) and run.args.vllm_mode != "server" and not run.args.vllm_enable_sleep_mode
        ),
        "args.use_vllm = True; args.vllm_mode = 'colocate'; args.vllm_enable_sleep_mode = False",
    ),
    "generating-from-shards": Rule(
        "parameters={config.parameters!r} gathers weights on all ranks at a time, but {trainer.__name__} generates on every rank "
        "for as long as its own completions are",
        "generate on a server (use_vllm=True, vllm_mode='server'), or use parameters='replicated', with LoRA if memory is short",
        lambda run: (
            run.trainer.__name__ in _GENERATING
            and run.config.parameters != "replicated"
            and not getattr(run.args, "use_vllm", False)
        ),
        "trainer = of_trl('GRPOTrainer'); config = LongContextConfig(parameters='sharded')",
    ),
    "generating-in-stages": Rule(
        "stages={config.stages!r} leaves every rank a part of the model, with which {trainer.__name__} cannot generate",
        "use stages=1",
        lambda run: run.trainer.__name__ in _GENERATING and run.config.may_have_stages,
        "trainer = of_trl('GRPOTrainer'); config = LongContextConfig(stages=2)",
    ),
}


def dropped_weight_problems(known: ModelFacts) -> list[str]:
    """Problems with dropout of attention weights for losses of log-probabilities."""
    return [
        f"{field} is {rate}, so the two passes of a step would drop different weights; set it to 0.0 in the model's config"
        for field, rate in weight_rates(known.base.config.get_text_config()).items()
    ]


def scored_trainer_problems(trainer: Any, known: ModelFacts) -> list[str]:
    """Reasons why a trainer of TRL with a loss of log-probabilities cannot run under plans, after it has prepared its model."""
    model, name = known.model, getattr(trl_class(type(trainer)), "__name__", "")
    problems = []
    if name == "RewardTrainer" and known.head_kind != "document":
        problems.append(f"{name} was given a {known.name}, which has no reward per row; load ...ForSequenceClassification")
    if getattr(trainer, "_is_vision_dataset", False) or hasattr(trainer.processing_class, "image_processor"):
        problems.append(f"{name} was given images or a processor for images, but plans run rows of text alone; pass a tokenizer")
    if getattr(trainer, "aux_loss_enabled", False):
        problems += balance_problems(known.base, f"{name} adds the balance loss of the experts", NO_BALANCE)
        if trainer.longctx_config.lend_stages:
            problems.append(
                f"lend_stages=True does not support the balance loss of the experts, which {name} adds; {NO_BALANCE}, or leave "
                f"lend_stages out"
            )
    if drops := [where for where, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p]:
        problems.append(f"{drops[0]} drops, so the two passes of a step would draw different masks; set disable_dropout=True")
    # attention layers keep their rates outside of modules, where disable_dropout leaves them
    problems += dropped_weight_problems(known)
    if getattr(trainer, "use_vllm", False):
        problems += weight_problems(model)
        problems += _colocated_problems(trainer)
    if name in _WITH_LOGITS and trainer.compute_metrics is not None:
        given = {"reason": f"compute_metrics of {name} gets"}
        problems += refusals(_WHOLE_LOGITS, Facts(config=trainer.longctx_config, given=given))
    return problems + _reference_problems(name, model, getattr(trainer, "ref_model", None))


def _colocated_problems(trainer: Any) -> list[str]:
    """Problems with vLLM in the processes of a training whose ranks generate different numbers of times."""
    generation = trainer.vllm_generation
    if generation.mode != "colocate" or not getattr(trainer, "tools", None) or trainer.accelerator.num_processes == 1:
        return []
    found = {
        "parameters": (trainer.longctx_config.parameters, "replicated", "its shards are gathered on all ranks"),
        "vllm_tensor_parallel_size": (generation.tensor_parallel_size, 1, "ranks generate together"),
    }
    return [
        f"vllm_mode='colocate' with tools is not supported with {name}={value!r}: vLLM sleeps between the turns of a rank, so "
        f"each turn needs weights again, and {why}, but ranks have different numbers of turns; set {name}={needed!r}, or use a "
        f"server"
        for name, (value, needed, why) in found.items()
        if value != needed
    ]


# whole logits, which TRL computes in its own forward; `given` has the reason why they are needed
_WHOLE_LOGITS = {
    "whole-logits-of-trl": Rule(
        "{given[reason]} whole logits, which TRL computes by a forward of the whole model on every rank, but {setting}={value!r} "
        "leaves a rank a part of it",
        "set {setting}={needed!r}, or leave compute_metrics out, since rewards and log-probabilities are logged without it",
        lambda run: (
            {"setting": setting, "value": value, "needed": needed}
            for setting, needed in WHOLE.items()
            if (value := _asked(setting, run)) != needed
        ),
        "config = LongContextConfig(stages=2); given['reason'] = 'compute_metrics of DPOTrainer gets'",
    ),
}


def _reference_problems(name: str, model: Any, reference: Any) -> list[str]:
    """Problems with a reference model, which runs under the plans of the policy."""
    if reference is None:
        return []
    if is_adapted(model):
        return [
            f"{name} was given adapters and a ref_model; leave ref_model out: with its adapters switched off, the model is its "
            f"own reference"
        ]
    own, other = (each.config.get_text_config() for each in (model, reference))
    fields = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size", "layer_types")
    differing = [field for field in fields if getattr(own, field, None) != getattr(other, field, None)]
    if type(model) is not type(reference) or differing:
        return [
            f"ref_model is {type(reference).__name__} and the model {type(model).__name__}"
            + (f", and they differ in {', '.join(differing)}" if differing else "")
            + "; plans of the model serve its reference too, so give both the same class and shape"
        ]
    return []


# models that a trainer of TRL has prepared and that cannot run under plans
PREPARED = {
    "trl-and-loaded-stages": Rule(
        "a model of load_pipeline_stage is not tested with trainers of TRL",
        "pass the whole model",
        lambda run: run.known.loaded_ranges is not None,
        "model.longctx_ranges = (((0, 1),), ((1, 2),))",
    ),
    "trl-and-deferred-weights": Rule(
        "a model of load_sharded is not tested with trainers of TRL",
        "pass the whole model",
        lambda run: source_of(run.model) is not None,
        "model.longctx_source = 'checkpoints'",
    ),
    "trl-and-fp8": Rule(
        "frozen weights in fp8 are not tested with trainers of TRL",
        "leave frozen_weights out and load the model in bfloat16, or use LongContextTrainer",
        lambda run: run.config.frozen_weights == "fp8" or run.known.has_fp8,
        "config = LongContextConfig(frozen_weights='fp8')",
    ),
    "trl-and-four-bits": Rule(
        "four-bit weights are not tested with trainers of TRL",
        "use LongContextTrainer",
        lambda run: run.known.packs_weights,
        "model = in_four_bits(model)",
    ),
}


# trainers of TRL that do not train under the callback alone, by the class of their arguments
_OTHER_ALONE = {
    "other-config-of-trl": Rule(
        "{name} is for a trainer of TRL whose forwards are not tested under plans",
        f"use {' or '.join(_ALONE.values())}",
        lambda run: (
            {"name": found.__name__}
            for found in [trl_class(type(run.args))]
            if found is not None and found.__name__ not in _ALONE
        ),
        "args = of_trl('GRPOConfig')()",
    ),
}


def alone_problems(args: Any) -> list[str]:
    """Reasons why the trainer of TRL that takes these arguments cannot train under the callback alone."""
    if trl_class(type(args)) is None:
        return []
    facts = Facts(args=args)
    return refusals(_OTHER_ALONE, facts) or refusals(_TRL_VERSION | _OFFLOADING, facts)


def _shorter(run: Facts) -> Iterator[dict[str, int]]:
    limit = getattr(run.args, "max_length", None)
    if limit is not None and run.config.max_length is not None and limit < run.config.max_length:
        yield {"limit": limit}


# hooks on saved tensors, which would interfere with what plans offload and recompute
_OFFLOADING = {
    "activation-offloading": Rule(
        "activation_offloading=True would move tensors that plans offload themselves",
        "leave it out and set LongContextConfig(host_gib=...)",
        lambda run: bool(getattr(run.args, "activation_offloading", False)),
        "args.activation_offloading = True",
    ),
}
# arguments of SFTTrainer under which plans would not do its work
_SFT = {
    "sft-packing": Rule(
        "{name}=True makes rows of several documents, each of which plans would train as one document",
        "set {name}=False, since plans pack whole documents themselves, or use the callback in callbacks=[...] alone, which "
        "keeps TRL's rows",
        lambda run: ({"name": name} for name in ("packing", "eval_packing") if getattr(run.args, name, None)),
        "args.packing = True",
    ),
    "sft-loss-type": Rule(
        "loss_type={args.loss_type!r} is not the token mean of the cross-entropy that plans train",
        "set loss_type='nll', or use the callback in callbacks=[...] alone",
        lambda run: getattr(run.args, "loss_type", "nll") != "nll",
        "args.loss_type = 'dft'",
    ),
    "sft-label-smoothing": Rule(
        "label_smoothing_factor={factor!r} is not tested with trainers of TRL",
        "pass the loss of a token as token_loss=..., or use LongContextTrainer",
        _factor,
        "args.label_smoothing_factor = 0.1",
    ),
    "sft-max-length": Rule(
        "max_length={limit} of the SFTConfig cuts every row before plans see it, but LongContextConfig has max_length "
        "{config.max_length}",
        "set SFTConfig(max_length=None), or give both the same value",
        _shorter,
        "args.max_length = 1024; config = LongContextConfig(max_length=32768)",
    ),
}


def image_problems(trainer: Any) -> list[str]:
    """Problems with images in rows of an `SFTTrainer`, after it has prepared them."""
    limit = getattr(trainer.args, "max_length", None)
    given = trainer.eval_dataset
    sets = [trainer.train_dataset, *(given.values() if isinstance(given, dict) else [given])]
    if limit is not None and any(MEDIA in (getattr(each, "column_names", None) or ()) for each in sets):
        return [
            f"rows have images, but max_length={limit} of the SFTConfig cuts longer rows, perhaps inside an image, or drops them "
            f"before plans see them; set SFTConfig(max_length=None)"
        ]
    if not getattr(trainer, "_is_vision_dataset", False):
        return []
    return [
        f"rows have a column of images, which {_PLANNED} reads in its collator, and plans never call it; give the rows to "
        f"tokenise_chat and the processor first, whose result has their images in other columns"
    ]


def read_columns(trainer: type, dataset: Any, reads_all: bool) -> Any:
    """The dataset with weights and the columns that a collator of TRL reads; the same object if it has no others.

    dataset: also a dict of several. reads_all: the collator is a user's, which may read any column.
    """
    if reads_all:
        return dataset
    if isinstance(dataset, dict):
        read = {name: read_columns(trainer, each, reads_all) for name, each in dataset.items()}
        return dataset if all(read[name] is each for name, each in dataset.items()) else read
    is_known = isinstance(dataset, datasets.Dataset | datasets.IterableDataset) and dataset.column_names is not None
    if not is_planned(trainer) or not is_known or "input_ids" not in dataset.column_names:
        return dataset
    if isinstance(dataset, datasets.Dataset):
        columns = text_columns(dataset)
    else:
        features = dataset.features or {}
        columns = {name: getattr(features.get(name), "dtype", None) == "string" for name in dataset.column_names}
    # columns with which a user means to mask or weigh tokens are kept, and the scan refuses them
    refused = [
        name
        for name, is_text in columns.items()
        if name not in _PREPARED and named_column_problem({name: is_text}, "", allowed=("label", "labels"))
    ]
    names = [name for name in dataset.column_names if name in (*_READ, LOSS_WEIGHTS, MEDIA, MEDIA_FILES, *refused)]
    return dataset if len(names) == len(dataset.column_names) else dataset.select_columns(names)
