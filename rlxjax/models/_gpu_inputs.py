"""From what a compiled program launches on a GPU to the inputs of its latency model: exact counts, summed."""

import math
from collections.abc import Mapping

from rlxjax.jaxpr import GpuKernel, GpuKernelKind, GpuProgram, Product

#: Kinds of products, by the rate of a data sheet that bounds them.
PRODUCTS = ("half", "float32", "exact", "float64")
#: What is factorised with a look at every column, and what calling a library for takes more than launching a kernel.
PIVOTED = (GpuKernelKind.LU, GpuKernelKind.QR)
CALLED = (GpuKernelKind.PRODUCT, GpuKernelKind.SCALE, GpuKernelKind.CHOLESKY, *PIVOTED)
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


def gpu_inputs(program: GpuProgram) -> dict[str, float]:
    """Return the inputs of the model of GPU kernels that a compiled program gives, by name.

    `commands` are what the host launches: kernels, graphs of kernels, and copies, which count more. `kernel_bytes` is
    what a kernel moves that moves a typical byte; `..._tile_flop` are those of one tile of each product, which one core
    of the card computes.

    Args:
        program: that was compiled.

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
        for name, count in _counts(kernel).items():
            sums[name] += kernel.launches * count
        squares += float(kernel.launches) * kernel.passes * kernel.bytes**2
    # A graph is one command for all of its kernels, a second stream one more for each that runs there.
    sums["commands"] += program.graphs - program.grouped + program.forks + COMMANDS_OF_A_COPY * program.readbacks
    sums["kernel_bytes"] = squares / max(sums["moved_bytes"], 1.0)
    return {name: float(count) for name, count in sums.items()}


def _counts(kernel: GpuKernel) -> dict[str, float]:
    """Return what one launch of a kernel does, by input."""
    found: dict[str, float] = {
        "commands": COMMANDS_OF_A_COPY if kernel.kind is GpuKernelKind.COPY else 1.0,
        "kernels": 1.0,
        "library_calls": kernel.is_library and kernel.kind in CALLED,
        "convolution_calls": kernel.kind is GpuKernelKind.CONVOLUTION,
        "moved_bytes": float(kernel.bytes * kernel.passes),
        "operations": float(kernel.operations),
    }
    if kernel.product is not None:
        name = _rate_of(kernel.product)
        found[f"{name}_flop"] = float(kernel.product.flop)
        found[f"{name}_tile_flop"] = kernel.product.flop / max(kernel.product.tiles, 1)
    if kernel.kind in SORTS:
        octaves = math.ceil(math.log2(max(kernel.row_elements, 2)))
        found["sort_stages"] = octaves * (octaves + 1) / 2
        if kernel.kind is GpuKernelKind.SORT:
            found["sort_steps"] = found["sort_stages"] * kernel.written_bytes
    if kernel.kind is GpuKernelKind.TRIANGULAR:
        found["triangular_columns"] = kernel.columns
    elif kernel.kind is GpuKernelKind.CHOLESKY:
        found["cholesky_columns"] = kernel.columns
    elif kernel.kind in PIVOTED:
        found["pivoted_columns"] = kernel.columns
    elif kernel.kind is GpuKernelKind.EIGEN:
        found |= {"eigen_calls": 1.0, "eigen_columns": kernel.columns}
    return found


def _rate_of(product: Product) -> str:
    """Return which rate of a data sheet bounds a product."""
    if product.itemsize >= 8:
        return "float64"
    if product.itemsize <= 2:
        return "half"
    return "exact" if product.is_exact else "float32"
