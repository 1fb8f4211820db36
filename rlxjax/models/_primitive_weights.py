"""How much work an element of a primitive's result is, in units of one exponential of float32.

What XLA makes of a special function is a polynomial of so many terms, an iteration, or a call of a library; how many
is much the same on every processor. `python -m benchmarks.primitive_weights` measures the special functions one by one.
The weights of sines, which depend on how many there are, and of factored matrices are those with which the functions
model fits the timings of functions in `docs/evidence` best.
"""

from collections.abc import Mapping

from rlxjax._values import FrozenDict

#: By the name of the primitive: of float32 and narrower, and of float64.
SPECIAL_WEIGHTS: Mapping[str, tuple[float, float]] = FrozenDict(
    {
        "div": (0.25, 1.2),
        "sqrt": (0.5, 1.9),
        "rsqrt": (0.6, 1.8),
        "exp": (1.0, 4.2),
        "exp2": (1.0, 4.0),
        "expm1": (3.0, 8.5),
        "log": (1.5, 10.0),
        "log1p": (3.0, 14.0),
        "tanh": (1.0, 3.9),
        "logistic": (1.6, 5.6),
        "sin": (20.0, 36.0),
        "cos": (20.0, 36.0),
        "sin foretold": (7.0, 12.0),
        "cos foretold": (7.0, 12.0),
        "tan": (40.0, 48.0),
        "pow": (13.0, 35.0),
        "cbrt": (50.0, 55.0),
        "erf": (1.2, 40.0),
        "erfc": (3.0, 10.0),
        "erf_inv": (6.0, 37.0),
        "lgamma": (25.0, 100.0),
        "digamma": (25.0, 100.0),
        "atan2": (55.0, 50.0),
        "asin": (40.0, 43.0),
        "acos": (60.0, 50.0),
        "atan": (40.0, 30.0),
        "sinh": (6.5, 17.0),
        "cosh": (2.3, 9.0),
        "asinh": (6.0, 30.0),
        "acosh": (6.0, 40.0),
        "atanh": (6.0, 28.0),
        "bessel_i0e": (5.6, 32.0),
        "bessel_i1e": (5.6, 31.0),
        "rem": (74.0, 74.0),
        "nextafter": (0.5, 1.1),
        "igamma": (120.0, 380.0),
        "igammac": (120.0, 400.0),
        "igamma_grad_a": (230.0, 690.0),
        "random_gamma_grad": (210.0, 640.0),
        "regularized_incomplete_beta": (1100.0, 4800.0),
        "polygamma": (100.0, 250.0),
        "random_gamma": (1300.0, 1500.0),
        "zeta": (150.0, 370.0),
    }
)

#: Primitives that XLA's cost analysis counts as operations where it writes them out, and how many each is, of an
#: element; others are one call.
_WRITTEN_OUT = (
    "lgamma digamma igamma igammac igamma_grad_a random_gamma_grad regularized_incomplete_beta polygamma zeta "
    "bessel_i0e bessel_i1e erf_inv asinh acosh"
)
EXPANDED_OPERATIONS: Mapping[str, float] = FrozenDict(
    dict.fromkeys(_WRITTEN_OUT.split(), 50.0) | {"argmax inner": 8.0, "argmin inner": 8.0}
)

#: How much work an element of the largest square in a factored matrix is, in units of one of an LU decomposition, by
#: its primitive.
MATRIX_WEIGHTS: Mapping[str, float] = FrozenDict(
    {
        "cholesky": 0.4,
        "triangular_solve": 0.15,
        "geqrf": 2.6,
        "householder_product": 2.6,
        "qr": 5.2,
        "eigh": 13.0,
        "svd": 28.0,
        "eig": 25.0,
        "schur": 25.0,
    }
)
