"""What a person reads of a benchmark: times, ratios and growth as tables."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from .bench_file import COPY, BenchFile, CellResult, Result
from .report import number, right

#: The path of ours whose ratios stand in the tables; the file has those of all.
SHOWN_OURS = ("fused", "auto", "host")


def print_bench(content: BenchFile, console: Console) -> None:
    """Print times and ratios for each n_fft and k, then means, growth, and what is absent."""
    groups: dict[tuple[int, int, int], list[CellResult]] = defaultdict(list)
    for cell in content.cells:
        groups[cell.n_fft, cell.k, cell.n_segments].append(cell)
    own = next((name for name in SHOWN_OURS if name in content.ours), "")
    for (n_fft, k, n_segments), cells in groups.items():
        where = f"n_fft {n_fft}, k {k}, {n_segments} segment{'s' if n_segments > 1 else ''}"
        console.print(_time_table(f"{where}: ms, minimum of all rounds", cells, list(content.versions)))
        rows = {f"{cell.batch:,}": _ratios_of(own, cell) for cell in cells}
        if any(rows.values()):
            title = f"{where}: {own} / peer, and its share of the bandwidth of a copy"
            console.print(_table(title, "batch", rows))
    if content.mean_ratios:
        means = {name: {f"/ {p}": r for p, r in by.items()} for name, by in content.mean_ratios.items()}
        console.print(_table("Ours over peer, geometric mean over all cells", "ours", means))
    if content.growth:
        slopes = {f"{g.axis} at {g.fixed}": {"theory": g.theory} | g.slopes for g in content.growth}
        console.print(_table("Growth of the time, slope on log-log axes", "in", slopes))
    for cell in content.cells:
        for name, result in cell.results.items():
            if result.status != "measured":
                where = f"n_fft {cell.n_fft}, batch {cell.batch}, k {cell.k}"
                console.print(f"{name}, {where}: {result.status}: {result.note}", highlight=False, markup=False)
    for name, reason in content.skipped.items():
        console.print(f"skipped {name}: {reason}", highlight=False, markup=False)
    if content.interrupted:
        console.print("interrupted: this is what was measured so far", highlight=False)


def _ratios_of(own: str, cell: CellResult) -> dict[str, float]:
    """Return the ratios of one of our paths to the peers, and its share of the copy's bandwidth."""
    shown = {f"/ {peer}": ratio for peer, ratio in cell.ratios.get(own, {}).items()}
    return shown | ({f"share of {COPY}": cell.copy_share[own]} if own in cell.copy_share else {})


def _time_table(title: str, cells: Sequence[CellResult], names: Sequence[str]) -> Table:
    table = Table(*right("batch", *names), title=title)
    for cell in cells:
        table.add_row(f"{cell.batch:,}", *(_time(cell.results.get(name)) for name in names))
    return table


def _time(result: Result | None) -> str:
    if result is None:
        return "-"
    return number(result.min_ns / 1e6) if result.min_ns else result.status


def _table(title: str, first: str, rows: Mapping[str, Mapping[str, float]]) -> Table:
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    table = Table(*right(first, *names), title=title)
    for heading, row in rows.items():
        table.add_row(heading, *(number(row[name]) if name in row else "-" for name in names))
    return table
