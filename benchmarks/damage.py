"""Damage files of every kind in many ways, and say what each reader makes of them.

The mutants and the readers are those of `tests/test_damage.py`, which makes a few of each:

    python -m benchmarks.damage --mutants 20000

At fault is a traceback, a message of several lines, a reader that hangs, or a changed value that nobody is told of. The
exit status is 1 if a mutant is at fault.
"""

import argparse
import collections
import gzip
import json
import random
import signal
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import test_damage  # noqa: E402

#: Seconds after which a reader hangs, and mutants at fault that are printed.
HANGS_S, SHOWN = 20, 10


def main() -> None:
    """Print how many mutants of each kind were refused, warned of, loaded, or are at fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=20000, help="in all, over all kinds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="a file for the counts")
    asked = parser.parse_args()
    signal.signal(signal.SIGALRM, _hangs)
    found: dict[str, collections.Counter[str]] = {}
    with tempfile.TemporaryDirectory() as place:
        files = [*test_damage.good_files(Path(place))]
        for number, (suffix, good, read, is_sealed) in enumerate(files):
            rng = random.Random(f"{asked.seed} {number}")
            path = Path(place) / f"it{suffix}"
            path.write_bytes(good)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = read(path)
            kind = f"{getattr(read, '__name__', '')} {suffix} ({number})".replace("<lambda> ", "timings ")
            counts = found.setdefault(kind, collections.Counter(refused=0, warned=0, loaded=0, fault=0))
            for turn in range(asked.mutants // len(files)):
                is_packed = suffix.endswith(".gz") and turn % 2
                text, is_cut = test_damage.mutant(gzip.decompress(good) if is_packed else good, rng)
                path.write_bytes(gzip.compress(text, 1) if is_packed else text)
                signal.alarm(HANGS_S)
                try:
                    outcome = test_damage.outcome(read, path, expected, is_sealed, is_cut)
                finally:
                    signal.alarm(0)
                is_fault = outcome.startswith("wrong")
                counts["fault" if is_fault else outcome] += 1
                if is_fault and counts["fault"] <= SHOWN:
                    print(f"{kind}, mutant {turn}: {outcome[:300]}", flush=True)
            print(f"{kind:60}" + "".join(f"{name} {count:>6,}  " for name, count in counts.items()), flush=True)
    total: collections.Counter[str] = collections.Counter()
    for counts in found.values():
        total.update(counts)
    print(f"{total.total():,} mutants: {', '.join(f'{name} {count:,}' for name, count in total.items())}")
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(total["fault"] > 0)


def _hangs(*_: object) -> None:
    raise RuntimeError(f"it hangs for {HANGS_S} s")


if __name__ == "__main__":
    main()
