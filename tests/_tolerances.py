"""Every numeric tolerance of the tests, and the finite difference that the gradient ones belong to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

#: Agreement of float64 and float32 results with a float64 reference.
FLOAT64_RTOL = 1e-12
FLOAT32_RTOL = 1e-5

#: Agreement of a gradient with a fourth-order central difference of this relative step.
GRADIENT_RTOL = 1e-6
GRADIENT_STEP = 1e-4
#: Rounding that the difference quotient amplifies: this many ulps of the value, over the step.
GRADIENT_ULPS = 16

#: A relaxation at temperature T is within this many T of the hard choice.
LIMIT_TEMPERATURES = 10.0
#: What is left of a weight or a probability whose margin is 40 temperatures.
SATURATED_ATOL = 1e-12


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradient(f, tree, others):
    """Return the values of rows and the gradient of their sum: one program for all calls with one `f`."""
    value, pull_back = jax.vjp(lambda tree: f(tree, *others), tree)
    return value, *pull_back(jnp.ones_like(value))


def assert_gradient_is_the_finite_difference(f, tree, *others, scale=None, kinks=()):
    """Check the gradient of a row-wise function, one leaf at a time, in float64.

    `f` maps a pytree of leaves `[rows, ...]` to values `[rows]`, row i from entry i of every leaf; `others`
    are arguments that stay as they are. A
    leaf is moved along itself (along 1 where it is 0), so that quantities of any size are tested
    alike. Rows whose value is infinite need a finite gradient and are not compared. `scale` is the
    size of what cancels in a value; leaves named in `kinks` sit on a step of `f` and have no gradient.
    """
    compiled = functools.partial(value_and_gradient, f, others=others)
    tree = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)
    value, gradient = jax.tree.map(np.asarray, compiled(tree))
    finite = np.isfinite(value)
    assert finite.any()
    assert not np.isnan(value).any()
    scale = np.abs(value) if scale is None else np.asarray(scale)
    gradient = jax.tree.leaves(gradient)
    paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(tree), strict=True)
    structure = jax.tree.structure(tree)
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(gradient[i]).all(), f"{name}: the gradient is not finite"
        if name in kinks:
            continue
        direction = np.where(leaf == 0, 1.0, np.abs(leaf))

        def moved(steps, i=i, leaf=leaf, direction=direction):
            changed = leaf + steps * GRADIENT_STEP * direction
            return np.asarray(compiled(structure.unflatten([*leaves[:i], changed, *leaves[i + 1 :]]))[0])[finite]

        difference = 8 * (moved(1) - moved(-1)) - (moved(2) - moved(-2))
        expected = difference / (12 * GRADIENT_STEP)
        along = (gradient[i] * direction).reshape(len(value), -1).sum(1)[finite]
        rounding = GRADIENT_ULPS * np.finfo(np.float64).eps * scale[finite] / GRADIENT_STEP
        error = np.abs(along - expected) - GRADIENT_RTOL * np.abs(expected) - rounding
        worst = int(np.argmax(error))
        assert error[worst] <= 0, f"{name}: row {worst} has {along[worst]}, differences {expected[worst]}"


def assert_close(got, expected, rtol):
    """Compare trees; what cancels is as large as the largest of a leaf."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for first, second in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        largest = np.max(np.abs(second), initial=0.0)
        np.testing.assert_allclose(first, second, rtol=10 * rtol, atol=rtol * largest)
