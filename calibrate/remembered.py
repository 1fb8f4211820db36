"""What explanations and pages say of choices that were decided by measuring, and are remembered."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .terminal import ns

if TYPE_CHECKING:
    from rlxjax.calibration import CalibratedModel
    from rlxjax.choices import Remembered


def decided_here(calibrated: "CalibratedModel", sizes: Mapping[str, float]) -> "Remembered | None":
    """Return the newest choice for some sizes that holds on this machine, beside the predictions of this model."""
    from rlxjax.calibration import current_fingerprint, fingerprint_differences
    from rlxjax.choices import Memory

    def is_own(one: "Remembered") -> bool:
        return any(run["inputs"] == sizes for own in one.alternatives for run in own.runs)

    here = current_fingerprint()
    found = (one for one in Memory().all(kind=calibrated.model.name) if is_by(one, calibrated) and is_own(one))
    return next((one for one in found if not fingerprint_differences(one.machine, here)), None)


def is_by(one: "Remembered", calibrated: "CalibratedModel") -> bool:
    """Return whether a calibrated model predicted the alternatives of a choice."""
    from rlxjax.choices import digest_of_model

    return one.calibration == digest_of_model(calibrated)


def by_whom(one: "Remembered") -> str:
    """Return by what the alternative that runs was chosen."""
    return "measured" if one.pinned is None else "pinned"


def summary(one: "Remembered") -> dict[str, Any]:
    """Return what JSON says of a choice in a few keys."""
    return {
        "key": one.key,
        "kind": one.kind,
        "label": one.label,
        "chosen": one.choice.name,
        "by": by_whom(one),
        "is_tie": one.is_tie,
        "time_ns": one.choice.time_ns,
        "next_best": None if one.next_best is None else one.next_best.name,
        "next_best_ns": None if one.next_best is None else one.next_best.time_ns,
        "created": one.created,
    }


def in_words(one: "Remembered") -> str:
    """Return what was measured, and what runs by that, in a sentence."""
    timed = sorted((own.time_ns, own.name) for own in one.alternatives if own.time_ns is not None)
    times = ", ".join(f"{name} {ns(time_ns)} ns" for time_ns, name in timed)
    tie = " (a tie)" if one.is_tie else ""
    pinned = "" if one.pinned is None else f"; pinned, and runs: {one.choice.name}"
    return f"measured here: {times}; chosen: {one.by_content(one.chosen).name}{tie}{pinned}"
