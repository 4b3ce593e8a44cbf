"""Weights of which each node keeps a copy for a step: weights that some nodes use, half precision, collectives, and refusals.

Layers are toys without attention, on two nodes of two ranks; `exact/plans/test_node_copies.py` runs plans of whole models.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.models.reference import relative_error
from helpers.ranks.rank_steps import mesh, whole
from torch import Tensor, nn

from hf_longctx.plan.core.types import Parameters
from hf_longctx.runtime.core.torch_versions import trains_several_dtypes
from hf_longctx.runtime.parameters import sums
from hf_longctx.runtime.parameters.sharded import ShardedParameters, shard_model

MODE: Parameters = "gathered_per_node"
# (all numbers of a rank's chunks, whether its chunk uses the branch of every layer) of both nodes
Uses = tuple[tuple[bool, ...], ...]
NUM_FEATURES = 5


class Forked(nn.Module):
    """A layer with a branch that some chunks use, and with a weight that nothing uses; rows do not divide by four."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(NUM_FEATURES, NUM_FEATURES, bias=False, dtype=torch.float64)
        self.sometimes = nn.Linear(NUM_FEATURES, NUM_FEATURES, dtype=torch.float64)
        self.never = nn.Parameter(torch.ones(7, dtype=torch.float64))

    def forward(self, x_TC: Tensor, is_used: bool) -> Tensor:
        out_TC = x_TC + self.always(x_TC).tanh()
        return out_TC + self.sometimes(x_TC) if is_used else out_TC


class Toy(nn.Module):
    """Layers between weights of the outer unit, of which one is used together with the branches."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(NUM_FEATURES, NUM_FEATURES, dtype=torch.float64)
        self.layers = nn.ModuleList(Forked() for _ in range(num_layers))
        self.seldom = nn.Parameter(torch.ones(NUM_FEATURES, dtype=torch.float64))

    def forward(self, x_TC: Tensor, is_used: bool) -> Tensor:
        x_TC = self.first(x_TC)
        for layer in self.layers:
            x_TC = layer(x_TC, is_used)
        return (x_TC * self.seldom if is_used else x_TC).square().sum()


def inputs_of(rank: int, chunk: int) -> Tensor:
    return torch.randn(3, NUM_FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * rank + chunk))


def sharded_toy() -> tuple[Toy, ShardedParameters]:
    """A toy on two nodes of two ranks."""
    model: Any = Toy()
    shard_model(model, ("Forked",), mesh(4, 2), node_ranks=2)
    return model, ShardedParameters(model, True)


def run_plan(
    handler: ShardedParameters, used: tuple[bool, ...], is_end: bool, first: int = 0, parameters: Parameters = MODE
) -> None:
    """Forward and backward of a rank's chunks."""
    with handler.in_step(is_end):
        handler.enter_round(parameters)
        for place, is_used in enumerate(used):
            loss = handler.model(inputs_of(dist.get_rank(), first + place), is_used)
            is_last = place == len(used) - 1
            handler.before_backward(is_last, is_last)
            loss.backward()
            handler.after_backward()


def gradients_of_toy(uses: list[Uses], num_steps: int) -> list[dict[str, Tensor]]:
    """Gradients of steps with these plans, in which a rank's node says which chunks use the branches."""
    model, handler = sharded_toy()
    found = []
    for _ in range(num_steps):
        model.zero_grad()
        first = 0
        for place, plan in enumerate(uses):
            own = plan[dist.get_rank() // 2]
            run_plan(handler, own, place == len(uses) - 1, first)
            first += len(own)
        handler.free()
        handler.reduce(None)
        found.append({name: whole(each.grad) for name, each in model.named_parameters() if each.grad is not None})
    return found


USES: dict[str, list[Uses]] = {
    "none": [((False, False), (False,))],
    "one node": [((True, True), (False,))],
    "the other node in its first chunk": [((False,), (True, False, False))],
    "the other node in its last chunk": [((False,), (False, True))],
    "both nodes in other chunks": [((True, False), (False, True, False))],
    "one node in the first of two plans": [((True,), (False, False)), ((False, False), (False,))],
    "the other node in the second of two plans": [((False,), (False, False)), ((False, False), (True,))],
}


@pytest.mark.parametrize("name", USES)
def test_weights_that_some_nodes_use_get_their_gradients_and_others_none(ranks, name: str) -> None:
    uses = USES[name]
    model = Toy()
    for rank in range(4):
        for chunk, is_used in enumerate(used for plan in uses for used in plan[rank // 2]):
            model(inputs_of(rank, chunk), is_used).backward()
    expected = {key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None}
    assert not any("never" in key for key in expected)
    assert any("sometimes" in key for key in expected) == (name != "none")
    for steps in ranks(4).run(gradients_of_toy, uses, 2):
        for found in steps:
            assert found.keys() == expected.keys()
            assert max(relative_error(found[key], gradient) for key, gradient in expected.items()) <= 1e-13


def summed(
    dtype: torch.dtype, num_rounds: int, num_chunks: int, num_rows: int = 8
) -> tuple[float, list[tuple[torch.dtype, int]]]:
    """Gradient of a weight over four ranks, and dtypes and ranks of all exchanges of gradients.

    One chunk of every rank gives 1, all others 2^-9, which bf16 would round away when added.
    """
    model: Any = nn.Sequential(nn.Linear(1, num_rows, bias=False, dtype=dtype))
    shard_model(model, ("Linear",), mesh(4, 2), node_ranks=2)
    handler = ShardedParameters(model, True)
    exchange, sent = sums._exchange, []

    def noted(rows: Tensor, receivers: range, senders: range, group: Any) -> Tensor:
        sent.append((rows.dtype, group.size()))
        return exchange(rows, receivers, senders, group)

    with handler.in_step(True):
        for step_round in range(num_rounds):
            handler.enter_round(MODE)
            for chunk in range(num_chunks):
                with patch.object(sums, "_exchange", noted):
                    value = 2.0**-9 if step_round or chunk else 1.0
                    loss = (model(torch.ones(1, 1, dtype=dtype)) * value).sum()
                    is_last = chunk == num_chunks - 1
                    handler.before_backward(is_last, is_last and step_round == num_rounds - 1)
                    loss.backward()
                    handler.after_backward()
    handler.free()
    handler.reduce(None)
    return float(whole(model[0].weight.grad)[0]), sent


@pytest.mark.parametrize(("num_rounds", "num_chunks"), [(1, 65), (13, 5)])
def test_sums_add_up_and_cross_nodes_in_fp32(ranks, num_rounds: int, num_chunks: int) -> None:
    """Inside a node, gradients are sent in half precision, however many backwards there are."""
    for total, sent in ranks(4).run(summed, torch.bfloat16, num_rounds, num_chunks):
        # four ranks of 1 + 64 / 512 each
        assert total == 4.5
        assert sent == [(torch.bfloat16, 2)] * 65 + [(torch.float32, 4)]


@pytest.mark.parametrize("num_rows", [1, 3, 4])
def test_ranks_may_have_one_element_of_a_weight_or_none(ranks, num_rows: int) -> None:
    for total, _ in ranks(4).run(summed, torch.float64, 1, 2, num_rows):
        assert total == 4 + 4 * 2.0**-9


class Scaled(nn.Module):
    """A layer with weights of two dtypes, each in a record of its own, of which the narrow one is frozen if `is_frozen`."""

    def __init__(self, is_frozen: bool) -> None:
        super().__init__()
        self.narrow = nn.Linear(NUM_FEATURES, NUM_FEATURES, dtype=torch.float32).requires_grad_(not is_frozen)
        self.wide = nn.Parameter(torch.ones(NUM_FEATURES, dtype=torch.float64))

    def forward(self, x_TC: Tensor) -> Tensor:
        return x_TC + self.narrow(x_TC.float()).double().tanh() * self.wide


def scaled(is_frozen: bool) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Scaled(is_frozen) for _ in range(2)))


def gradients_of_scaled(is_frozen: bool) -> dict[str, Tensor]:
    """Gradients of two chunks on each rank of the first node, and one on those of the second."""
    model = scaled(is_frozen)
    shard_model(model, ("Scaled",), mesh(4, 2), node_ranks=2)
    handler = ShardedParameters(model, True)
    num_chunks = 2 - dist.get_rank() // 2
    with handler.in_step(True):
        handler.enter_round(MODE)
        for chunk in range(num_chunks):
            loss = model(inputs_of(dist.get_rank(), chunk)).square().sum()
            handler.before_backward(chunk == num_chunks - 1, chunk == num_chunks - 1)
            loss.backward()
            handler.after_backward()
    handler.free()
    handler.reduce(None)
    return {name: whole(weight.grad) for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("is_frozen", [False, True])
def test_weights_of_two_dtypes_match(ranks, is_frozen: bool) -> None:
    if not is_frozen and not trains_several_dtypes():
        pytest.skip("this version of torch has one record of weights for a unit")
    model = scaled(is_frozen)
    for rank in range(4):
        for chunk in range(2 - rank // 2):
            model(inputs_of(rank, chunk)).square().sum().backward()
    expected = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert any("narrow" in name for name in expected) != is_frozen
    for found in ranks(4).run(gradients_of_scaled, is_frozen):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert found[name].dtype == gradient.dtype
            # products are in fp32
            assert relative_error(found[name], gradient) <= 1e-5, name


def refusals(shard_ranks: int, node_ranks: int, on_host: bool) -> str:
    """Why these ranks of a node cannot hold copies of weights in shards of so many ranks."""
    with pytest.raises(ValueError) as refused:
        shard_model(Toy(), ("Forked",), mesh(shard_ranks, node_ranks), layers_on_host=on_host)
    return str(refused.value)


@pytest.mark.parametrize(
    ("num_ranks", "shard_ranks", "node_ranks", "on_host"),
    [(4, 4, 4, False), (4, 2, 2, False), (4, 2, 4, False), (6, 6, 6, False), (6, 3, 2, False), (4, 4, 2, True)],
)
def test_shards_of_one_node_of_parts_of_nodes_and_on_the_host_are_refused(
    ranks, num_ranks: int, shard_ranks: int, node_ranks: int, on_host: bool
) -> None:
    start = "nodes keep copies of the weights on the device, so shards of layers cannot lie on the host"
    if not on_host:
        start = f"nodes of {node_ranks} ranks cannot keep copies of weights whose shards lie on {shard_ranks} ranks"
    for refusal in ranks(num_ranks).run(refusals, shard_ranks, node_ranks, on_host):
        assert refusal.startswith(start) and refusal.endswith("or set parameters='sharded'")
