"""The content of a valid calibration file, for tests of what reads one."""

import json
from pathlib import Path

from rlxjax._files import digest_of
from rlxjax.calibration import current_fingerprint

FILE = Path(__file__).parent.parent / "notebooks/data/calibration-cpu.json"


def content(**fingerprint):
    """Return the shipped calibration's content as if made on this machine, but for parts of its fingerprint."""
    here = current_fingerprint().model_dump()
    found = json.loads(FILE.read_text(encoding="utf-8"))
    for section in (found["machine"], *found["models"].values()):
        section["fingerprint"] = {**here, **fingerprint}
    return found


def sealed(found):
    """Return a calibration's content with the digests of it and of its sections, as a writer makes them."""
    models = {name: _with_digest(own) for name, own in found["models"].items()} if found.get("models") else {}
    whole = found | ({"models": models} if models else {})
    if isinstance(whole.get("machine"), dict):
        whole["machine"] = _with_digest(whole["machine"])
    return _with_digest(whole)


def _with_digest(found):
    return found | {"digest": digest_of(found)} if isinstance(found, dict) else found
