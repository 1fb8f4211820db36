"""Texts for times, intervals, bytes and probabilities: `19 ms (12 to 32)`, `134 MB`, `over 99 %`."""

import math
import sys

TIME_UNITS = (("s", 1e9), ("ms", 1e6), ("us", 1e3), ("ns", 1.0))
BYTE_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


def time_text(time_ns: float, digits: int = 3) -> str:
    """Return a text for a time in s, ms, us or ns; the unit is the largest unit in which the time is at least 1.

    Args:
        time_ns: a time in ns, positive or negative.
        digits: number of significant digits; the result shows at least three digits of a number of 100 or more.

    Examples:
        >>> time_text(19_378_384.0), time_text(508_710, digits=2), time_text(-950.0), time_text(0.0)
        ('19.4 ms', '509 us', '-950 ns', '0 ns')
    """
    unit, size = _unit(time_ns, TIME_UNITS)
    return f"{number_text(time_ns / size, digits)} {unit}"


def interval_text(time_ns: float, low_ns: float, high_ns: float) -> str:
    """Return a text for a time and its interval; all three numbers are in the unit of the time.

    Args:
        time_ns: a time in ns.
        low_ns: the lower end of the interval, in ns.
        high_ns: the upper end of the interval, in ns.

    Examples:
        >>> interval_text(19_378_384.0, 11_557_900.0, 32_490_484.0)
        '19 ms (12 to 32)'
        >>> interval_text(590_000.0, 350_000.0, 1_090_000.0)
        '590 us (350 to 1,090)'
    """
    unit, size = _unit(time_ns, TIME_UNITS)
    time, low, high = (number_text(one / size, 2) for one in (time_ns, low_ns, high_ns))
    return f"{time} {unit} ({low} to {high})"


def bytes_text(count: float) -> str:
    """Return a text for a number of bytes, in the largest unit (GB, MB, kB or B) in which the number is at least 1.

    Args:
        count: number of bytes.

    Examples:
        >>> bytes_text(8), bytes_text(134_217_728), bytes_text(17_179_869_184)
        ('8 B', '134 MB', '17.2 GB')
    """
    unit, size = _unit(count, BYTE_UNITS)
    return f"{number_text(count / size, 3)} {unit}"


def number_text(value: float, digits: int) -> str:
    """Return a text for a number with some significant digits, but without a power of ten: `12`, `0.35`, `1,090`.

    Args:
        value: any number.
        digits: number of significant digits; a number of 100 or more shows at least three digits.

    Examples:
        >>> number_text(12.34, 2), number_text(0.348, 2), number_text(1_093.0, 2), number_text(1e-6, 2)
        ('12', '0.35', '1,090', '0')
    """
    if not abs(value) < 1e15 or (abs(value) < 1e3 and value == int(value)):
        return f"{value:z.3g}"
    digits = max(digits, 3) if abs(value) >= 99.5 else digits
    value = float(f"{value:.{digits - 1}e}")
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    if decimals > digits + 2:  # less than a thousandth of the unit
        return "0"
    return f"{value:,.{max(decimals, 0)}f}"


def probability_text(probability: float) -> str:
    """Return a probability in per cent, without a claim of certainty.

    Args:
        probability: a number from 0 to 1.

    Examples:
        >>> probability_text(0.643), probability_text(0.9999), probability_text(0.005)
        ('64 %', 'over 99 %', 'under 1 %')
    """
    if probability < 0.01:
        return "under 1 %"
    return "over 99 %" if probability > 0.99 else f"{100.0 * probability:.0f} %"


def printable(text: str, plain: str) -> str:
    """Return a text, or a plain text if standard output has no such characters.

    Args:
        text: any text.
        plain: a text in ASCII that says the same.

    Examples:
        >>> printable("→", "->")
        '→'
    """
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return plain
    return text


def _unit(value: float, units: tuple[tuple[str, float], ...]) -> tuple[str, float]:
    rounded = float(f"{value:.3g}")
    return next(((unit, size) for unit, size in units if abs(rounded) >= size), units[-1])
