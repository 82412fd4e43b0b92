"""Safe output of foreign text on a terminal.

Job names, node names, paths, errors of other processes and words of a manifest may hold rich's
markup or a terminal's control sequences. Both are shown as text.
"""

import logging
import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters except tab and newline, and those that change the direction of writing."""


def visible(text: str) -> str:
    """Return `text` with each control character written as an escape such as \\x1b."""
    return _HIDDEN.sub(lambda found: repr(found.group())[1:-1], text)


class PlainConsole(Console):
    """Console without markup and emoji codes that shows control characters as text.

    Tables are printed without a cut word or number, whatever the width.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as Console.print does, with tables fitted to the width (`fit`)."""
        fitted = [fit(each, self) if isinstance(each, Table) else each for each in objects]
        super().print(*fitted, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape the text and render it as Console.render_str does.

        It is escaped first, so that a cell is as wide as its visible text.
        """
        return super().render_str(visible(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render as Console.render does, with the content of Text objects escaped, too."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else visible(segment.text)
            yield Segment(text, segment.style, segment.control)


def fit(table: Table, console: Console) -> RenderableType:
    """Return a table that fits the console's width without a cut word or number.

    The widest columns are narrowed first, to their longest word at most. If that is not enough,
    each row becomes lines, one for each column. Changes the table's columns.
    """
    measured = console.options.update(max_width=_UNBOUNDED)
    natural = []
    least = []
    for column in table.columns:
        contents = [column.header, *column.cells]
        cells = [Measurement.get(console, measured, each) for each in contents]
        natural.append(max(cell.maximum for cell in cells))
        shortest = max(cell.minimum for cell in cells)
        least.append(natural[-1] if column.no_wrap else shortest)
    frame = Measurement.get(console, measured, table).maximum - sum(natural)
    room = console.width - frame
    if sum(natural) <= room:
        return table
    if sum(least) > room:
        return _as_lines(table, console)
    widths = list(natural)
    while sum(widths) > room:
        narrowable = [i for i, width in enumerate(widths) if width > least[i]]
        widest = max(narrowable, key=lambda i: widths[i])
        widths[widest] -= 1
    for column, width in zip(table.columns, widths, strict=True):
        column.width = width
    return table


_UNBOUNDED = 10_000


def _as_lines(table: Table, console: Console) -> Group:
    """Return the table's rows as lines: the first cell, then the others by their headers."""
    lines = [Text("")]
    if table.title:
        lines.append(_one_line(table.title, console))
    headers = [_one_line(column.header, console) for column in table.columns]
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        texts = [_one_line(cell, console) for cell in cells]
        lines.append(texts[0])
        for header, text in zip(headers[1:], texts[1:], strict=True):
            if text:
                lines.append(Text.assemble("  ", header, ": ", text))
    return Group(*lines)


def _one_line(cell: Any, console: Console) -> Text:
    text = cell if isinstance(cell, Text) else console.render_str(str(cell))
    return Text(" ").join(text.split("\n")) if "\n" in text.plain else text


class PlainFormatter(logging.Formatter):
    """Log formatter that shows control characters as text."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))
