"""Random graphs: one generator, drawn from a seed or by hypothesis."""

import numpy as np
from hypothesis import strategies as st

import rlxjax as rx

UNARY = ("relu", "sigmoid", "tanh", "gelu", "sqrt", "rsqrt", "exp", "log", "neg", "abs")
MEMORY = ("load", "store", "copy")
BINARY = ("add", "sub", "mul", "div", "max", "min", "pow")
REDUCE = ("reduce_sum", "reduce_max", "reduce_min", "reduce_mean")
GIVEN = ("input", "param", "constant")

#: Shapes of graphs that run. Three of them have one element, and three have twelve.
SHAPES = ((), (1,), (1, 1), (5,), (3, 4), (4, 3), (12,), (2, 3, 3))
#: Shapes of graphs that are planned only: empty and unknown ones as well.
PLANNED_SHAPES = (*SHAPES, (0,), (None, 4))

#: How often each kind of node is added.
KINDS = (
    *("unary",) * 6,
    *("binary",) * 6,
    *("reduce",) * 2,
    *("broadcast",) * 3,
    *("memory", "cast", "view", "source", "matmul", "concat", "alone"),
)


def random_graph(rng, most_nodes=30, shapes=PLANNED_SHAPES, *, runs=False, kinds=KINDS):
    """Return a graph of at most `most_nodes` kernel nodes beside one to four inputs.

    Args:
        rng: a `random.Random`.
        most_nodes: the most nodes that are neither input, param nor constant.
        shapes: what inputs, sources and broadcasts may have.
        runs: whether every node has a kernel, so that the graph can be executed.
        kinds: of nodes, each as often as it should come.
    """
    graph = rx.Graph()
    for number in range(rng.randint(1, 4)):
        graph.add(rng.choice(GIVEN), shape=rng.choice(shapes), dtype="f32", name=f"x{number}")
    least = len(graph.nodes)
    wanted = least + rng.randint(1, most_nodes)
    while len(graph.nodes) < wanted:
        _add(graph, rng, rng.choice(kinds), shapes, runs)
    if rng.random() < 0.7:
        graph.set_outputs(rng.choice(graph.nodes).id for _ in range(rng.randint(1, 4)))
    return graph


def graphs(most_nodes=30, shapes=PLANNED_SHAPES, **options):
    """Return the strategy of `random_graph`."""
    rngs = st.randoms(use_true_random=False)
    return rngs.map(lambda rng: random_graph(rng, most_nodes, shapes, **options))


def arrays_for(graph, seed=0):
    """Return arrays of the nodes without operands: numbers, with NaN, infinities and zeros among them."""
    rng, special = np.random.default_rng(seed), np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0])
    arrays = {}
    for node in graph.nodes:
        if not node.inputs:
            numbers, chosen = rng.normal(0, 2, node.shape), rng.random(node.shape) < 0.15
            arrays[node.id] = np.where(chosen, rng.choice(special, node.shape), numbers).astype(np.float32)
    return arrays


def _add(graph, rng, kind, shapes, runs):
    x = _any(graph, rng)
    if kind == "binary":
        alike = [node.id for node in graph.nodes if (node.shape, node.dtype) == (x.shape, x.dtype)]
        operands = [x.id, rng.choice(alike)]
        graph.add(rng.choice(BINARY), operands if rng.random() < 0.5 else operands[::-1])
    elif kind == "reduce":
        graph.add(rng.choice(REDUCE), [x.id])
    elif kind == "broadcast":
        _add_broadcast(graph, rng, x, shapes)
    elif kind == "memory":
        graph.add(rng.choice(MEMORY), [x.id])
    elif kind == "cast":
        # What runs computes in floats: other dtypes are cast back at once.
        narrow = graph.add("cast", [x.id], to=rng.choice(("f16", "bf16", "i32", "i8", "f64", "f32")))
        if runs:
            graph.add("cast", [narrow], to=rng.choice(("f32", "f64")))
    elif kind == "view" and None not in x.shape:
        _add_view(graph, rng, x)
    elif kind == "source":
        graph.add(rng.choice((*UNARY, *MEMORY)), shape=rng.choice(shapes), dtype="f32")
    elif kind == "matmul" and len(x.shape) == 2 and None not in x.shape:
        transposed = [n.id for n in graph.nodes if n.shape == x.shape[::-1] and n.dtype == x.dtype]
        other = transposed or [graph.add("transpose", [x.id])]
        graph.add("matmul", [x.id, rng.choice(other)])
    elif kind == "concat" and x.shape:
        graph.add("concat", [x.id, x.id], axis=0)
    elif kind == "alone" and not runs:
        graph.add(rng.choice(("custom", "log_mel")), [x.id, _any(graph, rng).id], shape=rng.choice(shapes))
    else:
        graph.add(rng.choice(UNARY), [x.id])


def _any(graph, rng):
    """Return a node, half of the time a late one, so that graphs are deep as well as wide."""
    nodes = graph.nodes
    return rng.choice(nodes[-4:] if rng.random() < 0.5 else nodes)


def _add_broadcast(graph, rng, x, shapes):
    """Add a broadcast of a reduction (a new one, if there is none): to its operand's shape, or another."""
    reductions = [node for node in graph.nodes if node.op in REDUCE]
    if not reductions:
        graph.add("reduce_sum", [x.id])
        reductions = graph.nodes[-1:]
    reduction = rng.choice(reductions)
    own = graph.nodes[reduction.inputs[0]].shape
    to = own if rng.random() < 0.6 else rng.choice(shapes)
    source = x.id if rng.random() < 0.2 and None not in x.shape and x.elements == 1 else reduction.id
    graph.add("broadcast", [source], shape=to)


def _add_view(graph, rng, x):
    op = rng.choice(("reshape", "transpose", "narrow"))
    if op == "reshape":
        graph.add(op, [x.id], shape=rng.choice(((x.elements,), (x.elements, 1), x.shape)))
    elif op == "narrow" and x.shape and x.shape[0]:
        length = rng.randint(1, x.shape[0])
        graph.add(op, [x.id], axis=0, start=rng.randint(0, x.shape[0] - length), length=length)
    else:
        graph.add("transpose", [x.id])
