"""Deciding functions are generators: one that is called without `yield from` decides nothing."""

import ast
from pathlib import Path

CONTROL = Path(__file__).resolve().parents[2] / "autohet/control"
DECIDES = ("Effects", "Deciding", "Iterator")


def called_name(node: ast.AST) -> str:
    """Return the name of the function or method that a call names; empty for other nodes."""
    if not isinstance(node, ast.Call):
        return ""
    called = node.func
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def deciding_functions(tree: ast.AST) -> set[str]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {
        each.name
        for each in functions
        if each.returns is not None and ast.unparse(each.returns).partition("[")[0] in DECIDES
    }


def dropped_calls(tree: ast.AST, deciding: set[str]) -> list[tuple[int, str]]:
    """Return line and name of each call of a deciding function without `yield from`.

    `Round.collect` takes the effects of a whole tick, and a buyer's decision is a value.
    """
    received: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.YieldFrom):
            received.add(node.value)
        if called_name(node) == "collect":
            received.update(node.args)  # type: ignore[attr-defined]
    return [
        (node.lineno, called_name(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and called_name(node) in deciding
        and node not in received
        and ast.unparse(node.func) != "memory.buyer.decide"
    ]


def test_effects_of_every_deciding_function_are_received() -> None:
    paths = sorted(CONTROL.rglob("*.py"))
    trees = {str(path): ast.parse(path.read_text()) for path in paths}
    deciding = set().union(*map(deciding_functions, trees.values()))
    assert {"step", "decide", "log_death", "record"} <= deciding
    dropped = {name: dropped_calls(tree, deciding) for name, tree in trees.items()}
    assert {name: calls for name, calls in dropped.items() if calls} == {}


def test_a_dropped_call_is_found() -> None:
    source = """
def log(memory) -> Effects:
    yield 1

def step(memory) -> Deciding[State]:
    log(memory)
    yield from log(memory)
    found = log(memory)
    return step(memory) or (yield from step(memory))
"""
    tree = ast.parse(source)
    assert dropped_calls(tree, deciding_functions(tree)) == [(6, "log"), (8, "log"), (9, "step")]
