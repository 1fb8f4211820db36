"""The notebooks run from any folder (by `make docs`), show pictures, and are worth reading unrun."""

import pathlib
import types

import nbclient
import nbformat
import pytest

FOLDER = pathlib.Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
#: Lines that an output may have.
MOST_LINES = 25


def outputs_of(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def code_of(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.site
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_any_folder_and_shows_a_picture(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))  # this checkout, whichever is installed
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path))  # as on a machine that was never calibrated
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    options = {"kernel_name": "python3", "coalesce_streams": True, "timeout": 300}
    nbclient.NotebookClient(notebook, **options, resources=resources).execute()
    outputs = outputs_of(notebook)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output["text"] for output in outputs if output.get("name") == "stderr"]


def test_a_notebook_keeps_the_short_outputs_of_one_whole_run_and_its_links_lead_somewhere():
    assert len(NOTEBOOKS) == 5
    for notebook in (nbformat.read(path, as_version=4) for path in NOTEBOOKS):
        cells, outputs = code_of(notebook), outputs_of(notebook)
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
        assert any("image/png" in output.get("data", {}) for output in outputs)
        assert all(output.output_type != "error" and output.get("name") != "stderr" for output in outputs)
        assert max(output.get("text", "").count("\n") for output in outputs) <= MOST_LINES
        text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
        for target in [part.partition(")")[0] for part in text.split("](")[1:]]:
            assert (FOLDER / target.partition("#")[0]).exists(), target


def test_a_notebook_without_its_data_says_in_one_line_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = [cell.source for path in NOTEBOOKS for cell in code_of(nbformat.read(path, as_version=4))]
    seeking = {cell for cell in cells if "SystemExit" in cell}
    assert seeking
    for cell in seeking:
        package = types.SimpleNamespace(__file__=str(tmp_path / "packages/rlxjax/__init__.py"))
        with pytest.raises(SystemExit, match="run this notebook in a clone") as raised:
            exec(cell, {"Path": pathlib.Path, "rx": package})
        assert "\n" not in str(raised.value)
