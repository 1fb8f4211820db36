"""What a command line names: functions of modules, and arrays by dtype and shape."""

import contextlib
import importlib
import math
import operator
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

#: Dtypes by the names that JAX prints.
DTYPES = {
    **{f"f{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"{kind}{bits}": f"{word}{bits}" for kind, word in (("i", "int"), ("u", "uint")) for bits in (8, 16, 32, 64)},
    "bf16": "bfloat16",
    "c64": "complex64",
    "c128": "complex128",
    "bool": "bool",
}
_SHAPE = re.compile(r"(\w+)\[\s*(\d{1,18}(?:\s*,\s*\d{1,18})*)?\s*\]", re.ASCII)


def named(text: str, what: str, kind: Any = object) -> Any:
    """Return what `module:name` names; the module is imported, from the current folder too.

    Raises:
        ValueError: no such module or name, a module that does not import, or something of another kind.
    """
    module_name, colon, name = text.partition(":")
    if not (module_name and colon and name):
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
    """Run a user's code, which may raise anything, and may exit."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{refusal} ({type(error).__name__}: {reason})") from None


def arguments_of(shapes: list[str], tuple_name: str | None) -> tuple[Any, ...]:
    """Return the arguments that a command line gives, as shapes or by the name of a tuple."""
    if tuple_name is None:
        return tuple(map(shape_of, shapes))
    if shapes:
        raise ValueError("--args: expected either --arg or --args, got both")
    found = named(tuple_name, "--args")
    if callable(found):
        with users_code(f"--args: {tuple_name} does not return"):
            found = found()
    if not isinstance(found, tuple):
        raise ValueError(f"--args: expected a tuple from {tuple_name}, got {type(found).__name__}")
    return found


def shape_of(text: str) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype that a text such as `f32[1024,256]` says; `key[]` is a random key.

    Raises:
        ValueError: another text.

    Examples:
        >>> shape_of("bf16[8,16]")
        ShapeDtypeStruct(shape=(8, 16), dtype=bfloat16)
    """
    match = _SHAPE.fullmatch(text.strip())
    shape = tuple(map(int, match[2].split(","))) if match and match[2] else ()
    if match is None or match[1] not in (*DTYPES, "key") or math.prod(shape) > 2**59:
        what = "a dtype and a shape, of 2**59 elements at most, as f32[1024,256] or key[]"
        raise ValueError(f"--arg: expected {what}, got {text!r}")
    dtype = jax.eval_shape(lambda: jax.random.key(0)).dtype if match[1] == "key" else jnp.dtype(DTYPES[match[1]])
    return jax.ShapeDtypeStruct(shape, dtype)
