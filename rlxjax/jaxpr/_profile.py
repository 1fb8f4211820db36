"""The profile of a function, the profile of its program on a target device, and the printed text of both."""

import dataclasses
from collections.abc import Mapping
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
    """A count that is not the same in the function as written, in the compiled program and in XLA's own analysis.

    Attributes:
        name: the name of the count.
        jaxpr: the count from the function's jaxpr; for memory traffic, the traffic after fusion.
        compiled: the count from XLA's instructions; None if XLA's text does not contain this count.
        xla: the count from XLA's own `cost_analysis()`; None if XLA gives no such figure.
        reason: a reason for the difference; empty if no reason is known.
    """

    name: str
    jaxpr: int
    compiled: int | None
    xla: int | None
    reason: str


@by_value
@dataclasses.dataclass(frozen=True)
class TargetProfile:
    """The memory, kernels and compiler's estimates of a program on a target device. All figures are for one device.

    Attributes:
        device: the target device.
        devices: number of devices that the program runs on.
        argument_bytes: bytes of the arguments.
        output_bytes: bytes of the results.
        temporary_bytes: bytes of the temporaries.
        peak_bytes: bytes of arguments, results and temporaries; memory that several arrays share counts once.
        collectives: number of launches and bytes of the collective operations, by name of the operation.
        exchanges: the collective operations, each with its devices and with the work that overlaps with the operation.
        mesh: dict from the name of each mesh axis to its size; empty for one device.
        coordinates: coordinates of each TPU in the torus of TPUs, in the order of the program's partitions.
        products: floating-point operations of matrix products and convolutions, by kind of product (`PRODUCT_KINDS`).
        custom: the counts that the authors of custom kernels declare for their kernels.
        unknown: names of the custom kernels whose authors declare no counts.
        cycles: number of cycles that the TPU's compiler estimates, including all iterations of loops; None for a GPU.
        estimates: each of XLA's figures that is plausible: "flops", "bytes accessed", "optimal_seconds" or "cycles".
        left_out: those of XLA's own figures that are not plausible: the reason for each figure, by name of the figure.
        compiler: name and version of the compiler.
        compile_seconds: compilation time in seconds; 0 if the compiled program was in a cache.
        gpu: the launches and kernels of a call on a GPU; None for a TPU.
        own_cycles: the estimated cycles of matrix products and of other kernels with special code, such as sorts.
        others: all other kernels on a TPU. Their time follows from their bytes and operations. None for a GPU.
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
        """The peak memory and the device's memory as a phrase, such as "needs 21 GB of 17.2 GB: does not fit"."""
        needs, has = map(bytes_text, (self.peak_bytes, self.device.memory_bytes))
        return f"needs {needs} of {has}: {'fits' if self.fits else 'does not fit'}"

    def as_dict(self) -> dict[str, Any]:
        """Return the profile as a dict that JSON can hold. XLA's estimates have the names that XLA gives them."""
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
        """Return the lines that a printed `FunctionProfile` shows about the target."""
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

    A loop whose trip count depends on data counts as zero iterations, and `unknown_loops` lists it. `uncounted` says
    which other work is missing.

    At level "compiled", the counts of launches, bytes and memory come from XLA's instructions: `io.kernel_launches`,
    `io.device_traffic_bytes` (equal to `fused_traffic_bytes`), `peak_bytes`, `unknown_loops` and `branches`. Operations
    and coverage come from the jaxpr. In `by_family`, the row of a family of primitives holds operations, and the row of
    a kind of instruction ("loop fusion", "copy", "custom-call TopK") holds launches and bytes. A family and a kind of
    the same name share a row. `peak_bytes` leaves out captured arrays, because these are part of the compiled program.

    Attributes:
        io: the counts without fusion: launches (one for each equation that does work), sync points (callbacks and
            ordered effects), bytes of the results, and traffic (bytes of the operands and results of each equation).
        flops: floating-point operations; a fused multiply-add counts as two.
        transcendentals: evaluations of exp, log, sqrt, sin, pow and similar functions; `flops` does not include these.
        integer_ops: operations on integers and booleans.
        fused_traffic_bytes: bytes of memory traffic if each operation is fused with its readers wherever possible.
        peak_bytes: bytes of memory at the peak, after fusion: used arguments and constants, results and temporaries.
        by_family: counts by family of operation, the most expensive family first.
        by_line: counts by source line of your code, such as `file.py:12`, the most expensive line first.
        coverage_equations: share of the equations whose primitive has a rule; an equation in a loop counts once.
        coverage_bytes: share of the traffic without fusion that belongs to equations whose primitive has a rule.
        equations: number of equations, including those of called functions; equations with unused results are left out.
        uncosted: for each primitive without a rule, its number of equations. Of these equations, only the bytes count.
        unknown_loops: the loops whose trip count is unknown, in order of appearance.
        branches: the cheapest and the most expensive branch of each conditional. The totals hold the most expensive.
        kernels: the kernels of the jaxpr after fusion, grouped by kind and size.
        trips: number of loop iterations, plus the number of times that a conditional picks a branch.
        arrays: number of arrays that a call takes plus number of arrays that it returns.
        results: number of arrays that a call returns.
        static_ops: number of floating-point and integer operations if the body of each loop runs once.
        level: "jaxpr" or "compiled".
        disagreements: at level "compiled", the counts that are not the same in jaxpr, program and XLA's analysis.
        target: the profile of the program on the target device, if you named a target.
        custom: the counts of custom kernels on all devices, as their authors declare them: `pallas_call`, `ffi_call`,
            and primitives from `register_rule`.
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
        """One sentence for each part of the work that is not counted. If there is any, predictions are lower bounds."""
        reasons = []
        for line, starts, turn in self.unknown_loops:
            if starts != 0:
                times = "an unknown number of times" if starts is None else counted(starts, "time")
                reasons.append(
                    f"the trip count of the loop at {line} depends on data: give trip_counts; the loop starts {times}, "
                    f"and an iteration takes {count_text(turn.flops)}FLOP and {bytes_text(turn.bytes or 0)}"
                )
        for name, times in self.uncosted.items() if self.target is None else ():  # a compiler counts these
            said = f"{name} has no rule, so only its bytes count ({counted(times, 'equation')}): see register_rule"
            reasons.append(said)
        for name in () if self.target is None else self.target.unknown:
            reasons.append(
                f"the work of the kernel {name} is unknown: give pallas_call a cost_estimate, or see register_rule"
            )
        if self.target is not None and self.target.gpu is not None and self.target.gpu.unknown_loops and not reasons:
            reasons.append("trip counts of some loops depend on data, so each of these loops counts as one iteration")
        if self.io.sync_points:
            reasons.append("the time of Python callbacks on the host is unknown")
        if "collective" in self.by_family and self.target is None:
            reasons.append("the time that devices wait for each other is unknown")
        return tuple(reasons)

    def as_dict(self) -> dict[str, Any]:
        """Return a dict that JSON can hold: counts, coverage (from 0 to 1), uncounted work, the profile on a target."""
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
        shares = self.coverage_equations, self.coverage_bytes  # "100 %" is printed only for all equations or bytes
        covered, of_traffic = ("100 %" if each == 1 else f"{min(100 * each, 99.99):.2f} %" for each in shares)
        moved, launches = bytes_text(io.device_traffic_bytes), counted(io.kernel_launches, "launch", "launches")
        if is_written:
            moved += f" of memory traffic if nothing is fused, {bytes_text(self.fused_traffic_bytes)} if all is fused"
            launches += f" if nothing is fused, {sum(self.kernels.launches.tolist()):,} if all is fused"
        rest = f", {of_traffic} of the traffic" if is_written else "; launches and bytes come from the compiled program"
        several = self.target.devices if self.target else 1
        lines = [
            f"{count_text(self.flops)}FLOP, {count_text(self.transcendentals).strip()} transcendentals, "
            f"{count_text(self.integer_ops).strip()} integer operations{f', on {several} devices' * (several > 1)}",
            moved if is_written else f"{moved} of memory traffic",
            launches,
            f"{counted(io.sync_points, 'wait')} for the host, {bytes_text(self.peak_bytes)} of memory at the peak, "
            f"{bytes_text(io.host_output_bytes)} of results",
            f"counted: {covered} of {counted(self.equations, 'equation')}{rest}",
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


#: For those of XLA's own figures that are not plain counts: the function that formats the figure.
_FIGURES = {"optimal_seconds": lambda seconds: time_text(1e9 * seconds), "bytes accessed": bytes_text}


def _moved(rows: Mapping[str, OperationCounts]) -> dict[str, dict[str, int]]:
    return {name: {"launches": row.launches, "bytes": row.bytes or 0} for name, row in rows.items()}


def costliest_first(rows: Mapping[str, OperationCounts]) -> Mapping[str, OperationCounts]:
    """Sort rows by the sum of their share of all operations and their share of all bytes, the largest sum first."""
    operations = max(sum(sum(row[:3]) for row in rows.values()), 1)
    moved = max(sum(row.bytes or 0 for row in rows.values()), 1)
    order = sorted(rows, key=lambda name: -(sum(rows[name][:3]) / operations + (rows[name].bytes or 0) / moved))
    return FrozenDict({name: rows[name] for name in order})


def count_text(count: float) -> str:
    """Return a count with three digits, a space and an SI prefix, such as `2.15 G`."""
    size, prefix = next(((size, prefix) for size, prefix in _PREFIXES if abs(count) >= 0.9995 * size), (1.0, ""))
    return f"{number_text(count / size, 3)} {prefix}"
