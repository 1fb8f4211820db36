"""What a command line names: functions of modules, and arrays by dtype and shape."""

import importlib
import re
import sys
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
_SHAPE = re.compile(r"(\w+)\[([\d,\s]*)\]")


def named(text: str, what: str) -> Any:
    """Return what `module:name` names; the module is imported, from the current folder too.

    Raises:
        ValueError: no such module or name, or a module that does not import.
    """
    module_name, colon, name = text.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"{what}: expected module:name, got {text!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # noqa: BLE001  (a user's module may raise anything)
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{what}: {module_name} does not import ({type(error).__name__}: {reason})") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{what}: {module_name} has no {name!r}")
        found = getattr(found, part)
    return found


def arguments_of(shapes: list[str], tuple_name: str | None) -> tuple[Any, ...]:
    """Return the arguments that a command line gives, as shapes or by the name of a tuple.

    Raises:
        ValueError: both ways at once, a name that is none, or a shape that cannot be read.
    """
    if tuple_name is None:
        return tuple(map(shape_of, shapes))
    if shapes:
        raise ValueError("--args: expected either --arg or --args, got both")
    found = named(tuple_name, "--args")
    found = found() if callable(found) else found
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
    if match is None or match[1] not in (*DTYPES, "key"):
        raise ValueError(f"--arg: expected a dtype and a shape, as f32[1024,256] or key[], got {text!r}")
    shape = tuple(int(size) for size in match[2].split(",") if size.strip())
    dtype = jax.eval_shape(lambda: jax.random.key(0)).dtype if match[1] == "key" else jnp.dtype(DTYPES[match[1]])
    return jax.ShapeDtypeStruct(shape, dtype)
