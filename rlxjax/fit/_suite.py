"""What a calibrate job times: a latency model, its cells, and how to make the program of a cell."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from rlxjax._values import FrozenDict

from ._latency_model import Facts, LatencyModel, LatencyPrior, Runs

#: Of the pieces of work of a grid, one in so many is held out.
HELD_OUT_EVERY = 4


@dataclasses.dataclass(frozen=True)
class Cell:
    """One program that is timed.

    Attributes:
        name: unique in its suite.
        variant: of the model.
        inputs: of the model, by name; every cell names the same ones.
        work: what it computes; cells of one work are different ways to do it. The name unless given.
        group: what errors are told apart by: a strategy, or a kind of work. The variant unless given.
        held_out: whether the fit that gives the held-out errors never sees it.
        n_bytes: of the arrays that a run holds at once, as far as that is known.
        compiled: what the compiler made of it, as inputs of another model by name; empty where nothing says.
    """

    name: str
    variant: str
    inputs: Mapping[str, float]
    work: str = ""
    group: str = ""
    held_out: bool = False
    n_bytes: int = 0
    compiled: Mapping[str, float] = FrozenDict()

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", FrozenDict(self.inputs))
        object.__setattr__(self, "compiled", FrozenDict(self.compiled))
        object.__setattr__(self, "work", self.work or self.name)
        object.__setattr__(self, "group", self.group or self.variant)


class Suite:
    """What `rlxjax calibrate --suite module:NAME` times. Derive from this; `model` and `program` are needed.

    Attributes:
        model: the latency model that is fitted.
        runner: version of the programs that are timed: samples of another version are not added to.
        most_error: held-out error up to which the calibration is ready.
        shown: works that are measured first, and printed.
        given: files that the programs run, by name, with their SHA-256.

    Examples:
        >>> import jax.numpy as jnp
        >>> from rlxjax.models import FFT
        >>> class Ffts(Suite):
        ...     model = FFT
        ...     def program(self, cell):
        ...         x = jnp.ones((int(cell.inputs["batch"]), int(cell.inputs["n_fft"])))
        ...         return lambda: jnp.fft.rfft(x)
        >>> Ffts().cells()[0].name
        'fft batch=1 n_fft=2'
    """

    model: LatencyModel
    runner: ClassVar[int] = 1
    most_error: ClassVar[float] = 0.1
    shown: ClassVar[tuple[str, ...]] = ()
    given: Mapping[str, str] = FrozenDict()

    def program(self, cell: Cell) -> Callable[[], Any]:
        """Return what makes one run of a cell when it is called, its arguments made beforehand."""
        raise NotImplementedError

    def cells(self) -> Sequence[Cell]:
        """Return what may be timed, in a fixed order: the model's grid, a quarter of its works held out."""
        return grid_cells(self.model)

    def facts(self) -> Facts:
        """Return how this machine schedules the programs."""
        return self.model.facts

    def start(self, micro_ns: Mapping[str, float]) -> LatencyPrior[Any]:
        """Return what a fit starts from where no other machine is known; micro-benchmarks may say more."""
        del micro_ns
        return self.model.prior

    def as_compiled(self, cell: Cell, program: Callable[[], Any]) -> Cell:
        """Return a cell with what the compiler made of its program, which ran once; the cell alone unless it says."""
        del program
        return cell

    def of_compiled(self) -> "Suite | None":
        """Return the suite that the same samples are fitted by where cells say what was compiled; none here."""
        return None

    def kept(self, cells: Sequence[Cell]) -> Sequence[Cell]:
        """Return cells of earlier samples as they are fitted."""
        return cells


def grid_cells(model: LatencyModel) -> list[Cell]:
    """Return a cell for each run of a model's grid that its `check` lets pass.

    One work in four is held out, evenly spread: every value of an input is seen beside others.
    """
    runs = model.grid()
    columns = {name: np.broadcast_to(np.asarray(column, float), runs.shape) for name, column in runs.inputs.items()}
    places = sum(np.unique(column, return_inverse=True)[1] for column in columns.values())
    varied = [name for name, column in columns.items() if len(np.unique(column)) > 1] or list(columns)
    cells = []
    for row, variant in enumerate(np.broadcast_to(np.asarray(runs.variant), runs.shape).tolist()):
        inputs = {name: float(column[row]) for name, column in columns.items()}
        try:
            model.check(inputs)
        except ValueError:
            continue
        work, name = " ".join(f"{name}={inputs[name]:g}" for name in varied), model.variants[variant]
        is_held_out = np.asarray(places)[row] % HELD_OUT_EVERY == HELD_OUT_EVERY // 2
        cells.append(Cell(f"{name} {work}", name, inputs, work, held_out=bool(is_held_out)))
    return cells


def cell_runs(model: LatencyModel, cells: Sequence[Cell]) -> Runs:
    """Return the runs of cells, `[cells]`.

    Raises:
        ValueError: as `Runs.checked`.
    """
    columns = {name: np.array([cell.inputs[name] for cell in cells], float) for name in cells[0].inputs}
    return Runs.checked(model, [cell.variant for cell in cells], **columns)
