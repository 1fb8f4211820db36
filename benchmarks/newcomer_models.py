"""Models, loops of small operations, splits and choices as a JAX user writes them: the table of `newcomer`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import optax
from jax import lax, nn, random

eye, adam, rng = jnp.eye(6), optax.adam(1e-3), np.random.default_rng(0)


def layer_norm(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def scores(q, k, v):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4.0, v


def weighted(s, v):
    return jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(s), v)


def attention_block(p, x):
    heads = jnp.split((layer_norm(x) @ p["qkv"]).reshape(*x.shape[:2], 8, 48), 3, -1)
    x = x + weighted(*scores(*heads)).reshape(x.shape) @ p["out"]
    return x + nn.gelu(layer_norm(x) @ p["up"]) @ p["down"]


def convolve(x, w):
    return nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))


def pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def cnn_loss(p, x, labels):
    x = pool(convolve(pool(convolve(x, p["c1"])), p["c2"]))
    logits = x.reshape(len(x), -1) @ p["dense"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def cnn_step(p, state, x, labels):
    loss, slope = jax.value_and_grad(cnn_loss)(p, x, labels)
    update, state = adam.update(slope, state, p)
    return optax.apply_updates(p, update), state, loss


def gru(h, xs, w, u):
    def step(h, x):
        (xr, xz, xn), (hr, hz, hn) = jnp.split(x @ w, 3, -1), jnp.split(h @ u, 3, -1)
        z = nn.sigmoid(xz + hz)
        h = (1 - z) * jnp.tanh(xn + nn.sigmoid(xr + hr) * hn) + z * h
        return h, h

    return lax.scan(step, h, xs)


def kalman(f, h, ys, update: Any = jnp.linalg.solve):
    def step(carry, y):
        m, p = carry
        m, p = f @ m, f @ p @ f.T + 0.01 * eye
        gain = update(h @ p @ h.T + 0.1 * jnp.eye(3), h @ p).T
        m, p = m + gain @ (y - h @ m), (eye - gain @ h) @ p
        return (m, p), m

    return lax.scan(step, (jnp.zeros(6), eye), ys)[1]


def log_density(w, x, y):
    return -jnp.sum(jnp.logaddexp(0.0, -y * (x @ w))) - 0.5 * w @ w


def hmc(key, w, x, y):
    slope, (k1, k2) = jax.grad(log_density), random.split(key)

    def leap(_, state):
        w, p = state[0], state[1] + 0.005 * slope(state[0], x, y)
        w = w + 0.01 * p
        return w, p + 0.005 * slope(w, x, y)

    p = random.normal(k1, w.shape)
    w1, p1 = lax.fori_loop(0, 20, leap, (w, p))
    ratio = log_density(w1, x, y) - log_density(w, x, y) + 0.5 * (p @ p - p1 @ p1)
    return jnp.where(jnp.log(random.uniform(k2)) < ratio, w1, w)


def distances(q, x):
    return jnp.sum(q * q, 1)[:, None] + jnp.sum(x * x, 1)[None] - 2.0 * q @ x.T


def aggregate(m, receivers):
    return nn.relu(jax.ops.segment_sum(m, receivers, 2000))


def random_walk(x, key):
    def step(x, key):
        new = x + 0.1 * random.normal(key, x.shape)
        accept = jnp.log(random.uniform(key)) < 0.5 * (x @ x - new @ new)
        return jnp.where(accept, new, x), x

    return lax.scan(step, x, random.split(key, 200))


def descent(p, x, y):
    def step(carry, _):
        update, state = adam.update(jax.grad(lambda p: jnp.square(x @ p - y).mean())(carry[0]), carry[1])
        return (optax.apply_updates(carry[0], update), state), None

    return lax.scan(step, (p, adam.init(p)), None, 100)[0][0]


def power_iteration(a, x):
    def step(state):
        y = a @ state[1]
        return state[0] + 1, y / jnp.linalg.norm(y)

    return lax.while_loop(lambda state: state[0] < 100, step, (0, x))[1]


def linear(a, b):
    return a[0] * b[0], a[1] * b[0] + b[1]


def in_turn(*stages):
    return lambda *args: functools.reduce(lambda xs, f: f(*xs) if isinstance(xs, tuple) else f(xs), stages, args)


def loop(step, count):
    return lambda x, *rest: lax.fori_loop(0, count, lambda _, x: step(x, *rest), x)


def of(shapes: str) -> Any:
    drawn = [jnp.asarray(rng.standard_normal(tuple(map(int, one.split(","))), np.float32)) for one in shapes.split()]
    return drawn if len(drawn) > 1 else drawn[0]


x, images, labels = of("4,128,128"), of("32,28,28,1"), jnp.arange(32) % 10
block = dict(zip(("qkv", "out", "up", "down"), of("128,384 128,128 128,512 512,128"), strict=True))
cnn = dict(zip(("c1", "c2", "dense"), of("3,3,1,8 3,3,8,16 784,10"), strict=True))
series, response, definite = of("64,4096"), jnp.exp(-jnp.linspace(0.0, 4.0, 2049)), 0.1 * of("8,8") + 4.0 * jnp.eye(8)
queries, points, rows = of("256,32 4096,32 512,256")
nodes, dense, edges = *of("2000,32 32,32"), jnp.asarray(rng.integers(2000, size=(2, 10000)))
motion, seen, observed = jnp.eye(6) + 0.1 * jnp.eye(6, k=1), jnp.eye(3, 6), of("500,3")
gates = of("16,64 100,16,32 32,192 64,192")
to_messages = lambda h, w, edges: ((h @ w)[edges[0]], edges[1])  # noqa: E731
to_bands = lambda x, response: (jnp.fft.rfft(x), response)  # noqa: E731
from_bands = lambda bands, response: jnp.fft.irfft(bands * response)  # noqa: E731
MODELS: dict[str, tuple[Callable[..., Any], Any]] = {
    "attention block": (attention_block, (block, x)),
    "CNN step": (cnn_step, (cnn, adam.init(cnn), images, labels)),
    "GRU": (gru, gates),
    "Kalman filter": (kalman, (motion, seen, observed)),
    "HMC step": (hmc, (random.key(1), *of("10 500,10"), jnp.sign(of("500")))),
    "FFT filter": (in_turn(to_bands, from_bands), (series, response)),
    "k nearest": (lambda q, x: lax.top_k(-distances(q, x), 8), (queries, points)),
    "graph layer": (in_turn(to_messages, aggregate), (nodes, dense, edges)),
}  # fmt: skip
LOOPS: dict[str, tuple[Callable[..., Any], Any]] = {
    "runge kutta": (loop(lambda y, a: y + 0.01 * jnp.tanh(a @ (y + 0.005 * jnp.tanh(a @ y))), 300), of("8 8,8")),
    "random walk": (random_walk, (of("10"), random.key(2))),
    "adam in scan": (descent, of("20 200,20 200")),
    "power iteration": (power_iteration, of("32,32 32")),
    "associative scan": (lambda a, b: lax.associative_scan(linear, (a, b)), of("1024,8 1024,8")),
    "cholesky in scan": (loop(lambda x, a: jnp.linalg.cholesky(a @ a.T + x * x.T), 200), (definite, definite)),
    "inverse in scan": (loop(lambda x, a: jnp.linalg.inv(x + a), 100), (definite, definite)),
    "sort in scan": (loop(lambda x, a: jnp.sort(jnp.cos(x) + a), 200), of("64 64")),
    "take in scan": (loop(lambda i, x: x[i] % 256, 1000), (jnp.arange(32), 37 * jnp.arange(256))),
    "convolve in scan": (loop(lambda x, w: jnp.tanh(jnp.convolve(x, w, mode="same")), 100), of("256 5")),
    "fft in scan": (loop(lambda x, a: jnp.fft.irfft(jnp.fft.rfft(x) * 0.9) + a, 100), of("256 256")),
    "convolution gradient": (jax.grad(lambda w, x: jnp.square(convolve(x, w)).sum()), (cnn["c2"], of("16,14,14,8"))),
}  # fmt: skip
SPLITS: dict[str, tuple[list[Callable[..., Any]], Any]] = {
    "scores, weighted sum": ([scores, weighted], of("4,128,8,16 4,128,8,16 4,128,8,16")),
    "distances, top k": ([distances, lambda d: tuple(lax.top_k(-d, 8))], (queries, points)),
    "fft, filter and back": ([to_bands, from_bands], (series, response)),
    "messages, aggregate": ([to_messages, aggregate], (nodes, dense, edges)),
    "convolution, pool": ([convolve, pool], (images, cnn["c1"])),
}
CHOICES: dict[str, tuple[dict[str, Callable[..., Any]], Any]] = {
    "scores": ({"einsum": lambda q, k: jnp.einsum("bqd,bkd->bqk", q, k),
                "vmap": jax.vmap(lambda q, k: q @ k.T)}, of("32,128,16 32,128,16")),
    "largest": ({"top_k": lambda x: lax.top_k(x, 8),
                 "sort": lambda x: (-jnp.sort(-x)[:, :8], jnp.argsort(-x)[:, :8])}, (rows,)),
    "recurrence": ({"scan": lambda a, b: lax.scan(lambda c, x: (linear(c, x), None), (a[0], b[0]), (a[1:], b[1:]))[0],
                    "associative": lambda a, b: jax.tree.map(lambda c: c[-1], lax.associative_scan(linear, (a, b)))},
                   of("1024,8 1024,8")),
    "filter": ({"direct": lambda x, w: jnp.convolve(x, w, mode="same"),
                "fft": lambda x, w: jsp.signal.fftconvolve(x, w, mode="same")}, of("16384 257")),
    "distances": ({"product": distances, "differences": lambda q, x: jnp.square(q[:, None] - x[None]).sum(-1)},
                  (queries, points)),
    "aggregate": ({"segment sum": aggregate,
                   "one hot": lambda m, r: nn.relu(nn.one_hot(r, 2000, axis=0) @ m)}, (of("10000,32"), edges[1])),
    "gain": ({"solve": kalman, "inverse": functools.partial(kalman, update=lambda a, b: jnp.linalg.inv(a) @ b)},
             (motion, seen, observed)),
}  # fmt: skip
