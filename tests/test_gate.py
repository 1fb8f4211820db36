"""The IO gate: exact subtraction, the score in closed form, its laws, its relaxations and derivatives, refusals."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _tolerances import FLOAT32_RTOL, FLOAT64_RTOL

import rlxjax as rx

INF, NAN = float("inf"), float("nan")
FIELDS = tuple(field.name for field in dataclasses.fields(rx.IoFusionGate))
GATE = rx.IoFusionGate(700.0, 9_000.0, 150.0, 30.0, False, 4e6, 2_500.0)
SOFT = ("score_ns", "fuse_probability", "fuse_log_probability", "fuse_log_odds", "evaluate")


def table(n=64, seed=0):
    """Return gates and benefits with the signs and sizes that a graph's have."""
    rng = np.random.default_rng(seed)
    gate = rx.IoFusionGate(
        *(10 ** rng.uniform(low, low + 2, n) for low in (2, 3, 0.5, 0.5)), *rng.uniform(0, 1e6, (3, n))
    )
    gate = dataclasses.replace(gate, unified_memory=rng.integers(0, 2, n))
    small, large = rng.integers(-5, 6, (2, n)), rng.integers(-(2**30), 2**30, (2, n))
    return gate, rx.FusionBenefit(*small, *large)


def terms_size(gate, benefit):
    """Return the size of the terms that cancel in a score."""
    penalty = np.abs(benefit.sync_points_saved) * gate.host_thunk_penalty_ns
    return np.asarray(jax.tree.map(np.abs, benefit).score_ns(gate) + penalty)


# --- The exact subtraction -----------------------------------------------------------------------


def test_a_difference_of_one_survives_at_any_size():
    for size in (2**52, 2**53, 2**63, 2**64 - 2):
        before, after = rx.GraphIoProfile(*[size + 1] * 4), rx.GraphIoProfile(*[size] * 4)
        assert rx.fusion_benefit(before, after) == rx.FusionBenefit(1, 1, 1, 1)
        assert rx.fusion_benefit(after, before) == rx.FusionBenefit(-1, -1, -1, -1)
    unit = rx.IoFusionGate(1, 1, 1, 1, False, 0, 0)
    before, after = rx.GraphIoProfile(0, 0, 2**63 + 3, 2**52 + 2), rx.GraphIoProfile(0, 0, 2**63, 2**52 + 1)
    for x64 in (True, False):  # the exact difference is scored, not that of floats
        with jax.enable_x64(x64):
            assert unit.score_ns(before, after) == 3 + 1


# --- The score and its laws ----------------------------------------------------------------------


def test_a_score_grows_with_each_saving_and_scales_with_the_unit_of_time_and_its_base_is_antisymmetric_and_additive():
    gate, benefit = table(500)
    slack = FLOAT64_RTOL * terms_size(gate, benefit)
    assert np.array_equal(benefit.should_fuse(gate), benefit.score_ns(gate) >= gate.min_gain_ns)
    for name, count in vars(benefit).items():
        better = dataclasses.replace(benefit, **{name: count + np.arange(1, 501) ** 3})
        slack = FLOAT64_RTOL * terms_size(gate, better)
        assert np.all(gate.score_ns(better) >= gate.score_ns(benefit) - slack)
        assert np.all(better.score_ns(gate) >= benefit.score_ns(gate) - slack)
    fast = {name: getattr(gate, name) + 256 for name in ("memory_bw", "host_readback_bw")}
    gate = dataclasses.replace(gate, unified_memory=np.zeros(500), **fast)
    for unit in (2.0**-8, 2.0, 2.0**7):
        scaled = rx.IoFusionGate(**{n: value / unit if "bw" in n else value * unit for n, value in vars(gate).items()})
        np.testing.assert_array_equal(scaled.score_ns(benefit), gate.score_ns(benefit) * unit)
        np.testing.assert_array_equal(scaled.should_fuse(benefit), gate.should_fuse(benefit))
    a, b, c = (rx.GraphIoProfile(*np.random.default_rng(seed).integers(0, 2**40, (4, 500))) for seed in range(3))

    def base(x, y):
        return rx.fusion_benefit(x, y).score_ns(gate)

    np.testing.assert_array_equal(base(a, b), -base(b, a))
    size = sum(terms_size(gate, rx.fusion_benefit(x, y)) for x, y in ((a, b), (b, c), (a, c)))
    assert np.all(np.abs(base(a, b) + base(b, c) - base(a, c)) <= FLOAT64_RTOL * size)


def test_a_built_in_gate_goes_by_name_in_any_case_and_by_code():
    for target in rx.FusionTarget:
        gate = rx.io_fusion_gate_for_target(str(target))
        assert gate == rx.io_fusion_gate_for_target(target.upper()) == rx.io_fusion_gate_for_target(target)
    names = [["cpu", "cuda"], ["wgpu", "metal"]]
    found = jax.jit(rx.io_fusion_gate_for_target)(rx.FusionTarget.codes(np.array(names)))
    by_name = [[dataclasses.astuple(rx.io_fusion_gate_for_target(name)) for name in row] for row in names]
    np.testing.assert_array_equal(np.stack(dataclasses.astuple(found), -1), by_name)


# --- Relaxations, transformations, precision -----------------------------------------------------


def test_odds_probability_and_log_probability_agree_and_the_log_has_no_underflow():
    benefit = rx.FusionBenefit(1, -3, 0, 0)
    p, log_p, odds = (getattr(GATE, name)(benefit, temperature_ns=1e6) for name in SOFT[1:4])
    np.testing.assert_allclose(p, 1 / (1 + np.exp(-odds)), rtol=FLOAT64_RTOL)
    np.testing.assert_allclose(log_p, np.log(p), rtol=FLOAT64_RTOL)
    far = GATE.fuse_log_probability(benefit, temperature_ns=1.0)
    assert far == GATE.fuse_log_odds(benefit, temperature_ns=1.0) < -1e7


@pytest.mark.parametrize("x64", [True, False])
def test_scores_are_eager_compiled_and_of_a_loop_the_same_to_the_last_bit(x64):
    with jax.enable_x64(x64):
        gate, benefit = table(300)
        benefit = benefit.astype(float)
        for f in (rx.IoFusionGate.score_ns, rx.IoFusionGate.should_fuse):
            np.testing.assert_array_equal(jax.jit(f)(gate, benefit), f(gate, benefit))
        base = rx.FusionBenefit.score_ns
        np.testing.assert_array_equal(jax.jit(base)(benefit, gate), base(benefit, gate))
        rows = [jax.tree.map(lambda leaf, i=i: leaf[i].item(), (gate, benefit)) for i in range(300)]
        loop = [own.score_ns(saved) for own, saved in rows]
        np.testing.assert_array_equal(gate.score_ns(benefit), np.array(loop))
        np.testing.assert_array_equal(jax.vmap(rx.IoFusionGate.score_ns)(gate, benefit), np.array(loop))
        # Constants let compilers drop what keeps products from being contracted with sums.
        one, _ = rows[7]
        score_ns = one.score_ns(benefit)
        np.testing.assert_array_equal(jax.jit(one.score_ns)(benefit), score_ns)
        np.testing.assert_array_equal(jax.jit(lambda gate: gate.score_ns(benefit))(one), score_ns)


# --- Derivatives ---------------------------------------------------------------------------------


#: One program for all points.
gradient_of_score = jax.jit(jax.grad(lambda *x: rx.IoFusionGate.score_ns(*x), (0, 1)))


def test_a_gradient_is_the_count_that_a_coefficient_multiplies_at_singular_points_too():
    for unified, penalty, memory_bw, syncs in itertools.product(
        (0.0, 1.0), (0.0, 1e6, INF), (0.0, 0.5, 150.0), (-2.0, 0.0, 2.0)
    ):
        gate = dataclasses.replace(GATE, unified_memory=unified, host_thunk_penalty_ns=penalty, memory_bw=memory_bw)
        benefit = rx.FusionBenefit(3.0, syncs, 7680.0, -900.0)
        by_gate, by_benefit = gradient_of_score(gate, benefit)
        by_memory_bw = 900 / memory_bw**2 if memory_bw > 1 else 0.0
        by_readback_bw = 0.0 if unified else -7680 / 30**2
        expected = (3, syncs, by_memory_bw, by_readback_bw, 0, min(syncs, 0.0), 0)
        np.testing.assert_allclose(dataclasses.astuple(by_gate), expected, rtol=FLOAT64_RTOL)
        expected = (700, 1.0 if unified else 1 / 30, 1 / max(memory_bw, 1.0))
        by_launches, by_syncs, *by_bytes = dataclasses.astuple(by_benefit)
        np.testing.assert_allclose((by_launches, *by_bytes), expected, rtol=FLOAT64_RTOL)
        if syncs < 0 and penalty == INF:
            assert gate.score_ns(benefit) == -INF
            assert not gate.should_fuse(benefit)
        # At no sync point the slope lies between those on both sides; an infinite penalty has none.
        most = penalty if np.isfinite(penalty) else 0.0
        assert most * (syncs < 0) <= by_syncs - 9_000.0 <= most * (syncs <= 0)


def test_a_saturated_decision_has_finite_log_odds_and_gradients():
    gate = dataclasses.replace(GATE, min_gain_ns=0.0)

    def f(t, launches):
        return [getattr(gate, name)(rx.FusionBenefit(launches), temperature_ns=t) for name in SOFT[1:4]]

    both = jax.jit(lambda t, launches: (f(t, launches), jax.jacobian(f)(t, launches)))
    for launches in (1e300, -1e300, INF, -INF):
        assert np.isfinite(jax.tree.leaves(both(1e-3, launches))).all()
        assert np.sign(both(1e-30, launches)[0][2]) == np.sign(launches)


# --- What is refused -----------------------------------------------------------------------------


def test_a_price_that_no_machine_has_is_refused_when_a_gate_is_built_and_when_it_is_asked():
    benefit = rx.FusionBenefit(3, 0, 4096, 8192)
    for name, value in itertools.product(FIELDS, (-1.0, NAN, INF, 1e30, np.array([1.0, -1.0]))):
        gate = rx.IoFusionGate(**{name: value})
        if name == "min_gain_ns" and np.min(value) == -1.0:  # a loss that is taken
            continue
        if name.endswith(("_bw", "_penalty_ns")) and np.ndim(value) == 0 and value > 0:  # free, or forbidden
            assert np.isfinite(gate.score_ns(benefit))
            continue
        for ask in (lambda: rx.IoFusionGate.checked(**{name: value}), lambda: gate.score_ns(benefit)):  # noqa: B023
            with pytest.raises(ValueError, match=f"{name}: expected a number of at (least|most) "):
                ask()


ONE, SAVED = rx.GraphIoProfile(), rx.FusionBenefit()
MANY = (rx.GraphIoProfile(np.array([9, 5, 1]), 1, 2**30, 2**31), rx.GraphIoProfile(3, np.array([2, 1, 0]), 4, 2**31))
DISAGREES = r"expected shapes that broadcast together, got .* \(3,\), temperature_ns \(2,\)$"
HALVES = rx.GraphIoProfile(np.array([-1, 2]), 0, 0, 0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        *[(lambda bad=bad: rx.io_fusion_gate_for_target(bad), "target") for bad in ("gpu", "", 99, np.array([1.0]))],
        (lambda: rx.IoFusionGate.checked(memory_bw="fast"), "memory_bw"),
        (lambda: rx.IoFusionGate.checked(dispatch_ns=None), "dispatch_ns"),
        (lambda: rx.GraphIoProfile(1, 0, -100, 41).host_readback_bytes(False), "host_output_bytes"),
        (lambda: rx.GraphIoProfile(1, 0, 1, 1).host_readback_bytes("yes"), "unified_memory"),
        *[
            (
                lambda pair=pair: rx.fusion_benefit(*pair),
                f"{which}.kernel_launches: expected a count of at least 0, got",
            )
            for pair, which in (((HALVES, ONE), "before"), ((ONE, HALVES), "after"))
        ],
        *[
            (lambda f=f, given=given, options=options: getattr(GATE, f)(*given, **options), words)
            for f in ("should_fuse", *SOFT)
            for given, temperature_ns, words in [
                ((ONE,), 1.0, "after: expected the profile with fusion, got None"),
                ((SAVED, ONE), 1.0, "after: must be left out if the first argument is a FusionBenefit"),
                ((rx.FusionBenefit(NAN, 0, 0, 0),), 1.0, "launches_saved: expected numbers, got NaN"),
                ((rx.FusionBenefit([1, 2], [1, 2, 3], 0, 0),), 1.0, "broadcast"),
                ((SAVED,), 0.0, "temperature_ns: expected a positive number, got 0"),
                ((SAVED,), NAN, "temperature_ns: expected a positive number"),
                *[((SAVED,), None, "temperature_ns: expected a positive number")] * (f != "score_ns"),
                (MANY, np.array([1e5, 1e6]), DISAGREES),
                ((rx.fusion_benefit(*MANY),), [1e5, 1e6], DISAGREES),
            ]
            for options in [{} if f == "should_fuse" else {"temperature_ns": temperature_ns}]
            if options or isinstance(temperature_ns, float) and temperature_ns == 1.0
        ],
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_traced_integer_that_may_have_been_narrowed_is_refused():
    benefit = rx.FusionBenefit(*(np.array([2**40]) for _ in range(4)))
    score = jax.jit(lambda benefit: GATE.score_ns(benefit))
    expected = score(benefit)
    with jax.enable_x64(False):
        with pytest.raises(ValueError, match="launches_saved: expected a float count.*int32.*jax_enable_x64"):
            score(benefit)
        with pytest.raises(ValueError, match="kernel_launches.*uint32"):
            jax.jit(rx.fusion_benefit)(*[rx.GraphIoProfile(*(np.array([5], np.uint32),) * 4)] * 2)
        floats = score(benefit.astype(float))
    np.testing.assert_allclose(floats, expected, rtol=FLOAT32_RTOL)


# --- Tables --------------------------------------------------------------------------------------


def profile_columns(n=100):
    rng = np.random.default_rng(0)
    return [rx.GraphIoProfile(*(rng.integers(0, most, n) for most in (20, 4, 2**28, 2**40))) for _ in range(2)]


def floats(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, float), tree)


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_bad_count_is_refused_on_the_host_on_a_device_and_in_a_program(side):
    pair = dict(zip(("before", "after"), map(floats, profile_columns()), strict=True))
    for bad, as_column in itertools.product((-1.0, np.nan, -INF), (np.asarray, jnp.asarray)):
        counts = as_column(np.where(np.arange(100) == 99, bad, pair[side].host_output_bytes))
        bad_pair = {**pair, side: dataclasses.replace(pair[side], host_output_bytes=counts)}
        ask = lambda t, pair=bad_pair: GATE.evaluate(**pair, temperature_ns=t)  # noqa: E731
        for call in (ask, jax.jit(ask)):
            words = f"{side}.host_output_bytes: expected a count of at least 0, got {bad}"
            with pytest.raises(ValueError, match=words):
                call(1e5)
