"""Which of several devices that need not be there runs a function fastest."""

import dataclasses
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from rlxjax._values import FrozenDict, by_value, in_bytes
from rlxjax.calibration import stands_on, times_for_target
from rlxjax.devices import DoesNotFitError, TargetDevice, check_compiler, target_device, target_names
from rlxjax.jaxpr import TripCounts, profile_function

_COLUMNS = 80


@by_value
class RankedTarget(NamedTuple):
    """What a function takes of a device that it was compiled for; what its compiler refuses for memory has no figures.

    Attributes:
        name: of the target.
        time_ns: predicted, None without figures.
        interval_ns: that holds it with 90 %.
        limit: the largest part of that time.
        kernels: that a call runs.
        traffic_bytes: that these move.
        peak_bytes: that live at once; None where the compiler does not say.
        memory_bytes: that the device has.
        fits: whether that is enough.
        stands_on: what the time rests on, in a sentence.
    """

    name: str
    time_ns: float | None
    interval_ns: tuple[float, float] | None
    limit: str
    kernels: int | None
    traffic_bytes: int | None
    peak_bytes: int | None
    memory_bytes: int
    fits: bool
    stands_on: str


@by_value
@dataclasses.dataclass(frozen=True)
class TargetRanking:
    """Devices by what a function takes on each; printed, a table of 80 columns.

    Attributes:
        rows: those that the function was compiled for: that fit first, the fastest first.
        left_out: those that it was not compiled for, each with the reason.
    """

    rows: tuple[RankedTarget, ...]
    left_out: Mapping[str, str]

    @property
    def best(self) -> str | None:
        """The fastest device that has the memory; None if none does."""
        return next((row.name for row in self.rows if row.fits), None)

    def __str__(self) -> str:
        cells: list[tuple[str, ...]] = [("target", "us", "90 %", "needs", "has", "fits", "kernels", "moves", "limit")]
        for row in self.rows:
            figures = ["", "", "", ""]
            if row.time_ns is not None and row.interval_ns is not None:
                low, high = map(_us, row.interval_ns)
                figures = [_us(row.time_ns), f"{low} to {high}", f"{row.kernels:,}"]
                figures.append(in_bytes(row.traffic_bytes or 0))
            needs = "more" if row.peak_bytes is None else in_bytes(row.peak_bytes)
            fits = "yes" if row.fits else "no"
            cells.append((row.name, *figures[:2], needs, in_bytes(row.memory_bytes), fits, *figures[2:], row.limit))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
        notes: dict[str, list[str]] = {}
        for row in self.rows:
            notes.setdefault(f"predicted by {row.stands_on}" if row.stands_on else "", []).append(row.name)
        for name, reason in self.left_out.items():
            notes.setdefault(f"left out: {reason}", []).append(name)
        for note, names in notes.items():
            text = f"{', '.join(names)}: {note}"
            lines += textwrap.wrap(text, _COLUMNS, subsequent_indent="  ", break_on_hyphens=False) if note else ()
        return "\n".join(lines)


def rank_targets(
    fn: Callable[..., Any],
    *args: Any,
    targets: Iterable[str | TargetDevice] | None = None,
    trip_counts: TripCounts | None = None,
) -> TargetRanking:
    """Rank devices that need not be there by what a function takes on each: it is compiled for all of them.

    `rank_devices` asks the same of the built-in coefficients of whole families of devices, and compiles nothing.

    Args:
        fn: the function, jitted or not.
        *args: arrays or `jax.ShapeDtypeStruct`s, or trees of them.
        targets: names, files or `TargetDevice`s; all that this package describes unless given.
        trip_counts: of the loops whose length depends on data.

    Raises:
        ValueError: an unknown target, none at all, a function that does not trace, or a loop of unknown length.

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
    written = profile_function(fn, *args, trip_counts=trip_counts)
    if written.unknown_loops:
        raise ValueError(f"fn: {written.uncounted[0]}")
    rows: list[RankedTarget] = []
    left_out: dict[str, str] = {}
    for device in devices:
        try:
            check_compiler(device.platform)
            profile = profile_function(fn, *args, level="compiled", target=device, trip_counts=trip_counts)
            found = times_for_target([profile], device).predictions[0]
        except DoesNotFitError as error:
            memory = device.memory_bytes if error.memory_bytes is None else error.memory_bytes
            rows.append(RankedTarget(device.name, None, None, "", None, None, error.needed_bytes, memory, False, ""))
        except ValueError as error:
            left_out[device.name] = str(error)
        else:
            limit = next(iter(found.terms_ns)).removesuffix("_ns").replace("_", " ")
            time, work = (found.time_ns, (found.low_ns, found.high_ns), limit), int(profile.io.kernel_launches)
            memory = profile.fused_traffic_bytes, profile.peak_bytes, device.memory_bytes
            fits = profile.peak_bytes <= device.memory_bytes
            rows.append(RankedTarget(device.name, *time, work, *memory, fits, stands_on([found])))
    by_time = sorted(rows, key=lambda row: (not row.fits, math.inf if row.time_ns is None else row.time_ns))
    return TargetRanking(tuple(by_time), FrozenDict(left_out))


def _us(time_ns: float) -> str:
    """Return a time in us with three digits at least."""
    return f"{time_ns / 1e3:,.0f}" if time_ns >= 1e5 else f"{time_ns / 1e3:.3g}"
