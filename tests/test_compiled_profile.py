"""What XLA made of a function: the laws its counts obey, what the profile says of it, and compilers that fail."""

import inspect
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import rlxjax as rx
from rlxjax.jaxpr._xla import CompiledProgram

N = 64
SQUARE = jax.ShapeDtypeStruct((N, N), jnp.float32)


def compiled(function, *args, **options):
    return rx.profile_function(function, *args, level="compiled", **options)


def line_of(function, fragment):
    lines, first = inspect.getsourcelines(function)
    return f"{Path(__file__).name}:{first + next(i for i, line in enumerate(lines) if fragment in line)}"


def chain(x):
    return jnp.tanh(x * 2 + 1) - x


def several_parts(closed_over):
    """Return a function of many kinds of instructions, one of whose arguments it may reuse and one it ignores."""

    def parts(x, unused, tree):
        y, stack = lax.scan(lambda c, _: (jnp.sin(c) @ closed_over, c.sum()), chain(x), length=7)
        y = lax.cond(stack[0] > 0, lambda y: jnp.fft.fft(y).real, lambda y: y * 2, y)
        return {
            "moved": x + tree["more"],
            "best": lax.top_k(y, 3),
            "noise": jax.random.normal(tree["key"], (N,)),
        }, stack

    return jax.jit(parts, donate_argnums=0)


@pytest.fixture(scope="module")
def parts():
    """The function, its arguments, and its profile."""
    function = several_parts(jnp.arange(N * N, dtype=jnp.float32).reshape(N, N))
    args = (SQUARE, SQUARE, {"more": SQUARE, "key": jax.eval_shape(lambda: jax.random.key(0))})
    return function, args, compiled(function, *args)


def test_the_peak_is_that_of_the_program_compiled_here(parts):
    function, args, profile = parts
    memory = function.lower(*args).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 4 * N * N  # the donated argument
    assert profile.peak_bytes == (
        memory.temp_size_in_bytes
        + memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )


def test_operations_stay_those_of_the_jaxpr(parts):
    function, args, profile = parts
    written = rx.profile_function(function, *args)
    for name in ("flops", "transcendentals", "integer_ops", "coverage_equations", "uncosted"):
        assert getattr(profile, name) == getattr(written, name)
    assert (written.level, written.disagreements, profile.level) == ("jaxpr", (), "compiled")
    assert profile.io.host_output_bytes == written.io.host_output_bytes
    assert profile.fused_traffic_bytes == profile.io.device_traffic_bytes


def test_rows_sum_to_the_totals(parts):
    profile = parts[2]
    for rows in (profile.by_family, profile.by_line):
        sums = [sum(column) for column in zip(*rows.values(), strict=True)]
        assert sums[:3] == [profile.flops, profile.transcendentals, profile.integer_ops]
        assert sums[3:] == [profile.io.device_traffic_bytes, profile.io.kernel_launches]
    assert {"fft", "loop fusion", "custom-call TopK"} <= set(profile.by_family)
    assert profile.by_family["fft"].flops > 0
    assert profile.by_line[line_of(several_parts, "top_k")].launches >= 1


def test_a_conditional_counts_as_its_dearest_branch(parts):
    (branch,) = parts[2].branches
    assert branch.line == line_of(several_parts, "lax.cond")
    assert branch.least.bytes == 2 * 4 * N * N
    assert branch.most.launches == 3  # to complex, fft, to real
    assert branch.most.bytes == (1 + 2 + 2 + 2 + 2 + 1) * 4 * N * N
    assert parts[2].by_family["fft"].launches == 1


def test_disagreements_say_what_the_figures_of_xla_leave_out(parts):
    function, args, profile = parts
    named = {each.name: each for each in profile.disagreements}
    for name, xla_of_one_turn in (("flops", 2 * N**3), ("transcendentals", 2 * N * N)):
        found = named[name]
        assert (found.jaxpr, found.compiled) == (getattr(profile, name), None)
        assert xla_of_one_turn <= found.xla < found.jaxpr
        assert "body of a loop once" in found.reason
        assert "TopK" in found.reason
    assert named["traffic bytes"].compiled == profile.io.device_traffic_bytes > named["traffic bytes"].xla
    launches = named["launches"]
    assert (launches.compiled, launches.xla) == (profile.io.kernel_launches, None)
    assert launches.jaxpr == rx.profile_function(function, *args).io.kernel_launches
    printed = str(profile)
    assert all(f"{name}: jaxpr " in printed for name in named)
    assert "launches, traffic and memory are those of the compiled program" in printed


@pytest.mark.parametrize("wide", [False, True])
def test_a_chain_is_one_launch_that_reads_and_writes_once(wide):
    with jax.enable_x64(wide):
        profile = compiled(chain, jax.ShapeDtypeStruct((N,), jnp.result_type(float)))
    moved = 2 * N * (8 if wide else 4)
    assert (profile.io.kernel_launches, profile.io.device_traffic_bytes, profile.peak_bytes) == (1, moved, moved)
    assert profile.by_family["loop fusion"] == (0, 0, 0, moved, 1)


def test_a_scan_is_linear_in_its_length():
    def stacked(xs):
        return lax.scan(lambda c, x: (c @ x, jnp.sin(c)), xs[0], xs)

    lengths = (20, 40, 60)
    profiles = [compiled(stacked, jax.ShapeDtypeStruct((n, N, N), jnp.float32)) for n in lengths]
    for count in ("kernel_launches", "device_traffic_bytes"):
        first, second, third = (getattr(profile.io, count) for profile in profiles)
        assert third - second == second - first > 0
    per_turn = (third - second) / 20
    assert per_turn < lengths[0] * 4 * N * N  # a turn reads and writes a slice of each stack, not all of it


def test_a_loop_of_unknown_length_is_named_and_may_be_given():
    def grow(x):
        return lax.while_loop(lambda x: x.sum() < 1e6, lambda x: jnp.sin(x) @ x, x)

    unknown = compiled(grow, SQUARE)
    (loop,) = unknown.unknown_loops
    assert (loop.line, loop.starts) == (line_of(grow, "while_loop"), 1)
    given = compiled(grow, SQUARE, trip_counts=[7])
    assert not given.unknown_loops
    assert given.io.kernel_launches - unknown.io.kernel_launches == 7 * loop.per_trip.launches
    assert given.io.device_traffic_bytes - unknown.io.device_traffic_bytes == 7 * loop.per_trip.bytes


def test_a_loop_of_which_only_the_equations_tell_the_turns():
    def halved(x):
        return lax.while_loop(lambda s: s[0] > 0, lambda s: (s[0] // 2, jnp.sin(s[1])), (1000, x))[1]

    profile = compiled(halved, SQUARE)
    assert profile.uncounted == ()
    assert 10 <= profile.io.device_traffic_bytes / (2 * 4 * N * N) < 12  # a turn each, and a copy of the argument


# --- One sentence -------------------------------------------------------------------------------


def refusal(function=chain, *args, **options):
    with pytest.raises(ValueError, match="^") as caught:
        compiled(function, *(args or (SQUARE,)), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.skipif(os.name != "posix", reason="signals and scripts are those of POSIX")
def test_a_compiler_that_dies_costs_one_sentence(monkeypatch, tmp_path):
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\nkill -SEGV $$\n")
    dying.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(dying))
    assert refusal() == "fn: the compiler ended with signal SIGSEGV"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    assert refusal().startswith("level: 'compiled' is not available: no process starts")


def test_a_compiler_that_fails_says_why(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--no_such_flag_of_xla=true")
    said = refusal()
    assert said.startswith("fn: the compiler ")
    assert "no_such_flag_of_xla" in said or "signal" in said


def test_a_compiler_that_hangs_is_ended():
    assert refusal(compile_timeout_s=0.05) == "fn: the compiler did not finish in 0.05 s; see compile_timeout_s"


@pytest.mark.parametrize("seconds", [0, -1.0, True, "long", float("nan")])
def test_the_time_limit_is_checked(seconds):
    assert refusal(compile_timeout_s=seconds).startswith("compile_timeout_s: expected seconds above 0")


def test_what_cannot_be_handed_on_is_refused():
    def calls_back(x):
        return jax.pure_callback(lambda x: x, SQUARE, x)

    assert "host_callbacks" in refusal(calls_back)


@pytest.mark.parametrize("text", ["", "not a program", "ENTRY %main () -> f32[] {\n  ROOT %x = f32[]\n}"])
def test_another_text_is_not_available(text):
    with pytest.raises(ValueError, match="'compiled' is not available: XLA's text is not written as expected"):
        CompiledProgram(text, {})
