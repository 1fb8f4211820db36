"""Learn the weights that machines share from timed corpora, and judge them on held-out programs.

    python -m benchmarks.learned_weights [CORPUS ...] [--functions SAMPLES ...] [--only WEIGHT ...] [--write]
        [--steps 250] [--json FILE]

CORPUS is a file of `benchmarks.corpus`; files with equal fingerprints come from one machine. SAMPLES come from `rlxjax
calibrate`; only cells that are not held out are used. The first fit leaves out the programs of some templates, about
one in ten. Errors are without the pace of each batch. The first halves are for learning, and the noise is the
difference to the second halves. `--write` then learns from all programs and writes the file in the package. The same
files give the same weights. `--only` learns the named weights and keeps all others of that file.
"""

import json
import shlex
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import rlxjax as rx
from benchmarks._common import options, write
from benchmarks._learning import STEPS, Learned, TimedPrograms, learned_weights, timed_programs
from benchmarks.corpus import Corpus, read_corpus
from calibrate.samples import SampleLog, quantile_ns, read_samples
from calibrate.suites.functions import timed_functions
from rlxjax.calibration import sha256_of, write_text_file
from rlxjax.fit import COVERED, COVERED_SDS, predicted_ns
from rlxjax.jaxpr import FunctionProfile
from rlxjax.models import kernel_runs
from rlxjax.models._weights import SHIPPED, read_weights

#: Templates of held-out programs.
HELD_OUT_TEMPLATES = 8
#: How much programs of many operations count beside those of one, which tell its weight; and functions, which were
#: visited dozens of times.
MANY_INFLUENCE, FUNCTION_INFLUENCE = 0.3, 3.0


class Timing(NamedTuple):
    """The time of one program in the first half of one machine's campaign."""

    machine: int
    number: int
    profile: FunctionProfile
    templates: tuple[str, ...]
    batch: int
    time_ns: float
    influence: float


def timings_of(corpora: Sequence[Corpus], prints: list[Any]) -> list[Timing]:
    """Return the timings of the first halves, for all programs with known trip counts.

    Args:
        corpora: the files.
        prints: fingerprints of machines, including the files'; the index of a fingerprint is the machine's number.
    """
    found, batches = [], 0
    for corpus in corpora:
        profiles, is_single = {}, corpus.header.get("single", False)
        for number in sorted(corpus.done(0)):
            program = corpus.programs[number]
            with jax.enable_x64(not is_single):
                profile = rx.profile_function(program.function(), *(draw.abstract() for draw in program.draws()))
            if not profile.uncounted:
                profiles[number] = profile
        machine, influence = prints.index(corpus.header["fingerprint"]), 1.0 if is_single else MANY_INFLUENCE
        times_ns = corpus.times_ns(0)
        for batch in (batch for batch in corpus.batches if batch["half"] == 0):
            for number in (number for number in batch["numbers"] if number in profiles):
                templates = corpus.programs[number].templates
                told = profiles[number], templates, batches, times_ns[number], influence
                found.append(Timing(machine, number, *told))
            batches += 1
    return found


def timings_of_functions(log: SampleLog, machine: int, batch: int) -> list[Timing]:
    """Return the timings of the suite's functions that are not held out, from samples of one machine."""
    functions, (cells, visits) = timed_functions(), log.timed()
    found = []
    for number, (cell, time_ns) in enumerate(zip(cells, quantile_ns(visits), strict=True)):
        if not (function := functions[cell.name]).held_out:
            with jax.enable_x64(False):
                profile = rx.profile_function(function.fn, *function.abstract())
            found.append(Timing(machine, number, profile, (), batch, float(time_ns), FUNCTION_INFLUENCE))
    return found


def groups_of(timings: Sequence[Timing], influence: np.ndarray) -> list[TimedPrograms]:
    """Return timings in the form for learning weights."""
    columns = ([getattr(one, name) for one in timings] for name in ("profile", "time_ns", "batch", "machine"))
    return timed_programs(*columns, influence=influence * np.array([one.influence for one in timings]))


def errors(learned: Learned, groups: Sequence[TimedPrograms]) -> dict[str, Any]:
    """Return the errors of seen and of held-out programs, without paces."""
    found: dict[str, Any] = {}
    said = np.concatenate([np.exp(log_ns(learned, group)) for group in groups])
    taken = np.concatenate([group.time_ns / np.exp(learned.pace[group.batch]) for group in groups])
    influence = np.concatenate([group.influence for group in groups])
    counted = influence > 0
    parts = {"seen": counted, "held out by kind": ~counted}
    for name, chosen in ((name, chosen) for name, chosen in parts.items() if chosen.any()):
        each, far = np.abs(said / taken - 1.0)[chosen], np.abs(np.log(said / taken))[chosen]
        found[name] = {"timings": len(each), "median": float(np.median(each)), "mean": float(each.mean())}
        # 90 % of a normal distribution lie within this number of standard deviations.
        order, weight = np.argsort(far), np.maximum(influence[chosen], 1e-6)
        below = np.cumsum(weight[order]) / np.sum(weight)
        found[name]["scatter"] = float(far[order[np.searchsorted(below, COVERED)]]) / COVERED_SDS
    return found


def log_ns(learned: Learned, group: TimedPrograms) -> np.ndarray:
    """Return the logarithms of the times of a group's programs, each on its machine."""
    machines = jax.tree.map(lambda leaf: leaf[group.machine], learned.machines)
    return np.log(predicted_ns(machines, kernel_runs(group.kernels, learned.known.weights, **group.sizes), {}))


def noise_of(corpora: Sequence[Corpus]) -> dict[str, float]:
    """Return the difference between the times of the two halves of campaigns."""
    apart = []
    for corpus in corpora:
        first, second = corpus.times_ns(0), corpus.times_ns(1)
        apart += [abs(np.log(first[number] / second[number])) for number in first.keys() & second.keys()]
    return {"programs": len(apart), "median": float(np.median(apart)) if apart else float("nan")}


def main() -> None:
    """Run the command."""
    parser = options(__doc__, steps=STEPS)
    parser.add_argument("corpora", nargs="*", type=Path)
    parser.add_argument(
        "--only", nargs="*", default=[], help="weights to learn; the file in the package has the others"
    )
    parser.add_argument("--functions", nargs="*", type=Path, default=[])
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("ignore")
    corpora = [read_corpus(path) for path in given.corpora]
    logs = [read_samples(path) for path in given.functions]
    logged = [log.fingerprint.model_dump(mode="json") for log in logs]
    prints: list[Any] = []
    for each in (*(corpus.header["fingerprint"] for corpus in corpora), *logged):
        prints += [each] if each not in prints else []
    timings = timings_of(corpora, prints)
    for log, each in zip(logs, logged, strict=True):
        timings += timings_of_functions(log, prints.index(each), 1 + max((one.batch for one in timings), default=-1))
    templates = sorted({name for one in timings for name in one.templates})
    out = set(np.random.default_rng(0).permutation(templates)[:HELD_OUT_TEMPLATES])
    groups = groups_of(timings, np.array([out.isdisjoint(one.templates) for one in timings]))
    start = time.perf_counter()
    known = read_weights(SHIPPED) if given.only else None
    learned = learned_weights(groups, steps=given.steps, known=known, only=given.only)
    found = {
        **errors(learned, groups),
        "halves apart": noise_of(corpora),
        "held out": sorted(out),
        "seconds": time.perf_counter() - start,
    }
    print(json.dumps(found, indent=1))
    write(given.json, found)
    if given.write:
        files = ["--functions", *map(str, given.functions)] if given.functions else []
        only = ["--only", *given.only] if given.only else []
        asked = [*map(str, given.corpora), *files, *only, "--write"]
        provenance = {
            "command": shlex.join(["python", "-m", "benchmarks.learned_weights", *asked]),
            "dates": sorted({corpus.header["date"] for corpus in corpora}),
            "machines": [{name: each[name] for name in ("cpu_model", "cores", "jax", "jaxlib")} for each in prints],
            "files": {path.name: sha256_of(path) for path in (*given.corpora, *given.functions)},
            "programs": len({(one.machine, one.number) for one in timings}),
            "timings": len(timings),
        }
        if known is not None:
            provenance = {**known.provenance, "later": {"weights": given.only, **provenance}}
        groups, scatter = groups_of(timings, np.ones(len(timings))), found["seen"]["scatter"]
        learned = learned_weights(groups, provenance, given.steps, scatter, known, given.only)
        write_text_file(learned.known.text(), SHIPPED)
        print(f"written: {SHIPPED}")


if __name__ == "__main__":
    main()
