"""Held-out error against the number of timed workloads, chosen by the design or at random.

    python benchmarks/active_design.py FILE.samples.jsonl[.gz] [--prior FILE] [--seeds N] [--json FILE]
        [--picture FILE]

FILE is a campaign of the full grid; "timing" a workload looks its strategies' times up in it. `--prior` is a
calibration of another machine or day to start from. After every few workloads the model is fitted anew, and
the design chooses the next ones by that fit. The error is the mean absolute relative one over all strategies
of all held-out workloads, which no fit sees.
"""

import argparse
import dataclasses
import gzip
import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

import rlxjax as rx
from calibrate.design import DESIGN_CORRECTION_SD, DESIGN_SPREAD, FOR_UNKNOWNS, block_estimates, by_workload, estimates
from calibrate.fits import micro_prior, prior_from
from calibrate.measure import micro_rates
from calibrate.samples import SampleLog, read_samples, timings_of
from calibrate.visits import Visits, quantile_ns
from calibrate.workloads import Cell, Grid, runs_model

COUNTS = (5, 10, 15, 20, 25, 30, 40, 60, 80)
#: Workloads chosen at a time, between fits.
STEP = 5


class Criterion(NamedTuple):
    """What a design asks for: what is learned of the unknowns, then of the times of the whole grid.

    Attributes:
        first: workloads chosen for what they say of the unknowns.
        correction_sd: of the correction's weights, as the design supposes it.
    """

    first: int
    correction_sd: float


ALL = 10**9
CRITERIA = {
    "unknowns": Criterion(ALL, 0.05),
    "times": Criterion(0, 0.05),
    "unknowns, then times": Criterion(FOR_UNKNOWNS, DESIGN_CORRECTION_SD),
}


class Campaign:
    """A measured grid, from which any workloads can be fitted."""

    def __init__(self, log: SampleLog, visits: Visits, prior: rx.LatencyPrior | None = None):
        grid = Grid()
        without_model = np.array([not runs_model(cell) for cell in log.cells])
        self.cells = [cell for cell in log.cells if not runs_model(cell)]
        self.measured_ns = quantile_ns(visits)[without_model]
        known = rx.typical_prior() if prior is None else prior
        self.prior = micro_prior(micro_rates(log), known) if log.micro else known
        self.timings = timings_of(self.cells, self.measured_ns)
        self.blocks = by_workload(self.cells)
        self.seen = [key for key in self.blocks if grid.place(*key[:2]) == "fit"]
        self.is_held_out = np.array([grid.place(cell.batch, cell.n_fft) != "fit" for cell in self.cells])

    def fit(self, chosen: list) -> rx.LatencyPosterior:
        """Return the fit of some workloads; all fits have one shape, so one program."""
        taken = set(chosen)
        weights = np.array([cell[1:] in taken for cell in self.cells], float)
        return rx.fit_posterior(self.timings, self.prior, weights).posterior

    def error(self, posterior: rx.LatencyPosterior) -> float:
        """Return the mean absolute relative error of the held-out cells."""
        errors = np.abs(estimates(posterior, self.cells).time_ns / self.measured_ns - 1)
        return float(errors[self.is_held_out].mean())

    def active(self, criterion: Criterion) -> Iterator[tuple[list, rx.LatencyPosterior]]:
        """Yield the workloads chosen so far, a few more each time, and their fit."""
        prior = rx.prior_posterior(rx.models.WELCH, self.prior, DESIGN_SPREAD, criterion.correction_sd)
        posterior, chosen = prior, []
        while len(chosen) + STEP <= len(self.seen):
            # The prior's covariance, at the coefficients found so far; what is timed takes its part off.
            posterior = dataclasses.replace(posterior, factor=prior.factor, spread=prior.spread)
            whole = block_estimates(posterior, list(self.blocks.values()))
            keys = list(self.blocks)
            taken = np.isin(np.arange(len(keys)), [keys.index(key) for key in chosen])
            is_candidate = np.array([key in set(self.seen) for key in keys]) & ~taken
            spread = np.where(is_candidate[:, None], whole.spread, np.inf)
            design = rx.next_measurements(
                whole._replace(spread=spread),
                STEP,
                targets=None if len(chosen) < criterion.first else whole,
                timed=jax.tree.map(lambda column, taken=taken: column[taken], whole) if chosen else None,
            )
            chosen = chosen + [keys[index] for index in design.order]
            posterior = self.fit(chosen)
            yield chosen, posterior


def active_errors(campaign: Campaign, criterion: Criterion, counts: list[int]) -> tuple[list[float], list]:
    """Return the errors at each count, and the workloads of the last one."""
    errors, chosen = [], []
    for chosen, posterior in campaign.active(criterion):
        if len(chosen) in counts:
            errors.append(campaign.error(posterior))
        if len(chosen) >= max(counts):
            break
    return errors, chosen


def random_errors(campaign: Campaign, seed: int, counts: list[int]) -> list[float]:
    """Return the errors of growing random choices."""
    order = np.random.default_rng(seed).permutation(len(campaign.seen))
    return [campaign.error(campaign.fit([campaign.seen[i] for i in order[:count]])) for count in counts]


def draw(content: dict, path: Path) -> None:
    """Draw the errors against the number of workloads."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "rlxjax"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.0, 3.6), layout="constrained")
    counts, chance = content["workloads"], 100 * np.array(content["random"])
    axes.fill_between(counts, chance.min(0), chance.max(0), color="0.88", label="random: least to most")
    axes.plot(counts, chance.mean(0), color="0.5", label="random: mean")
    for name, errors in content["active"].items():
        axes.plot(counts, 100 * np.array(errors), "o-", ms=4, label=f"active: {name}")
    full = 100 * content["full_grid"]["error"]
    axes.axhline(full, color="k", lw=1, label=f"all {content['full_grid']['workloads']} workloads")
    axes.axhline(1.1 * full, color="k", lw=1, ls=":", label="10 % above")
    axes.set(xlabel="timed workloads", ylabel="held-out error, %", ylim=(0, None))
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def named(key: tuple[int, int, int]) -> str:
    """Return how a workload is written."""
    return str(Cell("", *key)).strip()


def main() -> None:
    """Run the experiment, and print and keep the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("samples", type=Path)
    parser.add_argument("--prior", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--halves", type=int, default=5, help="repeats with half of the rounds each")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    raw = arguments.samples.read_bytes()
    content_bytes = gzip.decompress(raw) if arguments.samples.suffix == ".gz" else raw
    with tempfile.TemporaryDirectory() as folder:
        unpacked = Path(folder) / "samples.jsonl"
        unpacked.write_bytes(content_bytes)
        log = read_samples(unpacked)
    visits = log.visits()
    numbers = visits.rounds()
    prior = prior_from(arguments.prior)[0] if arguments.prior else None
    campaign = Campaign(log, visits, prior)
    counts = [count for count in COUNTS if count <= len(campaign.seen)]
    full = campaign.error(campaign.fit(campaign.seen))
    found = {name: active_errors(campaign, criterion, counts) for name, criterion in CRITERIA.items()}
    by_halves = []
    for half in range(arguments.halves):
        rounds = np.random.default_rng(half).permutation(numbers)[: max(1, len(numbers) // 2)]
        part = Campaign(log, visits.in_rounds(rounds), prior)
        errors = {name: active_errors(part, criterion, counts)[0] for name, criterion in CRITERIA.items()}
        by_halves.append({"full_grid": part.error(part.fit(part.seen)), **errors})
    content = {
        "command": f"python benchmarks/active_design.py {arguments.samples} --seeds {arguments.seeds} "
        f"--halves {arguments.halves}" + (f" --prior {arguments.prior}" if arguments.prior else ""),
        "samples": arguments.samples.name,
        "sha256": hashlib.sha256(content_bytes).hexdigest(),
        "rounds": len(numbers),
        "held_out_cells": int(campaign.is_held_out.sum()),
        "full_grid": {"workloads": len(campaign.seen), "error": full},
        "workloads": counts,
        "criteria": {name: criterion._asdict() for name, criterion in CRITERIA.items()},
        "active": {name: errors for name, (errors, _) in found.items()},
        "chosen": {name: [named(key) for key in keys[:20]] for name, (_, keys) in found.items()},
        "random": [random_errors(campaign, seed, counts) for seed in range(arguments.seeds)],
        "halves": by_halves,
    }
    chance = np.array(content["random"])
    print(f"all {len(campaign.seen)} workloads: {100 * full:.2f} %")
    print("| workloads | " + " | ".join(CRITERIA) + " | halves, mean ratio (sd) | random, mean (sd) |")
    print("|---" * (3 + len(CRITERIA)) + "|")
    for i, count in enumerate(counts):
        active = [content["active"][name][i] for name in CRITERIA]
        ratios = np.array([[half[name][i] / half["full_grid"] for name in CRITERIA] for half in by_halves])
        in_halves = [f"{r.mean():.2f} ({r.std():.2f})" for r in ratios.T] if by_halves else ["-"]
        columns = [f"{100 * error:.2f} % ({error / full:.2f})" for error in active] + [", ".join(in_halves)]
        columns.append(f"{100 * chance[:, i].mean():.2f} % ({100 * chance[:, i].std():.2f})")
        print(f"| {count} | " + " | ".join(columns) + " |")
    if arguments.json:
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if arguments.picture:
        draw(content, arguments.picture)


if __name__ == "__main__":
    main()
