"""The section of what was decided by measuring on a calibration's machine."""

from collections.abc import Iterator

from calibrate.remembered import is_by, summary
from rlxjax.calibration import MACHINE_FIELDS, Calibration, CalibrationFile, fingerprint_differences
from rlxjax.choices import Memory

from .page import Section, Table


def decided_sections(content: CalibrationFile, calibration: Calibration) -> Iterator[Section]:
    """Yield the section of what is remembered of choices on the machine of a calibration, if anything is."""
    rows = []
    for one in Memory().all():
        section = content.models.get(one.kind)
        if section is None or fingerprint_differences(one.machine, section.fingerprint, MACHINE_FIELDS):
            continue
        said = summary(one)
        is_own = one.kind in calibration.models and is_by(one, calibration.of(one.kind))
        rows.append(
            {"workload": one.label, "model": one.kind, "chosen": said["chosen"], "by": said["by"]}
            | {"a tie": "yes" if one.is_tie else "no", "takes (ns)": said["time_ns"]}
            | {"next best": said["next_best"], "its time (ns)": said["next_best_ns"]}
            | {"beside this calibration": "yes" if is_own else "no"}
        )
    if rows:
        said = (
            "Where the model was not sure, the alternatives were timed on this machine, and what was measured is "
            "remembered: later calls choose by it, and the model learns from it. A tie is between alternatives "
            "that the measurement does not tell apart: the model's favourite stays. What was decided beside another "
            "calibration is not used with this one."
        )
        yield Section("decided", "What was decided, by what", [said], tables=[Table("The newest first", rows, "")])
