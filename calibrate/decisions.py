"""Choices that were measured: commands to see, pin, forget and move them, and what explanations say of them."""

from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from .command_line import NOT_WRITTEN_STATUS, AsJson, app, command, set_up_jax, warn
from .terminal import Progress, Row, console, counted, json_text, ns, print_rows, say

if TYPE_CHECKING:
    from rlxjax.calibration import CalibratedModel
    from rlxjax.choices import Choice, Memory

#: Characters of a key that are shown at least, and of a workload at most.
KEY_WIDTH, LABEL_WIDTH = 8, 44
Key = Annotated[str, Argument(help="The key of a decision, or the start of it.")]

decisions = typer.Typer(help="See, pin, forget, export and import what was decided by measuring.")
app.add_typer(decisions, name="decisions")


def _memory() -> "Memory":
    from rlxjax.choices import Memory

    return Memory(strict=True)


def _found(memory: "Memory", start: str) -> "Choice":
    if (found := memory.look_up(memory.key_of(start))) is None:
        raise ValueError(f"{start!r}: forgotten by another process meanwhile")
    return found


@command("rlxjax decisions list", of=decisions, name="list")
def list_decisions(as_json: AsJson = False) -> None:
    """List what is remembered, the newest first: what runs, by what it was chosen, and the next best."""
    memory = _memory()
    found = memory.all()
    if as_json:
        typer.echo(json_text({"decisions": [summary(one) for one in found]}))
        return
    if not found:
        say(f"nothing is remembered in {memory.path}")
        return
    keys, length = {one.key for one in found}, KEY_WIDTH
    while len({key[:length] for key in keys}) < len(keys):  # no two are alike
        length += 1
    rows = [
        {"key": one.key[:length]}
        | row_of(one)
        | {"workload": one.label if len(one.label) <= LABEL_WIDTH else f"{one.label[: LABEL_WIDTH - 3]}..."}
        | {"when, UTC": one.created[:16].replace("T", " ")}
        for one in found
    ]
    print_rows(console(), counted(len(found), "decision"), rows)


@command("rlxjax decisions show a4f02c19", of=decisions)
def show(key: Key, as_json: AsJson = False) -> None:
    """Show one decision: what each alternative was predicted to take and took, how sure it is, and which machine."""
    one = _found(_memory(), key)
    if as_json:
        typer.echo(json_text(one.as_dict()))
        return
    say(f"{one.kind}, {one.label}: {one.name}, {one.by}")
    name, within = one.without_pin or one.name, f"within {100 * one.regret:.3g} %"  # a pin says what it overrules
    clear = f"{name} is the fastest {within}, probability {100 * (one.probability or 0.0):.1f} %"
    if one.is_tie:
        clear = f"a tie: others are as fast as {name} {within}"
    say(f"{'measured without the pin: ' if one.without_pin else ''}{clear}; {counted(one.rounds, 'round')}")
    rows = [
        {"alternative": way.name, "predicted (ns)": way.predicted_ns}
        | dict(zip(("from (ns)", "to (ns)"), way.predicted_interval_ns or (None, None), strict=True))
        | {"measured (ns)": way.measured_ns}
        | dict(zip(("at least (ns)", "at most (ns)"), way.measured_interval_ns or (None, None), strict=True))
        for way in one.alternatives
    ]
    print_rows(console(), "What a call takes", rows)
    for way in one.alternatives:
        if way.failed:
            say(f"{way.name} could not run: {way.failed}")
    assert (machine := one.machine) is not None  # what is remembered was measured on one
    device = " ".join(dict.fromkeys((machine.platform, machine.device_kind)))
    software = f"jax {machine.jax}, jaxlib {machine.jaxlib}"
    say(f"measured {one.created} on {machine.cpu_model}, {counted(machine.cores, 'core')}, {device}, {software}")
    say(f"key {one.key}")


@command("rlxjax decisions pin a4f02c19 fused", "rlxjax decisions pin a4f02c19 --off", of=decisions)
def pin(
    key: Key,
    name: Annotated[str | None, Argument(help="The alternative that is to run.")] = None,
    off: Annotated[bool, Option("--off", help="Take the pin away.")] = False,
) -> None:
    """Have one alternative run whatever was measured, so that two runs of a program differ in nothing else."""
    memory = _memory()
    one = _found(memory, key)
    if (name is None) != off:
        got = "none of them" if name is None else f"{name} and --off"
        raise ValueError(f"expected {', '.join(each.name for each in one.alternatives)} or --off, got {got}")
    memory.pin(one.key, name)
    one = _found(memory, one.key)
    say(f"{one.kind}, {one.label}: {one.name}, {one.by}")


@command("rlxjax decisions forget a4f02c19", "rlxjax decisions forget --all", of=decisions)
def forget(
    keys: Annotated[list[str] | None, Argument(help="Keys of decisions, or the starts of them.", metavar="KEY")] = None,
    all: Annotated[bool, Option("--all", help="Forget everything, pins too.")] = False,
) -> None:
    """Forget decisions, pins too: the next call decides anew."""
    if bool(keys) == all:
        raise ValueError(f"expected keys or --all, got {'both' if all else 'neither'}")
    memory = _memory()
    count = memory.forget(None if all else sorted({memory.key_of(key) for key in keys or []}))
    say(f"{counted(count, 'decision')} forgotten")


@command("rlxjax decisions export decisions.json", of=decisions)
def export(file: Annotated[FilePath, Argument(help="The JSON file to write.")]) -> None:
    """Write all that is remembered to a file, for machines of the same kind."""
    say(f"{counted(_memory().export(file), 'decision')} in {file}")


@command(
    "rlxjax decisions import decisions.json",
    statuses={1: "some decisions say what no measurement says, are named and left out"},
    of=decisions,
    name="import",
)
def import_decisions(file: Annotated[FilePath, Argument(help="A file of `rlxjax decisions export`.")]) -> None:
    """Remember what a file holds of machines of the same kind as this one; of one key the newer decision counts."""
    with Progress().waiting("starting JAX"):
        set_up_jax(None)
        done = _memory().load(file)
    say(
        f"{counted(done.taken, 'decision')} taken, {done.known:,} known here already, "
        f"{done.elsewhere:,} of another kind of machine left out"
    )
    for text in done.left_out:
        warn(f"{text}; it is left out")
    if done.left_out:
        raise typer.Exit(NOT_WRITTEN_STATUS)


# --- For explanations and pages ------------------------------------------------------------------


def decided_here(calibrated: "CalibratedModel", sizes: Mapping[str, Any]) -> "Choice | None":
    """Return the newest choice for some sizes that holds on this machine, beside the predictions of this model."""
    from rlxjax.calibration import current_fingerprint, fingerprint_differences
    from rlxjax.choices import Memory

    here = current_fingerprint()
    for one in Memory().all(kind=calibrated.model.name):
        is_of_sizes = any(run["inputs"] == sizes for way in one.alternatives for run in way.runs)
        if is_of_sizes and is_by(one, calibrated) and one.machine and not fingerprint_differences(one.machine, here):
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
    times = ", ".join(f"{name} {ns(time_ns)} ns" for time_ns, name in timed)
    pinned = f"; pinned, and runs: {one.name}" if one.without_pin else ""
    return f"measured here: {times}; chosen: {one.without_pin or one.name}{' (a tie)' if one.is_tie else ''}{pinned}"
