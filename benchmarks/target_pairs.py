"""Pairs of stages compiled for a device that is not there: the verdict by the compiler's figures and by the jaxpr's.

    python -m benchmarks.target_pairs --target tpu-v5e|h100 [--half tune|judge] [--truth FILE] [--json FILE]

Both verdicts use the figures of one data sheet: by jaxpr, its fused bytes over the bandwidth and a launch for each of
its kernels (on a TPU for each program); compiled, `rlxjax.choices.target_times`. A pair is fused or kept where the
smaller form takes at most 0.95 times the larger one by jaxpr, and from a probability of 90 % on compiled, and is
undecided otherwise. Where one of both says fuse and the other keep, or only one decides, the compiler's bytes and
kernels, and on a TPU its cycles, say who is right: the form that is less in one and more in none. `--truth` is a file
of pairs that were timed on such a device (`benchmarks.accelerator`): how often each verdict chose the faster form.
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax

import rlxjax as rx
from benchmarks._common import options, table, write
from benchmarks.stage_pairs import PAIRS, Pair
from rlxjax.choices import target_times
from rlxjax.jaxpr import FunctionProfile
from rlxjax.targets import TargetDevice, target_device

#: The smaller form over the larger one from which the jaxpr decides.
CLOSE = 0.95
#: Pairs of which the gains of two halves of the rounds differ by more take one of two times.
MOST_NOISE = 1.15


def figures(programs: list[FunctionProfile]) -> dict[str, int | None]:
    """Return what programs run and move in all: cycles only where the compiler gives them for all."""
    written = programs[0].level == "jaxpr"
    cycles = [program.target.cycles if program.target else None for program in programs]
    return {
        "kernels": sum(
            sum(group.launches for group in program.kernels) if written else int(program.io.kernel_launches)
            for program in programs
        ),
        "bytes": sum(program.fused_traffic_bytes for program in programs),
        "cycles": None if None in cycles else sum(own or 0 for own in cycles),
        "peak_bytes": max(program.peak_bytes for program in programs),
    }


def by_jaxpr(device: TargetDevice, apart: list[FunctionProfile], together: FunctionProfile) -> str:
    """Return the verdict by the counts of the jaxpr and the data sheet."""

    def time_ns(programs: list[FunctionProfile]) -> float:
        found = figures(programs)
        launches = len(programs) if device.platform == "tpu" else found["kernels"] or 0
        return launches * device.launch_ns + (found["bytes"] or 0) / device.bandwidth_bytes_per_ns

    ratio = time_ns([together]) / time_ns(apart)
    return "fuse" if ratio <= CLOSE else "keep" if ratio >= 1 / CLOSE else "undecided"


def better(apart: dict[str, Any], together: dict[str, Any]) -> str:
    """Return the form that the compiler's figures prefer: less of one of them and more of none."""
    names = [name for name in ("kernels", "bytes", "cycles") if None not in (apart[name], together[name])]
    less, more = (any(sign * (apart[name] - together[name]) > 0 for name in names) for sign in (1, -1))
    return "fuse" if less and not more else "keep" if more and not less else "neither"


def judged(pair: Pair, device: TargetDevice) -> dict[str, Any]:
    """Return both verdicts of a pair and what they rest on, or why the target refuses it."""
    programs = [(pair.chain(pair.stages), pair.flat_args()), *zip(pair.stages, pair.stage_args(), strict=True)]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        written = [rx.profile_function(fn, *args) for fn, args in programs]
        try:
            made = [rx.profile_function(fn, *args, level="compiled", target=device) for fn, args in programs]
        except ValueError as error:
            return {"name": pair.name, "refusal": str(error)}
    said = target_times(made, device).decision([0], range(1, len(made)))
    apart, together = figures(made[1:]), figures(made[:1])
    return {
        "name": pair.name,
        "by_jaxpr": by_jaxpr(device, written[1:], written[0]),
        "compiled": said.verdict(),
        "probability": float(said.probability),
        "apart_ns": float(said.kept_ns),
        "together_ns": float(said.fused_ns),
        "better_by_the_compiler": better(apart, together),
        "apart": apart,
        "together": together,
        "jaxpr_apart": figures(written[1:]),
        "jaxpr_together": figures(written[:1]),
    }


def right(rows: list[dict[str, Any]], truth: dict[str, Any]) -> dict[str, Any]:
    """Return how often each verdict that decides chose the form that was timed to be the faster one."""
    found: dict[str, Any] = {}
    for verdict in ("by_jaxpr", "compiled"):
        pairs = [(row[verdict], truth[row["name"]]) for row in rows if row["name"] in truth]
        known = [(said, own) for said, own in pairs if own["noise"] <= MOST_NOISE]
        decided = [(said, own["together_ns"] < own["apart_ns"]) for said, own in known if said != "undecided"]
        hits = sum((said == "fuse") == pays for said, pays in decided)
        found[verdict] = {"pairs": len(known), "decided": len(decided), "right": hits}
    return found


def main() -> None:
    """Compile, judge, print and write."""
    parser = options(__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--half", choices=("tune", "judge"), default="judge")
    parser.add_argument("--truth", type=Path)
    given = parser.parse_args()
    device, start = target_device(given.target), time.monotonic()
    rows = []
    for pair in PAIRS:
        if pair.half == given.half:
            rows.append(judged(pair, device))
            print(f"\r{len(rows)} pairs", end="", file=sys.stderr)
    print(file=sys.stderr)
    made = [row for row in rows if "refusal" not in row]
    differ = [row for row in made if row["by_jaxpr"] != row["compiled"]]
    cells = [
        (row["name"], row["by_jaxpr"], row["compiled"], row["better_by_the_compiler"])
        + tuple(f"{row['apart'][name]} → {row['together'][name]}" for name in ("kernels", "bytes", "cycles"))
        for row in differ
    ]
    print(table(["pair", "by jaxpr", "compiled", "compiler's figures", "kernels", "bytes", "cycles"], cells))
    told = [row for row in differ if row["better_by_the_compiler"] != "neither"]
    summary: dict[str, Any] = {
        "target": device.name,
        "pairs": len(rows),
        "compiled": len(made),
        "refused": {row["name"]: row["refusal"] for row in rows if "refusal" in row},
        "by_jaxpr": dict(Counter(row["by_jaxpr"] for row in made)),
        "by_compiled_programs": dict(Counter(row["compiled"] for row in made)),
        "differ": len(differ),
        "opposed": sum({row["by_jaxpr"], row["compiled"]} == {"fuse", "keep"} for row in differ),
        "differing_that_the_compilers_figures_tell": len(told),
        "jaxpr_right_of_these": sum(row["by_jaxpr"] == row["better_by_the_compiler"] for row in told),
        "compiled_right_of_these": sum(row["compiled"] == row["better_by_the_compiler"] for row in told),
        "together_worse_by_the_compiler": sum(row["better_by_the_compiler"] == "keep" for row in made),
        "seconds": round(time.monotonic() - start, 1),
    }
    if given.truth:
        timed = json.loads(given.truth.read_text(encoding="utf-8"))["pairs"]
        summary["against_what_was_timed"] = right(made, timed)
    print(json.dumps(summary, indent=1))
    write(given.json, {"summary": summary, "pairs": rows})


if __name__ == "__main__":
    main()
