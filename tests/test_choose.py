"""What is chosen: by the model, by measuring, by what is remembered; what changes a choice, and what is refused."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import json
import os
import subprocess
import sys
import time
import warnings
import weakref

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from _compilations import COMPILE, compilations
from _models import LINE, LINE_TRUTH, calibrated, certain
from _shapes import real

import rlxjax as rx
from rlxjax.calibration import Calibration
from rlxjax.choices import Choice, Memory, Way, choose, clear_choices
from rlxjax.fit import Suite
from rlxjax.units import interval_text
from rlxjax.welch import WelchPeakParams, _choice, choose_variant, welch_peaks

#: Of choices that are measured where nobody asks which one wins.
QUICK = {"measure": "always", "limit_ms": 1.0}
X = jnp.ones((8, 16), jnp.float32)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A place of this test's own for what is remembered."""
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RLXJAX_MEASURE", raising=False)
    return tmp_path / "home"


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless a program turns it: ns, in a list."""
    now = [0]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])
    monkeypatch.setattr(time, "perf_counter", lambda: now[0] / 1e9)
    return now


def sure(known):
    """Return a calibration that is a hundred times as sure."""
    own = known.of("functions")
    posterior = dataclasses.replace(
        own.posterior, factor=0.01 * own.posterior.factor, spread=0.01 * own.posterior.spread
    )
    return dataclasses.replace(known, models={"functions": dataclasses.replace(own, posterior=posterior)})


@pytest.fixture(scope="module")
def here():
    """What is known of CPUs, as if it were exact."""
    return sure(rx.default_calibration())


def ways(factor=2.0, names=("product", "sum")):
    """Return two ways to multiply, new functions each time."""
    return {names[0]: jax.jit(lambda x: x * factor), names[1]: jax.jit(lambda x: x + (factor - 1.0) * x)}


def compiled():
    return compilations.count(COMPILE)


# --- By what -------------------------------------------------------------------------------------


def test_where_the_model_is_sure_nothing_is_compiled_or_run_and_nothing_is_remembered(here):
    traced = []

    def cubed(x):
        traced.append("cubed")
        return x @ x @ x

    choose(ways(), X, calibration=here, measure="never")  # what predicts is compiled
    functions, before = {"cubed": jax.jit(cubed), "first": jax.jit(lambda x: x + 1.0)}, compiled()
    found = choose(functions, real(512, 512), calibration=here)
    assert (found.name, found.by, found.is_tie, found.rounds, found.measuring_s) == ("first", "model", False, 0, 0.0)
    assert found.probability > 0.95
    assert found.fn is functions["first"]
    assert found.time_ns == found.chosen.predicted_ns < found["cubed"].predicted_ns
    assert found.interval_ns[0] < found.time_ns < found.interval_ns[1]
    assert choose(functions, real(512, 512), calibration=here) == found
    assert (traced, compiled(), Memory().all()) == (["cubed"], before, [])
    assert choose(functions, real(512, 512), calibration=here, measure="never") == found


def test_an_array_that_only_the_function_itself_changes_is_no_side_effect(here):
    def filled(x):
        held = jax.new_ref(x)
        jax.lax.fori_loop(0, 3, lambda i, _: held.__setitem__(0, held[0] + 1.0), None)
        return held[...]

    functions = {"filled": jax.jit(filled), "plain": jax.jit(lambda x: x.at[0].add(3.0))}
    assert choose(functions, X, calibration=here, **QUICK).by == "measured"


def test_what_is_measured_is_measured_once_and_known_by_its_content(here):
    functions = ways()
    found = choose(functions, X, calibration=here, measure="always")
    assert found.by == "measured"
    assert found.measuring_s > 0
    assert found.rounds >= 2
    assert found.fn is functions[found.name]
    for own in found.alternatives:
        assert own.measured_interval_ns[0] <= own.measured_ns == own.time_ns <= own.measured_interval_ns[1]
    before, (entry,) = compiled(), Memory().all()
    found(X)  # as it was timed
    assert (entry.key, entry.kind, entry.label) == (found.key, "functions", "product or sum of float32[8, 16]")
    assert [own.measured_ns for own in entry.alternatives] == [own.measured_ns for own in found.alternatives]
    for word in ("always", "undecided", "never"):
        for again in (functions, ways(), dict(reversed(ways().items()))):
            known = choose(again, X, calibration=here, measure=word)
            assert (known.by, known.name, known.rounds, known.measuring_s, known.key) == (
                *("remembered", found.name, found.rounds, 0.0, found.key),
            )
            assert known.fn is again[found.name]
            for name in functions:
                assert known[name] == dataclasses.replace(found[name], compile_s=None)
    renamed = choose(ways(names=("a", "b")), X, calibration=here)
    assert (renamed.by, renamed.name) == ("remembered", {"product": "a", "sum": "b"}[found.name])
    assert (compiled(), Memory().all()) == (before, [entry])
    np.testing.assert_array_equal(renamed(X), 2.0 * X)


def test_what_the_model_rules_out_is_not_compiled_until_all_is_to_be_measured(here):
    def functions():
        return {**ways(), "cubed": jax.jit(lambda x: x @ x @ x), "other": jax.jit(lambda x: x - -x)}

    choose(functions(), real(8, 8), calibration=here, measure="never")  # what predicts is compiled
    x = jnp.ones((256, 256), jnp.float32)
    before = compiled()
    found = choose(functions(), x, calibration=here, limit_ms=1.0)
    assert found.by == "measured"
    assert found["cubed"].measured_ns is None
    assert found["cubed"].predicted_ns > 2.0 * found["product"].predicted_ns
    assert choose(functions(), x, calibration=here, limit_ms=1.0).by == "remembered"
    assert compiled() - before <= 3 + 1  # and a constant
    with pytest.raises(ValueError, match="'cubed' differs from"):
        choose(functions(), x, calibration=here, **QUICK)


def test_what_is_measured_holds_for_what_the_model_decided_beforehand_and_for_a_shape_of_it(here):
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    for x, word, by in ((X, "never", "model"), (shape, "always", "measured"), (X, "never", "remembered")):
        assert choose(ways(), x, calibration=here, measure=word, limit_ms=1.0).by == by


def test_a_person_s_pin_is_what_runs(here):
    found = choose(ways(), X, calibration=here, **QUICK)
    other = next(own.name for own in found.alternatives if own.name != found.name)
    Memory().pin(found.key, other)
    pinned = choose(ways(), X, calibration=here, regret=0.0, **QUICK)
    assert (pinned.by, pinned.name) == ("pinned", other)


def test_a_finer_question_is_measured_anew_and_answers_the_coarser_one(here):
    for regret, by in ((0.1, "measured"), (0.2, "remembered"), (0.01, "measured"), (0.1, "remembered")):
        assert choose(ways(), X, calibration=here, regret=regret, **QUICK).by == by
    assert choose(ways(), X, calibration=here, regret=0.0, measure="never").by == "remembered"


def test_a_choice_of_a_busy_machine_is_provisional_and_measured_once_more_when_the_machine_is_quiet(here, monkeypatch):
    looks, shares = [0], [0.8]  # seconds of the clock, and the share that other work takes
    module = sys.modules["rlxjax.choices._choose"]
    monkeypatch.setattr(rx.clock.OtherWork, "share", lambda _: shares[0])
    monkeypatch.setattr(time, "monotonic", lambda: looks[0])
    functions = ways()
    found = choose(functions, X, calibration=here, **QUICK)
    assert (found.by, found.load, found.is_provisional) == ("measured", 0.8, True)
    assert "; provisional, because other work took 80 % of the machine" in str(found).splitlines()[0]
    asked = []
    monkeypatch.setattr(module.OtherWork, "__init__", lambda _: asked.append(looks[0]))
    for seconds, share in ((0, 0.0), (59, 0.0), (70, 0.7), (120, 0.0)):
        looks[0], shares[0] = seconds, share
        for fresh in (functions, ways()):
            for word in ("never", "undecided"):
                known = choose(fresh, X, calibration=here, measure=word)
                assert (known.by, known.is_provisional) == ("remembered", True), seconds
    assert asked == [70]
    looks[0] = 140
    by = [choose(fresh, X, calibration=here, **QUICK).by for fresh in (functions, functions, ways())]
    assert (by, asked) == (["measured", "remembered", "remembered"], [70, 140, 140])
    assert not choose(ways(), X, calibration=here).is_provisional


def test_compiling_counts_against_no_limit_of_a_call(here):
    """The first call of a function that is not jitted compiles its operations."""
    slept = []

    def slow(x):
        if not isinstance(x, jax.core.Tracer) and not slept:
            slept.append(time.sleep(1.2))
        return x * 2.0

    found = choose({"slow": slow, "sum": lambda x: x + x}, X, calibration=here, **QUICK)
    assert [own.failed for own in found.alternatives] == ["", ""]
    assert found["slow"].compile_s > 1.1
    assert found.rounds >= 6


def test_a_choice_says_itself_in_words_and_in_json(here):
    functions = {**ways(), "broken": jax.jit(lambda x: x @ x)}
    found = choose(functions, X, calibration=here, **QUICK)
    assert "dot_general" in found["broken"].failed
    assert found["broken"].time_ns is None
    again = json.loads(json.dumps(found.as_dict()))
    assert again["alternatives"][0]["measured_interval_ns"] == list(found["product"].measured_interval_ns)
    assert {**again, "alternatives": 0} == {**found.as_dict(), "alternatives": 0}
    first, head, *others = str(found).splitlines()
    assert first.startswith(f"{'a tie: ' * found.is_tie}{found.name} ")
    assert f" after {found.rounds} rounds" in first
    assert "90 %" in head
    for line, own in zip(others, found.alternatives, strict=True):
        assert own.name in line
        assert own.failed in line
        assert own.failed or f"measured {interval_text(own.measured_ns, *own.measured_interval_ns)}" in line
        assert own.is_tie == ("not told apart" in line) == (own.name in first and own is not found.chosen)
    known = choose({**ways(), "broken": jax.jit(lambda x: x @ x)}, X, calibration=here, **QUICK)
    assert (known.by, known["broken"].failed) == ("remembered", found["broken"].failed)
    with pytest.raises(KeyError, match="expected one of product, sum, broken, got 'none'"):
        found["none"]


def test_a_choice_says_what_is_not_told_apart_what_is_ruled_out_by_how_much_and_how_to_be_sure():
    def way(name, measured_ns=None, predicted_ns=1e3, **more):
        ends = None if measured_ns is None else (0.9 * measured_ns, 1.2 * measured_ns)
        return Way(name, predicted_ns, (0.5e3, 2e3), measured_ns, ends, in_domain=True, **more)

    near, far = way("near", 1.9e6, is_tie=True), way("far", 88e6)
    all_ways = (way("a", 1.9e6), near, way("tenth", 2.09e6), far, way("left", None), way("oops", failed="raised Oops"))
    found = Choice("a", "measured", all_ways, 0.7, is_tie=True, rounds=34)
    first, _, *rows = str(found).splitlines()
    assert first == "a tie: a and near are not told apart after 34 rounds"
    assert "  measured 1.9 ms (1.7 to 2.3)  predicted 1 us (0.50 to 2)" in rows[0]
    endings = ["", "not told apart", "10 % slower", "46 times slower", "ruled out by the model", "failed: raised Oops"]
    assert all(row.endswith(ending) for row, ending in zip(rows, endings, strict=True))
    assert ["times longer than predicted" in row for row in rows] == [True, True, True, True, False, False]
    assert way("quick", 0.2e3).times_text().endswith("  5 times shorter than predicted")
    assert way("as predicted", 3e3).times_text().endswith("predicted 1 us (0.50 to 2)")
    pinned = dataclasses.replace(found, name="far", by="pinned", without_pin="a")
    assert str(pinned).splitlines()[0] == f"{first}; a person pinned far, which runs"
    assert str(dataclasses.replace(found, by="remembered")).splitlines()[0] == f"{first} (remembered)"
    alone = dataclasses.replace(found, alternatives=(way("a", 1.0), all_ways[-1]), is_tie=False, rounds=0)
    assert alone.outcome == "a is the only alternative that runs"
    model = Choice("left", "model", (way("left"), way("right", predicted_ns=1.1e3)), 0.7, kind="functions")
    assert model.outcome == "left is predicted to be the fastest, 70 % sure"
    for chance, inside, is_told in ((0.7, True, True), (0.98, True, True), (0.999, True, False), (0.999, False, True)):
        ways = tuple(dataclasses.replace(own, in_domain=inside) for own in model.alternatives)
        said = str(dataclasses.replace(model, probability=chance, alternatives=ways))
        assert ('repeat the call with measure="undecided"' in said) == is_told
    assert "undecided" not in str(dataclasses.replace(model, kind="welch", probability=0.91))


# --- What a choice depends on --------------------------------------------------------------------


@contextlib.contextmanager
def environment(name, value):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        yield


SOFTWARE = {
    "XLA_FLAGS": lambda: environment("XLA_FLAGS", "--xla_cpu_enable_fast_math=true"),
    "OMP_NUM_THREADS": lambda: environment("OMP_NUM_THREADS", "1"),
    "TF_XLA_FLAGS": lambda: environment("TF_XLA_FLAGS", "1"),
    "float32": lambda: jax.enable_x64(False),
    "precision": lambda: jax.default_matmul_precision("highest"),
}
CHANGED = {
    "body": {"functions": lambda: {**ways(), "sum": jax.jit(lambda x: x + 1.0 * x + 0.0)}},
    "constant": {"functions": lambda: ways(3.0)},
    "not jitted": {"functions": lambda: {**ways(), "product": lambda x: x * 2.0}},
    "one more": {"functions": lambda: {**ways(), "more": jax.jit(lambda x: x - -x)}},
    "shape": {"x": X[:, :8]},
    "dtype": {"x": X.astype(jnp.float16)},
    "of NumPy": {"x": np.asarray(X)},
    "calibration": {"calibration": sure},
}


def test_what_was_measured_of_anything_else_is_not_used(here):
    def asked(functions=ways, x=X, calibration=lambda own: own):
        return choose(functions(), x, calibration=calibration(here), measure="never").by

    assert asked() == "model"
    assert choose(ways(), X, calibration=here, **QUICK).by == "measured"
    for changed in CHANGED.values():
        assert (asked(**changed), asked()) == ("model", "remembered"), changed
    for name, changed in SOFTWARE.items():
        with changed():
            assert asked() == "model", name
        assert asked() == "remembered"


def test_what_no_array_says_counts_by_its_value(here):
    shares = {
        "first": jax.jit(lambda x, count: x[:count], static_argnums=1),
        "sliced": jax.jit(lambda x, count: jax.lax.slice_in_dim(x, 0, count), static_argnums=1),
    }
    keys = [choose(shares, X, count, calibration=here, measure="never").key for count in (1, 2, 1)]
    assert keys[0] == keys[2] != keys[1]


def test_of_arrays_that_a_function_closes_over_the_shapes_count(here):
    def key(constant):
        return choose({"a": jax.jit(lambda x: x * constant)}, X, calibration=here).key

    assert key(np.ones((8, 16), np.float32)) == key(np.zeros((8, 16), np.float32)) != key(np.ones((8, 1), np.float32))


def test_programs_that_only_a_compiler_option_tells_apart_are_told_apart(here):
    def fn(x):
        return x * 2.0

    def functions():
        options = {"xla_cpu_enable_fast_math": True}
        return {"plain": jax.jit(fn), "careless": jax.jit(fn, compiler_options=options)}

    entry = choose(functions(), X, calibration=here, limit_ms=1.0)
    assert entry.by == "measured"  # the model knows nothing of what differs
    for name in ("plain", "careless"):
        Memory().pin(entry.key, name)
        assert choose(functions(), X, calibration=here).name == name


#: What a fresh process remembers, and how it describes programs that hold sets of words: each hash seed has its order.
#: One ends, whatever an alternative does: its limit shows after a second that this one will not.
FRESH = """
import sys, jax, jax.numpy as jnp, rlxjax as rx
x, given = jnp.ones((8, 16), jnp.float32), {"calibration": rx.Calibration({}, None, {})}
ways = {"a": jax.jit(lambda x: x * 2.0), "b": jax.jit(lambda x: x + 1.0 * x)}
try:
    print(rx.choose(ways, x, measure="never", **given).by)
except ValueError as error:
    print(error)
p = jax.checkpoint_policies
for policy in (
    p.save_only_these_names("qkv", "out", "mlp", "k"),
    p.save_from_both_policies(p.save_only_these_names("a", "b", "c"), p.dots_saveable),
):
    body = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)).sum(), policy=policy)
    print(rx.choose({"a": jax.jit(jax.grad(body))}, 1.0, **given).chosen.content)
called = lambda x: jax.pure_callback(lambda x: {"a", "b", "c"} and x, jax.ShapeDtypeStruct((), x.dtype), x)
print(rx.choose({"a": called}, jnp.float32(1.0), **given).chosen.content)
if sys.argv[1:]:
    loop = lambda x: jax.lax.while_loop(lambda c: c[0, 0] > -1.0, lambda c: jnp.sin(c) + 1.5, x)
    found = rx.choose({"fine": ways["a"], "endless": jax.jit(loop)}, x, measure="always", limit_ms=10, **given)
    print(found.name, "|", found["endless"].failed, "|", float(found(x)[0, 0]))
"""


def test_fresh_processes_remember_but_not_with_another_jaxlib_and_end_whatever_does_not(tmp_path):
    choose(ways(), X, calibration=Calibration({}, None, {}), **QUICK)
    other = tmp_path / "packages" / "jaxlib-99.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: jaxlib\nVersion: 99.0\n")
    paths = [os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {**os.environ, "JAX_ENABLE_X64": "1", "PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "1"}
    changed = own | {"PYTHONPATH": os.pathsep.join([str(other.parent), *paths]), "PYTHONHASHSEED": "2"}
    command = [sys.executable, "-W", "error::UserWarning", "-c", FRESH]
    begun = [
        subprocess.Popen([*command, *more], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for more, env in ((["endless"], own), ([], changed))
    ]
    said = [process.communicate(timeout=120) for process in begun]
    assert [process.returncode for process in begun] == [0, 0], said
    (by, *contents, endless), (refused, *others) = (out.splitlines() for out, _ in said)
    assert (by, endless) == ("remembered", "fine | did not end within 1 s | 2.0")
    assert refused.startswith("measure: nothing predicts which of a, b is the fastest here")
    assert contents == others
    assert len({*contents}) == 3


def test_an_entry_that_names_other_alternatives_is_measured_anew(here):
    found = choose(ways(), X, calibration=here, **QUICK)
    entry = Memory().look_up(found.key)
    for place in (0, 1):
        clear_choices()
        alternatives = [*entry.alternatives]
        alternatives[place] = dataclasses.replace(alternatives[place], content="gone")
        Memory().keep(dataclasses.replace(entry, alternatives=tuple(alternatives)))
        assert choose(ways(), X, calibration=here, **QUICK).by == "measured"


def test_no_answer_depends_on_what_was_measured_of_something_else(here):
    before = choose(ways(5.0), X, calibration=here, measure="never")
    assert choose(ways(), X, calibration=here, **QUICK).by == "measured"
    clear_choices()
    assert choose(ways(5.0), X, calibration=here, measure="never") == before


# --- What is refused, and what loses -------------------------------------------------------------


SHARED = jax.new_ref(jnp.zeros((8, 16), jnp.float32))


def printing(x):
    jax.debug.print("{}", x[0, 0])
    return x * 2.0


def calling(x):
    jax.experimental.io_callback(print, None, x[0, 0])
    return x * 2.0


def until(x):
    return jax.lax.while_loop(lambda c: c[0, 0] < 100.0, lambda c: 2.0 * c, x)


LOOPS = {"a": jax.jit(until), "b": jax.jit(until)}
#: Alternatives, and what is said of them; beside two ways to multiply, of a third one.
BAD_WAYS = (
    ({}, "expected functions by name, or a Suite, got {}"),
    ([jnp.sin], "expected functions by name, or a Suite, got"),
    ({"a": 3}, "expected 'a' to be a function, got 3"),
    ({1: jnp.sin}, "expected a text as each name, got 1"),
    ({"a": jax.jit(lambda x: x @ x)}, "none of them runs: a: raised TypeError: dot_general"),
    ({"a": jax.jit(lambda x, y: x)}, "none of them runs: a: <lambda> takes 2 arguments, got 1"),
)
BAD_THIRD = (
    (lambda x: x[0], "expected the same result of all, but 'c' differs from 'product': array 0 is .*check=False"),
    (lambda x: (x, x), "expected the same result of all, but 'c' differs from 'product': 2 arrays instead of 1"),
    (lambda x: x * 2.1, "expected the same .* 'c' differs from 'product': .* differs by 0.1 at .0, 0.; .*check=False"),
    (printing, "'c' has side effects .*measure='never'"),
    (calling, "'c' has side effects .*measure='never'"),
    (lambda x: x * 2.0 + SHARED[...], "'c' has side effects .*measure='never'"),
)
BAD_OPTIONS = (
    ({"measure": "sometimes"}, "measure: expected one of never, undecided, always, got 'sometimes'"),
    ({"regret": -1}, "regret: expected a number of at least 0, got -1"),
    ({"regret": np.nan}, "regret: expected a number of at least 0, got nan"),
    ({"limit_ms": 0}, "limit_ms: expected a number of milliseconds of at least"),
    ({"inputs": {"n": 1.0}}, "inputs: leave them out with functions"),
    ({"calibration": "c.json"}, "calibration: expected a Calibration .*got str"),
)
BAD_SIZES = (
    (3, "inputs: expected a dict from name to size"),
    (None, "line: expected the inputs n; 'n' is missing"),
    ({"m": 3.0}, "line: expected the inputs n; got 'm'"),
    ({"n": [3.0, 4.0]}, "inputs: expected a single workload, got several values of n"),
)


def test_bad_input_gets_one_sentence(here):
    donated, known = jax.jit(lambda x: x * 2.0, donate_argnums=0), {"calibration": here}
    undecided = "measure: nothing predicts which of {} is the fastest here; measure them"
    asked = [
        *((f"alternatives: {said}", functools.partial(choose, made, X, **known)) for made, said in BAD_WAYS),
        *(
            (
                f"alternatives: {said}",
                functools.partial(choose, {**ways(), "c": jax.jit(fn)}, X, measure="always", **known),
            )
            for fn, said in BAD_THIRD
        ),
        *((said, functools.partial(choose, ways(), X, **options)) for options, said in BAD_OPTIONS),
        *((said, functools.partial(choose, Loops(), inputs=of, calibration=lines())) for of, said in BAD_SIZES),
        (
            "alternatives: 'c' donates arguments",
            functools.partial(choose, {**ways(), "c": donated}, X, **known),
        ),
        (
            "args: expected arrays or shapes, got traced values; choose outside",
            lambda: jax.jit(lambda x: choose(ways(), x, **known)(x))(X),
        ),
        ("args: leave them out with a suite", lambda: choose(Loops(), X)),
        (undecided.format("product, sum"), lambda: choose(ways(), X, calibration=lines(), measure="never")),
        (undecided.format("a, b"), lambda: choose(LOOPS, X, measure="never", **known)),
    ]
    for said, ask in asked:
        with pytest.raises(ValueError, match=f"^{said}") as caught:
            ask()
        assert "\n" not in str(caught.value), said
    assert Memory().all() == []


def test_the_environment_says_when_to_measure_where_nobody_else_does(here, monkeypatch):
    for word, by in (("never", "model"), ("always", "measured")):
        monkeypatch.setenv("RLXJAX_MEASURE", word)
        assert choose(ways(), X, calibration=here, limit_ms=1.0).by == by
    monkeypatch.setenv("RLXJAX_MEASURE", "bad")
    with pytest.raises(ValueError, match=r"^RLXJAX_MEASURE: expected one of never, undecided, always, got 'bad'$"):
        choose(ways(), X, calibration=here)


def test_what_has_effects_is_chosen_without_measuring_and_other_values_are_taken_where_nobody_checks(here):
    for fn in (jax.jit(printing), jax.jit(lambda x: x * 2.0, donate_argnums=0)):
        assert choose({**ways(), "c": fn}, X, calibration=here, measure="never").by == "model"
    other = jax.jit(lambda x: x * 2.1)
    best = {
        "top_k": jax.jit(lambda x: jax.lax.top_k(x, 2)),
        "slices": jax.jit(lambda x: (x[:, :2], jax.lax.broadcasted_iota(jnp.int32, (8, 2), 1))),
    }
    assert choose(best, X, calibration=here, **QUICK).by == "measured"  # a list and a tuple
    assert choose({**ways(), "c": other}, X, calibration=here, check=False, **QUICK)["c"].measured_ns


def test_choosing_inside_a_traced_function_times_what_runs(here):
    x, found, ran = np.ones((8, 16), np.float32), [], []

    def doubled(x):
        return jax.pure_callback(lambda x: ran.append(0) or 2.0 * x, real(8, 16), x, vmap_method="sequential")

    def fn(y):
        functions = {**ways(), "called": jax.jit(doubled)}
        found.append(choose(functions, x, calibration=here, measure="always", limit_ms=10.0))
        return 2.0 * y

    jax.jit(fn)(X)
    assert found[0].by == "measured"
    assert len(ran) > 2 * found[0].rounds


def test_what_is_ruled_out_beside_a_favourite_runs_where_that_fails(here):
    def broken(x):
        if not isinstance(x, jax.core.Tracer):
            raise RuntimeError("no memory")
        return 2.0 * x

    slow = jax.jit(lambda x: jnp.broadcast_to(x, (4096, *x.shape)).sum(0) / 2048.0)
    ways = {"broken": broken, "broken too": lambda x: broken(x), "slow": slow}
    assert choose({"broken": broken, "slow": slow}, X, calibration=here).by == "model"
    found = choose(ways, X, calibration=here)
    assert (found.name, found.by, found["broken too"].failed) == ("slow", "measured", "raised RuntimeError: no memory")


# --- Suites --------------------------------------------------------------------------------------


class Loops(Suite):
    """Programs that take so many us, or twice as many."""

    model = LINE

    def __init__(self, clock=None):
        self.clock = clock

    def program(self, cell):
        taken_ns = int(cell.inputs["n"] * 1e3 * (1 if cell.variant == "plain" else 2))

        def run():
            self.clock[0] += taken_ns

        return run


class Broken(Loops):
    """The second one raises."""

    def program(self, cell):
        if cell.variant == "blocked":
            raise OSError("no such program")
        return super().program(cell)


def lines(sd=0.5, spread=0.2):
    """A calibration by which the second variant takes half of the first."""
    return Calibration({"line": calibrated(certain(LINE, LINE_TRUTH | {"block_ns": 1.0}, sd, spread))}, None, {})


def test_the_variants_of_a_suite_are_measured_and_remembered(clock):
    known, sizes = lines(), {"n": 200.0}
    before = choose(Loops(clock), inputs=sizes, calibration=known, measure="never")
    assert (before.name, before.by) == ("blocked", "model")
    for n in (50.0, 100.0, 400.0):
        found = choose(Loops(clock), inputs={"n": n}, calibration=known, measure="always")
        assert (found.name, found.by, found.is_tie) == ("plain", "measured", False)
        assert found() is None
        again = choose(Loops(clock), inputs={"n": n}, calibration=known)
        assert (again.name, again.by) == ("plain", "remembered")
    assert choose(Loops(clock), inputs=sizes, calibration=known, measure="never") == before
    assert {own.kind for own in Memory().all()} == {"line"}

    class Anew(Loops):
        runner = 2

    assert choose(Anew(clock), inputs={"n": 50.0}, calibration=known, measure="never").by == "model"


class Halves(Loops):
    """The second one takes half of the first, as the model says."""

    def program(self, cell):
        halved = dataclasses.replace(cell, inputs={"n": cell.inputs["n"] / (1 if cell.variant == "plain" else 4)})
        return super().program(halved)


def test_an_extrapolation_rules_nothing_out(clock):
    known = lines(0.05, 0.05)
    assert known.of("line").domain["n"][1] == 2.0**13
    found = [choose(Halves(clock), inputs={"n": n}, calibration=known) for n in (2.0**12, 2.0**15)]
    assert [(own.name, own.by) for own in found] == [("blocked", by) for by in ("model", "measured")]


def test_one_that_raises_loses_and_is_named_and_not_tried_again(clock):
    assert choose(Loops(clock), inputs={"n": 9.0}, calibration=Calibration({}, None, {})).name == "plain"
    for by in ("measured", "remembered"):
        found = choose(Broken(clock), inputs={"n": 1.0}, calibration=lines(), **QUICK)
        assert (found.name, found.by, found["blocked"].failed) == ("plain", by, "raised OSError: no such program")
        assert "blocked  " in str(found)
        assert "no such program" in str(found)


# --- Welch peaks ---------------------------------------------------------------------------------

PARAMS = WelchPeakParams.fast(n_fft=64, k=2)


@pytest.fixture
def signal():
    _choice.forget_choices()
    return np.random.default_rng(0).standard_normal((5, PARAMS.frame_len)).astype(np.float32)


def test_peaks_are_the_same_however_the_variant_is_chosen_and_what_was_measured_holds_in_later_calls(signal):
    expected = welch_peaks(signal, PARAMS)
    found = welch_peaks(signal, PARAMS, measure="always")
    np.testing.assert_array_equal(found[..., 0], expected[..., 0])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    (entry,) = Memory().all()
    assert entry.kind == "welch"
    assert all(own.time_ns for own in entry.alternatives)
    for word in (None, "never", "undecided", "always"):
        known = choose_variant(signal, PARAMS, measure=word)
        assert (known.name, known.by) == (entry.name, "remembered")
        np.testing.assert_array_equal(known(signal), found)
        np.testing.assert_array_equal(welch_peaks(signal, PARAMS, measure=word), found)
    other = next(own.name for own in entry.alternatives if own.name not in (entry.name, "block"))
    Memory().pin(entry.key, other)
    known = choose_variant(signal, PARAMS)
    assert (known.name, known.by) == (other, "pinned")
    assert len(Memory().all()) == 1


def test_explicit_strategies_and_traced_calls_measure_nothing(signal, monkeypatch):
    monkeypatch.setenv("RLXJAX_MEASURE", "always")
    expected = welch_peaks(signal, PARAMS, "host")
    of_rows = jax.jit(jax.vmap(lambda row: welch_peaks(row, PARAMS)[0]))
    for found in (welch_peaks(signal, PARAMS, "fused_top_k"), of_rows(signal)):
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert Memory().all() == []
    np.testing.assert_allclose(welch_peaks(signal, PARAMS), expected, rtol=1e-4)
    assert [own.kind for own in Memory().all()] == ["welch"]


def test_a_bad_word_is_refused_by_every_strategy_and_that_of_the_environment_where_it_counts(signal, monkeypatch):
    for strategy in ("auto", "host", "fused_top_k"):
        with pytest.raises(ValueError, match="^measure: expected one of never, undecided, always, got 'sometimes'$"):
            welch_peaks(signal, PARAMS, strategy, measure="sometimes")
    monkeypatch.setenv("RLXJAX_MEASURE", "bad")
    with pytest.raises(ValueError, match="^RLXJAX_MEASURE: expected one of"):
        welch_peaks(signal, PARAMS)
    assert welch_peaks(signal, PARAMS, "host").shape == (5, 2, 2)


def test_a_folder_that_cannot_be_made_is_one_warning_and_the_choice_goes_on(signal, home):
    home.mkdir()
    (home / "choices").touch()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert welch_peaks(signal, PARAMS, measure="undecided").shape == (5, 2, 2)
        assert choose(ways(), X, **QUICK).by == "measured"
    (warned,) = [str(one.message) for one in caught]
    assert "choices are remembered in this process only" in warned


# --- Threads, and what is held -------------------------------------------------------------------


def test_ten_threads_that_choose_at_once_agree(here):
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        found = list(pool.map(lambda _: choose(ways(), X, calibration=here, **QUICK), range(10)))
    assert sorted(own.by for own in found) == ["measured", *["remembered"] * 9]
    assert len({own.name for own in found}) == 1
    assert len(Memory().all()) == 1


def test_a_choice_holds_no_argument(here, signal):
    argument, rows = jnp.ones((32, 32), jnp.float32) + 1.0, jnp.asarray(signal) + 1.0
    held = [weakref.ref(argument), weakref.ref(rows)]
    choices = [choose(ways(), argument, calibration=here, **QUICK), choose_variant(rows, PARAMS, measure="undecided")]
    welch_peaks(rows, PARAMS, measure="always")
    del argument, rows
    gc.collect()
    assert [one() is None for one in held] == [True, True]
    assert choices[0](X).shape == X.shape
