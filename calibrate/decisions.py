"""Choices that were measured: commands to see, pin, forget and move them, and what explanations say of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .command_line import NOT_WRITTEN_STATUS, AsJson, epilog, one_line_errors, set_up_jax, warn
from .terminal import Progress, console, counted, json_text, ns, print_table, say

if TYPE_CHECKING:
    from rlxjax.calibration import CalibratedModel
    from rlxjax.choices import Choice, Memory, Way

#: Characters of a key that are shown at least, and of a workload at most.
KEY_WIDTH, LABEL_WIDTH = 8, 44
Key = Annotated[str, typer.Argument(help="The key of a decision, or the start of it.")]

decisions = typer.Typer(help="See, pin, forget, export and import what was decided by measuring.")


def _memory() -> "Memory":
    from rlxjax.choices import Memory

    return Memory(strict=True)


@decisions.command("list", epilog=epilog("decisions list"))
@one_line_errors
def list_decisions(as_json: AsJson = False) -> None:
    """List what is remembered, the newest first: what runs, by what it was chosen, and the next best."""
    memory = _memory()
    found = memory.all()
    if as_json:
        typer.echo(json_text({"decisions": [summary(one) for one in found]}))
    elif not found:
        say(f"nothing is remembered in {memory.path}")
    else:
        headings = ["key", "kind", "workload", "chosen", "by", "ns", "next best", "its ns", "when, UTC"]
        length = _key_length([one.key for one in found])
        print_table(console(), counted(len(found), "decision"), headings, [_row(one, length) for one in found])


def _row(one: "Choice", length: int) -> list[str]:
    """Return a decision as a row of the table, with so many characters of its key."""
    label = one.label if len(one.label) <= LABEL_WIDTH else f"{one.label[: LABEL_WIDTH - 3]}..."
    by = ", ".join([one.by, *(["tie"] if one.is_tie else [])])
    next_best = ("-", "-") if one.next_best is None else (one.next_best.name, _time(one.next_best.measured_ns))
    when = one.created[:16].replace("T", " ")
    return [one.key[:length], one.kind, label, one.name, by, _time(one.chosen.measured_ns), *next_best, when]


def _key_length(keys: Sequence[str]) -> int:
    """Return so many characters of keys that no two are alike."""
    return next(n for n in range(KEY_WIDTH, KEY_WIDTH + max(map(len, keys))) if len({k[:n] for k in keys}) == len(keys))


def _time(time_ns: float | None) -> str:
    return "-" if time_ns is None else ns(time_ns)


@decisions.command("show", epilog=epilog("decisions show"))
@one_line_errors
def show(key: Key, as_json: AsJson = False) -> None:
    """Show one decision: what each alternative was predicted to take and took, how sure it is, and which machine."""
    one = _found(_memory(), key)
    if as_json:
        typer.echo(json_text(one.as_dict()))
        return
    say(f"{one.kind}, {one.label}: {one.name}, {one.by}")
    say(_how_sure(one))
    headings = ["alternative", "predicted ns", "from", "to", "measured ns", "from", "to"]
    print_table(console(), "What a call takes", headings, map(_times, one.alternatives))
    for alternative in one.alternatives:
        if alternative.failed:
            say(f"{alternative.name} could not run: {alternative.failed}")
    assert (machine := one.machine) is not None  # what is remembered was measured on one
    device = " ".join(dict.fromkeys((machine.platform, machine.device_kind)))
    software = f"jax {machine.jax}, jaxlib {machine.jaxlib}"
    cores = counted(machine.cores, "core")
    say(f"measured {one.created} on {machine.cpu_model}, {cores}, {device}, {software}")
    say(f"key {one.key}")


def _how_sure(one: "Choice") -> str:
    """Return how clear the measurement was, in a sentence; a pin says what it overrules."""
    name, within = one.without_pin or one.name, f"within {100 * one.regret:.3g} %"
    clear = f"{name} is the fastest {within}, probability {100 * (one.probability or 0.0):.1f} %"
    if one.is_tie:
        clear = f"a tie: others are as fast as {name} {within}"
    return f"{'measured without the pin: ' if one.without_pin else ''}{clear}; {counted(one.rounds, 'round')}"


def _times(way: "Way") -> list[str]:
    none = (None, None)
    predicted, measured = way.predicted_interval_ns or none, way.measured_interval_ns or none
    return [way.name, *map(_time, (way.predicted_ns, *predicted, way.measured_ns, *measured))]


def _found(memory: "Memory", start: str) -> "Choice":
    """Return the decision whose key begins so."""
    if (found := memory.look_up(memory.key_of(start))) is None:
        raise ValueError(f"{start!r}: forgotten by another process meanwhile")
    return found


@decisions.command("pin", epilog=epilog("decisions pin"))
@one_line_errors
def pin(
    key: Key,
    name: Annotated[str | None, typer.Argument(help="The alternative that is to run.")] = None,
    off: Annotated[bool, typer.Option("--off", help="Take the pin away.")] = False,
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


@decisions.command("forget", epilog=epilog("decisions forget"))
@one_line_errors
def forget(
    keys: Annotated[
        list[str] | None, typer.Argument(help="Keys of decisions, or the starts of them.", metavar="KEY")
    ] = None,
    all: Annotated[bool, typer.Option("--all", help="Forget everything, pins too.")] = False,
) -> None:
    """Forget decisions, pins too: the next call decides anew."""
    if bool(keys) == all:
        raise ValueError(f"expected keys or --all, got {'both' if all else 'neither'}")
    memory = _memory()
    count = memory.forget(None if all else sorted({memory.key_of(key) for key in keys or []}))
    say(f"{counted(count, 'decision')} forgotten")


@decisions.command("export", epilog=epilog("decisions export"))
@one_line_errors
def export(file: Annotated[FilePath, typer.Argument(help="The JSON file to write.")]) -> None:
    """Write all that is remembered to a file, for machines of the same kind."""
    say(f"{counted(_memory().export(file), 'decision')} in {file}")


@decisions.command("import", epilog=epilog("decisions import"))
@one_line_errors
def import_decisions(file: Annotated[FilePath, typer.Argument(help="A file of `rlxjax decisions export`.")]) -> None:
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


def decided_here(calibrated: "CalibratedModel", sizes: Mapping[str, float]) -> "Choice | None":
    """Return the newest choice for some sizes that holds on this machine, beside the predictions of this model."""
    from rlxjax.calibration import current_fingerprint, fingerprint_differences
    from rlxjax.choices import Memory

    def is_own(one: "Choice") -> bool:
        return any(run["inputs"] == sizes for own in one.alternatives for run in own.runs)

    here = current_fingerprint()
    found = (one for one in Memory().all(kind=calibrated.model.name) if is_by(one, calibrated) and is_own(one))
    return next((one for one in found if one.machine and not fingerprint_differences(one.machine, here)), None)


def is_by(one: "Choice", calibrated: "CalibratedModel") -> bool:
    """Return whether a calibrated model predicted the alternatives of a choice."""
    from rlxjax.choices import digest_of_model

    return one.calibration == digest_of_model(calibrated)


def summary(one: "Choice") -> dict[str, Any]:
    """Return what JSON says of a choice in a few keys."""
    return {
        "key": one.key,
        "kind": one.kind,
        "label": one.label,
        "name": one.name,
        "by": one.by,
        "is_tie": one.is_tie,
        "time_ns": one.chosen.measured_ns,
        "next_best": None if one.next_best is None else one.next_best.name,
        "next_best_ns": None if one.next_best is None else one.next_best.measured_ns,
        "created": one.created,
    }


def in_words(one: "Choice") -> str:
    """Return what was measured, and what runs by that, in a sentence."""
    timed = sorted((own.measured_ns, own.name) for own in one.alternatives if own.measured_ns is not None)
    times = ", ".join(f"{name} {ns(time_ns)} ns" for time_ns, name in timed)
    tie = " (a tie)" if one.is_tie else ""
    pinned = f"; pinned, and runs: {one.name}" if one.without_pin else ""
    return f"measured here: {times}; chosen: {one.without_pin or one.name}{tie}{pinned}"
