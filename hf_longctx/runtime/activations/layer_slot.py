"""State of one layer in one forward, until its backward: the tensors that it holds, on the device and on the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from hf_longctx.plan.core.types import LayerPolicy, TensorShare
from hf_longctx.runtime.activations.attention_record import AttentionRecord
from hf_longctx.runtime.activations.host_tier import HostTier, SplitTensor
from hf_longctx.runtime.activations.projection_record import ProjectionRecord
from hf_longctx.runtime.activations.token_tiles import TileRecord


class Rerun:
    """Recomputes a layer's output, which is the input of the next layer: from its input, without a graph.

    The next layer's graph owns it. slot: of the layer that runs once more. run: its forward without a graph.
    """

    def __init__(self, slot: LayerSlot, run: Callable[[Tensor], Tensor], output: Tensor) -> None:
        self.slot, self._run, self._output = slot, run, weakref.ref(output)

    def gives(self, hidden_1TC: Tensor) -> bool:
        """Whether a tensor is the output of the layer's first run, and not one that the model has made from it."""
        return self._output() is hidden_1TC

    def __call__(self) -> Tensor:
        return self._run(self.slot.fetch_input())


class LayerSlot:
    """State of one layer in one forward, until its backward: its policy and the tensors it holds.

    previous: the slot of the layer before, whose backward comes next; None if that layer has no slot. feeds_next: the next
    layer's input is recomputed from this one's.
    """

    feeds_next = False

    def __init__(
        self, policy: LayerPolicy, tile_tokens: int, tier: HostTier | None, previous: LayerSlot | None, num_mlps: int = 1
    ) -> None:
        self.tile_tokens, self._tier, self._previous = tile_tokens, tier, previous
        # records of all heads, or of each piece
        self.attention = tuple(AttentionRecord(policy.share("attention_output"), tier) for _ in range(policy.head_pieces))
        self.projections = ProjectionRecord(policy.share("qkv"), tier)
        self.mlps = tuple(TileRecord(policy.share("mlp"), tier) for _ in range(num_mlps))
        self._input_share = policy.share("layer_input")
        # hidden states first; weak, since the layer's graph owns them and frees them after the layer's backward
        self._inputs: list[weakref.ref[SplitTensor]] = []
        self.whole_input_bytes = 0
        # belongs to the layer before, until the first run of this layer has packed its input
        self.rerun_before: Rerun | None = None

    @property
    def splits_mlp(self) -> bool:
        """Whether `tokenwise` runs the MLP, in tiles or with some tokens kept."""
        return self.tile_tokens > 0 or any(record.share.recompute < 1 for record in self.mlps)

    @property
    def held(self) -> list[SplitTensor]:
        """Tensors held now, except the graphs of the MLP and a layer input that is wholly on the device."""
        inputs = [split for each in self._inputs if (split := each()) is not None]
        outputs = [tensor for record in self.attention for tensor in record.held]
        return [*outputs, *self.projections.held, *inputs]

    @property
    def head_pieces(self) -> int:
        """Number of pieces of heads in which attention runs."""
        return len(self.attention)

    @property
    def keeps_qkv(self) -> bool:
        """Whether queries, keys and values are kept for at least some tokens."""
        return self.projections.share.recompute < 1

    @property
    def recomputes_input(self) -> bool:
        """Whether the layer before runs once more to make the layer input."""
        return self._input_share.recompute > 0

    @property
    def splits_input(self) -> bool:
        """Whether hooks pack the layer input: some of it waits on the host, is recomputed, or is needed by the next layer."""
        return self._input_share.host > 0 or self.recomputes_input or self.feeds_next

    def pack_input(self, hidden_1TC: Tensor) -> SplitTensor | Rerun | Tensor:
        """Packs the layer input for the graph; called for every tensor among the layer's positional arguments."""
        if not has_tokens(hidden_1TC):
            return hidden_1TC
        rerun, self.rerun_before = self.rerun_before, None
        if rerun is not None and rerun.gives(hidden_1TC):
            return rerun
        # where the layer before cannot give the input again, as below the first trained weight, the device keeps it
        share = TensorShare("layer_input", device=1.0) if self.recomputes_input else self._input_share
        split = SplitTensor(hidden_1TC[0], share, self._tier)
        self._inputs.append(weakref.ref(split))
        return split

    def fetch_input(self) -> Tensor:
        """The layer input for a run besides the replay, [1, T, C]; the caller owns a copy from the host."""
        split = self._inputs[0]() if self._inputs else None
        assert split is not None
        return split.fetch().unsqueeze(0)

    def unpack_input(self, packed: SplitTensor | Rerun | Tensor) -> Tensor:
        """Unpacks the layer input when its replay begins, and starts to fetch the tensors that the previous layer will need."""
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed, Rerun):
            hidden_1TC = packed()
            self.prefetch_previous()
            return hidden_1TC
        hidden_TC = packed.fetch()
        self.prefetch_previous()
        return hidden_TC.unsqueeze(0)

    def prefetch_previous(self) -> None:
        """Starts to copy back the tensors of the previous layer, whose backward comes next."""
        if self._previous is not None:
            self._previous.prefetch()

    def prefetch(self) -> None:
        """Starts to copy back the layer's tensors."""
        for tensor in self.held:
            tensor.prefetch()
        for record in self.mlps:
            for saved in record.on_host:
                saved.home.prefetch()

    def set_replay(self, is_replay: bool) -> None:
        """Tells all records of the slot whether the layer is being replayed."""
        self.projections.is_replay = is_replay
        for record in self.attention:
            record.is_replay = is_replay
        for mlp in self.mlps:
            mlp.is_replay = is_replay


def has_tokens(argument: Any) -> bool:
    """Whether a positional argument of a layer is a tensor with one row of features for each token of the chunk, [1, T, C]."""
    return isinstance(argument, Tensor) and argument.dim() == 3 and argument.shape[0] == 1
