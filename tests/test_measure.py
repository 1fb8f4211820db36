import collections
import itertools
import signal
import time

import numpy as np
import pytest

from calibrate import measure, micro
from calibrate.clock import Deadline
from calibrate.measure import measure_rounds, warm_up
from calibrate.micro import micro_rates, time_micro
from calibrate.samples import SampleLog, SampleWriter, read_samples
from calibrate.workloads import Cell
from rlxjax import clock
from rlxjax.calibration import current_fingerprint

CELLS = [Cell("fast", batch, 64, 4) for batch in (1, 2, 3, 4, 5)]


class StepsLeft(Deadline):
    """A deadline that comes after a number of looks at it."""

    def __init__(self, looks):
        super().__init__(0.0)
        self._looks = iter(range(looks))

    def left_s(self):
        return 0.0 if self.interrupted else float(next(self._looks, None) is not None)


class NoCanary:
    """A watch that looks at nothing."""

    def __init__(self, writer):
        pass

    def look(self):
        pass


@pytest.fixture
def campaign(tmp_path, monkeypatch):
    """A campaign whose runs are recorded instead of timed."""
    order, ticks = [], itertools.count(1)

    monkeypatch.setattr(measure, "call_of", lambda cell, signals: cell)
    monkeypatch.setattr(measure, "call_ns", lambda cell: order.append(cell) or next(ticks))
    monkeypatch.setattr(measure, "visit_ns", lambda cell: order.append(cell) or [next(ticks)])
    monkeypatch.setattr(measure, "CanaryWatch", NoCanary)
    log = SampleLog(current_fingerprint())
    with SampleWriter(tmp_path / "x.samples.jsonl", log, append=False) as writer:
        writer.cells(CELLS)
        yield log, writer, order


def run_rounds(log, writer, deadline, seed=0):
    measure_rounds(log, writer, None, deadline, np.random.default_rng(seed), lambda: None)


def test_every_round_measures_every_cell_once_in_a_new_order(campaign):
    log, writer, order = campaign
    run_rounds(log, writer, StepsLeft(1 + 5 * (1 + len(CELLS))))
    rounds = [tuple(order[i : i + len(CELLS)]) for i in range(0, len(order), len(CELLS))]
    assert all(sorted(measured) == sorted(CELLS) for measured in rounds)
    assert len(set(rounds)) > 1
    np.testing.assert_array_equal(log.visits().round, np.repeat(np.arange(6), len(CELLS)))


def test_measuring_stops_at_the_deadline_within_a_round(campaign):
    log, writer, order = campaign
    run_rounds(log, writer, StepsLeft(2 + 3))
    assert len(order) == len(CELLS) + 3
    assert len(log.complete_rounds()) == 1


def test_an_unfinished_round_is_finished_first_and_nothing_is_measured_twice(campaign):
    log, writer, order = campaign
    run_rounds(log, writer, StepsLeft(2 + 3))
    run_rounds(log, writer, StepsLeft(1 + 2), seed=1)
    counts = collections.Counter(order[: 2 * len(CELLS)])
    assert counts == dict.fromkeys(CELLS, 2)


def test_ctrl_c_ends_the_measuring_and_keeps_what_was_measured(campaign, monkeypatch):
    log, writer, _ = campaign
    ticks = itertools.count()

    def visit(cell):
        if next(ticks) == 7:
            signal.raise_signal(signal.SIGINT)
        return [1]

    monkeypatch.setattr(measure, "visit_ns", visit)
    deadline = StepsLeft(1000)
    run_rounds(log, writer, deadline)
    assert deadline.interrupted
    assert deadline.left_s() == 0.0
    assert sum(map(len, log.rounds)) == 8


def test_warming_up_stops_at_the_deadline_and_reports_only_what_ran(campaign):
    _, _, order = campaign
    warm = warm_up(CELLS, None, StepsLeft(3), lambda: None)
    assert list(warm) == CELLS[:3]
    assert collections.Counter(order) == dict.fromkeys(CELLS[:3], 2)


def test_one_round_is_measured_even_after_the_deadline(campaign):
    log, writer, _ = campaign
    run_rounds(log, writer, StepsLeft(0))
    assert len(log.complete_rounds()) == 1


def test_warming_up_goes_on_until_enough_cells_ran(campaign):
    assert list(warm_up(CELLS, None, StepsLeft(0), lambda: None, at_least=2)) == CELLS[:2]


def test_micro_benchmarks_are_kept_repeat_by_repeat(tmp_path, monkeypatch):
    monkeypatch.setattr(micro, "TRANSFER_ELEMENTS", 2**12)
    monkeypatch.setattr(micro, "COPY_ELEMENTS", 2**12)
    monkeypatch.setattr(micro, "micro_benchmarks", micro.micro_benchmarks.__wrapped__)
    path = tmp_path / "m.samples.jsonl"
    log = SampleLog(current_fingerprint())
    with SampleWriter(path, log, append=False) as writer:
        writer.cells(CELLS)
        time_micro(log, writer, repeats=3)
    assert {name: len(times) for name, times in read_samples(path).micro.items()} == dict.fromkeys(
        ("launch", "roundtrip", "copy", "upload", "readback")
        + ("maxima wide", "top_k wide", "maxima deep", "top_k deep")
        + ("short powers", "long powers"),
        3,
    )
    *rates, selection_ns, transform_ns = micro_rates(log)
    assert set(selection_ns) == {"maxima", "top_k"}
    assert len(transform_ns) == 2
    rates += [*transform_ns, *np.ravel(list(selection_ns.values()))]
    assert all(rate > 0 and np.isfinite(rate) for rate in rates)


def test_rates_follow_from_the_fastest_repeats():
    times = {
        "launch": [2e3, 1e3],
        "roundtrip": [5e3, 9e3],
        "copy": [1e6],
        "upload": [2e6],
        "readback": [4e6],
    }
    rates = micro_rates(SampleLog(current_fingerprint(), micro=times))
    assert rates.dispatch_ns == 1e3
    assert rates.roundtrip_ns == 5e3
    assert rates.memory_bytes_per_ns == 2 * 4 * micro.COPY_ELEMENTS / 1e6
    assert rates.upload_bytes_per_ns == 2 * rates.readback_bytes_per_ns == 4 * micro.TRANSFER_ELEMENTS / 2e6


@pytest.mark.parametrize(
    ("taken_ns", "calls"),
    [(10, clock.MOST_CALLS), (clock.VISIT_NS, clock.LEAST_CALLS), (clock.VISIT_NS // 3 + 1, 3)],
)
def test_a_visit_is_a_loop_of_calls_that_ends_by_time_or_number(taken_ns, calls, monkeypatch):
    monkeypatch.setattr(clock, "call_ns", lambda call: taken_ns)
    assert clock.visit_ns(lambda: None) == [taken_ns] * calls


def test_a_time_is_the_mean_of_the_calls_after_the_first_ones():
    assert clock.mean_ns([7]) == 7
    assert clock.mean_ns([900, 5]) == 5
    assert clock.mean_ns([900] * 25 + [2] * 75) == 2


def test_the_calls_of_a_loop_take_what_the_loop_takes():
    begun_ns = time.perf_counter_ns()
    times_ns = clock.visit_ns(lambda: time.sleep(1e-3))
    assert sum(times_ns) <= time.perf_counter_ns() - begun_ns
    assert min(times_ns) >= 1e6
