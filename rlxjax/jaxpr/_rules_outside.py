"""Rules of what goes between devices or to the host, and of kernels of one's own."""

from collections.abc import Mapping

from ._rules import Operation, OperationCounts, Rule, arithmetic, elements, names, nothing

#: The family of primitives at which the device waits for the host.
CALLBACK = "callback"
_COMBINING = names("psum psum2 psum_invariant pmax pmin reduce_scatter unreduced_psum unreduced_reduce_scatter")
_EXCHANGING = names(
    "all_gather all_gather_invariant all_gather_reduced all_to_all ragged_all_to_all ppermute pshuffle "
    "psend precv reshard"
)


def _combining(op: Operation) -> OperationCounts:
    """One operation for every element that a device gives."""
    counts = [arithmetic(aval, elements(aval)) for aval in op.inputs]
    return OperationCounts(sum(c.flops for c in counts), 0, sum(c.integer_ops for c in counts))


def _pallas(op: Operation) -> OperationCounts | None:
    """What the kernel's author says; nothing is known without it."""
    estimate = op.params.get("cost_estimate")
    if estimate is None:
        return None
    return OperationCounts(int(estimate.flops), int(estimate.transcendentals), 0, int(estimate.bytes_accessed))


#: By the name of the primitive.
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(
        names("pure_callback io_callback debug_callback debug_print python_callback infeed outfeed"),
        Rule(CALLBACK, nothing),
    ),
    **dict.fromkeys(_COMBINING, Rule("collective", _combining)),
    **dict.fromkeys(_EXCHANGING, Rule("collective", nothing)),
    "pallas_call": Rule("kernel", _pallas),
}
