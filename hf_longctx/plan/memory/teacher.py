"""Bytes of a teacher on a rank: a frozen model that runs forwards alone, under the plans of the model that learns from it.

Its weights lie in as many shards and stages. While the other model's plan runs, weights outside of its layers, of which the loss
reads the head, stay gathered. Its forwards come before that plan, so what they work with is there instead of what the other model
works with. They save nothing for a backward; slices leave keys and values for later ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from hf_longctx.plan.core.sharding import shard_tokens
from hf_longctx.plan.core.types import GroupShape, Parameters, SequenceGroup, gathers_every_pass, keeps_node_copies
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.capacity import least_memory_policy
from hf_longctx.plan.memory.layer import Load, OutsideBytes
from hf_longctx.plan.model.model_spec import ModelSpec

# tensors of the logits' size in at least fp32 that the distance from a teacher has at once, beside those of cross-entropy: KL
# divergences one way, mixtures of both, and distances over a few tokens; counted by tests/predicted/test_teacher_bytes.py
_KL, _MIXED, _FEW = 7, 11, 5


def beside_teacher(model: ModelSpec, beta: float = 0.0, top_k: int | None = None) -> ModelSpec:
    """Returns the model with the bytes of logits that its loss has beside a teacher."""
    count = _FEW if top_k is not None else _KL if beta in (0.0, 1.0) else _MIXED
    return replace(model, capped_bytes=model.capped_bytes + count * max(4, model.bytes_per_element))


@dataclass(frozen=True, slots=True)
class TeacherBytes:
    """Counts bytes of the teacher `model` on a rank, whose weights `shard_ranks` ranks share."""

    model: ModelSpec
    parameters: Parameters
    shard_ranks: int

    def held(self, num_stages: int = 1) -> int:
        """Bytes of weights on a rank of the fullest stage, while the other model's plan runs."""
        return max(self._stage_held(*part) for part in self._parts(num_stages))

    def _stage_held(self, num_layers: int, is_first: bool, is_last: bool) -> int:
        weights, packed = self.model.part_weight_bytes(num_layers, is_first, is_last), self.model.packed
        scales = num_layers * packed.layer_scale_bytes
        if self.parameters == "replicated":
            return weights + scales
        return -(-weights // self.shard_ranks) + self.model.part_weight_bytes(0, is_first, is_last) + scales

    def _parts(self, num_stages: int) -> list[tuple[int, bool, bool]]:
        """Layers of every stage, in equal numbers, and whether it has embedding and head."""
        counts = [(self.model.num_layers + place) // num_stages for place in range(num_stages)]
        return [(count, stage == 0, stage == num_stages - 1) for stage, count in enumerate(counts)]

    def gathered(self, num_stages: int = 1) -> int:
        """Bytes of layers that a rank gathers for a forward, of its part of a node's copy, and of a matrix that it unpacks."""
        most = max(count for count, _, _ in self._parts(num_stages))
        if self.parameters == "replicated":
            return self.model.packed.unpacked_bytes
        at_once = min(most, 2) if gathers_every_pass(self.parameters) else most
        of_node = self.model.part_weight_bytes(most, False, False) if keeps_node_copies(self.parameters) else 0
        whole = self.model.part_weight_bytes(at_once, False, False) + self.model.packed.unpacked_bytes
        return whole + of_node // self.model.node_ranks

    def forward(self, group: SequenceGroup, position: int = 0, num_stages: int = 1) -> int:
        """Bytes that the forwards of a group's chunks take on the rank at `position` of the group, besides `held`."""
        loads = ByteModel(self.model).loads(group, position)
        work = max(_work(self.model, load) for load in loads)
        sliced = sum(shard_tokens(chunk, group.shape)[position] for chunk in group.chunks) if _is_sliced(group) else 0
        return self.gathered(num_stages) + work + sliced * self._book(group.shape, num_stages)

    def _book(self, shape: GroupShape, num_stages: int) -> int:
        """Bytes of keys and values of a token that a rank keeps for later slices."""
        copies = max(1, shape.ulysses // max(1, self.model.num_kv_heads))
        layers = -(-self.model.num_layers // num_stages)
        return copies * layers * self.model.bytes_per_element * self.model.kv_size

    def most_tokens(self, free_bytes: int, is_shared: bool, num_stages: int = 1) -> int:
        """Most tokens of a chunk on a rank with `free_bytes` besides `held`; is_shared: see `Load`."""
        left = free_bytes - self.gathered(num_stages)
        if left <= 0:
            return 0
        # bytes are nearly linear in tokens
        low, high = 0, 1
        while self._fits(high, is_shared, left):
            low, high = high, 2 * high
        while high - low > max(1, low // 256):
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(middle, is_shared, left) else (low, middle)
        return low

    def _fits(self, num_tokens: int, is_shared: bool, left_bytes: int) -> bool:
        load = Load(num_tokens, (num_tokens,), self.model.num_layers, is_shared=is_shared)
        return _work(self.model, load) <= left_bytes

    def most_sliced(self, free_bytes: int, chunk_tokens: int, shape: GroupShape, num_stages: int = 1) -> int:
        """Most tokens of a sequence in slices of `chunk_tokens` tokens that a rank of a group can have."""
        load = Load(chunk_tokens, (chunk_tokens,), self.model.num_layers, is_shared=shape.degree > 1)
        left = free_bytes - self.gathered(num_stages) - _work(self.model, load)
        return max(0, left) // max(1, self._book(shape, num_stages))


@lru_cache(maxsize=4096)
def _work(model: ModelSpec, load: Load) -> int:
    """Bytes of a chunk's forward without a graph: what layers share, their inputs, and the work of the largest one."""
    policy = least_memory_policy(model, load.num_tokens, 0, 0, num_layers=1).layers[0]
    bytes_of = ByteModel(model)
    largest = max(bytes_of.layer(load, policy, 0, kind).forward for kind in bytes_of.kinds())
    outside = OutsideBytes(model, load, 1)
    # hidden states of the layer before, and those that leave for the host
    return outside.shared + largest + 2 * model.bytes_per_element * model.hidden_size * load.num_tokens


def _is_sliced(group: SequenceGroup) -> bool:
    return any(span.start for chunk in group.chunks for span in chunk.spans)
