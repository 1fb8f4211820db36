"""This package's own programs compiled for accelerators that are not there: kernels, bytes over useful ones, cycles.

    python -m benchmarks.accelerator_programs --target tpu-v5e [--target h100] [--rows 8192 131072] [--json FILE]

`pip install 'rlxjax[tpu-compiler]'` or `'rlxjax[cuda-compiler]'` installs a compiler. Useful bytes are those of a
signal read once and of peaks written once, or of a table's columns. Bytes are those that kernels take from a device's
memory and give to it, not what stays in a TPU's vector memory. Cycles are the TPU compiler's; it gives none of a sort,
so that totals with one are marked ">". Of a kernel of ours it gives none either: its cycles are the instructions that
the compiler schedules, each as often as its loop turns.
"""

import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import rlxjax as rx
from benchmarks._common import options, table, write
from rlxjax.jaxpr._xla import CompiledProgram
from rlxjax.learned import LearnedFft, learned_program
from rlxjax.targets import compile_for, target_device
from rlxjax.welch import fused_peaks, hann_window, one_sided_weights
from rlxjax.welch._kernels import kernel_rows

HEADINGS = ["target", "program", "rows", "n_fft", "kernels", "bytes / useful", "cycles"]
N_FFTS, K, TABLE_ROWS = (256, 1024), 16, 2**26
PLATFORMS = {"tpu": "tpu", "cuda": "gpu"}
Program = tuple[str, int, int | None, Callable[..., Any], tuple[Any, ...], int]


def naive_peaks(signal: jax.Array, params: rx.WelchPeakParams) -> Any:
    """Return peaks as they are written at first: windowed segments, `rfft`, squares, a mean, `top_k`."""
    starts = range(0, params.n_segments * params.hop, params.hop)
    segments = jnp.stack([signal[:, start : start + params.n_fft] for start in starts], 1) * hann_window(params.n_fft)
    spectrum = jnp.fft.rfft(segments)
    power = jnp.mean(spectrum.real**2 + spectrum.imag**2, 1)
    return lax.top_k(power * one_sided_weights(params) * params.n_segments, params.k)


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    """Return the type of a float32 array."""
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def welch_programs(platform: str, batches: list[int]) -> Iterator[Program]:
    """Yield forms of Welch peaks: what is written at first, the program of several kernels, and what runs."""
    for n_fft in N_FFTS:
        params = rx.WelchPeakParams.fast(n_fft, K)
        several = functools.partial(fused_peaks, params=params, selection="top_k", platform=platform)
        forms: dict[str, Callable[..., Any]] = {
            "Welch peaks, naive": functools.partial(naive_peaks, params=params),
            "Welch peaks, fused_top_k": several,
            "Welch peaks, fused": functools.partial(fused_peaks, params=params, platform=platform),
        }
        for batch in batches:
            useful = 4 * batch * (params.frame_len + 2 * params.k)
            for name, form in forms.items():
                yield name, batch, n_fft, form, (shape(batch, params.frame_len),), useful


def other_programs(platform: str) -> Iterator[Program]:
    """Yield the gate over a table, its gradient, and peaks of a learned FFT."""
    gate = rx.io_fusion_gate_for_target("cuda")
    column: Any = shape(TABLE_ROWS)
    profiles = [rx.GraphIoProfile(*[column] * 4) for _ in range(2)]
    evaluated = functools.partial(gate.evaluate, temperature_ns=1e5)
    results = jax.tree.leaves(jax.eval_shape(evaluated, *profiles))
    read = 4 * TABLE_ROWS * 8
    written = sum(leaf.size * leaf.dtype.itemsize for leaf in results)
    yield "gate", TABLE_ROWS, None, lambda *pair: evaluated(*pair), tuple(profiles), read + written
    gates = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((), jnp.float32), gate)
    benefit = jax.tree.map(lambda leaf: shape(*np.shape(leaf)), jax.eval_shape(rx.fusion_benefit, *profiles))
    columns = sum(4 * leaf.size for leaf in jax.tree.leaves(benefit))

    def loss(gate: rx.IoFusionGate, benefit: Any) -> jax.Array:
        return jnp.mean(jnp.square(gate.score_ns(benefit)))

    yield "loss of a gate", TABLE_ROWS, None, loss, (gates, benefit), columns
    yield "its value and gradient", TABLE_ROWS, None, jax.value_and_grad(loss), (gates, benefit), columns
    params = rx.WelchPeakParams.fast(256, K)
    program = learned_program(LearnedFft.exact(params.n_fft), params)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), np.asarray(leaf).dtype), program)

    def learned(signal: jax.Array, program: Any) -> jax.Array:
        return program.peaks(signal, params, "top_k", platform)

    useful = 4 * 8192 * (params.frame_len + 2 * params.k)
    yield "learned FFT, exact", 8192, 256, learned, (shape(8192, params.frame_len), shapes), useful


def scheduled_cycles(target: str, n_fft: int, batch: int) -> int:
    """Return the instructions that a TPU's compiler schedules for the kernel of Welch peaks, loops by their turns."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        command = [sys.executable, "-m", "benchmarks.accelerator_programs", "--target", target]
        command += ["--kernel", str(n_fft), "--rows", str(batch)]
        environment = os.environ | {"LIBTPU_INIT_ARGS": flags}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        listings = [path.read_text() for path in Path(folder).glob("*-final_bundles.txt")]
    line = re.compile(r"^\s*0x[0-9a-f]+\s*(?:[A-Z]{2})?:\s*(>*) *\{", re.MULTILINE)
    depths = [[len(found) for found in line.findall(listing)] for listing in listings]
    (nested,) = [depth for depth in depths if 2 in depth]  # steps over rows, and in each the turns of the selection
    turns = (1, -(-batch // kernel_rows(rx.WelchPeakParams.fast(n_fft, K), "tpu")))
    return sum(turns[min(depth, 1)] * (K if depth == 2 else 1) for depth in nested)


def row_of(target: str, program: Program) -> dict[str, Any]:
    """Return what the compiler made of a program."""
    name, batch, n_fft, fn, args, useful = program
    cell = {"target": target, "program": name, "rows": batch, "n_fft": n_fft, "useful": useful}
    try:
        made = CompiledProgram(compile_for(fn, *args, target=target).text, {})
    except ValueError as error:
        return cell | {"refusal": str(error)}
    counts, is_tpu = made.totals.sums(), target_device(target).platform == "tpu"
    cycles = made.totals.cycles if is_tpu else None
    if cycles is not None and n_fft and name.endswith("fused"):
        cycles += scheduled_cycles(target, n_fft, batch)
    is_least = "sort" in made.totals.families
    return cell | {"kernels": counts.launches, "bytes": counts.bytes, "cycles": cycles, "cycles_are_least": is_least}


def cells_of(row: dict[str, Any]) -> list[str]:
    """Return a row as text."""
    head = [row["target"], row["program"], f"{row['rows']:,}", str(row["n_fft"] or "")]
    if "refusal" in row:
        return [*head, "", "", row["refusal"]]
    cycles = "" if row["cycles"] is None else f"{'>' * row['cycles_are_least']}{row['cycles']:,}"
    return [*head, str(row["kernels"]), f"{row['bytes'] / row['useful']:.2f}", cycles]


def main() -> int:
    """Compile, print and write."""
    parser = options(__doc__)
    parser.add_argument("--target", action="append", required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[8192, 131072])
    parser.add_argument("--kernel", type=int, metavar="N_FFT", help="only compile the kernel of a size, for a TPU")
    given = parser.parse_args()
    if given.kernel:
        params = rx.WelchPeakParams.fast(given.kernel, K)
        for batch in given.rows:
            form = functools.partial(fused_peaks, params=params, platform="tpu")
            compile_for(form, shape(batch, params.frame_len), target=given.target[0], use_cache=False)
        return 0
    found = []
    for target in given.target:
        platform = PLATFORMS[target_device(target).platform]
        for program in [*welch_programs(platform, given.rows), *other_programs(platform)]:
            found.append(row_of(target, program))
            print(*cells_of(found[-1]), sep=" | ", file=sys.stderr)
    print(table(HEADINGS, map(cells_of, found)))
    write(given.json, {"rows": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
