"""What each path of a run costs by the built-in formulas, whatever the gate says of it."""

import jax
import jax.numpy as jnp

from rlxjax._checks import LEAST_SIZES, check_shapes
from rlxjax._counts import as_temperature
from rlxjax._numerics import Exact, rules_at
from rlxjax._typing import Code, Nanoseconds, RealLike
from rlxjax.welch._params import FAST_SEGMENTS

from ._coefficients import CoefficientSet
from ._costs import cost_inputs, learned_inputs
from ._formulas import Learned, block_ns, fused_ns, gather, host_ns


def fused_graph_ns(
    device: str | Code,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    scale: RealLike = 1.0,
    coefficients: str | CoefficientSet = "arch",
    n_segments: RealLike = FAST_SEGMENTS,
) -> Nanoseconds:
    """Return the estimate of the fused graph in ns, `[*batch]` (SPEC, section 5).

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
    inputs = cost_inputs(device, batch, n_fft, k, coefficients, n_segments=n_segments, scale=scale)
    return _fused_graph_ns(*inputs, None)


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
    temperature_ns = as_temperature(temperature_ns)
    others = {"n_segments": n_segments, "scale": scale, "temperature_ns": temperature_ns}
    inputs = cost_inputs(device, batch, n_fft, k, coefficients, **others)
    return _fused_graph_ns(*inputs, temperature_ns)


def block_graph_ns(
    device: str | Code,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    coefficients: str | CoefficientSet = "arch",
    n_segments: RealLike = FAST_SEGMENTS,
) -> Nanoseconds:
    """Return the estimate of the block form (spectrum read back, top-k on the host) in ns, `[*batch]`.

    Args:
        device: a name, or device codes.
        batch: rows of the signal.
        n_fft: samples of a segment.
        k: peaks of a row.
        coefficients: "arch", "portable", or a set of your own.
        n_segments: segments of a row.

    Raises:
        ValueError: an unknown device or set, or a size that cannot be.

    Examples:
        >>> bool(block_graph_ns("cpu", 1, 256, 16) < fused_graph_ns("cpu", 1, 256, 16))
        True
    """
    return _block_graph_ns(*cost_inputs(device, batch, n_fft, k, coefficients, n_segments=n_segments))


def host_path_ns(
    device: str | Code,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    coefficients: str | CoefficientSet = "arch",
    n_segments: RealLike = FAST_SEGMENTS,
) -> Nanoseconds:
    """Return the estimate of the host path in ns, `[*batch]`: `adjust(host(params))` (SPEC, section 5).

    Args:
        device: a name, or device codes.
        batch: rows of the signal.
        n_fft: samples of a segment.
        k: peaks of a row.
        coefficients: "arch", "portable", or a set of your own.
        n_segments: segments of a row.

    Raises:
        ValueError: an unknown device or set, or a size that cannot be.

    Examples:
        >>> print(host_path_ns("cpu", 1, 256, 16).round(1))
        4165.6
    """
    return _host_path_ns(*cost_inputs(device, batch, n_fft, k, coefficients, n_segments=n_segments))


def learned_path_ns(
    device: str | Code,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    active_gates: RealLike,
    total_gates: RealLike,
    coefficients: str | CoefficientSet = "arch",
    n_segments: RealLike = FAST_SEGMENTS,
) -> Nanoseconds:
    """Return the estimate of the learned path in ns, `[*batch]`: the fused graph, scaled by the active gates.

    Infinite unless fewer than a quarter of the gates are on (SPEC, section 5).

    Args:
        device: a name, or device codes.
        batch: rows of the signal.
        n_fft: samples of a segment.
        k: peaks of a row.
        active_gates: gates of the model that are on.
        total_gates: all its gates.
        coefficients: "arch", "portable", or a set of your own.
        n_segments: segments of a row.

    Raises:
        ValueError: an unknown device or set, or a size that cannot be.

    Examples:
        >>> bool(learned_path_ns("cuda", 8192, 256, 16, 100, 1024) < fused_graph_ns("cuda", 8192, 256, 16))
        True
        >>> float(learned_path_ns("cuda", 8192, 256, 16, 256, 1024))
        inf
    """
    inputs = cost_inputs(device, batch, n_fft, k, coefficients, n_segments=n_segments)
    sizes = dict(zip(("device", *LEAST_SIZES), (inputs[0], *inputs[2:]), strict=True))
    check_shapes(**sizes, active_gates=active_gates, total_gates=total_gates)
    return _learned_path_ns(*inputs, learned_inputs(True, active_gates, total_gates))


@jax.jit
def _fused_graph_ns(codes, set_, batch, n_fft, k, n_segments, scale, temperature_ns):
    rules = rules_at(temperature_ns)
    return fused_ns(gather(set_, codes), batch, n_fft, k, n_segments, scale, rules)


@jax.jit
def _learned_path_ns(codes, set_, batch, n_fft, k, n_segments, learned: Learned):
    rules = Exact()
    ns = fused_ns(gather(set_, codes), batch, n_fft, k, n_segments, learned.scale, rules)
    return jnp.where(learned.usable, ns, jnp.inf)


@jax.jit
def _block_graph_ns(codes, set_, batch, n_fft, k, n_segments):
    rules = Exact()
    return block_ns(gather(set_, codes), batch, n_fft, k, n_segments, rules)


@jax.jit
def _host_path_ns(codes, set_, batch, n_fft, k, n_segments):
    rules = Exact()
    return host_ns(gather(set_, codes), batch, n_fft, k, n_segments, rules)
