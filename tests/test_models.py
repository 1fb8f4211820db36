"""The built-in latency models, a batched FFT, Welch peaks and any function: laws of all, whatever their formula."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _built_in_models import FACTS, MODELS, PADDED, SIZES, checked, machine, runs_of, times, units_of
from _tolerances import FLOAT32_RTOL, FLOAT64_RTOL, assert_gradient_is_the_finite_difference

from rlxjax.fit import Runs, Timings, coefficient_names, fit_posterior, named, predicted_ns, unit_of
from rlxjax.models import BUILT_IN, COLLECTIVES, FFT, FUNCTIONS, GPU_KERNELS, WELCH, FftLatencyCoefficients

#: Coefficients of functions that say what processors gain together, and up to where something is small.
GAINS = ("parallel_gain", "parallel_memory_gain")
SMALL = ("busy_ns", "near_bytes", "far_bytes")
each_model = pytest.mark.parametrize("model", MODELS, ids=list(BUILT_IN))


@jax.jit
def terms(coefficients, runs, facts):
    return runs.model.terms_ns(coefficients, runs, facts)


@each_model
def test_a_model_is_immutable_and_found_by_its_name(model):
    assert BUILT_IN[model.name] is model
    assert model == type(model)()
    assert hash(model) == hash(type(model)())
    for change in (
        lambda: setattr(next(iter(model.inputs.values())), "least", 3.0),
        lambda: setattr(WELCH, "name", "other"),
    ):
        with pytest.raises(AttributeError):
            change()


@each_model
def test_terms_are_not_negative_and_sum_to_the_prediction(model):
    runs, facts = runs_of(model), FACTS[model.name]
    for seed in range(2):
        parts = [np.asarray(part) for part in terms(machine(model, seed), runs, facts).values()]
        assert all(np.all(np.isfinite(part) & (part >= 0)) for part in parts)
        total = times(machine(model, seed), runs, facts)
        assert np.all(total > 0)
        np.testing.assert_allclose(sum(parts), total, rtol=FLOAT64_RTOL)


@each_model
def test_every_coefficient_takes_part_and_its_gradient_is_that_of_finite_differences(model):
    runs, facts = runs_of(model, **PADDED.get(model.name, {})), FACTS[model.name]
    n = len(runs.variant)
    slope_of = jax.jit(jax.grad(lambda c: jnp.sum(jnp.log(predicted_ns(c, runs, facts)))))

    def of_each(tree, runs):
        return jax.vmap(lambda own, run: predicted_ns(own, run, facts))(tree, runs)

    for seed in range(2):
        tree = jax.tree.map(lambda value: np.full(n, value), machine(model, seed))
        assert_gradient_is_the_finite_difference(of_each, tree, runs)
        slopes = slope_of(machine(model, seed))
        signs = {name: np.sign(slope) for name, slope in named(slopes).items()}
        if model is FUNCTIONS:  # less for a gain, and where more is small
            assert signs == {name: -1 if name in GAINS or name in SMALL else 1 for name in signs}
        else:  # More time for a cost, or where rows are worked through one by one; less for a rate or a gain.
            assert signs == {name: 1 if unit_of(name) in ("ns", "rows") else -1 for name in signs}


@each_model
def test_a_slower_clock_scales_the_prediction(model):
    # A picosecond a kernel keeps slopes of functions finite: the law is of kernels that take longer.
    long, rtol = ({"launches": (1, 3), "read_bytes": (10**9,)}, 1e-5) if model is FUNCTIONS else ({}, FLOAT64_RTOL)
    runs, facts, own = runs_of(model, **long), FACTS[model.name], machine(model, 1)
    power = {"ns": 1, "bytes/ns": -1, "FLOP/ns": -1, "steps/ns": -1, "rows": 0, "bytes": 0, "1": 0}
    for scale in (1e-3, 7.0):
        # A class of operations takes so many times what its weights say in ns.
        unit = {name: "ns" if f"{name}_work_ns" in model.kernels else unit_of(name) for name in named(own)}
        slower = {name: value * scale ** power[unit[name]] for name, value in named(own).items()}
        slowed = {name: fact / scale if name.endswith("_per_ns") else fact for name, fact in facts.items()}
        # Links are slower by as much as the devices that they join.
        links = {name: scale * own for name, own in runs.inputs.items() if model is COLLECTIVES}
        longer = dataclasses.replace(runs, inputs={**runs.inputs, **links})
        found = times(type(own)(**slower), longer, slowed)
        np.testing.assert_allclose(found, scale * np.asarray(times(own, runs, facts)), rtol=rtol)


@each_model
def test_jit_vmap_and_a_loop_equal_one_call_of_arrays(model):
    runs, facts, machines = runs_of(model), FACTS[model.name], [machine(model, seed) for seed in range(3)]
    together = np.stack([times(own, runs, facts) for own in machines])
    np.testing.assert_allclose(predicted_ns(machines[0], runs, facts), together[0], rtol=FLOAT64_RTOL)
    stacked = jax.tree.map(lambda *leaves: jnp.array(leaves), *machines)
    by_machine = jax.jit(jax.vmap(predicted_ns, (0, None, None)))(stacked, runs, facts)
    np.testing.assert_allclose(by_machine, together, rtol=FLOAT64_RTOL)
    by_run = jax.jit(jax.vmap(lambda own: predicted_ns(machines[0], own, facts)))(runs)
    np.testing.assert_allclose(by_run, together[0], rtol=FLOAT64_RTOL)
    for row in range(0, len(runs.variant), 61):
        one = jax.tree.map(lambda column: column[row], runs)  # noqa: B023 - used at once
        np.testing.assert_allclose(times(machines[0], one, facts), together[0, row], rtol=FLOAT64_RTOL)


@each_model
def test_float32_is_within_1e_5_of_float64(model):
    facts = FACTS[model.name]
    exact = np.asarray(times(machine(model, 1), runs_of(model), facts))
    with jax.enable_x64(False):
        single = times(machine(model, 1), runs_of(model), facts)
        assert single.dtype == np.float32
        np.testing.assert_allclose(single, exact, rtol=FLOAT32_RTOL)


@pytest.mark.parametrize("model", [model for model in MODELS if model is not GPU_KERNELS], ids=lambda model: model.name)
def test_the_prediction_grows_with_every_size(model):  # a GPU hides small work; its own test has what it does not
    own = machine(model, 1)
    for name in SIZES[model.name]:
        if name == "unsure_ns" or units_of(model)[name] == "1":  # how sure, and how much is shared, are no sizes
            continue
        # A partition of nearly all bins ends sooner.
        column = 2.0 ** np.arange(1, 7 if name == "k" else 9)
        sizes = {"batch": 64, "n_fft": 256, "k": 8, "n_segments": 2, "busiest_ns": 1e5, "hops_ns": 1e3}
        if model is FUNCTIONS:  # a kernel that one processor computes; what a loop launches is launched
            column = 4.0 ** np.arange(2, 13)
            sizes = {key: 1e4 if unit != "1" else key == "exponent" for key, unit in units_of(model).items()}
            sizes |= {"launches": 1.0 + (column if name == "looped" else 0.0), "looped": 0.0}
        sizes = {key: value for key, value in sizes.items() if key in units_of(model)} | {name: column}
        sizes = {key: np.broadcast_to(value, column.shape) for key, value in sizes.items()}
        for variant in model.variants:
            if variant == "learned":
                continue
            runs = checked(model, variant, sizes).of_shape(column.shape)
            found = times(own, runs, FACTS[model.name])
            # Where processors begin to share, a larger run may take less.
            samples = np.prod([own for key, own in runs.inputs.items() if key != "k"], 0)
            kind = {"host": "host", "block": "block"}.get(variant, "fused")
            is_shared = samples > model.facts.get(f"alone_samples_{kind}", np.inf)
            steps = np.diff(found)[is_shared[1:] == is_shared[:-1]]
            # Far from its threshold a cost of functions is there, or not, to all digits.
            assert np.all(steps >= 0) and found[-1] > found[0] if model is FUNCTIONS else np.all(steps > 0), name


def test_coefficients_are_few_and_say_their_units():
    for model in MODELS:
        names = coefficient_names(model.prior.median)
        # Those of functions are known from other machines, as is the rate of each class of operations.
        assert len([name for name in names if f"{name}_work_ns" not in model.kernels]) <= (
            30 if model is FUNCTIONS else 20
        )
        documented = inspect.getdoc(type(model.prior.median))
        assert all(f"\n    {name}: " in documented for name in names)
    assert {unit_of(name) for name in coefficient_names(WELCH.prior.median)} == {"ns", "bytes/ns", "FLOP/ns", "1"}


def test_a_fit_of_the_fft_model_recovers_a_machine():
    batch, n_fft = np.array([32, 2048] * 5), np.repeat([64, 256, 512, 1024, 4096], 2)
    true, sizes = machine(FFT, 5), {"batch": batch, "n_fft": n_fft}
    time_ns = times(true, Runs.checked(FFT, "fft", **sizes), {})
    result = fit_posterior(Timings.checked(FFT, variant="fft", time_ns=time_ns, **sizes)).terms
    assert result.converged
    assert isinstance(result.coefficients, FftLatencyCoefficients)
    one = Runs.checked(FFT, "fft", batch=512, n_fft=512)
    np.testing.assert_allclose(*(times(c, one, {}) for c in (result.coefficients, true)), rtol=0.1)
    for sizes, said in (
        ((-1, 64), "batch: expected a size of at least 1.0, got -1"),
        ((32, np.nan), "n_fft: expected a size of at least 2, got nan"),
        ((32, 65), "n_fft: expected an even number, got 65"),
        ((np.ones(2), 64 * np.ones(3)), "shapes that broadcast"),
    ):
        with pytest.raises(ValueError, match=said):
            Runs.checked(FFT, "fft", batch=sizes[0], n_fft=sizes[1])
