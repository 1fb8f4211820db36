"""Devices, targets, and the built-in rows with their provenance."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlxjax as rx
from rlxjax.device._devices import WGPU_FAMILY, as_leaf, row_names, stack_rows, take_row

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


def values(row):
    return tuple(getattr(row, field.name) for field in dataclasses.fields(row) if field.name != "provenance")


def test_the_devices_and_targets_are_those_of_the_specification():
    assert list(rx.Device) == DEVICES
    assert sorted(rx.Target) == sorted(set(TARGETS))
    assert list(WGPU_FAMILY) == WGPU
    assert list(rx.Provenance) == ["measured", ARCH, GUESS]


def test_a_built_in_row_is_that_of_the_specification():
    for name in SPEC:
        row = rx.BACKEND_ROWS[name]
        assert (values(row), row.provenance) == SPEC[name]
        assert all(isinstance(value, float) for value in values(row))


def test_there_are_no_other_rows_and_none_can_be_changed():
    assert rx.BACKEND_ROWS.keys() == SPEC.keys()
    with pytest.raises(TypeError):
        rx.BACKEND_ROWS["cpu"] = rx.BACKEND_ROWS["cuda"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        rx.BACKEND_ROWS["cpu"].dispatch_ns = 1.0


def test_a_device_has_its_row_in_each_set():
    for coefficients in ROWS:
        for spelling in [str, str.upper, str.title, rx.Device]:
            for device, row in zip(DEVICES, ROWS[coefficients], strict=True):
                assert rx.backend_coefficients(spelling(device), coefficients) is rx.BACKEND_ROWS[row]
                assert row_names(coefficients)[rx.Device(device)] == row


def test_arch_is_the_default_set():
    assert rx.backend_coefficients("cuda") is rx.BACKEND_ROWS["cuda"]


def test_the_apple_row_is_used_by_name_only():
    for name in ["cpu-apple", "CPU_Apple", " cpu-apple "]:
        for coefficients in ROWS:
            assert rx.backend_coefficients(name, coefficients) is rx.BACKEND_ROWS["cpu-apple"]
            assert rx.backend_coefficients("cpu", coefficients) is rx.BACKEND_ROWS["cpu"]


def test_device_codes_give_a_row_of_arrays():
    for coefficients in ROWS:
        for transform in [lambda f: f, jax.jit]:
            codes = rx.Device.codes(np.array([DEVICES, DEVICES[::-1]]))
            row = transform(lambda codes: rx.backend_coefficients(codes, coefficients))(codes)
            expected = np.array([SPEC[name][0] for name in ROWS[coefficients]])
            np.testing.assert_array_equal(np.stack(values(row), -1), [expected, expected[::-1]])
            assert row.provenance == tuple(SPEC[name][1] for name in ROWS[coefficients])


# --- Names and codes -----------------------------------------------------------------------------


def test_a_code_is_a_position():
    assert [device.code for device in rx.Device] == list(range(12))
    assert [rx.Device.codes(device) for device in DEVICES] == list(range(12))


def test_names_in_an_array_become_codes():
    for value in [
        ["cpu", "TPU"],
        np.array(["Cpu", "tpu"]),
        np.array(["cpu", "tpu"], object),
        [rx.Device.CPU, "tpu"],
    ]:
        codes = rx.Device.codes(value)
        assert codes.dtype == np.int32
        assert codes.tolist() == [0, 11]


def test_codes_stay_codes():
    for codes in (3, np.array([[0, 11]]), jnp.array([5])):
        assert rx.Device.codes(codes) is codes


def test_wgpu_is_the_gpu_device():
    for name in ["wgpu", "WGPU", "gpu"]:
        assert rx.Device.parse(name) is rx.Device.GPU


def test_what_is_no_device_is_refused():
    for value, says in [
        ("abacus", "unknown device 'abacus'; expected one of cpu, metal, .*tpu"),
        (["cpu", "abacus"], "unknown device .*abacus"),
        (12, "device: expected codes from 0 to 11, got 12"),
        (np.array([0, -1]), "device: expected codes from 0 to 11"),
        (np.array([0.0]), "device: expected a name or integer codes, got float64"),
        (None, "unknown device .*None"),
    ]:
        for f in [
            rx.Device.codes,
            rx.fusion_target,
            rx.is_gpu_device,
            rx.is_fused_viable,
            rx.backend_coefficients,
        ]:
            with pytest.raises(ValueError, match=says):
                f(value)


def test_an_unknown_set_is_refused():
    with pytest.raises(ValueError, match="coefficients: expected one of arch, portable, got 'mine'"):
        rx.backend_coefficients("cpu", "mine")
    assert row_names("ARCH") == row_names("arch")


def test_a_kind_of_device_is_the_same_by_name_and_by_code():
    for f, expected in [
        (rx.is_gpu_device, [device != "cpu" for device in DEVICES]),
        (rx.is_fused_viable, [device not in ("cpu", "tpu") for device in DEVICES]),
    ]:
        assert [f(device) for device in DEVICES] == expected
        for transform in (lambda f: f, jax.jit, jax.vmap):
            np.testing.assert_array_equal(transform(f)(np.arange(12)), expected)


def test_a_target_is_the_same_by_name_and_by_code():
    assert [rx.fusion_target(device) for device in DEVICES] == TARGETS
    assert isinstance(rx.fusion_target(rx.Device.ANE), rx.Target)
    expected = [rx.Target(target).code for target in TARGETS]
    for transform in (lambda f: f, jax.jit, jax.vmap):
        np.testing.assert_array_equal(transform(rx.fusion_target)(np.arange(12)), expected)


# --- Rows ----------------------------------------------------------------------------------------


def test_a_leaf_is_a_float_of_the_same_value():
    for value in [True, 3, np.array([1, 2]), np.bool_(True), np.uint8(3), jnp.array([1, 2])]:
        leaf = as_leaf(value)
        assert np.asarray(leaf).dtype == np.float64
        np.testing.assert_array_equal(leaf, value)


def test_stacked_rows_can_be_taken_apart():
    rows = [dataclasses.replace(row, provenance=GUESS) for row in rx.BACKEND_ROWS.values()]
    table = stack_rows(rows)
    for i, row in enumerate(rows):
        assert values(jax.tree.map(float, take_row(table, i))) == values(row)


def test_a_checked_row_refuses_a_negative_or_nan_coefficient():
    for name in [field for field in vars(rx.BACKEND_ROWS["cpu"]) if field != "provenance"]:
        for value in [-1.0, float("nan"), np.array([1.0, -2.0])]:
            good = vars(rx.BACKEND_ROWS["cpu"])
            assert rx.BackendCoefficients.checked(**good) == rx.BACKEND_ROWS["cpu"]
            with pytest.raises(ValueError, match=f"{name}: expected a number of at least 0, got"):
                rx.BackendCoefficients.checked(**{**good, name: value})


def test_provenance_is_no_leaf():
    assert len(jax.tree.leaves(rx.BACKEND_ROWS["cpu"])) == 7
    assert jax.tree.map(lambda x: x, rx.BACKEND_ROWS["cpu"]).provenance == ARCH
