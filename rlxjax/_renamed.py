"""Names that are exported no more but as aliases of better ones, for one release."""

import warnings

#: The new name by the old one.
RENAMED = {"Path": "WelchPath", "Strategy": "ReferenceStrategy"}


def new_name(module: str, name: str) -> str:
    """Return what an exported name is called; a module's `__getattr__` asks for it.

    Raises:
        AttributeError: a name that was never exported.

    Warns:
        DeprecationWarning: an old name; with the line that uses it.
    """
    if name not in RENAMED:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    new = RENAMED[name]
    said = f"{module}.{name} is called {module}.{new}; the old name goes with the next release"
    warnings.warn(said, DeprecationWarning, stacklevel=3)
    return new
