"""Numbers as a reader of the page sees them, with their units."""

import datetime
import math

from calibrate.printing import number

#: Units of time, and their nanoseconds.
_TIMES = (("s", 1e9), ("ms", 1e6), ("µs", 1e3), ("ns", 1.0))


def duration(time_ns: float) -> str:
    """Return a time with the unit in which it has few digits.

    Examples:
        >>> duration(1e4), duration(2.5e6), duration(0.5), duration(999_700)
        ('10 µs', '2.5 ms', '0.5 ns', '1 ms')
    """
    rounded_ns = float(f"{time_ns:.3g}")
    unit, size = next((pair for pair in _TIMES if rounded_ns >= pair[1]), _TIMES[-1])
    return f"{number(rounded_ns / size)} {unit}"


def size(value: float) -> str:
    """Return a number of rows or samples, in thousands where these are round.

    Examples:
        >>> size(64), size(1000), size(131072)
        ('64', '1k', '131,072')
    """
    return f"{value / 1e3:g}k" if value >= 1e3 and value % 1e3 == 0 else f"{value:,.0f}"


def percent(share: float, decimals: int = 0) -> str:
    """Return a share in per cent, one decimal at least below ten.

    Examples:
        >>> percent(0.0234), percent(0.92)
        ('2.3 %', '92 %')
    """
    value = 100.0 * share
    return f"{value:.{max(decimals, 1) if abs(value) < 9.95 else decimals}f} %"


def chance(probability: float) -> str:
    """Return a probability; one that rounding would make certain as a bound.

    Examples:
        >>> chance(0.874), chance(0.9967), chance(0.9999), chance(1e-5)
        ('87 %', '99.7 %', 'over 99.9 %', 'under 0.1 %')
    """
    if probability > 0.999:
        return f"over {percent(0.999, 1)}"
    return f"under {percent(0.001)}" if probability < 0.001 else percent(probability, int(probability > 0.99))


def times(factor: float) -> str:
    """Return a factor, with three digits.

    Examples:
        >>> times(1.0), times(12.34), times(1234.5)
        ('1.00 ×', '12.3 ×', '1,234 ×')
    """
    return f"{factor:,.0f} ×" if factor >= 99.95 else f"{factor:#.3g} ×"


def signed(value: float) -> str:
    """Return a number with its sign and one decimal.

    Examples:
        >>> signed(2.34), signed(-0.51), signed(-0.01)
        ('+2.3', '−0.5', '0.0')
    """
    text = f"{value:+.1f}".replace("-", "−")
    return "0.0" if text in ("+0.0", "−0.0") else text


def give_or_take(log_sd: float) -> str:
    """Return one standard deviation of a logarithm: in per cent where it is small, else as a factor.

    Examples:
        >>> give_or_take(0.05), give_or_take(math.log(2))
        ('± 5.0 %', '× or ÷ 2.0')
    """
    return f"± {percent(log_sd)}" if log_sd < 0.5 else f"× or ÷ {math.exp(log_sd):.1f}"


def date(text: str) -> str:
    """Return a date as a sentence has it; a text that is none as it is.

    Examples:
        >>> date("2026-11-25T22:43:21+00:00"), date("yesterday")
        ('25 November 2026, 22:43 UTC', 'yesterday')
    """
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        return text
    return f"{moment.day} {moment:%B %Y, %H:%M} {moment.tzname() or ''}".strip()


def plain(name: str) -> str:
    """Return the name of a term or coefficient in words.

    Examples:
        >>> plain("launch_and_sync_ns"), plain("copy_bytes_per_ns")
        ('launch and sync', 'copy bytes per ns')
    """
    return (name if name.endswith("_per_ns") else name.removesuffix("_ns")).replace("_", " ")


def unbroken(said: str) -> str:
    """Return a text in which no line ends between a number and its unit."""
    for unit in ("%", "ns", "×"):
        said = said.replace(f" {unit}", f"\u00a0{unit}")
    return said
