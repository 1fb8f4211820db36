"""Coefficients by name: a dictionary or dataclass of floats, units in the names."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rlxjax._values import short


def unit_of(name: str) -> str:
    """Return the unit of a coefficient, as its name says.

    Examples:
        >>> unit_of("upload_bytes_per_ns"), unit_of("host_parallel_gain")
        ('bytes/ns', '1')
    """
    for suffix, unit in (
        ("bytes_per_ns", "bytes/ns"),
        ("flop_per_ns", "FLOP/ns"),
        ("steps_per_ns", "steps/ns"),
        ("_ns", "ns"),
        ("_bytes", "bytes"),
        ("_rows", "rows"),
    ):
        if name.endswith(suffix):
            return unit
    return "1"


def coefficient_names(coefficients: Any) -> list[str]:
    """Return the names of coefficients in the order of their leaves: of a dataclass its fields, of a dict its keys.

    Examples:
        >>> coefficient_names({"b_ns": 1.0, "a_ns": 2.0})
        ['a_ns', 'b_ns']
    """
    paths = jax.tree_util.tree_leaves_with_path(coefficients)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]


def named(coefficients: Any) -> Mapping[str, Any]:
    """Return coefficients by name."""
    return dict(zip(coefficient_names(coefficients), jax.tree.leaves(coefficients), strict=True))


def vector(coefficients: Any) -> Float[Array, "c"]:
    """Return coefficients as one vector, in the order of their names."""
    return jnp.stack([jnp.asarray(leaf, jnp.result_type(float)) for leaf in jax.tree.leaves(coefficients)])


def coefficient_table(coefficients: Any, log_sd: Any, known: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return a table of coefficients for a person: value, unit, how sure it is, and where it comes from, by name."""
    sds = named(log_sd)
    rows = [
        (name, short(value), unit_of(name), f"{float(sds[name]):.2g}", known[name])
        for name, value in named(coefficients).items()
    ]
    return [("coefficient", "value", "unit", "sd of its logarithm", "known from"), *rows]
