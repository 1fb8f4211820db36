"""Imports run downward, floor by floor, in no circle; the job stands above all and uses public names only."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent

#: From the ground up: the rooms of `rlxjax`, its face last. A room imports from lower floors and from itself.
FLOORS = (
    (
        "_typing",
        "_checks",
        "_chunks",
        "_counts",
        "_files",
        "_kept",
        "_numerics",
        "_schedule",
        "_tracing",
        "_values",
        "clock",
        "extras",
        "units",
    ),
    ("devices", "graph"),
    ("jaxpr",),
    ("gate",),
    ("fusion", "fit"),
    ("models",),
    ("calibration",),
    ("plot", "tables", "targets"),
    ("choices",),
    ("welch",),
    ("learned",),
    ("__init__", "__main__"),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


PATHS = sorted([*(ROOT / "rlxjax").rglob("*.py"), *(ROOT / "calibrate").rglob("*.py")])
#: The text of every file of the library and the job by its module's name.
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path.read_text(encoding="utf-8")
    for path in PATHS
}


def imported(module, sources):
    """Return the names that a file imports: in functions and under TYPE_CHECKING too.

    What is imported from a folder is the file of that name in it, if there is one, else the folder.
    """
    is_folder = any(other.startswith(f"{module}.") for other in sources)
    package = module.split(".") if is_folder else module.split(".")[:-1]
    names = set()
    for node in ast.walk(ast.parse(sources[module])):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            whole = ".".join([*base, *filter(None, [node.module])])
            parts = {f"{whole}.{alias.name}" for alias in node.names}
            names |= {part if part in sources or private(part) else whole for part in parts}
    return {name.replace("rlxjax._commands", "calibrate") for name in names}  # a symbolic link


def private(name):
    return any(part.startswith("_") for part in name.split("."))


def edges(sources):
    """Return the modules that each module imports, a name inside a module counting as that module."""
    return {
        module: {
            name if name in sources else name.rpartition(".")[0] for name in imported(module, sources)
        }.intersection(sources)
        for module in sources
    }


def room(module):
    """Return the room of `rlxjax` that a module belongs to; the package's face is a room of its own."""
    return [*module.split("."), "__init__"][1]


def upward(sources):
    """Return the imports of the library from a higher floor, or from another room of the same floor."""
    return {
        (module, other)
        for module, others in edges(sources).items()
        for other in others
        if module.startswith("rlxjax") and other.startswith("rlxjax") and room(module) != room(other)
        if FLOOR[room(other)] >= max(FLOOR[room(module)], 1)
    }


def circle(sources):
    """Return the modules that import each other by way of others, and those above them."""
    waiting = edges(sources)
    while free := [module for module, others in waiting.items() if not others & waiting.keys()]:
        for module in free:
            del waiting[module]
    return sorted(waiting)


def doors(sources, of, to, is_kept=lambda name: True):
    """Return what the modules of one package import from another, of the names that are kept."""
    return {
        (module, name)
        for module in sources
        if module.startswith(of) and module != "rlxjax.__main__"  # which is the job's command
        for name in imported(module, sources)
        if name.split(".")[0] == to and is_kept(name)
    }


def of_the_job(sources):
    """Return what the library imports from the job."""
    return doors(sources, "rlxjax", "calibrate")


def private_doors(sources):
    """Return what the job imports from the library by a name with a leading underscore in any part."""
    return doors(sources, "calibrate", "rlxjax", private)


def test_imports_run_downward_in_no_circle_and_the_job_uses_public_names_only():
    assert {room(module) for module in SOURCES if module.startswith("rlxjax")} <= FLOOR.keys()
    assert upward(SOURCES) == set()
    assert circle(SOURCES) == []
    assert of_the_job(SOURCES) == set()
    assert private_doors(SOURCES) == set()


#: A small house in order.
HOUSE = {
    "rlxjax": "from .graph import relu",
    "rlxjax._checks": "from ._typing import A",
    "rlxjax._typing": "",
    "rlxjax.graph": "from .ops import relu",
    "rlxjax.graph.ops": "from .._checks import check",
    "rlxjax.gate": "def f():\n    from rlxjax.graph.ops import relu",
    "rlxjax.fit": "",
    "rlxjax.fusion": "from rlxjax import gate, graph",
    "calibrate": "",
    "calibrate.job": "import rlxjax as rx\nfrom rlxjax.graph import relu\nfrom rlxjax import Graph",
}


def test_the_checks_find_nothing_in_a_house_in_order_and_each_import_that_is_out_of_order():
    assert not any(check(HOUSE) for check in (upward, circle, of_the_job, private_doors))
    for text in (
        "from .gate import x",
        "import rlxjax.gate",
        "from . import gate",
        "from rlxjax import gate",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .gate import x",
        "def f():\n    from .gate import x",
    ):
        assert upward(HOUSE | {"rlxjax._checks": text}) == {("rlxjax._checks", "rlxjax.gate")}, text
    assert upward(HOUSE | {"rlxjax.fit": "from .fusion import x"}) == {("rlxjax.fit", "rlxjax.fusion")}
    assert upward(HOUSE | {"rlxjax.fit": "import rlxjax as rx"}) == {("rlxjax.fit", "rlxjax")}
    assert {"rlxjax._checks", "rlxjax._typing"} <= set(circle(HOUSE | {"rlxjax._typing": "from ._checks import check"}))
    for text in ("from calibrate import job", "from ._commands import job"):
        assert of_the_job(HOUSE | {"rlxjax.fit": text}) == {("rlxjax.fit", "calibrate.job")}, text
    for text in (
        "from rlxjax._checks import check",
        "from rlxjax import _checks",
        "from rlxjax.graph import _ops",
        "import rlxjax._checks",
        "from rlxjax.graph.ops import _relu",
    ):
        assert private_doors(HOUSE | {"calibrate.job": text}), text
