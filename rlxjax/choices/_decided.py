"""What a choice between plans for stages says: the form that runs, why, and what the forms took."""

import math
from typing import NamedTuple

from rlxjax._values import whole_ns

from ._advice import Measured
from ._choice import Choice
from ._contender import Question


class Decided(NamedTuple):
    """A choice between the stages apart and groupings of them, each by its name.

    Attributes:
        choice: between them.
        question: that it answers.
    """

    choice: Choice
    question: Question

    @property
    def is_by_model(self) -> bool:
        """Whether nothing but the model decided."""
        return self.choice.by == "model"

    @property
    def grouping(self) -> str:
        """What is compared with the stages apart: the form that runs, or the best of the others."""
        return self.choice.name if self.choice.name != "apart" else self._others()[0]

    def measured(self) -> Measured | None:
        """Return what the forms took; None where none was timed."""
        of = {own.name: own for own in self.choice.alternatives}
        if not self.times_ns():
            return None
        grouped, one = of[self.grouping], of.get("together")
        return Measured(
            of["apart"].measured_ns,
            grouped.measured_ns,
            grouped.compile_s,
            self.choice.rounds,
            None if one is None or one is grouped else one.measured_ns,
        )

    def times_ns(self) -> dict[str, float]:
        """Return what each form took that was timed."""
        return {own.name: own.measured_ns for own in self.choice.alternatives if own.measured_ns is not None}

    def why(self) -> tuple[str, str]:
        """Return the code and the sentence of what is not by the model."""
        choice, name = self.choice, self.choice.name
        runs, (stay, are) = _in_words(name), ("stay", "are") if name == "apart" else ("stays", "is")
        if choice.by == "pinned":
            return "pinned", f"{runs} {stay}, which a person pinned; `rlxjax decisions` shows and changes it"
        failed = "".join(f"; {own.name} {own.failed}" for own in choice.alternatives if own.failed)
        took = self.times_ns()
        timed = [other for other in self._others() if other in took]
        if name not in took or not timed:
            return ("measured_slower" if name == "apart" else "measured_faster"), f"{runs} {are} all that runs{failed}"
        # Of the stages apart, if they were timed, a grouping says more.
        other = "apart" if "apart" in timed and not choice.is_tie else timed[0]
        times = [f"{_in_words(one)} {whole_ns(took[one])} ns" for one in (name, other)]
        costs, predicted = ([self._cost_ns(one, by) for one in (name, other)] for by in ("measured_ns", "predicted_ns"))
        extras_ns = [own.extra_ns for own in self.question.contenders]
        priced = ", with the gain that is asked and memory at its price" if any(extras_ns) else ""
        if choice.is_tie:
            share = f"{100 * choice.regret:.3g} %"
            is_within = max(costs) <= (1.0 + choice.regret) * min(costs)
            near = f"within {share} of each other as measured" if is_within else "not told apart by measuring"
            said = f"{times[0]} and {times[1]}{priced} are {near}: a tie; {runs} {are} chosen"
            return "tie", f"{said}{failed}"
        said = f"as measured {times[0]} a call, {times[1]}{priced}"
        code = "measured_slower" if name == "apart" else "measured_faster"
        saved_ns, asked_ns = took[name] - took[other], took[name] - took[other] + costs[1] - costs[0]
        if costs[1] < costs[0]:
            said += "; round by round the first is the better one"
        elif name == "apart" and saved_ns > 0:
            code, saved = "no_gain", f"{_in_words(other)} saves {whole_ns(saved_ns)} ns a call as measured"
            said = f"{saved}, of {whole_ns(asked_ns)} ns asked"
        against = "; the model predicts the opposite" if predicted[1] < predicted[0] < math.inf else ""
        return code, f"{said}{against}{failed}"

    def _others(self) -> list[str]:
        """Return the names of what was not chosen: the best first, by what is measured, else predicted."""

        def rank(name: str) -> tuple[bool, bool, float]:
            own = self.choice[name]
            by = "predicted_ns" if own.measured_ns is None else "measured_ns"
            return bool(own.failed), own.measured_ns is None, self._cost_ns(name, by)

        return sorted((own.name for own in self.choice.alternatives if own.name != self.choice.name), key=rank)

    def _cost_ns(self, name: str, by: str) -> float:
        time_ns = getattr(self.choice[name], by)
        extra_ns = next(own.extra_ns for own in self.question.contenders if own.name == name)
        return math.inf if time_ns is None else time_ns + extra_ns


def _in_words(name: str) -> str:
    return {"apart": "the stages apart", "together": "one program"}.get(name, name)
