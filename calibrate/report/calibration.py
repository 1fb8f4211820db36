"""The page about a calibration: verdict, next commands, measurements, changes, and each model's errors and pictures."""

import dataclasses
import math
import shlex
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
    default_calibration_path,
    explain,
    fingerprint_differences,
    load_calibration,
    sections_of_file,
)
from rlxjax.choices import Memory
from rlxjax.fit import LatencyModel
from rlxjax.models import BUILT_IN, FUNCTIONS, GPU_KERNELS, WELCH

from ..decisions import decided_here, in_words, is_by, row_of
from ..judge import error_rows, said_of_pace, verdict_on, what_pays
from ..questions import finite, reasons
from .changes import Measured, change_section, earlier_calibration, measured_beside, model_of
from .page import Section, Table, Verdict, drawn, page, rows_of, sentence

#: A picture shows this many values of the first input.
ALONG = 36


def calibration_page(
    path: FilePath,
    command: str,
    workload: Mapping[str, int],
    samples: FilePath | None = None,
    against: FilePath | None = None,
    models: Sequence[LatencyModel] = tuple(BUILT_IN.values()),
) -> str:
    """Return the page about a calibration file. Models with the inputs of `workload` are explained at these sizes."""
    content, left_out, _ = sections_of_file(path, models)
    calibration = load_calibration(path, models)
    if not calibration.models:
        raise ValueError(f"{path}: holds no known model; measure one with `rlxjax calibrate`")
    # Your functions come before the workload that ships as an example.
    order = sorted(calibration.models, key=lambda name: name not in (FUNCTIONS.name, GPU_KERNELS.name))
    calibration = dataclasses.replace(calibration, models={name: calibration.of(name) for name in order})
    given = None if samples is None else model_of(samples, calibration)
    known = {
        name: measured_beside(own, content.models[name], path, samples if name == given else None)
        for name, own in calibration.models.items()
    }
    sections = [
        Section("verdict", "Verdict", verdicts=[*_verdicts(content, calibration, left_out, workload)]),
        _what_to_do(calibration, path),
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
    subtitle = f"{section.created} · {machine.cores} cores · {machine.platform}"
    return page(title, subtitle, sections, command)


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
        yield Verdict(False, "The page leaves out a part of the file.", [], [f"{text}." for text in left_out])


def _what_to_do(calibration: Calibration, path: FilePath) -> Section:
    is_saved = path.absolute() == default_calibration_path(calibration.fingerprint["platform"]).absolute()
    file = "" if is_saved else f" {shlex.quote(str(path))}"
    of_function = f"{file and f' --calibration{file}'} --arg 'f32[2048,1024]' mymodule:scale"
    commands = {
        "the work and the time of your function": (FUNCTIONS, f"profile{of_function}"),
        "one program or two?": (FUNCTIONS, f"advise{of_function} mymodule:energy"),
        "the fastest strategy for Welch peaks": (WELCH, f"predict{file} --batch 1024 --n-fft 256 --k 16"),
        "does the calibration still hold?": (None, f"validate{file}"),
        "measure again: for longer, on an idle machine": (None, "calibrate --budget 300"),
    }
    known = {what: said for what, (of, said) in commands.items() if of is None or of.name in calibration.models}
    code = "\n".join(f"# {what}\nrlxjax {command}" for what, command in known.items())
    return Section("next", "What to do next", code=code)


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
        beyond = f"{name}: a prediction beyond these sizes is an extrapolation"
        tables.append(Table(beyond, sizes, f"{name}: sizes that were timed"))
        for of, lines in {"not timed": own.skipped, "timings far from the fit": own.fit.outliers}.items():
            tables.append(Table(f"{name}: {of}", [{of: line} for line in lines], f"{name}: {of}"))
    keys = dict.fromkeys(key for own in facts.values() for key, value in own.items() if value)
    rows = [{"what": key.replace("_", " ")} | {name: str(facts[name][key] or "") for name in facts} for key in keys]
    return Section("measured", "What was measured, and on what", tables=[Table("Each model", rows, ""), *tables])


def decided_sections(content: CalibrationFile, calibration: Calibration) -> Iterator[Section]:
    """Yield a section with the choices remembered on the calibrated machine, if there are any."""
    rows = []
    for one in Memory().all():
        section = content.models.get(one.kind)
        if section and one.machine and not fingerprint_differences(one.machine, section.fingerprint, MACHINE_FIELDS):
            is_own = one.kind in calibration.models and is_by(one, calibration.of(one.kind))
            rows.append(row_of(one) | {"beside this calibration": is_own})
    if rows:
        said = (
            "The model was not sure of these choices, so rlxjax timed the alternatives on this machine. Later calls "
            "use the remembered times. In a tie, the favourite of the model runs. A choice that was measured with "
            "another calibration is not used with this calibration."
        )
        yield Section("decided", "Remembered choices", [said], tables=[Table("The newest first", rows, "")])


# --- Each model ----------------------------------------------------------------------------------


def _errors(name: str, section: ModelSection) -> Section:
    """Return the section that shows the mean absolute errors of a model's predictions."""
    said = (
        "The table shows the mean absolute relative error of predictions. A second fit leaves the held-out cells out: "
        "expect their error for your own work. The noise floor is the difference between two halves of the timings. "
        "An error near the noise floor cannot be told apart from noise."
    )
    table = Table(f"Errors of {name}", error_rows(section), "")
    return Section(f"{name}-errors", f"{name}: errors of predictions", [said], tables=[table])


def _residuals(calibrated: CalibratedModel, section: ModelSection, measured: Measured | None, said: str) -> Section:
    name = calibrated.model.name
    ident, title = f"{name}-residuals", f"{name}: predicted against measured"
    if measured is None:
        return Section(ident, title, [said])
    variants, draws = np.asarray(measured.timings.runs.variant), {}
    for code in np.unique(variants).tolist():
        own = measured.some(variants == code)
        options = {"names": own.each("name"), "noise": section.noise_floor}
        draws[calibrated.model.variants[code]] = partial(plot.predicted_vs_measured, calibrated, own.timings, **options)
    pictures, rows = drawn(draws)
    columns = {"of": measured.each("group"), "held out": measured.each("held_out"), "noise (%)": measured.noise}
    about = dict(zip(measured.each("name"), rows_of(columns), strict=True))
    rows = sorted(rows, key=lambda row: -abs(np.log(row["predicted / measured"])))
    off = np.mean([abs(row["predicted / measured"] - 1.0) for row in rows])
    inside = np.mean([row["from (ns)"] <= row["measured (ns)"] <= row["to (ns)"] for row in rows])
    sentences = [
        f"{said} Each point is a cell: its measured time, and its predicted time divided by the measured time. A "
        "point at 1 is a correct prediction. A bar is the 90 % interval, which should reach the line at 1. The grey "
        "band is the noise floor.",
        f"Predictions are off by {100 * off:.1f} % on average, and {100 * inside:.0f} % of the measured times lie "
        "within their interval. The fit saw these timings; the table above has the errors of held-out cells.",
    ]
    table = Table(f"Every cell of {name}, the furthest off first", [{**row, **about[row["run"]]} for row in rows])
    return Section(ident, title, sentences, pictures, [table])


def _choices(calibrated: CalibratedModel, measured: Measured | None, asked: Mapping[str, float]) -> Iterator[Section]:
    """For a model with several strategies, yield the sections with times, the map of decisions, and one explanation."""
    model, name = calibrated.model, calibrated.model.name
    if len(model.strategies) < 2:
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
        "Each line is the predicted time of a strategy, with its 90 % interval, dotted beyond the timed sizes. All "
        f"strategies give the same result.{'' if timings is None else ' Points are measured times at the same sizes.'}"
    )
    table = Table(f"Time by {first} of every strategy", rows)
    yield Section(f"{name}-times", f"{name}: time by {first}", [said], pictures, [table])
    if second is not None and len(_values(calibrated, second, ALONG)) > 1:
        pictures, rows = drawn({_in_words(rest): partial(plot.decision_map, calibrated, **rest)})
        timed = [row["verdict"] != "undecided" for row in rows if row["timed"]]
        said = (
            "A cell has the colour of the strategy that is the fastest with a probability of at least 90 %. A cell is "
            "grey if no strategy reaches 90 %. At a solid line, the fastest predicted strategy changes. Pale cells "
            f"lie outside the timed sizes; {100 * np.mean(timed or [0.0]):.0f} % of the other cells are decided. The "
            "map shows the sizes around which the decision changes."
        )
        table = Table(f"The fastest strategy, by {first} and {second}", rows)
        yield Section(f"{name}-picks", f"{name}: the fastest strategy", [said], pictures, [table])
    explanation, decided = finite(explain(calibrated, **sizes)), decided_here(calibrated, sizes)
    told, sized = reasons(explanation), _in_words(explanation.inputs)
    said = [
        f"The workload is {sized}. The grey bar is the predicted time, with its 90 % interval. Each part begins where "
        "the part above ends.",
        f"{told[0]}.",
        *map(sentence, [*told[1:], *([] if decided is None else [in_words(decided)])]),
        *["The workload lies outside the timed sizes: these times are extrapolated."] * (not explanation.in_domain),
    ]
    pictures, rows = drawn({sized: lambda: plot.terms(explanation)})
    table = Table(f"Parts of the time, {sized}", rows)
    yield Section(f"{name}-terms", f"{name}: where the time goes", said, pictures, [table])


def _coefficients(calibrated: CalibratedModel) -> Section:
    name = calibrated.model.name
    pictures, rows = drawn({"Coefficients": lambda: plot.coefficients(calibrated)})
    said = (
        "Each point is a coefficient divided by the median of its prior, with its 90 % interval. The pale bar is the "
        "prior, which is wide because it covers all machines. The timings determine "
        f"{sum(row['provenance'] == 'measured' for row in rows)} of {len(rows)} coefficients, whose points are filled. "
        "The other coefficients keep most of their prior."
    )
    table = Table(f"Coefficients of {name}", rows)
    return Section(f"{name}-coefficients", f"{name}: coefficients", [said], pictures, [table])


def _in_words(sizes: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {float(size):,g}" for name, size in sizes.items()) or "all sizes"


def _sizes(calibrated: CalibratedModel, asked: Mapping[str, float]) -> Mapping[str, Any]:
    """Return the given sizes if the model has inputs of these names, else the middle timed sizes."""
    inputs = calibrated.model.inputs
    if asked.keys() <= inputs.keys():
        return asked
    spans = {name: _values(calibrated, name, 3) for name, entry in inputs.items() if entry.default is None}
    return {name: values[len(values) // 2] for name, values in spans.items()}


def _values(calibrated: CalibratedModel, name: str, count: int) -> np.ndarray:
    """Return different values of an input, from the smallest to the largest timed value, with equal ratios."""
    step, (low, high) = calibrated.model.inputs[name].step, calibrated.domain[name]
    values = (np.geomspace if low > 0.0 else np.linspace)(low, high, count)
    return np.unique(np.maximum(np.round(values / step), 1) * step if step else values)
