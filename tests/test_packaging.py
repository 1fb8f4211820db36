"""A wheel and a clone hold the same commands, take no name of a user's, and print install commands that work."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlxjax.extras import install_command, require

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
FILES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile")]
FILES += [path for name in ("rlxjax", "calibrate", "benchmarks", "docs") for path in (ROOT / name).rglob("*.[pm][yd]")]
TEXTS = {path: path.read_text(encoding="utf-8") for path in FILES}


def packages(requirements):
    """Return the names and the versions of requirements, those of an extra of ours by its own requirements."""
    found = set()
    for one in map(Requirement, requirements):
        if one.name == "rlxjax":
            found |= set().union(*(packages(EXTRAS[extra]) for extra in one.extras))
        else:
            found.add((canonicalize_name(one.name), frozenset(one.extras), one.specifier))
    return found


def test_the_install_command_of_each_extra_names_its_packages_and_needs_no_registry_to_have_this_one(monkeypatch):
    for extra, requirements in EXTRAS.items():
        start, *words = re.findall(r"pip install|'[^']*'|\S+", install_command(extra))
        assert start == "pip install"
        assert packages(word.strip("'") for word in words) == packages(requirements), extra
    with pytest.raises(ImportError, match=r"^no_such_package is not installed; get it with `pip install 'matplotlib"):
        require("no_such_package", "plot")

    def uninstalled(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", uninstalled)
    assert install_command("plot") == "pip install '.[plot]'"


def test_code_and_pages_name_extras_that_there_are_and_no_package_of_this_name_on_a_registry():
    for path, text in TEXTS.items():
        asked = re.findall(
            r"require\(\"\w+\", \"([\w-]+)\"\)|install_command\(\"([\w-]+)\"\)|['\"]\.\[([\w-]+)\]", text
        )
        assert {name for names in asked for name in names if name} <= EXTRAS.keys(), path
        assert not re.search(r"(pip install|uv add) ['\"]?rlxjax\b", text), path


def test_a_module_of_a_user_that_is_called_calibrate_is_not_ours_and_messages_name_no_file_of_a_clone(tmp_path):
    for path, text in TEXTS.items():
        if path.suffix == ".py" and {"rlxjax", "calibrate"} & {path.relative_to(ROOT).parts[0]}:
            for node in ast.walk(ast.parse(text)):
                is_message = isinstance(node, ast.Constant) and "\n" not in str(node.value)
                assert not (is_message and re.search("(docs|benchmarks|tests)/", str(node.value))), path
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                assert "calibrate" not in {name.partition(".")[0] for name in names}, path
    (tmp_path / "calibrate.py").write_text("raise SystemExit('imported')")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    script = PROJECT["scripts"]["rlxjax"].partition(":")[0]
    for command in (["-m", "rlxjax"], ["-c", f"from {script} import main; main()"]):
        done = subprocess.run(
            [sys.executable, *command, "--version"], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert (done.stderr, done.stdout.split()) == ("", ["rlxjax", metadata.version("rlxjax")])
