"""The content of a valid calibration file, for tests of what reads one."""

import json
from pathlib import Path

from rlxjax.calibration import current_fingerprint

FILE = Path(__file__).parent.parent / "notebooks/data/calibration-cpu.json"


def content(**fingerprint):
    """Return the shipped calibration's content as if made on this machine, but for parts of its fingerprint."""
    here = current_fingerprint().model_dump()
    return json.loads(FILE.read_text(encoding="utf-8")) | {"fingerprint": {**here, **fingerprint}}
