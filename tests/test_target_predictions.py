"""Predictions for devices that are not there: what they stand on, and those of compilers where one is installed."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlxjax as rx
from rlxjax.calibration import known_gpu, predict_for_target, prior_calibration
from rlxjax.fit import coefficient_names, estimate, prior_posterior
from rlxjax.jaxpr import GpuKernel, GpuKernelKind, GpuProgram
from rlxjax.models import GPU_KERNELS, gpu_facts, gpu_facts_of_kind, gpu_runs
from rlxjax.targets import target_device, target_names

GPUS = [name for name in target_names() if target_device(name).platform == "cuda"]
COMPILERS = {"h100": "jax_cuda13_plugin", "tpu-v5e": "libtpu"}
COPY = GpuProgram(1, 1, (GpuKernel(GpuKernelKind.ELEMENTWISE, 1, read_bytes=2**29, written_bytes=2**29),))


def log_sd(known):
    found = estimate(known.model.posterior, gpu_runs([COPY]))
    return float(np.hypot(np.asarray(found.log_sd()), known.model.pace_log_sd)[0])


def test_facts_are_those_of_the_data_sheet_and_kinds_are_known_by_jax_s_name_of_them():
    for name in GPUS:
        device = target_device(name)
        facts = gpu_facts(device)
        assert facts["memory_bytes_per_ns"] == device.bandwidth_bytes_per_ns
        assert (facts["cores"], facts["cache_bytes"]) == (device.cores, device.l2_bytes)
        assert facts["half_flop_per_ns"] == device.matrix_flop_per_ns["bf16"]
        assert facts == gpu_facts_of_kind(f"NVIDIA {name.upper()}-SXM")
    assert gpu_facts_of_kind("cpu") is None
    with pytest.raises(ValueError, match="target tpu-v5e: expected a GPU"):
        gpu_facts(target_device("tpu-v5e"))


def test_a_prediction_stands_on_timings_of_such_a_device_or_else_on_its_data_sheet_and_is_less_sure_then():
    for name in GPUS:
        known = known_gpu(target_device(name))
        is_timed = name in ("h100", "h200")
        assert known.stands_on.startswith("timings of one NVIDIA H" if is_timed else "the data sheet of NVIDIA")
        assert bool(known.model.domain) is is_timed
        assert set(known.model.provenance.values()) == {rx.gate.Provenance.UNCALIBRATED}
        assert known.model.posterior.facts == gpu_facts(target_device(name))
    assert log_sd(known_gpu(target_device("h100"))) < log_sd(known_gpu(target_device("a100")))
    # The same program takes longer where the memory is slower.
    times = [
        float(estimate(known_gpu(target_device(name)).model.posterior, gpu_runs([COPY])).time_ns[0]) for name in GPUS
    ]
    bandwidths = [target_device(name).bandwidth_bytes_per_ns for name in GPUS]
    others = [place for place, name in enumerate(GPUS) if name not in ("h100", "h200")]
    by_bandwidth = sorted(others, key=lambda place: bandwidths[place])
    assert [times[place] for place in by_bandwidth] == sorted((times[place] for place in others), reverse=True)


def test_a_calibration_of_such_a_device_is_used_and_of_another_is_not():
    shipped = prior_calibration("gpu")
    posterior = prior_posterior(GPU_KERNELS)
    models = {GPU_KERNELS.name: dataclasses.replace(shipped.of("gpu_kernels"), posterior=posterior)}
    for kind, is_used in (("NVIDIA L4", True), ("NVIDIA A100", False)):
        own = dataclasses.replace(shipped, models=models, fingerprint={"device_kind": kind})
        known = known_gpu(target_device("l4"), own)
        assert (known.stands_on == "a calibration of NVIDIA L4") is is_used
        assert (known.model.coefficients == posterior.coefficients) is is_used


def test_the_population_of_gpus_has_every_coefficient_and_each_card_s_own():
    section = rx.calibration.population("gpu").models["gpu_kernels"]
    names = set(coefficient_names(GPU_KERNELS.prior.median))
    assert set(section.coefficients) == names
    kinds = [machine.fingerprint.device_kind for machine in section.population.machines]
    assert kinds == [
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H200",
    ]
    assert all(set(machine.coefficients) == names for machine in section.population.machines)


def compiled_for(target):
    if importlib.util.find_spec(COMPILERS[target]) is None:
        pytest.skip(f"the compiler for {target} is not installed")


@pytest.mark.parametrize("target", COMPILERS)
def test_a_prediction_for_a_target_lies_in_its_interval_and_says_what_it_stands_on(target):
    compiled_for(target)
    rows = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    found = predict_for_target(jax.nn.softmax, rows, target=target)
    assert 0 < found.low_ns < found.time_ns < found.high_ns < np.inf
    np.testing.assert_allclose(sum(found.terms_ns.values()), found.time_ns)
    # The memory's bandwidth bounds it.
    assert found.high_ns > 2 * 4 * 4096**2 / target_device(target).bandwidth_bytes_per_ns
    assert (found.target, found.as_dict()["stands_on"]) == (target, found.stands_on)
    assert f"on {target}, by {found.stands_on}" in str(found)
    shipped = prior_calibration("cpu")
    assert shipped.predict_function(jax.nn.softmax, rows, target=target).time_ns == found.time_ns


@pytest.mark.parametrize("target", COMPILERS)
def test_every_turn_takes_as_long_and_those_of_unknown_number_have_no_end(target):
    compiled_for(target)
    rows = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)

    def turns(count):
        return lambda x: jax.lax.fori_loop(0, count, lambda _, y: jnp.sin(y) + x, x)

    with jax.enable_x64(False):
        few, some, many = (predict_for_target(turns(count), rows, target=target).time_ns for count in (40, 220, 400))
    assert many > 3 * few
    np.testing.assert_allclose(many - some, some - few, rtol=0.05)
    unknown = predict_for_target(
        lambda x: jax.lax.while_loop(lambda y: y[0, 0] < 1, lambda y: y + 1, x), rows, target=target
    )
    assert unknown.high_ns == np.inf
    assert unknown.uncounted
