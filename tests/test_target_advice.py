"""Advice for devices that are not there: laws of the verdict by a compiler's figures, and of a ranking."""

import dataclasses
import inspect
import json

import jax
import jax.numpy as jnp
import pytest
from _documented import assert_documented, assert_narrow
from _shapes import real
from pydantic import TypeAdapter
from typer.testing import CliRunner

import rlxjax as rx
from calibrate.cli import app
from rlxjax.choices import rank_targets
from rlxjax.jaxpr import GpuKernel, GpuKernelKind, GpuProgram, TargetProfile
from rlxjax.targets import DoesNotFitError, check_compiler, target_device, target_names

X = real(1000, 1000)
MB = 10**6


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
    kernel = GpuKernel(GpuKernelKind.ELEMENTWISE, kernels, read_bytes=moved // 2, written_bytes=moved // 2)
    return GpuProgram(arguments=1, results=1, kernels=(kernel,))


APART = {name: figures() for name in "abc"}


@pytest.fixture
def compiled(monkeypatch):
    """Return a setter of what a compiler makes of each group of stages: figures, or that it does not fit."""

    def set_to(made):
        def profile(fn, *args, trip_counts=None, level="jaxpr", target=None):
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
                estimates={},
                left_out={},
                compiler="a compiler 1.0",
                compile_seconds=0.0,
                gpu=launched(kernels, moved) if target.platform == "cuda" else None,
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
        monkeypatch.setattr("rlxjax.choices._rank_targets.profile_function", profile)
        monkeypatch.setattr("rlxjax.choices._rank_targets.check_compiler", lambda platform: None)

    return set_to


def of_two(target="tpu-v5e", **options):
    return rx.advise(STAGES[:2], X, target=target, **options)


def test_one_kernel_for_two_is_advised_and_the_reason_names_what_the_compiler_says(compiled):
    compiled(APART | {"ab": figures()})
    for target in ("tpu-v5e", "h100"):
        found = of_two(target)
        assert (found.verdict, found.target) == ("fuse", target)
        assert found.saved_calls == found.saved_launches == 1
        assert found.saved_traffic_bytes == 8 * MB
        assert found.recomputed_flops == found.recomputed_elements == 0
        assert "1 kernel for 2, 8 MB less" in found.reason
        assert "computes" not in str(found)
        assert ("nothing was measured" in found.stands_on) is (target == "tpu-v5e")
        assert "a compiler 1.0" in found.stands_on
        assert found.stands_on in str(found)
        assert found.code.startswith("fused = jax.jit(lambda x: second(first(x))")
        assert found["apart"].interval_ns[0] < found["apart"].time_ns < found["apart"].interval_ns[1]
    device = target_device("tpu-v5e")
    found = of_two()
    assert found.time_ns == pytest.approx(30_000 / device.clock_ghz + device.launch_ns)
    assert found["apart"].time_ns == pytest.approx(2 * found.time_ns)
    assert "30,000 cycles for 60,000" in found.reason
    assert of_two(min_gain_ns=1e9).verdict == "keep"


def test_more_cycles_are_kept_apart_and_figures_that_are_close_or_disagree_decide_nothing(compiled):
    compiled(APART | {"ab": figures(kilocycles=300)})
    assert (of_two().verdict, of_two().reason_code) == ("keep", "slower")
    compiled({name: figures(kilocycles=300) for name in "ab"} | {"ab": figures(2, 16, 603)})
    assert (of_two().verdict, of_two().reason_code) == ("undecided", "too_close")
    compiled({name: figures(kilocycles=300) for name in "ab"} | {"ab": figures(1, 16, 300)})
    assert of_two().verdict == "fuse"
    compiled({name: figures(kilocycles=300) for name in "ab"} | {"ab": figures(1, 400, 300)})
    assert (of_two().verdict, of_two().reason_code) == ("undecided", "too_close")
    assert "384 MB more" in of_two().reason


def test_programs_of_which_one_has_no_cycles_are_compared_by_the_data_sheet(compiled):
    compiled(APART | {"a": figures(kilocycles=None), "ab": figures(kilocycles=900)})
    found = of_two()
    assert found.verdict == "fuse"
    assert "a roofline" in found.stands_on
    assert "cycles" not in found.reason
    device = target_device("tpu-v5e")
    assert found.time_ns == pytest.approx(8 * MB / device.bandwidth_bytes_per_ns + device.launch_ns)


def test_what_does_not_fit_is_not_advised_and_is_named(compiled):
    memory = target_device("tpu-v5e").memory_bytes
    compiled(APART | {"ab": figures(peak=memory + 1)})
    found = of_two()
    assert (found.verdict, found.reason_code) == ("keep", "peak_memory")
    assert "ab" not in found.code
    compiled(APART | {"ab": 21 * 10**9})
    found = of_two()
    assert (found.verdict, found.reason_code) == ("keep", "peak_memory")
    assert "needs 21 GB at once" in found.reason
    compiled(APART | {"ab": figures(), "bc": figures(), "abc": 21 * 10**9})
    found = rx.advise(STAGES, X, target="tpu-v5e")
    assert found.verdict == "group"
    able = {own.name for own in found.alternatives if not own.failed}
    assert able == {"apart", "first+second | third", "first | second+third"}
    compiled(APART | {"b": 21 * 10**9, "ab": 42 * 10**9})
    found = of_two()
    assert (found.verdict, found.reason_code) == ("cannot model", "peak_memory")
    assert found.reason.startswith("second: ")
    compiled(APART | {"b": 21 * 10**9, "ab": figures(peak=12 * 10**9)})
    found = of_two()
    assert (found.verdict, found.reason_code, found.chosen.peak_bytes) == ("fuse", "peak_memory", 12 * 10**9)
    assert "one program needs 12 GB of 17.2: fits; second: " in found.reason
    assert found.code
    assert found.code in str(found)
    compiled(APART | {"b": figures(peak=2 * memory), "ab": figures(kilocycles=900)})
    found = of_two()
    assert (found.verdict, found.reason_code) == ("fuse", "peak_memory")
    assert found.code
    assert "second needs 34.4 GB of 17.2: does not fit" in found.reason


def test_of_three_stages_the_planner_finds_the_best_grouping(compiled):
    compiled(APART | {"ab": figures(), "bc": figures(3, 60, 500), "abc": figures(3, 60, 500)})
    found = rx.advise(STAGES, X, target="tpu-v5e")
    assert (found.verdict, found.groups) == ("group", (("first", "second"), ("third",)))
    assert len(found.alternatives) == 4
    assert found.gain_ns == found["apart"].time_ns - found.time_ns > 0


def test_a_ranking_has_what_fits_first_and_the_fastest_of_it_and_names_what_it_leaves_out(compiled):
    compiled(APART)
    ranking = rank_targets(first, X, targets=["tpu-v5e", "tpu-v6e", "h100"])
    times_ns = [row.time_ns for row in ranking.rows]
    assert times_ns == sorted(times_ns)
    assert ranking.best == ranking.rows[0].name
    assert ranking.left_out == {}
    assert all(row.fits and row.kernels == 1 and row.traffic_bytes == 8 * MB for row in ranking.rows)
    assert_narrow(str(ranking))
    compiled({"a": figures(peak=20 * 10**9)})
    ranking = rank_targets(first, X, targets=["tpu-v5e", "tpu-v6e"])
    assert [(row.name, row.fits) for row in ranking.rows] == [("tpu-v6e", True), ("tpu-v5e", False)]
    compiled({"a": 21 * 10**9})
    ranking = rank_targets(first, X)
    assert ranking.best is None
    assert len(ranking.rows) == len(target_names())
    assert {(row.time_ns, row.peak_bytes) for row in ranking.rows} == {(None, 21 * 10**9)}
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
    assert "1 kernel for 2" in result.stdout
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
        "measure: expected none with target": lambda: rx.advise([first, second], X, target="h100", measure="undecided"),
        "calibration: expected none": lambda: rx.advise([first, second], X, target="h100", calibration=tmp_path),
        "at least one target": lambda: rank_targets(first, X, targets=[]),
        "expected a known device": lambda: rank_targets(first, X, targets=["h1000000"]),
        "but first raised": lambda: rank_targets(first, "x"),
    }.items():
        with pytest.raises(ValueError, match=said) as caught:
            ask()
        assert "\n" not in str(caught.value)


def energy(x):
    return jnp.sum(x, axis=-1)


def compiler_of(target):
    try:
        check_compiler(target_device(target).platform)
    except ValueError as error:
        pytest.skip(str(error))
    return target


@pytest.mark.parametrize("target", ["tpu-v5e", "h100"])
def test_a_compiler_makes_one_kernel_of_a_scale_and_a_sum_and_its_bytes_are_those_of_the_equations(target):
    target = compiler_of(target)
    rows = real(4096, 4096)
    found = rx.advise([first, energy], rows, target=target)
    assert found.verdict == "fuse"
    assert found.saved_traffic_bytes == pytest.approx(2 * rows.size * 4, rel=1e-6)  # and a scalar, on a TPU
    assert found["together"].peak_bytes < found["apart"].peak_bytes
    ranking = rank_targets(jnp.tanh, rows, targets=[target])
    assert [(row.name, row.kernels, row.traffic_bytes) for row in ranking.rows] == [(target, 1, 2 * rows.size * 4)]
    huge = jax.ShapeDtypeStruct((2**20, 2**16), jnp.float32)
    assert not rank_targets(jnp.tanh, huge, targets=[target]).rows[0].fits
