"""Counts the bytes that a layer's operations without products read and write: norms, rotary embedding, activation, residuals.

The numbers are those of transformers' Llama, operation by operation, as `tests/predicted/test_elementwise_bytes.py` counts them.
Attention's own operators are left out. Single kernels read their inputs and write their results, nothing in between.
"""

from __future__ import annotations

from hf_longctx.plan.core.model_spec import ModelSpec

# bytes of one token, for each feature of hidden states and each inner feature of the MLP, in half precision and in fp32; the
# gradients of adapters are added to those of the frozen matrices, which then have no gradients of their own
_FORWARD = {2: (111, 10), 4: (134, 20)}
_BACKWARD = {2: (264, 18), 4: (335, 36)}
_ADAPTED_BACKWARD = {2: (284, 24), 4: (375, 48)}
# bytes that a layer under a policy adds, whatever it keeps, since it runs once more from its input, its norms twice in tiles; and
# those that the MLP adds if it runs once more
_REPLAY = {2: 243, 4: 293}
_INNER_REPLAY = {2: 19, 4: 32}
# bytes that single kernels save: of norms and of rotary embeddings for each hidden feature, forward, backward and in a replay; of
# gates for each inner feature
_FUSED_NORMS = {2: (65, 165, 164), 4: (41, 137, 149)}
_FUSED_ROTARY = {2: (21, 22, 21), 4: (42, 44, 42)}
_FUSED_GATES = {2: (4, 8, 6), 4: (8, 16, 11)}


def elementwise_bytes(model: ModelSpec) -> tuple[int, int]:
    """Bytes of one token in one layer, in its forward and in its backward with everything kept."""
    width = 2 if model.bytes_per_element <= 2 else 4
    backward = _BACKWARD if model.trains_layers else _ADAPTED_BACKWARD
    (hidden, inner), (hidden_back, inner_back) = _FORWARD[width], backward[width]
    (less, less_back, _), (less_inner, less_inner_back, _) = _saved(model, width)
    d, f = model.hidden_size, model.intermediate_size
    return (hidden - less) * d + (inner - less_inner) * f, (hidden_back - less_back) * d + (inner_back - less_inner_back) * f


def replayed_bytes(model: ModelSpec) -> tuple[int, int]:
    """Bytes of one token that a layer adds if it runs under a policy, whatever that keeps; and if the MLP runs once more."""
    width = 2 if model.bytes_per_element <= 2 else 4
    (_, _, less), (_, _, less_inner) = _saved(model, width)
    return (_REPLAY[width] - less) * model.hidden_size, (_INNER_REPLAY[width] - less_inner) * model.intermediate_size


def _saved(model: ModelSpec, width: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Bytes that the model's kernels save, forward, backward and in a replay, for each hidden and for each inner feature."""
    kernels = ((model.fuses_norms, _FUSED_NORMS[width]), (model.fuses_rotary, _FUSED_ROTARY[width]))
    forward, backward, replay = (sum(numbers[place] for is_used, numbers in kernels if is_used) for place in range(3))
    return (forward, backward, replay), _FUSED_GATES[width] if model.fuses_gates else (0, 0, 0)
