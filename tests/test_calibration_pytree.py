"""A calibration as an argument: of jit, grad and vmap, without compiling anew for other numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _compilations import compilations
from _models import LINE, TILED, calibrated, two_models

import rlxjax as rx
from rlxjax.models import FUNCTIONS, WELCH, function_runs

N = np.array([1.0, 40.0, 64.0, 700.0, 4000.0])
#: Of the methods that trace, a call of each, and of the second model too.
CALLS = {
    "predict_ns": lambda own: own.predict_ns("blocked", N),
    "terms_ns": lambda own: own.terms_ns("tile", N, 2.0, model="tiled"),
    "interval_ns": lambda own: own.interval_ns("tile", N, model="tiled", level=0.5),
    "estimate": lambda own: own.estimate("tile", N, model="tiled"),
    "compare": lambda own: own.compare("tile", "loop", N, model="tiled"),
    "pick_index": lambda own: own.pick_index(N),
    "in_domain": lambda own: own.in_domain(N, model="tiled"),
    "gate": lambda own: own.gate.score_ns(rx.FusionBenefit(1.0, 2.0, 3.0, 4.0)),
}


def other_numbers(found):
    """Return a calibration of a slower machine."""
    return jax.tree.map(lambda leaf: leaf + 1 if isinstance(leaf, int) else 1.25 * leaf, found)


def test_a_jitted_function_of_a_calibration_gives_what_the_eager_one_does_and_compiles_once():
    jitted = jax.jit(lambda own: {name: call(own) for name, call in CALLS.items()})
    for found in (two_models(), other_numbers(two_models())):
        compilations.clear()
        got = jitted(found)
        assert bool(compilations) == (found == two_models())
        expected = {name: call(found) for name, call in CALLS.items()}
        jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-12), got, expected)


def test_other_words_compile_anew_and_a_posterior_has_none():
    by_calibration = jax.jit(lambda own: own.of().posterior.spread)
    by_posterior = jax.jit(lambda posterior: posterior.spread)
    first = two_models()
    by_calibration(first), by_posterior(first.posterior)
    for change in ({}, {"source": "elsewhere"}, {"fingerprint": {"platform": "gpu"}}):
        found = dataclasses.replace(first, **change)
        compilations.clear()
        by_posterior(found.posterior)
        assert not compilations
        by_calibration(found)
        assert bool(compilations) == bool(change)


def test_a_calibration_goes_through_a_tree_with_its_models_in_their_order_and_its_words():
    found = two_models((TILED, LINE))
    assert list(found.models) == ["tiled", "line"]
    back = jax.jit(lambda own: own)(found)
    assert list(back.models) == ["tiled", "line"]
    assert back == found
    assert back.of("tiled").provenance == found.of("tiled").provenance
    assert back.pick(700.0) == found.pick(700.0)


def test_a_prediction_has_a_gradient_by_every_number_of_the_calibration():
    found = two_models((LINE,))
    slopes = jax.grad(lambda own: own.predict_ns("blocked", 1000.0))(
        jax.tree.map(lambda leaf: np.asarray(leaf, float), found)
    )
    assert type(slopes) is rx.Calibration
    assert slopes.coefficients == pytest.approx({"call_ns": 1.0, "item_ns": 500.0, "block_ns": 1.0})
    assert all(float(leaf) == 0.0 for leaf in jax.tree.leaves(slopes.gate))


def test_many_machines_are_one_calibration_of_arrays():
    machines = [two_models((LINE,)), other_numbers(two_models((LINE,)))]
    stacked = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *machines)
    found = jax.vmap(lambda own: own.predict_ns("plain", 100.0))(stacked)
    np.testing.assert_allclose(found, [own.predict_ns("plain", 100.0) for own in machines], rtol=1e-12)


def test_the_built_in_models_trace_as_arguments():
    shipped = {model.name: calibrated(rx.fit.prior_posterior(model)) for model in (WELCH, FUNCTIONS)}
    found = rx.Calibration(shipped, None, {})
    programs = function_runs([rx.profile_function(fn, np.ones(8)) for fn in (jnp.abs, jnp.negative)])
    # Of a machine to which a learned FFT was given.
    work = {"learned_n_fft": [256.0], "learned_flop": [1e3], "learned_live_bins": [65.0]}
    learned = found.of().with_facts(**{name: np.array(value) for name, value in work.items()})

    def ask(own):
        sizes = [1, 1024], 256, 16
        decided, of_functions = own.compare("fused", "host", *sizes), own.of("functions").posterior
        found = own.predict_ns("fused", *sizes), rx.fit.estimate(of_functions, programs).time_ns
        return *found, decided.probability, decided.in_domain, own.pick_index(*sizes)

    for own in (found, dataclasses.replace(found, models={**found.models, "welch": learned})):
        # What needs a number while it is traced would raise; compiling takes long.
        assert {found.shape for found in jax.eval_shape(ask, own)} == {(2,)}
