"""Descriptions of devices to compile for; every figure has its source."""

import difflib
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlxjax._files import Strict, read_json_file
from rlxjax._typing import Provenance

_TABLE = Path(__file__).with_name("devices.json")

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Rates = Mapping[str, _Positive]


class Link(Strict):
    """A connection between devices: either the links of a torus, from each device to its neighbours, or a switch.

    Attributes:
        name: the name of the link, such as "ICI", "NVLink", "PCIe" or "network".
        shape: "torus" or "switch".
        bytes_per_ns: bandwidth in one direction: of a single link in a torus, or of a single device at a switch.
        latency_ns: latency of one hop between devices, in ns.
        devices: the largest number of devices that the link connects.
        wraps: None for a switch. A torus dimension is a ring if its size is a multiple of this number, else a line.
    """

    name: str
    shape: Literal["torus", "switch"]
    bytes_per_ns: _Positive
    latency_ns: _Positive
    devices: Annotated[int, Field(gt=1)]
    wraps: Annotated[int, Field(gt=0)] | None = None


class TargetDevice(Strict):
    """A device to compile for, as its maker describes it.

    Attributes:
        name: the name to give to `target_device`.
        platform: the JAX platform, "tpu" or "cuda".
        title: the maker's name of the device.
        topologies: for a TPU, the compiler's name of a slice, by the number of devices in the slice.
        topology_options: for a TPU, further options of the compiler, such as "chip_config_name".
        description: for a GPU, the lines of XLA's description of the target.
        memory_bytes: memory of one device that programs may use, in bytes.
        bandwidth_bytes_per_ns: bandwidth of the memory, in bytes per ns.
        vector_flop_per_ns: peak rate without matrix units, by number type, such as "f32"; empty if unpublished.
        matrix_flop_per_ns: peak rate of the matrix units, without sparsity, by type, such as "bf16", "tf32" or "s8".
        clock_ghz: clock frequency of the cores, in GHz.
        launch_ns: in a row of empty kernels, the time from one kernel to the next, in ns.
        call_ns: host time of a call that waits for its results, in ns; None if timings determine the host time.
        links: connections between devices, the nearest first. A larger switch connects the groups of a smaller switch.
        l2_bytes: size of the last cache, in bytes; None if there is no cache or its size is unpublished.
        cores: number of streaming multiprocessors of a GPU.
        sources: for each field, the source of the figure, in words.
        provenance: for each field whose figure does not come from a data sheet, the provenance of the figure.
    """

    name: str
    platform: Literal["tpu", "cuda"]
    title: str
    topologies: Mapping[str, str] = {}
    topology_options: Mapping[str, str] = {}
    description: Annotated[tuple[str, ...], Field(strict=False)] = ()
    memory_bytes: Annotated[int, Field(gt=0)]
    bandwidth_bytes_per_ns: _Positive
    vector_flop_per_ns: _Rates
    matrix_flop_per_ns: _Rates
    clock_ghz: _Positive
    launch_ns: _Positive
    call_ns: _Positive | None = None
    links: Annotated[tuple[Link, ...], Field(strict=False)] = ()
    l2_bytes: Annotated[int, Field(gt=0)] | None = None
    cores: Annotated[int, Field(gt=0)] | None = None
    sources: Mapping[str, str]
    provenance: Mapping[str, Annotated[Provenance, Field(strict=False)]] = {}

    @model_validator(mode="after")
    def _is_whole(self) -> "TargetDevice":
        needs = "topologies" if self.platform == "tpu" else "description"
        if not getattr(self, needs):
            raise ValueError(f"{self.name}: expected the field {needs}, which the compiler for {self.platform} needs")
        for count in self.topologies:
            if not count.isdecimal() or int(count) < 1:
                raise ValueError(f"{self.name}: topologies: expected numbers of devices as keys, got {count!r}")
        fields = type(self).model_fields.keys()
        figures = fields - {"name", "platform", "title", "sources", "provenance"} - self.sources.keys()
        if missing := sorted(name for name in figures if getattr(self, name) not in (None, (), {})):
            raise ValueError(f"{self.name}: sources: expected the source of each figure, got none for {missing[0]}")
        if unknown := sorted((self.sources.keys() | self.provenance.keys()) - fields):
            raise ValueError(f"{self.name}: sources and provenance: expected names of fields, got {unknown[0]}")
        return self

    def provenance_of(self, field: str) -> Provenance:
        """Return the provenance of a figure: a data sheet, unless `provenance` says otherwise."""
        return self.provenance.get(field, Provenance.DATA_SHEET)

    @property
    def kind(self) -> str:
        """The name that JAX and XLA use: for a GPU, the name in its `description`; otherwise the title."""
        named = (line.partition("name: ")[2].strip('"') for line in self.description if line.startswith("  name:"))
        return next(named, self.title)

    def compiler_target(self, devices: int) -> str:
        """Return what the compiler needs for a number of devices: the name of a topology, or a description as text.

        Raises:
            ValueError: the target has no topology with at least this number of devices.
        """
        if self.platform == "cuda":
            return "\n".join(self.description) + "\n"
        large_enough = [int(count) for count in self.topologies if int(count) >= devices]
        if not large_enough:
            most = max(map(int, self.topologies))
            raise ValueError(f"target {self.name}: expected a mesh of at most {most} devices, got {devices}")
        return self.topologies[str(min(large_enough))]


class TargetFile(Strict):
    """The schema of a file that describes targets."""

    schema_version: Literal[1]
    targets: Annotated[tuple[TargetDevice, ...], Field(strict=False, min_length=1)]


def load_target(path: str | os.PathLike[str]) -> TargetDevice:
    """Return the target in a file that has the schema of `rlxjax/devices/devices.json`.

    Raises:
        ValueError: the file is missing, is not JSON, violates the schema, or has several targets. A one-line message.
    """
    found = _read(path)
    if len(found) != 1:
        raise ValueError(f"{os.fspath(path)}: expected one target, got {len(found)}: {', '.join(found)}")
    return next(iter(found.values()))


def target_device(target: str | TargetDevice) -> TargetDevice:
    """Return a target by its name (in any case) or by the path of a JSON file. Return a `TargetDevice` unchanged.

    Raises:
        ValueError: the file is not valid, or the name is unknown (the one-line message then lists the nearest names).

    Examples:
        >>> v5e = target_device("tpu-v5e")
        >>> v5e.memory_bytes, v5e.bandwidth_bytes_per_ns, str(v5e.provenance_of("memory_bytes"))
        (16911433728, 819.0, 'data sheet')
    """
    if isinstance(target, TargetDevice):
        return target
    if not isinstance(target, str):
        raise ValueError(f"target: expected a name or a TargetDevice, got {target!r}")
    if target.endswith(".json"):
        return load_target(target)
    name = target.strip().lower()
    if name not in _table():
        near = ", ".join(difflib.get_close_matches(name, _table(), n=3, cutoff=0.4) or _table())
        raise ValueError(f"target: expected a known device or a .json file, got {target!r}; the nearest: {near}")
    return _table()[name]


def target_names() -> tuple[str, ...]:
    """Return the names of the built-in targets.

    Examples:
        >>> target_names()[:4]
        ('tpu-v4', 'tpu-v5e', 'tpu-v5p', 'tpu-v6e')
    """
    return tuple(_table())


@functools.cache
def _table() -> Mapping[str, TargetDevice]:
    return _read(_TABLE)


def _read(path: str | os.PathLike[str]) -> dict[str, TargetDevice]:
    mend = f"see {_TABLE} for an example"
    content = read_json_file(path, TargetFile, 1, ValueError, mend, "a file of targets")
    return {target.name: target for target in content.targets}
