"""Which of several devices, or which mesh of them, runs a function fastest, and which costs least."""

import dataclasses
import itertools
import math
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from rlxjax._values import FrozenDict, by_value
from rlxjax.calibration import stands_on, times_for_target
from rlxjax.devices import DoesNotFitError, TargetDevice, check_compiler, target_device, target_names
from rlxjax.jaxpr import TripCounts, profile_function
from rlxjax.units import bytes_text

from ._prices import Prices, load_prices

_COLUMNS = 80


@by_value
class RankedTarget(NamedTuple):
    """What a function takes of devices that it was compiled for; what their compiler refuses has no figures.

    Attributes:
        name: of the target, or of the mesh where meshes are ranked, as "4x2".
        devices: how many run it.
        mesh: the sizes of their axes by name; empty for one device.
        time_ns: of one call that is waited for, predicted; None without figures.
        interval_ns: that holds it with 90 %; its upper end is infinite where the time is the least that it may be.
        pipelined_ns: of a call in a loop that does not wait.
        cost: of such a call, on all devices; None without a price.
        binds: what takes most of a call: "compute", "memory", "collectives" or "host".
        kernels: that a call runs.
        traffic_bytes: that these move on one device.
        peak_bytes: that live at once on one device; None where the compiler does not say.
        memory_bytes: that a device has.
        fits: whether that is enough.
        uncounted: what the time leaves out, a sentence each.
        stands_on: what the time rests on, in a sentence.
    """

    name: str
    devices: int
    mesh: Mapping[str, int]
    time_ns: float | None
    interval_ns: tuple[float, float] | None
    pipelined_ns: float | None
    cost: float | None
    binds: str
    kernels: int | None
    traffic_bytes: int | None
    peak_bytes: int | None
    memory_bytes: int
    fits: bool
    uncounted: tuple[str, ...]
    stands_on: str

    @property
    def is_sure(self) -> bool:
        """Whether it fits, and its time has an upper end."""
        return self.fits and self.interval_ns is not None and math.isfinite(self.interval_ns[1])


@by_value
@dataclasses.dataclass(frozen=True)
class TargetRanking:
    """Devices, or meshes of them, by what a function takes on each; printed, a table of 80 columns.

    Attributes:
        rows: those that the function was compiled for: that fit first, the fastest first; those whose time is the
            least that it may be come after the others that fit.
        left_out: those that it was not compiled for, each with the reason.
        title: what is ranked.
        currency: of costs; empty without prices.
        deadline_ns: that a call has to meet; None without one.
    """

    rows: tuple[RankedTarget, ...]
    left_out: Mapping[str, str]
    title: str = "target"
    currency: str = ""
    deadline_ns: float | None = None

    @property
    def best(self) -> str | None:
        """The fastest that has the memory, of those whose time has an upper end; None if there is none."""
        return next((row.name for row in self.rows if row.is_sure), None)

    @property
    def cheapest(self) -> str | None:
        """The one of least cost that fits, and meets the deadline where there is one; None if there is none."""
        deadline_ns = math.inf if self.deadline_ns is None else self.deadline_ns
        able = [row for row in self.rows if row.is_sure and (row.time_ns or 0.0) <= deadline_ns]
        costs = {row.name: row.cost for row in able if row.cost is not None}
        return min(costs, key=costs.__getitem__, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return what a program reads, by the names of the attributes."""
        found = {name: getattr(self, name) for name in ("title", "currency", "deadline_ns", "best", "cheapest")}
        rows = [row._asdict() | {"mesh": dict(row.mesh)} for row in self.rows]
        return found | {"rows": rows, "left_out": dict(self.left_out)}

    def __str__(self) -> str:
        least_ns = min((row.pipelined_ns or row.time_ns for row in self.rows if row.time_ns), default=0.0)
        unit, size = next(((unit, size) for unit, size in (("s", 1e9), ("ms", 1e6)) if least_ns >= size), ("us", 1e3))
        cells: list[tuple[str, ...]] = [("", unit, "90 %", "loop", "needs", "has", "fits", "binds", self.currency)]
        for row in self.rows:
            figures = ["", "", ""]
            if row.time_ns is not None and row.interval_ns is not None:
                low, high = row.interval_ns
                ends = f"{_digits(low / size)} to {_digits(high / size)}" if math.isfinite(high) else "at least"
                figures = [_digits(row.time_ns / size), ends, _digits((row.pipelined_ns or math.nan) / size)]
            needs = "more" if row.peak_bytes is None else bytes_text(row.peak_bytes)
            fits, cost = "yes" if row.fits else "no", "" if row.cost is None else f"{row.cost:.3g}"
            has = "" if self.currency else bytes_text(row.memory_bytes)  # a table with costs has no place for it
            cells.append((row.name, *figures, needs, has, fits, row.binds, cost))
        shown = [column for column in zip(*cells, strict=True) if any(column[1:])]
        widths = [max(map(len, column)) for column in shown]
        lines = [f"{self.title}; a call that is waited for, and one in a loop that does not wait"]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in zip(*shown, strict=True)
        ]
        said: dict[str, list[str]] = {}
        for row in self.rows:
            if row.uncounted:
                said.setdefault(f"at least this, and maybe more: {'; '.join(row.uncounted)}", []).append(row.name)
            if self.currency and row.cost is None and row.time_ns is not None:
                said.setdefault("no price is given", []).append(row.name)
            said.setdefault(f"predicted by {row.stands_on}" if row.stands_on else "", []).append(row.name)
        for name, reason in self.left_out.items():
            said.setdefault(f"left out: {reason}", []).append(name)
        notes = [f"{', '.join(names)}: {note}" for note, names in said.items() if note]
        if self.currency:
            meets = "" if self.deadline_ns is None else f" and takes at most {_digits(self.deadline_ns / size)} {unit}"
            notes.insert(0, f"the cheapest that fits{meets}: {self.cheapest or 'none'}")
        for note in notes:
            lines += textwrap.wrap(note, _COLUMNS, subsequent_indent="  ", break_on_hyphens=False)
        return "\n".join(lines)


def rank_targets(
    fn: Callable[..., Any],
    *args: Any,
    targets: Iterable[str | TargetDevice] | None = None,
    mesh: Mapping[str, int] | None = None,
    trip_counts: TripCounts | None = None,
    prices: Prices | str | os.PathLike[str] | None = None,
    deadline_s: float | None = None,
) -> TargetRanking:
    """Rank devices that need not be there by what a function takes on each: it is compiled for all of them.

    `rank_devices` asks the same of the built-in coefficients of whole families of devices, and compiles nothing.

    Args:
        fn: the function, jitted or not.
        *args: arrays or `jax.ShapeDtypeStruct`s, or trees of them.
        targets: names, files or `TargetDevice`s; all that this package describes unless given.
        mesh: the sizes of axes by name, for several devices of each target.
        trip_counts: of the loops whose length depends on data.
        prices: what devices cost an hour, or the file of it; see `load_prices`.
        deadline_s: the seconds that a call which is waited for may take.

    Raises:
        ValueError: an unknown target, none at all, a function that does not trace, bad prices or a bad deadline.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> rows = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
        >>> ranking = rank_targets(jnp.tanh, rows, targets=["tpu-v5e", "h100"])
        >>> sorted([row.name for row in ranking.rows] + list(ranking.left_out))  # left out where no compiler is
        ['h100', 'tpu-v5e']
    """
    devices = [target_device(target) for target in (target_names() if targets is None else targets)]
    if not devices:
        raise ValueError("targets: expected at least one target, got none")
    profile_function(fn, *args, trip_counts=trip_counts)  # what does not trace is refused once
    asked = {device.name: (device, args, mesh) for device in devices}
    return _ranked(fn, asked, "target", trip_counts, prices, deadline_s)


def rank_meshes(
    fn: Callable[..., Any],
    *args: Any,
    target: str | TargetDevice,
    devices: int = 8,
    axes: Sequence[str] = ("data", "model"),
    meshes: Iterable[Mapping[str, int]] | None = None,
    trip_counts: TripCounts | None = None,
    prices: Prices | str | os.PathLike[str] | None = None,
    deadline_s: float | None = None,
) -> TargetRanking:
    """Rank the divisions of a function, such as a training step, over several devices that need not be there.

    Args:
        fn: the function, jitted or not.
        *args: arrays or `jax.ShapeDtypeStruct`s, or trees of them. A `NamedSharding` keeps its `PartitionSpec`, whose
            axes get the sizes of each mesh; `rlxjax.devices.divided` divides what has none.
        target: a name, a file or a `TargetDevice`.
        devices: how many of it there are.
        axes: the names of the axes; every division of `devices` over them is compiled.
        meshes: the sizes of axes by name, in place of all divisions.
        trip_counts: as of `rank_targets`.
        prices: as of `rank_targets`.
        deadline_s: as of `rank_targets`.

    Raises:
        ValueError: as of `rank_targets`; a number of devices or axes that make no mesh. A mesh that does not compile
            is left out, with the reason.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
        >>> ranking = rank_meshes(jnp.dot, x, x, target="tpu-v5e", devices=4)
        >>> sorted([row.name for row in ranking.rows] + list(ranking.left_out))
        ['1x4', '2x2', '4x1']
    """
    device = target_device(target)
    if type(devices) is not int or devices < 1:
        raise ValueError(f"devices: expected an integer of at least 1, got {devices!r}")
    if meshes is None:
        names = tuple(axes)
        if isinstance(axes, str) or not names or len(set(names)) < len(names):
            raise ValueError(f"axes: expected different names of axes, got {axes!r}")
        sizes = [size for size in range(1, devices + 1) if devices % size == 0]
        divisions = itertools.product(sizes, repeat=len(names))
        meshes = [dict(zip(names, division, strict=True)) for division in divisions if math.prod(division) == devices]
    given = list(meshes)
    if not given or not all(isinstance(mesh, Mapping) and mesh for mesh in given):
        raise ValueError(f"meshes: expected sizes of axes by their names, got {meshes!r}")
    if any(tuple(mesh) != tuple(given[0]) for mesh in given):
        raise ValueError(f"meshes: expected the same axes in each, of size 1 where one has no such axis, got {given}")
    asked = {
        "x".join(map(str, mesh.values())): (device, jax.tree.map(lambda leaf, of=mesh: _over(leaf, of), args), mesh)
        for mesh in given
    }
    return _ranked(fn, asked, " x ".join(given[0]), trip_counts, prices, deadline_s)


def _over(leaf: Any, mesh: Mapping[str, int]) -> Any:
    """Return an argument with a `NamedSharding` as a shape over another mesh; any other as it is."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return leaf
    over = AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(over, sharding.spec))


def _ranked(
    fn: Callable[..., Any],
    asked: Mapping[str, tuple[TargetDevice, tuple[Any, ...], Mapping[str, int] | None]],
    title: str,
    trip_counts: TripCounts | None,
    prices: Prices | str | os.PathLike[str] | None,
    deadline_s: float | None,
) -> TargetRanking:
    """Return the rows of what is asked by its name: devices, arguments and their mesh."""
    known = load_prices(prices) if isinstance(prices, (str, os.PathLike)) else prices
    if deadline_s is not None and not 0 < deadline_s < math.inf:
        raise ValueError(f"deadline_s: expected a positive number of seconds, got {deadline_s!r}")
    rows: list[RankedTarget] = []
    left_out: dict[str, str] = {}
    for name, (device, args, mesh) in asked.items():
        count, axes = math.prod((mesh or {}).values()), FrozenDict(mesh or {})
        options: dict[str, Any] = {"level": "compiled", "target": device, "mesh": mesh, "trip_counts": trip_counts}
        try:
            check_compiler(device.platform)
            profile = profile_function(fn, *args, **options)
            found = times_for_target([profile], device).predictions[0]
        except DoesNotFitError as error:
            memory = device.memory_bytes if error.memory_bytes is None else error.memory_bytes
            none = (None, None, None, None, "", None, None)
            rows.append(RankedTarget(name, count, axes, *none, error.needed_bytes, memory, False, (), ""))
        except ValueError as error:
            left_out[name] = str(error)
        else:
            cost = None if known is None else known.cost(device.name, count, found.pipelined_ns or found.time_ns)
            time = found.time_ns, (found.low_ns, found.high_ns), found.pipelined_ns, cost, found.binds
            work = int(profile.io.kernel_launches), profile.fused_traffic_bytes
            memory = profile.peak_bytes, device.memory_bytes, profile.peak_bytes <= device.memory_bytes
            rows.append(RankedTarget(name, count, axes, *time, *work, *memory, found.uncounted, stands_on([found])))
    by_time = sorted(rows, key=lambda row: (not row.fits, not row.is_sure, row.time_ns or 0.0))
    deadline_ns = None if deadline_s is None else 1e9 * deadline_s
    return TargetRanking(tuple(by_time), FrozenDict(left_out), title, known.currency if known else "", deadline_ns)


def _digits(value: float) -> str:
    """Return a number with three digits at least."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
