import dataclasses
from rlxjax.fit import LatencyPrior, wide_prior
from ._welch import LatencyCoefficients

#: Orders of magnitude of a present-day machine; a log-sd of 2 lets data move them by a factor of 50.
_TYPICAL = LatencyCoefficients(
    host_call_ns=4e4,
    host_row_ns=50.0,
    host_bytes_per_ns=8.0,
    host_flop_per_ns=10.0,
    host_row_far_bytes_per_ns=10.0,
    select_row_ns=100.0,
    select_bin_ns=1.0,
    select_sort_ns=1.0,
    select_peak_ns=1.0,
    host_parallel_gain=0.7,
    threads_ns=1e5,
    device_call_ns=4e4,
    dispatch_ns=1e4,
    roundtrip_ns=1e4,
    streams_ns=5e4,
    upload_bytes_per_ns=20.0,
    staging_bytes_per_ns=20.0,
    readback_bytes_per_ns=20.0,
    device_row_ns=50.0,
    device_flop_per_ns=10.0,
    device_bytes_per_ns=20.0,
    split_sample_ns=0.2,
    row_far_bytes_per_ns=20.0,
    row_cache_bytes=4.5e4,
    far_bytes_per_ns=10.0,
    cache_bytes=1e6,
    device_parallel_gain=0.7,
    maxima_key_ns=1.0,
    maxima_bin_ns=0.1,
    maxima_peak_ns=1.0,
    maxima_pass_ns=300.0,
    topk_bin_ns=1.0,
    topk_update_ns=5.0,
    maxima_parallel_gain=0.7,
    topk_parallel_gain=0.7,
)
_WIDE_LOG_SD = 2.0
#: Caches are of a few sizes, and processors not very many: with a wide prior, a fit may end where no timing
#: is, with a cache of 70 MB or a gain of 42 by two processors.
_FIRST_CACHE_LOG_SD, _NARROWER_LOG_SD = 0.3, 1.0
_NARROWER = ("cache_bytes",) + tuple(f"{work}_parallel_gain" for work in ("host", "device", "maxima", "topk"))


def typical_prior() -> LatencyPrior[LatencyCoefficients]:
    """Return the prior that `fit_latency` starts from: wide, but for caches and what processors gain."""
    prior = wide_prior(_TYPICAL)
    narrower = dict.fromkeys(_NARROWER, _NARROWER_LOG_SD)
    log_sd = dataclasses.replace(prior.log_sd, row_cache_bytes=_FIRST_CACHE_LOG_SD, **narrower)
    return LatencyPrior(prior.median, log_sd)
