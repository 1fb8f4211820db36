"""A model of how compilers fuse operations: the fused kernels, their memory traffic, and the peak memory."""

import bisect
import graphlib
import heapq
import itertools
import math
import operator
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ._kernels import EACH, NO_WORK, SPREAD, TRANSPOSE, UNTILED, Work, add_kernel, copying
from ._rules import Rule, elements

#: If a kernel would compute a value again at more places than this number, the value stays in memory instead.
_MOST_PLACES = 15
#: The largest number of steps that a kernel repeats although earlier kernels ran these steps.
_MOST_REPEATED = 512
#: Operations that read parts of an array.
_IN_PARTS = ("slice", "dynamic_slice", "gather", "stack", "rev")
#: The largest number of buffers that a kernel reads. This limit keeps the counting time linear.
_MOST_READS = 64


class Step(NamedTuple):
    """An operation that reads and writes buffers. A buffer is an array that is identified by a number."""

    equation: Any
    rule: Rule
    #: The buffers that are read (with repetitions), those that are written, and those that must be read from memory.
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    needs: tuple[int, ...]
    #: The bytes that the step moves; None means the bytes of all buffers that it reads and writes.
    traffic_bytes: int | None = None
    #: The bytes of scratch memory that the step needs.
    inner_bytes: int = 0
    work: Work = NO_WORK
    #: For each buffer in `reads`: `SPREAD` if its elements are read repeatedly, `EACH` if each reader reads different
    #: elements, "" if each element is read once.
    reuse: tuple[str, ...] = ()


def fused_memory(
    steps: Sequence[Step],
    sizes: Sequence[int],
    inputs: Iterable[int],
    outputs: Sequence[int],
    reusable: Iterable[int],
    reshaped: Container[int] = (),
) -> tuple[Counter[Any], int, int]:
    """Return the counts of the fused kernels, the bytes that they move, and the peak memory without the inputs."""
    given = set(inputs)
    lasting = given.difference(reusable)
    unread = [0] * len(sizes)
    needed, spread = bytearray(len(sizes)), bytearray(len(sizes))
    for step in steps:
        for buffer in set(step.reads):
            unread[buffer] += 1
        for buffer in step.needs:
            needed[buffer] = True
        for buffer, how in zip(step.reads, step.reuse, strict=False):
            spread[buffer] |= how == SPREAD
    for buffer in (*outputs, *_for_libraries(steps)):
        needed[buffer] = True
    shared = _read_by_several(steps, needed)
    #: For a value that is not stored: the bytes read from each source buffer to compute it, and whether it is costly.
    origin: dict[int, tuple[Mapping[int, int], bool]] = {}
    makers: dict[int, tuple[int, Step]] = {}
    claimed: set[int] = set()
    kernels: list[Step] = []
    grouped, moved = Counter[Any](), 0
    for number, step in enumerate(steps):
        read: dict[int, int] = {}
        costly = step.rule.costly
        for buffer in step.reads:
            sources, source_costs = origin.get(buffer, ({buffer: sizes[buffer]}, False))
            costly |= source_costs
            for source, touched in sources.items():
                part = touched
                if step.rule.reads_part and buffer == step.reads[0]:
                    whole, taken = (elements(var.aval) for var in (step.equation.invars[0], step.equation.outvars[0]))
                    part = min(touched, touched * taken // max(whole, 1))
                read[source] = min(read.get(source, 0) + part, sizes[source])
        several = costly and any(buffer in shared or spread[buffer] for buffer in step.writes)
        kept = step.rule.writes_memory or several or any(needed[buffer] for buffer in step.writes)
        if kept or len(read) > _MOST_READS:
            kernels.append(step._replace(reads=tuple(read)))
            written = sum(sizes[buffer] for buffer in step.writes)
            own = sum(read.values()) + written if step.traffic_bytes is None else step.traffic_bytes
            moved += own
            if step.work.family == "scatter" and step.reads and (step.reads[0] in lasting or unread[step.reads[0]] > 1):
                add_kernel(grouped, 2 * written, written, [copying(written, step.work.itemsize)])
            if step.work is not NO_WORK:
                whole = sum(sizes[buffer] for buffer in read) + written
                add_kernel(grouped, own, written, _executed(number, step, makers, claimed), whole)
        else:
            for buffer in step.writes:
                origin[buffer] = read, costly
                makers[buffer] = number, step
        for buffer in set(step.reads):
            unread[buffer] -= 1
            if not unread[buffer]:  # the value has no further readers
                origin.pop(buffer, None)
    return grouped, moved, _most_live(kernels, sizes, given, outputs, lasting, reshaped)


def _read_by_several(steps: Sequence[Step], needed: bytearray) -> set[int]:
    """Return the buffers that several kernels read. Several readers in the same kernel count as one."""
    #: For each buffer: the step that stores what is computed from the buffer; None if there are several such steps.
    ends: dict[int, int | None] = {}
    found: set[int] = set()
    for number, step in reversed(list(enumerate(steps))):
        own = {ends[buffer] for buffer in step.writes if buffer in ends}
        is_several = len(own) > 1 or None in own
        if is_several:
            found.update(step.writes)
        is_needed = step.rule.writes_memory or any(needed[buffer] for buffer in step.writes)
        kept = is_needed or not own or (step.rule.costly and is_several)
        end = number if kept else None if is_several else own.pop()
        for buffer in step.reads:
            ends[buffer] = end if ends.get(buffer, end) == end else None
    return found


def _for_libraries(steps: Sequence[Step]) -> Iterable[int]:
    """Yield the buffers that stay in memory because library reductions fuse only with elementwise work."""
    wanted: dict[int, int] = {}
    for step in reversed(steps):
        if step.rule.writes_memory and step.work.family != "reduction":
            continue
        roots = [wanted[buffer] for buffer in step.writes if buffer in wanted]
        if step.work.family == "reduction":
            wanted.update((buffer, buffer) for buffer in step.reads)
        elif roots and step.work.operation in _IN_PARTS:
            yield from step.writes
        elif roots and step.work.operation.startswith(TRANSPOSE):
            yield from roots
        else:
            wanted.update((buffer, root) for root in roots for buffer in step.reads)


def _executed(number: int, last: Step, makers: Mapping[int, tuple[int, Step]], claimed: set[int]) -> list[Work]:
    """Return the work that a kernel does for each of its steps, the last step first."""
    # Every kernel recomputes the unstored values that it reads, once for each repeated or indexed element. A limit
    # on the visits to steps of other kernels keeps the time linear.
    found: list[Work] = []
    again = 0
    #: Dict from a step's number to the step, the number of elements to compute, and how many places compute them.
    waiting = {number: (last, last.work.elements, 1)}
    numbers = [-number]
    while numbers:
        number = -heapq.heappop(numbers)
        step, count, places = waiting.pop(number)
        if places > _MOST_PLACES:
            count, places = step.work.elements, 1
        again += number in claimed
        claimed.add(number)
        work, known = step.work, max(step.work.elements, 1)
        if step is not last:
            work = work._replace(
                elements=count,
                flops=-(-work.flops * count // known),
                counts={name: -(-each * count // known) for name, each in work.counts.items()},
            )
        found.append(work)
        hows = itertools.chain(step.reuse, itertools.repeat(""))
        for buffer, how in zip(step.reads, hows, strict=False):
            if buffer not in makers or (again >= _MOST_REPEATED and makers[buffer][0] in claimed):
                continue
            earlier, made = makers[buffer]
            wanted = count if how else -(-made.work.elements * count // known)
            if earlier not in waiting:
                waiting[earlier] = made, wanted, places
                heapq.heappush(numbers, -earlier)
            else:
                _, before, others = waiting[earlier]
                both = operator.add if how == EACH else max
                waiting[earlier] = made, both(before, wanted), both(others, places)
    return found


def _most_live(
    kernels: Sequence[Step],
    sizes: Sequence[int],
    given: set[int],
    outputs: Sequence[int],
    lasting: set[int],
    reshaped: Container[int],
) -> int:
    """Return the bytes of the outputs plus the peak bytes of everything else except the inputs."""
    maker = {buffer: number for number, kernel in enumerate(kernels) for buffer in kernel.writes}
    awaited = {
        number: {maker[buffer] for buffer in kernel.reads if maker.get(buffer, number) != number}
        for number, kernel in enumerate(kernels)
    }
    # With several threads, each kernel runs as soon as its operands exist.
    kernels = [kernels[number] for number in graphlib.TopologicalSorter(awaited).static_order()]
    last: dict[int, float] = {}
    for number, kernel in enumerate(kernels):
        last.update(dict.fromkeys(kernel.reads, number))
    last.update(dict.fromkeys(lasting.union(outputs), math.inf))
    place = {buffer: buffer for buffer in given}
    start: dict[int, int] = {}
    end: dict[int, float] = {}
    for number, kernel in enumerate(kernels):
        reusable = kernel.reads if kernel.rule.in_place else ()
        dying = [buffer for buffer in reusable if last[buffer] == number and buffer not in reshaped]
        for buffer in kernel.writes:
            heir = next((other for other in dying if sizes[other] == sizes[buffer]), None)
            if heir is None:
                place[buffer] = buffer
                start[buffer] = number
            else:
                dying.remove(heir)
                place[buffer] = place[heir]
            end[place[buffer]] = last.get(buffer, number)

    def is_hosted(size: int, made: int, until: int) -> bool:
        """Put a temporary into an output's memory while the output does not need it. Return whether this succeeds."""
        first = bisect.bisect_left(hosts, size, key=lambda host: host[0])
        for _, written, stays in hosts[first : first + _MOST_READS]:
            at = bisect.bisect_left(stays, (made, until))
            before, after = stays[at - 1][1] if at else -1, stays[at][0] if at < len(stays) else written
            if until < written and before < made and until < after:
                stays.insert(at, (made, until))
                return True
        return False

    grows, shrinks = [0] * len(kernels), [0] * (len(kernels) + 1)
    hosts: list[tuple[int, int, list[tuple[int, int]]]] = sorted(
        (sizes[buffer], made, []) for buffer, made in start.items() if end[buffer] == math.inf
    )
    for buffer in sorted(start, key=lambda buffer: -sizes[buffer]):
        made, until = start[buffer], end[buffer]
        if until < math.inf and not is_hosted(sizes[buffer], made, int(until)):
            grows[made] += sizes[buffer]
            shrinks[int(until) + 1] += sizes[buffer]
    live = most = 0
    for kernel, grown, shrunk in zip(kernels, grows, shrinks, strict=False):
        live += grown - shrunk
        most = max(most, live + kernel.inner_bytes)
    taken = sum(sizes[buffer] for buffer in set(outputs) - given if place[buffer] in given)
    return most + sum(sizes[buffer] for buffer in outputs) - taken


def folded(steps: Sequence[Step], constant: Container[int], outputs: Container[int]) -> list[Step]:
    """Return simplified steps: products absorb transposes, and sums with a scatter into zeros become updates."""
    return _without_transposes(_scattered_into_sums(steps, constant, outputs), outputs)


def _readers(steps: Iterable[Step]) -> Counter[int]:
    return Counter(buffer for step in steps for buffer in set(step.reads))


def _scattered_into_sums(steps: Sequence[Step], constant: Container[int], outputs: Container[int]) -> list[Step]:
    """Replace `a + zeros.at[i].add(u)`, which the gradient of indexing computes, with `a.at[i].add(u)`."""
    readers, left, scattered = _readers(steps), dict(enumerate(steps)), dict[int, int]()
    for number, step in enumerate(steps):
        if step.work.operation == "scatter-add" and step.reads[0] in constant:
            if readers[step.writes[0]] == 1 and step.writes[0] not in outputs:
                scattered[step.writes[0]] = number
        elif step.work.operation in ("add", "add_any") and len(step.reads) == 2:
            for values, other in (step.reads, step.reads[::-1]):
                if values in scattered and other not in constant and values != other:
                    scatter = left.pop(scattered.pop(values))
                    reads = (other, *scatter.reads[1:])
                    left[number] = scatter._replace(reads=reads, needs=reads, writes=step.writes)
                    break
    return [left[number] for number in sorted(left)]


def _without_transposes(steps: Sequence[Step], outputs: Container[int]) -> list[Step]:
    """Remove transposes next to matrix products, because a product's arrays may have any memory layout."""
    # A transpose may move past elementwise work to a product, or to a second transpose that cancels the first.
    readers = _readers(steps)
    by_products = _readers(step for step in steps if step.work.operation == "dot_general")
    #: For each buffer: its transposing step, the product that computes it, the step that computes it, its replacement.
    turned, products, makers, instead = (dict[int, int]() for _ in range(4))
    left: list[Step | None] = []

    def undo(buffer: int) -> None:
        if (step := left[turned[buffer]]) is not None:
            left[turned[buffer]], instead[step.writes[0]] = None, step.reads[0]

    for step in steps:
        operand, result = step.reads[0] if step.reads else -1, step.writes[0] if step.writes else -1
        name = step.equation.primitive.name
        is_turn = name == "transpose" and tuple(step.equation.params["permutation"]) == (1, 0)
        if is_turn and operand in turned:
            undo(operand)
            if (maker := left[makers[operand]]) is not None:
                instead[operand] = result
                left[makers[operand]] = maker._replace(writes=(result,))
                makers[result] = makers[operand]
            elif result in outputs:  # the two transposes cancel
                left.append(step._replace(reads=(instead[operand],), work=step.work._replace(operation="copy")))
            else:
                instead[result] = operand
            continue
        if is_turn and operand in products and readers[operand] == 1 and operand not in outputs:
            left[products[operand]] = (left[products[operand]] or step)._replace(writes=(result,))
            continue
        if name == "dot_general":
            is_left_turned = operand in turned
            for buffer in turned.keys() & {*step.reads}:
                undo(buffer)
            step = _with_turned_left(step, is_left_turned)
            if len(step.equation.outvars[0].aval.shape) == 2:
                products[result] = len(left)
        is_elementwise = step.work.family == "elementwise" and not step.rule.writes_memory
        if result not in outputs and (readers[result] == 1 or 0 < readers[result] == by_products[result]):
            if is_turn:
                turned[result] = len(left)
            elif len(step.reads) == 1 and operand in turned and is_elementwise:
                turned[result] = turned[operand]
        makers.update((buffer, len(left)) for buffer in step.writes)
        left.append(step)

    def lying(buffers: tuple[int, ...]) -> tuple[int, ...]:
        while any(buffer in instead for buffer in buffers):
            buffers = tuple(instead.get(buffer, buffer) for buffer in buffers)
        return buffers

    return [step._replace(reads=lying(step.reads), needs=lying(step.needs)) for step in left if step is not None]


def _with_turned_left(step: Step, is_turned: bool) -> Step:
    """Mark the left matrix of a product as read across its memory order, if the product sums over its first axis."""
    left, right = (var.aval for var in step.equation.invars)
    (contracted, _), (batch, _) = step.equation.params["dimension_numbers"]
    if len(left.shape) != 2 or batch or len(contracted) != 1 or (contracted[0] == 0) == is_turned:
        return step
    inner = left.shape[contracted[0]]
    outer = elements(left) // max(inner, 1)
    counts = {**step.work.counts, UNTILED: elements(left)}
    is_vector = elements(right) == inner
    extent, stride_bytes = (inner, outer * left.dtype.itemsize) if is_vector else (0, 0)
    return step._replace(work=step.work._replace(counts=counts, extent=extent, stride_bytes=stride_bytes))
