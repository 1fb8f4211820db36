"""Judge calibrations by the samples of campaigns: errors, decisions, probabilities, intervals.

    python -m benchmarks.calibration_evidence SAMPLES [SAMPLES ...] [--json FILE] [--markdown FILE]

Each campaign is fitted without the held-out workloads and judged on these workloads. Simpler predictions of the same
timings are judged too. The tables have a column for each campaign. `--markdown` writes them between the two comments of
a page that mark their place.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy import optimize

import rlxjax as rx
from benchmarks import decision_metrics as metrics
from benchmarks._campaigns import Campaign, estimates, read_campaign
from benchmarks._common import options, placed, table, write
from calibrate.judge import error_summaries
from rlxjax.fit import Cell, Estimate, LatencyPosterior, fit_posterior, predicted_ns

#: The methods of the table with an estimate and its probability.
FIT, BUILT_IN = "the fit", "built-in constants"
#: The rows of the summary of methods.
METHODS = (BUILT_IN, "non-negative least squares", "terms alone", FIT)


class Prediction(NamedTuple):
    """A method's prediction of cells; a method with uncertainty has an estimate of the held-out cells."""

    time_ns: np.ndarray
    found: Estimate | None = None
    posterior: LatencyPosterior | None = None


def evidence(campaign: Campaign) -> dict[str, Any]:
    """Return all figures of one campaign."""
    cells, visits, measured, noise = campaign.cells, campaign.visits, campaign.measured_ns, campaign.noise
    seen = np.array([not cell.held_out for cell in cells])
    blind = fit_posterior(campaign.timings, campaign.prior, seen.astype(float), campaign.facts)
    found = estimates(blind.posterior, cells)
    terms_ns = np.asarray(predicted_ns(blind.terms.coefficients, campaign.timings.runs, campaign.facts))
    methods = {
        BUILT_IN: Prediction(built_in_ns(cells)),
        "non-negative least squares": Prediction(linear_ns(cells, measured, seen)),
        "terms alone": Prediction(terms_ns),
        FIT: Prediction(np.asarray(found.time_ns), part_of(found, ~seen), blind.posterior),
    }
    names = np.array([cell.group for cell in cells])
    of_strategy = {name: noise[names == name].mean() for name in np.unique(names)}
    out = [cell for cell in cells if cell.held_out]
    noises = np.array([of_strategy[cell.group] for cell in out])
    rows = {
        name: judged(own._replace(time_ns=own.time_ns[~seen]), out, measured[~seen], noises)
        for name, own in methods.items()
    }
    summaries = error_summaries(cells, measured, found, terms_ns, noise, seen)
    return {
        "workloads": len(cells),
        "rounds": len(visits.rounds()),
        "held_out_timings": int((~seen).sum()),
        "held_out_choices": len(metrics.workloads_of(out).sizes),
        "errors": {name: summary.model_dump() for name, summary in summaries.items()},
        "methods": rows,
        "coverage": metrics.coverage(part_of(found, ~seen), measured[~seen]),
    }


def sizes_of(cells: Sequence[Cell]) -> np.ndarray:
    """Return batch, n_fft, k and segments of cells, `[4, cells]`."""
    return np.array([[cell.inputs[name] for cell in cells] for name in ("batch", "n_fft", "k", "n_segments")])


def built_in_ns(cells: Sequence[Cell]) -> np.ndarray:
    """Return the time of each cell in ns by the reference's built-in constants, `[cells]`."""
    costs = {"host": rx.welch.host_path_ns, "block": rx.block_graph_ns}
    device, variants, sizes = jax.default_backend(), np.array([cell.variant for cell in cells]), sizes_of(cells)
    result = np.zeros(len(cells))
    for name in set(variants.tolist()):
        mine = variants == name
        *workload, n_segments = sizes[:, mine]
        result[mine] = costs.get(name, rx.fused_graph_ns)(device, *workload, n_segments=n_segments)
    return result


def linear_features(cells: Sequence[Cell]) -> np.ndarray:
    """Return the features of a linear model of latency, `[cells, 8]`.

    One; rows; segments; bytes of the signal; `n log2 n` a segment; bins; `bins log2 k`; peaks.
    """
    batch, n_fft, k, n_segments = sizes_of(cells)
    bins, segments = n_fft / 2 + 1, batch * n_segments
    signal_bytes = 4.0 * batch * n_fft * (n_segments + 1.0) / 2.0
    columns = (
        np.ones(len(cells)),
        batch,
        segments,
        signal_bytes,
        n_fft * np.log2(n_fft) * segments,
        bins * batch,
        bins * np.log2(k) * batch,
        batch * k,
    )
    return np.stack(columns, axis=1)


def linear_ns(cells: Sequence[Cell], measured_ns: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Return the time of each cell in ns by non-negative least squares of relative errors, one fit per strategy."""
    features, names = linear_features(cells), np.array([cell.group for cell in cells])
    features = features / features.mean(0)
    time_ns = np.zeros(len(cells))
    for name in np.unique(names):
        mine = names == name
        relative = features[mine & seen] / measured_ns[mine & seen, None]
        size = np.maximum(np.linalg.norm(relative, axis=0), np.finfo(float).tiny)
        solved, _ = optimize.nnls(relative / size, np.ones(len(relative)))
        time_ns[mine] = features[mine] @ (solved / size)
    return time_ns


def judged(own: Prediction, cells: Sequence[Cell], measured_ns: np.ndarray, noise: np.ndarray) -> dict[str, float]:
    """Return the row of a method in the table of methods, from predictions and timings of the held-out cells."""
    workloads = metrics.workloads_of(cells)
    said, measured = workloads.table(own.time_ns), workloads.table(measured_ns)
    pairs = metrics.pairs_of(measured)
    one, other = pairs.of(said)
    probability = np.where(one == other, 0.5, one < other)
    if own.found is not None and own.posterior is not None:
        probability = metrics.faster_probability(own.posterior, cells, own.found, workloads, pairs)
    faster, slower = pairs.of(measured)
    regret = metrics.regrets(said, measured)
    ordered, n_pairs = metrics.ordering(said, measured, workloads.table(noise))
    errors = metrics.errors_by_strategy(cells, own.time_ns, measured_ns)
    return {
        "error": float(np.mean(list(errors.values()))),
        "regret_mean": float(regret.mean()),
        "regret_max": float(regret.max()),
        "ordered": ordered,
        "pairs": n_pairs,
        "brier": metrics.brier_score(probability, faster < slower),
    }


def part_of(found: Estimate, kept: np.ndarray) -> Estimate:
    """Return the estimate of some of the cells."""
    return Estimate(*(part[kept] for part in found))


def percent(value: float | None, digits: int = 1) -> str:
    """Return a share in per cent; a dash for none."""
    return "-" if value is None or np.isnan(value) else f"{100 * value:.{digits}f}"


def summary_tables(campaigns: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the tables of all campaigns: one column per campaign, in per cent except the Brier score."""
    first = next(iter(campaigns.values()))
    strategies = [
        [name, *(f"{percent(own[name]['held_out'])} ({percent(own[name]['noise_floor'])})" for own in errors)]
        for errors in [[said["errors"] for said in campaigns.values()]]
        for name in first["errors"]
    ]
    fits = [said["methods"][FIT] for said in campaigns.values()]
    decisions = [
        ["pairs ordered as measured", *(f"{percent(fit['ordered'])} of {fit['pairs']}" for fit in fits)],
        ["mean regret of a pick", *(percent(fit["regret_mean"], 2) for fit in fits)],
        ["largest regret", *(percent(fit["regret_max"]) for fit in fits)],
        ["times within their 90 % interval", *(percent(c["coverage"]) for c in campaigns.values())],
        ["Brier score", *(f"{fit['brier']:.3f}" for fit in fits)],
    ]
    methods = [
        [method]
        + [f"{percent(row['error'])} / {percent(row['ordered'])} / {percent(row['regret_max'])}" for row in rows]
        for method in METHODS
        for rows in [[said["methods"][method] for said in campaigns.values()]]
    ]
    return "\n\n".join(
        [
            table(["held-out error (noise floor)", *campaigns], strategies),
            table(["held-out decisions", *campaigns], decisions),
            table(["error / ordered / largest regret", *campaigns], methods),
        ]
    )


def main() -> None:
    """Judge, print, write."""
    parser = options(__doc__)
    parser.add_argument("samples", nargs="+", type=Path)
    parser.add_argument("--markdown", type=Path, help="a page to put the tables into")
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    campaigns = {path.name.split(".")[0]: evidence(read_campaign(path)) for path in given.samples}
    text = summary_tables(campaigns)
    print(text)
    write(given.json, {"campaigns": campaigns})
    if given.markdown:
        placed(given.markdown, "tables", f"\n{text}\n")


if __name__ == "__main__":
    main()
