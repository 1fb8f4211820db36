"""A pool of Ray actors gives the rows of threads bit for bit, whatever dies meanwhile, and says at once what cannot be.

These tests start Ray, which takes seconds: `make test` leaves them out, `.ci/run` installs Ray and runs them.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from _models import TILED, TILED_TRUTH, TiledModel, calibrated, random_posterior
from typer.testing import CliRunner

from calibrate.cli import app
from rlxjax import load_calibration
from rlxjax.tables import MODEL_COLUMNS, evaluate, on_ray

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[scale]'")
pytestmark = pytest.mark.ray
TILES = calibrated(random_posterior(TILED, TILED_TRUTH, sd=0.3, spread=0.2))


class Mortal(TiledModel):
    """It kills the actor that evaluates a batch of 1,800 rows as long as there is a marker: once, or each time."""

    def __init__(self, marker, is_once):
        self.marker, self.driver, self.is_once = marker, os.getpid(), is_once
        marker.touch()

    def check(self, inputs):
        if os.getpid() != self.driver and len(inputs["n"]) == 1800 and self.marker.exists():
            if self.is_once:
                self.marker.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        super().check(inputs)


def write_runs(folder, files=4, rows=2000, bad=0):
    folder.mkdir()
    for file in range(files):
        rng = np.random.default_rng(file)
        n = np.exp2(rng.uniform(0, 13, rows))
        n[:bad] = -1.0
        columns = {"id": np.arange(rows) + rows * file, "n": n, "depth": rng.choice([1.0, 2.5], rows)}
        pq.write_table(pa.table(columns), folder / f"{file}.parquet", row_group_size=500)
    return folder


def parts(folder):
    return {path.name: pq.read_table(path) for path in sorted(folder.iterdir()) if not path.name.startswith(".")}


def assert_same_parts(folder, expected):
    own, others = parts(folder), parts(expected)
    assert own.keys() == others.keys()
    assert all(own[name].equals(others[name]) for name in own)
    assert not [path for path in folder.iterdir() if path.name.endswith(".tmp")]


@pytest.fixture(scope="module")
def cluster():
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def test_a_ray_of_our_own_gives_the_rows_of_threads_and_is_shut_down(tmp_path, capfd):
    source = write_runs(tmp_path / "runs", bad=3)
    options = {"want": [*MODEL_COLUMNS], "rows_per_batch": 512}
    said = []
    done = evaluate(source, tmp_path / "ray", TILES, engine="ray", advance=lambda *rows: said.append(rows), **options)
    assert not ray.is_initialized()
    assert capfd.readouterr() == ("", "")
    expected = evaluate(source, tmp_path / "threads", TILES, **options)
    assert_same_parts(tmp_path / "ray", tmp_path / "threads")
    assert_same_parts(tmp_path / "ray.rejected", tmp_path / "threads.rejected")
    assert (done.rows, done.rejected, done.parts) == (expected.rows, expected.rejected, expected.parts) == (8000, 12, 4)
    assert said == [(rows, 8000) for rows in range(0, 8001, 2000)]


def test_where_no_cluster_answers_is_one_line_at_once_and_addresses_of_rays_client_are_refused(tmp_path, monkeypatch):
    source, begun_s = write_runs(tmp_path / "runs", files=1), time.perf_counter()
    for address in ("127.0.0.1:1", "nowhere"):
        with pytest.raises(OSError, match=f"^{address}: no Ray cluster answers there"):
            evaluate(source, tmp_path / "out", TILES, engine="ray", address=address)
    assert time.perf_counter() - begun_s < 20
    assert not list((tmp_path / "out").iterdir())
    for given, variable in (("ray://127.0.0.1:1", ""), (None, "ray://head:10001"), ("anyscale://a", "auto")):
        monkeypatch.setenv("RAY_ADDRESS", variable)
        with pytest.raises(
            ValueError, match=f"^{given or variable}: an address for Ray Client, which rlxjax cannot use; on a"
        ):
            list(on_ray(lambda: abs, [1], given))


def killer(item):
    if item in (1, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def test_an_item_whose_worker_dies_each_time_is_named_once_all_others_are_done(cluster):
    lost = []
    found = on_ray(lambda: killer, range(5), lost=lambda item, why: lost.append((item, why)) or -item)
    assert sorted(found) == [-3, -1, 0, 2, 4]
    assert [item for item, _ in lost] == [1, 3]
    assert all("its worker died 3 times" in why for _, why in lost)
    done = on_ray(lambda: killer, range(2))
    assert next(done) == 0
    with pytest.raises(OSError, match="1 of 2 items are not done, the first 1: its worker died 3 times"):
        next(done)


def test_the_part_of_an_actor_that_is_killed_is_done_again_and_of_one_that_dies_each_time_named_and_resumed(
    cluster, tmp_path
):
    source, options = write_runs(tmp_path / "runs"), {"want": ["time_ns"], "rows_per_batch": 2000}
    pq.write_table(pq.read_table(source / "2.parquet").slice(0, 1800), source / "2.parquet")
    evaluate(source, tmp_path / "threads", TILES, **options)
    for is_once in (True, False):
        model, out = Mortal(tmp_path / "marker", is_once), tmp_path / f"ray-{is_once}"
        tiles = calibrated(random_posterior(model, TILED_TRUTH, sd=0.3, spread=0.2))
        if is_once:
            assert evaluate(source, out, tiles, engine="ray", **options).rows == 7800
            assert cluster.is_initialized()
        else:
            said = r"2.parquet, row groups 0 to 0 .*its worker died 3 times.*go on with --resume"
            with pytest.raises(OSError, match=said):
                evaluate(source, out, tiles, engine="ray", **options)
            assert len(parts(out)) == 3
            model.marker.unlink()
            assert evaluate(source, out, tiles, engine="ray", resume=True, **options).resumed == 3
        assert not model.marker.exists()
        assert_same_parts(out, tmp_path / "threads")


def test_what_ends_a_job_of_threads_ends_one_of_actors_with_the_same_line(cluster, tmp_path):
    bad, damaged = write_runs(tmp_path / "bad", bad=1), write_runs(tmp_path / "damaged", files=1)
    content = bytearray((damaged / "0.parquet").read_bytes())
    content[4:200] = bytes(196)
    (damaged / "0.parquet").write_bytes(content)
    for source, options in ((bad / "2.parquet", {"strict": True}), (damaged, {})):
        lines = []
        for engine in ("local", "ray"):
            with pytest.raises(ValueError, match="row group 0") as refusal:
                evaluate(
                    source, tmp_path / f"{source.stem}-{engine}", TILES, want=["time_ns"], engine=engine, **options
                )
            lines.append(str(refusal.value))
            assert not parts(tmp_path / f"{source.stem}-{engine}")
        assert lines[0] == lines[1]


def test_files_that_an_actor_does_not_see_are_one_line(cluster, tmp_path):
    source = write_runs(tmp_path / "runs", files=1)

    def hide(done, total):
        source.rename(tmp_path / "elsewhere")

    with pytest.raises(ValueError, match=r"runs/0\.parquet: not found on .*; all machines of the cluster"):
        evaluate(source, tmp_path / "out", TILES, want=["time_ns"], engine="ray", advance=hide)


def process_of(item):
    time.sleep(0.2)
    return item, os.getpid()


def test_a_pool_takes_the_room_that_there_is_and_none_is_one_line_at_once(cluster):
    @cluster.remote
    class Other:
        def ready(self):
            return True

    most = Other.options(num_cpus=1).remote()
    cluster.get(most.ready.remote())
    with pytest.raises(ValueError, match="127.0.0.1:1: this process is connected to the Ray cluster at"):
        list(on_ray(lambda: process_of, [1], "127.0.0.1:1"))
    found = list(on_ray(lambda: process_of, range(4)))
    assert sorted(item for item, _ in found) == [0, 1, 2, 3]
    assert len({pid for _, pid in found}) == 1
    rest = Other.options(num_cpus=1).remote()
    cluster.get(rest.ready.remote())
    begun_s = time.perf_counter()
    with pytest.raises(ValueError, match=r"no free resources for a worker, which needs 0\.8 CPU \(0 of 2 free\)"):
        list(on_ray(lambda: process_of, range(4), wait_s=1.0))
    assert time.perf_counter() - begun_s < 20
    for one in (most, rest):
        cluster.kill(one)


KILLED = """
    import os, signal, sys
    sys.path.insert(0, sys.argv[1])
    import test_ray
    from rlxjax.tables import evaluate

    def end(done, total):
        if done > 2000:
            print(os.getpid(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    evaluate(sys.argv[2], sys.argv[3], test_ray.TILES, want=["time_ns"], engine="ray", advance=end)
"""


def test_a_job_whose_driver_was_killed_goes_on(cluster, tmp_path):
    source = write_runs(tmp_path / "runs", files=6)
    command = [sys.executable, "-c", textwrap.dedent(KILLED), Path(__file__).parent, source, tmp_path / "ray"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    done = evaluate(source, tmp_path / "ray", TILES, want=["time_ns"], engine="ray", resume=True)
    assert 2 <= done.resumed < 6
    evaluate(source, tmp_path / "threads", TILES, want=["time_ns"])
    assert_same_parts(tmp_path / "ray", tmp_path / "threads")


@pytest.mark.filterwarnings("ignore::rlxjax.calibration.MachineMismatchWarning")
def test_a_fleet_on_ray_has_the_calibrations_that_processes_make(tmp_path):
    rng, batch = np.random.default_rng(0), np.tile([32.0, 256.0, 2048.0], 4)
    n_fft, names = np.repeat([64.0, 256.0, 1024.0, 4096.0], 3), [f"device-{number}" for number in range(3)]
    times = [(1e4 + own * batch * n_fft) * np.exp(0.03 * rng.normal(size=12)) for own in (1.0, 2.0, 4.0)]
    columns = {"device": np.repeat(names, 12), "batch": np.tile(batch, 3), "n_fft": np.tile(n_fft, 3)}
    pq.write_table(pa.table(columns | {"time_ns": np.concatenate(times)}), tmp_path / "timings.parquet")
    for engine in ("local", "ray"):
        command = ["fleet", tmp_path / "timings.parquet", tmp_path / engine, "--model", "fft"]
        done = CliRunner().invoke(app, [*map(str, command), "--engine", engine, "--quiet"])
        assert done.exit_code == 0, done.output
    for name in names:
        own, other = (load_calibration(tmp_path / engine / f"{name}.json") for engine in ("local", "ray"))
        coefficients = (jax.tree.leaves(one.coefficients) for one in (own, other))
        np.testing.assert_allclose(*coefficients, rtol=1e-4)
