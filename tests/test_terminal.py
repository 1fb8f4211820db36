"""What the commands print: tables, progress, and nothing that steers a terminal."""

import io
import json
import re
from pathlib import Path

import pytest
from _content import content, sealed
from rich.console import Console
from typer.testing import CliRunner

from calibrate.cli import app
from calibrate.command_line import say_source, warn
from calibrate.terminal import Deadline, Progress, console, heading_text, print_rows
from rlxjax import load_calibration
from rlxjax.calibration import MachineMismatchWarning


def test_a_table_holds_every_character_of_its_cells_on_any_terminal():
    rows = [
        {"strategy": name, **{f"time {i} (ns)": 1e4 * (i + 1) for i in range(6)}}
        for name in ("fused", "host", "[red]block")
    ]
    cells = [text for row in rows for text in (row["strategy"], *(f"{i + 1}0 us" for i in range(6)))]
    for width in (40, 1000):
        shown = Console(file=io.StringIO(), width=width)
        print_rows(shown, "What each [red]takes", rows)
        text = shown.file.getvalue()
        assert "What each [red]takes" in text
        assert all(len(line) <= width for line in text.splitlines())
        assert width < 80 or all(text.count(cell) == cells.count(cell) for cell in cells)
        # A cell that is folded keeps all its characters.
        letters, given = (
            re.sub(r"[\s─]", "", text),
            "".join(["What each [red]takes", *map(heading_text, rows[0]), *cells]),
        )
        assert sorted(letters) == sorted(re.sub(r"\s", "", given))


def test_progress_says_the_time_left_on_a_terminal_and_a_line_a_phase_elsewhere_and_nothing_if_quiet():
    for is_terminal, ends_s, left in ((True, 1e9, " s left"), (True, 0.0, "overdue"), (False, 0, "")):
        shown = Console(file=io.StringIO(), width=120, force_terminal=is_terminal)
        progress = Progress(shown, ends_s=ends_s)
        with progress.waiting("starting JAX"):
            pass
        with progress.phase("measuring", total=4) as advance:
            advance()
        with progress.phase("compiling", Deadline(ends_s), what="program") as advance:
            advance()
        text = shown.file.getvalue()
        for said in ("starting JAX", "1/4", "1 program", left or "overdue"):
            assert (said in text) == is_terminal
        assert ("s left" in text) == (left == " s left")
        assert re.search(r"compiling: \d+\.\d s$", text)
        assert is_terminal or text.count("\n") == 2
    shown = Console(file=io.StringIO(), force_terminal=True)
    progress = Progress(shown, is_quiet=True)
    with progress.waiting("starting JAX"), progress.phase("measuring") as advance:
        advance()
    assert shown.file.getvalue() == ""


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
        lambda: print_rows(console(), EVIL, [{EVIL: EVIL}]),
    ):
        print_it()
        said.append("".join(capsys.readouterr()))
    said.append(CliRunner().invoke(app, ["predict", f"{EVIL}.json", "--batch", "8"]).stderr)
    for text in said:
        assert r"a\x1b[31m\x07\u202eb\x9b2J\x7f" in text
        assert all(c.isprintable() or c == "\n" for c in text)
    assert said[2].count("\n") == 1
