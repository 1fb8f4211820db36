"""Rules of products, convolutions, Fourier transforms, sorting, linear algebra, and what leaves the device.

FLOP of linear algebra are the leading orders of the textbooks, rounded down: LAPACK Working Note 41 for what
one factorisation takes, Golub and Van Loan, Matrix Computations (4th edition), for what iterates. A complex
multiply-add is four real ones.
"""

import math
from collections.abc import Callable, Iterator, Mapping

from ._operations import (
    Aval,
    Counting,
    Operation,
    OperationCounts,
    Rule,
    add_rules,
    arithmetic,
    elements,
    names,
    nbytes,
    number_kind,
)


def _multiply_adds(aval: Aval, times: int) -> OperationCounts:
    return arithmetic(aval, times, (2, 0), (8, 0))


def _products(op: Operation) -> int:
    """Return how many products of two matrices there are: the elements of the batch axes."""
    _, (batch, _) = op.params["dimension_numbers"]
    return math.prod(op.operand.shape[axis] for axis in batch)


def _dot(op: Operation) -> OperationCounts:
    """`2 m n k` for each of the batch."""
    (contracted, _), _ = op.params["dimension_numbers"]
    return _multiply_adds(op.operand, elements(op.result) * math.prod(op.operand.shape[axis] for axis in contracted))


def _reordered(op: Operation) -> list[bool]:
    """Whether the batch of an operand does not come first, or its contracted axes lie between others."""
    contracted, batched = op.params["dimension_numbers"]
    reordered = []
    for aval, axes, batch in zip(op.inputs, contracted, batched, strict=True):
        first, end = len(batch), len(aval.shape)
        rows, columns = range(first, first + len(axes)), range(end - len(axes), end)
        in_order = tuple(axes) in (tuple(rows), tuple(columns))
        reordered.append(tuple(batch) != tuple(range(first)) or not in_order)
    return reordered


def _ragged_dot(op: Operation) -> OperationCounts:
    """`2 m n k`: each row meets the matrix of its own group only."""
    numbers = op.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    groups = op.inputs[2].shape[-1]
    is_contracted = numbers.lhs_ragged_dimensions[0] in contracted
    products = elements(op.result) * math.prod(op.operand.shape[axis] for axis in contracted)
    return _multiply_adds(op.operand, products // groups if is_contracted and groups else products)


def _convolution(op: Operation) -> OperationCounts:
    """`2` for every element of the result, tap and input channel of its group; padding counts, holes do not."""
    kernel, numbers = op.inputs[1], op.params["dimension_numbers"]
    products = math.prod(op.result.shape[axis] for axis in numbers.out_spec[:2]) * kernel.shape[numbers.rhs_spec[1]]
    for positions, taps, _, stride, hole, dilation, before in _window_axes(op):
        products *= _taps_on_elements(positions, taps, stride, dilation, hole, before)
    return _multiply_adds(op.operand, products)


def _window_axes(op: Operation) -> Iterator[tuple[int, ...]]:
    """Yield of each axis of a window: positions, taps, elements, stride, hole, dilation, and the padding before."""
    numbers, params = op.params["dimension_numbers"], op.params
    specs = zip(numbers.out_spec[2:], numbers.rhs_spec[2:], numbers.lhs_spec[2:], strict=True)
    steps = zip(params["window_strides"], params["lhs_dilation"], params["rhs_dilation"], strict=True)
    for (axis, tap_axis, size_axis), step, (before, _) in zip(specs, steps, params["padding"], strict=True):
        yield op.result.shape[axis], op.inputs[1].shape[tap_axis], op.operand.shape[size_axis], *step, before


def _runs(op: Operation) -> int:
    """Return the runs of neighbours that a convolution reads: one a position, group and row of its window."""
    return window_reads(op)[0]


#: Channels of a short vector.
_VECTOR = 4


def window_reads(op: Operation) -> tuple[int, int, int]:
    """Return the runs of neighbours that a convolution reads, the loads of these, and those of windows over an edge.

    Channels, and the last axis of the window, lie beside each other. Channels that fill short vectors are loaded so.
    """
    numbers, kernel = op.params["dimension_numbers"], op.inputs[1]
    *rows, width = [kernel.shape[axis] for axis in numbers.rhs_spec[2:]] or [1]
    images, channels = op.result.shape[numbers.out_spec[0]], kernel.shape[numbers.rhs_spec[1]]
    windows, inside = images * op.params["feature_group_count"], 1
    for positions, taps, size, stride, hole, dilation, before in _window_axes(op):
        first, last = -(-max(before, 0) // stride), (before + (size - 1) * hole - (taps - 1) * dilation) // stride
        windows, inside = windows * positions, inside * max(min(last, positions - 1) - first + 1, 0)
    inside *= images * op.params["feature_group_count"]
    each = math.prod(rows) * width * (channels if channels % _VECTOR else channels // _VECTOR)
    return windows * math.prod(rows), windows * each, (windows - inside) * each


def _channels_last(op: Operation) -> int:
    """A copy of what does not lie as compilers want it: batch, space, channels; kernels space, in, out."""
    numbers = op.params["dimension_numbers"]
    last = len(op.result.shape) - 1
    space = tuple(range(1, last))
    wanted = (0, last, *space), (last, last - 1, *range(last - 1)), (0, last, *space)
    specs = (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)
    avals = (*op.inputs, *op.outputs)
    return sum(nbytes(aval) for aval, spec, order in zip(avals, specs, wanted, strict=True) if tuple(spec) != order)


def _taps_on_elements(positions: int, taps: int, stride: int, dilation: int, hole: int, before: int) -> int:
    """Return how many pairs of an output position and a tap do not fall between the elements of a dilated operand."""
    if hole == 1:
        return positions * taps
    residues = [0] * hole
    for position in range(min(positions, hole)):
        residues[position * stride % hole] += len(range(position, positions, hole))
    return sum(residues[(before - tap * dilation) % hole] for tap in range(taps))


def _fft(op: Operation) -> OperationCounts:
    """`5 n log2 n` for n complex points (Cooley and Tukey, as FFTW counts), half of it where one side is real."""
    points = math.prod(op.params["fft_lengths"])
    if points == 0:
        return OperationCounts()
    transforms = max(elements(op.operand), elements(op.result)) // points
    half_flops = (2 if number_kind(op.operand.dtype) == number_kind(op.result.dtype) else 1) * 5 * points
    return OperationCounts(transforms * round(half_flops * math.log2(points) / 2))


def _transforms(op: Operation) -> int:
    """Return how many transforms of the last axis there are."""
    return max(elements(op.operand), elements(op.result)) // max(op.params["fft_lengths"][-1], 1)


def _comparisons(aval: Aval, times: int) -> OperationCounts:
    return arithmetic(aval, times, (1, 0), (2, 0))


def _sort(op: Operation) -> OperationCounts:
    """`n ceil(log2 n)` comparisons of the first key."""
    length = op.operand.shape[op.params["dimension"]]
    return _comparisons(op.operand, elements(op.operand) * max(length - 1, 0).bit_length())


def _top_k(op: Operation) -> OperationCounts:
    """`n max(1, ceil(log2 k))` comparisons: a heap of k."""
    return _comparisons(op.operand, elements(op.operand) * max((max(op.params["k"], 1) - 1).bit_length(), 1))


def _copy(op: Operation) -> int:
    return nbytes(op.operand)


def _copy_of_either(op: Operation) -> int:
    """The operand in another order, or, as it is destroyed, its place and more for the results in that order."""
    return max(nbytes(op.operand), sum(map(nbytes, op.outputs)))


# --- Linear algebra: FLOP by the sizes of a matrix -------------------------------------------------


def _linear_algebra(flops: Callable[[Operation], int], operand: int = 0) -> Counting:
    """Return the rule of a factorisation: FLOP of one matrix, times the batch before its two axes."""

    def count(op: Operation) -> OperationCounts:
        batch = math.prod(op.inputs[operand].shape[:-2])
        real_flops = batch * flops(op)
        return OperationCounts(real_flops * (4 if number_kind(op.inputs[operand].dtype) == "complex" else 1))

    return count


def _of_order(numerator: int, denominator: int = 1) -> Counting:
    """Return the rule of a square matrix that takes a fraction of n**3 FLOP."""
    return _linear_algebra(lambda op: numerator * op.operand.shape[-1] ** 3 // denominator)


def _sizes(op: Operation) -> tuple[int, int]:
    m, n = op.operand.shape[-2:]
    return m, n


def _lu_flops(m: int, n: int) -> int:
    k = min(m, n)
    return (6 * m * n * k - 3 * (m + n) * k**2 + 2 * k**3) // 3


def _householder_flops(m: int, n: int, k: int) -> int:
    """K reflectors of an m by n matrix, made into R or multiplied out into Q."""
    return (12 * m * n * k - 6 * (m + n) * k**2 + 4 * k**3) // 3


def _qr_flops(op: Operation) -> int:
    m, n = _sizes(op)
    k = min(m, n)
    return _householder_flops(m, n, k) + _householder_flops(m, op.result.shape[-1], k)


def _svd_flops(op: Operation) -> int:
    """Golub and Reinsch (Golub and Van Loan, figure 8.6.1)."""
    n, m = sorted(op.operand.shape[-2:])
    if not op.params.get("compute_uv", True):
        return (12 * m * n**2 - 4 * n**3) // 3
    if op.params.get("full_matrices"):
        return 4 * m**2 * n + 8 * m * n**2 + 9 * n**3
    return 14 * m * n**2 + 8 * n**3


def _eig_flops(op: Operation) -> int:
    """25 n**3 with eigenvectors, 10 n**3 without (Golub and Van Loan, 7.5.6)."""
    vectors = op.params.get("compute_left_eigenvectors") or op.params.get("compute_right_eigenvectors")
    return (25 if vectors else 10) * op.operand.shape[-1] ** 3


def _ormqr_flops(op: Operation) -> int:
    m, n = op.result.shape[-2:]
    length, other = (m, n) if op.params.get("left", True) else (n, m)
    k = op.inputs[1].shape[-1]
    return 4 * length * other * k - 2 * other * k**2


_MATRIX_RULES: Mapping[str, Counting] = {
    "cholesky": _of_order(1, 3),
    "eigh": _of_order(9),
    "eig": _linear_algebra(_eig_flops),
    "schur": _of_order(25),
    "hessenberg": _of_order(10, 3),
    "tridiagonal": _of_order(4, 3),
    "lu": _linear_algebra(lambda op: _lu_flops(*_sizes(op))),
    "qr": _linear_algebra(_qr_flops),
    **dict.fromkeys(
        ("geqrf", "geqp3"),
        _linear_algebra(lambda op: _householder_flops(*_sizes(op), min(_sizes(op)))),
    ),
    "householder_product": _linear_algebra(lambda op: _householder_flops(*_sizes(op), op.inputs[1].shape[-1])),
    "ormqr": _linear_algebra(_ormqr_flops),
    "svd": _linear_algebra(_svd_flops),
    # n**2 for each right side, which lies along either axis of the second operand.
    "triangular_solve": _linear_algebra(lambda op: math.prod(op.inputs[1].shape[-2:]) * op.operand.shape[-1]),
    # The Thomas algorithm takes 8 n for each right side.
    "tridiagonal_solve": _linear_algebra(lambda op: 8 * math.prod(op.inputs[3].shape[-2:]), 3),
    # A rotation of two numbers for each element of the triangle.
    "cholesky_update": _linear_algebra(lambda op: 3 * op.operand.shape[-1] ** 2),
    "symmetric_product": _linear_algebra(lambda op: 2 * math.prod(op.operand.shape[-2:]) * op.operand.shape[-2]),
}


def _matrices(op: Operation) -> int:
    """Return how many matrices are worked on, each by a call of its own."""
    return math.prod(op.operand.shape[:-2])


# --- Between devices, to the host, and in kernels of one's own -----------------------------------


def _combining(op: Operation) -> OperationCounts:
    """One operation for every element that a device gives."""
    counts = [arithmetic(aval, elements(aval), (1, 0), (2, 0)) for aval in op.inputs]
    return OperationCounts(sum(c.flops for c in counts), 0, sum(c.integer_ops for c in counts))


def _nothing(op: Operation) -> OperationCounts:
    return OperationCounts()


def _permutation(op: Operation) -> OperationCounts:
    return OperationCounts(integer_ops=elements(op.operand))


def _pallas(op: Operation) -> OperationCounts | None:
    """What the kernel's author says; nothing is known without it."""
    estimate = op.params.get("cost_estimate")
    if estimate is None:
        return None
    return OperationCounts(int(estimate.flops), int(estimate.transcendentals), 0, int(estimate.bytes_accessed))


#: Primitives at which the device waits for the host.
CALLBACKS = names("pure_callback io_callback debug_callback debug_print python_callback infeed outfeed")

#: Factorisations whose library wants a matrix of its own, in its own order, or gives its results in that order.
_OWN_COPY = {**dict.fromkeys(("qr", "geqrf", "triangular_solve"), _copy), "svd": _copy_of_either}

add_rules(
    {
        name: Rule("linear algebra", rule, workspace=_OWN_COPY.get(name), slices=_matrices)
        for name, rule in _MATRIX_RULES.items()
    }
)
add_rules({name: Rule("callback", _nothing) for name in CALLBACKS})
add_rules(
    {
        name: Rule("collective", _combining)
        for name in names("psum psum2 psum_invariant pmax pmin reduce_scatter unreduced_psum unreduced_reduce_scatter")
    }
)
add_rules(
    {
        name: Rule("collective", _nothing)
        for name in names(
            "all_gather all_gather_invariant all_gather_reduced all_to_all ragged_all_to_all ppermute pshuffle "
            "psend precv reshard"
        )
    }
)
add_rules(
    {
        "dot_general": Rule("matmul", _dot, reorders=_reordered, slices=_products),
        "scaled_dot": Rule("matmul", _dot),
        "ragged_dot_general": Rule("matmul", _ragged_dot),
        "conv_general_dilated": Rule("convolution", _convolution, workspace=_channels_last, slices=_runs),
        "fft": Rule("fft", _fft, slices=_transforms),
        "sort": Rule("sort", _sort, in_place=True),
        "top_k": Rule("sort", _top_k),
        "approx_top_k": Rule("sort", _top_k),
        "lu_pivots_to_permutation": Rule("linear algebra", _permutation),
        "pallas_call": Rule("kernel", _pallas),
    }
)
