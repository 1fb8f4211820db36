"""The interface of a latency model: what runs of one kind of work take on a machine, as a sum of named terms.

Whatever is generic knows this interface and no model: fits, posteriors, design, decisions, explanations and
the calibration file.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import numpy as np
from jaxtyping import Array, Bool, Float

from rlxjax._checks import is_traced
from rlxjax._typing import RealLike

if TYPE_CHECKING:
    from ._prior import LatencyPrior
    from ._runs import Runs

#: What a machine's schedule is to a model: numbers, or lists of numbers, by name.
Facts = Mapping[str, Any]
NO_FACTS: Facts = MappingProxyType({})


class Input(NamedTuple):
    """One size of a piece of work.

    Attributes:
        unit: of the size, in the plural: "rows".
        least: the least value that it may have.
        step: what a value is a multiple of, 1 for whole numbers; 0 for any real number.
        most: the largest value that a search for a crossover tries.
        default: the value where a caller gives none; an input without one must be given.
    """

    unit: str
    least: float = 1.0
    step: int = 1
    most: float = 2.0**17
    default: float | None = None


class Strategy(NamedTuple):
    """One way, as a user names it, to do a piece of work.

    Attributes:
        variants: the variants that it may run, of which the cheapest is taken.
        fixed: inputs that its name implies. A pick chooses among the strategies that imply none.
    """

    variants: tuple[str, ...]
    fixed: Mapping[str, float] = MappingProxyType({})


class LatencyModel(Protocol):
    """What runs of one kind of work take on a machine. Derive from this; what has a body here may stay as it is.

    A model is immutable and hashable. It holds no numbers of any machine: coefficients are fitted, and how a machine
    schedules its programs comes as `facts`, from the calibration file.

    Attributes:
        name: what a calibration file calls it.
        version: a change of a formula is a new version.
        inputs: the sizes of a piece of work by name. Along the first one, crossovers are looked for.
        variants: names of what can be timed: the ways to do one piece of work.
        prior: median and standard deviation of the logarithm of every coefficient. Units stand in the names.

    Examples:
        >>> class Copy(LatencyModel):
        ...     name, version = "copy", 1
        ...     inputs = {"n_bytes": Input("bytes")}
        ...     variants = ("copy",)
        ...     prior = wide_prior({"call_ns": 1e3, "bytes_per_ns": 10.0})
        ...     def terms_ns(self, coefficients, runs, facts):
        ...         moved_ns = runs.inputs["n_bytes"] / coefficients["bytes_per_ns"]
        ...         return {"call_ns": coefficients["call_ns"], "moved_ns": moved_ns}
        >>> Copy().strategies
        {'copy': Strategy(variants=('copy',), fixed=mappingproxy({}))}
    """

    name: str
    version: int
    inputs: Mapping[str, Input]
    variants: tuple[str, ...]

    @property
    def prior(self) -> "LatencyPrior":
        """What is believed of the coefficients of a machine that was never timed."""
        ...

    def terms_ns(self, coefficients: Any, runs: "Runs", facts: Facts) -> Mapping[str, RealLike]:
        """Return the parts of what runs take in ns by name: their sum `[*batch]` is the prediction.

        Traced code, each row from its own inputs alone; positive and smooth in the coefficients. A part may be of any
        shape that broadcasts to the sum's.

        Args:
            coefficients: of the type of `prior.median`.
            runs: of this model.
            facts: how the machine schedules.
        """
        ...

    @property
    def strategies(self) -> Mapping[str, Strategy]:
        """The ways to do a piece of work as users name them; each variant by its own name unless a model says."""
        return {name: Strategy((name,)) for name in self.variants}

    @property
    def facts(self) -> Facts:
        """The facts that hold where a calibration has none of its own."""
        return NO_FACTS

    def same_result(self, runs: "Runs", facts: Facts) -> Bool[Array, "*batch variants"]:
        """Return which variants give the result that is asked for, so that a pick may choose among them."""
        del facts
        return np.ones((*runs.shape, len(self.variants)), bool)  # pyright: ignore[reportReturnType]

    def features(self, runs: "Runs", facts: Facts) -> Float[Array, "*batch features"]:
        """Return what the small correction of a variant may depend on; none unless a model says."""
        del facts
        return np.zeros((*runs.shape, 0))  # pyright: ignore[reportReturnType]

    def folds(self, runs: "Runs") -> Sequence[np.ndarray]:
        """Return columns `[n]`: runs of one value in a column are left out together in validation."""
        return [np.asarray(column) for column in runs.inputs.values()]

    def grid(self) -> "Runs":
        """Return the runs that a calibrate job may time, `[n]`: every variant on a few sizes unless a model says."""
        from ._runs import Runs

        sizes = {
            name: (entry.default,) if entry.default is not None else _spaced(entry)
            for name, entry in self.inputs.items()
        }
        columns = np.meshgrid(np.arange(len(self.variants)), *sizes.values(), indexing="ij")
        variant, *inputs = (column.ravel() for column in columns)
        return Runs.checked(self, variant, **dict(zip(sizes, inputs, strict=True)))


def unit_of(name: str) -> str:
    """Return the unit of a coefficient, as its name says.

    Examples:
        >>> unit_of("upload_bytes_per_ns"), unit_of("host_parallel_gain")
        ('bytes/ns', '1')
    """
    for suffix, unit in (
        ("bytes_per_ns", "bytes/ns"),
        ("flop_per_ns", "FLOP/ns"),
        ("_ns", "ns"),
        ("_bytes", "bytes"),
        ("_rows", "rows"),
    ):
        if name.endswith(suffix):
            return unit
    return "1"


def coefficient_names(coefficients: Any) -> list[str]:
    """Return the names of coefficients in the order of their leaves: of a dataclass its fields, of a dict its keys.

    Examples:
        >>> coefficient_names({"b_ns": 1.0, "a_ns": 2.0})
        ['a_ns', 'b_ns']
    """
    paths = jax.tree_util.tree_leaves_with_path(coefficients)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]


def alternatives_of(model: LatencyModel) -> dict[str, Strategy]:
    """Return the strategies that a pick chooses among: those whose names imply no input."""
    return {name: strategy for name, strategy in model.strategies.items() if not strategy.fixed}


def strategy_of(model: LatencyModel, name: str) -> Strategy:
    """Return a strategy by its name, in any case.

    Raises:
        ValueError: a name that the model does not know.
    """
    wanted = str(name).strip().lower().replace("-", "_")
    if wanted not in model.strategies:
        raise ValueError(f"strategy: expected one of {', '.join(model.strategies)}, got {name!r}")
    return model.strategies[wanted]


def all_inputs(
    model: LatencyModel, strategy: str, given: Sequence[RealLike], named: Mapping[str, RealLike | None]
) -> dict[str, RealLike]:
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
    return {name: values[name] for name in names}


def _spaced(entry: Input) -> tuple[float, ...]:
    """Return sizes from the least to a thousand times that or the most, by octaves of two."""
    step = max(entry.step, 1)
    sizes = max(entry.least, 1.0) * 4.0 ** np.arange(9)
    return tuple(float(step * np.ceil(size / step)) for size in sizes[sizes <= entry.most])
