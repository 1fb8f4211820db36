"""The rule of each primitive gives the FLOP, transcendentals, integer operations and bytes of a closed form."""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _shapes import complex_, flags, real, whole
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec

import rlxjax as rx

M, N, K, B = 6, 10, 14, 3


KEY = jax.eval_shape(lambda: jax.random.key(0))
MN = M * N
X, W, Z = real(M, N), whole(M, N), complex_(M, N)

#: name -> function, arguments, (FLOP, transcendentals, integer operations), bytes; each is one kernel.
CASES = {}


def case(name, function, args, counts=(0, 0, 0), moved=None):
    """Enter a primitive; unless told, it moves its operands and its results."""
    assert name not in CASES
    if moved is None:
        arrays = [*args, *jax.tree.leaves(jax.eval_shape(function, *args))]
        moved = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
    CASES[name] = function, args, counts, moved


def cases(names, args, counts, what=""):
    for name in names.split():
        case(name + what, getattr(lax, name), args, counts)


# Elementwise: one of each element.
cases("add sub mul div max min rem nextafter eq ne lt le gt ge", (X, X), (MN, 0, 0))
cases("neg abs floor ceil round sign square is_finite", (X,), (MN, 0, 0))
cases(
    "exp exp2 log expm1 log1p sqrt rsqrt cbrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh logistic "
    "erf erfc erf_inv lgamma digamma bessel_i0e bessel_i1e",
    (X,),
    (0, MN, 0),
)
cases("pow atan2 igamma igammac zeta polygamma", (X, X), (0, MN, 0))
cases("betainc", (X, X, X), (0, MN, 0))
cases("clamp", (X, X, X), (2 * MN, 0, 0))
case("reduce_precision", lambda x: lax.reduce_precision(x, 5, 10), (X,), (MN, 0, 0))
case("integer_pow 7", lambda x: x**7, (X,), (4 * MN, 0, 0))  # x2, x3, x6, x7
case("integer_pow -2", lambda x: lax.integer_pow(x, -2), (X,), (2 * MN, 0, 0))
cases("add mul bitwise_and bitwise_or bitwise_xor shift_left div max", (W, W), (0, 0, MN), " of integers")
cases("population_count clz bitwise_not", (W,), (0, 0, MN), " of integers")
for name, flops, more in (("add", 2, 0), ("mul", 6, 0), ("div", 11, 0), ("pow", 12, 5)):
    cases(name, (Z, Z), (flops * MN, more * MN, 0), " of complex")
for name, flops, more in (("neg", 2, 0), ("conj", 1, 0), ("exp", 2, 3), ("log", 4, 2), ("sin", 2, 4), ("abs", 3, 1)):
    cases(name, (Z,), (flops * MN, more * MN, 0), " of complex")

# Movement: no arithmetic, what is read and written.
case("select_n", lax.select, (flags(M, N), X, X))
case("convert_element_type", lambda x: x.astype(jnp.bfloat16), (X,))
case("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.int32), (X,))
case("broadcast_in_dim", lambda x: jnp.broadcast_to(x[None], (B, M, N)), (X,))
case("transpose", lambda x: x.T, (X,))
case("concatenate", lambda x, y: lax.concatenate([x, y], 0), (X, X))
case("pad", lambda x: lax.pad(x, np.float32(0), [(1, 1, 0), (0, 0, 0)]), (X,))
case("slice", lambda x: lax.slice(x, (0, 0), (2, N)), (X,))
case("rev", lambda x: lax.rev(x, (0,)), (X,))
case("iota", lambda: lax.iota(jnp.int32, N), ())
case("real", lax.real, (Z,))
case("complex", lax.complex, (X, X))
case("split", lambda x: lax.split(x, (2, M - 2)), (X,))


# Reductions: n - 1 operations for n elements.
def reduces(name, axes, args, counts, what=""):
    case(f"reduce_{name}{what}", lambda x: getattr(lax, f"reduce_{name}")(x, axes=axes), args, counts)


for name in ("sum", "prod", "max", "min"):
    reduces(name, (1,), (X,), (M * (N - 1), 0, 0))
    case(f"cum{name}", lambda x, name=name: getattr(lax, f"cum{name}")(x, axis=1), (X,), (M * (N - 1), 0, 0))
for name in ("and", "or", "xor"):
    reduces(name, (0, 1), (flags(M, N),), (0, 0, MN - 1))
reduces("sum", (0,), (W,), (0, 0, (M - 1) * N), " of integers")
reduces("sum", (0,), (Z,), (2 * (M - 1) * N, 0, 0), " of complex")
case("argmax", lambda x: lax.argmax(x, 1, jnp.int32), (X,), (M * (N - 1), 0, 0))
case("argmin", lambda x: lax.argmin(x, 0, jnp.int32), (X,), ((M - 1) * N, 0, 0))
case("cumlogsumexp", lambda x: lax.cumlogsumexp(x, axis=0), (X,), (4 * (M - 1) * N, 2 * (M - 1) * N, 0))
for name, function, start, size, step, counts in (
    ("sum", lax.add, 0.0, (2, 5), (1, 1), (M - 1) * (N - 4) * (2 * 5 - 1)),
    ("max", lax.max, -jnp.inf, (1, 3), (1, 3), M * 3 * 2),
):
    window = functools.partial(
        lax.reduce_window, init_value=start, computation=function, window_dimensions=size, window_strides=step
    )
    case(f"reduce_window_{name}", functools.partial(window, padding="VALID"), (X,), (counts, 0, 0))

# Products, convolutions, transforms, sorting.
products = 2 * M * N * K
case("dot_general", lax.dot, (real(M, K), real(K, N)), (products, 0, 0))
case("dot_general of integers", lax.dot, (whole(M, K), whole(K, N)), (0, 0, products))
case("dot_general of complex", lax.dot, (complex_(M, K), complex_(K, N)), (4 * products, 0, 0))
case("dot_general, batched", lambda a, b: a @ b, (real(B, M, K), real(B, K, N)), (B * products, 0, 0))
case("ragged_dot", lax.ragged_dot, (real(M, K), real(B, K, N), whole(B)), (products, 0, 0))


def convolved(name, image, kernel, flops, **options):
    options = {"window_strides": (1, 1), "padding": "VALID", "dimension_numbers": ("NHWC", "HWIO", "NHWC")} | options
    function = functools.partial(lax.conv_general_dilated, **options)
    case(f"conv_general_dilated{name}", function, (real(*image), real(*kernel)), (flops, 0, 0))


windows = 2 * 2 * 6 * 7
convolved("", (2, 8, 9, 4), (3, 3, 4, 5), windows * 5 * 3 * 3 * 4)
convolved(" in groups", (2, 8, 9, 4), (3, 3, 1, 8), windows * 8 * 3 * 3 * 1, feature_group_count=4)
# Of 11 positions 6, 5 and 6 meet an element under the first, second and third tap, not a hole between two.
holes = {"lhs_dilation": (2, 2), "padding": ((2, 2), (2, 2))}
convolved(", transposed", (1, 5, 5, 2), (3, 3, 2, 3), 2 * (6 + 5 + 6) ** 2 * 2 * 3, **holes)
for n in (16, 12):
    points = 5 * n * math.log2(n)
    for kind, given, share in (
        ("FFT", complex_(M, n), 1),
        ("RFFT", real(M, n), 2),
        ("IRFFT", complex_(M, n // 2 + 1), 2),
    ):
        transform = functools.partial(lax.fft, fft_type=kind, fft_lengths=(n,))
        case(f"{kind} of {n}", transform, (given,), (M * round(points / share), 0, 0))
case("fft2", lambda x: lax.fft(x, "FFT", (8, 4)), (complex_(B, 8, 4),), (B * 5 * 32 * 5, 0, 0))
case("sort", lambda x: lax.sort(x, dimension=1), (real(M, 16),), (M * 16 * 4, 0, 0))
pair = real(M, 17), whole(M, 17)
case("sort with a payload", lambda *x: lax.sort(x, dimension=1, num_keys=1), pair, (M * 17 * 5, 0, 0))
case("sort of integers", lambda x: lax.sort(x, dimension=0), (whole(16, N),), (0, 0, 16 * N * 4))
case("top_k", lambda x: lax.top_k(x, 4), (real(M, 100),), (M * 100 * 2, 0, 0))

# Parts of arrays: bytes touched, whatever the size of the operand.
ROWS = 4
GATHER = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
SCATTER = lax.ScatterDimensionNumbers((1,), (0,), (0,))
BIG, WHERE, UPDATES = real(1000, N), whole(ROWS, 1), real(ROWS, N)
case("gather", lambda x, i: lax.gather(x, i, GATHER, (1, N)), (BIG, WHERE), moved=4 * (2 * ROWS * N + ROWS))
for name, flops, passes in (("", 0, 2), ("_add", 1, 3), ("_mul", 1, 3), ("_max", 1, 3), ("_min", 1, 3)):
    scatter = functools.partial(getattr(lax, f"scatter{name}"), dimension_numbers=SCATTER)
    moved = 4 * (passes * ROWS * N + ROWS)
    case(f"scatter{name}", scatter, (BIG, WHERE, UPDATES), (flops * ROWS * N, 0, 0), moved)
moved, options = 2 * 4 * 6 + 2 * 4, {"allow_negative_indices": False}
case("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, i), (2, 3), **options), (X, whole()), moved=moved)
written = lambda x, y, i: lax.dynamic_update_slice(x, y, (i, i), **options)  # noqa: E731
case("dynamic_update_slice", written, (X, real(2, 3), whole()), moved=moved)

# Random numbers: 117 operations of Threefry for each block, one xor of its two words; a key has two words.
WORD = jax.ShapeDtypeStruct((), jnp.uint32)
case("random_bits", lambda key: jax.random.bits(key, (N,), jnp.uint32), (KEY,), (0, 0, 118 * N))
case("random_split", lambda key: jax.random.split(key, N), (KEY,), (0, 0, 117 * N))
case("random_fold_in", jax.random.fold_in, (KEY, WORD), (0, 0, 117))

# Linear algebra: the leading order of the textbooks.
S = 12
SQUARES, ONE, TALL = real(B, S, S), real(S, S), real(20, S)
LA = lax.linalg
case("lu", LA.lu, (SQUARES,), (B * (2 * S**3 // 3), 0, 0))
case("eigh", lambda a: LA.eigh(a, symmetrize_input=False), (SQUARES,), (B * 9 * S**3, 0, 0))
case("svd", lambda a: LA.svd(a, full_matrices=False), (TALL,), (14 * 20 * S**2 + 8 * S**3, 0, 0))
case("svdvals", lambda a: LA.svd(a, compute_uv=False), (TALL,), ((12 * 20 * S**2 - 4 * S**3) // 3, 0, 0))
solved = functools.partial(LA.triangular_solve, left_side=True, lower=True)
case("triangular_solve", solved, (ONE, real(S, N)), (S * S * N, 0, 0))
case("triangular_solve of complex", solved, (complex_(S, S), complex_(S, N)), (4 * S * S * N, 0, 0))
case("tridiagonal_solve", LA.tridiagonal_solve, (*[real(S)] * 3, real(S, N)), (8 * S * N, 0, 0))
case("hessenberg", LA.hessenberg, (ONE,), (10 * S**3 // 3, 0, 0))
case("schur", LA.schur, (ONE,), (25 * S**3, 0, 0))


def test_a_primitive_counts_by_its_closed_form():
    assert len(CASES) > 100
    for name, (function, args, counts, moved) in CASES.items():
        profile = rx.profile_function(function, *args, strict=True)
        assert (profile.flops, profile.transcendentals, profile.integer_ops) == counts, name
        assert (profile.io.kernel_launches, profile.io.device_traffic_bytes) == (1, moved), name
        assert profile.coverage_bytes == profile.coverage_equations == 1, name


def test_factorisations_that_come_with_other_work():
    for function, args, flops in [
        (jnp.linalg.cholesky, (SQUARES,), B * (S**3 // 3)),
        # R takes 2 n^2 (m - n / 3), and Q of n columns as much again.
        (jnp.linalg.qr, (TALL,), 2 * ((6 * 20 * S**2 - 2 * S**3) // 3)),
        (jnp.linalg.eigvals, (ONE,), 10 * S**3),
        (jnp.linalg.eig, (ONE,), 25 * S**3),
        (jnp.linalg.solve, (ONE, real(S, N)), 2 * S**3 // 3 + 2 * S * S * N),  # forward and backward
    ]:
        assert rx.profile_function(function, *args, strict=True).by_family["linear algebra"].flops == flops


def test_a_kernel_of_ones_own_counts_by_its_estimate_and_is_uncosted_without():
    from jax.experimental import pallas as pl

    def call(x, **options):
        return pl.pallas_call(lambda x, y: y.__setitem__(..., x[...] * 2), out_shape=x, **options)(x)

    estimate = pl.CostEstimate(flops=11, transcendentals=12, bytes_accessed=13)
    profile = rx.profile_function(lambda x: call(x, cost_estimate=estimate), jnp.ones((8, 128)))
    assert (profile.flops, profile.transcendentals, profile.io.device_traffic_bytes) == (11, 12, 13)
    profile = rx.profile_function(call, jnp.ones((8, 128)))
    assert profile.uncosted == {"pallas_call": 1}
    assert profile.io.device_traffic_bytes == 2 * 8 * 8 * 128


def test_every_device_of_a_mesh_counts():
    mesh = jax.sharding.AbstractMesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    split = PartitionSpec("i")
    added = jax.shard_map(lambda x: lax.psum(jnp.sin(x), "i"), mesh=mesh, in_specs=split, out_specs=PartitionSpec())
    profile = rx.profile_function(added, real(8, N), strict=True)
    assert (profile.flops, profile.transcendentals) == (8 * N, 8 * N)  # each device adds its part
    assert profile.io.kernel_launches == 2 * 4
    for collective in (
        functools.partial(lax.all_gather, axis_name="i"),
        functools.partial(lax.ppermute, axis_name="i", perm=[(0, 1)]),
        functools.partial(lax.psum_scatter, axis_name="i", scatter_dimension=1),
        functools.partial(lax.all_to_all, axis_name="i", split_axis=1, concat_axis=1),
        functools.partial(lax.pmean, axis_name="i"),
    ):
        sharded = jax.shard_map(collective, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
        assert rx.profile_function(sharded, real(8, 4), strict=True).io.kernel_launches >= 4


# --- Rules of one's own --------------------------------------------------------------------------


def primitive_of(name, runs=None):
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x, **_: x)
    if runs:
        primitive.def_impl(runs)
    return primitive


def test_a_rule_of_ones_own_counts_a_primitive_of_ones_own():
    double, x = primitive_of("double_for_a_test"), jnp.ones((M, N))
    profile = rx.profile_function(double.bind, x)
    assert profile.uncosted == {"double_for_a_test": 1}
    assert profile.coverage_equations == profile.coverage_bytes == 0
    assert profile.io.device_traffic_bytes == 2 * 8 * MN
    with pytest.raises(ValueError, match="strict: .* none for double_for_a_test"):
        rx.profile_function(double.bind, x, strict=True)
    rx.jaxpr.register_rule(double, lambda inputs, outputs, params: rx.jaxpr.OperationCounts(flops=inputs[0].shape[0]))
    profile = rx.profile_function(double.bind, x, strict=True)
    assert (profile.flops, profile.by_family["custom"].bytes) == (M, 2 * 8 * MN)


def test_a_rule_for_what_has_one_and_one_that_gives_no_counts_are_refused():
    counts = rx.jaxpr.OperationCounts
    for name, rule, words in (
        *((name, counts, "already has a rule") for name in (lax.add_p, "scan", "reshape", "jit")),
        ("no_function", 3, "rule: expected a function"),
        (3, counts, "primitive: expected a Primitive"),
    ):
        with pytest.raises(ValueError, match=words):
            rx.jaxpr.register_rule(name, rule)
    for name, wrong in {"wrong_type": 3, "wrong_sign": counts(flops=-1), "wrong_number": counts(1.5)}.items():
        primitive = primitive_of(name)
        rx.jaxpr.register_rule(primitive, lambda inputs, outputs, params, wrong=wrong: wrong)
        with pytest.raises(ValueError, match=f"rule of '{name}'"):
            rx.profile_function(primitive.bind, 1.0)


def fails(x):
    raise RuntimeError("cannot run here")


def test_a_librarys_primitive_counts_as_what_it_runs_and_is_uncosted_if_it_does_not_tell():
    scaled = primitive_of("scaled", lambda x, *, by: jnp.sin(x) * by)
    profile = rx.profile_function(lambda x: scaled.bind(x, by=2.0), X)
    written = rx.profile_function(lambda x: jnp.sin(x) * 2.0, X)
    assert (profile.flops, profile.transcendentals) == (MN, MN)
    assert (profile.equations, profile.coverage_equations, profile.peak_bytes) == (2, 1.0, written.peak_bytes)
    of_itself = primitive_of("of_itself")
    of_itself.def_impl(of_itself.bind)
    for primitive in (primitive_of("without"), primitive_of("failing", fails), of_itself):
        assert dict(rx.profile_function(primitive.bind, X).uncosted) == {primitive.name: 1}


def test_every_primitive_of_lax_is_counted():
    from jax.extend.core import primitives

    values = [value for module in (lax, lax.linalg, primitives) for value in vars(module).values()]
    found = {value.name for value in values if isinstance(value, Primitive)}
    uncounted = set()
    for name in found:
        with contextlib.suppress(ValueError):  # it has a rule
            rx.jaxpr.register_rule(name, lambda inputs, outputs, params: rx.jaxpr.OperationCounts())
            uncounted.add(name)
    assert len(found) > 150
    assert uncounted <= {"custom_lin", "stage"}  # what they do is not said by shapes
