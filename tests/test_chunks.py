"""Rows in chunks on threads: what a chunk sees, what reaches the caller, and what a forked process may do."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlxjax as rx
from rlxjax._chunks import background, for_each_chunk, worker_count
from rlxjax._schedule import chunk_rows

SIZES = st.integers(1, 5000).map(lambda half: 2 * half)
each_worker_count = pytest.mark.parametrize("workers", [1, 2, 5])


@each_worker_count
def test_chunks_are_all_rows_once_and_none_is_larger_than_said(workers):
    for n_rows, rows in [(0, 3), (1, 3), (3, 3), (4, 3), (100, 7), (100, 1), (5, 100)]:
        calls = []
        for_each_chunk(lambda start, stop, calls=calls: calls.append((start, stop)), n_rows, rows, workers)
        assert sorted(calls) == [(start, min(start + rows, n_rows)) for start in range(0, n_rows, rows)]


def test_as_many_chunks_run_at_a_time_as_there_are_workers_which_several_callers_share():
    together, done = threading.Barrier(3, timeout=30), []
    for_each_chunk(lambda start, stop: together.wait(), 9, 1, 3)
    with ThreadPoolExecutor(6) as callers:
        for _ in range(6):
            callers.submit(for_each_chunk, lambda start, stop: (time.sleep(0.001), done.append(start)), 30, 1, 3)
    assert sorted(done) == sorted(6 * list(range(30)))


@each_worker_count
@pytest.mark.parametrize("error", [ValueError("row 3"), KeyboardInterrupt()])
def test_what_a_chunk_raises_reaches_the_caller_and_later_chunks_are_left_out(workers, error):
    begun, failed = [], threading.Event()

    def run(start, stop):
        begun.append(start)
        if start == 0:
            failed.set()
            raise error
        failed.wait(30)
        time.sleep(0.02)

    for_each_chunk(lambda start, stop: time.sleep(0.01), 30, 1, workers)
    n_threads = threading.active_count()
    with pytest.raises(type(error)) as caught:
        for_each_chunk(run, 300, 1, workers)
    assert caught.value is error
    assert len(begun) < 300
    assert threading.active_count() == n_threads, "later calls take the same threads"


@pytest.mark.parametrize("has_x64", [True, False])
@pytest.mark.parametrize("device", [None, "cpu", jax.devices("cpu")[0]], ids=["none", "name", "device"])
def test_the_callers_settings_hold_in_chunks_and_in_the_background(has_x64, device):
    seen = []

    def run(start, stop):
        seen.append((jnp.asarray(np.zeros(1)).dtype, jax.config.jax_default_device))

    with jax.enable_x64(has_x64), jax.default_device(device):
        start = background()
        for_each_chunk(run, 4, 1, 2)
        start(run, 0, 1).result()
        start(for_each_chunk, run, 4, 1, 2).result()
        expected = jax.config.jax_default_device
    assert seen == [(np.float64 if has_x64 else np.float32, expected)] * 9


def test_chunks_within_a_chunk_start_no_threads_and_those_in_the_background_do():
    threads = []

    def run(start, stop):
        outer, inner = threading.get_ident(), []
        assert worker_count() == 1
        for_each_chunk(lambda *_: inner.append(threading.get_ident()), 4, 1, 2)
        threads.append((outer, inner))

    for_each_chunk(run, 4, 1, 2)
    assert len(threads) == 4
    assert all(inner == [outer] * 4 for outer, inner in threads)
    together = threading.Barrier(2, timeout=30)
    background()(for_each_chunk, lambda *_: together.wait(), 2, 1, 2).result()


@given(SIZES, st.integers(1, 40), st.sampled_from(["cpu", "gpu", "tpu"]))
def test_a_chunk_is_whole_tiles_and_padding_leaves_it_as_it_is(n_fft, n_segments, platform):
    plan = rx.welch.schedule(platform)
    rows = int(chunk_rows(n_segments * n_fft, plan._asdict()))
    fitting = plan.chunk_samples / (n_segments * n_fft)
    assert rows % plan.tile_rows == 0
    assert rx.welch.padded_batch(rows) == rows
    assert rows <= max(fitting, plan.tile_rows)
    assert rows == plan.tile_rows or rows > fitting / 1.25 - plan.tile_rows


FORKED = """
import os, sys
import numpy as np
import jax.numpy as jnp
import rlxjax as rx
params = rx.WelchPeakParams.fast(64, 5)
signal = np.random.default_rng(0).standard_normal((5000, params.frame_len), np.float32)
expected = rx.welch_peaks(signal, params, "fused")
if (child := os.fork()) == 0:
    for strategy in ("host", "auto"):
        np.testing.assert_allclose(rx.welch_peaks(signal, params, strategy)[..., 1], expected[..., 1], 1e-4)
    for strategy in ("fused", "block", "rlx"):
        try:
            rx.welch_peaks(signal, params, strategy)
        except ValueError as error:
            assert str(error).startswith(f"strategy: expected 'host', got '{strategy}': "), error
            assert "forked" in str(error)
        else:
            raise AssertionError(strategy)
    os._exit(0)
_, status = os.waitpid(child, 0)
assert (rx.welch_peaks(signal, params, "fused") == expected).all()
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_runs_the_host_path_and_is_told_that_it_cannot_run_the_others():
    root = Path(rx.__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", FORKED], cwd=root, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
