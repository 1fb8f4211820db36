"""Read and write calibration files section by section, and find the shipped files."""

import functools
import json
import os
import shlex
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path as FilePath
from typing import Any

import jax
from pydantic import ValidationError

from rlxjax._files import (
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

#: The models that `rlxjax calibrate` times.
JOB_MODELS = (WELCH.name, FUNCTIONS.name)


class CalibrationFileError(ValueError):
    """The error of an unusable calibration file; its line names the file, the field and the command to run."""


def default_calibration_path(platform_name: str | None = None) -> FilePath:
    """Return the path of this machine's calibration file for a JAX platform; see `home_folder` for the folder."""
    return home_folder("data", CalibrationFileError) / f"calibration-{platform_name or jax.default_backend()}.json"


def is_there(path: FilePath) -> bool:
    """Return whether a path exists; True if the check fails, so that reading the file gives the reason."""
    try:
        path.stat()
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    return True


def read_calibration_file(path: AnyPath, models: Iterable[LatencyModel] | None = None) -> CalibrationFile:
    """Return the validated content of a calibration file.

    Args:
        path: the file.
        models: the models whose sections are checked; default: the built-in models.

    The warnings and errors are those of `load_calibration`.
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
    """Return the usable sections of a file, sentences about its unusable sections, and sentences about edited sections.

    The arguments and errors are those of `read_calibration_file`. A file without usable sections is accepted.
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
    raw = read_json(path, SCHEMA_VERSION, CalibrationFileError, _mend(path), "a calibration")
    if not isinstance(raw.get("models"), dict):
        raise CalibrationFileError(f"{path}: models: expected one section for each model's name; {_mend(path)}")
    return raw


def _mend(path: str | os.PathLike[str], model: str = "", raw: Any = None) -> str:
    """Return the commands that remake a calibration or a section, from new timings or from the kept samples."""
    named = raw.get("samples") if isinstance(raw, dict) else None
    named = named if isinstance(named, dict) else {}
    suite, file = (own if isinstance(own, str) else "" for own in (named.get("suite"), named.get("file")))
    users = ["--suite", suite] if suite and suite not in BUILT_IN else []
    own = ["--only", suite or model] if (suite or model) in JOB_MODELS else users
    samples = FilePath(path).with_suffix(f".{model or WELCH.name}.samples.jsonl")
    samples = samples.with_name(FilePath(file).name or samples.name)
    again = shlex.join(["rlxjax", "calibrate", *own, "--out", str(path)])
    refit = shlex.join(["rlxjax", "refit", str(samples), *users, "--out", str(path)])
    return f"measure again with `{again}`, or fit the raw timings again with `{refit}`"


def write_sections(
    path: str | os.PathLike[str], models: Mapping[str, ModelSection], machine: MachineSection | None = None
) -> list[str]:
    """Write sections into a calibration file; the file's other sections stay.

    Args:
        path: the file. A missing file is created. A file that is not a calibration of this schema is renamed first.
        models: the new sections by the name of their model.
        machine: the new section of the machine; by default the file's section stays.

    Returns:
        A sentence about a renamed file, or about a file that was edited by hand; an empty list otherwise.

    Raises:
        ValueError: the path is not a file, or another process is writing in the folder.
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
    """Return the machine's section of a calibration file, or None if the section has another fingerprint."""
    try:
        machine = sections_of_file(path)[0].machine
    except CalibrationFileError:
        return None
    return None if machine is None or fingerprint_differences(machine.fingerprint, fingerprint) else machine


def read_prior(path: str | os.PathLike[str], model: LatencyModel) -> tuple[LatencyPrior[Any], str | None]:
    """Read the prior for another machine from a calibration or a fleet's prior; return also the platform if known.

    Raises:
        CalibrationFileError: as `read_calibration_file`, or the file has no section for the model.
    """
    section = read_calibration_file(path, [model]).models.get(model.name)
    if section is None:
        raise CalibrationFileError(f"{path}: models: expected a section {model.name}, got none")
    platform = section.fingerprint.platform
    return prior_of(model, section), None if platform == UNKNOWN else platform


def population_path(platform: str) -> FilePath:
    """Return the path of the prior that ships for a platform."""
    return FilePath(__file__).with_name(f"{platform}-prior.json")


@functools.cache
def population(platform: str) -> CalibrationFile | None:
    """Return the content of the prior that ships for a platform; None if no machine of the platform was timed."""
    path, mend = population_path(platform), "install rlxjax again"
    if not path.exists():
        return None
    content = read_json_file(path, CalibrationFile, SCHEMA_VERSION, CalibrationFileError, mend, "a calibration")
    good = {name: own for name, own in content.models.items() if own.model_version == BUILT_IN[name].version}
    return content.model_copy(update={"models": good})


def population_prior(model: LatencyModel, platform: str | None = None) -> LatencyPrior[Any] | None:
    """Return the shipped prior of a model's coefficients, which is pooled from timed machines.

    Args:
        model: the latency model.
        platform: "cpu", "gpu" or "tpu"; default: JAX's default platform.

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
    """Write a calibration of this machine from fits of one or more latency models.

    `load_calibration(path, models=...)` reads the file. The file's sections of other models stay. The new sections have
    no measured gate and no samples; `rlxjax calibrate` writes both.

    Args:
        path: the file.
        *fits: results of `fit_posterior`, one for each model.

    Raises:
        ValueError: no fit is given, or two fits have the same model; the path is not a file; or another process is
            writing in the folder.

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
