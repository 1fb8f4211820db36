"""Give `==`, `hash` and a one-line `repr` to records that hold arrays."""

import dataclasses
import weakref
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, TypeVar

import jax
import numpy as np

from ._checks import is_traced

#: The most characters in the `repr` of an object, and in a string that the `repr` shows.
MOST_CHARACTERS, MOST_OF_A_TEXT = 300, 90
#: The most entries of a mapping or sequence that a `repr` shows.
MOST_ENTRIES = 5

_Class = TypeVar("_Class", bound=type)
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def by_value(class_: _Class) -> _Class:
    """Add `==`, `hash` and `repr` to a record. Arrays are equal if their shapes and elements are; NaN equals NaN."""
    class_.__eq__, class_.__ne__, class_.__hash__ = _equal, _differs, _hash_of  # pyright: ignore
    class_.__repr__ = short_repr  # pyright: ignore[reportAttributeAccessIssue]
    return class_


def short_repr(self: object) -> str:
    """Return the class and the fields in one line; arrays show their type and shape, and long values are shortened."""
    fields = [f"{name}={_short(value)}" for name, value in _fields(self, "repr").items()]
    text = f"{type(self).__name__}({', '.join(fields)})"
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 4]}...)"


class FrozenDict(dict[_Key, _Value]):
    """A dictionary that cannot change, so it can be hashed and can be a static field of a pytree."""

    def __init__(self, items: Mapping[_Key, _Value] | Iterable[tuple[_Key, _Value]] = ()) -> None:
        super().__init__({name: _frozen(value) for name, value in dict(items).items()})

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("this mapping is read-only; make a new object instead")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse  # pyright: ignore


class Handle(weakref.ref):
    """A weak reference that serves as the key of a cache. It equals only itself, and does not keep its object alive."""

    __slots__ = ()
    __eq__, __hash__ = object.__eq__, object.__hash__


#: The handle (a weak reference) of each living object, by the object's `id`.
_handles: dict[int, Handle] = {}


def handle(value: Any) -> Any:
    """Return the handle of an object. None and strings are returned unchanged. Some types raise a `TypeError`."""
    if value is None or isinstance(value, str):
        return value
    number = id(value)
    known = _handles.get(number)
    if known is None or known() is not value:

        def forget(dead: Handle, handles: dict[int, Handle] = _handles) -> None:  # globals are gone when Python ends
            if handles.get(number) is dead:
                del handles[number]

        known = _handles[number] = Handle(value, forget)
    return known


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return FrozenDict(value)
    return tuple(value) if isinstance(value, list) else value


def _fields(value: object, wanted: str = "compare") -> dict[str, Any]:
    """Return a record's fields by name. `wanted` is "compare" for the fields in `==`, "repr" for the fields to show."""
    if not dataclasses.is_dataclass(value):
        return value._asdict()  # pyright: ignore[reportAttributeAccessIssue]
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if getattr(field, wanted)}


def _equal(self: object, other: object) -> Any:
    if type(other) is not type(self):
        # `NotImplemented` would make Python compare plain tuples, which fails for arrays.
        return False if isinstance(self, tuple) else NotImplemented
    (mine, structure), (others, structure_of_other) = (jax.tree.flatten(_fields(one)) for one in (self, other))
    if self is other or structure != structure_of_other:
        return self is other
    if is_traced(*mine, *others):
        problem = "`==` needs concrete values, got traced values; compare outside of the traced function"
        raise TypeError(f"{type(self).__name__}: {problem}")
    return all(map(_same, mine, others))


def _differs(self: object, other: object) -> Any:
    equal = _equal(self, other)
    return equal if equal is NotImplemented else not equal


def _same(one: Any, other: Any) -> bool:
    if _is_array(one) or _is_array(other):
        if np.shape(one) != np.shape(other):
            return False
        one, other = np.asarray(one), np.asarray(other)
    return one is other or bool(np.all((one == other) | ((one != one) & (other != other))))  # NaN differs from itself


def _hash_of(self: object) -> int:
    leaves, structure = jax.tree.flatten(_fields(self))
    return hash((type(self), structure, tuple(map(_mark, leaves))))


def _mark(leaf: Any) -> Any:
    """Return what `hash` uses of a leaf: a number itself, the shape of an array, or the keys of a mapping."""
    if _is_array(leaf):
        if leaf.shape or is_traced(leaf):
            return leaf.shape
        leaf = leaf.item()
    if isinstance(leaf, Mapping):
        return frozenset(leaf)
    return None if leaf != leaf else leaf  # each NaN object has another hash


def _is_array(value: object) -> bool:
    return isinstance(value, (np.ndarray, np.generic, jax.Array))


def counted(count: int, one: str, several: str | None = None) -> str:
    """Return a number with its noun: `1 launch`, `1,200 calls`."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def _short(value: Any) -> str:
    if _is_array(value):
        if not np.ndim(value) and not is_traced(value):
            return _short(value.item())
        return f"{'traced ' * is_traced(value)}{value.dtype}[{','.join(map(str, np.shape(value)))}]"
    if isinstance(value, (str, int, float, complex)) or value is None:
        text = f"{value:.6g}" if isinstance(value, float) else repr(str(value) if isinstance(value, str) else value)
        return text if len(text) <= MOST_OF_A_TEXT else f"{text[: MOST_OF_A_TEXT - 4]}...'"
    if isinstance(value, Mapping):
        more = [f"+{len(value) - MOST_ENTRIES}"] * (len(value) > MOST_ENTRIES)
        return f"{{{', '.join([*map(str, islice(value, MOST_ENTRIES)), *more])}}}"
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        if len(value) > MOST_ENTRIES or not all(isinstance(item, (str, int, float)) for item in value):
            return f"({len(value)} of {type(value[0]).__name__})"
        return f"({', '.join(map(_short, value))})"
    version = getattr(value, "version", None)  # latency models have a version
    return f"{type(value).__name__}(...)" if version is None else f"{getattr(value, 'name', '')} {version}"
