"""What a picture is given, checked: a calibrated model, timings of it, values along an input, the other sizes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from rlxjax.calibration import CalibratedModel, Calibration
from rlxjax.fit import Timings


def calibrated_of(calibrated: Any, timings: Any = None, what: str = "") -> CalibratedModel:
    """Return the calibrated model that is meant: of a calibration that of the timings, without any the first."""
    if timings is not None and not isinstance(timings, Timings):
        raise ValueError(f"timings: expected Timings, got {type(timings).__name__}")
    if isinstance(calibrated, Calibration):
        calibrated = calibrated.of(None if timings is None else timings.model.name)
    if not isinstance(calibrated, CalibratedModel):
        expected = f"a Calibration, one of its models, {what}" if what else "a Calibration or one of its models"
        raise ValueError(f"calibrated: expected {expected}, got {type(calibrated).__name__}")
    if timings is not None:
        own, other = calibrated.model, timings.model
        if (own.name, own.version) != (other.name, other.version):
            expected, got = (f"{model.name} (version {model.version})" for model in (own, other))
            raise ValueError(f"timings: expected those of {expected}, got those of {got}")
        if np.ndim(timings.time_ns) != 1 or np.size(timings.time_ns) == 0:
            raise ValueError(f"timings: expected one machine's, `[n]`, got shape {np.shape(timings.time_ns)}")
    return calibrated


def values_along(name: str, values: Any) -> Float[np.ndarray, "n"]:
    """Return the different values of an input in ascending order."""
    try:
        numbers = np.unique(np.asarray(values, np.float64))
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected numbers, got {type(values).__name__}") from None
    wrong = numbers[~(np.isfinite(numbers) & (numbers > 0))]
    if wrong.size:
        raise ValueError(f"{name}: expected positive finite numbers, got {wrong[0]:g}")
    if numbers.size < 2:
        raise ValueError(f"{name}: expected two different numbers at least, got {numbers.size}")
    return numbers


def other_sizes(sizes: Mapping[str, Any], *along: str) -> dict[str, Any]:
    """Return the sizes that stay as they are, those that are left to their default left out."""
    for name, value in sizes.items():
        if name in along:
            raise ValueError(f"{name}: given twice")
        if np.ndim(value):
            raise ValueError(f"{name}: expected one number, got {np.size(value)}")
    return {name: value for name, value in sizes.items() if value is not None}
