"""What changed since an earlier calibration of the same machine: coefficients and predictions by significance."""

import math
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import NamedTuple

import numpy as np

from calibrate.printing import ns, number
from calibrate.suites.welch import SHOWN_BATCHES, SHOWN_K
from rlxjax.calibration import (
    MACHINE_FIELDS,
    CalibratedModel,
    Calibration,
    ModelSection,
    fingerprint_differences,
    read_calibration_file,
)
from rlxjax.fit import named, unit_of
from rlxjax.models import WELCH

from .batches import N_FFTS
from .markup import Markup
from .panels import WIDTH, Picture, line, mark, panel, rect, text
from .scales import Scale
from .tables import Figure, Table
from .words import date, give_or_take, signed, times

#: A change of more joint standard deviations than this is more than chance.
SURE_SDS = 2.0
#: Changes that have a bar.
SHOWN = 16
LEFT, RIGHT, TOP, ROW_HEIGHT = 168.0, WIDTH - 8.0, 8.0, 17.0


class Change(NamedTuple):
    """A quantity in two calibrations.

    Attributes:
        name: what it is.
        kind: "coefficient" or "prediction".
        unit: of the values.
        before: the earlier value.
        after: the later value.
        log_sd: joint standard deviation of the logarithm of their ratio.
    """

    name: str
    kind: str
    unit: str
    before: float
    after: float
    log_sd: float

    @property
    def sds(self) -> float:
        """The logarithm of the ratio in joint standard deviations; positive if the value grew."""
        return math.log(self.after / self.before) / self.log_sd

    @property
    def is_sure(self) -> bool:
        """Whether it is more than chance."""
        return abs(self.sds) > SURE_SDS


def earlier_calibration(path: FilePath, later: ModelSection) -> tuple[ModelSection, CalibratedModel]:
    """Return what an earlier calibration file says of Welch peaks: its section, and the model.

    Raises:
        ValueError: a file that is no calibration, of another machine, or without Welch peaks; one line.
    """
    known = read_calibration_file(path)
    calibrated = welch_of(Calibration.from_file(known, path=path), path)
    section = known.models[WELCH.name]
    if differences := fingerprint_differences(section.fingerprint, later.fingerprint, MACHINE_FIELDS):
        said = "; ".join(differences).replace(" here", " in the later one").replace(" there", " in the earlier one")
        raise ValueError(f"{path}: of another machine ({said}); give an earlier calibration of the same one")
    return section, calibrated


def welch_of(calibration: Calibration, path: FilePath) -> CalibratedModel:
    """Return what a calibration says of Welch peaks.

    Raises:
        ValueError: it says nothing; one line with the mend.
    """
    if WELCH.name not in calibration.models:
        raise ValueError(f"{path}: holds no Welch peaks; measure them with `rlxjax calibrate --only welch`")
    return calibration.of(WELCH.name)


def change_picture(
    earlier: ModelSection, before: CalibratedModel, later: ModelSection, after: CalibratedModel
) -> Picture:
    """Return the picture: every change that is more than chance, the surest first, and all as a table."""
    found = changes_of(before, after)
    software = fingerprint_differences(earlier.fingerprint, later.fingerprint)
    counts = []
    for kind in ("coefficient", "prediction"):
        mine = [change for change in found if change.kind == kind]
        counts.append(f"{sum(change.is_sure for change in mine)} of {len(mine)} {kind}s")
    verdicts = [_verdict(change) for change in found]
    slower, faster = (str(verdicts.count(word) or "none") for word in ("slower", "faster"))
    said = [
        f"Against the calibration of {date(earlier.created)}: {' and '.join(counts)} moved by more than "
        f"{SURE_SDS:g} joint standard deviations, which chance alone does once in twenty. Of these "
        f"predictions {slower} got slower and {faster} faster.",
        "A bar is the logarithm of later over earlier, in joint standard deviations: for a prediction those of its "
        "interval, the machine's pace included. Within the grey band a change is chance. To the right the value grew: "
        "for a time that is slower.",
    ]
    if software:
        told = "; ".join(software).replace(" there", " earlier").replace(" here", " now")
        said.append(f"The software changed too: {told}.")
    rows = [
        [
            change.name,
            change.kind,
            Figure(_value(change, change.before), change.before),
            Figure(_value(change, change.after), change.after),
            "ns" if change.kind == "prediction" else change.unit,
            Figure(times(change.after / change.before), change.after / change.before),
            Figure(give_or_take(change.log_sd), change.log_sd),
            Figure(signed(change.sds), change.sds),
            _verdict(change),
        ]
        for change in found
    ]
    headings = ("coefficient or prediction", "kind", "earlier", "later", "unit", "later ÷ earlier")
    headings += ("joint standard deviation", "change in these", "verdict")
    table = Table("Changes, the surest first", headings, rows)
    return Picture("changes", "What changed", said, None, [_panel(found[:SHOWN])], table)


def changes_of(before: CalibratedModel, after: CalibratedModel) -> list[Change]:
    """Return the changes of all coefficients and of predictions of a few workloads, the surest first."""
    found = [*_coefficient_changes(before, after), *_prediction_changes(before, after)]
    return sorted(found, key=lambda change: -abs(change.sds))


def _coefficient_changes(before: CalibratedModel, after: CalibratedModel) -> list[Change]:
    values = [named(one.coefficients) for one in (before, after)]
    log_sds = [named(one.posterior.coefficient_log_sd()) for one in (before, after)]
    return [
        Change(
            name,
            "coefficient",
            unit_of(name),
            float(values[0][name]),
            float(values[1][name]),
            math.hypot(*(float(own[name]) for own in log_sds)),
        )
        for name in values[0]
    ]


def _prediction_changes(before: CalibratedModel, after: CalibratedModel) -> list[Change]:
    """Return the changes of what every strategy of both takes, where both timed the workload."""
    both = (before, after)
    batch, n_fft = (grid.ravel() for grid in np.meshgrid(SHOWN_BATCHES, N_FFTS))
    timed = np.logical_and(*(np.asarray(one.in_domain(batch, n_fft, SHOWN_K)) for one in both))
    batch, n_fft, found = batch[timed], n_fft[timed], []
    if not batch.size:
        return found
    first = n_fft[0].item()
    strategies, others = (one.alternatives(1, first, SHOWN_K) for one in both)
    for strategy in (name for name in strategies if name in others):
        runs = [one.estimate(strategy, batch, n_fft, SHOWN_K) for one in both]
        each = [np.asarray(run.log_sd()) for run in runs] + [np.full(batch.shape, one.pace_log_sd) for one in both]
        log_sd, times_ns = np.linalg.norm(each, axis=0), [np.asarray(run.time_ns).tolist() for run in runs]
        name = after.name_of(strategy, 1, first, SHOWN_K)
        found += [
            Change(f"{name} {rows:,} × {length:,}", "prediction", "ns", earlier_ns, later_ns, sd)
            for rows, length, earlier_ns, later_ns, sd in zip(
                batch.tolist(), n_fft.tolist(), *times_ns, log_sd.tolist(), strict=True
            )
        ]
    return found


def _panel(found: Sequence[Change]) -> Markup:
    reach = max(SURE_SDS * 1.5, *(min(abs(change.sds), 20.0) for change in found)) * 1.05
    x = Scale(-reach, reach, LEFT, RIGHT, is_log=False)
    bottom = TOP + len(found) * ROW_HEIGHT
    content = [rect(x(-SURE_SDS), TOP, x(SURE_SDS) - x(-SURE_SDS), bottom - TOP, "noise")]
    for value in x.ticks(6):
        at = x(value)
        content += [line(at, TOP, at, bottom, "zero" if abs(value) < 1e-9 else "grid")]
        content.append(
            text(at, bottom + 15, f"{value:+g}".replace("-", "−") if abs(value) > 1e-9 else "0", "tick middle")
        )
    content.append(text((LEFT + RIGHT) / 2, bottom + 32, "change, joint standard deviations", "label middle"))
    content += [_bar(change, TOP + row * ROW_HEIGHT, x) for row, change in enumerate(found)]
    described = f"The surest change is that of {found[0].name}, by {signed(found[0].sds)} joint standard deviations."
    title = f"The {len(found)} surest changes"
    return panel("changes-all", title, described, bottom + 38, *content, reach=400)


def _bar(change: Change, y: float, x: Scale) -> Markup:
    first, last = sorted((x(0.0), x(change.sds)))
    said = (
        f"{change.name}\n{_value(change, change.before)} to {_value(change, change.after)} "
        f"{'ns' if change.kind == 'prediction' else change.unit}, {times(change.after / change.before)}\n"
        f"{signed(change.sds)} standard deviations, {_verdict(change)}"
    )
    style = "bar-part" if change.is_sure else "bar-less"
    return mark(
        said,
        (LEFT + RIGHT) / 2,
        y + ROW_HEIGHT / 2,
        rect(first, y + 3, max(last - first, 0.75), ROW_HEIGHT - 6, style),
        text(LEFT - 8, y + 12, change.name, "tick end"),
        strategy="changes",
    )


def _value(change: Change, value: float) -> str:
    return ns(value) if change.kind == "prediction" else number(value)


def _verdict(change: Change) -> str:
    if not change.is_sure:
        return "within chance"
    if change.kind == "coefficient":
        return "larger" if change.sds > 0 else "smaller"
    return "slower" if change.sds > 0 else "faster"
