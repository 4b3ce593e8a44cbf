"""Predicts the seconds of a chunk on a sequence group, for forward and backward separately.

Planner, prediction and simulator use this model. One pass over n tokens with c query-key pairs on d ranks takes

    pair_s * c / d  +  token_s * n / d  +  chunk_s
        +  link_byte_s * link_bytes  +  network_byte_s * network_bytes  +  message_s * messages  +  tile_s * tiles

This is the formula of FlexSP (arXiv 2412.01523, section 4.1) with two changes: its s^2 is replaced by the pairs of a layer,
averaged over layers (`attention_pairs.py`), and its all-to-all term by the bytes that a rank sends over each kind of link
(`traffic.py`). So one set of coefficients applies to every method of attention, and a group uses the cheapest method that the
model's heads allow. Bytes that a group sends while it computes count only if they take longer than what it computes, and keys
that no token of another block sees through a window are not sent (`CostModel.hidden_s`). Keys and values of earlier slices,
which travel around a ring once more for every slice, count in addition to the bytes of its own tokens.

`elementwise_bytes`: reads and writes of a layer's operations without matrix products (norms, rotary embedding, activation,
residuals), without attention's own operators. The numbers are those of transformers' Llama, operation by operation, counted by
`tests/predicted/test_elementwise_bytes.py`; a fused kernel only reads its inputs and writes its results.

`training_operations`: operations of training documents, for model FLOP/s and their share of the device's peak (MFU).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise

import numpy as np

from hf_longctx.plan.core.settings import ASSUMED_FP8_RATIO, ClusterSpec, GroupMethod
from hf_longctx.plan.core.sharding import UNPACKING_BYTES, images_of, rank_media, run_images
from hf_longctx.plan.core.types import (
    Chunk,
    FloatArray,
    GroupShape,
    LayerRange,
    Media,
    Parameters,
    SequenceGroup,
    TowerRun,
    TowerWork,
    keeps_node_copies,
)
from hf_longctx.plan.cost.traffic import (
    Traffic,
    added_products,
    expert_traffic,
    feature_traffic,
    group_shapes,
    head_traffic,
    hop_bytes,
    mean_traffic,
    ring_leaves_node,
    window_tokens,
)
from hf_longctx.plan.model.attention_pairs import FULL, AttentionPairs
from hf_longctx.plan.model.config import HeadSizes
from hf_longctx.plan.model.layers import ATTENTION, LayerKind
from hf_longctx.plan.model.model_spec import AdapterSpec, ModelSpec

# bytes of one token per feature of hidden states and per inner feature of the MLP, in half precision and in fp32; with adapters,
# gradients of what several matrices read add up inside their products
_FORWARD = {2: (111, 10), 4: (134, 20)}
_BACKWARD = {2: (264, 18), 4: (335, 36)}
_ADAPTED_BACKWARD = {2: (230, 18), 4: (268, 36)}
# bytes that a layer under any policy adds, since it runs once more from its input, its norms twice in tiles; and bytes that
# the MLP adds if it runs once more
_REPLAY = {2: 243, 4: 293}
_INNER_REPLAY = {2: 14, 4: 27}
# bytes that fused kernels save: of norms and of rotary embeddings per hidden feature, forward, backward and in a replay; of
# gates per inner feature
_FUSED_NORMS = {2: (65, 165, 164), 4: (41, 137, 149)}
_FUSED_ROTARY = {2: (21, 26, 21), 4: (42, 52, 42)}
_FUSED_GATES = {2: (4, 8, 6), 4: (8, 16, 11)}
# bytes of a value of a gated norm, and of a channel of a short convolution with its activation, forward and backward: by torch
# code, and by kernels
_GATED_NORM = {2: ((66, 140), (6, 10)), 4: ((48, 116), (12, 20))}
_CONVOLUTION = {2: ((8, 16), (4, 6)), 4: ((16, 32), (8, 12))}


def elementwise_bytes(model: ModelSpec) -> tuple[int, int]:
    """Returns bytes of one token in one layer, in its forward, and in its backward with everything kept."""
    width = 2 if model.bytes_per_element <= 2 else 4
    backward = _BACKWARD if model.trains_layers else _ADAPTED_BACKWARD
    (hidden, inner), (hidden_back, inner_back) = _FORWARD[width], backward[width]
    (less, less_back, _), (less_inner, less_inner_back, _) = _saved(model, width)
    d, f = model.hidden_size, model.intermediate_size
    # experts that run apart make their inner tensors again in backward
    again = inner * (f - model.whole_size)
    return (
        (hidden - less) * d + (inner - less_inner) * f,
        (hidden_back - less_back) * d + (inner_back - less_inner_back) * f + again,
    )


def replayed_bytes(model: ModelSpec) -> tuple[int, int]:
    """Returns bytes of one token that a layer adds under any policy, and that its MLP adds if it runs once more."""
    width = 2 if model.bytes_per_element <= 2 else 4
    (_, _, less), (_, _, less_inner) = _saved(model, width)
    return (_REPLAY[width] - less) * model.hidden_size, (_INNER_REPLAY[width] - less_inner) * model.whole_size


def mixer_bytes(model: ModelSpec) -> tuple[int, int]:
    """Returns bytes of one token in one layer with a state, forward and backward: of norm, convolution and scan."""
    states, width = model.states, 2 if model.bytes_per_element <= 2 else 4
    norm = _GATED_NORM[width][model.fuses_gated_norms]
    convolution = _CONVOLUTION[width][model.fuses_convolutions]
    forward, backward = (
        states.norm_values * of_norm + states.channels * of_channel + of_scan
        for of_norm, of_channel, of_scan in zip(norm, convolution, scan_bytes(model), strict=True)
    )
    return forward, backward


def scan_bytes(model: ModelSpec) -> tuple[int, int]:
    """Returns bytes of one token in the scans of one layer, forward and backward."""
    states = model.states
    if not model.fuses_scans:
        return states.heads * states.torch_moves[0], states.heads * states.torch_moves[1]
    wider = max(1, model.bytes_per_element // 2)
    return wider * states.heads * states.kernel_moves[0], wider * states.heads * states.kernel_moves[1]


def _saved(model: ModelSpec, width: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Returns bytes that the model's kernels save, forward, backward and in a replay, per hidden and per inner feature."""
    kernels = ((model.fuses_norms, _FUSED_NORMS[width]), (model.fuses_rotary, _FUSED_ROTARY[width]))
    forward, backward, replay = (sum(numbers[place] for is_used, numbers in kernels if is_used) for place in range(3))
    return (forward, backward, replay), _FUSED_GATES[width] if model.fuses_gates else (0, 0, 0)


# share of the seconds of hidden collectives by which the kernels beside them take longer: NCCL's rings and trees run at least 16
# blocks of threads, each of which takes one of the 108 processors of an A100, or of the 132 of an H100, while it sends
SLOWED_SHARE = 0.125
# factor on the exchange time of groups larger than `favoured_degree`, so that the planner avoids them
_AVOIDED = 1e3


@dataclass(frozen=True, slots=True)
class PassCoefficients:
    """Seconds of one pass (forward or backward) over all layers of the model on one rank, per unit of each kind of work."""

    # per query-key pair of a layer (the average layer)
    pair_s: float
    # per token
    token_s: float
    # per chunk
    chunk_s: float
    # per exchange
    message_s: float = 0.0
    # per byte sent within a node and to other nodes
    link_byte_s: float = 0.0
    network_byte_s: float = 0.0
    # per attention tile of a ring, on top of the cost of one attention call for the whole chunk
    tile_s: float = 0.0
    # the output head's share of token_s divided by its share of the matrix products; not 1, since the head also computes the
    # loss, and layers have norms. Can be measured only in a pipeline, where one stage runs the head
    head_factor: float = 1.0

    @property
    def rates(self) -> tuple[float, ...]:
        """Every field that is in seconds per unit, in order."""
        return (
            *(self.pair_s, self.token_s, self.chunk_s, self.message_s),
            *(self.link_byte_s, self.network_byte_s, self.tile_s),
        )

    def exchange_s(self, traffic: Traffic) -> float:
        """Returns the seconds in which one rank sends `traffic` in one pass."""
        return (
            self.message_s * traffic.messages
            + self.link_byte_s * traffic.link_bytes
            + self.network_byte_s * traffic.network_bytes
        )


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Part of the model in a measured pass: a share of the layers, with or without the output head.

    head_share: the head's share of a token's matrix products in the whole model; not needed for the whole model.
    """

    layers: float = 1.0
    has_head: bool = True
    head_share: float = 0.0

    @property
    def is_whole(self) -> bool:
        return self.layers == 1 and self.has_head


WHOLE_MODEL = ModelPart()


@dataclass(frozen=True, slots=True)
class CostCoefficients:
    """Coefficients of both passes, the seconds that a step takes once, and the source of these numbers."""

    forward: PassCoefficients
    backward: PassCoefficients
    step_s: float
    source: str

    @property
    def is_measured(self) -> bool:
        return self.source != "default"


def num_tiles(shape: GroupShape, num_documents: float) -> float:
    """Returns the number of attention tiles of a rank of a ring in one layer; 0 for groups of a single block."""
    return num_documents * shape.num_blocks if shape.num_blocks > 1 else 0.0


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicts seconds of chunks of `model` on groups of `cluster`."""

    model: ModelSpec
    cluster: ClusterSpec
    coefficients: CostCoefficients
    # how groups share attention; "auto" is the cheapest for each degree
    method: GroupMethod = "auto"
    # exchanges of larger groups cost a thousand times more, so that only sequences that need such groups get them (0: none is
    # favoured)
    favoured_degree: int = 0
    # whether weights are replicated or sharded
    parameters: Parameters = "replicated"
    # number of ranks that share one copy of sharded weights
    shard_ranks: int = 1
    # the model and coefficients of a teacher, whose forwards run under the same plans
    teacher: CostModel | None = None
    # the images of every sequence of the step that is planned; (): no sequence has any
    media: tuple[Media, ...] = field(default=(), compare=False)
    # whether plans may deal these to ranks without tokens of them
    deals_images: bool = True

    @property
    def shards(self) -> int:
        """Number of consecutive ranks that share one copy of sharded parameters; 0 for all ranks, or without shards."""
        is_split = self.parameters != "replicated" and 1 < self.shard_ranks < self.cluster.num_ranks
        return self.shard_ranks if is_split else 0

    @property
    def node_ranks(self) -> int:
        """Number of consecutive ranks that share a node's copy of the weights in a step; 0 if nodes have none."""
        return self.model.node_ranks if keeps_node_copies(self.parameters) else 0

    @property
    def measured_apart(self) -> bool:
        """Whether collectives of sharded weights were measured apart from passes (`hf-longctx calibrate`)."""
        return self.parameters != "replicated" and bool(self.cluster.hardware.gather_bytes_per_s)

    @property
    def counts_weights(self) -> bool:
        """Whether gathers, sums and updates of weights count beside passes and `step_s`.

        They do for coefficients that follow from the hardware's rates. Measured ones contain those of their measurement, unless
        collectives were measured apart.
        """
        return self.measured_apart or self.coefficients == default_coefficients(self.model, self.cluster)

    def attention_pairs(self, layer_ranges: Sequence[LayerRange] = ()) -> AttentionPairs:
        """Returns pairs that a layer of `layer_ranges` (default: any layer) computes on this hardware, on average."""
        return self.model.attention_pairs(layer_ranges, self.cluster.hardware.tile_keys)

    def pairs_of(self, kinds: Sequence[LayerKind]) -> AttentionPairs:
        """Returns pairs that a layer computes on this hardware, averaged over layers of these kinds."""
        return self.model.pairs_of(kinds, self.cluster.hardware.tile_keys)

    def best_shape(self, degree: int, num_tokens: float, num_documents: float = 1.0) -> GroupShape:
        """Returns the cheapest shape in which `degree` ranks share a chunk; raises ValueError if the method has none.

        Communication counts in full, even if a ring hides it, because rings need more memory and send earlier slices again.
        """
        shapes = group_shapes(degree, self.method, self.model, self.cluster)
        if not shapes:
            raise ValueError(
                f"groups of {degree} ranks cannot share {self.model.num_heads} heads by method {self.method!r}; use 'auto'"
            )
        # min() returns the first of equals, so that every caller gets the same shape
        return min(shapes, key=partial(self._sharing_s, num_tokens, num_documents))

    def forward_s(
        self, chunk: Chunk, shape: GroupShape, num_layers: int, near_ranks: int = 0, pairs: AttentionPairs | None = None
    ) -> float:
        """Returns seconds of one forward of `chunk` over `num_layers` layers on a group of `shape`.

        near_ranks: number of the group's ranks on its emptiest node; 0 for the best placement. pairs: pairs of these layers;
        None for the average over all layers.
        """
        return self._pass_s(chunk, shape, num_layers, False, near_ranks, pairs)

    def backward_s(
        self, chunk: Chunk, shape: GroupShape, num_layers: int, near_ranks: int = 0, pairs: AttentionPairs | None = None
    ) -> float:
        """Returns seconds of one backward of `chunk`; arguments as for `forward_s`."""
        return self._pass_s(chunk, shape, num_layers, True, near_ranks, pairs)

    def local_s(
        self,
        chunk: Chunk,
        shape: GroupShape,
        is_backward: bool,
        pairs: AttentionPairs | None = None,
        hidden_s: float | None = None,
    ) -> float:
        """Returns seconds of one pass of `chunk` over all layers, as if every layer had `pairs` (None: its own).

        Without the communication counted by `exchange_line`, minus its hidden part, plus that of earlier slices. hidden_s: that
        part, if it is known (`chunks_hidden_s`).
        """
        pairs = self.attention_pairs() if pairs is None else pairs
        costs = self.coefficients.backward if is_backward else self.coefficients.forward
        tokens = float(max(chunk.num_tokens, shape.degree))
        seconds = (costs.pair_s * pairs.of_chunk(chunk) + costs.token_s * tokens) / shape.degree + costs.chunk_s
        if is_backward:
            seconds += float(self.rescan_s(tokens / shape.degree))
        if shape.degree > 1:
            seconds -= self.chunk_hidden_s(chunk, shape, is_backward) if hidden_s is None else hidden_s
        return seconds + self.document_s(shape, is_backward) * len(chunk.spans)

    def chunk_hidden_s(self, chunk: Chunk, shape: GroupShape, is_backward: bool) -> float:
        """Returns the sum of `hidden_s` over the documents of a chunk."""
        return self.chunks_hidden_s((chunk,), shape, is_backward)[0]

    def chunks_hidden_s(self, chunks: Sequence[Chunk], shape: GroupShape, is_backward: bool) -> list[float]:
        """Returns the sum of `hidden_s` over the documents of each chunk, all in one computation."""
        if shape.degree == 1:
            return [0.0] * len(chunks)
        spans = [span for chunk in chunks for span in chunk.spans]
        lengths, starts = [float(span.num_tokens) for span in spans], [float(span.start) for span in spans]
        found = self.hidden_s(lengths, shape, is_backward, starts)
        ends = list(accumulate((len(chunk.spans) for chunk in chunks), initial=0))
        return [float(found[first:stop].sum()) for first, stop in pairwise(ends)]

    def hidden_s(
        self,
        lengths: Sequence[float] | FloatArray,
        shape: GroupShape,
        is_backward: bool,
        starts: Sequence[float] | FloatArray | float = 0.0,
    ) -> FloatArray:
        """Returns seconds by which every document shortens one pass over all layers, because a group computes while it sends.

        In a single block, heads are exchanged in parts (`sharding.head_parts`). What travels while attention of other parts runs
        is hidden as far as that takes longer, but for the share by which it slows the kernels beside it. All messages start
        ahead, so only the starts of the first inputs and the last output count. Short chunks are exchanged at once, which takes
        little time and is not told apart here, so that seconds of sequences add up.

        In each hop of a ring a rank computes an equal share of the document's pairs. Meanwhile the keys and values of the next
        hop travel, and in backward the gradients of the hop before; the last gradients travel alone. Each document counts as if
        it were alone, a lower bound for several, since tiles of one may hide messages of another; so do the links of the best
        placement. The start of a message is never hidden.

        In layers with a window shorter than the document, what no other block sees does not travel, and the rest is not hidden.

        starts: earlier tokens of every slice. Their bytes are not among those of a chunk's own tokens, and are subtracted from
        the result, which may be negative.
        """
        tokens = np.asarray(lengths, dtype=np.float64)
        if shape.degree == 1:
            return np.zeros_like(tokens)
        earlier = np.asarray(starts, dtype=np.float64) + np.zeros_like(tokens)
        kinds = self.model.layer_kinds(LayerRange(0, self.model.num_layers)) or (ATTENTION,)
        # states make no difference here
        counts = Counter(kind._replace(has_state=False) for kind in kinds if kind.attends)
        if shape.num_blocks == 1:
            found = [
                self._hidden_parts_s(tokens, earlier, kind, shape, is_backward) * (count / len(kinds))
                for kind, count in counts.items()
            ]
            return sum(found, np.zeros_like(tokens))
        costs = {heads: self._of_heads(heads) for heads in dict.fromkeys(kind.heads for kind in counts)}
        every_s = {heads: each._hidden_hops_s(tokens, earlier, shape, is_backward) for heads, each in costs.items()}
        total = np.zeros_like(tokens)
        for kind, count in counts.items():
            of_layers = every_s[kind.heads] * (count / len(kinds))
            if kind.window is not None:
                unsent_s = costs[kind.heads]._unsent_s(tokens, earlier, kind.window, shape, is_backward) * (count / len(kinds))
                of_layers = np.where(earlier + tokens > kind.window, unsent_s, of_layers)
            total += of_layers
        return total

    def _hidden_parts_s(
        self, tokens: FloatArray, earlier: FloatArray, kind: LayerKind, shape: GroupShape, is_backward: bool
    ) -> FloatArray:
        """Returns `hidden_s` of groups that divide heads, as if all layers were of this kind."""
        model, costs = self.model.of_kind(kind), self.coefficients.backward if is_backward else self.coefficients.forward
        if (parts := model.head_parts(shape.ulysses, math.inf)) is None:
            return np.zeros_like(tokens)
        in_all = self.model.num_layers / max(1, self.model.num_attending)
        sent_s = in_all * costs.exchange_s(head_traffic(model, self.cluster, shape, 1.0)) * tokens
        attention_s = costs.pair_s * tokens * self.pairs_of((kind,)).seen(earlier, earlier + tokens) / shape.degree
        hidden_s = np.minimum((1 - parts.exposed) * sent_s, (1 - 1 / parts.count) * attention_s)
        seconds: FloatArray = (1 - SLOWED_SHARE) * hidden_s
        return seconds

    def _of_heads(self, heads: HeadSizes | None) -> CostModel:
        """Returns costs of the model with these heads in all layers; of the model itself for None."""
        if heads is None:
            return self
        model = self.model.of_kind(LayerKind(heads=heads))
        share = model.pair_operations / self.model.pair_operations
        forward, backward = self.coefficients.forward, self.coefficients.backward
        coefficients = replace(
            self.coefficients,
            forward=replace(forward, pair_s=share * forward.pair_s),
            backward=replace(backward, pair_s=share * backward.pair_s),
        )
        return replace(self, model=model, coefficients=coefficients)

    def _hidden_hops_s(self, tokens: FloatArray, earlier: FloatArray, shape: GroupShape, is_backward: bool) -> FloatArray:
        """Returns `hidden_s` as if all layers had full attention."""
        blocks = shape.num_blocks
        costs = self.coefficients.backward if is_backward else self.coefficients.forward
        # earlier tokens travel with all of their pieces
        travelling = tokens + earlier / (1 - 1 / (2 * blocks))
        keys_s, gradients_s = (seconds * travelling for seconds in self._hop_token_s(shape, is_backward))
        hop_s = costs.pair_s * tokens * FULL.seen(earlier, earlier + tokens) / shape.degree / blocks
        again: FloatArray = (keys_s + (gradients_s if is_backward else 0.0)) * (1 - tokens / np.maximum(travelling, 1.0))
        keys_hidden_s: FloatArray = np.minimum(hop_s, keys_s)
        if not is_backward or blocks == 2:
            return (blocks - 1) * (keys_hidden_s - again)
        both_s: FloatArray = np.minimum(hop_s, keys_s + gradients_s)
        hidden_s: FloatArray = 2 * keys_hidden_s + (blocks - 3) * both_s + np.minimum(hop_s, gradients_s)
        return hidden_s - (blocks - 1) * again

    def _unsent_s(self, tokens: FloatArray, earlier: FloatArray, window: int, shape: GroupShape, is_backward: bool) -> FloatArray:
        """Returns seconds of bytes that a ring sends with full attention but not with this window, in as many layers."""
        keys_s, gradients_s = self._hop_token_s(shape, is_backward)
        hops = shape.num_blocks - 1
        # tokens of the document per token that one block passes on in a hop
        per_hop = shape.num_blocks / (1 - 1 / (2 * shape.num_blocks))
        sent = window_tokens(tokens, window, shape.num_blocks, earlier) / shape.num_blocks * per_hop
        seconds = keys_s + (gradients_s if is_backward else 0.0)
        return (hops * tokens - sent) * seconds

    def _hop_token_s(self, shape: GroupShape, is_backward: bool) -> tuple[float, float]:
        """Returns seconds per document token in one hop of a ring, as if all layers passed on all keys and gradients."""
        costs = self.coefficients.backward if is_backward else self.coefficients.forward
        byte_s = costs.network_byte_s if ring_leaves_node(shape, self.cluster) else costs.link_byte_s
        keys, gradients = hop_bytes(self.model, shape, 1.0)
        in_all = byte_s * self.model.num_layers / max(1, self.model.num_attending)
        return in_all * keys, in_all * gradients

    def without_overlap(self, seconds: float, chunk: Chunk, shape: GroupShape, is_backward: bool) -> float:
        """Returns measured seconds of a pass of `chunk` as if its group had not computed while it sent, for fits.

        The added time is predicted, and then scaled by measured / predicted seconds.
        """
        hidden_s = self.chunk_hidden_s(chunk, shape, is_backward)
        if not hidden_s:
            return seconds
        return seconds * (1 + hidden_s / self._pass_s(chunk, shape, self.model.num_layers, is_backward, 0, None))

    def rescan_s(self, own_tokens: float | FloatArray) -> FloatArray:
        """Returns seconds of scans that backward runs forward again in all layers, for a rank with `own_tokens` of a chunk.

        Scans that would save too much run in blocks (`StateSpec.block_tokens`), which backward recomputes.
        """
        states, tokens = self.model.states, np.asarray(own_tokens, dtype=np.float64)
        if not states.scan_elements:
            return np.zeros_like(tokens)
        num_layers, rate = sum(states.layers), self.cluster.hardware.elementwise_bytes_per_s
        token_s = self.coefficients.forward.token_s * num_layers * states.scan_products / self.model.token_products
        token_s += num_layers * scan_bytes(self.model)[0] / rate if rate else 0.0
        return np.where(tokens > states.block_tokens, token_s * tokens, 0.0)

    def chunk_towers_s(self, group: SequenceGroup, chunk: Chunk, is_backward: bool) -> float:
        """Returns seconds of towers in a pass of a chunk, on the rank of its group with most of them.

        In backward those run again that `SequenceGroup.towers` do not keep. Without these, images are dealt by `dealt_images`.
        """
        if not any(self.media[span.sequence] for span in chunk.spans if self.media):
            return 0.0
        if not group.towers:
            runs = [TowerRun(chunk.index, *key, rank=rank) for key, rank in self.dealt_images(chunk, group.shape).items()]
            group = replace(group, towers=tuple(runs))
        again = {(run.sequence, run.number) for run in group.towers if run.chunk == chunk.index and not run.keeps}

        def rank_s(own: Iterable[tuple[int, int]]) -> float:
            return sum(self.tower_s([self.media[key[0]][key[1]]], is_backward, key in again) for key in own)

        towers_s = max(map(rank_s, run_images(chunk, group, self.media)))
        if not (dealt := group.dealt(chunk)):
            return towers_s
        images, held = images_of(chunk, self.media), rank_media(chunk, group.shape, self.media)
        return towers_s + self._features_s(self._moved_features(images, held, dealt), group.degree, is_backward)

    def dealt_images(self, chunk: Chunk, shape: GroupShape) -> dict[tuple[int, int], int]:
        """Deals the images of a chunk to the ranks of a group, the longest first, each to the rank with the fewest seconds.

        Returns the rank of each, by sequence and number; empty if exchanging features takes longer than is saved.
        """
        images = images_of(chunk, self.media) if shape.degree > 1 and self.deals_images else {}
        if not images:
            return {}
        held, loads = rank_media(chunk, shape, self.media), [0.0] * shape.degree
        seconds = {key: self.tower_s([each], False) for key, each in images.items()}
        dealt: dict[tuple[int, int], int] = {}
        for key in sorted(seconds, key=lambda key: (-seconds[key], key)):
            dealt[key] = min(range(shape.degree), key=lambda rank: (loads[rank], -held[rank].get(key, 0), rank))
            loads[dealt[key]] += seconds[key]
        own_s = max(sum(seconds[key] for key in own) for own in held)
        saved_s = (own_s - max(loads)) * (1 + self.model.tower.backward_passes)
        moved = self._moved_features(images, held, dealt)
        return dealt if saved_s > sum(self._features_s(moved, shape.degree, each) for each in (False, True)) else {}

    @staticmethod
    def _moved_features(
        images: Mapping[tuple[int, int], TowerWork],
        held: Sequence[Mapping[tuple[int, int], int]],
        dealt: Mapping[tuple[int, int], int],
    ) -> float:
        """Returns the most features of dealt images that a rank sends or receives; see `images_of` and `rank_media`."""
        # rows that each rank sends, and that it receives
        rows = np.zeros((2, len(held)))
        for key, rank in dealt.items():
            total = images[key].stop - images[key].start
            for place, own in enumerate(held):
                if place != rank and key in own:
                    rows[[0, 1], [rank, place]] += images[key].num_features * own[key] / total
        return float(rows.max())

    def _features_s(self, num_features: float, degree: int, is_backward: bool) -> float:
        """Returns seconds in which a group exchanges features, or their gradients, of which a rank moves at most so many."""
        tower = self.model.tower
        if is_backward and not tower.trained_parameters:
            return 0.0
        num_bytes = num_features * (1 + tower.num_levels) * self.model.hidden_bytes
        costs = self.coefficients.backward if is_backward else self.coefficients.forward
        return costs.exchange_s(feature_traffic(num_bytes, degree, self.cluster))

    def sequence_towers_s(self, num_sequences: int) -> FloatArray:
        """Returns seconds of towers for each sequence of the step on one rank, forward plus backward, if none runs again."""
        passes = ([self.tower_s(own, is_backward) for is_backward in (False, True)] for own in self.media)
        return np.array([sum(each) for each in passes]) if self.media else np.zeros(num_sequences)

    def tower_s(self, media: Iterable[TowerWork], is_backward: bool, again: bool = False) -> float:
        """Returns seconds in which a rank runs its tower for these images, at the rates of the text model's forward.

        again: the backward first runs the forward once more. A frozen tower has no backward.
        """
        model, forward = self.model, self.coefficients.forward
        given, of_pair = tuple(media), model.num_layers * model.pair_operations
        product_s, operations = forward.token_s / model.token_products, sum(map(model.tower.pair_operations, given))
        seconds = product_s * sum(map(model.tower.products, given))
        seconds += operations * (forward.pair_s / of_pair if of_pair else product_s / 2)
        passes = model.tower.backward_passes
        return seconds * ((passes + again if passes else 0.0) if is_backward else 1.0)

    def document_s(self, shape: GroupShape, is_backward: bool) -> float:
        """Returns seconds that every document adds to one pass over all layers: a ring's tiles, and states passed on."""
        if shape.num_blocks == 1:
            return 0.0
        costs = self.coefficients.backward if is_backward else self.coefficients.forward
        tiles_s = costs.tile_s * num_tiles(shape, 1.0)
        if self.model.states.is_empty:
            return tiles_s
        without, one = (
            costs.exchange_s(mean_traffic(self.model, self.cluster, shape, 0.0, is_backward, num_documents=number))
            for number in (0.0, 1.0)
        )
        return tiles_s + one - without

    def part_s(
        self,
        chunk: Chunk,
        shape: GroupShape,
        is_backward: bool,
        num_layers: int,
        has_head: bool,
        near_ranks: int = 0,
        pairs: AttentionPairs | None = None,
    ) -> float:
        """Returns seconds of one pass of `chunk` over `num_layers` layers of a stage, with or without output head and loss.

        The head takes a share of `token_s`, so that all parts add up to the whole model. pairs: pairs of these layers; None for
        the average over all layers.
        """
        exchange_s = self._pass_exchange_s(float(max(chunk.num_tokens, shape.degree)), shape, is_backward, near_ranks)
        layer_s, head_s = self.layer_and_head_s(chunk, shape, is_backward, exchange_s, pairs)
        return layer_s * num_layers + (head_s if has_head else 0.0)

    def layer_and_head_s(
        self,
        chunk: Chunk,
        shape: GroupShape,
        is_backward: bool,
        exchange_s: float,
        pairs: AttentionPairs | None = None,
        hidden_s: float | None = None,
    ) -> tuple[float, float]:
        """Returns seconds of one pass of `chunk` over one layer, and over output head and loss.

        exchange_s: seconds of communication in all layers together. pairs: pairs of the layer; None for the average layer.
        hidden_s: see `local_s`.
        """
        costs = self.coefficients.backward if is_backward else self.coefficients.forward
        head_s = costs.token_s * self.head_share(is_backward) * max(chunk.num_tokens, shape.degree) / shape.degree
        layers_s = self.local_s(chunk, shape, is_backward, pairs, hidden_s) + exchange_s - head_s
        return layers_s / self.model.num_layers, head_s

    def replay_parts_s(self, num_tokens: float) -> tuple[float, float, float]:
        """Returns seconds of tokens in one layer: of a forward's products, of an MLP's other operations, of any replay.

        If the rate of operations without products is unknown, the rate of products includes them.
        """
        all_s = self.coefficients.forward.token_s * (1 - self.head_share(is_backward=False)) * num_tokens / self.model.num_layers
        if not (rate := self.cluster.hardware.elementwise_bytes_per_s):
            return all_s, 0.0, 0.0
        whole, inner = replayed_bytes(self.model)
        # measured seconds may leave less than the predicted bytes need
        products_s = max(all_s / 2, all_s - elementwise_bytes(self.model)[0] * num_tokens / rate)
        return products_s, inner * num_tokens / rate, whole * num_tokens / rate

    def head_share(self, is_backward: bool) -> float:
        """Returns the output head's share of a token's seconds in a pass."""
        costs = self.coefficients.backward if is_backward else self.coefficients.forward
        return min(1.0, self.model.head_share * costs.head_factor)

    def hop_s(self, num_tokens: int, leaves_node: bool) -> float:
        """Returns seconds to send hidden states of `num_tokens` tokens, or their gradients, from a rank to the next stage."""
        costs = self.coefficients.forward
        byte_s = costs.network_byte_s if leaves_node else costs.link_byte_s
        return costs.message_s + byte_s * num_tokens * self.model.hidden_bytes

    def expert_exchange_s(self, own_tokens: float) -> float:
        """Returns seconds in which a rank's tokens travel to spread experts and back, in one forward or replay of all layers."""
        return self.coefficients.forward.exchange_s(expert_traffic(self.model, self.cluster, own_tokens, is_backward=False))

    def exchange_line(self, shape: GroupShape, is_backward: bool, near_ranks: int = 0) -> tuple[float, float]:
        """Returns communication of one pass over all layers as (fixed seconds, seconds per token of the group).

        Without what `document_s` counts.
        """
        return _exchange_line(self, shape, is_backward, near_ranks)

    def sequences_s(self, lengths: Sequence[int] | FloatArray, shape: GroupShape) -> FloatArray:
        """Returns seconds that each whole sequence adds to a group of `shape`, forward plus backward, without `group_s`."""
        tokens = np.asarray(lengths, dtype=np.float64)
        total, seen = np.zeros_like(tokens), self.attention_pairs().seen(np.zeros_like(tokens), tokens)
        for costs in (self.coefficients.forward, self.coefficients.backward):
            total += (costs.pair_s * tokens * seen + costs.token_s * tokens) / shape.degree
        if shape.degree > 1:
            total -= sum(self.hidden_s(tokens, shape, is_backward) for is_backward in (False, True))
        # without short sequences that only together fill a block of a scan
        total += self.rescan_s(tokens / shape.degree)
        # bytes sent are linear in the number of tokens; messages, tiles and states do not depend on it
        fixed_s = self._exchange_s(0.0, shape)
        total += (self._exchange_s(1.0, shape) - fixed_s) * tokens + self._sharing_s(0.0, 1.0, shape) - fixed_s
        return total

    def forward_sequences_s(self, lengths: FloatArray, shape: GroupShape) -> FloatArray:
        """Returns seconds that each whole sequence adds to the forward of a group of `shape`."""
        forward = self.coefficients.forward
        seen = self.attention_pairs().seen(np.zeros_like(lengths), lengths)
        _, token_s = self.exchange_line(shape, is_backward=False)
        seconds: FloatArray = (forward.pair_s * lengths * seen + forward.token_s * lengths) / shape.degree + token_s * lengths
        return seconds - self.hidden_s(lengths, shape, is_backward=False) + self.document_s(shape, is_backward=False)

    def group_s(self, shape: GroupShape) -> float:
        """Returns the fixed seconds of any chunk on a group of `shape`, forward plus backward."""
        chunk_s = self.coefficients.forward.chunk_s + self.coefficients.backward.chunk_s
        return chunk_s + self._exchange_s(0.0, shape)

    def _exchange_s(self, num_tokens: float, shape: GroupShape) -> float:
        return sum(self._pass_exchange_s(num_tokens, shape, is_backward) for is_backward in (False, True))

    def _sharing_s(self, num_tokens: float, num_documents: float, shape: GroupShape) -> float:
        """Returns seconds that sharing adds to forward and backward of a chunk: exchanges, and a ring's work per document."""
        document_s = sum(self.document_s(shape, is_backward) for is_backward in (False, True))
        return self._exchange_s(num_tokens, shape) + document_s * num_documents

    def _pass_exchange_s(self, num_tokens: float, shape: GroupShape, is_backward: bool, near_ranks: int = 0) -> float:
        fixed_s, token_s = self.exchange_line(shape, is_backward, near_ranks)
        return fixed_s + token_s * num_tokens

    def counted_exchange_s(self, num_tokens: float, shape: GroupShape, is_backward: bool, near_ranks: int) -> float:
        """Returns seconds of communication in one pass of `num_tokens` tokens over all layers, from the sent bytes."""
        costs = self.coefficients.backward if is_backward else self.coefficients.forward
        traffic = mean_traffic(self.model, self.cluster, shape, num_tokens, is_backward, near_ranks, num_documents=0.0)
        seconds = costs.exchange_s(traffic)
        if added := added_products(self.model, shape):
            seconds += costs.token_s * num_tokens / shape.degree * added / self.model.token_products
        if 0 < self.favoured_degree < shape.degree:
            return _AVOIDED * (seconds + costs.token_s * num_tokens / shape.degree)
        return seconds

    def _pass_s(
        self,
        chunk: Chunk,
        shape: GroupShape,
        num_layers: int,
        is_backward: bool,
        near_ranks: int,
        pairs: AttentionPairs | None,
    ) -> float:
        tokens = float(max(chunk.num_tokens, shape.degree))
        seconds = self.local_s(chunk, shape, is_backward, pairs) + self._pass_exchange_s(tokens, shape, is_backward, near_ranks)
        return seconds * num_layers / self.model.num_layers


# plans need few lines, each of them often
@lru_cache(maxsize=1024)
def _exchange_line(costs: CostModel, shape: GroupShape, is_backward: bool, near_ranks: int) -> tuple[float, float]:
    """Computes `CostModel.exchange_line`, which is linear in tokens."""
    fixed_s, one_s = (costs.counted_exchange_s(tokens, shape, is_backward, near_ranks) for tokens in (0.0, 1.0))
    return fixed_s, one_s - fixed_s


def block_sizes(degrees: Sequence[int], costs: CostModel) -> tuple[int, ...]:
    """Returns sizes of all blocks of two or more ranks in groups of these degrees, for which process groups are created."""
    shapes = [shape for degree in degrees for shape in group_shapes(degree, costs.method, costs.model, costs.cluster)]
    return tuple(sorted({shape.ulysses for shape in shapes} - {1}))


def default_coefficients(model: ModelSpec, cluster: ClusterSpec) -> CostCoefficients:
    """Derives coefficients from operation counts and hardware rates, to rank plans until a run has measured its own.

    Forward: 2 operations per matrix parameter and token, 4 per head element and query-key pair, 20 kernels per layer and
    chunk, 4 kernels per layer and ring tile. Backward: forward times the hardware's ratios, and twice the kernels. Weights below
    adapters are frozen (`with_adapters`). Operations without products are counted by their bytes (`elementwise_bytes`) if their
    rate is known; otherwise the rate of products includes them.

    A scan counts by its products at the rate of matrices, by what it moves (`mixer_bytes`), and once more if backward runs it
    again (`CostModel.rescan_s`). Transformers' torch code starts some ten kernels for every tile of 64 tokens, one tile after the
    other on every rank of a group. That time is not counted here; it is in coefficients measured by a run or `hf-longctx
    calibrate`.
    """
    hardware, whole = cluster.hardware, replace(model, adapters=AdapterSpec())
    token_s = 2 * whole.token_products / hardware.matmul_flops_per_s
    pair_s = model.num_layers * model.pair_operations / hardware.attention_flops_per_s
    kernels_s = model.num_layers * hardware.kernel_s
    exchange = (hardware.message_s, 1 / hardware.link_bytes_per_s, 1 / hardware.network_bytes_per_s)
    backward_s = hardware.backward_attention * pair_s, hardware.backward_matmul * token_s
    found = CostCoefficients(
        forward=PassCoefficients(pair_s, token_s, 20 * kernels_s, *exchange, 4 * kernels_s),
        backward=PassCoefficients(*backward_s, 40 * kernels_s, *exchange, 8 * kernels_s),
        step_s=0.0,
        source=hardware.source or "default",
    )
    found = _with_fp8(with_adapters(found, model), model, cluster)
    if not hardware.elementwise_bytes_per_s:
        return found
    if unpacked := model.experts.parameters * model.num_layers * model.packed.has_experts:
        # a forward and a backward unpack all experts, however few tokens the chunk has; a replay for gradients unpacks none
        unpack_s = unpacked * UNPACKING_BYTES / hardware.elementwise_bytes_per_s
        forward, backward = found.forward, found.backward
        found = replace(
            found,
            forward=replace(forward, chunk_s=forward.chunk_s + unpack_s),
            backward=replace(backward, chunk_s=backward.chunk_s + unpack_s),
        )
    forward_bytes, backward_bytes = elementwise_bytes(model)
    num_states = sum(model.states.layers)
    forward_mixers, backward_mixers = mixer_bytes(model) if num_states else (0, 0)
    forward_more_s, backward_more_s = (
        (model.num_layers * of_layer + num_states * of_mixer) / hardware.elementwise_bytes_per_s
        for of_layer, of_mixer in ((forward_bytes, forward_mixers), (backward_bytes, backward_mixers))
    )
    return replace(
        found,
        forward=_with_elementwise(found.forward, forward_more_s),
        backward=_with_elementwise(found.backward, backward_more_s),
    )


# bytes read and written for a value in half precision that is rounded to fp8, in one kernel
_ROUNDED_VALUE = 2 + 1


def _with_fp8(costs: CostCoefficients, model: ModelSpec, cluster: ClusterSpec) -> CostCoefficients:
    """Returns coefficients of a model whose frozen matrices multiply in fp8, given those in the model's dtype.

    Rounding counts by its bytes, for every token; in backward, the bytes of a matrix in the other order, for every chunk.
    """
    hardware, count = cluster.hardware, model.num_layers * model.packed.fp8_parameters
    if not count:
        return costs
    saved = 1 - 1 / (hardware.fp8_ratio or ASSUMED_FP8_RATIO)
    forward, backward = costs.forward, costs.backward
    # shares of the products of a pass
    share = count / model.token_products
    back_share = share / (2 * backward_share(model))
    forward, backward = _with_products(forward, 1 - share * saved), _with_products(backward, 1 - back_share * saved)
    rate = hardware.elementwise_bytes_per_s or hardware.memory_bytes_per_s
    if not rate:
        return replace(costs, forward=forward, backward=backward)
    d, inner = model.hidden_size, 0 if model.experts.num_experts else model.intermediate_size
    inputs = 2 * d + model.output_size + inner
    outputs = model.query_size + model.kv_size + 2 * d + (1 + model.gated_mlp) * inner
    forward = _with_elementwise(forward, model.num_layers * _ROUNDED_VALUE * inputs / rate)
    backward = _with_elementwise(backward, model.num_layers * _ROUNDED_VALUE * outputs / rate)
    turned_s = 2 * count / (hardware.memory_bytes_per_s or rate)
    return replace(costs, forward=forward, backward=replace(backward, chunk_s=backward.chunk_s + turned_s))


def _with_products(costs: PassCoefficients, factor: float) -> PassCoefficients:
    """Multiplies seconds of every token, without changing the output head's."""
    return replace(costs, token_s=factor * costs.token_s, head_factor=costs.head_factor / factor)


def _with_elementwise(costs: PassCoefficients, token_s: float) -> PassCoefficients:
    """Adds seconds of every token in the layers to coefficients, without changing the output head's."""
    share = costs.token_s / (costs.token_s + token_s)
    return replace(costs, token_s=costs.token_s + token_s, head_factor=costs.head_factor * share)


def with_adapters(whole: CostCoefficients, model: ModelSpec) -> CostCoefficients:
    """Returns coefficients of `model` with adapters, given those of training all weights; `whole` without adapters."""
    if model.adapters.is_empty:
        return whole
    more = model.token_products / replace(model, adapters=AdapterSpec()).token_products
    share, backward = backward_share(model), whole.backward
    return replace(
        whole,
        forward=replace(whole.forward, token_s=more * whole.forward.token_s),
        backward=replace(
            backward,
            token_s=more * share * backward.token_s,
            head_factor=backward.head_factor * (1 if model.trains_head else 0.5) / share,
        ),
    )


def teacher_costs(model: ModelSpec, cluster: ClusterSpec) -> CostModel:
    """Returns the costs of a frozen model that runs forwards alone, with the rates of the hardware."""
    return CostModel(model, cluster, default_coefficients(model, cluster))


def backward_share(model: ModelSpec) -> float:
    """Returns the share of a full backward's matrix products that the backward of `model` computes.

    Half of them make gradients of inputs, and half those of weights, which frozen weights do not have. Adapters have both.
    """
    frozen = 0 if model.trains_layers else model.num_layers * model.layer_parameters
    frozen += 0 if model.trains_head else model.head_outputs * model.hidden_size
    return 1 - frozen / (2 * model.token_products)


# description of the operations that `training_operations` counts
OPERATIONS_FORMULA = (
    "model operations = tokens x 2 x multiplications of a token x (1 forward + 1 for gradients of inputs + 1 for gradients of "
    "weights, if those are trained) + query-key pairs within documents x operations of a pair x 3; what is recomputed does not "
    "count, nor do dummy tokens"
)


def training_operations(lengths: Iterable[int], model: ModelSpec) -> float:
    """Counts operations of one forward and backward over documents of these lengths, by `OPERATIONS_FORMULA`.

    A product counts as a multiplication and an addition. Of causal attention, only pairs that are not masked count.
    """
    pairs = model.attention_pairs()
    num_tokens, num_pairs = 0, 0.0
    for length in lengths:
        num_tokens += length
        num_pairs += pairs.of_span(0, length)
    passes = 1 + 2 * backward_share(model)
    return passes * 2.0 * model.token_products * num_tokens + 3.0 * model.num_layers * model.pair_operations * num_pairs
