"""Draw programs from a grammar: a few lines of JAX each, over all operations that latency models know.

A program is its source, such as `v2 = jnp.exp(v0)`, and the description of its arguments. Both are data, so programs
can run again and be counted again after the grammar has changed.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
from jax import lax

from calibrate.suites.functions import Draw

#: The most elements of a program's first array, and the most ns of a call by a crude sum.
MOST_LOG2_ELEMENTS, MOST_NS, MOST_BYTES = 26, 1.5e8, 2**30
MOST_STEPS = 12
#: Dtypes of the first argument. A repeated dtype is drawn more often.
DTYPES = "float32 " * 12 + "float64 float64 float64 bfloat16 float16 int32 int32 int8"
_NAMES = {"jax": jax, "jnp": jnp, "jsp": jsp, "lax": lax}

#: Templates by what they ask of their operand: `{x}` is the operand, `{y}` another value of its shape and dtype,
#: `{row}` and `{col}` vectors along its last axis and its first, `{s}` a scalar, `{key}` a random key, `{i}` indices
#: of rows, `{ij}` an index for each element, `{a}` definite matrices, `{w}` a matrix that fits its last axis, `{k}` a
#: small number, `{ax}` an axis. A number before a template is its relative weight; 1 unless given.
FLOAT = """
lax.exp(-{x}) | lax.exp2({x}) | lax.expm1({x}) | lax.log({x}) | lax.log1p({x}) | lax.sqrt({x}) | lax.rsqrt({x})
lax.cbrt({x}) | lax.sin({x}) | lax.cos({x}) | lax.tan({x}) | lax.tanh({x}) | lax.sinh({x}) | lax.cosh({x})
lax.asinh({x}) | lax.acosh({x} + 1) | lax.atanh({x} * 0.5) | lax.asin({x} * 0.5) | lax.acos({x} * 0.5) | lax.atan({x})
lax.erf({x}) | lax.erfc({x}) | lax.erf_inv({x} * 0.5) | lax.logistic({x}) | lax.floor({x}) | lax.ceil({x})
lax.round({x}) | lax.sign({x}) | lax.abs({x}) | lax.neg({x}) | lax.square({x}) | {x}**3 | {x}**-2 | 1 / {x}
lax.is_finite({x}).astype({x}.dtype) | {x} + {y} | {x} - {y} | {x} * {y} | {x} / {y} | lax.max({x}, {y})
lax.min({x}, {y}) | lax.pow({x}, {y}) | lax.rem({x}, {y}) | lax.atan2({x}, {y}) | lax.nextafter({x}, {y})
jnp.where({x} < {y}, {x}, 2 * {y}) | jnp.clip({x}, 0.2, 0.8) | ({x} * {y} + 1) * {x} | {x} * 0.5 + {y} * 0.25
{x} + {s} | {x} / {s} | {x}.astype(jnp.float32) | {x}.astype(jnp.float64) | {x}.astype(jnp.bfloat16)
{x}.astype(jnp.int32) | ({x} > {y}).astype({x}.dtype) | lax.reduce_precision({x}, 5, 10) | jnp.hypot({x}, {y})
jnp.polyval(jnp.arange(1.0, {k} + 2).astype({x}.dtype), {x}) | jnp.log(1 + jnp.exp({x})) | jax.nn.relu({x})
jax.nn.gelu({x}) | jax.nn.silu({x}) | jax.nn.softplus({x}) | jnp.square({x} - {y}).mean() | 0.7 lax.lgamma({x})
0.7 lax.digamma({x}) | 0.5 lax.bessel_i0e({x}) | 0.5 lax.bessel_i1e({x}) | 0.4 lax.igamma({x} + 1, {y} + 1)
0.4 lax.igammac({x} + 1, {y} + 1) | 0.4 lax.polygamma(jnp.ones_like({x}), {x} + 1) | 0.4 lax.zeta({x} + 2, {y} + 1)
0.4 lax.regularized_incomplete_beta({x} + 1, {y} + 1, jnp.clip({x}, 0.2, 0.8))
{x} + jax.random.normal({key}, {x}.shape, {x}.dtype) | {x} * jax.random.uniform({key}, {x}.shape, {x}.dtype)
jnp.where(jax.random.bernoulli({key}, 0.3, {x}.shape), {x}, 0) | 0.6 jax.random.gumbel({key}, {x}.shape) + {x}
0.5 jax.random.exponential({key}, {x}.shape, {x}.dtype) + {x} | 0.3 jax.random.gamma({key}, jnp.abs({x}) + 0.5)
0.3 jax.random.laplace({key}, {x}.shape) + {x} | 0.6 jax.random.bits({key}, {x}.shape).astype({x}.dtype)
0.5 jax.random.randint({key}, {x}.shape, 0, 100) + {x}
1.5 lax.fori_loop(0, {trips}, lambda i, v: jnp.cos(v) * 0.9 + {x}, {x})
lax.fori_loop(0, {trips}, lambda i, v: v - 0.1 * (v * v - {x}) / (v + 2), {x})
lax.fori_loop(0, {trips}, lambda i, v: jnp.where(v > 0.5, v * 0.99, v + 0.01), {x})
lax.while_loop(lambda c: c[0] < {trips}, lambda c: (c[0] + 1, jnp.tanh(c[1]) + {x}), (0, {x}))[1]
lax.cond(jnp.sum({s}) > 0.7, lambda v: v * 2 + 1, lambda v: jnp.exp(-v), {x})
"""  # noqa: E501
ROWS = """
{x} + {row} | {x} * {row} | {x} - {col} | {x} / {col} | {x} * {row} + {col} | {x}.sum({ax}) | {x}.sum()
{x}.max({ax}) | {x}.min({ax}) | {x}.prod({ax}) | {x}.mean({ax}, keepdims=True) * {x} | {x}.var({ax}) | {x}.std(-1)
jnp.argmax({x}, {ax}) | jnp.argmin({x}, {ax}) | jnp.any({x} > 1, {ax}) | jnp.all({x} > 0.6, {ax})
{x} - {x}.max({ax}, keepdims=True) | jnp.cumsum({x}, {ax}) | jnp.cumprod({x}, {ax}) | lax.cummax({x}, 0)
lax.cummin({x}, 0) | lax.cumlogsumexp({x}, 0) | jsp.special.logsumexp({x}, {ax}) | jnp.linalg.norm({x}, axis={ax})
jnp.diff({x}, axis={ax}) | 1.5 jax.nn.softmax({x}, {ax}) | jax.nn.log_softmax({x}, -1)
1.5 ({x} - {x}.mean(-1, keepdims=True)) * lax.rsqrt({x}.var(-1, keepdims=True) + 1e-5) * {row}
{x} * lax.rsqrt(({x} * {x}).mean(-1, keepdims=True) + 1e-6) | ({x} - {x}.mean(0)) * lax.rsqrt({x}.var(0) + 1e-5)
lax.reduce_window({x}.astype(jnp.float32), -jnp.inf, lax.max, ({k},) + (1,) * ({x}.ndim - 1), (1,) * {x}.ndim, "SAME")
lax.reduce_window({x}.astype(jnp.float32), 0.0, lax.add, (1,) * ({x}.ndim - 1) + ({k},), (1,) * ({x}.ndim - 1) + (2,), "VALID")
jnp.sort({x}, -1) | jnp.sort({x}, 0) | jnp.argsort({x}, -1) | lax.top_k({x}, {k})[0] | jnp.median({x}, -1)
lax.top_k({x}, {k})[1] | jnp.quantile({x}.astype(jnp.float32), 0.3, axis=-1)
jnp.searchsorted(jnp.sort({x}[0].ravel()), {x}) | jnp.concatenate([{x}, {y}], {ax}) | jnp.stack([{x}, {y}], {ax})
jnp.pad({x}, {k}) | {x}[{k}:] | {x}[..., ::2] | {x}[..., :-1] * 2 | jnp.flip({x}, {ax}) | jnp.roll({x}, {k}, {ax})
jnp.tile({x}, (2,) + (1,) * ({x}.ndim - 1)) | jnp.repeat({x}, 3, -1)
jnp.where(jnp.arange({x}.shape[-1]) < {k}, {x}, 0) | {x}.reshape(-1) | {x}.ravel()[::-1]
jnp.split({x}, [{k}], -1)[1] | jnp.take({x}, {i}, axis=0) | {x}[{i}] * 2 | jnp.take_along_axis({x}, {ij}, 0)
{x}.at[{i}].add(1) | {x}.at[{i}].set(0) | 0.7 {x}.at[{i}].max(2)
jax.ops.segment_sum({x}, jnp.arange({x}.shape[0]) % {k}, {k}) | {x}.at[{i}].mul(2)
lax.dynamic_slice_in_dim({x}, {i}[0], {x}.shape[0] // 2)
lax.dynamic_update_slice_in_dim({x}, {x}[:1] * 2, {i}[0], 0) | jax.ops.segment_sum({x}[{i}], {i}, {x}.shape[0])
lax.scan(lambda c, v: (0.9 * c + 0.1 * v,) * 2, {x}[0], {x})[1]
lax.scan(lambda c, v: (jnp.tanh(c + v), None), {x}[0], {x})[0] | lax.map(lambda v: jnp.exp(-v).sum(), {x})
lax.fori_loop(0, {trips}, lambda i, v: v + {x}[i % {x}.shape[0]] * 0.5, {x}[0])
lax.fori_loop(0, {trips}, lambda i, v: v.at[i % {x}.shape[0]].multiply(0.5), {x})
0.5 jax.random.permutation({key}, {x}) | 0.5 jax.random.categorical({key}, {x}, -1)
jax.vmap(lambda v: jnp.dot(v.ravel(), v.ravel()))({x}) | jnp.dot({x}.ravel(), {y}.ravel())
jax.nn.one_hot({i}, {k} + 1) | ({x}[:, None] - {x}[:8]).sum(-1) | jnp.convolve({x}.ravel(), jnp.ones({k}, {x}.dtype))
0.7 jnp.fft.rfft({x}.astype(jnp.float32)) | 0.7 jnp.fft.fft({x}.astype(jnp.complex64)).real
jnp.fft.irfft(jnp.fft.rfft({x}.astype(jnp.float32)) * 0.5) | 0.7 jnp.abs(jnp.fft.fft({x}.astype(jnp.complex64)))
0.5 jnp.fft.ifft({x}.astype(jnp.complex128)).imag | 0.7 jnp.fft.rfft({x}.astype(jnp.float64)).real
0.5 jnp.exp(1j * {x}).real | 0.5 lax.complex({x}.astype(jnp.float32), {x}.astype(jnp.float32)) * (2 + 1j)
"""  # noqa: E501
MATRICES = """
1.5 jnp.swapaxes({x}, 0, 1) | {x}.T + 1 | jnp.swapaxes({x}, -1, -2) * {s} | jnp.moveaxis({x}, 0, -1) | 2 {x} @ {w}
jnp.tanh({x} @ {w} + 0.5) | {x} @ jnp.swapaxes({x}, -1, -2) | jnp.swapaxes({x}, -1, -2) @ {y}
jnp.einsum("...ij,...ik->jk", {x}, {y}) | {x} @ {row} | jax.nn.gelu({x} @ {w})
jax.nn.softmax({x} @ jnp.swapaxes({x}, -1, -2)) @ {x} | jnp.outer({x}[0].ravel()[:64], {x}.ravel()[:4096])
jnp.fft.fft2({x}.astype(jnp.complex64)).real | jnp.triu({x})
jnp.square({x}[..., :, None, :] - {x}[..., None, :16, :]).sum(-1)
lax.scan(lambda c, v: (jnp.tanh(v + c), c), {x}[..., 0, :], jnp.moveaxis({x}, -2, 0))[1]
lax.fori_loop(0, {trips}, lambda i, v: jnp.tanh(v @ {sq}), {x})
lax.scan(lambda c, v: (jnp.tanh(c @ {sq} + v), None), {x}[0], {x})[0]
jnp.cov({x}.reshape(-1, {x}.shape[-1])[:, :64], rowvar=False) | jnp.trace({x}, axis1=-2, axis2=-1)
"""  # noqa: E501
SOLVERS = """
jnp.linalg.cholesky({a}) | jnp.linalg.solve({a}, {ar}) | jnp.linalg.inv({a}) | jnp.linalg.slogdet({a})[1]
jnp.linalg.qr({a})[0] | jnp.linalg.svd({a}, full_matrices=False)[1] | jnp.linalg.svd({a})[0] | jnp.linalg.eigh({a})[1]
jnp.linalg.eigvalsh({a}) | jsp.linalg.lu({a})[1] | jsp.linalg.solve_triangular({a}, {ar}, lower=True)
jsp.linalg.cho_solve((jnp.linalg.cholesky({a}), True), {ar}) | jnp.linalg.det({a}) | {a} @ {ar} | {a} @ {a}
lax.fori_loop(0, {trips}, lambda i, p: {a} @ p @ {a} * 0.1 + p, {a}) | jnp.linalg.pinv({a})
lax.fori_loop(0, {trips}, lambda i, p: p - p @ jnp.linalg.solve({a} + p, {ar}) * 0.01, {a})
jnp.linalg.qr({a}, mode="r")
"""  # noqa: E501
IMAGES = """
2 lax.conv_general_dilated({x}, {hwio}, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
lax.conv_general_dilated({x}, {hwio}, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
lax.reduce_window({x}, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") | {x}.mean((1, 2))
jax.image.resize({x}, (*{x}.shape[:1], 8, 8, {x}.shape[3]), "linear")
lax.conv_general_dilated({x}, {dwio}, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count={x}.shape[3])
jnp.transpose({x}, (0, 3, 1, 2)) | jnp.transpose({x}, (0, 2, 1, 3)) | jax.nn.dot_product_attention({x}, {x}, {x})
lax.conv_general_dilated(jnp.transpose({x}, (0, 3, 1, 2)), {oihw}, (1, 1), "SAME")
lax.conv_general_dilated({x}[:, 0], {wio}, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
"""  # noqa: E501
INTEGERS = """
{x} + {y} | {x} * {y} | {x} & {y} | jnp.bitwise_or({x}, {y}) | {x} ^ {y} | {x} << 2 | {x} >> 1 | ~{x} | lax.population_count({x})
lax.clz({x}) | {x} // 7 | {x} % 5 | {x} // ({y} + 1) | lax.rem({x}, {y} + 3) | jnp.where({x} > {y}, {x}, {y})
{x}.astype(jnp.float32) | {x}.astype(jnp.float64) | jnp.minimum({x}, {y}) | jnp.abs({x}) | {x}.astype(jnp.float32) / 3
jax.random.randint({key}, {x}.shape, 0, 100) + {x} | lax.shift_right_logical({x}, jnp.full_like({x}, 1))
"""  # noqa: E501
GROUPS = {
    "float": FLOAT,
    "rows": ROWS,
    "matrices": MATRICES,
    "solvers": SOLVERS,
    "images": IMAGES,
    "integers": INTEGERS,
}


class Template(NamedTuple):
    """An expression with placeholders, and its weight in the draw."""

    group: str
    text: str
    weight: float


def _templates() -> Iterable[Template]:
    for group, text in GROUPS.items():
        for one in text.strip().replace("\n", " | ").split(" | "):
            first, _, rest = one.partition(" ")
            is_weighted = first.replace(".", "").isdecimal() and rest[:1] not in "/*+-"
            yield Template(group, rest, float(first)) if is_weighted else Template(group, one, 1.0)


TEMPLATES = tuple(_templates())


class Program(NamedTuple):
    """A program as data: its templates in order, the lines of its body, what it returns, and its arguments."""

    templates: tuple[str, ...]
    lines: tuple[str, ...]
    result: str
    arguments: tuple[dict[str, Any], ...]
    gradient: bool

    @classmethod
    def of(cls, kept: dict[str, Any]) -> "Program":
        """Return a program from the `_asdict` that a JSON file has."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in kept.items()})

    def draws(self) -> tuple[Draw, ...]:
        """Return the arguments as objects that draw them."""
        return tuple(Draw(tuple(each["shape"]), jnp.dtype(each["dtype"]), **each["drawn"]) for each in self.arguments)

    @property
    def n_bytes(self) -> int:
        """Bytes of its arguments."""
        return sum(math.prod(each["shape"]) * jnp.dtype(each["dtype"]).itemsize for each in self.arguments)

    def function(self) -> Callable[..., Any]:
        """Return the function as written, or its gradient by the first argument."""
        names = ", ".join(f"v{place}" for place in range(len(self.arguments)))
        body = "".join(f"    {line}\n" for line in self.lines)
        found: dict[str, Any] = {}
        exec(f"def run({names}):\n{body}    return {self.result}\n", dict(_NAMES), found)  # noqa: S102
        run = found["run"]
        if not self.gradient:
            return run

        def total(*args: Any) -> jax.Array:
            return sum(jnp.sum(jnp.abs(leaf)).astype(jnp.float32) for leaf in jax.tree.leaves(run(*args)))

        return jax.value_and_grad(total)


class _Drawing:
    """A program under construction: values by name with their shapes, arguments, lines."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.arguments: list[Draw] = []
        self.lines: list[tuple[str, str]] = []
        self.values: dict[str, Any] = {}
        self.read: set[str] = set()

    def argument(self, shape: tuple[int, ...], dtype: Any, values: str = "", below: int = 0) -> str:
        """Add an argument; return a placeholder for its name, because arguments are numbered first."""
        values = values or ("positive" if self.rng.random() < 0.7 else "normal")
        if jnp.issubdtype(dtype, jnp.integer):
            below = below or 100
        self.arguments.append(Draw(shape, dtype, values, below))
        return f"@{len(self.arguments) - 1}@"

    def filled(self, template: Template, x: str) -> str:
        """Return the template with operands, new arguments and numbers in its placeholders."""
        rng, aval, text = self.rng, self.values[x], template.text
        shape, dtype = aval.shape, aval.dtype
        last, first = (shape[-1], shape[0]) if shape else (1, 1)

        def number(least: int, most: int) -> int:
            return int(math.exp(rng.uniform(math.log(least), math.log(max(most, least) + 0.99))))

        n = min(number(2, 192), max(int(math.sqrt(aval.size)), 2))
        batch = (number(1, min(max(aval.size // n**2, 1), 4096)),) if rng.random() < 0.5 else ()
        others = {name: other for name, other in self.values.items() if name != x}
        like = [name for name, other in others.items() if (other.shape, other.dtype) == (shape, dtype)]
        places: dict[str, Callable[[], str]] = {
            "{y}": lambda: str(rng.choice(like)) if like and rng.random() < 0.7 else self.argument(shape, dtype),
            "{row}": lambda: self.argument((last,), dtype),
            "{col}": lambda: self.argument((first,) + (1,) * (len(shape) - 1), dtype),
            "{s}": lambda: self.argument((), dtype),
            "{key}": lambda: self.argument((), np.uint32, "key"),
            "{i}": lambda: self.argument((number(1, 2 * first),), np.int32, below=max(first, 1)),
            "{ij}": lambda: self.argument(shape, np.int32, below=max(first, 1)),
            "{w}": lambda: self.argument((last, number(1, 1024)), dtype, "normal"),
            "{sq}": lambda: self.argument((last, last), dtype, "normal"),
            "{a}": lambda: self.argument((*batch, n, n), np.float64 if dtype == np.float64 else np.float32, "definite"),
            "{ar}": lambda: self.argument(
                (*batch, n, n if "fori" in text else number(1, 32)), np.float64 if dtype == np.float64 else np.float32
            ),
            "{hwio}": lambda: self.argument(
                (*2 * (int(rng.choice([1, 3, 3, 5])),), last, number(1, 64)), dtype, "normal"
            ),
            "{dwio}": lambda: self.argument((3, 3, 1, last), dtype, "normal"),
            "{oihw}": lambda: self.argument((number(1, 64), last, 3, 3), dtype, "normal"),
            "{wio}": lambda: self.argument((int(rng.choice([3, 5, 9])), last, number(1, 64)), dtype, "normal"),
            "{k}": lambda: str(number(1, 32)),
            "{trips}": lambda: str(number(2, 300)),
            "{ax}": lambda: str(rng.choice([0, -1, -1])),
        }
        for place, value in places.items():
            while place in text:
                once = place in ("{a}", "{i}", "{k}", "{sq}", "{key}", "{trips}")
                text = text.replace(place, value(), -1 if once else 1)
        return text.replace("{x}", x)

    def add(self, template: Template, x: str) -> bool:
        """Add a line by a template, unless JAX refuses it."""
        n_arguments = len(self.arguments)
        text = self.filled(template, x)
        abstract = [draw.abstract() for draw in self.arguments]
        names = [f"@{place}@" for place in range(len(abstract))]
        known = {**self.values, **dict(zip(names, abstract, strict=True))}
        used = [name for name in known if name in text]
        plain = {name: f"a{place}" for place, name in enumerate(used)}
        code = text
        for name in sorted(used, key=len, reverse=True):
            code = code.replace(name, plain[name])
        try:
            run = eval(f"lambda {', '.join(plain.values())}: {code}", dict(_NAMES))  # noqa: S307
            found = jax.eval_shape(run, *(known[name] for name in used))
            if not hasattr(found, "shape") or found.size == 0:
                raise ValueError("no result")
        except Exception:  # noqa: BLE001  (an expression that JAX refuses is not drawn)
            del self.arguments[n_arguments:]
            return False
        self.values |= {name: known[name] for name in names if name in used}
        name = f"#{len(self.lines)}#"
        self.lines.append((name, text))
        self.values[name] = found
        self.read |= set(used)
        return True

    def program(self, templates: Iterable[str], gradient: bool) -> Program:
        """Return the drawn program with the final names of values."""
        count = len(self.arguments)
        names = {f"@{place}@": f"v{place}" for place in range(count)}
        names |= {f"#{place}#": f"v{count + place}" for place in range(len(self.lines))}

        def renamed(text: str) -> str:
            for mark, name in names.items():
                text = text.replace(mark, name)
            return text

        leaves = [name for name, _ in self.lines if name not in self.read]
        return Program(
            tuple(templates),
            tuple(renamed(f"{name} = {text}") for name, text in self.lines),
            renamed(", ".join(leaves)),
            tuple(
                {
                    "shape": draw.shape,
                    "dtype": np.dtype(draw.dtype).name,
                    "drawn": {"values": draw.values, "below": draw.below},
                }
                for draw in self.arguments
            ),
            gradient,
        )


def _shape(rng: np.random.Generator, elements: int, rank: int) -> tuple[int, ...]:
    """Return a shape with about this number of elements, often with powers of two."""
    cuts = np.sort(rng.uniform(0, math.log2(elements), rank - 1)) if rank > 1 else np.array([])
    logs = np.diff(np.concatenate([[0.0], cuts, [math.log2(elements)]]))
    if rng.random() < 0.5:
        logs = np.round(logs)
    return tuple(max(round(2**each), 1) for each in logs)


def _fits(group: str, aval: Any) -> bool:
    """Whether templates of a group take a value."""
    kind, rank = aval.dtype, len(aval.shape)
    if jnp.issubdtype(kind, jnp.complexfloating) or kind == jnp.bool_:
        return False
    is_real = jnp.issubdtype(kind, jnp.floating)
    wants = {"float": is_real, "rows": rank >= 1, "matrices": rank >= 2 and is_real, "images": rank == 4 and is_real}
    return wants.get(group, not is_real if group == "integers" else is_real and aval.size >= 4)


def drawn(number: int, cost_ns: Callable[[Callable[..., Any], tuple[Any, ...]], float]) -> Program:
    """Return the program with a number, the same program in each call.

    Args:
        number: the number of the program, at least 0.
        cost_ns: the approximate ns of a function's call with abstract arguments. An expensive program is drawn again,
            smaller.
    """
    rng = np.random.default_rng([53, number])
    log2_elements = rng.uniform(0, MOST_LOG2_ELEMENTS)
    for _ in range(60):
        drawing = _Drawing(rng)
        first = TEMPLATES[rng.choice(len(TEMPLATES), p=_SHARES)]
        rank = {"images": 4, "matrices": int(rng.choice([2, 2, 2, 3]))}.get(first.group, int(rng.choice([1, 2, 2, 3])))
        dtype = jnp.dtype("int32" if first.group == "integers" else str(rng.choice(DTYPES.split())))
        if first.group in ("float", "matrices", "images", "solvers") and not jnp.issubdtype(dtype, jnp.floating):
            dtype = jnp.dtype("float32")
        x = drawing.argument(_shape(rng, 2**log2_elements, rank), dtype)
        drawing.values[x] = drawing.arguments[0].abstract()
        templates, steps = [], min(int(rng.geometric(0.28)), MOST_STEPS)
        for _ in range(8 * steps):
            template = first if not templates else TEMPLATES[rng.choice(len(TEMPLATES), p=_SHARES)]
            made = [name for name, _ in drawing.lines]
            x = made[-1] if made and rng.random() < 0.75 else str(rng.choice(list(drawing.values)))
            if _fits(template.group, drawing.values[x]) and drawing.add(template, x):
                templates.append(template.text)
            if len(templates) == steps:
                break
        if not templates:
            continue
        gradient = rng.random() < 0.2
        for program in (drawing.program(templates, True), drawing.program(templates, False))[not gradient :]:
            try:
                taken = cost_ns(program.function(), tuple(draw.abstract() for draw in program.draws()))
            except Exception:  # noqa: BLE001  (a program without a gradient)
                continue
            if taken <= MOST_NS:
                return program
        log2_elements = max(log2_elements - 1.0, 0.0)
    raise ValueError(f"number {number}: no program was found that is cheap enough")


def single(number: int, cost_ns: Callable[[Callable[..., Any], tuple[Any, ...]], float]) -> Program:
    """Return the one-line program with a number, in a usual shape: powers of two, sometimes three times a power.

    Args:
        number: the number of the program, at least 0. Consecutive numbers take consecutive templates.
        cost_ns: the same as for `drawn`.
    """
    rng, template = np.random.default_rng([531, number]), TEMPLATES[number % len(TEMPLATES)]
    log2_elements = rng.uniform(6, 21)
    while log2_elements > 1:
        drawing = _Drawing(rng)
        rank = {"images": 4, "matrices": int(rng.choice([2, 2, 3]))}.get(template.group, int(rng.choice([1, 2, 2])))
        dtype = "int32" if template.group == "integers" else str(rng.choice(["float32"] * 6 + ["bfloat16"]))
        cuts = np.sort(rng.uniform(0, log2_elements, rank - 1))
        logs = np.round(np.diff([0.0, *cuts, log2_elements])).astype(int)
        shape = tuple(int(2**each) if rng.random() < 0.85 or each < 1 else int(3 * 2 ** (each - 1)) for each in logs)
        x = drawing.argument(shape, jnp.dtype(dtype))
        drawing.values[x] = drawing.arguments[0].abstract()
        if _fits(template.group, drawing.values[x]) and drawing.add(template, x):
            program = drawing.program([template.text], False)
            if cost_ns(program.function(), tuple(draw.abstract() for draw in program.draws())) <= MOST_NS:
                return program
        log2_elements -= 0.25
    raise ValueError(f"number {number}: no program was found")


_SHARES = np.array([template.weight for template in TEMPLATES])
_SHARES /= _SHARES.sum()
