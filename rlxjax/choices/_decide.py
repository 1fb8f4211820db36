"""How one of several alternatives is chosen: remembered, else by the model where it is sure, else measured."""

import contextlib
import datetime
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from rlxjax.calibration import Fingerprint

from ._caller import Caller, FailedError
from ._choice import Choice, Considered
from ._contender import Forecast, Question
from ._content import digest, digest_of_model, setting_of
from ._contest import Contest, contest, longest_s
from ._difference import difference
from ._learned import heard, learn, learned
from ._memory import Memory
from ._processes import ALONE, Party
from ._remembered import Alternative, Remembered

#: Seconds that a compiler may take.
COMPILE_S = 3600.0
#: Held while programs are timed: those of two threads at once would disturb each other.
_timing = threading.RLock()


def recalled(question: Question) -> Choice | None:
    """Return the choice that is remembered, if there is one whose alternative still runs.

    Raises:
        ValueError: no alternative runs.
    """
    return _recalled(question, Memory(), _key_of(question)[0], Party.of(question.devices))


def decide(question: Question) -> Choice:
    """Choose.

    Raises:
        ValueError: no alternative runs, alternatives that are run differ in their results, or nothing says which
            is faster and nothing is to be measured; processes of one job that ask differently, or one that has ended.
    """
    memory, (key, context, machine), party = Memory(), _key_of(question), Party.of(question.devices)
    if {*party.gathered(key)} != {key}:
        raise ValueError(
            "alternatives: expected the same question in all processes that hold the arguments, got several; "
            "all of them have to choose between the same programs, in the same order"
        )
    if (found := _recalled(question, memory, key, party)) is not None:
        return found
    contenders = question.contenders
    usable = [place for place, own in enumerate(contenders) if not own.failed]
    calibrated = question.calibrated
    if calibrated is not None:
        calibrated = learned(calibrated, memory, context, question.kind)
    forecast = None if calibrated is None else question.forecast(calibrated)
    if party is not ALONE:
        said = party.gathered(None if forecast is None else [column.tolist() for column in forecast])[0]
        forecast = None if said is None else Forecast(*map(np.array, said))
    if forecast is not None and not np.isfinite(forecast.time_ns[usable]).any():
        forecast = None
    order, chances = _by_model(question, forecast, usable)
    measure, count = question.measure, len(usable)
    # What the model rules out is neither compiled nor timed: surely it is not faster by more than the regret. By an
    # extrapolation nothing is sure.
    is_inside = np.zeros(len(contenders), bool) if forecast is None else forecast.in_domain
    is_ruled_out = {
        place: chances[place] >= question.sure and is_inside[order[0]] and is_inside[place] for place in order[1:]
    }
    entrants = [place for place in order if not is_ruled_out.get(place)]
    entrants = {"never": order[:1], "undecided": entrants, "always": order}[measure] if count > 1 else order
    if len(entrants) < 2:
        if forecast is None and count > 1:
            raise ValueError(
                f"measure: nothing predicts which of {', '.join(contenders[place].name for place in usable)} is the "
                "fastest here; measure them, as with measure='undecided', or calibrate with `rlxjax calibrate`"
            )
        others = [chances[place] for place in order[1:]]
        sure = min(others, default=1.0)
        return _choice(question, order[0], "model", forecast, None, float(sure), key=key)
    # Processes that choose together do not wait: one of them could wait for another that waits for all.
    with _timing, memory.timing() if party is ALONE else contextlib.nullcontext():
        # Another thread, or another process, may have timed it meanwhile.
        if (found := _recalled(question, memory, key, party)) is not None:
            return found
        begun_s = time.perf_counter()
        timed, first_s = _timed(question, order, entrants, party)
        ruled_out = [chances[place] for place in order if place not in entrants]
        probability = float(min([timed.probability, *ruled_out]))
        seconds = time.perf_counter() - begun_s
        found = _choice(question, timed.best, "measured", forecast, timed, probability, seconds, key, first_s)
        remembered = _to_remember(question, found, key, context, machine)
        if party.is_first:
            memory.keep(remembered)
        learn(remembered, memory)
    return found


def _by_model(
    question: Question, forecast: Forecast | None, usable: list[int]
) -> tuple[list[int], Mapping[int, float]]:
    """Return the alternatives in the order of their predicted costs, and of each the chance that the first one stands.

    Where nothing is predicted, they are in the order given, and the chance is one half.
    """
    if forecast is None:
        return usable, dict.fromkeys(usable, 0.5)
    extra_ns = np.array([own.extra_ns for own in question.contenders])
    costs = forecast.time_ns + extra_ns
    order = sorted(usable, key=lambda place: costs[place] if np.isfinite(costs[place]) else math.inf)
    chances = forecast.chances(extra_ns, order[0], question.regret)
    return order, {place: float(chances[place]) if np.isfinite(costs[place]) else 0.5 for place in usable}


def _timed(question: Question, order: list[int], entrants: list[int], party: Party) -> tuple[Contest, dict[int, float]]:
    """Compile, check and time the entrants, the first of them the favourite; places are those of all alternatives.

    Others that may run, in `order`, are ruled out beside the favourite: they take part where that fails. What comes
    second are the seconds of each first call, compiling included.
    """
    contenders, limit_s = question.contenders, question.limit_ms / 1e3
    failed: dict[int, str] = {}
    first_s: dict[int, float] = {}
    expected: Any = None
    with Caller() as caller:
        for place in order:
            if place not in entrants and order[0] not in failed:
                continue
            begun_s, own = time.perf_counter(), contenders[place]
            result, reason = _outcome(caller, own.make or int, COMPILE_S)
            # All have compiled before any of them waits for the others' results.
            if not (reason := party.first_text(reason)):
                result, reason = _outcome(caller, lambda own=own: jax.block_until_ready(own.call()), longest_s(limit_s))
                reason = party.first_text(reason)
            if reason:
                failed[place] = reason
                continue
            first_s[place] = time.perf_counter() - begun_s
            if not question.check:
                continue
            if expected is None:
                expected = place, result
                continue
            wrong, programs = difference(expected[1], result), [contenders[expected[0]].call, own.call]
            if party.first_text(wrong):  # all look closer, as one program may run on all of them
                wrong = party.first_text(difference(expected[1], result, programs))
            if wrong:
                raise ValueError(
                    f"alternatives: expected the same result of all, but that of {own.name!r} differs "
                    f"from that of {contenders[expected[0]].name!r}: {wrong}; check=False takes them as they are"
                )
    result = expected = None
    left = [*first_s]
    if not left:
        raise ValueError(_none_runs(question, failed))
    found = contest(
        [contenders[place].call for place in left],
        regret=question.regret,
        limit_s=limit_s,
        extra_ns=[contenders[place].extra_ns for place in left],
        party=party,
    )
    for number, reason in found.failed.items():
        failed[left[number]] = reason
    if len(found.failed) == len(left):
        raise ValueError(_none_runs(question, failed))
    times = np.full((3, len(contenders)), np.nan)
    times[:, left] = found.time_ns, found.low_ns, found.high_ns
    found = found._replace(best=left[found.best], failed=failed, time_ns=times[0], low_ns=times[1], high_ns=times[2])
    return found, first_s


def _none_runs(question: Question, failed: Mapping[int, str]) -> str:
    """Return why nothing can be chosen."""
    said = "; ".join(f"{question.contenders[place].name} {reason}" for place, reason in sorted(failed.items()))
    mend = "; a larger limit_ms waits longer" if "did not end" in said else ""
    return f"alternatives: none of them runs: {said}{mend}"


def _outcome(caller: Caller, call: Callable[[], Any], limit_s: float) -> tuple[Any, str]:
    """Return what a call gives, and why it gives nothing."""
    try:
        return caller(call, limit_s), ""
    except FailedError as reason:
        return None, str(reason)


def _key_of(question: Question) -> tuple[str, str, Fingerprint]:
    """Return the key of what a choice depends on, the part of it that is not its own, and the machine."""
    contenders = question.contenders
    if all(own.failed for own in contenders):
        failures = "; ".join(f"{own.name}: {own.failed}" for own in contenders)
        raise ValueError(f"alternatives: none of them runs: {failures}")
    context, machine = setting_of(question.calibrated, question.devices, question.runner)
    contents = sorted((own.content, own.extra_ns) for own in contenders)
    return digest(context, question.kind, contents, question.workload, question.check), context, machine


def _recalled(question: Question, memory: Memory, key: str, party: Party) -> Choice | None:
    """Return the choice that is remembered, if its alternative still runs and as much was measured as is asked.

    What a person pinned holds whatever is asked.
    """
    known = memory.look_up(key) if party.is_first else None
    if party is not ALONE:
        said = party.gathered(None if known is None else known.model_dump(mode="json"))[0]
        known = None if said is None else Remembered.model_validate(said)
    if known is None:
        return None
    heard(known, memory)
    places = {own.content: place for place, own in reversed([*enumerate(question.contenders)]) if not own.failed}
    by_content = {one.content: one for one in known.alternatives}
    if known.choice.content not in places or not by_content.keys() >= {own.content for own in question.contenders}:
        return None
    running = [own for own in by_content.values() if not own.failed]
    is_whole = len(running) == 1 or all(own.time_ns is not None for own in running)
    is_fine = known.regret <= question.regret
    is_enough = {"never": True, "undecided": is_fine, "always": is_fine and is_whole}[question.measure]
    if known.pinned is None and not is_enough:
        return None
    alternatives = []
    for own in question.contenders:
        one = by_content[own.content]
        interval = None if one.low_ns is None or one.high_ns is None else (one.low_ns, one.high_ns)
        predicted = None if one.predicted_ns is None else one.predicted_interval_ns
        alternatives.append(Considered(own.name, one.predicted_ns, predicted, one.time_ns, interval, one.failed))
    chosen = question.contenders[places[known.choice.content]]
    return Choice(
        chosen.name,
        chosen.fn,
        "remembered" if known.pinned is None else "pinned",
        tuple(alternatives),
        known.probability,
        known.is_tie,
        known.regret,
        known.rounds,
        key=known.key,
    )


def _choice(
    question: Question,
    place: int,
    by: str,
    forecast: Forecast | None,
    timed: Contest | None,
    probability: float,
    measuring_s: float = 0.0,
    key: str = "",
    first_s: Mapping[int, float] | None = None,
) -> Choice:
    alternatives = []
    for number, own in enumerate(question.contenders):
        predicted, interval = None, None
        if forecast is not None and np.isfinite(forecast.time_ns[number]):
            predicted = float(forecast.time_ns[number])
            interval = float(forecast.low_ns[number]), float(forecast.high_ns[number])
        measured, failed, compile_s = (None, None), own.failed, None
        if timed is not None:
            failed = failed or timed.failed.get(number, "")
            if np.isfinite(timed.time_ns[number]):
                measured = (
                    float(timed.time_ns[number]),
                    (float(timed.low_ns[number]), float(timed.high_ns[number])),
                )
                compile_s = max((first_s or {}).get(number, 0.0) - measured[0] / 1e9, 0.0)
        alternatives.append(Considered(own.name, predicted, interval, *measured, failed, compile_s))
    chosen = question.contenders[place]
    return Choice(
        chosen.name,
        chosen.fn,
        by,
        tuple(alternatives),
        None if forecast is None and timed is None else probability,
        timed is not None and timed.is_tie,
        question.regret,
        0 if timed is None else timed.rounds,
        measuring_s,
        key,
    )


def _to_remember(question: Question, found: Choice, key: str, context: str, machine: Fingerprint) -> Remembered:
    alternatives = []
    for own, one in zip(question.contenders, found.alternatives, strict=True):
        low_ns, high_ns = one.measured_interval_ns or (None, None)
        runs: list[dict[str, Any]] = [{"variant": variant, "inputs": dict(inputs)} for variant, inputs in own.runs()]
        alternatives.append(
            Alternative(
                name=own.name,
                content=own.content,
                runs=runs,
                predicted_ns=one.predicted_ns,
                predicted_interval_ns=one.predicted_interval_ns,
                time_ns=one.measured_ns,
                low_ns=low_ns,
                high_ns=high_ns,
                failed=one.failed,
            )
        )
    return Remembered(
        key=key,
        context=context,
        calibration=None if question.calibrated is None else digest_of_model(question.calibrated),
        kind=question.kind,
        label=question.label,
        alternatives=alternatives,
        chosen=next(own.content for own in question.contenders if own.name == found.name),
        is_tie=found.is_tie,
        probability=found.probability or 0.0,
        rounds=found.rounds,
        regret=found.regret,
        machine=machine,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
