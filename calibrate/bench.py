"""The benchmark: ours, the naive form and every peer in one process, a workload at a time."""

import datetime
import time
from collections.abc import Callable, Sequence
from pathlib import Path as FilePath
from typing import NamedTuple

import jax
import numpy as np

from rlxjax import Calibration, WelchPeakParams
from rlxjax.calibration import current_fingerprint, file_to_write, write_json_file
from rlxjax.welch import FAST_SEGMENTS

from .bench_file import BENCH_SCHEMA_VERSION, BenchFile, CellResult, growth, mean_ratios
from .bench_rounds import PROTOCOL, time_contenders
from .clock import Deadline
from .interrupts import heeded
from .peers import contenders
from .plan import memory_limit_bytes
from .workloads import tones_in_noise

N_FFTS, BATCHES, K = (64, 256, 1024, 4096), (1, 32, 256, 1024, 8192, 65536, 131072), 16
#: Of batch * n_fft, where the batch is not asked for.
MAX_SAMPLES = 2**27
#: Where the number of peaks varies, if nothing is asked for.
OTHER_KS, OTHER_KS_BATCH, OTHER_KS_N_FFT = (1, 64), 1024, 256
#: A benchmark holds one cell at a time, and so may take more of the memory than a run of the calibrate job.
MEMORY_FACTOR = 2


class BenchCell(NamedTuple):
    """One workload."""

    n_fft: int
    batch: int
    k: int
    n_segments: int = FAST_SEGMENTS

    @property
    def params(self) -> WelchPeakParams:
        """The parameters of the run."""
        return WelchPeakParams(self.n_fft, self.n_segments, self.k)

    @property
    def bytes_moved(self) -> int:
        """Bytes of the samples and of the peaks."""
        return 4 * self.batch * (self.params.frame_len + 2 * self.k)

    @property
    def working_bytes(self) -> int:
        """Bytes that a contender holds at once: segments, their windowed copy and spectra, and powers."""
        return self.bytes_moved + 16 * self.batch * self.n_segments * self.n_fft

    def __str__(self) -> str:
        return f"n_fft {self.n_fft}, batch {self.batch}, k {self.k}"


def bench_cells(
    n_ffts: Sequence[int] = (), batches: Sequence[int] = (), ks: Sequence[int] = (), n_segments: int = FAST_SEGMENTS
) -> list[BenchCell]:
    """Return the product of what is asked for, with sensible values of what is not.

    Raises:
        ValueError: a segment length, batch, number of peaks or of segments that no run can have.
    """
    if wrong := [batch for batch in batches if batch < 1]:
        raise ValueError(f"--batch: expected at least 1, got {wrong[0]}")
    cells = [
        BenchCell(n_fft, batch, k, n_segments)
        for n_fft in sorted(set(n_ffts or N_FFTS))
        for k in sorted(set(ks or (K,)))
        for batch in sorted(set(batches or BATCHES))
        if batches or batch * n_fft <= MAX_SAMPLES
    ]
    if not (n_ffts or batches or ks):
        cells += [BenchCell(OTHER_KS_N_FFT, OTHER_KS_BATCH, k, n_segments) for k in OTHER_KS]
    for cell in cells:
        _ = cell.params  # refuses values out of range
    return cells


def run_bench(
    cells: Sequence[BenchCell],
    *,
    budget_s: float,
    command: str,
    names: Sequence[str] = (),
    out: FilePath | None = None,
    calibration: Calibration | None = None,
    advance: Callable[[], None] = lambda: None,
    seed: int | None = None,
) -> BenchFile:
    """Measure, and write the file after every cell if one is wanted; Ctrl-C keeps what was measured.

    Everything runs under JAX's default configuration, float32, whatever the process has.

    Args:
        cells: the workloads; those of one row length come best together, as they share their samples.
        budget_s: seconds of a cell; each contender is timed three times even so.
        command: how the benchmark was called, for the file.
        names: the contenders; all unless given.
        out: the JSON file.
        calibration: what `auto` decides by.
        advance: called at each cell.
        seed: of the samples and of the order of measuring; from the system unless given.

    Raises:
        ValueError: a budget that is not positive, an unknown contender, none that can run, or an `out`
            that is no file.
    """
    if not 0 < budget_s < float("inf"):
        raise ValueError(f"--budget: expected a positive number of seconds, got {budget_s:g}")
    if out is not None:
        file_to_write(out)
    rng, done, deadline = np.random.default_rng(seed), [], Deadline(0.0)
    with jax.enable_x64(False):
        taking_part, skipped = contenders(calibration, names)
        if not taking_part:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
            raise ValueError(f"--contender: none can run here: {reasons}")
        content = BenchFile(
            bench_schema_version=BENCH_SCHEMA_VERSION,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            command=command,
            protocol=PROTOCOL,
            fingerprint=current_fingerprint(),
            versions={contender.name: contender.version() for contender in taking_part},
            ours=[contender.name for contender in taking_part if contender.is_ours],
            skipped=skipped,
        )
        signal = np.zeros((0, 0), np.float32)
        with heeded(deadline):
            for cell in cells:
                limit, length, results = MEMORY_FACTOR * memory_limit_bytes(), cell.params.frame_len, {}
                if cell.working_bytes > limit:
                    skipped[str(cell)] = f"takes {cell.working_bytes:,} bytes, and may take {limit:,}"
                else:
                    if len(signal) < cell.batch or signal.shape[1] != length:
                        alike = (c for c in cells if c.params.frame_len == length and c.working_bytes <= limit)
                        signal = tones_in_noise(rng, max(c.batch for c in alike), length)
                    deadline.at_s = time.perf_counter() + budget_s
                    results = time_contenders(taking_part, signal[: cell.batch], cell.params, rng, deadline)
                if results:
                    done.append(CellResult.of(results, content.ours, **cell._asdict(), bytes_moved=cell.bytes_moved))
                found = {"cells": list(done), "growth": growth(done), "mean_ratios": mean_ratios(done)}
                found |= {"skipped": dict(skipped), "interrupted": deadline.interrupted}
                content = content.model_copy(update=found)
                if out is not None:
                    write_json_file(content, out, indent=None)
                if deadline.interrupted:
                    break
                advance()
    return content.model_copy(update={"interrupted": deadline.interrupted})
