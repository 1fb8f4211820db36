"""What a key sees: choices that are told apart, by type, bits, state, settings; what a kept choice holds, and calls."""

import dataclasses
import functools
import gc
import math
import sys
import weakref

import _campaigns
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlxjax as rx
from rlxjax._tracing import configured
from rlxjax.calibration import Calibration
from rlxjax.choices import choose
from rlxjax.choices._description import content_of
from rlxjax.fit import Suite

#: No model has to be compiled to say what is measured, or what one alternative is alone.
NONE = Calibration({}, None, {})
QUICK = {"measure": "always", "limit_ms": 20.0, "calibration": NONE}
NEVER = {"measure": "never", "calibration": NONE}
X = jnp.arange(1.0, 9.0, dtype=jnp.float32)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A place of this test's own for what is remembered, and dtypes as users have them."""
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RLXJAX_MEASURE", raising=False)
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):
        yield


@dataclasses.dataclass(frozen=True)
class Scale:
    """A callable whose equal values are not the same: 1 and 1.0, 0.0 and -0.0."""

    by: object

    def __call__(self, x):
        return 1.0 / (x * self.by)

    def method(self, x):
        return x * self.by


class Loop:
    """What runs reads an attribute."""

    def __init__(self, turns):
        self.turns = turns

    def __call__(self, x):
        for _ in range(self.turns):
            x = jnp.sin(x)
        return x


@dataclasses.dataclass(frozen=True)
class NeverEqual(Scale):
    """Comparing it gives an array, which is neither true nor false."""

    def __eq__(self, other):
        return np.array([True, False])

    __hash__ = Scale.__hash__


class Slots:
    """Its state is in slots, one of them its parent's."""

    __slots__ = "by"

    def __call__(self, x):
        return x * self.by


class MoreSlots(Slots):
    __slots__ = ("__more",)

    def __init__(self, by, more):
        self.by, self.__more = by, more

    def __call__(self, x):
        return super().__call__(x) + self.__more


def of_slots(by, more):
    return called(MoreSlots(np.float32(by), np.float32(more)))


TURNS, GLOBAL = [1], 2.0


def repeated(x):
    for _ in range(TURNS[0]):
        x = jnp.sin(x)
    return x


def scaled(x):
    return x * GLOBAL


def raises(*_):
    raise OSError("gone")


def called(body):
    return lambda x: jax.pure_callback(body, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def random(x):
    return x + jax.random.uniform(jax.random.key(0), x.shape)


def lists(turns):
    def fn(x):
        for _ in range(turns[0]):
            x = jnp.cos(x)
        return x

    return fn


#: By what two programs differ: what is asked first, what is changed then, and what is asked after it.
LOOP, LIST, STATE = Loop(1), [1], {"of": 2.0}
NOTHING = list
APART = {
    "type": (Scale(1), NOTHING, Scale(1.0), jnp.arange(1, 9)),
    "bits": (Scale(0.0), NOTHING, Scale(-0.0)),
    "bits of a captured number": (lambda x, c=0.0: 1.0 / (x * c), NOTHING, lambda x, c=-0.0: 1.0 / (x * c)),
    "dtype of a captured number": (
        *(functools.partial(lambda c, x: x * c, np.int16(2)), NOTHING),
        *(functools.partial(lambda c, x: x * c, np.float64(2)), jnp.arange(8, dtype=jnp.int16)),
    ),
    "equal objects' methods": (Scale(1).method, NOTHING, Scale(1.0).method, jnp.arange(8)),
    "a partial's argument": (
        *(functools.partial(jnp.multiply, 1), NOTHING, functools.partial(jnp.multiply, 1.0)),
        jnp.arange(8),
    ),
    "a captured list": (lists(LIST), lambda: LIST.__setitem__(0, 3), None),
    "an attribute": (LOOP, lambda: setattr(LOOP, "turns", 3), None),
    "a captured mapping": (lambda x: x * STATE["of"], lambda: STATE.update(of=3.0), None),
    "a module's list": (repeated, lambda: TURNS.__setitem__(0, 3), None),
    "a module's number": (scaled, lambda: globals().update(GLOBAL=3.0), None),
    "a callback's body": (called(lambda x: 2.0 * x), NOTHING, called(lambda x: 3.0 * x)),
    "what a callback closes over": (
        (lambda by: called(lambda x: x * by))(np.float32(2)),
        NOTHING,
        (lambda by: called(lambda x: x * by))(np.float32(3)),
    ),
    "a callback's slot": (of_slots(2, 1), NOTHING, of_slots(2, 3)),
    "a callback's slot of its parent's": (of_slots(2, 1), NOTHING, of_slots(3, 1)),
}


@pytest.mark.parametrize("what", APART)
def test_what_differs_is_another_question_and_what_was_handed_over_is_called(what):
    first, change, then, *given = APART[what]
    x = given[0] if given else X
    before = choose({"only": first}, x, **QUICK)
    np.testing.assert_array_equal(before(x), first(x))
    change()
    fn = first if then is None else then
    after = choose({"only": fn}, x, **QUICK)
    assert after.key != before.key
    assert after.fn is fn
    expected = fn(x)
    assert after(x).dtype == expected.dtype
    np.testing.assert_array_equal(after(x), expected)


#: Of a jitted function, whatever it reads: JAX traced it once.
SETTINGS = {
    "precision": lambda: jax.default_matmul_precision("highest"),
    "random numbers": lambda: jax.default_prng_impl("rbg"),
    "no jit": jax.disable_jit,
    "NaN": lambda: jax.debug_nans(True),
    "infinity": lambda: jax.debug_infs(True),
    "float32": lambda: jax.enable_x64(not jax.config.jax_enable_x64),
    "partitioning": lambda: jax.threefry_partitionable(not jax.config.jax_threefry_partitionable),
    "mesh": lambda: jax.set_mesh(jax.make_mesh((1,), ("rows",))),
    **{
        name: functools.partial(configured, name, value)
        for name, value in {
            "jax_allow_f16_reductions": False,
            "jax_exec_time_optimization_effort": 0.5,
            "jax_memory_fitting_effort": 0.5,
            "jax_optimization_level": "O1",
            "jax_random_seed_offset": 7,
        }.items()
    },
}


@pytest.mark.parametrize("what", SETTINGS)
@pytest.mark.parametrize("wrap", [jax.jit, lambda fn: fn])
def test_under_another_setting_a_choice_is_another_one(what, wrap):
    fn = {"only": wrap(random)}
    before = choose(fn, X, **NEVER)
    with SETTINGS[what]():
        other = choose(fn, X, **NEVER)
        assert other.key != before.key
    assert choose(fn, X, **NEVER).key == before.key


def test_static_arguments_count_by_type_and_bits():
    fn = {"only": jax.jit(lambda x, by: x * by, static_argnums=1)}
    seen = [1, 1.0, True, np.int32(1), 0.0, -0.0, float("nan")]
    dtypes = [choose(fn, jnp.arange(3), by, **NEVER)(jnp.arange(3), by).dtype for by in seen]
    assert dtypes == [(jnp.arange(3) * by).dtype for by in seen]
    keys = [choose(fn, jnp.arange(3), by, **NEVER).key for by in seen]
    assert keys == [choose(fn, jnp.arange(3), by, **NEVER).key for by in seen]
    assert len({*keys[:4]}) > 1


def test_the_content_of_a_program_that_calls_another_many_times_is_found_in_no_time():
    inner = jnp.sin
    for _ in range(40):
        inner = jax.jit(lambda x, inner=inner: inner(x) + inner(x))
    assert len(content_of([inner.trace(X)])) == 64


class Kept(Suite):
    """Two ways to the same, whose result depends on an attribute."""

    model = _campaigns.Toy()

    def __init__(self, k):
        self.k, self.prepared = k, []

    @functools.cached_property
    def table(self):
        return np.arange(self.k)

    def program(self, cell):
        self.prepared.append(cell.variant) if self.k == 3 else self.table
        return lambda k=self.k: np.full(1, k)


def test_a_suite_is_asked_anew_for_its_program_which_its_choice_holds():
    suite, options = Kept(1), {"inputs": {"rows": 2, "width": 4}, **QUICK}
    first = choose(suite, **options)
    again = choose(suite, **options)
    assert (first.by, again.by, again.key) == ("measured", "remembered", first.key)
    suite.k = 2
    second = choose(suite, **options)
    assert second.key != first.key
    assert [own()[0] for own in (first, second, first)] == [1, 2, 1]

    alone = choose(Kept(3), **options)
    counted = Kept(3)
    remembered = choose(counted, **options)
    gc.collect()
    assert (alone.by, remembered.by) == ("measured", "remembered")
    for one in (alone, remembered):  # no one else holds the first suite
        assert [one()[0] for _ in range(3)] == [3, 3, 3]
    assert len(counted.prepared) == 1


# --- What a kept choice holds ----------------------------------------------------------------------


def test_no_kept_choice_keeps_a_function_or_what_it_closes_over():
    big = jnp.ones((64, 64), jnp.float32) + 1.0
    ways = {"left": jax.jit(lambda x: big @ x), "right": lambda x: (x.T @ big.T).T}
    held = [weakref.ref(big), *map(weakref.ref, ways.values())]
    assert choose(ways, jnp.eye(64), **QUICK)(jnp.eye(64)).shape == (64, 64)
    choose(ways, jnp.eye(64), measure="never")
    del big, ways
    gc.collect()
    assert [one() is None for one in held] == [True] * 3


# --- Alternatives that are no good -----------------------------------------------------------------


def later(fail):
    """Return a function that does something else from its second run on."""
    runs = []

    def body(x):
        runs.append(0)
        if len(runs) > 1:
            fail()
        return np.float32(2.0) * np.asarray(x)

    return lambda x: called(body)(x) if isinstance(x, jax.core.Tracer) else body(x)


@pytest.mark.parametrize(("fail", "said"), [(raises, "raised OSError: gone"), (sys.exit, "raised SystemExit")])
def test_one_that_fails_at_its_second_call_loses_and_is_named(fail, said):
    quick = QUICK | {"limit_ms": 4.0}
    found = choose({"bad": later(fail), "good": jax.jit(lambda x: x + x)}, X, **quick)
    assert (found.name, found["bad"].failed) == ("good", said)
    with pytest.raises(ValueError, match=f"^alternatives: none of them runs: a {said}; b {said}"):
        choose({"a": later(fail), "b": later(fail)}, X, **quick)


def test_a_callable_that_has_no_equality_or_hash_is_chosen_like_any_other():
    class Unhashable(Loop):
        __hash__ = None

    for kind in (NeverEqual, Unhashable):
        one, other = kind(1), kind(1)
        for _ in range(2):
            found = choose({"one": one, "other": other}, X, **QUICK)
            assert found.fn in (one, other) if kind is Unhashable else found.fn.by == 1


class Odd(Scale):
    """A callable that raises an error when it is compared, shown, hashed, or asked for its name or for its truth."""

    __eq__ = __ne__ = __hash__ = __repr__ = __bool__ = __len__ = raises
    __name__ = 3


class Later:
    async def __call__(self, x):
        return x

    def __getattr__(self, name):
        raise OSError(name)


async def awaited(x):
    return x


def yielded(x):
    yield x


async def both(x):
    yield x


#: Callables that give no arrays, and what is said of them.
NO_FUNCTIONS = {
    "awaited": (awaited, "'coroutine'"),
    "yielded": (yielded, "'generator'"),
    "both": (both, "'async_generator'"),
    "a method that is awaited": (Later().__call__, "'coroutine'"),
    "a part of one": (functools.partial(awaited), "'coroutine'"),
    "one that gives one": (lambda x: awaited(x), "'coroutine'"),
    "one among arrays": (lambda x: (x, [awaited(x)]), "'coroutine'"),
    "a class": (Scale, "'Scale'"),
    "a text": (lambda x: "x", "'str'"),
    "an object without attributes": (Later(), ""),
    "a builtin": (math.sin, ""),
    "one that exits": (sys.exit, ""),
}


@pytest.mark.filterwarnings("error", "ignore:Python iterable type 'generator'")
def test_a_callable_that_gives_no_arrays_fails_by_itself_and_others_are_chosen():
    good = jax.jit(lambda x: x + x)
    bad = {name: fn for name, (fn, _) in NO_FUNCTIONS.items()}
    for options in (QUICK, NEVER):
        found = choose(bad | {"good": good}, X, **options)
        assert found.name == "good"
        for name, (_, said) in NO_FUNCTIONS.items():
            assert found[name].failed.startswith("raised ")
            assert said in found[name].failed
    with pytest.raises(ValueError, match=r"^alternatives: none of them runs: awaited: raised TypeError: [^\n]*$"):
        choose(bad, X, **QUICK)
    with pytest.raises(ValueError, match="^fn: expected a function that JAX traces, but awaited raised TypeError"):
        rx.profile_function(awaited, X)
    fine = {"odd": Odd(2.0), "bound": Scale(0.5).method, "part": functools.partial(jnp.add, X)}
    found = choose(fine | {"good": good}, X, check=False, **QUICK)
    assert not any(own.failed for own in found.alternatives)


def test_choosing_inside_of_a_traced_function_takes_arrays_and_refuses_what_is_traced():
    ways = {"sum": jax.jit(lambda x: x + x), "product": jax.jit(lambda x: 2.0 * x)}
    for how in (QUICK, {"measure": "undecided", "calibration": rx.default_calibration()}):
        found = []

        def fn(y, how=how, found=found):
            found.append(choose(ways, np.ones(8, np.float32), **how))
            return found[0].fn(y)

        np.testing.assert_array_equal(jax.jit(fn)(X), 2.0 * X)
        assert found[0].by in ("model", "measured", "remembered")
    with pytest.raises(ValueError, match=r"^alternatives: 'traced' captures traced values"):
        jax.jit(lambda y: choose({"traced": lambda x: x + y}, X)(X))(X)
