"""The latency model of a program compiled for a GPU: launches by the host, kernels on the device, and the wait."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from rlxjax._numerics import soft_excess, soft_roofline
from rlxjax._typing import RealLike
from rlxjax._values import FrozenDict
from rlxjax.devices import TargetDevice, target_device, target_names
from rlxjax.fit import Facts, Input, Runs
from rlxjax.gate import Coefficients
from rlxjax.jaxpr import OPERATIONS, GpuProgram

from ._coefficients import ROOFLINE_SHARPNESS, coefficients, prior_of, typical
from ._functions import CountsModel, columns_of

#: The wait, as a share of the longest wake-up time, after which waking the host takes half of the longest time.
WAKE_SHARE = 0.2
#: Sharpness of the maximum of host and device time, and of the transition from the L2 cache to memory.
QUEUE_SHARPNESS, CACHE_SHARPNESS = 4, 3
#: Sharpness of the lower bound of a product's time: the time in which a core computes one tile.
TAIL_SHARPNESS = 2
#: Elements in a tile of a matrix product: for dtypes with the full rate of the matrix units, and for other dtypes.
TILE_ELEMENTS, SMALL_TILE_ELEMENTS = 128**2, 64**2
#: Host time of a result array divided by that of an argument array; and number of commands for a readback.
ARRAYS_OF_A_RESULT, COMMANDS_OF_A_READBACK = 3.0, 2.0
#: Kinds of matrix products. Each kind has its own rate in the data sheet.
PRODUCTS = ("byte", "half", "float32", "exact", "float64")
#: Names of counts that are not operations, and the classes of operations that work element by element.
ROWS = ("reduced_rows", "short_row_elements")
ELEMENTWISE = ("arithmetic", "special", "dear", "iterated", "reduction", "cumulative", "window", "random")
#: Operations that libraries compute column by column, with the matrices of a batch in parallel. With more columns than
#: here, or more columns per matrix of the batch, JAX calls the library for each matrix in turn.
SOLVERS: Mapping[str, Sequence[str]] = {
    **{name: (name,) for name in ("triangular_solve", "cholesky", "lu")},
    **{"qr": ("qr", "householder"), "eigen": ("eigh", "svd", "eig")},
}
IN_TURN_COLUMNS = {"eigh": 32, "svd": 32, "eig": 0, "householder": 0}
IN_TURN_BY_MATRIX = {"lu": 128, "qr": 128}
#: Scatter of host-bound times divided by the scatter of device-bound times. Held-out times on an H100 and an H200 are
#: off by 1.6 % if host-bound and 16 % if device-bound.
HOST_SCATTER = 0.1
#: Inputs that are a number per program; then inputs that are lists with an entry for each row of the kernel table.
SUMS = ("arrays", "commands", "kernels", "library_calls", "eigen_calls", "sort_stages")
SUMS += ("sort_bytes", *(f"{name}_columns" for name in SOLVERS))
LISTS = ("launches", "moved_bytes", "operations", "tiles", *(f"{name}_flop" for name in PRODUCTS))


@coefficients
@dataclasses.dataclass(frozen=True)
class GpuCoefficients(Coefficients):
    """Coefficients of a call of a compiled program on a host with a GPU; each field is positive.

    Fields that end in `_share` are fractions of data-sheet rates. The other defaults are orders of magnitude of a
    present-day host.
    """

    call_ns: RealLike = typical(3e4, "time of one call and its wait, without `overlapped_ns`.")
    overlapped_ns: RealLike = typical(2e4, "time of the part of a call that overlaps with the device.")
    array_ns: RealLike = typical(1e3, "time per argument array; a result array counts as three.")
    command_ns: RealLike = typical(4e3, "time to launch a kernel or a graph of kernels; a copy takes twice as long.")
    library_call_ns: RealLike = typical(4e3, "extra time per library call; a cuDNN call counts as two calls.")
    kernel_ns: RealLike = typical(2e3, "time of any kernel on the device, apart from its work.")
    wake_ns: RealLike = typical(4e4, "time to wake the host after a long wait.", log_sd=0.4)
    memory_share: RealLike = typical(0.88, "memory bandwidth, as a share of the data-sheet bandwidth.", log_sd=0.05)
    cache_gain: RealLike = typical(1.7, "L2 cache bandwidth divided by memory bandwidth.", log_sd=0.3)
    operation_share: RealLike = typical(0.3, "elementwise rate, as a share of the float32 rate.", log_sd=0.35)
    product_share: RealLike = typical(0.75, "rate of products, as a share of the data-sheet rate.", log_sd=0.1)
    tile_share: RealLike = typical(1.0, "rate of a core for a tile, relative to its product rate.", log_sd=0.3)
    sort_stage_ns: RealLike = typical(500.0, "time of any stage of a sort, apart from its traffic.")
    sort_bytes_per_ns: RealLike = typical(8e3, "rate of the memory traffic of sort stages.", log_sd=0.3)
    triangular_column_ns: RealLike = typical(300.0, "time per column of a triangular solve.")
    cholesky_column_ns: RealLike = typical(500.0, "time per column of a Cholesky factorisation.")
    lu_column_ns: RealLike = typical(2e3, "time per column of an LU factorisation.")
    qr_column_ns: RealLike = typical(3e3, "time per matrix column to compute a QR factorisation, or its Q.")
    eigen_ns: RealLike = typical(2e5, "time per library call for eigenvalues or singular values.")
    eigen_column_ns: RealLike = typical(1e4, "time per column of an eigenvalue or singular value problem.")


def gpu_facts(device: TargetDevice) -> Facts:
    """Return the facts of `GPU_KERNELS` for a GPU: figures from its data sheet.

    Raises:
        ValueError: the device is not a GPU, or its number of cores, its cache size or its float32 rate is unknown.

    Examples:
        >>> from rlxjax.targets import target_device
        >>> gpu_facts(target_device("h200"))["memory_bytes_per_ns"]
        4800.0
    """
    vector, matrix = device.vector_flop_per_ns, device.matrix_flop_per_ns
    if device.platform != "cuda" or device.cores is None or device.l2_bytes is None or "f32" not in vector:
        raise ValueError(f"target {device.name}: expected a GPU with figures of its cores, its cache and float32")
    return FrozenDict(
        {
            "memory_bytes_per_ns": float(device.bandwidth_bytes_per_ns),
            "cache_bytes": float(device.l2_bytes),
            "cores": float(device.cores),
            "vector_flop_per_ns": float(vector["f32"]),
            "byte_flop_per_ns": float(matrix.get("f8", matrix.get("s8", matrix.get("bf16", vector["f32"])))),
            "half_flop_per_ns": float(matrix.get("bf16", matrix.get("f16", vector["f32"]))),
            "float32_flop_per_ns": float(matrix.get("tf32", vector["f32"])),
            "exact_flop_per_ns": float(vector["f32"]),
            "float64_flop_per_ns": float(matrix.get("f64", vector.get("f64", vector["f32"] / 2))),
        }
    )


@functools.cache
def gpu_facts_of_kind(device_kind: str) -> Facts | None:
    """Return the facts of the GPU with the given `device_kind` of JAX, or None for any other device.

    Examples:
        >>> gpu_facts_of_kind("NVIDIA H100 80GB HBM3")["cores"], gpu_facts_of_kind("cpu")
        (132.0, None)
    """
    devices = [target_device(name) for name in target_names()]
    words = device_kind.lower().replace("-", " ").split()
    found = [one for one in devices if one.kind == device_kind] or [one for one in devices if one.name in words]
    return gpu_facts(found[0]) if found else None


@dataclasses.dataclass(frozen=True)
class GpuKernelsModel(CountsModel):
    """The time of a call of a program compiled for a GPU, with arrays on the device. A kernel table gives the inputs.

    The host launches kernels while the device runs earlier kernels, so the longer of host and device time counts. The
    device runs kernels one after another. Within a kernel, compute overlaps with memory traffic. A matrix product takes
    its FLOP divided by the rate of the whole GPU, but at least the time of a tile on one core. Library solvers run
    column by column. After a longer wait for the device, the host takes longer to wake up. The longer the device time
    is relative to the whole time, the larger the error of the prediction.
    """

    name, version = "gpu_kernels", 4
    inputs = FrozenDict({name: Input(name.rpartition("_")[2], 0.0, 0) for name in SUMS})
    kernels = FrozenDict({name: name.rpartition("_")[2] for name in LISTS})
    variants = ("compiled",)
    prior = prior_of(GpuCoefficients, log_sd=0.8)  # pyright: ignore

    @property
    def facts(self) -> Facts:
        """The default facts: the data sheet of an H100."""
        return gpu_facts(target_device("h100"))

    def terms_ns(self, coefficients: GpuCoefficients, runs: Runs, facts: Facts) -> Mapping[str, RealLike]:
        """Return a dict from name to part of the predicted time in ns, `[*batch]`. The sum is the predicted time."""
        c, host, device = coefficients, *_host_and_device_ns(coefficients, runs, facts)
        host_ns = c.overlapped_ns + host["launch_ns"]
        device_ns = device["kernels_ns"] + device["work_ns"] + device["sort_ns"] + device["triangular_ns"]
        # The time of the longer side goes to its parts.
        beyond_ns = soft_roofline(host_ns, device_ns, QUEUE_SHARPNESS) - host_ns
        parts = {name: beyond_ns * (device[name] / device_ns) for name in device if name != "solver_ns"}
        parts["solver_ns"] = device["solver_ns"] + parts.pop("triangular_ns")
        return {**host, **parts, "wake_ns": c.wake_ns * beyond_ns / (beyond_ns + WAKE_SHARE * c.wake_ns)}

    def scatter(self, runs: Runs, facts: Facts) -> RealLike:
        """Return the relative scatter: the device's share of the time at prior medians, plus a bit of the host's."""
        median = self.prior.median
        host, device = _host_and_device_ns(median, runs, facts)
        device_ns = median.kernel_ns + sum(device.values())
        share = device_ns / (device_ns + sum(host.values()))
        return jnp.hypot(share, HOST_SCATTER * (1.0 - share))


def _host_and_device_ns(c: GpuCoefficients, runs: Runs, facts: Facts) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two dicts from name to time in ns, `[*batch]`: the parts of the host time and of the device time."""
    x = columns_of(runs)
    launches = jnp.maximum(x["launches"], 1.0)
    memory = c.memory_share * facts["memory_bytes_per_ns"]
    beyond = soft_excess(x["moved_bytes"] / launches + 1.0, facts["cache_bytes"], CACHE_SHARPNESS)
    memory_ns = (x["moved_bytes"] + 1e-3) / memory * (beyond + (1.0 - beyond) / c.cache_gain)
    flop_ns = sum(x[f"{name}_flop"] / facts[f"{name}_flop_per_ns"] for name in PRODUCTS)
    tail = soft_roofline(1.0, facts["cores"] / (c.tile_share * jnp.maximum(x["tiles"] / launches, 1.0)), TAIL_SHARPNESS)
    compute_ns = flop_ns * tail / c.product_share
    compute_ns += x["operations"] / (c.operation_share * facts["vector_flop_per_ns"])
    host = {
        "call_ns": c.call_ns + c.overlapped_ns + c.array_ns * x["arrays"],
        "launch_ns": c.command_ns * x["commands"] + c.library_call_ns * x["library_calls"],
    }
    device = {
        "kernels_ns": c.kernel_ns * x["kernels"],
        "work_ns": soft_roofline(compute_ns, memory_ns, ROOFLINE_SHARPNESS).sum(-1),
        "sort_ns": c.sort_stage_ns * x["sort_stages"] + x["sort_bytes"] / c.sort_bytes_per_ns,
        "triangular_ns": c.triangular_column_ns * x["triangular_solve_columns"],
        "solver_ns": c.cholesky_column_ns * x["cholesky_columns"]
        + c.lu_column_ns * x["lu_columns"]
        + c.qr_column_ns * x["qr_columns"]
        + c.eigen_ns * x["eigen_calls"]
        + c.eigen_column_ns * x["eigen_columns"],
    }
    return host, device


GPU_KERNELS = GpuKernelsModel()


def gpu_parts_ns(coefficients: GpuCoefficients, runs: Runs, facts: Facts) -> tuple[RealLike, RealLike]:
    r"""Return two times for runs, `[*batch]` each: `device_ns` of the GPU, and `dispatch_ns` of the host.

    In a loop that does not wait for results, each call takes the longer of both times. `dispatch_ns` does not include
    the coefficient `overlapped_ns`, which is mostly waiting. For 190 functions in such a loop on an H100, the median of
    measured time divided by the longer of both times is 0.97, with a standard deviation of 19 %.

    Args:
        coefficients: coefficients of `GPU_KERNELS`, for example from a posterior.
        runs: runs of `GPU_KERNELS`, from `gpu_runs`.
        facts: facts of the GPU, from `gpu_facts`.

    Examples:
        >>> from rlxjax.jaxpr import gpu_program
        >>> text = "ENTRY %f (x: f32[8]) -> f32[8] {\n  %x = f32[8] parameter(0)\n  ROOT %y = f32[8] tanh(%x)\n}"
        >>> device_ns, dispatch_ns = gpu_parts_ns(GpuCoefficients(), gpu_runs([gpu_program(text)]), GPU_KERNELS.facts)
        >>> round(float(device_ns[0])), round(float(dispatch_ns[0]))
        (2000, 38000)
    """
    host, device = _host_and_device_ns(coefficients, runs, facts)
    return sum(device.values()), sum(host.values()) - coefficients.overlapped_ns


def gpu_runs(programs: Sequence[GpuProgram]) -> Runs:
    r"""Return the runs of `GPU_KERNELS` for compiled programs, `[n]`.

    Examples:
        >>> from rlxjax.jaxpr import gpu_program
        >>> text = "ENTRY %f (x: f32[8]) -> f32[8] {\n  %x = f32[8] parameter(0)\n  ROOT %y = f32[8] tanh(%x)\n}"
        >>> gpu_runs([gpu_program(text)]).shape
        (1,)
    """
    return GPU_KERNELS.runs([gpu_inputs(program) for program in programs])


def gpu_inputs(program: GpuProgram) -> dict[str, Any]:
    r"""Return the inputs of `GPU_KERNELS` for a compiled program: a dict from name to a number or a list, `[kernels]`.

    `commands` is the number of launches by the host. A kernel or a graph of kernels counts as one launch, and a copy as
    two. An entry of a list belongs to a row of the kernel table, and is the total over the launches of the row.

    Examples:
        >>> from rlxjax.jaxpr import gpu_program
        >>> text = "ENTRY %f (x: f32[8]) -> f32[8] {\n  %x = f32[8] parameter(0)\n  ROOT %y = f32[8] tanh(%x)\n}"
        >>> found = gpu_inputs(gpu_program(text))
        >>> found["commands"], found["moved_bytes"].tolist(), found["operations"].tolist()
        (1.0, [64.0], [8.0])
    """
    table = program.kernels
    counts, launches, itemsize, written, pieces = (
        np.asarray(column, float)
        for column in (table.counts, table.launches, table.itemsize, table.written_bytes, table.pieces)
    )

    def of(*names: str) -> np.ndarray:
        return counts @ np.isin(list(OPERATIONS), names)

    # A row of n elements takes n * octaves comparisons; sorting networks pad rows to a power of two.
    comparisons, octaves = of("sort", "sort_several") / pieces, np.arange(1.0, 60.0)
    octave = 1.0 + np.searchsorted(octaves * 2.0**octaves, comparisons)
    stages = octave * (octave + 1.0) / 2.0 * (comparisons > 0)
    padding = octave * 2.0**octave / np.maximum(comparisons, 1.0)
    found: dict[str, Any] = {
        "arrays": program.arguments + ARRAYS_OF_A_RESULT * program.results,
        "commands": launches.sum() - program.grouped + program.graphs + program.forks + program.copies,
        "kernels": launches.sum(),
        "library_calls": program.calls + program.convolutions,
        "sort_stages": launches @ stages,
        "sort_bytes": stages @ (written * padding),
    }
    found["commands"] += COMMANDS_OF_A_READBACK * program.readbacks
    for name, operations in SOLVERS.items():
        for one in operations:
            matrices, columns = of(f"{one}_matrices") / launches, of(f"{one}_columns") / launches
            columns = columns / np.maximum(matrices, 1.0)
            most = IN_TURN_COLUMNS.get(one, IN_TURN_BY_MATRIX.get(one, np.inf) * np.maximum(matrices, 1.0))
            in_turn = np.where(columns > most, matrices, matrices > 0)
            found[f"{name}_columns"] = found.get(f"{name}_columns", 0.0) + launches @ (columns * in_turn)
            calls = "eigen_calls" if name == "eigen" else "library_calls"  # the text has the first call
            found[calls] = found.get(calls, 0.0) + launches @ (in_turn - (name != "eigen") * (matrices > 0))
    flop = of("dot_general", "product_with_vector", "conv_general_dilated")
    kind = np.select(
        [flop == 0, itemsize >= 8, itemsize <= 2, np.asarray(table.is_exact) > 0], [-1, 4, itemsize - 1, 3], 2
    )
    results = of("product_results")
    tile = np.where(kind >= PRODUCTS.index("exact"), SMALL_TILE_ELEMENTS, TILE_ELEMENTS)
    is_elementwise = [kind in ELEMENTWISE and name not in ROWS for name, kind in OPERATIONS.items()]
    lists = {
        "launches": launches,
        "moved_bytes": written + np.asarray(table.read_bytes, float),
        "operations": counts @ is_elementwise * np.maximum(itemsize // 4, 1.0),
        "tiles": (pieces + np.where(results > 0, results, written / itemsize) / tile) * (flop > 0),
        **{f"{name}_flop": flop * (kind == place) for place, name in enumerate(PRODUCTS)},
    }
    return {name: float(count) for name, count in found.items()} | lists
