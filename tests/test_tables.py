"""Tables on disk: every row has the answer that it has in memory, or is rejected by its place; parts are whole."""

import decimal
import json
import re
import resource
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from _compilations import COMPILE, compilations
from _documented import assert_documented
from _models import TILED, TILED_TRUTH, calibrated, random_posterior
from typer.testing import CliRunner

import rlxjax as rx
from calibrate.cli import app
from rlxjax.extras import install_command
from rlxjax.fit import prior_posterior
from rlxjax.models import FUNCTIONS
from rlxjax.tables import GATE_COLUMNS, MODEL_COLUMNS, evaluate

GATE = rx.io_fusion_gate_for_target("cuda")
COUNTS = ("kernel_launches", "sync_points", "host_output_bytes", "device_traffic_bytes")
FIELDS = [f"{side}_{name}" for side in ("before", "after") for name in COUNTS]
TILES = calibrated(random_posterior(TILED, TILED_TRUTH, sd=0.3, spread=0.2))
SINGLE = {"rtol": 2.0**-23}


def pairs(rows, seed=0, dtype=np.int64):
    rng = np.random.default_rng(seed)
    highs = dict(zip(FIELDS, (20, 4, 2**28, 2**30) * 2, strict=True))
    return {name: rng.integers(0, high, rows).astype(dtype) for name, high in highs.items()}


def write(path, columns, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **options)
    return path


def profiles(columns):
    return (rx.GraphIoProfile(*(columns[f"{side}_{name}"] for name in COUNTS)) for side in ("before", "after"))


def read(folder):
    return pq.read_table(folder)


@pytest.mark.parametrize("dtype", [np.int32, np.uint64, np.float64])
def test_a_gate_says_of_every_row_what_it_says_in_memory(dtype, tmp_path):
    columns = pairs(3000, dtype=dtype)
    source = write(tmp_path / "pairs.parquet", {"id": np.arange(3000), **columns}, row_group_size=700)
    done = evaluate(source, tmp_path / "out", GATE, want=[*GATE_COLUMNS], temperature_ns=1e5, rows_per_batch=512)
    table, (before, after) = read(tmp_path / "out"), profiles(columns)
    expected = {
        "score_ns": GATE.score_ns(before, after),
        "should_fuse": GATE.should_fuse(before, after),
        "fuse_probability": GATE.fuse_probability(before, after, temperature_ns=1e5),
        "fuse_log_odds": GATE.fuse_log_odds(before, after, temperature_ns=1e5),
    }
    assert table.column_names == ["id", *expected]
    np.testing.assert_array_equal(table["id"], np.arange(3000))
    for name, values in expected.items():
        np.testing.assert_allclose(table[name], np.asarray(values), atol=1e-37, **SINGLE)
    assert (done.rows, done.rejected, done.rejects, done.parts, done.resumed) == (3000, 0, None, 1, 0)


def test_a_model_says_of_every_row_what_it_says_in_memory(tmp_path):
    rng = np.random.default_rng(0)
    n, depth = np.exp2(rng.uniform(0, 13, 2000)), rng.choice([1.0, 2.5], 2000)
    source = write(tmp_path / "runs.parquet", {"items": n, "depth": depth})
    evaluate(source, tmp_path / "out", TILES, want=[*MODEL_COLUMNS], columns={"n": "items"})
    table, found, names = read(tmp_path / "out"), TILES.decided(n, depth), np.array(TILES.strategies)
    picked = names[np.asarray(found.place)]
    np.testing.assert_array_equal(table["pick"], picked)
    assert table.column_names[:2] == ["items", "depth"]  # the inputs stay, and join the answers to other tables
    np.testing.assert_array_equal(table["items"], n)
    np.testing.assert_array_equal(table["undecided"], ~np.asarray(found.is_sure))
    np.testing.assert_array_equal(table["in_domain"], TILES.in_domain(n, depth))
    for column in ("time_ns", "margin_ns", "probability"):
        np.testing.assert_allclose(table[column], np.asarray(getattr(found, column)), **SINGLE)
    for name in names:
        own = picked == name
        bounds, terms = TILES.interval_ns(name, n, depth), TILES.terms_ns(name, n, depth)
        for column, values in {"low_ns": bounds[0], "high_ns": bounds[1], **terms}.items():
            np.testing.assert_allclose(np.asarray(table[column])[own], np.broadcast_to(values, 2000)[own], **SINGLE)
    # Of a strategy that all rows have, and of one that each row names.
    each = np.where(np.arange(2000) % 2, *names)
    source = write(tmp_path / "named.parquet", {"n": n, "depth": depth, "strategy": each})
    evaluate(source, tmp_path / "one", TILES, want=["time_ns"], strategy=str(names[0]), columns={})
    evaluate(source, tmp_path / "each", TILES, want=["time_ns"], columns={"strategy": "strategy"})
    times = {name: np.asarray(TILES.predict_ns(str(name), n, depth)) for name in names}
    np.testing.assert_allclose(read(tmp_path / "one")["time_ns"], times[names[0]], **SINGLE)
    np.testing.assert_allclose(
        read(tmp_path / "each")["time_ns"], np.where(np.arange(2000) % 2, *times.values()), **SINGLE
    )


def test_files_globs_and_folders_are_read_in_order_and_other_columns_are_carried_along(tmp_path):
    odd = pa.array([[1, 2], None, [3]] * 100)
    ours = {"tags": odd, "note": pa.array(["a", None, "c"] * 100).dictionary_encode()}
    ours["price"] = pa.array([decimal.Decimal("1.5")] * 300)
    tables = {(year, place): pairs(300, 10 * year + place) for year in (1, 2) for place in (1, 2)}
    for (year, place), columns in tables.items():
        write(tmp_path / f"in/year={year}/{place}.parquet", {**ours, **columns}, row_group_size=128)
    (tmp_path / "in/_SUCCESS").touch()
    evaluate(tmp_path / "in", tmp_path / "out", GATE, want=["score_ns"])
    table = read(tmp_path / "out")
    assert table.column_names == [*ours, "year", "score_ns"]
    expected = np.concatenate([np.asarray(GATE.score_ns(*profiles(columns))) for columns in tables.values()])
    np.testing.assert_allclose(table["score_ns"], expected, **SINGLE)
    assert table["year"].to_pylist() == [1] * 600 + [2] * 600
    assert table["tags"].to_pylist() == odd.to_pylist() * 4
    assert table["note"].to_pylist() == ["a", None, "c"] * 400
    evaluate(str(tmp_path / "in/*/1.parquet"), tmp_path / "some", GATE, want=["score_ns"])
    several = [tmp_path / "in/year=2/1.parquet", tmp_path / "in/year=1/2.parquet"]
    evaluate(several, tmp_path / "two", GATE, want=["score_ns"])
    parts = [expected[start : start + 300] for start in range(0, 1200, 300)]
    np.testing.assert_allclose(read(tmp_path / "some")["score_ns"], np.concatenate(parts[::2]), **SINGLE)
    np.testing.assert_allclose(read(tmp_path / "two")["score_ns"], np.concatenate([parts[2], parts[1]]), **SINGLE)


#: Files in a folder `in`, what is asked for, in turn as a relative and an absolute path, and the key `k` of each file.
KEYS = [
    (["k=4/a"], "in/k=4/a.parquet", [4]),
    (["k=4/a"], "in/k=4", [4]),
    (["k=4/b=c/a"], "in/k=4/b=c", [4]),
    (["b=c/k=4/more/a"], "in/b=c/k=4/more/a.parquet", [4]),
    (["k=4/a", "k=8/a"], "in/*/a.parquet", [4, 8]),
    (["k=4/a", "k=8/a"], "in/**", [4, 8]),
    (["k=4/a", "k=8/b/a"], "in/k=*", [4, 8]),
    (["A/k=4/a", "k=8/a"], ["in/k=8/a.parquet", "in/A"], [8, 4]),
    (["A/k=eu/a", "B/k=1/a"], ["in/A", "in/B"], ["eu", "1"]),
    (["A/k=1/a", "B/k=02/a"], ["in/A", "in/B"], [1, 2]),
    (["k=-3/a", f"k={2**63 - 1}/a"], "in", [-3, 2**63 - 1]),
    (["k=1/a", f"k={2**63}/a"], "in", ["1", str(2**63)]),
    (["k=1.50/a", "k=2/a"], "in", ["1.50", "2"]),
    (["k=a%2Fb%20%3D%C3%A9/a"], "in", ["a/b =é"]),
    (["k=a=b/a", "k=/a"], "in", ["", "a=b"]),
    (["k=1/a", "k=__HIVE_DEFAULT_PARTITION__/a"], "in", [1, None]),
    (["k=x/a", "k=__HIVE_DEFAULT_PARTITION__/a"], "in", [None, "x"]),
    (["k=1/a", "k=%FF/a"], "in", "in/k=%FF/a.parquet': expected a path in UTF-8"),
    (["k=1/b=2/k=3/a"], "in", "/a.parquet: expected one folder k=... in its path, got two"),
    (["k=1/a", "a"], "in", "in/a.parquet: expected a folder k=... in the path, as in "),
    (["k=1/a", "b=1/a"], "in", "in/k=1/a.parquet: expected a folder b=... in the path, as in "),
    ([f"{FIELDS[0]}=1/a"], "in", f"/a.parquet: {FIELDS[0]}: expected a column or a folder of the path, got both"),
    (["score_ns=1/a"], "in", "score_ns: the output adds a column of this name"),
]


def test_a_key_of_a_path_counts_whatever_names_the_file(tmp_path, monkeypatch):
    for number, (files, asked, expected) in enumerate(KEYS):
        folder = tmp_path / str(number)
        for file in files:
            write(folder / f"in/{file}.parquet", pairs(3))
        monkeypatch.chdir(folder)
        ways = [asked] if isinstance(asked, str) else asked
        source = [f"{folder}/{way}" for way in ways] if number % 2 else ways
        if isinstance(expected, str):
            with pytest.raises(ValueError, match=re.escape(expected)) as refused:
                evaluate(source, "out", GATE)
            assert "\n" not in str(refused.value)
            continue
        evaluate(source, "out", GATE, want=["score_ns"])
        assert read("out")["k"].to_pylist() == [key for key in expected for _ in range(3)], (files, asked)
    monkeypatch.chdir(tmp_path / "0/in/k=4")
    for out, source in {"here": ".", "file": "a.parquet", "all": "*"}.items():
        evaluate(source, tmp_path / out, GATE, want=["score_ns"])
        assert read(tmp_path / out)["k"].to_pylist() == [4] * 3


def test_a_field_is_read_from_a_path_as_what_it_is_used_for(tmp_path):
    known = calibrated(prior_posterior(FUNCTIONS, FUNCTIONS.prior, spread=0.1))
    work_ns = 2.0 ** np.arange(10, 14)
    for arrays in (2, 4):
        kernels = {"launches": [[1, 2]] * 4, "arithmetic_work_ns": [[time_ns * arrays, 5.0] for time_ns in work_ns]}
        write(tmp_path / f"runs/arrays={arrays}/a.parquet", kernels)
    evaluate(tmp_path / "runs", tmp_path / "out", known)  # whose other inputs have defaults
    works_ns = np.stack([np.outer([2, 4], work_ns).ravel(), np.full(8, 5.0)], -1)
    columns = {"arrays": np.repeat([2, 4], 4), "launches": [[1, 2]] * 8, "arithmetic_work_ns": works_ns}
    table = read(tmp_path / "out")
    assert table.column_names == ["launches", "arithmetic_work_ns", "arrays", "time_ns", "low_ns", "high_ns"]
    assert table["arrays"].to_pylist() == [2] * 4 + [4] * 4
    np.testing.assert_allclose(table["time_ns"], np.asarray(known.predict_ns("jitted", **columns)), **SINGLE)
    keys = [("depth=2.5", "loop"), ("depth=1e0", "tile"), ("depth=1", "loop"), ("depth=1e99", "tile")]
    for key, strategy in keys:
        write(tmp_path / f"tiles/{key}/how={strategy}/a.parquet", {"n": [100.0]})
    asked = {"want": ["time_ns"], "columns": {"strategy": "how"}}
    done = evaluate(tmp_path / "tiles", tmp_path / "tiled", TILES, **asked)
    expected = [float(TILES.predict_ns(how, 100.0, float(key[6:]))) for key, how in sorted(keys) if key != "depth=1e99"]
    np.testing.assert_allclose(read(tmp_path / "tiled")["time_ns"], expected, **SINGLE)
    assert "depth: expected a number of levels of at most 2**64" in read(done.rejects)["reason"][0].as_py()
    wrong = write(tmp_path / "tiles/depth=deep/how=loop/a.parquet", {"n": [100.0]})
    with pytest.raises(ValueError, match=f"{wrong}: depth: expected a number in the path, got 'deep'"):
        evaluate(tmp_path / "tiles", tmp_path / "none", TILES, **asked)


def test_rows_that_cannot_be_evaluated_are_rejected_by_their_place_and_the_others_are_right(tmp_path):
    n, depth = np.linspace(1.0, 9000.0, 4000), np.tile([1.0, 2.5], 2000)
    values = pa.array(n).to_pylist()
    names = list(np.tile(TILES.strategies, 2000))
    bad = {17: None, 1200: np.nan, 1201: np.inf, 1202: -np.inf, 2500: -3.0, 3999: 1e300}
    for row, value in bad.items():
        values[row] = value
    names[5], names[3000] = "tyle", None
    reasons = dict.fromkeys(bad, "n: expected") | {5: "tyle", 3000: "null"}
    table = {"id": range(4000), "n": pa.array(values, pa.float64()), "depth": depth, "strategy": names}
    source = write(tmp_path / "runs.parquet", table, row_group_size=1000)
    asked = {"want": ["time_ns"], "columns": {"strategy": "strategy"}, "rows_per_batch": 300}
    done = evaluate(source, tmp_path / "out", TILES, **asked)
    assert done.rejected == 8
    rejected = read(done.rejects).to_pylist()
    assert [own["row"] for own in rejected] == sorted(reasons)
    for own in rejected:
        assert reasons[own["row"]] in own["reason"]
        assert (own["file"], own["row_group"], own["id"]) == (str(source), own["row"] // 1000, own["row"])
    left = np.setdiff1d(np.arange(4000), [*reasons])
    np.testing.assert_array_equal(read(tmp_path / "out")["id"], left)
    times = np.array([np.asarray(TILES.predict_ns(name, n, depth)) for name in TILES.strategies])
    np.testing.assert_allclose(read(tmp_path / "out")["time_ns"], times[left % 2, left], **SINGLE)
    with pytest.raises(ValueError, match=r"runs.parquet, row group 0, row 5: strategy: expected one of loop, tile"):
        evaluate(source, tmp_path / "strict", TILES, strict=True, **asked)
    assert [*(tmp_path / "strict").iterdir()] == []


TEXTS = ["a", None, "a long text that a view does not hold itself"] * 4
OTHER = {
    "view": pa.array(TEXTS, pa.string_view()),
    "bytes": pa.array([None, b"a", b"b"] * 4, pa.binary_view()),
    "list view": pa.array([["a"], None, ["b", "c"]] * 4, pa.list_view(pa.string())),
    "views in a list view": pa.array([["a"], None, ["b", "c"]] * 4, pa.list_view(pa.string_view())),
    "large list view": pa.array([[1], None, [2, 3]] * 4, pa.large_list_view(pa.int64())),
    "JSON": pa.array(TEXTS, pa.json_()),
    "JSON of views": pa.ExtensionArray.from_storage(pa.json_(pa.string_view()), pa.array(TEXTS, pa.string_view())),
    "UUID": pa.ExtensionArray.from_storage(
        pa.uuid(), pa.array([b"0123456789abcdef", None, bytes(16)] * 4, pa.binary(16))
    ),
    "codes": pa.array(TEXTS).dictionary_encode(),
    "decimal": pa.array([decimal.Decimal("1.5"), None, decimal.Decimal("2.5")] * 4, pa.decimal128(38, 4)),
    "null": pa.nulls(12),
    "duration": pa.array([1000, None, 2000] * 4, pa.duration("us")),
    "time": pa.array([1000, None, 2000] * 4, pa.timestamp("us", "Europe/Berlin")),
    "half": pa.array([1.5, None, 2.5] * 4, pa.float32()).cast(pa.float16()),
    "large": pa.array(TEXTS, pa.large_string()),
    "struct of lists": pa.array([{"x": [1]}, None, {"x": None}] * 4, pa.struct([("x", pa.list_(pa.int64()))])),
}


def test_columns_of_every_type_are_carried_along_beside_rejects(tmp_path):
    counts = pairs(12)
    counts[FIELDS[0]][[1, 6, 11]] = -1
    source = write(tmp_path / "a.parquet", OTHER | counts)
    done = evaluate(source, tmp_path / "out", GATE, rows_per_batch=4)
    good = np.setdiff1d(np.arange(12), [1, 6, 11]).tolist()
    for name, column in OTHER.items():
        values = column.to_pylist()
        assert read(done.sink)[name].to_pylist() == [values[row] for row in good], name
        assert read(done.rejects)[name].to_pylist() == [values[row] for row in (1, 6, 11)], name


def test_what_one_file_requires_may_lack_in_another_and_a_view_is_a_text(tmp_path):
    own = [pa.array(["x", "y"])]
    first = pa.schema([pa.field("a", pa.string(), nullable=False)])
    counts = pairs(2)
    one = pa.Table.from_arrays(own, schema=first)
    for name, column in counts.items():
        one = one.append_column(pa.field(name, pa.int64(), nullable=False), pa.array(column))
    write(tmp_path / "in/1.parquet", one)
    other = {"a": pa.array([None, "z"], pa.string_view()), **counts, FIELDS[0]: [1, None]}
    write(tmp_path / "in/2.parquet", other)
    done = evaluate(tmp_path / "in", tmp_path / "out", GATE)
    assert read(done.sink)["a"].to_pylist() == ["x", "y", None]
    (rejected,) = read(done.rejects).to_pylist()
    assert (rejected["a"], rejected["reason"]) == ("z", f"{FIELDS[0]}: expected a count, got null")


#: Values of a column that a gate cannot take, its type, and the reason.
BEYOND = [
    (2**63, pa.uint64(), "expected at most 2**63 - 1, got 9223372036854775808"),
    (2**64 - 1, pa.uint64(), "expected at most 2**63 - 1, got 18446744073709551615"),
    (-(2**63), pa.int64(), "expected a count of at least 0, got -9.22337e+18"),
    (-1, pa.int8(), "expected a count of at least 0, got -1"),
    (1e20, pa.float64(), "expected a count of at most 2**64, got 1e+20"),
    (float("inf"), pa.float32(), "expected a count of at most 2**64, got inf"),
    (float("-inf"), pa.float32(), "expected a count of at least 0, got -inf"),
    (float("nan"), pa.float64(), "expected a count of at least 0, got nan"),
    *((None, type_, "expected a count, got null") for type_ in (pa.int8(), pa.uint64(), pa.float16(), pa.float64())),
]


def test_a_number_beyond_what_a_field_takes_is_rejected_and_its_neighbours_are_right(tmp_path):
    columns = pairs(5) | {FIELDS[0]: np.array([3, 2, 5, 7, 1])}
    kept = {name: np.asarray(column)[[0, 2, 4]] for name, column in columns.items()}
    expected = np.asarray(GATE.score_ns(*profiles(kept)))
    for number, (value, type_, reason) in enumerate(BEYOND):
        own = [3, value, 5, value, 1]
        given = pa.array(own, type_) if pa.types.is_integer(type_) else pa.array(own, pa.float64()).cast(type_)
        source = write(tmp_path / f"{number}.parquet", columns | {FIELDS[0]: given})
        done = evaluate(source, tmp_path / f"out-{number}", GATE)
        rejected = read(done.rejects).to_pylist()
        assert [(row["row"], row["reason"]) for row in rejected] == [(at, f"{FIELDS[0]}: {reason}") for at in (1, 3)]
        assert [row[FIELDS[0]] for row in rejected] == [pytest.approx(value, nan_ok=True)] * 2
        np.testing.assert_allclose(read(done.sink)["score_ns"], expected, **SINGLE)
    with pytest.raises(ValueError, match=re.escape(f"row 1: {FIELDS[0]}: {reason}")):
        evaluate(source, tmp_path / "strict", GATE, strict=True)


def test_what_a_model_refuses_of_a_row_is_its_reason(tmp_path):
    welch = rx.calibration.prior_calibration("cpu").of("welch")
    columns = {"batch": [8, 8, 8, 8, 0], "n_fft": [64, 63, 64, 64, 64], "k": [4, 4, 34, 0, 4]}
    done = evaluate(write(tmp_path / "w.parquet", columns), tmp_path / "out", welch, want=["time_ns"], strategy="host")
    reasons = [(row["row"], row["reason"]) for row in read(done.rejects).to_pylist()]
    assert read(tmp_path / "out").select([*columns]).to_pylist() == [{"batch": 8, "n_fft": 64, "k": 4}]
    assert [(row, reason.partition(":")[0]) for row, reason in reasons] == [
        (1, "n_fft"),
        (2, "k"),
        (3, "k"),
        (4, "batch"),
    ]
    assert "a multiple of 2" in reasons[0][1]
    assert "at most n_fft / 2 + 1 peaks" in reasons[1][1]
    assert reasons[3][1] == "batch: expected a number of rows of at least 1, got 0"


def several(tmp_path):
    for number, rows in enumerate((500, 499, 501, 500)):
        write(tmp_path / f"in/{number}.parquet", {"id": np.arange(rows) + 500 * number, **pairs(rows, number)})
    return tmp_path / "in"


def test_a_job_that_was_stopped_goes_on_where_parts_are_missing_and_another_one_is_refused(tmp_path):
    source, out = several(tmp_path), tmp_path / "out"
    before = compilations.count(COMPILE)
    evaluate(source, tmp_path / "whole", GATE)
    assert compilations.count(COMPILE) - before <= 1  # for files of about as many rows
    whole = read(tmp_path / "whole")

    def stop(done, total):
        assert total == 2000
        if done >= 1000:
            raise InterruptedError("stopped")

    with pytest.raises(OSError, match="stopped"):
        evaluate(source, out, GATE, advance=stop)
    assert not list(out.glob(".*"))
    left = out / ".part-00002-x.parquet.abc.tmp"
    left.write_bytes(b"of a process that was killed")
    seen = []
    done = evaluate(source, out, GATE, resume=True, advance=lambda done, total: seen.append(done))
    assert done.resumed in range(1, 4)
    assert (round(seen[0], -2), seen[-1]) == (500 * done.resumed, 2000)
    assert read(out).equals(whole)
    assert not left.exists()
    assert evaluate(source, out, GATE, resume=True).resumed == 4
    with pytest.raises(ValueError, match="holds 4 of the 4 parts of this job; go on with --resume"):
        evaluate(source, out, GATE)
    for other in (
        {"what": rx.io_fusion_gate_for_target("metal")},
        {"want": ["score_ns"]},
        {"columns": {"after_sync_points": "before_sync_points"}},
        {"source": [source / "0.parquet"]},
        {"rows_per_batch": 100},
    ):
        with pytest.raises(ValueError, match="out: holds another job: .* differs; give another folder"):
            evaluate(**{"source": source, "sink": out, "what": GATE, "resume": True} | other)
    write(source / "0.parquet", {"id": np.arange(500), **pairs(500, 9)})
    with pytest.raises(ValueError, match="the input differs"):
        evaluate(source, out, GATE, resume=True)


def remove(sink):
    """Delete the output of a job and its manifest, but not its rejects."""
    shutil.rmtree(sink)
    sink.with_name(f"{sink.name}.manifest.json").unlink()


def test_rejects_are_those_of_the_job_and_a_part_without_them_is_done_again(tmp_path):
    bad, out = pairs(4), tmp_path / "out"
    bad[FIELDS[0]][:2] = -1
    source = write(tmp_path / "a.parquet", bad)
    done = evaluate(source, out, GATE)
    (rejects,) = done.rejects.iterdir()
    expected = read(rejects)
    # A job whose rejects are deleted, and one whose part is another's, are not done.
    for damage in (rejects.unlink, lambda: write(next(out.iterdir()), {"a": [1]}), lambda: cut(next(out.iterdir()))):
        damage()
        again = evaluate(source, out, GATE, resume=True)
        assert (again.rows, again.rejected, again.resumed) == (4, 2, 0)
        assert read(rejects).equals(expected)
        assert evaluate(source, out, GATE, resume=True).rejected == 2
    # Rejects of a job whose output and manifest are deleted belong to no other.
    remove(out)
    with pytest.raises(ValueError, match="out.rejected: expected a new or empty folder, got a folder with other files"):
        evaluate(source, out, GATE)
    rejects.unlink()
    assert evaluate(write(source, pairs(4)), out, GATE).rejected == 0
    (tmp_path / "other.rejected").touch()
    with pytest.raises(ValueError, match="other.rejected: expected a folder or a free name, got a file"):
        evaluate(source, tmp_path / "other", GATE)


def test_what_a_job_writes_is_not_its_input_whatever_names_it(tmp_path, monkeypatch):
    rows = pairs(4)
    rows[FIELDS[0]][1] = -1
    asked = ["in in/out", ". out", "**/*.parquet in/out", "in/** in/out", "in/* in/out", "in/. in/more/../out"]
    asked += ["link in/out", "in link/out", "in elsewhere/out"]
    for number, (source, sink) in enumerate(map(str.split, asked)):
        folder = tmp_path / str(number)
        write(folder / "in/a.parquet", rows)
        write(folder / "in/more/b.parquet", rows)
        for link, target in {"link": "in", "elsewhere": "in/more"}.items():
            if link in (source, sink.partition("/")[0]):
                (folder / link).symlink_to(target)
        monkeypatch.chdir(folder)
        first = evaluate(source, sink, GATE)
        assert (first.rows, first.rejected) == (8, 2), source
        again = evaluate(source, sink, GATE, resume=True)
        assert (again.rows, again.rejected, again.resumed) == (8, 2, 2), source
    with pytest.raises(ValueError, match="part-.*parquet: expected a file to read, got a file that the job writes"):
        evaluate(["in", *map(str, Path(sink).glob("*.parquet"))], sink, GATE, resume=True)


def test_an_input_that_changes_between_stop_and_resume_or_while_it_is_read_is_found(tmp_path):
    plain, rows, out = {"use_dictionary": False, "compression": "none"}, pairs(4000), tmp_path / "out"
    source = write(tmp_path / "a.parquet", rows, **plain)
    good, footer = source.read_bytes(), pq.read_metadata(source)
    evaluate(source, out, GATE)
    write(source, {name: column[::-1] for name, column in rows.items()}, **plain)
    assert pq.read_metadata(source).equals(footer)
    assert len(source.read_bytes()) == len(good)
    said = "the input differs; give another folder \\(.*a.parquet: size, footer or modification time; `cp -p`"
    with pytest.raises(ValueError, match=said):
        evaluate(source, out, GATE, resume=True)
    # A copy that keeps its time is the same input.
    whole = write(tmp_path / "b.parquet", pairs(10))
    evaluate(whole, tmp_path / "kept", GATE)
    shutil.copy2(whole, tmp_path / "copy")
    (tmp_path / "copy").replace(whole)
    assert evaluate(whole, tmp_path / "kept", GATE, resume=True).resumed == 1

    # While it is read.
    def change(done, total):
        source.write_bytes(good)

    with pytest.raises(ValueError, match="a.parquet: the file changed after the job began; start again"):
        evaluate(source, tmp_path / "changing", GATE, rows_per_batch=500, advance=change)
    assert not [*(tmp_path / "changing").iterdir()]


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


def scratched(path):
    """Damage the pages of the second row group, and no footer."""
    content = bytearray(path.read_bytes())
    place = pq.read_metadata(path).row_group(1).column(3)
    start, size = place.data_page_offset, place.total_compressed_size
    content[start + 40 : start + size] = bytes(size - 40)
    path.write_bytes(content)


def without(name):
    return {key: value for key, value in pairs(1000).items() if key != name}


def changed(value, row=0):
    return pairs(1000) | {FIELDS[2]: value}


WRONG = {
    "no column": (without(FIELDS[2]), None, rf"a.parquet, row group 0: {FIELDS[2]}: no such column"),
    "texts": (changed(["7"] * 1000), None, rf"row group 0: {FIELDS[2]}: expected integers or floats, got string"),
    "decimals": (changed([decimal.Decimal(7)] * 1000), None, "expected integers or floats, got decimal128"),
    "codes": (changed(pa.array(["7"] * 1000).dictionary_encode()), None, "expected integers or floats, got dictionary"),
    "twice": (
        pa.Table.from_arrays([*map(pa.array, pairs(9).values()), pa.array([1] * 9)], [*FIELDS, FIELDS[2]]),
        None,
        f"a.parquet: expected columns of different names, got '{FIELDS[2]}' twice",
    ),
    "carried twice": (
        pa.Table.from_arrays([*map(pa.array, pairs(9).values()), *[pa.array([1] * 9)] * 2], [*FIELDS, "a", "a"]),
        None,
        "a.parquet: expected columns of different names, got 'a' twice",
    ),
    "views in lists": (
        pairs(2) | {"a": pa.array([["a"], None], pa.list_(pa.string_view()))},
        None,
        r"a.parquet: a: pyarrow cannot write list<\w+: string_view> \(",
    ),
    "taken": (pairs(1000) | {"score_ns": [0] * 1000}, None, "score_ns: the output adds a column of this name"),
    "no rows": ({name: column[:0] for name, column in pairs(1).items()}, None, "expected rows, got none"),
    "empty": (pairs(1000), lambda path: path.write_bytes(b""), "cannot be read as Parquet"),
    "no Parquet": (pairs(1000), lambda path: path.write_text("a,b\n1,2\n"), "cannot be read as Parquet"),
    "cut": (pairs(1000), cut, "cannot be read as Parquet"),
    "scratched": (pairs(1000), scratched, rf"a.parquet, row group 1: {FIELDS[3]}: cannot be read"),
}


@pytest.mark.parametrize("case", WRONG)
def test_input_that_cannot_be_is_one_line_and_nothing_is_under_a_final_name(case, tmp_path):
    columns, damage, said = WRONG[case]
    source = write(tmp_path / "a.parquet", columns, row_group_size=500)
    if damage is not None:
        damage(source)
    with pytest.raises(ValueError, match=said) as refused:
        evaluate(source, tmp_path / "out", GATE)
    assert "\n" not in str(refused.value)
    assert str(source) in str(refused.value)
    assert [path for path in tmp_path.rglob("*") if path.suffix in (".parquet", ".tmp")] == [source]


def test_places_and_arguments_that_cannot_be_are_one_line(tmp_path):
    source = write(tmp_path / "in/a.parquet", pairs(10))
    other = write(tmp_path / "other/b.parquet", {**pairs(10), "more": range(10)})
    (tmp_path / "empty").mkdir()
    good = {"source": source, "sink": tmp_path / "out", "what": GATE}
    for wrong, said in (
        ({"source": tmp_path / "none.parquet"}, "none.parquet: no such file"),
        ({"source": tmp_path / "*.parquet"}, "expected Parquet files, found none"),
        ({"source": tmp_path / "empty"}, "expected Parquet files, found none"),
        ({"source": [source, source]}, "expected each file once"),
        ({"source": [source, other]}, "more: expected no such column, got int64"),
        ({"sink": source}, "expected a folder or a free name, got a file"),
        (
            {"source": tmp_path / "in", "sink": tmp_path / "in"},
            "expected Parquet files, found none except those that the job writes",
        ),
        ({"sink": tmp_path / "in"}, "in/a.parquet: expected a file to read, got a file that the job writes"),
        ({"sink": other.parent}, "expected a new or empty folder"),
        ({"what": "cuda"}, "what: expected an IoFusionGate or a CalibratedModel, got str"),
        (
            {"want": ["price"]},
            "want: expected some of score_ns, should_fuse, fuse_probability, fuse_log_odds, got 'price'",
        ),
        ({"want": ["fuse_probability"]}, "temperature_ns: expected a temperature"),
        ({"temperature_ns": -1.0}, "temperature_ns: expected a positive"),
        ({"strategy": "tile"}, "a gate, which has no strategies"),
        ({"columns": {"launches": "a"}}, "columns: expected fields among"),
        ({"rows_per_batch": 0}, "rows_per_batch: expected an integer of at least 1"),
        ({"what": TILES, "strategy": "tyle"}, "strategy: expected one of loop, tile, got 'tyle'"),
        ({"what": TILES, "temperature_ns": 1.0}, "a calibrated model, which has its own uncertainty"),
    ):
        with pytest.raises(ValueError, match=said) as refused:
            evaluate(**good | wrong)
        assert "\n" not in str(refused.value)


def test_a_full_disk_is_one_line_and_the_job_goes_on_once_there_is_room(tmp_path):
    source = write(tmp_path / "a.parquet", pairs(40_000))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        with pytest.raises(OSError, match=r"part-.*parquet: cannot be written") as refused:
            evaluate(source, tmp_path / "out", GATE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(refused.value)
    assert list((tmp_path / "out").iterdir()) == []
    evaluate(source, tmp_path / "out", GATE, resume=True)
    assert read(tmp_path / "out").num_rows == 40_000


def test_the_command_does_the_same_and_its_status_says_whether_rows_were_rejected(tmp_path):
    def run(*arguments):
        return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])

    columns = pairs(100)
    source, out = write(tmp_path / "a.parquet", columns), tmp_path / "out"
    good = run(source, out, "--gate", "cuda", "--want", "score_ns, should_fuse", "--json")
    assert good.exit_code == 0, good.output
    assert_documented("evaluate", json.loads(good.stdout))
    evaluate(source, tmp_path / "same", GATE)
    assert read(out).equals(read(tmp_path / "same"))
    assert "(1 from an earlier run)" in run(source, out, "--gate", "cuda", "--resume").stdout
    columns[FIELDS[0]][3] = -1
    bad = write(tmp_path / "b.parquet", columns)
    found = run(bad, tmp_path / "some", "--gate", "cuda", "--column", f"{FIELDS[1]}={FIELDS[1]}")
    assert found.exit_code == 1
    assert "1 row could not be evaluated" in found.stdout
    for arguments, said in (
        (
            (bad, tmp_path / "none", "--gate", "cuda", "--strict"),
            f"b.parquet, row group 0, row 3: {FIELDS[0]}: expected",
        ),
        ((source, out, "--gate", "cuda"), "go on with --resume"),
        ((source, out, "--gate", "qpu"), "'qpu'"),
        ((source, out, "--gate", "cuda", "--model", "welch"), "--gate: expected no --model"),
        ((source, out, "--gate", "cuda", "--column", "a"), "--column: expected field=name"),
    ):
        refused = run(*arguments)
        assert (refused.exit_code, refused.stderr.count("\n"), refused.stdout) == (2, 1, ""), refused.output
        assert said in refused.stderr


def test_ray_that_is_not_installed_and_engines_that_are_none_are_one_line(tmp_path, monkeypatch):
    source = write(tmp_path / "pairs.parquet", pairs(10))
    monkeypatch.setitem(sys.modules, "ray", None)
    refused = CliRunner().invoke(app, ["evaluate", str(source), str(tmp_path / "out"), "--gate=cuda", "--engine=ray"])
    said = f"ray is not installed; get it with `{install_command('scale')}`"
    assert (refused.exit_code, refused.stderr) == (2, f"error: {said}\n")
    with pytest.raises(ValueError, match="engine: expected local or ray, got 'spark'"):
        evaluate(source, tmp_path / "out", GATE, engine="spark")
    with pytest.raises(ValueError, match="address: expected none with the engine local"):
        evaluate(source, tmp_path / "out", GATE, address="a:1")
    assert not list((tmp_path / "out").iterdir())
