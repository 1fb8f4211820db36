"""Compare fused kernels with unfused kernels: five graphs, three sizes, interleaved in one process.

python -m benchmarks.fused_kernels [--rounds 60] [--json FILE]
"""

import functools
from collections.abc import Callable

import jax
import numpy as np

import rlxjax as rx
from benchmarks._common import options, table, visits, write

SIZES = (2**10, 2**16, 2**22)


def chain(elements: int) -> rx.Graph:
    graph = rx.Graph("chain")
    value = graph.input("x", (elements,))
    for op in ("abs", "sqrt", "tanh", "neg", "exp", "relu"):
        value = graph.add(op, [value])
    graph.set_outputs([value])
    return graph


def tree(elements: int) -> rx.Graph:
    graph = rx.Graph("tree")
    level = [graph.add("sigmoid", [graph.input(f"x{i}", (elements,))]) for i in range(8)]
    while len(level) > 1:
        level = [graph.add("add", list(pair)) for pair in zip(level[::2], level[1::2], strict=True)]
    graph.set_outputs(level)
    return graph


def softmax(elements: int) -> rx.Graph:
    graph = rx.Graph("softmax")
    x = graph.input("x", (elements,))
    largest = graph.add("broadcast", [graph.add("reduce_max", [x])], shape=(elements,))
    weights = graph.add("exp", [graph.add("sub", [x, largest])])
    total = graph.add("broadcast", [graph.add("reduce_sum", [weights])], shape=(elements,))
    graph.set_outputs([graph.add("div", [weights, total])])
    return graph


def normalisation(elements: int) -> rx.Graph:
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
    rng, plans, calls = np.random.default_rng(0), {}, {}
    for build in GRAPHS:
        for elements in SIZES:
            graph = build(elements)
            inputs = {
                node.id: jax.numpy.asarray(rng.uniform(0.5, 1.5, elements), "float32")
                for node in graph.nodes
                if node.op == "input"
            }
            for name in ("cost", "unfused"):
                plan = rx.plan_fusion(graph, plan=name)
                plans[build.__name__, elements, name] = plan
                calls[build.__name__, elements, name] = functools.partial(rx.execute_plan, plan, inputs)
    least_ns = {key: times.min() for key, times in visits(calls, rounds).items()}
    return [
        {
            "graph": name,
            "elements": elements,
            "kernels_before": plan.before.kernel_launches,
            "kernels_after": plan.after.kernel_launches,
            "traffic_before_bytes": plan.before.device_traffic_bytes,
            "traffic_after_bytes": plan.after.device_traffic_bytes,
            "unfused_ns": least_ns[name, elements, "unfused"],
            "fused_ns": least_ns[name, elements, "cost"],
            "speedup": least_ns[name, elements, "unfused"] / least_ns[name, elements, "cost"],
        }
        for (name, elements, kind), plan in plans.items()
        if kind == "cost"
    ]


def main() -> None:
    """Measure and print the table."""
    given = options(__doc__, rounds=60).parse_args()
    rows = measure(given.rounds)
    figures = [
        (
            row["graph"],
            f"{row['elements']:,}",
            f"{row['kernels_before']} → {row['kernels_after']}",
            f"{row['traffic_before_bytes'] / 1e6:.3g} → {row['traffic_after_bytes'] / 1e6:.3g}",
            f"{row['unfused_ns'] / 1e3:,.1f}",
            f"{row['fused_ns'] / 1e3:,.1f}",
            f"{row['speedup']:.2f}",
        )
        for row in rows
    ]
    headings = ["graph", "elements", "kernels", "traffic, MB", "kernel by kernel, us", "fused, us", "speed-up"]
    print(table(headings, figures))
    write(given.json, {"rows": rows})


if __name__ == "__main__":
    main()
