"""Judge pairs of stages by programs compiled for an absent device, and by their jaxprs.

    python -m benchmarks.target --target h100 [--half tune|judge] [--truth FILE] [--json FILE]

`pip install '.[tpu-compiler]'` or `'.[cuda-compiler]'` installs a compiler. The verdict of the jaxpr divides fused
bytes by the data sheet's bandwidth and adds a launch for each kernel (on a TPU for each program). The jaxpr decides if
the ratio is at most 0.95, the compiled program if the probability is at least 90 %. `--truth` is a file of pairs timed
on such a device; its noisy pairs are left out.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import jax

import rlxjax as rx
from benchmarks._common import options, table, write
from benchmarks.stage_pairs import MOST_NOISE, PAIRS, Pair
from rlxjax.calibration import times_for_target
from rlxjax.jaxpr import FunctionProfile
from rlxjax.targets import TargetDevice, target_device

#: The jaxpr decides if the smaller time over the larger time is at most this.
CLOSE = 0.95
VERDICTS = ("by_jaxpr", "compiled")


def figures(programs: list[FunctionProfile]) -> dict[str, int]:
    """Return the sums of the programs' kernels and bytes."""
    launches = [
        sum(group.launches for group in one.kernels) if one.level == "jaxpr" else int(one.io.kernel_launches)
        for one in programs
    ]
    return {"kernels": sum(launches), "bytes": sum(one.fused_traffic_bytes for one in programs)}


def by_jaxpr(device: TargetDevice, apart: dict[str, int], together: dict[str, int], n_stages: int) -> str:
    """Return the verdict by the counts of the jaxpr and the data sheet."""
    launches = (n_stages, 1) if device.platform == "tpu" else (apart["kernels"], together["kernels"])
    apart_ns, together_ns = (
        count * device.launch_ns + own["bytes"] / device.bandwidth_bytes_per_ns
        for count, own in zip(launches, (apart, together), strict=True)
    )
    ratio = together_ns / apart_ns
    return "fuse" if ratio <= CLOSE else "keep" if ratio >= 1 / CLOSE else "undecided"


def pair_row(device: TargetDevice, pair: Pair) -> dict[str, Any]:
    """Return both verdicts of a pair with their figures, or the reason for the target's refusal."""
    programs = pair.programs()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        written = [rx.profile_function(fn, *args) for fn, args in programs]
        try:
            made = [rx.profile_function(fn, *args, level="compiled", target=device) for fn, args in programs]
        except ValueError as error:
            return {"name": pair.name, "refusal": str(error)}
    said = times_for_target(made, device).decision([0], range(1, len(made)))
    return {
        "name": pair.name,
        "by_jaxpr": by_jaxpr(device, figures(written[1:]), figures(written[:1]), len(pair.stages)),
        "compiled": said.verdict(),
        "probability": float(said.probability),
        "apart": figures(made[1:]),
        "together": figures(made[:1]),
    }


def right(rows: list[dict[str, Any]], truth: dict[str, Any]) -> dict[str, Any]:
    """Return how often each decided verdict chose the form with the faster measured time."""
    known = [(row, own) for row in rows if (own := truth.get(row["name"])) and own["noise"] <= MOST_NOISE]
    found = {}
    for verdict in VERDICTS:
        decided = [(row[verdict], own) for row, own in known if row[verdict] != "undecided"]
        hits = sum((said == "fuse") == (own["together_ns"] < own["apart_ns"]) for said, own in decided)
        found[verdict] = {"pairs": len(known), "decided": len(decided), "right": hits}
    return found


def main() -> None:
    """Compile, print the pairs whose verdicts differ, and write."""
    parser = options(__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--half", choices=("tune", "judge"), default="judge")
    parser.add_argument("--truth", type=Path)
    given = parser.parse_args()
    device = target_device(given.target)
    rows = [pair_row(device, pair) for pair in PAIRS if pair.half == given.half]
    made = [row for row in rows if "refusal" not in row]
    differ = [row for row in made if row["by_jaxpr"] != row["compiled"]]
    kinds = ("kernels", "bytes")
    cells = [
        [
            row["name"],
            *(row[name] for name in VERDICTS),
            *(f"{row['apart'][k]} → {row['together'][k]}" for k in kinds),
        ]
        for row in differ
    ]
    print(table(["pair", *VERDICTS, *kinds], cells))
    summary: dict[str, Any] = {
        "pairs": len(rows),
        "refused": {row["name"]: row["refusal"] for row in rows if "refusal" in row},
        **{name: dict(Counter(row[name] for row in made)) for name in VERDICTS},
        "differ": len(differ),
    }
    if given.truth:
        truth = json.loads(given.truth.read_text(encoding="utf-8"))["pairs"]
        summary["against_what_was_timed"] = right(made, truth)
    print(json.dumps(summary, indent=1))
    write(given.json, {"target": device.name, "summary": summary, "rows": rows})


if __name__ == "__main__":
    main()
