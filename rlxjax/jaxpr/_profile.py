"""The profile of a function, the resources that it takes of a target device, and the text of both."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rlxjax._values import FrozenDict, by_value, counted
from rlxjax.devices import TargetDevice
from rlxjax.graph import GraphIoProfile
from rlxjax.units import bytes_text, number_text, time_text

from ._exchanges import Exchange
from ._kernels import Kernels
from ._rules import OperationCounts
from ._totals import BranchSpread, UnknownLoop
from ._xla_kernels import GpuProgram

_SHOWN_LINES = 10
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class Disagreement(NamedTuple):
    """A count that differs between the function as written, the compiled program and XLA's own analysis.

    Attributes:
        name: the name of the count.
        jaxpr: the count of the equations; for traffic, the fused traffic.
        compiled: the count of XLA's instructions; None if XLA's text does not say the count.
        xla: the count of XLA's own `cost_analysis()`; None if XLA gives no such figure.
        reason: a reason for the difference, empty if none is known.
    """

    name: str
    jaxpr: int
    compiled: int | None
    xla: int | None
    reason: str


@by_value
@dataclasses.dataclass(frozen=True)
class TargetProfile:
    """The memory, kernels and compiler's estimates of a program on a target; all figures are per device.

    Attributes:
        device: the target.
        devices: number of devices that the program runs on.
        argument_bytes: bytes of the arguments.
        output_bytes: bytes of the results.
        temporary_bytes: bytes of the temporaries.
        peak_bytes: bytes of arguments, results and temporaries; shared memory counts once.
        collectives: launches and bytes of the collective operations, by name.
        exchanges: each collective operation, with its devices and the work that overlaps with the operation.
        mesh: sizes of the mesh axes by name; empty for one device.
        coordinates: place of each device in a TPU's torus, in the order of the program's partitions.
        products: floating-point operations of products, by the kind that bounds their rate, see `PRODUCT_KINDS`.
        custom: counts of the custom kernels, as their authors declare them.
        unknown: names of kernels whose work nobody declares.
        cycles: cycles by the TPU compiler's estimates, with all iterations of loops; None on a GPU.
        estimates: XLA's own plausible figures: "flops", "bytes accessed", "optimal_seconds", "cycles".
        left_out: XLA's own implausible figures, each with the reason.
        compiler: name and version of the compiler.
        compile_seconds: seconds of compiling, 0 if the program was cached.
        gpu: the launches of a call on a GPU.
        own_cycles: cycles of kernels that do more than pass over their arrays, such as products.
        others: the remaining kernels of a TPU, whose time follows from their bytes and operations.
    """

    device: TargetDevice
    devices: int
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    peak_bytes: int
    collectives: Mapping[str, OperationCounts]
    cycles: int | None
    estimates: Mapping[str, float]
    left_out: Mapping[str, str]
    compiler: str
    compile_seconds: float
    gpu: GpuProgram | None = None
    own_cycles: int = 0
    others: Kernels | None = None
    exchanges: tuple[Exchange, ...] = ()
    mesh: Mapping[str, int] = FrozenDict()
    coordinates: tuple[tuple[int, ...], ...] = ()
    products: Mapping[str, int] = FrozenDict()
    custom: OperationCounts = OperationCounts()
    unknown: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the program's peak memory is at most the device's memory."""
        return self.peak_bytes <= self.device.memory_bytes

    @property
    def memory(self) -> str:
        """The peak memory and the device's memory in words: "needs 21 GB of 17.2 GB: does not fit"."""
        needs, has = map(bytes_text, (self.peak_bytes, self.device.memory_bytes))
        return f"needs {needs} of {has}: {'fits' if self.fits else 'does not fit'}"

    def as_dict(self) -> dict[str, Any]:
        """Return the profile as JSON has it; XLA's estimates keep XLA's own names."""
        sizes = ("argument_bytes", "output_bytes", "temporary_bytes", "peak_bytes", "fits")
        return {
            "name": self.device.name,
            "devices": self.devices,
            "mesh": dict(self.mesh),
            "memory_bytes": self.device.memory_bytes,
            **{name: getattr(self, name) for name in sizes},
            "collectives": _moved(self.collectives),
            "xla_estimates": dict(self.estimates),
            "xla_left_out": dict(self.left_out),
            "compiler": self.compiler,
            "compile_s": self.compile_seconds,
        }

    def lines(self) -> list[str]:
        """Return the lines of the printed text."""
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        several = f", each of {self.devices} devices{f' ({axes})' if axes else ''}" if self.devices > 1 else ""
        temporary = f"{bytes_text(self.temporary_bytes)} of which are temporaries"
        found = [f"on {self.device.title} ({self.compiler}){several}: {self.memory}, {temporary}"]
        for name, counts in self.collectives.items():
            found.append(f"{name}: {counted(counts.launches, 'time')}, {bytes_text(counts.bytes or 0)}")
        found += (
            f"XLA's own estimate of {name}: {_FIGURES.get(name, count_text)(value).strip()}"
            for name, value in self.estimates.items()
        )
        found += (f"XLA's own estimate of {name} is left out: {reason}" for name, reason in self.left_out.items())
        return found


@by_value
@dataclasses.dataclass(frozen=True)
class FunctionProfile:
    """The operations, bytes, launches and memory of one call of a function; counts are exact integers.

    A loop whose trip count depends on data counts as zero iterations and is listed in `unknown_loops`. `uncounted`
    says in words which other work is missing.

    At level "compiled", the counts of launches, bytes and memory come from XLA's instructions: `io.kernel_launches`,
    `io.device_traffic_bytes` (equal to `fused_traffic_bytes`), `peak_bytes`, `unknown_loops` and `branches`. XLA's text
    says no operations, so operations and coverage come from the jaxpr. A row of `by_family` holds the operations of a
    family of primitives, or the launches and bytes of a kind of instruction ("loop fusion", "copy", "custom-call
    TopK"), or both if the two names are equal. Captured arrays are part of the compiled program and use no memory of
    its runs.

    Attributes:
        io: the unfused counts: launches (one for each equation that does work), sync points (callbacks and ordered
            effects), bytes of the results, and traffic (operands and results of each equation).
        flops: floating-point operations; a fused multiply-add is two.
        transcendentals: calls of exp, log, sqrt, sin, pow and the like; these are not in `flops`.
        integer_ops: operations on integers and booleans.
        fused_traffic_bytes: bytes of traffic if each value that can be fused into its readers is fused.
        peak_bytes: bytes of used arguments and constants, results, and the most temporaries that live at once, fused.
        by_family: counts by family of operation, the most expensive family first.
        by_line: counts by your source line, `file.py:12`, the most expensive line first.
        coverage_equations: share of the equations that a rule counts; an equation in a loop counts once.
        coverage_bytes: share of the unfused bytes that these equations move.
        equations: number of equations, those of called functions included and unused ones left out.
        uncosted: primitives without a rule and their numbers of equations; only their bytes count.
        unknown_loops: the loops of unknown length, in order of appearance.
        branches: the cheapest and the most expensive branch of each conditional; the most expensive one counts.
        kernels: the fused kernels of the jaxpr, by kind and size.
        trips: iterations of loops, plus choices among branches.
        arrays: number of arrays that a call takes and returns.
        results: number of arrays that a call returns.
        static_ops: floating-point and integer operations; the body of a loop counts once.
        level: "jaxpr" or "compiled".
        disagreements: at level "compiled", the counts that differ between jaxpr, compiled program and XLA's analysis.
        target: the profile of the program on the target device, if you named a target.
        custom: the counts of custom kernels on all devices, as their authors declare them: `pallas_call`, `ffi_call`,
            and primitives known by `register_rule`.
    """

    io: GraphIoProfile
    flops: int
    transcendentals: int
    integer_ops: int
    fused_traffic_bytes: int
    peak_bytes: int
    by_family: Mapping[str, OperationCounts]
    by_line: Mapping[str, OperationCounts]
    coverage_equations: float
    coverage_bytes: float
    equations: int
    uncosted: Mapping[str, int]
    unknown_loops: tuple[UnknownLoop, ...]
    branches: tuple[BranchSpread, ...]
    kernels: Kernels
    trips: int
    arrays: int
    results: int
    static_ops: int
    level: str = "jaxpr"
    disagreements: tuple[Disagreement, ...] = ()
    target: TargetProfile | None = None
    custom: OperationCounts = OperationCounts(launches=0)

    @property
    def uncounted(self) -> tuple[str, ...]:
        """The work that is not counted, a sentence each; predictions from such counts are lower bounds."""
        reasons = []
        for line, starts, turn in self.unknown_loops:
            if starts != 0:
                times = "an unknown number of times" if starts is None else counted(starts, "time")
                reasons.append(
                    f"the trip count of the loop at {line} depends on data: give trip_counts; the loop starts {times}, "
                    f"and an iteration takes {count_text(turn.flops)}FLOP and {bytes_text(turn.bytes or 0)}"
                )
        for name, times in self.uncosted.items() if self.target is None else ():  # a compiler counts it
            said = f"{name} has no rule, so only its bytes count ({counted(times, 'equation')}): see register_rule"
            reasons.append(said)
        for name in () if self.target is None else self.target.unknown:
            reasons.append(
                f"the work of the kernel {name} is unknown: give pallas_call a cost_estimate, or see register_rule"
            )
        if self.target is not None and self.target.gpu is not None and self.target.gpu.unknown_loops and not reasons:
            reasons.append("loops whose different trip counts depend on data count as one iteration each")
        if self.io.sync_points:
            reasons.append("the time of Python callbacks on the host is unknown")
        if "collective" in self.by_family and self.target is None:
            reasons.append("the time that devices wait for each other is unknown")
        return tuple(reasons)

    def as_dict(self) -> dict[str, Any]:
        """Return the profile as JSON has it: counts, shares of 1, and the profile on a target."""
        found: dict[str, Any] = {
            "counts": {name: getattr(self, name) for name in ("flops", "transcendentals", "integer_ops")}
            | {
                "launches": self.io.kernel_launches,
                "sync_points": self.io.sync_points,
                "traffic_bytes": self.io.device_traffic_bytes,
                "fused_traffic_bytes": self.fused_traffic_bytes,
                "peak_bytes": self.peak_bytes,
            },
            "coverage": {"equations": self.coverage_equations, "bytes": self.coverage_bytes},
            "uncounted": list(self.uncounted),
        }
        if self.target is not None:
            kinds = {name: row for name, row in self.by_family.items() if row.launches or row.bytes}
            found["target"] = self.target.as_dict() | {"kernels": _moved(kinds)}
        return found

    def __str__(self) -> str:
        io: Any = self.io  # of integers
        is_written = self.level == "jaxpr"
        shares = self.coverage_equations, self.coverage_bytes  # a text of "100 %" means all of them
        covered, of_traffic = ("100 %" if each == 1 else f"{min(100 * each, 99.99):.2f} %" for each in shares)
        moved, launches = bytes_text(io.device_traffic_bytes), counted(io.kernel_launches, "launch", "launches")
        if is_written:
            moved += f" of memory traffic if nothing is fused, {bytes_text(self.fused_traffic_bytes)} if all is fused"
            launches += f" if nothing is fused, {sum(self.kernels.launches.tolist()):,} if all is fused"
        several = self.target.devices if self.target else 1
        lines = [
            f"{count_text(self.flops)}FLOP, {count_text(self.transcendentals).strip()} transcendentals, "
            f"{count_text(self.integer_ops).strip()} integer operations{f', on {several} devices' * (several > 1)}",
            moved if is_written else f"{moved} of memory traffic",
            launches,
            f"{counted(io.sync_points, 'wait')} for the host, {bytes_text(self.peak_bytes)} of memory at the peak, "
            f"{bytes_text(io.host_output_bytes)} of results",
            f"counted: {covered} of {counted(self.equations, 'equation')}"
            + (f", {of_traffic} of the traffic" if is_written else "; launches and bytes are the compiled program's"),
            "",
        ]
        headings = ("if nothing is fused" * is_written, "FLOP", "transcendentals", "integer", "traffic", "launches")
        rows: list[tuple[str, ...]] = [headings]
        for name, counts in [*self.by_family.items(), *list(self.by_line.items())[:_SHOWN_LINES]]:
            operations = (count_text(count).strip() for count in counts[:3])
            rows.append((name, *operations, bytes_text(counts.bytes or 0), f"{counts.launches:,}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ("  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]) for first, *rest in rows)
        lines += (f"not counted: {reason}" for reason in self.uncounted)
        for line, least, most in self.branches:
            lines.append(
                f"conditional at {line}: {count_text(least.flops).strip()} to {count_text(most.flops)}FLOP, "
                f"{bytes_text(least.bytes or 0)} to {bytes_text(most.bytes or 0)}; the most expensive branch counts"
            )
        lines += self.target.lines() if self.target else ()
        for name, *counts, reason in self.disagreements:
            jaxpr, compiled, xla = ("none" if count is None else count_text(count).strip() for count in counts)
            why = f"; {reason}" if reason else ""
            lines.append(f"{name}: jaxpr {jaxpr}, compiled {compiled}, XLA's own figure {xla}{why}")
        return "\n".join(lines)


#: The texts of XLA's own figures that are no plain counts.
_FIGURES: dict[str, Callable[[float], str]] = {
    "optimal_seconds": lambda seconds: time_text(1e9 * seconds),
    "bytes accessed": bytes_text,
}


def _moved(rows: Mapping[str, OperationCounts]) -> dict[str, dict[str, int]]:
    return {name: {"launches": row.launches, "bytes": row.bytes or 0} for name, row in rows.items()}


def costliest_first(rows: Mapping[str, OperationCounts]) -> Mapping[str, OperationCounts]:
    """Sort rows by their share of the operations plus their share of the bytes."""
    operations = max(sum(sum(row[:3]) for row in rows.values()), 1)
    moved = max(sum(row.bytes or 0 for row in rows.values()), 1)
    order = sorted(rows, key=lambda name: -(sum(rows[name][:3]) / operations + (rows[name].bytes or 0) / moved))
    return FrozenDict({name: rows[name] for name in order})


def count_text(count: float) -> str:
    """Return a count with three digits, a space and the prefix of its power of a thousand: `2.15 G`."""
    size, prefix = next(((size, prefix) for size, prefix in _PREFIXES if abs(count) >= 0.9995 * size), (1.0, ""))
    return f"{number_text(count / size, 3)} {prefix}"
