"""What a machine does whatever is timed: micro-benchmarks, its gate, its pace, and what others use of it."""

import subprocess
import sys
import time

import numpy as np
import pytest
from _campaigns import MICRO_NS, NAME, SUITE
from _content import content

from calibrate import machine
from calibrate.machine import (
    CANARIES,
    CanaryWatch,
    measured_gate,
    micro_times_ns,
    pace_of,
    slowness,
    time_micro,
)
from calibrate.samples import Canary, SampleLog, read_samples
from rlxjax.calibration import CalibrationFile


def log_of(factors, others=0.0):
    """Return samples whose canaries took these factors of a microsecond, look by look."""
    log, looks = SampleLog.new(SUITE, NAME), [dict.fromkeys(CANARIES, 1e3 * float(factor)) for factor in factors]
    log.canaries = [Canary(times_ns=times_ns, others=others) for times_ns in looks]
    return log


def test_the_ratio_is_the_geometric_mean_over_the_canaries_that_both_have():
    then = dict.fromkeys(CANARIES, 10.0)
    now = {name: 10.0 * factor for name, factor in zip(CANARIES, (1.0, 4.0, 1.0, 4.0), strict=True)}
    assert slowness(now, then) == pytest.approx(2.0)
    assert slowness({CANARIES[0]: 30.0, "other": 1.0}, then) == pytest.approx(3.0)
    assert slowness({}, then) is None


def test_later_calibrations_are_held_against_the_fastest_and_a_pace_that_changes_makes_times_less_sure():
    def pace(factors, earlier=None):
        section = CalibrationFile.model_validate(content()).machine.model_copy(update={"pace": earlier})
        return pace_of(log_of(factors), earlier and section)

    first = pace([1.0] * 20)
    slow = pace([1.5] * 20, first)
    third = pace([0.9] * 20, slow)
    assert [one.usual for one in (first, slow, third)] == [None, pytest.approx(1 / 1.5), pytest.approx(1 / 0.9)]
    assert slow.usual_ns == first.usual_ns
    assert third.usual_ns == pytest.approx(dict.fromkeys(CANARIES, 900.0))
    calm, restless = (pace(np.exp(sd * np.tile([-1.0, 1.0], 40))).log_sd for sd in (0.0, 0.09))
    assert 0.0 < calm < 0.05 < restless < 0.1
    log = log_of([1.0, 1.0, 9.0])
    del log.canaries[-1].times_ns[CANARIES[0]]  # an edited file, or a look of another version
    assert pace_of(log, None).log_sd == pace_of(log_of([1.0, 1.0]), None).log_sd


@pytest.fixture
def counted(monkeypatch):
    """Micro-benchmarks that take 100 ns, 101 ns and so on."""
    ticks = iter(range(100))
    monkeypatch.setattr(machine, "micro_benchmarks", lambda: dict.fromkeys(CANARIES, lambda: 100.0 + next(ticks)))


def test_a_busy_process_is_counted_as_what_others_use(counted, monkeypatch):
    assert pace_of(log_of([1.0] * 4, others=0.8), None).others == pytest.approx(0.8)
    monkeypatch.setattr(machine, "EVERY_S", 0.0)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        watch = CanaryWatch(log := SampleLog.new(SUITE, NAME))
        time.sleep(0.6)
        watch.look()
    finally:
        busy.kill()
        busy.wait()
    assert log.canaries[0].others > 0.3


def test_looks_and_repeats_are_kept_with_the_samples(tmp_path, counted):
    path, log = tmp_path / "x.toy.samples.jsonl", SampleLog.new(SUITE, NAME)
    with log.kept_in(path, append=False):
        watch = CanaryWatch(log)
        for _ in range(3):
            watch.look()
        assert len(log.canaries) == 1  # one a second
        for repeats in (2, 3, 3):  # what is there is filled up
            time_micro(log, repeats)
    again = read_samples(path)
    assert again == log
    assert {name: len(times) for name, times in again.micro.items()} == dict.fromkeys(CANARIES, 3)
    assert micro_times_ns(log) == {name: 100.0 + place for place, name in enumerate(CANARIES)}


def test_every_micro_benchmark_takes_a_time(monkeypatch):
    monkeypatch.setattr(machine, "TRANSFER_ELEMENTS", 2**12)
    monkeypatch.setattr(machine, "COPY_ELEMENTS", 2**12)
    times_ns = {name: run() for name, run in machine.micro_benchmarks.__wrapped__().items()}
    assert set(times_ns) == set(MICRO_NS)
    assert all(rate > 0 and np.isfinite(rate) for rate in times_ns.values())


def test_the_gate_follows_from_the_times():
    for platform, provenance in (("cpu", "uncalibrated"), ("gpu", "measured")):
        gate = measured_gate(MICRO_NS, platform)
        assert gate["dispatch_ns"].value == MICRO_NS["launch"]
        assert gate["roundtrip_ns"].value == MICRO_NS["roundtrip"]
        assert gate["memory_bw"].value == 2 * 4 * machine.COPY_ELEMENTS / MICRO_NS["copy"]
        assert gate["host_readback_bw"].value == 4 * machine.TRANSFER_ELEMENTS / MICRO_NS["readback"]
        assert gate["memory_bw"].provenance == "measured"
        # A CPU measures no transfer between host and device.
        assert gate["host_readback_bw"].provenance == provenance
    with pytest.raises(ValueError, match="no micro-benchmark of copy: measure more"):
        measured_gate({name: time_ns for name, time_ns in MICRO_NS.items() if name != "copy"}, "cpu")
