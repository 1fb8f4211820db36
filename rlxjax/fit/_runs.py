"""Runs of a latency model: what was or could be timed, as columns."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax._checks import check_at_least, check_shapes, is_traced
from rlxjax._counts import size_as_float
from rlxjax._typing import Code, RealLike

from ._model import LatencyModel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Runs:
    """Runs of a model; every column a scalar or `[*batch]`.

    Attributes:
        model: whose runs they are.
        variant: places in `model.variants`.
        inputs: the sizes by name, floats.
    """

    model: LatencyModel = dataclasses.field(metadata={"static": True})
    variant: Code
    inputs: Mapping[str, Any]

    @classmethod
    def checked(cls, model: LatencyModel, variant: str | Code, **inputs: RealLike) -> Self:
        """Build from names or codes of variants and from the sizes of the work.

        Raises:
            ValueError: an unknown variant or input, a missing one, a size that cannot be, or shapes that do
                not broadcast.

        Examples:
            >>> from rlxjax.models import FFT
            >>> Runs.checked(FFT, "fft", batch=[8, 64], n_fft=256).shape
            (2,)
        """
        codes = variant_codes(model, variant)
        unknown = [name for name in inputs if name not in model.inputs]
        missing = [name for name, entry in model.inputs.items() if name not in inputs and entry.default is None]
        if unknown or missing:
            wrong = f"got {unknown[0]!r}" if unknown else f"{missing[0]!r} is missing"
            raise ValueError(f"{model.name}: expected the inputs {', '.join(model.inputs)}; {wrong}")
        values = {name: inputs.get(name, entry.default) for name, entry in model.inputs.items()}
        for name, entry in model.inputs.items():
            # Predictions are smooth in sizes, so that a crossover may lie between whole numbers.
            check_input(values[name], name, entry.least, entry.step if entry.step > 1 else 0)
        check_shapes(variant=codes, **values)
        return cls(model, codes, {name: size_as_float(value, name) for name, value in values.items()})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the columns broadcast to."""
        return np.broadcast_shapes(np.shape(self.variant), *map(np.shape, self.inputs.values()))

    def together(self) -> Self:
        """Return the same runs with every column of the whole shape."""
        variant, *inputs = jnp.broadcast_arrays(
            jnp.asarray(self.variant), *(jnp.asarray(value) for value in self.inputs.values())
        )
        named = dict(zip(self.inputs, inputs, strict=True))
        return dataclasses.replace(self, variant=variant, inputs=named)


def variant_codes(model: LatencyModel, variant: str | Code) -> Code:
    """Return the places of variants in `model.variants`, given as names or as places.

    Raises:
        ValueError: an unknown name, or a place that is none.
    """
    if is_traced(variant):
        return variant  # pyright: ignore[reportReturnType]
    array, known = np.asarray(variant), list(model.variants)
    if array.dtype.kind in "UO":
        names = [str(name) for name in array.flat]
        for name in names:
            if name not in known:
                raise ValueError(f"variant: expected one of {', '.join(known)}, got {name!r}")
        codes = np.array([known.index(name) for name in names], np.int32).reshape(array.shape)
        return int(codes) if codes.ndim == 0 else codes
    if array.dtype.kind not in "iu" or (array.size and not 0 <= array.min() <= array.max() < len(known)):
        raise ValueError(f"variant: expected names, or places from 0 to {len(known) - 1}, got {variant}")
    # A list would be a tree of its numbers.
    return int(array) if array.ndim == 0 else array.astype(np.int32)


def check_input(value: RealLike, name: str, least: float, step: int) -> None:
    """Check one size of runs, where the host can read it.

    Raises:
        ValueError: NaN, a size below the least, or no multiple of the step.
    """
    if is_traced(value):
        return
    check_at_least(value, name, least, "size")
    if step:
        flat = np.asarray(value, np.float64).reshape(-1)
        wrong = flat[flat % step != 0]
        if wrong.size:
            wanted = {1: "a whole number", 2: "an even number"}.get(step, f"a multiple of {step}")
            raise ValueError(f"{name}: expected {wanted}, got {wrong[0]:g}")
