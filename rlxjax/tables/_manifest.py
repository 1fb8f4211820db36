"""The manifest of a job, beside its folder: by it a stopped job goes on, and another one is refused."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, Literal

from rlxjax._files import Sealed, digest_of, read_json_file, write_json_file

from ._part import Job
from ._source import Part

SCHEMA_VERSION = 2


class ManifestError(ValueError):
    """A manifest that cannot be used; one line that names the file."""


class Manifest(Sealed):
    """What a job is: all by which two jobs differ.

    Attributes:
        what: is evaluated, in words.
        program: a digest of all that the answers depend on.
        columns: the column of each field.
        carried: columns that are carried along.
        rows_per_batch: rows of a row group of the output.
        files: a digest of each file, by its path.
        package: versions.
        parts: rows of each part, by its name.
    """

    schema_version: Literal[2] = SCHEMA_VERSION
    what: str
    program: str
    columns: dict[str, str]
    carried: list[str]
    rows_per_batch: int
    files: dict[str, str]
    package: dict[str, str]
    parts: dict[str, int]


def manifest_of(job: Job, parts: Sequence[Part], package: Mapping[str, str]) -> Manifest:
    """Return the manifest of a job."""
    identity: dict[str, Any] = {"name": job.program.name, **job.program.identity}
    return Manifest(
        what=job.program.name,
        program=digest_of(identity),
        columns=dict(job.columns),
        carried=list(job.carried),
        rows_per_batch=job.rows_per_batch,
        files={os.path.abspath(path): digest for path, digest in job.source.files.items()},
        package=dict(package),
        parts={part.name: part.rows for part in parts},
    )


def manifest_path(sink: FilePath) -> FilePath:
    """Return where the manifest of a folder is: beside it, so that readers of the folder see rows alone."""
    return sink.with_name(f"{sink.name}.manifest.json")


def begin(manifest: Manifest, job: Job, resume: bool) -> None:
    """Write a job's manifest, or check that the one that is there is of the same job, and may be gone on with."""
    sink, path = job.sink, manifest_path(job.sink)
    if path.exists():
        known = read_json_file(
            path, Manifest, SCHEMA_VERSION, ManifestError, "give another folder", "the manifest of an evaluation"
        )
        names = {"what": "what is evaluated", "program": "what is evaluated", "files": "the input"}
        for name in Manifest.model_fields:
            if getattr(known, name) != getattr(manifest, name):
                differs = names.get(name, name.replace("_", " "))
                ours, hint = manifest.files, ""
                if name == "files":
                    other = next(path for path in known.files | ours if known.files.get(path) != ours.get(path))
                    hint = f" ({other}: size, footer or time of change, which `cp -p` and `rsync -t` keep)"
                raise ManifestError(f"{sink}: holds another job: {differs} differs; give another folder{hint}")
        if not resume:
            done = sum((sink / f"{name}.parquet").exists() for name in manifest.parts)
            raise ManifestError(
                f"{sink}: holds {done} of the {len(manifest.parts)} parts of this job; go on with --resume "
                "(resume=True), or give another folder"
            )
        return
    for folder in (sink, job.rejects):
        if folder.exists() and any(not entry.name.startswith(".") for entry in folder.iterdir()):
            raise ManifestError(f"{folder}: expected a new or empty folder, got one that holds other files")
    write_json_file(manifest, path)
