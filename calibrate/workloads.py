"""What the job measures: a grid of workloads, the part that is kept out of the fit, and the signals."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from rlxjax import LearnedFft, load_learned_fft
from rlxjax.calibration import LearnedFftFile, sha256_of
from rlxjax.learned import LearnedWork, learned_program
from rlxjax.models import GRID_BATCHES, GRID_KS, GRID_N_FFTS, GRID_SAMPLES
from rlxjax.welch import FAST_SEGMENTS, ULTRA_SEGMENTS, WelchPath, WelchPeakParams, schedule


class TimedStrategy(NamedTuple):
    """What is timed of each workload: the path, the segments of its parameters, the form of its selection."""

    path: WelchPath
    n_segments: int
    selection: str | None = None


STRATEGIES: Mapping[str, TimedStrategy] = MappingProxyType(
    {
        "ultra": TimedStrategy(WelchPath.HOST, ULTRA_SEGMENTS),
        "fast": TimedStrategy(WelchPath.HOST, FAST_SEGMENTS),
        "fused-maxima": TimedStrategy(WelchPath.FUSED, FAST_SEGMENTS, "maxima"),
        "fused-top_k": TimedStrategy(WelchPath.FUSED, FAST_SEGMENTS, "top_k"),
        "block": TimedStrategy(WelchPath.BLOCK, FAST_SEGMENTS),
        "learned": TimedStrategy(WelchPath.LEARNED, FAST_SEGMENTS),
    }
)
#: Those that need no model.
WITHOUT_MODEL = tuple(name for name, strategy in STRATEGIES.items() if strategy.path is not WelchPath.LEARNED)
#: Those that give the same peaks, of which the fastest is wanted.
SAME_RESULT = ("fast", "fused-maxima", "fused-top_k", "block")
#: The workloads of the table at the end, where they were measured.
SHOWN_BATCHES, SHOWN_N_FFT, SHOWN_K = (1, 64, 1024, 8192), 256, 16
#: Rows of a signal that are made at a time.
SIGNAL_CHUNK_ROWS = 4096


@dataclasses.dataclass(frozen=True)
class TimedModel:
    """A learned FFT that the job was given, and the file that it came from."""

    model: LearnedFft
    file: FilePath
    sha256: str

    @functools.cached_property
    def work(self) -> LearnedWork:
        """What a run of the model's program takes for one segment."""
        return learned_program(self.model, WelchPeakParams.fast(self.model.n_fft, 1)).work

    def described(self) -> LearnedFftFile:
        """Return what a calibration file says of it."""
        model = self.model
        return LearnedFftFile(
            n_fft=model.n_fft,
            active_gates=model.active_gates,
            total_gates=model.total_gates,
            file=self.file.name,
            sha256=self.sha256,
        )


#: Models by segment length.
Models = Mapping[int, TimedModel]
NO_MODELS: Models = MappingProxyType({})


def load_models(files: Sequence[FilePath]) -> dict[int, TimedModel]:
    """Load model files, by segment length.

    Raises:
        ValueError: a file that holds no model, or two of one segment length.
    """
    models: dict[int, TimedModel] = {}
    for file in files:
        timed = TimedModel(load_learned_fft(file), file, sha256_of(file))
        other = models.setdefault(timed.model.n_fft, timed)
        if other is not timed:
            raise ValueError(f"--model: {other.file} and {file} are both for n_fft {timed.model.n_fft}")
    return models


class Cell(NamedTuple):
    """One workload of one strategy."""

    strategy: str
    batch: int
    n_fft: int
    k: int

    @property
    def n_segments(self) -> int:
        """Segments of a row."""
        return STRATEGIES[self.strategy].n_segments

    @property
    def variant(self) -> str:
        """What the latency model calls it."""
        path, _, selection = STRATEGIES[self.strategy]
        return path.value if selection is None else f"{path.value}_{selection}"

    @property
    def params(self) -> WelchPeakParams:
        """The parameters of the run."""
        return WelchPeakParams(self.n_fft, self.n_segments, self.k)

    @property
    def working_bytes(self) -> int:
        """Bytes of the arrays that a run holds at once, by its slowest layout."""
        samples = self.batch * self.n_segments * self.n_fft
        return 4 * self.batch * self.params.frame_len + 16 * samples

    def __str__(self) -> str:
        return f"{self.strategy} {self.batch}x{self.n_fft} k{self.k}"


def runs_model(cell: Cell) -> bool:
    """Whether a cell runs a learned FFT."""
    return STRATEGIES[cell.strategy].path is WelchPath.LEARNED


@dataclasses.dataclass(frozen=True)
class Grid:
    """The values measured, and those that the fit never sees; chosen before any timing.

    A held-out value lies inside the range of the others, or at its edge. `max_samples` bounds
    `batch * n_fft` so that a round of all cells stays short. Each batch and n_fft has one of the values of k in turn,
    and the workloads that are shown have theirs as well.
    """

    batches: tuple[int, ...] = GRID_BATCHES
    n_ffts: tuple[int, ...] = GRID_N_FFTS
    ks: tuple[int, ...] = GRID_KS
    held_out_batches: tuple[int, ...] = (2, 100, 8192)
    held_out_n_ffts: tuple[int, ...] = (128, 160, 400, 1200, 4096)
    max_samples: int = GRID_SAMPLES

    def cells(self, model_n_ffts: Iterable[int] = (), platform: str = "cpu") -> list[Cell]:
        """Return every cell of the grid, in a fixed order: learned ones for models' lengths, maxima where used."""
        n_ffts = dict.fromkeys(WITHOUT_MODEL, self.n_ffts) | {"learned": tuple(model_n_ffts)}
        return [
            Cell(strategy, batch, n_fft, k)
            for strategy in STRATEGIES
            for row, batch in enumerate(self.batches)
            for column, n_fft in enumerate(n_ffts[strategy])
            for k in self._ks_of(row + column, n_fft)
            if batch * n_fft <= self.max_samples
            if strategy != "fused-maxima" or schedule(platform).most_bins_maxima
        ]

    def seen(self, cells: Sequence[Cell]) -> np.ndarray:
        """Return whether the fit sees each cell, `[cells]`."""
        return np.array([self.place(cell.batch, cell.n_fft) == "fit" for cell in cells])

    def _ks_of(self, place: int, n_fft: int) -> list[int]:
        ks = {self.ks[place % len(self.ks)]} | ({SHOWN_K} if n_fft == SHOWN_N_FFT else set())
        return sorted(ks)

    def place(self, batch: int, n_fft: int) -> str:
        """Return "fit", "interior" or "edge": whether the fit sees a workload, and else where it lies."""
        out_batch, out_n_fft = batch in self.held_out_batches, n_fft in self.held_out_n_ffts
        if not (out_batch or out_n_fft):
            return "fit"
        at_edge = (out_batch and batch in (min(self.batches), max(self.batches))) or (
            out_n_fft and n_fft in (min(self.n_ffts), max(self.n_ffts))
        )
        return "edge" if at_edge else "interior"


def split_by_memory(cells: Iterable[Cell], limit_bytes: int) -> tuple[list[Cell], list[Cell]]:
    """Return the cells that fit in memory, and those that do not."""
    cells = list(cells)
    fitting = [cell for cell in cells if cell.working_bytes <= limit_bytes]
    return fitting, [cell for cell in cells if cell.working_bytes > limit_bytes]


class Signals:
    """What the cells run on: float32 rows of tones in noise, shared by row length, and the models."""

    def __init__(self, cells: Iterable[Cell], seed: int = 0, models: Models = NO_MODELS):
        self._models = models
        rows: dict[int, int] = {}
        for cell in cells:
            length = cell.params.frame_len
            rows[length] = max(rows.get(length, 0), cell.batch)
        rng = np.random.default_rng(seed)
        self._buffers = {length: tones_in_noise(rng, count, length) for length, count in rows.items()}
        self._first_row: dict[Cell, int] = {}

    def of(self, cell: Cell) -> np.ndarray:
        """Return a signal `[batch, frame_len]` of a cell: other rows than last time, if there are more."""
        buffer = self._buffers[cell.params.frame_len]
        first = self._first_row.get(cell, 0)
        following = first + cell.batch
        self._first_row[cell] = following if following + cell.batch <= len(buffer) else 0
        return buffer[first : first + cell.batch]

    def model_of(self, cell: Cell) -> LearnedFft | None:
        """Return the model that a cell runs."""
        return self._models[cell.n_fft].model if runs_model(cell) else None


def tones_in_noise(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """Return float32 `[rows, length]`: a tone of random frequency in each row of noise."""
    signal, time = np.empty((rows, length), np.float32), np.arange(length, dtype=np.float32)
    for start in range(0, rows, SIGNAL_CHUNK_ROWS):
        chunk = signal[start : start + SIGNAL_CHUNK_ROWS]
        radians = 2 * np.pi * rng.uniform(0.02, 0.48, (len(chunk), 1)).astype(np.float32)
        chunk[:] = rng.standard_normal(chunk.shape, np.float32) + 2 * np.sin(radians * time)
    return signal
