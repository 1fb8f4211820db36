"""Timing the contenders of one cell: checked, warm, interleaved at random.

Every contender is built, its first result is checked against float64, and it runs until it is warm; then rounds, in
each of which every contender has one visit, in a new random order, once the threads of the one before have come to
rest.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from rlxjax import WelchPeakParams
from rlxjax.clock import mean_ns, quiet_collector, visit_ns

from .bench_check import disagreement
from .bench_file import Result
from .clock import Deadline
from .peers import Contender

MIN_ROUNDS, MAX_ROUNDS = 3, 200
#: A contender runs for so long before the rounds, once at least after the run that was checked.
WARM_S = 0.15
#: Between contenders: until the process uses less than this share of a core, and no longer than that.
IDLE_SHARE, IDLE_STEP_S, IDLE_TIMEOUT_S = 0.25, 2e-4, 0.3
#: Of what a contender says when it fails.
NOTE_CHARACTERS = 300

PROTOCOL = (
    "one process; a cell at a time; each result checked against float64 before it is timed; rounds in random order "
    "over the contenders; a visit of each is a loop of calls, up to 4 ms or 128 of them, and its time the mean without "
    "the first quarter; every mean in ns is kept, in the order of the rounds"
)


def time_contenders(
    contenders: Sequence[Contender],
    signal: np.ndarray,
    params: WelchPeakParams,
    rng: np.random.Generator,
    deadline: Deadline,
) -> dict[str, Result]:
    """Return the results by name; those without a time are absent, should the deadline be one that was interrupted.

    Args:
        contenders: in the order of the results.
        signal: `[batch, frame_len]` float32.
        params: the parameters.
        rng: draws the order of each round.
        deadline: of all of it; three rounds are measured even so, unless it is interrupted.
    """
    runners = [_Runner(contender) for contender in contenders]
    with quiet_collector():
        for runner in runners:
            if not deadline.interrupted:
                runner.attempt(lambda runner=runner: runner.prepare(signal, params))
        running = [runner for runner in runners if runner.refusal is None]
        for round_ in range(MAX_ROUNDS):
            for index in rng.permutation(len(running)):
                if not deadline.interrupted and running[index].refusal is None:
                    running[index].attempt(running[index].take_turn)
            if deadline.interrupted or (round_ + 1 >= MIN_ROUNDS and deadline.left_s() <= 0):
                break
    results = {runner.contender.name: runner.result() for runner in runners}
    return {name: result for name, result in results.items() if result is not None}


class _Runner:
    """A contender at work: its run once that is warm, its times, and why it is out if it is."""

    def __init__(self, contender: Contender):
        self.contender = contender
        self.times_ns: list[int] = []
        self.refusal: Result | None = None

    def attempt(self, step: Callable[[], None]) -> None:
        """Take a step; if it raises, this contender is out, and the others go on."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 - whatever a peer raises
            said = " ".join(f"{type(error).__name__}: {error}".split())
            self.refusal = Result(status="failed", note=said[:NOTE_CHARACTERS])

    def prepare(self, signal: np.ndarray, params: WelchPeakParams) -> None:
        """Build the run, check what it returns, and warm it up."""
        run = self.contender.build(signal, params)
        result = run()
        if self.contender.has_result and (wrong := disagreement(result, signal, params)):
            self.refusal = Result(status="wrong", note=wrong)
            return
        del result
        self.run, warm_at_s = run, time.perf_counter() + WARM_S
        run()
        while time.perf_counter() < warm_at_s:
            run()

    def take_turn(self) -> None:
        """Make one visit."""
        _wait_until_idle()
        self.times_ns.append(round(mean_ns(visit_ns(self.run))))

    def result(self) -> Result | None:
        """Return what is found; None without a time."""
        return self.refusal or (Result.of(self.times_ns) if self.times_ns else None)


def _wait_until_idle() -> None:
    """Let the threads that a contender leaves spinning come to rest."""
    give_up_s = time.perf_counter() + IDLE_TIMEOUT_S
    while (begun_s := time.perf_counter()) < give_up_s:
        used_s = time.process_time()
        time.sleep(IDLE_STEP_S)
        if time.process_time() - used_s < IDLE_SHARE * (time.perf_counter() - begun_s):
            return
