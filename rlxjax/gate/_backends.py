"""Enums of devices and of fusion targets, with integer codes, and the built-in cost coefficients of devices."""

import copy
import dataclasses
import enum
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax._checks import MOST, check_at_least, is_on_device, is_traced, real_numbers, unmasked
from rlxjax._tracing import default_platform
from rlxjax._typing import Code, Provenance, RealLike
from rlxjax._values import FrozenDict, by_value

_Row = TypeVar("_Row")
# Beartype understands `Self` only in classes that it decorates itself.
_Coefficients = TypeVar("_Coefficients", bound="Coefficients")
_NamedCode = TypeVar("_NamedCode", bound="NamedCode")


def normalised(name: object) -> str:
    """Return a name in a form for comparison: in lower case, with `-` instead of `_`, and without outer spaces."""
    return str(name).strip().lower().replace("_", "-")


class NamedCode(enum.StrEnum):
    """The base class of enums whose names have integer codes, for tables and traced code. A code is a position."""

    @property
    def code(self) -> int:
        """The integer code of this member: the member's position in the enum, counted from 0."""
        return list(type(self)).index(self)

    @classmethod
    def parse(cls: type[_NamedCode], name: object) -> _NamedCode:
        """Return the member whose name is `name`. Lower and upper case make no difference.

        Raises:
            ValueError: no member has this name.
        """
        wanted = normalised(name)
        for member in cls:
            if normalised(member) == wanted:
                return member
        raise ValueError(f"unknown {_noun(cls)} {name!r}; expected one of {', '.join(cls)}")

    @classmethod
    def codes(cls, value: "str | Code | Sequence[str] | Sequence[int]") -> Code:
        """Return the integer codes of names. Integer codes are returned unchanged; they are checked unless traced.

        Raises:
            ValueError: a name is unknown, a code is outside the enum, or `value` holds neither names nor integers.
        """
        if isinstance(value, str):
            return cls.parse(value).code
        is_read = not is_traced(value)
        array: Any = np.asarray(unmasked(value, _noun(cls))) if is_read else value
        if is_read and array.dtype.kind in "UO":
            return np.array([cls.parse(str(name)).code for name in array.flat], np.int32).reshape(array.shape)
        if not jnp.issubdtype(array.dtype, jnp.integer):
            expected = "names or integer codes" if is_read else "integer codes in traced code"
            raise ValueError(f"{_noun(cls)}: expected {expected}, got {array.dtype}")
        if is_read and array.size and not 0 <= array.min() <= array.max() < len(cls):
            raise ValueError(f"{_noun(cls)}: expected codes from 0 to {len(cls) - 1}, got {array}")
        return array if isinstance(value, Sequence) else value


def _noun(codes: type[NamedCode]) -> str:
    """Return the last word of the name of an enum class, in lower case, for use in error messages."""
    return re.split("(?=[A-Z])", codes.__name__)[-1].lower()


class FusionTarget(NamedCode):
    """A kind of backend. Each kind has a built-in `IoFusionGate`."""

    METAL = "metal"
    MLX = "mlx"
    CUDA = "cuda"
    ROCM = "rocm"
    WGPU = "wgpu"
    TPU = "tpu"
    CPU = "cpu"


class Device(NamedCode):
    """A kind of device that can run a graph. The device `gpu` is the default adapter of wgpu.

    `target` is the fusion target whose gate applies to the device. `row` names the device's row in `BACKEND_ROWS`.
    """

    CPU = "cpu", FusionTarget.CPU, "cpu"
    METAL = "metal", FusionTarget.METAL, "metal"
    MLX = "mlx", FusionTarget.MLX
    ANE = "ane", FusionTarget.MLX
    CUDA = "cuda", FusionTarget.CUDA, "cuda"
    ROCM = "rocm", FusionTarget.ROCM, "rocm"
    GPU = "gpu", FusionTarget.WGPU, "wgpu"
    VULKAN = "vulkan", FusionTarget.WGPU, "wgpu"
    WEBGPU = "webgpu", FusionTarget.WGPU, "wgpu"
    DIRECTX = "directx", FusionTarget.WGPU, "wgpu"
    OPENGL = "opengl", FusionTarget.WGPU, "wgpu"
    TPU = "tpu", FusionTarget.TPU

    target: FusionTarget
    row: str

    def __new__(cls, name: str, target: FusionTarget, row: str = "discrete"):
        member = str.__new__(cls, name)
        member._value_, member.target, member.row = name, target, row
        return member

    @classmethod
    def parse(cls, name: object) -> "Device":
        """Return the device whose name is `name`; `wgpu` means `gpu`. Lower and upper case make no difference."""
        return cls.GPU if normalised(name) == "wgpu" else super().parse(name)


def jax_device() -> Device:
    """Return the `Device` that corresponds to JAX's default device."""
    platform = default_platform()
    return Device(platform) if platform in ("tpu", "cuda", "rocm") else Device.CPU


def fusion_target(device: "str | Code") -> "FusionTarget | Code":
    """Return the fusion target of a device. A device name gives a `FusionTarget`; device codes give target codes.

    Args:
        device: a device name, or device codes `[*batch]`.

    Raises:
        ValueError: the device is unknown.

    Examples:
        >>> print(fusion_target("ane"))
        mlx
    """
    if isinstance(device, str):
        return Device.parse(device).target
    return _of_device(device, lambda member: member.target.code)


def is_fused_viable(device: "str | Code") -> bool | jax.Array:
    """Return whether fusion can save time on a device: False for cpu and tpu, and True for all other devices.

    Args:
        device: a device name, or device codes `[*batch]`.

    Raises:
        ValueError: the device is unknown.

    Examples:
        >>> is_fused_viable("cuda"), is_fused_viable("tpu")
        (True, False)
    """
    return _of_device(device, lambda member: member not in (Device.CPU, Device.TPU))


def _of_device(device: "str | Code", property_of: Callable[[Device], Any]) -> Any:
    """Return the property of a device for a device name, or an array `[*batch]` of properties for device codes."""
    if isinstance(device, str):
        return property_of(Device.parse(device))
    return jnp.asarray([property_of(member) for member in Device])[Device.codes(device)]


#: A coefficient whose name has one of these endings may be infinite, for example a rate at which work takes no time.
_MAY_BE_INFINITE = ("_bw", "_gflops", "_per_ns", "_penalty_ns")


class Coefficients:
    """The base class of frozen dataclasses that hold coefficients. Each dataclass is a pytree of floats `[*batch]`."""

    def __post_init__(self) -> None:
        # `jax.grad` needs floats, so integers and booleans become floats.
        for name, value in vars(self).items():
            kinds = "biu" if name == "unified_memory" else "iu"
            if isinstance(value, int) and (name == "unified_memory" or not isinstance(value, bool)):
                value = float(value)
            elif isinstance(value, (list, tuple)) and name != "provenance":
                value = real_numbers(value, name, is_flag=name == "unified_memory").astype(np.float64)
            elif isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in kinds:
                value = value.astype(np.float64)
            elif isinstance(value, jax.Array) and not is_traced(value) and value.dtype.kind in kinds:
                value = value.astype(jnp.result_type(float))
            object.__setattr__(self, name, value)

    @classmethod
    def checked(cls: type[_Coefficients], **values: Any) -> _Coefficients:
        """Build the coefficients and check their values. The constructor does not check values.

        Raises:
            ValueError: the value of a coefficient is impossible, for example NaN. The message names the coefficient.
        """
        made = cls(**values)
        made.check()
        return made

    def check(self, prefix: str = "") -> None:
        """Raise a ValueError if the value of a coefficient is impossible. Arrays on a device are not checked."""
        for name, value in vars(self).items():
            if name == "provenance":
                for one in [value] if isinstance(value, str) else value:
                    Provenance(one)
            elif not is_on_device(value, jnp.floating):
                least = -MOST if name == "min_gain_ns" else 0  # a negative gain accepts a loss
                most = math.inf if name.endswith(_MAY_BE_INFINITE) else MOST
                check_at_least(value, prefix + name, least, "number", most, is_flag=name == "unified_memory")


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BackendCoefficients(Coefficients):
    """The coefficients for the cost of launches, syncs, bytes and FLOP on a backend. Each coefficient is `[*batch]`.

    Attributes:
        dispatch_ns: time of a kernel launch, in ns.
        roundtrip_ns: time of a synchronisation between host and device, in ns.
        memory_bw: bandwidth of device memory, in bytes per ns.
        readback_bw: bandwidth from device to host, in bytes per ns.
        unified_memory: 1 if host and device share memory, else 0.
        sgemm_gflops: rate of float32 matrix products, in FLOP per ns.
        small_sgemm_gflops: rate of small float32 matrix products (`m * k * n < 32768`), in FLOP per ns.
        provenance: the source of the coefficients, a `Provenance`. In a table, a tuple with the source of each row.
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
    """Return a copy of a row with a fixed provenance, so that rows of different provenance share compiled programs."""
    bare = copy.copy(row)  # the leaves are floats already
    object.__setattr__(bare, "provenance", Provenance.UNCALIBRATED)
    return bare


_DEFAULT, _GUESS = Provenance.ARCH_DEFAULT, Provenance.UNCALIBRATED

#: The built-in coefficients by name. The coefficients under each name are called a row.
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


def backend_coefficients(device: "str | Code | Sequence[int]", coefficients: str = "arch") -> BackendCoefficients:
    """Return the built-in coefficients of a device. For device codes `[*batch]`, each coefficient is `[*batch]`, too.

    The name `cpu-apple` stands for Apple's arm64 processors. The coefficients for a machine with MLX are
    `BACKEND_ROWS["mlx"]`; no device name returns them.

    Args:
        device: a device name, or device codes `[*batch]`.
        coefficients: the set, "arch" or "portable". In "portable", all devices but the cpu have the same coefficients.

    Raises:
        ValueError: the device or the set is unknown.

    Examples:
        >>> row = backend_coefficients("cuda")
        >>> row.dispatch_ns, str(row.provenance)
        (3000.0, 'uncalibrated')
    """
    if not isinstance(device, str):
        codes = Device.codes(device)
        return take_row(stack_rows([backend_coefficients(member, coefficients) for member in Device]), codes)
    if normalised(device) == "cpu-apple":
        return BACKEND_ROWS["cpu-apple"]
    if (name := normalised(coefficients)) not in ("arch", "portable"):
        raise ValueError(f"coefficients: expected one of arch, portable, got {coefficients!r}")
    parsed = Device.parse(device)
    return BACKEND_ROWS[parsed.row if name == "arch" or parsed is Device.CPU else "discrete"]


def stack_rows(rows: Sequence[_Coefficients]) -> _Coefficients:
    """Stack rows into a table: an object of the same class as the rows, in which each field is an array `[rows]`."""
    if isinstance(rows[0], BackendCoefficients):
        provenance = tuple(str(vars(row)["provenance"]) for row in rows)
        rows = [dataclasses.replace(row, provenance=provenance) for row in rows]  # pyright: ignore
    return jax.tree.map(lambda *leaves: np.array(leaves), *rows)


def take_row(table: _Row, codes: Code) -> _Row:
    """Return the rows of a table at integer codes. A table is a pytree of arrays `[rows]`. A code is a row's index."""
    index = jnp.asarray(codes)
    leaves, structure = jax.tree.flatten(table)
    columns = [jnp.asarray(leaf) for leaf in leaves]
    if index.ndim == 0:
        return structure.unflatten([column[index] for column in columns])
    return structure.unflatten(_select_entries(columns, index))


@jax.custom_jvp
def _select_entries(columns: list[jax.Array], index: jax.Array) -> list[jax.Array]:
    """Return `column[index]` for each column."""
    # XLA fuses comparisons with the formulas around them; a gather runs row by row, but has the faster derivative.

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
