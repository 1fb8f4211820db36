"""The profile of a function, what it takes of a target, and how both are shown."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from rlxjax._values import FrozenDict, by_value
from rlxjax.devices import TargetDevice
from rlxjax.graph import GraphIoProfile

from ._exchanges import Exchange
from ._kernels import Kernels
from ._rules import OperationCounts
from ._totals import BranchSpread, UnknownLoop
from ._xla_kernels import GpuProgram

_SHOWN_LINES = 10


class Disagreement(NamedTuple):
    """A count on which the function as written, what was compiled, and XLA's own analysis differ.

    Attributes:
        name: of the count.
        jaxpr: of the equations; of traffic the fused one.
        compiled: of the instructions that XLA made; None where its text gives none.
        xla: of XLA's own `cost_analysis()`; None where it gives none.
        reason: why they may differ, empty if nothing is known.
    """

    name: str
    jaxpr: int
    compiled: int | None
    xla: int | None
    reason: str


@by_value
@dataclasses.dataclass(frozen=True)
class TargetProfile:
    """What a program takes of a device that it was compiled for; figures are those of one device.

    Attributes:
        device: the target.
        devices: how many the program runs on.
        argument_bytes: of the arguments.
        output_bytes: of the results.
        temporary_bytes: that the program needs beside them.
        peak_bytes: arguments, results and temporaries, what is shared once.
        collectives: what the devices do together, by name: how often, and the bytes that one gives and receives.
        exchanges: each of these, with the devices that take part and what runs beside.
        mesh: sizes of the axes that the devices are named by; empty for one device.
        coordinates: of each device in a TPU's torus, in the order of the program's partitions.
        products: floating-point operations of products by what bounds their rate, see `PRODUCT_KINDS`.
        custom: what the authors of its custom kernels say that they do.
        unknown: the kernels of which nobody says what they do.
        cycles: by the TPU compiler's estimates, loops by their trips; None of a GPU.
        estimates: XLA's own figures that make sense: "flops", "bytes accessed", "optimal_seconds", "cycles".
        left_out: XLA's own figures that make none, each with the reason.
        compiler: what compiled it, with versions.
        compile_seconds: that it took, 0 where it was compiled before.
        gpu: what a call launches, of a GPU.
        own_cycles: those of kernels that do more than to go over their arrays, such as products.
        others: of a TPU, the other kernels, which take what their bytes and operations take.
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
        """Whether the peak memory of the program is at most that of the device."""
        return self.peak_bytes <= self.device.memory_bytes

    @property
    def memory(self) -> str:
        """The memory that the program needs beside what the device has, in words.

        Examples:
            A program of 21 GB on a device of 16: "needs 21 GB of 16: does not fit".
        """
        needs, has = (f"{count / 1e9:.3g}" for count in (self.peak_bytes, self.device.memory_bytes))
        return f"needs {needs} GB of {has}: {'fits' if self.fits else 'does not fit'}"

    def as_dict(self) -> dict[str, Any]:
        """Return what a program reads; what XLA estimates under XLA's own names."""
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
        """Return what there is to say, a line each."""
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        several = f", each of {self.devices} devices{f' ({axes})' if axes else ''}" if self.devices > 1 else ""
        temporary = f"{self.temporary_bytes / 1e9:.3g} GB of it temporaries"
        found = [f"on {self.device.title} ({self.compiler}){several}: {self.memory}, {temporary}"]
        for name, counts in self.collectives.items():
            found.append(f"{name}: {counts.launches:,} times, {(counts.bytes or 0) / 1e6:,.4g} MB")
        for name, value in self.estimates.items():
            found.append(f"XLA's own estimate of {name}: {value:,.6g}")
        found += (f"XLA's own estimate of {name} is left out: {reason}" for name, reason in self.left_out.items())
        return found


@by_value
@dataclasses.dataclass(frozen=True)
class FunctionProfile:
    """What a function computes and moves when it is called once; counts are exact integers.

    Loops whose length depends on data count as no trip, and are listed in `unknown_loops`; `uncounted` says in
    words what else is missing.

    Of level "compiled", what moves and runs is that of the instructions that XLA made: `io.kernel_launches`,
    `io.device_traffic_bytes` (which is then `fused_traffic_bytes`), `peak_bytes`, `unknown_loops` and
    `branches`. XLA's text gives no operations: these, and the coverage, stay those of the jaxpr. Rows of
    `by_family` hold the operations of a family of primitives, or launches and bytes of a kind of
    instruction ("loop fusion", "copy", "custom-call TopK"), or both where the names are the same. Arrays that
    the function closes over are part of the compiled program, and no memory of its runs.

    Attributes:
        io: launches (an equation that does work is one), sync points (callbacks and ordered effects),
            bytes of the results, and the traffic of every equation by itself: operands and results.
        flops: floating-point operations; a fused multiply-add is two.
        transcendentals: exp, log, sqrt, sin, pow and the like, which are no FLOP.
        integer_ops: operations on integers and booleans.
        fused_traffic_bytes: the traffic if what may be computed on the way to its readers is.
        peak_bytes: the arguments and constants that are used, the results, and the most temporaries that
            live at once, fused.
        by_family: counts by family of operation, dearest first.
        by_line: counts by the user's line, `file.py:12`, dearest first.
        coverage_equations: share of the equations that a rule counts, each once however often it runs.
        coverage_bytes: share of the unfused bytes that they move.
        equations: how many there are, calls written out; what nobody uses is left out.
        uncosted: primitives without a rule, each with how often it was met; they count by their bytes only.
        unknown_loops: the loops of unknown length, in order of appearance.
        branches: each conditional with its cheapest and its dearest branch; the dearest is counted.
        kernels: what is launched if what may be computed on the way is, by kind and size, of the jaxpr.
        trips: turns of loops, and choices among branches.
        arrays: that a call takes and gives.
        results: those that it gives.
        static_ops: floating-point and integer operations, those of a loop's body once.
        level: "jaxpr" or "compiled".
        disagreements: of level "compiled", the counts on which the jaxpr, the compiled program and XLA's own
            analysis differ.
        target: what the program takes of the device that it was compiled for, where one was named.
        custom: what custom kernels do by their authors: `pallas_call`, `ffi_call`, and primitives that
            `register_rule` was told of; of all devices.
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
        """What is done and not counted, a sentence each: no figure but a least one rests on such counts."""
        reasons = []
        for line, starts, turn in self.unknown_loops:
            if starts != 0:
                times = "an unknown number of times" if starts is None else f"{starts} times"
                reasons.append(
                    f"how often the loop at {line} turns depends on data: give trip_counts; it is started {times}, "
                    f"and a turn takes {_short(turn.flops)}FLOP and {_short(turn.bytes or 0)}B"
                )
        for name, times in self.uncosted.items() if self.target is None else ():  # a compiler counts it
            reasons.append(f"{name} has no rule and counts by its bytes only, {times} times: see register_rule")
        for name in () if self.target is None else self.target.unknown:
            reasons.append(
                f"nobody says what the kernel {name} does: give pallas_call a cost_estimate, or see register_rule"
            )
        if self.target is not None and self.target.gpu is not None and self.target.gpu.unknown_loops and not reasons:
            reasons.append("loops of different trips that depend on data count as one turn each")
        if self.io.sync_points:
            reasons.append("what the host does when the program calls it is not known")
        if "collective" in self.by_family and self.target is None:
            reasons.append("how long devices wait for each other is not known")
        return tuple(reasons)

    def as_dict(self) -> dict[str, Any]:
        """Return what a program reads: counts, shares of 1, and what the program takes of a target."""
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
        io, is_written = self.io, self.level == "jaxpr"
        shares = self.coverage_equations, self.coverage_bytes  # which read 100 % only if they are
        covered, of_traffic = ("100 %" if each == 1 else f"{min(100 * each, 99.99):.2f} %" for each in shares)
        moved = _short(io.device_traffic_bytes)
        of_bytes = f", {of_traffic} of {moved}B"
        several = self.target.devices if self.target else 1
        of_all = f", of all {several} devices" if several > 1 else ""
        of_xla = "; launches, traffic and memory are those of the compiled program"
        fused = f", {_short(self.fused_traffic_bytes)}B if fused" if is_written else ""
        lines = [
            f"covered by rules: {covered} of {self.equations} equations{of_bytes if is_written else of_xla}",
            f"{_short(self.flops)}FLOP, {_short(self.transcendentals).strip()} transcendentals, "
            f"{_short(self.integer_ops).strip()} integer operations{of_all}",
            f"{moved}B of traffic{fused}, {_short(self.peak_bytes)}B live at the peak",
            f"{io.kernel_launches} launches, {io.sync_points} sync points, {_short(io.host_output_bytes)}B of results",
            "",
        ]
        rows: list[tuple[str, ...]] = [("", "FLOP", "transcendentals", "integer", "bytes", "launches")]
        for name, counts in [*self.by_family.items(), *list(self.by_line.items())[:_SHOWN_LINES]]:
            rows.append((name, *(_short(count or 0).strip() for count in counts)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ("  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]) for first, *rest in rows)
        lines += (f"not counted: {reason}" for reason in self.uncounted)
        for line, least, most in self.branches:
            lines.append(
                f"conditional at {line}: {_short(least.flops).strip()} to {_short(most.flops)}FLOP, "
                f"{_short(least.bytes or 0).strip()} to {_short(most.bytes or 0)}B; the dearest is counted"
            )
        lines += self.target.lines() if self.target else ()
        for name, *counts, reason in self.disagreements:
            jaxpr, compiled, xla = ("none" if count is None else _short(count).strip() for count in counts)
            why = f"; {reason}" if reason else ""
            lines.append(f"{name}: jaxpr {jaxpr}, compiled {compiled}, XLA's own figure {xla}{why}")
        return "\n".join(lines)


def _moved(rows: Mapping[str, OperationCounts]) -> dict[str, dict[str, int]]:
    return {name: {"launches": row.launches, "bytes": row.bytes or 0} for name, row in rows.items()}


def dearest_first(rows: Mapping[str, OperationCounts]) -> Mapping[str, OperationCounts]:
    """Order rows by their share of the operations plus their share of the bytes."""
    operations = max(sum(sum(row[:3]) for row in rows.values()), 1)
    moved = max(sum(row.bytes or 0 for row in rows.values()), 1)
    order = sorted(rows, key=lambda name: -(sum(rows[name][:3]) / operations + (rows[name].bytes or 0) / moved))
    return FrozenDict({name: rows[name] for name in order})


def _short(count: Any) -> str:
    """Return a count with three to four digits and the prefix of its power of a thousand."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(count) < 1000 or prefix == "P":
            return f"{count:.4g} {prefix}"
        count /= 1000
    raise AssertionError
