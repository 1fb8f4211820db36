"""Device ranking: the order of costs, what is left out, and what the answer says of itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlxjax as rx

GUESSED = {device for device in rx.Device if rx.backend_coefficients(device).provenance == "uncalibrated"}


def relu_graph(elements=1 << 16):
    graph = rx.Graph()
    graph.set_outputs([graph.add("relu", [graph.input("x", (elements,))])])
    return graph


def test_the_costs_are_the_device_costs_in_ascending_order():
    for coefficients in ["arch", "portable"]:
        for elements in [1, 1 << 10, 1 << 24]:
            graph = relu_graph(elements)
            device, costs, left_out = rx.rank_devices(graph, coefficients=coefficients)
            for name, cost in costs.items():
                assert cost == float(rx.device_cost_ns(graph, name, coefficients))
            assert list(costs.values()) == sorted(costs.values())
            assert device == next(iter(costs))
            assert set(costs) | set(left_out) == set(rx.Device)


def test_guessed_devices_are_left_out_and_named_with_the_reason():
    ranking = rx.rank_devices(relu_graph())
    assert set(ranking.left_out) == GUESSED
    assert set(ranking.costs) == set(rx.Device) - GUESSED
    assert all("uncalibrated" in reason for reason in ranking.left_out.values())
    assert all(device.value in ranking.reason for device in GUESSED)
    assert set(ranking.provenance.values()) == {rx.Provenance.ARCH_DEFAULT}


def test_if_all_are_guesses_all_are_ranked_and_the_answer_says_so():
    ranking = rx.rank_devices(relu_graph(), ["cuda", "rocm", "GPU"])
    assert set(ranking.costs) == {"cuda", "rocm", "gpu"}
    assert not ranking.left_out
    assert "guesses" in ranking.reason


def test_a_measured_row_takes_part_and_takes_the_place_of_the_built_in_one():
    fast = dataclasses.replace(rx.backend_coefficients("cuda"), dispatch_ns=1.0, roundtrip_ns=1.0)
    guessed = rx.rank_devices(relu_graph(), rows={"cuda": fast})
    assert "cuda" in guessed.left_out
    measured = dataclasses.replace(fast, provenance="measured")
    ranking = rx.rank_devices(relu_graph(), rows={"cuda": measured})
    assert ranking.device == "cuda"
    assert ranking.costs[rx.Device.CUDA] == float(rx.graph_cost_ns(relu_graph(), measured))
    assert ranking.provenance[rx.Device.CUDA] == "measured"
    assert "measured" in ranking.reason


def test_a_profile_costs_what_its_io_costs():
    profile = rx.GraphIoProfile(3, 1, 128, 6272)
    devices = ["cpu", "metal"]
    costs = rx.rank_devices(profile, devices).costs
    for device in devices:
        expected = float(rx.io_cost_ns(profile, rx.backend_coefficients(device)))
        np.testing.assert_allclose(costs[rx.Device(device)], expected, rtol=1e-14)
    guessed = rx.rank_devices(profile, ["tpu"]).costs
    expected = float(rx.io_cost_ns(profile, rx.backend_coefficients("tpu")))
    np.testing.assert_allclose(guessed[rx.Device.TPU], expected, rtol=1e-14)


def test_a_function_costs_one_launch_its_bytes_and_its_results():
    x = jax.ShapeDtypeStruct((1 << 16,), jnp.float32)
    row = rx.backend_coefficients("cpu")
    costs = rx.rank_devices(jnp.tanh, ["cpu"], args=(x,)).costs
    result_bytes = 4 << 16
    io = rx.GraphIoProfile(1, 0, result_bytes, 2 * result_bytes)
    np.testing.assert_allclose(costs[rx.Device.CPU], float(rx.io_cost_ns(io, row)), rtol=1e-12)
    wide = rx.rank_devices(jnp.tanh, ["cpu"], args=(jax.ShapeDtypeStruct((1 << 17,), jnp.float32),)).costs
    assert wide[rx.Device.CPU] > costs[rx.Device.CPU]


def test_a_matrix_product_costs_its_operations():
    x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    slow = dataclasses.replace(rx.backend_coefficients("cpu"), sgemm_gflops=1.0)
    fast, slowed = (rx.rank_devices(jnp.matmul, ["cpu"], args=(x, x), rows=rows) for rows in (None, {"cpu": slow}))
    flop = 2 * 512**3
    difference = slowed.costs[rx.Device.CPU] - fast.costs[rx.Device.CPU]
    np.testing.assert_allclose(difference, flop / 2.0 - flop / 201.0, rtol=1e-3)


def test_a_loop_counts_as_often_as_it_turns():
    def chained(x):
        return jax.lax.fori_loop(0, 50, lambda _, y: jnp.tanh(y @ y), x)

    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    once, often = (
        rx.rank_devices(fn, ["cpu"], args=(x,)).costs[rx.Device.CPU] for fn in (lambda x: jnp.tanh(x @ x), chained)
    )
    assert often > 40 * once - 39 * float(
        rx.io_cost_ns(rx.GraphIoProfile(0, 0, 4 << 16, 0), rx.backend_coefficients("cpu"))
    )
    with pytest.raises(ValueError, match="how often the loop at test_ranking.py:.* turns depends on data"):
        rx.rank_devices(lambda x: jax.lax.while_loop(lambda y: y[0, 0] < 9, lambda y: y + 1, x), args=(x,))


def test_bad_input_is_refused_in_one_sentence():
    for kwargs, sentence in [
        ({"devices": ["gpux"]}, "unknown device 'gpux'"),
        ({"devices": []}, "at least one device"),
        ({"coefficients": "typical"}, "coefficients: expected one of arch, portable"),
        ({"rows": {"cuda": 3.0}}, "expected BackendCoefficients for 'cuda'"),
        ({"rows": {"cpu": rx.backend_coefficients(np.array([0, 1]))}}, "arrays of several"),
        ({"args": (1.0,)}, "only a function takes arguments"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            rx.rank_devices(relu_graph(), **kwargs)


def test_work_that_is_none_is_refused():
    with pytest.raises(ValueError, match="expected a Graph, a GraphIoProfile or a function"):
        rx.rank_devices("relu")
