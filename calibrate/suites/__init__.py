"""The suites that `rlxjax calibrate` times, by name, and those of users, by module and name."""

from collections.abc import Sequence
from pathlib import Path as FilePath

from calibrate.named import named
from rlxjax.calibration import CalibrationFile
from rlxjax.fit import LatencyModel, Suite
from rlxjax.models import BUILT_IN


def suite_of(name: str, models: Sequence[FilePath] = ()) -> Suite:
    """Return a suite: one that ships, or `module:NAME`, imported from the current folder too.

    Args:
        name: of the suite.
        models: files of learned FFTs, for the suite of Welch peaks.

    Raises:
        ValueError: no such suite, one that does not import, or a file that holds no model.
    """
    if name == "welch":
        from .welch import WelchSuite

        return WelchSuite(models)
    if name == "functions":
        from .functions import FunctionsSuite

        return FunctionsSuite()
    found = named(name, "--suite")
    found = found() if isinstance(found, type) else found
    if not isinstance(found, Suite):
        raise ValueError(f"--suite: expected a rlxjax.Suite, {name} is of type {type(found).__name__}")
    if not hasattr(found, "model"):
        raise ValueError(f"--suite: {name} names no model")
    return found


def models_of(content: CalibrationFile) -> tuple[list[LatencyModel], list[str]]:
    """Return the models of a file's sections, those of users by their suites, and a sentence for each not found."""
    models: dict[str, LatencyModel] = {**BUILT_IN}
    left_out = []
    for name, section in content.models.items():
        if name not in models:
            try:
                models[name] = suite_of("" if section.samples is None else section.samples.suite).model
            except ValueError as error:
                left_out.append(f"{name} is left out: {error}; run this from the folder of its suite")
    return list(models.values()), left_out


def latency_model(name: str) -> LatencyModel:
    """Return a latency model by its name, or by `module:NAME`.

    Raises:
        ValueError: no such model, or something else.
    """
    if ":" not in name:
        if name not in BUILT_IN:
            raise ValueError(f"--model: expected one of {', '.join(BUILT_IN)}, or module:NAME, got {name!r}")
        return BUILT_IN[name]
    found = named(name, "--model")
    found = found() if isinstance(found, type) else found
    if not hasattr(found, "terms_ns"):
        raise ValueError(f"--model: expected a rlxjax.LatencyModel, {name} is of type {type(found).__name__}")
    return found
