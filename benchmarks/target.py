"""Compare programs compiled for an absent device with their jaxprs.

    python -m benchmarks.target functions --target tpu-v5e|h100 [--which both] [--json FILE]
    python -m benchmarks.target pairs --target h100 [--half tune|judge] [--truth FILE] [--json FILE]
    python -m benchmarks.target programs --target h100 [--rows 8192 131072] [--json FILE]

`pip install '.[tpu-compiler]'` or `'.[cuda-compiler]'` installs a compiler, `'.[foreign]'` the libraries.

`functions`: kernels, bytes, memory and cycles of ordinary functions, and of one size of each kind in the suite. The
exit status is 1 if a loop of known length is not counted by its trip count.

`pairs`: verdicts for pairs of stages by the compiled program and by the jaxpr. The jaxpr's verdict divides fused bytes
by the data sheet's bandwidth and adds a launch for each kernel (on a TPU for each program). The jaxpr decides if the
ratio is at most 0.95, the compiled program if the probability is at least 90 %. If the verdicts differ, the form with
fewer kernels, bytes and cycles is right. `--truth` is a file of timed pairs from such a device.

`programs`: programs of this package. Useful bytes are a signal read once and peaks written once, or the columns of a
table. A TPU's compiler gives no cycles for a sort or for our kernel; totals with such a part are marked ">".
"""

import functools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import rlxjax as rx
from benchmarks._common import options, table, write
from benchmarks.stage_pairs import PAIRS, Pair
from calibrate.suites.functions import timed_functions
from rlxjax.calibration import times_for_target
from rlxjax.jaxpr import FunctionProfile
from rlxjax.targets import TargetDevice, target_device
from rlxjax.welch import fused_peaks, hann_window, one_sided_weights

#: Two counts that differ by a larger factor are a disagreement.
CLOSE_COUNTS = 1.25
#: The jaxpr decides if the smaller time over the larger time is at most this.
CLOSE = 0.95
#: Pairs whose gains differ by a larger factor between two halves of the rounds have two typical times.
MOST_NOISE = 1.15
N_FFTS, K, TABLE_ROWS = (256, 1024), 16, 2**26
KINDS = ("kernels", "bytes", "peak_bytes", "cycles")
Function = tuple[str, Callable[..., Any], tuple[Any, ...], tuple[int, ...] | None]


def figures(programs: list[FunctionProfile]) -> dict[str, int | None]:
    """Return the sums of kernels, bytes and memory of programs; cycles only if all programs have them."""
    cycles = [program.target.cycles if program.target else None for program in programs]
    launches = [
        sum(group.launches for group in program.kernels)
        if program.level == "jaxpr"
        else int(program.io.kernel_launches)
        for program in programs
    ]
    moved = [program.fused_traffic_bytes for program in programs]
    all_cycles = None if None in cycles else sum(own or 0 for own in cycles)
    found = (sum(launches), sum(moved), max(program.peak_bytes for program in programs), all_cycles)
    return dict(zip(KINDS, found, strict=True))


def compiled(target: TargetDevice, fn: Callable[..., Any], args: tuple[Any, ...], trips: Any = None) -> FunctionProfile:
    """Return the profile of a function from the target's compiler."""
    return rx.profile_function(fn, *args, trip_counts=trips, level="compiled", target=target)


def functions(which: str) -> Iterator[Function]:
    """Yield functions, arguments and trip counts: one size of each kind of the suite, and functions of libraries."""
    if which != "foreign":
        known = timed_functions()
        kinds = {name.rpartition(" ")[0].rpartition(" ")[0]: name for name in known}
        yield from ((name, known[name].fn, known[name].abstract(), None) for name in kinds.values())
    if which != "suite":
        from benchmarks.foreign_table import FUNCTIONS

        yield from ((f"{one.name} ({one.library})", *one.call(), one.trip_counts) for one in FUNCTIONS)


def function_row(device: TargetDevice, function: Function) -> dict[str, Any]:
    """Return a function's counts from the compiler and from the jaxpr, or the reason for the compiler's refusal."""
    name, fn, args, trips = function
    try:
        written, made = rx.profile_function(fn, *args, trip_counts=trips), compiled(device, fn, args, trips)
    except ValueError as error:
        return {"name": name, "refusal": str(error)}
    own, jaxpr = figures([made]), figures([written])
    return {"name": name, **own, **{f"jaxpr_{kind}": jaxpr[kind] for kind in KINDS[:3]}}


def turns(device: TargetDevice) -> dict[str, float]:
    """Return the ratio of kernels, and of cycles if given, between a loop of 100 and of 10 iterations."""

    def run(x: jax.Array, length: int) -> jax.Array:
        return lax.fori_loop(0, length, lambda _, c: jnp.sin(c) @ c, x)

    few, many = (
        figures([compiled(device, functools.partial(run, length=length), (shape(2048, 2048),))]) for length in (10, 100)
    )
    return {kind: (many[kind] or 0) / own for kind in ("kernels", "cycles") if (own := few[kind])}


def report_functions(given: Any, device: TargetDevice) -> tuple[dict[str, Any], int]:
    """Compile functions and a loop, and print them."""
    rows = [function_row(device, function) for function in functions(given.which)]
    shown = ("kernels", "jaxpr_kernels", "bytes", "jaxpr_bytes", "peak_bytes", "jaxpr_peak_bytes", "cycles")
    cells = [[row["name"], *(row.get(kind, "") for kind in shown), row.get("refusal", "")] for row in rows]
    print(table(["function", *shown, "refusal"], cells))
    made, loops = [row for row in rows if "refusal" not in row], turns(device)
    ratios = [max(row["bytes"], 1) / max(row["jaxpr_bytes"], 1) for row in made]
    summary = {
        "functions": len(rows),
        "compiled": len(made),
        "kernels_as_the_jaxpr": sum(row["kernels"] == row["jaxpr_kernels"] for row in made),
        f"bytes_within_{CLOSE_COUNTS}_times": sum(1 / CLOSE_COUNTS < ratio < CLOSE_COUNTS for ratio in ratios),
        "100_turns_over_10": loops,
    }
    return {"summary": summary, "rows": rows}, int(any(not 9.0 < ratio < 11.0 for ratio in loops.values()))


def by_jaxpr(device: TargetDevice, apart: dict[str, Any], together: dict[str, Any], n_stages: int) -> str:
    """Return the verdict by the counts of the jaxpr and the data sheet."""
    launches = (n_stages, 1) if device.platform == "tpu" else (apart["kernels"], together["kernels"])
    apart_ns, together_ns = (
        count * device.launch_ns + own["bytes"] / device.bandwidth_bytes_per_ns
        for count, own in zip(launches, (apart, together), strict=True)
    )
    ratio = together_ns / apart_ns
    return "fuse" if ratio <= CLOSE else "keep" if ratio >= 1 / CLOSE else "undecided"


def better(apart: dict[str, Any], together: dict[str, Any]) -> str:
    """Return the form that the compiler's figures prefer: one figure is lower and no figure is higher."""
    known = [kind for kind in ("kernels", "bytes", "cycles") if None not in (apart[kind], together[kind])]
    less, more = (any(sign * (apart[kind] - together[kind]) > 0 for kind in known) for sign in (1, -1))
    return "fuse" if less and not more else "keep" if more and not less else "neither"


def pair_row(device: TargetDevice, pair: Pair) -> dict[str, Any]:
    """Return both verdicts of a pair with their figures, or the reason for the target's refusal."""
    programs = [(pair.chain(pair.stages), pair.flat_args()), *zip(pair.stages, pair.stage_args(), strict=True)]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        written = [rx.profile_function(fn, *args) for fn, args in programs]
        try:
            made = [compiled(device, fn, args) for fn, args in programs]
        except ValueError as error:
            return {"name": pair.name, "refusal": str(error)}
    said = times_for_target(made, device).decision([0], range(1, len(made)))
    apart, together = figures(made[1:]), figures(made[:1])
    return {
        "name": pair.name,
        "by_jaxpr": by_jaxpr(device, figures(written[1:]), figures(written[:1]), len(pair.stages)),
        "compiled": said.verdict(),
        "probability": float(said.probability),
        "better_by_the_compiler": better(apart, together),
        "apart": apart,
        "together": together,
    }


def right(rows: list[dict[str, Any]], truth: dict[str, Any]) -> dict[str, Any]:
    """Return how often each decided verdict chose the form with the faster measured time."""
    found: dict[str, Any] = {}
    for verdict in ("by_jaxpr", "compiled"):
        known = [
            (row[verdict], own) for row in rows if (own := truth.get(row["name"], {})).get("noise", 9) <= MOST_NOISE
        ]
        decided = [(said, own["together_ns"] < own["apart_ns"]) for said, own in known if said != "undecided"]
        hits = sum((said == "fuse") == pays for said, pays in decided)
        found[verdict] = {"pairs": len(known), "decided": len(decided), "right": hits}
    return found


def report_pairs(given: Any, device: TargetDevice) -> tuple[dict[str, Any], int]:
    """Compile pairs of stages, and print those whose verdicts differ."""
    rows = [pair_row(device, pair) for pair in PAIRS if pair.half == given.half]
    made = [row for row in rows if "refusal" not in row]
    differ = [row for row in made if row["by_jaxpr"] != row["compiled"]]
    verdicts = ("by_jaxpr", "compiled", "better_by_the_compiler")
    kinds = ("kernels", "bytes", "cycles")
    cells = [
        [row["name"], *(row[name] for name in verdicts), *(f"{row['apart'][k]} → {row['together'][k]}" for k in kinds)]
        for row in differ
    ]
    print(table(["pair", *verdicts, *kinds], cells))
    told = [row for row in differ if row["better_by_the_compiler"] != "neither"]
    summary: dict[str, Any] = {
        "pairs": len(rows),
        "refused": {row["name"]: row["refusal"] for row in rows if "refusal" in row},
        **{name: dict(Counter(row[name] for row in made)) for name in verdicts[:2]},
        "differ": len(differ),
        "opposed": sum({row["by_jaxpr"], row["compiled"]} == {"fuse", "keep"} for row in differ),
        "differing_that_the_compilers_figures_tell": len(told),
        **{f"{n}_right_of_these": sum(row[n] == row[verdicts[2]] for row in told) for n in verdicts[:2]},
    }
    if given.truth:
        summary["against_what_was_timed"] = right(made, json.loads(given.truth.read_text(encoding="utf-8"))["pairs"])
    return {"summary": summary, "rows": rows}, 0


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    """Return the type of a float32 array."""
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def naive_peaks(signal: jax.Array, params: rx.WelchPeakParams) -> Any:
    """Return peaks by the naive form: windowed segments, `rfft`, squares, a mean, `top_k`."""
    starts = range(0, params.n_segments * params.hop, params.hop)
    segments = jnp.stack([signal[:, start : start + params.n_fft] for start in starts], 1) * hann_window(params.n_fft)
    spectrum = jnp.fft.rfft(segments)
    power = jnp.mean(spectrum.real**2 + spectrum.imag**2, 1)
    return lax.top_k(power * one_sided_weights(params) * params.n_segments, params.k)


def own_programs(platform: str, batches: list[int]) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], int]]:
    """Yield programs of this package with their arguments and useful bytes."""
    for n_fft in N_FFTS:
        params = rx.WelchPeakParams.fast(n_fft, K)
        forms: dict[str, Callable[..., Any]] = {
            "naive": functools.partial(naive_peaks, params=params),
            "fused_top_k": functools.partial(fused_peaks, params=params, selection="top_k", platform=platform),
            "fused": functools.partial(fused_peaks, params=params, platform=platform),
        }
        for batch in batches:
            useful = 4 * batch * (params.frame_len + 2 * params.k)
            for name, form in forms.items():
                yield f"Welch peaks, {name}, {batch} x {n_fft}", form, (shape(batch, params.frame_len),), useful
    gate, column = rx.io_fusion_gate_for_target("cuda"), shape(TABLE_ROWS)
    profiles: Any = [rx.GraphIoProfile(*[column] * 4) for _ in range(2)]
    evaluated = functools.partial(gate.evaluate, temperature_ns=1e5)
    results = jax.tree.leaves(jax.eval_shape(evaluated, *profiles))
    written = sum(leaf.size * leaf.dtype.itemsize for leaf in results)
    yield "gate", lambda *pair: evaluated(*pair), tuple(profiles), 4 * TABLE_ROWS * 8 + written
    gates = jax.tree.map(lambda leaf: shape(), gate)
    benefit = jax.tree.map(lambda leaf: shape(*np.shape(leaf)), jax.eval_shape(rx.fusion_benefit, *profiles))

    def loss(gate: rx.IoFusionGate, benefit: Any) -> jax.Array:
        return jnp.mean(jnp.square(gate.score_ns(benefit)))

    columns = sum(4 * leaf.size for leaf in jax.tree.leaves(benefit))
    yield "loss of a gate with its gradient", jax.value_and_grad(loss), (gates, benefit), columns


def report_programs(given: Any, device: TargetDevice) -> tuple[dict[str, Any], int]:
    """Compile this package's programs, and print their bytes over the useful bytes."""
    rows, cells = [], []
    for name, fn, args, useful in own_programs({"tpu": "tpu", "cuda": "gpu"}[device.platform], given.rows):
        try:
            made = compiled(device, fn, args)
        except ValueError as error:
            rows.append({"program": name, "refusal": str(error)})
            cells.append([name, "", "", str(error)])
            continue
        assert made.target is not None
        own, is_least = figures([made]), "cycles of some instructions" in made.target.left_out
        rows.append({"program": name, "useful": useful, **own, "cycles_are_least": is_least})
        ratio, cycles = (own["bytes"] or 0) / useful, f"{'>' * is_least}{own['cycles'] or '-'}"
        cells.append([name, own["kernels"], f"{ratio:.2f}", cycles])
    print(table(["program", "kernels", "bytes / useful", "cycles"], cells))
    return {"summary": {"programs": len(rows)}, "rows": rows}, 0


def main() -> int:
    """Compile, print and write."""
    parser = options(__doc__)
    reports = {"functions": report_functions, "pairs": report_pairs, "programs": report_programs}
    parser.add_argument("what", choices=reports)
    parser.add_argument("--target", required=True)
    parser.add_argument("--which", choices=("suite", "foreign", "both"), default="both")
    parser.add_argument("--half", choices=("tune", "judge"), default="judge")
    parser.add_argument("--truth", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[8192, 131072])
    given = parser.parse_args()
    device = target_device(given.target)
    found, status = reports[given.what](given, device)
    print(json.dumps(found["summary"], indent=1))
    write(given.json, {"target": device.name, **found})
    return status


if __name__ == "__main__":
    sys.exit(main())
