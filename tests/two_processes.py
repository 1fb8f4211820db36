"""One of two processes of a job that choose together; started by `test_choice_processes.py`."""

import json
import os
import signal
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import rlxjax as rx

WAYS = {"sum": jax.jit(lambda x: x.sum(0)), "product": jax.jit(lambda x: jnp.ones(x.shape[0]) @ x)}
CALIBRATION = rx.Calibration({}, None, {})

#: Options that the two processes give differently.
OPTIONS = {"measure": ("never", "always"), "limit_ms": (50, 60), "regret": (0.1, 0.2), "check": (True, False)}


def chosen(what, ways, x, **options):
    """Print what is chosen, or why nothing is."""
    try:
        found = rx.choose(ways, x, **{"measure": "always", "calibration": CALIBRATION, **options})
        said = [found.name, found.by, found.rounds, [own.measured_ns for own in found.alternatives]]
    except ValueError as error:
        said = [str(error)]
    print(json.dumps([what, *said]), flush=True)


def main(rank, address):
    """Choose between programs of this process alone, and of both; one of them is killed in the end."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, rank)
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    content = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    x = jax.make_array_from_callback(
        content.shape, NamedSharding(mesh, PartitionSpec("rows")), lambda place: content[place]
    )
    for rows in (8, 16):
        chosen(f"local {rows}", WAYS, jnp.ones((rows, 256)), limit_ms=20)
    chosen("shared", WAYS, x, limit_ms=50)
    chosen("shared again", WAYS, x)
    columns = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(mesh, PartitionSpec("rows")))
    made = {"columns": columns, "as they are": lambda x: columns(x)}
    chosen("placed", made, np.ones((8, 256), np.float32), limit_ms=50)
    chosen("wrong", {**WAYS, "wrong": jax.jit(lambda x: 2.0 * x.sum(0))}, x)
    chosen("other", WAYS if rank else {**WAYS, "more": jax.jit(lambda x: x.sum(0) + 0.0)}, x)
    for name, values in OPTIONS.items():
        chosen(f"other {name}", WAYS, x, **{name: values[rank]})
    half = x[:32]
    if rank:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    chosen("killed", WAYS, half, limit_ms=20_000)
    os._exit(0)  # the job has no more processes to say good-bye to


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
