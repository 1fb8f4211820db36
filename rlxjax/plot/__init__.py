"""Pictures of a calibration, on a matplotlib axis of yours or on a new one; matplotlib comes with rlxjax[plot].

Of a calibrated model: `predicted_vs_measured` beside your timings, `time_by` one of its inputs, `decision_map` over
two, and its `coefficients`. Of an explanation: `terms`. Each asks the calibration for what it draws, and returns the
axis. Times are drawn in ns; ticks name their unit. `rows` has the figures behind a picture.
"""

from ._axes import rows as rows
from ._parts import coefficients as coefficients
from ._parts import terms as terms
from ._times import decision_map as decision_map
from ._times import predicted_vs_measured as predicted_vs_measured
from ._times import time_by as time_by

__all__ = [name for name in dir() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
