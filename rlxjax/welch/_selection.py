"""The device's selection of peaks: two forms of a top-k over bins, with the same result to the bit.

Larger powers come first, the lower bin first among equals, NaN last.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from rlxjax._checks import is_symbolic
from rlxjax._schedule import schedule
from rlxjax._values import FrozenDict

_HIGHEST = np.uint32(2**32 - 1)


def selected_peaks(
    power: Float[Array, "batch bins"], k: int, selection: str, bins: np.ndarray | None = None
) -> Float[Array, "batch k 2"]:
    """Return (bin, power) of the k largest powers; slots beyond the bins are (0, 0.0).

    Args:
        power: float32, each zero or more, or NaN.
        k: slots.
        selection: a key of `SELECTIONS`.
        bins: the bin at each place, ascending; the place itself unless given.
    """
    found = min(k, power.shape[1])
    # Places are integers: what depends on them gathers, and the gradient takes the gather's way.
    places = SELECTIONS[selection](lax.stop_gradient(power), found)
    powers = jnp.take_along_axis(power, places, axis=1, mode="promise_in_bounds")
    numbers = places if bins is None else jnp.asarray(bins)[places]
    peaks = jnp.stack([numbers.astype(jnp.float32), powers], axis=-1)
    return jnp.pad(peaks, ((0, 0), (0, k - found), (0, 0)))


def by_top_k(power: Float[Array, "batch bins"], k: int) -> Int[Array, "batch k"]:
    """Return the places of at most as many powers as there are bins by `lax.top_k`: a heap for each row on CPUs."""
    # top_k keeps the lower place first among equals, but takes NaN for the largest: a NaN becomes -1.
    return lax.top_k(jnp.where(jnp.isnan(power), -1.0, power), k)[1]


def by_maxima(power: Float[Array, "batch bins"], k: int) -> Int[Array, "batch k"]:
    """Return the places by k successive maxima: each the largest key below the last."""
    # A key holds a power's leading bits and its bin, so that keys are unique and a maximum brings its bin along; many
    # rows share a vector instruction. What the missing bits leave open is settled from the powers themselves:
    # neighbours among the candidates are swapped where they are out of order, and that no bin was left out is proven
    # for every row. Where it cannot be (more near-equal powers than spare candidates, or three in a row), `by_top_k`
    # decides for all rows.
    batch, n_bins = power.shape
    # The powers of a bin lie side by side in a tile; all rows are one where they are no whole tiles.
    tile_rows = schedule("cpu").tile_rows
    n_rows = batch if is_symbolic(batch) or batch % tile_rows else tile_rows
    n_tiles = batch // n_rows
    tiles = power.reshape(n_tiles, n_rows, n_bins).swapaxes(1, 2)
    n_places = 1 << (n_bins - 1).bit_length()
    # The fewer bits of a power a key keeps, the more share one.
    n_candidates = min(k + 2 + max(0, (n_bins - 1).bit_length() - 8) // 2, n_bins)
    keys = _leading_bits(_ranked_bits(tiles), n_places) + np.arange(n_bins, dtype=np.uint32)[None, ::-1, None]

    def next_lower(key: UInt[Array, "tiles rows"], _: None) -> tuple[Array, Array]:
        key = _largest_below(keys, key)
        return key, key

    highest = jnp.full_like(keys[:, 0], _HIGHEST)
    _, found = lax.scan(next_lower, highest, None, length=n_candidates)
    bins = n_bins - 1 - (found % n_places).astype(jnp.int32)
    tile, row = np.arange(n_tiles)[:, None], np.arange(n_rows)[None]
    bits = _ranked_bits(tiles.at[tile, bins, row].get(mode="promise_in_bounds"))
    leading = found - found % n_places
    is_tied = leading[k - 1] == leading[-1]
    # Keys rank the lower of equal bins first: only of three that share a key and are not all equal, more than
    # neighbours may be out of order.
    shares_key = leading[2:] == leading[:-2]
    differs = (bits[2:] != bits[1:-1]) | (bits[1:-1] != bits[:-2])
    is_nearly_in_order = ~jnp.any(shares_key & differs)
    is_clear = (n_candidates == n_bins) | ~jnp.any(is_tied)

    def all_tie_with_the_last() -> Bool[Array, ""]:
        # Bins that share the boundary's bits in full are in order.
        all_bits = _ranked_bits(tiles)
        shares_key = _leading_bits(all_bits, n_places) == leading[k - 1][:, None]
        return ~jnp.any(is_tied[:, None] & shares_key & (all_bits != bits[k - 1][:, None]))

    def neighbours_swapped() -> Int[Array, "k tiles rows"]:
        if n_candidates == 1:
            return bins
        # Each that belongs behind the next one changes places with it; none with both neighbours.
        swaps = (bits[1:] > bits[:-1]) | ((bits[1:] == bits[:-1]) & (bins[1:] < bins[:-1]))
        between = jnp.where(swaps[1:], bins[2:], jnp.where(swaps[:-1], bins[:-2], bins[1:-1]))
        first, last = (jnp.where(swaps[i], bins[j], bins[i]) for i, j in ((0, 1), (-1, -2)))
        return jnp.concatenate([first[None], between, last[None]])[:k]

    def by_heaps() -> Int[Array, "k tiles rows"]:
        # The barrier keeps the compiler from turning tiles into rows whether or not they are needed.
        rows = lax.optimization_barrier(tiles).swapaxes(1, 2).reshape(batch, n_bins)
        return by_top_k(rows, k).T.reshape(k, n_tiles, n_rows)

    is_whole = lax.cond(is_clear, lambda: is_clear, all_tie_with_the_last)
    found = lax.cond(is_nearly_in_order & is_whole, neighbours_swapped, by_heaps)
    return found.reshape(k, batch).T


#: The forms of the selection, by name.
SELECTIONS: Mapping[str, Callable[..., Int[Array, "batch k"]]] = FrozenDict({"maxima": by_maxima, "top_k": by_top_k})


def default_selection(rows: Any, n_bins: int, platform: str) -> str:
    """Return the form to use where no calibration says: maxima on CPUs while keys tell bins apart.

    Few rows fill no vector: a heap is about as fast then, and compiles in a tenth of the time.

    Examples:
        >>> default_selection(64, 129, "cpu"), default_selection(1, 129, "cpu")
        ('maxima', 'top_k')
    """
    plan = schedule(platform)
    if is_symbolic(rows) or rows <= plan.most_rows_top_k:
        return "top_k"
    return "maxima" if n_bins <= plan.most_bins_maxima else "top_k"


def _ranked_bits(power: Float[Array, "*batch"]) -> Int[Array, "*batch"]:
    """Return integers in the order of powers, NaN last: the bits of non-negative floats order as they do."""
    return jnp.where(jnp.isnan(power), -1, lax.bitcast_convert_type(power, jnp.int32))


def _leading_bits(bits: Int[Array, "*batch"], n_places: int) -> UInt[Array, "*batch"]:
    """Return what a key holds of ranked bits: multiples of the number of places, 0 for NaN only."""
    unsigned = lax.bitcast_convert_type(bits, jnp.uint32) << 1  # no sign to keep
    return (unsigned & np.uint32(2**32 - n_places)) + np.uint32(n_places)


def _largest_below(keys: UInt[Array, "tiles bins rows"], limit: UInt[Array, "tiles rows"]) -> UInt[Array, "tiles rows"]:
    """Return the largest key below a limit, for which there is one."""
    # A key less the limit wraps around if it is below: the largest difference is that of the nearest one. The tree of
    # maxima is written out over blocks of about the root of the bins: a program of two loops without a branch, where
    # CPUs get no vector code for a plain reduction over the bins.
    n_bins = keys.shape[1]
    plan = schedule("cpu")  # the least width and number are those that XLA's CPU compiler makes vector code of
    width = min(n_bins, max(plan.least_block_bins, 1 << ((n_bins - 1).bit_length() + 1) // 2))
    n_blocks = max(plan.least_blocks, -(-n_bins // width))  # which overlap: a maximum may see a key twice
    starts = sorted({round(start) for start in np.linspace(0, n_bins - width, n_blocks).tolist()})
    largest = _maximum([keys[:, start : start + width] - limit[:, None] for start in starts])
    # Keeps the compiler from computing the blocks anew for each of their bins.
    largest = lax.optimization_barrier(largest)
    return _maximum([largest[:, place] for place in range(width)]) + limit


def _maximum(arrays: Sequence[Array]) -> Array:
    arrays = list(arrays)
    while len(arrays) > 1:
        paired = [jnp.maximum(*pair) for pair in zip(arrays[::2], arrays[1::2], strict=False)]
        arrays = paired + arrays[len(arrays) - len(arrays) % 2 :]
    return functools.reduce(jnp.maximum, arrays)
