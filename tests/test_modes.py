"""JAX's own modes, and what a worker is sent: every public function and object, in every mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_retrace import CALLS

import rlxjax as rx
from benchmarks.startup import low_band_model

PARAMS = rx.WelchPeakParams.fast(64, 4)
ROWS = np.random.default_rng(0).standard_normal((3, PARAMS.frame_len), np.float32)
X = np.ones(8, np.float32)
PRIOR = rx.prior_calibration("cpu")
ON_DEVICE = jnp.asarray(ROWS)

#: Beside the calls of `public_calls`.
MORE = {
    "advise": lambda _: rx.advise([jnp.exp, jnp.sum], X, calibration=PRIOR),
    "explain": lambda _: PRIOR.explain(64, 256, 16, 8),
    "predict_function": lambda _: PRIOR.predict_function(lambda x: jnp.exp(x).sum(), X),
    "profile_function": lambda _: rx.profile_function(lambda x: jnp.exp(x).sum(), X),
    "stream": lambda _: list(rx.stream_welch_peaks([ROWS, ROWS], PARAMS, "fused")),
    "one row": lambda _: rx.welch_peaks(ON_DEVICE[0], PARAMS, "fused"),
    "auto": lambda _: rx.welch_peaks(ROWS, PARAMS, calibration=PRIOR, model=low_band_model(64)),
    "block": lambda _: rx.welch_peaks(ON_DEVICE, PARAMS, "block"),
    "many rows": lambda _: rx.welch_peaks(np.ones((3000, PARAMS.frame_len), np.float32), PARAMS, "fused"),
    "jit": lambda _: jax.jit(lambda x: rx.welch_peaks(x, PARAMS, "fused"))(ROWS),
    "grad": lambda _: jax.grad(lambda x: rx.welch_peaks(x, PARAMS, "fused")[..., 1].sum())(ON_DEVICE),
    "vmap": lambda _: jax.vmap(lambda x: rx.welch_peaks(x, PARAMS, "fused"))(ON_DEVICE[None]),
}


MODES = {
    "debug_nans": lambda: jax.debug_nans(True),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "log_compiles": lambda: jax.log_compiles(True),
    "32 bits": lambda: jax.enable_x64(False),
    "64 bits": lambda: jax.enable_x64(True),
}
EVERY = CALLS | MORE


@pytest.mark.parametrize("mode", MODES)
def test_every_public_function_runs_in_every_mode(mode):
    with MODES[mode]():
        for call in EVERY.values():
            jax.block_until_ready(call(0))
