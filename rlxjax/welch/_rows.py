"""Rows of samples as the device programs read them: where they lie, a block of columns at a time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Real

#: Samples of a line that belong to none of its rows.
LINE_MARGIN = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Line:
    """Rows one after the other in memory, from somewhere among the first samples of a line on.

    A CPU device uses an array where it is if it begins at a multiple of 64 bytes. A line does, wherever the
    allocator has put the rows, and one program runs for all lines of a shape.

    Attributes:
        samples: `[LINE_MARGIN + batch * length]`, float32; nothing follows from what is before and behind
            the rows, which may be anything.
        first: the place of the first row's first sample, below `LINE_MARGIN`.
        length: samples of a row, at least `2 * LINE_MARGIN`.
    """

    samples: Float[Array, "samples"] | np.ndarray
    first: Int[Array, ""] | np.int32
    length: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and samples of each."""
        return (self.samples.shape[0] - LINE_MARGIN) // self.length, self.length


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows of a signal, whose columns are cut out a block at a time.

    In a loop over pieces, where the first row is known at run time alone, XLA's CPU compiler makes vector
    code of what reads such blocks. Of what reads parts of rows that were cut out first it makes none: that
    reads the number of the first row for every sample.

    Attributes:
        signal: `[batch, length]`, real.
        count: how many.
        start: the first one's place.
    """

    signal: Real[Array, "batch length"] | Line
    count: int
    start: int | Int[Array, ""] = 0

    def columns(self, first: int, last: int) -> Float[Array, "count columns"]:
        """Return a block of columns, float32."""
        if isinstance(self.signal, Line):
            return self._columns_of_line(self.signal, first, last)
        if isinstance(self.start, int):
            block = self.signal[self.start : self.start + self.count, first:last]
        else:
            block = lax.dynamic_slice(self.signal, (self.start, first), (self.count, last - first))
        return block.astype(jnp.float32)

    def _columns_of_line(self, line: Line, first: int, last: int) -> Float[Array, "count columns"]:
        """Return a block of columns, of a matrix that begins with the line or a margin later.

        Rows begin somewhere in a row of that matrix, but these columns of every row are one block of it.
        """
        batch, length = line.shape
        if first < LINE_MARGIN and last > length - LINE_MARGIN:
            parts = (first, LINE_MARGIN), (LINE_MARGIN, last)
            return jnp.concatenate([self._columns_of_line(line, *part) for part in parts], axis=1)
        skipped = LINE_MARGIN if first >= LINE_MARGIN else 0
        matrix = line.samples[skipped : skipped + batch * length].reshape(batch, length)
        place = jnp.asarray(self.start, jnp.int32), line.first + (first - skipped)
        return lax.dynamic_slice(matrix, place, (self.count, last - first))


def rows_of(signal: Real[Array, "batch length"] | Line) -> Rows:
    """Return all rows of a signal."""
    return Rows(signal, signal.shape[0])
