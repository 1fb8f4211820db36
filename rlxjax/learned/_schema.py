"""The schema of a learned FFT's file, on one screen."""

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from rlxjax._files import Sealed
from rlxjax.learned._model import LearnedFft

SCHEMA_VERSION = 1

Finite = Annotated[float, Field(allow_inf_nan=False)]


class LearnedFftFile(Sealed):
    """The schema, version 1.

    Stage by stage, and in a stage butterfly by butterfly; the order is that of `LearnedFft`.
    """

    schema_version: Literal[1]
    kind: Literal["learned_fft"]
    n_fft: int
    active_gates: int
    total_gates: int
    note: str
    twiddles: list[list[list[Finite]]]
    gates: list[list[Finite]]
    mask: list[Finite]

    @model_validator(mode="after")
    def _is_a_model(self) -> "LearnedFftFile":
        model = self.model()
        for name in ("n_fft", "active_gates", "total_gates"):
            if getattr(self, name) != getattr(model, name):
                raise ValueError(f"{name}: the arrays say {getattr(model, name)}, got {getattr(self, name)}")
        return self

    def model(self) -> LearnedFft:
        """Return the model, its leaves float32 on the host.

        Raises:
            ValueError: arrays that are no model.
        """
        leaves = {}
        for name in ("twiddles", "gates", "mask"):
            try:
                leaves[name] = single_precision(getattr(self, name))
            except ValueError:
                raise ValueError(f"{name}: expected stages of equal length") from None
        return LearnedFft.checked(**leaves)


def single_precision(values: Any) -> np.ndarray:
    """Return numbers in single precision; what lies beyond it is infinite, which no model takes."""
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float32)
