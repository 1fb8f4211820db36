"""Plans for stages as alternatives: the stages apart, one program of all, and the groupings that promise the most."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlxjax.calibration import CalibratedModel, Calibration, predict_profiles
from rlxjax.fusion import StagePlan
from rlxjax.models import FUNCTIONS

from ._arguments import filled
from ._contender import Contender, Forecast, Question
from ._content import content_of
from ._of_functions import (
    SURE_OF_FUNCTIONS,
    check_repeatable,
    devices_of,
    forecast_of_programs,
    in_words,
    runs_of,
    where_of,
)
from ._plans import Plans
from ._stages import Span, composed

#: The most plans that are considered beside the stages apart.
MOST_PLANS = 6


def question_of_stages(
    plans: Plans,
    functions: Sequence[Callable[..., Any]],
    args: tuple[Any, ...],
    calibrated: CalibratedModel,
    options: Mapping[str, Any],
    *,
    teaches: bool,
) -> Question:
    """Return the question which of the plans of stages is to run, whose times may teach the model.

    Which plans are considered is by the calibration alone, whatever was learned since: else no measurement of them
    would be found again.
    """
    arrays = functools.cache(lambda: filled(args))
    is_plain = len(functions) == 1  # it runs where it is not jitted

    def program(span: Span) -> Any:
        return plans.groups[span].fn

    @functools.cache
    def traced(span: Span) -> Any:
        return program(span).trace(*plans.groups[span].args)

    def contender(plan: StagePlan) -> Contender:
        name, programs = plans.name(plan), [traced(span) for span in spans_of(plan)]
        if options["measure"] != "never":
            for one in programs:
                check_repeatable(name, one)
        fn = functions[0] if is_plain and plan == plans.apart else composed([program(span) for span in spans_of(plan)])
        asked_ns = 0.0 if plan == plans.apart else plans.min_gain_ns
        return Contender(
            name,
            content_of(programs),
            fn,
            call=lambda: fn(*arrays()),
            runs=(lambda: runs_of([one.profile for one in plans.predictions(plan)])) if teaches else tuple,
            extra_ns=asked_ns + plans.price * plan.peak_bytes,
            make=None if fn is functions[0] else lambda: [one.lower().compile() for one in programs],
        )

    def forecast(known: CalibratedModel) -> Forecast:
        times = plans.found
        if known is not calibrated:
            profiles = [one.profile for one in times.predictions]
            times = predict_profiles(Calibration({FUNCTIONS.name: known}, None, {}), profiles)
        return forecast_of_programs(times, [plans.places(plan) for plan in considered])

    others = [plan for plan in plans.plans if plan != plans.apart]
    considered = [plans.apart, *others[:MOST_PLANS]]
    if plans.fits and plans.together not in considered:
        considered[-1] = plans.together
    stages = f"the parts of {plans.groups[0, len(plans.names) - 1].name}" if is_plain else ", ".join(plans.names)
    return Question(
        [contender(plan) for plan in considered],
        FUNCTIONS.name,
        f"{stages}, of {in_words(args)}",
        where_of(args) | {"stages": len(functions)},
        calibrated,
        forecast,
        devices=devices_of(args),
        sure=SURE_OF_FUNCTIONS,
        **options,
    )


def spans_of(plan: StagePlan) -> list[Span]:
    """Return the first and the last stage of each program of a plan."""
    return [(group[0], group[-1]) for group in plan.groups]
