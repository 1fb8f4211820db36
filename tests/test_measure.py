"""What a time is, cells made ready by a deadline, and rounds of them in random order that stop and go on cleanly."""

import collections
import itertools
import signal
import time
import types

import numpy as np
import pytest
from _campaigns import NAME, ToySuite, toy_cell

from calibrate import measure
from calibrate.measure import made_ready, measure_rounds
from calibrate.samples import SampleLog
from calibrate.terminal import Deadline
from rlxjax import clock

CELLS = [toy_cell(rows, 64) for rows in (1, 2, 3, 4, 5)]
NAMES = [cell.name for cell in CELLS]
SUITE = ToySuite()


class StepsLeft(Deadline):
    """A deadline that comes after a number of looks at it."""

    def __init__(self, looks):
        super().__init__(0.0)
        self._looks = iter(range(looks))

    def left_s(self):
        return 0.0 if self.interrupted else float(next(self._looks, None) is not None)


@pytest.fixture
def campaign(monkeypatch):
    """A campaign whose visits are recorded instead of timed."""
    order, ticks, log = [], itertools.count(1), SampleLog.new(SUITE, NAME)
    monkeypatch.setattr(measure, "visit_ns", lambda program: order.append(program) or [next(ticks)])
    monkeypatch.setattr(measure, "CanaryWatch", lambda log: types.SimpleNamespace(look=lambda: None))
    log.keep_cells(CELLS)
    return log, order


def run_rounds(log, deadline, seed=0):
    programs = {name: name for name in NAMES}
    measure_rounds(log, programs, deadline, np.random.default_rng(seed), lambda: None)


def test_every_round_visits_every_cell_once_in_a_new_order(campaign):
    log, order = campaign
    run_rounds(log, StepsLeft(1 + 5 * (1 + len(CELLS))))
    rounds = [tuple(order[i : i + len(CELLS)]) for i in range(0, len(order), len(CELLS))]
    assert all(sorted(visited) == NAMES for visited in rounds)
    assert len(set(rounds)) > 1
    np.testing.assert_array_equal(log.timed()[1].round, np.repeat(np.arange(6), len(CELLS)))


def test_after_one_round_measuring_stops_within_the_next_which_is_finished_first_when_it_goes_on(campaign):
    log, order = campaign
    run_rounds(log, StepsLeft(0))
    assert len(log.complete_rounds()) == 1
    run_rounds(log, StepsLeft(1 + 3))
    assert len(order) == len(CELLS) + 3
    assert len(log.complete_rounds()) == 1
    run_rounds(log, StepsLeft(1 + 2), seed=1)
    assert collections.Counter(order[: 2 * len(CELLS)]) == dict.fromkeys(NAMES, 2)


def test_ctrl_c_ends_the_measuring_and_keeps_what_was_measured(campaign, monkeypatch):
    log, _ = campaign
    ticks = itertools.count()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(
        measure, "visit_ns", lambda _: [1 + (next(ticks) == 7 and signal.raise_signal(signal.SIGINT) or 0)]
    )
    deadline = StepsLeft(1000)
    try:
        run_rounds(log, deadline)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert (deadline.interrupted, deadline.left_s(), sum(map(len, log.rounds))) == (True, 0.0, 8)


def test_cells_are_made_ready_in_order_until_the_deadline_and_until_there_are_enough():
    for looks, at_least, expected in ((3, 0, 3), (0, 2, 2), (100, 0, 5)):
        ready = made_ready(SUITE, CELLS, StepsLeft(looks), at_least=at_least)
        assert list(ready.programs) == NAMES[:expected]
        assert set(ready.times_ns) == set(ready.programs)
    together = made_ready(SUITE, CELLS, Deadline(time.perf_counter() + 60.0), n_threads=3)
    assert list(together.programs) == NAMES
    assert not together.refused


def test_numbers_that_are_no_numbers_and_trees_of_results_are_compared():
    rng = np.random.default_rng(0)
    results = {
        NAMES[0]: lambda: {"a": np.array([np.nan, np.inf]), "b": (np.array(True), np.zeros(0))},
        NAMES[1]: lambda: np.full(10**6, 3.0) * (1.0 + 1e-7 * rng.random()),
        NAMES[2]: lambda: np.zeros(rng.integers(10**6)),
    }
    suite = type("Results", (ToySuite,), {"program": lambda _, cell: results[cell.name]})()
    ready = made_ready(suite, CELLS[:3], Deadline(time.perf_counter() + 60.0))
    assert list(ready.programs) == NAMES[:2]
    assert ready.refused == {NAMES[2]: "its results differ between two runs"}


def test_a_visit_is_a_loop_of_calls_that_ends_by_time_or_number_and_takes_the_mean_of_the_later_ones(monkeypatch):
    begun_ns = time.perf_counter_ns()
    times_ns = clock.visit_ns(lambda: time.sleep(1e-3))
    assert sum(times_ns) <= time.perf_counter_ns() - begun_ns
    assert min(times_ns) >= 1e6
    loops = {10: clock.MOST_CALLS, clock.VISIT_NS: clock.LEAST_CALLS, clock.VISIT_NS // 3 + 1: 3}
    for taken_ns, calls in loops.items():
        monkeypatch.setattr(clock, "call_ns", lambda _, taken_ns=taken_ns: taken_ns)
        assert clock.visit_ns(lambda: None) == [taken_ns] * calls
    for times_ns, mean_ns in (([7], 7), ([900, 5], 5), ([900] * 25 + [2] * 75, 2)):
        assert clock.mean_ns(times_ns) == mean_ns
