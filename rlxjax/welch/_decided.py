"""Which variant of Welch peaks runs a call: what was measured of it, here or earlier, and what the model learned."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ._launch import program_of
from ._params import WelchPeakParams
from ._schedule import RUNNER_VERSION

if TYPE_CHECKING:
    from rlxjax.calibration import CalibratedModel, Calibration

#: The name of this workload among a calibration's models.
MODEL_NAME = "welch"


def decided_variant(
    variants: Sequence[str],
    batch: int,
    params: WelchPeakParams,
    calibration: "Calibration | None",
    model: Any,
    what: Mapping[str, Any],
    measure: str | None,
    signal: Any,
) -> str | None:
    """Return the variant that a call runs, by what is measured of it or was, and by what the model learned from it.

    Args:
        variants: that may run.
        batch: rows of the call.
        params: of the call.
        calibration: of this machine, if there is one.
        model: a learned FFT, if there is one.
        what: else of the signal a choice depends on, for JSON.
        measure: "never", "undecided" or "always"; as the environment says, else "never", unless given.
        signal: the rows, if they are at hand.

    Returns:
        An empty text where nothing was ever measured here; None where something is to be, and the rows are not there.
    """
    from rlxjax.advice import Contender, Memory, Question, decide, digest, forecast_of_variants, measure_word, recalled

    word = measure_word(measure, "never")
    if word == "never" and not Memory().path.exists():
        return ""
    if word != "never" and signal is None:
        return None
    calibrated = None if calibration is None else calibration.models.get(MODEL_NAME)
    if calibrated is not None and "learned" in variants and not len(calibrated.posterior.facts["learned_n_fft"]):
        variants = [name for name in variants if name != "learned"]  # none was ever timed
    sizes = {"batch": batch, "n_fft": params.n_fft, "k": min(params.k, params.n_bins), "n_segments": params.n_segments}
    contenders = [
        Contender(
            variant,
            digest(MODEL_NAME, RUNNER_VERSION, variant, _content_of(model) if variant == "learned" else ""),
            run := functools.partial(_run, signal, params, variant, model),
            run,
            ((variant, {name: float(size) for name, size in sizes.items()}),),
        )
        for variant in variants
    ]

    def forecast(known: "CalibratedModel") -> Any:
        return forecast_of_variants(contenders, known if "learned" not in variants else with_work(known, model, params))

    question = Question(
        contenders,
        MODEL_NAME,
        ", ".join(f"{name} {size}" for name, size in sizes.items()),
        {**sizes, **what},
        calibrated,
        forecast,
        word,
        check=False,  # a learned FFT is approximate, and the others are tested
    )
    found = recalled(question) if word == "never" and calibrated is None else decide(question)
    return "" if found is None else found.name


def _run(signal: Any, params: WelchPeakParams, variant: str, model: Any) -> Any:
    from ._run import welch_peaks

    return welch_peaks(signal, params, variant, model=model)


def with_work(calibrated: "CalibratedModel", model: Any, params: WelchPeakParams) -> "CalibratedModel":
    """Return the model of Welch peaks where a learned FFT runs with the work of the one that is given."""
    return _with_work(calibrated, params.n_fft, program_of(model, params).work)


@functools.lru_cache(maxsize=16)
def _with_work(calibrated: "CalibratedModel", n_fft: int, work: Any) -> "CalibratedModel":
    facts = {"learned_n_fft": n_fft, "learned_flop": work.flop, "learned_live_bins": work.live_bins}
    return calibrated.with_facts(**{name: np.array([value], float) for name, value in facts.items()})


def _content_of(model: Any) -> str:
    """Return the digest of a learned FFT."""
    leaves, structure = jax.tree.flatten(model)
    found = hashlib.sha256(str(structure).encode())
    for leaf in leaves:
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()
