"""The latency model of Welch peaks: its terms, its counts of work, and what micro-benchmarks say of it."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _built_in_models import FACTS, LEARNED_FACTS, machine, runs_of, times

from rlxjax.fit import LatencyPrior, Runs, Timings, estimate, fit_posterior, named, predicted_ns, prior_posterior
from rlxjax.models import WELCH, heap_rates, welch_micro_prior
from rlxjax.models._welch_terms import (
    device_rows,
    heap_comparisons,
    maxima_comparisons,
    maxima_passes,
    partition_comparisons,
)
from rlxjax.welch import VARIANTS, WelchPeakParams, padded_batch, schedule
from rlxjax.welch._launch import plan_of

FUSED = ("fused_maxima", "fused_top_k")


terms_of = jax.jit(lambda coefficients, runs, facts: WELCH.terms_ns(coefficients, runs, facts))
rows_of = jax.jit(device_rows)
slope_of = jax.jit(jax.grad(lambda batch, *others: jnp.sum(device_rows(others[0], batch, *others[1:])[0])))


def terms(coefficients, runs, facts):
    return terms_of(coefficients, runs, dict(facts))


def test_the_variants_of_the_model_are_those_of_the_runner_and_strategies_run_them_and_imply_their_segments():
    assert WELCH.variants == tuple(VARIANTS)
    assert {name for name in VARIANTS if VARIANTS[name].transform == "fft"} == {*FUSED, "block"}
    found = WELCH.strategies
    assert found["fused"].variants == FUSED
    assert {name: found[name].fixed["n_segments"] for name in ("ultra", "fast")} == {"ultra": 1.0, "fast": 2.0}
    assert {variant for strategy in found.values() for variant in strategy.variants} == set(WELCH.variants)


def test_processors_share_what_is_more_than_one_works_on_alone_each_at_least_half_of_that():
    alone = 2**12
    facts = {f"alone_samples_{kind}": alone for kind in ("host", "fused", "block")}
    rows = alone / 512.0 * np.array([1.0, 2.0, 1024.0])
    for variant, gain in itertools.product(("host", "fused_maxima", "block"), (0.5, 7.0)):
        own = dataclasses.replace(machine(WELCH, 2), parallel_gain=gain, memory_bytes_per_ns=1e18)
        passes = dataclasses.replace(own, maxima_pass_ns=0.0)
        runs = Runs.checked(WELCH, variant, batch=rows, n_fft=256, k=16)
        shared, single = (
            terms(passes, runs, {**WELCH.facts, **own_facts}) for own_facts in (facts, dict.fromkeys(facts, 1e30))
        )
        for name in ("transform_ns", "selection_ns"):
            share = np.asarray(shared[name] / single[name])
            np.testing.assert_allclose(share[[0, 2]], [1.0, 1.0 / (1.0 + gain)], rtol=1e-6)
            smooth = (0.25**16 + (1.0 + gain) ** -16.0) ** (1 / 16)
            np.testing.assert_allclose(share[1], smooth, rtol=1e-9)
        joining = own.streams_ns if variant == "fused_maxima" else own.threads_ns
        np.testing.assert_allclose(shared["call_ns"] - single["call_ns"], joining * np.array([0, 1, 1]), rtol=1e-9)


def test_facts_change_what_is_scheduled_by_them_and_nothing_else():
    runs = runs_of(WELCH, batch=(33, 600))
    facts, own = FACTS["welch"], machine(WELCH, 3)
    variant = np.asarray(WELCH.variants)[np.asarray(runs.variant)]
    concerned = {
        "alone_samples_host": {"host"},
        "alone_samples_block": {"block"},
        "alone_samples_fused": {"fused_maxima", "fused_top_k", "learned"},
        "processors": {"fused_maxima", "fused_top_k", "learned", "block"},
        "tile_rows": {"fused_maxima", "fused_top_k", "learned", "block"},
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
    assert (WELCH.impossible(WELCH.facts), WELCH.impossible(facts)) == (("learned",), ())
    assert np.isinf(estimate(prior_posterior(WELCH), runs).time_ns).all()
    slope_of = jax.grad(lambda c: jnp.sum(jnp.where(jnp.isinf(t := predicted_ns(c, runs, facts)), 0.0, t)))
    slopes = jax.jit(slope_of)(own)
    assert all(np.isfinite(slope) for slope in jax.tree.leaves(slopes))


def test_a_learned_run_is_a_fused_one_but_for_its_transform_and_the_bins_that_it_ranks_and_the_host_waits_for_none():
    both = [Runs.checked(WELCH, variant, batch=96, n_fft=1000, k=16) for variant in ("fused_maxima", "learned")]
    fused, learned = (terms(machine(WELCH, 4), runs, FACTS["welch"]) for runs in both)
    for name in fused:
        assert (fused[name] == learned[name]) == (name not in ("transform_ns", "selection_ns")), name
    assert learned["selection_ns"] < fused["selection_ns"]
    found = terms(machine(WELCH, 0), Runs.checked(WELCH, range(4), batch=64, n_fft=256, k=16), WELCH.facts)
    for name in ("launch_and_sync_ns", "upload_ns", "readback_ns"):
        np.testing.assert_array_equal(np.asarray(found[name]) > 0, [False, True, True, True])


@pytest.mark.parametrize("processors", [1, 2, 8])
@pytest.mark.parametrize("variant", ["fused_maxima", "block"])
def test_a_device_runs_the_rows_that_the_runner_plans_and_the_gradient_is_that_of_the_batch(variant, processors):
    facts = {**WELCH.facts, "processors": processors}
    facts |= {name: value for name, value in schedule("cpu")._asdict().items() if name in facts}
    code = jnp.asarray(WELCH.variants.index(variant))
    batches = np.array([1, 3, 8, 9, 33, 100, 129, 500, 1024, 4096, 5000, 8192, 12_345, 131_072])
    for n_fft in (64, 100, 160, 1000, 4096):
        params = WelchPeakParams.fast(n_fft, 4)
        found, is_padded = rows_of(code, batches * 1.0, 2.0 * n_fft, facts)
        for batch, rows, pads in zip(batches.tolist(), np.asarray(found), np.asarray(is_padded), strict=True):
            planned = plan_of(VARIANTS[variant], batch, params, "cpu", processors, False).rows
            rounds = 1 if batch <= planned else processors * math.ceil(math.ceil(batch / planned) / processors)
            padded = padded_batch(planned) if batch <= planned else planned
            assert rows == pytest.approx(rounds * padded), (n_fft, batch)
            assert pads == (batch <= planned and padded > batch), (n_fft, batch)
        np.testing.assert_array_equal(slope_of(batches * 1.0, code, 2.0 * n_fft, facts), 1.0)


def test_a_heap_takes_in_what_running_maxima_are_and_its_rates_are_those_that_give_its_times():
    """Of numbers in random order, the i-th enters a heap of k that is full with probability `k / i`."""
    for bins, k in ((65, 16), (2049, 64), (33, 32), (129, 1)):
        entering = sum(k / i for i in range(k + 1, bins + 1))
        expected = entering * math.log2(k + 1) + math.log2(math.factorial(k))
        assert heap_comparisons(float(bins), float(k)) == pytest.approx(expected, rel=0.1, abs=0.01)
    rows, bins, k = np.array([64, 256, 16]), np.array([2049.0, 129.0, 513.0]), np.array([1.0, 64.0, 16.0])
    time_ns = rows * (bins * 2.0 + np.asarray(heap_comparisons(bins, k)) * 9.0)
    assert heap_rates(rows, bins, k, time_ns) == pytest.approx({"topk_bin_ns": 2.0, "topk_compare_ns": 9.0})


def test_a_partition_is_of_fewer_peaks_than_bins_and_each_form_of_selection_grows_with_both():
    bins, k = (2.0 ** np.arange(1, 12) + 1.0)[:, None], 2.0 ** np.arange(1, 6)[None]
    peaks = np.minimum(bins, k)
    partition, heap, passes, maxima = jax.jit(
        lambda bins, k: (
            partition_comparisons(bins, k),
            heap_comparisons(bins, k),
            maxima_passes(bins, k),
            maxima_comparisons(bins, WELCH.facts),
        )
    )(bins, k)
    of_all = bins <= k
    np.testing.assert_allclose(np.asarray(partition)[of_all], (peaks * np.log2(peaks + 1))[of_all])
    assert np.all((np.minimum(k, bins) <= passes) & (passes <= bins))  # no more candidates than there are bins
    for count in map(np.asarray, (partition, heap, passes * maxima)):
        inside = np.asarray(k < bins) & np.ones_like(count, bool)
        assert np.all(np.diff(count, axis=0)[inside[:-1]] >= 0)
        # Near one peak a bin, a partition ends sooner.
        assert np.all(np.diff(count, axis=1)[np.asarray(4 * k[:, 1:] < bins)] > 0)


def test_the_correction_of_traced_runs_is_that_of_numpy_and_is_level_where_nothing_was_timed():
    runs = runs_of(WELCH)
    mine = WELCH.features(jax.tree.map(np.asarray, runs), WELCH.facts)
    traced = jax.jit(lambda own: WELCH.features(own, WELCH.facts))(runs)
    assert isinstance(mine, np.ndarray)
    np.testing.assert_allclose(traced, mine, atol=1e-12)
    far = Runs.checked(WELCH, 1, batch=np.array([2**15, 2**18]), n_fft=2**14, k=16)
    np.testing.assert_array_equal(*WELCH.features(far, WELCH.facts))
    np.testing.assert_array_equal(mine[:, -1], 1.0)
    np.testing.assert_array_equal(WELCH.folds(runs), [runs.inputs["batch"], runs.inputs["n_fft"]])


def test_a_rate_of_a_micro_benchmark_is_a_median_that_is_better_known():
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


@pytest.mark.slow
def test_a_posterior_of_learned_runs_predicts_them():
    facts, runs = FACTS["welch"], runs_of(WELCH, ["fused_maxima", "learned"], batch=(1, 10, 96, 1024), n_fft=(64, 1000))
    time_ns = np.asarray(times(machine(WELCH, 6), runs, facts))
    inputs = {name: np.asarray(value) for name, value in runs.inputs.items()}
    timings = Timings.checked(WELCH, variant=np.asarray(runs.variant), time_ns=time_ns, **inputs)
    found = estimate(fit_posterior(timings, facts=facts).posterior, runs)
    np.testing.assert_allclose(found.time_ns, time_ns, rtol=0.1)


def test_checked_coefficients_are_numbers_of_at_least_zero():
    values = named(WELCH.prior.median)
    assert type(WELCH.prior.median).checked(**values) == WELCH.prior.median
    for bad in (-1.0, np.nan):
        with pytest.raises(ValueError, match="launch_ns: expected a number of at least 0"):
            type(WELCH.prior.median).checked(**{**values, "launch_ns": bad})
