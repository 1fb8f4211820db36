"""The interface of latency models. A model predicts a run's time as a sum of terms, and has a prior of coefficients."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from rlxjax._checks import (
    broadcast_shape,
    check_at_least,
    check_positive,
    check_shapes,
    is_traced,
    real_numbers,
    unmasked,
)
from rlxjax._counts import Columns, size_as_float
from rlxjax._typing import Code, RealLike
from rlxjax._values import FrozenDict, by_value

C = TypeVar("C")

#: The standard deviation of each coefficient's logarithm in a wide prior. A factor of 50 is two standard deviations.
WIDE_LOG_SD = 2.0
#: The unit of a coefficient by the ending of its name.
UNIT_ENDINGS = {"bytes_per_ns": "bytes/ns", "flop_per_ns": "FLOP/ns", "steps_per_ns": "steps/ns"}
UNIT_ENDINGS |= {"_ns": "ns", "_bytes": "bytes", "_rows": "rows"}


def unit_of(name: str) -> str:
    """Return the unit of a coefficient from its name.

    Examples:
        >>> unit_of("upload_bytes_per_ns"), unit_of("host_parallel_gain")
        ('bytes/ns', '1')
    """
    return next((unit for suffix, unit in UNIT_ENDINGS.items() if name.endswith(suffix)), "1")


def coefficient_names(coefficients: Any) -> list[str]:
    """Return the names of coefficients (fields of a dataclass or keys of a dict), in the order of `jax.tree.leaves`.

    Examples:
        >>> coefficient_names({"b_ns": 1.0, "a_ns": 2.0})
        ['a_ns', 'b_ns']
    """
    paths = jax.tree_util.tree_leaves_with_path(coefficients)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]


def named(coefficients: Any) -> Mapping[str, Any]:
    """Return a dict from the name to the value of each coefficient."""
    return dict(zip(coefficient_names(coefficients), jax.tree.leaves(coefficients), strict=True))


def vector(coefficients: Any) -> Float[Array, "c"]:
    """Return coefficients as a vector, in the order of `coefficient_names`."""
    return jnp.stack([jnp.asarray(leaf, jnp.result_type(float)) for leaf in jax.tree.leaves(coefficients)])


@by_value
class LatencyPrior(NamedTuple, Generic[C]):
    """The prior of a model: a log-normal distribution for each coefficient, and the prior mean of the correction.

    Attributes:
        median: the median of each coefficient, in a dictionary or dataclass of floats.
        log_sd: the standard deviation of each coefficient's logarithm, in the same structure as `median`.
        correction: the prior mean of each feature's weight, `[variants, features]`; 0 means no correction.
    """

    median: C
    log_sd: C
    correction: Float[np.ndarray, "variants features"] | float = 0.0


def wide_prior(median: C, **narrower: float) -> LatencyPrior[C]:
    """Return a prior that fixes little more than the order of magnitude of each coefficient.

    Args:
        median: the median of each coefficient.
        **narrower: by coefficient name, the standard deviation of the coefficient's logarithm. The default is 2.

    Examples:
        >>> wide_prior({"call_ns": 1e4, "bytes_per_ns": 10.0}, call_ns=0.5).log_sd
        {'bytes_per_ns': 2.0, 'call_ns': 0.5}
    """
    names = coefficient_names(median)
    sds = [narrower.get(name, WIDE_LOG_SD) for name in names]
    return LatencyPrior(median, jax.tree.structure(median).unflatten(sds))


#: A mapping from names to numbers, or to lists of numbers. These facts describe how a machine schedules programs.
Facts = Mapping[str, Any]
NO_FACTS: Facts = FrozenDict()


class Input(NamedTuple):
    """An input of a model: a size of a piece of work, such as its number of rows, and the allowed values of this size.

    Attributes:
        unit: the unit of the size, in the plural, such as "rows".
        least: the smallest allowed value.
        step: the allowed values are multiples of `step`. Use 1 for whole numbers; 0 allows any real number.
        most: the largest value that is tried in a search for a crossover, a size at which the fastest strategy changes.
        default: the value if a caller leaves the input out. None means that a caller must give a value.
    """

    unit: str
    least: float = 1.0
    step: int = 1
    most: float = 2.0**17
    default: float | None = None


class StrategySpec(NamedTuple):
    """A strategy: a way to do a piece of work with one variant, or with the fastest of several variants.

    Attributes:
        variants: the names of the variants that the strategy may run. It runs the one with the shortest predicted time.
        fixed: the values, by input name, of inputs that the strategy fixes. `pick` ignores strategies that fix inputs.
    """

    variants: tuple[str, ...]
    fixed: Mapping[str, float] = FrozenDict()


class LatencyModel(Protocol):
    """A model of the time of one kind of work. Derive your model from this class; most methods have defaults.

    A model is immutable and hashable, and contains no measurement of a machine. A fit finds a machine's coefficients.
    The calibration file contains the machine's `facts`, which describe how the machine schedules programs.

    Attributes:
        name: the name of the model in a calibration file.
        version: the version of the formula. Increase the version when the formula changes.
        inputs: the sizes of a piece of work, by name. Searches for a crossover (`Input.most`) vary the first input.
        kernels: the unit of each column of `Runs.kernels`, by name. Without names, a run has sizes only.
        variants: the names of the programs that do the work. Each program can be timed.
        is_choice: whether the variants are alternatives for the same work, so that `pick` may choose among them.
        prior: the prior of the coefficients. If a coefficient has a unit, its name ends in the unit, such as `_ns`.

    Examples:
        >>> from rlxjax.fit import wide_prior
        >>> class Copy(LatencyModel):
        ...     name, version = "copy", 1
        ...     inputs = {"n_bytes": Input("bytes")}
        ...     variants = ("copy",)
        ...     prior = wide_prior({"call_ns": 1e3, "bytes_per_ns": 10.0})
        ...     def terms_ns(self, coefficients, runs, facts):
        ...         moved_ns = runs.inputs["n_bytes"] / coefficients["bytes_per_ns"]
        ...         return {"call_ns": coefficients["call_ns"], "moved_ns": moved_ns}
        >>> Copy().strategies
        {'copy': StrategySpec(variants=('copy',), fixed={})}
    """

    name: str
    version: int
    inputs: Mapping[str, Input]
    kernels: Mapping[str, str] = FrozenDict()
    variants: tuple[str, ...]
    is_choice: bool = True

    @property
    def prior(self) -> LatencyPrior[Any]:
        """The prior of the coefficients, for a machine without timings."""
        ...

    def terms_ns(self, coefficients: Any, runs: "Runs", facts: Facts) -> Mapping[str, RealLike]:
        """Return terms in ns, by name. The sum of the terms is the predicted time of each run, `[*batch]`.

        JAX traces this method. The terms of a run must not depend on other runs. Each term must be positive, must be a
        smooth function of the coefficients, and must have a shape that broadcasts to `[*batch]`.

        Args:
            coefficients: values in the structure of `prior.median`: scalars, or `[*batch]` if runs have no kernels.
            runs: runs of this model.
            facts: the facts that describe how the machine schedules programs.
        """
        ...

    def time_ns(self, coefficients: Any, runs: "Runs", facts: Facts) -> RealLike:
        """Return the sum of the terms in ns, `[*batch]`. You may override this method to speed up compilation."""
        return functools.reduce(jnp.add, map(jnp.asarray, self.terms_ns(coefficients, runs, facts).values()))

    @property
    def strategies(self) -> Mapping[str, StrategySpec]:
        """The strategies by name. By default, each variant is a strategy with the variant's name."""
        return {name: StrategySpec((name,)) for name in self.variants}

    @property
    def facts(self) -> Facts:
        """The facts that are used if a calibration contains no facts."""
        return NO_FACTS

    def same_result(self, runs: "Runs", facts: Facts) -> Bool[Array | np.ndarray, "*batch variants"]:
        """Return whether each variant gives the result that the run requests. `pick` chooses only variants that do."""
        return np.ones((*runs.shape, len(self.variants)), bool)

    def impossible(self, facts: Facts) -> Sequence[str]:
        """Return the names of the variants that cannot run at any size on the machine; by default, no names."""
        return ()

    def features(self, runs: "Runs", facts: Facts) -> Float[Array | np.ndarray, "*batch features"]:
        """Return the features of the correction, a small fitted factor on a variant's time; by default, no features."""
        return np.zeros((*runs.shape, 0))

    def scatter(self, runs: "Runs", facts: Facts) -> RealLike:
        """Return a factor for each run, `[*batch]`, that multiplies the spread of the run's variant; by default, 1."""
        return 1.0

    def own_log_sd(self, coefficients: Any, runs: "Runs", facts: Facts) -> RealLike:
        """Return a standard deviation of each run's log time beyond the fitted spread, `[*batch]`; by default, 0."""
        return 0.0

    def folds(self, runs: "Runs") -> Sequence[np.ndarray]:
        """Return arrays `[n]`. Each validation fold leaves out all runs with the same value in one of the arrays."""
        return [*map(np.asarray, runs.inputs.values())]

    def check(self, values: Mapping[str, Any]) -> None:
        """Raise a ValueError if no run can have this combination of (concrete) sizes; by default, raise nothing."""

    def extents(self, runs: "Runs") -> dict[str, Any]:
        """Return quantities of runs by name, `[*batch]`. The quantities' ranges are a calibration's domain.

        By default, the quantities are the inputs and the products of two inputs.
        """
        # JAX sorts the keys of a dictionary, so the model's order is restored.
        sizes = {name: runs.inputs[name] for name in self.inputs}
        pairs = combinations(sizes, 2)
        return sizes | {f"{one}*{other}": sizes[one] * sizes[other] for one, other in pairs}

    def grid(self) -> "Runs":
        """Return the runs that `rlxjax calibrate` may time, `[n]`; by default, each variant at a few sizes."""
        sizes = {}
        for name, entry in self.inputs.items():
            # Sizes grow by factors of 4, up to `most` or to 65,536 times the smallest size.
            step, spaced = max(entry.step, 1), max(entry.least, 1.0) * 4.0 ** np.arange(9)
            spaced = step * np.ceil(spaced[spaced <= entry.most] / step)
            sizes[name] = spaced if entry.default is None else [float(entry.default)]
        columns = np.meshgrid(np.arange(len(self.variants)), *sizes.values(), indexing="ij")
        variant, *inputs = (column.ravel() for column in columns)
        return Runs.checked(self, variant, **dict(zip(self.inputs, inputs, strict=True)))


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Runs:
    """Runs of a model, as columns.

    Attributes:
        model: the model of the runs.
        variant: the variant of each run, as an index into `model.variants`, a scalar or `[*batch]`.
        inputs: the column of each input, by name, as floats, a scalar or `[*batch]`.
        kernels: columns with an entry for each kernel of a run, by name, `[*batch, kernels]`; empty if the model
            names no kernels. Rows of zeros make the numbers of kernels equal.
    """

    model: LatencyModel = dataclasses.field(metadata={"static": True})
    variant: Code
    inputs: Mapping[str, Any]
    kernels: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def checked(cls, model: LatencyModel, variant: str | Sequence[Any] | Code, **inputs: Columns) -> "Runs":
        """Build runs from variants, given as names or indices, and from inputs, given by name.

        Raises:
            ValueError: a variant or an input is unknown, an input is missing, a size is not allowed, shapes do not
                broadcast, or the model's runs have kernels.

        Examples:
            >>> from rlxjax.models import FFT
            >>> Runs.checked(FFT, "fft", batch=[8, 64], n_fft=256).shape
            (2,)
        """
        check_takes_sizes(model)
        codes = variant_codes(model, variant)
        values: dict[str, Any] = {name: inputs.get(name, entry.default) for name, entry in model.inputs.items()}
        wrong = [f"got {name!r}" for name in inputs if name not in model.inputs]
        wrong += [f"{name!r} is missing" for name, value in values.items() if value is None]
        if wrong:
            raise ValueError(f"{model.name}: expected the inputs {', '.join(model.inputs)}; {wrong[0]}")
        for name, entry in model.inputs.items():
            # Predictions are smooth in sizes, so a crossover may lie between whole numbers.
            check_size(values[name], name, entry, entry.step if entry.step > 1 else 0)
        check_shapes(variant=codes, **values)
        return cls(model, codes, {name: size_as_float(value, name) for name, value in values.items()})

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape to which the variants and the inputs broadcast."""
        return broadcast_shape(np.shape(self.variant), *map(np.shape, self.inputs.values()))

    def hull(self) -> dict[str, tuple[float, float]]:
        """Return the domain of these runs: the smallest and the largest value of each quantity in `model.extents`."""
        found = self.model.extents(jax.tree.map(lambda column: np.asarray(column, float), self))
        return {name: (float(np.min(value)), float(np.max(value))) for name, value in found.items()}

    def together(self) -> "Runs":
        """Return the same runs with every column broadcast to `shape`, as JAX arrays."""
        return self.of_shape(self.shape, jnp)

    def of_shape(self, shape: tuple[Any, ...], xp: Any = np) -> "Runs":
        """Return the same runs with columns broadcast to `shape` (`[*shape, kernels]`), as arrays of `xp`."""

        def spread(value: Any) -> Any:
            return xp.broadcast_to(xp.asarray(value), shape)

        kernels = {
            name: xp.broadcast_to(xp.asarray(value), (*shape, np.shape(value)[-1]))
            for name, value in self.kernels.items()
        }
        inputs = {name: spread(value) for name, value in self.inputs.items()}
        return Runs(self.model, spread(self.variant), inputs, kernels)


def smallest_run(model: LatencyModel) -> Runs:
    """Return a run of the smallest size, and of one empty kernel if the model's runs have kernels."""
    inputs = {name: np.asarray(max(entry.least, 1.0)) for name, entry in model.inputs.items()}
    return Runs(model, 0, inputs, {name: np.zeros(1) for name in model.kernels})


def check_takes_sizes(model: LatencyModel) -> None:
    """Check that sizes alone make a run of a model, which is so unless its runs have kernels."""
    if model.kernels:
        raise ValueError(f"{model.name}: expected a program, whose kernels give the inputs, got sizes")


def variant_codes(model: LatencyModel, variant: str | Sequence[Any] | Code, name: str = "variant") -> Code:
    """Return variants as indices into `model.variants`. The variants are given as names or as indices."""
    if is_traced(variant):
        return variant  # pyright: ignore[reportReturnType]
    array, known = np.asarray(unmasked(variant, name)), list(model.variants)
    if array.dtype.kind in "UO":
        names = [str(one) for one in array.flat]
        for one in names:
            if one not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}, got {one!r}")
        codes = np.array([known.index(one) for one in names], np.int32).reshape(array.shape)
        return int(codes) if codes.ndim == 0 else codes
    if array.dtype.kind not in "iu" or (array.size and not 0 <= array.min() <= array.max() < len(known)):
        raise ValueError(f"{name}: expected names, or indices from 0 to {len(known) - 1}, got {variant}")
    # JAX would treat a list as a pytree of numbers, so a list becomes an array.
    return int(array) if array.ndim == 0 else array.astype(np.int32)


def check_size(value: Columns, name: str, entry: Input, step: int) -> None:
    """Check that the values of an input are allowed. Traced values are not checked."""
    if is_traced(value):
        return
    check_at_least(value, name, entry.least, "size")
    if step:
        flat = np.asarray(value, np.float64).reshape(-1)
        wrong = flat[flat % step != 0]
        if wrong.size:
            wanted = {1: "a whole number", 2: "an even number"}.get(step, f"a multiple of {step}")
            raise ValueError(f"{name}: expected {wanted}, got {wrong[0]:g}")


def check_timed_size(value: Columns, name: str, entry: Input) -> None:
    """Check the values of an input of timed runs. Whole numbers must be positive, since nothing takes no time."""
    if entry.step and entry.least <= 0.0:
        check_positive(value, name, "size")
    check_size(value, name, entry, entry.step)


def alternatives_of(model: LatencyModel) -> dict[str, StrategySpec]:
    """Return the strategies that `pick` may choose: all without `fixed` inputs; none if `is_choice` is False."""
    return {name: strategy for name, strategy in model.strategies.items() if model.is_choice and not strategy.fixed}


def strategy_of(model: LatencyModel, name: str) -> StrategySpec:
    """Return the strategy of this name. Upper case counts as lower case, and a hyphen as an underscore.

    Raises:
        ValueError: the model has no strategy of this name.
    """
    wanted = str(name).strip().lower().replace("-", "_")
    if wanted not in model.strategies:
        raise ValueError(f"strategy: expected one of {', '.join(model.strategies)}, got {name!r}")
    return model.strategies[wanted]


def all_inputs(
    model: LatencyModel,
    strategy: str,
    given: Sequence[Columns],
    named: Mapping[str, Columns | None],
) -> dict[str, Columns]:
    """Return the value of each input by name: the given value, the strategy's `fixed` value, or the default.

    Raises:
        ValueError: an input is unknown, missing or given twice, or its value differs from the strategy's `fixed` value.
    """
    check_takes_sizes(model)
    fixed, names = strategy_of(model, strategy).fixed, list(model.inputs)
    if len(given) > len(names):
        raise ValueError(f"{model.name}: expected at most {len(names)} inputs ({', '.join(names)}), got {len(given)}")
    values = dict(zip(names, given, strict=False))
    for name, value in named.items():
        if name not in names:
            raise ValueError(f"{name}: not an input of {model.name}, which has {', '.join(names)}")
        if name in values:
            raise ValueError(f"{name}: given twice, by position and by name")
        if value is not None:
            values[name] = value
    for name, value in fixed.items():
        own = values.setdefault(name, value)
        if not is_traced(own) and np.any(np.asarray(own) != value):
            raise ValueError(f"{name}: the strategy {strategy!r} implies {value:g}, got {own}")
    for name, entry in model.inputs.items():
        if name not in values:
            if entry.default is None:
                raise ValueError(f"{name}: expected a number of {entry.unit}, got none")
            values[name] = entry.default
    for name, entry in model.inputs.items():
        values[name] = unmasked(values[name], name)
        real_numbers(values[name], name, f"number of {entry.unit}")
    return {name: values[name] for name in names}
