"""The samples file: every line on disk as it is taken, whole rounds alone count, and nothing else is read as one."""

import json

import numpy as np
import pytest
from _campaigns import NAME, SUITE, toy_cell
from typer.testing import CliRunner

from calibrate.cli import app
from calibrate.samples import Canary, Micro, SampleLog, Visit, read_samples, resumed
from rlxjax.calibration import current_fingerprint

CELLS = [toy_cell(4, 64), toy_cell(4, 64, "one_by_one", held_out=True)]
ONE, OTHER = (cell.name for cell in CELLS)


def write(path, *lines):
    """Write samples of both cells; a line is a visit by its round, cell and times, or anything else that is kept."""
    log = SampleLog.new(SUITE, NAME)
    with log.kept_in(path, append=False):
        log.keep_cells(CELLS)
        for line in lines:
            if isinstance(line, list):
                log.keep_cells(line)
            else:
                log.keep(Visit(round=line[0], cell=line[1], times_ns=line[2]) if isinstance(line, tuple) else line)
    return log


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "a.toy.samples.jsonl"
    visits = [(0, ONE, [7, 5]), (0, OTHER, [9, 7]), (1, ONE, [6, 4]), (1, OTHER, [11, 9]), (2, ONE, [3])]
    look = Canary(times_ns={"upload": 5.0}, others=0.5)
    return path, write(path, Micro(name="launch", time_ns=10.0), look, *visits)


def test_what_is_written_is_read_back_and_only_complete_rounds_count_in_the_order_they_were_made(written, tmp_path):
    path, log = written
    assert read_samples(path) == log
    assert log.rounds == [[(ONE, 5), (OTHER, 7)], [(ONE, 4), (OTHER, 9)], [(ONE, 3)]]
    assert (log.micro, len(log.canaries)) == ({"launch": [10.0]}, 1)
    assert dict(log.facts) == {name: pytest.approx(fact) for name, fact in SUITE.facts().items()}
    cells, visits = log.timed()
    assert cells == log.cells == CELLS
    for found, expected in ((visits.round, [0, 0, 1, 1]), (visits.cell, [0, 1, 0, 1]), (visits.time_ns, [5, 7, 4, 9])):
        np.testing.assert_array_equal(found, expected)
    mixed = [(0, ONE, [1]), *((1, (ONE, OTHER)[place], [place + 2]) for place in (1, 0, 1))]
    assert write(tmp_path / "e.toy.samples.jsonl", *mixed).timed()[1].time_ns.tolist() == [3, 2, 3]
    # Without a whole round the longest counts, and cells that were dropped do not.
    for lines, kept, times_ns in (([(0, OTHER, [1])], CELLS[1:], [1.0]),
                                  ([(0, OTHER, [1]), CELLS[:1], (0, ONE, [2])], CELLS[:1], [2.0])):  # fmt: skip
        cells, visits = write(tmp_path / f"{len(lines)}.toy.samples.jsonl", *lines).timed()
        assert (cells, visits.time_ns.tolist()) == (kept, times_ns)
    empty = SampleLog.new(SUITE, NAME)
    assert (empty.timed()[0], empty.complete_rounds()) == ([], [])


def test_a_file_cut_anywhere_after_its_header_loses_at_most_one_line_and_goes_on_from_there(written):
    path, _ = written
    content = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(content) if byte == ord("\n")]
    for length in sorted({*ends, *(end - 1 for end in ends[1:]), *range(ends[0], len(content), 7)}):
        path.write_bytes(content[:length])
        log = read_samples(path, cut_tail=True)
        kept = sum(map(len, log.rounds)) + len(log.micro) + len(log.canaries) + bool(log.cells)
        assert kept == content[:length].count(b"\n") - 1
        assert path.read_bytes() == content[: content[:length].rfind(b"\n") + 1]
    log = read_samples(path, cut_tail=True)
    with log.kept_in(path, append=True):
        for count in range(1, 4):  # every line is on disk before the next sample
            log.keep(Visit(round=2, cell=OTHER, times_ns=[count, 5]))
            assert json.loads(path.read_text().splitlines()[-1])["times_ns"] == [count, 5]
            assert read_samples(path) == log


NO_FINGERPRINT = b'{"kind":"header","version":5,"suite":"a","runner":1,"protocol":2,"facts":{}}\n'
HUGE, NO_NUMBERS = 10**30, ["x", [4], {}, None, True]
VISIT = {"round": 2, "cell": OTHER, "times_ns": [7, 9]}
MICRO, LOOK = {"name": "launch", "time_ns": 7.0}, {"others": 0.5}
CELL = {"name": "a", "variant": "b", "inputs": {"rows": 1.0}, "work": "c", "group": "d", "held_out": False}
BAD_LINES = [
    ("visit", VISIT, "round", [10_000_000, 4, -1, HUGE, 4.5, *NO_NUMBERS]),
    ("visit", VISIT, "cell", ["", 4, None, ["fast"], "x" * 1000]),
    ("visit", VISIT, "times_ns", [[], 7, None, *([7, bad] for bad in (0, -5, HUGE, float("nan"), 4.5, *NO_NUMBERS))]),
    ("visit", VISIT, "unheard_of", [1]),
    ("micro", MICRO, "time_ns", [0, -5, float("nan"), float("inf"), 10**400, "7", [7], None]),
    ("micro", MICRO, "name", [7, None, ["launch"], "x" * 1000]),
    ("canary", LOOK, "times_ns", [7, None, {"upload": -1}]),
    ("cells", {}, "cells", [None, 7, CELL, [CELL, CELL], [CELL | {"held_out": 3}], [CELL | {"inputs": {"rows": "x"}}]]),
    ("abacus", {}, "kind", ["abacus", None]),
    ("header", {}, "header", [1]),
]


def refused(path, said):
    """Check that a file is refused in one short line that names it, and left as it was."""
    before = path.read_bytes()
    with pytest.raises(ValueError, match=said) as refusal:
        read_samples(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 500
    assert path.read_bytes() == before


def test_what_is_no_samples_file_or_line_is_refused_by_name_and_good_lines_are_taken(written):
    path, log = written
    before = path.read_bytes()
    number = before.count(b"\n") + 1
    for content, said in (
        (b"", "no header"),
        (b'{"kind":"visit","round":0,"cell":"a","times_ns":[1]}\n', "line 1: expected a header"),
        (b"not json\n", "line 1: content: Invalid JSON"),
        (b"\xff\n", "line 1: content: Invalid JSON"),
        (b"[" * 100_000 + b"]" * 100_000 + b"\n", "line 1: content: Invalid JSON: recursion limit exceeded"),
        (NO_FINGERPRINT, "fingerprint: Field required"),
        (before + before, f"line {number}: expected a header in the first line, and in no other"),
    ):
        path.write_bytes(content)
        refused(path, said)
    for kind, good, field, values in BAD_LINES:
        for value in values:
            path.write_bytes(before + json.dumps({"kind": kind, **good, field: value}).encode() + b"\n")
            refused(path, f"line {number}: .*{field}")
    lines = [{"kind": "visit", **VISIT}, {"kind": "micro", **MICRO}, {"kind": "cells", "cells": [CELL]}]
    path.write_bytes(before + "".join(json.dumps(line) + "\n" for line in lines).encode())
    again = read_samples(path)
    assert again.rounds == [*log.rounds[:2], [*log.rounds[2], (OTHER, 9)]]
    assert again.micro == {"launch": [10.0, 7.0]}
    assert [cell.name for cell in again.cells] == ["a"]


def test_a_bad_line_ends_the_resumed_job_in_one_line(written):
    path, _ = written
    content = path.read_text() + '{"kind":"visit","round":10000000}\n'
    path.write_text(content)
    out = path.with_name("a.json")
    result = CliRunner().invoke(app, ["calibrate", "--suite", NAME, "--resume", "--out", str(out), "--quiet"])
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert f"{path}: line {len(content.splitlines())}: visit." in line
    assert "leave out --resume to start again" in line
    assert path.read_text() == content
    assert not out.exists()


def test_samples_of_another_machine_grid_suite_or_version_are_not_resumed(written):
    path, log = written
    assert resumed(path, log.header, CELLS) == log
    here = current_fingerprint().model_copy(update={"jax": "0.1"})
    for change, cells, said in (
        ({"fingerprint": here}, CELLS, "'0.1' here.*leave out --resume"),
        ({"suite": "a:B"}, CELLS, "samples of suite _campaigns:SUITE, and this is suite a:B"),
        ({"runner": 7}, CELLS, "samples of runner 1, and this is runner 7; leave out --resume to start again"),
        ({"protocol": 7}, CELLS, "samples of protocol 2, and this is protocol 7"),
        ({"given": {"a.json": "0" * 64}}, CELLS, "other learned models; give the same --model"),
        ({}, CELLS[:1], "another grid"),
    ):
        with pytest.raises(ValueError, match=said):
            resumed(path, log.header.model_copy(update=change), cells)
