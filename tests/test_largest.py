"""Sizes that fit a device that is not there: laws of the search, of what it says takes the memory, and of refusals."""

import inspect
import json

import jax
import jax.numpy as jnp
import pytest
from _documented import assert_documented, assert_narrow
from _shapes import real
from typer.testing import CliRunner

from calibrate.cli import app
from rlxjax.devices import CompiledFor
from rlxjax.jaxpr import buffers_of
from rlxjax.targets import DoesNotFitError, check_compiler, largest, target_device
from rlxjax.units import bytes_text

TPU = target_device("tpu-v5e")
HAS = TPU.memory_bytes
#: A loop whose body makes an array of its own and updates another one in place.
TEXT = """HloModule step
%set (a: f32[4,64], b: f32[1,64]) -> f32[4,64] {{
  %a = f32[4,64]{{1,0}} parameter(0)
  %b = f32[1,64]{{1,0}} parameter(1)
  %z = s32[] constant(0)
  ROOT %new = f32[4,64]{{1,0}} dynamic-update-slice(%a, %b, %z, %z)
}}
%body (t: (f32[4,64], f32[1,64])) -> (f32[4,64], f32[1,64]) {{
  %t = (f32[4,64]{{1,0}}, f32[1,64]{{1,0}}) parameter(0)
  %all = f32[4,64]{{1,0}} get-tuple-element(%t), index=0
  %row = f32[1,64]{{1,0}} get-tuple-element(%t), index=1
  %made = f32[1,64]{{1,0}} tanh(%row)
  %kept = f32[8,64]{{1,0:T(8,128)S(1)}} broadcast(%made)
  %put = f32[4,64]{{1,0}} fusion(%all, %made), kind=kLoop, calls=%set
  ROOT %out = (f32[4,64]{{1,0}}, f32[1,64]{{1,0}}) tuple(%put, %made)
}}
%test (t: (f32[4,64], f32[1,64])) -> pred[] {{
  %t = (f32[4,64]{{1,0}}, f32[1,64]{{1,0}}) parameter(0)
  ROOT %yes = pred[] constant(true)
}}
ENTRY %main (w: f32[1,64], x: bf16[{size},2]) -> f32[4,64] {{
  %w = f32[1,64]{{1,0}} parameter(0)
  %x = bf16[{size},2]{{1,0}} parameter(1)
  %empty = f32[4,64]{{1,0}} broadcast(%w)
  %start = (f32[4,64]{{1,0}}, f32[1,64]{{1,0}}) tuple(%empty, %w)
  %loop = (f32[4,64]{{1,0}}, f32[1,64]{{1,0}}) while(%start), condition=%test, body=%body
  ROOT %found = f32[4,64]{{1,0}} get-tuple-element(%loop), index=0
}}
"""


def step(weights, x):
    return {"w": weights["w"] + x.sum().astype(jnp.float32)}, x.sum()


def sized(size):
    return step, ({"w": real(1, 64)}, jax.ShapeDtypeStruct((size, 2), jnp.bfloat16))


def rematerialised(size, checkpoint=lambda layer: layer):
    layer = checkpoint(step)
    return jax.jit(layer) if layer is step else jax.jit(lambda weights, x: layer(weights, x)), sized(size)[1]


@pytest.fixture
def compiler(monkeypatch):
    """Return a setter of the bytes that a size needs, as a compiler says them; and the sizes that were compiled."""
    asked = []

    def set_to(needs, is_refused=False, has=HAS):
        def compile_for(fn, *args, target, mesh=None):
            size = args[1].shape[0]
            asked.append(size)
            needed = needs(size)
            if is_refused and needed > has:
                raise DoesNotFitError("does not fit", needed, has)
            state, aliased = 256, 256 * any(one.donated for one in jax.tree.leaves(fn.trace(*args).args_info))
            sizes = {"argument_bytes": state + 4 * size, "output_bytes": state + 2, "alias_bytes": aliased}
            rest = needed - sizes["argument_bytes"] - sizes["output_bytes"]
            about = {"devices": 1, "mesh": mesh or {}, "coordinates": (), "costs": {}, "compiler": "", "seconds": 0.0}
            return CompiledFor(
                target, text=TEXT.format(size=size), temporary_bytes=rest, peak_bytes=needed - aliased, **sizes, **about
            )

        monkeypatch.setattr("rlxjax.targets._largest.compile_for", compile_for)
        return asked

    return set_to


GIVES = {
    "a line": lambda best: lambda size: 10**9 + int((HAS - 10**9) * size / (best + 0.5)),
    "nothing but the size": lambda best: lambda size: 1000 + int((HAS - 1000) * size / (best + 0.5)),
    "a square": lambda best: lambda size: 10**9 + int((HAS - 10**9) * (size / (best + 0.5)) ** 2),
}


@pytest.mark.parametrize("shape", GIVES)
@pytest.mark.parametrize("is_refused", [True, False])
def test_the_largest_size_is_found_in_six_compilations_and_the_next_one_does_not_fit(compiler, shape, is_refused):
    for best in (1, 2, 17, 37, 1000, 54321):
        asked = compiler(GIVES[shape](best), is_refused)
        asked.clear()
        found = largest(sized, TPU)
        assert (found.size, found.too_large) == (best, best + 1)
        assert len(found.compiled) <= 6
        assert list(found.compiled) == asked[: len(found.compiled)]
        assert len(asked) <= len(found.compiled) + 1  # and with the state donated
        assert found.made.peak_bytes == found.compiled[best] <= HAS < found.compiled[best + 1]
        # Multiples of eight.
        asked.clear()
        found = largest(sized, TPU, multiple=8, least=1) if best >= 8 else None
        assert found is None or found.size == best // 8 * 8


def test_memory_in_steps_or_less_than_expected_gives_a_size_that_fits_and_what_is_known_of_the_next(compiler):
    for needs in (
        lambda size: 10**9 + -(-size // 8) * 3 * 10**9,
        lambda size: 10**9 + size * 10**8 if size < 150 else 159 * 10**8 + (size - 149) * 10**7,
    ):
        compiler(needs)
        found = largest(sized, TPU)
        assert needs(found.size) <= HAS
        assert found.too_large is None or found.size < found.too_large
        assert found.too_large == found.size + 1 or "not compiled" in " ".join(found.notes)

    def fails(size):
        if size > 1000:
            raise ValueError("the compiler failed")
        return 10**9

    compiler(fails)
    found = largest(sized, TPU)
    assert found.size <= 1000 < found.too_large
    assert f"{found.too_large:,} counts as too large: the compiler failed" in str(found)
    compiler(lambda size: 10**9)
    found = largest(sized, TPU, most=1000)
    assert (found.size, found.too_large) == (1000, None)
    assert "every compiled size fits" in str(found)
    assert largest(sized, TPU, mesh={"data": 4, "model": 2}, most=1001).size == 1000  # a multiple of the devices


def test_the_parts_of_the_peak_add_up_and_arrays_are_named_by_argument_and_line(compiler):
    asked = compiler(lambda size: 10**9 + 10**8 * size)
    found = largest(rematerialised, TPU)
    assert sum(found.parts.values()) == found.made.peak_bytes
    assert found.parts["state"] == 4 * 64  # what comes back with its shape
    assert found.state == ("weights",)
    assert found.donated_bytes == found.made.peak_bytes - found.parts["state"]
    assert found.checkpoint_bytes == found.made.peak_bytes
    assert len(asked) == len(found.compiled) + 2
    sources = {one.source: one.bytes for one in found.buffers}
    assert (sources["weights['w']"], sources["x"]) == (256, 4 * found.size)
    text = str(found)
    assert_narrow("\n".join(text.splitlines()[2:]))
    assert "with weights donated: " in text
    assert "with checkpoint: " in text
    assert_documented("profile --largest", json.loads(json.dumps(found.as_dict())))
    # A function that donates is not compared with itself; one without the parameter is told of it.
    found = largest(lambda size: (jax.jit(step, donate_argnums=0), sized(size)[1]), TPU)
    assert (found.donated_bytes, found.checkpoint_bytes) == (None, None)
    assert found.notes == (
        "no figure for donated state: the function donates arguments itself",
        "for the peak with jax.checkpoint, give fn_of_size a parameter checkpoint and apply it to a layer",
    )


def test_arrays_of_a_program_are_those_of_its_main_memory_and_updates_in_place_are_none():
    found = buffers_of(TEXT.format(size=3), ["w", "x"])
    assert [(one.bytes, one.times, one.dtype, one.shape) for one in found] == [
        (1024, 1, "f32", (4, 64)),
        *[(256, 1, "f32", (1, 64))] * 2,
        (12, 1, "bf16", (3, 2)),
    ]
    assert {one.source for one in found} >= {"w", "x"}
    with pytest.raises(ValueError, match="not written as expected"):
        buffers_of("HloModule")


def test_bad_sizes_are_refused_in_one_line(compiler):
    compiler(lambda size: HAS + size, is_refused=True)
    for said, ask in {
        f"the smallest size, 1, needs {bytes_text(HAS)} of {bytes_text(HAS)}: does not fit": lambda: largest(
            sized, TPU
        ),
        "the smallest size, 64, needs": lambda: largest(sized, TPU, least=60, multiple=8),
        "least: expected an integer of at least 1, got 0": lambda: largest(sized, TPU, least=0),
        "most: expected at least 8, the smallest size, got 4": lambda: largest(sized, TPU, most=4, multiple=8),
        "multiple: expected an integer": lambda: largest(sized, TPU, multiple=1.5),
        "fn_of_size: expected a function and a tuple": lambda: largest(lambda size: step, TPU),
        "the nearest: ": lambda: largest(sized, "tpu-v5"),
    }.items():
        with pytest.raises(ValueError, match=said) as caught:
            ask()
        assert "\n" not in str(caught.value)


def test_the_command_finds_the_size_that_has_a_name(compiler, tmp_path, monkeypatch):
    source = f"import jax\nimport jax.numpy as jnp\n\n{inspect.getsource(step)}\n"
    given = (
        'def given(size):\n    return {"w": jax.ShapeDtypeStruct((1, 64), "f4")}, jax.ShapeDtypeStruct((size, 2), "i4")'
    )
    (tmp_path / "sized_step.py").write_text(source + given)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    compiler(GIVES["a line"](37))
    asked = ["profile", "sized_step:step", "--args", "sized_step:given", "--target", "tpu-v5e", "--largest", "batch"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("the largest size is 37 on tpu-v5e: needs 16")
    result = CliRunner().invoke(app, [*asked, "--json"])
    assert_documented("profile --largest", json.loads(result.stdout))
    flat = ["profile", "math:sin", "--arg", "f32[batch,4]", "--target", "tpu-v5e"]
    for wrong in (
        [*flat, "--largest", "rows"],
        [*flat[:4], "--largest", "batch"],
        [*flat, "--largest", "batch", "--devices", "8"],
        [*flat, "--mesh", "data:4"],
        ["profile", "math:sin", "--arg", "f32[4]", "--mesh", "data=4"],
    ):
        result = CliRunner().invoke(app, wrong)
        assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1), result.output


@pytest.mark.parametrize("target", ["tpu-v5e", "h100"])
def test_a_compiler_s_memory_decides(target, monkeypatch, tmp_path):
    try:
        check_compiler(target_device(target).platform)
    except ValueError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("RLXJAX_HOME", str(tmp_path))

    def doubled(rows):
        return lambda x: x * 2, (jax.ShapeDtypeStruct((rows, 2**21), jnp.float32),)

    found = largest(doubled, target)
    memory_bytes = found.memory_bytes
    assert found.size == memory_bytes // (2 * 4 * 2**21) or target == "tpu-v5e"  # TPUs pad rows
    assert 0.9 * memory_bytes < found.made.peak_bytes <= memory_bytes
    assert (found.parts["temporaries"], found.state) == (0, ("x",))
    assert found.donated_bytes == pytest.approx(found.made.peak_bytes / 2, rel=0.01)
    assert found.buffers[0].bytes == 4 * 2**21 * found.size
