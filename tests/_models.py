"""Small latency models, machines of known coefficients, and what timings of them look like."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
from _content import sealed

from rlxjax import IoFusionGate
from rlxjax.calibration import (
    GATE_UNITS,
    SCHEMA_VERSION,
    UNITS,
    CalibratedModel,
    Calibration,
    CalibrationFile,
    current_fingerprint,
    section_of,
)
from rlxjax.fit import (
    Input,
    LatencyModel,
    LatencyPosterior,
    PosteriorFit,
    Runs,
    StrategySpec,
    Timings,
    fit_posterior,
    predicted_ns,
    wide_prior,
)
from rlxjax.gate import Provenance


class LineModel(LatencyModel):
    """`a + b n`; the second variant has half the slope for a dearer start."""

    name, version = "line", 1
    inputs = {"n": Input("items")}
    variants = ("plain", "blocked")
    prior = wide_prior({"call_ns": 1e3, "item_ns": 1.0, "block_ns": 300.0})

    def terms_ns(self, coefficients, runs, facts):
        is_blocked, n = jnp.asarray(runs.variant) == 1, jnp.asarray(runs.inputs["n"])
        return {
            "call_ns": coefficients["call_ns"] + jnp.where(is_blocked, coefficients["block_ns"], 0.0),
            "work_ns": coefficients["item_ns"] * n * jnp.where(is_blocked, 0.5, 1.0),
        }


class TiledModel(LatencyModel):
    """All that the interface offers: two inputs, a default, facts, a jump, features and strategies of their own."""

    name, version = "tiled", 3
    inputs = {"n": Input("items", most=2.0**14), "depth": Input("levels", least=0.5, step=0, default=1.0)}
    variants = ("loop", "tile", "pair")
    prior = wide_prior({"call_ns": 1e3, "item_ns": 2.0, "launch_ns": 2e3, "tile_item_ns": 0.5}, launch_ns=1.0)
    facts = {"tile_items": 64.0, "knots": np.array([2.0, 6.0, 10.0])}

    def terms_ns(self, coefficients, runs, facts):
        variant, tile = jnp.asarray(runs.variant), facts["tile_items"]
        n, depth = (jnp.asarray(runs.inputs[name]) for name in ("n", "depth"))
        padded = tile * jnp.ceil(n / tile)
        # A pair of tiles overlaps, but waits for both.
        tile_ns = coefficients["tile_item_ns"] * padded * jnp.where(variant == 2, 0.6, 1.0)
        launches = jnp.where(variant == 2, 2.0, 1.0)
        return {
            "call_ns": coefficients["call_ns"],
            "launch_ns": jnp.where(variant == 0, 0.0, launches * coefficients["launch_ns"]),
            "work_ns": depth * jnp.where(variant == 0, coefficients["item_ns"] * n, tile_ns),
        }

    @property
    def strategies(self):
        """`once` is a loop of depth 1; `tile` takes the cheaper of tiles one by one and in pairs."""
        return {
            "once": StrategySpec(("loop",), {"depth": 1.0}),
            "loop": StrategySpec(("loop",)),
            "tile": StrategySpec(("tile", "pair")),
        }

    def same_result(self, runs, facts):
        """Pairs are of more than a tile."""
        n = jnp.asarray(runs.inputs["n"])
        is_one = jnp.broadcast_to(n <= facts["tile_items"], runs.shape)
        return jnp.stack([jnp.ones_like(is_one), jnp.ones_like(is_one), ~is_one], -1)

    def features(self, runs, facts):
        """Steps of the logarithm of n from knot to knot."""
        knots, size = jnp.asarray(facts["knots"]), jnp.log2(jnp.asarray(runs.inputs["n"]))[..., None]
        low, high = (jnp.reshape(edge, (1,) * (size.ndim - 1) + (-1,)) for edge in (knots[:-1], knots[1:]))
        steps = jnp.clip((size - low) / (high - low), 0.0, 1.0) - 0.5
        return jnp.broadcast_to(steps, (*runs.shape, steps.shape[-1]))

    def folds(self, runs):
        """Sizes of one n are left out together."""
        return [np.asarray(runs.inputs["n"])]


class TwinModel(LatencyModel):
    """Two coefficients of which the product alone shows."""

    name, version = "twin", 1
    inputs = {"n": Input("items")}
    variants = ("only",)
    prior = wide_prior({"call_ns": 1e3, "left": 1.0, "right": 1.0})

    def terms_ns(self, coefficients, runs, facts):
        work_ns = coefficients["left"] * coefficients["right"] * runs.inputs["n"]
        return {"call_ns": coefficients["call_ns"], "work_ns": work_ns}


LINE, TILED, TWIN = LineModel(), TiledModel(), TwinModel()
#: Sizes that are timed.
N = 2.0 ** np.arange(14)
#: Machines, a few times off the medians of the priors.
LINE_TRUTH = {"call_ns": 2500.0, "item_ns": 3.0, "block_ns": 800.0}
TILED_TRUTH = {"call_ns": 1500.0, "item_ns": 3.0, "launch_ns": 5000.0, "tile_item_ns": 0.8}


def runs_of(model, n=N, **others):
    """Return runs of every variant for each n, `[variants * n]`."""
    variant, sizes = (column.ravel() for column in np.meshgrid(np.arange(len(model.variants)), n, indexing="ij"))
    return Runs.checked(model, variant, n=sizes, **others)


def true_ns(coefficients, runs, facts=None):
    """Return what a machine of these coefficients takes."""
    facts = runs.model.facts if facts is None else facts
    return np.asarray(_predicted_ns(jax.tree.map(float, coefficients), runs, dict(facts)))


def timings_of(coefficients, runs, noise_sd=0.0, seed=0, factor=1.0):
    """Return timings of such a machine, log-normal around what it takes, times a factor."""
    noise = np.exp(np.random.default_rng(seed).normal(0.0, noise_sd, runs.shape))
    inputs = {name: np.broadcast_to(column, runs.shape) for name, column in runs.inputs.items()}
    time_ns = true_ns(coefficients, runs) * noise * factor
    return Timings.checked(runs.model, variant=runs.variant, **inputs, time_ns=time_ns)


def random_posterior(model, coefficients, sd=0.05, spread=0.03, seed=0):
    """Return a posterior with a correction. As after a fit, variants share coefficients, but no weights."""
    rng, features = np.random.default_rng(seed), model.features(runs_of(model), model.facts).shape[-1]
    shape = (len(model.variants), features)
    unknowns = len(coefficients) + shape[0] * shape[1]
    factor = np.tril(rng.normal(0.0, sd / unknowns**0.5, (unknowns, unknowns))) + 0.1 * sd * np.eye(unknowns)
    # The weights' rows of other variants are independent, given the coefficients.
    code = np.repeat(np.arange(shape[0]), features)
    factor[len(coefficients) :, len(coefficients) :] *= code[:, None] == code
    spreads = spread * np.linspace(1.0, 2.0, shape[0])
    return LatencyPosterior(model, dict(model.facts), coefficients, rng.normal(0.0, 0.05, shape), factor, spreads)


def calibrated(posterior, most=2.0**13):
    """Return what a calibration says of a model by this posterior; the domain ends at a size."""
    sizes = {name: most if name == "n" else 4.0 for name in posterior.model.inputs}
    kernels = {name: np.full(1, 4.0) for name in posterior.model.kernels}
    largest = posterior.model.extents(Runs(posterior.model, 0, sizes, kernels))
    domain = {name: (1.0, value) for name, value in largest.items()}
    return CalibratedModel(posterior, {}, {}, domain)


def certain(model, coefficients, sd=1e-3, spread=1e-3):
    """Return a posterior without a correction, of independent unknowns."""
    found = random_posterior(model, coefficients)
    factor = sd * np.eye(len(found.factor))
    return dataclasses.replace(
        found, weights=np.zeros_like(found.weights), factor=factor, spread=np.full_like(found.spread, spread)
    )


GATE = IoFusionGate(
    dispatch_ns=100.0,
    roundtrip_ns=200.0,
    memory_bw=10.0,
    host_readback_bw=5.0,
    unified_memory=1.0,
    host_thunk_penalty_ns=30.0,
    min_gain_ns=0.0,
)


@functools.cache
def line_fit() -> PosteriorFit:
    """Return the posterior of noisy timings of a known machine."""
    return fit_posterior(timings_of(LINE_TRUTH, runs_of(LINE), 0.02))


@functools.cache
def tiled_fit() -> PosteriorFit:
    """Return what a fit might say of another machine, with a correction and variants that are alike."""
    alike = np.array([[1.0, 0.6, 0.3], [0.6, 1.0, 0.5], [0.3, 0.5, 1.0]])
    known = dataclasses.replace(random_posterior(TILED, TILED_TRUTH), alike=alike)
    return line_fit()._replace(posterior=known, runs=runs_of(TILED), left_out_error=np.full(3, 0.02))


@functools.cache
def _file_text():
    return _text_of(line_fit(), tiled_fit())


def _text_of(*fits):
    made = {
        "created": "2024-05-01T12:00:00+00:00",
        "command": "rlxjax calibrate",
        "fingerprint": current_fingerprint().model_dump(),
        "samples": {"suite": "a:B", "file": "a", "sha256": "0", "runner": 1, "timings": 90, "rounds": 3}
        | {"workloads": 30},
    }
    held_out = dict.fromkeys(("fit", "terms_alone", "covered", "held_out"), 0.05)
    errors = {**held_out, "held_out_cells": 7, "noise_floor": 0.01}
    sections = {
        fit.posterior.model.name: section_of(
            fit, fit.posterior.model.prior, noise_floor=0.01, outliers=["one took 4 times"]
        ).model_dump(mode="json")
        | {"held_out": {fit.posterior.model.variants[0]: errors}, **made}
        for fit in fits
    }
    machine = {
        **made,
        "gate": {
            name: {"value": float(getattr(GATE, name)), "unit": unit, "provenance": "measured"}
            for name, unit in GATE_UNITS.items()
        },
        "canary_ns": {"launch": 1e4},
    }
    content = {"schema_version": SCHEMA_VERSION, "units": UNITS, "models": sections, "machine": machine}
    return json.dumps(CalibrationFile.model_validate(content).model_dump(mode="json"))


def file_content(changes=None, fits=()):
    """Return the plain content of a valid file of this machine, some dotted fields replaced; of None dropped.

    A part `*` stands for every section; sections are of these fits, else of both models'. The digests are those of
    what is returned.
    """
    content = json.loads(_text_of(*fits) if fits else _file_text())
    for field, value in (changes or {}).items():
        all_sections, *rest = field.split(".")
        of = [content["machine"], *content["models"].values()] if all_sections == "*" else [content]
        for section in of:
            *parents, last = rest if all_sections == "*" else [all_sections, *rest]
            for parent in parents:
                section = section[parent]
            section.pop(last, None)
            if value is not None:
                section[last] = value
    return sealed(content)


def calibration(models=(LINE, TILED)):
    """Return the calibration that the valid file holds."""
    return Calibration.from_file(CalibrationFile.model_validate(file_content()), models)


def two_models(models=(LINE, TILED)):
    """Return what a file may say of two models, whose words are static."""
    words = {"provenance": {"call_ns": Provenance.MEASURED}, "cautions": ("Few rounds.",), "noise_floor": 0.01}
    posteriors = {LINE: certain(LINE, LINE_TRUTH), TILED: random_posterior(TILED, TILED_TRUTH)}
    found = {
        model.name: dataclasses.replace(calibrated(posteriors[model]), pace_log_sd=0.02, **words) for model in models
    }
    return Calibration(found, GATE, {"platform": "cpu", "cores": 2, "thread_flags": {"A": "1"}}, "a campaign")


_predicted_ns = jax.jit(predicted_ns)
