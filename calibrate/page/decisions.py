"""The map of decisions: which strategy is picked by batch and n_fft, and where that is not decided."""

import dataclasses
import itertools
import math

import numpy as np

from calibrate.printing import ns
from calibrate.suites.welch import SHOWN_K
from rlxjax.calibration import CalibratedModel
from rlxjax.fit import SURE
from rlxjax.models import GRID_KS, GRID_N_FFTS

from .markup import Markup, element
from .panels import WIDTH, Picture, legend, mark, panel, rect, sign, style_of, text
from .tables import Figure, Table
from .words import chance, percent, size

LEFT, RIGHT, TOP = 48.0, WIDTH - 4.0, 14.0
ROW_HEIGHT = 15.0
#: Distance of two columns that have a label.
LABELS_APART = 42.0
#: Distance of the stripes of what is undecided, along an axis.
STRIPES_APART = 5.0


@dataclasses.dataclass(frozen=True)
class Map:
    """What is picked over batch and n_fft, `[n_ffts, batches]` each.

    Attributes:
        k: peaks of a row.
        batches: of the columns, `[batches]`.
        n_ffts: of the rows, `[n_ffts]`.
        names: of the strategies that give the same peaks.
        pick: place of the fastest among the names.
        next_best: place of the second.
        pick_ns: what the pick takes.
        next_ns: what the second takes.
        probability: that the pick is the faster one of the two.
        is_decided: whether the pick beats every other strategy surely.
        in_domain: whether the workload lies within what was measured.
    """

    k: int
    batches: np.ndarray
    n_ffts: np.ndarray
    names: list[str]
    pick: np.ndarray
    next_best: np.ndarray
    pick_ns: np.ndarray
    next_ns: np.ndarray
    probability: np.ndarray
    is_decided: np.ndarray
    in_domain: np.ndarray


def decision_picture(calibrated: CalibratedModel) -> Picture:
    """Return the picture, a panel for each of a few numbers of peaks."""
    low, high = calibrated.domain["k"]
    ks = sorted({k for k in (SHOWN_K, *GRID_KS[-1:]) if low <= k <= high} or {int(high)})
    maps = [map_of(calibrated, k) for k in ks]
    names = list(dict.fromkeys(one.names[place] for one in maps for place in np.unique(one.pick).tolist()))
    inside = np.concatenate([one.is_decided[one.in_domain] for one in maps])
    said = [
        "The colour is the strategy that is picked: the lowest prediction of those that give the same peaks. A hatched "
        f"cell is undecided: the pick is faster than some other one with less than {percent(SURE)}. A faint cell lies "
        "outside what was measured.",
        f"{percent(float(inside.mean()))} of the cells that lie within what was measured are decided.",
    ]
    entries = [(sign(rect(0, 1, 28, 12, "cell"), class_=style_of(name)), name) for name in names]
    hatched = sign(rect(0, 1, 28, 12, "cell"), _hatch(0, 1, 28, 12), class_="s-other")
    entries.append((hatched, "undecided"))
    rows = [row for one in maps for row in _rows(one)]
    headings = ("picked", "verdict", "batch, rows", "n_fft, samples", "k, peaks", "takes, ns", "second", "it takes, ns")
    headings += ("faster with a probability of", "measured there")
    table = Table("What is picked, by batch and n_fft", headings, rows)
    return Picture("decisions", "What is picked where", said, legend(*entries), [_panel(one) for one in maps], table)


def map_of(calibrated: CalibratedModel, k: int) -> Map:
    """Return what is picked over the sizes that were measured."""
    domain = calibrated.domain
    n_ffts = np.array([n for n in GRID_N_FFTS if domain["n_fft"][0] <= n <= domain["n_fft"][1]])
    if not n_ffts.size:
        n_ffts = np.unique(np.array(domain["n_fft"], int))
    low, high = domain["batch"]
    batches = np.array(sorted(b for power in range(32) for b in (2**power, 3 * 2**power) if low <= b <= high))
    batch, n_fft = (grid.ravel() for grid in np.meshgrid(batches, n_ffts))
    # A learned strategy has lengths of its own, and no place on a map of all.
    length, peaks = n_ffts[0].item(), np.minimum(k, n_fft // 2 + 1)
    few = min(k, length // 2 + 1)
    names = [name for name in calibrated.alternatives(1, length, few) if name != "learned"]
    times_ns = np.stack([np.asarray(calibrated.predict_ns(name, batch, n_fft, peaks)) for name in names])
    order = np.argsort(times_ns, axis=0, kind="stable")
    first, second = order[:2]
    probability = np.ones(batch.shape)
    for one, other in itertools.combinations(range(len(names)), 2):
        decided = calibrated.compare(names[one], names[other], batch, n_fft, peaks)
        of_one = np.asarray(decided.probability)
        probability = np.where((first == one) & (second == other), of_one, probability)
        probability = np.where((first == other) & (second == one), 1.0 - of_one, probability)
    places, shape = np.arange(batch.size), (len(n_ffts), len(batches))
    return Map(
        k,
        batches,
        n_ffts,
        [calibrated.name_of(name, 1, length, few) for name in names],
        *(
            values.reshape(shape)
            for values in (
                first,
                second,
                times_ns[first, places],
                times_ns[second, places],
                probability,
                np.asarray(calibrated.decided(batch, n_fft, peaks, candidates=names)[1]),
                np.asarray(calibrated.in_domain(batch, n_fft, peaks)),
            )
        ),
    )


def _panel(one: Map) -> Markup:
    n_rows, n_columns = one.pick.shape
    width, bottom = (RIGHT - LEFT) / n_columns, TOP + n_rows * ROW_HEIGHT
    name = f"map-{one.k}"
    cells, labels = [], []
    for row, column in itertools.product(reversed(range(n_rows)), range(n_columns)):
        x, y = LEFT + column * width, bottom - (row + 1) * ROW_HEIGHT
        hatch = None if one.is_decided[row, column] else _hatch(x, y, width, ROW_HEIGHT)
        cells.append(
            mark(
                _said(one, row, column),
                x + width / 2,
                y + ROW_HEIGHT / 2,
                rect(x, y, width, ROW_HEIGHT, "cell"),
                hatch,
                rect(x, y, width, ROW_HEIGHT, "over"),
                strategy=one.names[int(one.pick[row, column])],
                class_="" if one.in_domain[row, column] else "faint",
            )
        )
    for row, n_fft in enumerate(one.n_ffts.tolist()):
        labels.append(text(LEFT - 5, bottom - (row + 0.5) * ROW_HEIGHT + 4, f"{n_fft}", "tick end"))
    last = -np.inf
    for column, batch in enumerate(one.batches.tolist()):
        at = LEFT + (column + 0.5) * width
        if at - last >= LABELS_APART and np.log2(batch) % 2 == 0:
            labels.append(text(at, bottom + 15, size(batch), "tick middle"))
            last = at
    labels += [
        text((LEFT + RIGHT) / 2, bottom + 32, "batch, rows", "label middle"),
        text(2, TOP - 4, "n_fft, samples", "label"),
        *_names(one, width, bottom),
    ]
    shares = [
        f"{strategy} {percent(float((one.pick[one.in_domain] == place).mean()))}"
        for place, strategy in enumerate(one.names)
    ]
    described = f"Of the cells within what was measured, the pick is {', '.join(shares)}."
    title = f"k {one.k}: the pick over batch and n_fft"
    return panel(name, title, described, bottom + 38, *cells, *labels, stride=n_columns, reach=20)


def _names(one: Map, width: float, bottom: float) -> list[Markup]:
    """Return the name of each strategy, in the middle of the cells that are its own."""
    found = []
    for place, name in enumerate(one.names):
        mine = (one.pick == place) & one.in_domain
        if mine.mean() < 0.08:
            continue
        # A name is wider than it is high: a step across counts half.
        own, step = np.argwhere(mine), np.array([1.0, 0.5])
        padded = np.argwhere(~np.pad(mine, 1)) - 1
        away = np.max(np.abs(own[:, None] - padded[None]) * step, -1).min(-1)
        row, column = own[int(np.argmax(away))].tolist()
        at = text(LEFT + (column + 0.5) * width, bottom - (row + 0.5) * ROW_HEIGHT + 4, name, "name middle")
        found.append(at)
    return found


def _hatch(x: float, y: float, width: float, height: float) -> Markup:
    """Return stripes over a rectangle, which go on in the one beside it.

    A pattern would be shorter here, and a hundred times as large where the page is printed to a file.
    """
    stripes = []
    for number in range(math.ceil((x + y) / STRIPES_APART), math.ceil((x + y + width + height) / STRIPES_APART)):
        both = number * STRIPES_APART  # of a stripe's points, the sum of x and y
        top, bottom = max(y, both - x - width), min(y + height, both - x)
        stripes.append(f"M{both - top:.1f} {top:.1f}L{both - bottom:.1f} {bottom:.1f}")
    return element("path", d="".join(stripes), class_="stripe")


def _said(one: Map, row: int, column: int) -> str:
    pick, second = (one.names[places[row, column]] for places in (one.pick, one.next_best))
    return (
        f"batch {one.batches[column]:,}, n_fft {one.n_ffts[row]:,}, k {one.k}\n{pick} takes "
        f"{ns(one.pick_ns[row, column])} ns, {second} {ns(one.next_ns[row, column])} ns\n{pick} is faster with "
        f"{chance(float(one.probability[row, column]))}{'' if one.is_decided[row, column] else ', undecided'}"
        f"{'' if one.in_domain[row, column] else ', extrapolated'}"
    )


def _rows(one: Map) -> list[list[str | Figure]]:
    found = []
    for row, column in itertools.product(range(len(one.n_ffts)), range(len(one.batches))):
        place = row, column
        pick_ns, next_ns, probability = (float(v[place]) for v in (one.pick_ns, one.next_ns, one.probability))
        sizes = (one.batches[column].item(), one.n_ffts[row].item(), one.k)
        found.append(
            [
                one.names[one.pick[place]],
                one.names[one.pick[place]] if one.is_decided[place] else "undecided",
                *(Figure(f"{value:,}", value) for value in sizes),
                Figure(ns(pick_ns), pick_ns),
                one.names[one.next_best[place]],
                Figure(ns(next_ns), next_ns),
                Figure(chance(probability), probability),
                "yes" if one.in_domain[place] else "no",
            ]
        )
    return found
