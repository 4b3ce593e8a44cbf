"""Mixtures of experts: a model's routers, the load-balancing loss that its config asks for, and the settings that are refused."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_longctx.hf.models.adapters import base_of
from hf_longctx.runtime.execution.experts import RouterBalance

# routers that return the logits, scores and indices of a token's experts; add a class only together with its rows in
# tests/exact/models/test_moe.py
_ROUTERS = ("MixtralTopKRouter", "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "OlmoeTopKRouter", "GptOssTopKRouter")


def router_problems(model: PreTrainedModel) -> list[str]:
    """Problems with settings of a mixture of experts under which plans would give other results than the model alone."""
    problems, config = [], model.config.get_text_config()
    if has_balance(model) and not any(type(module).__name__ in _ROUTERS for module in model.modules()):
        problems.append(
            f"output_router_logits is set, but a load-balancing loss is supported only for the routers {', '.join(_ROUTERS)}, "
            f"which {type(model).__name__} does not have; set it to False, which trains without that loss"
        )
    if noise := getattr(config, "router_jitter_noise", 0.0):
        # sparsemixer also uses this noise as the threshold beyond which an expert is left out
        price = ", with which its routers get no gradient" if type(model).__name__ == "PhimoeForCausalLM" else ""
        problems.append(
            f"router_jitter_noise is {noise}, which draws new noise in every forward, so that no two plans would give the same "
            f"result; set it to 0.0{price}"
        )
    if (clip := getattr(config, "clip_qkv", None)) is not None:
        problems.append(f"clip_qkv is {clip}, which changes kept projections in place and is not supported; set it to None")
    return problems


def has_balance(model: nn.Module) -> bool:
    """Whether the model's config asks for a load-balancing loss of its experts (`output_router_logits`)."""
    config = getattr(base_of(model), "config", None)
    return config is not None and bool(getattr(config.get_text_config(), "output_router_logits", False))


class RouterRuntime:
    """Holds the load-balancing loss of one model at a time: binds it to the routers at the first plan, unbinds it at the end."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._balance: RouterBalance | None = None
        self._model: nn.Module | None = None

    def balance(self, model: nn.Module) -> RouterBalance | None:
        """The load-balancing loss of `model`; None if its config asks for none."""
        if self._model is not model:
            self.close()
            self._balance, self._model = router_balance(model, self.device), model
        return self._balance

    def close(self) -> None:
        """Gives the routers their own forwards back. Idempotent."""
        if self._balance is not None:
            self._balance.unbind()
        self._balance = self._model = None


def router_balance(model: nn.Module, device: torch.device) -> RouterBalance | None:
    """The load-balancing loss that the config of `model` asks for, bound to the model's routers (a stage may have none)."""
    if not has_balance(model):
        return None
    config = base_of(model).config
    routers = [module for module in model.modules() if type(module).__name__ in _ROUTERS]
    return RouterBalance(
        routers, int(config.num_experts), int(config.num_experts_per_tok), float(config.router_aux_loss_coef), device
    )
