"""Devices that are not there: what is said of them, the process that compiles for them, and what it makes."""

import gzip
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from typer.testing import CliRunner

import rlxjax as rx
from calibrate.cli import app
from rlxjax import devices, targets
from rlxjax.devices import _compile
from rlxjax.extras import install_command
from rlxjax.gate import Provenance
from rlxjax.jaxpr._primitives import UNKNOWN_LINE
from rlxjax.jaxpr._xla import CompiledProgram
from tests._documented import assert_documented

TABLE = Path(devices.__file__).with_name("devices.json")
#: One target of each platform, and what compiles for it.
EXTRAS = {"tpu": "tpu-v5e", "cuda": "h100"}
N = 512
SQUARE = jax.ShapeDtypeStruct((N, N), jnp.float32)


def is_there(platform):
    try:
        targets.check_compiler(platform)
    except ValueError:
        return False
    return True


@pytest.fixture(params=EXTRAS)
def target(request, monkeypatch, tmp_path):
    """A target whose compiler is installed, with a cache of its own."""
    if not is_there(request.param):
        pytest.skip(
            f"the extra {request.param}-compiler is not installed: nothing compiles for {EXTRAS[request.param]}"
        )
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path))
    return EXTRAS[request.param]


def compiled(function, *args, target, **options):
    return rx.profile_function(function, *args, level="compiled", target=target, **options)


# --- The table -----------------------------------------------------------------------------------


def test_every_figure_of_every_target_has_a_source_and_a_provenance():
    for name in targets.target_names():
        device = targets.target_device(name)
        assert targets.target_device(f" {name.upper()} ") == device
        assert device.memory_bytes > 2**33
        for field, source in device.sources.items():
            assert source.strip(), (name, field)
            assert isinstance(device.provenance_of(field), Provenance)
        assert device.provenance_of("bandwidth_bytes_per_ns") == Provenance.DATA_SHEET
        assert device.provenance_of("launch_ns") == Provenance.UNCALIBRATED  # no data sheet says one
        # A matrix unit is no slower than what is beside it, and half the bits are no slower.
        matrix = device.matrix_flop_per_ns
        half = matrix.get("bf16", matrix.get("f16"))
        assert half >= max(device.vector_flop_per_ns.values())
        assert min(matrix.get("s8", np.inf), matrix.get("f8", np.inf)) >= half >= matrix.get("tf32", 0)
        # What is nearer joins fewer devices, and faster; no data sheet says a latency.
        assert device.links
        for near, far in itertools.pairwise(device.links):
            assert (near.devices < far.devices, near.bytes_per_ns > far.bytes_per_ns) == (True, True)
        assert device.provenance_of("links") == Provenance.UNCALIBRATED
        if device.platform == "tpu":
            assert {"vector_flop_per_ns", "call_ns"} <= device.provenance.keys()
            assert device.links[0].devices >= max(map(int, device.topologies))
            for count, topology in device.topologies.items():
                chips = math.prod(map(int, topology.partition(":")[2].split("x")))
                assert int(count) == chips * (2 if name == "tpu-v7x" else 1)
            assert min(map(int, device.topologies)) <= 2
        else:  # XLA is told what the table says
            said = dict(line.strip().split(": ", 1) for line in device.description if ": " in line)
            assert int(said["device_memory_size"]) == device.memory_bytes
            assert int(said["memory_bandwidth"]) / 1e9 == device.bandwidth_bytes_per_ns
            assert (int(said["core_count"]), float(said["clock_rate_ghz"])) == (device.cores, device.clock_ghz)
            assert json.loads(said["name"]) == device.kind


def test_units_times_clock_are_the_peak_rate():
    for name in targets.target_names():
        device = targets.target_device(name)
        if device.platform == "cuda":
            (lanes,) = (int(line.split(":")[1]) for line in device.description if "fpus_per_core" in line)
            assert device.cores is not None
            peak = 2 * lanes * device.cores * device.clock_ghz  # a multiply-add is two
            assert device.vector_flop_per_ns["f32"] == pytest.approx(peak, rel=0.02)
    # Units of a TPU: multiply-adds of matrix units, lanes of vector units.
    for name, units, lanes in (
        ("tpu-v4", 8 * 128**2, 4096),
        ("tpu-v5e", 4 * 128**2, 4096),
        ("tpu-v5p", 8 * 128**2, 8192),
        ("tpu-v6e", 4 * 256**2, 4096),
    ):
        device = targets.target_device(name)
        assert device.matrix_flop_per_ns["bf16"] == pytest.approx(2 * units * device.clock_ghz, rel=0.01)
        assert device.vector_flop_per_ns["f32"] == pytest.approx(lanes * device.clock_ghz, rel=0.01)


def test_a_file_of_ones_own_is_of_the_same_schema(tmp_path):
    content = json.loads(TABLE.read_text())
    one = {"schema_version": 1, "targets": [content["targets"][1] | {"name": "mine"}]}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(one))
    assert targets.target_device(str(path)) == targets.load_target(path)
    assert targets.load_target(path).name == "mine"
    for change, said in (
        ({"memory_bytes": -1}, "memory_bytes"),
        ({"sources": {}}, "sources: expected the source of each figure, got none for bandwidth_bytes_per_ns"),
        ({"provenance": {"speed": "measured"}}, "got speed"),
        ({"topologies": {}}, "expected the field topologies"),
        ({"links": [{"name": "ICI", "shape": "ring"}]}, "links"),
        ({"topology_options": {"chip_config_name": "megacore"}}, "got none for topology_options"),
        ({"speed": 1}, "speed"),
    ):
        path.write_text(json.dumps(one | {"targets": [one["targets"][0] | change]}))
        with pytest.raises(ValueError, match=said) as refused:
            targets.load_target(path)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: targets.target_device("tpu-v5"), "the nearest: tpu-v5"),
        (lambda: targets.target_device(3), "expected a name"),
        (lambda: targets.target_device("missing.json"), "missing.json: no such file"),
        (lambda: targets.load_target(TABLE), "expected one target, got 16"),
        (
            lambda: rx.profile_function(jnp.sin, SQUARE, target="h100"),
            "target: expected level='compiled' with a target, got",
        ),
        (lambda: targets.target_device("tpu-v5e").compiler_target(257), "a mesh of at most 256 devices, got 257"),
        (lambda: compiled(jnp.sin, SQUARE, target="tpu-v6e"), re.escape(install_command("tpu-compiler"))),
        (lambda: compiled(jnp.sin, SQUARE, target="l4"), re.escape(install_command("cuda-compiler"))),
    ],
)
def test_bad_targets_are_one_line(monkeypatch, call, said):
    monkeypatch.setattr(_compile, "_is_installed", lambda module: False)
    with pytest.raises(ValueError, match=said) as refused:
        call()
    assert "\n" not in str(refused.value)


# --- The process -----------------------------------------------------------------------------------

#: Answers as the compiler's process does, or not.
FAKE = """
import json, os, subprocess, sys, time
while line := sys.stdin.buffer.readline():
    request = json.loads(line)
    program = sys.stdin.buffer.read(request["bytes"])
    if request["name"] == "hangs":
        subprocess.run(["sleep", "40"])  # a child, which holds the pipe too
    if request["name"] == "killed":
        os.kill(os.getpid(), 9)
    if request["name"] == "crashes":
        print("assertion failed", file=sys.stderr, flush=True)
        os.abort()
    print(json.dumps({"process": os.getpid(), "bytes": len(program)}), flush=True)
"""


def test_a_process_is_kept_and_one_that_crashes_or_hangs_is_ended_and_followed_by_another():
    worker = _compile.Worker("tpu", (sys.executable, "-c", FAKE))
    large = b"x" * 3_000_000  # more than a pipe holds
    first = worker.ask({"name": "good"}, large, 60)
    assert first["bytes"] == len(large)
    assert worker.ask({"name": "good"}, b"", 60)["process"] == first["process"]
    for name, limit_s, said in (
        ("crashes", 60, r"target crashes: the compiler crashed \(exit status -6\): assertion failed"),
        ("killed", 60, r"target killed: the compiler was killed \(signal 9\): the machine may have run out of memory"),
        ("hangs", 0.3, "target hangs: the compiler took more than 0.3 s and was stopped"),
    ):
        process = worker.ask({"name": "good"}, b"", 60)["process"]
        start = time.monotonic()
        with pytest.raises(ValueError, match=said) as refused:
            worker.ask({"name": name}, large, limit_s)
        assert time.monotonic() - start < 30
        assert "\n" not in str(refused.value)
        with pytest.raises(ProcessLookupError):  # ended, and no zombie
            os.kill(process, 0)
    last = worker.ask({"name": "good"}, b"", 60)["process"]
    worker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(last, 0)
    with pytest.raises(ValueError, match=r"crashed \(exit status 3\)"):
        _compile.Worker("tpu", (sys.executable, "-c", "raise SystemExit(3)")).ask({"name": "ends"}, b"", 60)


#: A compiler that heeds no signal and holds its input, and a user's process that waits for it.
HANGS = """
import os, sys, time, signal
sys.path.insert(0, {folder!r})
import _child
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
_child.end_with_parent()
request = sys.stdin.buffer.readline()
print(os.getpgrp(), file=open({path!r}, "w"), flush=True)
while True:
    time.sleep(1)
"""
ASKS = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background process ignores
from rlxjax.devices import _compile
_compile.Worker("tpu", (sys.executable, "-c", {hangs!r})).ask({{"name": "hangs"}}, b"x", 60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_compiler_ends_with_the_process_that_asked_it(tmp_path, number):
    path = tmp_path / "asked"
    hangs = HANGS.format(folder=str(TABLE.parent), path=str(path))
    process = subprocess.Popen([sys.executable, "-c", ASKS.format(hangs=hangs)], stderr=subprocess.DEVNULL)

    def in_group():  # a compiler is a session of its own, with the process that watches
        found = subprocess.run(["ps", "-e", "-o", "pgid=,stat="], capture_output=True, text=True, check=True)
        lines = (line.split() for line in found.stdout.splitlines())
        return [state for group, state in lines if group == path.read_text().strip() and state[0] != "Z"]

    def wait(condition):
        start = time.monotonic()
        while not condition():
            assert time.monotonic() - start < 30
            time.sleep(0.05)

    wait(lambda: path.exists() and path.read_text().endswith("\n"))
    assert len(in_group()) == 2
    process.send_signal(number)
    process.wait(30)
    wait(lambda: not in_group())


def double(x):
    return 2 * x


@pytest.fixture
def faked(monkeypatch, tmp_path):
    """A compiler that answers what the fixture holds, and the requests that it got."""
    sizes = {"argument": 6, "output": 5, "temp": 4, "alias": 3}
    memory = {f"{name}_size_in_bytes": size for name, size in sizes.items()}
    where = {"coordinates": [[0, 0, 0]]}
    answers, asked = [{"text": "HloModule", "memory": memory, "costs": {"flops": 2.0}, **where, "seconds": 1.5}], []

    class Fake:
        def ask(self, request, program, limit_s):
            asked.append(request)
            return answers[-1]

    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path))
    monkeypatch.setattr(_compile, "check_compiler", lambda platform: None)
    monkeypatch.setattr(_compile, "worker_of", lambda platform: Fake())
    monkeypatch.setattr(_compile, "_serialized", lambda exported: exported.mlir_module_serialized)
    return answers, asked


def test_what_was_compiled_is_kept_by_program_target_and_flags(faked, monkeypatch, tmp_path):
    _, asked = faked
    first, again = (targets.compile_for(double, SQUARE, target="tpu-v5e") for _ in range(2))
    assert (first.peak_bytes, first.seconds, again.seconds, len(asked)) == (12, 1.5, 0.0, 1)
    assert again.text == first.text
    # Another target, another program, another flag: all are compiled.
    targets.compile_for(double, SQUARE, target="tpu-v6e")
    targets.compile_for(lambda x: 3 * x, SQUARE, target="tpu-v5e")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_some_flag=1")
    targets.compile_for(double, SQUARE, target="tpu-v5e")
    assert len(asked) == 4
    # A file that is not whole, or of an earlier version without coordinates, is made anew.
    for spoil in (lambda whole: whole.replace(b"coordinates", b"places"), lambda whole: whole[:20]):
        for path in (tmp_path / "targets").iterdir():
            path.write_bytes(gzip.compress(spoil(gzip.decompress(path.read_bytes()))))
        targets.compile_for(double, SQUARE, target="tpu-v5e")
    assert len(asked) == 6
    # Donated arguments are told, large constants are arguments, and a mesh is of the target's devices.
    targets.compile_for(jax.jit(double, donate_argnums=0), SQUARE, target="h100")
    assert asked[-1]["donated"] == (0,)
    constant = jnp.ones((N, N), jnp.float32)
    targets.compile_for(jax.jit(lambda x: x + constant, donate_argnums=0), SQUARE, target="h100")
    assert asked[-1]["donated"] == (1,)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = AbstractMesh((4, 2), ("rows", "columns"), axis_types=(kind,) * 2)
        spread = jax.ShapeDtypeStruct((N, N), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("rows")))
        told = {"devices": 8, "axes": ("rows", "columns"), "sizes": (4, 2), "target": "v5e:2x4"}
        for function, x in ((double, spread), (jax.jit(double, in_shardings=spread.sharding), SQUARE)):
            made = targets.compile_for(function, x, target="tpu-v5e", use_cache=False)
            assert asked[-1].items() >= (told | {"types": (kind.name,) * 2}).items()
            assert (made.devices, made.mesh) == (8, {"rows": 4, "columns": 2})


# --- Meshes ----------------------------------------------------------------------------------------


def shape(*sizes, over=None, axes=None):
    sharding = over and NamedSharding(over, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=sharding)


def step(state, batch):
    """A step of training: the state comes back, and a loss."""
    return jax.tree.map(lambda w: w * batch.mean(), state), batch.sum()


def specs(tree):
    return jax.tree.map(lambda leaf: tuple(leaf.sharding.spec), tree)


@pytest.mark.parametrize(
    ("mesh", "state", "batch"),
    [
        ({"data": 8}, ((None, None), (None, None), (None,)), ("data", None)),
        ({"data": 1, "model": 8}, (("model", None), (None, "model"), (None,)), ("data", None)),
        ({"rows": 4, "columns": 2}, (("columns", None), (None, "columns"), (None,)), ("rows", None)),
        ({"fsdp": 8}, (("fsdp", None), (None, "fsdp"), (None,)), ("fsdp", None)),
        ({"data": 2, "fsdp": 4}, (("fsdp", None), (None, "fsdp"), (None,)), (("data", "fsdp"), None)),
        ({"fsdp": 4, "model": 2}, (("model", "fsdp"), ("fsdp", "model"), (None,)), ("fsdp", None)),
    ],
)
def test_arguments_without_a_sharding_are_divided_by_their_part(mesh, state, batch):
    given = {"a": shape(64, 16), "b": shape(16, 16), "c": shape(64)}
    (placed,), named = targets.divided(step, (given,), {"batch": shape(32, 4)}, mesh)
    assert specs(placed) == dict(zip("abc", state, strict=True))
    assert specs(named) == {"batch": batch}
    # Parameters of a forward pass are state as well: their leading dimensions differ.
    (again, rows), _ = targets.divided(lambda w, x: x @ w["a"].T, (given, shape(32, 16)), {}, mesh)
    assert (specs(again), specs(rows)) == (specs(placed), batch)


def test_what_is_placed_or_no_array_or_does_not_divide_stays():
    mesh = {"data": 4, "model": 2}
    own = shape(8, 8, over=targets.mesh_of((), mesh), axes=("model",))
    (placed, odd, number), _ = targets.divided(lambda x, y, n: x.sum() + y.sum() * n, (own, shape(3, 8), 2.5), {}, mesh)
    assert (placed is own, specs(odd), number) == (True, (None, None), 2.5)
    assert targets.divided(double, (SQUARE,), {}, None) == ((SQUARE,), {})
    key = jax.eval_shape(lambda: jax.random.key(0))
    assert targets.divided(jax.random.uniform, (key,), {"shape": (4,)}, mesh)[0][0].dtype == key.dtype
    weak = jax.eval_shape(lambda: jnp.broadcast_to(1.0, (4,)))
    assert targets.divided(double, (weak,), {}, mesh)[0][0].weak_type == weak.weak_type


def test_meshes_that_are_refused(faked):
    wide = {"data": 4, "model": 2}
    own = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    there, odd = (shape(size, 8, over=own, axes=("data",)) for size in (8, 9))
    bad = (3, {}, {"data": 0}, {"data": 2.0}, {"data": True}, {3: 2}, {"": 2})
    for x, mesh, said in (
        *((SQUARE, mesh, "mesh: expected the sizes of axes by name") for mesh in bad),
        (SQUARE, {"data": 64, "model": 8}, "target tpu-v5e: expected a mesh of at most 256 devices, got 512"),
        (
            there,
            wide,
            r"mesh: expected the same mesh for all arguments, got \{'data': 4, 'model': 2\} and \{'data': 4\}",
        ),
        (
            [there, shape(8, 8, over=targets.mesh_of((), wide), axes=("data",))],
            None,
            "the same mesh for all arguments, got",
        ),
        (odd, None, "not.* divi|divi.* not"),
    ):
        with pytest.raises(ValueError, match=said) as refused:
            targets.compile_for(lambda x: jax.tree.leaves(x)[0] * 2, x, target="tpu-v5e", mesh=mesh)
        assert "\n" not in str(refused.value)


def test_what_a_compiler_refuses_says_why(faked):
    answers, _ = faked
    for said, reason in (
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 21.0G of 16.0G hbm.",
            "least 22.5 GB of 17.2 GB",
        ),
        (
            "RESOURCE_EXHAUSTED: required for temporaries (1.5T) exceeds available HBM (16.0G)",
            "needs at least 1,650 GB of 17.2 GB: ",
        ),
        ("RESOURCE_EXHAUSTED: something else", "does not fit the device's memory: RESOURCE_EXHAUSTED: something else"),
        ("UNIMPLEMENTED: ptxas ptxas too old. Falling back", "the installed CUDA cannot compile for TPU v5e$"),
        ("UNIMPLEMENTED: no such call", "the compiler failed with JaxRuntimeError: UNIMPLEMENTED: no such call$"),
    ):
        answers.append({"error": f"{said}\nmore", "kind": "JaxRuntimeError"})
        kind = targets.DoesNotFitError if said.startswith("RESOURCE") else ValueError
        with pytest.raises(kind, match=reason) as refused:
            targets.compile_for(double, SQUARE, target="tpu-v5e", use_cache=False)
        assert "\n" not in str(refused.value)


def test_what_no_target_compiles_is_named(faked):
    def prints(x):
        jax.debug.print("{}", x.sum())
        return x

    def calls(x):
        jax.debug.callback(np.sin, x)
        return x

    for function, said in (
        (lambda x: jax.pure_callback(np.sin, x, x), "calls back to the host \\(pure_callback\\), which"),
        (lambda x: jax.experimental.io_callback(np.sin, x, x), "calls back to the host \\(io_callback\\), which"),
        (prints, "calls back to the host \\(debug_.*; remove `jax.debug`"),
        (calls, "calls back to the host \\(debug_callback.*; remove `jax.debug`"),
        (jnp.linalg.eig, "JAX has no eig for this platform"),
        (jax.scipy.linalg.schur, "JAX has no schur for this platform"),
    ):
        with pytest.raises(ValueError, match=f"cannot be lowered for tpu: (it |){said}") as refused:
            targets.compile_for(function, SQUARE, target="tpu-v5e")
        assert "\n" not in str(refused.value)
    rows = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="cuDNN") as refused:
        targets.compile_for(
            lambda q: jax.nn.dot_product_attention(q, q, q, implementation="cudnn"), rows, target="h100"
        )
    assert "\n" not in str(refused.value)


def test_types_that_jax_would_narrow_are_refused(faked):
    for dtype in (np.float64, np.int64):
        wide = jax.ShapeDtypeStruct((N,), dtype)
        with jax.enable_x64(False), pytest.raises(ValueError, match=f"args: JAX would narrow {wide.dtype}: set JAX_EN"):
            targets.compile_for(double, wide, target="h100")
        with jax.enable_x64(True):
            targets.compile_for(double, wide, target="h100")
    with jax.enable_x64(False):  # an array is narrowed as JAX does with every array
        targets.compile_for(double, np.ones(N), target="h100")


# --- The text ------------------------------------------------------------------------------------

#: A loop as the compilers of TPUs write it: counter and step lie in the tuple, a row lies in the memory of the chip.
LOOP = """HloModule loop
%body (t: (s32[], f32[8,128], s32[])) -> (s32[], f32[8,128], s32[]) {{
  %t = (s32[]{{:T(128)}}, f32[8,128]{{1,0:T(8,128){space}}}, s32[]{{:T(128)}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%t), index=0
  %row = f32[8,128]{{1,0:T(8,128){space}}} get-tuple-element(%t), index=1
  %by = s32[]{{:T(128)}} get-tuple-element(%t), index=2
  %next = s32[]{{:T(128)}} add(%i, %by)
  %new = f32[8,128]{{1,0:T(8,128){space}}} tanh(%row), backend_config={{"window_config":{{"estimated_cycles":"7"}}}}
  ROOT %out = (s32[]{{:T(128)}}, f32[8,128]{{1,0:T(8,128){space}}}, s32[]{{:T(128)}}) tuple(%next, %new, %by)
}}
%test (t: (s32[], f32[8,128], s32[])) -> pred[] {{
  %limit = s32[]{{:T(128)}} constant({limit})
  %t = (s32[]{{:T(128)}}, f32[8,128]{{1,0:T(8,128)}}, s32[]{{:T(128)}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%t), index=0
  ROOT %less = pred[]{{:T(512)}} compare({sides}), direction={direction}
}}
ENTRY %main (x: f32[8,128]) -> f32[8,128] {{
  %first = s32[]{{:T(128)}} constant({first})
  %begin = s32[]{{:T(128)}} copy(%first)
  %step = s32[]{{:T(128)}} constant({step})
  %x = f32[8,128]{{1,0:T(8,128)}} parameter(0)
  %start = (s32[], f32[8,128], s32[]) tuple(%begin, %x, %step)
  %loop = (s32[], f32[8,128], s32[]) while(%start), condition=%test, body=%body
  ROOT %found = f32[8,128]{{1,0:T(8,128)}} get-tuple-element(%loop), index=1
}}
"""


@pytest.mark.parametrize(
    ("first", "limit", "step", "direction", "expected"),
    [
        *((0, 10, 1, "LT", 10), (0, 10, 1, "LE", 11), (10, 0, -1, "GT", 10), (10, 0, -3, "GE", 4)),
        *((3, 10, 3, "LT", 3), (0, 10, 1, "NE", 10), (0, 10, 1, "GT", 0)),
    ],
)
def test_the_turns_of_a_loop_are_read_from_its_counter(first, limit, step, direction, expected):
    turned = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}
    for sides, sense in (("%i, %limit", direction), ("%limit, %i", turned[direction])):
        text = LOOP.format(first=first, limit=limit, step=step, sides=sides, direction=sense, space="")
        program = CompiledProgram(text, {}, platform="tpu")
        assert (program.cycles, program.unknown_loops) == (7 * expected, [])
        sums = program.totals.sums()
        assert (sums.launches, sums.bytes) == (expected, expected * 2 * 4 * 8 * 128)
    # What lies in the memory of the chip moves no byte of the device's.
    text = LOOP.format(first=first, limit=limit, step=step, sides="%i, %limit", direction=direction, space="S(1)")
    assert CompiledProgram(text, {}, platform="tpu").totals.sums().bytes == 0


def test_a_loop_that_runs_away_is_unknown_unless_its_line_says_how_often_it_turns():
    for step in (-1, 0):
        text = LOOP.format(first=0, limit=10, step=step, sides="%i, %limit", direction="LT", space="")
        assert len(CompiledProgram(text, {}, platform="tpu").unknown_loops) == 1
        program = CompiledProgram(text, {UNKNOWN_LINE: 10}, platform="tpu")
        assert (program.cycles, program.unknown_loops) == (7 * 10, [])


# --- What the compilers make -------------------------------------------------------------------------


def turned(length):
    return lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c) @ c, None), x, length=length)[0]


def test_ten_turns_are_ten_times_one(target):
    few, many = (compiled(turned(length), SQUARE, target=target) for length in (10, 100))
    assert (few.unknown_loops, many.unknown_loops) == ((), ())
    # On a TPU all of it may lie in the memory of the chip.
    if target == "h100":
        assert many.io.device_traffic_bytes == pytest.approx(10 * few.io.device_traffic_bytes, rel=0.1)
    assert many.io.kernel_launches == pytest.approx(10 * few.io.kernel_launches, rel=0.1)
    assert few.target.peak_bytes == many.target.peak_bytes == few.peak_bytes
    if few.target.cycles:
        assert many.target.cycles == pytest.approx(10 * few.target.cycles, rel=0.02)
        assert "counts the body of a loop once" in few.target.left_out["flops"]


def test_what_fuses_is_one_kernel_and_moves_what_it_reads_and_writes(target):
    def chain(x):
        return jnp.tanh(x * 2 + 1) - x

    profile = compiled(chain, SQUARE, target=target)
    assert profile.io.kernel_launches == 1
    assert profile.io.device_traffic_bytes == profile.peak_bytes == 2 * 4 * N * N
    assert (profile.target.devices, profile.target.fits, profile.target.temporary_bytes) == (1, True, 0)
    assert profile.target.memory in str(profile)
    again = compiled(chain, SQUARE, target=target)
    assert again.target.compile_seconds == 0  # from the cache, whoever asks
    assert profile.target.compile_seconds > 0
    line = next(name for name in profile.by_line if name.startswith(Path(__file__).name))
    assert profile.by_line[line].launches == 1


def test_arguments_of_every_kind(target):
    table = jnp.asarray(np.ones((N, N), np.float32))
    closed = targets.compile_for(lambda x: x + table, SQUARE, target=target)
    assert closed.argument_bytes == 2 * 4 * N * N
    donated = targets.compile_for(jax.jit(lambda x: x + 1, donate_argnums=0), SQUARE, target=target)
    assert donated.peak_bytes == 4 * N * N
    static = jax.jit(lambda x, axis: x.sum(axis), static_argnames="axis")
    assert targets.compile_for(static, SQUARE, axis=1, target=target).output_bytes >= 4 * N
    noise = targets.compile_for(lambda key: jax.random.normal(key, (N,)), jax.random.key(0), target=target)
    assert noise.output_bytes >= 4 * N
    trees = targets.compile_for(lambda tree: jnp.linalg.qr(tree["a"]), {"a": SQUARE}, target=target)
    assert trees.output_bytes >= 2 * 4 * N * N


def test_a_mesh_is_the_context_of_what_a_function_says_of_its_axes(target):
    def summed(x):
        over = PartitionSpec(("data", "model"))
        return jax.shard_map(lambda y: jax.lax.psum(y, ("data", "model")), in_specs=over, out_specs=PartitionSpec())(x)

    def turned(x):
        return jax.lax.with_sharding_constraint(2 * x, PartitionSpec(None, "data"))

    mesh = {"data": 4, "model": 2}
    weights = {"in": shape(N, N // 2), "out": shape(N // 2, N)}
    for function, args, argument_bytes, moved in (
        (summed, (SQUARE,), 4 * N * N // 4, "all-reduce"),
        (turned, (SQUARE,), 4 * N * N // 4, "all-to-all"),
        (step, (weights, shape(64, N)), 4 * N * N // 2 + 4 * 64 * N // 4, "all-reduce"),
    ):
        made = targets.compile_for(function, *args, target=target, mesh=mesh)
        assert (made.devices, made.mesh, made.argument_bytes) == (8, mesh, argument_bytes)
        assert moved in made.text
        if target == "tpu-v5e":  # eight places of one slice, each device's neighbour on the last axis beside it
            assert len(set(made.coordinates)) == 8
            pairs = zip(made.coordinates[::2], made.coordinates[1::2], strict=True)
            assert all(sum(abs(a - b) for a, b in zip(*pair, strict=True)) == 1 for pair in pairs)
        else:
            assert made.coordinates == ()
    # One device of a mesh, part of a slice, and a function of nothing.
    for sizes in ({"data": 1}, {"data": 2}):
        made = targets.compile_for(lambda: jnp.ones((N, N)), target=target, mesh=sizes)
        assert (made.devices, made.mesh, made.argument_bytes) == (sizes["data"], sizes, 0)


def test_a_pallas_kernel_of_any_target(target):
    """On one device and in a mesh, where each device runs it on its own part."""

    def doubled(x):
        def body(rows, out):
            out[...] = 2 * rows[...]

        spec, out = pl.BlockSpec((16, 128), lambda i: (i, i * 0)), jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(body, out_shape=out, grid=(x.shape[0] // 16,), in_specs=[spec], out_specs=spec)(x)

    def spread(x):
        return jax.shard_map(doubled, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"), check_vma=False)(
            x
        )

    moved = 2 * 4 * N * 128
    assert targets.compile_for(doubled, shape(N, 128), target=target).peak_bytes >= moved
    made = targets.compile_for(spread, shape(N, 128), target=target, mesh={"data": 4})
    assert (made.devices, made.argument_bytes) == (4, moved // 8)


def test_a_refusal_names_the_memory_of_the_table(target):
    """Also where two cores are one device, and where a chip has two."""
    for name in ("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x") if target == "tpu-v5e" else ():
        device = targets.target_device(name)
        with pytest.raises(targets.DoesNotFitError) as refused:
            targets.compile_for(lambda x: jnp.fft.fft(x.T @ x), shape(400_000, 400_000), target=name)
        assert refused.value.memory_bytes == device.memory_bytes
        small = targets.compile_for(lambda x: x @ x, SQUARE, target=name)
        assert (small.devices, small.fits) == (1, True)


def test_a_program_that_does_not_fit(target, tmp_path, monkeypatch):
    (tmp_path / "large.py").write_text("def large(x): return x @ x + x.T\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    asked = ["profile", "large:large", "--arg", "f32[200000,200000]", "--target", target]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 1
    assert "does not fit" in " ".join(result.stdout.split())
    assert CliRunner().invoke(app, [*asked, "--json"]).exit_code == 1
    small = CliRunner().invoke(app, ["profile", "large:large", "--arg", "f32[512,512]", "--target", target])
    assert small.exit_code == 0, small.stderr
    printed = CliRunner().invoke(app, ["profile", "large:large", "--arg", "f32[512,512]", "--target", target, "--json"])
    assert_documented("profile --target", json.loads(printed.stdout))
