"""Why a strategy is picked: terms that add up, changes that flip the choice, an error bar that holds."""

import dataclasses
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tolerances import FLOAT64_RTOL, QUICKLY
from typer.testing import CliRunner

import rlxjax as rx
from calibrate import cli
from calibrate.cli import app
from rlxjax._calibration import LearnedCalibration
from rlxjax._correction import KINDS, N_FEATURES
from rlxjax._latency import COEFFICIENT_NAMES
from rlxjax._learned_latency import LearnedLatencyCoefficients
from rlxjax._posterior import COVERED_SDS, LatencyPosterior
from rlxjax.welch import LearnedWork
from rlxjax.welch._device_programs import chunk_rows
from rlxjax.welch._launch import LEAST_IN_PLACE_BYTES

MEDIAN = rx.typical_prior().median
N_UNKNOWNS = len(COEFFICIENT_NAMES) + len(KINDS) * N_FEATURES
DOMAIN = {
    "batch": (1.0, 8192.0),
    "n_fft": (64.0, 4096.0),
    "k": (4.0, 16.0),
    "n_segments": (1.0, 2.0),
    "samples": (64.0, 2.0**21),
}
#: Agreement of two predictions where the search says that they meet.
MEET_RTOL = 1e-9
#: Draws of the Monte Carlo, and how far its standard deviation may be from the linear one.
DRAWS, DRAWN_RTOL = 1000, 0.15


def calibration(sd=0.02, spread=0.05, learned=None, **coefficients):
    """Return a calibration of the typical machine, all unknowns known to the same accuracy."""
    posterior = LatencyPosterior(
        dataclasses.replace(MEDIAN, **coefficients),
        np.zeros((len(KINDS), N_FEATURES)),
        sd * np.eye(N_UNKNOWNS),
        np.full(len(KINDS), spread),
    )
    return rx.Calibration(
        posterior, rx.io_fusion_gate_for_target("cpu"), {}, None, {}, DOMAIN, {}, learned=learned
    )


def with_coefficient(whole, name, value):
    """Return a calibration with one coefficient replaced, shared or of the learned path."""
    if name in COEFFICIENT_NAMES:
        own = dataclasses.replace(whole.coefficients, **{name: value})
        return dataclasses.replace(whole, posterior=dataclasses.replace(whole.posterior, coefficients=own))
    own = dataclasses.replace(whole.learned.coefficients, **{name: value})
    return dataclasses.replace(whole, learned=dataclasses.replace(whole.learned, coefficients=own))


def log_ratio(whole, explanation, batch=None):
    """Return how much longer the runner-up takes than the pick."""
    sizes = (
        explanation.batch if batch is None else batch,
        explanation.n_fft,
        explanation.k,
        explanation.n_segments,
    )
    pick, runner_up = (
        float(whole.predict_ns(name, *sizes)) for name in (explanation.pick, explanation.runner_up)
    )
    return math.log(runner_up / pick)


TYPICAL = calibration()
LEARNED = calibration(
    learned=LearnedCalibration(
        LearnedLatencyCoefficients(learned_segment_ns=50.0, learned_flop_per_ns=30.0),
        {256: LearnedWork(2000.0, 40.0)},
        0.05,
    )
)
#: At 24 rows the device just wins, which pads 25 to 28.
WORKLOADS = [(TYPICAL, 1, 256), (TYPICAL, 64, 256), (TYPICAL, 24, 1024), (LEARNED, 8192, 256)]
each_workload = pytest.mark.parametrize("which", range(len(WORKLOADS)))


@pytest.fixture(scope="module")
def explained():
    """The calibrations, and the explanations of the workloads by them."""
    return [(whole, whole.explain(batch, n_fft, 16)) for whole, batch, n_fft in WORKLOADS]


@each_workload
def test_the_terms_of_each_strategy_add_up_to_its_prediction_within_its_interval(explained, which):
    whole, explanation = explained[which]
    sizes = (explanation.batch, explanation.n_fft, 16, 2)
    for strategy in explanation.strategies:
        expected = float(whole.predict_ns(strategy.strategy, *sizes))
        assert strategy.time_ns == pytest.approx(expected, rel=FLOAT64_RTOL)
        assert sum(strategy.terms_ns.values()) == pytest.approx(expected, rel=FLOAT64_RTOL)
        assert strategy.interval_ns == tuple(map(float, whole.interval_ns(strategy.strategy, *sizes)))
        low, high = strategy.interval_ns
        assert low < strategy.time_ns < high


@each_workload
def test_the_best_two_are_the_pick_and_the_next_with_the_margin_of_their_decision(explained, which):
    whole, explanation = explained[which]
    times = [strategy.time_ns for strategy in explanation.strategies]
    assert times == sorted(times)
    assert [s.strategy for s in explanation.strategies[:2]] == [explanation.pick, explanation.runner_up]
    assert explanation.pick == whole.pick(explanation.batch, explanation.n_fft, 16)
    assert explanation.margin_ns == pytest.approx(times[1] - times[0], rel=FLOAT64_RTOL)
    sizes = (explanation.batch, explanation.n_fft, 16)
    decided = whole.decide(*sizes, fused=explanation.pick, kept=explanation.runner_up)
    assert explanation.margin_sd_ns == float(decided.margin_sd_ns)
    assert explanation.probability == float(decided.probability)
    assert explanation.verdict == (explanation.pick if explanation.probability >= 0.9 else "undecided")


@each_workload
def test_a_flip_of_a_coefficient_makes_the_predictions_equal_and_a_little_more_flips_the_choice(
    explained, which
):
    whole, explanation = explained[which]
    found = [flip for flip in explanation.flips if flip.kind == "coefficient" and flip.factor is not None]
    assert found or explanation.batch == 64
    for flip in found:
        assert not flip.is_jump

        def ratio_at(share, flip=flip):
            return log_ratio(with_coefficient(whole, flip.name, flip.value * flip.factor**share), explanation)

        assert ratio_at(1.0) == pytest.approx(0.0, abs=MEET_RTOL)
        assert ratio_at(1.001) < 0.0 < ratio_at(0.999)
        assert min(map(ratio_at, (0.0, 0.3, 0.6))) > 0.0


def test_a_coefficient_without_a_flip_changes_no_choice_at_either_bound(explained):
    whole, explanation = explained[0]
    names = [flip.name for flip in explanation.flips if flip.kind == "coefficient" and flip.factor is None]
    for name, factor in itertools.product(names, (0.01, 100.0)):
        moved = with_coefficient(whole, name, getattr(whole.coefficients, name) * factor)
        assert log_ratio(moved, explanation) >= 0.0


def test_flips_are_the_smallest_first_in_their_own_standard_deviations(explained):
    for _, explanation in explained:
        sizes = [math.inf if f.factor is None else abs(math.log(f.factor)) for f in explanation.flips]
        assert sizes == sorted(sizes)
        for flip, size in zip(explanation.flips, sizes, strict=True):
            if flip.name in COEFFICIENT_NAMES:
                assert flip.log_sd == pytest.approx(0.02, rel=FLOAT64_RTOL)
                assert flip.sds is None or flip.sds == pytest.approx(size / 0.02, rel=FLOAT64_RTOL)
            else:
                assert flip.log_sd is flip.sds is None


def test_a_learned_model_has_coefficients_of_its_own_and_one_length(explained):
    _, explanation = explained[3]
    assert "learned" in (explanation.pick, explanation.runner_up)
    factors = {flip.name: flip.factor for flip in explanation.flips}
    assert factors["n_fft"] is None
    assert factors["learned_flop_per_ns"] is not None


def test_at_the_crossover_the_predictions_agree(explained):
    whole, explanation = explained[0]
    crossover = explanation.crossover
    assert not crossover.is_jump
    assert log_ratio(whole, explanation, crossover.batch) == pytest.approx(0.0, abs=MEET_RTOL)
    assert (crossover.below, crossover.above) == (explanation.pick, explanation.runner_up)
    low, high = crossover.interval
    assert math.log(high / crossover.batch) == pytest.approx(COVERED_SDS * crossover.log_sd)
    assert math.log(crossover.batch / low) == pytest.approx(COVERED_SDS * crossover.log_sd)
    batches = {flip.name: flip for flip in explanation.flips}["batch"]
    assert batches.factor == pytest.approx(crossover.batch / explanation.batch, rel=MEET_RTOL)


def test_a_crossover_at_a_jump_is_said_to_be_one(explained):
    whole, explanation = explained[2]
    crossover = explanation.crossover
    assert crossover.is_jump
    assert "jump" in crossover.sentence
    assert crossover.log_sd is None
    # Padding makes the next batch longer for a device; no strategy is at its equal in between.
    before, after = int(crossover.batch), int(crossover.batch) + 1
    times = {
        name: [float(whole.predict_ns(name, batch, explanation.n_fft, 16)) for batch in (before, after)]
        for name in crossover.strategies
    }
    assert times[crossover.below][0] < times[crossover.above][0]
    assert times[crossover.below][1] > times[crossover.above][1]
    low, high = crossover.interval
    assert low <= crossover.batch <= high


def test_without_a_crossover_there_is_a_sentence():
    explanation = calibration(device_call_ns=1e13).explain(64, 256, 16)
    crossover = explanation.crossover
    assert explanation.pick == "fast"
    assert crossover.batch is crossover.log_sd is crossover.interval is crossover.in_domain is None
    assert crossover.sentence.startswith(f"fast stays ahead of {explanation.runner_up}")


def test_the_error_bar_of_the_crossover_is_what_draws_of_the_unknowns_give():
    # Beyond a chunk nothing is padded, and beyond 4 MiB nothing copied, so that the predictions are smooth.
    sd, spread, n_fft = 0.005, 0.005, 2048
    whole = calibration(sd=sd, spread=spread, device_call_ns=3e6)
    crossover = whole.explain(2048, n_fft, 16).crossover
    assert not crossover.is_jump
    assert crossover.batch * np.exp(-5.0 * crossover.log_sd) * 6.0 * n_fft > LEAST_IN_PLACE_BYTES
    assert crossover.batch > chunk_rows(rx.WelchPeakParams(n_fft, 2, 16), "cpu")
    random = np.random.default_rng(0)
    unknowns = sd * random.standard_normal((DRAWS, N_UNKNOWNS))
    own = spread * random.standard_normal((DRAWS, 2))
    steps = np.linspace(-5.0, 5.0, 41) * crossover.log_sd
    batches = crossover.batch * np.exp(steps)

    def drawn_log_ratio(unknown):
        leaves, treedef = jax.tree.flatten(whole.coefficients)
        moved = treedef.unflatten(list(jnp.array(leaves) * jnp.exp(unknown[: len(leaves)])))
        weights = unknown[len(leaves) :].reshape(len(KINDS), N_FEATURES)
        posterior = dataclasses.replace(whole.posterior, coefficients=moved, weights=weights)
        drawn = dataclasses.replace(whole, posterior=posterior)
        one, other = (drawn.predict_ns(name, batches, n_fft, 16, 2) for name in crossover.strategies)
        return jnp.log(one / other)

    drawn = jax.jit(jax.vmap(drawn_log_ratio), compiler_options=QUICKLY)(unknowns)
    ratios = np.asarray(drawn) + (own[:, 0] - own[:, 1])[:, None]
    falls = ratios[0, -1] < ratios[0, 0]
    found = [
        np.interp(0.0, row[::-1], steps[::-1]) if falls else np.interp(0.0, row, steps) for row in ratios
    ]
    assert np.std(found) == pytest.approx(crossover.log_sd, rel=DRAWN_RTOL)


@pytest.fixture
def invoke(monkeypatch):
    """Run a command with the typical calibration whatever the file."""
    monkeypatch.setattr(rx, "load_calibration", lambda file: TYPICAL)
    monkeypatch.setattr(cli, "_set_up_jax_as", lambda file: cli._set_up_jax(None))
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_prints_as_json_what_the_library_says(invoke):
    result = invoke("explain", "x", "--batch", 64, "--n-fft", 1024, "--k", 16, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == TYPICAL.explain(64, 1024, 16).as_dict()


def test_the_command_prints_terms_margin_flips_and_crossover(invoke, explained):
    _, explanation = explained[0]
    result = invoke("explain", "x", "--batch", 1)
    assert result.exit_code == 0
    for strategy in explanation.strategies:
        assert strategy.strategy in result.stdout
        assert f"{strategy.time_ns / 1e3:,.1f}" in result.stdout
    for said in ("transform", "correction", "90 % of runs", "give or take", "crossover: the predictions"):
        assert said in result.stdout
    assert explanation.flips[0].name in result.stdout


def test_what_is_outside_the_domain_is_marked_everywhere(invoke):
    assert TYPICAL.explain(100_000, 256, 16).in_domain is False
    for command in ("explain", "predict"):
        assert "extrapolated" in invoke(command, "x", "--batch", 100_000).stdout
        assert json.loads(invoke(command, "x", "--batch", 100_000, "--json").stdout)["in_domain"] is False
        assert "extrapolated" not in invoke(command, "x", "--batch", 64).stdout


def test_predict_prints_the_interval_of_each_strategy(invoke):
    printed = json.loads(invoke("predict", "x", "--batch", 64, "--json").stdout)
    for strategy, (low, high) in printed["interval_ns"].items():
        assert (low, high) == tuple(map(float, TYPICAL.interval_ns(strategy, 64, 256, 16)))
        assert low < printed["predicted_ns"][strategy] < high
    assert printed["extrapolated"] is False


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--batch", 0), "batch: expected an integer of at least 1, got 0"),
        (("--batch", 8, "--n-fft", 255), "expected an even number, got 255"),
        (("--batch", 8, "--segments", 0), "n_segments: expected an integer of at least 1, got 0"),
    ],
)
def test_sizes_that_cannot_be_are_one_line_and_status_2(invoke, arguments, said):
    result = invoke("explain", "x", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_file_that_is_not_there_is_one_line_and_status_2(tmp_path):
    result = CliRunner().invoke(app, ["explain", str(tmp_path / "none.json"), "--batch", "8"])
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
