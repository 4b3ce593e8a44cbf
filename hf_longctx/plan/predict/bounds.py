"""Bounds the seconds of a whole step by prices of memory, and finds the number of micro-batches of least seconds.

Both rest on prices. Take any plan of a step on N ranks and a price of p seconds for a byte of room. The
rank-seconds of a group of d ranks are at least

    d * ( group_s  +  sum over its sequences of (seconds + added seconds at p)  -  p * room )

since its added seconds are. A group needs a slot of every of its ranks, which costs c seconds: its fixed seconds and its gathers.
With p * room = c the number of slots drops out, and the sum over sequences, each at its cheapest degree, divided by N, is a lower
bound. It is tighter with a price p >= c / room of its own for every sequence and degree,

    added seconds of the sequence  =  max over p of  ( least_s(p) - p * room + c ),

where the room, bought at a higher price, counts for this sequence alone: the group's own price is then the highest of its
sequences, at which the added seconds of the others are no less. Two kinds of room are bounded separately: device and host
together, and the device with the bytes that the link copies during the forwards, which every sequence brings along.

Given a plan of `most_s` seconds, degrees at which a sequence alone would take longer may be left out.

Prices of memory give the fewest seconds that a step must add if the tensors that its sequences save do not fit. The bytes that a
rank saves for one chunk are kept, copied to the host, or recomputed. Let a class of tensors have b bytes whose recomputation
takes t seconds. Bytes that are not recomputed need room. So a price of p seconds per byte of room gives a lower bound on the
added seconds of any policies, for every p (Lagrange):

    added seconds  >=  sum over classes of min(t, p b)  -  p room

Attention that is recomputed in part takes the first rows of its documents: the first r of the rows of a causal triangle hold at
least r^2 of its pairs, so that its least seconds at a price are those of min over r of r^2 t + p (1 - r) b.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hf_longctx.plan.chunks import LEAST_SLICE_TOKENS
from hf_longctx.plan.core.settings import ActivationBudget
from hf_longctx.plan.core.types import Chunk, FloatArray, GroupShape, LayerRange, Span, small_tile
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.cost.weight_traffic import whole_gathers
from hf_longctx.plan.groups.problem import GroupingProblem
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.layer import Load, OutsideBytes
from hf_longctx.plan.model.layers import ATTENTION
from hf_longctx.plan.policies.slots import kind_slot


@dataclass(frozen=True, slots=True, eq=False)
class MemoryPrices:
    """Bytes that whole sequences save on one rank, and seconds to recompute them.

    Classes without bytes, or that cannot be kept, are left out.
    """

    # tokens of the sequences
    lengths: FloatArray
    # for one token, of each class whose seconds are linear in tokens, in all layers of one kind
    num_bytes: FloatArray
    seconds: FloatArray
    # attention outputs of each kind of layer: bytes of one token, seconds of one query-key pair
    pair_bytes: FloatArray
    pair_s: FloatArray
    # query-key pairs of every sequence [kind, sequence]
    pairs: FloatArray

    @classmethod
    def of(cls, lengths: Sequence[int], costs: CostModel) -> MemoryPrices:
        """Prices of these sequences. They serve every degree: a rank of d has 1/d of the tokens and pairs."""
        model = costs.model
        kinds = model.layer_kinds(LayerRange(0, model.num_layers)) or (ATTENTION,) * model.num_layers
        tokens = np.asarray(lengths, dtype=np.float64)
        # many tokens, among which fixed seconds of exchanges disappear
        sample = Chunk(0, (Span(0, 0, 1 << 20),))
        linear: list[tuple[float, float]] = []
        curved: list[tuple[float, float, FloatArray]] = []
        for kind in dict.fromkeys(kinds):
            count, slot = kinds.count(kind), kind_slot(costs, sample, GroupShape(1), kind)
            for item in slot.saved:
                item_bytes = count * item.num_bytes / sample.num_tokens
                if not (item.can_keep and item.num_bytes):
                    continue
                if item.documents:
                    seen: FloatArray = tokens * item.pairs.seen(np.zeros_like(tokens), tokens)
                    curved.append((item_bytes, count * item.recompute_s / item.pairs.of_chunk(sample), seen))
                else:
                    linear.append((item_bytes, count * item.recompute_s / sample.num_tokens))
        return cls(
            lengths=tokens,
            num_bytes=np.array([item_bytes for item_bytes, _ in linear]),
            seconds=np.array([again_s for _, again_s in linear]),
            pair_bytes=np.array([item_bytes for item_bytes, _, _ in curved]),
            pair_s=np.array([again_s for _, again_s, _ in curved]),
            pairs=np.array([seen for _, _, seen in curved]).reshape(len(curved), len(tokens)),
        )

    def least_s(self, price: FloatArray) -> FloatArray:
        """Least seconds on one rank for bytes that are recomputed, or held at `price` seconds per byte.

        price: a column of prices; returns [price, sequence]. Ranks of a group of d take 1/d of these seconds.
        """
        found: FloatArray = np.minimum(self.seconds, price[..., None] * self.num_bytes).sum(axis=-1) * self.lengths
        for num_bytes, pair_s, pairs in zip(self.pair_bytes, self.pair_s, self.pairs, strict=True):
            whole_s, held_s = pair_s * pairs, price * num_bytes * self.lengths
            with np.errstate(divide="ignore", invalid="ignore"):
                partial_s = np.where(held_s < 2 * whole_s, held_s - held_s**2 / (4 * whole_s), whole_s)
            found = found + partial_s
        return found


# number of prices that are tried for every sequence, and of sizes for which bytes beside layers are counted
_NUM_PRICES, _NUM_SIZES = 16, 12
# lowest price that is tried, as a share of the highest
_LEAST_SHARE = 1e-6
# share of a step's seconds by which fewer micro-batches may be slower
_NO_GAIN = 2e-3
# share of their room that ranks use on average, since groups are not equally full
_USED_ROOM = 0.95
# tokens of the shortest slice: slices take equal time, so that the last has at least half of the mean; a sixteenth for rounding
_SHORTEST_SLICE = LEAST_SLICE_TOKENS * 15 // 32


@dataclass(frozen=True)
class MemoryLimitedStep:
    """A step whose memory is limited: its sequences, costs and budget. shortest_slice: tokens of a rank's shortest slice."""

    problem: GroupingProblem
    costs: CostModel
    budget: ActivationBudget
    shortest_slice: int = _SHORTEST_SLICE

    @cached_property
    def prices(self) -> MemoryPrices:
        return MemoryPrices.of(self.problem.lengths, self.costs)

    @cached_property
    def forward_s(self) -> FloatArray:
        """Seconds that every sequence adds to the forward of a group of each degree [degree, sequence]."""
        lengths = np.array(self.problem.lengths, dtype=np.float64)
        shapes = [self.problem.shapes[degree] for degree in self.problem.degrees]
        return np.stack([self.costs.forward_sequences_s(lengths, shape) for shape in shapes])

    def lower_bound_s(self, most_s: float = math.inf) -> float:
        """Lower bound on the seconds of every plan's chunks, gathers included. most_s: seconds of a known plan.

        At most `most_s`, since that plan may be the best one.
        """
        problem = self.problem
        if not problem.lengths:
            return 0.0
        ends_s = problem.seconds + np.array(problem.group_s)[:, None] + problem.micro_batch_s
        fits = np.array(problem.lengths) <= np.array(problem.degrees)[:, None] * problem.capacity
        usable = fits & (ends_s <= most_s)
        if not usable.any(axis=0).all():
            return most_s
        work = np.where(usable, problem.seconds, np.inf) * np.array(problem.degrees)[:, None]
        found = [problem.lower_bound_s()]
        for by_link, top in ((False, math.inf), *((True, top) for top in self._tops)):
            slot_s = self._slot_s(by_link)
            added = self._added_s(slot_s, by_link, top)
            # the first micro-batch costs its gathers beyond those of a slot
            first_s = min(problem.group_s) + problem.micro_batch_s - slot_s
            found.append(float(np.min(work + added, axis=0).sum()) / problem.num_ranks + first_s)
        return min(most_s, max(found))

    def _slot_s(self, by_link: bool) -> float:
        """Least seconds that a slot of a rank costs: the fixed ones of a group, and the gathers of a micro-batch.

        Slices, and packs after them, share a micro-batch, so that each costs only the gathers of a further chunk. But then all
        gradients wait whole on the device. A slot lacks their room, which costs its share of the seconds, unless slices save as
        many bytes beside layers.
        """
        problem, fixed_s = self.problem, min(self.problem.group_s)
        whole_s = fixed_s + problem.micro_batch_s
        if not self._is_sliceable:
            return whole_s
        gathers = whole_gathers(self.costs)
        further_s = fixed_s + gathers.least_s(2) - gathers.least_s(1)
        room = self.budget.device_bytes + max(self._other_room(degree, by_link) for degree in problem.degrees)
        return min(whole_s, further_s + whole_s * self._lacking_bytes / max(1, room))

    def fullness(self) -> int:
        """Returns the number of micro-batches that probably takes the fewest seconds, of gathers, fixed ones, and policies."""
        problem = self.problem
        most = len(problem.lengths)
        found: list[float] = []
        least = max(1, math.ceil(self._rank_tokens / problem.capacity))
        for number in range(least, most + 1):
            added_s = self.policies_s(number, _USED_ROOM)
            found.append(number * (min(problem.group_s) + problem.micro_batch_s) + added_s)
            if not added_s:
                break
        # every micro-batch takes time to plan, too
        most_s = min(found, default=math.inf) + _NO_GAIN * self._work[1]
        return next((least + place for place, seconds in enumerate(found) if seconds <= most_s), 1)

    def policies_s(self, number: int, used_room: float = 1.0) -> float:
        """Returns the seconds that policies add to a step of so many micro-batches, if all ranks are equally full.

        used_room: share of their room that ranks use.
        """
        (num_bytes, seconds), tokens = self._classes, self._rank_tokens
        forward_s, _ = self._work
        copied = min(self.costs.cluster.hardware.copy_bytes_per_s * forward_s, number * self.budget.host_bytes)
        saved = tokens * float(self.prices.num_bytes.sum() + self.prices.pair_bytes.sum())
        left = saved - used_room * (number * self._room + copied)
        # fuller ranks run layers under policies
        added_s = 0.0
        if tokens > number * self.budget.kept_tokens:
            added_s = self.costs.model.num_layers * self.costs.replay_parts_s(tokens)[2]
        for size, again_s in zip(num_bytes, seconds, strict=True):
            added_s += again_s * min(1.0, max(0.0, left / size)) if size else 0.0
            left -= size
        return float(added_s)

    @property
    def _rank_tokens(self) -> float:
        return sum(self.problem.lengths) / self.problem.num_ranks

    @cached_property
    def _room(self) -> float:
        """Bytes of the device for what layers save."""
        return max(1.0, self.budget.device_bytes - self._beside(max(1, small_tile(self.budget.tile_tokens))))

    @cached_property
    def _classes(self) -> tuple[FloatArray, FloatArray]:
        """Bytes that a rank saves in the step, and seconds to recompute them, the cheapest class of tensors first."""
        prices, tokens = self.prices, self._rank_tokens
        order = np.argsort(prices.seconds / prices.num_bytes, kind="stable")
        return tokens * prices.num_bytes[order], tokens * prices.seconds[order]

    @cached_property
    def _work(self) -> tuple[float, float]:
        """Seconds of all forwards on a rank, and of all passes, if every sequence runs at the degree of least rank-seconds."""
        problem = self.problem
        degrees = np.array(problem.degrees)[:, None]
        fits = np.array(problem.lengths) <= degrees * problem.capacity
        cheapest = np.where(fits, problem.seconds * degrees, np.inf).argmin(axis=0), np.arange(len(problem.lengths))
        forward_s, all_s = (float((each * degrees)[cheapest].sum()) for each in (self.forward_s, problem.seconds))
        return forward_s / problem.num_ranks, all_s / problem.num_ranks

    @property
    def _tops(self) -> list[float]:
        """Highest prices to try if the link counts: seconds per byte of the classes that are cheap to recompute."""
        prices, copy_s = self.prices, 1 / self.costs.cluster.hardware.copy_bytes_per_s
        return sorted({float(price) for price in prices.seconds / prices.num_bytes if 0 < price <= copy_s})

    def _added_s(self, slot_s: float, by_link: bool, top: float) -> FloatArray:
        """Least rank-seconds added for every sequence at every degree, with its share of a slot [degree, sequence]."""
        problem, budget = self.problem, self.budget
        rate = self.costs.cluster.hardware.copy_bytes_per_s
        added = np.empty_like(problem.seconds)
        rooms = [
            np.maximum(1.0, budget.device_bytes - self._outside_bytes(degree)) + self._other_room(degree, by_link)
            for degree in problem.degrees
        ]
        low = slot_s / max(float(room.max()) for room in rooms)
        high = top if by_link else max(low, float((self.prices.seconds / self.prices.num_bytes).min()))
        # a slot without fixed seconds may cost nothing; bounds hold at any price
        low = max(low, _LEAST_SHARE * high)
        grid = np.geomspace(low, high, _NUM_PRICES) if low < high else np.array([high])
        held_s = self.prices.least_s(grid[:, None])
        for k, (degree, room) in enumerate(zip(problem.degrees, rooms, strict=True)):
            # no price is above `top`, so the room of a slot may cost less than the slot
            share_s = np.minimum(slot_s, high * room)
            values = held_s / degree - (grid[:, None] * rate * self.forward_s[k] if by_link else 0.0)
            # bytes that a sequence brings along must not count less for others if the price is higher
            values = np.minimum(values, values[-1])
            paid_s = grid[:, None] * room
            own = np.where(paid_s >= share_s * (1 - 1e-12), values - paid_s + share_s, -np.inf)
            added[k] = degree * np.max(own, axis=0)
        return added

    def _other_room(self, degree: int, by_link: bool) -> float:
        """Bytes of room besides the device: on the host, or copied in the fixed seconds of a group's forward."""
        if not by_link:
            return float(self.budget.host_bytes)
        fixed_s, _ = self.costs.exchange_line(self.problem.shapes[degree], is_backward=False)
        return self.costs.cluster.hardware.copy_bytes_per_s * (self.costs.coefficients.forward.chunk_s + fixed_s)

    @property
    def _is_sliceable(self) -> bool:
        """Whether slices could be tried for a sequence of the step."""
        return max(self.problem.lengths) >= 2 * LEAST_SLICE_TOKENS * self.problem.degrees[0]

    @cached_property
    def _waiting_bytes(self) -> int:
        """Bytes of gradients that wait whole on a rank while slices, or chunks beside them, run."""
        return ByteModel(self.costs.model).accumulated(self.costs.parameters, self.costs.shard_ranks)

    @cached_property
    def _max_saving_by_slicing(self) -> float:
        """Most bytes beside layers that slices of any sequence spare on a rank."""
        problem = self.problem
        most = max(min(problem.capacity, -(-max(problem.lengths) // degree)) for degree in problem.degrees)
        return max(0.0, self._beside(most) - self._beside(min(most, self.shortest_slice)))

    @property
    def _lacking_bytes(self) -> float:
        """Bytes by which slices have less room than whole chunks."""
        return self._waiting_bytes - (self._max_saving_by_slicing if self._slices_lack_room else 0.0)

    @property
    def _slices_lack_room(self) -> bool:
        """Whether waiting gradients take more bytes than slices save, so that no group has more room than with a whole chunk."""
        return self._waiting_bytes >= self._max_saving_by_slicing

    def _outside_bytes(self, degree: int) -> FloatArray:
        """Least bytes that a group with each sequence needs beside its layers, when the last of its forwards ends.

        Its backward comes next, even after the last slice. More tokens need more bytes.
        """
        tokens = np.maximum(1, np.array(self.problem.lengths) // degree)
        if self._is_sliceable and not self._slices_lack_room:
            tokens = np.minimum(tokens, self.shortest_slice)
        sizes = np.unique(np.geomspace(tokens.min(), tokens.max(), _NUM_SIZES).astype(np.int64))
        beside = np.array([self._beside(int(size)) for size in sizes])
        found: FloatArray = beside[np.searchsorted(sizes, tokens, side="right") - 1]
        return found

    def _beside(self, num_tokens: int) -> float:
        load = Load.document(num_tokens, self.costs.model.num_layers)
        found = [OutsideBytes(self.costs.model, load, tile) for tile in {0, self.budget.tile_tokens}]
        return float(min(each.shared + max(each.head, each.forward, each.backward) for each in found))
