"""Before and after: whether jitted stages should be one program, and why.

`advise` takes the stages and their arguments and returns an `Advice`; `rank_targets` says what one function takes of
devices that need not be there, `target_times` what programs that were compiled for one take. A `Memory` keeps what was
decided and measured: each choice is `Remembered` with every `Alternative`.
"""

from ._advice import DECIDED as DECIDED
from ._advice import Advice as Advice
from ._advice import Grouping as Grouping
from ._advice import Measured as Measured
from ._advice import StageCost as StageCost
from ._advise import advise as advise
from ._choice import Choice as Choice
from ._choice import Considered as Considered
from ._choice import measure_word as measure_word
from ._choose import choose as choose
from ._contender import Contender as Contender
from ._contender import Question as Question
from ._content import digest as digest
from ._content import digest_of_model as digest_of_model
from ._decide import decide as decide
from ._decide import recalled as recalled
from ._memory import Loaded as Loaded
from ._memory import Memory as Memory
from ._of_variants import forecast_of_variants as forecast_of_variants
from ._rank_targets import RankedTarget as RankedTarget
from ._rank_targets import TargetRanking as TargetRanking
from ._rank_targets import rank_targets as rank_targets
from ._remembered import Alternative as Alternative
from ._remembered import Remembered as Remembered
from ._target import target_times as target_times

__all__ = [name for name in dir() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
