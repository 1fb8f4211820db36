"""Read the samples of campaigns, and predict their cells."""

import functools
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from calibrate.judge import timings_of
from calibrate.machine import micro_times_ns
from calibrate.samples import SampleLog, Visits, noise_floor, quantile_ns, read_samples
from calibrate.suites.welch import WelchSuite
from rlxjax import Timings
from rlxjax.fit import Cell, Estimate, Facts, LatencyPosterior, LatencyPrior, cell_runs, estimate
from rlxjax.models import WELCH, gpu_facts_of_kind

#: Strategies with the same result, by the names of cells.
SAME_RESULT = ("fast", "fused_maxima", "fused_top_k", "block")

suite = functools.cache(WelchSuite)


class Campaign(NamedTuple):
    """The samples of a campaign, without samples of a learned model.

    Attributes:
        path: the file.
        log: the content of the file.
        cells: the timed cells.
        visits: the visits of the cells.
        measured_ns: the time of each cell in ns, `[cells]`.
        noise: the relative noise of each cell, `[cells]`.
        timings: the same times, for a fit.
        facts: the machine's scheduling facts.
        prior: the prior from micro-benchmarks, or the model's wide prior.
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
    log.cells = [cell for cell in log.cells if cell.variant != "learned"]
    cells, visits = log.timed()
    measured_ns = quantile_ns(visits)
    prior = suite().start(micro_times_ns(log)) if log.micro else WELCH.prior
    timings = timings_of(suite(), cells, measured_ns)
    return Campaign(path, log, cells, visits, measured_ns, noise_floor(visits), timings, log.facts, prior)


def read_gpu_samples(path: Path) -> SampleLog:
    """Read samples of a GPU's functions, with the facts of the card's data sheet."""
    log = read_samples(path)
    facts = dict(gpu_facts_of_kind(log.fingerprint.device_kind) or {})
    log.header = log.header.model_copy(update={"facts": facts})
    return log


def compiled_texts(path: Path) -> dict[str, str]:
    """Return the texts of a file of compiled programs by name."""
    kept = json.loads(gzip.decompress(path.read_bytes()))["programs"]
    return {name: one["text"] for name, one in kept.items() if "text" in one}


def estimates(posterior: LatencyPosterior, cells: Sequence[Cell]) -> Estimate:
    """Return the posterior's estimate of each cell, `[cells]`."""
    return jax.tree.map(np.asarray, estimate(posterior, cell_runs(WELCH, cells)))
