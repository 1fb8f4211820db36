"""The suite of Welch peaks, from a NumPy signal to NumPy peaks: every strategy at every size of a grid."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax import welch_peaks
from rlxjax.calibration import current_fingerprint, sha256_of
from rlxjax.fit import Cell, Facts, LatencyPrior, Suite
from rlxjax.learned import learned_program, load_learned_fft
from rlxjax.models import WELCH, fft_flop, heap_rates, welch_micro_prior
from rlxjax.welch import FAST_SEGMENTS, RUNNER_VERSION, ULTRA_SEGMENTS, WelchPeakParams, keep_programs, schedule

from ..machine import DEEP_SELECTION, ELEMENT_BYTES, SHORT_TRANSFORM, TRANSFER_ELEMENTS, WIDE_SELECTION, gate_rates

#: For each group of the samples: the variant, and the number of segments in a row.
TIMED = {
    "ultra": ("host", ULTRA_SEGMENTS),
    "fast": ("host", FAST_SEGMENTS),
    "fused_maxima": ("fused_maxima", FAST_SEGMENTS),
    "fused_top_k": ("fused_top_k", FAST_SEGMENTS),
    "block": ("block", FAST_SEGMENTS),
    "learned": ("learned", FAST_SEGMENTS),
}
#: The names of groups in tables and sentences, if the samples use other names.
SHOWN_GROUPS = {"ultra": "host, 1 segment", "fast": "host"}
#: Sizes of the cells, and the largest product of batch and n_fft.
GRID_BATCHES = (1, 2, 5, 9, 16, 27, 64, 100, 180, 256, 500, 1024, 3000, 8192, 32_768, 131_072)
GRID_N_FFTS = (64, 96, 128, 160, 256, 384, 400, 480, 512, 1000, 1024, 1200, 1536, 2048, 4096)
GRID_KS = (1, 4, 16, 64)
GRID_SAMPLES = 2**23
#: The sizes that are held out of the fit, inside the range of the other sizes or at its edge.
HELD_OUT_BATCHES, HELD_OUT_N_FFTS = (2, 100, 8192), (128, 160, 400, 1200, 4096)
#: The workloads that the printed table shows.
SHOWN_BATCHES, SHOWN_N_FFT, SHOWN_K = (1, 64, 1024, 8192), 256, 16


class WelchSuite(Suite):
    """Each batch and n_fft of a grid with each strategy. `models` are files of learned FFTs that are timed too."""

    model = WELCH
    runner = RUNNER_VERSION
    shown = tuple(f"{batch}x{SHOWN_N_FFT} k{SHOWN_K}" for batch in SHOWN_BATCHES)

    def __init__(self, models: Sequence[FilePath] = ()):
        self._learned = {}
        for file in models:
            model = load_learned_fft(file)
            if model.n_fft in self._learned:
                raise ValueError(f"--model: expected another n_fft in each file, got {model.n_fft} again in {file}")
            self._learned[model.n_fft] = model
        self.given = {file.name: sha256_of(file) for file in models}

    def cells(self) -> list[Cell]:
        """Return every cell. A learned FFT has only its own n_fft, and `fused_maxima` only runs on some platforms."""
        platform = jax.default_backend()
        return [
            welch_cell(group, batch, n_fft, k)
            for group in TIMED
            for row, batch in enumerate(GRID_BATCHES)
            for column, n_fft in enumerate(self._learned if group == "learned" else GRID_N_FFTS)
            for k in sorted({GRID_KS[(row + column) % len(GRID_KS)]} | ({SHOWN_K} if n_fft == SHOWN_N_FFT else set()))
            if batch * n_fft <= GRID_SAMPLES
            if group != "fused_maxima" or schedule(platform).most_bins_maxima
        ]

    def kept(self, cells: Sequence[Cell]) -> list[Cell]:
        return [dataclasses.replace(cell, group=SHOWN_GROUPS.get(cell.group, cell.group)) for cell in cells]

    def program(self, cell: Cell) -> Callable[[], Any]:
        keep_programs(2**31)  # every round visits all programs of the grid, which take 1 GB
        sizes = {name: int(size) for name, size in cell.inputs.items()}
        params = WelchPeakParams(sizes["n_fft"], sizes["n_segments"], sizes["k"])
        signal = _tone()[: sizes["batch"] * params.frame_len].reshape(sizes["batch"], params.frame_len)
        learned = self._learned[sizes["n_fft"]] if cell.variant == "learned" else None
        return functools.partial(welch_peaks, signal, params, cell.variant, model=learned)

    def facts(self) -> Facts:
        """Return the facts of the model: this machine's schedule, and the work of the given learned FFTs."""
        here, facts = current_fingerprint(), dict(WELCH.facts)
        facts |= {name: fact for name, fact in schedule(here.platform)._asdict().items() if name in facts}
        facts["processors"] = here.cores if here.platform == "cpu" else 1
        works = [learned_program(one, WelchPeakParams.fast(one.n_fft, 1)).work for one in self._learned.values()]
        return facts | {
            "learned_n_fft": np.array(list(self._learned), float),
            "learned_flop": np.array([work.flop for work in works], float),
            "learned_live_bins": np.array([work.live_bins for work in works], float),
        }

    def start(self, micro_ns: Mapping[str, float]) -> LatencyPrior:
        """Return the model's prior, in which micro-benchmarks give the coefficients that they measure directly."""
        rates, upload_bytes = gate_rates(micro_ns), ELEMENT_BYTES * TRANSFER_ELEMENTS
        waits_ns = rates["dispatch_ns"] + rates["roundtrip_ns"]
        found = {"memory_bytes_per_ns": rates["memory_bw"], "copy_bytes_per_ns": upload_bytes / micro_ns["upload"]}
        if "short powers" in micro_ns:
            rows, n_fft = SHORT_TRANSFORM  # a row has two segments
            flop = 2 * rows * float(fft_flop(jnp.asarray(n_fft)))
            found["device_flop_per_ns"] = flop / (micro_ns["short powers"] - waits_ns)
        if {"top_k wide", "top_k deep"} <= set(micro_ns):
            times_ns = [micro_ns[f"top_k {name}"] - waits_ns for name in ("wide", "deep")]
            found |= heap_rates(*zip(WIDE_SELECTION, DEEP_SELECTION, strict=True), time_ns=times_ns)
        return welch_micro_prior(found)


def welch_cell(group: str, batch: int, n_fft: int, k: int) -> Cell:
    variant, n_segments = TIMED[group]
    params = WelchPeakParams(n_fft, n_segments, min(k, n_fft // 2 + 1))
    work, sizes = f"{batch}x{n_fft} k{k}", {"batch": batch, "n_fft": n_fft, "k": params.k, "n_segments": n_segments}
    is_held_out = batch in HELD_OUT_BATCHES or n_fft in HELD_OUT_N_FFTS
    n_bytes = 4 * batch * params.frame_len + 16 * batch * n_segments * n_fft
    return Cell(f"{group} {work}", variant, sizes, work, group, is_held_out, n_bytes)


@functools.cache
def _tone() -> np.ndarray:
    """Return a tone with noise, float32, as long as the largest signal of the grid."""
    sizes = [(batch, n_fft) for batch in GRID_BATCHES for n_fft in GRID_N_FFTS if batch * n_fft <= GRID_SAMPLES]
    count = max(batch * WelchPeakParams.fast(n_fft, 1).frame_len for batch, n_fft in sizes)
    radians = 2 * np.pi * 0.11 * np.arange(count, dtype=np.float64)
    noise = np.random.default_rng(0).standard_normal(count, np.float32)
    return noise + 2 * np.sin(radians).astype(np.float32)
