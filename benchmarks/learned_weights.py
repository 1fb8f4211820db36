"""Learn the weights that machines share from the timings of corpora, and judge them on programs that a fit never saw.

    python -m benchmarks.learned_weights CORPUS [CORPUS ...] [--functions SAMPLES ...] [--write] [--steps 250]
        [--json FILE]

CORPUS is a file of `benchmarks.corpus`, one a machine. SAMPLES are of `rlxjax calibrate`, each of a further machine: of
these the cells that are not held out. Programs of some templates, about one in ten, are held out by
kind: the first fit does not see them, and the errors are theirs, with the pace of each batch taken out. The noise is
how far the times of the two halves are apart. `--write` then learns from all programs and writes the file in the
package: the same files give the same weights.
"""

import json
import shlex
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import rlxjax as rx
from benchmarks._common import options, write
from benchmarks.corpus import Corpus, read_corpus
from calibrate.samples import SampleLog, quantile_ns, read_samples
from calibrate.suites.functions import timed_functions
from rlxjax.calibration import sha256_of, write_text_file
from rlxjax.fit import predicted_ns
from rlxjax.jaxpr import FunctionProfile
from rlxjax.models import FunctionCoefficients, kernel_runs
from rlxjax.models._learning import STEPS, TimedPrograms, learned_weights, timed_programs
from rlxjax.models._weights import SHIPPED, KnownWeights

#: Templates whose programs are held out; and how much a function counts beside a program of the corpus: it was visited
#: dozens of times, in rounds over minutes.
HELD_OUT_TEMPLATES, FUNCTION_INFLUENCE = 8, 8.0


class Timing(NamedTuple):
    """What one program took in one half of one machine's campaign."""

    machine: int
    number: int
    profile: FunctionProfile
    templates: tuple[str, ...]
    batch: int
    time_ns: float


def timings_of(corpora: Sequence[Corpus]) -> list[Timing]:
    """Return the timings of all programs whose loops turn a known number of times."""
    found, batches = [], 0
    for machine, corpus in enumerate(corpora):
        profiles = {}
        for number in sorted(corpus.done(0)):
            program = corpus.programs[number]
            profile = rx.profile_function(program.function(), *(draw.abstract() for draw in program.draws()))
            if not profile.uncounted:
                profiles[number] = profile
        for half in (0, 1):
            times_ns = corpus.times_ns(half)
            for batch in (batch for batch in corpus.batches if batch["half"] == half):
                for number in (number for number in batch["numbers"] if number in profiles):
                    templates = corpus.programs[number].templates
                    found.append(Timing(machine, number, profiles[number], templates, batches, times_ns[number]))
                batches += 1
    return found


def timings_of_functions(log: SampleLog, machine: int, batch: int) -> list[Timing]:
    """Return the timings of the suite's functions in samples of one machine, those that are not held out."""
    functions, (cells, visits) = timed_functions(), log.timed()
    found = []
    for number, (cell, time_ns) in enumerate(zip(cells, quantile_ns(visits), strict=True)):
        if not (function := functions[cell.name]).held_out:
            profile = rx.profile_function(function.fn, *function.abstract())
            found.append(Timing(machine, number, profile, (), batch, float(time_ns)))
    return found


def groups_of(timings: Sequence[Timing], influence: np.ndarray) -> list[TimedPrograms]:
    """Return timings as what weights are learned from."""
    columns = ([getattr(one, name) for one in timings] for name in ("profile", "time_ns", "batch", "machine"))
    weight = np.array([1.0 if one.templates else FUNCTION_INFLUENCE for one in timings])
    return timed_programs(*columns, influence=influence * weight)


def errors(known: KnownWeights, paces: np.ndarray, groups: Sequence[TimedPrograms]) -> dict[str, Any]:
    """Return the errors of the first machine's programs that a fit saw and that it did not, paces taken out."""
    coefficients = FunctionCoefficients(**known.median)
    groups = [jax.tree.map(lambda leaf, own=group: leaf[own.machine == 0], group) for group in groups]
    found: dict[str, Any] = {}
    runs = [kernel_runs(group.kernels, known.weights, **group.sizes) for group in groups]
    said = np.concatenate([np.asarray(predicted_ns(coefficients, each, {})) for each in runs])
    taken = np.concatenate([group.time_ns / np.exp(paces[group.batch]) for group in groups])
    counted = np.concatenate([group.influence for group in groups]) > 0
    for name, chosen in (("seen", counted), ("held out by kind", ~counted)):
        each = np.abs(said / taken - 1.0)[chosen]
        found[name] = {"timings": len(each), "median": float(np.median(each)), "mean": float(each.mean())}
    return found


def noise_of(timings: Sequence[Timing], paces: np.ndarray) -> dict[str, float]:
    """Return how far the times of the two halves are apart, with and without the paces of their batches."""
    halves: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for one in timings:
        halves.setdefault((one.machine, one.number), []).append((np.log(one.time_ns), paces[one.batch]))
    both = np.array([pair for pair in halves.values() if len(pair) == 2]).reshape(-1, 2, 2)
    apart = np.abs(both[:, 0, 0] - both[:, 1, 0])
    without = np.abs(both[:, 0, 0] - both[:, 1, 0] - both[:, 0, 1] + both[:, 1, 1])
    medians = (float(np.median(each)) if len(each) else float("nan") for each in (apart, without))
    return {"programs": len(both), **dict(zip(("median", "median, paces out"), medians, strict=True))}


def main() -> None:
    """Run the command."""
    parser = options(__doc__, steps=STEPS)
    parser.add_argument("corpora", nargs="+", type=Path)
    parser.add_argument("--functions", nargs="*", type=Path, default=[])
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("ignore")
    corpora = [read_corpus(path) for path in given.corpora]
    timings, logs = timings_of(corpora), [read_samples(path) for path in given.functions]
    for log in logs:
        batch = 1 + max(one.batch for one in timings)
        timings += timings_of_functions(log, 1 + max(one.machine for one in timings), batch)
    templates = sorted({name for one in timings for name in one.templates})
    out = set(np.random.default_rng(0).permutation(templates)[:HELD_OUT_TEMPLATES])
    groups = groups_of(timings, np.array([out.isdisjoint(one.templates) for one in timings]))
    start = time.perf_counter()
    known, paces = learned_weights(groups, steps=given.steps)
    found = {
        **errors(known, paces, groups),
        "halves apart": noise_of(timings, paces),
        "held out": sorted(out),
        "seconds": time.perf_counter() - start,
    }
    print(json.dumps(found, indent=1))
    write(given.json, found)
    if given.write:
        prints = [corpus.header["fingerprint"] for corpus in corpora]
        prints += [log.fingerprint.model_dump(mode="json") for log in logs]
        provenance = {
            "command": shlex.join(["python", "-m", "benchmarks.learned_weights", *sys.argv[1:]]),
            "dates": sorted({corpus.header["date"] for corpus in corpora}),
            "machines": [{name: each[name] for name in ("cpu_model", "cores", "jax", "jaxlib")} for each in prints],
            "files": {path.name: sha256_of(path) for path in (*given.corpora, *given.functions)},
            "programs": len({(one.machine, one.number) for one in timings}),
            "timings": len(timings),
        }
        known, _ = learned_weights(groups_of(timings, np.ones(len(timings))), provenance, given.steps)
        write_text_file(known.text(), SHIPPED)
        print(f"written: {SHIPPED}")


if __name__ == "__main__":
    main()
