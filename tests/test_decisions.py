"""What is remembered is whole and stays so, no file and no lock stops a choice, and the commands show and change it."""

import concurrent.futures
import contextlib
import errno
import fcntl
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from _documented import assert_documented
from _pages import Document
from typer.testing import CliRunner

from calibrate.cli import app
from calibrate.report.calibration import decided_sections
from calibrate.report.page import page
from rlxjax._files import digest_of
from rlxjax.calibration import MachineMismatchWarning, current_fingerprint, load_calibration, sections_of_file
from rlxjax.choices import Choice, Memory, Way, _store, digest_of_model
from rlxjax.choices._store import write_the_rest

HERE = current_fingerprint()


def decision(number=0, **changes):
    """Return a decision between two strategies, both measured, and one that failed; each number has its own key."""
    fused = Way(
        "fused",
        content="f0",
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
        "kind": "welch",
        "label": "batch 64, n_fft 256, k 16, n_segments 2",
        "probability": 0.995,
        "rounds": 12,
        "measuring_s": 0.5,
        "machine": HERE,
        "created": f"2026-01-01T00:00:{number:02}+00:00",
    }
    return Choice(**fields | changes)


@pytest.fixture
def path(tmp_path, monkeypatch):
    """The folder of a user's own, which nobody has made so far."""
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "choices"


@pytest.fixture
def memory(path):
    return Memory()


def test_what_is_kept_comes_back_whole_the_newest_first_and_reading_makes_no_file(memory, path):
    assert (memory.look_up(decision().key), memory.all(), memory.forget(None)) == (None, [], 0)
    assert not path.parent.exists()
    kept = [decision(0), decision(1), decision(2, kind="functions", name="host", is_tie=True)]
    for one in kept:
        memory.keep(one)
    assert [memory.look_up(one.key) for one in kept] == kept
    assert memory.all() == Memory(path).all() == kept[::-1]
    assert memory.all("functions") == [kept[2]]
    replaced = decision(0, rounds=99)
    memory.keep(replaced)
    assert memory.look_up(replaced.key) == replaced
    assert memory.forget([kept[0].key, "none"]) == 1
    assert sorted(file.name for file in path.iterdir()) == sorted(f"{one.key}.json" for one in kept[1:])
    shutil.copytree(path, path.with_name("copied"))
    assert Memory(path.with_name("copied")).all() == memory.all() == [kept[2], kept[1]]


def test_a_pin_chooses_and_stays_when_the_choice_is_measured_anew(memory, path):
    memory.keep(decision())
    key = decision().key
    memory.pin(key, "host")
    memory.keep(decision(rounds=99))
    found = memory.look_up(key)
    assert (found.name, found.by, found.without_pin, found.rounds) == ("host", "pinned", "fused", 99)
    assert found.next_best.name == "fused"
    memory.keep(found)  # what is kept is the measurement
    memory.pin(key, None)
    assert memory.look_up(key) == decision(rounds=99)
    (path / f"{key}.pin").write_text("host\n")  # a name, as a person writes it
    assert memory.look_up(key) == found
    for text in ("block", "fast", "", "\0"):  # nothing is chosen that is no alternative that runs
        place = Memory(path.with_name(f"pinned {text!r}"))
        place.keep(decision())
        (place.path / f"{key}.pin").write_text(text)
        with pytest.warns(UserWarning, match=f"{key}.pin: expected one of fused, host, got .*; nothing is pinned"):
            assert place.look_up(key) == decision()
    for name, said in (("fast", "expected one of fused, host, block, got 'fast'"), ("block", "it asks for 80 GB")):
        with pytest.raises(ValueError, match=said):
            memory.pin(key, name)
    assert memory.forget(None) == 1
    assert [*path.iterdir()] == []


#: A process that writes choices whose parts all name one number, until it is killed.
WRITER = """
import sys
from dataclasses import replace
from rlxjax.choices import Memory
memory = Memory(sys.argv[1])
(one,), number = memory.all(), 0
while True:
    text = f"{number} " * 1000
    key = f"key {number % 3}"
    memory.keep(replace(one, key=key, name=text, label=text, alternatives=(replace(one.chosen, name=text),)))
    print(key, number, flush=True)
    number += 1
"""


@pytest.mark.slow  # a writer that is killed is a process of its own; `.ci/run` runs it
@pytest.mark.filterwarnings("error")
def test_a_process_that_is_killed_leaves_whole_choices_to_those_beside_it(memory):
    memory.keep(decision())
    command = [sys.executable, "-c", WRITER, memory.path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        written = dict(line.rsplit(maxsplit=1) for line in itertools.islice(writer.stdout, 60))
        for one in memory.all() * 20:  # a reader sees whole choices, whatever is being written
            memory.keep(one)
        writer.kill()
    found = {one.key: one for one in memory.all()}
    assert len(found) == 4
    for key, number in written.items():  # what was said to be kept is there, or what came after it
        assert {found[key].label} == {own.name for own in found[key].alternatives}
        assert int(found[key].label.split()[0]) >= int(number)


#: What no measurement says: changes of a decision, and of its first alternative.
NONSENSE = [
    *({"first": {"measured_ns": time_ns}} for time_ns in (1e308, 1e-300, 0.0, -1.0, math.nan, "fast")),
    *({"first": {name: 1e5}} for name in ("predicted_interval_ns", "failed")),
    *({"first": {"measured_interval_ns": ends}} for ends in ([1.3e5, 1.4e5], [1.1e5, 1e5], [1.1e5, 1e300])),
    {"first": {"predicted_ns": -1.0}}, {"first": {"predicted_ns": 1e300}}, {"first": {"predicted_ns": 1e-300}},
    {"first": {"predicted_interval_ns": [2.0, 1.0]}}, {"first": {"predicted_interval_ns": [-1.0, 1.0]}},
    {"first": {"failed": "it was chosen, and fails"}}, {"first": {"name": "another"}}, {"first": {"surprise": 1}},
    {"first": {"fn": "print"}}, {"fn": "print"},
    {"probability": 1.5}, {"probability": -0.1}, {"probability": None}, {"probability": math.nan},
    {"rounds": -1}, {"rounds": 1.5}, {"rounds": "12"}, {"regret": -0.1}, {"regret": math.inf},
    {"created": "yesterday"}, {"created": 7}, {"created": "2026-01-01T00:00:00"}, {"is_tie": "no"}, {"by": "model"},
    {"alternatives": []}, {"alternatives": None}, {"name": "block"}, {"without_pin": "none"}, {"key": 7},
    {"key": "of another file"}, {"kind": None}, {"machine": {}}, {"machine": None}, {"schema_version": 0},
]  # fmt: skip


def nonsense(change):
    """Return the text of a choice's file, with something changed."""
    content = {"schema_version": 1, **json.loads(json.dumps(decision().as_dict()))}
    content["alternatives"][0] |= change.get("first", {})
    return json.dumps(content | {name: value for name, value in change.items() if name != "first"})


def test_a_file_that_is_no_choice_of_its_name_is_one_warning_that_says_how_to_remove_it_and_no_choice(path):
    good = nonsense({})
    texts = [*map(nonsense, NONSENSE), good[:99], "", "[]", "[" * 5000, "\0", "once upon a time", b"\xff" * 99]
    for number, text in enumerate(texts):
        memory = Memory(path / str(number))
        memory.keep(decision(1))
        file = memory.path / f"{decision().key}.json"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.warns(UserWarning, match="; remove it with") as caught:
            assert [memory.look_up(decision().key), *memory.all()] == [None, decision(1)], text
        (said,) = [str(one.message) for one in caught]
        assert said.startswith(f"{file}: "), text
        assert f"; remove it with `rlxjax decisions forget {file.name[:8]}`; the choice is made again" in said
        assert "\n" not in said
        memory.keep(decision())
        assert memory.look_up(decision().key) == decision()
    file.write_text(nonsense({"schema_version": 9}))
    with pytest.raises(ValueError, match=f"{file}: .*9 is newer than 1.*install a newer rlxjax$"):
        memory.read(decision().key)


def test_a_damaged_file_is_a_warning_or_one_line_of_a_command_which_also_drops_it(memory):
    for number in (0, 1):
        memory.keep(decision(number))
    (memory.path / f"{decision().key}.json").write_text("once upon a time")
    done = CliRunner().invoke(app, ["decisions", "list"])
    assert (done.exit_code, done.stderr.count("\n")) == (0, 1)
    assert done.stdout.startswith("1 decision: ")
    for command in (["show"], ["pin", "--off"]):
        assert "not whole JSON" in invoke(command[0], decision().key, *command[1:], status=2)
    assert invoke("forget", decision().key[:8]) == "1 decision forgotten"
    assert memory.all() == [decision(1)]


def test_what_cannot_be_written_is_one_warning_stays_in_the_process_and_is_written_at_the_end(path):
    path.parent.touch()  # no folder can be made
    memory = Memory()
    assert memory.look_up(decision().key) is None
    kept = [decision(number) for number in range(3)]
    with pytest.warns(UserWarning, match="cannot be written") as caught:
        assert [memory.keep(one) for one in kept] == [None] * 3
    (said,) = [str(one.message) for one in caught]
    assert re.search(f"^{path}.*: cannot be written .*in this process only; .*set RLXJAX_HOME", said)
    assert memory.look_up(decision(1).key) == decision(1)
    with memory.timing() as is_alone:
        assert is_alone
    with pytest.raises((OSError, ValueError), match="unknown key"):
        memory.pin(decision().key, "host")
    write_the_rest()
    path.parent.unlink()
    write_the_rest()  # as when the process ends
    assert memory.all() == kept[::-1]


# --- Waiting for others that time ----------------------------------------------------------------

#: A process that holds the lock of timing until its input ends, or is stopped meanwhile; its child lives on.
HOLDER = """
import os, sys, time
from rlxjax._files import locked
with locked(sys.argv[1], ".rlxjax.timing.lock"):
    if sys.argv[2] == "fork" and not os.fork():
        os.close(1), time.sleep(10), os._exit(0)
    print(os.getpid(), flush=True)
    input()
"""


@pytest.fixture
def quick(monkeypatch):
    """Waiting takes tenths of a second."""
    monkeypatch.setattr(_store, "SILENT_S", 0.2)
    monkeypatch.setattr(_store, "WARNED_S", 0.2)


def taken(memory, said=None):
    """Return whether this process times alone; with `said`, after a warning that says this."""
    with contextlib.ExitStack() as held:
        if said is not None:
            held.enter_context(pytest.warns(UserWarning, match=said))
        return held.enter_context(memory.timing())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL, "fork"])
def test_whoever_holds_the_lock_and_is_stopped_is_named_and_no_longer_waited_for(how, path, quick):
    memory = Memory()
    memory.keep(decision())
    command = [sys.executable, "-c", HOLDER, path / "any", str(how)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert int(holder.stdout.readline()) == holder.pid
        who = f"process {holder.pid} of {re.escape(socket.gethostname())} holds this lock since 20"
        assert not taken(memory, f"^{path}/.rlxjax.timing.lock: {who}.*times all the same")
        holder.send_signal(signal.SIGKILL if how == "fork" else how)
        if how != signal.SIGSTOP:
            holder.wait()
        begun_s = time.monotonic()
        assert taken(memory) == (how != signal.SIGSTOP)  # a process waits for the same holder only once
        assert time.monotonic() - begun_s < 0.2
        holder.kill()
    assert taken(memory)


@pytest.mark.filterwarnings("error")
def test_threads_of_a_process_time_one_after_the_other_or_say_for_whom_they_wait(path, quick, monkeypatch):
    for folder in (path, path.parent / "file"):  # the latter cannot be made
        folder.parent.mkdir(exist_ok=True)
        memory = Memory(folder)
        monkeypatch.setattr(threading.current_thread(), "name", folder.name)
        with memory.timing(), memory.timing() as is_alone, concurrent.futures.ThreadPoolExecutor(1) as pool:
            assert is_alone
            assert not pool.submit(taken, memory, f"^{folder.name} of this process times programs since").result()
        assert taken(memory)
        (path.parent / "file").touch()


@pytest.mark.filterwarnings("error")
def test_a_lock_of_another_host_is_old_after_ten_minutes_where_the_system_has_no_locks(path, quick, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    memory, held = Memory(), path / ".rlxjax.timing.lock.held"
    path.mkdir(parents=True)
    for text, said in (("7\nelsewhere\n", "process 7 of elsewhere"), ("", "another process")):
        held.write_text(text)
        assert not taken(memory, f"^{held}: {said} holds this lock since 20")
        os.utime(held, (time.time() - 601.0,) * 2)
        assert taken(memory)
        assert not held.exists()


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


def test_the_commands_say_that_nothing_is_there_and_how_much_went(memory, path):
    assert invoke("list") == f"nothing is remembered in {path}"
    assert printed("list") == {"decisions": []}
    assert invoke("forget", "--all") == "0 decisions forgotten"
    assert not path.parent.exists()
    for number in range(3):
        memory.keep(decision(number))
    assert invoke("forget", decision(1).key[:10], decision(1).key) == "1 decision forgotten"
    assert invoke("forget", "--all") == "2 decisions forgotten"


def test_bad_input_is_one_line_and_status_2(memory):
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

    fields = {"is_tie": True}
    memory.keep(decision(0, **fields))
    memory.keep(decision(1, **fields, calibration="of another calibration"))
    elsewhere = HERE.model_copy(update={"cores": HERE.cores + there.cores})
    memory.keep(decision(2, **fields, calibration=own, machine=elsewhere))
    assert json.loads(explained("--json"))["remembered"] is None
    memory.keep(decision(3, **fields, calibration=own))
    said = "measured here: fused 120 us, host 200 us; a tie: fused and host are not told apart after 12 rounds"
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
