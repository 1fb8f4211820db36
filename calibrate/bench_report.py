"""What a person reads of a benchmark: times, ratios and growth as tables."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from .bench_file import COPY, BenchFile, CellResult

#: The path of ours whose ratios stand in the tables; the file has those of all.
SHOWN_OURS = ("fused", "auto", "host")


def print_bench(content: BenchFile, console: Console) -> None:
    """Print times and ratios for each n_fft and k, then means, growth, and what is absent."""
    groups: dict[tuple[int, int, int], list[CellResult]] = {}
    for cell in content.cells:
        groups.setdefault((cell.n_fft, cell.k, cell.n_segments), []).append(cell)
    own = next((name for name in SHOWN_OURS if name in content.ours), None)
    for (n_fft, k, n_segments), cells in groups.items():
        where = f"n_fft {n_fft}, k {k}, {n_segments} segment{'s' if n_segments > 1 else ''}"
        console.print(_time_table(f"{where}: ms, minimum of all rounds", cells, list(content.versions)))
        ratios = [{f"/ {peer}": r for peer, r in cell.ratios.get(own or "", {}).items()} for cell in cells]
        shares = [{f"share of {COPY}": s for name, s in cell.copy_share.items() if name == own} for cell in cells]
        rows = {f"{cell.batch:,}": r | s for cell, r, s in zip(cells, ratios, shares, strict=True)}
        if any(rows.values()):
            title = f"{where}: {own} / peer, and its share of the bandwidth of a copy"
            console.print(_table(title, "batch", rows))
    if content.mean_ratios:
        columns = {name: {f"/ {p}": r for p, r in by.items()} for name, by in content.mean_ratios.items()}
        console.print(_table("Ours over peer, geometric mean over all cells", "ours", columns))
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


def _time_table(title: str, cells: Sequence[CellResult], names: Sequence[str]) -> Table:
    table = Table(title=title)
    table.add_column("batch", justify="right")
    for name in names:
        table.add_column(name, justify="right")
    for cell in cells:
        shown = []
        for name in names:
            result = cell.results.get(name)
            best = None if result is None else result.min_ns
            shown.append(_number(best / 1e6) if best else result.status if result else "-")
        table.add_row(f"{cell.batch:,}", *shown)
    return table


def _table(title: str, first: str, rows: Mapping[str, Mapping[str, float]]) -> Table:
    table = Table(title=title)
    table.add_column(first, justify="right")
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    for column in columns:
        table.add_column(column, justify="right")
    for heading, row in rows.items():
        table.add_row(heading, *(_number(row[column]) if column in row else "-" for column in columns))
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"
