"""Trace a user's function. Arrays and positional numbers become arguments; all other values become constants."""

import contextlib
import inspect
import math
import os
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import jax

from ._values import counted

#: The folder of this package. A profile attributes no work to lines of files in this folder.
PACKAGE = f"{Path(__file__).parent}{os.sep}"


#: The type of functions from `jax.jit`. Other objects with `trace` and `lower` are plain callables.
_Jitted = type(jax.jit(lambda: None))


def is_from_jit(fn: Any) -> bool:
    """Whether a function comes from `jax.jit` itself, not from a wrapper such as `flax.nnx.jit`."""
    return isinstance(fn, _Jitted)


def default_device() -> Any:
    """Return the device on which JAX makes new arrays."""
    asked: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return asked if hasattr(asked, "device_kind") else jax.devices(asked)[0]


def default_platform() -> str:
    """Return the platform of JAX's default device, such as "cpu", "tpu", "cuda" or "rocm"."""
    device = default_device()
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in getattr(device.client, "platform_version", "").lower() else "cuda"


def jitted(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return `fn` as a jitted function, and the arguments to trace it with. A jitted `fn` is returned unchanged."""
    if is_from_jit(fn):
        return fn, args, kwargs
    with contextlib.suppress(Exception):  # `flax.nnx.jit` holds JAX's trace, with the new state
        program = fn.trace(*args, **kwargs).traced  # pyright: ignore[reportFunctionMemberAccess]
        from jax.extend.core import jaxpr_as_fun  # a slow import, which loads Pallas

        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in program.jaxpr.in_avals]
        arguments = enumerate(jax.tree.leaves(program.args_info))
        donated = [place for place, argument in arguments if argument.donated]
        return jax.jit(jaxpr_as_fun(program.jaxpr), donate_argnums=donated), tuple(shapes), {}
    leaves, tree = jax.tree.flatten((args, kwargs))
    positional = len(jax.tree.leaves(args))
    traced = {
        i: leaf
        for i, leaf in enumerate(leaves)
        if hasattr(leaf, "dtype") or (i < positional and isinstance(leaf, (int, float, complex)))
    }

    def of_arrays(*arrays: Any) -> Any:
        mixed = dict(enumerate(leaves)) | dict(zip(traced, arrays, strict=True))
        own_args, own_kwargs = jax.tree.unflatten(tree, mixed.values())
        return of_arrays_only(fn)(*own_args, **own_kwargs)

    return jax.jit(of_arrays), tuple(traced.values()), {}


def of_arrays_only(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a plain function with the signature of `fn`. It raises a `TypeError` if `fn` returns more than arrays."""

    def called(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        for leaf in jax.tree.leaves(result):
            if isinstance(leaf, Coroutine):
                leaf.close()
            try:
                jax.typeof(leaf)
            except TypeError:
                if not hasattr(leaf, "__jax_array__"):
                    raise TypeError(f"expected arrays as its result, got {type(leaf).__name__!r}") from None
        return result

    with contextlib.suppress(Exception):  # a builtin function has no signature; a user's object may raise anything
        called.__signature__ = inspect.signature(fn)  # pyright: ignore[reportFunctionMemberAccess]
    return called


def name_of(fn: object, default: str | None = None) -> str:
    """Return the name of a callable; if it has none, return `default`, or else the name of its type."""
    try:
        name = fn.__name__  # pyright: ignore[reportAttributeAccessIssue]
    except Exception:  # noqa: BLE001  (a user's object may raise anything)
        name = None
    return name if isinstance(name, str) else type(fn).__name__ if default is None else default


def wrong_count(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return a sentence such as "normalise takes 1 argument, got 2"; empty if the call fits the signature."""
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except TypeError as error:
        name, own = name_of(fn), inspect.Parameter
        kinds = [(each.kind, each.default is own.empty) for each in inspect.signature(fn).parameters.values()]
        needed = [is_needed for kind, is_needed in kinds if kind in (own.POSITIONAL_ONLY, own.POSITIONAL_OR_KEYWORD)]
        most, least, is_open = len(needed), sum(needed), own.VAR_POSITIONAL in dict(kinds)
        if kwargs or least <= len(args) <= (math.inf if is_open else most):  # a keyword argument is wrong
            return f"{name} does not take these arguments: {error}"
        start = "at least " if is_open else f"{least} to " if least < most else ""
        return f"{name} takes {start}{counted(least if is_open else most, 'argument')}, got {len(args)}"
    except Exception:  # noqa: BLE001  (a builtin function has no signature, and a user's object may raise anything)
        pass
    return ""


@contextlib.contextmanager
def refusals_in_one_line(fn: Callable[..., Any], *call: Any) -> Iterator[None]:
    """Turn an exception that a traced function raises into a `ValueError` with a message of one line."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  (a user's function may raise anything)
        if isinstance(error, TypeError) and call and (wrong := wrong_count(fn, *call)):
            raise ValueError(f"fn: {wrong}") from error
        name = name_of(fn)
        reason = str(error).strip().partition("\n")[0]
        if "cuDNN not found" in reason:
            reason += "; JAX needs a local GPU for cuDNN; use another implementation"
        raised = f"{name} raised {type(error).__name__}: {reason}"
        raise ValueError(f"fn: expected a function that JAX traces, but {raised}") from error


@contextlib.contextmanager
def configured(name: str, value: Any) -> Iterator[None]:
    """Set an option of `jax.config` inside a `with` block."""
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


def traced(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Trace a function as `jax.jit(fn).trace` does; raise a `ValueError` of one line if tracing fails."""
    with refusals_in_one_line(fn, args, kwargs):
        function, given, named = jitted(fn, args, kwargs)
        return function.trace(*given, **named)
