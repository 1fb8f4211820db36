"""How rows of Welch peaks are divided among programs and processors: the plan of the runner and of its latency model.

Plain numbers, for whole numbers on the host and for arrays alike. A model is given those of a calibration file, so that
a change of the runner's does not change a prediction.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ._numerics import namespace_of
from ._typing import RealLike

#: Which runner a timing is of: it changes when what a workload runs changes.
RUNNER_VERSION = 16


class Schedule(NamedTuple):
    """How rows are divided among programs and processors, as plain numbers; those of CPUs by default.

    Samples are those of all segments: a row has `n_segments * n_fft` of them.

    Attributes:
        chunk_samples: most samples of a chunk, the rows that one device program runs.
        piece_samples: most samples that the fused program transforms at a time, one piece after the other.
            Pieces this small stay in a processor's cache, and a program of them runs on one thread.
        tile_rows: rows of a chunk and of a piece are a multiple of this, where they are so many.
        sizes_per_octave: sizes between a batch and its double that smaller batches are padded to.
        launches: chunks that run at a time; 0 for one on each processor.
        alone_samples_fused: most samples of the fused and the learned path that one processor runs alone.
        alone_samples_block: the same of the block path.
        alone_samples_host: the same of the host path.
        host_chunk_samples: most samples of a chunk of the host path.
        most_rows_top_k: most rows of which `top_k` selects the peaks where nothing else is asked for.
        most_bins_maxima: most bins of which `maxima` selects the peaks where nothing else is asked for; 0 for none.
        least_block_bins: least width of the blocks of bins that a pass of `maxima` compares.
        least_blocks: least number of these blocks; 0 where nothing selects by `maxima` unless asked to.
        least_n_fft_kernel: least segment of which one kernel computes the peaks where nothing else is asked for.
        most_n_fft_kernel: greatest one; both are powers of two, and 0 where there is no kernel.
        most_k_kernel: most peaks that it finds.
        kernel_samples: samples of a segment times rows that a step of it computes.
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
#: Of accelerators: chunks are bounded by memory alone, and one is sent while another one is computed.
_ACCELERATOR = _CPU._replace(
    **dict.fromkeys(("chunk_samples", "piece_samples", "alone_samples_fused", "alone_samples_block"), 2**26),
    **{"launches": 2, "most_bins_maxima": 0, "least_blocks": 0},
)
_WITH_KERNEL = _ACCELERATOR._replace(least_n_fft_kernel=256, most_n_fft_kernel=1024, most_k_kernel=64)
#: A step of a GPU's kernel fills the registers of 128 threads, one of a TPU's some of its vector memory.
_BY_PLATFORM = {
    "cpu": _CPU,
    "gpu": _WITH_KERNEL._replace(kernel_samples=2**11),
    "tpu": _WITH_KERNEL._replace(kernel_samples=2**16),
}


def schedule(platform: str) -> Schedule:
    """Return the schedule on a platform of JAX: "cpu", "gpu" or "tpu".

    Examples:
        >>> schedule("cpu").tile_rows
        8
    """
    return _BY_PLATFORM.get(platform, _ACCELERATOR)


def chunk_rows(row_samples: RealLike, facts: Mapping[str, Any]) -> RealLike:
    """Return the most rows of a chunk, `[*batch]`, a size that padding leaves: they decide a device's memory."""
    xp = namespace_of(row_samples, facts["chunk_samples"])
    tile, rows = facts["tile_rows"], xp.floor(facts["chunk_samples"] / row_samples)
    step = xp.maximum(tile, _power_of_two_below(rows) / facts["sizes_per_octave"])
    return xp.maximum(tile, xp.floor(rows / step) * step)


def padded_rows(batch: RealLike, facts: Mapping[str, Any]) -> RealLike:
    """Return a batch padded to a few sizes an octave, `[*batch]`."""
    xp, sizes = namespace_of(batch, facts["sizes_per_octave"]), facts["sizes_per_octave"]
    step = _power_of_two_below(xp.maximum(batch - 1.0, sizes) / sizes)
    return xp.ceil(batch / step) * step


def rows_of_a_processor(n_rows: RealLike, least: RealLike, most: RealLike, processors: RealLike) -> RealLike:
    """Return the rows of a chunk, between a least and a most number, such that all processors have as many."""
    xp = namespace_of(n_rows, least, most, processors)
    n_chunks = processors * xp.maximum(xp.ceil(xp.ceil(n_rows / most) / processors), 1)
    return xp.minimum(xp.maximum(xp.ceil(n_rows / n_chunks), least), most)


def shared_rows(
    batch: RealLike, row_samples: RealLike, alone_samples: RealLike, processors: RealLike, facts: Mapping[str, Any]
) -> tuple[RealLike, Any]:
    """Return the rows of the chunks of a batch, and whether one program runs the batch as it is, `[*batch]` each."""
    # A chunk has a processor's share of the rows, but neither fewer than half of what one processor works on alone nor
    # more than a chunk may have, in whole tiles of a size that padding leaves as it is.
    xp = namespace_of(batch, row_samples, alone_samples, *facts.values())
    most, tile, alone = chunk_rows(row_samples, facts), facts["tile_rows"], alone_samples / row_samples
    rows = rows_of_a_processor(batch, xp.maximum(tile, xp.floor(alone / 2.0)), most, processors)
    rows = xp.minimum(most, tile * xp.ceil(padded_rows(rows, facts) / tile))
    return rows, batch <= xp.maximum(xp.minimum(most, xp.floor(alone)), rows)


def _power_of_two_below(x: Any) -> RealLike:
    """Return the largest power of two that is no larger: what the exponent of a float alone says."""
    if namespace_of(x) is np:
        return np.ldexp(1.0, np.frexp(x)[1] - 1)
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32).astype(x.dtype)
