"""Coefficients of a model: each with its typical value and what it says, in one line."""

import dataclasses
import inspect
from typing import Any, TypeVar

import jax

from rlxjax._values import by_value

_Class = TypeVar("_Class", bound=type)

#: How sharply the larger of compute and memory time decides; 1 would be their sum.
ROOFLINE_SHARPNESS = 2


def typical(value: float, says: str) -> Any:
    """Return a field of coefficients: its typical value, and what it says of a machine."""
    return dataclasses.field(default=value, metadata={"says": says})


def coefficients(class_: _Class) -> _Class:
    """Make a pytree that is compared by value of a frozen dataclass, whose docstring names its fields."""
    fields = [f"    {field.name}: {field.metadata['says']}" for field in dataclasses.fields(class_)]
    class_.__doc__ = "\n".join([inspect.cleandoc(class_.__doc__ or ""), "", "Attributes:", *fields])
    return by_value(jax.tree_util.register_dataclass(class_))
