"""Choose the fastest of several alternatives: by prediction if the model is sure, otherwise by measuring.

`choose` takes functions and returns a `Choice`; each alternative in it is a `Way`. `advise` says which stages should be
compiled together as one program, and returns an `Advice`. A `Memory` is a folder of measured choices. `clear_choices`
empties the cache of this process. `decide` chooses among the alternatives of any `Work`.
"""

from rlxjax.targets import RankedTarget as RankedTarget
from rlxjax.targets import TargetRanking as TargetRanking
from rlxjax.targets import rank_targets as rank_targets

from ._advice import DECIDED as DECIDED
from ._advice import Advice as Advice
from ._advice import Grouping as Grouping
from ._advise import advise as advise
from ._choose import choose as choose
from ._choose import clear_choices as clear_choices
from ._choose import decide as decide
from ._choose import recalled as recalled
from ._description import digest as digest
from ._description import digest_of_model as digest_of_model
from ._programs import Work as Work
from ._programs import predicted_variants as predicted_variants
from ._store import Memory as Memory
from ._way import Choice as Choice
from ._way import Way as Way
from ._way import measure_word as measure_word

__all__ = [name for name in dir() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
