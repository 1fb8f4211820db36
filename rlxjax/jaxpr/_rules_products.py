"""Rules of products, convolutions, Fourier transforms and sorting. A complex multiply-add is four real ones."""

import math
from collections.abc import Iterator, Mapping

from ._rules import Operation, OperationCounts, Rule, arithmetic, elements, is_real_on_one_side, nbytes

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
    """Return the loads of the runs that a convolution reads, and those of windows over an edge.

    Channels, and the last axis of the window, lie beside each other. Channels that fill short vectors are loaded so.
    """
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
}
