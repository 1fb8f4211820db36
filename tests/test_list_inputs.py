"""Inputs of which a run has a list: zeros that fill it up change nothing, and all that takes runs takes lists."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
from _campaigns import made_up
from _models import file_content
from _tolerances import FLOAT64_RTOL, assert_close, assert_gradient_is_the_finite_difference

from calibrate.campaign import checked_cells
from calibrate.judge import fitted
from calibrate.samples import read_samples
from rlxjax import fit
from rlxjax.calibration import CalibratedModel, Calibration, CalibrationFile
from rlxjax.fit import Cell, Input, Runs, Timings, estimate, predicted_ns
from rlxjax.tables import evaluate


class Parts(fit.LatencyModel):
    """Calls, and parts each of which is bound by its bytes or by its FLOP; both ways to do them."""

    name, version, variants = "parts", 1, ("loop", "batch")
    listed = Input("units", least=0.0, step=0, default=0.0, is_list=True)
    inputs = {"calls": Input("calls"), "bytes": listed, "flop": listed}  # noqa: RUF012
    prior = fit.wide_prior({"call_ns": 1e3, "batch_ns": 5e3, "bytes_per_ns": 10.0, "flop_per_ns": 10.0})

    def terms_ns(self, coefficients, runs, facts):
        c, is_batch = coefficients, jnp.asarray(runs.variant) == 1
        moved_ns, done_ns = runs.inputs["bytes"] / c["bytes_per_ns"], runs.inputs["flop"] / c["flop_per_ns"]
        parts_ns = jnp.sum((moved_ns**2 + done_ns**2) / (moved_ns + done_ns + 1.0), -1)
        call_ns = jnp.where(is_batch, c["batch_ns"], c["call_ns"] * runs.inputs["calls"])
        return {"call_ns": call_ns, "parts_ns": parts_ns * jnp.where(is_batch, 1.0, 1.5)}


PARTS, TRUE_NS = Parts(), {"call_ns": 2e3, "batch_ns": 2e4, "bytes_per_ns": 4.0, "flop_per_ns": 30.0}
RNG = np.random.default_rng(0)
LISTS = [(10.0 ** RNG.uniform(3, 6, (2, count))).round().tolist() for count in RNG.integers(0, 6, 24)]
BYTES, FLOP = ([own[place] for own in LISTS] for place in (0, 1))
CALLS, CODES = np.tile([1.0, 4.0, 16.0], 8), np.arange(24) // 3 % 2
ROWS, COLUMNS = list(zip(CALLS, BYTES, FLOP, strict=True)), {"calls": CALLS, "bytes": BYTES, "flop": FLOP}
RUNS = Runs.checked(PARTS, CODES, **COLUMNS)
TIMINGS = Timings.checked(PARTS, variant=CODES, time_ns=predicted_ns(TRUE_NS, RUNS, {}), **COLUMNS)
KNOWN = CalibratedModel(fit.prior_posterior(PARTS), {}, {}, RUNS.hull())


class PartsSuite(fit.Suite):
    model = PARTS

    def cells(self):
        sizes = [{"calls": calls, "bytes": np.array(moved), "flop": done} for calls, moved, done in ROWS]
        return [Cell(f"cell {n}", PARTS.variants[CODES[n]], sizes[n], held_out=n % 8 == 0) for n in range(24)]


def test_lists_of_any_length_are_padded_to_one_and_more_zeros_change_nothing():
    assert (RUNS.shape, RUNS.inputs["bytes"].tolist()) == ((24,), [own + [0.0] * (8 - len(own)) for own in BYTES])
    wider = {name: np.pad(RUNS.inputs[name], [(0, 0), (0, 8)]) for name in ("bytes", "flop")}
    other = Runs.checked(PARTS, CODES, calls=CALLS, **wider)
    assert (other.inputs["flop"].shape, other.hull()) == ((24, 16), RUNS.hull())
    assert_close(*(estimate(KNOWN.posterior, runs) for runs in (other, RUNS)), FLOAT64_RTOL)
    assert Runs.checked(PARTS, 0, calls=3).inputs["flop"].tolist() == [0.0]
    spread = Runs.checked(PARTS, [0, 1], calls=[[1], [2], [3]], bytes=[5, 6, 7]).together().inputs
    assert jax.tree.map(np.shape, spread) == {"calls": (3, 2), "bytes": (3, 2, 4), "flop": (3, 2, 4)}


def test_jit_is_eager_vmap_is_a_loop_and_gradients_are_finite_differences():
    def time_ns(inputs, variant=CODES):
        runs = Runs.checked(PARTS, variant, **inputs)
        return KNOWN.predict_ns("loop", **inputs) + estimate(KNOWN.posterior, runs).time_ns

    eager = time_ns(RUNS.inputs)
    assert_close(jax.jit(time_ns)(RUNS.inputs), eager, FLOAT64_RTOL)
    assert_close(jax.vmap(time_ns)(RUNS.inputs, CODES), eager, FLOAT64_RTOL)
    loop_ns = jnp.array([KNOWN.predict_ns("batch", *row) for row in ROWS])
    assert_close(KNOWN.predict_ns("batch", *COLUMNS.values()), loop_ns, FLOAT64_RTOL)
    assert_gradient_is_the_finite_difference(functools.partial(time_ns, variant=1), RUNS.inputs)
    of_logs = jax.jacfwd(lambda logs: jnp.log(predicted_ns(jax.tree.map(jnp.exp, logs), RUNS, {})))
    expected = jnp.stack(jax.tree.leaves(of_logs(jax.tree.map(np.log, PARTS.prior.median))), -1)
    assert_close(estimate(KNOWN.posterior, RUNS).scores, expected @ KNOWN.posterior.factor, FLOAT64_RTOL)
    picks = [PARTS.variants[place] for place in KNOWN.pick_index(*COLUMNS.values())]
    assert picks == [KNOWN.pick(*map(np.array, row)) for row in ROWS]


def test_a_fit_recovers_coefficients_through_files_of_timings_of_samples_and_of_a_calibration(tmp_path):
    TIMINGS.to_parquet(path := tmp_path / "a.parquet")
    assert Timings.of(PARTS, path) == TIMINGS == Timings.of(PARTS, pq.read_table(path))
    own = fit.fit_posterior(TIMINGS)
    read = Calibration.from_file(CalibrationFile.model_validate(file_content(fits=[own])), [PARTS]).of("parts")
    assert (read.domain, own.terms.coefficients) == (RUNS.hull(), pytest.approx(TRUE_NS, rel=0.02))
    assert_close(*(estimate(known.posterior, RUNS).time_ns for known in (read, own)), 1e-6)
    few = Timings.checked(PARTS, variant=0, time_ns=[1.0, 2.0], calls=[1, 2], bytes=[[1.0], [2.0]])
    both, weights = fit.stack_timings([TIMINGS, few])
    assert (both.runs.shape, both.runs.inputs["flop"].shape, weights.sum()) == ((2, 24), (2, 24, 8), 26)
    suite, (cells, left_out) = PartsSuite(), checked_cells(PartsSuite())
    assert_close(fit.cell_runs(PARTS, cells), RUNS, 0.0)
    log = read_samples(made_up(tmp_path / "b.json", suite, TRUE_NS))
    assert (log.cells, left_out, {*log.cells}) == (cells, [], {*suite.cells()})
    assert fitted(suite, log, PARTS.prior).whole.terms.coefficients == pytest.approx(TRUE_NS, rel=0.1)


def test_evaluating_a_list_column_equals_the_loop_and_refuses_rows_one_by_one():
    more = {"calls": [1.0] * 3, "bytes": [[1, -1], [1, 2], None], "flop": [[1, 1], [3], [1]]}
    table = {name: [*COLUMNS[name], *own] for name, own in more.items()}
    answers, loop_ns = evaluate(table, KNOWN, strategy="loop"), [float(KNOWN.predict_ns("loop", *row)) for row in ROWS]
    assert answers["time_ns"].to_pylist() == pytest.approx([*loop_ns, None, None, None], rel=1e-6)
    assert all(answers["in_domain"].to_pylist()[: len(ROWS)])
    said = (
        "bytes: expected a size of at least 0.0, got -1.0",
        "got bytes of length 2 and flop of length 1",
        ", got null",
    )
    assert [*map(str.endswith, answers["rejected"].to_pylist()[len(ROWS) :], said)] == [True] * 3


def test_lists_that_cannot_be_are_refused_in_a_sentence(tmp_path):
    (path := tmp_path / "a.csv").write_text("calls,variant,bytes,time_ns\n1,loop,[1],5\n")
    runs = functools.partial(Runs.checked, PARTS, 0, calls=1)
    timings = functools.partial(Timings.checked, PARTS, variant="loop", time_ns=[1.0, 2.0], calls=[1, 2])
    for call, said in (
        (lambda: runs(bytes=[1, -2]), "bytes: expected a size of at least 0.0, got -2"),
        (
            lambda: runs(bytes=[1, 2], flop=[1]),
            "expected lists of the same length, got bytes of length 2 and flop of length 1",
        ),
        (lambda: timings(bytes=[[1], [1, 2]], flop=[[1], [1]]), "timings, run 1: expected lists of the same length"),
        (lambda: timings(bytes=[[1], [1, -2]]), "timings, row 1: bytes: expected a size of at least 0.0, got -2.0"),
        (lambda: Timings.of(PARTS, path), "bytes: a CSV cell cannot hold a list; use a Parquet file"),
    ):
        with pytest.raises(ValueError, match=rf"^[^\n]*{re.escape(said)}[^\n]*$"):
            call()
