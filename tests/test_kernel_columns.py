"""Runs that hold kernels: rows of zeros change nothing, and a fit of one's own model of kernels works throughout."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _models import file_content
from _tolerances import FLOAT64_RTOL, assert_close, assert_gradient_is_the_finite_difference

from rlxjax import fit
from rlxjax.calibration import CalibratedModel, Calibration, CalibrationFile
from rlxjax.fit import Input, Runs, Timings, estimate, predicted_ns


class Parts(fit.LatencyModel):
    """Calls, and kernels each of which is bound by its bytes or by its FLOP."""

    name, version, variants = "parts", 1, ("loop", "batch")
    inputs, kernels = {"calls": Input("calls")}, {"moved": "bytes", "flop": "FLOP"}  # noqa: RUF012
    prior = fit.wide_prior({"call_ns": 1e3, "batch_ns": 5e3, "bytes_per_ns": 10.0, "flop_per_ns": 10.0})

    def terms_ns(self, coefficients, runs, facts):
        c, is_batch = coefficients, jnp.asarray(runs.variant) == 1
        moved_ns, done_ns = runs.kernels["moved"] / c["bytes_per_ns"], runs.kernels["flop"] / c["flop_per_ns"]
        parts_ns = jnp.sum((moved_ns**2 + done_ns**2) / (moved_ns + done_ns + 1.0), -1)
        call_ns = jnp.where(is_batch, c["batch_ns"], c["call_ns"] * runs.inputs["calls"])
        return {"call_ns": call_ns, "parts_ns": parts_ns * jnp.where(is_batch, 1.0, 1.5)}

    def extents(self, runs):
        return {"calls": runs.inputs["calls"], "moved": runs.kernels["moved"].sum(-1)}


PARTS, TRUE_NS = Parts(), {"call_ns": 2e3, "batch_ns": 2e4, "bytes_per_ns": 4.0, "flop_per_ns": 30.0}
RNG = np.random.default_rng(0)
THERE = np.arange(8) < RNG.integers(0, 6, 24)[:, None]
KERNELS = {name: (10.0 ** RNG.uniform(3, 6, (24, 8))).round() * THERE for name in PARTS.kernels}
RUNS = Runs(PARTS, np.arange(24) // 3 % 2, {"calls": np.tile([1.0, 4.0, 16.0], 8)}, KERNELS)
TIMINGS = Timings(RUNS, np.asarray(predicted_ns(TRUE_NS, RUNS, {})))
POSTERIOR = fit.prior_posterior(PARTS)


def test_more_zeros_change_nothing_jit_is_eager_and_gradients_are_finite_differences():
    wider = dataclasses.replace(RUNS, kernels={name: np.pad(own, [(0, 0), (0, 8)]) for name, own in KERNELS.items()})
    assert wider.hull() == RUNS.hull()
    eager = estimate(POSTERIOR, RUNS)
    assert_close(estimate(POSTERIOR, wider), eager, FLOAT64_RTOL)
    assert_close(jax.vmap(functools.partial(estimate, POSTERIOR))(RUNS), eager, FLOAT64_RTOL)
    with jax.disable_jit():
        assert_close(estimate(POSTERIOR, RUNS), eager, FLOAT64_RTOL)
    of_logs = jax.jacfwd(lambda logs: jnp.log(predicted_ns(jax.tree.map(jnp.exp, logs), RUNS, {})))
    expected = jnp.stack(jax.tree.leaves(of_logs(jax.tree.map(np.log, PARTS.prior.median))), -1)
    assert_close(eager.scores, expected @ POSTERIOR.factor, FLOAT64_RTOL)

    def time_ns(kernels):
        return estimate(POSTERIOR, dataclasses.replace(RUNS, kernels=kernels)).time_ns

    assert_gradient_is_the_finite_difference(time_ns, KERNELS)


def test_a_fit_recovers_coefficients_through_devices_and_a_calibration_file():
    own = fit.fit_posterior(TIMINGS)
    assert own.terms.coefficients == pytest.approx(TRUE_NS, rel=0.02)
    read = Calibration.from_file(CalibrationFile.model_validate(file_content(fits=[own])), [PARTS]).of("parts")
    assert (read.domain, bool(np.all(read.covers(RUNS)))) == (RUNS.hull(), True)
    assert_close(*(estimate(known.posterior, RUNS).time_ns for known in (read, own)), 1e-6)
    few = jax.tree.map(lambda column: column[:2], TIMINGS)
    narrow = {name: column[:, :5] for name, column in few.runs.kernels.items()}
    both, weights = fit.stack_timings([TIMINGS, Timings(dataclasses.replace(few.runs, kernels=narrow), few.time_ns)])
    assert (both.runs.shape, both.runs.kernels["flop"].shape, weights.sum()) == ((2, 24), (2, 24, 8), 26)


def test_sizes_alone_are_refused_in_a_sentence():
    known = CalibratedModel(POSTERIOR, {}, {}, RUNS.hull())
    for call in (
        lambda: Runs.checked(PARTS, "loop", calls=1),
        lambda: Timings.checked(PARTS, variant="loop", calls=[1], time_ns=[1.0]),
        lambda: known.predict_ns("loop", calls=1),
        lambda: known.in_domain(calls=1),
    ):
        with pytest.raises(ValueError, match="^parts: expected a program, whose kernels give the inputs, got sizes$"):
            call()
