"""Why a strategy is picked: terms that sum to the times, the nearest size with another pick, and where it is sure."""

import json
import math

import jax
import numpy as np
import pytest
from _models import LINE, LINE_TRUTH, TILED, TILED_TRUTH, TWIN, calibrated, certain, random_posterior

from rlxjax.calibration import explain
from rlxjax.fit import SURE

LINES = calibrated(certain(LINE, LINE_TRUTH, 0.02, 0.05))
TILES = calibrated(random_posterior(TILED, TILED_TRUTH))
#: One tile is the faster one from 59.3 items to where the second one begins.
SHARP = calibrated(certain(TILED, {**TILED_TRUTH, "launch_ns": 50.0, "tile_item_ns": 2.0}, 0.02, 0.001))
CASES = {
    "line": (LINES, {"n": 100.0}),
    "beyond": (LINES, {"n": 3000.0}),
    "tiles": (TILES, {"n": 700.0, "depth": 2.0}),
    "jump": (SHARP, {"n": 62.0, "depth": 1.0}),
}
each_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module")
def explained():
    return {case: (whole, explain(whole, **sizes)) for case, (whole, sizes) in CASES.items()}


def log_ratio(whole, explanation, names=None, **changed):
    """Return how much longer the runner-up takes than the pick."""
    names = names or (explanation.pick, explanation.runner_up)
    pick, runner_up = (float(whole.predict_ns(name, **{**explanation.inputs, **changed})) for name in names)
    return math.log(runner_up / pick)


@each_case
def test_the_best_two_are_the_pick_and_the_next_with_the_margin_of_their_decision(explained, case):
    whole, explanation = explained[case]
    assert dict(explanation.inputs) == CASES[case][1]
    for strategy in explanation.strategies:
        expected = float(whole.predict_ns(strategy.strategy, **explanation.inputs))
        assert strategy.time_ns == pytest.approx(expected, rel=1e-12)
        assert sum(strategy.terms_ns.values()) == pytest.approx(expected, rel=1e-12)
        assert list(strategy.terms_ns)[-1] == "correction_ns"
        assert strategy.interval_ns == tuple(map(float, whole.interval_ns(strategy.strategy, **explanation.inputs)))
    times = [strategy.time_ns for strategy in explanation.strategies]
    assert times == sorted(times)
    assert [s.strategy for s in explanation.strategies[:2]] == [explanation.pick, explanation.runner_up]
    assert explanation.pick == whole.pick(**explanation.inputs)
    assert explanation.margin_ns == pytest.approx(times[1] - times[0], rel=1e-9)
    decided = whole.decide(**explanation.inputs, fused=explanation.pick, kept=explanation.runner_up)
    assert explanation.margin_sd_ns == pytest.approx(float(decided.margin_sd_ns))
    assert explanation.probability == pytest.approx(float(decided.probability))
    assert explanation.verdict == (explanation.pick if explanation.probability >= SURE else "undecided")
    assert explanation.in_domain is whole.in_domain(**explanation.inputs)
    content = json.loads(json.dumps(explanation.as_dict(), allow_nan=False))
    assert dict(explanation.inputs).items() <= content.items()
    assert content["crossover"]["sentence"] == explanation.crossover.sentence
    assert content["strategies"][0]["terms_ns"] == dict(explanation.strategies[0].terms_ns)


def test_the_sentence_names_the_term_in_which_the_pick_saves_the_most(explained):
    for _, explanation in explained.values():
        pick, runner_up = explanation.strategies[:2]
        saved_ns = {name: runner_up.terms_ns[name] - time_ns for name, time_ns in pick.terms_ns.items()}
        most = max(saved_ns, key=saved_ns.get)
        assert saved_ns[most] > 0.0
        said = f"{explanation.pick} saves the most in {most.removesuffix('_ns').replace('_', ' ')}: "
        assert explanation.why.startswith(said)


@each_case
def test_the_pick_changes_at_the_crossover_and_not_nearer(explained, case):
    whole, explanation = explained[case]
    here, crossover = explanation.inputs["n"], explanation.crossover
    assert crossover.input == "n"
    assert explanation.pick == (crossover.below if crossover.value > here else crossover.above)

    def picks(value):
        return whole.strategies[int(whole.pick_index(**{**explanation.inputs, "n": value}))]

    assert (picks(crossover.value * (1 - 1e-6)), picks(crossover.value * (1 + 1e-6))) == (
        crossover.below,
        crossover.above,
    )
    nearer = np.geomspace(here, here + 0.99 * (crossover.value - here), 20)
    assert {picks(value) for value in nearer} == {explanation.pick}
    low, high = crossover.interval
    assert low <= crossover.value <= high
    for end in {low, high} - {1.0, 131_072.0}:  # the ends of the search
        decided = whole.compare(crossover.below, crossover.above, **{**explanation.inputs, "n": end})
        assert abs(float(decided.probability) - 0.5) >= 0.45


def test_a_crossover_is_where_predictions_meet_or_jump_past_each_other(explained):
    for case in ("line", "beyond"):
        crossover = explained[case][1].crossover
        assert crossover.value == pytest.approx(2 * 800.0 / 3.0, rel=1e-9)
        assert crossover.sentence == "plain is the fastest just below n 533.3, blocked just above"
        assert crossover.in_domain
    crossover = explained["jump"][1].crossover
    assert (crossover.value, crossover.below, crossover.above) == (pytest.approx(64.0, rel=1e-6), "tile", "loop")


def test_that_there_is_no_crossover_or_that_it_lies_beyond_the_domain_is_said():
    explanation = explain(calibrated(certain(LINE, {**LINE_TRUTH, "block_ns": 1e9})), 64)
    crossover = explanation.crossover
    assert explanation.pick == "plain"
    assert crossover.value is crossover.interval is crossover.in_domain is crossover.below is None
    assert crossover.sentence == "plain stays the fastest from n 1 to 131,072"
    narrow = calibrated(LINES.posterior, most=128.0)
    explanation = explain(narrow, 100)
    assert explanation.in_domain is True
    assert explanation.crossover.in_domain is False
    assert explanation.crossover.sentence.endswith(" (extrapolated)")
    assert explain(narrow, 200).in_domain is False


def test_infinities_of_ours_are_none_of_the_users():
    whole, sizes = CASES["jump"]
    expected = explain(whole, **sizes), whole.pick(**sizes), float(whole.compare("tile", "loop", **sizes).margin_ns)
    with jax.debug_infs(True), jax.debug_nans(True):
        jax.clear_caches()
        fresh = calibrated(whole.posterior)
        assert explain(fresh, **sizes).crossover == expected[0].crossover
        assert fresh.pick(**sizes) == expected[1]
        assert float(fresh.compare("tile", "loop", **sizes).margin_ns) == pytest.approx(expected[2])


def test_what_cannot_be_explained_is_refused():
    twin = calibrated(certain(TWIN, dict(TWIN.prior.median)))
    for whole, sizes, said in (
        (LINES, {"n": [1, 2]}, "n: expected one positive number of items, got [1, 2]"),
        (LINES, {"n": 0}, "n: expected one positive number of items, got 0"),
        (LINES, {}, "n: expected a number of items, got none"),
        (twin, {"n": 5}, "twin: expected two strategies to choose among, got only"),
    ):
        with pytest.raises(ValueError, match=".") as caught:
            explain(whole, **sizes)
        assert said in str(caught.value)
