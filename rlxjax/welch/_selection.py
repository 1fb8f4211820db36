"""The selection of the k largest powers on a device, in two forms with identical results.

Larger powers come first. Among equal powers the lower bin comes first. NaN comes last. Powers that leave the range of
float32 are ranked by the powers of scaled rows.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from rlxjax._checks import is_symbolic
from rlxjax._numerics import straight_through
from rlxjax._schedule import schedule
from rlxjax._values import FrozenDict

from ._workload import LEAST_POWER, MOST_POWER

_HIGHEST = np.uint32(2**32 - 1)


def selected_peaks(
    power: Float[Array, "batch bins"],
    k: int,
    selection: str,
    bins: np.ndarray | None = None,
    *,
    rows: Callable[[], Array] | None = None,
    power_of: Callable[[Array], Array] | None = None,
) -> Float[Array, "batch k 2"]:
    """Return the k largest powers of each row as (bin, power). If there are fewer than k bins, the rest is (0, 0.0).

    Args:
        power: the powers of each row, float32. Each power is at least 0, or NaN.
        k: number of powers to return.
        selection: a key of `SELECTIONS`.
        bins: the bin number of each column of `power`, in ascending order; by default the index of the column.
        rows: returns the rows of samples behind `power`. If it is given, rows of any scale have the right peaks.
        power_of: returns the powers of rows of samples.
    """
    found = min(k, power.shape[1])

    def peaks_at(places: Array, power: Array) -> Array:
        powers = jnp.take_along_axis(power, places, axis=1, mode="promise_in_bounds")
        its_bins = places if bins is None else jnp.asarray(bins)[places]
        return jnp.stack([its_bins.astype(jnp.float32), powers], axis=-1)

    # Places are integers without a gradient. The gradient passes through the gathered powers.
    constant = lax.stop_gradient(power)
    places = SELECTIONS[selection](constant, found)
    peaks = peaks_at(places, power)
    if rows is not None and power_of is not None:

        def again(scaled: Array) -> tuple[Array, Array]:
            own = power_of(scaled)
            places = by_top_k(own, found)
            return peaks_at(places, own), places

        exact, places = at_any_scale((peaks_at(places, constant), places), rows, again)
        peaks = straight_through(exact, peaks_at(places, power))
    return jnp.pad(peaks, ((0, 0), (0, k - found), (0, 0)))


def at_any_scale(
    found: tuple[Float[Array, "batch k 2"], Int[Array, "batch k"]],
    rows: Callable[[], Float[Array, "batch length"]],
    again: Callable[[Array], tuple[Array, Array]],
) -> tuple[Float[Array, "batch k 2"], Int[Array, "batch k"]]:
    """Return peaks and their places. Replace both in rows whose powers leave the range of float32.

    Such a row is multiplied by a power of two, which is exact. `again` returns the peaks and the places of scaled rows.
    These powers are then divided by the square of the factor. Other rows keep their peaks and places.
    """
    largest_power = found[0][:, 0, 1]
    is_extreme = ~((largest_power >= LEAST_POWER) & (largest_power <= MOST_POWER))  # NaN is extreme

    def scaled() -> tuple[Array, Array]:
        samples = lax.stop_gradient(rows()).astype(jnp.float32)
        # The exponent bits of the largest magnitude: 0 for a silent row, 255 for infinity and NaN.
        bits = lax.bitcast_convert_type(samples, jnp.int32) & np.int32(2**31 - 1)
        exponent = jnp.max(bits, axis=1) >> 23
        is_scaled = is_extreme & (exponent > 0) & (exponent < 255)
        held = jnp.where(is_scaled, jnp.minimum(exponent, 253), 127)
        factor, inverse = (lax.bitcast_convert_type(own << 23, jnp.float32) for own in (254 - held, held))

        def replaced() -> tuple[Array, Array]:
            peaks, places = again(samples * factor[:, None])
            powers = peaks[..., 1] * inverse[:, None] * inverse[:, None]
            peaks = jnp.stack([peaks[..., 0], powers], axis=-1)
            own = jnp.where(is_scaled[:, None, None], peaks, found[0])
            return own, jnp.where(is_scaled[:, None], places, found[1])

        return lax.cond(_any(is_scaled), replaced, lambda: found)

    return lax.cond(_any(is_extreme), scaled, lambda: found)


@jax.custom_batching.custom_vmap
def _any(flags: Bool[Array, "*batch"]) -> Bool[Array, ""]:
    """Return whether any flag is true, also in another row of a `vmap`: otherwise `cond` would run both branches."""
    return jnp.any(flags)


@_any.def_vmap
def _any_of_all(_: int, __: Any, flags: Array) -> tuple[Array, bool]:
    return _any(flags), False


def by_top_k(power: Float[Array, "batch bins"], k: int) -> Int[Array, "batch k"]:
    """Return the columns of the k largest powers, found by `lax.top_k`. `k` is at most the number of bins."""
    # top_k puts the lower column first among equal powers, but ranks NaN highest, so NaN becomes -1.
    return lax.top_k(jnp.where(jnp.isnan(power), -1.0, power), k)[1]


def by_maxima(power: Float[Array, "batch bins"], k: int) -> Int[Array, "batch k"]:
    """Return the columns of the k largest powers. Each power has an integer key. Each step finds the next key."""
    # A key holds the leading bits of a power, and the bin. So all keys of a row differ, and a maximum carries its bin.
    # One vector instruction handles many rows. A key lacks the power's last bits, so the full powers are compared
    # afterwards: neighbouring candidates swap if they are out of order, and a proof checks that no bin is missing. The
    # proof fails if more powers are nearly equal than there are spare candidates, or if three nearly equal powers
    # follow each other. `by_top_k` then selects all rows.
    batch, n_bins = power.shape
    # A tile stores a bin's powers of several rows next to each other. Rows that do not fill whole tiles are one tile.
    tile_rows = schedule("cpu").tile_rows
    n_rows = batch if is_symbolic(batch) or batch % tile_rows else tile_rows
    n_tiles = batch // n_rows
    tiles = power.reshape(n_tiles, n_rows, n_bins).swapaxes(1, 2)
    n_places = 1 << (n_bins - 1).bit_length()
    # More bins leave fewer bits for the power, so more powers have the same leading bits.
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
    # Keys put the lower bin first among equal powers. Swapping neighbours suffices unless three powers with the same
    # leading bits are not all equal.
    shares_key = leading[2:] == leading[:-2]
    differs = (bits[2:] != bits[1:-1]) | (bits[1:-1] != bits[:-2])
    is_nearly_in_order = ~jnp.any(shares_key & differs)
    is_clear = (n_candidates == n_bins) | ~jnp.any(is_tied)

    def all_tie_with_the_last() -> Bool[Array, ""]:
        # Bins whose power equals the k-th power in all bits are in order.
        all_bits = _ranked_bits(tiles)
        shares_key = _leading_bits(all_bits, n_places) == leading[k - 1][:, None]
        return ~jnp.any(is_tied[:, None] & shares_key & (all_bits != bits[k - 1][:, None]))

    def neighbours_swapped() -> Int[Array, "k tiles rows"]:
        if n_candidates == 1:
            return bins
        # A candidate swaps with the next candidate if the two are out of order. No candidate swaps twice.
        swaps = (bits[1:] > bits[:-1]) | ((bits[1:] == bits[:-1]) & (bins[1:] < bins[:-1]))
        between = jnp.where(swaps[1:], bins[2:], jnp.where(swaps[:-1], bins[:-2], bins[1:-1]))
        first, last = (jnp.where(swaps[i], bins[j], bins[i]) for i, j in ((0, 1), (-1, -2)))
        return jnp.concatenate([first[None], between, last[None]])[:k]

    def by_heaps() -> Int[Array, "k tiles rows"]:
        # The barrier keeps the compiler from reordering the tiles before the branch is taken.
        rows = lax.optimization_barrier(tiles).swapaxes(1, 2).reshape(batch, n_bins)
        return by_top_k(rows, k).T.reshape(k, n_tiles, n_rows)

    is_whole = lax.cond(is_clear, lambda: is_clear, all_tie_with_the_last)
    found = lax.cond(is_nearly_in_order & is_whole, neighbours_swapped, by_heaps)
    return found.reshape(k, batch).T


#: The two forms of the selection, by name.
SELECTIONS: Mapping[str, Callable[..., Int[Array, "batch k"]]] = FrozenDict({"maxima": by_maxima, "top_k": by_top_k})


def default_selection(rows: Any, n_bins: int, platform: str) -> str:
    """Return the form of the selection that is used if no calibration decides. It is a key of `SELECTIONS`.

    The form is "maxima" on CPUs, except for few rows and for very many bins. Otherwise it is "top_k". For few rows,
    "top_k" is about as fast as "maxima" and compiles in a tenth of the time.

    Examples:
        >>> default_selection(64, 129, "cpu"), default_selection(1, 129, "cpu")
        ('maxima', 'top_k')
    """
    plan = schedule(platform)
    if is_symbolic(rows) or rows <= plan.most_rows_top_k:
        return "top_k"
    return "maxima" if n_bins <= plan.most_bins_maxima else "top_k"


def _ranked_bits(power: Float[Array, "*batch"]) -> Int[Array, "*batch"]:
    """Return the bits of powers as integers. The integers sort in the same order as the powers. NaN becomes -1."""
    return jnp.where(jnp.isnan(power), -1, lax.bitcast_convert_type(power, jnp.int32))


def _leading_bits(bits: Int[Array, "*batch"], n_places: int) -> UInt[Array, "*batch"]:
    """Return the part of each power's bits that a key holds: a multiple of `n_places`, which is 0 only for NaN."""
    unsigned = lax.bitcast_convert_type(bits, jnp.uint32) << 1  # powers have no sign bit
    return (unsigned & np.uint32(2**32 - n_places)) + np.uint32(n_places)


def _largest_below(keys: UInt[Array, "tiles bins rows"], limit: UInt[Array, "tiles rows"]) -> UInt[Array, "tiles rows"]:
    """Return the largest key of each row that is below the row's limit. Each row must have such a key."""
    # An unsigned difference `key - limit` wraps around, so the largest key below the limit has the largest difference.
    # XLA's CPU compiler makes no vector code for a plain maximum over bins, but makes vector code for maxima over
    # overlapping blocks of bins, if the blocks are wide and many enough.
    n_bins = keys.shape[1]
    plan = schedule("cpu")
    width = min(n_bins, max(plan.least_block_bins, 1 << ((n_bins - 1).bit_length() + 1) // 2))
    n_blocks = max(plan.least_blocks, -(-n_bins // width))
    starts = sorted({round(start) for start in np.linspace(0, n_bins - width, n_blocks).tolist()})
    largest = _maximum([keys[:, start : start + width] - limit[:, None] for start in starts])
    # The barrier keeps the compiler from computing each block again for every bin.
    largest = lax.optimization_barrier(largest)
    return _maximum([largest[:, place] for place in range(width)]) + limit


def _maximum(arrays: Sequence[Array]) -> Array:
    arrays = list(arrays)
    while len(arrays) > 1:
        paired = [jnp.maximum(*pair) for pair in zip(arrays[::2], arrays[1::2], strict=False)]
        arrays = paired + arrays[len(arrays) - len(arrays) % 2 :]
    return functools.reduce(jnp.maximum, arrays)
