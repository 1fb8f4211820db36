"""A second call with other values of the same shapes compiles nothing, whichever public function it is."""

import jax
import jax.numpy as jnp
import numpy as np
from _compilations import COMPILE, compilations
from _public_calls import public_calls
from test_api import FUNCTIONS, PUBLIC

import rlxjax as rx

CALLS = public_calls()

#: Public functions that compute no numbers with JAX.
EXEMPT = {
    "advise": "exact integers and predictions on the host",
    "choose": "predictions and timings on the host",
    "default_calibration": "reads a file",
    "evaluate": "a table in, a table out",
    "fusion_target": "names in, a name out",
    "is_fused_viable": "names in, a truth value out",
    "load_calibration": "reads a file",
    "load_learned_fft": "reads a file",
    "node_io_bytes": "exact integers on the host",
    "padded_batch": "exact integers on the host",
    "parse_welch_peaks_strategy": "names in, a name out",
    "prior_calibration": "reads a file",
    "profile_function": "exact integers on the host",
    "profile_graph_io": "exact integers on the host",
    "register_rule": "keeps a rule",
    "rewrite_graph": "a graph in, a graph out",
    "save_learned_fft": "writes a file",
    "select_peaks_only_outputs": "a graph in, a graph out",
    "stream_welch_peaks": "runs welch_peaks",
    "tensor_bytes": "exact integers on the host",
    "train_learned_fft": "a job of minutes, whose programs depend on the gates that it finds",
    "predicted_ns": "traced code, for a caller's own program",
    "save_calibration": "writes a file",
    "wide_prior": "numbers in, numbers out",
    "welch_peaks_graph": "a graph out",
}


def test_every_public_function_is_called_here_or_exempt():
    called = {name.split(" ")[0].split(".")[0] for name in CALLS}
    assert called.isdisjoint(EXEMPT)
    assert set(FUNCTIONS) <= called | set(EXEMPT) <= set(PUBLIC)


def compiles(call, turn):
    """Return the names of what a call traced, lowered and compiled."""
    compilations.clear()
    jax.block_until_ready(call(turn))
    return compilations[:]


def test_new_values_compile_nothing():
    for call in CALLS.values():
        call(0)
    assert [name for name, call in CALLS.items() if compiles(call, 1)] == []


def test_new_values_compile_nothing_in_grad_or_vmap_without_a_jit_of_the_callers():
    params, model = rx.WelchPeakParams(16, 3, k=2), rx.learned.LearnedFft.exact(16)
    cases = (("fused", jax.grad, (3, params.frame_len)), ("learned", jax.vmap, (2, 3, params.frame_len)))
    for path, transform, shape in cases:

        def call(turn, path=path, transform=transform, shape=shape):
            signal = jnp.asarray(np.random.default_rng(turn).standard_normal(shape, np.float32))
            return transform(lambda x: rx.welch_peaks(x, params, path, model=model)[..., 1].sum())(signal)

        call(0)
        assert compiles(call, 1) == []


def test_the_first_call_of_a_path_compiles_one_program():
    # Sizes of which no other test runs anything.
    params, model = rx.WelchPeakParams(32, 5, k=7), rx.learned.LearnedFft.exact(32)
    signal = np.ones((3, params.frame_len), np.float32)
    for path in ("fused", "block", "learned"):
        events = compiles(lambda _, path=path: rx.welch_peaks(signal, params, path, model=model), 0)
        assert events.count(COMPILE) == 1, path


def test_the_counter_sees_what_is_compiled():
    compilations.clear()
    rx.soft_relu(np.ones((2, 3, 5, 7)), 0.5)
    assert compilations
