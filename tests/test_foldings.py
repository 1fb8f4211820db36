"""What compilers fold, reshape or order changes the memory of a function as it changes that of the compiled program."""

import jax
import jax.numpy as jnp
import pytest
from _shapes import real
from jax.extend.core import Primitive

import rlxjax as rx

SQUARE, LAYER = real(64, 64), (real(128, 512), real(512), real(512, 128))


def layer(x, kernel, bias, out):
    return jnp.tanh(x @ kernel + jnp.expand_dims(bias, range(x.ndim - 1))) @ out


def test_peak_bytes_are_those_of_the_compiled_program():
    picked = jax.grad(lambda x: (jnp.sin(x).sum(1) + x[jnp.arange(512), jnp.arange(512)]).sum())
    for name, fn, args in [
        ("a product of a transposed argument", lambda a, b: a @ b.T, (SQUARE, SQUARE)),
        ("a product of a transposed product", lambda a, b: (a @ b) @ (a @ b).T, (SQUARE, SQUARE)),
        ("a transposed product", lambda a, b: (a @ b).T, (SQUARE, SQUARE)),
        ("a sort, transposed", lambda a: jnp.sort(a).T, (SQUARE,)),
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
    profile = rx.profile_function(lambda a, b: a @ b.T, SQUARE, SQUARE)
    plain = rx.profile_function(lambda a, b: a @ b, SQUARE, SQUARE)
    assert profile.equations == plain.equations + 1
    assert profile.io.device_traffic_bytes == plain.io.device_traffic_bytes + 2 * 4 * 64**2
    assert profile.fused_traffic_bytes == plain.fused_traffic_bytes


def fails(x):
    raise RuntimeError("cannot run here")


def test_a_librarys_primitive_counts_as_what_it_runs_and_is_uncosted_if_it_does_not_tell():
    def primitive_of(name, impl=None):
        primitive = Primitive(f"foldings_{name}")
        primitive.def_abstract_eval(lambda x, **_: x)
        if impl:
            primitive.def_impl(impl)
        return primitive

    scaled = primitive_of("scaled", lambda x, *, by: jnp.sin(x) * by)
    profile = rx.profile_function(lambda x: scaled.bind(x, by=2.0), SQUARE)
    written = rx.profile_function(lambda x: jnp.sin(x) * 2.0, SQUARE)
    assert (profile.flops, profile.transcendentals) == (64**2, 64**2)
    assert (profile.equations, profile.coverage_equations, profile.peak_bytes) == (2, 1.0, written.peak_bytes)
    of_itself = primitive_of("of_itself")
    of_itself.def_impl(of_itself.bind)
    for primitive in (primitive_of("without"), primitive_of("failing", fails), of_itself):
        assert dict(rx.profile_function(primitive.bind, SQUARE).uncosted) == {primitive.name: 1}
