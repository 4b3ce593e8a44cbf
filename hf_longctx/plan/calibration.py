"""Measured chunks to cost coefficients: non-negative least squares on relative errors, forward and backward apart."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_longctx.plan.cost import CostCoefficients, FloatArray, PassCoefficients, tokens_moved
from hf_longctx.plan.specs import GroupMethod


@dataclass(frozen=True, slots=True)
class ChunkSample:
    """One measured chunk on one rank: its tokens and causal pairs (whole chunk), degree, and seconds of both passes."""

    num_tokens: int
    num_pairs: float
    degree: int
    forward_s: float
    backward_s: float


def fit_coefficients(
    samples: Sequence[ChunkSample], step_s: float, source: str, method: GroupMethod = "ulysses"
) -> CostCoefficients:
    """The coefficients that explain `samples` best, weighted so that short chunks count as much as long ones.

    `step_s` is the seconds a step spends outside chunks. Raises ValueError without samples. With degree 1 only, the cost
    of an exchange is unknown and taken as zero.
    """
    if not samples:
        raise ValueError("cannot fit cost coefficients without a measured chunk; run at least one step")
    forward = np.array([sample.forward_s for sample in samples])
    backward = np.array([sample.backward_s for sample in samples])
    return CostCoefficients(
        forward=_fit_pass(samples, forward, method),
        backward=_fit_pass(samples, backward, method),
        step_s=step_s,
        source=source,
    )


def mean_relative_error(samples: Sequence[ChunkSample], coefficients: CostCoefficients, method: GroupMethod = "ulysses") -> float:
    """Mean |predicted / measured - 1| over forward and backward of `samples`."""
    features = _features(samples, method)
    errors = []
    for costs, seconds in (
        (coefficients.forward, np.array([sample.forward_s for sample in samples])),
        (coefficients.backward, np.array([sample.backward_s for sample in samples])),
    ):
        weights = np.array([costs.pair_s, costs.token_s, costs.chunk_s, costs.exchange_token_s(2), costs.exchange_chunk_s])
        errors.append(np.abs(features @ weights / seconds - 1))
    return float(np.mean(errors))


def _fit_pass(samples: Sequence[ChunkSample], seconds: FloatArray, method: GroupMethod) -> PassCoefficients:
    features = _features(samples, method)
    weights = 1.0 / np.maximum(seconds, 1e-9)
    pair_s, token_s, chunk_s, exchange_s, exchange_chunk_s = _non_negative_least_squares(
        features * weights[:, None], seconds * weights
    )
    return PassCoefficients(pair_s, token_s, chunk_s, exchange_chunk_s, ((2, exchange_s),))


def _features(samples: Sequence[ChunkSample], method: GroupMethod) -> FloatArray:
    rows = []
    for sample in samples:
        degree, tokens = sample.degree, max(sample.num_tokens, sample.degree)
        moved = float(tokens_moved(np.asarray(float(tokens)), degree, method))
        rows.append([sample.num_pairs / degree, tokens / degree, 1.0, moved, float(degree > 1)])
    return np.array(rows, dtype=np.float64)


def _non_negative_least_squares(matrix: FloatArray, target: FloatArray) -> list[float]:
    """argmin |matrix @ x - target| over x >= 0, exactly, by trying every set of non-zero entries (five columns: 32 sets)."""
    num_columns = matrix.shape[1]
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    best, best_error = np.zeros(num_columns), float(np.linalg.norm(target))
    for size in range(1, num_columns + 1):
        for columns in itertools.combinations(range(num_columns), size):
            chosen = list(columns)
            values = np.linalg.lstsq(matrix[:, chosen] / scale[chosen], target, rcond=None)[0] / scale[chosen]
            if (values < 0).any():
                continue
            candidate = np.zeros(num_columns)
            candidate[chosen] = values
            error = float(np.linalg.norm(matrix @ candidate - target))
            # a larger set must win by more than rounding
            if error < best_error * (1 - 1e-9):
                best, best_error = candidate, error
    return [float(value) for value in best]
