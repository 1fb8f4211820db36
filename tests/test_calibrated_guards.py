"""What a calibrated model refuses in one sentence, remembers, and says for sure."""

import itertools
import pickle

import jax
import numpy as np
import pytest
from _models import LINE, LINE_TRUTH, TILED, TILED_TRUTH, LineModel, calibrated, certain, random_posterior

from rlxjax.fit import Input, StrategySpec

TILES = calibrated(random_posterior(TILED, TILED_TRUTH))


class Doubled(LineModel):
    """Every strategy implies an input."""

    name = "doubled"
    inputs = {"n": Input("items"), "copies": Input("copies", default=1.0)}
    strategies = {
        "single": StrategySpec(("plain",), {"copies": 1.0}),
        "double": StrategySpec(("plain",), {"copies": 2.0}),
    }


DOUBLED = calibrated(certain(Doubled(), LINE_TRUTH))
#: By what is refused, calls that do.
REFUSED = {
    "n: expected a number, that of one workload, got shape (2,); see `pick_index`": [
        lambda: TILES.variant_of("tile", np.array([1.0, 100.0])),
        lambda: TILES.variant_of("tile", n=[1.0, 100.0]),
        lambda: TILES.cheapest(("loop", "tile"), np.array([1.0, 100.0])),
    ],
    "n: expected a number, that of one workload, got a traced value; see `pick_index`": [
        lambda: jax.jit(lambda n: TILES.variant_of("tile", n) and n)(100.0),
        lambda: jax.jit(lambda n: TILES.cheapest(("loop", "tile"), n) and n)(100.0),
    ],
    "alternatives: expected inputs that are numbers, got traced ones; see `pick_index`": [
        lambda: jax.jit(lambda n: TILES.alternatives(n) and n)(100.0),
        lambda: jax.jit(lambda own: own.alternatives(100.0) and own.coefficients)(TILES),
    ],
    "candidates: expected a strategy at least, got none": [
        lambda: TILES.pick_index(100.0, candidates=[]),
        lambda: TILES.decided(100.0, candidates=[]),
        lambda: TILES.pick(100.0, candidates=[]),
        lambda: TILES.cheapest((), 100.0),
        lambda: DOUBLED.pick_index(100.0, 2.0),
    ],
}


@pytest.mark.parametrize(("said", "call"), [(said, call) for said, calls in REFUSED.items() for call in calls])
def test_what_has_no_answer_is_one_sentence(said, call):
    with pytest.raises(ValueError, match=".") as caught:
        call()
    assert str(caught.value) == said


def test_a_domain_is_known_where_every_strategy_implies_an_input():
    assert [DOUBLED.in_domain(n) for n in (8.0, 9000.0)] == [True, False]
    assert DOUBLED.in_domain(8.0, 2.0) is True
    assert DOUBLED.compare("double", "single", 8.0).in_domain is True
    with pytest.raises(ValueError, match="copies: 'double' has 2, got 3"):
        DOUBLED.in_domain(8.0, 3.0)


def test_a_model_remembers_nothing_and_is_pickled_with_all_it_holds():
    whole = calibrated(certain(LINE, LINE_TRUTH))
    fields = dict(vars(whole))
    assert [whole.pick(float(n)) for n in (3, 3, 5)] == ["plain"] * 3
    assert whole.variant_of("blocked", 3.0) == "blocked"
    assert vars(whole) == fields
    back = pickle.loads(pickle.dumps(whole))
    assert back.coefficients == LINE_TRUTH
    assert back.pick(3.0) == "plain"


def test_decided_is_what_beats_every_other_one_by_the_verdict():
    unsure = calibrated(random_posterior(TILED, TILED_TRUTH, sd=0.3, spread=0.2))
    n, depth = (grid.ravel() for grid in np.meshgrid(2.0 ** np.arange(14), [1.0, 2.5]))
    for names in (("loop", "tile"), ("tile", "loop"), ("loop",)):
        place, is_sure = map(np.asarray, unsure.decided(n, depth, candidates=names))
        np.testing.assert_array_equal(place, unsure.pick_index(n, depth, candidates=names))
        wins = np.ones((len(names), n.size), bool)
        for one, other in itertools.permutations(range(len(names)), 2):
            wins[one] &= unsure.compare(names[one], names[other], n, depth).verdict() == "fuse"
        np.testing.assert_array_equal(is_sure, wins.any(0))
        np.testing.assert_array_equal(place[is_sure], wins.argmax(0)[is_sure])
        assert len(set(is_sure)) == min(len(names), 2)
    place, is_sure = jax.jit(unsure.decided)(n, depth)
    again = unsure.decided(n, depth, candidates=unsure.strategies)
    jax.tree.map(np.testing.assert_array_equal, (place, is_sure), again)
    np.testing.assert_array_equal(unsure.decided(64.0, candidates=("tile", "tile"))[1], False)
