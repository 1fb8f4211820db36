"""What a compiler that fuses would keep in memory: the traffic of the buffers, and how many bytes live at once."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

#: A kernel reads no more buffers than this: a longer chain is cut, which keeps the count linear.
_MOST_READS = 64


class Step(NamedTuple):
    """One piece of work between buffers, which are numbers.

    Attributes:
        reads: buffers it reads, as often as it names them.
        writes: buffers it makes.
        reads_memory: what it reads has to lie in memory.
        writes_memory: what it makes has to lie in memory.
        traffic_bytes: bytes that it moves where it reads memory.
        part: reads this share (numerator, denominator) of its operand only, if it is fused.
        costly: not worth computing once for each reader.
        in_place: may take the memory of a buffer that it is the last to read.
        inner_bytes: memory that it needs while it runs.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    reads_memory: bool
    writes_memory: bool
    traffic_bytes: int = 0
    part: tuple[int, int] = (1, 1)
    costly: bool = False
    in_place: bool = False
    inner_bytes: int = 0


class _Kernel(NamedTuple):
    reads: Iterable[int]
    writes: tuple[int, ...]
    in_place: bool
    inner_bytes: int


def fused_memory(
    steps: Sequence[Step],
    sizes: Sequence[int],
    inputs: Iterable[int],
    outputs: Sequence[int],
    reusable: Iterable[int],
) -> tuple[int, int]:
    """Return the bytes that fused kernels move, and the most bytes that live at once beside the inputs.

    A value that may be computed on the way to its readers is kept in memory only if it is an output, if a
    reader needs it there, or if it is costly and has several readers.

    Args:
        steps: the work, in order.
        sizes: bytes of every buffer.
        inputs: buffers that are there at the start and stay.
        outputs: buffers that stay to the end.
        reusable: those inputs whose memory may be taken once they are read.
    """
    kernels, moved = _kernels(steps, sizes, set(inputs), set(outputs))
    return moved, _most_live(kernels, sizes, inputs, outputs, reusable)


def _kernels(
    steps: Sequence[Step], sizes: Sequence[int], inputs: set[int], outputs: set[int]
) -> tuple[list[_Kernel], int]:
    readers = [0] * len(sizes)
    needed = bytearray(len(sizes))
    for step in steps:
        for buffer in set(step.reads):
            readers[buffer] += 1
            if step.reads_memory:
                needed[buffer] = True
    for buffer in outputs:
        needed[buffer] = True
    #: Of a value that is computed on the way: the buffers that it comes from, and the bytes read of each.
    origin: dict[int, tuple[Mapping[int, int], bool]] = {}
    kernels: list[_Kernel] = []
    moved = 0
    for step in steps:
        read: dict[int, int] = {}
        costly = step.costly
        for buffer in step.reads:
            sources, source_costs = origin.get(buffer, ({buffer: sizes[buffer]}, False))
            costly |= source_costs
            for source, touched in sources.items():
                part = touched if step.part == (1, 1) else touched * step.part[0] // step.part[1]
                read[source] = min(read.get(source, 0) + part, sizes[source])
        several = costly and any(readers[buffer] > 1 for buffer in step.writes)
        kept = step.writes_memory or several or any(needed[buffer] for buffer in step.writes)
        if kept or len(read) > _MOST_READS:
            kernels.append(_Kernel(read, step.writes, step.in_place, step.inner_bytes))
            written = sum(sizes[buffer] for buffer in step.writes)
            moved += step.traffic_bytes if step.reads_memory else sum(read.values()) + written
        else:
            if step.reads_memory:  # a gather: its operand lies in memory, and is read as far as it goes
                read = {buffer: min(touched, step.traffic_bytes) for buffer, touched in read.items()}
                read[step.reads[0]] = min(sizes[step.reads[0]], sum(sizes[buffer] for buffer in step.writes))
            for buffer in step.writes:
                origin[buffer] = read, costly
    return kernels, moved


def _most_live(
    kernels: Sequence[_Kernel],
    sizes: Sequence[int],
    inputs: Iterable[int],
    outputs: Sequence[int],
    reusable: Iterable[int],
) -> int:
    """Return the most bytes that live at once beside the inputs, each freed after the kernel that last reads it."""
    last: dict[int, float] = {}
    for number, kernel in enumerate(kernels):
        last.update(dict.fromkeys(kernel.reads, number))
    last.update(dict.fromkeys(outputs, math.inf))
    given = set(inputs)
    free_later = set(reusable) - set(outputs)
    last.update(dict.fromkeys(given - free_later, math.inf))
    copied = sum(sizes[buffer] for buffer in outputs if buffer in given and buffer not in reusable)
    start = live = most = sum(sizes[buffer] for buffer in free_later)
    for number, kernel in enumerate(kernels):
        dying = [buffer for buffer in kernel.reads if last[buffer] == number]
        for buffer in kernel.writes:
            if kernel.in_place:
                taken = next((other for other in dying if sizes[other] == sizes[buffer]), None)
                if taken is not None:
                    dying.remove(taken)
                    continue
            live += sizes[buffer]
        most = max(most, live + kernel.inner_bytes)
        live -= sum(sizes[buffer] for buffer in dying)
        live -= sum(sizes[buffer] for buffer in kernel.writes if buffer not in last)
    return max(most, live + copied) - start
