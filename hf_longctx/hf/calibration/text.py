"""Calibration results as text, printed by `hf-longctx calibrate`."""

from __future__ import annotations

from hf_longctx.hf.calibration.calibrate import FEW_RUNS, Calibration, chunk_samples, shape_text
from hf_longctx.plan.core.settings import HardwareSpec
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.cost.profiles import ModelCalibration


def calibration_text(calibration: Calibration) -> str:
    """Formats the table of all chunks, the mean errors, and the rates."""
    coefficients = calibration.costs.coefficients
    samples = chunk_samples(calibration.timings, calibration.costs, None)
    lines = [
        f"{'':9s}{'group':>13s}{'tokens':>8s}{'longest':>8s}{'runs':>5s}   forward ms: measured predicted error   backward ms"
    ]
    for timing, sample in zip(calibration.timings, samples, strict=True):
        probe, cells = timing.probe, []
        for one_pass, costs in ((sample.forward, coefficients.forward), (sample.backward, coefficients.backward)):
            predicted_s = one_pass.predicted_s(costs)
            error = predicted_s / one_pass.seconds - 1
            cells.append(f"{one_pass.seconds * 1e3:12.2f}{predicted_s * 1e3:11.2f}{error:+7.0%}")
        what = "held out" if probe.is_held_out else ""
        tokens = f"{sum(probe.lengths):8d}{max(probe.lengths):8d}{timing.num_repeats:5d}"
        lines.append(f"{what:9s}{shape_text(probe.shape):>13s}{tokens}{cells[0]}{cells[1]}")
    lines += [f"mean error {error:6.1%}  {name}" for name, error in calibration.profile.residuals]
    lines.append(_rates_text(calibration.profile.spec, calibration.profile.models[0]))
    held_out = calibration.held_out
    if (num_runs := min(timing.num_repeats for timing in calibration.timings)) < FEW_RUNS:
        lines.append(f"some chunks ran only {num_runs} time(s); for steadier numbers give more --seconds, or a smaller model")
    lines += _not_found(calibration.costs)
    lines.append(f"held-out chunks: mean absolute error {held_out.mean:.1%}, median {held_out.median:.1%}")
    return "\n".join(lines)


def _not_found(costs: CostModel) -> list[str]:
    """One line for every coefficient that should be positive but was fitted as zero."""
    terms = ("pair_s", "token_s", *(("link_byte_s",) if costs.cluster.num_ranks > 1 else ()))
    passes = (("forward", costs.coefficients.forward), ("backward", costs.coefficients.backward))
    return [
        f"{name} {term} came out as zero: the chunks were too short or too noisy; give more --seconds, or a quieter machine"
        for name, found in passes
        for term in terms
        if not getattr(found, term)
    ]


def _rates_text(spec: HardwareSpec, model: ModelCalibration) -> str:
    exchanges = ", ".join(f"{ranks} ranks {rate / 1e9:.3g}" for ranks, rate in spec.exchange_bytes_per_s) or "-"
    passes = ((name, getattr(model.coefficients, name).rates) for name in ("forward", "backward"))
    coefficients = "\n".join(f"  {name:9s}" + " ".join(f"{value:9.3g}" for value in values) for name, values in passes)
    return (
        f"{model.model}: seconds per pair, token, chunk, message, link byte, network byte, tile\n{coefficients}\n"
        f"rates: matrices {spec.matmul_flops_per_s / 1e9:.4g} GFLOP/s, attention {spec.attention_flops_per_s / 1e9:.4g} GFLOP/s, "
        f"links {spec.link_bytes_per_s / 1e9:.3g} GB/s, all-to-all ({exchanges}) GB/s, copies {spec.copy_bytes_per_s / 1e9:.3g} "
        f"GB/s, reduction {model.coefficients.step_s * 1e3:.3g} ms"
    )
