"""Counting rules of products, convolutions, Fourier transforms, sorting and linear algebra.

A factorisation counts the leading term of the FLOP in a textbook, rounded down: LAPACK Working Note 41 for direct
algorithms; Golub and Van Loan, Matrix Computations (4th edition), for iterative algorithms. A complex multiply-add
counts as four real multiply-adds.
"""

import math
from collections.abc import Callable, Mapping

from ._rules import Operation, Rule, elements, is_real_on_one_side, nbytes

#: A Fourier transform with more points than this number counts as long.
_LONG = 2**13
#: The number of channels that a vector load reads.
_VECTOR = 4
#: The largest prime factor with special FFT code. Then two costs relative to a step of that code: a step for a larger
#: factor, and a step of Bluestein's algorithm (1970).
_WRITTEN_OUT, _OTHER_FACTOR, _BLUESTEIN = 5, 1.1, 3.0


def _products(op: Operation) -> int:
    """Return the number of matrix products, which is the product of the batch sizes."""
    return math.prod(op.operand.shape[axis] for axis in op.params["dimension_numbers"][1][0])


def _dot(op: Operation) -> int:
    """Return the number of multiply-adds: `m n k` for each matrix product of the batch."""
    (contracted, _), _ = op.params["dimension_numbers"]
    return elements(op.result) * math.prod(op.operand.shape[axis] for axis in contracted)


def _product_reads(op: Operation) -> dict[str, int]:
    """Return the numbers of matrix products, operand elements and results. Products with a vector count separately."""
    (left, _), _ = op.params["dimension_numbers"]
    shared, count = math.prod(op.operand.shape[axis] for axis in left), _products(op)
    sides = [elements(aval) // max(shared * count, 1) for aval in op.inputs[:2]]
    if min(sides) <= 1:
        return {"dot_general": 0, "product_with_vector": 2 * _dot(op), "products": count}
    loads = sum(elements(aval) for aval in op.inputs[:2])
    return {"products": count, "product_loads": loads, "product_results": elements(op.result)}


def _reordered(op: Operation) -> list[bool]:
    """Return for each operand: True if its batch axes are not first or its contracted axes lie between other axes."""
    reordered = []
    for aval, axes, batch in zip(op.inputs, *op.params["dimension_numbers"], strict=True):
        first, end = len(batch), len(aval.shape)
        in_order = tuple(axes) in (tuple(range(first, first + len(axes))), tuple(range(end - len(axes), end)))
        reordered.append(tuple(batch) != tuple(range(first)) or not in_order)
    return reordered


def _ragged_dot(op: Operation) -> int:
    """Return the number of multiply-adds, `m n k`: each row is multiplied only by the matrix of the row's group."""
    numbers = op.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    groups = op.inputs[2].shape[-1] if numbers.lhs_ragged_dimensions[0] in contracted else 1
    return elements(op.result) * math.prod(op.operand.shape[axis] for axis in contracted) // max(groups, 1)


def _window(op: Operation) -> list[tuple[int, ...]]:
    """Return for each spatial axis: sizes of result, kernel and operand; stride; both dilations; padding in front."""
    numbers, params, (operand, kernel) = op.params["dimension_numbers"], op.params, op.inputs
    specs = numbers.out_spec[2:], numbers.rhs_spec[2:], numbers.lhs_spec[2:]
    steps = params["window_strides"], params["lhs_dilation"], params["rhs_dilation"], params["padding"]
    return [
        (op.result.shape[out], kernel.shape[tap], operand.shape[size], *step, before)
        for out, tap, size, *step, (before, _) in zip(*specs, *steps, strict=True)
    ]


def _convolution(op: Operation) -> int:
    """Count a multiply-add for each result, kernel element and input channel. Padding counts, but holes do not."""
    numbers = op.params["dimension_numbers"]
    products = op.inputs[1].shape[numbers.rhs_spec[1]]
    products *= math.prod(op.result.shape[axis] for axis in numbers.out_spec[:2])
    for positions, taps, _, stride, hole, dilation, before in _window(op):
        products *= sum(
            len(range(first, positions, hole))
            for first in range(min(positions, hole))
            for tap in range(taps)
            if (first * stride + tap * dilation - before) % hole == 0
        )
    return products


def _runs(op: Operation) -> int:
    """Return the number of contiguous runs that are read: one for each image, group, position and row of the window."""
    axes, images = _window(op), op.result.shape[op.params["dimension_numbers"].out_spec[0]]
    positions, rows = math.prod(axis[0] for axis in axes), math.prod(axis[1] for axis in axes[:-1])
    return images * op.params["feature_group_count"] * positions * rows


def _window_reads(op: Operation) -> dict[str, int]:
    """Return the number of runs, the number of vector loads, and the number of loads of windows that cross an edge."""
    axes, channels = _window(op), op.inputs[1].shape[op.params["dimension_numbers"].rhs_spec[1]]
    runs = inside = _runs(op)
    for positions, taps, size, stride, hole, dilation, before in axes:
        first, last = -(-max(before, 0) // stride), (before + (size - 1) * hole - (taps - 1) * dilation) // stride
        inside = inside // max(positions, 1) * max(min(last, positions - 1) - first + 1, 0)
    each = (axes[-1][1] if axes else 1) * (channels if channels % _VECTOR else channels // _VECTOR)
    loads = {"convolution_loads": runs * each, "convolution_edge_loads": (runs - inside) * each}
    return {"convolution_runs": runs} | loads


def _channels_last(op: Operation) -> int:
    """Return the bytes of arrays in a layout other than (batch, space, channels) or, for a kernel, (space, in, out)."""
    numbers, last = op.params["dimension_numbers"], len(op.result.shape) - 1
    image, kernel = (0, last, *range(1, last)), (last, last - 1, *range(last - 1))
    specs = map(tuple, (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec))
    lying = zip((*op.inputs, op.result), specs, (image, kernel, image), strict=True)
    return nbytes(*(aval for aval, spec, order in lying if spec != order))


def _fft(op: Operation) -> int:
    """Return the FLOP: `5 n log2 n` for n complex points (Cooley and Tukey, as in FFTW), half if one side is real."""
    points = math.prod(op.params["fft_lengths"])
    half_flops = (1 if is_real_on_one_side(op) else 2) * 5 * points
    return _points(op) // points * round(half_flops * math.log2(points) / 2) if points else 0


def _points(op: Operation) -> int:
    return max(elements(op.operand), elements(op.result))


def _transforms(op: Operation) -> int:
    """Return the number of one-dimensional transforms along the last axis."""
    return _points(op) // max(op.params["fft_lengths"][-1], 1)


def _fft_steps(op: Operation) -> dict[str, int]:
    """Count an FFT's steps: the points times the sum of all lengths' prime factors; half if input or output is real."""
    steps = _points(op) * sum(map(_steps_of_a_point, op.params["fft_lengths"]))
    steps = round(steps / 2 if is_real_on_one_side(op) else steps)
    is_long = max(op.params["fft_lengths"], default=1) > _LONG
    return {"fft_steps": 0, "fft_long_steps" if is_long else "fft_steps": steps, "transforms": _transforms(op)}


def _steps_of_a_point(length: int) -> float:
    """Return the steps of a point of an FFT: the sum of a length's prime factors, or less with Bluestein's method."""
    smooth_log2 = (2 * length - 1).bit_length()
    of_bluestein = _BLUESTEIN * smooth_log2 * 2**smooth_log2 / max(length, 1)
    total, factor = 0.0, 2
    while length > 1:
        if factor * factor > length:
            factor = length
        while length % factor == 0:
            total, length = total + (factor if factor <= _WRITTEN_OUT else _OTHER_FACTOR * factor), length // factor
        factor += 1
    return min(total, of_bluestein)


def _matrix(flops: Callable[[Operation], int], copies: bool = False, operand: int = 0) -> Rule:
    """Return the rule of a factorisation; `flops` counts one matrix. `copies`: the library first copies the matrix."""
    return Rule(
        "linear algebra",
        lambda op: math.prod(op.inputs[operand].shape[:-2]) * flops(op),
        in_complex=(4, 0),
        of=operand,
        workspace=(lambda op: nbytes(op.operand)) if copies else None,
        pieces=lambda op: math.prod(op.operand.shape[:-2]),
    )


def _lu_flops(op: Operation) -> int:
    m, n = op.operand.shape[-2:]
    k = min(m, n)
    return (6 * m * n * k - 3 * (m + n) * k**2 + 2 * k**3) // 3


def _householder_flops(op: Operation, n: int | None = None, k: int | None = None) -> int:
    """Return the FLOP of k Householder reflectors of an m by n matrix, for R or for Q; by default, k = min(m, n)."""
    m, columns = op.operand.shape[-2:]
    n, count = n or columns, min(m, columns) if k is None else k
    return (12 * m * n * count - 6 * (m + n) * count**2 + 4 * count**3) // 3


def _svd_flops(op: Operation) -> int:
    """Return the FLOP of an SVD by Golub and Reinsch's algorithm (Golub and Van Loan, figure 8.6.1)."""
    n, m = sorted(op.operand.shape[-2:])
    if not op.params.get("compute_uv", True):
        return (12 * m * n**2 - 4 * n**3) // 3
    if op.params.get("full_matrices"):
        return 4 * m**2 * n + 8 * m * n**2 + 9 * n**3
    return 14 * m * n**2 + 8 * n**3


def _eig_flops(op: Operation) -> int:
    """Return the FLOP: 25 n**3 with eigenvectors, 10 n**3 without eigenvectors (Golub and Van Loan, 7.5.6)."""
    vectors = op.params.get("compute_left_eigenvectors") or op.params.get("compute_right_eigenvectors")
    return (25 if vectors else 10) * op.operand.shape[-1] ** 3


def _ormqr_flops(op: Operation) -> int:
    m, n = op.result.shape[-2:] if op.params.get("left", True) else op.result.shape[:-3:-1]
    k = op.inputs[1].shape[-1]
    return 4 * m * n * k - 2 * n * k**2


_PRODUCT = Rule("matmul", _dot, (2, 0), (8, 0))
#: A heap of the k largest of n elements takes `n max(1, ceil(log2 k))` comparisons.
_TOP_K = Rule("sort", lambda op: elements(op.operand) * max((max(op.params["k"], 1) - 1).bit_length(), 1))
#: Dict from the name of a primitive to its rule.
RULES: Mapping[str, Rule] = {
    "dot_general": _PRODUCT._replace(reorders=_reordered, pieces=_products, also=_product_reads),
    "scaled_dot": _PRODUCT,
    "ragged_dot_general": _PRODUCT._replace(times=_ragged_dot),
    "conv_general_dilated": Rule(
        "convolution", _convolution, (2, 0), (8, 0), workspace=_channels_last, also=_window_reads
    ),
    "fft": Rule("fft", _fft, in_complex=(1, 0), pieces=_transforms, also=_fft_steps),
    "sort": Rule(  # `n ceil(log2 n)` comparisons of the first key
        "sort",
        lambda op: elements(op.operand) * max(op.operand.shape[op.params["dimension"]] - 1, 0).bit_length(),
        in_place=True,
    ),
    **dict.fromkeys(("top_k", "approx_top_k"), _TOP_K),
    "cholesky": _matrix(lambda op: op.operand.shape[-1] ** 3 // 3),
    "eigh": _matrix(lambda op: 9 * op.operand.shape[-1] ** 3),
    "eig": _matrix(_eig_flops),
    "schur": _matrix(lambda op: 25 * op.operand.shape[-1] ** 3),
    "hessenberg": _matrix(lambda op: 10 * op.operand.shape[-1] ** 3 // 3),
    "tridiagonal": _matrix(lambda op: 4 * op.operand.shape[-1] ** 3 // 3),
    "lu": _matrix(_lu_flops),
    "qr": _matrix(
        lambda op: _householder_flops(op) + _householder_flops(op, op.result.shape[-1], min(op.operand.shape[-2:])),
        copies=True,
    ),
    "geqrf": _matrix(_householder_flops, copies=True),
    "geqp3": _matrix(_householder_flops),
    "householder_product": _matrix(lambda op: _householder_flops(op, k=op.inputs[1].shape[-1])),
    "ormqr": _matrix(_ormqr_flops),
    # Scratch: a copy of the operand in another layout, or the results if these are larger.
    "svd": _matrix(_svd_flops)._replace(workspace=lambda op: max(nbytes(op.operand), nbytes(*op.outputs))),
    # n**2 for each right side; the second operand has n elements for each right side.
    "triangular_solve": _matrix(lambda op: math.prod(op.inputs[1].shape[-2:]) * op.operand.shape[-1], copies=True),
    # The Thomas algorithm takes 8 n FLOP for each right side.
    "tridiagonal_solve": _matrix(lambda op: 8 * math.prod(op.inputs[3].shape[-2:]), operand=3),
    # A rotation of two numbers for each element of the triangle.
    "cholesky_update": _matrix(lambda op: 3 * op.operand.shape[-1] ** 2),
    "symmetric_product": _matrix(lambda op: 2 * math.prod(op.operand.shape[-2:]) * op.operand.shape[-2]),
    "lu_pivots_to_permutation": Rule("linear algebra", lambda op: elements(op.operand)),
}
