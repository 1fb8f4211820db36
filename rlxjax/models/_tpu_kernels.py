"""The latency model of a program compiled for a TPU: cycles that the compiler estimates, bytes, and operations."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from rlxjax._numerics import soft_roofline
from rlxjax._typing import RealLike
from rlxjax._values import FrozenDict
from rlxjax.devices import TargetDevice, target_device
from rlxjax.fit import Facts, Input, Runs
from rlxjax.gate import Coefficients
from rlxjax.jaxpr import OPERATIONS, FunctionProfile

from ._coefficients import ROOFLINE_SHARPNESS, coefficients, prior_of, typical
from ._functions import CountsModel, columns_of

#: Sharpness of the lower bound of a program's time, which its bytes and its matrix products set.
FLOOR_SHARPNESS = 12
#: Elements that the vector units process in a cycle: four units of 8 x 128 lanes each.
LANES = 4096
#: Vector operations per element in each stage of a sorting network: two shifts, a comparison, two selections.
STAGE_OPERATIONS = 5
#: Classes of operations that the vector units do not execute.
NO_OPERATIONS = ("movement", "transpose", "indexing", "sort", "factorisation", "product")
#: Inputs that are a number per program; then lists with an entry for each row of the table of streaming kernels.
SUMS = dict.fromkeys(("arrays", "cycles", "places", "columns"), "1") | {"moved_bytes": "bytes", "product_ns": "ns"}
LISTS = {"launches": "kernels", "kernel_bytes": "bytes", "operations": "operations"}


@coefficients
@dataclasses.dataclass(frozen=True)
class TpuCoefficients(Coefficients):
    """Coefficients of a call of a compiled program on a host with TPUs; each field is positive.

    No TPU was timed. Fields that end in `_share` are relative to the data sheet or to the compiler's cycles.
    """

    call_share: RealLike = typical(1.0, "time of a call with a wait, relative to the fact `call_ns`.", log_sd=0.5)
    dispatch_ns: RealLike = typical(2e4, "host time of a call that does not wait.", log_sd=0.7)
    array_ns: RealLike = typical(300.0, "time per argument or result array of a call.", log_sd=0.8)
    cycle_share: RealLike = typical(0.95, "time of products, relative to their cycles.", log_sd=0.22)
    memory_share: RealLike = typical(0.84, "memory bandwidth, relative to the data sheet.", log_sd=0.15)
    kernel_ns: RealLike = typical(500.0, "time of any streaming kernel, apart from its work.", log_sd=0.7)
    operation_share: RealLike = typical(0.45, "rate of streaming kernels, relative to the vector units.", log_sd=0.6)
    place_ns: RealLike = typical(10.0, "time per gathered or scattered element.", log_sd=1.0)
    column_ns: RealLike = typical(1e3, "time per column of a solver.", log_sd=0.8)


def tpu_facts(device: TargetDevice) -> Facts:
    """Return the facts of `TPU_KERNELS` for a TPU: figures from its data sheet.

    Raises:
        ValueError: the device is not a TPU.

    Examples:
        >>> tpu_facts(target_device("tpu-v5e"))["memory_bytes_per_ns"]
        819.0
    """
    if device.platform != "tpu":
        raise ValueError(f"target {device.name}: expected a TPU")
    vector = device.vector_flop_per_ns.get("f32", LANES * device.clock_ghz)
    return FrozenDict(
        {
            "clock_ghz": float(device.clock_ghz),
            "memory_bytes_per_ns": float(device.bandwidth_bytes_per_ns),
            "vector_flop_per_ns": float(vector),
            "call_ns": float(device.call_ns or 8e4),
        }
    )


@dataclasses.dataclass(frozen=True)
class TpuKernelsModel(CountsModel):
    """The time of a call of a program compiled for a TPU, with arrays on the device.

    The compiler estimates the cycles of each kernel. They give the time of products and solvers. For streaming kernels,
    bytes and operations at data-sheet rates give the time, because the cycles of copies are two to five times their
    published times. A program takes at least the time of its bytes or its products. The time of the host is added.
    """

    name, version = "tpu_kernels", 1
    inputs = FrozenDict({name: Input(unit, 0.0, 0) for name, unit in SUMS.items()})
    kernels = FrozenDict(LISTS)
    variants = ("compiled",)
    prior = prior_of(TpuCoefficients)  # pyright: ignore

    @property
    def facts(self) -> Facts:
        """The default facts: the data sheet of a TPU v5e."""
        return tpu_facts(target_device("tpu-v5e"))

    def terms_ns(self, coefficients: TpuCoefficients, runs: Runs, facts: Facts) -> Mapping[str, RealLike]:
        """Return a dict from name to part of the predicted time in ns, `[*batch]`. The sum is the predicted time."""
        c, x = coefficients, columns_of(runs)
        call_ns = c.call_share * facts["call_ns"] + c.array_ns * x["arrays"]
        return {"call_ns": call_ns, **_device_ns(c, x, facts)}


def _device_ns(c: TpuCoefficients, x: Mapping[str, Any], facts: Facts) -> dict[str, Any]:
    """Return a dict from name to part of the device time in ns, `[*batch]`."""
    memory = c.memory_share * facts["memory_bytes_per_ns"]
    compute_ns = x["operations"] / (c.operation_share * facts["vector_flop_per_ns"])
    # An empty row takes almost no time, and keeps a slope.
    work_ns = soft_roofline(compute_ns, (x["kernel_bytes"] + 1e-3) / memory, ROOFLINE_SHARPNESS)
    # Products do not use the vector unit, and the data-sheet rates bound their time from below.
    parts = {
        "cycles_ns": c.cycle_share * x["cycles"] / facts["clock_ghz"],
        "kernels_ns": (work_ns + c.kernel_ns * x["launches"]).sum(-1),
        "places_ns": c.place_ns * x["places"],
        "solver_ns": c.column_ns * x["columns"],
    }
    least_ns = jnp.maximum(x["moved_bytes"] / facts["memory_bytes_per_ns"], x["product_ns"])
    sum_ns = sum(parts.values()) + 1e-3
    return parts | {"roofline_ns": soft_roofline(sum_ns, least_ns, FLOOR_SHARPNESS) - sum_ns}


def tpu_parts_ns(coefficients: TpuCoefficients, runs: Runs, facts: Facts) -> tuple[RealLike, RealLike]:
    """Return two times for runs, `[*batch]` each: `device_ns` of the TPU, and `dispatch_ns` of the host."""
    c, x = coefficients, columns_of(runs)
    return sum(_device_ns(c, x, facts).values()), c.dispatch_ns + c.array_ns * x["arrays"]


TPU_KERNELS = TpuKernelsModel()
#: Number of bfloat16 products with which a TPU computes a product, by the kind of the product.
PASSES = {"float32": 1.0, "high": 3.0, "exact": 6.0, "float64": 36.0}


def product_ns(device: TargetDevice, products: Mapping[str, float]) -> float:
    """Return the time of matrix products in ns at the data-sheet rates of a device.

    Args:
        device: a TPU or a GPU.
        products: a dict from kind of product to number of FLOP. `rlxjax.jaxpr.PRODUCT_KINDS` lists the kinds.

    Examples:
        >>> v5e = target_device("tpu-v5e")
        >>> product_ns(v5e, {"half": 197e3}), product_ns(v5e, {"exact": 197e3})
        (1.0, 6.0)
    """
    matrix = device.matrix_flop_per_ns
    half = matrix.get("bf16", matrix.get("f16", device.vector_flop_per_ns.get("f32", 1.0)))
    rates = {"half": half, "byte": matrix.get("s8", matrix.get("f8", half))}
    if device.platform == "tpu":
        rates |= {name: half / passes for name, passes in PASSES.items()}
    else:
        vector = device.vector_flop_per_ns
        exact = vector.get("f32", half)
        tensor = matrix.get("tf32", exact)
        double = matrix.get("f64", vector.get("f64", exact / 2))
        rates |= {"float32": tensor, "high": tensor, "exact": exact, "float64": double}
    return sum(flop / rates[kind] for kind, flop in products.items())


def tpu_inputs(profile: FunctionProfile) -> dict[str, Any]:
    """Return the inputs of `TPU_KERNELS` for a profile: a dict from name to a number or a list, `[kernels]`.

    Raises:
        ValueError: the profile is not that of a program compiled for a TPU.
    """
    compiled = profile.target
    if compiled is None or compiled.others is None:
        raise ValueError("profile: expected one that was compiled for a TPU")
    table, exchanged = compiled.others, compiled.collectives.values()
    counts, launches, written, itemsize, pieces = (
        np.asarray(column, float)
        for column in (table.counts, table.launches, table.written_bytes, table.itemsize, table.pieces)
    )

    def of(names: Any) -> np.ndarray:
        return counts @ np.isin(list(OPERATIONS), [*names])

    elements = written / itemsize
    octaves = np.ceil(np.log2(np.maximum(elements / np.maximum(pieces, 1.0), 2.0)))
    network = (of(("sort", "sort_several")) > 0) * elements * octaves * (octaves + 1.0) / 2.0 * STAGE_OPERATIONS
    works = [name for name, kind in OPERATIONS.items() if kind not in NO_OPERATIONS]
    return {
        "arrays": float(profile.arrays),
        "cycles": float(compiled.own_cycles),
        "moved_bytes": float(profile.io.device_traffic_bytes - sum(row.bytes or 0 for row in exchanged)),
        "places": float(of(("gather_places", "scatter_places")).sum()),
        "product_ns": product_ns(compiled.device, compiled.products),
        "columns": float(of(name for name in OPERATIONS if name.endswith("_columns")).sum()),
        "launches": launches,
        "kernel_bytes": written + np.asarray(table.read_bytes, float),
        "operations": of(works) + of(("top_k", "top_k_by_sort")) + network,
    }
