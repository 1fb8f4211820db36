"""Ctrl-C: status 130 and one line, whenever it comes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: A command that is interrupted once, and that asks itself for another one where the first is heeded.
COMMAND = """
import signal, sys, types
from calibrate import interrupts
cli = sys.modules["calibrate.cli"] = types.ModuleType("calibrate.cli")
def main():
    with interrupts.last_act(lambda: print("kept", flush=True) or "go on with --resume"):
        deadline = types.SimpleNamespace(interrupted=False)
        with interrupts.heeded(deadline):
            if sys.argv[1] == "heeded":
                signal.raise_signal(signal.SIGINT)
                print("asked", deadline.interrupted, flush=True)
        if sys.argv[1] != "none":
            signal.raise_signal(signal.SIGINT)
    print("done")
cli.main = main
interrupts.main()
signal.raise_signal(signal.SIGINT)
"""


def started(arguments, *, is_ignoring=False, **options):
    """Start Python with SIGINT as a terminal has it, also where this process ignores it, or ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if is_ignoring else signal.default_int_handler)
    try:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, *arguments], **pipes, **options)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("after_s", [0.7, 1.5])
def test_a_command_ends_while_it_is_starting(after_s, tmp_path):
    environment = os.environ | {"RLXJAX_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    process = started(["-m", "rlxjax", "calibrate", "--budget", "60", "--quiet"], env=environment)
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    (line,) = said.splitlines()  # which says where samples are, once there are some
    assert line.partition(";")[0] == "interrupted"


def test_work_may_stop_by_itself_and_what_is_done_is_kept():
    said = "interrupted; go on with --resume\n"
    for what, is_ignored, status, stdout, stderr in (
        ("at once", False, 130, "kept\n", said),
        ("heeded", False, 130, "asked True\nkept\n", said),
        ("none", False, 0, "done\n", ""),
        ("at once", True, 0, "done\n", ""),  # as a shell starts a job in the background
    ):
        process = started(["-c", COMMAND, what], is_ignoring=is_ignored)
        assert process.communicate() == (stdout, stderr), what
        assert process.returncode == status, what
