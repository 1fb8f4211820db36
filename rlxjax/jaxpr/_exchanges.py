"""Find the exchanges between devices in a compiled program's text, and the work that overlaps with each exchange."""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from rlxjax._values import by_value

from ._xla_text import COLLECTIVES, Computation, Instruction, fused_in

#: Dict from the opcode of a collective to the kind of exchange.
KINDS = {
    **{"all-reduce": "all_reduce", "all-gather": "all_gather", "reduce-scatter": "reduce_scatter"},
    **{"all-to-all": "all_to_all", "ragged-all-to-all": "all_to_all"},
    **dict.fromkeys(("collective-permute", "collective-broadcast", "send", "recv"), "permute"),
}
_GROUPS = re.compile(r"\b(?:replica_groups|source_target_pairs)=(\{\{[\d,{}]*\}\}|\{\}|\[[^ ]*|mesh\[.*?\] \{.*?\})")
_ROW, _AXIS = re.compile(r"\{([\d,]+)\}"), re.compile(r"'([^']*)'(?:=(\d+)|:\((\d+)\)(\d+))?")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")

#: The partition ids of the devices in each group that exchanges data. For a permutation: pairs (source, target) of ids.
Groups = tuple[tuple[int, ...], ...]


@by_value
class Exchange(NamedTuple):
    """An exchange of data between devices by a collective. Bytes, cycles and FLOP are those of a single device.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "permute".
        bytes: bytes of the operand; for an all-gather, bytes of the result.
        groups: partition ids of the devices in each group; for a permutation, pairs of source and target.
        times: number of times that one call of the program runs the collective.
        beside_cycles: cycles, estimated by a TPU's compiler, of the matrix products that overlap with the exchange.
        beside_bytes: bytes that kernels move while they overlap with the exchange.
        beside_flop: floating-point operations of the matrix products that overlap with the exchange.
    """

    kind: str
    bytes: int
    groups: Groups
    times: int = 1
    beside_cycles: int = 0
    beside_bytes: int = 0
    beside_flop: int = 0


def base(opcode: str) -> str:
    """Return the opcode of a collective without the suffix `-start` or `-done`."""
    return opcode.removesuffix("-start").removesuffix("-done")


def collectives_in(
    instruction: Instruction, computation: Computation, computations: Mapping[str, Computation]
) -> list[tuple[Instruction, Computation]]:
    """Return the collectives in an instruction, each with the computation that contains the collective."""
    return [one for one in fused_in(instruction, computation, computations) if base(one[0].opcode) in COLLECTIVES]


def exchange_of(
    found: Instruction, inside: Computation, around: Instruction, devices: int
) -> tuple[Exchange, str] | None:
    """Return a collective as an `Exchange`, and the name of its channel; None if no bytes move between devices."""
    kind, channel = KINDS[base(found.opcode)], _CHANNEL.search(found.attributes)
    operands = sum(each.bytes for each in inside.operands(found))
    moved = operands
    if kind == "all_gather":  # the result of a `-start` lists the operands, then the results
        moved = max(found.bytes - (operands if found.opcode.endswith("-start") else 0), operands)
    groups = groups_of(found.attributes, devices)
    size = max(map(len, groups), default=1)
    if size < 2 or not moved:
        return None
    if kind == "all_reduce" and around is not found and around.bytes * size <= 2 * operands and not around.is_tuple:
        kind = "reduce_scatter"  # the fusion keeps only a part of the reduced array
    return Exchange(kind, moved, groups), channel[1] if channel else found.name


def groups_of(attributes: str, devices: int) -> Groups:
    """Return the groups of devices (partition ids) in an instruction's attributes; by default, a group of all devices.

    Raises:
        ValueError: the groups in the attributes cannot be parsed.

    Examples:
        >>> groups_of("replica_groups={{0,2},{1,3}}", 4), groups_of("replica_groups=[2,2]<=[2,2]T(1,0)", 4)
        (((0, 2), (1, 3)), ((0, 2), (1, 3)))
        >>> groups_of("replica_groups=mesh['x'=2,'y'=2] {'y'}, more", 4)
        ((0, 1), (2, 3))
    """
    said = _GROUPS.search(attributes)
    text = said[1] if said else "{}"
    if text == "{}":
        return (tuple(range(devices)),)
    if text.startswith("{"):
        return tuple(_integers(row) for row in _ROW.findall(text))
    if iota := _IOTA.match(text):
        rows, sizes = _integers(iota[1])[0], _integers(iota[2])
        order = _integers(iota[3]) if iota[3] else tuple(range(len(sizes)))
        places = np.arange(math.prod(sizes)).reshape(sizes).transpose(order).reshape(rows, -1)
        return tuple(map(tuple, places.tolist()))
    mesh, _, taken = text.partition("] ")
    sizes = {name: int(size) for name, size, _, _ in _AXIS.findall(mesh)}
    if not sizes or "<=" in text or math.prod(sizes.values()) != devices:
        raise ValueError(f"unknown groups of devices {text[:60]!r}")
    places, along = np.arange(devices), []
    shape: list[int] = []
    parts = {name: (int(before), int(size)) for name, _, before, size in _AXIS.findall(taken) if size}
    named = {name for name, *_ in _AXIS.findall(taken)}
    for name, size in sizes.items():
        if name in parts:  # splits the axis in three: before the part, the part, after the part
            before, own = parts[name]
            along.append(len(shape) + 1)
            shape += [before, own, size // (before * own)]
        else:
            along += [len(shape)] if name in named else []
            shape.append(size)
    moved = np.moveaxis(places.reshape(shape), along, range(-len(along), 0))
    return tuple(map(tuple, moved.reshape(-1, math.prod(shape[axis] for axis in along)).tolist()))


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
