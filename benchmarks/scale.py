"""Compare `rlxjax evaluate` with expressions of Polars, DuckDB and Daft on the same files.

    python -m benchmarks.scale [--rows 20000000] [--rounds 3] [--page docs/scale.md] [--json FILE]

Each evaluation is a process of its own, and the order changes from round to round. The benchmark needs daft, duckdb and
polars. The exit status is 1 if answers differ, or if the command takes more than 1.2 times the time of Polars.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks._common import ROOT, options, placed, table, write

#: The largest ratio of the command's time to that of Polars, and the largest relative difference of two scores.
MOST_OF_POLARS, MOST_APART = 1.2, 1e-5
FILES, GROUP_ROWS = 8, 2**20
COUNTS = ("kernel_launches", "sync_points", "host_output_bytes", "device_traffic_bytes")
#: The built-in gate of "cuda" for an expression: ns for each saved count, and the other numbers.
RATES = dict(zip(COUNTS, (2_000.0, 20_000.0, 1 / 50, 1 / 800), strict=True))
PENALTY_NS, MIN_GAIN_NS, TEMPERATURE_NS = 15e6, 5_000.0, 1e6


def polars(source: str, sink: str) -> None:
    """Evaluate the gate by an expression of Polars."""
    import polars as pl

    saved = {name: pl.col(f"before_{name}") - pl.col(f"after_{name}") for name in COUNTS}
    added = pl.max_horizontal(-saved["sync_points"], 0)
    score = sum((saved[name].cast(pl.Float64) * rate for name, rate in RATES.items()), -PENALTY_NS * added)
    rows = (
        pl.scan_parquet(source).select("id", score_ns=score).with_columns(should_fuse=pl.col("score_ns") >= MIN_GAIN_NS)
    )
    odds = (pl.col("score_ns") - MIN_GAIN_NS) / TEMPERATURE_NS
    rows = rows.with_columns(fuse_probability=(1 / (1 + (-odds).exp())).cast(pl.Float32))
    rows.with_columns(pl.col("score_ns").cast(pl.Float32)).sink_parquet(sink, compression="zstd")


def duckdb(source: str, sink: str) -> None:
    """Evaluate the gate by a query of DuckDB."""
    import duckdb as db

    saved = " + ".join(f"(before_{name} - after_{name})::DOUBLE * {rate}" for name, rate in RATES.items())
    score = f"{saved} - greatest(after_sync_points - before_sync_points, 0) * {PENALTY_NS}"
    probability = f"(1 / (1 + exp(({MIN_GAIN_NS} - score) / {TEMPERATURE_NS})))::FLOAT"
    answers = f"score::FLOAT AS score_ns, score >= {MIN_GAIN_NS} AS should_fuse, {probability} AS fuse_probability"
    query = f"SELECT id, {answers} FROM (SELECT id, {score} AS score FROM read_parquet('{source}'))"
    db.sql(f"COPY ({query}) TO '{sink}' (FORMAT parquet, COMPRESSION zstd)")


def daft(source: str, sink: str) -> None:
    """Evaluate the gate by an expression of Daft."""
    import daft as df
    from daft import col

    saved = {name: col(f"before_{name}") - col(f"after_{name}") for name in COUNTS}
    worth = sum((saved[name].cast("float64") * rate for name, rate in RATES.items()), df.lit(0.0))
    added = (col("after_sync_points") - col("before_sync_points")).clip(0)
    score = worth - added * PENALTY_NS
    odds = (MIN_GAIN_NS - col("score_ns")) / TEMPERATURE_NS
    probability = (df.lit(1.0) / (odds.exp() + 1.0)).cast("float32")
    rows = df.read_parquet(source).select(col("id"), score.alias("score_ns"))
    fuses = (col("score_ns") >= MIN_GAIN_NS).alias("should_fuse")
    rows = rows.select(col("id"), col("score_ns").cast("float32"), fuses, probability.alias("fuse_probability"))
    rows.write_parquet(sink, compression="zstd")


PEERS: dict[str, Callable[[str, str], None]] = {own.__name__: own for own in (polars, duckdb, daft)}
TITLES = {"command": "`rlxjax evaluate`", "polars": "Polars", "duckdb": "DuckDB", "daft": "Daft's own expression"}


def files(folder: Path, rows: int) -> str:
    """Write made-up pairs of profiles; return their glob."""
    (source := folder / "pairs").mkdir()
    for number, ids in enumerate(np.array_split(np.arange(rows), FILES)):
        rng = np.random.default_rng(number)
        before = dict(zip(COUNTS, (np.exp(rng.normal(mean, 1.5, len(ids))) for mean in (5, 2, 15, 21)), strict=True))
        share = rng.random(len(ids))
        pairs = {f"before_{name}": counts.astype(np.int64) for name, counts in before.items()}
        pairs |= {f"after_{name}": (counts * share).astype(np.int64) for name, counts in before.items()}
        pairs["after_sync_points"] += rng.random(len(ids)) < 0.05
        path = source / f"{number}.parquet"
        pq.write_table(pa.table({"id": ids, **pairs}), path, compression="zstd", row_group_size=GROUP_ROWS)
    return f"{source}/*.parquet"


def timed(name: str, source: str, sink: Path) -> dict[str, float]:
    """Run a peer or the command in a process; return its seconds and its CPU seconds."""
    command = [sys.executable, "-m", "benchmarks.scale", "--peer", name, source, str(sink)]
    if name == "command":
        gate = ["--gate", "cuda", "--temperature-ns", str(TEMPERATURE_NS), "--quiet"]
        command = [sys.executable, "-m", "rlxjax", "evaluate", source, str(sink), *gate]
    os.sync()  # no peer waits for another peer's writes
    begun_s, before = time.perf_counter(), os.times()
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"DO_NOT_TRACK": "true", "DAFT_PROGRESS_BAR": "0"})
    after = os.times()
    used_s = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": time.perf_counter() - begun_s, "processor_s": used_s}


def answers(sink: Path) -> pa.Table:
    """Return the rows of a file or a folder in the order of their ids."""
    return pq.read_table(sink, columns=["id", "score_ns", "should_fuse", "fuse_probability"]).sort_by("id")


def apart(one: pa.Table, other: pa.Table) -> dict[str, float]:
    """Return the differences of two peers' answers."""
    score, others = (table["score_ns"].to_numpy().astype(float) for table in (one, other))
    sizes = np.maximum(np.abs(score), 1.0)
    fuses = np.flatnonzero(one["should_fuse"].to_numpy() != other["should_fuse"].to_numpy())
    probabilities = one["fuse_probability"].to_numpy() - other["fuse_probability"].to_numpy()
    return {
        "rows_missing": abs(len(score) - len(others)) + int(np.sum(one["id"].to_numpy() != other["id"].to_numpy())),
        "score": float(np.max(np.abs(score - others) / sizes)),
        "probability": float(np.max(np.abs(probabilities))),
        "decisions": len(fuses),
    }


def main() -> int:
    """Measure, compare, print and write."""
    if sys.argv[1:2] == ["--peer"]:
        PEERS[sys.argv[2]](*sys.argv[3:])
        return 0
    parser: argparse.ArgumentParser = options(__doc__, rows=20_000_000, rounds=3)
    parser.add_argument("--page", type=Path, help="the page that gets the table")
    given = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in TITLES}
    with tempfile.TemporaryDirectory(prefix="rlxjax-scale-") as temporary:
        folder = Path(temporary)
        source = files(folder, given.rows)
        for turn in range(given.rounds):
            for name in np.random.default_rng(turn).permutation([*TITLES]).tolist():
                sink = folder / name
                shutil.rmtree(sink, ignore_errors=True)
                sink.unlink(missing_ok=True)
                runs[name].append(timed(name, source, sink))
                print(f"{name}, round {turn + 1}: {runs[name][-1]['seconds']:.2f} s", flush=True)
        own = answers(folder / "command")
        differences = {name: apart(own, answers(folder / name)) for name in PEERS}
    ratios: dict[str, Any] = {
        name: [one["seconds"] / other["seconds"] for one, other in zip(each, runs["polars"], strict=True)]
        for name, each in runs.items()
    }
    rows = []
    for name, each in runs.items():
        median_s, cpu_s = (float(np.median([run[key] for run in each])) for key in ("seconds", "processor_s"))
        ratio = f"{np.median(ratios[name]):.2f} ({min(ratios[name]):.2f} to {max(ratios[name]):.2f})"
        rows.append([TITLES[name], f"{median_s:.1f}", f"{cpu_s:.1f}", ratio])
    text = f"{given.rows:,} rows:\n\n{table(['', 's', 'CPU s', 'times Polars'], rows)}"
    print(f"\n{text}\n\n{differences}")
    if given.page is not None:
        placed(given.page, "gate", text)
    write(given.json, {"cores": len(os.sched_getaffinity(0)), "rows": given.rows, "runs": runs, "apart": differences})
    is_equal = all(not own["rows_missing"] and own["score"] < MOST_APART for own in differences.values())
    return int(not is_equal or float(np.median(ratios["command"])) > MOST_OF_POLARS)


if __name__ == "__main__":
    sys.exit(main())
