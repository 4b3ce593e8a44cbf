"""Measured chunks to cost coefficients: robust non-negative least squares on relative errors, forward and backward apart.

Seconds of real chunks have outliers on one side: first touches, garbage collections, a busy neighbour. Residuals are
1 - predicted / measured, so that short chunks count as much as long ones and a chunk that took ten times too long has no
more than a residual of one. The fit repeats weighted least squares, with Huber's weights (bounded influence, from any
start) and then Tukey's (none at all for what lies far out), as in Holland and Welsch, "Robust regression using
iteratively reweighted least-squares" (1977).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from hf_longctx.plan.cost import CostCoefficients, FloatArray, PassCoefficients
from hf_longctx.plan.traffic import Traffic

# where the weights begin to fall (Huber) and end (Tukey), in standard deviations: 95 % efficient under normal noise
_HUBER, _TUKEY = 1.345, 4.685
_ROUNDS_EACH = 25
# residuals within a few percent are what the law itself is off by, whatever the others are
_LEAST_DEVIATION = 0.01
# a measured prior counts as one pass that saw a coefficient alone, ten times less exactly than passes are measured
_PRIOR_WEIGHT = 0.01


@dataclass(frozen=True, slots=True)
class PassSample:
    """One measured pass of one chunk on one rank: its tokens and causal pairs (whole chunk), degree, traffic, seconds.

    tiles: of a ring, as `cost.num_tiles` counts them.
    """

    num_tokens: int
    num_pairs: float
    degree: int
    traffic: Traffic
    seconds: float
    tiles: float = 0.0

    @property
    def features(self) -> tuple[float, ...]:
        """What each field of `PassCoefficients` is multiplied by, in their order."""
        tokens = max(self.num_tokens, self.degree) / self.degree
        traffic = self.traffic
        exchanged = (traffic.messages, traffic.link_bytes, traffic.network_bytes)
        return self.num_pairs / self.degree, tokens, 1.0, *exchanged, self.tiles

    def predicted_s(self, costs: PassCoefficients) -> float:
        """Seconds of this pass under `costs`."""
        return float(np.dot(self.features, astuple(costs)))


@dataclass(frozen=True, slots=True)
class ChunkSample:
    """Both passes of one measured chunk."""

    forward: PassSample
    backward: PassSample


@dataclass(frozen=True, slots=True)
class Residuals:
    """|predicted / measured - 1| over `num_passes` passes; num_outliers: those that a fit gave less than half a weight."""

    num_passes: int
    median: float
    mean: float
    num_outliers: int = 0

    @classmethod
    def of(cls, errors: Sequence[float] | FloatArray, num_outliers: int = 0) -> Residuals:
        """Those of relative errors of any sign; zeros where there are none."""
        sizes = np.abs(np.asarray(errors, dtype=np.float64))
        if not sizes.size:
            return cls(0, 0.0, 0.0)
        return cls(int(sizes.size), float(np.median(sizes)), float(sizes.mean()), num_outliers)


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted coefficients and how well they explain the samples that they were fitted to."""

    coefficients: CostCoefficients
    residuals: Residuals


def fit_coefficients(samples: Sequence[ChunkSample], step_s: float, source: str, prior: CostCoefficients | None = None) -> Fit:
    """The coefficients that explain most of `samples` best, whatever a minority of outliers says.

    `step_s` is the seconds a step spends outside chunks. Raises ValueError without samples. What no sample shows (the cost
    of an exchange with degree 1 only, that of the network inside one node) is that of `prior`, zero without one. What
    samples show badly stays near a prior that was measured.
    """
    if not samples:
        raise ValueError("cannot fit cost coefficients without a measured chunk; run at least one step")
    has_prior = prior is not None and prior.is_measured
    forward, forward_weights = _fit_pass([s.forward for s in samples], prior.forward if prior else None, has_prior)
    backward, backward_weights = _fit_pass([s.backward for s in samples], prior.backward if prior else None, has_prior)
    coefficients = CostCoefficients(forward, backward, step_s, source)
    num_outliers = int((forward_weights < 0.5).sum() + (backward_weights < 0.5).sum())
    return Fit(coefficients, Residuals.of(relative_errors(samples, coefficients), num_outliers))


def scaled_coefficients(coefficients: CostCoefficients, factor: float) -> CostCoefficients:
    """The coefficients of a machine on which everything takes `factor` times as long."""
    forward, backward = (
        PassCoefficients(*(factor * value for value in astuple(costs))) for costs in (coefficients.forward, coefficients.backward)
    )
    return CostCoefficients(forward, backward, factor * coefficients.step_s, coefficients.source)


def relative_errors(samples: Sequence[ChunkSample], coefficients: CostCoefficients) -> list[float]:
    """predicted / measured - 1 of the forward and the backward of every sample."""
    return [
        one_pass.predicted_s(costs) / one_pass.seconds - 1
        for sample in samples
        for one_pass, costs in ((sample.forward, coefficients.forward), (sample.backward, coefficients.backward))
    ]


def mean_relative_error(samples: Sequence[ChunkSample], coefficients: CostCoefficients) -> float:
    """Mean |predicted / measured - 1| over forward and backward of `samples`."""
    return Residuals.of(relative_errors(samples, coefficients)).mean


def _fit_pass(
    samples: Sequence[PassSample], prior: PassCoefficients | None, is_prior_measured: bool
) -> tuple[PassCoefficients, FloatArray]:
    """The coefficients of one pass, and the weight that each sample ended with."""
    features = np.array([sample.features for sample in samples], dtype=np.float64)
    seconds = np.maximum([sample.seconds for sample in samples], 1e-9)
    known = np.zeros(features.shape[1]) if prior is None else np.array(astuple(prior))
    is_seen = (features > 0).any(axis=0)
    # what seconds are left for the columns that samples show is all of them: the others multiply by zero
    rows = features[:, is_seen] / seconds[:, None]
    anchors = _anchors(known[is_seen]) if is_prior_measured else np.zeros((0, int(is_seen.sum())))
    values, weights = _robust_least_squares(rows, anchors)
    known[is_seen] = values
    return PassCoefficients(*(float(value) for value in known)), weights


def _anchors(known: FloatArray) -> FloatArray:
    """Rows that are one, times the prior's weight, where a coefficient is as known; none for one that is known as zero."""
    is_positive = known > 0
    rows: FloatArray = np.sqrt(_PRIOR_WEIGHT) * np.diag(1 / np.where(is_positive, known, 1.0))[is_positive]
    return rows


def _robust_least_squares(rows: FloatArray, anchors: FloatArray) -> tuple[FloatArray, FloatArray]:
    """x >= 0 for which most of `rows` @ x are near 1, and the weight of every row; `anchors` keep their weight."""
    target = np.concatenate([np.ones(len(rows)), np.full(len(anchors), np.sqrt(_PRIOR_WEIGHT))])
    weights = np.ones(len(rows))

    def solve() -> FloatArray:
        scale = np.concatenate([np.sqrt(weights), np.ones(len(anchors))])
        return _non_negative_least_squares(np.concatenate([rows, anchors]) * scale[:, None], target * scale)

    values = solve()
    for weigh in (_huber_weights, _tukey_weights):
        for _ in range(_ROUNDS_EACH):
            sizes = np.abs(1 - rows @ values)
            # the median of normal noise lies at 0.6745 deviations
            new_weights = weigh(sizes / max(float(np.median(sizes)) / 0.6745, _LEAST_DEVIATION))
            is_settled = bool(np.abs(new_weights - weights).max() < 1e-3)
            weights = new_weights
            values = solve()
            if is_settled:
                break
    return values, weights


def _huber_weights(deviations: FloatArray) -> FloatArray:
    weights: FloatArray = np.minimum(1.0, _HUBER / np.maximum(deviations, _HUBER))
    return weights


def _tukey_weights(deviations: FloatArray) -> FloatArray:
    weights: FloatArray = np.maximum(0.0, 1 - (deviations / _TUKEY) ** 2) ** 2
    return weights


def _non_negative_least_squares(matrix: FloatArray, target: FloatArray) -> FloatArray:
    """argmin |matrix @ x - target| over x >= 0, exactly, by trying every set of non-zero entries (seven columns: 128 sets)."""
    num_columns = matrix.shape[1]
    scale = np.maximum(np.linalg.norm(matrix, axis=0), 1e-300)
    if len(matrix) > num_columns:
        # the distance differs from that of the small triangular system by a constant only
        orthogonal, matrix = np.linalg.qr(matrix / scale)
        target = orthogonal.T @ target
    else:
        matrix = matrix / scale
    best: FloatArray = np.zeros(num_columns)
    best_error = float(np.linalg.norm(target))
    everything, _, rank, _ = np.linalg.lstsq(matrix, target, rcond=None)
    if rank == num_columns and (everything >= 0).all():
        solution: FloatArray = everything / scale
        return solution
    for size in range(1, num_columns + 1):
        for columns in itertools.combinations(range(num_columns), size):
            chosen = list(columns)
            values = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
            if (values < 0).any():
                continue
            error = float(np.linalg.norm(matrix[:, chosen] @ values - target))
            # a larger set must win by more than rounding
            if error < best_error * (1 - 1e-9):
                best, best_error = np.zeros(num_columns), error
                best[chosen] = values
    result: FloatArray = best / scale
    return result
