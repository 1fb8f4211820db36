"""All functions that take numbers refuse masked, complex, textual and dated values in one sentence."""

import datetime
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _public_calls import CALIBRATION

import rlxjax as rx
from rlxjax._typing import Count, RealLike
from rlxjax.models import FFT

PARAMS = rx.WelchPeakParams.fast(64, 4)
ROW, GATE = rx.backend_coefficients("cuda"), rx.io_fusion_gate_for_target("cuda")
FLAGS = ("learned_available", "x", "y", "costs", "log_availability")


def hostile(value, is_flag=False):
    """Return values that are no real numbers, in the place of a number."""
    numbers = np.array([value, 1e15], float)
    bad = [np.ma.array(numbers, mask=[False, True]), numbers + 1j, complex(value, 1), b"12", "12", numbers.astype("S8")]
    bad += [np.array([value, None]), np.datetime64("2026-01-01"), np.timedelta64(5, "ns"), datetime.timedelta(1)]
    bad += [[np.ma.array([value, 1e15], mask=[False, True])[1], value]]
    return bad + ([] if is_flag else [True, np.array([True, False])])


def functions_of_numbers():
    """Yield each public function with the name of a number that it takes, and a call of the function."""
    graph = rx.Graph()
    graph.set_outputs([graph.add("exp", [graph.input("x", (8,))])])
    others = {"device": "cuda", "params": PARAMS, "graph": graph, "row": ROW, "profile": rx.GraphIoProfile(3, 0, 8, 8)}
    sizes = {"batch": 512, "n_fft": 256, "k": 16, "costs": np.ones((2, 4)), "log_availability": np.zeros((2, 4))}
    for name in dir(rx):
        function = getattr(rx, name)
        # JAX itself refuses what `straight_through`, which has a derivative of its own, cannot take.
        if name.startswith("_") or name == "straight_through" or inspect.isclass(function) or not callable(function):
            continue
        parameters = inspect.signature(function).parameters.values()
        numbers = [own.name for own in parameters if own.annotation in (RealLike, Count, RealLike | None)]
        needed = [own.name for own in parameters if own.default is own.empty and own.kind != own.VAR_KEYWORD]
        given = {own: others.get(own, sizes.get(own, 2.0)) for own in needed}
        for number in numbers:
            yield (
                f"{name} {number}",
                number,
                sizes.get(number, 2),
                lambda bad, f=function, g=given, n=number: f(**g | {n: bad}),
            )
        if not numbers and set(needed) & {"costs"}:
            yield f"{name} costs", "costs", 2, lambda bad, f=function, g=given: f(**g | {"costs": bad})


def entries():
    """Yield calls of methods and of functions whose numbers have no annotation that says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rx.calibration.MachineMismatchWarning)
        known = rx.load_calibration(CALIBRATION)
    sizes = {"batch": [8, 64], "n_fft": [256, 256]}
    runs = rx.fit.Runs.checked(FFT, "fft", **sizes)
    timings = rx.Timings.checked(FFT, variant="fft", time_ns=[1e5, 2e5], **sizes)
    counts = rx.GraphIoProfile(4, 1, 100, 100)
    yield from {
        "Timings.checked": lambda bad: rx.Timings.checked(FFT, variant="fft", time_ns=bad, **sizes),
        "Timings.checked input": lambda bad: rx.Timings.checked(
            FFT, variant="fft", time_ns=[1e5, 2e5], **sizes | {"batch": bad}
        ),
        "Timings.of": lambda bad: (
            rx.Timings.of(FFT, {"time_ns": bad, **sizes})
            if isinstance(bad, (list, np.ndarray))
            else rx.Timings.of(FFT, [{"time_ns": bad, "batch": 8, "n_fft": 256}])
        ),
        "Runs.checked": lambda bad: rx.fit.Runs.checked(FFT, "fft", batch=bad, n_fft=256),
        "Timings": lambda bad: rx.fit_posterior(rx.Timings(runs, bad), min_timings=1),
        "weights": lambda bad: rx.fit_posterior(timings, weights=bad, min_timings=1),
        "predict_ns": lambda bad: known.predict_ns("fused", bad, 256, 16),
        "interval_ns": lambda bad: known.interval_ns("fused", bad, 256, 16),
        "pick": lambda bad: known.pick(bad, 256, 16),
        "pick_index": lambda bad: known.pick_index(batch=bad, n_fft=256, k=16),
        "GraphIoProfile": lambda bad: rx.GraphIoProfile.checked(kernel_launches=bad),
        "fusion_benefit": lambda bad: rx.fusion_benefit(rx.GraphIoProfile(bad), rx.GraphIoProfile(1)),
        "benefit": lambda bad: GATE.score_ns(rx.FusionBenefit(bad, 0, 0, 0)),
        "gate": lambda bad: rx.IoFusionGate(dispatch_ns=bad).score_ns(rx.FusionBenefit(1, 0, 0, 0)),
        "IoFusionGate.checked": lambda bad: rx.IoFusionGate.checked(memory_bw=bad),
        "io_cost_ns": lambda bad: rx.io_cost_ns(rx.GraphIoProfile(1, 0, bad, 0), ROW),
        "rows": lambda bad: rx.rank_devices(counts, rows={"cuda": rx.gate.BackendCoefficients(bad, *[1.0] * 6)}),
        "plan_stages": lambda bad: rx.fusion.plan_stages([[bad]]),
        "soft_plan_ns": lambda bad: rx.fusion.soft_plan_ns([[bad]], 1.0),
    }.items()


REFLECTED = list(functions_of_numbers())
assert len(REFLECTED) > 40


def assert_refused(call, bad, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a lost mask or imaginary part is a warning of NumPy
        with pytest.raises(ValueError, match="expected") as refusal:
            call(bad)
    said = str(refusal.value)
    assert "\n" not in said, (name, bad, said)


def refusals(name, call, values):
    """Return the values that a call does not refuse in one sentence."""
    problems = []
    for bad in values:
        try:
            assert_refused(call, bad, name)
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001
            problems.append(f"{name} of {bad!r}: {error!r:.200}")
    return problems


def test_each_number_of_a_public_function_is_refused_unless_it_is_one():
    rows = ((name, call, hostile(np.ravel(value)[0], number in FLAGS)) for name, number, value, call in REFLECTED)
    assert not [problem for row in rows for problem in refusals(*row)]


def test_each_number_of_a_method_is_refused_unless_it_is_one():
    # A text is a cell of a CSV file, and the columns of `Timings` are arrays.
    left_out = {"Timings.of": str, "Timings": list}
    rows = [
        (name, call, [bad for bad in hostile(64, name == "weights") if not isinstance(bad, left_out.get(name, ()))])
        for name, call in entries()
    ]
    assert not [problem for row in rows for problem in refusals(*row)]


def test_a_masked_signal_is_refused_by_every_function_and_an_array_without_masked_numbers_is_plain():
    rows = np.sin(np.arange(2.0 * PARAMS.frame_len)).reshape(2, -1)
    masked = np.ma.array(rows, mask=np.arange(rows.size).reshape(rows.shape) == 5)
    graph = rx.Graph()
    x = graph.input("x", rows.shape, "f32")
    graph.set_outputs([graph.add("exp", [x])])
    model = rx.learned.LearnedFft.exact(64)
    calls = [
        lambda own: rx.welch_peaks(own, PARAMS, "host"),
        lambda own: next(rx.welch.stream_welch_peaks([own], PARAMS, "host")),
        lambda own: rx.welch.choose_variant(own, PARAMS, measure="never").name,
        lambda own: rx.execute_plan(rx.plan_fusion(graph), {x: own})[graph.outputs[0]],
        lambda own: rx.learned.learned_spectrum(model, own[:, :64]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="expected plain numbers, got a masked array"):
            call(masked)
        found = call(np.ma.array(rows))
        np.testing.assert_array_equal(found, call(rows))


def test_a_traced_number_passes():
    def total(x):
        cost = rx.fused_graph_ns("cuda", x, 256, 16) + rx.soft_step(x, 1.0)
        return cost + rx.IoFusionGate(dispatch_ns=x).score_ns(rx.FusionBenefit(x, 0.0, 0.0, 0.0))

    assert np.isfinite(jax.jit(total)(jnp.asarray(512.0)))
