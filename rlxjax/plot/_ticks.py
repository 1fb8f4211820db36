"""Ticks of logarithmic axes. Imports matplotlib: imported when a picture is drawn."""

from matplotlib.ticker import LogFormatter

from ._numbers import plain


class PlainLogFormatter(LogFormatter):
    """Plain numbers of a unit, where matplotlib would label a tick at all."""

    def __init__(self, unit: float = 1.0):
        super().__init__()
        self.unit = unit

    def __call__(self, x: float, pos: int | None = None) -> str:
        """Return the label of a tick."""
        return plain(x / self.unit) if super().__call__(x, pos) else ""
