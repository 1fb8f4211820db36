"""Compare the peak memory of one large Welch-peaks run with the memory of its signal and peaks.

    /usr/bin/time -v python benchmarks/memory.py [--path fused] [--batch 131072] [--n-fft 1024] [--k 16]

`--batch 0` only starts up and shows the memory of the interpreter and JAX.
"""

import argparse
import resource

import numpy as np

from rlxjax import WelchPeakParams, welch_peaks


def main() -> None:
    """Run once and print the peak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", default="fused")
    for name, default in (("batch", 131072), ("n-fft", 1024), ("k", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    params = WelchPeakParams.fast(args.n_fft, args.k)
    welch_peaks(np.zeros((1, params.frame_len), np.float32), params, args.path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    signal = np.empty((args.batch, params.frame_len), np.float32)
    np.random.default_rng(0).standard_normal(out=signal, dtype=np.float32)
    peaks = welch_peaks(signal, params, args.path)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    needed = max(signal.nbytes + np.asarray(peaks).nbytes, 1)
    print(f"{args.path}, {args.batch} rows, n_fft {args.n_fft}: signal and peaks {needed / 1e6:.0f} MB")
    print(f"peak of the process {peak / 1e6:.0f} MB, {peak / needed:.2f} times that;", end=" ")
    print(f"without the {before / 1e6:.0f} MB before the signal was made, {(peak - before) / needed:.2f} times")


if __name__ == "__main__":
    main()
