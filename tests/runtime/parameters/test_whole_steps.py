"""Optimizers that need whole weights: steps on shards are those of one process, bit by bit, for any of them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hf_longctx.runtime.parameters.muon import MuonAdamW
from hf_longctx.runtime.parameters.sharded import shard_mesh
from hf_longctx.runtime.parameters.whole_weights import needs_whole_weights, owns_weight, step_on_whole_weights

# rows that ranks do not divide, fewer rows than ranks, matrices that are large enough for moments in 8 bits, a vector
SHAPES = [(128, 96), (7, 5), (1, 3), (96, 64), (33,), (4, 16, 8)]
NUM_STEPS = 3


def adafactor(weights: list[nn.Parameter]) -> Any:
    return transformers.Adafactor(weights, lr=1e-2, scale_parameter=True, relative_step=False)


def torch_adafactor(weights: list[nn.Parameter]) -> Any:
    return torch.optim.Adafactor(weights, lr=1e-2)


def muon(weights: list[nn.Parameter]) -> Any:
    others = [weight for weight in weights if weight.dim() != 2]
    matrices = [weight for weight in weights if weight.dim() == 2]
    return MuonAdamW(matrices, [{"params": others, "lr": 1e-2}], {"lr": 1e-2})


def schedule_free(weights: list[nn.Parameter]) -> Any:
    import schedulefree

    return schedulefree.AdamWScheduleFree(weights, lr=1e-2, weight_decay=0.1)


def adamw_8bit(weights: list[nn.Parameter]) -> Any:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(weights, lr=1e-2)


def lion_8bit(weights: list[nn.Parameter]) -> Any:
    import bitsandbytes

    return bitsandbytes.optim.Lion8bit(weights, lr=1e-2)


MAKERS: dict[str, tuple[Callable[[list[nn.Parameter]], Any], str]] = {
    "adafactor": (adafactor, "torch"),
    "torch's Adafactor": (torch_adafactor, "torch"),
    "Muon": (muon, "torch"),
    "schedule-free": (schedule_free, "schedulefree"),
    "AdamW in 8 bits": (adamw_8bit, "bitsandbytes"),
    "Lion in 8 bits": (lion_8bit, "bitsandbytes"),
}
NAMES = [name for name, (_, package) in MAKERS.items() if find_spec(package) is not None]


def values(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def stepped(make: Any, place: Callable[[Tensor], Tensor], prepare: Callable[[Any], None]) -> tuple[list[list[Tensor]], Any]:
    """Weights after each step, and once more in the mode of evaluation; one weight has no gradient in the second step."""
    weights = [nn.Parameter(place(value)) for value in values(0)]
    optimizer = make(weights)
    prepare(optimizer)
    seen = []
    for step in range(NUM_STEPS):
        if callable(switch := getattr(optimizer, "train", None)):
            switch()
        for weight, gradient in zip(weights, values(1 + step), strict=True):
            weight.grad = place(gradient)
        if step == 1:
            weights[0].grad = None
        optimizer.step()
        seen.append([_whole(weight) for weight in weights])
        if callable(switch := getattr(optimizer, "eval", None)):
            switch()
            seen.append([_whole(weight) for weight in weights])
    return seen, optimizer


def _whole(weight: Tensor) -> Tensor:
    value = weight.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def compare(names: list[str], shard_ranks: int) -> dict[str, str]:
    """Differences between steps on shards and on whole weights of one process, by optimizer; empty if there are none."""
    mesh = shard_mesh("cpu", shard_ranks, 60.0)
    placements = [Replicate(), Shard(0)] if mesh.ndim == 2 else [Shard(0)]
    found = {}
    for name in names:
        make = MAKERS[name][0]
        expected, alone = stepped(make, lambda value: value.clone(), lambda optimizer: None)
        sharded, optimizer = stepped(
            make, lambda value: distribute_tensor(value.clone(), mesh, placements), step_on_whole_weights
        )
        assert needs_whole_weights(optimizer)
        problems = []
        for step, (own, usual) in enumerate(zip(sharded, expected, strict=True)):
            problems += [f"weight {i} at {step}" for i, pair in enumerate(zip(own, usual, strict=True)) if not torch.equal(*pair)]
        parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
        if any(not isinstance(weight, DTensor) for weight in parameters):
            problems.append("groups hold no shards any more")
        held = [bool(optimizer.state.get(weight)) for weight in parameters]
        if held != [owns_weight(optimizer, place) for place in range(len(parameters))]:
            problems.append("states of weights that others own")
        if not 0 < sum(held) < len(held):
            problems.append("states are not shared out")
        # or the comparison would hold for weights that nobody moves
        if torch.equal(expected[-1][0], values(0)[0]):
            problems.append("nothing moved")
        if "8 bits" in name and not any(
            state.get("state1") is not None and state["state1"].dtype == torch.uint8 for state in alone.state.values()
        ):
            problems.append("no moment has 8 bits")
        found[name] = ", ".join(problems)
    return found


@pytest.mark.daily("2-2")
@pytest.mark.parametrize("num_ranks,shard_ranks", [(2, 2), (4, 2)])
def test_steps_are_those_of_one_process(ranks, num_ranks: int, shard_ranks: int) -> None:
    for found in ranks(num_ranks).run(compare, NAMES, shard_ranks):
        assert found == dict.fromkeys(NAMES, "")


def test_optimizers_that_update_element_by_element_keep_their_shards() -> None:
    weights = [nn.Parameter(torch.zeros(4, 4))]
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop):
        assert not needs_whole_weights(kind(weights, lr=0.1))
    own = type("Own", (torch.optim.AdamW,), {"__module__": "mine"})
    assert needs_whole_weights(own(weights)) and needs_whole_weights(torch.optim.Muon(weights))


def columns(num_ranks: int) -> str:
    mesh = shard_mesh("cpu", num_ranks, 60.0)
    weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(1)]))
    try:
        step_on_whole_weights(torch.optim.Muon([weight]))
    except ValueError as error:
        return str(error)
    return str(dist.get_rank())


def test_shards_of_columns_are_refused(ranks) -> None:
    for found in ranks(2).run(columns, 2):
        assert found.startswith("a weight of shape (4, 4) is sharded as (Shard(dim=1),)")


class Own(torch.optim.Optimizer):
    """SGD that keeps in its groups what `learn` returns for the weights that have gradients here."""

    def __init__(self, weights: list[nn.Parameter], learn: Callable[[dict[str, Any], list[Tensor]], dict[str, Any]]) -> None:
        super().__init__(weights, {"lr": 1e-2, "betas": (0.9, 0.99), "calls": 0})
        self.learn = learn

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            held = [weight for weight in group["params"] if weight.grad is not None]
            group.update(self.learn(group, held))
            for weight in held:
                weight -= group["lr"] * weight.grad


class Prodigy(Own): ...


# things that an optimizer may learn, and the setting that its error names; "" for what is right on every rank
LEARNT: dict[str, tuple[Callable[[dict[str, Any], list[Tensor]], dict[str, Any]], str]] = {
    "calls": (lambda group, held: {"calls": group["calls"] + 1, "names": ["a", None, 0.5]}, ""),
    "a sum": (lambda group, held: {"size": float(sum(weight.grad.abs().sum() for weight in held))}, "size"),
    "a tensor of one number": (lambda group, held: {"size": sum(weight.grad.abs().sum() for weight in held)}, "size"),
    "the weights' number": (lambda group, held: {"betas": (0.9, 1 / (1 + len(held)))}, "betas"),
    "a vector": (lambda group, held: {"mean": torch.ones(3)}, "mean"),
    "numbers by weight": (lambda group, held: {"seen": {weight: 1 for weight in group["params"]}}, "seen"),
    "tensors by place": (lambda group, held: {"moments": {0: [torch.ones(2)]}}, "moments"),
}


def learning(num_ranks: int) -> dict[str, str]:
    """Errors of steps by what the optimizer learns, with " moved" at their end if weights changed all the same."""
    mesh = shard_mesh("cpu", num_ranks, 60.0)
    found = {}
    for name, (learn, _) in LEARNT.items():
        weights = [nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])) for value in values(0)[:3]]
        optimizer = Own(weights, learn)
        step_on_whole_weights(optimizer)
        for weight, gradient in zip(weights, values(1), strict=False):
            weight.grad = distribute_tensor(gradient, mesh, [Shard(0)])
        found[name] = ""
        try:
            optimizer.step()
        except RuntimeError as error:
            is_moved = not torch.equal(_whole(weights[0]), values(0)[0])
            found[name] = f"{error}{' moved' if is_moved else ''}"
    try:
        step_on_whole_weights(Prodigy([nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))], LEARNT["calls"][0]))
    except ValueError as error:
        found["Prodigy"] = str(error)
    return found


def test_what_looks_across_weights_ends_on_all_ranks_before_weights_change(ranks) -> None:
    first, second = ranks(2).run(learning, 2)
    assert first == second
    for name, (_, setting) in LEARNT.items():
        assert first[name].startswith(f"Own keeps {setting!r} in its groups") if setting else not first[name], first[name]
        assert not first[name].endswith(" moved")
    assert first["Prodigy"].startswith("Prodigy looks across weights")


def test_muon_beside_adamw_is_both_of_torch() -> None:
    weights, twins = ([nn.Parameter(value) for value in values(0)] for _ in range(2))
    both = muon(weights)
    parts = [
        torch.optim.Muon([twin for twin in twins if twin.dim() == 2], lr=1e-2),
        torch.optim.AdamW([twin for twin in twins if twin.dim() != 2], lr=1e-2),
    ]
    for step in range(NUM_STEPS):
        for weight, twin, gradient in zip(weights, twins, values(1 + step), strict=True):
            weight.grad, twin.grad = gradient.clone(), gradient.clone()
        both.step()
        for part in parts:
            part.step()
        if step == 0:
            # checkpoints replace groups and states
            both.load_state_dict(both.state_dict())
    assert all(torch.equal(*pair) for pair in zip(weights, twins, strict=True))
