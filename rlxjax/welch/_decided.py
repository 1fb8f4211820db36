"""Which variant of Welch peaks runs a call: what was measured of it, here or earlier, and what the model learned."""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ._launch import program_of
from ._params import WelchPeakParams
from ._schedule import RUNNER_VERSION

if TYPE_CHECKING:
    from rlxjax.calibration import CalibratedModel, Calibration
    from rlxjax.choices import Question

#: The name of this workload among a calibration's models.
MODEL_NAME = "welch"


def decided_variant(
    ask: Callable[[str, Callable[[str], Any] | None], "Question"],
    measure: str | None,
    run: Callable[[str], Any] | None,
) -> str | None:
    """Return the variant that a call runs, by what is measured of it or was, and by what the model learned from it."""
    from rlxjax.choices import Memory, decide, measure_word, recalled  # loaded when first used

    word = measure_word(measure, "never")
    if word == "never" and not Memory().path.exists():
        return ""
    if word != "never" and run is None:
        return None
    question = ask(word, run)
    found = recalled(question) if word == "never" and question.calibrated is None else decide(question)
    return "" if found is None else found.name


def question_of_variants(
    variants: Sequence[str],
    shape: tuple[int, ...],
    dtype: np.dtype,
    params: WelchPeakParams,
    calibration: "Calibration | None",
    model: Any,
    platform: str | None,
    measure: str,
    run: Callable[[str], Any] | None,
) -> "Question":
    """Return the question which of some variants is the fastest for a call."""
    from rlxjax.choices import Contender, Question, digest, forecast_of_variants

    calibrated = None if calibration is None else calibration.models.get(MODEL_NAME)
    if calibrated is not None and "learned" in variants and not len(calibrated.posterior.facts["learned_n_fft"]):
        variants = [name for name in variants if name != "learned"]  # none was ever timed
    sizes = {"batch": (1, *shape)[-2], "n_fft": params.n_fft, "k": min(params.k, params.n_bins)}
    sizes["n_segments"] = params.n_segments
    contenders = [
        Contender(
            variant,
            digest(MODEL_NAME, RUNNER_VERSION, variant, _content_of(model) if variant == "learned" else ""),
            call := functools.partial(run or str, variant),
            call,
            lambda variant=variant: ((variant, {name: float(size) for name, size in sizes.items()}),),
        )
        for variant in variants
    ]

    def forecast(known: "CalibratedModel") -> Any:
        return forecast_of_variants(contenders, known if "learned" not in variants else with_work(known, model, params))

    # The model's facts do not say the work of this learned FFT: its time is not to teach them.
    return Question(
        [own._replace(runs=tuple) if own.name == "learned" else own for own in contenders],
        MODEL_NAME,
        ", ".join(f"{name} {size}" for name, size in sizes.items()),
        {**sizes, "shape": list(shape), "dtype": str(dtype), "platform": platform},
        calibrated,
        forecast,
        measure,
        check=False,  # a learned FFT is approximate, and the others are tested
        runner=RUNNER_VERSION,
    )


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
