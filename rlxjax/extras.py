"""Optional packages that some features need. They are listed under `optional-dependencies` in `pyproject.toml`."""

import importlib.util
import shlex


def require(package: str, extra: str) -> None:
    """Raise an `ImportError`, with the command that installs the package, if a package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"{package} is not installed; get it with `{install_command(extra)}`")


def install_command(extra: str) -> str:
    """Return the shell command that installs the packages of an extra.

    Examples:
        >>> install_command("report")
        "pip install 'jinja2>=3.1' 'matplotlib>=3.9'"
    """
    from importlib import metadata  # takes as long to import as the package

    try:
        parts = [line.partition(";") for line in metadata.requires("rlxjax") or ()]
    except metadata.PackageNotFoundError:  # a source tree that is not installed
        parts = []
    wanted = [requirement.strip() for requirement, _, marker in parts if marker.strip() == f"extra == '{extra}'"]
    return shlex.join(["pip", "install", *(wanted or [f".[{extra}]"])])
