"""The page about an advice: the verdict, the next command, the parts of the time, and the savings."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rlxjax import Advice, plot
from rlxjax.calibration import first_refusal, read_json
from rlxjax.choices import DECIDED
from rlxjax.units import bytes_text, number_text, time_text

from ..terminal import plain
from .page import Section, Table, Verdict, drawn, page, sentence

#: For each verdict: whether it is good news (None: neither good nor bad), and the words on the page.
_WORDS = {
    "fuse": (True, "Fuse: make them one program."),
    "group": (True, "Group: make some of them one program."),
    "keep": (True, "Keep: leave them as they are, one program each."),
    "undecided": (None, "Undecided."),
    "cannot model": (False, "The model cannot predict this."),
}
#: The smallest time in ns, and the largest number, that a file with an advice may contain.
LEAST_NS, MOST = 1e-3, 1e18
_REMEDY = "write one with `rlxjax advise ... --json > FILE`"


def advice_page(path: FilePath, command: str) -> str:
    advice, source = read_advice(path)
    names = [stage.name for stage in advice.stages]
    sections = [Section("verdict", "Verdict", verdicts=[_verdict(advice)]), _following(advice, names)]
    is_predicted = bool(advice.pair) and None not in [own.predicted_ns for own in advice.pair]
    if is_predicted and all(own.terms_ns for own in advice.pair):
        pictures, rows = drawn({"A call of all stages": lambda: plot.terms(advice)})
        said = (
            "The grey bar is the predicted time of a call of all stages, with its 90 % interval. Each part begins "
            "where the part above ends."
        )
        table = Table("Parts of the time, a call of all stages", rows)
        sections.append(Section("terms", "Where the time goes", [said], pictures, [table]))
    if advice.stages:
        rows = [
            {"stage": one.name, "predicted (ns)": one.predicted_ns, "measured (ns)": one.measured_ns}
            | {"largest part": one.limit, "peak (bytes)": one.peak_bytes}
            for one in advice.stages
        ]
        sections.append(Section("stages", "The stages", tables=[Table("Each stage, jitted by itself", rows, "")]))
    able = [own for own in advice.alternatives if not own.failed]
    if len(able) > 2:
        rows = [
            {"programs": one.name, "predicted (ns)": one.predicted_ns}
            | dict(zip(("from (ns)", "to (ns)"), one.predicted_interval_ns or (None, None), strict=True))
            | {"measured (ns)": one.measured_ns if advice.rounds else None, "peak (bytes)": one.peak_bytes}
            for one in able
        ]
        sections.append(Section("groupings", "The groupings", tables=[Table("The fastest, the best first", rows, "")]))
    if is_predicted:
        # A compiler does not report recomputed operations.
        kept = ("saved", "recomputed") if advice.target is None else ("saved",)
        fields = [own.name for own in dataclasses.fields(advice) if own.name.startswith(kept)]
        counts = {name.replace("_", " "): getattr(advice, name) for name in fields}
        counts |= {f"peak bytes, {own.name}": own.peak_bytes for own in advice.pair}
        rows = [{"what": k, "count": bytes_text(n) if "bytes" in k else f"{n:,}"} for k, n in counts.items()]
        table = Table("Counts per call; a negative number is a loss", rows, "")
        sections.append(Section("counts", "What one program saves", tables=[table]))
    subtitle = " · ".join(filter(None, (" → ".join(names), source and f"by {source}")))
    return page("Should they be one program?", subtitle, sections, command, "advice")


def read_advice(path: FilePath) -> tuple[Advice, str]:
    """Return the advice in a file, with control characters removed, and the name of its calibration."""
    content = _plain(read_json(path, None, ValueError, _REMEDY, "an advice"))
    try:
        advice = TypeAdapter(Advice).validate_python(content)
    except ValidationError as error:
        raise ValueError(f"{path}: {first_refusal(error)}; {_REMEDY}") from None
    for name, known in {"verdict": _WORDS, "by": DECIDED}.items():
        if (got := getattr(advice, name)) not in known:
            raise ValueError(f"{path}: {name}: expected one of {', '.join(known)}, got {got!r}; {_REMEDY}")
    times_ns = [time_ns for own in advice.pair for time_ns in (own.predicted_ns, own.measured_ns)]
    is_sound = all(time_ns is None or time_ns >= LEAST_NS for time_ns in times_ns)
    if not is_sound or not all(abs(number) <= MOST for number in _numbers(content)):
        raise ValueError(f"{path}: expected times of at least {LEAST_NS:g} ns, and numbers up to {MOST:g}; {_REMEDY}")
    source = content.get("calibration")
    return advice, source if isinstance(source, str) else ""


def _plain(content: Any) -> Any:
    if isinstance(content, dict):
        return {plain(name): _plain(value) for name, value in content.items()}
    if isinstance(content, list):
        return [*map(_plain, content)]
    return plain(content) if isinstance(content, str) else content


def _numbers(content: Any) -> Iterator[float]:
    if isinstance(content, (int, float)):
        yield content
    for value in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from _numbers(value)


def _following(advice: Advice, names: list[str]) -> Section:
    if advice.is_change and advice.code:
        return Section("code", "What to do next", ["Change your code:"], code=advice.code)
    word = "undecided" if advice.verdict == "undecided" else "always"
    where = f"on a machine with {advice.target}" if advice.target else "here"
    command = f"rlxjax advise {' '.join(names)} --arg ... --measure {word}   # times the programs {where}"
    said = "Measure the answer; give each function as module:function:"
    return Section("code", "What to do next", [said], code=command)


def _verdict(advice: Advice) -> Verdict:
    is_good, word = _WORDS[advice.verdict]
    is_good = None if advice.reason_code in ("tie", "no_matter") else is_good
    said, by_model = [sentence(f"{advice.reason} ({advice.reason_code})")], ""
    if advice.by != "model":
        by_model = ", by the model"
        said.append(f"Decided by {DECIDED[advice.by]}{': a tie' if advice.is_tie else ''}.")
    if advice.probability is not None:
        gain = f"saves more than {time_text(advice.min_gain_ns)} a call" if advice.min_gain_ns else "is faster"
        grouped = "One program" if advice.compared == "together" else advice.compared.replace("+", " + ")
        said.append(f"{grouped} {gain} with a probability of {100 * advice.probability:.0f} %{by_model}.")
    if advice.rounds:
        took = {own.name: own.measured_ns for own in advice.pair if own.measured_ns}
        told = [f"{name} {time_text(time_ns)}" for name, time_ns in took.items()]
        if len(told) == 2 and not advice.is_tie:
            apart_ns, other_ns = took.values()
            told.append(f"a speedup of {number_text(apart_ns / other_ns, 2)} ×")
        told = ", ".join(told) or "only other groupings, in the table of groupings"
        said.append(f"Measured: {told}{advice.paying_back}.")
    if advice.flip:
        said.append(sentence(advice.flip))
    cautions = ["Some counts lie outside the measured range: the prediction extrapolates."] * advice.extrapolated
    if advice.target is not None:  # no measurement of this machine is part of the advice
        cautions = [f"For {advice.target}: {advice.stands_on or 'its compiler says so'}."]
    return Verdict(is_good, word, said, cautions)
