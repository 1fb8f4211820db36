"""Which of several functions to run, or of the ways that a latency model knows: sure by the model, or measured."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax._checks import check_at_least, is_traced
from rlxjax._chunks import callers_settings
from rlxjax._values import handle
from rlxjax.calibration import Calibration, default_calibration
from rlxjax.fit import Suite

from ._choice import Choice, measure_word
from ._contender import LIMIT_MS, REGRET
from ._decide import decide
from ._of_functions import question_of_functions
from ._of_variants import question_of_suite
from ._processes import ALONE, Party

#: Choices of this process that are kept, about 2 kB each; none holds a function or an argument.
MOST_CHOICES = 16_384
#: What `jax.jit` returns.
JITTED = type(jax.jit(abs))
_choices: dict[Any, Choice] = {}
_keeping = threading.Lock()


def choose(
    alternatives: Mapping[str, Callable[..., Any]] | Suite,
    *args: Any,
    inputs: Mapping[str, float] | None = None,
    measure: str | None = None,
    regret: float = REGRET,
    limit_ms: float = LIMIT_MS,
    calibration: Calibration | None = None,
    check: bool = True,
) -> Choice:
    """Return the alternative that is the fastest here: by the model where it is sure, measured where it is not.

    What was measured is remembered, in this process and in `RLXJAX_HOME`, for the same machine, software, calibration,
    arguments and alternatives, and the model learns from it. Between jitted functions a remembered choice is found in
    some microseconds, so `choose(alternatives, x)(x)` may stand where one of the alternatives would. Functions that are
    not jitted are traced at each call, which takes milliseconds, since their Python code may read what has changed.

    All processes whose devices hold the arguments have to choose together, in the same order: the first one decides,
    and a program's time is that of the slowest process.

    Args:
        alternatives: functions of JAX by name, each of the same arguments and result. Each runs as it is: what is to be
            one program is jitted, what is not runs its operations, and the jitted functions that it calls, one by one.
            Or a suite of your own: the variants of its model that give the result of `inputs`, run by its `program`.
        *args: of the functions: arrays as they are called with, `jax.ShapeDtypeStruct`s, which are filled at random
            where something is measured, or trees of them.
        inputs: of the suite's model, by name.
        measure: "undecided", where the model does not rule out all alternatives but one; "always", all of them;
            "never". `RLXJAX_MEASURE` unless given, and "undecided" where that is not set.
        regret: relative difference that does not count: alternatives within it are a tie, and the model's favourite
            stays.
        limit_ms: of timing, compiling apart. A call of more than a hundred times as long, and a second at least,
            counts as one without end: it goes on in a thread of its own, which does not keep the process from ending.
        calibration: of this machine; `default_calibration()` unless given.
        check: whether the alternatives that are run have to give the same results on these arguments: each
            floating-point number within the square root of its dtype's precision, or as far as rounding moves it.

    Returns:
        The choice, which is called as the alternatives are.

    Raises:
        ValueError: no alternative, or none that runs; alternatives of different results, or with side effects or
            donated arguments, that would have to be measured; traced arguments; nothing to decide by with
            `measure="never"`; a number that cannot be; processes of one job that ask differently, or one that ended.

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
    if asked is not None and (known := _choices.get(asked)) is not None:
        found = object.__new__(Choice)  # a copy in a microsecond, with the function that was handed over
        found.__dict__.update(known.__dict__, fn=alternatives[known.name])  # pyright: ignore[reportIndexIssue]
        return found
    check_at_least(regret, "regret", what="number", most=1.0)
    check_at_least(limit_ms, "limit_ms", 1e-3, "number of milliseconds", most=1e7)
    if is_traced(*jax.tree.leaves(args)):
        raise ValueError("args: expected arrays or shapes, got traced values; choose outside of the traced function")
    if calibration is not None and not isinstance(calibration, Calibration):
        given = type(calibration).__name__
        raise ValueError(f"calibration: expected a Calibration (load_calibration), got {given}")
    options = {"measure": word, "regret": float(regret), "limit_ms": float(limit_ms), "check": check}
    # Inside of a function that is being traced everything here is computed all the same.
    with jax.ensure_compile_time_eval() if is_traced(jnp.zeros(())) else contextlib.nullcontext():
        known = default_calibration() if calibration is None else calibration
        if isinstance(alternatives, Suite):
            if args:
                raise ValueError("args: expected none beside a suite, whose model has `inputs`")
            question = question_of_suite(alternatives, inputs, known, options)
        else:
            if inputs is not None:
                raise ValueError("inputs: expected none of functions, which take arguments")
            question = question_of_functions(alternatives, args, known, options)
        found = decide(question)
    _keep(None if Party.of(question.devices) is not ALONE else asked, found)
    return found


def _keep(asked: Any, found: Choice) -> None:
    """Keep a choice for later calls; what the model said beforehand does not outlive a measurement."""
    with _keeping:
        if found.by == "measured":
            for own in [key for key, one in _choices.items() if one.by == "model"]:
                del _choices[own]
            found = dataclasses.replace(found, by="remembered", measuring_s=0.0)
        if asked is None:
            return
        if len(_choices) >= MOST_CHOICES:
            del _choices[next(iter(_choices))]
        _choices[asked] = dataclasses.replace(found, fn=None)  # pyright: ignore[reportArgumentType]


def _asked(
    alternatives: Any,
    args: tuple[Any, ...],
    word: str,
    regret: float,
    limit_ms: float,
    calibration: Any,
    check: bool,
) -> tuple[Any, ...] | None:
    """Return what a choice of this process is looked up by; None where Python code may read what no key says.

    Jitted functions, which JAX traces once for arguments and settings, are looked up by themselves, not by `==`.
    """
    try:
        named = [(name, handle(fn)) for name, fn in alternatives.items() if type(fn) is JITTED]
        if len(named) < len(alternatives):
            return None
        shapes = tuple([_shape_of(arg) for arg in args])
        key = *named, shapes, word, regret, limit_ms, handle(calibration), check, *callers_settings()
        hash(key)
    except (AttributeError, TypeError):  # what has no hash or no weak references, or is refused later
        return None
    return key


def _shape_of(arg: Any) -> Any:
    """Return what counts of an argument: all but the values of an array; of what is no array its type and bits."""
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
