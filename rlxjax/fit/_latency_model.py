"""The interface of a latency model: the time of a run as a sum of terms, and the priors of the coefficients."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from rlxjax._checks import broadcast_shape, check_at_least, check_positive, check_shapes, is_traced
from rlxjax._counts import Columns, size_as_float
from rlxjax._typing import Code, RealLike
from rlxjax._values import FrozenDict, by_value

from ._lists import as_lists, batch_shape, places_of

C = TypeVar("C")

#: With a log-sd of 2, timings can change a coefficient by a factor of 50.
WIDE_LOG_SD = 2.0
#: The units of coefficients by the endings of their names.
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
    """Return the names of coefficients in the order of their leaves: fields of a dataclass, or keys of a dict.

    Examples:
        >>> coefficient_names({"b_ns": 1.0, "a_ns": 2.0})
        ['a_ns', 'b_ns']
    """
    paths = jax.tree_util.tree_leaves_with_path(coefficients)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]


def named(coefficients: Any) -> Mapping[str, Any]:
    """Return coefficients by name."""
    return dict(zip(coefficient_names(coefficients), jax.tree.leaves(coefficients), strict=True))


def vector(coefficients: Any) -> Float[Array, "c"]:
    """Return coefficients as one vector, in the order of their names."""
    return jnp.stack([jnp.asarray(leaf, jnp.result_type(float)) for leaf in jax.tree.leaves(coefficients)])


@by_value
class LatencyPrior(NamedTuple, Generic[C]):
    """The belief before timings: a log-normal prior of every coefficient, and the prior mean of the correction.

    Attributes:
        median: the medians of the coefficients: a dictionary or dataclass of floats.
        log_sd: standard deviation of each coefficient's logarithm, in the same structure.
        correction: prior mean of the correction's weights, `[variants, features]`, or 0 for no correction. A fit of
            the terms alone ignores the correction.
    """

    median: C
    log_sd: C
    correction: Float[np.ndarray, "variants features"] | float = 0.0


def wide_prior(median: C, **narrower: float) -> LatencyPrior[C]:
    """Return a prior that knows only each coefficient's order of magnitude.

    Args:
        median: the medians of the coefficients.
        **narrower: the log standard deviations of some coefficients, by name.

    Examples:
        >>> wide_prior({"call_ns": 1e4, "bytes_per_ns": 10.0}, call_ns=0.5).log_sd
        {'bytes_per_ns': 2.0, 'call_ns': 0.5}
    """
    names = coefficient_names(median)
    sds = [narrower.get(name, WIDE_LOG_SD) for name in names]
    return LatencyPrior(median, jax.tree.structure(median).unflatten(sds))


#: How a machine schedules programs: numbers, or lists of numbers, by name.
Facts = Mapping[str, Any]
NO_FACTS: Facts = FrozenDict()


class Input(NamedTuple):
    """One size of a piece of work.

    Attributes:
        unit: the unit of the size, in the plural: "rows".
        least: the least allowed value.
        step: values are multiples of this step: 1 for whole numbers, 0 for any real number.
        most: the largest value in a search for a crossover.
        default: the value if a caller gives no value. A caller must give an input without a default.
        is_list: whether a run has a list of sizes, padded with zeros; the column is then `[*batch, entries]`. `least`
            and `step` hold for each nonzero entry. The default 0 is an empty list.
    """

    unit: str
    least: float = 1.0
    step: int = 1
    most: float = 2.0**17
    default: float | None = None
    is_list: bool = False


class StrategySpec(NamedTuple):
    """A strategy for a piece of work, under the name that a user sees.

    Attributes:
        variants: the variants that the strategy may run; the cheapest variant runs.
        fixed: inputs that the strategy's name implies. A pick considers only strategies without such inputs.
    """

    variants: tuple[str, ...]
    fixed: Mapping[str, float] = FrozenDict()


class LatencyModel(Protocol):
    """A model of the time of one kind of work. Derive from this class; methods with a body have usable defaults.

    A model is immutable and hashable, and holds no numbers of any machine. Fits find the coefficients, and the
    calibration file gives the machine's scheduling `facts`.

    Attributes:
        name: the name of the model in a calibration file.
        version: the version of the formula. Increase the version when the formula changes.
        inputs: the sizes of a piece of work by name. Crossovers are searched along the first input.
        variants: names of the programs that can be timed, normally alternatives for one piece of work.
        is_choice: whether the variants are such alternatives, so that a pick may choose; else each does its own work.
        prior: median and log standard deviation of every coefficient. The names end in units.

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
    variants: tuple[str, ...]
    is_choice: bool = True

    @property
    def prior(self) -> LatencyPrior[Any]:
        """The prior of the coefficients of a machine without timings."""
        ...

    def terms_ns(self, coefficients: Any, runs: "Runs", facts: Facts) -> Mapping[str, RealLike]:
        """Return the terms of the runs' times in ns, by name; their sum `[*batch]` is the prediction.

        JAX traces this method. Each row depends only on its own inputs. Terms are positive and smooth in the
        coefficients, and have any shape that broadcasts to the sum's.

        Args:
            coefficients: the type of `prior.median`; numbers, or also `[*batch]` for a model without lists.
            runs: runs of this model.
            facts: the machine's scheduling facts.
        """
        ...

    def time_ns(self, coefficients: Any, runs: "Runs", facts: Facts) -> RealLike:
        """Return the sum of the terms in ns, `[*batch]`; override this method with code that compiles faster."""
        return functools.reduce(jnp.add, map(jnp.asarray, self.terms_ns(coefficients, runs, facts).values()))

    @property
    def strategies(self) -> Mapping[str, StrategySpec]:
        """The strategies by the names that users see. Each variant is its own strategy by default."""
        return {name: StrategySpec((name,)) for name in self.variants}

    @property
    def facts(self) -> Facts:
        """The facts for a calibration without its own facts."""
        return NO_FACTS

    def same_result(self, runs: "Runs", facts: Facts) -> Bool[Array | np.ndarray, "*batch variants"]:
        """Return which variants give the requested result, so that a pick may choose among these variants."""
        return np.ones((*runs.shape, len(self.variants)), bool)

    def impossible(self, facts: Facts) -> Sequence[str]:
        """Return the variants that can do no work of any size; none by default."""
        return ()

    def features(self, runs: "Runs", facts: Facts) -> Float[Array | np.ndarray, "*batch features"]:
        """Return the features of a variant's small correction; none by default."""
        return np.zeros((*runs.shape, 0))

    def scatter(self, runs: "Runs", facts: Facts) -> RealLike:
        """Return the factor of each run's spread within its variant, `[*batch]`; 1 by default."""
        return 1.0

    def own_log_sd(self, coefficients: Any, runs: "Runs", facts: Facts) -> RealLike:
        """Return the log standard deviation of a run's time that the model knows in advance, `[*batch]`.

        This uncertainty belongs to no coefficient and adds to the fitted spread; 0 by default.
        """
        return 0.0

    def folds(self, runs: "Runs") -> Sequence[np.ndarray]:
        """Return columns `[n]`. Validation leaves out runs with equal values of a column together."""
        columns = map(np.asarray, runs.inputs.values())
        return [column if column.ndim < 2 else places_of(column) for column in columns]

    def check(self, values: Mapping[str, Any]) -> None:
        """Refuse combinations of concrete sizes that no run can have; refuses nothing by default."""

    def extents(self, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Return the quantities that a domain bounds, `[*batch]` by name: by default, inputs and products of two.

        A list counts as its sum.
        """
        sizes = {name: value.sum(-1) if self.inputs[name].is_list else value for name, value in values.items()}
        pairs = [(f"{one}*{other}", sizes[one] * sizes[other]) for one, other in combinations(sizes, 2)]
        return [*sizes.items(), *pairs]

    def grid(self) -> "Runs":
        """Return the runs that a calibrate job may time, `[n]`: by default, every variant at a few sizes."""
        sizes = {}
        for name, entry in self.inputs.items():
            # Sizes grow by factors of 4, up to 65,536 times the least size or to the most.
            step, spaced = max(entry.step, 1), max(entry.least, 1.0) * 4.0 ** np.arange(9)
            spaced = step * np.ceil(spaced[spaced <= entry.most] / step)
            sizes[name] = spaced if entry.default is None else [float(entry.default)]
        columns = np.meshgrid(np.arange(len(self.variants)), *sizes.values(), indexing="ij")
        variant, *inputs = (column.ravel() for column in columns)
        columns = zip(self.inputs.items(), inputs, strict=True)
        return Runs.checked(self, variant, **{n: own[:, None] if entry.is_list else own for (n, entry), own in columns})


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Runs:
    """Runs of a model. Every column is a scalar or `[*batch]`; the column of a list is `[*batch, entries]`.

    Attributes:
        model: the model of the runs.
        variant: indices into `model.variants`.
        inputs: the sizes by name, floats.
    """

    model: LatencyModel = dataclasses.field(metadata={"static": True})
    variant: Code
    inputs: Mapping[str, Any]

    @classmethod
    def checked(cls, model: LatencyModel, variant: str | Sequence[Any] | Code, **inputs: Columns) -> "Runs":
        """Build runs from names or indices of variants and from the sizes of the work.

        The lists of different runs may differ in length: zeros pad all lists to one length.

        Raises:
            ValueError: an unknown variant or input, a missing input, an impossible size, shapes that do not
                broadcast, or lists of one run with different lengths.

        Examples:
            >>> from rlxjax.models import FFT
            >>> Runs.checked(FFT, "fft", batch=[8, 64], n_fft=256).shape
            (2,)
        """
        codes = variant_codes(model, variant)
        values: dict[str, Any] = {name: inputs.get(name, entry.default) for name, entry in model.inputs.items()}
        wrong = [f"got {name!r}" for name in inputs if name not in model.inputs]
        wrong += [f"{name!r} is missing" for name, value in values.items() if value is None]
        if wrong:
            raise ValueError(f"{model.name}: expected the inputs {', '.join(model.inputs)}; {wrong[0]}")
        values = as_lists(model.inputs, values)
        for name, entry in model.inputs.items():
            # Predictions are smooth in sizes, so a crossover may lie between whole numbers.
            check_size(values[name], name, entry, entry.step if entry.step > 1 else 0)
        check_shapes(variant=codes, **{n: v[..., 0] if model.inputs[n].is_list else v for n, v in values.items()})
        return cls(model, codes, {name: size_as_float(value, name) for name, value in values.items()})

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape to which the columns broadcast, without the axis of lists."""
        shapes = (batch_shape(self.model.inputs[name], column) for name, column in self.inputs.items())
        return broadcast_shape(np.shape(self.variant), *shapes)

    def hull(self) -> dict[str, tuple[float, float]]:
        """Return the smallest and the largest value of each of the model's `extents`: the domain of these runs."""
        # The names have the model's order, which a pytree of a dictionary does not keep.
        sizes = {name: np.asarray(self.inputs[name], float) for name in self.model.inputs}
        return {name: (float(np.min(value)), float(np.max(value))) for name, value in self.model.extents(sizes)}

    def together(self) -> "Runs":
        """Return the same runs with every column broadcast to `shape`, as JAX arrays."""
        return self.of_shape(self.shape, jnp)

    def of_shape(self, shape: tuple[Any, ...], xp: Any = np) -> "Runs":
        """Return the same runs with every column broadcast to a shape; lists become `[*shape, entries]`.

        Args:
            shape: the shape of all columns.
            xp: the array module of the columns: NumPy unless given, or `jax.numpy`.
        """

        def column(value: Any, is_list: bool = False) -> Any:
            value = xp.asarray(value)
            return xp.broadcast_to(value, (*shape, *value.shape[value.ndim - is_list :]))

        inputs = {name: column(value, self.model.inputs[name].is_list) for name, value in self.inputs.items()}
        return dataclasses.replace(self, variant=column(self.variant), inputs=inputs)


def variant_codes(model: LatencyModel, variant: str | Sequence[Any] | Code, name: str = "variant") -> Code:
    """Return the indices of variants in `model.variants`, given as names or as indices."""
    if is_traced(variant):
        return variant  # pyright: ignore[reportReturnType]
    array, known = np.asarray(variant), list(model.variants)
    if array.dtype.kind in "UO":
        names = [str(one) for one in array.flat]
        for one in names:
            if one not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}, got {one!r}")
        codes = np.array([known.index(one) for one in names], np.int32).reshape(array.shape)
        return int(codes) if codes.ndim == 0 else codes
    if array.dtype.kind not in "iu" or (array.size and not 0 <= array.min() <= array.max() < len(known)):
        raise ValueError(f"{name}: expected names, or indices from 0 to {len(known) - 1}, got {variant}")
    # A list would be a pytree of its numbers.
    return int(array) if array.ndim == 0 else array.astype(np.int32)


def check_size(value: Columns, name: str, entry: Input, step: int) -> None:
    """Check one size of runs, unless the size is traced."""
    if is_traced(value):
        return
    if entry.is_list:  # padded with zeros
        value = np.asarray(value)[np.asarray(value) != 0]
    check_at_least(value, name, entry.least, "size")
    if step:
        flat = np.asarray(value, np.float64).reshape(-1)
        wrong = flat[flat % step != 0]
        if wrong.size:
            wanted = {1: "a whole number", 2: "an even number"}.get(step, f"a multiple of {step}")
            raise ValueError(f"{name}: expected {wanted}, got {wrong[0]:g}")


def check_timed_size(value: Columns, name: str, entry: Input) -> None:
    """Check one size of timed runs: sizes are positive unless the default is 0."""
    if entry.default != 0.0 and entry.least <= 0.0 and not entry.is_list:
        check_positive(value, name, "size")
    check_size(value, name, entry, entry.step)


def alternatives_of(model: LatencyModel) -> dict[str, StrategySpec]:
    """Return the strategies for a pick: strategies without implied inputs, if the model's variants are a choice."""
    return {name: strategy for name, strategy in model.strategies.items() if model.is_choice and not strategy.fixed}


def strategy_of(model: LatencyModel, name: str) -> StrategySpec:
    """Return a strategy by its name, in lower or upper case.

    Raises:
        ValueError: a name that the model does not know.
    """
    wanted = str(name).strip().lower().replace("-", "_")
    if wanted not in model.strategies:
        raise ValueError(f"strategy: expected one of {', '.join(model.strategies)}, got {name!r}")
    return model.strategies[wanted]


def all_inputs(
    model: LatencyModel, strategy: str, given: Sequence[Columns], named: Mapping[str, Columns | None]
) -> dict[str, Columns]:
    """Return every input of a strategy's run: given by position or name, implied by the strategy, or the default.

    Raises:
        ValueError: an input that is unknown, missing, given twice, or different from the strategy's implied value.
    """
    fixed, names = strategy_of(model, strategy).fixed, list(model.inputs)
    if len(given) > len(names):
        raise ValueError(f"{model.name}: expected at most {len(names)} inputs ({', '.join(names)}), got {len(given)}")
    values = dict(zip(names, given, strict=False))
    for name, value in named.items():
        if name not in names:
            raise ValueError(f"{name}: not an input of {model.name}, which has {', '.join(names)}")
        if name in values:
            raise ValueError(f"{name}: given twice")
        if value is not None:
            values[name] = value
    for name, value in fixed.items():
        own = values.setdefault(name, value)
        if not is_traced(own) and np.any(np.asarray(own) != value):
            raise ValueError(f"{name}: {strategy!r} has {value:g}, got {own}")
    for name, entry in model.inputs.items():
        if name not in values:
            if entry.default is None:
                raise ValueError(f"{name}: expected a number of {entry.unit}, got none")
            values[name] = entry.default
    return as_lists(model.inputs, {name: values[name] for name in names})
