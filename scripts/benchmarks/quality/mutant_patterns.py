"""Statement patterns: one place of a module, found by its syntax tree, so that neither formatting nor comments matter.

A pattern is what `ast.unparse` makes of one statement or of several in a row. The body of a compound statement is written `...` and
stands for any body: `if ready: ...` matches by its condition alone, and a replacement of the same kind keeps the body that was there.
"""  # noqa: E501

from __future__ import annotations

import ast
import copy
import textwrap
from typing import Any

BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class PatternError(ValueError):
    """The statements do not stand in that place exactly once."""


def replace_statements(source: str, where: str, old: str, new: str) -> str:
    """Return `source` with the statements `old` replaced by `new` in the function or class `where` ("" for the whole module).

    Raises PatternError unless `old` stands there exactly once.
    """  # noqa: E501
    wanted = parse_pattern(old)
    places = find_places(scope_of(ast.parse(source), where), wanted)
    if len(places) != 1:
        raise PatternError(f"{len(places)} places in {where or 'the module'} match {old!r}")
    found = places[0]
    replacement = [fill_body(statement, found) for statement in parse_pattern(new)]
    lines = source.splitlines(keepends=True)
    indent = " " * found[0].col_offset
    text = "\n".join(ast.unparse(statement) for statement in replacement) or "pass"
    first = first_line(found[0])
    if lines[first - 1].lstrip().startswith("elif"):
        text = "else:\n" + textwrap.indent(text, "    ")
    return "".join(
        [*lines[: first - 1], textwrap.indent(text, indent), "\n", *lines[found[-1].end_lineno :]]
    )


def first_line(statement: ast.stmt) -> int:
    """Line of a statement's first decorator, or of the statement itself."""
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(each.lineno for each in decorators)])


def parse_pattern(text: str) -> list[Any]:
    """Return the statements, or the `except` clauses, of a pattern."""
    if text.startswith("except"):
        (whole,) = ast.parse("try:\n    pass\n" + text).body
        return whole.handlers
    return ast.parse(text).body


def scope_of(tree: ast.Module, where: str) -> ast.AST:
    """Return the definition with the dotted name `where`. Raises PatternError where there is none."""  # noqa: E501
    scope: ast.AST = tree
    for name in filter(None, where.split(".")):
        inner = [
            each for each in ast.walk(scope) if isinstance(each, DEFINITIONS) and each.name == name
        ]
        if not inner:
            raise PatternError(f"no {where} here")
        scope = inner[0]
    return scope


def find_places(scope: ast.AST, wanted: list[ast.stmt]) -> list[list[ast.stmt]]:
    """Return every run of statements inside `scope` that matches `wanted`."""
    places = []
    for node in ast.walk(scope):
        for field in BLOCKS:
            block = getattr(node, field, None)
            if not isinstance(block, list):
                continue
            for start in range(len(block) - len(wanted) + 1):
                run = block[start : start + len(wanted)]
                if all(
                    matches(statement, pattern)
                    for statement, pattern in zip(run, wanted, strict=True)
                ):
                    places.append(run)
    return places


def matches(statement: ast.AST, pattern: ast.AST) -> bool:
    return (
        header(statement) == header(pattern)
        if is_open(pattern)
        else dump(statement) == dump(pattern)
    )


def dump(node: ast.AST) -> str:
    return ast.dump(node)


def is_open(pattern: ast.AST) -> bool:
    """Whether the body of a compound statement is left open by `...`."""
    body = getattr(pattern, "body", None)
    if not isinstance(body, list) or len(body) != 1 or not isinstance(body[0], ast.Expr):
        return False
    value = body[0].value
    return isinstance(value, ast.Constant) and value.value is ...


def header(statement: ast.AST) -> str:
    """Dump of a compound statement without the statements that it holds."""
    bare = copy.copy(statement)
    for field in BLOCKS:
        if isinstance(getattr(bare, field, None), list):
            setattr(bare, field, [])
    return dump(bare)


def fill_body(statement: ast.stmt, found: list[ast.stmt]) -> ast.stmt:
    """Give an open statement of the replacement the blocks of the statement that it replaces."""
    if not is_open(statement):
        return statement
    filled = copy.copy(statement)
    for field in BLOCKS:
        if isinstance(getattr(filled, field, None), list):
            setattr(filled, field, getattr(found[0], field))
    return filled
