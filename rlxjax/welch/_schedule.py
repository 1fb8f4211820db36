"""The numbers by which Welch peaks are scheduled, for the runner and for models of its latency."""

from typing import NamedTuple

#: Which runner a timing is of: it changes when what a workload runs changes.
RUNNER_VERSION = 16


class Schedule(NamedTuple):
    """How rows are divided among programs and processors, as plain numbers.

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
        most_bins_maxima: most bins of which `maxima` selects the peaks where nothing else is asked for; 0
            for none.
        least_block_bins: least width of the blocks of bins that a pass of `maxima` compares.
        least_blocks: least number of these blocks; 0 where nothing selects by `maxima` unless asked to.
        least_n_fft_kernel: least segment of which one kernel computes the peaks where nothing else is asked for.
        most_n_fft_kernel: greatest one; both are powers of two, and 0 where there is no kernel.
        most_k_kernel: most peaks that it finds.
        kernel_samples: samples of a segment times rows that a step of it computes.
    """

    chunk_samples: int
    piece_samples: int
    tile_rows: int
    sizes_per_octave: int
    launches: int
    alone_samples_fused: int
    alone_samples_block: int
    alone_samples_host: int
    host_chunk_samples: int
    most_rows_top_k: int
    most_bins_maxima: int
    least_block_bins: int
    least_blocks: int
    least_n_fft_kernel: int
    most_n_fft_kernel: int
    most_k_kernel: int
    kernel_samples: int


_CPU = Schedule(
    chunk_samples=2**19,
    piece_samples=2**15,
    tile_rows=8,
    sizes_per_octave=4,
    launches=0,
    alone_samples_fused=2**18,
    alone_samples_block=2**17,
    alone_samples_host=2**17,
    host_chunk_samples=2**18,
    most_rows_top_k=8,
    most_bins_maxima=4097,
    least_block_bins=16,
    least_blocks=9,
    least_n_fft_kernel=0,
    most_n_fft_kernel=0,
    most_k_kernel=0,
    kernel_samples=0,
)
#: Of accelerators: chunks are bounded by memory alone, and one is sent while another one is computed.
_ACCELERATOR = _CPU._replace(
    chunk_samples=2**26,
    piece_samples=2**26,
    launches=2,
    alone_samples_fused=2**26,
    alone_samples_block=2**26,
    most_bins_maxima=0,
    least_blocks=0,
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
