import pathlib
import re
import shutil
import warnings

import rlxjax as rx

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_in_the_readme_runs(tmp_path, monkeypatch, capsys):
    shutil.copy(ROOT / "notebooks/data/calibration-cpu.json", tmp_path)
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path))
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    namespace = {}
    with warnings.catch_warnings():
        # The copied calibration is true of the machine that it was made on.
        warnings.simplefilter("ignore", rx.MachineMismatchWarning)
        for block in blocks:
            exec(block, namespace)
    assert namespace["peaks"].shape == (8192, 16, 2)
    assert capsys.readouterr().out


def test_the_readmes_commands_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)
    assert set(re.findall(r"^make (\w+)", README, re.MULTILINE)) == {"calibrate", "test"}
