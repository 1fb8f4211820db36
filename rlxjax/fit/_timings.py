"""Measured runs: columns that a fit takes, checked where they enter."""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from rlxjax._values import by_value

from ._columns import columns_of_csv, columns_of_frame, columns_of_parquet, columns_of_records, runs_and_times
from ._model import LatencyModel, Runs

#: Timings that a fit needs unless its caller says that its prior needs fewer.
MIN_TIMINGS = 8
#: Fits are compiled for so many timings at least.
LEAST_FILLED = 128


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Timings:
    """Measured runs of one model, one entry a workload; every column `[n]`, or `[devices, n]` of many devices.

    Attributes:
        runs: what was timed.
        time_ns: the time of one run, a quartile over repeats say.
    """

    runs: Runs
    time_ns: np.ndarray | Float[Array, "*devices n"]

    @classmethod
    def checked(cls, model: LatencyModel, *, variant, time_ns, **inputs) -> "Timings":
        """Build from lists or arrays of one length.

        Args:
            model: whose runs were timed.
            variant: names, or places in `model.variants`, `[n]`; one name is that of all.
            time_ns: `[n]`.
            **inputs: the sizes by the model's names, `[n]`; one with a default may be left out.

        Raises:
            ValueError: columns of unequal length, an unknown variant or input, a size that cannot be, or a time that
                is not positive and finite; one sentence with the row, from 0, and the column.

        Examples:
            >>> from rlxjax.models import FFT
            >>> Timings.checked(FFT, variant="fft", batch=[8, 64], n_fft=[256, 256], time_ns=[1e5, 2e5]).time_ns.shape
            (2,)
        """
        if unknown := [name for name in inputs if name not in model.inputs]:
            raise ValueError(f"{model.name}: expected the inputs {', '.join(model.inputs)}; got {unknown[0]!r}")
        variant = np.broadcast_to(variant, np.shape(time_ns)) if np.ndim(variant) == 0 else variant
        columns = {"variant": variant, "time_ns": time_ns, **inputs}
        return cls(*runs_and_times(model, columns_of_frame(columns, "timings"), "variant", "time_ns"))

    @classmethod
    def from_dataframe(
        cls, model: LatencyModel, frame: Any, *, variant: str = "variant", time_ns: str = "time_ns"
    ) -> "Timings":
        """Build from whatever has columns by name: a DataFrame of pandas or polars, a dictionary of lists.

        The sizes are in columns of the model's names for its inputs; one with a default may be missing. All other
        columns are left alone.

        Args:
            model: whose runs were timed.
            frame: one row a timing.
            variant: the column of variants, names or places in `model.variants`; not needed where there is one.
            time_ns: the column of times, in ns unless its name ends in _us, _ms or _s. Where time_ns is
                missing, time_us, time_ms or time_s is taken.

        Raises:
            ValueError: a missing column, columns of unequal length, no row, or a cell that cannot be; one sentence
                with the row, from 0, and the column.

        Examples:
            >>> from rlxjax.models import FFT
            >>> frame = {"batch": [8, 64], "n_fft": [256, 256], "time_us": [100.0, 200.0], "note": ["a", "b"]}
            >>> Timings.from_dataframe(FFT, frame).time_ns.tolist()
            [100000.0, 200000.0]
        """
        return cls(*runs_and_times(model, columns_of_frame(frame), variant, time_ns))

    @classmethod
    def from_records(
        cls,
        model: LatencyModel,
        records: Iterable[Mapping[str, Any]],
        *,
        variant: str = "variant",
        time_ns: str = "time_ns",
    ) -> "Timings":
        """Build from mappings, one a timing; columns, arguments and errors as in `from_dataframe`.

        Examples:
            >>> from rlxjax.models import FFT
            >>> records = [{"batch": 8, "n_fft": 256, "time_ns": 1e5}, {"batch": 64, "n_fft": 256, "time_ns": 2e5}]
            >>> Timings.from_records(FFT, records).runs.inputs["batch"].tolist()
            [8.0, 64.0]
        """
        return cls(*runs_and_times(model, columns_of_records(records), variant, time_ns))

    @classmethod
    def from_csv(
        cls, model: LatencyModel, path: str | os.PathLike[str], *, variant: str = "variant", time_ns: str = "time_ns"
    ) -> "Timings":
        r"""Read a CSV file: a header, then one line a timing; columns and other arguments as in `from_dataframe`.

        Args:
            model: whose runs were timed.
            path: of the file, in UTF-8, cells separated by commas; variants by name.
            variant: the column of variants.
            time_ns: the column of times.

        Raises:
            ValueError: a file that is missing, empty or no CSV, or as in `from_dataframe`; with the file and line.

        Examples:
            >>> import pathlib, tempfile
            >>> from rlxjax.models import FFT
            >>> path = pathlib.Path(tempfile.mkdtemp()) / "fft.csv"
            >>> _ = path.write_text("batch,n_fft,time_ms\n8,256,0.1\n64,256,0.2\n")
            >>> Timings.from_csv(FFT, path).time_ns.tolist()
            [100000.0, 200000.0]
        """
        return cls(*runs_and_times(model, columns_of_csv(path), variant, time_ns))

    @classmethod
    def from_parquet(
        cls, model: LatencyModel, path: str | os.PathLike[str], *, variant: str = "variant", time_ns: str = "time_ns"
    ) -> "Timings":
        """Read a Parquet file of one row a timing; columns and other arguments as in `from_dataframe`.

        Args:
            model: whose runs were timed.
            path: of the file.
            variant: the column of variants.
            time_ns: the column of times.

        Raises:
            ValueError: a file that is missing, empty or no Parquet, or as in `from_dataframe`; with the file and row.
            ImportError: pyarrow is not installed.

        Examples:
            >>> import pathlib, tempfile
            >>> from rlxjax.models import FFT
            >>> path = pathlib.Path(tempfile.mkdtemp()) / "fft.parquet"
            >>> timings = Timings.checked(FFT, variant="fft", batch=[8, 64], n_fft=[256, 256], time_ns=[1e5, 2e5])
            >>> timings.to_parquet(path)
            >>> Timings.from_parquet(FFT, path) == timings
            True
        """
        return cls(*runs_and_times(model, columns_of_parquet(path), variant, time_ns))

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write a Parquet file of one row a timing: the variant's name, the inputs by name, `time_ns`.

        Args:
            path: of the file, which appears whole.

        Raises:
            ValueError: timings of several devices, or a path that is no file.
            OSError: it cannot be written.
            ImportError: pyarrow is not installed.

        Examples:
            >>> import pathlib, tempfile
            >>> from rlxjax.models import FFT
            >>> path = pathlib.Path(tempfile.mkdtemp()) / "fft.parquet"
            >>> Timings.checked(FFT, variant="fft", batch=[8], n_fft=[256], time_ns=[1e5]).to_parquet(path)
            >>> import pyarrow.parquet as pq
            >>> pq.read_table(path).column_names
            ['variant', 'batch', 'n_fft', 'time_ns']
        """
        from rlxjax._files import check_pyarrow, whole_file  # loaded when first used

        check_pyarrow()
        import pyarrow as pa
        import pyarrow.parquet as pq

        if len(shape := np.shape(self.time_ns)) != 1:
            raise ValueError(f"timings: expected those of one device, [n], got time_ns of shape {shape}")
        names = np.array(self.model.variants)[np.broadcast_to(np.asarray(self.runs.variant), shape)]
        columns = {name: np.broadcast_to(np.asarray(self.runs.inputs[name]), shape) for name in self.model.inputs}
        table = pa.table({"variant": names.tolist(), **columns, "time_ns": np.asarray(self.time_ns)})
        with whole_file(path) as temporary:
            pq.write_table(table, temporary)

    @property
    def model(self) -> LatencyModel:
        """Whose runs were timed."""
        return self.runs.model


def stack_timings(timings: Sequence[Timings]) -> tuple[Timings, Float[np.ndarray, "devices n"]]:
    """Return the timings of several devices as one, `[devices, n]`, and the weights that go with them.

    Shorter columns are filled up with copies of their last entry, of weight 0.

    Args:
        timings: of one model, `[n_d]` each.

    Raises:
        ValueError: no devices, or one without timings.

    Examples:
        >>> from rlxjax.models import FFT
        >>> two = Timings.checked(FFT, variant="fft", batch=[8, 64], n_fft=[256, 256], time_ns=[1e5, 4e5])
        >>> one = jax.tree.map(lambda column: column[:1], two)
        >>> both, weights = stack_timings([two, one])
        >>> both.time_ns.shape, weights.tolist()
        ((2, 2), [[1.0, 1.0], [1.0, 0.0]])
    """
    counts = [len(own.time_ns) for own in timings]
    if not counts:
        raise ValueError("timings: expected those of at least one device, got none")
    if 0 in counts:
        raise ValueError(f"timings: device {counts.index(0)} has none")
    most = max(counts)
    filled = [_longer(own, most) for own in timings]
    weights = np.array([np.arange(most) < count for count in counts], np.float64)
    return jax.tree.map(lambda *columns: np.stack(columns), *filled), weights


def filled_up(
    timings: Timings, weights: Float[np.ndarray, "*devices n"]
) -> tuple[Timings, Float[np.ndarray, "*devices m"]]:
    """Return timings and their weights filled up with copies of one that counts, of weight 0.

    To one of four sizes an octave, so that other numbers of timings seldom compile a fit anew.
    """
    n = weights.shape[-1]
    step = 1 << max(0, (n - 1).bit_length() - 3)
    most = max(LEAST_FILLED, -(-n // step) * step)
    filled = np.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, most - n)])
    return with_counted_rows(_longer(timings, most), filled), filled


def _longer(timings: Timings, n: int) -> Timings:
    """Return timings filled up to so many with copies of the last entry."""

    def longer(column):
        return np.pad(column, [(0, 0)] * (np.ndim(column) - 1) + [(0, n - np.shape(column)[-1])], "edge")

    return jax.tree.map(longer, timings)


def with_counted_rows(timings: Timings, weights: Float[np.ndarray, "*devices n"]) -> Timings:
    """Return timings with the first one that counts in place of those of weight 0, which may be anything."""
    counted = weights > 0
    rows = np.where(counted, np.arange(counted.shape[-1]), np.argmax(counted, -1)[..., None])
    return jax.tree.map(lambda column: np.take_along_axis(np.asarray(column), rows, -1), timings)


def check_enough(timings: Timings, weights: np.ndarray, min_timings: int) -> None:
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
    sizes = {"variant": timings.runs.variant, **timings.runs.inputs}
    for name, column in sizes.items():
        if np.shape(column) != shape:
            raise ValueError(f"{name}: expected shape {shape}, as time_ns has, got {np.shape(column)}")
    counted, times_ns = weights > 0, np.asarray(timings.time_ns)
    bad = np.argwhere(counted & ~(np.isfinite(times_ns) & (times_ns > 0))).tolist()
    if bad:
        place, got = ", ".join(map(str, bad[0])), times_ns[tuple(bad[0])]
        raise ValueError(f"time_ns[{place}]: expected a positive finite number, got {got}")
    count = counted.sum(-1)
    if np.any(count < min_timings):
        found, where = _first(count, count < min_timings)
        raise ValueError(f"timings: expected at least {min_timings} that count, got {found}{where}")
    # A workload is another one than the first if any of its sizes is.
    first = np.argmax(counted, -1)[..., None]
    columns = [np.asarray(column) for column in sizes.values()]
    differs = np.any([column != np.take_along_axis(column, first, -1) for column in columns], 0)
    is_one = ~np.any(differs & counted, -1)
    if min_timings > 1 and np.any(is_one):
        _, where = _first(count, is_one)
        raise ValueError(f"timings: expected several workloads, got one{where}: vary {' and '.join(list(sizes)[1:3])}")


def _first(count: np.ndarray | np.integer, wrong: np.ndarray | np.bool_) -> tuple[int, str]:
    """Return the count of the first device that is wrong, and which one that is."""
    index = int(np.argmax(wrong))
    return int(np.ravel(count)[index]), f" for device {index}" if np.ndim(count) else ""
