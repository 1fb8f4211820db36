"""Meshes of devices that you do not have, and the way that arguments are divided over a mesh."""

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

from rlxjax._tracing import traced

from ._table import TargetDevice

#: The name of a mesh axis that divides both the state and the batch.
_BOTH = "fsdp"


def mesh_of(arguments: Any, mesh: Mapping[str, int] | None = None) -> AbstractMesh | None:
    """Return the mesh that `mesh` describes, else the mesh of the arguments' shardings, else None.

    Raises:
        ValueError: `mesh` does not map names to positive integers, or the arguments have different meshes.

    Examples:
        >>> mesh_of((), {"data": 4, "model": 2})
        AbstractMesh('data': 4, 'model': 2, axis_types=(Auto, Auto))
    """
    if mesh is not None:
        pairs = list(mesh.items()) if isinstance(mesh, Mapping) else []
        if not pairs or not all(isinstance(n, str) and n and type(size) is int and size > 0 for n, size in pairs):
            raise ValueError(f"mesh: expected the sizes of axes by name, such as {{'data': 8}}, got {mesh!r}")
    shardings = [getattr(leaf, "sharding", leaf) for leaf in jax.tree.leaves(arguments)]
    found: list[Any] = [getattr(of.mesh, "abstract_mesh", of.mesh) for of in shardings if isinstance(of, NamedSharding)]
    for other in found:
        if (wanted := dict(found[0].shape) if mesh is None else dict(mesh)) != dict(other.shape):
            raise ValueError(f"mesh: expected the same mesh for all arguments, got {wanted} and {dict(other.shape)}")
    if found or mesh is None:
        return found[0] if found else None
    return AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))


def context_for(mesh: AbstractMesh | None, gpu: TargetDevice | None = None) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a bare `PartitionSpec` refers to this mesh, and Pallas writes kernels for this GPU."""
    if gpu is not None:
        sizes, names, types = ((), (), ()) if mesh is None else (mesh.axis_sizes, mesh.axis_names, mesh.axis_types)
        mesh = AbstractMesh(sizes, names, types, abstract_device=AbstractDevice(gpu.kind, gpu.cores, "gpu"))
    return contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh)


def divided(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mapping[str, int] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a function as shapes; each shape is divided over a mesh.

    An argument that has a `NamedSharding` keeps it. A tree of several arrays is *state*, such as parameters, if either
    the function returns a tree of the same shapes, or the leading dimensions of the arrays differ. Every other argument
    is part of the *batch*.

    - The first axis of the mesh divides each batch array's leading dimension, if that is a multiple of the axis size.
    - If the mesh has several axes, the last axis divides each state array of at least two dimensions. The axis divides
      the largest dimension that is a multiple of the axis size, and among equally large dimensions the last one.
    - An axis named "fsdp" divides the largest dimension of the state that is still undivided. The first axis and "fsdp"
      together divide the batch.

    Args:
        fn: the function, jitted or not.
        args: arrays, `jax.ShapeDtypeStruct`s or trees of these; other arguments are returned unchanged.
        kwargs: the keyword arguments, of the same types as `args`.
        mesh: the size of each axis of the mesh, by name; None returns all arguments unchanged.

    Raises:
        ValueError: as for `mesh_of`; or the function does not trace.

    Examples:
        >>> import jax.numpy as jnp
        >>> batch, weights = jax.ShapeDtypeStruct((8, 32), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32)
        >>> def step(state, x):
        ...     return jax.tree.map(lambda w: w - x.mean(), state)
        >>> (state, rows), _ = divided(step, ([weights, weights], batch), {}, {"data": 4, "model": 2})
        >>> state[0].sharding.spec, rows.sharding.spec
        (P(None, 'model'), P('data', None))
    """
    over = mesh_of((args, kwargs), mesh)
    if mesh is None or over is None:
        return args, kwargs
    with context_for(over):
        results = traced(fn, args, kwargs).out_info
    returned = [_shapes(part) for part in (results, *(results if isinstance(results, (tuple, list)) else ()))]
    names = list(mesh)
    batch_axes = [name for name in names if name in (names[0], _BOTH)]
    state_axes = [name for name in names[1:][-1:] if name != _BOTH] + [name for name in names if name == _BOTH]

    def placed(leaf: Any, is_state: bool) -> Any:
        if not hasattr(leaf, "dtype") or isinstance(getattr(leaf, "sharding", None), NamedSharding):
            return leaf
        spec: list[Any] = [None] * len(leaf.shape)
        if is_state and len(leaf.shape) > 1:
            for axis in state_axes:
                free = [i for i, size in enumerate(leaf.shape) if spec[i] is None and size and size % mesh[axis] == 0]
                if free:
                    spec[max(free, key=lambda i: (leaf.shape[i], i))] = axis
        elif not is_state and leaf.shape and leaf.shape[0] % math.prod(mesh[axis] for axis in batch_axes) == 0:
            spec[0] = batch_axes[0] if len(batch_axes) == 1 else tuple(batch_axes)
        weak = getattr(leaf, "weak_type", False)
        sharding = NamedSharding(over, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)

    def divide(argument: Any) -> Any:
        shapes = _shapes(argument)
        first = {shape[:1] for shape, _ in shapes[1]}
        is_state = len(shapes[1]) > 1 and (len(first) > 1 or shapes in returned)
        return jax.tree.map(lambda leaf: placed(leaf, is_state), argument)

    return tuple(map(divide, args)), {name: divide(argument) for name, argument in kwargs.items()}


def _shapes(tree: Any) -> tuple[Any, list[Any]]:
    """Return the structure of a tree, and the shapes and dtypes of its arrays."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves if hasattr(leaf, "dtype")]
