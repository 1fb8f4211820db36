"""Digests: of what an alternative runs, and of everything else that a choice depends on."""

import functools
import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from rlxjax._values import Handle, handle
from rlxjax.calibration import CalibratedModel, Fingerprint, current_fingerprint

from ._description import description_of

#: Variables of the environment, beside those of the fingerprint, and settings of JAX on which programs depend, beside
#: those whose effect stands in a jaxpr.
_FLAGS = ("LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "TF_XLA_FLAGS")
_SETTINGS = (
    "jax_allow_f16_reductions",
    "jax_cpu_collectives_implementation",
    "jax_cpu_enable_async_dispatch",
    "jax_debug_infs",
    "jax_debug_nans",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_jit",
    "jax_disable_most_optimizations",
    "jax_enable_x64",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_optimization_level",
    "jax_random_seed_offset",
    "jax_threefry_partitionable",
    "jax_use_shardy_partitioner",
)


def digest(*parts: Any) -> str:
    """Return the hexadecimal SHA-256 of what JSON can write."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def content_of(programs: Sequence[Any], is_jitted: bool = True) -> str:
    """Return the digest of programs that run one after another: of the jaxpr of each, whatever it is called."""
    return digest(is_jitted, [description_of(program.jaxpr) for program in programs])


def setting_of(
    calibrated: CalibratedModel | None, devices: Sequence[Any] = (), runner: Any = None
) -> tuple[str, Fingerprint]:
    """Return the digest of what all choices here share, and the fingerprint that is part of it.

    That is the machine, its software and flags, the settings of JAX, the devices, and the calibration.
    """
    here = _fingerprint()
    flags = {name: os.environ[name] for name in _FLAGS if name in os.environ}
    settings = {name: str(jax.config.values.get(name)) for name in _SETTINGS}
    settings["mesh"] = str(jax.sharding.get_abstract_mesh())
    used = devices or [default_device()]
    kinds = sorted({(device.platform, device.device_kind) for device in used})
    processes = len({device.process_index for device in used})
    model = None if calibrated is None else digest_of_model(calibrated)
    return digest(here.model_dump(mode="json"), flags, settings, kinds, len(used), processes, model, runner), here


def default_device() -> Any:
    """Return the device that holds new arrays."""
    asked: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return asked if hasattr(asked, "device_kind") else jax.devices(asked)[0]


def _fingerprint() -> Fingerprint:
    """Return the fingerprint, looked up once for each state of what it reads of the environment."""
    threads = tuple(os.environ.get(name) for name in ("XLA_FLAGS", "OMP_NUM_THREADS"))
    return _known_fingerprint(threads, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0)


@functools.lru_cache(maxsize=8)
def _known_fingerprint(threads: tuple[str | None, ...], cores: int) -> Fingerprint:
    del threads, cores
    return current_fingerprint()


def digest_of_model(calibrated: CalibratedModel) -> str:
    """Return the digest of a calibrated model, by which a remembered choice says what predicted it."""
    return _digest_of_model(handle(calibrated))


@functools.lru_cache(maxsize=64)
def _digest_of_model(known: Handle) -> str:
    """Return the digest of all numbers of a posterior, and of the model that they belong to."""
    own: Any = known()
    posterior = own.posterior
    leaves, structure = jax.tree.flatten((posterior.facts, posterior))
    found = hashlib.sha256(f"{posterior.model.name} {posterior.model.version} {structure}".encode())
    for leaf in leaves:
        found.update(np.asarray(leaf, np.float64).tobytes())
    return found.hexdigest()
