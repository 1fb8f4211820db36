"""The suite of collectives over all local devices: five kinds, each for several sizes of arrays and of groups."""

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlxjax.devices import Link, target_device, target_names
from rlxjax.fit import Cell, LatencyPrior, Suite, wide_prior
from rlxjax.models import COLLECTIVES, collective_inputs, memory_link

#: Array sizes in bytes, as `collective_inputs` counts them; the held-out sizes; the numbers of devices in a group.
SIZES, HELD_OUT = tuple(2**n for n in (14, 16, 18, 20, 21, 22, 23, 24, 26)), (2**16, 2**20, 2**22)
GROUP_SIZES = (2, 4, 8)
#: The largest array on a CPU: larger arrays exceed the caches, and every call allocates new pages for them.
MOST_CPU_BYTES = 2**23
#: The expected time in ns of one call on a CPU whose threads serve as devices.
CPU_START_NS = 3e5
#: For each kind, the program of a device; it takes the device's array and the number of devices in a group.
_RUN: Mapping[str, Callable[[jax.Array, int], jax.Array]] = {
    "all_reduce": lambda x, _: lax.psum(x, "group"),
    "all_gather": lambda x, _: lax.all_gather(x, "group", tiled=True),
    "reduce_scatter": lambda x, _: lax.psum_scatter(x, "group", tiled=True),
    "all_to_all": lambda x, _: lax.all_to_all(x, "group", 0, 0, tiled=True),
    "permute": lambda x, size: lax.ppermute(x, "group", [(place, (place + 1) % size) for place in range(size)]),
}
#: Runs only one program at a time: two programs hang if the devices start them in different orders.
_one_at_a_time = threading.Lock()


class CollectivesSuite(Suite):
    """Each kind of collective with each array size, in groups of two, four and eight local devices."""

    model = COLLECTIVES
    most_error = 0.5

    def cells(self) -> list[Cell]:
        """Return a cell for every collective. Refuse a single local device, and devices whose links are unknown."""
        devices, (links, coordinates) = jax.local_device_count(), joined()
        sizes = [n_bytes for n_bytes in SIZES if jax.default_backend() != "cpu" or n_bytes <= MOST_CPU_BYTES]
        cells = []
        for size in (size for size in GROUP_SIZES if devices % size == 0):
            groups = [range(first, first + size) for first in range(0, devices, size)]
            pairs = [(group[place - 1], group[place]) for group in groups for place in range(size)]
            for kind in COLLECTIVES.variants:
                for n_bytes in sizes:
                    own = pairs if kind == "permute" else groups
                    inputs = collective_inputs(kind, n_bytes, own, links, coordinates)
                    held = {"held_out": n_bytes in HELD_OUT, "n_bytes": 2 * devices * n_bytes}
                    cells.append(Cell(f"{kind} {n_bytes} of {size}", kind, inputs, **held))
        return cells

    def program(self, cell: Cell) -> Callable[[], Any]:
        """Return a function that runs a collective in all groups at the same time."""
        n_bytes, size = (int(word) for word in cell.name.split() if word.isdecimal())
        devices, rows = np.array(jax.local_devices()), PartitionSpec(("groups", "group"))
        mesh = Mesh(devices.reshape(-1, size), ("groups", "group"))
        own = n_bytes // np.float32().nbytes // (size if cell.variant == "all_gather" else 1)
        x = jax.device_put(np.ones(own * devices.size, np.float32), NamedSharding(mesh, rows))
        run = jax.jit(jax.shard_map(lambda x: _RUN[cell.variant](x, size), mesh=mesh, in_specs=rows, out_specs=rows))

        def call() -> jax.Array:
            with _one_at_a_time:
                return jax.block_until_ready(run(x))

        return call

    def start(self, micro_ns: Mapping[str, float]) -> LatencyPrior[Any]:
        """Return the model's prior. On a CPU, return a wide prior, since no data sheet describes a CPU's links."""
        del micro_ns
        if jax.default_backend() != "cpu":
            return COLLECTIVES.prior
        return wide_prior(dataclasses.replace(COLLECTIVES.prior.median, start_ns=CPU_START_NS))


def joined() -> tuple[Sequence[Link], Sequence[tuple[int, ...]]]:
    """Return the local devices' links, and their places in a torus. Refuse a single device, and unknown links."""
    devices = jax.local_devices()
    if len(devices) == 1:
        more = "a CPU has eight with XLA_FLAGS=--xla_force_host_platform_device_count=8"
        raise ValueError(f"collectives: expected several local devices, got one; {more}")
    if devices[0].platform == "cpu":
        return [memory_link(len(devices))], ()
    kind = f"-{'-'.join(devices[0].device_kind.lower().replace(' lite', 'e').split())}-"
    links = [link for name in target_names() if f"-{name}-" in kind for link in target_device(name).links]
    if not links:
        raise ValueError(f"collectives: expected devices with known links, got {devices[0].device_kind}")
    return links, [tuple(device.coords) for device in devices if hasattr(device, "coords")]
