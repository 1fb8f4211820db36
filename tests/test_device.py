"""Devices, targets, built-in rows with their provenance, and the ranking of devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlxjax as rx

ARCH, GUESS = "arch default", "uncalibrated"
#: SPEC 3: dispatch, roundtrip, memory_bw, readback_bw, unified, sgemm, sgemm of small products.
SPEC = {
    "cpu": ((300, 3_000, 30, 30, 0, 200, 200), ARCH),
    "cpu-apple": ((500, 5_000, 50, 50, 0, 1_000, 1_000), ARCH),
    "metal": ((2_000, 5_000, 200, 200, 1, 5_000, 5_000), ARCH),
    "mlx": ((2_000, 5_000, 200, 200, 0, 5_000, 500), GUESS),
    "cuda": ((3_000, 35_000, 900, 900, 0, 12_000, 12_000), GUESS),
    "rocm": ((3_000, 40_000, 800, 800, 0, 10_000, 10_000), GUESS),
    "wgpu": ((5_000, 80_000, 120, 120, 0, 2_500, 2_500), GUESS),
    "discrete": ((2_000, 20_000, 800, 50, 0, 800, 800), GUESS),
}
WGPU = ["gpu", "vulkan", "webgpu", "directx", "opengl"]
DEVICES = ["cpu", "metal", "mlx", "ane", "cuda", "rocm", *WGPU, "tpu"]
ARCH_ROWS = ["cpu", "metal", "discrete", "discrete", "cuda", "rocm", *["wgpu"] * 5, "discrete"]
ROWS = {"arch": ARCH_ROWS, "portable": ["cpu"] + ["discrete"] * 11}
TARGETS = ["cpu", "metal", "mlx", "mlx", "cuda", "rocm", *["wgpu"] * 5, "tpu"]
GUESSED = {name for name, row in zip(DEVICES, ARCH_ROWS, strict=True) if SPEC[row][1] == GUESS}


def values(row):
    return tuple(getattr(row, field.name) for field in dataclasses.fields(row) if field.name != "provenance")


# --- Rows ----------------------------------------------------------------------------------------


def test_rows_devices_and_targets_are_those_of_the_specification_and_none_can_be_changed():
    assert list(rx.Device) == DEVICES
    assert sorted(rx.FusionTarget) == sorted(set(TARGETS))
    assert list(rx.gate.Provenance) == ["measured", ARCH, "data sheet", GUESS]
    assert {name: (values(row), row.provenance) for name, row in rx.gate.BACKEND_ROWS.items()} == SPEC
    assert all(isinstance(value, float) for row in rx.gate.BACKEND_ROWS.values() for value in values(row))
    with pytest.raises(TypeError):
        rx.gate.BACKEND_ROWS["cpu"] = rx.gate.BACKEND_ROWS["cuda"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        rx.gate.BACKEND_ROWS["cpu"].dispatch_ns = 1.0
    assert len(jax.tree.leaves(rx.gate.BACKEND_ROWS["cpu"])) == 7  # provenance is no leaf
    assert jax.tree.map(lambda x: x, rx.gate.BACKEND_ROWS["cpu"]).provenance == ARCH


def test_a_device_has_its_row_in_each_set_arch_by_default_and_the_apple_row_by_name_only():
    for coefficients, names in ROWS.items():
        for device, row in zip(DEVICES, names, strict=True):
            for spelt in (device, device.upper(), device.title(), rx.Device(device)):
                assert rx.backend_coefficients(spelt, coefficients) is rx.gate.BACKEND_ROWS[row]
        for name in ("cpu-apple", "CPU_Apple", " cpu-apple "):
            assert rx.backend_coefficients(name, coefficients) is rx.gate.BACKEND_ROWS["cpu-apple"]
    assert rx.backend_coefficients("cuda") is rx.backend_coefficients("cuda", "ARCH") is rx.gate.BACKEND_ROWS["cuda"]
    with pytest.raises(ValueError, match="coefficients: expected one of arch, portable, got 'mine'"):
        rx.backend_coefficients("cpu", "mine")


def test_device_codes_give_a_row_of_arrays():
    for coefficients in ROWS:
        for transform in (lambda f: f, jax.jit):
            codes = rx.Device.codes(np.array([DEVICES, DEVICES[::-1]]))
            row = transform(lambda codes: rx.backend_coefficients(codes, coefficients))(codes)
            expected = np.array([SPEC[name][0] for name in ROWS[coefficients]])
            np.testing.assert_array_equal(np.stack(values(row), -1), [expected, expected[::-1]])
            assert row.provenance == tuple(SPEC[name][1] for name in ROWS[coefficients])


def test_coefficients_become_floats_and_a_checked_row_refuses_what_no_machine_has():
    row = rx.gate.BACKEND_ROWS["cpu"]
    given = [("dispatch_ns", value) for value in (3, np.array([1, 2]), np.uint8(3), jnp.array([1, 2]), [1, 2])]
    for name, value in [*given, ("unified_memory", True), ("unified_memory", np.bool_(True))]:
        leaf = getattr(dataclasses.replace(row, **{name: value}), name)
        assert np.asarray(leaf).dtype == np.float64
        np.testing.assert_array_equal(leaf, value)
    good = vars(rx.gate.BACKEND_ROWS["cpu"])
    assert rx.gate.BackendCoefficients.checked(**good) == rx.gate.BACKEND_ROWS["cpu"]
    for name in good.keys() - {"provenance"}:
        for value in (-1.0, float("nan"), np.array([1.0, -2.0])):
            with pytest.raises(ValueError, match=f"{name}: expected a number of at least 0, got"):
                rx.gate.BackendCoefficients.checked(**{**good, name: value})


# --- Names and codes -----------------------------------------------------------------------------


def test_a_code_is_a_position_by_whatever_name():
    assert [device.code for device in rx.Device] == [rx.Device.codes(device) for device in DEVICES] == list(range(12))
    for value in (["cpu", "TPU"], np.array(["Cpu", "tpu"]), np.array(["cpu", "tpu"], object), [rx.Device.CPU, "tpu"]):
        codes = rx.Device.codes(value)
        assert codes.dtype == np.int32
        assert codes.tolist() == [0, 11]
    for codes in (3, np.array([[0, 11]]), jnp.array([5])):
        assert rx.Device.codes(codes) is codes
    assert {rx.Device.parse(name) for name in ("wgpu", "WGPU", "gpu")} == {rx.Device.GPU}


def test_what_is_no_device_is_refused():
    for value, says in [
        ("abacus", "unknown device 'abacus'; expected one of cpu, metal, .*tpu"),
        (12, "device: expected codes from 0 to 11, got 12"),
        (np.array([0, -1]), "device: expected codes from 0 to 11"),
        (np.array([0.0]), "device: expected names or integer codes, got float64"),
        (None, "unknown device .*None"),
    ]:
        for f in (rx.Device.codes, rx.fusion_target, rx.is_fused_viable, rx.backend_coefficients):
            with pytest.raises(ValueError, match=says):
                f(value)


def test_kind_and_target_of_a_device_are_the_same_by_name_and_by_code():
    for f, expected, coded in [
        (rx.is_fused_viable, [device not in ("cpu", "tpu") for device in DEVICES], bool),
        (rx.fusion_target, TARGETS, lambda target: rx.FusionTarget(target).code),
    ]:
        assert [f(device) for device in DEVICES] == expected
        for transform in (lambda f: f, jax.jit, jax.vmap):
            np.testing.assert_array_equal(transform(f)(np.arange(12)), [coded(one) for one in expected])
    assert isinstance(rx.fusion_target(rx.Device.ANE), rx.FusionTarget)


# --- Ranking -------------------------------------------------------------------------------------


def relu_graph(elements=1 << 16):
    graph = rx.Graph()
    graph.set_outputs([graph.add("relu", [graph.input("x", (elements,))])])
    return graph


def cost_on_cpu(work, *args, **options):
    return rx.rank_devices(work, ["cpu"], args=args, **options).costs[rx.Device.CPU]


def test_the_costs_are_the_device_costs_in_ascending_order_and_guesses_are_left_out_with_the_reason():
    for coefficients, elements in (("arch", 1), ("arch", 1 << 24), ("portable", 1 << 10)):
        graph = relu_graph(elements)
        ranking = rx.rank_devices(graph, coefficients=coefficients)
        device, costs, left_out = ranking
        for name, cost in costs.items():
            assert cost == rx.graph_cost_ns(graph, rx.backend_coefficients(name, coefficients))
        assert list(costs.values()) == sorted(costs.values())
        assert device == next(iter(costs))
        assert set(costs) | set(left_out) == set(rx.Device)
        assert all("uncalibrated" in reason for reason in left_out.values())
        assert all(device.value in ranking.reason for device in left_out)
        assert set(ranking.provenance.values()) == {rx.gate.Provenance.ARCH_DEFAULT}
        assert coefficients == "portable" or set(left_out) == GUESSED
    ranking = rx.rank_devices(relu_graph(), ["cuda", "rocm", "GPU"])
    assert set(ranking.costs) == {"cuda", "rocm", "gpu"}
    assert not ranking.left_out
    assert "a guess, because no device is calibrated" in ranking.reason


def test_a_measured_row_takes_part_and_takes_the_place_of_the_built_in_one():
    fast = dataclasses.replace(rx.backend_coefficients("cuda"), dispatch_ns=1.0, roundtrip_ns=1.0)
    assert "cuda" in rx.rank_devices(relu_graph(), rows={"cuda": fast}).left_out
    measured = dataclasses.replace(fast, provenance="measured")
    ranking = rx.rank_devices(relu_graph(), rows={"cuda": measured})
    assert ranking.device == "cuda"
    assert ranking.costs[rx.Device.CUDA] == float(rx.graph_cost_ns(relu_graph(), measured))
    assert ranking.provenance[rx.Device.CUDA] == "measured"
    assert "measured" in ranking.reason


def test_a_profile_costs_what_its_io_costs_and_a_function_its_launch_bytes_results_and_products():
    profile, row = rx.GraphIoProfile(3, 1, 128, 6272), rx.backend_coefficients("cpu")
    for devices in (["cpu", "metal"], ["tpu"]):  # the fallback's estimate among them
        for device, cost in rx.rank_devices(profile, devices).costs.items():
            np.testing.assert_allclose(cost, rx.io_cost_ns(profile, rx.backend_coefficients(device)), rtol=1e-14)
    n_bytes = 4 << 16
    io = rx.GraphIoProfile(1, 0, n_bytes, 2 * n_bytes)
    tanh_ns = cost_on_cpu(jnp.tanh, jax.ShapeDtypeStruct((1 << 16,), jnp.float32))
    np.testing.assert_allclose(tanh_ns, rx.io_cost_ns(io, row), rtol=1e-12)
    x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    slow = {"cpu": dataclasses.replace(row, sgemm_gflops=1.0)}
    difference = cost_on_cpu(jnp.matmul, x, x, rows=slow) - cost_on_cpu(jnp.matmul, x, x)
    np.testing.assert_allclose(difference, 2 * 512**3 * (1 / 2.0 - 1 / 201.0), rtol=1e-3)


def test_work_and_options_that_are_none_are_refused_in_one_sentence():
    for work, options, sentence in [
        (relu_graph(), {"devices": []}, "at least one device"),
        (relu_graph(), {"coefficients": "typical"}, "coefficients: expected one of arch, portable"),
        (relu_graph(), {"rows": {"cuda": 3.0}}, "expected BackendCoefficients for 'cuda'"),
        (relu_graph(), {"rows": {"cpu": rx.backend_coefficients(np.array([0, 1]))}}, "a row of arrays"),
        (
            relu_graph(),
            {"args": (1.0,)},
            "args: expected no arguments for a Graph, got 1",
        ),
        ("relu", {}, "expected a Graph, a GraphIoProfile or a function"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            rx.rank_devices(work, **options)
