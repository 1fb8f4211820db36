"""How the rows of Welch peaks are divided among programs and processors, for `welch_peaks` and its latency model.

The latency model reads the schedule from the calibration file, so a change of the code here changes no prediction.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ._numerics import namespace_of
from ._typing import RealLike

#: The version of the runner, kept with each timing. Raise it if a workload runs other programs than before.
RUNNER_VERSION = 16


class Schedule(NamedTuple):
    """The sizes that determine how rows are divided among programs and processors; the defaults are for CPUs.

    A row counts as `n_segments * n_fft` samples, because each segment counts its samples separately.

    Attributes:
        chunk_samples: largest number of samples in a chunk; a device program runs one chunk of rows at a time.
        piece_samples: largest number of samples in a piece; the fused program transforms one piece at a time. A piece
            stays in a processor's cache and runs on a single thread.
        tile_rows: if a chunk or piece has more rows than this number, its number of rows is a multiple of this number.
        sizes_per_octave: number of batch sizes in each doubling. A batch is padded to the next of these sizes.
        launches: number of chunks that run at the same time; 0 means one chunk on each processor.
        alone_samples_fused: most samples that a single processor runs with the strategies "fused" and "learned".
        alone_samples_block: most samples that a single processor runs with the strategy "block".
        alone_samples_host: most samples that a single processor runs with the strategy "host".
        host_chunk_samples: largest number of samples in a chunk, for the strategy "host".
        most_rows_top_k: largest number of rows for which `top_k` selects the peaks by default.
        most_bins_maxima: largest number of bins for which `maxima` selects the peaks by default; 0 means never.
        least_block_bins: smallest width, in bins, of the blocks that `maxima` compares.
        least_blocks: smallest number of blocks that `maxima` compares; 0 if `maxima` is not a default.
        least_n_fft_kernel: shortest segment for which a kernel computes the peaks, a power of two; 0 without a kernel.
        most_n_fft_kernel: longest segment for which a kernel computes the peaks, a power of two; 0 without a kernel.
        most_k_kernel: largest number of peaks that the kernel can find in a row.
        kernel_samples: number of samples in a step of the kernel: the segment length times the number of rows.
    """

    chunk_samples: int = 2**19
    piece_samples: int = 2**15
    tile_rows: int = 8
    sizes_per_octave: int = 4
    launches: int = 0
    alone_samples_fused: int = 2**18
    alone_samples_block: int = 2**17
    alone_samples_host: int = 2**17
    host_chunk_samples: int = 2**18
    most_rows_top_k: int = 8
    most_bins_maxima: int = 4097
    least_block_bins: int = 16
    least_blocks: int = 9
    least_n_fft_kernel: int = 0
    most_n_fft_kernel: int = 0
    most_k_kernel: int = 0
    kernel_samples: int = 0


_CPU = Schedule()
#: On an accelerator, only memory limits a chunk. Two chunks are under way: one is sent while the other is computed.
_ACCELERATOR = _CPU._replace(
    **dict.fromkeys(("chunk_samples", "piece_samples", "alone_samples_fused", "alone_samples_block"), 2**26),
    **{"launches": 2, "most_bins_maxima": 0, "least_blocks": 0},
)
_WITH_KERNEL = _ACCELERATOR._replace(least_n_fft_kernel=256, most_n_fft_kernel=1024, most_k_kernel=64)
#: Each step of a kernel fills the registers of 128 GPU threads, or a part of a TPU's vector memory.
_BY_PLATFORM = {
    "cpu": _CPU,
    "gpu": _WITH_KERNEL._replace(kernel_samples=2**11),
    "tpu": _WITH_KERNEL._replace(kernel_samples=2**16),
}


def schedule(platform: str) -> Schedule:
    """Return the schedule of a JAX platform: "cpu", "gpu" or "tpu".

    Examples:
        >>> schedule("cpu").tile_rows
        8
    """
    return _BY_PLATFORM.get(platform, _ACCELERATOR)


def chunk_rows(row_samples: RealLike, facts: Mapping[str, Any]) -> RealLike:
    """Return the largest number of rows in a chunk, `[*batch]`. A chunk with this many rows needs no padding."""
    xp = namespace_of(row_samples, facts["chunk_samples"])
    tile, rows = facts["tile_rows"], xp.floor(facts["chunk_samples"] / row_samples)
    step = xp.maximum(tile, _power_of_two_below(rows) / facts["sizes_per_octave"])
    return xp.maximum(tile, xp.floor(rows / step) * step)


def padded_rows(batch: RealLike, facts: Mapping[str, Any]) -> RealLike:
    """Return the number of rows, `[*batch]`, to which a batch is padded: the next of the schedule's batch sizes."""
    xp, sizes = namespace_of(batch, facts["sizes_per_octave"]), facts["sizes_per_octave"]
    step = _power_of_two_below(xp.maximum(batch - 1.0, sizes) / sizes)
    return xp.ceil(batch / step) * step


def rows_of_a_processor(n_rows: RealLike, least: RealLike, most: RealLike, processors: RealLike) -> RealLike:
    """Return the number of rows in a chunk, from `least` to `most`. Every processor gets the same number of chunks."""
    xp = namespace_of(n_rows, least, most, processors)
    n_chunks = processors * xp.maximum(xp.ceil(xp.ceil(n_rows / most) / processors), 1)
    return xp.minimum(xp.maximum(xp.ceil(n_rows / n_chunks), least), most)


def shared_rows(
    batch: RealLike, row_samples: RealLike, alone_samples: RealLike, processors: RealLike, facts: Mapping[str, Any]
) -> tuple[RealLike, Any]:
    """Return the number of rows in a chunk, and whether one program runs the whole batch. Both are `[*batch]`."""
    # A chunk has a processor's share of the rows, but at least half of the rows that one processor runs alone, and at
    # most the rows of a full chunk. The number of rows is a multiple of a tile and needs no padding.
    xp = namespace_of(batch, row_samples, alone_samples, *facts.values())
    most, tile, alone = chunk_rows(row_samples, facts), facts["tile_rows"], alone_samples / row_samples
    rows = rows_of_a_processor(batch, xp.maximum(tile, xp.floor(alone / 2.0)), most, processors)
    rows = xp.minimum(most, tile * xp.ceil(padded_rows(rows, facts) / tile))
    return rows, batch <= xp.maximum(xp.minimum(most, xp.floor(alone)), rows)


def _power_of_two_below(x: Any) -> RealLike:
    """Return the largest power of two that is at most `x`."""
    if namespace_of(x) is np:
        return np.ldexp(1.0, np.frexp(x)[1] - 1)
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32).astype(x.dtype)
