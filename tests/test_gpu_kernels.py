"""Programs that were compiled for a GPU: kernels in closed form, by texts written by hand; laws of the model."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _built_in_models import times

from rlxjax.fit import Runs, predicted_ns
from rlxjax.jaxpr import OPERATIONS, OperationCounts, compiled_kernels, gpu_program, profile_function, register_rule
from rlxjax.jaxpr._primitives import RULES
from rlxjax.models import GPU_KERNELS, gpu_facts, gpu_inputs, gpu_parts_ns, gpu_runs
from rlxjax.targets import target_device

N, TRIPS = 1024, 37
COLUMNS = (*GPU_KERNELS.inputs, *GPU_KERNELS.kernels)
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


def computed(program):
    """Return what the first kernels compute."""
    return program.kernels.operations(0)


def test_a_chain_of_fusions_is_counted_one_by_one_and_five_of_them_make_a_graph():
    for length in range(1, 8):
        found = gpu_program(entry(chain(length)))
        assert (found.arguments, found.results, found.launches) == (1, 1, length)
        assert (found.graphs, found.grouped) == ((1, length) if length >= 5 else (0, 0))
        table = found.kernels
        assert table.family_names() == ["elementwise"]  # equal kernels are one row
        assert (table.read_bytes[0], table.written_bytes[0]) == (4 * N * length, 4 * N * length)
        assert table.operations(0) == {"sin": N * length, "mul": N * length}


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
    assert (int(known.kernels.looped.sum()), int(told.kernels.looped.sum())) == (TRIPS, 5 + 6)


def test_a_product_of_a_library_has_its_flop_its_tiles_and_no_scratch_bytes():
    m, k, n = 300, 50, 200
    config = (
        '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_batch_dimensions":[],"lhs_contracting_dimensions":["1"]},'
        '"precision_config":{"operand_precision":["%s"]}}}'
    )
    for precision, is_exact in (("DEFAULT", False), ("HIGHEST", True)):
        operands = (f"f32[{m},{k}]{{1,0}}", f"f32[{k},{n}]{{1,0}}")
        text = custom("__cublas$lt$matmul", operands, f"(f32[{m},{n}]{{1,0}}, s8[4096]{{0}})", config % precision)
        found = gpu_program(text)
        flop = 2 * m * k * n
        expected = {"dot_general": flop, "products": 1, "product_loads": (m + n) * k, "product_results": m * n}
        assert (found.kernels.family_names(), computed(found), found.calls) == (["matmul"], expected, 1)
        assert (found.kernels.read_bytes[0], found.kernels.written_bytes[0]) == (4 * (m * k + k * n), 4 * m * n)
        assert found.kernels.is_exact.tolist() == [is_exact]
        assert gpu_inputs(found)["exact_flop" if is_exact else "float32_flop"].tolist() == [flop]


def test_a_product_that_a_fusion_holds_counts_its_batches():
    batch, m, k, n = 6, 40, 16, 24
    left, right, result = (f"f32[{batch},{rows},{columns}]{{2,1,0}}" for rows, columns in ((m, k), (k, n), (m, n)))
    axes = "lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}"
    given = f"  %a = {left} parameter(0)\n  %b = {right} parameter(1)\n"
    gemm = f"%gemm (a: f32[1], b: f32[1]) -> f32[1] {{\n{given}  ROOT %dot = {result} dot(%a, %b), {axes}\n}}\n"
    fusion = f"  ROOT %g = {result} fusion(%x0, %x1), kind=kCustom, calls=%gemm"
    found = gpu_program(entry(fusion, left, right, before=gemm))
    packed = {"product_loads": batch * (m + n) * k, "product_results": batch * m * n}
    assert computed(found) == {"dot_general": 2 * batch * m * k * n, "products": batch, **packed}
    assert (found.kernels.pieces.tolist(), found.calls) == ([batch], 0)


def test_products_of_8_bits_have_a_rate_of_their_own_and_tiles_by_their_results():
    n, axes = 512, "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    config = '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    kinds = {"s8": "s32", "f8e4m3fn": "bf16", "f8e5m2": "f32", "s4": "s32", "bf16": "f32", "f16": "f16", "f32": "f32"}
    for kind, result in kinds.items():
        operands = (f"{kind}[{n},{n}]{{1,0}}",) * 2
        dot = entry(f"  ROOT %d = {result}[{n},{n}]{{1,0}} dot(%x0, %x1), {axes}", *operands, before="")
        library = custom("__cublas$lt$matmul$f8", operands, f"({result}[{n},{n}]{{1,0}}, s8[99]{{0}})", config)
        name = {"s": "byte", "f8": "byte", "bf": "half", "f1": "half", "f3": "float32"}[kind[: 1 + (kind[0] != "s")]]
        for text in (dot, library):
            found = gpu_inputs(gpu_program(text))
            assert (found[f"{name}_flop"].tolist(), found["tiles"].tolist()) == ([2 * n**3], [1 + n * n / 128**2])
    rates = {name: gpu_facts(target_device(name))["byte_flop_per_ns"] for name in ("h100", "l4", "a100")}
    assert rates == {"h100": 1_979_000, "l4": 242_500, "a100": 624_000}
    device = target_device("a100")
    matrix = {name: rate for name, rate in device.matrix_flop_per_ns.items() if name != "s8"}
    older = gpu_facts(device.model_copy(update={"matrix_flop_per_ns": matrix}))
    assert older["byte_flop_per_ns"] == older["half_flop_per_ns"]


def sorting(types, numbered, keys=1, axis=0, nan=False, read=(0,)):
    """Return the program of a sort of these types, by so many keys, as XLA writes it without the card."""
    kinds = [*types, *(re.sub("^[a-z0-9]+", "s32", types[0]),) * numbered]
    given = "".join(f"  %p{i} = {kind} parameter({i})\n" for i, kind in enumerate(types))
    given += f"  %p{len(types)} = {kinds[-1]} iota(), iota_dimension={axis}\n" if numbered else ""
    operands = ", ".join(f"%p{i}" for i in range(len(kinds)))
    of = [re.sub(r"\[.*", "[]", kind) for kind in kinds for _ in (0, 1)]
    by = (
        "".join(f"  %a{i} = {kind} parameter({i})\n" for i, kind in enumerate(of))
        + "  %n = f32[] constant(nan)\n" * nan
    )
    by += "".join(f"  %c{i} = pred[] compare(%a{2 * i}, %a{2 * i + 1}), direction=LT\n" for i in range(keys))
    by = f"%by (a: f32[]) -> pred[] {{\n{by}  ROOT %r = pred[] and(%c0, %c{keys - 1})\n}}\n"
    result = f"({', '.join(kinds)})" if len(kinds) > 1 else kinds[0]
    root = f"  ROOT %s = {result} sort({operands}), dimensions={{{axis}}}, to_apply=%by\n"
    inside = f"{by}\n%sorting (p0: f32[1]) -> f32[1] {{\n{given}{root}}}\n"
    names = ", ".join(f"%x{i}" for i in range(len(types)))
    body = f"  %f = {result} fusion({names}), kind=kCustom, calls=%sorting\n"
    body += "".join(f"  %g{i} = {kinds[i]} get-tuple-element(%f), index={i}\n" for i in read)
    return gpu_program(entry(body + f"  ROOT %o = ({types[0]}) tuple(%g{read[0]})", *types, before=inside))


def test_a_library_sorts_by_digits_what_it_would_if_the_card_were_there():
    n = 2**20
    for types, given, key_bytes, both in (
        (["f32"], {"numbered": True, "nan": True}, 4, 8),  # keys are made of floats, NaNs last, which are values then
        (["f32"], {"numbered": True, "nan": True, "read": (0, 1)}, 4, 12),  # places of an argsort are packed with keys
        (["bf16"], {"numbered": True, "nan": True}, 2, 4),
        (["s32", "f32"], {"numbered": True, "read": (0, 1)}, 4, 8),
        (["s64"], {"numbered": True}, 8, 8),
    ):
        found = gpu_inputs(sorting([f"{kind}[{n}]{{0}}" for kind in types], **given))
        launches = 2 * key_bytes + 2
        assert (found["sort_stages"], found["kernels"]) == (0, 1 + launches), types
        # A library asks for the card's properties before each launch. Once over all for each byte, and once to count.
        assert found["commands"] == 1 + 2 * launches
        np.testing.assert_allclose(found["moved_bytes"][-1], 2 * n * both * (key_bytes + 1), rtol=1e-5)
    for types, given in (
        (["f32"] * 2, {"numbered": True, "nan": True}),  # floats in the order of floats
        (["s32"] * 2, {"numbered": True, "keys": 2}),
        (["f32"] * 3, {"numbered": True}),
        (["c64"], {"numbered": True}),
    ):
        assert gpu_inputs(sorting([f"{kind}[{n}]{{0}}" for kind in types], **given))["sort_stages"] > 0, types
    for shape, axis, is_library in (
        ((16384,), 0, False),
        ((32768,), 0, True),
        ((100, 16384), 1, True),
        ((65536, 256), 1, False),
        ((n, 4), 0, False),
    ):
        layout = ",".join(map(str, range(len(shape))[::-1]))
        kind = f"f32[{','.join(map(str, shape))}]{{{layout}}}"
        found = gpu_inputs(sorting([kind], numbered=True, nan=True, axis=axis))
        assert (found["sort_stages"] == 0) is is_library, shape


def test_matrices_of_a_batch_follow_each_other_where_jax_calls_the_library_for_each():
    def columns(target, batch, n, name):
        square = f"f32[{batch},{n},{n}]{{1,2,0}}"
        found = gpu_inputs(gpu_program(custom(target, (square,), f"({square}, s32[{batch}]{{0}})")))
        return found[f"{name}_columns"], found["library_calls"] + found["eigen_calls"]

    for target, name, batch, n, in_turn in (
        ("cusolver_getrf_ffi", "lu", 1000, 3, False),
        ("cusolver_getrf_ffi", "lu", 2, 512, True),
        ("cusolver_potrf_ffi", "cholesky", 2, 512, False),
        ("cusolver_geqrf_ffi", "qr", 1000, 3, False),
        ("cusolver_syevd_ffi", "eigen", 50, 32, False),
        ("cusolver_syevd_ffi", "eigen", 50, 33, True),
    ):
        found, calls = columns(target, batch, n, name)
        np.testing.assert_allclose(found, n * (batch if in_turn else 1))
        assert calls == (batch if in_turn else 1) + (name == "eigen")
    square = "f32[50,8,8]{1,2,0}"
    found = gpu_inputs(gpu_program(custom("cusolver_orgqr_ffi", (square, "f32[50,8]{1,0}"), square)))
    assert (found["qr_columns"], found["library_calls"]) == (50 * 8, 50)


def test_solvers_sorts_and_transforms_of_libraries_are_known_by_their_names():
    n, rows = 96, 5
    square, flop = f"f32[{rows},{n},{n}]{{1,2,0}}", {"cholesky": n**3 // 3, "lu": 2 * n**3 // 3, "eigh": 9 * n**3}
    for target, name in (("potrf", "cholesky"), ("getrf", "lu"), ("syevd", "eigh")):
        found = gpu_program(custom(f"cusolver_{target}_ffi", (square,), f"({square}, s32[])"))
        own = {name: rows * n * n, f"{name}_flop": rows * flop[name], f"{name}_matrices": rows}
        own[f"{name}_columns"] = rows * n
        assert (found.kernels.family_names(), computed(found)) == (["linear algebra"], own)
        # Matrices of a batch are solved side by side, but for eigenvalues of large ones.
        columns = gpu_inputs(found)["eigen_columns" if name == "eigh" else f"{name}_columns"]
        np.testing.assert_allclose(columns, n * (rows if name == "eigh" else 1))
    sorted_ = f"(u32[{rows},{n}]{{1,0}}, f32[{rows},{n}]{{1,0}}, u8[77]{{0}})"
    operands = f"u32[{rows},{n}]{{1,0}}", f"f32[{rows},{n}]{{1,0}}"
    found = gpu_program(custom("xla.gpu.ext.cub_sort_pairs", operands, sorted_))
    assert (found.kernels.family_names(), computed(found)) == (["sort"], {})  # digits are counted
    # Over what it sorts it goes once for each byte of a key, and once to count.
    assert (found.kernels.read_bytes.tolist(), gpu_inputs(found)["sort_stages"]) == ([5 * 8 * rows * n], 0)
    for length, kind, passes, launches in (
        (64, "RFFT", 1, 1),
        (2**16, "FFT", 2, 2),
        (2**16, "RFFT", 3, 3),
        (64, "IRFFT", 1, 2),
    ):
        body = f"  ROOT %t = c64[{N}]{{0}} fft(%x0), fft_type={kind}, fft_length={{{length}}}"
        found = gpu_program(entry(body))
        transforms = found.kernels.family_names().index("fft")
        assert (int(found.kernels.launches[transforms]), found.launches) == (passes, launches)


def test_what_nobody_knows_counts_as_other_operations():
    found = gpu_program(custom("my_kernel", (f"f32[{N}]{{0}}",), f"f32[{N}]{{0}}"))
    assert (found.kernels.family_names(), computed(found), found.calls) == (["custom"], {"other": N}, 0)
    assert (found.kernels.read_bytes.tolist(), found.kernels.written_bytes.tolist()) == ([4 * N], [4 * N])
    assert found.unknown == ("my_kernel",)
    for target in ("__gpu$xla.gpu.triton", "mosaic_gpu_v2", "__cudnn$fmhaSoftmax", "my_sort"):
        assert gpu_program(custom(target, (f"f32[{N}]{{0}}",) * 2, f"f32[{N}]{{0}}")).unknown == (target,)
    for target in ("cu_lu_pivots_to_permutation", "cusolver_potrf_ffi", "__cublas$gemm", "xla.gpu.ext.cub_sort_keys"):
        assert gpu_program(custom(target, ("f32[8,8]{1,0}",) * 2, "f32[8,8]{1,0}")).unknown == ()


def test_a_user_says_what_a_custom_call_computes_by_its_target():
    target = "a_kernel_of_a_test"
    text = custom(target, (f"f32[{N}]{{0}}",), f"f32[{N}]{{0}}")
    register_rule(target, lambda inputs, outputs, _: OperationCounts(flops=7 * outputs[0].shape[0]))
    try:
        found = gpu_program(text)
    finally:
        del RULES[target]
    assert (found.unknown, found.kernels.flops.tolist()) == ((), [7 * N])
    assert gpu_program(text).unknown == (target,)


def test_a_network_sorts_rows_of_a_power_of_two_in_stages():
    for n, octaves in ((64, 6), (65, 7), (100, 7), (1024, 10)):
        body = f"  ROOT %t = f32[3,{n}]{{1,0}} sort(%x0), dimensions={{1}}"
        found = gpu_program(entry(body, f"f32[3,{n}]{{1,0}}"))
        inputs, stages = gpu_inputs(found), octaves * (octaves + 1) / 2
        assert (found.launches, found.copies, inputs["sort_stages"]) == (2, 1, stages)
        np.testing.assert_allclose(inputs["sort_bytes"], stages * 4 * 3 * 2**octaves)


def test_a_function_counts_alike_as_a_jaxpr_and_compiled():
    def fn(x, y):
        return jnp.exp(x) @ jnp.tanh(y), (x * x).sum(-1)

    arguments = jnp.ones((8, 16), jnp.float32), jnp.ones((16, 4), jnp.float32)
    written = profile_function(fn, *arguments).kernels
    compiled = compiled_kernels(jax.jit(fn).lower(*arguments).compile().as_text())
    places = [list(OPERATIONS).index(name) for name in ("exp", "tanh", "dot_general", "mul", "reduce_sum_inner")]
    for table in (written, compiled):
        assert table.counts.sum(0)[places].tolist() == [128, 64, 2 * 8 * 16 * 4, 128, 8 * 15]


def test_a_text_that_is_none_is_refused_in_one_sentence():
    for text in ("", "ENTRY %main (x: f32[8]) -> f32[8] {\n  ROOT %f = f32[8]{0} fusion(%y), calls=%none\n}"):
        with pytest.raises(ValueError, match="^compiled program: XLA's text is not written as expected"):
            gpu_program(text)


EMPTY = gpu_runs([gpu_program(entry("  ROOT %y = f32[1] bitcast(%x0)", before=""))])


def runs_of(inputs, rows=1):
    """Return runs whose counts are those of an empty call but for the given ones, of one kernel each."""
    columns = {
        name: np.broadcast_to(np.reshape(np.asarray(inputs.get(name, value), float), -1), rows)
        for name, value in {**EMPTY.inputs, **EMPTY.kernels}.items()
    }
    kernels = {name: columns.pop(name)[:, None] for name in GPU_KERNELS.kernels}
    return Runs(GPU_KERNELS, np.zeros(rows, int), columns, kernels)


def times_ns(inputs, facts=GPU_KERNELS.facts):
    """Return what such runs take by the prior's medians."""
    runs = runs_of(inputs, max(map(np.size, inputs.values()), default=1))
    return np.asarray(times(GPU_KERNELS.prior.median, runs, dict(facts)))


def test_work_that_outlasts_launching_takes_what_shares_of_the_data_sheet_say():
    median, facts = GPU_KERNELS.prior.median, dict(GPU_KERNELS.facts)
    size = np.array([1e15])
    moved = {"moved_bytes": size, "launches": 1.0}
    faster = facts | {"memory_bytes_per_ns": 2 * facts["memory_bytes_per_ns"]}
    np.testing.assert_allclose(times_ns(moved, faster), times_ns(moved) / 2, rtol=1e-5)
    of_memory = size / (median.memory_share * facts["memory_bytes_per_ns"])
    np.testing.assert_allclose(times_ns(moved), of_memory, rtol=1e-5)
    for name in ("byte", "half", "float32", "exact", "float64"):
        of_product = size * 1e3 / (median.product_share * facts[f"{name}_flop_per_ns"])
        many, one = (times_ns({"launches": 1.0, "tiles": tiles, f"{name}_flop": size * 1e3}) for tiles in (1e12, 1.0))
        np.testing.assert_allclose(many, of_product, rtol=1e-5)
        # Of one tile, one core's rate.
        np.testing.assert_allclose(one, of_product * np.hypot(1.0, facts["cores"] / median.tile_share), rtol=1e-5)


def test_launching_hides_short_kernels_and_more_of_anything_takes_longer():
    median = GPU_KERNELS.prior.median
    one, few = times_ns({}), times_ns({"kernels": 1.0})
    assert 0 < float(few[0] - one[0]) < 0.01 * median.kernel_ns
    for name in set(COLUMNS) - {"launches", "tiles"}:  # which are no work
        step = 1e10 if "bytes" in name or "flop" in name or name == "operations" else 10.0
        assert np.all(np.diff(times_ns({name: step * np.arange(1.0, 6.0)})) > 0), name


def test_work_of_kernels_is_the_sum_of_that_of_each():
    # One large kernel goes to memory; many small ones, of as many bytes together, stay in the cache.
    size, median = 2.0**36, GPU_KERNELS.prior.median
    large, small = (runs_of({"moved_bytes": size, "launches": n}) for n in (1.0, 2.0**16))
    beside = {name: np.concatenate([column, small.kernels[name]], -1) for name, column in large.kernels.items()}
    both = dataclasses.replace(large, kernels=beside)
    one, many, two = (
        float(GPU_KERNELS.terms_ns(median, runs, GPU_KERNELS.facts)["work_ns"][0]) for runs in (large, small, both)
    )
    np.testing.assert_allclose([one / many, two], [median.cache_gain, one + many], rtol=1e-2)


def test_how_far_off_a_prediction_is_goes_with_the_share_of_the_device():
    runs = runs_of({"moved_bytes": np.geomspace(1e3, 1e15, 30)}, 30)
    found = np.asarray(GPU_KERNELS.scatter(runs, GPU_KERNELS.facts))
    assert np.all(np.diff(found) > 0)
    assert 0 < found[0] < 0.11 < 0.99 < found[-1] <= 1


def test_predictions_are_smooth_from_a_cache_to_memory():
    empty = jax.tree.map(lambda column: jnp.asarray(column[0]), EMPTY)

    def log_ns(log_size):
        moved = {"launches": jnp.ones(1), "moved_bytes": jnp.exp(log_size)[None]}
        columns = dataclasses.replace(empty, kernels=empty.kernels | moved)
        return jnp.log(predicted_ns(GPU_KERNELS.prior.median, columns, dict(GPU_KERNELS.facts)))

    value, slopes = jax.jit(jax.vmap(jax.value_and_grad(log_ns)))(jnp.log(jnp.geomspace(1e6, 1e9, 4001)))
    assert np.all(np.asarray(slopes) > 0)
    assert np.max(np.abs(np.diff(slopes))) < 0.02
    np.testing.assert_allclose(np.exp(value[:1]), times_ns({"moved_bytes": 1e6, "launches": 1.0}), rtol=1e-9)


def test_a_call_takes_at_least_its_device_and_its_dispatch_and_no_more_than_both_with_waiting():
    median, facts = GPU_KERNELS.prior.median, dict(GPU_KERNELS.facts)
    for name, values in (("kernels", np.geomspace(1.0, 1e4, 20)), ("commands", np.geomspace(1.0, 1e4, 20))):
        runs = runs_of({"kernels": 10.0, "commands": 10.0} | {name: values}, len(values))
        device, dispatch = map(np.asarray, gpu_parts_ns(median, runs, facts))
        grows, stays = (device, dispatch) if name == "kernels" else (dispatch, device)
        step = median.kernel_ns if name == "kernels" else median.command_ns
        np.testing.assert_allclose(np.diff(grows), step * np.diff(values), rtol=1e-6)
        np.testing.assert_allclose(stays, stays[0])
        alone = np.asarray(times(median, runs, facts))
        assert np.all(np.maximum(device, dispatch) < alone)
        assert np.all(alone < device + dispatch + median.overlapped_ns + median.wake_ns)
