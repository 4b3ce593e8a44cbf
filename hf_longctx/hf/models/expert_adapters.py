"""Runs PEFT's adapters on weights of experts as products of their own while plans run, and refuses those that are not tested.

For every weight that `target_parameters` names PEFT puts a `ParamWrapper` around the experts, one around the other. Its forward
adds B A to a copy of the weights of all experts. Here wrappers only pass calls on, and the module inside runs
`runtime.core.expert_products`, which makes no copy. What a class of experts computes is read from the flags that transformers'
decorator `use_experts_implementation` gives it, and its `_apply_gate`.

An adapter on the router's weight, which "all-linear" adds in some classes, stays PEFT's own: that weight is small.

Shapes: T tokens, C features of hidden states, k experts of a token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.lora import ParamWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_longctx.families.registry import MODULES
from hf_longctx.hf.models.kernel_places import is_hooked, runs_as_written
from hf_longctx.hf.models.packed_experts import packed_weight, packed_weights
from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.plan.model.model_spec import AdapterSpec, split_adapters
from hf_longctx.runtime.core.binding import class_name, replace_forward
from hf_longctx.runtime.core.expert_products import ExpertMatrices, ExpertMLP, Rows, grouped_problem, run_experts
from hf_longctx.runtime.core.products import MAKER, computed
from hf_longctx.runtime.execution.experts import experts_forward, first_expert, replace_experts_forward

logger = logging.getLogger(__name__)

# weights of experts that may have adapters: the first products (with a gate, and without), and the last one
_ENTERING, _LEAVING = ("gate_up_proj", "up_proj"), "down_proj"


@dataclass(frozen=True, slots=True)
class AdaptedExperts:
    """A module of experts inside wrappers of PEFT, outermost first."""

    name: str
    experts: Any
    wrappers: tuple[Any, ...]

    @property
    def is_split(self) -> bool:
        """Whether the adapters are multiplied apart: unless they are disabled or merged, when PEFT has nothing to add."""
        return not any(wrapper.disable_adapters or wrapper.merged for wrapper in self.wrappers)

    def matrices(self, name: str) -> ExpertMatrices:
        """The weights `name` of the experts, [E, K, N], with its bias and its adapter."""
        experts = self.experts
        weight: Any = packed_weight(experts, name)
        if weight is None:
            whole: Tensor = getattr(experts, name)
            weight = whole if experts.is_transposed else whole.transpose(1, 2)
        dtype = experts_dtype(experts)
        bias_EN = getattr(experts, f"{name}_bias") if experts.has_bias else None
        wrapper = next((each for each in self.wrappers if each.parameter_name == name), None)
        if wrapper is None:
            return ExpertMatrices(weight, dtype, bias_EN)
        (adapter,) = wrapper.active_adapters
        first, second = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
        start = first_expert(experts)
        return ExpertMatrices(weight, dtype, bias_EN, first, second, wrapper.scaling[adapter], wrapper.num_experts, start)


def experts_dtype(experts: Any) -> torch.dtype:
    """Dtype of the weights of experts, after unpacking."""
    if _LEAVING in getattr(experts, "parametrizations", {}):
        dtype: torch.dtype = experts.parametrizations[_LEAVING][0].like.dtype
        return dtype
    return getattr(experts, _LEAVING).dtype  # type: ignore[no-any-return]


def split_experts(model: nn.Module) -> Iterator[AdaptedExperts]:
    """Yields the modules of experts that plans run apart from adapters: those with adapters, and packed ones without."""
    found = list(adapted_experts(model))
    yield from found
    inside = {id(each.experts) for each in found}
    others = {id(module): module for module, _, _ in packed_weights(model) if id(module) not in inside}
    for name, module in model.named_modules():
        if id(module) in others:
            yield AdaptedExperts(name, module, ())


def adapted_experts(model: nn.Module) -> Iterator[AdaptedExperts]:
    """Yields the modules of `model` whose weights of three dimensions have adapters."""
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in inside or not _is_on_experts(module):
            continue
        wrappers, inner = [], module
        while isinstance(inner, ParamWrapper):
            wrappers.append(inner)
            inside.add(id(inner))
            inner = inner.base_layer
        yield AdaptedExperts(name, inner, tuple(wrappers))


def _is_on_experts(module: nn.Module) -> bool:
    return isinstance(module, ParamWrapper) and module._param_ndim == 3


def merged_router_bytes(layer: nn.Module) -> int:
    """Bytes of the routers' weights in a layer to whose copies PEFT adds adapters, which backward reads; 0 without any."""
    routers = (each for each in layer.modules() if isinstance(each, ParamWrapper) and not _is_on_experts(each))
    return sum(each.get_param().nbytes for each in routers if each.active_adapters)


def expert_weights(model: nn.Module) -> list[str]:
    """Returns names for `target_parameters` of the weights of experts that may have adapters; empty if there are none."""
    found = [(name, module) for name, module in model.named_modules() if class_name(module) in MODULES.experts]
    names = [(name.rpartition(".")[2], _matrices(module)) for name, module in found if _is_described(module)]
    return list(dict.fromkeys(f"{name}.{weight}" for name, weights in names for weight in weights))


def _is_described(experts: Any) -> bool:
    """Whether transformers' decorator says what a module of experts computes."""
    # transformers 5.17 has neither of the two that are looked up with a default
    others = getattr(experts, "has_post_expert_norm", False) or getattr(experts, "_is_expert_parallel", False)
    return hasattr(experts, "is_concatenated") and not others


def _matrices(experts: Any) -> tuple[str, str]:
    """Names of the weights of experts: of the first products and of the last."""
    return _ENTERING[not experts.has_gate], _LEAVING


def expert_adapter_spec(found: AdaptedExperts, num_chosen: int) -> AdapterSpec:
    """Sizes that experts of a layer and adapters on them save, for tokens with `num_chosen` experts each."""
    experts = found.experts
    sizes = {
        wrapper.parameter_name: (wrapper.r[wrapper.active_adapters[0]], wrapper.in_features, wrapper.out_features)
        for wrapper in found.wrappers
    }
    adapters = [each.lora_A[each.active_adapters[0]].weight for each in found.wrappers]
    return split_adapters(
        list(sizes.values()),
        (num_chosen, int(experts.num_experts)),
        (experts_dtype(experts).itemsize, max((each.element_size() for each in adapters), default=0)),
        first_rank=next((rank for name, (rank, _, _) in sizes.items() if name != _LEAVING), 0),
    )


def expert_adapter_problems(model: nn.Module) -> list[str]:
    """Returns why adapters on single weights cannot be trained, by layer and class; empty if they can, or if there are none."""
    found = list(split_experts(model))
    problems = [f"the adapters on {each.name} ({class_name(each.experts)}) {why}" for each in found if (why := _problem(each))]
    configs = getattr(model, "peft_config", {}).values()
    if any(config.target_parameters for config in configs) and any(not each.wrappers for each in found):
        problems.append(
            "target_parameters found no weights in experts that were packed before; call pack_experts after get_peft_model, or "
            "leave target_parameters out"
        )
    beside = {each.name.rpartition(".")[0] for each in found}
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper) and not _is_on_experts(module) and name.rpartition(".")[0] not in beside:
            problems.append(
                f"the adapter on {name} ({class_name(module.get_base_layer())}) is on the weight {module.parameter_name} "
                f"(target_parameters), which PEFT copies in every forward; name Linear modules in target_modules instead (only "
                f"experts and the router beside them may have adapters on their weights)"
            )
    return problems


def _problem(found: AdaptedExperts) -> str:
    experts, wrappers = found.experts, found.wrappers
    remedy = "name Linear modules outside the experts in target_modules instead"
    if class_name(experts) not in MODULES.experts:
        return f"are on experts of a class that is not tested; {remedy}"
    if not _is_described(experts):
        return f"are on experts with a norm of their own, or loaded with ep_size, which are not tested; {remedy}"
    known = _matrices(experts)
    if other := next((each.parameter_name for each in wrappers if each.parameter_name not in known), ""):
        return f"are on the weight {other}; name {' or '.join(known)} in target_parameters"
    if any(len(wrapper.lora_A) > 1 for wrapper in wrappers):
        return f"are several ({', '.join(wrappers[0].lora_A)}); keep one adapter (model.delete_adapter)"
    if any(not wrapper.active_adapters for wrapper in wrappers):
        return "are inactive; call model.set_adapter"
    weights = [getattr(experts, name) for name in known if packed_weight(experts, name) is None]
    if other := next((each.dtype for each in weights if not each.is_floating_point() or each.itemsize < 2), None):
        return f"are on experts whose weights are quantised ({other}); load them in bfloat16, and call pack_experts for four bits"
    # biases and weights of the activation, too, of which products make no gradient
    if any(weight.requires_grad for weight in experts.parameters()):
        return "are on experts whose own weights are trained too; freeze them with requires_grad_(False)"
    # hooks of the wrappers inside count, too
    if is_hooked(wrappers[0] if wrappers else experts):
        return "have a hook, which would see other values than in PEFT's forward; remove it, or hook the MLP"
    if not all(map(runs_as_written, wrappers)) or not runs_as_written(experts):
        return "have a forward that other code has replaced; remove it"
    return ""


def bind_expert_adapters(model: nn.Module, is_grouped: Callable[[torch.device, torch.dtype], bool]) -> list[Callable[[], None]]:
    """Lets experts of `model` multiply their adapters apart; returns functions that undo this, in reverse.

    is_grouped: whether grouped products of this device and dtype are right.
    """
    undo = []
    for found in split_experts(model):
        if _problem(found):
            continue
        for wrapper in found.wrappers:
            undo.append(replace_forward(wrapper, partial(_passed_on, found, wrapper, wrapper.forward)))
        own = experts_forward(found.experts)
        vars(found.experts)[MAKER] = _no_maker
        undo.append(partial(vars(found.experts).pop, MAKER, None))
        undo.append(replace_experts_forward(found.experts, partial(_run, found, own, is_grouped)))
    return undo


def _no_maker() -> None:
    """Stands for a maker that computes outputs."""


def _passed_on(found: AdaptedExperts, wrapper: Any, own: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    return wrapper.base_layer(*args, **keywords) if found.is_split else own(*args, **keywords)


def _run(
    found: AdaptedExperts,
    own: Callable[..., Any],
    is_grouped: Callable[[torch.device, torch.dtype], bool],
    hidden_TC: Tensor,
    chosen_Tk: Tensor,
    weights_Tk: Tensor,
) -> Tensor:
    """Returns the weighted sum [T, C] of the outputs of every token's experts."""
    if not found.is_split:
        result: Tensor = own(hidden_TC, chosen_Tk, weights_Tk)
        return result
    experts = found.experts
    entering, leaving = map(found.matrices, _matrices(experts))
    assert not isinstance(entering.weight, DTensor)
    rows = Rows(chosen_Tk, len(entering.weight), is_grouped(hidden_TC.device, entering.dtype))
    mlp = ExpertMLP(entering, leaving, experts._apply_gate if experts.has_gate else experts.act_fn)
    make = vars(experts)[MAKER]() or computed
    return run_experts(hidden_TC, weights_Tk, mlp, rows, make).to(hidden_TC.dtype)


class GroupedProducts:
    """Compares the grouped products of this torch with single ones, once for every kind of device and dtype."""

    def __init__(self) -> None:
        self._problems: dict[tuple[str, torch.dtype], str] = {}

    def __call__(self, device: torch.device, dtype: torch.dtype) -> bool:
        return not self.problem(device, dtype)

    def problem(self, device: torch.device, dtype: torch.dtype) -> str:
        """Returns why experts run one after the other; empty if grouped products are right."""
        key = device.type, dtype
        if key not in self._problems:
            self._problems[key] = grouped_problem(device, dtype)
        return self._problems[key]

    def compare(self, model: nn.Module, device: torch.device, control: dist.ProcessGroup | None) -> None:
        """Compares them for the experts of `model` that plans run apart, so that no step waits for it. Collective over `control`.

        Rank 0 logs a warning if experts of any rank run one after the other.
        """
        dtypes = dict.fromkeys(experts_dtype(each.experts) for each in split_experts(model) if not _problem(each))
        problem = next((f"{dtype} on {device} ({why})" for dtype in dtypes if (why := self.problem(device, dtype))), "")
        failed = next((each for each in gather_objects(problem, control) if each), "")
        if failed and (control is None or dist.get_rank(control) == 0):
            logger.warning(
                "experts run one after the other, which is slower, since grouped products cannot be used in %s", failed
            )
