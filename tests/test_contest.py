"""Who wins of programs that are timed by turns: by a clock of the test's own, and by the real one."""

import itertools
import math
import re
import threading
import time

import jax
import numpy as np
import pytest

from rlxjax.choices._calls import Caller, FailedError
from rlxjax.choices._contest import LEAST_ROUNDS, contest
from rlxjax.clock import OtherWork

MS = 1_000_000
SHARE = OtherWork.share  # before a fixture makes the machine quiet
REGRET = 0.02


class Machine:
    """A machine of made-up programs, whose clock stands still unless one of them runs."""

    def __init__(self, monkeypatch, seed=0):
        self.now_ns, self.rng, self.left_ns = 0, np.random.default_rng(seed), math.inf
        monkeypatch.setattr(time, "perf_counter_ns", lambda: self.now_ns)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_ns / 1e9)

    def pause(self, every_ns, time_ns):
        """Let others take the processor now and then, for some time."""
        self.every_ns, self.pause_ns = every_ns, time_ns
        self.left_ns = self.rng.exponential(every_ns)

    def program(self, time_ns, sd=0.05, disturbed=0.1, calls=None, fails_at=None):
        """Return a program that takes about so long, now and then three times as long, and may raise in the end."""
        calls = [] if calls is None else calls

        def call():
            factor = np.exp(sd * self.rng.standard_normal()) * (3.0 if self.rng.random() < disturbed else 1.0)
            calls.append(time_ns * factor)
            self.now_ns += int(calls[-1])
            self.left_ns -= calls[-1]
            while self.left_ns < 0:
                self.now_ns += int(self.rng.exponential(self.pause_ns))
                self.left_ns += self.rng.exponential(self.every_ns)
            if len(calls) == fails_at:
                raise ArithmeticError("out of numbers")

        return call

    def contest(self, *times_ns, **options):
        calls = [self.program(one) if isinstance(one, (int, float)) else one for one in times_ns]
        return contest(calls, **{"regret": REGRET, "limit_s": 1.0, "seed": 0} | options)


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def test_what_is_clearly_faster_wins_surely_and_the_interval_holds_what_its_calls_took(machine):
    calls = []
    found = machine.contest(2 * MS, machine.program(MS, calls=calls), 3 * MS)
    assert (found.best, bool(found.tied), found.failed) == (1, False, {})
    assert 0.99 < found.probability <= 1.0
    low, high = found.low_ns[1], found.high_ns[1]
    assert low <= np.mean(calls) <= high
    assert np.all(found.low_ns <= found.time_ns)
    assert np.all(found.time_ns <= found.high_ns)
    np.testing.assert_allclose(found.time_ns, [2 * MS, MS, 3 * MS], rtol=0.3)


@pytest.mark.parametrize("ratio", [1.0, 1.1, 1 / 1.1])
def test_a_winner_loses_no_more_than_the_regret_and_the_favourite_wins_most_ties(monkeypatch, ratio):
    trials = 40
    found = []
    for seed in range(trials):
        machine = Machine(monkeypatch, seed)
        calls = [machine.program(time_ns, disturbed=0.02) for time_ns in (MS, ratio * MS)]
        found.append(machine.contest(*calls, limit_s=0.3))
    if ratio == 1.0:
        assert np.mean([bool(one.tied) for one in found]) > 0.8
        assert np.mean([one.best == 0 for one in found]) > 0.6
    else:
        winners = [one.best for one in found if not bool(one.tied)]
        assert len(winners) > 0.5 * trials
        assert np.mean(np.array(winners) == (ratio < 1.0)) > 0.95
        assert np.mean([one.best == (ratio < 1.0) for one in found]) > 0.6
    assert all(0.0 <= one.probability <= 1.0 for one in found)


def test_the_probability_is_the_share_of_winners_that_lose_no_more_than_the_regret(monkeypatch):
    truths, said = [], []
    for seed in range(50):
        machine = Machine(monkeypatch, seed)
        times_ns = MS * np.exp(0.04 * np.random.default_rng(seed).standard_normal(2))
        found = machine.contest(*times_ns.tolist(), limit_s=0.1)
        truths.append(times_ns[found.best] <= times_ns.min() * (1.0 + REGRET))
        said.append(found.probability)
    assert np.mean(truths) > np.mean(said) - 0.1
    assert 0.5 < np.mean(said) <= 1.0


def test_the_favourite_stays_where_it_is_as_good_and_no_longer_than_that(machine):
    assert machine.contest(MS, 2 * MS, favourite=1).best == 0
    exact = [machine.program(time_ns, sd=0.0, disturbed=0.0) for time_ns in (MS, 1.01 * MS)]
    found = machine.contest(*exact, favourite=1)
    assert (found.best, bool(found.tied)) == (1, True)
    assert machine.contest(*exact, favourite=1, regret=0.001).best == 0


def test_where_others_take_the_processor_half_of_the_time_the_faster_one_still_wins(monkeypatch):
    found = []
    for seed in range(15):
        machine = Machine(monkeypatch, seed)
        machine.pause(4 * MS, 4 * MS)
        calls = [machine.program(time_ns, disturbed=0.0) for time_ns in (0.22 * MS, 0.2 * MS)]
        found.append(machine.contest(*calls, limit_s=0.3))
    assert np.mean([one.best for one in found]) > 0.7
    assert all(one.best == 1 or one.tied for one in found)


def paced(machine, paces_ns, factor=lambda: 1.0):
    """Return a program whose calls take the times of a list in turn, multiplied by what `factor` returns."""
    times_ns = itertools.cycle(paces_ns)

    def call():
        machine.now_ns += int(next(times_ns) * factor())

    return call


#: Programs of two paces, by what their calls take: one pace a visit, one a call, and a call that is far longer.
PACES = {
    "by visits": [0.04 * MS] * 100 + [0.06 * MS] * 67,
    "by calls": [0.04 * MS, 0.06 * MS],
    "now and then": [*[0.04 * MS] * 9, 0.8 * MS],
}


@pytest.mark.parametrize("what", PACES)
@pytest.mark.parametrize("other_ns", [0.038 * MS, 0.044 * MS, 0.049 * MS, 0.055 * MS, 0.066 * MS])
def test_the_winner_has_the_least_time_or_it_is_a_tie(machine, what, other_ns):
    for favourite in (0, 1):
        calls = [paced(machine, PACES[what]), machine.program(other_ns, sd=0.01)]
        found = machine.contest(*calls, favourite=favourite, limit_s=0.4)
        assert bool(found.tied) or found.best == int(np.argmin(found.time_ns))
        if what == "now and then":
            assert found.best == 1


#: Programs by what their calls take in turn, all with the same quick calls; the mean of each is 1.4 to 2.1 ms.
TAILS = {
    "second": [MS, 3 * MS],
    "tenth": [*[MS] * 9, 12 * MS],
    "fiftieth": [*[MS] * 49, 51 * MS],
    "a visit in twenty": [*[MS] * 80, *[9 * MS] * 4],
}


@pytest.mark.parametrize("what", TAILS)
def test_no_answer_is_wrong_and_sure_however_rare_a_program_s_slow_calls_are(monkeypatch, what):
    for seed in range(20):
        machine, noise = Machine(monkeypatch, seed), ("quiet", "spells", "spikes")[seed % 3]

        def factor(machine=machine):
            slow = {"quiet": 0.0, "spells": machine.now_ns // (40 * MS) % 3 == 0, "spikes": machine.rng.random() < 0.02}
            return np.exp(0.02 * machine.rng.standard_normal()) * (5.0 if slow[noise] else 1.0)

        mean_ns = np.mean(TAILS[what])
        steady_ns = mean_ns * (1.0 if seed % 2 else 0.8)  # the same mean, or a smaller one with slower quick calls
        tailed = np.roll(TAILS[what], int(machine.rng.integers(200)))
        found = machine.contest(*(paced(machine, own, factor) for own in (tailed, [steady_ns])), limit_s=0.4)
        assert found.tied or (seed % 2 == 0 and found.best == 1), (seed, found)
        if noise == "quiet":
            np.testing.assert_allclose(found.time_ns[1], steady_ns, rtol=0.05)


def test_spells_that_slow_all_programs_hide_no_difference(monkeypatch):
    for seed in range(5):
        machine = Machine(monkeypatch, seed)

        def factor(machine=machine):
            is_slow = machine.now_ns // (300 * MS) % 3 == 0
            return np.exp(0.01 * machine.rng.standard_normal()) * (8.0 if is_slow else 1.0)

        found = machine.contest(*(paced(machine, [own], factor) for own in (1.1 * MS, MS)), limit_s=2.0)
        assert found.best == 1
        assert found.probability > 0.9
        np.testing.assert_allclose(found.time_ns, [1.1 * MS, MS], rtol=0.1)


def test_what_is_clearly_slower_is_visited_no_more(machine):
    slow, near = [], []
    found = machine.contest(MS, machine.program(3 * MS, calls=slow), machine.program(MS, calls=near), regret=1e-4)
    assert found.best in (0, 2)
    # Once half of the limit has passed.
    assert len(near) > 3 * len(slow)
    assert found.rounds > len(slow) / 2
    assert found.time_ns[1] > 2 * found.time_ns[0]


def test_the_limit_ends_it_after_six_rounds_unless_calls_are_very_long(machine):
    begun_ns = machine.now_ns
    found = machine.contest(MS, MS, regret=0.0, limit_s=0.1)
    assert 0.1 <= (machine.now_ns - begun_ns) / 1e9 < 0.1 + 5 * 2 * 3 * MS / 1e9
    assert found.rounds > 2
    assert [machine.contest(own, 2 * own, limit_s=1e-6).rounds for own in (MS, 300 * MS)] == [LEAST_ROUNDS, 2]
    found = machine.contest(MS)
    assert (found.best, bool(found.tied), found.probability, found.rounds) == (0, False, 1.0, 0)


def test_what_each_costs_beside_its_time_counts_and_is_no_part_of_it(machine):
    found = machine.contest(MS, 2 * MS, extra_ns=[5 * MS, 0.0])
    assert (found.best, bool(found.tied)) == (1, False)
    np.testing.assert_allclose(found.time_ns, [MS, 2 * MS], rtol=0.3)


def test_one_that_raises_in_the_middle_drops_out_and_is_named(machine):
    for fails_at in (1, 3, 9):
        broken = machine.program(MS / 10, fails_at=fails_at)
        found = machine.contest(3 * MS, broken, MS, regret=1e-4)
        assert (found.best, found.failed) == (2, {1: "raised ArithmeticError: out of numbers"})
        assert np.isnan([found.time_ns[1], found.low_ns[1], found.high_ns[1]]).all()
        assert np.isfinite(found.time_ns[[0, 2]]).all()
        assert 0.9 < found.probability <= 1.0
    alone = machine.contest(MS, machine.program(MS, fails_at=1))
    assert (alone.best, bool(alone.tied), alone.probability) == (0, False, 1.0)
    none = machine.contest(*(machine.program(MS, fails_at=place) for place in (1, 2)))
    assert set(none.failed) == {0, 1}
    assert none.probability == 0.0
    assert np.isnan(none.time_ns).all()


def test_by_the_real_clock_a_loop_of_twice_the_time_loses():
    def busy(time_ns):
        def call():
            end = time.perf_counter_ns() + time_ns
            while time.perf_counter_ns() < end:
                pass

        return call

    found = contest([busy(200_000), busy(50_000)], regret=REGRET, limit_s=0.2)
    assert found.best == 1
    assert 50_000 <= found.time_ns[1] < found.time_ns[0]


def test_the_share_of_other_work_is_the_time_that_the_canary_loses(machine, monkeypatch):
    for times_ns, lost in (([1000], 0.0), ([1000, 3000], 0.5), ([*[1000] * 9, 31_000], 0.75)):
        monkeypatch.setattr(np, "sort", paced(machine, times_ns * 1000))
        monkeypatch.setattr(np, "sort", lambda _, call=np.sort: call())
        assert SHARE(OtherWork()) == pytest.approx(lost, abs=0.05)


def test_a_call_gives_its_result_or_says_why_there_is_none_and_the_next_one_is_made():
    held = threading.Event()

    def fails(error):
        raise error

    with Caller() as caller:
        for error, said in (
            (KeyError("x"), "raised KeyError: 'x'"),
            (ValueError("one\ntwo"), "raised ValueError: one"),
            (SystemExit(3), "raised SystemExit: 3"),
        ):
            with pytest.raises(FailedError, match=f"^{re.escape(said)}$"):
                caller(lambda error=error: fails(error), 10.0)
        try:
            with pytest.raises(FailedError, match=r"^did not end within 0\.01 s$"):
                caller(held.wait, 0.01)
            assert caller(lambda: 3, 10.0) == 3
        finally:
            held.set()


def test_a_call_is_made_under_the_caller_s_settings():
    contexts = {
        "jax_default_matmul_precision": jax.default_matmul_precision("float32"),
        "jax_disable_jit": jax.disable_jit(),
        "jax_debug_nans": jax.debug_nans(True),
        "jax_default_prng_impl": jax.default_prng_impl("rbg"),
    }
    for name, context in contexts.items():
        with context, Caller() as caller:
            assert caller(lambda name=name: getattr(jax.config, name), 10.0) == getattr(jax.config, name), name
    with jax.set_mesh(jax.make_mesh((1,), ("rows",))), Caller() as caller:
        assert caller(jax.sharding.get_mesh, 10.0).axis_names == ("rows",)
