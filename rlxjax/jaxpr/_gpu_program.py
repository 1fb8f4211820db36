"""What a call of a program that was compiled for a GPU launches: kernels by kind with exact counts."""

import dataclasses
import enum
import math
import re
from collections import Counter
from typing import NamedTuple

from ._rules import names
from ._xla_text import NOTHING, Array, Computation, Instruction

#: Rows and columns of the part of a product that one block of threads computes, as counted here.
TILE = 128
#: Commands that follow each other and that one launch of a CUDA graph runs, at least so many.
GRAPH_COMMANDS = 5
#: Samples of a transform that one pass over memory takes at most.
PASS_SAMPLES = 2**13

_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
_BATCHED = re.compile(r'lhs_batch_dim(?:s=\{|ensions":\[)([\d,"]*)')
_FULL_PRECISION = re.compile(r"operand_precision(?:=\{|\":\[\")highest", re.IGNORECASE)
_LABELS = re.compile(r"\bdim_labels=\w+_(\w+)->")
_WINDOW = re.compile(r"\bwindow=\{size=([\dx]+)")
_FFT = re.compile(r"\bfft_type=(\w+), fft_length=\{([\d,]*)\}")
_SORTED = re.compile(r"\bdimensions=\{(\d+)\}")
#: What computes nothing.
_MOVES = NOTHING | names(
    "broadcast reshape transpose copy slice concatenate pad iota dynamic-slice dynamic-update-slice gather reverse "
    "convert dot fft sort scatter"
)


class GpuKernelKind(enum.StrEnum):
    """What a kernel mostly does."""

    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction"
    SCATTER = "scatter"
    COPY = "copy"
    SCALE = "scale"
    PRODUCT = "product"
    CONVOLUTION = "convolution"
    FFT = "fft"
    SORT = "sort"
    RADIX_SORT = "radix sort"
    TOP_K = "top k"
    TRIANGULAR = "triangular solve"
    CHOLESKY = "cholesky"
    LU = "lu"
    QR = "qr"
    EIGEN = "eigen"
    OTHER = "other"


class Product(NamedTuple):
    """A product that one kernel computes, or a convolution.

    Attributes:
        flop: operations.
        tiles: parts of `TILE` times `TILE` that blocks of threads compute.
        itemsize: bytes of a number of the operands.
        is_exact: whether float32 is asked for at its full precision.
    """

    flop: int
    tiles: int
    itemsize: int
    is_exact: bool = False


@dataclasses.dataclass(frozen=True)
class GpuKernel:
    """Kernels of one instruction of a compiled program.

    Attributes:
        kind: what each mostly does.
        launches: how often it is launched; one of a library may be several kernels, which counts once.
        is_library: whether a library's code runs (cuBLAS, cuDNN, cuFFT, cuSOLVER, CUB), or the compiler's.
        read_bytes: of one launch.
        written_bytes: of one launch.
        operations: elementwise operations of one launch, an element of a reduction counts as one.
        product: what one launch multiplies, if it does.
        passes: over the bytes of one launch; more than one for long transforms.
        columns: of matrices, one after another, that one launch of a solver takes.
        row_elements: elements of a row that is sorted.
    """

    kind: GpuKernelKind
    launches: int
    is_library: bool = False
    read_bytes: int = 0
    written_bytes: int = 0
    operations: int = 0
    product: Product | None = None
    passes: int = 1
    columns: int = 0
    row_elements: int = 0

    @property
    def bytes(self) -> int:
        """Bytes that one launch reads and writes."""
        return self.read_bytes + self.written_bytes


@dataclasses.dataclass(frozen=True)
class GpuProgram:
    """What one call of a compiled program does on a GPU.

    Attributes:
        arguments: arrays that it takes.
        results: arrays that it gives.
        kernels: one entry an instruction, in the order in which they run; those of loops as often as they turn.
        graphs: launches of CUDA graphs.
        grouped: kernels that these launch.
        forks: kernels outside of graphs that run on a second stream, beside the next ones.
        readbacks: values that the host waits for: tests of loops whose trips are not known, and conditions.
        unknown_loops: loops whose trips the text does not tell; each counts as one turn.
    """

    arguments: int
    results: int
    kernels: tuple[GpuKernel, ...]
    graphs: int = 0
    grouped: int = 0
    forks: int = 0
    readbacks: int = 0
    unknown_loops: int = 0

    @property
    def launches(self) -> int:
        """Kernels that are launched, those of graphs too."""
        return sum(kernel.launches for kernel in self.kernels)

    def of(self, *kinds: GpuKernelKind) -> tuple[GpuKernel, ...]:
        """Return the kernels of some kinds."""
        return tuple(kernel for kernel in self.kernels if kernel.kind in kinds)


#: Custom calls by what their targets hold, and what they do.
_LIBRARY = {
    "TopK": GpuKernelKind.TOP_K,
    "sort": GpuKernelKind.RADIX_SORT,
    "triangularSolve": GpuKernelKind.TRIANGULAR,
    "trsm": GpuKernelKind.TRIANGULAR,
    "potrf": GpuKernelKind.CHOLESKY,
    "getrf": GpuKernelKind.LU,
    **dict.fromkeys(("geqrf", "orgqr", "ormqr"), GpuKernelKind.QR),
    **dict.fromkeys(("syev", "gesvd"), GpuKernelKind.EIGEN),
    "cudnn": GpuKernelKind.CONVOLUTION,
    "cublas": GpuKernelKind.PRODUCT,
}
#: Kernels by what they fuse, the first one that they do.
_FUSED = {
    "dot": GpuKernelKind.PRODUCT,
    "fft": GpuKernelKind.FFT,
    "sort": GpuKernelKind.SORT,
    "scatter": GpuKernelKind.SCATTER,
    **dict.fromkeys(("reduce", "reduce-window"), GpuKernelKind.REDUCTION),
}
#: What a library computes column by column; and what CUDA graphs hold, as XLA makes them.
_SOLVERS = tuple(map(GpuKernelKind, ("triangular solve", "cholesky", "lu", "qr", "eigen")))
_IN_GRAPHS = tuple(map(GpuKernelKind, ("elementwise", "reduction", "scatter", "copy", "product")))


def gpu_kernels(
    instruction: Instruction, computation: Computation, fused: Computation | None, commands: Counter[str]
) -> list[GpuKernel]:
    """Return the kernels of an instruction, with what it fuses, and add what the host commands for them."""
    kernel = _kernel(instruction, computation, fused)
    kernels, transform = [kernel], _FFT.search(instruction.attributes)
    if kernel.kind is GpuKernelKind.SORT:  # in place, so that what is sorted is copied
        kernels = [GpuKernel(GpuKernelKind.COPY, 1, False, kernel.read_bytes, kernel.read_bytes), kernel]
    elif kernel.kind is GpuKernelKind.FFT and transform and transform[1].startswith("I"):  # scaled by cuBLAS
        kernels.append(GpuKernel(GpuKernelKind.SCALE, 1, True, kernel.written_bytes, kernel.written_bytes))
    forks = instruction.opcode.endswith("-start")
    if kernel.kind in _IN_GRAPHS:
        commands.update({"row": 1, "row forks": forks})
    else:
        commands["forks"] += forks
        end_row(commands)
    return kernels


def end_row(commands: Counter[str]) -> None:
    """Make a graph of the commands that follow each other, if they are enough."""
    row, forks = commands.pop("row", 0), commands.pop("row forks", 0)
    graph = {"graphs": 1, "grouped": row} if row >= GRAPH_COMMANDS else {"forks": forks}
    commands.update(graph)


def _kernel(instruction: Instruction, computation: Computation, fused: Computation | None) -> GpuKernel:
    read, written = computation.moved(instruction, fused)
    source, attributes = fused or computation, instruction.attributes
    inside = list(fused.instructions.values()) if fused else [instruction]
    target, results = instruction.target, instruction.arrays
    if instruction.opcode == "custom-call" and len(results) > 1:  # what a library asks for beside its results is last
        is_scratch = results[-1].kind in ("s8", "u8") and len(results[-1].sizes) == 1
        written -= results[-1].elements * is_scratch
    if target:
        kind = next((kind for part, kind in _LIBRARY.items() if part in target), GpuKernelKind.OTHER)
    elif instruction.opcode.removesuffix("-start") == "copy":
        kind = GpuKernelKind.COPY
    else:
        opcodes = {each.opcode for each in inside}
        kind = next((kind for found, kind in _FUSED.items() if found in opcodes), GpuKernelKind.ELEMENTWISE)
    operands = [operand.arrays for operand in computation.operands(instruction)]
    first = operands[0][0] if operands and operands[0] else Array("pred", (), False)
    product, passes, columns, row_elements = None, 1, 0, 0
    if kind is GpuKernelKind.PRODUCT:
        found = [_product(each, source) for each in inside if each.opcode in ("dot", "custom-call")]
        product = max(found, key=lambda one: one.flop)
    elif kind is GpuKernelKind.CONVOLUTION:
        product = _convolution(instruction, operands[1][0])
    elif kind in _SOLVERS and len(first.sizes) >= 2:
        columns = math.prod(first.sizes[:-2]) * min(first.sizes[-2:])
    elif kind is GpuKernelKind.FFT and (transform := _FFT.search(attributes)):
        # Over its bytes it goes once by axis, more often for long ones, once more if a long one is real.
        lengths = _sizes(transform[2])
        passes = sum(math.ceil(math.log2(max(length, 2)) / math.log2(PASS_SAMPLES)) for length in lengths)
        passes += "R" in transform[1] and max(lengths, default=1) > PASS_SAMPLES
    elif kind in (GpuKernelKind.SORT, GpuKernelKind.RADIX_SORT):
        if kind is GpuKernelKind.RADIX_SORT and operands and operands[0]:  # once by byte of a key, and once to count
            passes = first.itemsize + 1
        axes = ((each, _SORTED.search(each.attributes)) for each in inside if each.opcode == "sort")
        rows = (each.arrays[0].sizes[int(axis[1])] for each, axis in axes if axis)
        row_elements = next(rows, first.sizes[-1] if first.sizes else 1)
    operations = 0 if target else sum(_operations(each, source) for each in inside)
    is_library = bool(target) or instruction.opcode == "fft"
    return GpuKernel(kind, 1, is_library, read, written, operations, product, passes, columns, row_elements)


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.replace('"', "").split(",") if size]


def _product(instruction: Instruction, computation: Computation) -> Product:
    """Return what a product of matrices takes, of the compiler's own or of cuBLAS."""
    left, result = computation.operands(instruction)[0].arrays[0], instruction.arrays[0].elements
    depth, batch = (
        math.prod(left.sizes[place] for place in _sizes(found[1]))
        if (found := axes.search(instruction.attributes))
        else 1
        for axes in (_CONTRACTED, _BATCHED)
    )
    rows = max(left.elements // max(depth * batch, 1), 1)
    columns = max(result // max(batch * rows, 1), 1)
    tiles = batch * math.ceil(rows / TILE) * math.ceil(columns / TILE)
    is_exact = bool(_FULL_PRECISION.search(instruction.attributes)) and left.kind == "f32"
    return Product(2 * depth * result, tiles, left.itemsize, is_exact)


def _convolution(instruction: Instruction, kernel: Array) -> Product:
    """Return what a convolution takes that cuDNN computes as a product."""
    result, labels = instruction.arrays[0].elements, _LABELS.search(instruction.attributes)
    place = labels[1].index("o") if labels and "o" in labels[1] else 0
    features = max(kernel.sizes[place] if kernel.sizes else 1, 1)
    tiles = math.ceil(result // features / TILE) * math.ceil(features / TILE)
    return Product(2 * (kernel.elements // features) * result, tiles, kernel.itemsize)


def _operations(instruction: Instruction, computation: Computation) -> int:
    """Return the elementwise operations of an instruction; those on numbers of 64 bits count twice."""
    opcode, arrays = instruction.opcode, instruction.arrays
    if opcode in _MOVES:
        return 0
    if opcode in ("reduce", "reduce-window") and instruction.operands:
        if opcode == "reduce-window" and (window := _WINDOW.search(instruction.attributes)):
            return arrays[0].elements * math.prod(map(int, window[1].split("x")))
        arrays = computation.operands(instruction)[0].arrays
    return sum(array.elements * max(array.itemsize // 4, 1) for array in arrays[:1])
