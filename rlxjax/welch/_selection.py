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
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt

#: Most bins of a row of which a key still keeps enough bits of the power to tell most apart.
MAX_BINS_OF_KEYS = 4097
#: Most rows for which a heap is about as fast as maxima.
FEW_ROWS = 4
#: Rows of a tile, whose powers of a bin lie side by side: a vector, and few enough that turning rows on their
#: side costs next to nothing.
TILE_ROWS = 8
#: Keys of a group of tiles, which all of the selection goes over before the next one.
GROUP_KEYS = 2**15
#: Least width of a block of bins; the widths that XLA's CPU compiler turns into vector code.
MIN_BLOCK_BINS = 16
#: Least number of blocks: of fewer, the compiler writes out every bin, and what it writes is no vector code.
MIN_BLOCKS = 9

_HIGHEST = np.uint32(2**32 - 1)


def selected_peaks(
    power: Float[Array, "batch bins"], k: int, selection: str, bins: np.ndarray | None = None
) -> Float[Array, "batch k 2"]:
    """Return (bin, power) of the k largest powers; slots beyond the bins are (0, 0.0).

    Args:
        power: each zero or more, or NaN.
        k: slots.
        selection: a form of the selection.
        bins: the bin at each place, in any order; the place itself unless given.
    """
    found = min(k, power.shape[1])
    places = top_places(power, found, selection, bins)
    powers = jnp.take_along_axis(power, places, axis=1, mode="promise_in_bounds")
    numbers = places if bins is None else jnp.asarray(bins)[places]
    peaks = jnp.stack([numbers.astype(jnp.float32), powers], axis=-1)
    return jnp.pad(peaks, ((0, 0), (0, k - found), (0, 0)))


def top_places(
    power: Float[Array, "batch bins"], k: int, selection: str, bins: np.ndarray | None = None
) -> Int[Array, "batch k"]:
    """Return the places of the k largest powers of each row, in order.

    Args:
        power: float32, each zero or more, or NaN.
        k: at most the number of bins.
        selection: a key of `SELECTIONS`.
        bins: the bin at each place; the place itself unless given.
    """
    by_bin = np.argsort(bins).astype(np.int32) if bins is not None and np.any(np.diff(bins) < 0) else None
    # Places are integers: what depends on them gathers, and the gradient takes the gather's way.
    found = SELECTIONS[selection](lax.stop_gradient(power), k, by_bin)
    return found if by_bin is None else jnp.asarray(by_bin)[found]


def by_top_k(power: Float[Array, "batch bins"], k: int, by_bin: np.ndarray | None = None) -> Int[Array, "batch k"]:
    """Return the bins, counted in their order, by `lax.top_k`: a heap for each row on CPUs.

    Args:
        power: `[batch, n_bins]`.
        k: at most the number of bins.
        by_bin: the places in the order of their bins, where that is not the order of places.
    """
    if by_bin is not None:
        power = power[:, by_bin]
    # top_k keeps the lower place first among equals, but takes NaN for the largest: a NaN becomes -1.
    ranked, n_bins = jnp.where(jnp.isnan(power), -1.0, power), power.shape[1]
    if k < n_bins or k == 1:
        return lax.top_k(ranked, k)[1]
    # For all it would sort, which takes more than twice as long: the last one is what the others leave.
    places = lax.top_k(ranked, k - 1)[1]
    last = n_bins * (n_bins - 1) // 2 - jnp.sum(places, axis=1, keepdims=True, dtype=places.dtype)
    return jnp.concatenate([places, last], axis=1)


def by_maxima(power: Float[Array, "batch bins"], k: int, by_bin: np.ndarray | None = None) -> Int[Array, "batch k"]:
    """Return the bins, counted in their order, by k successive maxima: each the largest key below the last.

    A key holds a power's leading bits and its bin, so that keys are unique and a maximum brings its bin
    along; many rows share a vector instruction. What the keys' missing bits leave open is settled from the
    powers themselves: candidates are put in their exact order, and that no bin was left out is proven for
    every row. Where it cannot be (more near-equal powers than there are spare candidates), `by_top_k`
    decides instead, for that group of tiles.

    Args:
        power: `[batch, n_bins]`.
        k: at most the number of bins.
        by_bin: the places in the order of their bins, where that is not the order of places.
    """
    batch, n_bins = power.shape
    tiles = to_tiles(power, tile_rows(batch))
    of_group = functools.partial(_by_maxima_of_tiles, k=k, by_bin=by_bin)
    return _by_group(of_group, tiles, group_tiles(len(tiles), n_bins)).reshape(k, batch).T


def _by_maxima_of_tiles(
    tiles: Float[Array, "tiles bins rows"], k: int, by_bin: np.ndarray | None
) -> Int[Array, "k tiles rows"]:
    """Return what `by_maxima` says of tiles."""
    n_tiles, n_bins, n_rows = tiles.shape
    n_places = 1 << (n_bins - 1).bit_length()
    n_candidates = min(k + _spare_candidates(n_bins), n_bins)
    counted = np.argsort(np.arange(n_bins) if by_bin is None else by_bin).astype(np.uint32)
    keys = _leading_bits(_ranked_bits(tiles), n_places) + (n_bins - 1 - counted)[None, :, None]

    def next_lower(key: UInt[Array, "tiles rows"], _: None) -> tuple[Array, Array]:
        key = _largest_below(keys, key)
        return key, key

    highest: Any = np.full((n_tiles, n_rows), _HIGHEST)
    _, found = lax.scan(next_lower, highest, None, length=n_candidates)
    bins = n_bins - 1 - (found % n_places).astype(jnp.int32)
    places = bins if by_bin is None else jnp.asarray(by_bin)[bins]
    tile, row = np.arange(n_tiles)[:, None], np.arange(n_rows)[None]
    bits = _ranked_bits(tiles.at[tile, places, row].get(mode="promise_in_bounds"))
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
        return _swapped(bins, _out_of_order(bits, bins))[:k]

    def in_order() -> Int[Array, "k tiles rows"]:
        return lax.cond(is_nearly_in_order, neighbours_swapped, lambda: _in_order(bits, bins)[:k])

    def by_heaps() -> Int[Array, "k tiles rows"]:
        # The barrier keeps the compiler from turning tiles into rows whether or not they are needed.
        heaps = by_top_k(from_tiles(lax.optimization_barrier(tiles)), k, by_bin)
        return heaps.T.reshape(k, n_tiles, n_rows)

    # One branch for all that is seldom needed: what leads to its parts is computed in it alone.
    return lax.cond(
        is_clear & is_nearly_in_order,
        neighbours_swapped,
        lambda: lax.cond(is_clear | all_tie_with_the_last(), in_order, by_heaps),
    )


#: The forms of the selection, by name.
SELECTIONS: Mapping[str, Callable[..., Int[Array, "batch k"]]] = MappingProxyType(
    {"maxima": by_maxima, "top_k": by_top_k}
)


def tile_rows(batch: int) -> int:
    """Return the rows of a tile of a batch: all of them where they are not a multiple of whole tiles."""
    return TILE_ROWS if batch % TILE_ROWS == 0 else batch


def group_tiles(n_tiles: int, n_bins: int) -> int:
    """Return the tiles whose keys all passes go over before those of others.

    As many as stay in a processor's second cache, of those that divide all tiles; all tiles where these are
    fewer than half as many, as each group makes all passes anew. Rows that are no whole tiles are one tile.

    Examples:
        >>> group_tiles(128, 129), group_tiles(64, 513), group_tiles(61, 513)
        (32, 8, 61)
    """
    most = max(1, GROUP_KEYS // (TILE_ROWS * max(1, n_bins - 1)))
    return divisor_near(n_tiles, most) or n_tiles


def divisor_near(number: int, most: int) -> int | None:
    """Return the largest divisor that is at most `most`, and at least half of it, if there is one.

    Examples:
        >>> divisor_near(96, 40), divisor_near(61, 40)
        (32, None)
    """
    divisors = (divisor for divisor in range(min(most, number), 0, -1) if number % divisor == 0)
    largest = next(divisors, 0)
    return largest if 2 * largest >= most else None


def to_tiles(rows: Shaped[Array, "batch bins"], tile_rows: int) -> Shaped[Array, "tiles bins tile_rows"]:
    """Return rows as tiles of some rows, whose values of a bin lie side by side."""
    batch, n_bins = rows.shape
    return rows.reshape(batch // max(tile_rows, 1), tile_rows, n_bins).swapaxes(1, 2)


def from_tiles(tiles: Shaped[Array, "tiles bins tile_rows"]) -> Shaped[Array, "batch bins"]:
    """Return the rows of tiles."""
    n_tiles, n_bins, n_rows = tiles.shape
    return tiles.swapaxes(1, 2).reshape(n_tiles * n_rows, n_bins)


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


def _leading_bits(bits: Int[Array, "*batch"], n_places: int) -> UInt[Array, "*batch"]:
    """Return what a key holds of ranked bits: multiples of the number of places, 0 for NaN only."""
    unsigned = lax.bitcast_convert_type(bits, jnp.uint32) << 1  # no sign to keep
    return (unsigned & np.uint32(2**32 - n_places)) + np.uint32(n_places)


def _spare_candidates(n_bins: int) -> int:
    """Return how many candidates beyond k are found, so that the least one seldom has the k-th one's key.

    The fewer bits of the power a key keeps, the more powers share one.
    """
    return 2 + max(0, (n_bins - 1).bit_length() - 8) // 2


def _by_group(
    function: Callable[[Shaped[Array, "some_tiles bins rows"]], Shaped[Array, "results some_tiles rows"]],
    tiles: Shaped[Array, "tiles bins rows"],
    count: int,
) -> Shaped[Array, "results tiles rows"]:
    """Return what a function makes of tiles, so many of them at a time."""
    n_tiles, _, n_rows = tiles.shape
    if count >= n_tiles:
        return function(tiles)

    def of_group(start: Int[Array, ""]) -> Shaped[Array, "results some_tiles rows"]:
        return function(lax.dynamic_slice_in_dim(tiles, start, count))

    results = lax.map(of_group, count * jnp.arange(n_tiles // count))
    return results.swapaxes(0, 1).reshape(-1, n_tiles, n_rows)


def blocks_of(n_bins: int) -> tuple[int, int]:
    """Return the width and the number of blocks of bins, which overlap: a maximum may see a key twice.

    Examples:
        >>> blocks_of(129), blocks_of(2049)
        ((16, 9), (64, 33))
    """
    width = min(n_bins, max(MIN_BLOCK_BINS, 1 << ((n_bins - 1).bit_length() + 1) // 2))
    return width, max(MIN_BLOCKS, -(-n_bins // width))


def _largest_below(keys: UInt[Array, "tiles bins rows"], limit: UInt[Array, "tiles rows"]) -> UInt[Array, "tiles rows"]:
    """Return the largest key below a limit, for which there is one.

    A key less the limit wraps around if it is below: the largest difference is that of the nearest one. The
    tree of maxima is written out over blocks of about the root of the bins: a program of two loops without a
    branch, where CPUs get no vector code for a plain reduction over the bins.
    """
    n_bins = keys.shape[1]
    width, n_blocks = blocks_of(n_bins)
    starts = sorted({round(start) for start in np.linspace(0, n_bins - width, n_blocks).tolist()})
    largest = _maximum([keys[:, start : start + width] - limit[:, None] for start in starts])
    # Keeps the compiler from computing the blocks anew for each of their bins.
    largest = lax.optimization_barrier(largest)
    return _maximum([largest[:, place] for place in range(width)]) + limit


def _maximum(arrays: Sequence[Array]) -> Array:
    """Return the elementwise maximum, as a balanced tree."""
    arrays = list(arrays)
    while len(arrays) > 1:
        paired = [jnp.maximum(*pair) for pair in zip(arrays[::2], arrays[1::2], strict=False)]
        arrays = paired + arrays[len(arrays) - len(arrays) % 2 :]
    return functools.reduce(jnp.maximum, arrays)


def _out_of_order(
    bits: Int[Array, "candidates tiles rows"], bins: Int[Array, "candidates tiles rows"]
) -> Bool[Array, "pairs tiles rows"]:
    """Return whether each candidate belongs behind the next one."""
    return (bits[1:] > bits[:-1]) | ((bits[1:] == bits[:-1]) & (bins[1:] < bins[:-1]))


def _swapped(
    values: Int[Array, "candidates tiles rows"], swaps: Bool[Array, "pairs tiles rows"]
) -> Int[Array, "candidates tiles rows"]:
    """Return values with the neighbours swapped that are to be; none of them with both of its own."""
    if len(values) == 1:
        return values
    between = jnp.where(swaps[1:], values[2:], jnp.where(swaps[:-1], values[:-2], values[1:-1]))
    first = jnp.where(swaps[:1], values[1:2], values[:1])
    last = jnp.where(swaps[-1:], values[-2:-1], values[-1:])
    return jnp.concatenate([first, between, last])


def _in_order(
    bits: Int[Array, "candidates tiles rows"], bins: Int[Array, "candidates tiles rows"]
) -> Int[Array, "candidates tiles rows"]:
    """Return the bins of candidates in order: neighbours are swapped, at even and odd places in turn."""
    evens = (np.arange(len(bins) - 1) % 2 == 0)[:, None, None]

    def step(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        bits, bins, turn = state
        swaps = _out_of_order(bits, bins) & turn
        return _swapped(bits, swaps), _swapped(bins, swaps), ~turn

    start = bits, bins, jnp.asarray(evens)
    return lax.while_loop(lambda state: jnp.any(_out_of_order(*state[:2])), step, start)[1]
