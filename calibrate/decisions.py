"""Commands that show, pin and forget remembered choices, and texts on choices for explanations and pages."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from rlxjax.units import time_text

from .command_line import AsJson, app, command
from .terminal import Row, console, counted, json_text, print_rows, say

if TYPE_CHECKING:
    from rlxjax.calibration import CalibratedModel
    from rlxjax.choices import Choice, Memory

#: The least number of characters of a key in a list.
KEY_WIDTH = 8
Key = Annotated[str, Argument(help="The key of a decision, or its first characters.")]

decisions = typer.Typer(help="Show, pin and forget choices that were measured; each is a file that you can copy.")
app.add_typer(decisions, name="decisions")


def _memory() -> "Memory":
    from rlxjax.choices import Memory

    return Memory()


def _found(memory: "Memory", start: str) -> "Choice":
    return memory.read(memory.key_of(start))


@command("rlxjax decisions list", of=decisions, name="list")
def list_decisions(as_json: AsJson = False) -> None:
    """List remembered choices, the newest first: the alternative that runs, its time, and how it was chosen."""
    memory = _memory()
    found = memory.all()
    if as_json:
        typer.echo(json_text({"decisions": [summary(one) for one in found]}))
        return
    if not found:
        say(f"nothing is remembered in {memory.path}")
        return
    keys, length = {one.key for one in found}, KEY_WIDTH
    while len({key[:length] for key in keys}) < len(keys):  # no two keys may look alike
        length += 1
    rows = [
        {
            "key": one.key[:length],
            "runs": one.name,
            "takes (ns)": one.chosen.measured_ns,
            "by": "a tie" if one.is_tie and not one.without_pin else one.by,
            "day": one.created[:10],
            "workload": one.label,
        }
        for one in found
    ]
    print_rows(console(), f"{counted(len(found), 'decision')}: the newest first", rows)


@command("rlxjax decisions show a4f02c19", of=decisions)
def show(key: Key, as_json: AsJson = False) -> None:
    """Show one choice: its predicted and measured times, the alternatives that are equally fast, and the machine."""
    one = _found(_memory(), key)
    if as_json:
        typer.echo(json_text(one.as_dict()))
        return
    say(f"{one.kind}, {one.label}: {one.name} runs")
    say(one)
    assert (machine := one.machine) is not None  # only measured choices are remembered
    device = " ".join(dict.fromkeys((machine.platform, machine.device_kind)))
    software = f"jax {machine.jax}, jaxlib {machine.jaxlib}"
    say(f"measured {one.created} on {machine.cpu_model}, {counted(machine.cores, 'core')}, {device}, {software}")
    say(f"key {one.key}")


@command("rlxjax decisions pin a4f02c19 fused", "rlxjax decisions pin a4f02c19 --off", of=decisions)
def pin(
    key: Key,
    name: Annotated[str | None, Argument(help="The alternative to run.")] = None,
    off: Annotated[bool, Option("--off", help="Remove the pin.")] = False,
) -> None:
    """Choose an alternative whatever its measured time, so that every run of your program uses the same alternative."""
    memory = _memory()
    one = _found(memory, key)
    if (name is None) != off:
        got = "neither" if name is None else f"{name} and --off"
        raise ValueError(f"expected {', '.join(each.name for each in one.alternatives)} or --off, got {got}")
    memory.pin(one.key, name)
    one = _found(memory, one.key)
    say(f"{one.kind}, {one.label}: {one.name}, {one.by}")


@command("rlxjax decisions forget a4f02c19", "rlxjax decisions forget --all", of=decisions)
def forget(
    keys: Annotated[
        list[str] | None, Argument(help="Keys of decisions, or their first characters.", metavar="KEY")
    ] = None,
    all: Annotated[bool, Option("--all", help="Forget all decisions and pins.")] = False,
) -> None:
    """Forget decisions and their pins. The next call then measures again."""
    if bool(keys) == all:
        raise ValueError(f"expected keys or --all, got {'both' if all else 'neither'}")
    memory = _memory()
    count = memory.forget(None if all else sorted({memory.key_of(key) for key in keys or []}))
    say(f"{counted(count, 'decision')} forgotten")


# --- For explanations and pages ------------------------------------------------------------------


def decided_here(calibrated: "CalibratedModel", sizes: Mapping[str, Any]) -> "Choice | None":
    """Return the newest choice for these sizes that this machine measured and this model predicted, or None."""
    from rlxjax.calibration import current_fingerprint, fingerprint_differences
    from rlxjax.choices import Memory

    here = current_fingerprint()
    label = ", ".join(f"{name} {size:.0f}" for name, size in sizes.items())
    for one in Memory().all(kind=calibrated.model.name):
        is_here = one.machine and not fingerprint_differences(one.machine, here)
        if is_here and one.label == label and is_by(one, calibrated):
            return one
    return None


def is_by(one: "Choice", calibrated: "CalibratedModel") -> bool:
    from rlxjax.choices import digest_of_model

    return one.calibration == digest_of_model(calibrated)


def summary(one: "Choice") -> dict[str, Any]:
    return {
        **{name: getattr(one, name) for name in ("key", "kind", "label", "name", "by", "is_tie")},
        "time_ns": one.chosen.measured_ns,
        "next_best": None if one.next_best is None else one.next_best.name,
        "next_best_ns": None if one.next_best is None else one.next_best.measured_ns,
        "created": one.created,
    }


def row_of(one: "Choice") -> Row:
    said = summary(one)
    return {
        **{"workload": one.label, "model": one.kind, "chosen": one.name, "by": one.by, "a tie": one.is_tie},
        **{"takes (ns)": said["time_ns"], "next best": said["next_best"], "its time (ns)": said["next_best_ns"]},
    }


def in_words(one: "Choice") -> str:
    timed = sorted((way.measured_ns, way.name) for way in one.alternatives if way.measured_ns is not None)
    times = ", ".join(f"{name} {time_text(time_ns)}" for time_ns, name in timed)
    return f"measured here: {times}; {one.outcome}"
