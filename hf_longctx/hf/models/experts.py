"""Mixtures of experts: a model's routers and experts, the load-balancing loss that its config asks for, and refused settings."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_longctx.families.registry import MODULES, family_of
from hf_longctx.hf.models.adapters import base_of
from hf_longctx.hf.models.heads import head_kind
from hf_longctx.runtime.core.binding import class_name
from hf_longctx.runtime.execution.experts import RouterBalance


def router_problems(model: PreTrainedModel) -> list[str]:
    """Problems with settings of a mixture of experts under which plans would give other results than the model alone."""
    problems, config = [], model.config.get_text_config()
    if has_balance(model):
        remedy = (
            "set it to False, which trains without that loss (SFTTrainer of TRL sets it: give SFTConfig router_aux_loss_coef=0.0)"
        )
        problems += balance_problems(model, "output_router_logits is set", remedy)
    if noise := getattr(config, "router_jitter_noise", 0.0):
        # sparsemixer also uses this noise as the threshold beyond which an expert is left out
        price = ", with which its routers get no gradient" if family_of(type(model).__name__).jitter_trains_routers else ""
        problems.append(
            f"router_jitter_noise is {noise}, which draws new noise in every forward, so that no two plans would give the same "
            f"result; set it to 0.0{price}"
        )
    if (clip := getattr(config, "clip_qkv", None)) is not None:
        problems.append(f"clip_qkv is {clip}, which changes kept projections in place and is not supported; set it to None")
    return problems


def balance_problems(model: nn.Module, reason: str, remedy: str) -> list[str]:
    """Problems with a model that asks for balanced experts; reason: why it cannot have them, remedy: how to train without."""
    if any(type(module).__name__ in MODULES.routers for module in model.modules()):
        return []
    return [
        f"{reason}, but a load-balancing loss is supported only for the routers {', '.join(MODULES.routers)}, which "
        f"{type(model).__name__} does not have; {remedy}"
    ]


def has_balance(model: nn.Module) -> bool:
    """Whether the model's config asks for a load-balancing loss of its experts (`output_router_logits`)."""
    config = getattr(base_of(model), "config", None)
    # the losses of classifiers leave it out
    if config is None or head_kind(model) != "next_token":
        return False
    return bool(getattr(config.get_text_config(), "output_router_logits", False))


def spread_experts_of(model: nn.Module) -> list[nn.Module]:
    """The modules of `model` whose experts can be spread over ranks."""
    return [module for module in model.modules() if class_name(module) in MODULES.experts]


def spread_problems(model: nn.Module, expert_ranks: int) -> list[str]:
    """Returns why the experts of `model` cannot be spread over groups of `expert_ranks` ranks; empty if they can."""
    modules = spread_experts_of(model)
    if not modules:
        return [
            f"expert_ranks is {expert_ranks}, but {type(base_of(model)).__name__} has no experts of a class that can be spread "
            f"over ranks ({', '.join(sorted(MODULES.experts))}); leave it out"
        ]
    problems = []
    for module in modules:
        count, name = int(module.num_experts), class_name(module)  # type: ignore[arg-type]
        if count % expert_ranks:
            problems.append(f"expert_ranks {expert_ranks} does not divide the {count} experts of {name}; choose a divisor")
        if any(len(weight) != count or not weight.is_floating_point() for weight in module.parameters()):
            problems.append(
                f"expert_ranks is {expert_ranks}, but weights of {name} are packed or wrapped, so that they cannot be dealt out "
                f"by expert; load them in bfloat16 and put adapters on other modules, or leave it out"
            )
    return list(dict.fromkeys(problems))


class RouterRuntime:
    """Holds the load-balancing loss of one model at a time: binds it to the routers at the first plan, unbinds it at the end.

    is_asked: whether the trainer's own loss asks for the balance; its share is then known after that loss's backward. None: the
    model's config decides.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_asked: bool | None = None
        self._balance: RouterBalance | None = None
        self._model: nn.Module | None = None

    def balance(self, model: nn.Module) -> RouterBalance | None:
        """The load-balancing loss of `model`; None if nothing asks for it."""
        if self._model is not model:
            self.close()
            self._balance, self._model = router_balance(model, self.device, self.is_asked), model
        return self._balance

    def close(self) -> None:
        """Restores the routers' own forwards. Idempotent."""
        if self._balance is not None:
            self._balance.unbind()
        self._balance = self._model = None


def router_balance(model: nn.Module, device: torch.device, is_asked: bool | None = None) -> RouterBalance | None:
    """The load-balancing loss that the config of `model` asks for, bound to the model's routers (a stage may have none).

    is_asked: see `RouterRuntime`; unless it is None, only `take` says how much the balance counts.
    """
    if not (is_asked or has_balance(model)):
        return None
    config = base_of(model).config.get_text_config()
    routers = [module for module in model.modules() if type(module).__name__ in MODULES.routers]
    coefficient = float(config.router_aux_loss_coef) if is_asked is None else 0.0
    return RouterBalance(routers, int(config.num_experts), int(config.num_experts_per_tok), coefficient, device)
