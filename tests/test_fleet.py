"""Fleets: a calibration of each device from Parquet files, the prior of a further one, and what is left out."""

import functools
import json
import os
import pickle
import re
import unicodedata
import warnings

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from _campaigns import TRUE_NS, Toy
from _documented import assert_documented
from typer.testing import CliRunner

import rlxjax as rx
from calibrate import fleet as job
from calibrate.cli import app
from rlxjax import Timings
from rlxjax.calibration import MachineMismatchWarning, read_prior
from rlxjax.fit import coefficient_names, fit_posterior, predicted_ns
from rlxjax.models import FFT
from rlxjax.tables import fleet_of

TOY = Toy()
GRID = TOY.grid()
#: Devices whose timings fit.
GOOD = [f"good-{number}" for number in range(6)]


def timings_of_device(seed, noise_sd=0.03):
    """Return timings of a device whose coefficients are somewhat off the known machine's."""
    rng = np.random.default_rng(seed)
    own = {name: value * np.exp(0.3 * rng.normal()) for name, value in TRUE_NS.items()}
    time_ns = np.asarray(predicted_ns(own, GRID, {})) * np.exp(noise_sd * rng.normal(size=GRID.shape))
    rows = rng.permutation(GRID.shape[0])[: GRID.shape[0] - seed]  # of each device another number
    inputs = {name: np.asarray(column)[rows] for name, column in GRID.inputs.items()}
    return Timings.checked(TOY, variant=np.asarray(GRID.variant)[rows], **inputs, time_ns=time_ns[rows])


def columns_of(device, timings, **changes):
    names = np.array(TOY.variants)[np.asarray(timings.runs.variant)].tolist()
    columns = {"device": [device] * len(names), "variant": names, **timings.runs.inputs, "time_ns": timings.time_ns}
    return {name: list(column) for name, column in (columns | changes).items()}


def written(folder, *devices):
    """Write two files of devices' rows, each device's in both; return their glob."""
    folder.mkdir(exist_ok=True)
    rows = pa.concat_tables([pa.table(columns) for columns in devices])
    for part in range(2):
        pq.write_table(rows.take(np.arange(part, rows.num_rows, 2)), folder / f"part-{part}.parquet")
    return f"{folder}/*.parquet"


def invoke(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


def calibrate(samples, out, *options):
    return invoke("fleet", samples, out, "--model", "_campaigns:Toy", "--quiet", *options)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A fleet with devices whose timings do not fit, and what the command made of it."""
    folder = tmp_path_factory.mktemp("fleet")
    good = [columns_of(device, timings_of_device(seed)) for seed, device in enumerate(GOOD)]
    few = {name: column[:5] for name, column in columns_of("few", timings_of_device(0)).items()}
    one = {name: [column[0]] * 20 for name, column in columns_of("one", timings_of_device(0)).items()}
    some = timings_of_device(0)
    broken = columns_of("broken", some, time_ns=np.where(np.arange(len(some.time_ns)) == 4, np.nan, some.time_ns))
    wild = columns_of("wild", timings_of_device(0, noise_sd=1.5))
    path = columns_of("../outside", some)
    samples = written(folder / "in", *good[:3], few, one, broken, wild, path, *good[3:])
    return samples, folder / "out", calibrate(samples, folder / "out", "--json")


def test_each_device_has_the_calibration_of_a_lone_fit_with_the_pooled_prior(made):
    samples, out, _ = made
    prior = read_prior(out / "prior.json", TOY)[0]
    for device in GOOD[::4]:
        rows = pa.concat_tables([pq.read_table(f"{out.parent}/in/part-{part}.parquet") for part in range(2)])
        own = Timings.of(TOY, rows.filter(pa.compute.equal(rows["device"], device)))
        alone = fit_posterior(own, prior).posterior
        with pytest.warns(MachineMismatchWarning, match=f"timings of the device '{device}'. Its predictions are"):
            found = rx.load_calibration(out / f"{device}.json", models=[TOY]).posterior
        sds = np.array(jax.tree.leaves(alone.coefficient_log_sd()))
        logs = [np.log(jax.tree.leaves(one.coefficients)) / sds for one in (found, alone)]
        np.testing.assert_allclose(*logs, atol=0.02)
        np.testing.assert_allclose(found.spread, alone.spread, rtol=0.01)
        np.testing.assert_allclose(found.factor, alone.factor, atol=0.02 * sds.max())


def test_a_device_whose_timings_do_not_fit_is_left_out_with_a_sentence(made):
    _, out, result = made
    assert result.exit_code == 1
    left_out = json.loads((out / "left-out.json").read_text())
    (renamed,) = json.loads((out / "renamed.json").read_text()).items()
    assert renamed[0] == "../outside"
    assert {path.name for path in out.iterdir()} == {
        *(f"{name}.json" for name in (*GOOD, "prior", "left-out", "renamed")),
        renamed[1],
    }
    assert json.loads((out / renamed[1]).read_text())["models"]["toy"]["fingerprint"]["device_kind"] == "../outside"
    assert left_out.keys() == {"few", "one", "broken", "wild"}
    assert "expected at least 8 timings, got 5" in left_out["few"]
    assert "expected several workloads, got a single workload; vary rows and width" in left_out["one"]
    assert "'broken': time_ns: expected a positive finite number, got nan" in left_out["broken"]
    assert "part-" in left_out["broken"]
    assert "its times differ from their predictions by" in left_out["wild"]
    for device, reason in left_out.items():
        assert "\n" not in reason
        assert f"{device} is left out: {reason}" in result.stderr
    printed = json.loads(result.stdout)
    assert (printed["devices"], printed["written"]) == (len(GOOD) + 5, len(GOOD) + 1)
    assert printed["left_out"] == left_out
    assert_documented("fleet", printed)


def test_the_prior_is_near_what_the_devices_are_and_no_device_that_is_left_out_moves_it(made, tmp_path):
    _, out, _ = made
    prior = read_prior(out / "prior.json", TOY)[0]
    for name, median in prior.median.items():
        assert abs(np.log(median / TRUE_NS[name])) < 0.7, name
        assert prior.log_sd[name] < TOY.prior.log_sd[name]
    fits = [columns_of(device, timings_of_device(n)) for n, device in enumerate(GOOD)]
    fleet = fleet_of(written(tmp_path / "in", *fits, columns_of("../outside", timings_of_device(0))), TOY)
    again, _ = job.pooled(fleet, list(fleet.counts()), TOY.prior, "a test", tmp_path, map)
    jax.tree.map(np.testing.assert_allclose, again, prior)


def test_a_group_is_a_value_that_another_process_may_fit(made, tmp_path):
    samples, out, _ = made
    fleet, prior = fleet_of(samples, TOY), read_prior(out / "prior.json", TOY)[0]
    fit = functools.partial(job.fit_group, fleet, prior, TOY.prior, 0.2, "a test")
    files = {device: tmp_path / f"{number}.json" for number, device in enumerate(fleet.counts())}
    fit, files = pickle.loads(pickle.dumps((fit, files)))
    fits, left_out = fit(files)
    assert (fits, left_out.keys()) == ([], {"few", "one", "broken", "wild"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MachineMismatchWarning)
        one, other = (rx.load_calibration(path, models=[TOY]) for path in (files[GOOD[1]], out / f"{GOOD[1]}.json"))
    for name in coefficient_names(TOY.prior.median):
        assert one.coefficients[name] == pytest.approx(other.coefficients[name], rel=1e-3)


def test_any_name_of_a_device_becomes_the_name_of_a_file_of_its_own_that_systems_take(tmp_path):
    plain = ["phone-7", "GPU (2)", "é", "名前", "a.b", "n" * 180]
    odd = [
        "",
        ".",
        "..",
        "../up",
        "/etc/passwd",
        "a/b",
        "a\\b",
        "a\nb",
        "\x00",
        "-x",
        " x",
        "x ",
        "x.",
        "~",
        "%2F",
        "a:b",
    ]
    odd += [
        "n" * 181,
        "n" * 260,
        "é" * 130,
        "名" * 200,
        "/" * 300,
        "prior",
        "PRIOR",
        "left-out",
        "unfinished",
        "renamed",
    ]
    alike = ["Pixel", "pixel", "PIXEL", "cafe\u0301", "caf\u00e9", "a%2Fb", "ß", "ss"]
    found = job.file_names([*plain, *odd, *alike])
    assert [found[name] for name in plain] == plain
    assert not any(found[name] == name for name in (*odd, *alike))
    taken = {unicodedata.normalize("NFKD", name).casefold() for name in found.values()}
    assert len(taken) == len(found)
    assert not {"prior", "left-out", "renamed", "unfinished"} & taken
    for device, name in found.items():
        path = tmp_path / f"{name}.json"
        path.write_text(device.replace("\r", "\n"))
        assert path.parent == tmp_path
        assert (len(os.fsencode(path.name)) < 200, name.isprintable(), name[0] not in ".- ") == (True, True, True), name
    assert len(list(tmp_path.iterdir())) == len(found)
    assert job.file_names(["pixel", "other"]) == {"pixel": "pixel", "other": "other"}


def test_a_calibration_that_cannot_be_written_is_named_and_an_unfinished_job_runs_again(made, tmp_path, monkeypatch):
    (samples, whole, _), out, write, fit_group = made, tmp_path / "out", job.calibration.write_json_file, job.fit_group

    def full(content, path, **options):
        if path.name == f"{GOOD[1]}.json":
            raise OSError(f"{path}: cannot be written (No space left on device)")
        write(content, path, **options)

    def killed(*group):
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "fit_group", killed)
    assert calibrate(samples, out).exit_code == 130
    assert (out / "unfinished.json").exists()
    monkeypatch.setattr(job, "fit_group", fit_group)
    monkeypatch.setattr(job.calibration, "write_json_file", full)
    again = calibrate(samples, out)
    assert again.exit_code == 1
    assert f"{GOOD[1]} is left out: {out / GOOD[1]}.json: cannot be written (No space left on device)" in again.stderr
    assert {path.name for path in whole.iterdir()} - {path.name for path in out.iterdir()} == {f"{GOOD[1]}.json"}
    assert calibrate(samples, out).exit_code == 2


def test_what_cannot_be_is_refused_in_one_line(made, tmp_path):
    samples, out, _ = made
    (tmp_path / "file").write_text("")
    (tmp_path / "broken.parquet").write_text("no")
    pq.write_table(pa.table({"device": [1], "variant": ["at_once"], "time_ns": [1.0]}), tmp_path / "numbers.parquet")
    pq.write_table(pa.table({"device": ["a"], "variant": ["at_once"]}), tmp_path / "less.parquet")
    new, toy = tmp_path / "new", ("--model", "_campaigns:Toy")
    for arguments, said in (
        ((samples, out, *toy), f"expected a new or an empty folder, got {out}, which holds "),
        ((samples, tmp_path / "file", *toy), "got the file"),
        ((tmp_path / "none*.parquet", new, *toy), "expected Parquet files, found none"),
        ((tmp_path / "broken.parquet", new, *toy), "broken.parquet: cannot be read as Parquet"),
        ((tmp_path / "numbers.parquet", new, *toy), "device: expected names, got int64"),
        ((tmp_path / "less.parquet", new, *toy), "time_ns: no such column"),
        ((samples, new, *toy, "--column", "device=host"), "host (for device): no such column"),
        (
            (samples, new, *toy, "--column", "device"),
            "--column: expected field=name, with each field once, got 'device'",
        ),
        ((samples, new, *toy, "--column", "where=device"), "expected fields among device, variant, time_ns, rows"),
        ((samples, new, "--model", "abacus"), "--model: expected one of welch, fft, functions"),
    ):
        result = invoke("fleet", *arguments, "-q")
        assert (result.exit_code, result.stdout) == (2, ""), arguments
        assert result.stderr.count("\n") == 1
        assert said in result.stderr
        assert not new.exists()


def test_a_fleet_reads_keys_of_paths_views_of_text_and_what_only_one_file_requires(tmp_path, monkeypatch):
    names = np.array(TOY.variants)
    of = {str(seed): timings_of_device(seed) for seed in (1, 2)}
    for device, timings in of.items():
        for code, name in enumerate(names):
            own = np.asarray(timings.runs.variant) == code
            inputs = {key: np.asarray(column)[own] for key, column in timings.runs.inputs.items()}
            text = pa.array(["x"] * own.sum(), pa.string_view() if code else pa.string())
            table = pa.table({**inputs, "time_ns": timings.time_ns[own], "text": text})
            required = pa.schema([field.with_nullable(bool(code)) for field in table.schema])
            folder = tmp_path / f"in/day=7/device={device}/variant={name}"
            folder.mkdir(parents=True)
            pq.write_table(table.cast(required), folder / "a.parquet")
    monkeypatch.chdir(tmp_path / "in/day=7")
    for source in ("../..", "*", [f"device={device}/*/a.parquet" for device in of]):
        fleet = fleet_of(source, TOY)
        assert fleet.counts() == {device: len(timings.time_ns) for device, timings in of.items()}
        found = pickle.loads(pickle.dumps(fleet)).timings(list(of), 8)
        for device, timings in of.items():
            sort = np.argsort(np.asarray(timings.runs.variant), kind="stable")
            order = np.argsort(names[np.asarray(timings.runs.variant)[sort]], kind="stable")
            np.testing.assert_array_equal(found[device].time_ns, timings.time_ns[sort][order])
    columns = columns_of("a", of["1"])
    columns["device"] = pa.array(columns["device"], pa.string_view())
    pq.write_table(pa.table(columns), tmp_path / "views.parquet")
    assert fleet_of(tmp_path / "views.parquet", TOY).timings(["a"], 8)["a"] == of["1"]


def test_a_fleet_of_files_that_cannot_be_is_one_line_that_names_the_file(tmp_path):
    columns = columns_of("a", timings_of_device(0))
    column = pa.array(columns["time_ns"])
    good = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), good, write_page_checksum=True)
    place = pq.read_metadata(good).row_group(0).column(list(columns).index("time_ns"))
    damaged = bytearray(good.read_bytes())
    damaged[(place.dictionary_page_offset or place.data_page_offset) + place.total_compressed_size - 3] ^= 8
    good.write_bytes(damaged)
    fleet = fleet_of(good, TOY)
    with pytest.raises(ValueError, match=r"a.parquet, row group 0: time_ns: cannot be read \(.*\)$"):
        fleet.timings(["a"], 8)
    for name, read in (
        ("time_ns", fleet_of),
        ("other", fleet_of),
        ("time_ns", lambda path, model: Timings.of(model, path)),
    ):
        pq.write_table(pa.table({**columns, "other": column}).append_column(name, column), good)
        with pytest.raises(ValueError, match=f"a.parquet: expected columns of different names, got '{name}' twice$"):
            read(good, TOY)


def test_columns_may_have_other_names_and_units_and_a_prior_may_be_given(made, tmp_path):
    _, out, _ = made
    for part in range(2):
        table = pq.read_table(out.parent / f"in/part-{part}.parquet")
        columns = {{"device": "host", "variant": "how"}.get(name, name): table[name] for name in table.column_names}
        columns["fast_us"] = pa.compute.divide(columns.pop("time_ns"), 1e3)
        pq.write_table(pa.table(columns | {"device": ["a"] * len(table)}), tmp_path / f"{part}.parquet")
    named = ("--column", "device=host", "--column", "time_ns=fast_us", "--column", "variant=how")
    result = calibrate(tmp_path / "*.parquet", tmp_path / "out", *named, "--prior", out / "prior.json")
    assert result.exit_code == 1
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in out.iterdir()}
    with pytest.warns(MachineMismatchWarning):
        one, other = (
            rx.load_calibration(folder / f"{GOOD[1]}.json", models=[TOY]) for folder in (tmp_path / "out", out)
        )
    for name, value in one.coefficients.items():
        assert value == pytest.approx(other.coefficients[name], rel=0.1)


def test_timings_come_back_from_parquet_as_they_were(tmp_path):
    timings, path = timings_of_device(0), tmp_path / "own.parquet"
    timings.to_parquet(path)
    assert Timings.of(TOY, path) == timings
    fft = Timings.checked(FFT, variant="fft", batch=[8, 64], n_fft=[256, 512], time_ns=[1e5, 2e5])
    fft.to_parquet(path)
    assert Timings.of(FFT, path) == fft
    assert [one.name for one in tmp_path.iterdir()] == ["own.parquet"]
    table = pq.read_table(path)
    for changed, said in (
        (table.drop_columns("time_ns"), ": expected a column 'time_ns'"),
        (table.set_column(1, "batch", pa.array([8.0, None])), ", row 1: batch: expected a finite number, got nan"),
        (table.set_column(0, "variant", pa.array(["fft", "x"])), ", row 1: variant: expected one of fft, got 'x'"),
        (table.slice(0, 0), ": expected a row for each timing, got none"),
        ("no", ": cannot be read as Parquet"),
        (None, ": no such file"),
    ):
        path.unlink(missing_ok=True)
        if changed is not None:
            path.write_text(changed) if isinstance(changed, str) else pq.write_table(changed, path)
        with pytest.raises(ValueError, match="^" + re.escape(f"{path}{said}")):
            Timings.of(FFT, path)
    with pytest.raises(ValueError, match="a single device"):
        rx.fit.stack_timings([fft, fft])[0].to_parquet(path)
