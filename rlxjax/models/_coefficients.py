"""Coefficients of a model: of each its typical value, how well that is known and what it says, in one line."""

import dataclasses
import inspect
from typing import Any, TypeVar

import jax

from rlxjax._values import by_value
from rlxjax.fit import LatencyPrior, wide_prior

_Class = TypeVar("_Class", bound=type)

#: How sharply the larger of compute and memory time decides; 1 would be their sum.
ROOFLINE_SHARPNESS = 2


def typical(value: float, says: str, log_sd: float | None = None) -> Any:
    """Return a field of coefficients: its typical value, what it says, and the standard deviation of its logarithm."""
    return dataclasses.field(default=value, metadata={"says": says, "log_sd": log_sd})


def coefficients(class_: _Class) -> _Class:
    """Make a pytree that is compared by value of a frozen dataclass, whose docstring names its fields."""
    fields = [f"    {field.name}: {field.metadata['says']}" for field in dataclasses.fields(class_)]
    class_.__doc__ = "\n".join([inspect.cleandoc(class_.__doc__ or ""), "", "Attributes:", *fields])
    return by_value(jax.tree_util.register_dataclass(class_))


def prior_of(class_: Any, log_sd: float | None = None) -> LatencyPrior[Any]:
    """Return the prior of typical coefficients, each as known as its field says, else by `log_sd`, or wide."""
    known = {field.name: field.metadata["log_sd"] or log_sd for field in dataclasses.fields(class_)}
    return wide_prior(class_(), **{name: sd for name, sd in known.items() if sd is not None})
