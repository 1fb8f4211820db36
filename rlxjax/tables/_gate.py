"""Rows of profile pairs: what a gate says of going from one profile to the other."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jaxtyping import Array

from rlxjax._checks import fields_of
from rlxjax._counts import as_temperature
from rlxjax.gate import FusionBenefit, IoFusionGate
from rlxjax.graph import GraphIoProfile

from ._rows import Field, RowProgram, wanted_groups

#: The columns that may be asked for by name, in their order.
GATE_COLUMNS = {
    "score": "score_ns",
    "decision": "should_fuse",
    "probability": "fuse_probability",
    "log_odds": "fuse_log_odds",
}
_COUNTS = tuple(field.name for field in dataclasses.fields(GraphIoProfile))


def gate_rows(gate: IoFusionGate, want: Sequence[str] | None = None, temperature_ns: float | None = None) -> RowProgram:
    """Return what evaluates pairs of profiles by a gate.

    A row has the counts of the profile without fusion, `before_kernel_launches` and so on, and of the one with it.
    """
    default = ["score", "decision"] if temperature_ns is None else ["score", "decision", "probability"]
    groups = wanted_groups(want, GATE_COLUMNS, default)
    if temperature_ns is None and (soft := [name for name in groups if name in ("probability", "log_odds")]):
        raise ValueError(f"temperature_ns: expected one, which {soft[0]} is of, got none")
    soft_ns = 1.0 if temperature_ns is None else float(as_temperature(temperature_ns))
    rates = {name: float(rate) for name, rate in fields_of(gate).items()}

    def program(columns: Mapping[str, Array]) -> tuple[dict[str, Array], Array]:
        benefit = FusionBenefit(*(_saved(columns[f"before_{name}"], columns[f"after_{name}"]) for name in _COUNTS))
        own, answers = IoFusionGate(**rates), {}
        score_ns = own.score_ns(benefit)
        for name in groups:
            if name == "score":
                answers[name] = score_ns
            elif name == "decision":
                answers[name] = score_ns >= own.min_gain_ns
            else:
                of = own.fuse_probability if name == "probability" else own.fuse_log_odds
                answers[name] = of(benefit, temperature_ns=soft_ns)
        named = {
            GATE_COLUMNS[name]: own if own.dtype == bool else own.astype("float32") for name, own in answers.items()
        }
        return named, ~jnp.isnan(score_ns)

    return RowProgram(
        name="pairs of profiles by a gate",
        identity={"gate": rates, "temperature_ns": temperature_ns, "want": groups},
        fields={f"{side}_{name}": Field("count") for side in ("before", "after") for name in _COUNTS},
        outputs={GATE_COLUMNS[name]: "bool" if name == "decision" else "float32" for name in groups},
        program=program,
    )


def _saved(before: Array, after: Array) -> Array:
    """Return a difference as a float, exact before that where both are integers."""
    if before.dtype != after.dtype:
        before, after = before.astype(float), after.astype(float)
    return (before - after).astype(float)
