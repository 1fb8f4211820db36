"""Functions of libraries are covered by rules, large programs counted in time, and memory is that of what compiles."""

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
    "attention": (jax.nn.dot_product_attention, (real(2, 8, 4, 16),) * 3),
    "logsumexp": (lambda x: jsp.special.logsumexp(x, axis=1), (ROWS,)),
    "betainc": (jsp.special.betainc, (VECTOR,) * 3),
    "multivariate normal": (jsp.stats.multivariate_normal.logpdf, (real(4), real(4), real(4, 4))),
    "gamma logpdf, gradient": (jax.grad(lambda a, x: jsp.stats.gamma.logpdf(x, a).sum()), (VECTOR, VECTOR)),
    "cho_solve": (lambda a, b: jsp.linalg.cho_solve(jsp.linalg.cho_factor(a), b), (SQUARE, VECTOR)),
    "expm": (jsp.linalg.expm, (SQUARE,)),
    "lstsq": (lambda a, b: jnp.linalg.lstsq(a, b)[0], (real(16, 8), real(16))),
    "slogdet, gradient": (jax.grad(lambda a: jnp.linalg.slogdet(a)[1]), (SQUARE,)),
    "cg": (lambda a, b: jsp.sparse.linalg.cg(a, b)[0], (SQUARE, VECTOR)),
    "stft": (lambda x: jsp.signal.stft(x, nperseg=32)[2], (real(256),)),
    "map_coordinates": (lambda x, c: jsp.ndimage.map_coordinates(x, [c, c], order=1), (SQUARE, real(20))),
    "histogram": (lambda x: jnp.histogram(x, bins=8)[0], (real(64),)),
    "resize": (lambda x: jax.image.resize(x, (16, 16), "bicubic"), (SQUARE,)),
    "bfgs": (lambda x: jsp.optimize.minimize(lambda x: jnp.sum(x**4), x, method="BFGS").x, (real(4),)),
    "gamma": (lambda key: jax.random.gamma(key, 2.0, (8,)), (KEY,)),
    "permutation": (lambda key: jax.random.permutation(key, 16), (KEY,)),
    "associative_scan": (lambda x: jax.lax.associative_scan(jnp.add, x), (real(16, 2),)),
    "segment_sum": (lambda x: jax.ops.segment_sum(x, jnp.zeros(8, int), 4), (real(8, 2),)),
    "adamw": update(optax.adamw(1e-3)),
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


# --- Memory ---------------------------------------------------------------------------------------

MATRIX, LAYER = real(64, 64), (real(128, 512), real(512), real(512, 128))


def layer(x, kernel, bias, out):
    return jnp.tanh(x @ kernel + jnp.expand_dims(bias, range(x.ndim - 1))) @ out


def test_peak_bytes_are_those_of_the_compiled_program():
    picked = jax.grad(lambda x: (jnp.sin(x).sum(1) + x[jnp.arange(512), jnp.arange(512)]).sum())
    for name, fn, args in [
        ("a product of a transposed argument", lambda a, b: a @ b.T, (MATRIX, MATRIX)),
        ("a product of a transposed product", lambda a, b: (a @ b) @ (a @ b).T, (MATRIX, MATRIX)),
        ("a transposed product", lambda a, b: (a @ b).T, (MATRIX, MATRIX)),
        ("a sort, transposed", lambda a: jnp.sort(a).T, (MATRIX,)),
        ("a covariance", lambda x: jnp.cov(x.T), (real(1024, 64),)),
        ("a layer", layer, (real(512, 128), *LAYER)),
        ("a layer of sequences", layer, (real(8, 64, 128), *LAYER)),
        ("a gradient of indexing", picked, (real(512, 1000),)),
        ("two transforms", lambda x, y: jnp.fft.irfft(jnp.fft.rfft(x) * jnp.fft.rfft(y)), (real(65_536),) * 2),
    ]:
        memory = jax.jit(fn).lower(*args).compile().memory_analysis()
        compiled_bytes = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
        assert rx.profile_function(fn, *args).peak_bytes == pytest.approx(compiled_bytes, rel=0.03), name


def test_what_is_folded_counts_as_written():
    profile = rx.profile_function(lambda a, b: a @ b.T, MATRIX, MATRIX)
    plain = rx.profile_function(lambda a, b: a @ b, MATRIX, MATRIX)
    assert profile.equations == plain.equations + 1
    assert profile.io.device_traffic_bytes == plain.io.device_traffic_bytes + 2 * 4 * 64**2
    assert profile.fused_traffic_bytes == plain.fused_traffic_bytes
