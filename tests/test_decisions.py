"""What is remembered is whole and stays so, no database stops a choice, and the commands show and change it."""

import contextlib
import dataclasses
import json
import math
import re
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from _content import sealed
from _documented import assert_documented
from _pages import Document
from typer.testing import CliRunner

from calibrate.cli import app
from calibrate.report.calibration import decided_sections
from calibrate.report.page import page
from rlxjax._files import digest_of
from rlxjax.calibration import MachineMismatchWarning, current_fingerprint, load_calibration, sections_of_file
from rlxjax.choices import Choice, Memory, Way, digest_of_model
from rlxjax.choices._memory import write_the_rest

HERE = current_fingerprint()


def decision(number=0, **changes):
    """Return a decision between two strategies, both measured, and one that failed; each number has its own key."""
    run = {"variant": "fused_top_k", "inputs": {"batch": 64.0, "n_fft": 256.0, "k": 16.0, "n_segments": 2.0}}
    fused = Way(
        "fused",
        content="f0",
        runs=(run, run),
        predicted_ns=1.5e5,
        predicted_interval_ns=(1e5, 1.8e5),
        measured_ns=1.2e5,
        measured_interval_ns=(1.1e5, 1.4e5),
        compile_s=0.25,
        in_domain=True,
        extra_ns=3.0,
    )
    is_tie = changes.get("is_tie", False)
    host = Way("host", content="40", measured_ns=2e5, measured_interval_ns=(1.9e5, 2.2e5), is_tie=is_tie)
    fields = {
        "name": "fused",
        "by": "measured",
        "alternatives": (fused, host, Way("block", content="b0", failed="it asks for 80 GB")),
        "key": digest_of({"number": number}),
        "context": "c0",
        "kind": "welch",
        "label": "batch 64, n_fft 256, k 16",
        "probability": 0.995,
        "rounds": 12,
        "measuring_s": 0.5,
        "machine": HERE,
        "created": f"2026-01-01T00:00:{number:02}+00:00",
    }
    return Choice(**fields | changes)


@pytest.fixture
def path(tmp_path, monkeypatch):
    """The database of a user's own, which nobody has made so far."""
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "decisions.sqlite"


@pytest.fixture
def memory(path):
    """It, asked as the commands do: what is wrong is an error."""
    return Memory(strict=True)


def test_what_is_kept_comes_back_whole_the_newest_first_and_reading_makes_no_file(memory, path):
    assert (memory.look_up(decision().key), memory.all(), memory.forget(None)) == (None, [], 0)
    assert not path.parent.exists()
    kept = [decision(0), decision(1, context="c1"), decision(2, kind="functions", name="host", is_tie=True)]
    for one in kept:
        memory.keep(one)
    assert [memory.look_up(one.key) for one in kept] == kept
    assert memory.all() == Memory(path).all() == kept[::-1]
    assert memory.all(context="c0") == [kept[2], kept[0]]
    assert memory.all("c1", "functions") == []
    replaced = decision(0, rounds=99)
    memory.keep(replaced)
    assert memory.look_up(replaced.key) == replaced
    assert memory.forget([kept[0].key, "none"]) == 1
    assert memory.all() == [kept[2], kept[1]]
    assert list(path.parent.iterdir()) == [path]


def test_a_pin_chooses_and_stays_when_the_choice_is_measured_anew(memory):
    memory.keep(decision())
    key = decision().key
    memory.pin(key, "host")
    memory.keep(decision(rounds=99))
    found = memory.look_up(key)
    assert (found.name, found.by, found.without_pin, found.rounds) == ("host", "pinned", "fused", 99)
    assert found.next_best.name == "fused"
    without_it = decision(alternatives=decision().alternatives[:1])
    memory.keep(without_it)
    assert memory.look_up(key) == without_it  # nothing is chosen that is no alternative any more
    memory.keep(decision())
    memory.pin(key, None)
    assert memory.look_up(key) == decision()
    for name, said in (("fast", "expected one of fused, host, block, got 'fast'"), ("block", "it asks for 80 GB")):
        with pytest.raises(ValueError, match=said):
            memory.pin(key, name)


#: Processes that write entries whose parts all name one number, each killed while it writes: there is a journal then.
WRITERS = """
import os, signal, sys, time
from dataclasses import replace
from rlxjax.choices import Memory
memory = Memory(sys.argv[1], strict=True)
one = memory.all()[0]
for turn in range(3):
    worker = os.fork()
    number = 0
    while not worker:
        text = f"{turn}.{number} " * 1000
        alternatives = tuple(replace(each, name=text) for each in one.alternatives[:1])
        key = f"{turn}.{number % 3}"
        memory.keep(replace(one, key=key, name=text, label=text, alternatives=alternatives))
        os.write(1, f"{key} {number}\\n".encode())
        number += 1
    time.sleep(0.03)
    ends = time.monotonic() + 1
    while not os.path.exists(f"{sys.argv[1]}-journal") and time.monotonic() < ends:
        pass
    os.kill(worker, signal.SIGKILL)
    assert os.waitpid(worker, 0)[1] == signal.SIGKILL
    if os.path.exists(f"{sys.argv[1]}-journal"):
        os.write(1, f"undone {turn}\\n".encode())
"""


@pytest.mark.slow  # writers that are killed are processes of their own; `.ci/run` runs it
def test_a_process_that_is_killed_leaves_whole_entries_to_those_beside_it(memory, path):
    memory.keep(decision())
    command = [sys.executable, "-c", WRITERS, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writers:
        own = 0
        while writers.poll() is None:
            memory.keep(decision(own % 60))
            own += 1
        written = dict(line.split() for line in writers.stdout)
    assert writers.returncode == 0
    assert "undone" in written
    del written["undone"]
    database = made(path)
    assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    database.close()
    found = {one.key: one for one in memory.all()}
    assert sum("." not in key for key in found) == min(own, 60)
    for key, number in written.items():  # what was said to be kept is there, or what came after it
        parts = {found[key].label, *(one.name for one in found[key].alternatives)}
        assert len(parts) == 1
        assert int(found[key].label.split()[0].partition(".")[2]) >= int(number)


def made(path, *statements):
    """Make or change a database, and leave it open."""
    path.parent.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        database.execute(statement)
    return database


def write_over(path):
    path.write_bytes(b"SQLite format 3\0" + path.read_bytes()[16:200] + b"\xff" * 8000)


SPOILT = {
    "no database": (lambda path: path.write_text("once upon a time " * 100), "move it to another place"),
    "damaged": (write_over, "move it to another place"),
    "a folder": (lambda path: [path.unlink(), path.mkdir()], "set RLXJAX_HOME"),
    "locked": (lambda path: made(path, "BEGIN EXCLUSIVE"), "another process holds the database"),
    "newer": (lambda path: made(path, "PRAGMA user_version = 9"), "install a newer rlxjax"),
    "another's": (lambda path: made(path, "PRAGMA application_id = 7"), "another program"),
    "without its table": (lambda path: made(path, "DROP TABLE decisions"), "move it to another place"),
}


# Who holds it is waited for a while.
@pytest.mark.parametrize("how", [pytest.param(how, marks=[pytest.mark.slow] * (how == "locked")) for how in SPOILT])
def test_a_database_that_cannot_be_used_is_one_warning_to_a_choice_and_one_line_to_a_command(how, path):
    spoil, said = SPOILT[how]
    memory = Memory()
    memory.keep(decision())
    held = spoil(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for each in (memory, Memory()):
            assert (each.look_up(decision().key), each.all()) == (None, [])
            each.keep(decision(1))
    (warned,) = [str(one.message) for one in caught]
    for text in (str(path), said, "choices are made without"):
        assert text in warned
    result = CliRunner().invoke(app, ["decisions", "pin", "abc", "host"])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"error: {path}: ")
    assert said in result.stderr
    if isinstance(held, sqlite3.Connection):
        held.close()


def test_an_empty_database_is_read_while_another_process_is_about_to_make_it(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        memory = Memory(strict=True)
        assert (memory.look_up(decision().key), memory.all()) == (None, [])
    assert path.stat().st_size == 0


def test_what_could_not_be_kept_is_written_with_the_next_answer_or_at_the_end(path):
    path.parent.touch()
    memory = Memory()
    assert memory.look_up(decision().key) is None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(3):  # no folder can be made
            memory.keep(decision(number))
    assert [bool(re.search(f"{path}: cannot be written .*set RLXJAX_HOME", str(one.message))) for one in caught] == [
        True
    ]
    with pytest.raises(ValueError, match=f"{path}: cannot be written .*set RLXJAX_HOME"):
        Memory(strict=True).keep(decision(2))
    path.parent.unlink()
    memory.keep(decision(3))
    assert {one.key for one in memory.all()} == {decision(number).key for number in range(4)}
    refused = "CREATE TRIGGER t BEFORE INSERT ON decisions BEGIN SELECT RAISE(ABORT, 'not here'); END"
    made(path, refused).close()
    memory.keep(decision(4))
    assert len(memory.all()) == 4  # what may be read is still read
    made(path, "DROP TRIGGER t").close()
    write_the_rest()  # as when the process ends
    assert len(memory.all()) == 5


@pytest.mark.filterwarnings("error")
def test_writers_wait_for_each_other_and_lose_nothing(path):
    def write(own):
        for number in range(10):
            Memory().keep(decision(number, key=f"{own}.{number}"))

    Memory().keep(decision())
    held = made(path, "BEGIN EXCLUSIVE")
    writers = [threading.Thread(target=write, args=(own,)) for own in range(4)]
    for writer in writers:
        writer.start()
    time.sleep(0.3)
    held.close()
    for writer in writers:
        writer.join()
    assert len(Memory().all()) == 41


def test_one_bad_entry_is_warned_of_and_the_others_are_used_and_the_command_drops_it(memory, path):
    for number in (0, 1):
        memory.keep(decision(number))
    key = decision().key
    made(path, f"UPDATE decisions SET content = substr(content, 1, 99) WHERE key = '{key}'").close()
    with pytest.warns(UserWarning, match=f"{path}.*`rlxjax decisions forget {key[:8]}`"):
        assert Memory().look_up(key) is None
    assert Memory().look_up(decision(1).key) == decision(1)
    assert CliRunner().invoke(app, ["decisions", "list"]).exit_code == 2
    assert CliRunner().invoke(app, ["decisions", "forget", key[:8]]).exit_code == 0
    assert memory.all() == [decision(1)]


def test_a_database_that_is_moved_is_not_written_where_it_was(memory, path):
    memory.keep(decision())
    path.rename(path.with_name("moved"))
    assert memory.all() == []
    memory.keep(decision(1))
    assert memory.all() == [decision(1)]


def test_an_export_is_the_same_here_and_of_other_machines_nothing_is_taken(memory, path, tmp_path):
    here, elsewhere = decision(0), decision(1, machine=HERE.model_copy(update={"cores": HERE.cores + 1}))
    software = decision(2, machine=HERE.model_copy(update={"jaxlib": "0.0"}))
    for one in (here, elsewhere, software):
        memory.keep(one)
    memory.pin(here.key, "host")
    before, file = memory.all(), tmp_path / "export.json"
    assert memory.export(file) == 3
    memory.forget(None)
    assert memory.load(file) == (2, 0, 1, ())
    assert memory.all() == [one for one in before if one.key != elsewhere.key]
    assert memory.load(file) == (0, 2, 1, ())
    memory.keep(decision(0, created="2025-01-01T00:00:00+00:00"))
    memory.keep(newer := decision(2, created="2027-01-01T00:00:00+00:00"))
    assert memory.load(file) == (1, 1, 1, ())
    assert memory.all() == [newer, before[2]]
    with pytest.raises(ValueError, match="expected another file than the database"):
        memory.export(path)
    for spoil, said in (
        (lambda content: sealed(content | {"schema_version": 2}), "2 is newer than 1"),
        (lambda content: sealed(content | {"decisions": [7]}), "decisions.0"),
    ):
        content = json.loads(file.read_text())
        spoilt = tmp_path / "spoilt.json"
        spoilt.write_text(json.dumps(spoil(content) or content))
        with pytest.raises(ValueError, match=f"{spoilt}: .*{said}"):
            memory.load(spoilt)


#: What no measurement says: changes of a decision, of its first alternative, and of the sizes of that one's first run.
NONSENSE = [
    *({"inputs": {"batch": size}} for size in (-64.0, 0.5, 1e300, "many", None, math.nan, math.inf, True, [64.0])),
    *({"inputs": sizes} for sizes in ({"n_fft": 255.0}, {"k": 1e6}, {"k": 0.0}, {"n_fft": 2.0**70})),
    *({"first": {"measured_ns": time_ns}} for time_ns in (1e308, 1e-300, 0.0, -1.0, math.nan, "fast")),
    *({"first": {name: 1e5}} for name in ("predicted_interval_ns", "runs", "failed")),
    *({"first": {"measured_interval_ns": ends}} for ends in ([1.3e5, 1.4e5], [1.1e5, 1e5], [1.1e5, 1e300])),
    {"first": {"predicted_ns": -1.0}}, {"first": {"predicted_ns": 1e300}}, {"first": {"predicted_ns": 1e-300}},
    {"first": {"predicted_interval_ns": [2.0, 1.0]}}, {"first": {"predicted_interval_ns": [-1.0, 1.0]}},
    {"first": {"failed": "it was chosen, and fails"}}, {"first": {"name": "another"}}, {"first": {"surprise": 1}},
    {"first": {"runs": [{}]}}, {"first": {"runs": [{"variant": "none", "inputs": {}}]}}, {"first": {"runs": [["a"]]}},
    {"first": {"runs": [{"variant": 3, "inputs": {}}]}}, {"first": {"runs": [{"variant": "host", "inputs": {}}]}},
    {"first": {"fn": "print"}}, {"fn": "print"},
    {"probability": 1.5}, {"probability": -0.1}, {"probability": None}, {"probability": math.nan},
    {"rounds": -1}, {"rounds": 1.5}, {"rounds": "12"}, {"regret": -0.1}, {"regret": math.inf},
    {"created": "9999-01-01T00:00:00+00:00"}, {"created": "yesterday"}, {"created": 7},
    {"created": "2026-01-01T00:00:00"}, {"is_tie": "no"}, {"by": "model"},
    {"alternatives": []}, {"alternatives": None}, {"name": "block"}, {"without_pin": "none"}, {"key": 7},
    {"kind": None}, {"machine": {}}, {"machine": None},
]  # fmt: skip


def nonsense(number, change):
    """Return a decision as JSON has it, with something changed."""
    entry = json.loads(json.dumps(decision(number).as_dict()))
    first = entry["alternatives"][0]
    first["runs"][0]["inputs"] |= change.get("inputs", {})
    first |= change.get("first", {})
    return entry | {name: value for name, value in change.items() if name not in ("inputs", "first")}


def test_of_an_import_what_no_measurement_says_is_named_and_left_out_and_the_rest_is_taken(memory, tmp_path):
    file = tmp_path / "export.json"
    for number, change in enumerate(NONSENSE):
        entries = [nonsense(0, {}), nonsense(number + 1, change)]
        file.write_text(json.dumps(sealed({"schema_version": 1, "decisions": entries})))
        done = memory.load(file)
        assert done[1:3] == (done[0] != 1, 0), change
        assert len(done.left_out) == 1, change
        assert done.left_out[0].startswith("entry 1: " if "key" in change else f"{decision(number + 1).key[:8]}: "), (
            change
        )
        assert "\n" not in done.left_out[0]
        assert memory.all() == [decision(0)], change
    result = CliRunner().invoke(app, ["decisions", "import", str(file)])
    assert result.exit_code == 1
    assert result.stderr == f"warning: {done.left_out[0]}; it is left out\n"


def test_what_somebody_wrote_into_the_database_is_checked_alike_and_the_others_are_used(memory, path):
    memory.keep(decision(0))
    for change in NONSENSE[::3]:  # by the check that imports have, of which all are asked
        if "created" in change or change.get("inputs") or "variant" in str(change):
            continue  # which the model that learns from it checks, or an import
        entry, warned = json.dumps(nonsense(1, change)), Memory(path)
        made(path, "DELETE FROM decisions WHERE key = 'bad'").execute(
            "INSERT INTO decisions VALUES ('bad', 'c0', 'welch', '2026-01-01T00:00:01+00:00', ?, NULL)", [entry]
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert (warned.look_up("bad"), warned.all()) == (None, [decision(0)]), change
        with pytest.raises(ValueError, match="the entry bad: .*drop it with"):
            memory.all()


# --- Commands ------------------------------------------------------------------------------------


def invoke(*arguments, status=0):
    result = CliRunner().invoke(app, ["decisions", *map(str, arguments)])
    assert result.exit_code == status, result.stderr
    assert status == 0 or (result.stdout, result.stderr.count("\n")) == ("", 1)
    return " ".join((result.stderr if status else result.stdout).split())


def printed(command, *arguments):
    found = json.loads(CliRunner().invoke(app, ["decisions", command, *arguments, "--json"]).stdout)
    assert_documented(f"decisions {command}", found)
    return found


def test_the_commands_show_what_runs_by_what_it_was_chosen_and_that_a_tie_is_one(memory):
    memory.keep(decision(0, is_tie=True))
    memory.keep(decision(1, label="a program of many words, " * 4 + "that ends"))
    key = decision().key
    assert invoke("pin", decision(1).key, "host").endswith("many words, that ends: host, pinned")
    pinned, tie = printed("list")["decisions"]
    assert (pinned["name"], pinned["by"], pinned["next_best"], pinned["time_ns"]) == ("host", "pinned", "fused", 2e5)
    assert (tie["name"], tie["by"], tie["is_tie"], tie["next_best_ns"]) == ("fused", "measured", True, 2e5)
    text = invoke("list")
    assert text.startswith("2 decisions: ")
    assert f"{key[:8]} fused 120 us a tie 2026-01-01 {tie['label']}" in text
    assert f"{decision(1).key[:8]} host 200 us pinned 2026-01-01 a program" in text
    text, found = invoke("show", key[:8]), printed("show", key)
    assert "a tie: fused and host are not told apart after 12 rounds" in text
    assert "fused measured 120 us (110 to 140) predicted 150 us (100 to 180)" in text
    assert "host measured 200 us (190 to 220) not told apart" in text
    assert "block failed: it asks for 80 GB" in text
    assert f"key {key}" in text
    assert found["alternatives"][0]["measured_interval_ns"] == [1.1e5, 1.4e5]
    assert found["machine"] == HERE.model_dump(mode="json")
    text = invoke("show", decision(1).key)
    sure = "over 99 % sure after 12 rounds that no other alternative is more than 2 % faster"
    assert f"fused is the fastest: {sure}; a person pinned host, which runs" in text
    assert "host measured 200 us (190 to 220) 67 % slower" in text
    assert invoke("pin", decision(1).key, "--off").endswith("fused, measured")


def test_the_commands_say_that_nothing_is_there_and_how_much_came_and_went(memory, path, tmp_path):
    file = tmp_path / "export.json"
    assert invoke("list") == f"nothing is remembered in {path}"
    assert printed("list") == {"decisions": []}
    assert invoke("forget", "--all") == "0 decisions forgotten"
    assert not path.parent.exists()
    for number in range(3):
        memory.keep(decision(number))
    assert invoke("export", file) == f"3 decisions in {file}"
    assert invoke("forget", decision(1).key[:10], decision(1).key) == "1 decision forgotten"
    said = "1 decision imported, 2 already known, 0 from another kind of machine left out"
    assert invoke("import", file) == said
    assert invoke("forget", "--all") == "3 decisions forgotten"


def test_bad_input_is_one_line_and_status_2(memory, tmp_path):
    memory.keep(decision(key="ab12"))
    memory.keep(decision(key="ab34"))
    for arguments, said in (
        (["show", "cd"], "no key begins with 'cd'"),
        (["show", ""], "several keys begin"),
        (["pin", "ab", "host"], "several keys begin with 'ab'"),
        (["pin", "ab12", "fast"], "expected one of fused, host, block, got 'fast'"),
        (["pin", "ab12", "block"], "block could not run here (it asks for 80 GB)"),
        (["pin", "ab12"], "expected fused, host, block or --off, got neither"),
        (["pin", "ab12", "host", "--off"], "got host and --off"),
        (["forget"], "expected keys or --all, got neither"),
        (["forget", "ab12", "--all"], "got both"),
        (["forget", "ab12", "cd"], "no key begins with 'cd'"),
        (["import", tmp_path / "none.json"], "no such file"),
        (["export", tmp_path], "expected a file to write, got the folder"),
        (["export", memory.path], "expected another file than the database itself"),
    ):
        assert said in invoke(*arguments, status=2)
    assert memory.forget(["ab34"]) == 1
    assert "no key begins with ''" in invoke("forget", "", status=2)


def test_an_explanation_and_the_page_of_a_calibration_say_what_was_decided_beside_it(memory):
    path = Path(__file__).parents[1] / "notebooks/data/calibration-cpu.json"
    content, *_ = sections_of_file(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MachineMismatchWarning)
        calibration = load_calibration(path)
    there, own = content.models["welch"].fingerprint, digest_of_model(calibration.of("welch"))
    sizes = {"batch": 64, "n_fft": 256, "k": 16, "n_segments": 2}

    def explained(*options):
        asked = [part for name, size in sizes.items() for part in (f"--{name.replace('_', '-')}", str(size))]
        asked = ["explain", str(path), *asked, *options]
        result = CliRunner().invoke(app, [part.replace("--n-segments", "--segments") for part in asked])
        assert result.exit_code == 0, result.stderr
        return result.stdout

    run = {"variant": "fused_top_k", "inputs": {name: float(size) for name, size in sizes.items()}}
    alternatives = tuple(dataclasses.replace(one, runs=(run,)) for one in decision().alternatives)
    fields = {"alternatives": alternatives, "is_tie": True}
    memory.keep(decision(0, **fields))
    memory.keep(decision(1, **fields, calibration="of another calibration"))
    elsewhere = HERE.model_copy(update={"cores": HERE.cores + there.cores})
    memory.keep(decision(2, **fields, calibration=own, machine=elsewhere))
    assert json.loads(explained("--json"))["remembered"] is None
    memory.keep(decision(3, **fields, calibration=own))
    said = "measured here: fused 120 us, host 200 us; a tie: fused and others are not told apart after 12 rounds"
    found = json.loads(explained("--json"))
    assert_documented("explain", found)
    assert found["remembered"]["key"] == decision(3).key
    memory.pin(decision(3).key, "host")
    assert f"{said}; a person pinned host, which runs" in explained().replace("\n", " ")
    memory.forget(None)
    assert [*decided_sections(content, calibration)] == []
    memory.keep(decision(0, **fields, machine=there))
    memory.keep(decision(1, machine=there, calibration=own, label="<b>"))
    memory.keep(decision(2, machine=there, kind="functions"))
    memory.keep(decision(3, machine=elsewhere, calibration=own))
    text = page("", "", [*decided_sections(content, calibration)], "", "calibration")
    rows = Document(text).tables["The newest first"]
    assert [row["workload"] for row in rows] == ["<b>", decision().label]
    assert [row["beside this calibration"] for row in rows] == ["yes", "no"]
    assert [(row["chosen"], row["by"], row["a tie"]) for row in rows] == [
        ("fused", "measured", "no"),
        ("fused", "measured", "yes"),
    ]
    assert [row["takes"] for row in rows] == [1.2e5, 1.2e5]
    assert [row["its time"] for row in rows] == [2e5, 2e5]
