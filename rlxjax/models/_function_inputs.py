"""From the profile of a function to the inputs of the latency model of functions: exact counts, weighted and summed.

The constants are those with which the model fits the timings of functions in `docs/evidence` best.
"""

from collections.abc import Mapping

from rlxjax.jaxpr import FunctionProfile

KernelGroup = object

from ._primitive_weights import EXPANDED_OPERATIONS, MATRIX_WEIGHTS, SPECIAL_WEIGHTS

#: Bytes of a float32: operations on wider numbers count as so many on these.
WORD_BYTES = 4
#: Operations that one of a 16-bit float stands for, and special functions: conversions to float32 and back.
NARROW_OPERATIONS, NARROW_SPECIAL = 7.0, 1.6
#: What an array that a call gives takes, of one that it takes; and a kernel that a loop launches, of one by itself.
RESULT_WEIGHT, LOOPED_WEIGHT = 5.0, 0.05
#: Kernels that one of so many bytes counts as on top, where a program has others and one processor does it.
LARGE_LAUNCH, LARGE_LAUNCH_BYTES = 1.8, 2.2e4
#: Operations below which a program runs in the thread that calls it, and how sharply others do not.
HANDED_OVER_OPERATIONS, HANDED_OVER_SHARPNESS = 700.0, 10

#: Bytes that a kernel writes from which processors share it; where it computes more than it moves, its FLOP and ten
#: times its bytes; bytes and special functions of a reduction; and bytes of heavier work, so many FLOP of which count
#: as one.
SHARED_WRITTEN_BYTES, SHARED_OPERATIONS, SHARED_REDUCTION, SHARED_HEAVY_BYTES = 3.0e5, 2.5e5, 3e5, 8e5
HEAVY_FLOP_OF_A_BYTE = 90.0
#: How sharply elementwise kernels are shared from there on, and others.
SHARPLY, GRADUALLY = 8, 3
#: A kernel that is shared after another one, of the first, which wakes the other processors.
NEXT_SHARED = 0.16

#: Bytes of all that a program touches that do not stay in the caches from one run to the next, and of one kernel that
#: do not stay from one kernel to the next.
UNCACHED_BYTES, UNCACHED_KERNEL_BYTES = 3.2e7, 2e6
#: Bytes of one result for which an allocator takes new memory from the system, and what one costs, of one moved.
FRESH_BYTES, FRESH_WEIGHT = 3.2e7, 20.0
#: What one byte read costs, of one written; what lies in caches is read ahead.
READ_SHARE = 0.74
#: Bytes of a kernel that a first cache holds, and what one of these costs, of others.
NEAR_BYTES, NEAR_WEIGHT = 4e4, 0.5

#: An element that a gather reads, of a place that it finds; and a place that a scatter finds.
GATHERED_WEIGHT, SCATTERED_WEIGHT = 0.4, 0.75
#: What an element of a transpose takes, of one that is moved in tiles: others are read at a stride, which may be one
#: of many sets of a cache or of few.
TRANSPOSE_WEIGHTS: Mapping[str, float] = {
    "transpose inner": 1.0,
    "transpose inner by sets": 1.0,
    "transpose inner by pages": 1.0,
    "transpose inner, untiled": 3.4,
    "transpose inner by sets, untiled": 8.7,
    "transpose inner by pages, untiled": 25.0,
}
#: Operations that choosing between the parts of a concatenation takes, or between an array and its padding.
BRANCH_OPERATIONS, BRANCHES = 20.0, ("concatenate", "stack", "pad")
#: What a special function that vectors hold takes more where a kernel pads its values; and those that they hold, by
#: their weights.
PADDED_SPECIAL, VECTOR_WEIGHT = 6.0, 3.0
#: An operation of a reduction along the last axis, of an elementwise one; operations of entering a row of a
#: reduction; an element of argmax, of a cumulative sum.
REDUCED_WEIGHT, ROW_OPERATIONS, RANKED_WEIGHT = 2.6, 600.0, 1.9
#: An element of a window, of one of a cumulative sum.
WINDOW_WEIGHT = 0.1
#: Exponentials that a logarithm takes on top where it is computed beside one.
LOG_BESIDE_EXP = 2.5
#: FLOP of a step of a transform, of which a rule of one's own says no steps.
FLOP_OF_A_STEP = 2.5
#: A step of a transform of which one side is real, of a complex one; steps that stand for a transform; and bytes from
#: which it leaves a cache, and what its steps then take more.
REAL_TRANSFORM, STEPS_OF_A_TRANSFORM, LONG_TRANSFORM_BYTES, LONG_TRANSFORM = 1.4, 950.0, 1.3e5, 1.5
#: FLOP that stand for one product more of a batch of them.
FLOP_OF_A_PRODUCT = 7e3
#: FLOP that stand for a run of neighbours that a convolution reads, for a load of one, and for a load of a window over
#: an edge; and for an element of a factorisation.
FLOP_OF_A_RUN, FLOP_OF_A_LOAD, FLOP_OF_AN_EDGE_LOAD, FLOP_OF_AN_ELEMENT = 2100.0, 33.0, 240.0, 270.0
#: FLOP that stand for a call of a factorisation, of one matrix.
FLOP_OF_A_MATRIX = 3.7e3
#: A comparison of a heap, of one of a sort.
HEAP_WEIGHT = 0.05
#: Factorisations whose operations XLA does not know.
LAPACK_CALLS = ("lu", "qr", "geqrf", "householder_product", "ormqr", "eigh", "eig", "svd", "schur")

#: Families whose work a kernel's bytes say little of.
HEAVY_FAMILIES = ("matmul", "convolution", "fft", "random", "window", "cumulative")
#: What processors may share, with the unit of each: there is what one does alone, and what all of them do.
SHAREABLE: Mapping[str, str] = {
    "elementwise_ops": "operations",
    "special_ops": "exponentials",
    "moved_bytes": "bytes",
    "indexed_places": "places",
    "transposed_elements": "elements",
    "scanned_elements": "elements",
    "matmul_flop": "FLOP",
    "convolution_flop": "FLOP",
    "fft_steps": "steps",
    "random_ops": "operations",
}
#: The columns by what is counted there, with the unit of each.
INPUTS: Mapping[str, str] = {
    "arrays": "arrays",
    "hand_overs": "programs",
    "launches": "kernels",
    "trips": "trips",
    "shared_launches": "kernels",
    "uncached_bytes": "bytes",
    "comparisons": "comparisons",
    "matrix_flop": "FLOP",
    **SHAREABLE,
    **{f"shared_{name}": unit for name, unit in SHAREABLE.items()},
}


def function_inputs(profile: FunctionProfile) -> dict[str, float]:
    """Return the inputs of the functions model that a profile gives, by name."""
    sums = dict.fromkeys(INPUTS, 0.0)
    sums["arrays"] = profile.arrays + (RESULT_WEIGHT - 1.0) * profile.results
    sums["trips"] = float(profile.trips)
    static = float(profile.static_ops)
    is_alone = sum(group.launches for group in profile.kernels) == 1
    uncached_share = _beyond(profile.peak_bytes, UNCACHED_BYTES, SHARPLY)
    for group in profile.kernels:
        launches, elements, each_bytes = group.launches, group.elements, group.bytes / group.launches
        counts = _counts(group)
        share = _shared(group, counts)
        large = LARGE_LAUNCH * (_beyond(each_bytes, LARGE_LAUNCH_BYTES, 2) * (1.0 - share) * (not is_alone))
        sums["launches"] += LOOPED_WEIGHT * group.looped + (launches - group.looped) * (1.0 + large)
        sums["shared_launches"] += share * launches
        beyond = _beyond(each_bytes, UNCACHED_KERNEL_BYTES, 2)
        fresh = FRESH_WEIGHT * group.written_bytes * _beyond(group.written_bytes / launches, FRESH_BYTES, SHARPLY)
        sums["uncached_bytes"] += uncached_share * beyond * group.bytes + fresh
        for name, count in counts.items():
            if name in SHAREABLE:
                sums[f"shared_{name}"] += share * count
                count *= 1.0 - share
            sums[name] += count
        # What XLA counts beyond the operations: what it writes out, less what LAPACK does.
        hidden = group.flops if group.kind.operation in LAPACK_CALLS else 0
        written_out = sum(EXPANDED_OPERATIONS.get(name, 0.0) * count for name, count in elements.items())
        static += (written_out - hidden) / launches
    sums["shared_launches"] = min(sums["shared_launches"], 1.0) + NEXT_SHARED * max(sums["shared_launches"] - 1.0, 0.0)
    sums["hand_overs"] = _beyond(max(static, 0.0), HANDED_OVER_OPERATIONS, HANDED_OVER_SHARPNESS)
    return sums


def _counts(group: KernelGroup) -> dict[str, float]:
    """Return the work of the kernels of one group, by input."""
    kind, elements = group.kind, group.elements
    wide, width = kind.itemsize >= 2 * WORD_BYTES, max(kind.itemsize, WORD_BYTES) / WORD_BYTES
    narrow = 2 * kind.itemsize == WORD_BYTES
    flop, launches = group.flops * width, group.launches
    cheap = (group.flops + group.integer_ops) * width * (NARROW_OPERATIONS if narrow else 1.0)
    written = max(group.written_bytes / max(kind.itemsize, 1), 1.0)
    padded = PADDED_SPECIAL * min(elements.get("pad", 0) / written, 1.0)
    special = 0.0
    for name in elements.keys() & SPECIAL_WEIGHTS.keys():
        weight = SPECIAL_WEIGHTS[name][wide]
        special += elements[name] * weight * (1.0 + padded * (weight <= VECTOR_WEIGHT))
    logs = elements.get("log", 0) + elements.get("log1p", 0)
    special += LOG_BESIDE_EXP * min(elements.get("exp", 0), logs)
    slices = elements.get(f"{kind.operation} slices", 0)
    nearness = NEAR_WEIGHT + (1.0 - NEAR_WEIGHT) * _beyond(group.bytes / launches, NEAR_BYTES, 2)
    found = {
        "elementwise_ops": BRANCH_OPERATIONS * sum(elements.get(name, 0) for name in BRANCHES),
        "special_ops": special * (NARROW_SPECIAL if narrow else 1.0),
        "moved_bytes": (READ_SHARE * (group.bytes - group.written_bytes) + group.written_bytes) * nearness,
        "indexed_places": elements.get("gather slices", 0) + GATHERED_WEIGHT * elements.get("gather", 0),
        "transposed_elements": sum(weight * elements.get(name, 0) for name, weight in TRANSPOSE_WEIGHTS.items()),
    }
    match kind.family:
        case "matmul":
            found["matmul_flop"] = flop + FLOP_OF_A_PRODUCT * max(slices - launches, 0)
        case "convolution":
            loads, of_edges = elements.get("window elements", 0), elements.get("edge window elements", 0)
            read = FLOP_OF_A_LOAD * loads + FLOP_OF_AN_EDGE_LOAD * of_edges
            found["convolution_flop"] = flop + FLOP_OF_A_RUN * slices + read
        case "fft":
            steps = elements.get("fft steps", flop / FLOP_OF_A_STEP)
            steps *= REAL_TRANSFORM if kind.operation == "fft real" else 1.0
            each_bytes = elements[kind.operation] * kind.itemsize / max(slices, 1)
            steps *= 1.0 + LONG_TRANSFORM * _beyond(each_bytes, LONG_TRANSFORM_BYTES, GRADUALLY)
            found["fft_steps"] = max(kind.itemsize / 8, 1.0) * (steps + STEPS_OF_A_TRANSFORM * slices)
        case "sort":
            weight = HEAP_WEIGHT if "top_k" in kind.operation else 1.0
            found["comparisons"] = weight * (group.flops + group.integer_ops)
        case "linear algebra":
            weight = MATRIX_WEIGHTS.get(kind.operation, 1.0)
            each = weight * FLOP_OF_AN_ELEMENT * width * elements["matrix elements"]
            found["matrix_flop"] = flop + each + max(weight, 1.0) * FLOP_OF_A_MATRIX * slices
        case "random":
            found["random_ops"] = float(group.integer_ops)
        case "cumulative":
            found["scanned_elements"] = cheap
        case "window":
            found["scanned_elements"] = WINDOW_WEIGHT * cheap
        case "reduction" if kind.operation.startswith("arg"):
            found["scanned_elements"] = RANKED_WEIGHT * cheap
        case "reduction":
            weight = REDUCED_WEIGHT if kind.operation.endswith("inner") else 1.0
            found["elementwise_ops"] += weight * cheap + ROW_OPERATIONS * elements.get("rows", 0)
        case family:
            found["elementwise_ops"] += cheap
            found["indexed_places"] += SCATTERED_WEIGHT * slices if family == "scatter" else 0.0
    return found


def _shared(group: KernelGroup, counts: Mapping[str, float]) -> float:
    """Return how surely processors share the kernels of a group: from 0, each by one processor, to 1."""
    kind, launches = group.kind, group.launches
    is_one_transform = kind.family == "fft" and group.elements.get(f"{kind.operation} slices", launches) == launches
    if is_one_transform or kind.family in ("sort", "linear algebra", "scatter"):
        return 0.0
    if kind.family in HEAVY_FAMILIES:
        width = max(kind.itemsize, WORD_BYTES) / WORD_BYTES
        operations = group.flops * width + group.integer_ops * (kind.family == "random")
        pieces = max(group.elements.get("dot_general slices", launches), 1)
        return _beyond((group.bytes + operations / HEAVY_FLOP_OF_A_BYTE) / pieces, SHARED_HEAVY_BYTES, GRADUALLY)
    if kind.family == "reduction":
        return _beyond((group.bytes + counts["special_ops"]) / launches, SHARED_REDUCTION, GRADUALLY)
    computes = _beyond(group.flops / max(group.bytes, 1), 1.0, SHARPLY)
    by_operations = _beyond((group.flops + 10 * group.bytes) / launches, SHARED_OPERATIONS, SHARPLY)
    by_bytes = _beyond(group.written_bytes / launches, SHARED_WRITTEN_BYTES, SHARPLY)
    return computes * by_operations + (1.0 - computes) * by_bytes


def _beyond(size: float, threshold: float, sharpness: float) -> float:
    """Return `x**p / (x**p + 1)` of a size in units of a threshold: from 0 far below to 1 far above."""
    return 1.0 / (1.0 + (threshold / size) ** sharpness) if size > threshold * 1e-6 else 0.0
