"""What a person can act on after a calibration: whether it is ready, what pays where, and at which pace it was made."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from rlxjax.calibration import Calibration, ErrorSummary, Pace
from rlxjax.models import WELCH

from .workloads import SHOWN_K, SHOWN_N_FFT

#: A calibration is ready if the mean error on what the fit never saw, of workloads and of functions, and the noise of
#: its timings are no larger.
MOST_ERROR, MOST_FUNCTION_ERROR, MOST_NOISE = 0.10, 0.25, 0.08
#: It is if no less of what was held out lies within its 90 % interval, and if so few were held out that chance tells.
LEAST_COVERED, FEW_HELD_OUT = 0.75, 10
#: Processors that others may use, and the least speed, in units of the usual one.
MOST_OTHERS, LEAST_PACE = 0.25, 0.85
#: The largest batch of which it is said which strategy is the fastest.
MOST_ROWS = 2**17


class Verdict(NamedTuple):
    """Whether a calibration is good enough, in sentences.

    Attributes:
        said: what it is worth.
        cautions: what is not good enough, and what to do; none if it is ready.
    """

    said: list[str]
    cautions: list[str]

    @property
    def is_ready(self) -> bool:
        """Whether it is good enough."""
        return not self.cautions


def verdict_on(
    what: str, summaries: Mapping[str, ErrorSummary], noise_floor: float | None, most_error: float = MOST_ERROR
) -> Verdict:
    """Return the verdict on the fit of one model.

    Args:
        what: was timed, as "workloads".
        summaries: errors by strategy or family.
        noise_floor: of the timings.
        most_error: of predictions that are good enough.
    """
    again = "run `rlxjax calibrate` again, on an idle machine or with a larger --budget"
    out = [summary for summary in summaries.values() if summary.held_out is not None and summary.held_out_cells]
    cells = np.array([summary.held_out_cells for summary in out], float)
    cautions = []
    if not out:
        return Verdict([], [f"No {what} were held out, so that nothing says how good predictions are: {again}."])
    error = float(cells @ [summary.held_out for summary in out] / cells.sum())
    covered = float(cells @ [summary.covered or 0.0 for summary in out] / cells.sum())
    if error > most_error:
        cautions.append(f"Predictions are off by {100 * error:.0f} % on {what} that the fit never saw: {again}.")
    if cells.sum() >= FEW_HELD_OUT and covered < LEAST_COVERED:
        cautions.append(
            f"Intervals of 90 % held {100 * covered:.0f} % of the {what} that the fit never saw, and were widened: "
            f"{again}."
        )
    if noise_floor is None or noise_floor > MOST_NOISE:
        noise = "is not known" if noise_floor is None else f"is {100 * noise_floor:.0f} %"
        cautions.append(f"The noise of the timings {noise}: {again}.")
    return Verdict([f"Typical error {100 * error:.0f} % on {what} it never saw."], cautions)


def said_of_pace(pace: Pace, processors: int) -> Verdict:
    """Return what is to be said of the machine's speed while it was timed."""
    said, cautions = [], []
    if pace.usual is not None:
        share = f"This machine ran at {100 * pace.usual:.0f} % of its usual speed"
        if pace.usual < LEAST_PACE:
            cautions.append(f"{share}: times are for that pace.")
        else:
            said.append(f"{share}.")
    if (known := pace.known) is not None:
        if known.high < LEAST_PACE:
            share = f"It ran at {100 * known.high:.0f} % of the speed of the slowest machine that is known"
            cautions.append(f"{share}: something may hold it back.")
        elif pace.usual is None:
            fastest = f"{known.low:.1f} times as fast as the fastest"
            said.append(f"It ran {known.high:.1f} times as fast as the slowest machine known, {fastest}.")
    if pace.others is not None and pace.others > MOST_OTHERS:
        cautions.append(
            f"Other programs kept {pace.others:.1f} of {processors} processors busy: times are for that load; run "
            "`rlxjax calibrate` again once they have ended."
        )
    return Verdict(said, cautions)


def what_pays(calibration: Calibration, n_fft: int = SHOWN_N_FFT, k: int = SHOWN_K) -> str:
    """Return a sentence on the batches from which the device is faster than the host."""
    calibrated = calibration.of(WELCH.name)
    batches = np.unique(np.round(np.geomspace(1, MOST_ROWS, 200)))
    on_host = np.asarray(calibrated.predict_ns("fast", batches, n_fft, k))
    on_device = np.asarray(calibrated.predict_ns("fused", batches, n_fft, k))
    pays = on_device < on_host
    if pays.all() or not pays.any():
        return f"{'Fused' if pays.all() else 'The host'} is the faster one at every batch of n_fft {n_fft}."
    last = int(np.flatnonzero(~pays).max())
    if last + 1 == len(batches):
        first = int(np.flatnonzero(pays).min())
        return f"Fused pays from batch {batches[first]:,.0f} on at n_fft {n_fft}, but not at the largest ones."
    return f"Fused pays from batch {batches[last + 1]:,.0f} up at n_fft {n_fft}."
