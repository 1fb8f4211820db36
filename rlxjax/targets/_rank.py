"""Rank devices, or meshes of devices, by the time and the cost of a function."""

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
from rlxjax.units import bytes_text, interval_text, time_text

from ._prices import Prices, load_prices

_COLUMNS = 80


@by_value
class RankedTarget(NamedTuple):
    """The predictions for a function on one target or mesh. The predictions are None if the program does not fit.

    Attributes:
        name: name of the target or mesh; the name of a mesh is of the form "4x2".
        devices: number of devices.
        mesh: the size of each axis of the mesh, by name; empty for one device.
        time_ns: predicted time of one call that waits for its results, in ns.
        interval_ns: 90 % interval of `time_ns`; an infinite upper end means that `time_ns` is a lower bound.
        pipelined_ns: predicted time of a call in a loop that does not wait for results, in ns.
        cost: cost of a call in that loop, for all devices together; None without a price.
        binds: the part of a call that takes longest: "compute", "memory", "collectives" or "host".
        kernels: number of kernels that a call runs.
        traffic_bytes: memory traffic of a call on one device.
        peak_bytes: peak memory on one device; None if the compiler does not say.
        memory_bytes: memory of one device.
        fits: whether the peak memory is at most the memory of the device.
        uncounted: the parts of a call that the predicted time leaves out, one sentence each.
        stands_on: the data that the prediction is based on, in a sentence.
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
        """Whether the program fits and the interval of its time has a finite upper end."""
        return self.fits and self.interval_ns is not None and math.isfinite(self.interval_ns[1])


@by_value
@dataclasses.dataclass(frozen=True)
class TargetRanking:
    """A ranking of targets or meshes by the predicted time of a function. It prints as a table 80 characters wide.

    Attributes:
        rows: the targets for which the function was compiled, in three groups: targets that fit, targets that fit but
            have only a lower bound of the time, and targets that do not fit. In each group, the fastest comes first.
        left_out: the reason why the function was not compiled for a target, by the name of the target.
        title: heading of the first column.
        currency: currency of the costs; empty without prices.
        deadline_ns: time limit of a call, in ns; None without a limit.
    """

    rows: tuple[RankedTarget, ...]
    left_out: Mapping[str, str]
    title: str = "target"
    currency: str = ""
    deadline_ns: float | None = None

    @property
    def best(self) -> str | None:
        """The name of the fastest row whose `is_sure` is True; None without such a row."""
        return next((row.name for row in self.rows if row.is_sure), None)

    @property
    def cheapest(self) -> str | None:
        """The name of the cheapest row that meets the deadline with `is_sure` True; None without such a row."""
        deadline_ns = math.inf if self.deadline_ns is None else self.deadline_ns
        able = [row for row in self.rows if row.is_sure and (row.time_ns or 0.0) <= deadline_ns]
        costs = {row.name: row.cost for row in able if row.cost is not None}
        return min(costs, key=costs.__getitem__, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return a dict of the attributes by name, for JSON."""
        found = {name: getattr(self, name) for name in ("title", "currency", "deadline_ns", "best", "cheapest")}
        rows = [row._asdict() | {"mesh": dict(row.mesh)} for row in self.rows]
        return found | {"rows": rows, "left_out": dict(self.left_out)}

    def __str__(self) -> str:
        cells: list[tuple[str, ...]] = [("", "predicted", "loop", "needs", "has", "fits", "binds", self.currency)]
        for row in self.rows:
            figures = ["", ""]
            if row.time_ns is not None and row.interval_ns is not None:
                is_bound = math.isinf(row.interval_ns[1])
                one = f"> {time_text(row.time_ns)}" if is_bound else interval_text(row.time_ns, *row.interval_ns)
                figures = [one, time_text(row.pipelined_ns or math.nan)]
            needs = "more" if row.peak_bytes is None else bytes_text(row.peak_bytes)
            fits, cost = "yes" if row.fits else "no", "" if row.cost is None else f"{row.cost:.3g}"
            has = "" if self.currency else bytes_text(row.memory_bytes)  # a table with costs has no space for it
            cells.append((row.name, *figures, needs, has, fits, row.binds, cost))
        shown = [column for column in zip(*cells, strict=True) if any(column[1:])]
        widths = [max(map(len, column)) for column in shown]
        lines = [f"{self.title}; a call that waits (90 % interval), and a call in a loop"]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in zip(*shown, strict=True)
        ]
        said: dict[str, list[str]] = {}
        for row in self.rows:
            if row.uncounted:
                said.setdefault(f"the time is a lower bound: {'; '.join(row.uncounted)}", []).append(row.name)
            if self.currency and row.cost is None and row.time_ns is not None:
                said.setdefault("no price given", []).append(row.name)
            said.setdefault(f"predicted by {row.stands_on}" if row.stands_on else "", []).append(row.name)
        for name, reason in self.left_out.items():
            said.setdefault(f"left out: {reason}", []).append(name)
        notes = [f"{', '.join(names)}: {note}" for note, names in said.items() if note]
        if self.currency:
            meets = "" if self.deadline_ns is None else f" and takes at most {time_text(self.deadline_ns)}"
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
    """Rank devices that you need not have, by the predicted time of a function that is compiled for each device.

    In contrast, `rank_devices` compares families of devices by built-in coefficients, and compiles nothing.

    Args:
        fn: the function, jitted or not.
        *args: arrays or `jax.ShapeDtypeStruct`s, or trees of these.
        targets: names of devices, paths of files, or `TargetDevice`s; by default all built-in targets.
        mesh: the size of each axis of a mesh by name, if several devices of each target run the function.
        trip_counts: the numbers of iterations of loops whose length depends on data.
        prices: prices per hour, or the path of a file of prices; see `load_prices`.
        deadline_s: time limit, in seconds, of a call that waits for its results.

    Raises:
        ValueError: a target is missing or unknown; the function does not trace; the prices or deadline are not valid.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> rows = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
        >>> ranking = rank_targets(jnp.tanh, rows, targets=["tpu-v5e", "h100"])
        >>> sorted([row.name for row in ranking.rows] + list(ranking.left_out))  # left out without a compiler
        ['h100', 'tpu-v5e']
    """
    devices = [target_device(target) for target in (target_names() if targets is None else targets)]
    if not devices:
        raise ValueError("targets: expected at least one target, got none")
    profile_function(fn, *args, trip_counts=trip_counts)  # raises once for a function that does not trace
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
    """Rank the ways to divide a function over devices that you need not have, by predicted time.

    Args:
        fn: the function, jitted or not.
        *args: arrays or `jax.ShapeDtypeStruct`s, or trees of these. A `NamedSharding` keeps its `PartitionSpec`, and
            its axes get the sizes of each mesh. `rlxjax.devices.divided` divides the other arguments.
        target: the name of a device, the path of a file, or a `TargetDevice`.
        devices: number of devices to use, at least 1.
        axes: the names of the mesh's axes; every division of `devices` over these axes is compiled.
        meshes: the meshes to compare, instead of all divisions: the size of each axis by name, for each mesh.
        trip_counts: as for `rank_targets`.
        prices: as for `rank_targets`.
        deadline_s: as for `rank_targets`.

    Raises:
        ValueError: as for `rank_targets`, or the devices and axes do not form a mesh. If a mesh does not compile, the
            reason is in `left_out` instead.

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
        raise ValueError(f"meshes: expected sizes of axes by name for each mesh, got {meshes!r}")
    if any(tuple(mesh) != tuple(given[0]) for mesh in given):
        raise ValueError(f"meshes: expected the same axes in each mesh, with size 1 for an unused axis, got {given}")
    asked = {
        "x".join(map(str, mesh.values())): (device, jax.tree.map(lambda leaf, of=mesh: _over(leaf, of), args), mesh)
        for mesh in given
    }
    return _ranked(fn, asked, " x ".join(given[0]), trip_counts, prices, deadline_s)


def _over(leaf: Any, mesh: Mapping[str, int]) -> Any:
    """Return an argument that has a `NamedSharding` as a shape over another mesh. Return other arguments unchanged."""
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
    """Predict the time on each device, with the device's own arguments and mesh, and return the ranking."""
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
