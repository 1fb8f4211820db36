"""The strategies of the reference, and the names that a person may type for them."""

from collections.abc import Mapping

from rlxjax._values import FrozenDict
from rlxjax.gate._codes import NamedCode, normalised


class ReferenceStrategy(NamedCode):
    """The strategies of the reference, in the order in which ties are resolved."""

    ULTRA = "ultra"
    FAST = "fast"
    RLX = "rlx"
    LEARNED = "learned"


AUTO = "auto"

_ALIASES: Mapping[str, str] = FrozenDict(
    {
        **dict.fromkeys(("", AUTO), AUTO),
        **dict.fromkeys(("ultra", "ultra-fast", "ultra-fast-rustfft", "1seg"), ReferenceStrategy.ULTRA),
        **dict.fromkeys(
            ("fast", "streaming", "fast-streaming", "fast-streaming-rustfft", "rustfft", "2seg"),
            ReferenceStrategy.FAST,
        ),
        **dict.fromkeys(("rlx", "rlx-compiled", "compiled", "gpu", "fused"), ReferenceStrategy.RLX),
        **dict.fromkeys(("learned", "learned-compiled"), ReferenceStrategy.LEARNED),
    }
)


def parse_welch_peaks_strategy(name: str) -> str:
    """Return the strategy that a name means, or "auto". Case and `-`/`_` do not matter.

    Args:
        name: of a strategy, or one of its aliases.

    Raises:
        ValueError: a name that means none.

    Examples:
        >>> print(parse_welch_peaks_strategy("Ultra_Fast"), parse_welch_peaks_strategy(""))
        ultra auto
    """
    strategy = _ALIASES.get(normalised(name))
    if strategy is None:
        known = ", ".join(alias for alias in _ALIASES if alias)
        raise ValueError(f"strategy: expected one of {known}, got {name!r}")
    return strategy
