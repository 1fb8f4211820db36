"""Programs that were compiled for a GPU: kernels in closed form, by texts written by hand; laws of the model."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _built_in_models import times

from rlxjax.fit import Runs, predicted_ns
from rlxjax.jaxpr import GpuKernelKind, GpuProgram, gpu_program
from rlxjax.models import GPU_KERNELS, gpu_runs

N, TRIPS = 1024, 37
FUSED = f"""%fused (p: f32[{N}]) -> f32[{N}] {{
  %p = f32[{N}]{{0}} parameter(0)
  %sine = f32[{N}]{{0}} sine(%p)
  ROOT %both = f32[{N}]{{0}} multiply(%sine, %p)
}}
"""


def entry(body, *types, before=FUSED):
    """Return a program whose arguments are of these types, a vector unless told."""
    given = "".join(f"  %x{i} = {kind} parameter({i})\n" for i, kind in enumerate(types or (f"f32[{N}]{{0}}",)))
    return f"HloModule jit_f, is_scheduled=true\n\n{before}\nENTRY %main (x: f32[1]) -> f32[1] {{\n{given}{body}\n}}\n"


def chain(length):
    """Return fusions that follow each other."""
    lines = [
        f"%f{i} = f32[{N}]{{0}} fusion(%{f'f{i - 1}' if i else 'x0'}), kind=kLoop, calls=%fused" for i in range(length)
    ]
    return "\n".join(f"  {'ROOT ' if line is lines[-1] else ''}{line}" for line in lines)


def custom(target, operands, result, config="{}"):
    """Return a program of one custom call on operands of these types."""
    names = ", ".join(f"%x{i}" for i in range(len(operands)))
    call = f'  ROOT %c = {result} custom-call({names}), custom_call_target="{target}", backend_config={config}'
    return entry(call, *operands, before="")


def test_a_chain_of_fusions_is_counted_one_by_one_and_five_of_them_make_a_graph():
    for length in range(1, 8):
        found = gpu_program(entry(chain(length)))
        assert (found.arguments, found.results, found.launches) == (1, 1, length)
        assert (found.graphs, found.grouped) == ((1, length) if length >= 5 else (0, 0))
        for kernel in found.kernels:
            assert (kernel.kind, kernel.read_bytes, kernel.written_bytes) == (GpuKernelKind.ELEMENTWISE, 4 * N, 4 * N)
            assert kernel.operations == 2 * N


def loop(known, trips=None):
    body = f"""%turn (t: (s64[], f32[{N}])) -> (s64[], f32[{N}]) {{
  %t = (s64[], f32[{N}]{{0}}) parameter(0)
  %i = s64[] get-tuple-element(%t), index=0
  %y = f32[{N}]{{0}} get-tuple-element(%t), index=1
  %next = f32[{N}]{{0}} fusion(%y), kind=kLoop, calls=%fused
  ROOT %both.1 = (s64[], f32[{N}]{{0}}) tuple(%i, %next)
}}

%test (t.1: (s64[], f32[{N}])) -> pred[] {{
  %t.1 = (s64[], f32[{N}]{{0}}) parameter(0)
  %j = s64[] get-tuple-element(%t.1), index=0
  ROOT %is_more = pred[] compare(%j, %j), direction=LT
}}
"""
    config = f', backend_config={{"known_trip_count":{{"n":"{TRIPS}"}}}}' if known else ""
    lines = f"""  %zero = s64[] constant(0)
  %start = (s64[], f32[{N}]{{0}}) tuple(%zero, %x0)
  %w = (s64[], f32[{N}]{{0}}) while(%start), condition=%test, body=%turn{config}
  ROOT %last = f32[{N}]{{0}} get-tuple-element(%w), index=1"""
    return gpu_program(entry(lines, before=FUSED + "\n" + body), trips)


def test_a_loop_counts_its_body_as_often_as_it_turns_and_only_an_unknown_one_asks_the_host():
    known, unknown = loop(True), loop(False)
    assert (known.launches, known.readbacks, known.unknown_loops) == (TRIPS, 0, 0)
    # One turn, its test and the one that ends it.
    assert (unknown.launches, unknown.readbacks, unknown.unknown_loops) == (1 + 2, 2, 1)
    told = loop(False, {"unknown line": 5})
    assert (told.launches, told.readbacks, told.unknown_loops) == (5 + 6, 6, 0)


def test_a_product_of_a_library_has_its_flop_its_tiles_and_no_scratch_bytes():
    m, k, n = 300, 50, 200
    config = (
        '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_batch_dimensions":[],"lhs_contracting_dimensions":["1"]},'
        '"precision_config":{"operand_precision":["%s"]}}}'
    )
    for precision, is_exact in (("DEFAULT", False), ("HIGHEST", True)):
        operands = (f"f32[{m},{k}]{{1,0}}", f"f32[{k},{n}]{{1,0}}")
        text = custom("__cublas$lt$matmul", operands, f"(f32[{m},{n}]{{1,0}}, s8[4096]{{0}})", config % precision)
        (kernel,) = gpu_program(text).kernels
        assert (kernel.kind, kernel.is_library, kernel.product.is_exact) == (GpuKernelKind.PRODUCT, True, is_exact)
        assert (kernel.product.flop, kernel.product.tiles) == (2 * m * k * n, math.ceil(m / 128) * math.ceil(n / 128))
        assert kernel.bytes == 4 * (m * k + k * n + m * n)


def test_a_product_that_a_fusion_holds_counts_its_batches():
    batch, m, k, n = 6, 40, 16, 24
    left, right, result = (f"f32[{batch},{rows},{columns}]{{2,1,0}}" for rows, columns in ((m, k), (k, n), (m, n)))
    axes = "lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}"
    given = f"  %a = {left} parameter(0)\n  %b = {right} parameter(1)\n"
    gemm = f"%gemm (a: f32[1], b: f32[1]) -> f32[1] {{\n{given}  ROOT %dot = {result} dot(%a, %b), {axes}\n}}\n"
    fusion = f"  ROOT %g = {result} fusion(%x0, %x1), kind=kCustom, calls=%gemm"
    (kernel,) = gpu_program(entry(fusion, left, right, before=gemm)).kernels
    assert (kernel.product.flop, kernel.product.tiles, kernel.is_library) == (2 * batch * m * k * n, batch, False)


def test_solvers_sorts_and_transforms_of_libraries_are_known_by_their_names():
    n, rows = 96, 5
    square = f"f32[{n},{n}]{{0,1}}"
    for target, kind in (
        ("cusolver_potrf_ffi", GpuKernelKind.CHOLESKY),
        ("cusolver_getrf_ffi", GpuKernelKind.LU),
        ("cusolver_geqrf_ffi", GpuKernelKind.QR),
        ("cusolver_syevd_ffi", GpuKernelKind.EIGEN),
    ):
        (kernel,) = gpu_program(custom(target, (square,), f"({square}, s32[])")).kernels
        assert (kernel.kind, kernel.columns) == (kind, n)
    sorted_ = f"(u32[{rows},{n}]{{1,0}}, f32[{rows},{n}]{{1,0}}, u8[77]{{0}})"
    operands = f"u32[{rows},{n}]{{1,0}}", f"f32[{rows},{n}]{{1,0}}"
    (kernel,) = gpu_program(custom("xla.gpu.ext.cub_sort_pairs", operands, sorted_)).kernels
    assert (kernel.kind, kernel.passes, kernel.row_elements) == (GpuKernelKind.RADIX_SORT, 5, n)
    for length, kind, passes, launches in (
        (64, "RFFT", 1, 1),
        (2**16, "FFT", 2, 1),
        (2**16, "RFFT", 3, 1),
        (64, "IRFFT", 1, 2),
    ):
        body = f"  ROOT %t = c64[{N}]{{0}} fft(%x0), fft_type={kind}, fft_length={{{length}}}"
        found = gpu_program(entry(body))
        assert (found.of(GpuKernelKind.FFT)[0].passes, found.launches) == (passes, launches)


def test_a_text_that_is_none_is_refused_in_one_sentence():
    for text in ("", "ENTRY %main (x: f32[8]) -> f32[8] {\n  ROOT %f = f32[8]{0} fusion(%y), calls=%none\n}"):
        with pytest.raises(ValueError, match="^compiled program: XLA's text is not written as expected"):
            gpu_program(text)


def times_ns(inputs, facts=GPU_KERNELS.facts):
    """Return what runs take by the prior's medians, whose inputs are those of an empty call but for the given ones."""
    runs = gpu_runs([GpuProgram(1, 1, ())])
    rows = max(map(np.size, inputs.values()), default=1)
    columns = {name: np.broadcast_to(inputs.get(name, value), rows) for name, value in runs.inputs.items()}
    return np.asarray(times(GPU_KERNELS.prior.median, Runs(runs.model, np.zeros(rows, int), columns), dict(facts)))


def test_work_that_outlasts_launching_takes_what_shares_of_the_data_sheet_say():
    median, facts = GPU_KERNELS.prior.median, dict(GPU_KERNELS.facts)
    size = np.array([1e15])
    moved = {"moved_bytes": size, "kernel_bytes": size}
    faster = facts | {"memory_bytes_per_ns": 2 * facts["memory_bytes_per_ns"]}
    np.testing.assert_allclose(times_ns(moved, faster), times_ns(moved) / 2, rtol=1e-5)
    of_memory = size / (median.memory_share * facts["memory_bytes_per_ns"])
    np.testing.assert_allclose(times_ns(moved), of_memory, rtol=1e-5)
    for name in ("half", "float32", "exact", "float64"):
        of_product = size * 1e3 / (median.product_share * facts[f"{name}_flop_per_ns"])
        np.testing.assert_allclose(times_ns({f"{name}_flop": size * 1e3}), of_product, rtol=1e-5)
    # Of one tile, one core's rate.
    one_tile = {"float32_flop": size, "float32_tile_flop": size}
    alone = size * (1 + facts["cores"]) / (median.product_share * facts["float32_flop_per_ns"])
    np.testing.assert_allclose(times_ns(one_tile), alone, rtol=1e-3)


def test_launching_hides_short_kernels_and_more_of_anything_takes_longer():
    median = GPU_KERNELS.prior.median
    one, few = times_ns({}), times_ns({"kernels": np.array([1.0])})
    assert 0 < float(few[0] - one[0]) < 0.01 * median.kernel_ns
    for name in GPU_KERNELS.inputs:
        step = 1e10 if "bytes" in name or "flop" in name or name in ("operations", "sort_steps") else 10.0
        beside = {"moved_bytes": 1e9} if name == "kernel_bytes" else {}
        assert np.all(np.diff(times_ns(beside | {name: step * np.arange(1.0, 6.0)})) > 0), name


def test_predictions_are_smooth_from_a_cache_to_memory():
    runs = gpu_runs([GpuProgram(1, 1, ())])
    empty = {name: jnp.asarray(value[0]) for name, value in runs.inputs.items()}

    def log_ns(log_size):
        inputs = empty | dict.fromkeys(("moved_bytes", "kernel_bytes"), jnp.exp(log_size))
        columns = Runs(runs.model, runs.variant[0], inputs)
        return jnp.log(predicted_ns(GPU_KERNELS.prior.median, columns, dict(GPU_KERNELS.facts)))

    value, slopes = jax.jit(jax.vmap(jax.value_and_grad(log_ns)))(jnp.log(jnp.geomspace(1e6, 1e9, 4001)))
    assert np.all(np.asarray(slopes) > 0)
    assert np.max(np.abs(np.diff(slopes))) < 0.02
    size = np.array([1e6])
    np.testing.assert_allclose(np.exp(value[:1]), times_ns({"moved_bytes": size, "kernel_bytes": size}), rtol=1e-9)
