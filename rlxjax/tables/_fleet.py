"""Read the timings of many devices from Parquet files, a few devices at a time. A column names each row's device."""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from rlxjax._values import FrozenDict
from rlxjax.extras import require
from rlxjax.fit import UNITS_NS, LatencyModel, Table, Timings, check_enough, runs_and_times

from ._rows import Field

#: The name that pyarrow gives to the column with the file of each row.
FILE = "__filename"


@dataclasses.dataclass(frozen=True)
class Fleet:
    """Parquet files with the timings of many devices. A fleet keeps no rows in memory, and can be pickled.

    Attributes:
        model: the model whose runs were timed.
        files: the absolute paths of the files, in order.
        columns: a dict from field (`device`, `variant`, `time_ns`, an input) to column, without fields at a default.
        schema: the pyarrow schema of the columns in `columns`.
        keys: the pyarrow schema of the columns whose values come from the paths of the files.
    """

    model: LatencyModel
    files: tuple[str, ...]
    columns: Mapping[str, str]
    schema: Any
    keys: Any

    def counts(self) -> dict[str, int]:
        """Return a dict from device to its number of timings, in the order of the devices in the files.

        Raises:
            ValueError: a row names no device. The message is one line that names the file and the row.
        """
        found: dict[str, int] = {}
        name = self.columns["device"]
        for file in self.files:
            first = 0
            with self._read((file,)) as data:
                for batch in data.to_batches(columns=[name]):
                    for device, count in map(dict.values, batch.column(name).value_counts().to_pylist()):
                        if device is None or not str(device):
                            row = first + [not one for one in batch.column(name).to_pylist()].index(True)
                            raise ValueError(f"{file}, row {row}: {name}: expected the name of a device, got none")
                        found[device] = found.get(device, 0) + count
                    first += batch.num_rows
        return found

    def timings(self, devices: Sequence[str], min_timings: int) -> dict[str, Timings | str]:
        """Return a dict from device to its timings, or to the reason why no fit is possible, in the order of `devices`.

        Args:
            devices: the names of devices. Only the rows of these devices are read into memory.
            min_timings: the least number of timings that a fit needs.
        """
        import pyarrow as pa
        import pyarrow.compute

        compute: Any = pyarrow.compute
        column, is_mine = self.columns["device"], compute.field(self.columns["device"])
        if pa.types.is_dictionary(self.schema.field(column).type):
            is_mine = is_mine.cast(pa.string())
        names = list(dict.fromkeys([*self.columns.values(), FILE]))
        mine = is_mine.isin(list(devices))
        with self._read(self.files) as data:
            table = data.to_table(columns=names, filter=mine)
        columns = {name: np.asarray(table.column(name)) for name in names}
        place_of = {device: place for place, device in enumerate(devices)}
        own = np.array([place_of[device] for device in columns[column]], int)
        order = np.argsort(own, kind="stable")
        edges = np.searchsorted(own[order], np.arange(len(devices) + 1))
        return {
            device: self._timings_of(device, columns, order[edges[place] : edges[place + 1]], min_timings)
            for place, device in enumerate(devices)
        }

    @contextlib.contextmanager
    def _read(self, files: Sequence[str]) -> Iterator[Any]:
        """Yield a pyarrow dataset of files. If a column cannot be read, raise an error that names the place."""
        import pyarrow as pa
        import pyarrow.dataset as of

        from ._source import unreadable

        checked = of.ParquetFragmentScanOptions(page_checksum_verification=True)
        format_ = of.ParquetFileFormat(default_fragment_scan_options=checked)
        paths: Any = of.partitioning(self.keys, flavor="hive") if self.keys.names else None
        try:
            yield of.dataset([*files], self.schema, format_, partitioning=paths)
        except (pa.ArrowException, OSError) as reason:
            own = [name for name in self.schema.names if name not in self.keys.names]
            raise ValueError(unreadable(files, own, reason)) from None

    def _timings_of(
        self, device: str, columns: Mapping[str, np.ndarray], rows: np.ndarray, min_timings: int
    ) -> Timings | str:
        time_ns = self.columns["time_ns"]
        by_field = {field: name for field, name in self.columns.items() if field not in ("device", "time_ns")}
        cells = {field: columns[name][rows] for field, name in [*by_field.items(), (time_ns, time_ns)]}

        def place(row: int) -> str:
            return f"{columns[FILE][rows[row]]}, row {row} of {device!r}"

        try:
            table = Table(list(cells), cells.__getitem__, str(columns[FILE][rows[0]]), place)
            found = Timings(*runs_and_times(self.model, table, "variant", time_ns))
            check_enough(found, np.ones(len(rows)), min_timings)
        except ValueError as reason:
            return str(reason)
        return found


def fleet_of(
    source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    model: LatencyModel,
    columns: Mapping[str, str] | None = None,
    without: str | os.PathLike[str] = "",
) -> Fleet:
    """Return a `Fleet` for Parquet files with timings. This call reads only the footers of the files, and no rows.

    Args:
        source: a file, a glob or a folder, or several of these. All files need the same schema. The rows of a device
            may be in several files.
        model: the model whose runs were timed.
        columns: a dict from field (`device`, `variant`, `time_ns` or an input) to column, if the two names differ.
        without: a folder whose files are left out.

    Raises:
        ValueError: there are no files or no rows; a file is not a Parquet file or has another schema; or a column is
            missing or has another type.
        ImportError: pyarrow is not installed.

    Examples:
        >>> import pathlib, tempfile
        >>> import pyarrow as pa, pyarrow.parquet as pq
        >>> from rlxjax.models import FFT
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "fleet.parquet"
        >>> rows = {"device": ["one", "two", "one"], "batch": [1, 2, 3], "n_fft": [64, 64, 64], "time_us": [3.0] * 3}
        >>> pq.write_table(pa.table(rows), path)
        >>> fleet_of(path, FFT).counts()
        {'one': 2, 'two': 1}
    """
    require("pyarrow", "scale")
    import pyarrow as pa

    from ._source import columns_of, source_of

    found, _ = source_of(source, (FilePath(without),) if without else ())
    given = dict(columns or {})
    first = next(iter(found.files))
    names = [*found.schema.names, *found.keys[first]]
    if "time_ns" not in given and "time_ns" not in names:
        others = [name for unit in UNITS_NS if (name := f"time{unit}") in names]
        given |= {"time_ns": others[0]} if others else {}
    variants = model.variants
    fields = {
        "device": Field("device", names=("any",)),
        "variant": Field("variant", names=variants, default=variants[0] if len(variants) == 1 else None),
        "time_ns": Field("time"),
        **{name: Field(own.unit, default=own.default, is_list=own.is_list) for name, own in model.inputs.items()},
    }
    mapped, _, types = columns_of(found, fields, given)
    used = {*mapped.values()}
    keys = pa.schema([(name, type_) for name, type_ in types.items() if name in used])
    schema = pa.schema([*(field for field in found.schema if field.name in used), *keys])
    return Fleet(model, tuple(map(os.path.abspath, found.files)), FrozenDict(mapped), schema, keys)
