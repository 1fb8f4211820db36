"""What a compiled program takes of a target, and the compiler's own estimates, checked for sense."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlxjax._values import FrozenDict, by_value
from rlxjax.targets import CompiledFor, TargetDevice

from ._gpu_program import GpuProgram
from ._gpu_text import gpu_program
from ._rules import OperationCounts
from ._xla import CompiledProgram


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
        cycles: by the TPU compiler's estimates, loops by their trips; None where it gives none.
        estimates: XLA's own figures that make sense: "flops", "bytes accessed", "optimal_seconds", "cycles".
        left_out: XLA's own figures that make none, each with the reason.
        compiler: what compiled it, with versions.
        compile_seconds: that it took, 0 where it was compiled before.
        gpu: what a call launches, of a GPU.
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
        moved = {name: {"launches": row.launches, "bytes": row.bytes or 0} for name, row in self.collectives.items()}
        return {
            "name": self.device.name,
            "devices": self.devices,
            "memory_bytes": self.device.memory_bytes,
            "argument_bytes": self.argument_bytes,
            "output_bytes": self.output_bytes,
            "temporary_bytes": self.temporary_bytes,
            "peak_bytes": self.peak_bytes,
            "fits": self.fits,
            "collectives": moved,
            "xla_estimates": dict(self.estimates),
            "xla_left_out": dict(self.left_out),
            "compiler": self.compiler,
            "compile_s": self.compile_seconds,
        }

    def lines(self) -> list[str]:
        """Return what there is to say, a line each."""
        several = f", each of {self.devices} devices" if self.devices > 1 else ""
        temporary = f"{self.temporary_bytes / 1e9:.3g} GB of it temporaries"
        found = [f"on {self.device.title} ({self.compiler}){several}: {self.memory}, {temporary}"]
        for name, counts in self.collectives.items():
            found.append(f"{name}: {counts.launches:,} times, {(counts.bytes or 0) / 1e6:,.4g} MB")
        for name, value in self.estimates.items():
            found.append(f"XLA's own estimate of {name}: {value:,.6g}")
        found += (f"XLA's own estimate of {name} is left out: {reason}" for name, reason in self.left_out.items())
        return found


def target_profile(made: CompiledFor, program: CompiledProgram, trips: Mapping[str, int]) -> TargetProfile:
    """Return what a compiled program takes of its target, with the estimates of XLA that make sense.

    Trips are those of loops whose trips the text does not tell, by their line.
    """
    estimates, left_out = _checked(made, program)
    alike = set(trips.values())  # the reader of a GPU's text knows no lines
    gpu = gpu_program(made.text, alike.pop() if len(alike) == 1 else None) if made.target.platform == "cuda" else None
    return TargetProfile(
        device=made.target,
        devices=made.devices,
        argument_bytes=made.argument_bytes,
        output_bytes=made.output_bytes,
        temporary_bytes=made.temporary_bytes,
        peak_bytes=made.peak_bytes,
        collectives=FrozenDict(program.collectives),
        cycles=int(estimates["cycles"]) if "cycles" in estimates else None,
        estimates=FrozenDict(estimates),
        left_out=FrozenDict(left_out),
        compiler=made.compiler,
        compile_seconds=made.seconds,
        gpu=gpu,
    )


def _checked(made: CompiledFor, program: CompiledProgram) -> tuple[dict[str, float], dict[str, str]]:
    """Return XLA's own figures that make sense, and those that make none with the reason."""
    moved = program.totals.sums().bytes or 0
    least_ns = moved / made.target.bandwidth_bytes_per_ns
    estimates: dict[str, float] = {}
    left_out: dict[str, str] = {}

    def check(name: str, value: float | None, time_ns: float | None, counts_loops: bool) -> None:
        if value is None:
            return
        if not value > 0:
            left_out[name] = f"it is {value:g}"
        elif program.loops and not counts_loops:
            left_out[name] = f"it is {value:.6g} and counts the body of a loop once"
        elif time_ns is not None and time_ns < least_ns:
            left_out[name] = (
                f"it is {time_ns / 1e3:,.4g} us, less than the {least_ns / 1e3:,.4g} us in which the device's memory "
                f"moves the {moved / 1e6:,.4g} MB of its kernels"
            )
        else:
            estimates[name] = value

    for name in ("flops", "bytes accessed"):
        check(name, made.costs.get(name), None, False)
    seconds = made.costs.get("optimal_seconds")
    check("optimal_seconds", seconds, None if seconds is None else 1e9 * seconds, False)
    if made.target.platform == "tpu":
        cycles = program.totals.cycles
        check("cycles", float(cycles), cycles / made.target.clock_ghz, True)
        if program.unknown_loops and "cycles" in estimates:
            left_out["cycles"] = f"it is {estimates.pop('cycles'):,.0f} without loops of unknown length"
        elif program.no_cycles and "cycles" in estimates:
            missing = ", ".join(program.no_cycles)
            left_out["cycles of some instructions"] = f"the compiler gives none for {missing}, which the sum leaves out"
    return estimates, left_out
