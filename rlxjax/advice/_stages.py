"""Stages of a program: composed, taken apart, and written as code."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax


class Stage(NamedTuple):
    """A function that is jitted by itself, and the shapes that it is called with."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]


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
    """Return the stages with the shapes that each is called with.

    Raises:
        ValueError: a stage that does not trace with what the one before it gives.
    """
    found, given = [], args
    for number, fn in enumerate(stages):
        name = name_of(fn, number)
        try:
            result = jax.eval_shape(fn, *given)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (a user's function may raise anything, and may exit)
            reason = str(error).strip().partition("\n")[0]
            before = "these arguments" if number == 0 else f"what {found[-1].name} gives"
            raise ValueError(
                f"stages: expected {name} (number {number + 1}) to take {before}, but it raised "
                f"{type(error).__name__}: {reason}"
            ) from error
        found.append(Stage(name, fn, given))
        given = as_arguments(result)
    return found


def parts_of(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Stage]:
    """Return the programs that a function runs where it is not jitted: its jitted calls, and each other operation."""
    from jax.extend import core  # which loads Pallas

    whole = jax.make_jaxpr(fn)(*args).jaxpr
    parts = []
    for equation in whole.eqns:
        name = str(equation.params.get("name", equation.primitive.name))
        inputs = list(dict.fromkeys(var for var in equation.invars if not hasattr(var, "val")))  # literals have one
        alone = whole.replace(constvars=[], invars=inputs, outvars=equation.outvars, eqns=[equation])
        shapes = tuple(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in inputs)
        parts.append(Stage(name, core.jaxpr_as_fun(core.ClosedJaxpr(alone, ())), shapes))
    return parts


def name_of(fn: Callable[..., Any], number: int) -> str:
    """Return a function's name, or a number where it has none that code could use."""
    name = getattr(fn, "__name__", "")
    return name if name.isidentifier() else f"stage{number + 1}"


def as_code(stages: Sequence[Stage], result: Any) -> str:
    """Return the change as Python: one jitted function, with what it may overwrite.

    Args:
        stages: in order.
        result: shapes of what the last one gives.
    """
    names = _argument_names(stages[0])
    text = ", ".join(names)
    for number, stage in enumerate(stages):
        # Of a stage that gives several results, the next one takes all.
        star = "*" if number and len(stage.args) != 1 else ""
        text = f"{stage.name}({star}{text})"
    free = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(result)]
    donated = []
    for place, arg in enumerate(stages[0].args):
        own = (getattr(arg, "shape", None), getattr(arg, "dtype", None))
        if own in free:
            free.remove(own)
            donated.append(place)
    plain = f"fused = jax.jit(lambda {', '.join(names)}: {text})"
    if not donated:
        return plain
    used = " and ".join(names[place] for place in donated)
    numbers = ", ".join(map(str, donated)) + ("," if len(donated) == 1 else "")
    return f"{plain[:-1]}, donate_argnums=({numbers}))  # if nobody uses {used} afterwards"


def _argument_names(stage: Stage) -> list[str]:
    """Return names of a stage's arguments: those of its parameters where each argument has one."""
    try:
        parameters = list(inspect.signature(stage.fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    count = len(stage.args)
    return named[:count] if len(named) >= count else [f"x{place}" for place in range(count)]
