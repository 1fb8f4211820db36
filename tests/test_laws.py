"""The list of laws names tests that exist."""

import ast
import pathlib
import re

FOLDER = pathlib.Path(__file__).parent
LAWS = (FOLDER / "LAWS.md").read_text(encoding="utf-8")


def functions_of(file):
    tree = ast.parse((FOLDER / file).read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_"]


def test_every_law_names_a_test_of_its_file_and_every_test_of_a_listed_file_holds_a_law():
    parts = re.split(r"^### (\w+\.py)$", LAWS, flags=re.MULTILINE)
    for file, laws in zip(parts[1::2], parts[2::2], strict=True):
        lines = re.findall(r"^- .*$", laws, re.MULTILINE)
        assert all(re.fullmatch(r"- [A-Z0-9].*\. `test_\w+`", line) for line in lines), file
        assert {line.split("`")[-2] for line in lines} == set(functions_of(file)), file
