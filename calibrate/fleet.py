"""Calibrate a fleet of devices: find a shared prior from some devices, then fit every device, in several processes."""

import collections
import contextlib
import functools
import hashlib
import json
import operator
import os
import re
import unicodedata
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import current_process, get_context
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import numpy as np

from rlxjax import calibration
from rlxjax.fit import (
    MIN_TIMINGS,
    STARTS,
    LatencyPrior,
    PosteriorFit,
    Timings,
    fit_posteriors,
    pooled_prior,
    stack_timings,
)
from rlxjax.tables import Fleet, connected, on_ray

from .command_line import set_up_jax
from .terminal import Progress

#: The number of devices that are fitted in one program, and the most devices that the prior is computed from. A mean
#: over 64 devices has an error of an eighth of the spread of the devices.
GROUP_DEVICES, POOLED_DEVICES = 32, 64
#: A device is left out if its noise exceeds both this multiple of the median noise and this least noise.
MOST_NOISE_RATIO, LEAST_MOST_NOISE = 4.0, 0.1
#: The most left-out devices that are printed. A file names all left-out devices.
SHOWN = 20
#: The names of the files in the output folder that belong to no single device.
PRIOR, LEFT_OUT, RENAMED, UNFINISHED = "prior", "left-out", "renamed", "unfinished"
#: The pattern of names that every system accepts as file names; the most bytes of a name without suffix and digest.
_FILE_NAME, MOST_NAME_BYTES = re.compile(r"\w([\w .+@=,()-]*[\w+@=,()-])?"), 180

#: A function like `map`: it applies a function to each value, in any process and in any order.
Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
#: Takes the largest number of values, and returns a context manager that gives a `Map`.
Pool = Callable[[int], contextlib.AbstractContextManager[Map]]


class FleetOutcome(NamedTuple):
    """The result of a fleet job: the output folder, the number of devices, and the reason for each left-out device."""

    out: FilePath
    devices: int
    left_out: dict[str, str]

    def sentences(self) -> list[str]:
        return [
            f"{self.devices - len(self.left_out):,} of {self.devices:,} devices have a calibration in {self.out}.",
            f"{PRIOR}.json in that folder is the prior of a further device, for `rlxjax calibrate --prior`.",
        ]

    def as_dict(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "prior": str(self.out / f"{PRIOR}.json"),
            "devices": self.devices,
            "written": self.devices - len(self.left_out),
            "left_out": self.left_out,
        }


def check_folder(out: FilePath) -> None:
    """Raise an error unless the output folder is new, is empty, or holds an unfinished job."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"expected a folder for the calibrations of a fleet, got the file {out}")
    held = sorted(one.name for one in out.iterdir()) if out.exists() else []
    if held and f"{UNFINISHED}.json" not in held:
        raise ValueError(f"expected a new or an empty folder, got {out}, which holds {held[0]!r}")


def run(
    fleet: Fleet, out: FilePath, *, known: LatencyPrior[Any] | None, command: str, progress: Progress, pool: Pool
) -> FleetOutcome:
    """Write a calibration of each device whose timings fit, the shared prior, and why other devices are left out."""
    check_folder(out)
    known = fleet.model.prior if known is None else known
    with progress.phase("reading the devices"):
        devices = list(fleet.counts())
    names, left_out = file_names(devices), {}
    renamed = {device: f"{name}.json" for device, name in names.items() if name != device}
    with pool(-(-len(devices) // GROUP_DEVICES)) as each:
        with progress.phase("pooling"):
            prior, most_noise = pooled(fleet, devices, known, command, out, each)
        groups = [{device: out / f"{names[device]}.json" for device in own} for own in _in_groups(devices)]
        fit = functools.partial(fit_group, fleet, prior, known, most_noise, command)
        with progress.phase("fitting", total=len(groups)) as advance:
            for _, found in each(fit, groups):
                left_out |= found
                advance()
    for name, said in {RENAMED: renamed, LEFT_OUT: left_out}.items():
        if said:
            calibration.write_text_file(json.dumps(said, indent=2, ensure_ascii=False) + "\n", out / f"{name}.json")
    (out / f"{UNFINISHED}.json").unlink(missing_ok=True)
    return FleetOutcome(out, len(devices), left_out)


def _in_groups(devices: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(devices[first : first + GROUP_DEVICES]) for first in range(0, len(devices), GROUP_DEVICES)]


def file_names(devices: Iterable[str]) -> dict[str, str]:
    """Return a file name for each device: the device's name if it is safe, else a safe name that ends in a digest.

    Names that differ only in case or accents also get a digest, since some file systems do not distinguish such names.
    """

    def folded(name: str) -> str:
        return unicodedata.normalize("NFKC", name).casefold()

    devices = list(devices)
    alike, found = collections.Counter(map(folded, [*devices, PRIOR, LEFT_OUT, RENAMED, UNFINISHED])), {}
    for device in devices:
        is_short = len(os.fsencode(device)) <= MOST_NAME_BYTES
        if is_short and _FILE_NAME.fullmatch(device) and alike[folded(device)] == 1:
            found[device] = device
        else:
            digest = hashlib.sha256(device.encode(errors="surrogatepass")).hexdigest()[:8]
            quoted = urllib.parse.quote(device, " +@=,()", errors="replace").strip("-. ")
            found[device] = f"{quoted[:MOST_NAME_BYTES] or 'device'}-{digest}"
    return found


def pooled(
    fleet: Fleet, devices: Sequence[str], known: LatencyPrior[Any], command: str, out: FilePath, each: Map
) -> tuple[LatencyPrior[Any], float]:
    """Compute the shared prior from some devices, and write it. Return the prior and the largest allowed noise."""
    some = devices[:: max(1, -(-len(devices) // POOLED_DEVICES))]
    found, reasons = [], {}
    for fits, refused in each(functools.partial(fitted, fleet, known), _in_groups(some)):
        found += fits
        reasons |= refused
    found.sort(key=operator.itemgetter(0))
    noise = [fit.terms.noise_sd for _, fit, _ in found if fit.terms.converged]
    most_noise = max(MOST_NOISE_RATIO * float(np.median(noise)), LEAST_MOST_NOISE) if noise else 0.0
    kept = [one for one in found if not _refused_fit(one[1], most_noise)]
    if not kept:
        reasons |= {device: _refused_fit(fit, most_noise) or "" for device, fit, _ in found}
        first = next(iter(reasons.items()), ("", "there is no device"))
        raise ValueError(f"{fleet.files[0]}: expected devices whose timings fit, got none; {first[0]!r}: {first[1]}")
    fits, times_ns = [fit for _, fit, _ in kept], [time_ns for *_, time_ns in kept]
    pool = functools.partial(pooled_prior, prior=known)
    section = calibration.population_section(fits, times_ns, pool, fleet.model.facts, command=command)
    calibration.write_text_file(json.dumps({"command": command}) + "\n", out / f"{UNFINISHED}.json")
    calibration.write_json_file(calibration.CalibrationFile(models={fleet.model.name: section}), out / f"{PRIOR}.json")
    return calibration.prior_of(fleet.model, section), most_noise


def fit_group(
    fleet: Fleet,
    prior: LatencyPrior[Any],
    known: LatencyPrior[Any],
    most_noise: float,
    command: str,
    files: dict[str, FilePath],
) -> tuple[list[Any], dict[str, str]]:
    """Fit devices and write their calibrations. Return an empty list, and the reason for each left-out device."""
    # The pooled prior is close, so one start is enough for most devices.
    found, left_out = fitted(fleet, prior, [*files], n_starts=1)
    if again := [device for device, fit, _ in found if _refused_fit(fit, most_noise)]:
        found = [one for one in found if one[0] not in again] + fitted(fleet, prior, again)[0]
    for device, fit, _ in found:
        if reason := _refused_fit(fit, most_noise):
            left_out[device] = reason
            continue
        made = calibration.made_now() | {"command": command, "fingerprint": calibration.fingerprint_of_device(device)}
        content = calibration.CalibrationFile(models={fleet.model.name: calibration.section_of(fit, known, **made)})
        try:
            calibration.write_json_file(content, files[device], indent=None)
        except (ValueError, OSError) as reason:
            left_out[device] = str(reason)
    return [], left_out


def fitted(
    fleet: Fleet, prior: LatencyPrior[Any], devices: Sequence[str], n_starts: int = STARTS
) -> tuple[list[tuple[str, PosteriorFit, np.ndarray]], dict[str, str]]:
    read = fleet.timings(devices, MIN_TIMINGS)
    good = {device: own for device, own in read.items() if isinstance(own, Timings)}
    left_out = {device: own for device, own in read.items() if isinstance(own, str)}
    if not good:
        return [], left_out
    timings, weights = stack_timings(list(good.values()))
    fits = fit_posteriors(timings, prior, weights, n_starts=n_starts)
    found = zip(good.items(), fits, strict=True)
    return [(device, fit._replace(runs=own.runs), np.asarray(own.time_ns)) for (device, own), fit in found], left_out


def _refused_fit(fit: PosteriorFit, most_noise: float) -> str | None:
    if not fit.terms.converged:
        return fit.terms.message.removesuffix(".")
    if fit.terms.noise_sd > most_noise:
        off, most = (100 * np.expm1(share) for share in (fit.terms.noise_sd, most_noise))
        return f"its times differ from their predictions by {off:.0f} %, and this fleet allows {most:.0f} %"
    return None


@contextlib.contextmanager
def pool_of(most: int) -> Iterator[Map]:
    """Yield a `map` that uses several processes of this machine, or only this process if one process is enough."""
    if (workers := min(calibration.current_fingerprint().cores, most)) < 2:
        yield map
        return
    # With more threads in each process, threads would wait for a processor.
    own = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = own or "1"
    try:
        with ProcessPoolExecutor(workers, get_context("spawn"), _set_up_process) as pool:
            try:
                yield pool.map
            except BrokenProcessPool:
                raise OSError(
                    "a process that fits devices was killed, or ran out of memory; run the command again"
                ) from None
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        if own is None:
            del os.environ["OPENBLAS_NUM_THREADS"]


def _set_up_process() -> None:
    """Let JAX use one processor only, so that several processes do not compete for processors."""
    if hasattr(os, "sched_setaffinity"):
        own = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {own[int(current_process().name.rpartition("-")[2]) % len(own)]})
    set_up_jax("cpu")


def on_ray_pool(address: str | None) -> Pool:
    """Return a pool that runs on the actors of a Ray cluster."""

    def worker(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        set_up_jax("cpu")
        return function

    def lost(devices: Iterable[str], why: str) -> tuple[list[Any], dict[str, str]]:
        return [], dict.fromkeys(devices, why)

    @contextlib.contextmanager
    def pool(most: int) -> Iterator[Map]:
        with connected(address):
            yield lambda function, values: on_ray(functools.partial(worker, function), list(values), lost=lost)

    return pool
