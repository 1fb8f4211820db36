"""Every row of a table has the answer that it has by itself, or a reason; the command writes all rows or nothing."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from _documented import assert_documented
from _models import TILED, TILED_TRUTH, calibrated, random_posterior
from typer.testing import CliRunner

import rlxjax as rx
from calibrate.cli import app
from rlxjax.calibration import CalibratedModel
from rlxjax.extras import install_command
from rlxjax.fit import Runs, prior_posterior
from rlxjax.models import BUILT_IN
from rlxjax.tables import evaluate

GATE = rx.io_fusion_gate_for_target("cuda")
COUNTS = ("kernel_launches", "sync_points", "host_output_bytes", "device_traffic_bytes")
FIELDS = [f"{side}_{name}" for side in ("before", "after") for name in COUNTS]
TILES = calibrated(random_posterior(TILED, TILED_TRUTH, sd=0.3, spread=0.2))
SINGLE = {"rtol": 2.0**-23}
WELCH = rx.calibration.prior_calibration("cpu").of("welch")


def pairs(rows, seed=0, dtype=np.int64):
    rng = np.random.default_rng(seed)
    highs = dict(zip(FIELDS, (20, 4, 2**28, 2**30) * 2, strict=True))
    return {name: rng.integers(0, high, rows).astype(dtype) for name, high in highs.items()}


def profiles(columns):
    return (rx.GraphIoProfile(*(columns[f"{side}_{name}"] for name in COUNTS)) for side in ("before", "after"))


def write(path, columns, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)
    return path


@pytest.mark.parametrize(("dtype", "rows"), [(np.int32, 1), (np.uint64, 2**15 + 3), (np.float32, 70), (np.float64, 0)])
def test_a_gate_says_of_every_row_what_it_says_in_memory_however_the_table_is_cut(dtype, rows):
    columns = {"id": np.arange(rows), **pairs(rows, dtype=dtype)}
    exact = np.float64 if np.issubdtype(dtype, np.floating) else dtype
    before, after = profiles({name: column.astype(exact) for name, column in columns.items()})
    expected = {
        "score_ns": GATE.score_ns(before, after),
        "should_fuse": GATE.should_fuse(before, after),
        "fuse_probability": GATE.fuse_probability(before, after, temperature_ns=1e5),
    }
    table = pa.table(columns)
    padded = pa.concat_tables([table, table, table]).combine_chunks().slice(rows, rows)
    batch = table.combine_chunks().to_batches()[0] if rows else pa.RecordBatch.from_pylist([], table.schema)
    given = [columns, table, padded, batch, table.to_reader(max_chunksize=7)]
    given += [SimpleNamespace(__arrow_c_stream__=table.__arrow_c_stream__)]
    given += [SimpleNamespace(__arrow_c_array__=batch.__arrow_c_array__)]
    for one in given:
        found = evaluate(one, GATE, temperature_ns=1e5)
        assert found.column_names == [*columns, *expected, "rejected"]
        assert found.select([*columns]).equals(table)
        assert found["rejected"].null_count == rows
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], np.asarray(values), atol=1e-37, **SINGLE)


def test_integer_counts_are_subtracted_before_they_become_floats():
    large = [2**53 + 1, 2**63 - 1, 2**64 - 1]
    rows = dict.fromkeys(FIELDS, [0] * 3) | {FIELDS[0]: pa.array(large, "uint64")}
    rows |= {FIELDS[4]: pa.array([count - 3 for count in large], "uint64")}
    assert evaluate(rows, GATE)["score_ns"].to_pylist() == [3 * GATE.dispatch_ns] * 3


def test_a_model_says_of_every_row_what_it_says_in_memory():
    rng = np.random.default_rng(0)
    n, depth = np.exp2(rng.uniform(0, 13, 3000)), rng.choice([1.0, 2.5], 3000)
    table, found = evaluate({"n": n, "depth": depth}, TILES), TILES.decided(n, depth)
    names = np.array(TILES.strategies)
    np.testing.assert_array_equal(table["pick"], names[np.asarray(found.place)])
    np.testing.assert_array_equal(table["in_domain"], TILES.in_domain(n, depth))
    low_ns, high_ns = TILES.bounds_ns(found)
    bounds = {"low_ns": low_ns, "high_ns": high_ns}
    own = {name: getattr(found, name) for name in ("time_ns", "margin_ns", "probability")}
    for name, values in (own | bounds).items():
        np.testing.assert_allclose(table[name], np.asarray(values), **SINGLE)
    for strategy in TILES.strategies:
        alone = evaluate({"n": n}, TILES, strategy=strategy, level=0.5)  # the depth has a default
        assert alone.column_names == ["n", "time_ns", "low_ns", "high_ns", "in_domain", "rejected"]
        np.testing.assert_allclose(alone["time_ns"], TILES.predict_ns(strategy, n), **SINGLE)
        np.testing.assert_allclose(alone["high_ns"], TILES.interval_ns(strategy, n, level=0.5)[1], **SINGLE)


#: Values that a gate refuses, with the type of their column and the reason.
BAD_COUNTS = [
    (-(2**63), "int64", "expected a size of at least 0, got -9223372036854775808"),
    (-1, "int8", "expected a size of at least 0, got -1"),
    (1e20, "float64", "expected a size of at most 1.845e+19, got 1e+20"),
    (float("inf"), "float32", "expected a size of at most 1.845e+19, got inf"),
    (float("nan"), "float64", "expected a size of at least 0, got nan"),
    *((None, type_, "expected a number, got null") for type_ in ("int8", "uint64", "float16", "float64")),
]


def test_a_bad_row_is_null_with_its_reason_and_its_neighbours_are_right():
    columns = pairs(5) | {FIELDS[0]: np.array([3, 2, 5, 7, 1])}
    expected = np.asarray(GATE.score_ns(*profiles(columns))).tolist()
    for value, type_, reason in BAD_COUNTS:
        numbers = [np.float16(one) if type_ == "float16" and one is not None else one for one in (3, value, 5)]
        numbers += [numbers[1], np.float16(1) if type_ == "float16" else 1]
        found = evaluate(columns | {FIELDS[0]: pa.array(numbers, type_)}, GATE)
        for name in ("score_ns", "should_fuse"):
            assert [one is None for one in found[name].to_pylist()] == [False, True, False, True, False], reason
        assert found["rejected"].to_pylist() == [None, said := f"{FIELDS[0]}: {reason}", None, said, None]
        assert found["score_ns"].to_pylist()[::2] == pytest.approx(expected[::2], rel=2.0**-23)
    nothing = evaluate(pa.table(columns).slice(0, 2).set_column(0, FIELDS[0], pa.nulls(2)), GATE)
    assert nothing["score_ns"].null_count == 2
    rows = {"batch": [8, 8, 8, 8, 0, -1], "n_fft": [64, 63, 64, 64, 64, 64], "k": [4, 4, 34, 0, 4, 4]}
    found = evaluate(rows, WELCH, strategy="host")
    reasons = ("multiple of|even", "k: expected at most n_fft / 2", "k: expected a size of at least 1")
    said = [None, *reasons, None, "batch: expected a size of at least 0"]
    for reason, got in zip(said, found["rejected"].to_pylist(), strict=True):
        assert got is None if reason is None else re.search(reason, got), (reason, got)


def refusal_of(call, *arguments, **options):
    with pytest.raises(ValueError, match=".") as refused:
        call(*arguments, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_table_or_an_argument_that_cannot_be_is_one_sentence():
    rows = pairs(3)
    lazy = SimpleNamespace(collect=lambda: pa.table(rows))
    twice = pa.Table.from_arrays([*map(pa.array, rows.values()), pa.array([1] * 3)], [*FIELDS, FIELDS[2]])
    for table, what, options, said in (
        (lazy, GATE, {}, "call its `collect()` first"),
        *((wrong, GATE, {}, "table: expected a table in memory") for wrong in (5, "rows.parquet", None, [1, 2])),
        ({}, GATE, {}, f"{FIELDS[0]}: expected a column with the number of counts, got only an empty table"),
        (rows | {FIELDS[2]: ["7"] * 3}, GATE, {}, f"{FIELDS[2]}: expected integers or floats, got string; cast"),
        (rows | {FIELDS[2]: [True] * 3}, GATE, {}, f"{FIELDS[2]}: expected integers or floats, got bool; cast"),
        (rows | {FIELDS[2]: [[1]] * 3}, GATE, {}, f"{FIELDS[2]}: expected integers or floats, got list<"),
        (twice, GATE, {}, f"{FIELDS[2]}: expected a column with the number of counts, got 2"),
        (rows | {"score_ns": [0] * 3}, GATE, {}, "score_ns: expected no column of this name"),
        (rows | {"rejected": [0] * 3}, GATE, {}, "rejected: expected no column of this name"),
        (rows, "cuda", {}, "what: expected an IoFusionGate or a CalibratedModel, got str"),
        (rows, rx.io_fusion_gate_for_target([0, 1]), {}, "what: expected a gate of numbers, got an array"),
        (rows, GATE, {"strategy": "tile"}, "strategy: expected none with a gate"),
        (rows, GATE, {"temperature_ns": -1.0}, "temperature_ns: expected a positive number"),
        ({"n": [1.0]}, TILES, {"temperature_ns": 1.0}, "temperature_ns: expected none with a calibrated model"),
        ({"n": [1.0]}, TILES, {"strategy": "tyle"}, "strategy: expected one of loop, tile, got 'tyle'"),
        ({"n": [1.0]}, TILES, {"level": 1.0}, "level: expected a probability between 0 and 1, got 1.0"),
        ({"depth": [1.0]}, TILES, {}, "n: expected a column with the number of items, got only depth"),
    ):
        assert said in refusal_of(evaluate, table, what, **options)


@pytest.mark.parametrize("model", BUILT_IN.values(), ids=lambda model: model.name)
def test_a_missing_input_without_a_documented_default_is_an_error_at_every_door(model):
    assert {name: own.default for name, own in model.inputs.items() if own.default is not None} in (
        {},
        {"n_segments": 2.0},
    )
    known = CalibratedModel(prior_posterior(model, spread=0.1), {}, {}, {})
    strategy = next(name for name, own in model.strategies.items() if not own.fixed)
    variant, needed = model.variants[0], [name for name, own in model.inputs.items() if own.default is None]
    for missing in (needed[0], needed[-1]):
        row = {name: 64.0 for name in needed if name != missing}
        columns = {name: [value] for name, value in row.items()}
        for call in (
            lambda: known.predict_ns(strategy, **row),
            lambda: known.interval_ns(strategy, **row),
            lambda: Runs.checked(model, variant, **row),
            lambda: rx.Timings.of(model, {**columns, "variant": [variant], "time_ns": [1e5]}),
            lambda: evaluate(columns, known, strategy=strategy),
        ):
            assert ("expected a program" if model.kernels else missing) in refusal_of(call)


def run(*arguments):
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


def files_of(folder, rows=1200):
    """Write rows as Parquet in folders of keys, as CSV and as JSON; return their sources, and the rows."""
    columns = {"id": np.arange(rows)[::-1], "tag": ["a", "b"] * (rows // 2), **pairs(rows)}
    table = pa.table(columns)
    for half in range(2):
        part = table.slice(half * rows // 2, rows // 2)
        write(folder / f"in/half={half}/{half}.parquet", dict(zip(part.column_names, part.columns, strict=True)))
    (folder / "in/_SUCCESS").touch()
    with open(folder / "rows.csv", "w", newline="") as file:
        csv.writer(file).writerows([table.column_names, *(row.values() for row in table.to_pylist())])
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
    sources = {"in": ["half"], "in/**/*.parquet": ["half"], "rows.csv": [], "rows.jsonl": []}
    return {str(folder / source): more for source, more in sources.items()}, columns


def test_the_command_writes_the_answers_of_every_kind_of_file(tmp_path):
    pytest.importorskip("daft")
    sources, columns = files_of(tmp_path)
    expected = np.asarray(GATE.score_ns(*profiles(columns)))[::-1]
    for number, (source, more) in enumerate(sources.items()):
        out = tmp_path / f"out-{number}"
        done = run(source, out, "--gate", "cuda", "--sort-by", "id", "--json")
        assert done.exit_code == 0, done.output
        printed = json.loads(done.stdout)
        assert_documented("evaluate", printed)
        assert (printed["rows"], printed["rejected"]) == (1200, 0)
        assert {path.suffix for path in out.iterdir()} == {".parquet"}
        table = pa.concat_tables(pq.ParquetFile(path).read() for path in sorted(out.iterdir()))
        assert table.column_names == ["id", "tag", *more, "score_ns", "should_fuse", "rejected"]
        np.testing.assert_array_equal(table["id"], np.arange(1200))
        np.testing.assert_allclose(table["score_ns"], expected, **SINGLE)
        if more:
            np.testing.assert_array_equal(table["half"], np.arange(1200) < 600)
    assert not list(tmp_path.glob("*.partial"))


def test_the_command_evaluates_a_model_names_columns_and_counts_rejected_rows(tmp_path, monkeypatch):
    pytest.importorskip("daft")
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path / "home"))
    n = [16.0, None, -3.0, 700.0]
    source = write(tmp_path / "a.parquet", {"rows": n, "n_fft": [64] * 4, "k": [4] * 4})
    done = run(source, tmp_path / "out", "--model", "welch", "--column", "batch=rows")
    assert done.exit_code == 1, done.output
    assert "2 rows could not be evaluated: the column `rejected` says why." in done.stdout
    table = pq.read_table(tmp_path / "out").sort_by("rows")
    assert [one is None for one in table["time_ns"].to_pylist()] == [True, False, False, True]
    assert run(source, tmp_path / "quiet", "--model", "welch", "--column", "batch=rows", "--quiet").output == ""
    lacks = run(source, tmp_path / "none", "--model", "functions")
    assert (lacks.exit_code, lacks.stdout) == (2, "")
    assert "functions: expected a program, whose kernels give the inputs, got sizes" in lacks.stderr
    assert not (tmp_path / "none").exists()


def test_what_the_command_cannot_do_is_one_line_and_nothing_is_under_the_final_name(tmp_path, monkeypatch):
    pytest.importorskip("daft")
    source, new = write(tmp_path / "a.parquet", pairs(10) | {"note": ["a"] * 10}), tmp_path / "new"
    (tmp_path / "text.parquet").write_text("a,b\n1,2\n")
    (tmp_path / "stopped.partial").mkdir()
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(source.read_bytes()[:-20])
    gate = ("--gate", "cuda")
    for arguments, said in (
        ((tmp_path / "none.parquet", new, *gate), "none.parquet"),
        ((tmp_path / "none*.parquet", new, *gate), "none*.parquet"),
        ((tmp_path / "text.parquet", new, *gate), "text.parquet"),
        ((cut, new, *gate), "cut.parquet"),
        ((source, tmp_path / "b.csv", new, *gate), "source: expected files of one kind"),
        ((source, source, *gate), "a.parquet: expected a free name"),
        ((source, tmp_path / "stopped", *gate), "stopped.partial: expected a free name"),
        ((source, new, *gate, "--sort-by", "nothing"), "nothing"),
        ((source, new, "--gate", "qpu"), "'qpu'"),
        ((source, new, *gate, "--model", "welch"), "--gate: expected no --model"),
        ((source, new, *gate, "--column", "a"), "--column: expected input=column"),
        ((source, new, *gate, "--column", f"{FIELDS[0]}=note"), f"{FIELDS[0]}: expected integers or floats, got"),
        ((source, new, *gate, "--strategy", "host"), "strategy: expected none with a gate"),
    ):
        refused = run(*arguments)
        assert (refused.exit_code, refused.stderr.count("\n"), refused.stdout) == (2, 1, ""), refused.output
        assert said in refused.stderr
        assert not new.exists()
    assert [path.name for path in tmp_path.glob("*.partial")] == ["stopped.partial"]
    monkeypatch.setitem(sys.modules, "daft", None)
    absent = run(source, new, *gate)
    said = f"error: daft is not installed; get it with `{install_command('scale')}`\n"
    assert (absent.exit_code, absent.stderr) == (2, said)


PAGE = Path(__file__).parent.parent / "docs/scale.md"
BLOCKS = dict(
    re.findall(r"<!-- engine: (\w+) -->\n```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
)


@pytest.mark.parametrize("engine", [pytest.param(name, marks=[pytest.mark.ray] * (name == "ray")) for name in BLOCKS])
def test_the_code_of_the_page_for_an_engine_gives_the_answers(engine, tmp_path, monkeypatch):
    pytest.importorskip(engine, reason=f"{engine} is not installed: pip install '.[engines]'")
    monkeypatch.chdir(tmp_path)
    rows = {"id": np.arange(3000), **pairs(3000)}
    write(tmp_path / "pairs.parquet", rows, row_group_size=700)
    names = {"rx": rx, "pa": pa, "gate": GATE}
    exec(BLOCKS[engine], names)
    found = pa.table(names["scored"]).select(["id", "score_ns"]).sort_by("id")
    np.testing.assert_array_equal(found["id"], rows["id"])
    np.testing.assert_allclose(found["score_ns"], np.asarray(GATE.score_ns(*profiles(rows))), **SINGLE)


@pytest.mark.ray
def test_a_ray_cluster_gives_the_same_rows(tmp_path):
    for package in ("daft", "ray"):
        pytest.importorskip(package)
    sources, _ = files_of(tmp_path)
    found = {}
    for runner in ("native", "ray"):
        command = [
            sys.executable,
            "-m",
            "rlxjax",
            "evaluate",
            next(iter(sources)),
            str(tmp_path / runner),
            "--gate=cuda",
        ]
        environment = {"DAFT_RUNNER": runner, "DO_NOT_TRACK": "true", "RAY_ADDRESS": "local"}
        subprocess.run([*command, "--sort-by=id"], check=True, env=os.environ | environment)
        paths = sorted((tmp_path / runner).iterdir())
        found[runner] = pa.concat_tables(pq.ParquetFile(path).read() for path in paths)
    assert found["native"].equals(found["ray"])
