"""JAX's own modes, what a worker is sent, and values that no machine or workload has."""

import copy
import dataclasses
import functools
import gc
import json
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from _compilations import COMPILE, compilations
from _models import two_models
from jax import export
from test_values import explanation, posterior_fit

import rlxjax as rx
from calibrate.terminal import finite_ns, json_text
from rlxjax.welch import keep_programs

PARAMS = rx.WelchPeakParams.fast(64, 4)
ROWS = np.random.default_rng(0).standard_normal((3, PARAMS.frame_len), np.float32)
ON_DEVICE, X = jnp.asarray(ROWS), np.ones(8, np.float32)
MODEL = dataclasses.replace(rx.learned.LearnedFft.exact(64), mask=(np.arange(33) <= 16).astype(float))
PRIOR = rx.calibration.prior_calibration("cpu")
GATE, BENEFIT = rx.io_fusion_gate_for_target("cuda"), rx.FusionBenefit(3, -1, 4096, 8192)
PROFILE, ROW = rx.GraphIoProfile(3, 1, 4096, 8192), rx.backend_coefficients("cuda")


def graph():
    """Return a graph that makes two kernels."""
    made = rx.Graph()
    x = made.input("x", (64,), "f32")
    y = made.add("exp", [made.add("relu", [x])])
    made.set_outputs([made.add("reduce_sum", [y])])
    return made


def a_sum(x):
    """Return a function's result whose profile is small."""
    return jnp.exp(x).sum()


#: What a user asks for, by name; each result is also what a worker may send.
ASKED = {
    "advise": lambda: rx.advise([jnp.exp, jnp.sum], X, calibration=PRIOR),
    "decide": lambda: PRIOR.decide(64, 256, 16),
    "explain": lambda: PRIOR.explain(64, 256, 16, 8),
    "predict_ns": lambda: PRIOR.predict_ns("fused", 64, 256, 16),
    "pick_index": lambda: PRIOR.pick_index(np.array([1, 64]), 256, 16),
    "predict_function": lambda: PRIOR.predict_function(a_sum, X),
    "profile_function": lambda: rx.profile_function(a_sum, X),
    "rank_devices": lambda: rx.rank_devices(PROFILE),
    "plan_fusion": lambda: rx.plan_fusion(graph(), coefficients="cuda"),
    "evaluate": lambda: GATE.evaluate(BENEFIT, temperature_ns=1e4),
    "io_cost_ns": lambda: rx.io_cost_ns(PROFILE, ROW),
    "stream": lambda: list(rx.welch.stream_welch_peaks([ROWS, ROWS], PARAMS, "fused")),
    "one row": lambda: rx.welch_peaks(ON_DEVICE[0], PARAMS, "fused"),
    "auto": lambda: rx.welch_peaks(ROWS, PARAMS, calibration=PRIOR, model=MODEL),
    "block": lambda: rx.welch_peaks(ON_DEVICE, PARAMS, "block"),
    "learned": lambda: rx.welch_peaks(ON_DEVICE, PARAMS, "learned", model=MODEL),
    "jit": lambda: jax.jit(lambda x: rx.welch_peaks(x, PARAMS, "fused"))(ROWS),
    "grad": lambda: jax.grad(lambda x: rx.welch_peaks(x, PARAMS, "fused")[..., 1].sum())(ON_DEVICE),
    "vmap": lambda: jax.vmap(lambda x: rx.welch_peaks(x, PARAMS, "fused"))(ON_DEVICE[None]),
}
TRACED = ("jit", "grad", "vmap", "predict_ns")
#: Without the prior: what holds arrays of 64 bits is no argument of programs of 32.
OF_32_BITS = ("evaluate", "io_cost_ns", "stream", "one row", "block", "learned", "jit", "grad", "vmap")
MODES = {
    "debug_nans": lambda: jax.debug_nans(True),
    "check_tracer_leaks": lambda: jax.check_tracer_leaks(True),
    "log_compiles": lambda: jax.log_compiles(True),
    "64 bits": lambda: jax.enable_x64(True),
    "32 bits": lambda: jax.enable_x64(False),
}


@pytest.mark.slow  # each mode compiles all anew; `.ci/run` runs it
@pytest.mark.parametrize("mode", MODES)
def test_what_is_asked_for_comes_in_every_mode(mode):
    with MODES[mode]():
        for name in {"check_tracer_leaks": TRACED, "32 bits": OF_32_BITS}.get(mode, ASKED):
            jax.block_until_ready(ASKED[name]())


def test_every_path_runs_without_jit_and_with_nothing_transferred():
    expected = {
        path: np.asarray(rx.welch_peaks(ROWS, PARAMS, path, model=MODEL)) for path in ("fused", "block", "learned")
    }
    with jax.disable_jit():
        for path, peaks in expected.items():
            np.testing.assert_array_equal(rx.welch_peaks(ROWS, PARAMS, path, model=MODEL), peaks)
    with jax.transfer_guard("disallow"):
        np.testing.assert_array_equal(rx.welch_peaks(ON_DEVICE, PARAMS, "fused"), expected["fused"])


def test_nan_is_found_where_jax_looks_for_it():
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="welch_peaks: NaN"):
        rx.welch_peaks(np.full_like(ROWS, np.nan), PARAMS, "fused")


@pytest.mark.slow  # symbolic shapes take long to trace; `.ci/run` runs it
def test_programs_of_any_number_of_rows_are_exported(monkeypatch):
    # The check of annotations knows no symbolic shapes.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    (rows,) = export.symbolic_shape("rows")
    signal, counts = jax.ShapeDtypeStruct((rows, PARAMS.frame_len), np.float32), np.arange(1.0, 9.0)
    column = jax.ShapeDtypeStruct((rows,), counts.dtype)
    for function, shape, given in (
        (lambda x: rx.welch_peaks(x, PARAMS, "fused"), signal, ROWS),
        (lambda n: GATE.fuse_probability(rx.FusionBenefit(n, n, n, n), temperature_ns=1e4), column, counts),
        (lambda n: rx.io_cost_ns(rx.GraphIoProfile(n, n, n, n), ROW), column, counts),
        (lambda n: PRIOR.predict_ns("fused", n, 256, 16), column, counts),
        (lambda n: rx.fused_graph_ns("cuda", n, 256, 16), column, counts),
    ):
        made = export.export(jax.jit(function))(shape)
        for part in (given, given[:2]):
            np.testing.assert_allclose(made.call(part), function(part), rtol=1e-5)


@pytest.mark.slow  # all that is asked for is computed; `.ci/run` runs it
def test_results_are_pickled_copied_taken_apart_and_sent():
    objects = [ask() for ask in ASKED.values()]
    objects += [two_models(), explanation(), graph(), posterior_fit(), *rx.fusion.plan_stages([[9.0]])]
    objects += [rx.gate.BACKEND_ROWS, rx.fusion.REWRITES, MODEL, PARAMS, PRIOR, GATE, rx.fit.StrategySpec(("host",))]
    for made in objects:
        for twin in (pickle.loads(pickle.dumps(made)), copy.copy(made), copy.deepcopy(made)):
            assert type(twin) is type(made)
            assert repr(twin) == repr(made)
        if dataclasses.is_dataclass(made):
            assert list(dataclasses.asdict(made)) == [field.name for field in dataclasses.fields(made)]
    advice = ASKED["advise"]()
    assert copy.copy(advice).fn is copy.deepcopy(advice).fn is advice.fn
    with pytest.raises(TypeError, match="this choice was pickled and has no function"):
        pickle.loads(pickle.dumps(advice))(ROWS)
    with ThreadPoolExecutor(4) as pool:
        for peaks in pool.map(lambda _: rx.welch_peaks(ROWS, PARAMS, "fused", calibration=PRIOR), range(8)):
            np.testing.assert_array_equal(peaks, rx.welch_peaks(ROWS, PARAMS, "fused"))


def test_a_calibration_is_looked_up_by_itself_and_not_kept():
    own = dataclasses.replace(PRIOR)
    seen = weakref.ref(own)
    rx.welch_peaks(ROWS, PARAMS, "fused", calibration=own)
    del own
    gc.collect()
    assert seen() is None
    # Another object, maybe in the same place, is another calibration.
    with pytest.raises(ValueError, match="expected one of line, tiled, got 'welch'"):
        rx.welch_peaks(ROWS, PARAMS, calibration=two_models())


def test_programs_are_kept_by_memory_and_those_that_go_are_freed_and_compiled_again_when_they_are_called():
    calls = [
        functools.partial(rx.welch_peaks, rows, PARAMS, name, model=MODEL)
        for rows in (ROWS.astype(float), ON_DEVICE[0])
        for name in ("fused_top_k", "learned")
    ]
    client = jax.devices()[0].client
    keep_programs(2**20)  # of one or two programs
    try:
        gc.collect()
        before = len(client.live_executables())
        found = [np.asarray(call()) for call in calls]
        gc.collect()
        assert len(client.live_executables()) <= before + 2
        keep_programs(2**30)
        for call, peaks in zip(calls, found, strict=True):
            np.testing.assert_array_equal(call(), peaks)
        compiled = compilations.count(COMPILE)
        for call, peaks in zip(calls, found, strict=True):
            np.testing.assert_array_equal(call(), peaks)
        assert compilations.count(COMPILE) == compiled
    finally:
        keep_programs(2**30)
    with pytest.raises(ValueError, match="most_bytes: expected an integer of at least 1048576, got 64"):
        keep_programs(64)


def test_values_that_cannot_be_are_refused_where_they_enter():
    for bad in (np.nan, np.inf, -1.0, 1e30):
        row = dataclasses.replace(ROW, dispatch_ns=bad)
        for ask in (
            lambda row=row: rx.rank_devices(PROFILE, rows={"cpu": row}),
            lambda row=row: rx.io_cost_ns(PROFILE, row),
            lambda row=row: rx.graph_cost_ns(graph(), row),
            lambda row=row: rx.plan_fusion(graph(), coefficients=row),
            lambda bad=bad: PRIOR.predict_ns("fused", bad, 256, 16),
            lambda bad=bad: PRIOR.pick(bad, 256, 16),
            lambda bad=bad: rx.fused_graph_ns("cuda", bad, 256, 16),
            lambda bad=bad: rx.estimate_welch_peaks_costs("cuda", 8, 256, bad),
        ):
            with pytest.raises(ValueError, match=r"expected a \w+ of at (least|most) "):
                ask()
    for ask in (PRIOR.predict_ns, PRIOR.interval_ns, PRIOR.compare):
        with pytest.raises(ValueError, match="the bins, got 1000 with n_fft 256"):
            ask(*["fused", "host"][: 2 if ask == PRIOR.compare else 1], 64, 256, 1000)
    assert rx.welch_peaks(np.ones((2, 384), np.float32), rx.WelchPeakParams.fast(256, 1000)).shape == (2, 1000, 2)
    with pytest.raises(ValueError, match="n_fft: expected at most 33554432, got 33554434"):
        rx.WelchPeakParams.fast(2**25 + 2, 1)


def test_json_has_no_nan():
    assert json.loads(json_text({"a": (1, [np.nan, np.inf]), "b": None})) == {"a": [1, [None, None]], "b": None}
    assert finite_ns(jnp.asarray(2.0), "host") == 2.0
    with pytest.raises(ValueError, match="host: the calibration gives no finite time"):
        finite_ns(np.nan, "host")
