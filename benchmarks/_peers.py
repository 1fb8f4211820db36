"""The contenders of `benchmarks.welch_peers`: this library, the naive form, and every installed peer.

A run takes samples and returns finished peaks (bins and powers). On a CPU, samples and peaks are NumPy arrays;
`fused-jax` and `naive-jax` take and return JAX arrays. On another device, the samples are on the device before the
clock starts, and the peaks stay there, for our paths (except `host`), naive, jax.scipy, torch and cupy. The other peers
work on the host with NumPy arrays.
"""

import functools
import importlib
import os
from collections.abc import Callable
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import rlxjax as rx

#: Samples per transform, so that the arrays stay in a cache: the fastest of 2**14 to 2**20.
CHUNK_SAMPLES = 2**17

#: Returns peaks: one array `[batch, k, 2]` of (bin, power), or two of bins and of powers `[batch, k]`.
Run = Callable[[], Any]


class Contender(NamedTuple):
    """A contender.

    Attributes:
        build: does the one-time work (plans, uploads, compiling) for samples and parameters, and returns the run to
            time.
        package: the package to install, by pip's name.
        where: the kind of device: `cpu`, `gpu`, or any.
        is_ours: whether the contender is a path of this library.
    """

    build: Callable[[np.ndarray, rx.WelchPeakParams], Run]
    package: str = "jax"
    where: str = ""
    is_ours: bool = False

    def unavailable(self) -> str | None:
        """Return the reason why the contender cannot run here, or None."""
        if self.where and (self.where == "cpu") != on_cpu():
            return f"for a {self.where} only, and JAX runs on the {jax.default_backend()}"
        try:
            importlib.import_module(self.package)
        except ModuleNotFoundError:
            return f"not installed: pip install {self.package}, or '.[bench]' for all of its peers"
        except Exception as error:  # noqa: BLE001 - whatever a broken installation raises
            return f"cannot be imported: {' '.join(str(error).split())}"
        return None

    def version(self) -> str:
        """Return the version of what it runs."""
        try:
            return f"{self.package} {metadata.version(self.package)}"
        except metadata.PackageNotFoundError:  # cupy comes as cupy-cuda12x and the like
            return f"{self.package} {importlib.import_module(self.package).__version__}"


def on_cpu() -> bool:
    """Whether JAX runs on the CPU."""
    return jax.default_backend() == "cpu"


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def window_of(params: rx.WelchPeakParams) -> np.ndarray:
    """Return the symmetric Hann window, float32."""
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(params.n_fft) / (params.n_fft - 1))).astype(np.float32)


def power_weights(params: rx.WelchPeakParams) -> np.ndarray:
    """Return the weight of `|X|^2` in the mean over segments of the one-sided power, float32."""
    weights = np.full(params.n_bins, 2.0 / params.n_segments, np.float32)
    weights[[0, -1]] /= 2.0
    return weights


def peaks_kept(params: rx.WelchPeakParams) -> int:
    """Return the peaks without slots beyond the bins."""
    return min(params.k, params.n_bins)


def _segments(rows: np.ndarray, params: rx.WelchPeakParams, array: Any = np) -> np.ndarray:
    """Return the overlapping segments `[batch, n_segments, n_fft]` as a view, of NumPy or of cupy."""
    view = array.lib.stride_tricks.sliding_window_view(rows[:, : params.frame_len], params.n_fft, axis=1)
    return view[:, :: params.hop]


def _top_k(power: np.ndarray, params: rx.WelchPeakParams, array: Any = np) -> tuple[np.ndarray, np.ndarray]:
    """Return bins and powers of the largest powers, by a partial selection of NumPy or of cupy."""
    first = params.n_bins - peaks_kept(params)
    bins = array.argpartition(power, first, axis=1)[:, first:] if first else array.argsort(power, axis=1)
    values = array.take_along_axis(power, bins, axis=1)
    order = array.argsort(-values, axis=1)
    return array.take_along_axis(bins, order, axis=1), array.take_along_axis(values, order, axis=1)


def _placed(signal: np.ndarray, as_jax: bool = False) -> np.ndarray | jax.Array:
    """Return the samples on the device of a JAX contender."""
    return signal if on_cpu() and not as_jax else jax.block_until_ready(jax.device_put(signal))


def _ours(strategy: str, as_jax: bool = False, where: str = "") -> Contender:
    def build(signal: np.ndarray, params: rx.WelchPeakParams) -> Run:
        samples = signal if strategy == "host" else _placed(signal, as_jax)
        return lambda: jax.block_until_ready(rx.welch_peaks(samples, params, strategy))

    return Contender(build, where=where, is_ours=True)


def _jitted(program: Callable, signal: np.ndarray, as_jax: bool = False) -> Run:
    """Return a run of a program that returns powers and bins."""
    samples, to_numpy = _placed(signal, as_jax), on_cpu() and not as_jax

    def run() -> Any:
        values, bins = program(samples)
        return (np.asarray(bins), np.asarray(values)) if to_numpy else jax.block_until_ready((bins, values))

    return run


def _naive(signal: np.ndarray, params: rx.WelchPeakParams, as_jax: bool = False) -> Run:
    """The naive form."""
    window, weights, hop = window_of(params), power_weights(params), params.hop

    @jax.jit
    def program(rows):
        segments = jnp.stack([rows[:, s * hop : s * hop + params.n_fft] for s in range(params.n_segments)], 1)
        spectrum = jnp.fft.rfft(segments * window)
        power = (jnp.square(spectrum.real) + jnp.square(spectrum.imag)).sum(1) * weights
        return jax.lax.top_k(power, peaks_kept(params))

    return _jitted(program, signal, as_jax)


def _welch(welch: Callable, params: rx.WelchPeakParams, array: Any = np) -> Callable[[Any], Any]:
    """Return the power from the `welch` of scipy or of JAX, which divides by `sum(window)^2`."""
    window, overlap = window_of(params), params.n_fft - params.hop
    given = {"nperseg": params.n_fft, "noverlap": overlap, "detrend": False, "scaling": "spectrum"}
    return lambda rows: welch(rows, window=array.asarray(window), **given)[1] * window.sum() ** 2


def _jax_scipy(signal: np.ndarray, params: rx.WelchPeakParams) -> Run:
    power = _welch(jax.scipy.signal.welch, params, jnp)
    return _jitted(jax.jit(lambda rows: jax.lax.top_k(power(rows), peaks_kept(params))), signal)


def _scipy(signal: np.ndarray, params: rx.WelchPeakParams) -> Run:
    power = _welch(importlib.import_module("scipy.signal").welch, params)
    return lambda: _top_k(power(signal), params)


def _pyfftw(signal: np.ndarray, params: rx.WelchPeakParams) -> Run:
    """A planned FFTW of many rows on all cores."""
    pyfftw = importlib.import_module("pyfftw")
    shape = _chunk_rows(params, len(signal)), params.n_segments
    windowed = pyfftw.empty_aligned((*shape, params.n_fft), np.float32)
    spectrum = pyfftw.empty_aligned((*shape, params.n_bins), np.complex64)
    plan = pyfftw.FFTW(windowed, spectrum, axes=(2,), flags=("FFTW_MEASURE",), threads=cores())

    def transform(count: int) -> np.ndarray:
        plan()  # all rows, of which the last chunk has fewer
        return spectrum[:count]

    return _in_chunks(signal, params, windowed, transform)


def _mkl_fft(signal: np.ndarray, params: rx.WelchPeakParams) -> Run:
    """MKL through its NumPy interface."""
    rfft = importlib.import_module("mkl_fft.interfaces.numpy_fft").rfft
    windowed = np.zeros((_chunk_rows(params, len(signal)), params.n_segments, params.n_fft), np.float32)
    return _in_chunks(signal, params, windowed, lambda count: rfft(windowed[:count]))


def _chunk_rows(params: rx.WelchPeakParams, batch: int, samples: int = CHUNK_SAMPLES) -> int:
    return min(batch, max(1, samples // (params.n_segments * params.n_fft)))


def _in_chunks(
    signal: np.ndarray, params: rx.WelchPeakParams, windowed: np.ndarray, transform: Callable[[int], np.ndarray]
) -> Run:
    """Return a run over chunks of windowed segments; `transform` returns the spectra of a number of rows."""
    window, weights, batch = window_of(params), power_weights(params), len(signal)
    segments, step, k = _segments(signal, params), len(windowed), peaks_kept(params)

    def run() -> tuple[np.ndarray, np.ndarray]:
        bins, powers = np.empty((batch, k), np.intp), np.empty((batch, k), np.float32)
        for start in range(0, batch, step):
            chunk = segments[start : start + step]
            np.multiply(chunk, window, out=windowed[: len(chunk)])
            spectrum = transform(len(chunk))
            power = np.square(spectrum.real)
            power += np.square(spectrum.imag)
            bins[start : start + step], powers[start : start + step] = _top_k(power.sum(1) * weights, params)
        return bins, powers

    return run


def _torch(signal: np.ndarray, params: rx.WelchPeakParams, is_compiled: bool = False) -> Run:
    """Chunks of rows, which are faster on a CPU."""
    torch = importlib.import_module("torch")
    device = torch.device("cpu" if on_cpu() else "cuda")
    arrays = (signal, window_of(params), power_weights(params))
    samples, window, weights = (torch.from_numpy(array).to(device) for array in arrays)
    step = _chunk_rows(params, len(signal), CHUNK_SAMPLES * cores()) if on_cpu() else len(signal)

    def peaks(rows: Any) -> Any:
        spectrum = torch.fft.rfft(rows.unfold(1, params.n_fft, params.hop) * window)
        power = (spectrum.real.square() + spectrum.imag.square()).sum(1).mul_(weights)
        return torch.topk(power, peaks_kept(params))

    program = torch.compile(peaks) if is_compiled else peaks

    @torch.inference_mode()
    def run() -> Any:
        found = [program(rows) for rows in samples[:, : params.frame_len].split(step)]
        values, bins = found[0] if len(found) == 1 else map(torch.cat, zip(*found, strict=True))
        if not on_cpu():
            torch.cuda.synchronize()
        return bins, values

    return run


def _cupy(signal: np.ndarray, params: rx.WelchPeakParams) -> Run:
    cupy = importlib.import_module("cupy")
    samples, window, weights = map(cupy.asarray, (signal, window_of(params), power_weights(params)))

    def run() -> Any:
        spectrum = cupy.fft.rfft(_segments(samples, params, cupy) * window)
        peaks = _top_k((cupy.square(spectrum.real) + cupy.square(spectrum.imag)).sum(1) * weights, params, cupy)
        cupy.cuda.get_current_stream().synchronize()
        return peaks

    return run


def copied(signal: np.ndarray, params: rx.WelchPeakParams) -> Run:
    """Return a run that copies as many bytes on the device as samples and peaks have."""
    elements = len(signal) * (params.frame_len + 2 * params.k) // 2
    source = jax.block_until_ready(jnp.zeros((elements,), jnp.float32))
    program = jax.jit(lambda array: array + 1.0)
    return lambda: program(source).block_until_ready()


CONTENDERS = {
    "fused": _ours("fused"),
    "fused-jax": _ours("fused", as_jax=True, where="cpu"),
    "host": _ours("host"),
    "auto": _ours("auto"),
    "naive": Contender(_naive),
    "naive-jax": Contender(functools.partial(_naive, as_jax=True), where="cpu"),
    "jax.scipy": Contender(_jax_scipy),
    "scipy": Contender(_scipy, "scipy"),
    "pyfftw": Contender(_pyfftw, "pyfftw"),
    "mkl_fft": Contender(_mkl_fft, "mkl_fft"),
    "torch": Contender(_torch, "torch"),
    "torch.compile": Contender(functools.partial(_torch, is_compiled=True), "torch", where="gpu"),
    "cupy": Contender(_cupy, "cupy", where="gpu"),
}
