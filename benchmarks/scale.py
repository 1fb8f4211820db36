"""Compare `rlxjax evaluate` with Polars and DuckDB on files of rows larger than memory.

    python -m benchmarks.scale [--rows 100000000] [--model-rows 20000000] [--rounds 3] [--model-rounds 1]
        [--only gate model small] [--data FOLDER] [--page docs/scale.md] [--json FILE]

Every evaluation is its own process, and the order of the peers changes from round to round. The benchmark needs polars,
duckdb and the extra `scale`. The exit status is 1 if a result is worse than its limit.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute
import pyarrow.parquet as pq

from benchmarks._common import options, placed, table, write
from benchmarks._table_peers import COUNTS, MIN_GAIN_NS, PENALTY_NS, RATES, TEMPERATURE_NS
from benchmarks._table_runs import files, manifest_of, must, pairs, peer, remove, rows_of, short, size_mb, workloads

#: The limits: our time over the peers' times, peak MB, and a model's time over the time in memory.
MOST_OF_POLARS, MOST_OF_DUCKDB, MOST_MB, MOST_OF_MEMORY = 1.3, 1.0, 1500.0, 2.0
#: The largest difference of two scores, in float32 roundings of the summed magnitudes.
ROUNDINGS = 8
#: Rows of each small file.
SMALL_ROWS = 1_000
#: The figures that a peer prints.
STEPS = ("seconds", "decode_s", "evaluate_s", "encode_s", "cold_s")
TITLES = {"ours": "`rx.evaluate`", "command": "`rlxjax evaluate`", "polars": "Polars", "duckdb": "DuckDB"}
_compute: Any = pyarrow.compute


def turns(names: Sequence[str], source: Sequence[Path], folder: Path, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Return each peer's figures in each round; the outputs of the last round stay."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in np.random.default_rng(turn).permutation(names).tolist():
            remove(folder / name)
            done = peer(name, source, folder / name)
            own = {key: value for key, value in done.found.items() if key in STEPS}
            figures = {"wall_s": done.wall_s, "cpu_s": done.cpu_s, "peak_mb": done.peak_mb}
            runs[name].append({**figures, "output_mb": size_mb(folder / name), **own})
            shown = ", ".join(f"{key} {value:.2f}" for key, value in runs[name][-1].items())
            print(f"{name}, turn {turn + 1}: {shown}", flush=True)
    return runs


def ratios(runs: dict[str, list[dict[str, Any]]], name: str, over: str, of: str = "wall_s") -> tuple[float, str]:
    """Return the median of the ratios within a round, and a text with the median and the extremes."""
    found = [own[of] / other[of] for own, other in zip(runs[name], runs[over], strict=True)]
    median = float(np.median(found))
    return median, f"{median:.2f} ({min(found):.2f} to {max(found):.2f})"


def compared(source: Sequence[Path], own: Path, other: Path) -> dict[str, float]:
    """Return the difference of all rows' answers, over the float32 rounding."""
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
    """Return the table of the gate, and the shares of our steps."""
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
    """Pick with probability by a calibrated model, from files and in memory."""
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
    size = sum(map(size_mb, source))
    return {
        "rows": given.model_rows,
        "input_mb": size,
        "runs": runs,
        "picks_that_differ": differ,
        "probability_apart": apart,
    }


def model_table(found: dict[str, Any]) -> str:
    """Return the table of the model."""
    runs, rows = found["runs"], []
    for name, title in (("model", "`rx.evaluate`"), ("memory", "`decided`, jitted, columns in memory")):
        figures = {key: np.median([run[key] for run in runs[name]]) for key in ("seconds", "cpu_s", "peak_mb")}
        speed = found["rows"] / figures["seconds"] / 1e3
        rows.append([title, *(f"{value:,.0f}" for value in (*figures.values(), speed))])
    _, shown = ratios(runs, "model", "memory", "seconds")
    title = f"Picks with probability for {found['rows']:,} Welch rows: files take {shown} times the seconds of memory."
    return f"{title}\n\n{table(['', 's', 'CPU s', 'peak MB', 'thousand rows a s'], rows)}"


def small(given: Any, folder: Path) -> dict[str, Any]:
    """Evaluate the same number of rows in many small files and in one."""
    seconds, sink, found = [], folder / "small", {}
    for file_rows in (SMALL_ROWS, given.small_rows):
        source = files(folder / f"files of {file_rows}", pairs, given.small_rows, file_rows)
        remove(sink)
        seconds.append(peer("ours", source, sink).found["seconds"])
        found = found or {"files": len(source), "manifest_bytes": manifest_of(sink).stat().st_size}
    remove(sink)
    each_ms = 1e3 * (seconds[0] - seconds[1]) / found["files"]
    return {**found, "rows": given.small_rows, "seconds": seconds, "each_file_ms": each_ms}


def small_text(found: dict[str, Any]) -> str:
    """Return the cost of small files, in words."""
    many_s, one_s = found["seconds"]
    return (
        f"{found['files']:,} files with {found['rows']:,} rows of profile pairs take {many_s:.1f} s, one file with "
        f"these rows {one_s:.1f} s: {found['each_file_ms']:.1f} ms per file.\nThe manifest takes "
        f"{found['manifest_bytes'] / found['files']:.0f} bytes per file."
    )


SECTIONS: dict[str, Callable[[Any, Path], dict[str, Any]]] = {
    "gate": gate,
    "model": model,
    "small": small,
}


def main() -> int:
    """Measure, print and write."""
    numbers = {"rows": 100_000_000, "model_rows": 20_000_000, "small_rows": 2_000_000}
    parser = options(__doc__, **numbers, rounds=3, model_rounds=1)
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
    makers = {"gate": gate_table, "model": model_table, "small": small_text}
    texts = {name: make(found[name]) for name, make in makers.items() if name in found}
    for name, text in texts.items():
        print(f"\n{text}")
        if given.page is not None:
            placed(given.page, name, text)
    print("\n" + "\n".join(f"falls short: {sentence}" for sentence in short))
    write(given.json, {"cores": len(os.sched_getaffinity(0)), **found, "short": short})
    return bool(short)


if __name__ == "__main__":
    sys.exit(main())
