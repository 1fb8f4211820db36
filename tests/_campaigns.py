"""A suite of two ways whose times are made up by a known machine, its campaigns, and jobs that run quietly."""

import contextlib
import dataclasses
import io
import time

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import rlxjax as rx
from calibrate import campaign, machine
from calibrate.machine import MICRO_REPEATS
from calibrate.samples import Micro, SampleLog, Visit, samples_path
from calibrate.terminal import Progress
from rlxjax.fit import Cell, Input, LatencyModel, Suite, cell_runs, predicted_ns, wide_prior

MICRO_NS = {"launch": 1e4, "roundtrip": 1e4, "copy": 1e7, "upload": 1e6, "readback": 1e6}
MICRO_NS |= {"maxima wide": 5e5, "maxima deep": 6e5, "top_k wide": 4e5, "top_k deep": 2e6}
MICRO_NS |= {"short powers": 3.5e5, "long powers": 5e5}
#: Long enough ago that a job has time left but to fit.
LONG_AGO_S = 1e4


class Toy(LatencyModel):
    """Rows of some width, copied one by one or all at once."""

    name, version = "toy", 1
    inputs = {"rows": Input("rows", most=1024), "width": Input("values", most=256)}  # noqa: RUF012
    variants = ("one_by_one", "at_once")
    prior = wide_prior({"call_ns": 2e4, "launch_ns": 2e4, "row_ns": 3e2, "value_ns": 1.0})

    def terms_ns(self, coefficients, runs, facts):
        c, at_once = coefficients, jnp.asarray(runs.variant) == 1
        rows, width = (jnp.asarray(runs.inputs[name]) for name in self.inputs)
        return {
            "call_ns": c["call_ns"] + jnp.where(at_once, c["launch_ns"], 0.0),
            "rows_ns": jnp.where(at_once, 0.0, c["row_ns"] * rows),
            "values_ns": c["value_ns"] * rows * width,
        }


class ToySuite(Suite):
    """Every cell of the model's grid; programs that do nothing."""

    model = Toy()
    shown = ("rows=16 width=64",)

    def program(self, cell):
        return lambda: np.zeros(1)


#: As a command line names it; in this file it is found by tests alone.
SUITE, NAME = ToySuite(), "_campaigns:SUITE"
#: What the made-up machine takes.
TRUE_NS = {"call_ns": 1e4, "launch_ns": 3e4, "row_ns": 5e2, "value_ns": 0.5}


def quiet():
    """Return a progress that shows nothing."""
    return Progress(Console(file=io.StringIO()), is_quiet=True)


@contextlib.contextmanager
def quick_machine():
    """Let micro-benchmarks take the times of the made-up machine."""
    with pytest.MonkeyPatch.context() as patched:
        times = {name: lambda time_ns=time_ns: time_ns for name, time_ns in MICRO_NS.items()}
        patched.setattr(machine, "micro_benchmarks", lambda: times)
        yield


def run_job(path, suite=SUITE, *, begun_s_ago=0.0, budget_s=10.0, progress=None, **options):
    """Run the job of a suite."""
    return campaign.run(
        suite,
        NAME,
        started_s=time.perf_counter() - begun_s_ago,
        budget_s=budget_s,
        path=path,
        command="a test",
        progress=progress or quiet(),
        seed=0,
        **options,
    )


def fitted(path, suite=SUITE, **options):
    """Return the outcome of a job that has no time left but to fit the samples beside a path."""
    return run_job(path, suite, resume=True, begun_s_ago=LONG_AGO_S, **options)


def made_up(path, suite=SUITE, true_ns=TRUE_NS, factors=None, rounds=2, micro=MICRO_NS):
    """Write the samples of a campaign on a known machine, some cells' times a factor longer; return where."""
    kept_at, rng = samples_path(path, suite.model.name), np.random.default_rng(0)
    log = SampleLog.new(suite, NAME)
    with log.kept_in(kept_at, append=False):
        for name, time_ns in micro.items():
            for _ in range(MICRO_REPEATS):
                log.keep(Micro(name=name, time_ns=time_ns))
        if rounds:
            log.keep_cells(cells := suite.cells())
            times_ns = np.asarray(predicted_ns(true_ns, cell_runs(suite.model, cells), log.facts))
        for round_ in range(rounds):
            for cell, time_ns in zip(cells, times_ns, strict=True):
                noisy_ns = time_ns * (factors or {}).get(cell.name, 1.0) * np.exp(rng.normal(0.02, 0.01))
                log.keep(Visit(round=round_, cell=cell.name, times_ns=[max(1, int(noisy_ns))]))
    return kept_at


def toy_cell(rows, width, variant="at_once", **about):
    """Return a cell of the toy suite."""
    return Cell(f"{variant} {rows}x{width}", variant, {"rows": rows, "width": width}, **about)


def saved_model(folder, n_fft=64, bins=8):
    """Save a pruned learned FFT; return its file."""
    exact = rx.learned.LearnedFft.exact(n_fft)
    gates = exact.gates.copy()
    gates[-2:] = 0
    mask = (np.arange(exact.n_bins) < bins).astype(float)
    path = folder / f"model-{n_fft}-{bins}.json"
    rx.learned.save_learned_fft(dataclasses.replace(exact, gates=gates, mask=mask).hardened(), path)
    return path
