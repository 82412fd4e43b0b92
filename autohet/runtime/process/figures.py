"""Figures of matplotlib, which is an optional package: their class, and writing them."""

from pathlib import Path
from typing import Any

from planner.errors import ConfigError
from planner.inputs.documents import refuse_unwritable


def figure_class() -> Any:
    """Return matplotlib's class of figures. Raises ConfigError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--picture needs matplotlib: pip install 'autohet[picture]'") from None
    return Figure


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a figure in the format of the path's ending. Raises ConfigError if it cannot."""
    from matplotlib import rc_context

    # Text of an SVG stays text: it can be searched, and is small.
    with refuse_unwritable(path, "picture "), rc_context({"svg.fonttype": "none"}):
        figure.savefig(path, dpi=150)
