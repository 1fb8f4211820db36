import json

import numpy as np
import pytest
from typer.testing import CliRunner

from calibrate.cli import app
from calibrate.samples import (
    SampleLog,
    SampleWriter,
    check_resumable,
    read_samples,
    timings_of,
)
from calibrate.workloads import WITHOUT_MODEL, Cell
from rlxjax.calibration import current_fingerprint, set_aside
from rlxjax.welch import RUNNER_VERSION

CELLS = [Cell("fast", 4, 64, 4), Cell("fused-maxima", 4, 64, 4)]


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "a.samples.jsonl"
    log = SampleLog(current_fingerprint())
    with SampleWriter(path, log, append=False) as writer:
        writer.cells(CELLS)
        writer.micro("launch", 10.0)
        for round_, times in enumerate([(5, 7), (4, 9)]):
            for cell, time_ns in zip(CELLS, times, strict=True):
                writer.timing(round_, cell, [time_ns + 2, time_ns])
        writer.timing(2, CELLS[0], [3])
    return path, log


def test_what_is_written_is_read_back(written):
    path, log = written
    assert read_samples(path) == log


def test_every_line_is_on_disk_before_the_next_sample(tmp_path):
    path = tmp_path / "b.samples.jsonl"
    with SampleWriter(path, SampleLog(current_fingerprint()), append=False) as writer:
        writer.cells(CELLS)
        for count in range(1, 4):
            writer.timing(0, CELLS[0], [count])
            assert len(path.read_text().splitlines()) == 2 + count


def test_every_run_of_a_visit_is_on_disk_and_the_least_counts(written):
    path, log = written
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["times_ns"] for line in lines if line["kind"] == "timing"] == [
        [7, 5],
        [9, 7],
        [6, 4],
        [11, 9],
        [3],
    ]
    assert log.rounds == [list(zip(CELLS, times, strict=False)) for times in ([5, 7], [4, 9], [3])]


def test_only_complete_rounds_count(written):
    _, log = written
    visits = log.visits()
    np.testing.assert_array_equal(visits.round, [0, 0, 1, 1])
    np.testing.assert_array_equal(visits.cell, [0, 1, 0, 1])
    np.testing.assert_array_equal(visits.time_ns, [5, 7, 4, 9])
    assert visits.n_cells == 2


def test_visits_stand_in_the_order_in_which_they_were_made(tmp_path):
    path = tmp_path / "e.samples.jsonl"
    order = [1, 0, 1, 1, 0]
    with SampleWriter(path, SampleLog(current_fingerprint()), append=False) as writer:
        writer.cells(CELLS)
        writer.timing(0, CELLS[0], [1])
        for time_ns, place in enumerate(order, 1):
            writer.timing(1, CELLS[place], [time_ns])
    visits = read_samples(path).visits()
    np.testing.assert_array_equal(visits.cell, order)
    np.testing.assert_array_equal(visits.time_ns, [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(visits.rounds(), [0])


def test_cells_that_were_dropped_after_an_unfinished_round_are_left_out(tmp_path):
    path = tmp_path / "f.samples.jsonl"
    with SampleWriter(path, SampleLog(current_fingerprint()), append=False) as writer:
        writer.cells(CELLS)
        writer.timing(0, CELLS[1], [1])
        writer.cells(CELLS[:1])
        writer.timing(0, CELLS[0], [2])
    visits = read_samples(path).visits()
    np.testing.assert_array_equal(visits.time_ns, [2])
    assert visits.n_cells == 1


def test_without_cells_no_round_is_whole():
    log = SampleLog(current_fingerprint())
    assert not log.is_complete([])
    assert log.visits().rounds().size == 0


def test_a_file_cut_anywhere_after_its_header_loses_at_most_one_sample(written):
    path, _ = written
    content = path.read_bytes()
    header_end = content.index(b"\n", content.index(b"\n") + 1) + 1
    for length in range(header_end, len(content)):
        path.write_bytes(content[:length])
        whole_lines = content[:length].count(b"\n")
        log = read_samples(path, mend_tail=True)
        kept = sum(map(len, log.rounds)) + sum(map(len, log.micro.values()))
        assert kept == whole_lines - 2
        assert path.read_bytes() == content[:length][: content[:length].rfind(b"\n") + 1]


def test_appending_goes_on_where_a_cut_file_ended(written):
    path, _ = written
    path.write_bytes(path.read_bytes()[:-9])
    log = read_samples(path, mend_tail=True)
    with SampleWriter(path, log, append=True) as writer:
        writer.timing(2, CELLS[1], [11])
    assert read_samples(path) == log


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no header"),
        (b'{"kind":"timing"}\n', "line 1: content: Input tag 'timing' .* expected tags: 'header', 'functions'"),
        (b"not json\n", "line 1: content: Invalid JSON"),
        (b"\xff\n", "line 1: content: Invalid JSON"),
        (b"[" * 100_000 + b"]" * 100_000 + b"\n", "line 1: content: Invalid JSON: recursion limit exceeded"),
        (b'{"kind":"header","version":4,"runner":1,"protocol":2}\n', "line 1: header.fingerprint: Field required"),
    ],
)
def test_what_is_no_samples_file_is_refused_in_one_line(tmp_path, content, said):
    path = tmp_path / "c.samples.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=said) as refusal:
        read_samples(path)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 500
    assert path.read_bytes() == content


def test_samples_of_a_version_that_is_not_known_are_refused(written):
    path, _ = written
    for version, said in ((99, "Input should be 4, got 99"), (3, "Input should be 4, got 3")):
        path.write_text(path.read_text().replace('"version":4', f'"version":{version}', 1))
        with pytest.raises(ValueError, match=f"line 1: header.version: .*{said}"):
            read_samples(path)
        path.write_text(path.read_text().replace(f'"version":{version}', '"version":4', 1))


def test_samples_name_the_runner_that_they_timed(written):
    path, log = written
    assert json.loads(path.read_text().splitlines()[0])["runner"] == RUNNER_VERSION == log.runner
    text = path.read_text()
    other = RUNNER_VERSION + 1
    path.write_text(text.replace(f'"runner":{RUNNER_VERSION}', f'"runner":{other}', 1))
    again = read_samples(path)
    assert again.runner == other
    with pytest.raises(ValueError, match=f"runner {other}, and this is runner {RUNNER_VERSION}") as refusal:
        check_resumable(again, path, CELLS, current_fingerprint())
    assert "\n" not in str(refusal.value)
    for bad in (0, -1, "12", 1.5, None):
        path.write_text(text.replace(f'"runner":{RUNNER_VERSION}', f'"runner":{json.dumps(bad)}', 1))
        with pytest.raises(ValueError, match="line 1: header.runner"):
            read_samples(path)


TIMING = {"round": 2, **CELLS[1]._asdict(), "n_segments": 2, "times_ns": [7, 9]}
MICRO = {"name": "launch", "time_ns": 7.0}
CELL = list(CELLS[0])
HUGE, NO_NUMBERS = 10**30, ["x", [4], {}, None, True, 4.5]


def lines_with(kind, good, field, values):
    """Return one case a value: the kind, the line's fields, and the field that is to be named."""
    return [(kind, good | {field: value}, field) for value in values]


BAD_LINES = [
    *lines_with("timing", TIMING, "round", [10_000_000, 4, -1, HUGE, *NO_NUMBERS]),
    *lines_with("timing", TIMING, "strategy", ["abacus", "fused", ["fast"], 4, None]),
    *(
        case
        for size in ("batch", "n_fft", "k")
        for case in lines_with("timing", TIMING, size, [-5, 0, HUGE, 2**31, *NO_NUMBERS])
    ),
    *lines_with("timing", TIMING, "n_fft", [255]),
    *lines_with("timing", TIMING, "n_segments", [1, 3]),
    *(
        ("timing", TIMING | {"times_ns": times}, "times_ns")
        for times in ([], 7, None, *([7, bad] for bad in (0, -5, HUGE, float("nan"), *NO_NUMBERS)))
    ),
    *lines_with("timing", TIMING, "unheard_of", [1]),
    *lines_with("micro", MICRO, "time_ns", [0, -5, float("nan"), float("inf"), 10**400, "7", [7], None]),
    *lines_with("micro", MICRO, "name", [7, None, ["launch"], "x" * 1000]),
    *lines_with("cells", {}, "cells", [None, 7, CELL, [CELL, CELL], [CELL[:3]], [[*CELL, 1]]]),
    *lines_with("cells", {}, "cells", [[["fast", bad, 64, 4]] for bad in (-5, 0, HUGE, *NO_NUMBERS)]),
    ("cells", {"cells": [["abacus", *CELL[1:]]]}, "strategy"),
    ("cells", {"cells": [["fast", 4, 63, 4]]}, "n_fft"),
    *lines_with("models", {}, "models", [None, [[256]], [[256, "x"]], [["x", "0" * 64]], [[-1, "0" * 64]]]),
    ("abacus", {}, "kind"),
    (None, {}, "kind"),
]


@pytest.mark.parametrize(("kind", "fields", "named"), BAD_LINES)
def test_a_line_that_cannot_be_is_refused_by_name(kind, fields, named, written):
    path, _ = written
    before = path.read_text()
    number = len(before.splitlines()) + 1
    path.write_text(before + json.dumps({"kind": kind, **fields}) + "\n")
    with pytest.raises(ValueError, match=f"line {number}: .*{named}") as refusal:
        read_samples(path)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 500


def test_the_lines_that_the_bad_ones_are_made_from_are_good(written):
    path, log = written
    lines = [{"kind": "timing", **TIMING}, {"kind": "micro", **MICRO}, {"kind": "cells", "cells": [CELL]}]
    path.write_text(path.read_text() + "".join(json.dumps(line) + "\n" for line in lines))
    again = read_samples(path)
    assert again.rounds == [*log.rounds[:2], [*log.rounds[2], (CELLS[1], 9)]]
    assert again.micro == {"launch": [10.0, 7.0]}
    assert again.cells == CELLS[:1]


def test_a_second_header_is_refused_as_it_would_discard_the_samples_before_it(written):
    path, _ = written
    text = path.read_text()
    path.write_text(text + text)
    with pytest.raises(ValueError, match=f"line {len(text.splitlines()) + 1}: a second header"):
        read_samples(path)


@pytest.mark.parametrize("bad", ['{"kind":"timing","round":10000000}', '{"kind":"timing","batch":[4]}'])
def test_a_bad_line_ends_the_resumed_job_in_one_line(written, bad):
    path, _ = written
    content = path.read_text() + bad + "\n"
    path.write_text(content)
    out = path.with_name("a.json")
    result = CliRunner().invoke(app, ["calibrate", "--resume", "--out", str(out)])
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert f"{path}: line {len(content.splitlines())}: timing." in result.stderr
    assert "leave out --resume to start anew" in result.stderr
    assert path.read_text() == content
    assert not out.exists()


def test_samples_of_another_machine_or_grid_are_not_resumed(written):
    path, log = written
    here = current_fingerprint()
    check_resumable(log, path, CELLS, here)
    with pytest.raises(ValueError, match="jax '0.1' there|jax '.*' there, '0.1' here"):
        check_resumable(log, path, CELLS, here.model_copy(update={"jax": "0.1"}))
    with pytest.raises(ValueError, match="another grid"):
        check_resumable(log, path, CELLS[:1], here)


def test_an_earlier_file_is_set_aside_and_never_overwritten(tmp_path):
    path = tmp_path / "d.samples.jsonl"
    assert set_aside(path) is None
    kept = []
    for text in ("first", "second"):
        path.write_text(text)
        kept.append(set_aside(path))
    assert [aside.read_text() for aside in kept] == ["first", "second"]
    assert not path.exists()


def test_timings_carry_the_variant_and_segments_of_each_cell():
    cells = [Cell(strategy, 4 * (1 + place), 64, 4) for place, strategy in enumerate(WITHOUT_MODEL)]
    timings = timings_of(cells, np.arange(1.0, 6.0))
    assert WITHOUT_MODEL == ("ultra", "fast", "fused-maxima", "fused-top_k", "block")
    names = [timings.model.variants[place] for place in timings.runs.variant]
    assert names == ["host", "host", "fused_maxima", "fused_top_k", "block"]
    np.testing.assert_array_equal(timings.runs.inputs["n_segments"], [1, 2, 2, 2, 2])
    np.testing.assert_array_equal(timings.runs.inputs["batch"], [4, 8, 12, 16, 20])
