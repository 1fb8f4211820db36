"""Runs the laws of arrays on several devices, and of rows that several processes hold."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import rlxjax as rx

TESTS = Path(__file__).parent
ON_CPUS = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(TESTS.parent), *sys.path])}

#: A process of two, each with two devices: what Welch peaks are of rows that both hold.
ONE_OF_TWO = """
import sys
import jax
import numpy as np
address, own = sys.argv[1:]
jax.distributed.initialize(address, 2, int(own))
import rlxjax as rx
params, where = rx.WelchPeakParams.fast(64, 4), jax.sharding.PartitionSpec("rows")
rows = np.random.default_rng(0).standard_normal((64, params.frame_len), np.float32)
where = jax.sharding.NamedSharding(jax.make_mesh((4,), ("rows",)), where)
signal = jax.make_array_from_callback(rows.shape, where, lambda index: rows[index])
model = rx.learned.LearnedFft.exact(64)
assert not signal.is_fully_addressable
for path in ("auto", "fused", "learned"):
    peaks = rx.welch_peaks(signal, params, path, model=model)
    expected = rx.welch_peaks(rows, params, "fused")
    assert len(peaks.addressable_shards) == 2
    for own in peaks.addressable_shards:
        np.testing.assert_allclose(own.data, expected[own.index], rtol=1e-5)
for path in ("host", "block"):
    try:
        raise AssertionError(rx.welch_peaks(signal, params, path))
    except ValueError as error:
        assert "expected 'fused' or 'learned' because other processes hold rows" in str(error)
"""


@pytest.mark.slow  # a process that compiles for eight devices; `.ci/run` runs it
def test_the_laws_hold_on_eight_devices():
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", TESTS / "eight_devices.py"]
    environment = os.environ | ON_CPUS | {"JAX_NUM_CPU_DEVICES": "8"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_mesh_of_one_device_is_kept():
    params, model = rx.WelchPeakParams.fast(64, 5), rx.learned.LearnedFft.exact(64)
    mesh, rows = jax.make_mesh((1,), ("x",), devices=jax.devices()[-1:]), np.ones((3, params.frame_len), np.float32)
    signal = jax.device_put(rows, NamedSharding(mesh, PartitionSpec("x")))
    for path in ("auto", "host", "block", "fused", "learned"):
        peaks = rx.welch_peaks(signal, params, path, model=model)
        assert peaks.sharding == NamedSharding(mesh, PartitionSpec("x"))
        np.testing.assert_array_equal(peaks, rx.welch_peaks(rows, params, path, model=model))


@pytest.mark.slow
def test_a_process_has_the_peaks_of_the_rows_that_it_holds():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | ON_CPUS | {"JAX_NUM_CPU_DEVICES": "2"}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", ONE_OF_TWO, address, own], env=environment, stderr=subprocess.PIPE, text=True
        )
        for own in "01"
    ]
    for process in both:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
