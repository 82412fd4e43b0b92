"""Limits of what a reader must hold in mind: parameters of a function, methods of a class, lines of
an expression as the formatter lays it out.
"""

import ast
import functools
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("planner", "recovery", "autohet")
MAX_PARAMETERS = 6
MAX_METHODS = 20
MAX_TOKENS = 655_400
"""Limit on the tokens of all code, which only falls: what adds something deletes as much elsewhere.
"""
SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
"""Kinds of tokens that are no code."""
MAX_LINES = 4
"""Lines of a comprehension: two of content, and one for each bracket."""
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

LONG_TODAY: dict[str, int] = {}
"""Files with longer comprehensions, and their number. The list only becomes shorter."""
NESTED_TODAY: dict[str, int] = {}
"""Files with a conditional expression inside another, and their number."""

Function = ast.FunctionDef | ast.AsyncFunctionDef

GIVEN_BY_OTHERS = {
    "autohet/runtime/models/layers/attention.py _ChunkedAttention.forward": (
        "torch.autograd.Function"
    ),
    "autohet/runtime/models/layers/attention.py attention": "attention function of transformers",
    "autohet/runtime/models/layers/linear_loss.py _LinearCrossEntropy.forward": (
        "torch.autograd.Function"
    ),
    "autohet/runtime/spmd/collectives.py FactoredLinear.forward": "torch.autograd.Function",
}
"""Functions whose parameters another library prescribes, and which."""


@functools.cache
def trees() -> tuple[tuple[str, ast.Module], ...]:
    """Return the path and the syntax tree of every module."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return tuple((str(path.relative_to(ROOT)), ast.parse(path.read_text())) for path in paths)


def named(tree: ast.AST, kinds: type | tuple[type, ...], prefix: str = "") -> Iterator:
    """Yield (qualified name, node) of each definition of `kinds`."""
    for node in ast.iter_child_nodes(tree):
        name = getattr(node, "name", None)
        inner = prefix
        if isinstance(node, ast.ClassDef | Function) and name is not None:
            inner = f"{prefix}{name}."
            if isinstance(node, kinds):
                yield f"{prefix}{name}", node
        yield from named(node, kinds, inner)


def num_parameters(function: Function) -> int:
    """Return the number of parameters, keyword-only ones too, without `self` and `cls`."""
    arguments = function.args
    names = [each.arg for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]
    if names[:1] in (["self"], ["cls"]):
        names = names[1:]
    return len(names) + (arguments.vararg is not None) + (arguments.kwarg is not None)


def num_methods(kind: ast.ClassDef) -> int:
    return sum(isinstance(each, Function) for each in kind.body)


def test_parameters_are_counted():
    tree = ast.parse("class A:\n    def f(self, a, /, b, *c, d, **e): ...\n")
    ((name, function),) = named(tree, Function)
    assert (name, num_parameters(function)) == ("A.f", 5)


def test_functions_have_few_parameters():
    found = {
        f"{path} {name}"
        for path, tree in trees()
        for name, function in named(tree, Function)
        if num_parameters(function) > MAX_PARAMETERS
    }
    assert found - GIVEN_BY_OTHERS.keys() == set(), (
        "group parameters that travel together in a dataclass"
    )


def test_classes_have_few_methods():
    found = {
        f"{path} {name}"
        for path, tree in trees()
        for name, kind in named(tree, ast.ClassDef)
        if num_methods(kind) > MAX_METHODS
    }
    assert found == set(), "a class of so many methods has two concerns"


def num_tokens(text: str, tree: ast.Module) -> int:
    """Return the number of tokens of a module without comments and docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node):
            first = node.body[0]
            assert first.end_lineno is not None
            docstrings.update(range(first.lineno, first.end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(t.type not in SILENT and t.start[0] not in docstrings for t in tokens)


def test_tokens_are_counted_without_words():
    text = '"""What it is."""\n\nx = f(1)  # why\n\n\ndef g():\n    """Do."""\n'
    assert num_tokens(text, ast.parse(text)) == 11


def test_the_code_does_not_grow():
    total = sum(num_tokens((ROOT / path).read_text(), tree) for path, tree in trees())
    assert total <= MAX_TOKENS, "delete what the change makes useless"


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
