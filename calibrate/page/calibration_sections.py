"""The page of a calibration: the verdict, what was measured, what changed, and the pictures."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path as FilePath

from calibrate.explanation import possible
from calibrate.judge import Verdict, said_of_pace, verdict_on, what_pays
from calibrate.outcome import ERROR_COLUMNS
from rlxjax.calibration import (
    CalibratedModel,
    Calibration,
    CalibrationFile,
    ModelSection,
    Samples,
    load_calibration,
    sections_of_file,
)
from rlxjax.models import FUNCTIONS, WELCH

from .batches import batch_picture
from .changes import change_picture, earlier_calibration, welch_of
from .coefficients import coefficient_picture
from .decisions import decision_picture
from .document import page, picture_section, verdict
from .markup import Markup, element, joined, paragraphs
from .measured import measured_beside
from .panels import Picture
from .residuals import residual_picture
from .tables import Figure, Table, facts
from .waterfall import explanation_picture
from .words import date, percent, size


def calibration_page(
    path: FilePath,
    *,
    command: str,
    workload: Mapping[str, int],
    samples: FilePath | None = None,
    against: FilePath | None = None,
    unsealed: bool = False,
) -> str:
    """Return the page of a calibration file as HTML.

    Args:
        path: of the file.
        command: that makes the page, for its foot.
        workload: batch, n_fft and k of what is explained.
        samples: what was timed; the file beside the calibration that it names unless given.
        against: an earlier calibration of the same machine.
        unsealed: also take a file that was edited by hand.

    Raises:
        ValueError: a file that is no calibration, or holds no Welch peaks; samples or an earlier calibration that are
            none or of another machine; a workload that cannot be. One line with the mend.
    """
    (content, _), calibration = sections_of_file(path, unsealed=unsealed), load_calibration(path, unsealed=unsealed)
    calibrated = welch_of(calibration, path)
    section = content.models[WELCH.name]
    measured, measured_said = measured_beside(section, calibrated, path, samples)
    sections = [
        ("verdict", "Verdict", _verdicts(content, calibration)),
        ("measured", "What was measured, and on what", _measured_section(content, section)),
    ]
    if against is not None:
        earlier, before = earlier_calibration(against, section)
        sections.append(picture_section(change_picture(earlier, before, section, calibrated)))
    sections.append(("errors", "How far off predictions are", _errors(section, ERROR_COLUMNS, "strategy")))
    pictures: Iterable[Picture] = (
        residual_picture(measured, measured_said, section.held_out),
        batch_picture(calibrated, measured),
        decision_picture(calibrated),
        explanation_picture(possible(calibration.explain(**workload, model=WELCH.name))),
        coefficient_picture(calibrated),
    )
    sections += [picture_section(picture) for picture in pictures]
    if FUNCTIONS.name in calibration.models:
        functions = _functions(calibration.of(FUNCTIONS.name), content)
        sections.append(("functions", "Functions", functions))
    machine = section.fingerprint
    title = f"Calibration of {machine.cpu_model if machine.platform == 'cpu' else machine.device_kind}"
    subtitle = f"{date(section.created)} · {machine.cores} cores · {machine.platform}"
    return page(title, subtitle, sections, command)


def verdicts_of(content: CalibrationFile, calibration: Calibration) -> dict[str, Verdict]:
    """Return what is to be said of each model that the job times: cautions of the file among it."""
    found = {}
    for name, what, most in ((WELCH.name, "workloads", MOST_ERROR), (FUNCTIONS.name, "functions", MOST_FUNCTION_ERROR)):
        if (section := content.models.get(name)) is None:
            continue
        judged = verdict_on(what, section.held_out, section.noise_floor, most)
        said, cautions = list(judged.said), [*judged.cautions, *section.cautions]
        if name == WELCH.name:
            said.append(what_pays(calibration))
            if (machine := content.machine) is not None:
                pace = (
                    Verdict([], []) if machine.pace is None else said_of_pace(machine.pace, machine.fingerprint.cores)
                )
                said, cautions = [*said, *pace.said], [*cautions, *pace.cautions, *machine.cautions]
        found[name] = Verdict(said, list(dict.fromkeys(cautions)))
    return found


def _verdicts(content: CalibrationFile, calibration: Calibration) -> Markup:
    words = {WELCH.name: "Welch peaks", FUNCTIONS.name: "Functions"}
    return joined(
        verdict(one.is_ready, f"{words[name]}: {'ready' if one.is_ready else 'not ready'}.", one.said, one.cautions)
        for name, one in verdicts_of(content, calibration).items()
    )


def _measured_section(content: CalibrationFile, section: ModelSection) -> Markup:
    machine, flags = section.fingerprint, section.fingerprint.thread_flags
    pairs = [
        ("Processor", f"{machine.cpu_model}, {machine.machine}, {machine.cores} cores"),
        ("Device", f"{machine.device_count} × {machine.device_kind} ({machine.platform})"),
        ("Software", f"JAX {machine.jax}, jaxlib {machine.jaxlib}, NumPy {machine.numpy}, Python {machine.python}"),
        ("Thread flags", ", ".join(f"{name}={value}" for name, value in flags.items()) or "none"),
        ("Made", date(section.created)),
        ("Timings", _timings(section.samples, "workloads")),
        ("Timings of functions", _timings(_samples_of(content, FUNCTIONS.name), "functions")),
        ("Noise of the timings", "" if section.noise_floor is None else percent(section.noise_floor)),
        ("Fit", section.fit.message),
        ("Learned FFTs", ", ".join(f"{one.file} (n_fft {one.n_fft})" for one in section.learned_ffts)),
    ]
    rows = [
        [name.replace("*", " × "), Figure(size(entry.low), entry.low), Figure(size(entry.high), entry.high)]
        for name, entry in section.domain.items()
    ]
    domain = Table(
        "The sizes that were timed: beyond them a prediction is an extrapolation", ("size", "from", "to"), rows
    )
    skipped = [("Workloads that were not timed", section.skipped), ("Timings far off", section.fit.outliers)]
    return joined(
        (
            facts(pairs),
            element("p", "Command: ", element("code", section.command)) if section.command else None,
            domain.folded("Sizes that were timed"),
            *(_listed(heading, names) for heading, names in skipped),
        )
    )


def _samples_of(content: CalibrationFile, model: str) -> Samples | None:
    section = content.models.get(model)
    return None if section is None else section.samples


def _timings(samples: Samples | None, what: str) -> str:
    if samples is None:
        return ""
    of = f"{samples.timings:,} timings of {samples.workloads:,} {what}"
    return f"{of} in {samples.rounds} rounds: {samples.file}"


def _listed(heading: str, names: list[str]) -> Markup | None:
    if not names:
        return None
    summary = element("summary", f"{heading} ({len(names)})")
    return element("details", summary, element("ul", *(element("li", name) for name in names)))


def _errors(section: ModelSection, columns: Mapping[str, str], what: str) -> Markup:
    """Return the mean absolute errors as a table, which is open: it is what the page is about."""
    rows = [
        [name, *(_error(getattr(one, field)) for field in columns.values())] for name, one in section.held_out.items()
    ]
    said = (
        "Mean absolute relative error of predictions. Held out is what a second fit never saw: that is the error to "
        "expect on sizes that you did not time. The noise floor is how much two halves of the timings differ: errors "
        "near it, or below, cannot be told from noise."
    )
    table = Table(f"Errors by {what}", (what, *columns), rows)
    return joined((paragraphs([said]), table.markup()))


def _error(value: float | None) -> str | Figure:
    if value is None or math.isnan(value):
        return ""
    return Figure(f"{value:,}" if isinstance(value, int) else percent(value), value)


def _functions(calibrated: CalibratedModel, content: CalibrationFile) -> Markup:
    section = content.models[FUNCTIONS.name]
    picture = coefficient_picture(calibrated, "function-coefficients")
    _, _, drawn = picture_section(picture)
    errors = _errors(section, ERROR_COLUMNS, "family")
    return joined((errors, element("h3", "Coefficients of the functions model"), drawn))
