"""The picture of a model's coefficients with error bars, beside the model's own prior."""

import dataclasses
import math

from calibrate.printing import number
from rlxjax.calibration import CalibratedModel
from rlxjax.device import Provenance
from rlxjax.fit import COVERED_SDS, named, unit_of

from .markup import Markup, element
from .panels import WIDTH, Picture, legend, line, mark, panel, rect, sign, text
from .scales import Scale, ratio_scale, ratio_ticks
from .tables import Figure, Table
from .words import give_or_take, plain, times

LEFT, RIGHT, TOP, ROW_HEIGHT = 146.0, WIDTH - 8.0, 8.0, 17.0
#: The least and the largest reach of the axis, in logarithms.
LEAST_REACH, MOST_REACH = math.log(3.0), math.log(30.0)


@dataclasses.dataclass(frozen=True)
class Coefficient:
    """One coefficient, by its logarithm where that has a standard deviation.

    Attributes:
        name: its name.
        unit: of its values.
        value: as fitted.
        log_sd: standard deviation of its logarithm.
        prior: median of the model's own prior.
        prior_log_sd: standard deviation of its logarithm.
        provenance: whether timings settle it.
    """

    name: str
    unit: str
    value: float
    log_sd: float
    prior: float
    prior_log_sd: float
    provenance: str


def coefficient_picture(calibrated: CalibratedModel, ident: str = "coefficients") -> Picture:
    """Return the picture of the coefficients of one model.

    Args:
        calibrated: the model.
        ident: of the section.
    """
    found = coefficients_of(calibrated)
    count = sum(one.provenance == Provenance.MEASURED for one in found)
    said = (
        "Each coefficient over the median of the model's own prior. The dark bar holds it with 90 %; the pale one is "
        "that prior, which is wide: what is believed of any machine. A fit may begin from a narrower one, that of "
        f"other machines. The timings settle {count} of {len(found)}: their points are full. The others keep most of "
        "what the fit began from."
    )
    entries = (
        (sign(_dot(14, 7, is_full=True), class_="s-other"), "measured"),
        (sign(_dot(14, 7, is_full=False), class_="s-other"), "uncalibrated"),
        (sign(line(0, 7, 28, 7, "reach"), class_="s-other"), "90 %"),
        (sign(rect(0, 3, 28, 8, "prior")), "prior, 90 %"),
    )
    rows = [
        [
            one.name,
            Figure(number(one.value), one.value),
            one.unit,
            Figure(give_or_take(one.log_sd), one.log_sd),
            Figure(number(one.prior), one.prior),
            Figure(give_or_take(one.prior_log_sd), one.prior_log_sd),
            one.provenance,
        ]
        for one in found
    ]
    headings = ("coefficient", "value", "unit", "standard deviation", "prior", "its standard deviation", "provenance")
    table = Table(f"Coefficients of the {calibrated.model.name} model", headings, rows)
    return Picture(ident, "Coefficients", [said], legend(*entries), [_panel(ident, found)], table)


def coefficients_of(calibrated: CalibratedModel) -> list[Coefficient]:
    """Return the coefficients of a model in its order, each with its prior."""
    prior, log_sds = calibrated.model.prior, named(calibrated.posterior.coefficient_log_sd())
    medians, prior_log_sds = named(prior.median), named(prior.log_sd)
    return [
        Coefficient(
            name,
            unit_of(name),
            float(value),
            float(log_sds[name]),
            float(medians[name]),
            float(prior_log_sds[name]),
            str(calibrated.provenance.get(name, Provenance.UNCALIBRATED)),
        )
        for name, value in named(calibrated.coefficients).items()
    ]


def _panel(ident: str, found: list[Coefficient]) -> Markup:
    reaches = [abs(math.log(one.value / one.prior)) + COVERED_SDS * one.log_sd for one in found]
    x = ratio_scale(min(max(*reaches, LEAST_REACH), MOST_REACH), LEFT, RIGHT)
    bottom = TOP + len(found) * ROW_HEIGHT
    content = []
    for value in ratio_ticks(x, 32.0):
        at = x(value)
        content += [line(at, TOP, at, bottom, "zero" if value == 1.0 else "grid")]
        content.append(text(at, bottom + 15, f"{value:g}", "tick middle"))
    content.append(text((LEFT + RIGHT) / 2, bottom + 32, "value ÷ prior median", "label middle"))
    content += [_row(one, TOP + (row + 0.5) * ROW_HEIGHT, x) for row, one in enumerate(found)]
    furthest = max(found, key=lambda one: abs(math.log(one.value / one.prior)))
    ratio = times(furthest.value / furthest.prior)
    described = f"{len(found)} coefficients; the one furthest from its prior is {furthest.name}, {ratio}."
    return panel(f"{ident}-all", "Coefficients over their prior", described, bottom + 38, *content, reach=400)


def _row(one: Coefficient, y: float, x: Scale) -> Markup:
    reach, prior_reach = math.exp(COVERED_SDS * one.log_sd), math.exp(COVERED_SDS * one.prior_log_sd)
    ratio, is_full = one.value / one.prior, one.provenance == Provenance.MEASURED
    believed = (x(1.0 / prior_reach), x(prior_reach))
    said = (
        f"{one.name}\n{number(one.value)} {'' if one.unit == '1' else one.unit}".rstrip()
        + f" {give_or_take(one.log_sd)}, {one.provenance}\nprior {number(one.prior)} {give_or_take(one.prior_log_sd)}"
    )
    return mark(
        said,
        (LEFT + RIGHT) / 2,
        y,
        rect(believed[0], y - 5, believed[1] - believed[0], 10, "prior"),
        line(x(ratio / reach), y, x(ratio * reach), y, "reach"),
        _dot(x(ratio), y, is_full=is_full),
        text(LEFT - 8, y + 4, plain(one.name), "tick end"),
        strategy="coefficients",
    )


def _dot(x: float, y: float, *, is_full: bool) -> Markup:
    return element("circle", cx=float(x), cy=float(y), r=3.6, class_="p" if is_full else "p hollow")
