"""Stages of a program: composed, taken apart, profiled by groups, and written as code."""

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from rlxjax.jaxpr import FunctionProfile, TripCounts, profile_function
from rlxjax.targets import DoesNotFitError, TargetDevice

#: The first and the last of some stages that are neighbours.
Span = tuple[int, int]


class Stage(NamedTuple):
    """A program by itself: its name, its jitted function, the shapes that it is called with, and what it gives."""

    name: str
    fn: Any
    args: tuple[Any, ...]
    result: Any


def as_arguments(result: Any) -> tuple[Any, ...]:
    """Return what a stage gives as the arguments of the next: the parts of a tuple, or the one result."""
    return result if isinstance(result, tuple) and not hasattr(result, "_fields") else (result,)


def composed(stages: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """Return the stages as one function."""

    def together(*args: Any) -> Any:
        result: Any = args
        for stage in stages:
            result = stage(*as_arguments(result))
        return result

    return together


def in_order(stages: Sequence[Callable[..., Any]], args: tuple[Any, ...]) -> list[Stage]:
    """Return the stages, each jitted, with the shapes that each is called with.

    A stage is traced here, and nowhere again: whatever it is part of takes what JAX remembers of the jitted one.
    """
    found, given = [], args
    for number, fn in enumerate(stages):
        name = getattr(fn, "__name__", "")
        name = name if name.isidentifier() else f"stage{number + 1}"  # where it has none that code could use
        jitted: Any = fn if isinstance(fn, jax.stages.Wrapped) else jax.jit(functools.partial(fn))
        try:
            result = jitted.eval_shape(*given)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (a user's function may raise anything, and may exit)
            reason = str(error).strip().partition("\n")[0]
            before = "these arguments" if number == 0 else f"what {found[-1].name} gives"
            raise ValueError(
                f"stages: expected {name} (number {number + 1}) to take {before}, but it raised "
                f"{type(error).__name__}: {reason}"
            ) from error
        found.append(Stage(name, jitted, given, result))
        given = as_arguments(result)
    return found


def groups_of(stages: Sequence[Stage]) -> dict[Span, Stage]:
    """Return every group of neighbours as one jitted program."""
    groups = {}
    for first, last in itertools.combinations_with_replacement(range(len(stages)), 2):
        own = stages[first : last + 1]
        fn = own[0].fn if first == last else jax.jit(composed([stage.fn for stage in own]))
        groups[first, last] = Stage("+".join(stage.name for stage in own), fn, own[0].args, own[-1].result)
    return groups


def parts_of(whole: Stage) -> list[Stage]:
    """Return the programs that a function runs where it is not jitted: its jitted calls, and each other operation."""
    jaxpr = whole.fn.trace(*whole.args).jaxpr.jaxpr
    parts = []
    for equation in jaxpr.eqns:
        name = str(equation.params.get("name", equation.primitive.name))
        alone, inputs = equation_alone(jaxpr, equation)
        shapes = tuple(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in inputs)
        parts.append(Stage(name, jax.jit(alone), shapes, None))
    return parts


def equation_alone(jaxpr: Any, equation: Any) -> tuple[Callable[..., Sequence[Any]], list[Any]]:
    """Return an equation of a jaxpr as a function, and the variables that are its arguments."""
    from jax.extend import core  # which loads Pallas

    inputs = list(dict.fromkeys(var for var in equation.invars if not hasattr(var, "val")))  # literals have one
    alone = jaxpr.replace(constvars=[], invars=inputs, outvars=equation.outvars, eqns=[equation])
    return core.jaxpr_as_fun(core.ClosedJaxpr(alone, ())), inputs


def profiles_of(
    groups: Mapping[Span, Stage], trip_counts: TripCounts | None, device: TargetDevice | None = None
) -> tuple[dict[Span, FunctionProfile], dict[Span, DoesNotFitError]]:
    """Return the profile of each group, with its own share of the trip counts, which that of all stages has to take.

    Of a device the groups are compiled for it; those that its compiler refuses for their memory come second.
    """
    refused: dict[Span, DoesNotFitError] = {}
    options: dict[str, Any] = {} if device is None else {"level": "compiled", "target": device}

    def profiles(of: Mapping[Span, TripCounts | None]) -> dict[Span, FunctionProfile]:
        found = {}
        for span, trips in of.items():
            try:
                found[span] = profile_function(groups[span].fn, *groups[span].args, trip_counts=trips, **options)
            except DoesNotFitError as error:
                refused[span] = DoesNotFitError(f"{groups[span].name}: {error}", error.needed_bytes)
        return found

    found = profiles(dict.fromkeys(groups))
    if trip_counts is None:
        return found, refused
    whole = max(groups, key=lambda span: span[1] - span[0])
    shares: dict[Span, TripCounts | None] = {}
    if isinstance(trip_counts, Mapping):
        # A line that a group does not have is no mistake, since another one has it.
        for span, profile in found.items():
            lines = (loop.line for loop in profile.unknown_loops)
            shares[span] = {line: trip_counts[line] for line in lines if line in trip_counts}
    else:
        if alone := [error for span, error in refused.items() if span[0] == span[1]]:
            raise alone[0]  # whose loops nobody counts
        given = list(trip_counts)
        loops = (len(found[number, number].unknown_loops) for number in range(whole[1] + 1))
        before = list(itertools.accumulate(loops, initial=0))
        shares = {(first, last): given[before[first] : before[last + 1]] for first, last in groups}
    shares[whole] = trip_counts
    return found | profiles({span: share for span, share in shares.items() if share or span == whole}), refused


def as_code(stages: Sequence[Stage], groups: Sequence[Sequence[int]]) -> str:
    """Return the change as Python: one jitted function a group, with what it may overwrite, and their composition."""
    names = ["fused"] if len(groups) == 1 else [f"fused{number + 1}" for number in range(len(groups))]
    first = _argument_names(stages[0])
    lines, call = [], ", ".join(first)
    for name, group in zip(names, groups, strict=True):
        own = [stages[number] for number in group]
        arguments = _argument_names(own[0])
        text = ", ".join(arguments)
        for place, stage in enumerate(own):
            text = f"{stage.name}({_star(stage) if place else ''}{text})"
        fn = own[0].name if len(own) == 1 else f"lambda {', '.join(arguments)}: {text}"
        lines.append(f"{name} = jax.jit({fn}{_donated(own[0], own[-1], arguments)}")
        call = f"{name}({_star(own[0]) if group[0] else ''}{call})"
    if len(groups) > 1:
        lines.append(f"fused = lambda {', '.join(first)}: {call}")
    return "\n".join(lines)


def _star(stage: Stage) -> str:
    """Return how a stage takes the results of the one before it: all of several."""
    return "*" if len(stage.args) != 1 else ""


def _donated(first: Stage, last: Stage, names: Sequence[str]) -> str:
    """Return the end of a call of `jax.jit`: which arguments the program may overwrite."""
    free = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(last.result)]
    donated: list[int] = []
    for place, arg in enumerate(first.args):
        own = (getattr(arg, "shape", None), getattr(arg, "dtype", None))
        if own in free:
            free.remove(own)
            donated.append(place)
    if not donated:
        return ")"
    used = " and ".join(names[place] for place in donated)
    numbers = ", ".join(map(str, donated)) + ("," if len(donated) == 1 else "")
    return f", donate_argnums=({numbers}))  # if nobody uses {used} afterwards"


def _argument_names(stage: Stage) -> list[str]:
    """Return names of a stage's arguments: those of its parameters where each argument has one."""
    try:
        parameters = list(inspect.signature(stage.fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    count = len(stage.args)
    return named[:count] if len(named) >= count else [f"x{place}" for place in range(count)]
