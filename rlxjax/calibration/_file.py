"""Calibration files: from a posterior to a section and back, and reading with one line for every mistake."""

import dataclasses
import datetime
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, Literal

import jax
import numpy as np

from rlxjax._files import read_json_file, write_json_file
from rlxjax._values import FrozenDict
from rlxjax.device._devices import Provenance
from rlxjax.device._gate import IoFusionGate
from rlxjax.fit import (
    LatencyModel,
    LatencyPosterior,
    LatencyPrior,
    PosteriorFit,
    coefficient_names,
    is_measured,
    named,
    prior_posterior,
    unit_of,
)
from rlxjax.models import BUILT_IN

from ._calibrated import CalibratedModel
from ._fingerprint import Fingerprint, current_fingerprint, fingerprint_differences
from ._schema import (
    SCHEMA_VERSION,
    UNITS,
    CalibrationFile,
    ErrorSummary,
    FitSummary,
    FittedCoefficient,
    GateCoefficient,
    ModelSection,
    Range,
    Uncertainty,
    facts_of,
    rounded,
)

#: The gate's names are the reference's; its bandwidths carry no unit in them.
GATE_UNITS = {
    field.name: "bytes/ns" if field.name.endswith("_bw") else unit_of(field.name)
    for field in dataclasses.fields(IoFusionGate)
}


class CalibrationFileError(ValueError):
    """A calibration file that cannot be used: one line with the file, the field and the mend."""


def default_calibration_path(platform_name: str | None = None) -> FilePath:
    """Return where the calibrate job writes, and `load_calibration()` looks, for a JAX platform: see `home_folder`."""
    return home_folder("data") / f"calibration-{platform_name or jax.default_backend()}.json"


def home_folder(kind: Literal["data", "cache"]) -> FilePath:
    """Return the folder of `RLXJAX_HOME` where it is set, else that of the user's data or caches.

    Raises:
        CalibrationFileError: a user without a home.
    """
    import platformdirs

    given = os.environ.get("RLXJAX_HOME")
    users = platformdirs.user_data_dir if kind == "data" else platformdirs.user_cache_dir
    try:
        return FilePath(given or users("rlxjax", appauthor=False)).expanduser()
    except RuntimeError:
        got = given or "none, and this user has no home"
        raise CalibrationFileError(f"RLXJAX_HOME: expected a folder, got {got}; set it to one") from None


def is_there(path: FilePath) -> bool:
    """Whether something is at a path, or may be: reading says why that cannot be seen."""
    try:
        path.stat()
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    return True


def read_calibration_file(
    path: str | os.PathLike[str], models: Iterable[LatencyModel] | None = None
) -> CalibrationFile:
    """Return the validated content of a calibration file, which is left as it was.

    Args:
        path: of the file.
        models: whose sections are checked; the built-in ones unless given.

    Raises:
        CalibrationFileError: the file is missing, truncated, of another schema or another version of a model,
            or has a missing, negative or NaN coefficient.
    """
    samples, out = str(FilePath(path).with_suffix(".samples.jsonl")), ["--out", str(path)]
    anew = f"make a new one with `{shlex.join(['rlxjax', 'calibrate', *out])}`"
    refit = f"fit its raw timings again with `{shlex.join(['rlxjax', 'refit', samples, *out])}`"
    content = read_json_file(
        path,
        CalibrationFile,
        {"schema_version": SCHEMA_VERSION},
        CalibrationFileError,
        mend=f"{anew}, or {refit}",
        what="a calibration",
    )
    for model in BUILT_IN.values() if models is None else models:
        section = content.models.get(model.name)
        if section is not None and (problem := _problem(model, section)):
            raise CalibrationFileError(f"{path}: models.{model.name}.{problem}; {refit}")
    if content.gate is not None and (problem := _gate_problem(content.gate)):
        raise CalibrationFileError(f"{path}: gate.{problem}; {anew}")
    return content


def same_machine(path: str | os.PathLike[str], fingerprint: Fingerprint) -> CalibrationFile | None:
    """Return the calibration at a path if it is a good one of this machine and software, so that it may be added to."""
    try:
        known = read_calibration_file(path)
    except CalibrationFileError:
        return None
    return None if fingerprint_differences(known.fingerprint, fingerprint) else known


def _problem(model: LatencyModel, section: ModelSection) -> str | None:
    """Return what keeps a section from being read as this model's, None of nothing."""
    if section.model_version != model.version:
        return f"model_version: expected {model.version}, got {section.model_version}"
    units = {name: unit_of(name) for name in coefficient_names(model.prior.median)}
    if problem := _entries_problem(section.coefficients, units):
        return f"coefficients.{problem}"
    for name, fact in model.facts.items():
        if name not in section.facts:
            return f"facts.{name} is missing"
        if np.ndim(section.facts[name]) != np.ndim(fact):
            return f"facts.{name}: expected {'numbers' if np.ndim(fact) else 'a number'}, got {section.facts[name]}"
    uncertainty, variants = section.uncertainty, set(model.variants)
    for name, entries in (("correction", uncertainty.correction), ("spread", uncertainty.spread)):
        if set(entries) != variants:
            return f"uncertainty.{name}: expected {', '.join(model.variants)}, got {', '.join(entries)}"
    known = prior_posterior(model, facts=facts_of(section.facts))
    for name, weights in uncertainty.correction.items():
        if len(weights) != known.weights.shape[1]:
            return f"uncertainty.correction.{name}: expected {known.weights.shape[1]} weights, got {len(weights)}"
    if len(uncertainty.covariance_factor) != len(known.factor):
        rows = len(uncertainty.covariance_factor)
        return f"uncertainty.covariance_factor: expected {len(known.factor)} rows, got {rows}"
    if missing := [name for name, _ in model.extents(dict.fromkeys(model.inputs, 1.0)) if name not in section.domain]:
        return f"domain.{missing[0]} is missing"
    return None


def _gate_problem(gate: Mapping[str, GateCoefficient]) -> str | None:
    if problem := _entries_problem(gate, GATE_UNITS):
        return problem
    if gate["unified_memory"].value not in (0.0, 1.0):
        return f"unified_memory: expected 0 or 1, got {gate['unified_memory'].value}"
    return None


def _entries_problem(entries: Mapping[str, Any], units: Mapping[str, str]) -> str | None:
    for name, unit in units.items():
        if name not in entries:
            return f"{name} is missing"
        if entries[name].unit != unit:
            return f"{name}.unit: expected {unit!r}, got {entries[name].unit!r}"
    unknown = set(entries) - set(units)
    return f"{min(unknown)} is no coefficient of this schema" if unknown else None


def gate_of(content: CalibrationFile) -> IoFusionGate | None:
    """Return the measured gate of a file, if it holds one."""
    if content.gate is None:
        return None
    return IoFusionGate(**{name: entry.value for name, entry in content.gate.items()})


def calibrated_models(content: CalibrationFile, models: Mapping[str, LatencyModel]) -> dict[str, CalibratedModel]:
    """Return what a file says of each model that is known, in their order."""
    return {
        name: CalibratedModel(
            posterior=posterior_of(model, section),
            provenance={key: entry.provenance for key, entry in section.coefficients.items()},
            held_out={key: summary.model_dump() for key, summary in section.held_out.items()},
            domain={key: (entry.low, entry.high) for key, entry in section.domain.items()},
            noise_floor=section.noise_floor,
            pace_log_sd=0.0 if content.pace is None else content.pace.log_sd,
            cautions=(*section.cautions, *content.cautions),
        )
        for name, model in models.items()
        if (section := content.models.get(name)) is not None
    }


def posterior_of(model: LatencyModel, section: ModelSection) -> LatencyPosterior:
    """Return the posterior that a section holds."""
    median, uncertainty = model.prior.median, section.uncertainty
    values = [section.coefficients[name].value for name in coefficient_names(median)]
    rows = uncertainty.covariance_factor
    factor = np.zeros((len(rows), len(rows)))
    for place, row in enumerate(rows):
        factor[place, : place + 1] = row
    return LatencyPosterior(
        model,
        facts_of(section.facts),
        jax.tree.structure(median).unflatten(values),
        np.array([uncertainty.correction[name] for name in model.variants]),
        factor,
        np.array([uncertainty.spread[name] for name in model.variants]),
    )


def section_of(
    found: PosteriorFit,
    prior: LatencyPrior,
    held_out: Mapping[str, ErrorSummary] = FrozenDict(),
    noise_floor: float | None = None,
    outliers: Sequence[str] = (),
    cautions: Sequence[str] = (),
) -> ModelSection:
    """Return a file's section of one model; its domain is the hull of the runs that were timed.

    Args:
        found: by `fit_posterior`.
        prior: what was believed before any timing or micro-benchmark: a coefficient of which more is known by
            now is measured.
        held_out: per variant, the errors of workloads.
        noise_floor: of the timings.
        outliers: phrases of timings far off their prediction.
        cautions: sentences for users of the predictions.
    """
    posterior, terms = found.posterior, found.terms
    log_sds = named(posterior.coefficient_log_sd())
    measured = is_measured(np.array(list(log_sds.values())), np.array(jax.tree.leaves(prior.log_sd)))
    coefficients = {
        name: FittedCoefficient(
            value=float(value),
            log_sd=float(log_sds[name]),
            unit=unit_of(name),
            provenance=Provenance.MEASURED if is_one else Provenance.UNCALIBRATED,
        )
        for (name, value), is_one in zip(named(posterior.coefficients).items(), measured, strict=True)
    }
    # In the model's order, which a tree of a dictionary does not keep.
    sizes = {name: np.asarray(found.runs.inputs[name], float) for name in posterior.model.inputs}
    return ModelSection(
        model_version=posterior.model.version,
        facts={
            name: np.asarray(fact, float).tolist() if np.ndim(fact) else float(fact)
            for name, fact in posterior.facts.items()
        },
        coefficients=coefficients,
        uncertainty=_uncertainty_of(posterior),
        noise_floor=noise_floor,
        held_out=dict(held_out),
        domain={
            name: Range(low=float(np.min(value)), high=float(np.max(value)))
            for name, value in posterior.model.extents(sizes)
        },
        fit=FitSummary(
            converged=terms.converged,
            loss=terms.loss,
            message=terms.message,
            inseparable=terms.inseparable,
            outliers=list(outliers),
        ),
        cautions=list(cautions),
    )


def _uncertainty_of(posterior: LatencyPosterior) -> Uncertainty:
    variants, factor = posterior.model.variants, np.asarray(posterior.factor)
    return Uncertainty(
        correction={
            name: [rounded(weight) for weight in row]
            for name, row in zip(variants, np.asarray(posterior.weights), strict=True)
        },
        spread={name: float(sd) for name, sd in zip(variants, np.asarray(posterior.spread), strict=True)},
        covariance_factor=[[rounded(number) for number in row[: place + 1]] for place, row in enumerate(factor)],
    )


def save_calibration(path: str | os.PathLike[str], *fits: PosteriorFit) -> None:
    """Write a calibration of this machine: what its timings say of one or more latency models.

    `load_calibration(path, models=...)` reads it. It holds no measured gate, and no samples: the calibrate job's files
    hold both.

    Args:
        path: of the file.
        *fits: by `fit_posterior`, of different models.

    Raises:
        ValueError: no fit, or two of one model.

    Examples:
        >>> import tempfile
        >>> import numpy as np
        >>> from rlxjax import fft_timings, fit_posterior, load_calibration
        >>> batch, n_fft = np.repeat([32, 256, 2048], 4), np.tile([64, 256, 1024, 4096], 3)
        >>> fit = fit_posterior(fft_timings(batch, n_fft, 2e4 + 12.0 * batch * n_fft))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_calibration(f"{folder}/fft.json", fit)
        ...     print(load_calibration(f"{folder}/fft.json").pick(64, 256, model="fft"))
        fft
    """
    names = [found.posterior.model.name for found in fits]
    if not fits or len(set(names)) < len(names):
        raise ValueError(f"fits: expected one at least, of different models, got {', '.join(names) or 'none'}")
    content = CalibrationFile(
        schema_version=SCHEMA_VERSION,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        units=UNITS,
        fingerprint=current_fingerprint(),
        models={name: section_of(found, found.posterior.model.prior) for name, found in zip(names, fits, strict=True)},
    )
    write_json_file(content, path)
