"""Rows in chunks, chunks on threads: memory follows from the chunk, not from the batch."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax

R = TypeVar("R")

#: Says of its own thread whether it computes a chunk.
_thread = threading.local()


def worker_count() -> int:
    """Return the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def for_each_chunk(run: Callable[[int, int], None], n_rows: int, chunk_rows: int) -> None:
    """Call `run(start, stop)` for chunks that together are all the rows, on as many threads as processors.

    Within a chunk, one after the other: its thread is one of as many already.

    Args:
        run: does the work of rows `start` to `stop`; releases the interpreter for most of it.
        n_rows: all rows.
        chunk_rows: rows of a chunk; the last may have fewer.

    Raises:
        BaseException: what a call raised; chunks that have not begun are then left out.
    """
    starts = range(0, n_rows, chunk_rows)
    n_workers = 1 if hasattr(_thread, "is_worker") else min(worker_count(), len(starts))
    if n_workers < 2:
        for start in starts:
            run(start, min(start + chunk_rows, n_rows))
        return
    run_as_caller = _with_callers_settings(run)
    with ThreadPoolExecutor(n_workers, "rlxjax", lambda: setattr(_thread, "is_worker", True)) as pool:
        calls = [pool.submit(run_as_caller, start, min(start + chunk_rows, n_rows)) for start in starts]
        try:
            for call in calls:
                call.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@contextlib.contextmanager
def background() -> Iterator[Callable[..., Future]]:
    """Give a function that starts a call beside the caller's own work and returns its future."""
    with ThreadPoolExecutor(1, "rlxjax") as pool:
        yield lambda run, *args, **kwargs: pool.submit(_with_callers_settings(run), *args, **kwargs)


def _with_callers_settings(run: Callable[..., R]) -> Callable[..., R]:
    """Return a function for another thread: what a caller's context sets for JAX holds for its own alone."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    has_x64 = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]

    def run_as_caller(*args: Any, **kwargs: Any) -> R:
        with jax.default_device(device), jax.enable_x64(has_x64):
            return run(*args, **kwargs)

    return run_as_caller
