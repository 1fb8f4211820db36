"""The latency model of any JAX function: a call, its launches, and each kernel's roofline, shared among processors."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax._typing import RealLike
from rlxjax._values import FrozenDict
from rlxjax.fit import Facts, Input, LatencyModel, LatencyPrior, Runs
from rlxjax.gate import Coefficients
from rlxjax.jaxpr import CLASSES, OPERATIONS, FunctionProfile, Kernels, stacked

from ._coefficients import coefficients, prior_of, typical
from ._weights import FAMILY_FIELDS, SIZES, known_weights, shipped_weights

#: How sharply kernels leave a cache, results take new memory, programs are handed over, and launches are busy ones.
CACHED, FAR, FRESH, HANDED_OVER, BUSY, LOOPED = 2.0, 4.0, 8.0, 6.0, 2.0, 3.0
#: Sizes of a program, and columns of a kernel, with the unit of each.
PROGRAM_INPUTS: Mapping[str, str] = {
    **{"arrays": "arrays", "results": "arrays", "trips": "trips", "static_ops": "operations", "peak_bytes": "bytes"},
}
KERNEL_INPUTS: Mapping[str, str] = {
    **{f"{name}_work_ns": "ns" for name in CLASSES},
    "unsure_ns": "ns",
    **{name: "kernels" if "bytes" not in name else "bytes" for name in SIZES},
    **dict.fromkeys(("kernel_bytes", "result_bytes", "whole_bytes", "strided_bytes"), "bytes"),
    **dict.fromkeys(("is_library", "is_shared", *FAMILY_FIELDS), "1"),
}


@coefficients
@dataclasses.dataclass(frozen=True)
class FunctionCoefficients(Coefficients):
    """What the parts of a jitted function's run take on one machine; every field positive, `[*batch]`.

    The time of a class of operations is that of the machine of rate one, see `Weights`. The defaults are orders of
    magnitude of a present-day machine.
    """

    call_ns: RealLike = typical(4e3, "one call, whatever it does.")
    array_ns: RealLike = typical(250.0, "one array that a call takes.")
    result_ns: RealLike = typical(1e3, "one array that a call gives.")
    hand_over_ns: RealLike = typical(4e3, "handing a program that is not small over to another thread.")
    hand_over_operations: RealLike = typical(700.0, "operations from which a program is handed over.", log_sd=0.7)
    launch_ns: RealLike = typical(400.0, "one fused kernel.")
    busy_launch_ns: RealLike = typical(
        600.0, "what launching one of several kernels takes more, if it is no small one."
    )
    busy_ns: RealLike = typical(5e3, "time of a kernel that is no small one.", log_sd=1.0)
    loop_launch_ns: RealLike = typical(30.0, "one kernel in a loop that is compiled as one.")
    loop_dispatch_ns: RealLike = typical(300.0, "what a kernel in another loop takes more.", log_sd=1.0)
    loop_bytes: RealLike = typical(1e3, "bytes of a kernel from which a loop is not compiled as one.", log_sd=1.0)
    trip_ns: RealLike = typical(20.0, "one turn of a loop.", log_sd=1.0)
    wake_ns: RealLike = typical(8e3, "waking the other processors.")
    share_ns: RealLike = typical(3e3, "sharing a further kernel among processors that are awake.", log_sd=1.0)
    share_threshold_ns: RealLike = typical(3e4, "time from which a kernel is shared.", log_sd=1.0)
    parallel_gain: RealLike = typical(0.7, "speed-up of computing by all processors at a time, less 1.", log_sd=0.4)
    parallel_memory_gain: RealLike = typical(0.4, "speed-up of memory traffic by all processors, less 1.", log_sd=0.6)
    read_byte_ns: RealLike = typical(0.02, "one byte that a kernel reads from a near cache.")
    written_byte_ns: RealLike = typical(0.03, "one byte that a kernel writes to a near cache.")
    near_bytes: RealLike = typical(4e5, "of a near cache.")
    far_bytes: RealLike = typical(2e7, "of the caches together.")
    far_byte_ns: RealLike = typical(0.02, "what a byte from beyond the near cache takes more.", log_sd=1.0)
    memory_byte_ns: RealLike = typical(0.05, "what a byte from beyond the caches takes more.")
    fresh_bytes: RealLike = typical(3.2e7, "of a result for which an allocator takes new memory.", log_sd=0.3)
    fresh_byte_ns: RealLike = typical(0.2, "what a byte of new memory takes more.", log_sd=1.0)
    strided: RealLike = typical(1.0, "what a strided element takes more, of itself, where a first cache is left.", 1.0)
    far_strided: RealLike = typical(3.0, "the same where the near cache is left.", log_sd=1.0)
    indexed: RealLike = typical(1.0, "what an indexed place takes more, of itself, beyond the near cache.", log_sd=1.0)
    far_indexed: RealLike = typical(2.0, "the same beyond the caches.", log_sd=1.0)
    arithmetic: RealLike = typical(1.0, "time of adds, comparisons, operations on integers.")
    remainder: RealLike = typical(1.0, "time of rows that loops enter, and of what fits no vector.")
    movement: RealLike = typical(1.0, "time of copies, slices, broadcasts.")
    transpose: RealLike = typical(1.0, "time of transposes that move the last axis.")
    special: RealLike = typical(1.0, "time of divisions, roots, exponentials and the like.")
    dear: RealLike = typical(1.0, "time of sines, inverse functions, remainders.")
    iterated: RealLike = typical(1.0, "time of functions that iterate.")
    reduction: RealLike = typical(1.0, "time of reductions.")
    cumulative: RealLike = typical(1.0, "time of cumulative operations.")
    window: RealLike = typical(1.0, "time of windows.")
    product: RealLike = typical(1.0, "time of matrix products.")
    convolution: RealLike = typical(1.0, "time of convolutions.")
    transform: RealLike = typical(1.0, "time of Fourier transforms.")
    sort: RealLike = typical(1.0, "time of sorts.")
    factorisation: RealLike = typical(1.0, "time of factorisations and solutions.")
    random: RealLike = typical(1.0, "time of random generators.")
    indexing: RealLike = typical(1.0, "time of gathers and scatters.")


#: How far below the near cache a first cache ends.
FIRST_CACHE = 12.0


class CountsModel(LatencyModel):
    """A latency model whose runs are programs: they come as code, which is counted, and not as sizes."""

    def folds(self, runs: Runs) -> Sequence[np.ndarray]:
        """Return a column that leaves every program out by itself, `[n]`."""
        return [np.arange(runs.shape[0])]

    def grid(self) -> Runs:
        """Return no runs, `[0]`."""
        return self.runs([])

    def runs(self, rows: Sequence[Mapping[str, float]]) -> Runs:
        """Return the runs of programs by their counts, `[n]`."""
        columns = {name: np.array([row[name] for row in rows], float) for name in self.inputs}
        return Runs(self, np.zeros(len(rows), np.int32), columns)


@dataclasses.dataclass(frozen=True)
class FunctionsModel(CountsModel):
    """Any JAX function, jitted, called with arrays of the device; the inputs come from the kernels of its profile.

    A call takes the time of its dispatch, of its launches and of the turns of its loops, and that of each kernel:
    computing, which is the sum of its operations, overlaps with memory traffic. Processors share kernels that take
    longer than a threshold.
    """

    name, version = "functions", 4
    inputs = FrozenDict(
        {name: Input(unit, least=0.0, step=0, default=0.0) for name, unit in PROGRAM_INPUTS.items()}
        | {name: Input(unit, least=0.0, step=0, default=0.0, is_list=True) for name, unit in KERNEL_INPUTS.items()}
    )
    variants = ("jitted",)

    @property
    def prior(self) -> LatencyPrior[FunctionCoefficients]:
        """What machines that timed the corpus say of another one."""
        known, wide = shipped_weights(), prior_of(FunctionCoefficients, log_sd=0.8)
        if known is None:
            return wide
        return LatencyPrior(FunctionCoefficients(**known.median), FunctionCoefficients(**known.log_sd))

    def terms_ns(self, coefficients: FunctionCoefficients, runs: Runs, facts: Facts) -> Mapping[str, RealLike]:
        """Return the parts of what runs take in ns by name, `[*batch]`; their sum is the prediction."""
        del facts
        return _terms_ns(coefficients, runs)[0]

    def own_log_sd(self, coefficients: FunctionCoefficients, runs: Runs, facts: Facts) -> RealLike:
        """Return how unsure the weights of its operations leave the logarithm of a run's time, `[*batch]`."""
        del facts
        terms, unsure_ns = _terms_ns(coefficients, runs)
        return unsure_ns / sum(terms.values())

    def extents(self, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Return what a domain bounds: sizes of the program, and work by class and bytes, all kernels together."""
        names = [*PROGRAM_INPUTS, *(name for name in KERNEL_INPUTS if name.endswith("_work_ns") or name in SIZES)]
        return [(name, np.sum(values[name], -1) if name in KERNEL_INPUTS else values[name]) for name in names]


def _terms_ns(c: FunctionCoefficients, runs: Runs) -> tuple[dict[str, jax.Array], jax.Array]:
    """Return the parts of what runs take in ns by name, `[*batch]`, and how much of it is unsure by the weights."""
    x = {name: jnp.asarray(runs.inputs[name]) for name in runs.model.inputs}
    of_run, c = c, jax.tree.map(lambda leaf: jnp.asarray(leaf)[..., None] if jnp.ndim(leaf) else leaf, c)
    one, peak_bytes = jnp.maximum(x["launches"], 1.0), x["peak_bytes"][..., None]
    near, far = (_beyond(x["whole_bytes"], size, CACHED) for size in (c.near_bytes, c.far_bytes))
    first = _beyond(FIRST_CACHE * x["strided_bytes"], c.near_bytes, LOOPED)
    strided = 1.0 + c.strided * first + c.far_strided * _beyond(x["strided_bytes"], c.near_bytes, LOOPED)
    more = {"transpose": strided, "indexing": 1.0 + c.indexed * near + c.far_indexed * far}
    work = {name: x[f"{name}_work_ns"] * getattr(c, name) * more.get(name, 1.0) for name in CLASSES}
    compute_ns = sum(work.values())
    moved_bytes = x["read_bytes"] + x["written_bytes"]
    is_near = _beyond(x["kernel_bytes"], c.near_bytes, CACHED)
    is_far = _beyond(peak_bytes, c.far_bytes, FAR) * _beyond(8.0 * x["kernel_bytes"], c.far_bytes, CACHED)
    memory_ns = (
        x["read_bytes"] * c.read_byte_ns
        + x["written_bytes"] * c.written_byte_ns
        + moved_bytes * (c.far_byte_ns * is_near + c.memory_byte_ns * is_far)
        + x["written_bytes"] * c.fresh_byte_ns * _beyond(x["result_bytes"], c.fresh_bytes, FRESH)
    )
    exponent = jnp.maximum(x["exponent"], 1.0)
    alone_ns = _norm(compute_ns, memory_ns, exponent)
    each_ns = alone_ns / one
    threshold_ns = c.share_threshold_ns * jnp.maximum(x["threshold"], 1e-6)
    shared = x["is_shared"] * _beyond(each_ns, threshold_ns, x["sharpness"])
    gain = 1.0 + c.parallel_gain * x["gain"]
    both_ns = _norm(compute_ns / gain, memory_ns / (1.0 + c.parallel_memory_gain), exponent)
    kernel_ns = (1.0 - shared) * alone_ns + shared * both_ns
    # Each part of a kernel's work takes its share of the kernel's time.
    factor = kernel_ns / (compute_ns + memory_ns + 1e-3)
    several = jnp.where(jnp.sum(x["launches"], -1, keepdims=True) > 1.0, 1.0, 0.0)
    outside = x["launches"] - x["looped"]
    busy = (1.0 - shared) * _beyond(each_ns, c.busy_ns, BUSY) * several
    is_library = jnp.max(jnp.where(x["looped"] > 0, x["is_library"], 0.0), -1, keepdims=True)
    dispatched = jnp.maximum(is_library, _beyond(x["kernel_bytes"], c.loop_bytes, LOOPED))
    launch_ns = outside * (c.launch_ns + c.busy_launch_ns * busy)
    loop_ns = x["looped"] * (c.loop_launch_ns + c.loop_dispatch_ns * dispatched)
    shares, looped = jnp.sum(shared * outside, -1), jnp.sum(shared * x["looped"], -1)
    c = of_run
    shared_ns = c.wake_ns * jnp.minimum(shares, 1.0) + c.share_ns * (jnp.maximum(shares - 1.0, 0.0) + looped)
    hand_over_ns = c.hand_over_ns * _beyond(x["static_ops"] + 1.0, c.hand_over_operations, HANDED_OVER)
    terms = {
        "call_ns": c.call_ns + c.array_ns * x["arrays"] + c.result_ns * x["results"] + hand_over_ns,
        "launch_ns": jnp.sum(launch_ns, -1) + shared_ns,
        "loop_ns": c.trip_ns * x["trips"] + jnp.sum(loop_ns, -1),
        "memory_ns": jnp.sum(factor * memory_ns, -1),
        **{f"{name}_ns": jnp.sum(factor * part, -1) for name, part in work.items()},
    }
    # What is unsure is in ns of the machine of rate one, as the work is.
    rate = compute_ns / (sum(x[f"{name}_work_ns"] for name in CLASSES) + 1e-3)
    return terms, jnp.sqrt(jnp.sum((factor * rate * x["unsure_ns"]) ** 2, -1) + 1e-12)


def _beyond(size: Any, threshold: Any, sharpness: Any) -> jax.Array:
    """Return `x**p / (x**p + 1)` of a size in units of a threshold: from 0 far below to 1 far above."""
    return jax.nn.sigmoid(sharpness * (jnp.log(size + 1e-3) - jnp.log(threshold)))


def _norm(one: Any, other: Any, exponent: Any) -> jax.Array:
    """Return `(x**p + y**p)**(1/p)`, which is about the larger one; not zero, since there it has no slope."""
    larger = jnp.maximum(one, other) + 1e-3
    return larger * (((one + 1e-3) / larger) ** exponent + ((other + 1e-3) / larger) ** exponent) ** (1.0 / exponent)


FUNCTIONS = FunctionsModel()


def function_runs(profiles: Sequence[FunctionProfile]) -> Runs:
    """Return the runs of functions by their profiles, `[n]`.

    Examples:
        >>> from rlxjax.jaxpr import profile_function
        >>> function_runs([profile_function(jnp.tanh, 1.0)]).shape
        (1,)
    """
    return kernel_runs(
        stacked([profile.kernels for profile in profiles]),
        **{name: np.array([getattr(profile, name) for profile in profiles], float) for name in PROGRAM_INPUTS},
    )


def kernel_runs(kernels: Kernels, weights: Any = None, **sizes: Any) -> Runs:
    """Return the runs of programs by their kernels; differentiable in the weights.

    Args:
        kernels: padded, `[*batch, kernels]`.
        weights: `Weights`, the shipped ones unless given.
        **sizes: of the programs, `[*batch]`: arrays, results, trips, static_ops, peak_bytes.
    """
    columns = (known_weights() if weights is None else weights).columns(kernels)
    found = {**sizes, **columns}
    zeros = np.zeros(np.shape(found["arrays"]), np.int32)
    return Runs(FUNCTIONS, zeros, {name: found[name] * 1.0 for name in FUNCTIONS.inputs})


def untimed_operations(profile: FunctionProfile) -> tuple[str, ...]:
    """Return the operations of a function that no machine timed: their class alone says what they take.

    Examples:
        >>> from rlxjax.jaxpr import profile_function
        >>> untimed_operations(profile_function(jnp.tanh, 1.0))
        ()
    """
    counted = np.any(np.asarray(profile.kernels.counts) > 0, 0)
    return tuple(name for name, is_so in zip(OPERATIONS, counted & ~known_weights().timed(), strict=True) if is_so)
