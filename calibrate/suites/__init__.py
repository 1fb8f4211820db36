"""What names on a command line mean: suites, latency models, functions, and arrays of a dtype and shape."""

import contextlib
import importlib
import math
import operator
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path as FilePath
from typing import Any

import jax
import jax.numpy as jnp

from rlxjax.calibration import CalibrationFile
from rlxjax.fit import LatencyModel, Suite
from rlxjax.models import BUILT_IN

#: The entry point group in which installed packages list their suites.
ENTRY_POINTS = "rlxjax.suites"
#: The class of each suite of rlxjax, by the suite's module.
SHIPPED = {"welch": "WelchSuite", "functions": "FunctionsSuite", "collectives": "CollectivesSuite"}
#: The word for each abbreviation in a dtype name: `f32`, and `s32` and `f8e4m3fn` as XLA prints them.
_WORDS = {"bf": "bfloat", "f": "float", "i": "int", "s": "int", "u": "uint", "c": "complex"}
_SHORT = re.compile(r"(bf|[fisuc])(\d+)_?(e\w+)?", re.ASCII)
_SHAPE = re.compile(r"(\w+)\[\s*(\d{1,18}(?:\s*,\s*\d{1,18})*)?\s*\]", re.ASCII)


def suite_of(name: str, models: Sequence[FilePath] = ()) -> Suite:
    """Return a suite by its name. For a name `module:NAME`, import the module, which may be in the current folder."""
    return _installed(name, models) or _suite(named(name, "--suite"), name)


def suite_of_file(name: str, model: str, given: Iterable[Suite] = ()) -> Suite:
    """Return the suite that a file names, if it is a given, shipped or installed suite. Import nothing else."""
    own = [suite for suite in given if model in ("", suite.model.name)]
    if found := own[0] if own else _installed(name):
        return found
    raise ValueError(f"give its suite with --suite module:NAME{f' (the file names the suite {name})' if name else ''}")


def _installed(name: str, models: Sequence[FilePath] = ()) -> Suite | None:
    """Return a suite of rlxjax or of an installed package."""
    if name in SHIPPED:
        made = getattr(importlib.import_module(f".{name}", __package__), SHIPPED[name])
        return made(models) if name == "welch" else made()
    # The current folder holds no installed packages, and none of their modules.
    here, before = os.path.realpath("."), [*sys.path]
    installed = metadata.distributions(path=[folder for folder in before if os.path.realpath(folder) != here])
    for entry in (one for package in installed for one in package.entry_points.select(group=ENTRY_POINTS, name=name)):
        sys.path[:] = filter(None, before)
        try:
            with users_code(f"--suite: the entry point {name} does not load"):
                found = entry.load()
        finally:
            sys.path[:] = before
        return _suite(found, name)
    return None


def _suite(found: Any, name: str) -> Suite:
    found = found() if isinstance(found, type) else found
    if not isinstance(found, Suite):
        raise ValueError(f"--suite: expected a rlxjax.Suite, {name} is of type {type(found).__name__}")
    if not hasattr(found, "model"):
        raise ValueError(f"--suite: {name} has no model")
    return found


def models_of(content: CalibrationFile, given: Sequence[Suite] = ()) -> tuple[list[LatencyModel], list[str]]:
    """Return the models of the sections in a file, and a sentence for each section whose model is unknown."""
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
    """Return a latency model from its name, or from a text `module:NAME`."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name:
        raise ValueError(f"--model: expected one of {', '.join(BUILT_IN)}, or module:NAME, got {name!r}")
    found = named(name, "--model")
    found = found() if isinstance(found, type) else found
    if not hasattr(found, "terms_ns"):
        raise ValueError(f"--model: expected a rlxjax.LatencyModel, {name} is of type {type(found).__name__}")
    return found


def named(text: str, what: str, kind: Any = object) -> Any:
    """Return the object that `module:name` names; refuse another type. The module may be in the current folder."""
    module_name, _, name = text.partition(":")
    if not (module_name and name):
        raise ValueError(f"{what}: expected module:name, got {text!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    with users_code(f"{what}: {module_name} does not import"):
        module = importlib.import_module(module_name)
    with users_code(f"{what}: {module_name} has no {name!r}"):
        found = operator.attrgetter(name)(module)
    if not isinstance(found, kind):
        raise ValueError(f"{what}: expected a function, {text} is of type {type(found).__name__}")
    return found


@contextlib.contextmanager
def users_code(refusal: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:  # noqa: BLE001
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{refusal} ({type(error).__name__}: {reason})") from None


def arguments_of(shapes: list[str], tuple_name: str | None) -> tuple[Any, ...]:
    """Return the arguments that a command line gives, as shapes or as the name of a tuple."""
    if tuple_name is None:
        return tuple(map(shape_of, shapes))
    if shapes:
        raise ValueError("--args: expected either --arg or --args, got both")
    found = named(tuple_name, "--args")
    if callable(found):
        with users_code(f"--args: {tuple_name} fails"):
            found = found()
    if not isinstance(found, tuple):
        raise ValueError(f"--args: expected a tuple from {tuple_name}, got {type(found).__name__}")
    return found


def arguments_of_size(name: str, shapes: list[str], function_name: str | None) -> Callable[[int], tuple[Any, ...]]:
    """Return a function from a size to arguments, made from shapes that name the size, or given by the user."""
    if function_name is None:
        place = re.compile(rf"(?<=[\[,]){re.escape(name)}(?=[\],])")
        if not any(map(place.search, shapes)):
            got = shapes or None
            raise ValueError(f"--largest: expected {name!r} in a shape, as --arg 'f32[{name},1024]', got {got}")
        return lambda size: arguments_of([place.sub(str(size), text) for text in shapes], None)
    found = named(function_name, "--args", Callable)

    def given(size: int) -> tuple[Any, ...]:
        with users_code(f"--args: {function_name} fails for {size}"):
            return tuple(found(size))

    return given


def shape_of(text: str) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype for a text such as `f32[1024,256]`. The text `key[]` means a random key."""
    match = _SHAPE.fullmatch(text.strip())
    shape = tuple(map(int, match[2].split(","))) if match and match[2] else ()
    dtype = None if match is None else _dtype_of(match[1])
    if dtype is None or math.prod(shape) > 2**59:
        what = "a dtype with a shape, for example f32[1024,256] or key[], of at most 2**59 elements"
        raise ValueError(f"--arg: expected {what}, got {text!r}")
    return jax.ShapeDtypeStruct(shape, dtype)


def _dtype_of(name: str) -> Any:
    """Return the dtype for a name that JAX, NumPy or XLA prints; None if JAX has no arrays of that dtype."""
    if name == "key":
        return jax.eval_shape(lambda: jax.random.key(0)).dtype
    short = _SHORT.fullmatch(name)
    spelled = [f"{_WORDS[short[1]]}{short[2]}{f'_{short[3]}' if short[3] else ''}"] if short else []
    for one in (*spelled, "bool" if name == "pred" else name):
        with contextlib.suppress(TypeError):
            dtype = jnp.dtype(one)
            is_number = dtype.kind == "b" or (dtype.kind != "m" and jnp.issubdtype(dtype, jnp.number))
            if is_number and dtype not in ("longdouble", "clongdouble"):
                return dtype
    return None
