"""What each mark of a picture stands for: the figures behind it, kept as long as the artist that draws it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from ._axes import Axes

if TYPE_CHECKING:
    from matplotlib.artist import Artist

#: Of each artist, the figures of each of its marks by heading; the unit of a number stands in its heading.
_FIGURES: "WeakKeyDictionary[Artist, list[dict[str, Any]]]" = WeakKeyDictionary()


def mark(ax: Axes, artists: "Sequence[Artist]", figures: Mapping[str, Any]) -> None:
    """Keep the figures of marks, a column or one value for all by heading: of one artist, or one mark of each."""
    columns = np.broadcast_arrays(*map(np.asarray, figures.values()))
    rows = [dict(zip(figures, row, strict=True)) for row in zip(*(column.tolist() for column in columns), strict=True)]
    for artist, own in zip(artists, [rows] if len(artists) == 1 else [[row] for row in rows], strict=True):
        artist.set_gid(f"marks-{len(marks(ax))}")
        _FIGURES[artist] = own


def marks(ax: Axes) -> dict[str, list[dict[str, Any]]]:
    """Return the figures behind a picture: of each mark by heading, by the gid of the artist that draws the marks.

    Args:
        ax: an axis that a function of `rlxjax.plot` drew on.

    Examples:
        >>> from matplotlib.figure import Figure
        >>> from rlxjax.calibration import prior_calibration
        >>> from rlxjax.plot import coefficients
        >>> ax = coefficients(prior_calibration("cpu"), ax=Figure().subplots())
        >>> first, *_ = (row for rows in marks(ax).values() for row in rows)
        >>> first["coefficient"], first["unit"]
        ('host_call_ns', 'ns')
    """
    return {str(artist.get_gid()): _FIGURES[artist] for artist in ax.get_children() if artist in _FIGURES}
