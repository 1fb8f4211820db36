"""Samples of Welch peaks, as the calibrate job keeps and takes them: the one place of the benchmarks that knows how."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from calibrate.clock import Deadline
from calibrate.fits import micro_prior
from calibrate.job import facts_of
from calibrate.micro import micro_rates
from calibrate.workloads import Cell, Signals, runs_model

from calibrate.measure import measure_rounds, warm_up
from calibrate.samples import SampleLog, SampleWriter, read_samples, timings_of
from calibrate.visits import Visits, noise_floor, quantile_ns
from rlxjax.calibration import current_fingerprint
from rlxjax.fit import Facts, LatencyPrior, Timings
from rlxjax.models import WELCH


class Campaign(NamedTuple):
    """The samples of a campaign, those that ran a model left out.

    Attributes:
        path: the file.
        log: what it holds.
        cells: what was timed.
        visits: of the cells.
        measured_ns: what each takes, `[cells]`.
        noise: of each, relative, `[cells]`.
        timings: the same, for a fit.
        facts: of the machine.
        prior: by its micro-benchmarks, the model's wide one without any.
    """

    path: Path
    log: SampleLog
    cells: list[Cell]
    visits: Visits
    measured_ns: np.ndarray
    noise: np.ndarray
    timings: Timings
    facts: Facts
    prior: LatencyPrior


def read_campaign(path: Path) -> Campaign:
    """Read a samples file, compressed or not."""
    log = read_samples(path)
    log.cells = [cell for cell in log.cells if not runs_model(cell)]
    visits = log.visits()
    measured_ns = quantile_ns(visits)
    prior = micro_prior(micro_rates(log)) if log.micro else WELCH.prior
    timings, facts = timings_of(log.cells, measured_ns), facts_of(log, {})
    return Campaign(path, log, log.cells, visits, measured_ns, noise_floor(visits), timings, facts, prior)


@contextlib.contextmanager
def sampled(cells: Sequence[Cell], path: Path) -> Iterator[Callable[[float], None]]:
    """Write samples of cells to a file; what is yielded takes them for so many seconds."""
    log, signals, rng = SampleLog(current_fingerprint()), Signals(cells), np.random.default_rng()
    warm_up(cells, signals, Deadline(np.inf), lambda: None)
    with SampleWriter(path, log, append=False) as writer:
        writer.cells(cells)
        yield lambda seconds: measure_rounds(
            log, writer, signals, Deadline(time.perf_counter() + seconds), rng, lambda: None
        )


@contextlib.contextmanager
def busy_processor() -> Iterator[None]:
    """Keep a processor busy by another process."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        busy.kill()
        busy.wait()
