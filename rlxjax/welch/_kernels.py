"""A single kernel for Welch peaks on GPUs and TPUs. It reads samples and writes peaks; all else stays on the chip.

The chip's matrix units compute the transforms as products with matrices of cosines and sines. The powers are stored in
the order that needs the least work, and a table holds the bin number of each power.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from rlxjax._checks import is_symbolic
from rlxjax._schedule import schedule

from ._workload import WelchPeakParams, hann_window

#: For each platform that has kernels: the name of the platform in `lax.platform_dependent`.
KERNEL_COMPILERS = {"gpu": "cuda", "tpu": "tpu"}
#: The least compute capability of an NVIDIA GPU that runs the kernel: that of Ampere GPUs.
LEAST_COMPUTE_CAPABILITY = 8.0
#: The number of lanes in a vector register of a TPU. Each lane holds a row.
TPU_LANES = 128
#: The largest number of samples in a segment that a TPU multiplies by a matrix. Longer segments are halved first.
MOST_WHOLE_SAMPLES = 256
#: Two values below all powers: the first replaces a NaN power, and the second replaces the power of a selected bin.
_NAN, _FOUND = -1.0, -2.0
#: A 32-bit zero, because kernels on TPUs have no 64-bit integers.
_ZERO = np.int32(0)


def has_kernel(batch: Any, params: WelchPeakParams, platform: str) -> bool:
    """Whether a platform has a kernel for peaks of these sizes."""
    plan, n_fft = schedule(platform), params.n_fft
    is_sized = n_fft & (n_fft - 1) == 0 and plan.least_n_fft_kernel <= n_fft <= plan.most_n_fft_kernel
    is_counted = params.k <= plan.most_k_kernel and not is_symbolic(batch) and batch > 0
    return is_sized and is_counted and _compiles_kernels(platform)


def kernel_rows(params: WelchPeakParams, platform: str) -> int:
    """Return the number of rows that one step of a kernel computes."""
    rows = max(1, schedule(platform).kernel_samples // params.n_fft)
    return max(TPU_LANES, rows) if platform == "tpu" else rows


@functools.cache
def _compiles_kernels(platform: str) -> bool:
    """Whether kernels compile for the devices of a platform. True if this machine has no device of the platform."""
    if platform != "gpu":
        return platform in KERNEL_COMPILERS
    try:
        found = [getattr(device, "compute_capability", None) for device in jax.local_devices(backend=platform)]
    except RuntimeError:
        return True
    return all(found) and all(float(each) >= LEAST_COMPUTE_CAPABILITY for each in found if each)


def kernel_peaks(
    signal: Float[Array, "batch length"], params: WelchPeakParams, platform: str, interpret: bool = False
) -> Float[Array, "batch k 2"]:
    """Return the peaks of rows from a platform's kernel, which has no derivative. `has_kernel` must be true."""
    return {"gpu": _on_gpu, "tpu": _on_tpu}[platform](signal, params, interpret)


def _select(powers: tuple[Array, Array], bins: Array, k: int, axis: int, kept: Any, keep: Any) -> Any:
    """Pass the k largest powers and their bins to `keep`. `powers` holds the powers of `bins`, and that of Nyquist."""
    nyquist_bin = bins.shape[axis]
    others, nyquist = (jnp.where(power != power, _NAN, power) for power in powers)

    def turned(state: tuple[Array, Array, Array, Any]) -> tuple[Array, Array, Array, Any]:
        turn, others, nyquist, kept = state
        largest = jnp.maximum(jnp.max(others, axis, keepdims=True), nyquist)
        is_largest = jnp.where(others == largest, bins, nyquist_bin)
        bin_ = jnp.min(is_largest, axis, keepdims=True)  # among equal powers, the lower bin comes first
        kept = keep(kept, turn, bin_.astype(jnp.float32), jnp.where(largest == _NAN, jnp.nan, largest))
        others = jnp.where(bins == bin_, _FOUND, others)
        return turn + 1, others, jnp.where(bin_ == nyquist_bin, _FOUND, nyquist), kept

    # A `fori_loop` would count in 64 bits in JAX's 64-bit mode.
    return lax.while_loop(lambda state: state[0] < k, turned, (jnp.asarray(_ZERO), others, nyquist, kept))[-1]


def _waves(bins: np.ndarray, places: np.ndarray, period: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the cosines and the sines of bins at the samples `places`, each `[bins, places]`."""
    angle = 2 * np.pi * (np.outer(bins, places) % period) / period
    return np.cos(angle), np.sin(angle)


def _called(kernel: Any, batch: int, rows: int, tables: list[np.ndarray], interpret: bool, **specs: Any) -> Any:
    from jax.experimental import pallas as pl

    def whole(table: np.ndarray) -> Any:
        return pl.BlockSpec(table.shape, lambda _: (_ZERO,) * table.ndim)

    in_specs = [specs.pop("in_specs"), *map(whole, tables)]
    call = pl.pallas_call(kernel, grid=(-(-batch // rows),), in_specs=in_specs, interpret=interpret, **specs)
    return lambda signal: call(signal, *map(jnp.asarray, tables))


def _like(shape: tuple[int, ...], signal: Array) -> Any:
    """Return the shape and dtype of float32 results that vary over the same mesh axes as the signal."""
    return jax.eval_shape(lambda rows: jnp.broadcast_to(rows[0, 0], shape), signal)


@functools.lru_cache(maxsize=8)
def _tpu_tables(params: WelchPeakParams) -> list[np.ndarray]:
    """Return the window, the bin numbers, and matrices `[rows, samples]` whose rows are cosines, then sines."""
    # The sum of a segment's two halves gives the even bins, and the difference gives the odd bins. The row of DC's
    # sine, which is zero, holds Nyquist instead.
    n_fft, matrices, bins = params.n_fft, [], []
    step, samples = 1, n_fft
    while samples > MOST_WHOLE_SAMPLES:
        odd = np.arange(1, samples // 2, 2)
        matrices.append(np.concatenate(_waves(odd, np.arange(samples // 2), samples)) * math.sqrt(2))
        bins.append(step * odd)
        step, samples = 2 * step, samples // 2
    even = np.arange(samples // 2)
    cosines, sines = (waves * math.sqrt(2) for waves in _waves(even, np.arange(samples), samples))
    cosines[0], sines[0] = 1.0, 1.0 - 2.0 * (np.arange(samples) % 2)
    matrices.append(np.concatenate([cosines, sines]))
    bins.append(step * even)
    window = hann_window(n_fft)[None] / math.sqrt(params.n_segments)
    numbers = np.concatenate(bins).astype(np.int32)[:, None]
    return [window.astype(np.float32), numbers, *(matrix.astype(np.float32) for matrix in matrices)]


def _on_tpu(signal: Array, params: WelchPeakParams, interpret: bool) -> Array:
    """Return the peaks of rows on a TPU. A register holds one bin of many rows, so maxima compare registers."""
    from jax.experimental import pallas as pl

    n_fft, hop, k = params.n_fft, params.hop, params.k
    window, bins, *matrices = _tpu_tables(params)

    def kernel(signal_ref: Any, window_ref: Any, bins_ref: Any, *refs: Any) -> None:
        *matrix_refs, peaks_ref = refs

        def squares(matrix_ref: Any, samples: Array) -> Array:
            options: dict[str, Any] = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
            return jnp.square(lax.dot_general(matrix_ref[...], samples, (((1,), (1,)), ((), ())), **options))

        totals: list[Any] = [0.0] * len(matrix_refs)
        for first in range(0, params.n_segments * hop, hop):
            samples = signal_ref[:, first : first + n_fft] * window_ref[...]
            for i, matrix_ref in enumerate(matrix_refs[:-1]):
                one, two = jnp.split(samples, 2, axis=1)
                totals[i] += squares(matrix_ref, one - two)
                samples = one + two
            totals[-1] += squares(matrix_refs[-1], samples)
        cosines, sines = zip(*(jnp.split(total, 2) for total in totals), strict=True)
        is_dc = lax.broadcasted_iota(jnp.int32, cosines[-1].shape, 0) == 0
        others = [*map(jnp.add, cosines[:-1], sines[:-1]), cosines[-1] + jnp.where(is_dc, 0.0, sines[-1])]

        def keep(kept: int, turn: Any, bin_: Array, power: Array) -> int:
            peaks_ref[pl.ds(2 * turn, 1), :] = bin_
            peaks_ref[pl.ds(2 * turn + 1, 1), :] = power
            return kept

        _select((jnp.concatenate(others), sines[-1][:1]), bins_ref[...], k, 0, 0, keep)

    batch, rows = signal.shape[0], kernel_rows(params, "tpu")
    specs = {
        "in_specs": pl.BlockSpec((rows, params.frame_len), lambda i: (i, _ZERO)),
        "out_specs": pl.BlockSpec((2 * k, rows), lambda i: (_ZERO, i)),
        "out_shape": _like((2 * k, batch), signal),
    }
    call = _called(kernel, batch, rows, [window, bins, *matrices], interpret, **specs)
    return call(signal).reshape(k, 2, batch).transpose(2, 0, 1)


@functools.lru_cache(maxsize=8)
def _gpu_tables(params: WelchPeakParams) -> list[np.ndarray]:
    """Return the tables of a two-step transform of samples `second*i + j`, with `i < first`, to bins `k + first*m`."""
    # The window `[j, i]`; cosines and sines of the first factor `[i, k]`, and of the twiddles `[j, k]`; matrices of the
    # second factor for real and for imaginary input, `[j, real then imaginary m]`.
    n_fft = params.n_fft
    second = 1 << (n_fft.bit_length() - 1) // 2
    first = n_fft // second
    window = hann_window(n_fft).reshape(first, second).T / math.sqrt(params.n_segments)
    ones, twos = np.arange(first), np.arange(second)
    cosines, sines = _waves(twos, twos[: second // 2], second)
    products = np.concatenate([cosines, sines], 1), np.concatenate([-sines, cosines], 1)
    tables = window, *_waves(ones, ones, first), *_waves(twos, ones, n_fft), *products
    return [table.astype(np.float32) for table in tables]


def _on_gpu(signal: Array, params: WelchPeakParams, interpret: bool) -> Array:
    """Return the peaks of rows on a GPU. The samples of a segment form a matrix `[second, first]`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    n_fft, hop, k = params.n_fft, params.hop, params.k
    tables = _gpu_tables(params)
    second, first = tables[0].shape
    batch, rows = signal.shape[0], kernel_rows(params, "gpu")
    slots = 1 << (k - 1).bit_length()
    precision = None if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3

    def kernel(signal_ref: Any, window_ref: Any, *refs: Any) -> None:
        *table_refs, peaks_ref = refs
        one_cos, one_sin, between_cos, between_sin, real, imaginary = (ref[...] for ref in table_refs)

        def product(samples: Array, matrix: Array) -> Array:
            return jnp.dot(samples, matrix, precision=precision, preferred_element_type=jnp.float32)

        def places(shape: tuple[int, ...], axis: int) -> Array:
            return lax.broadcasted_iota(jnp.int32, shape, axis)

        shape, halves = (rows, second, first), (rows, first, second // 2)
        row = jnp.minimum(pl.program_id(0) * rows + places(shape, 0), batch - 1)
        sample = second * places(shape, 2) + places(shape, 1)
        total, nyquist = jnp.zeros(halves, jnp.float32), jnp.zeros((rows, 1), jnp.float32)
        for start in range(0, params.n_segments * hop, hop):
            samples = triton.load(signal_ref.at[row, start + sample]) * window_ref[...][None]
            signed = jnp.where(places(shape, 1) % 2 == 0, samples, -samples).reshape(rows, n_fft)
            nyquist += jnp.square(jnp.sum(signed, 1, keepdims=True))
            lined = samples.reshape(rows * second, first)
            cos, sin = (product(lined, wave).reshape(shape) for wave in (one_cos, one_sin))
            real_part = cos * between_cos[None] - sin * between_sin[None]
            turned = real_part, cos * between_sin[None] + sin * between_cos[None]
            cos, sin = (part.transpose(0, 2, 1).reshape(rows * first, second) for part in turned)
            parts = product(cos, real) + product(sin, imaginary)
            total += jnp.sum(jnp.square(parts).reshape(rows, first, 2, second // 2), 2)
        bins = (places(halves, 1) + first * places(halves, 2)).reshape(rows, hop)
        weighted = total.reshape(rows, hop) * jnp.where(bins == 0, 1.0, 2.0)
        slot = places((rows, 2 * slots), 1)

        def keep(kept: Array, turn: Any, bin_: Array, power: Array) -> Array:
            return jnp.where(slot == 2 * turn, bin_, jnp.where(slot == 2 * turn + 1, power, kept))

        nothing = jnp.zeros(slot.shape, jnp.float32)
        peaks_ref[...] = _select((weighted, nyquist), bins, k, 1, nothing, keep)

    specs = {
        "in_specs": pl.BlockSpec(memory_space=pl.ANY),
        "out_specs": pl.BlockSpec((rows, 2 * slots), lambda i: (i, _ZERO)),
        "out_shape": _like((-(-batch // rows) * rows, 2 * slots), signal),
        "compiler_params": triton.CompilerParams(num_warps=4, num_stages=1),
    }
    call = _called(kernel, batch, rows, tables, interpret, **specs)
    return call(signal)[:batch].reshape(batch, slots, 2)[:, :k]
