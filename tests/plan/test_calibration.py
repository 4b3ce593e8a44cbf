"""Promises of the fit: it finds the coefficients behind clean samples, stays close under noise, never goes negative."""

from __future__ import annotations

import random

import pytest
from plan_cases import HARDWARE, MODEL

from hf_longctx.plan.calibration import ChunkSample, fit_coefficients, mean_relative_error
from hf_longctx.plan.cost import CostCoefficients, CostModel, PassCoefficients
from hf_longctx.plan.specs import ClusterSpec
from hf_longctx.plan.types import Chunk, Span

# seconds of a small model on a CPU: 100 tokens take 0.02 s, 2000 tokens 0.9 s
FORWARD = PassCoefficients(2e-7, 1.5e-4, 4e-3, 2e-3, ((2, 3e-5),))
BACKWARD = PassCoefficients(5e-7, 3e-4, 9e-3, 1e-3, ((2, 8e-5),))
TRUTH = CostModel(MODEL, ClusterSpec(4, 4, HARDWARE), CostCoefficients(FORWARD, BACKWARD, 0.5, "truth"))


def measured(num_samples: int, degrees: tuple[int, ...], noise: float = 0.0, seed: int = 0) -> list[ChunkSample]:
    """Chunks of one to four sequences as the true costs time them, with relative noise; some are slices."""
    draw = random.Random(seed)
    samples = []
    for place in range(num_samples):
        spans = []
        for sequence in range(draw.randint(1, 4)):
            length, prefix = round(draw.lognormvariate(6, 1)) + 8, draw.choice([0, 0, 500]) if sequence == 0 else 0
            spans.append(Span(sequence, prefix, prefix + length))
        chunk, degree = Chunk(0, tuple(spans)), degrees[place % len(degrees)]
        seconds = [
            one_pass(chunk, degree, MODEL.num_layers) * (1 + draw.uniform(-noise, noise))
            for one_pass in (TRUTH.forward_s, TRUTH.backward_s)
        ]
        samples.append(ChunkSample(chunk.num_tokens, chunk.num_pairs, degree, *seconds))
    return samples


def check_pass(found: PassCoefficients, truth: PassCoefficients, rel: float) -> None:
    assert found.pair_s == pytest.approx(truth.pair_s, rel=rel)
    assert found.token_s == pytest.approx(truth.token_s, rel=rel)
    assert found.chunk_s == pytest.approx(truth.chunk_s, rel=rel)


@pytest.mark.parametrize("degrees", [(1, 2), (1, 2, 4), (2, 4)])
def test_clean_samples_give_back_their_coefficients(degrees: tuple[int, ...]) -> None:
    found = fit_coefficients(measured(40, degrees), step_s=0.5, source="run")
    assert mean_relative_error(measured(40, degrees, seed=1), found) < 1e-8
    if 1 in degrees:
        check_pass(found.forward, FORWARD, 1e-6)
        check_pass(found.backward, BACKWARD, 1e-6)
        for one_pass, truth in ((found.forward, FORWARD), (found.backward, BACKWARD)):
            assert one_pass.exchange_chunk_s == pytest.approx(truth.exchange_chunk_s, rel=1e-6)
        if degrees == (1, 2, 4):
            assert found.forward.exchange_token_s(2) == pytest.approx(3e-5, rel=1e-6)
            assert found.backward.exchange_token_s(4) == pytest.approx(8e-5, rel=1e-6)
    assert (found.step_s, found.source, found.is_measured) == (0.5, "run", True)


def test_one_degree_cannot_know_the_exchange() -> None:
    found = fit_coefficients(measured(40, (1,)), step_s=0.0, source="run")
    check_pass(found.forward, FORWARD, 1e-6)
    check_pass(found.backward, BACKWARD, 1e-6)
    assert found.forward.exchange_token_s(2) == found.forward.exchange_chunk_s == 0


@pytest.mark.parametrize("seed", range(5))
def test_five_percent_of_noise_stays_five_percent_of_error(seed: int) -> None:
    found = fit_coefficients(measured(200, (1, 2, 4), noise=0.05, seed=seed), step_s=0.0, source="run")
    # against clean chunks that the fit has not seen
    assert mean_relative_error(measured(100, (1, 2, 4), seed=seed + 100), found) < 0.01
    check_pass(found.forward, FORWARD, 0.25)
    check_pass(found.backward, BACKWARD, 0.25)


@pytest.mark.parametrize("seed", range(5))
def test_no_coefficient_is_negative(seed: int) -> None:
    # few and noisy samples, where plain least squares would overshoot
    found = fit_coefficients(measured(6, (1, 2), noise=0.3, seed=seed), step_s=0.0, source="run")
    for one_pass in (found.forward, found.backward):
        values = (one_pass.pair_s, one_pass.token_s, one_pass.chunk_s, one_pass.exchange_chunk_s, one_pass.exchange_token_s(2))
        assert min(values) >= 0
        assert max(values) > 0


def test_short_chunks_count_as_much_as_long_ones() -> None:
    # one long chunk that takes twice as long as the law must not spoil fifty short ones
    short = [ChunkSample(n, 0.0, 1, 1e-3 * n, 2e-3 * n) for n in range(10, 60)]
    found = fit_coefficients([*short, ChunkSample(100_000, 0.0, 1, 200.0, 400.0)], step_s=0.0, source="run")
    assert mean_relative_error(short, found) < 0.05


def test_one_sample_is_enough_to_predict_itself() -> None:
    sample = ChunkSample(100, 5000.0, 1, 0.25, 0.5)
    assert mean_relative_error([sample], fit_coefficients([sample], step_s=0.0, source="run")) < 1e-9


def test_the_error_is_the_mean_over_both_passes() -> None:
    costs = CostCoefficients(
        PassCoefficients(0.0, 1.0, 0.0, 0.0, ()), PassCoefficients(0.0, 2.0, 0.0, 0.0, ()), step_s=0.0, source="run"
    )
    # predicted 10 and 20 seconds against 8 and 25: errors 0.25 and 0.2
    assert mean_relative_error([ChunkSample(10, 0.0, 1, 8.0, 25.0)], costs) == pytest.approx(0.225)


def test_without_samples_there_is_nothing_to_fit() -> None:
    with pytest.raises(ValueError, match="run at least one step"):
        fit_coefficients([], step_s=0.0, source="run")
