import dataclasses
import io
import json
import math
import time
from signal import SIGINT, raise_signal

import jax
import numpy as np
import pytest
from _documented import assert_documented, assert_narrow
from rich.console import Console
from typer.testing import CliRunner

from calibrate import bench
from calibrate.bench import bench_cells, run_bench
from calibrate.bench_file import (
    BENCH_SCHEMA_VERSION,
    BenchFile,
    CellResult,
    Result,
    growth,
    log_log_slope,
    mean_ratios,
)
from calibrate.bench_report import print_bench
from calibrate.bench_rounds import MIN_ROUNDS, time_contenders
from calibrate.cli import app
from calibrate.clock import Deadline
from calibrate.peers import contenders
from rlxjax import WelchPeakParams
from rlxjax._files import read_json_file
from rlxjax.calibration import current_fingerprint

SMALL = WelchPeakParams(64, 2, 4)
SIGNAL = np.random.default_rng(0).standard_normal((8, SMALL.frame_len)).astype(np.float32)


def invoke(*arguments):
    return CliRunner().invoke(app, ["bench", *(str(argument) for argument in arguments)])


def read(path):
    return read_json_file(path, BenchFile, {"bench_schema_version": BENCH_SCHEMA_VERSION}, ValueError, "mend", "what")


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """A benchmark of two cells, as the command runs it."""
    path = tmp_path_factory.mktemp("bench") / "bench.json"
    names = [part for name in ("fused", "host", "naive", "copy") for part in ("--contender", name)]
    sizes = ("--n-fft", 64, "--batch", 8, "--k", 4, "--k", 1)
    return invoke(*sizes, *names, "--budget", 0.01, "--out", path), path


def test_a_small_run_measures_every_contender(small_run):
    result, path = small_run
    assert result.exit_code == 0, result.output
    content = read(path)
    assert [(cell.n_fft, cell.batch, cell.k) for cell in content.cells] == [(64, 8, 1), (64, 8, 4)]
    assert content.ours == ["fused", "host"]
    assert list(content.versions) == ["fused", "host", "naive", "copy"]
    assert not content.interrupted
    for cell in content.cells:
        assert cell.bytes_moved == 4 * 8 * (96 + 2 * cell.k)
        assert list(cell.results) == ["fused", "host", "naive", "copy"]
        for found in cell.results.values():
            assert found.status == "measured"
            assert len(found.times_ns) >= MIN_ROUNDS
            assert found.min_ns == min(found.times_ns)
            assert found.median_ns == np.median(found.times_ns)
        best = {name: found.min_ns for name, found in cell.results.items()}
        assert cell.ratios["host"] == {"naive": best["host"] / best["naive"]}
        assert cell.copy_share["fused"] == best["copy"] / best["fused"]


def test_the_command_in_the_file_is_the_one_that_was_given(small_run):
    _, path = small_run
    assert read(path).command == (
        "rlxjax bench --n-fft 64 --batch 8 --k 4 --k 1 --segments 2 --contender fused --contender host "
        f"--contender naive --contender copy --budget 0.01 --out {path}"
    )


def test_the_tables_name_every_contender_and_cell(small_run):
    result, path = small_run
    for text in ("n_fft 64, k 1, 2 segments: ns", "n_fft 64, k 4", "/ naive", "share of copy", str(path)):
        assert text in result.stdout.replace("\n", "")
    for name in ("fused", "host", "naive", "copy"):
        assert name in result.stdout


def test_the_json_is_that_of_the_page_and_quiet_says_no_more():
    sizes = ("--n-fft", 64, "--batch", 8, "--k", 4)
    result = invoke(*sizes, "--contender", "host", "--budget", 0.01, "--json", "--quiet")
    assert (result.exit_code, result.stderr) == (0, "")
    assert_documented("bench", json.loads(result.stdout))


def test_no_line_of_a_full_benchmark_is_longer_than_80_columns():
    names = dict.fromkeys(("host", "jax.scipy", "c-fftw-insertion", "copy"), 123_456_789)
    cells = [cell(n_fft, batch, 987_654_321, k=k, **names) for n_fft, batch, k, _ in bench_cells()]
    content = BenchFile(
        bench_schema_version=BENCH_SCHEMA_VERSION,
        created="",
        command="",
        protocol="",
        fingerprint=current_fingerprint(),
        versions=dict.fromkeys(("fused", *names), "1"),
        ours=["fused"],
        skipped={"torch": "not installed: pip install 'rlxjax[bench]'", "n_fft 64": "reason " * 20},
        cells=cells,
        growth=growth(cells),
        mean_ratios=mean_ratios(cells),
    )
    assert_narrow(printed(content, width=80))
    assert_documented("bench", content.model_dump(mode="json") | {"calibration": ""})


def test_a_file_read_and_written_is_the_same(small_run):
    _, path = small_run
    assert read(path).model_dump_json() + "\n" == path.read_text()
    assert json.loads(path.read_text())["bench_schema_version"] == BENCH_SCHEMA_VERSION


def test_ours_runs_under_the_default_configuration_and_the_callers_comes_back(monkeypatch):
    seen = []

    def looking(*arguments):
        seen.append(jax.config.jax_enable_x64)
        return time_contenders(*arguments)

    monkeypatch.setattr(bench, "time_contenders", looking)
    run_bench(bench_cells([64], [2], [1]), budget_s=0.01, command="", names=["host"])
    assert seen == [False]
    assert jax.config.jax_enable_x64


def contender(name, build):
    return dataclasses.replace(contenders(names=["host"])[0][0], name=name, build=build)


def timed(*taking_part):
    deadline = Deadline(time.perf_counter() + 0.01)
    return time_contenders(taking_part, SIGNAL, SMALL, np.random.default_rng(0), deadline)


def host_run(signal=SIGNAL, params=SMALL):
    return contenders(names=["host"])[0][0].build(signal, params)


def test_a_contender_that_is_wrong_is_reported_and_not_timed():
    def build(signal, params):
        peaks = host_run(signal, params)() * np.float32([1, 1.01])
        return lambda: peaks

    results = timed(contender("wrong", build), contender("right", host_run))
    assert results["wrong"].status == "wrong"
    assert "off by 0.01" in results["wrong"].note
    assert results["wrong"].times_ns == []
    assert results["right"].status == "measured"


@pytest.mark.parametrize("good_runs", [None, 0, 1, 4])
def test_a_contender_that_raises_is_reported_and_the_others_go_on(good_runs):
    def build(signal, params):
        if good_runs is None:
            raise MemoryError("no memory\nfor a plan")
        left, run = good_runs, host_run(signal, params)

        def raising():
            nonlocal left
            left -= 1
            if left < 0:
                raise RuntimeError("the device is gone")
            return run()

        return raising

    results = timed(contender("bad", build), contender("good", host_run))
    said = "MemoryError: no memory for a plan" if good_runs is None else "RuntimeError: the device is gone"
    assert results["bad"] == Result(status="failed", note=said)
    assert results["good"].status == "measured"


def interrupting_build(good_runs):
    """Build a contender that is interrupted after so many runs, in the rounds if they are many."""

    def build(signal, params):
        left, run = good_runs, host_run(signal, params)

        def interrupted():
            nonlocal left
            left -= 1
            if left == -1:
                raise_signal(SIGINT)
            return run()

        return interrupted

    return build


def test_ctrl_c_keeps_what_was_measured_and_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("calibrate.bench_rounds.WARM_S", 0.0)
    monkeypatch.setattr("rlxjax.clock.VISIT_NS", 0)
    # One call is checked, one is warm, two are of the first round.
    path, stopping = tmp_path / "bench.json", contender("stopping", interrupting_build(4))
    both = [contenders(names=["host"])[0][0], stopping]
    monkeypatch.setattr(bench, "contenders", lambda *_: (both, {}))
    content = run_bench(bench_cells([64], [8, 16], [4]), budget_s=0.5, command="x", out=path, seed=1)
    assert content.interrupted
    assert len(content.cells) == 1
    assert [len(found.times_ns) for found in content.cells[0].results.values()] in ([1, 2], [2, 2])
    assert read(path) == content


def test_an_interrupted_benchmark_prints_what_there_is_and_says_so_by_its_status(monkeypatch):
    monkeypatch.setattr(bench, "contenders", lambda *_: ([contender("stopping", interrupting_build(0))], {}))
    result = invoke("--n-fft", 64, "--batch", 8, "--k", 4, "--json", "--quiet")
    assert result.exit_code == 130
    assert json.loads(result.stdout)["interrupted"] is True
    assert result.stderr == "interrupted; this is what was measured so far\n"


def test_ctrl_c_before_any_time_leaves_a_file_without_cells(tmp_path, monkeypatch):
    path, stopping = tmp_path / "bench.json", contender("stopping", interrupting_build(0))
    monkeypatch.setattr(bench, "contenders", lambda *_: ([stopping], {}))
    content = run_bench(bench_cells([64], [8], [4]), budget_s=0.01, command="x", out=path)
    assert content.interrupted
    assert content.cells == []
    assert read(path) == content


def test_a_cell_that_would_not_fit_in_memory_is_skipped_with_the_reason(monkeypatch):
    monkeypatch.setattr(bench, "memory_limit_bytes", lambda: 9_000)
    cells = bench_cells([64], [1, 8], [4])
    content = run_bench(cells, budget_s=0.01, command="x", names=["host"])
    assert [cell.batch for cell in content.cells] == [1]
    assert content.skipped["n_fft 64, batch 8, k 4"] == "takes 19,712 bytes, and may take 18,000"


def test_the_default_cells_span_what_is_promised():
    cells = bench_cells()
    assert {cell.n_fft for cell in cells} == {64, 256, 1024, 4096}
    assert {cell.k for cell in cells} == {1, 16, 64}
    assert (1024, 131072, 16, 2) in cells
    assert max(cell.batch * cell.n_fft for cell in cells) == 131072 * 1024
    assert len(cells) == len(set(cells)) < 40


def test_what_is_asked_for_is_a_product():
    cells = bench_cells([64, 128], [1, 2], [3, 4], 8)
    assert len(cells) == 8
    assert {cell.n_segments for cell in cells} == {8}
    assert bench_cells([4096], [131072]) != []


@pytest.mark.parametrize(("power", "factor"), [(1.0, 3.0), (0.5, 100.0), (2.0, 1e-3)])
def test_the_slope_of_a_power_law_is_its_power(power, factor):
    sizes = [1024, 8192, 65536]
    assert log_log_slope(sizes, [factor * size**power for size in sizes]) == pytest.approx(power, rel=1e-12)


def cell(n_fft, batch, time_ns, k=16, **others):
    results = {name: Result.of([t, 2 * t]) for name, t in {"fused": time_ns, **others}.items()}
    return CellResult.of(results, ["fused"], n_fft=n_fft, n_segments=2, batch=batch, k=k, bytes_moved=1)


def test_growth_is_one_in_the_batch_and_the_theorys_in_n_fft():
    cells = [
        cell(n_fft, batch, round(1e6 * batch * n_fft * math.log2(n_fft)), peer=batch**2)
        for n_fft in (64, 256, 1024)
        for batch in (1, 1024, 8192, 65536)
    ]
    found = growth(cells)
    assert [(g.axis, g.fixed) for g in found] == [
        *(("batch", f"n_fft {n_fft}, k 16") for n_fft in (64, 256, 1024)),
        *(("n_fft", f"batch {batch}, k 16") for batch in (1, 1024, 8192, 65536)),
    ]
    for g in found:
        assert g.slopes["fused"] == pytest.approx(g.theory, rel=1e-9)
        assert g.values == ([1024, 8192, 65536] if g.axis == "batch" else [64, 256, 1024])
        assert g.slopes["peer"] == pytest.approx(2.0 if g.axis == "batch" else 0.0, abs=1e-9)
    assert found[0].theory == pytest.approx(1.0, rel=1e-12)
    assert 1.0 < found[-1].theory < 1.5


def test_growth_needs_three_points_and_a_contender_in_all_of_them():
    assert growth([cell(64, 1024, 1), cell(64, 8192, 8)]) == []
    cells = [cell(64, 1024, 1, peer=1), cell(64, 8192, 8), cell(64, 65536, 64, peer=64)]
    assert set(growth(cells)[0].slopes) == {"fused"}


def test_ratios_are_ours_over_peers_and_their_means_geometric():
    cells = [cell(64, 1, 100, peer=50, copy=10), cell(64, 2, 100, peer=200)]
    assert cells[0].ratios == {"fused": {"peer": 2.0}}
    assert cells[0].copy_share == {"fused": 0.1, "peer": 0.2}
    assert cells[1].copy_share == {}
    assert mean_ratios(cells) == {"fused": {"peer": pytest.approx(1.0, rel=1e-12)}}


def printed(content, width=200):
    console = Console(width=width, file=io.StringIO())
    print_bench(content, console)
    return console.file.getvalue()


def test_the_report_shows_growth_and_what_was_refused(small_run):
    _, path = small_run
    cells = [cell(64, batch, 1000 * batch, peer=batch, copy=batch) for batch in (1024, 8192, 65536)]
    results = cells[0].results | {"torch": Result(status="wrong", note="off by [1]")}
    cells[0] = cells[0].model_copy(update={"results": results})
    content = read(path).model_copy(
        update={
            "cells": cells,
            "growth": growth(cells),
            "mean_ratios": mean_ratios(cells),
            "skipped": {"cupy": "not installed"},
        }
    )
    text = printed(content)
    for part in (
        "batch at n_fft 64, k 16",
        "theory",
        "torch, n_fft 64, batch 1024, k 16: wrong: off by [1]",
        "skipped cupy: not installed",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--contender", "abacus"), "--contender: expected one of fused, fused-jax, host, auto"),
        (("--budget", "0"), "--budget: expected a positive number of seconds, got 0"),
        (("--budget", "nan"), "--budget: expected a positive number of seconds, got nan"),
        (("--n-fft", "255"), "expected an even number, got 255"),
        (("--batch", "0"), "--batch: expected at least 1, got 0"),
        (("--k", "0"), "k: expected"),
        (("--segments", "0"), "n_segments: expected"),
        (("--device", "abacus"), "expected one of cpu, gpu, cuda, rocm, tpu, got 'abacus'"),
        (("--contender", "cupy"), "--contender: none can run here: cupy: "),
        (("--out", "."), "expected a file to write, got the folder ."),
        (("--calibration", "no-such-file"), "no such file"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
