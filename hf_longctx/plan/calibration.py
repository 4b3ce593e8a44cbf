"""Measured chunks to cost coefficients: non-negative least squares on relative errors, forward and backward apart."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from hf_longctx.plan.cost import CostCoefficients, FloatArray, PassCoefficients
from hf_longctx.plan.traffic import Traffic


@dataclass(frozen=True, slots=True)
class PassSample:
    """One measured pass of one chunk on one rank: its tokens and causal pairs (whole chunk), degree, traffic, seconds."""

    num_tokens: int
    num_pairs: float
    degree: int
    traffic: Traffic
    seconds: float

    @property
    def features(self) -> tuple[float, ...]:
        """What each field of `PassCoefficients` is multiplied by, in their order."""
        tokens = max(self.num_tokens, self.degree) / self.degree
        traffic = self.traffic
        return self.num_pairs / self.degree, tokens, 1.0, traffic.messages, traffic.link_bytes, traffic.network_bytes


@dataclass(frozen=True, slots=True)
class ChunkSample:
    """Both passes of one measured chunk."""

    forward: PassSample
    backward: PassSample


def fit_coefficients(samples: Sequence[ChunkSample], step_s: float, source: str) -> CostCoefficients:
    """The coefficients that explain `samples` best, weighted so that short chunks count as much as long ones.

    `step_s` is the seconds a step spends outside chunks. Raises ValueError without samples. What no sample shows (the cost
    of an exchange with degree 1 only, that of the network inside one node) is taken as zero.
    """
    if not samples:
        raise ValueError("cannot fit cost coefficients without a measured chunk; run at least one step")
    return CostCoefficients(
        forward=_fit_pass([sample.forward for sample in samples]),
        backward=_fit_pass([sample.backward for sample in samples]),
        step_s=step_s,
        source=source,
    )


def mean_relative_error(samples: Sequence[ChunkSample], coefficients: CostCoefficients) -> float:
    """Mean |predicted / measured - 1| over forward and backward of `samples`."""
    errors = [
        abs(float(np.dot(one_pass.features, astuple(costs))) / one_pass.seconds - 1)
        for sample in samples
        for one_pass, costs in ((sample.forward, coefficients.forward), (sample.backward, coefficients.backward))
    ]
    return float(np.mean(errors))


def _fit_pass(samples: Sequence[PassSample]) -> PassCoefficients:
    features = np.array([sample.features for sample in samples], dtype=np.float64)
    seconds = np.array([sample.seconds for sample in samples])
    weights = 1.0 / np.maximum(seconds, 1e-9)
    return PassCoefficients(*_non_negative_least_squares(features * weights[:, None], seconds * weights))


def _non_negative_least_squares(matrix: FloatArray, target: FloatArray) -> list[float]:
    """argmin |matrix @ x - target| over x >= 0, exactly, by trying every set of non-zero entries (six columns: 64 sets)."""
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
