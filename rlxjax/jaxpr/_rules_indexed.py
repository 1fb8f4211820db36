"""Rules of reading and writing parts of arrays, of scans along an axis, of windows, and of random numbers."""

import math
from collections.abc import Mapping

from ._rules import Counting, Operation, OperationCounts, Pair, Rule, arithmetic, elements, nbytes
from ._rules_elementwise import COMBINE

#: Threefry-2x32 with 20 rounds (Salmon et al., SC 2011): a round is an add, a rotation (two shifts and an or)
#: and an xor; the key goes in six times, two adds the first time and three after it.
_THREEFRY_OPS = 20 * 5 + 2 + 5 * 3
#: Philox-4x32 with 10 rounds gives four words: a round is two products of two words, four xors and two adds.
_PHILOX_OPS = 10 * (2 * 2 + 4 + 2) // 4


def _touched(op: Operation) -> OperationCounts:
    """What is read of the operand and written: the result twice, and the indices."""
    return OperationCounts(bytes=2 * sum(map(nbytes, op.outputs)) + sum(map(nbytes, op.inputs[1:])))


def _swapped(op: Operation) -> OperationCounts:
    """The new values read and written, the old ones read and written, and the indices."""
    return OperationCounts(bytes=2 * nbytes(op.result) + nbytes(op.inputs[1]) + sum(map(nbytes, op.inputs[1:])))


def _written(index: int, combine: Pair | None = None) -> Counting:
    """Updates, the operand of an index, written into another in place; where they are combined, it is read as well."""

    def count(op: Operation) -> OperationCounts:
        updates = op.inputs[index]
        passes = 2 if combine is None else 3
        indices = sum(map(nbytes, op.inputs[1:])) - nbytes(updates)
        real, in_complex = combine or (0, 0)
        counts = arithmetic(updates, elements(updates), (real, 0), (in_complex, 0))
        return counts._replace(bytes=passes * nbytes(updates) + indices)

    return count


def _cumulative(real: Pair, in_complex: Pair) -> Rule:
    """`n - 1` operations along the axis; partial results of blocks, and their copy if there are other axes."""

    def count(op: Operation) -> OperationCounts:
        length = op.operand.shape[op.params["axis"]]
        times = elements(op.operand) - elements(op.operand) // length if length else 0
        return arithmetic(op.operand, times, real, in_complex)

    return Rule("cumulative", count, workspace=lambda op: (2 if len(op.result.shape) > 1 else 1) * nbytes(op.result))


def _windows(op: Operation) -> OperationCounts:
    """`size - 1` operations for a window, padding included."""
    times = elements(op.result) * max(math.prod(op.params["window_dimensions"]) - 1, 0)
    return arithmetic(op.operand, times * (len(op.params["jaxpr"].eqns) if "jaxpr" in op.params else 1))


def _select_and_scatter(op: Operation) -> OperationCounts:
    """For each window the comparisons of its elements, and one add of its source."""
    source = min(op.inputs[:2], key=elements)  # the other one, which the windows cover, is no smaller
    return arithmetic(source, elements(source) * math.prod(op.params["window_dimensions"]))


def _gamma(op: Operation) -> OperationCounts:
    """One accepted trial of Marsaglia and Tsang (2000): a normal and a uniform number, two logs, a cube, a power."""
    samples = elements(op.result)
    return OperationCounts(14 * samples, 4 * samples, 2 * _THREEFRY_OPS * samples)


def _random(ops_per_block: int, words: int = 1) -> Rule:
    """Operations of a block, which gives so many elements."""

    def count(op: Operation) -> OperationCounts:
        return OperationCounts(integer_ops=sum(map(elements, op.outputs)) * ops_per_block // words)

    return Rule("random", count)


def _random_bits(op: Operation) -> OperationCounts:
    """One block of Threefry for an element, whose two words are put together; other generators as Philox."""
    is_threefry = "fry" in str(op.operand.dtype)
    return OperationCounts(integer_ops=elements(op.result) * (_THREEFRY_OPS + 1 if is_threefry else _PHILOX_OPS))


def _scatter(combine: Pair | None = None) -> Rule:
    """Return the rule of a scatter, which writes a window for each vector of its indices."""
    return Rule(
        "scatter",
        _written(2, combine),
        in_place=True,
        slices=lambda op: elements(op.inputs[1]) // max(op.inputs[1].shape[-1], 1),
    )


_GATHER = Rule("gather", _touched, in_memory=0, writes_memory=False, reads_part=True)

#: By the name of the primitive.
RULES: Mapping[str, Rule] = {
    "gather": _GATHER._replace(
        costly=True, slices=lambda op: elements(op.result) // max(math.prod(op.params["slice_sizes"]), 1)
    ),
    "dynamic_slice": _GATHER._replace(slices=lambda op: 1),
    "get": Rule("gather", _touched),
    "swap": Rule("scatter", _swapped, in_place=True),
    "addupdate": Rule("scatter", _written(1, (1, 2)), in_place=True),
    "dynamic_update_slice": Rule("scatter", _written(1), in_place=True, slices=lambda op: 1),
    "scatter": _scatter(),
    **{f"scatter-{name}": _scatter(COMBINE[name]) for name in ("max", "min")},
    **dict.fromkeys(("scatter-add", "scatter-sub"), _scatter(COMBINE["sum"])),
    "scatter-mul": _scatter(COMBINE["prod"]),
    **{f"cum{name}": _cumulative((real, 0), (in_complex, 0)) for name, (real, in_complex) in COMBINE.items()},
    "cumlogsumexp": _cumulative((4, 2), (12, 5)),  # max + log1p(exp(-|a - b|))
    **dict.fromkeys(
        ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_gather_add"),
        Rule("window", _windows),
    ),
    **dict.fromkeys(("select_and_scatter_add", "select_and_scatter"), Rule("window", _select_and_scatter)),
    # The state of a block and its key: three words of 32 bits for every element.
    "random_bits": Rule("random", _random_bits, workspace=lambda op: 12 * elements(op.result)),
    "threefry2x32": _random(_THREEFRY_OPS, 2),
    **dict.fromkeys(("random_split", "random_fold_in"), _random(_THREEFRY_OPS)),
    "random_seed": _random(3),  # two words by a shift, a mask, a conversion
    **dict.fromkeys(("rng_uniform", "rng_bit_generator"), _random(_PHILOX_OPS)),
    "random_gamma": Rule("random", _gamma, workspace=lambda op: 36 * nbytes(op.result)),  # XLA's state of a trial
}
