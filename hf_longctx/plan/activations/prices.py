"""Prices of memory: how few seconds a step must add where the tensors that its sequences save do not fit.

The bytes that a rank saves for one chunk are kept, copied to the host, or recomputed. Let a class of tensors have b bytes whose
recomputation takes t seconds. What is not recomputed must find room. So a price of p seconds per byte of room gives a lower
bound on the added seconds of any policies, for every p (Lagrange):

    added seconds  >=  sum over classes of min(t, p b)  -  p room

Attention that is recomputed in part takes the first rows of its documents: the first r of the rows of a causal triangle hold at
least r^2 of its pairs, so that its least seconds at a price are those of min over r of r^2 t + p (1 - r) b.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_longctx.plan.activations.slots import kind_slot
from hf_longctx.plan.core.arrays import FloatArray
from hf_longctx.plan.core.layer_kinds import ATTENTION
from hf_longctx.plan.core.types import Chunk, GroupShape, LayerRange, Span
from hf_longctx.plan.cost.cost_model import CostModel


@dataclass(frozen=True, slots=True, eq=False)
class MemoryPrices:
    """Bytes that whole sequences of `lengths` tokens save on one rank, and seconds to recompute them.

    num_bytes, seconds: for one token, of each class whose seconds are linear in tokens, in all layers of one kind. Attention
    outputs, one entry for each kind of layer: pair_bytes, for one token; pair_s, for one query-key pair; pairs, of every sequence
    [kind, sequence]. Classes without bytes, or that cannot be kept, are left out.
    """

    lengths: FloatArray
    num_bytes: FloatArray
    seconds: FloatArray
    pair_bytes: FloatArray
    pair_s: FloatArray
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
