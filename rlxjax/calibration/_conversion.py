"""Convert posteriors of single machines, or of populations of machines, to sections of a calibration file, and back."""

import dataclasses
import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rlxjax._typing import Provenance
from rlxjax._values import FrozenDict, counted
from rlxjax.fit import (
    COVERED,
    COVERED_SDS,
    Facts,
    LatencyModel,
    LatencyPosterior,
    LatencyPrior,
    PosteriorFit,
    coefficient_names,
    estimate,
    is_measured,
    prior_posterior,
    smallest_run,
    transferred_prior,
    unit_of,
)
from rlxjax.gate import IoFusionGate

from ._predict import CalibratedModel
from ._sections import (
    UNKNOWN,
    ErrorSummary,
    FitSummary,
    FittedCoefficient,
    Machine,
    MachineSection,
    ModelSection,
    Population,
    Range,
    Uncertainty,
    current_fingerprint,
    fingerprint_of_device,
    rounded,
)

#: Standard deviation of the logarithm of a machine's speed before any timing; it counts as much as one timed machine.
SPEED_LOG_SD = 1.0
#: Assumed spread of a model's residuals on a machine that was not fitted, if only one machine was timed.
ALONE_SPREAD = 0.3
#: Largest number of machines that are held out, one at a time; they are spread evenly over the list of machines.
MOST_JUDGED = 32
#: Unit of each coefficient of the IO gate. Names come from the reference gate, which names no unit for bandwidths.
GATE_UNITS = {
    field.name: "bytes/ns" if field.name.endswith("_bw") else unit_of(field.name)
    for field in dataclasses.fields(IoFusionGate)
}


def _expect(field: str, expected: Any, got: Any) -> None:
    if expected != got:
        raise ValueError(f"{field}: expected {expected!r}, got {got!r}")


def _expect_names(of: str, names: Iterable[str], entries: Mapping[str, Any], may_be_more: bool = False) -> None:
    names = list(names)
    for name in names:
        if name not in entries:
            raise ValueError(f"{of}.{name} is missing")
    if not may_be_more and (unknown := entries.keys() - {*names}):
        raise ValueError(f"{of}.{min(unknown)} is unknown: expected {', '.join(names)}")


def _expect_units(of: str, units: Mapping[str, str], entries: Mapping[str, Any]) -> None:
    _expect_names(of, units, entries)
    for name, unit in units.items():
        _expect(f"{of}.{name}.unit", unit, entries[name].unit)


def gate_of(machine: MachineSection | None) -> IoFusionGate | None:
    """Return the measured IO gate in a machine's section; None if there is no section, or no gate in the section."""
    if machine is None or machine.gate is None:
        return None
    _expect_units("gate", GATE_UNITS, machine.gate)
    gate = IoFusionGate(**{name: entry.value for name, entry in machine.gate.items()})
    if gate.unified_memory not in (0.0, 1.0):
        raise ValueError(f"gate.unified_memory: expected 0 or 1, got {gate.unified_memory}")
    return gate


def coefficients_of(model: LatencyModel, entries: Mapping[str, FittedCoefficient]) -> tuple[Any, Any]:
    """Return two pytrees: a model's coefficients, and the standard deviations of the coefficients' logarithms."""
    structure, own = jax.tree.structure(model.prior.median), [entries[n] for n in coefficient_names(model.prior.median)]
    return structure.unflatten([one.value for one in own]), structure.unflatten([one.log_sd for one in own])


def posterior_of(model: LatencyModel, section: ModelSection) -> LatencyPosterior:
    """Return the posterior that a model's section describes."""
    _expect("model_version", model.version, section.model_version)
    names = coefficient_names(model.prior.median)
    _expect_units("coefficients", {name: unit_of(name) for name in names}, section.coefficients)
    _expect_names("facts", model.facts, section.facts, may_be_more=True)
    _expect_names("domain", model.extents(smallest_run(model)), section.domain, may_be_more=True)
    facts = {name: np.asarray(own, float) if isinstance(own, list) else own for name, own in section.facts.items()}
    for name, fact in model.facts.items():
        if np.ndim(facts[name]) != np.ndim(fact):
            wanted = "numbers" if np.ndim(fact) else "a number"
            raise ValueError(f"facts.{name}: expected {wanted}, got {section.facts[name]}")
    known = prior_posterior(model, LatencyPrior(*coefficients_of(model, section.coefficients)), facts=facts)
    columns: dict[str, Any] = {"alike": None}
    for name, width in (("correction", known.weights.shape[1]), ("spread", None), ("alike", len(model.variants))):
        if (entries := getattr(section.uncertainty, name)) is not None:
            _expect_names(f"uncertainty.{name}", model.variants, entries)
            for variant, row in entries.items() if width is not None else ():
                _expect(f"uncertainty.{name}.{variant}: length", width, len(row))
            columns[name] = np.array([entries[variant] for variant in model.variants])
    factor, alike = known.factor, columns["alike"]
    if (rows := section.uncertainty.covariance_factor) is not None:
        _expect("uncertainty.covariance_factor: rows", len(factor), len(rows))
        factor = np.zeros(factor.shape)
        factor[np.tril_indices(len(rows))] = np.concatenate(rows)
    if alike is not None and (np.any(alike != alike.T) or np.any(np.diag(alike) != 1.0)):
        raise ValueError("uncertainty.alike: expected a symmetric matrix with ones on its diagonal")
    weights, spread = columns["correction"], columns["spread"]
    return dataclasses.replace(known, weights=weights, factor=factor, spread=spread, alike=alike)


def calibrated_of(model: LatencyModel, section: ModelSection, machine: MachineSection | None = None) -> CalibratedModel:
    """Return the calibrated model that a section describes, with the pace and cautions of the machine's section."""
    pace_log_sd = 0.0 if machine is None or machine.pace is None else machine.pace.log_sd
    return CalibratedModel(
        posterior_of(model, section),
        provenance={name: entry.provenance for name, entry in section.coefficients.items()},
        held_out={name: summary.model_dump() for name, summary in section.held_out.items()},
        domain={name: (entry.low, entry.high) for name, entry in section.domain.items()},
        noise_floor=section.noise_floor,
        pace_log_sd=pace_log_sd if section.population is None else section.population.speed_log_sd,
        cautions=(*section.cautions, *(() if machine is None else machine.cautions)),
    )


def prior_of(model: LatencyModel, section: ModelSection) -> LatencyPrior[Any]:
    """Return the prior for another machine: the population's prior, or the part of a machine's fit that transfers."""
    if section.population is None:
        return transferred_prior(posterior_of(model, section))
    correction = np.array([section.uncertainty.correction[name] for name in model.variants])
    return LatencyPrior(*coefficients_of(model, section.coefficients), correction)


def section_of(
    found: PosteriorFit,
    prior: LatencyPrior,
    held_out: Mapping[str, ErrorSummary] = FrozenDict(),
    noise_floor: float | None = None,
    outliers: Sequence[str] = (),
    **about: Any,
) -> ModelSection:
    """Return the section of a calibration file for a fitted model; the domain is the range of the timed runs.

    Args:
        found: the result of `fit_posterior`.
        prior: the prior before any timing or micro-benchmark. A coefficient counts as measured if the fit made the
            coefficient less uncertain than this prior.
        held_out: a summary of the prediction errors for each variant, by the variant's name.
        noise_floor: mean relative difference between the times from two halves of the timing rounds.
        outliers: phrases about timings that are far from their predictions.
        **about: further fields of `ModelSection`. `made_now()` supplies the defaults of `created` and `fingerprint`.
    """
    posterior, terms = found.posterior, found.terms
    log_sds, before = (np.array(jax.tree.leaves(part)) for part in (posterior.coefficient_log_sd(), prior.log_sd))
    said = [Provenance.MEASURED if known else Provenance.UNCALIBRATED for known in is_measured(log_sds, before)]
    rows = enumerate(np.asarray(posterior.factor).tolist())
    factor = [list(map(rounded, row[: place + 1])) for place, row in rows]
    fit = {name: getattr(terms, name) for name in ("converged", "loss", "message", "inseparable")}
    about |= {"fit": FitSummary(**fit, outliers=list(outliers)), "held_out": dict(held_out)}
    return _section(posterior, log_sds, said, found.runs.hull(), factor, noise_floor=noise_floor, **about)


def _section(
    posterior: LatencyPosterior,
    log_sds: Iterable[float],
    provenance: Iterable[Provenance],
    hull: Mapping[str, tuple[float, float]],
    covariance_factor: list[list[float]] | None,
    **about: Any,
) -> ModelSection:
    """Return a model's section that holds a posterior, a domain (`hull`), a covariance factor and further fields."""
    model, values = posterior.model, jax.tree.leaves(posterior.coefficients)
    names = coefficient_names(posterior.coefficients)

    def rows(matrix: Any) -> dict[str, list[float]]:
        return {name: list(map(rounded, row)) for name, row in zip(model.variants, matrix, strict=True)}

    return ModelSection(
        **(made_now() | about),
        model_version=model.version,
        facts={name: np.asarray(fact, float).tolist() for name, fact in posterior.facts.items()},
        coefficients={
            name: FittedCoefficient(value=float(value), log_sd=float(log_sd), unit=unit_of(name), provenance=one)
            for name, value, log_sd, one in zip(names, values, log_sds, provenance, strict=True)
        },
        uncertainty=Uncertainty(
            spread={name: float(sd) for name, sd in zip(model.variants, posterior.spread, strict=True)},
            covariance_factor=covariance_factor,
            correction=rows(posterior.weights),
            alike=None if posterior.alike is None else rows(posterior.alike),
        ),
        domain={name: Range(low=low, high=high) for name, (low, high) in hull.items()},
    )


def population_section(
    fits: Sequence[PosteriorFit],
    measured_ns: Sequence[np.ndarray] | None,
    pool: Callable[[Sequence[LatencyPosterior]], LatencyPrior[Any]],
    facts: Facts,
    machines: Sequence[Machine] = (),
    platform: str = UNKNOWN,
    command: str = "",
) -> ModelSection:
    """Return a section with a prior for another machine, pooled from the fits of a population of machines.

    Args:
        fits: the fit of each machine, or of each device of a fleet.
        measured_ns: for each machine, the measured times of its runs, of shape `[n]`. The times give the prediction
            errors on held-out machines. If `measured_ns` is None, no machine is held out.
        pool: a function that takes the posteriors of machines and returns a prior.
        facts: the assumed facts about how another machine schedules programs.
        machines: descriptions of the machines; empty if the fits belong to a fleet's devices.
        platform: the platform of all machines; "unknown" if the machines differ.
        command: the command that makes the section.
    """
    model, prior = fits[0].posterior.model, pool([fit.posterior for fit in fits])
    spread, speeds = np.full(len(model.variants), ALONE_SPREAD), np.zeros(0)
    if measured_ns is not None and len(fits) > 1:
        judged, logs = range(0, len(fits), -(-len(fits) // MOST_JUDGED)), []
        scatters: list[np.ndarray] = []
        most = max(len(measured_ns[place]) for place in judged)
        for place in judged:
            # The other machines predict this machine. Runs are padded to the same number: one program predicts all.
            one, own_ns = fits[place], np.asarray(measured_ns[place])
            others = pool([other.posterior for other in (*fits[:place], *fits[place + 1 :])])
            rows = np.minimum(np.arange(most), len(own_ns) - 1)
            runs = jax.tree.map(lambda column: np.asarray(column)[rows], one.runs)  # noqa: B023 - used at once
            known = estimate(prior_posterior(model, others, facts=one.posterior.facts), runs)
            scatter = np.asarray(model.scatter(one.runs, one.posterior.facts))
            scatters.append(np.broadcast_to(scatter, len(own_ns)))
            logs.append(np.log(own_ns / np.asarray(known.time_ns)[: len(own_ns)]))
        speeds = np.array([np.median(own) for own in logs])
        errors = np.abs(np.concatenate([own - speed for own, speed in zip(logs, speeds, strict=True)]))
        errors /= np.concatenate(scatters)
        variant = np.concatenate([np.asarray(fits[place].runs.variant) for place in judged])
        for code in np.unique(variant):
            spread[code] = np.quantile(errors[variant == code], COVERED) / COVERED_SDS
    posterior = dataclasses.replace(
        prior_posterior(model, prior, facts=facts),
        coefficients=jax.tree.map(rounded, prior.median),
        spread=np.array([*map(rounded, spread)]),
    )
    log_sds, hulls = [*map(rounded, jax.tree.leaves(prior.log_sd))], [fit.runs.hull() for fit in fits]
    caution = f"Nothing was timed on this machine. Predictions come from {counted(len(fits), 'other machine')}; "
    return _section(
        posterior,
        log_sds,
        [Provenance.UNCALIBRATED] * len(log_sds),
        {name: (min(h[name][0] for h in hulls), max(h[name][1] for h in hulls)) for name in hulls[0]},
        covariance_factor=None,
        noise_floor=None,
        held_out={},
        fit=FitSummary(
            converged=True, loss=0.0, message=f"The fit is pooled from {counted(len(fits), 'fit')}.", inseparable=[]
        ),
        command=command,
        fingerprint=fingerprint_of_device(f"any, by {len(fits)} others", platform),
        cautions=[f"{caution}`rlxjax calibrate` times this machine."],
        population=Population(
            machines=list(machines),
            devices=0 if machines else len(fits),
            speed_log_sd=rounded(np.sqrt((np.sum(speeds**2) + SPEED_LOG_SD**2) / (len(speeds) + 1))),
        ),
    )


def made_now() -> dict[str, Any]:
    """Return a dict of the fields `created` and `fingerprint` for a section that this process makes now."""
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"created": created, "fingerprint": current_fingerprint()}
