"""Helpers to define the coefficients of a model. Each field states a typical value, its uncertainty and its meaning."""

import dataclasses
import inspect
from typing import Any, TypeVar

import jax

from rlxjax._values import by_value
from rlxjax.fit import LatencyPrior, wide_prior

_Class = TypeVar("_Class", bound=type)

#: Sharpness of the roofline. At 1 it is the sum of compute and memory time, at infinity the larger of these times.
ROOFLINE_SHARPNESS = 2


def typical(value: float, says: str, log_sd: float | None = None) -> Any:
    """Return a dataclass field for a coefficient: typical value, meaning, and standard deviation of its logarithm."""
    return dataclasses.field(default=value, metadata={"says": says, "log_sd": log_sd})


def coefficients(class_: _Class) -> _Class:
    """Turn a frozen dataclass into a pytree that compares by value, and list the fields in its docstring."""
    fields = [f"    {field.name}: {field.metadata['says']}" for field in dataclasses.fields(class_)]
    class_.__doc__ = "\n".join([inspect.cleandoc(class_.__doc__ or ""), "", "Attributes:", *fields])
    return by_value(jax.tree_util.register_dataclass(class_))


def prior_of(class_: Any, log_sd: float | None = None) -> LatencyPrior[Any]:
    """Return the prior around typical values. A field without its own `log_sd` takes the argument or a wide default."""
    known = {field.name: field.metadata["log_sd"] or log_sd for field in dataclasses.fields(class_)}
    return wide_prior(class_(), **{name: sd for name, sd in known.items() if sd is not None})
