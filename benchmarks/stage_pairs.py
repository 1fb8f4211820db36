"""Compare stages of JAX code that are jitted apart and together: a table of pairs and their times on this machine.

    python -m benchmarks.stage_pairs [--budget 80] [--only REGEX] [--json FILE] [--merge FILES]

Apart, each stage is its own `jax.jit`, and results stay on the device. Together, one `jax.jit` runs the composition. A
round visits all forms of all pairs in random order. The time of a form is the lower quartile over the rounds. `--merge`
times nothing and takes the medians of several runs' files, because runs differ by more than rounds of one run.
"""

import functools
import hashlib
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, nn

from benchmarks._common import options, table, visits, write
from calibrate.suites import shape_of
from rlxjax.clock import QUARTILE

#: Integer arguments lie below this, so they index any array with this number of rows.
INDICES = 1000
MOST_ROUNDS = 1000
#: Pairs with more noise have two typical times, and judge no verdict.
MOST_NOISE = 1.15


class Pair(NamedTuple):
    """Stages: each stage takes the results of the stage before, then its own arguments."""

    name: str
    stages: tuple[Callable, ...]
    args: tuple[tuple[jax.ShapeDtypeStruct, ...], ...]

    @property
    def half(self) -> str:
        """Return `tune` or `judge`, by a hash of the name."""
        return ("tune", "judge")[hashlib.sha256(self.name.encode()).digest()[0] % 2]

    def chain(self, stages: Sequence[Callable]) -> Callable:
        """Return the stages as one function of all stages' arguments, stage by stage."""
        numbers = [len(own) for own in self.args]

        def run(*args):
            results, used = (), 0
            for stage, number in zip(stages, numbers, strict=True):
                results = stage(*results, *args[used : used + number])
                results, used = results if isinstance(results, tuple) else (results,), used + number
            return results

        return run

    def apart(self) -> Callable:
        """Return a function that calls the jitted stages one after another."""
        return self.chain([jax.jit(stage) for stage in self.stages])

    def together(self) -> Callable:
        """Return one jitted function."""
        return jax.jit(self.chain(self.stages))

    def flat_args(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the arguments of all stages."""
        return tuple(arg for own in self.args for arg in own)

    def stage_args(self) -> list[tuple[jax.ShapeDtypeStruct, ...]]:
        """Return all arguments of each stage: the results of the stage before, then its own."""
        results, shapes = (), []
        for stage, own in zip(self.stages, self.args, strict=True):
            shapes.append((*results, *own))
            results = jax.eval_shape(stage, *shapes[-1])
            results = results if isinstance(results, tuple) else (results,)
        return shapes

    def programs(self) -> list[tuple[Callable, tuple[jax.ShapeDtypeStruct, ...]]]:
        """Return functions with their arguments: all stages as one function, then each stage."""
        return [(self.chain(self.stages), self.flat_args()), *zip(self.stages, self.stage_args(), strict=True)]


def arrays(shapes: Sequence[jax.ShapeDtypeStruct], seed: int = 0) -> tuple[jax.Array, ...]:
    """Return random arrays: normal ones, integers from 0 to `INDICES`, all bits of unsigned integers and bytes."""
    rng = np.random.default_rng(seed)

    def array(shape: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(shape.dtype, jnp.floating):
            return jnp.asarray(rng.standard_normal(shape.shape, np.float32)).astype(shape.dtype)
        info = jnp.iinfo(shape.dtype)
        low, high = (0, INDICES) if shape.dtype == jnp.int32 else (info.min, info.max)
        return jnp.asarray(rng.integers(low, high, shape.shape, shape.dtype))

    return tuple(array(shape) for shape in shapes)


def doubled(x):
    return 2 * x


def scaled(x):
    return x * 2 + 1


def centred(x):
    return x / 255 - 0.5


def cos_and_sin(x):
    return jnp.cos(x), jnp.sin(x)


def look_up(table, index):
    return table[index]


def dequantised(x, scale):
    return x.astype(jnp.float32) * scale[:, None]


def channels_last(x):
    return x.transpose(0, 2, 3, 1)


def channels_first(x):
    return x.transpose(0, 3, 1, 2)


def on_weights(w, x):
    return x @ w


def with_product(x, w):
    return x, x @ w


def scores(queries, keys):
    return queries @ keys.swapaxes(-1, -2) / 8


def sum_of_rows(x):
    return x.sum(-1)


def running_sum(x):
    return jnp.cumsum(x, -1)


def conv_relu(x, kernel):
    return nn.relu(conv(x, kernel))


def conv(x, kernel, strides=(1, 1), padding="SAME"):
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def max_pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def sum_pool(x):
    return lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")


def series(x, terms=16):
    total = x
    for term in range(terms):
        total = total * x + (0.1 * term + 0.3)
    return total


def hashed(x):
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def taps(x, number=3, axis=1):
    size = x.shape[axis] - number + 1
    return sum(lax.slice_in_dim(x, tap, tap + size, axis=axis) * (0.1 + tap) for tap in range(number))


def taps_2d(x, number=3):
    rows, columns = (size - number + 1 for size in x.shape)
    return sum(
        x[row : row + rows, column : column + columns] * (0.1 + row * column)
        for row in range(number)
        for column in range(number)
    )


def laplacian(x):
    return jnp.roll(x, 1, 0) + jnp.roll(x, -1, 0) + jnp.roll(x, 1, 1) + jnp.roll(x, -1, 1) - 4 * x


def layer_norm(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)


def distances(x, y):
    return jnp.sum(jnp.square(x[:, None] - y[None]), -1)


def rotate(cosine, sine, x):
    half = x.shape[-1] // 2
    first, second, cosine, sine = x[..., :half], x[..., half:], cosine[:, None], sine[:, None]
    return jnp.concatenate([first * cosine - second * sine, first * sine + second * cosine], -1)


def adam_moments(grad, first, second):
    return 0.9 * first + 0.1 * grad, 0.99 * second + 0.01 * grad * grad


def adam_step(first, second, params):
    return params - 1e-3 * first / (jnp.sqrt(second) + 1e-8)


def clip(*grads):
    norm = jnp.sqrt(sum(jnp.square(grad).sum() for grad in grads))
    return tuple(grad * jnp.minimum(1.0, 1.0 / norm) for grad in grads)


def cross_entropy(logits, labels):
    return -jnp.take_along_axis(nn.log_softmax(logits), labels[:, None], 1).mean()


def mlp_grads(w, v, x, y):
    return jax.grad(lambda w, v: jnp.square(nn.gelu(x @ w) @ v - y).mean(), (0, 1))(w, v)


def recurrence(x, decay):
    return lax.scan(lambda state, now: (decay * state + now,) * 2, jnp.zeros_like(x[0]), x)[1]


def attention(scores, values):
    return nn.softmax(scores, -1) @ values


def frames(x, length=512, hop=256):
    starts = range(0, x.shape[1] - length + 1, hop)
    return jnp.stack([x[:, start : start + length] for start in starts], 1) * jnp.hanning(length)


def total_variation(*differences):
    return sum(jnp.square(difference).sum() for difference in differences)


def luminance(x):
    return 0.3 * x[..., 0] + 0.59 * x[..., 1] + 0.11 * x[..., 2]


def slopes(x):
    return x[1:, :-1] - x[:-1, :-1], x[:-1, 1:] - x[:-1, :-1]


def turned(cosine, sine, a, b):
    return a * cosine - b * sine, a * sine + b * cosine


def energy(offsets):
    return (1.0 / (jnp.square(offsets).sum(-1) + 0.1)).sum()


def patches(x, size=3):
    rows, columns = x.shape[1] - size + 1, x.shape[2] - size + 1
    parts = [x[:, row : row + rows, column : column + columns] for row in range(size) for column in range(size)]
    return jnp.stack(parts, -1).reshape(x.shape[0], rows, columns, -1)


def recurrent(x, w):
    return lax.scan(lambda state, now: (jnp.tanh(state @ w + now),) * 2, jnp.zeros_like(x[0]), x)[1]


def linear_scan(decay, x):
    return lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, x), axis=0)[1]


def predicted(x, p, f, q):
    return f @ x, f @ p @ f.T + q


def corrected(x, p, h, r, z):
    gain = jnp.linalg.solve(h @ p @ h.T + r, h @ p).T
    return x + gain @ (z - h @ x), p - gain @ h @ p


def descent(a, b, p, q):
    return p - 0.1 * a, q - 0.1 * b


def edges_of(x):
    return jnp.abs(x[2:, 1:-1] - x[:-2, 1:-1]) + jnp.abs(x[1:-1, 2:] - x[1:-1, :-2])


def noise(seed):
    return jax.random.normal(jax.random.key(seed), (1024,))


def kept(seed):
    return jax.random.bernoulli(jax.random.key(seed), 0.9, (512, 1024))


def counts(x):
    return jnp.cumsum(jnp.zeros(INDICES).at[x].add(1.0))


def pair(name: str, shapes: str, *stages: Callable) -> Pair:
    """Return a pair.

    Args:
        name: the name of the pair.
        shapes: shapes of each stage's arguments between bars: `1024,64 i32[512] | 64` are an array of floats and one of
            integers for the first stage, and floats for the second.
        *stages: functions.
    """
    parts = [
        tuple(shape_of(shape if "[" in shape else f"f32[{shape}]") for shape in own.split())
        for own in shapes.split("|")
    ]
    return Pair(name, stages, (*parts, *[()] * (len(stages) - len(parts))))


#: Name, shapes and stages of each pair.
ROWS = [
    # Elementwise code.
    ("scale, shift: 1 k", "1024", doubled, lambda x: x + 1),
    ("scale, shift: 4 MB", "1024,1024", doubled, lambda x: x + 1),
    ("scale, shift: 100 MB", "5000,5000", doubled, lambda x: x + 1),
    ("tanh, square, exp: 1 MB", "256,1024", jnp.tanh, jnp.square, jnp.exp),
    (
        "quantise, dequantise",
        "1024,1024",
        lambda x: jnp.round(x * 10).astype(jnp.int8),
        lambda q: q.astype(jnp.float32) / 10,
    ),
    ("complex product, modulus", "1024,512 1024,512", lambda a, b: lax.complex(a, b) * lax.complex(b, a), jnp.abs),
    (
        "forces, integrate",
        "4096,3 | 4096,3 4096,3",
        lambda x: -x - 0.1 * x**3,
        lambda f, x, v: (x + 0.01 * (v + 0.01 * f), v + 0.01 * f),
    ),
    ("adam moments, step: 4 MB", "1048576 1048576 1048576 | 1048576", adam_moments, adam_step),
    ("adam moments, step: 4 kB", "1024 1024 1024 | 1024", adam_moments, adam_step),
    ("clip, update", "512,512 512,512 | 512,512 512,512", clip, descent),
    ("grads, clip, update", "128,256 256,64 256,128 256,64 | | 128,256 256,64", mlp_grads, clip, descent),
    ("mask of a dropout, apply", "i32[] | 512,1024", kept, lambda mask, x: jnp.where(mask, x / 0.9, 0.0)),
    ("scale, set a row", "1024,1024", doubled, lambda x: x.at[0].set(1.0)),
    (
        "tanh, write into a cache",
        "16,512,64 | 16,1024,64",
        jnp.tanh,
        lambda x, cache: lax.dynamic_update_slice(cache, x, (0, 128, 0)),
    ),
    (
        "gelu, concatenate",
        "1024,256 1024,256",
        lambda x, y: (nn.gelu(x), nn.gelu(y)),
        lambda a, b: jnp.concatenate([a, b, a], -1),
    ),
    ("cos and sin, interleave", "1024,512", cos_and_sin, lambda a, b: jnp.stack([a, b], -1).reshape(1024, -1)),
    ("tanh, pad", "1024,1024", jnp.tanh, lambda x: jnp.pad(x, 1)),
    ("tanh, insert zeros", "512,512", jnp.tanh, lambda x: lax.pad(x, 0.0, ((0, 0, 1), (0, 0, 1)))),
    ("tanh, shift", "16,512,64", jnp.tanh, lambda x: jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))),
    # Transposes.
    ("gelu, transpose", "1024,1024", nn.gelu, jnp.transpose),
    ("exp, transpose", "1024,1024", jnp.exp, jnp.transpose),
    ("transpose, add", "1024,1024 | 1024,1024", jnp.transpose, jnp.add),
    ("transpose, mean of both", "1024,1024", lambda x: (x, x.T), lambda x, y: (x + y) / 2),
    ("layer norm, transpose", "1000,1024", layer_norm, jnp.transpose),
    ("channels last, bias", "4,64,64,64 | 64", channels_last, jnp.add),
    ("colours last, normalise", "4,3,224,224", channels_last, centred),
    ("matmul, transpose and relu", "1024,64 64,1024", jnp.matmul, lambda y: nn.relu(y.T)),
    ("transpose, softmax", "1000,1000", jnp.transpose, nn.softmax),
    ("keys by head, scale", "4,256,8,64", channels_last, lambda k: k / 8),
    ("queries by head, scale", "4,256,8,64", lambda q: q.transpose(0, 2, 1, 3), lambda q: q / 8),
    ("colours first, normalise", "4,224,224,3", channels_first, centred),
    ("scale, transpose, shift and transpose", "1000,1000", doubled, jnp.transpose, lambda x: x.T + 1),
    ("channels last, convolution, channels first", "4,16,64,64 | 3,3,16,16", channels_last, conv, channels_first),
    # A result that the next stage reads more than once.
    ("series, row of a product", "1024 | 1024,1024", series, lambda y, x: y * x),
    ("series, column of a product", "1024 | 1024,1024", series, lambda y, x: y[:, None] * x),
    ("exp, row of a product", "1024 | 1024,1024", jnp.exp, lambda y, x: y * x),
    ("series, repeat", "128,128", series, lambda y: jnp.repeat(y, 64, axis=0)),
    ("cos and sin of angles, rotate", "1024,32 | 1024,16,64", cos_and_sin, rotate),
    ("cos and sin of angles, turn", "512 | 256,512 256,512", cos_and_sin, turned),
    (
        "sines of positions, add",
        "128 | 8,512,128",
        lambda w: jnp.sin(jnp.arange(512.0)[:, None] * w),
        lambda p, x: x + p,
    ),
    ("noise, add to rows", "i32[] | 1024,1024", noise, lambda y, x: x + y),
    ("hash, exclusive or of all pairs", "u32[1024] | u32[1024]", hashed, lambda y, x: y ^ x[:, None]),
    ("series, look up", "1024 | i32[1048576]", series, look_up),
    ("series, look up rows", "1024,64 | i32[16384]", series, look_up),
    ("sin, look up", "1024 | i32[262144]", jnp.sin, look_up),
    ("softplus, look up", "1000 | i32[262144]", nn.softplus, look_up),
    (
        "gamma curve, look up pixels",
        "f32[] | i32[512,512]",
        lambda gamma: jnp.linspace(0, 1, INDICES) ** gamma,
        look_up,
    ),
    ("cumulative histogram, equalise", "i32[65536] | i32[65536]", counts, lambda y, index: (y / y[-1])[index]),
    ("layer of nodes, gather edges", "1000,64 64,64 | i32[16384]", lambda h, w: nn.silu(h @ w), look_up),
    ("dequantise a table, gather", "i8[1000,64] 1000 | i32[16384]", dequantised, look_up),
    (
        "normalise a table, gather",
        "1000,64 | i32[8192]",
        lambda t: t * lax.rsqrt(jnp.square(t).sum(-1, keepdims=True)),
        look_up,
    ),
    ("embed, add positions", "1000,256 i32[8,512] | 512,256", lambda t, index: t[index] * 8, jnp.add),
    (
        "gather two rows, dot",
        "1000,64 i32[8192] i32[8192]",
        lambda t, i, j: (t[i], t[j]),
        lambda a, b: (a * b).sum(-1),
    ),
    ("gather rows, mean", "1024,512 i32[4096]", look_up, lambda y: y.mean(0)),
    # Stencils.
    ("series, Laplacian", "1024,1024", series, laplacian),
    ("Laplacian, Laplacian", "512,512", laplacian, laplacian),
    ("3 taps, 3 taps", "1024,1024", taps, lambda x: taps(x, 3, 0)),
    ("9 taps, 9 taps", "1024,1024", lambda x: taps(x, 9, 1), lambda x: taps(x, 9, 0)),
    ("3 x 3 taps, 3 x 3 taps", "1024,1024", taps_2d, taps_2d),
    ("luminance, 3 x 3 taps", "512,512,3", luminance, taps_2d),
    ("luminance, edges", "512,512,3", lambda x: x @ jnp.array([0.3, 0.59, 0.11]), edges_of),
    ("sin, difference", "512,512", jnp.sin, jnp.diff),
    ("tanh, difference", "1024,1024", jnp.tanh, jnp.diff),
    ("gelu, 3 taps", "1024,1024", nn.gelu, taps),
    ("exp, 9 taps", "1024,1024", jnp.exp, lambda x: taps(x, 9, 1)),
    # Reductions.
    ("exp, sum of rows", "1024,1024", jnp.exp, sum_of_rows),
    ("gelu, sum of columns", "1024,1024", nn.gelu, lambda y: y.sum(0)),
    ("square, sum: 16 kB", "4096", jnp.square, jnp.sum),
    ("transpose, sum of rows", "1024,1024", lambda x: x.T + 1, sum_of_rows),
    ("gelu, three reductions", "1024,1024", nn.gelu, lambda y: (y.sum(-1), y.max(-1), y.min(0))),
    ("pad, squares of rows", "1024,1024", lambda x: jnp.pad(x, ((0, 0), (8, 8))), lambda y: jnp.square(y).sum(-1)),
    (
        "windows, maximum",
        "16,4095",
        lambda x: jnp.stack([x[:, start : start + 4032] for start in range(64)], 1),
        lambda w: w.max(1),
    ),
    ("differences, total variation: 4 MB", "1024,1024", lambda x: (jnp.diff(x, axis=0), jnp.diff(x)), total_variation),
    (
        "differences, total variation: 5 MB",
        "108,108,108",
        lambda x: tuple(jnp.diff(x, axis=axis) for axis in range(3)),
        total_variation,
    ),
    ("difference, largest", "1048576", jnp.diff, lambda d: jnp.abs(d).max()),
    ("slopes, mean steepness", "1024,1024", slopes, lambda a, b: jnp.sqrt(a * a + b * b + 1e-6).mean()),
    ("offsets, energy", "512,3", lambda x: x[:, None] - x, energy),
    ("sums of all pairs, best", "512 512,512", lambda a, b: a[:, None] + b, lambda y: (y.max(0), y.argmax(0))),
    (
        "causal mask, softmax",
        "8,512,512",
        lambda s: jnp.where(jnp.tril(jnp.ones((512, 512), bool)), s, -1e9),
        lambda s: nn.softmax(s, -1),
    ),
    (
        "statistics of a batch, normalise",
        "4096,512",
        lambda x: (x, x.mean(0), x.var(0)),
        lambda x, m, v: (x - m) * lax.rsqrt(v + 1e-5),
    ),
    ("cumulative sum, difference", "256,4096", running_sum, jnp.diff),
    ("cumulative sum, moving mean", "256,4096", running_sum, lambda y: (y[:, 64:] - y[:, :-64]) / 64),
    ("cumulative sum of logarithms, exp", "256,4096", lambda x: jnp.cumsum(jnp.log(jnp.abs(x)), -1), jnp.exp),
    # Products of matrices.
    ("layer norm, matmul", "512,512 | 512,512", layer_norm, jnp.matmul),
    ("layer norm, matmul: 8 x 16", "8,16 | 16,16", layer_norm, jnp.matmul),
    ("matmul, gelu, matmul", "256,256 256,1024 | | 1024,256", jnp.matmul, nn.gelu, jnp.matmul),
    ("matmul, matmul: 64 MB between", "32768,64 64,512 | 512,64", jnp.matmul, jnp.matmul),
    (
        "matmul, two thin layers: 20 MB between",
        "10240,16 16,512 | 512,512 512,16",
        jnp.matmul,
        lambda c, d, e: (c @ d) @ e,
    ),
    ("attention scores, pick", "8,256,64 8,256,64 | 8,256,64", scores, attention),
    ("attention scores, softmax, pick: 24 MB", "24,512,32 24,512,32 | | 24,512,32", scores, nn.softmax, jnp.matmul),
    ("low rank update, matmul", "512,512 512,8 8,512 | 64,512", lambda w, a, b: w + a @ b, on_weights),
    (
        "layer, low rank layer beside it",
        "256,512 512,512 | 512,8 8,512",
        with_product,
        lambda x, y, a, b: y + (x @ a) @ b,
    ),
    ("transpose, matmul", "512,512 | 512,512", jnp.transpose, jnp.matmul),
    ("transpose, matmul: 64 columns", "64,4096 | 64,64", jnp.transpose, jnp.matmul),
    ("transpose, batch of matmuls", "16,128,128 | 16,128,128", lambda a: a.swapaxes(-1, -2), jnp.matmul),
    ("matmul, transposed factor", "512,512 | 512,512", jnp.transpose, lambda y, a: a @ y),
    ("transpose, matrix times vector", "1024,1024 | 1024", jnp.transpose, jnp.matmul),
    ("transpose, matrix times vector: 1000", "1000,1000 | 1000", jnp.transpose, jnp.matmul),
    ("transpose and scale, vector times matrix", "1024,1024 | 1024", lambda a: a.T * 2, lambda h, v: v @ h),
    ("scale, matrix times vector", "1024,1024 | 1024", scaled, jnp.matmul),
    ("mask, matrix times vector", "2048,2048 | 2048", jnp.tril, jnp.matmul),
    ("dequantise, matrix times vector", "i8[2048,2048] 2048 | 2048", dequantised, jnp.matmul),
    ("convert bfloat16, matmul", "bf16[512,512] | 64,512", lambda w: w.astype(jnp.float32), on_weights),
    (
        "kernel of a line, matrix times vector",
        "2048 2048 | 2048",
        lambda x, y: jnp.exp(-jnp.square(x[:, None] - y)),
        jnp.matmul,
    ),
    (
        "features of Fourier, matmul",
        "4096,3 3,64 | 128,32",
        lambda x, b: jnp.concatenate([jnp.sin(x @ b), jnp.cos(x @ b)], -1),
        jnp.matmul,
    ),
    ("matmul, cross entropy", "512,256 256,1024 | i32[512]", jnp.matmul, cross_entropy),
    (
        "logits, gradient of cross entropy",
        "256,256 256,1024 | i32[256]",
        with_product,
        lambda x, logits, y: x.T @ jax.grad(cross_entropy)(logits, y),
    ),
    ("one hot, matmul", "i32[512] | 1000,64", lambda index: nn.one_hot(index, INDICES), jnp.matmul),
    ("gather, two layers", "1000,64 i32[1024] | 64,256 256,64", look_up, lambda x, w, v: nn.relu(x @ w) @ v),
    (
        "cholesky, solve",
        "128,128 | 128,16",
        lambda a: jnp.linalg.cholesky(a @ a.T + 128 * jnp.eye(128)),
        lambda c, b: jax.scipy.linalg.solve_triangular(c, b, lower=True),
    ),
    ("factor, solve", "128,64 | 128,8", jnp.linalg.qr, lambda q, r, b: jax.scipy.linalg.solve_triangular(r, q.T @ b)),
    ("scale, cholesky", "256,256", doubled, lambda a: jnp.linalg.cholesky(a + 300 * jnp.eye(256))),
    ("shift, solve", "256,256 | 256,4", lambda a: a + 300 * jnp.eye(256), jnp.linalg.solve),
    (
        "invert 3 x 3, map points",
        "64,3,3 | 64,128,3",
        lambda a: jnp.linalg.inv(a + 3 * jnp.eye(3)),
        lambda m, p: p @ m,
    ),
    ("predict a state, correct it", "6 6,6 6,6 6,6 | 2,6 2,2 2", predicted, corrected),
    # Images, spectra, sorts, recurrences.
    ("convolution and relu, pool", "4,64,64,8 3,3,8,16", conv_relu, max_pool),
    (
        "convolution and relu, mean, dense",
        "4,32,32,16 3,3,16,32 | | 32,10",
        conv_relu,
        lambda y: y.mean((1, 2)),
        jnp.matmul,
    ),
    (
        "normalise, relu and convolution",
        "4,64,64,16 16 16 | 3,3,16,16",
        lambda x, m, v: (x - m) * lax.rsqrt(v * v + 1e-5),
        lambda y, k: conv(nn.relu(y), k),
    ),
    ("patches, matmul", "4,64,64,8 | 72,16", patches, jnp.matmul),
    ("gelu, maximum pool", "4,128,128,16", nn.gelu, max_pool),
    ("gelu, overlapping pool", "4,128,128,16", nn.gelu, sum_pool),
    ("resize, convolution", "4,32,32,8 | 3,3,8,16", lambda x: jax.image.resize(x, (4, 64, 64, 8), "bilinear"), conv),
    (
        "dilate a kernel, convolution",
        "3,3,16,16 | 4,64,64,16",
        lambda k: lax.pad(k, 0.0, ((0, 0, 1), (0, 0, 1), (0, 0, 0), (0, 0, 0))),
        lambda k, x: conv(x, k),
    ),
    ("transform, filter, transform back", "256,1024 | 513", jnp.fft.rfft, jnp.multiply, jnp.fft.irfft),
    (
        "transform, top k of the power",
        "512,1024",
        jnp.fft.rfft,
        lambda y: lax.top_k(jnp.square(y.real) + jnp.square(y.imag), 8),
    ),
    (
        "power, logarithm of bands",
        "512,512 | 257,64",
        lambda x: jnp.square(jnp.abs(jnp.fft.rfft(x))),
        lambda p, w: jnp.log(jnp.abs(p @ w) + 1e-6),
    ),
    ("frames, transform", "64,4096", frames, jnp.fft.rfft),
    ("scale, transform", "1024,512", scaled, jnp.fft.rfft),
    ("distances, top k", "512,16 512,16", distances, lambda d: lax.top_k(-d, 8)),
    (
        "top k, gather",
        "64,1000 | 64,1000,32",
        lambda s: lax.top_k(s, 16)[1],
        lambda index, v: jnp.take_along_axis(v, index[..., None], 1),
    ),
    ("sort, take", "16384 | 16384", jnp.argsort, lambda order, y: y[order]),
    ("scale, sort", "64,256", scaled, jnp.sort),
    ("tanh, interpolate", "256 | 65536", jnp.tanh, lambda y, x: jnp.interp(x, jnp.linspace(-3, 3, 256), y)),
    (
        "sums of segments, gather",
        "8192,32 i32[8192] | i32[8192]",
        lambda x, index: jax.ops.segment_sum(x, index, INDICES),
        look_up,
    ),
    (
        "scale, add at indices",
        "4096,64 | i32[4096]",
        scaled,
        lambda u, index: jnp.zeros((INDICES, 64)).at[index].add(u),
    ),
    ("recurrence, readout", "256,64 64 | 64,16", recurrence, jnp.matmul),
    ("embed, recurrent network", "64,16,32 32,64 | 64,64", jnp.matmul, recurrent),
    ("decays, associative scan", "16 256,64 | 256,64,16", lambda a, dt: jnp.exp(a * dt[..., None]), linear_scan),
]
PAIRS = [pair(*row) for row in ROWS]


class Timing(NamedTuple):
    """The times of a pair. The noise is the factor, at least 1, between the gains in odd and even rounds or runs."""

    apart_ns: float
    together_ns: float
    noise: float

    @classmethod
    def of(cls, times: np.ndarray, middle: Callable[..., np.ndarray]) -> "Timing":
        """Return the timing from times `[rounds, 2]`, apart and together."""
        odd, even = (middle(times[first::2], axis=0) for first in (1, 0))
        noise = np.exp(np.abs(np.log(odd[0] / odd[1] * even[1] / even[0])))
        return cls(*middle(times, axis=0).tolist(), float(noise))

    @classmethod
    def of_rounds(cls, apart: np.ndarray, together: np.ndarray) -> "Timing":
        """Return the timing of the times of rounds, `[rounds]` each."""
        return cls.of(np.stack([apart, together], 1), functools.partial(np.quantile, q=QUARTILE))


def measure(pairs: Sequence[Pair], budget_s: float, seed: int) -> dict[str, Timing]:
    """Return the timings of the pairs by name; the budget includes compiling."""
    until_s, calls = time.perf_counter() + budget_s, {}
    for pair in pairs:
        args = arrays(pair.flat_args())
        for form in (pair.apart(), pair.together()):
            calls[pair.name, len(calls) % 2] = functools.partial(form, *args)
    found = visits(calls, MOST_ROUNDS, least=4, until_s=until_s, seed=seed)
    return {pair.name: Timing.of_rounds(*(found[pair.name, form] for form in (0, 1))) for pair in pairs}


def main() -> None:
    """Measure, and print a table."""
    parser = options(__doc__, budget=80.0, seed=0)
    parser.add_argument("--only", default="", help="pairs whose names have a match of this expression")
    parser.add_argument("--merge", type=Path, nargs="+")
    given = parser.parse_args()
    halves = {pair.name: pair.half for pair in PAIRS}
    if given.merge:
        files = [json.loads(path.read_text(encoding="utf-8"))["pairs"] for path in given.merge]
        if len(files) < 2 or any(list(file) != list(files[0]) for file in files) or files[0].keys() - halves.keys():
            parser.error("--merge takes two or more files of the same pairs of the table")
        times = {
            name: np.array([[file[name][key] for key in Timing._fields[:2]] for file in files]) for name in files[0]
        }
        result = {name: Timing.of(own, np.median) for name, own in times.items()}
    else:
        chosen = [pair for pair in PAIRS if re.search(given.only, pair.name)]
        if not chosen:
            parser.error("no pair has such a name")
        result = measure(chosen, given.budget, given.seed)
    rows = [
        (name, halves[name], f"{apart / 1e3:.1f}", f"{together / 1e3:.1f}", f"{100 * (apart / together - 1):+.1f} %")
        + (f"{100 * (noise - 1):+.1f} %",)
        for name, (apart, together, noise) in sorted(result.items(), key=lambda item: item[1][0] / item[1][1])
    ]
    print(table(["stages", "half", "apart, us", "together, us", "gain", "noise"], rows))
    write(given.json, {"pairs": {name: timing._asdict() for name, timing in result.items()}})


if __name__ == "__main__":
    main()
