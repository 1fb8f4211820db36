"""The weights that machines share: what an operation takes, and how families of kernels behave, as arrays and as data.

`weights.json` is written by `python -m benchmarks.learned_weights` from the timings of a corpus of programs.
"""

import dataclasses
import functools
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from rlxjax._numerics import namespace_of
from rlxjax._values import by_value
from rlxjax.jaxpr import CLASSES, FAMILIES, OPERATIONS, Kernels, vocabulary_version

#: Widths of numbers that have weights of their own: 1, 2, 4, 8 and 16 bytes.
WIDTHS = 5
VERSION = 1
SHIPPED = Path(__file__).with_name("weights.json")
#: The class of each operation by its place, as columns of a matrix.
_OF_CLASS = np.array([[OPERATIONS[name] == one for one in CLASSES] for name in OPERATIONS], float)
#: Standard deviation of the logarithm of the weight of an operation that nobody timed.
WIDE_LOG_SD = 1.0
#: Families of fused loops behave alike, whatever their last operation is.
LOOPS = ("movement", "gather", "custom")
#: Sizes that go into the model as they are, and what families behave by.
SIZES = ("launches", "looped", "read_bytes", "written_bytes")
FAMILY_FIELDS = ("threshold", "gain", "sharpness", "exponent")
#: Families whose kernels call a library, so that no loop around them is compiled as one.
LIBRARY_FAMILIES = ("linear algebra", "sort", "fft", "convolution")
_FAMILY_OF = np.array([FAMILIES.index("elementwise" if name in LOOPS else name) for name in FAMILIES])
_IS_LIBRARY = np.array([name in LIBRARY_FAMILIES for name in FAMILIES], float)


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights of the functions model that machines share; each machine has its own rate of each class of operations.

    Attributes:
        operation_ns: ns of one operation on one processor of the machine of rate one, `[operations, widths]`.
        operation_log_sd: standard deviation of its logarithm between machines, `[operations, widths]`.
        row_ns: ns of a row of a kernel, by family, `[families]`.
        threshold: time from which kernels of a family are shared, of that of the machine, `[families]`.
        gain: what sharing gains in a family, of that of the machine, `[families]`.
        sharpness: how sharply kernels of a family are shared from the threshold on, `[families]`.
        exponent: how sharply the longer of compute and memory decides in a family, `[families]`.
    """

    operation_ns: Float[Array | np.ndarray, "operations widths"]
    operation_log_sd: Float[Array | np.ndarray, "operations widths"]
    row_ns: Float[Array | np.ndarray, "families"]
    threshold: Float[Array | np.ndarray, "families"]
    gain: Float[Array | np.ndarray, "families"]
    sharpness: Float[Array | np.ndarray, "families"]
    exponent: Float[Array | np.ndarray, "families"]

    def columns(self, kernels: Kernels) -> dict[str, Any]:
        """Return the inputs of the functions model that kernels give, by name; differentiable in the weights.

        Args:
            kernels: of one program, or of several, padded, `[*batch, kernels]`.

        Returns:
            Columns `[*batch, kernels]`: sizes, what each class of operations takes in ns at rate one, what the
            operations' own weights leave unsure, and how the family is shared.
        """
        xp = namespace_of(*jax.tree.leaves((self, kernels)))
        k = {name: xp.asarray(column, float) for name, column in vars(kernels).items()}
        own = {name: xp.asarray(column, float) for name, column in vars(self).items()}
        is_there = xp.asarray(k["launches"] > 0, float)
        count = xp.maximum(k["launches"], 1.0)
        width = xp.asarray(xp.clip(xp.log2(xp.maximum(k["itemsize"], 1.0)), 0.0, WIDTHS - 1.0), int)
        family = xp.asarray(_FAMILY_OF)[xp.asarray(kernels.family, int)]
        each_ns = k["counts"] * own["operation_ns"].T[width]
        by_class = each_ns @ xp.asarray(_OF_CLASS)
        found = {f"{name}_work_ns": by_class[..., place] for place, name in enumerate(CLASSES)}
        found["remainder_work_ns"] += own["row_ns"][family] * k["rows"] * is_there
        stride = xp.asarray(kernels.stride_bytes, int)
        # A transform by itself stays on one processor.
        is_shared = (family != FAMILIES.index("fft")) | (k["pieces"] > k["launches"])
        return {
            **found,
            "unsure_ns": xp.sqrt(xp.sum((each_ns * own["operation_log_sd"].T[width]) ** 2, -1)),
            **{name: k[name] for name in SIZES},
            "kernel_bytes": (k["read_bytes"] + k["written_bytes"]) / count,
            "result_bytes": k["written_bytes"] / count,
            "whole_bytes": k["working_bytes"] / count,
            # The bytes of a cache that a walk along a stride fills: strides of large powers of two meet in few sets.
            "strided_bytes": k["extent"] * xp.asarray(stride & -stride, float),
            "is_library": is_there * xp.asarray(_IS_LIBRARY)[family],
            "is_shared": is_there * xp.asarray(is_shared, float),
            **{name: own[name][family] * is_there for name in FAMILY_FIELDS},
        }

    def timed(self) -> np.ndarray:
        """Return which operations some machine timed, `[operations]`."""
        return np.min(np.asarray(self.operation_log_sd), -1) < WIDE_LOG_SD


@dataclasses.dataclass(frozen=True)
class KnownWeights:
    """A file of weights: these, medians and spreads of machines' coefficients, and where all of it is from."""

    weights: Weights
    median: Mapping[str, float]
    log_sd: Mapping[str, float]
    provenance: Mapping[str, Any]

    def text(self) -> str:
        """Return the file."""
        weights = self.weights
        pairs = zip(np.asarray(weights.operation_ns), np.asarray(weights.operation_log_sd), strict=True)
        each = zip(OPERATIONS, pairs, strict=True)
        operations = {name: {"ns": _short(ns), "log_sd": _short(sd)} for name, (ns, sd) in each}
        fields = ("row_ns", *FAMILY_FIELDS)
        families = {
            name: {field: _short(np.asarray(getattr(weights, field))[place]) for field in fields}
            for place, name in enumerate(FAMILIES)
        }
        coefficients = {name: [_short(self.median[name]), _short(self.log_sd[name])] for name in self.median}
        kept = {
            "version": VERSION,
            "vocabulary": vocabulary_version(),
            "provenance": dict(self.provenance),
            "coefficients": coefficients,
            "families": families,
            "operations": operations,
        }
        # A line an entry: what changes from one corpus to another is read by people.
        lines = [
            f' "{name}": {{\n' + ",\n".join(f'  "{key}": {json.dumps(each)}' for key, each in value.items()) + "\n }"
            if isinstance(value, dict)
            else f' "{name}": {json.dumps(value)}'
            for name, value in kept.items()
        ]
        return "{\n" + ",\n".join(lines) + "\n}\n"


def _short(value: Any) -> Any:
    """Return numbers of five digits."""
    return [_short(each) for each in value] if np.ndim(value) else float(f"{float(value):.5g}")


def read_weights(path: str | os.PathLike[str]) -> KnownWeights:
    """Read a file of weights.

    Args:
        path: of the file.

    Raises:
        ValueError: a file of another version or vocabulary, or that is not as expected.
        OSError: it cannot be read.

    Examples:
        >>> read_weights(SHIPPED).weights.operation_ns.shape[-1]
        5
    """
    try:
        kept = json.loads(Path(path).read_text(encoding="utf-8"))
        own = kept["version"], kept["vocabulary"]
        if own != (VERSION, vocabulary_version()):
            expected = f"version {VERSION} of vocabulary {vocabulary_version()}"
            raise ValueError(f"expected {expected}, got version {own[0]} of {own[1]}")
        operations = [kept["operations"][name] for name in OPERATIONS]
        families = {
            field: np.array([kept["families"][name][field] for name in FAMILIES], float)
            for field in ("row_ns", *FAMILY_FIELDS)
        }
        weights = Weights(
            np.array([each["ns"] for each in operations], float),
            np.array([each["log_sd"] for each in operations], float),
            **families,
        )
        shape = (len(OPERATIONS), WIDTHS)
        is_positive = all(np.all(np.isfinite(own) & (own > 0)) for own in vars(weights).values())
        if not is_positive or {weights.operation_ns.shape, weights.operation_log_sd.shape} != {shape}:
            raise ValueError(f"expected positive numbers, {WIDTHS} of each operation")
        pairs = kept["coefficients"]
        return KnownWeights(
            weights,
            {name: float(pair[0]) for name, pair in pairs.items()},
            {name: float(pair[1]) for name, pair in pairs.items()},
            kept["provenance"],
        )
    except (AttributeError, IndexError, KeyError, TypeError, json.JSONDecodeError) as reason:
        raise ValueError(f"{path}: is no file of weights ({type(reason).__name__}: {reason})") from None
    except ValueError as reason:
        raise ValueError(f"{path}: {reason}") from None


@functools.cache
def shipped_weights() -> KnownWeights | None:
    """Return the weights that are shipped; None, with a warning, where they are of another vocabulary or version."""
    try:
        return read_weights(SHIPPED)
    except (OSError, ValueError) as reason:
        warnings.warn(f"{reason}; wide priors stand in", stacklevel=2)
        return None


#: ns of one operation of a class that nobody timed, on one processor of a present-day machine; some operations differ.
_TYPICAL_NS = {
    **{"arithmetic": 0.02, "movement": 0.03, "remainder": 1.0, "transpose": 0.3, "special": 0.2, "dear": 4.0},
    **{"iterated": 50.0, "reduction": 0.06, "cumulative": 1.0, "window": 0.3, "product": 0.012, "convolution": 0.02},
    **{"transform": 0.05, "sort": 4.0, "factorisation": 1.0, "random": 0.02, "indexing": 0.4},
}
_TYPICAL_OPERATION_NS = {
    **{"products": 100.0, "reduced_rows": 6.0, "transforms": 50.0, "convolution_runs": 20.0, "top_k": 0.5},
    **{"convolution_loads": 0.3, "convolution_edge_loads": 1.0, "gather_places": 2.0, "scatter_places": 2.0},
    **{"div_by_scalar": 0.1, "rem_by_scalar": 0.2},
}


def wide_weights() -> Weights:
    """Return weights that know the order of magnitude of each class, and no more.

    Examples:
        >>> bool(wide_weights().timed().any())
        False
    """
    ns = np.array([_TYPICAL_OPERATION_NS.get(name, _TYPICAL_NS[OPERATIONS[name]]) for name in OPERATIONS])
    for place, name in enumerate(OPERATIONS):
        ns[place] = 0.05 if name.endswith("_flop") else 500.0 if name.endswith("_matrices") else ns[place]
    each = np.repeat(ns[:, None], WIDTHS, 1)
    ones = np.ones(len(FAMILIES))
    return Weights(each, np.full_like(each, WIDE_LOG_SD), 0.5 * ones, ones, ones, 3.0 * ones, 2.0 * ones)


def known_weights() -> Weights:
    """Return the shipped weights, or else wide ones."""
    known = shipped_weights()
    return wide_weights() if known is None else known.weights
