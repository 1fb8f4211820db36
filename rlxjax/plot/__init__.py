"""Pictures of predictions and calibrations, drawn on your matplotlib axis or in a new figure.

`terms` draws the parts of a predicted time. `predicted_vs_measured`, `time_by`, `decision_map` and `coefficients` draw
a calibrated model. Each of these functions returns the axis. Times on an axis are in ns, and their tick labels include
a unit. `rows` returns the numbers that a picture shows.
"""

from ._axes import rows as rows
from ._parts import coefficients as coefficients
from ._parts import terms as terms
from ._times import decision_map as decision_map
from ._times import predicted_vs_measured as predicted_vs_measured
from ._times import time_by as time_by

__all__ = [name for name in dir() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
