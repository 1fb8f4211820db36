"""Save raw timings of the accelerator that JAX finds, in two calls; `rlxjax refit` fits them on any machine.

    python -m benchmarks.accelerator one|two --out FOLDER [--seconds 370] [--name accelerator] [--small]

`one`: ceilings and host costs, samples of both suites of the calibrate job, larger functions. `two`: Welch peaks of
rows on the device and of peers, tables of the gate, pairs of stages. Both keep the texts of the compiled programs.

Each section has a share of the remaining seconds. The log notes a failed section, and the next section begins. The
folder has all measurements at any time. The exit status is 0, 1 if a section failed, 130 after Ctrl-C.
"""

import argparse
import os
import sys
import time
import traceback
from pathlib import Path

from ._ceilings import facts
from ._judged import gates, kernel, pairs, peaks
from ._kept import STARTED_S, Run, clocks, say
from ._suites import functions, larger, welch

#: For each call: seconds, the file of compiled programs, and sections with their shares of the time.
CALLS = {
    "one": (370.0, "programs.json.gz", ((facts, 0.14), (functions, 0.46), (larger, 0.16), (welch, 0.24))),
    "two": (270.0, "judged-programs.json.gz", ((kernel, 0.2), (peaks, 0.36), (gates, 0.14), (pairs, 0.3))),
}


def main() -> int:
    """Run the sections of a call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=CALLS)
    parser.add_argument("--out", type=Path, required=True, help="folder of the files")
    parser.add_argument("--seconds", type=float, help="of the whole call; 370 for one, 270 for two")
    parser.add_argument("--name", default="accelerator", help="of the samples")
    parser.add_argument("--only", nargs="+", default=(), help="sections to run")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a trial on a CPU")
    given = parser.parse_args()
    seconds, programs_file, sections = CALLS[given.call]
    ends_s = STARTED_S + (given.seconds or seconds)
    given.out.mkdir(parents=True, exist_ok=True)
    run = Run(given.out, given.name, given.small, programs_file)
    sections = [(section, share) for section, share in sections if section.__name__ in (given.only or section.__name__)]
    say(clocks())
    status = 0
    for place, (section, share) in enumerate(sections):
        begun_s = time.perf_counter()
        shares = sum(share for _, share in sections[place:])
        try:
            section(run, begun_s + max(ends_s - begun_s, 0.0) * share / shares)
        except KeyboardInterrupt:
            say("interrupted in", section.__name__)
            status = 130
        except Exception:  # noqa: BLE001 - the next section may work
            say(section.__name__, "FAILED", traceback.format_exc()[-2000:])
            status = 1
        finally:
            run.write_programs()
            say(section.__name__, f"took {time.perf_counter() - begun_s:.1f} s")
        if status == 130:
            break
    say(clocks())
    return status


if __name__ == "__main__":
    found = main()
    sys.stdout.flush()
    os._exit(found)  # do not wait for compiling threads
