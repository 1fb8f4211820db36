"""What a population of machines says of one that was never timed: a file beside this one, made of their campaigns."""

import dataclasses
import functools
from pathlib import Path as FilePath
from typing import Any, Literal

import jax
import numpy as np

from rlxjax._files import Sealed, Strict, read_json_file
from rlxjax.device._devices import Provenance
from rlxjax.fit import LatencyModel, LatencyPrior, coefficient_names, prior_posterior
from rlxjax.models import BUILT_IN

from ._calibrated import CalibratedModel
from ._fingerprint import Fingerprint
from ._schema import UNITS, Finite, Positive, Range, facts_of


class PriorMachine(Strict):
    """A machine of the population, and the samples that were taken of it; of which runner, where that matters.

    `canary_ns`: times of the micro-benchmarks that tell its pace.
    """

    fingerprint: Fingerprint
    canary_ns: dict[str, Positive] = {}
    samples: str
    sha256: str
    runner: int


class PriorCoefficient(Strict):
    """What the population says of one coefficient: its median, and the standard deviation of its logarithm."""

    median: Positive
    log_sd: Positive
    unit: str


class PriorSection(Strict):
    """What the population says of one latency model.

    `correction` is the mean of the machines', `spread` that of a run of a machine that was left out; both by variant.
    `speed_log_sd` is the standard deviation of the logarithm of how fast a machine is, for all its runs alike.
    """

    model_version: int
    machines: list[PriorMachine]
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
    if section is None or section.model_version != model.version:
        return None
    structure = jax.tree.structure(model.prior.median)
    entries = [section.coefficients[name] for name in coefficient_names(model.prior.median)]
    return LatencyPrior(
        structure.unflatten([entry.median for entry in entries]),
        structure.unflatten([entry.log_sd for entry in entries]),
        np.array([section.correction[name] for name in model.variants]),
    )


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
