"""The public names, their documentation, and records that JAX may take apart."""

import dataclasses
import doctest
import inspect
import re

import jax
import pytest

import rlxjax as rx

ROOMS = [name for name in rx.__all__ if inspect.ismodule(getattr(rx, name))]
#: Every public name and what it is, in a folder or at the top.
PUBLIC = {name: value for room in ROOMS for name, value in vars(getattr(rx, room)).items() if name[0] != "_"}
PUBLIC |= {name: getattr(rx, name) for name in rx.__all__ if name not in ROOMS}
#: What a user calls by its name at the top, or one who knows the reference (SPEC, section 11).
SPECIFIED = {
    "Graph": "input param constant add set_outputs",
    "GraphIoProfile": "kernel_launches sync_points host_output_bytes device_traffic_bytes host_readback_bytes",
    "FusionBenefit": "launches_saved sync_points_saved host_readback_bytes_saved device_traffic_bytes_saved score_ns "
    "should_fuse",
    "IoFusionGate": "dispatch_ns roundtrip_ns memory_bw host_readback_bw unified_memory host_thunk_penalty_ns "
    "min_gain_ns score_ns should_fuse fuse_probability",
    "WelchPeakParams": "ultra fast reference",
    "Calibration": "predict_ns interval_ns pick",
    "FunctionProfile": "io flops transcendentals integer_ops fused_traffic_bytes peak_bytes by_family by_line "
    "coverage_equations coverage_bytes uncosted",
    "FusionPlan": "kernels memory_saved original_kernel_count kernel_reduction",
    "FusedKernel": "nodes external_inputs external_outputs memory_saved buffers_eliminated",
    "WelchPeaksCostEstimates": "ultra_ns fast_ns rlx_ns learned_ns",
    "WelchPeaksGateBreakdown": "score_ns min_gain_ns readback_saved_bytes sync_points_saved should_fuse_io should_fuse "
    "compute_floor_ok",
}
LEARNED = "learned_available learned_active_gates learned_total_gates"
#: Their first parameters.
CALLED = {
    "load_calibration": "path",
    "profile_graph_io": "graph fft_host_sync output_indices output_ids",
    "fusion_benefit": "before after",
    "io_fusion_gate_for_target": "target",
    "welch_peaks_graph": "batch params fused",
    "welch_peaks": "signal params strategy",
    "estimate_welch_peaks_costs": f"device batch n_fft k {LEARNED} coefficients",
    "welch_peaks_fusion_gate_breakdown": "device batch n_fft k coefficients",
    "pick_welch_peaks_strategy": f"device batch n_fft k {LEARNED} coefficients legacy",
    "parse_welch_peaks_strategy": "",
    "fused_graph_ns": "device batch n_fft k scale coefficients",
    "block_graph_ns": "device batch n_fft k",
    "host_fft_profile": "batch params",
    "useful_bytes_touched": "batch params",
    "algorithm_bandwidth_gbps": "useful_bytes time_ns",
    "io_cost_ns": "profile row",
    "graph_cost_ns": "graph row",
    "backend_coefficients": "device coefficients",
    "fusion_target": "device",
    "is_fused_viable": "device",
    "pick_weights": "costs temperature_ns",
    "plan_fusion": "graph",
    "rank_devices": "",
    "execute_plan": "plan inputs",
    "select_peaks_only_outputs": "graph target",
    "profile_function": "fn args level trip_counts strict target mesh kwargs",
}
TOP = {*rx.__all__, *SPECIFIED, *CALLED} - {*ROOMS}
FUNCTIONS = {name: getattr(rx, name) for name in sorted(TOP) if inspect.isroutine(getattr(rx, name))}
CLASSES = {name: value for name, value in PUBLIC.items() if inspect.isclass(value)}
DATACLASSES = {name: class_ for name, class_ in CLASSES.items() if dataclasses.is_dataclass(class_)}


def filled(class_):
    """Return an instance with 1.0, 2.0, ... in the fields that hold data."""
    instance = object.__new__(class_)
    for i, field in enumerate(dataclasses.fields(class_), 1):
        object.__setattr__(instance, field.name, "unused" if field.metadata.get("static") else float(i))
    return instance


def test_the_names_of_the_specification_are_at_the_top_with_their_members_and_first_parameters():
    for name, members in SPECIFIED.items():
        class_ = getattr(rx, name)
        present = {*dir(class_), *(f.name for f in dataclasses.fields(class_))} if name in DATACLASSES else dir(class_)
        assert set(members.split()) <= set(present), name
    for name, parameters in CALLED.items():
        assert " ".join(inspect.signature(getattr(rx, name)).parameters).startswith(parameters), name


def test_every_name_of_the_list_is_there_once_and_no_other():
    everything = {}
    exec("from rlxjax import *", everything)
    assert everything.keys() - {"__builtins__"} == set(rx.__all__) <= set(dir(rx))
    assert everything["welch"].welch_peaks is rx.welch_peaks
    assert [name for name in rx.__all__ if rx.__all__.count(name) != 1] == []
    with pytest.raises(AttributeError, match="No rlxjax attribute welch_peak"):
        _ = rx.welch_peak


def test_a_folder_lists_all_its_names_and_says_what_it_is_for():
    for room in (getattr(rx, name) for name in ROOMS):
        # The import hook of `RLXJAX_CHECK_ALL` puts jaxtyping into each module.
        held = {name for name in vars(room) if not name.startswith("_")} - {"jaxtyping"}
        assert held == set(room.__all__) - {"jaxtyping"} <= set(dir(room))
        named = re.findall(r"`(?:rlxjax\.)?(\w+)[`(]", room.__doc__)
        assert len(named) >= min(2, len(held))
        assert set(named) - held <= {"soft_", "welch_peaks"}, room


def test_every_name_is_documented_by_a_line_of_its_own():
    for name in {*FUNCTIONS, *CLASSES}:
        summary, *rest = inspect.getdoc(PUBLIC[name]).splitlines()
        assert PUBLIC[name].__doc__ is not PUBLIC[name].__class__.__doc__, name
        assert not summary.startswith(f"{name}("), name
        assert summary.rstrip().endswith((".", ":", "`")), name
        assert not rest or rest[0] == "", name


def text_of(name):
    """Return a function's docstring, and the docstrings of functions whose arguments or errors it refers to."""
    text = inspect.getdoc(PUBLIC[name])
    return "\n".join([text, *(text_of(other) for other in re.findall(r"(?:as|those)\s+of\s+`(\w+)`", text))])


def test_functions_say_what_they_take_and_raise_with_an_example_that_runs():
    checks = re.compile(r"\b(raise|check_\w+|checked|parse|as_index|as_temperature|cost_inputs|learned_inputs)\b")
    for name, function in FUNCTIONS.items():
        signature, text = inspect.signature(function), text_of(name)
        named = set(re.findall(r"(?:^ {4}\**|`)(\w+)(?:: |`)", text, re.MULTILINE))
        assert set(signature.parameters) - named == set(), name
        annotations = [parameter.annotation for parameter in signature.parameters.values()]
        assert inspect.Signature.empty not in [*annotations, signature.return_annotation], name
        body = re.sub('""".*?"""', "", inspect.getsource(inspect.unwrap(function)), count=1, flags=re.DOTALL)
        assert not checks.search(body) or "\nRaises:\n" in text, name
        assert doctest.DocTestParser().get_examples(inspect.getdoc(function)), name


def test_no_parameter_switches_the_precision():
    for made in (*FUNCTIONS.values(), *DATACLASSES.values()):
        assert "x64" not in inspect.signature(made).parameters


def test_dataclasses_are_frozen_and_survive_flattening():
    pytrees = set()
    for name, class_ in DATACLASSES.items():
        instance, fields = filled(class_), dataclasses.fields(class_)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(instance, fields[0].name, 0.0)
        leaves, structure = jax.tree.flatten(instance)
        if leaves == [instance]:
            continue
        pytrees.add(name)
        data = [field.name for field in fields if not field.metadata.get("static")]
        assert leaves == [getattr(instance, name) for name in data]
        rebuilt = jax.tree.unflatten(structure, leaves)
        assert type(rebuilt) is class_
        assert vars(rebuilt) == vars(instance)
        doubled = jax.tree.map(lambda leaf: 2 * leaf, instance)
        assert [getattr(doubled, name) for name in data] == [2 * leaf for leaf in leaves]
    coefficients = {"BackendCoefficients", "IoFusionGate", "StrategyCoefficients", "LatencyCoefficients"}
    assert coefficients | {"CoefficientSet", "GraphIoProfile", "FusionBenefit", "Runs", "Timings"} <= pytrees
