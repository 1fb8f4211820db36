"""Rules of reading and writing parts of arrays, of scans along an axis, of windows, and of random numbers."""

import math

from ._operations import Counting, Operation, OperationCounts, Rule, add_rules, arithmetic, elements, nbytes
from ._rules_fused import COMBINE, Pair

#: Threefry-2x32 with 20 rounds (Salmon et al., SC 2011): a round is an add, a rotation (two shifts and an or)
#: and an xor; the key goes in six times, two adds the first time and three after it.
_THREEFRY_OPS = 20 * 5 + 2 + 5 * 3
#: Philox-4x32 with 10 rounds gives four words: a round is two products of two words, four xors and two adds.
_PHILOX_OPS = 10 * (2 * 2 + 4 + 2) // 4


def _touched(op: Operation) -> OperationCounts:
    """What is read of the operand and written: the result twice, and the indices."""
    moved = sum(map(nbytes, op.outputs))
    return OperationCounts(bytes=2 * moved + sum(map(nbytes, op.inputs[1:])))


def _swapped(op: Operation) -> OperationCounts:
    """The new values read and written, the old ones read and written, and the indices."""
    return OperationCounts(bytes=2 * nbytes(op.result) + nbytes(op.inputs[1]) + sum(map(nbytes, op.inputs[1:])))


def _accumulated(op: Operation) -> OperationCounts:
    counts = arithmetic(op.inputs[1], elements(op.inputs[1]), (1, 0), (2, 0))
    return counts._replace(bytes=2 * nbytes(op.inputs[1]) + sum(map(nbytes, op.inputs[1:])))


def _written(index: int, flops_per_element: Pair | None = None) -> Counting:
    """Updates written into an operand in place; where they are combined with it, it is read as well.

    Args:
        index: which operand the updates are.
        flops_per_element: of combining, of a real element and of a complex one; None replaces.
    """

    def count(op: Operation) -> OperationCounts:
        updates = op.inputs[index]
        passes = 2 if flops_per_element is None else 3
        indices = sum(map(nbytes, op.inputs[1:])) - nbytes(updates)
        real, in_complex = flops_per_element or (0, 0)
        counts = arithmetic(updates, elements(updates), (real, 0), (in_complex, 0))
        return counts._replace(bytes=passes * nbytes(updates) + indices)

    return count


def _cumulative(real: Pair, in_complex: Pair) -> Counting:
    """`n - 1` operations along the axis."""

    def count(op: Operation) -> OperationCounts:
        length = op.operand.shape[op.params["axis"]]
        times = elements(op.operand) - elements(op.operand) // length if length else 0
        return arithmetic(op.operand, times, real, in_complex)

    return count


def _windows(combine: Pair) -> Counting:
    """`size - 1` operations for a window, padding included."""

    def count(op: Operation) -> OperationCounts:
        times = elements(op.result) * max(math.prod(op.params["window_dimensions"]) - 1, 0)
        weight = len(op.params["jaxpr"].eqns) if "jaxpr" in op.params else 1
        return arithmetic(op.operand, times * weight, (combine[0], 0), (combine[1], 0))

    return count


def _select_and_scatter(op: Operation) -> OperationCounts:
    """For each window the comparisons of its elements, and one add of its source."""
    source = min(op.inputs[:2], key=elements)  # the other one, which the windows cover, is no smaller
    window = math.prod(op.params["window_dimensions"])
    return arithmetic(source, elements(source) * window, (1, 0), (2, 0))


def _gamma(op: Operation) -> OperationCounts:
    """One accepted trial of Marsaglia and Tsang (2000): a normal and a uniform number, two logs, a cube, a power."""
    samples = elements(op.result)
    return OperationCounts(14 * samples, 4 * samples, 2 * _THREEFRY_OPS * samples)


def _random(ops_per_block: int, words: int = 1) -> Counting:
    """Operations of a block, which gives so many elements."""

    def count(op: Operation) -> OperationCounts:
        return OperationCounts(integer_ops=sum(map(elements, op.outputs)) * ops_per_block // words)

    return count


def _random_bits(op: Operation) -> OperationCounts:
    """One block of Threefry for an element, whose two words are put together; other generators as Philox."""
    is_threefry = "fry" in str(op.operand.dtype)
    return OperationCounts(integer_ops=elements(op.result) * (_THREEFRY_OPS + 1 if is_threefry else _PHILOX_OPS))


def _slices(op: Operation) -> int:
    """Return how many slices a gather reads."""
    return elements(op.result) // max(math.prod(op.params["slice_sizes"]), 1)


def _windows_written(op: Operation) -> int:
    """Return how many windows a scatter writes: the vectors of its indices."""
    return elements(op.inputs[1]) // max(op.inputs[1].shape[-1], 1)


def _one(op: Operation) -> int:
    return 1


def _blocks(op: Operation) -> int:
    """Partial results of blocks, and their copy if there are other axes."""
    return (2 if len(op.result.shape) > 1 else 1) * nbytes(op.result)


def _state(op: Operation) -> int:
    """The state of a block and its key: three words of 32 bits for every element."""
    return 12 * elements(op.result)


add_rules(
    {
        f"cum{name}": Rule("cumulative", _cumulative((a, 0), (b, 0)), workspace=_blocks)
        for name, (a, b) in COMBINE.items()
    }
)
add_rules({f"reduce_window_{name}": Rule("window", _windows(COMBINE[name])) for name in ("sum", "max", "min")})
add_rules(
    {
        f"scatter-{name}": Rule("scatter", _written(2, cost), in_place=True, slices=_windows_written)
        for name, cost in (("add", (1, 2)), ("sub", (1, 2)), ("mul", (1, 6)), ("max", (1, 2)), ("min", (1, 2)))
    }
)
add_rules(
    {
        "gather": Rule("gather", _touched, in_memory=0, writes_memory=False, slices=_slices),
        "dynamic_slice": Rule("gather", _touched, in_memory=0, writes_memory=False, slices=_one),
        "get": Rule("gather", _touched),
        "swap": Rule("scatter", _swapped, in_place=True),
        "addupdate": Rule("scatter", _accumulated, in_place=True),
        "dynamic_update_slice": Rule("scatter", _written(1), in_place=True, slices=_one),
        "scatter": Rule("scatter", _written(2), in_place=True, slices=_windows_written),
        "cumlogsumexp": Rule(
            "cumulative", _cumulative((4, 2), (12, 5)), workspace=_blocks
        ),  # max + log1p(exp(-|a - b|))
        "reduce_window": Rule("window", _windows((1, 2))),
        "select_and_gather_add": Rule("window", _windows((1, 2))),
        "select_and_scatter_add": Rule("window", _select_and_scatter),
        "select_and_scatter": Rule("window", _select_and_scatter),
        "random_bits": Rule("random", _random_bits, workspace=_state),
        "threefry2x32": Rule("random", _random(_THREEFRY_OPS, 2)),
        "random_split": Rule("random", _random(_THREEFRY_OPS)),
        "random_fold_in": Rule("random", _random(_THREEFRY_OPS)),
        "random_seed": Rule("random", _random(3)),  # two words by a shift, a mask, a conversion
        "rng_uniform": Rule("random", _random(_PHILOX_OPS)),
        "rng_bit_generator": Rule("random", _random(_PHILOX_OPS)),
        "random_gamma": Rule("random", _gamma, workspace=lambda op: 36 * nbytes(op.result)),  # XLA's state of a trial
    }
)
