"""Functions as alternatives: traced, counted, and priced by the model of functions."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rlxjax.calibration import CalibratedModel, Calibration, FunctionTimes, predict_profiles
from rlxjax.jaxpr import FunctionProfile, profile_function
from rlxjax.models import FUNCTIONS, function_runs

from ._arguments import filled
from ._contender import Contender, Forecast, Question
from ._content import content_of, default_device, digest
from ._stages import in_order, parts_of

#: Probability from which on the model of functions rules one out: it is off by more than it says where a compiler does
#: what it does not expect. `benchmarks.stage_choices` tells how often what it rules out is right.
SURE_OF_FUNCTIONS = 0.99


def question_of_functions(
    alternatives: Mapping[str, Any], args: tuple[Any, ...], known: Calibration | None, options: Mapping[str, Any]
) -> Question:
    """Return the question of functions, traced."""
    if not isinstance(alternatives, Mapping) or not alternatives:
        raise ValueError(f"alternatives: expected functions by name, or a Suite, got {alternatives!r}")
    arrays = functools.cache(lambda: filled(args))
    contenders, profiles, devices = [], [], devices_of(args)
    results: dict[str, Any] = {}
    for name, given in alternatives.items():
        if not isinstance(name, str):
            raise ValueError(f"alternatives: expected names that are texts, got {name!r}")
        if not callable(given):
            raise ValueError(f"alternatives: expected a function as {name!r}, got {given!r}")
        try:
            whole = in_order([given], args)[0]
        except ValueError as error:
            said = str(error).partition("but it ")[2] or str(error)
            contenders.append(Contender(name, digest("fails", name), given, list, failed=said))
            profiles.append(list)
            continue
        program = whole.fn.trace(*whole.args)
        if len(program.jaxpr.jaxpr.invars) > len(jax.tree.leaves(program.args_info)):
            raise ValueError(f"alternatives: expected {name!r} to close over arrays, got traced values; choose outside")
        if options["measure"] != "never":
            check_repeatable(name, program)
        results[name] = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), whole.result)
        is_jitted = isinstance(given, jax.stages.Wrapped)
        own = functools.cache(
            lambda whole=whole, is_jitted=is_jitted: _profiles([whole] if is_jitted else parts_of(whole))
        )
        devices += devices_of([program.jaxpr.consts, places_in(program.jaxpr.jaxpr)])
        profiles.append(own)
        contenders.append(
            Contender(
                name,
                content_of([program], is_jitted),
                given,
                call=lambda fn=given: fn(*arrays()),
                runs=lambda own=own: runs_of(own()),
                make=(lambda program=program: program.lower().compile()) if is_jitted else None,
            )
        )
    # Of programs that only their compiler's options tell apart, names do, and the model knows nothing.
    contents = [own.content for own in contenders]
    are_alike = np.array([[one == other for other in contents] for one in contents]) & ~np.eye(
        len(contents), dtype=bool
    )
    contenders = [
        own._replace(content=digest(own.content, own.name)) if row.any() else own
        for own, row in zip(contenders, are_alike, strict=True)
    ]
    if options["check"]:
        first, *others = results.items() or [("", None)]
        for name, result in others:
            if result != first[1]:
                raise ValueError(
                    f"alternatives: expected the same result of all, but that of {name!r} is {result}, and that of "
                    f"{first[0]!r} is {first[1]}; check=False takes them as they are"
                )
    calibrated = None if known is None else known.models.get(FUNCTIONS.name)
    label = f"{' or '.join(alternatives)} of {in_words(args)}"
    return Question(
        contenders, FUNCTIONS.name, label, where_of(args), calibrated,
        functools.partial(_forecast, profiles, are_alike), devices=devices, sure=SURE_OF_FUNCTIONS, **options,
    )  # fmt: skip


def in_words(args: tuple[Any, ...]) -> str:
    """Return the dtypes and shapes of arguments."""
    leaves = jax.tree.leaves(args)
    return ", ".join(f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else str(leaf) for leaf in leaves)


def check_repeatable(name: str, program: Any) -> None:
    """Refuse to time what does something beside giving results."""
    if effects := ", ".join(sorted(str(effect) for effect in program.jaxpr.effects)):
        raise ValueError(
            f"alternatives: expected no side effects where {name!r} is to be measured again and again, got {effects}; "
            "take them out, or decide with measure='never'"
        )
    inner = [any(equation.params.get("donated_invars", ())) for equation in program.jaxpr.eqns]
    if any(inner) or any(argument.donated for argument in jax.tree.leaves(program.args_info)):
        raise ValueError(
            f"alternatives: expected no donated arguments where {name!r} is to be measured, which would be gone after "
            "one call; choose without donation, or with measure='never'"
        )


def _profiles(stages: Sequence[Any]) -> list[FunctionProfile]:
    """Return the profiles of stages; none where one cannot be counted."""
    try:
        return [profile_function(stage.fn, *stage.args) for stage in stages]
    except ValueError:
        return []


def runs_of(profiles: Sequence[FunctionProfile]) -> tuple[tuple[str, Mapping[str, float]], ...]:
    """Return the runs of the functions model; none of what is not counted whole, of which a time says nothing."""
    if not profiles or any(own.uncounted or own.unknown_loops for own in profiles):
        return ()
    runs = function_runs(profiles)
    columns = {
        name: np.broadcast_to(np.asarray(column, float), (len(profiles),)) for name, column in runs.inputs.items()
    }
    variants = np.broadcast_to(runs.variant, (len(profiles),))
    return tuple(
        (FUNCTIONS.variants[int(variants[row])], {name: float(column[row]) for name, column in columns.items()})
        for row in range(len(profiles))
    )


def _forecast(
    known: Sequence[Callable[[], Sequence[FunctionProfile]]], are_alike: np.ndarray, calibrated: CalibratedModel
) -> Forecast | None:
    """Return what the functions model says of alternatives, each of the programs that have these profiles."""
    profiles = [own() for own in known]
    flat = [profile for own in profiles for profile in own]
    if not flat:
        return None
    times = predict_profiles(Calibration({FUNCTIONS.name: calibrated}, None, {}), flat)
    ends = np.cumsum([len(own) for own in profiles]).tolist()
    places = [range(end - len(own), end) for end, own in zip(ends, profiles, strict=True)]
    found = forecast_of_programs(times, places)
    return found._replace(sd_ns=np.where(are_alike, np.inf, found.sd_ns))


def forecast_of_programs(times: FunctionTimes, places: Sequence[Sequence[int]]) -> Forecast:
    """Return what is predicted of alternatives that each run some programs, one after another."""
    count = len(places)
    sd_ns = np.full((count, count), np.inf)
    each = [[times.predictions[place] for place in own] for own in places]
    known = [bool(own) and not any(one.uncounted or one.profile.unknown_loops for one in own) for own in each]
    for row in range(count):
        for column in range(count):
            if known[row] and known[column]:
                sd_ns[row, column] = float(times.decision(places[row], places[column]).margin_sd_ns)

    def total(name: str) -> np.ndarray:
        sums = [sum(getattr(one, name) for one in own) for own in each]
        return np.array([one if is_known else np.inf for one, is_known in zip(sums, known, strict=True)], float)

    in_domain = np.array([all(one.in_domain for one in own) for own in each])
    return Forecast(total("time_ns"), total("low_ns"), total("high_ns"), sd_ns, in_domain)


def where_of(args: tuple[Any, ...]) -> dict[str, Any]:
    """Return what of the arguments no jaxpr says: which are arrays of NumPy, and how those of JAX are sharded.

    A shape stands for an array of JAX, on its default device unless it says otherwise. A device is known by its place
    among those of its process.
    """
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
    """Return the devices that hold arrays, or that shapes are to be on."""
    places = [getattr(leaf, "sharding", leaf) for leaf in jax.tree.leaves(args)]
    devices = {device for place in places if isinstance(place, jax.sharding.Sharding) for device in place.device_set}
    return sorted(devices - {None}, key=lambda device: device.id)


def places_in(jaxpr: Any) -> list[jax.sharding.Sharding]:
    """Return where the equations of a jaxpr place arrays, on meshes that other processes may be part of."""
    found = []
    for equation in jaxpr.eqns if jax.process_count() > 1 else ():
        for value in jax.tree.leaves(
            [*equation.params.values()], is_leaf=lambda own: isinstance(own, jax.sharding.Mesh)
        ):
            if hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns"):
                found += places_in(getattr(value, "jaxpr", value))
            elif isinstance(value, jax.sharding.Mesh):
                found.append(jax.sharding.NamedSharding(value, jax.sharding.PartitionSpec()))
            elif isinstance(value, jax.sharding.Sharding):
                found.append(value)
    return found
