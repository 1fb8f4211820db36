"""Rules of products, convolutions, Fourier transforms, sorting and linear algebra.

FLOP of factorisations are the leading orders of the textbooks, rounded down: LAPACK Working Note 41 for what one takes,
Golub and Van Loan, Matrix Computations (4th edition), for what iterates. A complex multiply-add is four real ones.
"""

import math
from collections.abc import Callable, Iterator, Mapping

from ._rules import Operation, OperationCounts, Rule, arithmetic, elements, is_real_on_one_side, nbytes, number_kind

#: Channels of a short vector.
_VECTOR = 4
#: Factors that transforms are written out for; what a step of another one costs, of those; and how many steps of a
#: smooth transform Bluestein's algorithm (1970) takes for one of its own, with its other passes.
_WRITTEN_OUT, _OTHER_FACTOR, _BLUESTEIN = 5, 1.1, 3.0


def _multiply_adds(op: Operation, times: int) -> OperationCounts:
    return arithmetic(op.operand, times, (2, 0), (8, 0))


def _products(op: Operation) -> int:
    """Return how many products of two matrices there are: the elements of the batch axes."""
    _, (batch, _) = op.params["dimension_numbers"]
    return math.prod(op.operand.shape[axis] for axis in batch)


def _dot(op: Operation) -> OperationCounts:
    """`2 m n k` for each of the batch."""
    (contracted, _), _ = op.params["dimension_numbers"]
    return _multiply_adds(op, elements(op.result) * math.prod(op.operand.shape[axis] for axis in contracted))


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
    return _multiply_adds(op, products // groups if is_contracted and groups else products)


def _convolution(op: Operation) -> OperationCounts:
    """`2` for every element of the result, tap and input channel of its group; padding counts, holes do not."""
    kernel, numbers = op.inputs[1], op.params["dimension_numbers"]
    products = math.prod(op.result.shape[axis] for axis in numbers.out_spec[:2]) * kernel.shape[numbers.rhs_spec[1]]
    for positions, taps, _, stride, hole, dilation, before in _window_axes(op):
        products *= _taps_on_elements(positions, taps, stride, dilation, hole, before)
    return _multiply_adds(op, products)


def _window_axes(op: Operation) -> Iterator[tuple[int, ...]]:
    """Yield of each axis of a window: positions, taps, elements, stride, hole, dilation, and the padding before."""
    numbers, params = op.params["dimension_numbers"], op.params
    specs = zip(numbers.out_spec[2:], numbers.rhs_spec[2:], numbers.lhs_spec[2:], strict=True)
    steps = zip(params["window_strides"], params["lhs_dilation"], params["rhs_dilation"], strict=True)
    for (axis, tap_axis, size_axis), step, (before, _) in zip(specs, steps, params["padding"], strict=True):
        yield op.result.shape[axis], op.inputs[1].shape[tap_axis], op.operand.shape[size_axis], *step, before


def _taps_on_elements(positions: int, taps: int, stride: int, dilation: int, hole: int, before: int) -> int:
    """Return how many pairs of an output position and a tap do not fall between the elements of a dilated operand."""
    residues = [0] * hole
    for position in range(min(positions, hole)):
        residues[position * stride % hole] += len(range(position, positions, hole))
    return sum(residues[(before - tap * dilation) % hole] for tap in range(taps))


def _runs(op: Operation) -> int:
    """Return the runs of neighbours that a convolution reads: one a position, group and row of its window."""
    numbers = op.params["dimension_numbers"]
    rows = math.prod(op.inputs[1].shape[axis] for axis in numbers.rhs_spec[2:-1])
    positions = math.prod(op.result.shape[axis] for axis in numbers.out_spec[2:])
    return op.result.shape[numbers.out_spec[0]] * op.params["feature_group_count"] * positions * rows


def _window_reads(op: Operation) -> dict[str, int]:
    """Return the loads of the runs that a convolution reads, and those of windows over an edge."""
    numbers, kernel = op.params["dimension_numbers"], op.inputs[1]
    width, channels = kernel.shape[numbers.rhs_spec[-1]], kernel.shape[numbers.rhs_spec[1]]
    width = width if len(numbers.rhs_spec) > 2 else 1
    inside = op.result.shape[numbers.out_spec[0]] * op.params["feature_group_count"]
    rows = math.prod(op.inputs[1].shape[axis] for axis in numbers.rhs_spec[2:-1])
    for positions, taps, size, stride, hole, dilation, before in _window_axes(op):
        first, last = -(-max(before, 0) // stride), (before + (size - 1) * hole - (taps - 1) * dilation) // stride
        inside *= max(min(last, positions - 1) - first + 1, 0)
    each = width * (channels if channels % _VECTOR else channels // _VECTOR)
    loads = _runs(op) * each
    return {"window elements": loads, "edge window elements": loads - inside * rows * each}


def _channels_last(op: Operation) -> int:
    """A copy of what does not lie as compilers want it: batch, space, channels; kernels space, in, out."""
    numbers = op.params["dimension_numbers"]
    last = len(op.result.shape) - 1
    space = tuple(range(1, last))
    wanted = (0, last, *space), (last, last - 1, *range(last - 1)), (0, last, *space)
    specs = (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)
    avals = (*op.inputs, *op.outputs)
    return sum(nbytes(aval) for aval, spec, order in zip(avals, specs, wanted, strict=True) if tuple(spec) != order)


def _fft(op: Operation) -> OperationCounts:
    """`5 n log2 n` for n complex points (Cooley and Tukey, as FFTW counts), half of it where one side is real."""
    points = math.prod(op.params["fft_lengths"])
    if points == 0:
        return OperationCounts()
    half_flops = (1 if is_real_on_one_side(op) else 2) * 5 * points
    return OperationCounts(_points(op) // points * round(half_flops * math.log2(points) / 2))


def _points(op: Operation) -> int:
    return max(elements(op.operand), elements(op.result))


def _fft_steps(op: Operation) -> dict[str, int]:
    """Return the points of a Fourier transform times the sum of the factors of its lengths, half where one is real."""
    steps = _points(op) * sum(map(_steps_of_a_point, op.params["fft_lengths"]))
    return {"fft steps": round(steps / 2 if is_real_on_one_side(op) else steps)}


def _steps_of_a_point(length: int) -> float:
    """Return the sum of the factors of a length, those of Bluestein's algorithm if it takes fewer."""
    smooth_log2 = (2 * length - 1).bit_length()
    of_bluestein = _BLUESTEIN * smooth_log2 * 2**smooth_log2 / length
    total, factor = 0.0, 2
    while length > 1:
        if factor * factor > length:
            factor = length
        while length % factor == 0:
            total, length = total + (factor if factor <= _WRITTEN_OUT else _OTHER_FACTOR * factor), length // factor
        factor += 1
    return min(total, of_bluestein)


def _sort(op: Operation) -> OperationCounts:
    """`n ceil(log2 n)` comparisons of the first key."""
    length = op.operand.shape[op.params["dimension"]]
    return arithmetic(op.operand, elements(op.operand) * max(length - 1, 0).bit_length())


def _top_k(op: Operation) -> OperationCounts:
    """`n max(1, ceil(log2 k))` comparisons: a heap of k."""
    return arithmetic(op.operand, elements(op.operand) * max((max(op.params["k"], 1) - 1).bit_length(), 1))


LINEAR_ALGEBRA = "linear algebra"


def _matrix(
    flops: Callable[[Operation], int], workspace: Callable[[Operation], int] | None = None, operand: int = 0
) -> Rule:
    """Return the rule of a factorisation: FLOP of one matrix, times the batch before the two axes of an operand."""

    def count(op: Operation) -> OperationCounts:
        shape, is_complex = op.inputs[operand].shape, number_kind(op.inputs[operand].dtype) == "complex"
        return OperationCounts(math.prod(shape[:-2]) * flops(op) * (4 if is_complex else 1))

    return Rule(LINEAR_ALGEBRA, count, workspace=workspace, slices=lambda op: math.prod(op.operand.shape[:-2]))


def _of_order(numerator: int, denominator: int = 1) -> Rule:
    """Return the rule of a square matrix that takes a fraction of n**3 FLOP."""
    return _matrix(lambda op: numerator * op.operand.shape[-1] ** 3 // denominator)


def _lu_flops(op: Operation) -> int:
    m, n = op.operand.shape[-2:]
    k = min(m, n)
    return (6 * m * n * k - 3 * (m + n) * k**2 + 2 * k**3) // 3


def _householder_flops(m: int, n: int, k: int | None = None) -> int:
    """K reflectors of an m by n matrix, made into R or multiplied out into Q; as many as fit unless told."""
    k = min(m, n) if k is None else k
    return (12 * m * n * k - 6 * (m + n) * k**2 + 4 * k**3) // 3


def _qr_flops(op: Operation) -> int:
    m, n = op.operand.shape[-2:]
    return _householder_flops(m, n) + _householder_flops(m, op.result.shape[-1], min(m, n))


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


# Libraries want a matrix of their own, in their own order, or give their results in that order.


def _copy(op: Operation) -> int:
    return nbytes(op.operand)


def _copy_of_either(op: Operation) -> int:
    """The operand in another order, or, as it is destroyed, its place and more for the results in that order."""
    return max(nbytes(op.operand), sum(map(nbytes, op.outputs)))


#: By the name of the primitive.
RULES: Mapping[str, Rule] = {
    "dot_general": Rule("matmul", _dot, reorders=_reordered, slices=_products),
    "scaled_dot": Rule("matmul", _dot),
    "ragged_dot_general": Rule("matmul", _ragged_dot),
    "conv_general_dilated": Rule(
        "convolution", _convolution, workspace=_channels_last, slices=_runs, also=_window_reads
    ),
    # Transforms of the last axis.
    "fft": Rule("fft", _fft, slices=lambda op: _points(op) // max(op.params["fft_lengths"][-1], 1), also=_fft_steps),
    "sort": Rule("sort", _sort, in_place=True),
    **dict.fromkeys(("top_k", "approx_top_k"), Rule("sort", _top_k)),
    "cholesky": _of_order(1, 3),
    "eigh": _of_order(9),
    "eig": _matrix(_eig_flops),
    "schur": _of_order(25),
    "hessenberg": _of_order(10, 3),
    "tridiagonal": _of_order(4, 3),
    "lu": _matrix(_lu_flops),
    "qr": _matrix(_qr_flops, _copy),
    "geqrf": _matrix(lambda op: _householder_flops(*op.operand.shape[-2:]), _copy),
    "geqp3": _matrix(lambda op: _householder_flops(*op.operand.shape[-2:])),
    "householder_product": _matrix(lambda op: _householder_flops(*op.operand.shape[-2:], k=op.inputs[1].shape[-1])),
    "ormqr": _matrix(_ormqr_flops),
    "svd": _matrix(_svd_flops, _copy_of_either),
    # n**2 for each right side, which lies along either axis of the second operand.
    "triangular_solve": _matrix(lambda op: math.prod(op.inputs[1].shape[-2:]) * op.operand.shape[-1], _copy),
    # The Thomas algorithm takes 8 n for each right side.
    "tridiagonal_solve": _matrix(lambda op: 8 * math.prod(op.inputs[3].shape[-2:]), operand=3),
    # A rotation of two numbers for each element of the triangle.
    "cholesky_update": _matrix(lambda op: 3 * op.operand.shape[-1] ** 2),
    "symmetric_product": _matrix(lambda op: 2 * math.prod(op.operand.shape[-2:]) * op.operand.shape[-2]),
    "lu_pivots_to_permutation": Rule(LINEAR_ALGEBRA, lambda op: OperationCounts(integer_ops=elements(op.operand))),
}
