"""Where a figure comes from."""

import enum


class Provenance(enum.StrEnum):
    """Where a coefficient comes from."""

    MEASURED = "measured"
    ARCH_DEFAULT = "arch default"
    DATA_SHEET = "data sheet"
    UNCALIBRATED = "uncalibrated"
