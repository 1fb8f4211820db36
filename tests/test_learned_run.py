"""`welch_peaks` with a learned FFT: its results, refusals, choices and programs, and the built-in cost."""

import dataclasses
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tolerances import FLOAT32_RTOL, FLOAT64_RTOL, assert_gradient_is_the_finite_difference

import rlxjax as rx
from benchmarks.startup import COMPILE, compilations
from rlxjax.welch import _launch, _path_costs, _run
from rlxjax.welch._host import hann_window
from rlxjax.welch._learned_program import learned_peaks, learned_program

N_FFT = 64
FAST = rx.WelchPeakParams.fast(N_FFT, k=5)
compiled_peaks = jax.jit(learned_peaks, static_argnames="params")


def noise(batch, params=FAST, seed=0):
    return np.random.default_rng(seed).standard_normal((batch, params.frame_len)).astype(np.float32)


def pruned(n_fft=N_FFT, stages_off=2, bins=None):
    """Return a model of a low band, the last stages cut off: fewer than a quarter of its gates are on."""
    exact = rx.LearnedFft.exact(n_fft)
    gates = exact.gates.copy()
    gates[exact.stages - stages_off :] = 0
    mask = np.arange(exact.n_bins) < (n_fft // 8 if bins is None else bins)
    return dataclasses.replace(exact, gates=gates, mask=mask.astype(float)).hardened()


SPARSE = pruned()
each_array = pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray], ids=["NumPy", "JAX"])


def test_the_sparse_model_is_one_that_the_reference_would_use():
    assert 0 < 4 * SPARSE.active_gates < SPARSE.total_gates


@each_array
@pytest.mark.parametrize(
    ("name", "batch"),
    [("learned", 0), ("LEARNED", 1), ("learned_compiled", 2), ("Learned-Compiled", 3), ("learned", 33)],
)
def test_the_run_is_that_of_the_program(name, batch, as_array):
    signal = as_array(noise(batch))
    peaks = rx.welch_peaks(signal, FAST, name, model=SPARSE)
    expected = compiled_peaks(np.asarray(signal), learned_program(SPARSE, FAST), FAST)
    assert isinstance(peaks, type(signal))
    assert (peaks.shape, peaks.dtype) == ((batch, 5, 2), np.float32)
    np.testing.assert_array_equal(peaks[..., 0], expected[..., 0])
    np.testing.assert_allclose(peaks[..., 1], expected[..., 1], rtol=FLOAT32_RTOL)


@each_array
@pytest.mark.parametrize(("n_segments", "k"), [(1, 33), (2, 1), (8, 40)])
def test_segments_and_k_beyond_the_bins_are_those_of_the_parameters(k, n_segments, as_array):
    params = rx.WelchPeakParams(N_FFT, n_segments, k)
    signal = noise(4, params)
    peaks = np.asarray(rx.welch_peaks(as_array(signal), params, "learned", model=SPARSE))
    expected = np.asarray(compiled_peaks(signal, learned_program(SPARSE, params), params))
    live = SPARSE.mask.sum()
    assert peaks.shape == (4, k, 2)
    np.testing.assert_array_equal(peaks[..., 0], expected[..., 0])
    np.testing.assert_allclose(peaks[..., 1], expected[..., 1], rtol=FLOAT32_RTOL)
    np.testing.assert_array_equal(peaks[:, int(live) :, 1], 0)
    np.testing.assert_array_equal(peaks[:, 33:], 0)


@each_array
def test_one_row_keeps_the_batch_axis(as_array):
    signal = noise(1)
    rows = (as_array(signal[0]), as_array(signal))
    one, many = (rx.welch_peaks(row, FAST, "learned", model=SPARSE) for row in rows)
    assert one.shape == (1, 5, 2)
    np.testing.assert_array_equal(one, many)


@each_array
@pytest.mark.parametrize("dtype", ["int16", "uint8", "int64", "bool", "float16", "float64"])
def test_any_real_signal_counts_as_its_float32_prefix(dtype, as_array):
    counts = np.random.default_rng(1).integers(0, 100, (3, FAST.frame_len + 50))
    signal = (counts > 50 if dtype == "bool" else counts).astype(dtype)
    plain = np.ascontiguousarray(signal[:, : FAST.frame_len], np.float32)
    expected = rx.welch_peaks(plain, FAST, "learned", model=SPARSE)
    given = as_array(signal)
    np.testing.assert_array_equal(rx.welch_peaks(given, FAST, "learned", model=SPARSE), expected)
    np.testing.assert_array_equal(given, signal)


@pytest.mark.parametrize(("n_fft", "n_segments"), [(2, 1), (64, 2), (64, 8), (1024, 2)])
def test_the_exact_model_has_the_accuracy_of_the_fused_path(n_fft, n_segments):
    params = rx.WelchPeakParams(n_fft, n_segments, k=min(16, n_fft // 2 + 1))
    signal = noise(4, params)
    window = 0.5 * (1 - np.cos(2 * np.pi * np.arange(n_fft) / (n_fft - 1)))
    starts = range(0, n_segments * params.hop, params.hop)
    segments = np.stack([signal[:, start : start + n_fft].astype(float) for start in starts], 1)
    power = np.abs(np.fft.rfft(segments * window)) ** 2
    power[..., 1:-1] *= 2
    power = power.mean(1)
    tolerance = FLOAT32_RTOL * power.max(1, keepdims=True)
    best = -np.sort(-power, axis=1)[:, : params.k]
    model = rx.LearnedFft.exact(n_fft)
    for strategy in ("fused", "learned"):
        peaks = np.asarray(rx.welch_peaks(signal, params, strategy, model=model))
        true = np.take_along_axis(power, peaks[..., 0].astype(int), 1)
        assert np.all(np.abs(peaks[..., 1] - true) <= tolerance)
        assert np.all(np.abs(true - best) <= tolerance)


def test_nan_silence_and_other_rows_are_treated_as_on_the_exact_path():
    signal = noise(3)
    signal[1, 7], signal[2] = np.nan, 0
    exact = rx.LearnedFft.exact(N_FFT)
    learned, fused = (rx.welch_peaks(signal, FAST, name, model=exact) for name in ("learned", "fused"))
    np.testing.assert_array_equal(learned[..., 0], fused[..., 0])
    np.testing.assert_array_equal(learned[1:], fused[1:])


def test_jit_and_vmap_equal_eager_and_gradients_are_finite():
    signal = jnp.asarray(noise(3))
    run = functools.partial(rx.welch_peaks, params=FAST, strategy="learned", model=SPARSE)
    eager = run(signal)
    for transformed in (jax.jit(run)(signal), jax.vmap(run)(signal)[:, 0]):
        np.testing.assert_array_equal(transformed[..., 0], eager[..., 0])
        np.testing.assert_allclose(transformed[..., 1], eager[..., 1], rtol=FLOAT32_RTOL)
    gradient = jax.jit(jax.grad(lambda x: run(x)[..., 1].sum()))
    assert np.all(np.isfinite(gradient(jnp.zeros_like(signal))))
    assert np.all(np.isfinite(gradient(signal)))
    assert np.any(gradient(signal) != 0)


@pytest.mark.parametrize("leaves", [np.asarray, jnp.asarray], ids=["NumPy leaves", "JAX leaves"])
def test_a_constant_signal_and_a_model_of_any_leaves_run_inside_jit(leaves):
    model, signal = jax.tree.map(leaves, pruned()), noise(3)
    inside = jax.jit(lambda scale: scale * rx.welch_peaks(signal, FAST, "learned", model=model))(1.0)
    np.testing.assert_allclose(
        inside, rx.welch_peaks(signal, FAST, "learned", model=SPARSE), rtol=FLOAT32_RTOL
    )


def test_auto_in_traced_code_is_fused_although_a_model_is_given():
    signal = jnp.asarray(noise(3))
    auto = jax.jit(lambda x: rx.welch_peaks(x, FAST, model=SPARSE))(signal)
    np.testing.assert_allclose(auto, rx.welch_peaks(signal, FAST, "fused"), rtol=FLOAT32_RTOL)


def test_the_result_is_that_of_the_network_itself():
    segments = noise(4, rx.WelchPeakParams.ultra(N_FFT, 5))
    spectrum = rx.learned_spectrum(SPARSE, jnp.asarray(segments * hann_window(N_FFT), float))
    power = np.abs(np.asarray(spectrum)) ** 2
    power[:, 1:-1] *= 2
    peaks = rx.welch_peaks(segments, rx.WelchPeakParams.ultra(N_FFT, 5), "learned", model=SPARSE)
    np.testing.assert_array_equal(peaks[..., 0], np.argsort(-power, axis=1)[:, :5])
    np.testing.assert_allclose(peaks[..., 1], -np.sort(-power, axis=1)[:, :5], rtol=10 * FLOAT32_RTOL)


def refusal(run):
    with pytest.raises(ValueError, match="^(model|strategy): ") as caught:
        run()
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("transform", [lambda run: run, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("strategy", ["learned", "auto", "rlx", "host", "ultra", "fused", "block"])
def test_a_model_of_another_length_or_none_at_all_is_refused_whatever_the_strategy(strategy, transform):
    for model, said in (
        (rx.LearnedFft.exact(128), "expected one for n_fft 64 as in params, got n_fft 128"),
        ("model.json", "expected a LearnedFft (load_learned_fft), got str"),
        ({"gates": 1}, "expected a LearnedFft (load_learned_fft), got dict"),
    ):
        run = transform(functools.partial(rx.welch_peaks, params=FAST, strategy=strategy, model=model))
        assert said in refusal(lambda run=run: run(jnp.zeros((1, 96))))


@pytest.mark.parametrize("transform", [lambda run: run, jax.jit], ids=["eager", "jit"])
def test_learned_without_a_model_is_refused(transform):
    run = transform(functools.partial(rx.welch_peaks, params=FAST, strategy="Learned_Compiled"))
    assert "'learned' needs a learned FFT (model=), and none was given" in refusal(
        lambda: run(jnp.zeros((1, 96)))
    )


@pytest.mark.parametrize("strategy", ["learned", "auto", "host"])
def test_a_traced_model_is_refused_with_the_function_that_takes_one(strategy):
    def powers(model):
        return rx.welch_peaks(noise(2), FAST, strategy, model=model)[..., 1].sum()

    for transform in (jax.jit, jax.grad, jax.vmap):
        model = jax.tree.map(lambda leaf: jnp.stack([leaf]), SPARSE) if transform is jax.vmap else SPARSE
        assert "cannot be traced; use learned_spectrum" in refusal(lambda t=transform, m=model: t(powers)(m))


@pytest.mark.parametrize("strategy", ["host", "block"])
def test_what_runs_in_traced_code_is_said_in_full(strategy):
    message = refusal(lambda: jax.jit(lambda x: rx.welch_peaks(x, FAST, strategy))(jnp.zeros((1, 96))))
    assert "'fused'" in message
    assert "'learned'" in message


@pytest.mark.parametrize("device", [rx.Device.CPU, rx.Device.CUDA, rx.Device.METAL])
@pytest.mark.parametrize("batch", [1, 600, 8192])
def test_auto_without_a_calibration_is_the_lowest_built_in_estimate(device, batch, monkeypatch):
    monkeypatch.setattr(_run, "jax_device", lambda: device)
    params = rx.WelchPeakParams.fast(256, 16)
    for model in (pruned(256), pruned(256, 7, 2), pruned(256, 1, 100), rx.LearnedFft.exact(256)):
        gates = (model.active_gates, model.total_gates)
        costs = {
            path: float(cost(device, batch, 256, 16)) for path, cost in _run.BUILT_IN_COSTS_NS.items()
        } | {rx.Path.LEARNED: float(rx.learned_path_ns(device, batch, 256, 16, *gates))}
        best = min(costs, key=costs.get)
        assert _run._choose_path("auto", batch, params, None, model, False) is best
        assert best is not rx.Path.LEARNED or 4 * gates[0] < gates[1]
        assert _run._choose_path("rlx", batch, params, None, model, False) is not rx.Path.LEARNED


def test_auto_runs_the_model_where_it_is_cheapest_and_never_with_a_quarter_of_its_gates_on(monkeypatch):
    monkeypatch.setattr(_run, "jax_device", lambda: rx.Device.CUDA)
    signal, quarter = noise(600), rx.LearnedFft.exact(N_FFT)
    np.testing.assert_array_equal(
        rx.welch_peaks(signal, FAST, model=SPARSE), rx.welch_peaks(signal, FAST, "learned", model=SPARSE)
    )
    gates = np.zeros(quarter.gates.size)
    gates[: gates.size // 4] = 1
    for at_least in (quarter, dataclasses.replace(quarter, gates=gates.reshape(quarter.gates.shape))):
        assert 4 * at_least.active_gates >= at_least.total_gates
        assert _run._choose_path("auto", 600, FAST, None, at_least, False) is not rx.Path.LEARNED


def test_models_are_collected_with_their_programs():
    models = [pruned(), pruned(bins=5)]
    for model in models:
        rx.welch_peaks(noise(2), FAST, "learned", model=model)
    programs = weakref.ref(_launch.program_of(models[0], FAST))
    gone = [*map(weakref.ref, models), programs]
    del model, models
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3


def test_a_model_is_compiled_once_for_signals_of_one_padded_shape():
    model, params = pruned(bins=6), dataclasses.replace(FAST, k=3)

    def programs(model, batch):
        compilations.clear()
        signal = noise(batch, params, seed=batch)
        for same in (signal, signal.astype(np.float64), jax.device_put(signal)):
            rx.welch_peaks(same, params, "learned", model=model)
        return sum(event == COMPILE for event, _ in compilations)

    assert programs(model, 40) > 0
    assert [programs(model, batch) for batch in (33, 37, 40)] == [0] * 3
    retrained = dataclasses.replace(model, twiddles=model.twiddles * 0.9)
    assert programs(retrained, 40) == 0, "models pruned alike share a program"


# Columns (device, batch, n_fft, k, active, total) that reach every branch.
WORKLOADS = tuple(
    np.array(column)
    for column in zip(
        *(
            (rx.Device.parse(device).code, batch, n_fft, 16, share * n_fft.bit_length() * n_fft / 2, total)
            for device in ("cpu", "metal", "cuda", "gpu", "tpu")
            for batch in (1, 100, 512, 8192)
            for n_fft in (64, 1024)
            for share in (0.0, 0.1, 0.24, 0.25, 0.9)
            for total in (n_fft.bit_length() * n_fft / 2, 0.0)
        ),
        strict=True,
    )
)


@pytest.mark.parametrize("n_segments", [1, 2, 8])
def test_the_learned_path_costs_the_scaled_fused_graph_where_it_is_sparse(n_segments):
    *workload, active, total = WORKLOADS
    share = active / np.where(total > 0, total, 1)
    scaled = rx.fused_graph_ns(*workload, scale=0.30 + 0.70 * share, n_segments=n_segments)
    expected = np.where((4 * active < total) & (total > 0), scaled, np.inf)
    found = rx.learned_path_ns(*WORKLOADS, n_segments=n_segments)
    np.testing.assert_allclose(found, expected, rtol=FLOAT64_RTOL)
    assert np.isfinite(found).any()
    assert np.isinf(found).any()


def test_the_learned_path_is_what_the_reference_estimates_on_cuda():
    costs = rx.estimate_welch_peaks_costs("cuda", 8192, 256, 16, True, 100, 1024)
    np.testing.assert_allclose(
        rx.learned_path_ns("cuda", 8192, 256, 16, 100, 1024), costs.learned_ns, rtol=FLOAT64_RTOL
    )
    assert np.isinf(rx.learned_path_ns("cuda", 8192, 256, 16, 256, 1024))
    assert np.isinf(rx.learned_path_ns("cuda", 8192, 256, 16, -1, 1024)), "unknown gates"


def test_arrays_jit_vmap_and_loop_agree_and_new_values_compile_nothing():
    together = rx.learned_path_ns(*WORKLOADS)
    columns = tuple(jnp.asarray(column) for column in WORKLOADS)
    np.testing.assert_allclose(jax.jit(rx.learned_path_ns)(*columns), together, rtol=FLOAT64_RTOL)
    np.testing.assert_allclose(jax.vmap(rx.learned_path_ns)(*columns), together, rtol=FLOAT64_RTOL)
    rows = list(zip(*(column.tolist() for column in WORKLOADS), strict=True))[::13]
    alone = [rx.learned_path_ns(*row) for row in rows]
    compiled = _path_costs._learned_path_ns._cache_size()
    np.testing.assert_allclose(alone, together[::13], rtol=FLOAT64_RTOL)
    rx.learned_path_ns("metal", 77, 512, 3, 1, 50)
    assert _path_costs._learned_path_ns._cache_size() == compiled
    with jax.enable_x64(False):
        np.testing.assert_allclose(rx.learned_path_ns(*WORKLOADS), together, rtol=FLOAT32_RTOL)


def test_the_gradient_is_the_finite_difference():
    # Away from the steps of the batch, and from a share of gates of a quarter.
    sizes = {"batch": [100.0, 700.0, 9000.0], "n_fft": [64.0, 256.0, 1024.0], "k": [4.0, 16.0, 16.0]}
    tree = {name: np.array(column) for name, column in sizes.items()}
    tree |= {"active": np.array([20.0, 100.0, 1200.0]), "total": np.array([192.0, 1024.0, 5120.0])}

    def cost(t):
        return rx.learned_path_ns(
            np.array([rx.Device.METAL.code, rx.Device.CUDA.code, rx.Device.CPU.code]),
            *(t[name] for name in ("batch", "n_fft", "k", "active", "total")),
        )

    assert_gradient_is_the_finite_difference(jax.jit(cost), tree)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("abacus", 1, 64, 4, 1, 192), "unknown device 'abacus'"),
        (("cuda", 1, 63, 4, 1, 192), "n_fft: expected an even number, got 63"),
        (("cuda", 1, 64, 4, np.nan, 192), "learned_active_gates: expected numbers, got NaN"),
        (("cuda", 1, 64, 4, 1, -1), "learned_total_gates: expected a count of at least 0, got -1"),
        (("cuda", np.ones(3), 64, 4, np.ones(2), 192), "expected shapes that broadcast together"),
    ],
)
def test_what_has_no_cost_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        rx.learned_path_ns(*arguments)
