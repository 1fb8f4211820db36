"""Suites of programs that `rlxjax calibrate` times, and the choice of the next measurements."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rlxjax._chunks import on_cpu
from rlxjax._values import FrozenDict, by_value

from ._latency_model import Facts, LatencyModel, LatencyPrior, Runs
from ._posterior import Estimate

#: One out of this number of pieces of work in a grid is held out.
HELD_OUT_EVERY = 4


@dataclasses.dataclass(frozen=True)
class Cell:
    """A program to time.

    Attributes:
        name: a name that is unique in the suite.
        variant: the name of the program's variant in the model.
        inputs: the values of the model's inputs, by name. Every cell has the same names.
        work: the name of the work that the program does. Cells with the same `work` are alternatives. Default: `name`.
        group: the name of the cells whose errors are averaged together, for example a strategy. Default: `variant`.
        held_out: whether the cell is held out. A fit without the held-out cells predicts their times to find the error.
        n_bytes: the number of bytes of all arrays that a run holds at the same time; 0 if unknown.
        compiled: numbers, and tuples with an entry for each kernel, by name. `Suite.of_compiled` takes them from the
            compiled program. Empty if unknown.
    """

    name: str
    variant: str
    inputs: Mapping[str, Any]
    work: str = ""
    group: str = ""
    held_out: bool = False
    n_bytes: int = 0
    compiled: Mapping[str, Any] = FrozenDict()

    def __post_init__(self) -> None:
        compiled = {name: np.asarray(own, float).tolist() for name, own in self.compiled.items()}
        object.__setattr__(self, "compiled", FrozenDict(compiled))
        object.__setattr__(self, "inputs", FrozenDict(self.inputs))
        object.__setattr__(self, "work", self.work or self.name)
        object.__setattr__(self, "group", self.group or self.variant)


class Suite:
    """The programs that `rlxjax calibrate --suite module:NAME` times. A derived class defines `model` and `program`.

    Attributes:
        model: the latency model to fit.
        runner: version of the timed programs. Samples of different versions are never mixed.
        most_error: the largest held-out error with which a calibration counts as ready.
        shown: the `work` names of the cells that are measured first and printed.
        given: the SHA-256 of each file that the programs use, by file name.

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
        """Return a function without arguments that runs a cell's program once. Prepare all arrays outside it."""
        raise NotImplementedError

    def cells(self) -> Sequence[Cell]:
        """Return the cells, always in the same order; by default, those of the model's grid, a quarter held out."""
        return grid_cells(self.model)

    def facts(self) -> Facts:
        """Return the facts that describe how the machine schedules programs; by default, the model's `facts`."""
        return self.model.facts

    def start(self, micro_ns: Mapping[str, float]) -> LatencyPrior[Any]:
        """Return the prior for a fit without other machines' data. Times of micro-benchmarks, in ns, may narrow it."""
        return self.model.prior

    def as_compiled(self, cell: Cell, program: Callable[[], Any]) -> Cell:
        """Return the cell with `compiled` counted in its program, which has run once; by default, the same cell."""
        return cell

    def of_compiled(self) -> "Suite | None":
        """Return a second suite that fits the same samples with `Cell.compiled` as the inputs; by default, None."""
        return None

    def runs(self, cells: Sequence[Cell]) -> Runs:
        """Return the runs of cells, `[cells]`, also of cells of earlier samples; by default, from the cells' inputs.

        Raises:
            ValueError: for the same reasons as in `Runs.checked`.
        """
        return cell_runs(self.model, cells)


def grid_cells(model: LatencyModel) -> list[Cell]:
    """Return a cell for each run of `model.grid()` that passes `model.check`. One piece of work in four is held out."""
    # The held-out work is spread evenly, so the fit sees every value of an input.
    runs = model.grid()
    columns = {name: np.asarray(column, float) for name, column in runs.of_shape(runs.shape).inputs.items()}
    places = {name: np.unique(column, return_inverse=True)[1] for name, column in columns.items()}
    varied = [name for name, own in places.items() if own.max(initial=0)] or list(columns)
    cells = []
    for row, variant in enumerate(np.broadcast_to(np.asarray(runs.variant), runs.shape).tolist()):
        inputs = {name: column[row].tolist() for name, column in columns.items()}
        try:
            model.check(inputs)
        except ValueError:
            continue
        work, name = (
            " ".join(f"{name}={inputs[name]:g}" for name in varied),
            model.variants[variant],
        )
        is_held_out = sum(own[row] for own in places.values()) % HELD_OUT_EVERY == HELD_OUT_EVERY // 2
        cells.append(Cell(f"{name} {work}", name, inputs, work, held_out=bool(is_held_out)))
    return cells


def cell_runs(model: LatencyModel, cells: Sequence[Cell]) -> Runs:
    """Return the runs of cells, `[cells]`.

    Raises:
        ValueError: for the same reasons as in `Runs.checked`.
    """
    names = cells[0].inputs if cells else ()
    columns = {name: np.array([cell.inputs.get(name, np.nan) for cell in cells]) for name in names}
    return Runs.checked(model, [cell.variant for cell in cells], **columns)


@by_value
class Design(NamedTuple):
    """The workloads to time next, in order, with the expected information gain of each workload.

    Attributes:
        order: indices of the chosen candidates, `[n]`.
        gain: information gain of each choice after the earlier ones, `[n]`, in nats, or nats per second with `seconds`.
    """

    order: Int[np.ndarray, "n"]
    gain: Float[np.ndarray, "n"]


def next_measurements(
    candidates: Estimate,
    n: int,
    *,
    seconds: np.ndarray | Float[Array, "workloads"] | None = None,
    targets: Estimate | None = None,
    timed: Estimate | None = None,
) -> Design:
    """Choose the workloads to time next. Each choice is the workload with the largest expected information gain.

    Let `J L` be the scores of a workload's runs, with the unknowns' covariance `L L^T`, and `s` the runs' spreads. The
    gain of a workload is the decrease of the unknowns' entropy (Bayesian D-optimality):

        logdet(I + diag(1 / s) J L L^T J^T diag(1 / s)) / 2.

    With `targets`, the gain is the mean of `log(variance before / variance after) / 2` over the targets' log times
    (MacKay's mean marginal information). Each choice updates the covariance, so a second similar workload adds little.

    Args:
        candidates: estimates of each workload's runs, `[workloads, runs]`. Give untimed runs an infinite spread.
        n: the number of workloads to choose.
        seconds: the time that each workload takes, with compilation, in s, `[workloads]`. Gains are then per second.
        targets: estimates of the runs that you want to predict, `[*batch]`. By default, the unknowns are the targets.
        timed: estimates of runs that will be timed in any case, or were timed after the posterior's fit, `[*batch]`.

    Raises:
        ValueError: `n` is below 1 or above the number of candidates, a shape is wrong, or `seconds` are not positive.

    References:
        K. Chaloner, I. Verdinelli, Bayesian Experimental Design: A Review, Statistical Science 10, 1995.
        D. J. C. MacKay, Information-Based Objective Functions for Active Data Selection, Neural Computation, 1992.

    Examples:
        >>> from rlxjax.fit import Runs, estimate, prior_posterior
        >>> from rlxjax.models import WELCH
        >>> batch, n_fft = np.meshgrid([1.0, 64.0, 4096.0], [128.0, 1024.0])
        >>> variants = np.array([0, 1, 3])  # three runs of each of the six workloads
        >>> runs = Runs.checked(WELCH, variants, batch=batch.reshape(-1, 1), n_fft=n_fft.reshape(-1, 1), k=16)
        >>> candidates = estimate(prior_posterior(WELCH), runs)
        >>> design = next_measurements(candidates, 3)
        >>> len(set(design.order.tolist())), bool(np.all(np.diff(design.gain) <= 0))
        (3, True)
    """
    scaled = _scaled("candidates", candidates)
    if scaled.ndim != 3:
        raise ValueError(f"candidates: expected scores [workloads, runs, unknowns], got shape {scaled.shape}")
    count, _, unknowns = scaled.shape
    if not 1 <= n <= count:
        raise ValueError(f"n: expected 1 to {count} (the number of candidates), got {n}")
    cost = np.ones(count) if seconds is None else np.asarray(seconds, np.float64)
    if cost.shape != (count,) or not np.all(np.isfinite(cost) & (cost > 0)):
        raise ValueError(f"seconds: expected a positive finite number for each of {count} candidates, got {seconds}")
    rows = {}
    for name, runs in (("targets", targets), ("timed", timed)):
        its = None if runs is None else _scaled(name, runs)
        if its is not None and (its.shape[-1] != unknowns or not its.size):
            said = f"expected at least one run with scores of {unknowns} unknowns, got shape {its.shape}"
            raise ValueError(f"{name}: {said}")
        rows[name] = None if its is None else its.reshape(-1, unknowns)
    wanted = rows["targets"]
    if timed is not None:
        scaled, wanted = jax.tree.map(lambda scores: _after(scores, rows["timed"]), (scaled, wanted))
    with on_cpu():
        order, gain = _greedy(*jax.tree.map(np.asarray, (scaled, cost.astype(scaled.dtype), wanted)), n)
    return Design(np.asarray(order), np.asarray(gain))


@functools.partial(jax.jit, static_argnames="n")
def _greedy(scaled, cost, targets, n: int):
    """Return the chosen workloads in order, and their gains. `scaled` holds the scores divided by the runs' spreads."""

    def choose(state, _):
        scaled, targets, is_left = state
        # The covariance of the runs of each workload, in units of their spreads.
        variances = scaled @ jnp.swapaxes(scaled, -2, -1) + jnp.eye(scaled.shape[-2], dtype=scaled.dtype)[None]
        if targets is None:
            gain = jnp.linalg.slogdet(variances)[1] / 2
        else:
            # `shared**2` sums to the decrease of each target's variance, without spread, `[workloads, targets]`.
            values, vectors = jnp.linalg.eigh(variances)
            along = jnp.swapaxes(vectors, -2, -1) @ scaled
            shared = (along / jnp.sqrt(values)[..., None]) @ targets.T
            share = jnp.sum(shared**2, -2) / (jnp.sum(targets**2, -1) + 1.0)[None]
            gain = -jnp.mean(jnp.log1p(-share), -1) / 2
        gain = gain / cost
        best = jnp.argmax(jnp.where(is_left, gain, -jnp.inf))
        block = scaled[best]
        scaled = _after(scaled, block)
        targets = None if targets is None else _after(targets, block)
        return (scaled, targets, is_left.at[best].set(False)), (best, gain[best])

    state = (scaled, targets, jnp.ones(len(scaled), bool))
    return jax.lax.scan(choose, state, length=n)[1]


def _after(scores, block):
    """Return the updated scores after further runs are timed. `block` or `B`: their scaled scores, `[runs, u]`."""
    # The covariance becomes `I - B^T (I + B B^T)^-1 B`, with the symmetric square root
    # `I - B^T U diag((1 - (1 + e)**-0.5) / e) U^T B` for `B B^T = U diag(e) U^T`.
    values, vectors = jnp.linalg.eigh(block @ block.T)
    root = jnp.sqrt(1.0 + jnp.maximum(values, 0.0))
    along = vectors.T @ block
    return scores - (scores @ along.T) @ (along / (root * (1.0 + root))[:, None])


def _scaled(name: str, estimate: Estimate) -> Float[Array, "*batch runs unknowns"]:
    scores, spread = jnp.asarray(estimate.scores), jnp.asarray(estimate.spread)
    if spread.ndim < 1 or scores.shape[:-1] != spread.shape:
        said = f"scores [..., runs, unknowns] and spreads [..., runs], got shapes {scores.shape} and {spread.shape}"
        raise ValueError(f"{name}: expected {said}")
    return scores / spread[..., None]
