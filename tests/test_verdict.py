"""What is said of a calibration: whether it is ready, what pays, at which pace; and how wide intervals become."""

import numpy as np
import pytest

from calibrate.fits import widened_spread
from calibrate.verdict import said_of_pace, verdict_on, what_pays
from rlxjax import prior_calibration
from rlxjax.calibration import ErrorSummary, Pace, Range
from rlxjax.fit import COVERED, COVERED_SDS


def summary(held_out=0.04, covered=0.9, cells=20):
    return ErrorSummary(
        fit=0.03,
        terms_alone=None,
        covered=covered,
        interior=None,
        edge=None,
        held_out=held_out,
        held_out_cells=cells,
        noise_floor=0.02,
        built_in=None,
    )


def test_small_errors_and_intervals_that_hold_are_ready_and_the_typical_error_is_that_of_all_cells():
    verdict = verdict_on("workloads", {"one": summary(0.02, cells=30), "two": summary(0.06, cells=10)}, 0.02)
    assert verdict.is_ready
    assert verdict.said == ["Typical error 3 % on workloads it never saw."]


@pytest.mark.parametrize(
    ("summaries", "noise", "said"),
    [
        ({"one": summary(held_out=0.3)}, 0.02, "off by 30 %"),
        ({"one": summary(covered=0.5)}, 0.02, "held 50 %"),
        ({"one": summary()}, 0.2, "noise of the timings is 20 %"),
        ({"one": summary()}, None, "noise of the timings is not known"),
        ({"one": summary(held_out=None, cells=0)}, 0.02, "No workloads were held out"),
    ],
)
def test_what_is_not_good_enough_is_a_caution_that_says_what_to_do(summaries, noise, said):
    verdict = verdict_on("workloads", summaries, noise)
    assert not verdict.is_ready
    assert said in verdict.cautions[0]
    assert "rlxjax calibrate" in verdict.cautions[0]


def test_functions_may_be_further_off():
    assert verdict_on("functions", {"one": summary(held_out=0.2)}, 0.02, most_error=0.25).is_ready


def test_the_pace_is_said_and_a_slow_or_a_busy_machine_is_a_caution():
    def said(usual, others, known=None):
        return said_of_pace(Pace(usual=usual, known=known, usual_ns={}, log_sd=0.05, others=others), 2)

    assert said(None, 0.0) == said(None, None) == ([], [])
    among = "It ran 1.9 times as fast as the slowest machine known, 0.8 times as fast as the fastest."
    assert said(None, 0.0, Range(low=0.8, high=1.9)) == ([among], [])
    (held,) = said(None, 0.0, Range(low=0.3, high=0.6)).cautions
    assert held.startswith("It ran at 60 % of the speed of the slowest machine that is known")
    assert said(0.98, 0.0) == (["This machine ran at 98 % of its usual speed."], [])
    (slow,) = said(0.72, 0.0).cautions
    assert slow.startswith("This machine ran at 72 % of its usual speed: times are for that pace")
    (busy,) = said(None, 0.9).cautions
    assert busy.startswith("Other programs kept 0.9 of 2 processors busy")


def test_the_sentence_names_a_batch_from_which_the_device_is_faster():
    calibration = prior_calibration("cpu")
    text = what_pays(calibration)
    assert text.startswith("Fused pays from batch ")
    first = int(text.split()[4].replace(",", ""))
    for batch in (first, 2 * first, 131_072):
        assert calibration.predict_ns("fused", batch, 256, 16) < calibration.predict_ns("fast", batch, 256, 16)


def test_intervals_hold_what_was_held_out_once_they_are_widened_and_never_get_narrower():
    rng = np.random.default_rng(0)
    variant, known_sd = np.repeat([0, 1], 50), np.full(100, 0.02)
    errors = rng.normal(0, np.where(variant == 0, 0.02, 0.3))
    wide = widened_spread(np.array([0.05, 0.05, 0.07]), variant, errors, known_sd)
    assert wide[0] == 0.05
    assert wide[2] == 0.07
    reach = COVERED_SDS * np.hypot(known_sd, wide[variant])
    assert np.mean(np.abs(errors) <= reach) >= COVERED
    assert 0.2 < wide[1] < 0.45
