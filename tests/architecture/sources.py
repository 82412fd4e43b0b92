"""The product's modules and their syntax trees, read once by all tests of a process."""

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("planner", "recovery", "autohet")
BLOCKS = ("body", "orelse", "handlers", "finalbody", "cases")
"""Fields that hold statements, or the parts of `try` and `match` that hold them."""


@functools.cache
def paths() -> Mapping[str, Path]:
    """Return the file of each module by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path
    return found


@functools.cache
def trees() -> Mapping[Path, ast.Module]:
    """Return the syntax tree of each module by its path below the root."""
    return {path.relative_to(ROOT): ast.parse(path.read_text()) for path in paths().values()}


def inner_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what stands directly in the blocks of a statement or module; expressions are left out,
    which are most of a tree and hold no definition and no import.
    """
    for field in BLOCKS:
        yield from getattr(node, field, ())


def all_statements(node: ast.AST) -> Iterator[ast.AST]:
    for inner in inner_statements(node):
        yield inner
        yield from all_statements(inner)
