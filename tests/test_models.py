"""The built-in latency models: a batched FFT and Welch peaks; their laws, their terms and what they refuse."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _compilations import compilations
from _tolerances import FLOAT32_RTOL, FLOAT64_RTOL, assert_gradient_is_the_finite_difference

from rlxjax.fit import (
    LatencyPrior,
    Runs,
    coefficient_names,
    estimate,
    fit_posterior,
    named,
    predicted_ns,
    prior_posterior,
    unit_of,
)
from rlxjax.models import (
    BUILT_IN,
    FFT,
    WELCH,
    FftLatencyCoefficients,
    fft_latency_ns,
    fft_timings,
    fit_fft_latency,
    heap_rates,
    latency_terms_ns,
    predict_latency_ns,
    typical_fft_prior,
    typical_prior,
    welch_micro_prior,
    welch_timings,
)
from rlxjax.models._welch_terms import (
    heap_comparisons,
    maxima_comparisons,
    maxima_passes,
    padded_rows,
    partition_comparisons,
)

MODELS = tuple(BUILT_IN.values())
each_model = pytest.mark.parametrize("model", MODELS, ids=list(BUILT_IN))

#: Learned models of three lengths, one of which masks every bin.
LEARNED_FACTS = {
    "learned_n_fft": [64.0, 1000.0, 4096.0],
    "learned_flop": [2e3, 9e4, 1.0],
    "learned_live_bins": [8.0, 100.0, 0.0],
}
FACTS = {"welch": {**WELCH.facts, **LEARNED_FACTS}, "fft": dict(FFT.facts)}
#: Sizes that reach every branch of the formulas; batches are 0 or sizes that padding leaves as they are.
SIZES = {
    "welch": {"batch": (0, 1, 10, 96, 8192), "n_fft": (2, 64, 1000, 4096), "k": (1, 16, 50), "n_segments": (1, 2, 8)},
    "fft": {"batch": (1, 32, 2048, 131072), "n_fft": (2, 64, 1000, 4096)},
}
PATHS = ("host", "fused", "block", "learned")


def machine(model, seed):
    """Return coefficients a few times more or less than the typical ones."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda median: float(median * np.exp(rng.normal())), model.prior.median)


def runs_of(model, variants=None, facts_known=True, **changed):
    """Return every variant on every size, `[n]`; of a learned FFT those that have one."""
    sizes = {**SIZES[model.name], **changed}
    variants = range(len(model.variants)) if variants is None else [model.variants.index(name) for name in variants]
    rows = np.array(list(itertools.product(variants, *sizes.values())))
    runs = Runs.checked(model, rows[:, 0].astype(int), **dict(zip(sizes, rows[:, 1:].T, strict=True)))
    known = np.asarray(model.same_result(runs, FACTS[model.name]))[np.arange(len(rows)), rows[:, 0].astype(int)]
    return jax.tree.map(lambda column: column[known], runs) if facts_known else runs


@jax.jit
def times(coefficients, runs, facts):
    return predicted_ns(coefficients, runs, facts)


@jax.jit
def terms(coefficients, runs, facts):
    return runs.model.terms_ns(coefficients, runs, facts)


@each_model
def test_a_model_is_immutable_and_found_by_its_name(model):
    assert BUILT_IN[model.name] is model
    assert model == type(model)()
    assert hash(model) == hash(type(model)())
    for change in (lambda: setattr(model.inputs["batch"], "least", 3.0), lambda: setattr(WELCH, "name", "other")):
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
    runs, facts = runs_of(model), FACTS[model.name]
    n = len(runs.variant)
    for seed in range(2):
        tree = jax.tree.map(lambda value: np.full(n, value), machine(model, seed))
        assert_gradient_is_the_finite_difference(lambda t, r: predicted_ns(t, r, facts), tree, runs)
        slopes = jax.grad(lambda c: jnp.sum(jnp.log(times(c, runs, facts))))(machine(model, seed))
        signs = {name: np.sign(slope) for name, slope in named(slopes).items()}
        # More time for a cost, or where rows are worked through one by one; less for a rate or a gain.
        assert signs == {name: 1 if unit_of(name) in ("ns", "rows") else -1 for name in signs}


@each_model
def test_a_slower_clock_scales_the_prediction(model):
    runs, facts, own = runs_of(model), FACTS[model.name], machine(model, 1)
    power = {"ns": 1, "bytes/ns": -1, "FLOP/ns": -1, "rows": 0, "1": 0}
    for scale in (1e-3, 7.0):
        slower = {name: value * scale ** power[unit_of(name)] for name, value in named(own).items()}
        found = times(type(own)(**slower), runs, facts)
        np.testing.assert_allclose(found, scale * np.asarray(times(own, runs, facts)), rtol=FLOAT64_RTOL)


@each_model
def test_jit_vmap_and_a_loop_equal_one_call_of_arrays(model):
    runs, facts, machines = runs_of(model), FACTS[model.name], [machine(model, seed) for seed in range(3)]
    together = np.stack([times(own, runs, facts) for own in machines])
    with jax.disable_jit():
        np.testing.assert_allclose(predicted_ns(machines[0], runs, facts), together[0], rtol=FLOAT64_RTOL)
    stacked = jax.tree.map(lambda *leaves: jnp.array(leaves), *machines)
    by_machine = jax.vmap(predicted_ns, (0, None, None))(stacked, runs, facts)
    np.testing.assert_allclose(by_machine, together, rtol=FLOAT64_RTOL)
    by_run = jax.vmap(lambda own: predicted_ns(machines[0], own, facts))(runs)
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


@each_model
def test_new_values_compile_nothing(model):
    runs, facts = runs_of(model), FACTS[model.name]
    times(machine(model, 0), runs, facts)
    others = jax.tree.map(lambda column: column[::-1], runs)
    compilations.clear()
    times(machine(model, 1), others, jax.tree.map(lambda fact: 2 * fact, facts))
    assert not compilations


@each_model
def test_the_prediction_grows_with_every_size(model):
    for name, seed in itertools.product(SIZES[model.name], range(2)):
        # A partition of nearly all bins ends sooner.
        column = 2.0 ** np.arange(1, 7 if name == "k" else 9)
        sizes = {"batch": 64, "n_fft": 256, "k": 8, "n_segments": 2}
        sizes = {key: value for key, value in sizes.items() if key in model.inputs} | {name: column}
        for variant in model.variants:
            if variant == "learned":
                continue
            runs = Runs.checked(model, variant, **sizes)
            found = predicted_ns(machine(model, seed), runs, model.facts)
            # Where processors begin to share, a larger run may take less.
            samples = np.prod([np.broadcast_to(v, column.shape) for k, v in sizes.items() if k != "k"], 0)
            kind = {"host": "host", "block": "block"}.get(variant, "fused")
            is_shared = samples > model.facts.get(f"alone_samples_{kind}", np.inf)
            assert np.all(np.diff(found)[is_shared[1:] == is_shared[:-1]] > 0), (name, variant)


def test_the_host_path_waits_for_no_device_and_others_do():
    for path in PATHS[:3]:
        found = latency_terms_ns(machine(WELCH, 0), path, 64, 256, 16, 2)
        waits = [found[name] > 0 for name in ("launch_and_sync_ns", "upload_ns", "readback_ns")]
        assert waits == [path != "host"] * 3
        assert list(found) == list(WELCH.terms_ns(WELCH.prior.median, Runs(WELCH, 0, _sizes(64)), WELCH.facts))


def _sizes(batch):
    return {"batch": float(batch), "n_fft": 256.0, "k": 16.0, "n_segments": 2.0}


def test_processors_share_what_is_more_than_one_works_on_alone_each_at_least_half_of_that():
    alone = 2**12
    facts = {f"alone_samples_{kind}": alone for kind in ("host", "fused", "block")}
    rows = alone / 512.0 * np.array([1.0, 2.0, 1024.0])
    for path, gain in itertools.product(PATHS[:3], (0.5, 7.0)):
        own = dataclasses.replace(machine(WELCH, 2), parallel_gain=gain, memory_bytes_per_ns=1e30)
        passes = dataclasses.replace(own, maxima_pass_ns=0.0)
        shared, single = (
            latency_terms_ns(passes, path, rows, 256, 16, 2, "maxima", {**WELCH.facts, **f})
            for f in (facts, dict.fromkeys(facts, 1e30))
        )
        for name in ("transform_ns", "selection_ns"):
            share = np.asarray(shared[name] / single[name])
            np.testing.assert_allclose(share[[0, 2]], [1.0, 1.0 / (1.0 + gain)], rtol=1e-6)
            smooth = (0.25**16 + (1.0 + gain) ** -16.0) ** (1 / 16)
            np.testing.assert_allclose(share[1], smooth, rtol=1e-9)
        joining = own.streams_ns if path == "fused" else own.threads_ns
        np.testing.assert_allclose(shared["call_ns"] - single["call_ns"], joining * np.array([0, 1, 1]), rtol=1e-9)


def test_facts_change_what_is_scheduled_by_them_and_nothing_else():
    runs = runs_of(WELCH, batch=(33, 600))
    facts, own = FACTS["welch"], machine(WELCH, 3)
    variant = np.asarray(WELCH.variants)[np.asarray(runs.variant)]
    concerned = {
        "alone_samples_host": {"host"},
        "alone_samples_block": {"block"},
        "alone_samples_fused": {"fused_maxima", "fused_top_k", "learned"},
        "chunk_samples": {"fused_maxima", "fused_top_k", "learned", "block"},
        "sizes_per_octave": {"fused_maxima", "fused_top_k", "learned", "block"},
        "least_blocks": {"fused_maxima", "learned"},
        "least_block_bins": {"fused_maxima", "learned"},
        "learned_flop": {"learned"},
        "learned_live_bins": {"learned"},
    }
    before = np.asarray(times(own, runs, facts))
    for name, variants in concerned.items():
        changed = {**facts, name: jax.tree.map(lambda fact: fact / 4.0, facts[name])}
        differs = before != np.asarray(times(own, runs, changed))
        assert set(variant[differs]) == variants, name
    assert set(concerned) == set(WELCH.facts) - {"learned_n_fft"}
    # A fact that is not given is as it is by default, and what the model does not use does no harm.
    given = {"sizes_per_octave": 4, "launches": 0, **LEARNED_FACTS}
    np.testing.assert_array_equal(times(own, runs, given), before)


def test_a_learned_run_is_one_where_a_model_of_its_length_was_timed():
    runs = Runs.checked(WELCH, "learned", batch=64, n_fft=np.array([64, 256, 1000]), k=16)
    facts, own = FACTS["welch"], WELCH.prior.median
    np.testing.assert_array_equal(WELCH.same_result(runs, facts)[:, -1], [True, False, True])
    np.testing.assert_array_equal(np.isfinite(times(own, runs, facts)), [True, False, True])
    assert not WELCH.same_result(runs, WELCH.facts)[:, -1].any()
    assert WELCH.same_result(runs, WELCH.facts)[:, :-1].all()
    assert np.isinf(predict_latency_ns(own, "learned", 64, 256, 16, 2))
    slopes = jax.grad(lambda c: jnp.sum(jnp.where(jnp.isinf(t := times(c, runs, facts)), 0.0, t)))(own)
    assert all(np.isfinite(slope) for slope in jax.tree.leaves(slopes))


def test_a_learned_run_is_a_fused_one_but_for_its_transform_and_the_bins_that_it_ranks():
    own, sizes = machine(WELCH, 4), (96, 1000, 16, 2)
    fused = latency_terms_ns(own, "fused", *sizes, "maxima", FACTS["welch"])
    learned = latency_terms_ns(own, "learned", *sizes, facts=FACTS["welch"])
    for name in fused:
        assert (fused[name] == learned[name]) == (name not in ("transform_ns", "selection_ns")), name
    assert learned["selection_ns"] < fused["selection_ns"]


def test_the_selection_is_the_cheaper_one_unless_it_is_given():
    inputs = runs_of(WELCH, ["host"]).inputs
    runs = [inputs[name] for name in WELCH.inputs]
    for path, seed in itertools.product(PATHS[:3], range(2)):
        both = [predict_latency_ns(machine(WELCH, seed), path, *runs, form) for form in ("maxima", "top_k")]
        found = predict_latency_ns(machine(WELCH, seed), path, *runs)
        np.testing.assert_allclose(found, np.minimum(*both), rtol=FLOAT64_RTOL)
        forms = np.arange(len(found)) % 2
        found = predict_latency_ns(machine(WELCH, seed), path, *runs, forms)
        np.testing.assert_allclose(found, np.where(forms == 0, *both), rtol=FLOAT64_RTOL)
        assert np.array_equal(*both) == (path != "fused")


def test_names_codes_and_shapes_of_paths_are_alike():
    own = machine(WELCH, 0)
    grid = predict_latency_ns(own, np.arange(4)[:, None], np.array([[1, 9, 100]]), 64, 16, 2, facts=FACTS["welch"])
    by_name = [predict_latency_ns(own, p, np.array([1, 9, 100]), 64, 16, 2, facts=FACTS["welch"]) for p in PATHS]
    np.testing.assert_allclose(grid, by_name, rtol=FLOAT64_RTOL)
    traced = jax.jit(lambda path: predict_latency_ns(own, path, 9, 64, 16, 2))(jnp.arange(3))
    np.testing.assert_allclose(traced, grid[:3, 1], rtol=FLOAT64_RTOL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("device", 1, 64, 1, 1), "path: expected one of host, fused, block, learned, got 'device'"),
        ((np.array([0, 4]), 1, 64, 1, 1), "path: expected names, or codes from 0 to 3"),
        (("fused", 1, 64, 1, 1, "heap"), "selection: expected one of maxima, top_k, got 'heap'"),
        (("host", -1, 64, 1, 1), "batch: expected a size of at least 0, got -1"),
        (("host", 1, np.nan, 1, 1), "n_fft: expected a size of at least 2, got nan"),
        (("host", 1, 65, 1, 1), "n_fft: expected an even number, got 65"),
        (("fused", 1, 64, np.array([1, -2]), 1), "k: expected a size of at least 1.0, got -2"),
        (("block", np.ones(3), 64, np.ones(2), 1), "expected shapes that broadcast together"),
    ],
)
def test_a_workload_without_a_prediction_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        latency_terms_ns(WELCH.prior.median, *arguments)


def test_padding_is_to_so_many_sizes_an_octave_up_to_a_chunk_and_its_gradient_is_that_of_the_batch():
    facts = {"sizes_per_octave": 4.0, "chunk_samples": 2.0**19}
    batch = np.arange(1.0, 2000.0)
    step = 2.0 ** np.maximum(np.floor(np.log2(np.maximum(batch - 1, 1) / 4)), 0)
    padded = np.ceil(batch / step) * step
    for dtype in (np.float32, np.float64):
        found = padded_rows(jnp.asarray(batch, dtype), 512.0, facts)
        np.testing.assert_array_equal(found, np.maximum(batch, np.minimum(padded, 1024)))
    slope = jax.vmap(jax.grad(lambda rows: padded_rows(rows, 512.0, facts)))(jnp.asarray(batch))
    np.testing.assert_array_equal(slope, 1.0)


def test_a_heap_takes_in_what_running_maxima_of_random_bins_are_and_is_emptied_as_it_gets_smaller():
    """Of numbers in random order, the i-th enters a heap of k that is full with probability `k / i`."""
    for bins, k in ((65, 16), (2049, 64), (33, 33), (129, 1)):
        entering = sum(k / i for i in range(k + 1, bins + 1))
        expected = entering * math.log2(k + 1) + math.log2(math.factorial(k))
        assert heap_comparisons(float(bins), float(k)) == pytest.approx(expected, rel=0.1, abs=0.01)


def test_a_partition_is_of_fewer_peaks_than_bins_and_each_form_of_selection_grows_with_both():
    bins, k = (2.0 ** np.arange(1, 12) + 1.0)[:, None], 2.0 ** np.arange(1, 6)[None]
    peaks = np.minimum(bins, k)
    np.testing.assert_allclose(
        np.asarray(partition_comparisons(bins, k))[bins <= k + 0 * bins], (peaks * np.log2(peaks + 1))[bins <= k]
    )
    for count in (
        partition_comparisons(bins, k),
        heap_comparisons(bins, k),
        maxima_passes(bins, k) * maxima_comparisons(bins, WELCH.facts),
    ):
        inside = np.asarray(k < bins) & np.ones_like(count, bool)
        assert np.all(np.diff(count, axis=0)[inside[:-1]] >= 0)
        # Near one peak a bin, a partition ends sooner.
        assert np.all(np.diff(count, axis=1)[np.asarray(4 * k[:, 1:] < bins)] > 0)


def test_passes_of_maxima_find_no_more_candidates_than_there_are_bins():
    bins, k = np.array([2.0, 33.0, 2049.0])[:, None], np.array([[1.0, 16.0, 50.0]])
    passes = np.asarray(maxima_passes(bins, k))
    assert np.all((np.minimum(k, bins) <= passes) & (passes <= bins))


def test_the_correction_of_traced_runs_is_that_of_numpy_and_is_level_where_nothing_was_timed():
    runs = runs_of(WELCH)
    mine = WELCH.features(jax.tree.map(np.asarray, runs), WELCH.facts)
    traced = jax.jit(lambda own: WELCH.features(own, WELCH.facts))(runs)
    assert isinstance(mine, np.ndarray)
    np.testing.assert_allclose(traced, mine, atol=1e-12)
    far = Runs.checked(WELCH, 1, batch=np.array([2**15, 2**18]), n_fft=2**14, k=16)
    np.testing.assert_array_equal(*WELCH.features(far, WELCH.facts))
    np.testing.assert_array_equal(mine[:, -1], 1.0)


def test_the_grid_holds_what_can_be_timed_without_a_model_and_folds_are_its_batches_and_lengths():
    grid = WELCH.grid()
    assert set(np.asarray(grid.variant).tolist()) == {0, 1, 2, 3}
    rows = np.stack([np.asarray(grid.variant), *map(np.asarray, grid.inputs.values())], 1)
    assert len(np.unique(rows, axis=0)) == len(rows)
    assert set(rows[rows[:, 0] > 0, 4]) == {2.0}
    assert set(rows[rows[:, 0] == 0, 4]) == {1.0, 2.0}
    batch, n_fft = WELCH.folds(grid)
    np.testing.assert_array_equal(batch, rows[:, 1])
    np.testing.assert_array_equal(n_fft, rows[:, 2])


def test_strategies_run_their_variants_and_imply_their_segments():
    found = WELCH.strategies
    assert found["fused"].variants == ("fused_maxima", "fused_top_k")
    assert {name: found[name].fixed["n_segments"] for name in ("ultra", "fast")} == {"ultra": 1.0, "fast": 2.0}
    assert {variant for strategy in found.values() for variant in strategy.variants} == set(WELCH.variants)


def test_timings_of_paths_are_of_their_variants():
    columns = {"batch": [8] * 4, "n_fft": [64] * 4, "k": [4] * 4, "n_segments": [2] * 4, "time_ns": [1e5] * 4}
    timings = welch_timings(path=["host", "fused", "block", "fused"], **columns)
    assert [WELCH.variants[code] for code in timings.runs.variant] == ["host", "fused_maxima", "block", "fused_maxima"]
    timings = welch_timings(path="fused", selection=["maxima", "top_k", "top_k", "maxima"], **columns)
    assert timings.runs.variant.tolist() == [1, 2, 2, 1]
    with pytest.raises(ValueError, match="path: expected one of host, fused, block, learned, got 'gpu'"):
        welch_timings(path="gpu", **columns)


def test_a_rate_of_a_micro_benchmark_is_a_median_that_is_better_known():
    assert typical_prior() == WELCH.prior
    rates = {"memory_bytes_per_ns": 7.0, "topk_bin_ns": 2.0, "topk_compare_ns": -1.0}
    known = dataclasses.replace(WELCH.prior.median, host_call_ns=1.0)
    for base in (None, LatencyPrior(known, WELCH.prior.log_sd, 0.5)):
        found, before = welch_micro_prior(rates, base), WELCH.prior if base is None else base
        told = {"memory_bytes_per_ns", "topk_bin_ns"}
        for name, median in named(found.median).items():
            assert median == (rates[name] if name in told else getattr(before.median, name))
            narrower = getattr(found.log_sd, name) < getattr(before.log_sd, name)
            assert narrower == (name in told)
        assert found.correction == before.correction
    with pytest.raises(ValueError, match="rates: expected memory_bytes_per_ns, .* got 'host_call_ns'"):
        welch_micro_prior({"host_call_ns": 1.0})


def test_rates_of_a_heap_are_those_that_give_its_times():
    rows, bins, k = np.array([64, 256, 16]), np.array([2049.0, 129.0, 513.0]), np.array([1.0, 64.0, 16.0])
    time_ns = rows * (bins * 2.0 + np.asarray(heap_comparisons(bins, k)) * 9.0)
    assert heap_rates(rows, bins, k, time_ns) == pytest.approx({"topk_bin_ns": 2.0, "topk_compare_ns": 9.0})


def test_coefficients_are_at_most_twenty_and_say_their_units():
    for model in MODELS:
        names = coefficient_names(model.prior.median)
        assert len(names) <= 20
        documented = type(model.prior.median).__doc__
        assert all(f"        {name}: " in documented for name in names)
    assert {unit_of(name) for name in coefficient_names(WELCH.prior.median)} == {"ns", "bytes/ns", "FLOP/ns", "1"}


def test_checked_coefficients_are_numbers_of_at_least_zero():
    values = named(WELCH.prior.median)
    assert type(WELCH.prior.median).checked(**values) == WELCH.prior.median
    for bad in (-1.0, np.nan):
        with pytest.raises(ValueError, match="launch_ns: expected a number of at least 0"):
            type(WELCH.prior.median).checked(**{**values, "launch_ns": bad})


def test_a_posterior_of_learned_runs_predicts_them():
    facts = FACTS["welch"]
    runs = runs_of(WELCH, ["fused_maxima", "learned"], batch=(1, 10, 96, 1024), n_fft=(64, 1000))
    time_ns = np.asarray(times(machine(WELCH, 6), runs, facts))
    inputs = {name: np.asarray(value) for name, value in runs.inputs.items()}
    timings = dataclasses.replace(fft_timings([1], [2], [1.0]), runs=dataclasses.replace(runs, inputs=inputs))
    timings = dataclasses.replace(timings, time_ns=time_ns)
    fit = fit_posterior(timings, facts=facts)
    found = np.asarray(estimate(fit.posterior, runs).time_ns)
    np.testing.assert_allclose(found, time_ns, rtol=0.1)
    unknown = Runs.checked(WELCH, "learned", batch=8, n_fft=128, k=4)
    assert np.isinf(estimate(prior_posterior(WELCH), unknown).time_ns)


def test_the_fft_model_has_a_prior_timings_a_fit_and_a_prediction():
    assert typical_fft_prior() == FFT.prior
    batch, n_fft = np.array([32, 2048] * 5), np.repeat([64, 256, 512, 1024, 4096], 2)
    true = machine(FFT, 5)
    result = fit_fft_latency(fft_timings(batch, n_fft, fft_latency_ns(true, batch, n_fft)))
    assert result.converged
    assert isinstance(result.coefficients, FftLatencyCoefficients)
    np.testing.assert_allclose(fft_latency_ns(result.coefficients, 512, 512), fft_latency_ns(true, 512, 512), rtol=0.1)
    with pytest.raises(ValueError, match="n_fft: expected an even number, got 65"):
        fft_latency_ns(true, 32, 65)
