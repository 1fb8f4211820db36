"""The suites that ship, and what a suite is by default."""

import dataclasses
import itertools
import sys

import jax
import numpy as np
import pytest
from _campaigns import SUITE, ToySuite, saved_model

import rlxjax as rx
from calibrate.suites import suite_of, suite_of_file
from calibrate.suites.functions import KINDS, Draw, FunctionsSuite, KernelsSuite, timed_functions
from calibrate.suites.welch import GRID_SAMPLES, HELD_OUT_BATCHES, HELD_OUT_N_FFTS, TIMED, WelchSuite, welch_cell
from rlxjax.calibration import sha256_of
from rlxjax.fit import cell_runs
from rlxjax.jaxpr import gpu_program
from rlxjax.learned import learned_program
from rlxjax.models import GPU_KERNELS, WELCH, gpu_inputs

CELLS = WelchSuite().cells()
FUNCTIONS_TIMED = timed_functions()
FAMILIES = {
    "elementwise", "reduction", "matmul", "convolution", "scan", "fft", "sort", "gather", "softmax", "layer norm",
    "attention", "mlp", "linear algebra", "random", "update",
}  # fmt: skip


def test_a_grid_gives_every_work_by_every_variant_and_holds_a_quarter_out():
    cells = SUITE.cells()
    works = {cell.work: {other.variant for other in cells if other.work == cell.work} for cell in cells}
    assert all(variants == set(SUITE.model.variants) for variants in works.values())
    assert 0.15 < np.mean([cell.held_out for cell in cells]) < 0.35
    for work in works:
        assert len({cell.held_out for cell in cells if cell.work == work}) == 1
    for name in SUITE.model.inputs:  # every value is seen
        assert {c.inputs[name] for c in cells if not c.held_out} == {c.inputs[name] for c in cells}

    def check(self, values):
        if values["rows"] > 4:
            raise ValueError("rows: expected few")

    class Few(ToySuite):
        model = type("FewRows", (type(SUITE.model),), {"check": check})()

    assert {cell.inputs["rows"] for cell in Few().cells()} == {1.0, 4.0}


def test_welch_peaks_are_timed_at_the_same_sizes_by_every_strategy_within_the_bound():
    works = {group: {cell.work for cell in CELLS if cell.group == group} for group in TIMED}
    assert not works.pop("learned")
    assert len({frozenset(own) for own in works.values()}) == 1
    assert max(cell.inputs["batch"] * cell.inputs["n_fft"] for cell in CELLS) <= GRID_SAMPLES
    for cell in CELLS:
        out = cell.inputs["batch"] in HELD_OUT_BATCHES or cell.inputs["n_fft"] in HELD_OUT_N_FFTS
        assert cell.held_out == out
        assert cell.n_bytes > 0
    assert set(WelchSuite.shown) <= {cell.work for cell in CELLS}
    runs = cell_runs(WELCH, [welch_cell(group, 4, 64, 99) for group in TIMED])
    assert [WELCH.variants[place] for place in runs.variant] == [variant for variant, *_ in TIMED.values()]
    np.testing.assert_array_equal(runs.inputs["n_segments"], [1, 2, 2, 2, 2, 2])
    np.testing.assert_array_equal(runs.inputs["k"], 33.0)  # what is beyond the bins is no peak


def test_all_strategies_of_a_work_run_alike_and_give_its_peaks():
    suite = WelchSuite()
    peaks = {group: np.asarray(suite.program(welch_cell(group, 3, 64, 4))()) for group in list(TIMED)[1:5]}
    assert {found.shape for found in peaks.values()} == {(3, 4, 2)}
    for found in peaks.values():
        np.testing.assert_allclose(found, peaks["fast"], rtol=1e-3)


def test_a_learned_fft_is_timed_at_its_length_and_its_work_is_a_fact_of_the_samples(tmp_path):
    files = [saved_model(tmp_path, 256, 8), saved_model(tmp_path, 32, 4)]
    suite = suite_of("welch", files)
    learned = [cell for cell in suite.cells() if cell.group == "learned"]
    assert {cell.inputs["n_fft"] for cell in learned} == {256, 32}
    assert [cell for cell in suite.cells() if cell.group != "learned"] == CELLS
    assert suite.given == {file.name: sha256_of(file) for file in files}
    for place, file in enumerate(files):
        model = rx.learned.load_learned_fft(file)
        work = learned_program(model, rx.WelchPeakParams.fast(model.n_fft, 1)).work
        facts = suite.facts()
        assert [facts[name][place] for name in ("learned_n_fft", "learned_flop", "learned_live_bins")] == [
            model.n_fft, *work
        ]  # fmt: skip
    with pytest.raises(ValueError, match="expected another n_fft in each file, got 256 again in"):
        suite_of("welch", [files[0], saved_model(tmp_path, 256, 9)])

    calibrated = rx.calibration.prior_calibration("cpu").of("welch").with_facts(**suite.facts())
    assert calibrated.predict_ns("learned", 64, 256, 16) > 0
    assert "learned" in calibrated.alternatives(64, 256, 16)
    assert "learned" not in calibrated.alternatives(64, 64, 16)


def test_functions_have_every_family_seen_and_held_out_and_rules_count_all_of_each():
    for held_out in (False, True):
        assert {one.family for one in FUNCTIONS_TIMED.values() if one.held_out == held_out} == FAMILIES
    assert 0.25 < np.mean([one.held_out for one in FUNCTIONS_TIMED.values()]) < 0.4
    arrays = [jax.tree.leaves(one.abstract()) for one in FUNCTIONS_TIMED.values()]
    n_bytes = [sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) for leaves in arrays]
    assert 0 < min(n_bytes) <= max(n_bytes) <= 100e6
    assert sum(n_bytes) <= 1e9
    for name, one in {name.rsplit(" ", 2)[0]: one for name, one in FUNCTIONS_TIMED.items()}.items():
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as such functions are used
            profile = rx.profile_function(one.fn, *one.abstract())
        assert profile.coverage_equations == 1, (name, profile.uncosted)
        assert not profile.unknown_loops


def test_a_function_that_the_suite_does_not_have_is_refused_and_others_are_profiled_again():
    suite = FunctionsSuite(KINDS[:1])
    cell = suite.cells()[0]
    assert suite.runs([rx.Cell(cell.name, "jitted", {"an_earlier_input": 1.0})]) == suite.runs([cell])
    with pytest.raises(ValueError, match="holds 'nope', which is no function of this suite"):
        suite.runs([rx.Cell("nope", "jitted", {})])
    np.testing.assert_array_equal(suite.program(cell)(), suite.program(cell)())


def test_without_64_bits_no_argument_has_them():
    with jax.enable_x64(False):
        few = timed_functions()
        dtypes = {leaf.dtype for one in few.values() for leaf in jax.tree.leaves(one.abstract())}
    assert 0 < len(few) < len(FUNCTIONS_TIMED)
    assert not dtypes & {np.dtype("float64"), np.dtype("complex128")}
    assert all(FUNCTIONS_TIMED[name].held_out == one.held_out for name, one in few.items())


def test_drawn_values_are_valid_and_of_what_is_traced():
    for values, dtype in itertools.product(
        ("normal", "positive", "definite"), ("float32", "float64", "bfloat16", "complex64")
    ):
        array = Draw((3, 24, 24), np.dtype(dtype), values).array(np.random.default_rng(0))
        assert (array.shape, array.dtype) == ((3, 24, 24), dtype)
        real = np.asarray(array.real, np.float64)
        if values == "positive":
            assert real.min() > 0
        if values == "definite" and dtype.startswith("float"):
            np.testing.assert_array_equal(real, np.swapaxes(real, -1, -2))
            assert np.linalg.eigvalsh(real).min() > 0

    for draw in (Draw((1000,), np.int32, below=7), Draw((), values="key")):
        array, abstract = draw.array(np.random.default_rng(0)), draw.abstract()
        assert (array.shape, array.dtype) == (abstract.shape, abstract.dtype)
    assert set(np.asarray(Draw((1000,), np.int32, below=7).array(np.random.default_rng(0))).tolist()) == set(range(7))


def test_the_suite_of_gpu_kernels_takes_what_samples_say_or_else_texts_and_refuses_neither():
    text = """ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %f = f32[8]{0} copy(%x)
}"""
    counts = gpu_inputs(gpu_program(text))
    cells = FunctionsSuite(KINDS[:1]).cells()
    assert not any(cell.compiled for cell in cells)  # nothing is compiled until it is timed
    said = KernelsSuite().runs([dataclasses.replace(cell, compiled=counts) for cell in cells])
    read = KernelsSuite({cell.name: text for cell in cells}).runs(cells)
    assert said == read == GPU_KERNELS.runs([counts] * len(cells))
    with pytest.raises(ValueError, match="without the counts of its compiled program"):
        KernelsSuite().runs(cells)


def test_a_file_has_a_suite_that_is_given_that_ships_or_that_a_package_offers_and_imports_none(tmp_path, monkeypatch):
    made = tmp_path / "largest-1.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: largest\nVersion: 1\n")
    (made / "entry_points.txt").write_text(
        "[rlxjax.suites]\nlargest = _campaigns:ToySuite\ngone = gone:SUITE\ntext = os:sep\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for found in (suite_of("largest"), suite_of_file("largest", "toy"), suite_of_file("any:thing", "toy", [SUITE])):
        assert found.model.name == "toy"
    assert suite_of_file("welch", "welch", [SUITE]).model is suite_of("welch").model
    for name, said in (
        ("_campaigns:SUITE", r"give its suite with --suite module:NAME \(the file names the suite _campaigns:SUITE\)"),
        ("", "give its suite with --suite module:NAME$"),
        ("gone", "--suite: the entry point gone does not load .ModuleNotFoundError"),
        ("text", "--suite: expected a rlxjax.Suite, text is of type str"),
    ):
        with pytest.raises(ValueError, match=said):
            suite_of_file(name, "toy")
    # An entry of the current folder is none of an installed package, and no module there stands for an installed one.
    (made / "entry_points.txt").write_text("[rlxjax.suites]\nown:S = evil:SUITE\nlargest = _campaigns:ToySuite\n")
    for name in ("evil", "_campaigns"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    for path in ("", str(tmp_path)):
        monkeypatch.setattr(sys, "path", [path, *(one for one in sys.path if one not in ("", str(tmp_path)))])
        for name in ("own:S", "largest"):
            with pytest.raises(ValueError, match="give its suite with --suite"):
                suite_of_file(name, "toy")
        with pytest.raises(ValueError, match="--suite: own does not import"):
            suite_of("own:S")
    (packages := tmp_path / "packages").mkdir()
    made.rename(packages / made.name)
    monkeypatch.setattr(sys, "path", ["", str(packages), *(one for one in sys.path if one not in ("", str(tmp_path)))])
    monkeypatch.delitem(sys.modules, "_campaigns")
    assert suite_of("largest").model.name == "toy"
    assert sys.path[0] == ""
