"""Campaigns whose times are made up by a known machine, and jobs that run quietly."""

import dataclasses
import os
import time

import numpy as np
from rich.console import Console

import rlxjax as rx
from calibrate import job
from calibrate.micro import MICRO_REPEATS
from calibrate.progress import Progress
from calibrate.samples import SampleLog, SampleWriter, timings_of
from calibrate.workloads import Grid, load_models
from rlxjax.calibration import current_fingerprint
from rlxjax.fit import predicted_ns
from rlxjax.models import WELCH

#: Lengths of models are both on it and off; one is held out.
GRID = Grid((1, 8, 32, 256, 1024, 4096), (64, 128, 256), (4,), (32, 4096), (128,))
MICRO_NS = {"launch": 1e4, "roundtrip": 1e4, "copy": 1e7, "upload": 1e6, "readback": 1e6}
MICRO_NS |= {"maxima wide": 5e5, "maxima deep": 6e5, "top_k wide": 4e5, "top_k deep": 2e6}
MICRO_NS |= {"short powers": 3.5e5, "long powers": 5e5}
#: Long enough ago that a job has time left but to fit.
LONG_AGO_S = 1e4


def run_job(path, *, begun_s_ago=0.0, budget_s=job.MIN_BUDGET_S, grid=GRID, resume=False, progress=None, **options):
    """Run the job; its phases go nowhere unless a progress is given."""
    with open(os.devnull, "w") as nowhere:
        return job.run(
            started_s=time.perf_counter() - begun_s_ago,
            budget_s=budget_s,
            out=path,
            resume=resume,
            command="a test",
            progress=progress or Progress(Console(file=nowhere)),
            grid=grid,
            seed=0,
            **options,
        )


def fitted(path, models=(), **options):
    """Return the outcome of a job that has no time left but to fit the samples beside a path."""
    return run_job(path, models=models, resume=True, begun_s_ago=LONG_AGO_S, **options)


def made_up(path, models=(), grid=GRID):
    """Write the samples of a campaign on a machine of the typical prior's coefficients.

    It has two rounds of the grid; without a grid, micro-benchmarks alone.
    """
    timed = load_models(models)
    log, rng = SampleLog(current_fingerprint()), np.random.default_rng(0)
    with SampleWriter(path.with_suffix(".samples.jsonl"), log, append=False) as writer:
        if timed:
            writer.models({n_fft: model.sha256 for n_fft, model in timed.items()})
        for _ in range(MICRO_REPEATS):
            for name, time_ns in MICRO_NS.items():
                writer.micro(name, time_ns)
        if grid is None:
            return
        writer.cells(cells := grid.cells(timed))
        runs = timings_of(cells, np.ones(len(cells))).runs
        times_ns = np.asarray(predicted_ns(WELCH.prior.median, runs, job.facts_of(log, timed)))
        for round_ in range(2):
            for cell, time_ns in zip(cells, times_ns, strict=True):
                writer.timing(round_, cell, [int(time_ns * np.exp(rng.normal(0.02, 0.01)))])


def saved_model(folder, n_fft=64, bins=8):
    """Save a pruned model; return its file."""
    exact = rx.LearnedFft.exact(n_fft)
    gates = exact.gates.copy()
    gates[-2:] = 0
    mask = (np.arange(exact.n_bins) < bins).astype(float)
    path = folder / f"model-{n_fft}-{bins}.json"
    rx.save_learned_fft(dataclasses.replace(exact, gates=gates, mask=mask).hardened(), path)
    return path
