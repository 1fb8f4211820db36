"""The learned FFT and its file. A learned FFT is a network of butterflies with trainable twiddles, gates and mask."""

import dataclasses
import functools
import os
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Complex, Float, Real
from pydantic import Field, model_validator

from rlxjax._checks import as_index, unmasked
from rlxjax._files import Sealed, read_json_file, write_json_file
from rlxjax._values import short_repr

#: Rounding switches a gate on if its value is at least this number, and off otherwise.
GATE_ON = 0.5
SCHEMA_VERSION = 1
#: Fields of a model file: the names of the model's arrays, and the names of the counts that follow from the arrays.
LEAVES, COUNTS = ("twiddles", "gates", "mask"), ("n_fft", "active_gates", "total_gates")

Finite = Annotated[float, Field(allow_inf_nan=False)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LearnedFft:
    """A pytree: a radix-2 decimation-in-time FFT with a gate for each butterfly. The constructor checks nothing.

    Do not change the arrays in place, because compiled programs keep using the old values.

    The input is the samples in bit-reversed order. Stage `s` (the first stage is 0) divides the positions into blocks
    of `2 * half` positions, with `half = 2**s`. Butterfly `t` of a block, from 0 to `half - 1`, has the index
    `j = block * half + t`. It reads the value `a` at position `2 * half * block + t`, and the value `b` at the position
    that is `half` further. With `w = twiddles[s, j]` and `gate = gates[s, j]`, it replaces these two values by

        `gate * (a + w*b, a - w*b) + (1 - gate) * (a, b)`.

    Attributes:
        twiddles: every `w` as (real, imaginary), `[stages, n_fft/2, 2]`. The exact FFT has `exp(-1j*pi * t/half)`.
        gates: numbers from 0 to 1, `[stages, n_fft/2]`. In the exact FFT, all gates are 1.
        mask: the factor of each bin of the one-sided spectrum, `[n_fft/2 + 1]`. In the exact FFT, all factors are 1.

    Examples:
        >>> model = LearnedFft.exact(8)
        >>> model.stages, model.total_gates, model.active_gates
        (3, 12, 12)
        >>> print(learned_spectrum(model, jnp.ones(8)).real)
        [8. 0. 0. 0. 0.]
    """

    twiddles: Float[Array, "stages half_n 2"] | np.ndarray
    gates: Float[Array, "stages half_n"] | np.ndarray
    mask: Float[Array, "n_bins"] | np.ndarray

    __repr__ = short_repr

    @classmethod
    def exact(cls, n_fft: int) -> "LearnedFft":
        """Return the model that computes the exact FFT. Its arrays are NumPy arrays of float64.

        Args:
            n_fft: number of samples in a segment, a power of two of at least 2.

        Raises:
            ValueError: `n_fft` is not a power of two of at least 2.
        """
        n_fft = as_index(n_fft, "n_fft")
        if n_fft < 2 or n_fft & (n_fft - 1):
            raise ValueError(f"n_fft: expected a power of two of at least 2 (2, 4, 8, ...), got {n_fft}")
        stages = n_fft.bit_length() - 1
        half = 2 ** np.arange(stages)[:, None]
        angles = -np.pi * (np.arange(n_fft // 2)[None] % half) / half
        twiddles = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
        return cls(twiddles, np.ones((stages, n_fft // 2)), np.ones(n_fft // 2 + 1))

    @classmethod
    def checked(
        cls, *, twiddles: Array | np.ndarray, gates: Array | np.ndarray, mask: Array | np.ndarray
    ) -> "LearnedFft":
        """Check the shapes and values of arrays, and return the model that consists of these arrays.

        Args:
            twiddles: finite numbers, `[stages, n_fft/2, 2]`.
            gates: numbers from 0 to 1, `[stages, n_fft/2]`.
            mask: finite numbers, `[n_fft/2 + 1]`.

        Raises:
            ValueError: shapes do not fit each other, a gate is NaN or outside 0 to 1, or another value is not finite.
        """
        arrays: dict[str, np.ndarray] = {}
        for name, leaf in {"twiddles": twiddles, "gates": gates, "mask": mask}.items():
            try:
                array = np.asarray(leaf)
            except ValueError as error:
                raise ValueError(f"{name}: expected an array of numbers, got {leaf!r} ({error})") from None
            if array.dtype.kind not in "biuf":
                raise ValueError(f"{name}: expected an array of real numbers, got dtype {array.dtype}")
            arrays[name] = array if array.dtype.kind == "f" else array.astype(np.float64)
        whole = cls(**arrays)
        shape = whole.gates.shape
        if len(shape) != 2 or shape[1] != 2 ** (shape[0] - 1):
            raise ValueError(f"gates: expected shape (log2(n_fft), n_fft/2), such as (8, 128), got {shape}")
        for name, expected in (("twiddles", (*shape, 2)), ("mask", (shape[1] + 1,))):
            if (got := arrays[name].shape) != expected:
                raise ValueError(f"{name}: expected shape {expected} for gates of shape {shape}, got {got}")
            if not np.all(np.isfinite(arrays[name])):
                raise ValueError(f"{name}: expected finite numbers, got NaN or infinity")
        for stage, j in np.argwhere(~((whole.gates >= 0) & (whole.gates <= 1))):
            got = f"{whole.gates[stage, j]} at stage {stage}, butterfly {j}"
            raise ValueError(f"gates: expected numbers from 0 to 1, got {got}")
        return whole

    @property
    def stages(self) -> int:
        """Number of stages, `log2(n_fft)`."""
        return self.gates.shape[-2]

    @property
    def n_fft(self) -> int:
        """Number of samples in a segment."""
        return 2 * self.gates.shape[-1]

    @property
    def n_bins(self) -> int:
        """Number of bins in the one-sided spectrum."""
        return self.n_fft // 2 + 1

    @property
    def total_gates(self) -> int:
        """Number of gates, `log2(n_fft) * n_fft/2`."""
        return self.stages * self.n_fft // 2

    @property
    def active_gates(self) -> int:
        """Number of gates that are at least 0.5. The gates must not be traced."""
        return int(np.sum(np.asarray(self.gates) >= GATE_ON))

    def hardened(self) -> "LearnedFft":
        """Return a copy of the model, with NumPy arrays, in which each gate is rounded to 0 or 1.

        A gate also becomes 0 if its butterfly affects only bins whose mask is 0. This does not change the spectrum.

        Examples:
            >>> model = LearnedFft.exact(8)
            >>> low = dataclasses.replace(model, mask=np.array([1.0, 1.0, 0.0, 0.0, 0.0]))
            >>> low.active_gates, low.hardened().active_gates
            (12, 10)
        """
        whole = jax.tree.map(np.asarray, self)
        on = whole.gates >= GATE_ON
        _, *after = wanted_places(on, whole.mask != 0)
        read = [places.reshape(-1, 2, 2**stage).any(axis=1).reshape(-1) for stage, places in enumerate(after)]
        return dataclasses.replace(whole, gates=(on & read).astype(whole.gates.dtype))


def learned_spectrum(
    model: LearnedFft, segments: Real[Array | np.ndarray, "*batch n_fft"]
) -> Complex[Array, "*batch n_bins"]:
    """Return the one-sided spectra of segments, computed by a model. The gates of the model are not rounded.

    Args:
        model: the model. Its arrays are converted to the precision of the segments.
        segments: real samples to which a window is already applied, `[*batch, n_fft]`. Integers become float32.

    Returns:
        The values at the bins from 0 to `n_fft/2`, multiplied by the mask: a complex array, `[*batch, n_fft/2 + 1]`.

    Raises:
        ValueError: the number of samples in a segment is not `model.n_fft`.

    Examples:
        >>> tone = np.cos(2 * np.pi * 3 / 16 * np.arange(16))
        >>> int(jnp.argmax(jnp.abs(learned_spectrum(LearnedFft.exact(16), tone))))
        3
    """
    segments = jnp.asarray(unmasked(segments, "segments"))
    if segments.ndim < 1 or segments.shape[-1] != model.n_fft:
        raise ValueError(f"segments: expected {model.n_fft} samples each, got shape {segments.shape}")
    dtype = segments.dtype if jnp.issubdtype(segments.dtype, jnp.floating) else jnp.float32
    return _spectrum(jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), model), segments.astype(dtype))


# The first call without jit would compile each operation on its own, which takes seconds.
@jax.jit
def _spectrum(model: LearnedFft, segments: Array) -> Array:
    twiddles = jax.lax.complex(model.twiddles[..., 0], model.twiddles[..., 1])
    # Rows are the last axis, so each position is a contiguous vector in every stage.
    rows = segments.reshape(-1, model.n_fft).T[bit_reversal(model.n_fft)]
    places = jax.lax.complex(rows, jnp.zeros_like(rows))
    for stage in range(model.stages):
        half, blocks = 2**stage, model.n_fft // 2 ** (stage + 1)
        gate, twiddle = (leaf[stage].reshape(blocks, half, 1) for leaf in (model.gates, twiddles))
        pairs = places.reshape(blocks, 2, half, rows.shape[1])
        a, b = pairs[:, 0], pairs[:, 1]
        turned = twiddle * b
        pairs = [a + _scaled(gate, turned), _scaled(gate, a - turned) + _scaled(1 - gate, b)]
        places = jnp.stack(pairs, axis=1).reshape(rows.shape)
    spectrum = _scaled(model.mask[:, None], places[: model.n_bins])
    return spectrum.T.reshape(*segments.shape[:-1], model.n_bins)


def _scaled(factor: Array | np.ndarray, z: Array) -> Array:
    return jax.lax.complex(factor * z.real, factor * z.imag)


@functools.lru_cache(maxsize=32)
def bit_reversal(n_fft: int) -> np.ndarray:
    """Return, for each input position of the network, the index of the sample that it reads, `[n_fft]`."""
    order = np.zeros(1, np.int32)  # both precisions share one array, because JAX caches NumPy constants by identity
    while len(order) < n_fft:
        order = np.concatenate([2 * order, 2 * order + 1])
    order.flags.writeable = False
    return order


def butterfly_places(stage: int, gates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of `a` and the positions of `b`, for all butterflies of a stage that have a nonzero gate."""
    half = 2**stage
    block, t = np.divmod(np.flatnonzero(gates), half)
    a = 2 * half * block + t
    return a, a + half


def wanted_places(on: np.ndarray, unmasked: np.ndarray) -> list[np.ndarray]:
    """Return whether each position affects an unmasked bin, in arrays for each stage's input and for the output."""
    stages, half_n = on.shape
    wanted = [np.pad(unmasked, (0, half_n - 1))]
    for stage in reversed(range(stages)):
        pairs = wanted[0].reshape(-1, 2, 2**stage)
        used = on[stage].reshape(-1, 1, 2**stage) & pairs.any(axis=1, keepdims=True)
        wanted.insert(0, (pairs | used).reshape(-1))
    return wanted


class LearnedFftFileError(ValueError):
    """A model file cannot be used. The error's message names the file, the field and the remedy in one line."""


class LearnedFftFile(Sealed):
    """The schema of a model file. A nested list has the shape of the array in `LearnedFft` that has the same name."""

    schema_version: Literal[1]
    kind: Literal["learned_fft"]
    n_fft: int
    active_gates: int
    total_gates: int
    note: str
    twiddles: list[list[list[Finite]]]
    gates: list[list[Finite]]
    mask: list[Finite]

    @model_validator(mode="after")
    def _is_a_model(self) -> "LearnedFftFile":
        model = self.model()
        for name in COUNTS:
            if getattr(self, name) != getattr(model, name):
                raise ValueError(f"{name}: expected {getattr(model, name)} as in the arrays, got {getattr(self, name)}")
        return self

    def model(self) -> LearnedFft:
        return _single_precision(self)


def _single_precision(given: "LearnedFft | LearnedFftFile") -> LearnedFft:
    """Return a checked model with float32 arrays. A number that is too large for float32 raises a `ValueError`."""
    leaves: dict[str, Any] = {}
    for name in LEAVES:
        try:
            with np.errstate(over="ignore"):
                leaves[name] = np.asarray(getattr(given, name), np.float32)
        except ValueError:
            raise ValueError(f"{name}: expected stages that all have the same length") from None
    return LearnedFft.checked(**leaves)


def save_learned_fft(model: LearnedFft, path: str | os.PathLike[str], note: str = "") -> None:
    """Write a model to a file. An old file is replaced in one step, so nobody reads a half-written file.

    Args:
        model: the model. Its arrays are stored in float32.
        path: the path of the file to write.
        note: a text for people who read the file, for example how you trained the model.

    Raises:
        ValueError: `model` is not a `LearnedFft`, `note` is not a string, or an array has an invalid shape or value.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_learned_fft(LearnedFft.exact(8), f"{folder}/model.json")
        ...     load_learned_fft(f"{folder}/model.json", n_fft=8).active_gates
        12
    """
    if not isinstance(model, LearnedFft):
        raise ValueError(f"model: expected a LearnedFft, got {type(model).__name__}")
    if not isinstance(note, str):
        raise ValueError(f"note: expected a string, got {note!r}")
    whole = _single_precision(model)
    # `astype(str)` gives the shortest decimals that read back as the same float32 numbers.
    content: dict[str, Any] = {name: getattr(whole, name).astype(str).astype(float).tolist() for name in LEAVES}
    content |= {name: getattr(whole, name) for name in COUNTS}
    content = {"schema_version": SCHEMA_VERSION, "kind": "learned_fft", "note": note} | content
    write_json_file(LearnedFftFile(**content), path, indent=None)


def load_learned_fft(path: str | os.PathLike[str], n_fft: int | np.integer | None = None) -> LearnedFft:
    """Read a model from a file that `save_learned_fft` wrote.

    Args:
        path: the path of the file to read.
        n_fft: the number of samples in a segment that the model must have. None allows any number.

    Raises:
        LearnedFftFileError: the file is missing or damaged, its schema is newer than this package, its `n_fft` differs
            from the argument, or a value is invalid. The message names the file, the field and the remedy in one line.

    Examples:
        >>> load_learned_fft("missing.json")
        Traceback (most recent call last):
        rlxjax.learned._model.LearnedFftFileError: missing.json: no such file; ...
    """
    remedy = "train a model with train_learned_fft, and write the model with save_learned_fft"
    content = read_json_file(path, LearnedFftFile, SCHEMA_VERSION, LearnedFftFileError, remedy, "a learned FFT")
    if n_fft is not None and content.n_fft != as_index(n_fft, "n_fft"):
        raise LearnedFftFileError(f"{path}: n_fft: expected {n_fft}, got {content.n_fft}; {remedy}")
    return content.model()
