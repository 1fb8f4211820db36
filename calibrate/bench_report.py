"""What a person reads of a benchmark: times, ratios and growth as tables."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console

from .bench_file import COPY, BenchFile, CellResult, Result
from .printing import ns, number, print_table, say

#: The path of ours whose ratios stand in the tables; the file has those of all.
SHOWN_OURS = ("fused", "auto", "host")
LESS, MORE = "less is better", "more is better"


def print_bench(content: BenchFile, console: Console) -> None:
    """Print times and ratios for each n_fft and k, then means, growth, and what is absent."""
    groups: dict[tuple[int, int, int], list[CellResult]] = defaultdict(list)
    for cell in content.cells:
        groups[cell.n_fft, cell.k, cell.n_segments].append(cell)
    own = next((name for name in SHOWN_OURS if name in content.ours), "")
    for (n_fft, k, n_segments), cells in groups.items():
        where = f"n_fft {n_fft}, k {k}, {n_segments} segment{'s' if n_segments > 1 else ''}"
        times = {name: [_time(cell.results.get(name)) for cell in cells] for name in content.versions}
        ratios = _by_name({f"/ {peer}": ratio for peer, ratio in cell.ratios.get(own, {}).items()} for cell in cells)
        shares = _by_name({own: cell.copy_share[own]} if own in cell.copy_share else {} for cell in cells)
        for title, rows in (
            (f"{where}: ns, the least of all rounds ({LESS})", times),
            (f"{where}: time of {own} / time of a peer ({LESS})", ratios),
            (f"{where}: share of {COPY}'s bandwidth ({MORE})", shares),
        ):
            _print(console, title, ["at batch", *(f"{cell.batch:,}" for cell in cells)], rows)
    means = _by_name({f"/ {peer}": ratio for peer, ratio in by.items()} for by in content.mean_ratios.values())
    title = f"Time of ours / time of a peer, geometric mean over workloads ({LESS})"
    _print(console, title, ["ours", *content.mean_ratios], means)
    slopes = _by_name({"theory": g.theory} | g.slopes for g in content.growth)
    title = f"Growth of the time: slope on log-log axes ({LESS})"
    _print(console, title, ["in", *(f"{g.axis} at {g.fixed}" for g in content.growth)], slopes)
    for text in refused(content):
        say(text, to=console)
    for name, reason in content.skipped.items():
        say(f"skipped {name}: {reason}", to=console)


def refused(content: BenchFile) -> list[str]:
    """Return a sentence on every contender that was wrong or failed in a cell."""
    return [
        f"{name}, n_fft {cell.n_fft}, batch {cell.batch}, k {cell.k}: {result.status}: {result.note}"
        for cell in content.cells
        for name, result in cell.results.items()
        if result.status != "measured"
    ]


def _by_name(columns: Iterable[Mapping[str, float]]) -> dict[str, list[str]]:
    """Return a row of texts for every name, a text for each column."""
    columns = list(columns)
    names = dict.fromkeys(name for column in columns for name in column)
    return {name: [number(column[name]) if name in column else "-" for column in columns] for name in names}


def _print(console: Console, title: str, headings: Sequence[str], rows: Mapping[str, Sequence[str]]) -> None:
    if rows:
        print_table(console, title, headings, [[name, *row] for name, row in rows.items()])


def _time(result: Result | None) -> str:
    if result is None:
        return "-"
    return ns(result.min_ns) if result.min_ns else result.status
