"""Run a variant. A small batch runs as a single program. A large batch runs in chunks on all processors."""

import contextlib
import functools
import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from rlxjax._chunks import NO_MESH, for_each_chunk, on_mesh, worker_count
from rlxjax._kept import Kept
from rlxjax._schedule import chunk_rows, schedule, shared_rows

from ._device_programs import default_fused_selection, fused_peaks, padded_batch, segment_spectra
from ._selection import default_selection
from ._workload import RUNS, WelchPeakParams, WelchVariant, host_peaks, rescaled_peaks, spectrum_peaks

#: The largest memory of all compiled programs, in bytes. Programs of this size take half of the 65,530 memory maps that
#: Linux allows a process. XLA ends a process that needs more maps than Linux allows.
MOST_PROGRAM_BYTES = 2**30
#: The largest number of calls whose chosen variants are kept. Each of them takes about 1 kB.
MOST_CALLS = 2**14
#: The names of the mesh axes over which rows are sharded, in order.
Axes = tuple[str, ...]


def row_axes(where: Any, shape: tuple[Any, ...]) -> Axes:
    """Return the mesh axes over which the rows of a signal are sharded. Empty if each device has all rows."""
    if not isinstance(where, NamedSharding):
        raise ValueError(
            f"signal: expected an array on one device or with a NamedSharding, got {type(where).__name__}; "
            "use jax.device_put(signal, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axis)))"
        )
    axes = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in where.spec]
    rows, samples = ((), (), *axes, *[()] * (len(shape) - len(axes)))[-2:]
    if math.prod(where.mesh.shape[name] for name in samples) > 1:
        is_divided = (1, *shape)[-2] % math.prod(where.mesh.shape[name] for name in rows or samples) == 0
        better = tuple(split_rows(rows or samples) if is_divided else ())
        raise ValueError(
            f"signal: expected whole rows on each device, got samples sharded over {', '.join(map(repr, samples))}; "
            f"use jax.device_put(signal, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec{better}))"
        )
    return rows


def split_rows(axes: Axes) -> PartitionSpec:
    """Return the `PartitionSpec` that shards the first axis of an array over mesh axes."""
    return PartitionSpec(axes) if axes else PartitionSpec()


def rows_of_a_device(where: Any, shape: tuple[Any, ...]) -> Any:
    """Return the number of rows of a signal that each device holds."""
    n_parts = math.prod(where.mesh.shape[name] for name in row_axes(where, shape))
    rows = (1, *shape)[-2]
    return rows if n_parts == 1 else rows // n_parts  # rows may be symbolic


def on_each_device(program: Callable[..., jax.Array], mesh: Any, axes: Axes) -> Callable[..., jax.Array]:
    """Return a program in which each device of a mesh runs `program` on the rows that the device holds."""

    def peaks(signal: jax.Array, *arrays: Any) -> jax.Array:
        split, everywhere = split_rows(axes), [PartitionSpec()] * len(arrays)
        return jax.shard_map(program, mesh=mesh, in_specs=(split, *everywhere), out_specs=split)(signal, *arrays)

    return peaks


@functools.singledispatch
def program_of(model: object, params: WelchPeakParams) -> Any:
    """Return the program that runs a learned FFT. For another type of model, register a function of your own.

    A program is a pytree of arrays. Its method `peaks(signal, params, selection, platform)` returns the peaks of rows
    in traced code. Its attribute `work` has the fields `flop` and `live_bins`, which are inputs of latency models.
    """
    raise ValueError(f"model: expected a LearnedFft (load_learned_fft), got {type(model).__name__}")


class Plan(NamedTuple):
    """How to run a batch: the number of rows in a chunk, the shape of the program's argument, and its options."""

    rows: int
    shape: tuple[int, int]
    params: WelchPeakParams
    variant: WelchVariant


def whole_program(
    shape: tuple[int, ...], params: WelchPeakParams, variant: WelchVariant, where: Sharding | None
) -> Callable[[], Any] | None:
    """Return the recipe of the program for a small float32 signal, or None if the signal must be padded or divided."""
    devices, (batch, length) = () if where is None else where.device_set, (1, *shape)[-2:]
    platform, device = _place(*devices)
    if len(devices) > 1 or batch * length > schedule(platform).piece_samples:
        return None
    plan = plan_of(variant, batch, params, platform, 1, stays := where is not None and platform != "cpu")
    if plan.shape != (batch, length) or batch > plan.rows:
        return None
    return _recipe(plan.variant, params, platform, _shaped(shape, device), (), stays)


def run_variant(
    variant: WelchVariant, signal: np.ndarray | jax.Array, params: WelchPeakParams, model: Any
) -> np.ndarray | jax.Array:
    """Return the peaks of concrete rows, computed on their own device, or for NumPy rows on JAX's default device."""
    if variant.transform == "numpy":
        return host_peaks(np.asarray(signal), params)
    platform, device = _place(*signal.devices() if isinstance(signal, jax.Array) else ())
    stays, batch = platform != "cpu" and isinstance(signal, jax.Array), signal.shape[0]
    is_small = signal.size <= schedule(platform).piece_samples  # a single processor runs a small signal
    n_processors = 1 if is_small else worker_count()
    arrays, shapes = _placed(variant, model, params, device)
    plan = plan_of(variant, batch, params, platform, n_processors, stays)
    program = compiled(_recipe(plan.variant, plan.params, platform, _shaped(plan.shape, device), shapes, stays))

    def run_prepared(rows: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
        found = run_program(program, rows, *arrays)
        return spectrum_peaks(np.asarray(found), params) if variant.selection == "numpy" else found

    def peaks_of(rows: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
        prepared = _prepared(rows, plan.shape, stays)
        peaks = run_prepared(prepared)
        if stays and variant.selection != "numpy":
            return peaks
        return rescaled_peaks(np.asarray(peaks), np.asarray(prepared), run_prepared)

    if batch <= plan.rows:
        peaks = peaks_of(signal)
        return peaks if plan.shape[0] == batch else (peaks if stays else np.asarray(peaks))[:batch]
    samples = signal if stays else np.asarray(signal)
    peaks = np.empty((batch, params.k, 2), np.float32)

    def run(start: int, stop: int) -> None:
        # The last chunk overlaps the previous chunk, so that all chunks have one length and one program.
        first = min(start, batch - plan.rows)
        found = np.asarray(peaks_of(samples[first : first + plan.rows]))
        peaks[start:stop] = found[start - first :]

    for_each_chunk(run, batch, plan.rows, schedule(platform).launches or None)
    return peaks


def run_sharded(
    variant: WelchVariant, signal: jax.Array, params: WelchPeakParams, model: Any
) -> np.ndarray | jax.Array:
    """Return the peaks of rows on several devices. If the host selects the peaks, it reads the rows of all devices."""
    if variant.selection == "numpy":
        return run_variant(variant, np.asarray(signal), params, model)
    where: Any = signal.sharding
    platform = next(iter(where.device_set)).platform
    variant = _by_default(variant, rows_of_a_device(where, signal.shape), params, platform)
    arrays, shapes = _placed(variant, model, params, NamedSharding(where.mesh, PartitionSpec()))
    shape = jax.ShapeDtypeStruct(signal.shape, signal.dtype, sharding=where)
    return run_program(compiled(_recipe(variant, params, platform, shape, shapes, True)), signal, *arrays)


def run_program(program: Callable[..., jax.Array], *arguments: Any) -> jax.Array:
    """Run a compiled program, also under `jax_disable_jit`. Under `jax_debug_nans`, NaN raises `FloatingPointError`."""
    try:
        return program(*arguments)
    except Exception as error:
        settings = jax.config.values
        if settings["jax_disable_jit"]:
            with jax.disable_jit(False):
                return program(*arguments)
        if settings["jax_debug_nans"] or settings["jax_debug_infs"]:
            raise FloatingPointError("welch_peaks: NaN or infinite powers, found by jax_debug_nans") from error
        raise


def _place(*devices: Any) -> tuple[str, Any]:
    """Return the platform and the device that compute peaks: the given device, or else JAX's default device."""
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if devices and devices[0] != (default or jax.devices()[0]):
        return devices[0].platform, devices[0]
    return jax.default_backend(), default


def run_traced(variant: WelchVariant, signal, params: WelchPeakParams, model: Any) -> jax.Array:
    """Return the peaks of traced rows. The peaks are sharded like the rows, and the devices select the peaks."""
    platform, where = jax.default_backend(), jax.typeof(signal).sharding
    axes = row_axes(where, signal.shape)
    variant = _by_default(variant, rows_of_a_device(where, signal.shape), params, platform)
    arrays, _ = _placed(variant, model, params, None)
    program = _program(variant, params, platform, True)
    return (on_each_device(program, where.mesh, axes) if axes else program)(signal, *arrays)


#: For each learned FFT: the results of `_placed`, by parameters and device. An entry lives as long as the learned FFT.
_models: "weakref.WeakKeyDictionary[Any, Kept]" = weakref.WeakKeyDictionary()


def _placed(variant: WelchVariant, model: Any, params: WelchPeakParams, device: Any) -> tuple[tuple, tuple]:
    """Return a learned FFT's program as arrays on a device, and as shapes. Both tuples are empty for other variants."""
    if variant.transform != "learned":
        return (), ()
    if model not in _models:
        own = weakref.ref(model)

        def made(params: WelchPeakParams, device: Any) -> tuple[tuple[Any], tuple[Any]]:
            with on_mesh(), jax.ensure_compile_time_eval():
                arrays = jax.device_put(program_of(own(), params), _sharding(device))
            return (arrays,), (jax.tree.map(lambda x: _shaped(x.shape, device), arrays),)

        _models[model] = Kept(made, 2**28, lambda made, *_: sum(array.nbytes for array in jax.tree.leaves(made[0])))
    return _models[model](params, device)


def _by_default(variant: WelchVariant, rows: Any, params: WelchPeakParams, platform: str) -> WelchVariant:
    """Return a variant that has a selection. If the variant has none, add the default selection of the platform."""
    if variant.selection is not None:
        return variant
    if variant.transform == "learned":
        return variant._replace(selection=default_selection(rows, params.n_bins, platform))
    return variant._replace(selection=default_fused_selection(rows, params, platform))


@functools.lru_cache(maxsize=MOST_CALLS)
def plan_of(
    variant: WelchVariant, batch: int, params: WelchPeakParams, platform: str, n_processors: int, stays: bool
) -> Plan:
    """Return the plan of a batch. A signal that stays on an accelerator runs as a single program, except by "block"."""
    facts, row_samples = schedule(platform)._asdict(), params.n_segments * params.n_fft
    if is_block := variant == RUNS["block"]:  # the program returns spectra; the host selects the peaks
        params = WelchPeakParams(params.n_fft, params.n_segments, k=1)
    else:
        variant = _by_default(variant, padded_batch(batch), params, platform)
    rows = batch
    if is_block or not stays:
        alone = facts["alone_samples_block" if is_block else "alone_samples_fused"]
        shared, is_one = shared_rows(batch, row_samples, alone, n_processors if platform == "cpu" else 1, facts)
        rows = batch if is_one else int(shared)
    padded = padded_batch(rows) if rows < chunk_rows(row_samples, facts) else rows
    return Plan(rows, (padded, params.frame_len), params, variant)


def _compiled(
    variant: WelchVariant,
    params: WelchPeakParams,
    platform: str,
    signal: jax.ShapeDtypeStruct,
    shapes: tuple[Any, ...],
    rescales: bool,
) -> Callable[..., jax.Array]:
    """Return a compiled program for the shape of a signal. Any thread may run the program."""
    # JAX keeps a compiled program while its jitted function lives, so each program has a jitted function of its own.
    rows = program = _program.__wrapped__(variant, params, platform, rescales)
    mesh, where = NO_MESH, signal.sharding  # a program that is kept depends on no mesh of the caller
    if len(signal.shape) == 1:
        program = jax.jit(lambda row: rows(row[None]))
    elif isinstance(where, NamedSharding):
        program, mesh = jax.jit(on_each_device(rows, where.mesh, row_axes(where, signal.shape))), where.mesh
    with jax.disable_jit(False), on_mesh(mesh):
        return program.lower(signal, *shapes).compile()


def _bytes_of(program: Any, recipe: Any) -> int:
    """Return the estimated memory of a program in bytes. The estimate includes the window that the program holds."""
    return 2**18 + 28 * len(program.as_text() or "") + 12 * recipe.args[1].n_fft


#: A recipe is a function that compiles a program; equal arguments give the same recipe. `compiled` keeps the programs.
_recipe = functools.lru_cache(maxsize=MOST_CALLS)(functools.partial(functools.partial, _compiled))
compiled = Kept(lambda recipe: recipe(), MOST_PROGRAM_BYTES, _bytes_of)


@functools.lru_cache(maxsize=256)  # a program takes 4 MB if a caller transforms the program outside jit
def _program(variant: WelchVariant, params: WelchPeakParams, platform: str, rescales: bool) -> Any:
    """Return the jitted program of a variant. JAX inlines the program if a caller's jitted function calls it.

    A program without `rescales` needs `rescaled_peaks` on the host, which is faster for few rows.
    """
    static: dict[str, Any] = {"params": params, "selection": variant.selection, "platform": platform}
    if variant.selection == "numpy":
        function = functools.partial(segment_spectra, params=params)
    elif variant.transform == "learned":
        function = lambda signal, arrays: arrays.peaks(signal, **static)  # noqa: E731
    else:
        function = functools.partial(fused_peaks, **static, rescales=rescales)
    return jax.jit(function, inline=True)


def _shaped(shape: tuple[int, ...], device: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32, sharding=_sharding(device))


def _sharding(device: Any) -> Sharding | None:
    if isinstance(device, jax.Device):
        return SingleDeviceSharding(device)
    return device if isinstance(device, Sharding) else None  # JAX's default device may be a platform's name


def _prepared(rows: np.ndarray | jax.Array, shape: tuple[int, int], stays: bool) -> np.ndarray | jax.Array:
    """Return rows as float32 in the given shape. Copies of the last row pad the batch; zeros are slow to select."""
    if rows.shape == shape and rows.dtype == np.float32:
        return rows
    if stays:
        prefix = rows[:, : shape[1]].astype(jnp.float32)
        return jnp.pad(prefix, ((0, shape[0] - len(rows)), (0, 0)), mode="edge")
    buffer, prefix = np.empty(shape, np.float32), np.asarray(rows)[:, : shape[1]]
    with contextlib.nullcontext() if prefix.dtype == np.float32 else np.errstate(over="ignore"):
        buffer[: len(rows)] = prefix  # a float64 beyond float32 becomes infinite, as on a device
    buffer[len(rows) :] = buffer[len(rows) - 1 : len(rows)]
    return buffer
