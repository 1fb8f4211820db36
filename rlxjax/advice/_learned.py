"""What a model has learned from choices that were measured in its setting."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlxjax._values import Handle, handle
from rlxjax.calibration import CalibratedModel
from rlxjax.fit import Runs, condition, learned_spread

from ._content import setting_of
from ._memory import Memory
from ._remembered import Remembered

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
    found = _conditioned(calibrated, choices)
    _known[place] = own, choices, found
    return found


def learned_here(calibrated: CalibratedModel, devices: Sequence[Any] = ()) -> CalibratedModel:
    """Return a model that knows what was measured on this machine, with this software, on some devices."""
    return learned(calibrated, Memory(), setting_of(calibrated, devices)[0], calibrated.model.name)


def _conditioned(calibrated: CalibratedModel, choices: list[Remembered]) -> CalibratedModel:
    """Return the model that all measured times of some choices condition: those of one choice are a probe.

    How far off its predictions were says how far off the next ones are. What was measured is in its domain.
    """
    runs: list[Any] = []
    measurement, probe, times_ns, predicted_ns = [], [], [], []
    for number, choice in enumerate(choices):
        for one in choice.alternatives:
            if one.time_ns is None or not one.runs or not all(_is_of(calibrated.model, run) for run in one.runs):
                continue
            runs += one.runs
            measurement += [len(times_ns)] * len(one.runs)
            probe.append(number)
            times_ns.append(one.time_ns)
            predicted_ns.append(one.predicted_ns)
    if not times_ns:
        return calibrated
    model = calibrated.model
    columns = {name: np.array([run["inputs"][name] for run in runs], float) for name in model.inputs}
    timed = Runs.checked(model, [str(run["variant"]) for run in runs], **columns)
    times, probes = np.array(times_ns), np.array(probe)
    posterior = condition(calibrated.posterior, timed, times, measurement=np.array(measurement), probe=probes)
    if len(model.variants) > 1 and len(times_ns) == len(runs) and None not in predicted_ns:
        own = learned_spread(calibrated.posterior, timed, np.log(times / np.array(predicted_ns, float)), probes)
        posterior = dataclasses.replace(posterior, spread=own.spread, alike=own.alike)
    return dataclasses.replace(calibrated, posterior=posterior, domain=calibrated.domain_with(timed))


def _is_of(model: Any, run: Mapping[str, Any]) -> bool:
    """Return whether a run is one of a model, which an entry that somebody made need not be."""
    return run.get("variant") in model.variants and {*model.inputs} <= {*run.get("inputs", ())}
