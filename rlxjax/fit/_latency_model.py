"""The interface of a latency model, all that generic code knows: what runs take, as a sum of terms, and its priors."""

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

#: A log-sd of 2 lets timings move a coefficient by a factor of 50.
WIDE_LOG_SD = 2.0
#: The units of coefficients by what their names end in.
UNIT_ENDINGS = {"bytes_per_ns": "bytes/ns", "flop_per_ns": "FLOP/ns", "steps_per_ns": "steps/ns"}
UNIT_ENDINGS |= {"_ns": "ns", "_bytes": "bytes", "_rows": "rows"}


def unit_of(name: str) -> str:
    """Return the unit of a coefficient, as its name says.

    Examples:
        >>> unit_of("upload_bytes_per_ns"), unit_of("host_parallel_gain")
        ('bytes/ns', '1')
    """
    return next((unit for suffix, unit in UNIT_ENDINGS.items() if name.endswith(suffix)), "1")


def coefficient_names(coefficients: Any) -> list[str]:
    """Return the names of coefficients in the order of their leaves: of a dataclass its fields, of a dict its keys.

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
    """What is believed before timings: a log-normal prior of every coefficient, and of the correction.

    Attributes:
        median: of the coefficients: a dictionary or dataclass of floats.
        log_sd: standard deviation of each coefficient's logarithm, of the same structure.
        correction: prior mean of the correction's weights, `[variants, features]`, or 0 for none; the terms
            alone have no use for it.
    """

    median: C
    log_sd: C
    correction: Float[np.ndarray, "variants features"] | float = 0.0


def wide_prior(median: C, **narrower: float) -> LatencyPrior[C]:
    """Return the prior that knows each coefficient's order of magnitude and no more.

    Args:
        median: of the coefficients.
        **narrower: standard deviations of the logarithms of some of them, by name.

    Examples:
        >>> wide_prior({"call_ns": 1e4, "bytes_per_ns": 10.0}, call_ns=0.5).log_sd
        {'bytes_per_ns': 2.0, 'call_ns': 0.5}
    """
    names = coefficient_names(median)
    sds = [narrower.get(name, WIDE_LOG_SD) for name in names]
    return LatencyPrior(median, jax.tree.structure(median).unflatten(sds))


#: What a machine's schedule is to a model: numbers, or lists of numbers, by name.
Facts = Mapping[str, Any]
NO_FACTS: Facts = FrozenDict()


class Input(NamedTuple):
    """One size of a piece of work.

    Attributes:
        unit: of the size, in the plural: "rows".
        least: the least value that it may have.
        step: what a value is a multiple of, 1 for whole numbers; 0 for any real number.
        most: the largest value that a search for a crossover tries.
        default: the value where a caller gives none; an input without one must be given.
        is_list: whether a run has a list of these, padded with zeros: a column is `[*batch, entries]`. `least` and
            `step` hold for each entry that is not zero; the default 0 is an empty list.
    """

    unit: str
    least: float = 1.0
    step: int = 1
    most: float = 2.0**17
    default: float | None = None
    is_list: bool = False


class StrategySpec(NamedTuple):
    """One way, as a user names it, to do a piece of work.

    Attributes:
        variants: the variants that it may run, of which the cheapest is taken.
        fixed: inputs that its name implies. A pick chooses among the strategies that imply none.
    """

    variants: tuple[str, ...]
    fixed: Mapping[str, float] = FrozenDict()


class LatencyModel(Protocol):
    """What runs of one kind of work take on a machine. Derive from this; what has a body here may stay as it is.

    A model is immutable and hashable. It holds no numbers of any machine: coefficients are fitted, and how a machine
    schedules its programs comes as `facts`, from the calibration file.

    Attributes:
        name: what a calibration file calls it.
        version: a change of a formula is a new version.
        inputs: the sizes of a piece of work by name. Along the first one, crossovers are looked for.
        variants: names of what can be timed: the ways to do one piece of work.
        is_choice: whether they are that, so that a pick may choose; else each is a work of its own.
        prior: median and standard deviation of the logarithm of every coefficient. Units stand in the names.

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
        """What is believed of the coefficients of a machine that was never timed."""
        ...

    def terms_ns(self, coefficients: Any, runs: "Runs", facts: Facts) -> Mapping[str, RealLike]:
        """Return the parts of what runs take in ns by name: their sum `[*batch]` is the prediction.

        Traced code, each row from its own inputs alone; positive and smooth in the coefficients. A part may be of any
        shape that broadcasts to the sum's.

        Args:
            coefficients: of the type of `prior.median`; a model with lists is given numbers, any other `[*batch]` too.
            runs: of this model.
            facts: how the machine schedules.
        """
        ...

    def time_ns(self, coefficients: Any, runs: "Runs", facts: Facts) -> RealLike:
        """Return the sum of the terms in ns, `[*batch]`; a model may have a way to it that compiles faster."""
        return functools.reduce(jnp.add, map(jnp.asarray, self.terms_ns(coefficients, runs, facts).values()))

    @property
    def strategies(self) -> Mapping[str, StrategySpec]:
        """The ways to do a piece of work as users name them; each variant by its own name unless a model says."""
        return {name: StrategySpec((name,)) for name in self.variants}

    @property
    def facts(self) -> Facts:
        """The facts that hold where a calibration has none of its own."""
        return NO_FACTS

    def same_result(self, runs: "Runs", facts: Facts) -> Bool[Array | np.ndarray, "*batch variants"]:
        """Return which variants give the result that is asked for, so that a pick may choose among them."""
        return np.ones((*runs.shape, len(self.variants)), bool)

    def impossible(self, facts: Facts) -> Sequence[str]:
        """Return the variants that no work can be done by, whatever its sizes; none unless a model says."""
        return ()

    def features(self, runs: "Runs", facts: Facts) -> Float[Array | np.ndarray, "*batch features"]:
        """Return what the small correction of a variant may depend on; none unless a model says."""
        return np.zeros((*runs.shape, 0))

    def scatter(self, runs: "Runs", facts: Facts) -> RealLike:
        """Return how far off runs may be beside others of their variant, `[*batch]`; all alike unless a model says."""
        return 1.0

    def own_log_sd(self, coefficients: Any, runs: "Runs", facts: Facts) -> RealLike:
        """Return the standard deviation of the logarithm of a run's time that a model knows of beforehand, `[*batch]`.

        It is of what no coefficient stands for, beside the spread that the fit finds; none unless a model says.
        """
        return 0.0

    def folds(self, runs: "Runs") -> Sequence[np.ndarray]:
        """Return columns `[n]`: runs of one value in a column are left out together in validation."""
        columns = map(np.asarray, runs.inputs.values())
        return [column if column.ndim < 2 else places_of(column) for column in columns]

    def check(self, values: Mapping[str, Any]) -> None:
        """Refuse sizes that no run has together, where the host can read them; none unless a model says."""

    def extents(self, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Return what a domain bounds, `[*batch]` by name: inputs and products of each two unless a model says.

        Of a list it is the sum.
        """
        sizes = {name: value.sum(-1) if self.inputs[name].is_list else value for name, value in values.items()}
        pairs = [(f"{one}*{other}", sizes[one] * sizes[other]) for one, other in combinations(sizes, 2)]
        return [*sizes.items(), *pairs]

    def grid(self) -> "Runs":
        """Return the runs that a calibrate job may time, `[n]`: every variant on a few sizes unless a model says."""
        sizes = {}
        for name, entry in self.inputs.items():
            # From the least to 65,536 times that or the most, by octaves of two.
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
    """Runs of a model; every column a scalar or `[*batch]`, that of a list `[*batch, entries]`.

    Attributes:
        model: whose runs they are.
        variant: places in `model.variants`.
        inputs: the sizes by name, floats.
    """

    model: LatencyModel = dataclasses.field(metadata={"static": True})
    variant: Code
    inputs: Mapping[str, Any]

    @classmethod
    def checked(cls, model: LatencyModel, variant: str | Sequence[Any] | Code, **inputs: Columns) -> "Runs":
        """Build from names or codes of variants and from the sizes of the work.

        Lists may differ in length from run to run: all are padded with zeros to one length.

        Raises:
            ValueError: an unknown variant or input, a missing one, a size that cannot be, shapes that do not
                broadcast, or lists of one run of different lengths.

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
            # Predictions are smooth in sizes, so that a crossover may lie between whole numbers.
            check_size(values[name], name, entry, entry.step if entry.step > 1 else 0)
        check_shapes(variant=codes, **{n: v[..., 0] if model.inputs[n].is_list else v for n, v in values.items()})
        return cls(model, codes, {name: size_as_float(value, name) for name, value in values.items()})

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape that the columns broadcast to, without the axis of lists."""
        shapes = (batch_shape(self.model.inputs[name], column) for name, column in self.inputs.items())
        return broadcast_shape(np.shape(self.variant), *shapes)

    def hull(self) -> dict[str, tuple[float, float]]:
        """Return the smallest and the largest value of each of the model's `extents`: the domain of these runs."""
        # In the model's order, which a tree of a dictionary does not keep.
        sizes = {name: np.asarray(self.inputs[name], float) for name in self.model.inputs}
        return {name: (float(np.min(value)), float(np.max(value))) for name, value in self.model.extents(sizes)}

    def together(self) -> "Runs":
        """Return the same runs with every column of the whole shape."""
        return self.of_shape(self.shape, jnp)

    def of_shape(self, shape: tuple[Any, ...], xp: Any = np) -> "Runs":
        """Return the same runs with every column of a shape, that of a list `[*shape, entries]`.

        Args:
            shape: that the columns broadcast to.
            xp: of whose arrays the columns are: NumPy unless given, or `jax.numpy`.
        """

        def column(value: Any, is_list: bool = False) -> Any:
            value = xp.asarray(value)
            return xp.broadcast_to(value, (*shape, *value.shape[value.ndim - is_list :]))

        inputs = {name: column(value, self.model.inputs[name].is_list) for name, value in self.inputs.items()}
        return dataclasses.replace(self, variant=column(self.variant), inputs=inputs)


def variant_codes(model: LatencyModel, variant: str | Sequence[Any] | Code, name: str = "variant") -> Code:
    """Return the places of variants in `model.variants`, given as names or as places."""
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
        raise ValueError(f"{name}: expected names, or places from 0 to {len(known) - 1}, got {variant}")
    # A list would be a tree of its numbers.
    return int(array) if array.ndim == 0 else array.astype(np.int32)


def check_size(value: Columns, name: str, entry: Input, step: int) -> None:
    """Check one size of runs, where the host can read it."""
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
    """Check one size of runs that were timed: what has no default is a size, and nothing takes no time."""
    if entry.default != 0.0 and entry.least <= 0.0 and not entry.is_list:
        check_positive(value, name, "size")
    check_size(value, name, entry, entry.step)


def alternatives_of(model: LatencyModel) -> dict[str, StrategySpec]:
    """Return the strategies that a pick chooses among: those whose names imply no input, if they are a choice."""
    return {name: strategy for name, strategy in model.strategies.items() if model.is_choice and not strategy.fixed}


def strategy_of(model: LatencyModel, name: str) -> StrategySpec:
    """Return a strategy by its name, in any case.

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
    """Return every input of a strategy's run: those given, by place or name, implied by its name, or the default.

    Raises:
        ValueError: an unknown or missing input, one given twice, or another value than the strategy's name implies.
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
