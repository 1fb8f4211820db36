"""A table of ordinary JAX functions to time, with their kinds and sizes."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
from jax import Array, lax

from rlxjax import profile_function
from rlxjax.fit import Cell, Facts, Runs, Suite
from rlxjax.jaxpr import FunctionProfile, gpu_program
from rlxjax.models import FUNCTIONS, GPU_KERNELS, function_runs, gpu_facts_of_kind, gpu_inputs


@dataclasses.dataclass(frozen=True)
class Draw:
    """An argument of a function: its shape, its dtype, and the kind of its random values."""

    shape: tuple[int, ...]
    dtype: Any = np.float32
    #: Or "positive" (0.5 to 1.5), "definite" (symmetric matrices), "key" (of a random generator).
    values: str = "normal"
    below: int = 0  # if given, the values are integers from 0 to below - 1

    def abstract(self) -> jax.ShapeDtypeStruct:
        is_key = self.values == "key"
        return jax.eval_shape(lambda: jax.random.key(0) if is_key else jnp.zeros(self.shape, self.dtype))

    def array(self, rng: np.random.Generator) -> Array:
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


class Kind(NamedTuple):
    """A function to time at several sizes.

    Commas separate the arguments, and spaces the axes of an argument. `A` is the first number of a
    size, `B` the second, `3B` three times the second, and `...` all numbers. `<A` draws integers
    below a number, `layers` takes the depth and the width of dense layers, and a word such as
    `positive` names the values. The function takes the numbers that are the length of no axis as
    its first arguments.
    """

    family: str
    name: str
    fn: Callable[..., Any]
    arguments: str
    sizes: str  # each: numbers joined by "x", then ":dtype" unless float32, then "*" if held out

    def at(self, numbers: Sequence[int], dtype: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the function and its arguments at a size."""
        sizes = dict(zip("ABCDE", numbers, strict=False))
        axes = "ABCDE" if "..." in self.arguments else re.sub("<.", "", self.arguments)
        given = [number for letter, number in sizes.items() if letter not in axes]
        draws = tuple(_drawn(text.split(), sizes, dtype) for text in self.arguments.split(","))
        return functools.partial(self.fn, *given), draws


def _drawn(words: Sequence[str], sizes: Mapping[str, int], dtype: Any) -> Any:
    shape, values, below = [], "normal", 0
    for word in words:
        times, letter = word[:-1], word[-1]
        if word == "...":
            shape += sizes.values()
        elif times == "<":
            dtype, below = np.int32, sizes[letter]
        elif letter.islower():
            values = values if word == "layers" else word
        else:
            shape.append(int(times or 1) * sizes[letter] if letter in sizes else int(word))
    if "layers" not in words:
        return Draw(tuple(shape), dtype, values, below)
    depth, width = shape
    return [{"w": Draw((width, width), dtype, values), "b": Draw((width,), dtype, values)} for _ in range(depth)]


def _convolution(axes: tuple[str, str, str], stride: int = 1) -> Callable[..., Array]:
    """Return a convolution, which is depthwise if the window has fewer channels than the image."""

    def convolve(image: Array, window: Array) -> Array:
        groups = image.shape[axes[0].index("C")] // window.shape[axes[1].index("I")]
        strides = (stride,) * (image.ndim - 2)
        return lax.conv_general_dilated(
            image, window, strides, "SAME", dimension_numbers=axes, feature_group_count=groups
        )

    return convolve


def _gru(inputs: Array, hidden: Array, w: Array, u: Array) -> Array:
    def step(hidden: Array, x: Array) -> tuple[Array, None]:
        (xr, xz, xn), (hr, hz, hn) = jnp.split(x @ w, 3, axis=-1), jnp.split(hidden @ u, 3, axis=-1)
        keep = jax.nn.sigmoid(xz + hz)
        return (1 - keep) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn) + keep * hidden, None

    return lax.scan(step, hidden, inputs)[0]


def _loop(step: Callable[..., Array]) -> Callable[..., Array]:
    """Return a function of a trip count and arguments that repeats a step on its first argument."""
    return lambda steps, x, *others: lax.fori_loop(0, steps, lambda _, x: step(x, *others), x)


def _filter_step(p: Array, f: Array, h: Array) -> Array:
    """Return the covariance after one step of a Kalman filter."""
    p = jnp.tanh(f @ p @ f.T)
    s = h @ p @ h.T
    return p - jnp.linalg.solve(s @ s.T + jnp.eye(len(s), dtype=s.dtype), h @ p).T @ h @ p


def _factor(x: Array) -> Array:
    return jnp.linalg.cholesky(x * x.T / 9 + 9 * jnp.eye(len(x), dtype=x.dtype))


def _descend(w: Array, x: Array, y: Array) -> Array:
    return w - 1e-3 * jax.grad(lambda w: jnp.square(jnp.tanh(x @ w) - y).mean())(w)


def _walk(x: Array, key: Array) -> Array:
    """Return the last position of a Metropolis walk of 64 steps over a normal density."""

    def step(x: Array, key: Array) -> tuple[Array, None]:
        new = x + 0.1 * jax.random.normal(key, x.shape, x.dtype)
        return jnp.where(jnp.log(jax.random.uniform(key)) < jnp.sum(x * x - new * new), new, x), None

    return lax.scan(step, x, jax.random.split(key, 64))[0]


@functools.partial(jax.grad, argnums=(0, 1))
def _convolution_slopes(w: Array, x: Array) -> Array:
    return jnp.square(jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC))).mean()


@jax.grad
def _pool_slopes(x: Array) -> Array:
    window = (1, 2, 2, 1)
    return jnp.square(lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")).sum()


def _smooth(x: Array) -> Array:
    def step(mean: Array, value: Array) -> tuple[Array, Array]:
        mean = 0.9 * mean + 0.1 * value
        return mean, mean

    return lax.scan(step, x[0], x)[1]


def _horner(x: Array) -> Array:
    return functools.reduce(lambda total, power: total * x + 1 / power, range(1, 16), x)


def _layer_norm(x: Array, scale: Array, shift: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5) * scale[None] + shift[None]


def _mlp(layers: list[dict[str, Array]], x: Array) -> Array:
    for layer in layers[:-1]:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"][None])
    return x @ layers[-1]["w"] + layers[-1]["b"][None]


def _mlp_step(layers: list[dict[str, Array]], x: Array, y: Array) -> Any:
    """Return the loss, and the layers after one step of gradient descent."""
    loss, gradient = jax.value_and_grad(lambda layers: jnp.square(_mlp(layers, x) - y).mean())(layers)
    return loss, jax.tree.map(lambda weight, slope: weight - 1e-2 * slope, layers, gradient)


def _adam(weight: Array, slope: Array, mean: Array, square: Array) -> tuple[Array, ...]:
    mean, square = 0.9 * mean + 0.1 * slope, 0.999 * square + 0.001 * slope * slope
    return weight - 1e-3 * (mean / 0.19) / (jnp.sqrt(square / 0.002) + 1e-8), mean, square


def _clipped_momentum(weights: Any, slopes: Any, velocities: Any) -> Any:
    """Return weights and velocities after a step of momentum, with a gradient of norm 1 at most."""
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(slope)) for slope in jax.tree.leaves(slopes)))
    velocities = jax.tree.map(lambda v, slope: 0.9 * v + slope / jnp.maximum(norm, 1), velocities, slopes)
    return jax.tree.map(lambda weight, v: weight - 1e-2 * v, weights, velocities), velocities


NHWC, NCHW, NWC = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("NWC", "WIO", "NWC")
# fmt: off
#: For each family of functions, rows that give the fields of a `Kind`.
_ROWS = {
    "elementwise": (
        ("add multiply", lambda x, y: (x + y) * x - y, "..., ...",
         "64 4096 65536* 1048576 4194304 262144:float64"),
        ("softplus", lambda x: jnp.log(1 + jnp.exp(x)), "...",
         "16384* 262144 2097152 65536:bfloat16"),
        ("tanh", jnp.tanh, "...", "1024 131072* 2097152"),
        ("sin cos", lambda x, y: jnp.sin(x) * jnp.cos(y), "..., ...",
         "512 32768 524288 32768:float64*"),
        ("power", lambda x, y: x**y, "positive ..., positive ...", "128 524288"),
        ("erf", jsp.special.erf, "...", "2048 262144*"),
        ("gammaln", jsp.special.gammaln, "positive ...", "512 65536"),
        ("polynomial", _horner, "...", "16384 65536 1048576 4194304*"),
        ("add transposed", lambda x: x + x.T, "...", "64x64 512x512 1200x1200"),
        ("hypotenuse", lambda x, y: x / jnp.sqrt(x * x + y * y + 1), "..., ...", "8192* 1048576*"),
        ("gated", lambda x, y: jax.nn.silu(x) * y, "..., ...", "524288* 65536:bfloat16*"),
    ),
    "reduction": (
        ("sum of rows", lambda x: x.sum(-1), "...", "8x16 256x256* 4096x4096"),
        ("sum of columns", lambda x: x.sum(0), "...", "256x512 4096x1024* 1024x256:float64"),
        ("sum", jnp.sum, "...", "256 4194304"),
        ("variance", lambda x: jnp.var(x, -1), "...", "64x64* 1024x512"),
        ("argmax", lambda x: jnp.argmax(x, -1), "...", "16x64 512x512 1024x2048"),
        ("cumulative sum", lambda x: jnp.cumsum(x, -1), "...", "1x1024* 128x512 1024x1024"),
        ("logsumexp", lambda x: jsp.special.logsumexp(x, -1), "...", "32x64* 512x1024*"),
        ("distance", lambda x, y: jnp.abs(x - y).max(), "..., ...", "1048576*"),
    ),
    "matmul": (
        ("matmul", jnp.matmul, "A B, B C",
         "8x8x8 128x128x128* 256x256x256 512x512x512 1024x1024x1024 8192x64x32 "
         "16x4096x16* 256x256x256:float64 256x256x256:bfloat16"),
        ("matvec", jnp.matmul, "A B, B", "512x512 2048x2048* 4096x4096"),
        ("batched", jnp.matmul, "A B B, A B B", "16x8 512x16 256x64"),
        ("gram", lambda x, y: x.T @ y, "A B, A B", "1024x64* 1024x512"),
        ("dense", lambda x, w, b: jax.nn.relu(x @ w + b[None]), "A B, B B, B", "4x128* 256x512*"),
    ),
    "convolution": (
        ("convolve 1d", _convolution(NWC), "A B C, E C D",
         "1x256x4x8x5 8x1024x16x32x5 16x4096x32x32x3"),
        ("convolve NHWC", _convolution(NHWC), "A B B C, E E C D",
         "1x8x3x8x3* 1x32x16x32x3 4x64x32x32x3 8x112x3x32x7"),
        ("convolve NCHW", _convolution(NCHW), "A C B B, D C E E", "1x16x8x8x3 2x32x32x32x3*"),
        ("pointwise", _convolution(NHWC), "A B B C, E E C D", "4x56x64x64x1"),
        ("strided", _convolution(NHWC, stride=2), "A B B C, E E C D", "2x32x16x32x3*"),
        ("depthwise", _convolution(NHWC), "A B B C, E E 1 D", "1x32x64x64x3*"),
        ("convolution slopes", _convolution_slopes, "3 3 C D, A B B C",
         "8x14x8x16 32x28x1x8 4x8x32x32 16x14x16x16*"),
        ("pool slopes", _pool_slopes, "...", "4x8x8x4 16x16x16x16 32x28x28x8*"),
    ),
    "scan": (
        ("gru", _gru, "A B C, B C, C 3C, C 3C", "16x1x8 64x4x32 256x16x64* 1024x1x32 64x64x128"),
        ("smooth", _smooth, "...", "16x8 128x1024 1024x64* 512x8192"),
        ("fixed point", lambda x: lax.fori_loop(0, 64, lambda _, y: jnp.cos(y) * x, x), "...",
         "16* 4096*"),
        ("filter steps", _loop(_filter_step), "B B, B B, C B", "128x6x3 64x12x4*"),
        ("products", _loop(lambda x, a: jnp.tanh(a @ (a @ (a @ x)))), "B B, B B",
         "256x6 128x16* 64x48"),
        ("power iteration", _loop(lambda x, a: (a @ x) / jnp.linalg.norm(x)), "B, B B",
         "256x32 128x128*"),
        ("descent steps", _loop(_descend), "B, C B, C", "128x10x100 64x20x500*"),
        ("scaled rows", _loop(lambda x: x / (1 + jnp.square(x).sum(-1, keepdims=True))), "B C",
         "256x4x100 64x32x256*"),
        ("factors", _loop(_factor), "B B", "128x8 64x24*"),
        ("transforms", _loop(lambda x: jnp.fft.irfft(jnp.fft.rfft(x) * 0.5)), "B",
         "128x16 64x256 32x2048*"),
        ("sorted", _loop(lambda x: jnp.sort(jnp.cos(9 * x))), "B", "128x16 64x256*"),
        ("convolved", _loop(lambda x, w: jnp.tanh(jnp.convolve(x, w, mode="same"))), "B, C",
         "128x64x5 64x1024x9*"),
        ("random walk", _walk, "A, key", "8 64*"),
    ),
    "fft": (
        ("rfft", jnp.fft.rfft, "...", "1x64 64x1024 256x4096* 8x65536"),
        ("fft", jnp.fft.fft, "...", "128x512:complex64 32x16384:complex64 64x1024:complex128*"),
        ("fft2", jnp.fft.fft2, "...", "32x32:complex64 256x256:complex64 1024x1024:complex64"),
        ("fft filter", lambda x: jnp.fft.irfft(jnp.fft.rfft(x) * 0.5), "...", "16x512* 256x2048*"),
    ),
    "sort": (
        ("sort", lambda x: jnp.sort(x, -1), "...", "1x64 64x128* 1x16384 1x131072"),
        ("argsort", lambda x: jnp.argsort(x, -1), "...", "8x32 1x8192* 64x512"),
        ("top 8", lambda x: lax.top_k(x, 8), "...", "1x256 64x1024 1024x512"),
        ("median", lambda x: jnp.median(x, -1), "...", "16x64* 16x1024*"),
    ),
    "gather": (
        ("take rows", lambda x, i: jnp.take(x, i, axis=0), "A B, C <A",
         "64x8x32* 4096x64x1024 131072x128x32768"),
        ("take along axis", lambda x, i: jnp.take_along_axis(x, i, axis=0), "A B, C B <A",
         "64x16x64 1024x256x1024*"),
        ("segment sum", lambda groups, x, i: jax.ops.segment_sum(x, i, groups), "A B, A <C",
         "64x4x8 8192x16x256 65536x64x4096"),
        ("slice", lambda size, x, i: lax.dynamic_slice(x, (i, i), (size, size)), "A A, <A",
         "64x16 2048x1024*"),
        ("scatter add", lambda x, i: x.at[i].add(1.0), "A B, C <A", "256x16x64* 16384x64x4096*"),
    ),
    "softmax": (
        ("softmax", jax.nn.softmax, "...", "4x16 64x128 512x1024 2048x2048 256x512:bfloat16*"),
        ("softmax of columns", lambda x: jax.nn.softmax(x, 0), "...", "64x64 512x512"),
        ("log softmax", jax.nn.log_softmax, "...", "1024x1024*"),
    ),
    "layer norm": (
        ("layer norm", _layer_norm, "A B, B, B", "64x256 512x768* 4096x1024"),
        ("batch norm", lambda x: (x - x.mean(0)[None]) * lax.rsqrt(x.var(0) + 1e-5)[None], "...",
         "32x64 1024x512"),
        ("rms norm", lambda x: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6), "...",
         "16x128* 1024x1024*"),
    ),
    "attention": (
        ("attention", jax.nn.dot_product_attention, "..., ..., ...",
         "1x8x2x8 2x64x4x16* 4x256x4x32 2x512x4x64"),
        ("decode", jax.nn.dot_product_attention, "A 1 C D, A B C D, A B C D",
         "1x64x2x16 4x1024x8x64"),
        ("causal attention", functools.partial(jax.nn.dot_product_attention, is_causal=True),
         "..., ..., ...", "2x256x8x32*"),
    ),
    "mlp": (
        ("mlp", _mlp, "layers 3 B, A B", "1x16* 32x128 256x512 128x1024"),
        ("mlp step", _mlp_step, "layers 3 B, A B, A B", "4x16 32x64* 64x256 256x512"),
    ),
    "linear algebra": (
        ("cholesky", jnp.linalg.cholesky, "definite A A", "8 256* 768 128:float64"),
        ("triangular solve", functools.partial(jsp.linalg.solve_triangular, lower=True),
         "definite A A, A B", "128x16* 512x64"),
        ("solve", jnp.linalg.solve, "A A, A B", "16x1 128x8 384x64"),
        ("eigh", jnp.linalg.eigh, "definite A A", "8* 48 128"),
        ("qr", jnp.linalg.qr, "A A", "16* 128*"),
    ),
    "random": (
        ("normal", lambda n, key: jax.random.normal(key, (n,), np.float32), "key",
         "16 4096 131072* 1048576"),
        ("uniform", lambda n, key: jax.random.uniform(key, (n,), np.float32), "key",
         "65536 2097152"),
        ("bernoulli", lambda n, key: jax.random.bernoulli(key, 0.3, (n,)), "key", "524288*"),
    ),
    "update": (
        ("adam", lambda *trees: jax.tree.map(_adam, *trees),
         "layers B A, layers B A, layers B A, positive layers B A", "8x2* 64x4 256x4 1024x2"),
        ("descent", lambda *trees: jax.tree.map(lambda w, g: w - 1e-2 * g, *trees),
         "layers B A, layers B A", "32x2 512x4*"),
        ("clipped momentum", _clipped_momentum, "layers B A, layers B A, layers B A",
         "16x2* 384x4*"),
    ),
}
# fmt: on
KINDS = tuple(Kind(family, *row) for family, rows in _ROWS.items() for row in rows)


class TimedFunction(NamedTuple):
    """A function of the suite at one size, with its arguments as trees of `Draw`."""

    family: str
    fn: Callable[..., Any]
    draws: tuple[Any, ...]
    held_out: bool

    def abstract(self) -> tuple[Any, ...]:
        return jax.tree.map(Draw.abstract, self.draws)

    def arguments(self, rng: np.random.Generator) -> tuple[Any, ...]:
        return jax.tree.map(lambda draw: draw.array(rng), self.draws)


def timed_functions(kinds: Sequence[Kind] = KINDS) -> dict[str, TimedFunction]:
    """Return functions by name; functions of 64-bit types only if JAX has these types enabled."""
    found = {}
    for kind in kinds:
        for size in kind.sizes.split():
            numbers, _, named = size.rstrip("*").partition(":")
            dtype = np.dtype(named or "float32")
            if jax.dtypes.canonicalize_dtype(dtype) != dtype:
                continue
            fn, draws = kind.at([*map(int, numbers.split("x"))], dtype)
            one = TimedFunction(kind.family, fn, draws, size.endswith("*"))
            found[f"{kind.name} {numbers} {dtype}"] = one
    return found


class KernelsSuite(Suite):
    """The GPU kernels of compiled functions, whose samples are those of `FunctionsSuite`."""

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
        function: Any = program.func
        text = function.lower(*program.args).compile().as_text()
        with contextlib.suppress(ValueError):  # another version of JAX may print programs differently
            return dataclasses.replace(cell, compiled=gpu_inputs(gpu_program(text or "")))
        return cell

    def of_compiled(self) -> Suite:
        return KernelsSuite()
