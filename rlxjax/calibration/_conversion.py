"""From a posterior, of one machine or of a population, to a section of a calibration file, and back."""

import dataclasses
import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rlxjax._typing import Provenance
from rlxjax._values import FrozenDict
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
    named,
    prior_posterior,
    transferred_prior,
    unit_of,
)
from rlxjax.gate import IoFusionGate

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

#: Standard deviation of the logarithm of a machine's speed that counts as that of one machine more.
SPEED_LOG_SD = 1.0
#: Spread of a model's runs on a machine that was left out, where one machine alone was timed.
ALONE_SPREAD = 0.3
#: Machines that are predicted by all the others at most, evenly spread.
MOST_JUDGED = 32
#: The gate's names are the reference's; its bandwidths carry no unit in them.
GATE_UNITS = {
    field.name: "bytes/ns" if field.name.endswith("_bw") else unit_of(field.name)
    for field in dataclasses.fields(IoFusionGate)
}


def _check_entries(of: str, entries: Mapping[str, Any], units: Mapping[str, str]) -> None:
    """Refuse coefficients of other names or units."""
    for name, unit in units.items():
        if name not in entries:
            raise ValueError(f"{of}.{name} is missing")
        if entries[name].unit != unit:
            raise ValueError(f"{of}.{name}.unit: expected {unit!r}, got {entries[name].unit!r}")
    if unknown := set(entries) - set(units):
        raise ValueError(f"{of}.{min(unknown)} is no coefficient of this schema")


def gate_of(machine: MachineSection | None) -> IoFusionGate | None:
    """Return the measured gate of a machine, if there is one."""
    if machine is None or machine.gate is None:
        return None
    _check_entries("gate", machine.gate, GATE_UNITS)
    gate = IoFusionGate(**{name: entry.value for name, entry in machine.gate.items()})
    if gate.unified_memory not in (0.0, 1.0):
        raise ValueError(f"gate.unified_memory: expected 0 or 1, got {gate.unified_memory}")
    return gate


def facts_of(section: ModelSection) -> dict[str, Any]:
    """Return what a section says of how a machine schedules, lists as arrays."""
    return {name: np.asarray(fact, float) if isinstance(fact, list) else fact for name, fact in section.facts.items()}


def coefficients_of(model: LatencyModel, entries: Mapping[str, FittedCoefficient]) -> tuple[Any, Any]:
    """Return the coefficients of a model, and the standard deviations of their logarithms."""
    structure, own = jax.tree.structure(model.prior.median), [entries[n] for n in coefficient_names(model.prior.median)]
    return structure.unflatten([one.value for one in own]), structure.unflatten([one.log_sd for one in own])


def posterior_of(model: LatencyModel, section: ModelSection) -> LatencyPosterior:
    """Return the posterior that a section holds."""
    if section.model_version != model.version:
        raise ValueError(f"model_version: expected {model.version}, got {section.model_version}")
    uncertainty, facts, count = section.uncertainty, facts_of(section), len(model.variants)
    names = coefficient_names(model.prior.median)
    _check_entries("coefficients", section.coefficients, {name: unit_of(name) for name in names})
    for name, fact in model.facts.items():
        if name not in facts:
            raise ValueError(f"facts.{name} is missing")
        if np.ndim(facts[name]) != np.ndim(fact):
            wanted = "numbers" if np.ndim(fact) else "a number"
            raise ValueError(f"facts.{name}: expected {wanted}, got {section.facts[name]}")
    known = prior_posterior(model, LatencyPrior(*coefficients_of(model, section.coefficients)), facts=facts)
    lengths = {"correction": known.weights.shape[1], "spread": None, "alike": count}
    for name, length in lengths.items():
        entries: Mapping[str, Any] | None = getattr(uncertainty, name)
        if entries is not None and set(entries) != set(model.variants):
            raise ValueError(f"uncertainty.{name}: expected {', '.join(model.variants)}, got {', '.join(entries)}")
        for variant, row in (entries or {}).items() if length is not None else ():
            if len(row) != length:
                what = "weights" if name == "correction" else "correlations"
                raise ValueError(f"uncertainty.{name}.{variant}: expected {length} {what}, got {len(row)}")
    factor, alike = known.factor, None
    if (rows := uncertainty.covariance_factor) is not None:
        if len(rows) != len(factor):
            raise ValueError(f"uncertainty.covariance_factor: expected {len(factor)} rows, got {len(rows)}")
        factor = np.zeros(factor.shape)
        factor[np.tril_indices(len(rows))] = np.concatenate(rows)
    if uncertainty.alike is not None:
        alike = np.array([uncertainty.alike[name] for name in model.variants])
        if np.any(alike != alike.T) or np.any(np.diag(alike) != 1.0):
            raise ValueError("uncertainty.alike: expected a symmetric matrix with ones on its diagonal")
    for name, _ in model.extents(dict.fromkeys(model.inputs, 1.0)):
        if name not in section.domain:
            raise ValueError(f"domain.{name} is missing")
    return dataclasses.replace(
        known,
        weights=np.array([uncertainty.correction[name] for name in model.variants]),
        factor=factor,
        spread=np.array([uncertainty.spread[name] for name in model.variants]),
        alike=alike,
    )


def prior_of(model: LatencyModel, section: ModelSection) -> LatencyPrior[Any]:
    """Return what a section says of a further machine: of a population as it is, of one machine what is transferred."""
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
    """Return a file's section of one model; its domain is the hull of the runs that were timed.

    Args:
        found: by `fit_posterior`.
        prior: what was believed before any timing or micro-benchmark: a coefficient of which more is known by
            now is measured.
        held_out: per variant, the errors of workloads.
        noise_floor: of the timings.
        outliers: phrases of timings far off their prediction.
        **about: what else the section says of itself, see `ModelSection`; made here and now unless given.
    """
    posterior, terms = found.posterior, found.terms
    log_sds, factor = named(posterior.coefficient_log_sd()), np.asarray(posterior.factor).tolist()
    measured = is_measured(np.array(list(log_sds.values())), np.array(jax.tree.leaves(prior.log_sd)))
    entries = {
        name: (value, log_sds[name], Provenance.MEASURED if is_one else Provenance.UNCALIBRATED)
        for (name, value), is_one in zip(named(posterior.coefficients).items(), measured, strict=True)
    }
    hull = found.runs.hull()
    return _section(
        posterior,
        entries,
        hull,
        covariance_factor=[list(map(rounded, row[: place + 1])) for place, row in enumerate(factor)],
        noise_floor=noise_floor,
        held_out=dict(held_out),
        fit=FitSummary(
            converged=terms.converged,
            loss=terms.loss,
            message=terms.message,
            inseparable=terms.inseparable,
            outliers=list(outliers),
        ),
        **about,
    )


def _section(
    posterior: LatencyPosterior,
    entries: Mapping[str, tuple[Any, Any, Provenance]],
    hull: Mapping[str, tuple[float, float]],
    covariance_factor: list[list[float]] | None,
    **about: Any,
) -> ModelSection:
    """Return a section with a posterior's model, facts, correction and spread, of coefficients and a domain."""
    model = posterior.model
    return ModelSection(
        **(made_now() | about),
        model_version=model.version,
        facts={name: np.asarray(fact, float).tolist() for name, fact in posterior.facts.items()},
        coefficients={
            name: FittedCoefficient(value=float(value), log_sd=float(log_sd), unit=unit_of(name), provenance=provenance)
            for name, (value, log_sd, provenance) in entries.items()
        },
        uncertainty=Uncertainty(
            spread={name: float(sd) for name, sd in zip(model.variants, posterior.spread, strict=True)},
            covariance_factor=covariance_factor,
            correction=_rows(model, posterior.weights),
            alike=None if posterior.alike is None else _rows(model, posterior.alike),
        ),
        domain={name: Range(low=low, high=high) for name, (low, high) in hull.items()},
    )


def _rows(model: LatencyModel, rows: Any) -> dict[str, list[float]]:
    return {name: list(map(rounded, row)) for name, row in zip(model.variants, rows, strict=True)}


def population_section(
    fits: Sequence[PosteriorFit],
    measured_ns: Sequence[np.ndarray] | None,
    pool: Callable[[Sequence[LatencyPosterior]], LatencyPrior[Any]],
    facts: Facts,
    machines: Sequence[Machine] = (),
    platform: str = UNKNOWN,
    command: str = "",
) -> ModelSection:
    """Return what machines or devices say of a further one.

    Args:
        fits: of each.
        measured_ns: the times of each one's runs, by which the others are judged, `[n]`; None to judge nothing.
        pool: makes a prior of posteriors.
        facts: how a further machine schedules.
        machines: the machines; of a fleet's devices none.
        platform: of the machines, if it is one.
        command: that makes the section.
    """
    model, prior = fits[0].posterior.model, pool([fit.posterior for fit in fits])
    spread, speeds = np.full(len(model.variants), ALONE_SPREAD), np.zeros(0)
    if measured_ns is not None and len(fits) > 1:
        judged = range(0, len(fits), -(-len(fits) // MOST_JUDGED))
        logs = _left_out_logs(fits, measured_ns, pool, judged)
        speeds = np.array([np.median(own) for own in logs])
        errors = np.abs(np.concatenate([own - speed for own, speed in zip(logs, speeds, strict=True)]))
        variant = np.concatenate([np.asarray(fits[place].runs.variant) for place in judged])
        for code in np.unique(variant):
            spread[code] = np.quantile(errors[variant == code], COVERED) / COVERED_SDS
    medians, log_sds = named(prior.median), named(prior.log_sd)
    hulls = [fit.runs.hull() for fit in fits]
    known_by = f"{len(fits)} known machine{' says' if len(fits) == 1 else 's say'}"
    return _section(
        dataclasses.replace(prior_posterior(model, prior, facts=facts), spread=np.array([*map(rounded, spread)])),
        {name: (rounded(medians[name]), rounded(log_sds[name]), Provenance.UNCALIBRATED) for name in medians},
        {name: (min(h[name][0] for h in hulls), max(h[name][1] for h in hulls)) for name in hulls[0]},
        covariance_factor=None,
        noise_floor=None,
        held_out={},
        fit=FitSummary(converged=True, loss=0.0, message=f"It is pooled from {len(fits)} fits.", inseparable=[]),
        command=command,
        fingerprint=fingerprint_of_device(f"any, by {len(fits)} others", platform),
        cautions=[f"Nothing of it was timed on this machine, it is what {known_by}; `rlxjax calibrate` times it."],
        population=Population(
            machines=list(machines),
            devices=0 if machines else len(fits),
            speed_log_sd=rounded(np.sqrt((np.sum(speeds**2) + SPEED_LOG_SD**2) / (len(speeds) + 1))),
        ),
    )


def _left_out_logs(
    fits: Sequence[PosteriorFit],
    measured_ns: Sequence[np.ndarray],
    pool: Callable[[Sequence[LatencyPosterior]], LatencyPrior[Any]],
    judged: Sequence[int],
) -> list[np.ndarray]:
    """Return the logarithms of some machines' measured times over what all the others predict, `[n]` of each."""
    found, most = [], max(len(measured_ns[place]) for place in judged)
    for place in judged:
        fit, own_ns = fits[place], np.asarray(measured_ns[place])
        prior = pool([other.posterior for other in (*fits[:place], *fits[place + 1 :])])
        known = prior_posterior(fit.posterior.model, prior, facts=fit.posterior.facts)
        # As many runs of each, so that one program predicts them.
        rows = np.minimum(np.arange(most), len(own_ns) - 1)
        runs = jax.tree.map(lambda column: np.asarray(column)[rows], fit.runs)  # noqa: B023 - used at once
        found.append(np.log(own_ns / np.asarray(estimate(known, runs).time_ns)[: len(own_ns)]))
    return found


def made_now() -> dict[str, Any]:
    """Return the time and the machine of a section that is made here."""
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"created": created, "fingerprint": current_fingerprint()}
