"""Choose a function, or a variant of a suite: by prediction if the model is sure, else by measuring and remembering.

The steps of a choice are: look for a remembered choice. If there is none, ask the model. If the model is not sure, time
the alternatives that the model does not rule out.
"""

import contextlib
import dataclasses
import datetime
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax._checks import check_at_least, is_traced
from rlxjax._chunks import callers_settings
from rlxjax._values import handle
from rlxjax.calibration import Calibration, default_calibration
from rlxjax.clock import BUSY, LEAST_WATCH_S, OtherWork
from rlxjax.fit import Suite, faster_probability

from ._calls import ALONE, Caller, FailedError, Party, difference
from ._contest import Contest, contest, longest_s
from ._description import digest, digest_of_model, setting_of
from ._programs import Work, unequal, work_of_functions, work_of_suite
from ._store import Memory
from ._way import LIMIT_MS, REGRET, Choice, Way, choice_of_json, json_of_choice, measure_word

#: This process keeps at most this number of choices, of about 2 kB each. They hold no functions and no arguments.
MOST_CHOICES = 16_384
#: Seconds after which a compilation is given up, and seconds that a first call may take to compile its operations.
COMPILE_S, FIRST_CALL_S = 3600.0, 60.0
#: After a look at the machine's load, a provisional choice is used for this number of seconds without another look.
LOOK_AGAIN_S = 60.0
#: The type of a jitted function.
JITTED = type(jax.jit(abs))
_choices: dict[Any, Choice] = {}
_keeping = threading.Lock()
#: When this process last looked at the machine's load, in monotonic seconds, and whether the machine was quiet.
_look = (-math.inf, False)


def choose(
    alternatives: Mapping[str, Callable[..., Any]] | Suite,
    *args: Any,
    inputs: Mapping[str, Any] | None = None,
    measure: str | None = None,
    regret: float = REGRET,
    limit_ms: float = LIMIT_MS,
    calibration: Calibration | None = None,
    check: bool = True,
) -> Choice:
    """Choose the fastest alternative: by prediction if the model is sure, otherwise by measuring.

    A measured choice is remembered in this process and in `RLXJAX_HOME`, and used again for the same machine, software,
    calibration, alternatives and shapes of arguments. Among jitted functions, a remembered choice is found in
    microseconds, so you can write `choose(alternatives, x)(x)` in place of a call. Functions that are not jitted are
    traced at each `choose`, which takes milliseconds. If several processes hold the arguments, all must call `choose`
    in the same order, with the same options. The first process decides. The slowest process sets a program's time.

    Args:
        alternatives: a dict from name to function. All functions take the same arguments and give the same result. A
            jitted function runs as one program, any other function operation by operation. Instead of a dict, you can
            give a suite of your own: the alternatives are those of its variants that give equal results.
        *args: arguments of the functions: arrays, `jax.ShapeDtypeStruct`s or trees of them. For timing, random arrays
            take the place of the `jax.ShapeDtypeStruct`s.
        inputs: inputs of the suite's model, as a dict from name to value; only for a suite.
        measure: "undecided": measure if the model is not sure. "always": measure all alternatives. "never": only
            predict. The default is the environment variable `RLXJAX_MEASURE`, or else "undecided".
        regret: relative difference in time that does not matter to you, from 0 to 1. Alternatives that differ by less
            are a tie, and the model's favourite wins.
        limit_ms: milliseconds that timing may take, without compiling. Six rounds are timed even if they take longer. A
            call is given up after 100 times this limit, but not before 1 s; it then goes on running in a daemon thread.
            The first call of a function that is not jitted may take 60 s longer, because it compiles operations.
            The first call of a function that is not jitted compiles, so this limit does not count for it.
        calibration: the calibration of this machine; the default is `default_calibration()`.
        check: whether to raise an error if results differ by more than rounding explains. A list equals a tuple.

    Returns:
        The choice. Call the choice with the arguments of the alternatives to run the chosen alternative.

    Raises:
        ValueError: `alternatives` is empty, or none of them runs; results differ; alternatives to measure have side
            effects or donate arguments; arguments are traced values; `measure` is "never" but nothing predicts the
            times; a number is out of range; the processes give different programs or options, or a process has ended.

    Examples:
        >>> import jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((64, 1000), jnp.float32)
        >>> top_k = jax.jit(lambda x: jax.lax.top_k(x, 8)[0])
        >>> ways = {"top_k": top_k, "sort": jax.jit(lambda x: jnp.sort(x)[:, :-9:-1])}
        >>> choice = choose(ways, x, measure="never")
        >>> choice.name, choice.by, choice(jnp.ones((64, 1000), jnp.float32)).shape
        ('top_k', 'model', (64, 8))
    """
    word = measure_word(measure, "undecided")
    asked = _asked(alternatives, args, word, regret, limit_ms, calibration, check)
    known = None if asked is None else _choices.get(asked)
    if known is not None and not _is_due(known, word):
        found = object.__new__(Choice)  # a copy in a microsecond, with the caller's function
        found.__dict__.update(known.__dict__, fn=alternatives[known.name])  # pyright: ignore[reportIndexIssue]
        return found
    check_at_least(regret, "regret", what="number", most=1.0)
    check_at_least(limit_ms, "limit_ms", 1e-3, "number of milliseconds", most=1e7)
    if is_traced(*jax.tree.leaves(args)):
        raise ValueError("args: expected arrays or shapes, got traced values; choose outside the traced function")
    if calibration is not None and not isinstance(calibration, Calibration):
        raise ValueError(f"calibration: expected a Calibration (`load_calibration`), got {type(calibration).__name__}")
    # Inside a traced function the choice is still computed with concrete values.
    with jax.ensure_compile_time_eval() if is_traced(jnp.zeros(())) else contextlib.nullcontext():
        known = default_calibration() if calibration is None else calibration
        if isinstance(alternatives, Suite):
            if args:
                raise ValueError("args: leave them out with a suite; `inputs` names the sizes of its model")
            work = work_of_suite(alternatives, inputs, known)
        else:
            if inputs is not None:
                raise ValueError("inputs: leave them out with functions, which take positional arguments")
            work = work_of_functions(alternatives, args, known, word, check)
        found = decide(work, word, regret=float(regret), limit_ms=float(limit_ms), check=check)
    with _keeping:
        kept = found
        if found.by == "measured":  # a measurement replaces the prediction
            for own in [key for key, one in _choices.items() if one.by == "model" and one.key == found.key]:
                del _choices[own]
            kept = _recalled(found)
        if asked is not None and Party.of(work.devices) is ALONE:
            if len(_choices) >= MOST_CHOICES:
                del _choices[next(iter(_choices))]
            _choices[asked] = _bare(kept)
    return found


def clear_choices() -> None:
    """Empty this process's cache of choices. The files of choices stay.

    Examples:
        >>> clear_choices()
    """
    with _keeping:
        _choices.clear()


def _asked(alternatives: Any, args: tuple[Any, ...], *options: Any) -> tuple[Any, ...] | None:
    """Return the cache key of a choice among jitted functions; None if some object cannot be in a key."""
    try:
        named = [(name, handle(fn)) for name, fn in alternatives.items() if type(fn) is JITTED]
        if len(named) < len(alternatives):
            return None
        shapes = tuple([_shape_of(arg) for arg in args])
        *numbers, calibration, check = options
        key = *named, shapes, *numbers, handle(calibration), check, *callers_settings()
        hash(key)
    except (AttributeError, TypeError):  # no hash, no weak references, or refused later
        return None
    return key


def _is_due(known: Choice, measure: str) -> bool:
    """Whether to measure again, because the choice is provisional and the machine is quiet."""
    global _look
    if not known.is_provisional or measure == "never":
        return False
    if time.monotonic() > _look[0] + LOOK_AGAIN_S:
        others = OtherWork()
        time.sleep(LEAST_WATCH_S)
        _look = time.monotonic(), others.share() < BUSY
    return _look[1]


def _shape_of(arg: Any) -> Any:
    """Return what a choice depends on in an argument: all of an array except its values; a number's type and value."""
    if isinstance(arg, jax.Array):
        return arg.shape, arg.dtype, arg.weak_type, arg.sharding
    if isinstance(arg, np.generic):
        return type(arg), arg.tobytes()
    if hasattr(arg, "dtype"):
        return type(arg), arg.shape, arg.dtype, getattr(arg, "sharding", None)
    if arg is None or isinstance(arg, bool | int | float | complex | str | bytes):
        return type(arg), repr(arg)
    leaves, structure = jax.tree.flatten(arg)
    return handle(arg) if len(leaves) == 1 and leaves[0] is arg else (structure, *map(_shape_of, leaves))


# --- The path of a choice ------------------------------------------------------------------------


def recalled(work: Work, measure: str = "never", regret: float = REGRET, check: bool = True) -> Choice | None:
    """Return the remembered choice, or None if there is none that runs here. The arguments are as in `decide`.

    Raises:
        ValueError: no alternative runs.
    """
    key = _key_of(work, check)[0]
    _check_alike(work, key, measure, regret)
    return _remembered(work, Memory(), key, measure, regret)


def decide(
    work: Work, measure: str, *, regret: float = REGRET, limit_ms: float = LIMIT_MS, check: bool = True
) -> Choice:
    """Choose among the alternatives of a `Work`: a remembered choice, else a sure prediction, else a measurement.

    The arguments after `work` are as in `choose`.

    Raises:
        ValueError: no alternative runs; results differ; `measure` is "never" but nothing predicts the times; the
        processes give different programs or options, or a process has ended.
    """
    global _look
    key, machine = _key_of(work, check)
    memory, party = Memory(), Party.of(work.devices)
    _check_alike(work, key, measure, regret, limit_ms)
    if (found := _remembered(work, memory, key, measure, regret)) is not None:
        return found
    ways, chances = _predicted(work, party, regret)
    best, *others = chances
    # An alternative that the model rules out is neither compiled nor timed. An extrapolation rules nothing out.
    out = [own for own in others if chances[own] >= work.sure and ways[best].in_domain and ways[own].in_domain]
    entrants = {"never": [best], "undecided": [own for own in chances if own not in out], "always": [*chances]}[measure]
    is_predicted = ways[best].predicted_ns is not None
    fields = {"regret": regret, "key": key, "kind": work.kind, "label": work.label}
    if len(entrants) < 2:
        if others and not is_predicted:
            names = ", ".join(own.name for own in work.ways if not own.failed)
            raise ValueError(
                f"measure: nothing predicts which of {names} is the fastest here; measure them with "
                "measure='undecided', or run `rlxjax calibrate`"
            )
        sure = min((chances[own] for own in others), default=1.0) if is_predicted else None
        return _choice(ways, best, by="model", probability=sure, **fields)
    # Processes that choose together take no lock: the process with the lock would wait for the others forever.
    with memory.timing() if party is ALONE else contextlib.nullcontext(True) as is_alone:
        # Another thread or process may have timed the alternatives meanwhile.
        if (found := _remembered(work, memory, key, measure, regret)) is not None:
            return found
        begun_s, watch = time.perf_counter(), OtherWork()
        timed, ways = _timed(ways, [*chances], entrants, party, regret, limit_ms / 1e3, check)
        load = max(party.gathered(watch.share()))
        _look = time.monotonic(), load < BUSY and is_alone
        found = _choice(
            ways,
            timed.best,
            by="measured",
            probability=float(min([timed.probability, *(chances[own] for own in chances if own not in entrants)])),
            is_tie=bool(timed.tied),
            rounds=timed.rounds,
            measuring_s=time.perf_counter() - begun_s,
            is_alone=is_alone,
            load=load,
            calibration=None if work.calibrated is None else digest_of_model(work.calibrated),
            machine=machine,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **fields,
        )
        if party.is_first:
            memory.keep(_bare(found))
    return found


def _choice(ways: list[Way], place: int, **fields: Any) -> Choice:
    bare = tuple(dataclasses.replace(own, fn=None, call=None, make=None) for own in ways)
    return Choice(ways[place].name, alternatives=bare, fn=ways[place].fn, **fields)  # pyright: ignore[reportArgumentType]


def _bare(choice: Choice) -> Choice:
    return dataclasses.replace(choice, fn=None)  # pyright: ignore[reportArgumentType]


def _check_alike(work: Work, *question: Any) -> None:
    """Raise a `ValueError` if the processes that hold the arguments ask different questions."""
    said = Party.of(work.devices).gathered(digest(*question))
    if len({*said}) > 1:
        differ = "the processes that hold the arguments ask different questions"
        same = "every process must give the same programs in the same order, and the same options"
        raise ValueError(f"alternatives: {differ}; {same}")


def _key_of(work: Work, check: bool) -> tuple[str, Any]:
    """Return the key of a choice, and the fingerprint of the machine."""
    if all(own.failed for own in work.ways):
        failures = "; ".join(f"{own.name}: {own.failed}" for own in work.ways)
        raise ValueError(f"alternatives: none of them runs: {failures}")
    setting, machine = setting_of(work.calibrated, work.devices)
    contents = sorted((own.content, own.extra_ns) for own in work.ways)
    return digest(setting, work.kind, contents, work.workload, check), machine


def _recalled(known: Choice) -> Choice:
    """Return a copy of a choice, marked as pinned if it is pinned, otherwise as remembered."""
    ways = tuple(dataclasses.replace(own, compile_s=None) for own in known.alternatives)
    by = "pinned" if known.by == "pinned" else "remembered"
    return dataclasses.replace(known, by=by, alternatives=ways, measuring_s=0.0)


def _remembered(work: Work, memory: Memory, key: str, measure: str, regret: float) -> Choice | None:
    """Return the remembered choice if it runs here and is pinned or meets `measure` and `regret`; otherwise None."""
    party = Party.of(work.devices)
    known = memory.look_up(key) if party.is_first else None
    known = None if known is not None and _is_due(known, measure) else known
    if party is not ALONE:
        said = party.gathered(None if known is None else json_of_choice(known))[0]
        known = None if said is None else choice_of_json(said)
    if known is None:
        return None
    running = {own.content: own for own in reversed(work.ways) if not own.failed}
    by_content = {own.content: own for own in known.alternatives}
    chosen = running.get(known.chosen.content)
    if chosen is None or not by_content.keys() >= {own.content for own in work.ways}:
        return None
    able, is_fine = [own for own in by_content.values() if not own.failed], known.regret <= regret
    is_whole = len(able) == 1 or all(own.measured_ns is not None for own in able)
    is_enough = {"never": True, "undecided": is_fine, "always": is_fine and is_whole}[measure]
    if known.by != "pinned" and not is_enough:
        return None
    ways = tuple(dataclasses.replace(by_content[own.content], name=own.name) for own in work.ways)
    known = dataclasses.replace(known, name=chosen.name, alternatives=ways, without_pin=None, fn=chosen.fn)
    return _recalled(known)


def _predicted(work: Work, party: Party, regret: float) -> tuple[list[Way], dict[int, float]]:
    """Return the predicted alternatives; and, best first, each index with the probability of not beating the best."""
    ways, sd_ns = [*work.ways], np.full((len(work.ways),) * 2, np.inf)
    if work.calibrated is not None:
        ways, sd_ns = work.predict(work.calibrated)
    if party is not ALONE:  # all processes use the predictions of the first process
        names = ("predicted_ns", "predicted_interval_ns", "in_domain")
        said = party.gathered([[[getattr(own, name) for name in names] for own in ways], sd_ns.tolist()])[0]
        sd_ns = np.array(said[1])
        for place, (time_ns, ends, inside) in enumerate(said[0]):
            figures = {"predicted_ns": time_ns, "predicted_interval_ns": ends and tuple(ends), "in_domain": inside}
            ways[place] = dataclasses.replace(ways[place], **figures)
    costs = np.array([math.inf if own.predicted_ns is None else own.predicted_ns + own.extra_ns for own in ways])
    order = sorted((place for place, own in enumerate(ways) if not own.failed), key=costs.__getitem__)
    first = order[0]
    sd_ns = np.where(np.isfinite(costs), sd_ns[first], np.inf)
    margins_ns = costs - costs[first] / (1.0 + regret) if math.isfinite(costs[first]) else costs
    chances = np.where(sd_ns > 0.0, faster_probability(margins_ns, sd_ns), 1.0)
    return ways, {place: float(chances[place]) for place in order}


def _timed(
    ways: list[Way], order: list[int], entrants: list[int], party: Party, regret: float, limit_s: float, check: bool
) -> tuple[Contest, list[Way]]:
    """Compile, check and time the entrants, starting with the favourite; if it fails, do so with all alternatives."""
    ways, left, first_s, failed = [*ways], [], {}, {}
    expected: Any = None
    with Caller() as caller:
        for place in order:
            if place not in entrants and order[0] not in failed:
                continue
            begun_s, own, result, reason = time.perf_counter(), ways[place], None, ""
            run = lambda own=own: jax.block_until_ready(own.call())  # noqa: E731
            # All processes compile before any process waits for results. Without `make`, the first call compiles.
            longest_call_s = longest_s(limit_s)
            first = (own.make, COMPILE_S) if own.make else (run, longest_call_s + FIRST_CALL_S)
            for call, longest in (first, (run, longest_call_s)):
                try:
                    result, reason = (None, reason) if reason else (caller(call, longest), "")
                except FailedError as error:
                    reason = str(error)
                reason = party.first_text(reason)
                first_s.setdefault(place, time.perf_counter() - begun_s)
            if reason:
                failed[place] = reason
                continue
            left.append(place)
            if not check or expected is None:
                expected = (own, result) if check else None
                continue
            wrong = difference(expected[1], result)
            if party.first_text(wrong):  # all processes compare again, because a program may run on all of them
                wrong = party.first_text(difference(expected[1], result, [expected[0].call, own.call]))
            if wrong:
                raise unequal(expected[0].name, own.name, wrong)
    result = expected = None
    calls, extra_ns = [ways[place].call for place in left], [ways[place].extra_ns for place in left]
    found = contest(calls, regret=regret, limit_s=limit_s, extra_ns=extra_ns, party=party) if left else None
    failed |= {left[number]: reason for number, reason in found.failed.items()} if found else {}
    if found is None or len(found.failed) == len(left):
        said = "; ".join(f"{ways[place].name} {reason}" for place, reason in sorted(failed.items()))
        longer = "; a larger limit_ms waits longer" if "did not end" in said else ""
        raise ValueError(f"alternatives: none of them runs: {said}{longer}")
    for place, reason in failed.items():
        ways[place] = dataclasses.replace(ways[place], failed=reason)
    times = (own.tolist() for own in (found.time_ns, found.low_ns, found.high_ns))
    for number, (place, time_ns, low_ns, high_ns) in enumerate(zip(left, *times, strict=True)):
        if math.isfinite(time_ns):
            seconds = max(first_s[place] - (0.0 if ways[place].make else time_ns / 1e9), 0.0)
            measured = {"measured_ns": time_ns, "measured_interval_ns": (low_ns, high_ns), "compile_s": seconds}
            ways[place] = dataclasses.replace(ways[place], is_tie=number in found.tied, **measured)
    return found._replace(best=left[found.best]), ways
