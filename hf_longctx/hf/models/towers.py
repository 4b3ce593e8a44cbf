"""Finds the text model inside a multimodal model (a "wrapper") and lets plans run rows of text through it alone.

A wrapper has towers that encode images, sound or video, a text model, and a head. For a row without such input it only passes
the embeddings of the tokens to the text model. Under a plan the module around the text model therefore calls it directly: the
text model embeds the tokens itself and gets the plan's positions, and no masks or positions for images are made. Without a plan
every forward stays that of its class.

The towers take no part in such rows. They are frozen while a run lasts, so that no optimizer changes them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import ModelOutput

from hf_longctx.families.family import Family
from hf_longctx.families.registry import MODULES, WRAPPED_MODELS, family_of, family_of_type
from hf_longctx.hf.models.forwards import give, has, take
from hf_longctx.hf.models.heads import backbone_of, head_kind, head_of, inner_model
from hf_longctx.runtime.core.binding import class_name
from hf_longctx.runtime.execution.stage_model import LAYER_RANGE_KEYWORD

# attribute of the module around a text model: the text model's name there, and the class of the multimodal model
_TEXT = "_longctx_text"
# attribute of attention that was marked as causal
_MARKED = "_longctx_causal"
# keywords that every text model takes, some of them without naming them
_PASSED = ("longctx", LAYER_RANGE_KEYWORD, "num_items_in_batch", "return_dict", "shift_labels")
# keywords that hold no input of a tower; they are left out for a text model that does not take them
_DROPPED = ("labels", "shift_labels", "num_items_in_batch", "logits_to_keep")
# fields of a wrapper's config with the ids of tokens whose embeddings a tower would replace
_PLACEHOLDER = re.compile(r"(image|video|audio)_(token_id|token_index|patch_id)")

# beginning of the names of Chameleon's tokens for parts of an image
_IMAGE_PART = "IMGIMG"
# inputs of text models that demand images: one of the first three, and the images that each token reads
_IMAGES = ("pixel_values", "image_encoder_embeddings", "perceiver_embeddings", "image_attention_mask")
# field of a tower's config: the first token that the tower embeds
_FIRST_TOKEN = "vocab_offset"


def wrapper_of(model: nn.Module) -> PreTrainedModel | None:
    """The multimodal model of a tested class inside adapters and other wrappers; None for models of text alone."""
    base = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    return base if base is not None and _known_class(base) else None


def _known_class(base: nn.Module | None) -> str:
    """Name of the tested multimodal class of a model, whose own class may come from it; empty for others."""
    # sharding puts a class of torch in front of the model's own
    return next((each.__name__ for each in type(base).__mro__ if each.__name__ in WRAPPED_MODELS), "")


def wrapper_family(model: nn.Module) -> Family:
    """The family of the multimodal class inside adapters and other wrappers; one without facts for models of text alone."""
    return family_of(_known_class(wrapper_of(model)))


def text_part(model: nn.Module) -> Any:
    """The text model inside a wrapper, or any other model itself.

    If the text model has the head, it is a causal language model; else the wrapper has the head.
    """
    wrapper = wrapper_of(model)
    return model if wrapper is None else wrapper.get_submodule(text_path(wrapper))


def text_path(wrapper: PreTrainedModel) -> str:
    """Name of the text model in a wrapper."""
    names = {id(module): name for name, module in wrapper.named_modules()}
    owner: str = names[id(head_of(wrapper))].rpartition(".")[0]
    return owner or names[id(wrapper.get_decoder())]


def text_class(model: nn.Module) -> str:
    """Class name of the causal language model with the same text model: LlamaForCausalLM for a LlamaModel in a wrapper.

    For a causal language model itself, the name of its class.
    """
    if head_kind(model) != "next_token":
        return _causal_name(backbone_of(inner_model(model)))
    name = type(text_part(model)).__name__
    return name if wrapper_of(model) is None else _causal_name(text_part(model))


def text_family(model: nn.Module) -> Family:
    """The family of a model's decoder: of its causal language model or, if there is none, of the multimodal class."""
    found = family_of(text_class(model))
    return found if found.folder else wrapper_family(model)


def _causal_name(text: nn.Module) -> str:
    return re.sub(r"^(FSDP)?(.+?)(Text)?Model$", r"\2ForCausalLM", type(text).__name__)


def text_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a model in order, even inside wrappers, without layers of towers and layers inside of others."""
    text = text_part(model)
    layers = [module for module in text.modules() if isinstance(module, GradientCheckpointingLayer)]
    inner = {id(module) for layer in layers for module in layer.modules() if module is not layer}
    inner |= {id(module) for tower in _inner_towers(text).values() for module in tower.modules()}
    return [layer for layer in layers if id(layer) not in inner]


def num_text_layers(model: Any) -> int:
    """Number of decoder layers that rows of text run, as the config of a whole model says it."""
    skipped = [tower for tower in _inner_towers(text_part(model)).values() if isinstance(tower, GradientCheckpointingLayer)]
    return int(model.config.get_text_config().num_hidden_layers) - len(skipped)


def _inner_towers(text: nn.Module) -> dict[str, nn.Module]:
    """The parts of a text model that rows of text never run, by their names."""
    towers = {name: module for name, module in text.named_modules() if class_name(module) in MODULES.idle_on_text}
    return towers | _image_attention(text)


def _image_attention(text: nn.Module) -> dict[str, nn.Module]:
    """Attention to images in layers that mask its result for tokens that read none, by its names."""
    known = MODULES.image_attention
    found = [(name, module, key) for name, module in text.named_modules() if (key := known.get(class_name(module)))]
    return {f"{name}.{key}": getattr(module, key) for name, module, key in found}


def tower_names(model: nn.Module) -> list[str]:
    """Names of the largest modules that rows of text never run, in the model of transformers; empty for most models of text."""
    base: Any = inner_model(model)
    names = {id(module): name for name, module in base.named_modules()}
    inside = [names[id(module)] for module in _inner_towers(base).values()]
    if wrapper_of(model) is None:
        return inside
    text, head = text_path(base), names[id(head_of(base))]
    kept = [text] if head.startswith(f"{text}.") else [text, head]
    around = {"", *(".".join(name.split(".")[:depth]) for name in kept for depth in range(1, name.count(".") + 1))}
    outside = [name for name in names.values() if name and name not in (*kept, *around) and name.rpartition(".")[0] in around]
    return outside + [name for name in inside if name.startswith(f"{text}.")]


def tower_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that rows of text never reach: outside of a wrapper's text model and head, or of towers in a text model."""
    base = inner_model(model)
    parts = [text_part(base), *([head] if (head := head_of(base)) is not None else [])]
    own = {id(parameter) for part in parts for parameter in part.parameters()}
    own -= {id(parameter) for tower in _inner_towers(base).values() for parameter in tower.parameters()}
    yield from (parameter for parameter in base.parameters() if id(parameter) not in own)


def unit_classes(model: Any, gathers_towers: bool) -> tuple[str, ...]:
    """Names of the classes whose modules are units of shards: as the model's class says.

    gathers_towers: without those of towers, which then belong to the unit of the rest and are gathered by every forward, so that
    ranks may run them equally often or not.
    """
    names: Iterable[str] = model._no_split_modules or ()
    if not gathers_towers:
        return tuple(names)
    wrapper: Any = wrapper_of(model)
    in_towers = {type(module).__name__ for name in tower_names(model) for module in wrapper.get_submodule(name).modules()}
    return tuple(name for name in names if name not in in_towers)


def freeze_towers(model: nn.Module) -> Callable[[], None]:
    """Freezes a wrapper's towers, including adapters on them; returns the function that undoes it."""
    frozen = [parameter for parameter in tower_parameters(model) if parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)

    def undo() -> None:
        for parameter in frozen:
            parameter.requires_grad_(True)

    return undo


class TextPatch:
    """Makes the module around a wrapper's text model call it directly under plans."""

    def needed(self, model: nn.Module) -> bool:
        """Whether `model` is a multimodal model."""
        return wrapper_of(model) is not None

    def apply(self, model: nn.Module) -> None:
        """Raises ValueError for a forward of others around the text model."""
        wrapper = wrapper_of(model)
        assert wrapper is not None
        path = text_path(wrapper)
        parent, _, name = path.rpartition(".")
        around = wrapper.get_submodule(parent)
        if around is wrapper and head_of(wrapper) not in set(wrapper.get_submodule(path).modules()):
            # it calls the text model with all that it gets, and then its head
            return
        if "forward" in vars(around) and not has(around, _forward):
            raise ValueError(
                f"the forward of {parent or 'the model'} ({type(around).__name__}) was replaced, which plans of a multimodal "
                f"model would leave out; remove it, and if mixed precision of accelerate has done it, use LongContextTrainer or "
                f"`attach`"
            )
        if wrapper_family(wrapper).causal_on_text:
            for module in text_part(wrapper).modules():
                if vars(module).get("is_causal") is False:
                    vars(module)["is_causal"] = vars(module)[_MARKED] = True
        # by name, so that it works on a copy of the model too
        vars(around).setdefault(_TEXT, (name, _known_class(wrapper)))
        give(around, _forward)

    def undo(self, model: nn.Module) -> None:
        """Leaves a forward that accelerate has wrapped, which then runs that of the class."""
        for module in model.modules():
            if vars(module).pop(_TEXT, None) is not None:
                take(module, _forward)
            if vars(module).pop(_MARKED, False):
                vars(module)["is_causal"] = False


def placeholder_ids(config: PretrainedConfig) -> tuple[int, ...]:
    """Token ids that stand for images, sound or video in rows of a multimodal model; none for the config of a text model."""
    if config.get_text_config() is config and not family_of_type(config.model_type).wrapper:
        return ()
    found = [getattr(config, name) for name in config.to_dict() if _PLACEHOLDER.fullmatch(name)]
    # a negative number means none
    ids = {value for value in found if isinstance(value, int) and value >= 0}
    # tokens that are an image themselves, and whose logits the class hides
    named = getattr(config, "vocabulary_map", None) or {}
    ids |= {token for name, token in named.items() if name.startswith(_IMAGE_PART)}
    # towers of Gemma 3n embed the last tokens of the vocabulary, without any image or sound
    firsts = [first for part in config.sub_configs if (first := getattr(getattr(config, part, None), _FIRST_TOKEN, None))]
    ids |= set(range(min(firsts), config.get_text_config().vocab_size)) if firsts else set()
    return tuple(sorted(ids))


def _forward(around: Any, *args: Any, **keywords: Any) -> Any:
    """The forward of the module around a text model: its class's own or, under a plan, the text model's."""
    if _TEXT not in vars(around):
        return type(around).forward(around, *args, **keywords)
    name, wrapper = vars(around)[_TEXT]
    text, family = getattr(around, name), family_of(wrapper)
    named = inspect.signature(type(around).forward).bind_partial(around, *args).arguments if args else {}
    given = {name: value for name, value in (named | keywords).items() if value is not None and value is not around}
    taken = {*_PASSED, *inspect.signature(type(text).forward).parameters}
    inputs = [name for name, value in given.items() if isinstance(value, Tensor) and name not in (*taken, *_DROPPED)]
    if keywords.get("longctx") is None and LAYER_RANGE_KEYWORD not in keywords:
        if family.given_on_text and not inputs and not family.given_on_text.keys() & given.keys():
            keywords |= {name: _nothing(kind, given, text) for name, kind in family.given_on_text.items()}
            # some parameters for images have no default
            parameters = inspect.signature(type(around).forward).parameters.values()
            own = list(parameters)[len(args) + 1 :]
            keywords = {
                each.name: None for each in own if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
            } | keywords
        with _completed(text, family):
            return type(around).forward(around, *args, **keywords)
    if inputs:
        raise ValueError(
            f"{type(around).__name__} got {', '.join(inputs)} under a plan, but plans train rows of text alone; leave images, "
            f"sound and video out"
        )
    if family.first_position and "position_ids" in given:
        given["position_ids"] = given["position_ids"] + family.first_position
    # plans switch outputs off, whether or not the class names them
    is_off = {name for name, value in given.items() if value is False and name.startswith("output_")}
    output = text(**{name: value for name, value in given.items() if name in taken or name in is_off})
    return output if hasattr(output, "logits") else _TextOutput(output)


def _nothing(kind: str, given: dict[str, Any], text: Any) -> Any:
    """Input that stands for no images in a row of text, for a forward that asks for images in every row."""
    if kind == "zeros":
        row = given["input_ids"] if "input_ids" in given else given["inputs_embeds"][..., 0]
        return torch.zeros_like(row, dtype=torch.int64)
    embedding: Any = text.get_input_embeddings()
    features_0C = embedding.weight.new_empty(0, embedding.weight.shape[1])
    if kind == "no_features":
        return features_0C
    return dict.fromkeys(
        ("image", "video"), SimpleNamespace(pooler_output=features_0C, qformer_outputs=None, vision_outputs=None)
    )


@contextmanager
def _completed(text: Any, family: Family) -> Iterator[None]:
    """Context that adds empty images to the text model's output: the class around it reads them, transformers 5.24 omits them."""
    if not family.reads_image_outputs:
        yield
        return
    own, run = vars(text).get("forward"), text.forward

    def forward(*args: Any, **keywords: Any) -> Any:
        output = run(*args, **keywords)
        if isinstance(output, ModelOutput) and not hasattr(output, "image_outputs"):
            output.image_outputs = None
        return output

    vars(text)["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del vars(text)["forward"]
        else:
            vars(text)["forward"] = own


class _TextOutput:
    """Output of a text model for the head of a wrapper; fields that only towers fill are None."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getitem__(self, key: Any) -> Any:
        return self._own[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._own, name, None)


class ForwardsPatch:
    """Patch that gives modules of the text model forwards that run plans."""

    def forwards(self, text: nn.Module) -> list[tuple[Any, Any]]:
        """Every module that gets a forward of its own, with the function."""
        raise NotImplementedError

    def problems(self, text: nn.Module) -> list[str]:
        """Returns why plans cannot run these modules; empty if they can."""
        return []

    def needed(self, model: nn.Module) -> bool:
        """Whether the text model has such modules."""
        return bool(self.forwards(text_part(model)))

    def apply(self, model: nn.Module) -> None:
        """Raises ValueError for the first of `problems`, and for a forward of others on such a module."""
        text = text_part(model)
        if problems := self.problems(text):
            raise ValueError(problems[0])
        for module, forward in self.forwards(text):
            give(module, forward)

    def undo(self, model: nn.Module) -> None:
        """Leaves a forward that accelerate has wrapped in the meantime."""
        for module, forward in self.forwards(text_part(model)):
            take(module, forward)


class NoImagesPatch(ForwardsPatch):
    """Lets a text model that demands images run rows of text, and leaves attention to images out under plans."""

    def forwards(self, text: nn.Module) -> list[tuple[Any, Any]]:
        """Models that demand images, and attention whose result is masked without them."""
        models = [module for module in text.modules() if class_name(module) in MODULES.demands_images]
        return [
            *((module, _forward_without_images) for module in models),
            *((module, _masked_forward) for module in _image_attention(text).values()),
        ]


def _forward_without_images(text: Any, *args: Any, **keywords: Any) -> Any:
    """The forward of a text model; a row without images gets features of one that no token reads.

    Raises ValueError for images under a plan.
    """
    named = inspect.signature(type(text).forward).bind_partial(text, *args).arguments if args else {}
    given = {name: value for name, value in (named | keywords).items() if value is not None and value is not text}
    images = [name for name in _IMAGES if name in given]
    if images and "longctx" in given:
        raise ValueError(
            f"{type(text).__name__} got {', '.join(images)} under a plan, but plans train rows of text alone; leave images out"
        )
    if not images:
        tokens: Tensor = given["input_ids"] if "input_ids" in given else given["inputs_embeds"]
        B, T = tokens.shape[:2]
        name = "perceiver_embeddings" if text.config.use_resampler else "image_encoder_embeddings"
        given[name] = torch.zeros(B, 1, text.config.vision_config.embed_dim, dtype=text.dtype, device=tokens.device)
        given["image_attention_mask"] = torch.zeros(B, T, 1, dtype=torch.int64, device=tokens.device)
    return type(text).forward(text, **given)


def _masked_forward(attention: Any, hidden_states: Tensor, *args: Any, **keywords: Any) -> tuple[Tensor, Tensor | None]:
    """The forward of attention to images; under a plan returns its input, which the layer then masks for every token."""
    if keywords.get("longctx") is not None:
        return hidden_states, None
    mask = keywords.get("attention_mask")
    if mask is not None and mask.dtype == torch.float64:
        # the class's softmax in fp32 would take the least number of fp64 for infinity, and return NaN
        keywords["attention_mask"] = mask.clamp(min=torch.finfo(torch.float32).min)
    output: tuple[Tensor, Tensor | None] = type(attention).forward(attention, hidden_states, *args, **keywords)
    return output
