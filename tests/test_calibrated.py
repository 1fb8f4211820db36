"""A calibrated model: predictions, picks, decisions and domains, of any model, eager, mapped and traced."""

import dataclasses
import functools
import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _models import (
    LINE,
    LINE_TRUTH,
    TILED,
    TILED_TRUTH,
    TWIN,
    LineModel,
    calibrated,
    certain,
    random_posterior,
    true_ns,
    two_models,
)
from _tolerances import assert_gradient_is_the_finite_difference

from rlxjax.calibration import explain
from rlxjax.fit import Input, Runs, StrategySpec, compare, estimate

TILES = calibrated(random_posterior(TILED, TILED_TRUTH))
LINES = calibrated(certain(LINE, LINE_TRUTH))
#: A tile is a run of one below 64 items, a pair of them beyond 5,000 / (0.4 * 0.8).
N = np.array([1.0, 40.0, 64.0, 700.0, 4000.0, 8000.0])


def of_variants(depth):
    """Return the times of the variants by the posterior alone, infinite where they do not give the result."""
    runs = Runs.checked(TILED, np.arange(3)[:, None], n=N, depth=depth)
    time_ns = np.array(estimate(TILES.posterior, runs).time_ns)
    time_ns[2, N <= 64] = np.inf
    return time_ns


@pytest.mark.parametrize("depth", [1.0, 2.5])
def test_a_strategy_takes_what_the_cheapest_of_its_variants_does(depth):
    loop, *tiles = of_variants(depth)
    assert depth == 1.0 or {int(np.argmin(column)) for column in np.array(tiles).T} == {0, 1}
    for name, expected in (("loop", loop), ("Tile", np.min(tiles, 0))):
        found = TILES.predict_ns(name, N, depth)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        np.testing.assert_allclose(sum(TILES.terms_ns(name, n=N, depth=depth).values()), expected, rtol=1e-12)
        np.testing.assert_allclose(TILES.estimate(name, N, depth).time_ns, expected, rtol=1e-12)
        one_by_one = [float(TILES.predict_ns(name, n, depth)) for n in N]
        np.testing.assert_allclose(one_by_one, expected, rtol=1e-12)
    assert [TILES.variant_of("tile", n, depth) for n in N] == [("tile", "pair")[i] for i in np.argmin(tiles, 0)]


def test_predictions_are_the_same_eager_jitted_and_mapped():
    expected = np.asarray(TILES.predict_ns("tile", N))
    np.testing.assert_allclose(jax.jit(lambda n: TILES.predict_ns("tile", n))(N), expected, rtol=1e-12)
    np.testing.assert_allclose(jax.vmap(lambda n: TILES.predict_ns("tile", n))(N), expected, rtol=1e-12)
    machines = [
        dataclasses.replace(TILES.posterior, coefficients={**TILED_TRUTH, "item_ns": rate}) for rate in (1.0, 4.0)
    ]
    stacked = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *machines)
    every = jax.vmap(lambda posterior: calibrated(posterior).predict_ns("loop", N))(stacked)
    np.testing.assert_allclose(every, [calibrated(own).predict_ns("loop", N) for own in machines], rtol=1e-12)
    with jax.enable_x64(False):
        single = calibrated(jax.tree.map(np.float32, TILES.posterior))
        np.testing.assert_allclose(single.predict_ns("tile", np.float32(N)), expected, rtol=1e-5)


def test_predictions_have_gradients_by_inputs_and_coefficients():
    def of(tree):
        moved = dataclasses.replace(TILES.posterior, coefficients=tree["coefficients"])
        return jax.vmap(
            lambda n, depth, own: calibrated(dataclasses.replace(moved, coefficients=own)).predict_ns("loop", n, depth)
        )(tree["n"], tree["depth"], tree["coefficients"])

    rows = np.array([5.0, 50.0, 700.0, 4000.0])
    coefficients = {name: np.full(len(rows), value) for name, value in TILED_TRUTH.items()}
    assert_gradient_is_the_finite_difference(of, {"n": rows, "depth": rows / 40.0, "coefficients": coefficients})
    assert jax.grad(lambda n: LINES.predict_ns("blocked", n))(1000.0) == pytest.approx(1.5)


def test_an_interval_is_log_normal_around_the_prediction():
    run, paced = TILES.estimate("tile", N), dataclasses.replace(TILES, pace_log_sd=0.5)
    for whole, log_sd in ((TILES, run.log_sd()), (paced, np.hypot(run.log_sd(), 0.5))):
        for level, sds in ((0.6826894921, 1.0), (0.9544997361, 2.0)):
            low, high = whole.interval_ns("tile", N, level=level)
            np.testing.assert_allclose(np.log(high / low), 2 * sds * log_sd, rtol=1e-8)
            np.testing.assert_allclose(np.sqrt(low * high), run.time_ns, rtol=1e-12)
    # The pace is that of both sides, and leaves decisions alone.
    np.testing.assert_array_equal(paced.decide(N).probability, TILES.decide(N).probability)
    assert np.all(np.asarray(run.log_sd()) > np.asarray(run.spread))


def test_the_pick_has_the_lowest_prediction_among_candidates_in_their_order_and_of_equals_is_the_first():
    names = ("loop", "tile")
    best = np.argmin([TILES.predict_ns(name, N, 2.5) for name in names], 0)
    assert set(best.tolist()) == {0, 1}
    assert [TILES.pick(n, 2.5) for n in N] == [names[place] for place in best]
    assert TILES.strategies == names
    np.testing.assert_array_equal(TILES.pick_index(N, depth=2.5), best)
    np.testing.assert_array_equal(jax.jit(lambda n: TILES.pick_index(n, 2.5))(N), best)
    np.testing.assert_array_equal(TILES.pick_index(N, 2.5, candidates=("tile", "loop")), 1 - best)
    # A choice of host sizes within a program is made while it is traced.
    assert jax.jit(lambda x: x + names.index(TILES.pick(700.0, 2.5)))(0) == best[3]
    for n in (np.float64(700.0), jnp.asarray(700.0)):
        assert (type(TILES.pick(n, 2.5)), TILES.pick(n, 2.5)) == (str, names[best[3]])
    assert TILES.pick(8000.0, candidates=("loop",)) == "loop"
    equal = calibrated(certain(LINE, {**LINE_TRUTH, "block_ns": 1.5}))
    assert float(equal.predict_ns("plain", 1)) == float(equal.predict_ns("blocked", 1))
    assert equal.pick(1) == "plain"
    assert equal.pick(1, candidates=("blocked", "plain")) == "blocked"
    np.testing.assert_allclose(TILES.predict_ns("once", N), TILES.predict_ns("loop", N, 1.0), rtol=1e-12)


class Late(type(TILED)):
    """Pairs of tiles, of nothing but more than a tile."""

    name, variants = "late", ("loop", "pair")
    strategies = {name: StrategySpec((name,)) for name in variants}

    def same_result(self, runs, facts):
        return super().same_result(runs, facts)[..., np.array([0, 2])]

    def terms_ns(self, coefficients, runs, facts):
        return super().terms_ns(coefficients, dataclasses.replace(runs, variant=2 * jnp.asarray(runs.variant)), facts)


LATE = calibrated(random_posterior(Late(), TILED_TRUTH))


def test_alternatives_give_the_result_that_is_asked_for():
    assert TILES.alternatives(1) == TILES.alternatives(1, 2.0) == TILES.alternatives(1000) == ("loop", "tile")
    assert LATE.alternatives(64) == LATE.alternatives([64, 65]) == ("loop",)
    assert LATE.alternatives(65) == LATE.alternatives([65, 1000]) == ("loop", "pair")
    assert LATE.pick(64) == "loop"
    assert np.all(LATE.pick_index(N[:3]) == 0)
    assert np.isinf(jax.jit(lambda n: LATE.predict_ns("pair", n))(64.0))


class Doubled(LineModel):
    """Every strategy implies an input."""

    name = "doubled"
    inputs = {"n": Input("items"), "copies": Input("copies", default=1.0)}
    strategies = {
        "single": StrategySpec(("plain",), {"copies": 1.0}),
        "double": StrategySpec(("plain",), {"copies": 2.0}),
    }


DOUBLED = calibrated(certain(Doubled(), LINE_TRUTH))
CALIBRATION = two_models()
#: By what is refused, calls that do.
REFUSED = {
    "n: expected a number for one workload, got shape (2,); use `pick_index`": [
        lambda: TILES.pick(np.array([1.0, 100.0])),
        lambda: TILES.variant_of("tile", n=[1.0, 100.0]),
    ],
    "depth: expected a number for one workload, got shape (2,); use `pick_index`": [
        lambda: TILES.pick(64, depth=[1, 2])
    ],
    "n: expected a number for one workload, got a traced value; use `pick_index`": [
        lambda: jax.jit(TILES.pick)(64.0),
        lambda: jax.jit(lambda n: TILES.variant_of("tile", n) and n)(100.0),
    ],
    "pick: expected a calibration of numbers, got a traced calibration; use `pick_index`": [
        lambda: jax.jit(lambda own: own.pick(64.0))(TILES),
        lambda: jax.jit(lambda own: own.variant_of("tile", 64.0))(TILES),
    ],
    "alternatives: expected inputs that are numbers, got traced values; use `pick_index`": [
        lambda: jax.jit(lambda n: TILES.alternatives(n) and n)(100.0),
        lambda: jax.jit(lambda own: own.alternatives(100.0) and own.coefficients)(TILES),
    ],
    "candidates: expected at least one strategy, got none": [
        lambda: TILES.pick_index(100.0, candidates=[]),
        lambda: TILES.decided(100.0, candidates=[]),
        lambda: TILES.pick(100.0, candidates=[]),
        lambda: DOUBLED.pick_index(100.0, 2.0),
    ],
    "strategy: expected one of once, loop, tile, got 'quick'": [lambda: TILES.predict_ns("quick", 1)],
    "strategy: 'pair' was not timed for this work (n 64, depth 1)": [
        lambda: LATE.predict_ns("pair", 64),
        lambda: LATE.compare("loop", "pair", 64),
        lambda: LATE.pick(64, candidates=("loop", "pair")),
    ],
    "depth: the strategy 'once' implies 1, got 2.0": [lambda: TILES.predict_ns("once", 1, 2.0)],
    "copies: the strategy 'double' implies 2, got 3.0": [lambda: DOUBLED.in_domain(8.0, 3.0)],
    "n: expected a number of items, got none": [lambda: TILES.predict_ns("loop"), lambda: TILES.pick()],
    "n: expected a size of at least 1.0, got -1": [
        lambda: TILES.predict_ns("loop", -1),
        lambda: TILES.predict_ns("loop", [1, -1]),
    ],
    "twin: expected two strategies to decide between, got 1": [
        lambda: calibrated(certain(TWIN, dict(TWIN.prior.median))).decide(5)
    ],
    "model: expected one of line, tiled, got 'other'": [lambda: CALIBRATION.predict_ns("host", 1, model="other")],
    "model: expected tiled, got 'line'": [lambda: TILES.predict_ns("tile", 1, model="line")],
    "models: this calibration holds no known model; name yours in load_calibration(models=)": [
        lambda: two_models(models=[]).pick(1)
    ],
    **{
        f"level: expected a probability between 0 and 1, got {level}": [
            functools.partial(TILES.interval_ns, "tile", 1, level=level)
        ]
        for level in (0.0, 1.0, -0.5, float("nan"))
    },
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_has_no_answer_is_one_sentence(said):
    for call in REFUSED[said]:
        with pytest.raises(ValueError, match=".") as caught:
            call()
        assert str(caught.value) == said


def test_a_decision_is_that_of_the_two_estimates():
    found = TILES.compare("tile", "loop", N, 2.0)
    expected = compare(TILES.estimate("tile", N, 2.0), TILES.estimate("loop", N, 2.0))
    # Of one program, and of two with a third: their last digits may differ.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), found[:5], expected[:5])
    assert found == TILES.decide(N, 2.0) == TILES.decide(N, 2.0, fused="tile", kept="loop")
    other = TILES.compare("loop", "tile", N, 2.0)
    np.testing.assert_allclose(other.margin_ns, -np.asarray(found.margin_ns))
    assert [TILES.compare("tile", "loop", n).in_domain for n in (8.0, 9000.0)] == [True, False]
    cheap = calibrated(certain(LINE, {**LINE_TRUTH, "block_ns": 1e-3}))
    assert cheap.decide(1000).verdict() == "fuse"
    assert calibrated(certain(LINE, {**LINE_TRUTH, "block_ns": 1e6})).decide(1000).verdict() == "keep"


def test_what_the_variants_of_a_workload_have_alike_leaves_its_decisions():
    alike = np.array([[1.0, 0.6, 0.3], [0.6, 1.0, 0.5], [0.3, 0.5, 1.0]])
    known = calibrated(dataclasses.replace(TILES.posterior, alike=alike))
    variants = [[TILED.variants.index(known.variant_of(name, n, 2.0)) for n in N] for name in ("tile", "loop")]
    expected = compare(known.estimate("tile", N, 2.0), known.estimate("loop", N, 2.0), alike[tuple(variants)])
    found = known.compare("tile", "loop", N, 2.0)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), found[:5], expected[:5])
    chosen, independent = known.decided(N, 2.0), TILES.decided(N, 2.0)
    np.testing.assert_allclose(chosen.probability, np.maximum(found.probability, 1 - found.probability), rtol=1e-9)
    assert np.all(chosen.probability >= independent.probability)
    assert float(explain(known, 700.0, 2.0).margin_sd_ns) == pytest.approx(
        float(found.margin_sd_ns[list(N).index(700.0)])
    )
    # Two runs of one variant are one, or of different inputs.
    same = known.compare("tile", "tile", 64)
    assert (float(same.margin_ns), float(same.probability), same.verdict()) == (0.0, 0.5, "undecided")


def test_the_domain_is_closed_and_bounds_products_too():
    assert TILES.domain == {"n": (1.0, 8192.0), "depth": (1.0, 4.0), "n*depth": (1.0, 32768.0)}
    narrow = dataclasses.replace(TILES, domain={**TILES.domain, "n*depth": (2.0, 8192.0)})
    n, depth = np.array([1, 2, 8192, 8193, 2048, 2049, 8]), np.array([1, 1, 1, 1, 4, 4, 4.5])
    expected = [False, True, True, False, True, False, False]
    assert (
        narrow.in_domain(n, depth).tolist() == expected == [narrow.in_domain(*of) for of in zip(n, depth, strict=True)]
    )
    assert jax.jit(lambda n: narrow.in_domain(n, depth))(n).tolist() == expected
    # It is known where every strategy implies an input.
    assert [DOUBLED.in_domain(*sizes) for sizes in ((8.0,), (9000.0,), (8.0, 2.0))] == [True, False, True]
    assert DOUBLED.compare("double", "single", 8.0).in_domain is True


def test_facts_may_be_replaced():
    known = calibrated(certain(TILED, TILED_TRUTH))
    found = known.with_facts(tile_items=512.0).predict_ns("tile", N[:3])
    expected = true_ns(TILED_TRUTH, Runs.checked(TILED, 1, n=N[:3]), {**TILED.facts, "tile_items": 512.0})
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert known.posterior.facts["tile_items"] == 64.0


def test_a_model_remembers_nothing_and_is_pickled_with_all_it_holds():
    fields = dict(vars(LINES))
    assert [LINES.pick(float(n)) for n in (3, 3, 5)] == ["plain"] * 3
    assert LINES.variant_of("blocked", 3.0) == "blocked"
    assert vars(LINES) == fields
    back = pickle.loads(pickle.dumps(LINES))
    assert (back.coefficients, back.pick(3.0)) == (LINE_TRUTH, "plain")


def test_decided_is_what_beats_every_other_one_by_the_verdict():
    unsure = calibrated(random_posterior(TILED, TILED_TRUTH, sd=0.3, spread=0.2))
    n, depth = (grid.ravel() for grid in np.meshgrid(2.0 ** np.arange(14), [1.0, 2.5]))
    for names in (("loop", "tile"), ("tile", "loop"), ("loop",)):
        found = unsure.decided(n, depth, candidates=names)
        place, is_sure = np.asarray(found.place), np.asarray(found.is_sure)
        times = np.sort([np.asarray(unsure.predict_ns(name, n, depth)) for name in names], 0)
        np.testing.assert_allclose(found.time_ns, times[0], rtol=1e-12)
        others = np.diff(times[:2], axis=0)[0] if len(names) > 1 else np.inf
        np.testing.assert_allclose(found.margin_ns, others, rtol=1e-9)
        np.testing.assert_array_equal(place, unsure.pick_index(n, depth, candidates=names))
        wins = np.ones((len(names), n.size), bool)
        for one, other in itertools.permutations(range(len(names)), 2):
            wins[one] &= unsure.compare(names[one], names[other], n, depth).verdict() == "fuse"
        np.testing.assert_array_equal(is_sure, wins.any(0))
        np.testing.assert_array_equal(place[is_sure], wins.argmax(0)[is_sure])
        assert len(set(is_sure)) == min(len(names), 2)
    again = unsure.decided(n, depth, candidates=unsure.strategies)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), jax.jit(unsure.decided)(n, depth), again)
    assert not unsure.decided(64.0, candidates=("tile", "tile")).is_sure


def test_a_pick_is_as_sure_as_its_comparison_with_each_other_strategy():
    alike = np.array([[1.0, 0.6, 0.3], [0.6, 1.0, 0.5], [0.3, 0.5, 1.0]])
    posterior = random_posterior(TILED, TILED_TRUTH, sd=0.3, spread=0.2)
    n, depth = (grid.ravel() for grid in np.meshgrid(2.0 ** np.arange(14), [1.0, 2.5]))
    for correlation in (None, alike):
        known = calibrated(dataclasses.replace(posterior, alike=correlation))
        found = known.decided(n, depth)
        traced = jax.jit(lambda own: own.decided(n, depth))(known)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9), found, traced)
        log_sds = np.stack([known.estimate(name, n, depth).log_sd() for name in known.strategies], -1)
        chosen = np.take_along_axis(log_sds, np.asarray(found.place)[:, None], -1)[:, 0]
        np.testing.assert_allclose(found.log_sd(), chosen, rtol=1e-9)
        for place, name in enumerate(known.strategies):
            pairs = [known.compare(name, other, n, depth).probability for other in known.strategies if other != name]
            is_own = np.asarray(found.place) == place
            np.testing.assert_allclose(found.probability[is_own], np.min(pairs, 0)[is_own], rtol=1e-9)


def test_a_calibration_answers_for_its_first_model_or_the_one_named():
    whole = CALIBRATION
    assert list(whole.models) == ["line", "tiled"]
    assert whole.coefficients == whole.of("line").coefficients == whole.posterior.coefficients
    of_a_strategy = ("predict_ns", "terms_ns", "interval_ns", "estimate")
    for method in (*of_a_strategy, "decide", "pick", "pick_index", "in_domain"):
        for name, strategy in (("line", "plain"), ("tiled", "tile")):
            arguments = (strategy, 100.0) if method in of_a_strategy else (100.0,)
            expected = getattr(whole.of(name), method)(*arguments)
            for model in (name, None) if name == "line" else (name,):
                found = getattr(whole, method)(*arguments, model=model)
                assert jax.tree.all(jax.tree.map(np.array_equal, found, expected)), method
    assert whole.explain(n=100, model="tiled") == explain(whole.of("tiled"), 100)
    assert whole.predict_ns("tile", n=100, depth=2, model="tiled") == whole.of("tiled").predict_ns("tile", 100, 2)
    assert whole.of("tiled").of("tiled") is whole.of("tiled").of() is whole.of("tiled")
