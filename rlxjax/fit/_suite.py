"""What a calibrate job times: a suite, its cells and their programs, and which measurements say most next."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rlxjax._values import FrozenDict, by_value

from ._latency_model import Facts, LatencyModel, LatencyPrior, Runs
from ._lists import as_lists, columns_of, places_of, size_text
from ._minimise import on_cpu
from ._posterior import LatencyEstimate

#: Of the pieces of work of a grid, one in so many is held out.
HELD_OUT_EVERY = 4


@dataclasses.dataclass(frozen=True)
class Cell:
    """One program that is timed.

    Attributes:
        name: unique in its suite.
        variant: of the model.
        inputs: of the model, by name; every cell names the same ones. A list is kept as a tuple.
        work: what it computes; cells of one work are different ways to do it. The name unless given.
        group: what errors are told apart by: a strategy, or a kind of work. The variant unless given.
        held_out: whether the fit that gives the held-out errors never sees it.
        n_bytes: of the arrays that a run holds at once, as far as that is known.
        compiled: what the compiler made of it, as inputs of another model by name; empty where nothing says.
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
        for name in ("inputs", "compiled"):
            sizes = getattr(self, name).items()
            own = {key: np.asarray(size, float).tolist() if np.ndim(size) else size for key, size in sizes}
            object.__setattr__(self, name, FrozenDict(own))
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
        return self.model.prior

    def as_compiled(self, cell: Cell, program: Callable[[], Any]) -> Cell:
        """Return a cell with what the compiler made of its program, which ran once; the cell alone unless it says."""
        return cell

    def of_compiled(self) -> "Suite | None":
        """Return the suite that the same samples are fitted by where cells say what was compiled; none here."""
        return None

    def kept(self, cells: Sequence[Cell]) -> Sequence[Cell]:
        """Return cells of earlier samples as they are fitted."""
        return cells


def grid_cells(model: LatencyModel) -> list[Cell]:
    """Return a cell for each run of a model's grid that its `check` lets pass; one work in four is held out."""
    # Evenly spread: every value of an input is seen beside others.
    runs = model.grid()
    columns = {name: np.asarray(column, float) for name, column in runs.of_shape(runs.shape).inputs.items()}
    places = {name: places_of(column) for name, column in columns.items()}
    varied = [name for name, own in places.items() if own.max(initial=0)] or list(columns)
    cells = []
    for row, variant in enumerate(np.broadcast_to(np.asarray(runs.variant), runs.shape).tolist()):
        inputs = {name: column[row].tolist() for name, column in columns.items()}
        try:
            model.check(as_lists(model.inputs, inputs))
        except ValueError:
            continue
        work, name = " ".join(f"{name}={size_text(inputs[name])}" for name in varied), model.variants[variant]
        is_held_out = sum(own[row] for own in places.values()) % HELD_OUT_EVERY == HELD_OUT_EVERY // 2
        cells.append(Cell(f"{name} {work}", name, inputs, work, held_out=bool(is_held_out)))
    return cells


def cell_runs(model: LatencyModel, cells: Sequence[Cell]) -> Runs:
    """Return the runs of cells, `[cells]`.

    Raises:
        ValueError: as `Runs.checked`.
    """
    columns = columns_of(model.inputs, cells[0].inputs, [cell.inputs for cell in cells])
    return Runs.checked(model, [cell.variant for cell in cells], **columns)


@by_value
class Design(NamedTuple):
    """Workloads in the order in which to time them, and what each is expected to bring.

    Attributes:
        order: indices of the candidates, `[n]`.
        gain: of each in nats, once those before it are timed, `[n]`; per second where seconds were given.
    """

    order: Int[np.ndarray, "n"]
    gain: Float[np.ndarray, "n"]


def next_measurements(
    candidates: LatencyEstimate,
    n: int,
    *,
    seconds: np.ndarray | Float[Array, "workloads"] | None = None,
    targets: LatencyEstimate | None = None,
    timed: LatencyEstimate | None = None,
) -> Design:
    """Choose the workloads to time next, one after the other, each the best after those before it.

    For runs of scores `J L` (the unknowns' covariance is `L @ L.T`) and spreads `s`, the best has the largest

        logdet(I + diag(1 / s) J L L^T J^T diag(1 / s)) / 2,

    by which the entropy of the unknowns falls (Bayesian D-optimality); with targets, the largest mean over them of
    what it says of a run's time, `log(variance before / variance after) / 2` (MacKay's mean marginal information).
    Each choice leaves the covariance that timing it would: a second workload like the first brings little.

    Args:
        candidates: estimates `[workloads, runs]` by `prior_posterior` before there are timings, and by
            `fit_posterior` then; a run of infinite spread is not timed.
        n: how many to choose.
        seconds: that each takes, compilation included; the best then brings most per second.
        targets: runs `[*batch]` that predictions are wanted of; the unknowns themselves unless given.
        timed: runs `[*batch]` that will be timed in any case, or were since the posterior was fitted.

    Raises:
        ValueError: no candidates or fewer than `n`; `n` below 1; another shape than above; seconds that
            are not positive.

    References:
        K. Chaloner, I. Verdinelli, Bayesian Experimental Design: A Review, Statistical Science 10, 1995.
        D. J. C. MacKay, Information-Based Objective Functions for Active Data Selection, Neural
        Computation 4, 1992.

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
        raise ValueError(f"n: expected at least 1 and at most as many as candidates ({count}), got {n}")
    cost = np.ones(count) if seconds is None else np.asarray(seconds, np.float64)
    if cost.shape != (count,) or not np.all(np.isfinite(cost) & (cost > 0)):
        raise ValueError(f"seconds: expected {count} positive finite numbers, one a candidate, got {seconds}")
    rows = {}
    for name, runs in (("targets", targets), ("timed", timed)):
        its = None if runs is None else _scaled(name, runs)
        if its is not None and (its.shape[-1] != unknowns or not its.size):
            said = f"expected at least one run, with scores of {unknowns} unknowns, got {its.shape}"
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
    """Return the order and the gains; scores are in units of the runs' spreads."""

    def choose(state, _):
        scaled, targets, is_left = state
        # The covariance of what the runs of each block will show, in units of their spreads.
        variances = scaled @ jnp.swapaxes(scaled, -2, -1) + jnp.eye(scaled.shape[-2], dtype=scaled.dtype)[None]
        if targets is None:
            gain = jnp.linalg.slogdet(variances)[1] / 2
        else:
            # What a block takes off the targets' variances, all but their own spread: `[workloads, targets]`.
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
    """Return scores by the unknowns that are independent once the runs of a block, `[runs, u]`, are timed."""
    # The product of two is what `I - B^T (I + B B^T)^-1 B` gives: its symmetric square root is
    # `I - B^T U diag((1 - (1 + e)**-0.5) / e) U^T B`, with `B B^T = U diag(e) U^T`.
    # A block of many runs has no more directions than there are unknowns; the others have eigenvalue 0.
    values, vectors = jnp.linalg.eigh(block @ block.T)
    root = jnp.sqrt(1.0 + jnp.maximum(values, 0.0))
    along = vectors.T @ block
    return scores - (scores @ along.T) @ (along / (root * (1.0 + root))[:, None])


def _scaled(name: str, estimate: LatencyEstimate) -> Float[Array, "*batch runs unknowns"]:
    scores, spread = jnp.asarray(estimate.scores), jnp.asarray(estimate.spread)
    if spread.ndim < 1 or scores.shape[:-1] != spread.shape:
        said = f"scores [..., runs, unknowns] and spreads [..., runs], got {scores.shape} and {spread.shape}"
        raise ValueError(f"{name}: expected {said}")
    return scores / spread[..., None]
