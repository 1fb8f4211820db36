"""What a call of one row takes: Welch peaks, fused, against the naive jitted form, as ratios within one run.

python benchmarks/one_row.py [--rounds 200] [--calls 8]

With a calibration and without one, of NumPy and of JAX arrays; every result is waited for, and of a NumPy signal comes
a NumPy result. Contenders take turns, a few calls each; a ratio is that of the medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import rlxjax as rx

#: Segment length and peaks.
SIZES = ((64, 4), (256, 1), (256, 16), (1024, 16), (4096, 16))


def naive_form(params: rx.WelchPeakParams) -> Callable[..., jax.Array]:
    """Return what one would write with JAX alone."""
    window = 0.5 * (1.0 - np.cos(2.0 * np.pi * np.arange(params.n_fft) / (params.n_fft - 1)))
    window = window.astype(np.float32)

    @jax.jit
    def peaks(signal):
        starts = range(0, params.n_segments * params.hop, params.hop)
        segments = jnp.stack([signal[:, start : start + params.n_fft] for start in starts], axis=1)
        power = jnp.abs(jnp.fft.rfft(segments * window)) ** 2
        power = power.at[..., 1:-1].multiply(2.0).mean(1)
        powers, bins = lax.top_k(power, params.k)
        return jnp.stack([bins.astype(jnp.float32), powers], axis=-1)

    return peaks


def ratios(params: rx.WelchPeakParams, calibration: rx.Calibration, rounds: int, calls: int) -> dict[str, float]:
    """Return the median time of each contender over that of the naive form on the same kind of array."""
    naive = naive_form(params)
    row = np.random.default_rng(0).standard_normal((1, params.frame_len), np.float32)
    contenders: dict[str, Callable[[], object]] = {}
    for kind, signal, wait in (("NumPy", row, np.asarray), ("JAX", jnp.asarray(row), jax.block_until_ready)):
        for name, given in (("without", None), ("with", calibration)):
            contenders[f"{kind}, {name}"] = lambda x=signal, to=wait, by=given: to(
                rx.welch_peaks(x, params, "fused", calibration=by)
            )
        contenders[f"{kind}, naive"] = lambda x=signal, to=wait: to(naive(x))
    times_s: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            call()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            times_s[name].append(time.perf_counter() - start)
    median_s = {name: statistics.median(times) for name, times in times_s.items()}
    return {
        name: took_s / median_s[f"{name.partition(',')[0]}, naive"]
        for name, took_s in median_s.items()
        if not name.endswith("naive")
    }


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--calls", type=int, default=8, help="of a contender in its turn")
    arguments = parser.parse_args()
    calibration = rx.prior_calibration()
    if calibration is None:
        raise SystemExit("no calibration is known for this platform")
    names = [f"{kind}, {given}" for kind in ("NumPy", "JAX") for given in ("without", "with")]
    print(f"| segments | n_fft | k | {' | '.join(names)} |\n|{'---|' * (3 + len(names))}")
    for n_segments in (1, 2, 8):
        for n_fft, k in SIZES:
            params = rx.WelchPeakParams(n_fft, n_segments, k)
            found = ratios(params, calibration, arguments.rounds, arguments.calls)
            print(
                f"| {n_segments} | {n_fft} | {k} | {' | '.join(f'{found[name]:.2f}' for name in names)} |", flush=True
            )


if __name__ == "__main__":
    main()
