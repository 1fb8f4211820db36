"""The coefficients of the latency model of Welch peaks, and what is believed of them beforehand."""

import dataclasses

import jax

from rlxjax._typing import RealLike
from rlxjax._values import by_value
from rlxjax.gate._devices import Coefficients


@by_value
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatencyCoefficients(Coefficients):
    """What the parts of a run take on one machine; every field positive, `[*batch]`.

    Units stand in the names: ns, bytes per ns (GB/s), FLOP per ns (GFLOP/s). The defaults are orders of magnitude of a
    present-day machine.

    Attributes:
        host_call_ns: one call of NumPy code: the host path, or the block path's selection.
        launch_ns: one call of a device path: checks, launch of its program, and the wait for its end.
        threads_ns: having other threads of Python's join in, on the host and the block path.
        streams_ns: having the programs of other processors run beside the first one.
        parallel_gain: speed-up by all processors at a time, less 1.
        padding_ns: making room for rows that are padded, apart from their bytes.
        copy_bytes_per_ns: between host and device: signals and spectra.
        memory_bytes_per_ns: what data beyond the caches cost on top, and what each call reads anew.
        host_bytes_per_ns: samples and spectra that NumPy's code moves.
        select_row_ns: one row of the host's selection, however many bins it has.
        select_compare_ns: one comparison of the host's selection.
        device_flop_per_ns: FFT operations on the device.
        device_bytes_per_ns: what the device's transforms move, within a chunk.
        maxima_compare_ns: one bin compared in a pass of the selection by maxima.
        maxima_pass_ns: one of those passes, however many rows it has.
        topk_bin_ns: one bin scanned by the selection by a heap.
        topk_compare_ns: one comparison of that heap.
        learned_segment_ns: one segment of a pruned transform, apart from its operations and its bytes.
        learned_flop_per_ns: operations of a pruned transform.
    """

    host_call_ns: RealLike = 4e4
    launch_ns: RealLike = 5e4
    threads_ns: RealLike = 1e5
    streams_ns: RealLike = 5e4
    parallel_gain: RealLike = 0.7
    padding_ns: RealLike = 5e3
    copy_bytes_per_ns: RealLike = 20.0
    memory_bytes_per_ns: RealLike = 10.0
    host_bytes_per_ns: RealLike = 8.0
    select_row_ns: RealLike = 100.0
    select_compare_ns: RealLike = 1.0
    device_flop_per_ns: RealLike = 20.0
    device_bytes_per_ns: RealLike = 20.0
    maxima_compare_ns: RealLike = 0.1
    maxima_pass_ns: RealLike = 300.0
    topk_bin_ns: RealLike = 1.0
    topk_compare_ns: RealLike = 5.0
    learned_segment_ns: RealLike = 50.0
    learned_flop_per_ns: RealLike = 30.0


#: Processors are not very many: a wider prior lets a fit end where no timing is.
GAIN_LOG_SD = 1.0
