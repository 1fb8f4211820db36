"""What objects are: equal by value, hashed, shown in a line, shown as a table in a notebook."""

import copy
import dataclasses
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _models import LINE, LINE_TRUTH, calibrated, certain, runs_of, two_models
from test_api import CLASSES

import rlxjax as rx
from rlxjax._values import MOST_CHARACTERS, FrozenDict


def posterior_fit():
    """Return what a fit of two variants may find, of which one was timed."""
    runs = runs_of(LINE)
    runs = dataclasses.replace(runs, variant=np.zeros_like(runs.variant))
    terms = rx.fit.FitResult(
        {"a_ns": 2.5}, 3.0, 1e-6, 9, True, 0.04, {"a_ns": 0.1}, {"a_ns": True}, np.eye(1), [], "Good."
    )
    return rx.fit.PosteriorFit(certain(LINE, LINE_TRUTH, spread=0.03), terms, runs, np.array([0.05, np.nan]))


def explanation():
    """Return why the first of two strategies is picked."""
    return two_models().explain(9.0)


#: Records of a few plain numbers and names, which hold no array and no long text.
PLAIN = (
    "BranchSpread Cell Disagreement FusionEdge GraphWork Grouping "
    "Input LearnedProgram LearnedWork Node Op OperationCounts "
    "Schedule StagePlan StrategySpec ToneSignals UnknownLoop WelchPeakParams WelchVariant"
)
#: All other public dataclasses and named tuples.
SHOWN = [
    name
    for name, class_ in CLASSES.items()
    if dataclasses.is_dataclass(class_) or hasattr(class_, "_fields")
    if name not in PLAIN.split()
]


def filled(name, shift=0.0, of=np.array):
    """Return an instance of a class with an array in every field that holds data, and a text in the others."""
    class_ = CLASSES[name]
    fields = dataclasses.fields(class_) if dataclasses.is_dataclass(class_) else []
    names = [field.name for field in fields] or class_._fields
    static = {field.name for field in fields if field.metadata.get("static")}
    values = {
        field: "text " * 99 if field in static else of(np.arange(999.0) + place + shift)
        for place, field in enumerate(names)
    }
    if not fields:
        return class_(**values)
    instance = object.__new__(class_)
    for field, value in values.items():
        object.__setattr__(instance, field, value)
    return instance


#: A learned FFT is compared by identity, since programs are kept of it.
COMPARED = [name for name in SHOWN if name != "LearnedFft"]


def test_objects_of_arrays_are_shown_in_a_line_of_300_characters_and_equal_by_value_with_one_hash():
    for name in SHOWN:
        text = repr(filled(name))
        assert text.startswith(f"{name}("), name
        assert len(text) <= MOST_CHARACTERS == 300, name
        assert "\n" not in text, name
    for name in COMPARED:
        one, same, on_device, other = filled(name), filled(name), filled(name, of=jnp.asarray), filled(name, shift=1.0)
        assert one == same == on_device, name
        assert hash(one) == hash(same) == hash(on_device), name
        assert (one != same, one != other, one == other) == (False, True, False), name
        assert one != "text", name


def test_equal_is_by_shape_and_nan_equals_nan():
    profile = rx.GraphIoProfile(np.array([1, 2]), 0, 0, 0)
    assert profile != rx.GraphIoProfile(np.array([[1, 2]]), 0, 0, 0)
    assert profile != rx.GraphIoProfile(np.array([1, 1]), 0, 0, 0)
    assert rx.GraphIoProfile(np.array([np.nan])) == rx.GraphIoProfile(np.array([np.nan]))
    for equal in (3, np.int64(3), 3.0, np.array(3), jnp.asarray(3)):
        assert rx.GraphIoProfile(equal) == rx.GraphIoProfile(3)
        assert hash(rx.GraphIoProfile(equal)) == hash(rx.GraphIoProfile(3))
    assert rx.GraphIoProfile(float("nan")) == rx.GraphIoProfile(np.nan)
    assert hash(rx.GraphIoProfile(float("nan"))) == hash(rx.GraphIoProfile(np.nan * 1.0))
    assert len({rx.GraphIoProfile(n) for n in (1, 2, 2.0)}) == 2
    assert rx.FusionBenefit(1) != rx.GraphIoProfile(1)


def test_a_named_tuple_is_no_plain_tuple():
    for decided in (rx.fit.Decision(1.0, 2.0, 1.0, 0.5, 0.9), filled("Decision")):
        plain = tuple(decided)
        assert (decided == plain, plain == decided, decided != plain, plain != decided) == (False, False, True, True)
        assert decided != rx.fit.Estimate(*plain[:3])
    assert len({rx.fit.Decision(1.0, 2.0, 1.0, 0.5, 0.9), (1.0, 2.0, 1.0, 0.5, 0.9, None)}) == 2


def test_traced_values_are_not_compared():
    def compare(count):
        return rx.GraphIoProfile(count) == rx.GraphIoProfile(count + 1)

    with pytest.raises(TypeError, match="GraphIoProfile: `==` needs concrete values, got traced values"):
        jax.jit(compare)(3.0)
    shown = []
    jax.jit(lambda count: shown.append(repr(rx.GraphIoProfile(count))) or count)(np.ones(3))
    assert shown == [
        "GraphIoProfile(kernel_launches=traced float64[3], sync_points=0, host_output_bytes=0, device_traffic_bytes=0)"
    ]


def test_two_calibrations_of_one_file_are_equal_and_one_of_other_numbers_is_not():
    one, other = two_models(), two_models()
    assert one == other
    assert hash(one) == hash(other)
    assert {one: "here"}[other] == "here"
    moved = dataclasses.replace(one, models={**one.models, "line": calibrated(certain(LINE, LINE_TRUTH))})
    assert one != moved
    assert dataclasses.replace(one, source="elsewhere") != one
    assert one.of("line") == other.of("line") != moved.of("line")
    assert posterior_fit() == posterior_fit()
    assert posterior_fit() != posterior_fit()._replace(left_out_error=np.array([0.05, 0.0]))
    assert explanation() == explanation() != dataclasses.replace(explanation(), inputs={"n": 8.0})
    assert hash(explanation()) == hash(explanation())


def test_what_is_static_is_read_only_hashed_and_copied():
    found = two_models()
    for change in (
        lambda: found.fingerprint.update(cores=1),
        lambda: found.of("line").provenance.pop("item_ns"),
        lambda: found.fingerprint["thread_flags"].clear(),
    ):
        with pytest.raises(TypeError, match="read-only"):
            change()
    with pytest.raises(TypeError, match="read-only"):
        found.fingerprint["cores"] = 1
    assert FrozenDict({"a": {"b": [1]}}) == {"a": {"b": (1,)}}
    assert hash(FrozenDict({"a": 1, "b": 2})) == hash(FrozenDict({"b": 2, "a": 1}))
    assert json.loads(json.dumps(found.fingerprint)) == found.fingerprint
    for twin in (copy.deepcopy(found.fingerprint), pickle.loads(pickle.dumps(found.fingerprint))):
        assert (twin, type(twin), hash(twin)) == (found.fingerprint, FrozenDict, hash(found.fingerprint))
    assert dataclasses.asdict(found)["fingerprint"] == found.fingerprint


def test_a_prediction_prints_its_times_with_units():
    predicted = rx.calibration.FunctionPrediction(1234.4, 900.0, 5678.0, {"call_ns": 1200.0}, None, True)
    first, last = str(predicted).split("\n")
    assert "1.2 us (0.90 to 5.7)" in first
    assert last.split() == ["call", "1.20", "us"]
