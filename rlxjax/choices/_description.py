"""Digests of the programs of an alternative and of everything else that a choice depends on."""

import dataclasses
import enum
import functools
import hashlib
import itertools
import json
import os
import re
import types
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np

from rlxjax._chunks import SETTINGS, callers_settings
from rlxjax._tracing import default_device
from rlxjax._values import Handle, handle
from rlxjax.calibration import CalibratedModel, Fingerprint, current_fingerprint

#: Names of the parameters of jaxpr equations that do not affect the program.
_UNREAD = {"bwd", "debug_info", "fwd_jaxpr_thunk", "jvp_jaxpr_fun", "name_and_src_info", "out_trees"}
#: A pattern for the address of a Python object in its `repr`; the address differs between processes.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
#: Packages whose objects are described by their `repr`, except dataclasses, which are described by their fields.
_SHOWN = {"jax", "jaxlib", "ml_dtypes", "numpy"}
#: Environment variables that affect programs but are not in the fingerprint.
_FLAGS = ("LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "TF_XLA_FLAGS")
#: JAX settings whose effect the devices or the jaxpr of a program show.
_SEEN = ("jax_default_device", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion", "jax_softmax_custom_jvp")


def digest(*parts: Any) -> str:
    """Write values as JSON and return the SHA-256 digest of the text, in hexadecimal."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def content_of(programs: Sequence[Any], is_jitted: bool = True) -> str:
    """Return one digest of the jaxprs of all programs. The order of programs matters; names of variables do not."""
    return digest(is_jitted, [description_of(program.jaxpr) for program in programs])


def setting_of(calibrated: CalibratedModel | None, devices: Sequence[Any] = ()) -> tuple[str, Fingerprint]:
    """Return one digest of machine, software, settings, devices and calibration; and the machine's fingerprint."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    here = _fingerprint(os.environ.get("XLA_FLAGS"), os.environ.get("OMP_NUM_THREADS"), cores)
    flags = {name: os.environ[name] for name in _FLAGS if name in os.environ}
    settings = dict(zip((*SETTINGS, "mesh"), map(str, callers_settings()), strict=True))
    for name in _SEEN:
        del settings[name]
    used = devices or [default_device()]
    kinds = sorted({(device.platform, device.device_kind) for device in used})
    processes = len({device.process_index for device in used})
    model = None if calibrated is None else digest_of_model(calibrated)
    return digest(here.model_dump(mode="json"), flags, settings, kinds, len(used), processes, model), here


@functools.lru_cache(maxsize=8)
def _fingerprint(*environment: str | int | None) -> Fingerprint:
    """Return the fingerprint of this machine, computed once for each set of arguments."""
    return current_fingerprint()


def digest_of_model(calibrated: CalibratedModel) -> str:
    """Return the digest of a calibrated model. A remembered choice names its model by this digest."""
    return _digest_of_model(handle(calibrated))


@functools.lru_cache(maxsize=64)
def _digest_of_model(known: Handle) -> str:
    """Return one digest of a model's name, its version, and all numbers of its posterior."""
    own: Any = known()
    posterior = own.posterior
    leaves, structure = jax.tree.flatten((posterior.facts, posterior))
    found = hashlib.sha256(f"{posterior.model.name} {posterior.model.version} {structure}".encode())
    for leaf in leaves:
        found.update(np.asarray(leaf, np.float64).tobytes())
    return found.hexdigest()


def description_of(value: Any, within: tuple[int, ...] = (), known: dict[int, Any] | None = None) -> Any:
    """Describe a value in JSON. The description is the same in every process, and differs if a type or a bit differs.

    A function is described by its code, its captured values, its defaults, and values that it reads in its module.
    """
    known = {} if known is None else known
    if value is None or isinstance(value, bool | int | str):
        return [type(value).__name__, value if isinstance(value, str) else repr(value)]
    if isinstance(value, float | complex):
        return [type(value).__name__, np.asarray(value).tobytes().hex()]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return _described_array(value)
    if id(value) in within:
        return ["again", len(within) - within.index(id(value))]

    def inner(part: Any) -> Any:
        return description_of(part, (*within, id(value)), known)

    kind, package = type(value).__name__, type(value).__module__.partition(".")[0]
    if hasattr(value, "eqns"):
        jaxpr = getattr(value, "jaxpr", value)
        if id(jaxpr) not in known:
            known[id(jaxpr)] = hashlib.sha256(json.dumps(_described_jaxpr(jaxpr, inner)).encode()).hexdigest()
        return ["jaxpr", known[id(jaxpr)]]
    if isinstance(value, Mapping):
        return [kind, sorted(([inner(name), inner(part)] for name, part in value.items()), key=json.dumps)]
    if isinstance(value, Set):
        return [kind, sorted(map(inner, value), key=json.dumps)]
    if isinstance(value, tuple | list):
        return [kind, *map(inner, value)]
    if isinstance(value, bytes | bytearray):
        return [kind, value.hex()]
    if isinstance(value, type | enum.Enum | np.dtype | types.ModuleType):
        return [kind, str(value)]
    if isinstance(value, functools.partial):
        return [kind, *map(inner, (value.func, value.args, value.keywords))]
    if isinstance(value, types.MethodType):
        return [kind, inner(value.__func__), inner(value.__self__)]
    if isinstance(value, types.FunctionType):
        return [kind, *map(inner, (value.__code__, value.__defaults__, value.__kwdefaults__, _read_by(value)))]
    if isinstance(value, types.CodeType):
        return [kind, value.co_code.hex(), value.co_names, *map(inner, value.co_consts)]
    if fields := {} if package in _SHOWN and not dataclasses.is_dataclass(value) else _state_of(value):
        return [_name_of(value), *([name, inner(part)] for name, part in sorted(fields.items()))]
    return [_name_of(value), _ADDRESS.sub("", repr(value))]


def _state_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, or the attributes and slots of another object, without cached properties."""
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    state: Any = object.__getstate__(value)
    parts = state if isinstance(state, tuple) else (state,)
    named = itertools.chain.from_iterable((part or {}).items() for part in parts)
    cached = functools.cached_property
    return {name: part for name, part in named if not isinstance(getattr(type(value), name, None), cached)}


def _described_array(value: Any) -> Any:
    if isinstance(value, jax.Array):
        if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        if not value.is_fully_addressable:
            return ["array", str(value.dtype), list(value.shape)]
    found = np.asarray(value)
    bits = found.tobytes() if found.dtype != object else repr(found.tolist()).encode()
    return ["array", str(found.dtype), list(found.shape), hashlib.sha256(bits).hexdigest()]


def _described_jaxpr(jaxpr: Any, inner: Any) -> Any:
    """Describe the equations of a jaxpr in JSON, with numbers in place of variables."""
    numbers: dict[Any, int] = {}

    def of(var: Any) -> Any:
        if hasattr(var, "val"):
            return [_type_of(var), inner(np.asarray(var.val))]
        return numbers.setdefault(var, len(numbers))

    def parameter(value: Any) -> Any:
        return of(value) if hasattr(value, "aval") and value in numbers else inner(value)

    given = [[of(var), _type_of(var)] for var in (*jaxpr.constvars, *jaxpr.invars)]
    equations = [
        [
            equation.primitive.name,
            [of(var) for var in equation.invars],
            [[name, parameter(value)] for name, value in sorted(equation.params.items()) if name not in _UNREAD],
            [[of(var), _type_of(var)] for var in equation.outvars],
        ]
        for equation in jaxpr.eqns
    ]
    return [len(jaxpr.constvars), given, equations, [of(var) for var in jaxpr.outvars]]


def _type_of(var: Any) -> str:
    """Return a text with a variable's shape, dtype and sharding, and whether its type is weak."""
    return f"{var.aval.str_short(short_dtypes=False)} {getattr(var.aval, 'weak_type', False)}"


def _read_by(function: types.FunctionType) -> dict[str, Any]:
    """Return, by name, the values that a function captures, and the data that it reads from its module."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found = {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
    data = bool | int | float | complex | str | bytes | tuple | list | Mapping | Set
    named = ((name, function.__globals__.get(name)) for name in function.__code__.co_names)
    return {name: value for name, value in named if isinstance(value, data)} | found


def _name_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
