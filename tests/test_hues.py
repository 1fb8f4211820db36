"""Strategies look the same in every picture, and all eyes tell their colours apart on any background."""

import itertools

import numpy as np
from _models import TILED
from matplotlib.colors import to_rgb

from rlxjax.plot._hues import COLOURS, hues

#: The contrast of graphics with their background (WCAG 2.2, 1.4.11), and a difference that is seen (CIELAB).
CONTRAST, SEEN = 3.0, 12.0


def test_a_strategy_looks_the_same_in_every_picture_of_a_model_and_no_two_the_same():
    for names in itertools.permutations(["once", "loop", "tile", "pair"], 3):
        found = hues(TILED, names)
        assert len(set(found.values())) == 3
        for name in {"tile", "pair"} & set(names):
            assert found[name].colour == COLOURS[TILED.variants.index(name)]


def linear(colour):
    return np.array([c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)])


def lab(rgb):
    """Return CIELAB of linear sRGB under D65."""
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ np.clip(rgb, 0, 1)
    x, y, z = np.cbrt(np.maximum(xyz / [0.9505, 1.0, 1.089], (6 / 29) ** 3))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


#: What protanopes, deuteranopes and others see of linear sRGB (Vienot, Brettel and Mollon, 1999).
SIGHTS = (
    [[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]],
    [[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]],
    np.eye(3),
)


def test_colours_are_seen_on_white_and_on_black_and_told_apart_by_all_eyes():
    for colour in COLOURS:
        luminance = linear(colour) @ [0.2126, 0.7152, 0.0722]
        assert 1.05 / (luminance + 0.05) > CONTRAST, colour
        assert (luminance + 0.05) / 0.05 > CONTRAST, colour
    for sight, (one, other) in itertools.product(SIGHTS, itertools.combinations(COLOURS, 2)):
        seen = [lab(np.array(sight) @ linear(colour)) for colour in (one, other)]
        assert np.linalg.norm(seen[0] - seen[1]) > SEEN, (one, other)
