"""One calibrated model of a machine: the predictions, decisions and picks that follow from its posterior."""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from rlxjax._checks import is_traced
from rlxjax._html import html_of
from rlxjax._typing import Nanoseconds, RealLike, Size
from rlxjax._values import FrozenDict, by_value
from rlxjax.device._devices import Provenance
from rlxjax.fit import (
    SURE,
    Decision,
    LatencyEstimate,
    LatencyModel,
    LatencyPosterior,
    Runs,
    all_inputs,
    alternatives_of,
    coefficient_names,
    coefficient_table,
    corrected_terms_ns,
    decision,
    estimate,
    strategy_of,
)

from ._crossings import total_ns

#: Picks that are remembered at most; then all are forgotten.
MOST_PICKS = 4096

#: A time in ns first, `[*batch]`, and then what belongs to it.
_Prediction = TypeVar("_Prediction", bound=tuple)


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CalibratedModel:
    """What a machine's timings say of one latency model; a pytree, whose provenance and cautions are static.

    In every method the inputs are those of the model, by place in its order or by name, scalars or
    `[*batch]`; what a strategy's name implies, and what has a default, may be left out.

    Attributes:
        posterior: coefficients, correction and how sure they are.
        provenance: of each coefficient.
        held_out: per variant, the errors of workloads that the fit did and did not see.
        domain: the smallest and largest value measured of each input, and of the product of each two ("a*b").
        noise_floor: mean relative difference of two halves of the same campaign; None for a single round.
        pace_log_sd: standard deviation of the logarithm of the machine's speed, which changes from one minute to the
            next, or is that of an unknown machine, for all runs alike: part of intervals, of no decision.
        cautions: sentences that a user of the predictions should know.
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

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # no picks

    def _repr_html_(self) -> str:
        if is_traced(*jax.tree.leaves(self)):
            return html_of([repr(self)])
        name, log_sd = f"{self.model.name} {self.model.version}", self.posterior.coefficient_log_sd()
        known = {key: str(self.provenance.get(key, "")) for key in coefficient_names(self.coefficients)}
        errors = [
            (key, _percent(own.get("held_out")), _percent(own.get("noise_floor"))) for key, own in self.held_out.items()
        ]
        held_out = [("timed", "error where held out, %", "noise floor, %"), *errors]
        tables = [*([held_out] if errors else []), coefficient_table(self.coefficients, log_sd, known)]
        return html_of([f"{name}: {', '.join(self.strategies)}"], *tables, remarks=self.cautions)

    @functools.cached_property
    def _is_traced(self) -> bool:
        return is_traced(*jax.tree.leaves(self.posterior))

    @functools.cached_property
    def _picks(self) -> dict[tuple, str]:
        """What was asked for before, so that it is computed once."""
        return {}

    @property
    def model(self) -> LatencyModel:
        """Whose runs are predicted."""
        return self.posterior.model

    @property
    def coefficients(self) -> Any:
        """Of the model, a pytree of floats."""
        return self.posterior.coefficients

    @property
    def strategies(self) -> tuple[str, ...]:
        """The names that `pick_index` counts, in its order: those that imply no input."""
        return tuple(alternatives_of(self.model))

    def with_facts(self, **facts: Any) -> "CalibratedModel":
        """Return the same with other facts of how the machine schedules, or of what it is given to run."""
        posterior = dataclasses.replace(self.posterior, facts={**self.posterior.facts, **facts})
        return dataclasses.replace(self, posterior=posterior)

    def predict_ns(self, strategy: str, *inputs: Size, **named: Size | None) -> Nanoseconds:
        """Return the predicted latency of one run in ns, `[*batch]`: of the cheapest variant of a strategy.

        Raises:
            ValueError: an unknown strategy, a missing or impossible input, one that the strategy's name
                contradicts, or inputs for which it does not give the result (where the host can read them).
        """
        return self.estimate(strategy, *inputs, **named).time_ns

    def terms_ns(self, strategy: str, *inputs: Size, **named: Size | None) -> Mapping[str, Nanoseconds]:
        """Return the parts of `predict_ns` by name in ns; arguments as there."""
        runs = self._runs(strategy, inputs, named)
        each = [(total_ns(self.posterior, own), corrected_terms_ns(self.posterior, own)) for own in runs]
        return functools.reduce(_cheaper, each)[1]

    def estimate(self, strategy: str, *inputs: Size, **named: Size | None) -> LatencyEstimate:
        """Return the prediction with its uncertainty, `[*batch]`; arguments as in `predict_ns`."""
        each = [self._estimate(runs) for runs in self._runs(strategy, inputs, named)]
        return functools.reduce(_cheaper, each)

    def interval_ns(
        self, strategy: str, *inputs: Size, level: float = 0.9, **named: Size | None
    ) -> tuple[Nanoseconds, Nanoseconds]:
        """Return the bounds in ns between which a run's time lies with a probability, `[*batch]` each.

        The time is what the calibrate job takes for one, the lower quartile of interleaved visits at one
        pace of the machine. It is log-normal around the prediction, with the variance of the fit, that of a
        workload's own, and that of the machine's pace.

        Raises:
            ValueError: as `predict_ns`, or a level that is not between 0 and 1.
        """
        return self.bounds_ns(self.estimate(strategy, *inputs, **named), level)

    def bounds_ns(self, run: LatencyEstimate, level: float = 0.9) -> tuple[Nanoseconds, Nanoseconds]:
        """Return the bounds of `interval_ns` for an estimate by this posterior, of any runs, `[*batch]` each.

        Raises:
            ValueError: a level that is not between 0 and 1.
        """
        if not 0.0 < level < 1.0:
            raise ValueError(f"level: expected a probability between 0 and 1, got {level}")
        return _bounds(run, NormalDist().inv_cdf((1.0 + level) / 2.0), self.pace_log_sd)

    def compare(self, fused: str, kept: str, *inputs: Size, **named: Size | None) -> Decision:
        """Return whether one strategy is faster than another, and how sure that is, `[*batch]`.

        `explain` does so for the fastest two, and says why.

        Args:
            fused: the strategy to take if it is faster.
            kept: the strategy to keep otherwise.
            *inputs: by place.
            **named: by name.

        Raises:
            ValueError: as `predict_ns`.
        """
        decided = decision(self.estimate(fused, *inputs, **named), self.estimate(kept, *inputs, **named))
        return decided._replace(in_domain=self.in_domain(*inputs, **named))

    def decide(
        self, *inputs: Size, fused: str | None = None, kept: str | None = None, **named: Size | None
    ) -> Decision:
        """Return `compare(fused, kept, ...)`, by default of the model's second strategy and its first.

        It decides between two strategies, where `pick` chooses among all.
        """
        first, second, *_ = (*self.strategies, None, None)
        fused, kept = fused or second, kept or first
        if fused is None or kept is None:
            raise ValueError(f"{self.model.name}: expected two strategies to decide between, got one")
        return self.compare(fused, kept, *inputs, **named)

    def alternatives(self, *inputs: Size, **named: Size | None) -> tuple[str, ...]:
        """Return the strategies that give the result of every workload, in the order in which ties are resolved.

        Raises:
            ValueError: as `predict_ns`, or inputs that are traced.
        """
        values = self._all_inputs(inputs, named)
        if is_traced(*values.values(), *jax.tree.leaves(self.posterior.facts)):
            raise ValueError("alternatives: expected inputs that are numbers, got traced ones; see `pick_index`")
        runs = Runs.checked(self.model, 0, **values)
        with jax.ensure_compile_time_eval():
            is_same = np.asarray(self.model.same_result(runs, self.posterior.facts))
        places = {
            name: [self.model.variants.index(v) for v in s.variants] for name, s in alternatives_of(self.model).items()
        }
        return tuple(name for name, own in places.items() if is_same[..., own].any(-1).all())

    def pick(self, *inputs: Size, candidates: Sequence[str] | None = None, **named: Size | None) -> str:
        """Return the strategy with the lowest prediction among those that give the same result; of equals the first.

        Args:
            *inputs: by place, the sizes of one workload.
            candidates: strategies to choose among; all of `alternatives` unless given.
            **named: by name.

        Returns:
            The name that also implies the inputs, if there is one.

        Raises:
            ValueError: as `predict_ns`, no candidate, or sizes that are arrays or traced, for which `pick_index` is.
        """
        self._check_one_workload(inputs, named)
        chosen = _some(self.alternatives(*inputs, **named) if candidates is None else candidates)
        return self.name_of(self.cheapest(chosen, *inputs, **named), *inputs, **named)

    def cheapest(self, candidates: tuple[str, ...], *inputs: Size, **named: Size | None) -> str:
        """Return the candidate with the lowest prediction for one workload, of equals the first; remembered.

        Raises:
            ValueError: as `pick`.
        """
        self._check_one_workload(inputs, named)
        candidates = _some(candidates)
        key = (candidates, *_numbers(inputs, named))
        if key not in self._picks:
            with jax.ensure_compile_time_eval():
                each = [self._runs(name, inputs, named) for name in candidates]
                times_ns = [min(float(total_ns(self.posterior, runs)) for runs in own) for own in each]
            self._remember(key, candidates[int(np.argmin(times_ns))])
        return self._picks[key]

    def pick_index(
        self, *inputs: Size, candidates: Sequence[str] | None = None, **named: Size | None
    ) -> Int[Array, "*batch"]:
        """Return the place of the cheapest strategy, of equals the first, `[*batch]`; it traces.

        Args:
            *inputs: by place.
            candidates: strategies to choose among; `strategies` unless given.
            **named: by name.

        Returns:
            Places in the candidates: `np.array(calibrated.strategies)[index]` are names.

        Raises:
            ValueError: as `predict_ns`, or no candidate.
        """
        times_ns = []
        for name in _some(self.strategies if candidates is None else candidates):
            values = all_inputs(self.model, name, inputs, named)
            self.model.check(values)
            each = [
                total_ns(self.posterior, Runs.checked(self.model, variant, **values))
                for variant in strategy_of(self.model, name).variants
            ]
            times_ns.append(functools.reduce(jnp.minimum, each))
        return jnp.argmin(jnp.stack(jnp.broadcast_arrays(*times_ns), -1), -1)

    def decided(
        self, *inputs: Size, candidates: Sequence[str] | None = None, **named: Size | None
    ) -> tuple[Int[Array, "*batch"], Bool[Array, "*batch"]]:
        """Return the place of the cheapest strategy, and whether it beats every other one surely, `[*batch]` each.

        Sure is what `Decision.verdict` says of the two estimates. It traces.

        Args:
            *inputs: by place.
            candidates: strategies to choose among; `strategies` unless given.
            **named: by name.

        Raises:
            ValueError: as `predict_ns`, or no candidate.
        """
        chosen = _some(self.strategies if candidates is None else candidates)
        runs = [self.estimate(name, *inputs, **named) for name in chosen]
        place = jnp.argmin(jnp.stack(jnp.broadcast_arrays(*(run.time_ns for run in runs)), -1), -1)
        fastest, is_sure = functools.reduce(_cheaper, runs), jnp.ones(place.shape, bool)
        for number, run in enumerate(runs):
            is_sure &= (place == number) | (decision(fastest, run).probability >= SURE)
        return place, is_sure

    def variant_of(self, strategy: str, *inputs: Size, **named: Size | None) -> str:
        """Return the variant that a strategy runs for one workload: the cheapest of its own; remembered.

        Raises:
            ValueError: as `pick`.
        """
        self._check_one_workload(inputs, named)
        key = ("variant", strategy, *_numbers(inputs, named))
        if key not in self._picks:
            with jax.ensure_compile_time_eval():
                each = self._runs(strategy, inputs, named)
                times_ns = [float(total_ns(self.posterior, runs)) for runs in each]
            self._remember(key, self.model.variants[int(each[int(np.argmin(times_ns))].variant)])
        return self._picks[key]

    def name_of(self, strategy: str, *inputs: Size, **named: Size | None) -> str:
        """Return what a strategy is called for these inputs: by the name that implies most of them."""
        values, own = all_inputs(self.model, strategy, inputs, named), strategy_of(self.model, strategy)
        names = [
            name
            for name, other in self.model.strategies.items()
            if other.variants == own.variants
            and all(np.all(np.asarray(values[key]) == value) for key, value in other.fixed.items())
        ]
        return max(names, key=lambda name: len(self.model.strategies[name].fixed))

    def in_domain(self, *inputs: Size, **named: Size | None) -> bool | Array:
        """Whether workloads lie within the values that were measured, of all strategies together, `[*batch]`."""
        values = self._all_inputs(inputs, named)
        inside = jnp.asarray(True)
        numbers = {key: jnp.asarray(v, jnp.result_type(float)) for key, v in values.items()}
        for name, value in self.model.extents(numbers):
            low, high = self.domain[name]
            inside = inside & (value >= low) & (value <= high)
        return inside if is_traced(inside) or inside.ndim else bool(inside)

    def _all_inputs(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Return every input of a workload; where every strategy implies one, as the first that agrees does."""
        names = [*alternatives_of(self.model)][:1] or [*self.model.strategies]
        for name in names[:-1]:
            with contextlib.suppress(ValueError):
                return all_inputs(self.model, name, inputs, named)
        return all_inputs(self.model, names[-1], inputs, named)

    def _remember(self, key: tuple, name: str) -> None:
        if len(self._picks) >= MOST_PICKS:
            self._picks.clear()
        self._picks[key] = name

    def _check_one_workload(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> None:
        for name, value in (*zip(self.model.inputs, inputs, strict=False), *named.items()):
            if is_traced(value) or np.ndim(value):
                given = "a traced value" if is_traced(value) else f"shape {np.shape(value)}"
                raise ValueError(f"{name}: expected a number, that of one workload, got {given}; see `pick_index`")
        if self._is_traced:
            raise ValueError("pick: expected a calibration of numbers, got a traced one; see `pick_index`")

    def _runs(self, strategy: str, inputs, named) -> list[Runs]:
        """Return the runs of a strategy's variants that give the result."""
        values = all_inputs(self.model, strategy, inputs, named)
        self.model.check(values)
        variants = strategy_of(self.model, strategy).variants
        runs = [Runs.checked(self.model, variant, **values) for variant in variants]
        is_same = self.model.same_result(runs[0], self.posterior.facts)
        if not is_traced(is_same):  # which it is within a program even for sizes that are not
            places = [list(self.model.variants).index(variant) for variant in variants]
            is_candidate = np.asarray(is_same)[..., places]
            if not is_candidate.any(-1).all():
                sizes = ", ".join(f"{name} {np.ravel(value)[0]}" for name, value in values.items())
                raise ValueError(f"strategy: {strategy!r} was not timed for such work ({sizes})")
            runs = [own for place, own in enumerate(runs) if is_candidate[..., place].any()]
        return runs

    def _estimate(self, runs: Runs) -> LatencyEstimate:
        found = estimate(self.posterior, runs)
        is_same = jnp.asarray(self.model.same_result(runs, self.posterior.facts))[..., runs.variant]
        return found._replace(time_ns=jnp.where(is_same, found.time_ns, jnp.inf))


def _some(candidates: Sequence[str]) -> tuple[str, ...]:
    chosen = tuple(candidates)
    if not chosen:
        raise ValueError("candidates: expected a strategy at least, got none")
    return chosen


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _numbers(inputs: Sequence[Any], named: Mapping[str, Any]) -> tuple:
    """Return scalar inputs as what a dictionary can be asked for."""
    numbers = [value.item() if hasattr(value, "item") else value for value in (*inputs, *named.values())]
    return (*numbers, *named)


@jax.jit
def _cheaper(one: _Prediction, other: _Prediction) -> _Prediction:
    """Return the smaller of two predictions, a time with what belongs to it, of equals the first."""
    is_first = one[0] <= other[0]

    def choose(mine: Array, others: Array) -> Array:
        return jnp.where(is_first[..., None] if mine.ndim > is_first.ndim else is_first, mine, others)

    return jax.tree.map(choose, one, other)


@jax.jit
def _bounds(run: LatencyEstimate, sds: RealLike, pace_log_sd: RealLike) -> tuple[Nanoseconds, Nanoseconds]:
    """Return the times of a run that lie so many standard deviations of its logarithm below and above."""
    reach = jnp.exp(sds * jnp.hypot(run.log_sd(), pace_log_sd))
    return run.time_ns / reach, run.time_ns * reach
