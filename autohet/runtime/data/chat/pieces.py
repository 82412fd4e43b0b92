"""Rendering of a chat template that tells which message each piece of the text belongs to.

The template's syntax tree gets calls that print a private character wherever a loop comes to a
message, and where the loop ends. Those characters are taken out of the text again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from jinja2 import Template, nodes
from jinja2.visitor import NodeTransformer

_FIRST = 0xF0000
_NO_MESSAGE = "\U000ffffd"
"""Mark of text that belongs to no message. Message i has the character _FIRST + i."""
_MARK = re.compile("([\U000f0000-\U000ffffd])")
MAX_MESSAGES = 0xFFFD
ASSISTANTS = ("assistant", "model")


class Piece(NamedTuple):
    """Range of characters [begin, end) that one message printed; message None: no message."""

    message: int | None
    begin: int
    end: int


class Rendering(NamedTuple):
    """A conversation as text, in pieces without gaps."""

    text: str
    pieces: list[Piece]

    def of(self, message: int) -> list[Piece]:
        """Return the pieces of a message, without white space that other text parts from them."""
        found = [each for each in self.pieces if each.message == message]
        return [each for each in found if self.text[each.begin : each.end].strip()]

    @property
    def tail(self) -> str:
        """Text after that of all messages."""
        if not self.pieces or self.pieces[-1].message is not None:
            return ""
        return self.text[self.pieces[-1].begin :]

    def message_at(self, place: int) -> int | None:
        """Return the message that printed the character at `place`."""
        for each in self.pieces:
            if each.begin <= place < each.end:
                return each.message
        return None


class _Marker:
    """Prints the marks of one rendering; the template calls its methods.

    What a message quotes of an answer (the name of a call beside its result) belongs to itself.
    """

    def __init__(self, messages: Sequence[Any]) -> None:
        self._messages = messages
        self._index_by_identity = {id(message): i for i, message in enumerate(messages)}
        self._current: int | None = None
        self._outer: list[int | None] = []

    def enter(self) -> str:
        self._outer.append(self._current)
        return ""

    def visit(self, value: Any) -> str:
        index = self._index_by_identity.get(id(value))
        if index is None:
            return ""
        outer = self._outer[-1]
        if outer is not None and not self._is_answer(outer):
            index = outer
        self._current = index
        return chr(_FIRST + index)

    def _is_answer(self, index: int) -> bool:
        return self._messages[index].get("role") in ASSISTANTS

    def leave(self) -> str:
        outer = self._outer.pop()
        if outer == self._current:
            return ""
        self._current = outer
        return _NO_MESSAGE if outer is None else chr(_FIRST + outer)


class _LoopMarker(NodeTransformer):
    """Adds calls of a _Marker to each loop of a syntax tree."""

    def visit_For(self, loop: nodes.For) -> list[nodes.Node]:
        self.generic_visit(loop)
        if isinstance(loop.target, nodes.Name):
            visited = _item_of(loop, loop.target.name)
            loop.body.insert(0, _print_call("autohet_visit", visited))
        return [_print_call("autohet_enter"), loop, _print_call("autohet_leave")]


def _item_of(loop: nodes.For, name: str) -> nodes.Expr:
    """Return the item of an iteration: the loop's variable, or the list's item at that index."""
    is_range = isinstance(loop.iter, nodes.Call) and getattr(loop.iter.node, "name", "") == "range"
    if is_range:
        for item in loop.find_all(nodes.Getitem):
            if isinstance(item.node, nodes.Name) and getattr(item.arg, "name", "") == name:
                return nodes.Getitem(
                    nodes.Name(item.node.name, "load"), nodes.Name(name, "load"), "load"
                )
    return nodes.Name(name, "load")


def _print_call(function: str, *arguments: nodes.Expr) -> nodes.Output:
    call = nodes.Call(nodes.Name(function, "load"), list(arguments), [], None, None)
    return nodes.Output([call])


@lru_cache(maxsize=8)
def _instrument(template: str) -> Template:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(template).environment
    tree = _LoopMarker().visit(environment.parse(template))
    for node in tree.find_all(nodes.Output):
        node.set_lineno(node.lineno or 1)
    tree.set_environment(environment)
    made: Template = environment.from_string(tree)
    return made


def render_pieces(
    template: str, messages: Sequence[Any], variables: Mapping[str, Any]
) -> Rendering:
    """Render messages by `template` with `variables`; errors are those of the template."""
    from transformers.utils.chat_template_utils import _alias_reasoning_fields

    messages = _alias_reasoning_fields([dict(message) for message in messages])
    marker = _Marker(messages)
    marked = _instrument(template).render(
        messages=messages,
        autohet_enter=marker.enter,
        autohet_visit=marker.visit,
        autohet_leave=marker.leave,
        **variables,
    )
    pieces: list[Piece] = []
    text = ""
    current: int | None = None
    for part in _MARK.split(marked):
        if _MARK.fullmatch(part):
            current = None if part == _NO_MESSAGE else ord(part) - _FIRST
        elif part:
            begin = len(text)
            text += part
            if pieces and pieces[-1].message == current:
                begin = pieces.pop().begin
            pieces.append(Piece(current, begin, len(text)))
    return Rendering(text, pieces)
