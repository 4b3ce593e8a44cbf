"""Experts that are spread over ranks compute for all tokens as the whole module does, for every class that may be spread."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.models.any_model import build_any, wide_floats
from helpers.models.reference import TOLERANCE, relative_error
from helpers.ranks.rank_steps import mesh, whole
from torch import Tensor, nn

from hf_longctx.families.registry import FAMILIES, MODULES
from hf_longctx.runtime.execution.experts import spread_experts

HIDDEN_SIZE, NUM_EXPERTS, NUM_CHOSEN = 32, 4, 2
Pass = tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]


def experts_of(name: str) -> nn.Module:
    """A tiny module of a class of experts, with random weights in fp64."""
    model = build_any(next(family.causal for family in FAMILIES if name in family.modules.experts))
    return next(module for module in model.modules() if type(module).__name__ == name)


def run_experts(module: nn.Module, hidden_TC: Tensor, indices_Tk: Tensor, weights_Tk: Tensor) -> Pass:
    """Output, the gradients of hidden states and weights of choices, and those of the module's parameters."""
    hidden_TC, weights_Tk = hidden_TC.clone().requires_grad_(), weights_Tk.clone().requires_grad_()
    output_TC = module(hidden_TC, indices_Tk, weights_Tk)
    (output_TC * torch.cos(hidden_TC.detach())).sum().backward()
    assert hidden_TC.grad is not None and weights_Tk.grad is not None
    return output_TC.detach(), hidden_TC.grad, weights_Tk.grad, {name: whole(p.grad) for name, p in module.named_parameters()}


def worst_errors(rank_tokens: tuple[int, ...], names: tuple[str, ...], chosen_from: int) -> dict[str, float]:
    """Largest relative error of this rank's results by class, if each rank has its tokens and the experts of its block."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    total, own = sum(rank_tokens), slice(sum(rank_tokens[:rank]), sum(rank_tokens[: rank + 1]))
    hidden_TC = torch.randn(total, HIDDEN_SIZE, dtype=torch.float64)
    weights_Tk = torch.rand(total, NUM_CHOSEN, dtype=torch.float64)
    chosen = torch.rand(total, NUM_EXPERTS - chosen_from).argsort(dim=1) + chosen_from
    indices_Tk = chosen[:, :NUM_CHOSEN]
    errors = {}
    for name in names:
        module = experts_of(name)
        with wide_floats():
            expected = run_experts(copy.deepcopy(module), hidden_TC, indices_Tk, weights_Tk)
        spread_experts([module], mesh(len(rank_tokens)), torch.device("cpu"))
        with wide_floats():
            found = run_experts(module, hidden_TC[own], indices_Tk[own], weights_Tk[own])
        pairs = [(mine, every[own]) for mine, every in zip(found[:3], expected[:3], strict=True) if rank_tokens[rank]]
        pairs += [(found[3][each], gradient) for each, gradient in expected[3].items()]
        errors[name] = max(relative_error(mine, theirs) for mine, theirs in pairs)
    return errors


@pytest.mark.wide
def test_every_class_of_experts_computes_as_one_module(ranks) -> None:
    for errors in ranks(2).run(worst_errors, (5, 3), MODULES.experts, 0):
        assert errors.keys() == set(MODULES.experts)
        assert max(errors.values()) <= TOLERANCE, {name: error for name, error in errors.items() if error > TOLERANCE}


def test_ranks_without_rows_or_tokens_take_part(ranks) -> None:
    # all tokens choose the experts of the second rank; then one rank has no token either
    for rank_tokens in ((3, 1), (4, 0), (0, 4)):
        for errors in ranks(2).run(worst_errors, rank_tokens, ("MixtralExperts", "GptOssExperts"), 2):
            assert max(errors.values()) <= TOLERANCE
