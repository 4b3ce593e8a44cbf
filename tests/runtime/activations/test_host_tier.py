"""The host tier: exact bytes, no block reused too early however long copies are delayed, and the gradients of plain HF."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.measures.cudnn_plans import cudnn_on_the_cpu
from helpers.measures.engine_steps import EngineStep
from helpers.measures.late_copies import LateCopies, SlowlyLeaving
from helpers.models.reference import TOLERANCE, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_longctx.plan.core.types import LayerPolicy, TensorShare
from hf_longctx.runtime.activations import host_tier
from hf_longctx.runtime.activations.engine import LayerSlot
from hf_longctx.runtime.activations.host_tier import HostSlab, HostTier, SplitTensor
from hf_longctx.runtime.core.host_copies import Leaving, PlainCopies, block_bytes

CPU = torch.device("cpu")
LENGTHS = [13, 1, 31, 7]


def split_layer(
    input_host: float = 0.5, recompute: float = 0.25, host: float = 0.5, mlp_recompute: float = 1.0, mlp_host: float = 0.0
) -> LayerPolicy:
    return LayerPolicy(
        (
            TensorShare("layer_input", host=input_host, device=1 - input_host),
            TensorShare("attention_output", recompute=recompute, host=host, device=1 - recompute - host),
            TensorShare("qkv", recompute=1.0),
            TensorShare("mlp", recompute=mlp_recompute, host=mlp_host, device=1 - mlp_recompute - mlp_host),
        )
    )


class Step(EngineStep):
    """One rank's model under an engine with a host tier, against plain HF."""

    def __init__(self, tier: HostTier, lengths: list[int] = LENGTHS, family: str = "llama") -> None:
        super().__init__(tier, lengths, partial(build_model, ModelCase(family, promoted=True)))

    def error(self) -> float:
        """Largest error of the gradients, which are cleared."""
        errors = [relative_error(p.grad, self.expected[name]) for name, p in self.model.named_parameters()]
        self.model.zero_grad()
        return float("nan") if any(error != error for error in errors) else max(errors)


def tiers() -> list[HostTier]:
    return [HostTier(2**20, copies) for copies in (PlainCopies(), LateCopies(False), LateCopies(True))]


@pytest.mark.daily("llama-2")
@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gradients_are_those_of_plain_hf_however_late_copies_are(kind: int, family: str) -> None:
    step = Step(tiers()[kind], family=family)
    for _ in range(2):
        loss, _ = step.forward((split_layer(mlp_recompute=0.25, mlp_host=0.5), split_layer(1.0, 0.0, 1.0, 0.0, 1.0)))
        loss.backward()
        assert step.error() <= TOLERANCE
        del loss
        assert step.engine.tier.stored_bytes == 0


@pytest.mark.parametrize("family", ["llama", "mistral_window"])
def test_outputs_from_the_host_reach_cudnn_in_the_layout_that_it_expects(family: str) -> None:
    policies = split_layer(recompute=0.0, host=1.0), split_layer(recompute=0.0, host=0.0)
    step = Step(HostTier(2**20, LateCopies(True)), family=family)
    with cudnn_on_the_cpu() as plans:
        step.forward(policies)[0].backward()
    assert step.error() <= TOLERANCE
    assert plans.calls and not plans.misread


def test_dimensions_of_a_stored_tensor_keep_their_order_in_memory() -> None:
    tier, heads_first = HostTier(2**12, PlainCopies()), torch.arange(60.0).view(3, 5, 4)
    tokens_first = heads_first.transpose(0, 1)
    for tensor in (heads_first, tokens_first):
        found = tier.store(tensor).fetch()
        assert torch.equal(found, tensor) and found.stride() == tensor.stride()
    # a part of the tokens has gaps
    part = tier.store(tokens_first[2:4]).fetch()
    assert torch.equal(part, tokens_first[2:4]) and part.is_contiguous()


def test_a_slab_in_many_pieces_is_searched_by_size() -> None:
    slab = HostSlab(2**24, is_pinned=False)
    runs = [slab.take(1, 64 * (1 + number % 40))[0][1] for number in range(10_000)]
    for run in runs[::2]:
        slab.give(run, ())
    with patch.object(host_tier, "_size", wraps=host_tier._size) as sizes:
        ((_, taken),) = slab.take(1, 64 * 21)
    assert taken.num_bytes == 64 * 21
    # two bisections at most, not one look at each of 5,000 pieces
    assert sizes.call_count <= 40


@pytest.mark.wide
@settings(max_examples=25, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(st.data())
def test_random_shares_match_and_hold_exactly_the_planned_bytes(data: st.DataObject) -> None:
    share = st.floats(0, 1).map(lambda value: round(value, 2))
    policies = []
    for _ in range(2):
        recompute = data.draw(share)
        mlp_recompute = data.draw(share)
        hosts = [round(data.draw(share) * (1 - part), 2) for part in (recompute, mlp_recompute)]
        policies.append(split_layer(data.draw(share), recompute, hosts[0], mlp_recompute, hosts[1]))
    # at least a few tokens: with one or two the gradients of queries are rounding noise
    lengths = [17, *data.draw(st.lists(st.sampled_from([1, 2, 7, 31]), max_size=2))]
    step = Step(HostTier(2**20, LateCopies(data.draw(st.booleans()))), lengths)
    loss, activations = step.forward(tuple(policies))
    tokens = sum(lengths)
    on_device, on_host = 0, 0
    for policy in policies:
        # fp64: 32 features of the input; 32 of the output and an LSE for each of 4 heads; for the MLP its input and 4 * 48
        sizes = {"layer_input": 32 * 8, "attention_output": 32 * 8 + 4 * 8, "mlp": (32 + 4 * 48) * 8}
        for name, token_bytes in sizes.items():
            start, host_stop = policy.share(name).cuts(tokens)
            on_host += (host_stop - start) * token_bytes
            on_device += (tokens - host_stop) * token_bytes
    assert activations.held_bytes() == (on_device, on_host)
    assert step.engine.tier.stored_bytes == on_host
    loss.backward()
    assert step.error() <= TOLERANCE
    del loss
    assert activations.held_bytes()[1] == step.engine.tier.stored_bytes == 0


@pytest.mark.wide
def test_two_forwards_in_flight_do_not_disturb_each_other() -> None:
    for tier in tiers():
        step = Step(tier)
        for order in ((0, 1), (1, 0)):
            losses = [step.forward((split_layer(),) * 2)[0] for _ in range(2)]
            for place in order:
                losses[place].backward()
            for parameter in step.model.parameters():
                parameter.grad /= 2
            assert step.error() <= TOLERANCE


def test_a_second_backward_finds_layer_inputs_again() -> None:
    step = Step(HostTier(2**20, LateCopies(True)))
    loss, _ = step.forward((split_layer(mlp_recompute=0.25, mlp_host=0.5),) * 2)
    loss.backward(retain_graph=True)
    step.model.zero_grad()
    loss.backward()
    assert step.error() <= TOLERANCE


def fetches_and_replays(policies: tuple[LayerPolicy, ...], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The order in which a step begins to copy tensors back and to replay layers; checks its gradients."""
    log: list[str] = []
    to_device, unpack = LateCopies.to_device, LayerSlot.unpack_input
    with monkeypatch.context() as patch:
        patch.setattr(LateCopies, "to_device", lambda *arguments: (log.append("back"), to_device(*arguments))[1])
        patch.setattr(LayerSlot, "unpack_input", lambda *arguments: (log.append("replay"), unpack(*arguments))[1])
        step = Step(HostTier(2**20, LateCopies(False)))
        step.forward(policies)[0].backward()
    assert step.error() <= TOLERANCE
    return log


def test_the_layer_before_is_fetched_while_a_layer_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    # input, output and LSE of the first layer are being fetched before the second layer's backward is over
    log = fetches_and_replays((split_layer(),) * 2, monkeypatch)
    # fetches the second layer's own input and with it the three tensors of the first; nothing of the first is left to fetch
    assert log.count("back") == 6
    assert log.index("replay") == 0 and "back" not in log[len(log) - log[::-1].index("replay") :]


def test_the_layer_before_is_fetched_while_a_layer_that_keeps_everything_runs_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetches_and_replays((split_layer(), LayerPolicy()), monkeypatch) == ["back"] * 3 + ["replay"]
    # with the kept layer below it, nothing fetches the moved layer before its own replay
    assert fetches_and_replays((LayerPolicy(), split_layer()), monkeypatch)[0] == "replay"


@pytest.mark.parametrize(
    "change", [lambda hidden: hidden * 1, lambda hidden: hidden.view_as(hidden), lambda hidden: hidden.mul_(1)]
)
def test_hooks_on_a_kept_layer_change_nothing_about_what_is_fetched_behind_it(change: Callable[[Tensor], Tensor]) -> None:
    step = Step(HostTier(2**20, LateCopies(False)))
    handle = step.model.model.layers[1].register_forward_hook(lambda module, given, output: change(output))
    loss, _ = step.forward((split_layer(mlp_recompute=0.25, mlp_host=0.5), LayerPolicy()))
    loss.backward(retain_graph=True)
    step.model.zero_grad()
    loss.backward()
    assert step.error() <= TOLERANCE
    handle.remove()
    del loss
    assert step.engine.tier is not None and step.engine.tier.stored_bytes == 0


def interleaved_reuse(tier: HostTier) -> tuple[Tensor, Tensor]:
    """(what was stored, what came back) if a block is given to another tensor while its copy back is under way."""
    stored = torch.arange(100.0)
    first = tier.store(stored)
    first.prefetch()
    # on CUDA `fetch` lets the device wait, not the host
    (target, (ticket,)), first._returning = first._returning, None
    del first
    second = tier.store(torch.full((100,), -1.0))
    tier.copies.wait(ticket)
    assert torch.equal(second.fetch(), torch.full((100,), -1.0))
    return stored, target


def test_a_block_is_not_reused_before_its_copy_back() -> None:
    for late in (False, True):
        expected, found = interleaved_reuse(HostTier(block_bytes(400), LateCopies(late)))
        assert torch.equal(expected, found)


def test_planted_early_reuse_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    give = HostSlab.give
    monkeypatch.setattr(HostSlab, "give", lambda slab, run, tickets: give(slab, run, ()))
    expected, found = interleaved_reuse(HostTier(block_bytes(400), LateCopies(False)))
    assert not torch.equal(expected, found)


def test_planted_read_before_the_copy_is_done_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateCopies, "wait", lambda copies, ticket: None)
    step = Step(HostTier(2**20, LateCopies(False)))
    step.forward((split_layer(),) * 2)[0].backward()
    assert not step.error() <= TOLERANCE


def leave(sizes: list[int], room_bytes: int | None) -> tuple[Leaving, list[weakref.ref[Tensor]], list[int]]:
    """Sends tensors of these bytes; returns also references to them, and which copies the device has waited for."""
    sources: list[weakref.ref[Tensor]] = []
    waited: list[int] = []

    def wait(ticket: int) -> None:
        assert sources[ticket]() is not None
        waited.append(ticket)

    leaving = Leaving(wait)
    for ticket, size in enumerate(sizes):
        source = torch.zeros(size, dtype=torch.uint8)
        sources.append(weakref.ref(source))
        leaving.add(source, ticket, room_bytes)
        del source
    return leaving, sources, waited


@pytest.mark.parametrize(
    ("sizes", "room_bytes", "expected"),
    [
        ([3, 3, 3, 3], None, [0, 1]),
        # one layer after the other, of 100 bytes each: the device waits for what left one layer ago
        ([10, 30, 60, 10, 30, 60], 100, [0, 1, 2]),
        ([60, 10, 10, 10, 10], 100, []),
        # one that is larger than the room waits for all others
        ([40, 40, 150, 1], 100, [0, 1, 2]),
    ],
)
def test_tensors_that_leave_are_kept_until_the_device_waits_for_their_copies(
    sizes: list[int], room_bytes: int | None, expected: list[int]
) -> None:
    leaving, sources, waited = leave(sizes, room_bytes)
    assert waited == expected
    assert [place for place, source in enumerate(sources) if source() is None] == expected
    assert leaving.num_bytes == sum(sizes) - sum(sizes[place] for place in waited)
    leaving.drop_all()
    assert waited == list(range(len(sizes))) and leaving.num_bytes == 0
    assert not any(source() is not None for source in sources)


def test_a_tier_gives_tensors_that_leave_the_room_of_the_layer_that_sends_most(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms: list[int | None] = []
    to_host = PlainCopies.to_host
    monkeypatch.setattr(
        PlainCopies, "to_host", lambda *arguments, is_kept, room_bytes: (rooms.append(room_bytes), to_host(*arguments))[1]
    )
    tier, held = HostTier(2**12, PlainCopies()), []
    for layer in ([64, 128], [128], [64, 128, 64], []):
        tier.begin_layer()
        held += [tier.store(torch.zeros(size, dtype=torch.uint8)) for size in layer]
    assert rooms == [64, 192, 192, 192, 192, 256]
    # layers of another chunk may send less, whatever else is stored
    tier.begin_chunk()
    tier.begin_layer()
    tier.store(torch.zeros(32, dtype=torch.uint8))
    assert rooms[-1] == 32


def test_layers_begin_anew_in_every_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    begin_chunk, begin_layer, store = HostTier.begin_chunk, HostTier.begin_layer, HostTier.store
    monkeypatch.setattr(HostTier, "begin_chunk", lambda tier, most: (log.append("chunk"), begin_chunk(tier, most))[1])
    monkeypatch.setattr(HostTier, "begin_layer", lambda tier: (log.append("layer"), begin_layer(tier))[1])
    monkeypatch.setattr(HostTier, "store", lambda tier, tensor: (log.append("store"), store(tier, tensor))[1])
    step = Step(HostTier(2**20, PlainCopies()))
    step.forward((split_layer(),) * 2)[0].backward()
    # layer input, output and LSE of each layer; replays store nothing
    assert log == ["chunk", *["layer", "store", "store", "store"] * 2]


def test_the_device_waits_behind_layers_that_send_nothing_and_behind_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, leaving = SlowlyLeaving(), []
    begin_layer = HostTier.begin_layer
    monkeypatch.setattr(HostTier, "begin_layer", lambda tier: (begin_layer(tier), leaving.append(copies.leaving.num_bytes))[0])
    for policies, expected in (
        ((split_layer(), LayerPolicy()), [False, True]),
        ((LayerPolicy(), split_layer()), [False, False]),
        ((split_layer(),) * 2, [False, True]),
    ):
        leaving.clear()
        step = Step(HostTier(2**20, copies))
        loss, _ = step.forward(policies)
        assert [num_bytes > 0 for num_bytes in leaving] == expected and not copies.leaving.num_bytes
        loss.backward()
    # a layer later, all have left
    tier = HostTier(2**12, copies)
    tier.store(torch.zeros(64))
    tier.begin_layer()
    assert copies.leaving.num_bytes
    tier.begin_layer()
    assert not copies.leaving.num_bytes
    # nor does what a forward left that ended in an error
    tier.store(torch.zeros(64))
    tier.begin_chunk()
    assert not copies.leaving.num_bytes


def test_tensors_of_several_layers_may_leave_beside_the_next_pass() -> None:
    copies, moved = SlowlyLeaving(), split_layer(1.0, 0.0, 1.0)
    step = Step(HostTier(2**20, copies))
    left = []
    for leaving_layers in (1, 2, 3):
        loss, _ = step.forward((moved,) * 2, leaving_layers=leaving_layers)
        left.append(copies.leaving.num_bytes)
        # a backward fetches tensors of its own chunk and waits for none that leave
        loss.backward()
        assert copies.leaving.num_bytes == left[-1] and step.error() <= TOLERANCE
        step.engine.settle()
        assert not copies.leaving.num_bytes
    # the sources of two layers, and no more than there are
    assert left[0] == 0 < left[1] == left[2]
    # the next forward waits for what is still leaving
    step.forward((moved,) * 2, leaving_layers=2)
    assert copies.leaving.num_bytes
    step.engine.tier.begin_chunk()
    assert not copies.leaving.num_bytes


@pytest.mark.parametrize("leaving_layers", [2, 5])
@pytest.mark.parametrize("out_is_late", [False, True])
def test_gradients_are_right_however_late_tensors_leave_beside_the_next_pass(leaving_layers: int, out_is_late: bool) -> None:
    step = Step(HostTier(2**20, LateCopies(out_is_late)))
    first, second = (step.forward((split_layer(1.0, 0.0, 1.0),) * 2, leaving_layers=leaving_layers)[0] for _ in range(2))
    for loss in (first, second):
        loss.backward()
        step.engine.settle()
        assert step.error() <= TOLERANCE


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_tensor_that_fits_into_no_block_is_stored_in_several(late: bool, transposed: bool) -> None:
    # blocks of 64 bytes, of which every second one is free
    tier = HostTier(64 * 16, LateCopies(late))
    small = [tier.store(torch.zeros(16)) for _ in range(16)]
    del small[::2]
    rows = torch.arange(6 * 12.0).view(6, 12)
    tensor = rows.T if transposed else rows
    stored = tier.store(tensor)
    assert len(stored._parts) == 5 and tier.stored_bytes == 8 * 64 + 6 * 48
    found = stored.fetch()
    assert torch.equal(found, tensor) and found.stride() == tensor.stride()
    assert [int(each.fetch().sum()) for each in small] == [0] * 8
    del stored, small
    assert tier.stored_bytes == 0 and tier.store(torch.ones(256)).fetch().sum() == 256


def test_a_tensor_with_gaps_is_stored_in_rows() -> None:
    tier = HostTier(64 * 16, LateCopies(True))
    small = [tier.store(torch.zeros(16)) for _ in range(16)]
    del small[::2]
    tensor = torch.arange(6 * 24.0).view(1, 6, 24)[..., :12]
    stored = tier.store(tensor)
    assert len(stored._parts) == 6
    assert torch.equal(stored.fetch(), tensor) and stored.fetch().is_contiguous()


def test_a_tensor_for_which_blocks_do_not_suffice_takes_none() -> None:
    tier = HostTier(64 * 4, PlainCopies())
    held = [tier.store(torch.zeros(64, dtype=torch.uint8)) for _ in range(4)]
    del held[::2]
    with pytest.raises(ValueError, match=r"0.000 MiB of saved tensors do not fit .* are free; raise host_gib"):
        tier.store(torch.zeros(3, 64, dtype=torch.uint8))
    again = [tier.store(torch.ones(64, dtype=torch.uint8)) for _ in range(2)]
    assert tier.stored_bytes == 4 * 64 and all(each.fetch().sum() == 64 for each in again)


def test_blocks_are_not_rounded_to_powers_of_two() -> None:
    # 3 blocks of 65 * 64 bytes fit into 195 * 64 bytes
    tier = HostTier(195 * 64, PlainCopies())
    held = [tier.store(torch.zeros(65 * 64, dtype=torch.uint8)) for _ in range(3)]
    assert tier.stored_bytes == tier.peak_bytes == sum(tensor.num_bytes for tensor in held) == 195 * 64


def test_freed_neighbours_are_merged_when_nothing_fits() -> None:
    tier = HostTier(192, PlainCopies())
    held = [tier.store(torch.zeros(64, dtype=torch.uint8)) for _ in range(3)]
    del held[:2]
    whole = tier.store(torch.ones(128, dtype=torch.uint8))
    assert whole.fetch().sum() == 128


def test_a_full_slab_says_what_is_missing() -> None:
    tier = HostTier(1024, PlainCopies())
    held = tier.store(torch.zeros(1000, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"do not fit into the host slab: .* of its 0.001 MiB are free; raise host_gib"):
        tier.store(torch.zeros(100, dtype=torch.uint8))
    assert tier.stored_bytes == held.num_bytes


def test_a_full_slab_gets_pieces_beside_it_up_to_its_limit() -> None:
    tier = HostTier(128, PlainCopies(), most_bytes=512)
    held = [tier.store(torch.full((size,), value, dtype=torch.uint8)) for value, size in enumerate((128, 64, 192))]
    assert tier.slab.beside_bytes == 384
    assert [int(tensor.fetch().sum()) for tensor in held] == [0, 64, 384]
    with pytest.raises(ValueError, match=r"0.000 MiB of saved tensors do not fit .* raise host_gib"):
        tier.store(torch.zeros(129, dtype=torch.uint8))
    del held
    # freed runs of the slab and its pieces are not merged into one, so a tensor takes several
    with pytest.raises(ValueError, match="do not fit"):
        tier.store(torch.zeros(513, dtype=torch.uint8))
    assert len(tier.store(torch.zeros(8, 64, dtype=torch.uint8))._parts) == 2


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 300)), max_size=60), st.booleans(), st.sampled_from([2048, 512, 0]))
def test_any_order_of_storing_and_fetching_returns_what_was_stored(
    steps: list[tuple[int, int]], late: bool, slab_bytes: int
) -> None:
    # where the slab is small, pieces of the size of one tensor may lie beside it
    with patch.object(host_tier, "_PIECE_BYTES", 64):
        tier = HostTier(slab_bytes, LateCopies(late), most_bytes=8 * 2048 - slab_bytes)
        _store_and_fetch(tier, steps)


def _store_and_fetch(tier: HostTier, steps: list[tuple[int, int]]) -> None:
    held: dict[int, tuple[Any, Tensor]] = {}
    for number, (place, size) in enumerate(steps):
        if place in held:
            tensor, expected = held.pop(place)
            if number % 2:
                tensor.prefetch()
            assert torch.equal(tensor.fetch(), expected)
            del tensor
        elif sum(block_bytes(tensor.num_bytes) for tensor, _ in held.values()) + block_bytes(4 * size) <= 1024:
            data = torch.full((size,), float(number))
            held[place] = (tier.store(data), data.clone())
    assert tier.stored_bytes == sum(tensor.num_bytes for tensor, _ in held.values())


def test_a_split_tensor_drops_its_front() -> None:
    tensor = torch.arange(20.0).view(10, 2)
    split = SplitTensor(tensor, TensorShare("layer_input", recompute=0.3, host=0.5, device=0.2), HostTier(1024, PlainCopies()))
    assert (split.start, split.host_bytes, split.device_bytes) == (3, 5 * 8, 2 * 8)
    assert torch.equal(split.fetch(), tensor[3:])


def test_the_tier_of_the_cpu_needs_no_stream() -> None:
    assert isinstance(HostTier.on(CPU, 1024).copies, PlainCopies)
    assert block_bytes(65) == 128
