"""What is to be chosen between: alternatives as what runs, what a model says of them, and how to decide."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlxjax._numerics import temperature_from_sd
from rlxjax._values import by_value
from rlxjax.calibration import CalibratedModel
from rlxjax.fit import SURE

#: What a choice may lose, and the milliseconds of timing, unless a caller says.
REGRET, LIMIT_MS = 0.02, 200.0


@by_value
class Contender(NamedTuple):
    """One alternative, as what runs.

    Attributes:
        name: of it.
        content: digest of what it runs.
        fn: that is given to the caller.
        call: of no arguments, that is timed.
        runs: gives those of the latency model, by variant and inputs, whose times add up to its own.
        extra_ns: what it costs beside its time.
        make: compiles it; the first call does unless given.
        failed: why it cannot run; empty of one that can.
    """

    name: str
    content: str
    fn: Callable[..., Any]
    call: Callable[[], Any]
    runs: Callable[[], tuple[tuple[str, Mapping[str, float]], ...]] = tuple
    extra_ns: float = 0.0
    make: Callable[[], Any] | None = None
    failed: str = ""


class Forecast(NamedTuple):
    """What a model says of alternatives.

    Attributes:
        time_ns: of each, `[n]`; infinite of one that it knows nothing of.
        low_ns: lower end of the interval that holds it with 90 %, `[n]`.
        high_ns: upper end, `[n]`.
        sd_ns: standard deviation of the difference of each two, `[n, n]`.
        in_domain: whether each lies within what was measured, `[n]`; the others are extrapolated.
    """

    time_ns: np.ndarray
    low_ns: np.ndarray
    high_ns: np.ndarray
    sd_ns: np.ndarray
    in_domain: np.ndarray

    def chances(self, extra_ns: np.ndarray, place: int, regret: float) -> np.ndarray:
        """Return the probability that each is not faster than one of them by more than the regret, `[n]`."""
        costs, sd_ns = self.time_ns + extra_ns, self.sd_ns[place]
        margins_ns = costs - costs[place] / (1.0 + regret)
        is_doubtful = (sd_ns > 0.0) & np.isfinite(sd_ns)
        odds = np.divide(margins_ns, temperature_from_sd(sd_ns), out=np.full(len(costs), np.inf), where=is_doubtful)
        return np.where(np.isfinite(sd_ns), 0.5 + 0.5 * np.tanh(0.5 * odds), 0.5)


@by_value
class Question(NamedTuple):
    """What is to be chosen between, and how.

    Attributes:
        contenders: the alternatives.
        kind: "functions", or the name of the latency model whose runs they are.
        label: the workload in words.
        workload: what is the same of all of them, for JSON: sizes, dtypes.
        calibrated: the model that predicts; None where there is none.
        forecast: what it says, of a model that may have learned more; None where it says nothing of these.
        measure: "never", "undecided" or "always".
        regret: relative difference that does not count.
        limit_ms: of timing, compiling apart.
        check: whether alternatives that are run have to give the same results.
        devices: that hold the arguments.
        runner: version of the programs, as JSON writes it; a model learns from those of one version alone.
        sure: probability from which on the model rules an alternative out.
    """

    contenders: Sequence[Contender]
    kind: str
    label: str
    workload: Mapping[str, Any]
    calibrated: CalibratedModel | None
    forecast: Callable[[CalibratedModel], Forecast | None]
    measure: str
    regret: float = REGRET
    limit_ms: float = LIMIT_MS
    check: bool = True
    devices: Sequence[Any] = ()
    runner: Any = None
    sure: float = SURE
