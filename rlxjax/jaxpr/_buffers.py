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
    """An argument of a compiled program, or a group of arrays with the same dtype, shape and source line.

    Attributes:
        bytes: size of a single array, without padding.
        times: number of arrays in the group.
        dtype: XLA's name of the dtype, such as "bf16".
        shape: shape of an array on one device.
        source: the user's source line, `file.py:12`, or the name of the argument.
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
    """Return the arrays of a compiled program in the device's main memory, the largest first.

    The list holds the arguments and the results of all instructions, including instructions in loops, branches and
    calls. Views, in-place updates and values inside a fusion are left out. Arrays that live at different times may
    share memory.

    Args:
        text: the result of `jax.stages.Compiled.as_text`.
        arguments: names of the program's arguments; a shorter list names the last arguments.

    Raises:
        ValueError: the text has an unknown form.

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
