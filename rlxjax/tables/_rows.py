"""Programs that evaluate rows. A row holds a pair of profiles for a gate, or the inputs of a model."""

import dataclasses
import functools
import hashlib
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from rlxjax._checks import fields_of
from rlxjax._counts import as_temperature
from rlxjax.calibration import CalibratedModel
from rlxjax.gate import FusionBenefit, IoFusionGate
from rlxjax.graph import GraphIoProfile

#: The columns that a gate can add to the output, in order.
GATE_COLUMNS = ("score_ns", "should_fuse", "fuse_probability", "fuse_log_odds")
#: The columns that a calibrated model can add. `terms` stands for several columns, each with the name of a term.
MODEL_COLUMNS = "pick", "time_ns", "low_ns", "high_ns", "terms", "margin_ns", "probability", "undecided", "in_domain"
#: Three numbers of rows: of a chunk for a processor, of a chunk for an accelerator, and the least in a program.
CHUNK_ROWS, ACCELERATOR_ROWS, LEAST_ROWS = 2048, 2**17, 2**14
#: The optional field that names the strategy to predict in each row.
STRATEGY = "strategy"

#: A dict from field to the field's array in a batch, `[rows]`, or `[rows, entries]` for lists: int64, float64 or codes.
Columns = Mapping[str, Any]


class Field(NamedTuple):
    """A value that a row needs: a number, a name, or a list of numbers."""

    what: str  # for messages: "count"
    least: float = 0.0
    step: int = 0  # values must be multiples of this step; 0 allows any value
    default: float | str | None = None  # the value without a column; None makes the column required
    is_list: bool = False  # a row has a list of numbers, padded with zeros
    names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class RowProgram:
    """A traceable function that takes the fields of rows, and returns outputs and whether each row has an answer."""

    name: str  # for messages and the manifest
    identity: Mapping[str, Any]  # everything that determines the answers, as JSON
    fields: Mapping[str, Field]
    outputs: Mapping[str, str | tuple[str, ...]]  # "float32", "bool", or the tuple of possible names
    program: Callable[[Columns], tuple[dict[str, Array], Array]]
    check: Callable[[Columns], None] | None = None  # raises `ValueError` for an impossible row
    keeps_fields: bool = False  # the input columns are written, too


def gate_rows(gate: IoFusionGate, want: Sequence[str] | None = None, temperature_ns: float | None = None) -> RowProgram:
    """Return a gate's program. Its fields are the counts of a profile, each with the prefix `before_` and `after_`."""
    names = _wanted(want, GATE_COLUMNS, [*GATE_COLUMNS][: 2 if temperature_ns is None else 3])
    if temperature_ns is None and (soft := [name for name in names if name.startswith("fuse_")]):
        raise ValueError(f"temperature_ns: expected a temperature for {soft[0]}, got none")
    soft_ns = 1.0 if temperature_ns is None else float(as_temperature(temperature_ns))
    rates = {name: float(rate) for name, rate in fields_of(gate).items()}
    counts = [field.name for field in dataclasses.fields(GraphIoProfile)]

    def saved(before: Array, after: Array) -> Array:
        if before.dtype != after.dtype:  # integers of the same type are subtracted exactly
            before, after = before.astype(float), after.astype(float)
        return (before - after).astype(float)

    def program(columns: Columns) -> tuple[dict[str, Array], Array]:
        benefit = FusionBenefit(*(saved(columns[f"before_{name}"], columns[f"after_{name}"]) for name in counts))
        own = IoFusionGate(**rates)
        score_ns = own.score_ns(benefit)
        answers = {
            "score_ns": score_ns,
            "should_fuse": score_ns >= own.min_gain_ns,
            "fuse_probability": own.fuse_probability(benefit, temperature_ns=soft_ns),
            "fuse_log_odds": own.fuse_log_odds(benefit, temperature_ns=soft_ns),
        }
        return _narrow(answers, names), ~jnp.isnan(score_ns)

    return RowProgram(
        name="pairs of profiles by a gate",
        identity={"gate": rates, "temperature_ns": temperature_ns, "want": names},
        fields={f"{side}_{name}": Field("count") for side in ("before", "after") for name in counts},
        outputs={name: "bool" if name == "should_fuse" else "float32" for name in names},
        program=program,
    )


def model_rows(
    calibrated: CalibratedModel,
    want: Sequence[str] | None = None,
    strategy: str | None = None,
    level: float = 0.9,
    has_strategy_column: bool = False,
) -> RowProgram:
    """Return the program for a calibrated model. The fields of a row are the model's inputs."""
    model, impossible = calibrated.model, calibrated.model.impossible(calibrated.posterior.facts)
    variants = tuple(n for n in calibrated.strategies if not set(model.strategies[n].variants) <= set(impossible))
    default = ("pick", "time_ns", "probability") if len(variants) > 1 else ("time_ns", "low_ns", "high_ns")
    names = _wanted(want, MODEL_COLUMNS, default)
    picks = [name for name in names if name in ("pick", "margin_ns", "probability", "undecided")]
    if len(variants) < 2 and picks:
        raise ValueError(f"want: {picks[0]} needs two strategies, but {model.name} has only {', '.join(variants)}")
    if strategy is not None and has_strategy_column:
        raise ValueError("strategy: expected a name or a column of names, got both")
    if strategy is not None and strategy not in variants:
        raise ValueError(f"strategy: expected one of {', '.join(variants)}, got {strategy!r}")
    timed = variants if strategy is None else (strategy,)
    fields: dict[str, Field] = {}
    for name, entry in model.inputs.items():
        step = entry.step if entry.step > 1 else 0
        least = max(entry.least, min(entry.step, 1) if entry.default is None else 0)  # not 0
        fields[name] = Field(f"number of {entry.unit}", least, step, entry.default, is_list=entry.is_list)
    shapes = {name: (1, 1) if field.is_list else (1,) for name, field in fields.items()}
    one = {name: jax.ShapeDtypeStruct(shape, np.dtype("float64")) for name, shape in shapes.items()}
    if has_strategy_column:
        fields[STRATEGY] = Field("strategy", names=variants)
        one[STRATEGY] = jax.ShapeDtypeStruct((1,), np.dtype("int8"))

    def program(columns: Columns) -> tuple[dict[str, Array], Array]:
        sizes: dict[str, Any] = {name: columns[name].astype(float) for name in model.inputs}
        found = calibrated.decided(**sizes, candidates=variants)
        place = columns[STRATEGY] if has_strategy_column else found.place
        is_of_pick = timed is variants and not has_strategy_column
        estimates: list[Any] = [found] if is_of_pick else [calibrated.estimate(name, **sizes) for name in timed]

        def of_own(each: Sequence[Array]) -> Array:
            return each[0] if len(each) == 1 else jnp.select([place == i for i in range(len(each))], list(each))

        time_ns = of_own([one.time_ns for one in estimates])
        low_ns, high_ns = map(of_own, zip(*(calibrated.bounds_ns(one, level) for one in estimates), strict=True))
        answers = {"pick": found.place.astype("int8"), "time_ns": time_ns, "low_ns": low_ns, "high_ns": high_ns}
        terms: list[Any] = [calibrated.terms_ns(one, **sizes) for one in timed] if "terms" in names else [{}]
        answers |= {term: of_own([one[term] for one in terms]) for term in terms[0]}
        answers |= {"margin_ns": found.margin_ns, "probability": found.probability, "undecided": ~found.is_sure}
        answers["in_domain"] = jnp.broadcast_to(calibrated.in_domain(**sizes), time_ns.shape)
        return _narrow(answers, [*names, *terms[0]]), jnp.isfinite(time_ns)

    with jax.enable_x64(True):
        given, _ = jax.eval_shape(lambda columns: (OrderedDict(program(columns)[0]), None), one)
    leaves = jax.tree.leaves((calibrated.posterior, calibrated.pace_log_sd, calibrated.domain))
    numbers = [(leaf.shape, leaf.tobytes()) for leaf in (np.asarray(leaf, float) for leaf in leaves)]
    return RowProgram(
        name=f"runs of {model.name}",
        identity={
            "model": model.name,
            "version": model.version,
            "posterior": hashlib.sha256(pickle.dumps(numbers)).hexdigest(),
            "strategy": "a column" if has_strategy_column else strategy,
            "level": level,
            "want": names,
        },
        fields=fields,
        outputs={name: variants if name == "pick" else own.dtype.name for name, own in given.items()},
        program=program,
        check=lambda columns: model.check({name: np.asarray(columns[name], float) for name in model.inputs}),
        keeps_fields=True,
    )


def _wanted(want: Sequence[str] | None, columns: Sequence[str], default: Sequence[str]) -> list[str]:
    """Return the columns in `want`, or else in `default`, in the order of `columns`."""
    chosen = [*(default if want is None else want)]
    unknown = [repr(name) for name in chosen if name not in columns]
    if unknown or not chosen:
        raise ValueError(f"want: expected some of {', '.join(columns)}, got {unknown[0] if unknown else 'none'}")
    return [name for name in columns if name in chosen]


def _narrow(answers: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
    """Return the answers with the given names. Float answers are converted to float32."""
    own = {name: values for name, values in answers.items() if name in names}
    return {name: values.astype("float32") if values.dtype.kind == "f" else values for name, values in own.items()}


def refused_rows(check: Callable[[Columns], None], columns: Columns) -> dict[int, str]:
    """Return a dict from each row that a check refuses to the reason. The rows are found by bisection."""
    found: dict[int, str] = {}

    def search(rows: np.ndarray) -> None:
        try:
            check({name: values[rows] for name, values in columns.items()})
        except ValueError as refusal:
            if len(rows) == 1:
                found[int(rows[0])] = str(refusal)
            for half in np.array_split(rows, 2) if len(rows) > 1 else ():
                search(half)

    search(np.arange(len(next(iter(columns.values())))))
    return found


class Compiled:
    """A row program, compiled for all devices of this process. Batches are padded, so that few sizes are compiled."""

    def __init__(self, program: RowProgram, devices: Sequence[Any] | None = None) -> None:
        self._program, self._lock = program, threading.Lock()
        self._mesh = Mesh(np.array(jax.local_devices() if devices is None else devices), ("rows",))
        self._compiled: dict[Any, Any] = {}

    def __call__(self, columns: Columns) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return a dict from output to answers, `[rows]`, and whether each row has an answer, `[rows]`."""
        n_rows = len(next(iter(columns.values())))
        share = -(-n_rows // self._mesh.size)
        filled = self._mesh.size * max(LEAST_ROWS, 1 << (share - 1).bit_length())
        if filled != n_rows:
            more = (0, filled - n_rows)
            columns = {name: np.pad(own, [more, *[(0, 0)] * (own.ndim - 1)], "edge") for name, own in columns.items()}
        with jax.enable_x64(True):
            if self._mesh.size > 1:
                columns = jax.device_put(columns, NamedSharding(self._mesh, PartitionSpec("rows")))
            answers, is_answer = self._of(columns)(columns)
            return {name: np.asarray(own)[:n_rows] for name, own in answers.items()}, np.asarray(is_answer)[:n_rows]

    def _of(self, columns: Columns) -> Callable:
        """Return the program, compiled for the dtypes and shapes of the columns."""
        key = tuple((name, values.dtype, values.shape) for name, values in columns.items())
        with self._lock:
            if key not in self._compiled:
                is_cpu = self._mesh.devices.flat[0].platform == "cpu"
                run: Any = functools.partial(_in_chunks, self._program, CHUNK_ROWS if is_cpu else ACCELERATOR_ROWS)
                if self._mesh.size > 1:
                    rows = PartitionSpec("rows")
                    run = jax.shard_map(run, mesh=self._mesh, in_specs=rows, out_specs=rows, check_vma=False)
                self._compiled[key] = jax.jit(run).lower(columns).compile()
            return self._compiled[key]


def _in_chunks(program: RowProgram, most: int, columns: Columns) -> Any:
    n_rows = len(next(iter(columns.values())))  # a power of two
    chunks = jax.tree.map(lambda column: column.reshape(-1, min(most, n_rows), *column.shape[1:]), columns)
    return jax.tree.map(jnp.ravel, jax.lax.map(program.program, chunks))
