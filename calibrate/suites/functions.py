"""A table of ordinary JAX functions to time, with their kinds and sizes."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
from jax import lax

from rlxjax import profile_function
from rlxjax.fit import Cell, Facts, Runs, Suite
from rlxjax.jaxpr import FunctionProfile, gpu_program
from rlxjax.models import FUNCTIONS, GPU_KERNELS, function_runs, gpu_facts_of_kind, gpu_inputs


@dataclasses.dataclass(frozen=True)
class Draw:
    """An argument of a function, given by its shape, its dtype, and the kind of random values that it holds."""

    shape: tuple[int, ...]
    dtype: Any = np.float32
    values: str = "normal"  # "positive" (0.5 to 1.5), "definite" (symmetric matrices), "key" (of a random generator)
    below: int = 0  # if given, the values are integers from 0 to below - 1

    def abstract(self) -> jax.ShapeDtypeStruct:
        is_key = self.values == "key"
        return jax.eval_shape(lambda: jax.random.key(0) if is_key else jnp.zeros(self.shape, self.dtype))

    def array(self, rng: np.random.Generator) -> jax.Array:
        if self.values == "key":
            return jax.random.key(int(rng.integers(2**31)))
        if self.below:
            drawn = rng.integers(self.below, size=self.shape)
        elif self.values == "positive":
            drawn = rng.random(self.shape, np.float32) + 0.5
        else:
            drawn = rng.standard_normal(self.shape, np.float32)
        if self.values == "definite":  # the symmetric part has no eigenvalue much beyond -sqrt(2)
            drawn = (drawn + np.swapaxes(drawn, -1, -2)) / (2 * np.sqrt(self.shape[-1])) + 2 * np.eye(self.shape[-1])
        if np.issubdtype(self.dtype, np.complexfloating):
            drawn = drawn + 1j * rng.standard_normal(self.shape, np.float32)
        return jnp.asarray(drawn.astype(self.dtype))


#: A maker: it takes a dtype and the numbers of a size, and returns a function and its arguments.
Make = Callable[..., tuple[Callable[..., Any], tuple[Any, ...]]]


class Kind(NamedTuple):
    """A function to time at several sizes."""

    family: str
    name: str
    make: Make
    sizes: str  # each: numbers joined by "x", then ":dtype" unless float32, then "*" if held out
    held_out: bool = False  # True: all sizes are held out


def _normals(dtype: Any, *shapes: tuple[int, ...]) -> tuple[Draw, ...]:
    return tuple(Draw(shape, dtype) for shape in shapes)


def _of(fn: Callable[..., Any], count: int = 1, values: str = "normal") -> Make:
    """Return a maker for a function of `count` arrays of the same shape. The size is that shape."""
    return lambda dtype, *shape: (fn, (Draw(shape, dtype, values),) * count)


def _rows(fn: Callable[..., Any], of_elements: bool = False) -> Make:
    """Return a maker for a function of an array and row indices. The result has a row, or element, for each index."""

    def make(dtype: Any, rows: int, width: int, count: int) -> Any:
        indices = Draw((count, width) if of_elements else (count,), np.int32, below=rows)
        return fn, (Draw((rows, width), dtype), indices)

    return make


def _convolution(numbers: tuple[str, str, str], depthwise: bool = False, stride: int = 1) -> Make:
    """Return a maker for a convolution. A size lists batch, image side, channels, filters and window width."""

    def make(dtype: Any, batch: int, side: int, channels: int, filters: int, width: int) -> Any:
        depth = {"I": 1 if depthwise else channels, "O": filters}
        image = tuple({"N": batch, "C": channels}.get(axis, side) for axis in numbers[0])
        window = tuple(depth.get(axis, width) for axis in numbers[1])
        about = {"dimension_numbers": numbers, "feature_group_count": channels if depthwise else 1}
        strides = (stride,) * (len(image) - 2)
        convolve = functools.partial(lax.conv_general_dilated, window_strides=strides, padding="SAME", **about)
        return convolve, _normals(dtype, image, window)

    return make


def _matrices(fn: Callable[..., Any], values: str = "normal") -> Make:
    """Return a maker for a function of a square matrix. A second number in a size adds that many right sides."""
    return lambda dtype, n, *columns: (fn, (Draw((n, n), dtype, values), *(Draw((n, m), dtype) for m in columns)))


def _keyed(sample: Callable[..., jax.Array]) -> Make:
    """Return a maker for a function that draws an array from a random key."""
    return lambda dtype, *shape: (lambda key: sample(key, shape, dtype), (Draw((), values="key"),))


def _gru(dtype: Any, steps: int, batch: int, width: int) -> Any:
    def run(inputs: jax.Array, hidden: jax.Array, w: jax.Array, u: jax.Array) -> jax.Array:
        def step(hidden: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            (xr, xz, xn), (hr, hz, hn) = jnp.split(x @ w, 3, axis=-1), jnp.split(hidden @ u, 3, axis=-1)
            keep = jax.nn.sigmoid(xz + hz)
            return (1 - keep) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn) + keep * hidden, None

        return lax.scan(step, hidden, inputs)[0]

    return run, _normals(dtype, (steps, batch, width), (batch, width), (width, 3 * width), (width, 3 * width))


def _repeated(step: Callable[..., jax.Array], shapes: Callable[..., Any]) -> Make:
    """Return a maker for a loop that applies a step to its first argument. A size begins with the trip count."""

    def make(dtype: Any, steps: int, *size: int) -> Any:
        drawn = shapes(*size)
        return lambda x, *others: lax.fori_loop(0, steps, lambda _, x: step(x, *others), x), _normals(dtype, *drawn)

    return make


def _filter_step(p: jax.Array, f: jax.Array, h: jax.Array) -> jax.Array:
    """Return the covariance after one step of a Kalman filter."""
    p = jnp.tanh(f @ p @ f.T)
    s = h @ p @ h.T
    return p - jnp.linalg.solve(s @ s.T + jnp.eye(len(s), dtype=s.dtype), h @ p).T @ h @ p


def _descend(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return w - 1e-3 * jax.grad(lambda w: jnp.square(jnp.tanh(x @ w) - y).mean())(w)


def _walk(x: jax.Array, key: jax.Array) -> jax.Array:
    """Return the last position of a Metropolis walk of 64 steps over a normal density."""

    def step(x: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
        new = x + 0.1 * jax.random.normal(key, x.shape, x.dtype)
        return jnp.where(jnp.log(jax.random.uniform(key)) < jnp.sum(x * x - new * new), new, x), None

    return lax.scan(step, x, jax.random.split(key, 64))[0]


def _convolution_slopes(dtype: Any, batch: int, side: int, channels: int, filters: int) -> Any:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.square(jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC))).mean()

    return jax.grad(loss, (0, 1)), _normals(dtype, (3, 3, channels, filters), (batch, side, side, channels))


def _smooth(x: jax.Array) -> jax.Array:
    def step(mean: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        mean = 0.9 * mean + 0.1 * value
        return mean, mean

    return lax.scan(step, x[0], x)[1]


def _horner(x: jax.Array) -> jax.Array:
    return functools.reduce(lambda total, power: total * x + 1 / power, range(1, 16), x)


def _layer_norm(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5) * scale[None] + shift[None]


def _layers(dtype: Any, width: int, depth: int, values: str = "normal") -> list[dict[str, Draw]]:
    """Return the arguments of a function of square dense layers: the parameters of the layers."""
    return [{"w": Draw((width, width), dtype, values), "b": Draw((width,), dtype, values)} for _ in range(depth)]


def _mlp(layers: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    for layer in layers[:-1]:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"][None])
    return x @ layers[-1]["w"] + layers[-1]["b"][None]


def _mlp_step(layers: list[dict[str, jax.Array]], x: jax.Array, y: jax.Array) -> Any:
    """Return the loss, and the layers after one step of gradient descent."""
    loss, gradient = jax.value_and_grad(lambda layers: jnp.square(_mlp(layers, x) - y).mean())(layers)
    return loss, jax.tree.map(lambda weight, slope: weight - 1e-2 * slope, layers, gradient)


def _adam(weight: jax.Array, slope: jax.Array, mean: jax.Array, square: jax.Array) -> tuple[jax.Array, ...]:
    mean, square = 0.9 * mean + 0.1 * slope, 0.999 * square + 0.001 * slope * slope
    return weight - 1e-3 * (mean / 0.19) / (jnp.sqrt(square / 0.002) + 1e-8), mean, square


def _clipped_momentum(weights: Any, slopes: Any, velocities: Any) -> Any:
    """Return the weights and velocities after a step of momentum; the gradient is clipped to a norm of 1."""
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(slope)) for slope in jax.tree.leaves(slopes)))
    velocities = jax.tree.map(lambda v, slope: 0.9 * v + slope / jnp.maximum(norm, 1), velocities, slopes)
    return jax.tree.map(lambda weight, v: weight - 1e-2 * v, weights, velocities), velocities


NHWC, NCHW, NWC = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("NWC", "WIO", "NWC")
# fmt: off
KINDS = (
    Kind("elementwise", "add multiply", _of(lambda x, y: (x + y) * x - y, 2),
         "64 4096 65536* 1048576 4194304 262144:float64"),
    Kind("elementwise", "softplus", _of(lambda x: jnp.log(1 + jnp.exp(x))), "16384* 262144 2097152 65536:bfloat16"),
    Kind("elementwise", "tanh", _of(jnp.tanh), "1024 131072* 2097152"),
    Kind("elementwise", "sin cos", _of(lambda x, y: jnp.sin(x) * jnp.cos(y), 2), "512 32768 524288 32768:float64*"),
    Kind("elementwise", "power", _of(lambda x, y: x**y, 2, "positive"), "128 524288"),
    Kind("elementwise", "erf", _of(jsp.special.erf), "2048 262144*"),
    Kind("elementwise", "gammaln", _of(jsp.special.gammaln, 1, "positive"), "512 65536"),
    Kind("elementwise", "polynomial", _of(_horner), "16384 65536 1048576 4194304*"),
    Kind("elementwise", "add transposed", _of(lambda x: x + x.T), "64x64 512x512 1200x1200"),
    Kind("elementwise", "hypotenuse", _of(lambda x, y: x / jnp.sqrt(x * x + y * y + 1), 2), "8192 1048576", True),
    Kind("elementwise", "gated", _of(lambda x, y: jax.nn.silu(x) * y, 2), "524288 65536:bfloat16", True),
    Kind("reduction", "sum of rows", _of(lambda x: x.sum(-1)), "8x16 256x256* 4096x4096"),
    Kind("reduction", "sum of columns", _of(lambda x: x.sum(0)), "256x512 4096x1024* 1024x256:float64"),
    Kind("reduction", "sum", _of(jnp.sum), "256 4194304"),
    Kind("reduction", "variance", _of(lambda x: jnp.var(x, -1)), "64x64* 1024x512"),
    Kind("reduction", "argmax", _of(lambda x: jnp.argmax(x, -1)), "16x64 512x512 1024x2048"),
    Kind("reduction", "cumulative sum", _of(lambda x: jnp.cumsum(x, -1)), "1x1024* 128x512 1024x1024"),
    Kind("reduction", "logsumexp", _of(lambda x: jsp.special.logsumexp(x, -1)), "32x64 512x1024", True),
    Kind("reduction", "distance", _of(lambda x, y: jnp.abs(x - y).max(), 2), "1048576", True),
    Kind("matmul", "matmul", lambda d, m, k, n: (jnp.matmul, _normals(d, (m, k), (k, n))),
         "8x8x8 128x128x128* 256x256x256 512x512x512 1024x1024x1024 8192x64x32 16x4096x16* 256x256x256:float64 "
         "256x256x256:bfloat16"),
    Kind("matmul", "matvec", lambda d, m, k: (jnp.matmul, _normals(d, (m, k), (k,))), "512x512 2048x2048* 4096x4096"),
    Kind("matmul", "batched", lambda d, b, n: (jnp.matmul, _normals(d, (b, n, n), (b, n, n))), "16x8 512x16 256x64"),
    Kind("matmul", "gram", lambda d, m, n: (lambda x, y: x.T @ y, _normals(d, (m, n), (m, n))), "1024x64* 1024x512"),
    Kind("matmul", "dense", lambda d, m, n: (
        lambda x, w, b: jax.nn.relu(x @ w + b[None]), _normals(d, (m, n), (n, n), (n,))), "4x128 256x512", True),
    Kind("convolution", "convolve 1d", _convolution(NWC), "1x256x4x8x5 8x1024x16x32x5 16x4096x32x32x3"),
    Kind("convolution", "convolve NHWC", _convolution(NHWC), "1x8x3x8x3* 1x32x16x32x3 4x64x32x32x3 8x112x3x32x7"),
    Kind("convolution", "convolve NCHW", _convolution(NCHW), "1x16x8x8x3 2x32x32x32x3*"),
    Kind("convolution", "pointwise", _convolution(NHWC), "4x56x64x64x1"),
    Kind("convolution", "strided", _convolution(NHWC, stride=2), "2x32x16x32x3", True),
    Kind("convolution", "depthwise", _convolution(NHWC, depthwise=True), "1x32x64x64x3", True),
    Kind("scan", "gru", _gru, "16x1x8 64x4x32 256x16x64* 1024x1x32 64x64x128"),
    Kind("scan", "smooth", _of(_smooth), "16x8 128x1024 1024x64* 512x8192"),
    Kind("scan", "fixed point", _of(lambda x: lax.fori_loop(0, 64, lambda _, y: jnp.cos(y) * x, x)), "16 4096", True),
    Kind("scan", "filter steps", _repeated(_filter_step, lambda n, m: ((n, n), (n, n), (m, n))), "128x6x3 64x12x4*"),
    Kind("scan", "products", _repeated(lambda x, a: jnp.tanh(a @ (a @ (a @ x))), lambda n: ((n, n),) * 2),
         "256x6 128x16* 64x48"),
    Kind("scan", "power iteration", _repeated(lambda x, a: (a @ x) / jnp.linalg.norm(x), lambda n: ((n,), (n, n))),
         "256x32 128x128*"),
    Kind("scan", "descent steps", _repeated(_descend, lambda n, m: ((n,), (m, n), (m,))), "128x10x100 64x20x500*"),
    Kind("scan", "scaled rows", _repeated(lambda x: x / (1 + jnp.square(x).sum(-1, keepdims=True)), lambda *n: (n,)),
         "256x4x100 64x32x256*"),
    Kind("scan", "factors", _repeated(lambda x: jnp.linalg.cholesky(x * x.T / 9 + 9 * jnp.eye(len(x), dtype=x.dtype)),
         lambda n: ((n, n),)), "128x8 64x24*"),
    Kind("scan", "transforms", _repeated(lambda x: jnp.fft.irfft(jnp.fft.rfft(x) * 0.5), lambda n: ((n,),)),
         "128x16 64x256 32x2048*"),
    Kind("scan", "sorted", _repeated(lambda x: jnp.sort(jnp.cos(9 * x)), lambda n: ((n,),)), "128x16 64x256*"),
    Kind("scan", "convolved", _repeated(lambda x, w: jnp.tanh(jnp.convolve(x, w, mode="same")),
         lambda n, m: ((n,), (m,))), "128x64x5 64x1024x9*"),
    Kind("scan", "random walk", lambda d, n: (_walk, (Draw((n,), d), Draw((), values="key"))), "8 64*"),
    Kind("convolution", "convolution slopes", _convolution_slopes, "8x14x8x16 32x28x1x8 4x8x32x32 16x14x16x16*"),
    Kind("convolution", "pool slopes", lambda d, *shape: (jax.grad(lambda x: jnp.square(lax.reduce_window(
        x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")).sum()), _normals(d, shape)),
        "4x8x8x4 16x16x16x16 32x28x28x8*"),
    Kind("fft", "rfft", _of(jnp.fft.rfft), "1x64 64x1024 256x4096* 8x65536"),
    Kind("fft", "fft", _of(jnp.fft.fft), "128x512:complex64 32x16384:complex64 64x1024:complex128*"),
    Kind("fft", "fft2", _of(jnp.fft.fft2), "32x32:complex64 256x256:complex64 1024x1024:complex64"),
    Kind("fft", "fft filter", _of(lambda x: jnp.fft.irfft(jnp.fft.rfft(x) * 0.5)), "16x512 256x2048", True),
    Kind("sort", "sort", _of(lambda x: jnp.sort(x, -1)), "1x64 64x128* 1x16384 1x131072"),
    Kind("sort", "argsort", _of(lambda x: jnp.argsort(x, -1)), "8x32 1x8192* 64x512"),
    Kind("sort", "top 8", _of(lambda x: lax.top_k(x, 8)), "1x256 64x1024 1024x512"),
    Kind("sort", "median", _of(lambda x: jnp.median(x, -1)), "16x64 16x1024", True),
    Kind("gather", "take rows", _rows(lambda x, i: jnp.take(x, i, axis=0)), "64x8x32* 4096x64x1024 131072x128x32768"),
    Kind("gather", "take along axis", _rows(lambda x, i: jnp.take_along_axis(x, i, axis=0), of_elements=True),
         "64x16x64 1024x256x1024*"),
    Kind("gather", "segment sum", lambda d, n, width, groups: (
        lambda x, i: jax.ops.segment_sum(x, i, groups), (Draw((n, width), d), Draw((n,), np.int32, below=groups))),
        "64x4x8 8192x16x256 65536x64x4096"),
    Kind("gather", "slice", lambda d, n, size: (
        lambda x, i: lax.dynamic_slice(x, (i, i), (size, size)), (Draw((n, n), d), Draw((), np.int32, below=n - size))),
        "64x16 2048x1024*"),
    Kind("gather", "scatter add", _rows(lambda x, i: x.at[i].add(1.0)), "256x16x64 16384x64x4096", True),
    Kind("softmax", "softmax", _of(jax.nn.softmax), "4x16 64x128 512x1024 2048x2048 256x512:bfloat16*"),
    Kind("softmax", "softmax of columns", _of(lambda x: jax.nn.softmax(x, 0)), "64x64 512x512"),
    Kind("softmax", "log softmax", _of(jax.nn.log_softmax), "1024x1024", True),
    Kind("layer norm", "layer norm", lambda d, m, n: (_layer_norm, _normals(d, (m, n), (n,), (n,))),
         "64x256 512x768* 4096x1024"),
    Kind("layer norm", "batch norm", _of(lambda x: (x - x.mean(0)[None]) * lax.rsqrt(x.var(0) + 1e-5)[None]),
         "32x64 1024x512"),
    Kind("layer norm", "rms norm", _of(lambda x: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)),
         "16x128 1024x1024", True),
    Kind("attention", "attention", _of(jax.nn.dot_product_attention, 3), "1x8x2x8 2x64x4x16* 4x256x4x32 2x512x4x64"),
    Kind("attention", "decode", lambda d, b, t, h, n: (
        jax.nn.dot_product_attention, _normals(d, (b, 1, h, n), (b, t, h, n), (b, t, h, n))), "1x64x2x16 4x1024x8x64"),
    Kind("attention", "causal attention", _of(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True), 3),
         "2x256x8x32", True),
    Kind("mlp", "mlp", lambda d, m, n: (_mlp, (_layers(d, n, 3), Draw((m, n), d))), "1x16* 32x128 256x512 128x1024"),
    Kind("mlp", "mlp step", lambda d, m, n: (_mlp_step, (_layers(d, n, 3), *_normals(d, (m, n), (m, n)))),
         "4x16 32x64* 64x256 256x512"),
    Kind("linear algebra", "cholesky", _matrices(jnp.linalg.cholesky, "definite"), "8 256* 768 128:float64"),
    Kind("linear algebra", "triangular solve", _matrices(
        lambda a, b: jsp.linalg.solve_triangular(a, b, lower=True), "definite"), "128x16* 512x64"),
    Kind("linear algebra", "solve", _matrices(jnp.linalg.solve), "16x1 128x8 384x64"),
    Kind("linear algebra", "eigh", _matrices(jnp.linalg.eigh, "definite"), "8* 48 128"),
    Kind("linear algebra", "qr", _matrices(jnp.linalg.qr), "16 128", True),
    Kind("random", "normal", _keyed(jax.random.normal), "16 4096 131072* 1048576"),
    Kind("random", "uniform", _keyed(jax.random.uniform), "65536 2097152"),
    Kind("random", "bernoulli", _keyed(lambda key, shape, _: jax.random.bernoulli(key, 0.3, shape)), "524288", True),
    Kind("update", "adam", lambda d, n, depth: (lambda *trees: jax.tree.map(_adam, *trees), (
        *(_layers(d, n, depth),) * 3, _layers(d, n, depth, "positive"))), "8x2* 64x4 256x4 1024x2"),
    Kind("update", "descent", lambda d, n, depth: (lambda *trees: jax.tree.map(lambda w, g: w - 1e-2 * g, *trees), (
        _layers(d, n, depth),) * 2), "32x2 512x4*"),
    Kind("update", "clipped momentum", lambda d, n, depth: (_clipped_momentum, (_layers(d, n, depth),) * 3),
         "16x2 384x4", True),
)
# fmt: on


class TimedFunction(NamedTuple):
    """A function of the suite at one size: its family, its arguments (trees of `Draw`), and whether it is held out."""

    family: str
    fn: Callable[..., Any]
    draws: tuple[Any, ...]
    held_out: bool

    def abstract(self) -> tuple[Any, ...]:
        return jax.tree.map(Draw.abstract, self.draws)

    def arguments(self, rng: np.random.Generator) -> tuple[Any, ...]:
        return jax.tree.map(lambda draw: draw.array(rng), self.draws)


def timed_functions(kinds: Sequence[Kind] = KINDS) -> dict[str, TimedFunction]:
    """Return functions by name. Functions of 64-bit types are included only if JAX has these types enabled."""
    found = {}
    for kind in kinds:
        for size in kind.sizes.split():
            numbers, _, named = size.rstrip("*").partition(":")
            dtype = np.dtype(named or "float32")
            if jax.dtypes.canonicalize_dtype(dtype) != dtype:
                continue
            fn, draws = kind.make(dtype, *map(int, numbers.split("x")))
            held_out = kind.held_out or size.endswith("*")
            found[f"{kind.name} {numbers} {dtype}"] = TimedFunction(kind.family, fn, draws, held_out)
    return found


class KernelsSuite(Suite):
    """The GPU kernels of compiled functions. A fit uses the samples of `FunctionsSuite`; no kernel is timed alone."""

    model = GPU_KERNELS
    most_error = 0.25

    def __init__(self, texts: Mapping[str, str] | None = None) -> None:
        self._texts = texts or {}  # compiled programs by name, for samples without counts of kernels

    def cells(self) -> list[Cell]:
        return []

    def runs(self, cells: Sequence[Cell]) -> Runs:
        """Return the runs of compiled programs. Refuse a cell that has neither counts nor a program text."""
        if unknown := [cell.name for cell in cells if not cell.compiled and cell.name not in self._texts]:
            raise ValueError(f"holds {unknown[0]!r} without the counts of its compiled program")
        return GPU_KERNELS.runs([cell.compiled or gpu_inputs(gpu_program(self._texts[cell.name])) for cell in cells])


class FunctionsSuite(Suite):
    """Jitted functions that are called with device arrays. The counts in a function's profile give its run."""

    model = FUNCTIONS
    most_error = 0.25

    def __init__(self, kinds: Sequence[Kind] = KINDS) -> None:
        self._functions = timed_functions(kinds)
        self._profiles: dict[str, FunctionProfile] = {}

    def cells(self) -> list[Cell]:
        return [self._cell(name) for name in self._functions]

    def _cell(self, name: str) -> Cell:
        function = self._functions[name]
        about = {"group": function.family, "held_out": function.held_out, "n_bytes": self._profile(name).peak_bytes}
        return Cell(name, FUNCTIONS.variants[0], {}, **about)

    def _profile(self, name: str) -> FunctionProfile:
        if name not in self._profiles:
            function = self._functions[name]
            self._profiles[name] = profile_function(function.fn, *function.abstract())
        return self._profiles[name]

    def program(self, cell: Cell) -> functools.partial[Any]:
        function = self._functions[cell.name]
        return functools.partial(jax.jit(function.fn), *jax.device_put(function.arguments(np.random.default_rng(0))))

    def runs(self, cells: Sequence[Cell]) -> Runs:
        """Return the runs of functions, from their profiles. Refuse a cell that the suite does not have."""
        if unknown := [cell.name for cell in cells if cell.name not in self._functions]:
            raise ValueError(f"holds {unknown[0]!r}, which is no function of this suite")
        return function_runs([self._profile(cell.name) for cell in cells])

    def facts(self) -> Facts:
        return gpu_facts_of_kind(jax.devices()[0].device_kind) or {}

    def as_compiled(self, cell: Cell, program: Callable[[], Any]) -> Cell:
        if jax.default_backend() != "gpu" or not isinstance(program, functools.partial):
            return cell
        # The first call has compiled the program.
        text = program.func.lower(*program.args).compile().as_text()  # pyright: ignore[reportFunctionMemberAccess]
        with contextlib.suppress(ValueError):  # another version of JAX may print programs differently
            return dataclasses.replace(cell, compiled=gpu_inputs(gpu_program(text or "")))
        return cell

    def of_compiled(self) -> Suite:
        return KernelsSuite()
