"""Ceilings of a device and host costs: copies, products, launches, loops, a condition, transfers."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._kept import Run, alone_ns, both_ns, clocks, say

#: Logarithms to base 2 of the copied arrays' elements.
COPIES, LARGEST_COPY = (10, 12, 14, *range(16, 29)), 28
#: Dtypes, sizes and precisions of square products.
PRODUCTS = [
    *(("bfloat16", n, None) for n in (256, 512, 1024, 2048, 4096, 8192)),
    *(("float32", n, None) for n in (256, 512, 1024, 2048, 4096, 8192)),
    *(("float32", n, "highest") for n in (1024, 4096)),
    *(("float16", n, None) for n in (1024, 8192)),
    *(("float64", n, None) for n in (512, 4096)),
]
#: The number of consecutive kernels that no compiler fuses.
CHAINS = (1, 2, 4, 5, 6, 8, 16, 32, 64)
TURNS = 100


def step(x: jax.Array) -> jax.Array:
    """Return the values plus one."""
    return x + 1.0


def chain(x: jax.Array, count: int) -> jax.Array:
    """Apply consecutive kernels to values."""
    for _ in range(count):
        x = lax.optimization_barrier(x * 1.0001 + 1e-4)
    return x


def counted(x: jax.Array) -> jax.Array:
    """Apply a loop with a known trip count."""
    return lax.fori_loop(0, TURNS, lambda _, y: jnp.sin(y) + 1e-3, x)


def uncounted(x: jax.Array) -> jax.Array:
    """Apply a loop with a trip count on the device."""
    turns = (TURNS + 0 * x[0]).astype(jnp.int32)
    return lax.while_loop(lambda s: s[1] < turns, lambda s: (jnp.sin(s[0]) + 1e-3, s[1] + 1), (x, jnp.int32(0)))[0]


def stacked(x: jax.Array) -> jax.Array:
    """Return the outputs of all iterations of a scan."""
    return lax.scan(lambda y, _: (jnp.sin(y), y), x, length=TURNS)[1]


def sort_or_transform(x: jax.Array) -> jax.Array:
    """Return the result of one of two branches, by a value on the device."""
    return lax.cond(x[0] > 0, jnp.sort, lambda y: jnp.fft.fft(y).real, x)


def copy_row(run: Run, log2: int) -> dict[str, float]:
    """Return the times of a program that reads and writes arrays, and its bandwidth in bytes per ns."""
    x, program = jnp.ones((2**log2,), jnp.float32), jax.jit(step)
    times = both_ns(lambda: program(x))
    run.program(f"copy 2^{log2}", program, x)
    n_bytes = 2 * x.nbytes
    return {"bytes": n_bytes, **times, "GBps": n_bytes / min(times["piped_ns"], times["least_ns"])}


def ceiling_gbps(run: Run) -> float:
    """Return the bandwidth of the largest copy, in GB/s."""
    return copy_row(run, 16 if run.is_small else LARGEST_COPY)["GBps"]


def product_row(run: Run, dtype: str, n: int, precision: str | None) -> dict[str, Any]:
    """Return the times of a square product."""
    with jax.enable_x64(dtype == "float64"):
        x = jax.random.normal(jax.random.key(0), (n, n), jnp.dtype(dtype))
        program = jax.jit(functools.partial(jnp.matmul, precision=precision))
        times = both_ns(lambda: program(x, x))
        run.program(f"product {dtype} {n} {precision}", program, x, x)
    rate = 2e-3 * n**3 / min(times["piped_ns"], times["least_ns"])
    return {"dtype": dtype, "n": n, "precision": precision, **times, "TFLOPs": rate}


def called(run: Run, name: str, fn: Callable[[jax.Array], jax.Array], x: jax.Array) -> dict[str, float]:
    """Return the times of a function of an array, and keep its text."""
    program = jax.jit(fn)
    times = both_ns(lambda: program(x))
    run.program(name, program, x)
    return times


def transfers(n_bytes: int) -> dict[str, float]:
    """Return the times in ns of copies of new arrays to the device and back."""
    host, add = np.ones((n_bytes // 4,), np.float32), jax.jit(step)
    up = alone_ns(lambda: jax.device_put(host))["alone_ns"]
    there, down = jax.device_put(host), []
    for _ in range(6):
        there = jax.block_until_ready(add(there))  # an array caches its host copy
        start = time.perf_counter_ns()
        np.asarray(there)
        down.append(time.perf_counter_ns() - start)
    return {"bytes": n_bytes, "up_ns": up, "down_ns": float(np.median(down[1:]))}


def facts(run: Run, until_s: float) -> None:
    """Measure all facts, the most useful first, until the time is over."""
    device = jax.devices()[0]
    keep = functools.partial(run.keep, "facts.json")
    keep(device=device.device_kind, platform=device.platform, memory=device.memory_stats(), clocks=clocks())
    few, tiny = run.is_small, jnp.ones((8,), jnp.float32)

    def rows(of: Callable[..., Any], cases: Any) -> list[Any]:
        found = []
        for case in cases:
            if time.perf_counter() > until_s:
                say("facts: no time for", case)
                break
            found.append(of(run, *case))
        return found

    keep(empty=called(run, "empty", step, tiny))
    keep(copy=(copies := rows(copy_row, [(n,) for n in COPIES if n <= (16 if few else LARGEST_COPY)])))
    say("copy GB/s", [round(row["GBps"]) for row in copies])
    cases = [(f"{n} kernels in a row", functools.partial(chain, count=n), tiny) for n in CHAINS]
    keep(kernels=dict(zip(CHAINS, chained := rows(called, cases), strict=False)))
    say("kernels in a row, ns", [round(row["piped_ns"]) for row in chained])
    loops = {"known turns": counted, "unknown turns": uncounted, "stacking": stacked, "condition": sort_or_transform}
    cases = [(f"{name}, {n}", fn, jnp.ones((n,), jnp.float32)) for n in (8, 2**16) for name, fn in loops.items()]
    keep(loops=dict(zip([case[0] for case in cases], rows(called, cases), strict=False)))
    keep(products=(products := rows(product_row, [case for case in PRODUCTS if not few or case[1] <= 512])))
    say("products, TFLOP/s", [(p["dtype"], p["n"], p["precision"], round(p["TFLOPs"], 2)) for p in products])
    sizes = (2**16,) if few else (2**12, 2**20, 2**24, 2**28)
    keep(transfers=rows(lambda _, n_bytes: transfers(n_bytes), [(n,) for n in sizes]), clocks_after=clocks())
