"""Rows of workloads: what a calibrated latency model says of each."""

import hashlib
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rlxjax.calibration import CalibratedModel

from ._rows import Column, Field, RowProgram, wanted_groups

#: The columns that may be asked for by name, in their order; those of terms have the names of the model's terms.
MODEL_COLUMNS = {
    "pick": ("pick",),
    "time": ("time_ns",),
    "interval": ("low_ns", "high_ns"),
    "terms": (),
    "margin": ("margin_ns",),
    "probability": ("probability",),
    "undecided": ("undecided",),
    "domain": ("in_domain",),
}
#: What is asked of a pick among several strategies.
_OF_A_PICK = ("pick", "margin", "probability", "undecided")
#: The optional field of a row that names the strategy whose time is asked for.
STRATEGY = "strategy"


def model_rows(
    calibrated: CalibratedModel,
    want: Sequence[str] | None = None,
    strategy: str | None = None,
    level: float = 0.9,
    has_strategy_column: bool = False,
) -> RowProgram:
    """Return what evaluates workloads by a calibrated model: a row has the model's inputs."""
    model, names = calibrated.model, calibrated.strategies
    default = ("pick", "time", "probability") if len(names) > 1 else ("time", "interval")
    groups = wanted_groups(want, MODEL_COLUMNS, default)
    if len(names) < 2 and (picks := [name for name in groups if name in _OF_A_PICK]):
        raise ValueError(f"want: {picks[0]}: {model.name} has one strategy, {', '.join(names)}: there is no choice")
    if strategy is not None and has_strategy_column:
        raise ValueError("strategy: expected a name or a column of names, got both")
    if strategy is not None and strategy not in names:
        raise ValueError(f"strategy: expected one of {', '.join(names)}, got {strategy!r}")
    timed = names if strategy is None else (strategy,)
    fields: dict[str, Field] = {
        name: Field(f"number of {entry.unit}", entry.least, entry.step if entry.step > 1 else 0, entry.default)
        for name, entry in model.inputs.items()
    }
    if has_strategy_column:
        fields[STRATEGY] = Field("strategy", names=names)

    def program(columns: Mapping[str, Array]) -> tuple[dict[str, Array], Array]:
        sizes: dict[str, Any] = {name: columns[name].astype(float) for name in model.inputs}
        found = calibrated.decided(**sizes)
        place = columns[STRATEGY] if has_strategy_column else found.place
        own = [calibrated.estimate(name, **sizes) for name in timed]

        def of_own(each: Sequence[Array]) -> Array:
            return each[0] if len(each) == 1 else jnp.select([place == i for i in range(len(each))], list(each))

        time_ns = of_own([one.time_ns for one in own])
        answers: dict[str, Array] = {}
        for name in groups:
            if name == "pick":
                answers[name] = found.place.astype("int8")
            elif name == "time":
                answers["time_ns"] = time_ns
            elif name == "interval":
                bounds = [calibrated.bounds_ns(one, level) for one in own]
                answers["low_ns"], answers["high_ns"] = (of_own(side) for side in zip(*bounds, strict=True))
            elif name == "terms":
                each = [calibrated.terms_ns(one, **sizes) for one in timed]
                answers |= {term: of_own([one[term] for one in each]) for term in each[0]}
            elif name == "margin":
                answers["margin_ns"] = found.margin_ns
            elif name == "probability":
                answers[name] = found.probability
            elif name == "undecided":
                answers[name] = ~found.is_sure
            else:
                answers["in_domain"] = jnp.broadcast_to(calibrated.in_domain(**sizes), time_ns.shape)
        narrow = {name: own.astype("float32") if own.dtype.kind == "f" else own for name, own in answers.items()}
        return narrow, jnp.isfinite(time_ns)

    def check(columns: Mapping[str, Column]) -> None:
        model.check({name: np.asarray(columns[name], float) for name in model.inputs})

    one = {name: jax.ShapeDtypeStruct((1,), np.dtype("float64")) for name in model.inputs}
    if has_strategy_column:
        one[STRATEGY] = jax.ShapeDtypeStruct((1,), np.dtype("int8"))
    with jax.enable_x64(True):
        given, _ = jax.eval_shape(lambda columns: (OrderedDict(program(columns)[0]), None), one)
    return RowProgram(
        name=f"runs of {model.name}",
        identity={
            "model": model.name,
            "version": model.version,
            "posterior": _digest((calibrated.posterior, calibrated.pace_log_sd, calibrated.domain)),
            "strategy": "a column" if has_strategy_column else strategy,
            "level": level,
            "want": groups,
        },
        fields=fields,
        outputs={name: names if name == "pick" else own.dtype.name for name, own in given.items()},
        program=program,
        check=check,
    )


def _digest(tree: Any) -> str:
    """Return a digest of the numbers of a pytree."""
    leaves = [np.asarray(leaf, float) for leaf in jax.tree.leaves(tree)]
    return hashlib.sha256(pickle.dumps([(leaf.shape, leaf.tobytes()) for leaf in leaves])).hexdigest()
