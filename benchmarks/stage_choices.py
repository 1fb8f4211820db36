"""Measure how often `choose` is right about running stages apart or together, on pairs that no rule has seen.

    python -m benchmarks.stage_choices CALIBRATION [--measure undecided] [--judge-s 1.2] [--json FILE]

The pairs are the judging half of `benchmarks.stage_pairs` and the pairs below. A process with an empty memory chooses
for one pair after the other. Then the two forms of each pair are timed in random order, in two passes over all pairs,
and these times judge. A choice is right if its form is faster. Pairs with forms within 5 % have no right answer. The
noise is the difference between the two passes.
"""

import functools
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax, nn

import rlxjax as rx
from benchmarks._common import judged_ns, options, table, write
from benchmarks.stage_pairs import PAIRS, Pair, arrays, look_up, pair, recurrence, sum_of_rows
from rlxjax.calibration import default_calibration_path

#: Forms closer than this share have no right order.
LEAST_DISTANCE = 0.05


def rms_norm(x):
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def gated(x):
    a, b = jnp.split(x, 2, -1)
    return nn.silu(a) * b


def polynomial(x):
    return ((0.1 * x + 0.2) * x - 0.3) * x + 0.4


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def logits(x):
    clipped = jnp.clip(x, 1e-3, 1.0 - 1e-3)
    return jnp.log(clipped) - jnp.log1p(-clipped)


def haar(x):
    even, odd = x[..., ::2], x[..., 1::2]
    return (even + odd) / 2, (even - odd) / 2


def blocks(x):
    return x.reshape(60, 16, 60, 16).swapaxes(1, 2)


#: These pairs were written without a look at their times.
ROWS = [
    ("rms norm, product", "64,768 | 768,256", rms_norm, jnp.matmul),
    ("product, gate", "128,512 512,1024", jnp.matmul, gated),
    ("polynomial, exp: 2 MB", "512,1024", polynomial, jnp.exp),
    ("polynomial, exp: 256 numbers", "256", polynomial, jnp.exp),
    ("unit rows, scores", "1000,64 | 256,64", unit, lambda x, y: y @ x.T),
    ("logits, mean", "1000,300", logits, jnp.mean),
    ("haar, energy of both", "256,2048", haar, lambda a, b: jnp.square(a).sum() + jnp.square(b).sum()),
    ("exp, look up columns", "64,2048 | i32[512]", jnp.exp, lambda y, index: y[:, index]),
    ("erf, tile", "256,128", lax.erf, lambda y: jnp.tile(y, (8, 2))),
    ("maximum, one hot", "512,100", lambda x: x.argmax(-1), lambda index: nn.one_hot(index, 100)),
    ("sort, differences", "200,500", jnp.sort, jnp.diff),
    ("recurrence, sum of rows", "128,256 256", recurrence, sum_of_rows),
    ("outer product, sine", "700 900", jnp.outer, jnp.sin),
    ("covariance, cholesky", "2000,48", lambda x: x.T @ x / len(x) + jnp.eye(48), jnp.linalg.cholesky),
    ("reverse, cumulative maximum", "300,1000", lambda x: x[:, ::-1], lambda y: lax.cummax(y, axis=1)),
    ("log, transform", "300,600", lambda x: jnp.log(jnp.square(x) + 1.0), jnp.fft.rfft),
    ("embed, sum of words", "1000,128 i32[300,20]", look_up, lambda y: y.sum(1)),
    ("compare, count", "1500,1500", lambda x: x > 0.5, lambda y: y.sum(0, dtype=jnp.int32)),
    ("blocks, mean of each", "960,960", blocks, lambda y: y.mean((2, 3))),
    ("softmax, products of three", "96,64,64", nn.softmax, lambda p: p @ p @ p),
]  # fmt: skip
NEW = [pair(*row) for row in ROWS]


def chosen(pairs: list[Pair], word: str) -> list[dict[str, Any]]:
    """Return the choice for each pair, one after the other, and its seconds."""
    found = []
    for own in pairs:
        args = arrays(own.flat_args())
        begun_s = time.perf_counter()
        choice = rx.choose({"apart": own.apart(), "together": own.together()}, *args, measure=word)
        seconds = time.perf_counter() - begun_s
        found.append({"pair": own.name, "name": choice.name, "by": choice.by, "is_tie": choice.is_tie}
                     | {"probability": choice.probability, "rounds": choice.rounds, "seconds": seconds})  # fmt: skip
    return found


def forms(own: Pair) -> dict[str, Any]:
    """Return a call of a pair's stages apart, and a call of the stages together."""
    args = arrays(own.flat_args())
    return {name: functools.partial(form(), *args) for name, form in (("apart", own.apart), ("together", own.together))}


def main() -> None:
    """Choose, judge, and print a table."""
    parser = options(__doc__, judge_s=1.2)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("--measure", choices=("never", "undecided", "always"), default="undecided")
    given = parser.parse_args()
    pairs = [*(own for own in PAIRS if own.half == "judge"), *NEW]
    with tempfile.TemporaryDirectory() as home:
        os.environ["RLXJAX_HOME"] = home
        shutil.copy(given.calibration, Path(home) / default_calibration_path().name)
        choices = chosen(pairs, given.measure)
    times = judged_ns([functools.partial(forms, own) for own in pairs], given.judge_s)
    gains = np.log(times[..., 0] / times[..., 1])
    gain, noise = gains.mean(0), np.abs(gains[0] - gains[1])
    far = np.abs(gain) > np.log1p(LEAST_DISTANCE)
    right = (gain > 0) == np.array([own["name"] == "together" for own in choices])
    rows = []
    for place, own in enumerate(choices):
        own |= {"times_ns": times[:, place].round().tolist(), "is_far": bool(far[place])}
        own["is_right"] = bool(right[place])
        if far[place] and not right[place]:
            figures = [f"{100 * np.expm1(one):+.1f} %" for one in (gain[place], noise[place])]
            rows.append([own["pair"], own["name"], own["by"], own["probability"], own["is_tie"], *figures])
    summary = {
        "pairs": len(pairs),
        "far": int(far.sum()),
        "right_of_far": float(right[far].mean()),
        "measured": float(np.mean([own["by"] == "measured" for own in choices])),
        "noise": float(noise.mean()),
        "seconds": float(sum(own["seconds"] for own in choices)),
    }
    print(summary)
    print(table(["wrong", "chosen", "by", "P", "tie", "apart beside together", "noise"], rows))
    write(given.json, {"summary": summary, "choices": choices})


if __name__ == "__main__":
    main()
