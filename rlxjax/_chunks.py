"""Run a batch in chunks of rows on several threads."""

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import jax

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


#: For each JAX setting that may differ between threads: the name and the context manager.
_SETTINGS = tuple(
    (f"jax_{name}", getattr(jax, name))
    for name in (
        *("debug_infs", "debug_nans", "default_device", "default_matmul_precision", "default_prng_impl"),
        *("disable_jit", "enable_x64", "numpy_dtype_promotion", "numpy_rank_promotion", "softmax_custom_jvp"),
        *("threefry_partitionable",),
    )
)


def callers_settings() -> tuple[Any, ...]:
    """Return the JAX settings of the calling thread. The last entry is the mesh."""
    return *[getattr(jax.config, name) for name, _ in _SETTINGS], jax.sharding.get_abstract_mesh()


def with_callers_settings(run: Callable[..., R]) -> Callable[..., R]:
    """Return a function that calls `run` on any thread, with the JAX settings of the thread that is calling now."""
    settings, mesh = callers_settings(), None
    with contextlib.suppress(ValueError):  # `get_mesh` raises an error inside `jax.jit`
        mesh = jax.sharding.get_mesh()

    def run_as_caller(*args: Any, **kwargs: Any) -> R:
        with contextlib.ExitStack() as contexts:
            for (name, context), value in zip(_SETTINGS, settings, strict=False):
                if getattr(jax.config, name) != value:
                    contexts.enter_context(context(value))
            if mesh is not None and not mesh.empty:
                contexts.enter_context(jax.set_mesh(mesh))  # pyright: ignore[reportArgumentType]
            return run(*args, **kwargs)

    return run_as_caller
