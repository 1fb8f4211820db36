"""What a fit is worth: the noise floor of the timings, and the errors on what the fit never saw."""

from collections.abc import Mapping, Sequence

import numpy as np

from rlxjax import LatencyEstimate, fused_graph_ns
from rlxjax.calibration import ErrorSummary
from rlxjax.device import jax_device
from rlxjax.fit import COVERED_SDS
from rlxjax.welch import BUILT_IN_COSTS_NS, WelchPath, learned_scale

from .workloads import NO_MODELS, STRATEGIES, Cell, Grid, Models

#: A time so many times longer or shorter than its prediction is an outlier.
OUTLIER_FACTOR = 3.0


def sizes_of(cells: Sequence[Cell]) -> np.ndarray:
    """Return batch, n_fft, k and n_segments of each cell, `[4, cells]`."""
    return np.array([(cell.batch, cell.n_fft, cell.k, cell.n_segments) for cell in cells], float).T


def built_in_ns(cells: Sequence[Cell], models: Models = NO_MODELS) -> np.ndarray:
    """Return what the reference's built-in constants say of each cell in ns, `[cells]`.

    A learned path is scaled by the gates that are on, be they a quarter or more.
    """
    device, names = jax_device(), np.array([cell.strategy for cell in cells])
    sizes, result = sizes_of(cells), np.zeros(len(cells))
    for strategy in set(names.tolist()):
        path, n_segments, _ = STRATEGIES[strategy]
        mine = names == strategy
        batch, n_fft, k, _ = sizes[:, mine]
        if path is WelchPath.LEARNED:
            timed = [models[length].model for length in n_fft.astype(int)]
            gates = np.array([(model.active_gates, model.total_gates) for model in timed], float)
            scale = learned_scale(gates[:, 0], gates[:, 1])
            result[mine] = fused_graph_ns(device, batch, n_fft, k, scale, n_segments=n_segments)
        else:
            result[mine] = BUILT_IN_COSTS_NS[path](device, batch, n_fft, k, n_segments=n_segments)
    return result


def error_summaries(
    cells: Sequence[Cell],
    measured_ns: np.ndarray,
    blind: LatencyEstimate,
    blind_terms_ns: np.ndarray,
    noise: np.ndarray,
    grid: Grid,
    seen: np.ndarray,
    models: Models = NO_MODELS,
) -> Mapping[str, ErrorSummary]:
    """Return per strategy the mean absolute relative error where the fit saw the workload, and where not.

    Args:
        cells: the workloads.
        measured_ns: `[cells]`.
        blind: of each cell, by a fit of the seen ones.
        blind_terms_ns: `[cells]`, the prediction of that fit's terms alone.
        noise: relative noise, `[cells]`.
        grid: says whether an unseen workload lies inside the grid or at its edge.
        seen: `[cells]`, whether the fit saw the workload.
        models: that learned cells run.
    """
    names = np.array([cell.strategy for cell in cells])
    places = np.where(seen, "fit", [grid.place(cell.batch, cell.n_fft) for cell in cells])
    errors = np.abs(np.asarray(blind.time_ns) / measured_ns - 1.0)
    terms_errors = np.abs(blind_terms_ns / measured_ns - 1.0)
    covered = np.abs(np.log(measured_ns / blind.time_ns)) <= COVERED_SDS * np.asarray(blind.log_sd())
    built_in = np.abs(built_in_ns(cells, models) / measured_ns - 1.0)
    summaries = {}
    for strategy in STRATEGIES:
        mine = names == strategy
        if not mine.any():
            continue
        out = mine & (places != "fit")
        summaries[strategy] = ErrorSummary(
            fit=_mean(errors[mine & (places == "fit")]),
            interior=_mean(errors[mine & (places == "interior")]),
            edge=_mean(errors[mine & (places == "edge")]),
            held_out=_mean(errors[out]),
            terms_alone=_mean(terms_errors[out]),
            covered=_mean(covered[out]),
            held_out_cells=int(out.sum()),
            noise_floor=None if np.isnan(noise[mine]).any() else _mean(noise[mine]),
            built_in=_mean(built_in[out if out.any() else mine]),
        )
    return summaries


def outliers(cells: Sequence[Cell], measured_ns: np.ndarray, predicted_ns: np.ndarray) -> dict[Cell, str]:
    """Return the cells whose times are far off their predictions, with a phrase, the farthest first."""
    ratios = measured_ns / predicted_ns
    distances = np.nan_to_num(np.abs(np.log(ratios)))
    return {
        cells[index]: f"{cells[index]} took {ratios[index]:.3g} times its prediction"
        for index in np.argsort(-distances, kind="stable")
        if distances[index] > np.log(OUTLIER_FACTOR)
    }


def _mean(values: np.ndarray) -> float | None:
    """Return the mean; None of nothing."""
    return float(values.mean()) if values.size else None
