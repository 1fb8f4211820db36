"""Two processes of one job choose the same, whoever of them holds the arguments, and one that is left alone says so."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path


def test_two_processes_of_a_job_choose_the_same_and_the_one_that_is_left_says_so(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    here = Path(__file__).parent
    env = {**os.environ, "RLXJAX_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(here.parent)}
    command = [sys.executable, "-W", "error::UserWarning", str(here / "two_processes.py")]
    begun = [
        subprocess.Popen(
            [*command, str(rank), address], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=240) for process in begun]
    assert begun[0].returncode == 0, said
    first, second = ({what: own for what, *own in map(json.loads, _answers(out))} for out, _ in said)
    for what in ("local 8", "local 16"):  # one of them measures, the other takes its answer
        assert sorted([first[what][1], second[what][1]]) == ["measured", "remembered"]
        assert first[what][0] == second[what][0]
        assert first[what][2:] == second[what][2:]
    for what, by in (("shared", "measured"), ("shared again", "remembered"), ("placed", "measured")):
        assert first[what] == second[what]
        assert first[what][1] == by
    assert "'wrong' differs from" in first["wrong"][0]
    assert first["wrong"] == second["wrong"]
    others = [what for what in first if what.startswith("other")]
    assert len(others) == 5
    for what in others:
        assert "ask different questions" in first[what][0]
        assert first[what] == second[what]
    (reason,) = first["killed"]
    assert reason.startswith("args: another process, which holds a part of the arguments, has ended or does not")
    assert "killed" not in second


def _answers(out):
    """Return the lines that a process answers; its collectives print others."""
    return [line for line in out.splitlines() if line.startswith('["')]
