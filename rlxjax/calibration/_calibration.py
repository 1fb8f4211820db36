"""A calibration: what a calibrate job found of one machine, of every latency model that it timed."""

import dataclasses
import functools
import os
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path as FilePath
from typing import Any

import jax

from rlxjax._counts import Columns
from rlxjax._typing import AnyPath
from rlxjax._values import FrozenDict, by_value
from rlxjax.fit import LatencyModel, LatencyPosterior, Timings
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
    """What a calibrate job found on one machine.

    The methods are those of one of its models: the first unless `model=` names another; `of` gives it whole.

    It is a pytree, and may be an argument of a jitted function. What was measured are its leaves. The models and their
    names, provenance and cautions, the fingerprint and the source are static: new values compile nothing anew only
    where all of these are equal. Two files differ in their source, so that a function that is given the calibration of
    another file is compiled again; of one that is given its `posterior`, only the model counts.

    Attributes:
        models: what timings say of each latency model, by its name.
        gate: the IO gate with this machine's measured rates, a pytree of floats; None if they were not measured. It
            scores launches, waits and bytes alone, as the reference does; `compare` has what timed runs say, and
            how surely.
        fingerprint: of the machine and software, as the first model has it; empty of a population's.
        source: where the numbers come from, as a phrase.
    """

    models: Mapping[str, CalibratedModel]
    gate: IoFusionGate | None
    fingerprint: Mapping[str, Any] = dataclasses.field(metadata={"static": True})
    source: str = dataclasses.field(default="a calibration", metadata={"static": True})

    def __post_init__(self) -> None:
        if isinstance(self.models, Mapping):  # the first is asked first, and JAX sorts the names of a plain dictionary
            object.__setattr__(self, "models", OrderedDict(self.models))
        if isinstance(self.fingerprint, Mapping):
            object.__setattr__(self, "fingerprint", FrozenDict(self.fingerprint))

    @classmethod
    def from_file(
        cls, content: CalibrationFile, models: Iterable[LatencyModel] | None = None, path: AnyPath | None = None
    ) -> "Calibration":
        """Build from the content of a calibration file; arguments as in `load_calibration`."""
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
        """Return one calibrated model by its name; the first unless given.

        Raises:
            ValueError: a model that was not timed, or that the calibration was loaded without.
        """
        if not self.models:
            raise ValueError("models: this calibration holds none that is known; see load_calibration(models=)")
        name = next(iter(self.models)) if model is None else model
        if name not in self.models:
            mend = f"; measure it with `rlxjax calibrate --only {name}`" if name in JOB_MODELS else ""
            raise ValueError(f"model: expected one of {', '.join(self.models)}, got {name!r}{mend}")
        return self.models[name]

    @property
    def posterior(self) -> LatencyPosterior:
        """Of the first model."""
        return self.of().posterior

    def updated(self, timings: Timings, probe: Columns | None = None) -> "Calibration":
        """Return the calibration with its model of the timings updated by them; all others stay as they are.

        Args:
            timings: of one of its models, `[n]`.
            probe: which times were taken together, as in `CalibratedModel.updated`.

        Raises:
            ValueError: timings of a model that it has not, or as `CalibratedModel.updated`.

        Examples:
            >>> from rlxjax.fit import prior_posterior
            >>> from rlxjax.models import FFT
            >>> known = Calibration({"fft": CalibratedModel(prior_posterior(FFT), {}, {}, {})}, None, {})
            >>> timings = Timings.checked(FFT, variant="fft", batch=[1, 4096], n_fft=[512, 512], time_ns=[2e4, 9e6])
            >>> bool(known.updated(timings).coefficients.call_ns < known.coefficients.call_ns)
            True
        """
        name = timings.model.name
        return dataclasses.replace(self, models={**self.models, name: self.of(name).updated(timings, probe)})

    def explain(self, *inputs: float, model: str | None = None, **given: float | None) -> Explanation:
        """Return `rlxjax.calibration.explain` of a model."""
        return explain(self.of(model), *inputs, **given)

    predict_function = predict_function


def load_calibration(path: AnyPath | None = None, models: Iterable[LatencyModel] | None = None) -> Calibration:
    """Load a calibration file; by default the one that the calibrate job wrote for JAX's default platform.

    Args:
        path: of the file.
        models: the latency models that the file may speak of, in the order in which they are asked; the
            built-in ones (`rlxjax.models.BUILT_IN`) unless given. Sections of other models are left alone.

    Warns:
        MachineMismatchWarning: a section was made on another machine or with other software.
        UserWarning: a section cannot be used, and is left out, or was edited by hand, and is taken as it stands: one
            line with the field.

    Raises:
        CalibrationFileError: a file that is missing, truncated or of another schema, or of which no section can be
            used, of another version of a model, or with a missing, negative or NaN
            coefficient; one line that names the file, the field and the mend.

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
    """Return what a population of machines says of one that was never timed; None where there is no population.

    Its intervals are wide, and its provenance says that nothing was measured here.

    Args:
        platform: "cpu", "gpu" or "tpu"; JAX's default unless given. There is a population of CPUs.

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
    """Return the calibration that is used where none is given: the saved one of this machine, else the population's.

    It is looked up once a process.

    Args:
        platform: "cpu", "gpu" or "tpu"; JAX's default unless given.

    Returns:
        None on a platform that has neither.

    Warns:
        MachineMismatchWarning: a section of the saved file was made on another machine, and is not used, or with other
            software.
        UserWarning: the saved file, or a section of it, cannot be read, and is not used, or there is no place for one.

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
@jax.ensure_compile_time_eval()  # it may be asked for first inside a program that is being traced, and stays
def _default_calibration(platform: str, path: FilePath | None) -> Calibration | None:
    others = prior_calibration(platform)
    if path is None or not is_there(path):
        return others
    try:
        content, left_out, edited = sections_of_file(path)
    except CalibrationFileError as error:
        warnings.warn(f"{error}; it is not used", stacklevel=3)
        return others
    for said in (*(f"{one}; it is left out" for one in left_out), *edited):
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
