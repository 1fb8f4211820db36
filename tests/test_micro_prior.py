"""The prior of the fit: what micro-benchmarks measure by themselves, solved for coefficients."""

import dataclasses

import jax
import numpy as np
import pytest
from _tolerances import FLOAT64_RTOL

import rlxjax as rx
from calibrate.fits import MAXIMA_RATES, TOP_K_RATES, micro_prior
from calibrate.measure import (
    DEEP_SELECTION,
    LONG_TRANSFORM,
    SHORT_TRANSFORM,
    WIDE_SELECTION,
    MicroRates,
)
from rlxjax._latency_formulas import TRANSFORM_BYTES_PER_SAMPLE, fft_flop, maxima_ns, top_k_ns

TYPICAL = rx.typical_prior().median
LAUNCH_NS, WAIT_NS = 1e3, 5e3
FLOP_PER_NS, FAR_BYTES_PER_NS = 17.0, 9.0


def selections(machine):
    """Return what the selections take on a machine, launch and wait apart."""
    only = jax.tree.map(lambda _: 0.0, machine)
    kept = {name: getattr(machine, name) for name in (*MAXIMA_RATES, *TOP_K_RATES)}
    only, shapes = dataclasses.replace(only, **kept), (WIDE_SELECTION, DEEP_SELECTION)
    return {
        "maxima": [float(maxima_ns(only, rows, float(bins), k)) for rows, bins, k in shapes],
        "top_k": [float(top_k_ns(only, rows, float(bins), k)) for rows, bins, k in shapes],
    }


def transforms():
    """Return what the short and the long transform take: complex rows, two segments each."""
    rows, n_fft = SHORT_TRANSFORM
    short_ns = float(fft_flop(2.0 * rows, float(n_fft))) / FLOP_PER_NS
    samples = np.prod(LONG_TRANSFORM)
    long_ns = short_ns * samples / np.prod(SHORT_TRANSFORM)
    return [short_ns, long_ns + 2 * TRANSFORM_BYTES_PER_SAMPLE * samples / FAR_BYTES_PER_NS]


def rates(selection_ns, transform_ns):
    launched = {form: tuple(t + LAUNCH_NS + WAIT_NS for t in times) for form, times in selection_ns.items()}
    return MicroRates(
        dispatch_ns=LAUNCH_NS,
        roundtrip_ns=WAIT_NS,
        memory_bytes_per_ns=6.0,
        upload_bytes_per_ns=7.0,
        readback_bytes_per_ns=8.0,
        selection_ns=launched,
        transform_ns=tuple(t + LAUNCH_NS + WAIT_NS for t in transform_ns),
    )


def test_the_medians_are_the_rates_that_give_the_times():
    machine = dataclasses.replace(
        TYPICAL, maxima_key_ns=0.3, maxima_bin_ns=0.02, topk_bin_ns=2.0, topk_update_ns=9.0
    )
    prior = micro_prior(rates(selections(machine), transforms()))
    expected = {name: getattr(machine, name) for name in (*MAXIMA_RATES, *TOP_K_RATES)}
    expected |= {"dispatch_ns": LAUNCH_NS, "roundtrip_ns": WAIT_NS, "far_bytes_per_ns": 6.0}
    expected |= {"upload_bytes_per_ns": 7.0, "readback_bytes_per_ns": 8.0}
    expected |= {"device_flop_per_ns": FLOP_PER_NS, "row_far_bytes_per_ns": FAR_BYTES_PER_NS}
    for name, median in vars(prior.median).items():
        assert median == pytest.approx(expected.get(name, getattr(TYPICAL, name)), rel=1e3 * FLOAT64_RTOL), (
            name
        )
    wide = rx.typical_prior().log_sd
    narrowed = {name for name, log_sd in vars(prior.log_sd).items() if log_sd < getattr(wide, name)}
    assert narrowed == set(expected)


def test_a_long_transform_that_is_no_slower_says_nothing_of_the_cache():
    short, _ = transforms()
    prior = micro_prior(rates({}, (short, 0.5 * short)))
    assert prior.median.row_far_bytes_per_ns == TYPICAL.row_far_bytes_per_ns
    assert prior.log_sd.row_far_bytes_per_ns == rx.typical_prior().log_sd.row_far_bytes_per_ns


def test_samples_without_these_benchmarks_leave_the_wide_prior():
    prior = micro_prior(rates({}, ()))
    assert prior.median.device_flop_per_ns == TYPICAL.device_flop_per_ns
    assert prior.median.maxima_key_ns == TYPICAL.maxima_key_ns
