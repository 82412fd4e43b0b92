"""Safe output of foreign text on a terminal.

Job names, node names, paths, errors of other processes and words of a manifest may hold rich's
markup or a terminal's control sequences. Both are shown as text.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters except tab and newline, and those that change the direction of writing."""


def visible(text: str) -> str:
    """Return `text` with each control character written as an escape such as \\x1b."""
    return _HIDDEN.sub(lambda found: repr(found.group())[1:-1], text)


class PlainConsole(Console):
    """Console without markup and emoji codes that shows control characters as text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

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


class PlainFormatter(logging.Formatter):
    """Log formatter that shows control characters as text."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))
