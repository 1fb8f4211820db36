"""The suites that `rlxjax calibrate` times: those that ship, those of installed packages, and a user's by module."""

from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path as FilePath

from calibrate.named import named, users_code
from rlxjax.calibration import CalibrationFile
from rlxjax.fit import LatencyModel, Suite
from rlxjax.models import BUILT_IN

#: The entry points by which an installed package offers suites.
ENTRY_POINTS = "rlxjax.suites"


def suite_of(name: str, models: Sequence[FilePath] = ()) -> Suite:
    """Return a suite that a command line names: `module:NAME` is imported, from the current folder too."""
    return _installed(name, models) or _checked(named(name, "--suite"), name)


def suite_of_file(name: str, model: str, given: Iterable[Suite] = ()) -> Suite:
    """Return a suite that a file names, which imports nothing: one that was given, that ships or is installed."""
    own = [suite for suite in given if model in ("", suite.model.name)]
    if found := own[0] if own else _installed(name):
        return found
    raise ValueError(f"give its suite with --suite module:NAME{f' (the file calls it {name})' if name else ''}")


def _installed(name: str, models: Sequence[FilePath] = ()) -> Suite | None:
    """Return a suite that ships, or that an installed package offers by this name."""
    if name == "welch":
        from .welch import WelchSuite

        return WelchSuite(models)
    if name == "functions":
        from .functions import FunctionsSuite

        return FunctionsSuite()
    for entry in metadata.entry_points(group=ENTRY_POINTS, name=name):
        with users_code(f"--suite: the entry point {name} does not load"):
            found = entry.load()
        return _checked(found, name)
    return None


def _checked(found: object, name: str) -> Suite:
    found = found() if isinstance(found, type) else found
    if not isinstance(found, Suite):
        raise ValueError(f"--suite: expected a rlxjax.Suite, {name} is of type {type(found).__name__}")
    if not hasattr(found, "model"):
        raise ValueError(f"--suite: {name} names no model")
    return found


def models_of(content: CalibrationFile, given: Sequence[Suite] = ()) -> tuple[list[LatencyModel], list[str]]:
    """Return the models of a file's sections, those of users by their suites, and a sentence for each not found."""
    models: dict[str, LatencyModel] = {**BUILT_IN, **{suite.model.name: suite.model for suite in given}}
    left_out = []
    for name, section in content.models.items():
        if name not in models:
            try:
                models[name] = suite_of_file(section.samples.suite if section.samples else "", name).model
            except ValueError as error:
                left_out.append(f"{name} is left out: {error}")
    return list(models.values()), left_out


def latency_model(name: str) -> LatencyModel:
    """Return a latency model by its name, or by `module:NAME`."""
    if ":" not in name:
        if name not in BUILT_IN:
            raise ValueError(f"--model: expected one of {', '.join(BUILT_IN)}, or module:NAME, got {name!r}")
        return BUILT_IN[name]
    found = named(name, "--model")
    found = found() if isinstance(found, type) else found
    if not hasattr(found, "terms_ns"):
        raise ValueError(f"--model: expected a rlxjax.LatencyModel, {name} is of type {type(found).__name__}")
    return found
