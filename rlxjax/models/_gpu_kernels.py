"""The latency model of a program that was compiled for a GPU: launching, kernels and their overlap, waiting."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from rlxjax._numerics import soft_excess, soft_roofline
from rlxjax._typing import RealLike
from rlxjax._values import FrozenDict
from rlxjax.fit import Facts, Input, Runs
from rlxjax.gate import Coefficients
from rlxjax.jaxpr import GpuKernelKind, GpuProgram
from rlxjax.targets import TargetDevice, target_device, target_names

from ._coefficients import ROOFLINE_SHARPNESS, coefficients, prior_of, typical
from ._functions import CountsModel

#: How sharply the longer of launching and computing decides.
QUEUE_SHARPNESS = 4
#: How sharply kernels that move more than the second cache holds go to memory.
CACHE_SHARPNESS = 3

#: Kinds of products, by the rate of a data sheet that bounds them.
PRODUCTS = ("half", "float32", "exact", "float64")
#: What is factorised with a look at every column, and what calling a library for takes more than launching a kernel.
PIVOTED = (GpuKernelKind.LU, GpuKernelKind.QR)
CALLED = (GpuKernelKind.PRODUCT, GpuKernelKind.SCALE, GpuKernelKind.CHOLESKY, *PIVOTED)
#: What solvers go through column by column.
COLUMNS = {
    GpuKernelKind.TRIANGULAR: "triangular_columns",
    GpuKernelKind.CHOLESKY: "cholesky_columns",
    **dict.fromkeys(PIVOTED, "pivoted_columns"),
    GpuKernelKind.EIGEN: "eigen_columns",
}
SORTS = (GpuKernelKind.SORT, GpuKernelKind.RADIX_SORT)
#: What a result of a call stands for, of an argument: the host makes an array of it.
ARRAYS_OF_A_RESULT = 3.0
#: Commands that a copy stands for, and a value that is brought to the host.
COMMANDS_OF_A_COPY = 2.0
#: The columns by what is counted there, with the unit of each.
GPU_INPUTS: Mapping[str, str] = {
    "arrays": "arrays",
    "commands": "commands",
    "library_calls": "calls",
    "convolution_calls": "calls",
    "kernels": "kernels",
    "moved_bytes": "bytes",
    "kernel_bytes": "bytes",
    "operations": "operations",
    **{f"{name}_flop": "FLOP" for name in PRODUCTS},
    **{f"{name}_tile_flop": "FLOP" for name in PRODUCTS},
    "sort_stages": "stages",
    "sort_steps": "steps",
    "triangular_columns": "columns",
    "cholesky_columns": "columns",
    "pivoted_columns": "columns",
    "eigen_calls": "calls",
    "eigen_columns": "columns",
}


@coefficients
@dataclasses.dataclass(frozen=True)
class GpuCoefficients(Coefficients):
    """What the parts of a call of a compiled program take on one host with one GPU; every field positive, `[*batch]`.

    Rates are shares of those of the data sheet, which the facts hold. The other defaults are orders of magnitude of a
    present-day host.
    """

    call_ns: RealLike = typical(3e4, "one call and waiting for it, but for what runs while the device works.")
    overlapped_ns: RealLike = typical(2e4, "the part of a call that runs while the device works.")
    array_ns: RealLike = typical(1e3, "one array that a call takes; one that it gives is several of these.")
    command_ns: RealLike = typical(4e3, "launching a kernel or a graph of kernels; a copy is several of these.")
    library_call_ns: RealLike = typical(4e3, "what calling cuBLAS or a factorisation takes more.")
    convolution_call_ns: RealLike = typical(1e4, "what calling cuDNN takes more.")
    kernel_ns: RealLike = typical(2e3, "one kernel on the device, whatever it does.")
    wake_ns: RealLike = typical(1e4, "waking the host once the device is done: the longer it waited, the longer.")
    memory_share: RealLike = typical(0.88, "of the data sheet's bandwidth.", log_sd=0.07)
    cache_gain: RealLike = typical(1.7, "bandwidth of the second cache, of that of the memory.", log_sd=0.3)
    operation_share: RealLike = typical(
        0.3, "of the data sheet's rate of float32, an elementwise operation as one.", log_sd=0.35
    )
    product_share: RealLike = typical(0.7, "of the data sheet's rates of products.", log_sd=0.1)
    sort_stage_ns: RealLike = typical(500.0, "one stage of a sort.")
    sort_bytes_per_ns: RealLike = typical(5e3, "bytes that the stages of sorts go over.", log_sd=0.5)
    triangular_column_ns: RealLike = typical(300.0, "one column of a triangular solve.")
    cholesky_column_ns: RealLike = typical(500.0, "one column of a Cholesky factorisation.")
    pivoted_column_ns: RealLike = typical(2e3, "one column of an LU or QR factorisation.")
    eigen_ns: RealLike = typical(2e5, "one call for eigenvalues or singular values.")
    eigen_column_ns: RealLike = typical(1e4, "one column of these.")


def gpu_facts(device: TargetDevice) -> Facts:
    """Return what a data sheet says of a GPU, as the facts of the model.

    Raises:
        ValueError: a device of another kind, or one whose figures lack the cores, the cache or a rate of float32.

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
            "half_flop_per_ns": float(matrix.get("bf16", vector["f32"])),
            "float32_flop_per_ns": float(matrix.get("tf32", vector["f32"])),
            "exact_flop_per_ns": float(vector["f32"]),
            "float64_flop_per_ns": float(matrix.get("f64", vector.get("f64", vector["f32"] / 2))),
        }
    )


@functools.cache
def gpu_facts_of_kind(device_kind: str) -> Facts | None:
    """Return what a data sheet says of a device by JAX's name for it; None where it is no GPU that has one here.

    Examples:
        >>> gpu_facts_of_kind("NVIDIA H100 80GB HBM3")["cores"], gpu_facts_of_kind("cpu")
        (132.0, None)
    """
    words = device_kind.lower().replace("-", " ").split()
    return next((gpu_facts(target_device(name)) for name in target_names() if name in words), None)


@dataclasses.dataclass(frozen=True)
class GpuKernelsModel(CountsModel):
    """A program that was compiled for a GPU, called with arrays of the device; inputs come from the program's text.

    The host launches kernels while the device runs earlier ones: the longer of both decides. On the device kernels
    follow each other; products and other work overlap with memory traffic. A product takes what its FLOP take on the
    whole card, and its last tile what that takes on one core. Libraries' solvers go on column by column. The host
    then waits, and wakes the later the longer it waited.
    """

    name, version = "gpu_kernels", 1
    inputs = FrozenDict({name: Input(unit, least=0.0, step=0, default=0.0) for name, unit in GPU_INPUTS.items()})
    variants = ("compiled",)
    prior = prior_of(GpuCoefficients, log_sd=0.8)  # pyright: ignore

    @property
    def facts(self) -> Facts:
        """The data sheet of an H100."""
        return gpu_facts(target_device("h100"))

    def terms_ns(self, coefficients: GpuCoefficients, runs: Runs, facts: Facts) -> Mapping[str, RealLike]:
        """Return the parts of what runs take in ns by name, `[*batch]`; their sum is the prediction."""
        c, x = coefficients, {name: jnp.asarray(value) for name, value in runs.inputs.items()}
        commands_ns = (
            c.command_ns * x["commands"]
            + c.library_call_ns * x["library_calls"]
            + c.convolution_call_ns * x["convolution_calls"]
        )
        memory = c.memory_share * facts["memory_bytes_per_ns"]
        beyond = soft_excess(x["kernel_bytes"] + 1.0, facts["cache_bytes"], CACHE_SHARPNESS)
        memory_ns = (x["moved_bytes"] + 1.0) / memory * (beyond + (1.0 - beyond) / c.cache_gain)
        operations_ns = x["operations"] / (c.operation_share * facts["vector_flop_per_ns"])
        products_ns = 0.0
        for name in PRODUCTS:
            flop = x[f"{name}_flop"] + facts["cores"] * x[f"{name}_tile_flop"]
            products_ns += flop / (c.product_share * facts[f"{name}_flop_per_ns"])
        sort_ns = c.sort_stage_ns * x["sort_stages"] + x["sort_steps"] / c.sort_bytes_per_ns
        work_ns = soft_roofline(operations_ns + products_ns, memory_ns, ROOFLINE_SHARPNESS)
        solver_ns = (
            c.triangular_column_ns * x["triangular_columns"]
            + c.cholesky_column_ns * x["cholesky_columns"]
            + c.pivoted_column_ns * x["pivoted_columns"]
            + c.eigen_ns * x["eigen_calls"]
            + c.eigen_column_ns * x["eigen_columns"]
        )
        device_ns = c.kernel_ns * x["kernels"] + work_ns + sort_ns
        host_ns = c.overlapped_ns + commands_ns
        both_ns = soft_roofline(host_ns, device_ns, QUEUE_SHARPNESS)
        # What the longer one takes goes to its parts: those of the host, and those of the device.
        beyond_ns = both_ns - host_ns
        return {
            "call_ns": c.call_ns + c.overlapped_ns + c.array_ns * x["arrays"],
            "launch_ns": commands_ns,
            "kernels_ns": beyond_ns * (c.kernel_ns * x["kernels"] / device_ns),
            "work_ns": beyond_ns * (work_ns / device_ns),
            "sort_ns": beyond_ns * (sort_ns / device_ns),
            "solver_ns": solver_ns,
            "wake_ns": c.wake_ns * jnp.log1p(beyond_ns / c.wake_ns),
        }


GPU_KERNELS = GpuKernelsModel()


def gpu_runs(programs: Sequence[GpuProgram]) -> Runs:
    """Return the runs of compiled programs by what they launch, `[n]`.

    Examples:
        >>> from rlxjax.jaxpr import GpuProgram
        >>> gpu_runs([GpuProgram(1, 1, ())]).shape
        (1,)
    """
    return GPU_KERNELS.runs([gpu_inputs(program) for program in programs])


def gpu_inputs(program: GpuProgram) -> dict[str, float]:
    """Return the inputs of the model of GPU kernels that a compiled program gives, by name.

    `commands` are what the host launches: kernels, graphs of kernels, and copies, which count more. `kernel_bytes` is
    what a kernel moves that moves a typical byte; `..._tile_flop` are those of one tile of each product, which one core
    of the card computes.

    Examples:
        >>> from rlxjax.jaxpr import GpuKernel, GpuKernelKind, GpuProgram
        >>> kernel = GpuKernel(GpuKernelKind.ELEMENTWISE, launches=3, read_bytes=8, written_bytes=8)
        >>> found = gpu_inputs(GpuProgram(1, 1, (kernel,)))
        >>> found["commands"], found["moved_bytes"], found["kernel_bytes"]
        (3.0, 48.0, 16.0)
    """
    sums = dict.fromkeys(GPU_INPUTS, 0.0)
    sums["arrays"] = program.arguments + ARRAYS_OF_A_RESULT * program.results
    squares = 0.0
    for kernel in program.kernels:
        kind, product = kernel.kind, kernel.product
        counts: dict[str, float] = {
            "commands": COMMANDS_OF_A_COPY if kind is GpuKernelKind.COPY else 1.0,
            "kernels": 1.0,
            "library_calls": kernel.is_library and kind in CALLED,
            "convolution_calls": kind is GpuKernelKind.CONVOLUTION,
            "moved_bytes": float(kernel.bytes * kernel.passes),
            "operations": float(kernel.operations),
        }
        if product is not None:  # by the rate of a data sheet that bounds it
            single = "exact" if product.is_exact else "float32"
            name = "float64" if product.itemsize >= 8 else "half" if product.itemsize <= 2 else single
            counts[f"{name}_flop"] = float(product.flop)
            counts[f"{name}_tile_flop"] = product.flop / max(product.tiles, 1)
        if kind in SORTS:
            octaves = math.ceil(math.log2(max(kernel.row_elements, 2)))
            counts["sort_stages"] = stages = octaves * (octaves + 1) / 2
            counts["sort_steps"] = stages * kernel.written_bytes * (kind is GpuKernelKind.SORT)
        if kind in COLUMNS:
            counts |= {COLUMNS[kind]: kernel.columns, "eigen_calls": kind is GpuKernelKind.EIGEN}
        for name, count in counts.items():
            sums[name] += kernel.launches * count
        squares += float(kernel.launches) * kernel.passes * kernel.bytes**2
    # A graph is one command for all of its kernels, a second stream one more for each that runs there.
    sums["commands"] += program.graphs - program.grouped + program.forks + COMMANDS_OF_A_COPY * program.readbacks
    sums["kernel_bytes"] = squares / max(sums["moved_bytes"], 1.0)
    return {name: float(count) for name, count in sums.items()}
