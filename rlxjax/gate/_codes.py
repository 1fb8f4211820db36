"""Names with integer codes, for tables and traced code."""

import enum
import re
from collections.abc import Sequence
from typing import TypeVar

import jax.core
import jax.numpy as jnp
import numpy as np

from rlxjax._typing import Code

#: In place of `Self`, which a checker of annotations at run time knows only in a class that it decorates.
_NamedCode = TypeVar("_NamedCode", bound="NamedCode")


def normalised(name: object) -> str:
    """Return a name as it is compared: lower case, `-` for `_`, no outer space."""
    return str(name).strip().lower().replace("_", "-")


class NamedCode(enum.StrEnum):
    """Names with an integer code, their position, for tables and traced code."""

    @property
    def code(self) -> int:
        """The position of this member in its enum."""
        return list(type(self)).index(self)

    @classmethod
    def what(cls) -> str:
        """Return what a member is, for messages: the last word of the class's name."""
        return re.split("(?=[A-Z])", cls.__name__)[-1].lower()

    @classmethod
    def parse(cls: type[_NamedCode], name: object) -> _NamedCode:
        """Return the member of this name, in any case.

        Raises:
            ValueError: no member has this name.
        """
        wanted = normalised(name)
        for member in cls:
            if normalised(member) == wanted:
                return member
        raise ValueError(f"unknown {cls.what()} {name!r}; expected one of {', '.join(cls)}")

    @classmethod
    def codes(cls, value: "str | Code | Sequence[str] | Sequence[int]") -> Code:
        """Return the integer code of a name, or integer codes (checked where the host can read them).

        Raises:
            ValueError: an unknown name, a code outside the enum, or an array that holds no integers.
        """
        if isinstance(value, str):
            return cls.parse(value).code
        what = cls.what()
        if isinstance(value, jax.core.Tracer):
            if not jnp.issubdtype(value.dtype, jnp.integer):
                raise ValueError(f"{what}: expected integer codes in traced code, got {value.dtype}")
            return value
        array = np.asarray(value)
        if array.dtype.kind in "UO":
            return np.array([cls.parse(str(name)).code for name in array.flat], np.int32).reshape(array.shape)
        if array.dtype.kind not in "iu":
            raise ValueError(f"{what}: expected a name or integer codes, got {array.dtype}")
        if array.size and not 0 <= array.min() <= array.max() < len(cls):
            raise ValueError(f"{what}: expected codes from 0 to {len(cls) - 1}, got {array}")
        return array if isinstance(value, Sequence) else value
