"""What users name: the strategies of a model, and the inputs of a strategy's run."""

from collections.abc import Mapping, Sequence

import numpy as np

from rlxjax._checks import is_traced
from rlxjax._counts import Columns

from ._model import LatencyModel, StrategySpec


def alternatives_of(model: LatencyModel) -> dict[str, StrategySpec]:
    """Return the strategies that a pick chooses among: those whose names imply no input."""
    return {name: strategy for name, strategy in model.strategies.items() if not strategy.fixed}


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
    return {name: values[name] for name in names}
