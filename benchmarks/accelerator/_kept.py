"""Shared code of a run's sections: a folder of whole files, compiled texts, and times of single calls."""

import gzip
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks._common import write
from calibrate.campaign import affordable
from calibrate.machine import time_micro
from calibrate.measure import Ready, made_ready, measure_rounds
from calibrate.samples import SampleLog, samples_path
from calibrate.terminal import Deadline
from rlxjax.calibration import current_fingerprint
from rlxjax.clock import QUARTILE, mean_ns, visit_ns
from rlxjax.fit import Cell, Suite

STARTED_S = time.perf_counter()
#: Visits of a call that is timed alone, and repeats of a row of piped calls.
VISITS, REPEATS = 9, 5
#: The target ns of a row of calls, and the least and most calls of a row.
ROW_NS, LEAST_CALLS, MOST_CALLS = 1e7, 5, 200
#: Compiling threads: more threads slow each program down, up to its time limit.
MOST_THREADS = 12
#: Tables of source locations in a program's text.
SOURCES = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*\n*", re.MULTILINE)
#: Share of a section's time for making programs ready.
READY_SHARE = 0.6


def say(*words: object) -> None:
    """Print a line of the log, with the seconds since the start."""
    print(f"[{time.perf_counter() - STARTED_S:6.1f}]", *words, flush=True)


def alone_ns(call: Callable[[], Any]) -> dict[str, float]:
    """Return the lower quartile and the least of a few visits to a call that is waited for."""
    jax.block_until_ready(call())
    times = [mean_ns(visit_ns(call)) for _ in range(VISITS)]
    return {"alone_ns": float(np.quantile(times, QUARTILE)), "least_ns": min(times)}


def piped_ns(call: Callable[[], Any], alone: float) -> float:
    """Return the time per call of piped calls, the median of repeats."""
    count, times = int(np.clip(ROW_NS / alone, LEAST_CALLS, MOST_CALLS)), []
    for _ in range(REPEATS):
        start, last = time.perf_counter_ns(), None
        for _ in range(count):
            last = call()
        jax.block_until_ready(last)
        times.append((time.perf_counter_ns() - start) / count)
        del last
    return float(np.median(times))


def both_ns(call: Callable[[], Any]) -> dict[str, float]:
    """Return the times of a call alone and piped."""
    alone = alone_ns(call)
    return alone | {"piped_ns": piped_ns(call, alone["least_ns"])}


def clocks() -> str:
    """Return the card's state from `nvidia-smi`, or the reason for no state."""
    query = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu,memory.used"
    try:
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout.strip()
    except (OSError, subprocess.SubprocessError) as reason:
        return str(reason)


class Run:
    """A run: its folder, the size of its programs, and the programs compiled so far.

    Attributes:
        folder: the folder of its files.
        name: the name of its samples.
        is_small: whether sizes are tiny, for a trial.
    """

    def __init__(self, folder: Path, name: str, is_small: bool, programs_file: str):
        self.folder, self.name, self.is_small = folder, name, is_small
        self._programs: dict[str, dict[str, Any]] = {}
        self._programs_path = folder / programs_file
        self._contents: dict[str, dict[str, Any]] = {}

    def keep(self, file: str, **found: Any) -> None:
        """Add results to a JSON file, which is whole at any time."""
        content = self._contents.setdefault(file, {})
        content |= found
        write(self.folder / file, content)

    def program(self, name: str, jitted: Any, *arguments: Any) -> None:
        """Keep the compiled text of a jitted function with the compiler's memory figures."""
        try:
            compiled = jitted.lower(*arguments).compile()
            stats, text = compiled.memory_analysis(), compiled.as_text()
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises
            self._programs[name] = {"failed": reason(error)}
            return
        sizes = {field: getattr(stats, field) for field in dir(stats) if field.endswith("_in_bytes")}
        self._programs[name] = {"memory": sizes, "text": SOURCES.sub("", text)}

    def write_programs(self) -> None:
        """Write the file of compiled programs."""
        platform = current_fingerprint().model_dump(mode="json")
        content = json.dumps({"fingerprint": platform, "programs": self._programs})
        beside = self._programs_path.with_suffix(".part")
        beside.write_bytes(gzip.compress(content.encode(), 6, mtime=0))
        os.replace(beside, self._programs_path)

    def made_ready(self, suite: Suite, cells: Sequence[Cell], until_s: float) -> Ready:
        """Return programs compiled on threads until a time, and keep the texts of jitted calls."""
        ready = made_ready(suite, cells, Deadline(until_s), n_threads=n_threads())
        for name, call in ready.programs.items():
            if hasattr(getattr(call, "func", None), "lower"):
                self.program(name, call.func, *call.args)  # pyright: ignore[reportFunctionMemberAccess]
        self.write_programs()
        say(suite.model.name, len(ready.programs), "of", len(cells), "compiled; refused", ready.refused)
        return ready

    def sampled(self, suite: Suite, name: str, cells: Sequence[Cell], until_s: float) -> Ready:
        """Take samples of cells by the protocol of the calibrate job, and return their programs.

        Raises:
            KeyboardInterrupt: after the file was closed.
        """
        path = samples_path(self.folder / f"{self.name}.json", suite.model.name)
        log, rng, deadline = SampleLog.new(suite, name), seeded(), Deadline(until_s)
        with log.kept_in(path, append=False):
            time_micro(log)
            ready = self.made_ready(suite, cells, time.perf_counter() + READY_SHARE * deadline.left_s())
            chosen, slow = affordable(cells, ready, deadline.left_s())
            log.keep_cells([cell for cell in suite.cells() if cell.name in {one.name for one in chosen}])
            refused = measure_rounds(log, ready.programs, deadline, rng, lambda: None)
        say(
            path.name, len(log.cells), "cells,", len(log.complete_rounds()), "rounds; too slow", slow, "failed", refused
        )
        if deadline.interrupted:
            raise KeyboardInterrupt
        return ready


def seeded() -> np.random.Generator:
    """Return the random generator of a section."""
    return np.random.default_rng(0)


def n_threads() -> int:
    """Return the number of compiling threads."""
    return min(current_fingerprint().cores, MOST_THREADS)


def reason(error: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
