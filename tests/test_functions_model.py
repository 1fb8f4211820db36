"""Predictions of any function: laws of what a calibration says, the kernels behind it, and the job that fits it."""

import dataclasses
import random
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _shapes import real
from _tolerances import FLOAT64_RTOL
from jax.extend.core import Primitive

import rlxjax as rx
from calibrate.suites.functions import timed_functions
from rlxjax.calibration import CalibratedModel, Calibration, predict_profiles
from rlxjax.fit import prior_posterior
from rlxjax.jaxpr import OPERATIONS
from rlxjax.models import FFT, FUNCTIONS, function_runs
from rlxjax.units import interval_text


def calibration(model=FUNCTIONS, most=1e12):
    domain = dict.fromkeys([*model.inputs, *model.kernels], (0.0, most))
    return Calibration({model.name: CalibratedModel(prior_posterior(model, spread=0.1), {}, {}, domain)}, None, {})


def mlp(x, w):
    return jax.nn.gelu(x @ w) @ w


def profiled(fn, *shapes):
    return rx.profile_function(fn, *(real(*shape) if isinstance(shape, tuple) else shape for shape in shapes))


def flops_of(fn, *shapes):
    return profiled(fn, *shapes).kernels.flops.sum()


def counts_of(fn, *shapes):
    return dict(zip(OPERATIONS, profiled(fn, *shapes).kernels.counts.sum(0).tolist(), strict=True))


def launches_of(fn, *shapes):
    kernels = profiled(fn, *shapes).kernels
    found = Counter()
    for name, launches in zip(kernels.operation_names(), kernels.launches.tolist(), strict=True):
        found[name] += launches
    return found


def any_program(seed):
    """Return a function of two matrices that takes and gives what a seed says."""
    chance = random.Random(seed)

    def run(x, y):
        values = [x, y]
        for _ in range(chance.randint(2, 12)):
            one, other = chance.choice(values), chance.choice(values)
            steps = [
                lambda one=one: one.T,
                lambda one=one: one * 2,
                lambda one=one: jnp.exp(one),
                lambda one=one: one - one.sum(-1, keepdims=True),
                lambda one=one: one.at[0].set(1.0),
                lambda one=one: jnp.concatenate([one[1:], one[:1]]),
                lambda one=one: jax.lax.scan(lambda carry, row: (carry + row, carry * 2), one[0], one)[1],
            ]
            if one.shape[1] == other.shape[0]:
                steps.append(lambda one=one, other=other: one @ other)
            if one.shape == other.shape:
                steps.append(lambda one=one, other=other: one + other)
            values.append(chance.choice(steps)())
        return [chance.choice(values) for _ in range(chance.randint(1, 3))]

    return run


def test_kernels_hold_all_the_work_and_all_the_traffic_and_inputs_are_counts():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        profiles = {name: rx.profile_function(one.fn, *one.abstract()) for name, one in timed_functions().items()}
    profiles |= {seed: profiled(any_program(seed), *[(8, 8 + 4 * (seed % 2))] * 2) for seed in range(60)}
    for name, profile in profiles.items():
        kernels = profile.kernels
        asked = kernels.operation != list(OPERATIONS).index("copy_beside")
        assert sum((kernels.read_bytes + kernels.written_bytes)[asked]) == profile.fused_traffic_bytes, name
        for column in jax.tree.leaves(kernels):
            assert column.dtype == np.int64, name
            assert np.all(column >= 0), name
        assert np.all(kernels.working_bytes >= kernels.read_bytes + kernels.written_bytes), name
        assert all(np.all(value >= 0) for value in jax.tree.leaves(function_runs([profile]))), name
        # Cheap work may be done again by a second reader; only of what is sliced, a part may be left out.
        is_whole = not any(
            "slice" in key or "gather" in key for row in range(len(kernels)) for key in kernels.operations(row)
        )
        if is_whole and isinstance(name, str):
            assert kernels.flops.sum() >= profile.flops, name
        if isinstance(name, str):
            assert kernels.launches.sum() <= profile.io.kernel_launches + len(kernels), name


def terms(x):
    """Return a polynomial of 8 products and 8 sums."""
    total = x
    for term in range(8):
        total = total * x + (term + 0.5)
    return total


def test_cheap_work_is_done_again_for_every_element_that_a_compiler_repeats():
    n, m = 64, 16
    assert flops_of(terms, (n,)) == 16 * n
    # A row that is repeated down the columns, and a column along the rows, which a loop keeps.
    assert flops_of(lambda x, y: terms(x)[None] * y, (n,), (m, n)) == (16 + 1) * m * n
    assert flops_of(lambda x, y: terms(x)[:, None] * y, (n,), (n, m)) == 16 * n + n * m
    # What holds an exponential is kept in memory.
    assert flops_of(lambda x, y: jnp.exp(terms(x))[None] * y, (n,), (m, n)) == 16 * n + m * n
    # Every slice, and every element that is looked up, by itself.
    assert flops_of(lambda x: terms(x)[1:] - terms(x)[:-1], (n,)) == (2 * 16 + 1) * (n - 1)
    index = jax.ShapeDtypeStruct((5 * n,), jnp.int32)
    assert flops_of(lambda x, i: terms(x).at[i].get(mode="clip"), (n,), index) == 16 * 5 * n


def test_one_kernel_computes_a_value_for_each_of_its_places_and_several_keep_it():
    n = 64

    def taps(y):
        return y[2:] + y[1:-1] + y[:-2]

    one = counts_of(lambda x: jnp.exp(x)[2:] + jnp.exp(x)[1:-1] + jnp.exp(x)[:-2], (n,))
    assert one["exp"] == counts_of(lambda x: taps(jnp.exp(x)), (n,))["exp"] == 3 * (n - 2)
    # Kernels of two results read the same exponential: it is kept.
    assert counts_of(lambda x: (lambda y: (taps(y), y * x))(jnp.exp(x)), (n,))["exp"] == n


def set_row(x):
    return x.at[0].set(1.0)


@pytest.mark.parametrize(
    ("fn", "shapes", "launches"),
    [
        # A reduction takes elementwise work on the way and no parts.
        (lambda x: jnp.exp(2 * x).sum(), [(64,)], {"reduce_sum_inner": 1}),
        (lambda x: jnp.abs(x[1:] - x[:-1]).max(), [(64,)], {"slice": 2, "reduce_max_inner": 1}),
        (lambda x, y: (x[None] * y).sum(-1), [(64,), (8, 64)], {"reduce_sum_inner": 1}),
        # Transposes cancel, and products read a matrix as it lies.
        (lambda x: x.T.T, [(48, 32)], {"copy": 1}),
        (lambda x: (2 * (x.T)).T, [(48, 32)], {"mul": 1}),
        (lambda w, v: v @ (2 * w.T), [(32, 32), (32,)], {"mul": 1, "dot_general": 1}),
    ],
)
def test_launches_in_closed_form(fn, shapes, launches):
    assert launches_of(fn, *shapes) == launches


def test_a_transpose_costs_by_how_it_is_read_and_an_update_of_an_argument_copies_it():
    wide = (48, 32)
    assert counts_of(lambda x: x.T, wide)["transpose_inner"] == 48 * 32
    assert counts_of(lambda x: x.T + 1.0, wide)["transpose_inner_untiled"] == 48 * 32  # beside a broadcast
    twice = counts_of(lambda x: x.T.T + 1, wide)
    assert twice["add"] == 48 * 32
    assert not twice["transpose_inner"] + twice["transpose_inner_untiled"]
    assert counts_of(lambda x, y: x.T @ y, wide, wide)["transpose_inner_untiled"] == 48 * 32
    assert not counts_of(lambda x, y: x @ y.T, wide, wide)["transpose_inner_untiled"]
    # Elements of the axis that becomes the last one, and the bytes between them.
    kernels = profiled(lambda x: x.T, wide).kernels
    assert (kernels.extent.tolist(), kernels.stride_bytes.tolist()) == ([48], [4 * 32])
    # Axes of one element move nothing.
    assert not launches_of(lambda x: x.T, (1, 64))
    for fn, copies in (
        (set_row, 1),
        (lambda x: set_row(2 * x), 0),
        (lambda x: (lambda y: (set_row(y), y.sum()))(2 * x), 1),
    ):
        assert launches_of(fn, (8, 64))["copy_beside"] == copies


@pytest.mark.parametrize("family", ["fft", "linear algebra", "matmul", "convolution", "sort", "scatter", "random"])
def test_a_rule_of_ones_own_prices_a_primitive_in_any_family(family):
    primitive = Primitive(f"priced_{family}_for_a_test")
    primitive.def_abstract_eval(lambda x: x)
    rx.jaxpr.register_rule(
        primitive, lambda inputs, outputs, params: rx.jaxpr.OperationCounts(10**9, 0, 10**9), family=family
    )
    both = [profiled(fn, (8, 8)) for fn in (primitive.bind, lambda x: x + 1)]
    of_dear, of_cheap = predict_profiles(calibration().of("functions"), both).predictions
    assert of_dear.time_ns > 10 * of_cheap.time_ns


def test_a_loop_is_its_body_so_many_times_launches_its_kernels_and_stacks_its_results():
    length = 5
    profile = profiled(lambda x: jax.lax.scan(lambda c, r: (c + r, c * 2), x[0], x), (length, 64))
    kernels = profile.kernels
    (stack,) = (row for row, name in enumerate(kernels.operation_names()) if name == "copy_beside")
    assert kernels.launches[stack] == length
    assert kernels.read_bytes[stack] + kernels.written_bytes[stack] == length * 2 * 64 * 4
    assert np.all((kernels.looped == 0) | (kernels.looped == kernels.launches))
    assert kernels.looped.sum() >= 2 * length
    assert profile.results == 2

    def looped(x):
        return jax.lax.scan(lambda y, _: (jnp.tanh(y @ y), None), x, None, length=7)[0]

    once, often = profiled(lambda y: jnp.tanh(y @ y), (8, 8)), profiled(looped, (8, 8))
    assert (often.trips, often.static_ops) == (7, once.static_ops)
    assert often.kernels.flops.tolist() == (7 * once.kernels.flops).tolist()
    assert often.kernels.operation.tolist() == once.kernels.operation.tolist()


@pytest.mark.parametrize(
    ("stride", "hole", "dilation", "padding"), [(1, 1, 1, (0, 0)), (2, 1, 2, (3, 1)), (3, 2, 1, (0, 4))]
)
def test_a_convolution_reads_runs_and_those_over_an_edge_one_by_one(stride, hole, dilation, padding):
    images, size, width, channels = 2, 9, 3, 5

    def convolve(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (stride,), (padding,), (hole,), (dilation,), dimension_numbers=("NWC", "WIO", "NWC")
        )

    arguments = real(images, size, channels), real(width, channels, 4)
    positions = jax.eval_shape(convolve, *arguments).shape[1]
    reach, last = (width - 1) * dilation, (size - 1) * hole
    starts = [place * stride - padding[0] for place in range(positions)]
    over_edges = sum(start < 0 or start + reach > last for start in starts)
    counts = counts_of(convolve, *arguments)
    assert counts["convolution_runs"] == images * positions
    assert counts["convolution_loads"] == images * positions * width * channels
    assert counts["convolution_edge_loads"] == images * over_edges * width * channels


def test_a_transform_takes_the_factors_of_its_length():
    def steps(*shape):
        transform = jnp.fft.fft if len(shape) == 1 else jnp.fft.fft2
        return counts_of(transform, jax.ShapeDtypeStruct(shape, jnp.complex64))["fft_steps"]

    assert steps(1024) == 1024 * 20
    assert steps(960) == 960 * (6 * 2 + 3 + 5)
    assert steps(64, 64) == 2 * 64 * steps(64)
    # A length without small factors is not squared, and costs more than the next power of two.
    assert steps(1024) < steps(1021) < 1021**2


def test_a_prediction_is_the_sum_of_its_terms_within_its_interval_and_is_extrapolated_beyond_what_was_measured():
    found = calibration().predict_function(mlp, real(64, 128), real(128, 128))
    assert found.low_ns < found.time_ns < found.high_ns
    np.testing.assert_allclose(sum(found.terms_ns.values()), found.time_ns, rtol=FLOAT64_RTOL)
    assert list(found.terms_ns.values()) == sorted(found.terms_ns.values(), reverse=True)
    assert found.in_domain
    said = interval_text(found.time_ns, found.low_ns, found.high_ns)
    assert str(found).splitlines()[0] == f"predicted: {said} a call; in brackets the 90 % interval"
    assert calibration().predict_function(mlp, real(6400, 128), real(128, 128)).time_ns > found.time_ns
    beyond = calibration(most=1.0).predict_function(mlp, real(64, 128), real(128, 128))
    assert not beyond.in_domain
    assert "extrapolated" in str(beyond)


def test_what_two_programs_share_cancels():
    known, shapes = calibration().of("functions"), [(512, 512)] * 2
    one, first = profiled(mlp, *shapes), profiled(lambda x, w: x @ w, *shapes)
    same = predict_profiles(known, [one, one]).decision([0], [1])
    assert (float(same.margin_ns), float(same.probability)) == (0, 0.5)
    times = predict_profiles(known, [one, first, one])
    apart = times.decision([0], [1, 2])
    # What is a program's own is a share of the smaller time, and less where the compiler's choices are counted.
    parts_ns = np.array([found.time_ns for found in times.predictions])
    least_ns = min(parts_ns[0], parts_ns[1:].sum())
    squares = [float(times.decision([0], [1, 2], own).margin_sd_ns) ** 2 for own in (0.0, 0.3)]
    assert squares[1] - squares[0] == pytest.approx((0.3 * least_ns) ** 2)
    compiled = [
        found._replace(profile=dataclasses.replace(found.profile, level="compiled")) for found in times.predictions
    ]
    assert times._replace(predictions=tuple(compiled)).decision([0], [1, 2]).margin_sd_ns < apart.margin_sd_ns
    np.testing.assert_allclose(float(apart.kept_ns), parts_ns[1:].sum(), rtol=1e-6)
    assert float(apart.margin_ns) > 0
    assert float(apart.probability) > 0.5


def test_a_calibration_without_functions_says_how_to_get_them():
    with pytest.raises(ValueError, match="got 'functions'; measure it with `rlxjax calibrate --only functio"):
        calibration(FFT).predict_function(jnp.tanh, real(8))
