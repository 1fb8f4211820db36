"""The device's selection of peaks: two forms of a top-k over bins, with the same result to the bit.

The order is that of SPEC, section 4: larger powers first, the lower bin first among equals, NaN last.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

#: Most bins of a row of which a key still keeps enough bits of the power to tell most apart.
MAX_BINS_OF_KEYS = 4097
#: Most rows for which a heap is about as fast as maxima.
FEW_ROWS = 4
#: Rows whose keys lie side by side: few enough that turning them on their side stays in the first cache.
TILE_ROWS = 32
#: Least width of a block of bins; the widths that XLA's CPU compiler turns into vector code.
MIN_BLOCK_BINS = 16

_LOWEST, _HIGHEST = np.int32(-(2**31)), np.int32(2**31 - 1)


def selected_peaks(
    power: Float[Array, "batch bins"], k: int, selection: str, bins: Float[Array, "bins"] | None = None
) -> Float[Array, "batch k 2"]:
    """Return (bin, power) of the k largest powers; slots beyond the bins are (0, 0.0).

    Args:
        power: each zero or more, or NaN.
        k: slots.
        selection: a form of the selection.
        bins: ascending number of each place; the place itself unless given.
    """
    found = min(k, power.shape[1])
    places = top_bins(power, found, selection)
    powers = jnp.take_along_axis(power, places, axis=1, mode="promise_in_bounds")
    numbers = places.astype(jnp.float32) if bins is None else bins[places]
    return jnp.pad(jnp.stack([numbers, powers], axis=-1), ((0, 0), (0, k - found), (0, 0)))


def top_bins(power: Float[Array, "batch bins"], k: int, selection: str) -> Int[Array, "batch k"]:
    """Return the places of the k largest powers of each row, in order.

    Args:
        power: float32, each zero or more, or NaN.
        k: at most the number of bins.
        selection: a key of `SELECTIONS`.
    """
    # Places are integers: what depends on them gathers, and the gradient takes the gather's way.
    return SELECTIONS[selection](lax.stop_gradient(power), k)


def by_top_k(power: Float[Array, "batch bins"], k: int) -> Int[Array, "batch k"]:
    """Return the places by `lax.top_k`: a heap for each row on CPUs."""
    # top_k keeps the lower place first among equals, but takes NaN for the largest: a NaN becomes -1.
    return lax.top_k(jnp.where(jnp.isnan(power), -1.0, power), k)[1]


def by_maxima(power: Float[Array, "batch bins"], k: int) -> Int[Array, "batch k"]:
    """Return the places by k successive maxima: each the largest key below the last one.

    A key holds a power's leading bits and its place, so that keys are unique and a maximum brings its place
    along; many rows share a vector instruction. What the keys' missing bits leave open is settled from the
    powers themselves: candidates are put in their exact order, and that no bin was left out is proven for
    every row. Where it cannot be (more near-equal powers than there are spare candidates), `by_top_k`
    decides instead.
    """
    batch, n_bins = power.shape
    place_bits = (1 << (n_bins - 1).bit_length()) - 1
    n_candidates = min(k + _spare_candidates(n_bins), n_bins)
    tile_rows = TILE_ROWS if batch % TILE_ROWS == 0 else batch
    backward = np.arange(n_bins, dtype=np.int32)[None, ::-1]
    keys = (_ranked_bits(power) & ~place_bits) | backward
    keys = keys.reshape(batch // tile_rows, tile_rows, n_bins).transpose(0, 2, 1)

    def next_lower(key: Int[Array, "tiles rows"], _: None) -> tuple[Array, Array]:
        key = _largest_below(keys, key)
        return key, key

    highest: Any = np.full((keys.shape[0], tile_rows), _HIGHEST)
    _, found = lax.scan(next_lower, highest, None, length=n_candidates)
    found = found.reshape(n_candidates, batch)
    places = n_bins - 1 - (found & place_bits)
    exact = _ranked_bits(jnp.take_along_axis(power, places.T, axis=1, mode="promise_in_bounds").T)
    exact, places = _sorted_candidates(exact, places)
    last_key, least_key = found[k - 1] & ~place_bits, found[-1] & ~place_bits
    is_clear = (n_candidates == n_bins) | jnp.all(last_key != least_key)

    def all_tie_with_the_last() -> Bool[Array, ""]:
        # Bins that share the boundary's key in power too are in order, as keys rank the lower one first.
        bits = _ranked_bits(power)
        shares_key = (bits & ~place_bits) == last_key[:, None]
        return ~jnp.any((last_key == least_key)[:, None] & shares_key & (bits != exact[k - 1][:, None]))

    is_proven = lax.cond(is_clear, lambda: np.True_, all_tie_with_the_last)
    return lax.cond(is_proven, lambda: places[:k].T, lambda: by_top_k(power, k))


#: The forms of the selection, by name.
SELECTIONS: Mapping[str, Callable[[Float[Array, "batch bins"], int], Int[Array, "batch k"]]] = (
    MappingProxyType({"maxima": by_maxima, "top_k": by_top_k})
)


def default_selection(rows: int, n_bins: int, platform: str) -> str:
    """Return the form to use where no calibration says: maxima on CPUs while keys tell bins apart.

    Few rows fill no vector: a heap is about as fast then, and compiles in a tenth of the time.

    Examples:
        >>> default_selection(64, 129, "cpu"), default_selection(1, 129, "cpu")
        ('maxima', 'top_k')
    """
    pays = platform == "cpu" and rows > FEW_ROWS and n_bins <= MAX_BINS_OF_KEYS
    return "maxima" if pays else "top_k"


def _ranked_bits(power: Float[Array, "*batch"]) -> Int[Array, "*batch"]:
    """Return integers in the order of powers, NaN last: the bits of non-negative floats order as they do."""
    return jnp.where(jnp.isnan(power), -1, lax.bitcast_convert_type(power, jnp.int32))


def _spare_candidates(n_bins: int) -> int:
    """Return how many candidates beyond k are found, so that the least one seldom has the k-th one's key.

    The fewer bits of the power a key keeps, the more powers share one.
    """
    return 2 + max(0, (n_bins - 1).bit_length() - 8) // 2


def _largest_below(
    keys: Int[Array, "tiles bins rows"], limit: Int[Array, "tiles rows"]
) -> Int[Array, "tiles rows"]:
    """Return the largest key below a limit, the lowest integer if there is none.

    The tree of maxima is written out over blocks of about the root of the bins: a program of two loops
    without a branch, where CPUs get no vector code for a plain reduction over the bins.
    """
    n_bins = keys.shape[1]
    width = min(n_bins, max(MIN_BLOCK_BINS, 1 << ((n_bins - 1).bit_length() + 1) // 2))
    # The last block overlaps the one before: a maximum may see a key twice.
    starts = [min(start, n_bins - width) for start in range(0, n_bins, width)]
    blocks = (keys[:, start : start + width] for start in starts)
    largest = _maximum([jnp.where(block < limit[:, None], block, _LOWEST) for block in blocks])
    # Keeps the compiler from computing the blocks anew for each of their bins.
    largest = lax.optimization_barrier(largest)
    return _maximum([largest[:, place] for place in range(width)])


def _maximum(arrays: Sequence[Array]) -> Array:
    """Return the elementwise maximum, as a balanced tree."""
    arrays = list(arrays)
    while len(arrays) > 1:
        paired = [jnp.maximum(*pair) for pair in zip(arrays[::2], arrays[1::2], strict=False)]
        arrays = paired + arrays[len(arrays) - len(arrays) % 2 :]
    return functools.reduce(jnp.maximum, arrays)


def _is_before(bits: Array, places: Array, other_bits: Array, other_places: Array) -> Bool[Array, "..."]:
    """Whether a bin ranks before another."""
    return (bits > other_bits) | ((bits == other_bits) & (places < other_places))


def _sorted_candidates(
    bits: Int[Array, "candidates batch"], places: Int[Array, "candidates batch"]
) -> tuple[Int[Array, "candidates batch"], Int[Array, "candidates batch"]]:
    """Return candidates in their exact order; they come in that of their keys, which is nearly the same.

    Neighbours are swapped, pairs from the even places and pairs from the odd ones in turn, until all rows
    are in order.
    """
    rank = jnp.arange(bits.shape[0], dtype=jnp.int32)[:, None]

    def is_unsorted(state: tuple[Array, Array]) -> Bool[Array, ""]:
        _, (bits, places) = state
        return jnp.any(_is_before(bits[1:], places[1:], bits[:-1], places[:-1]))

    def swap_neighbours(state: tuple[Array, Array]) -> tuple[Array, Array]:
        offset, own = state
        is_first = (rank + offset) % 2 == 0
        other = jnp.where(is_first[None], jnp.roll(own, -1, 1), jnp.roll(own, 1, 1))
        swaps = jnp.where(is_first, _is_before(*other, *own), _is_before(*own, *other))
        has_other = jnp.where(is_first, rank + 1 < bits.shape[0], rank > 0)
        return 1 - offset, jnp.where((swaps & has_other)[None], other, own)

    _, (bits, places) = lax.while_loop(
        is_unsorted, swap_neighbours, (jnp.int32(0), jnp.stack([bits, places]))
    )
    return bits, places
