"""Comparisons on a device: Welch peaks and peers, the gate over tables, stages apart and together."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rlxjax as rx
from benchmarks import evaluation as ev
from benchmarks._common import visits
from benchmarks.stage_pairs import PAIRS, Pair, Timing, arrays
from benchmarks.welch_peers import of_workload
from rlxjax.clock import QUARTILE
from rlxjax.fit import Cell, Suite
from rlxjax.models import FUNCTIONS
from rlxjax.welch import fused_peaks

from ._ceilings import ceiling_gbps
from ._kept import Run, clocks, piped_ns, reason, say

#: The contenders, and n_fft and batches of the workloads.
NAMES = ["fused", "auto", "naive", "torch"]
WORKLOADS = ((256, 131_072), (1024, 131_072), (256, 8192), (1024, 1024), (256, 64), (256, 1))
#: Workloads and rounds of the Welch kernel and of the FFT form.
KERNEL_WORKLOADS = [(n_fft, batch) for n_fft in (256, 512, 1024) for batch in (1, 64, 1024, 8192, 131_072)]
KERNEL_ROUNDS, SELECTIONS = 30, ("kernel", "top_k")
#: Rows of tables, and rounds of a table or loss.
TABLE_ROWS, TABLE_ROUNDS = 64_000_000, 9
#: Rounds of the pairs between two writes of the results.
KEPT_ROUNDS = 8
FORMS = ("apart", "together")


def peaks(run: Run, until_s: float) -> None:
    """Time Welch peaks of rows on the device, and the installed peers."""
    jax.config.update("jax_enable_x64", False)
    cells, workloads = [], ((64, 32),) if run.is_small else WORKLOADS
    for place, (n_fft, batch) in enumerate(workloads):
        left_s = until_s - time.perf_counter()
        if left_s < 0:
            say("peaks: no time for", n_fft, batch)
            break
        cells.append(of_workload(n_fft, batch, NAMES, left_s / (len(workloads) - place)))
        run.keep("welch-peaks.json", cells=cells, clocks=clocks())
        best_us = {name: round(min(own) / 1e3) for name, own in cells[-1]["times_ns"].items()}
        say(f"{n_fft}x{batch}, us:", best_us, cells[-1]["notes"])


def kernel(run: Run, until_s: float) -> None:
    """Time Welch peaks as one kernel and in the FFT form, on rows of the device, in the same rounds."""
    jax.config.update("jax_enable_x64", False)
    platform, found = jax.default_backend(), []
    for n_fft, batch in ((256, 32),) if run.is_small else KERNEL_WORKLOADS:
        if time.perf_counter() > until_s:
            say("kernel: no time for", n_fft, batch)
            break
        params = rx.WelchPeakParams.fast(n_fft, 16)
        rows = jax.random.normal(jax.random.key(0), (batch, params.frame_len), jnp.float32)
        forms = {
            form: jax.jit(functools.partial(fused_peaks, params=params, selection=form, platform=platform))
            for form in SELECTIONS
        }
        row: dict[str, Any] = {"n_fft": n_fft, "batch": batch}
        try:
            peaks = {form: np.asarray(program(rows)) for form, program in forms.items()}
            same = [peaks[form][..., 0] == peaks["top_k"][..., 0] for form in SELECTIONS]
            row["same_bins"] = float(np.mean(same[0]))
            row["largest_error"] = float(np.max(np.abs(peaks["kernel"] / peaks["top_k"] - 1)[same[0], 1]))
            calls = {form: functools.partial(program, rows) for form, program in forms.items()}
            times = visits(calls, KERNEL_ROUNDS, least=4)
            row |= {f"{form}_ns": float(np.quantile(own, QUARTILE)) for form, own in times.items()}
        except Exception as error:  # noqa: BLE001 - whatever a device raises
            row["failed"] = reason(error)
        found.append(row)
        run.keep("welch-kernel.json", workloads=found, clocks=clocks())
        say("kernel:", row)


def gates(run: Run, until_s: float) -> None:
    """Time tables of the gate and of the costs against a copy of the same bytes, and gradients against values."""
    jax.config.update("jax_enable_x64", False)
    ceiling, rows, found = ceiling_gbps(run), TABLE_ROWS // 1000 if run.is_small else TABLE_ROWS, []
    columns = jax.block_until_ready(ev.columns_of(rows))

    def timed(kind: str, name: str, runs: dict[str, Callable], arguments: tuple, base: str, n_bytes: int = 0) -> None:
        if time.perf_counter() > until_s:
            say("gates: no time for", name)
            return
        try:
            ms = ev.least_ms(runs, arguments, TABLE_ROUNDS)
            row: dict[str, Any] = {"rows": rows, **ev.measured(kind, name, ms, base)}
        except Exception as error:  # noqa: BLE001 - whatever a device raises
            row = {kind: name, "failed": reason(error)}
        else:
            if n_bytes:
                row |= {"bytes": n_bytes, "share_of_ceiling": n_bytes / (1e6 * ms["compiled"] * ceiling)}
        for form, program in runs.items():
            run.program(f"{name}, {form}", program, *arguments)
        found.append(row)
        run.keep("gate.json", ceiling_GBps=ceiling, figures=found)

    for name, (table, inputs) in ev.tables(columns).items():
        compiled = jax.jit(table)
        outputs = jax.tree.leaves(compiled(*inputs))
        n_bytes = sum(leaf.nbytes for leaf in (*jax.tree.leaves(inputs), *outputs))
        copy = ev.copy_of(jax.tree.leaves(inputs), outputs)
        del outputs
        timed("table", name, {"copy": copy, "compiled": compiled}, inputs, "copy", n_bytes)
    for name, (loss, arguments) in ev.losses(columns).items():
        runs = {"value": jax.jit(loss), "gradient": jax.jit(jax.value_and_grad(loss))}
        timed("loss", name, runs, arguments, "value")
    run.write_programs()


class PairForms(Suite):
    """Pairs of stages, each apart and together, as cells whose programs are jitted functions with their arguments."""

    model = FUNCTIONS

    def __init__(self, pairs: Sequence[Pair]):
        self.pairs = {pair.name: pair for pair in pairs}
        self.stages = {pair.name: [jax.jit(stage) for stage in pair.stages] for pair in pairs}

    def cells(self) -> list[Cell]:
        """Return two cells per pair: the work is the pair's name, the variant the form."""
        return [Cell(f"{name}, {form}", form, {}, name) for name in self.pairs for form in FORMS]

    def program(self, cell: Cell) -> Callable[[], Any]:
        """Return a function that runs a form on arrays of the device."""
        pair = self.pairs[cell.work]
        form = pair.together() if cell.variant == "together" else pair.chain(self.stages[cell.work])
        return functools.partial(form, *arrays(pair.flat_args()))


def pairs(run: Run, until_s: float) -> None:
    """Time the judging pairs by the job's protocol, then piped; write a file of `benchmarks.stage_pairs`."""
    jax.config.update("jax_enable_x64", False)
    suite = PairForms([pair for pair in PAIRS if pair.half == "judge"][:: 12 if run.is_small else 1])
    cells, begun_s = suite.cells(), time.perf_counter()
    ready = run.made_ready(suite, cells, begun_s + 0.5 * (until_s - begun_s))
    names = [name for name in suite.pairs if all(f"{name}, {form}" in ready.programs for form in FORMS)]
    calls = {(name, form): ready.programs[f"{name}, {form}"] for name in names for form in FORMS}
    for name in names:
        for place, (stage, shapes) in enumerate(zip(suite.stages[name], suite.pairs[name].stage_args(), strict=True)):
            run.program(f"{name}, stage {place}", stage, *shapes)
    run.write_programs()
    piped_s = until_s - 0.15 * (until_s - begun_s)
    times, n_rounds = {key: np.zeros(0) for key in calls}, 0
    while calls and (n_rounds < KEPT_ROUNDS or time.perf_counter() < piped_s):
        part = visits(calls, KEPT_ROUNDS, least=4, until_s=piped_s, seed=n_rounds)
        times = {key: np.append(own, part[key].round()) for key, own in times.items()}
        n_rounds = len(times[names[0], "apart"])
        found = {name: Timing.of_rounds(*(times[name, form] for form in FORMS))._asdict() for name in names}
        rounds = {name: {form: times[name, form].tolist() for form in FORMS} for name in names}
        run.keep("pairs.json", pairs=found, rounds_ns=rounds)
        if time.perf_counter() > piped_s:
            break
    say("pairs:", n_rounds, "rounds of", len(names))
    piped: dict[str, dict[str, float]] = {}
    for (name, form), call in calls.items():
        if time.perf_counter() > until_s:
            break
        piped.setdefault(name, {})[form] = piped_ns(call, times[name, form].min())
    run.keep("pairs.json", piped_ns=piped, refused=ready.refused, clocks=clocks())
