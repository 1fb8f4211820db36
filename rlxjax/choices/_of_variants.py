"""The variants of a latency model as alternatives, for one workload."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rlxjax._values import Handle, handle
from rlxjax.calibration import CalibratedModel, Calibration
from rlxjax.fit import Cell, Runs, Suite, decision, estimate

from ._contender import Contender, Forecast, Question
from ._content import digest
from ._description import description_of

#: Programs of suites that are kept, the latest used.
MOST_PROGRAMS = 32


def question_of_suite(
    suite: Suite,
    inputs: Mapping[str, float] | None,
    known: Calibration | None,
    options: Mapping[str, Any],
) -> Question:
    """Return the question of the variants of a suite's model."""
    model = suite.model
    if inputs is not None and not isinstance(inputs, Mapping):
        raise ValueError(f"inputs: expected sizes by name, got {inputs!r}")
    columns = Runs.checked(model, 0, **(inputs or {})).inputs
    if several := [name for name, column in columns.items() if np.ndim(column)]:
        raise ValueError(f"inputs: expected those of one workload, got several of {', '.join(several)}")
    sizes = {name: float(column) for name, column in columns.items()}
    model.check({name: np.asarray(size) for name, size in sizes.items()})
    calibrated = None if known is None else known.models.get(model.name)
    facts = suite.facts() if calibrated is None else calibrated.posterior.facts
    label = ", ".join(f"{name} {size:g}" for name, size in sizes.items())
    programs = f"{type(suite).__module__}.{type(suite).__qualname__}", suite.runner, dict(suite.given)
    if dataclasses.is_dataclass(suite):  # whose fields say which of several it is
        programs = *programs, description_of(suite)
    contenders = []
    for variant in variants_of(model, sizes, facts):
        cell = Cell(f"{variant} {label}", variant, sizes)
        program = functools.partial(_program, handle(suite), cell)
        contenders.append(
            Contender(
                variant,
                digest(model.name, model.version, programs, variant),
                fn=lambda program=program: program()(),
                call=lambda program=program: program()(),
                runs=lambda variant=variant: ((variant, sizes),),
            )
        )
    return Question(
        contenders, model.name, label, sizes, calibrated, functools.partial(forecast_of_variants, contenders),
        runner=programs, **options,
    )  # fmt: skip


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def _program(suite: Handle, cell: Cell) -> Callable[[], Any]:
    """Return the program of a cell, which is compiled once however often a suite's owner chooses."""
    own: Any = suite()
    return own.program(cell)


def variants_of(model: Any, sizes: Mapping[str, float], facts: Mapping[str, Any]) -> list[str]:
    """Return the variants of a model that give the result of a workload."""
    is_same = np.asarray(model.same_result(Runs.checked(model, 0, **sizes), facts))
    return [name for name, is_own in zip(model.variants, np.ravel(is_same).tolist(), strict=True) if is_own]


def forecast_of_variants(contenders: Sequence[Contender], calibrated: CalibratedModel) -> Forecast:
    """Return what a model says of alternatives that are one run each, all of one workload."""
    variants, (sizes, *_) = zip(*(own.runs()[0] for own in contenders), strict=True)
    with jax.ensure_compile_time_eval():
        runs = Runs.checked(calibrated.model, list(variants), **sizes)
        found = jax.tree.map(np.asarray, estimate(calibrated.on_device(), runs.together()))
        low_ns, high_ns = calibrated.bounds_ns(found)
        row, column = (jax.tree.map(functools.partial(np.expand_dims, axis=axis), found) for axis in (1, 0))
        codes, alike = np.asarray(runs.variant), calibrated.posterior.alike
        shared = np.zeros((len(codes),) * 2) if alike is None else np.asarray(alike, float)[np.ix_(codes, codes)]
        sd_ns = np.array(decision(row, column, shared).margin_sd_ns, float)
    np.fill_diagonal(sd_ns, 0.0)
    times_ns, low_ns, high_ns = (np.asarray(column, float) for column in (found.time_ns, low_ns, high_ns))
    is_inside = bool(calibrated.domain) and bool(calibrated.in_domain(**sizes))
    return Forecast(times_ns, low_ns, high_ns, sd_ns, np.full(len(times_ns), is_inside))
