"""The largest size of a function that fits the memory of a device, and the parts of that memory."""

import bisect
import dataclasses
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from rlxjax._tracing import is_from_jit, traced
from rlxjax._values import FrozenDict, by_value
from rlxjax.devices import CompiledFor, DoesNotFitError, TargetDevice, compile_for, context_for, mesh_of, target_device
from rlxjax.jaxpr import Buffer, buffers_of
from rlxjax.units import bytes_text

#: The most programs that a search compiles, and the most arrays that a result lists.
_COMPILATIONS, _NAMED = 6, 10
#: The least ratio of the second compiled size to the first; the largest ratio of any size to a size that fits.
_FIRST_STEP, _FURTHEST = 16, 64

_OfSize = Callable[..., tuple[Callable[..., Any], tuple[Any, ...]]]


@by_value
@dataclasses.dataclass(frozen=True)
class LargestSize:
    """The largest size of a function that fits a device. All numbers of bytes are for one device.

    Attributes:
        size: the largest compiled size that fits.
        too_large: the smallest compiled size that does not fit; None if every compiled size fits.
        memory_bytes: memory of the device, in bytes.
        compiled: peak memory of each compiled size, in the order of compilation; None if the compiler gave no figure.
        made: the compiled program of the largest size that fits, with its target, mesh and memory.
        parts: bytes at the peak, by part; their sum is `made.peak_bytes`. "state" counts arguments that the function
            returns with the same shapes and types, such as parameters and an optimizer's moments. "other arguments"
            includes padding. "temporaries" includes activations and gradients. "results" counts results that do not
            reuse the memory of an argument.
        state: names of the arguments that count as state.
        buffers: the largest arrays of the program. Two arrays may share memory.
        donated_bytes: peak memory if the state is donated; None if the program with donation was not compiled.
        checkpoint_bytes: peak memory with `jax.checkpoint`; None if the program with `jax.checkpoint` was not compiled.
        notes: the reason for each missing figure, one sentence each.
    """

    size: int
    too_large: int | None
    memory_bytes: int
    compiled: Mapping[int, int | None]
    made: CompiledFor
    parts: Mapping[str, int]
    state: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    donated_bytes: int | None
    checkpoint_bytes: int | None
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return a dict of the attributes by name, for JSON."""
        same = ("size", "too_large", "memory_bytes", "state", "donated_bytes", "checkpoint_bytes", "notes")
        return {
            "target": self.made.target.name,
            "devices": self.made.devices,
            "mesh": dict(self.made.mesh),
            "peak_bytes": self.made.peak_bytes,
            "parts": dict(self.parts),
            "compiled": [{"size": size, "bytes": count} for size, count in self.compiled.items()],
            "buffers": [one._asdict() for one in self.buffers],
        } | {name: getattr(self, name) for name in same}

    def __str__(self) -> str:
        made = self.made
        mesh = ", ".join(f"{name} {size}" for name, size in made.mesh.items())
        each = f", each of {made.devices} devices ({mesh})" if made.devices > 1 else ""
        has = f"needs {bytes_text(made.peak_bytes)} of {bytes_text(self.memory_bytes)}"
        sizes = (
            f"{size:,} ({'refused' if count is None else bytes_text(count)})" for size, count in self.compiled.items()
        )
        ways = {f"{', '.join(self.state)} donated": self.donated_bytes, "checkpoint": self.checkpoint_bytes}
        lines = [
            f"the largest size is {self.size:,} on {made.target.name}{each}: {has}",
            f"compiled: {', '.join(sizes)}",
            f"peak: {', '.join(f'{bytes_text(count)} {name}' for name, count in self.parts.items())}",
            *(f"with {way}: {bytes_text(count)}" for way, count in ways.items() if count is not None),
            *self.notes,
            "the largest arrays, which may share memory:",
        ]
        return "\n".join(lines + [f"{bytes_text(one.bytes):>8}  {one}" for one in self.buffers])


def largest(
    fn_of_size: _OfSize,
    target: str | TargetDevice,
    *,
    mesh: Mapping[str, int] | None = None,
    least: int | None = None,
    most: int | None = None,
    multiple: int | None = None,
) -> LargestSize:
    """Find the largest size at which a function fits the memory of a device, and the parts of that memory.

    You do not need the device. Memory is nearly linear in the size, so six compilations are enough. Up to two more
    compilations of the largest size give the memory with donated state and with `jax.checkpoint`.

    Args:
        fn_of_size: takes a size, and returns a function (jitted or not) and a tuple of its arguments, as shapes. If
            `fn_of_size` has a parameter `checkpoint`, it is also called with `checkpoint=jax.checkpoint`. Apply that
            argument to a layer or to the loss.
        target: the name of a device, the path of a file, or a `TargetDevice`.
        mesh: the size of each axis of a mesh by name, if several devices run the function.
        least: the smallest size to consider; by default `multiple`.
        most: the largest size to consider.
        multiple: every size is a multiple of this number; by default the number of devices.

    Raises:
        DoesNotFitError: a `ValueError`; the smallest size does not fit.
        ValueError: a size is not valid, `fn_of_size` returns something else, or as for `compile_for`; one line.

    Examples:
        >>> import jax.numpy as jnp
        >>> def normalized(batch, checkpoint=lambda layer: layer):
        ...     return jax.jit(checkpoint(jax.nn.softmax)), (jax.ShapeDtypeStruct((batch, 2**20), jnp.float32),)
        >>> largest(normalized, "h100").too_large  # doctest: +SKIP
        10122
    """
    device = target_device(target)
    step = math.prod((mesh or {}).values()) if multiple is None else multiple
    for name, value in (("multiple", step), ("least", least), ("most", most)):
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name}: expected an integer of at least 1, got {value!r}")
    first, last = -(-(least or step) // step), None if most is None else most // step
    if last is not None and last < first:
        raise ValueError(f"most: expected at least {first * step}, the smallest size, got {most}")
    notes: list[str] = []
    made: dict[int, CompiledFor] = {}
    tried: dict[int, int | None] = {}
    memory_bytes, guess = device.memory_bytes, first
    while guess is not None:
        fn, args = _at(fn_of_size, guess * step)
        try:
            own = compile_for(fn, *args, target=device, mesh=mesh)
            tried[guess] = own.peak_bytes
            if own.peak_bytes <= memory_bytes:
                made[guess] = own
        except DoesNotFitError as error:
            memory_bytes, needed = error.memory_bytes or memory_bytes, error.needed_bytes or 0
            tried[guess] = needed if needed > memory_bytes else None
        except ValueError as error:
            if not made:
                raise
            tried[guess] = None  # compilers fail at sizes beyond the memory of any device
            notes.append(f"{guess * step:,} counts as too large: {error}")
        if not made:
            needs = "more" if (needed := tried[first]) is None else bytes_text(needed)
            said = f"the smallest size, {first * step:,}, needs {needs} of {bytes_text(memory_bytes)}: does not fit"
            raise DoesNotFitError(f"target {device.name}: {said}", needed, memory_bytes)
        guess = _next(tried, sorted(made), memory_bytes, last) if len(tried) < _COMPILATIONS else None
    found = max(made)
    if (too_large := min(tried.keys() - made.keys(), default=None)) is None:
        notes.append("every compiled size fits")
    elif too_large > found + 1:
        notes.append(f"{too_large * step:,} does not fit; sizes in between were not compiled")
    return LargestSize(
        size=found * step,
        too_large=None if too_large is None else too_large * step,
        memory_bytes=memory_bytes,
        compiled=FrozenDict({place * step: count for place, count in tried.items()}),
        made=made[found],
        **_explained(fn_of_size, found * step, made[found], mesh, notes),
    )


def _at(fn_of_size: _OfSize, size: int, **options: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function for a size, jitted, and its arguments."""
    found = fn_of_size(size, **options)
    if not (isinstance(found, tuple) and len(found) == 2 and callable(found[0]) and isinstance(found[1], tuple)):
        raise ValueError(f"fn_of_size: expected a function and a tuple of arguments for size {size}, got {found!r:.80}")
    fn, args = found
    return fn if is_from_jit(fn) else jax.jit(fn), args


def _next(tried: Mapping[int, int | None], fitting: list[int], memory_bytes: int, last: int | None) -> int | None:
    """Return the next size to compile, in steps, by a curve through the nearest compiled sizes; None at the end."""
    low, high = fitting[-1], min(tried.keys() - {*fitting}, default=None)
    end = high or (_FURTHEST * low + 1 if last is None else last + 1)
    if low + 1 >= end:
        return None
    if len(tried) == 1:  # the memory per unit of size falls, so this size should fit
        guess = low * memory_bytes // max(tried[low] or 1, 1)
        return min(max(guess, _FIRST_STEP * low), end - 1)
    *_, before, latest = tried
    middle = (low + end) // 2 if end < 4 * low else math.isqrt(low * end)
    if high and (before in fitting) == (latest in fitting) and latest - before != 1:
        return middle  # only one end of the range moves, so the curve predicts badly
    near = fitting[-2:] if low - fitting[-2:][0] > 1 else [fitting[0], low]  # neighbouring sizes give no slope
    places = [*near, high] if high and tried[high] else near
    told = {place: float(tried[place] or 0) for place in places}
    curve = np.polyfit([*told], [*told.values()], len(told) - 1)
    above = range(low + 1, end + 1)
    guess = low + bisect.bisect_right(above, memory_bytes, key=lambda place: float(np.polyval(curve, place)))
    if not high and guess == low and latest - before == 1:
        guess = low + max(low // 8, 2)  # the neighbour fits unexpectedly
    if len(tried) == _COMPILATIONS - 1:
        guess -= (guess - low) // 50  # the last size should fit
    return middle if guess == high else min(max(guess, low + 1), end - 1)


def _explained(
    fn_of_size: _OfSize, size: int, made: CompiledFor, mesh: Mapping[str, int] | None, notes: list[str]
) -> dict[str, Any]:
    """Return the attributes, by name, that explain the peak memory of a size."""
    fn, args = _at(fn_of_size, size)
    with context_for(mesh_of(args, mesh)):
        program = traced(fn, args, {})
    given: tuple[Any, ...] = program.args_info[0]
    names = [*inspect.signature(fn).parameters, *(f"argument {place}" for place in range(len(given)))]
    results = Counter((one.shape, one.dtype) for one in jax.tree.leaves(program.out_info))
    leaves: dict[str, int] = {}  # the place of the argument that each array belongs to, by the array's name
    state: list[int] = []
    for place, argument in enumerate(given):
        flat = jax.tree_util.tree_flatten_with_path(argument)[0]
        leaves |= {f"{names[place]}{jax.tree_util.keystr(path)}": place for path, _ in flat}
        wanted = Counter((one.shape, one.dtype) for _, one in flat)
        if wanted and wanted <= results:
            results -= wanted
            state.append(place)
    buffers = buffers_of(made.text, [*leaves])
    state_bytes = sum(one.bytes for one in buffers if leaves.get(one.source) in state)

    def peak(what: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> int | None:
        try:
            return compile_for(fn, *args, target=made.target, mesh=mesh).peak_bytes
        except ValueError as error:
            notes.append(f"with {what}: {error}")
        return None

    donated_bytes = checkpoint_bytes = None
    if any(one.donated for one in jax.tree.leaves(program.args_info)):
        notes.append("no figure for donated state: the function donates arguments itself")
    elif state:
        donated_bytes = peak("donated state", jax.jit(fn, donate_argnums=tuple(state)), args)
    if "checkpoint" in inspect.signature(fn_of_size).parameters:
        checkpoint_bytes = peak("checkpoint", *_at(fn_of_size, size, checkpoint=jax.checkpoint))
    else:
        notes.append("for the peak with jax.checkpoint, give fn_of_size a parameter checkpoint and apply it to a layer")
    parts = {"state": state_bytes, "other arguments": made.argument_bytes - state_bytes}
    parts |= {"temporaries": made.temporary_bytes, "results": made.output_bytes - made.alias_bytes}
    return {
        "parts": FrozenDict(parts),
        "state": tuple(names[place] for place in state),
        "buffers": buffers[:_NAMED],
        "donated_bytes": donated_bytes,
        "checkpoint_bytes": checkpoint_bytes,
        "notes": tuple(notes),
    }
