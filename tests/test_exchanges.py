"""What devices of a compiled program exchange: the forms of its text, overlap, loops; and what a step then takes."""

import itertools

import numpy as np
import pytest

from rlxjax.jaxpr._exchanges import groups_of
from rlxjax.jaxpr._xla import CompiledProgram


def grouped(sizes, along):
    """Return the groups of partitions that differ in some axes of a mesh alone."""
    places = np.arange(np.prod(sizes)).reshape(sizes)
    moved = np.moveaxis(places, along, range(-len(along), 0))
    return {frozenset(row) for row in moved.reshape(-1, np.prod([sizes[axis] for axis in along])).tolist()}


def listed(groups):
    return "{" + ",".join("{" + ",".join(map(str, sorted(group))) + "}" for group in groups) + "}"


@pytest.mark.parametrize("sizes", [(8,), (4, 2), (2, 3, 4)])
def test_all_forms_of_groups_say_the_same(sizes):
    devices = int(np.prod(sizes))
    names = "abc"[: len(sizes)]
    mesh = ",".join(f"'{name}'={size}" for name, size in zip(names, sizes, strict=True))
    for count in range(1, len(sizes) + 1):
        for along in itertools.combinations(range(len(sizes)), count):
            expected = grouped(sizes, along)
            order = [axis for axis in range(len(sizes)) if axis not in along] + list(along)
            size = devices // len(expected)
            shape, extents, turned = f"{len(expected)},{size}", ",".join(map(str, sizes)), ",".join(map(str, order))
            axes = ",".join(f"'{names[axis]}'" for axis in along)
            forms = [listed(expected), f"[{shape}]<=[{extents}]T({turned})", f"mesh[{mesh}] {{{axes}}}"]
            for form in forms:
                found = groups_of(f"channel_id=1, replica_groups={form}, dimensions={{0}}", devices)
                assert set(map(frozenset, found)) == expected, form
    assert groups_of("replica_groups={}", devices) == groups_of("dimensions={0}", devices) == (tuple(range(devices)),)
    # The second half of an axis, after its first part.
    halves = groups_of("replica_groups=mesh['a'=8] {'a':(2)4}, more", 8)
    assert set(map(frozenset, halves)) == {frozenset(range(4)), frozenset(range(4, 8))}
    assert groups_of("source_target_pairs={{0,1},{1,0}}", 2) == ((0, 1), (1, 0))


ENTRY = """HloModule exchanges, is_scheduled=true
%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}
{more}
ENTRY %main (x: f32[1024,256]) -> f32[1024,256] {{
  %x = f32[1024,256] parameter(0)
{body}
}}
"""
BYTES, GROUPS = 4 * 1024 * 256, "replica_groups={{0,1,2,3},{4,5,6,7}}"
WORK = '%y{0} = f32[1024,256] rng-bit-generator(%x), backend_config={{"window_config":{{"estimated_cycles":"{1}"}}}}'


def exchanges(body, more="", platform="tpu", devices=8):
    lines = "\n".join(f"  {line}" for line in body)
    return CompiledProgram(ENTRY.format(body=lines, more=more), {}, platform=platform, devices=devices)


def test_each_kind_has_its_bytes_and_a_program_of_one_device_exchanges_nothing():
    for opcode, result, kind, moved in (
        ("all-reduce", "f32[1024,256]", "all_reduce", BYTES),
        ("all-gather", "f32[4096,256]", "all_gather", 4 * BYTES),
        ("reduce-scatter", "f32[256,256]", "reduce_scatter", BYTES),
        ("all-to-all", "f32[1024,256]", "all_to_all", BYTES),
        ("collective-permute", "f32[1024,256]", "permute", BYTES),
    ):
        groups = "source_target_pairs={{0,1},{1,0}}" if kind == "permute" else GROUPS
        body = [f"ROOT %z = {result} {opcode}(%x), channel_id=1, {groups}, to_apply=%add"]
        (found,) = exchanges(body).exchanges
        assert (found.kind, found.bytes, found.times) == (kind, moved, 1)
        assert len(found.groups) == 2
        assert (found.beside_cycles, found.beside_bytes, found.beside_flop) == (0, 0, 0)
        assert exchanges(body, devices=1).exchanges == ()
        # One device alone exchanges nothing.
        alone = "replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}"
        if kind != "permute":
            assert exchanges([body[0].replace(GROUPS, alone)]).exchanges == ()


def test_what_runs_between_start_and_end_is_beside_and_what_runs_elsewhere_is_not():
    start = f"%s = ((f32[1024,256]), f32[4096,256]) all-gather-start(%x), channel_id=1, {GROUPS}"
    for platform in ("tpu", "cuda"):
        body = [
            WORK.format(0, 100),
            start,
            WORK.format(1, 30),
            WORK.format(2, 12),
            "%d = f32[4096,256] all-gather-done(%s)",
            WORK.format(3, 7),
            "ROOT %z = f32[1024,256] bitcast(%y3)",
        ]
        program = exchanges(body, platform=platform)
        (found,) = program.exchanges
        assert (found.kind, found.bytes) == ("all_gather", 4 * BYTES)
        assert (found.beside_cycles, found.beside_bytes) == (42, 2 * 2 * BYTES)
        assert program.cycles == 149
        # What devices exchange is no kernel of theirs.
        assert program.gpu.launches == (4 if platform == "cuda" else 0)


def test_fusions_of_one_channel_are_steps_of_one_exchange_and_one_that_keeps_a_part_of_a_sum_scatters_it():
    inside = f"all-gather(%p), channel_id=5, {GROUPS}"
    steps = "\n".join(
        f"%step{place} (p: f32[1024,256]) -> f32[4096,256] {{\n  %p = f32[1024,256] parameter(0)\n"
        f"  %q{place} = f32[256,256] dot(%p, %p), lhs_contracting_dims={{0}}\n"
        f"  ROOT %g{place} = f32[4096,256] {inside}\n}}"
        for place in range(3)
    )
    cycles = 'backend_config={{"window_config":{{"estimated_cycles":"{0}"}}}}'
    body = [
        "%s = f32[4096,256] fusion(%x), kind=kCustom, calls=%step0",
        f"%w = f32[4096,256] fusion(%x), kind=kOutput, calls=%step1, {cycles.format(500)}",
        "%d = f32[4096,256] fusion(%x), kind=kCustom, calls=%step2",
        f"ROOT %z = f32[1024,256] slice(%d), {cycles.format(3)}",
    ]
    (found,) = exchanges(body, steps).exchanges
    assert (found.kind, found.bytes, found.times, found.beside_cycles) == ("all_gather", 4 * BYTES, 1, 500)
    scatters = (
        "%part (p: f32[1024,256]) -> f32[256,256] {\n  %p = f32[1024,256] parameter(0)\n"
        f"  %r = f32[1024,256] all-reduce(%p), channel_id=7, {GROUPS}, to_apply=%add\n"
        "  ROOT %own = f32[256,256] slice(%r)\n}"
    )
    body = ["ROOT %z = f32[256,256] fusion(%x), kind=kCustom, calls=%part"]
    (found,) = exchanges(body, scatters).exchanges
    assert (found.kind, found.bytes) == ("reduce_scatter", BYTES)


def test_exchanges_that_are_waited_for_are_each_one_whatever_channel_they_share():
    body = [f"%g{place} = f32[4096,256] all-gather(%x), channel_id=1, {GROUPS}" for place in range(3)]
    body.append("ROOT %z = f32[1024,256] bitcast(%x)")
    assert sum(found.times for found in exchanges(body).exchanges) == 3


def test_what_another_part_of_a_device_runs_is_an_exchange_too():
    more = (
        f"%other (p: f32[1024,256]) -> f32[4096,256] {{\n  %p = f32[1024,256] parameter(0)\n"
        f"  ROOT %g = f32[4096,256] all-gather(%p), channel_id=1, {GROUPS}\n}}"
    )
    body = [
        "%s = ((f32[1024,256]), f32[4096,256]) custom-call-start(%x), called_computations={%other}",
        WORK.format(0, 11),
        "%u = ((f32[1024,256]), f32[4096,256]) custom-call-update(%s)",
        WORK.format(1, 31),
        "%d = f32[4096,256] custom-call-done(%u)",
        WORK.format(2, 5),
        "ROOT %z = f32[1024,256] bitcast(%y2)",
    ]
    (found,) = exchanges(body, more).exchanges
    assert (found.kind, found.bytes, found.beside_cycles) == ("all_gather", 4 * BYTES, 42)


LOOP = """%turn (t: (s32[], f32[1024,256])) -> (s32[], f32[1024,256]) {{
  %t = (s32[], f32[1024,256]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %row = f32[1024,256] get-tuple-element(%t), index=1
  %new = f32[1024,256] {inside}
  ROOT %out = (s32[], f32[1024,256]) tuple(%i, %new)
}}
%test (t: (s32[], f32[1024,256])) -> pred[] {{
  %t = (s32[], f32[1024,256]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %limit = s32[] constant(9)
  ROOT %less = pred[] fusion(%i, %limit), kind=kLoop, calls=%compared
}}
%compared (i: s32[], n: s32[]) -> pred[] {{
  %i = s32[] parameter(0)
  %n = s32[] parameter(1)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}}
"""
TURNED = [
    "%zero = s32[] constant(0)",
    "%start = (s32[], f32[1024,256]) tuple(%zero, %x)",
    "%loop = (s32[], f32[1024,256]) while(%start), condition=%test, body=%turn{known}",
    "ROOT %z = f32[1024,256] get-tuple-element(%loop), index=1",
]
KNOWN = ', backend_config={"known_trip_count":{"n":"9"}}'


def test_a_loop_exchanges_in_every_turn():
    inside = f"all-reduce(%row), channel_id=1, {GROUPS}, to_apply=%add"
    body = [line.format(known=KNOWN) for line in TURNED]
    (found,) = exchanges(body, LOOP.format(inside=inside), "cuda").exchanges
    assert (found.kind, found.bytes, found.times) == ("all_reduce", BYTES, 9)


def test_the_test_of_a_loop_of_known_trips_launches_nothing_on_a_gpu():
    for inside in ("tanh(%row)", "negate(%row)"):
        more = LOOP.format(inside=inside)
        known = exchanges([line.format(known=KNOWN) for line in TURNED], more, "cuda", devices=1)
        assert known.totals.sums().launches == known.gpu.launches == 9
        on_cpu = exchanges([line.format(known=KNOWN) for line in TURNED], more, "cpu", devices=1)
        assert on_cpu.totals.sums().launches == 19  # each turn and each test
        unknown = exchanges([line.format(known="") for line in TURNED], more, "cuda", devices=1)
        assert unknown.totals.sums().launches == 1  # the test that ends it


@pytest.mark.parametrize("text", ["mesh['a'=4] {'a'}", "mesh[0] {'a'}"])
def test_groups_of_another_form_are_refused(text):
    with pytest.raises(ValueError, match="groups of devices"):
        groups_of(f"replica_groups={text}", 8)
    body = [f"ROOT %z = f32[1024,256] all-reduce(%x), replica_groups={text}, to_apply=%add"]
    with pytest.raises(ValueError, match="not written as expected"):
        exchanges(body)
