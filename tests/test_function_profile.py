"""Whole functions: closed forms of compositions, the laws that counts obey, what the profile says, and errors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rlxjax as rx


def real(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def counted(function, *args, **options):
    return rx.profile_function(function, *args, strict=True, **options)


def exact(profile):
    """Return every count that does not depend on how operations are fused."""
    return profile.flops, profile.transcendentals, profile.integer_ops, profile.io


B, T, D, H = 2, 8, 16, 4


# --- Closed forms of compositions ----------------------------------------------------------------


def test_a_layer():
    profile = counted(lambda x, w, b: jnp.tanh(x @ w + b[None]), real(B, D), real(D, T), real(T))
    out = B * T
    assert (profile.flops, profile.transcendentals) == (2 * out * D + out, out)
    assert profile.io.kernel_launches == 4 - 1  # b[None] moves nothing
    assert profile.io.host_output_bytes == 4 * out
    assert profile.io.device_traffic_bytes == 4 * (B * D + D * T + out) + 4 * (out + T + out) + 4 * 2 * out


def test_a_softmax():
    profile = counted(lambda x: jax.nn.softmax(x, axis=-1), real(B, D))
    # Of each row: the maximum, which is compared with -inf, differences, a sum and quotients.
    assert profile.flops == B * ((D - 1) + 1 + D + (D - 1) + D)
    assert profile.transcendentals == B * D


def test_nested_scans():
    def inner(carry, _):
        return carry * 2 + jnp.sin(carry), None

    def outer(carry, _):
        return lax.scan(inner, carry, length=5)[0] - 1, None

    profile = counted(lambda x: lax.scan(outer, x, length=7)[0], real(D))
    assert (profile.flops, profile.transcendentals) == (7 * (5 * 2 + 1) * D, 7 * 5 * D)
    assert profile.io.kernel_launches == 7 * (5 * 3 + 1)
    assert profile.io.device_traffic_bytes == 4 * D * 7 * (5 * (2 + 2 + 3) + 2)


def test_the_gradient_of_a_scan():
    def body(carry, _):
        return jnp.sin(carry), None

    profile = counted(jax.grad(lambda x: lax.scan(body, x, length=T)[0].sum()), real(D))
    # Forward a sine and its derivative, the cosine; backward a product.
    assert (profile.flops, profile.transcendentals) == (T * D, 2 * T * D)


def test_a_batch_of_loops_of_unknown_length():
    def halve(x):
        return lax.while_loop(lambda x: x > 1, lambda x: x / 2, x)

    profile = counted(jax.vmap(halve), real(B), trip_counts=[9])
    assert profile.flops == (10 + 9) * B  # the condition is met once more than the body
    assert profile.flops == B * counted(halve, real(), trip_counts=[9]).flops
    assert not profile.unknown_loops


def test_rematerialisation_computes_the_forward_pass_again():
    def chain(x):
        return jnp.sin(jnp.sin(x)).sum()

    plain = counted(jax.grad(chain), real(D))
    again = counted(jax.grad(jax.checkpoint(chain)), real(D))
    assert plain.transcendentals == 3 * D  # sin, cos, cos: the outer sine is not used
    assert again.transcendentals == plain.transcendentals
    kept = counted(jax.value_and_grad(chain), real(D))
    again = counted(jax.value_and_grad(jax.checkpoint(chain)), real(D))
    assert (kept.transcendentals, again.transcendentals) == (4 * D, (2 + 3) * D)


def block(weights, x):
    def normed(x):
        return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    q, k, v = (jnp.einsum("btd,dhe->bthe", normed(x), w) for w in weights[:3])
    scores = jax.nn.softmax(jnp.einsum("bthe,bshe->bhts", q, k), axis=-1)
    x = x + jnp.einsum("bhts,bshe,hed->btd", scores, v, weights[3])
    return x + jax.nn.gelu(normed(x) @ weights[4]) @ weights[5]


WEIGHTS = [real(D, H, D // H)] * 3 + [real(H, D // H, D), real(D, 4 * D), real(4 * D, D)]


def test_a_transformer_block_and_its_backward_pass():
    forward = 2 * B * T * D * D * 4 + 2 * B * T * D * 4 * D * 2 + 2 * 2 * B * T * T * D
    profile = counted(block, WEIGHTS, real(B, T, D))
    assert profile.by_family["matmul"].flops == forward
    # Backward, each product is met twice: once for either operand.
    gradient = jax.grad(lambda *args: (block(*args) ** 2).mean(), argnums=(0, 1))
    assert counted(gradient, WEIGHTS, real(B, T, D)).by_family["matmul"].flops == 3 * forward


def test_a_convolution_by_fourier_transforms():
    n = 64
    profile = counted(lambda x, y: jnp.fft.irfft(jnp.fft.rfft(x) * jnp.fft.rfft(y)), real(n), real(n))
    transform = 5 * n * 6 // 2
    assert profile.by_family["fft"].flops == 3 * transform
    assert profile.flops == 3 * transform + 6 * (n // 2 + 1)


def test_the_dearest_branch_counts_and_the_spread_is_told():
    def choose(index, x):
        return lax.switch(index, [lambda x: x, lambda x: x @ x, jnp.sin], x)

    profile = counted(choose, jax.ShapeDtypeStruct((), jnp.int32), real(D, D))
    (spread,) = profile.branches
    assert profile.by_family["matmul"].flops == spread.most.flops == 2 * D**3
    assert spread.least.flops == 0
    assert "conditional at test_function_profile.py" in str(profile)


def test_a_runge_kutta_loop():
    def step(_, x):
        k = jnp.cos(x)
        k2 = jnp.cos(x + 0.5 * k)
        return x + 0.1 * k2

    profile = counted(lambda x: lax.fori_loop(0, 100, step, x), real(D))
    assert (profile.flops, profile.transcendentals) == (100 * 4 * D, 100 * 2 * D)


def test_a_gradient_of_a_least_squares_loss():
    profile = counted(jax.grad(lambda w, x, y: 0.5 * jnp.sum((x @ w - y) ** 2)), real(D), real(T, D), real(T))
    assert profile.by_family["matmul"].flops == 2 * (2 * T * D)


def test_functions_with_derivatives_of_their_own_count_as_their_bodies():
    @jax.custom_vjp
    def cube(x):
        return x * x * x

    cube.defvjp(lambda x: (x * x * x, x), lambda x, g: (3 * x * x * g,))
    assert counted(cube, real(D)).flops == 2 * D
    assert counted(jax.grad(lambda x: cube(x).sum()), real(D)).flops == 3 * D
    assert counted(jax.nn.relu, real(D)).flops == D


def test_a_jacobian_by_forward_mode():
    profile = counted(jax.jacfwd(lambda x, w: w @ x), real(D), real(T, D))
    assert profile.by_family["matmul"].flops == 2 * T * D * D


def test_a_random_sample():
    profile = counted(lambda key: jax.random.uniform(key, (D,), jnp.float32), jax.eval_shape(lambda: jax.random.key(0)))
    assert profile.by_family["random"].integer_ops == 118 * D


def test_power_iteration_with_a_known_number_of_turns():
    def run(a, x):
        return lax.while_loop(lambda s: s[1] < 20, lambda s: (a @ s[0], s[1] + 1), (x, 0))[0]

    profile = counted(run, real(D, D), real(D))  # from 0 to 20 by 1: it can be read
    assert profile.by_family["matmul"].flops == 20 * 2 * D * D
    assert not profile.unknown_loops


@pytest.mark.parametrize(
    ("condition", "start", "step", "trips"),
    [
        (lambda i: i < 10, 0, 1, 10),
        (lambda i: i < 10, 3, 4, 2),
        (lambda i: i <= 10, 0, 2, 6),
        (lambda i: i < 0, 5, 1, 0),
    ],
)
def test_loops_between_constants_tell_their_trips(condition, start, step, trips):
    def run(x):
        return lax.while_loop(lambda s: condition(s[0]), lambda s: (s[0] + step, jnp.sin(s[1])), (start, x))[1]

    for function in (run, jax.jit(run)):
        profile = counted(function, real(D))
        assert profile.transcendentals == trips * D
        assert profile.integer_ops == 2 * trips + 1


# --- Laws ----------------------------------------------------------------------------------------


def recurrence(carry, x):
    carry = jnp.tanh(carry * x + 1)
    return carry, carry * 2


def by_gradient(carry, x):
    loss, slope = jax.value_and_grad(lambda c: jnp.sum(jnp.sin(c * x) ** 2))(carry)
    return carry - 0.1 * slope, loss


@pytest.mark.parametrize("body", [recurrence, by_gradient])
def test_a_scan_equals_its_unrolled_form(body):
    def unrolled(carry, *rows):
        results = []
        for row in rows:
            carry, result = body(carry, row)
            results.append(result)
        return carry, results

    loop = counted(lambda carry, x: lax.scan(body, carry, x), real(D), real(T, D))
    assert exact(loop) == exact(counted(unrolled, real(D), *[real(D)] * T))


def test_a_scan_is_linear_in_its_length():
    one, many = (counted(lambda c, x: lax.scan(recurrence, c, x)[0], real(D), real(n, D)) for n in (1, 12))
    assert many.flops == 12 * one.flops
    assert many.transcendentals == 12 * one.transcendentals
    assert many.io.kernel_launches == 12 * one.io.kernel_launches
    assert many.io.device_traffic_bytes == 12 * one.io.device_traffic_bytes
    assert many.equations == one.equations


FUNCTIONS = {
    "softmax": (lambda x: jax.nn.softmax(x @ x.T), (real(T, D),)),
    "scan": (lambda c, x: lax.scan(recurrence, c, x), (real(D), real(T, D))),
    "sort": (lambda x: jnp.sort(x, axis=-1), (real(T, D),)),
    "fft": (lambda x: jnp.abs(jnp.fft.fft(x)), (real(T, D),)),
    "norm": (lambda x: jnp.linalg.norm(x, axis=-1), (real(T, D),)),
    "block": (block, (WEIGHTS, real(B, T, D))),
    "cumsum": (lambda x: jnp.cumsum(x, axis=1), (real(T, D),)),
    "top_k": (lambda x: lax.top_k(x, 3), (real(T, D),)),
}


# A batch of scans moves an axis, and a block has scalars that no batch repeats.
@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - {"scan", "block"}))
def test_a_batch_of_n_is_n_times_one(name):
    function, args = FUNCTIONS[name]
    n = 3
    batched = jax.tree.map(lambda x: real(n, *x.shape), args)
    one, many = counted(function, *args), counted(jax.vmap(function), *batched)
    assert (many.flops, many.transcendentals) == (n * one.flops, n * one.transcendentals)
    assert many.io.device_traffic_bytes == n * one.io.device_traffic_bytes
    assert many.io.kernel_launches == one.io.kernel_launches


@pytest.mark.parametrize("name", FUNCTIONS)
def test_jit_around_or_inside_changes_nothing(name):
    function, args = FUNCTIONS[name]
    plain = counted(function, *args)
    for nested in (jax.jit(function), lambda *args: jax.jit(jax.jit(function))(*args), jax.checkpoint(function)):
        profile = counted(nested, *args)
        assert exact(profile) == exact(plain)
        assert profile.fused_traffic_bytes == plain.fused_traffic_bytes
        assert profile.peak_bytes == plain.peak_bytes


@pytest.mark.parametrize("first", FUNCTIONS)
def test_two_functions_beside_each_other_cost_their_sum(first):
    function, args = FUNCTIONS[first]
    other, other_args = FUNCTIONS["norm"]
    profile = counted(lambda x, y: (function(*x), other(*y)), args, other_args)
    apart = [counted(function, *args), counted(other, *other_args)]
    for name in ("flops", "transcendentals", "integer_ops", "fused_traffic_bytes"):
        assert getattr(profile, name) == sum(getattr(part, name) for part in apart)
    assert profile.io == jax.tree.map(lambda *counts: sum(counts), *(part.io for part in apart))


def test_families_and_lines_each_sum_to_the_whole():
    profile = counted(jax.grad(lambda w, x: block(w, x).sum()), WEIGHTS, real(B, T, D))
    for rows in (profile.by_family, profile.by_line):
        total = [sum(column) for column in zip(*rows.values(), strict=True)]
        assert total[:3] == [profile.flops, profile.transcendentals, profile.integer_ops]
        assert total[3:] == [profile.io.device_traffic_bytes, profile.io.kernel_launches]
    assert all(re.fullmatch(r"test_function_profile\.py:\d+", line) for line in profile.by_line)


def test_what_nobody_uses_is_no_work():
    assert counted(lambda x: (jnp.sin(x) @ x, x + 1)[1], real(D)).flops == D


def test_counts_are_exact_beyond_64_bits():
    n = 10**12
    profile = counted(lambda a, b: a @ b, real(n, n), real(n, n))
    assert profile.flops == 2 * n**3
    assert profile.peak_bytes == 3 * 4 * n**2


def test_a_profile_takes_shapes_arrays_and_numbers_alike():
    array = np.ones((T, D), np.float32)
    profiles = [counted(lambda x, y: x * y, x, y) for x in (array, jnp.asarray(array), real(T, D)) for y in (2.0,)]
    assert all(exact(profile) == exact(profiles[0]) for profile in profiles)
    assert counted(jnp.sum, array, axis=0).flops == (T - 1) * D
    assert (
        counted(lambda x, scale, kind: x * scale if kind == "mul" else x, array, scale=array, kind="mul").flops == T * D
    )


def test_arrays_that_are_closed_over_are_inputs():
    held = jnp.ones((D, D), jnp.float32)
    profile = counted(lambda x: held @ x, real(D))
    assert profile.io.device_traffic_bytes == profile.peak_bytes == 4 * (D * D + D + D)


# --- Fusion and live bytes -----------------------------------------------------------------------

FULL = 4 * T * D


def test_a_chain_is_read_once_and_written_once():
    profile = counted(lambda x: jnp.tanh(x * 2 + 1).astype(jnp.float32), real(T, D))
    assert profile.fused_traffic_bytes == profile.peak_bytes == 2 * FULL
    assert profile.io.device_traffic_bytes == 3 * 2 * FULL


def test_a_product_reads_and_writes_memory():
    profile = counted(lambda x, w: jnp.sin((x + 1) @ w) * 2, real(T, D), real(D, D))
    weights = 4 * D * D
    assert profile.fused_traffic_bytes == 2 * FULL + (2 * FULL + weights) + 2 * FULL


def test_a_reduction_takes_its_operand_on_the_way():
    profile = counted(lambda x: (x * x).sum(-1), real(T, D))
    assert profile.fused_traffic_bytes == FULL + 4 * T


def test_peak_bytes_of_a_chain_of_products():
    square = 4 * D * D
    for length, live in ((1, 3), (2, 4), (3, 5), (9, 5)):  # operands, result, and at most two between
        profile = counted(lambda x, w, n=length: functools.reduce(lambda y, _: y @ w, range(n), x), *[real(D, D)] * 2)
        assert profile.peak_bytes <= live * square


def test_a_donated_argument_gives_its_memory_to_the_result():
    kept, given = (counted(jax.jit(lambda x: x + 1, donate_argnums=n), real(D)) for n in ((), (0,)))
    assert (kept.peak_bytes, given.peak_bytes) == (2 * 4 * D, 4 * D)


def test_a_longer_scan_needs_no_more_memory_unless_it_stacks():
    def run(n, stacked):
        def body(carry, _):
            return jnp.sin(carry) @ carry, carry if stacked else None

        return counted(lambda x: lax.scan(body, x, length=n), real(D, D)).peak_bytes

    assert run(10, stacked=False) == run(1000, stacked=False)
    assert run(1000, stacked=True) - run(10, stacked=True) == 990 * 4 * D * D


# --- What cannot be known ------------------------------------------------------------------------


def wander(x):
    return lax.while_loop(lambda x: x.sum() > 1, lambda x: lax.while_loop(lambda x: x[0] > 0, jnp.sin, x) / 2, x)


def test_an_unknown_loop_counts_its_test_and_is_told():
    profile = rx.profile_function(wander, real(D))
    assert (profile.flops, profile.transcendentals) == (D, 0)
    outer, inner = profile.unknown_loops
    assert (outer.starts, inner.starts) == (1, None)
    assert outer.per_trip.flops == D + (D + 1)  # its own test, the halving, and one test of the loop inside
    assert inner.per_trip[:2] == (1, D)
    assert profile.coverage_equations == 1
    assert "not counted: how often the loop at test_function_profile.py" in str(profile)


def test_trip_counts_multiply_in_order_of_appearance():
    profile = counted(wander, real(D), trip_counts=[3, 5])
    assert profile.transcendentals == 3 * 5 * D
    assert profile.flops == 4 * D + 3 * (D + 6)
    outer_only = counted(wander, real(D), trip_counts=[3, None])
    assert outer_only.transcendentals == 0
    assert [loop.starts for loop in outer_only.unknown_loops] == [3]
    line = rx.profile_function(wander, real(D)).unknown_loops[0].line
    by_line = counted(wander, real(D), trip_counts={line: 2})
    assert by_line.transcendentals == 2 * 2 * D  # both stand on one line


def test_a_loop_of_a_library_has_the_line_of_its_caller():
    from jax.experimental.ode import odeint

    def solved(x):
        return odeint(lambda x, t: -x, x, jnp.linspace(0.0, 1.0, 5))

    for _ in range(2):  # the library's functions are traced once
        with jax.numpy_dtype_promotion("standard"):
            (loop,) = counted(solved, real(D)).unknown_loops
        assert loop.line.startswith("test_function_profile.py:")
        assert loop.starts == 4
    with jax.numpy_dtype_promotion("standard"):
        assert counted(solved, real(D), trip_counts={loop.line: 3}).unknown_loops == ()


def test_functions_of_any_shape_are_profiled():
    assert exact(counted(lambda: None))[:3] == (0, 0, 0)
    assert counted(lambda x: x, real(D)).io == rx.GraphIoProfile(0, 0, 4 * D, 0)
    assert counted(lambda x: jnp.sort(x) + jnp.cumsum(x) + x.sum(), real(0)).flops == 0
    assert counted(lambda x: lax.scan(recurrence, x[0], x[:0])[0], real(T, D)).flops == 0
    assert counted(jax.jit(lambda x, n: x * n, static_argnums=1), real(D), 3).flops == D


def test_callbacks_and_ordered_effects_are_sync_points():
    def told(x):
        jax.debug.print("{}", x.sum(), ordered=True)
        y = jax.pure_callback(lambda x: x, x, x)
        return jax.experimental.io_callback(lambda x: x, x, y, ordered=True)

    assert counted(told, jnp.ones(D)).io.sync_points == 3
    assert counted(lambda x: lax.fori_loop(0, 5, lambda i, y: told(y), x), jnp.ones(D)).io.sync_points == 15


# --- What the profile says -----------------------------------------------------------------------


def test_a_table_begins_with_the_coverage():
    profile = rx.profile_function(block, WEIGHTS, real(B, T, D))
    text, page = str(profile), profile._repr_html_()
    assert text.startswith(f"covered by rules: 100 % of {profile.equations} equations, 100 % of ")
    assert len([line for line in text.splitlines() if line.startswith("test_function_profile.py:")]) <= 10
    for family in profile.by_family:
        assert family in text
        assert family in page
    assert page.count("<tr>") == page.count("</tr>") > len(profile.by_family)


# --- Bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "args", "options", "message"),
    [
        (lambda x: x if x > 0 else -x, (real(),), {}, "fn: expected a function that JAX traces, .* raised Tracer"),
        (lambda x, y: x @ y, (real(2), real(3)), {}, "fn: expected a function that JAX traces, but <lambda> raised"),
        (lambda x: x, (), {}, "args: expected what <lambda> takes, but missing a required argument: 'x'"),
        (lambda x: x, ("text",), {}, "fn: .* raised TypeError"),
        (3, (), {}, "fn: expected a function, got 3"),
        (jnp.sin, (1.0,), {"level": "guessed"}, "level: expected .*'jaxpr'.* got 'guessed'"),
        (wander, (real(2),), {"trip_counts": [3, -1]}, "trip_counts: expected an integer of at least 0, got -1"),
        (wander, (real(2),), {"trip_counts": [3, 1.5]}, "trip_counts: expected an integer, got 1.5"),
        (wander, (real(2),), {"trip_counts": [3]}, "trip_counts: expected one for each of the 2 loops"),
        (jnp.sin, (1.0,), {"trip_counts": [3]}, "trip_counts: expected one for each of the 0 loops"),
        (wander, (real(2),), {"trip_counts": {"no.py:1": 3}}, "trip_counts: expected lines of .* got 'no.py:1'"),
        (wander, (real(2),), {"trip_counts": 3}, "trip_counts: expected a mapping by line or a sequence"),
    ],
)
def test_bad_input_gets_a_sentence(function, args, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        rx.profile_function(function, *args, **options)
    assert "\n" not in str(caught.value)


def test_symbolic_shapes_are_refused():
    (n,) = jax.export.symbolic_shape("n")
    with pytest.raises(ValueError, match=r"args: expected shapes of known size, got the symbolic shape \(n,\)"):
        rx.profile_function(jnp.sin, jax.ShapeDtypeStruct((n,), jnp.float32))
