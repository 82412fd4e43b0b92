"""Limits of what a reader must hold in mind: parameters of a function, methods of a class, lines of
an expression as the formatter lays it out.
"""

import ast
import functools
import io
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

from tests.architecture.sources import ROOT, inner_statements, trees

MAX_PARAMETERS = 6
MAX_METHODS = 20
MAX_TOKENS = 679_869
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

Function = ast.FunctionDef | ast.AsyncFunctionDef

GIVEN_BY_OTHERS = {
    "autohet/runtime/models/layers/chunked_attention.py ChunkedAttention.forward": (
        "torch.autograd.Function"
    ),
    "autohet/runtime/models/layers/attention.py attention": "attention function of transformers",
    "autohet/runtime/models/layers/linear_loss.py _LinearCrossEntropy.forward": (
        "torch.autograd.Function"
    ),
    "autohet/runtime/spmd/collectives.py FactoredLinear.forward": "torch.autograd.Function",
}
"""Functions whose parameters another library prescribes, and which."""


def named(tree: ast.AST, kinds: type | tuple[type, ...], prefix: str = "") -> Iterator:
    """Yield (qualified name, node) of each definition of `kinds`."""
    for node in inner_statements(tree):
        inner = prefix
        if isinstance(node, ast.ClassDef | Function):
            inner = f"{prefix}{node.name}."
            if isinstance(node, kinds):
                yield f"{prefix}{node.name}", node
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
        for path, tree in trees().items()
        for name, function in named(tree, Function)
        if num_parameters(function) > MAX_PARAMETERS
    }
    assert found - GIVEN_BY_OTHERS.keys() == set(), (
        "group parameters that travel together in a dataclass"
    )


def test_classes_have_few_methods():
    found = {
        f"{path} {name}"
        for path, tree in trees().items()
        for name, kind in named(tree, ast.ClassDef)
        if num_methods(kind) > MAX_METHODS
    }
    assert found == set(), "a class of so many methods has two concerns"


def num_tokens(text: str, tree: ast.Module) -> int:
    """Return the number of tokens of a module without comments and docstrings."""
    docstrings: set[int] = set()
    definitions = [node for _, node in named(tree, (ast.ClassDef, *get_args(Function)))]
    for node in (tree, *definitions):
        if ast.get_docstring(node, clean=False):
            first = node.body[0]
            assert first.end_lineno is not None
            docstrings.update(range(first.lineno, first.end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(t.type not in SILENT and t.start[0] not in docstrings for t in tokens)


def test_tokens_are_counted_without_words():
    text = '"""What it is."""\n\nx = f(1)  # why\n\n\ndef g():\n    """Do."""\n'
    assert num_tokens(text, ast.parse(text)) == 11


def test_the_code_does_not_grow():
    total = sum(num_tokens((ROOT / path).read_text(), tree) for path, tree in trees().items())
    assert total <= MAX_TOKENS, "delete what the change makes useless"


@functools.cache
def expressions(path: Path) -> list[ast.expr]:
    """Return all comprehensions and conditional expressions of a module."""
    kinds = (*COMPREHENSIONS, ast.IfExp)
    return [node for node in ast.walk(trees()[path]) if isinstance(node, kinds)]


def is_long_comprehension(node: ast.expr) -> bool:
    assert node.end_lineno is not None
    return isinstance(node, COMPREHENSIONS) and node.end_lineno - node.lineno + 1 > MAX_LINES


def is_nested_conditional(node: ast.expr) -> bool:
    """True for a conditional expression that holds another one, at any depth."""
    return isinstance(node, ast.IfExp) and any(
        isinstance(each, ast.IfExp) for each in ast.walk(node) if each is not node
    )


def find(text: str, wanted: Callable[[ast.expr], bool]) -> list[int]:
    """Return the lines of the expressions that are `wanted`."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.expr)]
    return [node.lineno for node in nodes if wanted(node)]


def count(wanted: Callable[[ast.expr], bool]) -> dict[Path, int]:
    """Return the number of `wanted` expressions of each file that has some."""
    return dict(Counter(path for path in trees() for node in expressions(path) if wanted(node)))


def test_long_comprehensions_are_found():
    short = "a = [\n    x\n    for x in y\n]\n"
    long = "b = {\n    x: z\n    for x in y\n    if x\n}\n"
    argument = "c = sum(\n    x\n    for x in y\n    if x\n)\n"
    assert find(short + long + argument, is_long_comprehension) == [5, 10]


def test_nested_conditionals_are_found():
    lines = [
        "a = 1 if b else 2",
        "a = 1 if b else 2 if c else 3",
        "a = (1 if b else 2) if c else 3",
        "a = f(1 if b else 2) if c else 3",
        "a = (1 if b else 2) + (3 if c else 4)",
        "a = 1 if (b if c else d) else 2",
    ]
    assert find("\n".join(lines), is_nested_conditional) == [2, 3, 4, 6]


def test_comprehensions_fit_on_two_lines():
    assert count(is_long_comprehension) == {}, "name a part, or write a loop or a function"


def test_conditional_expressions_hold_no_other():
    assert count(is_nested_conditional) == {}, "write if and elif, or a function"
