"""What may befall a job on files of rows: it is killed, doubled, out of room, on other devices, in many small files."""

import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks._table_runs import (
    GATE,
    command,
    files,
    manifest_of,
    must,
    numbered,
    pairs,
    peer,
    peer_process,
    remove,
    rows_of,
    size_mb,
    workloads,
)

#: Times that a job is killed; rows of a file of such a job, which is one part.
KILLS, PART_ROWS = 10, 500_000
#: Rows of a small file, of which there are many.
SMALL_ROWS = 1_000


def whole(source: Sequence[Path], sink: Path) -> tuple[pa.Table, float]:
    """Return what an uninterrupted job gives, and the seconds from its manifest to its last part."""
    remove(sink)
    done = command(source, sink, *GATE, "--quiet").ended()
    must(done.status == 0, f"an uninterrupted job ends with 0 {done.err}".strip())
    parts = [path.stat().st_mtime for path in sink.glob("*.parquet")]
    return rows_of(sink), max(parts) - manifest_of(sink).stat().st_mtime


def wait_for(sink: Path) -> None:
    """Wait for the manifest of a job."""
    ends_s = time.perf_counter() + 60
    while not manifest_of(sink).exists():
        if time.perf_counter() > ends_s:
            raise SystemExit(f"{manifest_of(sink)}: expected a manifest within a minute")
        time.sleep(0.002)


def kill(given: Any, folder: Path) -> dict[str, Any]:
    """Kill jobs at random moments of their work, and go on with each."""
    source, sink = files(folder, numbered, given.kill_rows, PART_ROWS), folder / "killed"
    expected, took_s = whole(source, sink)
    rng, left = np.random.default_rng(), []
    for _ in range(3 * KILLS):
        remove(sink)
        job = command(source, sink, *GATE, "--quiet")
        wait_for(sink)
        time.sleep(rng.uniform(0, took_s))
        job.send(signal.SIGKILL)
        if job.ended().status != -signal.SIGKILL:
            continue  # it had ended
        left.append(len(list(sink.glob("*.parquet"))))
        done = command(source, sink, *GATE, "--quiet", "--resume").ended()
        if done.status or not rows_of(sink).equals(expected) or list(sink.glob(".*.tmp")):
            must(False, f"killed with {left[-1]} parts and resumed: other rows, or status {done.status} {done.err}")
        if len(left) == KILLS:
            break
    must(
        len(left) == KILLS,
        f"{len(left)} jobs of {len(source)} parts killed, with {', '.join(map(str, sorted(left)))} parts written, "
        f"and resumed: row for row the {len(expected):,} rows of an uninterrupted job",
    )
    remove(sink)
    return {"rows": given.kill_rows, "parts": len(source), "parts_when_killed": left}


def is_one_line(text: str) -> bool:
    """Return whether a message is one line, without a traceback."""
    return len(text.strip().splitlines()) == 1 and "Traceback" not in text


def two_jobs(given: Any, folder: Path) -> dict[str, Any]:
    """Start a second job on the folder of one that works, which is stopped meanwhile."""
    source, sink = files(folder, numbered, given.kill_rows, PART_ROWS), folder / "shared"
    remove(sink)
    first = command(source, sink, *GATE, "--quiet")
    wait_for(sink)
    first.send(signal.SIGSTOP)
    refused = [command(source, sink, *more, "--quiet", "--resume").ended() for more in (GATE, ("--gate", "metal"))]
    first.send(signal.SIGCONT)
    done = first.ended()
    is_refused = all(one.status == 2 and is_one_line(one.err) for one in refused)
    said = [one.err.strip().replace(str(folder), "FOLDER") for one in refused]
    must(is_refused and done.status == 0, f"the same job and another one are refused: {said[0]}")
    must(len(rows_of(sink)) == given.kill_rows, "the first job ends as if alone")
    remove(sink)
    return {"said": said}


def disk(given: Any, folder: Path) -> dict[str, Any]:
    """Fill a small disk, make room, and go on."""
    source, place = files(folder, numbered, given.kill_rows, PART_ROWS), folder / "small disk"
    expected, _ = whole(source, folder / "whole")
    place.mkdir(exist_ok=True)
    room_mb = max(1, int(size_mb(folder / "whole") / 3))
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room_mb}m", "tmpfs", place]).returncode:
        print("a full disk: left out, since no file system can be mounted here")
        return {"left_out": "no file system can be mounted"}
    try:
        sink = place / "out"
        full = command(source, sink, *GATE, "--quiet").ended()
        left = sorted(sink.glob("*.parquet"))
        is_whole = all(pq.ParquetFile(path).metadata.num_rows == PART_ROWS for path in left)
        said = full.err.strip().replace(str(folder), "FOLDER")
        must(full.status == 2 and is_one_line(full.err) and is_whole, f"a disk of {room_mb} MB: {said}")
        subprocess.run(["mount", "-o", f"remount,size={6 * room_mb}m", place], check=True)
        done = command(source, sink, *GATE, "--quiet", "--resume").ended()
        must(
            done.status == 0 and rows_of(sink).equals(expected),
            f"with room it goes on from {len(left)} of {len(source)} parts: as if uninterrupted {done.err}".strip(),
        )
    finally:
        subprocess.run(["umount", place], check=True)
        remove(folder / "whole")
    return {"said": said, "parts": len(left)}


def devices(given: Any, folder: Path) -> dict[str, Any]:
    """Evaluate on eight devices and on one."""
    found = {}
    for make, what in ((pairs, ("ours", "gate")), (workloads, ("model", "model"))):
        source, sinks = files(folder, make, given.device_rows), [folder / f"on {count}" for count in (1, 8)]
        remove(*sinks)
        for count, sink in zip((1, 8), sinks, strict=True):
            peer(what[0], source, sink, XLA_FLAGS=f"--xla_force_host_platform_device_count={count}")
        found[what[1]] = rows_of(sinks[0]).equals(rows_of(sinks[1]))
        must(
            found[what[1]], f"the {what[1]} on 8 devices: {given.device_rows:,} rows equal in every bit to those of one"
        )
        remove(*sinks)
    return found


def ray(given: Any, folder: Path) -> dict[str, Any]:
    """Evaluate on one Ray actor, on two, and on two of which one is killed."""
    source, seconds = files(folder, numbered, given.kill_rows, PART_ROWS), {}
    expected, _ = whole(source, folder / "whole")
    for name in ("one_actor", "two_actors"):
        remove(folder / name)
        done = peer(name, source, folder / name)
        seconds[name] = done.found["seconds"]
        must(rows_of(folder / name).equals(expected), f"{name}, {seconds[name]:.1f} s: the rows of threads")
        remove(folder / name)
    sink = folder / "killed actor"
    remove(sink)
    job = peer_process("two_actors", source, sink)
    while not any(sink.glob("*.parquet")) and job.is_running():
        time.sleep(0.01)
    own = [child for child in psutil.Process(job.pid).children(recursive=True) if "_Actor" in child.name()]
    for actor in own[:1]:
        actor.kill()
    left, done = len(list(sink.glob("*.parquet"))), job.ended()
    is_equal = not done.status and rows_of(sink).equals(expected)
    must(
        bool(own) and left < len(source) and is_equal, f"an actor killed after {left} of {len(source)} parts: same rows"
    )
    remove(sink, folder / "whole")
    return {"rows": given.kill_rows, "seconds": seconds, "parts_when_killed": left}


def small(given: Any, folder: Path) -> dict[str, Any]:
    """Evaluate the same number of rows in many small files and in one."""
    seconds, sink = [], folder / "small"
    for file_rows in (SMALL_ROWS, given.small_rows):
        source = files(folder / f"files of {file_rows}", pairs, given.small_rows, file_rows)
        remove(sink)
        seconds.append(peer("ours", source, sink).found["seconds"])
        manifest = manifest_of(sink).stat().st_size
        found = {"files": len(source), "manifest_bytes": manifest} if len(source) > 1 else found
    remove(sink)
    each_ms = 1e3 * (seconds[0] - seconds[1]) / found["files"]
    print(f"{found['files']:,} files take {seconds[0]:.1f} s, one file of as many rows {seconds[1]:.1f} s", flush=True)
    return {**found, "rows": given.small_rows, "seconds": seconds, "each_file_ms": each_ms}
