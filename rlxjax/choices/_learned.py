"""What a model has learned from choices that were measured in its setting."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlxjax._values import Handle, handle
from rlxjax.calibration import CalibratedModel
from rlxjax.fit import condition, learned_spread

from ._content import setting_of
from ._memory import Memory
from ._remembered import Remembered, timed_runs

#: The newest choices that a model learns from, in one process.
MOST_LEARNED = 512
#: By database, context and kind, the choices that were measured, by key; those of other processes are read once.
_measured: dict[tuple[str, str, str], dict[str, Remembered]] = {}
#: By the same: the model, the choices that it has learned from, and what it knows by them.
_known: dict[tuple[str, str, str], tuple[Handle, list[Remembered], CalibratedModel]] = {}


def learn(remembered: Remembered, memory: Memory) -> None:
    """Add a choice to those that a model learns from, in the place of an earlier one of the same key."""
    choices = _measured.setdefault((str(memory.path), remembered.context, remembered.kind), {})
    choices.pop(remembered.key, None)
    choices[remembered.key] = remembered


def heard(remembered: Remembered, memory: Memory) -> None:
    """Add a choice that was found in the memory to those that a model learns from, if another process measured it."""
    choices = _measured.get((str(memory.path), remembered.context, remembered.kind))
    if choices is not None:
        choices.setdefault(remembered.key, remembered)


def learned(calibrated: CalibratedModel, memory: Memory, context: str, kind: str) -> CalibratedModel:
    """Return a model that knows what was measured in its setting.

    Args:
        calibrated: of the calibration alone.
        memory: of earlier processes, which is asked once.
        context: digest of machine, software and calibration.
        kind: the model's name.
    """
    place = str(memory.path), context, kind
    if place not in _measured:
        _measured.setdefault(place, {one.key: one for one in reversed(memory.all(context, kind))})
    choices, own = [*_measured[place].values()][-MOST_LEARNED:], handle(calibrated)
    known = _known.get(place)
    if known is not None and known[:2] == (own, choices):
        return known[2]
    try:
        found = _conditioned(calibrated, choices)
    except ValueError:  # of one that somebody edited
        _measured[place] = {one.key: one for one in choices if _teaches(calibrated, one)}
        if len(_measured[place]) == len(choices):
            raise
        return learned(calibrated, memory, context, kind)
    _known[place] = own, choices, found
    return found


def learned_here(calibrated: CalibratedModel, devices: Sequence[Any] = ()) -> CalibratedModel:
    """Return a model that knows what was measured on this machine, with this software, on some devices."""
    return learned(calibrated, Memory(), setting_of(calibrated, devices)[0], calibrated.model.name)


def _conditioned(calibrated: CalibratedModel, choices: list[Remembered]) -> CalibratedModel:
    """Return the model that all measured times of some choices condition: those of one choice are a probe.

    How far off its predictions were says how far off the next ones are. What was measured is in its domain.
    """
    taught = [(number, one) for number, choice in enumerate(choices) for one in choice.taught]
    if not taught:
        return calibrated
    probes, alternatives = np.array([number for number, _ in taught]), [one for _, one in taught]
    timed = timed_runs(model := calibrated.model, alternatives)
    times, predicted_ns = np.array([one.time_ns for one in alternatives]), [one.predicted_ns for one in alternatives]
    measurement = np.repeat(np.arange(len(times)), [len(one.runs) for one in alternatives])
    posterior = condition(calibrated.posterior, timed, times, measurement=measurement, probe=probes)
    if len(model.variants) > 1 and len(times) == len(measurement) and None not in predicted_ns:
        own = learned_spread(calibrated.posterior, timed, np.log(times / np.array(predicted_ns, float)), probes)
        posterior = dataclasses.replace(posterior, spread=own.spread, alike=own.alike)
    return dataclasses.replace(calibrated, posterior=posterior, domain=calibrated.domain_with(timed))


def _teaches(calibrated: CalibratedModel, one: Remembered) -> bool:
    try:
        _conditioned(calibrated, [one])
    except ValueError as reason:
        warnings.warn(f"the entry {one.key[:8]} of {one.kind} teaches nothing: {reason}", stacklevel=4)
        return False
    return True
