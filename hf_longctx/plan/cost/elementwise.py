"""Counts the bytes that a layer's operations without products read and write: norms, rotary embedding, activation, residuals.

The numbers are those of transformers' Llama, operation by operation, as `tests/predicted/test_elementwise_bytes.py` counts them.
Attention's own operators are left out. Kernels that fuse such operations (`compile_layers`, Liger) move less than half of it.
"""

from __future__ import annotations

from hf_longctx.plan.core.model_spec import ModelSpec

# bytes of one token, for each feature of hidden states and each inner feature of the MLP, in half precision and in fp32; the
# gradients of adapters are added to those of the frozen matrices, which then have no gradients of their own
_FORWARD = {2: (111, 10), 4: (134, 20)}
_BACKWARD = {2: (264, 18), 4: (335, 36)}
_ADAPTED_BACKWARD = {2: (284, 24), 4: (375, 48)}


def elementwise_bytes(model: ModelSpec) -> tuple[int, int]:
    """Bytes of one token in one layer, in its forward and in its backward with everything kept."""
    width = 2 if model.bytes_per_element <= 2 else 4
    backward = _BACKWARD if model.trains_layers else _ADAPTED_BACKWARD
    (hidden, inner), (hidden_back, inner_back) = _FORWARD[width], backward[width]
    d, f = model.hidden_size, model.intermediate_size
    return hidden * d + inner * f, hidden_back * d + inner_back * f
