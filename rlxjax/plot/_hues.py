"""Colours, markers and lines by which the ways to do a piece of work are told apart, also without colours.

Every colour has a contrast of 3 at least with white and with black, and differs from the others for eyes that take red
for green: tests/test_plot.py computes both.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from rlxjax.fit import LatencyModel, strategy_of

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7a3cff")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", (0, (6, 1.5)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1)))
#: What is no way to do the work: noise, a total, what is undecided.
NEUTRAL = "#808080"
#: Of what is drawn behind lines and points.
PALE = 0.2


class Hue(NamedTuple):
    """How one of several things is drawn."""

    colour: str
    marker: str
    line: Any


def hues(model: LatencyModel, names: Sequence[str]) -> dict[str, Hue]:
    """Return how strategies or variants are drawn, so that one looks the same in every picture of a model.

    A strategy is drawn as the first variant that it may run, unless that is drawn already.
    """
    variants = list(model.variants)
    wanted = {
        name: variants.index(name if name in variants else strategy_of(model, name).variants[0]) for name in names
    }
    own = {name: place for name, place in wanted.items() if name == next(n for n in names if wanted[n] == place)}
    free = (place for place in range(len(variants) + len(names)) if place not in own.values())
    places = {name: own[name] if name in own else next(free) for name in names}
    return {
        name: Hue(COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)], LINES[place % len(LINES)])
        for name, place in places.items()
    }
