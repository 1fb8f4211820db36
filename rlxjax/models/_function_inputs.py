"""From the profile of a function to the inputs of the latency model of functions: exact counts, weighted and summed."""

from collections.abc import Mapping

from rlxjax.graph import FunctionProfile, KernelGroup

from ._primitive_weights import MATRIX_WEIGHTS, SPECIAL_WEIGHTS, expanded

#: Bytes of a float32: operations on wider numbers count as so many on these.
WORD_BYTES = 4
#: Operations that one of a 16-bit float stands for: conversions to float32 and back.
NARROW_OPERATIONS = 6.0
#: Operations below which a program runs in the thread that calls it, and how sharply others do not.
HANDED_OVER_OPERATIONS, HANDED_OVER_SHARPNESS = 950.0, 10
#: Bytes of one kernel from which processors share it and from which they lie beyond the caches, and how sharply.
SHARED_BYTES, UNCACHED_BYTES, SHARPNESS = 5e5, 1.6e7, 2
#: Operations of one kernel that count as a byte where processors share it.
OPERATIONS_OF_A_BYTE = 4.0

#: What one byte read costs, of one written; what lies in caches is read ahead.
READ_SHARE = 0.2
#: A place that a gather or a scatter finds costs as much as so many elements that it reads.
ELEMENTS_OF_A_SLICE = 6.0
#: What an element of a transpose takes, of one that is read without tiles, at a stride of many sets of a cache.
TRANSPOSE_WEIGHTS: Mapping[str, float] = {
    "transpose inner": 0.5,
    "transpose inner by pages": 0.5,
    "transpose inner, untiled": 1.0,
    "transpose inner by pages, untiled": 5.0,
}
#: An operation of a reduction along the last axis, of an elementwise one; an element of argmax, of a cumulative sum.
REDUCED_WEIGHT, RANKED_WEIGHT = 2.0, 1.5
#: An element of a window, of one of a cumulative sum.
WINDOW_WEIGHT = 0.3
#: Bytes of one transform from which it takes twice as long, for the operations.
LONG_TRANSFORM_BYTES = 2.5e5
#: A kernel that is shared after another one, of the first, which wakes the other processors.
NEXT_SHARED = 0.35
#: FLOP that stand for a run of channels that a convolution reads, and for an element of a factorisation.
FLOP_OF_A_TAP, FLOP_OF_AN_ELEMENT = 800.0, 200.0
#: FLOP that stand for a call of a factorisation, of one matrix.
FLOP_OF_A_MATRIX = 1e4
#: A comparison of a heap, of one of a sort.
HEAP_WEIGHT = 0.08
#: Factorisations whose operations XLA does not know.
LAPACK_CALLS = ("lu", "qr", "geqrf", "householder_product", "ormqr", "eigh", "eig", "svd", "schur")
#: The columns by what is counted there, with the unit of each.
INPUTS: Mapping[str, str] = {
    "arrays": "arrays",
    "hand_overs": "programs",
    "launches": "kernels",
    "trips": "trips",
    "shared_launches": "kernels",
    "shared_share": "share",
    "elementwise_ops": "operations",
    "special_ops": "exponentials",
    "moved_bytes": "bytes",
    "uncached_bytes": "bytes",
    "indexed_elements": "elements",
    "transposed_elements": "elements",
    "scanned_elements": "elements",
    "matmul_flop": "FLOP",
    "convolution_flop": "FLOP",
    "fft_flop": "FLOP",
    "comparisons": "comparisons",
    "matrix_flop": "FLOP",
    "random_ops": "operations",
}


def function_inputs(profile: FunctionProfile) -> dict[str, float]:
    """Return the inputs of the functions model that a profile gives, by name.

    Args:
        profile: of a function.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from rlxjax.graph import profile_function
        >>> square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        >>> found = function_inputs(profile_function(lambda x: jnp.tanh(x @ x), square))
        >>> found["matmul_flop"], found["launches"], found["arrays"]
        (524288.0, 2.0, 2.0)
    """
    sums = dict.fromkeys(INPUTS, 0.0)
    sums["arrays"] = float(profile.arrays)
    sums["trips"] = float(profile.trips)
    static, shared_work, work = float(profile.static_ops), 0.0, 0.0
    for group in profile.kernels:
        counts = _counts(group)
        for name, count in counts.items():
            sums[name] += count
        each_bytes = (group.bytes + OPERATIONS_OF_A_BYTE * _operations(counts)) / group.launches
        share = 0.0 if _is_serial(group) else _beyond(each_bytes, SHARED_BYTES)
        sums["shared_launches"] += share * group.launches
        work += each_bytes * group.launches
        shared_work += share * each_bytes * group.launches
        static += _static_operations(group)
    sums["shared_launches"] = min(sums["shared_launches"], 1.0) + NEXT_SHARED * max(sums["shared_launches"] - 1.0, 0.0)
    sums["shared_share"] = shared_work / work if work else 0.0
    sums["hand_overs"] = _beyond(max(static, 0.0), HANDED_OVER_OPERATIONS, HANDED_OVER_SHARPNESS)
    return sums


def _counts(group: KernelGroup) -> dict[str, float]:
    """Return what the kernels of one group add to the inputs."""
    kind, elements = group.kind, group.elements
    wide, width = kind.itemsize >= 2 * WORD_BYTES, max(kind.itemsize, WORD_BYTES) / WORD_BYTES
    flop = group.flops * width
    cheap = (group.flops + group.integer_ops) * width * (NARROW_OPERATIONS if 2 * kind.itemsize == WORD_BYTES else 1.0)
    transposed = sum(weight * elements.get(name, 0) for name, weight in TRANSPOSE_WEIGHTS.items())
    slices = elements.get(f"{kind.operation} slices", 0)
    found = {
        "launches": float(group.launches),
        "moved_bytes": READ_SHARE * (group.bytes - group.written_bytes) + group.written_bytes,
        "uncached_bytes": group.bytes * _beyond(group.bytes / group.launches, UNCACHED_BYTES),
        "special_ops": sum(n * SPECIAL_WEIGHTS[name][wide] for name, n in elements.items() if name in SPECIAL_WEIGHTS),
        "indexed_elements": elements.get("gather", 0) + ELEMENTS_OF_A_SLICE * elements.get("gather slices", 0),
        "transposed_elements": transposed,
    }
    match kind.family:
        case "matmul":
            found["matmul_flop"] = flop
        case "convolution":
            found["convolution_flop"] = flop + FLOP_OF_A_TAP * slices
        case "fft":
            each_bytes = elements[kind.operation] * kind.itemsize / max(slices, 1)
            found["fft_flop"] = flop * (1.0 + _beyond(each_bytes, LONG_TRANSFORM_BYTES))
        case "sort":
            weight = HEAP_WEIGHT if "top_k" in kind.operation else 1.0
            found["comparisons"] = weight * (group.flops + group.integer_ops)
        case "linear algebra":
            weight = FLOP_OF_AN_ELEMENT * MATRIX_WEIGHTS.get(kind.operation, 1.0) * width
            found["matrix_flop"] = flop + weight * elements[kind.operation] + FLOP_OF_A_MATRIX * slices
        case "random":
            found["random_ops"] = float(group.integer_ops)
        case "scatter":
            found["indexed_elements"] += ELEMENTS_OF_A_SLICE * slices
            found["elementwise_ops"] = cheap
        case "cumulative":
            found["scanned_elements"] = cheap
        case "window":
            found["scanned_elements"] = WINDOW_WEIGHT * cheap
        case "reduction" if kind.operation.startswith("arg"):
            found["scanned_elements"] = RANKED_WEIGHT * cheap
        case "reduction" if kind.operation.endswith("inner"):
            found["elementwise_ops"] = REDUCED_WEIGHT * cheap
        case _:
            found["elementwise_ops"] = cheap
    return found


def _operations(counts: Mapping[str, float]) -> float:
    """Return how much a kernel computes, in operations of about equal cost, to tell whether it is worth sharing."""
    heavy = sum(counts.get(name, 0.0) for name in ("matmul_flop", "convolution_flop", "fft_flop")) / 16.0
    return counts["special_ops"] + counts.get("random_ops", 0.0) / 16.0 + heavy


def _is_serial(group: KernelGroup) -> bool:
    """Whether one processor alone does the work: sorts, factorisations, and a transform by itself."""
    slices = group.elements.get(f"{group.kind.operation} slices", 0)
    is_one = group.kind.family == "fft" and slices == group.launches
    return is_one or group.kind.family in ("sort", "linear algebra", "scatter")


def _static_operations(group: KernelGroup) -> float:
    """Return what XLA counts of one kernel of a group beyond its operations: what it writes out, less LAPACK's."""
    hidden = group.flops if group.kind.operation in LAPACK_CALLS else 0
    return (sum(expanded(name) * count for name, count in group.elements.items()) - hidden) / group.launches


def _beyond(size: float, threshold: float, sharpness: float = SHARPNESS) -> float:
    """Return `x**p / (x**p + 1)` of a size in units of a threshold: from 0 far below to 1 far above."""
    return 1.0 / (1.0 + (threshold / size) ** sharpness) if size > threshold * 1e-6 else 0.0
