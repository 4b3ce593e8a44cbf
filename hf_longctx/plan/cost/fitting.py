"""Fits cost coefficients to measured chunks: robust non-negative least squares on relative errors, for each pass separately.

Called by the calibration before training and by the refit during training. Some measured chunks take far too long (first
memory touches, garbage collections, a busy neighbour), but none far too short. Residuals are 1 - predicted / measured, so that
short chunks count as much as long ones, and a chunk that took ten times too long has a residual below one. The fit repeats
weighted least squares, first with Huber's weights (outliers have bounded influence, and any start works), then with Tukey's
(far outliers have none), as in Holland and Welsch, "Robust regression using iteratively reweighted least-squares" (1977).

For calibration, which measures only a few layers, fitted coefficients are also extended to more layers, and turned into hardware
rates for other models.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hf_longctx.plan.core.settings import ClusterSpec, HardwareSpec
from hf_longctx.plan.core.types import FloatArray
from hf_longctx.plan.cost.cost_model import WHOLE_MODEL, CostCoefficients, ModelPart, PassCoefficients
from hf_longctx.plan.cost.traffic import Traffic
from hf_longctx.plan.model.model_spec import ModelSpec

# standard deviations at which Huber's weights begin to fall and Tukey's reach zero: 95 % efficiency under normal noise
_HUBER, _TUKEY = 1.345, 4.685
# most iterations with each kind of weights
_MOST_ITERATIONS = 25
# least standard deviation assumed for the residuals: the formula itself is off by about a percent
_LEAST_DEVIATION = 0.01
# weight of each coefficient of a measured prior; one measured pass has weight 1
_PRIOR_WEIGHT = 0.01
# names of the rates of a pass, in the order of its features
_RATES = ("pair_s", "token_s", "chunk_s", "message_s", "link_byte_s", "network_byte_s", "tile_s")
_TOKENS = _RATES.index("token_s")

# two events of a device may get the same time
_LEAST_S = 1e-9


@dataclass(frozen=True, slots=True)
class PassSample:
    """One measured pass of one chunk on one rank."""

    # tokens of the whole chunk
    num_tokens: int
    # query-key pairs of the whole chunk in a layer, averaged over the layers that ran
    num_pairs: float
    degree: int
    # bytes sent and ring tiles (`cost_model.num_tiles`), as if all layers ran
    traffic: Traffic
    seconds: float
    tiles: float = 0.0
    # the part of the model that ran
    part: ModelPart = WHOLE_MODEL

    @property
    def features(self) -> tuple[float, ...]:
        """Returns the factors of `PassCoefficients.rates`, in their order, for the layers that ran."""
        traffic = self.traffic
        exchanged = (traffic.messages, traffic.link_bytes, traffic.network_bytes)
        whole = (self.num_pairs / self.degree, self._tokens, 1.0, *exchanged, self.tiles)
        return tuple(self.part.layers * value for value in whole)

    @property
    def head_tokens(self) -> float:
        """Returns the number of tokens that the rank ran through the output head."""
        return self._tokens if self.part.has_head else 0.0

    def predicted_s(self, costs: PassCoefficients) -> float:
        """Predicts seconds of this pass under `costs`."""
        head_s = costs.token_s * min(1.0, self.part.head_share * costs.head_factor)
        return float(np.dot(self.features, costs.rates)) + head_s * (self.head_tokens - self.part.layers * self._tokens)

    @property
    def _tokens(self) -> float:
        return max(self.num_tokens, self.degree) / self.degree


@dataclass(frozen=True, slots=True)
class ChunkSample:
    """Both passes of one measured chunk."""

    forward: PassSample
    backward: PassSample


@dataclass(frozen=True, slots=True)
class Residuals:
    """Median and mean of |predicted / measured - 1| over `num_passes` passes.

    num_outliers: passes with a weight below one half in the fit.
    """

    num_passes: int
    median: float
    mean: float
    num_outliers: int = 0

    @classmethod
    def of(cls, errors: Sequence[float] | FloatArray, num_outliers: int = 0) -> Residuals:
        """Summarises relative errors of any sign; all zeros if there are none."""
        sizes = np.abs(np.asarray(errors, dtype=np.float64))
        if not sizes.size:
            return cls(0, 0.0, 0.0)
        return cls(int(sizes.size), float(np.median(sizes)), float(sizes.mean()), num_outliers)


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted coefficients, and their residuals on the samples that they were fitted to."""

    coefficients: CostCoefficients
    residuals: Residuals


def fit_coefficients(samples: Sequence[ChunkSample], step_s: float, source: str, prior: CostCoefficients | None = None) -> Fit:
    """Fits coefficients to the majority of `samples`; a minority of outliers has little or no influence.

    step_s: seconds of a step outside chunks. Coefficients on which no sample depends (exchanges if all groups have one rank, the
    network if all groups are within a node) are taken from `prior`, or zero without one. Coefficients that samples determine
    badly stay near a measured prior. Raises ValueError without samples.
    """
    if not samples:
        raise ValueError("cannot fit cost coefficients without a measured chunk; run at least one step first")
    has_prior = prior is not None and prior.is_measured
    forward, forward_weights = _fit_pass([s.forward for s in samples], prior.forward if prior else None, has_prior)
    backward, backward_weights = _fit_pass([s.backward for s in samples], prior.backward if prior else None, has_prior)
    coefficients = CostCoefficients(forward, backward, step_s, source)
    num_outliers = int((forward_weights < 0.5).sum() + (backward_weights < 0.5).sum())
    return Fit(coefficients, Residuals.of(relative_errors(samples, coefficients), num_outliers))


def scaled_coefficients(coefficients: CostCoefficients, factor: float) -> CostCoefficients:
    """Returns coefficients of a machine on which everything takes `factor` times as long."""
    forward, backward = (
        replace(PassCoefficients(*(factor * value for value in costs.rates)), head_factor=costs.head_factor)
        for costs in (coefficients.forward, coefficients.backward)
    )
    return CostCoefficients(forward, backward, factor * coefficients.step_s, coefficients.source)


def relative_errors(samples: Sequence[ChunkSample], coefficients: CostCoefficients) -> list[float]:
    """Returns the relative error, predicted / measured - 1, of the forward and the backward of every sample."""
    return [
        one_pass.predicted_s(costs) / max(one_pass.seconds, _LEAST_S) - 1
        for sample in samples
        for one_pass, costs in ((sample.forward, coefficients.forward), (sample.backward, coefficients.backward))
    ]


def _fit_pass(
    samples: Sequence[PassSample], prior: PassCoefficients | None, is_prior_measured: bool
) -> tuple[PassCoefficients, FloatArray]:
    """Fits coefficients of one pass; returns them and the final weight of every sample.

    If pipeline stages ran parts of the model, tokens in the layers and tokens in the head are separate columns.
    """
    is_cut = not all(sample.part.is_whole for sample in samples)
    rows_of_samples = [(*sample.features, *([sample.head_tokens] if is_cut else [])) for sample in samples]
    features = np.array(rows_of_samples, dtype=np.float64)
    seconds = np.maximum([sample.seconds for sample in samples], _LEAST_S)
    prior = PassCoefficients(*[0.0] * len(samples[0].features)) if prior is None else prior
    known = np.array(prior.rates)
    head_share = max(sample.part.head_share for sample in samples)
    if is_cut:
        head_s = prior.token_s * min(1.0, head_share * prior.head_factor)
        known[_TOKENS] -= head_s
        known = np.append(known, head_s)
    is_seen = (features > 0).any(axis=0)
    # columns that are zero in every sample keep the prior and drop out of the fit
    rows = features[:, is_seen] / seconds[:, None]
    anchors = _anchors(known[is_seen]) if is_prior_measured else np.zeros((0, int(is_seen.sum())))
    values, weights = _robust_least_squares(rows, anchors)
    known[is_seen] = values
    found = replace(prior, **dict(zip(_RATES, known.tolist(), strict=False)))
    if is_cut:
        found = _with_head(found, float(known[-1]), head_share)
    return found, weights


def _with_head(layers: PassCoefficients, head_s: float, head_share: float) -> PassCoefficients:
    """Combines coefficients of the layers and seconds of a token in the output head into those of the whole model."""
    token_s = layers.token_s + head_s
    is_known = token_s > 0 and head_share > 0
    return replace(layers, token_s=token_s, head_factor=head_s / token_s / head_share if is_known else layers.head_factor)


def _anchors(known: FloatArray) -> FloatArray:
    """Makes rows that pull each coefficient towards its known value with the prior's weight; none for known zeros."""
    is_positive = known > 0
    rows: FloatArray = np.sqrt(_PRIOR_WEIGHT) * np.diag(1 / np.where(is_positive, known, 1.0))[is_positive]
    return rows


def _robust_least_squares(rows: FloatArray, anchors: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Returns x >= 0 with most of `rows` @ x near 1, and the final weight of every row; the weight of `anchors` is fixed."""
    target = np.concatenate([np.ones(len(rows)), np.full(len(anchors), np.sqrt(_PRIOR_WEIGHT))])
    weights = np.ones(len(rows))

    def solve() -> FloatArray:
        scale = np.concatenate([np.sqrt(weights), np.ones(len(anchors))])
        return _non_negative_least_squares(np.concatenate([rows, anchors]) * scale[:, None], target * scale)

    values = solve()
    for weigh in (_huber_weights, _tukey_weights):
        for _ in range(_MOST_ITERATIONS):
            sizes = np.abs(1 - rows @ values)
            # the median of |normal noise| is 0.6745 standard deviations
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
    """Minimises |matrix @ x - target| exactly over x >= 0, by trying every set of non-zero entries (8 columns: 256 sets)."""
    num_columns = matrix.shape[1]
    scale = np.maximum(np.linalg.norm(matrix, axis=0), 1e-300)
    if len(matrix) > num_columns:
        # the small triangular system has the same minimum: its squared distance differs by a constant
        orthogonal, matrix = np.linalg.qr(matrix / scale)
        target = orthogonal.T @ target
    else:
        matrix = matrix / scale
    best: FloatArray = np.zeros(num_columns)
    best_error = float(np.linalg.norm(target))
    unconstrained, _, rank, _ = np.linalg.lstsq(matrix, target, rcond=None)
    if rank == num_columns and (unconstrained >= 0).all():
        solution: FloatArray = unconstrained / scale
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


def whole_model_costs(
    few: CostCoefficients, head: CostCoefficients | None, spec: ModelSpec, whole: ModelSpec
) -> CostCoefficients:
    """Returns coefficients of `whole`, given those of a model with few of its layers (`spec`) and of its output head alone.

    head: None if `few` already has all layers. Seconds of layers grow with the number of layers, rates per byte and message stay,
    and the seconds of a step (the gradient reduction) grow with the parameters. The head's seconds become those in a pipeline.
    """
    if head is None:
        return few
    times = whole.num_layers / spec.num_layers

    def extend(layers: PassCoefficients, bare: PassCoefficients) -> PassCoefficients:
        def grown(value: float, fixed: float) -> float:
            # because of noise the head alone may have taken longer than head and layers together
            fixed = min(fixed, value)
            return fixed + (value - fixed) * times

        token_s = grown(layers.token_s, bare.token_s)
        head_s, product_s = min(bare.token_s, layers.token_s), token_s * whole.head_share
        return replace(
            layers,
            pair_s=layers.pair_s * times,
            token_s=token_s,
            chunk_s=grown(layers.chunk_s, bare.chunk_s),
            tile_s=layers.tile_s * times,
            head_factor=head_s / product_s if product_s > 0 else layers.head_factor,
        )

    return CostCoefficients(
        extend(few.forward, head.forward),
        extend(few.backward, head.backward),
        few.step_s * whole.num_parameters / spec.num_parameters,
        few.source,
    )


def hardware_rates(spec: ModelSpec, cluster: ClusterSpec, costs: CostCoefficients) -> HardwareSpec:
    """Returns the cluster's hardware with rates that `default_coefficients` turns back into `costs`, as far as possible.

    Measured exchange rates keep their ratio to the link rates, so that the traffic of a chunk is counted as in the fit. A rate
    whose coefficient was fitted as zero does not change.
    """
    hardware, forward, backward = cluster.hardware, costs.forward, costs.backward
    matrix = spec.num_layers * spec.layer_products + spec.head_outputs * spec.hidden_size
    pair = spec.num_layers * spec.pair_operations

    def per_second(amount: float, seconds: float, otherwise: float) -> float:
        return amount / seconds if seconds > 0 else otherwise

    link = per_second(2, forward.link_byte_s + backward.link_byte_s, hardware.link_bytes_per_s)
    network = per_second(2, forward.network_byte_s + backward.network_byte_s, hardware.network_bytes_per_s)
    scales = {True: link / hardware.link_bytes_per_s, False: network / hardware.network_bytes_per_s}
    return replace(
        hardware,
        matmul_flops_per_s=per_second(2 * matrix, forward.token_s, hardware.matmul_flops_per_s),
        attention_flops_per_s=per_second(pair, forward.pair_s, hardware.attention_flops_per_s),
        backward_matmul=per_second(backward.token_s, forward.token_s, 0.0) or hardware.backward_matmul,
        backward_attention=per_second(backward.pair_s, forward.pair_s, 0.0) or hardware.backward_attention,
        kernel_s=forward.chunk_s / (20 * spec.num_layers),
        message_s=(forward.message_s + backward.message_s) / 2,
        link_bytes_per_s=link,
        network_bytes_per_s=network,
        exchange_bytes_per_s=tuple(
            (ranks, rate * scales[ranks <= cluster.ranks_per_node]) for ranks, rate in hardware.exchange_bytes_per_s
        ),
    )
