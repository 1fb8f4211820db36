"""What compilers fold, reshape or order changes the memory of a function as it changes that of the compiled program."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive

import rlxjax as rx


def real(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


SQUARE = real(64, 64)
BIAS = real(512)


def dense(x, kernel, bias, out):
    return jnp.tanh(x @ kernel + bias[None]) @ out


def dense_of_sequences(x, kernel, bias, out):
    return jnp.tanh(x @ kernel + bias[None, None]) @ out


CASES = {
    "a product of a transposed argument": (lambda a, b: a @ b.T, (SQUARE, SQUARE)),
    "a product of a transposed product": (lambda a, b: (a @ b) @ (a @ b).T, (SQUARE, SQUARE)),
    "a transposed product": (lambda a, b: (a @ b).T, (SQUARE, SQUARE)),
    "a sort, transposed": (lambda a: jnp.sort(a).T, (SQUARE,)),
    "a covariance": (lambda x: jnp.cov(x.T), (real(1024, 64),)),
    "a layer": (dense, (real(512, 128), real(128, 512), BIAS, real(512, 128))),
    "a layer of sequences": (dense_of_sequences, (real(8, 64, 128), real(128, 512), BIAS, real(512, 128))),
    "a gradient of indexing": (
        jax.grad(lambda x: (jnp.sin(x).sum(1) + x[jnp.arange(512), jnp.arange(512)]).sum()),
        (real(512, 1000),),
    ),
    "two transforms": (lambda x, y: jnp.fft.irfft(jnp.fft.rfft(x) * jnp.fft.rfft(y)), (real(65_536),) * 2),
}


@pytest.mark.parametrize("name", CASES)
def test_peak_bytes_are_those_of_the_compiled_program(name):
    fn, args = CASES[name]
    memory = jax.jit(fn).lower(*args).compile().memory_analysis()
    compiled_bytes = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    assert rx.profile_function(fn, *args).peak_bytes == pytest.approx(compiled_bytes, rel=0.03)


def test_what_is_folded_counts_as_written():
    profile = rx.profile_function(lambda a, b: a @ b.T, SQUARE, SQUARE)
    plain = rx.profile_function(lambda a, b: a @ b, SQUARE, SQUARE)
    assert profile.equations == plain.equations + 1
    assert profile.io.device_traffic_bytes == plain.io.device_traffic_bytes + 2 * 4 * 64**2
    assert profile.fused_traffic_bytes == plain.fused_traffic_bytes


def primitive_of(name, impl=None):
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x, **_: x)
    if impl:
        primitive.def_impl(impl)
    return primitive


def test_a_librarys_primitive_counts_as_what_it_runs():
    scaled = primitive_of("foldings_scaled", lambda x, *, by: jnp.sin(x) * by)
    profile = rx.profile_function(lambda x: scaled.bind(x, by=2.0), SQUARE)
    written = rx.profile_function(lambda x: jnp.sin(x) * 2.0, SQUARE)
    assert (profile.flops, profile.transcendentals) == (64**2, 64**2)
    assert (profile.equations, profile.coverage_equations, profile.peak_bytes) == (2, 1.0, written.peak_bytes)


def fails(x):
    raise RuntimeError("cannot run here")


@pytest.mark.parametrize("impl", [None, fails], ids=["none", "fails"])
def test_a_primitive_that_does_not_tell_is_uncosted(impl):
    primitive = primitive_of("foldings_unknown", impl)
    assert dict(rx.profile_function(primitive.bind, SQUARE).uncosted) == {"foldings_unknown": 1}


def test_a_primitive_that_runs_itself_is_uncosted():
    primitive = primitive_of("foldings_of_itself")
    primitive.def_impl(primitive.bind)
    assert dict(rx.profile_function(primitive.bind, SQUARE).uncosted) == {"foldings_of_itself": 1}
