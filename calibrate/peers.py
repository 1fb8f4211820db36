"""Who takes part in the benchmark: this library, the naive form, and every peer that is installed.

A run goes from samples to finished peaks (bins and powers) and returns when they are there. On a CPU the
samples are a NumPy array, and so are the peaks; `fused-jax` and `naive-jax` take and give JAX arrays. Where
JAX runs on another device, the samples are on it before the clock starts for ours (but for `host`), naive,
jax.scipy, torch and cupy alike, and the peaks stay there; the other peers work on the host from NumPy arrays
as ever.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax import Calibration, WelchPeakParams, welch_peaks

from .bench_c import CWelch, c_unavailable, c_version, cores
from .bench_numpy import (
    CHUNK_SAMPLES,
    chunk_rows,
    mkl_fft_run,
    peaks_kept,
    power_weights,
    pyfftw_run,
    scipy_run,
    welch_arguments,
    welch_window,
)

#: Peers that `pip install 'rlxjax[bench]'` brings.
EXTRA = ("mkl_fft", "pyfftw", "torch")
#: Returns peaks: one array `[batch, k, 2]` of (bin, power), or two of bins and of powers `[batch, k]`.
Run = Callable[[], object]
Build = Callable[[np.ndarray, WelchPeakParams], Run]


@dataclasses.dataclass(frozen=True)
class Contender:
    """One that takes part.

    Attributes:
        name: what it is called in tables.
        build: does all that is done once (plans, uploads, compiling); the run that it returns is timed.
        unavailable: why it cannot run here, a sentence, or None.
        version: of what it runs.
        is_ours: whether it is a path of this library.
        has_result: whether it computes peaks; the copy of as many bytes does not.
    """

    name: str
    build: Build
    unavailable: Callable[[], str | None] = lambda: None
    version: Callable[[], str] = lambda: f"jax {jax.__version__}"
    is_ours: bool = False
    has_result: bool = True


def contenders(
    calibration: Calibration | None = None, names: Sequence[str] = ()
) -> tuple[list[Contender], dict[str, str]]:
    """Return those that can run here, and of the others the reason by name.

    Args:
        calibration: what `auto` decides by; the built-in coefficients unless given.
        names: those wanted; all unless given.

    Raises:
        ValueError: a name that nobody has.
    """
    listed = (
        _ours("fused", "fused"),
        _ours("fused-jax", "fused", as_jax=True, unavailable=_beside_a_device),
        _ours("host", "host", version=lambda: f"numpy {np.__version__}"),
        _ours("auto", "auto", calibration),
        Contender("naive", _naive),
        Contender("naive-jax", functools.partial(_naive, as_jax=True), unavailable=_beside_a_device),
        Contender("jax.scipy", _jax_scipy),
        _peer("scipy", scipy_run, "scipy.signal"),
        _peer("pyfftw", pyfftw_run),
        _peer("mkl_fft", mkl_fft_run),
        _peer("torch", _torch, also=_torch_lacks_the_device),
        Contender("c-fftw", CWelch, c_unavailable, c_version),
        Contender("c-fftw-insertion", functools.partial(CWelch, inserts=True), c_unavailable, c_version),
        _peer("cupy", _cupy, also=lambda: "runs on a GPU only, and JAX runs on the CPU" if on_cpu() else None),
        Contender("copy", _copy, has_result=False),
    )
    known = [contender.name for contender in listed]
    for name in names:
        if name not in known:
            raise ValueError(f"--contender: expected one of {', '.join(known)}, got {name!r}")
    found, skipped = [], {}
    for contender in listed:
        if names and contender.name not in names:
            continue
        if reason := contender.unavailable():
            skipped[contender.name] = reason
        else:
            found.append(contender)
    return found, skipped


def _peer(
    name: str, build: Build, module: str | None = None, also: Callable[[], str | None] = lambda: None
) -> Contender:
    """Return a peer of the name that pip knows; it runs where its module loads and `also` gives no reason."""
    module = module or name
    wanted = "'rlxjax[bench]'" if name in EXTRA else name

    def unavailable() -> str | None:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            return f"not installed: pip install {wanted}"
        except Exception as error:  # noqa: BLE001 - whatever a broken installation raises
            return f"cannot be imported: {' '.join(str(error).split())}"
        return also()

    def version() -> str:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:  # cupy comes as cupy-cuda12x and the like
            return f"{name} {importlib.import_module(module).__version__}"

    return Contender(name, build, unavailable, version)


def on_cpu() -> bool:
    """Whether JAX runs on the CPU."""
    return jax.default_backend() == "cpu"


def _beside_a_device() -> str | None:
    return None if on_cpu() else "for a CPU: on another device all samples of JAX are JAX arrays"


def _placed(signal: np.ndarray, as_jax: bool = False) -> np.ndarray | jax.Array:
    """Return the samples where a JAX contender finds them."""
    return signal if on_cpu() and not as_jax else jax.block_until_ready(jax.device_put(signal))


def _ours(
    name: str, strategy: str, calibration: Calibration | None = None, as_jax: bool = False, **others: Any
) -> Contender:
    def build(signal: np.ndarray, params: WelchPeakParams) -> Run:
        placed = signal if strategy == "host" else _placed(signal, as_jax)
        return lambda: jax.block_until_ready(welch_peaks(placed, params, strategy, calibration=calibration))

    return Contender(name, build, is_ours=True, **others)


def _naive(signal: np.ndarray, params: WelchPeakParams, as_jax: bool = False) -> Run:
    """What one writes first."""
    window, weights, hop = welch_window(params.n_fft), power_weights(params), params.hop

    @jax.jit
    def program(rows):
        segments = jnp.stack([rows[:, s * hop : s * hop + params.n_fft] for s in range(params.n_segments)], 1)
        spectrum = jnp.fft.rfft(segments * window[None, None])
        power = (jnp.square(spectrum.real) + jnp.square(spectrum.imag)).sum(1) * weights[None]
        return jax.lax.top_k(power, peaks_kept(params))

    return _jitted(program, signal, as_jax)


def _jax_scipy(signal: np.ndarray, params: WelchPeakParams) -> Run:
    window = welch_window(params.n_fft)

    @jax.jit
    def program(rows):
        _, power = jax.scipy.signal.welch(rows, **welch_arguments(params, jnp.asarray(window)))
        return jax.lax.top_k(power * window.sum() ** 2, peaks_kept(params))

    return _jitted(program, signal)


def _jitted(program: Callable, signal: np.ndarray, as_jax: bool = False) -> Run:
    placed, to_numpy = _placed(signal, as_jax), on_cpu() and not as_jax

    def run() -> object:
        values, bins = program(placed)
        return (np.asarray(bins), np.asarray(values)) if to_numpy else jax.block_until_ready((bins, values))

    return run


def _torch(signal: np.ndarray, params: WelchPeakParams) -> Run:
    """On a CPU in chunks of rows, which is faster there."""
    torch = importlib.import_module("torch")
    device = torch.device("cpu" if on_cpu() else "cuda")
    mean_weights = power_weights(params) * np.float32(params.n_segments)
    arrays = (signal, welch_window(params.n_fft), mean_weights)
    samples, window, weights = (torch.from_numpy(array).to(device) for array in arrays)
    step = chunk_rows(params, len(signal), CHUNK_SAMPLES * cores()) if on_cpu() else len(signal)
    k = peaks_kept(params)

    @torch.inference_mode()
    def run() -> object:
        found = []
        for rows in samples[:, : params.frame_len].split(step):
            spectrum = torch.fft.rfft(rows.unfold(1, params.n_fft, params.hop) * window)
            power = (spectrum.real.square() + spectrum.imag.square()).mean(1).mul_(weights)
            found.append(torch.topk(power, k))
        values, bins = found[0] if len(found) == 1 else map(torch.cat, zip(*found, strict=True))
        if not on_cpu():
            torch.cuda.synchronize()
        return bins, values

    return run


def _torch_lacks_the_device() -> str | None:
    lacks = not on_cpu() and not importlib.import_module("torch").cuda.is_available()
    return "the installed torch finds no GPU, which JAX runs on" if lacks else None


def _cupy(signal: np.ndarray, params: WelchPeakParams) -> Run:
    cupy = importlib.import_module("cupy")
    samples, window, weights = map(cupy.asarray, (signal, welch_window(params.n_fft), power_weights(params)))
    k = peaks_kept(params)

    def run() -> object:
        view = cupy.lib.stride_tricks.sliding_window_view(samples[:, : params.frame_len], params.n_fft, axis=1)
        spectrum = cupy.fft.rfft(view[:, :: params.hop] * window)
        power = (cupy.square(spectrum.real) + cupy.square(spectrum.imag)).sum(1) * weights
        bins = cupy.argpartition(power, params.n_bins - k, axis=1)[:, params.n_bins - k :]
        values = cupy.take_along_axis(power, bins, axis=1)
        order = cupy.argsort(-values, axis=1)
        peaks = cupy.take_along_axis(bins, order, axis=1), cupy.take_along_axis(values, order, axis=1)
        cupy.cuda.get_current_stream().synchronize()
        return peaks

    return run


def _copy(signal: np.ndarray, params: WelchPeakParams) -> Run:
    """Copy on the device what reads and writes as many bytes as samples and peaks are."""
    elements = len(signal) * (params.frame_len + 2 * params.k) // 2
    source = jax.block_until_ready(jnp.zeros((elements,), jnp.float32))
    program = jax.jit(lambda array: array + 1.0)
    return lambda: program(source).block_until_ready()
