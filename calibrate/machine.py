"""The micro-benchmarks of a machine (launches, waits, transfers and small programs), its pace, and its IO gate."""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax import IoFusionGate
from rlxjax.calibration import GATE_UNITS, GateCoefficient, MachineSection, Pace
from rlxjax.clock import OtherWork, quiet_collector
from rlxjax.gate import Provenance
from rlxjax.welch import SELECTIONS, WelchPeakParams, mean_power, selected_peaks

from .samples import Canary, Micro, SampleLog

#: Float32 elements in an array for transfers and in the array for copies, which exceeds all caches; bytes per element.
TRANSFER_ELEMENTS, COPY_ELEMENTS, ELEMENT_BYTES = 2**22, 2**25, 4
MICRO_REPEATS = 15
#: The micro-benchmarks that the gate needs, and that a fit needs to start.
NEEDED_MICRO = ("launch", "roundtrip", "copy", "readback")
#: A transform runs this many times in a row. The fastest run counts, because the caches then hold its rows.
RUNS_IN_A_ROW = 10
#: Two selections of peaks, each as rows, bins and k: the first scans many bins, and the second ranks many peaks.
WIDE_SELECTION, DEEP_SELECTION = (64, 2049, 1), (256, 129, 64)
#: Two transforms from signal to powers, each as rows and n_fft: the first fits in a processor's first cache.
SHORT_TRANSFORM, LONG_TRANSFORM = (64, 1024), (8, 8192)
#: Canaries, the micro-benchmarks that show the pace; seconds between looks (timings of canaries); the quantile used.
CANARIES, EVERY_S, LOW_QUANTILE = ("top_k deep", "top_k wide", "maxima deep", "upload"), 1.0, 0.25
#: The prior for the log of a machine's speed: its standard deviation between minutes, and its weight in looks.
PACE_LOG_SD, PACE_LOOKS = 0.05, 10


def time_micro(log: SampleLog, repeats: int = MICRO_REPEATS) -> None:
    """Time the micro-benchmarks in rounds, and keep each time, until each benchmark has been timed `repeats` times."""
    with quiet_collector():
        for repeat in range(repeats):
            for name, run in micro_benchmarks().items():
                if len(log.micro.get(name, ())) <= repeat:
                    log.keep(Micro(name=name, time_ns=run()))


def micro_times_ns(log: SampleLog) -> dict[str, float]:
    """Return the least time of each micro-benchmark in ns. A canary has a low quantile of its times instead."""
    found = {name: min(times_ns) for name, times_ns in log.micro.items()}
    for name in CANARIES:
        if looks := [look.times_ns[name] for look in log.canaries if name in look.times_ns]:
            found[name] = float(np.quantile(looks, LOW_QUANTILE))
    return found


def gate_rates(micro_ns: Mapping[str, float]) -> dict[str, float]:
    """Return the measured coefficients of the IO gate by name: times in ns, and bandwidths in bytes per ns."""
    if missing := [name for name in NEEDED_MICRO if name not in micro_ns]:
        advice = "measure more with `rlxjax calibrate --resume`"
        raise ValueError(f"the samples hold no micro-benchmark of {', '.join(missing)}: {advice}")
    return {
        "dispatch_ns": micro_ns["launch"],
        "roundtrip_ns": micro_ns["roundtrip"],
        "memory_bw": 2 * ELEMENT_BYTES * COPY_ELEMENTS / micro_ns["copy"],
        "host_readback_bw": ELEMENT_BYTES * TRANSFER_ELEMENTS / micro_ns["readback"],
    }


def measured_gate(micro_ns: Mapping[str, float], platform: str) -> dict[str, GateCoefficient]:
    """Return the IO gate with this machine's rates. A sync point costs a round trip, and even a small gain counts."""
    measured = gate_rates(micro_ns)
    chosen = {"unified_memory": False, "host_thunk_penalty_ns": 0.0, "min_gain_ns": 0.0}
    gate = IoFusionGate.checked(**measured, **chosen)
    provenance = dict.fromkeys(measured, Provenance.MEASURED) | dict.fromkeys(chosen, Provenance.ARCH_DEFAULT)
    if platform == "cpu":  # the host reads a view, so the measured time is not a readback
        provenance["host_readback_bw"] = Provenance.UNCALIBRATED
    return {
        name: GateCoefficient(value=float(getattr(gate, name)), unit=unit, provenance=provenance[name])
        for name, unit in GATE_UNITS.items()
    }


@functools.cache
def micro_benchmarks() -> dict[str, Callable[[], float]]:
    """Return a dict of functions. Each times one repeat of a micro-benchmark in ns. All programs have run before."""
    rng, increment = np.random.default_rng(0), jax.jit(lambda x: x + 1.0)
    sizes = (8, TRANSFER_ELEMENTS, COPY_ELEMENTS)
    small, medium, large = (jax.block_until_ready(jnp.zeros((size,), jnp.float32)) for size in sizes)
    on_host = np.ones((TRANSFER_ELEMENTS,), np.float32)

    def launched() -> Any:  # right after another launch, since a copy empties the caches
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
        # JAX keeps the host copy of an array, so every repeat reads a new array.
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
    """Return the factor by which the canaries are slower, as a geometric mean; None without canaries."""
    ratios = [now_ns[name] / then_ns[name] for name in CANARIES if name in now_ns and name in then_ns]
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else None


def used_by_others(log: SampleLog) -> float | None:
    """Return the average number of processors that other processes used; None with fewer than two samples."""
    others = [look.others for look in log.canaries[1:]]
    return float(np.mean(others)) if others else None


def pace_of(log: SampleLog, earlier: MachineSection | None) -> Pace:
    """Return the machine's speed while the samples were taken, relative to its fastest earlier calibration."""
    whole = [look.times_ns for look in log.canaries if look.times_ns.keys() >= {*CANARIES}]
    looks = np.log([[times_ns[name] for name in CANARIES] for times_ns in whole])
    changes = np.mean(looks - np.median(looks, 0), -1) if len(looks) else np.zeros(0)
    # The looks are a second apart; looks a minute apart differ at least as much.
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
    """Times the canaries at once, and then about every second, and keeps the times among the samples."""

    def __init__(self, log: SampleLog):
        self._log, self._next_s, self._others = log, 0.0, OtherWork()

    def look(self) -> None:
        if time.perf_counter() >= self._next_s:
            others, benchmarks = self._others.processors(), micro_benchmarks()
            self._log.keep(Canary(times_ns={name: benchmarks[name]() for name in CANARIES}, others=others))
            self._next_s = time.perf_counter() + EVERY_S
