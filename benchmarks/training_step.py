"""Predict a transformer's training step on eight absent chips: time, memory, what binds, largest batch, cost.

    python -m benchmarks.training_step [--target tpu-v5e] [--meshes 8x1 4x2 2x4] [--prices FILE] [--out FILE]

The step has 12 layers, Adam and bfloat16 products, and recomputes layers for the gradient. The step names no mesh:
`rank_meshes` divides the batch over the first axis and the weights over the second axis. Each answer is printed with
its seconds. `docs/prices.example.json` has made-up prices.
"""

import sys
import time
from pathlib import Path
from typing import Any

import rlxjax as rx
from benchmarks._common import ROOT, options
from benchmarks.published_steps import Program, step

SIZES = {"layers": 12, "width": 768, "heads": 12, "kv_heads": 12, "head_dim": 64, "hidden": 3072}
STEP: dict[str, Any] = {"vocabulary": 16384, "sequence": 512, "dtype": "bfloat16", "state": "float32", "saved": []}


def of_batch(batch: int) -> Program:
    """Return the step of a batch of sequences, and its arguments as shapes."""
    return step({"target": ""}, None, batch=batch, attention="plain", **SIZES, **STEP)


def main() -> int:
    """Rank the meshes, find the largest batch of each mesh, and print."""
    parser = options(__doc__)
    parser.add_argument("--target", default="tpu-v5e")
    parser.add_argument("--meshes", nargs="+", default=["8x1", "4x2", "2x4"], help="sizes of the axes data and model")
    parser.add_argument("--batch", type=int, default=64, help="sequences of 512 words")
    parser.add_argument("--prices", type=Path, default=ROOT / "docs" / "prices.example.json")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    meshes = [dict(zip(("data", "model"), map(int, text.split("x")), strict=True)) for text in given.meshes]
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        print(text, flush=True)

    fn, args = of_batch(given.batch)
    start = time.perf_counter()
    tell(f">>> rx.targets.rank_meshes(train, *args, target={given.target!r}, meshes=..., prices=...)")
    tell(str(rx.targets.rank_meshes(fn, *args, target=given.target, meshes=meshes, prices=given.prices)))
    tell(f"({time.perf_counter() - start:.0f} s)")
    for mesh in meshes:
        start = time.perf_counter()
        tell(f"\n>>> rx.targets.largest(train_of_batch, {given.target!r}, mesh={mesh})")
        tell(str(rx.targets.largest(of_batch, given.target, mesh=mesh)))
        tell(f"({time.perf_counter() - start:.0f} s)")
    if given.out:
        given.out.write_text("\n".join(told) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
