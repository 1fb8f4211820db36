"""Files do not run code: no command imports what a file names, whatever text stands wherever its reader takes one."""

import copy
import json
import re
import shutil
import sys
import warnings
from pathlib import Path
from typing import get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from _content import content, sealed
from test_damage import ADVICE, first_lines
from test_decisions import decision
from typer.main import get_command
from typer.testing import CliRunner

import rlxjax as rx
from calibrate.cli import app
from calibrate.report.advice import read_advice
from calibrate.samples import read_samples
from rlxjax import devices
from rlxjax.calibration import load_calibration
from rlxjax.choices import Memory

#: What the files name: an object of a module in the current folder, which leaves a mark when it is imported.
EVIL = "evil_module:SUITE"
#: Parts by which a file is known as this machine's, and words of a list that the schema has.
KEPT = ("fingerprint", "machine", "unit", "units", "provenance")
#: What a command is given beside a hostile file, arguments and options, so that it goes far and ends in a moment.
BESIDE = {
    "calibrate": ([], ["--resume", "--suite", "_campaigns:SUITE", "--quiet"]),
    "validate": ([], ["--budget", "5"]),
    "predict": ([], ["--batch", "8"]),
    "explain": ([], ["--batch", "8"]),
    "profile": (["operator:neg"], ["--arg", "f32[4]"]),
    "advise": (["operator:neg", "operator:neg"], ["--arg", "f32[4]"]),
    "refit": (["welch.welch.samples.jsonl"], []),
    "evaluate": (["rows.parquet", "sink"], ["--model", "welch"]),
    "report": (["calibration.json"], ["--samples", "learned.json", "--against", "learned.json"]),
}
#: Options and arguments that are words of the user, and name no file.
WORDS = ("suite", "function", "stages", "args", "arg", "key", "keys", "name", "column", "strategy", "sort_by")
COMMANDS = {
    " ".join([name, *([own.name] if hasattr(group, "commands") else [])]): own
    for name, group in get_command(app).commands.items()
    for own in getattr(group, "commands", {name: group}).values()
}


def texts(value, path=()):
    """Yield the place of every text in a JSON value, but for what it is known by."""
    if isinstance(value, str):
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        if key not in KEPT:
            yield from texts(inner, (*path, key))


def changed(good, places):
    """Return a JSON value with the evil name in some places."""
    good = copy.deepcopy(good)
    for place in places:
        inner = good
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = EVIL
    return good


def made_hostile(good, path, write, read):
    """Write a file with the evil name as every text that its reader takes; return its content."""
    left = [[*texts(good)]]
    while left:
        places = left.pop()
        write(path, tried := changed(good, places))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)  # a section that is left out
                read(path)
            good = tried
        except (ValueError, UserWarning):
            half = len(places) // 2
            left += [places[:half], places[half:]] if half else []
    write(path, good)
    return good


def write_json(path, value):
    path.write_text(json.dumps(value))


@pytest.fixture(scope="module")
def evil(tmp_path_factory):
    """A folder with a hostile file of each kind."""
    folder = tmp_path_factory.mktemp("hostile")
    whole = content()
    samples = {"suite": "welch", "file": "welch.welch.samples.jsonl", "sha256": "0" * 64, "runner": 1}
    welch = whole["models"]["welch"] | {"samples": samples | dict.fromkeys(("timings", "rounds", "workloads"), 1)}
    whole["models"] = {"welch": welch, EVIL: copy.deepcopy(welch)}
    calibration = folder / "calibration.json"
    found = made_hostile(whole, calibration, lambda path, value: write_json(path, sealed(value)), load_calibration)
    assert [own["samples"]["suite"] for own in found["models"].values()] == [EVIL, EVIL]
    for name, source in {"welch": "campaign-epyc-zen5.welch", "functions": "xeon.functions"}.items():
        first, *rest = first_lines(f"{source}.samples.jsonl.gz").decode().splitlines()

        def write(path, value, rest=rest):
            path.write_text("\n".join([json.dumps(value), *rest, ""]))

        header = made_hostile(json.loads(first), folder / f"{name}.{name}.samples.jsonl", write, read_samples)
        assert header["suite"] == EVIL
    advice = json.loads(json.dumps(ADVICE.as_dict()))
    assert made_hostile(advice, folder / "advice.json", write_json, read_advice)["code"] == EVIL

    choices = folder / "choices"
    choices.mkdir()
    entry = {"schema_version": 1, **json.loads(json.dumps(decision(key="evil").as_dict()))}

    def read(path):
        return Memory(choices).read(path.stem)

    assert made_hostile(entry, choices / "evil.json", write_json, read)["label"] == EVIL
    target = json.loads((Path(devices.__file__).parent / "devices.json").read_text())["targets"][1]
    one = {"schema_version": 1, "targets": [target]}
    made_hostile(one, folder / "target.json", write_json, rx.targets.load_target)
    rx.learned.save_learned_fft(rx.learned.LearnedFft.exact(16), folder / "learned.json")
    rows = {"device": [EVIL] * 12, "variant": [EVIL] * 12, "batch": [8] * 12, "n_fft": [64] * 12, "k": [4] * 12}
    pq.write_table(pa.table(rows | {"time_ns": [1e5] * 12, EVIL: [EVIL] * 12}), folder / "rows.parquet")
    (folder / "evil_module.py").write_text("open('mark', 'w').close()\n")
    return folder


@pytest.mark.slow
def test_no_command_imports_what_a_file_names(evil, tmp_path, monkeypatch):
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(tmp_path)
    files, statuses = {path.name: path.read_bytes() for path in evil.iterdir() if path.is_file()}, {}
    for command, own in COMMANDS.items():
        kinds, (arguments, options) = get_type_hints(own.callback), BESIDE.get(command, ([], []))
        for param in own.params:
            if param.name in WORDS or not {"Path", "str"} & {*re.findall(r"\w+", str(kinds.get(param.name)))}:
                continue
            for file in files:
                for name, data in files.items():
                    (tmp_path / name).write_bytes(data)
                is_option = param.param_type_name == "option"
                given = [*arguments, *options, param.opts[0], file] if is_option else [file, *arguments[1:], *options]
                result = CliRunner().invoke(app, [*command.split(), *given])
                assert result.exception is None or isinstance(result.exception, SystemExit), (command, given)
                assert not (tmp_path / "mark").exists(), (command, given)
                assert "evil_module" not in sys.modules, (command, given)
                statuses.setdefault(command, set()).add(result.exit_code)
    assert 0 in statuses["predict"]
    shutil.copytree(evil / "choices", tmp_path / "choices")
    for words in (["list"], ["show", "evil"], ["pin", "evil", "--off"], ["forget", "evil"]):
        assert CliRunner().invoke(app, ["decisions", *words]).exit_code == 0, words
        assert not (tmp_path / "mark").exists(), words
    assert "evil_module" not in sys.modules
