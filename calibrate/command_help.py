"""What the help of every command ends with: an example, and the exit statuses."""

from collections.abc import Mapping
from typing import NamedTuple


class Ending(NamedTuple):
    """What stands below the options of a command.

    Attributes:
        examples: command lines.
        statuses: what each exit status means, those of every command (`SHARED`) left out.
    """

    examples: tuple[str, ...]
    statuses: Mapping[int, str]


#: Exit statuses that mean the same everywhere.
SHARED = {0: "done", 2: "bad input, said in one line", 130: "interrupted"}
_KEPT = {130: "interrupted; what was measured until then is printed and written"}
_FITTED = {1: "a fit did not converge, and was not written", 3: "with --strict: not good enough"}

ENDINGS = {
    "calibrate": Ending(("rlxjax calibrate", "rlxjax calibrate --only functions --budget 30"), _FITTED | _KEPT),
    "refit": Ending(("rlxjax refit calibration-cpu.functions.samples.jsonl --verbose",), _FITTED),
    "validate": Ending(
        ("rlxjax validate", "rlxjax validate calibration.json --quiet"),
        {0: "it holds", 1: "it drifted", 2: "another machine's, or bad input"},
    ),
    "predict": Ending(("rlxjax predict --batch 8192 --n-fft 256 --k 16",), {}),
    "explain": Ending(("rlxjax explain --batch 8192 --n-fft 256 --k 16",), {}),
    "profile": Ending(
        ("rlxjax profile stages:scale --arg 'f32[2048,1024]'",),
        {1: "part of what it does is not counted, and named"},
    ),
    "advise": Ending(
        ("rlxjax advise stages:scale stages:energy --arg 'f32[2048,1024]' --measure",),
        {0: "fuse or keep", 1: "undecided, or it cannot be modelled"},
    ),
    "report": Ending(
        ("rlxjax report", "rlxjax report calibration.json -o report.html --against earlier.json"),
        {0: "the page is written", 2: "bad input, or a place that cannot be written"},
    ),
}
OVERVIEW = (
    "Examples:\n  rlxjax calibrate\n  rlxjax profile mymodule:loss --arg 'f32[2048,1024]'\n"
    "  rlxjax advise mymodule:scale mymodule:energy --arg 'f32[2048,1024]'\n\n"
    "Each command has a help of its own, with an example and its exit statuses: rlxjax advise -h"
)


def epilog(command: str) -> str:
    """Return the text below the options of a command, empty if nothing is known of it."""
    if command not in ENDINGS:
        return ""
    examples, statuses = ENDINGS[command]
    lines = ["Example:" if len(examples) == 1 else "Examples:", *(f"  {example}" for example in examples)]
    lines += ["", "Exit status:", *(f"  {code}: {what}" for code, what in sorted((SHARED | {**statuses}).items()))]
    return "\n".join(lines)
