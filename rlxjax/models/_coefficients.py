"""Coefficients of a model: one line states a typical value, its uncertainty and its meaning."""

import dataclasses
import inspect
from typing import Any, TypeVar

import jax

from rlxjax._values import by_value
from rlxjax.fit import LatencyPrior, wide_prior

_Class = TypeVar("_Class", bound=type)

#: Sharpness of the roofline: at 1 compute and memory times add up, at infinity the larger one counts.
ROOFLINE_SHARPNESS = 2


def typical(value: float, says: str, log_sd: float | None = None) -> Any:
    """Return a field with a typical value, its meaning, and the standard deviation of its logarithm."""
    return dataclasses.field(default=value, metadata={"says": says, "log_sd": log_sd})


def coefficients(class_: _Class) -> _Class:
    """Turn a frozen dataclass into a pytree that compares by value; the docstring lists the fields."""
    fields = [f"    {field.name}: {field.metadata['says']}" for field in dataclasses.fields(class_)]
    class_.__doc__ = "\n".join([inspect.cleandoc(class_.__doc__ or ""), "", "Attributes:", *fields])
    return by_value(jax.tree_util.register_dataclass(class_))


def prior_of(class_: Any, log_sd: float | None = None) -> LatencyPrior[Any]:
    """Return the prior of typical coefficients; fields without an own `log_sd` take `log_sd`, else a wide default."""
    known = {field.name: field.metadata["log_sd"] or log_sd for field in dataclasses.fields(class_)}
    return wide_prior(class_(), **{name: sd for name, sd in known.items() if sd is not None})
