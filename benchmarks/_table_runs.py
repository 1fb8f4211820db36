"""Make files of rows from a seed, and run the processes that evaluate them."""

import contextlib
import json
import multiprocessing
import os
import shutil
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
#: The evaluated gate, in the command's options.
GATE = ("--gate", "cuda", "--temperature-ns", str(TEMPERATURE_NS))


#: Results that are worse than their limits, one sentence each.
short: list[str] = []


class Ended(NamedTuple):
    """A finished process: wall and CPU seconds, peak MB, and its output."""

    wall_s: float
    cpu_s: float
    peak_mb: float
    found: dict[str, float]


def peer(name: str, source: Sequence[Path], sink: Path) -> Ended:
    """Run one of `_table_peers`, or the command."""
    os.sync()  # no peer waits for another peer's writes
    command = [sys.executable, "-m", "benchmarks._table_peers", name, str(sink), *map(str, source)]
    if name == "command":
        command = [sys.executable, "-m", "rlxjax", "evaluate", *map(str, source), str(sink), *GATE, "--json"]
    peak_kb, begun_s = 0, time.perf_counter()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, cwd=ROOT)
        while not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            # The system counts the parent's peak in the child's, so the child reports its own peak.
            with contextlib.suppress(OSError, StopIteration):
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                peak_kb = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
            time.sleep(0.02)
        wall_s = time.perf_counter() - begun_s
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        if process.returncode:
            raise SystemExit(f"{name}: ended with {process.returncode}")
        return Ended(wall_s, used.ru_utime + used.ru_stime, peak_kb / 1e3, json.loads(out.read()))


def pairs(rows: int, seed: int) -> dict[str, np.ndarray]:
    """Return profile pairs: the fused side launches and moves less, and sometimes synchronises once more."""
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


def _written(make: Callable[[int, int], dict[str, np.ndarray]], path: Path, rows: int, seed: int) -> None:
    unfinished, starts = path.with_suffix(".tmp"), range(0, rows, GROUP_ROWS)
    with pq.ParquetWriter(unfinished, pa.table(make(1, 0)).schema, compression="zstd") as writer:
        for place, start in enumerate(starts):
            writer.write_table(pa.table(make(min(GROUP_ROWS, rows - start), seed * len(starts) + place)))
    unfinished.rename(path)


def files(
    folder: Path, make: Callable[..., dict[str, np.ndarray]], rows: int, file_rows: int = FILE_ROWS
) -> list[Path]:
    """Return files of rows in their order; existing files are kept."""
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
    """Print a sentence and whether it holds; a false sentence sets the exit status."""
    print(f"{'yes' if holds else 'NO '}  {sentence}", flush=True)
    short.extend([] if holds else [sentence])


def size_mb(sink: Path) -> float:
    """Return the size of a file, or of the files of a folder."""
    return sum(path.stat().st_size for path in ([sink] if sink.is_file() else sink.glob("*.parquet"))) / 1e6


def rows_of(sink: Path) -> pa.Table:
    """Return the rows of a file, or of a folder of parts in their order."""
    return pa.concat_tables(map(pq.read_table, [sink] if sink.is_file() else sorted(sink.glob("*.parquet"))))


def remove(*sinks: Path) -> None:
    """Remove outputs with their manifests and rejects."""
    for sink in sinks:
        shutil.rmtree(sink, ignore_errors=True)
        shutil.rmtree(sink.with_name(f"{sink.name}.rejected"), ignore_errors=True)
        for path in (sink, manifest_of(sink)):
            path.unlink(missing_ok=True)


def manifest_of(sink: Path) -> Path:
    """Return the path of a job's manifest."""
    return sink.with_name(f"{sink.name}.manifest.json")
