"""What a machine does whatever is timed: launches, waits, transfers and small programs, its pace, and its gate."""

import functools
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from rlxjax import IoFusionGate
from rlxjax.calibration import GATE_UNITS, GateCoefficient, MachineSection, Pace
from rlxjax.clock import quiet_collector
from rlxjax.gate import Provenance
from rlxjax.welch import SELECTIONS, WelchPeakParams, mean_power, selected_peaks

from .samples import Canary, Micro, SampleLog, SampleWriter

#: Float32 elements of the arrays that are uploaded and read back, and, far beyond any cache, copied.
TRANSFER_ELEMENTS, COPY_ELEMENTS, ELEMENT_BYTES = 2**22, 2**25, 4
MICRO_REPEATS = 15
#: Without these there is no gate, and nothing to start a fit from.
NEEDED_MICRO = ("launch", "roundtrip", "copy", "readback")
#: Runs of a micro-benchmark whose difference to another tells of the caches.
RUNS_IN_A_ROW = 10
#: Rows, bins and k of two selections of peaks: one scans many bins, the other ranks many peaks.
WIDE_SELECTION, DEEP_SELECTION = (64, 2049, 1), (256, 129, 64)
#: Rows and n_fft of two transforms, from signal to powers: within a processor's first cache, and beyond.
SHORT_TRANSFORM, LONG_TRANSFORM = (64, 1024), (8, 8192)
#: The micro-benchmarks that tell the pace.
CANARIES = ("top_k deep", "top_k wide", "maxima deep", "upload")
#: Seconds between two looks.
EVERY_S = 1.0
#: Of the looks at a canary, the share that its time is not below.
LOW_QUANTILE = 0.25
#: Standard deviation of the logarithm of a machine's speed from one minute to the next, where nothing is known of this
#: one; it counts as so many looks.
PACE_LOG_SD, PACE_LOOKS = 0.05, 10


def time_micro(writer: SampleWriter, repeats: int = MICRO_REPEATS) -> None:
    """Time every micro-benchmark, interleaved, and keep every repeat.

    What an earlier run left is filled up to the same number of repeats.
    """
    done = writer.log.micro
    with quiet_collector():
        for repeat in range(repeats):
            for name, run in micro_benchmarks().items():
                if len(done.get(name, ())) <= repeat:
                    writer.keep(Micro(name=name, time_ns=run()))


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
        raise ValueError(
            f"the samples hold no micro-benchmark of {', '.join(missing)}: measure more with "
            "`rlxjax calibrate --resume`"
        )
    return {
        "dispatch_ns": micro_ns["launch"],
        "roundtrip_ns": micro_ns["roundtrip"],
        "memory_bw": 2 * ELEMENT_BYTES * COPY_ELEMENTS / micro_ns["copy"],
        "host_readback_bw": ELEMENT_BYTES * TRANSFER_ELEMENTS / micro_ns["readback"],
    }


def measured_gate(micro_ns: Mapping[str, float], platform: str) -> dict[str, GateCoefficient]:
    """Return the IO gate with this machine's rates.

    A readback is charged at its measured bandwidth, whatever the memory; an added sync point costs its
    round trip and no penalty on top; any gain counts.
    """
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


def slowness(now_ns: Mapping[str, float], then_ns: Mapping[str, float]) -> float | None:
    """Return how many times longer the canaries take than another time, in the geometric mean; None without any."""
    ratios = [now_ns[name] / then_ns[name] for name in CANARIES if name in now_ns and name in then_ns]
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else None


def used_by_others(log: SampleLog) -> float | None:
    """Return the processors that other processes kept busy, in the mean over looks; None without two of these."""
    others = [look.others for look in log.canaries[1:]]
    return float(np.mean(others)) if others else None


def pace_of(log: SampleLog, earlier: MachineSection | None) -> Pace:
    """Return how fast the machine was while samples were taken; its quickest, earlier ones too, is the usual speed.

    Samples without looks say nothing.
    """
    looks = np.log([[look.times_ns[name] for name in CANARIES] for look in log.canaries])
    changes = np.mean(looks - np.median(looks, 0), -1) if len(looks) else np.zeros(0)
    # Of looks a second apart; those of a minute differ as much at least.
    squares = np.sum(np.minimum(np.abs(changes), 2.0 * PACE_LOG_SD) ** 2) + PACE_LOOKS * PACE_LOG_SD**2
    now_ns = micro_times_ns(log) if log.canaries else {}
    usual_ns = {name: now_ns[name] for name in CANARIES if name in now_ns}
    ratio = None
    if earlier is not None and earlier.pace is not None:
        then_ns = earlier.pace.usual_ns
        if (slower := slowness(now_ns, then_ns)) is not None:
            ratio = 1.0 / slower
            usual_ns = dict(then_ns) if slower > 1.0 else usual_ns
    return Pace(
        usual=ratio,
        usual_ns=usual_ns,
        log_sd=float(np.sqrt(squares / (len(changes) + PACE_LOOKS))),
        others=used_by_others(log),
    )


class CanaryWatch:
    """Looks at the pace every second or so, and keeps what it sees with the samples.

    The first look is at once.
    """

    def __init__(self, writer: SampleWriter):
        self._writer, self._next_s, self._own = writer, 0.0, psutil.Process()
        self._others()

    def look(self) -> None:
        """Time the canaries, if it is time to."""
        if time.perf_counter() < self._next_s:
            return
        others = self._others()
        benchmarks = micro_benchmarks()
        self._writer.keep(Canary(times_ns={name: benchmarks[name]() for name in CANARIES}, others=others))
        self._next_s = time.perf_counter() + EVERY_S

    def _others(self) -> float:
        """Return how many processors other processes kept busy, in the mean since the last time."""
        busy = psutil.cpu_percent() * (psutil.cpu_count() or 1) - self._own.cpu_percent()
        return max(busy / 100.0, 0.0)
