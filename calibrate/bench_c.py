"""The peer in C: compiles benchmarks/welch_fftw.c once a process, and runs it."""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
import weakref
from pathlib import Path as FilePath

import numpy as np

from rlxjax import WelchPeakParams

SOURCE = FilePath(__file__).parent.parent / "benchmarks" / "welch_fftw.c"
FLAGS = (
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fassociative-math",
    "-fno-signed-zeros",
    "-shared",
    "-fPIC",
)
LIBRARIES = ("-lfftw3f", "-lm", "-pthread")
COMPILE_TIMEOUT_S = 120


def cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def c_unavailable() -> str | None:
    """Return why the C program cannot run here, a sentence, or None."""
    return _built()[1]


def c_version() -> str:
    """Return the version of FFTW, and how the program was compiled."""
    version = (ctypes.c_char * 64).in_dll(_library(), "fftwf_version").value.decode()
    return f"{version}, {_compiler()} {' '.join(FLAGS)}"


class CWelch:
    """A plan of the C program for one signal; calling it returns the peaks `[batch, k, 2]`.

    Args:
        signal: `[batch, samples]`, float32.
        params: of the transform.
        inserts: whether peaks are found by insertion into a sorted list, or by a threshold and ranks, which
            is faster.
    """

    def __init__(self, signal: np.ndarray, params: WelchPeakParams, *, inserts: bool = False):
        self._library = _library()
        self._signal, self._peaks_shape = np.ascontiguousarray(signal), (len(signal), params.k, 2)
        self._plan = self._library.welch_new(params.n_fft, params.n_segments, params.k, cores(), inserts)
        if not self._plan:
            raise MemoryError("the C program found no memory for its plan")
        weakref.finalize(self, self._library.welch_free, self._plan)

    def __call__(self) -> np.ndarray:
        peaks, signal = np.empty(self._peaks_shape, np.float32), self._signal
        self._library.welch_run(self._plan, signal.ctypes.data, *signal.shape, peaks.ctypes.data)
        return peaks


def _compiler() -> str | None:
    return next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)


def _library() -> ctypes.CDLL:
    library, reason = _built()
    if library is None:
        raise OSError(reason)
    return library


@functools.cache
def _built() -> tuple[ctypes.CDLL | None, str | None]:
    if not SOURCE.is_file():
        return None, f"its source is not installed ({SOURCE}): run the benchmark from the repository"
    compiler = _compiler()
    if compiler is None:
        return None, "there is no C compiler (cc, gcc or clang)"
    # A library that is loaded outlives its file.
    with tempfile.TemporaryDirectory() as folder:
        target = FilePath(folder) / "welch_fftw.so"
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(target), *LIBRARIES]
        try:
            made = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
            if made.returncode:
                said = (made.stderr.strip().splitlines() or ["it said nothing"])[0]
                return None, f"{compiler} cannot compile it, which takes FFTW's libfftw3f and header: {said}"
            library = ctypes.CDLL(str(target))
        except (OSError, subprocess.TimeoutExpired) as error:
            return None, f"{compiler} cannot compile it: {' '.join(str(error).split())}"
    pointer, integer, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_long
    library.welch_new.argtypes, library.welch_new.restype = [integer] * 5, pointer
    library.welch_run.argtypes, library.welch_run.restype = [pointer, pointer, long, long, pointer], None
    library.welch_free.argtypes, library.welch_free.restype = [pointer], None
    return library, None
