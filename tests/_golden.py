"""The golden tables of the reference."""

import functools
import json
import operator
import pathlib

import numpy as np
from _tolerances import FLOAT32_RTOL, FLOAT64_RTOL

GOLDEN = pathlib.Path(__file__).parent / "golden"
close = functools.partial(np.testing.assert_allclose, rtol=FLOAT64_RTOL, atol=0)
close32 = functools.partial(np.testing.assert_allclose, rtol=FLOAT32_RTOL, atol=0)


@functools.cache
def golden(name):
    return json.loads((GOLDEN / f"{name}.json").read_text())


def column(rows, *path):
    values = [functools.reduce(operator.getitem, path, row) for row in rows]
    return np.array([-1 if value is None else float("inf") if value == "inf" else value for value in values])
