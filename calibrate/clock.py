"""Deadlines."""

import time


class Deadline:
    """A point in time that a phase has to end by, and whether the user asked to stop."""

    def __init__(self, at_s: float):
        self.at_s = at_s
        self.interrupted = False

    def left_s(self) -> float:
        """Seconds until the deadline; 0 once the user has asked to stop."""
        return 0.0 if self.interrupted else self.at_s - time.perf_counter()
