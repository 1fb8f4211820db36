"""What the help of every command ends with: an example, and the exit statuses."""

#: Exit statuses that mean the same everywhere.
SHARED = {0: "done", 2: "bad input, said in one line", 130: "interrupted"}
_KEPT = {130: "interrupted; what was measured until then is printed and written"}
_FITTED = {1: "a fit did not converge, and was not written", 3: "with --strict: not good enough"}

#: What stands below the options of a command: command lines, and what each exit status means besides those of `SHARED`.
ENDINGS: dict[str, tuple[tuple[str, ...], dict[int, str]]] = {
    "calibrate": (
        (
            "rlxjax calibrate",
            "rlxjax calibrate --only functions --budget 30",
            "rlxjax calibrate --samples 'fleet/*.parquet' --out fleet",
        ),
        _FITTED | _KEPT | {1: "a fit did not converge, or a device was left out, and was not written"},
    ),
    "refit": (("rlxjax refit calibration-cpu.functions.samples.jsonl --verbose",), _FITTED),
    "validate": (
        ("rlxjax validate", "rlxjax validate calibration.json --quiet"),
        {0: "it holds", 1: "it drifted", 2: "another machine's, or bad input"},
    ),
    "predict": (("rlxjax predict --batch 8192 --n-fft 256 --k 16",), {}),
    "explain": (("rlxjax explain --batch 8192 --n-fft 256 --k 16",), {}),
    "profile": (
        (
            "rlxjax profile stages:scale --arg 'f32[2048,1024]'",
            "rlxjax profile stages:scale --arg 'f32[2048,1024]' --target tpu-v5e",
        ),
        {1: "part of what it does is not counted, or it does not fit a target"},
    ),
    "advise": (
        (
            "rlxjax advise stages:scale stages:energy --arg 'f32[64]' --measure undecided",
            "rlxjax advise stages:scale stages:energy --arg 'f32[2048]' --target h100",
        ),
        {0: "fuse or keep", 1: "undecided, or it cannot be modelled"},
    ),
    "evaluate": (
        (
            "rlxjax evaluate 'pairs/*.parquet' scored --target cuda",
            "rlxjax evaluate runs picked --model welch --want pick,time_ns,probability",
        ),
        {1: "some rows could not be evaluated, and are named", 130: "interrupted; --resume goes on"},
    ),
    "decisions list": (("rlxjax decisions list",), {}),
    "decisions show": (("rlxjax decisions show a4f02c19",), {}),
    "decisions pin": (("rlxjax decisions pin a4f02c19 fused", "rlxjax decisions pin a4f02c19 --off"), {}),
    "decisions forget": (("rlxjax decisions forget a4f02c19", "rlxjax decisions forget --all"), {}),
    "decisions export": (("rlxjax decisions export decisions.json",), {}),
    "decisions import": (
        ("rlxjax decisions import decisions.json",),
        {1: "some decisions say what no measurement says, are named and left out"},
    ),
    "report": (
        ("rlxjax report", "rlxjax report calibration.json -o report.html --against earlier.json"),
        {0: "the page is written", 2: "bad input, or a place that cannot be written"},
    ),
}
OVERVIEW = (
    "Examples:\n  rlxjax calibrate\n  rlxjax profile mymodule:loss --arg 'f32[2048,1024]'\n"
    "  rlxjax advise mymodule:scale mymodule:energy --arg 'f32[2048,1024]'\n\n"
    "Each command has a help of its own, with an example and its exit statuses: rlxjax advise -h"
)


def epilog(command: str) -> str:
    """Return the text below the options of a command."""
    examples, statuses = ENDINGS[command]
    lines = ["Example:" if len(examples) == 1 else "Examples:", *(f"  {example}" for example in examples)]
    lines += ["", "Exit status:", *(f"  {code}: {what}" for code, what in sorted((SHARED | statuses).items()))]
    return "\n".join(lines)
