"""What comes into the strategy costs, checked, as the compiled programs take it."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from rlxjax._checks import check_at_least, check_not_nan, check_shapes, is_traced
from rlxjax._counts import size_as_float
from rlxjax._typing import Code, RealLike
from rlxjax._values import FrozenDict
from rlxjax.gate._codes import normalised
from rlxjax.gate._devices import Device, without_provenance

from ._coefficients import CoefficientSet, coefficient_set
from ._formulas import Learned

#: Least value of each size of a workload.
LEAST_SIZES = {"batch": 0, "n_fft": 2, "k": 1, "n_segments": 1}


def cost_inputs(
    device: str | Code,
    coefficients: str | CoefficientSet,
    others: Mapping[str, RealLike] = FrozenDict(),
    **sizes: RealLike,
) -> tuple:
    """Return codes, coefficients and the sizes as floats; of the others the shapes have to agree with theirs."""
    cpu = "cpu"
    if isinstance(device, str) and normalised(device) == "cpu-apple":
        device, cpu = Device.CPU, "cpu-apple"
    if isinstance(coefficients, str):
        coefficients = coefficient_set(coefficients, cpu)
    if not isinstance(coefficients, CoefficientSet):
        raise ValueError(f"coefficients: expected a name or a CoefficientSet, got {coefficients!r}")
    for name, value in sizes.items():
        check_at_least(value, name, LEAST_SIZES[name], "size")
    if not is_traced(n_fft := sizes["n_fft"]) and not _all_even(np.asarray(n_fft)):
        raise ValueError(f"n_fft: expected an even number, got {n_fft}")
    codes = Device.codes(device)
    check_shapes(device=codes, **sizes, **others)
    rows = {name: without_provenance(getattr(coefficients, name)) for name in ("host", "backend")}
    set_ = dataclasses.replace(coefficients, **rows)
    return codes, set_, *(size_as_float(size, name) for name, size in sizes.items())


def strategy_inputs(
    device: str | Code,
    batch: RealLike,
    n_fft: RealLike,
    k: RealLike,
    available: RealLike,
    active_gates: RealLike | None,
    total_gates: RealLike,
    coefficients: str | CoefficientSet,
    temperature_ns: RealLike = 1.0,
) -> tuple:
    """Return codes, coefficients, sizes and the learned FFT: what all strategies' costs follow from."""
    active_gates = -1.0 if active_gates is None else active_gates
    check_not_nan(active_gates, "learned_active_gates")
    check_at_least(total_gates, "learned_total_gates")
    gates = {"learned_available": available, "learned_active_gates": active_gates, "learned_total_gates": total_gates}
    learned = Learned(*(size_as_float(value, name) for name, value in gates.items()))
    others = {**gates, "temperature_ns": temperature_ns}
    return *cost_inputs(device, coefficients, others, batch=batch, n_fft=n_fft, k=k), learned


def _all_even(numbers: np.ndarray) -> bool:
    if numbers.dtype.kind != "f":
        return not np.any(numbers % 2)
    halves = 0.5 * numbers  # a remainder of floats takes ten times as long
    with np.errstate(invalid="ignore"):
        return bool(np.all(halves - np.floor(halves) == 0))
