"""What a call of a program that was compiled for a GPU launches: kernels by kind with exact counts."""

import dataclasses
import enum
from typing import NamedTuple

#: Rows and columns of the part of a product that one block of threads computes, as counted here.
TILE = 128


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
