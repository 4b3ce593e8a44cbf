"""Slots of a policy program: the tensors that a layer saves for a chunk, and what it costs to move or recompute them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from hf_longctx.plan.core.attention_pairs import FULL, AttentionPairs
from hf_longctx.plan.core.layer_kinds import ATTENTION, LayerKind
from hf_longctx.plan.core.model_spec import KindShares
from hf_longctx.plan.core.types import Chunk, GroupShape, LayerRange, TensorClass
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.memory.saved_tensors import class_bytes

# number of equal segments in a class's curve of recomputation seconds; ends of documents add more
_SEGMENTS = 8


@dataclass(frozen=True, slots=True)
class SavedClass:
    """Tensors of one class that one slot saves, and what may be done with them.

    recompute_s: seconds to recompute all of its tokens. documents: (earlier tokens, tokens) of each document, in order, if
    seconds are proportional to query-key `pairs`; () if all tokens cost the same. A partial recompute takes the first tokens.
    """

    tensor_class: TensorClass
    num_bytes: float
    recompute_s: float
    can_recompute: bool = True
    can_offload: bool = True
    can_keep: bool = True
    documents: tuple[tuple[int, int], ...] = ()
    pairs: AttentionPairs = FULL

    def recompute_part_s(self, share: float) -> float:
        """Exact seconds to recompute the first `share` of the tokens."""
        if not self.documents:
            return share * self.recompute_s
        whole = _front_pairs(self, sum(tokens for _, tokens in self.documents))
        rows = share * sum(tokens for _, tokens in self.documents)
        return self.recompute_s * _front_pairs(self, rows) / whole if whole else 0.0

    def segments(self) -> tuple[tuple[float, float], ...]:
        """Returns (width, seconds) of the convex curve's segments in order: widths sum to 1, seconds to `recompute_s`."""
        if not self.documents or not self.recompute_s:
            return ((1.0, self.recompute_s),)
        total = sum(tokens for _, tokens in self.documents)
        ends = itertools.accumulate(tokens / total for _, tokens in self.documents)
        places = {index / _SEGMENTS for index in range(_SEGMENTS)} | ({*ends} if len(self.documents) <= _SEGMENTS else set())
        hull: list[tuple[float, float]] = []
        for place in sorted(place for place in places | {1.0} if place <= 1.0):
            point = (place, self.recompute_part_s(place))
            while len(hull) > 1 and _is_above(hull[-1], hull[-2], point):
                hull.pop()
            hull.append(point)
        return tuple((b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(hull))


@dataclass(frozen=True, slots=True)
class Slot:
    """One layer of one chunk: seconds of its forward and of its backward without recomputation, and what it saves.

    replay_s: seconds that any policy adds, whatever it recomputes.
    """

    forward_s: float
    backward_s: float
    saved: tuple[SavedClass, ...]
    replay_s: float = 0.0


def _front_pairs(saved: SavedClass, num_rows: float) -> float:
    """Counts query-key pairs of the first `num_rows` rows of the documents; each document's earlier tokens are keys too."""
    pairs = 0.0
    for start, tokens in saved.documents:
        rows = min(num_rows, tokens)
        pairs += saved.pairs.of_span(start, start + rows)
        num_rows -= rows
    return pairs


def _is_above(point: tuple[float, float], left: tuple[float, float], right: tuple[float, float]) -> bool:
    """Whether a point lies on or above the line from one on its left to one on its right."""
    return (point[1] - left[1]) * (right[0] - left[0]) >= (right[1] - left[1]) * (point[0] - left[0])


def layer_slots(costs: CostModel, chunk: Chunk, shape: GroupShape) -> tuple[Slot, ...]:
    """Makes one slot per layer of `chunk`, for one rank of a group; each class says what the runtime may do with it."""
    num_layers = costs.model.num_layers
    kinds = costs.model.layer_kinds(LayerRange(0, num_layers)) or (ATTENTION,) * num_layers
    slots = {kind: kind_slot(costs, chunk, shape, kind) for kind in dict.fromkeys(kinds)}
    return tuple(slots[kind] for kind in kinds)


def kind_slot(costs: CostModel, chunk: Chunk, shape: GroupShape, kind: LayerKind) -> Slot:
    """Makes the slot of one layer of this kind."""
    return layer_slot(costs, chunk, shape, costs.pairs_of((kind,)), ((kind, 1.0),))


def layer_slot(
    costs: CostModel, chunk: Chunk, shape: GroupShape, pairs: AttentionPairs, kinds: KindShares = ((ATTENTION, 1.0),)
) -> Slot:
    """Makes the slot of a layer whose attention has these pairs; pairs may be a mean over layers of these `kinds`.

    Recomputing a class takes as long as its part of the forward: by exact pairs for attention, for other classes by their share
    of the products of the layer's parameters, and for the MLP with its own operations without products and the travel of tokens
    to spread experts. The MLP's seconds include the output projection, since the MLP's replay runs through it. The output head
    belongs to no layer, so its share of a token's seconds is left out. Programs recompute no layer input. A layer with a state
    keeps no attention output, and its mixer is recomputed as a whole, with the share that attention's projections have in the
    mean layer.
    """
    model, forward = costs.model, costs.coefficients.forward
    tokens = max(chunk.num_tokens, shape.degree) / shape.degree
    (products_s, inner_s, replay_s), qkv_part = costs.replay_parts_s(tokens), model.mixing_share
    recompute_s: dict[TensorClass, float] = {
        "attention_output": forward.pair_s * pairs.of_chunk(chunk) / shape.degree / model.num_layers,
        "qkv": qkv_part * products_s,
        "mlp": (1 - qkv_part) * products_s + inner_s + costs.expert_exchange_s(tokens) / model.num_layers,
    }
    # another run of a whole layer makes the input of the next one
    recompute_s = {"layer_input": sum(recompute_s.values()), **recompute_s}
    saved = tuple(
        SavedClass(
            name,
            sum(share * class_bytes(model, name, kind, round(tokens)) for kind, share in kinds) * tokens,
            seconds,
            can_recompute=name != "layer_input",
            can_offload=name not in model.replayed_classes,
            can_keep=name not in model.replayed_classes,
            documents=tuple((span.start, span.num_tokens) for span in chunk.spans) if name == "attention_output" else (),
            pairs=pairs,
        )
        for name, seconds in recompute_s.items()
    )
    forward_s, backward_s = (costs.part_s(chunk, shape, is_backward, 1, False, pairs=pairs) for is_backward in (False, True))
    return Slot(forward_s, backward_s, saved, replay_s)


def chunk_slot(costs: CostModel, chunk: Chunk, shape: GroupShape) -> Slot:
    """Makes one slot of all layers of `chunk`."""
    num_layers, kinds = costs.model.num_layers, costs.model.kind_shares()
    layer = layer_slot(costs, chunk, shape, costs.attention_pairs(), kinds)
    saved = (
        replace(item, num_bytes=item.num_bytes * num_layers, recompute_s=item.recompute_s * num_layers) for item in layer.saved
    )
    return Slot(layer.forward_s * num_layers, layer.backward_s * num_layers, tuple(saved), layer.replay_s * num_layers)
