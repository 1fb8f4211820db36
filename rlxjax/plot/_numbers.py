"""Numbers as people write them, and the unit that times are shown in."""

import math
from collections.abc import Mapping
from typing import Any

#: Units of time in ns.
UNITS = {"s": 1e9, "ms": 1e6, "µs": 1e3, "ns": 1.0}


def plain(value: float) -> str:
    """Return a number as people write it.

    Examples:
        >>> plain(0.05), plain(250.0), plain(131072.0)
        ('0.05', '250', '131,072')
    """
    return f"{value:,.0f}" if abs(value) >= 1000.0 else f"{value:g}"


def three_digits(value: float) -> str:
    """Return a positive number with three digits, or all of a larger one.

    Examples:
        >>> three_digits(0.0304), three_digits(2.0), three_digits(12345.6)
        ('0.0304', '2.00', '12,346')
    """
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}"


def in_words(sizes: Mapping[str, Any]) -> str:
    """Return sizes by name.

    Examples:
        >>> in_words({"n_fft": 1024, "k": 16})
        'n_fft 1,024, k 16'
    """
    return ", ".join(f"{name} {plain(float(value))}" for name, value in sizes.items())


def unit_for(time_ns: float) -> str:
    """Return the largest unit of which a time is one at least.

    Examples:
        >>> unit_for(20.0), unit_for(5e5), unit_for(2e12)
        ('ns', 'µs', 's')
    """
    return next((unit for unit, ns in UNITS.items() if time_ns >= ns), "ns")
