"""Sample the suites of the calibrate job, which `rlxjax refit` fits elsewhere, and time larger functions."""

import time

import jax

from calibrate.measure import by_work, memory_limit_bytes
from calibrate.suites.functions import KINDS, FunctionsSuite
from calibrate.suites.welch import WelchSuite

from ._kept import Run, both_ns, piped_ns, reason, say, seeded

#: Sizes of some kinds that show rates, as `Kind.sizes`; no calibration is fitted to them.
LARGE = {
    "add multiply": "16777216 67108864",
    "tanh": "67108864:bfloat16",
    "polynomial": "67108864",
    "add transposed": "16384x16384",
    "sum of rows": "16384x16384",
    "sum of columns": "16384x16384",
    "cumulative sum": "4096x8192",
    "matmul": "2048x2048x2048 4096x4096x4096 8192x8192x8192 4096x4096x4096:bfloat16 8192x8192x8192:bfloat16 "
    "128x65536x128 2048x2048x2048:float64",
    "matvec": "16384x16384",
    "batched": "1024x128",
    "convolve NHWC": "64x112x64x64x3",
    "gru": "256x256x512",
    "rfft": "65536x1024 64x1048576",
    "sort": "1x16777216 65536x256",
    "top 8": "65536x129",
    "take rows": "1048576x64x1048576",
    "scatter add": "4096x64x1048576*",
    "softmax": "8192x8192",
    "layer norm": "16384x4096",
    "attention": "8x2048x16x64:bfloat16",
    "mlp": "4096x2048",
    "mlp step": "4096x1024",
    "cholesky": "2048",
    "normal": "67108864",
    "adam": "4096x2",
}
#: The number of drawn works of the Welch suite besides `shown`, and the largest length for `maxima`.
WELCH_WORKS, MAXIMA_N_FFT = 36, 256
#: The share of a section's time after which calls are no longer piped.
PIPED_SHARE = 0.12


def functions(run: Run, until_s: float) -> None:
    """Take samples of all functions of the suite, then time each function with piped calls."""
    jax.config.update("jax_enable_x64", True)  # for all threads, as the job does
    suite, begun_s = FunctionsSuite(), time.perf_counter()
    cells = [cell for cell in suite.cells() if cell.n_bytes <= memory_limit_bytes()][:: 12 if run.is_small else 1]
    order = [cells[place] for place in seeded().permutation(len(cells))]
    ready = run.sampled(suite, "functions", order, until_s - PIPED_SHARE * (until_s - begun_s))
    run.keep("functions.json", ready_ns=ready.times_ns, refused=ready.refused)
    found = {}
    for name, call in ready.programs.items():
        if time.perf_counter() > until_s:
            break
        found[name] = piped_ns(call, ready.times_ns[name])
    run.keep("functions.json", piped_ns=found)


def larger(run: Run, until_s: float) -> None:
    """Time functions at large sizes, alone and piped; in a trial at the first size of each."""
    jax.config.update("jax_enable_x64", True)
    sizes = {kind.name: kind.sizes.split()[0] for kind in KINDS if kind.name in LARGE} if run.is_small else LARGE
    suite = FunctionsSuite([kind._replace(sizes=sizes[kind.name]) for kind in KINDS if kind.name in sizes])
    cells = [cell for cell in suite.cells() if cell.n_bytes <= memory_limit_bytes()]
    ready = run.made_ready(suite, cells, 0.5 * (time.perf_counter() + until_s))
    found = {}
    for name, call in ready.programs.items():
        if time.perf_counter() > until_s:
            say("larger: no time for", name)
            break
        try:
            found[name] = both_ns(call)
        except Exception as error:  # noqa: BLE001 - whatever a device raises
            found[name] = {"failed": reason(error)}
        run.keep("larger.json", times=found, refused=ready.refused)


def welch(run: Run, until_s: float) -> None:
    """Take samples of Welch peaks for a part of the grid, from a NumPy signal to NumPy peaks."""
    jax.config.update("jax_enable_x64", True)
    suite = WelchSuite()
    most = 2**14 if run.is_small else 2**30
    works = by_work([cell for cell in suite.cells() if cell.inputs["batch"] * cell.inputs["n_fft"] <= most])
    names = list(works)
    drawn = [names[place] for place in seeded().permutation(len(names))[: 4 if run.is_small else WELCH_WORKS]]
    chosen = dict.fromkeys([name for name in suite.shown if name in works] + drawn)
    cells = [cell for name in chosen for cell in works[name]]
    cells = [cell for cell in cells if cell.group != "fused_maxima" or cell.inputs["n_fft"] == MAXIMA_N_FFT]
    ready = run.sampled(suite, "welch", cells, until_s)
    run.keep("welch.json", ready_ns=ready.times_ns, refused=ready.refused)
