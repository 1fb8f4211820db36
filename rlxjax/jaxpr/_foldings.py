"""What compilers fold into another step before they fuse: it moves nothing, and needs no memory of its own."""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from ._kernels import TRANSPOSE, UNTILED, transposed
from ._memory import Step
from ._rules import elements

_SUMS = ("add", "add_any")


def folded(
    equations: Sequence[Any], steps: Sequence[Step], constant: Container[int], outputs: Sequence[int]
) -> list[Step]:
    """Return the steps that are left: products take and give transposed matrices, and zeros are scattered into sums."""
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
    """A product reads a transposed matrix as it lies; transposed itself, it is another product.

    A matrix whose elements change one by one may lie transposed meanwhile: until a product reads it, or until it is
    transposed back.
    """
    readers = _readers(step for step in steps if step is not None)
    by_products = _readers(
        step
        for equation, step in zip(equations, steps, strict=True)
        if step is not None and equation.primitive.name == "dot_general"
    )
    #: Of buffers that hold a transposed matrix: which of the steps that are left transposes it.
    turned: dict[int, int] = {}
    products: dict[int, int] = {}
    makers: dict[int, int] = {}
    left: list[Step | None] = []
    instead: dict[int, int] = {}

    def undo(place: int) -> None:
        step, left[place] = left[place], None
        if step is not None:
            instead[step.writes[0]] = step.reads[0]

    for equation, step in zip(equations, steps, strict=True):
        if step is None:
            continue
        is_product = equation.primitive.name == "dot_general"
        operand, result = step.reads[:1], step.writes[0] if step.writes else -1
        is_turn = equation.primitive.name == "transpose" and tuple(equation.params["permutation"]) == (1, 0)
        if is_turn and operand[0] in turned:
            undo(turned[operand[0]])
            maker = left[makers[operand[0]]]
            if maker is None:  # nothing happened to it meanwhile
                if result in outputs:
                    work = step.work._replace(operation="copy")
                    left.append(step._replace(reads=(instead[operand[0]],), work=work))
                else:
                    instead[result] = operand[0]
                continue
            instead[operand[0]] = result
            left[makers[operand[0]]] = maker._replace(writes=(result,))
            makers[result] = makers[operand[0]]
            continue
        if is_turn and operand[0] in products and readers[operand[0]] == 1 and operand[0] not in outputs:
            place = products[operand[0]]
            left[place] = (left[place] or step)._replace(writes=(result,))
            continue
        if is_product:
            read_turned = [buffer in turned for buffer in step.reads]
            for buffer in step.reads:
                if buffer in turned:
                    undo(turned[buffer])
            step = _with_turned_left(equation, step, bool(read_turned and read_turned[0]))
            if len(equation.outvars[0].aval.shape) == 2:
                products[result] = len(left)
        is_elementwise = step.work.family == "elementwise" and not step.writes_memory
        is_alone = readers[result] == 1 or 0 < readers[result] == by_products[result]
        if result not in outputs and is_alone:
            if is_turn:
                turned[result] = len(left)
            elif len(step.reads) == 1 and operand[0] in turned and is_elementwise:
                turned[result] = turned[operand[0]]
        makers.update((buffer, len(left)) for buffer in step.writes)
        left.append(step)

    def lying(buffers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(_found(instead, buffer) for buffer in buffers)

    return [step._replace(reads=lying(step.reads), needs=lying(step.needs)) for step in left if step is not None]


def _found(instead: Mapping[int, int], buffer: int) -> int:
    while buffer in instead:
        buffer = instead[buffer]
    return buffer


def _with_turned_left(equation: Any, step: Step, is_turned: bool) -> Step:
    """Say of a product whose left matrix is contracted along its columns that it reads this one in another order."""
    left, right = (var.aval for var in equation.invars)
    (contracted, _), (batch, _) = equation.params["dimension_numbers"]
    if len(left.shape) != 2 or batch or len(contracted) != 1 or (contracted[0] == 0) == is_turned:
        return step
    inner = left.shape[contracted[0]]
    outer = elements(left) // max(inner, 1)
    name = transposed((inner, outer), 0, left.dtype.itemsize) if elements(right) == inner else TRANSPOSE
    also = {**step.work.also, f"{name}{UNTILED}": elements(left)}
    return step._replace(work=step.work._replace(also=also))


def _readers(steps: Iterable[Step]) -> Counter[int]:
    """Return how many steps read each buffer."""
    return Counter(buffer for step in steps for buffer in set(step.reads))
