"""How every test runs: on the CPU in float64, promotion strict, annotations checked, programs compiled quickly."""

import gc
import inspect
import os
import site
import sys
import tempfile

import pytest

# `RLXJAX_CHECK_ALL=1` checks the annotations of every function, not only of the public ones, and runs programs as
# XLA compiles them for users: the same laws in several times the time.
CHECKS_ALL = os.environ.get("RLXJAX_CHECK_ALL") == "1"
#: The variables that a run takes from its caller: what is checked, where programs run, and where they are kept.
CALLERS = ("RLXJAX_CHECK_ALL", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_")

# The run has its own home, and each of its workers a home for rlxjax. Processes that tests start inherit both.
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
if not WORKER:
    FOLDER = tempfile.TemporaryDirectory(prefix="rlxjax-tests-", ignore_cleanup_errors=True)
    os.environ.setdefault("PYTHONUSERBASE", site.getuserbase())
    os.environ["HOME"] = FOLDER.name
for name in [*os.environ]:
    is_users = name.startswith(("JAX_", "RLXJAX_")) and not name.startswith(CALLERS)
    if is_users or (name.startswith("XDG_") and name.endswith("_HOME")):
        del os.environ[name]
os.environ["RLXJAX_HOME"] = os.path.join(os.environ["HOME"], "rlxjax", WORKER)
# The tests are of the CPU, and share what accelerator there is with others, unless the caller says otherwise.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # Workers and the processes that tests start share one cache.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(os.environ["HOME"], "programs")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"


def pytest_configure(config):
    """Prepare a process that runs tests; one that only hands them to workers starts them at once."""
    if WORKER or not getattr(config.option, "numprocesses", None):
        set_up_hypothesis()
        set_up_jax()
        check_annotations()
        # Tracing makes many objects that live on: looking through them all again and again takes a while.
        gc.set_threshold(50_000, 20, 50)


def pytest_collection_finish():
    """Let no later search for garbage go through what was imported: it lives to the end."""
    gc.freeze()


def pytest_sessionfinish():
    """Let none go through what the tests leave either: it ends with the process."""
    gc.freeze()


def set_up_hypothesis():
    """Draw the same few examples in every run; how long one takes says what else the machine does."""
    import hypothesis

    hypothesis.settings.register_profile("lawful", deadline=None, derandomize=True, max_examples=30)
    hypothesis.settings.load_profile("lawful")


def set_up_jax():
    """Compute in float64 and promote nothing; most programs run once or twice, so they are compiled quickly."""
    import jax

    if not CHECKS_ALL and "XLA_FLAGS" not in os.environ:
        quick = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
        quick += ["--xla_cpu_use_fusion_emitters=false"] if jax.__version_info__ < (0, 11) else []
        os.environ["XLA_FLAGS"] = " ".join(quick)
        jax.jit(lambda: 0.0)()
        # XLA has read them. They are part of a calibration's fingerprint, and a process that a test starts is a user's.
        del os.environ["XLA_FLAGS"]
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")


def check_annotations():
    """Check annotations, shapes included: of public functions and the methods of public classes, or of all."""
    import jaxtyping

    if CHECKS_ALL:
        jaxtyping.install_import_hook("rlxjax", "_typecheck.typecheck")
        return
    from _typecheck import typecheck

    import rlxjax

    def is_public(name, value):
        return not name.startswith("_") and inspect.isfunction(value) and not hasattr(value, "__wrapped__")

    top = {name: getattr(rlxjax, name) for name in rlxjax.__all__}
    public = {
        **{name: value for module in filter(inspect.ismodule, top.values()) for name, value in vars(module).items()},
        **top,
    }
    checked = {f: jaxtyping.jaxtyped(f, typechecker=typecheck) for n, f in public.items() if is_public(n, f)}
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "rlxjax"]:
        for name, value in list(vars(module).items()):
            if inspect.isfunction(value) and value in checked:
                setattr(module, name, checked[value])
    for class_ in filter(inspect.isclass, public.values()):
        for name, method in list(vars(class_).items()):
            if is_public(name, method):
                setattr(class_, name, jaxtyping.jaxtyped(method, typechecker=typecheck))


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    """Let no other work make a choice provisional: what else the machine does is no part of a test."""
    monkeypatch.setattr("rlxjax.clock.OtherWork.share", lambda _: 0.0)
