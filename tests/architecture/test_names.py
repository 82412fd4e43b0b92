"""One public name of a module means one thing in the whole product."""

import ast
from collections import defaultdict
from pathlib import Path

from tests.architecture.sources import trees

ROLES = {
    "add_options": "every command of autohet.cli",
    "run": "every command, and every part of the benchmarks",
    "step": "every state of the controller",
    "show": "every display of a benchmark or command",
    "draw": "every picture",
}
"""Functions that modules of one kind share, so that they can be called alike."""
ALIKE = {
    "cross_entropy_sum": "the same sum, of whole rows in a graph and of rows cut over a group",
    "ec2_client": "the same client, made for a region and for a queue",
}
"""Names of one meaning with more than one place."""


def definitions(path: Path, tree: ast.Module) -> list[tuple[str, str]]:
    """Return (name, code that tells its meaning) of a module's public classes, functions and type
    aliases.
    """
    found = []
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.append((statement.name, str(path)))
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            value = "" if statement.value is None else ast.unparse(statement.value)
            found += [(name, value) for name in names if not name.isupper() and name != "logger"]
    return [(name, meaning) for name, meaning in found if not name.startswith("_")]


def test_a_public_name_has_one_meaning() -> None:
    places = defaultdict(list)
    meanings = defaultdict(set)
    for path, tree in trees().items():
        for name, meaning in definitions(path, tree):
            places[name].append(str(path))
            meanings[name].add(meaning)
    several = {name for name, found in meanings.items() if len(found) > 1}
    wrong = {name: places[name] for name in sorted(several - ROLES.keys() - ALIKE.keys())}
    assert not wrong, "give one of them a name of its own"
    assert ROLES.keys() | ALIKE.keys() <= several, "an exception that is no longer needed"
