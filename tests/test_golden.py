"""Parity with the golden tables of graphs and gates: scalars, one call, and both precisions."""

import dataclasses
import functools
import json
import operator
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from _tolerances import (
    FLOAT32_RTOL,
    FLOAT64_RTOL,
    LIMIT_TEMPERATURES,
    SATURATED_ATOL,
    assert_gradient_is_the_finite_difference,
)

import rlxjax as rx

GOLDEN = pathlib.Path(__file__).parent / "golden"
close = functools.partial(np.testing.assert_allclose, rtol=FLOAT64_RTOL, atol=0)
close32 = functools.partial(np.testing.assert_allclose, rtol=FLOAT32_RTOL, atol=0)


@functools.cache
def golden(name):
    return json.loads((GOLDEN / f"{name}.json").read_text())


def column(rows, *path):
    values = [functools.reduce(operator.getitem, path, row) for row in rows]
    return np.array([-1 if value is None else float("inf") if value == "inf" else value for value in values])


COUNTS = tuple(field.name for field in dataclasses.fields(rx.GraphIoProfile))


# --- Graphs --------------------------------------------------------------------------------------


def graph_of(row):
    graph = rx.Graph()
    for node in row["nodes"]:
        graph.add(node["op"], node["inputs"], shape=node["shape"], dtype=node["dtype"])
    graph.set_outputs(row["outputs"])
    return graph


def test_every_graph_has_its_profiles_and_readback_bytes():
    for row in golden("graph"):
        graph = graph_of(row)
        for field, options in [
            ("profile", {}),
            ("profile_fft_host_sync", {"fft_host_sync": True}),
            ("profile_selected", {"output_indices": row["selected_output_indices"]}),
            ("profile_compile", {"output_ids": row["outputs"]}),
        ]:
            assert rx.profile_graph_io(graph, **options) == rx.GraphIoProfile(**row[field]), row
        profile = rx.profile_graph_io(graph)
        assert profile.host_readback_bytes(True) == row["readback_unified"]
        assert profile.host_readback_bytes(False) == row["readback_discrete"]


# --- Gates ---------------------------------------------------------------------------------------


def gate_table():
    rows = golden("gate")
    gate = rx.IoFusionGate(**{name: column(rows, "gate", name) for name in rows[0]["gate"]})
    before, after = (
        rx.GraphIoProfile(**{name: column(rows, which, name) for name in COUNTS}) for which in ("before", "after")
    )
    return gate, before, after


def terms_size(gate, benefit):
    """Return the size of the terms that cancel in a score."""
    penalty = np.abs(benefit.sync_points_saved) * gate.host_thunk_penalty_ns
    return jax.tree.map(np.abs, benefit).score_ns(gate) + penalty


def test_every_benefit_score_and_decision_in_scalars():
    for row in golden("gate"):
        gate, benefit = rx.IoFusionGate(**row["gate"]), rx.FusionBenefit(**row["benefit"])
        profiles = [rx.GraphIoProfile(**row[which]) for which in ("before", "after")]
        assert rx.fusion_benefit(*profiles) == benefit
        close(gate.score_ns(*profiles), row["gate_score_ns"])
        close(benefit.score_ns(gate), row["benefit_score_ns"])
        assert bool(gate.should_fuse(*profiles)) == row["should_fuse"]
        assert bool(benefit.should_fuse(gate)) == (row["benefit_score_ns"] >= row["gate"]["min_gain_ns"])
        if row["target"] != "custom":
            assert rx.io_fusion_gate_for_target(row["target"]) == gate


def test_every_benefit_score_and_decision_in_one_call():
    rows = golden("gate")
    gate, before, after = gate_table()
    benefit = rx.fusion_benefit(before, after)
    for name, counts in vars(benefit).items():
        assert counts.dtype == np.int64
        np.testing.assert_array_equal(counts, column(rows, "benefit", name))
    for transform in (lambda f: f, jax.jit):
        close(transform(rx.IoFusionGate.score_ns)(gate, benefit), column(rows, "gate_score_ns"))
        close(transform(rx.FusionBenefit.score_ns)(benefit, gate), column(rows, "benefit_score_ns"))
        decision = transform(rx.IoFusionGate.should_fuse)(gate, benefit)
        np.testing.assert_array_equal(decision, column(rows, "should_fuse"))


def test_every_decision_turns_within_one_ulp_of_its_score():
    for transform in [lambda f: f, jax.jit]:
        for towards, fuses in [(-np.inf, True), (None, True), (np.inf, False)]:
            gate, before, after = gate_table()
            benefit = rx.fusion_benefit(before, after)
            score = np.asarray(gate.score_ns(benefit))
            min_gain = score if towards is None else np.nextafter(score, towards)
            gate = dataclasses.replace(gate, min_gain_ns=min_gain)
            np.testing.assert_array_equal(transform(rx.IoFusionGate.should_fuse)(gate, benefit), fuses)
            for i in range(len(score)):
                one_gate, one = jax.tree.map(lambda leaf, i=i: leaf[i].item(), (gate, benefit))
                assert bool(transform(rx.IoFusionGate.should_fuse)(one_gate, one)) is fuses


def test_every_gate_in_float32():
    rows = golden("gate")
    gate, before, after = gate_table()
    with jax.enable_x64(False):
        score, decision = gate.score_ns(before, after), gate.should_fuse(before, after)
    assert score.dtype == jnp.float32
    expected, min_gain = column(rows, "gate_score_ns"), column(rows, "gate", "min_gain_ns")
    close32(score, expected)
    clear = np.abs(expected - min_gain) > FLOAT32_RTOL * np.maximum(np.abs(expected), min_gain)
    assert clear.any()
    np.testing.assert_array_equal(decision[clear], column(rows, "should_fuse")[clear])


def test_every_gate_relaxation_tends_to_the_hard_one():
    rows = golden("gate")
    gate, before, after = gate_table()
    score = column(rows, "gate_score_ns")
    margin = np.abs(score - gate.min_gain_ns)
    probability = gate.fuse_probability(before, after, temperature_ns=margin / 40)
    np.testing.assert_allclose(probability, column(rows, "should_fuse"), rtol=0, atol=SATURATED_ATOL)
    temperature = 1e-9 * np.abs(score)
    soft = gate.score_ns(before, after, temperature_ns=temperature)
    assert (np.abs(soft - score) <= LIMIT_TEMPERATURES * temperature).all()


def test_every_gate_has_its_gradients():
    gate, before, after = gate_table()
    benefit = rx.fusion_benefit(before, after)
    scale = terms_size(gate, benefit)
    margin = np.abs(gate.score_ns(benefit) - gate.min_gain_ns)
    assert_gradient_is_the_finite_difference(lambda g: g.score_ns(benefit), gate, scale=scale)
    for soft, size in (
        ("fuse_probability", 1),
        ("fuse_log_probability", 1),
        ("fuse_log_odds", 1),
        ("score_ns", margin),
    ):

        def f(g, soft=soft):
            return getattr(g, soft)(benefit, temperature_ns=margin)

        assert_gradient_is_the_finite_difference(jax.jit(f), gate, scale=scale * size / margin)


def test_every_coefficient_that_takes_part_moves_the_probability_within_30_temperatures():
    gate, before, after = gate_table()
    benefit = rx.fusion_benefit(before, after)
    margin = np.abs(gate.score_ns(benefit) - gate.min_gain_ns)
    probability = functools.partial(rx.IoFusionGate.fuse_probability, temperature_ns=margin / 29)
    gradient = jax.grad(lambda g: jnp.sum(probability(g, benefit)))(gate)
    discrete = gate.unified_memory == 0
    takes_part = {
        "dispatch_ns": benefit.launches_saved != 0,
        "roundtrip_ns": benefit.sync_points_saved != 0,
        "memory_bw": (benefit.device_traffic_bytes_saved != 0) & (gate.memory_bw > 1),
        "host_readback_bw": (benefit.host_readback_bytes_saved != 0) & discrete & (gate.host_readback_bw > 1),
        "host_thunk_penalty_ns": benefit.sync_points_saved < 0,
        "min_gain_ns": np.full(len(margin), True),
    }
    for name, part in takes_part.items():
        np.testing.assert_array_equal(getattr(gradient, name) != 0, part, err_msg=name)
