"""Files of rows, larger than memory: what `rlxjax evaluate` costs beside Polars and DuckDB, and what it survives.

    python -m benchmarks.scale [--rows 100000000] [--model-rows 20000000] [--rounds 3] [--model-rounds 2]
        [--only gate model kill folder disk devices ray] [--data FOLDER] [--page docs/scale.md] [--json FILE]

Every evaluation is a process of its own; the peers take turns, in another order each time. Needs polars, duckdb and the
extra `scale`. A full disk is a small file system in memory, which root alone can mount. The exit status is 1 where
something falls short.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from benchmarks._common import options, placed, table, write
from benchmarks._table_peers import COUNTS, MIN_GAIN_NS, PENALTY_NS, RATES, TEMPERATURE_NS
from benchmarks._table_runs import GATE, command, files, numbered, pairs, peer, workloads

#: What is asked: of our time over that of the peers, peak MB, and of a model's time over that in memory.
MOST_OF_POLARS, MOST_OF_DUCKDB, MOST_MB, MOST_OF_MEMORY = 1.3, 1.0, 1500.0, 2.0
#: Roundings to float32 of the magnitudes that a score sums, by which two scores may differ.
ROUNDINGS = 8
#: Times that a job is killed; rows of a file of such a job, which is one part.
KILLS, PART_ROWS = 10, 500_000
TITLES = {"ours": "`rx.evaluate`", "command": "`rlxjax evaluate`", "polars": "Polars", "duckdb": "DuckDB"}
_compute: Any = pyarrow.compute

#: What falls short, a sentence each.
short: list[str] = []


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
        for path in (sink, manifest_of(sink)):
            path.unlink(missing_ok=True)


def turns(names: Sequence[str], source: Sequence[Path], folder: Path, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Return what each peer took in each round; the outputs of the last round stay."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in np.random.default_rng(turn).permutation(names).tolist():
            remove(folder / name)
            done = peer(name, source, folder / name)
            own = {key: value for key, value in json.loads(done.out).items() if key in STEPS}
            figures = {"wall_s": done.wall_s, "cpu_s": done.cpu_s, "peak_mb": done.peak_mb}
            runs[name].append({**figures, "output_mb": size_mb(folder / name), **own})
            shown = ", ".join(f"{key} {value:.2f}" for key, value in runs[name][-1].items())
            print(f"{name}, turn {turn + 1}: {shown}", flush=True)
    return runs


STEPS = ("seconds", "decode_s", "evaluate_s", "encode_s", "cold_s")


def ratios(runs: dict[str, list[dict[str, Any]]], name: str, over: str, of: str = "wall_s") -> tuple[float, str]:
    """Return the median of the ratios within a round, and it with the least and the largest of them in words."""
    found = [own[of] / other[of] for own, other in zip(runs[name], runs[over], strict=True)]
    median = float(np.median(found))
    return median, f"{median:.2f} ({min(found):.2f} to {max(found):.2f})"


def compared(source: Sequence[Path], own: Path, other: Path) -> dict[str, float]:
    """Return by how much the answers of all rows differ, over what float32 rounds."""
    mine, theirs = rows_of(own), rows_of(other)
    rows = decisions = beyond = 0
    score = probability = 0.0
    for file in map(pq.ParquetFile, source):
        for group in range(file.num_row_groups):
            given = file.read_row_group(group)
            ours, peers = (
                {name: one.slice(rows, len(given))[name].to_numpy() for name in one.column_names}
                for one in (mine, theirs)
            )
            saved = {name: given[f"before_{name}"].to_numpy() - given[f"after_{name}"].to_numpy() for name in COUNTS}
            summed = sum(np.abs(saved[name]) * rate for name, rate in RATES.items())
            unit = 2.0**-24 * (summed + np.maximum(-saved["sync_points"], 0) * PENALTY_NS + MIN_GAIN_NS)
            score_ns = ours["score_ns"].astype(float)
            score = max(score, float(np.max(np.abs(score_ns - peers["score_ns"]) / unit)))
            differ = ours["should_fuse"] != peers["should_fuse"]
            decisions += int(differ.sum())
            beyond += int(np.sum(differ & (np.abs(score_ns - MIN_GAIN_NS) > ROUNDINGS * unit)))
            apart = np.abs(ours["fuse_probability"].astype(float) - peers["fuse_probability"])
            probability = max(probability, float(np.max(apart / (unit / TEMPERATURE_NS / 4 + 2.0**-24))))
            rows += len(given)
    found = {"rows": rows, "decisions": decisions, "beyond": beyond, "score": score, "probability": probability}
    return found | {"missing": abs(len(mine) - rows) + abs(len(theirs) - rows)}


def gate(given: Any, folder: Path) -> dict[str, Any]:
    """Evaluate a gate, beside Polars and DuckDB."""
    source = files(folder, pairs, given.rows)
    runs = turns([*TITLES], source, folder, given.rounds)
    equal = {other: compared(source, folder / "ours", folder / other) for other in ("command", "polars", "duckdb")}
    for other, found in equal.items():
        is_equal = found["score"] <= ROUNDINGS and found["probability"] <= ROUNDINGS
        must(
            is_equal and not found["beyond"] and not found["missing"] and found["rows"] == given.rows,
            f"ours and {other} equal in {found['rows']:,} rows: scores within {found['score']:.2g} roundings to "
            f"float32, probabilities within {found['probability']:.2g}; {found['decisions']} decisions differ, "
            f"{found['beyond']} of them by more than rounding",
        )
    for name in ("ours", "command"):
        for over, most in (("polars", MOST_OF_POLARS), ("duckdb", MOST_OF_DUCKDB)):
            (ratio, shown), (_, of_cpu) = ratios(runs, name, over), ratios(runs, name, over, "cpu_s")
            must(ratio <= most, f"{name}: {shown} times the seconds of {over}, at most {most}; of its CPU {of_cpu}")
        peak_mb = max(run["peak_mb"] for run in runs[name])
        must(peak_mb <= MOST_MB, f"{name}: a peak of {peak_mb:,.0f} MB, at most {MOST_MB:,.0f}")
    remove(*(folder / name for name in runs))
    return {"rows": given.rows, "input_mb": sum(map(size_mb, source)), "runs": runs, "equal": equal}


def gate_table(found: dict[str, Any]) -> str:
    """Return the table of the gate, and what each step of ours takes."""
    runs, rows = found["runs"], []
    for name, own in runs.items():
        figures = {key: np.median([run[key] for run in own]) for key in ("wall_s", "cpu_s", "peak_mb", "output_mb")}
        shown = [f"{value:,.{1 if key.endswith('_s') else 0}f}" for key, value in figures.items()]
        rows.append([TITLES[name], *shown, *(ratios(runs, name, over)[1] for over in ("polars", "duckdb"))])
    steps = {name: np.median([run[f"{name}_s"] for run in runs["ours"]]) for name in ("decode", "evaluate", "encode")}
    shares = ", ".join(f"{name} {own / sum(steps.values()):.0%}" for name, own in steps.items())
    title = f"{found['rows']:,} rows of profile pairs, {found['input_mb']:,.0f} MB. Steps of `rx.evaluate`: {shares}."
    return f"{title}\n\n{table(['', 's', 'CPU s', 'peak MB', 'output MB', 'times Polars', 'times DuckDB'], rows)}"


def model(given: Any, folder: Path) -> dict[str, Any]:
    """Pick by a calibrated model with the probability, from files and in memory."""
    source = files(folder, workloads, given.model_rows)
    runs = turns(["model", "memory"], source, folder, given.model_rounds)
    mine, theirs = rows_of(folder / "model"), rows_of(folder / "memory")
    differ = _compute.sum(_compute.not_equal(mine["pick"], theirs["pick"])).as_py()
    apart = float(np.max(np.abs(mine["probability"].to_numpy() - theirs["probability"].to_numpy())))
    sentence = f"picks of {len(mine):,} rows as in memory: {differ} differ; probabilities by at most {apart:.1g}"
    must(len(mine) == given.model_rows and differ <= 1e-6 * len(mine) and apart < 1e-5, sentence)
    (ratio, shown), (_, whole) = ratios(runs, "model", "memory", "seconds"), ratios(runs, "model", "memory")
    must(ratio <= MOST_OF_MEMORY, f"a model: {shown} times in memory, at most {MOST_OF_MEMORY}; with starting {whole}")
    remove(folder / "model", folder / "memory")
    return {"rows": given.model_rows, "runs": runs, "picks_that_differ": differ, "probability_apart": apart}


def model_table(found: dict[str, Any]) -> str:
    """Return the table of the model."""
    runs, rows = found["runs"], []
    for name, title in (("model", "`rx.evaluate`"), ("memory", "`decided`, jitted, columns in memory")):
        figures = {key: np.median([run[key] for run in runs[name]]) for key in ("seconds", "cpu_s", "peak_mb")}
        speed = found["rows"] / figures["seconds"] / 1e3
        rows.append([title, *(f"{value:,.0f}" for value in (*figures.values(), speed))])
    _, shown = ratios(runs, "model", "memory", "seconds")
    title = f"{found['rows']:,} rows of the Welch model, pick with probability: {shown} times the seconds in memory."
    return f"{title}\n\n{table(['', 's', 'CPU s', 'peak MB', 'thousand rows a s'], rows)}"


def whole(source: Sequence[Path], sink: Path) -> tuple[pa.Table, float]:
    """Return what an uninterrupted job gives, and the seconds from its manifest to its last part."""
    remove(sink)
    done = command(source, sink, *GATE, "--quiet").ended()
    must(done.status == 0, f"an uninterrupted job ends with 0 {done.err}".strip())
    parts = [path.stat().st_mtime for path in sink.glob("*.parquet")]
    return rows_of(sink), max(parts) - manifest_of(sink).stat().st_mtime


def manifest_of(sink: Path) -> Path:
    """Return where the manifest of a job is."""
    return sink.with_name(f"{sink.name}.manifest.json")


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
    refused = [command(source, sink, *more, "--quiet", "--resume").ended() for more in (GATE, ("--target", "metal"))]
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


SECTIONS: dict[str, Callable[[Any, Path], dict[str, Any]]] = {
    "gate": gate,
    "model": model,
    "kill": kill,
    "folder": two_jobs,
    "disk": disk,
    "devices": devices,
}


def main() -> int:
    """Measure, print and write."""
    numbers = {"rows": 100_000_000, "model_rows": 20_000_000, "kill_rows": 16_000_000, "device_rows": 1_000_000}
    parser = options(__doc__, **numbers, rounds=3, model_rounds=2)
    parser.add_argument("--only", nargs="+", choices=[*SECTIONS], default=[*SECTIONS])
    parser.add_argument("--data", type=Path, help="the folder of the files, kept; a temporary one unless given")
    parser.add_argument("--page", type=Path, help="the page that gets the tables")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="rlxjax-scale-") as temporary:
        folder = Path(temporary) if given.data is None else given.data.resolve()
        for name in given.only:
            print(f"\n{name}", flush=True)
            found[name] = SECTIONS[name](given, folder)
    tables = {"gate": gate_table, "model": model_table}
    for name, text in {name: make(found[name]) for name, make in tables.items() if name in found}.items():
        print(f"\n{text}")
        if given.page is not None:
            placed(given.page, name, text)
    print("\n" + "\n".join(f"falls short: {sentence}" for sentence in short))
    write(given.json, {"cores": len(os.sched_getaffinity(0)), **found, "short": short})
    return bool(short)


if __name__ == "__main__":
    sys.exit(main())
