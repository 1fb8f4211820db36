"""A calibration: the fitted latency models of one machine."""

import dataclasses
import functools
import os
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path as FilePath
from typing import Any

import jax

from rlxjax._typing import AnyPath
from rlxjax._values import FrozenDict, by_value
from rlxjax.fit import LatencyModel, LatencyPosterior
from rlxjax.gate import IoFusionGate
from rlxjax.models import BUILT_IN

from ._artefact import (
    JOB_MODELS,
    CalibrationFileError,
    default_calibration_path,
    is_there,
    population,
    read_calibration_file,
    sections_of_file,
)
from ._conversion import calibrated_of, gate_of
from ._explanation import Explanation, explain
from ._predict import CalibratedModel, Predictions
from ._sections import MACHINE_FIELDS, CalibrationFile, current_fingerprint, fingerprint_differences, warn_if_elsewhere
from ._target_times import predict_function


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Calibration(Predictions):
    """The latency models of one machine, fitted to the machine's timings.

    Each method uses the first model, unless `model=` names another model. The method `of` returns a model.

    A calibration is a pytree, so you may pass it to a jitted function. The measured values are leaves of the pytree.
    The models' names, provenance and cautions, the fingerprint and the source are static: if one of these changes, JAX
    compiles the function again. The source names the file, so JAX compiles again for the calibration of another file.
    A function that takes only the `posterior` is compiled again only for another model.

    Attributes:
        models: the calibrated models, by name.
        gate: the IO gate with this machine's measured rates, a pytree of floats; None if the rates were not measured.
            Like the reference gate, it scores only launches, waits and bytes. `compare` instead uses a fitted model
            and returns a probability.
        fingerprint: the machine and the software that timed the first model; empty for `prior_calibration`.
        source: a phrase that says where the calibration comes from.
    """

    models: Mapping[str, CalibratedModel]
    gate: IoFusionGate | None
    fingerprint: Mapping[str, Any] = dataclasses.field(metadata={"static": True})
    source: str = dataclasses.field(default="a calibration", metadata={"static": True})

    def __post_init__(self) -> None:
        if isinstance(self.models, Mapping):  # JAX would sort the names of a plain dictionary
            object.__setattr__(self, "models", OrderedDict(self.models))
        if isinstance(self.fingerprint, Mapping):
            object.__setattr__(self, "fingerprint", FrozenDict(self.fingerprint))

    @classmethod
    def from_file(
        cls, content: CalibrationFile, models: Iterable[LatencyModel] | None = None, path: AnyPath | None = None
    ) -> "Calibration":
        """Build a calibration from the content of a file; the other arguments are those of `load_calibration`."""
        given, machine = (BUILT_IN.values() if models is None else models), content.machine
        known = {model.name: model for model in given if model.name in content.models}
        of = [content.models[name] for name in known] or [*content.sections().values()]
        made = f" of {max(one.created for one in of)}" if of else ""
        return cls(
            {name: calibrated_of(model, content.models[name], machine) for name, model in known.items()},
            gate_of(machine),
            fingerprint=of[0].fingerprint.model_dump() if of else {},
            source=f"the calibration{made}{f', {os.fspath(path)}' if path else ''}",
        )

    def of(self, model: str | None = None) -> CalibratedModel:
        """Return the calibrated model with the given name; by default, the first model.

        Raises:
            ValueError: the calibration does not hold the model.
        """
        if not self.models:
            raise ValueError("models: this calibration holds no known model; name yours in load_calibration(models=)")
        name = next(iter(self.models)) if model is None else model
        if name not in self.models:
            mend = f"; measure it with `rlxjax calibrate --only {name}`" if name in JOB_MODELS else ""
            raise ValueError(f"model: expected one of {', '.join(self.models)}, got {name!r}{mend}")
        return self.models[name]

    @property
    def posterior(self) -> LatencyPosterior:
        """The posterior of the first model."""
        return self.of().posterior

    def explain(self, *inputs: float, model: str | None = None, **given: float | None) -> Explanation:
        """Explain which strategy a model picks for a workload, and why; see `rlxjax.calibration.explain`."""
        return explain(self.of(model), *inputs, **given)

    predict_function = predict_function


def load_calibration(path: AnyPath | None = None, models: Iterable[LatencyModel] | None = None) -> Calibration:
    """Load a calibration file; by default, the file that `rlxjax calibrate` writes for JAX's default platform.

    Args:
        path: the path of the file.
        models: the latency models to load; by default, the models in `rlxjax.models.BUILT_IN`. The file's sections
            about other models are ignored. If you name no model later, the first loaded model answers.

    Warns:
        MachineMismatchWarning: a section was made on another machine or with other software.
        UserWarning: a section is unusable and is left out; or a section was edited by hand, but is used.

    Raises:
        CalibrationFileError: the file is missing or truncated, has another schema, or has no usable section. A section
            is unusable if its model has another version, or if a coefficient is missing, negative or NaN. The error
            names the file, the field, and the command that helps.

    Examples:
        >>> load_calibration("missing.json")
        Traceback (most recent call last):
        rlxjax.calibration._artefact.CalibrationFileError: missing.json: no such file; ...
    """
    path = default_calibration_path() if path is None else path
    known = list(BUILT_IN.values() if models is None else models)
    content = read_calibration_file(path, known)
    warn_if_elsewhere(content, path)
    return Calibration.from_file(content, known, path)


@jax.ensure_compile_time_eval()
def prior_calibration(platform: str | None = None) -> Calibration | None:
    """Return the calibration that rlxjax ships for machines that were never timed; it is pooled from timed machines.

    Its prediction intervals are wide, and its provenance says that nothing was measured on this machine.

    Args:
        platform: "cpu", "gpu" or "tpu"; by default, JAX's default platform.

    Returns:
        The calibration; None if no machine of the platform was timed.

    Examples:
        >>> prior_calibration("cpu").pick(8192, 256, 16)
        'fused'
    """
    content = population(jax.default_backend() if platform is None else platform)
    if content is None or not content.models:
        return None
    found = Calibration.from_file(content)
    return dataclasses.replace(found, fingerprint={}, source="no calibration of this machine")


def default_calibration(platform: str | None = None) -> Calibration | None:
    """Return this machine's saved calibration; if no file is saved, return the result of `prior_calibration`.

    Each process reads the saved file once.

    Args:
        platform: "cpu", "gpu" or "tpu"; by default, JAX's default platform.

    Returns:
        The calibration; None if the platform has neither a saved calibration nor a shipped calibration.

    Warns:
        MachineMismatchWarning: a section of the saved file was made on another machine and is not used; or a section
            was made with other software, but is used.
        UserWarning: the saved file or a section of the file is unusable; or there is no folder for the file.

    Examples:
        >>> default_calibration("cpu").pick(8192, 256, 16)
        'fused'
    """
    name = jax.default_backend() if platform is None else platform
    try:
        path = default_calibration_path(name)
    except CalibrationFileError as error:
        warnings.warn(f"{error}; no saved calibration is used", stacklevel=2)
        path = None
    return _default_calibration(name, path)


@functools.lru_cache(maxsize=8)
@jax.ensure_compile_time_eval()  # the first call may happen inside a traced program, and its result is cached
def _default_calibration(platform: str, path: FilePath | None) -> Calibration | None:
    others = prior_calibration(platform)
    if path is None or not is_there(path):
        return others
    try:
        content, left_out, edited = sections_of_file(path)
    except CalibrationFileError as error:
        warnings.warn(f"{error}; the file is not used", stacklevel=3)
        return others
    for said in (*(f"{one}; the section is left out" for one in left_out), *edited):
        warnings.warn(said, stacklevel=3)
    warn_if_elsewhere(content, path)
    here = current_fingerprint()
    own: dict[str, Any] = {
        name: section
        for name, section in content.sections().items()
        if not fingerprint_differences(section.fingerprint, here, MACHINE_FIELDS)
    }
    if not own:
        return others
    content = content.model_copy(update={"machine": own.pop("the machine", None), "models": own})
    saved = Calibration.from_file(content, path=path)
    more = {} if others is None else others.models
    return dataclasses.replace(saved, models={**saved.models, **more, **saved.models})
