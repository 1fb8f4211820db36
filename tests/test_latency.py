"""The calibrated latency model: its terms, derivatives, laws and errors."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tolerances import FLOAT32_RTOL, FLOAT64_RTOL, GRADIENT_RTOL, GRADIENT_STEP, QUICKLY

import rlxjax as rx
from benchmarks.startup import compilations
from rlxjax import _latency_formulas
from rlxjax._latency import COEFFICIENT_NAMES, coefficient_unit
from rlxjax._latency_formulas import MOST_NETWORK_PLACES, PLACES_OF_A_PASS, SHARE_SHARPNESS, partition_places
from rlxjax.welch import _device_programs, _host, _launch, _selection
from rlxjax.welch._device_programs import chunk_rows
from rlxjax.welch._selection import SELECTIONS

PATHS = ("host", "fused", "block")
MEDIAN = rx.typical_prior().median
#: Columns (path, batch, n_fft, k, n_segments) of workloads that reach every branch of the formula.
WORKLOADS = tuple(
    np.array(column)
    for column in zip(
        *itertools.product(range(3), (1, 9, 100, 8192), (2, 64, 1000, 4096), (1, 16, 50), (1, 2, 8)),
        strict=True,
    )
)

each_path = pytest.mark.parametrize("path", PATHS)


def coefficients(seed):
    """Return a machine whose coefficients are a few times more or less than the typical ones."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda median: float(median * np.exp(rng.normal())), MEDIAN)


#: Both forms of the fused path's selection, where the gradient must not meet the cheaper one's switch.
SELECTION = np.arange(len(WORKLOADS[0])) // 2 % 2


def predict(machine, workloads=WORKLOADS, selection=None):
    return rx.predict_latency_ns(machine, *workloads, selection=selection)


@pytest.mark.parametrize("seed", range(3))
def test_terms_are_not_negative_and_sum_to_the_prediction(seed):
    terms = rx.latency_terms_ns(coefficients(seed), *WORKLOADS)
    parts = [np.asarray(part) for name, part in vars(terms).items() if name != "correction_ns"]
    assert np.all(np.asarray(terms.correction_ns) == 0.0)
    assert all(part.shape == WORKLOADS[0].shape for part in parts)
    assert all(np.all(np.isfinite(part) & (part >= 0)) for part in parts)
    on_device = WORKLOADS[0] != rx.Path.HOST.code
    assert all(np.all(part[on_device] > 0) for part in parts)
    np.testing.assert_allclose(sum(parts), predict(coefficients(seed)), rtol=FLOAT64_RTOL)
    np.testing.assert_allclose(terms.total_ns(), predict(coefficients(seed)), rtol=0)


def test_the_host_path_waits_for_no_device():
    terms = rx.latency_terms_ns(MEDIAN, "host", 64, 256, 16, 2)
    assert [terms.launch_and_sync_ns, terms.upload_ns, terms.readback_ns] == [0, 0, 0]


#: Batch, n_fft, k and segments: one piece of work on either side, and several that processors share.
ALONE, SHARED = (4, 64, 16, 2), (500, 1000, 16, 2)


@each_path
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("sizes", [ALONE, SHARED], ids=["alone", "shared"])
def test_a_path_depends_on_the_coefficients_of_its_own_work_alone(path, selection, sizes):
    gradient = jax.grad(lambda c: rx.predict_latency_ns(c, path, *sizes, selection))(MEDIAN)
    named = {name for name in COEFFICIENT_NAMES if getattr(gradient, name) != 0}
    sharing = {"host_parallel_gain", "threads_ns"}
    host = {name for name in COEFFICIENT_NAMES if name.startswith(("host_", "select_"))} - sharing
    host_selection = {"host_call_ns", "host_bytes_per_ns"}
    host_selection |= {name for name in COEFFICIENT_NAMES if name.startswith("select_")}
    host_selection |= sharing if sizes == SHARED else set()
    forms = {
        form: {name for name in COEFFICIENT_NAMES if name.startswith(form.replace("_", "") + "_")}
        for form in SELECTIONS
    }
    device = set(COEFFICIENT_NAMES) - host - sharing - set.union(*forms.values())
    # Block's transforms are whole, and threads join in there.
    device_alone = {"streams_ns", "split_sample_ns"}
    if sizes == ALONE:
        device -= {"device_parallel_gain", *device_alone}
        forms = {form: names - {f"{form.replace('_', '')}_parallel_gain"} for form, names in forms.items()}
    host |= {"row_cache_bytes", "far_bytes_per_ns", "cache_bytes"}
    host |= {"host_parallel_gain", "threads_ns"} if sizes == SHARED else set()
    own = {
        "host": host,
        "fused": device | forms[selection],
        "block": (device - device_alone) | host_selection,
    }
    assert named == own[path]


def terms_of(path, batch, n_fft=64, k=4, n_segments=2, selection="maxima", **replaced):
    machine = dataclasses.replace(MEDIAN, **replaced)
    return rx.latency_terms_ns(machine, path, batch, n_fft, k, n_segments, selection)


def smooth_maximum(one, other):
    return np.sum(np.array(np.broadcast_arrays(one, other)) ** SHARE_SHARPNESS, 0) ** (1 / SHARE_SHARPNESS)


def share_of(rows, unshared, least, gain):
    """Return the share of the work's time that rows take, one processor's no smaller than the least."""
    return np.where(rows > unshared, smooth_maximum(least / rows, 1 / (1 + gain)), 1.0)


def test_a_share_is_that_of_the_least_piece_or_of_many_rows_in_the_limits():
    rows = np.array([100.0, 100.0 + 1e-9, 1e9])
    found = [share_of(rows, 100.0, 50.0, gain) for gain in (1e3, 1.0)]
    np.testing.assert_allclose([found[0][0], found[0][1], found[1][2]], [1.0, 0.5, 0.5], rtol=1e-6)


@pytest.mark.parametrize("gain", [0.5, 7.0])
def test_processors_of_the_host_share_work_beyond_its_least_piece(gain):
    """What processors share takes, smoothly, no less than the least piece, or than a share of the whole."""
    least = _host.LEAST_CHUNK_SAMPLES // 128
    rows = least * np.array([0.5, 1.0, 1.5, 4.0, 100.0])
    near = {"cache_bytes": 1e30}  # memory is shared by all of them
    shared, alone = (terms_of("host", rows, host_parallel_gain=g, **near) for g in (gain, 1e-300))
    share = share_of(rows, least, least, gain) / share_of(rows, least, least, 0.0)
    for name in ("transform_ns", "selection_ns"):
        np.testing.assert_allclose(
            getattr(shared, name), share * np.asarray(getattr(alone, name)), rtol=FLOAT64_RTOL
        )
    joined = np.where(rows > least, MEDIAN.threads_ns, 0.0)
    np.testing.assert_allclose(shared.call_ns, alone.call_ns[0] + joined, rtol=FLOAT64_RTOL)


@pytest.mark.parametrize("gain", [0.5, 7.0])
def test_processors_share_the_device_s_work_beyond_its_least_piece(gain):
    unshared = _launch.MOST_UNSHARED_SAMPLES // 128
    rows = unshared * np.array([1.25, 4.0, 64.0])
    near = {"cache_bytes": 1e30}  # memory is shared by all of them
    shared, alone = (terms_of("fused", rows, device_parallel_gain=g, **near) for g in (gain, 1e-300))
    share = share_of(rows, unshared, unshared / 2, gain) / share_of(rows, unshared, unshared / 2, 0.0)
    for name in ("transform_ns", "upload_ns", "readback_ns"):
        np.testing.assert_allclose(
            getattr(shared, name), share * np.asarray(getattr(alone, name)), rtol=FLOAT64_RTOL
        )
    np.testing.assert_array_equal(shared.selection_ns, alone.selection_ns)


def test_a_row_of_the_host_s_selection_costs_the_same_whatever_its_bins_are():
    for path, n_fft in itertools.product(("host", "block"), (64, 1024)):
        with_it, without = (
            terms_of(path, 8.0, n_fft, select_row_ns=each).selection_ns for each in (3.0, 0.0)
        )
        assert with_it - without == pytest.approx(8.0 * 3.0, rel=1e-6)


def test_whether_processors_share_is_asked_of_the_rows_before_they_are_padded():
    """Of 768 samples a row, 85 rows are no more than 2^16 samples, and run as 96."""
    assert rx.padded_batch(85) == 96
    for batch, streams in ((85, 0.0), (86, MEDIAN.streams_ns)):
        both = (
            terms_of("fused", batch, 256, 4, 3, streams_ns=each).call_ns for each in (MEDIAN.streams_ns, 0.0)
        )
        assert -np.subtract.reduce([*both][::-1]) == pytest.approx(streams, rel=1e-6)


@pytest.mark.parametrize("path", ["fused", "block"])
def test_a_signal_is_copied_on_its_way_to_a_device_unless_it_is_used_where_it_is(path):
    rows = _launch.LEAST_IN_PLACE_BYTES / (4.0 * 96.0)  # as many bytes, of rows of two segments of 64
    rate, gain = 7.0, 1.0
    for batch in (64.0, 0.75 * rows, 1.5 * rows):
        copied, not_copied = (
            terms_of(path, batch, device_parallel_gain=gain, staging_bytes_per_ns=each).upload_ns
            for each in (rate, np.inf)
        )
        unshared = getattr(_launch, "MOST_UNSHARED_SAMPLES" + "_OF_BLOCK" * (path == "block")) / 128
        share = share_of(batch, unshared, unshared / 2, gain)
        expected = share * 4.0 * 96.0 * batch / rate if batch < rows else 0.0
        assert copied - not_copied == pytest.approx(expected, rel=1e-6, abs=1e-6)


@each_path
def test_a_signal_beyond_the_cache_is_read_at_the_memory_s_rate_on_top(path):
    batch, n_fft, rate = 4096, 64, 5.0
    signal_bytes = 4.0 * batch * (n_fft * 3 / 2)
    cached, at_half = (
        terms_of(path, batch, n_fft, cache_bytes=size, far_bytes_per_ns=rate).total_ns()
        for size in (1e30, signal_bytes)
    )
    assert at_half - cached == pytest.approx(signal_bytes / 2 / rate, rel=1e-9)


def test_processors_that_run_programs_select_from_their_spectra_and_take_turns_at_calls():
    unshared, gain = _launch.MOST_UNSHARED_SAMPLES_OF_BLOCK // 128, 0.5
    rows = unshared * np.array([1.0, 1.25, 64.0])
    found, alone = (terms_of("block", rows, host_parallel_gain=g) for g in (gain, 1e-300))
    share = share_of(rows, unshared, unshared / 2, gain) / share_of(rows, unshared, unshared / 2, 0.0)
    np.testing.assert_allclose(found.selection_ns, share * np.asarray(alone.selection_ns), rtol=FLOAT64_RTOL)
    further_calls = np.where(rows > unshared, gain * MEDIAN.host_call_ns, 0.0)
    np.testing.assert_allclose(found.call_ns - alone.call_ns, further_calls, rtol=1e-9, atol=1e-6)


def test_a_partition_sorts_few_bins_by_a_network_and_none_where_all_are_peaks():
    only = {name: 0.0 for name in COEFFICIENT_NAMES if name.startswith("select_")} | {"select_sort_ns": 1.0}
    free = {"host_bytes_per_ns": np.inf}
    for n_fft, k, places in ((30, 4, 16), (32, 4, 32), (64, 4, 64), (126, 32, 64), (64, 32, 64), (64, 33, 0)):
        found = terms_of("host", 3, n_fft, k, **only, **free).selection_ns
        assert found == pytest.approx(3 * places, rel=FLOAT64_RTOL, abs=1e-9)


@pytest.mark.parametrize(("bins", "k"), [(513, 64), (1025, 64), (4097, 16), (4097, 2048)])
def test_a_partition_of_many_bins_passes_over_them_as_hoare_s_find(bins, k):
    harmonic = np.cumsum(1.0 / np.arange(1, bins + 1))
    rest = bins + 1 - k
    # D. E. Knuth, Mathematical Analysis of Algorithms, 1971; the formula in use is its leading part.
    by_rank = (rest + 2) * harmonic[rest - 1] + (k + 2) * harmonic[k - 1]
    comparisons = 2.0 * ((bins + 1) * harmonic[-1] - by_rank + bins + 3)
    passes = partition_places(float(bins), float(k)) - MOST_NETWORK_PLACES
    assert passes == pytest.approx(PLACES_OF_A_PASS * comparisons / 2.0, rel=0.04)


def test_the_gradient_of_a_partition_is_finite_where_all_bins_are_peaks():
    for bins, k in ((33.0, 33.0), (33.0, 64.0), (129.0, 129.0), (129.0, 0.0)):
        slopes = jax.grad(partition_places, (0, 1))(bins, k)
        assert slopes == (0.0, 0.0)


def test_each_call_reads_anew_from_memory_what_follows_from_the_segment_s_length():
    for path, bytes_per_sample in (("host", 32.0), ("fused", 32.0), ("block", 64.0)):
        slow, quick = (terms_of(path, 4, 1024, far_bytes_per_ns=rate).call_ns for rate in (2.0, np.inf))
        assert slow - quick == pytest.approx(bytes_per_sample * 1024 / 2.0, rel=1e-9)


@pytest.mark.parametrize(("path", "bytes_per_sample"), [("fused", 4.0), ("block", 8.0)])
def test_rows_beyond_the_first_cache_pay_its_rate_on_top(path, bytes_per_sample):
    batch, n_fft, rate = 4, 1024, 5.0
    without = terms_of(path, batch, n_fft, row_far_bytes_per_ns=1e300).transform_ns
    for size, share in ((1e-3, 1.0), (1.0, 0.5), (1e3, 0.0)):
        cache = {"row_cache_bytes": size * bytes_per_sample * n_fft, "row_far_bytes_per_ns": rate}
        on_top = terms_of(path, batch, n_fft, **cache).transform_ns - without
        assert on_top == pytest.approx(share * 8.0 * batch * 2 * n_fft / rate, rel=1e-9, abs=1e-6)


@pytest.mark.parametrize("gain", [0.5, 7.0])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_each_form_of_the_selection_is_shared_with_a_gain_of_its_own(selection, gain):
    unshared = _launch.MOST_UNSHARED_SAMPLES // 128
    rows = unshared * np.array([1.0, 1.25, 4.0, 64.0])
    named = f"{selection.replace('_', '')}_parallel_gain"
    apart = {"maxima_pass_ns": 0.0}  # each processor makes all passes
    shared, alone = (
        terms_of("fused", rows, selection=selection, **apart, **{named: g}) for g in (gain, 1e-300)
    )
    share = share_of(rows, unshared, unshared / 2, gain) / share_of(rows, unshared, unshared / 2, 0.0)
    np.testing.assert_allclose(shared.selection_ns, share * np.asarray(alone.selection_ns), rtol=FLOAT64_RTOL)
    np.testing.assert_array_equal(shared.transform_ns, alone.transform_ns)


def test_the_spectra_of_later_chunks_lie_where_those_of_each_processor_s_first_one_did():
    gain, chunk = 0.5, chunk_rows(rx.WelchPeakParams(64, 2, 4), "cpu")
    rows = chunk * np.array([1.0, 1.5, 2.0, 64.0])
    found = terms_of("block", rows, device_parallel_gain=gain, host_parallel_gain=gain)
    unshared = _launch.MOST_UNSHARED_SAMPLES_OF_BLOCK // 128
    share = share_of(rows, unshared, unshared / 2, gain)
    bytes_read = MEDIAN.readback_bytes_per_ns * np.asarray(found.readback_ns) / share
    np.testing.assert_allclose(bytes_read, 8.0 * 2 * 33 * np.minimum(rows, 1.5 * chunk), rtol=1e-6)


def test_a_pass_over_several_rows_costs_something_of_its_own():
    only = dataclasses.replace(jax.tree.map(lambda _: 0.0, MEDIAN), maxima_pass_ns=1.0)
    rows, k = np.array([1.0, 2.0, 500.0]), 4
    spare = {65: 2, 129: 2, 257: 2, 513: 3}
    for bins, more in spare.items():
        found = _latency_formulas.maxima_ns(only, rows, float(bins), k)
        np.testing.assert_array_equal(found, [0.0, k + more, k + more])
    # Each of several processors makes all of them.
    assert _latency_formulas.maxima_ns(only, 500.0, 65.0, k, 0.5) == k + 2


@pytest.mark.parametrize(
    ("n_fft", "n_segments", "parts"),
    [(256, 2, 1), (512, 2, 4), (1024, 2, 4), (1024, 3, 1), (1024, 4, 4)],
)
def test_a_row_is_one_of_the_parts_that_the_program_takes_transforms_apart_into(n_fft, n_segments, parts):
    assert _device_programs.transform_radix(4096, rx.WelchPeakParams(n_fft, n_segments, 4), "cpu") == parts
    without, everywhere, at_half = (
        float(terms_of("fused", 4096, n_fft, 4, n_segments, **charged).transform_ns)
        for charged in (
            {"row_far_bytes_per_ns": 1e300},
            {"row_far_bytes_per_ns": 5.0, "row_cache_bytes": 1e-3},
            {"row_far_bytes_per_ns": 5.0, "row_cache_bytes": 16.0 * n_fft / parts},
        )
    )
    assert everywhere > without
    assert at_half - without == pytest.approx((everywhere - without) / 2, rel=1e-6)


@pytest.mark.parametrize(("gain", "processors"), [(0.2, 2), (0.9, 2), (1.0, 2), (3.0, 4), (2.7, 4)])
def test_a_program_takes_long_transforms_apart_where_it_has_rows_enough(gain, processors):
    """What it does then: a step for each sample, and the operations of transforms of a quarter."""
    rate, step = 7.0, {"split_sample_ns": 0.5}
    alone = {"device_row_ns": 0.0, "device_flop_per_ns": rate, "device_bytes_per_ns": 1e300}
    alone |= {"row_far_bytes_per_ns": 1e300, "device_parallel_gain": gain}
    unshared = _launch.MOST_UNSHARED_SAMPLES
    for n_fft, n_segments, rows in itertools.product((256, 512, 1024), (1, 2), (4, 16, 32, 64, 4096)):
        params = rx.WelchPeakParams(n_fft, n_segments, 4)
        samples = rows * n_segments * n_fft
        # Processors share what is more than a piece, but no less than half of one each.
        shared_rows = max(rows // processors, unshared // 2 // (n_segments * n_fft))
        of_a_program = min(shared_rows if samples > unshared else rows, chunk_rows(params, "cpu"))
        parts = _device_programs.transform_radix(of_a_program, params, "cpu")
        found = terms_of("fused", rows, n_fft, 4, n_segments, **alone, **step).transform_ns
        one_processor_ns = samples * (2.5 * np.log2(n_fft / parts) / rate + 0.5 * (parts > 1))
        share = share_of(samples, unshared, unshared / 2, gain)
        assert found == pytest.approx(one_processor_ns * share, rel=1e-6)


def test_no_prediction_steps_with_a_gain_of_two_processors():
    """Fits would end where it steps."""
    gains = np.linspace(0.2, 1.4, 1201)
    n_fft, batch = np.array([512, 1024, 2048])[:, None, None], 2 ** np.arange(14)[None, :, None]
    machine = dataclasses.replace(MEDIAN, device_parallel_gain=gains[None, None])
    changes = np.diff(np.log(rx.predict_latency_ns(machine, "fused", batch, n_fft, 16, 2)), axis=-1)
    assert np.max(np.abs(changes)) < 2e-3


def test_a_heap_takes_in_what_the_running_maxima_of_random_bins_are_and_is_emptied_as_it_gets_smaller():
    """Of numbers in random order, the i-th enters a heap of k that is full with probability `k / i`."""
    only = dataclasses.replace(jax.tree.map(lambda _: 0.0, MEDIAN), topk_update_ns=1.0)
    for bins, k in ((65, 16), (2049, 64), (33, 33)):
        entering = sum(k / i for i in range(k + 1, bins + 1))
        emptying = math.log2(math.factorial(k))
        found = _latency_formulas.top_k_ns(only, 1.0, float(bins), float(k))
        assert found == pytest.approx(entering * math.log2(k + 1) + emptying, rel=0.02)


@pytest.mark.parametrize("bins", [8, 33, 65, 129, 193, 257, 513, 1025, 2049, 4097])
def test_a_pass_of_maxima_compares_the_blocks_as_they_are_written_and_the_places_of_one(bins):
    width, n_blocks = _selection.blocks_of(bins)
    only = dataclasses.replace(jax.tree.map(lambda _: 0.0, MEDIAN), maxima_bin_ns=1.0)
    passes = [_latency_formulas.maxima_ns(only, 1.0, float(bins), k) for k in (4, 5)]
    overlap = width * n_blocks - bins if n_blocks > _selection.MIN_BLOCKS else 0
    assert passes[1] - passes[0] == width * (n_blocks + 1) - overlap


@pytest.mark.parametrize("path", ["fused", "block"])
def test_a_run_waits_for_one_launch_as_the_further_ones_are_made_while_it_runs(path):
    rows = chunk_rows(rx.WelchPeakParams(64, 2, 4), "cpu") * np.array([0.01, 1.0, 2.0, 40.0])
    np.testing.assert_array_equal(
        terms_of(path, rows).launch_and_sync_ns, np.full(4, MEDIAN.dispatch_ns + MEDIAN.roundtrip_ns)
    )


@pytest.mark.parametrize("gain", [0.5, 3.0])
def test_programs_of_other_processors_take_their_time_to_run_beside_the_first_one(gain):
    unshared = _launch.MOST_UNSHARED_SAMPLES // 128
    rows = unshared * np.array([1.0, 1.25, 64.0])
    call_ns = terms_of("fused", rows, device_parallel_gain=gain, streams_ns=3e4).call_ns
    np.testing.assert_allclose(call_ns - call_ns[0], [0.0, 3e4, 3e4], rtol=1e-9, atol=1e-6)


def test_threads_join_the_block_path_where_processors_share():
    unshared = _launch.MOST_UNSHARED_SAMPLES_OF_BLOCK // 128
    rows = unshared * np.array([1.0, 1.25, 4.0, 64.0])
    gone, slow = (np.asarray(terms_of("block", rows, threads_ns=ns).call_ns) for ns in (0.0, 1e5))
    np.testing.assert_allclose(slow - gone, [0.0, 1e5, 1e5, 1e5], rtol=1e-9)


@each_path
def test_the_selection_is_the_cheaper_one_unless_it_is_given(path):
    for seed in range(4):
        machine, sizes = coefficients(seed), WORKLOADS[1:]
        both = [rx.predict_latency_ns(machine, path, *sizes, form) for form in SELECTIONS]
        np.testing.assert_allclose(
            rx.predict_latency_ns(machine, path, *sizes), np.minimum(*both), rtol=FLOAT64_RTOL
        )
        by_code = rx.predict_latency_ns(machine, path, *sizes, SELECTION)
        np.testing.assert_allclose(by_code, np.where(SELECTION == 0, *both), rtol=FLOAT64_RTOL)
    with pytest.raises(ValueError, match="selection: expected one of maxima, top_k, got 'heap'"):
        rx.predict_latency_ns(MEDIAN, path, 1, 64, 1, 1, "heap")


DIRECTIONS = np.eye(len(COEFFICIENT_NAMES))


@functools.partial(jax.jit, compiler_options=QUICKLY)
@functools.partial(jax.vmap, in_axes=(None, 0, None))
def log_predictions_and_slopes(machine, direction, workloads):
    """Return how the log of predictions changes along each direction of logs, and differences of that."""

    def log_prediction(step):
        logs = jnp.stack([jnp.log(getattr(machine, name)) for name in COEFFICIENT_NAMES]) + step * direction
        changed = rx.LatencyCoefficients(**dict(zip(COEFFICIENT_NAMES, jnp.exp(logs), strict=True)))
        return jnp.log(predict(changed, workloads, SELECTION))

    _, slope = jax.jvp(log_prediction, (0.0,), (1.0,))
    difference = log_prediction(GRADIENT_STEP) - log_prediction(-GRADIENT_STEP)
    return slope, difference / (2 * GRADIENT_STEP)


@pytest.mark.parametrize("seed", range(2))
def test_gradient_equals_finite_differences_of_every_coefficient(seed):
    slopes, differences = log_predictions_and_slopes(coefficients(seed), DIRECTIONS, WORKLOADS)
    for name, slope, difference in zip(COEFFICIENT_NAMES, slopes, differences, strict=True):
        assert np.any(np.abs(slope) > 1e-6), name
        np.testing.assert_allclose(slope, difference, rtol=GRADIENT_RTOL, atol=1e-9, err_msg=name)


def test_reverse_gradient_over_the_whole_set_equals_forward():
    def mean_log(machine):
        return jnp.mean(jnp.log(predict(machine)))

    machine = coefficients(0)
    both = jax.jit(lambda m: (jax.jacfwd(mean_log)(m), jax.grad(mean_log)(m)), compiler_options=QUICKLY)
    forward, reverse = both(machine)
    assert all(np.isfinite(leaf) for leaf in jax.tree.leaves(reverse))
    np.testing.assert_allclose(jax.tree.leaves(reverse), jax.tree.leaves(forward), rtol=1e-9)


@each_path
@pytest.mark.parametrize("argument", [1, 2, 3, 4])
def test_prediction_grows_with_every_size(path, argument):
    sizes = [path, 64, 256, 8, 2]
    column = (
        np.unique([rx.padded_batch(batch) for batch in range(1, 5001)])
        if argument == 1
        else 2 ** np.arange(8)
    )
    sizes[argument] = 2 * column if argument == 2 else column
    for seed in range(3):
        growth = np.diff(rx.predict_latency_ns(coefficients(seed), *sizes))
        # Where processors begin to share, and where signals are no longer copied, it takes less.
        samples = np.broadcast_to(sizes[1] * sizes[2] * sizes[4], column.shape)
        is_shared = samples > {"fused": 2**16, "block": 2**17}.get(path, np.inf)
        signal_bytes = 2.0 * samples * (1.0 + 1.0 / np.asarray(sizes[4]))
        regime = 1 * is_shared + 2 * (signal_bytes >= _launch.LEAST_IN_PLACE_BYTES)
        assert np.all(growth[regime[1:] == regime[:-1]] > 0)


@each_path
@pytest.mark.parametrize("batch", [1.0, 9.0, 100.0])
def test_the_gradient_by_batch_is_no_staircase(path, batch):
    slope = jax.grad(lambda b: rx.predict_latency_ns(MEDIAN, path, b, 256, 16, 2))(batch)
    assert np.isfinite(slope)
    assert slope > 0


def test_an_empty_batch_has_a_finite_prediction():
    assert np.all(np.isfinite(rx.predict_latency_ns(MEDIAN, np.arange(3), 0, 256, 16, 2)))


@pytest.mark.parametrize("scale", [1e-3, 7.0])
def test_a_slower_clock_scales_the_prediction(scale):
    power = {"ns": 1, "bytes/ns": -1, "FLOP/ns": -1, "bytes": 0, "1": 0}
    machine = coefficients(1)
    slower = {
        name: getattr(machine, name) * scale ** power[coefficient_unit(name)] for name in COEFFICIENT_NAMES
    }
    np.testing.assert_allclose(
        predict(rx.LatencyCoefficients(**slower)), scale * np.asarray(predict(machine)), rtol=FLOAT64_RTOL
    )


def test_jit_vmap_and_loop_equal_one_call_of_arrays():
    machine = coefficients(2)
    together = predict(machine)
    columns = tuple(jnp.asarray(column) for column in WORKLOADS)
    np.testing.assert_allclose(jax.jit(predict)(machine, columns), together, rtol=FLOAT64_RTOL)
    one = jax.vmap(lambda *sizes: rx.predict_latency_ns(machine, *sizes))
    np.testing.assert_allclose(one(*columns), together, rtol=FLOAT64_RTOL)
    machines = [coefficients(seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.array(leaves), *machines)
    np.testing.assert_allclose(jax.vmap(predict)(stacked), [predict(m) for m in machines], rtol=FLOAT64_RTOL)


def test_scalars_names_and_mixed_codes_equal_arrays():
    together = predict(MEDIAN)
    rows = list(zip(*(column.tolist() for column in WORKLOADS), strict=True))
    alone = [rx.predict_latency_ns(MEDIAN, PATHS[path], *sizes) for path, *sizes in rows[::17]]
    np.testing.assert_allclose(alone, together[::17], rtol=FLOAT64_RTOL)
    names = np.array(PATHS)[WORKLOADS[0]]
    np.testing.assert_array_equal(predict(MEDIAN, (names, *WORKLOADS[1:])), together)
    grid = rx.predict_latency_ns(MEDIAN, np.arange(3)[:, None], np.array([[1, 9, 100, 8192]]), 64, 16, 2)
    assert grid.shape == (3, 4)


@pytest.mark.parametrize("seed", range(3))
def test_float32_is_within_1e_5_of_float64(seed):
    exact = np.asarray(predict(coefficients(seed)))
    with jax.enable_x64(False):
        single = predict(coefficients(seed))
        assert single.dtype == np.float32
        np.testing.assert_allclose(single, exact, rtol=FLOAT32_RTOL)


def test_new_values_compile_nothing():
    predict(coefficients(0))
    rx.predict_latency_ns(MEDIAN, "host", 1, 64, 1, 1)
    compilations.clear()
    for seed, path in enumerate(PATHS):
        predict(coefficients(seed), tuple(column[::-1] for column in WORKLOADS))
        rx.predict_latency_ns(coefficients(seed), path, 2 + seed, 128, 3, 2)
    assert not compilations


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("first", [1, *(2**power - 4 for power in range(13, 24))])
def test_padding_in_the_model_is_that_of_the_run(first, dtype):
    batch = np.arange(first, first + (5000 if first == 1 else 9))
    expected = [rx.padded_batch(int(size)) for size in batch]
    np.testing.assert_array_equal(_latency_formulas.padded_rows(jnp.asarray(batch, dtype)), expected)


device_rows = jax.jit(_latency_formulas.device_rows)


@pytest.mark.parametrize("n_segments", [1, 2, 8])
@pytest.mark.parametrize("n_fft", [64, 256, 4096])
def test_rows_in_the_model_are_those_of_the_run(n_fft, n_segments):
    chunk = chunk_rows(rx.WelchPeakParams(n_fft, n_segments, 1), "cpu")
    assert _latency_formulas.chunk_rows_of(float(n_fft), float(n_segments)) == chunk
    # As many batches of every chunk, so that one program serves all.
    batch = np.unique(np.linspace(1, 3 * chunk + 1, 97).astype(int))
    run = np.array([size // chunk * chunk + rx.padded_batch(int(size % chunk)) for size in batch])
    found = device_rows(jnp.asarray(batch, float), float(chunk))
    np.testing.assert_array_equal(found[batch <= chunk], run[batch <= chunk])
    assert np.all((batch <= found) & (found <= run))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("device", 1, 64, 1, 1), "unknown path 'device'; expected one of host, fused, block"),
        (("learned", 1, 64, 1, 1), "path: expected host, fused or block, got learned"),
        ((np.array([0, 3]), 1, 64, 1, 1), "path: expected host, fused or block, got learned"),
        ((np.array([0, 4]), 1, 64, 1, 1), "path: expected codes from 0 to 3"),
        (("host", -1, 64, 1, 1), "batch: expected a size of at least 0, got -1"),
        (("host", 1, np.nan, 1, 1), "n_fft: expected a size of at least 2, got nan"),
        (("fused", 1, 64, np.array([1, -2]), 1), "k: expected a size of at least 1, got -2"),
        (("block", 1, 64, 1, jnp.array([np.nan])), "n_segments: expected a size of at least 1, got nan"),
    ],
)
def test_a_workload_without_a_prediction_is_refused(arguments, message):
    for function in (rx.predict_latency_ns, rx.latency_terms_ns):
        with pytest.raises(ValueError, match=message):
            function(MEDIAN, *arguments)


@pytest.mark.parametrize("name", COEFFICIENT_NAMES)
def test_a_coefficient_says_its_unit_in_its_name(name):
    suffix = {"bytes/ns": "_bytes_per_ns", "FLOP/ns": "_flop_per_ns", "ns": "_ns", "bytes": "_bytes"}
    unit = coefficient_unit(name)
    if unit == "1":
        assert name.endswith("_gain")
    else:
        assert name.endswith(suffix[unit])
        assert (unit == "ns") == (name.endswith("_ns") and "_per_" not in name)


@pytest.mark.parametrize("bad", [-1.0, np.nan])
def test_checked_coefficients_are_numbers_of_at_least_zero(bad):
    values = {name: getattr(MEDIAN, name) for name in COEFFICIENT_NAMES}
    assert rx.LatencyCoefficients.checked(**values) == MEDIAN
    with pytest.raises(ValueError, match="dispatch_ns: expected a number of at least 0"):
        rx.LatencyCoefficients.checked(**{**values, "dispatch_ns": bad})
