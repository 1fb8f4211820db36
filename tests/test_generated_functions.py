"""Generated functions under JAX's transformations get a count or one sentence; empty arrays get a count."""

import collections
import contextlib
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from test_function_profile_rules import CASES

from benchmarks.generated_functions import TRANSFORMS, generated, outcome
from rlxjax.calibration import prior_calibration
from rlxjax.jaxpr import profile_function


@pytest.fixture
def as_users_do():
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


@pytest.mark.usefixtures("as_users_do")
def test_a_generated_function_gets_a_count_or_one_sentence():
    calibration, found = prior_calibration(), collections.Counter()
    for number, case in enumerate(generated(100)):
        kind, said = outcome(case, None if number % 25 else calibration, compiled=number % 50 == 0)
        assert kind != "traceback", (case, said)
        found[kind] += 1
    assert found["count"] > 60  # JAX itself refuses the others
    assert {case.transform for case in generated(100)} == {*TRANSFORMS}


def test_empty_arrays_are_counted():
    asked = [(lambda x: lax.fft(x, "FFT", (0,)), [jax.ShapeDtypeStruct((3, 0), jnp.complex64)])]
    for function, args, _, _ in CASES.values():
        sizes = [size for array in jax.tree.leaves(args) for size in array.shape]
        empty = sizes[-1] if sizes else 0

        def emptied(array, empty=empty):
            return jax.ShapeDtypeStruct([0 if size == empty else size for size in array.shape], array.dtype)

        asked.append((function, jax.tree.map(emptied, args)))
    traced = 0
    for function, args in asked:
        try:
            jax.eval_shape(function, *args)
        except Exception:  # noqa: BLE001 - some functions need elements
            continue
        traced += 1
        assert profile_function(function, *args).peak_bytes >= 0
    assert traced > 100
