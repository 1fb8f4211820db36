"""Calibration files: from a posterior to a section and back, and reading with one line for every mistake."""

import dataclasses
import datetime
import functools
import json
import os
import shlex
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import jax
import numpy as np
from pydantic import ValidationError

from rlxjax._files import (
    digest_of,
    digest_problem,
    file_to_write,
    first_refusal,
    home_folder,
    locked,
    read_json,
    set_aside,
    write_text_file,
)
from rlxjax._provenance import Provenance
from rlxjax._values import FrozenDict
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
from rlxjax.gate._gate import IoFusionGate
from rlxjax.models import BUILT_IN, FUNCTIONS, WELCH

from ._fingerprint import MACHINE_FIELDS, Fingerprint, current_fingerprint, fingerprint_differences
from ._schema import (
    SCHEMA_VERSION,
    CalibrationFile,
    ErrorSummary,
    FitSummary,
    FittedCoefficient,
    MachineSection,
    ModelSection,
    Range,
    Section,
    Uncertainty,
    facts_of,
    rounded,
)

#: Those that the calibrate job times.
JOB_MODELS = (WELCH.name, FUNCTIONS.name)
#: The gate's names are the reference's; its bandwidths carry no unit in them.
GATE_UNITS = {
    field.name: "bytes/ns" if field.name.endswith("_bw") else unit_of(field.name)
    for field in dataclasses.fields(IoFusionGate)
}


class CalibrationFileError(ValueError):
    """A calibration file that cannot be used: one line with the file, the field and the mend."""


def default_calibration_path(platform_name: str | None = None) -> FilePath:
    """Return where the calibrate job writes, and `load_calibration()` looks, for a JAX platform: see `home_folder`."""
    return home_folder("data", CalibrationFileError) / f"calibration-{platform_name or jax.default_backend()}.json"


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

    Warns:
        UserWarning: a section that cannot be used is left out, or one was edited: one line with the field.

    Raises:
        CalibrationFileError: the file is missing, truncated, of another schema, or no section of these models in it
            can be used: of another version of the model, or with a missing, negative or NaN coefficient.
    """
    known = list(BUILT_IN.values() if models is None else models)
    content, left_out, edited = sections_of_file(path, known)
    if left_out and not any(model.name in content.models for model in known):
        raise CalibrationFileError(left_out[0])
    for said in (*(f"{one}; it is left out" for one in left_out), *edited):
        warnings.warn(said, stacklevel=3)
    return content


def sections_of_file(
    path: str | os.PathLike[str], models: Iterable[LatencyModel] | None = None
) -> tuple[CalibrationFile, list[str], list[str]]:
    """Return what can be used of a calibration file, a sentence for each section that cannot, and for each edited one.

    Arguments and errors are those of `read_calibration_file`; the sections may be none.
    """
    raw, mend = _raw_of(path), _mend(path)
    known = {model.name: model for model in (BUILT_IN.values() if models is None else models)}
    found, left_out, edited = {}, [], []
    for name, own in raw["models"].items():
        check = functools.partial(posterior_of, known[name]) if name in known else None
        found[name], problem = _section_of(ModelSection, own, check)
        if problem and name in known:
            left_out.append(f"{path}: models.{name}.{problem}; {_mend(path, name, own)}")
        elif name in known and (problem := digest_problem(own)):
            edited.append(f"{path}: models.{name}.{problem}")
    machine, problem = _section_of(MachineSection, raw.get("machine", {}), gate_of)
    if problem and raw.get("machine") is not None:
        left_out.append(f"{path}: machine.{problem}; {_mend(path, raw=raw['machine'])}")
    elif machine is not None and (problem := digest_problem(raw["machine"])):
        edited.append(f"{path}: machine.{problem}")
    good = {name: section for name, section in found.items() if section is not None}
    try:
        content = CalibrationFile.model_validate(raw | {"models": good, "machine": machine})
    except ValidationError as reason:
        raise CalibrationFileError(f"{path}: {first_refusal(reason)}; {mend}") from None
    if not (edited or left_out) and (problem := digest_problem(raw)):
        edited.append(f"{path}: {problem}")
    return content, left_out, edited


def _raw_of(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the object in a file of this schema, its sections unchecked."""
    mend = _mend(path)
    raw = read_json(path, SCHEMA_VERSION, CalibrationFileError, mend, "a calibration")
    if not isinstance(raw.get("models"), dict):
        raise CalibrationFileError(f"{path}: models: expected sections by name; {mend}")
    return raw


def _section_of(schema: type[Section], raw: Any, check: Callable[[Any], object] | None) -> tuple[Any, str | None]:
    """Return a section, or what keeps it from being read: its schema, or what is made of it."""
    try:
        section = schema.model_validate(raw)
        if check is not None:
            check(section)
        return section, None
    except ValidationError as reason:
        return None, first_refusal(reason)
    except ValueError as reason:
        return None, str(reason)


def _mend(path: str | os.PathLike[str], model: str | None = None, raw: Any = None) -> str:
    """Return how to make a calibration, or a section of it, anew: from the samples that it names, if it does."""
    named = raw.get("samples") if isinstance(raw, dict) else None
    suite = named.get("suite") if isinstance(named, dict) else None
    users = ["--suite", suite] if isinstance(suite, str) and suite not in BUILT_IN else []
    own = ["--only", suite or model] if (suite or model) in JOB_MODELS else users
    samples = FilePath(path).with_suffix(f".{model or WELCH.name}.samples.jsonl")
    if isinstance(named, dict) and isinstance(named.get("file"), str):
        samples = samples.with_name(FilePath(named["file"]).name or samples.name)
    anew = shlex.join(["rlxjax", "calibrate", *own, "--out", str(path)])
    refit = shlex.join(["rlxjax", "refit", str(samples), *users, "--out", str(path)])
    return f"make a new one with `{anew}`, or fit its raw timings again with `{refit}`"


def write_sections(
    path: str | os.PathLike[str], models: Mapping[str, ModelSection], machine: MachineSection | None = None
) -> list[str]:
    """Put sections into a calibration file, under its folder's lock; all others in it stay as they are.

    Args:
        path: of the file, which is made if there is none. One that is no calibration of this schema is put aside.
        models: sections by the name of their model.
        machine: the machine's; that of the file stays unless given.

    Returns:
        A sentence for what was put aside.

    Raises:
        ValueError: a path that is no file, or another one is at work in the folder.
        OSError: it cannot be written.
    """
    said, known = [], {}
    with locked(path):
        try:
            known = _raw_of(path)
            if problem := digest_problem(known):
                said.append(f"{path}: {problem}. What it holds was kept.")
        except CalibrationFileError as reason:
            if aside := set_aside(file_to_write(path)):
                said.append(f"{reason}. It was kept as {aside}.")
        written = {name: section.model_dump(mode="json") for name, section in models.items()}
        content = CalibrationFile(models={}).model_dump(mode="json") | {"models": known.get("models", {}) | written}
        content["machine"] = known.get("machine") if machine is None else machine.model_dump(mode="json")
        content["digest"] = digest_of(content)
        write_text_file(json.dumps(content, indent=2) + "\n", path)
    return said


def machine_section(path: str | os.PathLike[str], fingerprint: Fingerprint) -> MachineSection | None:
    """Return what a calibration file says of a machine, if it is a good one of this machine and software."""
    try:
        machine = sections_of_file(path)[0].machine
    except CalibrationFileError:
        return None
    return None if machine is None or fingerprint_differences(machine.fingerprint, fingerprint) else machine


def of_this_machine(content: CalibrationFile) -> CalibrationFile:
    """Return a file's content without the sections that were made on another machine."""
    here = current_fingerprint()
    own = {
        name: section
        for name, section in content.sections().items()
        if not fingerprint_differences(section.fingerprint, here, MACHINE_FIELDS)
    }
    return content.model_copy(update={"machine": own.pop("the machine", None), "models": own})


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


def posterior_of(model: LatencyModel, section: ModelSection) -> LatencyPosterior:
    """Return the posterior that a section holds."""
    if section.model_version != model.version:
        raise ValueError(f"model_version: expected {model.version}, got {section.model_version}")
    median, uncertainty, facts = model.prior.median, section.uncertainty, facts_of(section.facts)
    names = coefficient_names(median)
    _check_entries("coefficients", section.coefficients, {name: unit_of(name) for name in names})
    for name, fact in model.facts.items():
        if name not in facts:
            raise ValueError(f"facts.{name} is missing")
        if np.ndim(facts[name]) != np.ndim(fact):
            wanted = "numbers" if np.ndim(fact) else "a number"
            raise ValueError(f"facts.{name}: expected {wanted}, got {section.facts[name]}")
    known, rows = prior_posterior(model, facts=facts), uncertainty.covariance_factor
    by_variant: dict[str, Mapping[str, Any] | None] = {
        name: getattr(uncertainty, name) for name in ("correction", "spread", "alike")
    }
    for name, entries in by_variant.items():
        if entries is not None and set(entries) != set(model.variants):
            raise ValueError(f"uncertainty.{name}: expected {', '.join(model.variants)}, got {', '.join(entries)}")
    for name, weights in uncertainty.correction.items():
        if len(weights) != (count := known.weights.shape[1]):
            raise ValueError(f"uncertainty.correction.{name}: expected {count} weights, got {len(weights)}")
    if len(rows) != len(known.factor):
        raise ValueError(f"uncertainty.covariance_factor: expected {len(known.factor)} rows, got {len(rows)}")
    alike = None
    if uncertainty.alike is not None:
        count = len(model.variants)
        for name, row in uncertainty.alike.items():
            if len(row) != count:
                raise ValueError(f"uncertainty.alike.{name}: expected {count} correlations, got {len(row)}")
        alike = np.array([uncertainty.alike[name] for name in model.variants])
        if np.any(alike != alike.T) or np.any(np.diag(alike) != 1.0):
            raise ValueError("uncertainty.alike: expected a symmetric matrix with ones on its diagonal")
    for name, _ in model.extents(dict.fromkeys(model.inputs, 1.0)):
        if name not in section.domain:
            raise ValueError(f"domain.{name} is missing")
    factor = np.zeros(known.factor.shape)
    factor[np.tril_indices(len(rows))] = np.concatenate(rows)
    return LatencyPosterior(
        model,
        facts,
        jax.tree.structure(median).unflatten([section.coefficients[name].value for name in names]),
        np.array([uncertainty.correction[name] for name in model.variants]),
        factor,
        np.array([uncertainty.spread[name] for name in model.variants]),
        alike,
    )


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
    posterior, terms, variants = found.posterior, found.terms, found.posterior.model.variants
    log_sds, factor = named(posterior.coefficient_log_sd()), np.asarray(posterior.factor).tolist()
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
    return ModelSection(
        **(made_now() | about),
        model_version=posterior.model.version,
        facts={name: np.asarray(fact, float).tolist() for name, fact in posterior.facts.items()},
        coefficients=coefficients,
        uncertainty=Uncertainty(
            correction={name: list(map(rounded, row)) for name, row in zip(variants, posterior.weights, strict=True)},
            spread={name: float(sd) for name, sd in zip(variants, posterior.spread, strict=True)},
            alike=None
            if posterior.alike is None
            else {name: list(map(rounded, row)) for name, row in zip(variants, posterior.alike, strict=True)},
            covariance_factor=[list(map(rounded, row[: place + 1])) for place, row in enumerate(factor)],
        ),
        noise_floor=noise_floor,
        held_out=dict(held_out),
        domain={name: Range(low=low, high=high) for name, (low, high) in found.runs.hull().items()},
        fit=FitSummary(
            converged=terms.converged,
            loss=terms.loss,
            message=terms.message,
            inseparable=terms.inseparable,
            outliers=list(outliers),
        ),
    )


def made_now() -> dict[str, Any]:
    """Return the time and the machine of a section that is made here."""
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"created": created, "fingerprint": current_fingerprint()}


def save_calibration(path: str | os.PathLike[str], *fits: PosteriorFit) -> None:
    """Write a calibration of this machine: what its timings say of one or more latency models.

    `load_calibration(path, models=...)` reads it. Sections of other models in the file stay. It gets no measured gate,
    and no samples: the calibrate job's files hold both.

    Args:
        path: of the file.
        *fits: by `fit_posterior`, of different models.

    Raises:
        ValueError: no fit, or two of one model; a path that is no file, or another one is at work in its folder.

    Examples:
        >>> import tempfile
        >>> import numpy as np
        >>> from rlxjax import Timings, fit_posterior, load_calibration
        >>> from rlxjax.models import FFT
        >>> batch, n_fft = np.repeat([32, 256, 2048], 4), np.tile([64, 256, 1024, 4096], 3)
        >>> time_ns = 2e4 + 12.0 * batch * n_fft
        >>> fit = fit_posterior(Timings.checked(FFT, variant="fft", batch=batch, n_fft=n_fft, time_ns=time_ns))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_calibration(f"{folder}/fft.json", fit)
        ...     print(load_calibration(f"{folder}/fft.json").pick(64, 256, model="fft"))
        fft
    """
    names = [found.posterior.model.name for found in fits]
    if not fits or len(set(names)) < len(names):
        raise ValueError(f"fits: expected one at least, of different models, got {', '.join(names) or 'none'}")
    sections = {name: section_of(found, found.posterior.model.prior) for name, found in zip(names, fits, strict=True)}
    for said in write_sections(path, sections):
        warnings.warn(said, stacklevel=2)
