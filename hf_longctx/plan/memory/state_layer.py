"""Counts bytes of one decoder layer without attention, moment by moment: with a state along the sequence, or an MLP alone."""

from __future__ import annotations

from functools import cached_property

from hf_longctx.plan.core.layer_kinds import LayerKind
from hf_longctx.plan.core.model_spec import ModelSpec
from hf_longctx.plan.core.sharding import passes_states
from hf_longctx.plan.core.types import LayerPolicy
from hf_longctx.plan.memory.layer import LayerBytes, Load
from hf_longctx.plan.memory.saved_tensors import outer_bytes


class StateLayerBytes(LayerBytes):
    """Bytes of one layer with a state along the sequence, whose mixer a policy can only keep or recompute as a whole."""

    kind = LayerKind(0, has_state=True)

    @property
    def _is_cut(self) -> bool:
        """Whether the scan runs in blocks, each recomputed in backward."""
        return self.tokens > self.model.states.block_tokens

    @cached_property
    def mixer(self) -> int:
        """Bytes that the mixer saves."""
        states, e = self.model.states, self.model.bytes_per_element
        outside = states.outside_bytes(e) * self.tokens + self._added
        if not self._is_cut:
            return outside + states.scan_bytes(e) * sum(self._scanned)
        num_between = sum(max(0, -(-document // states.block_tokens) - 1) for document in self.load.documents)
        state_bytes = max(4, e) * states.heads * states.head_elements
        return outside + states.input_bytes(e) * self.tokens + state_bytes * num_between

    @cached_property
    def _scanned(self) -> list[int]:
        """Tokens of every document, filled up to whole tiles."""
        tile = self.model.states.tile_tokens
        return [-(-document // tile) * tile for document in self.load.documents]

    @property
    def _at_once(self) -> int:
        """Most tokens that the scan runs at once: a document or, in blocks, part of one, or those that share a kernel's block."""
        return min(sum(self._scanned), self.model.states.block_tokens) if self._is_cut else max(self._scanned, default=0)

    @property
    def _scan(self) -> int:
        """Bytes alive at once inside the forward of the scan, which runs documents one after the other."""
        states, at_once = self.model.states, self._at_once
        outside = self.model.bytes_per_element * states.saved_elements * (self.tokens - at_once)
        return 4 * states.work_wide * at_once + outside + self._added

    @property
    def _added(self) -> int:
        """Bytes that are saved to find what an earlier state adds.

        On a rank that passes states on, all tokens count, although those at the start of a document need no more; elsewhere
        all sliced tokens of slices after the first.
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
        # all that is made outside the scan, without the convolution's input, if the scan runs in blocks
        outside = (states.outside_bytes(e) - states.input_bytes(e)) * self.tokens if self._is_cut else 0
        return 2 * self._sizes[0] * self.tokens + max(outside, self._scan) + self._exchange

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
            # the scan's backward frees what it saved as it makes gradients, of which two fifths are alive beside it
            return outside + 2 * max(0, self._scan) // 5
        states, e = self.model.states, self.model.bytes_per_element
        block = states.scan_bytes(e) * self._at_once // states.scans + 2 * 4 * states.work_wide * self._at_once // 5
        # gradients of the scan's outputs and inputs
        return outside + (states.output_bytes(e) + states.input_bytes(e)) * self.tokens + block

    def mixing_forward(self) -> int:
        """Most bytes up to the mixer's output, in the forward of a layer that keeps a part."""
        return self._mixing_forward()

    def mixing_backward(self) -> int:
        """Most bytes in the mixer's backward, beyond those that layers up to this one hold."""
        return self._attention_backward()


class HybridLayerBytes(LayerBytes):
    """Bytes of one layer with both attention and a state, which run one after the other on the same tokens."""

    kind = LayerKind(None, has_state=True)

    def __init__(self, model: ModelSpec, load: Load, policy: LayerPolicy, tile_tokens: int, mixer: StateLayerBytes) -> None:
        """mixer: bytes of a layer that has the state alone."""
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
        # whichever runs backward first, the other's saved tensors are still there
        own = super()._attention_backward()
        attention = 0 if self.is_plain else super()._replayed_mixing
        return max(own, self.beside.mixing_backward() + attention)


class UnmixedLayerBytes(LayerBytes):
    """Bytes of one layer that mixes no tokens: norms and an MLP or experts."""

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
