"""Compare `timeit` of ten functions and ten Welch workloads with a calibration's predictions.

    python -m benchmarks.timeit_check [CALIBRATION] [--json FILE]

Without a calibration, `rlxjax calibrate` makes a default calibration in a new folder first. A time is the median of
nine loops of `timeit`, 0.2 s each. The noise is the difference between the medians of the even and odd loops. The
common scale is the median of measured over predicted times, and errors are without this scale.
"""

import json
import os
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rlxjax as rx
from benchmarks._common import options, table, write

LOOPS, LOOP_S, SEED = 9, 0.2, 41
LENGTHS = (96, 128, 160, 256, 320, 512, 600, 1000, 1024, 2048)
STRATEGIES = ("host", "fused", "block")


def _loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def _step(weights: list[jax.Array], state: Any, x: jax.Array) -> Any:
    updates, state = optax.adam(1e-3).update(jax.grad(_loss)(weights, x), state, weights)
    return optax.apply_updates(weights, updates), state


def functions() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return functions and their arguments by name."""
    rng = np.random.default_rng(SEED)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    weights = [normal(256, 256) / 16, normal(256, 256) / 16]
    query = normal(2, 128, 4, 32)
    return {
        "softmax 64 x 1000": (jax.nn.softmax, (normal(64, 1000),)),
        "standardised rows 512 x 768": (lambda x: jax.nn.standardize(x, axis=-1), (normal(512, 768),)),
        "product 256 x 256 x 256": (jnp.matmul, (normal(256, 256), normal(256, 256))),
        "gradient of a network 64 x 256": (jax.grad(_loss), (weights, normal(64, 256))),
        "step of Adam 64 x 256": (_step, (weights, optax.adam(1e-3).init(weights), normal(64, 256))),
        "convolution 3000 by 200": (jnp.convolve, (normal(3000), normal(200))),
        "power spectrum 64 x 1024": (lambda x: jnp.abs(jnp.fft.rfft(x)) ** 2, (normal(64, 1024),)),
        "sort 16 x 1000": (jnp.sort, (normal(16, 1000),)),
        "attention 2 x 128 x 4 x 32": (jax.nn.dot_product_attention, (query, query, query)),
        "gradient of logsumexp 1000 x 10": (jax.grad(lambda x: jax.nn.logsumexp(x, -1).sum()), (normal(1000, 10),)),
    }


def workloads() -> list[tuple[int, int, int]]:
    """Return ten workloads drawn at random: rows, samples of a segment, peaks."""
    rng = np.random.default_rng(SEED)
    return [
        (round(float(np.exp(rng.uniform(0, np.log(4096))))), int(n_fft), int(rng.integers(1, 33)))
        for n_fft in rng.permutation(LENGTHS)
    ]


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Return the median ns of a call over loops of `timeit`, and its noise."""
    timer = timeit.Timer(lambda: jax.block_until_ready(call()))
    number = max(1, round(LOOP_S / min(timer.repeat(3, 1))))
    times_ns = 1e9 / number * np.array(timer.repeat(LOOPS, number))
    return float(np.median(times_ns)), float(abs(np.log(np.median(times_ns[::2]) / np.median(times_ns[1::2]))))


def rows(calibration: rx.Calibration) -> list[dict[str, Any]]:
    """Return the measured and predicted times, functions first."""
    found = []
    for name, (fn, args) in functions().items():
        jitted = jax.jit(fn)
        predicted = calibration.predict_function(fn, *args)
        time_ns, noise = timed(lambda jitted=jitted, args=args: jitted(*args))
        found.append(("functions", name, time_ns, noise, predicted.time_ns))
    rng = np.random.default_rng(SEED)
    for batch, n_fft, k in workloads():
        params = rx.WelchPeakParams.fast(n_fft, k)
        signal = rng.standard_normal((batch, params.frame_len)).astype(np.float32)
        for strategy in STRATEGIES:
            time_ns, noise = timed(
                lambda signal=signal, params=params, strategy=strategy: rx.welch_peaks(signal, params, strategy)
            )
            predicted_ns = float(calibration.predict_ns(strategy, batch, n_fft, k))
            found.append(("welch", f"{strategy} {batch} x {n_fft}, k {k}", time_ns, noise, predicted_ns))
    return [dict(zip(("kind", "name", "time_ns", "noise", "predicted_ns"), row, strict=True)) for row in found]


def summary(found: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return scale, errors and noise of each kind."""
    of_kind = {}
    for kind in ("functions", "welch"):
        mine = [row for row in found if row["kind"] == kind]
        ratios = np.array([row["time_ns"] / row["predicted_ns"] for row in mine])
        scale = float(np.median(ratios))
        errors = np.abs(scale / ratios - 1.0)
        of_kind[kind] = {
            "scale": scale,
            "median_error": float(np.median(errors)),
            "mean_error": float(np.mean(errors)),
            "noise": float(np.mean([row["noise"] for row in mine])),
        }
    return of_kind


def fresh(folder: Path) -> Path:
    """Calibrate with default options, and return the file."""
    out = folder / "calibration.json"
    command = [sys.executable, "-m", "rlxjax", "calibrate", "--out", str(out)]
    subprocess.run(command, check=True, env=os.environ | {"RLXJAX_HOME": str(folder)})
    return out


def main() -> None:
    """Run the command."""
    parser = options(__doc__)
    parser.add_argument("calibration", type=Path, nargs="?")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = rows(rx.load_calibration(given.calibration or fresh(Path(folder))))
    figures = [
        (row["name"], f"{row['time_ns'] / 1e3:.1f}", f"{row['noise']:.1%}", f"{row['predicted_ns'] / 1e3:.1f}")
        + (f"{row['predicted_ns'] / row['time_ns']:.2f}",)
        for row in found
    ]
    said = summary(found)
    print(
        table(["", "by timeit, us", "noise", "predicted, us", "times"], figures), json.dumps(said, indent=1), sep="\n"
    )
    write(given.json, {"summary": said, "rows": found})


if __name__ == "__main__":
    main()
