"""Devices to compile for that need not be there: what each has, with the source of every figure."""

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
    """What joins devices: the links of a torus, from a device to its neighbours, or a switch.

    Attributes:
        name: of the links, as "ICI", "NVLink", "PCIe" or "network".
        shape: "torus" or "switch".
        bytes_per_ns: in one direction: of one link of a torus, of one device at a switch.
        latency_ns: of one hop.
        devices: the most that it joins.
        wraps: the sizes of a torus whose multiples close to a ring; other sizes are lines. None of a switch.
    """

    name: str
    shape: Literal["torus", "switch"]
    bytes_per_ns: _Positive
    latency_ns: _Positive
    devices: Annotated[int, Field(gt=1)]
    wraps: Annotated[int, Field(gt=0)] | None = None


class TargetDevice(Strict):
    """A device to compile for, as its makers describe it.

    Attributes:
        name: to ask for it by.
        platform: of JAX, "tpu" or "cuda".
        title: what its maker calls it.
        topologies: of a TPU, the compiler's name of each slice by its number of devices.
        topology_options: of a TPU, what the compiler is told beside, as "chip_config_name".
        description: of a GPU, the lines of XLA's description of the target.
        memory_bytes: of one device that programs may use.
        bandwidth_bytes_per_ns: of its memory.
        vector_flop_per_ns: peak rate outside of matrix units by type, as "f32"; empty where nobody says.
        matrix_flop_per_ns: peak rate of its matrix units by type, as "bf16", "tf32" or "s8", without sparsity.
        clock_ghz: of its cores.
        launch_ns: from one kernel to the next where kernels do nothing.
        call_ns: of the host, for one call that is waited for; None where timings of such a device say it.
        links: what joins several devices, the nearest first; a switch of more devices joins those of a nearer one.
        l2_bytes: its last cache, None where there is none or nobody says.
        cores: streaming multiprocessors of a GPU.
        sources: where each figure comes from, in words, by field.
        provenance: of the figures that are no data sheet's, by field.
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
            raise ValueError(f"{self.name}: expected {needs}, which the compiler for {self.platform} needs")
        for count in self.topologies:
            if not count.isdecimal() or int(count) < 1:
                raise ValueError(f"{self.name}: topologies: expected numbers of devices as keys, got {count!r}")
        fields = type(self).model_fields.keys()
        figures = fields - {"name", "platform", "title", "sources", "provenance"} - self.sources.keys()
        if missing := sorted(name for name in figures if getattr(self, name) not in (None, (), {})):
            raise ValueError(f"{self.name}: sources: expected where each figure comes from, got none for {missing[0]}")
        if unknown := sorted((self.sources.keys() | self.provenance.keys()) - fields):
            raise ValueError(f"{self.name}: sources and provenance: expected names of fields, got {unknown[0]}")
        return self

    def provenance_of(self, field: str) -> Provenance:
        """Return where a figure comes from: a data sheet, unless the target says otherwise."""
        return self.provenance.get(field, Provenance.DATA_SHEET)

    @property
    def kind(self) -> str:
        """The name by which JAX and XLA know the device: of a GPU, that of its description, else the title."""
        named = (line.partition("name: ")[2].strip('"') for line in self.description if line.startswith("  name:"))
        return next(named, self.title)

    def compiler_target(self, devices: int) -> str:
        """Return what the compiler is told to compile for so many devices: a topology, or a description as text.

        Raises:
            ValueError: no topology of the target has so many devices.
        """
        if self.platform == "cuda":
            return "\n".join(self.description) + "\n"
        large_enough = [int(count) for count in self.topologies if int(count) >= devices]
        if not large_enough:
            most = max(map(int, self.topologies))
            raise ValueError(f"target {self.name}: expected a mesh of at most {most} devices, got {devices}")
        return self.topologies[str(min(large_enough))]


class TargetFile(Strict):
    """What stands in a file of targets."""

    schema_version: Literal[1]
    targets: Annotated[tuple[TargetDevice, ...], Field(strict=False, min_length=1)]


def load_target(path: str | os.PathLike[str]) -> TargetDevice:
    """Return the target that a file of the schema of `rlxjax/devices/devices.json` describes.

    Raises:
        ValueError: one line; a file that is missing, no JSON, against the schema, or of several targets.
    """
    found = _read(path)
    if len(found) != 1:
        raise ValueError(f"{os.fspath(path)}: expected one target, got {len(found)}: {', '.join(found)}")
    return next(iter(found.values()))


def target_device(target: str | TargetDevice) -> TargetDevice:
    """Return a target by its name, in any case; a target is returned as it is, a path to a JSON file is read.

    Raises:
        ValueError: an unknown name, with the nearest ones, or a file that cannot be used; one line.

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
    """Return the names of the targets that this package describes.

    Examples:
        >>> target_names()[:4]
        ('tpu-v4', 'tpu-v5e', 'tpu-v5p', 'tpu-v6e')
    """
    return tuple(_table())


@functools.cache
def _table() -> Mapping[str, TargetDevice]:
    return _read(_TABLE)


def _read(path: str | os.PathLike[str]) -> dict[str, TargetDevice]:
    mend = "see rlxjax/devices/devices.json for a file of this schema"
    content = read_json_file(path, TargetFile, 1, ValueError, mend, "a file of targets")
    return {target.name: target for target in content.targets}
