"""What a population of machines says of one that was never timed: a file beside this one, made of their campaigns."""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path as FilePath
from typing import Any, Literal

import jax
import numpy as np

from rlxjax._files import Sealed, Strict, read_json, read_json_file
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
    named,
    prior_posterior,
    unit_of,
)
from rlxjax.gate._devices import Provenance
from rlxjax.models import BUILT_IN

from ._calibrated import CalibratedModel
from ._fingerprint import Fingerprint
from ._schema import UNITS, Finite, Positive, Range, facts_of, rounded

#: Standard deviation of the logarithm of a machine's speed that counts as that of one machine more.
SPEED_LOG_SD = 1.0
#: Spread of a model's runs on a machine that was left out, where one machine alone was timed.
ALONE_SPREAD = 0.3
#: Machines that are predicted by all the others at most, evenly spread.
MOST_JUDGED = 32


class PriorCoefficient(Strict):
    """What the population says of one coefficient: its median, and the standard deviation of its logarithm."""

    median: Positive
    log_sd: Positive
    unit: str


class PriorMachine(Strict):
    """A machine of the population, and the samples that were taken of it; of which runner, where that matters.

    `canary_ns`: times of the micro-benchmarks that tell its pace. `coefficients`: what its own timings say, where a
    prediction for such a device starts from them.
    """

    fingerprint: Fingerprint
    canary_ns: dict[str, Positive] = {}
    samples: str
    sha256: str
    runner: int
    coefficients: dict[str, PriorCoefficient] = {}


class PriorSection(Strict):
    """What the population says of one latency model.

    `machines` are those of the population; of a fleet, the `devices` alone are counted.
    `correction` is the mean of the machines', `spread` that of a run of a machine that was left out; both by variant.
    `speed_log_sd` is the standard deviation of the logarithm of how fast a machine is, for all its runs alike.
    """

    model_version: int
    machines: list[PriorMachine]
    devices: int = 0
    facts: dict[str, Finite | list[Finite]]
    coefficients: dict[str, PriorCoefficient]
    correction: dict[str, list[Finite]]
    spread: dict[str, Positive]
    speed_log_sd: Positive
    domain: dict[str, Range]


class PriorFile(Sealed):
    """The whole file; `command` made it."""

    schema_version: Literal[1] = 1
    created: str
    command: str
    units: dict[str, str] = UNITS
    models: dict[str, PriorSection]


def prior_path(platform: str) -> FilePath:
    """Return where the population of a platform's machines is kept, if there is one."""
    return FilePath(__file__).with_name(f"{platform}-prior.json")


@functools.cache
def population(platform: str) -> PriorFile | None:
    """Return the population of a platform's machines; None where none was timed."""
    path = prior_path(platform)
    return read_json_file(path, PriorFile, 1, ValueError, "install rlxjax again", "one") if path.exists() else None


def population_prior(model: LatencyModel, platform: str | None = None) -> LatencyPrior[Any] | None:
    """Return what other machines say of the coefficients of one that was not timed.

    Args:
        model: whose coefficients.
        platform: "cpu", "gpu" or "tpu"; JAX's default unless given.

    Returns:
        None where no machine of the platform was timed for this version of the model.

    Examples:
        >>> from rlxjax.models import WELCH
        >>> population_prior(WELCH, "cpu").median.launch_ns > 0
        True
    """
    known = population(jax.default_backend() if platform is None else platform)
    section = None if known is None else known.models.get(model.name)
    return None if section is None or section.model_version != model.version else section_prior(model, section)


def is_prior_file(path: str | os.PathLike[str]) -> bool:
    """Return whether a JSON file is one of a prior rather than a calibration; one that cannot be read is none."""
    try:
        return "command" in read_json(path, None, ValueError, "", "a prior")
    except ValueError:
        return False


def read_prior(path: str | os.PathLike[str], model: LatencyModel) -> LatencyPrior[Any]:
    """Return what a prior file says of a model's coefficients, as `rlxjax calibrate --samples` writes one.

    Args:
        path: of the file.
        model: whose coefficients.

    Raises:
        ValueError: no whole file of this schema, or none of this version of the model; one line.
    """
    mend = "make a new one with `rlxjax calibrate --samples`"
    section = read_json_file(path, PriorFile, 1, ValueError, mend, "a prior").models.get(model.name)
    if section is None or section.model_version != model.version:
        got = "none" if section is None else f"that of version {section.model_version}"
        raise ValueError(f"{path}: models: expected that of {model.name} {model.version}, got {got}; {mend}")
    return section_prior(model, section)


def section_prior(model: LatencyModel, section: PriorSection) -> LatencyPrior[Any]:
    """Return what a section says of the coefficients and the correction of its model."""
    structure = jax.tree.structure(model.prior.median)
    entries = [section.coefficients[name] for name in coefficient_names(model.prior.median)]
    return LatencyPrior(
        structure.unflatten([entry.median for entry in entries]),
        structure.unflatten([entry.log_sd for entry in entries]),
        np.array([section.correction[name] for name in model.variants]),
    )


def prior_section(
    fits: Sequence[PosteriorFit],
    measured_ns: Sequence[np.ndarray] | None,
    pool: Callable[[Sequence[LatencyPosterior]], LatencyPrior[Any]],
    facts: Facts,
    machines: Sequence[PriorMachine] = (),
) -> PriorSection:
    """Return what machines or devices say of a further one.

    Args:
        fits: of each.
        measured_ns: the times of each one's runs, by which the others are judged, `[n]`; None to judge nothing.
        pool: makes a prior of posteriors.
        facts: how a further machine schedules.
        machines: the machines; of a fleet's devices none.
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
    return PriorSection(
        model_version=model.version,
        machines=list(machines),
        devices=0 if machines else len(fits),
        facts={
            name: np.asarray(fact, float).tolist() if np.ndim(fact) else float(fact) for name, fact in facts.items()
        },
        coefficients={
            name: PriorCoefficient(median=rounded(medians[name]), log_sd=rounded(log_sds[name]), unit=unit_of(name))
            for name in coefficient_names(model.prior.median)
        },
        correction={
            name: list(map(rounded, row))
            for name, row in zip(model.variants, np.asarray(prior.correction), strict=True)
        },
        spread={name: rounded(sd) for name, sd in zip(model.variants, spread, strict=True)},
        speed_log_sd=rounded(np.sqrt((np.sum(speeds**2) + SPEED_LOG_SD**2) / (len(speeds) + 1))),
        domain=_hull(fits),
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


def _hull(fits: Sequence[PosteriorFit]) -> dict[str, Range]:
    """Return the range of each input that some machine timed."""
    hulls = [fit.runs.hull() for fit in fits]
    lows, highs = ({name: [hull[name][end] for hull in hulls] for name in hulls[0]} for end in (0, 1))
    return {name: Range(low=min(lows[name]), high=max(highs[name])) for name in lows}


def population_models(platform: str) -> dict[str, CalibratedModel]:
    """Return what the population of a platform says of each latency model, as if it were a calibration."""
    known, found = population(platform), {}
    for name, section in ({} if known is None else known.models).items():
        model = BUILT_IN[name]
        if (prior := population_prior(model, platform)) is None:
            continue
        known_by = f"{len(section.machines)} known machine{' says' if len(section.machines) == 1 else 's say'}"
        posterior = prior_posterior(model, prior, facts=facts_of(section.facts))
        found[name] = CalibratedModel(
            dataclasses.replace(posterior, spread=np.array([section.spread[name] for name in model.variants])),
            dict.fromkeys(section.coefficients, Provenance.UNCALIBRATED),
            {},
            {key: (measured.low, measured.high) for key, measured in section.domain.items()},
            pace_log_sd=section.speed_log_sd,
            cautions=(f"Nothing of it was timed on this machine, it is what {known_by}; `rlxjax calibrate` times it.",),
        )
    return found
