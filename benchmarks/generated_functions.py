"""Count generated functions under JAX's transformations: each gives a count, or one sentence that says why not.

    python -m benchmarks.generated_functions [--cases 2000] [--seed 64] [--json FILE]

A case is a chain of operations (literals, scalars, empty arrays, all kinds of numbers, control flow, indexing, linear
algebra) under one transformation. `profile_function` counts every case, `predict_function` predicts every fourth case,
and every twentieth case is also compiled. A case fails if it raises anything but a `ValueError` of one line, or if it
raises although JAX traces, or compiles, the function. The case's source and the traceback are printed.
"""

import collections
import math
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
from jax import lax

from benchmarks._common import options, table, write
from rlxjax import profile_function
from rlxjax.calibration import Calibration, predict_function, prior_calibration

SEED = 64
SHAPES = ((), (), (1,), (4,), (7,), (0,), (3, 4), (4, 4), (1, 1), (0, 3), (3, 0), (2, 3, 4), (2, 4, 4), (2, 0, 4))
DTYPES = 4 * ["float32"] + ["float64", "bfloat16", "float16", "complex64", "int32", "int8", "uint8", "bool"]
#: Operations on an array `v` of any shape, on its elements `r` in a row, and on a square matrix `a` that holds them.
OPERATIONS = """
v + 1 | 2.0 * v | v * v | 1 / v | v ** 2 | v ** 0.5 | v ** -1 | v - v.mean() | -v | abs(v) | v > 0
v == v | ~(v > 0) | jnp.exp(v) | jnp.log1p(v) | jnp.sin(v) | jnp.tanh(v) | jnp.sqrt(v)
jnp.sign(v) | jnp.arctan2(v, 2) | jnp.angle(v) | jnp.where(v > 0, v, 0) | jnp.clip(v, 0, 1)
jnp.maximum(v, 0) | jnp.mod(v, 3) | v // 2 | jnp.left_shift(v, 1) | jnp.real(v) | jnp.imag(v)
jnp.conj(v) | v + 1j | v * np.float32(2) | v + np.ones((1, 1), "f") | jax.nn.softmax(v)
jax.nn.gelu(v) | jax.nn.relu(v) | jax.nn.logsumexp(v) | jsp.special.gammaln(v) | jsp.special.erf(v)
lax.integer_pow(v, 5) | v.astype("float32") | v.astype(int) | v.astype(bool) | v.astype(complex)
v.astype(jnp.bfloat16) | v.astype("uint8") | v.sum() | v.max(initial=0) | v.prod()
v.sum(keepdims=True) | v.any() | jnp.all(v) | v.mean() | v.var() | v.std(ddof=1) | r.argmax()
jnp.nanmean(v) | jnp.median(r) | jnp.quantile(r, 0.3) | jnp.linalg.norm(r) | jnp.ptp(v)
jnp.average(r) | r @ r | jnp.dot(2.0, v) | jnp.dot(v, 3) | jnp.vdot(v, v) | r @ a @ r | a @ a
a @ r | a.T @ a | jnp.inner(r, r) | a.trace() | jnp.einsum(",...->...", 2.0, v)
jnp.einsum("i,i->", r, r) | jnp.einsum("ij,jk->ki", a, a) | jnp.tensordot(v, v, 0)
jnp.einsum("ii", a) | jnp.matmul(a[None], a) | jnp.kron(a, a) | jnp.outer(r, r)
jnp.cross(r[:3], r[:3]) | a @ a.T + 1 | lax.dot_general(a, r, (((1,), (0,)), ((), ())))
jnp.convolve(r, np.ones(2, "f")) | jnp.correlate(r, r, "same")
lax.conv_general_dilated(r[None, None], jnp.ones((1, 1, 2), r.dtype), (1,), "SAME")
jnp.polyval(np.ones(3, "f"), v)
lax.reduce_window(r, np.zeros((), r.dtype), lax.add, (2,), (1,), "SAME")
jnp.interp(r, np.arange(3.0), np.arange(3.0))
lax.conv_general_dilated(a[None, None], jnp.ones((2, 1, 2, 2), r.dtype), (2, 1), "VALID") | r[0]
r[-1:] | r[::2] | r[::-1] | r[None] | v[...] | r[:0] | r[1:3] | r.at[0].set(1) | r.at[:1].add(2)
r.at[::2].mul(2) | r[jnp.array([0, 0])] | r[r > 0].size * v | jnp.take(r, 0, mode="clip")
jnp.take_along_axis(r, jnp.argsort(r), 0) | lax.dynamic_slice(r, (0,), (min(1, r.size),))
lax.dynamic_update_slice(r, r[:1], (0,)) | a[0] | a[:, -1] | a[:1, :1] | v.T | v.ravel()
v.reshape(-1) | v[..., None] | v.squeeze() | jnp.swapaxes(a, 0, 1)
jnp.broadcast_to(v, (2, *v.shape)) | jnp.concatenate([r, r]) | jnp.concatenate([r, r[:0]])
jnp.stack([v, v]) | jnp.pad(v, 1) | jnp.tile(v, 2) | jnp.roll(r, 1) | jnp.repeat(r, 2)
jnp.split(jnp.tile(r, 2), 2)[1] | jnp.flip(v) | jnp.diag(r) | jnp.tril(a) | jnp.triu(a, 1)
jnp.diff(r) | jnp.sort(r) | jnp.argsort(r) | lax.top_k(r, min(1, r.size))[0]
lax.top_k(r, r.size)[1][-1:] | jnp.searchsorted(r, v) | jnp.lexsort((r, r))
lax.sort((r, r), num_keys=1)[1] | jnp.unique(r, size=2, fill_value=0) | jnp.bincount(r, length=3)
jnp.cumsum(v) | jnp.cumprod(r) | lax.cummax(r) | lax.associative_scan(jnp.add, r)
jnp.histogram(r, 3)[0] | jnp.fft.fft(r) | jnp.fft.rfft(r) | jnp.fft.ifft(v) | jnp.fft.fft2(a)
jnp.fft.irfft(r) | lax.fft(r + 0j, "FFT", (r.size,)) | jnp.linalg.inv(a) | jnp.linalg.det(a)
jnp.linalg.solve(a, r) | jnp.linalg.cholesky(a) | jnp.linalg.qr(a)[0] | lax.exp(v)
jnp.linalg.svd(a)[1] | jnp.linalg.eigh(a)[1] | jnp.linalg.eigvals(a) | jnp.linalg.slogdet(a)[1]
jsp.linalg.expm(a) | jsp.linalg.solve_triangular(a, r) | jsp.linalg.lu(a)[2] | jnp.linalg.pinv(a)
jnp.linalg.lstsq(a, r)[0] | a ** a | jnp.linalg.matrix_power(a, 3) | jsp.linalg.cho_factor(a)[0]
jnp.linalg.eigh(a)[0] | jnp.linalg.matrix_rank(a) | lax.cond(True, jnp.exp, jnp.sin, v)
lax.cond(v.sum() > 0, lambda x: x, lambda x: x * 2, v) | lax.stop_gradient(v)
lax.switch(1, [jnp.sin, jnp.cos, jnp.exp], v) | lax.fori_loop(0, 3, lambda i, x: x * 2, v)
lax.map(jnp.sin, r) | lax.fori_loop(0, 0, lambda i, x: x + i, v)
lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, v)
lax.scan(lambda c, x: (c + x, c * x), r.sum(), r)[1]
lax.scan(lambda c, _: (c * 2, None), v, length=3)[0] | lax.scan(lambda c, x: (c, x), 0, r[:0])[1]
lax.platform_dependent(v, cpu=jnp.sin, default=jnp.cos)
lax.reduce(v, np.zeros((), v.dtype), lax.max, tuple(range(v.ndim))) | lax.select(v > 0, v, -v)
lax.rsqrt(v) | jax.random.normal(jax.random.key(0), v.shape) + v
jax.random.bernoulli(jax.random.key(1), 0.5, v.shape) * v
jax.random.permutation(jax.random.key(0), r) | jax.random.choice(jax.random.key(0), r, (2,))
jnp.zeros_like(v) | jax.nn.one_hot(r, 3) | jax.ops.segment_sum(r, jnp.zeros(r.shape, int), 2)
jnp.ones((0, 3)) @ jnp.ones((3, 2)) | jnp.eye(2) | jnp.array(3.0) | np.float32(1) | 1.5
jnp.asarray([]) | v + jnp.zeros((0, *v.shape)) | jnp.vectorize(jnp.sin)(v) | held(v)
lax.optimization_barrier(v) | jax.checkpoint(jnp.sin)(v) | jax.jit(jnp.square)(v)
jnp.float32(0) * 1 | jnp.arange(3) * 1.0 | jnp.nan_to_num(v) | jnp.isnan(v)
lax.population_count(v) | lax.reduce_precision(v, 5, 10) | jnp.round(v, 1) | jnp.cbrt(v)
"""
#: What a function returns: arrays, Python's numbers, trees, or nothing.
RESULTS = ("v", "v", "v", "v", "(v, 1.0)", '{"a": v, "b": [x]}', "v, None", "(v.sum(), v)", "x", "None")


def held(array: Any) -> Any:
    """Return the elements from an array that the function itself creates and changes."""
    holder = jax.new_ref(array)
    holder[...] = holder[...] * 2
    return holder[...]


NAMES = {"jax": jax, "jnp": jnp, "jsp": jsp, "lax": lax, "np": np, "held": held}


def loss(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of one real number: the sum of all numbers that `fn` returns."""

    def summed(*args: Any) -> Any:
        return sum((jnp.real(jnp.sum(leaf)) * 1.0 for leaf in jax.tree.leaves(fn(*args))), 0.0)

    return summed


def _jvp(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *rest: jax.jvp(lambda y: fn(y, *rest), (x,), (jnp.ones_like(x),))


def _vjp(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *rest: jax.vjp(loss(lambda y: fn(y, *rest)), x)[1](1.0)


def _linearize(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *rest: jax.linearize(lambda y: fn(y, *rest), x)[1](jnp.ones_like(x))


def _custom_vjp(fn: Callable[..., Any]) -> Callable[..., Any]:
    own = jax.custom_vjp(loss(fn))
    own.defvjp(lambda *args: (loss(fn)(*args), args), lambda args, up: jax.tree.map(lambda one: one * up, args))
    return jax.grad(own)


def _custom_jvp(fn: Callable[..., Any]) -> Callable[..., Any]:
    own = jax.custom_jvp(loss(fn))
    own.defjvp(lambda args, ups: (own(*args), 2.0 * jnp.sum(ups[0])))
    return jax.grad(own)


def _scan(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: lax.scan(lambda carry, _: (carry, fn(*args)), 0.0, length=3)


def _vmap(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *rest: jax.vmap(lambda y: fn(y, *rest))(jnp.stack([x, x]))


def _cond(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: lax.cond(jnp.sum(args[0]) > 0, lambda: fn(*args), lambda: fn(*args))


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "none": lambda fn: fn,
    "jit": jax.jit,
    "grad": lambda fn: jax.grad(loss(fn)),
    "value_and_grad": lambda fn: jax.value_and_grad(loss(fn)),
    "vmap": _vmap,
    "jvp": _jvp,
    "vjp": _vjp,
    "jacfwd": jax.jacfwd,
    "jacrev": jax.jacrev,
    "hessian": lambda fn: jax.hessian(loss(fn)),
    "checkpoint": lambda fn: jax.grad(jax.checkpoint(loss(fn))),
    "linearize": _linearize,
    "custom_vjp": _custom_vjp,
    "custom_jvp": _custom_jvp,
    "scan": _scan,
    "grad of scan": lambda fn: jax.grad(loss(_scan(fn))),
    "vmap of grad": lambda fn: _vmap(jax.grad(loss(fn))),
    "grad of vmap": lambda fn: jax.jit(jax.grad(loss(_vmap(fn)))),
    "cond": _cond,
    "grad of cond": lambda fn: jax.grad(loss(_cond(fn))),
}
#: The transformations that take numbers of all kinds.
PLAIN = ("none", "jit", "vmap", "scan", "cond")
#: The first cases: functions of users that raised an error in an earlier version.
REPORTED = ("r @ r", "jnp.vdot(v, v)", "r @ a @ r", "jnp.dot(2.0, v)", 'jnp.einsum(",...->...", 2.0, v)', "held(v)")


class Case(NamedTuple):
    """A function as a text, the transformation that is applied to the function, and the arguments."""

    source: str
    transform: str
    args: tuple[Any, ...]

    def function(self) -> Callable[..., Any]:
        """Return the transformed function."""
        names = dict(NAMES)
        exec(self.source, names)
        return TRANSFORMS[self.transform](names["f"])


def _argument(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    """Return an array, the shape of an array or, for a single element, perhaps one of Python's numbers."""
    if not shape and rng.random() < 0.3:
        return [1.5, 2, True, 2.0 + 1j][rng.integers(4)]
    if rng.random() < 0.5:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    return jnp.ones(shape, dtype)


def generated(cases: int, seed: int = SEED) -> Iterator[Case]:
    """Yield the cases of a seed. The first cases do not depend on the number of cases."""
    known = [line.strip() for text in OPERATIONS.strip().splitlines() for line in text.split(" | ")]
    for number in range(cases):
        rng = np.random.default_rng([seed, number])
        steps = [known[place] for place in rng.integers(len(known), size=rng.integers(1, 4))]
        transform = list(TRANSFORMS)[number % len(TRANSFORMS)]
        dtypes = DTYPES if transform in PLAIN or rng.random() < 0.2 else DTYPES[:7]  # the real numbers
        args = [_argument(rng, SHAPES[rng.integers(len(SHAPES))], dtypes[rng.integers(len(dtypes))]) for _ in range(2)]
        result = RESULTS[rng.integers(len(RESULTS))]
        if number < len(REPORTED):
            steps, transform, args, result = [REPORTED[number]], "grad", [jnp.ones(4), 1.0], "v"
        # The second argument is not used by most functions.
        lines = ["x = jnp.asarray(x)", f"v = {'x + y' if number % 7 == 6 else 'x'}"]
        for step in steps:
            lines += ["v = jnp.asarray(v)", "r = v.ravel()[:6]", "a = jnp.outer(r, r) + jnp.eye(r.size, dtype=r.dtype)"]
            lines += [f"v = {step}"]
        source = "\n    ".join(["def f(x, y):", *lines, "v = jnp.asarray(v)", f"return {result}"])
        yield Case(source, transform, tuple(args))


def runs(case: Case, compiled: bool) -> bool:
    """Whether JAX itself traces the function and, if `compiled`, compiles the function."""
    try:
        jax.make_jaxpr(case.function())(*case.args)
        if compiled:
            jax.jit(case.function()).lower(*case.args).compile()
    except Exception:  # noqa: BLE001 - a generated function may raise anything
        return False
    return True


def outcome(case: Case, calibration: Calibration | None = None, compiled: bool = False) -> tuple[str, str]:
    """Return "count", "sentence" or "traceback", and what was raised, or what is wrong with the count."""
    try:
        profile = profile_function(case.function(), *case.args)
        figures = [profile.io.device_traffic_bytes, profile.flops, profile.transcendentals, profile.integer_ops]
        bad = [one for one in (*figures, profile.peak_bytes) if one < 0]
        bad += [one for one in jax.tree.leaves(profile.kernels) if (one < 0).any()]
        if calibration is not None:
            found = predict_function(calibration, case.function(), *case.args)
            bad += [] if 0 <= found.low_ns <= found.time_ns <= found.high_ns < math.inf else [found]
        if compiled:
            profile_function(case.function(), *case.args, level="compiled")
    except Exception as error:  # noqa: BLE001 - every exception counts
        is_sentence = isinstance(error, ValueError) and "\n" not in str(error) and not runs(case, compiled)
        return ("sentence", str(error)) if is_sentence else ("traceback", traceback.format_exc())
    return ("traceback", f"impossible counts: {bad}") if bad else ("count", "")


def main() -> None:
    """Count all cases; print the totals by transformation, and each failure."""
    args = options(__doc__, cases=2000, seed=SEED).parse_args()
    warnings.simplefilter("ignore")
    calibration, totals = prior_calibration(), collections.defaultdict(collections.Counter)
    failures = []
    for number, case in enumerate(generated(args.cases, args.seed)):
        # Every twentieth case is compiled, each time with another transformation.
        is_compiled = number % len(TRANSFORMS) == number // len(TRANSFORMS) % len(TRANSFORMS)
        kind, said = outcome(case, None if number % 4 else calibration, is_compiled)
        totals[case.transform][kind] += 1
        if kind == "traceback":
            failures.append({"case": number, **case._asdict(), "args": str(case.args), "said": said})
            print(f"case {number}, {case.transform} of{case.args}:\n{case.source}\n{said}\n", flush=True)
    kinds = ("count", "sentence", "traceback")
    totals["all"] = sum(totals.values(), collections.Counter())
    print(table(["transformation", *kinds], [[name, *map(found.__getitem__, kinds)] for name, found in totals.items()]))
    write(args.json, {"failures": failures, "totals": totals})
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
