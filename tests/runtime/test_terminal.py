"""Text of others on a terminal is text: no markup, no emoji codes, no control sequences."""

import ast
import io
import logging
import re
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from autohet.runtime.process.terminal import PlainConsole, PlainFormatter, visible

ROOT = Path(__file__).parents[2]
EVIL = "[/bold]x [red]y[/] :bomb: \x1b]0;title\x07 \x1b[2J \u202eabc \r."


def shown(thing: object) -> str:
    file = io.StringIO()
    PlainConsole(file=file, width=200, force_terminal=True).print(thing)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["words", "text", "cell", "title"])
def test_outside_text_is_shown_as_it_is(kind: str) -> None:
    table = Table(title=EVIL if kind == "title" else None)
    table.add_column("a", no_wrap=True)
    if kind == "cell":
        table.add_row(EVIL)
    found = shown({"words": EVIL, "text": Text(EVIL)}.get(kind, table))
    for sequence in ("\x1b]0", "\x07", "\x1b[2J", "\u202e"):
        assert sequence not in found
    plain = re.sub(r"\x1b\[[0-9;]*m", "", found)
    if kind != "title":  # which is wrapped to the table's width
        assert "[/bold]x [red]y[/] :bomb: \\x1b]0;title" in plain


def test_styles_of_our_own_stay() -> None:
    assert "\x1b[1m" in shown(Text("bold", style="bold"))


def test_a_log_line_shows_control_characters() -> None:
    record = logging.LogRecord("a", 30, "f", 1, "node %s", ("\x1b[2J\nx",), None)
    assert PlainFormatter("%(message)s").format(record) == "node \\x1b[2J\nx"
    assert visible("a\tb\nç") == "a\tb\nç"


def test_every_console_of_the_product_is_a_plain_one() -> None:
    """A rich Console takes markup from whatever it prints."""
    for path in sorted((ROOT / "autohet").rglob("*.py")):
        if path.name == "terminal.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "Console", f"{path}:{node.lineno}"
