"""Sentences and tables of 80 columns, and progress."""

import io
import json
import re
from pathlib import Path

import pytest
from _content import content, sealed
from _documented import assert_narrow
from rich.console import Console
from typer.testing import CliRunner

from calibrate.cli import app
from calibrate.command_line import say_source
from calibrate.printing import TEXT_WIDTH, filled, print_table
from calibrate.progress import Progress
from calibrate.refusals import warn
from rlxjax import load_calibration
from rlxjax.calibration import MachineMismatchWarning


def test_what_is_copied_stays_on_one_line_and_the_rest_is_filled():
    command = "`rlxjax refit 'a file with spaces.samples.jsonl' --out calibration.json --force`"
    text = f"{'word ' * 30}take it with {command}, or see /a folder/of mine/x.json."
    lines = filled(text, "/a folder/of mine/x.json", indent="  ").splitlines()
    assert all(line.startswith("  ") for line in lines)
    assert any(command in line for line in lines)
    assert any("/a folder/of mine/x.json." in line for line in lines)
    assert all(len(line) <= TEXT_WIDTH for line in lines if command not in line)
    assert " ".join(" ".join(lines).split()) == text


def printed(*table, width=TEXT_WIDTH, **options):
    console = Console(file=io.StringIO(), width=width)
    print_table(console, *table, **options)
    return console.file.getvalue()


@pytest.mark.parametrize("n_columns", [1, 3, 9, 40])
def test_a_table_of_any_number_of_columns_is_80_wide_and_holds_every_cell(n_columns):
    headings = ["strategy", *(f"time of number {i}" for i in range(n_columns))]
    rows = [[name, *(f"{name[0]}{i:07d}" for i in range(n_columns))] for name in ("fused", "host", "[red]block")]
    text = printed("What each [red]takes", headings, rows)
    assert_narrow(text)
    words = text.split()
    for row in rows:
        assert all(words.count(cell) == 1 for cell in row[1:])
    n_parts = text.count("What each [red]takes")
    assert words.count("[red]block") == words.count("strategy") == n_parts
    assert (n_parts == 1) == (n_columns < 9)


def test_progress_says_the_time_left_on_a_terminal_and_a_line_a_phase_elsewhere():
    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), width=TEXT_WIDTH, force_terminal=is_terminal)
        progress = Progress(console, ends_s=float("inf"))
        with progress.waiting("starting JAX"):
            pass
        with progress.phase("measuring", total=4) as advance:
            advance()
        text = console.file.getvalue()
        assert ("starting JAX" in text, "1/4" in text, "inf s left" in text) == (is_terminal,) * 3
        assert re.search(r"measuring: \d+\.\d s$", text)
        assert is_terminal or text.count("\n") == 1


def test_quiet_progress_says_nothing():
    console = Console(file=io.StringIO(), force_terminal=True)
    progress = Progress(console, is_quiet=True)
    with progress.waiting("starting JAX"), progress.phase("measuring") as advance:
        advance()
    assert console.file.getvalue() == ""


EVIL = "a\x1b[31m\x07\u202eb\x9b2J\x7f\u2028"


def test_what_a_file_says_does_not_steer_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    spoilt = content()
    spoilt["models"]["welch"]["fingerprint"]["device_kind"] = EVIL
    spoilt["models"]["welch"]["cautions"] = [EVIL]
    Path("evil.json").write_text(json.dumps(sealed(spoilt)))
    with pytest.warns(MachineMismatchWarning) as warned:
        known = load_calibration("evil.json")
    said = []
    for print_it in (
        lambda: say_source(known, "welch"),
        lambda: warn(warned[0].message),
        lambda: warn(f"{EVIL}\nerror: no"),
        lambda: print_table(Console(width=1000), EVIL, [EVIL], [[EVIL]]),
    ):
        print_it()
        said.append("".join(capsys.readouterr()))
    said.append(CliRunner().invoke(app, ["predict", f"{EVIL}.json", "--batch", "8"]).stderr)
    for text in said:
        assert r"a\x1b[31m\x07\u202eb\x9b2J\x7f" in text
        assert all(c.isprintable() or c == "\n" for c in text)
    assert said[2].count("\n") == 1
