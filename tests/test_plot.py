"""Pictures hold what the calibration says, are drawn where they are told, and leave matplotlib as it was."""

import dataclasses
import functools
import io
import itertools
import re
import sys

import matplotlib
import numpy as np
import pytest
from _models import (
    LINE,
    LINE_TRUTH,
    TILED,
    TILED_TRUTH,
    calibrated,
    certain,
    line_fit,
    random_posterior,
    runs_of,
    timings_of,
)
from matplotlib import pyplot
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

import rlxjax as rx
from rlxjax.calibration import explain
from rlxjax.choices import Grouping
from rlxjax.extras import install_command
from rlxjax.fit import COVERED_SDS, is_measured, named
from rlxjax.gate import Provenance
from rlxjax.plot import rows
from rlxjax.plot._axes import COLOURS  # no picture shows what all of them are

matplotlib.use("agg")

EXACT = 1e-12
LINES = calibrated(random_posterior(LINE, LINE_TRUTH), most=500.0)
TILES = calibrated(random_posterior(TILED, TILED_TRUTH))
SIZES = 2.0 ** np.arange(1, 14)
LINE_TIMINGS = timings_of(LINE_TRUTH, runs_of(LINE), 0.02)
TILED_TIMINGS = timings_of(TILED_TRUTH, runs_of(TILED, depth=4.0), 0.02)
OVER = {"n": [8.0, 100.0, 700.0, 4000.0], "depth": [0.5, 2.0, 4.0]}
CELLS = {"n": np.tile(OVER["n"], 3), "depth": np.repeat(OVER["depth"], 4)}
#: The contrast of graphics with their background (WCAG 2.2, 1.4.11), and a difference that is seen (CIELAB).
CONTRAST, SEEN = 3.0, 12.0

PICTURES = {
    "predicted_vs_measured": lambda **where: rx.plot.predicted_vs_measured(TILES, TILED_TIMINGS, noise=0.03, **where),
    "time_by": lambda **where: rx.plot.time_by(TILES, "n", SIZES, timings=TILED_TIMINGS, depth=4.0, **where),
    "decision_map": lambda **where: rx.plot.decision_map(TILES, OVER, **where),
    "terms": lambda **where: rx.plot.terms(explained(), **where),
    "coefficients": lambda **where: rx.plot.coefficients(TILES, **where),
}
UNTIMED = (Grouping("apart"), Grouping("together"))
TIMED = (
    Grouping("apart", predicted_ns=8e3, terms_ns={"call_ns": 8e3}),
    Grouping("together", predicted_ns=3e3, predicted_interval_ns=(2e3, 4e3), terms_ns={"call_ns": 3e3, "loop_ns": 0.0}),
)
ADVICE = rx.Advice(
    "together",
    "model",
    alternatives=TIMED,
    verdict="fuse",
    reason_code="saves_launches",
    reason="",
    compared="together",
)


@functools.cache
def explained():
    """Return what a test alone computes, not everyone who collects it."""
    return explain(TILES, n=700.0, depth=2.0)


def new_axis():
    return Figure().subplots()


def bars_of(container):
    """Return the points of error bars, and the ends of each bar, `[n, 2]`."""
    line, _, (bars,) = container.lines
    return None if line is None else np.stack(line.get_data(), -1), np.array(bars.get_segments())


def labelled(ax):
    return {line.get_label(): line for line in ax.get_lines() if not line.get_label().startswith("_")}


def figures(ax, *headings):
    """Return columns of the figures behind a picture."""
    return [np.array([row[heading] for row in rows(ax)]) for heading in headings]


PREDICTED = ("predicted (ns)", "from (ns)", "to (ns)")


def test_predictions_are_drawn_over_timings_with_their_intervals():
    ax = rx.plot.predicted_vs_measured(LINES, LINE_TIMINGS, level=0.8, ax=new_axis())
    assert len(ax.containers) == len(LINE.variants)
    for place, (name, container) in enumerate(zip(LINE.variants, ax.containers, strict=True)):
        own = np.asarray(LINE_TIMINGS.runs.variant) == place
        n, time_ns = np.asarray(LINE_TIMINGS.runs.inputs["n"])[own], LINE_TIMINGS.time_ns[own]
        predicted_ns, bounds_ns = LINES.predict_ns(name, n), LINES.interval_ns(name, n, level=0.8)
        error = np.mean(np.abs(predicted_ns / time_ns - 1.0))
        points, bars = bars_of(container)
        assert container.get_label() == f"{name}, error {100 * error:.2g} %"
        np.testing.assert_allclose(points.T, [time_ns, predicted_ns / time_ns], rtol=EXACT)
        np.testing.assert_allclose(bars[..., 0].T, [time_ns, time_ns], rtol=EXACT)
        np.testing.assert_allclose(bars[..., 1].T, bounds_ns / time_ns, rtol=EXACT)
        run, *shown = figures(ax, "run", *PREDICTED)
        mine = np.char.startswith(run, f"{name},")
        np.testing.assert_allclose([column[mine] for column in shown], [predicted_ns, *bounds_ns], rtol=EXACT)
        assert run[mine].tolist() == [f"{name}, n {one:,g}" for one in n]


def test_the_noise_is_a_band_around_1_and_the_noise_of_the_calibration_unless_given():
    known = dataclasses.replace(LINES, noise_floor=0.05)
    for whole, given, expected in ((LINES, None, None), (LINES, 0.1, 0.1), (known, None, 0.05), (known, 0.1, 0.1)):
        ax = rx.plot.predicted_vs_measured(whole, LINE_TIMINGS, noise=given, ax=new_axis())
        bands = [one.get_window_extent().transformed(ax.transData.inverted()) for one in ax.patches]
        assert len(bands) == (expected is not None)
        for band in bands:
            np.testing.assert_allclose((band.y0, band.y1), (1 / (1 + expected), 1 + expected), rtol=1e-9)


def test_the_time_of_strategies_is_drawn_with_their_bands_at_every_value():
    ax = rx.plot.time_by(TILES, "n", SIZES, depth=2.0, level=0.7, ax=new_axis())
    lines, strategy = labelled(ax), figures(ax, "strategy")[0]
    assert list(lines) == list(TILES.alternatives(n=SIZES, depth=2.0)) == ["loop", "tile"]
    assert lines["loop"].get_color() != lines["tile"].get_color()
    told = rx.plot.time_by(TILES, "n", SIZES, strategies=["once", "tile"], depth=1.0, ax=new_axis())
    assert list(labelled(told)) == ["once", "tile"]
    for (name, line), band in zip(lines.items(), ax.collections, strict=True):
        time_ns = TILES.predict_ns(name, n=SIZES, depth=2.0)
        bounds_ns = TILES.interval_ns(name, n=SIZES, depth=2.0, level=0.7)
        np.testing.assert_allclose(np.stack(line.get_data()), [SIZES, time_ns], rtol=EXACT)
        x, y = band.get_paths()[0].vertices.T
        for size, *own_ns in zip(SIZES, *bounds_ns, strict=True):
            np.testing.assert_allclose([y[x == size].min(), y[x == size].max()], own_ns, rtol=EXACT)
        shown = [column[strategy == name] for column in figures(ax, "n", *PREDICTED)]
        np.testing.assert_allclose(shown, [SIZES, time_ns, *bounds_ns], rtol=EXACT)


def test_timings_of_the_same_sizes_are_points_of_the_variant_that_a_strategy_runs():
    def points(timings):
        ax = rx.plot.time_by(TILES, "n", SIZES, timings=timings, depth=4.0, ax=new_axis())
        return [line for line in ax.get_lines() if line.get_linestyle() == "None"]

    assert not [line for line in points(timings_of(TILED_TRUTH, runs_of(TILED, depth=3.0))) if line.get_xdata().size]
    n, code = TILED_TIMINGS.runs.inputs["n"], np.asarray(TILED_TIMINGS.runs.variant)
    for line, name in zip(points(TILED_TIMINGS), ("loop", "tile"), strict=True):
        sizes = [one for one in np.unique(n) if SIZES[0] <= one <= SIZES[-1]]
        runs = [TILED.variants.index(TILES.variant_of(name, n=one, depth=4.0)) for one in sizes]
        times_ns = [TILED_TIMINGS.time_ns[(code == v) & (n == one)].item() for one, v in zip(sizes, runs, strict=True)]
        assert dict(zip(*line.get_data(), strict=True)) == dict(zip(sizes, times_ns, strict=True))
        behind = {row["n"]: row["measured (ns)"] for row in rows(line.axes) if row["strategy"] == name}
        assert {one: ns for one, ns in behind.items() if ns is not None} == dict(zip(sizes, times_ns, strict=True))
    assert len(set(runs)) == 2


def test_a_line_is_dotted_beyond_what_was_timed():
    ax = rx.plot.time_by(LINES, "n", SIZES, ax=new_axis())
    lines, is_timed = labelled(ax), np.asarray(LINES.in_domain(n=SIZES))
    assert list(lines) == [*LINE.variants, "not timed"]
    assert not is_timed.all()
    dotted = [line for line in ax.get_lines() if line.get_linestyle() == ":" and line.get_xdata().size]
    for name, beyond in zip(LINE.variants, dotted, strict=True):
        time_ns, found = LINES.predict_ns(name, n=SIZES), beyond.get_ydata()
        np.testing.assert_allclose(lines[name].get_ydata(), np.where(is_timed, time_ns, np.nan), rtol=EXACT)
        np.testing.assert_allclose(found[~is_timed], time_ns[~is_timed], rtol=EXACT)
        assert np.isfinite(found).sum() == (~is_timed).sum() + 1  # the lines meet


def classes_of(ax):
    return np.asarray(ax.collections[0].get_array())


def test_a_map_of_two_strategies_shows_the_verdict_of_each_cell():
    unsure = calibrated(random_posterior(TILED, TILED_TRUTH, sd=0.3, spread=0.2))
    ax = rx.plot.decision_map(unsure, OVER, fused="tile", kept="loop", ax=new_axis())
    verdicts = unsure.decide(**CELLS, fused="tile", kept="loop").verdict()
    assert set(np.ravel(verdicts)) == {"fuse", "keep", "undecided"}
    shown = np.array(["fuse", "keep", "undecided"])[classes_of(ax).astype(int)]
    np.testing.assert_array_equal(shown.ravel(), np.ravel(verdicts))
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["tile", "loop", "undecided", "not timed"]
    for edges, values in zip(np.moveaxis(ax.collections[0].get_coordinates(), -1, 0), OVER.values(), strict=True):
        lines = np.unique(edges)
        assert len(lines) == len(values) + 1
        assert np.all((lines[:-1] < values) & (values < lines[1:]))


class ThreeWays(type(TILED)):
    """Its variants are strategies, and each gives the result of any size."""

    strategies = {name: rx.fit.StrategySpec((name,)) for name in ("loop", "tile", "pair")}

    def same_result(self, runs, facts):
        return np.ones((*runs.shape, 3), bool)


def test_a_map_of_all_shows_who_beats_every_other_one_surely_and_names_every_figure():
    truth = {**TILED_TRUTH, "launch_ns": 300.0}
    whole = calibrated(random_posterior(ThreeWays(), truth, sd=0.1, spread=0.1), most=1000.0)
    ax = rx.plot.decision_map(whole, OVER, ax=new_axis())
    names, winners = whole.alternatives(n=1.0, depth=1.0), classes_of(ax).ravel()
    chosen = whole.decided(**CELLS, candidates=names)
    np.testing.assert_array_equal(winners, np.where(chosen.is_sure, chosen.place, 3))
    assert len(set(winners)) > 2
    for name in names:
        np.testing.assert_allclose(figures(ax, f"{name} (ns)")[0], whole.predict_ns(name, **CELLS), rtol=EXACT)
    n, depth, verdict, fastest, timed = figures(ax, "n", "depth", "verdict", "fastest", "timed")
    np.testing.assert_array_equal((n, depth), list(CELLS.values()))
    np.testing.assert_array_equal(verdict, np.array([*names, "undecided"])[winners.astype(int)])
    np.testing.assert_array_equal(fastest, np.array(names)[whole.pick_index(**CELLS, candidates=names)])
    is_timed = np.asarray(whole.in_domain(**CELLS))
    np.testing.assert_array_equal(timed, is_timed)
    # Cells beyond what was timed are paler.
    alpha = np.asarray(ax.collections[0].get_alpha())
    assert alpha[~is_timed].max() < alpha[is_timed].min()


class NoThirtyTwo(type(TILED)):
    """No run of it has 32 items."""

    def check(self, values):
        if np.any(np.asarray(values["n"]) == 32.0):
            raise ValueError("32")


def test_a_map_without_given_values_shows_possible_doublings_of_timed_values_around_all_changes_of_the_decision():
    whole = calibrated(certain(NoThirtyTwo(), TILED_TRUTH), most=3000.0)
    every = {"n": [*2.0 ** np.delete(np.arange(12), 5), 3000.0], "depth": [1.0, 2.0, 4.0]}
    shown, full = (rx.plot.decision_map(whole, over, ax=new_axis()) for over in (None, every))
    kept = {name: np.unique(figures(shown, name)[0]).tolist() for name in every}
    inside = [row for row in rows(full) if all(row[name] in values for name, values in kept.items())]
    assert rows(shown) == inside
    classes = classes_of(full)
    for axis, name in ((1, "n"), (0, "depth")):
        differs = np.flatnonzero((np.diff(classes, axis=axis) != 0).any(1 - axis))
        first, last = differs.min(), differs.max()
        assert kept[name] == every[name][max(first - 1, 0) : last + 3]
    assert len(kept["n"]) < len(every["n"])


def test_terms_are_a_waterfall_that_ends_at_the_prediction():
    ax = rx.plot.terms(explained(), ax=new_axis())
    bars = [container for container in ax.containers if hasattr(container, "patches")]
    reaches, places = [container for container in ax.containers if container not in bars], []
    for one, total, parts, reach in zip(explained().strategies, bars[::2], bars[1::2], reaches, strict=True):
        (whole,) = total.patches
        assert (whole.get_x(), whole.get_width()) == (0.0, one.time_ns)
        np.testing.assert_allclose(np.sort(bars_of(reach)[1][0, :, 0]), one.interval_ns, rtol=EXACT)
        shown = [time_ns for time_ns in one.terms_ns.values() if time_ns]
        ends = np.cumsum(shown)
        np.testing.assert_allclose([bar.get_width() for bar in parts.patches], shown, rtol=EXACT)
        np.testing.assert_allclose([bar.get_x() for bar in parts.patches], [0.0, *ends[:-1]], atol=1e-6)
        assert ends[-1] == pytest.approx(one.time_ns)
        row, *others = (row for row in rows(ax) if row["strategy"] == one.strategy)
        assert (row["time (ns)"], row["from (ns)"], row["to (ns)"]) == (one.time_ns, *one.interval_ns)
        assert [own["time (ns)"] for own in others] == pytest.approx(shown)
        places += [bar.get_y() for bar in (*total.patches, *parts.patches)]
    assert places == sorted(places)
    assert len(places) == len(ax.get_yticklabels())


def test_the_terms_of_a_function_and_of_an_advice_are_those_of_their_predictions():
    one, other = ADVICE.pair
    function = rx.calibration.FunctionPrediction(5e3, 3e3, np.inf, {"call_ns": 2e3, "matmul_ns": 3e3}, None, False)
    ax, advised = (rx.plot.terms(own, ax=new_axis()) for own in (function, ADVICE))
    assert [(row["strategy"], row["part"], row["time (ns)"]) for row in [*rows(ax), *rows(advised)]] == [
        ("one call", "total", 5e3),
        *(("one call", part, ns) for part, ns in (("call", 2e3), ("matmul", 3e3))),
        ("apart", "total", one.predicted_ns),
        ("apart", "call", 8e3),
        ("together", "total", other.predicted_ns),
        ("together", "call", 3e3),
    ]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["one call\n5 us (3 to inf)", "call", "matmul"]
    assert ax.get_xlim()[1] < 11e3  # an interval without end leaves space for the parts
    assert advised.get_yticklabels()[2].get_text() == "together\n3 us (2 to 4)"


def test_coefficients_are_multiples_of_their_priors_medians():
    names = list(TILED_TRUTH)
    settled = dataclasses.replace(TILES, provenance=dict.fromkeys(names[:2], Provenance.MEASURED))
    medians, sds = (named(part) for part in (TILED.prior.median, TILED.prior.log_sd))
    own_sds = named(TILES.posterior.coefficient_log_sd())
    by_rule = {name for name in names if is_measured(own_sds[name], sds[name])}
    of_fit = line_fit()._replace(posterior=TILES.posterior)
    for given, measured in ((settled, set(names[:2])), (TILES, set()), (TILES.posterior, by_rule), (of_fit, by_rule)):
        ax = rx.plot.coefficients(given, earlier=TILES, ax=new_axis())
        order = [row["coefficient"] for row in rows(ax)]
        assert sorted(order) == sorted(names)
        said = dict(zip(order, (label.get_text() for label in ax.get_yticklabels()), strict=True))
        assert (said["launch_ns"], said["tile_item_ns"]) == ("launch (ns)", "tile item (ns)")
        priors, earlier, *drawn = ax.containers
        np.testing.assert_allclose(bars_of(earlier)[0][:, 0], [TILED_TRUTH[name] / medians[name] for name in order])
        for container in drawn:
            points, bars = bars_of(container)
            for (ratio, row), ends in zip(points, bars[..., 0], strict=True):
                name = order[int(row)]
                assert (name in measured) == (container.lines[0].get_markerfacecolor() != "none")
                assert ratio == pytest.approx(TILED_TRUTH[name] / medians[name])
                assert np.log(ends / ratio) == pytest.approx(COVERED_SDS * own_sds[name] * np.array([-1, 1]))
        assert sum(len(one.lines[0].get_xdata()) for one in drawn) == len(names)
        for name, bar, row in zip(order, priors.patches, rows(ax), strict=True):
            ends = np.log([bar.get_x(), bar.get_x() + bar.get_width()])
            assert ends == pytest.approx(COVERED_SDS * sds[name] * np.array([-1, 1]))
            assert (row["coefficient"], row["value"]) == (name, TILED_TRUTH[name])
            assert (row["provenance"] == "measured") == (name in measured)


def test_a_picture_is_drawn_on_the_axis_that_is_given_and_leaves_all_else():
    before, open_ones = dict(matplotlib.rcParams), pyplot.get_fignums()
    figure = Figure(figsize=(9.0, 5.0), layout="constrained")
    axes, other = figure.subplots(1, len(PICTURES) + 1)[:-1], figure.axes[-1]
    for draw, ax in zip(PICTURES.values(), axes, strict=True):
        assert draw(ax=ax) is ax
        count = len(rows(ax))
        assert draw(ax=ax) is ax
        assert len(rows(ax)) == 2 * count > 0
        for label in (ax.get_xlabel(), ax.get_ylabel()):
            assert re.search(r"^$| \(.+\)| / |time(\n|$)", label)  # ticks of times have their unit
    assert not other.has_data()
    figure.savefig(io.BytesIO(), format="svg")
    assert dict(matplotlib.rcParams) == before
    assert pyplot.get_fignums() == open_ones


def test_without_an_axis_there_is_one_new_figure_in_the_current_style():
    for draw in PICTURES.values():
        open_ones = pyplot.get_fignums()
        with pyplot.style.context("dark_background"):
            before = dict(matplotlib.rcParams)
            ax = draw()
            assert dict(matplotlib.rcParams) == before
        (made,) = set(pyplot.get_fignums()) - set(open_ones)
        assert pyplot.figure(made) is ax.figure
        pyplot.close(made)
        texts = ax.get_legend().get_texts() if ax.get_legend() else []
        assert all(to_rgb(text.get_color()) == (1.0, 1.0, 1.0) for text in [ax.xaxis.label, *texts])


def test_ticks_name_their_value_and_its_unit():
    units = {"s": 1e9, "ms": 1e6, "us": 1e3, "ns": 1.0}
    for factor in (1e-2, 1e3, 1e6):
        truth = {name: value * factor for name, value in LINE_TRUTH.items()}
        ax = rx.plot.time_by(calibrated(certain(LINE, truth)), "n", [1.0, 5.0, 1e4, *range(6, 20)], ax=new_axis())
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("n (items)", "time")
        ax.figure.canvas.draw()
        for axis in (ax.yaxis, ax.xaxis):
            at = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
            shown = {value: text.get_text().split(" ") for value, text in at if text.get_text()}
            assert len(shown) > 1
            for value, (number, *unit) in shown.items():
                assert float(number.replace(",", "")) * units[unit[0] if unit else "ns"] == pytest.approx(value)


def refusals():
    """Yield a sentence, and the picture, arguments and options that it refuses."""
    predicted, by, over, terms, coefficients = (getattr(rx.plot, name) for name in PICTURES)
    yield "calibrated: expected a Calibration or one of its models, got str", by, ("cpu", "n", SIZES), {}
    yield "timings: expected Timings, got list", predicted, (LINES, [1.0]), {}
    said = "timings: expected timings of line (version 1), got timings of tiled (version 3)"
    yield said, predicted, (LINES, TILED_TIMINGS), {}
    stacked = rx.fit.stack_timings([LINE_TIMINGS])[0]
    yield "timings: expected times of one machine, `[n]`, got shape (1, 28)", predicted, (LINES, stacked), {}
    yield "level: expected a probability between 0 and 1, got 90", by, (LINES, "n", SIZES), {"level": 90}
    yield "n: this input was given twice", by, (LINES, "n", SIZES), {"n": 3.0}
    yield "n: expected at least two different numbers, got 1", by, (LINES, "n", [4.0, 4.0]), {}
    yield "n: expected positive finite numbers, got 0", by, (LINES, "n", [0.0, 4.0]), {}
    yield "strategy: expected one of plain, blocked, got 'fast'", by, (LINES, "n", SIZES), {"strategies": ["fast"]}
    yield "strategies: expected at least one, got none", by, (LINES, "n", SIZES), {"strategies": []}
    few = {"n": [1, 2]}
    yield "over: expected the values of two inputs by name, got {'n': [1, 2]}", over, (TILES, few), {}
    yield "fused, kept: give both strategies, or leave both out", over, (TILES, OVER), {"fused": "tile"}
    same = dict.fromkeys(("fused", "kept"), "tile")
    yield "strategies: expected two different strategies, got tile, tile", over, (TILES, OVER), same
    said = "explained: expected an answer of `predict_function`, `advise` or `explain`, got "
    for given in (TILES.decide(3.0, 1.0), (), "fast", {"fast": 1.0}, None):
        yield f"{said}{type(given).__name__}", terms, (given,), {}
    said = "explained: expected predicted times, got an advice without predicted times"
    for own in (dataclasses.replace(ADVICE, compared=""), dataclasses.replace(ADVICE, alternatives=UNTIMED)):
        yield said, terms, (own,), {}
    yield "earlier: expected a model 'tiled', got a model 'line'", coefficients, (TILES,), {"earlier": LINES}
    said = "calibrated: expected a Calibration, one of its models, a posterior or its fit, got dict"
    yield said, coefficients, (LINE_TRUTH,), {}
    yield "ax: expected a matplotlib axis, got ndarray", terms, (explained(),), {"ax": np.zeros(2)}


def test_what_cannot_be_drawn_is_one_sentence_and_no_figure():
    open_ones = pyplot.get_fignums()
    for sentence, draw, given, options in refusals():
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
            draw(*given, **options)
    assert pyplot.get_fignums() == open_ones


def test_without_matplotlib_a_picture_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = re.escape(f"matplotlib is not installed; get it with `{install_command('plot')}`")
    for draw in PICTURES.values():
        with pytest.raises(ImportError, match=said):
            draw()


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
    parts = np.array([to_rgb(colour) for colour in COLOURS])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    luminance = linear @ [0.2126, 0.7152, 0.0722]
    assert np.all(1.05 / (luminance + 0.05) > CONTRAST)
    assert np.all((luminance + 0.05) / 0.05 > CONTRAST)
    for sight, (one, other) in itertools.product(SIGHTS, itertools.combinations(linear, 2)):
        assert np.linalg.norm(lab(np.array(sight) @ one) - lab(np.array(sight) @ other)) > SEEN
