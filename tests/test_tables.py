"""Tables on disk: every row has the answer that it has in memory, or is rejected by its place; parts are whole."""

import decimal
import json
import resource
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from _documented import assert_documented
from _models import TILED, TILED_TRUTH, calibrated, random_posterior
from typer.testing import CliRunner

import rlxjax as rx
from calibrate.cli import app
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
    pq.write_table(pa.table(columns), path, **options)
    return path


def profiles(columns):
    return (rx.GraphIoProfile(*(columns[f"{side}_{name}"] for name in COUNTS)) for side in ("before", "after"))


def read(folder):
    return pq.read_table(folder)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint64, np.float64])
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
    evaluate(source, tmp_path / "one", TILES, want=["time"], strategy=str(names[0]), columns={})
    evaluate(source, tmp_path / "each", TILES, want=["time"], columns={"strategy": "strategy"})
    times = {name: np.asarray(TILES.predict_ns(str(name), n, depth)) for name in names}
    np.testing.assert_allclose(read(tmp_path / "one")["time_ns"], times[names[0]], **SINGLE)
    np.testing.assert_allclose(
        read(tmp_path / "each")["time_ns"], np.where(np.arange(2000) % 2, *times.values()), **SINGLE
    )


def test_inputs_that_have_a_default_may_have_no_column(tmp_path):
    known = rx.calibration.prior_calibration("cpu").of("functions")
    source = write(
        tmp_path / "counts.parquet", {"launches": np.arange(1, 9), "elementwise_ops": 2 ** np.arange(10, 18)}
    )
    evaluate(source, tmp_path / "out", known)
    assert read(tmp_path / "out").column_names == ["time_ns", "low_ns", "high_ns"]
    expected = known.predict_ns("jitted", launches=np.arange(1, 9), elementwise_ops=2 ** np.arange(10, 18))
    np.testing.assert_allclose(read(tmp_path / "out")["time_ns"], np.asarray(expected), **SINGLE)


def test_files_globs_and_folders_are_read_in_order_and_other_columns_are_carried_along(tmp_path):
    odd = pa.array([[1, 2], None, [3]] * 100)
    ours = {"tags": odd, "note": pa.array(["a", None, "c"] * 100).dictionary_encode()}
    ours["price"] = pa.array([decimal.Decimal("1.5")] * 300)
    tables = {(year, place): pairs(300, 10 * year + place) for year in (1, 2) for place in (1, 2)}
    for (year, place), columns in tables.items():
        write(tmp_path / f"in/year={year}/{place}.parquet", {**ours, **columns}, row_group_size=128)
    (tmp_path / "in/_SUCCESS").touch()
    evaluate(tmp_path / "in", tmp_path / "out", GATE, want=["score"])
    table = read(tmp_path / "out")
    assert table.column_names == [*ours, "year", "score_ns"]
    expected = np.concatenate([np.asarray(GATE.score_ns(*profiles(columns))) for columns in tables.values()])
    np.testing.assert_allclose(table["score_ns"], expected, **SINGLE)
    assert table["year"].to_pylist() == [1] * 600 + [2] * 600
    assert table["tags"].to_pylist() == odd.to_pylist() * 4
    assert table["note"].to_pylist() == ["a", None, "c"] * 400
    evaluate(str(tmp_path / "in/*/1.parquet"), tmp_path / "some", GATE, want=["score"])
    several = [tmp_path / "in/year=2/1.parquet", tmp_path / "in/year=1/2.parquet"]
    evaluate(several, tmp_path / "two", GATE, want=["score"])
    parts = [expected[start : start + 300] for start in range(0, 1200, 300)]
    np.testing.assert_allclose(read(tmp_path / "some")["score_ns"], np.concatenate(parts[::2]), **SINGLE)
    np.testing.assert_allclose(read(tmp_path / "two")["score_ns"], np.concatenate([parts[2], parts[1]]), **SINGLE)


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
    asked = {"want": ["time"], "columns": {"strategy": "strategy"}, "rows_per_batch": 300}
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


def test_what_a_model_refuses_of_a_row_is_its_reason(tmp_path):
    welch = rx.calibration.prior_calibration("cpu").of("welch")
    columns = {"batch": [8, 8, 8, 8, 0], "n_fft": [64, 63, 64, 64, 64], "k": [4, 4, 34, 0, 4]}
    done = evaluate(write(tmp_path / "w.parquet", columns), tmp_path / "out", welch, want=["pick"])
    reasons = [row["reason"] for row in read(done.rejects).to_pylist()]
    assert read(tmp_path / "out").num_rows == 2
    assert [reason.partition(":")[0] for reason in reasons] == ["n_fft", "k", "k"]
    assert "a multiple of 2" in reasons[0]
    assert "at most n_fft / 2 + 1 peaks" in reasons[1]


def several(tmp_path, files=4, rows=500):
    for number in range(files):
        write(tmp_path / f"in/{number}.parquet", {"id": np.arange(rows) + rows * number, **pairs(rows, number)})
    return tmp_path / "in"


def test_a_job_that_was_stopped_goes_on_where_parts_are_missing_and_another_one_is_refused(tmp_path):
    source, out = several(tmp_path), tmp_path / "out"
    evaluate(source, tmp_path / "whole", GATE)
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
    assert (seen[0], seen[-1]) == (500 * done.resumed, 2000)
    assert read(out).equals(whole)
    assert not left.exists()
    assert evaluate(source, out, GATE, resume=True).resumed == 4
    with pytest.raises(ValueError, match="holds 4 of the 4 parts of this job; go on with --resume"):
        evaluate(source, out, GATE)
    for other in (
        {"what": rx.io_fusion_gate_for_target("metal")},
        {"want": ["score"]},
        {"columns": {"after_sync_points": "before_sync_points"}},
        {"source": [source / "0.parquet"]},
        {"rows_per_batch": 100},
    ):
        with pytest.raises(ValueError, match="out: holds another job: .* differs; give another folder"):
            evaluate(**{"source": source, "sink": out, "what": GATE, "resume": True} | other)
    write(source / "0.parquet", {"id": np.arange(500), **pairs(500, 9)})
    with pytest.raises(ValueError, match="the input differs"):
        evaluate(source, out, GATE, resume=True)


def test_programs_are_compiled_once_for_files_of_about_the_same_rows(tmp_path):
    from _compilations import COMPILE, compilations

    source = several(tmp_path)
    for number in range(3):
        write(source / f"other-{number}.parquet", {"id": np.arange(400 + number), **pairs(400 + number)})
    before = compilations.count(COMPILE)
    evaluate(source, tmp_path / "out", GATE)
    assert compilations.count(COMPILE) - before <= 1


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
    "large": (
        changed(np.array([7] * 600 + [2**63] * 400, np.uint64)),
        None,
        rf"row group 1, row 600: {FIELDS[2]}: expected at most 2\*\*63 - 1, got 9223372036854775808",
    ),
    "taken": (pairs(1000) | {"score_ns": [0] * 1000}, None, "score_ns: a column of this name is to be added"),
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
        ({"source": [source, source]}, "names a file twice"),
        ({"source": [source, other]}, "more: expected no such column, got int64"),
        ({"sink": source}, "expected a folder"),
        ({"sink": other.parent}, "expected a new or empty folder"),
        ({"what": "cuda"}, "what: expected an IoFusionGate or a CalibratedModel, got str"),
        ({"want": ["price"]}, "want: expected some of score, decision, probability, log_odds, got 'price'"),
        ({"want": ["probability"]}, "temperature_ns: expected one"),
        ({"temperature_ns": -1.0}, "temperature_ns: expected a positive"),
        ({"strategy": "tile"}, "a gate has no strategies"),
        ({"columns": {"launches": "a"}}, "columns: expected fields among"),
        ({"rows_per_batch": 0}, "rows_per_batch: expected an integer of at least 1"),
        ({"what": TILES, "strategy": "tyle"}, "strategy: expected one of loop, tile, got 'tyle'"),
        ({"what": TILES, "temperature_ns": 1.0}, "a calibrated model knows its own doubt"),
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
    good = run(source, out, "--target", "cuda", "--want", "score, decision", "--json")
    assert good.exit_code == 0, good.output
    assert_documented("evaluate", json.loads(good.stdout))
    evaluate(source, tmp_path / "same", GATE)
    assert read(out).equals(read(tmp_path / "same"))
    assert "1 of them from an earlier run" in run(source, out, "--target", "cuda", "--resume").stdout
    columns[FIELDS[0]][3] = -1
    bad = write(tmp_path / "b.parquet", columns)
    found = run(bad, tmp_path / "some", "--target", "cuda", "--column", f"{FIELDS[1]}={FIELDS[1]}")
    assert found.exit_code == 1
    assert "1 row could not be evaluated" in found.stdout
    for arguments, said in (
        (
            (bad, tmp_path / "none", "--target", "cuda", "--strict"),
            f"b.parquet, row group 0, row 3: {FIELDS[0]}: expected",
        ),
        ((source, out, "--target", "cuda"), "go on with --resume"),
        ((source, out, "--target", "qpu"), "'qpu'"),
        ((source, out, "--target", "cuda", "--model", "welch"), "--target: expected no --model"),
        ((source, out, "--target", "cuda", "--column", "a"), "--column: expected field=name"),
    ):
        refused = run(*arguments)
        assert (refused.exit_code, refused.stderr.count("\n"), refused.stdout) == (2, 1, ""), refused.output
        assert said in refused.stderr


def test_ray_that_is_not_installed_and_engines_that_are_none_are_one_line(tmp_path, monkeypatch):
    source = write(tmp_path / "pairs.parquet", pairs(10))
    monkeypatch.setitem(sys.modules, "ray", None)
    refused = CliRunner().invoke(app, ["evaluate", str(source), str(tmp_path / "out"), "--target=cuda", "--engine=ray"])
    said = "ray is not installed; get it with `pip install 'rlxjax[scale]'`"
    assert (refused.exit_code, refused.stderr) == (2, f"error: {said}\n")
    with pytest.raises(ValueError, match="engine: expected local or ray, got 'spark'"):
        evaluate(source, tmp_path / "out", GATE, engine="spark")
    with pytest.raises(ValueError, match="address: expected none with the engine local"):
        evaluate(source, tmp_path / "out", GATE, address="a:1")
    assert not list((tmp_path / "out").iterdir())
