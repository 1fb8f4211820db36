"""Devices that are not there: laws of advice by a compiler's figures, of rankings, and of predictions."""

import dataclasses
import inspect
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _documented import assert_documented, assert_narrow
from _shapes import real
from pydantic import TypeAdapter
from typer.testing import CliRunner

import rlxjax as rx
from calibrate.cli import app
from rlxjax.calibration import known_gpu, predict_for_target, prior_calibration
from rlxjax.choices import rank_targets
from rlxjax.fit import COVERED_SDS, estimate, prior_posterior
from rlxjax.jaxpr import TargetProfile, gpu_program
from rlxjax.models import GPU_KERNELS, gpu_facts, gpu_runs
from rlxjax.targets import DoesNotFitError, check_compiler, target_device, target_names

X = real(1000, 1000)
MB, GB = 10**6, 10**9
TPU = target_device("tpu-v5e")


def first(x):
    return x + 1.0


def second(x):
    return x * 2.0 + x


def third(x):
    return x * 2.0 + x * x - x


#: Stages by the operations of each on a number, which add up to another sum for each group.
STAGES, WORK = [first, second, third], {1: "a", 2: "b", 4: "c", 3: "ab", 6: "bc", 7: "abc"}


def figures(kernels=1, megabytes=8, kilocycles=30, peak=10 * MB):
    return kernels, megabytes * MB, kilocycles and 1000 * kilocycles, peak


def launched(kernels, moved):
    """Return a program of so many kernels that move so many bytes each."""
    vector = f"f32[{moved // 8}]"
    steps = "".join(f"  %y{place + 1} = {vector} negate(%y{place})\n" for place in range(kernels))
    text = f"ENTRY %main (x: {vector}) -> {vector} {{\n  %y0 = {vector} parameter(0)\n{steps}"
    return gpu_program(f"{text}  ROOT %z = {vector} bitcast(%y{kernels})\n}}")


APART = {name: figures() for name in "abc"}


@pytest.fixture
def compiled(monkeypatch):
    """Return a setter of what a compiler makes of each group of stages: figures, or that it does not fit."""

    def set_to(made):
        def profile(fn, *args, trip_counts=None, level="jaxpr", target=None, mesh=None):
            written = rx.profile_function(fn, *args, trip_counts=trip_counts)
            if level == "jaxpr":
                return written
            own = made[WORK[written.flops // 10**6]]
            if isinstance(own, int):
                raise DoesNotFitError(f"target {target.name}: needs more", own, target.memory_bytes)
            kernels, moved, cycles, peak = own
            of = TargetProfile(
                device=target,
                devices=1,
                argument_bytes=4 * MB,
                output_bytes=4 * MB,
                temporary_bytes=0,
                peak_bytes=peak,
                collectives={},
                cycles=cycles if target.platform == "tpu" else None,
                own_cycles=cycles or 0,
                estimates={},
                left_out={},
                compiler="a compiler 1.0",
                compile_seconds=0.0,
                gpu=launched(kernels, moved) if target.platform == "cuda" else None,
                others=launched(0, moved).kernels if target.platform == "tpu" else None,
            )
            return dataclasses.replace(
                written,
                io=dataclasses.replace(written.io, kernel_launches=kernels, device_traffic_bytes=moved),
                fused_traffic_bytes=moved,
                peak_bytes=peak,
                level="compiled",
                target=of,
            )

        monkeypatch.setattr("rlxjax.choices._advise.profile_function", profile)
        monkeypatch.setattr("rlxjax.targets._rank.profile_function", profile)
        monkeypatch.setattr("rlxjax.targets._rank.check_compiler", lambda platform: None)

    return set_to


def of_two(target="tpu-v5e", **options):
    return rx.advise(STAGES[:2], X, target=target, **options)


def test_one_kernel_for_two_is_advised_and_the_reason_names_what_the_compiler_says(compiled):
    compiled(APART | {"ab": figures()})
    for target in ("h100", "tpu-v5e"):
        found = of_two(target)
        assert (found.verdict, found.target) == ("fuse", target)
        assert found.saved_calls == found.saved_launches == 1
        assert found.saved_traffic_bytes == 8 * MB
        assert found.recomputed_flops == found.recomputed_elements == 0
        assert "1 kernel instead of 2, 8 MB less traffic" in found.reason
        assert "recomputed" not in str(found)
        assert ("nothing was measured" in found.stands_on) is (target == "tpu-v5e")
        assert "a compiler 1.0" in found.stands_on
        assert found.stands_on in str(found)
        assert "fused = jax.jit(lambda x: second(first(x)))\n" in found.code
        assert found["apart"].interval_ns[0] < found["apart"].time_ns < found["apart"].interval_ns[1]
    assert found["apart"].time_ns == pytest.approx(2 * found.time_ns)
    assert "in a loop that waits for no result" in found.reason
    assert "30,000 cycles instead of 60,000" in found.reason
    assert of_two(min_gain_ns=1e9).verdict == "keep"


SLOW = {name: figures(kilocycles=300) for name in "ab"}


@pytest.mark.parametrize(
    ("made", "verdict", "code", "says"),
    [
        # More cycles are kept apart; figures that are close or disagree decide nothing.
        ({"ab": figures(kilocycles=300)}, "keep", "slower", ""),
        (SLOW | {"ab": figures(2, 16, 720)}, "undecided", "too_close", ""),
        # A form that needs less of one thing and more of nothing is better, whatever kernels take.
        (SLOW | {"ab": figures(2, 15, 600)}, "fuse", None, ""),
        # A call is one of these things: stages apart have more of them.
        (SLOW | {"ab": figures(1, 16, 300)}, "fuse", None, ""),
        (SLOW | {"ab": figures(1, 400, 300)}, "undecided", "too_close", "384 MB more"),
        # A program without cycles takes what its bytes take.
        # What does not fit is not advised, and is named.
        ({"ab": 21 * GB}, "keep", "peak_memory", "needs 21 GB of memory"),
        ({"b": 21 * GB, "ab": 42 * GB}, "cannot model", "peak_memory", "second: "),
        (
            {"b": 21 * GB, "ab": figures(peak=12 * GB)},
            *("fuse", "peak_memory", "one program needs 12 GB of 16.9 GB: fits; second: "),
        ),
        (
            {"b": figures(peak=2 * TPU.memory_bytes), "ab": figures(kilocycles=900)},
            *("fuse", "peak_memory", "second needs 33.8 GB of 16.9 GB: does not fit"),
        ),
    ],
)
def test_a_verdict_follows_from_what_the_compiler_says(compiled, made, verdict, code, says):
    compiled(APART | made)
    found = of_two()
    assert found.verdict == verdict
    assert found.reason_code == (code or found.reason_code)
    assert says in found.reason
    elsewhere = 'on a machine with tpu-v5e, without a target: rx.advise(..., measure="undecided")'
    assert (elsewhere in str(found)) is (verdict == "undecided")
    assert ("def" in found.code or "fused =" in found.code) is (verdict == "fuse")


def test_of_three_stages_the_planner_finds_the_best_grouping(compiled):
    compiled(APART | {"ab": figures(), "bc": figures(3, 60, 500), "abc": figures(3, 60, 500)})
    found = rx.advise(STAGES, X, target="tpu-v5e")
    assert (found.verdict, found.groups) == ("group", (("first", "second"), ("third",)))
    assert len(found.alternatives) == 4
    assert found.gain_ns == found["apart"].time_ns - found.time_ns > 0
    compiled(APART | {"ab": figures(), "bc": figures(), "abc": 21 * GB})
    found = rx.advise(STAGES, X, target="tpu-v5e")
    assert found.verdict == "group"
    able = {own.name for own in found.alternatives if not own.failed}
    assert able == {"apart", "first+second | third", "first | second+third"}


def test_a_ranking_has_what_fits_first_and_the_fastest_of_it_and_names_what_it_leaves_out(compiled):
    compiled(APART)
    ranking = rank_targets(first, X, targets=["tpu-v5e", "tpu-v6e", "h100"])
    times_ns = [row.time_ns for row in ranking.rows]
    assert times_ns == sorted(times_ns)
    assert ranking.best == ranking.rows[0].name
    assert ranking.left_out == {}
    assert all(row.fits and row.kernels == 1 and row.traffic_bytes == 8 * MB for row in ranking.rows)
    assert_narrow(str(ranking))
    compiled({"a": figures(peak=20 * GB)})
    ranking = rank_targets(first, X, targets=["tpu-v5e", "tpu-v6e"])
    assert [(row.name, row.fits) for row in ranking.rows] == [("tpu-v6e", True), ("tpu-v5e", False)]
    compiled({"a": 21 * GB})
    ranking = rank_targets(first, X)
    assert ranking.best is None
    assert len(ranking.rows) == len(target_names())
    assert {(row.time_ns, row.peak_bytes) for row in ranking.rows} == {(None, 21 * GB)}
    assert_narrow(str(ranking))


def test_the_command_answers_for_a_target_in_text_and_in_json(compiled, tmp_path, monkeypatch):
    (tmp_path / "target_stages.py").write_text(inspect.getsource(first) + "\n\n" + inspect.getsource(second))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    compiled(APART | {"ab": figures()})
    asked = ["advise", "target_stages:first", "target_stages:second", "--arg", "f32[1000,1000]", "--target", "tpu-v5e"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("fuse: one program saves")
    assert "1 kernel instead of 2" in result.stdout
    result = CliRunner().invoke(app, [*asked, "--json"])
    found = json.loads(result.stdout)
    assert_documented("advise", found)
    assert (found["target"], found["calibration"], found["cautions"]) == ("tpu-v5e", None, [])
    assert TypeAdapter(rx.Advice).validate_python(found).stands_on == found["stands_on"]  # as the report reads it
    for more in (["--measure", "always"], ["--target", "tpu-v5"]):
        result = CliRunner().invoke(app, [*asked, *more])
        assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)


def test_bad_questions_get_one_line(tmp_path):
    for said, ask in {
        "the nearest: ": lambda: rx.advise([first, second], X, target="tpu-v5"),
        "measure: leave it out with target": lambda: rx.advise([first, second], X, target="h100", measure="undecided"),
        "calibration: leave it out": lambda: rx.advise([first, second], X, target="h100", calibration=tmp_path),
        "at least one target": lambda: rank_targets(first, X, targets=[]),
        "expected a known device": lambda: rank_targets(first, X, targets=["h1000000"]),
        "but first raised": lambda: rank_targets(first, "x"),
    }.items():
        with pytest.raises(ValueError, match=said) as caught:
            ask()
        assert "\n" not in str(caught.value)


# --- Predictions --------------------------------------------------------------------------------

GPUS = [name for name in target_names() if target_device(name).platform == "cuda"]
COPY = launched(1, 2**30)


def log_sd(known):
    found = estimate(known.model.posterior, gpu_runs([COPY]))
    return float(np.hypot(np.asarray(found.log_sd()), known.model.pace_log_sd)[0])


def test_a_prediction_stands_on_timings_of_such_a_device_or_else_on_its_data_sheet_and_is_less_sure_then():
    for name in GPUS:
        known = known_gpu(target_device(name))
        is_timed = name in ("h100", "h200")
        assert known.stands_on.startswith("timings of one NVIDIA H" if is_timed else "the data sheet of NVIDIA")
        assert bool(known.model.domain) is is_timed
        assert set(known.model.provenance.values()) == {rx.gate.Provenance.UNCALIBRATED}
        assert known.model.posterior.facts == gpu_facts(target_device(name))
    assert log_sd(known_gpu(target_device("h100"))) < log_sd(known_gpu(target_device("a100")))
    # An interval of one long kernel is narrow where such a card was timed.
    assert all(np.exp(2 * COVERED_SDS * log_sd(known_gpu(target_device(name)))) < 2.5 for name in ("h100", "h200"))
    # The same program takes longer where the memory is slower.
    times = [
        float(estimate(known_gpu(target_device(name)).model.posterior, gpu_runs([COPY])).time_ns[0]) for name in GPUS
    ]
    bandwidths = [target_device(name).bandwidth_bytes_per_ns for name in GPUS]
    others = [place for place, name in enumerate(GPUS) if name not in ("h100", "h200")]
    for one, other in itertools.combinations(others, 2):
        if bandwidths[one] != bandwidths[other]:
            assert (times[one] > times[other]) == (bandwidths[one] < bandwidths[other])


def test_a_calibration_of_such_a_device_is_used_and_of_another_is_not():
    shipped = prior_calibration("gpu")
    posterior = prior_posterior(GPU_KERNELS)
    models = {GPU_KERNELS.name: dataclasses.replace(shipped.of("gpu_kernels"), posterior=posterior)}
    for kind, is_used in (("NVIDIA L4", True), ("NVIDIA A100", False)):
        own = dataclasses.replace(shipped, models=models, fingerprint={"device_kind": kind})
        known = known_gpu(target_device("l4"), own)
        assert (known.stands_on == "a calibration of NVIDIA L4") is is_used
        assert (known.model.coefficients == posterior.coefficients) is is_used


# --- With a compiler -----------------------------------------------------------------------------


def energy(x):
    return jnp.sum(x, axis=-1)


def compiler_of(target):
    try:
        check_compiler(target_device(target).platform)
    except ValueError as error:
        pytest.skip(str(error))


each_compiler = pytest.mark.parametrize("target", ["tpu-v5e", "h100"])


@each_compiler
def test_a_compiler_makes_one_kernel_of_a_scale_and_a_sum_and_its_bytes_are_those_of_the_equations(target):
    compiler_of(target)
    rows = real(4096, 4096)
    found = rx.advise([first, energy], rows, target=target)
    assert found.verdict == "fuse"
    assert found.saved_traffic_bytes == pytest.approx(2 * rows.size * 4, rel=1e-6)  # and a scalar, on a TPU
    assert found["together"].peak_bytes < found["apart"].peak_bytes
    ranking = rank_targets(jnp.tanh, rows, targets=[target])
    assert [(row.name, row.kernels, row.traffic_bytes) for row in ranking.rows] == [(target, 1, 2 * rows.size * 4)]
    huge = jax.ShapeDtypeStruct((2**20, 2**16), jnp.float32)
    assert not rank_targets(jnp.tanh, huge, targets=[target]).rows[0].fits


@each_compiler
def test_a_prediction_for_a_target_lies_in_its_interval_and_says_what_it_stands_on(target):
    compiler_of(target)
    rows = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    found = predict_for_target(jax.nn.softmax, rows, target=target)
    assert 0 < found.low_ns < found.time_ns < found.high_ns < np.inf
    np.testing.assert_allclose(sum(found.terms_ns.values()), found.time_ns)
    # The memory's bandwidth bounds it.
    assert found.high_ns > 2 * 4 * 4096**2 / target_device(target).bandwidth_bytes_per_ns
    assert (found.target, found.as_dict()["stands_on"]) == (target, found.stands_on)
    assert f"on {target}, based on {found.stands_on}" in str(found)
    shipped = prior_calibration("cpu")
    assert shipped.predict_function(jax.nn.softmax, rows, target=target).time_ns == found.time_ns
