"""Every wait of the package is needed: without it, some test sees wrong values, or memory that is given back too early.

`tests/invariants/test_every_wait.py` refuses a wait in the source that has no line in `ONE_PROCESS` or `TWO_RANKS`. Both also
have the lines that remember what is to be waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from helpers.models.reference import TOLERANCE
from helpers.ranks.rank_pool import RankFailure, RankPool

from fake_cuda.machine import scenarios
from fake_cuda.machine.device import FakeDevice
from fake_cuda.machine.removals import Removal, removed
from fake_cuda.test_host_updates import num_wrong
from fake_cuda.test_offload import wrong_values
from fake_cuda.test_ranks import ON_HOST, found_by


def wrong_updates(device: FakeDevice) -> int:
    """Weights that updates on the host leave wrong."""
    return num_wrong()


_COPIES = partial(Removal, "runtime.core.host_copies")
_HOST = partial(Removal, "runtime.activations.host_tier")
_UPDATES = partial(Removal, "runtime.parameters.host_steps")
_SHARDS = partial(Removal, "runtime.parameters.host_layers")
_GATHERS = partial(Removal, "runtime.parameters.gathers")
_SUMS = partial(Removal, "runtime.parameters.sums")
_LINKS = partial(Removal, "runtime.process_groups")

# purpose of a line -> the line, and what goes wrong without it
ONE_PROCESS: dict[str, tuple[Removal, Callable[[FakeDevice], int]]] = {
    "a copy follows the copies that it must follow": (_COPIES("stream.wait_event(ticket)"), wrong_values),
    "a copy follows the work of the current stream": (
        _COPIES("stream.wait_stream(torch.cuda.current_stream(self._device))"),
        scenarios.stored_while_it_comes,
    ),
    "a reader's stream waits": (_COPIES("torch.cuda.current_stream(self._device).wait_event(ticket)"), wrong_values),
    "a tensor that leaves is kept": (_COPIES("self._kept.append((source, ticket))"), wrong_values),
    "the device waits before a tensor that leaves is dropped": (_COPIES("self._wait(ticket)"), wrong_values),
    "a tensor in several blocks is kept until all copies have been made": (
        _HOST("is_kept=not is_last", "is_kept=True"),
        wrong_values,
    ),
    "a reader waits for the copy back": (_HOST("self._tier.copies.wait(ticket)"), wrong_values),
    "a copy back that nobody read is waited for": (_HOST("self._tier.copies.wait(part.back)"), wrong_values),
    "a freed block remembers its copy back": (
        _HOST("give(part.run, () if part.back is None else (part.back,))", "give(part.run, ())"),
        wrong_values,
    ),
    "a free run remembers its copies": (
        _HOST("_Run(run.offset, run.num_bytes, tickets)", "_Run(run.offset, run.num_bytes, ())"),
        wrong_values,
    ),
    "the part of a run that is taken has its copies": (
        _HOST("_Run(fitting.offset, size, fitting.tickets)", "_Run(fitting.offset, size, ())"),
        wrong_values,
    ),
    "the rest of a run keeps its copies": (_HOST("rest, ()), fitting.tickets)", "rest, ()), ())"), wrong_values),
    "merged runs have the copies of the first": (_HOST("before.tickets + run.tickets", "run.tickets"), wrong_values),
    "merged runs have the copies of the second": (_HOST("before.tickets + run.tickets", "before.tickets"), wrong_values),
    "no memory is unpinned under copies": (_COPIES("    torch.cuda.synchronize()\n", ""), scenarios.unpinned_under_copies),
    "the CPU waits for a copy to the host": (_COPIES("ticket.synchronize()"), wrong_updates),
    "the CPU waits for all that it updates": (_UPDATES("self.copies.wait_on_host(ticket)"), wrong_updates),
    "the CPU waits for a part before it is updated": (_UPDATES("part.wait()"), wrong_updates),
    "the device waits for weights that come back": (_UPDATES("self.copies.wait(ticket)"), wrong_updates),
    "the device waits for every part": (_UPDATES("part.end()"), wrong_updates),
    "times are read when their events have passed": (
        Removal("runtime.core.clock", "stop.synchronize()"),
        scenarios.timed_before_it_passed,
    ),
    "rates of copies count until they are done": (
        Removal("runtime.measure", "torch.cuda.synchronize(device)"),
        scenarios.copies_timed,
    ),
    "the rate of a slab counts until copies are done": (
        Removal("hf.models.activations", "torch.cuda.synchronize(device)"),
        scenarios.slab_timed,
    ),
    "no rank runs ahead of the one that keeps gathered weights": (
        Removal("hf.checkpoints.weights", "torch.cuda.current_stream(whole.device).synchronize()"),
        scenarios.runs_ahead_of_a_gathered_weight,
    ),
}
# lines that two ranks need; a text is the name of a plan, whose gradients are wrong
TWO_RANKS: dict[str, tuple[Removal, str | tuple[Callable[..., int], int]]] = {
    "a ring reads what has arrived": (Removal("runtime.attention.ring", "request.wait()"), "ring"),
    "attention reads heads that have arrived": (
        Removal("runtime.attention.exchanges", "        work.wait()\n", ""),
        "slices of heads in parts",
    ),
    "a step reads gradients that are summed": (Removal("runtime.parameters.gradients", "self._work.wait()"), "early sums"),
    "a gather ends when all weights have arrived": (
        Removal("runtime.core.torch_versions", "    if work is not None:\n        work.wait()\n", ""),
        "gathered",
    ),
    "a layer reads weights that are gathered": (
        _GATHERS("self._group.device_handle.current_stream().wait_event(end)"),
        "gathered",
    ),
    "a gather reads shards that have changed": (
        _GATHERS("stream.wait_stream(group.device_handle.current_stream())"),
        (scenarios.gathered_after_a_change, 1),
    ),
    "copies of nodes are of shards that have changed": (
        _GATHERS("across.wait_stream(group.device_handle.current_stream())"),
        (scenarios.held_after_a_change, 1),
    ),
    "a gather reads copies of nodes that are there": (
        _GATHERS("stream.wait_event(held)"),
        (scenarios.gathered_before_it_is_held, 1),
    ),
    "a step reads gradients that have been added up": (
        _SUMS("group.device_handle.current_stream().wait_event(end)"),
        (scenarios.read_before_it_is_summed, 1),
    ),
    "sums of a node are complete before they cross": (
        _SUMS("across.wait_event(part.end)"),
        (scenarios.crossing_before_it_is_added, 1),
    ),
    "a step reads sums that have crossed": (
        _SUMS("group.device_handle.current_stream().wait_event(crossed)"),
        (scenarios.read_before_it_has_crossed, 1),
    ),
    "sums read gradients that are there": (
        _SUMS("stream.wait_stream(device.current_stream())"),
        (scenarios.summed_before_it_is_there, 1),
    ),
    "shards have left before their memory is given back": (
        _SHARDS("for ticket in tickets:\n            self._copies.wait(ticket)"),
        ON_HOST,
    ),
    "a gather reads shards that are there": (_SHARDS("self._copies.wait(slot.ticket)"), ON_HOST),
    "whoever reads shards finds them back": (
        _SHARDS("for ticket in returning:\n            self._copies.wait(ticket)"),
        ON_HOST,
    ),
    "a stage reads what has arrived": (
        _LINKS("        work.wait()\n        return buffer", "        return buffer"),
        (scenarios.received_and_read, 2),
    ),
    "a stage keeps what has not left": (
        _LINKS("self._sending.popleft()[0].wait()", "self._sending.popleft()"),
        (scenarios.sent_and_dropped, 2),
    ),
    "links keep what connects them": (
        _LINKS("            work.wait()\n", ""),
        (scenarios.connected_and_dropped, 2),
    ),
    "layers with states read what has arrived": (
        Removal("runtime.states.passing", "request.wait()"),
        (scenarios.states_exchanged, 1),
    ),
    "rates of messages count until they have arrived": (
        Removal("runtime.measure", "request.wait()"),
        (scenarios.messages_timed, 1),
    ),
}


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_wait_is_needed(name: str, device: FakeDevice) -> None:
    removal, scenario = ONE_PROCESS[name]
    with removed(removal):
        try:
            wrong = scenario(device)
        except RuntimeError:
            wrong = 1
    assert wrong


# in one order in all of pytest's workers, which a set of functions has not
@pytest.mark.parametrize(
    "scenario", dict.fromkeys(scenario for _, scenario in ONE_PROCESS.values()), ids=lambda each: each.__name__
)
def test_nothing_is_wrong_with_all_waits(scenario: Callable[[FakeDevice], int], device: FakeDevice) -> None:
    assert scenario(device) == 0


@pytest.mark.parametrize("name", TWO_RANKS)
def test_wait_between_ranks_is_needed(name: str, two_devices: RankPool) -> None:
    removal, seen = TWO_RANKS[name]
    # the line must be there, since without it a rank may fail: labels, say, that a late message overwrites
    with removed(removal):
        pass
    assert not _is_wrong(two_devices, seen)
    try:
        is_wrong = _is_wrong(two_devices, seen, removal)
    except RankFailure:
        is_wrong = True
    assert is_wrong


def _is_wrong(pool: RankPool, seen: str | tuple[Callable[..., int], int], *removals: Removal) -> bool:
    """Whether any rank has wrong gradients of the plan `seen`, or finds something wrong in that scenario."""
    if isinstance(seen, str):
        return any(max(found.errors) > TOLERANCE for found in found_by(pool, seen, *removals))
    return any(pool.run(scenarios.on_rank, *seen, removals, timeout_s=280.0))
