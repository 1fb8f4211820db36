"""The built-in models: machines, runs that reach every branch of their formulas, and what these take."""

import itertools

import jax
import numpy as np

from rlxjax.fit import Runs, predicted_ns
from rlxjax.models import BUILT_IN, COLLECTIVES, FFT, FUNCTIONS, GPU_KERNELS, WELCH

MODELS = tuple(BUILT_IN.values())


def units_of(model):
    """Return the unit of each input of a run and of its kernels."""
    return {name: entry.unit for name, entry in model.inputs.items()} | dict(model.kernels)


def checked(model, variant, sizes):
    """Return runs of sizes; of a model of kernels, runs of one kernel."""
    if not model.kernels:
        return Runs.checked(model, variant, **sizes)
    columns = {name: np.asarray(size, float) for name, size in sizes.items()}
    kernels = {name: columns.pop(name)[..., None] for name in model.kernels}
    return Runs(model, np.zeros(np.shape(columns["arrays"]), np.int32), columns, kernels)


#: Learned models of three lengths, one of which masks every bin.
LEARNED_FACTS = {
    "learned_n_fft": [64.0, 1000.0, 4096.0],
    "learned_flop": [2e3, 9e4, 1.0],
    "learned_live_bins": [8.0, 100.0, 0.0],
}
FACTS = {
    "welch": jax.tree.map(float, {**WELCH.facts, **LEARNED_FACTS}),
    "fft": dict(FFT.facts),
    "functions": {},
    "gpu_kernels": dict(GPU_KERNELS.facts),
    "collectives": {},
}
#: Sizes that reach every branch of the formulas; batches are 0 or sizes that padding leaves as they are.
SIZES = {
    "welch": {"batch": (0, 1, 10, 96, 8192), "n_fft": (2, 64, 1000, 4096), "k": (1, 16, 50), "n_segments": (1, 2, 8)},
    "fft": {"batch": (1, 32, 2048, 131072), "n_fft": (2, 64, 1000, 4096)},
    "functions": {
        name: (0, 3, 1000, 10**7) if unit != "1" else (0, 0.3, 1) if name == "shared" else (0.5, 1, 3)
        for name, unit in units_of(FUNCTIONS).items()
    },
    "gpu_kernels": dict.fromkeys(units_of(GPU_KERNELS), (0, 3, 1000, 10**7)),
    "collectives": dict.fromkeys(COLLECTIVES.inputs, (0, 3, 1000, 10**7)),
}
#: Sizes of batches with one that is padded, to which the gradient does not follow.
PADDED = {"welch": {"batch": (0, 1, 10, 33, 8192)}}
#: Where there are more runs than these, so many are drawn.
MOST_RUNS = 2000


def machine(model, seed):
    """Return coefficients a few times more or less than the typical ones."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda median: float(median * np.exp(rng.normal())), model.prior.median)


def runs_of(model, variants=None, **changed):
    """Return every variant on every size, `[n]`; of a learned FFT those that have one."""
    sizes = {**SIZES[model.name], **changed}
    variants = range(len(model.variants)) if variants is None else [model.variants.index(name) for name in variants]
    columns = [list(variants), *sizes.values()]
    if np.prod([float(len(column)) for column in columns]) > MOST_RUNS:
        rng = np.random.default_rng(0)
        rows = np.stack([rng.choice(np.array(column, float), MOST_RUNS // 4) for column in columns], -1)
    else:
        rows = np.array(list(itertools.product(*columns)))
    if "looped" in sizes:  # which are launches
        launches, looped = (1 + list(sizes).index(name) for name in ("launches", "looped"))
        rows[:, looped] = np.minimum(rows[:, looped], rows[:, launches])
    runs = checked(model, rows[:, 0].astype(int), dict(zip(sizes, rows[:, 1:].T, strict=True)))
    known = np.asarray(model.same_result(runs, FACTS[model.name]))[np.arange(len(rows)), rows[:, 0].astype(int)]
    return jax.tree.map(lambda column: column[known], runs)


@jax.jit
def times(coefficients, runs, facts):
    return predicted_ns(coefficients, runs, facts)
