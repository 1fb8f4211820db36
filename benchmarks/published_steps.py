"""Compare published times of TPUs and GPUs with the predictions of `predict_for_target` for the same programs.

    python -m benchmarks.published_steps [--only WORD] [--json FILE]

`docs/evidence/published-steps.json` lists products, copies, attention, collectives and training steps with source,
shapes, devices, and the conversion from a published figure to a time. This file has each program in JAX and compiles
the program for the devices, which need not be there. Figures of calls that are waited for are compared with `time_ns`,
all others with `pipelined_ns`. A large step compiles in minutes, and the cache keeps the results.

All training steps use one transformer: a scan over layers that keep the tensors named in the source, Adam, bfloat16
products. "flash" attention is JAX's splash kernel on a TPU. On a GPU, plain attention replaces a library's kernel.
"""

import functools
import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rlxjax as rx
from benchmarks._common import ROOT, options, table, write

FIGURES = ROOT / "docs" / "evidence" / "published-steps.json"
#: Rows and columns of scores in one block of the splash kernel.
BLOCK = 1024
#: Products in the phases of the splash kernel, in units of the sequence's square times the head size.
PRODUCTS = {"_fwd": 2, "_dq": 3, "_dkv": 4}
Program = tuple[Callable[..., Any], tuple[Any, ...]]


def shape(sizes: Any, dtype: Any, mesh: AbstractMesh | None = None, *axes: Any) -> jax.ShapeDtypeStruct:
    """Return the type of an array, with its dimensions divided over the axes of a mesh, if there is a mesh."""
    return jax.ShapeDtypeStruct(tuple(sizes), dtype, sharding=None if mesh is None else NamedSharding(mesh, P(*axes)))


def product(figure: Any, mesh: Any, equation: str, shapes: Any, dtype: str) -> Program:
    """Return a product of two arrays; a product of 8-bit numbers is bfloat16."""
    out = jnp.bfloat16 if dtype.startswith("float8") else None
    fn = functools.partial(jnp.einsum, equation, preferred_element_type=out)
    return fn, tuple(shape(sizes, dtype) for sizes in shapes)


def copy(figure: Any, mesh: Any, sizes: Any, dtype: str) -> Program:
    """Return a copy of an array."""
    return lambda x: x.copy(), (shape(sizes, dtype),)


def all_reduce(figure: Any, mesh: Any, sizes: Any, dtype: str) -> Program:
    """Return the sum over devices of an array that each device holds."""
    fn = functools.partial(lax.psum, axis_name=mesh.axis_names)
    return jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False), (shape(sizes, dtype, mesh),)


def all_gather(figure: Any, mesh: Any, sizes: Any, dtype: str, axis: str) -> Program:
    """Return an array with one part on each device along an axis."""
    fn = functools.partial(lax.all_gather, axis_name=axis, tiled=True)
    whole = jax.shard_map(fn, mesh=mesh, in_specs=P(axis), out_specs=P(), check_vma=False)
    return whole, (shape(sizes, dtype, mesh, axis),)


def plain(q: jax.Array, k: jax.Array, v: jax.Array, bias: Any = None, letters: str = "btnh") -> jax.Array:
    """Return causal attention as products and a softmax; `letters` name batch, sequence, heads, head size in order."""
    keys = letters.replace("t", "s")
    scores = jnp.einsum(f"{letters},{keys}->bnts", q * q.shape[-1] ** -0.5, k)
    unseen = jnp.arange(scores.shape[-2])[:, None] < jnp.arange(scores.shape[-1])[None, :]
    scores = jnp.where(unseen, jnp.asarray(-3e4, q.dtype), scores)
    scores = scores.astype(jnp.float32) if bias is None else (scores + bias).astype(jnp.float32)
    return jnp.einsum(f"bnts,{keys}->{letters}", jax.nn.softmax(scores, -1).astype(q.dtype), v)


def attention(
    figure: Any, mesh: Any, batch: int, sequence: int, heads: int, head_dim: int, dtype: str, **more: bool
) -> Program:
    """Return causal attention, with options `gradient` and `bias`."""
    args = [shape((batch, sequence, heads, head_dim), dtype)] * 3
    args += [shape((batch, heads, sequence, sequence), dtype)] * more.get("bias", False)
    mean = jax.grad(lambda *args: plain(*args).mean(), (0, 1, 2))
    return mean if more.get("gradient") else plain, tuple(args)


def norm(x: jax.Array, scale: jax.Array | float = 1.0) -> jax.Array:
    """Return rows with a mean square of 1."""
    return x * lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-6).astype(x.dtype) * scale


def turned(x: jax.Array) -> jax.Array:
    """Return `[batch, heads, sequence, size]` with rotary embeddings."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[-2])[:, None] * 1e4 ** (-jnp.arange(half) / half)[None, :]
    cos, sin = jnp.cos(angles).astype(x.dtype)[None, None], jnp.sin(angles).astype(x.dtype)[None, None]
    first, last = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - last * sin, last * cos + first * sin], -1)


def priced(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `pallas_call` with the missing cost of the splash kernels: a causal mask keeps half of the scores."""

    def made(kernel: Any, *args: Any, name: str | None = None, **more: Any) -> Callable[..., Any]:
        products = next((count for phase, count in PRODUCTS.items() if phase in (name or "")), None)
        if products is None:
            return call(kernel, *args, name=name, **more)

        def costed(*operands: Any) -> Any:
            heads, rows, size = next(own.shape for own in operands if own is not None and own.dtype == jnp.bfloat16)
            moved = sum(own.nbytes for own in operands if own is not None)
            seen = heads * rows * rows // 2
            cost = pl.CostEstimate(flops=2 * products * seen * size, transcendentals=seen, bytes_accessed=moved)
            return call(kernel, *args, name=name, cost_estimate=cost, **more)(*operands)

        return costed

    return made


pl.pallas_call = priced(pl.pallas_call)


def flash(q: jax.Array, k: jax.Array, v: jax.Array, mesh: AbstractMesh | None) -> jax.Array:
    """Return causal attention of `[batch, heads, sequence, size]` by the splash kernel; heads over "tensor"."""
    names = () if mesh is None else mesh.axis_names
    heads = q.shape[1] // (mesh.shape["tensor"] if mesh is not None and "tensor" in names else 1)
    size = min(BLOCK, q.shape[2])
    names_of = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    sizes: dict[str, Any] = {f"block_{name}": size for name in names_of}
    blocks = splash.BlockSizes(**sizes)
    mask = splash.MultiHeadMask([splash.CausalMask((q.shape[2], q.shape[2]))] * heads)
    kernel = splash.make_splash_mha(mask, block_sizes=blocks, head_shards=1, q_seq_shards=1)
    call: Any = jax.vmap(kernel)
    if mesh is not None:
        spec = P(batch_axes(mesh), "tensor" if "tensor" in names else None)
        call = jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
    return call(q * q.shape[-1] ** -0.5, k, v)


def batch_axes(mesh: AbstractMesh) -> tuple[str, ...]:
    """Return the axes over which a batch is divided: all but "tensor"."""
    return tuple(name for name in mesh.axis_names if name != "tensor")


def placed(x: jax.Array, mesh: AbstractMesh | None) -> jax.Array:
    """Return `[batch, sequence, width]` with the batch divided, the width over "tensor" if there is such an axis."""
    if mesh is None:
        return x
    spec = P(batch_axes(mesh), None, "tensor" if "tensor" in mesh.axis_names else None)
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def attended(x: jax.Array, w: Mapping[str, jax.Array], mesh: Any, kernel: bool, qk_norm: bool) -> jax.Array:
    """Return a block of attention: projections, rotary embeddings, attention, and a projection back."""
    h = norm(x, w["norm"])
    q, k, v = (checkpoint_name(jnp.einsum("btd,dnh->bnth", h, w[name]), name) for name in ("query", "key", "value"))
    q, k = turned(q), turned(k)
    q, k = (norm(q), norm(k)) if qk_norm else (q, k)
    if not kernel:
        k, v = (jnp.repeat(one, q.shape[1] // one.shape[1], 1) for one in (k, v))
    mixed = flash(q, k, v, mesh) if kernel else plain(q, k, v, letters="bnth")
    return checkpoint_name(placed(jnp.einsum("bnth,nhd->btd", mixed, w["out"]), mesh), "out")


def layer(x: jax.Array, w: Mapping[str, jax.Array], mesh: Any, kernel: bool, qk_norm: bool) -> jax.Array:
    """Return the output of a transformer layer for `[batch, sequence, width]`."""
    w, x = {name: one.astype(x.dtype) for name, one in w.items()}, checkpoint_name(x, "input")
    x = x + attended(x, w, mesh, kernel, qk_norm)
    h = norm(x, w["norm2"])
    hidden = checkpoint_name(h @ w["up"], "hidden")
    hidden = jax.nn.silu(checkpoint_name(h @ w["gate"], "hidden")) * hidden if "gate" in w else jax.nn.gelu(hidden)
    return placed(x + hidden @ w["down"], mesh)


def weights(p: Mapping[str, Any], layers: tuple[int, ...], mesh: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the weights of layers, the width divided over the axis "fsdp", heads and hidden units over "tensor"."""
    d, n, h, f = p["width"], p["heads"], p["head_dim"], p.get("hidden", 0)
    fsdp, tensor = (name if mesh is not None and name in mesh.axis_names else None for name in ("fsdp", "tensor"))
    keys = (d, p["kv_heads"], h), (fsdp, tensor, None)
    own = {
        "norm": ((d,), (None,)),
        "query": ((d, n, h), (fsdp, tensor, None)),
        "key": keys,
        "value": keys,
        "out": ((n, h, d), (tensor, None, fsdp)),
        "norm2": ((d,), (None,)),
        "up": ((d, f), (fsdp, tensor)),
        "down": ((f, d), (tensor, fsdp)),
        **({"gate": ((d, f), (fsdp, tensor))} if p.get("gated") else {}),
    }
    dtype, first = p.get("state", p.get("dtype")), [None] * len(layers)
    return {name: shape((*layers, *sizes), dtype, mesh, *first, *axes) for name, (sizes, axes) in own.items()}


def attention_layer(figure: Any, mesh: Any, **p: Any) -> Program:
    """Return a block of plain attention with its projections."""
    x = shape((p["batch"], p["sequence"], p["width"]), p["dtype"])
    fn = functools.partial(attended, mesh=None, kernel=False, qk_norm=True)
    return fn, (x, {name: one for name, one in weights(p, (), None).items() if one.size})


def step(figure: Any, mesh: Any, **p: Any) -> Program:
    """Return a training step: loss, gradients, Adam."""
    kernel = p["attention"] == "flash" and figure["target"].startswith("tpu")
    one = functools.partial(layer, mesh=mesh, kernel=kernel, qk_norm="softcap" in p)
    if p["saved"] is not None:
        keep = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=p["saved"],
            names_which_can_be_offloaded=p.get("offloaded", []),
            offload_src="device",
            offload_dst="pinned_host",
        )
        one = jax.checkpoint(one, policy=keep)
    names = () if mesh is None else mesh.axis_names
    parts = [name if name in names else None for name in ("tensor", "fsdp")]
    words = shape((p["vocabulary"], p["width"]), p["state"], mesh, *parts)
    params = {"layers": weights(p, (p["layers"],), mesh), "embedding": words, "head": words}
    tokens = shape((p["batch"], p["sequence"]), jnp.int32, mesh, () if mesh is None else batch_axes(mesh))
    adam, like = optax.adamw(1e-4), {own.shape: own for own in jax.tree.leaves(params)}
    state = jax.tree.map(
        lambda own: like.get(own.shape, shape(own.shape, own.dtype, mesh)), jax.eval_shape(adam.init, params)
    )

    def loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        words = params["embedding"].astype(jnp.bfloat16)
        x = jax.nn.one_hot(tokens, len(words), dtype=words.dtype) @ words if p.get("one_hot") else words[tokens]
        x, _ = lax.scan(lambda x, w: (one(x, w), None), placed(x, mesh), params["layers"])
        logits = jnp.einsum("btd,vd->btv", norm(x), params["head"].astype(jnp.bfloat16))
        logits = p["softcap"] * jnp.tanh(logits / p["softcap"]) if "softcap" in p else logits
        logits = logits.astype(p.get("logits", "float32"))
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def train(params: Any, state: Any, tokens: jax.Array, targets: jax.Array) -> Any:
        count = p.get("microbatches", 1)

        def part(total: Any, pair: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *pair)), None

        pairs = [own.reshape(count, -1, own.shape[-1]) for own in (tokens, targets)]
        empty = jax.tree.map(jnp.zeros_like, params)
        grads = jax.grad(loss)(params, tokens, targets) if count == 1 else lax.scan(part, empty, pairs)[0]
        updates, state = adam.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(train, donate_argnums=(0, 1)), (params, state, tokens, tokens)


PROGRAMS = {fn.__name__: fn for fn in (product, copy, attention, attention_layer, all_reduce, all_gather, step)}


def predicted(figure: Mapping[str, Any]) -> dict[str, Any]:
    """Return the prediction of a published figure, or the reason for no prediction."""
    sizes, program = figure["mesh"], dict(figure["program"])
    kinds = (AxisType.Auto,) * len(sizes)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds) if sizes else None
    fn, args = PROGRAMS[program.pop("of")](figure, mesh, **program)
    try:
        said = rx.calibration.predict_for_target(fn, *args, target=figure["target"])
    except ValueError as error:
        return {"refusal": str(error)}
    piped = said.pipelined_ns, *(said.pipelined_interval_ns or ())
    central, low, high = (said.time_ns, said.low_ns, said.high_ns) if figure["waited_for"] else piped
    high = math.inf if said.uncounted else high
    return {
        "predicted_ns": central,
        "low_ns": low,
        "high_ns": high if math.isfinite(high) else None,
        "inside": low <= figure["time_ns"] <= high,
        "terms_ns": dict(said.terms_ns),
        "uncounted": list(said.uncounted),
        "stands_on": said.stands_on,
    }


def told(ns: float | None) -> str:
    """Return a time in a fitting unit."""
    if ns is None:
        return "-"
    unit, per = next((unit, per) for unit, per in (("s", 1e9), ("ms", 1e6), ("us", 1e3)) if ns >= per or per == 1e3)
    return f"{ns / per:.3g} {unit}"


def main() -> None:
    """Predict, print and write."""
    parser = options(__doc__)
    parser.add_argument("--only", default="", help="a word of the figures' names")
    given = parser.parse_args()
    rows, cells = [], []
    for figure in json.loads(FIGURES.read_text(encoding="utf-8"))["figures"]:
        if given.only not in figure["name"]:
            continue
        own = predicted(figure)
        rows.append({"name": figure["name"], "kind": figure["kind"], "time_ns": figure["time_ns"], **own})
        shown = [told(own.get(name)) for name in ("predicted_ns", "low_ns", "high_ns")]
        inside = own.get("refusal") or ("yes" if own["inside"] else "no")
        cells.append([figure["name"], told(figure["time_ns"]), *shown, inside])
        print(" | ".join(cells[-1]), file=sys.stderr, flush=True)
    print(table(["program", "published", "predicted", "from", "to", "inside"], cells))
    known = [row for row in rows if "inside" in row]
    summary = {"figures": len(rows), "predicted": len(known), "inside": sum(row["inside"] for row in known)}
    print(json.dumps(summary))
    write(given.json, {"summary": summary, "rows": rows})


if __name__ == "__main__":
    main()
