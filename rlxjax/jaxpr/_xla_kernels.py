"""The kernels of a compiled program, counted by the rules that count a jaxpr's equations; what the host launches."""

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

#: Commands that follow each other and that one launch of a CUDA graph runs, at least so many.
GRAPH_COMMANDS = 5
#: Samples of a transform that one pass over memory takes at most.
PASS_SAMPLES = 2**13
#: Kernels of a radix sort for each byte of a key, and before the first one.
DIGIT_KERNELS, COUNTING_KERNELS = 2, 2
#: When XLA lets a library sort by digits if the card is there, as it does by what it timed on an H100, by bytes of a
#: key: one row that is longer than the first number; rows that are longer than the second one, if they are more than
#: the third, for rows of 2**17, and more for shorter ones.
SORTED_BY_DIGITS = {1: (0, 1300, 4), 2: (2**9, 2**12, 10), 4: (22_000, 2**13, 26), 8: (2**17, 2**14, 55)}

_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
_BATCHED = re.compile(r'lhs_batch_dim(?:s=\{|ensions":\[)([\d,"]*)')
_HIGHEST = re.compile(r"operand_precision(?:=\{|\":\[\")(highest)", re.IGNORECASE)
_PRECISION = re.compile(r"operand_precision(?:=\{|\":\[\")(\w+)", re.IGNORECASE)
_LABELS = re.compile(r"\bdim_labels=\w+_(\w+)->")
_WINDOW = re.compile(r"\bwindow=\{size=([\dx]+)")
_WHOLE_WINDOW, _FIELD = re.compile(r"\bwindow=\{([^}]*)\}"), re.compile(r"(\w+)=(\S+)")
_ALL_LABELS = re.compile(r"\bdim_labels=(\w+?)_(\w+?)->(\w+)")
_FFT = re.compile(r"\bfft_type=(\w+), fft_length=\{([\d,]*)\}")
_DIMENSIONS = re.compile(r"\bdimensions=\{([\d,]*)\}")
_SLICES = re.compile(r"\bslice_sizes=\{([\d,]*)\}")


def _pairs(text: str) -> dict[str, str]:
    """Return the names that a text of `name=other` maps."""
    return {name: other for name, _, other in (pair.partition("=") for pair in text.split())}


#: Primitives by the opcodes that name them otherwise, and by what the targets of custom calls hold.
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
#: Kinds of products by what bounds their rate, and the operations that are products.
PRODUCT_KINDS = ("byte", "half", "float32", "high", "exact", "float64")
PRODUCT_OPERATIONS = ("dot_general", EXACT, "product_with_vector", "conv_general_dilated")
#: Families by which a kernel is named that computes several things, the first one that it has.
_NAMING = ("matmul", "convolution", "fft", "sort", "linear algebra", "scatter", "reduction", "window")
#: How reductions and scatters combine: the root of what they call.
_COMBINED = _pairs("add=sum maximum=max minimum=min multiply=prod and=and or=or")


@by_value
@dataclasses.dataclass(frozen=True)
class GpuProgram:
    """What one call of a compiled program does on a GPU.

    Attributes:
        arguments: arrays that it takes.
        results: arrays that it gives.
        kernels: that it launches; those of loops as often as they turn.
        copies: of these, copies that no kernel of the compiler does.
        calls: of these, calls of cuBLAS, cuDNN, cuSOLVER and the like.
        convolutions: of the calls, those of cuDNN.
        graphs: launches of CUDA graphs.
        grouped: kernels that these launch.
        forks: kernels outside of graphs that run on a second stream, beside the next ones.
        readbacks: values that the host waits for: tests of loops whose trips are not known, and conditions.
        unknown_loops: loops whose trips the text does not tell; each counts as one turn.
        unknown: targets of custom calls of which no rule says what they do, in order; their results alone are counted.
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
        """Kernels that are launched, those of graphs too."""
        return int(self.kernels.launches.sum())


def unknown_targets(targets: Iterable[str]) -> tuple[str, ...]:
    """Return the targets of custom calls of which no rule says what they do; a user registers one by their name."""
    return tuple(target for target in targets if _library(target) not in RULES)


def _library(target: str) -> str:
    """Return the name of the rule by which a custom call is counted, if there is one."""
    return next((name for part, name in _LIBRARY.items() if part in target), target)


def add_kernels(
    instruction: Instruction,
    computation: Computation,
    computations: Mapping[str, Computation],
    totals: Totals,
    platform: str,
) -> None:
    """Add the kernels of an instruction, with what it fuses, to a table; and what a GPU's host commands for them."""
    called, target, commands = instruction.called, instruction.target, totals.commands
    fused = computations[called["calls"]] if "calls" in called else None
    read, written = computation.moved(instruction, fused)
    if target and len(instruction.arrays) > 1:  # what a library asks for beside its results is last
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
            add_kernel(totals.kernels, 2 * read, read, [copying(read, 4)])  # keys that digits sort
            by_digits, parts, read, written = True, [main._replace(counts={})], both, both
    if by_digits:  # once over the bytes for each byte of a key, and once to count
        launches = DIGIT_KERNELS * main.itemsize + COUNTING_KERNELS
        read, written = ((main.itemsize + 1) * each // launches for each in (read, written))
    elif main.family == "sort" and not target:  # in place, so that what is sorted is copied
        add_kernel(totals.kernels, 2 * read, read, [copying(read, 4)])
        is_copy = True
    elif transform:
        # Over its bytes it goes once by axis, more often for long ones, once more if a long one is real.
        lengths = _sizes(transform[2])
        launches = sum(math.ceil(math.log2(max(length, 2)) / math.log2(PASS_SAMPLES)) for length in lengths)
        launches += "R" in transform[1] and max(lengths, default=1) > PASS_SAMPLES
    whole = sum(each.bytes for each in computation.operands(instruction)) + written
    for place in range(launches):
        add_kernel(totals.kernels, read + written, written, [main._replace(counts={})] if place else parts, whole)
    if scaled := bool(transform and transform[1].startswith("I")):  # by cuBLAS
        add_kernel(totals.kernels, 2 * written, written, [Work("elementwise", "mul", 4, counts={"mul": written // 4})])
    is_call = bool(target) and main.family in ("matmul", "convolution", "linear algebra")
    # Before each launch CUB asks for the card's properties, which takes as long.
    commands.update(
        copies=launches if by_digits else int(is_copy), calls=is_call + scaled, convolutions=int("cudnn" in target)
    )
    forks = instruction.opcode.endswith("-start")
    if main.family == "matmul" or (not target and main.family not in ("fft", "sort")):  # what CUDA graphs hold
        commands.update({"row": 1, "row forks": forks})
    else:
        commands["forks"] += forks
        end_row(commands)


def _bytes_by_digits(
    sort: Instruction, inside: Computation, computations: Mapping[str, Computation], is_pair: bool
) -> int:
    """Return the bytes of keys and values that a library's sort goes over at once; 0 where XLA takes none.

    XLA takes one only where the card is there. The numbers that XLA adds to keep the order of equal keys are no values.
    """
    arrays, is_numbered = [each.arrays[0] for each in inside.operands(sort)], inside.operands(sort)[-1].opcode == "iota"
    keys, *values = arrays[: len(arrays) - (is_numbered and len(arrays) > 1 + is_pair)]
    size, added = keys.itemsize, values[0].itemsize if values else 0
    axes = re.search(rf"dimensions={{{len(keys.sizes) - 1}}}", sort.attributes)  # the last one alone
    length = max(keys.sizes[-1:], default=1)
    rows, (one, several, most) = keys.elements // max(length, 1), SORTED_BY_DIGITS.get(size, (math.inf,) * 3)
    is_enough = length > one if rows == 1 else length > several and rows > most * (2**17 / length) ** 0.25
    if not (axes and is_enough) or keys.kind[0] not in "bfsu" or len(values) > 1:
        return 0
    by = computations[sort.called["to_apply"]]
    if any(each.inside == "nan" for each in by.instructions.values()):  # floats, NaNs last: values are packed with keys
        is_known, added = not values or (size <= 4 and values[0].kind in ("s16", "s32")), max(size, added and 8)
    else:  # a second key is none of the values
        are_places = is_numbered and len(arrays) == 2
        is_second_key = bool(values) and not are_places and by.parameters[2] in by.readers
        is_known = not is_second_key and (not values or keys.kind[0] == "u" or size == added == 4)
    return keys.elements * (size + added) * is_known


def end_row(commands: Counter[str]) -> None:
    """Make a graph of the commands that follow each other, if they are enough."""
    row, forks = commands.pop("row", 0), commands.pop("row forks", 0)
    # Joining a second stream is a command too.
    graph = {"graphs": 1, "grouped": row} if row + forks >= GRAPH_COMMANDS else {"forks": forks}
    commands.update(graph)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def _aval(array: Array) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array; floats and integers of few bits as those of 16 and 8."""
    letter, size = array.kind[0], array.bits // 8
    least = {"s": f"i{max(size, 1)}", "u": f"u{max(size, 1)}", "f": f"f{max(size, 2)}", "p": "bool", "b": "bfloat16"}
    return jax.ShapeDtypeStruct(array.sizes, jnp.dtype(least.get(letter, f"{letter}{size}")))


def _work(instruction: Instruction, computation: Computation, computations: Mapping[str, Computation]) -> Work:
    """Return what an instruction computes, by the rule of the primitive that it stands for."""
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
        else:  # half of the operands are what it begins with
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
        "precision": "HIGHEST" if _HIGHEST.search(instruction.attributes) else None,
    }
    op = Operation(inputs, outputs, params)
    if name == "conv_general_dilated":  # the text of a call of cuDNN does not say all that its rule asks for
        labels, kernel = _LABELS.search(instruction.attributes), inputs[1].shape
        features = max(kernel[labels[1].index("o")] if labels else 1, 1)
        flops = 2 * (math.prod(kernel) // features) * elements(outputs[0])
        flops = int(flops * _met_share(instruction.attributes, inputs[0].shape, outputs[0].shape))
        return work_of(name, rule._replace(also=None), OperationCounts(flops), op)
    work = work_of(name, rule, rule.counts(op) or OperationCounts(), op)
    if name == "dot_general":  # of numbers of 8 bits too, which are no dtype of every NumPy
        return work._replace(itemsize=max(each.arrays[0].itemsize for each in computation.operands(instruction)[:2]))
    if name == "sort":  # rows one by one; of libraries' sorts digits are counted, and nothing is compared
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
    """Return the operations of each product that an instruction is or fuses, with the kind that its rate goes by.

    Kinds are those of `PRODUCT_KINDS`: by the type that is multiplied, and the precision that is asked for.
    """
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
    """Return the share of a convolution's pairs of a result and a window's place that meet an element of its operand.

    Compilers write products of batches as convolutions of which most places meet padding, or between elements.
    """
    window, labels = _WHOLE_WINDOW.search(attributes), _ALL_LABELS.search(attributes)
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
