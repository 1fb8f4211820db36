"""Functions that nobody here wrote are covered by rules, give numbers, and take the memory that is said."""

import jax
import jax.numpy as jnp
import pytest

import rlxjax as rx
from benchmarks.foreign_table import FUNCTIONS, SPARE, entries

#: Libraries that the tests bring with them; "jraph's way" is written in jax.numpy.
AT_HAND = ("jax", "optax", "jraph's way")

each_function = pytest.mark.parametrize("foreign", FUNCTIONS + SPARE, ids=lambda foreign: foreign.name)


@pytest.fixture(autouse=True)
def as_these_libraries_are_used():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def call_of(foreign):
    package = foreign.library.partition(".")[0]
    if package not in AT_HAND:
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'rlxjax[foreign]'")
    return foreign.call()


def test_every_name_stands_once():
    names = [foreign.name for foreign in FUNCTIONS + SPARE]
    assert (len(FUNCTIONS), len(SPARE), len(set(names))) == (32, 16, 48)


@each_function
def test_a_function_is_covered(foreign):
    fn, args = call_of(foreign)
    profile = rx.profile_function(fn, *args, trip_counts=foreign.trip_counts)
    assert profile.coverage_equations >= 0.99, profile.uncosted
    assert profile.coverage_bytes >= 0.999, profile.uncosted
    assert not profile.unknown_loops
    assert 0 < profile.fused_traffic_bytes <= profile.io.device_traffic_bytes


def test_the_same_arguments_are_drawn_each_time():
    foreign = next(foreign for foreign in FUNCTIONS if foreign.name == "Cholesky solve")
    (_, once), (_, again) = foreign.call(), foreign.call()
    assert jax.tree.all(jax.tree.map(jnp.array_equal, once, again))
    (_, other) = foreign.call(seed=1)
    assert not jnp.array_equal(once[0], other[0])


@pytest.mark.slow
@each_function
def test_a_function_gives_numbers(foreign):
    fn, args = call_of(foreign)
    for result in jax.tree.leaves(jax.jit(fn)(*args)):
        assert jnp.all(jnp.isfinite(result))


def test_entries_are_calls():
    name, library, fn, args = next(entries("functions"))
    assert (name, library) == FUNCTIONS[0][:2]
    assert fn(*args).shape == args[0].shape
    with pytest.raises(ValueError, match="which: expected one of functions, spare, all, got 'some'"):
        next(entries("some"))
