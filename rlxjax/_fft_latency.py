"""The latency of a batched FFT alone, and its fit: for timings of machines that nobody here can run on."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._checks import check_shapes, check_sizes, fields_of
from ._counts import size_as_float
from ._device import Coefficients
from ._device_fits import DeviceFits, fit_coefficients_of_devices
from ._fit import FitResult, fit_coefficients
from ._latency_formulas import device_work_ns
from ._prior import LatencyPrior, wide_prior
from ._timings import MIN_TIMINGS, checked_columns
from ._typing import Nanoseconds, RealLike

#: Compute time falls with the batch as `(1 + batch / onset_rows)**-BATCH_EXPONENT`; below 1, so that more
#: rows never take less time.
BATCH_EXPONENT = 1 / 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FftLatencyCoefficients(Coefficients):
    """What a batched FFT takes on one execution path; every field positive, `[*batch]`.

    Attributes:
        call_ns: one call, whatever its size.
        row_ns: one transform, apart from its operations.
        flop_per_ns: FFT operations of a small batch, `2.5 n log2 n` a row.
        bytes_per_ns: memory, 20 bytes a sample; no batch is faster than this.
        onset_rows: the batch from which more rows keep the device better occupied; very large where rows
            are worked through one by one.
    """

    call_ns: RealLike
    row_ns: RealLike
    flop_per_ns: RealLike
    bytes_per_ns: RealLike
    onset_rows: RealLike


def fft_latency_ns(coefficients: FftLatencyCoefficients, batch: RealLike, n_fft: RealLike) -> Nanoseconds:
    """Return the predicted latency of `batch` FFTs of `n_fft` real samples, `[*batch]`.

    `call_ns + roofline(compute / (1 + batch / onset_rows)**(1/3), memory)`, with the roofline, the counts
    and the cost of a row of the Welch-peaks model.

    Args:
        coefficients: of the execution path.
        batch: rows, a scalar or `[*batch]`.
        n_fft: samples of a row, an even number, a scalar or `[*batch]`.

    Raises:
        ValueError: a negative or NaN size, an odd n_fft, or shapes that do not broadcast.

    Examples:
        >>> serial = FftLatencyCoefficients(
        ...     call_ns=1e4, row_ns=50.0, flop_per_ns=2.0, bytes_per_ns=20.0, onset_rows=1e9)
        >>> round(float(fft_latency_ns(serial, 2048, 1024)) / 1e6, 1)
        26.4
    """
    check_sizes(batch=batch, n_fft=n_fft)
    check_shapes(batch=batch, n_fft=n_fft, **fields_of(coefficients))
    return _latency_ns(coefficients, size_as_float(batch, "batch"), size_as_float(n_fft, "n_fft"))


@jax.jit
def _latency_ns(c: FftLatencyCoefficients, batch, n_fft) -> Nanoseconds:
    work_ns = device_work_ns(
        batch,
        n_fft,
        row_ns=c.row_ns,
        flop_per_ns=c.flop_per_ns,
        bytes_per_ns=c.bytes_per_ns,
        speedup=(1.0 + batch / c.onset_rows) ** BATCH_EXPONENT,
    )
    return jnp.add(c.call_ns, work_ns)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FftTimings:
    """Measured batched FFTs of one execution path, one entry a workload; every field `[n]`.

    Attributes:
        batch: rows.
        n_fft: samples of a row.
        time_ns: the time of one call.
    """

    batch: np.ndarray | Float[Array, "n"]
    n_fft: np.ndarray | Float[Array, "n"]
    time_ns: np.ndarray | Float[Array, "n"]

    @classmethod
    def checked(cls, *, batch, n_fft, time_ns) -> Self:
        """Build from lists or arrays.

        Raises:
            ValueError: columns of unequal length, or a size or time that is not positive and finite.

        Examples:
            >>> FftTimings.checked(batch=[32, 256], n_fft=[64, 64], time_ns=[2e4, 7e4]).time_ns.shape
            (2,)
        """
        shape = np.shape(batch)
        if len(shape) != 1:
            raise ValueError(f"batch: expected one axis, got shape {shape}")
        columns = {"batch": batch, "n_fft": n_fft, "time_ns": time_ns}
        return cls(**checked_columns("batch", shape, columns))


#: The calls, rates and rows of `typical_prior`'s device (its call with one launch and one wait).
_TYPICAL = FftLatencyCoefficients(
    call_ns=6e4, row_ns=50.0, flop_per_ns=10.0, bytes_per_ns=20.0, onset_rows=1e3
)


def typical_fft_prior() -> LatencyPrior[FftLatencyCoefficients]:
    """Return the wide prior that `fit_fft_latency` starts from."""
    return wide_prior(_TYPICAL)


def fit_fft_latency(
    timings: FftTimings,
    prior: LatencyPrior[FftLatencyCoefficients] | None = None,
    weights: np.ndarray | Float[Array, "n"] | None = None,
    min_timings: int = MIN_TIMINGS,
) -> FitResult[FftLatencyCoefficients]:
    """Fit the latency of one execution path's batched FFT, by the fit that `fit_latency` is.

    Args:
        timings: one entry a workload, `[n]`.
        prior: what is believed beforehand; a wide prior unless given.
        weights: `[n]`, 0 leaves an entry out (and keeps the shapes, so nothing is compiled anew).
        min_timings: fewer that count are refused; a prior from other paths (`pooled_prior`) does with few.

    Raises:
        ValueError: fewer than `min_timings` timings that count, or all of one workload.

    Examples:
        >>> import numpy as np
        >>> batch, n_fft = np.repeat([32, 256, 2048], 4), np.tile([64, 256, 1024, 4096], 3)
        >>> timings = FftTimings.checked(batch=batch, n_fft=n_fft, time_ns=2e4 + 12.0 * batch * n_fft)
        >>> result = fit_fft_latency(timings)
        >>> predicted = fft_latency_ns(result.coefficients, 1024, 512)
        >>> bool(abs(predicted / (2e4 + 12.0 * 1024 * 512) - 1) < 0.1)
        True
    """
    prior = typical_fft_prior() if prior is None else prior
    return fit_coefficients(_predicted_ns, timings, prior, weights, min_timings)


def fit_fft_devices(
    timings: FftTimings,
    prior: LatencyPrior[FftLatencyCoefficients] | None = None,
    weights: np.ndarray | Float[Array, "devices n"] | None = None,
    min_timings: int = MIN_TIMINGS,
) -> DeviceFits[FftLatencyCoefficients]:
    """Fit the batched FFT of many devices or paths at once: `fit_fft_latency` of each, as `fit_devices` does.

    Args:
        timings: every column `[devices, n]`; `stack_timings` makes them of several.
        prior: of every device, or with leaves `[devices]`; a wide prior unless given.
        weights: `[devices, n]`, 0 leaves an entry out.
        min_timings: fewer of a device that count are refused.

    Raises:
        ValueError: as `fit_devices`.

    Examples:
        >>> import numpy as np
        >>> batch, n_fft = np.repeat([32, 256, 2048], 4), np.tile([64, 256, 1024, 4096], 3)
        >>> timings = [FftTimings.checked(batch=batch, n_fft=n_fft, time_ns=2e4 + rate * batch * n_fft)
        ...            for rate in (3.0, 12.0)]
        >>> fits = fit_fft_devices(jax.tree.map(lambda *columns: np.stack(columns), *timings))
        >>> times = np.asarray(fft_latency_ns(fits.coefficients, 1024, 512))
        >>> bool(np.all(abs(times / (2e4 + np.array([3.0, 12.0]) * 1024 * 512) - 1) < 0.1))
        True
    """
    prior = typical_fft_prior() if prior is None else prior
    return fit_coefficients_of_devices(_predicted_ns, timings, prior, weights, min_timings)


def _predicted_ns(coefficients: FftLatencyCoefficients, timings: FftTimings) -> Nanoseconds:
    return fft_latency_ns(coefficients, timings.batch, timings.n_fft)
