"""Counts bytes of one decoder layer on a rank, and of everything outside the layers, moment by moment.

Each moment is a sum over the tensors that are alive in it. The lists of tensors follow the code of the runtime and of Hugging
Face's modules; tests compare the sums with the memory that torch allocates. Letters as in `saved_tensors.py`: d hidden, a all
query heads, k all KV heads, f intermediate, h heads, e bytes per element; in the code d, a, k and f are bytes per token.

Ranks that share attention by heads work on as many elements as a rank with 1/degree of the tokens. Their exchanges take more
memory, which is counted as one copy of the sent tensors.

`LayerBytes` is a layer with attention, `PiecedLayerBytes` one whose attention runs in pieces of its heads
(`runtime/activations/head_pieces.py`): queries, keys, values and workspace exist for one piece at a time; outputs of all heads,
the module's input, the sum over pieces, and products of adapters' first matrices stay. Other classes are layers with a state
along the sequence, or with only an MLP.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from hf_longctx.plan.core.sharding import (
    ADAPTER_ELEMENTS,
    PACKED_ROWS,
    HeadParts,
    expert_rows,
    head_shares,
    heads_at_once,
    packed_rows,
    passes_states,
)
from hf_longctx.plan.core.types import TENSOR_CLASSES, LayerPolicy, TensorClass, TensorShare, small_tile
from hf_longctx.plan.memory.saved_tensors import (
    class_bytes,
    gate_bytes,
    head_norm_bytes,
    inner_bytes,
    matrix_bytes,
    norm_bytes,
    outer_bytes,
    own_input_bytes,
    own_input_gradients,
    plain_layer_bytes,
    result_bytes,
    result_norm_bytes,
    saves_attention,
    saves_first_norm,
    saves_product,
    saves_second_norm,
    scale_bytes,
    shared_kv_bytes,
)
from hf_longctx.plan.model.layers import ATTENTION, LayerKind
from hf_longctx.plan.model.model_spec import ModelSpec

# most elements of a score matrix, as in `runtime/tiles/plain.py`
MOST_SCORES = 2**25
# places of a row of an expert and of its token while it runs
_ROW_PLACES = 16
_CUT_CLASSES: tuple[TensorClass, ...] = ("layer_input", "attention_output")
# share of a class that is kept, and the tokens of each class at which the recomputed and the host part of kept ones end
_KEPT_SHARE = TensorShare("mlp", device=1.0)
_KEPT_CUTS = dict.fromkeys(TENSOR_CLASSES, (0, 0))


@dataclass(frozen=True, slots=True)
class Load:
    """The share of a chunk that one rank runs."""

    # tokens on this rank
    num_tokens: int
    # this rank's share of each document's new tokens; attention of the documents runs one after the other
    documents: tuple[int, ...]
    num_layers: int
    # this rank's share of the earlier tokens that a slice sees; their keys and values are in the K/V book
    front_tokens: int = 0
    # new tokens whose keys and values go into the K/V book
    sliced_tokens: int = 0
    # final norm, logits and loss run here
    has_head: bool = True
    # queries, keys and values travel between ranks
    is_shared: bool = False
    # the loss runs in the policy's token tiles
    tiles_loss: bool = True
    # the backward comes next, so a loss in tiles makes its gradients in the forward
    keeps_gradients: bool = True
    # the attention operator reads one KV head for many query heads and takes strided tensors, as GPU operators do
    groups_heads: bool = False
    # hidden states come from another layer range; they wait with the chunk, because their gradient goes back there
    receives: bool = False
    # number of blocks of the rank's group, and of ranks per block
    num_blocks: int = 1
    block_ranks: int = 1

    @classmethod
    def document(cls, num_tokens: int, num_layers: int) -> Load:
        """Makes the load of one whole document on one rank."""
        return cls(num_tokens, (num_tokens,), num_layers)


class AttentionBytes:
    """Bytes of one layer's attention and of its exchanges between ranks, as far as they do not depend on a policy."""

    def __init__(self, model: ModelSpec, load: Load) -> None:
        self.model, self.load, self.tokens = model, load, load.num_tokens

    @cached_property
    def _sizes(self) -> tuple[int, int, int, int]:
        """Returns bytes per token of a hidden state, of all query heads, of all KV heads, of one inner tensor of the MLP.

        Experts that run apart have no inner tensors of all tokens. If values have another head size than keys: the larger of
        queries and outputs, and half of keys and values together.
        """
        model = self.model
        e = model.bytes_per_element
        a, kv = max(model.query_size, model.output_size), model.kv_size
        return e * model.hidden_size, e * a, e * kv // 2, e * model.whole_size

    @property
    def _has_plain_tiles(self) -> bool:
        """Whether attention makes matrices of scores, block by block."""
        model = self.model
        return model.caps_scores or model.drops_weights or model.compresses_keys or not model.index.is_empty

    def _score_blocks(self, num_queries: int, num_keys: int) -> int:
        """Returns bytes of score matrices for capped scores, chosen or compressed keys, or dropout.

        They are three per block of queries, of at least one query, and a mask of bytes for dropout. The scores of an index take
        as much at another moment.
        """
        if not self._has_plain_tiles:
            return 0
        heads = max(self.model.num_heads, self.model.index.num_heads)
        # every query has scores for the keys of all ranks
        num_keys *= 1 if self.model.index.is_empty else self._choosing_ranks
        values = min(max(MOST_SCORES, num_keys * heads), num_queries * num_keys * heads)
        return values * (3 * max(4, self.model.bytes_per_element) + self.model.drops_weights)

    @cached_property
    def _choice(self) -> int:
        """Returns bytes of chosen keys while attention runs (those of other ranks of the block, and their numbers within a tile).

        Includes index keys of all tokens of the group, as they arrive and in order.
        """
        index, load = self.model.index, self.load
        ranks, block = self._choosing_ranks, max(load.block_ranks, index.most_ranks if load.is_shared else 1)
        keys = 3 * self.model.bytes_per_element * index.head_dim * (self.tokens + load.front_tokens) * ranks
        gathered = self.tokens * block if block > 1 else 0
        return index.token_bytes * (gathered + max(load.documents, default=0) * block) + keys

    @property
    def _choosing_ranks(self) -> int:
        """Number of ranks whose index keys this rank holds: those of its group, or of any that the run may have."""
        load = self.load
        return max(load.block_ranks * load.num_blocks, self.model.index.most_ranks if load.is_shared else 1)

    @cached_property
    def _wide(self) -> int:
        """Bytes of an element in at least fp32, as a multiple of those in the model's dtype."""
        return max(1, 4 // self.model.bytes_per_element)

    @cached_property
    def _scores(self) -> int:
        """Returns bytes of score matrices of the longest document."""
        longest = max(self.load.documents, default=0)
        return self._score_blocks(longest, longest + self.load.front_tokens)

    @cached_property
    def _exchange(self) -> int:
        """Returns bytes of one copy of the queries, keys and values sent between ranks."""
        _, a, k, _ = self._sizes
        return (a + 2 * k) * self.tokens if self.load.is_shared else 0

    def _hops(self, num_sums: int) -> int:
        """Returns bytes in flight around a ring while a hop is computed: K and V of two hops, and `num_sums` gradient sums.

        All but the last of the zigzag pieces travel, and those of earlier slices. A rank with a slice also copies its keys and
        values next to earlier ones, and sums their gradients, before they are added to those in the book.
        """
        load, blocks, (_, _, k, _) = self.load, self.load.num_blocks, self._sizes
        if blocks == 1:
            return 0
        travelling = self.tokens * (2 * blocks - 1) / (2 * blocks) + load.front_tokens
        copied = (1 + (num_sums > 0) * self._wide) * (self.tokens + load.front_tokens) if load.sliced_tokens else 0
        return math.ceil(2 * k * ((2 + num_sums * self._wide) * travelling + copied))

    @cached_property
    def _hops_back(self) -> int:
        """Returns bytes of `_hops` in the backward: computed sums and, with several hops, leaving and arriving ones."""
        return self._hops(3 if self.load.num_blocks > 2 else 2)

    @cached_property
    def _operator_backward(self) -> int:
        """Returns bytes of attention's backward besides its inputs and the gradients that it returns."""
        _, a, k, _ = self._sizes
        load, most = self.load, 0
        is_lone = len(load.documents) == 1 and not load.sliced_tokens
        for before, document in pairwise((0, *load.documents)):
            # gradients of the document before, with those of keys and values summed over heads in fp32
            found = (a + 2 * k * self._wide) * before
            # gradients of all heads besides the operator, if that takes only a share of the heads at once
            share, whole = self._heads_at_once(document + load.front_tokens), 0
            if share < 1:
                whole = (a if is_lone else a + 2 * k * self._wide) * document
            if load.groups_heads:
                # gradients for expanded heads inside, and one of the queries in fp32
                most = max(most, found + whole + math.ceil(share * ((3 + self._wide) * a + 2 * k) * document))
                continue
            expanded = 2 * a * document if a != k else 0
            # operators take dense queries, outputs and gradients and return gradients for expanded heads; inside they use another
            # fp32 tensor of the queries' size
            inside = expanded + (6 + self._wide) * a * document
            most = max(most, found + whole + math.ceil(share * inside))
        if self.model.saves_kv_once:
            most = max(most, self._call_bytes * self._packed_rows)
        if load.sliced_tokens:
            # gradient sums of the slice's own keys and values; the front, which runs after the slice, has gradients too
            own = 2 * k * self._wide * load.sliced_tokens
            front = 2 * k * (1 + (self._wide > 1)) * load.front_tokens + (5 + 2 * self._wide) * a * load.sliced_tokens
            most = own + max(most, front if load.front_tokens else 0)
        longest = max(load.documents, default=0)
        # values, outputs and their gradients are copied if values are widened to the head size of keys, or keys to theirs
        most += 3 * a * longest if self.model.value_head_dim else 0
        return most + self._hops_back + self._choice + self._scores

    def _heads_at_once(self, num_tokens: int) -> float:
        """Returns the share of a rank's heads that attention's backward takes at once; num_tokens: this rank's share of keys."""
        model, block = self.model, max(1, self.load.block_ranks)
        heads = -(-model.num_heads // block)
        per_kv = max(1, min(heads, model.num_heads // model.num_kv_heads))
        return heads_at_once(heads, per_kv, num_tokens * block, model.head_dim) / heads

    @property
    def _packed_rows(self) -> int:
        """Returns the most rows of short documents in one call, as a rank's share: all tokens of its block, and some heads."""
        load = self.load
        if load.num_blocks > 1:
            return 0
        return min(packed_rows(sum(load.documents) * load.block_ranks, len(load.documents)), PACKED_ROWS) // load.block_ranks

    @property
    def _call_bytes(self) -> int:
        """Returns bytes per row in the backward of an operator for GPUs, including its results."""
        _, a, k, _ = self._sizes
        # copies of inputs, of the output and its gradient, a sum in fp32, gradients; those of keys and values also for
        # expanded heads
        return (4 + self._wide) * a + 4 * k + (2 * a if a != k else 0)


class LayerBytes(AttentionBytes):
    """Bytes of one layer under one policy.

    held, held_host: bytes held from forward to backward, on the device and on the host; input_host: the part of held_host that is
    the layer's input. sent: bytes of the tensors that go to the host, whole or in part. forward: most bytes while this layer runs
    forward, beyond those held by earlier layers. backward: most bytes during its replay and backward, beyond those that the
    layers up to this one hold and those that arrive from the host.
    """

    kind = ATTENTION

    # cached properties that do not depend on the policy
    _OF_LOAD = frozenset(
        {
            *("_sizes", "_wide", "_class_bytes", "_attention_bytes", "_norms", "_first_norm", "_mixed", "_results", "_exchange"),
            *("_exchange_ahead", "_parts", "_part"),
            *("_hops_ahead", "_hops_back", "_choice", "_scores", "_travelling", "_mixing_work", "_operator_backward"),
            *("_forward_work", "_mlp_work", "_norm_work"),
        }
    )

    def __init__(
        self, model: ModelSpec, load: Load, policy: LayerPolicy, tile_tokens: int, known: dict[str, Any] | None = None
    ) -> None:
        """Counts all bytes. known: those that do not depend on the policy, shared by layers of one kind, load and tile size."""
        known = {} if known is None else known
        self.__dict__.update(known)
        super().__init__(model, load)
        self.policy, self.tile = policy, min(tile_tokens or load.num_tokens, load.num_tokens)
        # norms and MLPs run in tiles if the runtime can run them separately
        self.tiles_norms = tile_tokens > 0 and model.tiles_norms
        # packed experts run for all tokens at once, but as a node that a replay runs for gradients alone
        is_node = model.tiles_mlps and not model.experts.are_spread
        self._tiles_mlp = is_node and (tile_tokens > 0 or model.packed.has_experts)
        self._mlp_tile = self.tokens if model.runs_mlps_whole else self.tile
        self.is_plain = policy.keeps_everything
        given = {} if self.is_plain else {share.tensor_class: share for share in reversed(policy.shares)}
        # tokens of each class at which the recomputed and the host part end
        self._cuts = _KEPT_CUTS | {name: share.cuts(load.num_tokens) for name, share in given.items()}
        self._input_share, self._mlp_share = given.get("layer_input", _KEPT_SHARE), given.get("mlp", _KEPT_SHARE)
        self.held, self.held_host = self._plain_held() if self.is_plain else self._split_held()
        self.input_host = round(self._input_share.host * self.tokens) * self._class_bytes["layer_input"]
        self.sent = self._sent() if self.held_host else 0
        adapters = 0 if self.is_plain else self._adapters()
        self.forward = self._forward() + adapters
        moments = self._result_backward(), self._mlp_backward(), self._norm_backward(), self._attention_backward()
        self.backward = max(moments) + adapters + own_input_gradients(model) * load.num_tokens
        if again := self._recomputed("layer_input") * self._class_bytes["layer_input"]:
            # the layer input exists in addition; first, the layer before makes it while this layer's gradient waits
            self.backward = again + max(self.backward, self.forward)
        if len(known) < len(self._OF_LOAD):
            known.update((name, value) for name, value in self.__dict__.items() if name in self._OF_LOAD)

    @cached_property
    def _class_bytes(self) -> dict[TensorClass, int]:
        """Returns `class_bytes` of every class in a layer of this kind."""
        return {name: class_bytes(self.model, name, self.kind) for name in TENSOR_CLASSES}

    @cached_property
    def _attention_bytes(self) -> dict[TensorClass, int]:
        """Returns `class_bytes` of every class in a layer with attention and nothing else."""
        return {name: class_bytes(self.model, name) for name in TENSOR_CLASSES}

    @property
    def _kept_heads(self) -> tuple[int, int]:
        """Returns bytes per token of all query heads, and of all KV heads, saved by a layer that keeps everything."""
        _, a, k, _ = self._sizes
        e, kept = self.model.bytes_per_element, matrix_bytes(self.model)
        return a * kept // e, k * kept // e

    @property
    def _has_own_attention(self) -> bool:
        """Whether attention runs in tiles even if everything is kept, since torch's own would make whole score matrices."""
        return self._has_plain_tiles or self.model.value_head_dim > 0

    def _adapters(self) -> int:
        """Returns bytes that adapters save in a replayed layer, during its own forward and replay only.

        Those in a kept MLP are held with it.
        """
        adapters, again = self.model.adapters, self._recomputed("mlp")
        in_mlp = adapters.mlp_saved_bytes * again
        if self._tiles_mlp:
            # in an MLP with tiles, they exist for one tile at a time
            in_mlp = min(in_mlp, adapters.tile_bytes * min(self._mlp_tile, again))
        if adapters.splits_experts:
            # adapters on experts are counted with their rows
            in_mlp = min(in_mlp, adapters.tile_bytes * min(self._mlp_tile, again))
        return adapters.attention_saved_bytes * self.tokens + in_mlp

    def _expert_work(self, num_tokens: int, is_backward: bool, is_kept: bool = False) -> int:
        """Returns bytes of experts that run apart while some rows run, with the sums of all tokens in at least fp32.

        The sums are rounded when no row runs. is_kept: what the node saves of rows is counted elsewhere.
        """
        model, experts = self.model, self.model.experts
        if not model.adapters.splits_experts:
            return 0
        e, rows = model.bytes_per_element, num_tokens * experts.token_rows // experts.num_layers
        row, inner = e * experts.row_size, e * experts.inner_size
        first = (2 if model.gated_mlp else 1) * inner
        if is_backward:
            # outputs of the first matrices and what an adapter adds to them; inner tensors and gradients of outputs; inner
            # tensors and their gradients; gradients of rows and what is added to them
            most = max(row + 2 * first, first + 4 * inner + row, 2 * first + 4 * inner, first + 2 * row)
            clamped = (model.num_clamped + 1) * inner if model.num_clamped else 0
        else:
            most = max(row + 2 * first, inner + 2 * row, first + 4 * inner)
            clamped = inner if model.num_clamped else 0
        if is_kept and (is_backward or not model.packed.has_experts):
            # a part reads what is saved; one that is all rows has it first
            most -= first
        # products with A, their gradients, and places
        most += clamped + 3 * model.adapters.mlp_saved_bytes * experts.num_layers // experts.token_rows + _ROW_PLACES
        at_once = expert_rows(rows, experts.num_experts) if model.packed.has_experts else rows
        return max(at_once * most, row * num_tokens) + max(4, e) * num_tokens * experts.row_size

    def _plain_held(self) -> tuple[int, int]:
        load, (a, k) = self.load, self._kept_heads
        held = plain_layer_bytes(self.model) * self.tokens
        # outputs that a matrix or an adapter reads exist twice: in one piece, or before they were sent, or with tokens first
        copy = a if saves_attention(self.model) else 0
        if load.sliced_tokens:
            # keys and values of slices are in the K/V book; a merged output has heads first, so it is copied with tokens first,
            # unless it is concatenated with others
            is_copied = len(load.documents) == 1
            return held - 2 * k * load.sliced_tokens + (copy * self.tokens if is_copied else 0), 0
        # torch's own attention saves keys and values as many times as query heads read them
        expanded = 0 if self.model.saves_kv_once else 2 * (a - k)
        return held + (expanded + copy) * self.tokens, 0

    def _split_held(self) -> tuple[int, int]:
        device = host = 0
        for name in TENSOR_CLASSES:
            host_start, host_stop = self._cuts[name]
            token_bytes = self._class_bytes[name]
            host += (host_stop - host_start) * token_bytes
            device += (self.tokens - host_stop) * token_bytes
        # the next layer's replay gets it too
        return device + self.model.index.passed_bytes * self.tokens, host

    def _sent(self) -> int:
        """Returns bytes of tensors that stay until their host part has left; an MLP makes its own in tiles, or in parts."""
        sent = 0
        for name in TENSOR_CLASSES:
            host_start, host_stop = self._cuts[name]
            if host_stop > host_start:
                sent += self._class_bytes[name] * (host_stop - host_start if name == "mlp" else self.tokens)
        return sent

    def _recomputed(self, name: TensorClass) -> int:
        """Returns the number of tokens for which a tensor class is recomputed."""
        return 0 if self.is_plain else self._cuts[name][0]

    @property
    def _whole_input(self) -> int:
        """Returns bytes of a layer input that was split between device and host, and is joined again."""
        d, _, _, _ = self._sizes
        share = self._input_share
        return round(d * self.tokens * share.device) if not self.is_plain and 0 < share.host < 1 else 0

    @cached_property
    def _norms(self) -> tuple[int, int]:
        """Returns bytes per token of a norm and the scales of a residual in a replay, without and with the norm's output.

        In fp32 the residual is its input.
        """
        d, _, _, _ = self._sizes
        without, whole = (d, 2 * d) if self.tiles_norms else [norm_bytes(self.model, saves) for saves in (False, True)]
        return without + scale_bytes(self.model), whole + scale_bytes(self.model)

    @property
    def _second_norm(self) -> int:
        """Returns bytes per token that the norm before the MLP saves, with its output, which tiles of an MLP keep whole."""
        return self._norms[not self.is_plain or saves_second_norm(self.model)]

    @cached_property
    def _replayed_attention(self) -> int:
        """Returns bytes that a replay saves up to the output of attention or mixer, besides layer input and kept tensors."""
        return 0 if self.is_plain else self._first_norm * self.tokens + self._replayed_mixing + self._whole_input

    @property
    def _replayed_mixing(self) -> int:
        """Returns bytes of `_replayed_attention` that attention or the mixer saves."""
        _, _, k, _ = self._sizes
        saved = self._attention_bytes
        qkv = saved["qkv"] * self._recomputed("qkv") - 2 * k * self.load.sliced_tokens
        return qkv + self._mixed * self.tokens + saved["attention_output"] * self._recomputed("attention_output")

    @cached_property
    def _mixed(self) -> int:
        """Returns bytes per token that attention saves in a replay besides queries, keys, values and outputs."""
        model = self.model
        return head_norm_bytes(model) + gate_bytes(model) + model.latent_saved_bytes + model.choice_bytes

    @cached_property
    def _first_norm(self) -> int:
        """Returns bytes per token that a replay's first norm saves besides the layer input."""
        d, _, _, _ = self._sizes
        shares_input = self.tiles_norms or self.model.fuses_norms or self.model.bytes_per_element == 4
        return self._norms[self._saves_first_norm] - (d if shares_input else 0)

    @property
    def _saves_first_norm(self) -> bool:
        return saves_first_norm(self.model)

    def _forward(self) -> int:
        if self.is_plain:
            return self._plain_forward()
        norm, mlp = self._forward_work
        # kept tensors of attention beside the residual
        return max(self._mixing_forward(), norm, mlp + self.held - min(self.held, self._sizes[0] * self.tokens))

    @cached_property
    def _forward_work(self) -> tuple[int, int]:
        """Returns bytes around attention's result, and in the MLP, in the forward of a layer that keeps a part."""
        d, _, _, f = self._sizes
        inner = (3 if self.model.gated_mlp else 2) * f
        # besides the norm of attention's result: that result, and the residual
        norm = ((4 if self.model.norms_results else 2) * d + 8 * self.model.hidden_size) * self.tokens
        # input, residual and the norm's output
        mlp = (4 if self._tiles_mlp else 3) * d * self.tokens + inner * self._mlp_tile + self._travelling
        return norm, mlp + self._expert_work(self._mlp_tile, is_backward=False)

    def _plain_forward(self) -> int:
        """Returns the most bytes in the forward of a layer that keeps everything."""
        attention = self._hops_ahead + self._scores + self._choice
        whole = self.held + self._passing + attention + self._travelling
        return self._sizes[0] * self.tokens + max(whole, self.held - self._held_mlp + self._exchange_ahead + attention)

    @property
    def _passing(self) -> int:
        """Returns the most bytes of tensors that frozen weights do not save, while a layer that keeps everything runs.

        They are the MLP's input and what its last matrix multiplies, outputs of adapters before they are added, or attention's
        output with tokens first.
        """
        model, (d, _, _, f) = self.model, self._sizes
        in_mlp = (0 if saves_product(model) else f) + (0 if saves_second_norm(model) else d)
        added = max(0, model.adapters.tile_bytes - model.adapters.mlp_saved_bytes)
        output = 0 if saves_attention(model) else self._kept_heads[0]
        return max(max(in_mlp, added, output) * self.tokens, self._expert_work(self.tokens, is_backward=False, is_kept=True))

    @cached_property
    def _travelling(self) -> int:
        """Returns bytes of rows that travel to experts and back, or of their gradients: two copies besides saved ones."""
        experts, d = self.model.experts, self._sizes[0]
        return 2 * d * self.tokens * experts.travelling_rows // self.model.num_layers

    def _mixing_forward(self) -> int:
        """Returns the most bytes up to attention's output, in the forward of a layer that keeps a part."""
        rotation, attention, gate = self._mixing_work
        return max(rotation, attention + self._cut_bytes + self._unrotated) + gate

    @cached_property
    def _mixing_work(self) -> tuple[int, int, int]:
        """Returns bytes of rotary embeddings, of attention without what a policy keeps, and of a gate that both need."""
        d, a, k, _ = self._sizes
        documents = self.load.documents
        expanded = 2 * a if a != k and not self.load.groups_heads else 0
        # outputs of several documents are concatenated
        joined = a * self.tokens if len(documents) > 1 else 0
        attention = (2 * d + 2 * a + 2 * k) * self.tokens + max(expanded * max(documents, default=0), joined)
        attention += self._exchange_ahead + self._hops_ahead + self._scores + self._choice + self._latents
        # rotary embedding: queries and three more tensors of their size; then keys and as many, besides rotated queries
        rotation = (2 * d + 2 * k + max(4 * a, 2 * a + 3 * k)) * self.tokens
        return rotation, attention, a * self.tokens if self.model.gates_output else 0

    @property
    def _cut_bytes(self) -> int:
        """Returns bytes of the device parts of layer input and attention output, which are copies if only a part stays."""
        num_bytes = 0
        for name in _CUT_CLASSES:
            stop = self._cuts[name][1]
            num_bytes += self._attention_bytes[name] * (self.tokens - stop) if stop else 0
        return num_bytes

    @property
    def _unrotated(self) -> int:
        """Returns bytes of kept projections besides queries and keys made from them; values are shared unless split."""
        _, a, k, _ = self._sizes
        stop = self._cuts["qkv"][1]
        return (a + (2 * k if stop else k)) * (self.tokens - stop)

    @property
    def _latents(self) -> int:
        """Returns bytes that low-rank projections hold while attention runs: latents, and tensors made from them."""
        model = self.model
        if not model.kv_rank:
            return 0
        latents = 2 * (model.query_rank + model.kv_rank + model.rope_head_dim)
        parts = model.query_size + model.num_heads * (model.head_dim - model.rope_head_dim)
        return model.bytes_per_element * (latents + parts) * self.tokens

    @cached_property
    def _exchange_ahead(self) -> int:
        """Returns bytes of exchanges in the forward, besides queries, keys, values and the output of attention.

        Inputs are sent, received and joined, or the output is; in parts, inputs wait until all have left, while outputs arrive.
        """
        inputs, output = self._exchange, self._sizes[1] * self.tokens
        if not inputs:
            return 0
        return max(2 * inputs - output, inputs + 2 * output) if self._parts is None else 2 * inputs + output

    def _exchanging_back(self, work: Callable[[AttentionBytes], int]) -> int:
        """Returns bytes of exchanges in the backward, with those that attention needs meanwhile for these heads.

        While one part runs, the gradients of the output and of the inputs of all parts wait. All at once counts, too, since a
        chunk that is longer than others of its group may be exchanged like these.
        """
        at_once = self._exchange + work(self)
        if self._part is None:
            return at_once
        return max(at_once, 2 * self._exchange + self._sizes[1] * self.tokens + work(self._part))

    @cached_property
    def _parts(self) -> HeadParts | None:
        """Returns the parts in which heads are exchanged beside attention; None if they are exchanged at once."""
        load = self.load
        return self.model.head_parts(load.block_ranks, self.tokens) if load.is_shared and load.num_blocks == 1 else None

    @cached_property
    def _part(self) -> AttentionBytes | None:
        """Returns the bytes of attention with the heads of one part; None as in `_parts`."""
        if (parts := self._parts) is None:
            return None
        ranks = self.load.block_ranks
        model = replace(self.model, num_heads=ranks * parts.num_q, num_kv_heads=ranks * parts.num_kv)
        return AttentionBytes(model, self.load)

    @cached_property
    def _hops_ahead(self) -> int:
        """Returns bytes of `_hops` in the forward, and of a tile's output before merging, in at least fp32.

        The tile of a slice with all earlier keys has all its rows, which are copied, and its own keys and values are joined.
        """
        (_, a, k, _), load = self._sizes, self.load
        if load.num_blocks == 1:
            return 0
        of_slice = (2 * k + 2 * a * self._wide) * self.tokens if load.sliced_tokens else 0
        return self._hops(0) + a * self._wide * self.tokens + of_slice

    @cached_property
    def _results(self) -> tuple[int, int]:
        """Returns bytes that the norm of attention's result saves, with all that follows attention and the MLP."""
        return result_norm_bytes(self.model) * self.tokens, result_bytes(self.model) * self.tokens

    def _result_backward(self) -> int:
        """Returns bytes in norms of the MLP's result, and of what is added after it, which run backward first."""
        (_, results), d = self._results, self._sizes[0]
        if not results:
            return 0
        work = (3 * d + (24 if self._wide > 1 else 20) * self.model.hidden_size) * self.tokens
        if self.is_plain:
            return work
        whole = 0 if self._tiles_mlp else inner_bytes(self.model) * self._recomputed("mlp")
        return work + self._replayed_attention + self._second_norm * self.tokens + results + whole

    def _mlp_backward(self) -> int:
        """Returns bytes in the MLP's backward, with gradients of inner tensors; the second matrix has released its input."""
        d, _, _, f = self._sizes
        gradient = d * self.tokens
        if self.is_plain:
            # nothing is released if the second matrix's input was not saved
            gradients = (2 if self.model.gated_mlp else 1) * f + (0 if saves_product(self.model) else f)
            experts = self._expert_work(self.tokens, is_backward=True, is_kept=True)
            return gradient + gradients * self.tokens + self._travelling + experts
        before = self._replayed_attention + self._second_norm * self.tokens + self._results[0] + gradient
        whole, of_tiles, of_recomputed, of_kept = self._mlp_work
        again = self._recomputed("mlp")
        if not self._tiles_mlp and self._mlp_share.recompute == 1:
            return before + whole
        return before + of_tiles + max(of_recomputed * min(self.tile, again), of_kept * min(self.tile, self.tokens - again))

    @cached_property
    def _mlp_work(self) -> tuple[int, int, int, int]:
        """Returns bytes in the backward of an MLP that a replay of the whole layer has run, or else of one that runs in tiles.

        Of the latter: bytes in all tiles, and per recomputed and kept token of one.
        """
        model, (d, _, _, f) = self.model, self._sizes
        gradients, inner = (2 if model.gated_mlp else 1) * f, (6 if model.gated_mlp else 3) * f
        experts = self._expert_work(self._mlp_tile, is_backward=True)
        # a replay of the whole layer has saved what a kept MLP does
        saved = (inner_bytes(model) - model.routed_bytes) * self.tokens if experts else 0
        # input gradients are collected in one tensor, weight gradients of tiles are summed in fp32
        matrices = model.mlp_matrices * model.intermediate_size * d
        weights = matrices * (1 + self._wide) if model.trains_layers else 0
        whole = inner * self.tokens + self._travelling + experts + saved
        return whole, d * self.tokens + weights + experts, inner + d, gradients

    @property
    def _held_mlp(self) -> int:
        """Returns bytes of kept MLP tensors, which its backward frees."""
        if self.is_plain:
            return (inner_bytes(self.model) - self.model.routed_bytes) * self.tokens
        _, host_stop = self._cuts["mlp"]
        return (self.tokens - host_stop) * self._class_bytes["mlp"]

    def _norm_backward(self) -> int:
        """Returns bytes between MLP and second norm, and in the norm: its fp32 input and four or five tensors of its size."""
        (first, results), model, d = self._results, self.model, self._sizes[0]
        before = self._replayed_attention - self._held_mlp + first
        if not self.is_plain:
            return before + self._norm_work
        # the norm's output, and its product before the weight, are released first if they were saved
        released = d * (saves_second_norm(model) + model.trains_layers)
        inside = d + (20 if self._wide > 1 else 16) * model.hidden_size - released
        return before - results + max(3 * d + self._inner_gradients, inside) * self.tokens

    @property
    def _inner_gradients(self) -> int:
        """Returns bytes per token of gradients of inner tensors if the MLP ran whole."""
        return (2 if self.model.gated_mlp else 1) * self._sizes[3]

    @cached_property
    def _norm_work(self) -> int:
        """Returns the bytes of `_norm_backward` in a layer that keeps a part, besides tensors of attention."""
        d, hidden, wide = self._sizes[0], self.model.hidden_size, 24 if self._wide > 1 else 20
        # two gradients of the norm's output are added, besides those of inner tensors if the MLP ran whole
        inner = 0 if self._tiles_mlp else self._inner_gradients
        meeting = (self._norms[1] + 3 * d + inner) * self.tokens
        if self.tiles_norms:
            return max(4 * d * self.tokens + (wide * hidden + 2 * d) * self.tile, meeting if inner else 0)
        return max(meeting, (d + wide * hidden) * self.tokens)

    def _attention_backward(self) -> int:
        d, a, k, _ = self._sizes
        load = self.load
        if self.is_plain and not load.sliced_tokens and not self._has_own_attention:
            return self._fused_attention_backward() + self._hops_back
        # gradients of the residual and of the output; then for a single document sums over heads in fp32, else gradients of
        # queries, keys and values of all documents
        is_lone = len(load.documents) == 1 and not load.sliced_tokens
        outside = self._replayed_attention - self._held_mlp + (d + a) * self.tokens
        if self.is_plain:
            outside -= self._second_norm * self.tokens + self._results[1]
        outside += (self._lone_sums if is_lone else a + 2 * k) * self.tokens
        return outside + self._exchanging_back(lambda attention: attention._operator_backward)

    @property
    def _lone_sums(self) -> int:
        """Returns bytes per token of a single document's gradients of keys and values, summed over their query heads."""
        _, a, k, _ = self._sizes
        return 2 * k * self._wide if a != k else 0

    def _fused_attention_backward(self) -> int:
        """Returns bytes in the backward of attention without slices, if nothing is recomputed."""
        d, a, k, _ = self._sizes
        documents = self.load.documents
        if self.model.saves_kv_once:
            # the gradient of the output and, for several calls, gradients before they are in one tensor
            outside = (d - self._second_norm + a) * self.tokens - self._held_mlp - self._results[1]
            joined = (a + 2 * k) * self.tokens if len(documents) > 1 else 0
            rows = max((*documents, self._packed_rows))
            return outside + joined + self._exchanging_back(lambda attention: attention._call_bytes * rows)
        # tensors of MLP, second norm and output projection are freed; three gradients per document, then in one tensor
        freed = a if saves_attention(self.model) else 0
        outside = (d - self._second_norm + 4 * a - freed) * self.tokens - self._held_mlp - self._results[1]
        rows = max(self._wide * max(documents), self.tokens if len(documents) > 1 else 0)
        return outside + self._exchanging_back(lambda attention: attention._sizes[1] * rows)


class OutsideBytes:
    """Bytes outside the layers: rotary embeddings and labels (shared), the final norm and the loss.

    shared: bytes of rotary embeddings, token ids and labels. head: bytes held from forward to backward; on a stage without a
    head, the hidden states that it sends, from which backward starts. forward, backward: most bytes while the loss runs,
    without those that layers and `shared` hold.
    """

    def __init__(self, model: ModelSpec, load: Load, tile_tokens: int) -> None:
        e, d, wide = model.bytes_per_element, model.hidden_size, max(4, model.bytes_per_element)
        tokens, vocabulary = load.num_tokens, model.head_outputs
        tile_tokens = small_tile(tile_tokens)
        # bytes of cosines and sines, token ids and labels
        rotated = sum({own.head_dim for own in model.heads}) or model.head_dim
        self.shared = tokens * (2 * e * rotated + 16 + own_input_bytes(model) + shared_kv_bytes(model))
        self.head = self.forward = self.backward = 0
        if not load.has_head:
            self.head = e * d * tokens
            return
        trains_head = model.trains_head
        norm = (4 * d + 4 + (e * d if trains_head else 0)) * tokens
        hidden = e * d * tokens
        # workspace of the norm, forward and backward: mostly fp32 tensors of its input's size
        inside = ((12 if e == 4 else 8 + 3 * e) * d) * tokens
        normed = 24 * d * tokens
        weights = vocabulary * d if trains_head else 0
        # a cap of logits keeps its output until its backward
        capped = model.capped_bytes
        if tile_tokens:
            tile = min(tile_tokens, tokens) * vocabulary
            # logits, their fp32 copy, log-probabilities; weight gradients of one tile, and their sum in fp32
            work = tile * (e + wide + (wide if e < 4 else 0) + capped) + (e + wide) * weights
            if model.tiles_final_norm:
                # the norm saves its input; in its backward, gradients of input and output, and fp32 tensors of a tile
                norm, inside = hidden, 0
                normed = 4 * hidden + 24 * d * min(tile_tokens, tokens) + (wide * weights if load.keeps_gradients else 0)
            # the norm's output, and its gradient
            self.head = norm + hidden + (wide * weights if load.keeps_gradients else 0)
            self.forward = max(
                inside, norm + hidden + (hidden + work if load.keeps_gradients else tile * (e + 2 * wide + capped))
            )
            self.backward = max(normed, norm + 2 * hidden + ((wide + e) * weights if load.keeps_gradients else work))
            return
        logits = tokens * vocabulary
        self.head = norm + (hidden if trains_head else 0) + (wide + capped) * logits
        # besides log-probabilities: logits, and their fp32 copy
        self.forward = max(inside, norm + hidden + logits * (e + wide + (wide if e < 4 else 0) + capped))
        # log-probabilities and two of their gradients; then gradients of logits, input and weights
        last = norm + 2 * hidden + logits * (e + (wide if e < 4 else 0) + capped) + e * weights
        self.backward = max(normed, norm + hidden + (3 * wide + capped) * logits, last)


class PiecedLayerBytes(LayerBytes):
    """Bytes of one layer under a policy with several pieces of heads; fields as in `LayerBytes`."""

    @cached_property
    def _piece(self) -> LayerBytes:
        """Returns the bytes of a layer with only the heads of one piece."""
        model = piece_model(self.model, self.policy.head_pieces, max(1, self.load.block_ranks))
        return LayerBytes(model, self.load, replace(self.policy, head_pieces=1), self.tile)

    def _adapters(self) -> int:
        adapters, model = self.model.adapters, self.model
        if adapters.is_empty:
            return 0
        saved = super()._adapters() + (adapters.cut_bytes - adapters.attention_saved_bytes) * self.tokens
        # inputs and outputs in at least fp32, before and after dropout, and their gradients, for some tokens at a time
        width = max(model.hidden_size, model.query_size, model.output_size)
        return saved + 4 * max(4, model.bytes_per_element) * min(self.tokens * width, ADAPTER_ELEMENTS)

    @property
    def _saves_first_norm(self) -> bool:
        # the node that runs the pieces keeps the module's input
        return True

    @property
    def _replayed_mixing(self) -> int:
        # a replay saves the outputs of all pieces, and no queries, keys or values
        return class_bytes(self.model, "attention_output") * self._recomputed("attention_output")

    @property
    def _outputs(self) -> int:
        """Returns bytes of outputs and LSEs of all pieces."""
        return class_bytes(self.model, "attention_output") * self.tokens

    def _mixing_forward(self) -> int:
        # while the last piece runs: outputs of those before it, and their sum, which is the layer's output
        d, *_ = self._sizes
        others = self._outputs - class_bytes(self._piece.model, "attention_output") * self.tokens
        host_start, host_stop = self._cuts["attention_output"]
        if host_stop > host_start:
            # in flight to the host, which `sent` counts
            others = 0
        return self._piece._mixing_forward() + d * self.tokens + max(0, others) + self._cut_bytes - self._piece._cut_bytes

    def _attention_backward(self) -> int:
        piece, (d, *_) = self._piece, self._sizes
        _, a, k, _ = piece._sizes
        # gradients of the layer's output and of the module's input, and of all its weights
        outside = self._replayed_attention - self._held_mlp + 2 * d * self.tokens
        if self.model.trains_layers:
            outside += (self.model.query_size + self.model.kv_size + self.model.output_size) * d
        kv = 2 * k * (self.tokens - self.load.sliced_tokens)
        made = a * self.tokens + kv + head_norm_bytes(piece.model) * self.tokens
        # projections before rotation, and tensors that rotation makes
        rotation = (2 * k + max(4 * a, 2 * a + 3 * k)) * self.tokens
        # the gradient of the piece's output, of its queries, keys and values
        is_lone = len(self.load.documents) == 1 and not self.load.sliced_tokens
        gradients = (a + (piece._lone_sums if is_lone else a + 2 * k)) * self.tokens
        work = max(rotation, made + gradients + piece._exchange + piece._operator_backward)
        # first, the replay makes the outputs
        return max(outside + work, self._mixing_forward())


def piece_model(model: ModelSpec, head_pieces: int, block_ranks: int) -> ModelSpec:
    """Returns the model with the heads of one piece: those of the rank with the most, times the ranks of a block.

    Several ranks may read one KV head, which all of them receive.
    """
    num_heads, num_kv = model.num_heads // head_pieces, model.num_kv_heads // head_pieces
    if block_ranks > 1:
        shares = head_shares(num_heads, num_kv, block_ranks)
        num_heads = block_ranks * max(share.num_q for share in shares)
        num_kv = max(num_kv, block_ranks * max(share.num_kv for share in shares))
    return replace(model, num_heads=num_heads, num_kv_heads=num_kv)


class StateLayerBytes(LayerBytes):
    """Bytes of one layer with a state along the sequence, whose mixer is kept or recomputed as a whole."""

    kind = LayerKind(0, has_state=True)

    @property
    def _is_cut(self) -> bool:
        """Whether the scan runs in blocks, each recomputed in backward."""
        return self.tokens > self.model.states.block_tokens

    @cached_property
    def mixer(self) -> int:
        """Bytes that the mixer saves."""
        states, e = self.model.states, self.model.bytes_per_element
        outside = self._outside * self.tokens + self._added
        if not self._is_cut:
            return outside + states.scan_bytes(e) * sum(self._scanned)
        num_between = sum(max(0, -(-document // states.block_tokens) - 1) for document in self.load.documents)
        state_bytes = max(4, e) * states.heads * states.head_elements
        return outside + states.input_bytes(e) * self.tokens + state_bytes * num_between

    @property
    def _outside(self) -> int:
        """Bytes of a token that the mixer saves outside its scan."""
        model = self.model
        return model.states.outside_bytes(model.bytes_per_element, model.fuses_gated_norms, model.fuses_convolutions)

    @cached_property
    def _scanned(self) -> list[int]:
        """Tokens of every document, padded to whole tiles."""
        tile = self.model.states.tile_tokens
        return [-(-document // tile) * tile for document in self.load.documents]

    @property
    def _at_once(self) -> int:
        """Most tokens that the scan runs at once: a document, or a block with a part of one or with several."""
        return min(sum(self._scanned), self.model.states.block_tokens) if self._is_cut else max(self._scanned, default=0)

    @property
    def _scan(self) -> int:
        """Returns bytes alive at once inside the scan's forward, which runs documents one after the other."""
        states, at_once = self.model.states, self._at_once
        outside = self.model.bytes_per_element * states.saved_elements * (self.tokens - at_once)
        return 4 * states.work_wide * at_once + outside + self._added

    @property
    def _added(self) -> int:
        """Returns bytes saved for the effect of an earlier state.

        On a rank that passes on states, all tokens count, although those at the start of a document need none; elsewhere all
        sliced tokens of slices after the first.
        """
        states, load = self.model.states, self.load
        wide = max(4, self.model.bytes_per_element)
        if states.heads and passes_states(load.num_blocks, load.block_ranks, states.heads // states.scans):
            copied = states.carry_copied if self.model.bytes_per_element < 4 else 0
            return wide * (states.carry_wide + copied) * self.tokens
        return wide * states.slice_wide * (load.sliced_tokens if load.front_tokens else 0)

    def _plain_held(self) -> tuple[int, int]:
        return outer_bytes(self.model) * self.tokens + self.mixer, 0

    @property
    def _replayed_mixing(self) -> int:
        return self.mixer

    def _plain_forward(self) -> int:
        whole = self.held + self._sizes[0] * self.tokens + self._passing
        return max(whole, self.held - self._held_mlp + self._exchange)

    def _mixing_forward(self) -> int:
        states, e = self.model.states, self.model.bytes_per_element
        # all tensors outside the scan, without the convolution's input, if the scan runs in blocks
        outside = self._outside - states.input_bytes(e) if self._is_cut else 0
        return 2 * self._sizes[0] * self.tokens + max(outside * self.tokens, self._scan) + self._exchange

    @property
    def _exchange(self) -> int:
        states, e = self.model.states, self.model.bytes_per_element
        return (states.input_bytes(e) + states.output_bytes(e)) * self.tokens if self.load.is_shared else 0

    def _attention_backward(self) -> int:
        d = self._sizes[0]
        outside = self._replayed_attention - self._held_mlp + d * self.tokens + self._exchange
        if self.is_plain:
            outside -= self._second_norm * self.tokens
        if not self._is_cut:
            # the scan's backward frees saved tensors as it makes gradients, of which two fifths exist in addition
            return outside + 2 * max(0, self._scan) // 5
        states, e = self.model.states, self.model.bytes_per_element
        block = states.scan_bytes(e) * self._at_once // states.scans + 2 * 4 * states.work_wide * self._at_once // 5
        # gradients of the scan's outputs and inputs
        return outside + (states.output_bytes(e) + states.input_bytes(e)) * self.tokens + block

    def mixing_forward(self) -> int:
        """Returns the most bytes up to the mixer's output, in the forward of a layer that keeps a part."""
        return self._mixing_forward()

    def mixing_backward(self) -> int:
        """Returns the most bytes in the mixer's backward, besides those that layers up to this one hold."""
        return self._attention_backward()


class HybridLayerBytes(LayerBytes):
    """Bytes of one layer with both attention and a state, which run one after the other on the same tokens."""

    kind = LayerKind(None, has_state=True)

    def __init__(self, model: ModelSpec, load: Load, policy: LayerPolicy, tile_tokens: int, mixer: StateLayerBytes) -> None:
        """Adds the bytes of `mixer`, a layer with only the state."""
        self.beside = mixer
        super().__init__(model, load, policy, tile_tokens)

    def _plain_held(self) -> tuple[int, int]:
        held, host = super()._plain_held()
        return held + self.beside.mixer, host

    @property
    def _replayed_mixing(self) -> int:
        return super()._replayed_mixing + self.beside.mixer

    def _mixing_forward(self) -> int:
        # the output of one waits while the other runs
        waiting = self._sizes[0] * self.tokens
        return waiting + max(super()._mixing_forward(), self.beside.mixing_forward())

    def _attention_backward(self) -> int:
        # while one runs backward, the other's saved tensors still exist
        own = super()._attention_backward()
        attention = 0 if self.is_plain else super()._replayed_mixing
        return max(own, self.beside.mixing_backward() + attention)


class UnmixedLayerBytes(LayerBytes):
    """Bytes of one layer without attention or mixer: norms and an MLP or experts."""

    kind = LayerKind(0)

    def _plain_held(self) -> tuple[int, int]:
        return outer_bytes(self.model) * self.tokens, 0

    @property
    def _replayed_mixing(self) -> int:
        return 0

    def _plain_forward(self) -> int:
        return self.held + self._sizes[0] * self.tokens + self._passing + self._travelling

    def _mixing_forward(self) -> int:
        return 2 * self._sizes[0] * self.tokens

    def _attention_backward(self) -> int:
        outside = self._replayed_attention - self._held_mlp + self._sizes[0] * self.tokens
        return outside - (self._second_norm * self.tokens if self.is_plain else 0)
