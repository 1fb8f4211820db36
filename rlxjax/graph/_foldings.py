"""What compilers fold into another step before they fuse: it moves nothing, and needs no memory of its own."""

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from typing import Any

from ._buffers import Step

_SUMS = ("add", "add_any")


def folded(
    equations: Sequence[Any], steps: Sequence[Step], constant: Container[int], outputs: Sequence[int]
) -> list[Step]:
    """Return the steps that are left: products take and give transposed matrices, and zeros are scattered into sums.

    Args:
        equations: that the steps are of.
        steps: the work, in order.
        constant: buffers that are made of literals.
        outputs: buffers that stay to the end.
    """
    kept = set(outputs)
    return _without_transposes(equations, _scattered_into_sums(equations, steps, constant, kept), kept)


def _scattered_into_sums(
    equations: Sequence[Any], steps: Sequence[Step], constant: Container[int], outputs: Container[int]
) -> list[Step | None]:
    """`a + zeros.at[i].add(u)`, which gradients of indexing have, is `a.at[i].add(u)`."""
    readers = _readers(steps)
    left: list[Step | None] = list(steps)
    scattered: dict[int, int] = {}
    for number, (equation, step) in enumerate(zip(equations, steps, strict=True)):
        name = equation.primitive.name
        if name == "scatter-add" and step.reads[0] in constant:
            if readers[step.writes[0]] == 1 and step.writes[0] not in outputs:
                scattered[step.writes[0]] = number
        elif name in _SUMS and len(step.reads) == 2:
            for values, other in (step.reads, step.reads[::-1]):
                scatter = left[scattered[values]] if values in scattered else None
                if scatter is not None and other not in constant and values != other:
                    reads = (other, *scatter.reads[1:])
                    left[number] = scatter._replace(reads=reads, needs=reads, writes=step.writes)
                    left[scattered[values]] = None
                    break
    return left


def _without_transposes(equations: Sequence[Any], steps: Sequence[Step | None], outputs: Container[int]) -> list[Step]:
    """A product reads a transposed matrix as it lies; transposed itself, it is another product."""
    readers = _readers(step for step in steps if step is not None)
    by_products = _readers(
        step
        for equation, step in zip(equations, steps, strict=True)
        if step is not None and equation.primitive.name == "dot_general"
    )
    lies: dict[int, int] = {}
    products: dict[int, int] = {}
    left: list[Step] = []
    for equation, step in zip(equations, steps, strict=True):
        if step is None:
            continue
        reads, needs = (tuple(lies.get(buffer, buffer) for buffer in side) for side in (step.reads, step.needs))
        if reads and _is_transposed_matrix(equation):
            (operand,), (result,) = reads, step.writes
            if 0 < readers[result] == by_products[result] and result not in outputs:
                lies[result] = operand
                continue
            if operand in products and readers[operand] == 1 and operand not in outputs:
                number = products[operand]
                left[number] = left[number]._replace(writes=(result,))
                continue
        if equation.primitive.name == "dot_general" and len(equation.outvars[0].aval.shape) == 2:
            products[step.writes[0]] = len(left)
        left.append(step._replace(reads=reads, needs=needs))
    return left


def _is_transposed_matrix(equation: Any) -> bool:
    return equation.primitive.name == "transpose" and tuple(equation.params["permutation"]) == (1, 0)


def _readers(steps: Iterable[Step]) -> Counter[int]:
    """Return how many steps read each buffer."""
    return Counter(buffer for step in steps for buffer in set(step.reads))
