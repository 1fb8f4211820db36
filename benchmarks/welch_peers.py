"""Compare Welch peaks by this library, by the naive form in plain JAX, and by the installed peers.

    python -m benchmarks.welch_peers [--n-fft 256 1024] [--batch 1 1024] [--budget 5] [--json FILE]

`pip install '.[bench]'` installs pyfftw and torch. A run takes NumPy rows and returns NumPy peaks on a CPU; elsewhere
`fused`, `auto`, `naive` and `torch` take rows that are on the device and leave the peaks there. Each result is checked
against float64 before its timing. The exit status is 1 if a result was wrong or a contender failed.
"""

import functools
import importlib
import os
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rlxjax as rx
from benchmarks._common import options, table, visits, write

#: The tolerance as a share of a row's largest power, the most compared rows, and the most rounds of a workload.
TOLERANCE, MOST_ROWS, MOST_ROUNDS = 1e-5, 128, 200
#: Samples per chunk of the peers that work in chunks, so that their arrays stay in a cache.
CHUNK_SAMPLES = 2**17
Run = Callable[[], Any]
Peaks = tuple[np.ndarray, np.ndarray]


def window_of(params: rx.WelchPeakParams) -> np.ndarray:
    """Return the symmetric Hann window, float32."""
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(params.n_fft) / (params.n_fft - 1))).astype(np.float32)


def weights_of(params: rx.WelchPeakParams) -> np.ndarray:
    """Return the weight of `|X|^2` in the mean over segments of the one-sided power, float32."""
    weights = np.full(params.n_bins, 2.0 / params.n_segments, np.float32)
    weights[[0, -1]] /= 2.0
    return weights


def top_k(power: np.ndarray, k: int) -> Peaks:
    """Return bins and powers of the largest powers of each row, by a partial selection."""
    bins = np.argpartition(power, power.shape[1] - k, axis=1)[:, power.shape[1] - k :]
    values = np.take_along_axis(power, bins, axis=1)
    order = np.argsort(-values, axis=1)
    return np.take_along_axis(bins, order, axis=1), np.take_along_axis(values, order, axis=1)


def placed(signal: np.ndarray) -> Any:
    """Return the rows, on the device if the device is no CPU."""
    return signal if jax.default_backend() == "cpu" else jax.block_until_ready(jax.device_put(signal))


def ours(strategy: str, signal: np.ndarray, params: rx.WelchPeakParams) -> Run:
    """Return a run of a strategy of this library."""
    rows = placed(signal)

    def run() -> Any:
        peaks = jax.block_until_ready(rx.welch_peaks(rows, params, strategy))
        return peaks[..., 0], peaks[..., 1]

    return run


def naive(signal: np.ndarray, params: rx.WelchPeakParams) -> Run:
    """Return a run of the form that a user of JAX writes first."""
    window, weights, hop, rows = window_of(params), weights_of(params), params.hop, placed(signal)

    @jax.jit
    def program(rows: Any) -> Any:
        segments = jnp.stack([rows[:, s * hop : s * hop + params.n_fft] for s in range(params.n_segments)], 1)
        spectrum = jnp.fft.rfft(segments * window)
        power = (jnp.square(spectrum.real) + jnp.square(spectrum.imag)).sum(1) * weights
        return jax.lax.top_k(power, params.k)[::-1]

    def run() -> Any:
        peaks = jax.block_until_ready(program(rows))
        return peaks if isinstance(rows, jax.Array) else tuple(map(np.asarray, peaks))

    return run


def scipy(signal: np.ndarray, params: rx.WelchPeakParams) -> Run:
    """Return a run of `scipy.signal.welch`, which divides by `sum(window)^2`."""
    window, welch = window_of(params), importlib.import_module("scipy.signal").welch
    given = {"nperseg": params.n_fft, "noverlap": params.n_fft - params.hop, "detrend": False, "scaling": "spectrum"}
    return lambda: top_k(welch(signal, window=window, **given)[1] * window.sum() ** 2, params.k)


def pyfftw(signal: np.ndarray, params: rx.WelchPeakParams) -> Run:
    """Return a run of a planned FFTW of many rows on all cores, in chunks of rows."""
    fftw, batch = importlib.import_module("pyfftw"), len(signal)
    step = min(batch, max(1, CHUNK_SAMPLES // (params.n_segments * params.n_fft)))
    windowed = fftw.empty_aligned((step, params.n_segments, params.n_fft), np.float32)
    spectrum = fftw.empty_aligned((step, params.n_segments, params.n_bins), np.complex64)
    threads = os.cpu_count() or 1
    plan = fftw.FFTW(windowed, spectrum, axes=(2,), flags=("FFTW_MEASURE",), threads=threads)
    window, weights = window_of(params), weights_of(params)
    rows = signal[:, : params.frame_len]
    segments = np.lib.stride_tricks.sliding_window_view(rows, params.n_fft, axis=1)[:, :: params.hop]

    def run() -> Peaks:
        bins, powers = np.empty((batch, params.k), np.intp), np.empty((batch, params.k), np.float32)
        for start in range(0, batch, step):
            count = len(segments[start : start + step])
            np.multiply(segments[start : start + step], window, out=windowed[:count])
            plan()  # all rows of the buffer, of which the last chunk has fewer
            power = np.square(spectrum[:count].real) + np.square(spectrum[:count].imag)
            bins[start : start + step], powers[start : start + step] = top_k(power.sum(1) * weights, params.k)
        return bins, powers

    return run


def torch(signal: np.ndarray, params: rx.WelchPeakParams) -> Run:
    """Return a run of torch; on a CPU in chunks of rows, which are faster."""
    library, on_cpu = importlib.import_module("torch"), jax.default_backend() == "cpu"
    arrays = (signal[:, : params.frame_len], window_of(params), weights_of(params))
    rows, window, weights = (library.from_numpy(array).to("cpu" if on_cpu else "cuda") for array in arrays)
    chunk_rows = CHUNK_SAMPLES * (os.cpu_count() or 1) // (params.n_segments * params.n_fft)
    step = max(1, chunk_rows) if on_cpu else len(signal)

    @library.inference_mode()
    def run() -> Any:
        found = []
        for part in rows.split(step):
            spectrum = library.fft.rfft(part.unfold(1, params.n_fft, params.hop) * window)
            power = (spectrum.real.square() + spectrum.imag.square()).sum(1).mul_(weights)
            found.append(library.topk(power, params.k))
        values, bins = map(library.cat, zip(*found, strict=True))
        if not on_cpu:
            library.cuda.synchronize()
        return bins.cpu(), values.cpu()

    return run


CONTENDERS: dict[str, Callable[[np.ndarray, rx.WelchPeakParams], Run]] = {
    "fused": functools.partial(ours, "fused"),
    "auto": functools.partial(ours, "auto"),
    "naive": naive,
    "scipy": scipy,
    "pyfftw": pyfftw,
    "torch": torch,
}


def wrong(peaks: Any, signal: np.ndarray, params: rx.WelchPeakParams) -> str:
    """Return the error of the peaks of a signal in words, or "".

    The power at each bin, and the power of each rank, are within `TOLERANCE` of the row's largest power.
    """
    rows = np.unique(np.linspace(0, len(signal) - 1, min(len(signal), MOST_ROWS)).astype(np.intp))
    bins, powers = (np.asarray(own)[rows] for own in peaks)
    window = 0.5 * (1.0 - np.cos(2.0 * np.pi * np.arange(params.n_fft) / (params.n_fft - 1)))
    power = np.zeros((len(rows), params.n_bins))
    for start in range(0, params.n_segments * params.hop, params.hop):
        part = signal[rows, start : start + params.n_fft].astype(np.float64)
        power += np.abs(np.fft.rfft(part * window)) ** 2 / params.n_segments
    power[:, 1:-1] *= 2.0
    ranked = -np.sort(-power, axis=1)[:, : params.k]
    at_bins = np.take_along_axis(power, bins.astype(np.intp), axis=1)
    off = np.maximum(np.abs(powers - ranked), np.abs(at_bins - ranked)) / ranked[:, :1]
    return "" if np.all(off <= TOLERANCE) else f"wrong: a power is off by {off.max():.2g} of its row's largest"


def of_workload(n_fft: int, batch: int, names: list[str], budget_s: float, k: int = 16) -> dict[str, Any]:
    """Return the times of the contenders of a workload with two segments in ns, or the reason for no times."""
    params, rng = rx.WelchPeakParams.fast(n_fft, k), np.random.default_rng(0)
    signal = rng.standard_normal((batch, params.frame_len), np.float32)
    tones = rng.uniform(0.1, 3.0, (batch, 1)).astype(np.float32)
    signal += np.sin(tones * np.arange(params.frame_len, dtype=np.float32))
    until_s, runs, notes = time.perf_counter() + budget_s, {}, {}
    for name in names:
        try:
            run = CONTENDERS[name](signal, params)
            if said := wrong(run(), signal, params):
                notes[name] = said
            else:
                runs[name] = run
        except Exception as error:  # noqa: BLE001 - whatever a peer raises
            notes[name] = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    times = {name: own.tolist() for name, own in visits(runs, MOST_ROUNDS, until_s=until_s).items()}
    n_bytes = 4 * batch * (params.frame_len + 2 * params.k)
    return {"n_fft": n_fft, "batch": batch, "k": k, "bytes_moved": n_bytes, "times_ns": times, "notes": notes}


def main() -> int:
    """Measure, print the table, and write the file."""
    parser = options(__doc__, budget=5.0)
    parser.add_argument("--n-fft", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 1024, 131_072])
    given = parser.parse_args()
    names = [name for name in CONTENDERS if name not in ("scipy", "pyfftw", "torch") or find_spec(name)]
    cells = [of_workload(n_fft, batch, names, given.budget) for n_fft in given.n_fft for batch in given.batch]
    rows = []
    for cell in cells:
        least = {name: min(own) for name, own in cell["times_ns"].items()}
        ratios = [f"{least['fused'] / least[name]:.2f}" if name in least else "-" for name in names[1:]]
        rows.append([cell["n_fft"], f"{cell['batch']:,}", f"{least['fused'] / 1e6:.3f}", *ratios])
    print(table(["n_fft", "batch", "fused, ms", *(f"/ {name}" for name in names[1:])], rows))
    failed = {
        f"{cell['n_fft']}x{cell['batch']} {name}: {said}" for cell in cells for name, said in cell["notes"].items()
    }
    print(*sorted(failed), sep="\n")
    write(given.json, {"cells": cells}, indent=None)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
