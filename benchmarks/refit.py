"""A calibration from kept samples, of whatever machine they are: after a change of the model, say.

python benchmarks/refit.py SAMPLES OUT

SAMPLES is a samples file of the calibrate job, compressed or not; OUT gets the calibration of the machine
that it was taken on. `rlxjax calibrate --resume` does the same on that machine.
"""

import argparse
import dataclasses
import gzip
import tempfile
from pathlib import Path

import jax
from rich.console import Console

from calibrate.job import fit_and_write
from calibrate.report import print_outcome
from calibrate.samples import read_samples
from calibrate.workloads import Grid


def main() -> None:
    """Fit, write and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("samples", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    content = arguments.samples.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / arguments.samples.name.removesuffix(".gz")
        plain.write_bytes(gzip.decompress(content) if arguments.samples.suffix == ".gz" else content)
        command = f"python benchmarks/refit.py {arguments.samples} {arguments.out}"
        outcome = fit_and_write(
            read_samples(plain), Grid(), {}, arguments.out, plain, command, {}, [], False, None
        )
    print_outcome(dataclasses.replace(outcome, samples_path=arguments.samples), Console(width=110))


if __name__ == "__main__":
    main()
