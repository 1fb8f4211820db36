"""The latency model of any JAX function: a call, its launches, and a roofline with a rate for each family of work."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax._numerics import soft_roofline
from rlxjax._typing import RealLike
from rlxjax._values import FrozenDict
from rlxjax.fit import Facts, Input, LatencyModel, Runs
from rlxjax.gate import Coefficients
from rlxjax.jaxpr import FunctionProfile

from ._coefficients import ROOFLINE_SHARPNESS, coefficients, prior_of, typical
from ._function_inputs import INPUTS, function_inputs


@coefficients
@dataclasses.dataclass(frozen=True)
class FunctionCoefficients(Coefficients):
    """What the parts of a jitted function's run take on one machine; every field positive, `[*batch]`.

    The defaults are orders of magnitude of a present-day machine.
    """

    call_ns: RealLike = typical(2e3, "one call, whatever it does.")
    array_ns: RealLike = typical(250.0, "one array that a call takes; one that it gives is several of these.")
    hand_over_ns: RealLike = typical(1e3, "handing a program that is not small over to another thread.")
    launch_ns: RealLike = typical(300.0, "one fused kernel; those in loops are a share of this.")
    trip_ns: RealLike = typical(20.0, "one turn of a loop.")
    share_ns: RealLike = typical(1.5e4, "sharing one kernel among processors.", log_sd=0.7)
    parallel_gain: RealLike = typical(0.9, "speed-up by all processors at a time, less 1.")
    elementwise_flop_per_ns: RealLike = typical(100.0, "cheap operations: adds, comparisons, those on integers.")
    special_ns: RealLike = typical(0.2, "one exponential of float32; other special functions are so many of these.")
    cached_bytes_per_ns: RealLike = typical(70.0, "what fused kernels write; bytes read are a share of these.")
    uncached_bytes_per_ns: RealLike = typical(100.0, "what kernels move, on top, as far as data exceed the caches.")
    indexed_place_ns: RealLike = typical(0.2, "one place that a gather finds; an element read is a share of this.")
    transposed_element_ns: RealLike = typical(0.15, "one element of a transpose that moves the last axis.")
    scanned_element_ns: RealLike = typical(2.0, "one element of a cumulative operation or of a window.")
    matmul_flop_per_ns: RealLike = typical(200.0, "matrix products.")
    convolution_flop_per_ns: RealLike = typical(200.0, "convolutions.")
    fft_steps_per_ns: RealLike = typical(20.0, "transforms; a point takes the steps of all factors of the length.")
    comparison_ns: RealLike = typical(10.0, "one comparison of a sort.")
    matrix_flop_per_ns: RealLike = typical(100.0, "factorisations and solutions.")
    random_op_ns: RealLike = typical(0.02, "one operation of a random generator.")


class CountsModel(LatencyModel):
    """A latency model whose runs are programs: they come as code, which is counted, and not as sizes."""

    def extents(self, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Return what a domain bounds: each count by itself, since a program has few kinds of work."""
        return list(values.items())

    def folds(self, runs: Runs) -> Sequence[np.ndarray]:
        """Return a column that leaves every program out by itself, `[n]`."""
        return [np.arange(len(next(iter(runs.inputs.values()))))]

    def grid(self) -> Runs:
        """Return no runs, `[0]`."""
        return self.runs([])

    def runs(self, rows: Sequence[Mapping[str, float]]) -> Runs:
        """Return the runs of programs by their counts, `[n]`."""
        columns = {name: np.array([row[name] for row in rows], float) for name in self.inputs}
        return Runs(self, np.zeros(len(rows), np.int32), columns)


@dataclasses.dataclass(frozen=True)
class FunctionsModel(CountsModel):
    """Any JAX function, jitted, called with arrays of the device; the inputs come from its profile.

    A call takes the time of its dispatch, of its launches and of the turns of its loops, and that of its work by
    family. Processors share the work of large kernels. Elementwise work and memory traffic overlap.
    """

    name, version = "functions", 3
    inputs = FrozenDict({name: Input(unit, least=0.0, step=0, default=0.0) for name, unit in INPUTS.items()})
    variants = ("jitted",)
    prior = prior_of(FunctionCoefficients, log_sd=0.8)  # pyright: ignore

    def terms_ns(self, coefficients: FunctionCoefficients, runs: Runs, facts: Facts) -> Mapping[str, RealLike]:
        """Return the parts of what runs take in ns by name, `[*batch]`; their sum is the prediction."""
        del facts
        c, x = coefficients, {name: jnp.asarray(value) for name, value in runs.inputs.items()}

        def done(name: str) -> jax.Array:
            return x[name] + x[f"shared_{name}"] / (1.0 + c.parallel_gain)

        compute_ns = done("elementwise_ops") / c.elementwise_flop_per_ns + done("special_ops") * c.special_ns
        # Not nothing: a roofline has no slope there.
        memory_ns = (done("moved_bytes") + 1.0) / c.cached_bytes_per_ns
        return {
            "call_ns": c.call_ns + c.array_ns * x["arrays"] + c.hand_over_ns * x["hand_overs"],
            "launch_ns": c.launch_ns * x["launches"] + c.share_ns * x["shared_launches"],
            "loop_ns": c.trip_ns * x["trips"],
            "elementwise_ns": soft_roofline(compute_ns, memory_ns, ROOFLINE_SHARPNESS),
            "uncached_ns": x["uncached_bytes"] / c.uncached_bytes_per_ns,
            "index_ns": c.indexed_place_ns * done("indexed_places"),
            "transpose_ns": c.transposed_element_ns * done("transposed_elements"),
            "scan_ns": c.scanned_element_ns * done("scanned_elements"),
            "matmul_ns": done("matmul_flop") / c.matmul_flop_per_ns,
            "convolution_ns": done("convolution_flop") / c.convolution_flop_per_ns,
            "fft_ns": done("fft_steps") / c.fft_steps_per_ns,
            "sort_ns": c.comparison_ns * x["comparisons"],
            "linear_algebra_ns": x["matrix_flop"] / c.matrix_flop_per_ns,
            "random_ns": c.random_op_ns * done("random_ops"),
        }


FUNCTIONS = FunctionsModel()


def function_runs(profiles: Sequence[FunctionProfile]) -> Runs:
    """Return the runs of functions by their profiles, `[n]`.

    Examples:
        >>> from rlxjax.jaxpr import profile_function
        >>> function_runs([profile_function(jnp.tanh, 1.0)]).shape
        (1,)
    """
    return FUNCTIONS.runs([function_inputs(profile) for profile in profiles])
