"""Devices, gate targets, and the built-in coefficient rows with their provenance."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax._checks import MOST, check_at_least, is_on_device, is_traced
from rlxjax._provenance import Provenance
from rlxjax._typing import Code, RealLike
from rlxjax._values import FrozenDict, by_value

from ._codes import NamedCode, normalised

_Row = TypeVar("_Row")
#: In place of `Self`, which a checker of annotations at run time knows only in a class that it decorates.
_Coefficients = TypeVar("_Coefficients", bound="Coefficients")


class Target(NamedCode):
    """What a fusion gate is tabulated for."""

    METAL = "metal"
    MLX = "mlx"
    CUDA = "cuda"
    ROCM = "rocm"
    WGPU = "wgpu"
    TPU = "tpu"
    CPU = "cpu"


FALLBACK_ROW = "discrete"


class Device(NamedCode):
    """Where a graph may run. `gpu` is the wgpu default adapter.

    A member is a name, the target of its gate, and the name of its row in the set "arch".
    """

    CPU = "cpu", Target.CPU, "cpu"
    METAL = "metal", Target.METAL, "metal"
    MLX = "mlx", Target.MLX
    ANE = "ane", Target.MLX
    CUDA = "cuda", Target.CUDA, "cuda"
    ROCM = "rocm", Target.ROCM, "rocm"
    GPU = "gpu", Target.WGPU, "wgpu"
    VULKAN = "vulkan", Target.WGPU, "wgpu"
    WEBGPU = "webgpu", Target.WGPU, "wgpu"
    DIRECTX = "directx", Target.WGPU, "wgpu"
    OPENGL = "opengl", Target.WGPU, "wgpu"
    TPU = "tpu", Target.TPU

    target: Target
    row: str

    def __new__(cls, name: str, target: Target, row: str = FALLBACK_ROW):
        """Make a member: its value is the name alone."""
        member = str.__new__(cls, name)
        member._value_, member.target, member.row = name, target, row
        return member

    @classmethod
    def parse(cls, name: object) -> "Device":
        """Return the device of this name, in any case; `wgpu` is `gpu`."""
        return cls.GPU if normalised(name) == "wgpu" else super().parse(name)


def jax_device() -> Device:
    """Return the name that coefficient tables know JAX's default device by."""
    device = jax.devices()[0]
    if device.platform == "gpu":
        is_rocm = "rocm" in getattr(device.client, "platform_version", "").lower()
        return Device.ROCM if is_rocm else Device.CUDA
    return Device.TPU if device.platform == "tpu" else Device.CPU


def fusion_target(device: "str | Code") -> "Target | Code":
    """Return the gate target of a device: a `Target` for a name, codes for codes.

    Args:
        device: a name, or codes `[*batch]`.

    Raises:
        ValueError: an unknown device.

    Examples:
        >>> print(fusion_target("ane"))
        mlx
    """
    if isinstance(device, str):
        return Device.parse(device).target
    return _of_device(device, lambda member: member.target.code)


def is_fused_viable(device: "str | Code") -> bool | jax.Array:
    """Whether the fused strategy can pay on a device, every one but cpu and tpu: for a name, or `[*batch]` for codes.

    Args:
        device: a name, or codes.

    Raises:
        ValueError: an unknown device.

    Examples:
        >>> is_fused_viable("cuda"), is_fused_viable("tpu")
        (True, False)
    """
    return _of_device(device, lambda member: member not in (Device.CPU, Device.TPU))


def _of_device(device: "str | Code", property_of: Callable[[Device], Any]) -> Any:
    """Return a property of a device of this name, or of devices of these codes, `[*batch]`."""
    if isinstance(device, str):
        return property_of(Device.parse(device))
    return jnp.asarray([property_of(member) for member in Device])[Device.codes(device)]


def as_leaf(value: Any) -> Any:
    """Return integers and booleans as floats, so that a whole coefficient set has a gradient."""
    if isinstance(value, (bool, int)):
        return float(value)
    if isinstance(value, (list, tuple)) and not any(isinstance(item, str) for item in value):
        return np.asarray(value, np.float64)
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biu":
        return value.astype(np.float64)
    if isinstance(value, jax.Array) and not jnp.issubdtype(value.dtype, jnp.inexact):
        return value.astype(jnp.result_type(float)) if not is_traced(value) else value
    return value


#: What ends so may be infinite: a rate at which nothing takes time, and a penalty that forbids.
_MAY_BE_INFINITE = ("_bw", "_gflops", "_per_ns", "_penalty_ns")


class Coefficients:
    """Base of the coefficient pytrees: frozen dataclasses whose leaves are floats, `[*batch]` each."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            object.__setattr__(self, field.name, as_leaf(getattr(self, field.name)))

    @classmethod
    def checked(cls: type[_Coefficients], **values: Any) -> _Coefficients:
        """Build from values that came from outside; the plain constructor checks nothing.

        Raises:
            ValueError: a negative, NaN or infinite coefficient, with its name.
        """
        made = cls(**values)
        made.check()
        return made

    def check(self, prefix: str = "") -> None:
        """Refuse coefficients that no machine has, where the host can read them: arrays on a device are not fetched."""
        for name, value in vars(self).items():
            if name == "provenance":
                for one in [value] if isinstance(value, str) else value:
                    Provenance(one)
            elif not is_on_device(value, jnp.floating):
                least = -MOST if name == "min_gain_ns" else 0  # a saving that may be a loss
                most = math.inf if name.endswith(_MAY_BE_INFINITE) else MOST
                check_at_least(value, prefix + name, least, "number", most)


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BackendCoefficients(Coefficients):
    """What a backend's launches, syncs and bytes cost; every field `[*batch]`.

    Attributes:
        dispatch_ns: one kernel launch.
        roundtrip_ns: one synchronisation of host and device.
        memory_bw: device memory, bytes per nanosecond.
        readback_bw: device to host, bytes per nanosecond.
        unified_memory: 1 where host and device share memory, else 0.
        sgemm_gflops: float32 matrix products, FLOP per nanosecond.
        small_sgemm_gflops: the same where `m * k * n < 32768`.
        provenance: of every coefficient in the row; one a device in a table.
    """

    dispatch_ns: RealLike
    roundtrip_ns: RealLike
    memory_bw: RealLike
    readback_bw: RealLike
    unified_memory: RealLike
    sgemm_gflops: RealLike
    small_sgemm_gflops: RealLike
    provenance: str | tuple[str, ...] = dataclasses.field(default=Provenance.UNCALIBRATED, metadata={"static": True})


def without_provenance(row: BackendCoefficients) -> BackendCoefficients:
    """Return a row whose structure is that of any other, so that all share their compiled programs."""
    return dataclasses.replace(row, provenance=Provenance.UNCALIBRATED)


#: Matrix products with fewer multiply-adds run at `small_sgemm_gflops`.
SMALL_SGEMM = 32_768

_DEFAULT, _GUESS = Provenance.ARCH_DEFAULT, Provenance.UNCALIBRATED

#: Built-in rows by name, in the order of the fields.
BACKEND_ROWS: Mapping[str, BackendCoefficients] = FrozenDict(
    {
        "cpu": BackendCoefficients(300, 3_000, 30, 30, False, 200, 200, _DEFAULT),
        "cpu-apple": BackendCoefficients(500, 5_000, 50, 50, False, 1_000, 1_000, _DEFAULT),
        "metal": BackendCoefficients(2_000, 5_000, 200, 200, True, 5_000, 5_000, _DEFAULT),
        "mlx": BackendCoefficients(2_000, 5_000, 200, 200, False, 5_000, 500, _GUESS),
        "cuda": BackendCoefficients(3_000, 35_000, 900, 900, False, 12_000, 12_000, _GUESS),
        "rocm": BackendCoefficients(3_000, 40_000, 800, 800, False, 10_000, 10_000, _GUESS),
        "wgpu": BackendCoefficients(5_000, 80_000, 120, 120, False, 2_500, 2_500, _GUESS),
        "discrete": BackendCoefficients(2_000, 20_000, 800, 50, False, 800, 800, _GUESS),
    }
)


def row_names(coefficients: str = "arch") -> dict[Device, str]:
    """Return the row name of every device in a built-in set: in "portable", only the cpu has one of its own."""
    if (name := normalised(coefficients)) not in ("arch", "portable"):
        raise ValueError(f"coefficients: expected one of arch, portable, got {coefficients!r}")
    return {device: device.row if name == "arch" or device is Device.CPU else FALLBACK_ROW for device in Device}


def backend_coefficients(device: "str | Code | Sequence[int]", coefficients: str = "arch") -> BackendCoefficients:
    """Return the built-in row of a device, or a row of arrays for device codes.

    `cpu-apple` names the row of Apple's arm64 processors. The row named mlx, which no device has
    because it is for a machine with MLX, is `BACKEND_ROWS["mlx"]`.

    Args:
        device: a name, or codes `[*batch]`.
        coefficients: the set, "arch" or "portable".

    Raises:
        ValueError: an unknown device or set.

    Examples:
        >>> row = backend_coefficients("cuda")
        >>> row.dispatch_ns, str(row.provenance)
        (3000.0, 'uncalibrated')
    """
    if isinstance(device, str):
        apple = normalised(device) == "cpu-apple"
        return BACKEND_ROWS["cpu-apple" if apple else row_names(coefficients)[Device.parse(device)]]
    return take_row(backend_table(row_names(coefficients)), Device.codes(device))


def backend_table(names: Mapping[Device, str]) -> BackendCoefficients:
    """Return the named rows of all devices as one row of NumPy arrays, `[12]`."""
    rows = [BACKEND_ROWS[names[device]] for device in Device]
    provenance = tuple(str(row.provenance) for row in rows)
    return stack_rows([dataclasses.replace(row, provenance=provenance) for row in rows])


def stack_rows(rows: Sequence[_Row]) -> _Row:
    """Return rows (pytrees of scalars) as one row of arrays."""
    return jax.tree.map(lambda *leaves: np.array(leaves), *rows)


def take_row(table: _Row, codes: Code) -> _Row:
    """Return the entries of a table (a row of arrays over codes) at integer codes."""
    index = jnp.asarray(codes)
    leaves, structure = jax.tree.flatten(table)
    columns = [jnp.asarray(leaf) for leaf in leaves]
    if index.ndim == 0:
        return structure.unflatten([column[index] for column in columns])
    return structure.unflatten(_select_entries(columns, index))


@jax.custom_jvp
def _select_entries(columns: list[jax.Array], index: jax.Array) -> list[jax.Array]:
    """Return the entry of each column `[codes]` at an array of codes, by comparisons.

    Prevents: a derivative with a pass over the rows for every code. The value is not gathered since
    comparisons run in step with the formulas around them, and a gather row by row.
    """

    def select(column: jax.Array) -> jax.Array:
        found = jnp.broadcast_to(column[0], index.shape)
        for code in range(1, len(column)):
            found = jnp.where(index == code, column[code], found)
        return found

    return [select(column) for column in columns]


@_select_entries.defjvp
def _select_entries_jvp(primals, tangents):
    columns, index = primals
    return _select_entries(columns, index), [tangent[index] for tangent in tangents[0]]
