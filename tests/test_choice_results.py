"""Which results of two programs are the same but for rounding, and which are not."""

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlxjax.choices._calls import difference
from rlxjax.choices._programs import unlike

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


ROWS, QUERIES, KEYS, WEIGHTS = normal(16, 500), normal(32, 32), normal(32, 32), 1e-3 * normal(500)
CENTRED = ROWS - ROWS.mean(1, keepdims=True)
ONES, EVEN = np.ones(500, np.float32), np.r_[ROWS[0, :251], ROWS[0, 1:250][::-1]]
CAUSAL = np.tril(np.ones((32, 32), bool))
HALF = CENTRED.astype(jnp.bfloat16)
DFT = np.exp(-2j * np.pi * np.outer(np.arange(500), np.arange(500)) / 500).astype(np.complex64)


def scores(scale, masked, q, k):
    """Attention scores, whose mask is a number of another size."""
    return masked(q @ k.T / scale)


def loss_and_gradient(loss, w, x):
    """A loss of some millions, packed with a gradient of other units."""
    value, gradient = jax.value_and_grad(loss)(w, x)
    return jnp.concatenate([value[None], gradient])


def where(s):
    return jnp.where(CAUSAL, s, -1e9)


def added(s):
    return s + jnp.where(CAUSAL, 0.0, -1e9)


def norm_of_product(w, x):
    return 1e6 * ((x @ w) ** 2).sum()


def moments(x):
    """Rows' moments of very different sizes, as one array."""
    return jnp.stack([(x**power).sum(1) * 10.0 ** (3 * power) for power in (1, 2, 3)])


#: Programs that give the same, and their arguments.
SAME = {
    "means of centred rows": (lambda x: x.mean(1), lambda x: (x @ ONES) / 500, CENTRED),
    "the same, centred inside": (
        lambda x: (x - x.mean(1, keepdims=True)).mean(1),
        lambda x: ((x - x.mean(1, keepdims=True)) @ ONES) / 500,
        ROWS,
    ),
    "sums of softmax less one": (
        lambda x: jax.nn.softmax(x).sum(1) - 1,
        lambda x: jax.nn.softmax(x) @ ONES - 1,
        ROWS,
    ),
    "logarithm of one": (
        lambda x: jax.nn.logsumexp(jax.nn.log_softmax(x), 1),
        lambda x: jnp.log(jax.nn.softmax(x).sum(1)),
        ROWS,
    ),
    "imaginary parts of zero": (lambda x: jnp.fft.fft(x).imag, lambda x: jnp.zeros_like(x), EVEN),
    "a transform": (lambda x: jnp.fft.fft(x), lambda x: DFT @ x, ROWS[1]),
    "sums in bfloat16": (lambda x: x.sum(1), lambda x: x @ ONES.astype(jnp.bfloat16), HALF),
    "masked scores": (
        lambda q, k: scores(32**0.5, where, q, k),
        lambda q, k: scores(1.0, where, q / 32**0.5, k),
        QUERIES,
        KEYS,
    ),
    "packed loss and gradient": (
        lambda w, x: loss_and_gradient(norm_of_product, w, x),
        lambda w, x: loss_and_gradient(lambda w, x: 1e6 * w @ (x.T @ (x @ w)), w, x),
        WEIGHTS,
        ROWS,
    ),
    "squared distances": (
        lambda q: ((q[:, None] - q[None]) ** 2).sum(-1),
        lambda q: (q * q).sum(-1)[:, None] + (q * q).sum(-1)[None] - 2 * q @ q.T,
        QUERIES,
    ),
    "a solution": (jnp.linalg.solve, lambda a, b: jnp.linalg.inv(a) @ b, QUERIES, KEYS[0]),
    "no arguments but whole numbers": (
        lambda n: jnp.cos(n * np.float32(np.pi / 2)),
        lambda n: jnp.sin(n * np.float32(np.pi / 2) + np.float32(np.pi / 2)),
        np.arange(500),
    ),
    "the largest of equals": (
        lambda x: jnp.argmax(x.sum(1)),
        lambda x: jnp.argmax(x @ ONES),
        np.full((16, 500), 0.1, np.float32),
    ),
}
#: Inputs at a jump: what is done with them is exact, or rounds, and the other program does not round.
AT_ONE, AT_HALF, AT_ZERO, TENTHS = (np.full((4, 10), at, np.float32) for at in (1.0, 0.5, 0.0, 0.1))
SUMMED = np.ones(10, np.float32)
SAME |= {
    "floor of a sum that rounds": (lambda x: jnp.floor(x.sum(1)), lambda x: jnp.floor(x @ SUMMED), TENTHS),
    "cast of a sum that rounds": (
        lambda x: (x.sum(1) * 10).astype(jnp.int32),
        lambda x: ((x @ SUMMED) * 10).astype(jnp.int32),
        TENTHS,
    ),
    "order of sums that tie": (lambda x: jnp.argsort(x.sum(1)), lambda x: jnp.argsort(x @ SUMMED), TENTHS),
    "floor of a quotient that rounds": (lambda x: jnp.floor(x / 0.1), lambda x: jnp.floor(x * 10), 3 * TENTHS),
    "another tanh": (lambda x: jnp.tanh(1e-6 * x), lambda x: 1 - 2 / (jnp.exp(2e-6 * x) + 1), ROWS),
    "products in another order": (lambda x: x @ x.T @ x, lambda x: x @ (x.T @ x), QUERIES),
    "a factor": (
        lambda x: jnp.linalg.cholesky(x @ x.T),
        lambda x: jnp.linalg.cholesky((x[:, None] * x[None]).sum(-1)),
        QUERIES,
    ),
    "a variance": (lambda x: x.var(1), lambda x: (x * x).mean(1) - x.mean(1) ** 2, ROWS + 100),
}
#: Programs that give something else, and what is off.
OTHER = {
    "at a jump: comparison": (lambda x: x >= 1, lambda x: x > 1, AT_ONE),
    "at a jump: equality of a product": (lambda x: 2 * x == 2, lambda x: 2 * x != 2, AT_ONE),
    "at a jump: comparison of a sum": (lambda x: x.sum(1) >= 10, lambda x: x @ SUMMED > 10, AT_ONE),
    "at a jump: comparison with a captured array": (lambda x: x >= TENTHS, lambda x: x > TENTHS, TENTHS),
    "at a jump: a branch": (
        lambda x: jax.lax.cond(x[0, 0] >= 1, lambda: 1.0, lambda: 2.0),
        lambda x: jax.lax.cond(x[0, 0] > 1, lambda: 1.0, lambda: 2.0),
        AT_ONE,
    ),
    "at a jump: within a program and a loop": (
        lambda x: jax.jit(lambda y: jax.lax.scan(lambda c, a: (c + a, c >= 1), AT_ZERO[0], y)[1])(x),
        lambda x: jax.jit(lambda y: jax.lax.scan(lambda c, a: (c + a, c > 1), AT_ZERO[0], y)[1])(x),
        AT_ONE,
    ),
    "at a jump: sign of infinity": (lambda x: 1 / (x - 1), lambda x: -1 / (x - 1), AT_ONE),
    "at a jump: nothing by nothing": (lambda x: (x - 1) / (x - 1), lambda x: x - 1, AT_ONE),
    "at a jump: logarithm of zero": (lambda x: jnp.log(x - 1), lambda x: -jnp.log(x - 1), AT_ONE),
    "at a jump: floor": (lambda x: jnp.floor(x.mean()), lambda x: jnp.ceil(x.mean()) - 1, AT_ONE),
    "at a jump: round": (jnp.round, lambda x: jnp.floor(x + 0.5), AT_HALF),
    "at a jump: cast": (lambda x: x.astype(jnp.int32), lambda x: jnp.ceil(x).astype(jnp.int32) - 1, 3 * AT_ONE),
    "at a jump: sign": (jnp.sign, lambda x: jnp.where(x >= 0, 1.0, -1.0), AT_ZERO),
    "at a jump: root": (lambda x: jnp.sqrt(4 * x) >= 2, lambda x: jnp.sqrt(4 * x) > 2, AT_ONE),
    "at a jump: the last of equals": (lambda x: x.argmax(1), lambda x: 9 - x[:, ::-1].argmax(1), AT_ONE),
    "at a jump: in bfloat16": (lambda x: x / 2 >= 0.5, lambda x: x / 2 > 0.5, AT_ONE.astype(jnp.bfloat16)),
    "scores that are not scaled": (
        lambda q, k: scores(32**0.5, where, q, k),
        lambda q, k: scores(1.0, where, q, k),
        QUERIES,
        KEYS,
    ),
    "the same, with a mask that is added": (
        lambda q, k: scores(32**0.5, added, q, k),
        lambda q, k: scores(1.0, added, q, k),
        QUERIES,
        KEYS,
    ),
    "a gradient beside its loss": (
        lambda w, x: loss_and_gradient(norm_of_product, w, x),
        lambda w, x: loss_and_gradient(norm_of_product, w, x).at[1:].multiply(1.01),
        WEIGHTS,
        ROWS,
    ),
    "mixed units": (moments, lambda x: moments(x).at[0].multiply(1.001), ROWS),
    "means that are zero": (lambda x: x.mean(1), lambda x: 0.0 * x.mean(1), ROWS),
    "sums of softmax that leave some out": (
        lambda x: jax.nn.softmax(x).sum(1) - 1,
        lambda x: jax.nn.softmax(x)[:, :490].sum(1) - 1,
        ROWS,
    ),
    "a conjugate transform": (jnp.fft.fft, lambda x: jnp.fft.ifft(x) * 500, ROWS[1]),
    "less precision inside": (
        lambda x: x @ WEIGHTS,
        lambda x: (x.astype(jnp.bfloat16) @ WEIGHTS.astype(jnp.bfloat16)).astype(jnp.float32),
        ROWS,
    ),
    "small numbers": (lambda x: x * 1e-20, lambda x: x * 1.01e-20, ROWS),
    "one number of many": (lambda x: x.sum(0), lambda x: x.sum(0).at[3].add(1e-2), ROWS),
    "not a number": (lambda x: jnp.sqrt(jnp.abs(x)), jnp.sqrt, ROWS),
    "the least, not the largest": (lambda x: jnp.argmax(x.sum(1)), lambda x: jnp.argmin(x.sum(1)), ROWS),
}


@pytest.mark.parametrize("what", [*SAME, *OTHER])
def test_results_differ_by_more_than_rounding_or_they_do_not(what):
    one, other, *args = (SAME | OTHER)[what]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), jax.enable_x64(False):
        calls = [functools.partial(jax.jit(fn), *args) for fn in (one, other)]
        said = difference(calls[0](), calls[1](), calls)
    assert bool(said) == (what in OTHER), said


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Both:
    first: Any
    second: Any


def test_arrays_are_compared_whatever_holds_them_and_another_structure_is_said_in_words():
    x, n, y = jnp.ones((2, 3), jnp.float32), jnp.arange(4, dtype=jnp.int32), jnp.float32(2.0)
    alike = [
        ([x, n], (x, n), Pair(x, n)),
        ({"a": x, "b": n}, collections.OrderedDict(b=n, a=x), {"b": n, "a": x}),
        ((x, None, {"n": [n]}), [x, None, {"n": (n,)}]),
        (Both(x, n), Both(x, n)),
        (([], x), ((), x)),
    ]
    for one, *others in alike:
        calls = [functools.partial(lambda own: jax.tree.map(jnp.sin, own), own) for own in (one, *others)]
        assert {difference(one, other) for other in others} == {""}
        assert {difference(calls[0](), call(), [calls[0], call]) for call in calls[1:]} == {""}
    with jax.enable_x64(False):
        assert difference([jnp.asarray(3), jnp.asarray(True), jnp.asarray(0.5)], (3, True, 0.5)) == ""
    structure = "its structure is {} instead of {}, where * is an array"
    for one, other, said in (
        ((x, n), (n, x), "array 0 is int32[4] instead of float32[2, 3]"),
        (x, x.astype(jnp.int32), "array 0 is int32[2, 3] instead of float32[2, 3]"),
        (y, y[None], "array 0 is float32[1] instead of float32[]"),
        ((x, n), (x, n, n), "3 arrays instead of 2"),
        ((x, None), (x,), structure.format("[*]", "[*, None]")),
        (x, [x], structure.format("[*]", "*")),
        ({"a": x}, {"b": x}, structure.format("{'b': *}", "{'a': *}")),
        ([x, n], {"a": x, "b": n}, structure.format("{'a': *, 'b': *}", "[*, *]")),
        (Both(x, n), (x, n), structure.format("[*, *]", "CustomNode(Both[()], [*, *])")),
    ):
        assert difference(one, other) == said
        shapes = [jax.eval_shape(lambda own=own: own) for own in (one, other)]
        assert unlike(*shapes) == said  # as before anything runs


def test_numbers_differ_by_the_root_of_their_precision_each_by_its_own():
    tiny = float(np.sqrt(np.finfo(np.float32).eps))
    one = {"x": np.array([1.0, -4.0, np.nan, np.inf], np.float32), "n": np.array([1, 2]), "key": jax.random.key(0)}

    def changed(**new):
        return difference(one, {**one, **new})

    assert changed() == ""
    assert changed(x=one["x"] * np.float32(1 + 0.9 * tiny)) == ""
    for place, size in ((0, 1.0), (1, 4.0)):
        other = one["x"].copy()
        other[place] *= 1 + 1.1 * tiny
        assert f"at [{place}]; rounding explains at most {size * tiny:.2g}" in changed(x=other)
    assert changed(n=np.array([1, 3])) == "array 1 has different values"
    assert changed(key=jax.random.key(1)) == "array 0 has different values"
    assert "instead of" in changed(n=np.array([1, 2], np.int32))
    assert "instead of" in changed(n=np.array([[1, 2]]))
    assert difference(one, (1, 2)) == "2 arrays instead of 3"
    for place, value in ((2, 0.0), (3, -np.inf)):
        other = one["x"].copy()
        other[place] = value
        assert changed(x=other)
