"""The program of a pruned learned FFT. It computes only the butterflies that the gates and the mask leave on.

A model with rounded gates computes each bin as a linear function of samples. The *cone* of a bin is the set of samples
that affect the bin. A single real matrix, `[cone, 2 * bins]`, computes all bins that have the same cone; the matrix
includes the window, the mask and the weights of the powers. Matrices are faster for few samples and bins. For many
samples and bins, the program computes the active butterflies stage by stage.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Real

from rlxjax._typing import RealLike
from rlxjax.welch import WelchPeakParams, default_selection, hann_window, one_sided_weights, program_of, selected_peaks

from ._model import LearnedFft, bit_reversal, butterfly_places, wanted_places

#: Numbers that decide between the forms of a program, measured on two cores: the FLOP per ns of a matrix product, and
#: the time in ns per row of each matrix, of each gathered sample or bin, and of each position in each stage.
MATRIX_FLOP_PER_NS, MATRIX_NS, GATHER_NS, PLACE_NS = 150.0, 40.0, 2.8, 1.1


class LearnedWork(NamedTuple):
    """What a latency model needs to know of a learned FFT: the FLOP per segment, and the number of unmasked bins."""

    flop: RealLike
    live_bins: RealLike


_Cone = tuple[np.ndarray, np.ndarray]


def _is_even(indices: np.ndarray) -> bool:
    """Whether the indices increase by a constant step."""
    steps = np.unique(np.diff(indices))
    return len(steps) == 0 or (len(steps) == 1 and bool(steps[0] > 0))


class Places(NamedTuple):
    """Indices along an axis. They are stored as bytes, because the static fields of a pytree must be hashable."""

    packed: bytes

    @classmethod
    def of(cls, indices: np.ndarray) -> "Places":
        return cls(np.asarray(indices, np.int32).tobytes())

    @property
    def indices(self) -> np.ndarray:
        return np.frombuffer(self.packed, np.int32)

    def take(self, array: Array, axis: int) -> Array:
        """Return an array's entries at the indices. A slice reads evenly spaced entries faster than a gather."""
        indices = self.indices
        if not len(indices):
            return jax.lax.slice_in_dim(array, 0, 0, axis=axis)
        if _is_even(indices):
            step = int(indices[1] - indices[0]) if len(indices) > 1 else 1
            return jax.lax.slice_in_dim(array, int(indices[0]), int(indices[-1]) + 1, step, axis)
        return jnp.take(array, indices, axis=axis, mode="clip")


class Stage(NamedTuple):
    """Where a stage reads `a`, `b`, and the values that pass unchanged. The stage's output has the same order."""

    a: Places
    b: Places
    passing: Places


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LearnedProgram:
    """The program that `learned_peaks` runs. It has either the matrix form or the butterfly form.

    In this pytree, arrays are leaves, and the other fields are static. Live bins are bins whose mask is not 0.

    Attributes:
        matrices: matrices `[samples, 2 * bins]`: real parts, then imaginary parts. Only in the matrix form.
        window: the window's value at each sample that the butterfly form reads, `[samples]`.
        twiddles: for each stage of the butterfly form, the twiddles of its butterflies, `[butterflies, 2]`.
        scales: for the butterfly form, the factor of each live bin, `[bins]`.
        samples: for each matrix, or for the butterfly form as a whole, the indices of the samples that it reads.
        stages: the stages of the butterfly form that have an active butterfly.
        order: for each live bin, its position in the output of the matrices or of the last stage.
        bins: the indices of the live bins, in ascending order.
        n_fft: number of samples in a segment.
    """

    matrices: tuple[Float[Array, "cone outputs"] | np.ndarray, ...]
    window: Float[Array, "samples"] | np.ndarray
    twiddles: tuple[Float[Array, "butterflies 2"] | np.ndarray, ...]
    scales: Float[Array, "bins"] | np.ndarray
    samples: tuple[Places, ...] = dataclasses.field(metadata={"static": True})
    stages: tuple[Stage, ...] = dataclasses.field(metadata={"static": True})
    order: Places = dataclasses.field(metadata={"static": True})
    bins: Places = dataclasses.field(metadata={"static": True})
    n_fft: int = dataclasses.field(metadata={"static": True})

    def peaks(
        self, signal: Array, params: WelchPeakParams, selection: str | None = None, platform: str | None = None
    ) -> Float[Array, "batch k 2"]:
        """Return the peaks of `signal` from `learned_peaks` with this program."""
        return learned_peaks(signal, self, params, selection, platform)

    @property
    def work(self) -> LearnedWork:
        """FLOP per segment, and number of live bins. A matrix entry counts as 2 FLOP, a butterfly as 10 FLOP."""
        products = sum(2.0 * np.size(matrix) for matrix in self.matrices)
        butterflies = sum(10.0 * len(twiddles) for twiddles in self.twiddles)
        return LearnedWork(max(products + butterflies, 1.0), len(self.bins.indices))


def learned_program(model: LearnedFft, params: WelchPeakParams, form: str | None = None) -> LearnedProgram:
    """Return the program that runs a model. The program uses the gates rounded to 0 or 1.

    Args:
        model: the model. Its arrays must not be traced.
        params: segment length and number of segments.
        form: "cones" uses a matrix for each group of bins that depend on the same samples. "matrix" uses a single
            matrix. "butterflies" computes stage by stage. None chooses the form with the lowest estimated cost.

    Returns:
        A pytree with float32 leaves. Two models with the same active gates and the same mask give programs of the same
        structure, so a jitted function that takes the program as an argument compiles only once for both models.

    Raises:
        ValueError: `model.n_fft` differs from `params.n_fft`, or `form` is unknown.

    Examples:
        >>> params = WelchPeakParams.fast(64, k=4)
        >>> model = dataclasses.replace(LearnedFft.exact(64), mask=np.arange(33) < 8.0)
        >>> program = learned_program(model, params)
        >>> [matrix.shape for matrix in program.matrices]
        [(64, 16)]
    """
    if model.n_fft != params.n_fft:
        raise ValueError(f"model: expected n_fft {params.n_fft} as in params, got {model.n_fft}")
    hard = model.hardened()
    on, mask = np.asarray(hard.gates) > 0, np.asarray(hard.mask, np.float64)
    bins, wanted = np.flatnonzero(mask), wanted_places(on, mask != 0)
    scale = mask[bins] * np.sqrt(one_sided_weights(params)[bins].astype(np.float64))
    cones = _cones(on, bins)
    merged = [(np.unique(np.concatenate([samples for samples, _ in cones])), bins)] if len(bins) else []
    # The cost of the butterfly form depends on the number of live positions in each stage.
    places = sum(float(np.sum(wanted[stage])) for stage in np.flatnonzero(on.any(axis=1)))
    costs = {"cones": _matrices_ns(cones), "matrix": _matrices_ns(merged), "butterflies": PLACE_NS * places}
    form = min(costs, key=costs.__getitem__) if form is None else form
    if form not in costs:
        raise ValueError(f"form: expected one of {', '.join(costs)}, got {form!r}")
    if form == "butterflies" or not len(bins):
        return _butterfly_form(hard, wanted, bins, scale)
    return _matrix_form(hard, cones if form == "cones" else merged, bins, scale)


def learned_peaks(
    signal: Real[Array, "batch length"],
    program: LearnedProgram,
    params: WelchPeakParams,
    selection: str | None = None,
    platform: str | None = None,
) -> Float[Array, "batch k 2"]:
    """Return the peaks of rows of samples, computed with a learned FFT.

    `program` is the result of `learned_program` for the same `params`. The other arguments and the result are those of
    `fused_peaks`. A bin whose mask is 0 has power 0. Samples that affect only such bins are not read, so a NaN in
    these samples has no effect.

    Raises:
        ValueError: `program.n_fft` differs from `params.n_fft`.
    """
    if program.n_fft != params.n_fft:
        raise ValueError(f"params: expected n_fft {program.n_fft} as in the program, got {params.n_fft}")
    platform = platform or jax.default_backend()
    selection = selection or default_selection(signal.shape[0], params.n_bins, platform)
    firsts = range(0, params.n_segments * params.hop, params.hop)
    run = _run_matrices if program.matrices else _run_butterflies
    # The candidates are all live bins and the first k masked bins. Later masked bins cannot be peaks.
    bins = program.bins.indices
    masked = np.setdiff1d(np.arange(params.n_bins), bins)[: min(params.k, params.n_bins)]
    candidates = np.union1d(bins, masked)
    places = np.where(np.isin(candidates, bins), np.searchsorted(bins, candidates), len(bins))

    def power_of(rows: Array) -> Array:
        """Return the powers of the candidates."""
        segments = (rows[:, first : first + params.n_fft].astype(jnp.float32) for first in firsts)
        power = jnp.asarray(sum(run(segment, program) for segment in segments))
        # The selection prefers the earlier column on ties, so the candidates are in ascending order.
        return jnp.pad(power, ((0, 0), (0, 1))).take(places, axis=1, mode="clip") if len(masked) else power

    def rows() -> Array:
        return signal[:, : params.frame_len]

    return selected_peaks(power_of(signal), params.k, selection, candidates, rows=rows, power_of=power_of)


@program_of.register
def _(model: LearnedFft, params: WelchPeakParams) -> LearnedProgram:
    return learned_program(model, params)


def _run_matrices(segment: Float[Array, "batch n_fft"], program: LearnedProgram) -> Array:
    powers = []
    for samples, matrix in zip(program.samples, program.matrices, strict=True):
        # The default precision of some devices is below float32.
        spectra = jnp.matmul(samples.take(segment, 1), matrix, precision=jax.lax.Precision.HIGHEST)
        real, imag = jnp.split(jnp.square(spectra), 2, axis=1)
        powers.append(real + imag)
    return program.order.take(jnp.concatenate(powers, axis=1) if len(powers) > 1 else powers[0], 1)


def _run_butterflies(segment: Float[Array, "batch n_fft"], program: LearnedProgram) -> Array:
    real = program.samples[0].take(segment, 1).T * program.window[:, None]
    imag = jnp.zeros_like(real)
    for stage, twiddles in zip(program.stages, program.twiddles, strict=True):
        cos, sin = twiddles[:, :1], twiddles[:, 1:]
        a_real, a_imag = stage.a.take(real, 0), stage.a.take(imag, 0)
        b_real, b_imag = stage.b.take(real, 0), stage.b.take(imag, 0)
        turned_real, turned_imag = cos * b_real - sin * b_imag, cos * b_imag + sin * b_real
        passing = stage.passing
        real = jnp.concatenate([a_real + turned_real, a_real - turned_real, passing.take(real, 0)])
        imag = jnp.concatenate([a_imag + turned_imag, a_imag - turned_imag, passing.take(imag, 0)])
    power = jnp.square(program.order.take(real, 0)) + jnp.square(program.order.take(imag, 0))
    return (power * jnp.square(program.scales)[:, None]).T


def _cones(on: np.ndarray, bins: np.ndarray) -> list[_Cone]:
    """Return a pair for each cone: the indices of its samples, and the bins that have this cone."""
    order = bit_reversal(2 * on.shape[1])
    cones = np.zeros((len(order), -(-len(order) // 8)), np.uint8)  # a row of bits, a bit for each sample
    cones[np.arange(len(order)), order // 8] = 1 << order % 8
    for stage, gates in enumerate(on):
        a, b = butterfly_places(stage, gates)
        cones[a] = cones[b] = cones[a] | cones[b]
    members: dict[bytes, list[int]] = {}
    for bin_ in bins.tolist():
        members.setdefault(cones[bin_].tobytes(), []).append(bin_)
    samples = (np.unpackbits(np.frombuffer(cone, np.uint8), bitorder="little") for cone in members)
    return [(np.flatnonzero(own), np.array(found)) for own, found in zip(samples, members.values(), strict=True)]


def _matrices_ns(partition: list[_Cone]) -> float:
    flop = sum(4.0 * len(samples) * len(bins) for samples, bins in partition)
    gathered = sum(len(samples) for samples, _ in partition if not _is_even(samples))
    if len(partition) > 1:
        gathered += sum(len(bins) for _, bins in partition)
    return flop / MATRIX_FLOP_PER_NS + GATHER_NS * gathered + MATRIX_NS * len(partition)


def _matrix_form(hard: LearnedFft, partition: list[_Cone], bins: np.ndarray, scale: np.ndarray) -> LearnedProgram:
    n_fft = hard.n_fft
    twiddles = np.asarray(hard.twiddles, np.float64) @ np.array([1.0, 1.0j])
    places = np.diag(hann_window(n_fft).astype(np.float64))[bit_reversal(n_fft)].astype(complex)
    for stage, gates in enumerate(hard.gates):
        a, b = butterfly_places(stage, gates)
        turned = twiddles[stage, gates > 0][:, None] * places[b]
        places[a], places[b] = places[a] + turned, places[a] - turned
    places = places[bins] * scale[:, None]
    matrices, found = [], []
    for samples, members in partition:
        rows = places[np.searchsorted(bins, members)][:, samples].T
        matrices.append(np.concatenate([np.real(rows), np.imag(rows)], axis=1).astype(np.float32))
        found.extend(members)
    empty = np.zeros(0, np.float32)
    samples = tuple(Places.of(samples) for samples, _ in partition)
    order = Places.of(np.argsort(found) if found else np.zeros(0))
    return LearnedProgram(tuple(matrices), empty, (), empty, samples, (), order, Places.of(bins), n_fft)


def _butterfly_form(hard: LearnedFft, wanted: list[np.ndarray], bins: np.ndarray, scale: np.ndarray) -> LearnedProgram:
    n_fft, held = hard.n_fft, np.flatnonzero(wanted[0])
    samples = bit_reversal(n_fft)[held]
    stages, twiddles = [], []
    for stage, gates in enumerate(hard.gates):
        a, b = butterfly_places(stage, gates)
        if not len(a):
            continue
        passing = np.setdiff1d(np.flatnonzero(wanted[stage + 1]), np.concatenate([a, b]))
        stages.append(Stage(*(_found(places, held) for places in (a, b, passing))))
        twiddles.append(np.asarray(hard.twiddles, np.float32)[stage, gates > 0])
        held = np.concatenate([a, b, passing])
    leaves = (), hann_window(n_fft)[samples], tuple(twiddles), scale.astype(np.float32)
    return LearnedProgram(*leaves, (Places.of(samples),), tuple(stages), _found(bins, held), Places.of(bins), n_fft)


def _found(places: np.ndarray, held: np.ndarray) -> Places:
    order = np.argsort(held)
    return Places.of(order[np.searchsorted(held, places, sorter=order)])
