"""Says why models of a class cannot run under plans, by the records in `families`.

A class is listed as tested if tiny models of it, with every kind of layer that its default config has, give the same loss and
gradients as plain Hugging Face: packed, in slices, recomputed, in stages, on sequence groups, on rings and sharded. A tested
class may also refuse some of these, with an error that names them. A sweep of tests over all classes proves it, and
`docs/models.md` lists the error that was measured for each class.
"""

from __future__ import annotations

import re
from types import FunctionType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_longctx.families.family import Reason
from hf_longctx.families.refused import REASONS
from hf_longctx.families.registry import TESTED_MODELS, family_of
from hf_longctx.hf.models.forwards import is_of_transformers
from hf_longctx.hf.models.heads import head_kind, is_generic
from hf_longctx.hf.models.towers import text_class, text_part
from hf_longctx.runtime.core.binding import class_name

_REMEDY = "use a class that docs/models.md calls exact, such as LlamaForCausalLM, MistralForCausalLM or Qwen3ForCausalLM"


def class_problem(model: nn.Module) -> str:
    """Returns why models of this class cannot run under plans, with class and layer; empty for a tested class.

    A class that adds no code to a tested one counts as tested, for example a class of a repository with its own config.
    """
    name = code_of(type(model)).__name__
    family, reason = family_of(name), reason_of(name)
    if name == family.causal:
        return _decoder_problem(model)
    if name == family.wrapper:
        return _text_problem(model)
    if reason is not None and not reason.summary:
        return f"model class {name} is not supported: it {reason.text}. Instead, {_REMEDY}"
    if head_kind(model) != "next_token":
        return _classifier_problem(model)
    if reason is None:
        hint = next((found for found in map(lambda each: layer_of(model, each), REASONS.values()) if found), "")
        return (
            f"model class {name} is not in the tested list, so plans might give silently wrong results with "
            f"it{f' ({hint})' if hint else ''}; {_REMEDY}"
        )
    layer = layer_of(model, reason)
    return f"model class {name} is not supported: {f'{layer} ' if layer else 'it '}{reason.text}; {_REMEDY}"


def code_of(cls: type) -> type:
    """The class whose code an instance of `cls` runs: `cls`, or the class of transformers that it inherits all functions from."""
    kinds, found = (FunctionType, classmethod, staticmethod, property), cls
    while found.__module__.split(".")[0] != "transformers":
        if len(found.__bases__) != 1 or any(isinstance(value, kinds) for value in vars(found).values()):
            return cls
        (found,) = found.__bases__
    return found


def _decoder_problem(model: nn.Module) -> str:
    """Returns why a tested class cannot run with the untested decoder that its config names; empty if the decoder is tested."""
    tested = family_of(code_of(type(model)).__name__).decoder
    inner = [(path, type(module).__name__) for path, module in model.named_modules() if hasattr(module, "embed_tokens")]
    wrong = [f"{path} ({name})" for path, name in inner if tested and name != tested]
    return (
        f"model class {type(model).__name__} has {wrong[0]} inside, but is tested only with {tested}; use {tested}"
        if wrong
        else ""
    )


def _text_problem(model: nn.Module) -> str:
    """Returns why a multimodal model cannot train rows of text: its text model is untested. Empty if that is tested."""
    name, text = code_of(type(model)).__name__, class_name(text_part(model))
    if text == family_of(name).text or text_class(model) in TESTED_MODELS:
        return ""
    problem = f"model class {name} has the text model {text} inside, but is tested only with {family_of(name).text}"
    return f"{problem} and the text models of exact classes; {_REMEDY}"


def _classifier_problem(model: nn.Module) -> str:
    """Returns why a model that classifies documents or tokens cannot run; empty if its text model is of a tested class."""
    name, remedy = type(model).__name__, "use a class whose causal language model docs/models.md calls exact"
    if not is_generic(model):
        return (
            f"model class {name} is not supported: its head is not known to be one linear module on the text model; {remedy}, "
            f"such as LlamaForSequenceClassification or Qwen3ForTokenClassification"
        )
    if not is_of_transformers(type(model)):
        return (
            f"model class {name} is not supported: it has a forward of its own, which plans would leave out; load the class of "
            f"transformers on which it is built, and pass another loss of a token or a document as token_loss"
        )
    config: Any = model.config
    if config.get_text_config() is not config:
        return (
            f"model class {name} is not supported: it has towers for images or sound around its text model, which is not tested "
            f"with a classifier; use the class of the text model alone"
        )
    causal = text_class(model)
    if causal in TESTED_MODELS:
        return ""
    reason = reason_of(causal)
    if reason is None:
        return f"model class {name} is not in the tested list, since its text model ({causal}) is not; {remedy}"
    layer = layer_of(model, reason)
    return f"model class {name} is not supported: {f'{layer} ' if layer else 'it '}{reason.text}; {remedy}"


def reason_of(class_name: str) -> Reason | None:
    """Returns why the class of this name is refused; None for tested and for unknown classes."""
    return REASONS.get(family_of(class_name).refused.get(class_name, ""))


def layer_of(model: nn.Module, reason: Reason) -> str:
    """Name and class of the first module that matches the reason; empty if there is none."""
    if not reason.layer:
        return ""
    found = (
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if not isinstance(module, PreTrainedModel)
        and re.search(reason.layer, f"{name.rsplit('.', 1)[-1]} {type(module).__name__}")
    )
    return next(found, "")
