"""Read and write calibration files, which hold a section for each latency model, and find the files that ship."""

import functools
import json
import os
import shlex
import warnings
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path as FilePath
from typing import Any

import jax
from pydantic import ValidationError

from rlxjax._files import (
    check_version,
    digest_of,
    digest_problem,
    file_to_write,
    first_refusal,
    home_folder,
    locked,
    read_json,
    read_json_file,
    set_aside,
    write_text_file,
)
from rlxjax._typing import AnyPath
from rlxjax.fit import LatencyModel, LatencyPrior, PosteriorFit
from rlxjax.models import BUILT_IN, FUNCTIONS, WELCH

from ._conversion import gate_of, posterior_of, prior_of, section_of
from ._sections import (
    SCHEMA_VERSION,
    UNKNOWN,
    CalibrationFile,
    Fingerprint,
    MachineSection,
    ModelSection,
    fingerprint_differences,
)

#: The names of the latency models whose programs `rlxjax calibrate` times.
JOB_MODELS = (WELCH.name, FUNCTIONS.name)


class CalibrationFileError(ValueError):
    """The error for an unusable calibration file. The message names the file, the field and the command that helps."""


def default_calibration_path(platform_name: str | None = None) -> FilePath:
    """Return the path of this machine's calibration file for a JAX platform; the folder comes from `home_folder`."""
    return home_folder("data", CalibrationFileError) / f"calibration-{platform_name or jax.default_backend()}.json"


def is_there(path: FilePath) -> bool:
    """Return whether a path exists. If the check fails, return True, so that reading the file gives the reason."""
    try:
        path.stat()
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    return True


def read_calibration_file(path: AnyPath, models: Iterable[LatencyModel] | None = None) -> CalibrationFile:
    """Return the validated content of a calibration file.

    Args:
        path: the path of the file.
        models: the latency models whose sections are checked; by default, the built-in models.

    The errors, and the warnings about sections, are those of `load_calibration`.
    """
    known = list(BUILT_IN.values() if models is None else models)
    content, left_out, edited = sections_of_file(path, known)
    if left_out and not any(model.name in content.models for model in known):
        raise CalibrationFileError(left_out[0])
    for said in (*(f"{one}; the section is left out" for one in left_out), *edited):
        warnings.warn(said, stacklevel=3)
    return content


def sections_of_file(
    path: str | os.PathLike[str], models: Iterable[LatencyModel] | None = None
) -> tuple[CalibrationFile, list[str], list[str]]:
    """Return a file's usable content, sentences about unusable sections, and sentences about sections edited by hand.

    The arguments and errors are those of `read_calibration_file`, but a file without usable sections is accepted.
    """
    raw, known = _raw_of(path), {model.name: model for model in (BUILT_IN.values() if models is None else models)}
    found: dict[str, Any] = {}
    left_out, edited = [], []
    sections: dict[str, Any] = raw["models"] | {"": raw.get("machine")}  # "" stands for the machine
    for name, own in sections.items():
        place, is_asked = f"models.{name}" if name else "machine", not name or name in known
        if not name and own is None:
            continue
        try:
            section: Any = (ModelSection if name else MachineSection).model_validate(own)
            if is_asked:
                posterior_of(known[name], section) if name else gate_of(section)
        except ValueError as reason:
            said = first_refusal(reason) if isinstance(reason, ValidationError) else reason
            left_out += [f"{path}: {place}.{said}; {_mend(path, name, own)}"] if is_asked else []
            continue
        found[name] = section
        if is_asked and (problem := digest_problem(own)):
            edited.append(f"{path}: {place}: {problem}")
    try:
        content = CalibrationFile.model_validate(raw | {"machine": found.pop("", None), "models": found})
    except ValidationError as reason:
        raise CalibrationFileError(f"{path}: {first_refusal(reason)}; {_mend(path)}") from None
    if not (edited or left_out) and (problem := digest_problem(raw)):
        edited.append(f"{path}: {problem}")
    return content, left_out, edited


def _raw_of(path: str | os.PathLike[str]) -> dict[str, Any]:
    raw = read_json(path, None, CalibrationFileError, _mend(path), "a calibration")
    if raw.keys().isdisjoint(("schema_version", "models", "digest")):
        expected = "expected a calibration, got other JSON; give a file that `rlxjax calibrate` wrote"
        raise CalibrationFileError(f"{path}: {expected}")
    check_version(path, raw, SCHEMA_VERSION, CalibrationFileError, _mend(path))
    if not isinstance(raw.get("models"), dict):
        raise CalibrationFileError(f"{path}: models: expected one section for each model's name; {_mend(path)}")
    return raw


def _mend(path: str | os.PathLike[str], model: str = "", raw: Any = None) -> str:
    """Return a phrase with commands that make a section again: from new timings, or from samples that are there."""
    named = raw.get("samples") if isinstance(raw, dict) else None
    named = named if isinstance(named, dict) else {}
    suite, file = (own if isinstance(own, str) else "" for own in (named.get("suite"), named.get("file")))
    users = ["--suite", suite] if suite and suite not in BUILT_IN else []
    own = ["--only", suite or model] if (suite or model) in JOB_MODELS else users
    samples = FilePath(path).with_suffix(f".{model or WELCH.name}.samples.jsonl")
    samples = samples.with_name(FilePath(file).name or samples.name)
    again = shlex.join(["rlxjax", "calibrate", *own, "--out", str(path)])
    refit = shlex.join(["rlxjax", "refit", str(samples), *users, "--out", str(path)])
    or_refit = f", or fit the raw timings again with `{refit}`" if os.path.isfile(samples) else ""
    return f"measure again with `{again}`{or_refit}"


def write_sections(
    path: str | os.PathLike[str], models: Mapping[str, ModelSection], machine: MachineSection | None = None
) -> list[str]:
    """Write sections into a calibration file; the file's other sections stay.

    Args:
        path: the file. A missing file is created. A file that is not a calibration of this schema is renamed.
        models: the new sections about latency models, by the name of the model.
        machine: the new section about the machine; by default, the file's section about the machine stays.

    Returns:
        A list with one sentence if the file was renamed or had been edited by hand; otherwise an empty list.

    Raises:
        ValueError: something other than a file is at the path, or another process is writing in the folder.
        OSError: the file cannot be written.
    """
    said, known = [], {}
    with locked(path):
        try:
            known = _raw_of(path)
            if problem := digest_problem(known):
                said.append(f"{path}: {problem}. The other sections were kept.")
        except CalibrationFileError as reason:
            if aside := set_aside(file_to_write(path)):
                said.append(f"{reason}. The file was kept as {aside}.")
        written = {name: section.model_dump(mode="json") for name, section in models.items()}
        content = CalibrationFile(models={}).model_dump(mode="json") | {"models": known.get("models", {}) | written}
        content["machine"] = known.get("machine") if machine is None else machine.model_dump(mode="json")
        content["digest"] = digest_of(content)
        write_text_file(json.dumps(content, indent=2) + "\n", path)
    return said


def machine_section(path: str | os.PathLike[str], fingerprint: Fingerprint) -> MachineSection | None:
    """Return a file's section about the machine; None if the file has no such section with the given fingerprint."""
    try:
        machine = sections_of_file(path)[0].machine
    except CalibrationFileError:
        return None
    return None if machine is None or fingerprint_differences(machine.fingerprint, fingerprint) else machine


def read_prior(path: str | os.PathLike[str], model: LatencyModel) -> tuple[LatencyPrior[Any], str | None]:
    """Return the prior that a calibration file or a fleet's file gives for another machine, and the platform if known.

    Raises:
        CalibrationFileError: as in `read_calibration_file`, or the file has no section for the model.
    """
    section = read_calibration_file(path, [model]).models.get(model.name)
    if section is None:
        raise CalibrationFileError(f"{path}: models: expected a section {model.name}, got none")
    platform = section.fingerprint.platform
    return prior_of(model, section), None if platform == UNKNOWN else platform


def population_path(platform: str) -> FilePath:
    """Return the path of the file with the prior that rlxjax ships for a platform."""
    return FilePath(__file__).with_name(f"{platform}-prior.json")


@functools.cache
def population(platform: str) -> CalibrationFile | None:
    """Return the content of a platform's file at `population_path`; None if no machine of the platform was timed."""
    path, mend = population_path(platform), "install rlxjax again"
    if not resources.files(__package__ or "").joinpath(path.name).is_file():
        return None
    content = read_json_file(path, CalibrationFile, SCHEMA_VERSION, CalibrationFileError, mend, "a calibration")
    good = {name: own for name, own in content.models.items() if own.model_version == BUILT_IN[name].version}
    return content.model_copy(update={"models": good})


def population_prior(model: LatencyModel, platform: str | None = None) -> LatencyPrior[Any] | None:
    """Return the prior that rlxjax ships for a model's coefficients; the prior is pooled from timed machines.

    Args:
        model: the latency model.
        platform: "cpu", "gpu" or "tpu"; by default, JAX's default platform.

    Returns:
        The prior; None if no machine of the platform was timed for this version of the model.

    Examples:
        >>> from rlxjax.models import WELCH
        >>> population_prior(WELCH, "cpu").median.launch_ns > 0
        True
    """
    known = population(jax.default_backend() if platform is None else platform)
    section = None if known is None else known.models.get(model.name)
    return None if section is None or section.model_version != model.version else prior_of(model, section)


def save_calibration(path: str | os.PathLike[str], *fits: PosteriorFit) -> None:
    """Write a calibration file of this machine from the fits of one or more latency models.

    `load_calibration(path, models=...)` reads the file. If the file exists, its sections about other models stay. The
    new sections contain no measured IO gate and no raw samples; `rlxjax calibrate` writes both.

    Args:
        path: the path of the file.
        *fits: results of `fit_posterior`, one for each model.

    Raises:
        ValueError: no fit is given; two fits have the same model; something other than a file is at the path; or
            another process is writing in the folder.

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
        raise ValueError(f"fits: expected one fit for each of one or more models, got {', '.join(names) or 'none'}")
    sections = {name: section_of(found, found.posterior.model.prior) for name, found in zip(names, fits, strict=True)}
    for said in write_sections(path, sections):
        warnings.warn(said, stacklevel=2)
