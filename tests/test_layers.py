"""Imports run downward only, and the library has no clock, no printing and no private JAX."""

import ast
from pathlib import Path

import rlxjax

PACKAGE = Path(rlxjax.__file__).parent

#: From the bottom up; a module imports from layers below its own, or from its own layer.
LAYERS = [
    {"_typing", "_files"},
    {"_checks", "_chunks", "_one_loop", "_recipes"},
    {"_row_sums"},
    {"_slopes"},
    {"_programs"},
    {"_numerics", "_counts"},
    {"_ops"},
    {"_graph"},
    {"_profile"},
    {"_device"},
    {"_gate_formulas"},
    {"_gate"},
    {"_cost"},
    {"fusion", "_ranking"},
    {"welch"},
    {"_latency", "_latency_formulas"},
    {"_timings", "_least_squares"},
    {"_prior", "_laplace"},
    {"_fit"},
    {"_device_fits"},
    {"_pooling"},
    {"_correction"},
    {"_posterior"},
    {"_decision", "_regret"},
    {"_design"},
    {"_fft_latency"},
    {"_learned_latency", "_learned_schema"},
    {"_learned_file"},
    {"_crossings", "_explanation"},
    {"_calibration", "_calibration_file"},
    {"__init__"},
]
LEVEL = {module: level for level, modules in enumerate(LAYERS) for module in modules}

SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def layer_of(file):
    """Return the module or subpackage of `rlxjax` that a file belongs to."""
    return file.split("/")[0].removesuffix(".py")


def imports(source, file):
    """Return the absolute names of all that a file imports when it runs, its functions included."""
    package = ["rlxjax", *file.split("/")[:-1]]
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def imported_layers(source, file):
    """Return the modules and subpackages of `rlxjax` that a file imports from."""
    names = imports(source, file)
    modules = {name.partition(".")[2].partition(".")[0] for name in names if f"{name}.".startswith("rlxjax.")}
    return {module if module in LEVEL else "__init__" for module in modules}


def upward_imports(source, file):
    """Return what a file imports from above its layer."""
    return {other for other in imported_layers(source, file) if LEVEL[other] > LEVEL[layer_of(file)]}


def forbidden(source, file):
    """Return what a file uses that the library does without."""
    banned = ("calibrate", "jax._src", "time", "datetime", "logging")
    names = imports(source, file)
    found = {name for name in names for ban in banned if f"{name}.".startswith(f"{ban}.")}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr == "_src":
            found.add(ast.unparse(node))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "print",
            "builtins.print",
            "sys.stdout.write",
        ):
            found.add(ast.unparse(node.func))
    return found


def test_every_module_has_a_layer_and_imports_from_below():
    for file in SOURCES:
        assert layer_of(file) in LEVEL, f"{file}: give it a place in LAYERS"
        assert not upward_imports(SOURCES[file], file)


def test_the_library_has_no_clock_no_printing_no_private_jax_and_no_job():
    for file in SOURCES:
        assert not forbidden(SOURCES[file], file)


def test_the_package_file_imports_each_public_name_from_the_module_that_the_table_says():
    tree = ast.parse(SOURCES["__init__.py"])
    imported = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    assert imported == rlxjax._MODULES
    kinds = {type(node) for node in tree.body[1:]}  # the docstring is the first
    assert kinds == {ast.Import, ast.If, ast.Assign}, (
        "nothing but imports, the table of names and the version"
    )


def test_only_the_files_module_touches_files_but_for_the_name_of_the_processor():
    def touches_files(file):
        calls = (node for node in ast.walk(ast.parse(SOURCES[file])) if isinstance(node, ast.Call))
        names = {ast.unparse(call.func).split(".")[-1] for call in calls}
        return names & {"open", "fdopen", "read_text", "write_text", "read_bytes", "write_bytes"}

    assert {file for file in SOURCES if touches_files(file)} == {"_files.py", "_calibration_file.py"}


def test_the_check_finds_imports_from_above():
    for file, source, found in [
        ("_gate.py", "from ._cost import io_cost_ns", {"_cost"}),
        ("_gate.py", "from . import _cost, _device", {"_cost"}),
        ("_gate.py", "import rlxjax._fit as fit", {"_fit"}),
        ("_gate.py", "def f():\n    from rlxjax import Graph", {"__init__"}),
        ("_gate.py", "import rlxjax", {"__init__"}),
        ("welch/_run.py", "from .._latency import predict_latency_ns", {"_latency"}),
        ("welch/_run.py", "from rlxjax import _calibration", {"_calibration"}),
        (
            "welch/_run.py",
            "from . import _host\nfrom ._host import host_peaks\nfrom rlxjax._cost import x",
            set(),
        ),
        ("_gate.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ._fit import x", set()),
    ]:
        assert upward_imports(source, file) == found


def test_the_check_finds_what_is_forbidden():
    for source in [
        "import time",
        "from time import perf_counter",
        "import calibrate.measure",
        "from calibrate import cli",
        "import jax._src.core",
        "from jax._src import core",
        "from jax import _src",
        "import jax\njax._src.core",
        "print(1)",
        "def f():\n    import datetime",
    ]:
        assert forbidden(source, "_gate.py")
        assert not forbidden("import timeit_like, jax, calibrated\nprinter(1)", "_gate.py")
