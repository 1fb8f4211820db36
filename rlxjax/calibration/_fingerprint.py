"""The machine and software that timings belong to."""

import contextlib
import os
import platform
import sys
import warnings
from collections.abc import Iterable, Mapping
from importlib import metadata

import jax

from rlxjax._files import Strict

_THREAD_FLAGS = ("XLA_FLAGS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
#: What makes it another machine; the rest is software.
MACHINE_FIELDS = ("platform", "device_kind", "machine", "cpu_model", "cores")


#: What a fingerprint says where nothing is known.
UNKNOWN = "unknown"


class MachineMismatchWarning(UserWarning):
    """A calibration was made on another machine, or with other software."""


class Fingerprint(Strict):
    """The machine and software that timings belong to."""

    platform: str
    device_kind: str
    device_count: int
    machine: str
    cpu_model: str
    cores: int
    thread_flags: dict[str, str]
    jax: str
    jaxlib: str
    numpy: str
    python: str


def current_fingerprint() -> Fingerprint:
    """Return the fingerprint of this process."""
    device = jax.devices()[0]
    affinity = getattr(os, "sched_getaffinity", None)
    return Fingerprint(
        platform=device.platform,
        device_kind=device.device_kind,
        device_count=jax.device_count(),
        machine=platform.machine(),
        cpu_model=_cpu_model(),
        cores=len(affinity(0)) if affinity else os.cpu_count() or 1,
        thread_flags={name: os.environ[name] for name in _THREAD_FLAGS if name in os.environ},
        python=platform.python_version(),
        **{name: metadata.version(name) for name in ("jax", "jaxlib", "numpy")},
    )


def fingerprint_of_device(device: str) -> Fingerprint:
    """Return the fingerprint of timings that came with the name of a device and nothing else.

    Examples:
        >>> found = fingerprint_of_device("phone-7")
        >>> found.device_kind, found.platform, found.cores
        ('phone-7', 'unknown', 0)
    """
    texts = dict.fromkeys(("platform", "machine", "cpu_model", "jax", "jaxlib", "numpy", "python"), UNKNOWN)
    return Fingerprint(device_kind=device, device_count=0, cores=0, thread_flags={}, **texts)


def fingerprint_differences(
    made_on: Fingerprint,
    here: Fingerprint,
    names: Iterable[str] = tuple(Fingerprint.model_fields),
    places: tuple[str, str] = ("there", "here"),
) -> list[str]:
    """Return a phrase for every field that differs, with words for the two places."""
    return [
        f"{name} {getattr(made_on, name)!r} {places[0]}, {getattr(here, name)!r} {places[1]}"
        for name in names
        if getattr(made_on, name) != getattr(here, name)
    ]


def warn_if_elsewhere(made_on: Mapping[str, Fingerprint], path: str | os.PathLike[str]) -> None:
    """Warn where sections were made on another machine, or with other software, saying what differs."""
    here = current_fingerprint()
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, known in made_on.items():
        alike.setdefault(tuple(fingerprint_differences(known, here)), []).append(name)
    for differences, names in alike.items():
        if not differences:
            continue
        of, first = "" if len(alike) == 1 else f": {', '.join(names)}", made_on[names[0]]
        if first.platform == UNKNOWN:
            warnings.warn(
                f"{path}{of} was fitted to timings of the device {first.device_kind!r}, of which nothing else is "
                "known. Its predictions are of that device.",
                MachineMismatchWarning,
                stacklevel=3,
            )
            continue
        how = "elsewhere" if fingerprint_differences(first, here, MACHINE_FIELDS) else "with other software"
        warnings.warn(
            f"{path}{of} was made {how}: {'; '.join(differences)}. Its predictions may not hold here; "
            "`rlxjax calibrate` makes one that does, `rlxjax validate` says whether these still do.",
            MachineMismatchWarning,
            stacklevel=3,
        )


def _cpu_model() -> str:
    if sys.platform == "linux":
        with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
