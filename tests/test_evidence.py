"""The evidence that ships is read by what reads a user's files."""

import gzip
import itertools
import json
import warnings
from pathlib import Path

import rlxjax as rx
from benchmarks.corpus import read_corpus
from calibrate.samples import read_samples
from rlxjax.calibration import read_calibration_file, sha256_of

ROOT = Path(__file__).parent.parent
EVIDENCE = ROOT / "docs" / "evidence"
CALIBRATIONS = [
    *EVIDENCE.rglob("calibration.json"),
    EVIDENCE / "xeon.json",
    ROOT / "notebooks/data/calibration-cpu.json",
]


def read(path, folder):
    """Return what a file holds; of samples, that of its first lines."""
    if path.name.startswith("corpus-"):
        return read_corpus(path).batches
    if path.name.endswith(".json.gz"):
        return json.loads(gzip.decompress(path.read_bytes()))
    if path.suffix == ".gz":
        start = folder / path.name.removesuffix(".gz")
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            start.write_text("".join(itertools.islice(lines, 300)), encoding="utf-8")
        return read_samples(start)
    return json.loads(path.read_text(encoding="utf-8"))


def test_every_file_of_evidence_is_read(tmp_path):
    files = [path for path in EVIDENCE.rglob("*") if path.suffix in (".gz", ".json")]
    assert len(files) > 20
    assert all(read(path, tmp_path) for path in files)


def test_calibrations_of_evidence_are_whole_and_name_samples_that_are_there():
    for path in CALIBRATIONS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", rx.calibration.MachineMismatchWarning)
            assert rx.load_calibration(path).models
        for section in read_calibration_file(path).models.values():
            (samples,) = EVIDENCE.rglob(section.samples.file)
            assert section.samples.sha256 == sha256_of(samples), path
