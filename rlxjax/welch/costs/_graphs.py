"""The Welch-peaks graphs, and their profiles in closed form for tables of workloads."""

import numpy as np

from rlxjax._checks import as_index, check_sizes
from rlxjax._counts import exact, is_exact, packed, size_as_float
from rlxjax._typing import Count, RealLike
from rlxjax.device._costs import GraphWork
from rlxjax.graph._graph import Graph
from rlxjax.graph._profile import GraphIoProfile
from rlxjax.welch._params import WelchPeakParams


def welch_peaks_graph(batch: int, params: WelchPeakParams, fused: bool = True) -> Graph:
    """Return the graph of a Welch-peaks run, float32.

    *fft only*: segments `[R, n]`, a subtraction, a concatenation to n real then n imaginary columns, the
    fft in that layout `[R, 2n]`, which is the output; `R = batch * n_segments`. *Fused*: the same and
    `welch_peaks [batch, k, 2]`, which is then the only output (SPEC, section 4).

    Examples:
        >>> g = welch_peaks_graph(4, WelchPeakParams.fast(256, 16))
        >>> [node.op for node in g.nodes]
        ['input', 'sub', 'concat', 'fft', 'welch_peaks']
    """
    batch = as_index(batch, "batch")
    graph = Graph("welch_peaks" if fused else "welch_fft")
    segments = graph.input("segs", (batch * params.n_segments, params.n_fft), "f32")
    zeros = graph.add("sub", [segments, segments])
    output = graph.add("fft", [graph.add("concat", [segments, zeros], axis=1)])
    if fused:
        output = graph.add("welch_peaks", [output], k=params.k, n_segments=params.n_segments)
    graph.set_outputs([output])
    return graph


def welch_graph_work(batch: RealLike, n_fft: RealLike, k: RealLike, n_segments: RealLike, fused: bool) -> GraphWork:
    """Return `graph_work(welch_peaks_graph(...))` in closed form, `[*batch]`.

    Exact where all sizes are integers on the host, floats otherwise.
    """
    batch, n_fft, k, n_segments = sizes(batch, n_fft, k, n_segments)
    samples = batch * n_segments * n_fft
    quarter_traffic, output_bytes, host_bytes = 11 * samples, 20 * samples, 8 * samples
    if fused:
        peaks = batch * k
        quarter_traffic = quarter_traffic + 2 * samples + 2 * peaks
        output_bytes, host_bytes = output_bytes + 8 * peaks, 8 * peaks
    nodes = 4 if fused else 3
    profile = GraphIoProfile(nodes, int(fused), host_bytes, 4 * quarter_traffic)
    return GraphWork(profile, host_bytes + quarter_traffic, output_bytes, nodes, nodes)


def host_fft_profile(batch: RealLike, params: WelchPeakParams) -> GraphIoProfile:
    """Return the profile of the host path: `R + batch` launches, no syncs, peaks as output.

    Traffic is `4Rn + 8Rn + 8*batch*k` (SPEC, section 4).

    Examples:
        >>> host_fft_profile(1, WelchPeakParams.fast(256, 16)).device_traffic_bytes
        6272
    """
    check_sizes(batch=batch)
    return pack_profile(host_profile(batch, params.n_fft, params.k, params.n_segments))


def host_profile(batch: RealLike, n_fft: RealLike, k: RealLike, n_segments: RealLike) -> GraphIoProfile:
    """Return `host_fft_profile` for arrays of sizes, `[*batch]`."""
    batch, n_fft, k, n_segments = sizes(batch, n_fft, k, n_segments)
    rows, peak_bytes = batch * n_segments, 8 * batch * k
    return GraphIoProfile(rows + batch, 0, peak_bytes, 12 * rows * n_fft + peak_bytes)


def useful_bytes_touched(batch: RealLike, params: WelchPeakParams) -> Count:
    """Return the bytes that any implementation has to touch: `4Rn + 8*batch*k`.

    Examples:
        >>> useful_bytes_touched(1, WelchPeakParams.fast(256, 16))
        2176
    """
    check_sizes(batch=batch)
    batch, n_fft, k, n_segments = sizes(batch, params.n_fft, params.k, params.n_segments)
    return _pack(4 * batch * n_segments * n_fft + 8 * batch * k)


def sizes(*values: RealLike) -> list:
    """Return sizes as exact integers if the host can read all of them, else as floats."""
    if all(is_exact(value) for value in values):
        return [exact(value) for value in values]
    names = ("batch", "n_fft", "k", "n_segments")
    return [size_as_float(value, name) for value, name in zip(values, names, strict=True)]


def pack_profile(profile: GraphIoProfile) -> GraphIoProfile:
    """Return a profile with exact counts in NumPy's integer types."""
    return GraphIoProfile(*(_pack(getattr(profile, name)) for name in profile.__dataclass_fields__))


def _pack(count: Count) -> Count:
    is_object = getattr(count, "dtype", None) == np.dtype(object)
    return packed(exact(count)) if is_object or is_exact(count) else count
