"""What a machine does whatever is timed: launches, waits, transfers and small programs, its pace, and its gate."""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from rlxjax import IoFusionGate
from rlxjax.calibration import GATE_UNITS, GateCoefficient, MachineSection, Pace
from rlxjax.clock import quiet_collector
from rlxjax.gate import Provenance
from rlxjax.welch import SELECTIONS, WelchPeakParams, mean_power, selected_peaks

from .samples import Canary, Micro, SampleLog

#: Float32 elements of the arrays that are uploaded and read back, and, far beyond any cache, copied.
TRANSFER_ELEMENTS, COPY_ELEMENTS, ELEMENT_BYTES = 2**22, 2**25, 4
MICRO_REPEATS = 15
#: Without these there is no gate, and nothing to start a fit from.
NEEDED_MICRO = ("launch", "roundtrip", "copy", "readback")
#: Runs in a row of a transform, of which the quickest counts: its rows are in the caches.
RUNS_IN_A_ROW = 10
#: Rows, bins and k of two selections of peaks: one scans many bins, the other ranks many peaks.
WIDE_SELECTION, DEEP_SELECTION = (64, 2049, 1), (256, 129, 64)
#: Rows and n_fft of two transforms, from signal to powers: within a processor's first cache, and beyond.
SHORT_TRANSFORM, LONG_TRANSFORM = (64, 1024), (8, 8192)
#: The micro-benchmarks that tell the pace, seconds between two looks, and the share of looks that a time is not below.
CANARIES, EVERY_S, LOW_QUANTILE = ("top_k deep", "top_k wide", "maxima deep", "upload"), 1.0, 0.25
#: Standard deviation of the logarithm of a machine's speed from one minute to the next, where nothing is known of this
#: one; it counts as so many looks.
PACE_LOG_SD, PACE_LOOKS = 0.05, 10


def time_micro(log: SampleLog, repeats: int = MICRO_REPEATS) -> None:
    """Time every micro-benchmark, interleaved, until each has so many repeats, and keep each."""
    with quiet_collector():
        for repeat in range(repeats):
            for name, run in micro_benchmarks().items():
                if len(log.micro.get(name, ())) <= repeat:
                    log.keep(Micro(name=name, time_ns=run()))


def micro_times_ns(log: SampleLog) -> dict[str, float]:
    """Return the least of each micro-benchmark's repeats in ns, of canaries a low quantile of the looks."""
    found = {name: min(times_ns) for name, times_ns in log.micro.items()}
    for name in CANARIES:
        if looks := [look.times_ns[name] for look in log.canaries if name in look.times_ns]:
            found[name] = float(np.quantile(looks, LOW_QUANTILE))
    return found


def gate_rates(micro_ns: Mapping[str, float]) -> dict[str, float]:
    """Return the measured coefficients of the IO gate, by name: ns, and bytes per ns."""
    if missing := [name for name in NEEDED_MICRO if name not in micro_ns]:
        mend = "measure more with `rlxjax calibrate --resume`"
        raise ValueError(f"the samples hold no micro-benchmark of {', '.join(missing)}: {mend}")
    return {
        "dispatch_ns": micro_ns["launch"],
        "roundtrip_ns": micro_ns["roundtrip"],
        "memory_bw": 2 * ELEMENT_BYTES * COPY_ELEMENTS / micro_ns["copy"],
        "host_readback_bw": ELEMENT_BYTES * TRANSFER_ELEMENTS / micro_ns["readback"],
    }


def measured_gate(micro_ns: Mapping[str, float], platform: str) -> dict[str, GateCoefficient]:
    """Return the IO gate with this machine's rates: an added sync point costs its round trip alone, any gain counts."""
    measured = gate_rates(micro_ns)
    chosen = {"unified_memory": False, "host_thunk_penalty_ns": 0.0, "min_gain_ns": 0.0}
    gate = IoFusionGate.checked(**measured, **chosen)
    provenance = dict.fromkeys(measured, Provenance.MEASURED) | dict.fromkeys(chosen, Provenance.ARCH_DEFAULT)
    if platform == "cpu":  # what the host reads is where it is: a view's time says nothing of a readback
        provenance["host_readback_bw"] = Provenance.UNCALIBRATED
    return {
        name: GateCoefficient(value=float(getattr(gate, name)), unit=unit, provenance=provenance[name])
        for name, unit in GATE_UNITS.items()
    }


@functools.cache
def micro_benchmarks() -> dict[str, Callable[[], float]]:
    """Return what times one repeat of each in ns, by name; all are compiled and have run."""
    rng, increment = np.random.default_rng(0), jax.jit(lambda x: x + 1.0)
    sizes = (8, TRANSFER_ELEMENTS, COPY_ELEMENTS)
    small, medium, large = (jax.block_until_ready(jnp.zeros((size,), jnp.float32)) for size in sizes)
    on_host = np.ones((TRANSFER_ELEMENTS,), np.float32)

    def launched() -> Any:  # right after another launch: a copy leaves nothing in the caches
        increment(small).block_until_ready()
        return increment(small)

    def launch() -> float:
        increment(small).block_until_ready()
        start = time.perf_counter_ns()
        result = increment(small)
        taken = time.perf_counter_ns() - start
        result.block_until_ready()
        return float(max(taken, 1))

    benchmarks = {
        "launch": launch,
        "roundtrip": lambda: _timed(launched().block_until_ready),
        "copy": _timing(increment, large),
        "upload": _timing(jax.device_put, on_host),
        # An array remembers the host copy that it gave out: every repeat reads a new one.
        "readback": lambda: _timed(functools.partial(np.asarray, increment(medium).block_until_ready())),
    }
    for name, (rows, bins, k) in {"wide": WIDE_SELECTION, "deep": DEEP_SELECTION}.items():
        power = jax.device_put(rng.exponential(size=(rows, bins)).astype(np.float32))
        for form in SELECTIONS:
            program = jax.jit(functools.partial(selected_peaks, k=k, selection=form))
            benchmarks[f"{form} {name}"] = _timing(program, power)
    for name, (rows, n_fft) in {"short powers": SHORT_TRANSFORM, "long powers": LONG_TRANSFORM}.items():
        params = WelchPeakParams.fast(n_fft, 1)
        signal = jax.device_put(rng.standard_normal((rows, params.frame_len), np.float32))
        run = _timing(jax.jit(functools.partial(mean_power, params=params)), signal)
        benchmarks[name] = lambda run=run: min(run() for _ in range(RUNS_IN_A_ROW))
    for run in benchmarks.values():
        run()
    return benchmarks


def _timing(program: Callable[..., jax.Array], array: jax.Array | np.ndarray) -> Callable[[], float]:
    return lambda: _timed(lambda: program(array).block_until_ready())


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    run()
    return float(max(time.perf_counter_ns() - start, 1))


def slowness(now_ns: Mapping[str, float], then_ns: Mapping[str, float]) -> float | None:
    """Return how many times longer the canaries take than another time, in the geometric mean; None without any."""
    ratios = [now_ns[name] / then_ns[name] for name in CANARIES if name in now_ns and name in then_ns]
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else None


def used_by_others(log: SampleLog) -> float | None:
    """Return the processors that other processes kept busy, in the mean over looks; None without two of these."""
    others = [look.others for look in log.canaries[1:]]
    return float(np.mean(others)) if others else None


def pace_of(log: SampleLog, earlier: MachineSection | None) -> Pace:
    """Return how fast the machine was while samples were taken; its quickest, earlier ones too, is the usual speed."""
    looks = np.log([[look.times_ns[name] for name in CANARIES] for look in log.canaries])
    changes = np.mean(looks - np.median(looks, 0), -1) if len(looks) else np.zeros(0)
    # Of looks a second apart; those of a minute differ as much at least.
    squares = np.sum(np.minimum(np.abs(changes), 2.0 * PACE_LOG_SD) ** 2) + PACE_LOOKS * PACE_LOG_SD**2
    now_ns = micro_times_ns(log) if log.canaries else {}
    then_ns = earlier.pace.usual_ns if earlier is not None and earlier.pace is not None else {}
    slower = slowness(now_ns, then_ns)
    is_slower = slower is not None and slower > 1.0
    return Pace(
        usual=None if slower is None else 1.0 / slower,
        usual_ns=dict(then_ns) if is_slower else {name: now_ns[name] for name in CANARIES if name in now_ns},
        log_sd=float(np.sqrt(squares / (len(changes) + PACE_LOOKS))),
        others=used_by_others(log),
    )


class CanaryWatch:
    """Looks at the pace at once, then every second or so, and keeps what it sees with the samples."""

    def __init__(self, log: SampleLog):
        self._log, self._next_s, self._own = log, 0.0, psutil.Process()
        self._others()

    def look(self) -> None:
        if time.perf_counter() >= self._next_s:
            others, benchmarks = self._others(), micro_benchmarks()
            self._log.keep(Canary(times_ns={name: benchmarks[name]() for name in CANARIES}, others=others))
            self._next_s = time.perf_counter() + EVERY_S

    def _others(self) -> float:
        """Return how many processors other processes kept busy, in the mean since the last time."""
        busy = psutil.cpu_percent() * (psutil.cpu_count() or 1) - self._own.cpu_percent()
        return max(busy / 100.0, 0.0)
