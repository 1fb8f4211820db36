"""The public names, their documentation, and what importing the package does not do."""

import dataclasses
import doctest
import inspect
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import rlxjax as rx

PUBLIC_NAMES = [
    "Advice",
    "BACKEND_ROWS",
    "BackendCoefficients",
    "BranchSpread",
    "CalibratedModel",
    "Calibration",
    "CalibrationFileError",
    "CoefficientSet",
    "Crossover",
    "Decision",
    "Design",
    "Device",
    "DeviceFits",
    "DeviceRanking",
    "Disagreement",
    "Explanation",
    "FftLatencyCoefficients",
    "FitResult",
    "Flip",
    "FunctionPrediction",
    "FunctionProfile",
    "FusedKernel",
    "FusionBenefit",
    "FusionEdge",
    "FusionPlan",
    "GateEvaluation",
    "Graph",
    "GraphIoProfile",
    "Grouping",
    "Input",
    "IoFusionGate",
    "LatencyCoefficients",
    "LatencyEstimate",
    "LatencyModel",
    "LatencyPosterior",
    "LatencyPrior",
    "LearnedFft",
    "LearnedFftFileError",
    "MachineMismatchWarning",
    "Measured",
    "Node",
    "OperationCounts",
    "PosteriorFit",
    "Provenance",
    "REWRITES",
    "ReferenceStrategy",
    "Runs",
    "SoftWelchPeaksCosts",
    "StageCost",
    "StagePlan",
    "StrategyCoefficients",
    "StrategyExplanation",
    "StrategySpec",
    "Target",
    "Timings",
    "ToneSignals",
    "TrainingResult",
    "UnknownLoop",
    "WelchPeakParams",
    "WelchPeaksCostEstimates",
    "WelchPeaksEvaluation",
    "WelchPeaksGateBreakdown",
    "advise",
    "algorithm_bandwidth_gbps",
    "backend_coefficients",
    "block_graph_ns",
    "coefficient_set",
    "decision",
    "default_calibration",
    "device_cost_ns",
    "estimate",
    "estimate_welch_peaks_costs",
    "evaluate_welch_peaks",
    "execute_kernel",
    "execute_plan",
    "fit_devices",
    "fit_latency",
    "fit_posterior",
    "fused_graph_ns",
    "fusion_benefit",
    "fusion_target",
    "graph_cost_ns",
    "host_fft_profile",
    "host_path_ns",
    "information_gain",
    "io_cost_ns",
    "io_fusion_gate_for_target",
    "is_fused_viable",
    "is_gpu_device",
    "learned_spectrum",
    "load_calibration",
    "load_learned_fft",
    "next_measurements",
    "node_io_bytes",
    "padded_batch",
    "parse_welch_peaks_strategy",
    "peak_recall",
    "pick_weights",
    "pick_welch_peaks_strategy",
    "plan_fusion",
    "plan_stages",
    "pooled_prior",
    "predicted_ns",
    "prior_calibration",
    "prior_posterior",
    "profile_function",
    "profile_graph_io",
    "rank_devices",
    "register_rule",
    "rewrite_graph",
    "save_calibration",
    "save_learned_fft",
    "select_peaks_only_outputs",
    "soft_estimate_welch_peaks_costs",
    "soft_fused_graph_ns",
    "soft_graph_cost_ns",
    "soft_io_cost_ns",
    "soft_maximum",
    "soft_minimum",
    "soft_pick_welch_peaks_strategy",
    "soft_plan_ns",
    "soft_relu",
    "soft_step",
    "stack_timings",
    "straight_through",
    "stream_welch_peaks",
    "temperature_from_sd",
    "tensor_bytes",
    "train_learned_fft",
    "transferred_prior",
    "useful_bytes_touched",
    "welch_peaks",
    "welch_peaks_fusion_gate_breakdown",
    "welch_peaks_graph",
    "wide_prior",
]

#: What people who know the reference look for (SPEC, section 11), as far as it is here, and their methods.
SPECIFIED = {
    "Graph": "input param constant add set_outputs",
    "GraphIoProfile": "host_readback_bytes",
    "FusionBenefit": "score_ns should_fuse",
    "IoFusionGate": "score_ns should_fuse fuse_probability",
    "WelchPeakParams": "ultra fast reference",
    "Calibration": "predict_ns pick",
    "load_calibration": "",
    "profile_graph_io": "",
    "fusion_benefit": "",
    "io_fusion_gate_for_target": "",
    "welch_peaks_graph": "",
    "welch_peaks": "",
    "estimate_welch_peaks_costs": "",
    "WelchPeaksCostEstimates": "",
    "welch_peaks_fusion_gate_breakdown": "",
    "pick_welch_peaks_strategy": "",
    "parse_welch_peaks_strategy": "",
    "fused_graph_ns": "",
    "block_graph_ns": "",
    "host_fft_profile": "",
    "useful_bytes_touched": "",
    "algorithm_bandwidth_gbps": "",
    "io_cost_ns": "",
    "graph_cost_ns": "",
    "backend_coefficients": "",
    "fusion_target": "",
    "is_fused_viable": "",
    "pick_weights": "",
    "plan_fusion": "",
    "rank_devices": "",
    "execute_plan": "",
    "select_peaks_only_outputs": "",
    "FusionPlan": "",
    "profile_function": "",
    "FunctionProfile": "",
}

#: Fields of the records.
FIELDS = {
    "GraphIoProfile": "kernel_launches sync_points host_output_bytes device_traffic_bytes",
    "FusionBenefit": "launches_saved sync_points_saved host_readback_bytes_saved device_traffic_bytes_saved",
    "IoFusionGate": "dispatch_ns roundtrip_ns memory_bw host_readback_bw unified_memory "
    "host_thunk_penalty_ns min_gain_ns",
    "FunctionProfile": "io flops transcendentals integer_ops fused_traffic_bytes peak_bytes by_family by_line "
    "coverage_equations coverage_bytes uncosted",
    "FusionPlan": "kernels memory_saved original_kernel_count kernel_reduction",
    "FusedKernel": "nodes external_inputs external_outputs memory_saved buffers_eliminated",
    "WelchPeaksCostEstimates": "ultra_ns fast_ns rlx_ns learned_ns",
    "WelchPeaksGateBreakdown": "score_ns min_gain_ns readback_saved_bytes sync_points_saved "
    "should_fuse_io should_fuse compute_floor_ok",
}

CLASSES = [name for name in PUBLIC_NAMES if inspect.isclass(getattr(rx, name))]
FUNCTIONS = [name for name in PUBLIC_NAMES if callable(getattr(rx, name)) and name not in CLASSES]


def is_pytree(class_):
    return not jax.tree_util.all_leaves([_filled(class_)])


def _filled(class_):
    """Return an instance with 1.0, 2.0, ... in the fields that hold data."""
    fields = dataclasses.fields(class_)
    static = {field.name for field in fields if field.metadata.get("static")}
    values = {f.name: float(i) for i, f in enumerate(fields, 1) if f.name not in static}
    instance = object.__new__(class_)
    for field in fields:
        object.__setattr__(instance, field.name, values.get(field.name, "unused"))
    return instance


DATACLASSES = [name for name in CLASSES if dataclasses.is_dataclass(getattr(rx, name))]
PYTREES = [name for name in DATACLASSES if is_pytree(getattr(rx, name))]


def test_the_public_names_are_these():
    names = (name for name in dir(rx) if not inspect.ismodule(getattr(rx, name)))
    assert sorted(name for name in names if not name.startswith("_")) == PUBLIC_NAMES
    held = {name for name, value in vars(rx).items() if not inspect.ismodule(value)}
    assert {name for name in held if not name.startswith("_")} <= set(PUBLIC_NAMES)


def test_the_public_names_can_be_imported_together():
    everything = {}
    exec("from rlxjax import *", everything)
    assert {"fusion", "welch", *PUBLIC_NAMES} <= set(everything)
    assert everything["welch"].welch_peaks is rx.welch_peaks


def test_another_name_is_no_attribute():
    with pytest.raises(AttributeError, match="'rlxjax' has no attribute 'welch_peak'"):
        _ = rx.welch_peak


def test_every_specified_name_is_public():
    for name, members in SPECIFIED.items():
        assert name in PUBLIC_NAMES
        assert all(callable(getattr(getattr(rx, name), member)) for member in members.split())


def test_records_have_the_specified_fields():
    for name, fields in FIELDS.items():
        class_ = getattr(rx, name)
        present = getattr(class_, "_fields", None) or [field.name for field in dataclasses.fields(class_)]
        assert set(fields.split()) <= set(present)


LEARNED = "learned_available learned_active_gates learned_total_gates"


def test_specified_parameters_come_first_and_in_order():
    for name, parameters in [
        ("welch_peaks", "signal params strategy"),
        ("welch_peaks_graph", "batch params fused"),
        ("profile_graph_io", "graph fft_host_sync output_indices output_ids"),
        ("fused_graph_ns", "device batch n_fft k scale coefficients"),
        ("backend_coefficients", "device coefficients"),
        ("estimate_welch_peaks_costs", f"device batch n_fft k {LEARNED} coefficients"),
        ("pick_welch_peaks_strategy", f"device batch n_fft k {LEARNED} coefficients legacy"),
        ("welch_peaks_fusion_gate_breakdown", "device batch n_fft k coefficients"),
        ("pick_weights", "costs temperature_ns"),
        ("profile_function", "fn args level trip_counts strict compile_timeout_s kwargs"),
    ]:
        present = " ".join(inspect.signature(getattr(rx, name)).parameters)
        assert present.startswith(parameters)


def test_every_name_is_documented_by_a_line_of_its_own():
    for name in FUNCTIONS + CLASSES:
        summary, *rest = inspect.getdoc(getattr(rx, name)).splitlines()
        assert getattr(rx, name).__doc__ is not getattr(rx, name).__class__.__doc__
        assert not summary.startswith(f"{name}(")
        assert summary.rstrip().endswith((".", ":", "`"))
        assert not rest or rest[0] == ""


def text_of(name):
    """Return a function's docstring, and those of the functions that its arguments or errors are "as of"."""
    text = inspect.getdoc(getattr(rx, name))
    return "\n".join([text, *(text_of(other) for other in re.findall(r"as\s+of\s+`(\w+)`", text))])


def test_functions_name_each_of_their_arguments():
    for name in FUNCTIONS:
        named = set(re.findall(r"(?:^ {4}\**|`)(\w+)(?:: |`)", text_of(name), re.MULTILINE))
        assert set(inspect.signature(getattr(rx, name)).parameters) - named == set(), name


def test_functions_that_check_what_they_are_given_say_what_they_raise():
    checks = re.compile(r"\b(raise|check_\w+|checked|parse|as_index|as_temperature|cost_inputs|learned_inputs)\b")
    for name in FUNCTIONS:
        source = inspect.getsource(inspect.unwrap(getattr(rx, name)))
        body = re.sub('""".*?"""', "", source, count=1, flags=re.DOTALL)
        assert not checks.search(body) or "\nRaises:\n" in text_of(name), name


def test_functions_have_an_example_that_runs():
    for name in FUNCTIONS:
        assert doctest.DocTestParser().get_examples(inspect.getdoc(getattr(rx, name))), name


def test_every_parameter_and_result_of_a_function_is_annotated():
    for name in FUNCTIONS:
        signature = inspect.signature(getattr(rx, name))
        annotations = [parameter.annotation for parameter in signature.parameters.values()]
        assert inspect.Signature.empty not in [*annotations, signature.return_annotation], name


def test_no_parameter_switches_the_precision():
    for name in FUNCTIONS + DATACLASSES:
        assert "x64" not in inspect.signature(getattr(rx, name)).parameters


def test_the_pytrees_are_these_at_least():
    coefficients = {"BackendCoefficients", "IoFusionGate", "StrategyCoefficients", "LatencyCoefficients"}
    records = {"CoefficientSet", "GraphIoProfile", "FusionBenefit", "Runs", "Timings"}
    assert coefficients | records <= set(PYTREES)


def test_dataclasses_are_frozen():
    for name in DATACLASSES:
        instance = _filled(getattr(rx, name))
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(instance, dataclasses.fields(instance)[0].name, 0.0)


def test_pytrees_survive_flattening():
    for name in PYTREES:
        instance = _filled(getattr(rx, name))
        leaves, structure = jax.tree.flatten(instance)
        data = [field.name for field in dataclasses.fields(instance) if not field.metadata.get("static")]
        assert leaves == [getattr(instance, name) for name in data]
        rebuilt = jax.tree.unflatten(structure, leaves)
        assert type(rebuilt) is type(instance)
        assert vars(rebuilt) == vars(instance)
        doubled = jax.tree.map(lambda leaf: 2 * leaf, instance)
        assert [getattr(doubled, name) for name in data] == [2 * leaf for leaf in leaves]


def run_python(code):
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(rx.__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_loads_no_library_that_only_some_calls_need():
    loaded = set(run_python("import sys; from rlxjax import *; print(*sys.modules)").split())
    assert {"jax", "numpy", "rlxjax"} <= loaded
    assert loaded.isdisjoint({"typer", "rich", "matplotlib", "scipy", "calibrate"})


def test_importing_changes_no_jax_configuration_and_starts_no_backend():
    run_python(
        "import os; os.environ['JAX_PLATFORMS'] = 'no_such_platform'; import jax;"
        "before = dict(jax.config.values); from rlxjax import *; assert jax.config.values == before"
    )


def test_the_first_call_of_a_process_may_be_traced():
    run_python(
        "import jax, rlxjax as rx;"
        "costs = lambda batch: rx.estimate_welch_peaks_costs('cuda', batch, 256, 16).fast_ns;"
        "assert jax.jit(costs)(64.0) > 0"
    )


ROOMS = [name for name in rx.__all__ if inspect.ismodule(getattr(rx, name))]


def test_a_room_lists_all_its_names_and_says_what_it_is_for():
    assert {
        "welch",
        "fusion",
        "fit",
        "models",
        "calibration",
        "graph",
        "jaxpr",
        "device",
        "advice",
        "learned",
        "plot",
    } == set(ROOMS)
    for room in map(rx.__dict__.get, ROOMS):
        held = {name for name in vars(room) if not name.startswith("_")}
        assert held == set(room.__all__) <= set(dir(room))
        named = re.findall(r"`(?:rlxjax\.)?(\w+)[`(]", room.__doc__)
        assert len(named) >= 2
        assert set(named) - held <= {"soft_", "welch_peaks"}, room
    homes = {name: {room for room in ROOMS if name in getattr(rx, room).__all__} for name in PUBLIC_NAMES}
    assert [name for name, rooms in homes.items() if len(rooms) != 1 and not hasattr(rx._numerics, name)] == []


def test_the_package_lists_the_names_of_every_day_first():
    listed = re.findall(r"`(\w+)`", rx.__doc__.partition("by task:")[2].partition("All others")[0])
    assert len(set(listed)) == len(listed) == 30
    assert set(listed) <= set(PUBLIC_NAMES)
    assert {"Decision", "Calibration", "Timings", "welch_peaks"} <= set(listed)
