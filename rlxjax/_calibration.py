"""A calibration: fitted coefficients of one machine, and the predictions and picks that follow."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ._checks import LEAST_SIZES, as_index, is_traced
from ._device import Provenance, normalised
from ._gate import IoFusionGate
from ._latency import COEFFICIENT_NAMES, LatencyCoefficients, LatencyTerms, latency_terms_ns
from ._typing import Code, Nanoseconds, RealLike
from .welch import FAST_SEGMENTS, ULTRA_SEGMENTS, Path

if TYPE_CHECKING:
    from ._calibration_file import CalibrationFile

#: Strategy name -> (path, the number of segments that its name implies).
STRATEGIES: Mapping[str, tuple[Path, int | None]] = {
    "ultra": (Path.HOST, ULTRA_SEGMENTS),
    "fast": (Path.HOST, FAST_SEGMENTS),
    "host": (Path.HOST, None),
    "fused": (Path.FUSED, None),
    "block": (Path.BLOCK, None),
    "learned": (Path.LEARNED, None),
}
_TIMED_PATHS = (Path.HOST, Path.FUSED, Path.BLOCK)


class CalibrationFileError(ValueError):
    """A calibration file that cannot be used: one line with the file, the field and the mend."""


class MachineMismatchWarning(UserWarning):
    """A calibration was made on another machine, or with other software."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What a calibrate job found on one machine.

    Attributes:
        coefficients: of the latency model, a pytree of floats.
        gate: the IO gate with this machine's measured rates, a pytree of floats.
        provenance: of each latency coefficient.
        noise_floor: mean relative difference of two halves of the same campaign; None for a single round.
        held_out: per strategy, the errors of workloads that the fit did and did not see.
        domain: per quantity, the smallest and largest value measured.
        fingerprint: of the machine and software.
    """

    coefficients: LatencyCoefficients
    gate: IoFusionGate
    provenance: Mapping[str, Provenance]
    noise_floor: float | None
    held_out: Mapping[str, Mapping[str, Any]]
    domain: Mapping[str, tuple[float, float]]
    fingerprint: Mapping[str, Any]
    _picks: dict[tuple, Path] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_file(cls, content: "CalibrationFile") -> "Calibration":
        """Build from the content of a calibration file."""
        values = {name: content.coefficients[name].value for name in COEFFICIENT_NAMES}
        gate = {name: entry.value for name, entry in content.gate.items()}
        return cls(
            coefficients=LatencyCoefficients(**values),
            gate=IoFusionGate(**gate),
            provenance={name: content.coefficients[name].provenance for name in COEFFICIENT_NAMES},
            noise_floor=content.noise_floor,
            held_out={name: summary.model_dump() for name, summary in content.held_out.items()},
            domain={
                name: (entry["low"], entry["high"]) for name, entry in content.domain.model_dump().items()
            },
            fingerprint=content.fingerprint.model_dump(),
        )

    def predict_ns(
        self, strategy: str, batch: RealLike, n_fft: RealLike, k: RealLike, n_segments: RealLike | None = None
    ) -> Nanoseconds:
        """Return the predicted latency of one run in ns, from a NumPy signal to NumPy peaks, `[*batch]`.

        Args:
            strategy: "ultra" (host, 1 segment), "fast" (host, 2 segments), "host", "fused" or "block".
            batch: rows of the signal, scalar or `[*batch]`, as the other sizes.
            n_fft: samples of a segment.
            k: peaks of a row.
            n_segments: segments of a row; 2 unless the strategy or this says otherwise.

        Raises:
            ValueError: an unknown strategy, one that was not timed, or a contradicting `n_segments`.
        """
        return self.terms_ns(strategy, batch, n_fft, k, n_segments).total_ns()

    def terms_ns(
        self, strategy: str, batch: RealLike, n_fft: RealLike, k: RealLike, n_segments: RealLike | None = None
    ) -> LatencyTerms:
        """Return the parts of `predict_ns`; arguments as there."""
        path, segments = _path_and_segments(strategy, n_segments)
        return latency_terms_ns(self.coefficients, path, batch, n_fft, k, segments)

    def pick(
        self, batch: RealLike, n_fft: RealLike, k: RealLike, n_segments: RealLike = FAST_SEGMENTS
    ) -> str | Code:
        """Return the strategy with the lowest prediction among those that give the same result.

        Args:
            batch: rows of the signal, scalar or `[*batch]`, as the other sizes.
            n_fft: samples of a segment.
            k: peaks of a row.
            n_segments: segments of a row.

        Returns:
            For sizes that are integers on the host, a name: "ultra", "fast" or "host" (by the number of
            segments), "fused" or "block". For arrays and traced sizes, codes of `Path`, `[*batch]`.
        """
        values = (batch, n_fft, k, n_segments)
        if is_traced(*values) or any(np.ndim(value) for value in values):
            return self.pick_index(batch, n_fft, k, n_segments)
        rows, length, peaks, segments = (
            as_index(value, name) for name, value in zip(LEAST_SIZES, values, strict=True)
        )
        path = self.pick_path(rows, length, peaks, segments)
        if path is not Path.HOST:
            return path.value
        return {ULTRA_SEGMENTS: "ultra", FAST_SEGMENTS: "fast"}.get(segments, "host")

    def pick_path(
        self, batch: int, n_fft: int, k: int, n_segments: int, candidates: Sequence[Path] = _TIMED_PATHS
    ) -> Path:
        """Return the path with the lowest prediction among candidates, the earlier of equals.

        Scalar sizes only; picks are remembered.
        """
        key = (batch, n_fft, k, n_segments, tuple(candidates))
        if key not in self._picks:
            codes = np.array([path.code for path in candidates])
            with jax.ensure_compile_time_eval():
                terms = latency_terms_ns(self.coefficients, codes, batch, n_fft, k, n_segments)
                self._picks[key] = candidates[int(np.argmin(np.asarray(terms.total_ns())))]
        return self._picks[key]

    def pick_index(
        self, batch: RealLike, n_fft: RealLike, k: RealLike, n_segments: RealLike = FAST_SEGMENTS
    ) -> Code:
        """Return the code of the `Path` with the lowest prediction, `[*batch]`; traces."""
        predicted = [
            latency_terms_ns(self.coefficients, path, batch, n_fft, k, n_segments).total_ns()
            for path in _TIMED_PATHS
        ]
        return jnp.argmin(jnp.stack(predicted, -1), -1)

    def in_domain(self, batch: RealLike, n_fft: RealLike, k: RealLike) -> bool | jax.Array:
        """Whether workloads lie within the values that were measured."""
        samples = jnp.asarray(batch, jnp.result_type(float)) * n_fft
        inside = jnp.asarray(True)
        for name, value in {"batch": batch, "n_fft": n_fft, "k": k, "samples": samples}.items():
            low, high = self.domain[name]
            inside = inside & (jnp.asarray(value) >= low) & (jnp.asarray(value) <= high)
        return inside if is_traced(inside) or inside.ndim else bool(inside)


def load_calibration(path: str | os.PathLike | None = None) -> Calibration:
    """Load a calibration file; by default the one that the calibrate job wrote for JAX's default platform.

    Warns:
        MachineMismatchWarning: the file was made on another machine or with other software.

    Raises:
        CalibrationFileError: a file that is missing, truncated, of a future schema, or has a missing,
            negative or NaN coefficient; one line that names the file, the field and the mend.
    """
    from ._calibration_file import default_calibration_path, read_calibration_file, warn_if_elsewhere

    path = default_calibration_path() if path is None else path
    content = read_calibration_file(path)
    warn_if_elsewhere(content, path)
    return Calibration.from_file(content)


def _path_and_segments(strategy: str, n_segments: RealLike | None) -> tuple[Path, RealLike]:
    name = normalised(strategy)
    if name not in STRATEGIES:
        raise ValueError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {strategy!r}")
    path, implied = STRATEGIES[name]
    if path is Path.LEARNED:
        raise ValueError("strategy: 'learned' was not timed: the calibrate job was given no learned model")
    if n_segments is None:
        return path, FAST_SEGMENTS if implied is None else implied
    if implied is not None and not is_traced(n_segments) and np.any(np.asarray(n_segments) != implied):
        raise ValueError(f"n_segments: {strategy!r} has {implied}, got {n_segments}; use 'host'")
    return path, n_segments
