"""The process of a compiler. It reads programs from its input, and compiles each for a device that is not present.

This file runs as a script and imports nothing from the package. A request is a line of JSON, followed by the bytes of
the program. An answer is a line of JSON.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
from typing import Any


def end_with_parent() -> None:
    """Start a process that kills this process group when this process's parent ends, since compilers ignore signals."""
    child = os.getpid()
    if os.fork() == 0:
        os.closerange(1, 256)  # so that the pipe to the parent closes if the compiler crashes
        asking = select.poll()
        asking.register(0, 0)
        while not asking.poll(500) and os.getppid() == child:
            pass
        os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Answer requests until the input ends."""
    end_with_parent()
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the text that compilers print must not mix with answers
    while line := requests.readline():
        request = json.loads(line)
        program = requests.read(request["bytes"])
        try:
            import jax

            with jax.enable_x64(True):  # the program decides the dtypes
                answer = compiled(request, program)
        except Exception as error:  # noqa: BLE001  (compilers may raise anything)
            answer = {"error": str(error).strip(), "kind": type(error).__name__}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def compiled(request: dict[str, Any], program: bytes) -> dict[str, Any]:
    """Return the text, the memory and the costs of a program, which is compiled for the devices of a topology."""
    import jax
    import numpy as np
    from jax import export
    from jax.experimental import mesh_utils, topologies
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

    start = time.monotonic()
    platform, count = request["platform"], request["devices"]
    if platform == "tpu":
        described = topologies.get_topology_desc(platform="tpu", topology_name=request["target"], **request["options"])
    else:
        layout = f"1x{-(-count // 8)}x{min(count, 8)}"
        described = topologies.get_topology_desc(platform="cuda", topology=layout, target_config=request["target"])
    exported, axes = export.deserialize(bytearray(program)), request["axes"]
    devices = np.array(described.devices[:count])
    if count == 1 and not axes:
        everywhere: Any = SingleDeviceSharding(devices[0])
        shardings: Any = [everywhere] * len(exported.in_avals)
    else:
        sizes, types = request["sizes"], tuple(AxisType[name] for name in request["types"])
        laid_out = devices.reshape(sizes)
        if count == len(described.devices):
            with contextlib.suppress(Exception):  # some meshes have no special layout
                laid_out = mesh_utils.create_device_mesh(sizes, list(devices), allow_split_physical_axes=True)
        mesh, devices = Mesh(laid_out, axes, axis_types=types), laid_out.flatten()
        everywhere = NamedSharding(mesh, PartitionSpec())
        shardings = [sharding or everywhere for sharding in exported.in_shardings_jax(mesh)]
    given = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(exported.in_avals, shardings, strict=True)
    ]
    options = {} if given else {"out_shardings": everywhere}  # a function without arguments has no shardings
    made = jax.jit(exported.call, donate_argnums=tuple(request["donated"]), **options).lower(*given).compile()
    places: list[list[int]] = []
    if platform == "tpu":  # the core is a coordinate if each core of a chip is a device
        has_cores = any(device.core_on_chip for device in described.devices)
        places = [[*device.coords, *([device.core_on_chip] if has_cores else [])] for device in devices]
    memory, costs = made.memory_analysis(), made.cost_analysis() or {}
    sizes = {name: getattr(memory, name) for name in dir(memory) if name.endswith("_in_bytes")}
    return {
        "text": made.as_text() or "",
        "memory": {name: size for name, size in sizes.items() if isinstance(size, int)},
        "costs": {name: float(value) for name, value in costs.items() if isinstance(value, (int, float))},
        "coordinates": places,
        "seconds": time.monotonic() - start,
    }


if __name__ == "__main__":
    main()
