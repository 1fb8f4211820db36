"""Add columns to an Arrow table: the answers of a gate or of a calibrated model for each row."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlxjax._checks import fields_of
from rlxjax._counts import as_temperature
from rlxjax._values import Handle, handle
from rlxjax.calibration import CalibratedModel
from rlxjax.extras import require
from rlxjax.fit import Input, all_inputs, check_size, check_takes_sizes
from rlxjax.gate import FusionBenefit, IoFusionGate, fusion_benefit
from rlxjax.graph import GraphIoProfile

if TYPE_CHECKING:
    import pyarrow

#: The rows of a gate's and of a model's program. Longer batches are divided, and the rest of a batch is padded.
GATE_ROWS, MODEL_ROWS = 2**17, 2**11
#: The most models whose programs are kept.
MOST_PROGRAMS = 16
#: The column with the reason why a row has no answer.
REJECTED = "rejected"
#: The columns that a gate and a model can add, with their types in Arrow.
TYPES = {
    **{"score_ns": "float32", "should_fuse": "bool", "fuse_probability": "float32"},
    **{"pick": "string", "time_ns": "float32", "low_ns": "float32", "high_ns": "float32"},
    **{"margin_ns": "float32", "probability": "float32", "in_domain": "bool"},
}

#: Columns by name, `[rows]` each.
Columns = Mapping[str, Any]


class _Program(NamedTuple):
    """What a gate or a model needs of a row, and what it adds."""

    inputs: Mapping[str, Input]
    check: Callable[[Columns], None]  # raises a ValueError if the values of a row cannot stand together
    prepared: Callable[[Columns], dict[str, np.ndarray]]  # returns the arguments of `run` for possible rows
    run: Callable[[Columns], dict[str, jax.Array]]  # returns the added columns of a chunk of rows
    chunk_rows: int
    adds: tuple[str, ...]
    picks: tuple[str, ...] = ()  # the names to which the numbers in the column `pick` refer


def evaluate(
    table: Any,
    what: IoFusionGate | CalibratedModel,
    *,
    temperature_ns: float | None = None,
    strategy: str | None = None,
    level: float = 0.9,
) -> "pyarrow.Table":
    """Return a table with more columns: the answer of a gate or of a calibrated model for each row.

    A gate adds `score_ns`, `should_fuse` and, with a temperature, `fuse_probability`. A model adds `pick`, `time_ns`,
    `low_ns`, `high_ns`, `margin_ns`, `probability` and `in_domain`; for a single strategy, `time_ns`, `low_ns`,
    `high_ns` and `in_domain`. Numbers are float32. Integer counts are subtracted exactly before they become floats.

    A row is rejected if a value is null, or if the gate or the model refuses the row's values. The added columns of a
    rejected row are null, and the last column, `rejected`, gives the reason. In other rows `rejected` is null.

    Args:
        table: a pyarrow table or batch, any object with the method `__arrow_c_stream__` or `__arrow_c_array__` (such as
            a Polars or pandas frame), or a dict of columns. A gate needs the counts of two profiles:
            `before_kernel_launches`, ..., `after_device_traffic_bytes`. A model needs its inputs; the column of an
            input may be absent only if the input has a default.
        what: a gate of numbers, or a calibrated model, such as `rx.default_calibration().of("welch")`.
        temperature_ns: the temperature of a gate's probability, in ns.
        strategy: the strategy for which a model predicts the time. By default, it is the fastest strategy in each row.
        level: the probability of a model's interval from `low_ns` to `high_ns`.

    Raises:
        ValueError: a column is missing, has another type, or has the name of an added column; or an argument is wrong.
        ImportError: pyarrow is not installed.

    Examples:
        >>> from rlxjax.gate import io_fusion_gate_for_target
        >>> counts = {"kernel_launches": [2, 4], "sync_points": [1, 1], "host_output_bytes": [0, 0]}
        >>> rows = {f"{side}_{name}": column for side in ("before", "after") for name, column in counts.items()}
        >>> rows |= {"before_device_traffic_bytes": [2**30, 2**10], "after_device_traffic_bytes": [2**20, None]}
        >>> found = evaluate(rows, io_fusion_gate_for_target("cuda"))
        >>> found.select(["score_ns", "should_fuse", "rejected"]).to_pylist()
        [{'score_ns': 1340866.5, 'should_fuse': True, 'rejected': None},
         {'score_ns': None, 'should_fuse': None,
          'rejected': 'after_device_traffic_bytes: expected a number, got null'}]
    """
    require("pyarrow", "scale")
    import pyarrow as pa

    if isinstance(what, IoFusionGate):
        if strategy is not None:
            raise ValueError("strategy: expected none with a gate, which has no strategies")
        program = _gate_program(what, temperature_ns)
    elif isinstance(what, CalibratedModel):
        if temperature_ns is not None:
            raise ValueError("temperature_ns: expected none with a calibrated model, got a temperature")
        program = _model_program(handle(what), strategy, level)
    else:
        raise ValueError(f"what: expected an IoFusionGate or a CalibratedModel, got {type(what).__name__}")
    rows = _table(table)
    for name in (*program.adds, REJECTED):
        if name in rows.column_names:
            raise ValueError(f"{name}: expected no column of this name, since `evaluate` adds it; rename your column")
    reasons: dict[int, str] = {}  # by row
    columns = {
        name: _numbers(rows, name, entry, reasons)
        for name, entry in program.inputs.items()
        if name in rows.column_names or entry.default is None
    }
    _reject(program, columns, reasons)
    good = _good(rows.num_rows, reasons)
    found = _in_chunks(program, {name: _at(values, good) for name, values in columns.items()}, len(good))
    cost = next((found[name] for name in ("score_ns", "time_ns") if name in found), good)
    for row in good[~np.isfinite(cost)].tolist():
        reasons[row] = "expected a finite time, got none for these sizes"
    is_bad, said = None, pa.nulls(rows.num_rows, "string")
    if reasons:
        is_bad = np.isin(np.arange(rows.num_rows), [*reasons])
        said = pa.array([reasons.get(row) for row in range(rows.num_rows)], "string")
    for name, values in found.items():
        if len(good) < rows.num_rows:
            each = np.zeros(rows.num_rows, values.dtype)
            each[good] = values
            values = each
        if name == "pick":
            values = np.array(program.picks, object)[values]
        rows = rows.append_column(name, pa.array(values, TYPES[name], mask=is_bad))
    return rows.append_column(REJECTED, said)


def _gate_program(gate: IoFusionGate, temperature_ns: float | None) -> _Program:
    rates = fields_of(gate)
    if wrong := next((name for name, rate in rates.items() if np.ndim(rate)), None):
        raise ValueError(f"what: expected a gate of numbers, got an array for {wrong}")
    soft_ns = 1.0 if temperature_ns is None else float(as_temperature(temperature_ns))
    names = [field.name for field in dataclasses.fields(GraphIoProfile)]
    own = IoFusionGate(**{name: float(rate) for name, rate in rates.items()})
    adds = ("score_ns", "should_fuse", "fuse_probability")[: 2 if temperature_ns is None else 3]

    def saved(columns: Columns) -> dict[str, np.ndarray]:
        before, after = (GraphIoProfile(*(columns[f"{side}_{name}"] for name in names)) for side in ("before", "after"))
        benefit = fields_of(fusion_benefit(before, after))
        return {name: np.asarray(counts, np.float64) for name, counts in benefit.items()}

    def run(benefit: Columns) -> dict[str, jax.Array]:
        found = own.evaluate(FusionBenefit(**benefit), temperature_ns=soft_ns)
        return {name: getattr(found, name) for name in adds}

    inputs = {f"{side}_{name}": Input("counts", least=0, step=0) for side in ("before", "after") for name in names}
    return _Program(inputs, lambda _: None, saved, run, GATE_ROWS, adds)


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def _model_program(given: Handle, strategy: str | None, level: float) -> _Program:
    known: Any = given()
    model, impossible = known.model, {*known.model.impossible(known.posterior.facts)}
    check_takes_sizes(model)
    names = [name for name, own in model.strategies.items() if not own.fixed]
    names = tuple(name for name in names if not impossible.issuperset(model.strategies[name].variants))
    if strategy is None and len(names) == 1:
        strategy = names[0]
    if strategy not in names and (strategy is not None or not model.is_choice):
        raise ValueError(f"strategy: expected one of {', '.join(names)}, got {strategy!r}")
    if not 0.0 < level < 1.0:
        raise ValueError(f"level: expected a probability between 0 and 1, got {level}")
    of_pick = ("pick", "time_ns", "low_ns", "high_ns", "margin_ns", "probability", "in_domain")
    adds = of_pick if strategy is None else ("time_ns", "low_ns", "high_ns", "in_domain")

    def check(columns: Columns) -> None:
        model.check(prepared(columns))

    def prepared(columns: Columns) -> dict[str, np.ndarray]:
        sizes = all_inputs(model, strategy or names[0], (), columns)
        return {name: np.asarray(values, np.float64) for name, values in sizes.items()}

    @jax.jit
    def run(sizes: Columns) -> dict[str, jax.Array]:
        if strategy is None:
            found = known.decided(**sizes, candidates=names)
            answers = {"pick": found.place, "margin_ns": found.margin_ns, "probability": found.probability}
        else:
            found, answers = known.estimate(strategy, **sizes), {}
        low_ns, high_ns = known.bounds_ns(found, level)
        inside = jnp.broadcast_to(known.in_domain(**sizes), found.time_ns.shape)
        answers |= {"time_ns": found.time_ns, "low_ns": low_ns, "high_ns": high_ns, "in_domain": inside}
        return answers

    return _Program(model.inputs, check, prepared, run, MODEL_ROWS, adds, names)


def _table(given: Any) -> "pyarrow.Table":
    """Return any table in memory as a pyarrow table."""
    import pyarrow as pa

    try:
        return pa.table(given)
    except (TypeError, ValueError, pa.ArrowException) as reason:
        collect = "; call its `collect()` first" if hasattr(given, "collect") else f" ({reason})"
        kind = f"{type(given).__module__}.{type(given).__name__}"
        raise ValueError(f"table: expected a table in memory, such as a pyarrow table, got {kind}{collect}") from None


def _numbers(table: "pyarrow.Table", name: str, entry: Input, reasons: dict[int, str]) -> Any:
    """Return a column of numbers. Nulls become 0, and each null is a reason."""
    import pyarrow as pa

    if (count := table.column_names.count(name)) != 1:
        said = f"{count}" if count else f"only {', '.join(table.column_names) or 'an empty table'}"
        raise ValueError(f"{name}: expected a column with the number of {entry.unit}, got {said}")
    column = table.column(name)
    if pa.types.is_null(column.type):
        column = column.cast("float64")
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise ValueError(f"{name}: expected integers or floats, got {column.type}; cast the column first")
    if column.null_count:
        for row in np.flatnonzero(column.is_null()).tolist():
            reasons.setdefault(row, f"{name}: expected a number, got null")
    if pa.types.is_floating(column.type):
        column = column.cast("float64")
    return (column.fill_null(0) if column.null_count else column).to_numpy()


def _good(n_rows: int, reasons: Mapping[int, str]) -> np.ndarray:
    """Return the rows without a reason against them."""
    is_good = np.ones(n_rows, bool)
    is_good[[*reasons]] = False
    return np.flatnonzero(is_good)


def _reject(program: _Program, columns: Columns, reasons: dict[int, str]) -> None:
    """Find the reason of each row that the program refuses: first column by column, then row by row."""
    n_rows = max(map(len, columns.values()), default=0)
    for name, values in columns.items():
        entry = program.inputs[name]
        check = functools.partial(_check_column, name, entry)
        with contextlib.suppress(ValueError):
            check(values)
            continue
        rows = _good(n_rows, reasons)
        each, place = np.unique(values[rows], return_inverse=True)
        for bad, reason in _refused(check, each).items():
            reasons.update(dict.fromkeys(rows[place == bad].tolist(), reason))
    rows = _good(n_rows, reasons)

    def check_rows(of: np.ndarray) -> None:
        program.check({name: _at(values, of) for name, values in columns.items()})

    for bad, reason in _refused(check_rows, rows).items():
        reasons[int(rows[bad])] = reason


def _check_column(name: str, entry: Input, values: np.ndarray) -> None:
    # Predictions are smooth in sizes, so a size may lie between whole numbers.
    check_size(values, name, entry, entry.step if entry.step > 1 else 0)


def _refused(check: Callable[[np.ndarray], None], values: np.ndarray) -> dict[int, str]:
    """Return the reasons by the places of the values that a check of several values refuses, by bisection."""
    found: dict[int, str] = {}

    def search(places: np.ndarray) -> None:
        try:
            check(values[places])
        except ValueError as refusal:
            if len(places) == 1:
                found[int(places[0])] = str(refusal)
                return
            for half in np.array_split(places, 2):
                search(half)

    if len(values):
        search(np.arange(len(values)))
    return found


def _at(values: Any, rows: np.ndarray) -> Any:
    return values if len(rows) == len(values) else values[rows]


def _in_chunks(program: _Program, columns: Columns, n_rows: int) -> dict[str, np.ndarray]:
    """Return the added columns of rows that are possible."""
    found = {name: np.zeros(n_rows, np.int64 if name == "pick" else TYPES[name]) for name in program.adds}
    given = program.prepared(columns) if n_rows else {}
    for start in range(0, n_rows, program.chunk_rows):
        stop = min(start + program.chunk_rows, n_rows)
        more = (0, start + program.chunk_rows - stop)
        chunk = {name: own[start:stop] if own.ndim else own for name, own in given.items()}
        if more[1]:
            widths = [more, (0, 0)]  # a list's entries have an axis of their own
            chunk = {name: np.pad(own, widths[: own.ndim], "edge") if own.ndim else own for name, own in chunk.items()}
        with jax.enable_x64(True):
            answers = program.run(chunk)
        for name, values in found.items():
            values[start:stop] = np.asarray(answers[name])[: stop - start]
    return found
