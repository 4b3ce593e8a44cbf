"""Finds problems with hooks and replaced forwards that users add to a model, and with weights that its layers share."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.models.activations import activation_problem
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.heads import head_of
from hf_longctx.hf.models.kernel_places import kernel_problems
from hf_longctx.hf.models.layers import output_head
from hf_longctx.hf.models.spec import decoder_layers
from hf_longctx.runtime.core.binding import is_written_by
from hf_longctx.runtime.execution.checks import hooked_weights

# methods of a trainer that run between the last backward of a step and its update, or contain both
_BEFORE_UPDATES = (
    "_inner_training_loop", "_run_epoch", "training_step", "floating_point_ops", "_track_num_input_tokens", "_clip_grad_norm",
    "_get_grad_norm",
)  # fmt: skip
# packages whose code changes no weight there, and gradients by clipping alone
_KNOWN = ("hf_longctx", "transformers", "trl", "accelerate", "torch")


def may_call_super(method: Any, name: str) -> bool:
    """Whether an override may call the method of this name that it replaces; false only if its code cannot.

    Code in other languages, or inside wrappers that hide it, may do anything.
    """
    function = inspect.unwrap(getattr(method, "__func__", method))
    code = getattr(function, "__code__", None)
    if code is None or any(callable(_content(cell)) for cell in getattr(function, "__closure__", None) or ()):
        return True
    names = set(_names_in(code))
    # a call by `super()` has that name in the code; a call by a class's name or getattr has the method's name
    return bool(names & {"super", name})


def _content(cell: Any) -> Any:
    """The object in a cell of a closure; None for an empty cell."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _names_in(code: Any) -> Iterator[str]:
    """Names and texts in a function's code, and in that of the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif inspect.iscode(constant):
            yield from _names_in(constant)


def changes_before_updates(trainer: Any, optimizer: Any) -> bool:
    """Whether code of the user may change gradients or weights between the last backward of a step and its update.

    Such code is in methods of a trainer's subclass, callbacks with `on_pre_optimizer_step`, or replaced methods. optimizer: the
    plain one.
    """
    called = [getattr(trainer, name, None) for name in _BEFORE_UPDATES]
    handler = trainer.callback_handler
    called += [each.on_pre_optimizer_step for each in (handler, *handler.callbacks)]
    called += [trainer.accelerator.clip_grad_norm_, trainer.optimizer.step, optimizer.step]
    return not all(is_written_by(method, *_KNOWN) for method in called)


def reads_between_forwards(trainer: Any) -> bool:
    """Whether code of the user runs between the forwards of an evaluation, where it may read weights.

    Such code is in callbacks with `on_prediction_step`, or in `preprocess_logits_for_metrics`.
    """
    handler = trainer.callback_handler
    called = [each.on_prediction_step for each in (handler, *handler.callbacks)]
    return trainer.preprocess_logits_for_metrics is not None or not all(is_written_by(each, *_KNOWN) for each in called)


def user_code_problems(facts: ModelFacts, config: LongContextConfig) -> list[str]:
    """Reasons why hooks, a replaced forward or shared weights would make a model train wrong; empty if there are none."""
    problems = kernel_problems(facts) + weight_hook_problems(facts.model) + _forward_problems(facts)
    return problems + _head_hook_problems(facts, config) + _sharing_problems(facts, config)


def weight_hook_problems(model: nn.Module) -> list[str]:
    """Problem with hooks on weights, which autograd calls once per chunk or tile, not once per step as users expect."""
    hooked = hooked_weights(model)
    if not hooked:
        return []
    others = f" and {len(hooked) - 1} more" if len(hooked) > 1 else ""
    return [
        f"the weight {hooked[0]}{others} has a hook (register_hook or register_post_accumulate_grad_hook), which would see the "
        f"gradients of single chunks and tiles; remove it, and change `.grad` in the method on_pre_optimizer_step of a "
        f"TrainerCallback, where gradients are those of the whole step"
    ]


def _forward_problems(facts: ModelFacts) -> list[str]:
    """Problem with a forward that was put in place of the model's own, and does not take the keywords that plans pass."""
    for module in {id(each): each for each in (facts.model, facts.base)}.values():
        if (forward := vars(module).get("forward")) is None:
            continue
        try:
            signature = inspect.signature(forward, follow_wrapped=False)
        except (TypeError, ValueError):
            # callables of C code may have none
            continue
        if all(each.kind != inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values()):
            return [
                f"the forward of {type(module).__name__} was replaced by a function of {signature}, through which plans cannot "
                f"pass positions and sequence groups; let it take **keywords too and pass them on to the model's own forward"
            ]
    return []


def _head_hook_problems(facts: ModelFacts, config: LongContextConfig) -> list[str]:
    """Problem with forward hooks on the output head: with a tiled loss they would get losses in place of logits."""
    if config.activations == "keep" or activation_problem(facts.base):
        return []
    head = output_head(facts.base)
    if not (head._forward_hooks or head._backward_hooks):
        return []
    return [
        f"the output head ({type(head).__name__}) has a hook, but plans compute the loss in tiles inside the head, so that the "
        f"hook would never see the logits; remove it, or set activations='keep'"
    ]


def _sharing_problems(facts: ModelFacts, config: LongContextConfig) -> list[str]:
    """Problems with weights and modules that belong to several layers, where plans treat layers one by one.

    Embedding and head may share their weight: stages and shards support that.
    """
    is_divided = config.may_have_stages or config.parameters != "replicated"
    if not is_divided and config.activations == "keep":
        return []
    _, layers = decoder_layers(facts.model)
    problems = []
    owners: dict[int, str] = {}
    for number, layer in enumerate(layers):
        for name, module in layer.named_modules():
            where = f"layer {number} ({name or type(module).__name__})"
            owner = owners.setdefault(id(module), where)
            if owner != where and owner.split(" (")[0] != where.split(" (")[0] and any(True for _ in module.parameters()):
                problems.append(
                    f"{owner} and {where} are one module, which recomputation, stages and shards would take for two; make a copy "
                    f"for each layer, or train with activations='keep', stages=1 and parameters='replicated'"
                )
                # the modules inside are shared too
                return problems
    return problems + (_shared_weight_problems(facts, layers, config.may_have_stages) if is_divided else [])


def _shared_weight_problems(facts: ModelFacts, layers: list[nn.Module], has_stages: bool) -> list[str]:
    """Problem with the first trained weight that belongs to two layers, or to a layer and a module outside of all layers.

    With stages, modules outside of the layers are also on different ranks, except embedding and head, which may share a weight.
    """
    base = facts.base
    inside = {id(module): number for number, layer in enumerate(layers) for module in layer.modules()}
    # adapters wrap embedding and head
    ends = [end for end in (base.get_input_embeddings(), head_of(base)) if isinstance(end, nn.Module)]
    in_ends = {id(module) for end in ends for module in end.modules()}
    owners: dict[int, tuple[str, Any]] = {}
    for name, module in facts.model.named_modules(remove_duplicate=False):
        outside = "ends" if id(module) in in_ends or not has_stages else name
        unit: Any = inside.get(id(module), outside)
        for own_name, weight in module.named_parameters(recurse=False):
            full_name = f"{name}.{own_name}"
            first_name, first_unit = owners.setdefault(id(weight), (full_name, unit))
            if first_unit != unit and weight.requires_grad:
                return [
                    f"{first_name} and {full_name} are one weight, which stages and shards would train as two; copy it, or "
                    f"train with stages=1 and parameters='replicated'"
                ]
    return []
