"""Time programs that a grammar draws, in two halves of a campaign, to judge models of any function.

    python -m benchmarks.corpus --machine-minutes 40 --out FILE.jsonl [--programs 3000] [--resume] [--single]

The first run draws and times programs until half of the minutes are spent. A run with `--resume` continues: first the
first half, if it was interrupted, then the second half. Let hours pass between the halves, because their difference is
the noise of a time. You may compress the file with gzip after both halves. With `--single`, each program has one
operation, a usual shape and numbers of at most 32 bits.
"""

import dataclasses
import datetime
import functools
import gzip
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

import rlxjax as rx
from benchmarks._common import options
from benchmarks._grammar import MOST_BYTES, Program, drawn, single
from calibrate.samples import Visits, quantile_ns
from rlxjax.calibration import Fingerprint, current_fingerprint, fingerprint_differences
from rlxjax.clock import PROTOCOL, call_ns, mean_ns, quiet_collector, visit_ns

#: The programs of a batch, the bytes of all their arguments, the rounds, and the seconds of a program.
BATCH, BATCH_BYTES, ROUNDS, LEAST_ROUNDS, PROGRAM_S = 64, 3 * 2**30, 16, 3, 0.3
#: A program whose first call, with compiling, takes more seconds is left out.
MOST_FIRST_S = 20.0
VERSION = 1


def cost_ns(fn: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """Return the approximate ns of a call by a crude sum, which only keeps the corpus affordable."""
    profile = rx.profile_function(fn, *args)
    if profile.peak_bytes > MOST_BYTES or profile.unknown_loops:
        return float("inf")
    work = profile.flops / 10 + 4 * profile.transcendentals + profile.integer_ops / 10 + profile.fused_traffic_bytes / 5
    return work + 50 * profile.trips + 300 * int(profile.kernels.launches.sum())


@dataclasses.dataclass
class Corpus:
    """The content of a file: the header, programs by number, failed programs, and the batches of each half."""

    header: dict[str, Any]
    programs: dict[int, Program] = dataclasses.field(default_factory=dict)
    failed: dict[int, str] = dataclasses.field(default_factory=dict)
    batches: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def done(self, half: int) -> set[int]:
        """Return the programs that were timed in a half."""
        return {number for batch in self.batches if batch["half"] == half for number in batch["numbers"]}

    def times_ns(self, half: int) -> dict[int, float]:
        """Return the time of each program in a half, by its number."""
        found = {}
        for batch in (batch for batch in self.batches if batch["half"] == half):
            columns = (np.array(batch[name]) for name in ("round", "cell", "time_ns"))
            found |= zip(batch["numbers"], quantile_ns(Visits(*columns, len(batch["numbers"]))).tolist(), strict=True)
        return found


def read_corpus(path: Path, *, mend_tail: bool = False) -> Corpus:
    """Read a file, compressed if its name ends in `.gz`; an incomplete last line is ignored or removed."""
    if mend_tail and path.suffix == ".gz":
        raise ValueError(f"{path}: expected a file that is not compressed: unpack it with gunzip to go on")
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    header, *lines = map(json.loads, whole.splitlines() or [b"{}"])
    if header.get("version") != VERSION:
        raise ValueError(f"{path}: expected a corpus of version {VERSION}")
    corpus = Corpus(header)
    for line in lines:
        match line.pop("kind"):
            case "program":
                number = line.pop("number")
                corpus.programs[number] = Program.of(line)
            case "failed":
                corpus.failed[line["number"]] = line["reason"]
            case _:
                corpus.batches.append(line)
    if mend_tail and len(whole) < len(content):
        os.truncate(path, len(whole))
    return corpus


def numbers_of(corpus: Corpus, half: int, count: int) -> list[int]:
    """Return the untimed programs of a half; the second half has the programs that the first half timed."""
    wanted = range(count) if half == 0 else sorted(corpus.done(0))
    return [number for number in wanted if number not in corpus.done(half) | corpus.failed.keys()]


def ready(program: Program) -> functools.partial[Any]:
    """Return a program's compiled call, or raise the program's error."""
    args = jax.device_put([draw.array(np.random.default_rng(0)) for draw in program.draws()])
    call = functools.partial(jax.jit(program.function()), *args)
    if call_ns(call) > 1e9 * MOST_FIRST_S or call_ns(call) > 1e9:
        raise ValueError("it takes too long")
    return call


def timed(calls: dict[int, Callable[[], Any]], rng: np.random.Generator) -> dict[str, list[Any]]:
    """Return interleaved visits to programs: rounds in random order, with fewer visits of slow programs."""
    places = list(calls.values())
    spent, found = np.zeros(len(places)), []
    for call in places:
        visit_ns(call)
    with quiet_collector():
        for round_ in range(ROUNDS):
            for place in rng.permutation(len(places)).tolist():
                if round_ < LEAST_ROUNDS or spent[place] < PROGRAM_S:
                    times = visit_ns(places[place])
                    spent[place] += sum(times) / 1e9
                    found.append((round_, place, round(mean_ns(times))))
    return dict(zip(("round", "cell", "time_ns"), map(list, zip(*found, strict=True)), strict=True))


class Recording:
    """A corpus with its file: additions are written to the file first."""

    def __init__(self, corpus: Corpus, file: Any) -> None:
        self.corpus, self._file = corpus, file
        self._drawn = single if corpus.header.get("single") else drawn

    def keep(self, **line: Any) -> None:
        """Write a line."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def program(self, number: int) -> Program | None:
        """Return a program of the file, or draw and keep a program; None if no program is drawn."""
        if number not in self.corpus.programs:
            try:
                self.corpus.programs[number] = self._drawn(number, cost_ns)
            except ValueError as error:
                self.keep(kind="failed", number=number, reason=str(error))
                return None
            self.keep(kind="program", number=number, **self.corpus.programs[number]._asdict())
        return self.corpus.programs[number]

    def time_batch(self, half: int, left: list[int], pool: ThreadPoolExecutor, rng: np.random.Generator) -> None:
        """Take programs from a list, compile and time them, and keep their times."""
        made, held = {}, 0
        while left and len(made) < BATCH and held < BATCH_BYTES:
            number = left.pop(0)
            if (program := self.program(number)) is not None:
                made[number] = pool.submit(ready, program)
                held += program.n_bytes
        calls: dict[int, Callable[[], Any]] = {}
        for number, one in made.items():
            try:
                calls[number] = one.result()
            except Exception as error:  # noqa: BLE001  (what JAX or a compiler raises)
                self.keep(kind="failed", number=number, reason=f"{type(error).__name__}: {error}"[:200])
        if calls:
            line = {"half": half, "numbers": list(calls), **timed(calls, rng)}
            self.keep(kind="batch", **line)
            self.corpus.batches.append(line)
        jax.clear_caches()


def main() -> int:
    """Run the command."""
    parser = options(__doc__, machine_minutes=40.0, programs=3000)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--single", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.out.exists() != given.resume:
        found = "is there: go on with --resume" if given.out.exists() else "is not there: leave out --resume"
        print(f"{given.out} {found}", file=sys.stderr)
        return 2
    header = {"version": VERSION, "protocol": PROTOCOL, "fingerprint": current_fingerprint().model_dump(mode="json")}
    header["single"] = given.single
    header["date"] = datetime.date.today().isoformat()
    try:
        corpus = read_corpus(given.out, mend_tail=True) if given.resume else Corpus(header)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    jax.config.update("jax_enable_x64", not corpus.header.get("single", False))
    if differences := fingerprint_differences(Fingerprint(**corpus.header["fingerprint"]), current_fingerprint()):
        print(f"{given.out} was taken elsewhere ({'; '.join(differences)}): leave out --resume", file=sys.stderr)
        return 2
    until_s, rng = time.perf_counter() + 30.0 * given.machine_minutes, np.random.default_rng()
    half = int(len(corpus.done(0) | corpus.failed.keys()) >= given.programs)
    with open(given.out, "a", encoding="utf-8") as file, ThreadPoolExecutor(2) as pool:
        recording = Recording(corpus, file)
        if not given.resume:
            recording.keep(**header)
        left = numbers_of(corpus, half, given.programs)
        while left and time.perf_counter() < until_s:
            recording.time_batch(half, left, pool, rng)
            print(f"half {half + 1}: {len(corpus.done(half))} programs", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
