"""Stages of JAX code jitted apart against together: a table of them, and what they take on this machine.

    python -m benchmarks.stage_pairs [--budget 80] [--half tune|judge] [--only REGEX] [--json FILE] [--merge FILES]

Apart, each stage is a `jax.jit` of its own and its results stay on the device; together, one `jax.jit` runs the
composition. A round visits the pairs in random order, and of each pair both forms in random order, as the calibrate
job visits functions. The time of a form is the lowest decile over the rounds. `--merge` times nothing: it takes the
medians of the files of several runs, which differ by more than the rounds of one.
"""

import argparse
import functools
import gc
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, nn

from rlxjax.clock import QUARTILE, mean_ns, visit_ns

#: Integer arguments lie below this, so that they index whatever has as many rows.
INDICES = 1000


class Pair(NamedTuple):
    """Stages of which each is called with the results of the one before it, then with arguments of its own."""

    name: str
    stages: tuple[Callable, ...]
    args: tuple[tuple[jax.ShapeDtypeStruct, ...], ...]

    @property
    def half(self) -> str:
        """Return `tune` or `judge`, by a hash of the name."""
        return ("tune", "judge")[hashlib.sha256(self.name.encode()).digest()[0] % 2]

    def chain(self, stages: Sequence[Callable]) -> Callable:
        """Return the stages as one function of the arguments of all of them, stage by stage."""
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
        """Return all arguments of each stage: the results that it gets, then its own."""
        results, shapes = (), []
        for stage, own in zip(self.stages, self.args, strict=True):
            shapes.append((*results, *own))
            results = jax.eval_shape(stage, *shapes[-1])
            results = results if isinstance(results, tuple) else (results,)
        return shapes


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


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    """Return the shape of floats."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    """Return the shape of indices."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def of(dtype, *shape: int) -> jax.ShapeDtypeStruct:
    """Return the shape of another dtype."""
    return jax.ShapeDtypeStruct(shape, dtype)


def conv(x, kernel, strides=(1, 1), padding="SAME"):
    """Return the convolution of channels-last images."""
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def max_pool(x):
    """Return the maxima of windows of 2 x 2."""
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def sum_pool(x):
    """Return the sums of windows of 3 x 3 that overlap."""
    return lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")


def series(x, terms=16):
    """Return a power series of x by Horner's rule."""
    total = x
    for term in range(terms):
        total = total * x + (0.1 * term + 0.3)
    return total


def hashed(x):
    """Return a hash of 32 bits."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def taps(x, number, axis):
    """Return a filter of some taps along an axis."""
    size = x.shape[axis] - number + 1
    return sum(lax.slice_in_dim(x, tap, tap + size, axis=axis) * (0.1 + tap) for tap in range(number))


def taps_2d(x, number):
    """Return a filter of number x number taps."""
    rows, columns = (size - number + 1 for size in x.shape)
    return sum(
        x[row : row + rows, column : column + columns] * (0.1 + row * column)
        for row in range(number)
        for column in range(number)
    )


def laplacian(x):
    """Return the five-point Laplacian on a torus."""
    return jnp.roll(x, 1, 0) + jnp.roll(x, -1, 0) + jnp.roll(x, 1, 1) + jnp.roll(x, -1, 1) - 4 * x


def layer_norm(x):
    """Return rows of mean zero and variance one."""
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)


def distances(x, y):
    """Return the squared distances of all pairs of rows."""
    return jnp.sum(jnp.square(x[:, None] - y[None]), -1)


def rotate(cosine, sine, x):
    """Return the halves of the last axis, rotated by angles."""
    half = x.shape[-1] // 2
    first, second, cosine, sine = x[..., :half], x[..., half:], cosine[:, None], sine[:, None]
    return jnp.concatenate([first * cosine - second * sine, first * sine + second * cosine], -1)


def adam_moments(grad, first, second):
    """Return the moments that Adam keeps."""
    return 0.9 * first + 0.1 * grad, 0.99 * second + 0.01 * grad * grad


def adam_step(first, second, params):
    """Return the parameters after a step along the moments."""
    return params - 1e-3 * first / (jnp.sqrt(second) + 1e-8)


def clip(*grads):
    """Return gradients of norm one at most."""
    norm = jnp.sqrt(sum(jnp.square(grad).sum() for grad in grads))
    return tuple(grad * jnp.minimum(1.0, 1.0 / norm) for grad in grads)


def cross_entropy(logits, labels):
    """Return the mean loss."""
    return -jnp.take_along_axis(nn.log_softmax(logits), labels[:, None], 1).mean()


def mlp_grads(w, v, x, y):
    """Return the gradients of a network of two layers by its weights."""
    return jax.grad(lambda w, v: jnp.square(nn.gelu(x @ w) @ v - y).mean(), (0, 1))(w, v)


def recurrence(x, decay):
    """Return the states of a linear recurrence over the first axis."""
    return lax.scan(lambda state, now: (decay * state + now,) * 2, jnp.zeros_like(x[0]), x)[1]


def attention(scores, values):
    """Return what the weights of scores pick from values."""
    return nn.softmax(scores, -1) @ values


def frames(x, length=512, hop=256):
    """Return overlapping frames of each row under a window."""
    starts = range(0, x.shape[1] - length + 1, hop)
    return jnp.stack([x[:, start : start + length] for start in starts], 1) * jnp.hanning(length)


def total_variation(*differences):
    """Return the sum of squares."""
    return sum(jnp.square(difference).sum() for difference in differences)


def luminance(x):
    """Return the brightness of colours in the last axis."""
    return 0.3 * x[..., 0] + 0.59 * x[..., 1] + 0.11 * x[..., 2]


def slopes(x):
    """Return the differences along both axes."""
    return x[1:, :-1] - x[:-1, :-1], x[:-1, 1:] - x[:-1, :-1]


def turned(cosine, sine, a, b):
    """Return a product with complex numbers of modulus one."""
    return a * cosine - b * sine, a * sine + b * cosine


def energy(offsets):
    """Return the sum of softened inverse squares."""
    return (1.0 / (jnp.square(offsets).sum(-1) + 0.1)).sum()


def patches(x, size=3):
    """Return the windows of images, flat."""
    rows, columns = x.shape[1] - size + 1, x.shape[2] - size + 1
    parts = [x[:, row : row + rows, column : column + columns] for row in range(size) for column in range(size)]
    return jnp.stack(parts, -1).reshape(x.shape[0], rows, columns, -1)


def recurrent(x, w):
    """Return the states of a recurrent network over the first axis."""
    return lax.scan(lambda state, now: (jnp.tanh(state @ w + now),) * 2, jnp.zeros_like(x[0]), x)[1]


def linear_scan(decay, x):
    """Return the states of a linear recurrence with a decay at each step, by halves."""
    return lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, x), axis=0)[1]


def predicted(x, p, f, q):
    """Return a state and its covariance a step later."""
    return f @ x, f @ p @ f.T + q


def corrected(x, p, h, r, z):
    """Return a state and its covariance after a measurement."""
    gain = jnp.linalg.solve(h @ p @ h.T + r, h @ p).T
    return x + gain @ (z - h @ x), p - gain @ h @ p


def smaller(params, grads):
    """Return parameters after a step of descent."""
    return tuple(value - 0.1 * grad for value, grad in zip(params, grads, strict=True))


def edges_of(x):
    """Return the sum of the absolute central differences."""
    return jnp.abs(x[2:, 1:-1] - x[:-2, 1:-1]) + jnp.abs(x[1:-1, 2:] - x[1:-1, :-2])


def noise(seed):
    """Return normal noise for 1024 columns."""
    return jax.random.normal(jax.random.key(seed), (1024,))


def kept(seed):
    """Return a random mask of nine in ten."""
    return jax.random.bernoulli(jax.random.key(seed), 0.9, (512, 1024))


def counts(x):
    """Return how many values are at most each of the indices."""
    return jnp.cumsum(jnp.zeros(INDICES).at[x].add(1.0))


def pair(name: str, *stages: Callable, args: Sequence[tuple[jax.ShapeDtypeStruct, ...]]) -> Pair:
    """Return a pair; stages that `args` does not reach have no arguments of their own."""
    return Pair(name, stages, (*args, *[()] * (len(stages) - len(args))))


PAIRS = [
    # Elementwise code.
    pair("scale, shift: 1 k", lambda x: 2 * x, lambda x: x + 1, args=[(f32(1024),)]),
    pair("scale, shift: 4 MB", lambda x: 2 * x, lambda x: x + 1, args=[(f32(1024, 1024),)]),
    pair("scale, shift: 100 MB", lambda x: 2 * x, lambda x: x + 1, args=[(f32(5000, 5000),)]),
    pair("tanh, square, exp: 1 MB", jnp.tanh, jnp.square, jnp.exp, args=[(f32(256, 1024),)]),
    pair(
        "quantise, dequantise",
        lambda x: jnp.round(x * 10).astype(jnp.int8),
        lambda q: q.astype(jnp.float32) / 10,
        args=[(f32(1024, 1024),)],
    ),
    pair(
        "complex product, modulus",
        lambda a, b: lax.complex(a, b) * lax.complex(b, a),
        jnp.abs,
        args=[(f32(1024, 512),) * 2],
    ),
    pair(
        "forces, integrate",
        lambda x: -x - 0.1 * x**3,
        lambda f, x, v: (x + 0.01 * (v + 0.01 * f), v + 0.01 * f),
        args=[(f32(4096, 3),), (f32(4096, 3),) * 2],
    ),
    pair("adam moments, step: 4 MB", adam_moments, adam_step, args=[(f32(1 << 20),) * 3, (f32(1 << 20),)]),
    pair("adam moments, step: 4 kB", adam_moments, adam_step, args=[(f32(1024),) * 3, (f32(1024),)]),
    pair(
        "clip, update",
        clip,
        lambda a, b, p, q: smaller((p, q), (a, b)),
        args=[(f32(512, 512),) * 2, (f32(512, 512),) * 2],
    ),
    pair(
        "grads, clip, update",
        mlp_grads,
        clip,
        lambda a, b, p, q: smaller((p, q), (a, b)),
        args=[(f32(128, 256), f32(256, 64), f32(256, 128), f32(256, 64)), (), (f32(128, 256), f32(256, 64))],
    ),
    pair(
        "mask of a dropout, apply",
        kept,
        lambda mask, x: jnp.where(mask, x / 0.9, 0.0),
        args=[(i32(),), (f32(512, 1024),)],
    ),
    pair("scale, set a row", lambda x: 2 * x, lambda x: x.at[0].set(1.0), args=[(f32(1024, 1024),)]),
    pair(
        "tanh, write into a cache",
        jnp.tanh,
        lambda x, cache: lax.dynamic_update_slice(cache, x, (0, 128, 0)),
        args=[(f32(16, 512, 64),), (f32(16, 1024, 64),)],
    ),
    pair(
        "gelu, concatenate",
        lambda x, y: (nn.gelu(x), nn.gelu(y)),
        lambda a, b: jnp.concatenate([a, b, a], -1),
        args=[(f32(1024, 256),) * 2],
    ),
    pair(
        "cos and sin, interleave",
        lambda x: (jnp.cos(x), jnp.sin(x)),
        lambda a, b: jnp.stack([a, b], -1).reshape(1024, -1),
        args=[(f32(1024, 512),)],
    ),
    pair("tanh, pad", jnp.tanh, lambda x: jnp.pad(x, 1), args=[(f32(1024, 1024),)]),
    pair("tanh, insert zeros", jnp.tanh, lambda x: lax.pad(x, 0.0, ((0, 0, 1), (0, 0, 1))), args=[(f32(512, 512),)]),
    pair("tanh, shift", jnp.tanh, lambda x: jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0))), args=[(f32(16, 512, 64),)]),
    # Transposes.
    pair("gelu, transpose", nn.gelu, jnp.transpose, args=[(f32(1024, 1024),)]),
    pair("exp, transpose", jnp.exp, jnp.transpose, args=[(f32(1024, 1024),)]),
    pair("transpose, add", jnp.transpose, jnp.add, args=[(f32(1024, 1024),), (f32(1024, 1024),)]),
    pair("transpose, mean of both", lambda x: (x, x.T), lambda x, y: (x + y) / 2, args=[(f32(1024, 1024),)]),
    pair("layer norm, transpose", layer_norm, jnp.transpose, args=[(f32(1000, 1024),)]),
    pair("channels last, bias", lambda x: x.transpose(0, 2, 3, 1), jnp.add, args=[(f32(4, 64, 64, 64),), (f32(64),)]),
    pair(
        "colours last, normalise",
        lambda x: x.transpose(0, 2, 3, 1),
        lambda x: x / 255 - 0.5,
        args=[(f32(4, 3, 224, 224),)],
    ),
    pair("matmul, transpose and relu", jnp.matmul, lambda y: nn.relu(y.T), args=[(f32(1024, 64), f32(64, 1024))]),
    pair("transpose, softmax", jnp.transpose, nn.softmax, args=[(f32(1000, 1000),)]),
    pair("keys by head, scale", lambda k: k.transpose(0, 2, 3, 1), lambda k: k / 8, args=[(f32(4, 256, 8, 64),)]),
    pair("queries by head, scale", lambda q: q.transpose(0, 2, 1, 3), lambda q: q / 8, args=[(f32(4, 256, 8, 64),)]),
    pair(
        "colours first, normalise",
        lambda x: x.transpose(0, 3, 1, 2),
        lambda x: x / 255 - 0.5,
        args=[(f32(4, 224, 224, 3),)],
    ),
    pair(
        "scale, transpose, shift and transpose",
        lambda x: x * 2,
        jnp.transpose,
        lambda x: x.T + 1,
        args=[(f32(1000, 1000),)],
    ),
    pair(
        "channels last, convolution, channels first",
        lambda x: x.transpose(0, 2, 3, 1),
        conv,
        lambda y: y.transpose(0, 3, 1, 2),
        args=[(f32(4, 16, 64, 64),), (f32(3, 3, 16, 16),)],
    ),
    # A result that the next stage reads more than once.
    pair("series, row of a product", series, lambda y, x: y * x, args=[(f32(1024),), (f32(1024, 1024),)]),
    pair("series, column of a product", series, lambda y, x: y[:, None] * x, args=[(f32(1024),), (f32(1024, 1024),)]),
    pair("exp, row of a product", jnp.exp, lambda y, x: y * x, args=[(f32(1024),), (f32(1024, 1024),)]),
    pair("series, repeat", series, lambda y: jnp.repeat(y, 64, axis=0), args=[(f32(128, 128),)]),
    pair(
        "cos and sin of angles, rotate",
        lambda x: (jnp.cos(x), jnp.sin(x)),
        rotate,
        args=[(f32(1024, 32),), (f32(1024, 16, 64),)],
    ),
    pair(
        "cos and sin of angles, turn",
        lambda x: (jnp.cos(x), jnp.sin(x)),
        turned,
        args=[(f32(512),), (f32(256, 512),) * 2],
    ),
    pair(
        "sines of positions, add",
        lambda w: jnp.sin(jnp.arange(512.0)[:, None] * w),
        lambda p, x: x + p,
        args=[(f32(128),), (f32(8, 512, 128),)],
    ),
    pair("noise, add to rows", noise, lambda y, x: x + y, args=[(i32(),), (f32(1024, 1024),)]),
    pair(
        "hash, exclusive or of all pairs",
        hashed,
        lambda y, x: y ^ x[:, None],
        args=[(of(jnp.uint32, 1024),), (of(jnp.uint32, 1024),)],
    ),
    pair("series, look up", series, lambda y, index: y[index], args=[(f32(1024),), (i32(1 << 20),)]),
    pair("series, look up rows", series, lambda y, index: y[index], args=[(f32(1024, 64),), (i32(1 << 14),)]),
    pair("sin, look up", jnp.sin, lambda y, index: y[index], args=[(f32(1024),), (i32(1 << 18),)]),
    pair("softplus, look up", nn.softplus, lambda y, index: y[index], args=[(f32(INDICES),), (i32(1 << 18),)]),
    pair(
        "gamma curve, look up pixels",
        lambda gamma: jnp.linspace(0, 1, INDICES) ** gamma,
        lambda y, index: y[index],
        args=[(f32(),), (i32(512, 512),)],
    ),
    pair(
        "cumulative histogram, equalise",
        counts,
        lambda y, index: (y / y[-1])[index],
        args=[(i32(1 << 16),), (i32(1 << 16),)],
    ),
    pair(
        "layer of nodes, gather edges",
        lambda h, w: nn.silu(h @ w),
        lambda h, index: h[index],
        args=[(f32(INDICES, 64), f32(64, 64)), (i32(16384),)],
    ),
    pair(
        "dequantise a table, gather",
        lambda q, s: q.astype(jnp.float32) * s[:, None],
        lambda t, index: t[index],
        args=[(of(jnp.int8, INDICES, 64), f32(INDICES)), (i32(16384),)],
    ),
    pair(
        "normalise a table, gather",
        lambda t: t * lax.rsqrt(jnp.square(t).sum(-1, keepdims=True)),
        lambda t, index: t[index],
        args=[(f32(INDICES, 64),), (i32(8192),)],
    ),
    pair(
        "embed, add positions",
        lambda t, index: t[index] * 8,
        jnp.add,
        args=[(f32(INDICES, 256), i32(8, 512)), (f32(512, 256),)],
    ),
    pair(
        "gather two rows, dot",
        lambda t, i, j: (t[i], t[j]),
        lambda a, b: (a * b).sum(-1),
        args=[(f32(INDICES, 64), i32(8192), i32(8192))],
    ),
    pair("gather rows, mean", lambda x, index: x[index], lambda y: y.mean(0), args=[(f32(1024, 512), i32(4096))]),
    # Stencils.
    pair("series, Laplacian", series, laplacian, args=[(f32(1024, 1024),)]),
    pair("Laplacian, Laplacian", laplacian, laplacian, args=[(f32(512, 512),)]),
    pair("3 taps, 3 taps", lambda x: taps(x, 3, 1), lambda x: taps(x, 3, 0), args=[(f32(1024, 1024),)]),
    pair("9 taps, 9 taps", lambda x: taps(x, 9, 1), lambda x: taps(x, 9, 0), args=[(f32(1024, 1024),)]),
    pair("3 x 3 taps, 3 x 3 taps", lambda x: taps_2d(x, 3), lambda x: taps_2d(x, 3), args=[(f32(1024, 1024),)]),
    pair("luminance, 3 x 3 taps", luminance, lambda x: taps_2d(x, 3), args=[(f32(512, 512, 3),)]),
    pair("luminance, edges", lambda x: x @ jnp.array([0.3, 0.59, 0.11]), edges_of, args=[(f32(512, 512, 3),)]),
    pair("sin, difference", jnp.sin, jnp.diff, args=[(f32(512, 512),)]),
    pair("tanh, difference", jnp.tanh, jnp.diff, args=[(f32(1024, 1024),)]),
    pair("gelu, 3 taps", nn.gelu, lambda x: taps(x, 3, 1), args=[(f32(1024, 1024),)]),
    pair("exp, 9 taps", jnp.exp, lambda x: taps(x, 9, 1), args=[(f32(1024, 1024),)]),
    # Reductions.
    pair("exp, sum of rows", jnp.exp, lambda y: y.sum(-1), args=[(f32(1024, 1024),)]),
    pair("gelu, sum of columns", nn.gelu, lambda y: y.sum(0), args=[(f32(1024, 1024),)]),
    pair("square, sum: 16 kB", jnp.square, jnp.sum, args=[(f32(4096),)]),
    pair("transpose, sum of rows", lambda x: x.T + 1, lambda y: y.sum(-1), args=[(f32(1024, 1024),)]),
    pair("gelu, three reductions", nn.gelu, lambda y: (y.sum(-1), y.max(-1), y.min(0)), args=[(f32(1024, 1024),)]),
    pair(
        "pad, squares of rows",
        lambda x: jnp.pad(x, ((0, 0), (8, 8))),
        lambda y: jnp.square(y).sum(-1),
        args=[(f32(1024, 1024),)],
    ),
    pair(
        "windows, maximum",
        lambda x: jnp.stack([x[:, start : start + 4032] for start in range(64)], 1),
        lambda w: w.max(1),
        args=[(f32(16, 4095),)],
    ),
    pair(
        "differences, total variation: 4 MB",
        lambda x: (jnp.diff(x, axis=0), jnp.diff(x)),
        total_variation,
        args=[(f32(1024, 1024),)],
    ),
    pair(
        "differences, total variation: 5 MB",
        lambda x: tuple(jnp.diff(x, axis=axis) for axis in range(3)),
        total_variation,
        args=[(f32(108, 108, 108),)],
    ),
    pair("difference, largest", jnp.diff, lambda d: jnp.abs(d).max(), args=[(f32(1 << 20),)]),
    pair(
        "slopes, mean steepness", slopes, lambda a, b: jnp.sqrt(a * a + b * b + 1e-6).mean(), args=[(f32(1024, 1024),)]
    ),
    pair("offsets, energy", lambda x: x[:, None] - x, energy, args=[(f32(512, 3),)]),
    pair(
        "sums of all pairs, best",
        lambda a, b: a[:, None] + b,
        lambda y: (y.max(0), y.argmax(0)),
        args=[(f32(512), f32(512, 512))],
    ),
    pair(
        "causal mask, softmax",
        lambda s: jnp.where(jnp.tril(jnp.ones((512, 512), bool)), s, -1e9),
        lambda s: nn.softmax(s, -1),
        args=[(f32(8, 512, 512),)],
    ),
    pair(
        "statistics of a batch, normalise",
        lambda x: (x, x.mean(0), x.var(0)),
        lambda x, m, v: (x - m) * lax.rsqrt(v + 1e-5),
        args=[(f32(4096, 512),)],
    ),
    pair("cumulative sum, difference", lambda x: jnp.cumsum(x, -1), jnp.diff, args=[(f32(256, 4096),)]),
    pair(
        "cumulative sum, moving mean",
        lambda x: jnp.cumsum(x, -1),
        lambda y: (y[:, 64:] - y[:, :-64]) / 64,
        args=[(f32(256, 4096),)],
    ),
    pair(
        "cumulative sum of logarithms, exp",
        lambda x: jnp.cumsum(jnp.log(jnp.abs(x)), -1),
        jnp.exp,
        args=[(f32(256, 4096),)],
    ),
    # Products of matrices.
    pair("layer norm, matmul", layer_norm, jnp.matmul, args=[(f32(512, 512),), (f32(512, 512),)]),
    pair("layer norm, matmul: 8 x 16", layer_norm, jnp.matmul, args=[(f32(8, 16),), (f32(16, 16),)]),
    pair(
        "matmul, gelu, matmul",
        jnp.matmul,
        nn.gelu,
        jnp.matmul,
        args=[(f32(256, 256), f32(256, 1024)), (), (f32(1024, 256),)],
    ),
    pair(
        "matmul, matmul: 64 MB between", jnp.matmul, jnp.matmul, args=[(f32(32768, 64), f32(64, 512)), (f32(512, 64),)]
    ),
    pair(
        "matmul, two thin layers: 20 MB between",
        jnp.matmul,
        lambda c, d, e: (c @ d) @ e,
        args=[(f32(10240, 16), f32(16, 512)), (f32(512, 512), f32(512, 16))],
    ),
    pair(
        "attention scores, pick",
        lambda q, k: q @ k.swapaxes(-1, -2) / 8,
        attention,
        args=[(f32(8, 256, 64),) * 2, (f32(8, 256, 64),)],
    ),
    pair(
        "attention scores, softmax, pick: 24 MB",
        lambda q, k: q @ k.swapaxes(-1, -2) / 8,
        nn.softmax,
        jnp.matmul,
        args=[(f32(24, 512, 32),) * 2, (), (f32(24, 512, 32),)],
    ),
    pair(
        "low rank update, matmul",
        lambda w, a, b: w + a @ b,
        lambda w, x: x @ w,
        args=[(f32(512, 512), f32(512, 8), f32(8, 512)), (f32(64, 512),)],
    ),
    pair(
        "layer, low rank layer beside it",
        lambda x, w: (x, x @ w),
        lambda x, y, a, b: y + (x @ a) @ b,
        args=[(f32(256, 512), f32(512, 512)), (f32(512, 8), f32(8, 512))],
    ),
    pair("transpose, matmul", jnp.transpose, jnp.matmul, args=[(f32(512, 512),), (f32(512, 512),)]),
    pair("transpose, matmul: 64 columns", jnp.transpose, jnp.matmul, args=[(f32(64, 4096),), (f32(64, 64),)]),
    pair(
        "transpose, batch of matmuls",
        lambda a: a.swapaxes(-1, -2),
        jnp.matmul,
        args=[(f32(16, 128, 128),), (f32(16, 128, 128),)],
    ),
    pair("matmul, transposed factor", jnp.transpose, lambda y, a: a @ y, args=[(f32(512, 512),), (f32(512, 512),)]),
    pair("transpose, matrix times vector", jnp.transpose, jnp.matmul, args=[(f32(1024, 1024),), (f32(1024),)]),
    pair("transpose, matrix times vector: 1000", jnp.transpose, jnp.matmul, args=[(f32(1000, 1000),), (f32(1000),)]),
    pair(
        "transpose and scale, vector times matrix",
        lambda a: a.T * 2,
        lambda h, v: v @ h,
        args=[(f32(1024, 1024),), (f32(1024),)],
    ),
    pair("scale, matrix times vector", lambda a: a * 2 + 1, jnp.matmul, args=[(f32(1024, 1024),), (f32(1024),)]),
    pair("mask, matrix times vector", jnp.tril, jnp.matmul, args=[(f32(2048, 2048),), (f32(2048),)]),
    pair(
        "dequantise, matrix times vector",
        lambda q, s: q.astype(jnp.float32) * s[:, None],
        jnp.matmul,
        args=[(of(jnp.int8, 2048, 2048), f32(2048)), (f32(2048),)],
    ),
    pair(
        "convert bfloat16, matmul",
        lambda w: w.astype(jnp.float32),
        lambda w, x: x @ w,
        args=[(of(jnp.bfloat16, 512, 512),), (f32(64, 512),)],
    ),
    pair(
        "kernel of a line, matrix times vector",
        lambda x, y: jnp.exp(-jnp.square(x[:, None] - y)),
        jnp.matmul,
        args=[(f32(2048),) * 2, (f32(2048),)],
    ),
    pair(
        "features of Fourier, matmul",
        lambda x, b: jnp.concatenate([jnp.sin(x @ b), jnp.cos(x @ b)], -1),
        jnp.matmul,
        args=[(f32(4096, 3), f32(3, 64)), (f32(128, 32),)],
    ),
    pair("matmul, cross entropy", jnp.matmul, cross_entropy, args=[(f32(512, 256), f32(256, 1024)), (i32(512),)]),
    pair(
        "logits, gradient of cross entropy",
        lambda x, w: (x, x @ w),
        lambda x, logits, y: x.T @ jax.grad(cross_entropy)(logits, y),
        args=[(f32(256, 256), f32(256, 1024)), (i32(256),)],
    ),
    pair(
        "one hot, matmul", lambda index: nn.one_hot(index, INDICES), jnp.matmul, args=[(i32(512),), (f32(INDICES, 64),)]
    ),
    pair(
        "gather, two layers",
        lambda t, index: t[index],
        lambda x, w, v: nn.relu(x @ w) @ v,
        args=[(f32(INDICES, 64), i32(1024)), (f32(64, 256), f32(256, 64))],
    ),
    pair(
        "cholesky, solve",
        lambda a: jnp.linalg.cholesky(a @ a.T + 128 * jnp.eye(128)),
        lambda c, b: jax.scipy.linalg.solve_triangular(c, b, lower=True),
        args=[(f32(128, 128),), (f32(128, 16),)],
    ),
    pair(
        "factor, solve",
        jnp.linalg.qr,
        lambda q, r, b: jax.scipy.linalg.solve_triangular(r, q.T @ b),
        args=[(f32(128, 64),), (f32(128, 8),)],
    ),
    pair(
        "scale, cholesky",
        lambda a: 2 * a,
        lambda a: jnp.linalg.cholesky(a + 300 * jnp.eye(256)),
        args=[(f32(256, 256),)],
    ),
    pair("shift, solve", lambda a: a + 300 * jnp.eye(256), jnp.linalg.solve, args=[(f32(256, 256),), (f32(256, 4),)]),
    pair(
        "invert 3 x 3, map points",
        lambda a: jnp.linalg.inv(a + 3 * jnp.eye(3)),
        lambda m, p: p @ m,
        args=[(f32(64, 3, 3),), (f32(64, 128, 3),)],
    ),
    pair(
        "predict a state, correct it",
        predicted,
        corrected,
        args=[(f32(6), f32(6, 6), f32(6, 6), f32(6, 6)), (f32(2, 6), f32(2, 2), f32(2))],
    ),
    # Images, spectra, sorts, recurrences.
    pair(
        "convolution and relu, pool",
        lambda x, k: nn.relu(conv(x, k)),
        max_pool,
        args=[(f32(4, 64, 64, 8), f32(3, 3, 8, 16))],
    ),
    pair(
        "convolution and relu, mean, dense",
        lambda x, k: nn.relu(conv(x, k)),
        lambda y: y.mean((1, 2)),
        jnp.matmul,
        args=[(f32(4, 32, 32, 16), f32(3, 3, 16, 32)), (), (f32(32, 10),)],
    ),
    pair(
        "normalise, relu and convolution",
        lambda x, m, v: (x - m) * lax.rsqrt(v * v + 1e-5),
        lambda y, k: conv(nn.relu(y), k),
        args=[(f32(4, 64, 64, 16), f32(16), f32(16)), (f32(3, 3, 16, 16),)],
    ),
    pair("patches, matmul", patches, jnp.matmul, args=[(f32(4, 64, 64, 8),), (f32(72, 16),)]),
    pair("gelu, maximum pool", nn.gelu, max_pool, args=[(f32(4, 128, 128, 16),)]),
    pair("gelu, overlapping pool", nn.gelu, sum_pool, args=[(f32(4, 128, 128, 16),)]),
    pair(
        "resize, convolution",
        lambda x: jax.image.resize(x, (4, 64, 64, 8), "bilinear"),
        conv,
        args=[(f32(4, 32, 32, 8),), (f32(3, 3, 8, 16),)],
    ),
    pair(
        "dilate a kernel, convolution",
        lambda k: lax.pad(k, 0.0, ((0, 0, 1), (0, 0, 1), (0, 0, 0), (0, 0, 0))),
        lambda k, x: conv(x, k),
        args=[(f32(3, 3, 16, 16),), (f32(4, 64, 64, 16),)],
    ),
    pair(
        "transform, filter, transform back",
        jnp.fft.rfft,
        jnp.multiply,
        jnp.fft.irfft,
        args=[(f32(256, 1024),), (f32(513),)],
    ),
    pair(
        "transform, top k of the power",
        jnp.fft.rfft,
        lambda y: lax.top_k(jnp.square(y.real) + jnp.square(y.imag), 8),
        args=[(f32(512, 1024),)],
    ),
    pair(
        "power, logarithm of bands",
        lambda x: jnp.square(jnp.abs(jnp.fft.rfft(x))),
        lambda p, w: jnp.log(jnp.abs(p @ w) + 1e-6),
        args=[(f32(512, 512),), (f32(257, 64),)],
    ),
    pair("frames, transform", frames, jnp.fft.rfft, args=[(f32(64, 4096),)]),
    pair("scale, transform", lambda x: x * 2 + 1, jnp.fft.rfft, args=[(f32(1024, 512),)]),
    pair("distances, top k", distances, lambda d: lax.top_k(-d, 8), args=[(f32(512, 16),) * 2]),
    pair(
        "top k, gather",
        lambda s: lax.top_k(s, 16)[1],
        lambda index, v: jnp.take_along_axis(v, index[..., None], 1),
        args=[(f32(64, INDICES),), (f32(64, INDICES, 32),)],
    ),
    pair("sort, take", jnp.argsort, lambda order, y: y[order], args=[(f32(1 << 14),), (f32(1 << 14),)]),
    pair("scale, sort", lambda x: x * 2 + 1, jnp.sort, args=[(f32(64, 256),)]),
    pair(
        "tanh, interpolate",
        jnp.tanh,
        lambda y, x: jnp.interp(x, jnp.linspace(-3, 3, 256), y),
        args=[(f32(256),), (f32(1 << 16),)],
    ),
    pair(
        "sums of segments, gather",
        lambda x, index: jax.ops.segment_sum(x, index, INDICES),
        lambda s, index: s[index],
        args=[(f32(8192, 32), i32(8192)), (i32(8192),)],
    ),
    pair(
        "scale, add at indices",
        lambda u: u * 2 + 1,
        lambda u, index: jnp.zeros((INDICES, 64)).at[index].add(u),
        args=[(f32(4096, 64),), (i32(4096),)],
    ),
    pair("recurrence, readout", recurrence, jnp.matmul, args=[(f32(256, 64), f32(64)), (f32(64, 16),)]),
    pair("embed, recurrent network", jnp.matmul, recurrent, args=[(f32(64, 16, 32), f32(32, 64)), (f32(64, 64),)]),
    pair(
        "decays, associative scan",
        lambda a, dt: jnp.exp(a * dt[..., None]),
        linear_scan,
        args=[(f32(16), f32(256, 64)), (f32(256, 64, 16),)],
    ),
]


class Timing(NamedTuple):
    """What a pair takes; the noise is the factor, one or more, between the gains in odd and even rounds or runs."""

    apart_ns: float
    together_ns: float
    noise: float


def timings(names: Iterable[str], times: np.ndarray, noise: np.ndarray) -> dict[str, Timing]:
    """Return the timings by name."""
    return {name: Timing(*row) for name, *row in zip(names, *times.T.tolist(), noise.tolist(), strict=True)}


def measure(pairs: Sequence[Pair], budget_s: float, seed: int) -> dict[str, Timing]:
    """Return the timings of the pairs by name; the budget includes the time of compiling."""
    end, rng = time.monotonic() + budget_s, np.random.default_rng(seed)
    runs = {pair.name: ((pair.apart(), pair.together()), arrays(pair.flat_args())) for pair in pairs}
    for forms, args in runs.values():
        jax.block_until_ready([form(*args) for form in forms])
    rounds, longest = [], 0.0
    gc.collect()
    gc.disable()
    while len(rounds) < 4 or time.monotonic() + longest < end:
        start, times = time.monotonic(), np.empty((len(pairs), 2))
        for place in rng.permutation(len(pairs)):
            forms, args = runs[pairs[place].name]
            for form in rng.permutation(2):
                run = functools.partial(forms[form], *args)
                times[place, form] = mean_ns(visit_ns(run))
        rounds.append(times)
        longest = max(longest, time.monotonic() - start)
    gc.enable()
    print(f"{len(rounds)} rounds")
    quartile = functools.partial(np.quantile, q=QUARTILE, axis=0)
    whole, odd, even = (quartile(np.array(part)) for part in (rounds, rounds[1::2], rounds[::2]))
    return timings([pair.name for pair in pairs], whole, differs(odd, even))


def differs(odd: np.ndarray, even: np.ndarray) -> np.ndarray:
    """Return the factor, one or more, between the ratios of times apart and together, the last axis."""
    return np.exp(np.abs(np.log(odd[..., 0] / odd[..., 1] * even[..., 1] / even[..., 0])))


def merged(runs: Sequence[dict[str, Timing]]) -> dict[str, Timing]:
    """Return the medians of two or more runs of the same pairs."""
    times = np.array([[timing[:2] for timing in run.values()] for run in runs])
    median = functools.partial(np.median, axis=0)
    return timings(runs[0], median(times), differs(median(times[1::2]), median(times[::2])))


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=80.0, help="seconds")
    parser.add_argument("--half", choices=("tune", "judge"))
    parser.add_argument("--only", default="", help="pairs whose names have a match of this expression")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--merge", type=Path, nargs="+")
    arguments = parser.parse_args()
    halves = {pair.name: pair.half for pair in PAIRS}
    if arguments.merge:
        files = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.merge]
        if len(files) < 2 or any(list(file) != list(files[0]) for file in files) or files[0].keys() - halves.keys():
            parser.error("--merge takes two or more files of the same pairs of the table")
        result = merged([{name: Timing(**timing) for name, timing in file.items()} for file in files])
    else:
        chosen = [
            pair for pair in PAIRS if arguments.half in (None, pair.half) and re.search(arguments.only, pair.name)
        ]
        if not chosen:
            parser.error("no pair has such a name in such a half")
        result = measure(chosen, arguments.budget, arguments.seed)
    print("| stages | half | apart, us | together, us | gain | noise |\n|---|---|---|---|---|---|")
    for name, timing in sorted(result.items(), key=lambda item: item[1].apart_ns / item[1].together_ns):
        apart, together, noise = timing
        print(
            f"| {name} | {halves[name]} | {apart / 1e3:.1f} | {together / 1e3:.1f} "
            f"| {100 * (apart / together - 1):+.1f} % | {100 * (noise - 1):+.1f} % |"
        )
    if arguments.json:
        rows = {name: timing._asdict() for name, timing in result.items()}
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
