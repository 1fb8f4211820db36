"""Whether Ctrl-C ends every command with status 130 and one line, at whatever moment it comes.

    python -m benchmarks.interrupts [--early 60] [--late 30] [--seed 0]

Commands are started, each with an empty RLXJAX_HOME, and get SIGINT at a random moment: of the first three seconds, or
later. One that had ended by then, or that ends with its own result as the signal comes, is drawn again, and so is one
that Python was still starting for: until `calibrate/interrupts.py` is imported, the signal is Python's. The table has
the number of both. Lines of progress and warnings on standard error, which a run has without a signal as well, are not
counted. The exit status is 1 if any other run did not end with 130 and one line that says so.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CALIBRATION = str(ROOT / "notebooks" / "data" / "calibration-cpu.json")
SAMPLES = str(ROOT / "docs" / "evidence" / "campaign-3-cpu.samples.jsonl.gz")
LONG = (
    "rlxjax calibrate --budget 40 --quiet",
    "rlxjax calibrate --budget 40 --quiet --json",
    f"rlxjax validate {CALIBRATION} --budget 30",
    "calibrate --budget 20 --only functions",
    "calibrate --budget 20 --only welch",
)
SHORT = (
    "rlxjax predict --batch 64",
    "rlxjax explain --batch 64 --json",
    "rlxjax advise jax.numpy:tanh jax.numpy:abs --arg f32[256,256] --measure",
    f"rlxjax report {CALIBRATION} -o report.html",
    f"rlxjax refit {SAMPLES} --out calibration.json",
)
EARLY_S, LATE_S, HANGS_S = 3.0, 30.0, 120.0
#: A run that ends well so soon after the signal had done its work when that came.
SOON_S = 0.5
#: Python needs less to import the first module of a command, `calibrate/interrupts.py`.
STARTING_S = 0.25
ENDED, FINISHED, STARTING = "130 and one line", "had finished", "Python was starting"


def started(arguments: Sequence[str], *, is_ignoring: bool = False, **options: Any) -> subprocess.Popen[str]:
    """Start Python with SIGINT as a terminal has it, also where this process ignores it, or ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if is_ignoring else signal.default_int_handler)
    try:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, *arguments], **pipes, **options)
    finally:
        signal.signal(signal.SIGINT, before)


def outcome(command: str, at_s: float) -> str:
    """Return what a signal at a moment does to a command."""
    with tempfile.TemporaryDirectory() as folder:
        process = started(
            ["-m", *command.split()],
            cwd=folder,
            env=os.environ | {"RLXJAX_HOME": f"{folder}/home", "PYTHONPATH": str(ROOT)},
        )
        try:
            process.communicate(timeout=at_s)
            return FINISHED
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        sent_s = time.monotonic()
        try:
            _, said = process.communicate(timeout=HANGS_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return f"hangs: {command} at {at_s:.2f} s"
        took_s = time.monotonic() - sent_s
    lines = [line for line in said.splitlines() if not re.match(r"warning: |[\w -]+: \d+\.\d s$", line)]
    if process.returncode == 130 and len(lines) == 1 and lines[0].startswith("interrupted"):
        return ENDED
    if process.returncode in (0, 1) and not lines and took_s < SOON_S:
        return FINISHED
    is_pythons = process.returncode == -signal.SIGINT or "KeyboardInterrupt" in said
    if at_s < STARTING_S and is_pythons and "cli.py" not in said:
        return STARTING
    return (
        f"status {process.returncode} after {took_s:.1f} s, {len(lines)} lines: {command} at {at_s:.2f} s: {lines[-3:]}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--early", type=int, default=60, help="signals in the first three seconds")
    parser.add_argument("--late", type=int, default=30, help="signals later")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draws = random.Random(options.seed)
    found: dict[str, Counter[str]] = {"early": Counter(), "late": Counter()}
    for when, count, commands, span_s in (
        ("early", options.early, LONG + SHORT, (0.0, EARLY_S)),
        ("late", options.late, LONG, (EARLY_S, LATE_S)),
    ):
        again = (FINISHED, STARTING)
        while sum(found[when].values()) - sum(map(found[when].get, again, (0, 0))) < count:
            result = outcome(draws.choice(commands), draws.uniform(*span_s))
            found[when][result] += 1
            if result not in (ENDED, *again):
                print(f"{when}: {result}", flush=True)
    names = [ENDED, "others", FINISHED, STARTING]
    print("|", " | ".join(["signals", *names]), "|\n|", "---|" * (1 + len(names)))
    failed = 0
    for when, counts in found.items():
        others = sum(counts.values()) - sum(counts[name] for name in names)
        failed += others
        print(f"| {when} |", " | ".join(str(others if name == "others" else counts[name]) for name in names), "|")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
