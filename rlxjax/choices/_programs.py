"""Turn functions, or the variants of a suite, into the alternatives of a `Work`, and predict their times."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax._chunks import on_cpu
from rlxjax._tracing import default_device, is_from_jit, name_of, of_arrays_only, wrong_count
from rlxjax._values import by_value, counted
from rlxjax.calibration import CalibratedModel, Calibration, FunctionPrediction, FunctionTimes, predict_profiles
from rlxjax.fit import SURE, Cell, Runs, Suite, compare, estimate
from rlxjax.jaxpr import FunctionProfile, profile_function
from rlxjax.models import FUNCTIONS

from ._description import content_of, description_of, digest
from ._way import SURE_OF_FUNCTIONS, Way

#: Random integers are below this number, so that they are valid indices into arrays of at least this length.
INTEGERS = 100
#: The alternatives with their predictions; and a matrix `[n, n]` that holds the standard deviation in ns of
#: the difference between each two predictions, or infinity if it is unknown.
Predicted = tuple[list[Way], np.ndarray]


@by_value
@dataclasses.dataclass(frozen=True)
class Work:
    """A task that several alternatives can do, and how to predict their times.

    Attributes:
        ways: the alternatives.
        predict: function from the calibrated model to predictions.
        calibrated: the calibrated model; None if there is no calibration.
        kind: "functions" if the alternatives are functions; for a suite, the name of its latency model.
        label: a description of the task in words.
        workload: what all alternatives share, as JSON values: sizes of a suite's model, or facts about arguments.
        devices: the devices that hold the arguments.
        sure: the model rules out an alternative if the alternative is slower with at least this probability.
    """

    ways: Sequence[Way]
    predict: Callable[[CalibratedModel], Predicted]
    calibrated: CalibratedModel | None
    kind: str
    label: str
    workload: Mapping[str, Any]
    devices: Sequence[Any] = ()
    sure: float = SURE


# --- Programs ------------------------------------------------------------------------------------


class Stage(NamedTuple):
    """A program: its name, its jitted function, the shapes of its arguments and the shapes of its result."""

    name: str
    fn: Any
    args: tuple[Any, ...]
    result: Any


def as_arguments(result: Any) -> tuple[Any, ...]:
    """Return the result of a stage as arguments of the next stage: the parts of a tuple, or any other result itself."""
    return result if isinstance(result, tuple) and not hasattr(result, "_fields") else (result,)


def in_order(stages: Sequence[Callable[..., Any]], args: tuple[Any, ...]) -> list[Stage]:
    """Jit and trace each function once, on the result of the previous function; return them as stages."""
    found, given = [], args
    for number, fn in enumerate(stages):
        name = name_of(fn, "")
        name = name if name.isidentifier() else f"stage{number + 1}"  # a name that code can use
        try:
            jitted: Any = fn if is_from_jit(fn) else jax.jit(of_arrays_only(fn))
            result = jitted.eval_shape(*given)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (a user's function may raise anything, and may exit)
            reason = str(error).strip().partition("\n")[0]
            if isinstance(error, TypeError) and (wrong := wrong_count(fn, given, {})):
                raise ValueError(f"stages: {wrong}{f' from {found[-1].name}' if found else ''}") from error
            given = f"the result of {found[-1].name}" if found else "these arguments"
            raised = f"but it raised {type(error).__name__}: {reason}"
            raise ValueError(f"stages: expected stage {number + 1}, {name}, to take {given}, {raised}") from error
        found.append(Stage(name, jitted, given, result))
        given = as_arguments(result)
    return found


def parts_of(whole: Stage) -> list[Stage]:
    """Return the programs that a function without jit runs: each jitted function it calls, and each other operation."""
    jaxpr = whole.fn.trace(*whole.args).jaxpr.jaxpr
    parts = []
    for equation in jaxpr.eqns:
        name = str(equation.params.get("name", equation.primitive.name))
        alone, inputs = equation_alone(jaxpr, equation)
        shapes = tuple(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in inputs)
        parts.append(Stage(name, jax.jit(alone), shapes, None))
    return parts


def equation_alone(jaxpr: Any, equation: Any) -> tuple[Callable[..., Sequence[Any]], list[Any]]:
    """Return a function that runs only this equation of a jaxpr, and the variables that are its arguments."""
    from jax.extend import core  # loaded when first used, because it loads Pallas

    inputs = list(dict.fromkeys(var for var in equation.invars if not hasattr(var, "val")))  # no literals
    alone = jaxpr.replace(constvars=[], invars=inputs, outvars=equation.outvars, eqns=[equation])
    return core.jaxpr_as_fun(core.ClosedJaxpr(alone, ())), inputs


# --- Functions -----------------------------------------------------------------------------------


def work_of_functions(
    alternatives: Mapping[str, Any], args: tuple[Any, ...], known: Calibration | None, measure: str, check: bool
) -> Work:
    """Trace the functions and return them as the alternatives of a `Work`."""
    if not isinstance(alternatives, Mapping) or not alternatives:
        raise ValueError(f"alternatives: expected functions by name, or a Suite, got {alternatives!r}")
    arrays = functools.cache(lambda: filled(args))
    ways, parts, devices, expected = [], [], devices_of(args), None
    for name, given in alternatives.items():
        if not isinstance(name, str):
            raise ValueError(f"alternatives: expected a text as each name, got {name!r}")
        if not callable(given):
            raise ValueError(f"alternatives: expected {name!r} to be a function, got {given!r}")
        try:
            whole = in_order([given], args)[0]
        except ValueError as error:
            said = str(error).partition("but it ")[2] or str(error).removeprefix("stages: ")
            ways.append(Way(name, content=digest("fails", name), fn=given, failed=said))
            parts.append(list)
            continue
        program = whole.fn.trace(*whole.args)
        if len(program.jaxpr.jaxpr.invars) > len(jax.tree.leaves(program.args_info)):
            raise ValueError(f"alternatives: {name!r} captures traced values; choose outside the traced function")
        if measure != "never":
            check_repeatable(name, program)
        expected = expected or (name, whole.result)
        if check and (wrong := unlike(expected[1], whole.result)):
            raise unequal(expected[0], name, wrong)
        is_jitted = whole.fn is given
        devices += devices_of([program.jaxpr.consts, _places_in(program.jaxpr.jaxpr)])
        parts.append(functools.partial(list, [whole]) if is_jitted else functools.partial(parts_of, whole))
        make = (lambda program=program: program.lower().compile()) if is_jitted else None
        content = content_of([program], is_jitted)
        ways.append(Way(name, content=content, fn=given, call=lambda fn=given: fn(*arrays()), make=make))
    # The name distinguishes programs that differ only in compiler options, which the model does not know.
    contents = np.array([own.content for own in ways])
    are_alike = (contents[:, None] == contents) & ~np.eye(len(ways), dtype=bool)
    for place in np.flatnonzero(are_alike.any(1)).tolist():
        ways[place] = dataclasses.replace(ways[place], content=digest(ways[place].content, ways[place].name))

    def predict(calibrated: CalibratedModel) -> Predicted:
        profiles: list[FunctionProfile] = []
        places = []
        for own in parts:
            try:
                found = [profile_function(part.fn, *part.args) for part in own()]
            except ValueError:  # a part cannot be counted
                found = []
            places.append(range(len(profiles), len(profiles) + len(found)))
            profiles += found
        if not profiles:
            return ways, np.full(are_alike.shape, np.inf)
        found, sd_ns = predicted_programs(ways, predict_profiles(calibrated, profiles), places)
        return found, np.where(are_alike, np.inf, sd_ns)

    calibrated = None if known is None else known.models.get(FUNCTIONS.name)
    label = f"{' or '.join(alternatives)} of {in_words(args)}"
    return Work(ways, predict, calibrated, FUNCTIONS.name, label, where_of(args), devices, sure=SURE_OF_FUNCTIONS)


def unlike(one: Any, other: Any) -> str:
    """Say how the second result differs from the first in structure, shapes or dtypes; return "" if it does not."""
    (mine, structure), (others, other_structure) = (jax.tree.flatten(opened(own)) for own in (one, other))
    if len(mine) != len(others):
        return f"{counted(len(others), 'array')} instead of {len(mine)}"
    if structure != other_structure:
        said = [str(own).removeprefix("PyTreeDef(").removesuffix(")") for own in (other_structure, structure)]
        return "its structure is {:.80} instead of {:.80}, where * is an array".format(*said)
    for number, pair in enumerate(zip(others, mine, strict=True)):
        got, wanted = (f"{jnp.result_type(own)}{list(getattr(own, 'shape', ()))}" for own in pair)
        if got != wanted:
            return f"array {number} is {got} instead of {wanted}"
    return ""


def opened(tree: Any) -> Any:
    """Return a result in which lists replace tuples and named tuples, and dictionaries replace other mappings."""
    if isinstance(tree, tuple | list):
        return [*map(opened, tree)]
    return {name: opened(tree[name]) for name in tree} if isinstance(tree, Mapping) else tree


def unequal(name: str, other: str, wrong: str) -> ValueError:
    """Return the error that says that the results of two alternatives differ."""
    said = f"expected the same result of all, but {other!r} differs from {name!r}: {wrong}"
    return ValueError(f"alternatives: {said}; check=False accepts any result")


def in_words(args: tuple[Any, ...]) -> str:
    """Return a text with the dtypes and shapes of arguments, for example "float32[64, 1000]"."""
    leaves = jax.tree.leaves(args)
    return ", ".join(f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else str(leaf) for leaf in leaves)


def check_repeatable(name: str, program: Any) -> None:
    """Raise a `ValueError` if a program cannot run repeatedly, because it has side effects or donates arguments."""
    # A mutable array that the program itself creates is no side effect.
    inside, effects = "InternalMutableArrayEffect", program.jaxpr.effects
    if effects := ", ".join(sorted(str(one) for one in effects if type(one).__name__ != inside)):
        raise ValueError(
            f"alternatives: {name!r} has side effects ({effects}), but measuring runs it repeatedly; remove them, or "
            "use measure='never'"
        )
    inner = [any(equation.params.get("donated_invars", ())) for equation in program.jaxpr.eqns]
    if any(inner) or any(argument.donated for argument in jax.tree.leaves(program.args_info)):
        raise ValueError(
            f"alternatives: {name!r} donates arguments, but measuring needs them for each call; remove the donation, "
            "or use measure='never'"
        )


def figures_of(each: Sequence[FunctionPrediction]) -> dict[str, Any]:
    """Return the fields of a `Way` that hold its prediction; its programs run one after another."""
    time_ns, low_ns, high_ns = (sum(getattr(one, name) for one in each) for name in ("time_ns", "low_ns", "high_ns"))
    inside = all(one.in_domain for one in each)
    return {"predicted_ns": time_ns, "predicted_interval_ns": (low_ns, high_ns), "in_domain": inside}


def predicted_programs(ways: Sequence[Way], times: FunctionTimes, places: Sequence[Sequence[int]]) -> Predicted:
    """Predict alternatives whose programs run one after another."""
    found, sd_ns = [*ways], np.full((len(ways),) * 2, np.inf)
    for number, own in enumerate(places):
        each = [times.predictions[place] for place in own]
        # An incomplete count predicts no time.
        if each and not any(one.uncounted or one.profile.unknown_loops for one in each):
            found[number] = dataclasses.replace(ways[number], **figures_of(each))
    known = [number for number, own in enumerate(found) if own.predicted_ns is not None]
    for row, column in itertools.product(known, known):
        sd_ns[row, column] = float(times.decision(places[row], places[column]).margin_sd_ns)
    return found, sd_ns


def where_of(args: tuple[Any, ...]) -> dict[str, Any]:
    """Return what no jaxpr shows about arguments: the devices of JAX arrays, and the Python types of other values."""
    here, default = jax.local_devices(), jax.sharding.SingleDeviceSharding(default_device())

    def kind(leaf: Any) -> str:
        if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
            return type(leaf).__name__
        place = leaf.sharding or default
        single = isinstance(place, jax.sharding.SingleDeviceSharding)
        numbers = [here.index(device) for device in place.device_set if device in here] if single else place
        return f"{numbers} {place.memory_kind}"

    return {"arguments": [kind(leaf) for leaf in jax.tree.leaves(args)]}


def devices_of(args: Any) -> list[Any]:
    """Return the devices of all arrays and shapes in a tree."""
    places = [getattr(leaf, "sharding", leaf) for leaf in jax.tree.leaves(args)]
    devices = {device for place in places if isinstance(place, jax.sharding.Sharding) for device in place.device_set}
    return sorted(devices - {None}, key=lambda device: device.id)


def _places_in(jaxpr: Any) -> list[jax.sharding.Sharding]:
    """Return the shardings in the equations of a jaxpr. Their meshes may include devices of other processes."""
    found = []
    for equation in jaxpr.eqns if jax.process_count() > 1 else ():
        for value in jax.tree.leaves([*equation.params.values()], is_leaf=lambda x: isinstance(x, jax.sharding.Mesh)):
            if hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns"):
                found += _places_in(getattr(value, "jaxpr", value))
            elif isinstance(value, jax.sharding.Mesh):
                found.append(jax.sharding.NamedSharding(value, jax.sharding.PartitionSpec()))
            elif isinstance(value, jax.sharding.Sharding):
                found.append(value)
    return found


def filled(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments with random arrays in place of shapes. Each call gives the same arrays."""
    rng = np.random.default_rng(0)
    return jax.block_until_ready(jax.tree.map(lambda arg: _array(arg, rng), args))


def _array(arg: Any, rng: np.random.Generator) -> Any:
    if not isinstance(arg, jax.ShapeDtypeStruct):
        return arg
    shape, dtype = arg.shape, arg.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        found = jax.random.split(jax.random.key(0), shape) if shape else jax.random.key(0)
    elif jnp.issubdtype(dtype, jnp.complexfloating):
        parts = rng.standard_normal((2, *shape))
        found = jnp.asarray(parts[0] + 1j * parts[1], dtype)
    elif jnp.issubdtype(dtype, jnp.floating):
        found = jnp.asarray(rng.standard_normal(shape, np.float32)).astype(dtype)
    elif dtype == jnp.bool_:
        found = jnp.asarray(rng.integers(0, 2, shape), dtype)
    else:
        most = min(INTEGERS, int(jnp.iinfo(dtype).max) + 1)
        found = jnp.asarray(rng.integers(0, most, shape)).astype(dtype)
    return found if arg.sharding is None else jax.device_put(found, arg.sharding)


# --- The variants of a suite ---------------------------------------------------------------------


def work_of_suite(suite: Suite, inputs: Mapping[str, Any] | None, known: Calibration | None) -> Work:
    """Return the variants of a suite's model as the alternatives of a `Work`, at the sizes in `inputs`."""
    model = suite.model
    if inputs is not None and not isinstance(inputs, Mapping):
        raise ValueError(f"inputs: expected a dict from name to size, got {inputs!r}")
    given = dict(inputs or {})
    columns = Runs.checked(model, 0, **given).inputs
    if several := [name for name, column in columns.items() if np.shape(column)]:
        raise ValueError(f"inputs: expected a single workload, got several values of {', '.join(several)}")
    sizes = {name: np.asarray(given.get(name, column), float).tolist() for name, column in columns.items()}
    model.check({name: np.asarray(size) for name, size in sizes.items()})
    calibrated = None if known is None else known.models.get(model.name)
    facts = suite.facts() if calibrated is None else calibrated.posterior.facts
    label = ", ".join(f"{name} {size:g}" for name, size in sizes.items())
    # A suite may count its runs or keep what it made, so only plain attributes identify it.
    plain = {name: own for name, own in vars(suite).items() if isinstance(own, bool | int | float | str | tuple)}
    state = description_of(suite if dataclasses.is_dataclass(suite) else plain)
    programs = f"{type(suite).__module__}.{type(suite).__qualname__}", suite.runner, dict(suite.given), state
    is_same = np.ravel(np.asarray(model.same_result(Runs.checked(model, 0, **sizes), facts))).tolist()
    ways = []
    for variant in (name for name, is_own in zip(model.variants, is_same, strict=True) if is_own):
        # The program is prepared once for each choice, because a suite can change between choices.
        program = functools.cache(functools.partial(suite.program, Cell(f"{variant} {label}", variant, sizes)))
        call = lambda program=program: program()()  # noqa: E731
        ways.append(Way(variant, content=digest(model.name, model.version, programs, variant), fn=call, call=call))
    predict = functools.partial(predicted_variants, ways, sizes)
    return Work(ways, predict, calibrated, model.name, label, sizes)


def predicted_variants(ways: Sequence[Way], sizes: Mapping[str, Any], calibrated: CalibratedModel) -> Predicted:
    """Predict alternatives that are variants of the model. Their names are the names of the variants."""
    with on_cpu(), jax.ensure_compile_time_eval():
        runs = Runs.checked(calibrated.model, [own.name for own in ways], **sizes)
        found = jax.tree.map(np.asarray, estimate(calibrated.posterior, runs.together()))
        low_ns, high_ns = calibrated.bounds_ns(found)
        row, column = (jax.tree.map(functools.partial(np.expand_dims, axis=axis), found) for axis in (1, 0))
        codes, alike = np.asarray(runs.variant), calibrated.posterior.alike
        shared = np.zeros((len(codes),) * 2) if alike is None else np.asarray(alike, float)[np.ix_(codes, codes)]
        sd_ns = np.array(compare(row, column, shared).margin_sd_ns, float)
    np.fill_diagonal(sd_ns, 0.0)
    is_inside = bool(calibrated.domain) and bool(calibrated.in_domain(**sizes))  # pyright: ignore
    said = zip(ways, *(np.asarray(own, float).tolist() for own in (found.time_ns, low_ns, high_ns)), strict=True)
    predicted = []
    for own, time_ns, *ends in said:
        figures = {"predicted_ns": time_ns, "predicted_interval_ns": tuple(ends), "in_domain": is_inside}
        predicted.append(dataclasses.replace(own, **figures))
    return predicted, sd_ns
