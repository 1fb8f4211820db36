"""Where the time of the fused Welch-peaks program goes: prefixes of it, the naive form beside the one in use.

    python benchmarks/welch_stages.py [--n-fft 256] [--batch ROWS] [--k 16] [--rounds 200] [--json FILE]

Each prefix is a program of its own that ends after one more stage; a stage's time is the difference of two
prefixes, so that what XLA fuses across stages is counted once. At most a piece of rows (`piece_rows`), which
is what the program transforms at a time, on one thread of a CPU, random interleaving, minima. The first
prefix computes nothing: what it takes is the call.
"""

import argparse
import functools
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax import WelchPeakParams
from rlxjax._files import Strict, write_json_file
from rlxjax.welch import mean_power, segment_spectra, selected_peaks
from rlxjax.welch._device_programs import piece_rows
from rlxjax.welch._host import hann_window, one_sided_weights


class Report(Strict):
    """What the JSON file holds; times are cumulative minima of the prefixes, in milliseconds."""

    n_fft: int
    batch: int
    k: int
    rounds: int
    jax: str
    naive_ms: dict[str, float]
    fused_ms: dict[str, float]


def naive_power(signal: jax.Array, params: WelchPeakParams) -> jax.Array:
    """Return the mean power as two real transforms."""
    spectrum = segment_spectra(signal, params)
    power = jnp.square(spectrum.real) + jnp.square(spectrum.imag)
    return jnp.sum(power, axis=1) * one_sided_weights(params)[None]


def windowed(signal: jax.Array, params: WelchPeakParams) -> list[jax.Array]:
    """Return the windowed segments."""
    starts = range(0, params.n_segments * params.hop, params.hop)
    return [signal[:, start : start + params.n_fft] * hann_window(params.n_fft) for start in starts]


def packed(signal: jax.Array, params: WelchPeakParams) -> jax.Array:
    """Return two windowed segments as the complex signal that is transformed."""
    return jax.lax.complex(*windowed(signal, params))


def prefixes(params: WelchPeakParams) -> dict[str, dict[str, Callable[[jax.Array], jax.Array]]]:
    """Return the prefixes of both forms, in order; the last one is the whole."""
    naive_selection = functools.partial(selected_peaks, k=params.k, selection="top_k")

    def power(signal: jax.Array) -> jax.Array:
        return mean_power(signal, params)

    def maxima(signal: jax.Array) -> jax.Array:
        return selected_peaks(power(signal), params.k, "maxima")

    return {
        "naive": {
            "call": lambda signal: signal[:, 0],
            "window": lambda signal: jnp.stack(windowed(signal, params), axis=1),
            "real transforms": lambda signal: segment_spectra(signal, params),
            "power": lambda signal: naive_power(signal, params),
            "top_k": lambda signal: naive_selection(naive_power(signal, params)),
        },
        "fused": {
            "call": lambda signal: signal[:, 0],
            "window and pack": lambda signal: packed(signal, params),
            "complex transform": lambda signal: jnp.fft.fft(packed(signal, params)),
            "power": power,
            "selection by maxima": maxima,
        },
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("n-fft", 256), ("k", 16), ("rounds", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--batch", type=int, help="rows; a piece unless given, and at most that")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    params = WelchPeakParams.fast(args.n_fft, args.k)
    most = piece_rows(2**30, params, jax.default_backend())
    batch = most if args.batch is None else args.batch
    if not 1 <= batch <= most:
        parser.error(f"--batch: expected 1 to {most} rows, which are a piece, got {batch}")
    rng = np.random.default_rng(0)
    signal = rng.standard_normal((batch, params.frame_len), np.float32)
    forms = prefixes(params)
    programs = {(form, stage): jax.jit(run) for form, stages in forms.items() for stage, run in stages.items()}
    best = dict.fromkeys(programs, np.inf)
    for program in programs.values():
        jax.block_until_ready(program(signal))
    for _ in range(args.rounds):
        for key in rng.permutation(len(programs)):
            name = list(programs)[key]
            start = time.perf_counter()
            jax.block_until_ready(programs[name](signal))
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    for form, stages in forms.items():
        before = 0.0
        print(f"{form}: {batch} rows, n_fft {args.n_fft}, k {args.k}")
        for stage in stages:
            now = best[form, stage]
            print(f"  {stage:22} {now - before:8.4f} ms   up to here {now:8.4f} ms")
            before = now
    if args.json:
        naive, fused = ({stage: best[form, stage] for stage in forms[form]} for form in ("naive", "fused"))
        report = Report(
            n_fft=args.n_fft,
            batch=batch,
            k=args.k,
            rounds=args.rounds,
            jax=jax.__version__,
            naive_ms=naive,
            fused_ms=fused,
        )
        write_json_file(report, args.json)


if __name__ == "__main__":
    main()
