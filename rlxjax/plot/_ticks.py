"""Ticks of logarithmic axes. Imports matplotlib: imported when a picture is drawn."""

from collections.abc import Callable

from matplotlib.ticker import LogFormatter


class LogTicks(LogFormatter):
    """Labels of values, where matplotlib would label a tick at all."""

    def __init__(self, said: Callable[[float], str]):
        super().__init__()
        self.said = said

    def __call__(self, x: float, pos: int | None = None) -> str:
        """Return the label of a tick."""
        return self.said(x) if super().__call__(x, pos) else ""
