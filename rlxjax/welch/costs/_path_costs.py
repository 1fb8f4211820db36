"""What each path of a run costs by the built-in formulas, whatever the gate says of it."""

import functools
from collections.abc import Callable

import jax

from rlxjax._checks import check_at_least
from rlxjax._counts import as_float, as_temperature
from rlxjax._numerics import Choices
from rlxjax._typing import Code, Nanoseconds, RealLike
from rlxjax.welch._workload import FAST_SEGMENTS

from ._coefficients import CoefficientSet
from ._formulas import block_ns, fused_ns, gather, host_ns
from ._inputs import cost_inputs


def fused_graph_ns(
    device: str | Code,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    scale: RealLike = 1.0,
    coefficients: str | CoefficientSet = "arch",
    n_segments: RealLike = FAST_SEGMENTS,
) -> Nanoseconds:
    """Return the estimate of the fused graph in ns, `[*batch]`.

    Args:
        device: a name, or device codes.
        batch: rows of the signal.
        n_fft: samples of a segment.
        k: peaks of a row.
        scale: of the device's work; below 1 for a pruned learned FFT.
        coefficients: "arch", "portable", or a set of your own.
        n_segments: segments of a row.

    Raises:
        ValueError: an unknown device or set, or a size that cannot be.

    Examples:
        >>> print(fused_graph_ns("cpu", 1, 256, 16).round(2))
        8664.53
    """
    sizes = {"batch": batch, "n_fft": n_fft, "k": k, "n_segments": n_segments}
    return _fused_graph_ns(device, coefficients, sizes, scale, None)


def soft_fused_graph_ns(
    device: str | Code,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    scale: RealLike = 1.0,
    coefficients: str | CoefficientSet = "arch",
    n_segments: RealLike = FAST_SEGMENTS,
    *,
    temperature_ns: RealLike,
) -> Nanoseconds:
    """Return the smooth form of `fused_graph_ns` in ns, `[*batch]`.

    Other arguments and errors as of `fused_graph_ns`; `temperature_ns` is positive, a scalar or `[*batch]`.

    Examples:
        >>> print(soft_fused_graph_ns("cpu", 1, 256, 16, temperature_ns=1e-3).round(2))
        8664.53
    """
    sizes = {"batch": batch, "n_fft": n_fft, "k": k, "n_segments": n_segments}
    return _fused_graph_ns(device, coefficients, sizes, scale, as_temperature(temperature_ns))


def block_graph_ns(
    device: str | Code,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    coefficients: str | CoefficientSet = "arch",
    n_segments: RealLike = FAST_SEGMENTS,
) -> Nanoseconds:
    """Return the estimate of the block form (spectrum read back, top-k on the host) in ns, `[*batch]`.

    Arguments as of `fused_graph_ns`.

    Examples:
        >>> bool(block_graph_ns("cpu", 1, 256, 16) < fused_graph_ns("cpu", 1, 256, 16))
        True
    """
    inputs = cost_inputs(device, coefficients, batch=batch, n_fft=n_fft, k=k, n_segments=n_segments)
    return _path_ns(block_ns, *inputs)


def host_path_ns(
    device: str | Code,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    coefficients: str | CoefficientSet = "arch",
    n_segments: RealLike = FAST_SEGMENTS,
) -> Nanoseconds:
    """Return the estimate of the host path in ns, `[*batch]`: `adjust(host(params))`.

    Arguments as of `fused_graph_ns`.

    Examples:
        >>> print(host_path_ns("cpu", 1, 256, 16).round(1))
        4165.6
    """
    inputs = cost_inputs(device, coefficients, batch=batch, n_fft=n_fft, k=k, n_segments=n_segments)
    return _path_ns(host_ns, *inputs)


def _fused_graph_ns(device, coefficients, sizes, scale, temperature_ns) -> Nanoseconds:
    check_at_least(scale, "scale", what="number")
    others = {"scale": scale, "temperature_ns": 1.0 if temperature_ns is None else temperature_ns}
    inputs = cost_inputs(device, coefficients, others, **sizes)
    return _path_ns(fused_ns, *inputs, as_float(scale, "scale"), temperature_ns=temperature_ns)


@functools.partial(jax.jit, static_argnums=0)
def _path_ns(formula: Callable[..., Nanoseconds], codes, set_, *inputs, temperature_ns=None) -> Nanoseconds:
    return formula(gather(set_, codes), *inputs, Choices(temperature_ns))
