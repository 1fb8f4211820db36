"""From the text of a program that was compiled for a GPU to what it launches; nothing else here knows that text."""

import math
import re
from collections.abc import Mapping, Sequence

from ._gpu_program import TILE, GpuKernel, GpuKernelKind, GpuProgram, Product
from ._rules import names
from ._xla_text import (
    BRANCHES,
    CALLED,
    ENDS,
    NOTHING,
    TARGET,
    TRIPS,
    Computation,
    Instruction,
    computations,
    moved,
    shapes_of,
)

#: Commands that follow each other and that one launch of a CUDA graph runs, at least so many.
GRAPH_COMMANDS = 5
#: Samples of a transform that one pass over memory takes at most.
PASS_SAMPLES = 2**13

#: The arrays of a type: kinds of numbers and sizes.
Shapes = list[tuple[str, tuple[int, ...]]]

_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
_BATCHED = re.compile(r'lhs_batch_dim(?:s=\{|ensions":\[)([\d,"]*)')
_FULL_PRECISION = re.compile(r"operand_precision(?:=\{|\":\[\")highest", re.IGNORECASE)
_LABELS = re.compile(r"\bdim_labels=\w+_(\w+)->")
_WINDOW = re.compile(r"\bwindow=\{size=([\dx]+)")
_FFT = re.compile(r"\bfft_type=(\w+), fft_length=\{([\d,]*)\}")
_DESCENT = names(
    "parameter constant broadcast bitcast reshape transpose copy slice concatenate pad iota tuple get-tuple-element "
    "dynamic-slice dynamic-update-slice gather reverse convert dot fft sort scatter"
)

#: Custom calls by what their targets hold, and what they do.
_LIBRARY = {
    "TopK": GpuKernelKind.TOP_K,
    "sort": GpuKernelKind.RADIX_SORT,
    "triangularSolve": GpuKernelKind.TRIANGULAR,
    "trsm": GpuKernelKind.TRIANGULAR,
    "potrf": GpuKernelKind.CHOLESKY,
    "getrf": GpuKernelKind.LU,
    "geqrf": GpuKernelKind.QR,
    "orgqr": GpuKernelKind.QR,
    "ormqr": GpuKernelKind.QR,
    "syev": GpuKernelKind.EIGEN,
    "gesvd": GpuKernelKind.EIGEN,
    "cudnn": GpuKernelKind.CONVOLUTION,
    "cublas": GpuKernelKind.PRODUCT,
}
#: What a library computes column by column.
SOLVERS = (
    GpuKernelKind.TRIANGULAR,
    GpuKernelKind.CHOLESKY,
    GpuKernelKind.LU,
    GpuKernelKind.QR,
    GpuKernelKind.EIGEN,
)
#: What CUDA graphs hold, as XLA makes them.
_IN_GRAPHS = (
    GpuKernelKind.ELEMENTWISE,
    GpuKernelKind.REDUCTION,
    GpuKernelKind.SCATTER,
    GpuKernelKind.COPY,
    GpuKernelKind.PRODUCT,
)


def gpu_program(text: str, trips: int | None = None) -> GpuProgram:
    """Return what a program that was compiled for a GPU launches, by its text.

    Args:
        text: what `jax.stages.Compiled.as_text` gives.
        trips: of each loop whose trips the text does not tell; it is unknown, and counts as one turn, unless given.

    Raises:
        ValueError: the text is not written as expected.

    Examples:
        >>> text = '''
        ... %fused (p: f32[8]) -> f32[8] {
        ...   %p = f32[8]{0} parameter(0)
        ...   ROOT %tanh = f32[8]{0} tanh(%p)
        ... }
        ... ENTRY %main (x: f32[8]) -> f32[8] {
        ...   %x = f32[8]{0} parameter(0)
        ...   ROOT %fusion = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
        ... }'''
        >>> kernel, = gpu_program(text).kernels
        >>> kernel.kind.value, kernel.bytes, kernel.operations
        ('elementwise', 64, 8)
    """
    try:
        return _Reader(text, trips).program()
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"text: expected that of a program compiled for a GPU; it is not written so "
            f"({type(error).__name__}: {error})"
        ) from None


class _Reader:
    """Walks through a program in the order in which it runs, its loops as often as they turn."""

    def __init__(self, text: str, trips: int | None) -> None:
        self._trips = trips
        self._computations, self._entry = computations(text)
        self._kernels: list[GpuKernel] = []
        self._graphs = self._grouped = self._forks = self._readbacks = self._unknown = 0
        self._row = self._row_forks = 0  # commands that follow each other and that one graph may hold

    def program(self) -> GpuProgram:
        entry = self._computations[self._entry]
        results = len(shapes_of(entry.instructions[entry.root].type))
        self._walk(self._entry, 1)
        counted = (self._graphs, self._grouped, self._forks, self._readbacks, self._unknown)
        return GpuProgram(len(entry.parameters), results, tuple(self._kernels), *counted)

    def _walk(self, name: str, times: int) -> None:
        computation = self._computations[name]
        for instruction in computation.instructions.values():
            if instruction.opcode in NOTHING or instruction.opcode.endswith(ENDS):
                continue
            called = dict(CALLED.findall(instruction.attributes))
            match instruction.opcode:
                case "while":
                    self._end_row(times)
                    known = TRIPS.search(instruction.attributes)
                    trips = int(known[1]) if known else 1 if self._trips is None else self._trips
                    if not known:  # the host looks at each test, the last one too
                        self._unknown += self._trips is None
                        self._readbacks += (trips + 1) * times
                        self._walk(called["condition"], (trips + 1) * times)
                    self._walk(called["body"], trips * times)
                case "conditional":
                    self._end_row(times)
                    self._readbacks += times
                    self._walk(self._dearest(instruction, called), times)
                case "call":
                    self._walk(called["to_apply"], times)
                    continue
                case _:
                    kernel = self._kernel(instruction, computation, called.get("calls"), times)
                    self._kernels += [*_before(kernel), kernel, *_after(instruction, kernel)]
                    forks = instruction.opcode.endswith("-start")
                    if kernel.kind in _IN_GRAPHS:
                        self._row, self._row_forks = self._row + 1, self._row_forks + forks
                        continue
                    self._forks += times * forks
            self._end_row(times)
        self._end_row(times)

    def _end_row(self, times: int) -> None:
        if self._row >= GRAPH_COMMANDS:
            self._graphs += times
            self._grouped += times * self._row
        else:
            self._forks += times * self._row_forks
        self._row = self._row_forks = 0

    def _dearest(self, instruction: Instruction, called: Mapping[str, str]) -> str:
        listed = BRANCHES.search(instruction.attributes)
        branches = re.findall(r"%([\w.\-]+)", listed[1]) if listed else []
        branches = branches or [called["true_computation"], called["false_computation"]]
        return max(
            branches, key=lambda name: sum(map(self._computations[name].bytes, self._computations[name].instructions))
        )

    def _kernel(
        self, instruction: Instruction, computation: Computation, fused: str | None, launches: int
    ) -> GpuKernel:
        read, written = moved(instruction, computation, self._computations, fused)
        written -= _scratch_bytes(instruction)
        inside = [instruction] if fused is None else list(self._computations[fused].instructions.values())
        source = computation if fused is None else self._computations[fused]
        named = TARGET.search(instruction.attributes) if instruction.opcode == "custom-call" else None
        target = named[1] if named else ""
        kind = _kind(instruction.opcode, target, {each.opcode for each in inside})
        operands = [shapes_of(computation.instructions[name].type) for name in instruction.operands]
        first = operands[0][0][1] if operands and operands[0] else ()
        product = None
        if kind is GpuKernelKind.PRODUCT:
            found = [_product(each, source) for each in inside if each.opcode in ("dot", "custom-call")]
            product = max(found, key=lambda one: one.flop)
        elif kind is GpuKernelKind.CONVOLUTION:
            product = _convolution(instruction, [shapes[0] for shapes in operands])
        return GpuKernel(
            kind,
            launches,
            bool(target) or instruction.opcode == "fft",
            read,
            written,
            sum(_operations(each, source) for each in inside if not target),
            product,
            _passes(instruction, kind, operands),
            math.prod(first[:-2]) * min(first[-2:]) if kind in SOLVERS and len(first) >= 2 else 0,
            _row_elements(inside, first) if kind in (GpuKernelKind.SORT, GpuKernelKind.RADIX_SORT) else 0,
        )


def _before(kernel: GpuKernel) -> list[GpuKernel]:
    """Return what runs before a kernel: a sort is in place, so that what is sorted is copied."""
    if kernel.kind is not GpuKernelKind.SORT:
        return []
    return [GpuKernel(GpuKernelKind.COPY, kernel.launches, False, kernel.read_bytes, kernel.read_bytes)]


def _after(instruction: Instruction, kernel: GpuKernel) -> list[GpuKernel]:
    """Return what runs after a kernel: XLA scales the result of an inverse transform by a call of cuBLAS."""
    found = _FFT.search(instruction.attributes)
    if kernel.kind is not GpuKernelKind.FFT or not found or not found[1].startswith("I"):
        return []
    return [GpuKernel(GpuKernelKind.SCALE, kernel.launches, True, kernel.written_bytes, kernel.written_bytes)]


def _kind(opcode: str, target: str, inside: set[str]) -> GpuKernelKind:
    """Return what a kernel mostly does, by its instruction, by the library's name for it and by what it fuses."""
    if target:
        return next((kind for part, kind in _LIBRARY.items() if part in target), GpuKernelKind.OTHER)
    if opcode.removesuffix("-start") == "copy":
        return GpuKernelKind.COPY
    for found, kind in (
        ("dot", GpuKernelKind.PRODUCT),
        ("fft", GpuKernelKind.FFT),
        ("sort", GpuKernelKind.SORT),
        ("scatter", GpuKernelKind.SCATTER),
        ("reduce", GpuKernelKind.REDUCTION),
        ("reduce-window", GpuKernelKind.REDUCTION),
    ):
        if found in inside:
            return kind
    return GpuKernelKind.ELEMENTWISE


def _scratch_bytes(instruction: Instruction) -> int:
    """Return the bytes of the memory that a library asks for beside its results, which comes last among them."""
    shapes = shapes_of(instruction.type)
    if instruction.opcode != "custom-call" or len(shapes) < 2:
        return 0
    kind, sizes = shapes[-1]
    return math.prod(sizes) if kind in ("s8", "u8") and len(sizes) == 1 else 0


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.replace('"', "").split(",") if size]


def _product(instruction: Instruction, computation: Computation) -> Product:
    """Return what a product of matrices takes, of the compiler's own or of cuBLAS."""
    (kind, left), (_, result) = (
        shapes_of(computation.instructions[instruction.operands[0]].type)[0],
        shapes_of(instruction.type)[0],
    )
    contracted, batched = _CONTRACTED.search(instruction.attributes), _BATCHED.search(instruction.attributes)
    depth = math.prod(left[place] for place in _sizes(contracted[1])) if contracted else 1
    batch = math.prod(left[place] for place in _sizes(batched[1])) if batched else 1
    rows = max(math.prod(left) // max(depth * batch, 1), 1)
    columns = max(math.prod(result) // max(batch * rows, 1), 1)
    tiles = batch * math.ceil(rows / TILE) * math.ceil(columns / TILE)
    is_exact = bool(_FULL_PRECISION.search(instruction.attributes)) and kind == "f32"
    return Product(2 * depth * math.prod(result), tiles, _itemsize(kind), is_exact)


def _convolution(instruction: Instruction, operands: Sequence[tuple[str, tuple[int, ...]]]) -> Product:
    """Return what a convolution takes that cuDNN computes as a product."""
    result, (kind, kernel) = shapes_of(instruction.type)[0][1], operands[1]
    labels = _LABELS.search(instruction.attributes)
    place = labels[1].index("o") if labels and "o" in labels[1] else 0
    features = kernel[place] if kernel else 1
    depth = math.prod(kernel) // max(features, 1)
    rows = math.prod(result) // max(features, 1)
    tiles = math.ceil(rows / TILE) * math.ceil(features / TILE)
    return Product(2 * depth * math.prod(result), tiles, _itemsize(kind))


def _operations(instruction: Instruction, computation: Computation) -> int:
    """Return the elementwise operations of an instruction; those on numbers of 64 bits count twice."""
    opcode = instruction.opcode
    if opcode in _DESCENT or opcode in NOTHING:
        return 0
    shapes = shapes_of(instruction.type)
    if opcode in ("reduce", "reduce-window") and instruction.operands:
        of_operand = shapes_of(computation.instructions[instruction.operands[0]].type)
        window = _WINDOW.search(instruction.attributes)
        if opcode == "reduce-window" and window:
            return math.prod(shapes[0][1]) * math.prod(map(int, window[1].split("x")))
        shapes = of_operand
    return sum(math.prod(sizes) * max(_itemsize(kind) // 4, 1) for kind, sizes in shapes[:1])


def _passes(instruction: Instruction, kind: GpuKernelKind, operands: Sequence[Shapes]) -> int:
    """Return how often a kernel goes over its bytes.

    A transform does so once by axis, more often for long ones, once more if a long one is real; a radix sort once by
    byte of a key, and once to count.
    """
    if kind is GpuKernelKind.RADIX_SORT and operands and operands[0]:
        return _itemsize(operands[0][0][0]) + 1
    found = _FFT.search(instruction.attributes)
    if kind is not GpuKernelKind.FFT or found is None:
        return 1
    lengths = _sizes(found[2])
    passes = sum(math.ceil(math.log2(max(length, 2)) / math.log2(PASS_SAMPLES)) for length in lengths)
    return passes + ("R" in found[1] and max(lengths, default=1) > PASS_SAMPLES)


def _row_elements(inside: Sequence[Instruction], first: tuple[int, ...]) -> int:
    """Return the elements of a row that is sorted: of the axis that the sort names, or else of all."""
    for each in inside:
        if each.opcode == "sort" and (axis := re.search(r"\bdimensions=\{(\d+)\}", each.attributes)):
            return shapes_of(each.type)[0][1][int(axis[1])]
    return first[-1] if first else 1


def _itemsize(kind: str) -> int:
    """Return the bytes of a number of a type, as XLA names it."""
    return 1 if kind == "pred" else max(int(re.sub(r"\D", "", kind) or 8) // 8, 1)
