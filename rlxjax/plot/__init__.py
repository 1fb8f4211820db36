"""Pictures of predictions and calibrations, on your matplotlib axis or on a new one.

`terms` draws the parts of a predicted time. `predicted_vs_measured`, `time_by`, `decision_map` and `coefficients` draw
a calibrated model. Each function returns the axis. Its data are in ns; its tick labels name their unit. `rows` returns
the numbers behind a picture.
"""

from ._axes import rows as rows
from ._parts import coefficients as coefficients
from ._parts import terms as terms
from ._times import decision_map as decision_map
from ._times import predicted_vs_measured as predicted_vs_measured
from ._times import time_by as time_by

__all__ = [name for name in dir() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
