"""The page of a calibration: the verdict, what was measured, what changed, and of each model errors and pictures."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from rlxjax import plot
from rlxjax.calibration import (
    MACHINE_FIELDS,
    CalibratedModel,
    Calibration,
    CalibrationFile,
    ModelSection,
    explain,
    fingerprint_differences,
    load_calibration,
    sections_of_file,
)
from rlxjax.choices import Memory
from rlxjax.fit import LatencyModel
from rlxjax.models import BUILT_IN

from ..decisions import decided_here, in_words, is_by, row_of
from ..judge import ERROR_COLUMNS, said_of_pace, verdict_on, what_pays
from ..questions import flip_rows, flips_title, possible, reasons
from .changes import Measured, change_section, earlier_calibration, measured_beside, model_of
from .page import Section, Table, Verdict, drawn, page, rows_of, sentence

#: Values of the first input along which a picture goes.
ALONG = 36


def calibration_page(
    path: FilePath,
    command: str,
    workload: Mapping[str, int],
    samples: FilePath | None = None,
    against: FilePath | None = None,
    models: Sequence[LatencyModel] = tuple(BUILT_IN.values()),
) -> str:
    """Return the page of a calibration file as HTML; a model without these inputs is explained in the middle."""
    content, left_out, _ = sections_of_file(path, models)
    calibration = load_calibration(path, models)
    if not calibration.models:
        raise ValueError(f"{path}: holds no model that is known; measure one with `rlxjax calibrate`")
    given = None if samples is None else model_of(samples, calibration)
    known = {
        name: measured_beside(own, content.models[name], path, samples if name == given else None)
        for name, own in calibration.models.items()
    }
    sections = [
        Section("verdict", "Verdict", verdicts=[*_verdicts(content, calibration, left_out, workload)]),
        _what_was_measured(content, calibration),
    ]
    if against is not None:
        earlier, before = earlier_calibration(against, content, models)
        sections += [
            change_section(
                (earlier.models[name], content.models[name]), (before.of(name), calibration.of(name)), known[name][0]
            )
            for name in calibration.models
            if name in before.models
        ]
    for name, own in calibration.models.items():
        sections.append(_errors(name, content.models[name]))
        sections.append(_residuals(own, content.models[name], *known[name]))
        sections += _choices(own, known[name][0], workload)
        sections.append(_coefficients(own))
    sections += decided_sections(content, calibration)
    section = content.models[next(iter(calibration.models))]
    machine = section.fingerprint
    title = f"Calibration of {machine.cpu_model if machine.platform == 'cpu' else machine.device_kind}"
    return page(title, f"{section.created} · {machine.cores} cores · {machine.platform}", sections, command)


# --- The whole file ------------------------------------------------------------------------------


def _verdicts(
    content: CalibrationFile, calibration: Calibration, left_out: list[str], workload: Mapping[str, float]
) -> Iterator[Verdict]:
    for name, calibrated in calibration.models.items():
        section = content.models[name]
        judged = verdict_on(section.held_out, section.noise_floor, math.inf)  # the file has the caution
        cautions = list(dict.fromkeys([*judged.cautions, *section.cautions]))
        said = [*judged.said, *what_pays(calibrated, _sizes(calibrated, workload))]
        yield Verdict(not cautions, f"{name}: {'not ready' if cautions else 'ready'}.", said, cautions)
    if (machine := content.machine) is not None:
        said, cautions = said_of_pace(machine.pace, machine.fingerprint.cores) if machine.pace else ([], [])
        cautions = list(dict.fromkeys([*cautions, *machine.cautions]))
        if said or cautions:
            yield Verdict(not cautions, f"The machine: {'not as usual' if cautions else 'as usual'}.", said, cautions)
    if left_out:
        yield Verdict(False, "A part of the file is left out.", [], [f"{text}." for text in left_out])


def _what_was_measured(content: CalibrationFile, calibration: Calibration) -> Section:
    facts, tables = {}, []
    for name in calibration.models:
        own = content.models[name]
        taken, noise = own.samples, own.noise_floor
        facts[name] = {
            "made": own.created,
            "by": own.command,
            "timings": taken and f"{taken.timings:,} of {taken.workloads:,} cells in {taken.rounds} rounds",
            "noise": None if noise is None else f"{100 * noise:.1f} %",
            "fit": own.fit.message,
            "samples": taken and taken.file,
            "files that ran": ", ".join(own.given),
            **own.fingerprint.model_dump(mode="json"),
        }
        sizes = [{"size": size, "from": span.low, "to": span.high} for size, span in own.domain.items()]
        beyond = f"{name}: beyond these a prediction is an extrapolation"
        tables.append(Table(beyond, sizes, f"{name}: sizes that were timed"))
        for of, lines in {"not timed": own.skipped, "timings far off": own.fit.outliers}.items():
            tables.append(Table(f"{name}: {of}", [{of: line} for line in lines], f"{name}: {of}"))
    keys = dict.fromkeys(key for own in facts.values() for key, value in own.items() if value)
    rows = [{"what": key.replace("_", " ")} | {name: str(facts[name][key] or "") for name in facts} for key in keys]
    return Section("measured", "What was measured, and on what", tables=[Table("Each model", rows, ""), *tables])


def decided_sections(content: CalibrationFile, calibration: Calibration) -> Iterator[Section]:
    """Yield the section of what is remembered of choices on the machine of a calibration, if anything is."""
    rows = []
    for one in Memory().all():
        section = content.models.get(one.kind)
        if section and one.machine and not fingerprint_differences(one.machine, section.fingerprint, MACHINE_FIELDS):
            is_own = one.kind in calibration.models and is_by(one, calibration.of(one.kind))
            rows.append(row_of(one) | {"beside this calibration": is_own})
    if rows:
        said = (
            "Where the model was not sure, the alternatives were timed on this machine, and what was measured is "
            "remembered: later calls choose by it, and the model learns from it. A tie is between alternatives "
            "that the measurement does not tell apart: the model's favourite stays. What was decided beside another "
            "calibration is not used with this one."
        )
        yield Section("decided", "What was decided, by what", [said], tables=[Table("The newest first", rows, "")])


# --- Each model ----------------------------------------------------------------------------------


def _errors(name: str, section: ModelSection) -> Section:
    """Return the mean absolute errors as a table, which is open: it is what the page is about."""
    units = {heading: "" if field == "held_out_cells" else " (%)" for heading, field in ERROR_COLUMNS.items()}
    rows = [
        {"of": of, **{heading + units[heading]: getattr(own, field) for heading, field in ERROR_COLUMNS.items()}}
        for of, own in section.held_out.items()
    ]
    said = (
        "Mean absolute relative error of predictions. Held out is what a second fit never saw: that is the error to "
        "expect of what you did not time. The noise floor is how much two halves of the timings differ: errors near "
        "it, or below, cannot be told from noise."
    )
    table = Table(f"Errors of {name}", rows, "")
    return Section(f"{name}-errors", f"{name}: how far off predictions are", [said], tables=[table])


def _residuals(calibrated: CalibratedModel, section: ModelSection, measured: Measured | None, said: str) -> Section:
    name = calibrated.model.name
    ident, title = f"{name}-residuals", f"{name}: predicted against measured"
    if measured is None:
        return Section(ident, title, [said])
    variants, draws = np.asarray(measured.timings.runs.variant), {}
    for code in np.unique(variants).tolist():
        own = measured.some(variants == code)
        options = {"names": own.each("name"), "noise": section.noise_floor, "is_ratio": True}
        draws[calibrated.model.variants[code]] = partial(plot.predicted_vs_measured, calibrated, own.timings, **options)
    pictures, rows = drawn(draws)
    columns = {"of": measured.each("group"), "held out": measured.each("held_out"), "noise (%)": measured.noise}
    about = dict(zip(measured.each("name"), rows_of(columns), strict=True))
    rows = sorted(rows, key=lambda row: -abs(np.log(row["predicted / measured"])))
    off = np.mean([abs(row["predicted / measured"] - 1.0) for row in rows])
    inside = np.mean([row["from (ns)"] <= row["measured (ns)"] <= row["to (ns)"] for row in rows])
    sentences = [
        f"{said} A point is one of them: across is what it took, up is the prediction over that, so that 1 is right. A "
        "bar is the interval that holds a run with 90 %, and should reach the line at 1. The grey band is the noise of "
        "the timings: two halves of the same campaign differ so much in the mean.",
        f"Predictions are off by {100 * off:.1f} % in the mean, and {100 * inside:.0f} % of the measured times lie "
        "within their interval. The fit saw these timings; errors of what it never saw are in the table above.",
    ]
    table = Table(f"Every cell of {name}, the furthest off first", [{**row, **about[row["run"]]} for row in rows])
    return Section(ident, title, sentences, pictures, [table])


def _choices(calibrated: CalibratedModel, measured: Measured | None, asked: Mapping[str, float]) -> Iterator[Section]:
    """Yield the sections of a model with strategies to choose among: times, picks, and why one is picked."""
    model, name = calibrated.model, calibrated.model.name
    if len(model.strategies) < 2 or any(entry.is_list for entry in model.inputs.values()):
        return
    sizes, free = _sizes(calibrated, asked), [key for key, entry in model.inputs.items() if entry.default is None]
    first, second = free[0], next(iter(free[1:]), None)
    along = _values(calibrated, first, ALONG)
    if len(along) < 2 or len(calibrated.alternatives(**sizes)) < 2:
        return
    rest = {key: value for key, value in sizes.items() if key not in (first, second)}
    lengths = [{}] if second is None else [{second: n} for n in sorted({sizes[second], *calibrated.domain[second]})]
    timings = None if measured is None else measured.timings
    at = along if timings is None else np.union1d(along, timings.runs.inputs[first])
    time_by = partial(plot.time_by, calibrated, first, at, timings=timings, **rest)
    pictures, rows = drawn({_in_words(rest | own): partial(time_by, **own) for own in lengths})
    said = (
        "What a run takes by each strategy that gives the same result. Lines are predictions, dotted beyond what was "
        f"timed; a band holds a run with 90 %.{'' if timings is None else ' Points were measured, at the same sizes.'}"
    )
    table = Table(f"Time by {first} of every strategy", rows)
    yield Section(f"{name}-times", f"{name}: time by {first}", [said], pictures, [table])
    if second is not None and len(up := _values(calibrated, second, ALONG // 2)) > 1:
        over = {first: along, second: up}
        pictures, rows = drawn({_in_words(rest): partial(plot.decision_map, calibrated, over, **rest)})
        timed = [row["verdict"] != "undecided" for row in rows if row["timed"]]
        said = (
            "A cell has the colour of the strategy that beats every other one with 90 % at least, and is grey where "
            "none does. At a solid line the fastest one by prediction changes. Pale cells lie outside what was "
            f"measured; of the others {100 * np.mean(timed or [0.0]):.0f} % are decided."
        )
        table = Table(f"What is picked, by {first} and {second}", rows)
        yield Section(f"{name}-picks", f"{name}: what is picked where", [said], pictures, [table])
    explanation, decided = possible(calibrated, explain(calibrated, **sizes)), decided_here(calibrated, sizes)
    told, sized = reasons(explanation), _in_words(explanation.inputs)
    said = [
        f"The workload is {sized}. Each term begins where the one before it ends; the grey bar is their sum, with the "
        "interval that holds a run with 90 %.",
        f"{told[0]}.",
        *map(sentence, [*told[1:], *([] if decided is None else [in_words(decided)])]),
        *["The workload lies outside what was measured: all of this is extrapolated."] * (not explanation.in_domain),
    ]
    pictures, rows = drawn({sized: lambda: plot.terms(explanation)})
    tables = [
        Table(f"Parts of the time, {sized}", rows),
        Table(flips_title(explanation), flip_rows(explanation), "What would change the choice"),
    ]
    yield Section(f"{name}-terms", f"{name}: where the time goes", said, pictures, tables)


def _coefficients(calibrated: CalibratedModel) -> Section:
    name = calibrated.model.name
    pictures, rows = drawn({"Coefficients": lambda: plot.coefficients(calibrated)})
    said = (
        "Each coefficient over the median of the model's own prior, with the interval that holds it with 90 %. The "
        "pale bar is that prior, which is wide: what is believed of any machine. A fit may begin from a narrower one, "
        f"that of other machines. The timings settle {sum(row['provenance'] == 'measured' for row in rows)} of "
        f"{len(rows)}: their points are full. The others keep most of what the fit began from."
    )
    table = Table(f"Coefficients of {name}", rows)
    return Section(f"{name}-coefficients", f"{name}: coefficients", [said], pictures, [table])


def _in_words(sizes: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {float(size):,g}" for name, size in sizes.items()) or "all sizes"


def _sizes(calibrated: CalibratedModel, asked: Mapping[str, float]) -> Mapping[str, Any]:
    """Return the sizes that were asked for, where the model has these inputs, else those in the middle, lists empty."""
    inputs = calibrated.model.inputs
    if asked.keys() <= inputs.keys():
        return asked
    spans = {
        name: [()] if entry.is_list else _values(calibrated, name, 3)
        for name, entry in inputs.items()
        if entry.default is None or entry.is_list
    }
    return {name: values[len(values) // 2] for name, values in spans.items()}


def _values(calibrated: CalibratedModel, name: str, count: int) -> np.ndarray:
    """Return different values of an input from the least to the largest that was timed, by equal factors."""
    step, values = calibrated.model.inputs[name].step, np.geomspace(*calibrated.domain[name], count)
    return np.unique(np.maximum(np.round(values / step), 1) * step if step else values)
