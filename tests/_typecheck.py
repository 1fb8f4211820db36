"""What the tests check annotations with."""

from collections.abc import Iterable, Sequence
from types import UnionType
from typing import Annotated, Any, Generic, Union, get_args, get_origin, runtime_checkable

from beartype import BeartypeConf, beartype
from beartype.vale import IsInstance

_checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float too


def typecheck(function):
    """Check arguments and result once a function has returned: one that refuses its arguments says so itself.

    jaxtyping asks for two checks of each function, and names no result (Any) in that before the call. Constructors
    are left out: JAX rebuilds pytrees of any leaves.
    """
    hints = function.__annotations__
    if hints.get("return") is Any or function.__name__ == "__init__":
        return function
    hints.update({name: _known(hint) for name, hint in hints.items()})
    return _checked(function)


def _known(hint):
    """Return an annotation that beartype knows, which are not generic named tuples, and protocols only if told."""
    origin, parts = get_origin(hint) or hint, get_args(hint)
    if getattr(origin, "_is_protocol", False):
        return runtime_checkable(origin)
    if isinstance(origin, type) and issubclass(origin, Generic) and hasattr(origin, "_fields"):
        return Annotated[tuple, IsInstance[origin]]
    if origin in (Union, UnionType):
        return Union[tuple(map(_known, parts))]  # noqa: UP007 - of as many as there are
    return origin[tuple(map(_known, parts))] if origin in (tuple, Sequence, Iterable) and parts else hint
