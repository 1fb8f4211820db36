"""Rows that are sharded over the devices of a mesh: each device computes its own."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

#: The axes of a mesh over which rows are sharded, in their order.
Axes = tuple[str, ...]


def is_on_several_devices(where: Any) -> bool:
    """Return whether several devices hold an array by its sharding, None of one in NumPy's memory."""
    return where is not None and len(where.device_set) > 1


def row_axes(where: Any, shape: tuple[Any, ...]) -> Axes:
    """Return the axes of a mesh over which the rows of a signal are sharded, none where each device has all rows.

    Args:
        where: the sharding of the signal.
        shape: `[batch, length]`, or one row `[length]`.

    Raises:
        ValueError: rows whose samples are sharded, or a sharding of several devices without a mesh.

    Examples:
        >>> mesh = jax.sharding.AbstractMesh((4, 2), ("x", "y"))
        >>> row_axes(NamedSharding(mesh, PartitionSpec(("y", "x"))), (8, 96))
        ('y', 'x')
    """
    if not isinstance(where, NamedSharding):
        raise ValueError(
            f"signal: expected one of a single device or with a NamedSharding, got {type(where).__name__}; "
            "use jax.device_put(signal, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axis)))"
        )
    axes = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in where.spec]
    rows, samples = ((), (), *axes, *[()] * (len(shape) - len(axes)))[-2:]
    if math.prod(where.mesh.shape[name] for name in samples) > 1:
        is_divided = (1, *shape)[-2] % math.prod(where.mesh.shape[name] for name in rows or samples) == 0
        better = tuple(split_rows(rows or samples) if is_divided else ())
        raise ValueError(
            f"signal: expected whole rows on each device, got samples sharded over {', '.join(map(repr, samples))}; "
            f"use jax.device_put(signal, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec{better}))"
        )
    return rows


def split_rows(axes: Axes) -> PartitionSpec:
    """Return how an array is sharded whose first axis is that of rows.

    Examples:
        >>> tuple(split_rows(("x",))), tuple(split_rows(()))
        (('x',), ())
    """
    return PartitionSpec(axes) if axes else PartitionSpec()


def rows_of_a_device(where: Any, shape: tuple[Any, ...]) -> Any:
    """Return how many of the rows of a signal a device has; arguments and errors are those of `row_axes`.

    Examples:
        >>> mesh = jax.sharding.AbstractMesh((4, 2), ("x", "y"))
        >>> rows_of_a_device(NamedSharding(mesh, PartitionSpec("x")), (8, 96))
        2
    """
    n_parts = math.prod(where.mesh.shape[name] for name in row_axes(where, shape))
    rows = (1, *shape)[-2]
    return rows if n_parts == 1 else rows // n_parts


def on_each_device(program: Callable[..., jax.Array], mesh: Any, axes: Axes) -> Callable[..., jax.Array]:
    """Return a program of rows over a mesh: each device runs it on its own rows, and has all other arguments."""
    split = split_rows(axes)

    def peaks(signal: jax.Array, *arrays: Any) -> jax.Array:
        specs = split, *[PartitionSpec()] * len(arrays)
        return jax.shard_map(program, mesh=mesh, in_specs=specs, out_specs=split)(signal, *arrays)

    return peaks
