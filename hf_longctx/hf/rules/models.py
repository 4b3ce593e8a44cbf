"""Checks a model's class, attention pattern, settings and padding token against those that are tested to equal transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin
from transformers.trainer_utils import align_special_tokens

from hf_longctx.families.registry import family_of_type
from hf_longctx.hf.checkpoints.deferred import source_of
from hf_longctx.hf.data.labels import Problem
from hf_longctx.hf.data.streams.sources import is_stream
from hf_longctx.hf.models.adapters import (
    adapter_problems,
    hidden_dtype,
    is_adapted,
    kind_problems,
    mixed_problems,
    own_dtypes,
)
from hf_longctx.hf.models.attention import attention_problems
from hf_longctx.hf.models.compressed import COMPRESSED_LAYERS, compressed_problems, compressing_attention
from hf_longctx.hf.models.document_rope import DOCUMENT_ROPE_TYPES, document_rope_problems
from hf_longctx.hf.models.dropout import dropout_problems, keyed_fields
from hf_longctx.hf.models.expert_adapters import expert_adapter_problems
from hf_longctx.hf.models.experts import router_problems
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.heads import HeadKind, inner_model
from hf_longctx.hf.models.index import INDEXED_LAYERS, index_problems, indexed_attention
from hf_longctx.hf.models.own_attention import own_attention_problems
from hf_longctx.hf.models.quantised import quantised_problems
from hf_longctx.hf.models.rope import rope_problems
from hf_longctx.hf.models.spec import decoder_layers
from hf_longctx.hf.models.states import state_problems
from hf_longctx.hf.models.towers import tower_parameters, wrapper_family
from hf_longctx.hf.rules.classes import class_problem, code_of
from hf_longctx.hf.rules.rule import Facts, Rule, refusals
from hf_longctx.runtime.core.binding import class_name
from hf_longctx.runtime.core.loss import OwnLogit

TESTED_ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")

# tokens that a tokenizer may give a model's config
_SPECIAL_TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id")
_LAYER_TYPES = ("full_attention", "sliding_attention")
# words in names of config fields by which forwards draw random numbers, which plans would apply to other tokens
_CHANCES = ("dropout", "pdrop", "layerdrop", "jitter")
# fields with such a word that are checked elsewhere, or that only task heads other than the language model's read
_UNUSED_CHANCES = (
    "router_jitter_noise",
    "classifier_dropout",
    "classifier_dropout_prob",
    "summary_first_dropout",
    "summary_last_dropout",
    # parts that rows of text skip have it
    "aligner_attention_probs_dropout_prob",
)
# field -> the tested value, and the remedy for others
_TESTED_SETTINGS: dict[str, tuple[Any, str]] = {
    "is_encoder_decoder": (False, "use a decoder-only model"),
    "add_cross_attention": (False, "set it to False, cross attention is not supported"),
    "z_loss_coefficient": (0.0, "set it to 0.0, plans train cross-entropy alone"),
}


def lacking_problems(facts: ModelFacts) -> list[str]:
    """Problems of a model that has nothing to train, because its config or its loading left that out."""
    model = facts.model
    if not decoder_layers(model)[1]:
        return [f"{facts.name} has no decoder layers (num_hidden_layers=0); give its config at least one layer"]
    if partitioned := [name for name, weight in model.named_parameters() if hasattr(weight, "ds_id")]:
        return [
            f"DeepSpeed has partitioned {len(partitioned)} weights (first {partitioned[0]}), as it does while TrainingArguments "
            f"with ZeRO stage 3 exist; load the model before these are made, or make them of what "
            f"hf_longctx.from_deepspeed(file) returns"
        ]
    empty = [name for name, weight in model.named_parameters() if weight.is_meta]
    if empty and source_of(model) is None and facts.loaded_ranges is None:
        return [
            f"{len(empty)} weights have no values, since they are on torch's meta device (first {empty[0]}); load the model "
            f"without device_map='meta', or by hf_longctx.load_sharded"
        ]
    return []


def model_problems(facts: ModelFacts, is_trained: bool = True) -> list[str]:
    """Reasons why this model would not run correctly; empty for a tested class with a tested attention pattern.

    is_trained: false for a model that only runs forward.
    """
    model, base, text, name = facts.model, facts.base, facts.text, facts.name
    if kinds := kind_problems(model):
        return kinds
    if problem := class_problem(base):
        return [problem]
    if not code_of(type(base)).__module__.startswith("transformers."):
        return [
            f"model class {name} comes from {type(base).__module__}, but only the class of transformers is tested; use that one"
        ]
    if quantised := quantised_problems(model, is_trained):
        # all other problems would only be consequences of these
        return quantised
    config = base.config
    problems = [*attention_problems(text), *adapter_problems(model), *expert_adapter_problems(model), *_pattern_problems(facts)]
    problems += [*own_attention_problems(text), *state_problems(text), *router_problems(base)]
    problems += index_problems(text) + compressed_problems(text, _rope_types(config) & set(DOCUMENT_ROPE_TYPES))
    problems += _two_sided_problems(config) + _setting_problems(config, keyed_fields(facts.family)) + dropout_problems(text)
    problems += [
        f"rope type {rope_type!r} is not supported; use one of {', '.join(TESTED_ROPE_TYPES)}"
        for rope_type in sorted(_rope_types(config) - set(TESTED_ROPE_TYPES))
    ]
    problems += [
        f"rope type {rope_type!r} of {name} is scaled again by the longest position of each forward, which depends on the plan; "
        f"use rope type 'default'"
        for rope_type in sorted((_rope_types(config) & set(TESTED_ROPE_TYPES)) - {"default"})
        if facts.family.default_rope_only
    ]
    if not facts.family.default_rope_only:
        problems += document_rope_problems(text, _rope_types(config) & set(DOCUMENT_ROPE_TYPES))
    problems += rope_problems(text)
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        problems.append(
            "activation (gradient) checkpointing is enabled on the model, but plans decide what is recomputed; call "
            "model.gradient_checkpointing_disable(), or, with gradient_checkpointing=True in the arguments, pass the callback in "
            "callbacks=[...] in place of add_callback"
        )
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()):
        problems.append("the model is compiled, which is not supported yet; pass a model that is not compiled")
    towers = {id(parameter) for parameter in tower_parameters(model)}
    if is_trained and not any(weight.requires_grad for weight in model.parameters() if id(weight) not in towers):
        problems.append(_frozen_problem(facts))
    dtypes, added = own_dtypes(model)
    if mixed := mixed_problems(model):
        problems += mixed
    elif len(added) > 1 or not added <= dtypes | {torch.float32}:
        problems.append(
            f"the adapters have weights of {', '.join(sorted(map(str, added)))} on a model of {hidden_dtype(model)}; make all of "
            f"them float32 (get_peft_model's default) or all of the model's dtype (autocast_adapter_dtype=False)"
        )
    return problems


def _frozen_problem(facts: ModelFacts) -> str:
    """Returns why no weight of a model is trained, as far as the weights show it."""
    model, name = facts.model, facts.name
    if is_adapted(model):
        active = [str(name) for name in model.active_adapters]
        named = f"the adapter {', '.join(active)} is" if len(active) == 1 else f"the adapters {', '.join(active)} are"
        if any(model.peft_config[name].inference_mode for name in active):
            return (
                f"{named} there for inference (inference_mode=True), which freezes every weight; load it with "
                f"PeftModel.from_pretrained(..., is_trainable=True), or make it with LoraConfig(inference_mode=False)"
            )
        return f"{named} frozen (requires_grad=False), and so is all else; call model.set_adapter({(active or [''])[0]!r})"
    if any(parameter.requires_grad for parameter in model.parameters()):
        return f"only towers of {name} are trained, which rows of text do not reach; unfreeze its text model, or adapt that"
    return (
        f"all weights of {name} are frozen (requires_grad=False), as merge_and_unload() and requires_grad_(False) leave them; "
        f"call model.requires_grad_(True), or train adapters: get_peft_model(model, LoraConfig(...))"
    )


def _pattern_problems(facts: ModelFacts) -> list[str]:
    """Problems with attention patterns that the model never passes to the attention function, which would ignore them."""
    config, text, around = facts.base.config.get_text_config(), facts.text, wrapper_family(facts.base)
    # "vision" lets tokens of images see each other; without images it has no effect
    value = getattr(config, "use_bidirectional_attention", None)
    if value not in (None, False, "vision") and not around.causal_on_text:
        return [f"use_bidirectional_attention is set to {value!r}, but only causal attention is supported; unset it"]
    layer_types = getattr(config, "layer_types", None) or ()
    never = {
        getattr(each, name) for each in text.modules() if (name := facts.family.modules.second_attention.get(class_name(each)))
    }
    problems = [
        f"{name} lets tokens see later ones (is_causal=False), but only causal attention is supported; build the model with "
        f"is_decoder=True in its config"
        for name, module in text.named_modules()
        if getattr(module, "is_causal", True) is False and getattr(module, "layer_idx", None) is not None and module not in never
        if not around.causal_on_text
    ][:1]
    known = (*_LAYER_TYPES, *around.prompt_window_types, *(["chunked_attention"] if facts.family.attention_chunks else []))
    known += (INDEXED_LAYERS,) if indexed_attention(text) else ()
    known += COMPRESSED_LAYERS if compressing_attention(text) else ()
    known += (mixer.layer_type, *mixer.other_types) if (mixer := facts.mixer) else ()
    problems += [
        f"layer_types has {layer_type!r}, which is not supported in {facts.name}; use a model whose layers are all of "
        f"type {' or '.join(known)}"
        for layer_type in sorted(set(layer_types) - set(known))
    ]
    if "chunked_attention" in known and not (size := config.attention_chunk_size):
        problems.append(f"attention_chunk_size is {size}, for which {facts.name} has no masks; set a positive number")
    for module in text.modules():
        layer = getattr(module, "layer_idx", None)
        if not hasattr(module, "sliding_window") or layer is None or layer >= len(layer_types):
            continue
        has_window = bool(module.sliding_window) and getattr(module, "is_sliding", True)
        if (layer_types[layer] in ("sliding_attention", *COMPRESSED_LAYERS)) != has_window:
            problems.append(
                f"layer {layer} is {layer_types[layer]!r} in layer_types, but its window is {module.sliding_window}; "
                f"make sliding_window, use_sliding_window and layer_types agree"
            )
    return problems


def _two_sided_problems(config: PretrainedConfig) -> list[str]:
    """Problems with sizes that a config has for an encoder and a decoder, if plans would read the encoder's for the decoder."""
    text = config.get_text_config()
    pairs = ((name, name.replace("encoder_", "decoder_", 1)) for name in text.attribute_map.values() if name[:8] == "encoder_")
    return [
        f"{ours} is {getattr(text, ours)!r} but {name} is {getattr(text, name)!r}, and common settings of this class read the "
        f"latter; set {name} of the config to {getattr(text, ours)!r}, which changes nothing in a decoder alone"
        for name, ours in sorted({*pairs})
        if hasattr(text, ours) and getattr(text, ours) != getattr(text, name)
    ]


def _setting_problems(config: PretrainedConfig, keyed: Sequence[str]) -> list[str]:
    """Problems with fields of a tested class's config that have untested values; `keyed` fields may have any rate."""
    text = config.get_text_config()
    skipped = text.sub_configs if family_of_type(text.model_type).modules.idle_on_text else ()
    values = {name: value for name, value in text.to_dict().items() if name not in skipped}
    problems = [
        f"{field} is {value}; set it to 0.0, {'dropout' if 'drop' in field else 'noise'} is not supported yet"
        for field, value in sorted(_all_fields(values))
        if _is_chance(field.rsplit(".", 1)[-1]) and isinstance(value, float) and value and field not in keyed
    ]
    return problems + [
        f"{field} is {values[field]!r}, which is not supported; {remedy}"
        for field, (tested, remedy) in _TESTED_SETTINGS.items()
        if field in values and values[field] is not None and values[field] != tested
    ]


def _all_fields(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """The fields of a config and of its nested parts, under dotted names."""
    parts = [_all_fields(value, f"{prefix}{name}.") for name, value in values.items() if isinstance(value, dict)]
    own = [(f"{prefix}{name}", value) for name, value in values.items() if not isinstance(value, dict)]
    return own + [field for part in parts for field in part]


def _is_chance(name: str) -> bool:
    return any(word in name for word in _CHANCES) and name not in _UNUSED_CHANCES


def _rope_types(config: PretrainedConfig) -> set[str]:
    """The rope types of all layers; some models have one for each type of layer."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    per_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    return {each.get("rope_type", "default") for each in per_layer_type or [parameters]}


# settings that have no effect on a classifier; given: the sets by name, and the user's token_loss
_CLASSIFIERS = {
    "classifier-of-a-stream": Rule(
        "{name} is an iterable dataset, which is not supported for a model that classifies {task.kind}s",
        "pass a map-style one",
        lambda run: ({"name": name} for name, each in run.given["datasets"].items() if each is not None and is_stream(each)),
        "given['datasets'] = {'train_dataset': stream([{'input_ids': [1, 2], 'labels': 0}])}",
    ),
    "classifier-of-split-rows": Rule(
        "long_sequences='split' makes several documents of one row, but a row has one label",
        "use 'truncate' or 'error'",
        lambda run: run.task.kind == "document" and run.config.long_sequences == "split",
        "config = LongContextConfig(long_sequences='split')",
    ),
    "classifier-and-token-metrics": Rule(
        "token_metrics='on' counts next tokens, which a model that classifies {task.kind}s does not predict",
        "leave it out, and give the trainer compute_metrics",
        lambda run: run.config.token_metrics == "on",
        "config = LongContextConfig(token_metrics='on')",
    ),
    "smoothing-of-numbers": Rule(
        "label_smoothing_factor={args.label_smoothing_factor!r} smooths classes, but labels of problem_type {task.problem!r} are "
        "numbers",
        "leave it out",
        lambda run: run.task.has_values and bool(run.args.label_smoothing_factor),
        "args.label_smoothing_factor = 0.1; task = HeadTask('document', 1, 'regression')",
    ),
    "token-loss-of-numbers": Rule(
        "token_loss gets classes, but labels of problem_type {task.problem!r} are numbers",
        "leave it out, or set problem_type of the config to 'single_label_classification'",
        lambda run: run.task.has_values and not isinstance(run.given["token_loss"], OwnLogit | None),
        "given['token_loss'] = print; task = HeadTask('document', 1, 'regression')",
    ),
}
_PROBLEM_TYPE = {
    "problem-type": Rule(
        "problem_type of the model's config is {task.problem!r}",
        f"set it to one of {', '.join(get_args(Problem))}",
        lambda run: run.task.problem not in get_args(Problem),
        "task = HeadTask('document', 2, 'ranking')",
    ),
}


def classifier_problems(facts: Facts) -> list[str]:
    """Problems with settings that have no effect on a classifier; empty for a language model."""
    if facts.task.kind == "next_token":
        return []
    return refusals(_PROBLEM_TYPE, facts) or refusals(_CLASSIFIERS, facts)


def align_padding(kind: HeadKind, base: Any, processing_class: Any) -> Callable[[], None]:
    """Gives a model that classifies documents the special tokens of its tokenizer, in its config, as `Trainer.train` does.

    Call it before `task_of` reads the padding token: the label belongs to the last token that is no padding. Returns the
    function that undoes it.
    """
    if kind != "document" or not isinstance(processing_class, PreTrainedTokenizerBase | ProcessorMixin):
        return lambda: None
    owners = [each for each in (base.config.get_text_config(), getattr(base, "generation_config", None)) if each is not None]
    before = [(owner, name, getattr(owner, name, None)) for owner in owners for name in _SPECIAL_TOKENS]
    align_special_tokens(base, processing_class)

    def undo() -> None:
        for owner, name, value in before:
            setattr(owner, name, value)

    return undo


def _padding_of(run: Facts) -> int | None:
    found: int | None = inner_model(run.model).config.get_text_config().pad_token_id
    return found


# changes after labels were placed; ask after `align_padding`
PADDING = {
    "changed-padding": Rule(
        "the padding token of the model or its tokenizer was changed from {task.pad_token_id} to {now} after the start, and "
        "labels of documents stand on the last token that is no padding",
        "change it back, or make a new trainer",
        lambda run: [{"now": now}] if run.task.kind == "document" and (now := _padding_of(run)) != run.task.pad_token_id else (),
        "model.config.pad_token_id = 7",
    ),
}
