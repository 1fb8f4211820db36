"""A calibration: fitted coefficients of one machine, and the predictions and picks that follow."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_context

from ._checks import LEAST_SIZES, as_index, check_sizes, is_traced
from ._decision import Decision, decision
from ._device import Provenance, normalised
from ._explanation import Explanation, explain, host_strategy
from ._gate import IoFusionGate
from ._latency import COEFFICIENT_NAMES, MAXIMA, TOP_K, LatencyCoefficients, LatencyTerms
from ._learned_latency import LEARNED_COEFFICIENT_NAMES, LearnedLatencyCoefficients, learned_terms_ns
from ._posterior import LatencyEstimate, LatencyPosterior, corrected_terms_ns, estimate
from ._typing import Code, Nanoseconds, RealLike
from .welch import FAST_SEGMENTS, ULTRA_SEGMENTS, LearnedWork, Path
from .welch._selection import SELECTIONS

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
_WITHOUT_MODEL = (Path.HOST, Path.FUSED, Path.BLOCK)


class CalibrationFileError(ValueError):
    """A calibration file that cannot be used: one line with the file, the field and the mend."""


@dataclasses.dataclass(frozen=True)
class LearnedCalibration:
    """What was found of learned FFTs, if the calibrate job was given models.

    Attributes:
        coefficients: of the pruned transform, a pytree of floats.
        works: of the models that were timed, by `n_fft`.
        spread: standard deviation of the logarithm of a run's time around its prediction.
    """

    coefficients: LearnedLatencyCoefficients
    works: Mapping[int, LearnedWork]
    spread: float


class MachineMismatchWarning(UserWarning):
    """A calibration was made on another machine, or with other software."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What a calibrate job found on one machine.

    Attributes:
        posterior: of the latency model: coefficients, correction and how sure they are.
        gate: the IO gate with this machine's measured rates, a pytree of floats. It scores launches, waits
            and bytes alone, as the reference does; `decide` has what timed runs say, and how surely.
        provenance: of each latency coefficient.
        noise_floor: mean relative difference of two halves of the same campaign; None for a single round.
        held_out: per strategy, the errors of workloads that the fit did and did not see.
        domain: per quantity, the smallest and largest value measured.
        fingerprint: of the machine and software.
        learned: of the learned path; None if no model was timed.
    """

    posterior: LatencyPosterior
    gate: IoFusionGate
    provenance: Mapping[str, Provenance]
    noise_floor: float | None
    held_out: Mapping[str, Mapping[str, Any]]
    domain: Mapping[str, tuple[float, float]]
    fingerprint: Mapping[str, Any]
    learned: LearnedCalibration | None = None
    _picks: dict[tuple, Any] = dataclasses.field(init=False, default_factory=dict, compare=False, repr=False)

    @property
    def coefficients(self) -> LatencyCoefficients:
        """Of the latency model, a pytree of floats."""
        return self.posterior.coefficients

    @classmethod
    def from_file(cls, content: "CalibrationFile") -> "Calibration":
        """Build from the content of a calibration file."""
        values = {name: content.coefficients[name].value for name in COEFFICIENT_NAMES}
        gate = {name: entry.value for name, entry in content.gate.items()}
        learned = None
        if content.learned is not None:
            entries = content.learned.coefficients
            learned = LearnedCalibration(
                LearnedLatencyCoefficients(
                    **{name: entries[name].value for name in LEARNED_COEFFICIENT_NAMES}
                ),
                {model.n_fft: LearnedWork(model.flop, model.live_bins) for model in content.learned.models},
                content.learned.spread,
            )
        return cls(
            posterior=content.uncertainty.posterior(LatencyCoefficients(**values)),
            gate=IoFusionGate(**gate),
            provenance={name: content.coefficients[name].provenance for name in COEFFICIENT_NAMES},
            noise_floor=content.noise_floor,
            held_out={name: summary.model_dump() for name, summary in content.held_out.items()},
            domain={
                name: (entry["low"], entry["high"]) for name, entry in content.domain.model_dump().items()
            },
            fingerprint=content.fingerprint.model_dump(),
            learned=learned,
        )

    def predict_ns(
        self, strategy: str, batch: RealLike, n_fft: RealLike, k: RealLike, n_segments: RealLike | None = None
    ) -> Nanoseconds:
        """Return the predicted latency of one run in ns, from a NumPy signal to NumPy peaks, `[*batch]`.

        Args:
            strategy: "ultra" (host, 1 segment), "fast" (host, 2 segments), "host", "fused", "block", or
                "learned", where the job timed a model of this `n_fft`.
            batch: rows of the signal, scalar or `[*batch]`, as the other sizes.
            n_fft: samples of a segment.
            k: peaks of a row.
            n_segments: segments of a row; 2 unless the strategy or this says otherwise.

        Raises:
            ValueError: an unknown strategy, one that was not timed, or a contradicting `n_segments`. A traced
                `n_fft` without a timed model is infinitely slow instead.
        """
        return self.terms_ns(strategy, batch, n_fft, k, n_segments).total_ns()

    def terms_ns(
        self, strategy: str, batch: RealLike, n_fft: RealLike, k: RealLike, n_segments: RealLike | None = None
    ) -> LatencyTerms:
        """Return the parts of `predict_ns`; arguments as there."""
        path, segments = _path_and_segments(strategy, n_segments)
        if path is Path.LEARNED:
            self._check_learned(n_fft)
            return self._learned_terms_ns(None, batch, n_fft, k, segments)
        return self._terms_ns(path, batch, n_fft, k, segments)

    def interval_ns(
        self,
        strategy: str,
        batch: RealLike,
        n_fft: RealLike,
        k: RealLike,
        n_segments: RealLike | None = None,
        level: float = 0.9,
    ) -> tuple[Nanoseconds, Nanoseconds]:
        """Return the bounds in ns between which a run's time lies with a probability, `[*batch]` each.

        The time is what the calibrate job takes for one, the lower quartile of interleaved visits at one
        pace of the machine. It is log-normal around the prediction, with the variance of the fit and that
        of a workload's own.

        Args:
            strategy: as in `predict_ns`, like the sizes.
            batch: rows of the signal.
            n_fft: samples of a segment.
            k: peaks of a row.
            n_segments: segments of a row.
            level: the probability.

        Raises:
            ValueError: as `predict_ns`, or a level that is not between 0 and 1.
        """
        if not 0.0 < level < 1.0:
            raise ValueError(f"level: expected a probability between 0 and 1, got {level}")
        from statistics import NormalDist  # only this needs it

        run = self.estimate(strategy, batch, n_fft, k, n_segments)
        return _bounds(run, NormalDist().inv_cdf((1.0 + level) / 2.0))

    def estimate(
        self, strategy: str, batch: RealLike, n_fft: RealLike, k: RealLike, n_segments: RealLike | None = None
    ) -> LatencyEstimate:
        """Return the prediction with its uncertainty, `[*batch]`; arguments as in `predict_ns`."""
        path, segments = _path_and_segments(strategy, n_segments)
        sizes = (batch, n_fft, k, segments)
        if path is Path.LEARNED:
            self._check_learned(n_fft)
            assert self.learned is not None
            time_ns = self._learned_terms_ns(None, *sizes).total_ns()
            scores = jnp.zeros((*jnp.shape(time_ns), len(self.posterior.factor)), jnp.result_type(float))
            return LatencyEstimate(time_ns, scores, jnp.full_like(time_ns, self.learned.spread))
        check_sizes(batch=batch, n_fft=n_fft, k=k, n_segments=segments)
        if path is not Path.FUSED:
            return estimate(self.posterior, path.code, *sizes, MAXIMA)
        forms = [estimate(self.posterior, path.code, *sizes, code) for code in (MAXIMA, TOP_K)]
        return _cheaper(*forms)

    def decide(
        self,
        batch: RealLike,
        n_fft: RealLike,
        k: RealLike,
        n_segments: RealLike = FAST_SEGMENTS,
        fused: str = "fused",
        kept: str = "host",
    ) -> Decision:
        """Return whether the fused path is faster than another one, and how sure that is, `[*batch]`.

        Args:
            batch: rows of the signal, scalar or `[*batch]`, as the other sizes.
            n_fft: samples of a segment.
            k: peaks of a row.
            n_segments: segments of a row.
            fused: the strategy to take if it is faster.
            kept: the strategy to keep otherwise.
        """
        sizes = (batch, n_fft, k, n_segments)
        decided = decision(self.estimate(fused, *sizes), self.estimate(kept, *sizes))
        return decided._replace(in_domain=self.in_domain(*sizes))

    def explain(self, batch: int, n_fft: int, k: int, n_segments: int = FAST_SEGMENTS) -> Explanation:
        """Return why a strategy is picked: parts of the times, margin, what would flip the choice, crossover.

        Args:
            batch: rows of the signal, at least 1.
            n_fft: samples of a segment.
            k: peaks of a row.
            n_segments: segments of a row.

        Raises:
            ValueError: a size that cannot be.
        """
        return explain(self, batch, n_fft, k, n_segments)

    def learned_strategies(self, n_fft: int) -> tuple[str, ...]:
        """Return "learned" where a model of this segment length was timed, else nothing."""
        return ("learned",) if self.learned is not None and n_fft in self.learned.works else ()

    def pick(
        self, batch: RealLike, n_fft: RealLike, k: RealLike, n_segments: RealLike = FAST_SEGMENTS
    ) -> str | Code:
        """Return the strategy with the lowest prediction among those that give the same result.

        Learned, whose peaks are approximate, is among them where the job was given a model of this `n_fft`.

        Args:
            batch: rows of the signal, scalar or `[*batch]`, as the other sizes.
            n_fft: samples of a segment.
            k: peaks of a row.
            n_segments: segments of a row.

        Returns:
            For sizes that are integers on the host, a name: "ultra", "fast" or "host" (by the number of
            segments), "fused", "block", or "learned" where a model of this `n_fft` was timed. For arrays and
            traced sizes, codes of `Path`, `[*batch]`.
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
        return host_strategy(segments)

    def pick_path(
        self,
        batch: int,
        n_fft: int,
        k: int,
        n_segments: int,
        candidates: Sequence[Path] = tuple(Path),
        work: LearnedWork | None = None,
    ) -> Path:
        """Return the path with the lowest prediction among candidates; of equals the earlier, learned last.

        Scalar sizes only; picks are remembered. `work` is that of the model at hand, else of the one that
        was timed; without either, or without timings of any model, learned is no candidate.
        """
        key = (batch, n_fft, k, n_segments, tuple(candidates), work)
        if key not in self._picks:
            with eval_context():
                sizes = (batch, n_fft, k, n_segments)
                timed = [path for path in candidates if path is not Path.LEARNED]
                codes = np.array([path.code for path in timed], np.int32)
                predicted = list(np.asarray(self._terms_ns(codes, *sizes).total_ns()))
                if Path.LEARNED in candidates and self.learned is not None:
                    timed.append(Path.LEARNED)
                    predicted.append(float(self._learned_terms_ns(work, *sizes).total_ns()))
                if not timed:
                    raise ValueError(f"candidates: expected a path that was timed, got {list(candidates)}")
                self._picks[key] = timed[int(np.argmin(predicted))]
        return self._picks[key]

    def pick_selection(self, batch: int, n_fft: int, k: int, n_segments: int = FAST_SEGMENTS) -> str:
        """Return how the fused path selects peaks fastest, "maxima" or "top_k"; scalar sizes only."""
        key = ("selection", batch, n_fft, k, n_segments)
        if key not in self._picks:
            with eval_context():
                codes = np.arange(len(SELECTIONS))
                sizes = (batch, n_fft, k, n_segments)
                terms = corrected_terms_ns(self.posterior, Path.FUSED.code, *sizes, codes)
                self._picks[key] = list(SELECTIONS)[int(np.argmin(np.asarray(terms.total_ns())))]
        return self._picks[key]

    def pick_index(
        self, batch: RealLike, n_fft: RealLike, k: RealLike, n_segments: RealLike = FAST_SEGMENTS
    ) -> Code:
        """Return the code of the `Path` with the lowest prediction, `[*batch]`; traces."""
        sizes = (batch, n_fft, k, n_segments)
        predicted = [self._terms_ns(path.code, *sizes).total_ns() for path in _WITHOUT_MODEL]
        if self.learned is not None:
            predicted.append(self._learned_terms_ns(None, *sizes).total_ns())
        return jnp.argmin(jnp.stack(jnp.broadcast_arrays(*predicted), -1), -1)

    def _terms_ns(self, path: Path | Code, batch, n_fft, k, n_segments) -> LatencyTerms:
        """Return the terms of a path or of codes of paths; fused ones of the cheaper form of selection."""
        code, sizes = path.code if isinstance(path, Path) else path, (batch, n_fft, k, n_segments)
        check_sizes(batch=batch, n_fft=n_fft, k=k, n_segments=n_segments)
        forms = [corrected_terms_ns(self.posterior, code, *sizes, form) for form in (MAXIMA, TOP_K)]
        is_first = (forms[0].total_ns() <= forms[1].total_ns()) | (jnp.asarray(code) != Path.FUSED.code)
        return jax.tree.map(lambda one, other: jnp.where(is_first, one, other), *forms)

    def _learned_terms_ns(self, work: LearnedWork | None, batch, n_fft, k, n_segments) -> LatencyTerms:
        """Return the terms of a model at hand, or of those that were timed: infinite where none was."""
        assert self.learned is not None
        own, shared, sizes = self.learned.coefficients, self.coefficients, (batch, n_fft, k, n_segments)
        if work is not None:
            return learned_terms_ns(own, shared, *work, *sizes)
        flop, live_bins, is_timed = 1.0, 1.0, False
        for length, timed in self.learned.works.items():
            is_this = jnp.asarray(n_fft) == length
            flop = jnp.where(is_this, timed.flop, flop)
            live_bins = jnp.where(is_this, timed.live_bins, live_bins)
            is_timed = is_timed | is_this
        terms = learned_terms_ns(own, shared, flop, live_bins, *sizes)
        return dataclasses.replace(terms, transform_ns=jnp.where(is_timed, terms.transform_ns, jnp.inf))

    def _check_learned(self, n_fft: RealLike) -> None:
        if self.learned is None:
            raise ValueError(
                "strategy: 'learned' was not timed: the calibrate job was given no learned model"
            )
        lengths = list(self.learned.works)
        if is_traced(n_fft):
            return
        untimed = np.setdiff1d(np.asarray(n_fft), lengths)
        if untimed.size:
            known = ", ".join(map(str, lengths))
            raise ValueError(f"strategy: 'learned' was not timed at n_fft {untimed[0]}, but at n_fft {known}")

    def in_domain(
        self, batch: RealLike, n_fft: RealLike, k: RealLike, n_segments: RealLike = FAST_SEGMENTS
    ) -> bool | jax.Array:
        """Whether workloads lie within the values that were measured, of all strategies together."""
        samples = jnp.asarray(batch, jnp.result_type(float)) * n_fft
        sizes = {"batch": batch, "n_fft": n_fft, "k": k, "n_segments": n_segments, "samples": samples}
        inside = jnp.asarray(True)
        for name, value in sizes.items():
            low, high = self.domain[name]
            inside = inside & (jnp.asarray(value) >= low) & (jnp.asarray(value) <= high)
        return inside if is_traced(inside) or inside.ndim else bool(inside)


@jax.jit
def _cheaper(one: LatencyEstimate, other: LatencyEstimate) -> LatencyEstimate:
    is_first = one.time_ns <= other.time_ns

    def choose(mine: jax.Array, others: jax.Array) -> jax.Array:
        return jnp.where(is_first[..., None] if mine.ndim > is_first.ndim else is_first, mine, others)

    return jax.tree.map(choose, one, other)


@jax.jit
def _bounds(run: LatencyEstimate, sds: RealLike) -> tuple[Nanoseconds, Nanoseconds]:
    """Return the times of a run that lie so many standard deviations of its logarithm below and above."""
    reach = jnp.exp(sds * run.log_sd())
    return run.time_ns / reach, run.time_ns * reach


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
    if n_segments is None:
        return path, FAST_SEGMENTS if implied is None else implied
    if implied is not None and not is_traced(n_segments) and np.any(np.asarray(n_segments) != implied):
        raise ValueError(f"n_segments: {strategy!r} has {implied}, got {n_segments}; use 'host'")
    return path, n_segments
