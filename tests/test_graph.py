"""The graph: the op table, shape inference, and what is refused."""

import pytest

import rlxjax as rx
from rlxjax.graph import OPS  # the specification names each

SOURCES = {"input", "param", "constant"}
VIEWS = {"reshape", "transpose", "narrow"}
UNARY = {"relu", "sigmoid", "tanh", "gelu", "sqrt", "rsqrt", "exp", "log", "neg", "abs", "cast"}
BINARY = {"add", "sub", "mul", "div", "max", "min", "pow"}
REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_mean"}
MEMORY = {"load", "store", "copy"}
SHAPED = {"broadcast", "concat", "matmul", "attention", "fft"}
HOST_SYNC = {"log_mel", "log_mel_backward", "custom", "welch_peaks"}


def with_inputs(*shapes, dtype="f32"):
    graph = rx.Graph("test")
    return graph, [graph.input(f"x{i}", shape, dtype) for i, shape in enumerate(shapes)]


def added(op, *shapes, operands="f32", **options):
    graph, ids = with_inputs(*shapes, dtype=operands)
    node_id = graph.add(op, ids, **options)
    return graph.nodes[node_id]


# --- The op table, by what adding does -----------------------------------------------------------


def test_the_op_table_holds_the_ops_of_the_specification_and_cannot_be_changed():
    assert set(OPS) == SOURCES | VIEWS | UNARY | BINARY | REDUCTIONS | MEMORY | SHAPED | HOST_SYNC
    for flag, names in [
        ("metadata", SOURCES | VIEWS),
        ("host_sync", HOST_SYNC),
        ("elementwise", UNARY | BINARY),
    ]:
        assert {name for name, op in OPS.items() if getattr(op, flag)} == names
    for arity, names in enumerate((SOURCES, UNARY | REDUCTIONS | MEMORY | VIEWS, BINARY | {"matmul"})):
        assert {OPS[name].arity for name in names} == {arity}
    with pytest.raises(TypeError):
        OPS["new"] = 1


def test_tensor_bytes_are_elements_times_the_size_of_the_dtype():
    sizes = {"i8 u8 bool": 1, "f16 bf16": 2, "f32 i32": 4, "f64 i64 c64": 8, "c128": 16}
    for dtype, size in [(dtype, size) for dtypes, size in sizes.items() for dtype in dtypes.split()]:
        assert rx.graph.tensor_bytes((3, 5, 7), dtype) == 105 * size
        assert rx.graph.tensor_bytes((), dtype) == size
        assert rx.graph.tensor_bytes((3, None), dtype) == rx.graph.tensor_bytes((3, 0), dtype) == 0
        assert rx.graph.tensor_bytes((2**32, 2**32), dtype) == 2**64 - 1


# --- Adding --------------------------------------------------------------------------------------


def test_ids_count_from_zero_in_order_of_adding_and_outputs_are_kept_in_order_with_repetition():
    graph = rx.Graph("ids")
    ids = [graph.input("x", (2,)), graph.param("w", (2,)), graph.constant("c", (2,))]
    ids += [graph.add("add", ids[:2]), graph.add("relu", [3])]
    assert ids == [node.id for node in graph.nodes] == [0, 1, 2, 3, 4]
    assert [node.op for node in graph.nodes] == ["input", "param", "constant", "add", "relu"]
    assert (graph.nodes[3].inputs, graph.name, graph.outputs) == ((0, 1), "ids", ())
    graph.set_outputs([1, 0, 1])
    assert graph.outputs == (1, 0, 1)


def test_a_shape_is_inferred():
    for op, shapes, attributes, expected in [
        *[(op, [(3, 5)], {}, (3, 5)) for op in sorted((UNARY - {"cast"}) | MEMORY)],
        *[(op, [(3, 5), (3, 5)], {}, (3, 5)) for op in sorted(BINARY)],
        *[(op, [(3, 5)], {}, (1,)) for op in sorted(REDUCTIONS)],
        ("transpose", [(2, 3, 5)], {}, (5, 3, 2)),
        ("transpose", [(2, 3, 5)], {"permutation": (1, 0, 2)}, (3, 2, 5)),
        ("narrow", [(8, 6)], {"axis": 1, "start": 2, "length": 4}, (8, 4)),
        ("narrow", [(8, None)], {"axis": -1, "length": 4}, (8, 4)),
        ("concat", [(2, 3), (2, 5), (2, 1)], {"axis": 1}, (2, 9)),
        ("matmul", [(4, 3), (3, 5)], {}, (4, 5)),
        ("matmul", [(7, 4, 3), (7, 3, 5)], {}, (7, 4, 5)),
        ("attention", [(2, 8, 16, 4)] * 3, {}, (2, 8, 16, 4)),
        ("welch_peaks", [(8, 512)], {"k": 16, "n_segments": 2}, (4, 16, 2)),
        ("welch_peaks", [(None, 512)], {"k": 16, "n_segments": 2}, (None, 16, 2)),
        ("relu", [(None, 5)], {}, (None, 5)),
    ]:
        node = added(op, *shapes, **attributes)
        assert (node.shape, node.dtype) == (expected, "f32")


def test_a_dtype_is_the_first_operands_unless_given_or_known():
    for op, options, expected in [
        ("reduce_sum", {}, "f16"),
        ("cast", {"to": "i32"}, "i32"),
        ("cast", {"to": "i32", "shape": (8, 512)}, "i32"),
        ("relu", {"dtype": "F64"}, "f64"),
        ("custom", {"shape": (8,), "dtype": "i8"}, "i8"),
        ("welch_peaks", {"k": 1, "n_segments": 1}, "f32"),
        ("welch_peaks", {"shape": (8, 1, 2)}, "f32"),
    ]:
        assert added(op, (8, 512), operands="f16", **options).dtype == expected


def test_a_given_shape_is_taken_as_given_whatever_the_operands():
    for op in sorted(OPS):
        for operands in [0, 1, 3]:
            node = added(op, *[(3, 3)] * operands, shape=[7, None, 0], dtype="i8")
            assert (node.shape, node.dtype, node.inputs) == ((7, None, 0), "i8", tuple(range(operands)))
    assert added("fft", (8, 3), operands="c64").shape == (8, 3)  # complex, it may have an odd length
    node = added("relu", (None, 5))
    assert (node.elements, node.bytes, added("relu", (4, 5)).elements) == (0, 0, 20)


# --- What is refused -----------------------------------------------------------------------------


def test_a_bad_node_is_refused_by_name():
    for op, shapes, options, says in [
        ("relu", [(2,), (2,)], {}, "expected 1 operand.*got 2"),
        ("concat", [], {"axis": 0}, "expected at least 1 operand.*got 0"),
        ("add", [(2,), (3,)], {}, "the same shape.*2.*3"),
        ("reshape", [(2,)], {}, "cannot infer its output shape"),
        ("cast", [(2,)], {}, "expected the attribute 'to', got none"),
        ("cast", [(2,)], {"to": "float"}, "unknown dtype 'float'"),
        ("transpose", [(2, 3)], {"permutation": (0, 0)}, "permutation"),
        ("narrow", [(2, 3)], {"axis": 1}, "expected the attribute 'length'"),
        ("narrow", [(2, 3)], {"axis": 2, "length": 1}, "axis: expected an axis of the shape"),
        ("narrow", [(2, 3)], {"axis": 1, "start": 2, "length": 2}, "at most the axis length 3, got 2 . 2"),
        ("concat", [(2, 3), (3, 3)], {"axis": 1}, "the same shape except along axis 1"),
        ("matmul", [(2, 3), (4, 5)], {}, "m, k.*k, n"),
        ("attention", [(2, 2)] * 3, {}, "batch, heads, seq, head_dim"),
        ("fft", [(8, 511)], {}, "last axis of even length"),
        ("welch_peaks", [(8, 512)], {"k": 0, "n_segments": 2}, "k: expected an integer of at least 1"),
        ("welch_peaks", [(9, 512)], {"k": 16, "n_segments": 2}, "batch . 2"),
        ("relu", [(2,)], {"shape": (2, -1)}, "dimension: expected an integer of at least 0, got -1"),
        ("relu", [(2,)], {"dtype": "f8"}, "unknown dtype 'f8'; expected one of i8"),
        ("input", [], {}, "cannot infer its output shape"),
    ]:
        graph, ids = with_inputs(*shapes)
        with pytest.raises(ValueError, match=rf"node {len(shapes)} \({op}\): .*{says}"):
            graph.add(op, ids, **options)
        assert len(graph.nodes) == len(shapes)


def test_an_unknown_op_or_node_is_refused_by_name():
    for op, hint in [("RELU", "'relu'"), ("reduce_summ", "'reduce_sum'")]:
        with pytest.raises(ValueError, match=f"unknown op '{op}'.*did you mean {hint}.*expected one of input"):
            rx.Graph().add(op, [])
    graph, _ = with_inputs((2,))
    unknown = [(node_id, f"no node {node_id}; the graph has 1 nodes") for node_id in (1, 7)]
    for node_id, says in unknown + [(node_id, "expected an integer") for node_id in (-1, 0.5, "x", None)]:
        with pytest.raises(ValueError, match=rf"node 1 \(relu\): inputs: {says}"):
            graph.add("relu", [node_id])
        with pytest.raises(ValueError, match=f"outputs: {says}"):
            graph.set_outputs([node_id])


def test_what_is_no_list_or_size_is_refused():
    for call in [
        lambda g: g.add("relu", 0),
        lambda g: g.set_outputs(1),
        lambda g: rx.profile_graph_io(g, output_indices=0),
        lambda g: rx.graph.tensor_bytes((-8,), "f32"),
        lambda g: rx.graph.tensor_bytes((8,), "f33"),
    ]:
        with pytest.raises(ValueError, match="expected"):
            call(rx.Graph())
