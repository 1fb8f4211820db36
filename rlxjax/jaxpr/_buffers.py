"""The arrays that a compiled program keeps in device memory, read from XLA's text of the program."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from rlxjax._values import by_value

from ._primitives import UNKNOWN_LINE
from ._xla import FRAME
from ._xla_text import NOTHING, computations, frame_lines


@by_value
class Buffer(NamedTuple):
    """A group of arrays of a compiled program with the same dtype, shape and source (a source line or an argument).

    Attributes:
        bytes: size of each array in bytes, without padding.
        times: number of arrays in the group.
        dtype: the dtype as XLA writes it, such as "bf16".
        shape: shape of each array; for an array that is split over devices, shape of the part on one device.
        source: the user's source line that computes the arrays, such as `file.py:12`; for an argument, its name.
    """

    bytes: int
    times: int
    dtype: str
    shape: tuple[int, ...]
    source: str

    def __str__(self) -> str:
        times = f"{self.times} x " if self.times > 1 else ""
        return f"{times}{self.dtype}[{','.join(map(str, self.shape))}]  {self.source}"


def buffers_of(text: str, arguments: Sequence[str] = ()) -> tuple[Buffer, ...]:
    """Return the arrays that a compiled program holds in the device's main memory, the largest first.

    The list holds the arguments and the results of all instructions, including instructions in loops, branches and
    calls. Views, in-place updates and values inside a fusion are left out. Two arrays of the list may use the same
    memory at different times.

    Args:
        text: the text of the program, as `jax.stages.Compiled.as_text` returns it.
        arguments: names of the program's arguments, in order. If there are fewer names, they name the last arguments.

    Raises:
        ValueError: the text cannot be parsed.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> text = jax.jit(jnp.tanh).lower(jnp.ones((8, 2), jnp.float32)).compile().as_text()
        >>> [(one.bytes, one.dtype, one.shape) for one in buffers_of(text, ["x"]) if one.source == "x"]
        [(64, 'f32', (8, 2))]
    """
    try:
        found, entry = computations(text)
        lines = frame_lines(text)
        # A called computation counts once, even if several instructions call the computation.
        reached = [entry]
        counts: Counter[tuple[int, str, tuple[int, ...], str]] = Counter()
        first = len(found[entry].parameters) - len(arguments)
        for name in reached:
            for each in found[name].instructions.values():
                called = [*each.branches] if each.opcode == "conditional" else []
                called += [each.called["body"]] if each.opcode == "while" else []
                called += [each.called["to_apply"]] if each.opcode == "call" else []
                is_view = each.opcode in NOTHING or each.target == "ConcatBitcast"
                reached += [other for other in called if other not in reached]
                if each.opcode == "parameter" and name == entry:
                    place = int(each.inside) - first
                    source = arguments[place] if first >= 0 and place >= 0 else f"argument {each.inside}"
                elif called or is_view or each.opcode.endswith(("-start", "-update")):
                    continue  # an asynchronous instruction makes its arrays at its end
                else:
                    fused = found.get(each.called.get("calls", ""))
                    if found[name].moved(each, fused)[1] < each.main_bytes:
                        continue  # an update of a part of an existing array
                    frame = FRAME.search(each.attributes)
                    source = lines.get(int(frame[1]), UNKNOWN_LINE) if frame else UNKNOWN_LINE
                for array in each.arrays:
                    if not array.is_elsewhere:
                        counts[array.bytes, array.kind, array.sizes, source] += 1
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"compiled program: XLA's text is not written as expected ({error})") from None
    made = (Buffer(key[0], times, *key[1:]) for key, times in counts.items())
    return tuple(sorted(made, key=lambda one: (-one.bytes, -one.times, one.source)))
