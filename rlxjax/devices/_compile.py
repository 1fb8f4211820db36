"""Compile programs for devices that are not present, in a separate process for each platform."""

import atexit
import contextlib
import dataclasses
import functools
import gzip
import hashlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh

from rlxjax._files import home_folder, read_file, whole_file
from rlxjax._tracing import configured, jitted, refusals_in_one_line
from rlxjax._values import FrozenDict, by_value
from rlxjax.extras import install_command
from rlxjax.units import bytes_text

from ._mesh import context_for, divided, mesh_of
from ._table import TargetDevice, target_device

_CHILD = Path(__file__).with_name("_child.py")


class _Compiler(NamedTuple):
    """A platform's compiler: alternative modules, the packages whose versions matter, and environment variables."""

    modules: Sequence[str]
    packages: Sequence[str]
    variables: Mapping[str, str]


#: JAX's own cache is off because its keys ignore source lines. The other variables say that no device is present.
_ALWAYS = {"JAX_ENABLE_COMPILATION_CACHE": "false", "JAX_PLATFORMS": "cpu"}
_COMPILERS = {
    "tpu": _Compiler(
        ("libtpu",),
        ("libtpu",),
        {
            **_ALWAYS,
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": "v5litepod-1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_LOG_DIR": "disabled",
        },
    ),
    "cuda": _Compiler(
        ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"),
        ("jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cuda-nvcc"),
        {**_ALWAYS, "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "TF_CPP_MIN_LOG_LEVEL": "2"},
    ),
}
#: The most bytes of a compiler's messages that are read, and the most characters of these that are shown.
_READ_BYTES, _SHOWN_CHARACTERS = 10_000, 300
#: The most seconds that a compiler may take for one program.
LIMIT_S = 300.0
#: A constant of more bytes than this number becomes an argument of the compiled program.
_LARGE_CONSTANTS_BYTES = 2**16
#: The message of TPU compilers for a program that does not fit.
_USED = re.compile(
    r"(?:Used |required[^()]*\()([\d.]+)([KMGT]?)(?: of |\) exceeds available HBM \()([\d.]+)([KMGT]?)", re.IGNORECASE
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
#: The JAX primitives that call functions on the host.
_CALLBACKS = ("pure_callback", "io_callback", "debug_callback", "debug_print")
#: The dtypes that JAX narrows while `jax_enable_x64` is off.
_WIDE = ("float64", "int64", "uint64", "complex128")
#: The environment variables that change the compiled program.
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


class DoesNotFitError(ValueError):
    """Raised if a program needs more memory than the target has. The message is one line.

    Attributes:
        needed_bytes: bytes needed on one device; None if unknown. Some compilers count only the temporaries.
        memory_bytes: bytes that the program may use; None if unknown.
    """

    def __init__(self, message: str, needed_bytes: int | None = None, memory_bytes: int | None = None) -> None:
        super().__init__(message)
        self.needed_bytes, self.memory_bytes = needed_bytes, memory_bytes


@by_value
@dataclasses.dataclass(frozen=True)
class CompiledFor:
    """A function that was compiled for a target. All numbers of bytes are for one device.

    Attributes:
        target: the device that the function is compiled for.
        devices: number of devices that run the program.
        mesh: the size of each axis of the mesh, by the axis's name; empty for one device without a mesh.
        coordinates: the place of each TPU in its slice, in the order of the program's partition ids: x, y, z, and the
            core if a chip has two devices. Empty for GPUs.
        text: the compiled program, as XLA prints it.
        argument_bytes: bytes of the arguments.
        output_bytes: bytes of the results.
        temporary_bytes: bytes of the temporaries.
        alias_bytes: bytes of the results that reuse the memory of arguments.
        peak_bytes: bytes of arguments, results and temporaries together; memory that is reused counts once.
        costs: the compiler's own estimates: "flops", "bytes accessed", "optimal_seconds". The compiler counts the
            body of a loop once. Empty if the compiler gives no estimates.
        compiler: the versions of the compiler and JAX.
        seconds: compilation time in seconds; 0 if the program came from the cache.
    """

    target: TargetDevice
    devices: int
    mesh: Mapping[str, int]
    coordinates: tuple[tuple[int, ...], ...]
    text: str
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    alias_bytes: int
    peak_bytes: int
    costs: Mapping[str, float]
    compiler: str
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether the program's peak memory is at most the memory of the device."""
        return self.peak_bytes <= self.target.memory_bytes


def compile_for(
    fn: Callable[..., Any],
    *args: Any,
    target: str | TargetDevice,
    mesh: Mapping[str, int] | None = None,
    limit_s: float = LIMIT_S,
    use_cache: bool = True,
    **kwargs: Any,
) -> CompiledFor:
    """Compile a function, in a separate process, for a device that you need not have.

    The process waits for your next program, and ends with your process. Compiled programs are kept in `RLXJAX_HOME` or
    in your cache folder. A kept program is used again for the same program, target, compiler and flags.

    Args:
        fn: the function, jitted or not. Large captured arrays become arguments of the compiled program.
        *args: arrays, numbers, `jax.ShapeDtypeStruct`s, or trees of these. If an argument has a `NamedSharding` (over
            a mesh or a `jax.sharding.AbstractMesh`), the function is compiled for all devices of that mesh.
        target: the name of a device, the path of a file that describes a device, or a `TargetDevice`.
        mesh: the size of each axis of a mesh by name, such as `{"data": 4, "model": 2}`. The function is traced in this
            mesh, so it may use a bare `PartitionSpec`. `rlxjax.devices.divided` divides arguments without a sharding.
        limit_s: the most seconds that the compiler may take.
        use_cache: whether a program from the cache may be used.
        **kwargs: keyword arguments of the function, as for `profile_function`.

    Raises:
        DoesNotFitError: a `ValueError`; the program needs more memory than the device has.
        ValueError: the target is unknown; the compiler is missing, crashes or takes too long; the function does not
            trace or compile; the mesh has more devices than the target's topologies. The message is one line.
    """
    device = target_device(target)
    check_compiler(device.platform)
    for leaf in jax.tree.leaves((args, kwargs)):
        is_wide = isinstance(leaf, jax.ShapeDtypeStruct) and str(leaf.dtype) in _WIDE
        if is_wide and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            raise ValueError(f"args: JAX would narrow {leaf.dtype}: set JAX_ENABLE_X64=1, or give a type of 32 bits")
    over = mesh_of((args, kwargs), mesh)
    device.compiler_target(1 if over is None else over.size)
    args, kwargs = divided(fn, args, kwargs, mesh)
    try:
        with context_for(over):
            request, program = _program(fn, args, kwargs, device, over)
    except ValueError as error:
        if "AbstractDevice" not in str(error) or device.platform == "tpu":
            raise
        with context_for(over, device):  # Pallas asks for the kind of GPU
            request, program = _program(fn, args, kwargs, device, over)
    compiler, flags = compiler_version(device.platform), [os.environ.get(name, "") for name in _FLAGS]
    key = hashlib.sha256(json.dumps([request, compiler, flags]).encode() + program).hexdigest()
    path = home_folder("cache") / "targets" / f"{key}.json.gz"
    answer, seconds = None, 0.0
    with contextlib.suppress(ValueError):  # no cached program, or an incomplete file
        answer = json.loads(read_file(path)) if use_cache else None
    if not isinstance(answer, dict) or not answer.keys() >= {"text", "memory", "costs", "coordinates", "seconds"}:
        worker = worker_of(device.platform)
        answer = worker.ask(request, program, limit_s)
        if "Failed to materialize symbols" in answer.get("error", ""):  # Mosaic may fail like this after other programs
            worker.close()
            answer = worker.ask(request, program, limit_s)
        if "error" in answer:
            raise _refusal(device, answer)
        seconds = answer["seconds"]
        with contextlib.suppress(OSError, ValueError), whole_file(path) as temporary:  # a full disk is no error
            temporary.write_bytes(gzip.compress(json.dumps(answer).encode(), 1))
    argument, output, temporary_bytes, alias = (
        answer["memory"][f"{name}_size_in_bytes"] for name in ("argument", "output", "temp", "alias")
    )
    return CompiledFor(
        target=device,
        devices=request["devices"],
        mesh=FrozenDict(zip(request["axes"], request["sizes"], strict=True)),
        coordinates=tuple(map(tuple, answer["coordinates"])),
        text=answer["text"],
        argument_bytes=argument,
        output_bytes=output,
        temporary_bytes=temporary_bytes,
        alias_bytes=alias,
        peak_bytes=argument + output + temporary_bytes - alias,
        costs=FrozenDict(answer["costs"]),
        compiler=compiler,
        seconds=seconds,
    )


def _refusal(device: TargetDevice, answer: Mapping[str, str]) -> ValueError:
    """Return the error to raise for a program that the compiler refuses."""
    said, kind = answer["error"], answer["kind"]
    if "RESOURCE_EXHAUSTED" in said or "Ran out of memory" in said:
        if not (found := _USED.search(said)):
            first = said.partition("\n")[0]
            return DoesNotFitError(f"target {device.name}: the program does not fit the device's memory: {first}")
        needed, has = (int(float(found[i]) * _UNITS[found[i + 1].upper()]) for i in (1, 3))
        needs = f"needs at least {bytes_text(needed)} of {bytes_text(has)}"
        return DoesNotFitError(f"target {device.name}: the program {needs}: does not fit", needed, has)
    if "ptxas too old" in said:  # CUDA gives this message also for devices that are too old
        return ValueError(f"target {device.name}: the installed CUDA cannot compile for {device.title}")
    first = next((line.strip() for line in said.splitlines() if line.strip()), "no reason")
    return ValueError(f"target {device.name}: the compiler failed with {kind}: {first[:300]}")


def _program(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: TargetDevice,
    mesh: AbstractMesh | None,
) -> tuple[dict[str, Any], bytes]:
    """Trace a function and lower it for the target. Return the request to the compiler, and the serialized program."""
    from jax import export
    from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

    if not callable(fn):
        raise ValueError(f"fn: expected a function, got {fn!r}")
    platforms, checks = [device.platform], [export.DisabledSafetyCheck.custom_call("ALL")]
    with refusals_in_one_line(fn):
        function, given, named = jitted(fn, args, kwargs)
        traced = function.trace(*given, **named)
    donated = [i for i, argument in enumerate(jax.tree.leaves(traced.args_info)) if argument.donated]
    closed, constants = traced.jaxpr, traced.jaxpr.consts
    try:
        # Only the user's line of each operation is kept, so that the place of the call does not change the cache key.
        with configured("jax_traceback_in_locations_limit", 1):
            exported = export.export(function, platforms=platforms, disabled_checks=checks)(*given, **named)
            if exported.nr_devices == 1 and sum(getattr(c, "nbytes", 0) for c in constants) > _LARGE_CONSTANTS_BYTES:
                by_arguments = jax.jit(lambda own, *arrays: jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, own))(*arrays))
                shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in closed.in_avals]
                exported = export.export(by_arguments, platforms=platforms, disabled_checks=checks)(constants, *shapes)
                donated = [i + len(constants) for i in donated]
        if mesh is None:  # `jax.jit(in_shardings=...)` may have a mesh
            own: Any = None
            mesh = mesh_of((exported.in_shardings_jax(own), exported.out_shardings_jax(own)))
        count = exported.nr_devices if mesh is None else mesh.size
        exported = dataclasses.replace(
            exported,
            in_tree=jax.tree.structure(((0,) * len(exported.in_avals), {})),
            out_tree=jax.tree.structure((0,) * len(exported.out_avals)),
        )
        serialized = _serialized(exported)
    except Exception as error:  # noqa: BLE001  (lowering rules may raise anything)
        said = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
        if "platform" in said and (called := [name for name in _CALLBACKS if name in str(closed)]):
            hint = "; remove `jax.debug`" if called[0].startswith("debug") else ""
            said = f"it calls back to the host ({called[0]}), which JAX lowers only for a local device{hint}"
        elif found := re.search(r"primitive '(\w+)' not found", said):
            said = f"JAX has no {found[1]} for this platform"
        elif "cusolver" in said.lower():
            said = "the function calls cuSOLVER, which needs a local GPU"
        raise ValueError(
            f"target {device.name}: the function cannot be lowered for {device.platform}: {said}"
        ) from error
    return {
        "name": device.name,
        "platform": device.platform,
        "target": device.compiler_target(count),
        "options": dict(device.topology_options),
        "devices": count,
        "axes": () if mesh is None else mesh.axis_names,
        "sizes": () if mesh is None else mesh.axis_sizes,
        "types": () if mesh is None else tuple(kind.name for kind in mesh.axis_types),
        "donated": tuple(donated),
    }, serialized


def _serialized(exported: Any) -> bytes:
    return bytes(exported.serialize())


class Worker:
    """A process that compiles for one platform, one program at a time. The protocol is that of `_child.py`."""

    def __init__(self, platform: str, command: Sequence[str] = (sys.executable, "-P", str(_CHILD))) -> None:
        self._platform, self._command, self._lock = platform, command, threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner, self._said = 0, None

    def ask(self, request: Mapping[str, Any], program: bytes, limit_s: float) -> dict[str, Any]:
        """Return the answer of the process. If the process crashes or is too slow, kill it and raise a `ValueError`."""
        with self._lock:
            process, is_late, answer = self._running(), threading.Event(), None
            assert process.stdin is not None
            assert process.stdout is not None

            def stop() -> None:
                is_late.set()
                _kill(process)

            timer = threading.Timer(min(limit_s, threading.TIMEOUT_MAX), stop)
            timer.start()
            try:
                process.stdin.write(json.dumps({**request, "bytes": len(program)}).encode() + b"\n" + program)
                process.stdin.flush()
                line = process.stdout.readline()
                answer = json.loads(line) if line.endswith(b"\n") else None
            except (OSError, ValueError):
                pass
            except BaseException:  # after an interrupt, the pipe may hold the answer to an old request
                self.close()
                raise
            finally:
                timer.cancel()
            if answer is not None and not is_late.is_set():
                return answer
            with contextlib.suppress(subprocess.TimeoutExpired):  # an exit status says more than a kill
                process.wait(0 if is_late.is_set() else 5)
            is_killed = process.returncode == -signal.SIGKILL
            status, said = self.close()
            reason = f"crashed (exit status {status}){said}"
            if is_killed:
                reason = "was killed (signal 9): the machine may have run out of memory"
            if is_late.is_set():
                reason = f"took more than {limit_s:g} s and was stopped; raise limit_s"
            raise ValueError(f"target {request['name']}: the compiler {reason}")

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._owner != os.getpid():
            self._process = None  # the process belongs to the parent of this fork
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._said = tempfile.TemporaryFile()  # noqa: SIM115
            self._process = subprocess.Popen(
                list(self._command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                env=os.environ | _COMPILERS[self._platform].variables,
                start_new_session=True,  # Ctrl-C in the terminal interrupts only the caller
            )
            self._owner = os.getpid()
            atexit.register(self.close)
        return self._process

    def close(self) -> tuple[int | None, str]:
        """Kill the process and wait for its end. Return its exit status (None without a process) and last message."""
        process, self._process = self._process, None
        if process is None or self._said is None or self._owner != os.getpid():
            return None, ""
        atexit.unregister(self.close)
        _kill(process)
        status = process.wait()
        for pipe in filter(None, (process.stdin, process.stdout)):
            with contextlib.suppress(OSError):
                pipe.close()
        with self._said as said:
            said.seek(max(said.seek(0, os.SEEK_END) - _READ_BYTES, 0))
            lines = [line.strip() for line in said.read().decode(errors="replace").splitlines() if line.strip()]
        return status, f": {lines[-1][:_SHOWN_CHARACTERS]}" if lines else ""


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and its children; the children would keep the pipes open."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


@functools.cache
def worker_of(platform: str) -> Worker:
    """Return the process that compiles for a platform. The process starts with its first request."""
    return Worker(platform)


def check_compiler(platform: str) -> None:
    """Check that the compiler of a platform is installed.

    Raises:
        ValueError: the compiler is not installed. The message is one line with the command that installs it.
    """
    for names in (_COMPILERS[platform].modules, ("flatbuffers",)):
        if not any(map(_is_installed, names)):
            raise ValueError(
                f"target: no compiler for {platform} is installed ({names[0]} is missing); "
                f"install it with `{install_command(f'{platform}-compiler')}`"
            )


def _is_installed(module: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec(module) is not None
    return False


def compiler_version(platform: str) -> str:
    """Return the versions of a platform's compiler, such as "libtpu 0.0.43.2, jaxlib 0.10.2"."""
    found = []
    for package in (*_COMPILERS[platform].packages, "jaxlib"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)
