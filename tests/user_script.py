# pyright: strict
"""A user's script of everyday calls, which strict type checkers pass with the package installed."""

import jax
import jax.numpy as jnp
import numpy as np

import rlxjax as rx

Rows = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def gate_says(batch: int, params: rx.WelchPeakParams) -> tuple[bool, float]:
    """Return whether a gate of built-in prices fuses, and the smooth form of the same decision."""
    before = rx.profile_graph_io(rx.welch_peaks_graph(batch, params, fused=False))
    after = rx.profile_graph_io(rx.welch_peaks_graph(batch, params, fused=True))
    benefit = rx.fusion_benefit(before, after)
    gate = rx.io_fusion_gate_for_target("metal")
    return bool(gate.should_fuse(benefit)), float(gate.fuse_probability(benefit, temperature_ns=1e7))


def calibration_says(calibration: rx.Calibration, batch: int, params: rx.WelchPeakParams) -> str:
    """Return what a run takes, and how sure the choice is."""
    time_ns = float(calibration.predict_ns("fused", batch, params.n_fft, params.k))
    low_ns, high_ns = (float(end) for end in calibration.interval_ns("fused", batch, params.n_fft, params.k))
    decided: rx.fit.Decision = calibration.decide(batch, params.n_fft, params.k)
    explanation: rx.calibration.Explanation = calibration.explain(batch, params.n_fft, params.k)
    slowest = max(explanation.strategies[0].terms_ns.items(), key=lambda term: term[1])
    return (
        f"{time_ns:,.0f} ns ({low_ns:,.0f} to {high_ns:,.0f}), {explanation.pick} is picked, "
        f"fused is faster with {float(decided.probability):.0%}; most of it is {slowest[0]}"
    )


def centred(x: jax.Array) -> jax.Array:
    """Return rows without their mean."""
    return x - x.mean(axis=1, keepdims=True)


def energy(x: jax.Array) -> jax.Array:
    """Return the sum of squares of each row."""
    return jnp.sum(x * x, axis=1)


def main() -> list[str]:
    """Return a line on each thing that was asked."""
    params = rx.WelchPeakParams.fast(n_fft=256, k=4)
    calibration = rx.calibration.prior_calibration("cpu")
    assert calibration is not None
    signal: Rows = np.sin(2.0 * np.pi * 32.0 / 256.0 * np.arange(params.frame_len, dtype=np.float64))[None]
    peaks = rx.welch_peaks(signal, params, calibration=calibration)
    rows = np.zeros((1024, 1024), np.float32)
    profile: rx.FunctionProfile = rx.profile_function(centred, rows)
    predicted: rx.calibration.FunctionPrediction = calibration.predict_function(centred, rows)
    advice: rx.Advice = rx.advise([centred, energy], rows, calibration=calibration)
    fuses, probability = gate_says(8192, params)
    return [
        f"gate: {'fuse' if fuses else 'keep'}, {probability:.0%} by the smooth form",
        calibration_says(calibration, 8192, params),
        f"strongest bin: {int(peaks[0, 0, 0])}",
        f"centred: {profile.flops} FLOP, {predicted.time_ns:,.0f} ns",
        f"advice: {advice.verdict}, {advice.reason}",
    ]


if __name__ == "__main__":
    for line in main():
        print(line)
