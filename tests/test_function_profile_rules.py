"""The rule of each primitive gives the FLOP, transcendentals, integer operations and bytes of a closed form."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec

import rlxjax as rx

M, N, K, B = 6, 10, 14, 3


def real(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def whole(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def complex_(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.complex64)


def flags(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bool_)


KEY = jax.eval_shape(lambda: jax.random.key(0))
MN = M * N
X, Y, W, Z = real(M, N), real(M, N), whole(M, N), complex_(M, N)

#: name -> function, arguments, (FLOP, transcendentals, integer operations), bytes; each is one kernel.
CASES = {}


def case(name, function, args, counts, moved):
    assert name not in CASES
    CASES[name] = function, args, counts, moved


# Elementwise: one of each element; operands and results of 4, 8 or 1 bytes.
for name in ("add", "sub", "mul", "div", "max", "min", "rem", "nextafter"):
    case(name, getattr(lax, name), (X, Y), (MN, 0, 0), 3 * 4 * MN)
for name in ("eq", "ne", "lt", "le", "gt", "ge"):
    case(name, getattr(lax, name), (X, Y), (MN, 0, 0), (4 + 4 + 1) * MN)
for name in ("neg", "abs", "floor", "ceil", "round", "sign", "square"):
    case(name, getattr(lax, name), (X,), (MN, 0, 0), 2 * 4 * MN)
TRANSCENDENTAL = (
    "exp exp2 log expm1 log1p sqrt rsqrt cbrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh logistic "
    "erf erfc erf_inv lgamma digamma bessel_i0e bessel_i1e"
)
for name in TRANSCENDENTAL.split():
    case(name, getattr(lax, name), (X,), (0, MN, 0), 2 * 4 * MN)
for name in (
    "pow",
    "atan2",
    "igamma",
    "igammac",
    "zeta",
    "polygamma",
):
    case(name, getattr(lax, name), (X, Y), (0, MN, 0), 3 * 4 * MN)
case("regularized_incomplete_beta", lax.betainc, (X, Y, X), (0, MN, 0), 4 * 4 * MN)
case("is_finite", lax.is_finite, (X,), (MN, 0, 0), (4 + 1) * MN)
case("clamp", lambda x, y, z: lax.clamp(x, y, z), (X, X, X), (2 * MN, 0, 0), 4 * 4 * MN)
case("reduce_precision", lambda x: lax.reduce_precision(x, 5, 10), (X,), (MN, 0, 0), 2 * 4 * MN)
case("integer_pow 7", lambda x: x**7, (X,), (4 * MN, 0, 0), 2 * 4 * MN)  # x2, x3, x6, x7
case("integer_pow -2", lambda x: lax.integer_pow(x, -2), (X,), (2 * MN, 0, 0), 2 * 4 * MN)
for name in ("add", "mul", "bitwise_and", "bitwise_or", "bitwise_xor", "shift_left", "div", "max"):
    case(f"{name} of integers", getattr(lax, name), (W, W), (0, 0, MN), 3 * 4 * MN)
for name in ("population_count", "clz", "bitwise_not"):
    case(f"{name} of integers", getattr(lax, name), (W,), (0, 0, MN), 2 * 4 * MN)
for name, flops, transcendentals in (("add", 2, 0), ("mul", 6, 0), ("div", 11, 0), ("pow", 12, 5)):
    case(f"{name} of complex", getattr(lax, name), (Z, Z), (flops * MN, transcendentals * MN, 0), 3 * 8 * MN)
for name, flops, transcendentals in (("neg", 2, 0), ("conj", 1, 0), ("exp", 2, 3), ("log", 4, 2), ("sin", 2, 4)):
    case(f"{name} of complex", getattr(lax, name), (Z,), (flops * MN, transcendentals * MN, 0), 2 * 8 * MN)
case("abs of complex", lax.abs, (Z,), (3 * MN, MN, 0), (8 + 4) * MN)
case("select_n", lax.select, (flags(M, N), X, Y), (0, 0, 0), (1 + 3 * 4) * MN)

# Movement: no arithmetic, what is read and written.
case("convert_element_type", lambda x: x.astype(jnp.bfloat16), (X,), (0, 0, 0), (4 + 2) * MN)
case("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.int32), (X,), (0, 0, 0), 2 * 4 * MN)
case("broadcast_in_dim", lambda x: jnp.broadcast_to(x[None], (B, M, N)), (X,), (0, 0, 0), 4 * MN * (1 + B))
case("transpose", lambda x: x.T, (X,), (0, 0, 0), 2 * 4 * MN)
case("concatenate", lambda x, y: lax.concatenate([x, y], 0), (X, Y), (0, 0, 0), 2 * 2 * 4 * MN)
case("pad", lambda x: lax.pad(x, np.float32(0), [(1, 1, 0), (0, 0, 0)]), (X,), (0, 0, 0), 4 * (MN + (M + 2) * N))
case("slice", lambda x: lax.slice(x, (0, 0), (2, N)), (X,), (0, 0, 0), 4 * (MN + 2 * N))
case("rev", lambda x: lax.rev(x, (0,)), (X,), (0, 0, 0), 2 * 4 * MN)
case("iota", lambda: lax.iota(jnp.int32, N), (), (0, 0, 0), 4 * N)
case("real", lax.real, (Z,), (0, 0, 0), (8 + 4) * MN)
case("complex", lax.complex, (X, Y), (0, 0, 0), (4 + 4 + 8) * MN)
case("split", lambda x: lax.split(x, (2, M - 2)), (X,), (0, 0, 0), 2 * 4 * MN)

# Reductions: n - 1 operations for n elements.
for name in ("sum", "prod", "max", "min"):
    function = getattr(lax, f"reduce_{name}")
    case(f"reduce_{name}", lambda x, f=function: f(x, axes=(1,)), (X,), (M * (N - 1), 0, 0), 4 * (MN + M))
for name in ("and", "or", "xor"):
    function = getattr(lax, f"reduce_{name}")
    case(f"reduce_{name}", lambda x, f=function: f(x, axes=(0, 1)), (flags(M, N),), (0, 0, MN - 1), MN + 1)
case("reduce_sum of integers", lambda x: lax.reduce_sum(x, axes=(0,)), (W,), (0, 0, (M - 1) * N), 4 * (MN + N))
case("reduce_sum of complex", lambda x: lax.reduce_sum(x, axes=(0,)), (Z,), (2 * (M - 1) * N, 0, 0), 8 * (MN + N))
case("argmax", lambda x: lax.argmax(x, 1, jnp.int32), (X,), (M * (N - 1), 0, 0), 4 * (MN + M))
case("argmin", lambda x: lax.argmin(x, 0, jnp.int32), (X,), ((M - 1) * N, 0, 0), 4 * (MN + N))
for name in ("cumsum", "cumprod", "cummax", "cummin"):
    function = getattr(lax, name)
    case(name, lambda x, f=function: f(x, axis=1), (X,), (M * (N - 1), 0, 0), 2 * 4 * MN)
case(
    "cumlogsumexp",
    lambda x: lax.cumlogsumexp(x, axis=0),
    (X,),
    (4 * (M - 1) * N, 2 * (M - 1) * N, 0),
    2 * 4 * MN,
)
case(
    "reduce_window_sum",
    lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 5), (1, 1), "VALID"),
    (X,),
    ((M - 1) * (N - 4) * (2 * 5 - 1), 0, 0),
    4 * (MN + (M - 1) * (N - 4)),
)
case(
    "reduce_window_max",
    lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3), (1, 3), "VALID"),
    (X,),
    (M * 3 * 2, 0, 0),
    4 * (MN + M * 3),
)

# Products, convolutions, transforms, sorting.
case("dot_general", lambda a, b: a @ b, (real(M, K), real(K, N)), (2 * M * N * K, 0, 0), 4 * (M * K + K * N + MN))
case(
    "dot_general, batched",
    lambda a, b: jnp.einsum("bmk,bkn->bmn", a, b),
    (real(B, M, K), real(B, K, N)),
    (2 * B * M * N * K, 0, 0),
    4 * B * (M * K + K * N + MN),
)
case(
    "dot_general of integers",
    lambda a, b: lax.dot(a, b),
    (whole(M, K), whole(K, N)),
    (0, 0, 2 * M * N * K),
    4 * (M * K + K * N + MN),
)
case(
    "dot_general of complex",
    lambda a, b: lax.dot(a, b),
    (complex_(M, K), complex_(K, N)),
    (8 * M * N * K, 0, 0),
    8 * (M * K + K * N + MN),
)
case(
    "ragged_dot",
    lax.ragged_dot,
    (real(M, K), real(B, K, N), whole(B)),
    (2 * M * N * K, 0, 0),
    4 * (M * K + B * K * N + B + MN),
)


def convolution(x, w, groups=1, **options):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, w, **{"window_strides": (1, 1), "padding": "VALID"} | options, dimension_numbers=numbers,
        feature_group_count=groups,
    )  # fmt: skip


case(
    "conv_general_dilated",
    convolution,
    (real(2, 8, 9, 4), real(3, 3, 4, 5)),
    (2 * 2 * 6 * 7 * 5 * 3 * 3 * 4, 0, 0),
    4 * (2 * 8 * 9 * 4 + 3 * 3 * 4 * 5 + 2 * 6 * 7 * 5),
)
case(
    "conv_general_dilated in groups",
    lambda x, w: convolution(x, w, groups=4),
    (real(2, 8, 9, 4), real(3, 3, 1, 8)),
    (2 * 2 * 6 * 7 * 8 * 3 * 3 * 1, 0, 0),
    4 * (2 * 8 * 9 * 4 + 3 * 3 * 8 + 2 * 6 * 7 * 8),
)
case(
    # Of 11 positions 6, 5 and 6 meet an element under the first, second and third tap, not a hole between two.
    "conv_general_dilated, transposed",
    lambda x, w: convolution(x, w, lhs_dilation=(2, 2), padding=((2, 2), (2, 2))),
    (real(1, 5, 5, 2), real(3, 3, 2, 3)),
    (2 * (6 + 5 + 6) ** 2 * 2 * 3, 0, 0),
    4 * (25 * 2 + 9 * 2 * 3 + 11 * 11 * 3),
)
for length in (16, 12):
    points = 5 * length * math.log2(length)
    case(f"fft of {length}", jnp.fft.fft, (complex_(M, length),), (M * round(points), 0, 0), 2 * 8 * M * length)
    case(
        f"rfft of {length}",
        lambda x: lax.fft(x, "RFFT", (x.shape[-1],)),
        (real(M, length),),
        (M * round(points / 2), 0, 0),
        M * (4 * length + 8 * (length // 2 + 1)),
    )
    case(
        f"irfft of {length}",
        lambda x, n=length: lax.fft(x, "IRFFT", (n,)),
        (complex_(M, length // 2 + 1),),
        (M * round(points / 2), 0, 0),
        M * (4 * length + 8 * (length // 2 + 1)),
    )
case("fft2", lambda x: lax.fft(x, "FFT", (8, 4)), (complex_(B, 8, 4),), (B * 5 * 32 * 5, 0, 0), 2 * 8 * B * 32)
case("sort", lambda x: lax.sort(x, dimension=1), (real(M, 16),), (M * 16 * 4, 0, 0), 2 * 4 * M * 16)
case(
    "sort with a payload",
    lambda x, i: lax.sort((x, i), dimension=1, num_keys=1),
    (real(M, 17), whole(M, 17)),
    (M * 17 * 5, 0, 0),
    2 * 2 * 4 * M * 17,
)
case("sort of integers", lambda x: lax.sort(x, dimension=0), (whole(16, N),), (0, 0, 16 * N * 4), 2 * 4 * 16 * N)
case("top_k", lambda x: lax.top_k(x, 4), (real(M, 100),), (M * 100 * 2, 0, 0), 4 * M * (100 + 4 + 4))

# Parts of arrays: bytes touched, whatever the size of the operand.
ROWS = 4
GATHER = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
SCATTER = lax.ScatterDimensionNumbers((1,), (0,), (0,))
BIG, WHERE, UPDATES = real(1000, N), whole(ROWS, 1), real(ROWS, N)
case("gather", lambda x, i: lax.gather(x, i, GATHER, (1, N)), (BIG, WHERE), (0, 0, 0), 4 * (2 * ROWS * N + ROWS))
for name, flops, passes in (("", 0, 2), ("_add", 1, 3), ("_mul", 1, 3), ("_max", 1, 3), ("_min", 1, 3)):
    function = getattr(lax, f"scatter{name}")
    case(
        f"scatter{name}",
        lambda x, i, y, f=function: f(x, i, y, SCATTER),
        (BIG, WHERE, UPDATES),
        (flops * ROWS * N, 0, 0),
        4 * (passes * ROWS * N + ROWS),
    )
case(
    "dynamic_slice",
    lambda x, i: lax.dynamic_slice(x, (i, i), (2, 3), allow_negative_indices=False),
    (X, whole()),
    (0, 0, 0),
    2 * 4 * 6 + 2 * 4,
)
case(
    "dynamic_update_slice",
    lambda x, y, i: lax.dynamic_update_slice(x, y, (i, i), allow_negative_indices=False),
    (X, real(2, 3), whole()),
    (0, 0, 0),
    2 * 4 * 6 + 2 * 4,
)

# Random numbers: 117 operations of Threefry for each block, one xor of its two words; a key has two words.
WORD = jax.ShapeDtypeStruct((), jnp.uint32)
case("random_bits", lambda key: jax.random.bits(key, (N,), jnp.uint32), (KEY,), (0, 0, 118 * N), 8 + 4 * N)
case("random_split", lambda key: jax.random.split(key, N), (KEY,), (0, 0, 117 * N), 8 + 8 * N)
case("random_fold_in", lambda key, i: jax.random.fold_in(key, i), (KEY, WORD), (0, 0, 117), 8 + 4 + 8)

# Linear algebra: the leading order of the textbooks.
S = 12
SQUARE = real(B, S, S)
LA = lax.linalg
case("lu", lambda a: LA.lu(a), (SQUARE,), (B * (2 * S**3 // 3), 0, 0), 4 * B * (2 * S * S + S + S))
case("eigh", lambda a: LA.eigh(a, symmetrize_input=False), (SQUARE,), (B * 9 * S**3, 0, 0), 4 * B * (2 * S * S + S))
case("svd", lambda a: LA.svd(a, full_matrices=False), (real(20, S),), (14 * 20 * S**2 + 8 * S**3, 0, 0), None)
case("svdvals", lambda a: LA.svd(a, compute_uv=False), (real(20, S),), ((12 * 20 * S**2 - 4 * S**3) // 3, 0, 0), None)
case(
    "triangular_solve",
    lambda a, b: LA.triangular_solve(a, b, left_side=True, lower=True),
    (real(S, S), real(S, N)),
    (S * S * N, 0, 0),
    4 * (S * S + 2 * S * N),
)
case(
    "triangular_solve of complex",
    lambda a, b: LA.triangular_solve(a, b, left_side=True, lower=True),
    (complex_(S, S), complex_(S, N)),
    (4 * S * S * N, 0, 0),
    8 * (S * S + 2 * S * N),
)
case(
    "tridiagonal_solve",
    LA.tridiagonal_solve,
    (real(S), real(S), real(S), real(S, N)),
    (8 * S * N, 0, 0),
    4 * (3 * S + 2 * S * N),
)
case("hessenberg", LA.hessenberg, (real(S, S),), (10 * S**3 // 3, 0, 0), None)
case("schur", LA.schur, (real(S, S),), (25 * S**3, 0, 0), None)


@pytest.mark.parametrize("name", CASES)
def test_a_primitive_counts_by_its_closed_form(name):
    function, args, counts, moved = CASES[name]
    profile = rx.profile_function(function, *args, strict=True)
    assert (profile.flops, profile.transcendentals, profile.integer_ops) == counts
    assert profile.io.kernel_launches == 1
    if moved is not None:
        assert profile.io.device_traffic_bytes == moved
    assert profile.coverage_bytes == profile.coverage_equations == 1


def test_there_are_more_than_a_hundred():
    assert len(CASES) > 100


def flops_of(family, function, *args):
    return rx.profile_function(function, *args, strict=True).by_family[family].flops


def test_factorisations_that_come_with_other_work():
    assert flops_of("linear algebra", jnp.linalg.cholesky, SQUARE) == B * (S**3 // 3)
    m, n = 20, S  # R takes 2 n^2 (m - n / 3), and Q of n columns as much again
    assert flops_of("linear algebra", jnp.linalg.qr, real(m, n)) == 2 * ((6 * m * n**2 - 2 * n**3) // 3)
    assert flops_of("linear algebra", jnp.linalg.eigvals, real(S, S)) == 10 * S**3
    assert flops_of("linear algebra", jnp.linalg.eig, real(S, S)) == 25 * S**3
    right_sides = 2 * S * S * N  # forward and backward
    assert flops_of("linear algebra", jnp.linalg.solve, real(S, S), real(S, N)) == 2 * S**3 // 3 + right_sides


def test_a_kernel_of_ones_own_counts_by_its_estimate_and_is_uncosted_without():
    from jax.experimental import pallas as pl

    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 2

    def call(x, **options):
        return pl.pallas_call(kernel, out_shape=x, **options)(x)

    estimate = pl.CostEstimate(flops=11, transcendentals=12, bytes_accessed=13)
    profile = rx.profile_function(lambda x: call(x, cost_estimate=estimate), jnp.ones((8, 128)))
    assert (profile.flops, profile.transcendentals, profile.io.device_traffic_bytes) == (11, 12, 13)
    profile = rx.profile_function(call, jnp.ones((8, 128)))
    assert profile.uncosted == {"pallas_call": 1}
    assert profile.io.device_traffic_bytes == 2 * 8 * 8 * 128


def test_every_device_of_a_mesh_counts():
    mesh = jax.sharding.AbstractMesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    split = PartitionSpec("i")

    def body(x):
        return lax.psum(jnp.sin(x), "i")

    sharded = jax.shard_map(body, mesh=mesh, in_specs=split, out_specs=PartitionSpec())
    profile = rx.profile_function(sharded, real(8, N), strict=True)
    assert (profile.flops, profile.transcendentals) == (8 * N, 8 * N)  # each device adds its part
    assert profile.io.kernel_launches == 2 * 4
    for collective in (
        lambda x: lax.all_gather(x, "i"),
        lambda x: lax.ppermute(x, "i", [(0, 1)]),
        lambda x: lax.psum_scatter(x, "i", scatter_dimension=1),
        lambda x: lax.all_to_all(x, "i", 1, 1),
        lambda x: lax.pmax(x, "i"),
        lambda x: lax.pmean(x, "i"),
    ):
        sharded = jax.shard_map(collective, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
        assert rx.profile_function(sharded, real(8, 4), strict=True).io.kernel_launches >= 4


def test_a_rule_of_ones_own_counts_a_primitive_of_ones_own():
    double = Primitive("double_for_a_test")
    double.def_abstract_eval(lambda x: x)
    x = jnp.ones((M, N))
    profile = rx.profile_function(double.bind, x)
    assert profile.uncosted == {"double_for_a_test": 1}
    assert profile.coverage_equations == profile.coverage_bytes == 0
    assert profile.io.device_traffic_bytes == 2 * 8 * MN
    with pytest.raises(ValueError, match="strict: .* none for double_for_a_test"):
        rx.profile_function(double.bind, x, strict=True)
    rx.register_rule(double, lambda inputs, outputs, params: rx.OperationCounts(flops=inputs[0].shape[0]))
    profile = rx.profile_function(double.bind, x, strict=True)
    assert (profile.flops, profile.by_family["custom"].bytes) == (M, 2 * 8 * MN)


def test_a_rule_is_refused_for_what_has_one():
    for name in (lax.add_p, "add", "scan", "reshape", "jit"):
        with pytest.raises(ValueError, match="expected one without a rule"):
            rx.register_rule(name, lambda inputs, outputs, params: rx.OperationCounts())
    with pytest.raises(ValueError, match="rule: expected a function"):
        rx.register_rule("no_function", 3)
    with pytest.raises(ValueError, match="primitive: expected a Primitive"):
        rx.register_rule(3, lambda inputs, outputs, params: rx.OperationCounts())


def test_a_rule_that_gives_no_counts_is_refused():
    wrong = {"wrong_type": 3, "wrong_sign": rx.OperationCounts(flops=-1), "wrong_number": rx.OperationCounts(1.5)}
    for name, counts in wrong.items():
        primitive = Primitive(name)
        primitive.def_abstract_eval(lambda x: x)
        rx.register_rule(primitive, lambda inputs, outputs, params, counts=counts: counts)
        with pytest.raises(ValueError, match=f"rule of '{name}'"):
            rx.profile_function(primitive.bind, 1.0)


#: Primitives of `jax.lax` that no rule counts, on purpose: what they do is not said by shapes.
UNCOUNTED = {"custom_lin", "stage"}


def test_every_primitive_of_lax_is_counted():
    from jax.extend.core import primitives

    from rlxjax.jaxpr._registry import RESERVED, RULES

    found = {
        value.name for module in (lax, lax.linalg, primitives) for value in vars(module).values()
        if isinstance(value, Primitive)
    }  # fmt: skip
    assert len(found) > 150
    assert found - RULES.keys() - RESERVED <= UNCOUNTED
