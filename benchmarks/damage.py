"""Damaged files: each reader gets mutants of a good file, and refuses, warns, or loads what the good one says.

python -m benchmarks.damage [--count 20000] [--seed 0]

Exit status 1 if a mutant ends in anything but one line, takes long, changes what is loaded without a word, or if visits
of samples are lost without one.
"""

import argparse
import collections
import contextlib
import gzip
import json
import os
import random
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import rlxjax as rx
from calibrate.page import advice_page
from calibrate.samples import FunctionLog, read_log
from rlxjax._files import read_json_file
from rlxjax.advice import Advice, Measured, StageCost
from rlxjax.calibration import (
    CalibrationFile,
    MachineSection,
    ModelSection,
    current_fingerprint,
    prior_path,
    read_calibration_file,
    write_json_file,
)
from rlxjax.calibration._population import PRIOR_VERSION, PriorFile
from rlxjax.models import FFT

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "docs" / "evidence"
#: Seconds that a reader may take, lines of samples that are damaged, and visits that damage of two lines may cost.
LIMIT_S, SAMPLE_LINES, LOST = 5.0, 60, 2
NUMBER = re.compile(rb"-?\d+\.?\d*(?:[eE][-+]?\d+)?")
FIELD = re.compile(rb'"[^"\\]*": ?(?:"[^"\\]*"|-?\d[^,}\]\s]*)')
BAD_VALUES = (b"1e999", b"9" * 400, b"1" + b"0" * 5000, b"18446744073709551616", b"-1", b"0", b"1e-320", b"NaN")
BAD_VALUES += (b"Infinity", b"null", b"true", b'"x"', b"[]", b"{}", b"1e30", b"")


class Reader(NamedTuple):
    """A reader of files.

    Attributes:
        suffix: of the file's name.
        good: a file's content.
        read: returns what is loaded, to be compared; of samples, how many visits.
        is_sealed: whether every change is to be found.
    """

    suffix: str
    good: bytes
    read: Callable[[Path], Any]
    is_sealed: bool = False


class Hang(BaseException):
    """A reader took too long."""


def readers(folder: Path) -> dict[str, Reader]:
    """Return all readers, each with a good file made in a folder."""
    here = {"fingerprint": current_fingerprint()}
    welch, functions = (
        read_calibration_file(path) for path in (ROOT / "notebooks/data/calibration-cpu.json", EVIDENCE / "xeon.json")
    )
    models: dict[str, ModelSection] = {
        name: own.model_copy(update=here) for name, own in {**welch.models, **functions.models}.items()
    }
    assert welch.machine is not None
    machine: MachineSection = welch.machine.model_copy(update=here)
    write_json_file(CalibrationFile(models=models, machine=machine), folder / "calibration.json")
    rx.save_learned_fft(rx.LearnedFft.exact(16), folder / "model.json")
    prior = prior_path("cpu")
    assert prior is not None
    csv = "batch,n_fft,time_us\n" + "".join(f"{2**place},256,{7.5 * 2**place}\n" for place in range(4, 14))
    terms = {"call": 900.0, "elementwise": 300.0}
    advice = Advice(
        "fuse", "saves_launches", "it saves a launch", 0.99, 2e3, (1e3, 3e3), 1.2e3, (1e3, 2e3), terms, terms,
        stages=(StageCost("a", 1e3, "call", 64), StageCost("b", 1e3, "call", 64)), saved_calls=1, flip="more rows",
        code="f = jax.jit(a)", measured=Measured(2e3, 1e3, 0.5, 9),
    )  # fmt: skip
    samples, of_functions = (
        _first_lines(EVIDENCE / name) for name in ("campaign-epyc-zen5.samples.jsonl.gz", "xeon.functions.jsonl.gz")
    )
    return {
        "calibration": Reader(".json", (folder / "calibration.json").read_bytes(), _calibration, True),
        "learned FFT": Reader(".json", (folder / "model.json").read_bytes(), _leaves(rx.load_learned_fft), True),
        "population": Reader(".json", prior.read_bytes(), _schema(PriorFile, {"schema_version": PRIOR_VERSION}), True),
        "samples": Reader(".samples.jsonl", samples, _visits),
        "samples, compressed": Reader(".samples.jsonl.gz", gzip.compress(samples), _visits),
        "functions": Reader(".functions.jsonl", of_functions, _visits),
        "functions, compressed": Reader(".functions.jsonl.gz", gzip.compress(of_functions), _visits),
        "timings": Reader(".csv", csv.encode(), _leaves(lambda path: rx.Timings.from_csv(FFT, path))),
        "advice": Reader(".json", json.dumps(advice.as_dict()).encode(), lambda path: advice_page(path, command="")),
    }


def _first_lines(path: Path) -> bytes:
    return b"\n".join([*gzip.decompress(path.read_bytes()).split(b"\n")[:SAMPLE_LINES], b""])


def _leaves(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def leaves(path: Path) -> Any:
        found, structure = jax.tree.flatten(read(path))
        return structure, [(np.asarray(leaf).dtype, np.shape(leaf), np.asarray(leaf).tobytes()) for leaf in found]

    return leaves


_calibration = _leaves(rx.load_calibration)


def _schema(schema: Any, versions: dict[str, int]) -> Callable[[Path], Any]:
    return lambda path: read_json_file(path, schema, versions, ValueError, "make another one", "one")


def _visits(path: Path) -> int:
    log = read_log(path)
    return len(log.visits) if isinstance(log, FunctionLog) else sum(map(len, log.rounds))


def mutant(good: bytes, rng: random.Random) -> tuple[str, bytes]:
    """Return how a content was damaged, and what became of it."""
    name = rng.choice(list(DAMAGES))
    return name, DAMAGES[name](good, rng)


def _flipped(text: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(text))
    return text[:place] + bytes([text[place] ^ 1 << rng.randrange(8)]) + text[place + 1 :]


def _cut(text: bytes, rng: random.Random) -> bytes:
    return text[: rng.randrange(len(text))]


def _hole(text: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(text))
    return text[:place] + text[place + rng.randint(1, 40) :]


def _no_text(text: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(text))
    return text[:place] + rng.choice([b"\xff", b"\xc3\x28", b"\x00", b"\xed\xa0\x80", b"\x1b[2J"]) + text[place:]


def _replaced(pattern: re.Pattern[bytes], text: bytes, rng: random.Random, other: Callable[[bytes], bytes]) -> bytes:
    one = pattern.search(text, rng.randrange(len(text))) or pattern.search(text)
    return text if one is None else text[: one.start()] + other(one[0]) + text[one.end() :]


def _digit(text: bytes, rng: random.Random) -> bytes:
    return _replaced(re.compile(rb"\d"), text, rng, lambda one: b"%d" % ((int(one) + rng.randint(1, 9)) % 10))


def _bad_value(text: bytes, rng: random.Random) -> bytes:
    return _replaced(NUMBER, text, rng, lambda _: rng.choice(BAD_VALUES))


def _key_twice(text: bytes, rng: random.Random) -> bytes:
    def twice(one: bytes) -> bytes:
        return NUMBER.sub(b"7", one) + b"," + one if rng.random() < 0.5 else one + b"," + NUMBER.sub(b"7", one)

    return _replaced(FIELD, text, rng, twice)


def _lines(text: bytes, rng: random.Random) -> bytes:
    lines = text.splitlines(keepends=True)
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    action = rng.choice(["twice", "swapped", "lost", "moved"])
    if action == "swapped":
        lines[one], lines[other] = lines[other], lines[one]
    elif action == "twice":
        lines.insert(other, lines[one])
    else:
        taken = lines.pop(one)
        if action == "moved":
            lines.insert(other, taken)
    return b"".join(lines)


def _structure(text: bytes, rng: random.Random) -> bytes:
    """Delete, rename, exchange or replace a field of a JSON object, which may be that of a line."""
    lines = text.splitlines(keepends=True)
    place = rng.randrange(len(lines))
    try:
        whole = json.loads(text)
    except ValueError:
        try:
            changed = json.dumps(_changed(json.loads(lines[place]), rng)).encode() + b"\n"
        except ValueError:
            return text
        return b"".join([*lines[:place], changed, *lines[place + 1 :]])
    return json.dumps(_changed(whole, rng), indent=2).encode()


def _changed(whole: Any, rng: random.Random) -> Any:
    objects = [found for found in _objects(whole) if found]
    if not objects:
        return None
    one = rng.choice(objects[: rng.choice([3, 12, len(objects)])])
    key, other = rng.choice(list(one)), rng.choice(list(one))
    match rng.choice(["delete", "rename", "exchange", "replace", "add", "empty"]):
        case "delete":
            del one[key]
        case "rename":
            one[key + "x"] = one.pop(key)
        case "exchange":
            one[key], one[other] = one[other], one[key]
        case "replace":
            one[key] = rng.choice([None, True, "x", [], {}, -1, 2**64, 1.5, [1], {"a": 1}])
        case "add":
            one["surprise"] = 1
        case _:
            one.clear()
    return whole


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(inner)


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bit": _flipped,
    "cut": _cut,
    "hole": _hole,
    "no text": _no_text,
    "digit": _digit,
    "value": _bad_value,
    "key twice": _key_twice,
    "lines": _lines,
    "structure": _structure,
}


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """End what takes longer."""

    def end(*_: object) -> None:
        raise Hang

    earlier = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, earlier)


def read_mutant(reader: Reader, path: Path, expected: Any, kind: str) -> str:
    """Return what became of reading a mutant: what begins with "FOUND" should not be."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with limited(LIMIT_S):
                found = reader.read(path)
        except (ValueError, OSError) as error:
            text = str(error)
            return "FOUND more than one line" if "\n" in text or not text else "refused"
        except Hang:
            return "FOUND a hang"
        except BaseException as error:  # noqa: BLE001 - any other is what is looked for
            return f"FOUND {type(error).__name__}"
    if said:
        return "warned"
    if isinstance(expected, int):
        return "FOUND lost visits" if found < expected - LOST and kind != "cut" else "loaded"
    if found == expected:
        return "loaded the same"
    return "FOUND a silent change" if reader.is_sealed else "loaded"


def damaged(count: int, seed: int, folder: Path) -> tuple[dict[str, collections.Counter], list[str]]:
    """Return what became of mutants, by reader, and a line for each that was found at fault."""
    rng, table, found = random.Random(seed), {}, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known = readers(folder)
    expected = {}
    for name, reader in known.items():
        path = folder / f"it{reader.suffix}"
        path.write_bytes(reader.good)
        expected[name] = reader.read(path)
        assert read_mutant(reader, path, expected[name], "") in ("loaded", "loaded the same"), name
        table[name] = collections.Counter()
    for number in range(count):
        name = list(known)[number % len(known)]
        reader = known[name]
        content = reader.good
        if reader.suffix.endswith(".gz") and number % 2:
            kind, text = mutant(gzip.decompress(content), rng)
            text = gzip.compress(text, 1)
        else:
            kind, text = mutant(content, rng)
        path = folder / f"it{reader.suffix}"
        path.write_bytes(text)
        outcome = read_mutant(reader, path, expected[name], kind)
        table[name][outcome.partition(" ")[0] if outcome.startswith("FOUND") else outcome] += 1
        if outcome.startswith("FOUND"):
            kept = folder / f"found-{number}{reader.suffix}"
            os.replace(path, kept)
            found.append(f"{name}, {kind}: {outcome.removeprefix('FOUND ')}: {kept}")
    return table, found


def main() -> int:
    """Print what became of the mutants."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="damage-"))
    table, found = damaged(options.count, options.seed, folder)
    columns = ["refused", "warned", "loaded the same", "loaded", "FOUND"]
    print(f"{'':24}" + "".join(f"{column:>17}" for column in columns))
    for name, counted in table.items():
        print(f"{name:24}" + "".join(f"{counted[column]:17,}" for column in columns))
    print("\n".join(found[:40]) or f"{options.count:,} mutants: each was refused, warned of, or read as it should be.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
