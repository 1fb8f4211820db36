"""Whole functions: closed forms of compositions, the laws that counts obey, what the profile says, and errors."""

import functools
import operator
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from _shapes import real, whole
from jax import lax
from jax.experimental import sparse
from jax.extend import source_info_util

import rlxjax as rx
from rlxjax.units import bytes_text


def counted(function, *args, **options):
    return rx.profile_function(function, *args, strict=True, **options)


#: Counts that do not depend on how operations are fused.
EXACT = operator.attrgetter("flops", "transcendentals", "integer_ops", "io")


B, T, D, H = 2, 8, 16, 4


# --- Closed forms of compositions ----------------------------------------------------------------


@jax.custom_vjp
def cube(x):
    return x * x * x


cube.defvjp(lambda x: (x * x * x, x), lambda x, g: (3 * x * x * g,))


def sines(n):
    return lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, length=n)[0].sum()


def chain(x):
    return jnp.sin(jnp.sin(x)).sum()


def nested(x):
    def outer(carry, _):
        return lax.scan(lambda c, _: (c * 2 + jnp.sin(c), None), carry, length=5)[0] - 1, None

    return lax.scan(outer, x, length=7)[0]


def runge_kutta(x):
    return lax.fori_loop(0, 100, lambda _, x: x + 0.1 * jnp.cos(x + 0.5 * jnp.cos(x)), x)


def power_iteration(a, x):
    return lax.while_loop(lambda s: s[1] < 20, lambda s: (a @ s[0], s[1] + 1), (x, 0))[0]


#: Functions, their arguments, FLOP and transcendentals.
CLOSED_FORMS = [
    (lambda x, w, b: jnp.tanh(x @ w + b[None]), (real(B, D), real(D, T), real(T)), 2 * B * T * D + B * T, B * T),
    # Of each row: the maximum, which is compared with -inf, differences, a sum and quotients.
    (lambda x: jax.nn.softmax(x, axis=-1), (real(B, D),), B * ((D - 1) + 1 + D + (D - 1) + D), B * D),
    (nested, (real(D),), 7 * (5 * 2 + 1) * D, 7 * 5 * D),
    (runge_kutta, (real(D),), 100 * 4 * D, 100 * 2 * D),
    (power_iteration, (real(D, D), real(D)), 20 * 2 * D * D, 0),
    # Forward a sine and its derivative, the cosine; backward a product.
    (jax.grad(sines(T)), (real(D),), T * D, 2 * T * D),
    (jax.grad(chain), (real(D),), None, 3 * D),  # sin, cos, cos: the outer sine is not used
    (jax.value_and_grad(jax.checkpoint(chain)), (real(D),), None, (2 + 3) * D),  # forward once more
    (jax.grad(lambda x: cube(x).sum()), (real(D),), 3 * D, 0),
    (lambda x: (jnp.sin(x) @ x, x + 1)[1], (real(D),), D, 0),  # what nobody uses is no work
    (lambda: None, (), 0, 0),
    (lambda x: jnp.sort(x) + jnp.cumsum(x) + x.sum(), (real(0),), 0, 0),
    (lambda x: lax.scan(lambda c, x: (c * x, c), x[0], x[:0])[0], (real(T, D),), 0, 0),
]


def test_compositions_have_their_closed_forms():
    for number, (function, args, flops, transcendentals) in enumerate(CLOSED_FORMS):
        profile = counted(function, *args)
        assert profile.transcendentals == transcendentals, number
        assert flops is None or profile.flops == flops, number
    profile = counted(CLOSED_FORMS[0][0], *CLOSED_FORMS[0][1])
    assert profile.io.kernel_launches == 4 - 1  # b[None] moves nothing
    assert profile.io.host_output_bytes == 4 * B * T
    assert profile.io.device_traffic_bytes == 4 * (B * D + D * T + B * T) + 4 * (B * T + T + B * T) + 4 * 2 * B * T
    profile = counted(nested, real(D))
    assert profile.io.kernel_launches == 7 * (5 * 3 + 1)
    assert profile.io.device_traffic_bytes == 4 * D * 7 * (5 * (2 + 2 + 3) + 2)
    profile = counted(power_iteration, real(D, D), real(D))
    assert (profile.integer_ops, profile.unknown_loops) == (20 + 21, ())  # steps, and tests of the counter
    assert counted(lambda x: x, real(D)).io == rx.GraphIoProfile(0, 0, 4 * D, 0)
    assert counted(jax.jit(lambda x, n: x * n, static_argnums=1), real(D), 3).flops == D


def block(weights, x):
    def normed(x):
        return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    q, k, v = (jnp.einsum("btd,dhe->bthe", normed(x), w) for w in weights[:3])
    scores = jax.nn.softmax(jnp.einsum("bthe,bshe->bhts", q, k), axis=-1)
    x = x + jnp.einsum("bhts,bshe,hed->btd", scores, v, weights[3])
    return x + jax.nn.gelu(normed(x) @ weights[4]) @ weights[5]


WEIGHTS = [real(D, H, D // H)] * 3 + [real(H, D // H, D), real(D, 4 * D), real(4 * D, D)]


def test_families_have_their_closed_forms():
    forward = 2 * B * T * D * D * 4 + 2 * B * T * D * 4 * D * 2 + 2 * 2 * B * T * T * D
    transform = 5 * 64 * 6 // 2
    for family, function, args, flops in [
        ("matmul", block, (WEIGHTS, real(B, T, D)), forward),
        # Backward, each product is met twice: once for either operand.
        ("matmul", jax.grad(lambda w, x: (block(w, x) ** 2).mean(), (0, 1)), (WEIGHTS, real(B, T, D)), 3 * forward),
        ("matmul", jax.jacfwd(lambda x, w: w @ x), (real(D), real(T, D)), 2 * T * D * D),
        ("fft", lambda x, y: jnp.fft.irfft(jnp.fft.rfft(x) * jnp.fft.rfft(y)), (real(64),) * 2, 3 * transform),
    ]:
        assert counted(function, *args).by_family[family].flops == flops
    key = jax.eval_shape(lambda: jax.random.key(0))
    profile = counted(lambda key: jax.random.uniform(key, (D,), jnp.float32), key)
    assert profile.by_family["random"].integer_ops == 118 * D


def test_the_dearest_branch_counts_and_the_spread_is_told():
    def choose(index, x):
        return lax.switch(index, [lambda x: x, lambda x: x @ x, jnp.sin], x)

    profile = counted(choose, jax.ShapeDtypeStruct((), jnp.int32), real(D, D))
    (spread,) = profile.branches
    assert profile.by_family["matmul"].flops == spread.most.flops == 2 * D**3
    assert spread.least.flops == 0
    assert "conditional at test_function_profile.py" in str(profile)


def by_platform(x):
    return lax.platform_dependent(x, cpu=jnp.sin, tpu=lambda x: x @ x, cuda=jax.jit(on_cuda))


def on_cuda(x):
    return lax.platform_dependent(x, cpu=lambda x: x @ x @ x, default=lambda x: jnp.exp(x) + 1)


WRAPPERS = (
    lambda fn: fn,
    lambda fn: jax.vmap(jax.jit(fn)),
    lambda fn: jax.grad(lambda x: fn(x).sum()),
    lambda fn: jax.grad(lambda x: jax.checkpoint(fn)(x).sum()),
    lambda fn: lambda x: lax.scan(lambda c, _: (fn(c), None), x, length=3)[0],
    lambda fn: lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, fn(c[1])), (0, x))[1],
)


def test_the_branch_of_the_platform_counts(monkeypatch):
    branches = {"cpu": jnp.sin, "tpu": lambda x: x @ x, "cuda": lambda x: jnp.exp(x) + 1}
    for platform, branch in branches.items():
        monkeypatch.setattr("rlxjax.jaxpr._function_profile.default_platform", lambda platform=platform: platform)
        for place, wrapper in enumerate(WRAPPERS):
            x = real(3, D, D) if place == 1 else real(D, D)
            profile, alone = counted(wrapper(by_platform), x), counted(wrapper(branch), x)
            assert EXACT(profile) == EXACT(alone), (platform, place)
            assert (profile.peak_bytes, profile.fused_traffic_bytes) == (alone.peak_bytes, alone.fused_traffic_bytes)
            assert profile.kernels.operation_names() == alone.kernels.operation_names()
    monkeypatch.setattr("rlxjax.jaxpr._function_profile.default_platform", lambda: "rocm")
    assert counted(by_platform, real(D, D)).flops == 2 * D**3  # no branch fits: the dearest counts
    monkeypatch.undo()
    assert counted(by_platform, real(D, D)).transcendentals == D * D  # this platform is the CPU


#: What is read of the 4 largest of 100 numbers in each of 6 rows, and what XLA then runs.
TOP_K = (
    (lambda top: top, "top_k"),
    (lambda top: top[0][:, :2], "top_k"),
    (lambda top: (top[0][:, :2], top[1][:, :2]), "top_k"),
    (lambda top: top[0][:, ::2], "top_k"),
    (lambda top: jnp.exp(top[0])[:, -1], "top_k"),
    (lambda top: lax.dynamic_slice_in_dim(top[0], 0, 2, axis=1), "top_k"),
    (lambda top: lax.dynamic_index_in_dim(top[0], top[1].sum() % 4, 1), "top_k"),
    (lambda top: top[0].T[-1], "top_k"),
    (lambda top: top[0][:, -1:], "sort"),
    (lambda top: top[0][:, -1], "sort"),
    (lambda top: jax.jit(lambda x: x[:, 1:])(top[0]), "sort"),
    (lambda top: top[0][:3], "sort"),
    (lambda top: (top[0][:, :1], top[0].sum()), "sort"),
    (lambda top: jnp.split(top[0], 2, axis=1)[1], "sort"),
    (lambda top: top[1][:, -1:], "sort_several"),
    (lambda top: (top[0][:, :1], top[1][:, :2]), "sort_several"),
)


def test_a_top_k_whose_result_is_cut_counts_as_the_sort_that_xla_runs():
    for place, (read, name) in enumerate(TOP_K):
        profile = counted(lambda x, read=read: read(lax.top_k(x, 4)), real(6, 100))
        assert name in profile.kernels.operation_names(), place
        assert profile.by_family["sort"].flops == 600 * (2 if name == "top_k" else 7), place  # log2 of 4 and of 100
    batched = counted(jax.vmap(lambda row: lax.top_k(row, 4)[0][-1]), real(6, 100))
    assert "sort" in batched.kernels.operation_names()
    assert counted(lambda x: lax.top_k(x, 4), whole(6, 100)).integer_ops == 600 * 7  # XLA sorts integers


def added(x):
    held = jax.new_ref(x)
    held[0] = 3.0
    return held[...] + 1


class Wrapper:
    """A function with the methods of a jitted one, which are not JAX's own, as those of `flax.nnx.jit`."""

    def __init__(self, function, program=None):
        self.function, self.program = function, program

    def __call__(self, *args):
        return self.function(*args)

    def trace(self, *args):
        return types.SimpleNamespace(traced=self.program.trace(*args)) if self.program else None

    def lower(self, *args):
        raise NotImplementedError


def test_callables_with_the_methods_of_jitted_ones_are_counted():
    x, product = real(D, D), lambda x: x @ x
    assert EXACT(counted(Wrapper(product), x)) == EXACT(counted(product, x))
    donating = jax.jit(
        lambda x: (x @ x @ x, x), donate_argnums=0
    )  # it returns a state of which the caller sees nothing
    profile, alone = counted(Wrapper(product, donating), x), counted(donating, x)
    assert (EXACT(profile), profile.peak_bytes) == (EXACT(alone), alone.peak_bytes)
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    assert EXACT(counted(nnx.jit(product), x)) == EXACT(counted(product, x))


# --- Laws ----------------------------------------------------------------------------------------


def recurrence(carry, x):
    carry = jnp.tanh(carry * x + 1)
    return carry, carry * 2


def by_gradient(carry, x):
    loss, slope = jax.value_and_grad(lambda c: jnp.sum(jnp.sin(c * x) ** 2))(carry)
    return carry - 0.1 * slope, loss


def test_a_scan_is_its_unrolled_form_and_linear_in_its_length():
    for body in (recurrence, by_gradient):

        def unrolled(carry, *rows, body=body):
            results = []
            for row in rows:
                carry, result = body(carry, row)
                results.append(result)
            return carry, results

        loop = counted(lambda carry, x, body=body: lax.scan(body, carry, x), real(D), real(T, D))
        assert EXACT(loop) == EXACT(counted(unrolled, real(D), *[real(D)] * T))
    one, many = (counted(lambda c, x: lax.scan(recurrence, c, x)[0], real(D), real(n, D)) for n in (1, 12))
    assert (many.flops, many.transcendentals) == (12 * one.flops, 12 * one.transcendentals)
    assert many.io.kernel_launches == 12 * one.io.kernel_launches
    assert many.io.device_traffic_bytes == 12 * one.io.device_traffic_bytes
    assert many.equations == one.equations


FUNCTIONS = {
    "scan": (lambda c, x: lax.scan(recurrence, c, x), (real(D), real(T, D))),
    "block": (block, (WEIGHTS, real(B, T, D))),
    "softmax": (lambda x: jax.nn.softmax(x @ x.T), (real(T, D),)),
    "sort": (lambda x: lax.top_k(jnp.sort(x, axis=-1), 3), (real(T, D),)),
    "fft": (lambda x: jnp.cumsum(jnp.abs(jnp.fft.fft(x)), axis=1), (real(T, D),)),
    "norm": (lambda x: jnp.linalg.norm(x, axis=-1), (real(T, D),)),
}


def test_jit_changes_nothing_a_batch_is_linear_and_functions_beside_each_other_add_up():
    other, other_args = FUNCTIONS["norm"]
    apart = counted(other, *other_args)
    for name, (function, args) in FUNCTIONS.items():
        plain = counted(function, *args)
        for nested in (
            jax.jit(function),
            lambda *args, f=function: jax.jit(jax.jit(f))(*args),
            jax.checkpoint(function),
        ):
            profile = counted(nested, *args)
            assert EXACT(profile) == EXACT(plain), name
            assert profile.fused_traffic_bytes == plain.fused_traffic_bytes
            assert profile.peak_bytes == plain.peak_bytes
        if name not in ("scan", "block"):  # a batch of scans moves an axis, a block has scalars that no batch repeats
            many = counted(jax.vmap(function), *jax.tree.map(lambda x: real(3, *x.shape), args))
            assert (many.flops, many.transcendentals) == (3 * plain.flops, 3 * plain.transcendentals)
            assert many.io.device_traffic_bytes == 3 * plain.io.device_traffic_bytes
            assert many.io.kernel_launches == plain.io.kernel_launches
        both = counted(lambda x, y, f=function: (f(*x), other(*y)), args, other_args)
        for count in ("flops", "transcendentals", "integer_ops", "fused_traffic_bytes"):
            assert getattr(both, count) == getattr(plain, count) + getattr(apart, count)
        assert both.io == jax.tree.map(operator.add, plain.io, apart.io)


def test_families_and_lines_each_sum_to_the_whole():
    profile = counted(jax.grad(lambda w, x: block(w, x).sum()), WEIGHTS, real(B, T, D))
    for rows in (profile.by_family, profile.by_line):
        total = [sum(column) for column in zip(*rows.values(), strict=True)]
        assert total[:3] == [profile.flops, profile.transcendentals, profile.integer_ops]
        assert total[3:] == [profile.io.device_traffic_bytes, profile.io.kernel_launches]
    assert all(re.fullmatch(r"test_function_profile\.py:\d+", line) for line in profile.by_line)


def test_work_of_a_librarys_function_stands_at_the_users_line_or_under_the_name_that_the_user_called():
    for wrapper in (str(Path(jaxtyping.__file__).parent), "<@beartype"):  # these wrap the package in tests alone
        source_info_util.register_exclusion(wrapper)
    gate, counts = rx.io_fusion_gate_for_target("cuda"), rx.FusionBenefit(*[real(8)] * 4)
    for fn, *args in (
        (lambda a: lax.scan(lambda c, _: (c + gate.score_ns(a), None), jnp.zeros(8, "float32"), length=2)[0], counts),
        (lambda m, x: jnp.median(m @ x), sparse.BCOO.fromdense(jnp.eye(4, dtype="float32")), real(4)),
        (gate.score_ns, counts),
        (jnp.linalg.norm, real(8)),
    ):
        line, name = r"test_function_profile\.py:\d+", fn.__qualname__
        is_users = "<lambda>" in name
        for level in ("jaxpr", "compiled"):  # instructions that the compiler adds have no line
            wanted = line if is_users and level == "jaxpr" else f"{line}|{re.escape(name)}" if is_users else name
            lines = rx.profile_function(fn, *args, level=level).by_line
            assert all(re.fullmatch(wanted, own) for own in lines), (level, name, [*lines])


def test_counts_are_exact_beyond_64_bits():
    n = 10**12
    profile = counted(lambda a, b: a @ b, real(n, n), real(n, n))
    assert (profile.flops, profile.peak_bytes) == (2 * n**3, 3 * 4 * n**2)


def test_shapes_arrays_and_numbers_are_taken_alike_and_arrays_closed_over_are_inputs():
    array = np.ones((T, D), np.float32)
    profiles = [counted(lambda x, y: x * y, x, 2.0) for x in (array, jnp.asarray(array), real(T, D))]
    assert all(EXACT(profile) == EXACT(profiles[0]) for profile in profiles)
    assert counted(jnp.sum, array, axis=0).flops == (T - 1) * D
    assert counted(lambda x, scale, kind: x * scale if kind else x, array, scale=array, kind="mul").flops == T * D
    held = jnp.ones((D, D), jnp.float32)
    profile = counted(lambda x: held @ x, real(D))
    assert profile.io.device_traffic_bytes == profile.peak_bytes == 4 * (D * D + D + D)


# --- Fusion and live bytes -----------------------------------------------------------------------


def test_what_is_computed_on_the_way_moves_nothing():
    full, weights = 4 * T * D, 4 * D * D
    profile = counted(lambda x: jnp.tanh(x * 2 + 1).astype(jnp.float32), real(T, D))
    assert profile.fused_traffic_bytes == profile.peak_bytes == 2 * full
    assert profile.io.device_traffic_bytes == 3 * 2 * full
    profile = counted(lambda x, w: jnp.sin((x + 1) @ w) * 2, real(T, D), real(D, D))  # a product is in memory
    assert profile.fused_traffic_bytes == 2 * full + (2 * full + weights) + 2 * full
    profile = counted(lambda x: (x * x).sum(-1), real(T, D))
    assert profile.fused_traffic_bytes == full + 4 * T


def test_memory_is_taken_again():
    square = 4 * D * D
    for length, live in ((1, 3), (2, 4), (3, 5), (9, 5)):  # operands, result, and at most two between
        profile = counted(lambda x, w, n=length: functools.reduce(lambda y, _: y @ w, range(n), x), *[real(D, D)] * 2)
        assert profile.peak_bytes <= live * square
    kept, given = (counted(jax.jit(lambda x: x + 1, donate_argnums=n), real(D)) for n in ((), (0,)))
    assert (kept.peak_bytes, given.peak_bytes) == (2 * 4 * D, 4 * D)

    def peak(n, stacked):
        body = lambda carry, _: (jnp.sin(carry) @ carry, carry if stacked else None)  # noqa: E731
        return counted(lambda x: lax.scan(body, x, length=n), real(D, D)).peak_bytes

    assert peak(10, stacked=False) == peak(1000, stacked=False)
    assert peak(1000, stacked=True) - peak(10, stacked=True) == 990 * square


# --- What cannot be known ------------------------------------------------------------------------


def wander(x):
    return lax.while_loop(lambda x: x.sum() > 1, lambda x: lax.while_loop(lambda x: x[0] > 0, jnp.sin, x) / 2, x)


def test_an_unknown_loop_counts_its_test_is_told_and_turns_as_often_as_is_given():
    profile = rx.profile_function(wander, real(D))
    assert (profile.flops, profile.transcendentals, profile.coverage_equations) == (D, 0, 1)
    outer, inner = profile.unknown_loops
    assert (outer.starts, inner.starts) == (1, None)
    assert outer.per_trip.flops == D + (D + 1)  # its own test, the halving, and one test of the loop inside
    assert inner.per_trip[:2] == (1, D)
    assert "not counted: the trip count of the loop at test_function_profile.py" in str(profile)
    given = counted(wander, real(D), trip_counts=[3, 5])
    assert (given.transcendentals, given.flops) == (3 * 5 * D, 4 * D + 3 * (D + 6))
    outer_only = counted(wander, real(D), trip_counts=[3, None])
    assert outer_only.transcendentals == 0
    assert [loop.starts for loop in outer_only.unknown_loops] == [3]
    by_line = counted(wander, real(D), trip_counts={outer.line: 2})
    assert by_line.transcendentals == 2 * 2 * D  # both stand on one line
    # The condition of a batch of loops is met once more than the body.
    halve = functools.partial(lax.while_loop, lambda x: x > 1, lambda x: x / 2)
    assert counted(jax.vmap(halve), real(B), trip_counts=[9]).flops == (10 + 9) * B


def test_a_loop_of_a_library_has_the_line_of_its_caller():
    from jax.experimental.ode import odeint

    def solved(x):
        return odeint(lambda x, t: -x, x, jnp.linspace(0.0, 1.0, 5))

    with jax.numpy_dtype_promotion("standard"):
        for _ in range(2):  # the library's functions are traced once
            (loop,) = counted(solved, real(D)).unknown_loops
            assert loop.line.startswith("test_function_profile.py:")
            assert loop.starts == 4
        assert counted(solved, real(D), trip_counts={loop.line: 3}).unknown_loops == ()


def test_callbacks_and_ordered_effects_are_sync_points():
    def told(x):
        jax.debug.print("{}", x.sum(), ordered=True)
        y = jax.pure_callback(lambda x: x, x, x)
        return jax.experimental.io_callback(lambda x: x, x, y, ordered=True)

    assert counted(told, jnp.ones(D)).io.sync_points == 3
    assert counted(lambda x: lax.fori_loop(0, 5, lambda i, y: told(y), x), jnp.ones(D)).io.sync_points == 15


# --- What the profile says, and bad input --------------------------------------------------------


def test_a_table_names_what_its_counts_assume_and_prints_bytes_as_people_read_them():
    profile = rx.profile_function(block, WEIGHTS, real(B, T, D))
    lines = str(profile).splitlines()
    assert lines[1].startswith(f"{bytes_text(profile.io.device_traffic_bytes)} of memory traffic if nothing is fused, ")
    assert lines[2].startswith(f"{profile.io.kernel_launches} launches if nothing is fused, ")
    assert lines[4] == f"counted: 100 % of {profile.equations} equations, 100 % of the traffic"
    assert lines[6].startswith("if nothing is fused ")
    assert "nothing is fused" not in str(rx.profile_function(jnp.sin, real(8), level="compiled"))
    assert len([line for line in lines if line.startswith("test_function_profile.py:")]) <= 10
    assert {*profile.by_family} <= {line.split("  ")[0] for line in lines}


SYMBOL = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n"), jnp.float32)


def test_bad_input_gets_a_sentence():
    for function, args, options, message in [
        (lambda x: x if x > 0 else -x, (real(),), {}, "fn: expected a function that JAX traces, .* raised Tracer"),
        (lambda x, y: x @ y, (real(2), real(3)), {}, "fn: expected a function that JAX traces, but <lambda> raised"),
        (lambda x: x, ("text",), {}, "fn: .* raised TypeError"),
        (wander, (), {}, "fn: wander takes 1 argument, got 0"),
        (jax.jit(wander), (real(2), real(2)), {}, "fn: wander takes 1 argument, got 2"),
        (lambda x, y=1: x, (1.0,) * 3, {}, "fn: <lambda> takes 1 to 2 arguments, got 3"),
        (lambda x, *xs: x, (), {}, "fn: <lambda> takes at least 1 argument, got 0"),
        (lambda *xs, key: xs, (1.0,), {}, "fn: <lambda> does not take these arguments: missing a required .*'key'"),
        (wander, (real(2),), {"axis": 1}, "fn: wander does not take these arguments: got an unexpected .*'axis'"),
        (lambda x: wander(x, x), (real(2),), {}, "fn: .* <lambda> raised TypeError: wander"),
        (3, (), {}, "fn: expected a function, got 3"),
        (jnp.sin, (1.0,), {"level": "guessed"}, "level: expected .*'jaxpr'.* got 'guessed'"),
        (wander, (real(2),), {"trip_counts": [3, -1]}, "trip_counts: expected an integer of at least 0, got -1"),
        (wander, (real(2),), {"trip_counts": [3, 1.5]}, "trip_counts: expected an integer, got 1.5"),
        (wander, (real(2),), {"trip_counts": [3]}, "trip_counts: expected a count for each of the 2 loops"),
        (wander, (real(2),), {"trip_counts": {"no.py:1": 3}}, "trip_counts: expected lines of loops .* got 'no.py:1'"),
        (wander, (real(2),), {"trip_counts": 3}, "trip_counts: expected a mapping by line or a sequence"),
        (jnp.sin, (SYMBOL,), {}, r"args: expected shapes of known size, got the symbolic shape \(n,\)"),
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            rx.profile_function(function, *args, **options)
        assert "\n" not in str(caught.value)
