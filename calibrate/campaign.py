"""The calibrate job of functions: time a suite of ordinary functions, fit the functions model, judge it, write."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path as FilePath
from typing import Any

import jax
import numpy as np

from rlxjax import PosteriorFit, Timings, estimate, fit_posterior, next_measurements, prior_posterior, profile_function
from rlxjax.calibration import (
    ErrorSummary,
    Samples,
    current_fingerprint,
    file_to_write,
    population_prior,
    section_of,
    sha256_of,
    write_sections,
)
from rlxjax.clock import quiet_collector, visit_ns
from rlxjax.fit import COVERED_SDS, MIN_TIMINGS
from rlxjax.models import FUNCTIONS, function_runs

from .clock import Deadline
from .functions import FunctionCell, function_cells
from .interrupts import heeded
from .outcome import FunctionsOutcome
from .progress import Progress
from .sample_lines import FUNCTIONS_SUFFIX, FUNCTIONS_VERSION, FunctionVisit
from .samples import FunctionLog, SampleWriter, said_of_protocol
from .verdict import MOST_FUNCTION_ERROR, verdict_on
from .visits import noise_floor, quantile_ns

#: Functions that are timed, those that the fit never sees among them; and of these, a share.
MOST_CELLS, HELD_OUT_SHARE = 100, 0.3
#: Spread of functions that the choice of what to time supposes.
DESIGN_SPREAD = 0.2
#: Seconds kept back for two fits, judging and writing; share of the rest for compiling; functions compiled at least.
FIT_RESERVE_S, COMPILE_SHARE, LEAST_COMPILED = 6.0, 0.5, 2 * MIN_TIMINGS
MIN_BUDGET_S = 15.0


def run_functions(
    *,
    started_s: float,
    budget_s: float,
    path: FilePath,
    command: str,
    progress: Progress,
    seed: int | None = None,
    force: bool = False,
) -> FunctionsOutcome:
    """Time functions, fit, judge, and put the section into the calibration file.

    Args:
        started_s: `time.perf_counter()` when the budget begins.
        budget_s: seconds for everything, compilation and fitting included.
        path: the calibration file; what it says of other models of this machine stays.
        command: how the job was called, for the file.
        progress: shows the phases.
        seed: of the order of measuring; from the system unless given.
        force: write even if the fit did not converge.

    Raises:
        ValueError: a budget that is too short, or a path that is no file.
        KeyboardInterrupt: Ctrl-C before each function was timed once.
    """
    if not MIN_BUDGET_S <= budget_s < float("inf"):
        raise ValueError(f"--budget: expected at least {MIN_BUDGET_S:g} seconds for functions, got {budget_s:g}")
    file_to_write(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    samples_path, notes = path.with_suffix(FUNCTIONS_SUFFIX), []
    file_to_write(samples_path)
    deadline = Deadline(started_s + budget_s - FIT_RESERVE_S)
    log = FunctionLog(current_fingerprint())
    rng = np.random.default_rng(seed)
    with progress.phase("choosing functions"):
        cells = chosen_cells(function_cells())
    with progress.phase("compiling functions"):
        compile_by = Deadline(deadline.at_s - (1.0 - COMPILE_SHARE) * deadline.left_s())
        programs = _compiled(cells, compile_by, log.fingerprint.cores)
    if len(programs) < len(cells):
        notes.append(f"{len(cells) - len(programs)} of {len(cells)} functions were not timed: no time to compile them.")
    with (
        progress.phase("measuring functions", deadline) as advance,
        SampleWriter(samples_path, log, append=False) as writer,
        heeded(deadline),
    ):
        if writer.aside:
            notes.append(f"Earlier samples were kept as {writer.aside}.")
        for visit in _visits(programs, deadline, rng, advance):
            writer.keep(visit)
    if deadline.interrupted:
        if len(log.names()) < len(programs):
            raise KeyboardInterrupt(f"samples so far are in {samples_path}")
        notes.append("Measuring was interrupted: this is the fit of what was measured until then.")
    with progress.phase("fitting functions"):
        found = fit_functions(log, path, samples_path, command, notes, force)
    return dataclasses.replace(found, is_interrupted=deadline.interrupted)


def fit_functions(
    log: FunctionLog, path: FilePath, samples_path: FilePath, command: str, notes: list[str], force: bool
) -> FunctionsOutcome:
    """Fit samples of functions, judge the fit, and put it into the calibration file of their machine.

    Raises:
        ValueError: samples of too few functions of the suite.
    """
    cells, visits = _cells_of(log, samples_path), log.as_visits()
    seen = np.array([not cell.held_out for cell in cells], bool)
    if seen.sum() < MIN_TIMINGS:
        raise ValueError(f"{samples_path}: expected times of at least {MIN_TIMINGS} functions, got {seen.sum()}")
    measured_ns, noise = quantile_ns(visits), noise_floor(visits)
    if np.isnan(noise).any():
        notes.append("A single round says nothing of the noise.")
    notes.extend(said_of_protocol(log.protocol))
    timings, prior = _timings_of(cells, measured_ns), population_prior(FUNCTIONS, log.fingerprint.platform)
    whole, blind = (fit_posterior(timings, prior, weights) for weights in (None, seen.astype(float)))
    summaries, noise_level = _summaries(cells, timings, blind, noise, seen), None
    if not np.isnan(noise).any():
        noise_level = float(noise.mean())
    judged = verdict_on("functions", summaries, noise_level, MOST_FUNCTION_ERROR)
    section = section_of(
        whole,
        FUNCTIONS.prior,
        summaries,
        noise_level,
        fingerprint=log.fingerprint,
        command=command,
        cautions=judged.cautions,
        samples=Samples(
            file=samples_path.name,
            sha256=sha256_of(samples_path),
            runner=FUNCTIONS_VERSION,
            timings=len(log.visits),
            rounds=len(visits.rounds()),
            workloads=len(cells),
        ),
    )
    is_written = force or whole.terms.converged
    if not whole.terms.converged:
        notes.append(whole.terms.message)
    if is_written:
        notes += write_sections(path, {FUNCTIONS.name: section})
    return FunctionsOutcome(path, is_written, samples_path, judged, section, notes)


def fitted_functions(log: FunctionLog, samples_path: FilePath) -> PosteriorFit:
    """Return the fit of all samples of functions by themselves.

    Raises:
        ValueError: samples of a function that the suite does not have.
    """
    return fit_posterior(_timings_of(_cells_of(log, samples_path), quantile_ns(log.as_visits())))


def _cells_of(log: FunctionLog, samples_path: FilePath) -> list[FunctionCell]:
    by_name = {cell.name: cell for cell in function_cells()}
    unknown = [name for name in log.names() if name not in by_name]
    if unknown:
        raise ValueError(f"{samples_path}: holds {unknown[0]!r}, which is no function of this suite")
    return [by_name[name] for name in log.names()]


def _timings_of(cells: Sequence[FunctionCell], measured_ns: np.ndarray) -> Timings:
    return Timings.checked(
        FUNCTIONS,
        variant=FUNCTIONS.variants[0],
        time_ns=measured_ns,
        **function_runs([profile_function(*_called(cell)) for cell in cells]).inputs,
    )


def chosen_cells(cells: Sequence[FunctionCell]) -> list[FunctionCell]:
    """Return the functions to time, in the suite's order.

    Of those that the fit sees, the ones that say most of the coefficients for their time (`next_measurements`), one of
    each family at least; of those that are held out, as many of each family as there is place for.
    """
    seen = [cell for cell in cells if not cell.held_out]
    families: dict[str, list[FunctionCell]] = {}
    for cell in cells:
        if cell.held_out:
            families.setdefault(cell.family, []).append(cell)
    in_turn = [cell for row in itertools.zip_longest(*families.values()) for cell in row if cell is not None]
    held_out = in_turn[: round(HELD_OUT_SHARE * MOST_CELLS)]
    count = min(MOST_CELLS - len(held_out), len(seen))
    found = estimate(
        prior_posterior(FUNCTIONS, spread=DESIGN_SPREAD),
        function_runs([profile_function(*_called(cell)) for cell in seen]),
    )
    candidates = jax.tree.map(lambda column: np.asarray(column)[:, None], found)
    order = [seen[place] for place in next_measurements(candidates, len(seen)).order]
    of_families = {cell.family: cell for cell in reversed(order)}
    most_telling = list(dict.fromkeys(cell.name for cell in (*of_families.values(), *order)))[:count]
    chosen = {*most_telling, *(cell.name for cell in held_out)}
    return [cell for cell in cells if cell.name in chosen]


def _called(cell: FunctionCell) -> tuple[Any, ...]:
    """Return a function and what describes its arguments."""
    fn, shapes = cell.build()
    return fn, *shapes


def _compiled(cells: Sequence[FunctionCell], deadline: Deadline, n_threads: int) -> dict[str, Callable[[], Any]]:
    """Return programs, each with its arguments, by name, that were compiled and run in a random order by a deadline."""
    rng = np.random.default_rng(0)
    programs = {cells[place].name: _program(cells[place], rng) for place in rng.permutation(len(cells)).tolist()}

    def is_ready(place: int, run: Callable[[], Any]) -> bool:
        if is_begun := place < LEAST_COMPILED or deadline.left_s() > 0:
            jax.block_until_ready(run())
        return is_begun

    with ThreadPoolExecutor(n_threads) as pool:
        return dict(itertools.compress(programs.items(), pool.map(is_ready, range(len(cells)), programs.values())))


def _program(cell: FunctionCell, rng: np.random.Generator) -> Callable[[], Any]:
    jitted, arguments = jax.jit(cell.fn), jax.device_put(cell.arguments(rng))
    return lambda: jitted(*arguments)


def _visits(
    programs: dict[str, Callable[[], Any]], deadline: Deadline, rng: np.random.Generator, advance: Callable[[], None]
) -> Iterator[FunctionVisit]:
    """Yield visits by rounds, each in a new random order, until the deadline; a whole round at least."""
    names = list(programs)
    with quiet_collector():
        for round_ in itertools.count():
            for index in rng.permutation(len(names)).tolist():
                if deadline.interrupted or (round_ and deadline.left_s() <= 0):
                    return
                times_ns = visit_ns(programs[names[index]])
                yield FunctionVisit(round=round_, name=names[index], times_ns=times_ns)
            advance()


def _summaries(
    cells: Sequence[FunctionCell], timings: Timings, blind: PosteriorFit, noise: np.ndarray, seen: np.ndarray
) -> dict[str, ErrorSummary]:
    """Return the errors of each family by a fit that never saw what is held out."""
    found = jax.tree.map(np.asarray, estimate(blind.posterior, timings.runs))
    logs = np.log(found.time_ns / timings.time_ns)
    covered = np.abs(logs) <= COVERED_SDS * np.asarray(found.log_sd())
    errors, families = np.abs(np.expm1(logs)), np.array([cell.family for cell in cells])
    summaries = {}
    for family in dict.fromkeys(families.tolist()):
        mine = families == family
        known, out = errors[mine & seen], errors[mine & ~seen]
        summaries[family] = ErrorSummary(
            fit=float(known.mean()) if known.size else None,
            terms_alone=None,
            covered=float(covered[mine & ~seen].mean()) if out.size else None,
            interior=None,
            edge=None,
            held_out=float(out.mean()) if out.size else None,
            held_out_cells=int(out.size),
            noise_floor=None if np.isnan(noise[mine]).any() else float(noise[mine].mean()),
            built_in=None,
        )
    return summaries
