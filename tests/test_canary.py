"""The machine's pace: how the looks at it are kept, compared and told apart from what others use."""

import subprocess
import sys
import time

import numpy as np
import pytest
from _content import content

from calibrate import canary
from calibrate.canary import CANARIES, CanaryWatch, OthersUse, canary_times_ns, pace_of, slowness, speed_among_known
from calibrate.samples import SampleLog, SampleWriter, read_samples
from rlxjax.calibration import CalibrationFile, current_fingerprint


def log_of(factors, others=0.0):
    """Return samples whose canaries took these factors of a microsecond, look by look."""
    log = SampleLog(current_fingerprint())
    for factor in factors:
        times_ns = dict.fromkeys(CANARIES, 1e3 * float(factor))
        log.add(canary_line(times_ns, others))
    return log


def canary_line(times_ns, others):
    from calibrate.sample_lines import Canary

    return Canary(times_ns=times_ns, others=others)


def earlier_with(pace):
    return CalibrationFile.model_validate(content()).machine.model_copy(update={"pace": pace})


def test_the_ratio_is_the_geometric_mean_over_the_canaries_that_both_have():
    then = dict.fromkeys(CANARIES, 10.0)
    now = {name: 10.0 * factor for name, factor in zip(CANARIES, (1.0, 4.0, 1.0, 4.0), strict=True)}
    assert slowness(now, then) == pytest.approx(2.0)
    assert slowness({CANARIES[0]: 30.0, "other": 1.0}, then) == pytest.approx(3.0)
    assert slowness({}, then) is None


def test_a_first_calibration_knows_no_usual_speed_and_later_ones_are_held_against_the_fastest():
    first = pace_of(log_of([1.0] * 20), None)
    assert first.usual is None
    slow = pace_of(log_of([1.5] * 20), earlier_with(first))
    assert slow.usual == pytest.approx(1 / 1.5)
    assert slow.usual_ns == first.usual_ns
    third = pace_of(log_of([0.9] * 20), earlier_with(slow))
    assert third.usual == pytest.approx(1 / 0.9)
    assert third.usual_ns == pytest.approx(dict.fromkeys(CANARIES, 900.0))


def test_a_machine_is_held_against_those_of_the_population(monkeypatch):
    known = canary.population("cpu")
    now_ns = known.models["welch"].machines[0].canary_ns
    found = speed_among_known({name: 2.0 * time_ns for name, time_ns in now_ns.items()}, "cpu")
    of_all = [slowness(machine.canary_ns, now_ns) for machine in known.models["welch"].machines]
    assert (found.high, found.low) == pytest.approx((max(of_all) / 2.0, min(of_all) / 2.0))
    assert speed_among_known(now_ns, "abacus") is None


def test_a_pace_that_changes_makes_the_times_less_sure():
    calm, restless = (pace_of(log_of(np.exp(sd * np.tile([-1.0, 1.0], 40))), None).log_sd for sd in (0.0, 0.09))
    assert 0.0 < calm < 0.05 < restless < 0.1


def test_a_busy_process_is_counted_as_what_others_use():
    log = log_of([1.0] * 4, others=0.8)
    assert pace_of(log, None).others == pytest.approx(0.8)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.2)
        others = OthersUse()
        time.sleep(0.6)
        assert others.processors() > 0.3
    finally:
        busy.kill()
        busy.wait()


def test_looks_are_kept_with_the_samples_and_come_every_so_often(tmp_path, monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(canary, "micro_benchmarks", lambda: dict.fromkeys(CANARIES, lambda: 100.0 + next(ticks)))
    path, log = tmp_path / "x.samples.jsonl", SampleLog(current_fingerprint())
    with SampleWriter(path, log, append=False) as writer:
        watch = CanaryWatch(writer)
        for _ in range(3):
            watch.look()
    assert len(log.canaries) == 1
    assert read_samples(path).canaries == log.canaries
    assert canary_times_ns(log) == {name: 100.0 + place for place, name in enumerate(CANARIES)}
