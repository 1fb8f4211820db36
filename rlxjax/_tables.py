"""Tables of many rows, in chunks that stay in a processor's caches."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

CHUNK_ROWS = 2**18


def map_rows(f: Callable[..., Any], *rows: Any) -> Any:
    """Return `f(*rows)`, that of a large table chunk by chunk.

    Of a formula with many terms, what lies between columns and results takes more memory than both; a chunk's
    stays in cache, and reverse mode computes it anew.

    Args:
        f: each of whose results is of the shape that the rows broadcast to, and depends row by row on them.
        rows: pytrees of scalars and of arrays `[*batch]`.
    """
    leaves, structure = jax.tree.flatten(rows)
    shape = jnp.broadcast_shapes(*map(jnp.shape, leaves))
    size = math.prod(shape)
    count = max(1, round(size / CHUNK_ROWS))
    if count == 1:
        return f(*rows)

    def of_columns(columns: dict[int, jax.Array]) -> Any:
        return f(*structure.unflatten(columns.get(place, leaf) for place, leaf in enumerate(leaves)))

    columns = {
        place: jnp.broadcast_to(leaf, shape).reshape(-1) for place, leaf in enumerate(leaves) if jnp.ndim(leaf) > 0
    }
    whole = size - size % count
    chunks = jax.tree.map(lambda column: column[:whole].reshape(count, -1), columns)
    parts = [jax.lax.map(jax.checkpoint(of_columns), chunks)]
    if whole < size:
        parts.append(of_columns(jax.tree.map(lambda column: column[whole:], columns)))
    return jax.tree.map(lambda *part: jnp.concatenate([rows.reshape(-1) for rows in part]).reshape(shape), *parts)
