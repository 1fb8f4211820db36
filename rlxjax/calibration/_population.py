"""What a population of machines says of one that was never timed: a file beside this one, made of their campaigns."""

import functools
from pathlib import Path as FilePath
from typing import Any, Literal

import jax
import numpy as np

from rlxjax._files import Sealed, Strict, read_json_file
from rlxjax.device._devices import Provenance
from rlxjax.fit import LatencyModel, LatencyPosterior, LatencyPrior, coefficient_names, prior_posterior
from rlxjax.models import BUILT_IN

from ._calibrated import CalibratedModel
from ._fingerprint import Fingerprint
from ._schema import UNITS, Finite, Positive, Range, facts_of

PRIOR_VERSION = 1
#: What a user of the population should know, of each model.
NOT_TIMED = "Nothing of it was timed on this machine, it is what {}; `rlxjax calibrate` times it."
#: The files by the platform of the machines, in this folder.
PRIOR_FILES = {"cpu": "cpu-prior.json"}


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

    schema_version: Literal[1] = PRIOR_VERSION
    created: str
    command: str
    units: dict[str, str] = UNITS
    models: dict[str, PriorSection]


def prior_path(platform: str) -> FilePath | None:
    """Return where the population of a platform's machines is kept; None where there is none."""
    name = PRIOR_FILES.get(platform)
    return None if name is None else FilePath(__file__).with_name(name)


@functools.cache
def population(platform: str) -> PriorFile | None:
    """Return the population of a platform's machines; None where none was timed."""
    path = prior_path(platform)
    if path is None or not path.exists():
        return None
    return read_json_file(path, PriorFile, {"schema_version": PRIOR_VERSION}, ValueError, "install rlxjax again", "one")


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
        model = BUILT_IN.get(name)
        prior = None if model is None else population_prior(model, platform)
        if model is None or prior is None:
            continue
        said = f"{len(section.machines)} known machine{' says' if len(section.machines) == 1 else 's say'}"
        found[name] = CalibratedModel(
            _posterior(model, prior, section),
            dict.fromkeys(section.coefficients, Provenance.UNCALIBRATED),
            {},
            {key: (measured.low, measured.high) for key, measured in section.domain.items()},
            pace_log_sd=section.speed_log_sd,
            cautions=(NOT_TIMED.format(said),),
        )
    return found


def _posterior(model: LatencyModel, prior: LatencyPrior, section: PriorSection) -> LatencyPosterior:
    facts = facts_of(section.facts)
    known = prior_posterior(model, prior, facts=facts)
    spread = np.array([section.spread[name] for name in model.variants])
    return LatencyPosterior(model, facts, known.coefficients, known.weights, known.factor, spread)
