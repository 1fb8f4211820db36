"""Functions that nobody here wrote are covered by rules, and large programs are profiled in time."""

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import jax.scipy.optimize
import optax
import pytest
from _shapes import real

import rlxjax as rx

KEY = jax.eval_shape(lambda: jax.random.key(0))
WEIGHTS = {"w": real(64, 32), "b": real(32), "out": [real(32, 4)]}
ROWS, VECTOR, SQUARE = real(8, 16), real(8), real(8, 8)


def update(optimizer):
    def step(gradient, state, weights):
        updates, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state

    return step, (WEIGHTS, jax.eval_shape(optimizer.init, WEIGHTS), WEIGHTS)


CASES = {
    "softmax": (jax.nn.softmax, (ROWS,)),
    "gelu": (jax.nn.gelu, (ROWS,)),
    "log_softmax, gradient": (jax.grad(lambda x: jax.nn.log_softmax(x)[0, 0]), (ROWS,)),
    "attention": (jax.nn.dot_product_attention, (real(2, 8, 4, 16),) * 3),
    "logsumexp": (lambda x: jsp.special.logsumexp(x, axis=1), (ROWS,)),
    "gammaln": (jsp.special.gammaln, (VECTOR,)),
    "betainc": (jsp.special.betainc, (VECTOR,) * 3),
    "normal logpdf": (jsp.stats.norm.logpdf, (VECTOR,)),
    "multivariate normal": (jsp.stats.multivariate_normal.logpdf, (real(4), real(4), real(4, 4))),
    "gamma logpdf, gradient": (jax.grad(lambda a, x: jsp.stats.gamma.logpdf(x, a).sum()), (VECTOR, VECTOR)),
    "cho_solve": (lambda a, b: jsp.linalg.cho_solve(jsp.linalg.cho_factor(a), b), (SQUARE, VECTOR)),
    "expm": (jsp.linalg.expm, (SQUARE,)),
    "lu_solve": (lambda a, b: jsp.linalg.lu_solve(jsp.linalg.lu_factor(a), b), (SQUARE, VECTOR)),
    "lstsq": (lambda a, b: jnp.linalg.lstsq(a, b)[0], (real(16, 8), real(16))),
    "pinv": (jnp.linalg.pinv, (real(8, 4),)),
    "slogdet, gradient": (jax.grad(lambda a: jnp.linalg.slogdet(a)[1]), (SQUARE,)),
    "cg": (lambda a, b: jsp.sparse.linalg.cg(a, b)[0], (SQUARE, VECTOR)),
    "fftconvolve": (jsp.signal.fftconvolve, (real(64), real(9))),
    "welch": (lambda x: jsp.signal.welch(x, nperseg=32)[1], (real(256),)),
    "stft": (lambda x: jsp.signal.stft(x, nperseg=32)[2], (real(256),)),
    "map_coordinates": (lambda x, c: jsp.ndimage.map_coordinates(x, [c, c], order=1), (SQUARE, real(20))),
    "interp": (jnp.interp, (real(20), VECTOR, VECTOR)),
    "median": (jnp.median, (real(20),)),
    "histogram": (lambda x: jnp.histogram(x, bins=8)[0], (real(64),)),
    "resize": (lambda x: jax.image.resize(x, (16, 16), "bicubic"), (SQUARE,)),
    "bfgs": (lambda x: jsp.optimize.minimize(lambda x: jnp.sum(x**4), x, method="BFGS").x, (real(4),)),
    "gamma": (lambda key: jax.random.gamma(key, 2.0, (8,)), (KEY,)),
    "categorical": (jax.random.categorical, (KEY, real(8, 4))),
    "permutation": (lambda key: jax.random.permutation(key, 16), (KEY,)),
    "associative_scan": (lambda x: jax.lax.associative_scan(jnp.add, x), (real(16, 2),)),
    "segment_sum": (lambda x: jax.ops.segment_sum(x, jnp.zeros(8, int), 4), (real(8, 2),)),
    "adamw": update(optax.adamw(1e-3)),
    "lion": update(optax.lion(1e-3)),
    "adafactor": update(optax.adafactor(1e-3)),
    "clipped momentum": update(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2, momentum=0.9))),
}


def test_functions_of_libraries_are_covered():
    for name, (function, args) in CASES.items():
        with jax.numpy_dtype_promotion("standard"):  # as these libraries are used
            profile = rx.profile_function(function, *args)
        assert profile.coverage_equations >= 0.99, (name, profile.uncosted)
        assert profile.coverage_bytes >= 0.999, (name, profile.uncosted)
        assert profile.io.kernel_launches > 0, name
        assert profile.unknown_loops or 0 < profile.fused_traffic_bytes <= profile.io.device_traffic_bytes, name


@pytest.mark.slow  # a hundred thousand equations, each checked by the tests' hook
def test_calls_of_calls_are_counted_in_bounded_time():
    def twice(function):
        return lambda x: jax.jit(function)(jax.jit(function)(x))

    function = jnp.sin
    for _ in range(40):  # 2**40 sines
        function = jax.jit(twice(function))
    assert rx.profile_function(function, real(1)).transcendentals == 2**40


def test_long_programs_are_counted():
    def chain(x):
        for _ in range(300):
            x = jnp.sin(x) * 2
            x = x @ x + 1
        return x

    assert rx.profile_function(chain, real(4, 4)).equations == 4 * 300
