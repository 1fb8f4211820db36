"""The Python in the README and the guides runs (by `make docs`), their links lead somewhere, their commands exist."""

import pathlib
import re
import shutil
import warnings

import jax
import pytest
import typer

import rlxjax as rx
from calibrate.cli import app

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def python_blocks(page):
    """Return the Python of a page, but what a comment says is slow or for an engine, which another test runs."""
    quick = r"(?<! -->\n)^```python\n(.*?)^```"
    return re.findall(quick, page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def anchors(page):
    """Return the anchors of a page's headings, as forges make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.site
@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.stem)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    shutil.copy(ROOT / "notebooks/data/calibration-cpu.json", tmp_path)
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    namespace = {}
    # Readers' JAX promotes dtypes as it does by default.
    with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"):
        # The copied calibration is true of the machine that it was made on.
        warnings.simplefilter("ignore", rx.calibration.MachineMismatchWarning)
        for block in python_blocks(page):
            exec(block, namespace)


def test_every_relative_link_leads_to_a_file_and_a_heading():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = target.partition("#")
            linked = (page.parent / path).resolve() if path else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), target


def test_the_commands_options_and_benchmarks_of_a_page_exist():
    for text in (page.read_text(encoding="utf-8") for page in PAGES):
        for line in re.findall(r"^(?:\$ )?rlxjax (.*)$", text, re.MULTILINE):
            words, command = line.partition("#")[0].split(), typer.main.get_command(app)
            while isinstance(command, typer.core.TyperGroup):
                command = command.commands[words.pop(0)]
            options = {name for option in command.params for name in option.opts}
            assert {word for word in words if re.fullmatch("--?[a-z].*", word)} <= options, line
        columns = "".join(re.findall(r"`python -m benchmarks\.` \|\n((?:\|.*\n)+)", text))
        for name in re.findall(r"benchmarks\.(\w+)", text) + re.findall(r"\| `(\w+)` \|$", columns, re.MULTILINE):
            assert {name, f"{name}.py"} & {path.name for path in (ROOT / "benchmarks").iterdir()}, name
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = set(re.findall(r"^make (\w+)", README.read_text(encoding="utf-8"), re.MULTILINE))
    assert commands == {"calibrate", "test"}
    assert all(re.search(rf"^{command}:", makefile, re.MULTILINE) for command in commands)


def test_a_file_of_evidence_is_named_as_its_benchmark_or_on_the_page_of_results():
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    benchmarks = tuple(path.stem.replace("_", "-") for path in (ROOT / "benchmarks").glob("[a-z]*.py"))
    files = [path.name for path in (ROOT / "docs/evidence").iterdir()]
    assert files
    assert not [name for name in files if name not in page and not name.startswith(benchmarks)]
