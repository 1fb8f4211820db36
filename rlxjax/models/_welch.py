"""The latency model of Welch peaks: what a run takes on one machine, from a NumPy signal to NumPy peaks."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import jax
import numpy as np
from jaxtyping import Array, Bool, Float

from rlxjax._numerics import namespace_of
from rlxjax._typing import RealLike
from rlxjax.device._devices import Coefficients
from rlxjax.fit import Facts, Input, LatencyModel, LatencyPrior, Runs, Strategy, wide_prior

from ._welch_features import welch_features
from ._welch_terms import LEARNED, VARIANTS, welch_terms_ns


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatencyCoefficients(Coefficients):
    """What the parts of a run take on one machine; every field positive, `[*batch]`.

    Units stand in the names: ns, bytes per ns (GB/s), FLOP per ns (GFLOP/s).

    Attributes:
        host_call_ns: one call of NumPy code: the host path, or the block path's selection.
        launch_ns: one call of a device path: checks, launch of its program, and the wait for its end.
        threads_ns: having other threads of Python's join in, on the host and the block path.
        streams_ns: having the programs of other processors run beside the first one.
        parallel_gain: speed-up by all processors at a time, less 1.
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

    host_call_ns: RealLike
    launch_ns: RealLike
    threads_ns: RealLike
    streams_ns: RealLike
    parallel_gain: RealLike
    copy_bytes_per_ns: RealLike
    memory_bytes_per_ns: RealLike
    host_bytes_per_ns: RealLike
    select_row_ns: RealLike
    select_compare_ns: RealLike
    device_flop_per_ns: RealLike
    device_bytes_per_ns: RealLike
    maxima_compare_ns: RealLike
    maxima_pass_ns: RealLike
    topk_bin_ns: RealLike
    topk_compare_ns: RealLike
    learned_segment_ns: RealLike
    learned_flop_per_ns: RealLike


#: Orders of magnitude of a present-day machine.
_TYPICAL = LatencyCoefficients(
    host_call_ns=4e4,
    launch_ns=5e4,
    threads_ns=1e5,
    streams_ns=5e4,
    parallel_gain=0.7,
    copy_bytes_per_ns=20.0,
    memory_bytes_per_ns=10.0,
    host_bytes_per_ns=8.0,
    select_row_ns=100.0,
    select_compare_ns=1.0,
    device_flop_per_ns=20.0,
    device_bytes_per_ns=20.0,
    maxima_compare_ns=0.1,
    maxima_pass_ns=300.0,
    topk_bin_ns=1.0,
    topk_compare_ns=5.0,
    learned_segment_ns=50.0,
    learned_flop_per_ns=30.0,
)
#: Processors are not very many: a wider prior lets a fit end where no timing is.
_GAIN_LOG_SD = 1.0

#: How programs are scheduled where a calibration does not say: by the runner of version 12.
_FACTS: Facts = MappingProxyType(
    {
        "chunk_samples": 2**19,
        "sizes_per_octave": 4,
        "alone_samples_host": 2**17,
        "alone_samples_fused": 2**16,
        "alone_samples_block": 2**17,
        "least_block_bins": 16,
        "least_blocks": 9,
        "learned_n_fft": (),
        "learned_flop": (),
        "learned_live_bins": (),
    }
)

#: Sizes of the runs that a calibrate job may time, and the most samples of a signal, over two.
_BATCHES = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_N_FFTS = (64, 128, 256, 384, 512, 1024, 2048, 4096)
_MIDDLE_K, _OTHER_KS = 16, (4, 64)
_MOST_SAMPLES = 2**21


@dataclasses.dataclass(frozen=True)
class WelchModel(LatencyModel):
    """Welch peaks on the host, or on a device by a fused program, block by block, or by a learned FFT.

    Every strategy but `learned` gives the same peaks. A `learned` run takes its operations from the learned models
    among the facts: `learned_n_fft`, and for each of these lengths `learned_flop`, the operations of the pruned
    program for one segment, and `learned_live_bins`, the bins that are not masked. The other facts are fields of
    the runner's schedule, by their names there.

    Examples:
        >>> runs = Runs.checked(WELCH, "host", batch=64, n_fft=256, k=16)
        >>> terms = WELCH.terms_ns(WELCH.prior.median, runs, WELCH.facts)
        >>> list(terms)
        ['call_ns', 'launch_and_sync_ns', 'upload_ns', 'transform_ns', 'selection_ns', 'readback_ns']
    """

    name, version = "welch", 13
    inputs = MappingProxyType(
        {
            "batch": Input("rows", least=0),
            "n_fft": Input("samples", least=2, step=2),
            "k": Input("peaks"),
            "n_segments": Input("segments", default=2.0),
        }
    )
    variants = VARIANTS

    @property
    def prior(self) -> LatencyPrior[LatencyCoefficients]:
        """Wide, but for what processors gain."""
        return wide_prior(_TYPICAL, parallel_gain=_GAIN_LOG_SD)

    @property
    def facts(self) -> Facts:
        """How programs are scheduled where a calibration does not say."""
        return _FACTS

    @property
    def strategies(self) -> Mapping[str, Strategy]:
        """The host with one and with two segments as users name it, and the four ways to compute peaks."""
        return {
            "ultra": Strategy(("host",), {"n_segments": 1.0}),
            "fast": Strategy(("host",), {"n_segments": 2.0}),
            "host": Strategy(("host",)),
            "fused": Strategy(("fused_maxima", "fused_top_k")),
            "block": Strategy(("block",)),
            "learned": Strategy(("learned",)),
        }

    def terms_ns(self, coefficients: LatencyCoefficients, runs: Runs, facts: Facts) -> Mapping[str, RealLike]:
        """Return the parts of what runs take in ns by name, `[*batch]`; their sum is the prediction."""
        return welch_terms_ns(coefficients, runs, {**_FACTS, **facts})

    def same_result(self, runs: Runs, facts: Facts) -> Bool[Array, "*batch variants"]:
        """Return which variants give peaks: a learned run does where there is a model of its length."""
        xp = namespace_of(*runs.inputs.values())
        n_fft = xp.broadcast_to(xp.asarray(runs.inputs["n_fft"]), runs.shape)
        found = xp.zeros(runs.shape, bool)
        for length in {**_FACTS, **facts}["learned_n_fft"]:
            found = found | (n_fft == length)
        others = xp.ones((*runs.shape, LEARNED), bool)
        return xp.concatenate([others, found[..., None]], axis=-1)

    def features(self, runs: Runs, facts: Facts) -> Float[Array, "*batch features"]:
        """Return what the small correction of a variant may depend on."""
        return welch_features(runs, {**_FACTS, **facts})

    def folds(self, runs: Runs) -> Sequence[np.ndarray]:
        """Return batch and n_fft, `[n]` each: what validation leaves out together."""
        return [np.asarray(runs.inputs["batch"]), np.asarray(runs.inputs["n_fft"])]

    def grid(self) -> Runs:
        """Return the runs that a calibrate job may time, `[n]`: all but the learned ones, which need a model.

        Every batch and n_fft with 16 peaks, and with 4 and 64 in turn; the host with one segment and with two.
        """
        sizes = [
            (variant, batch, n_fft, k, n_segments)
            for variant in VARIANTS[:LEARNED]
            for n_segments in ((1, 2) if variant == "host" else (2,))
            for row, column in itertools.product(range(len(_BATCHES)), range(len(_N_FFTS)))
            for batch, n_fft in [(_BATCHES[row], _N_FFTS[column])]
            for k in (_MIDDLE_K, _OTHER_KS[(row + column) % 2])
            if batch * n_fft <= _MOST_SAMPLES
        ]
        variant, batch, n_fft, k, n_segments = (np.array(column) for column in zip(*sizes, strict=True))
        return Runs.checked(self, variant, batch=batch, n_fft=n_fft, k=k, n_segments=n_segments)


WELCH = WelchModel()
