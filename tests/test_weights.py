"""The weights that machines share: laws of the columns that kernels give, their file, and how they are learned."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _shapes import real
from _tolerances import FLOAT64_RTOL, assert_close, assert_gradient_is_the_finite_difference

from benchmarks._learning import learned_weights, timed_programs
from rlxjax.calibration import CalibratedModel, predict_profiles
from rlxjax.fit import estimate, predicted_ns, prior_posterior
from rlxjax.jaxpr import OPERATIONS, profile_function, stacked
from rlxjax.models import (
    FUNCTIONS,
    FunctionCoefficients,
    function_runs,
    kernel_runs,
    read_weights,
    untimed_operations,
)
from rlxjax.models._weights import KnownWeights, wide_weights

RNG = np.random.default_rng(0)
WEIGHTS = jax.tree.map(lambda leaf: leaf * np.exp(RNG.normal(0.0, 0.3, leaf.shape)), wide_weights())
MACHINE = FunctionCoefficients()
STEPS = (jnp.exp, lambda x: x * 2.0 + 1.0, lambda x: x.sum(-1, keepdims=True) - x, lambda x: x @ x.T @ x, jnp.sin)
SIZES = ("arrays", "results", "trips", "static_ops", "peak_bytes")


def program(number, size):
    """Return the profile of some steps, one after another, in a loop in every fourth program."""
    steps = [STEPS[place] for place in np.random.default_rng(number).integers(0, len(STEPS), 1 + number % 3)]

    def run(x):
        return functools.reduce(lambda y, step: step(y), steps, x)

    if number % 4 == 3:
        return profile_function(lambda x: jax.lax.scan(lambda y, _: (run(y), None), x, None, length=5)[0], real(8, 8))
    return profile_function(run, real(8, size))


PROFILES = [program(number, 4 ** (1 + number % 7)) for number in range(40)]
KERNELS = stacked([profile.kernels for profile in PROFILES])
COLUMNS = {name: np.array([getattr(profile, name) for profile in PROFILES], float) for name in SIZES}


def log_ns(weights, machine, kernels=KERNELS, sizes=COLUMNS):
    """Return the logarithms of what programs take, `[*batch]`."""
    return jnp.log(predicted_ns(machine, kernel_runs(kernels, weights, **sizes), {}))


#: The same as one program of each shape.
JITTED = jax.jit(log_ns)


def test_jit_is_eager_vmap_is_a_loop_and_rows_of_zeros_change_nothing():
    rows = (jax.tree.map(lambda column: column[row], (KERNELS, COLUMNS)) for row in range(40))  # noqa: B023
    loop = jnp.stack([JITTED(WEIGHTS, MACHINE, *row) for row in rows])
    assert_close(log_ns(WEIGHTS, MACHINE), loop, FLOAT64_RTOL)
    assert_close(JITTED(WEIGHTS, MACHINE), loop, FLOAT64_RTOL)
    mapped = jax.jit(jax.vmap(log_ns, (None, None, 0, 0)))
    assert_close(mapped(WEIGHTS, MACHINE, KERNELS, COLUMNS), loop, FLOAT64_RTOL)
    wide = stacked([profile.kernels for profile in PROFILES], 4 * len(KERNELS))
    assert_close(JITTED(WEIGHTS, MACHINE, wide), loop, FLOAT64_RTOL)
    runs = [function_runs(PROFILES), kernel_runs(wide, **COLUMNS)]
    assert_close(*(estimate(prior_posterior(FUNCTIONS), own) for own in runs), FLOAT64_RTOL)


def test_a_prediction_is_the_sum_of_its_terms():
    runs = kernel_runs(KERNELS, WEIGHTS, **COLUMNS)
    terms = FUNCTIONS.terms_ns(MACHINE, runs, {})
    assert_close(sum(terms.values()), predicted_ns(MACHINE, runs, {}), FLOAT64_RTOL)
    assert all(np.all(part >= 0) for part in terms.values())


def test_gradients_by_weights_and_coefficients_are_finite_differences():
    each = jax.vmap(lambda unknowns, *own: log_ns(*unknowns, *own))
    unknowns = jax.tree.map(lambda leaf: np.stack([leaf] * 10), (WEIGHTS, MACHINE))
    some = jax.tree.map(lambda column: column[::4], (KERNELS, COLUMNS))
    assert_gradient_is_the_finite_difference(each, unknowns, *some)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(jax.jit(jax.jacfwd(log_ns))(WEIGHTS, MACHINE)))


def test_a_prediction_grows_with_every_count_and_with_more_kernels():
    shared = ("shared_read_bytes", "shared_written_bytes", "shared_flop")  # sharing saves time
    alone = dataclasses.replace(WEIGHTS, **{name: 1e30 * getattr(WEIGHTS, name) for name in shared})
    of_counts = jax.grad(lambda own: jnp.sum(log_ns(alone, MACHINE, dataclasses.replace(KERNELS, counts=own))))
    before, of_counts = JITTED(alone, MACHINE), jax.jit(of_counts)
    slopes = np.asarray(of_counts(KERNELS.counts.astype(float)))
    assert np.all(slopes >= 0)
    assert np.all(slopes[KERNELS.launches > 0] > 0)
    for name in ("read_bytes", "written_bytes", "rows"):
        more = dataclasses.replace(KERNELS, **{name: 2 * getattr(KERNELS, name)})
        assert np.all(JITTED(alone, MACHINE, more) >= before), name
    sizes = ("family", "operation", "itemsize", "is_exact", "extent", "stride_bytes", "alignment")
    twice = {name: 2 * column for name, column in vars(KERNELS).items() if name not in sizes}
    assert np.all(JITTED(alone, MACHINE, dataclasses.replace(KERNELS, **twice)) > before)


def test_a_loop_dispatches_its_kernels_once_its_iterations_move_much_or_call_a_library():
    def dispatched(step, *shapes):
        def run(x, *rest):
            return jax.lax.scan(lambda x, _: (step(x, *rest), None), x, None, length=64)[0]

        profile = profile_function(run, *(real(*shape) for shape in shapes))
        runs = function_runs([profile])
        return float(runs.kernels["dispatched"].sum()) / 64, runs

    few, runs = dispatched(lambda x: jnp.tanh(x) * 0.5, (4,))
    many, _ = dispatched(lambda x: jnp.tanh(x) * 0.5, (4096,))
    assert few < 0.1 * many
    small_products, of_products = dispatched(lambda x, a: jnp.tanh(a @ (a @ (a @ x))), (6, 6), (6, 6))
    vectors, _ = dispatched(lambda x, a: jnp.tanh(a @ (a @ (a @ x))), (64,), (64, 64))
    transforms, _ = dispatched(lambda x: jnp.fft.irfft(jnp.fft.rfft(x) * 0.5), (16,))
    assert min(small_products, transforms) > 5 * vectors > 5 * many
    # 500 steps of a small Kalman filter took 2.5 ms: iterations of library calls take microseconds, not 0.2 of one.
    time_ns = estimate(prior_posterior(FUNCTIONS), of_products).time_ns[0]
    assert 1e3 < time_ns / 64 < 1e4
    assert time_ns > 5 * estimate(prior_posterior(FUNCTIONS), runs).time_ns[0]


def test_a_file_gives_the_weights_back_and_another_one_is_refused_in_a_sentence(tmp_path):
    medians = {field.name: 2.0 for field in dataclasses.fields(MACHINE)}
    known = KnownWeights(WEIGHTS, medians, dict.fromkeys(medians, 0.5), 0.25, {"corpora": ["one"]})
    (path := tmp_path / "weights.json").write_text(known.text())
    back = read_weights(path)
    assert_close(back.weights, WEIGHTS, 1e-5)
    assert (back.text(), back.median, back.log_sd) == (known.text(), known.median, known.log_sd)
    assert (back.scatter, back.provenance) == (known.scatter, known.provenance)
    content = json.loads(known.text())
    for text, said in (
        (json.dumps(content | {"vocabulary": "other"}), "got version 3 of other"),
        (json.dumps(content | {"version": 99}), "got version 99 of"),
        (json.dumps({key: content[key] for key in content if key != "weights"}), "no file of weights (KeyError: "),
        (json.dumps(content | {"coefficients": {"call_ns": 3.0}}), "no file of weights (TypeError: "),
        (json.dumps(content | {"coefficients": []}), "no file of weights ("),
        (json.dumps(content | {"operations": dict.fromkeys(OPERATIONS, {"ns": [1.0], "log_sd": [1.0]})}), "5 of each"),
        (known.text()[:99], "no file of weights (JSONDecodeError: "),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}: [^\n]*{re.escape(said)}[^\n]*$"):
            read_weights(path)


@pytest.mark.slow  # compiling the steps takes most of it
def test_weights_are_learned_from_times_of_known_ones():
    time_ns = np.exp(log_ns(WEIGHTS, MACHINE))
    groups = timed_programs(PROFILES, time_ns, [0] * 40, [0] * 40)
    known, machines, paces = learned_weights(groups, {"of": "a test"}, steps=40)
    found = log_ns(known.weights, jax.tree.map(lambda leaf: leaf[0], machines)) + paces[0]
    assert np.max(np.abs(np.expm1(found - np.log(time_ns)))) < 0.05
    assert dict(known.provenance) == {"of": "a test"}
    counted = np.any(KERNELS.counts > 0, (0, 1))
    assert known.weights.timed().tolist() == counted.tolist()
    with pytest.raises(ValueError, match="^groups: expected timed programs, got none$"):
        learned_weights([])


def test_an_operation_that_no_machine_timed_is_named_and_widens_the_interval():
    domain = dict.fromkeys([*FUNCTIONS.inputs, *FUNCTIONS.kernels], (0.0, 1e15))
    prior = prior_posterior(FUNCTIONS, spread=0.1)
    known = CalibratedModel(dataclasses.replace(prior, factor=0.0 * prior.factor), {}, {}, domain)
    profiles = [profile_function(fn, real(512, 512)) for fn in (jnp.linalg.eig, jnp.linalg.eigh)]
    spreads = []
    for profile, found in zip(profiles, predict_profiles(known, profiles).predictions, strict=True):
        assert (found.untimed, found.in_domain) == (untimed_operations(profile), not untimed_operations(profile))
        assert all(name in str(found) for name in found.untimed)
        spreads.append(found.high_ns / found.low_ns)
    assert {OPERATIONS[name] for name in untimed_operations(profiles[0])} == {"factorisation"}
    assert untimed_operations(profiles[1]) == ()
    assert spreads[0] > 5 * spreads[1]


def test_counts_are_exact_integers_and_floats_beyond_64_bits():
    def looped(length):
        fn = functools.partial(jax.lax.fori_loop, 0, length, lambda _, x: jnp.tanh(x @ x))
        return profile_function(fn, real(4, 4)).kernels

    once, often, beyond = (looped(length) for length in (1, 3 * 10**9 + 1, 2**31 - 1))
    for kernels in (once, often, beyond):
        assert {column.dtype for column in jax.tree.leaves(kernels)} == {np.dtype(np.int64)}
    assert often.counts.tolist() == [[count * (3 * 10**9 + 1) for count in row] for row in once.counts.tolist()]
    assert often.looped.tolist() == often.launches.tolist()
    nested = profile_function(
        lambda x: jax.lax.scan(
            lambda y, _: (jax.lax.fori_loop(0, 2**31 - 1, lambda _, z: z @ z, y), None), x, None, length=2**31 - 1
        )[0],
        real(64, 64),
    ).kernels
    assert nested.flops.dtype == nested.counts.dtype == np.float64
    assert nested.flops.max() == 2.0 * 64**3 * (2**31 - 1) ** 2 >= 2.0**63
    assert np.isfinite(log_ns(WEIGHTS, MACHINE, nested, dict.fromkeys(SIZES, 1.0)))
