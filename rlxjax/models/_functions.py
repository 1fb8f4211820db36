"""The latency model of any JAX function: a call, launches, loops, and a roofline for each kernel."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax._typing import RealLike
from rlxjax._values import FrozenDict
from rlxjax.fit import Facts, Input, LatencyModel, LatencyPrior, Runs
from rlxjax.gate import Coefficients
from rlxjax.jaxpr import CLASSES, OPERATIONS, FunctionProfile, Kernels, stacked

from ._coefficients import coefficients, prior_of, typical
from ._weights import SIZES, WIDE_SCATTER, known_weights, shipped_weights

#: Sharpness of three transitions: beyond the near cache, beyond all caches, and of strided access beyond a cache.
NEAR, FAR, STRIDED = 2.0, 3.0, 3.0
#: Sharpness of the transition to the slower launches of long kernels.
BUSY = 2.0
#: Inputs of the model with their units: of a program here, and of each of its kernels in `KERNEL_INPUTS`.
PROGRAM_INPUTS: Mapping[str, str] = {
    **{
        "arrays": "arrays",
        "results": "arrays",
        "trips": "trips",
        "hand_overs": "programs",
        "peak_bytes": "bytes",
    }
}
#: The fields that a run needs of a `FunctionProfile`, besides its kernels.
PROFILE_FIELDS = ("arrays", "results", "trips", "static_ops", "peak_bytes")
KERNEL_INPUTS: Mapping[str, str] = FrozenDict(
    {
        **{f"{name}_work_ns": "ns" for name in CLASSES},
        **dict.fromkeys(("unsure_ns", "strided_ns", "far_strided_ns", "indexed_ns", "far_indexed_ns"), "ns"),
        **{name: "kernels" if "bytes" not in name else "bytes" for name in SIZES},
        **dict.fromkeys(("fresh_bytes", "strided_bytes", "first_strided_bytes"), "bytes"),
        **{"dispatched": "kernels", "shared": "1", "exponent": "1"},
    }
)


@coefficients
@dataclasses.dataclass(frozen=True)
class FunctionCoefficients(Coefficients):
    """Coefficients of a run of a jitted function on one machine; each field is positive, `[*batch]`.

    For each class of operations, a coefficient scales the times in `Weights`, which all machines share. The defaults
    are orders of magnitude of a present-day machine.
    """

    call_ns: RealLike = typical(4e3, "time of one call of any function.")
    array_ns: RealLike = typical(250.0, "time for each argument array of a call.")
    result_ns: RealLike = typical(1e3, "time for each result array of a call.")
    hand_over_ns: RealLike = typical(4e3, "time to move a large program to another thread.")
    launch_ns: RealLike = typical(400.0, "time to launch a kernel outside loops.")
    busy_launch_ns: RealLike = typical(600.0, "extra time to launch a long kernel, if there are several kernels.")
    busy_ns: RealLike = typical(5e3, "time of a kernel from which it counts as long.", log_sd=1.0)
    loop_launch_ns: RealLike = typical(30.0, "time to launch a kernel in a loop.")
    loop_dispatch_ns: RealLike = typical(300.0, "time to dispatch a small fused kernel in a loop.", log_sd=1.0)
    trip_ns: RealLike = typical(20.0, "time of one iteration of a loop, without its kernels.", log_sd=1.0)
    wake_ns: RealLike = typical(8e3, "time to wake the other processors.")
    share_ns: RealLike = typical(3e3, "time to share each further kernel among awake processors.", log_sd=1.0)
    parallel_gain: RealLike = typical(0.8, "speedup of compute on all processors, minus 1.", log_sd=0.4)
    parallel_memory_gain: RealLike = typical(0.5, "speedup of memory traffic on all processors, minus 1.", log_sd=0.4)
    read_byte_ns: RealLike = typical(0.02, "time to read a byte from the near cache.")
    written_byte_ns: RealLike = typical(0.03, "time to write a byte to the near cache.")
    near_bytes: RealLike = typical(4e5, "size of the near cache: the cache next to a processor.")
    far_bytes: RealLike = typical(2e7, "size of all caches together.")
    far_byte_ns: RealLike = typical(0.02, "extra time per byte if the data exceed the near cache.", log_sd=1.0)
    memory_byte_ns: RealLike = typical(0.05, "extra time per byte if the data exceed all caches.")
    fresh_byte_ns: RealLike = typical(0.2, "extra time per byte of newly allocated memory.", log_sd=1.0)
    arithmetic: RealLike = typical(1.0, "relative time of adds, comparisons and integer operations.")
    movement: RealLike = typical(1.0, "relative time of copies, slices and broadcasts.")
    transpose: RealLike = typical(1.0, "relative time of transposes that move the last axis.")
    special: RealLike = typical(1.0, "relative time of divisions, roots and exponentials.")
    dear: RealLike = typical(1.0, "relative time of sines, inverse functions and remainders.")
    iterated: RealLike = typical(1.0, "relative time of iterative functions.")
    reduction: RealLike = typical(1.0, "relative time of reductions.")
    cumulative: RealLike = typical(1.0, "relative time of cumulative operations.")
    window: RealLike = typical(1.0, "relative time of windows.")
    product: RealLike = typical(1.0, "relative time of matrix products.")
    convolution: RealLike = typical(1.0, "relative time of convolutions.")
    transform: RealLike = typical(1.0, "relative time of Fourier transforms.")
    sort: RealLike = typical(1.0, "relative time of sorts.")
    factorisation: RealLike = typical(1.0, "relative time of factorisations and solvers.")
    random: RealLike = typical(1.0, "relative time of random generators.")
    indexing: RealLike = typical(1.0, "relative time of gathers and scatters.")


class CountsModel(LatencyModel):
    """A latency model whose runs are programs. Counts of a program's operations, bytes and so on are the inputs."""

    def folds(self, runs: Runs) -> Sequence[np.ndarray]:
        """Return a list with one array of fold numbers, `[n]`: validation holds out one program at a time."""
        return [np.arange(runs.shape[0])]

    def extents(self, runs: Runs) -> dict[str, Any]:
        """Return the inputs, and the sum of each column of kernels, `[*batch]`."""
        sums = {name: runs.kernels[name].sum(-1) for name in self.kernels}
        return {name: runs.inputs[name] for name in self.inputs} | sums

    def grid(self) -> Runs:
        return self.runs([])

    def runs(self, programs: Sequence[Mapping[str, Any]]) -> Runs:
        """Return the runs of programs, `[n]`. Each program gives numbers, and lists with an entry for each kernel."""
        most = max([1, *(len(own[name]) for own in programs for name in self.kernels)])
        rows = 1 << (most - 1).bit_length()  # so that programs of another size seldom compile a prediction again
        inputs = {name: np.array([own[name] for own in programs], float) for name in self.inputs}
        kernels = {name: np.zeros((len(programs), rows)) for name in self.kernels}
        for name, column in kernels.items():
            for row, own in zip(column, programs, strict=True):
                row[: len(own[name])] = own[name]
        return Runs(self, np.zeros(len(programs), np.int32), inputs, kernels)


def columns_of(runs: Runs) -> dict[str, jax.Array]:
    """Return the inputs, `[*batch]`, and the columns of kernels, `[*batch, kernels]`, by name."""
    return {name: jnp.asarray(column) for name, column in {**runs.inputs, **runs.kernels}.items()}


@dataclasses.dataclass(frozen=True)
class FunctionsModel(CountsModel):
    """The time of any jitted JAX function whose arrays are on the device. The inputs come from a `FunctionProfile`.

    The time is the sum of the dispatch of the call, the launches, the iterations of loops, and the kernels. Within a
    kernel, the compute time of all operations overlaps with memory traffic. Several processors share a large kernel;
    `Weights` says from which size.
    """

    name, version = "functions", 5
    inputs = FrozenDict({name: Input(unit, 0.0, 0) for name, unit in PROGRAM_INPUTS.items()})
    kernels = KERNEL_INPUTS
    variants = ("jitted",)

    @property
    def prior(self) -> LatencyPrior[FunctionCoefficients]:
        """The prior for any other machine, from the machines on which a corpus of programs was timed."""
        known, wide = shipped_weights(), prior_of(FunctionCoefficients, log_sd=0.8)
        if known is None:
            return wide
        return LatencyPrior(FunctionCoefficients(**known.median), FunctionCoefficients(**known.log_sd))

    def terms_ns(self, coefficients: FunctionCoefficients, runs: Runs, facts: Facts) -> Mapping[str, RealLike]:
        parts = _parts_ns(coefficients, runs)
        # Split the time of a kernel in proportion to its parts.
        factor = parts.kernel_ns / (jnp.sum(parts.work_ns, -1) + parts.memory_ns + 1e-3)
        work_ns = jnp.sum(factor[..., None] * parts.work_ns, -2)
        return {
            **{name: getattr(parts, name) for name in ("call_ns", "launch_ns", "loop_ns")},
            "memory_ns": jnp.sum(factor * (parts.memory_ns + 1e-3), -1),
            **{f"{name}_ns": work_ns[..., place] for place, name in enumerate(CLASSES)},
        }

    def time_ns(self, coefficients: FunctionCoefficients, runs: Runs, facts: Facts) -> RealLike:
        parts = _parts_ns(coefficients, runs)
        return parts.call_ns + parts.launch_ns + parts.loop_ns + jnp.sum(parts.kernel_ns, -1)

    def own_log_sd(self, coefficients: FunctionCoefficients, runs: Runs, facts: Facts) -> RealLike:
        """Return the standard deviation of the logarithm of the time, `[*batch]`, due to errors of the weights."""
        known, parts = shipped_weights(), _parts_ns(coefficients, runs)
        # The uncertain share of the work is the same at any rate of the machine.
        work_ns, x = jnp.sum(parts.work_ns, -1), columns_of(runs)
        unsure_ns = x["unsure_ns"] * work_ns / (sum(x[f"{name}_work_ns"] for name in CLASSES) + 1e-9)
        unsure_ns = unsure_ns * parts.kernel_ns / (work_ns + parts.memory_ns + 1e-3)
        share = jnp.sqrt(jnp.sum(unsure_ns**2, -1) + 1e-12) / self.time_ns(coefficients, runs, facts)
        return jnp.hypot(share, WIDE_SCATTER if known is None else known.scatter)

    def extents(self, runs: Runs) -> dict[str, Any]:
        """Return the inputs, the work of each class, and the sizes of kernels, `[*batch]`."""
        names = [*PROGRAM_INPUTS, *(f"{name}_work_ns" for name in CLASSES), *SIZES]
        found = super().extents(runs)
        return {name: found[name] for name in names}


class _Parts(NamedTuple):
    """Parts of the time of runs in ns. The first three have shape `[*batch]`; the others have an entry per kernel."""

    call_ns: Any
    launch_ns: Any
    loop_ns: Any
    #: Time of each kernel. On one processor: time of only its memory traffic, and of only each class of operations.
    kernel_ns: jax.Array
    memory_ns: jax.Array
    work_ns: jax.Array


def _parts_ns(c: FunctionCoefficients, runs: Runs) -> _Parts:
    x = columns_of(runs)
    of_run, c = (
        c,
        jax.tree.map(lambda leaf: jnp.asarray(leaf)[..., None] if jnp.ndim(leaf) else leaf, c),
    )
    one, peak_bytes = jnp.maximum(x["launches"], 1.0), x["peak_bytes"][..., None]
    near, far = _beyond(peak_bytes, c.near_bytes, NEAR), _beyond(peak_bytes, c.far_bytes, FAR)
    work = {name: x[f"{name}_work_ns"] for name in CLASSES}
    work["transpose"] += x["strided_ns"] * _beyond(x["first_strided_bytes"], c.near_bytes, STRIDED)
    work["transpose"] += x["far_strided_ns"] * _beyond(x["strided_bytes"], c.near_bytes, STRIDED)
    work["indexing"] += x["indexed_ns"] * near + x["far_indexed_ns"] * far
    # As one array: a fit compiles several times faster.
    rates = jnp.stack(jnp.broadcast_arrays(*(getattr(c, name) for name in CLASSES)), -1)
    work_ns = jnp.stack([work[name] for name in CLASSES], -1)
    work_ns = work_ns * jnp.broadcast_to(rates, work_ns.shape)
    compute_ns, moved_bytes = jnp.sum(work_ns, -1), x["read_bytes"] + x["written_bytes"]
    memory_ns = (
        x["read_bytes"] * c.read_byte_ns
        + x["written_bytes"] * c.written_byte_ns
        + moved_bytes * (c.far_byte_ns * near + c.memory_byte_ns * far)
        + x["fresh_bytes"] * c.fresh_byte_ns
    )
    exponent, shared = jnp.maximum(x["exponent"], 1.0), x["shared"]
    alone_ns = _norm(compute_ns, memory_ns, exponent)
    both_ns = _norm(compute_ns / (1.0 + c.parallel_gain), memory_ns / (1.0 + c.parallel_memory_gain), exponent)
    several = jnp.where(jnp.sum(x["launches"], -1, keepdims=True) > 1.0, 1.0, 0.0)
    outside = x["launches"] - x["looped"]
    busy = (1.0 - shared) * _beyond(alone_ns / one, c.busy_ns, BUSY) * several
    launch_ns = outside * (c.launch_ns + c.busy_launch_ns * busy)
    loop_ns = x["looped"] * c.loop_launch_ns + x["dispatched"] * c.loop_dispatch_ns
    shares, looped = jnp.sum(shared * outside, -1), jnp.sum(shared * x["looped"], -1)
    c = of_run
    shared_ns = c.wake_ns * jnp.minimum(shares, 1.0) + c.share_ns * (jnp.maximum(shares - 1.0, 0.0) + looped)
    arrays_ns = c.array_ns * x["arrays"] + c.result_ns * x["results"]
    return _Parts(
        call_ns=c.call_ns + arrays_ns + c.hand_over_ns * x["hand_overs"],
        launch_ns=jnp.sum(launch_ns, -1) + shared_ns,
        loop_ns=c.trip_ns * x["trips"] + jnp.sum(loop_ns, -1),
        kernel_ns=jnp.minimum(x["launches"], 1.0) * ((1.0 - shared) * alone_ns + shared * both_ns),
        memory_ns=memory_ns,
        work_ns=work_ns,
    )


def _beyond(size: Any, threshold: Any, sharpness: Any) -> jax.Array:
    """Return `x**p / (x**p + 1)`, a smooth step from 0 to 1: `x` is size / threshold, and `p` is the sharpness."""
    return jax.nn.sigmoid(sharpness * (jnp.log(size + 1e-3) - jnp.log(threshold)))


def _norm(one: Any, other: Any, exponent: Any) -> jax.Array:
    """Return `(x**p + y**p)**(1/p)`, a smooth maximum. Small added numbers give it a finite slope at zero."""
    larger = jnp.maximum(one, other) + 1e-3
    return larger * (((one + 1e-3) / larger) ** exponent + ((other + 1e-3) / larger) ** exponent) ** (1.0 / exponent)


FUNCTIONS = FunctionsModel()


def function_runs(profiles: Sequence[FunctionProfile]) -> Runs:
    """Return the runs of `FUNCTIONS` for the functions that were profiled, `[n]`.

    Examples:
        >>> from rlxjax.jaxpr import profile_function
        >>> function_runs([profile_function(jnp.tanh, 1.0)]).shape
        (1,)
    """
    return kernel_runs(
        stacked([profile.kernels for profile in profiles]),
        **{name: np.array([getattr(profile, name) for profile in profiles], float) for name in PROFILE_FIELDS},
    )


def kernel_runs(kernels: Kernels, weights: Any = None, **sizes: Any) -> Runs:
    """Return the runs of `FUNCTIONS` for programs, from their kernels. `jax.grad` works by the weights.

    Args:
        kernels: the kernels of each program, `[*batch, kernels]`, padded to the same number of kernels.
        weights: an instance of `Weights`; by default the shipped weights.
        **sizes: the fields `PROFILE_FIELDS` of the profile of each program, `[*batch]` each.
    """
    columns = (known_weights() if weights is None else weights).columns(kernels, sizes["static_ops"], sizes["trips"])
    found = {**sizes, **columns}
    zeros = np.zeros(np.shape(found["arrays"]), np.int32)
    inputs, rows = ({name: found[name] * 1.0 for name in names} for names in (PROGRAM_INPUTS, KERNEL_INPUTS))
    return Runs(FUNCTIONS, zeros, inputs, rows)


def untimed_operations(profile: FunctionProfile) -> tuple[str, ...]:
    """Return the operations of a function that were timed on no machine, so that only their class predicts their time.

    Examples:
        >>> from rlxjax.jaxpr import profile_function
        >>> untimed_operations(profile_function(jnp.tanh, 1.0))
        ()
    """
    counted = np.any(np.asarray(profile.kernels.counts) > 0, 0)
    return tuple(name for name, is_so in zip(OPERATIONS, counted & ~known_weights().timed(), strict=True) if is_so)
