"""Meshes of devices that you need not have, and how arguments without a sharding are divided over a mesh."""

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

from rlxjax._tracing import traced

from ._table import TargetDevice

#: The name of an axis that divides both the state and the batch.
_BOTH = "fsdp"


def mesh_of(arguments: Any, mesh: Mapping[str, int] | None = None) -> AbstractMesh | None:
    """Return the mesh of a mapping, or of the shardings in a tree of arguments; None if there is no mesh.

    Raises:
        ValueError: one line; a mesh that is no mapping of names to positive integers, or arguments with another mesh.

    Examples:
        >>> mesh_of((), {"data": 4, "model": 2})
        AbstractMesh('data': 4, 'model': 2, axis_types=(Auto, Auto))
    """
    if mesh is not None:
        pairs = list(mesh.items()) if isinstance(mesh, Mapping) else []
        if not pairs or not all(isinstance(n, str) and n and type(size) is int and size > 0 for n, size in pairs):
            raise ValueError(f"mesh: expected names of axes and their sizes, as {{'data': 8}}, got {mesh!r}")
    shardings = [getattr(leaf, "sharding", leaf) for leaf in jax.tree.leaves(arguments)]
    found: list[Any] = [getattr(of.mesh, "abstract_mesh", of.mesh) for of in shardings if isinstance(of, NamedSharding)]
    for other in found:
        if (wanted := dict(found[0].shape) if mesh is None else dict(mesh)) != dict(other.shape):
            raise ValueError(f"mesh: expected arguments of one mesh, got {wanted} and {dict(other.shape)}")
    if found or mesh is None:
        return found[0] if found else None
    return AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))


def context_for(mesh: AbstractMesh | None, gpu: TargetDevice | None = None) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a mesh resolves each `PartitionSpec`, and in which Pallas writes kernels for a GPU."""
    if gpu is not None:
        sizes, names, types = ((), (), ()) if mesh is None else (mesh.axis_sizes, mesh.axis_names, mesh.axis_types)
        mesh = AbstractMesh(sizes, names, types, abstract_device=AbstractDevice(gpu.kind, gpu.cores, "gpu"))
    return contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh)


def divided(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mapping[str, int] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a function as shapes divided over a mesh; an argument keeps its own `NamedSharding`.

    A tree of arrays is *state*, such as parameters and moments, if the function returns a tree of the same shapes, or
    if the leading dimensions of its arrays differ. Every other argument is part of the *batch*.

    - The last of several axes divides the state: for each array of at least two dimensions, the largest dimension that
      is a multiple of the axis size, and the last of equal dimensions. A mesh of one axis leaves the state whole.
    - The first axis divides the leading dimension of the batch if that dimension is a multiple of the axis size.
    - An axis "fsdp" divides the largest remaining dimension of the state, and, with the first axis, the batch.

    Args:
        fn: the function, jitted or not.
        args: arrays, `jax.ShapeDtypeStruct`s or trees of these; other arguments are returned unchanged.
        kwargs: the same for keyword arguments.
        mesh: the sizes of axes by name; None returns all arguments unchanged.

    Raises:
        ValueError: one line; as for `mesh_of`, or a function that does not trace.

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
    both = [name for name in names if name == _BOTH]
    batch_axes = names[:1] + [name for name in both if name != names[0]]
    state_axes = [*(names[-1:] if len(names) > 1 else ()), *(name for name in both if [name] != names[1:][-1:])]

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
