"""Shared code of the benchmarks: options, rounds of visits in random order, tables, and the JSON of a run."""

import argparse
import datetime
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlxjax.calibration import current_fingerprint, write_text_file
from rlxjax.clock import QUARTILE, mean_ns, quiet_collector, visit_ns

ROOT = Path(__file__).parents[1]


def options(doc: str | None, **numbers: float) -> argparse.ArgumentParser:
    """Return a parser with `--json FILE`, and an option for each given number, with this number as its default."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where all that was found is written")
    return parser


def visits(
    calls: Mapping[Any, Callable[[], Any]],
    rounds: int,
    *,
    least: int = 3,
    until_s: float = float("inf"),
    visit: Callable[[Callable[[], Any]], float] = lambda call: mean_ns(visit_ns(call)),
    seed: int = 0,
) -> dict[Any, np.ndarray]:
    """Return the times of calls in ns, one time per round: every round visits all calls in random order.

    Args:
        calls: the timed calls. Each call runs once before the rounds.
        rounds: the most rounds.
        least: the least rounds, for any time limit.
        until_s: the `time.perf_counter` after which no round begins.
        visit: makes one visit and returns its time; the mean of a loop of calls unless given.
        seed: the seed of the orders.
    """
    rng, keys = np.random.default_rng(seed), list(calls)
    times: dict[Any, list[float]] = {key: [] for key in keys}
    for call in calls.values():
        visit(call)
    with quiet_collector():
        for done in range(rounds):
            if done >= least and time.perf_counter() >= until_s:
                break
            for index in rng.permutation(len(keys)):
                times[keys[index]].append(visit(calls[keys[index]]))
    return {key: np.array(found) for key, found in times.items()}


def judged_ns(calls_of: Sequence[Callable[[], Mapping[Any, Callable[[], Any]]]], seconds: float) -> np.ndarray:
    """Return the time in ns of each form of each work, interleaved in two passes over all works.

    Args:
        calls_of: for each work, a function that makes the calls of its forms. All works have as many forms.
        seconds: the seconds per work and pass.

    Returns:
        The lower quartiles, `[2, works, forms]`.
    """
    passes, rng = [], np.random.default_rng()
    for _ in range(2):
        own: dict[int, list[float]] = {}
        for place in rng.permutation(len(calls_of)).tolist():
            until_s = time.perf_counter() + seconds
            found = visits(calls_of[place](), 1000, least=6, until_s=until_s, seed=place)
            own[place] = [float(np.quantile(times, QUARTILE)) for times in found.values()]
        passes.append([own[place] for place in range(len(calls_of))])
    return np.array(passes)


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    first, *lines = [f"| {' | '.join(map(str, line))} |" for line in [headings, *rows]]
    return "\n".join([first, f"|{'---|' * len(headings)}", *lines])


def placed(page: Path, mark: str, text: str) -> None:
    """Put a text between the two comments of a page that mark its place.

    Raises:
        ValueError: the page has no such place.
    """
    begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
    before, found_begin, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"{page}: expected {begin.strip()} and {end.strip()}")
    page.write_text(f"{before}{begin}{text}\n{end}{after}", encoding="utf-8")


def write(path: Path | None, content: Mapping[str, Any], indent: int | None = 1) -> None:
    """Write a run's results with its command, time and machine, if there is a file."""
    if path is None:
        return
    script = Path(sys.argv[0])
    command = script.parent.name if script.stem == "__main__" else script.stem  # of a package
    content = {
        "command": f"python -m benchmarks.{command} {shlex.join(sys.argv[1:])}".strip(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "fingerprint": current_fingerprint().model_dump(mode="json"),
        **content,
    }
    write_text_file(json.dumps(content, indent=indent) + "\n", path)
