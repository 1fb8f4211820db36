"""Models of an approximate transform, as the runner knows them: by the program that each makes."""

import functools
from typing import Any, Protocol

from jaxtyping import Array, Float

from ._params import WelchPeakParams


class ModelProgram(Protocol):
    """The program of a model, a pytree of arrays: it finds peaks, and knows its work."""

    work: Any

    def peaks(
        self, signal: Array, params: WelchPeakParams, selection: str | None = None, platform: str | None = None
    ) -> Float[Array, "batch k 2"]:
        """Return the peaks of rows of samples; traced code."""
        ...


@functools.singledispatch
def program_of(model: object, params: WelchPeakParams) -> ModelProgram:
    """Return the program of a model; each kind of model registers how it is made.

    Raises:
        ValueError: what is no model.
    """
    del params
    raise ValueError(f"model: expected a LearnedFft (load_learned_fft), got {type(model).__name__}")
