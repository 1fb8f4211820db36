"""Whether stages should be one program: laws of the answer, its reasons, and the command."""

import collections
import dataclasses
import functools
import json
import math
import re
import shlex
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _documented import assert_documented
from _shapes import real
from jax.extend.core import Primitive
from typer.testing import CliRunner

import rlxjax as rx
from calibrate.cli import app
from calibrate.report.advice import _following, _verdict, advice_page, read_advice
from calibrate.suites import arguments_of, named, shape_of
from rlxjax.calibration import CalibratedModel, Calibration, predict_profiles
from rlxjax.choices import Choice, Grouping, Memory, Way
from rlxjax.choices._advice import as_code, why_measured
from rlxjax.choices._advise import _Question, composed
from rlxjax.choices._programs import filled, in_order
from rlxjax.models import FFT, FUNCTIONS, function_runs
from rlxjax.units import time_text

STAGES = """
import jax.numpy as jnp

def square(x):
    print("a word of their own")
    return x * x

def total(y):
    return jnp.sum(y, axis=-1)

SHAPES = (jnp.zeros((64, 64)),)
"""


def square(x):
    return x * x


def total(y):
    return jnp.sum(y, axis=-1)


def sines(x):
    return jnp.sin(x)


def look_up(table, index):
    return table.at[index].get(mode="clip")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A calibration of a made-up machine that is exactly as the model says."""
    shapes, functions = [real(8, 8), real(2048, 2048)], (square, jnp.sum, lambda x: x @ x, lambda x: jnp.sort(x.T))
    runs = function_runs([rx.profile_function(fn, shape) for shape in shapes for fn in functions])
    known = rx.fit.prior_posterior(FUNCTIONS)
    known = dataclasses.replace(known, factor=0.02 * known.factor, spread=0.02 * known.spread)
    terms = rx.fit.FitResult(known.coefficients, 0.0, 0.0, 1, True, 0.0, FUNCTIONS.prior.log_sd, {}, None, [], "Exact.")
    path = tmp_path_factory.mktemp("advise") / "c.json"
    rx.save_calibration(path, rx.fit.PosteriorFit(known, terms, runs, np.zeros(1)))
    return path


@pytest.fixture(scope="module")
def here(file):
    return rx.load_calibration(file)


def times(advice):
    """Return the predicted times of the stages apart, and of what is compared with them."""
    return [own.predicted_ns for own in advice.pair]


def test_one_program_saves_what_the_stages_hand_on_and_the_code_is_the_change_and_runs(here):
    found = rx.advise([square, total], real(2048, 2048), calibration=here)
    assert (found.verdict, found.reason_code) == ("fuse", "saves_traffic")
    assert found.saved_calls == found.saved_launches == 1
    assert found.saved_readback_bytes == 4 * 2048 * 2048
    assert found.saved_traffic_bytes == 2 * 4 * 2048 * 2048
    assert found.recomputed_flops == found.recomputed_elements == found.saved_sync_points == 0
    apart, together = found.pair
    assert (apart, together) == (found["apart"], found["together"])
    assert together.peak_bytes < apart.peak_bytes
    assert found.gain_ns == apart.time_ns - together.time_ns > 0
    assert apart.interval_ns[0] < apart.time_ns < apart.interval_ns[1]
    profiles = [rx.profile_function(fn, real(2048, 2048)) for fn in (square, total)]
    parts = [own.time_ns for own in predict_profiles(here.of("functions"), profiles).predictions]
    np.testing.assert_allclose([stage.time_ns for stage in found.stages], parts, rtol=1e-12)
    np.testing.assert_allclose(apart.time_ns, sum(parts), rtol=1e-6)
    assert found.time_ns == together.time_ns
    np.testing.assert_allclose(found(jnp.full((2048, 2048), 2.0, jnp.float32)), 4.0 * 2048)  # it is a choice
    assert rx.advise([square, total], real(8, 8), calibration=here).reason_code == "saves_launches"
    saved = "saves 1 call, 1 launch, 16.8 MB of readback, 33.6 MB of memory traffic\npeak memory: 33.6 MB apart, "
    assert saved in str(found)
    assert "apart: a program for each of 2 stages; together: one program; 90 % intervals\n" in str(found)
    assert "donate" not in found.code
    lines = rx.advise([square, sines], real(64, 64), calibration=here).code.splitlines()
    assert lines[0] == f"from {__name__} import square, sines"
    assert lines[1:] == [
        "fused = jax.jit(lambda x: sines(square(x)))",
        "# fused = jax.jit(fused.__wrapped__, donate_argnums=(0,))  # if no code uses x afterwards",
    ]


def prepared(x, i):
    return x * 0.5 + 0.1, i


def sined(x, i):
    return jnp.sin(x), i


def shifted(y):
    return 2.0 * y - 1.0


class Model:
    def step(self, x):
        return 3.0 * x

    def __call__(self, x):
        return x - 1.0


def fused(jax):
    return jax + 1.0


def called(name, fn=lambda x: 2.0 * x):
    """Return a new function that has this name."""
    return type(fn)(fn.__code__, fn.__globals__, name)


def both(square, total):
    return square + 1.0, square * total


PARTS, POINT, X8 = (lambda x: (x, 2.0 * x)), collections.namedtuple("Point", "a b"), (real(8, 8),)  # noqa: PYI024
#: Stages whose names or arguments could break the printed code.
PIPELINES = [
    *([called(name), jnp.sin] for name in ("class", "fused", "fused1", "stage1", "stages", "jax", "x0", "abs", "1")),
    *([called("step"), called("step", lambda x: x + 1.0), last] for last in (jnp.abs, called("step"), square)),
    *([Model().step, Model(), functools.partial(jnp.multiply, 2.0)], [fused, square, fused], [square, square]),
    *([jax.jit(square), jnp.tanh], [jax.jit(lambda x: x + 1.0), jax.jit(lambda x: x * 2.0)], [jax.nn.gelu, sum]),
    *([lambda x: (x + 1.0,), square], [lambda x: POINT(x, x), lambda p: p.a + p.b], [lambda x: [x], lambda x: x[0]]),
    *([PARTS, both, jnp.add], [PARTS, lambda *both: both[0] - both[1]], [PARTS, lambda x, y=1.0, *, z=2.0: x + y * z]),
    *([lambda total, x=0.0: total + x, total], [square, lambda square: {"a": square}, lambda tree: tree["a"]]),
    [square, lambda x: ()],
]
#: Pipelines with their own arguments.
PIPELINES_OF = [
    (({"x": real(8)},), [lambda tree: tree["x"], jnp.exp]),
    ((), [lambda: jnp.ones(3), jnp.cumsum]),
    ((jax.eval_shape(lambda: jax.random.key(0)),), [lambda key: jax.random.normal(key, (3,)), jnp.sort]),
    ((real(8), jax.ShapeDtypeStruct((4,), jnp.int32)), [prepared, look_up]),
    *((X8, stages) for stages in PIPELINES),
]


def test_the_printed_code_runs_twice_on_the_same_arguments_and_gives_the_result_of_the_stages(monkeypatch):
    here = called("in_main")
    here.__module__ = "__main__"
    monkeypatch.setattr(sys.modules["__main__"], "in_main", here, raising=False)
    assert as_code([here], in_order([here], X8), [range(1)]).startswith("fused = jax.jit(in_main)\n# ")
    for args, given in PIPELINES_OF:
        whole = in_order(given, args)
        for groups in ([range(len(given))], [range(1), range(1, len(given))]):
            code, scope = as_code(given, whole, groups), {"jax": jax, "stages": given}
            exec(code, scope)  # noqa: S102
            arrays = filled(args)
            expected = composed(whole)(*arrays)
            for _ in range(2):
                jax.tree.map(
                    functools.partial(np.testing.assert_allclose, rtol=1e-5), scope["fused"](*arrays), expected
                )
            donating = re.findall("# (fused.*)  # if no code uses .* afterwards", code)
            exec("\n".join(donating), scope)  # noqa: S102
            copies = jax.tree.map(jnp.copy, arrays)
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), scope["fused"](*copies), expected)
            assert not donating or any(leaf.is_deleted() for leaf in jax.tree.leaves(copies)), code


#: Of four stages, a table is made and looked up: the look-up would make it again for every entry.
TABLE = [prepared, sined, look_up, shifted]
TABLE_ARGS = (real(64), jax.ShapeDtypeStruct((2**18,), jnp.int32))


def test_of_four_stages_every_grouping_is_priced_and_the_best_is_advised(here, tmp_path):
    found = rx.advise(TABLE, *TABLE_ARGS, calibration=here)
    assert (found.verdict, found.reason_code) == ("group", "saves_launches")
    assert found.groups == (("prepared", "sined"), ("look_up", "shifted"))
    assert found.saved_calls == 2
    assert found.recomputed_elements == 0
    assert found.gain_ns == np.subtract(*times(found)) > 0
    assert len(found.alternatives) == len({own.groups for own in found.alternatives}) == 2**3
    times_ns = [own.time_ns for own in found.alternatives]
    assert times_ns == sorted(times_ns)
    assert found["prepared+sined | look_up+shifted"] == found.chosen == found.alternatives[0]
    assert found["apart"].probability is None
    assert found["together"].probability < 0.1 < 0.9 < found.probability == found.chosen.probability
    # A grouping takes what its programs take, each by the profile of its stages as one function.
    first = rx.profile_function(lambda x, i: sined(*prepared(x, i)), *TABLE_ARGS)
    second = rx.profile_function(lambda x, i: shifted(look_up(x, i)), *TABLE_ARGS)
    parts = predict_profiles(here.of("functions"), [first, second]).predictions
    np.testing.assert_allclose(found.time_ns, sum(part.time_ns for part in parts), rtol=1e-12)
    np.testing.assert_allclose(found.interval_ns, np.sum([part[1:3] for part in parts], 0), rtol=1e-12)
    assert "prepared+sined | look_up+shifted saves" in str(found)
    assert re.findall(r"^(\w+) = ", found.code, re.MULTILINE) == ["fused1", "fused2", "fused"]
    path = tmp_path / "advice.json"
    path.write_text(json.dumps(found.as_dict()))
    assert read_advice(path)[0] == found
    assert found.name in advice_page(path, command="")


def test_a_stage_is_traced_once_whatever_it_is_part_of(here):
    traced = []

    def counted(name):
        return lambda x: traced.append(name) or 2.0 * x

    rx.advise([counted(name) for name in "abcd"], real(64), calibration=here)
    assert traced == list("abcd")


def test_the_memory_rules_out_groups_and_a_rival_within_the_doubt_is_named(here):
    stages = [square, jnp.negative, total]
    free = rx.advise(stages, real(2048, 2048), calibration=here)
    assert (free.verdict, free.groups) == ("fuse", (("square", "negative", "total"),))
    for own in free.alternatives:
        bound = rx.advise(stages, real(2048, 2048), calibration=here, memory_bytes=own.peak_bytes)
        assert not bound[own.name].failed
        for other in bound.alternatives:
            assert other.name == "apart" or (other.peak_bytes <= own.peak_bytes) == (not other.failed)
    for some in (stages, stages[:2]):
        none = rx.advise(some, real(2048, 2048), calibration=here, memory_bytes=1000)
        assert (none.verdict, none.reason_code) == ("keep", "peak_memory")
        assert [own.name for own in none.alternatives if not own.failed] == ["apart"]
    # What is sure of two stages stays sure beside a third that may or may not join them.
    stages[2] = jnp.sort
    small = rx.advise(stages, real(2048, 2048), calibration=here)  # beside a sort, two passes do not matter
    assert (small.verdict, small.reason_code, small.groups) == ("keep", "no_matter", small["apart"].groups)
    assert small.reason.startswith("either way: less than 2 % apart; one program saves ")
    stages[2] = jnp.linalg.cholesky
    beside = rx.advise(stages, real(2048, 2048), calibration=here, regret=0.0)
    assert (beside.verdict, beside.groups) == ("group", (("square", "negative"), ("cholesky",)))
    assert beside.reason.endswith("; together may be as fast")
    assert beside["together"].probability < 0.9


def test_what_is_computed_again_keeps_stages_apart_but_where_the_peak_has_a_price(here):
    stages = [sined, look_up]
    dear = rx.advise(stages, *TABLE_ARGS, calibration=here)
    assert (dear.verdict, dear.reason_code, dear.code) == ("keep", "recompute", "")
    assert dear.recomputed_elements == 2**18 - 64
    assert dear.probability < 0.1
    peak = dear["apart"].peak_bytes - dear["together"].peak_bytes
    assert dear.gain_ns < 0 < peak
    for share, verdict in ((0.0, "keep"), (1.0, "undecided"), (3.0, "fuse")):
        price = -share * dear.gain_ns / peak
        priced = rx.advise(stages, *TABLE_ARGS, calibration=here, peak_price_ns_per_byte=price)
        assert priced.verdict == verdict


def test_one_of_a_thing_is_not_told_as_several():
    forms = (Grouping("together", 1.0, (1.0, 2.0), 1.0, compile_s=0.5e-9), Grouping("apart", 2.0, (1.0, 3.0), 2.0))
    said = {"verdict": "fuse", "reason_code": "saves_launches", "reason": "so", "compared": "together"}
    pays = rx.Advice("together", "measured", 0.9, rounds=1, alternatives=forms, **said)
    assert "; compiling takes 0.500 ns and pays off after 1 call\n" in str(pays)
    assert "decided by measuring in 1 round\n" in str(pays)
    one, two = (
        "saves 1 call, 1 launch\nadds 1 recomputed number",
        "saves 2 calls, 2 launches\nadds 2 recomputed numbers",
    )
    for count, said in ((1, one), (2, two), (-1, "adds 1 call, 1 launch\n")):
        counts = dict.fromkeys(("saved_calls", "saved_launches", "recomputed_elements"), count)
        assert said in str(dataclasses.replace(pays, **counts))


def test_a_gain_that_is_too_small_turns_the_verdict(here):
    def ask(min_gain_ns):
        return rx.advise([square, total], real(2048, 2048), calibration=here, min_gain_ns=min_gain_ns)

    gain_ns = ask(0.0).gain_ns
    found = [ask(share * gain_ns) for share in (0.25, 1.0, 2.0)]
    assert [own.verdict for own in found] == ["fuse", "undecided", "keep"]
    assert [own.reason_code for own in found[1:]] == ["too_close", "no_gain"]
    asked = [time_text(share * gain_ns) for share in (1.0, 2.0)]
    assert found[1].reason.endswith(f"a call, close to the {asked[0]} that you ask for")
    assert found[2].reason.endswith(f"a call, less than the {asked[1]} that you ask for")
    assert [asking in str(own) for own in found for asking in ['rx.advise(..., measure="undecided")']] == [
        False,
        True,
        False,
    ]
    np.testing.assert_allclose(found[1].probability, 0.5, atol=1e-6)


def test_a_jitted_function_is_one_program_and_a_plain_one_is_its_parts(here):
    def step(x):
        return jax.jit(total)(jax.jit(square)(x) + 1.0)

    assert rx.advise(jax.jit(step), real(64, 64), calibration=here).reason_code == "already_one_program"
    assert rx.advise(jnp.tanh, real(64, 64), calibration=here).reason_code == "already_one_program"
    found = rx.advise(step, real(64, 64), calibration=here)
    assert [stage.name for stage in found.stages] == ["square", "add", "total"]
    assert found.verdict == "fuse"
    assert {own.name for own in found.alternatives} == {"apart", "together"}  # the parts of a function need be no chain
    assert found.code.startswith("stage1 = stages[0]  # stages: ")
    assert found.code.endswith("\nfused = jax.jit(stage1)")
    assert (
        str(found)
        .splitlines()[0]
        .endswith("; compared with running step operation by operation, without jit (saves_launches)")
    )


def test_what_cannot_be_modelled_says_why(here):
    def loop(x):
        return jax.lax.while_loop(lambda y: y.sum() < 100, lambda y: y * 2, x)

    found = rx.advise([loop, total], real(8, 8), calibration=here)
    assert (found.verdict, found.reason_code) == ("cannot model", "unknown_loop")
    assert "test_advise.py:" in found.reason
    assert found.pair == ()
    assert found.probability is None
    assert 'rx.advise(..., measure="undecided")' in str(found)
    (unknown,) = rx.profile_function(loop, real(8, 8)).unknown_loops
    for trips in ([5], {unknown.line: 5}):
        assert rx.advise([loop, total], real(8, 8), calibration=here, trip_counts=trips).gain_ns > 0
    odd = Primitive("odd")
    odd.def_abstract_eval(lambda x: x)
    found = rx.advise([odd.bind, total], real(8, 8), calibration=here)
    assert (found.verdict, found.reason_code) == ("cannot model", "uncosted")
    other = Calibration({"fft": CalibratedModel(rx.fit.prior_posterior(FFT), {}, {}, {})}, None, {})
    found = rx.advise([square, total], real(8), calibration=other)
    assert found.reason_code == "not_calibrated"
    assert "undecided" not in str(found)  # which needs a calibration too


def test_bad_input_and_no_calibration_are_one_sentence(here, tmp_path, monkeypatch):
    for match, args, options in (
        ("min_gain_ns: expected a number of at least 0, got -1", [real(8)], {"min_gain_ns": -1}),
        ("peak_price_ns_per_byte: expected a number of", [real(8)], {"peak_price_ns_per_byte": float("nan")}),
        ("peak_price_ns_per_byte: expected a number of", [real(8)], {"peak_price_ns_per_byte": float("inf")}),
        ("memory_bytes: expected a number of at least 0", [real(8)], {"memory_bytes": float("nan")}),
        (r"stages: expected stage 2, total, to take the result of square, but it raised", [real()], {}),
        ("stages: square takes 1 argument, got 0", [], {}),
        ("trip_counts", [real(8, 8)], {"trip_counts": [-1]}),
        ("regret: expected a number", [real(8)], {"regret": 2.0}),
    ):
        with pytest.raises(ValueError, match=match):
            rx.advise([square, total], *args, calibration=here, **options)
    with pytest.raises(ValueError, match="stages: look_up takes 2 arguments, got 1 from square"):
        rx.advise([square, look_up], real(8), calibration=here)
    with pytest.raises(ValueError, match="stages: expected a function"):
        rx.advise([], calibration=here)
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path))
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")  # which has no population
    for path in ("missing.json", None):
        with pytest.raises(rx.calibration.CalibrationFileError, match="no such file"):
            rx.advise([square, total], real(8, 8), calibration=path)


@pytest.fixture(scope="module")
def unsure():
    """A calibration that knows next to nothing."""
    spans = dict.fromkeys([*FUNCTIONS.inputs, *FUNCTIONS.kernels], (0, 1e9))
    return Calibration({"functions": CalibratedModel(rx.fit.prior_posterior(FUNCTIONS), {}, {}, spans)}, None, {})


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The folder of what is remembered, where nothing is."""
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RLXJAX_MEASURE", raising=False)


def test_a_measured_verdict_is_the_form_that_takes_the_least_and_is_remembered(unsure, home, tmp_path):
    args = (real(64), jax.ShapeDtypeStruct((2**14,), jnp.int32))
    found = rx.advise(TABLE, *args, calibration=unsure, measure="always")
    took = {own.name: own.measured_ns for own in found.alternatives}
    assert found.by == "measured"
    assert found.rounds > 0
    assert {"apart", "together", found.compared} <= {name for name, time_ns in took.items() if time_ns is not None}
    # The visits of others may have met another pace of the machine; ratios are by rounds.
    timed = [own for own in found.alternatives if own.measured_ns is not None and not own.is_tie]
    assert found.is_tie or took[found.name] <= 2.0 * min(own.measured_ns for own in timed)
    assert found.is_tie == (found.reason_code == "tie") == ("a tie" in found.reason)
    assert (found.verdict == "keep") == (not found.code) == (found.name == "apart")
    assert found.gain_ns == took["apart"] - took[found.compared]
    assert (found.calls_to_pay_back is None) == (found.verdict == "keep")
    assert "decided by measuring in " in str(found)
    assert ", by the model\n" in str(found)
    path = tmp_path / "advice.json"
    path.write_text(json.dumps(found.as_dict()))
    assert read_advice(path)[0] == found
    assert "Decided by measuring" in advice_page(path, command="")
    for word in ("always", "undecided", "never"):
        again = rx.advise(TABLE, *args, calibration=unsure, measure=word)
        assert (again.by, again.measuring_s) == ("remembered", 0.0)
        alternatives = tuple(dataclasses.replace(own, compile_s=None) for own in found.alternatives)
        changed = {"by": "measured", "measuring_s": found.measuring_s}
        assert dataclasses.replace(again, **changed) == dataclasses.replace(found, alternatives=alternatives)
    (kept,) = Memory().all(kind="functions")
    assert all(one.measured_ns == took[one.name] for one in kept.alternatives)
    Memory().pin(kept.key, "prepared+sined | look_up+shifted")
    pinned = rx.advise(TABLE, *args, calibration=unsure)
    assert (pinned.verdict, pinned.by, pinned.reason_code) == ("group", "pinned", "pinned")
    assert pinned.groups == (("prepared", "sined"), ("look_up", "shifted"))
    assert pinned.code


def test_what_was_measured_decides_by_its_sign_and_what_it_says_against_the_model():
    def said(apart_ns, together_ns, *, is_tie=False, by="measured", predicted=(3e3, 2e3), extra_ns=0.0, failed=""):
        ends = [own and (0.7 * own, 1.3 * own) if is_tie else None for own in (apart_ns, together_ns)]
        together = Way("together", predicted[1], None, together_ns, ends[1], failed, is_tie, extra_ns=extra_ns)
        best = "apart" if together_ns is None or is_tie or apart_ns <= together_ns + extra_ns else "together"
        forms = Way("apart", predicted[0], None, apart_ns, ends[0]), together
        code, name, reason = why_measured(Choice(best, by, forms, 0.99, is_tie, 0.02, 8))
        assert name == ("together" if code == "measured_faster" else "apart" if by == "measured" else best)
        return code, reason

    assert said(2e3, 1e3) == ("measured_faster", "measured one program 1 us, separate programs 2 us a call")
    code, reason = said(1e3, 2e3)
    assert code == "measured_slower"
    assert reason == "measured separate programs 1 us, one program 2 us a call; the model predicts the opposite"
    assert said(2e3, 1e3, predicted=(2e3, 3e3))[1].endswith("; the model predicts the opposite")
    code, reason = said(2_000.0, 2_010.0, is_tie=True)
    assert code == "tie"
    assert reason.startswith("a tie, within 2 %: measured separate programs 2 us, one program 2.01 us a call")
    assert "not told apart" in said(2e3, 3e3, is_tie=True)[1]
    gain = "measured: one program saves 1 us a call, less than the 5 us that you ask for"
    assert said(2e3, 1e3, extra_ns=5e3) == ("no_gain", gain)
    failed = said(2e3, None, failed="raised Oops")
    assert failed == ("measured_slower", "only separate programs can run; together raised Oops")
    assert said(2e3, 1e3, by="pinned")[0] == "pinned"


def test_verdict_groups_colour_code_and_sentence_of_an_advice_agree(here, monkeypatch):
    caught, rng, seen, answer = [], np.random.default_rng(0), set(), _Question.answer
    monkeypatch.setattr(_Question, "answer", lambda *asked: caught.extend(asked) or answer(*asked))
    rx.advise([square, sines, total], real(512, 512), calibration=here)
    monkeypatch.undo()
    question, _, times, _ = caught
    for _ in range(300):
        options = {
            "min_gain_ns": [0.0, 1e5],
            "price": [0.0, 0.1],
            "limit": [math.inf, 3e6, 0.0],
            "regret": [0.0, 0.02, 0.5],
        }
        asked = dataclasses.replace(question, **{name: rng.choice(values) for name, values in options.items()})
        factors = np.exp(rng.choice([0.0, 0.01, 1.0]) * rng.standard_normal(len(times.predictions)))
        pairs = zip(times.predictions, factors, strict=True)
        scaled = tuple(one._replace(time_ns=one.time_ns * factor) for one, factor in pairs)
        known = times._replace(predictions=scaled, scores=times.scores * rng.choice([0.0, 1.0, 10.0]))
        forms, choice = asked.forms(known), None
        able, by = [own.name for own in forms if not own.failed], rng.choice(["never", "model", "measured", "pinned"])
        if by != "never" and len(able) > 1:
            ways, best = [], str(rng.choice(able))
            for name in able:
                time_ns = 1e6 * np.exp(rng.choice([0.01, 0.5]) * rng.standard_normal())
                width, is_timed = 1.0 + rng.choice([0.001, 0.3]) * rng.random(), name == best or rng.random() < 0.9
                figures = (time_ns, (time_ns / width, time_ns * width)) if is_timed and by != "model" else (None, None)
                failed, is_tie = ("" if is_timed else "raised Oops"), name != best and rng.random() < 0.3
                extra_ns = 0.0 if name == "apart" else asked.min_gain_ns
                ways.append(Way(name, 1e6, None, *figures, failed, bool(is_tie), 0.1, extra_ns=extra_ns))
            choice = Choice(best, str(by), tuple(ways), 0.95, False, asked.regret, 8 * (by != "model"))
        found = asked.answer(forms, known, choice)
        text, verdict, is_change = str(found), _verdict(found), found.verdict in ("fuse", "group")
        code, own, apart = found.reason_code, found[found.compared], found["apart"]
        seen.add(code)
        assert found.verdict in ("fuse", "group", "keep", "undecided")
        assert is_change == bool(found.code) == (found.name != "apart") == ("Change" in _following(found, []).said[0])
        assert (found.verdict == "fuse") == (found.name == "together")
        assert (found.groups, found.chosen.is_tie) == (found.chosen.groups, False)
        assert text.startswith(f"{found.verdict}: {found.reason} ({code})")
        assert (found.verdict == "undecided") == (code == "too_close") == ("to decide, " in text)
        assert found.is_tie == (code == "tie") == (": a tie" in text)
        is_even = code in ("tie", "no_matter", "too_close")
        assert (verdict.is_good is None) == is_even == found.reason.startswith(("a tie", "either way", "too close"))
        assert not (is_even and is_change)
        pays = found.calls_to_pay_back is not None
        assert pays == ("pays off" in text) == any("pays off" in own for own in verdict.said)
        assert not pays or (is_change and found.gain_ns > 0)
        if choice is None:
            assert not is_change or found.probability >= 0.9
        elif found.is_tie:
            ends = [np.add(one.measured_interval_ns, one is own and asked.min_gain_ns) for one in (own, apart)]
            assert max(low for low, _ in ends) <= (1.0 + asked.regret) * min(high for _, high in ends)
        elif by == "measured" and None not in (own.measured_ns, apart.measured_ns):
            assert is_change == (own.measured_ns + asked.min_gain_ns < apart.measured_ns)
    measured = {"tie", "measured_faster", "measured_slower", "no_gain", "pinned"}
    assert {"no_matter", "too_close", "saves_launches", "peak_memory"} | measured <= seen


def test_nothing_is_timed_where_the_model_is_sure_and_a_plain_function_is_timed_as_it_runs(here, unsure, home):
    model = here.of("functions")
    model = dataclasses.replace(model, domain=dict.fromkeys(model.domain, (0.0, 1e9)))
    wide = dataclasses.replace(here, models={"functions": model})
    # What the peak costs is no doubt of the model.
    price = {"peak_price_ns_per_byte": 1.0}
    sure = rx.advise([square, total], real(2048, 2048), calibration=wide, measure="undecided", **price)
    assert (sure.verdict, sure.by, sure.rounds, sure.reason_code) == ("fuse", "model", 0, "saves_traffic")
    assert Memory().all() == []
    traced = []

    def step(x):
        traced.append(isinstance(x, jax.core.Tracer))
        return jax.jit(total)(jax.jit(square)(x) + 1.0)

    found = rx.advise(functools.partial(step), real(64, 64), calibration=unsure, measure="always")
    assert found.rounds > 0
    assert traced.count(True) <= 2 < traced.count(False)
    # A shape stands for an array of JAX, and for no other one.
    rows = np.ones((64, 64), np.float32)
    for args, by in ((jnp.asarray(rows), "remembered"), (rows, "model"), (real(64, 65), "model")):
        assert rx.advise(functools.partial(step), args, calibration=unsure).by == by
    # What does not fit is no form, and a gain that no time can reach is not measured for.
    bound = rx.advise([square, total], real(64, 64), calibration=unsure, measure="always", memory_bytes=1000)
    assert (bound.verdict, bound.reason_code, bound.rounds) == ("keep", "peak_memory", 0)
    asked = rx.advise([square, total], real(64, 64), calibration=unsure, measure="always", min_gain_ns=1e12)
    assert (asked.verdict, asked.by, asked.code) == ("keep", "measured", "")
    assert asked.rounds > 0


def test_what_cannot_be_modelled_is_measured_where_that_is_asked(unsure, home):
    def halved(x):
        return jax.lax.while_loop(lambda y: y.sum() > 1.0, lambda y: y * 0.5, jnp.abs(x))

    def ask(**options):
        return rx.advise([halved, total], real(8, 8), calibration=unsure, **options)

    assert ask().verdict == "cannot model"
    assert rx.advise([square, total], real(8, 8), calibration=unsure, measure="always").by == "measured"
    assert ask(trip_counts=[5], measure="always").by == "measured"
    Memory().forget(None)
    assert ask().verdict == "cannot model"
    found = ask(measure="undecided")
    assert found.verdict in ("keep", "fuse")
    assert (found.by, found["apart"].predicted_ns, found.probability) == ("measured", None, None)
    assert found.gain_ns == np.subtract(*(own.measured_ns for own in found.pair))
    assert "decided by measuring in" in str(found)
    assert "apart     measured " in str(found)
    assert (ask().verdict, ask().by) == (found.verdict, "remembered")


def test_when_to_measure_is_a_word_and_stages_that_cannot_be_repeated_are_refused(unsure, home, monkeypatch):
    def ask(*stages, **options):
        return rx.advise(list(stages), real(8, 8), calibration=unsure, **options)

    def loud(x):
        jax.debug.print("{}", x[0, 0])
        return x

    for match, stages, measure in (
        ("measure: expected one of never, undecided, always, got 'often'", [square, total], "often"),
        ("'apart' has side effects", [loud, total], "always"),
        ("donates arguments", [jax.jit(square, donate_argnums=0), total], "undecided"),
    ):
        with pytest.raises(ValueError, match=match):
            ask(*stages, measure=measure)
    for flag in (True, False):
        with pytest.raises(Exception, match="measure: expected one of never, undecided, always, got (True|False)"):
            ask(square, total, measure=flag)
    assert ask(loud, total, measure="never").verdict == "cannot model"
    monkeypatch.setenv("RLXJAX_MEASURE", "sometimes")
    with pytest.raises(ValueError, match="RLXJAX_MEASURE: expected one of never, undecided, always, got 'sometimes'"):
        ask(square, total)
    monkeypatch.setenv("RLXJAX_MEASURE", "always")
    assert ask(square, total).by == "measured"
    assert ask(square, sines, measure="never").by == "model"
    with pytest.raises(ValueError, match="expected arrays or shapes, got traced values"):
        jax.jit(lambda x: rx.advise([square, total], x, calibration=unsure).saved_calls or x)(jnp.ones((8, 8)))


def test_the_command_answers_in_text_and_in_json(file, tmp_path, monkeypatch):
    (tmp_path / "own_stages.py").write_text(STAGES)
    monkeypatch.chdir(tmp_path)
    named_args = ["advise", "own_stages:square", "own_stages:total", "--calibration", str(file)]
    result = CliRunner().invoke(app, [*named_args, "--arg", "f32[2048,2048]"])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("fuse: one program saves")
    result = CliRunner().invoke(app, [*named_args, "--args", "own_stages:SHAPES", "--json"])
    assert "a word of their own" in result.stderr
    assert_documented("advise", json.loads(result.stdout))
    assert json.loads(result.stdout)["verdict"] == "fuse"
    gain_ns = json.loads(result.stdout)["gain_ns"]
    unsure = CliRunner().invoke(app, [*named_args, "--args", "own_stages:SHAPES", "--min-gain", str(gain_ns)])
    assert unsure.exit_code == 1
    assert unsure.stdout.startswith("undecided: too close to call: ")
    (said,) = re.findall("to decide, compile and time the programs: rlxjax (.*)\n", unsure.stdout)
    asked = [*named_args, "--args", "own_stages:SHAPES", "--min-gain", str(gain_ns), "--measure", "undecided"]
    assert sorted(shlex.split(said)) == sorted(asked)
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path))
    asked = [*named_args, "--arg", "f32[32,32]", "--measure", "always", "--json"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert_documented("advise", found)
    assert found["by"] == "measured"
    assert found["rounds"] > 0
    result = CliRunner().invoke(app, [*asked[:-1]])
    assert "decided by an earlier measurement" in result.stdout
    assert CliRunner().invoke(app, [*named_args, "--measure", "often"]).exit_code == 2


def test_the_command_imports_what_is_named_and_refuses_the_rest_in_one_line(tmp_path, monkeypatch):
    for name, text in {
        "broken": "raise RuntimeError('not today')",
        "leaving": "import sys; sys.exit(0)",
        "half": "def f(x:",
        "odd": "import sys\nclass C:\n    x = property(lambda self: 1 / 0)\nc = C()\nn = 5\ndef leave(*_): sys.exit(3)",
    }.items():
        (tmp_path / f"{name}_stages.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    for match, call in {
        "stages: expected module:name, got 'square'": lambda: named("square", "stages"),
        "stages: broken_stages does not import .RuntimeError: not today": lambda: named("broken_stages:f", "stages"),
        "stages: nowhere does not import": lambda: named("nowhere:f", "stages"),
        "stages: leaving_stages does not import .SystemExit: 0": lambda: named("leaving_stages:f", "stages"),
        "stages: half_stages does not import .SyntaxError: ": lambda: named("half_stages:f", "stages"),
        "stages: odd_stages has no 'c.x' .ZeroDivisionError: ": lambda: named("odd_stages:c.x", "stages"),
        "stages: odd_stages has no 'c.y' .AttributeError: ": lambda: named("odd_stages:c.y", "stages"),
        "stages: expected a function, odd_stages:n is of type int": lambda: named("odd_stages:n", "stages", Callable),
        "stages: expected a function or a list of functions, got 5": lambda: rx.advise(5),
        "--args: odd_stages:leave fails .SystemExit: 3": lambda: arguments_of([], "odd_stages:leave"),
        "but it raised SystemExit: 3": lambda: rx.advise(named("odd_stages:leave", "stages"), real(8)),
        "--args: math has no 'nope'": lambda: arguments_of([], "math:nope"),
        "--args: expected a tuple from math:pi, got float": lambda: arguments_of([], "math:pi"),
        "--args: expected either --arg or --args": lambda: arguments_of(["f32[8]"], "math:pi"),
        "--arg: expected a dtype with a shape": lambda: shape_of("longdouble[8]"),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()
    sizes = ["1,,2", "1,2,", ",", "-1", "1e3", "n", "\N{ARABIC-INDIC DIGIT THREE}"]
    for size in (*sizes, "8 8", "9" * 30, f"{2**30},{2**30}"):
        with pytest.raises(
            ValueError, match="--arg: expected a dtype with a shape, for example .*, of at most .*, got"
        ):
            shape_of(f"f32[{size}]")
    no_dtypes = (
        f"{name}[2]" for name in ("f33", "F32", "str", "object", "U8", "V8", "m8", "datetime64", "clongdouble")
    )
    for text in (*no_dtypes, "f32", "f32[8", "f32[8]]", "f32 [8]", "[8]", ""):
        with pytest.raises(ValueError, match="--arg: expected a dtype with a shape"):
            shape_of(text)
    assert shape_of("f32[ 8, 16 ]") == shape_of("float32[8,16]") == real(8, 16)
    for texts in ("bfloat16 bf16", "int32 i32 s32", "bool pred bool_", "float8_e4m3fn f8e4m3fn f8_e4m3fn", "int4 i4"):
        assert {shape_of(f"{text}[3]").dtype for text in texts.split()} == {jnp.dtype(texts.split()[0])}, texts
    assert shape_of("f32[]") == real()
    assert shape_of("key[]").dtype == jax.random.key(0).dtype
    result = CliRunner().invoke(app, ["advise", "nowhere:f", "--arg", "f32[8]"])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


def test_what_weights_leave_unsure_is_a_share_of_the_work_and_no_other_function_changes_a_decision(here):
    model = here.of("functions")
    profiles = [rx.profile_function(fn, real(512, 512)) for fn in (lambda x: x @ x, sines, square)]
    product = function_runs(profiles[:1])
    found = []
    for rate in (1e3, 1e4):  # so slow that computing is all that a run takes
        median = dataclasses.replace(model.posterior.coefficients, product=rate)
        found.append(np.asarray(FUNCTIONS.own_log_sd(median, product, {})).item())
    assert found[0] > 0.0
    np.testing.assert_allclose(found[1], found[0], rtol=0.02)
    alone = predict_profiles(model, profiles[1:]).decision([1], [0])
    beside = predict_profiles(model, profiles).decision([2], [1])
    np.testing.assert_allclose(beside.margin_sd_ns, alone.margin_sd_ns, rtol=1e-6)
