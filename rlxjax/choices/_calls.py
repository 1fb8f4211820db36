"""Call a user's programs with a time limit, compare their results, and let several processes choose together."""

import functools
import json
import math
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlxjax._chunks import with_callers_settings

from ._programs import equation_alone, opened, unlike

R = TypeVar("R")

#: Processes exchange data in blocks of this number of bytes.
BLOCK_BYTES = 4096
#: How many seconds a process waits for the other processes, which may be compiling.
ANSWER_S = 600.0


class FailedError(Exception):
    """The error of a call that gave no result. Its text continues a sentence that begins with the program's name."""


class Caller:
    """Runs calls one after another in a thread, with the caller's JAX settings. It stops waiting for a slow call."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Callable[[], Any] | None] | None = None
        self._answers: queue.SimpleQueue[tuple[Any, str]] = queue.SimpleQueue()

    def __enter__(self) -> "Caller":
        return self

    def __exit__(self, *_: object) -> None:
        if self._asked is not None:
            self._asked.put(None)
        self._asked = None

    def __call__(self, call: Callable[[], R], limit_s: float) -> R:
        """Return the result of a call; raise `FailedError` if the call raises, exits or takes longer than `limit_s`."""
        if self._asked is None:
            self._asked, self._answers = queue.SimpleQueue(), queue.SimpleQueue()
            serve = with_callers_settings(_serve)
            threading.Thread(target=serve, args=(self._asked, self._answers), daemon=True).start()
        self._asked.put(call)
        try:
            result, failed = self._answers.get(timeout=limit_s)
        except queue.Empty:
            self.__exit__()
            raise FailedError(f"did not end within {limit_s:g} s") from None
        if failed:
            raise FailedError(failed)
        return result


def _serve(asked: "queue.SimpleQueue[Any]", answers: "queue.SimpleQueue[tuple[Any, str]]") -> None:
    while (call := asked.get()) is not None:
        try:
            answers.put((call(), ""))
        except BaseException as error:  # noqa: BLE001 - a user's program may raise anything, and may exit
            reason = str(error).strip().partition("\n")[0]
            answers.put((None, f"raised {type(error).__name__}{f': {reason}' if reason else ''}"))
        del call


class Party(NamedTuple):
    """The processes whose devices hold the arguments of a choice. They all run the same programs in the same order."""

    devices: tuple[Any, ...] = ()  # one device of each process, in order; none if this process chooses alone

    @classmethod
    def of(cls, devices: Iterable[Any]) -> "Party":
        """Return the party of all processes that own these devices."""
        firsts: dict[int, Any] = {}
        for device in sorted(devices, key=lambda own: (own.process_index, own.id)):
            firsts.setdefault(device.process_index, device)
        return cls(tuple(firsts.values())) if len(firsts) > 1 else ALONE

    @property
    def is_first(self) -> bool:
        return not self.devices or self.devices[0].process_index == jax.process_index()

    def first_text(self, said: str) -> str:
        """Collect the text that each process gives; return the first text that is not empty, or "" if all are empty."""
        return next(filter(None, self.gathered(said)), "")

    def gathered(self, said: Any) -> list[Any]:
        """Collect the JSON value that each process gives, in a list; raise `ValueError` if a process has ended."""
        if not self.devices:
            return [said]
        content = json.dumps(said).encode()
        framed = len(content).to_bytes(8, "big") + content
        framed += bytes(-len(framed) % BLOCK_BYTES)
        found = [b""] * len(self.devices)
        try:
            with Caller() as caller:
                while not all(own and len(own) >= 8 + int.from_bytes(own[:8], "big") for own in found):
                    start = len(found[0])
                    block = framed[start : start + BLOCK_BYTES].ljust(BLOCK_BYTES, b"\0")
                    blocks = caller(functools.partial(_exchanged, self.devices, block), ANSWER_S)
                    found = [own + more for own, more in zip(found, blocks, strict=True)]
        except FailedError as reason:
            said = f"has ended or does not answer: the exchange {reason}"
            raise ValueError(f"args: another process, which holds a part of the arguments, {said}") from None
        return [json.loads(own[8 : 8 + int.from_bytes(own[:8], "big")]) for own in found]


#: The party of a process that chooses alone.
ALONE = Party()


def _exchanged(devices: tuple[Any, ...], block: bytes) -> list[bytes]:
    mesh = Mesh(np.array(devices), ("process",))
    split, everywhere = NamedSharding(mesh, PartitionSpec("process")), NamedSharding(mesh, PartitionSpec())
    own = np.frombuffer(block, np.uint8)[None]
    given = jax.make_array_from_process_local_data(split, own, (len(devices), len(block)))
    return [one.tobytes() for one in np.asarray(jax.device_put(given, everywhere).addressable_data(0))]


# --- Whether two results are equal except for rounding -------------------------------------------

#: Two results may differ by this factor times the sum of the changes that rounding makes in the two results.
MOVES = 16.0
#: How many times a program runs with random roundings.
DRAWS = 8
#: Names of the operations that call an inner jaxpr.
_CALLS = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint"}
#: Names of the operations whose results are exact, so that nothing is rounded.
_EXACT = {
    *("abs", "broadcast_in_dim", "ceil", "clamp", "concatenate", "copy", "copy_p", "cummax", "cummin"),
    *("dynamic_slice", "dynamic_update_slice", "floor", "gather", "imag", "iota", "max", "min", "neg", "pad", "real"),
    *("reduce_max", "reduce_min", "reduce_precision", "rem", "reshape", "rev", "round", "scatter", "select_n", "sign"),
    *("slice", "sort", "split", "squeeze", "stop_gradient", "transpose"),
}
#: Names of the operations that add many terms, so that the sum of the terms' magnitudes bounds the rounding.
_SUMS = {"conv_general_dilated", "cumsum", "dot_general", "reduce_sum", "reduce_window_sum", "scatter-add"}
#: Names of the operations that are exact for operands slightly different from theirs (they are backward stable).
_STABLE = {"cholesky", "eig", "eigh", "fft", "geqrf", "lu", "svd", "triangular_solve", "tridiagonal_solve"}


def difference(one: Any, other: Any, calls: Sequence[Callable[[], Any]] = ()) -> str:
    """Say in a few words how the second result differs from the first; return "" if rounding explains the difference.

    The relative difference of two floating-point numbers may be the square root of the machine epsilon of their dtype.
    The difference of any two numbers may be `MOVES` times the sum of the changes that rounding makes in both programs.
    """
    if wrong := unlike(one, other):
        return wrong
    mine, others = (jax.tree.leaves(opened(own)) for own in (one, other))
    moves: list[Any] | None = None
    for number, (left, right) in enumerate(zip(mine, others, strict=True)):
        dtype, expected, got = jnp.result_type(left), own_part(left), own_part(right)
        off, is_float = distance(got, expected), jnp.issubdtype(dtype, jnp.inexact)
        most = np.zeros(off.shape)
        if is_float:
            size = np.where(np.isfinite(expected), np.abs(expected), 0.0)
            most = math.sqrt(float(jnp.finfo(dtype).eps)) * size
        if (off <= most).all():
            continue
        if moves is None:
            both = [_moves(*own) for own in zip(calls, (mine, others), strict=False)]
            moves = [sum(own) for own in zip(*both, strict=True)]
        if moves:
            most = np.maximum(most, MOVES * moves[number])
        if not (is_wrong := ~(off <= most)).any():
            continue
        if not is_float:
            return f"array {number} has different values"
        worst = np.unravel_index(np.argmax(np.where(is_wrong, off / np.maximum(most, 1e-300), -1.0)), off.shape)
        where = f" at {list(map(int, worst))}" if expected.shape == jnp.shape(left) and expected.ndim else ""
        return f"array {number} differs by {off[worst]:.2g}{where}; rounding explains at most {most[worst]:.2g}"
    return ""


def _moves(call: Callable[[], Any], results: Sequence[Any]) -> list[np.ndarray]:
    """Return how much rounding changes each number of the results; return zeros if JAX cannot trace the call."""
    try:
        return rounding_moves(call, results)
    except Exception:  # noqa: BLE001 - a user's program may raise anything
        return [np.zeros(own_part(one).shape) for one in results]


def rounding_moves(call: Callable[[], Any], results: Sequence[Any]) -> list[np.ndarray]:
    """Run a program `DRAWS` times with random roundings; return the largest change of each number of its results.

    This is Monte Carlo arithmetic (Parker, Pierce and Eggert, 2000): each result that an operation rounds changes by
    plus or minus the machine epsilon of its dtype, relative to its size, and for a sum to the sum of its terms' sizes.
    Constants and arguments are not rounded. An operation on numbers of few digits, such as 1 - 1 or 0.5 * 3, is exact.
    """
    closed = jax.make_jaxpr(lambda: opened(call()))()
    unit = max((float(jnp.finfo(x.dtype).eps) for x in results if jnp.issubdtype(x.dtype, jnp.inexact)), default=0.0)

    def moved(seed: jax.Array, consts: Sequence[Any]) -> list[Any]:
        return _run(closed.jaxpr, [*map(jnp.asarray, consts)], [], seed, unit)

    places = [own.sharding if isinstance(own, jax.Array) and not own.is_fully_addressable else None for own in results]
    run = jax.jit(moved, out_shardings=places)
    before, furthest = [own_part(one) for one in results], [np.zeros(own_part(one).shape) for one in results]
    for seed in range(DRAWS):
        for most, old, one in zip(furthest, before, run(jnp.uint32(seed), closed.consts), strict=True):
            np.maximum(most, distance(own_part(one), old), out=most)
    return furthest


def own_part(leaf: Any) -> np.ndarray:
    """Return the part of an array that this process holds. Floating-point numbers are converted to double precision."""
    if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        found = np.concatenate([np.ravel(shard.data) for shard in leaf.addressable_shards])
    else:
        found = np.asarray(leaf)
    if not jnp.issubdtype(found.dtype, jnp.inexact):
        return found
    return found.astype(np.complex128 if jnp.issubdtype(found.dtype, jnp.complexfloating) else np.float64)


def distance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the elementwise distance of two arrays: 0 if both numbers are NaN, infinite if exactly one is finite."""
    if one.dtype.kind not in "fc":
        return np.abs(one.astype(np.float64) - other.astype(np.float64))
    is_same = (one == other) | (np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(one - other)
    return np.where(is_same, 0.0, np.where(np.isfinite(one) & np.isfinite(other), apart, np.inf))


def _run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], seed: Any, unit: float) -> list[Any]:
    """Run a jaxpr and return its results. Each number that an operation computes is changed by one random rounding."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for number, equation in enumerate(jaxpr.eqns):
        name, inner = equation.primitive.name, equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        given = [jnp.asarray(own.val) if hasattr(own, "val") else values[own] for own in equation.invars]
        if name in _CALLS and inner is not None:
            found = _run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), given, seed + number + 1, unit)
        else:
            alone, own_inputs = equation_alone(jaxpr, equation)
            own = [values[var] for var in own_inputs]
            if name in _STABLE:
                own = [_nudged(one, abs(one), seed, number, unit) for one in own]
            found = alone(*own)
            sizes = alone(*(abs(one).astype(one.dtype) for one in own)) if name in _SUMS else found
            if name not in _EXACT:
                sizes = [_rounded(equation, given, *pair) for pair in zip(found, map(abs, sizes), strict=True)]
                found = [_nudged(*pair, seed, number, unit) for pair in zip(found, sizes, strict=True)]
        values.update(zip(equation.outvars, found, strict=True))
    return [own.val if hasattr(own, "val") else values[own] for own in jaxpr.outvars]


def _rounded(equation: Any, given: Sequence[Any], found: Any, size: Any) -> Any:
    """Return the size relative to which an operation rounds each number of its result; 0 where it rounds nothing.

    If all terms are multiples of a power of two, a sum of at most `2 / eps` times this power is exact.
    """
    if not jnp.issubdtype(found.dtype, jnp.inexact):
        return size
    name, (first, *others), half_eps = equation.primitive.name, given, float(jnp.finfo(found.dtype).eps) / 2
    if name == "convert_element_type":
        back = found if jnp.issubdtype(first.dtype, jnp.complexfloating) else found.real
        return jnp.where(back.astype(first.dtype) == first, 0, size)
    steps = [_step(one) for one in (found, *others)] if name in ("div", "sqrt") else [*map(_step, given[:2])]
    if name in ("add", "add_any", "sub"):
        step = jnp.minimum(*steps)
    elif name in ("reduce_sum", "cumsum", "reduce_window_sum"):
        step = jnp.min(steps[0], initial=jnp.inf)
    elif name in ("dot_general", "conv_general_dilated"):
        step = math.prod(jnp.min(one, initial=jnp.inf) for one in steps)
    elif name == "mul":
        step = steps[0] * steps[1]
    elif name in ("div", "sqrt"):  # exact if the quotient times the divisor is
        divisor, step = (others or [found])[0], steps[0] * steps[-1]
        step = jnp.where(found * divisor == first, step, 0)
        return jnp.where(abs(first) * half_eps <= step, 0, size)
    elif name == "integer_pow":
        step = steps[0] ** max(equation.params["y"], 0)
    else:
        return size
    return jnp.where(size * half_eps <= step, 0, size)


def _step(value: Any) -> Any:
    """Return the largest power of two of which each number is a multiple; infinity for 0."""
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        return jnp.minimum(_step(value.real), _step(value.imag))
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return jnp.ones(value.shape)
    bits = jax.lax.bitcast_convert_type(value, f"uint{8 * value.dtype.itemsize}")
    shorter = jax.lax.bitcast_convert_type(bits & (bits - 1), value.dtype)  # without the lowest digit
    is_power = bits & ((1 << jnp.finfo(value.dtype).nmant) - 1) == 0
    return jnp.where(value == 0, jnp.inf, abs(jnp.where(is_power, value, value - shorter)))


def _nudged(value: Any, size: Any, seed: Any, number: int, most: float) -> Any:
    """Change each floating-point number by one rounding of `size`; a hash of its bits decides whether up or down."""
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return value
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        return jax.lax.complex(*(_nudged(part, size, seed, number, most) for part in (value.real, value.imag)))
    eps = min(float(jnp.finfo(value.dtype).eps), most)
    width = 8 * value.dtype.itemsize
    bits = jax.lax.bitcast_convert_type(value, f"uint{width}")
    bits = (bits >> max(width - 32, 0)) ^ bits if width > 32 else bits
    mixed = (bits.astype(jnp.uint32) ^ (seed * 40503 + number * 977 + 1).astype(jnp.uint32)) * jnp.uint32(2654435761)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(2246822519)
    change = (eps * size).astype(value.dtype)
    return jnp.where(jnp.isfinite(change), value + jnp.where((mixed >> 17) & 1, change, -change), value)
