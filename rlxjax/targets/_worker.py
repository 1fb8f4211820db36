"""One process a platform that holds a compiler, kept for the session, and killed where it crashes or takes too long."""

import atexit
import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_CHILD = Path(__file__).with_name("_child.py")
#: What tells the compilers that no device is there, by platform of JAX. JAX's own cache knows no lines of a program.
_VARIABLES: Mapping[str, Mapping[str, str]] = {
    "tpu": {
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": "disabled",
        "JAX_PLATFORMS": "cpu",
    },
    "cuda": {
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    },
}
#: Of each platform: the extra, and the modules that it brings, of which one is needed.
_EXTRAS: Mapping[str, tuple[str, Sequence[Sequence[str]]]] = {
    "tpu": ("tpu-compiler", (("libtpu",), ("flatbuffers",))),
    "cuda": ("cuda-compiler", (("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"), ("flatbuffers",))),
}
#: The packages whose versions decide what is compiled.
_COMPILERS = {"tpu": ("libtpu",), "cuda": ("jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cuda-nvcc")}
#: Bytes of what a compiler says that are read, and characters that are shown.
_READ_BYTES, _SHOWN_CHARACTERS = 10_000, 300


class Worker:
    """A process that compiles for one platform, one program at a time.

    Attributes:
        command: what is run, which reads requests and writes answers as `_child.py` does.
    """

    def __init__(self, platform: str, command: Sequence[str] = (sys.executable, "-P", str(_CHILD))) -> None:
        self.command = command
        self._platform = platform
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._said: Any = None

    def ask(self, request: Mapping[str, Any], program: bytes, limit_s: float) -> dict[str, Any]:
        """Return what the process answers to a request.

        Raises:
            ValueError: it crashes, or takes longer than the limit; it is killed, and the next request starts another.
        """
        with self._lock:
            ends_s = time.monotonic() + limit_s
            process = self._running()
            try:
                line = _exchanged(
                    process, json.dumps({**request, "bytes": len(program)}).encode() + b"\n" + program, ends_s
                )
                answer = json.loads(line) if line.endswith(b"\n") else None
            except TimeoutError:
                self.close()
                raise ValueError(
                    f"target {request['name']}: the compiler took more than {limit_s:g} s and was stopped; "
                    "give more with limit_s"
                ) from None
            except (OSError, ValueError):
                answer = None
            except BaseException:  # an interrupted caller leaves an answer in the pipe that belongs to nobody
                self.close()
                raise
            if answer is None:
                status, said = self.close()
                raise ValueError(f"target {request['name']}: the compiler crashed (exit status {status}){said}")
            return answer

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._owner != os.getpid():
            self._process = None  # that of the process that this one was forked from
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._said = tempfile.TemporaryFile()  # noqa: SIM115
            self._process = subprocess.Popen(
                list(self.command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                env=os.environ | _VARIABLES[self._platform],
                start_new_session=True,  # an interrupt of the terminal is for the caller alone
            )
            self._owner = os.getpid()
            atexit.register(self.close)
        return self._process

    def close(self) -> tuple[int | None, str]:
        """Kill the process and wait for its end; return its exit status and its last words, if there was one."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return None, ""
        atexit.unregister(self.close)
        ended = process.poll()
        with contextlib.suppress(OSError):
            process.kill()
        status = process.wait()
        for pipe in filter(None, (process.stdin, process.stdout)):
            with contextlib.suppress(OSError):
                pipe.close()
        with self._said as said:
            said.seek(max(said.seek(0, os.SEEK_END) - _READ_BYTES, 0))
            lines = [line.strip() for line in said.read().decode(errors="replace").splitlines() if line.strip()]
        return status if ended is None else ended, f": {lines[-1][:_SHOWN_CHARACTERS]}" if lines else ""


def _exchanged(process: "subprocess.Popen[bytes]", request: bytes, ends_s: float) -> bytes:
    """Write a request and return the line that answers it, or what came of one before the process ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    into, out = process.stdin.fileno(), process.stdout.fileno()
    os.set_blocking(into, False)
    rest, answer = memoryview(request), bytearray()
    while not answer.endswith(b"\n"):
        left_s = ends_s - time.monotonic()
        readable, writable, _ = select.select([out], [into] if rest else [], [], max(left_s, 0))
        if not readable and not writable:
            raise TimeoutError
        if writable:
            rest = rest[os.write(into, rest[: 2**16]) :]
        if readable:
            if not (part := os.read(out, 2**20)):
                break
            answer += part
    return bytes(answer)


_WORKERS: dict[str, Worker] = {}


def worker_of(platform: str) -> Worker:
    """Return the process of a platform, which the first request starts."""
    return _WORKERS.setdefault(platform, Worker(platform))


def check_compiler(platform: str) -> None:
    """Refuse a platform whose compiler is not installed.

    Raises:
        ValueError: one line that says what to install.
    """
    extra, modules = _EXTRAS[platform]
    for names in modules:
        if not any(map(_is_installed, names)):
            raise ValueError(
                f"target: no compiler for {platform} is installed ({names[0]} is missing); "
                f"install it with: pip install 'rlxjax[{extra}]'"
            )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def compiler_version(platform: str) -> str:
    """Return the versions of what compiles for a platform, as "libtpu 0.0.43.2, jax 0.10.2"."""
    found = []
    for package in (*_COMPILERS[platform], "jaxlib"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)
