"""Limits of what one expression may hold, as the formatter lays it out."""

import ast
from collections import Counter
from collections.abc import Iterator

from tests.architecture.test_sizes import trees

MAX_LINES = 4
"""Lines of a comprehension: two of content, and one for each bracket."""
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

LONG_TODAY: dict[str, int] = {}
"""Files with longer comprehensions, and their number. The list only becomes shorter."""
NESTED_TODAY: dict[str, int] = {}
"""Files with a conditional expression inside another, and their number."""


def long_comprehensions(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS):
            assert node.end_lineno is not None
            if node.end_lineno - node.lineno + 1 > MAX_LINES:
                yield node


def nested_conditionals(tree: ast.AST) -> Iterator[ast.IfExp]:
    """Yield each conditional expression that holds another one, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            parts = (node.test, node.body, node.orelse)
            if any(isinstance(each, ast.IfExp) for part in parts for each in ast.walk(part)):
                yield node


def too_many(found: Counter[str], allowed: dict[str, int]) -> dict[str, int]:
    """Return the count of each file that has more than it is allowed."""
    return {path: count for path, count in found.items() if count > allowed.get(path, 0)}


def test_long_comprehensions_are_found():
    short = "a = [\n    x\n    for x in y\n]\n"
    long = "b = {\n    x: z\n    for x in y\n    if x\n}\n"
    argument = "c = sum(\n    x\n    for x in y\n    if x\n)\n"
    found = [node.lineno for node in long_comprehensions(ast.parse(short + long + argument))]
    assert found == [5, 10]


def test_nested_conditionals_are_found():
    lines = [
        "a = 1 if b else 2",
        "a = 1 if b else 2 if c else 3",
        "a = (1 if b else 2) if c else 3",
        "a = f(1 if b else 2) if c else 3",
        "a = (1 if b else 2) + (3 if c else 4)",
        "a = 1 if (b if c else d) else 2",
    ]
    found = [node.lineno for node in nested_conditionals(ast.parse("\n".join(lines)))]
    assert found == [2, 3, 4, 6]


def test_comprehensions_fit_on_two_lines():
    found = Counter(path for path, tree in trees() for _ in long_comprehensions(tree))
    assert too_many(found, LONG_TODAY) == {}, "name a part, or write a loop or a function"


def test_conditional_expressions_hold_no_other():
    found = Counter(path for path, tree in trees() for _ in nested_conditionals(tree))
    assert too_many(found, NESTED_TODAY) == {}, "write if and elif, or a function"
