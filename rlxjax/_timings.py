"""Measured runs: columns that a fit takes, checked where they enter."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from .welch import Path, padded_batch
from .welch._selection import SELECTIONS, default_selection

T = TypeVar("T")

#: Timings that a fit needs unless its caller says that its prior needs fewer.
MIN_TIMINGS = 8
#: Fits are compiled for so many timings at least.
LEAST_FILLED = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Timings:
    """Measured runs, one entry a workload; every field `[n]`.

    Attributes:
        path: codes of `Path`.
        batch: rows of the signal.
        n_fft: samples of a segment.
        k: peaks of a row.
        n_segments: segments of a row.
        time_ns: the time of one run, a quartile over repeats say.
        selection: codes of the forms of selection of fused runs, in the order of `SELECTIONS`.
    """

    path: np.ndarray | Int[Array, "n"]
    batch: np.ndarray | Float[Array, "n"]
    n_fft: np.ndarray | Float[Array, "n"]
    k: np.ndarray | Float[Array, "n"]
    n_segments: np.ndarray | Float[Array, "n"]
    time_ns: np.ndarray | Float[Array, "n"]
    selection: np.ndarray | Int[Array, "n"]

    @classmethod
    def checked(cls, *, path, batch, n_fft, k, n_segments, time_ns, platform: str = "cpu") -> Self:
        """Build from lists or arrays; `path` may hold names.

        Fused runs are taken to select as `welch_peaks` does by itself on the platform.

        Raises:
            ValueError: columns of unequal length, an unknown path, a size or time that is not positive
                and finite.

        Examples:
            >>> Timings.checked(path=["host"], batch=[8], n_fft=[256], k=[16], n_segments=[2],
            ...                 time_ns=[1e5]).time_ns.shape
            (1,)
        """
        columns = {"batch": batch, "n_fft": n_fft, "k": k, "n_segments": n_segments, "time_ns": time_ns}
        codes = np.asarray(Path.codes(np.asarray(path)), np.int32)
        if codes.ndim != 1:
            raise ValueError(f"path: expected one axis, got shape {codes.shape}")
        if np.any(codes == Path.LEARNED.code):
            raise ValueError("path: expected host, fused or block, got learned, which depends on its model")
        floats = checked_columns("path", codes.shape, columns)
        sizes = zip(floats["batch"], floats["n_fft"], strict=True)
        forms = [default_selection(int(rows), int(n) // 2 + 1, platform) for rows, n in sizes]
        selection = np.array([list(SELECTIONS).index(form) for form in forms], np.int32)
        return cls(codes, selection=selection, **floats)


def checked_columns(first: str, shape: tuple[int, ...], columns: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return columns of timings as float64 arrays of a shape.

    Args:
        first: the name of the column that has the shape, for the message.
        shape: of every column.
        columns: sizes of a workload, and `time_ns`.

    Raises:
        ValueError: as `Timings.checked`.
    """
    floats = {}
    for name, values in columns.items():
        try:
            array = np.asarray(values, np.float64)
        except (TypeError, ValueError):
            raise ValueError(f"{name}: expected numbers, got {values!r}") from None
        if array.shape != shape:
            raise ValueError(f"{name}: expected shape {shape}, as {first} has, got {array.shape}")
        bad = ~(np.isfinite(array) & (array > 0))
        if bad.any():
            index = int(np.flatnonzero(bad)[0])
            raise ValueError(f"{name}[{index}]: expected a positive finite number, got {array[index]}")
        left_over = array % (2 if name == "n_fft" else 1)
        if name != "time_ns" and np.any(left_over):
            wanted = "even whole numbers" if name == "n_fft" else "whole numbers"
            raise ValueError(f"{name}: expected {wanted}, got {array[np.argmax(left_over > 0)]}")
        floats[name] = array
    return floats


def stack_timings(timings: Sequence[T]) -> tuple[T, Float[np.ndarray, "devices n"]]:
    """Return the timings of several devices as one, `[devices, n]`, and the weights that go with them.

    Shorter columns are filled up with copies of their first entry, of weight 0.

    Args:
        timings: of one type, `[n_d]` each.

    Raises:
        ValueError: no devices, or one without timings.

    Examples:
        >>> host = {"path": ["host"] * 2, "n_fft": [256] * 2, "k": [16] * 2, "n_segments": [2] * 2}
        >>> two = Timings.checked(**host, batch=[8, 64], time_ns=[1e5, 4e5])
        >>> one = jax.tree.map(lambda column: column[:1], two)
        >>> both, weights = stack_timings([two, one])
        >>> both.time_ns.shape, weights.tolist()
        ((2, 2), [[1.0, 1.0], [1.0, 0.0]])
    """
    counts = [len(own.time_ns) for own in timings]  # pyright: ignore[reportAttributeAccessIssue]
    if not counts:
        raise ValueError("timings: expected those of at least one device, got none")
    if 0 in counts:
        raise ValueError(f"timings: device {counts.index(0)} has none")
    entries = np.arange(max(counts))
    kept = entries < np.array(counts)[:, None]

    def stacked(*columns):
        return np.stack([np.asarray(c)[np.where(k, entries, 0)] for c, k in zip(columns, kept, strict=True)])

    return jax.tree.map(stacked, *timings), kept.astype(np.float64)


def filled_up(timings: T, weights: Float[np.ndarray, "n"]) -> tuple[T, Float[np.ndarray, "m"]]:
    """Return timings and their weights filled up with copies of the first entry, of weight 0.

    To one of four sizes an octave, so that other numbers of timings seldom compile a fit anew.
    """
    n = len(weights)
    entries = np.arange(max(LEAST_FILLED, padded_batch(n)))
    counted = with_counted_rows(timings, weights)
    filled = jax.tree.map(lambda column: column[np.where(entries < n, entries, 0)], counted)
    return filled, np.where(entries < n, weights[np.minimum(entries, n - 1)], 0.0)


def with_counted_rows(timings: T, weights: Float[np.ndarray, "*devices n"]) -> T:
    """Return timings with the first one that counts in place of those of weight 0, which may be anything."""
    counted = weights > 0
    rows = np.where(counted, np.arange(counted.shape[-1]), np.argmax(counted, -1)[..., None])
    return jax.tree.map(lambda column: np.take_along_axis(np.asarray(column), rows, -1), timings)


def check_enough(timings: Any, weights: np.ndarray, min_timings: int) -> None:
    """Check that timings, `[n]` or `[devices, n]`, and their weights make a fit.

    Raises:
        ValueError: weights of another shape, negative or not finite; a column of another shape; a time that
            counts and is not positive and finite; for any device fewer timings that count than `min_timings`,
            or all of one workload.
    """
    shape = np.shape(timings.time_ns)
    if weights.shape != shape:
        raise ValueError(f"weights: expected shape {shape}, got {weights.shape}")
    if not np.all(np.isfinite(weights) & (weights >= 0)):
        raise ValueError("weights: expected finite numbers of at least 0")
    columns = {
        jax.tree_util.keystr(at)[1:]: leaf for at, leaf in jax.tree_util.tree_leaves_with_path(timings)
    }
    for name, column in columns.items():
        if np.shape(column) != shape:
            raise ValueError(f"{name}: expected shape {shape}, as time_ns has, got {np.shape(column)}")
    counted, times_ns = weights > 0, np.asarray(timings.time_ns)
    bad = counted & ~(np.isfinite(times_ns) & (times_ns > 0))
    if bad.any():
        index = tuple(np.argwhere(bad)[0].tolist())
        place = ", ".join(map(str, index))
        raise ValueError(f"time_ns[{place}]: expected a positive finite number, got {times_ns[index]}")
    count = counted.sum(-1)
    if np.any(count < min_timings):
        found, where = _first(count, count < min_timings)
        raise ValueError(f"timings: expected at least {min_timings} that count, got {found}{where}")
    # A workload is another one than the first if any of its sizes is.
    first = np.argmax(counted, -1)[..., None]
    sizes = [np.asarray(column) for name, column in columns.items() if name != "time_ns"]
    differs = np.any([column != np.take_along_axis(column, first, -1) for column in sizes], 0)
    is_one = ~np.any(differs & counted, -1)
    if min_timings > 1 and np.any(is_one):
        _, where = _first(count, is_one)
        raise ValueError(f"timings: expected several workloads, got one{where}: vary batch and n_fft")


def _first(count: np.ndarray, wrong: np.ndarray) -> tuple[int, str]:
    """Return the count of the first device that is wrong, and which one that is."""
    index = int(np.argmax(wrong))
    return int(np.ravel(count)[index]), f" for device {index}" if np.ndim(count) else ""
