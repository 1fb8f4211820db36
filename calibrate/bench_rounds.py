"""Timing the contenders of one cell: checked, warm, interleaved at random.

Every contender is built, its first result is checked against float64, and it runs until it is warm; then
rounds, in each of which every contender is timed once, in a new random order, once the threads of the one
before have come to rest. A short run is repeated untimed right before, so that all find their threads awake
and the samples in the caches.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from rlxjax import WelchPeakParams

from .bench_check import disagreement
from .bench_file import Result
from .measure import quiet_collector
from .peers import Contender, Run

MIN_ROUNDS, MAX_ROUNDS = 3, 200
#: A contender runs for so long before the rounds, once at least after the run that was checked.
WARM_S = 0.15
#: Runs shorter than this are repeated untimed before each timing, for so long, once at least.
SHORT_NS, REPEATED_NS = 50_000_000, 1_000_000
#: Between contenders: until the process uses less than this share of a core, and no longer than that.
IDLE_SHARE, IDLE_STEP_S, IDLE_TIMEOUT_S = 0.25, 2e-4, 0.3
#: Of what a contender says when it fails.
NOTE_CHARACTERS = 300

PROTOCOL = (
    "one process; a cell at a time; each result checked against float64 before it is timed; rounds in random "
    "order over the contenders, each timed once a round; a run below 50 ms is repeated untimed right "
    "before for 1 ms, once at least; every time in ns is kept, in the order of the rounds"
)

_Made = TypeVar("_Made")


def time_contenders(
    contenders: Sequence[Contender],
    signal: np.ndarray,
    params: WelchPeakParams,
    rng: np.random.Generator,
    budget_s: float,
) -> tuple[dict[str, Result], bool]:
    """Return the results by name, and whether Ctrl-C ended it: then those without a time are absent.

    Args:
        contenders: in the order of the results.
        signal: `[batch, frame_len]` float32.
        params: the parameters.
        rng: draws the order of each round.
        budget_s: seconds for all of it; three rounds are measured even so.
    """
    deadline_s = time.perf_counter() + budget_s
    refused: dict[str, Result] = {}
    times: dict[str, list[int]] = {}
    last_ns: dict[str, int] = {}
    interrupted = False
    try:
        with quiet_collector():
            runs = {
                contender.name: run
                for contender in contenders
                if (run := _ready(contender, signal, params, refused, last_ns)) is not None
            }
            _rounds(runs, times, refused, last_ns, rng, deadline_s)
    except KeyboardInterrupt:
        interrupted = True
    measured = {name: Result.of(taken) for name, taken in times.items() if name not in refused}
    results = measured | refused
    return {c.name: results[c.name] for c in contenders if c.name in results}, interrupted


def _ready(
    contender: Contender,
    signal: np.ndarray,
    params: WelchPeakParams,
    refused: dict[str, Result],
    last_ns: dict[str, int],
) -> Run | None:
    """Return the run, warm, or None if it is refused: it failed, or its result is wrong."""

    def checked() -> tuple[Run, str | None]:
        run = contender.build(signal, params)
        result = run()
        wrong = disagreement(result, signal, params) if contender.has_result else None
        del result
        warm_at_s = time.perf_counter() + WARM_S
        while wrong is None:
            last_ns[contender.name] = _timed(run)
            if time.perf_counter() >= warm_at_s:
                break
        return run, wrong

    made = _guarded(contender.name, refused, checked)
    if made is None:
        return None
    run, wrong = made
    if wrong is not None:
        refused[contender.name] = Result(status="wrong", note=wrong)
        return None
    return run


def _rounds(
    runs: dict[str, Run],
    times: dict[str, list[int]],
    refused: dict[str, Result],
    last_ns: dict[str, int],
    rng: np.random.Generator,
    deadline_s: float,
) -> None:
    for round_ in range(MAX_ROUNDS):
        for index in rng.permutation(len(runs)):
            name = list(runs)[index]
            if name in refused:
                continue
            _wait_until_idle()
            repeat = last_ns[name] < SHORT_NS
            taken = _guarded(name, refused, lambda name=name, repeat=repeat: _timed(runs[name], repeat))
            if taken is not None:
                times.setdefault(name, []).append(taken)
                last_ns[name] = taken
        if round_ + 1 >= MIN_ROUNDS and time.perf_counter() >= deadline_s:
            return


def _timed(run: Run, again: bool = False) -> int:
    """Return the time in ns of a run, repeated untimed before it if `again`."""
    repeat_until = time.perf_counter_ns() + REPEATED_NS
    while again:
        run()
        again = time.perf_counter_ns() < repeat_until
    start = time.perf_counter_ns()
    run()
    return max(time.perf_counter_ns() - start, 1)


def _guarded(name: str, refused: dict[str, Result], make: Callable[[], _Made]) -> _Made | None:
    """Return what is made; a contender that raises is reported, and the others go on."""
    try:
        return make()
    except Exception as error:  # noqa: BLE001 - whatever a peer raises
        said = " ".join(f"{type(error).__name__}: {error}".split())
        refused[name] = Result(status="failed", note=said[:NOTE_CHARACTERS])
        return None


def _wait_until_idle() -> None:
    """Let the threads that a contender leaves spinning come to rest."""
    give_up_s = time.perf_counter() + IDLE_TIMEOUT_S
    while (begun_s := time.perf_counter()) < give_up_s:
        used_s = time.process_time()
        time.sleep(IDLE_STEP_S)
        if time.process_time() - used_s < IDLE_SHARE * (time.perf_counter() - begun_s):
            return
