"""Evaluate files of rows, each peer in its own process: `python -m benchmarks._table_peers PEER SINK FILE...`.

The process prints the seconds of the work, without startup, as JSON. Polars and DuckDB import no JAX.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

#: The counts of a profile, and the columns of a pair.
COUNTS = ("kernel_launches", "sync_points", "host_output_bytes", "device_traffic_bytes")
FIELDS = [f"{side}_{name}" for side in ("before", "after") for name in COUNTS]
#: The built-in gate of "cuda" for an expression: ns per saved count, and the other numbers.
RATES = dict(zip(COUNTS, (2_000.0, 20_000.0, 1 / 50, 1 / 800), strict=True))
PENALTY_NS, MIN_GAIN_NS, TEMPERATURE_NS = 15e6, 5_000.0, 1e6
#: Rows of a call in memory: the fastest of 2**11 to 2**16.
MEMORY_ROWS = 2**11


def ours(sink: str, files: Sequence[str]) -> dict[str, float]:
    """Evaluate the gate by this package."""
    import rlxjax as rx

    return _steps(rx.evaluate(files, sink, rx.io_fusion_gate_for_target("cuda"), temperature_ns=TEMPERATURE_NS))


def polars(sink: str, files: Sequence[str]) -> dict[str, float]:
    """Evaluate the gate as a streaming expression of Polars."""
    import polars as pl

    def saved(name: str) -> Any:
        return (pl.col(f"before_{name}") - pl.col(f"after_{name}")).cast(pl.Float32)

    added = pl.max_horizontal(pl.col("after_sync_points") - pl.col("before_sync_points"), 0).cast(pl.Float32)
    worth = sum((saved(name) * rate for name, rate in RATES.items()), pl.lit(0.0, pl.Float32))
    score = pl.col("score_ns")
    odds = ((score - MIN_GAIN_NS) / TEMPERATURE_NS).cast(pl.Float32)
    rows = pl.scan_parquet(list(files)).select((worth - added * PENALTY_NS).cast(pl.Float32).alias("score_ns"))
    answers = rows.with_columns(
        (score >= MIN_GAIN_NS).alias("should_fuse"),
        (1.0 / (1.0 + (-odds).exp())).cast(pl.Float32).alias("fuse_probability"),
    )
    answers.sink_parquet(sink, compression="zstd", engine="streaming")
    return {}


def duckdb(sink: str, files: Sequence[str]) -> dict[str, float]:
    """Evaluate the gate as a query of DuckDB."""
    import duckdb as db

    worth = " + ".join(f"(before_{name} - after_{name})::FLOAT * {rate}::FLOAT" for name, rate in RATES.items())
    added = "greatest(after_sync_points - before_sync_points, 0)::FLOAT"
    query = (
        f"SELECT score_ns, score_ns >= {MIN_GAIN_NS}::FLOAT AS should_fuse, "
        f"(1 / (1 + exp(-(score_ns - {MIN_GAIN_NS}::FLOAT) / {TEMPERATURE_NS}::FLOAT)))::FLOAT AS fuse_probability "
        f"FROM (SELECT ({worth} - {added} * {PENALTY_NS}::FLOAT)::FLOAT AS score_ns FROM read_parquet({[*files]}))"
    )
    db.sql(f"COPY ({query}) TO '{sink}' (FORMAT parquet, COMPRESSION zstd)")
    return {}


def model(sink: str, files: Sequence[str]) -> dict[str, float]:
    """Pick with probability by a calibrated Welch model, from files to files."""
    import rlxjax as rx

    return _steps(rx.evaluate(files, sink, _welch(), want=["pick", "probability"]))


def memory(sink: str, files: Sequence[str]) -> dict[str, float]:
    """Pick by the same model with columns in memory, in chunks; writing to `sink` is outside the time."""
    import jax
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    calibrated = _welch()
    table = pa.concat_tables(pq.read_table(file) for file in files)
    columns = {name: table[name].to_numpy().astype(float) for name in table.column_names}
    n_rows = table.num_rows
    place, probability = np.empty(n_rows, np.int8), np.empty(n_rows, np.float32)

    @jax.jit
    def decided(columns: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        found = calibrated.decided(**columns)
        return found.place.astype("int8"), found.probability.astype("float32")

    def chunk(start: int) -> None:
        rows = slice(start, start + MEMORY_ROWS)
        place[rows], probability[rows] = decided({name: values[rows] for name, values in columns.items()})

    with jax.enable_x64(True):
        begun = time.perf_counter()
        chunk(0)
        cold_s = time.perf_counter() - begun
        chunk((n_rows - 1) // MEMORY_ROWS * MEMORY_ROWS)  # compiles for the remaining rows
        begun = time.perf_counter()
        for start in range(0, n_rows, MEMORY_ROWS):
            chunk(start)
        warm_s = time.perf_counter() - begun
    pick = pa.array(calibrated.strategies).take(pa.array(place))
    pq.write_table(pa.table({"pick": pick, "probability": probability}), sink)
    return {"seconds": warm_s, "cold_s": cold_s}


def _welch() -> Any:
    import rlxjax as rx

    prior = rx.calibration.prior_calibration("cpu")
    assert prior is not None
    return prior.of("welch")


def _steps(done: Any) -> dict[str, float]:
    return {name: getattr(done, name) for name in ("seconds", "decode_s", "evaluate_s", "encode_s")}


PEERS: dict[str, Callable[[str, Sequence[str]], dict[str, float]]] = {
    own.__name__: own for own in (ours, polars, duckdb, model, memory)
}

if __name__ == "__main__":
    begun_s = time.perf_counter()
    found = PEERS[sys.argv[1]](sys.argv[2], sys.argv[3:])
    print(json.dumps({"seconds": time.perf_counter() - begun_s, **found}))
