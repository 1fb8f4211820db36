"""Plans of stages by gradient against greedy ones and all plans, on random graphs; the time of a large graph.

python benchmarks/stage_planner.py [--graphs 500] [--seed 0] [--json FILE]

Half of the small graphs have a price on peak memory. The time of the large graph is that of a fresh process: its
first call compiles. On a busy machine, its seconds of processors say more.
"""

import argparse
import json
import platform
import time
from pathlib import Path

import numpy as np

import rlxjax as rx

#: Stages of the small graphs, at most, and of the large one.
SMALL, LARGE = 12, 1000
#: Bytes per ns, ns of a launch, and ns of a byte of the peak where it has a price.
BANDWIDTH, LAUNCH_NS, PRICE = 10.0, 3000.0, 0.2


def random_graph(stages: int, rng: np.random.Generator) -> rx.StageGraph:
    """Return stages that each read values of one to three of the twelve before, and write a value of two in ten.

    In every second pair, fusing costs something: about what it saves.
    """
    sizes = rng.lognormal(9.5, 1.2, (stages, 2))
    edges, values = [], []
    for consumer in range(1, stages):
        earlier = np.arange(max(0, consumer - 12), consumer)
        for producer in rng.choice(earlier, min(len(earlier), rng.integers(1, 4)), replace=False).tolist():
            result = int(rng.random() < 0.2)
            edges.append((producer, consumer, sizes[producer, result]))
            values.append(2 * producer + result)
    fused_ns = rng.lognormal(8.3, 1.0, len(edges)) * (rng.random(len(edges)) < 0.5)
    external = np.where(rng.random((2, stages)) < 0.3, rng.lognormal(9.0, 1.0, (2, stages)), 0.0)
    return rx.StageGraph.checked(
        rng.lognormal(7.5, 1.2, stages),
        edges,
        values=values,
        launch_ns=LAUNCH_NS,
        bytes_per_ns=BANDWIDTH,
        external_read_bytes=external[0],
        external_written_bytes=external[1],
        fused_ns=fused_ns,
    )


def cost_ns(plan: rx.StagePlan, price: float) -> float:
    """Return what a plan is chosen by."""
    return plan.time_ns + price * plan.peak_bytes


def measure_large(stages: int, seed: int) -> dict[str, float]:
    """Return the seconds of a large graph, its first call and another, and what its plans take."""
    result: dict[str, float] = {"stages": stages}
    for number, name in enumerate(("first call", "next call")):
        graph = random_graph(stages, np.random.default_rng([seed, number]))
        start, busy = time.perf_counter(), time.process_time()
        plan = rx.plan_stages(graph)
        result[f"{name}, s"] = time.perf_counter() - start
        result[f"{name}, s of processors"] = time.process_time() - busy
    start = time.perf_counter()
    greedy = rx.plan_stages(graph, method="greedy")
    result["greedy, s"] = time.perf_counter() - start
    return result | {
        "edges": len(graph.producer),
        "apart, ns": rx.soft_plan_ns(graph, np.full(len(graph.producer), -1e6), 1.0).item(),
        "greedy, ns": greedy.time_ns,
        "gradient, ns": plan.time_ns,
    }


def measure_small(graphs: int, seed: int) -> dict[str, float]:
    """Return how far gradient and greedy plans of small graphs are from the best ones."""
    excess: dict[str, list[float]] = {"gradient": [], "greedy": []}
    seconds: dict[str, list[float]] = {"gradient": [], "greedy": [], "exhaustive": []}
    groups = []
    for number in range(graphs):
        rng = np.random.default_rng([seed, number])
        graph, price = random_graph(int(rng.integers(2, SMALL + 1)), rng), PRICE * (number % 2)
        cost = {}
        for method, taken in seconds.items():
            start = time.perf_counter()
            plan = rx.plan_stages(graph, method=method, peak_price_ns_per_byte=price)
            taken.append(time.perf_counter() - start)
            cost[method] = cost_ns(plan, price)
        groups.append(len(plan.groups) / len(graph.compute_ns))
        for method, values in excess.items():
            values.append(cost[method] / cost["exhaustive"] - 1.0)
    gradient, greedy = (np.array(excess[method]) for method in ("gradient", "greedy"))
    return {
        "graphs": graphs,
        "mean groups a stage": float(np.mean(groups)),
        "gradient within 1 %": float(np.mean(gradient <= 0.01)),
        "gradient the best": float(np.mean(gradient <= 1e-9)),
        "gradient worst excess": float(gradient.max()),
        "gradient worse than greedy": int(np.sum(gradient > greedy + 1e-9)),
        "greedy within 1 %": float(np.mean(greedy <= 0.01)),
        "greedy the best": float(np.mean(greedy <= 1e-9)),
        "greedy worst excess": float(greedy.max()),
        **{f"{method}, median s": float(np.median(taken)) for method, taken in seconds.items()},
        "exhaustive, longest s": float(max(seconds["exhaustive"])),
    }


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = {
        "machine": platform.machine(),
        "large": measure_large(LARGE, arguments.seed),
        "small": measure_small(arguments.graphs, arguments.seed),
    }
    for name in ("small", "large"):
        print(f"| {name} graphs | |\n|---|---|")
        for key, value in result[name].items():
            shown = (
                f"{100 * value:.1f} %" if "within" in key or "the best" in key or "excess" in key else f"{value:.4g}"
            )
            print(f"| {key} | {shown} |")
        print()
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
