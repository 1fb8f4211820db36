"""Count the kernels of a compiled program by the rules of JAX primitives, and the launches of a GPU's host."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax._values import by_value

from ._kernels import EXACT, Kernels, Work, add_kernel, copying, work_of
from ._primitives import RULES
from ._rules import Operation, OperationCounts, elements
from ._totals import Totals
from ._xla_text import NOTHING, Array, Computation, Instruction, fused_in

#: XLA groups consecutive commands into a CUDA graph if there are at least this many commands.
GRAPH_COMMANDS = 5
#: The largest length of an FFT that needs only a single pass over memory.
PASS_SAMPLES = 2**13
#: Number of kernels of a radix sort for each byte of a key, and number of kernels before the first byte.
DIGIT_KERNELS, COUNTING_KERNELS = 2, 2
#: If a GPU is present, XLA calls a library's radix sort above these thresholds (XLA's own timings on an H100). By bytes
#: of a key: length of a single row; length of each of several rows; number of rows of length 2**17 (more if shorter).
SORTED_BY_DIGITS = {1: (0, 1300, 4), 2: (2**9, 2**12, 10), 4: (22_000, 2**13, 26), 8: (2**17, 2**14, 55)}

_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
_BATCHED = re.compile(r'lhs_batch_dim(?:s=\{|ensions":\[)([\d,"]*)')
_PRECISION = re.compile(r"operand_precision(?:=\{|\":\[\")(\w+)", re.IGNORECASE)
_WINDOW = re.compile(r"\bwindow=\{size=([\dx]+)")
_WHOLE_WINDOW, _FIELD = re.compile(r"\bwindow=\{([^}]*)\}"), re.compile(r"(\w+)=(\S+)")
_LABELS = re.compile(r"\bdim_labels=(\w+?)_(\w+?)->(\w+)")
_FFT = re.compile(r"\bfft_type=(\w+), fft_length=\{([\d,]*)\}")
_DIMENSIONS = re.compile(r"\bdimensions=\{([\d,]*)\}")
_SLICES = re.compile(r"\bslice_sizes=\{([\d,]*)\}")


def _pairs(text: str) -> dict[str, str]:
    """Return the dict that a text of `name=other` pairs describes."""
    return {name: other for name, _, other in (pair.partition("=") for pair in text.split())}


#: Dicts to names of primitives: from opcodes (if the names differ), and from parts of the targets of custom calls.
_PRIMITIVES = _pairs(
    "exponential=exp exponential-minus-one=expm1 log-plus-one=log1p sine=sin cosine=cos power=pow negate=neg "
    "subtract=sub multiply=mul divide=div remainder=rem maximum=max minimum=min compare=eq select=select_n "
    "convert=convert_element_type broadcast=broadcast_in_dim reverse=rev popcnt=population_count "
    "count-leading-zeros=clz round-nearest-afz=round round-nearest-even=round dot=dot_general "
    "convolution=conv_general_dilated bitcast-convert=bitcast_convert_type"
)
_LIBRARY = _pairs(
    "TopK=top_k cub_sort=sort cub$DeviceRadixSort=sort triangularSolve=triangular_solve trsm=triangular_solve "
    "potrf=cholesky getrf=lu geqrf=geqrf lu_pivots=copy threefry2x32=threefry2x32 "
    "orgqr=householder_product ungqr=householder_product ormqr=ormqr unmqr=ormqr syev=eigh heev=eigh geev=eig "
    "gesvd=svd gesdd=svd cudnn$conv=conv_general_dilated cublas=dot_general"
)
#: Kinds of matrix products (a device has a peak rate for each kind), and the operations that count as products.
PRODUCT_KINDS = ("byte", "half", "float32", "high", "exact", "float64")
PRODUCT_OPERATIONS = ("dot_general", EXACT, "product_with_vector", "conv_general_dilated")
#: A fused kernel belongs to the first of these families that any of its operations belongs to.
_NAMING = ("matmul", "convolution", "fft", "sort", "linear algebra", "scatter", "reduction", "window")
#: Dict from the opcode that combines two elements to the end of a reduction's name, such as `sum` in `reduce_sum`.
_COMBINED = _pairs("add=sum maximum=max minimum=min multiply=prod and=and or=or")


@by_value
@dataclasses.dataclass(frozen=True)
class GpuProgram:
    """Counts of one call of a compiled program on a GPU.

    Attributes:
        arguments: number of argument arrays.
        results: number of result arrays.
        kernels: the kernels that a call launches. A kernel in a loop counts once for each iteration.
        copies: number of kernels that are copies outside compiled kernels, or that are steps of a library's sort.
        calls: number of kernels that are library calls (cuBLAS, cuDNN, cuSOLVER).
        convolutions: number of library calls that go to cuDNN.
        graphs: number of times that a CUDA graph is launched.
        grouped: number of kernels that are launched as part of a CUDA graph.
        forks: number of kernels outside CUDA graphs that run on a second stream, at the same time as later kernels.
        readbacks: number of values that the host reads back: conditions of branches and of loops of unknown length.
        unknown_loops: number of loops with unknown trip counts. Each of these loops counts as one iteration.
        unknown: targets of the custom calls that have no rule, in order. Of these calls, only the results count.
    """

    arguments: int
    results: int
    kernels: Kernels
    copies: int = 0
    calls: int = 0
    convolutions: int = 0
    graphs: int = 0
    grouped: int = 0
    forks: int = 0
    readbacks: int = 0
    unknown_loops: int = 0
    unknown: tuple[str, ...] = ()

    @property
    def launches(self) -> int:
        """The number of kernels that a call launches, including the kernels in CUDA graphs."""
        return int(self.kernels.launches.sum())


def unknown_targets(targets: Iterable[str]) -> tuple[str, ...]:
    """Return the targets that have no rule. `register_rule` accepts such a target as the name of a primitive."""
    return tuple(target for target in targets if _library(target) not in RULES)


def _library(target: str) -> str:
    """Return the primitive whose rule counts a custom call with this target; the target itself if none is known."""
    return next((name for part, name in _LIBRARY.items() if part in target), target)


def add_kernels(
    instruction: Instruction,
    computation: Computation,
    computations: Mapping[str, Computation],
    totals: Totals,
    platform: str,
) -> None:
    """Add the kernels of an instruction, and the commands that a GPU's host sends for them, to the totals."""
    called, target, commands = instruction.called, instruction.target, totals.commands
    fused = computations[called["calls"]] if "calls" in called else None
    read, written = computation.moved(instruction, fused)
    if target and len(instruction.arrays) > 1:  # the last array is the library's scratch memory
        last = instruction.arrays[-1]
        written -= last.elements * (last.kind in ("s8", "u8") and len(last.sizes) == 1)
    inside = fused_in(instruction, computation, computations)
    parts = [_work(each, place, computations) for each, place in inside if each.opcode not in NOTHING]
    parts = parts[::-1] or [copying(written, 4)]
    parts.sort(key=lambda part: _NAMING.index(part.family) if part.family in _NAMING else len(_NAMING))
    main, launches = parts[0], 1
    transform = _FFT.search(instruction.attributes) if platform == "cuda" else None
    is_copy = instruction.opcode in ("copy", "copy-start")
    by_digits = main.family == "sort" and "sort" in target
    if platform == "cuda" and main.family == "sort" and not target:
        readers = computation.readers.get(instruction.name, ())
        is_pair = not readers or any("index=0" not in each.attributes for each in readers)
        sort, place = next(one for one in inside if one[0].opcode == "sort")
        if both := _bytes_by_digits(sort, place, computations, is_pair):
            add_kernel(totals.kernels, 2 * read, read, [copying(read, 4)])  # the copy of the keys
            by_digits, parts, read, written = True, [main._replace(counts={})], both, both
    if by_digits:  # one pass for each byte of a key, and one pass to count
        launches = DIGIT_KERNELS * main.itemsize + COUNTING_KERNELS
        read, written = ((main.itemsize + 1) * each // launches for each in (read, written))
    elif main.family == "sort" and not target:  # XLA copies the operand first, and then sorts in place
        add_kernel(totals.kernels, 2 * read, read, [copying(read, 4)])
        is_copy = True
    elif transform:
        # An FFT takes one pass for each axis, more for long axes, and one more for a long real axis.
        lengths = _sizes(transform[2])
        launches = sum(math.ceil(math.log2(max(length, 2)) / math.log2(PASS_SAMPLES)) for length in lengths)
        launches += "R" in transform[1] and max(lengths, default=1) > PASS_SAMPLES
    whole = sum(each.bytes for each in computation.operands(instruction)) + written
    for place in range(launches):
        add_kernel(totals.kernels, read + written, written, [main._replace(counts={})] if place else parts, whole)
    if scaled := bool(transform and transform[1].startswith("I")):  # cuBLAS scales the result
        add_kernel(totals.kernels, 2 * written, written, [Work("elementwise", "mul", 4, counts={"mul": written // 4})])
    is_call = bool(target) and main.family in ("matmul", "convolution", "linear algebra")
    # CUB queries the GPU's properties before each launch, which takes as long as a copy.
    commands.update(
        copies=launches if by_digits else int(is_copy), calls=is_call + scaled, convolutions=int("cudnn" in target)
    )
    forks = instruction.opcode.endswith("-start")
    if main.family == "matmul" or (not target and main.family not in ("fft", "sort")):  # a CUDA graph may contain these
        commands.update({"row": 1, "row forks": forks})
    else:
        commands["forks"] += forks
        end_row(commands)


def _bytes_by_digits(
    sort: Instruction, inside: Computation, computations: Mapping[str, Computation], is_pair: bool
) -> int:
    """Return the bytes of keys and values that each pass of a library's sort reads; 0 if XLA calls no library."""
    # Indices that XLA adds to keep the order of equal keys do not count.
    arrays, is_numbered = [each.arrays[0] for each in inside.operands(sort)], inside.operands(sort)[-1].opcode == "iota"
    keys, *values = arrays[: len(arrays) - (is_numbered and len(arrays) > 1 + is_pair)]
    size, added = keys.itemsize, values[0].itemsize if values else 0
    axes = re.search(rf"dimensions={{{len(keys.sizes) - 1}}}", sort.attributes)  # only the last axis
    length = max(keys.sizes[-1:], default=1)
    rows, (one, several, most) = keys.elements // max(length, 1), SORTED_BY_DIGITS.get(size, (math.inf,) * 3)
    is_enough = length > one if rows == 1 else length > several and rows > most * (2**17 / length) ** 0.25
    if not (axes and is_enough) or keys.kind[0] not in "bfsu" or len(values) > 1:
        return 0
    by = computations[sort.called["to_apply"]]
    if any(each.inside == "nan" for each in by.instructions.values()):  # NaNs come last: values are packed with keys
        is_known, added = not values or (size <= 4 and values[0].kind in ("s16", "s32")), max(size, added and 8)
    else:  # a second key does not count as a value
        are_places = is_numbered and len(arrays) == 2
        is_second_key = bool(values) and not are_places and by.parameters[2] in by.readers
        is_known = not is_second_key and (not values or keys.kind[0] == "u" or size == added == 4)
    return keys.elements * (size + added) * is_known


def end_row(commands: Counter[str]) -> None:
    """End a row of consecutive commands, and count the row as a CUDA graph if it is long enough."""
    row, forks = commands.pop("row", 0), commands.pop("row forks", 0)
    # Joining a second stream takes one more command.
    graph = {"graphs": 1, "grouped": row} if row + forks >= GRAPH_COMMANDS else {"forks": forks}
    commands.update(graph)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def _aval(array: Array) -> jax.ShapeDtypeStruct:
    """Return an array's shape and dtype. Narrow floats are widened to 16 bits, and narrow integers to 8 bits."""
    letter, size = array.kind[0], array.bits // 8
    least = {"s": f"i{max(size, 1)}", "u": f"u{max(size, 1)}", "f": f"f{max(size, 2)}", "p": "bool", "b": "bfloat16"}
    return jax.ShapeDtypeStruct(array.sizes, jnp.dtype(least.get(letter, f"{letter}{size}")))


def _work(instruction: Instruction, computation: Computation, computations: Mapping[str, Computation]) -> Work:
    """Return the work of an instruction, by the rule of the JAX primitive that computes the same."""
    opcode, target = instruction.opcode.removesuffix("-start"), instruction.target
    name = _PRIMITIVES.get(opcode, opcode.replace("-", "_"))
    if target:
        name = _library(target)
    inputs = [_aval(array) for each in computation.operands(instruction) for array in each.arrays]
    outputs = [_aval(array) for array in instruction.arrays][: 1 if target else None]

    def sizes(pattern: re.Pattern[str]) -> tuple[int, ...]:
        found = pattern.search(instruction.attributes)
        return _sizes(found[found.lastindex or 0]) if found else ()

    if opcode in ("reduce", "scatter") and (called := instruction.called.get("to_apply")):
        inside = computations[called]
        how = _COMBINED.get(inside.instructions[inside.root].opcode, "")
        if opcode == "scatter":
            name = "scatter-add" if how else name
        else:  # the second half of the operands are initial values
            inputs = inputs[: max(len(inputs) // 2, 1)]
            name = "argmax" if len(inputs) == 2 else f"reduce_{how}" if how else name
    rule, given = RULES.get(name), sizes(_DIMENSIONS)
    if rule is None or not outputs or not (inputs or rule.family == "movement"):
        results = sum(map(elements, outputs))
        return Work("custom", name, 4, results, counts={"other": results})
    params = {
        "axes": given,
        "permutation": given,
        "dimension": given[0] if given else -1,
        "slice_sizes": sizes(_SLICES),
        "window_dimensions": sizes(_WINDOW),
        "fft_lengths": sizes(_FFT),
        "k": outputs[0].shape[-1] if outputs[0].shape else 1,
        "dimension_numbers": ((sizes(_CONTRACTED), ()), (sizes(_BATCHED), ())),
        "precision": found[1].upper() if (found := _PRECISION.search(instruction.attributes)) else None,
    }
    op = Operation(inputs, outputs, params)
    if name == "conv_general_dilated":  # the text of a cuDNN call lacks some parameters of the rule
        labels, kernel = _LABELS.search(instruction.attributes), inputs[1].shape
        features = max(kernel[labels[2].index("o")] if labels else 1, 1)
        flops = 2 * (math.prod(kernel) // features) * elements(outputs[0])
        flops = int(flops * _met_share(instruction.attributes, inputs[0].shape, outputs[0].shape))
        return work_of(name, rule._replace(also=None), OperationCounts(flops), op)
    work = work_of(name, rule, rule.counts(op) or OperationCounts(), op)
    if name == "dot_general":  # not every NumPy has 8-bit floats
        return work._replace(itemsize=max(each.arrays[0].itemsize for each in computation.operands(instruction)[:2]))
    if name == "sort":  # rows are sorted one after another; a library's radix sort compares nothing
        length = inputs[0].shape[params["dimension"]] if inputs[0].shape else 1
        work = work._replace(
            itemsize=inputs[0].dtype.itemsize,
            pieces=elements(inputs[0]) // max(length, 1),
            counts={} if target else work.counts,
        )
    return work


def products_of(
    instruction: Instruction, computation: Computation, computations: Mapping[str, Computation]
) -> list[tuple[str, int]]:
    """Return the kind (see `PRODUCT_KINDS`) and the FLOP of each matrix product or convolution in an instruction."""
    found = []
    for each, inside in fused_in(instruction, computation, computations):
        is_called = any(name in each.target for name in ("gemm", "cublas", "cudnn", "matmul"))
        operands = inside.operands(each)
        if not (is_called or each.opcode in ("dot", "convolution")) or not operands or not operands[0].arrays:
            continue
        counts = _work(each, inside, computations).counts
        precision = _PRECISION.search(each.attributes)
        kind = {8: "byte", 16: "half", 64: "float64"}.get(operands[0].arrays[0].bits, "float32")
        if kind == "float32" and precision:
            kind = {"high": "high", "highest": "exact"}.get(precision[1].lower(), kind)
        found.append((kind, sum(count for name, count in counts.items() if name in PRODUCT_OPERATIONS)))
    return found


def _met_share(attributes: str, operand: tuple[int, ...], result: tuple[int, ...]) -> float:
    """Return the share of a convolution's multiplications that read an element instead of padding or a hole."""
    # Compilers write batched products as convolutions, in which most multiplications read padding or holes.
    window, labels = _WHOLE_WINDOW.search(attributes), _LABELS.search(attributes)
    if window is None or labels is None:
        return 1.0
    given = dict(_FIELD.findall(window[1]))
    sizes = list(map(int, given["size"].split("x")))

    def of(name: str, default: str) -> list[str]:
        return given.get(name, "x".join([default] * len(sizes))).split("x")

    fields = zip(sizes, of("stride", "1"), of("lhs_dilate", "1"), of("rhs_dilate", "1"), of("pad", "0_0"), strict=True)
    share = 1.0
    for axis, (size, stride, spread, holes, pad) in enumerate(fields):
        length, count = operand[labels[1].index(str(axis))], result[labels[3].index(str(axis))]
        first = np.arange(count)[:, None] * int(stride) - int(pad.partition("_")[0])
        places = first + np.arange(size) * int(holes)
        is_met = (places >= 0) & (places <= (length - 1) * int(spread)) & (places % int(spread) == 0)
        share *= float(is_met.mean())
    return share
