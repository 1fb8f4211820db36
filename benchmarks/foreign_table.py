"""Functions of other authors with arguments to run them on: a call of a library, or a few lines of a tutorial.

Use `FUNCTIONS` while you change rules and fits. Keep `SPARE` unseen, as the held-out set.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import optax

F32 = jnp.float32


class Draw:
    """Draws NumPy arguments for a function, the same arguments each time."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(self, text: str) -> np.ndarray:
        """Return an array of a shape.

        `4,128` are normal numbers, `+4,128` numbers between 0.1 and 1, `<9 4,128` integers below 9,
        and `spd 9` is a symmetric positive definite matrix.
        """
        *kind, sizes = text.lstrip("+").split()
        shape = tuple(map(int, sizes.split(",")))
        if text[0] == "+":
            return self._positive(shape)
        if text[0] == "<":
            return self._rng.integers(0, int(kind[0][1:]), shape, np.int32)
        if not kind:
            return self._normal(shape)
        half = self._normal(2 * shape)
        return half @ half.T / len(half) + np.eye(len(half), dtype=np.float32)

    def weights(self, tree: Any) -> Any:
        """Replace shapes by small numbers; integers are 0."""
        return jax.tree.map(lambda leaf: self._filled(leaf, 0.05 * self._normal(leaf.shape)), tree)

    def state(self, tree: Any) -> Any:
        """Replace shapes by positive numbers, for variances; integers are 0."""
        return jax.tree.map(lambda leaf: self._filled(leaf, self._positive(leaf.shape)), tree)

    def _normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return self._rng.standard_normal(shape, np.float32)

    def _positive(self, shape: tuple[int, ...]) -> np.ndarray:
        return 0.1 + 0.9 * self._rng.random(shape, np.float32)

    def _filled(self, leaf: Any, values: np.ndarray) -> np.ndarray:
        is_real = jnp.issubdtype(leaf.dtype, jnp.floating)
        return values.astype(leaf.dtype) if is_real else np.zeros(leaf.shape, leaf.dtype)


#: A function and its arguments.
Call = tuple[Callable[..., Any], tuple[Any, ...]]


class Foreign(NamedTuple):
    """A function of a library.

    Attributes:
        name: the name of the function.
        library: the library; its first part is the package to install.
        make: returns the function with its arguments.
        trip_counts: trip counts of loops with an unknown length; None leaves them unknown.
    """

    name: str
    library: str
    make: Callable[[Draw], Call]
    trip_counts: tuple[int, ...] | None = None

    def call(self, seed: int = 0) -> Call:
        """Return the function and NumPy arrays to call it with."""
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return self.make(Draw(seed))


# --- optax: one update of a tree of parameters -------------------------------------------------------


def _transformer_weights(width: int = 128, layers: int = 4) -> Any:
    """The weights of a small transformer, as shapes."""
    shapes = {
        "norm": (width,),
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 4 * width),
        "up_bias": (4 * width,),
        "down": (4 * width, width),
    }
    layer = {name: jax.ShapeDtypeStruct(shape, F32) for name, shape in shapes.items()}
    return {"embed": jax.ShapeDtypeStruct((1000, width), F32), "layers": [layer] * layers}


def _updates(make_optimizer: Callable[[], optax.GradientTransformation], draw: Draw) -> Call:
    optimizer, shapes = make_optimizer(), _transformer_weights()

    def step(gradient, state, weights):
        updates, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state

    state = draw.state(jax.eval_shape(optimizer.init, shapes))
    return step, (draw.weights(shapes), state, draw.weights(shapes))


def _clipped_momentum() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(optax.cosine_decay_schedule(0.1, 1000), momentum=0.9))


# --- jax.scipy, jax.nn, jax.random and the like ------------------------------------------------------


def _logistic_regression(draw: Draw) -> Call:
    """The log density of a Bayesian logistic regression, and its gradient."""

    def log_density(weights, features, labels):
        prior = jsp.stats.norm.logpdf(weights, 0.0, 2.0).sum()
        return prior + jsp.stats.bernoulli.logpmf(labels, jax.nn.sigmoid(features @ weights)).sum()

    return jax.value_and_grad(log_density), (draw("64") / 16, draw("4096,64"), draw("<2 4096"))


def _gaussian_process(draw: Draw) -> Call:
    """The log marginal likelihood of a Gaussian process, and its gradient in the logarithms of three scales."""

    def log_likelihood(log_scales, points, values):
        amplitude, length, noise = jnp.exp(log_scales)
        squares = jnp.sum((points[:, None] - points[None]) ** 2, -1)
        kernel = amplitude**2 * jnp.exp(-0.5 * squares / length**2) + noise**2 * jnp.eye(len(points), dtype=F32)
        return jsp.stats.multivariate_normal.logpdf(values, jnp.zeros_like(values), kernel)

    return jax.value_and_grad(log_likelihood), (np.zeros(3, np.float32), draw("256,4"), draw("256"))


def _linear_recurrence(draw: Draw) -> Call:
    """A diagonal state space model, `x[t] = a[t] x[t - 1] + b[t]`, by a scan over pairs."""

    def combine(left, right):
        return left[0] * right[0], left[1] * right[0] + right[1]

    return functools.partial(jax.lax.associative_scan, combine), ((draw("+1024,64"), draw("1024,64")),)


def _mixture(draw: Draw) -> Call:
    """The log density of a mixture of normal distributions, and its gradient."""

    def log_density(logits, means, log_scales, values):
        each = jsp.stats.norm.logpdf(values[:, None], means, jnp.exp(log_scales))
        return jsp.special.logsumexp(jax.nn.log_softmax(logits) + each, axis=1).sum()

    args = (draw("8"), draw("8"), draw("8"), draw("20000"))
    return jax.value_and_grad(log_density, argnums=(0, 1, 2)), args


def _k_means(draw: Draw) -> Call:
    """One step of Lloyd's algorithm."""

    def step(points, centres):
        nearest = jnp.argmin(jnp.sum((points[:, None] - centres[None]) ** 2, -1), 1)
        sums = jax.ops.segment_sum(points, nearest, 32)
        return sums / jnp.maximum(jnp.bincount(nearest, length=32), 1)[:, None].astype(F32)

    return step, (draw("8192,8"), draw("32,8"))


# --- Graph networks, as jraph's tutorials write them -------------------------------------------------


def _graph(draw: Draw) -> tuple[Any, ...]:
    return draw("2000,64"), draw("<2000 10000"), draw("<2000 10000")


def _graph_convolution(draw: Draw) -> Call:
    def layer(weights, nodes, senders, receivers):
        count = len(nodes)
        ones = jnp.ones_like(senders, F32)
        sent, received = (jax.ops.segment_sum(ones, at, count) for at in (senders, receivers))
        nodes = (nodes @ weights) * jax.lax.rsqrt(jnp.maximum(sent, 1.0))[:, None]
        summed = jax.ops.segment_sum(nodes[senders], receivers, count)
        return jax.nn.relu(summed * jax.lax.rsqrt(jnp.maximum(received, 1.0))[:, None])

    return layer, (0.1 * draw("64,64"), *_graph(draw))


def _graph_attention(draw: Draw) -> Call:
    def layer(weights, query, nodes, senders, receivers):
        count = len(nodes)
        nodes = nodes @ weights
        scores = jax.nn.leaky_relu(jnp.concatenate([nodes[senders], nodes[receivers]], -1) @ query)
        scores = jnp.exp(scores - jax.ops.segment_max(scores, receivers, count)[receivers])
        shares = scores / jax.ops.segment_sum(scores, receivers, count)[receivers]
        return jax.nn.elu(jax.ops.segment_sum(shares[:, None] * nodes[senders], receivers, count))

    return layer, (0.1 * draw("64,64"), draw("128"), *_graph(draw))


# --- flax ----------------------------------------------------------------------------------------------


def _linen(module: Any, draw: Draw, *inputs: np.ndarray, **kwargs: Any) -> Call:
    variables = jax.eval_shape(functools.partial(module.init, **kwargs), jax.random.key(0), *inputs)
    variables = {name: draw.weights(tree) for name, tree in variables.items()}
    return functools.partial(module.apply, **kwargs), (variables, *inputs)


def _linen_cnn(draw: Draw) -> Call:
    """The convolutional network of flax's example for MNIST."""
    from flax import linen as nn

    module = nn.Sequential(
        [
            nn.Conv(32, (3, 3)),
            nn.relu,
            lambda x: nn.avg_pool(x, (2, 2), (2, 2)),
            nn.Conv(64, (3, 3)),
            nn.relu,
            lambda x: nn.avg_pool(x, (2, 2), (2, 2)),
            lambda x: x.reshape(len(x), -1),
            nn.Dense(256),
            nn.relu,
            nn.Dense(10),
        ]
    )
    return _linen(module, draw, draw("16,28,28,1"))


def _linen_transformer(draw: Draw) -> Call:
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
            return x + nn.Dense(128)(nn.gelu(nn.Dense(512)(nn.LayerNorm()(x))))

    return _linen(Block(), draw, draw("8,64,128"))


def _linen_lstm(draw: Draw) -> Call:
    from flax import linen as nn

    return _linen(nn.RNN(nn.LSTMCell(128)), draw, draw("16,50,64"))


def _linen_training(draw: Draw) -> Call:
    """A step of training a multilayer perceptron with Adam."""
    from flax import linen as nn

    module = nn.Sequential([nn.Dense(256), nn.relu, nn.Dense(256), nn.relu, nn.Dense(10)])
    optimizer = optax.adam(1e-3)
    apply, (weights, images) = _linen(module, draw, draw("128,784"))

    def step(weights, state, images, labels):
        def loss(weights):
            return optax.softmax_cross_entropy_with_integer_labels(apply(weights, images), labels).mean()

        value, gradient = jax.value_and_grad(loss)(weights)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(weights, updates), state, value

    state = draw.state(jax.eval_shape(optimizer.init, weights))
    return step, (weights, state, images, draw("<10 128"))


def _nnx(module: Callable[[Any], Any], draw: Draw) -> tuple[Any, Any]:
    from flax import nnx

    definition, shapes = nnx.split(nnx.eval_shape(lambda: module(nnx.Rngs(0))))
    return definition, draw.state(shapes)


def _nnx_training(draw: Draw) -> Call:
    """The loss of a multilayer perceptron of flax.nnx, and its gradient."""
    from flax import nnx

    def module(rngs):
        layers = [nnx.Linear(64, 256, rngs=rngs), nnx.gelu, nnx.Linear(256, 256, rngs=rngs), nnx.gelu]
        return nnx.Sequential(*layers, nnx.Linear(256, 1, rngs=rngs))

    definition, weights = _nnx(module, draw)

    def loss(weights, x, y):
        return optax.l2_loss(nnx.merge(definition, weights)(x)[:, 0], y).mean()

    return jax.value_and_grad(loss), (weights, draw("256,64"), draw("256"))


def _nnx_batch_norm(draw: Draw) -> Call:
    """A convolution with batch normalisation in training, and its new averages."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(16, 32, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(32, rngs=rngs)

        def __call__(self, x):
            return nnx.relu(self.norm(self.conv(x)))

    definition, weights = _nnx(Block, draw)

    def apply(weights, x):
        block = nnx.merge(definition, weights)
        return block(x), nnx.state(block)

    return apply, (weights, draw("8,32,32,16"))


# --- equinox -------------------------------------------------------------------------------------------


def _equinox(module: Callable[[jax.Array], Any], draw: Draw) -> tuple[Any, Callable[[Any], Any]]:
    """Return the weights of a module, and a function that makes a module from weights."""
    import equinox as eqx

    shapes, static = eqx.partition(
        eqx.filter_eval_shape(module, jax.random.key(0)), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    )
    return draw.weights(shapes), lambda weights: eqx.combine(weights, static)


def _equinox_mlp(draw: Draw) -> Call:
    """The loss of a multilayer perceptron, and its gradient."""
    import equinox as eqx

    weights, module = _equinox(lambda key: eqx.nn.MLP(32, 1, 128, 3, dtype=F32, key=key), draw)

    def loss(weights, x, y):
        return jnp.mean((jax.vmap(module(weights))(x)[:, 0] - y) ** 2)

    return jax.value_and_grad(loss), (weights, draw("512,32"), draw("512"))


def _equinox_attention(draw: Draw) -> Call:
    import equinox as eqx

    weights, module = _equinox(lambda key: eqx.nn.MultiheadAttention(8, 128, dtype=F32, key=key), draw)

    def attend(weights, x):
        return jax.vmap(lambda row: module(weights)(row, row, row))(x)

    return attend, (weights, draw("8,64,128"))


def _equinox_cnn(draw: Draw) -> Call:
    import equinox as eqx

    def make(key):
        first, second = jax.random.split(key)
        layers = [eqx.nn.Conv2d(3, 16, 3, dtype=F32, key=first), eqx.nn.Lambda(jax.nn.relu), eqx.nn.MaxPool2d(2, 2)]
        return eqx.nn.Sequential([*layers, eqx.nn.Conv2d(16, 32, 3, dtype=F32, key=second)])

    weights, module = _equinox(make, draw)
    return lambda weights, x: jax.vmap(module(weights))(x), (weights, draw("8,3,32,32"))


def _equinox_gru(draw: Draw) -> Call:
    import equinox as eqx

    weights, module = _equinox(lambda key: eqx.nn.GRUCell(32, 64, dtype=F32, key=key), draw)

    def last(weights, x):
        cell = module(weights)
        return jax.lax.scan(lambda state, row: (cell(row, state), None), jnp.zeros(64, F32), x)[0]

    return jax.vmap(last, in_axes=(None, 0)), (weights, draw("32,64,32"))


# --- diffrax and optimistix ------------------------------------------------------------------------------

SOLVER_STEPS = 100


def _solved(field: Callable[..., Any], solver: Any, steps: int = SOLVER_STEPS) -> Callable[..., Any]:
    """Return a solve with a constant step size, from start and parameters to the end."""
    import diffrax

    def solve(start, parameters):
        times = np.float32(0), np.float32(1), np.float32(1 / steps)
        return diffrax.diffeqsolve(diffrax.ODETerm(field), solver, *times, start, parameters, max_steps=steps + 1).ys

    return solve


def _lotka_volterra(_: Any, populations: jax.Array, rates: jax.Array) -> jax.Array:
    prey, predators = populations
    return jnp.stack(
        [rates[0] * prey - rates[1] * prey * predators, rates[2] * prey * predators - rates[3] * predators]
    )


def _diffrax_solve(draw: Draw) -> Call:
    import diffrax

    return _solved(_lotka_volterra, diffrax.Tsit5()), (draw("+2"), draw("+4"))


def _diffrax_batch(draw: Draw) -> Call:
    import diffrax

    return jax.vmap(_solved(_lotka_volterra, diffrax.Tsit5())), (draw("+1000,2"), draw("+1000,4"))


def _diffrax_neural(draw: Draw) -> Call:
    """A neural differential equation of a batch."""
    import diffrax
    import equinox as eqx

    weights, module = _equinox(lambda key: eqx.nn.MLP(8, 8, 64, 2, jax.nn.softplus, dtype=F32, key=key), draw)
    solve = _solved(lambda t, y, weights: module(weights)(y), diffrax.Heun(), 50)
    return jax.vmap(solve, in_axes=(0, None)), (draw("64,8"), weights)


def _optimistix_newton(draw: Draw) -> Call:
    """The implicit Euler step of a reaction, for many starts."""
    import optimistix

    def residual(end, start):
        return end - start - 0.1 * jnp.stack([-end[0] * end[1], end[0] * end[1] - end[1] ** 2, end[1] ** 2])

    def root(start):
        return optimistix.root_find(residual, optimistix.Newton(1e-4, 1e-4), start, start).value

    return jax.vmap(root), (draw("+1000,3"),)


def _optimistix_least_squares(draw: Draw) -> Call:
    """A decay fitted to values, in JAX's default precision."""
    import optimistix

    times = np.linspace(0, 3, 256)

    def residual(parameters, values):
        return parameters[0] * jnp.exp(-parameters[1] * times) + parameters[2] - values

    def fit(start, values):
        solver = optimistix.LevenbergMarquardt(1e-4, 1e-4)
        return optimistix.least_squares(residual, solver, start, values, max_steps=64, throw=False).value

    return fit, (np.ones(3), 2 * np.exp(-1.5 * times) + 0.5 + 0.05 * draw("256"))


def _of(function: Callable[..., Any], *draws: str, **kwargs: Any) -> Callable[[Draw], Call]:
    """Return a function that makes a call of a library's function with an array for each text."""
    return lambda draw: (functools.partial(function, **kwargs), tuple(map(draw, draws)))


def _update(make_optimizer: Callable[[], optax.GradientTransformation]) -> Callable[[Draw], Call]:
    return functools.partial(_updates, make_optimizer)


CG_STEPS = 30

FUNCTIONS = (
    Foreign("dot-product attention", "jax.nn", _of(jax.nn.dot_product_attention, *3 * ["4,128,8,32"])),
    Foreign(
        "softmax cross entropy",
        "optax",
        _of(
            jax.value_and_grad(lambda x, labels: optax.softmax_cross_entropy_with_integer_labels(x, labels).mean()),
            "512,1000",
            "<1000 512",
        ),
    ),
    Foreign("gamma logpdf", "jax.scipy.stats", _of(jsp.stats.gamma.logpdf, "+50000", "+50000")),
    Foreign("gamma cdf", "jax.scipy.stats", _of(jsp.stats.gamma.cdf, "+5000", "+5000")),
    Foreign(
        "multivariate normal logpdf",
        "jax.scipy.stats",
        _of(jsp.stats.multivariate_normal.logpdf, "2048,32", "32", "spd 32"),
    ),
    Foreign(
        "Cholesky solve",
        "jax.scipy.linalg",
        _of(lambda a, b: jsp.linalg.cho_solve(jsp.linalg.cho_factor(a), b), "spd 256", "256,16"),
    ),
    Foreign("expm", "jax.scipy.linalg", lambda draw: (jsp.linalg.expm, (0.1 * draw("64,64"),))),
    Foreign("svd", "jax.numpy.linalg", _of(jnp.linalg.svd, "128,64", full_matrices=False)),
    Foreign("eigh", "jax.numpy.linalg", _of(jnp.linalg.eigh, "spd 96")),
    Foreign(
        "conjugate gradients",
        "jax.scipy.sparse",
        _of(lambda a, b: jsp.sparse.linalg.cg(a, b, tol=0.0, maxiter=CG_STEPS)[0], "spd 512", "512"),
        (CG_STEPS,),
    ),
    Foreign("fftconvolve", "jax.scipy.signal", _of(jsp.signal.fftconvolve, "65536", "1025")),
    Foreign("stft", "jax.scipy.signal", _of(lambda x: jsp.signal.stft(x, nperseg=512)[2], "8,16384")),
    Foreign(
        "map_coordinates",
        "jax.scipy.ndimage",
        lambda draw: (
            lambda image, x, y: jsp.ndimage.map_coordinates(image, [x, y], order=1),
            (draw("256,256"), 255 * draw("+128,128"), 255 * draw("+128,128")),
        ),
    ),
    Foreign(
        "resize, bicubic",
        "jax.image",
        _of(jax.image.resize, "4,64,64,3", shape=(4, 128, 128, 3), method="bicubic"),
    ),
    Foreign("median", "jax.numpy", _of(jnp.median, "64,2048", axis=1)),
    Foreign(
        "interp",
        "jax.numpy",
        lambda draw: (jnp.interp, (draw("+20000"), np.linspace(0, 1, 1024, dtype=np.float32), draw("1024"))),
    ),
    Foreign(
        "gamma samples",
        "jax.random",
        lambda draw: (
            functools.partial(jax.random.gamma, shape=(2000,), dtype=F32),
            (jax.random.key(0), draw("+2000")),
        ),
    ),
    Foreign("linear recurrence", "jax.lax", _linear_recurrence),
    Foreign("logistic regression, gradient", "jax.scipy.stats", _logistic_regression),
    Foreign("AdamW update", "optax", _update(lambda: optax.adamw(1e-3))),
    Foreign("Adafactor update", "optax", _update(lambda: optax.adafactor(1e-3))),
    Foreign("clipped momentum update", "optax", _update(_clipped_momentum)),
    Foreign("graph convolution", "jraph's way", _graph_convolution),
    Foreign("CNN of MNIST", "flax.linen", _linen_cnn),
    Foreign("transformer block", "flax.linen", _linen_transformer),
    Foreign("LSTM", "flax.linen", _linen_lstm),
    Foreign("MLP, gradient", "flax.nnx", _nnx_training),
    Foreign("batched MLP, gradient", "equinox", _equinox_mlp),
    Foreign("multi-head attention", "equinox", _equinox_attention),
    Foreign("two convolutions", "equinox", _equinox_cnn),
    Foreign("Tsit5 solve, batch", "diffrax", _diffrax_batch, (100, 6)),
    Foreign("Newton root, batch", "optimistix", _optimistix_newton, (3,)),
)

SPARE = (
    Foreign("student t logpdf", "jax.scipy.stats", _of(jsp.stats.t.logpdf, "50000", "+50000")),
    Foreign("Gaussian process, gradient", "jax.scipy.stats", _gaussian_process),
    Foreign("mixture, gradient", "jax.scipy.stats", _mixture),
    Foreign("LU solve", "jax.scipy.linalg", _of(jnp.linalg.solve, "spd 200", "200,32")),
    Foreign("lstsq", "jax.numpy.linalg", _of(lambda a, b: jnp.linalg.lstsq(a, b)[0], "256,32", "256")),
    Foreign("histogram", "jax.numpy", _of(lambda x: jnp.histogram(x, bins=64)[0], "100000")),
    Foreign("k-means step", "jax.numpy", _k_means),
    Foreign(
        "permutation",
        "jax.random",
        lambda draw: (jax.random.permutation, (jax.random.key(0), draw("50000"))),
    ),
    Foreign("Lion update", "optax", _update(lambda: optax.lion(1e-3))),
    Foreign("LAMB update", "optax", _update(lambda: optax.lamb(1e-3))),
    Foreign("graph attention", "jraph's way", _graph_attention),
    Foreign("MLP, training step", "flax.linen", _linen_training),
    Foreign("convolution with batch norm", "flax.nnx", _nnx_batch_norm),
    Foreign("GRU", "equinox", _equinox_gru),
    Foreign("neural differential equation", "diffrax", _diffrax_neural, (50,)),
    Foreign("Levenberg-Marquardt fit", "optimistix", _optimistix_least_squares, (6,)),
)
TABLES = {"functions": FUNCTIONS, "spare": SPARE, "all": FUNCTIONS + SPARE}
