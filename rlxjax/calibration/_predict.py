"""A calibrated model of one machine; a compiled program makes the model's predictions, decisions and picks."""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rlxjax._checks import is_traced, real_numbers
from rlxjax._chunks import on_cpu
from rlxjax._typing import Code, Nanoseconds, Provenance, RealLike, Size
from rlxjax._values import FrozenDict, Handle, by_value, handle
from rlxjax.fit import (
    SURE,
    Decision,
    Estimate,
    LatencyModel,
    LatencyPosterior,
    Runs,
    all_inputs,
    alternatives_of,
    compare,
    corrected_terms_ns,
    estimate,
    estimate_of_variant,
    is_candidate,
    own_correlation,
    strategy_of,
)

#: Largest number of picks that are cached.
MOST_CHOICES = 4096
#: If the variance of a logarithm is smaller than this value, the variance counts as zero.
LEAST_VARIANCE = 1e-30
#: The name of a model, or None. The type is wide because type checkers apply it to the numbers in `**sizes` too.
ModelName = Any


@by_value
class Pick(NamedTuple):
    """The fastest of several candidate strategies for each workload; each field has shape `[*batch]`.

    Attributes:
        place: index of the fastest strategy among the candidates; in a tie, the first candidate wins.
        time_ns: the predicted time of the pick; infinite if no candidate gives the result.
        margin_ns: the extra time of the second fastest candidate; infinite if there is no second candidate.
        probability: the smallest of the probabilities that the pick is faster than each other candidate.
        time_log_sd: standard deviation of the logarithm of the pick's time.
    """

    place: Int[Array, "*batch"]
    time_ns: Nanoseconds
    margin_ns: Nanoseconds
    probability: Float[Array, "*batch"]
    time_log_sd: Float[Array, "*batch"]

    def log_sd(self) -> Float[Array, "*batch"]:
        """Return `time_log_sd`. An estimate has a method of the same name: `Estimate.log_sd`."""
        return self.time_log_sd

    @property
    def is_sure(self) -> Bool[Array, "*batch"]:
        """Whether `probability` is high enough for a sure decision, by the rule of `Decision.verdict`."""
        return self.probability >= SURE


class Predictions:
    """The methods that predict, compare and pick; they use the first model unless `model=` names another model.

    Give the model's inputs by place or by name, each as a number or an array `[*batch]`. You may leave out an input
    that has a default or that the strategy's name implies. For models of programs, use `predict_function`.

    Examples:
        >>> from rlxjax.calibration import prior_calibration
        >>> known = prior_calibration("cpu")
        >>> known.pick(batch=8192, n_fft=256, k=16), float(known.predict_ns("fused", 8192, 256, 16)) > 0
        ('fused', True)
    """

    def of(self, model: str | None = None) -> "CalibratedModel":
        """Return the calibrated model with the given name; by default, the first model."""
        raise NotImplementedError

    @property
    def coefficients(self) -> Any:
        """The coefficients of the first model, a pytree of floats."""
        return self.of().posterior.coefficients

    def predict_ns(self, strategy: str, *inputs: Size, model: ModelName = None, **named: Size | None) -> Nanoseconds:
        """Return the predicted time, in ns, of the strategy's fastest variant, `[*batch]`.

        Raises:
            ValueError: the strategy is unknown or cannot give the result for the inputs; or an input is missing, is
                impossible, or contradicts the strategy's name. Values of traced inputs are not checked.
        """
        return self.of(model)._asked("time", (strategy,), inputs, named)

    def terms_ns(
        self, strategy: str, *inputs: Size, model: ModelName = None, **named: Size | None
    ) -> Mapping[str, Nanoseconds]:
        """Return the parts of the predicted time by name, in ns; the arguments are the same as in `predict_ns`."""
        return self.of(model)._asked("terms", (strategy,), inputs, named)

    def estimate(self, strategy: str, *inputs: Size, model: ModelName = None, **named: Size | None) -> Estimate:
        """Return the predicted time with its uncertainty, `[*batch]`; the arguments are the same as in `predict_ns`."""
        return self.of(model)._asked("estimate", (strategy,), inputs, named)

    def interval_ns(
        self, strategy: str, *inputs: Size, level: float = 0.9, model: ModelName = None, **named: Size | None
    ) -> tuple[Nanoseconds, Nanoseconds]:
        """Return two ends, `[*batch]` in ns, of the interval that holds a run's time with probability `level`.

        As in `rlxjax calibrate`, a run's time is the lower quartile of interleaved timings, at a constant speed of the
        machine. The time has a log-normal distribution around the prediction. The variance of the time's logarithm
        is the sum of three variances: of the fit, of the workload's own residual, and of the machine's speed.

        Raises:
            ValueError: as in `predict_ns`, or `level` is not between 0 and 1.
        """
        return self.of(model).bounds_ns(self.estimate(strategy, *inputs, model=model, **named), level)

    def compare(self, fused: str, kept: str, *inputs: Size, model: ModelName = None, **named: Size | None) -> Decision:
        """Compare the strategies `fused` and `kept`, and return the probability that `fused` is faster, `[*batch]`.

        `explain` compares the fastest two strategies and gives the reasons.

        Raises:
            ValueError: as in `predict_ns`.
        """
        decided = self.of(model)._asked("decision", (fused, kept), inputs, named)
        return decided._replace(in_domain=self.in_domain(*inputs, model=model, **named))

    def decide(
        self,
        *inputs: Size,
        fused: str | None = None,
        kept: str | None = None,
        model: ModelName = None,
        **named: Size | None,
    ) -> Decision:
        """Return `compare(fused, kept, ...)`; by default, `fused` is the model's second strategy and `kept` the first.

        `decide` compares two strategies; `pick` chooses among all strategies.
        """
        own = self.of(model)
        first, second, *_ = (*own.strategies, None, None)
        fused, kept = fused or second, kept or first
        if fused is None or kept is None:
            raise ValueError(f"{own.model.name}: expected two strategies to decide between, got 1")
        return self.compare(fused, kept, *inputs, model=model, **named)

    def pick(
        self, *inputs: Size, candidates: Sequence[str] | None = None, model: ModelName = None, **named: Size | None
    ) -> str:
        """Return the strategy with the lowest predicted time for one workload; in a tie, the earlier strategy wins.

        By default, the candidates are all strategies that give the result.

        Raises:
            ValueError: as in `predict_ns`; there is no candidate; or inputs are batched or traced (use `pick_index`).
        """
        own = self.of(model)
        return own._chosen(None if candidates is None else tuple(candidates), inputs, named)[0]

    def pick_index(
        self, *inputs: Size, candidates: Sequence[str] | None = None, model: ModelName = None, **named: Size | None
    ) -> Int[Array, "*batch"]:
        """Return the index of the fastest candidate, `[*batch]`; the inputs may be traced.

        In a tie, the first candidate wins. By default, the candidates are `CalibratedModel.strategies`; the name of the
        fastest strategy is then `np.array(calibrated.strategies)[index]`.

        Raises:
            ValueError: as in `predict_ns`, or there is no candidate.
        """
        own = self.of(model)
        chosen = own.strategies if candidates is None else tuple(candidates)
        return own._asked("place", chosen, inputs, named)

    def in_domain(self, *inputs: Size, model: ModelName = None, **named: Size | None) -> bool | np.ndarray | Array:
        """Return whether each workload lies within the range of the timings of all strategies, `[*batch]`."""
        own, numbers = self.of(model), {}
        for name, value in own._all_inputs(inputs, named).items():
            numbers[name] = value.astype(float) if isinstance(value, jax.Array) else np.asarray(value, float)
        return own.covers(Runs(own.model, 0, numbers))


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CalibratedModel(Predictions):
    """A latency model fitted to one machine's timings. It is a pytree; the provenance and the cautions are static.

    Attributes:
        posterior: the model's coefficients and correction, with their uncertainty.
        provenance: the origin of each coefficient's value, by the coefficient's name; for example "measured".
        held_out: the prediction errors on fitted workloads and on held-out workloads, by the variant's name.
        domain: the smallest and largest measured value of each input, and of each product of two inputs ("a*b").
        noise_floor: mean relative difference between the times of two halves of the timing rounds; None for one round.
        pace_log_sd: standard deviation of the logarithm of the machine's speed, which changes from minute to minute or
            is unknown. The speed is the same for all runs, so its uncertainty widens intervals but changes no decision.
        cautions: warnings about the predictions; each warning is a sentence.
    """

    posterior: LatencyPosterior
    provenance: Mapping[str, Provenance] = dataclasses.field(metadata={"static": True})
    held_out: Mapping[str, Mapping[str, Any]]
    domain: Mapping[str, tuple[float, float]]
    noise_floor: float | None = None
    pace_log_sd: float = 0.0
    cautions: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})

    def __post_init__(self) -> None:
        if isinstance(self.provenance, Mapping):
            object.__setattr__(self, "provenance", FrozenDict(self.provenance))

    def of(self, model: str | None = None) -> "CalibratedModel":
        """Return this model; raise a `ValueError` if the argument names another model."""
        if model not in (None, self.model.name):
            raise ValueError(f"model: expected {self.model.name}, got {model!r}")
        return self

    @property
    def model(self) -> LatencyModel:
        """The latency model."""
        return self.posterior.model

    @property
    def strategies(self) -> tuple[str, ...]:
        """The strategies that `pick` and `pick_index` choose among: each strategy whose name implies no input."""
        return tuple(alternatives_of(self.model))

    def with_facts(self, **facts: Any) -> "CalibratedModel":
        """Return a copy with new values for some facts about the machine's schedule or about the programs."""
        posterior = dataclasses.replace(self.posterior, facts={**self.posterior.facts, **facts})
        return dataclasses.replace(self, posterior=posterior)

    def bounds_ns(self, run: Estimate | Pick, level: float = 0.9) -> tuple[Nanoseconds, Nanoseconds]:
        """Return the two ends of `interval_ns`, `[*batch]`, for an estimate or a pick that this model returned.

        Raises:
            ValueError: `level` is not between 0 and 1.
        """
        if not 0.0 < level < 1.0:
            raise ValueError(f"level: expected a probability between 0 and 1, got {level}")
        return _bounds(run, NormalDist().inv_cdf((1.0 + level) / 2.0), self.pace_log_sd)

    def alternatives(self, *inputs: Size, **named: Size | None) -> tuple[str, ...]:
        """Return the names of the strategies that can give the result for every given workload.

        Raises:
            ValueError: as in `predict_ns`, or an input is traced.
        """
        if not self.strategies:
            return ()
        with on_cpu(), jax.ensure_compile_time_eval():
            runs, counts = self._runs(self.strategies, inputs, named)
            _, is_possible = _answered(self.posterior, runs, counts, "each")
        if is_traced(is_possible):
            raise ValueError("alternatives: expected inputs that are numbers, got traced values; use `pick_index`")
        return tuple(np.array(self.strategies)[np.asarray(is_possible)].tolist())

    def covers(self, runs: Runs) -> bool | np.ndarray | Array:
        """Return whether each run lies within the range of the timings of all strategies, `[*batch]`."""
        inside = True
        for name, value in self.model.extents(runs).items():
            low, high = self.domain[name]
            inside = inside & (low <= value) & (value <= high)
        return inside if is_traced(inside) or np.ndim(inside) else bool(inside)

    def variant_of(self, strategy: str, *inputs: Size, **named: Size | None) -> str:
        """Return the name of a strategy's fastest variant for one workload.

        Raises:
            ValueError: as in `pick`.
        """
        return self._chosen((strategy,), inputs, named)[1]

    def decided(self, *inputs: Size, candidates: Sequence[str] | None = None, **named: Size | None) -> Pick:
        """Return the `Pick` among the candidates; by default, these are all `strategies`. The inputs may be traced.

        Raises:
            ValueError: as in `predict_ns`, or there is no candidate.
        """
        chosen = self.strategies if candidates is None else tuple(candidates)
        return self._asked("pick", chosen, inputs, named)

    def _all_inputs(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Return all inputs of a workload; the first strategy that fits the given inputs implies the rest."""
        names = [*alternatives_of(self.model)][:1] or [*self.model.strategies]
        for name in names[:-1]:
            with contextlib.suppress(ValueError):
                return all_inputs(self.model, name, inputs, named)
        return all_inputs(self.model, names[-1], inputs, named)

    def _asked(self, ask: str, strategies: tuple[str, ...], inputs: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Check the inputs on the host; return the answer named `ask` for the strategies from the compiled program."""
        runs, counts = self._runs(strategies, inputs, named)
        codes = tuple(np.ravel(runs.variant).tolist())
        if ask == "pick" and len(set(codes)) == len(codes):  # no two candidates share a variant's weights
            found, is_possible = _answered(self.posterior, runs, counts, "separate pick", codes)
        else:
            found, is_possible = _answered(self.posterior, runs, counts, ask)
        # An index is always that of a possible strategy, and traced values cannot be checked.
        if ask != "place" and not is_traced(is_possible):
            for name in np.array(strategies)[~np.asarray(is_possible)]:
                first, columns = (0,) * len(runs.shape), runs.of_shape(runs.shape).inputs
                sizes = ", ".join(f"{key} {column[first]:g}" for key, column in columns.items())
                raise ValueError(f"strategy: {str(name)!r} was not timed for this work ({sizes})")
        return found

    def _runs(
        self, strategies: tuple[str, ...], inputs: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[Runs, tuple[int, ...]]:
        """Return the runs of all variants, `[variants, *batch]`, and the number of variants of each strategy."""
        if not strategies:
            raise ValueError("candidates: expected at least one strategy, got none")
        each: list[dict[str, Any]] = [all_inputs(self.model, name, inputs, named) for name in strategies]
        variants = [strategy_of(self.model, name).variants for name in strategies]
        for values in each:
            if not is_traced(*values.values()):
                self.model.check({name: np.asarray(value, float) for name, value in values.items()})
        counts, columns = tuple(map(len, variants)), dict(each[0])
        axes = [1] * max(map(np.ndim, columns.values()))
        for name, value in columns.items():
            if any(values[name] is not value for values in each):  # implied by the name
                columns[name] = np.repeat([float(values[name]) for values in each], counts).reshape(-1, *axes)
        codes = [self.model.variants.index(name) for names in variants for name in names]
        return Runs.checked(self.model, np.array(codes, np.int32).reshape(-1, *axes), **columns), counts

    def _chosen(
        self, candidates: tuple[str, ...] | None, inputs: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[str, str]:
        """Return the fastest candidate for one workload, the first in a tie, and the candidate's fastest variant."""
        for name, value in (*zip(self.model.inputs, inputs, strict=False), *named.items()):
            own: Any = None if value is None else real_numbers(value, name)
            if is_traced(own) or np.ndim(own):
                given = "a traced value" if is_traced(own) else f"shape {np.shape(own)}"
                raise ValueError(f"{name}: expected a number for one workload, got {given}; use `pick_index`")
        by_place, by_name = (tuple(map(_hashable, values)) for values in (inputs, named.values()))
        return _choice(handle(self), candidates, by_place, tuple(zip(named, by_name, strict=True)))


def _hashable(value: Any) -> Any:
    """Return a value as the key of a cache: a number of Python."""
    return value.tolist() if hasattr(value, "tolist") else value


@functools.lru_cache(maxsize=MOST_CHOICES)
def _choice(
    known: Handle, candidates: tuple[str, ...] | None, inputs: tuple[Any, ...], named: tuple[tuple[str, Any], ...]
) -> tuple[str, str]:
    own: Any = known()
    if is_traced(*jax.tree.leaves(own.posterior)):
        raise ValueError("pick: expected a calibration of numbers, got a traced calibration; use `pick_index`")
    names = own.alternatives(*inputs, **dict(named)) if candidates is None else candidates
    with on_cpu(), jax.ensure_compile_time_eval():
        found = own._asked("each", names, inputs, dict(named))
    chosen = int(np.argmin([time_ns for time_ns, _ in found]))
    return names[chosen], own.model.variants[int(found[chosen][1])]


class _Run(NamedTuple):
    """A run of one variant: its time in ns (infinite if the variant cannot do the work), its code, and its answer."""

    time_ns: Nanoseconds
    variant: Int[Array, "*batch"]
    said: Any


def _answered(*asked: Any) -> tuple[Any, Bool[Array, "strategies"]]:
    """Return what `_program` returns. The infinite times in it are no errors, though JAX's debugging takes them so."""
    config: Any = jax.config
    if not (config.jax_debug_infs or config.jax_debug_nans):
        return _program(*asked)
    with jax.debug_infs(False), jax.debug_nans(False):
        return _program(*asked)


@functools.partial(jax.jit, static_argnames=("counts", "ask", "codes"))
def _program(
    posterior: LatencyPosterior, runs: Runs, counts: tuple[int, ...], ask: str, codes: tuple[int, ...] | None = None
) -> tuple[Any, Bool[Array, "strategies"]]:
    """Return the answer from the fastest variant of each strategy, and whether each strategy can do the work.

    If `codes` gives the variants as Python numbers, the program for a variant leaves out the terms of other variants.
    """
    says, answer = _ANSWERS[ask]
    traced, runs = jnp.ravel(jnp.asarray(runs.variant)), runs.together()

    def of_one_variant(code: Code, inputs: Mapping[str, Array]) -> tuple[_Run, Array]:
        own = dataclasses.replace(runs, variant=code, inputs=inputs)
        said, is_own = says(posterior, own), is_candidate(posterior, own)
        is_estimate = isinstance(said, Estimate)
        time_ns = jnp.where(is_own, said.time_ns if is_estimate else sum(said.values()), jnp.inf)
        said = said._replace(time_ns=time_ns) if is_estimate else said
        return _Run(time_ns, jnp.broadcast_to(code, own.shape), said), is_own

    def row(tree: Any, number: int) -> Any:
        return jax.tree.map(operator.itemgetter(number), tree)

    if codes is None:
        mapped = jax.vmap(of_one_variant)(traced, runs.inputs)
        each = [row(mapped, number) for number in range(sum(counts))]
    else:
        each = [of_one_variant(np.int32(code), row(runs.inputs, number)) for number, code in enumerate(codes)]
    found, is_possible = [], []
    for end, count in zip(np.cumsum(counts).tolist(), counts, strict=True):
        times, is_own = zip(*each[end - count : end], strict=True)
        found.append(functools.reduce(_cheaper, times))
        is_possible.append(jnp.all(functools.reduce(jnp.logical_or, is_own)))
    return answer(posterior, found), jnp.stack(is_possible)


def _cheaper(one: _Run, other: _Run) -> _Run:
    """Return the faster of two runs; in a tie, return the first run."""
    is_first = one.time_ns <= other.time_ns

    def choose(mine: Array, others: Array) -> Array:
        return jnp.where(is_first[..., None] if mine.ndim > is_first.ndim else is_first, mine, others)

    return jax.tree.map(choose, one, other)


def _place(found: Sequence[_Run]) -> Int[Array, "*batch"]:
    return jnp.argmin(jnp.stack([own.time_ns for own in found], -1), -1)


def _compared(posterior: LatencyPosterior, found: Sequence[_Run]) -> Decision:
    fused, kept = found
    alike = own_correlation(posterior, fused.variant, kept.variant)
    if posterior.alike is not None:  # rescaled, since an estimate's spread may include an unshared part
        one, other = (jnp.asarray(posterior.spread)[run.variant] for run in found)
        alike = alike * (one * other / jnp.maximum(fused.said.spread * kept.said.spread, LEAST_VARIANCE))
    return compare(fused.said, kept.said, alike)


def _decided(posterior: LatencyPosterior, found: Sequence[_Run]) -> Pick:
    place, fastest = _place(found), functools.reduce(_cheaper, found)
    margin_ns, probability = jnp.full(place.shape, jnp.inf), jnp.ones(place.shape)
    for number, own in enumerate(found):
        is_other = (place != number) & jnp.isfinite(own.time_ns)
        compared = _compared(posterior, (fastest, own))
        margin_ns = jnp.where(is_other, jnp.minimum(margin_ns, compared.margin_ns), margin_ns)
        probability = jnp.where(is_other, jnp.minimum(probability, compared.probability), probability)
    return Pick(place, fastest.time_ns, margin_ns, probability, fastest.said.log_sd())


#: Two functions for the name of each answer: a function of each run, and a function of every strategy's fastest run.
_ANSWERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "time": (corrected_terms_ns, lambda _, found: found[0].time_ns),
    "terms": (corrected_terms_ns, lambda _, found: found[0].said),
    "estimate": (estimate, lambda _, found: found[0].said),
    "each": (corrected_terms_ns, lambda _, found: [(own.time_ns, own.variant) for own in found]),
    "place": (corrected_terms_ns, lambda _, found: _place(found)),
    "decision": (estimate, _compared),
    "pick": (estimate, _decided),
    "separate pick": (estimate_of_variant, _decided),
}


@jax.jit
def _bounds(run: Estimate | Pick, sds: RealLike, pace_log_sd: RealLike) -> tuple[Nanoseconds, Nanoseconds]:
    reach = jnp.exp(sds * jnp.hypot(run.log_sd(), pace_log_sd))
    return run.time_ns / reach, run.time_ns * reach
