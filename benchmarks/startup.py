"""Time the first call of some public functions.

    python -m benchmarks.startup [--repeats 3] [--json FILE]

Before a first call, JAX forgets all compiled programs. XLA's part of the call is its compilation, without tracing. The
exit status is 1 if a call with new values compiled something.
"""

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import rlxjax as rx
from benchmarks._common import ROOT, options, table, write
from rlxjax.models import FFT

#: The event of XLA's compilation; the other events are tracing and lowering.
COMPILE = "/jax/core/compile/backend_compile_duration"

#: Compilation events with their seconds.
compilations: list[tuple[str, float]] = []


def calls() -> dict[str, Callable[[int], Any]]:
    """Return calls by name; the turn, 0 or 1, changes their values but not their shapes."""
    gate, row = rx.io_fusion_gate_for_target("cuda"), rx.backend_coefficients("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rx.calibration.MachineMismatchWarning)
        calibration = rx.load_calibration(ROOT / "notebooks" / "data" / "calibration-cpu.json")

    def sizes(turn: int) -> tuple[int, int, int]:
        return (512, 1024)[turn], (256, 512)[turn], (16, 8)[turn]

    def profile(turn: int) -> rx.GraphIoProfile:
        return rx.GraphIoProfile(3 + turn, 1, 4096 * (1 + turn), 10**6)

    def timings(turn: int, factor: float = 1.0) -> rx.Timings:
        batch, n_fft = (grid.ravel() for grid in np.meshgrid(2.0 ** np.arange(8), [256.0, 1024.0, 4096.0]))
        time_ns = factor * (4e4 + 10 * batch * n_fft) * (1 + turn)
        return rx.Timings.checked(FFT, variant="fft", batch=batch, n_fft=n_fft, time_ns=time_ns)

    def candidates(turn: int) -> rx.fit.Estimate:
        batch = np.array([[1.0], [16.0], [256.0], [4096.0]]) * (1 + turn)
        return rx.fit.estimate(
            rx.fit.prior_posterior(FFT), rx.fit.Runs.checked(FFT, "fft", batch=batch, n_fft=[[256, 4096]])
        )

    def peaks(turn: int, path: str) -> np.ndarray | jax.Array:
        params = rx.WelchPeakParams.fast(256, 16)
        return rx.welch_peaks(np.full((64, params.frame_len), 1.0 + turn, np.float32), params, path)

    return {
        "io_cost_ns": lambda turn: rx.io_cost_ns(profile(turn), row),
        "IoFusionGate.score_ns": lambda turn: gate.score_ns(
            rx.fusion_benefit(rx.GraphIoProfile(9 + turn, 4, 10**6, 10**7), profile(turn))
        ),
        "estimate_welch_peaks_costs": lambda turn: rx.estimate_welch_peaks_costs("cuda", *sizes(turn)),
        "evaluate_welch_peaks": lambda turn: rx.welch.evaluate_welch_peaks("cuda", *sizes(turn), temperature_ns=1e4),
        "pick_welch_peaks_strategy": lambda turn: rx.pick_welch_peaks_strategy("cuda", *sizes(turn)),
        "rank_devices": lambda turn: rx.rank_devices(profile(turn)),
        "fit_posterior": lambda turn: rx.fit_posterior(timings(turn)),
        "fit_posteriors": lambda turn: rx.fit.fit_posteriors(
            rx.fit.stack_timings([timings(turn), timings(turn, 3.0)])[0]
        ),
        "next_measurements": lambda turn: rx.fit.next_measurements(candidates(turn), 2),
        "Calibration.predict_ns": lambda turn: calibration.predict_ns("fused", *sizes(turn)),
        "welch_peaks fused": lambda turn: peaks(turn, "fused"),
        "welch_peaks block": lambda turn: peaks(turn, "block"),
    }


def call_times(call: Callable[[int], Any], repeats: int) -> dict[str, float]:
    """Return the least seconds of a first call, of XLA's part and of a call with new values, and its compilations."""
    found: dict[str, list[float]] = {"first_s": [], "compile_s": [], "again_s": [], "compiled_again": []}
    for _ in range(repeats):
        jax.clear_caches()
        for turn, name in enumerate(("first_s", "again_s")):
            compilations.clear()
            start = time.perf_counter()
            jax.block_until_ready(call(turn))
            found[name].append(time.perf_counter() - start)
            if not turn:
                found["compile_s"].append(sum(took_s for event, took_s in compilations if event == COMPILE))
        found["compiled_again"].append(len(compilations))
    return {name: min(values) for name, values in found.items()}


def main() -> int:
    """Measure and print the tables."""
    given = options(__doc__, repeats=3).parse_args()
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, took_s, **_: (
            compilations.append((event, took_s)) if event.startswith("/jax/core/compile/") else None
        )
    )
    rows = {name: call_times(call, given.repeats) for name, call in calls().items()}
    figures = [
        (name, *(f"{1e3 * row[key]:,.1f}" for key in ("first_s", "compile_s")), f"{1e3 * row['again_s']:.2f}")
        for name, row in rows.items()
    ]
    print(table(["call", "first, ms", "of it in XLA, ms", "again with new values, ms"], figures))
    write(given.json, {"calls": rows})
    return any(row["compiled_again"] for row in rows.values())


if __name__ == "__main__":
    sys.exit(main())
