"""Micro-benchmarks: what launches, waits, transfers, selections and transforms take by themselves."""

import functools
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax.clock import quiet_collector
from rlxjax.welch import SELECTIONS, WelchPeakParams, mean_power, selected_peaks

from .samples import SampleLog, SampleWriter

#: Float32 elements of the arrays that are uploaded and read back, and, far beyond any cache, copied.
TRANSFER_ELEMENTS, COPY_ELEMENTS = 2**22, 2**25
MICRO_REPEATS = 15
#: Without these there is no gate, and nothing to start a fit from.
NEEDED_MICRO = ("launch", "roundtrip", "copy", "upload", "readback")
#: Runs of a micro-benchmark whose difference to another tells of the caches.
RUNS_IN_A_ROW = 10
#: Rows, bins and k of two selections of peaks: one scans many bins, the other ranks many peaks.
WIDE_SELECTION, DEEP_SELECTION = (64, 2049, 1), (256, 129, 64)
#: Rows and n_fft of two transforms, from signal to powers: within a processor's first cache, and beyond.
SHORT_TRANSFORM, LONG_TRANSFORM = (64, 1024), (8, 8192)
ELEMENT_BYTES = 4


class MicroRates(NamedTuple):
    """What the micro-benchmarks say of the device.

    Attributes:
        dispatch_ns: one launch, without waiting for it.
        roundtrip_ns: waiting for a program of no work, once it is launched.
        memory_bytes_per_ns: device memory, bytes read and written.
        upload_bytes_per_ns: host to device.
        readback_bytes_per_ns: device to host.
        selection_ns: the wide and the deep selection, for each form of it.
        transform_ns: the short and the long powers; empty of samples that have none.
    """

    dispatch_ns: float
    roundtrip_ns: float
    memory_bytes_per_ns: float
    upload_bytes_per_ns: float
    readback_bytes_per_ns: float
    selection_ns: Mapping[str, tuple[float, float]]
    transform_ns: tuple[float, ...]


def time_micro(log: SampleLog, writer: SampleWriter, repeats: int = MICRO_REPEATS) -> None:
    """Time launch, round trip, device copy, upload and readback, interleaved, and keep every repeat.

    What an earlier run left is filled up to the same number of repeats.
    """
    benchmarks = {name: run for name, run in micro_benchmarks().items() if len(log.micro.get(name, ())) < repeats}
    with quiet_collector():
        for repeat in range(repeats):
            for name, run in benchmarks.items():
                if len(log.micro.get(name, ())) <= repeat:
                    writer.micro(name, run())


def micro_rates(log: SampleLog) -> MicroRates:
    """Return the rates that the minimum of each benchmark's repeats gives.

    Raises:
        ValueError: samples without a benchmark of launches, round trips or transfers.
    """
    best = {name: min(times) for name, times in log.micro.items()}
    if missing := [name for name in NEEDED_MICRO if name not in best]:
        raise ValueError(
            f"the samples hold no micro-benchmark of {', '.join(missing)}: measure more with "
            "`rlxjax calibrate --resume`"
        )
    transfer_bytes, copy_bytes = TRANSFER_ELEMENTS * ELEMENT_BYTES, COPY_ELEMENTS * ELEMENT_BYTES
    return MicroRates(
        dispatch_ns=best["launch"],
        roundtrip_ns=best["roundtrip"],
        memory_bytes_per_ns=2 * copy_bytes / best["copy"],
        upload_bytes_per_ns=transfer_bytes / best["upload"],
        readback_bytes_per_ns=transfer_bytes / best["readback"],
        selection_ns={
            form: (best[f"{form} wide"], best[f"{form} deep"])
            for form in SELECTIONS
            if f"{form} wide" in best and f"{form} deep" in best
        },
        transform_ns=_transforms_ns(log),
    )


def _transforms_ns(log: SampleLog) -> tuple[float, ...]:
    """Return the times of the short and the long powers: their ratio is that of repeats side by side."""
    short, long = (log.micro.get(name, []) for name in ("short powers", "long powers"))
    ratios = [one / other for one, other in zip(long, short, strict=False)]
    return (min(short), min(short) * float(np.median(ratios))) if ratios else ()


@functools.cache
def micro_benchmarks() -> dict[str, Callable[[], float]]:
    """Return what times one repeat of each in ns, by name; all are compiled and have run."""
    benchmarks = {**_transfer_benchmarks(), **_selection_benchmarks(), **_transform_benchmarks()}
    for run in benchmarks.values():
        run()
    return benchmarks


def _transfer_benchmarks() -> dict[str, Callable[[], float]]:
    increment = jax.jit(lambda x: x + 1.0)
    small, medium, large = (
        jax.block_until_ready(jnp.zeros((size,), jnp.float32)) for size in (8, TRANSFER_ELEMENTS, COPY_ELEMENTS)
    )
    on_host = np.ones((TRANSFER_ELEMENTS,), np.float32)
    run_once = _run_of(increment, small)
    box = [medium]

    def fill(array: jax.Array) -> None:
        box[0] = array

    # The copy leaves nothing in the caches: a launch is timed right after another.
    return {
        "launch": lambda: _timed(
            lambda: fill(increment(small)), before=run_once, then=lambda: box[0].block_until_ready()
        ),
        "roundtrip": lambda: _timed(
            lambda: box[0].block_until_ready(), before=lambda: (run_once(), fill(increment(small)))
        ),
        "copy": functools.partial(_timed, _run_of(increment, large)),
        "upload": functools.partial(_timed, _run_of(jax.device_put, on_host)),
        # An array remembers the host copy that it gave out: every repeat reads a new one.
        "readback": lambda: _timed(
            lambda: np.asarray(box[0]), before=lambda: fill(increment(medium).block_until_ready())
        ),
    }


def _selection_benchmarks() -> dict[str, Callable[[], float]]:
    rng = np.random.default_rng(0)
    benchmarks = {}
    for name, (rows, bins, k) in {"wide": WIDE_SELECTION, "deep": DEEP_SELECTION}.items():
        power = jax.device_put(rng.exponential(size=(rows, bins)).astype(np.float32))
        for form in SELECTIONS:
            program = jax.jit(functools.partial(selected_peaks, k=k, selection=form))
            benchmarks[f"{form} {name}"] = functools.partial(_timed, _run_of(program, power))
    return benchmarks


def _transform_benchmarks() -> dict[str, Callable[[], float]]:
    rng = np.random.default_rng(0)
    benchmarks = {}
    for name, (rows, n_fft) in {"short powers": SHORT_TRANSFORM, "long powers": LONG_TRANSFORM}.items():
        params = WelchPeakParams.fast(n_fft, 1)
        signal = jax.device_put(rng.standard_normal((rows, params.frame_len), np.float32))
        program = jax.jit(functools.partial(mean_power, params=params))
        benchmarks[name] = functools.partial(_quickest, _run_of(program, signal))
    return benchmarks


def _run_of(program: Callable[..., jax.Array], array: jax.Array | np.ndarray) -> Callable[[], object]:
    return lambda: program(array).block_until_ready()


def _quickest(run: Callable[[], object]) -> float:
    """Return the least time of several runs in a row, whose rows are in the caches."""
    return min(_timed(run) for _ in range(RUNS_IN_A_ROW))


def _timed(
    run: Callable[[], object],
    before: Callable[[], object] = lambda: None,
    then: Callable[[], object] = lambda: None,
) -> float:
    before()
    start = time.perf_counter_ns()
    run()
    taken = time.perf_counter_ns() - start
    then()
    return float(max(taken, 1))
