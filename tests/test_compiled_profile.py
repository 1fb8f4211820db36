"""What XLA made of a function: the laws its counts obey, what the profile says of it, and what is refused."""

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import rlxjax as rx
from rlxjax.jaxpr._xla import CompiledProgram  # what it refuses, no program of this compiler has

N = 64
SQUARE = jax.ShapeDtypeStruct((N, N), jnp.float32)


def compiled(function, *args, **options):
    return rx.profile_function(function, *args, level="compiled", **options)


def line_of(function, fragment):
    lines, first = inspect.getsourcelines(function)
    return f"{Path(__file__).name}:{first + next(i for i, line in enumerate(lines) if fragment in line)}"


def chain(x):
    return jnp.tanh(x * 2 + 1) - x


def grow(x):
    return lax.while_loop(lambda x: x.sum() < 1e6, lambda x: jnp.sin(x) @ x, x)


def several_parts(closed_over):
    """Return a function of many kinds of instructions, one of whose arguments it may reuse and one it ignores."""

    def parts(x, unused, tree):
        y, stack = lax.scan(lambda c, _: (jnp.sin(c) @ closed_over, c.sum()), chain(x), length=7)
        y = lax.cond(stack[0] > 0, lambda y: jnp.fft.fft(y).real, lambda y: y * 2, y)
        # Only the equations tell how often this loop turns: ten times.
        halved = lax.while_loop(lambda s: s[0] > 0, lambda s: (s[0] // 2, jnp.sin(s[1])), (1000, x))[1]
        return {
            "moved": x + tree["more"],
            "best": lax.top_k(y, 3),
            "noise": jax.random.normal(tree["key"], (N,)),
            "halved": halved,
        }, stack

    return jax.jit(parts, donate_argnums=0)


def test_a_program_of_many_parts():
    function = several_parts(jnp.arange(N * N, dtype=jnp.float32).reshape(N, N))
    args = (SQUARE, SQUARE, {"more": SQUARE, "key": jax.eval_shape(lambda: jax.random.key(0))})
    profile, written = compiled(function, *args), rx.profile_function(function, *args)
    memory = function.lower(*args).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 4 * N * N  # the donated argument
    used_bytes = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    assert profile.peak_bytes == used_bytes - memory.alias_size_in_bytes
    # Operations stay those of the jaxpr.
    for name in ("flops", "transcendentals", "integer_ops", "coverage_equations", "uncosted"):
        assert getattr(profile, name) == getattr(written, name)
    assert (written.level, written.disagreements, profile.level) == ("jaxpr", (), "compiled")
    assert profile.io.host_output_bytes == written.io.host_output_bytes
    assert profile.fused_traffic_bytes == profile.io.device_traffic_bytes
    assert profile.uncounted == ()
    # Rows sum to the totals.
    for rows in (profile.by_family, profile.by_line):
        sums = [sum(column) for column in zip(*rows.values(), strict=True)]
        assert sums[:3] == [profile.flops, profile.transcendentals, profile.integer_ops]
        assert sums[3:] == [profile.io.device_traffic_bytes, profile.io.kernel_launches]
    assert {"fft", "loop fusion", "custom-call TopK"} <= set(profile.by_family)
    assert profile.by_family["fft"].flops > 0
    assert profile.by_line[line_of(several_parts, "top_k")].launches >= 1
    assert 10 <= profile.by_line[line_of(several_parts, "while_loop")].launches < 40
    # A conditional counts as its dearest branch.
    (branch,) = profile.branches
    assert branch.line == line_of(several_parts, "lax.cond")
    assert branch.least.bytes == 2 * 4 * N * N
    assert branch.most.launches == 3  # to complex, fft, to real
    assert branch.most.bytes == (1 + 2 + 2 + 2 + 2 + 1) * 4 * N * N
    assert profile.by_family["fft"].launches == 1
    # Disagreements say what the figures of XLA leave out.
    named = {each.name: each for each in profile.disagreements}
    for name, xla_of_one_turn in (("flops", 2 * N**3), ("transcendentals", 2 * N * N)):
        found = named[name]
        assert (found.jaxpr, found.compiled) == (getattr(profile, name), None)
        assert xla_of_one_turn <= found.xla < found.jaxpr
        assert "body of a loop once" in found.reason
        assert "TopK" in found.reason
    assert named["traffic bytes"].compiled == profile.io.device_traffic_bytes > named["traffic bytes"].xla
    assert named["launches"][1:4] == (written.io.kernel_launches, profile.io.kernel_launches, None)
    assert all(f"{name}: jaxpr " in str(profile) for name in named)
    assert "launches and bytes come from the compiled program" in str(profile)


def test_a_scan_is_linear_in_its_length():
    def stacked(xs):
        return lax.scan(lambda c, x: (c @ x, jnp.sin(c)), xs[0], xs)

    short, long = (compiled(stacked, jax.ShapeDtypeStruct((n, N, N), jnp.float32)).io for n in (20, 60))
    turn = (long.device_traffic_bytes - short.device_traffic_bytes) / 40
    assert 0 < turn < 20 * 4 * N * N  # a turn reads and writes a slice of each stack, not all of it
    assert short.device_traffic_bytes - 20 * turn < 3 * 20 * 4 * N * N  # beside the turns at most the stacks
    launches = (long.kernel_launches - short.kernel_launches) / 40
    assert launches == int(launches) > 0


def test_a_loop_of_unknown_length_is_named_and_may_be_given():
    unknown, given = compiled(grow, SQUARE), compiled(grow, SQUARE, trip_counts=[7])
    (loop,) = unknown.unknown_loops
    assert (loop.line, loop.starts, given.unknown_loops) == (line_of(grow, "while_loop"), 1, ())
    assert given.io.kernel_launches - unknown.io.kernel_launches == 7 * loop.per_trip.launches
    assert given.io.device_traffic_bytes - unknown.io.device_traffic_bytes == 7 * loop.per_trip.bytes


def test_lines_are_those_of_the_file_whatever_a_cache_holds():
    for line in (1, 4):
        moved = {"lax": lax}
        text = "def run(x): return lax.while_loop(lambda x: x.sum() < 1e6, lambda x: x @ x, x)"
        exec(compile("\n" * (line - 1) + text, "moved.py", "exec"), moved)
        profile = compiled(moved["run"], SQUARE)
        assert profile.unknown_loops[0].line == f"moved.py:{line}"
        assert compiled(moved["run"], SQUARE, trip_counts=[7]).unknown_loops == ()


FUSION = """HloModule fused
%fused (p0: bf16[100,8], p1: s32[], p2: f32[1,8]) -> f32[1,8] {{
  %p0 = bf16[100,8]{{1,0}} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %p2 = f32[1,8]{{1,0}} parameter(2)
  %wide = f32[100,8]{{1,0}} convert(%p0)
  {inside}
}}
ENTRY %main (a: bf16[100,8], i: s32[], b: f32[1,8]) -> f32[1,8] {{
  %a = bf16[100,8]{{1,0}} parameter(0)
  %i = s32[] parameter(1)
  %b = f32[1,8]{{1,0}} parameter(2)
  ROOT %f = {type} fusion(%a, %i, %b), kind=kLoop, calls=%fused
}}
"""
ROW, ROWS, CHANGED = "f32[1,8]{1,0}", "f32[100,8]{1,0}", "dynamic-update-slice(%wide, %p2, %p1, %zero)"


def test_a_fusion_moves_what_it_looks_at():
    part = f"%part = {ROW} dynamic-slice(%wide, %p1, %zero), dynamic_slice_sizes={{1,8}}"
    for inside, type_, moved in [
        # Of the 16-bit stack a row, the place, the other operand, the result.
        (f"{part}\n  ROOT %sum = {ROW} add(%part, %p2)", ROW, 8 * 2 + 4 + 8 * 4 + 8 * 4),
        (f"ROOT %new = {ROWS} {CHANGED}", ROWS, 4 + 8 * 4 + 8 * 4),
        # Not in place: the CPU's XLA writes all of it in each turn.
        (
            f"%new = {ROWS} {CHANGED}\n  ROOT %back = bf16[100,8]{{1,0}} convert(%new)",
            "bf16[100,8]{1,0}",
            1600 + 4 + 32 + 1600,
        ),
    ]:
        assert CompiledProgram(FUSION.format(inside=inside, type=type_), {}).totals.sums().bytes == moved


def test_what_cannot_be_compiled_or_read_is_refused():
    failing = jax.jit(chain, compiler_options={"no_such_option_of_xla": True})
    with pytest.raises(ValueError, match="^fn: the compiler failed with .*no_such_option_of_xla") as caught:
        compiled(failing, SQUARE)
    assert "\n" not in str(caught.value)
    for text in ("", "not a program", "ENTRY %main () -> f32[] {\n  ROOT %x = f32[]\n}"):
        with pytest.raises(ValueError, match="^compiled program: XLA's text is not written as expected"):
            CompiledProgram(text, {})
