"""Fused kernels against kernel by kernel: five graphs, three sizes, measured in one process, interleaved.

python benchmarks/fused_kernels.py [--rounds 60] [--json FILE]
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

import rlxjax as rx

SIZES = (2**10, 2**16, 2**22)


def chain(elements: int) -> rx.Graph:
    """Six unary ops one after the other."""
    graph = rx.Graph("chain")
    value = graph.input("x", (elements,))
    for op in ("abs", "sqrt", "tanh", "neg", "exp", "relu"):
        value = graph.add(op, [value])
    graph.set_outputs([value])
    return graph


def tree(elements: int) -> rx.Graph:
    """The sum of eight inputs, each through an op, as a tree."""
    graph = rx.Graph("tree")
    level = [graph.add("sigmoid", [graph.input(f"x{i}", (elements,))]) for i in range(8)]
    while len(level) > 1:
        level = [graph.add("add", list(pair)) for pair in zip(level[::2], level[1::2], strict=True)]
    graph.set_outputs(level)
    return graph


def softmax(elements: int) -> rx.Graph:
    """Two reductions, each with the broadcast that follows it."""
    graph = rx.Graph("softmax")
    x = graph.input("x", (elements,))
    largest = graph.add("broadcast", [graph.add("reduce_max", [x])], shape=(elements,))
    weights = graph.add("exp", [graph.add("sub", [x, largest])])
    total = graph.add("broadcast", [graph.add("reduce_sum", [weights])], shape=(elements,))
    graph.set_outputs([graph.add("div", [weights, total])])
    return graph


def normalisation(elements: int) -> rx.Graph:
    """Mean and variance taken out, then a gain and an offset."""
    graph = rx.Graph("normalisation")
    x, gain, offset = (graph.input(name, (elements,)) for name in ("x", "gain", "offset"))
    mean = graph.add("broadcast", [graph.add("reduce_mean", [x])], shape=(elements,))
    centred = graph.add("sub", [x, mean])
    variance = graph.add("reduce_mean", [graph.add("mul", [centred, centred])])
    scale = graph.add("broadcast", [graph.add("rsqrt", [variance])], shape=(elements,))
    scaled = graph.add("mul", [graph.add("mul", [centred, scale]), gain])
    graph.set_outputs([graph.add("add", [scaled, offset])])
    return graph


def momentum(elements: int) -> rx.Graph:
    """An optimiser's step: siblings that share operands, three outputs."""
    graph = rx.Graph("momentum")
    names = ("parameter", "gradient", "first", "second", "rate", "decay")
    parameter, gradient, first, second, rate, decay = (graph.input(name, (elements,)) for name in names)
    new_first = graph.add("add", [graph.add("mul", [first, decay]), gradient])
    square = graph.add("mul", [gradient, gradient])
    new_second = graph.add("add", [graph.add("mul", [second, decay]), square])
    step = graph.add("mul", [new_first, graph.add("rsqrt", [new_second])])
    new_parameter = graph.add("sub", [parameter, graph.add("mul", [step, rate])])
    graph.set_outputs([new_parameter, new_first, new_second])
    return graph


GRAPHS: tuple[Callable[[int], rx.Graph], ...] = (chain, tree, softmax, normalisation, momentum)


def measure(rounds: int) -> list[dict]:
    """Return a row per graph and size."""
    rng = np.random.default_rng(0)
    runs = {}
    for build in GRAPHS:
        for elements in SIZES:
            graph = build(elements)
            inputs = {
                node.id: jax.block_until_ready(jax.numpy.asarray(rng.uniform(0.5, 1.5, elements), "float32"))
                for node in graph.nodes
                if node.op == "input"
            }
            for name in ("cost", "unfused"):
                plan = rx.plan_fusion(graph, plan=name)
                runs[build.__name__, elements, name] = (plan, inputs)
    times: dict[tuple, list[int]] = {key: [] for key in runs}
    for plan, inputs in runs.values():
        for _ in range(3):
            jax.block_until_ready(rx.execute_plan(plan, inputs))
    keys = list(runs)
    for _ in range(rounds):
        for index in rng.permutation(len(keys)):
            plan, inputs = runs[keys[index]]
            start = time.perf_counter_ns()
            jax.block_until_ready(rx.execute_plan(plan, inputs))
            times[keys[index]].append(time.perf_counter_ns() - start)
    rows = []
    for build in GRAPHS:
        for elements in SIZES:
            fused, unfused = (min(times[build.__name__, elements, name]) for name in ("cost", "unfused"))
            plan = runs[build.__name__, elements, "cost"][0]
            rows.append(
                {
                    "graph": build.__name__,
                    "elements": elements,
                    "kernels_before": plan.before.kernel_launches,
                    "kernels_after": plan.after.kernel_launches,
                    "traffic_before_bytes": plan.before.device_traffic_bytes,
                    "traffic_after_bytes": plan.after.device_traffic_bytes,
                    "unfused_ns": unfused,
                    "fused_ns": fused,
                    "speedup": unfused / fused,
                }
            )
    return rows


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = measure(arguments.rounds)
    print("| graph | elements | kernels | traffic, MB | kernel by kernel, us | fused, us | speed-up |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        kernels = f"{row['kernels_before']} → {row['kernels_after']}"
        traffic = f"{row['traffic_before_bytes'] / 1e6:.3g} → {row['traffic_after_bytes'] / 1e6:.3g}"
        print(
            f"| {row['graph']} | {row['elements']:,} | {kernels} | {traffic} "
            f"| {row['unfused_ns'] / 1e3:,.1f} | {row['fused_ns'] / 1e3:,.1f} | {row['speedup']:.2f} |"
        )
    if arguments.json:
        device = jax.devices()[0]
        content = {
            "command": f"python benchmarks/fused_kernels.py --rounds {arguments.rounds}",
            "device": f"{device.platform} {device.device_kind}",
            "machine": platform.machine(),
            "jax": jax.__version__,
            "rounds": arguments.rounds,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
