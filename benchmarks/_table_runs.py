"""Files of rows from a seed, and processes that evaluate them."""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks._common import ROOT
from benchmarks._table_peers import TEMPERATURE_NS

#: Rows of a file, and of a row group.
FILE_ROWS, GROUP_ROWS = 10_000_000, 2**20
#: The gate that is evaluated, as the command has it.
GATE = ("--gate", "cuda", "--temperature-ns", str(TEMPERATURE_NS))


#: What falls short, a sentence each.
short: list[str] = []


class Ended(NamedTuple):
    """A process that has ended: its status, wall and CPU seconds, peak MB, output and error."""

    status: int
    wall_s: float
    cpu_s: float
    peak_mb: float
    out: str
    err: str

    @property
    def found(self) -> dict[str, float]:
        """What a peer has printed."""
        return json.loads(self.out)


class Running:
    """A process that runs; what it prints goes to files, so that it never waits for a reader."""

    def __init__(self, arguments: Sequence[str], **environment: str) -> None:
        self._files = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed as garbage)
        self._begun_s = time.perf_counter()
        settings = {**os.environ, **environment}
        out, err = self._files
        self._process = subprocess.Popen(arguments, stdout=out, stderr=err, cwd=ROOT, env=settings)

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def is_running(self) -> bool:
        """Say whether it runs."""
        return not os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self._process.pid, number)

    def ended(self) -> Ended:
        """Wait for it; what a process is said to have had at most begins with what its parent has, so that is asked."""
        peak_kb = 0
        while self.is_running():
            with contextlib.suppress(OSError, StopIteration):
                lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
                peak_kb = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
            time.sleep(0.02)
        wall_s = time.perf_counter() - self._begun_s
        _, status, used = os.wait4(self.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        for file in self._files:
            file.seek(0)
        out, err = (file.read() for file in self._files)
        return Ended(self._process.returncode, wall_s, used.ru_utime + used.ru_stime, peak_kb / 1e3, out, err)


def command(source: Sequence[Path], sink: Path, *more: str, **environment: str) -> Running:
    """Start `rlxjax evaluate`."""
    start = [sys.executable, "-c", "from calibrate.interrupts import main; main()"]
    return Running([*start, "evaluate", *map(str, source), str(sink), *more], **environment)


def peer_process(name: str, source: Sequence[Path], sink: Path, **environment: str) -> Running:
    """Start one of `_table_peers`, or the command."""
    if name == "command":
        return command(source, sink, *GATE, "--json", **environment)
    script = [sys.executable, "-m", "benchmarks._table_peers", name, str(sink), *map(str, source)]
    return Running(script, **environment)


def peer(name: str, source: Sequence[Path], sink: Path, **environment: str) -> Ended:
    """Run one of `_table_peers`, or the command."""
    os.sync()  # no peer waits for what another one has written
    done = peer_process(name, source, sink, **environment).ended()
    if done.status:
        raise SystemExit(f"{name}: ended with {done.status}: {done.err.strip()}")
    return done


def pairs(rows: int, seed: int) -> dict[str, np.ndarray]:
    """Return profile pairs: what is fused launches less and moves less, and now and then synchronises once more."""
    rng = np.random.default_rng(seed)
    before = {
        "kernel_launches": np.exp(rng.normal(5.0, 1.5, rows)) + 1,
        "sync_points": rng.integers(0, 16, rows),
        "host_output_bytes": np.exp(rng.normal(15.0, 2.5, rows)),
        "device_traffic_bytes": np.exp(rng.normal(21.0, 2.5, rows)),
    }
    share, found = rng.random(rows, np.float32), {}
    for name, values in before.items():
        found[f"before_{name}"] = values.astype(np.int64)
    for name, values in before.items():
        kept = values * share if name != "sync_points" else np.floor(values * share) + (rng.random(rows) < 0.05)
        found[f"after_{name}"] = kept.astype(np.int64)
    return found


def workloads(rows: int, seed: int) -> dict[str, np.ndarray]:
    """Return inputs of the Welch model."""
    rng = np.random.default_rng(seed)
    n_fft = 2 ** rng.integers(6, 13, rows)
    return {
        "batch": np.exp2(rng.uniform(0, 14, rows)).astype(np.int64),
        "n_fft": n_fft,
        "k": np.maximum(1, (rng.random(rows) * n_fft / 4).astype(np.int64)),
    }


def numbered(rows: int, seed: int) -> dict[str, np.ndarray]:
    """Return profile pairs with their number, which is carried along."""
    return {"row": np.arange(rows) + seed * rows, **pairs(rows, seed)}


def _written(make: Callable[[int, int], dict[str, np.ndarray]], path: Path, rows: int, seed: int) -> None:
    unfinished, starts = path.with_suffix(".tmp"), range(0, rows, GROUP_ROWS)
    with pq.ParquetWriter(unfinished, pa.table(make(1, 0)).schema, compression="zstd") as writer:
        for place, start in enumerate(starts):
            writer.write_table(pa.table(make(min(GROUP_ROWS, rows - start), seed * len(starts) + place)))
    unfinished.rename(path)


def files(
    folder: Path, make: Callable[..., dict[str, np.ndarray]], rows: int, file_rows: int = FILE_ROWS
) -> list[Path]:
    """Return files of rows in their order; those that are there already are not made again."""
    folder = folder / f"{make.__name__}-{rows}"
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{place:04d}.parquet" for place in range(-(-rows // file_rows))]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [
            pool.submit(_written, make, path, min(file_rows, rows - place * file_rows), place)
            for place, path in enumerate(paths)
            if not path.exists()
        ]
        for job in jobs:
            job.result()
    size_mb = sum(path.stat().st_size for path in paths) / 1e6
    print(f"{rows:,} rows of {make.__name__} in {len(paths)} files, {size_mb:,.0f} MB of zstd Parquet", flush=True)
    return paths


def must(holds: bool, sentence: str) -> None:
    """Print a sentence and whether it holds; one that does not is what the exit status says."""
    print(f"{'yes' if holds else 'NO '}  {sentence}", flush=True)
    short.extend([] if holds else [sentence])


def size_mb(sink: Path) -> float:
    """Return the size of a file, or of the files of a folder."""
    return sum(path.stat().st_size for path in ([sink] if sink.is_file() else sink.glob("*.parquet"))) / 1e6


def rows_of(sink: Path) -> pa.Table:
    """Return the rows of a file, or of a folder of parts in their order."""
    return pa.concat_tables(map(pq.read_table, [sink] if sink.is_file() else sorted(sink.glob("*.parquet"))))


def remove(*sinks: Path) -> None:
    """Remove outputs with what lies beside them."""
    for sink in sinks:
        shutil.rmtree(sink, ignore_errors=True)
        shutil.rmtree(sink.with_name(f"{sink.name}.rejected"), ignore_errors=True)
        for path in (sink, manifest_of(sink)):
            path.unlink(missing_ok=True)


def manifest_of(sink: Path) -> Path:
    """Return where the manifest of a job is."""
    return sink.with_name(f"{sink.name}.manifest.json")
