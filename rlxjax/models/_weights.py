"""The weights of the functions model, which are the same for all machines: times of operations, and kernel behaviour.

`python -m benchmarks.learned_weights` writes `weights.json` from the timings of a corpus of programs.
"""

import dataclasses
import functools
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float

from rlxjax._numerics import namespace_of
from rlxjax._values import FrozenDict, by_value
from rlxjax.jaxpr import CLASSES, FAMILIES, OPERATIONS, Kernels, vocabulary_version

#: The number of dtype sizes that have their own weights: 1, 2, 4, 8 and 16 bytes.
WIDTHS = 5
VERSION = 3
SHIPPED = Path(__file__).with_name("weights.json")
#: The class of each operation as a one-hot row, `[operations, classes]`.
_OF_CLASS = np.array([[OPERATIONS[name] == one for one in CLASSES] for name in OPERATIONS], float)
#: Standard deviation of the logarithm of the weight of an untimed operation, and of a time if no weights are known.
WIDE_LOG_SD, WIDE_SCATTER = 1.5, 0.6
#: Sharpness of five transitions: to unaligned rows, to compute-bound kernels, to loops that dispatch kernels one by
#: one, to newly allocated memory, and to another thread.
ALIGNED, INTENSE, LOOPED, FRESH, HANDED_OVER = 4.0, 8.0, 6.0, 8.0, 6.0
#: Families of kernels that are fused loops. They have the same weights.
LOOPS = ("elementwise", "movement", "gather", "custom")
#: Families of kernels that call a library. A loop with such a kernel dispatches its kernels one by one.
LIBRARY_FAMILIES = ("scatter", "linear algebra", "sort", "fft", "convolution")
_FAMILY_OF = np.array([FAMILIES.index(LOOPS[0] if name in LOOPS else name) for name in FAMILIES])
_IS_LIBRARY = np.array([name in LIBRARY_FAMILIES for name in FAMILIES], float)
_UNTILED, _WITH_VECTOR = (list(OPERATIONS).index(name) for name in ("transpose_inner_untiled", "product_with_vector"))
#: Bytes of a cache line.
LINE_BYTES = 64
_FFT, _MATMUL = FAMILIES.index("fft"), FAMILIES.index("matmul")
#: Columns of `Kernels` that are inputs of the model without a change.
SIZES = ("launches", "looped", "read_bytes", "written_bytes")


class Believed(NamedTuple):
    """The prior of a kind of weight: the median, the standard deviation of the logarithm, and names of the entries."""

    median: float
    log_sd: float
    per: tuple[str, ...] = ()


_FAMILY, _CLASS = tuple(FAMILIES), CLASSES
#: Priors of all weights except those of operations, by name. A weight has an entry for each name in `per`.
BELIEVED: Mapping[str, Believed] = FrozenDict(
    {
        "row_ns": Believed(0.5, 1.0, _FAMILY),
        "dispatch": Believed(3.0, 1.5, _FAMILY),
        "exponent": Believed(2.0, 0.5, _FAMILY),
        "sharpness": Believed(4.0, 0.5, _FAMILY),
        "shared_read_bytes": Believed(2e6, 1.0, _FAMILY),
        "shared_written_bytes": Believed(5e5, 1.0, _FAMILY),
        "shared_flop": Believed(5e4, 1.0, _FAMILY),
        "unaligned": Believed(0.5, 1.0, _CLASS),
        "aligned_elements": Believed(8.0, 0.7, _CLASS),
        "unaligned_row": Believed(5.0, 1.0),
        "intensity": Believed(1.0, 0.5),
        "hand_over_operations": Believed(700.0, 0.7),
        "loop_bytes": Believed(1e3, 1.0),
        "fresh_bytes": Believed(3.2e7, 0.3),
        "first_cache": Believed(12.0, 0.5),
        "strided": Believed(3.0, 1.0),
        "far_strided": Believed(10.0, 1.0),
        "indexed": Believed(1.0, 1.0),
        "far_indexed": Believed(2.0, 1.0),
    }
)
Column = Float[Array | np.ndarray, "..."] | Any


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights of the functions model, the same for all machines. A machine's coefficients scale them, class by class.

    Attributes:
        operation_ns: ns of each operation on a processor if the machine's coefficients are 1, `[operations, widths]`.
        operation_log_sd: standard deviation between machines of the log of `operation_ns`, `[operations, widths]`.
        row_ns: ns per row of a kernel, `[families]`.
        dispatch: time to dispatch a kernel in a loop, divided by the machine's `loop_dispatch_ns`, `[families]`.
        exponent: sharpness of the roofline of compute and memory time, `[families]`.
        sharpness: sharpness of the transition to kernels that several processors share, `[families]`.
        shared_read_bytes: processors share a kernel that reads more bytes than this, `[families]`.
        shared_written_bytes: processors share a kernel that writes more bytes than this, `[families]`.
        shared_flop: processors share a compute-bound kernel with more FLOP than this, `[families]`.
        unaligned: relative extra time of operations in unaligned rows, `[classes]`.
        aligned_elements: a row is aligned if this power of two divides its number of elements, `[classes]`.
        unaligned_row: relative extra time per row, if rows are unaligned.
        intensity: a kernel with more FLOP per byte than this is compute-bound.
        hand_over_operations: a program with more operations than this runs on another thread.
        loop_bytes: a loop that moves more bytes per iteration than this dispatches its kernels one by one.
        fresh_bytes: the allocator takes new memory for a result with more bytes than this.
        first_cache: size of the near cache divided by the size of the first-level cache.
        strided: relative extra time per element of an untiled transpose beyond the first-level cache.
        far_strided: relative extra time per element of an untiled transpose beyond the near cache.
        indexed: relative extra time per indexed element beyond the near cache.
        far_indexed: relative extra time per indexed element beyond all caches.
    """

    operation_ns: Float[Array | np.ndarray, "operations widths"] | Any
    operation_log_sd: Float[Array | np.ndarray, "operations widths"] | Any
    row_ns: Column
    dispatch: Column
    exponent: Column
    sharpness: Column
    shared_read_bytes: Column
    shared_written_bytes: Column
    shared_flop: Column
    unaligned: Column
    aligned_elements: Column
    unaligned_row: Column
    intensity: Column
    hand_over_operations: Column
    loop_bytes: Column
    fresh_bytes: Column
    first_cache: Column
    strided: Column
    far_strided: Column
    indexed: Column
    far_indexed: Column

    def columns(self, kernels: Kernels, static_ops: Any, trips: Any) -> dict[str, Any]:
        """Return a dict from name to input of the functions model. `jax.grad` works by the weights.

        Args:
            kernels: kernels of each program, `[*batch, kernels]`, padded to the same number of kernels.
            static_ops: number of operations in the program text, `[*batch]`.
            trips: number of iterations of all loops together, `[*batch]`.

        Returns:
            All inputs that follow from kernels, `[*batch, kernels]` each, for example `special_work_ns`; and
            `hand_overs`, `[*batch]`: 1 for a program that runs on another thread, else 0.
        """
        xp = namespace_of(*jax.tree.leaves((self, kernels)))
        k = {name: xp.asarray(column, float) for name, column in vars(kernels).items()}
        own = {name: xp.asarray(column, float) for name, column in vars(self).items()}
        is_there = xp.asarray(k["launches"] > 0, float)
        count = xp.maximum(k["launches"], 1.0)
        width = xp.asarray(xp.clip(xp.log2(xp.maximum(k["itemsize"], 1.0)), 0.0, WIDTHS - 1.0), int)
        family = xp.asarray(_FAMILY_OF)[xp.asarray(kernels.family, int)]
        # A row is unaligned if half of `aligned_elements` does not divide its length.
        aligned = xp.maximum(k["alignment"], 1.0)[..., None]
        more, least = (own[name].reshape((1,) * count.ndim + (-1,)) for name in ("unaligned", "aligned_elements"))
        unaligned = 1.0 + more * _beyond(xp, least, 1.4 * aligned, ALIGNED)
        each_ns = k["counts"] * own["operation_ns"].T[width]
        by_class = (each_ns @ xp.asarray(_OF_CLASS)) * unaligned
        work = {f"{name}_work_ns": by_class[..., place] for place, name in enumerate(CLASSES)}
        odd = _beyond(xp, own["aligned_elements"][CLASSES.index("movement")], 1.4 * aligned[..., 0], ALIGNED)
        work["movement_work_ns"] += own["row_ns"][family] * k["rows"] * (1.0 + own["unaligned_row"] * odd)
        stride = xp.asarray(kernels.stride_bytes, int)
        # Bytes of a cache that a walk along a stride fills: large powers of two meet in few cache sets, and strides
        # within a cache line count as none.
        strided_bytes = k["extent"] * xp.where(stride >= LINE_BYTES, xp.asarray(stride & -stride, float), 0.0)
        untiled_ns = each_ns[..., _UNTILED]
        moved_bytes = k["read_bytes"] + k["written_bytes"]
        intensity = k["flops"] / (moved_bytes + 1.0)
        is_loop, busy = family == FAMILIES.index(LOOPS[0]), _beyond(xp, intensity, own["intensity"], INTENSE)
        flop = k["flops"] * xp.where(is_loop, busy, 1.0)
        size = (
            k["read_bytes"] / own["shared_read_bytes"][family]
            + k["written_bytes"] / own["shared_written_bytes"][family]
            + flop / own["shared_flop"][family]
        ) / xp.where(family == _MATMUL, xp.maximum(k["pieces"], count), count)
        # A single transform stays on one processor.
        is_shared = is_there * xp.asarray((family != _FFT) | (k["pieces"] > k["launches"]), float)
        looped = xp.asarray(k["looped"] > 0, float)
        # A loop without a library whose iterations move few bytes becomes one kernel.
        calls = xp.max(looped * xp.asarray(_IS_LIBRARY)[family], -1, keepdims=True)
        trip_bytes = xp.sum(moved_bytes * k["looped"] / count, -1) / xp.maximum(xp.asarray(trips, float), 1.0)
        one_by_one = xp.maximum(calls, _beyond(xp, trip_bytes, own["loop_bytes"], LOOPED)[..., None])
        # A compiler writes products with vectors as loops; other products call a library.
        dispatched = xp.where(k["counts"][..., _WITH_VECTOR] > 0, FAMILIES.index(LOOPS[0]), family)
        return {
            **work,
            "unsure_ns": xp.sqrt(xp.sum((each_ns * own["operation_log_sd"].T[width]) ** 2, -1)),
            **{name: k[name] for name in SIZES},
            "fresh_bytes": k["written_bytes"] * _beyond(xp, k["written_bytes"] / count, own["fresh_bytes"], FRESH),
            "dispatched": k["looped"] * one_by_one * own["dispatch"][dispatched],
            "strided_bytes": strided_bytes,
            "first_strided_bytes": strided_bytes * own["first_cache"],
            "strided_ns": untiled_ns * own["strided"],
            "far_strided_ns": untiled_ns * own["far_strided"],
            "indexed_ns": work["indexing_work_ns"] * own["indexed"],
            "far_indexed_ns": work["indexing_work_ns"] * own["far_indexed"],
            "shared": is_shared * _beyond(xp, size, 1.0, own["sharpness"][family]),
            "exponent": own["exponent"][family] * is_there,
            "hand_overs": _beyond(xp, xp.asarray(static_ops, float) + 1.0, own["hand_over_operations"], HANDED_OVER),
        }

    def timed(self) -> np.ndarray:
        """Return for each operation whether it was timed on any machine, `[operations]`."""
        return np.min(np.asarray(self.operation_log_sd), -1) < WIDE_LOG_SD


def _beyond(xp: Any, size: Any, threshold: Any, sharpness: Any) -> Any:
    """Return `x**p / (x**p + 1)`, a smooth step from 0 to 1: `x` is size / threshold, and `p` is the sharpness."""
    return 0.5 + 0.5 * xp.tanh(0.5 * sharpness * (xp.log(size + 1e-9) - xp.log(threshold)))


@dataclasses.dataclass(frozen=True)
class KnownWeights:
    """The content of a file of weights: the weights, the prior of the coefficients, and where both come from."""

    weights: Weights
    median: Mapping[str, float]  # coefficients of another machine, by name
    log_sd: Mapping[str, float]  # standard deviations of the logarithms of the coefficients
    scatter: float  # standard deviation of a program's log time in settings that no fit saw
    provenance: Mapping[str, Any]  # machines, versions, numbers of programs, the date, and the command

    def text(self) -> str:
        weights = self.weights
        pairs = zip(np.asarray(weights.operation_ns), np.asarray(weights.operation_log_sd), strict=True)
        each = zip(OPERATIONS, pairs, strict=True)
        operations = {name: {"ns": _short(ns), "log_sd": _short(sd)} for name, (ns, sd) in each}
        own = {name: _short(getattr(weights, name)) for name in BELIEVED}
        others = {n: dict(zip(one.per, own[n], strict=True)) if one.per else own[n] for n, one in BELIEVED.items()}
        coefficients = {name: [_short(self.median[name]), _short(self.log_sd[name])] for name in self.median}
        kept = {"version": VERSION, "vocabulary": vocabulary_version(), "provenance": dict(self.provenance)}
        kept |= {"scatter": _short(self.scatter), "coefficients": coefficients}
        kept |= {"weights": others, "operations": operations}
        # One line per entry, so that a diff of two files is readable.
        lines = [
            f' "{name}": {{\n' + ",\n".join(f'  "{key}": {json.dumps(each)}' for key, each in value.items()) + "\n }"
            if isinstance(value, dict)
            else f' "{name}": {json.dumps(value)}'
            for name, value in kept.items()
        ]
        return "{\n" + ",\n".join(lines) + "\n}\n"


def _short(value: Any) -> Any:
    return [_short(each) for each in value] if np.ndim(value) else float(f"{float(value):.5g}")


def read_weights(path: str | os.PathLike[str]) -> KnownWeights:
    """Read a file of weights, such as `weights.json`.

    Args:
        path: path of the file.

    Raises:
        ValueError: the file cannot be read, or its version or its vocabulary of operations is another one.

    Examples:
        >>> read_weights(SHIPPED).weights.operation_ns.shape[-1]
        5
    """
    from rlxjax._files import read_file  # loaded when first used

    try:
        kept = json.loads(read_file(path))
        own = kept["version"], kept["vocabulary"]
        if own != (VERSION, vocabulary_version()):
            expected = f"version {VERSION} of vocabulary {vocabulary_version()}"
            raise ValueError(f"expected {expected}, got version {own[0]} of {own[1]}")
        operations = [kept["operations"][name] for name in OPERATIONS]
        others = kept["weights"]
        weights = Weights(
            np.array([each["ns"] for each in operations], float),
            np.array([each["log_sd"] for each in operations], float),
            **{
                name: np.array([others[name][one] for one in believed.per] if believed.per else others[name], float)
                for name, believed in BELIEVED.items()
            },
        )
        shape = (len(OPERATIONS), WIDTHS)
        is_positive = all(np.all(np.isfinite(own) & (own > 0)) for own in vars(weights).values())
        if not is_positive or {weights.operation_ns.shape, weights.operation_log_sd.shape} != {shape}:
            raise ValueError(f"expected positive numbers, {WIDTHS} of each operation")
        median, log_sd = ({name: float(pair[side]) for name, pair in kept["coefficients"].items()} for side in (0, 1))
        return KnownWeights(weights, median, log_sd, float(kept["scatter"]), kept["provenance"])
    except (AttributeError, IndexError, KeyError, TypeError, json.JSONDecodeError) as reason:
        raise ValueError(f"{path}: is no file of weights ({type(reason).__name__}: {reason})") from None
    except ValueError as reason:
        raise ValueError(f"{path}: {reason}") from None


@functools.cache
def shipped_weights() -> KnownWeights | None:
    """Return the shipped weights. If their file cannot be read or has another version, warn and return None."""
    try:
        return read_weights(SHIPPED)
    except (OSError, ValueError) as reason:
        warnings.warn(f"{reason}; wide priors stand in", stacklevel=2)
        return None


#: Typical ns of an untimed operation on a processor of a present-day machine, by class. Then exceptions, by operation.
_TYPICAL_NS = {
    **{"arithmetic": 0.02, "movement": 0.03, "transpose": 0.3, "special": 0.2, "dear": 4.0},
    **{"iterated": 50.0, "reduction": 0.06, "cumulative": 1.0, "window": 0.3, "product": 0.012, "convolution": 0.02},
    **{"transform": 0.05, "sort": 4.0, "factorisation": 1.0, "random": 0.02, "indexing": 0.4},
}
_TYPICAL_OPERATION_NS = {
    **{"products": 100.0, "product_loads": 0.1, "product_results": 0.2, "reduced_rows": 6.0, "transforms": 50.0},
    **{"top_k": 0.5, "convolution_runs": 20.0, "convolution_loads": 0.3, "convolution_edge_loads": 1.0},
    **{"gather_places": 2.0, "scatter_places": 2.0, "div_by_scalar": 0.1, "rem_by_scalar": 0.2},
}
#: Typical ns of the counts of factorisations, by the last word of the count's name.
_TYPICAL_FACTOR_NS = {"flop": 0.05, "columns": 50.0, "matrices": 500.0}


def wide_weights() -> Weights:
    """Return weights without any timing: only the order of magnitude of each class of operations.

    Examples:
        >>> bool(wide_weights().timed().any())
        False
    """
    ns = np.array([_TYPICAL_OPERATION_NS.get(name, _TYPICAL_NS[OPERATIONS[name]]) for name in OPERATIONS])
    for place, name in enumerate(OPERATIONS):
        if OPERATIONS[name] == "factorisation":
            ns[place] = _TYPICAL_FACTOR_NS.get(name.rpartition("_")[2], ns[place])
    each = np.repeat(ns[:, None], WIDTHS, 1)
    others = {name: np.full([len(one.per)] if one.per else [], one.median) for name, one in BELIEVED.items()}
    return Weights(each, np.full_like(each, WIDE_LOG_SD), **others)


def known_weights() -> Weights:
    """Return the shipped weights, or `wide_weights()` if the shipped weights cannot be read."""
    known = shipped_weights()
    return wide_weights() if known is None else known.weights
