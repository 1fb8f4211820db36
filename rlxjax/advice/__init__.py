"""Before and after: whether jitted stages should be one program, and why.

`advise` takes the stages and their arguments and returns an `Advice`.
"""

from ._advice import Advice as Advice
from ._advice import Grouping as Grouping
from ._advice import Measured as Measured
from ._advice import StageCost as StageCost
from ._advise import advise as advise

__all__ = [name for name in dir() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
