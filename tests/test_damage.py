"""Damaged files: each reader refuses them in one line, warns, or loads what the good file says."""

import gzip
import json
import random
import re
import time
import warnings
from pathlib import Path

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from test_decisions import decision

import rlxjax as rx
from calibrate.report.advice import read_advice
from calibrate.samples import read_samples
from rlxjax.choices import Advice, Grouping, Memory
from rlxjax.models import FFT

ROOT = Path(__file__).parent.parent
#: Mutants of each file, seconds that a reader may take, and visits of samples that damage of two lines may cost.
MUTANTS, LIMIT_S, LOST = 24, 5.0, 2
NUMBER = re.compile(rb"-?\d+\.?\d*(?:[eE][-+]?\d+)?")
FIELD = re.compile(rb'"[^"\\]*": ?(?:"[^"\\]*"|-?\d[^,}\]\s]*)')
VALUES = (*b'1e999 -1 0 1e-320 NaN null true "x" []'.split(), b"9" * 400, b"1" + b"0" * 5000, b"")
TERMS = {"call": 900.0, "elementwise": 300.0}
FORMS = (
    Grouping("together", 1.2e3, (1e3, 2e3), 1e3, compile_s=0.5, groups=(("a", "b"),), terms_ns=TERMS),
    Grouping("apart", 2e3, (1e3, 3e3), 2e3, groups=(("a",), ("b",)), terms_ns=TERMS),
)
ADVICE = Advice(
    "together", "measured", 0.99, rounds=9, alternatives=FORMS, compared="together", verdict="fuse",
    reason_code="saves_launches", reason="it saves a launch", saved_calls=1, flip="more rows", code="f = jax.jit(a)",
    stages=tuple(Grouping(name, 1e3, terms_ns=TERMS, peak_bytes=64) for name in "ab"),
)  # fmt: skip


def visits(path):
    return sum(map(len, read_samples(path).rounds))


def leaves(path):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(rx.learned.load_learned_fft(path))]


def first_lines(name):
    return b"\n".join([*gzip.decompress((ROOT / "docs/evidence" / name).read_bytes()).split(b"\n")[:60], b""])


def remembered(path):
    """Return the choice that a file holds, as a command reads it."""
    return json.dumps(Memory(path.parent).read(path.stem).as_dict())


def good_files(folder):
    """Return the suffix, content and reader of a good file of each kind, and whether every change is to be found."""
    rx.learned.save_learned_fft(rx.learned.LearnedFft.exact(16), folder / "model.json")
    csv = "batch,n_fft,time_us\n" + "".join(f"{2**place},256,{7.5 * 2**place}\n" for place in range(4, 14))
    yield ".json", (ROOT / "notebooks/data/calibration-cpu.json").read_bytes(), rx.load_calibration, True
    yield ".json", (folder / "model.json").read_bytes(), leaves, True
    for name in ("campaign-epyc-zen5.welch.samples.jsonl", "xeon.functions.samples.jsonl"):
        yield name, first_lines(f"{name}.gz"), visits, False
        yield f"{name}.gz", gzip.compress(first_lines(f"{name}.gz")), visits, False
    yield ".csv", csv.encode(), lambda path: rx.Timings.of(FFT, path), False
    yield ".json", json.dumps(ADVICE.as_dict()).encode(), read_advice, False
    Memory(folder).keep(decision(key="it"))
    yield ".json", (folder / "it.json").read_bytes(), remembered, False
    runs = {"batch": [2.0**at for at in range(10)], "n_fft": [256] * 10, "time_us": [7.5] * 10}
    pq.write_table(pa.table(runs), folder / "runs.parquet", write_page_checksum=True)
    yield ".parquet", (folder / "runs.parquet").read_bytes(), lambda path: rx.Timings.of(FFT, path), True


def mutant(good, rng):
    """Return a damaged content, and whether it is cut."""
    at, lines, kind = rng.randrange(len(good)), good.splitlines(keepends=True), rng.randrange(9)
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))

    def replaced(pattern, replacement):
        found = pattern.search(good, at) or pattern.search(good)
        return good if found is None else good[: found.start()] + replacement(found[0]) + good[found.end() :]

    made = (
        lambda: good[:at],
        lambda: good[:at] + bytes([good[at] ^ 1 << rng.randrange(8)]) + good[at + 1 :],
        lambda: good[:at] + good[at + rng.randint(1, 40) :],
        lambda: good[:at] + rng.choice([b"\xff", b"\xc3\x28", b"\x00", b"\xed\xa0\x80", b"\x1b[2J"]) + good[at:],
        lambda: replaced(re.compile(rb"\d"), lambda digit: b"%d" % ((int(digit) + rng.randint(1, 9)) % 10)),
        lambda: replaced(NUMBER, lambda _: rng.choice(VALUES)),
        lambda: replaced(FIELD, lambda field: NUMBER.sub(b"7", field) + b"," + field),
        lambda: b"".join([*lines[:one], *rng.choice([[], [lines[one]] * 2, [lines[other]]]), *lines[one + 1 :]]),
        lambda: b"".join([*lines[:one], changed(lines[one], rng), *lines[one + 1 :]]),
    )
    return made[kind](), kind == 0


def changed(line, rng):
    """Return a JSON object, if it is one, of which a field is lost, renamed, another kind of value, or new."""
    try:
        whole = json.loads(line)
    except ValueError:
        return line
    while isinstance(whole, dict) and whole:
        inner, key = whole, rng.choice(list(whole))
        if rng.random() < 0.5 or not isinstance(inner[key], dict):
            value = rng.choice([None, True, "x", [], {}, -1, 2**64, 1.5, [1], {"a": 1}])
            inner.update({rng.choice([key, "surprise"]): value} if rng.random() < 0.7 else {f"{key}x": inner.pop(key)})
            break
        whole = inner[key]
    return json.dumps(whole).encode() + b"\n"


def outcome(read, path, expected, is_sealed, is_cut):
    """Return what became of a mutant: what begins with "wrong" should not be."""
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", rx.calibration.MachineMismatchWarning)
        try:
            found = read(path)
        except (ValueError, OSError) as error:
            return "refused" if len(str(error).splitlines()) == 1 else f"wrong: not one line: {error}"
        except Exception as error:  # noqa: BLE001 - any other is what is looked for
            return f"wrong: {type(error).__name__}: {error}"
    if time.perf_counter() - start > LIMIT_S:
        return "wrong: slow"
    if said:
        return "warned"
    if isinstance(expected, int) and not is_cut and found < expected - LOST:
        return f"wrong: {expected - found} visits lost"
    return "wrong: a silent change" if is_sealed and found != expected else "loaded"


def test_no_mutant_ends_in_a_traceback_or_changes_what_is_loaded_without_a_word(tmp_path):
    rng, found = random.Random(7), []
    for suffix, good, read, is_sealed in good_files(tmp_path):
        path = tmp_path / f"it{suffix}"
        path.write_bytes(good)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", rx.calibration.MachineMismatchWarning)
            expected = read(path)
        assert outcome(read, path, expected, is_sealed, False) == "loaded", suffix
        for number in range(MUTANTS):
            is_packed = suffix.endswith(".gz") and number % 2
            text, is_cut = mutant(gzip.decompress(good) if is_packed else good, rng)
            path.write_bytes(gzip.compress(text, 1) if is_packed else text)
            found.append(outcome(read, path, expected, is_sealed, is_cut))
            assert not found[-1].startswith("wrong"), (suffix, found[-1], text[:2000])
    assert found.count("refused") > len(found) / 4
