"""Before and after: whether jitted stages should be one program, and why."""

from ._advice import Advice as Advice
from ._advice import Measured as Measured
from ._advice import StageCost as StageCost
from ._advise import advise as advise
