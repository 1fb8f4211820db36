"""Where fits run: on the CPU, since a step is some hundred launches of little work each."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import jax


def on_cpu() -> AbstractContextManager[Any]:
    """Make JAX's CPU the default device of this thread; where JAX has no CPU, nothing changes.

    Arrays of JAX stay on their devices: what is to run here is given as NumPy's.

    Examples:
        >>> with on_cpu():
        ...     jax.numpy.zeros(3).devices() == {jax.local_devices(backend="cpu")[0]}
        True
    """
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # of a JAX_PLATFORMS without it
        return contextlib.nullcontext()
