"""Run a batch in chunks of rows on several threads."""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

R = TypeVar("R")

#: While a thread computes a chunk, this object has the attribute `is_worker` in that thread.
_thread = threading.local()
_is_forked = False


def is_forked() -> bool:
    """Whether this process was forked. A forked process lacks JAX's threads, so a program may never end in it."""
    return _is_forked


def worker_count() -> int:
    """Return the number of processors that the calling thread may use; inside a chunk the number is 1."""
    if hasattr(_thread, "is_worker"):
        return 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def for_each_chunk(run: Callable[[int, int], None], n_rows: int, chunk_rows: int, n_workers: int | None = None) -> None:
    """Call `run(start, stop)` for each chunk, on several threads. A call from inside a chunk uses only one thread."""
    starts = range(0, n_rows, chunk_rows)
    n_workers = 1 if hasattr(_thread, "is_worker") else min(n_workers or worker_count(), len(starts))
    if n_workers < 2:
        for start in starts:
            run(start, min(start + chunk_rows, n_rows))
        return
    left = iter(starts)
    lock = threading.Lock()

    def next_start() -> int | None:
        with lock:
            return next(left, None)

    def work() -> None:
        nonlocal left
        _thread.is_worker = True
        try:
            while (start := next_start()) is not None:
                run(start, min(start + chunk_rows, n_rows))
        except BaseException:
            left = iter(())
            raise
        finally:
            del _thread.is_worker

    work_as_caller = with_callers_settings(work)
    others = [_helpers(max(n_workers, worker_count()) - 1).submit(work_as_caller) for _ in range(n_workers - 1)]
    try:
        work()
    finally:
        # All chunks are taken, so workers that wait behind other callers' work need not begin.
        begun = [other for other in others if not other.cancel()]
        wait(begun)
    for other in begun:
        other.result()


@functools.cache
def _helpers(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "rlxjax")


def _begin_as_child() -> None:
    global _is_forked
    _is_forked = True
    _helpers.cache_clear()  # a fork lacks the threads of its parent


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_as_child)


def background() -> Callable[..., Future]:
    """Return a function that starts a call on another thread and returns the call's `Future`.

    The thread ends once nothing refers to the function.
    """
    pool = ThreadPoolExecutor(1, "rlxjax")
    return lambda run, *args, **kwargs: pool.submit(with_callers_settings(run), *args, **kwargs)


#: The mesh that has no devices.
NO_MESH = Mesh(np.empty((), object), ())


@contextlib.contextmanager
def on_mesh(mesh: Any = NO_MESH) -> Iterator[None]:
    """Replace the mesh that the caller has set. Inside `jax.jit`, JAX keeps the caller's mesh."""
    with contextlib.ExitStack() as contexts:
        with contextlib.suppress(ValueError):  # inside `jax.jit`
            contexts.enter_context(jax.set_mesh(mesh))
        yield


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Compute on the first CPU, whatever mesh and default device the caller has set.

    A GPU is slow at hundreds of small kernels. On a mesh, each device would compute a copy.
    """
    with contextlib.ExitStack() as contexts:
        with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS has no CPU
            contexts.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
        contexts.enter_context(on_mesh())
        yield


#: The JAX settings that programs and results depend on. If a setting may differ between threads, `jax` has a context
#: manager for it.
SETTINGS = tuple(
    name
    for name in (
        *("jax_allow_f16_reductions", "jax_compiler_enable_remat_pass", "jax_cpu_collectives_implementation"),
        *("jax_cpu_enable_async_dispatch", "jax_debug_infs", "jax_debug_nans", "jax_default_device"),
        *("jax_default_matmul_precision", "jax_default_prng_impl", "jax_disable_jit", "jax_disable_most_optimizations"),
        *("jax_enable_x64", "jax_exec_time_optimization_effort", "jax_high_dynamic_range_gumbel"),
        *("jax_memory_fitting_effort", "jax_memory_fitting_level", "jax_numpy_dtype_promotion"),
        *("jax_numpy_rank_promotion", "jax_optimization_level", "jax_random_seed_offset", "jax_softmax_custom_jvp"),
        *("jax_threefry_partitionable", "jax_use_shardy_partitioner"),
    )
    if name in jax.config.values
)
_READS: tuple[Callable[[], Any], ...] = tuple(
    functools.partial(getattr, jax.config, name)
    if hasattr(jax.config, name)
    else functools.partial(jax.config.read, name)
    for name in SETTINGS
)


def callers_settings() -> tuple[Any, ...]:
    """Return the values of `SETTINGS` in the calling thread. The last entry is the mesh."""
    return *[read() for read in _READS], jax.sharding.get_abstract_mesh()


def with_callers_settings(run: Callable[..., R]) -> Callable[..., R]:
    """Return a function that calls `run` on any thread, with the JAX settings of the thread that is calling now."""
    settings, mesh = callers_settings(), None
    with contextlib.suppress(ValueError):  # `get_mesh` raises an error inside `jax.jit`
        mesh = jax.sharding.get_mesh()

    def run_as_caller(*args: Any, **kwargs: Any) -> R:
        with contextlib.ExitStack() as contexts:
            for name, value, own in zip(SETTINGS, settings, callers_settings(), strict=False):
                if value != own:
                    contexts.enter_context(getattr(jax, name.removeprefix("jax_"))(value))
            if mesh is not None and not mesh.empty:
                contexts.enter_context(jax.set_mesh(mesh))  # pyright: ignore[reportArgumentType]
            return run(*args, **kwargs)

    return run_as_caller
