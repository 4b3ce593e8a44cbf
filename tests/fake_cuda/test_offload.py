"""The host tier on late copies: no wrong value, no wait of the host, bounded memory; each of its guarantees is needed."""

from __future__ import annotations

import gc
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fake_cuda.machine.device import FakeDevice
from hf_longctx.recipes.bench.gpu import smoke_memory
from hf_longctx.recipes.bench.one_document import PlannedDocument, document_plan
from hf_longctx.runtime.activations import host_tier
from hf_longctx.runtime.core import host_copies

CUDA = torch.device("cuda", 0)
# values of one tensor, and of the smallest memory that torch's allocator gives
SIZE = 1 << 14
# lines of the host tier that order copies -> the same without it
GUARANTEES: dict[str, tuple[str, str]] = {
    "a copy follows the copies that it must follow": ("stream.wait_event(ticket)", "pass"),
    "a tensor that leaves is kept": ("self._kept.append((source, ticket))", "pass"),
    "the device waits before a tensor that leaves is dropped": ("self._wait(self._kept[0][1])", "pass"),
    "only tensors that have left are dropped early": ("while self._kept and self._kept[0][1].query():", "while self._kept:"),
    "a copy back follows the copy to the host": ("(self._home, target, (self._arrival,))", "(self._home, target, ())"),
    "a reader waits for the copy back": ("self._tier.copies.wait(ticket)", "pass"),
    "a copy back that nobody read is waited for": ("self._tier.copies.wait(self._returning[1])", "pass"),
    "a freed block remembers its copy back": (
        "self._tier.slab.give(self._run, self._tickets)",
        "self._tier.slab.give(self._run, ())",
    ),
    "a free run remembers its copies": ("_Run(run.offset, run.num_bytes, tickets)", "_Run(run.offset, run.num_bytes, ())"),
    "the part of a run that is taken has its copies": (
        "_Run(fitting.offset, size, fitting.tickets)",
        "_Run(fitting.offset, size, ())",
    ),
    "the rest of a run keeps its copies": ("rest, ()), fitting.tickets)", "rest, ()), ())"),
    "merged runs have the copies of the first": ("before.tickets + run.tickets", "run.tickets"),
    "merged runs have the copies of the second": ("before.tickets + run.tickets", "before.tickets"),
}


def without(line: str, instead: str) -> Any:
    """The module of the host tier, with that of its copies, with one line of either changed."""
    sources = {module: Path(module.__file__).read_text() for module in (host_copies, host_tier)}
    assert sum(source.count(line) for source in sources.values()) == 1, line
    changed = types.ModuleType("changed_host_tier")
    # dataclasses look their module up
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, changed.__name__, changed)
        exec(compile(sources[host_tier].replace(line, instead), changed.__name__, "exec"), changed.__dict__)
        # in place of what that has imported
        exec(compile(sources[host_copies].replace(line, instead), changed.__name__, "exec"), changed.__dict__)
    return changed


def full(value: float, size: int = SIZE) -> Tensor:
    return torch.full((size,), float(value), device=CUDA)


def wrong_values(tiers: Any) -> int:
    """Values that are wrong after storing and fetching in every order that needs some guarantee of the module `tiers`."""
    wrong = 0
    for scenario in (many_leave, dropped_unread, reused_while_it_returns, reused_in_parts, reused_merged):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        wrong += scenario(tiers.HostTier.on(CUDA, 4 * SIZE * 4))
        gc.collect()
    return wrong


def many_leave(tier: Any) -> int:
    """Tensors are stored and dropped, and their memory is overwritten before anybody waits for the copies."""
    homes = []
    for value in range(4):
        source = full(value)
        homes.append(tier.store(source))
        del source
        overwriting = full(-1.0)
    homes[0].prefetch()
    overwriting = [full(-2.0) for _ in range(4)]
    wrong = sum(int((home.fetch() != value).sum()) for value, home in enumerate(homes))
    del overwriting
    return wrong


def dropped_unread(tier: Any) -> int:
    """A tensor is on its way back when it is dropped, and its memory gets other values."""
    home = tier.store(full(1.0))
    torch.cuda.synchronize()
    home.prefetch()
    del home
    others = [full(3.0) for _ in range(4)]
    torch.cuda.synchronize()
    return sum(int((other != 3.0).sum()) for other in others)


def returning(tier: Any, *homes: Any) -> list[tuple[Tensor, Any]]:
    """Starts copies back that nobody waits for yet: (target, ticket) of each; the caller drops the homes."""
    found = []
    for home in homes:
        home.prefetch()
        found.append(home._returning)
        home._returning = None
    return found


def arrived(tier: Any, back: list[tuple[Tensor, Any]], value: float) -> int:
    for _, ticket in back:
        tier.copies.wait(ticket)
    return sum(int((target != value).sum()) for target, _ in back)


def reused_while_it_returns(tier: Any) -> int:
    """A block is given to another tensor while its copy back is under way."""
    second = full(2.0, 4 * SIZE)
    first = tier.store(full(1.0, 4 * SIZE))
    back = returning(tier, first)
    del first
    later = tier.store(second)
    # the copies to the host run first, as far as their order allows
    torch.cuda.current_stream().wait_event(later._arrival)
    wrong = int((full(0.0) != 0).sum())
    return wrong + arrived(tier, back, 1.0)


def reused_in_parts(tier: Any) -> int:
    """Both halves of a block are given away while its copy back is under way."""
    halves = [full(2.0, 2 * SIZE) for _ in range(2)]
    wrong = 0
    for later_half in range(2):
        first = tier.store(full(1.0, 4 * SIZE))
        back = returning(tier, first)
        del first
        # the other half stays as it is
        sources = [halves[0], halves[1]] if later_half else [halves[0]]
        later = []
        for source in sources:
            later.append(tier.slab.take(source.numel() * 4))
        run = later[-1]
        ticket = tier.copies.to_host(
            sources[-1], tier.slab.memory[run.offset :][: run.num_bytes].view(torch.float32), run.tickets
        )
        torch.cuda.current_stream().wait_event(ticket)
        wrong += int((full(0.0) != 0).sum()) + arrived(tier, back, 1.0)
        for run in later:
            tier.slab.give(run, ())
        tier.slab._merge()
    return wrong


def reused_merged(tier: Any) -> int:
    """Two blocks become one while their copies back are under way."""
    whole = full(2.0, 4 * SIZE)
    wrong = 0
    for order in ((0, 1), (1, 0)):
        homes = [tier.store(full(1.0, 2 * SIZE)) for _ in range(2)]
        back = returning(tier, *(homes[place] for place in order))
        homes.clear()
        later = tier.store(whole)
        torch.cuda.current_stream().wait_event(later._arrival)
        wrong += int((full(0.0) != 0).sum()) + arrived(tier, back, 1.0)
        del later
        torch.cuda.synchronize()
    return wrong


def test_no_value_is_wrong_however_late_copies_are(device: FakeDevice) -> None:
    unpinned = device.count("cudaHostUnregister"), device.count("cudaHostUnregister under copies")
    assert wrong_values(host_tier) == 0
    assert device.count("cudaHostUnregister") > unpinned[0]
    assert device.count("cudaHostUnregister under copies") == unpinned[1]


@pytest.mark.parametrize("name", GUARANTEES)
def test_each_guarantee_is_needed(name: str) -> None:
    assert wrong_values(without(*GUARANTEES[name])) > 0


def test_planted_unpinning_under_copies_is_noticed(device: FakeDevice) -> None:
    changed, before = without("    torch.cuda.synchronize()\n", ""), device.count("cudaHostUnregister under copies")
    for tiers in (host_tier, changed):
        # an error inside a step leaves copies under way
        tier = tiers.HostTier.on(CUDA, SIZE * 4)
        home = tier.store(full(1.0))
        del home, tier
        gc.collect()
        assert device.count("cudaHostUnregister under copies") == before + (tiers is changed)


def test_a_host_that_runs_ahead_does_not_fill_the_device() -> None:
    def peak(tiers: Any) -> int:
        tier = tiers.HostTier.on(CUDA, 32 << 20)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_stats()["active_bytes.all.current"]
        homes = [tier.store(torch.full((1 << 18,), float(layer), device=CUDA)) for layer in range(32)]
        found = torch.cuda.memory_stats()["active_bytes.all.peak"] - start
        torch.cuda.synchronize()
        assert all(bool((home.fetch() == layer).all()) for layer, home in enumerate(homes))
        return found >> 20

    # two leave, and one is being made
    assert peak(host_tier) <= 3
    recorded = without("self._leaving.add(source, ticket)", "source.record_stream(self._out)")
    assert peak(recorded) == 32


@pytest.mark.parametrize("name", ["attention and inputs on the host", "four slices, attention kept on the host"])
def test_the_host_waits_for_nothing_inside_a_step(name: str, device: FakeDevice) -> None:
    layer, tile_tokens, slices = smoke_memory.POLICIES[name]
    model, tier = smoke_memory.document_model(CUDA, torch.bfloat16), host_tier.HostTier.on(CUDA, 2**23)
    ids = torch.arange(96, device=CUDA)[None]
    document = PlannedDocument.of(model, ids, document_plan(96, (layer,) * 2, tile_tokens, slices), tier)
    document.step()
    with device.waits() as waits:
        loss = document.step()
    assert waits == []
    with device.waits() as waits:
        float(loss)
    assert len(waits) == 1
    document.close()
