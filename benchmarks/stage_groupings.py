"""Predict and measure every grouping of four jitted stages whose best grouping is neither one program nor four.

    python -m benchmarks.stage_groupings CALIBRATION [--budget 30] [--json FILE]

In each case, some stages save bytes as one program, and other stages would recompute a result that an earlier stage
keeps. Each round times all groupings in random order. The noise compares the lower quartiles of odd and even rounds.
"""

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import rlxjax as rx
from benchmarks._common import options, table, visits, write
from benchmarks.stage_pairs import arrays
from rlxjax.clock import QUARTILE


def levels(curve: jax.Array, pixels: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.clip(1.1 * curve - 0.05, 0.0, 1.0), pixels


def gamma(curve: jax.Array, pixels: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.exp(0.45 * jnp.log(curve + 1e-4)), pixels


def look_up(curve: jax.Array, pixels: jax.Array) -> jax.Array:
    return curve.at[pixels].get(mode="clip")


def contrast(image: jax.Array) -> jax.Array:
    return 1.2 * image - 0.1


def scale(x: jax.Array) -> jax.Array:
    return 0.5 * x + 0.1


def activate(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x)


def blur(y: jax.Array) -> jax.Array:
    return 0.25 * y[:, :-2] + 0.5 * y[:, 1:-1] + 0.25 * y[:, 2:]


def energy(y: jax.Array) -> jax.Array:
    return jnp.sum(y * y, axis=-1)


#: Stages by name, and arguments of the first stage.
CASES: dict[str, tuple[Sequence[Callable], tuple[jax.ShapeDtypeStruct, ...]]] = {
    "a tone curve of 1,024 points, a million pixels": (
        (levels, gamma, look_up, contrast),
        (jax.ShapeDtypeStruct((1024,), jnp.float32), jax.ShapeDtypeStruct((1024, 1024), jnp.int32)),
    ),
    "a blur of half a million activations": (
        (scale, activate, blur, energy),
        (jax.ShapeDtypeStruct((512, 1024), jnp.float32),),
    ),
}


def run(stages: Sequence[Callable]) -> Callable:
    """Return one function that calls several functions in order."""

    def composed(*args):
        for stage in stages:
            args = stage(*args)
            args = args if isinstance(args, tuple) else (args,)
        return args

    return composed


def measured(
    groupings: Iterable[rx.choices.Grouping],
    stages: Sequence[Callable],
    shapes: Sequence[jax.ShapeDtypeStruct],
    budget_s: float,
) -> dict[str, tuple[float, float]]:
    """Return the lower quartile in ns and the noise of each grouping by its name."""
    named, calls, given = {stage.__name__: stage for stage in stages}, {}, arrays(shapes)
    for own in groupings:
        programs = (jax.jit(run([named[name] for name in group])) for group in own.groups)
        calls[own.name] = functools.partial(run([*programs]), *given)
    found = {}
    for name, own_ns in visits(calls, 10_000, least=8, until_s=time.perf_counter() + budget_s).items():
        all_ns, even_ns, odd_ns = (float(np.quantile(part, QUARTILE)) for part in (own_ns, own_ns[::2], own_ns[1::2]))
        found[name] = all_ns, max(odd_ns / even_ns, even_ns / odd_ns)
    return found


def main() -> None:
    """Print the table of each case."""
    parser, found = options(__doc__, budget=30.0), {}
    parser.add_argument("calibration", type=Path)
    arguments = parser.parse_args()
    calibration = rx.load_calibration(arguments.calibration)
    for case, (stages, shapes) in CASES.items():
        advice = rx.advise(stages, *shapes, calibration=calibration)
        able = [own for own in advice.alternatives if not own.failed]
        times = measured(able, stages, shapes, arguments.budget)
        print(f"{case}\n\n{advice.verdict}: {advice.reason}\n")
        rows: list[tuple[str, ...]] = []
        for own in sorted(able, key=lambda own: times[own.name]):
            time_ns, noise = times[own.name]
            figures = (f"{ns / 1e3:,.0f}" for ns in (own.time_ns, *own.interval_ns, time_ns))
            rows.append((own.name.replace(" | ", ", "), *figures, f"{100 * (noise - 1):.0f} %"))
        print(table(("programs", "predicted, us", "from", "to", "measured, us", "noise"), rows) + "\n")
        found[case] = {"verdict": advice.verdict, "reason": advice.reason, "groupings": rows}
    write(arguments.json, found)


if __name__ == "__main__":
    main()
